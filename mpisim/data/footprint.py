"""Bytes of batches and of sampling, from sizes alone: no data is loaded for them.

The data sets answer with these formulas, and the static check uses them without a data set. What
a data set keeps in memory is its `nbytes`. Exact but for batches of no rows, for whose arrays NumPy
takes a byte or two each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpisim.config.schema import RunConfig

SAMPLING_TILE = 1024
"""Indices that the sampler permutes at a time."""
SAMPLING_CONSTANTS = 22
"""Numbers of 8 bytes that the permutation of one call uses: six and at most 16 round keys."""
COUNTING_TILE = 1 << 14
"""Targets that `Batch.num_targets` looks at in one go."""

_ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def token_row_bytes(length: int, layout: str) -> int:
    """Return the bytes of a row of the decoder: x, targets and, packed, starts; int32."""
    return 4 * length * (3 if layout == "packed" else 2)


def window_row_bytes(window: int) -> int:
    """Return the bytes of a window of bytes and its target."""
    return window + 1


def regression_row_bytes(
    num_features: int, num_targets: int, itemsize: int, feature_itemsize: int | None = None
) -> int:
    """Return the bytes of a row of features and targets of `itemsize` bytes a value."""
    return num_features * (feature_itemsize or itemsize) + num_targets * itemsize


def batch_bytes(config: RunConfig, rows: int, length: int | None = None) -> int:
    """Return the bytes of a batch as the data set gives it.

    Parameters
    ----------
    config : RunConfig
    rows : int
    length : int, optional
        Tokens of a row (decoder); None: data.window.
    """
    data = config.data
    if config.model.kind == "decoder":
        return rows * token_row_bytes(length or data.window, data.layout)
    if data.kind == "regression":
        itemsize = _ITEMSIZES[config.model.dtype]
        return rows * regression_row_bytes(data.num_features, data.num_targets, itemsize)
    return rows * window_row_bytes(data.window)


def held_batch_bytes(
    config: RunConfig,
    rows: int,
    length: int | None = None,
    *,
    inputs: bool = True,
    targets: bool = True,
) -> int:
    """Return the bytes of a batch as a rank keeps it: features in the dtype of computation.

    `inputs`, `targets`: the rank keeps them, because it has the first, or the last, stage.
    """
    data, compute = config.data, config.precision.compute
    if config.model.kind == "decoder":
        width = length or data.window
        return 4 * rows * width * (inputs + targets + (data.layout == "packed"))
    if data.kind == "regression":
        itemsize = _ITEMSIZES[config.model.dtype]
        held = itemsize if compute == "same" else _ITEMSIZES[compute]
        return rows * regression_row_bytes(
            data.num_features * inputs, data.num_targets * targets, itemsize, held
        )
    return rows * (data.window * inputs + targets)


def counting_bytes(rows: int, length: int | None) -> int:
    """Return the most bytes that `Batch.num_targets` takes; `length` None: one target a row."""
    size = rows * (length or 0)
    # NumPy makes an array of the number -1, and one of the dtype of the targets.
    return max(min(size, COUNTING_TILE) + 4, 12) if size else 0


def sampling_bytes(rows: int) -> int:
    """Return the bytes of a rank's sample numbers of a step, alive while it runs."""
    return 8 * rows


def sampling_peak_bytes(rows: int) -> int:
    """Return the most bytes of new arrays alive during `Sampler.batch_indices`, result included.

    `count_targets` takes nothing beside the numbers it is given.
    """
    tile = min(rows, SAMPLING_TILE)
    return 8 * rows + (4 * 8 + 1) * tile + 8 * SAMPLING_CONSTANTS * bool(rows)
