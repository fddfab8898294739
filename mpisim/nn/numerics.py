"""Reductions and tiling that layers, losses and optimizers share.

Element-wise chains run over tiles that stay in the cache, so their scratch is bounded whatever
the size of the array. No layers and no update rules here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

TILE_ELEMENTS = 16384
"""Elements per tile: 64 KiB of float32, 128 KiB of float64; fits the second-level cache."""
ROW_TILE = 2 * TILE_ELEMENTS
"""Elements of a tile of whole rows: reductions of short rows gain from fewer, longer calls."""
ROW_BLOCK = 32
"""Rows of attention weights handled together: they share the columns that none of them sees."""


def tile_slices(count: int, tile: int = TILE_ELEMENTS) -> Iterator[slice]:
    """Yield the slices that cut `count` elements into tiles of at most `tile` elements."""
    for start in range(0, count, tile):
        yield slice(start, min(start + tile, count))


def flat_view(array: np.ndarray) -> np.ndarray:
    """Return `array` as one dimension without copying it.

    Parameters
    ----------
    array : ndarray
        C-contiguous.

    Returns
    -------
    ndarray of shape (array.size,)
        A view: writing to it writes to `array`.

    Raises
    ------
    ValueError
        `array` is not C-contiguous, so a flat view of it does not exist.
    """
    if not array.flags.c_contiguous:
        raise ValueError(
            f"array must be C-contiguous to be updated in place; got strides {array.strides} "
            f"for shape {array.shape}. Pass np.ascontiguousarray(array)."
        )
    return array.reshape(-1)


def squared_norm(grad: np.ndarray, scratch: np.ndarray | None = None) -> float:
    """Return the sum of squares of all elements, accumulated in float64.

    Parameters
    ----------
    grad : ndarray, float32 or float64
        Any shape. Not modified.
    scratch : ndarray of shape (s,), float64, s >= 1, optional
        Working space for float32, used up to one tile; without it one tile is allocated.

    Returns
    -------
    float
        Sum of squares; 0.0 for an empty array, inf or nan when `grad` holds one.

    Notes
    -----
    float32 values are widened tile by tile, so values up to the float32 maximum neither overflow
    nor need a float64 copy of the whole array. Other bits with a `scratch` below one tile.
    """
    flat = grad.reshape(-1)
    if not flat.size:
        return 0.0
    if flat.dtype == np.float64:
        return float(np.dot(flat, flat))
    if scratch is None:
        scratch = np.empty(min(flat.size, TILE_ELEMENTS), dtype=np.float64)
    scratch = scratch[:TILE_ELEMENTS]
    total = 0.0
    for tile in tile_slices(flat.size, scratch.size):
        wide = scratch[: tile.stop - tile.start]
        np.copyto(wide, flat[tile])
        total += float(np.dot(wide, wide))
    return total
