"""The Numba kernel set: fused loops, compiled at first use. See `kernels.Kernels`.

Here arrays are allocated, by NumPy so that memory is counted, and handed to `numba_loops`.
Loaded only by `kernels.load_kernels`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np

from mpisim.nn import numba_loops as loops

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set: loops would run as plain Python")

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

name = "numba"

_NOTHING_BT = np.empty((0, 0), dtype=np.int32)
"""Stands for starts or positions of None: Numba would compile None as another function."""


def _ready(array: np.ndarray) -> np.ndarray:
    """Return the array C-contiguous: another layout would be compiled as another function."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _flat(array: np.ndarray) -> np.ndarray:
    """Return a one-dimensional view, or a copy if the array is not C-contiguous."""
    return array.reshape(-1)


def _ids(ids: np.ndarray) -> np.ndarray:
    """Return ids as C-contiguous int32."""
    return np.ascontiguousarray(ids, dtype=np.int32)


def _starts(starts_BT: np.ndarray | None) -> np.ndarray:
    return _NOTHING_BT if starts_BT is None else _ids(starts_BT)


def _positions(positions_N: np.ndarray | None, batch: int, time: int) -> np.ndarray:
    return _NOTHING_BT if positions_N is None else _ids(positions_N).reshape(batch, time)


@contextlib.contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """Let the processes of this host take turns; goes on without, where files cannot be locked."""
    with open(loops.__file__, "rb") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _call_all(dtype: np.dtype) -> None:
    """Call every function once, on the least of arrays; `squared_norm` last."""
    one, ids = np.ones((1, 1), dtype=dtype), np.zeros(1, dtype=np.int32)
    pair, head = np.ones((1, 2), dtype=dtype), np.ones((1, 1, 1, 2), dtype=dtype)
    _, rstd = rms_norm(one, one[0], 1.0)
    rms_norm_backward(one, one, one[0], rstd)
    rotary_split(np.ones((1, 6), dtype=dtype), one, one, None, 1, 1, 1, 1.0)
    rotary_merge(head, head, head, one, one, None, 1.0)
    causal_softmax(one.reshape(1, 1, 1, 1), None)
    causal_softmax_backward(one.reshape(1, 1, 1, 1), np.ones((1, 1, 1, 1), dtype=dtype), None)
    swiglu(pair)
    swiglu_backward(one, pair)
    gelu(one)
    gelu_backward(one, one)
    cross_entropy(pair, ids)
    cross_entropy_backward(pair, ids, 1.0)
    apply_dropout(one, np.zeros(1, dtype=np.uint64), 1, 1.0)
    embedding_backward(ids, one, 1)
    flats = [np.ones(1, dtype=dtype) for _ in range(4)]
    adamw_update(*flats, rate=1.0, beta1=0.5, beta2=0.5, eps=1.0, shrink=1.0)
    squared_norm(one)


def prepare(*dtypes: np.dtype) -> None:
    """Compile all functions for these dtypes, or load them from the disk."""
    for dtype in map(np.dtype, dtypes):
        if dtype.itemsize == 2:
            narrow(widen(np.zeros(1, dtype=dtype)), dtype)
            continue
        # The last one on the disk means all are: then no process need wait for another.
        stats = loops.squared_norm.stats
        hits_before = sum(stats.cache_hits.values())
        squared_norm(np.ones(1, dtype=dtype))
        all_stored = sum(stats.cache_hits.values()) > hits_before
        turns = _one_process_at_a_time() if stats.cache_path and not all_stored else None
        with turns or contextlib.nullcontext():
            _call_all(dtype)


def forget() -> None:
    """Delete the compiled functions on disk; the next call compiles anew."""
    folder = loops.squared_norm.stats.cache_path
    for path in Path(folder or os.devnull).glob(f"{Path(loops.__file__).stem}.*.nb[ic]"):
        path.unlink(missing_ok=True)


def rms_norm(x_ND: np.ndarray, weight_D: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(y_ND, rstd_N)``."""
    eps = x_ND.dtype.type(eps)  # here and below before the results: NumPy allocates 4 bytes for it
    y_ND = np.empty(x_ND.shape, dtype=x_ND.dtype)
    rstd_N = np.empty(x_ND.shape[0], dtype=x_ND.dtype)
    loops.rms_norm(_ready(x_ND), _ready(weight_D), eps, y_ND, rstd_N)
    return y_ND, rstd_N


def rms_norm_backward(
    dy_ND: np.ndarray, x_ND: np.ndarray, weight_D: np.ndarray, rstd_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(dx_ND, dweight_D)``."""
    dx_ND = np.empty(x_ND.shape, dtype=x_ND.dtype)
    dweight_D = np.empty(weight_D.shape, dtype=x_ND.dtype)
    loops.rms_norm_backward(
        _ready(dy_ND), _ready(x_ND), _ready(weight_D), _ready(rstd_N), dx_ND, dweight_D
    )
    return dx_ND, dweight_D


def _halves(array_BHTK: np.ndarray) -> np.ndarray:
    """View heads as (B, H, T, 2, K / 2): an index for each half makes the loops vectorize."""
    *leading, size = array_BHTK.shape
    return _ready(array_BHTK).reshape(*leading, 2, size // 2)


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
    """Return ``(q_BHTK, k_BGTK, v_BGTK)``."""
    scale = qkv_NC.dtype.type(scale)
    time, half = (qkv_NC.shape[0] // batch if batch else 0), cos_PK2.shape[1]
    q_BHTK = np.empty((batch, heads, time, 2 * half), dtype=qkv_NC.dtype)
    k_BGTK = np.empty((batch, kv_heads, time, 2 * half), dtype=qkv_NC.dtype)
    v_BGTK = np.empty((batch, kv_heads, time, 2 * half), dtype=qkv_NC.dtype)
    loops.rotary_split(
        _ready(qkv_NC).reshape(batch, time, heads + 2 * kv_heads, 2, half),
        _ready(cos_PK2),
        _ready(sin_PK2),
        _positions(positions_N, batch, time),
        scale,
        _halves(q_BHTK),
        _halves(k_BGTK),
        _halves(v_BGTK),
    )
    return q_BHTK, k_BGTK, v_BGTK


def rotary_merge(
    dq_BHTK: np.ndarray,
    dk_BGTK: np.ndarray,
    dv_BGTK: np.ndarray,
    cos_PK2: np.ndarray,
    sin_PK2: np.ndarray,
    positions_N: np.ndarray | None,
    scale: float,
) -> np.ndarray:
    """Return dqkv_NC."""
    batch, heads, time, size = dq_BHTK.shape
    scale = dq_BHTK.dtype.type(scale)
    num_heads = heads + 2 * dk_BGTK.shape[1]
    dqkv_NC = np.empty((batch * time, num_heads * size), dtype=dq_BHTK.dtype)
    loops.rotary_merge(
        _halves(dq_BHTK),
        _halves(dk_BGTK),
        _halves(dv_BGTK),
        _ready(cos_PK2),
        _ready(sin_PK2),
        _positions(positions_N, batch, time),
        scale,
        dqkv_NC.reshape(batch, time, num_heads, 2, size // 2),
    )
    return dqkv_NC


def causal_softmax(scores_BHTS: np.ndarray, starts_BT: np.ndarray | None) -> None:
    """Turn scores into weights in place; no scratch."""
    assert scores_BHTS.flags.c_contiguous, scores_BHTS.strides
    _, heads, time, _ = scores_BHTS.shape
    rows_RS = scores_BHTS.reshape(-1, time) if time else scores_BHTS.reshape(0, 0)
    loops.causal_softmax(rows_RS, _starts(starts_BT), heads)


def causal_softmax_backward(
    probs_BHTS: np.ndarray, dprobs_BHTS: np.ndarray, starts_BT: np.ndarray | None
) -> None:
    """Turn dprobs into dscores in place; no scratch."""
    assert dprobs_BHTS.flags.c_contiguous, dprobs_BHTS.strides
    _, heads, time, _ = dprobs_BHTS.shape
    if time:
        loops.causal_softmax_backward(
            _ready(probs_BHTS).reshape(-1, time),
            dprobs_BHTS.reshape(-1, time),
            _starts(starts_BT),
            heads,
        )


def swiglu(gate_up_N2F: np.ndarray) -> np.ndarray:
    """Return z_NF."""
    num_rows, double_hidden = gate_up_N2F.shape
    z_NF = np.empty((num_rows, double_hidden // 2), dtype=gate_up_N2F.dtype)
    loops.swiglu(_ready(gate_up_N2F), z_NF)
    return z_NF


def swiglu_backward(dz_NF: np.ndarray, gate_up_N2F: np.ndarray) -> np.ndarray:
    """Return dgate_up_N2F."""
    dgate_up_N2F = np.empty(gate_up_N2F.shape, dtype=gate_up_N2F.dtype)
    loops.swiglu_backward(_ready(dz_NF), _ready(gate_up_N2F), dgate_up_N2F)
    return dgate_up_N2F


def gelu(x: np.ndarray) -> np.ndarray:
    """Return gelu(x)."""
    y = np.empty(x.shape, dtype=x.dtype)
    loops.gelu(_flat(x), _flat(y))
    return y


def gelu_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of gelu at `x`."""
    dx = np.empty(x.shape, dtype=x.dtype)
    loops.gelu_backward(_flat(dy), _flat(x), _flat(dx))
    return dx


def cross_entropy(logits_NV: np.ndarray, targets_N: np.ndarray) -> tuple[float, int]:
    """Turn logits into probabilities in place, return ``(loss_sum, num_correct)``."""
    assert logits_NV.flags.c_contiguous, logits_NV.strides
    loss_sum, num_correct, legal = loops.cross_entropy(logits_NV, _ids(targets_N))
    if not legal:
        raise IndexError(f"targets must be below {logits_NV.shape[1]}; got {targets_N.max()}.")
    return loss_sum, num_correct


def cross_entropy_backward(probs_NV: np.ndarray, targets_N: np.ndarray, seed: float) -> None:
    """Turn probabilities into dlogits in place."""
    assert probs_NV.flags.c_contiguous, probs_NV.strides
    loops.cross_entropy_backward(probs_NV, _ids(targets_N), probs_NV.dtype.type(seed))


def apply_dropout(
    x: np.ndarray,
    words: np.ndarray,
    threshold: int,
    factor: float,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the kept elements times `factor`, 0 for the others."""
    threshold, factor = np.uint64(threshold), x.dtype.type(factor)
    assert words.size == x.size, (words.shape, x.shape)
    y = np.empty(x.shape, dtype=x.dtype) if out is None else out
    assert y.flags.c_contiguous, y.strides
    loops.apply_dropout(_flat(x), _flat(words), threshold, factor, _flat(y))
    return y


def embedding_backward(ids_N: np.ndarray, dy_ND: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return dweight_VD."""
    dweight_VD = np.empty((vocab_size, dy_ND.shape[1]), dtype=dy_ND.dtype)
    if not loops.embedding_backward(_ids(ids_N), _ready(dy_ND), dweight_VD):
        raise IndexError(f"ids must be in 0..{vocab_size - 1}; got {ids_N.min()}..{ids_N.max()}.")
    return dweight_VD


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
    """Take one AdamW step on flat arrays in place; `scratch` is not needed.

    NumPy allocates 4 bytes at a time to round a scalar to float32.
    """
    assert param.shape == grad.shape == m.shape == v.shape, (param.shape, grad.shape)
    if not param.size:
        return
    real = param.dtype.type
    loops.adamw_update(
        param,
        grad,
        m,
        v,
        real(rate),
        real(beta1),
        real(beta2),
        real(1.0 - float(beta1)),
        real(1.0 - float(beta2)),
        real(eps),
        real(shrink),
        real(grad_scale),
    )


def squared_norm(grad: np.ndarray, scratch: np.ndarray | None = None) -> float:
    """Return the sum of squares of all elements, accumulated in float64; needs no `scratch`."""
    return loops.squared_norm(_flat(grad))


def widen(x16: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the float32 array of the same values."""
    y32 = np.empty(x16.shape, dtype=np.float32) if out is None else out
    assert y32.flags.c_contiguous, y32.strides
    loop = loops.widen_float16 if x16.dtype == np.float16 else loops.widen_bfloat16
    loop(_flat(x16).view(np.uint16), _flat(y32).view(np.uint32))
    return y32


def narrow(x32: np.ndarray, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
    """Return the array rounded to `dtype`."""
    y16 = np.empty(x32.shape, dtype=dtype) if out is None else out
    assert y16.flags.c_contiguous, y16.strides
    loop = loops.narrow_float16 if y16.dtype == np.float16 else loops.narrow_bfloat16
    loop(_flat(x32).view(np.uint32), _flat(y16).view(np.uint16))
    return y16
