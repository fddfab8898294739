"""Initial weights, keyed by parameter name: the same on every rank and in every layout.

The distributions are in the layers; this module gives each parameter a random stream of its own
and writes any range of it, tile by tile, without holding the rest.
"""

from __future__ import annotations

import hashlib

import numpy as np

from mpisim.nn.arrays import Initial, wide_dtype
from mpisim.nn.layers import Arrays
from mpisim.nn.models import Model

TILE_NUMBERS = 1 << 13
"""Numbers that `fill_param` draws at a time."""
INIT_SCRATCH_BYTES = 12 * TILE_NUMBERS + 8
"""Working space of `fill_param` for a normal parameter: a tile in float64 and one in float32, and
the scale as an array of 8 bytes. The same for every dtype and range but an empty one, which needs
none of the tiles."""


def rng_for_name(seed: int, name: str) -> np.random.Generator:
    """Return the random stream of one named thing.

    Parameters
    ----------
    seed : int
        The run's seed, >= 0.
    name : str
        Full parameter name, such as ``block0.linear.weight``.

    Returns
    -------
    numpy.random.Generator
        Philox keyed with the first 128 bits of the SHA-256 of seed and name, at its start. It
        depends on nothing else: not on the rank, the order of calls, or what other names exist.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def init_params(model: Model, seed: int, dtype: np.dtype | str) -> Arrays:
    """Draw all parameters of a model.

    Parameters
    ----------
    model : Model
        What to initialise.
    seed : int
        The run's seed, >= 0.
    dtype : numpy.dtype or str
        float32, float64, float16 or bfloat16. Numbers are drawn in float64 and rounded, so a
        float32 model starts at the rounded weights of the float64 one, and a 16-bit model at the
        rounded weights of the float32 one, its master.

    Returns
    -------
    dict of str to ndarray
        Keyed by full name, in registration order; each parameter once, by the block that owns it.
        The layers' docstrings give the distributions.
    """
    params = {}
    for block in model.blocks:
        fresh = block.init(
            lambda local, name=block.name: rng_for_name(seed, f"{name}.{local}"), np.dtype(dtype)
        )
        params.update((f"{block.name}.{local}", array) for local, array in fresh.items())
    return params


def fill_param(model: Model, seed: int, name: str, out: np.ndarray, lo: int = 0) -> None:
    """Write elements ``[lo, lo + out.size)`` of a flattened parameter.

    Parameters
    ----------
    model : Model
        What is initialised.
    seed : int
        The run's seed, >= 0.
    name : str
        Full name of the parameter, as its block owns it.
    out : ndarray of shape (n,), float64, float32, float16 or bfloat16
        Receives the elements, bit for bit those of ``init_params(model, seed, out.dtype)``.
    lo : int
        First element, >= 0. The end is not checked: a stream has no end.

    Raises
    ------
    KeyError
        No block owns a parameter of that name.
    ValueError
        `lo` is negative.

    Notes
    -----
    The elements before `lo` are drawn and thrown away: the number of words that a normal number
    takes from the stream depends on the words, so none can be skipped. Memory:
    `INIT_SCRATCH_BYTES`, whatever the parameter's size and the range.
    """
    if lo < 0:
        raise ValueError(f"lo must be at least 0; got {lo}. Count elements from 0.")
    initial = initial_of(model, name)
    if not initial.scale:
        out.fill(initial.constant)
        return
    if not out.size:
        return
    rng = rng_for_name(seed, name)
    draws = np.empty(TILE_NUMBERS, np.float64)
    rounded = np.empty(TILE_NUMBERS, np.float32)
    is_wide = wide_dtype(out.dtype) == out.dtype
    for start in range(0, lo, TILE_NUMBERS):
        rng.standard_normal(out=draws[: min(TILE_NUMBERS, lo - start)])
    for start in range(0, out.size, TILE_NUMBERS):
        part = out[start : start + TILE_NUMBERS]
        tile = draws[: part.size]
        rng.standard_normal(out=tile)
        np.multiply(tile, initial.scale, out=tile)
        if not is_wide:
            # 16-bit weights are the rounded float32 ones.
            rounded[: part.size] = tile
            tile = rounded[: part.size]
        part[...] = tile


def initial_of(model: Model, name: str) -> Initial:
    """Return how the parameter of this full name starts.

    Raises
    ------
    KeyError
        No block owns a parameter of that name.
    """
    for block in model.blocks:
        inner = name.removeprefix(f"{block.name}.")
        if inner == name or inner not in block.param_names:
            continue
        for layer_name, layer in block.layers:
            local = inner.removeprefix(f"{layer_name}.")
            if local != inner and local in layer.param_names:
                return layer.initial(local)
    raise KeyError(f"name must be a parameter of the model; got {name!r}. Take it from the specs.")
