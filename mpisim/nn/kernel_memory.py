"""Working memory of the kernels, as arithmetic on sizes: what each call allocates at its fullest.

One function beside each function of `kernels.Kernels`, for both sets. Layers put them together in
their `spec`; no array is made here. `kernels_numpy`, `kernels_numba` and `halves` are what these
lines follow, and change together with them.

What is counted: data buffers of new NumPy arrays at the fullest moment of the call, results
included. Arguments are C-contiguous; ids, targets, starts and positions are int32. NumPy turns a
scalar operand into an array for as long as the operation runs, of `itemsize` bytes in these
kernels: with zero rows no operation runs. An empty array counts 0; NumPy allocates 1 byte for it,
and what zero rows cost beside is not counted either, less than 32 bytes.

Sizes: rows N, width D, batch B, time T, as in `kernels`; `itemsize` is that of the arrays, 4 or 8.
"""

from __future__ import annotations

import numpy as np

from mpisim.layouts.specs import Conditions, Tape
from mpisim.nn.arrays import wide_dtype
from mpisim.nn.numerics import ROW_BLOCK, ROW_TILE, TILE_ELEMENTS

_BOOL, _INT32, _INT64, _FLOAT64 = 1, 4, 8, 8
CAST_BYTES = 6
"""NumPy's casts to and from bfloat16 hold an element of either dtype while they run."""


def _tile_rows(rows: int, width: int) -> int:
    """Return how many rows the largest tile of the NumPy set has."""
    return min(rows, max(1, ROW_TILE // max(1, width)))


def _scalar(size: int, itemsize: int, conditions: Conditions) -> int:
    """Return the bytes of a scalar operand: only the NumPy set has one, if it has any elements."""
    return itemsize if size and conditions.kernels == "numpy" else 0


def _rounding(size: int, itemsize: int) -> int:
    """Return what NumPy allocates to round a scalar for the Numba set: nothing for float64."""
    return 4 if size and itemsize == 4 else 0


def widen_peak(size: int, dtype: np.dtype, conditions: Conditions, *, out: bool = False) -> int:
    """Return the bytes of widening `size` elements of a 16-bit `dtype`; `out`: into an array."""
    result = 0 if out else size * 4
    return result + _cast_scratch(size, dtype, conditions, tile_bytes=2 + _BOOL)


def narrow_peak(size: int, dtype: np.dtype, conditions: Conditions, *, out: bool = False) -> int:
    """Return the bytes of rounding `size` float32 elements to a 16-bit `dtype`."""
    result = 0 if out else size * 2
    return result + _cast_scratch(size, dtype, conditions, tile_bytes=4 + 4 + _BOOL)


def _cast_scratch(size: int, dtype: np.dtype, conditions: Conditions, tile_bytes: int) -> int:
    if conditions.kernels == "numba":
        return 0
    if np.dtype(dtype) == np.float16:
        return min(size, TILE_ELEMENTS) * tile_bytes + _scalar(size, 4, conditions)
    return CAST_BYTES


def widen(tape: Tape, size: int, dtype: np.dtype, conditions: Conditions) -> int:
    """Write `LayerContext.wide` of `size` elements on the tape and return the bytes it leaves.

    0 bytes for float32 and float64, which are passed on as they are.
    """
    if np.dtype(dtype).itemsize != 2:
        return 0
    tape.call(peak=widen_peak(size, dtype, conditions), left=size * 4)
    return size * 4


def narrow(tape: Tape, size: int, dtype: np.dtype, conditions: Conditions) -> int:
    """Write `LayerContext.narrow` of `size` wide elements to `dtype` on the tape; as `widen`."""
    if np.dtype(dtype).itemsize != 2:
        return 0
    tape.call(peak=narrow_peak(size, dtype, conditions), left=size * 2)
    return size * 2


def narrow_result(tape: Tape, size: int, dtype: np.dtype, conditions: Conditions) -> None:
    """Write on the tape that a wide result is rounded to `dtype` and freed, if it is 16 bits."""
    if narrow(tape, size, dtype, conditions):
        tape.free(size * wide_dtype(dtype).itemsize)


def rms_norm_peak(rows: int, width: int, itemsize: int, conditions: Conditions) -> int:
    """Return the bytes of `rms_norm`: y, rstd."""
    return (rows * width + rows) * itemsize + _scalar(rows, itemsize, conditions)


def rms_norm_backward_peak(rows: int, width: int, itemsize: int, conditions: Conditions) -> int:
    """Return the bytes of `rms_norm_backward`: dx, dweight and scratch."""
    results = (rows * width + width) * itemsize
    if conditions.kernels == "numba":
        return results
    tile = _tile_rows(rows, width)
    scratch = (2 * tile * width + tile + width) * itemsize
    return results + scratch + _scalar(rows, itemsize, conditions)


def _rotary_scratch(
    batch: int, time: int, heads: int, head_size: int, itemsize: int, conditions: Conditions
) -> int:
    if conditions.kernels == "numba" or not batch * time:
        return 0
    half = head_size // 2
    tile = min(batch, max(1, ROW_TILE // max(1, time * heads * half))) * time
    scratch = tile * heads * half * itemsize + itemsize  # and the scale
    if conditions.starts:
        scratch += tile * (_INT64 + 2 * half * itemsize)
    return scratch


def rotary_split_peak(
    batch: int,
    time: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    itemsize: int,
    conditions: Conditions,
) -> int:
    """Return the bytes of `rotary_split`: q, k, v; scratch is freed before v is made."""
    head = batch * time * head_size * itemsize
    scratch = _rotary_scratch(batch, time, heads, head_size, itemsize, conditions)
    return (heads + kv_heads) * head + max(scratch, kv_heads * head)


def rotary_merge_peak(
    batch: int,
    time: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    itemsize: int,
    conditions: Conditions,
) -> int:
    """Return the bytes of `rotary_merge`: dqkv and scratch."""
    result = batch * time * (heads + 2 * kv_heads) * head_size * itemsize
    return result + _rotary_scratch(batch, time, heads, head_size, itemsize, conditions)


def _softmax_rows(
    batch: int, heads: int, time: int, itemsize: int, conditions: Conditions
) -> tuple[int, int, int]:
    """Return bytes of a number per row of the largest block, of the masks, and of a block."""
    block_rows = min(ROW_BLOCK, time)
    if conditions.kernels == "numba" or not batch * heads * time:
        return 0, 0, 0
    if conditions.starts:
        masks = time * _INT32 + block_rows * time * _BOOL
        return heads * block_rows * itemsize, masks, heads * block_rows * time * itemsize
    # The first block of rows has the shortest rows, so it takes the most matrices together.
    matrices = min(batch * heads, max(1, ROW_TILE // (block_rows * block_rows)))
    block = min(batch * heads * block_rows * time, max(ROW_TILE, block_rows * time))
    return matrices * block_rows * itemsize, 0, block * itemsize


def causal_softmax_peak(
    batch: int, heads: int, time: int, itemsize: int, conditions: Conditions
) -> int:
    """Return the bytes of `causal_softmax`: no results."""
    numbers, masks, _ = _softmax_rows(batch, heads, time, itemsize, conditions)
    return numbers + masks


def causal_softmax_backward_peak(
    batch: int, heads: int, time: int, itemsize: int, conditions: Conditions
) -> int:
    """Return the bytes of `causal_softmax_backward`: no results."""
    return sum(_softmax_rows(batch, heads, time, itemsize, conditions))


def swiglu_peak(rows: int, hidden: int, itemsize: int, conditions: Conditions) -> int:
    """Return the bytes of `swiglu`: z, of `hidden` columns."""
    return rows * hidden * itemsize + _scalar(rows, itemsize, conditions)


def swiglu_backward_peak(rows: int, hidden: int, itemsize: int, conditions: Conditions) -> int:
    """Return the bytes of `swiglu_backward`: dgate_up, of twice `hidden` columns, and scratch."""
    result = 2 * rows * hidden * itemsize
    if conditions.kernels == "numba":
        return result
    scratch = 2 * _tile_rows(rows, hidden) * hidden * itemsize
    return result + scratch + _scalar(rows, itemsize, conditions)


def gelu_peak(size: int, itemsize: int, conditions: Conditions) -> int:
    """Return the bytes of `gelu`: y."""
    return size * itemsize + _scalar(size, itemsize, conditions)


def gelu_backward_peak(size: int, itemsize: int, conditions: Conditions) -> int:
    """Return the bytes of `gelu_backward`: dx and scratch."""
    if conditions.kernels == "numba":
        return size * itemsize
    scratch = 2 * min(size, TILE_ELEMENTS) * itemsize
    return size * itemsize + scratch + _scalar(size, itemsize, conditions)


def cross_entropy_peak(rows: int, vocab: int, itemsize: int, conditions: Conditions) -> int:
    """Return the bytes of `cross_entropy`: no results, one loss a row and scratch of one tile."""
    if conditions.kernels == "numba" or not rows:
        return 0
    tile = _tile_rows(rows, vocab)
    scratch = tile * (3 * _INT64 + 2 * _FLOAT64 + 2 * itemsize + _BOOL)
    return rows * _FLOAT64 + scratch + _INT64


def cross_entropy_backward_peak(
    rows: int, vocab: int, itemsize: int, conditions: Conditions
) -> int:
    """Return the bytes of `cross_entropy_backward`: no results, four numbers a row."""
    if conditions.kernels == "numba" or not rows:
        return _rounding(rows, itemsize)
    return rows * (2 * _INT64 + itemsize + _BOOL) + _INT64


def apply_dropout_peak(
    size: int, itemsize: int, conditions: Conditions, *, out: bool = False
) -> int:
    """Return the bytes of `apply_dropout`: y, unless it is handed in, and scratch."""
    result = 0 if out else size * itemsize
    if conditions.kernels == "numba":
        # The threshold, before the result is made.
        return max(result, _INT64 if size else 0)
    return result + min(size, TILE_ELEMENTS) * _BOOL + _scalar(size, _INT64, conditions)


def embedding_backward_peak(vocab_size: int, width: int, itemsize: int) -> int:
    """Return the bytes of `embedding_backward`: dweight."""
    return vocab_size * width * itemsize


def adamw_update_peak(size: int, itemsize: int, conditions: Conditions) -> int:
    """Return the bytes of `adamw_update` with scratch, the kernel's or that of `optim`."""
    if conditions.kernels == "numba":
        return _rounding(size, itemsize)
    return _scalar(size, itemsize, conditions)


def sgd_update_peak(size: int, itemsize: int) -> int:
    """Return the bytes of `optim.sgd_update` with scratch: NumPy computes it with both sets."""
    return itemsize if size else 0


def squared_norm_peak(
    size: int, itemsize: int, conditions: Conditions, *, scratch: bool = False
) -> int:
    """Return the bytes of `squared_norm`; `scratch`: with a float64 tile handed in."""
    if conditions.kernels == "numba":
        return 0
    tile = 0 if scratch or itemsize == 8 else min(size, TILE_ELEMENTS) * _FLOAT64
    return tile + (_FLOAT64 if size else 0)
