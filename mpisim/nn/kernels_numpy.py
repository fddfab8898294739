"""The NumPy kernel set: the reference, and the path without Numba. See `kernels.Kernels`.

Chains of element-wise operations run tile by tile, so that all but the first find their operands
in the cache. Scalars are Python floats throughout: they take the arrays' dtype in NumPy 1.26 and
2.x alike, so no float64 slips into float32 work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import numpy as np

from mpisim.nn.halves import float32_to_half, half_to_float32
from mpisim.nn.numerics import TILE_ELEMENTS, flat_view, squared_norm, tile_slices

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
_ROW_TILE = 2 * TILE_ELEMENTS
"""Elements of a tile of whole rows: reductions of short rows gain from fewer, longer calls."""
_ROW_BLOCK = 32
"""Rows of attention weights handled together: they share the columns that none of them sees."""


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
    """Cut rows into tiles of at least one row and about _ROW_TILE elements."""
    return tile_slices(num_rows, max(1, _ROW_TILE // max(1, width)))


def _tile_scratch(count: int, num_rows: int, width: int, dtype: np.dtype) -> list[np.ndarray]:
    """Return arrays for the largest of `_row_tiles`.

    Allocated once per call: a fresh array of this size in each tile is returned to the system and
    its pages are faulted in again.
    """
    rows = min(num_rows, max(1, _ROW_TILE // max(1, width)))
    return [np.empty((rows, width), dtype=dtype) for _ in range(count)]


def prepare(*dtypes: np.dtype) -> None:
    """Do nothing: NumPy's functions are compiled."""


def forget() -> None:
    """Do nothing: there are no files."""


@_quiet
def rms_norm(x_ND: np.ndarray, weight_D: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(y_ND, rstd_N)``; scratch: none."""
    num_rows, width = x_ND.shape
    eps = float(eps)
    y_ND = np.empty((num_rows, width), dtype=x_ND.dtype)
    rstd_N = np.empty(num_rows, dtype=x_ND.dtype)
    for rows in _row_tiles(num_rows, width):
        x, y, rstd = x_ND[rows], y_ND[rows], rstd_N[rows]
        np.multiply(x, x, out=y)
        np.add.reduce(y, axis=1, out=rstd)
        rstd /= width
        rstd += eps
        np.sqrt(rstd, out=rstd)
        np.divide(1.0, rstd, out=rstd)
        np.multiply(x, rstd[:, np.newaxis], out=y)
        y *= weight_D
    return y_ND, rstd_N


@_quiet
def rms_norm_backward(
    dy_ND: np.ndarray, x_ND: np.ndarray, weight_D: np.ndarray, rstd_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(dx_ND, dweight_D)``; scratch: two tiles."""
    num_rows, width = x_ND.shape
    dx_ND = np.empty((num_rows, width), dtype=x_ND.dtype)
    dweight_D = np.zeros(width, dtype=x_ND.dtype)
    units, works = _tile_scratch(2, num_rows, width, x_ND.dtype)
    for rows in _row_tiles(num_rows, width):
        dy, dx, rstd = dy_ND[rows], dx_ND[rows], rstd_N[rows, np.newaxis]
        unit, work = units[: len(dx)], works[: len(dx)]
        np.multiply(x_ND[rows], rstd, out=unit)
        np.multiply(dy, unit, out=work)
        dweight_D += np.add.reduce(work, axis=0)
        work *= weight_D
        mean = np.add.reduce(work, axis=1, keepdims=True)
        mean /= width
        unit *= mean
        np.multiply(dy, weight_D, out=dx)
        dx -= unit
        dx *= rstd
    return dx_ND, dweight_D


def _angles(
    table_PK2: np.ndarray, positions_N: np.ndarray | None, batch: int, time: int
) -> np.ndarray:
    """Return the table's rows for all positions, with a dim of 1 for the heads."""
    if positions_N is None:
        return table_PK2[np.newaxis, :time, np.newaxis]
    return table_PK2[positions_N].reshape(batch, time, 1, -1)


def _rotate(
    x1: np.ndarray, x2: np.ndarray, cos: np.ndarray, sin: np.ndarray, y1: np.ndarray, y2: np.ndarray
) -> None:
    """Write ``x1 cos - x2 sin`` to y1 and ``x2 cos + x1 sin`` to y2."""
    np.multiply(x1, cos, out=y1)
    y1 -= x2 * sin
    np.multiply(x2, cos, out=y2)
    y2 += x1 * sin


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
    """Return ``(q_BHTK, k_BGTK, v_BGTK)``; scratch: half of the queries."""
    half = cos_PK2.shape[1]
    time = qkv_NC.shape[0] // batch if batch else 0
    cos = _angles(cos_PK2, positions_N, batch, time)
    sin = _angles(sin_PK2, positions_N, batch, time)
    rows_BTHK = qkv_NC.reshape(batch, time, heads + 2 * kv_heads, 2 * half)
    q_BHTK = np.empty((batch, heads, time, 2 * half), dtype=qkv_NC.dtype)
    k_BGTK = np.empty((batch, kv_heads, time, 2 * half), dtype=qkv_NC.dtype)
    for out, first in ((q_BHTK, 0), (k_BGTK, heads)):
        x = rows_BTHK[:, :, first : first + out.shape[1]]
        y = out.transpose(0, 2, 1, 3)
        _rotate(x[..., :half], x[..., half:], cos, sin, y[..., :half], y[..., half:])
    q_BHTK *= float(scale)
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
    """Return dqkv_NC; scratch: half of the queries."""
    batch, heads, time, size = dq_BHTK.shape
    kv_heads, half = dk_BGTK.shape[1], size // 2
    cos = _angles(cos_PK2, positions_N, batch, time)
    # The transpose of a rotation turns back: the same with -sin.
    minus_sin = -_angles(sin_PK2, positions_N, batch, time)
    dqkv_BTCK = np.empty((batch, time, heads + 2 * kv_heads, size), dtype=dq_BHTK.dtype)
    for grad, first in ((dq_BHTK, 0), (dk_BGTK, heads)):
        x = grad.transpose(0, 2, 1, 3)
        y = dqkv_BTCK[:, :, first : first + grad.shape[1]]
        _rotate(x[..., :half], x[..., half:], cos, minus_sin, y[..., :half], y[..., half:])
    dqkv_BTCK[:, :, :heads] *= float(scale)
    dqkv_BTCK[:, :, heads + kv_heads :] = dv_BGTK.transpose(0, 2, 1, 3)
    return dqkv_BTCK.reshape(batch * time, (heads + 2 * kv_heads) * size)


@functools.cache
def _later_keys(num_rows: int) -> np.ndarray:
    """Return True where the key comes after the query, for a square on the diagonal."""
    later = np.triu(np.ones((num_rows, num_rows), dtype=bool), k=1)
    later.flags.writeable = False
    return later


def _softmax_blocks(
    shape_BHTS: tuple[int, ...], starts_BT: np.ndarray | None
) -> Iterator[tuple[slice, slice, slice, np.ndarray]]:
    """Cut a stack of (T, T) matrices into blocks that hold all visible keys of their rows.

    Yields ``(matrices, rows, columns, hidden)``: which of the B * H matrices, which rows, the
    columns that any of these rows sees, and True where a row does not see one of the last
    ``hidden.shape[1]`` of these columns.
    """
    batch, heads, time, _ = shape_BHTS
    for rows in tile_slices(time, _ROW_BLOCK):
        num_rows = rows.stop - rows.start
        if starts_BT is None:
            hidden = _later_keys(num_rows)
            per_tile = max(1, _ROW_TILE // (num_rows * rows.stop))
            for matrices in tile_slices(batch * heads, per_tile):
                yield matrices, rows, slice(0, rows.stop), hidden
            continue
        for b in range(batch):
            starts = starts_BT[b, rows, np.newaxis]
            columns = slice(int(starts.min()), rows.stop)
            keys = np.arange(columns.start, columns.stop)
            hidden = keys < starts
            hidden[:, rows.start - columns.stop :] |= _later_keys(num_rows)
            yield slice(b * heads, (b + 1) * heads), rows, columns, hidden


def _matrices(array_BHTS: np.ndarray) -> np.ndarray:
    """Return the view (B * H, T, T)."""
    batch, heads, time, _ = array_BHTS.shape
    assert array_BHTS.flags.c_contiguous, array_BHTS.strides
    return array_BHTS.reshape(batch * heads, time, time)


@_quiet
def causal_softmax(scores_BHTS: np.ndarray, starts_BT: np.ndarray | None) -> None:
    """Turn scores into weights in place; scratch: masks, and two numbers per row of a block."""
    stack = _matrices(scores_BHTS)
    for matrices, rows, columns, hidden in _softmax_blocks(scores_BHTS.shape, starts_BT):
        block = stack[matrices, rows, columns]
        edge = block[..., -hidden.shape[1] :]
        np.copyto(edge, -math.inf, where=hidden)
        block -= np.maximum.reduce(block, axis=2, keepdims=True)
        np.exp(block, out=block)
        block /= np.add.reduce(block, axis=2, keepdims=True)
        # exp(-inf) is 0 already, but not in a row that turned into nan.
        np.copyto(edge, 0.0, where=hidden)
        stack[matrices, rows, : columns.start] = 0.0
        stack[matrices, rows, columns.stop :] = 0.0


@_quiet
def causal_softmax_backward(
    probs_BHTS: np.ndarray, dprobs_BHTS: np.ndarray, starts_BT: np.ndarray | None
) -> None:
    """Turn dprobs into dscores in place; scratch: masks and one block."""
    probs_stack, stack = _matrices(probs_BHTS), _matrices(dprobs_BHTS)
    for matrices, rows, columns, hidden in _softmax_blocks(dprobs_BHTS.shape, starts_BT):
        probs, block = probs_stack[matrices, rows, columns], stack[matrices, rows, columns]
        edge = block[..., -hidden.shape[1] :]
        np.copyto(edge, 0.0, where=hidden)
        block -= np.add.reduce(probs * block, axis=2, keepdims=True)
        block *= probs
        np.copyto(edge, 0.0, where=hidden)
        stack[matrices, rows, : columns.start] = 0.0
        stack[matrices, rows, columns.stop :] = 0.0


def _one_plus_exp_minus(x: np.ndarray, out: np.ndarray) -> None:
    """Write ``1 + exp(-x)``, the reciprocal of sigmoid(x), to `out`."""
    np.negative(x, out=out)
    np.exp(out, out=out)
    out += 1.0


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
    sigmoids, slopes = _tile_scratch(2, num_rows, hidden, dz_NF.dtype)
    for rows in _row_tiles(num_rows, hidden):
        gate, up, dz = gate_up_N2F[rows, :hidden], gate_up_N2F[rows, hidden:], dz_NF[rows]
        dgate, dup = dgate_up_N2F[rows, :hidden], dgate_up_N2F[rows, hidden:]
        sigmoid, slope = sigmoids[: len(dz)], slopes[: len(dz)]
        _one_plus_exp_minus(gate, sigmoid)
        np.divide(1.0, sigmoid, out=sigmoid)
        np.subtract(1.0, sigmoid, out=slope)
        slope *= gate
        slope += 1.0
        sigmoid *= dz
        np.multiply(sigmoid, gate, out=dup)
        sigmoid *= up
        np.multiply(sigmoid, slope, out=dgate)
    return dgate_up_N2F


def _half_one_plus_tanh(x: np.ndarray, out: np.ndarray) -> None:
    """Write ``(1 + tanh(u(x))) / 2`` to `out`."""
    np.multiply(x, x, out=out)
    out *= _GELU_CUBIC
    out += 1
    out *= x
    out *= _GELU_SCALE
    np.tanh(out, out=out)
    out += 1
    out *= 0.5


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
    halves, slopes = np.empty((2, min(x.size, TILE_ELEMENTS)), dtype=x.dtype)
    for tile in tile_slices(x_flat.size):
        x_tile, dx_tile = x_flat[tile], dx_flat[tile]
        half, slope = halves[: x_tile.size], slopes[: x_tile.size]
        _half_one_plus_tanh(x_tile, half)
        np.multiply(x_tile, x_tile, out=slope)
        slope *= 3 * _GELU_CUBIC
        slope += 1
        slope *= 2 * _GELU_SCALE
        slope *= x_tile
        # dx = half * (1 + slope * (1 - half)), the product rule with tanh' = 4 half (1 - half)
        np.subtract(1, half, out=dx_tile)
        dx_tile *= slope
        dx_tile += 1
        dx_tile *= half
        dx_tile *= dy_flat[tile]
    return dx


@_quiet
def cross_entropy(logits_NV: np.ndarray, targets_N: np.ndarray) -> tuple[float, int]:
    """Turn logits into probabilities in place, return ``(loss_sum, num_correct)``."""
    num_rows, vocab = logits_NV.shape
    losses_N = np.zeros(num_rows, dtype=np.float64)
    num_correct = 0
    for rows in _row_tiles(num_rows, vocab):
        block, targets = logits_NV[rows], targets_N[rows]
        valid = targets >= 0
        best = np.argmax(block, axis=1)
        num_correct += int(np.count_nonzero((best == targets) & valid))
        block -= np.take_along_axis(block, best[:, np.newaxis], axis=1)
        picked = block[valid, targets[valid]]
        np.exp(block, out=block)
        sums = np.add.reduce(block, axis=1, keepdims=True)
        block /= sums
        losses_N[rows][valid] = np.log(sums[valid, 0].astype(np.float64)) - picked
    return float(np.add.reduce(losses_N)), num_correct


@_quiet
def cross_entropy_backward(probs_NV: np.ndarray, targets_N: np.ndarray, seed: float) -> None:
    """Turn probabilities into dlogits in place; no scratch but the rows' indices."""
    seed = float(seed)
    valid = targets_N >= 0
    probs_NV *= seed
    rows = np.flatnonzero(valid)
    probs_NV[rows, targets_N[rows]] -= seed
    if rows.size < targets_N.size:
        probs_NV[~valid] = 0.0


@_quiet
def apply_dropout(x: np.ndarray, words: np.ndarray, threshold: int, factor: float) -> np.ndarray:
    """Return the kept elements times `factor`, 0 for the others; scratch: one tile of bits."""
    factor, limit = float(factor), np.uint64(threshold)
    y = np.empty(x.shape, dtype=x.dtype)
    x_flat, words_flat = flat_view(np.ascontiguousarray(x)), words.reshape(-1)
    y_flat = flat_view(y)
    for tile in tile_slices(x_flat.size):
        np.multiply(x_flat[tile], factor, out=y_flat[tile])
        np.copyto(y_flat[tile], 0.0, where=words_flat[tile] >= limit)
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
    """Take one AdamW step on flat arrays in place, tile by tile through `scratch`."""
    if scratch is None:
        scratch = np.empty(max(1, min(param.size, TILE_ELEMENTS)), dtype=param.dtype)
    scratch = scratch[:TILE_ELEMENTS]
    rate, beta1, beta2, eps = float(rate), float(beta1), float(beta2), float(eps)
    shrink, grad_scale = float(shrink), float(grad_scale)
    for tile in tile_slices(param.size, scratch.size):
        p, g, m_tile, v_tile = param[tile], grad[tile], m[tile], v[tile]
        work = scratch[: p.size]
        if grad_scale == 1.0:
            np.multiply(g, 1.0 - beta1, out=work)
        else:
            np.multiply(g, grad_scale, out=work)
            work *= 1.0 - beta1
        m_tile *= beta1
        m_tile += work
        if grad_scale == 1.0:
            np.multiply(g, g, out=work)
        else:
            # The product again, rounded as before: cheaper than a second tile of scratch.
            np.multiply(g, grad_scale, out=work)
            work *= work
        work *= 1.0 - beta2
        v_tile *= beta2
        v_tile += work
        np.sqrt(v_tile, out=work)
        work += eps
        np.divide(m_tile, work, out=work)
        work *= rate
        if shrink != 1.0:
            p *= shrink
        p -= work


@_quiet
def widen(x16: np.ndarray) -> np.ndarray:
    """Return the float32 array of the same values."""
    if x16.dtype == np.float16:
        return half_to_float32(x16)
    return x16.astype(np.float32, order="C")


@_quiet
def narrow(x32: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the array rounded to `dtype`."""
    if dtype == np.float16 and x32.dtype == np.float32:
        return float32_to_half(x32)
    return x32.astype(dtype, order="C")
