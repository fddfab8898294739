"""The NumPy kernel set: the reference, and the path without Numba. See `kernels.Kernels`.

Chains of element-wise operations run tile by tile, so that all but the first find their operands
in the cache. Scalars have the arrays' dtype, so no float64 slips into float32 work, and NumPy
allocates one element for each and no more.

What a call allocates depends on the shapes of its arguments alone, never on values:
`kernel_memory` predicts it. So scratch is made once per call, operands of one operation have one
dtype (NumPy copies short arrays to cast them), and what a mask picks is never gathered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import numpy as np

from mpisim.nn.halves import float32_to_half, half_to_float32
from mpisim.nn.numerics import (
    ROW_BLOCK,
    ROW_TILE,
    TILE_ELEMENTS,
    flat_view,
    squared_norm,
    tile_slices,
)

__all__ = [
    "adamw_update",
    "apply_dropout",
    "causal_softmax",
    "causal_softmax_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "embedding_backward",
    "forget",
    "gelu",
    "gelu_backward",
    "name",
    "narrow",
    "prepare",
    "rms_norm",
    "rms_norm_backward",
    "rotary_merge",
    "rotary_split",
    "squared_norm",
    "swiglu",
    "swiglu_backward",
    "widen",
]

name = "numpy"

_P = ParamSpec("_P")
_R = TypeVar("_R")

_GELU_SCALE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715
_LATER_KEYS = np.triu(np.ones((ROW_BLOCK, ROW_BLOCK), dtype=bool), k=1)
"""True where the key comes after the query, for a square on the diagonal; a part of it serves a
smaller square. Made at import: it is no part of a step's memory."""
_LATER_KEYS.flags.writeable = False


def _quiet(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """Silence NumPy's floating-point warnings: inf and nan pass through, the engine judges them.

    A fresh errstate per call, since one object must not be shared by threads.
    """

    @functools.wraps(kernel)
    def quiet_kernel(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with np.errstate(all="ignore"):
            return kernel(*args, **kwargs)

    return quiet_kernel


def _row_tiles(num_rows: int, width: int) -> Iterator[slice]:
    """Cut rows into tiles of at least one row and about ROW_TILE elements."""
    return tile_slices(num_rows, max(1, ROW_TILE // max(1, width)))


def _tile_rows(num_rows: int, width: int) -> int:
    """Return how many rows the largest of `_row_tiles` has."""
    return min(num_rows, max(1, ROW_TILE // max(1, width)))


def _tile_scratch(count: int, num_rows: int, width: int, dtype: np.dtype) -> list[np.ndarray]:
    """Return arrays for the largest of `_row_tiles`.

    Allocated once per call: a fresh array of this size in each tile is returned to the system and
    its pages are faulted in again.
    """
    rows = _tile_rows(num_rows, width)
    return [np.empty((rows, width), dtype=dtype) for _ in range(count)]


def prepare(*dtypes: np.dtype) -> None:
    """Do nothing: NumPy's functions are compiled."""


def forget() -> None:
    """Do nothing: there are no files."""


@_quiet
def rms_norm(x_ND: np.ndarray, weight_D: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(y_ND, rstd_N)``; scratch: none."""
    num_rows, width = x_ND.shape
    real = x_ND.dtype.type
    one, size, eps = real(1), real(width), real(eps)
    y_ND = np.empty((num_rows, width), dtype=x_ND.dtype)
    rstd_N = np.empty(num_rows, dtype=x_ND.dtype)
    for rows in _row_tiles(num_rows, width):
        x, y, rstd = x_ND[rows], y_ND[rows], rstd_N[rows]
        np.multiply(x, x, out=y)
        np.add.reduce(y, axis=1, out=rstd)
        rstd /= size
        rstd += eps
        np.sqrt(rstd, out=rstd)
        np.divide(one, rstd, out=rstd)
        np.multiply(x, rstd[:, np.newaxis], out=y)
        y *= weight_D
    return y_ND, rstd_N


@_quiet
def rms_norm_backward(
    dy_ND: np.ndarray, x_ND: np.ndarray, weight_D: np.ndarray, rstd_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(dx_ND, dweight_D)``; scratch: two tiles, a column and a row."""
    num_rows, width = x_ND.shape
    size = x_ND.dtype.type(width)
    dx_ND = np.empty((num_rows, width), dtype=x_ND.dtype)
    dweight_D = np.zeros(width, dtype=x_ND.dtype)
    units, works = _tile_scratch(2, num_rows, width, x_ND.dtype)
    means = np.empty(len(units), dtype=x_ND.dtype)
    addend_D = np.empty(width, dtype=x_ND.dtype)
    for rows in _row_tiles(num_rows, width):
        dy, dx, rstd = dy_ND[rows], dx_ND[rows], rstd_N[rows, np.newaxis]
        unit, work, mean = units[: len(dx)], works[: len(dx)], means[: len(dx)]
        np.multiply(x_ND[rows], rstd, out=unit)
        np.multiply(dy, unit, out=work)
        np.add.reduce(work, axis=0, out=addend_D)
        dweight_D += addend_D
        work *= weight_D
        np.add.reduce(work, axis=1, out=mean)
        mean /= size
        unit *= mean[:, np.newaxis]
        np.multiply(dy, weight_D, out=dx)
        dx -= unit
        dx *= rstd
    return dx_ND, dweight_D


def _each_rotation(
    cos_PK2: np.ndarray,
    sin_PK2: np.ndarray,
    positions_N: np.ndarray | None,
    shape_BTH: tuple[int, int, int],
) -> Iterator[tuple[slice, np.ndarray, np.ndarray, np.ndarray]]:
    """Cut the batch into tiles of whole rows.

    Yields ``(rows, cos, sin, work)``: the angles of their positions, shape (1 or rows, T, 1, K / 2)
    and flat scratch for half of their queries.
    """
    batch, time, heads = shape_BTH
    half = cos_PK2.shape[1]
    if not batch * time:
        return
    num_rows = min(batch, max(1, ROW_TILE // max(1, time * heads * half)))
    work = np.empty(num_rows * time * heads * half, dtype=cos_PK2.dtype)
    cos, sin = cos_PK2[np.newaxis, :time, np.newaxis], sin_PK2[np.newaxis, :time, np.newaxis]
    if positions_N is not None:
        places = np.empty(num_rows * time, dtype=np.intp)
        cosines, sines = np.empty((2, num_rows * time, half), dtype=cos_PK2.dtype)
    for rows in tile_slices(batch, num_rows):
        if positions_N is not None:
            place = places[: (rows.stop - rows.start) * time]
            np.copyto(place, positions_N[rows.start * time : rows.stop * time])
            # Any mode but "raise" writes to `out` without a copy of it.
            np.take(cos_PK2, place, axis=0, out=cosines[: place.size], mode="clip")
            np.take(sin_PK2, place, axis=0, out=sines[: place.size], mode="clip")
            cos = cosines[: place.size].reshape(-1, time, 1, half)
            sin = sines[: place.size].reshape(-1, time, 1, half)
        yield rows, cos, sin, work


def _rotate(
    x1: np.ndarray,
    x2: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    y1: np.ndarray,
    y2: np.ndarray,
    work: np.ndarray,
) -> None:
    """Write ``x1 cos - x2 sin`` to y1 and ``x2 cos + x1 sin`` to y2.

    With the two halves in each other's place it turns back: that is the transpose.
    """
    product = work[: x1.size].reshape(x1.shape)
    np.multiply(x1, cos, out=y1)
    np.multiply(x2, sin, out=product)
    y1 -= product
    np.multiply(x2, cos, out=y2)
    np.multiply(x1, sin, out=product)
    y2 += product


@_quiet
def rotary_split(
    qkv_NC: np.ndarray,
    cos_PK2: np.ndarray,
    sin_PK2: np.ndarray,
    positions_N: np.ndarray | None,
    batch: int,
    heads: int,
    kv_heads: int,
    scale: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``(q_BHTK, k_BGTK, v_BGTK)``; scratch: a tile of half queries and their angles."""
    half = cos_PK2.shape[1]
    time = qkv_NC.shape[0] // batch if batch else 0
    rows_BTHK = qkv_NC.reshape(batch, time, heads + 2 * kv_heads, 2 * half)
    q_BHTK = np.empty((batch, heads, time, 2 * half), dtype=qkv_NC.dtype)
    k_BGTK = np.empty((batch, kv_heads, time, 2 * half), dtype=qkv_NC.dtype)
    shape_BTH = (batch, time, max(heads, kv_heads))
    for rows, cos, sin, work in _each_rotation(cos_PK2, sin_PK2, positions_N, shape_BTH):
        for out, first in ((q_BHTK, 0), (k_BGTK, heads)):
            x = rows_BTHK[rows, :, first : first + out.shape[1]]
            y = out[rows].transpose(0, 2, 1, 3)
            _rotate(x[..., :half], x[..., half:], cos, sin, y[..., :half], y[..., half:], work)
        q_BHTK[rows] *= q_BHTK.dtype.type(scale)
    # What the last tile leaves is freed before v is made.
    cos = sin = work = None
    # A copy even where the transposed view is contiguous: a result owns its memory.
    v_BGTK = np.array(rows_BTHK[:, :, heads + kv_heads :].transpose(0, 2, 1, 3), order="C")
    return q_BHTK, k_BGTK, v_BGTK


@_quiet
def rotary_merge(
    dq_BHTK: np.ndarray,
    dk_BGTK: np.ndarray,
    dv_BGTK: np.ndarray,
    cos_PK2: np.ndarray,
    sin_PK2: np.ndarray,
    positions_N: np.ndarray | None,
    scale: float,
) -> np.ndarray:
    """Return dqkv_NC; scratch: a tile of half queries and their angles."""
    batch, heads, time, size = dq_BHTK.shape
    kv_heads, half = dk_BGTK.shape[1], size // 2
    dqkv_BTCK = np.empty((batch, time, heads + 2 * kv_heads, size), dtype=dq_BHTK.dtype)
    shape_BTH = (batch, time, max(heads, kv_heads))
    for rows, cos, sin, work in _each_rotation(cos_PK2, sin_PK2, positions_N, shape_BTH):
        for grad, first in ((dq_BHTK, 0), (dk_BGTK, heads)):
            x = grad[rows].transpose(0, 2, 1, 3)
            y = dqkv_BTCK[rows, :, first : first + grad.shape[1]]
            _rotate(x[..., half:], x[..., :half], cos, sin, y[..., half:], y[..., :half], work)
        queries = dqkv_BTCK[rows, :, :heads]
        queries *= queries.dtype.type(scale)
    dqkv_BTCK[:, :, heads + kv_heads :] = dv_BGTK.transpose(0, 2, 1, 3)
    return dqkv_BTCK.reshape(batch * time, (heads + 2 * kv_heads) * size)


def _softmax_blocks(
    shape_BHTS: tuple[int, ...], starts_BT: np.ndarray | None
) -> Iterator[tuple[slice, slice, slice, np.ndarray]]:
    """Cut a stack of (T, T) matrices into blocks that hold all visible keys of their rows.

    Yields ``(matrices, rows, columns, hidden)``: which of the B * H matrices, which rows, the
    columns that any of these rows sees, and True where a row does not see one of the last
    ``hidden.shape[1]`` of these columns.
    """
    batch, heads, time, _ = shape_BHTS
    if starts_BT is not None and batch * heads * time:
        starts_BT = np.asarray(starts_BT, dtype=np.int32)
        keys_T = np.arange(time, dtype=np.int32)
        # As large as the mask of a row without a start: how far columns reach depends on values.
        masks = np.empty(min(ROW_BLOCK, time) * time, dtype=bool)
    for rows in tile_slices(time, ROW_BLOCK):
        num_rows = rows.stop - rows.start
        later = _LATER_KEYS[:num_rows, :num_rows]
        if starts_BT is None:
            per_tile = max(1, ROW_TILE // (num_rows * rows.stop))
            for matrices in tile_slices(batch * heads, per_tile):
                yield matrices, rows, slice(0, rows.stop), later
            continue
        for b in range(batch if heads else 0):
            starts = starts_BT[b, rows, np.newaxis]
            columns = slice(int(starts.min()), rows.stop)
            keys = keys_T[columns]
            hidden = masks[: num_rows * keys.size].reshape(num_rows, keys.size)
            np.less(keys, starts, out=hidden)
            hidden[:, rows.start - columns.stop :] |= later
            yield slice(b * heads, (b + 1) * heads), rows, columns, hidden


def _block_elements(shape_BHTS: tuple[int, ...], starts_BT: np.ndarray | None) -> int:
    """Return an upper bound of the elements of `_softmax_blocks`, from shapes alone."""
    batch, heads, time, _ = shape_BHTS
    matrix = min(ROW_BLOCK, time) * time
    if starts_BT is not None:
        return heads * matrix if batch else 0
    return min(batch * heads * matrix, max(ROW_TILE, matrix))


def _matrices(array_BHTS: np.ndarray) -> np.ndarray:
    """Return the view (B * H, T, T)."""
    batch, heads, time, _ = array_BHTS.shape
    assert array_BHTS.flags.c_contiguous, array_BHTS.strides
    return array_BHTS.reshape(batch * heads, time, time)


def _clear_hidden(matrices: np.ndarray, columns: slice, hidden: np.ndarray) -> None:
    """Make exactly 0 what rows of whole matrices do not see."""
    # In the block, exp(-inf) is 0 already, but not in a row that turned into nan.
    np.copyto(
        matrices[..., columns.stop - hidden.shape[1] : columns.stop],
        matrices.dtype.type(0),
        where=hidden,
    )
    matrices[..., : columns.start].fill(0)
    matrices[..., columns.stop :].fill(0)


@_quiet
def causal_softmax(scores_BHTS: np.ndarray, starts_BT: np.ndarray | None) -> None:
    """Turn scores into weights in place; scratch: masks, and a number per row of a block."""
    stack = _matrices(scores_BHTS)
    minus_inf = stack.dtype.type(-math.inf)
    for matrices, rows, columns, hidden in _softmax_blocks(scores_BHTS.shape, starts_BT):
        block = stack[matrices, rows, columns]
        np.copyto(block[..., -hidden.shape[1] :], minus_inf, where=hidden)
        block -= np.maximum.reduce(block, axis=2, keepdims=True)
        np.exp(block, out=block)
        block /= np.add.reduce(block, axis=2, keepdims=True)
        _clear_hidden(stack[matrices, rows], columns, hidden)


@_quiet
def causal_softmax_backward(
    probs_BHTS: np.ndarray, dprobs_BHTS: np.ndarray, starts_BT: np.ndarray | None
) -> None:
    """Turn dprobs into dscores in place; scratch: masks, one block, a number per row of it."""
    probs_stack, stack = _matrices(probs_BHTS), _matrices(dprobs_BHTS)
    zero = stack.dtype.type(0)
    products = np.empty(_block_elements(dprobs_BHTS.shape, starts_BT), dtype=stack.dtype)
    for matrices, rows, columns, hidden in _softmax_blocks(dprobs_BHTS.shape, starts_BT):
        probs, block = probs_stack[matrices, rows, columns], stack[matrices, rows, columns]
        np.copyto(block[..., -hidden.shape[1] :], zero, where=hidden)
        product = products[: block.size].reshape(block.shape)
        np.multiply(probs, block, out=product)
        block -= np.add.reduce(product, axis=2, keepdims=True)
        block *= probs
        _clear_hidden(stack[matrices, rows], columns, hidden)


def _one_plus_exp_minus(x: np.ndarray, out: np.ndarray) -> None:
    """Write ``1 + exp(-x)``, the reciprocal of sigmoid(x), to `out`."""
    np.negative(x, out=out)
    np.exp(out, out=out)
    out += out.dtype.type(1)


@_quiet
def swiglu(gate_up_N2F: np.ndarray) -> np.ndarray:
    """Return z_NF; no scratch beside the result."""
    num_rows, hidden = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
    z_NF = np.empty((num_rows, hidden), dtype=gate_up_N2F.dtype)
    for rows in _row_tiles(num_rows, hidden):
        gate, up, z = gate_up_N2F[rows, :hidden], gate_up_N2F[rows, hidden:], z_NF[rows]
        _one_plus_exp_minus(gate, z)
        np.divide(gate, z, out=z)
        z *= up
    return z_NF


@_quiet
def swiglu_backward(dz_NF: np.ndarray, gate_up_N2F: np.ndarray) -> np.ndarray:
    """Return dgate_up_N2F; scratch: two tiles."""
    num_rows, hidden = dz_NF.shape
    dgate_up_N2F = np.empty((num_rows, 2 * hidden), dtype=dz_NF.dtype)
    one = dz_NF.dtype.type(1)
    sigmoids, slopes = _tile_scratch(2, num_rows, hidden, dz_NF.dtype)
    for rows in _row_tiles(num_rows, hidden):
        gate, up, dz = gate_up_N2F[rows, :hidden], gate_up_N2F[rows, hidden:], dz_NF[rows]
        dgate, dup = dgate_up_N2F[rows, :hidden], dgate_up_N2F[rows, hidden:]
        sigmoid, slope = sigmoids[: len(dz)], slopes[: len(dz)]
        _one_plus_exp_minus(gate, sigmoid)
        np.divide(one, sigmoid, out=sigmoid)
        np.subtract(one, sigmoid, out=slope)
        slope *= gate
        slope += one
        sigmoid *= dz
        np.multiply(sigmoid, gate, out=dup)
        sigmoid *= up
        np.multiply(sigmoid, slope, out=dgate)
    return dgate_up_N2F


def _half_one_plus_tanh(x: np.ndarray, out: np.ndarray) -> None:
    """Write ``(1 + tanh(u(x))) / 2`` to `out`."""
    real = out.dtype.type
    np.multiply(x, x, out=out)
    out *= real(_GELU_CUBIC)
    out += real(1)
    out *= x
    out *= real(_GELU_SCALE)
    np.tanh(out, out=out)
    out += real(1)
    out *= real(0.5)


@_quiet
def gelu(x: np.ndarray) -> np.ndarray:
    """Return gelu(x); no scratch beside the result."""
    y = np.empty(x.shape, dtype=x.dtype)
    x_flat, y_flat = flat_view(np.ascontiguousarray(x)), flat_view(y)
    for tile in tile_slices(x_flat.size):
        _half_one_plus_tanh(x_flat[tile], y_flat[tile])
        y_flat[tile] *= x_flat[tile]
    return y


@_quiet
def gelu_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of gelu at `x`; scratch: two tiles."""
    dx = np.empty(x.shape, dtype=x.dtype)
    x_flat, dy_flat = flat_view(np.ascontiguousarray(x)), flat_view(np.ascontiguousarray(dy))
    dx_flat = flat_view(dx)
    real = x.dtype.type
    one, cubic_3, scale_2 = real(1), real(3 * _GELU_CUBIC), real(2 * _GELU_SCALE)
    halves, slopes = np.empty((2, min(x.size, TILE_ELEMENTS)), dtype=x.dtype)
    for tile in tile_slices(x_flat.size):
        x_tile, dx_tile = x_flat[tile], dx_flat[tile]
        half, slope = halves[: x_tile.size], slopes[: x_tile.size]
        _half_one_plus_tanh(x_tile, half)
        np.multiply(x_tile, x_tile, out=slope)
        slope *= cubic_3
        slope += one
        slope *= scale_2
        slope *= x_tile
        # dx = half * (1 + slope * (1 - half)), the product rule with tanh' = 4 half (1 - half)
        np.subtract(one, half, out=dx_tile)
        dx_tile *= slope
        dx_tile += one
        dx_tile *= half
        dx_tile *= dy_flat[tile]
    return dx


@_quiet
def cross_entropy(logits_NV: np.ndarray, targets_N: np.ndarray) -> tuple[float, int]:
    """Turn logits into probabilities in place, return ``(loss_sum, num_correct)``.

    Scratch: a loss per row, and eight numbers per row of a tile.
    """
    num_rows, vocab = logits_NV.shape
    assert logits_NV.flags.c_contiguous, logits_NV.strides
    if num_rows and int(targets_N.max()) >= vocab:
        raise IndexError(f"targets must be below {vocab}; got {targets_N.max()}.")
    losses_N = np.zeros(num_rows, dtype=np.float64)
    num_correct = 0
    per_tile = _tile_rows(num_rows, vocab)
    places, bests = np.empty((2, per_tile), dtype=np.intp)
    logs, picked_64 = np.empty((2, per_tile), dtype=np.float64)
    sums, picked = np.empty((2, per_tile), dtype=logits_NV.dtype)
    masks = np.empty(per_tile, dtype=bool)
    firsts = np.arange(per_tile, dtype=np.intp)
    firsts *= np.intp(vocab)
    for rows in _row_tiles(num_rows, vocab):
        block = logits_NV[rows]
        flat, tile = block.reshape(-1), slice(0, len(block))
        first, place, best, mask = firsts[tile], places[tile], bests[tile], masks[tile]
        np.copyto(place, targets_N[rows])
        np.argmax(block, axis=1, out=best)
        np.equal(place, best, out=mask)
        num_correct += int(np.count_nonzero(mask))
        best += first
        np.take(flat, best, out=sums[tile], mode="clip")
        block -= sums[tile, np.newaxis]
        np.greater_equal(place, np.intp(0), out=mask)
        # Rows without a target pick some element of the block and add nothing to the losses.
        place += first
        np.take(flat, place, out=picked[tile], mode="clip")
        np.exp(block, out=block)
        np.add.reduce(block, axis=1, out=sums[tile])
        block /= sums[tile, np.newaxis]
        np.copyto(logs[tile], sums[tile])
        np.log(logs[tile], out=logs[tile])
        np.copyto(picked_64[tile], picked[tile])
        np.subtract(logs[tile], picked_64[tile], out=losses_N[rows], where=mask)
    return float(np.add.reduce(losses_N)), num_correct


@_quiet
def cross_entropy_backward(probs_NV: np.ndarray, targets_N: np.ndarray, seed: float) -> None:
    """Turn probabilities into dlogits in place; scratch: four numbers per row."""
    num_rows, vocab = probs_NV.shape
    assert probs_NV.flags.c_contiguous, probs_NV.strides
    if not num_rows:
        return
    seed = probs_NV.dtype.type(seed)
    flat = probs_NV.reshape(-1)
    ignored_N, picked_N = np.empty(num_rows, dtype=bool), np.empty(num_rows, dtype=flat.dtype)
    places_N = np.empty(num_rows, dtype=np.intp)
    firsts_N = np.arange(0, num_rows * vocab, vocab, dtype=np.intp)
    np.copyto(places_N, targets_N)
    np.less(places_N, np.intp(0), out=ignored_N)
    np.maximum(places_N, np.intp(0), out=places_N)
    places_N += firsts_N
    probs_NV *= seed
    np.take(flat, places_N, out=picked_N, mode="clip")
    picked_N -= seed
    flat[places_N] = picked_N
    # NumPy makes an index per ignored row, which is less than what was freed before.
    del firsts_N, places_N, picked_N
    if ignored_N.any():
        probs_NV[ignored_N] = 0.0


@_quiet
def apply_dropout(
    x: np.ndarray,
    words: np.ndarray,
    threshold: int,
    factor: float,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the kept elements times `factor`, 0 for the others; scratch: one tile of bits."""
    real, limit = x.dtype.type, np.uint64(threshold)
    y = np.empty(x.shape, dtype=x.dtype) if out is None else out
    x_flat, words_flat = flat_view(np.ascontiguousarray(x)), words.reshape(-1)
    y_flat = flat_view(y)
    masks = np.empty(min(x.size, TILE_ELEMENTS), dtype=bool)
    for tile in tile_slices(x_flat.size):
        dropped = masks[: tile.stop - tile.start]
        np.greater_equal(words_flat[tile], limit, out=dropped)
        np.multiply(x_flat[tile], real(factor), out=y_flat[tile])
        np.copyto(y_flat[tile], real(0), where=dropped)
    return y


@_quiet
def embedding_backward(ids_N: np.ndarray, dy_ND: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return dweight_VD; no scratch."""
    dweight_VD = np.zeros((vocab_size, dy_ND.shape[1]), dtype=dy_ND.dtype)
    # np.add.at takes three times as long, and np.add.reduceat has another order of additions.
    for token, dy in zip(ids_N.tolist(), dy_ND, strict=True):
        row = dweight_VD[token]
        np.add(row, dy, out=row)
    return dweight_VD


@_quiet
def adamw_update(
    param: np.ndarray,
    grad: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    *,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    shrink: float,
    grad_scale: float = 1.0,
    scratch: np.ndarray | None = None,
) -> None:
    """Take one AdamW step on flat arrays in place, tile by tile through `scratch`.

    Beside the scratch, one element is allocated at a time.
    """
    if scratch is None:
        scratch = np.empty(max(1, min(param.size, TILE_ELEMENTS)), dtype=param.dtype)
    scratch = scratch[:TILE_ELEMENTS]
    if not param.size:
        return
    real = param.dtype.type
    # The rests are taken in float64, then rounded.
    rest1, rest2 = real(1.0 - float(beta1)), real(1.0 - float(beta2))
    rate, beta1, beta2, eps = real(rate), real(beta1), real(beta2), real(eps)
    # Compared before rounding: a factor next to 1 is a factor.
    scaled, shrunk = float(grad_scale) != 1.0, float(shrink) != 1.0
    shrink, grad_scale = real(shrink), real(grad_scale)
    for tile in tile_slices(param.size, scratch.size):
        p, g, m_tile, v_tile = param[tile], grad[tile], m[tile], v[tile]
        work = scratch[: p.size]
        if scaled:
            np.multiply(g, grad_scale, out=work)
            work *= rest1
        else:
            np.multiply(g, rest1, out=work)
        m_tile *= beta1
        m_tile += work
        if scaled:
            # The product again, rounded as before: cheaper than a second tile of scratch.
            np.multiply(g, grad_scale, out=work)
            work *= work
        else:
            np.multiply(g, g, out=work)
        work *= rest2
        v_tile *= beta2
        v_tile += work
        np.sqrt(v_tile, out=work)
        work += eps
        np.divide(m_tile, work, out=work)
        work *= rate
        if shrunk:
            p *= shrink
        p -= work


@_quiet
def widen(x16: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the float32 array of the same values."""
    if x16.dtype == np.float16:
        return half_to_float32(x16, out)
    if out is None:
        return x16.astype(np.float32, order="C")
    np.copyto(out, x16)
    return out


@_quiet
def narrow(x32: np.ndarray, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
    """Return the array rounded to `dtype`."""
    if dtype == np.float16 and x32.dtype == np.float32:
        return float32_to_half(x32, out)
    if out is None:
        return x32.astype(dtype, order="C")
    np.copyto(out, x32, casting="unsafe")
    return out
