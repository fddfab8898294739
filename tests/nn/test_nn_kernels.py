"""Both kernel sets against plain float64 formulas, each other, and by hand."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import subprocess
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from mpisim.data.batch import IGNORED
from mpisim.errors import ConfigError
from mpisim.nn import kernels as kernels_module
from mpisim.nn.kernels import Kernels, load_kernels

DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FUNCTIONS = sorted(
    name
    for name, value in vars(Kernels).items()
    if not name.startswith("_") and isinstance(value, types.FunctionType)
)


def _load(name):
    if name == "numba":
        pytest.importorskip("numba")
    return load_kernels(name)


@pytest.fixture(params=["numpy", "numba"])
def kernels(request):
    return _load(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=HALVES, ids=str)
def half(request):
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def _close(got, want, dtype, scale=1.0):
    """Compare with float64 values, to rounding of sums of some hundred terms; check the dtype."""
    assert got.dtype == dtype
    assert got.flags.c_contiguous
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(got, want, rtol=40 * eps, atol=20 * eps * scale)


def _wide(*arrays):
    return tuple(np.array(array, dtype=np.float64) for array in arrays)


def _same_bits(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_a_set_offers_what_the_protocol_says(kernels):
    assert kernels.name in ("numpy", "numba")
    assert len(FUNCTIONS) == 20
    for name in FUNCTIONS:
        assert callable(getattr(kernels, name)), name


# --- normalisation ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 1), (1, 4), (70, 33), (3, 3000), (9, 256)])
def test_rms_norm_and_its_gradient(kernels, dtype, rng, shape):
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    weight = rng.standard_normal(shape[1]).astype(dtype)
    y, rstd = kernels.rms_norm(x, weight, 1e-3)
    x64, dy64, weight64 = _wide(x, dy, weight)
    rstd64 = 1.0 / np.sqrt(np.mean(x64**2, axis=1) + 1e-3)
    unit = x64 * rstd64[:, None]
    _close(rstd, rstd64, dtype)
    _close(y, unit * weight64, dtype)
    dx, dweight = kernels.rms_norm_backward(dy, x, weight, rstd)
    g = dy64 * weight64
    want = rstd64[:, None] * (g - unit * np.mean(g * unit, axis=1, keepdims=True))
    # One element per row: the two terms all but cancel.
    _close(dx, want, dtype, scale=30.0)
    _close(dweight, np.sum(dy64 * unit, axis=0), dtype, scale=10.0)


def test_rms_norm_by_hand(kernels, dtype):
    x = np.array([[3.0, 4.0, 0.0, 0.0]], dtype=dtype)
    weight = np.array([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    # mean of squares 6.25, with eps 0: rstd 0.4
    y, rstd = kernels.rms_norm(x, weight, 0.0)
    np.testing.assert_allclose(rstd, [0.4], rtol=1e-6)
    np.testing.assert_allclose(y, [[1.2, 3.2, 0.0, 0.0]], rtol=1e-6)
    # g = (1, 2, 0, 0), u = (1.2, 1.6, 0, 0), mean(g u) = 1.1, dx = 0.4 (g - 1.1 u)
    dy = np.array([[1.0, 1.0, 0.0, 0.0]], dtype=dtype)
    dx, dweight = kernels.rms_norm_backward(dy, x, weight, rstd)
    np.testing.assert_allclose(dx, [[-0.128, 0.096, 0.0, 0.0]], rtol=1e-5)
    np.testing.assert_allclose(dweight, [1.2, 1.6, 0.0, 0.0], rtol=1e-6)


# --- rotary positions ------------------------------------------------------------------------


def _angles(max_len, size, dtype):
    angle = np.arange(max_len)[:, None] * 100.0 ** (-2.0 * np.arange(size // 2) / size)
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def _turn(head, cos, sin):
    half = head.size // 2
    first, second = head[:half], head[half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


@pytest.mark.parametrize(
    ("batch", "time", "heads", "kv_heads", "size"),
    [(2, 5, 4, 2, 8), (1, 7, 1, 1, 4), (3, 1, 6, 1, 2), (2, 3, 2, 2, 66), (1, 1, 2, 2, 4)],
)
@pytest.mark.parametrize("with_positions", [False, True])
def test_rotary_split_and_merge(
    kernels, dtype, rng, batch, time, heads, kv_heads, size, with_positions
):
    cos, sin = _angles(9, size, dtype)
    num_heads = heads + 2 * kv_heads
    qkv = rng.standard_normal((batch * time, num_heads * size)).astype(dtype)
    positions = rng.integers(0, 9, batch * time).astype(np.int32) if with_positions else None
    q, k, v = kernels.rotary_split(qkv, cos, sin, positions, batch, heads, kv_heads, 0.3)
    rows, cos64, sin64 = _wide(qkv.reshape(batch, time, num_heads, size), cos, sin)
    want = rows.copy()
    for b in range(batch):
        for t in range(time):
            p = t if positions is None else positions[b * time + t]
            for h in range(heads + kv_heads):
                want[b, t, h] = _turn(rows[b, t, h], cos64[p], sin64[p])
    want[:, :, :heads] *= 0.3
    want = want.transpose(0, 2, 1, 3)
    _close(q, want[:, :heads], dtype)
    _close(k, want[:, heads : heads + kv_heads], dtype)
    _close(v, want[:, heads + kv_heads :], dtype)
    assert not any(np.shares_memory(out, qkv) for out in (q, k, v))

    # The transpose A^T of a linear map A: <A x, g> = <x, A^T g> for every x and g.
    grads = [rng.standard_normal(out.shape).astype(dtype) for out in (q, k, v)]
    dqkv = kernels.rotary_merge(*grads, cos, sin, positions, 0.3)
    assert dqkv.dtype == dtype and dqkv.shape == qkv.shape
    unit = np.zeros_like(qkv)
    want_dqkv = np.zeros(qkv.shape)
    for index in rng.permutation(qkv.size)[:60]:
        unit.flat[index] = 1
        columns = kernels.rotary_split(unit, cos, sin, positions, batch, heads, kv_heads, 0.3)
        dot = sum(np.vdot(a, g) for a, g in zip(_wide(*columns), _wide(*grads), strict=True))
        want_dqkv.flat[index] = dot
        unit.flat[index] = 0
        np.testing.assert_allclose(dqkv.flat[index], dot, rtol=1e-5, atol=10 * np.finfo(dtype).eps)


def test_rotary_turns_by_a_right_angle(kernels, dtype):
    cos, sin = np.array([[1.0], [0.0]], dtype=dtype), np.array([[0.0], [1.0]], dtype=dtype)
    qkv = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]], dtype=dtype)
    q, k, v = kernels.rotary_split(qkv, cos, sin, None, 1, 1, 1, 0.5)
    assert q.tolist() == [[[[0.5, 1.0], [-1.0, 0.5]]]]
    assert k.tolist() == [[[[3.0, 4.0], [-4.0, 3.0]]]]
    assert v.tolist() == [[[[5.0, 6.0], [5.0, 6.0]]]]
    q, k, _ = kernels.rotary_split(qkv, cos, sin, np.array([1, 0]), 1, 1, 1, 0.5)
    assert q.tolist() == [[[[-1.0, 0.5], [0.5, 1.0]]]]
    assert k.tolist() == [[[[-4.0, 3.0], [3.0, 4.0]]]]


# --- attention weights -----------------------------------------------------------------------


def _starts(kind, batch, time, rng):
    """Starts of documents: none, drawn (non-decreasing), or each token its own document."""
    if kind == "none":
        return None
    columns = np.broadcast_to(np.arange(time), (batch, time))
    if kind == "alone":
        return columns.astype(np.int32)
    firsts = rng.random((batch, time)) < 0.15
    firsts[:, :1] = True
    return np.maximum.accumulate(np.where(firsts, columns, 0), axis=1).astype(np.int32)


def _visible(starts, batch, time):
    key, query = np.arange(time), np.arange(time)[:, None]
    first = np.zeros((batch, time), dtype=int) if starts is None else starts
    return ((key <= query) & (key >= first[:, :, None]))[:, None]


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (2, 2, 40), (3, 2, 97), (1, 4, 128)])
@pytest.mark.parametrize("kind", ["none", "drawn", "alone"])
def test_causal_softmax_and_its_gradient(kernels, dtype, rng, shape, kind):
    batch, heads, time = shape
    starts = _starts(kind, batch, time, rng)
    visible = np.broadcast_to(_visible(starts, batch, time), (batch, heads, time, time))
    scores = (4 * rng.standard_normal((batch, heads, time, time))).astype(dtype)
    # What hidden keys hold must not matter.
    scores[~visible] = rng.choice([np.nan, np.inf, -np.inf, 1e30], np.count_nonzero(~visible))
    masked = np.where(visible, scores.astype(np.float64), -np.inf)
    want = np.exp(masked - masked.max(axis=3, keepdims=True))
    want /= want.sum(axis=3, keepdims=True)
    probs = scores.copy()
    assert kernels.causal_softmax(probs, starts) is None
    _close(probs, want, dtype)
    assert np.all(probs[~visible] == 0)

    dprobs = rng.standard_normal(probs.shape).astype(dtype)
    dprobs[~visible] = np.nan
    probs64, dprobs64 = _wide(probs, np.where(visible, dprobs, 0))
    dot = np.sum(probs64 * dprobs64, axis=3, keepdims=True)
    assert kernels.causal_softmax_backward(probs, dprobs, starts) is None
    _close(dprobs, probs64 * (dprobs64 - dot), dtype)
    assert np.all(dprobs[~visible] == 0)


def test_causal_softmax_by_hand(kernels, dtype):
    scores = np.log(np.array([[1, 9, 9], [1, 3, 9], [1, 1, 2]], dtype=dtype)).reshape(1, 1, 3, 3)
    probs = scores.copy()
    kernels.causal_softmax(probs, None)
    np.testing.assert_allclose(
        probs[0, 0], [[1, 0, 0], [0.25, 0.75, 0], [0.25, 0.25, 0.5]], rtol=1e-6
    )
    kernels.causal_softmax(scores, np.array([[0, 1, 1]]))
    np.testing.assert_allclose(scores[0, 0], [[1, 0, 0], [0, 1, 0], [0, 1 / 3, 2 / 3]], rtol=1e-6)
    dprobs = np.array([[5, 7, 7], [1, 2, 7], [0, 4, 8]], dtype=dtype).reshape(1, 1, 3, 3)
    kernels.causal_softmax_backward(probs, dprobs, None)
    # row 1: dot 1.75; row 2: dot 5
    np.testing.assert_allclose(
        dprobs[0, 0], [[0, 0, 0], [-0.1875, 0.1875, 0], [-1.25, -0.25, 1.5]], atol=1e-5
    )


def test_causal_softmax_of_large_and_far_scores(kernels, dtype):
    top = float(np.finfo(dtype).max)
    probs = np.array([[1, 0], [top, -top]], dtype=dtype).reshape(1, 1, 2, 2)
    kernels.causal_softmax(probs, None)
    assert probs[0, 0].tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_bad_score_spoils_its_row_and_no_other(kernels, dtype, rng, bad):
    scores = rng.standard_normal((2, 2, 50, 50)).astype(dtype)
    scores[1, 0, 30, 17] = np.copysign(bad, math.copysign(1, bad))
    kernels.causal_softmax(scores, None)
    assert np.isnan(scores[1, 0, 30, :31]).all()
    assert np.all(scores[1, 0, 30, 31:] == 0)
    scores[1, 0, 30, :31] = 0
    assert np.isfinite(scores).all()
    dprobs = np.ones_like(scores)
    dprobs[0, 1, 40, 3] = bad
    scores[:] = 0.1
    kernels.causal_softmax_backward(scores, dprobs, None)
    assert not np.isfinite(dprobs[0, 1, 40, :41]).any()
    dprobs[0, 1, 40, :41] = 0
    assert np.isfinite(dprobs).all()


# --- activations -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (3, 1000), (40, 96)])
def test_swiglu_and_its_gradient(kernels, dtype, rng, shape):
    num_rows, hidden = shape
    gate_up = (4 * rng.standard_normal((num_rows, 2 * hidden))).astype(dtype)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    sigmoid = 1.0 / (1.0 + np.exp(-gate))
    _close(kernels.swiglu(gate_up), gate * sigmoid * up, dtype)
    dz = rng.standard_normal(shape).astype(dtype)
    dz64 = dz.astype(np.float64)
    want = np.hstack([dz64 * up * sigmoid * (1 + gate * (1 - sigmoid)), dz64 * gate * sigmoid])
    _close(kernels.swiglu_backward(dz, gate_up), want, dtype, scale=10.0)


def test_swiglu_by_hand(kernels, dtype):
    gate_up = np.array([[0.0, math.log(3), 5.0, 2.0]], dtype=dtype)
    # sigmoid 1/2 and 3/4
    np.testing.assert_allclose(kernels.swiglu(gate_up), [[0, 1.5 * math.log(3)]], rtol=1e-6)
    dz = np.array([[2.0, 4.0]], dtype=dtype)
    np.testing.assert_allclose(
        kernels.swiglu_backward(dz, gate_up),
        [[5.0, 6 * (1 + math.log(3) / 4), 0.0, 3 * math.log(3)]],
        rtol=1e-6,
    )


@pytest.mark.parametrize("hidden", [2, 140])
def test_swiglu_of_gates_beyond_the_range_of_exp(kernels, dtype, hidden):
    # 140: the vectors of a compiled loop and its last elements.
    gate_up = np.full((1, 2 * hidden), 2.0, dtype=dtype)
    gate_up[0, :hidden] = np.resize([-1e4, 1e4], hidden)
    assert kernels.swiglu(gate_up).tolist() == [[0.0, 2e4] * (hidden // 2)]
    dz = np.ones((1, hidden), dtype=dtype)
    dgate, dup = np.split(kernels.swiglu_backward(dz, gate_up)[0], 2)
    assert dgate.tolist() == [0.0, 2.0] * (hidden // 2)
    assert dup.tolist() == [0.0, 1e4] * (hidden // 2)


@pytest.mark.parametrize("shape", [(1,), (7, 5), (2, 3, 1000), (40000,)])
def test_gelu_and_its_gradient(kernels, dtype, rng, shape):
    x, dy = (3 * rng.standard_normal(shape)).astype(dtype), rng.standard_normal(shape).astype(dtype)
    x64, dy64 = _wide(x, dy)
    scale = math.sqrt(2 / math.pi)
    half = (1 + np.tanh(scale * (x64 + 0.044715 * x64**3))) / 2
    slope = scale * (1 + 3 * 0.044715 * x64**2)
    _close(kernels.gelu(x), x64 * half, dtype)
    want = dy64 * (half + x64 * half * (2 - 2 * half) * slope)
    _close(kernels.gelu_backward(dy, x), want, dtype, scale=10.0)


def test_gelu_at_known_points(kernels, dtype):
    x = np.array([0.0, 1.0, -1.0, 50.0, -50.0] * 30, dtype=dtype)
    np.testing.assert_allclose(
        kernels.gelu(x), [0, 0.8411919906, -0.1588080094, 50, 0] * 30, rtol=2e-6, atol=1e-12
    )
    slope = kernels.gelu_backward(np.ones_like(x), x)
    np.testing.assert_allclose(
        slope, [0.5, 1.0829640838, -0.0829640838, 1, 0] * 30, rtol=2e-6, atol=1e-12
    )


# --- loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (6, 5), (70, 266), (3, 20000)])
def test_cross_entropy_and_its_gradient(kernels, dtype, rng, shape):
    num_rows, vocab = shape
    logits = (3 * rng.standard_normal(shape)).astype(dtype)
    targets = rng.integers(0, vocab, num_rows).astype(np.int32)
    targets[1::3] = IGNORED
    valid = targets != IGNORED
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    probs = logits.copy()
    loss_sum, num_correct = kernels.cross_entropy(probs, targets)
    assert type(loss_sum) is float and type(num_correct) is int
    want = -log_probs[np.flatnonzero(valid), targets[valid]].sum()
    assert loss_sum == pytest.approx(want, rel=40 * float(np.finfo(dtype).eps), abs=1e-12)
    assert num_correct == np.count_nonzero((logits.argmax(axis=1) == targets) & valid)
    _close(probs[valid], np.exp(log_probs[valid]), dtype)
    one_hot = np.zeros(shape)
    one_hot[np.flatnonzero(valid), targets[valid]] = 1
    want = np.where(valid[:, None], 0.25 * (probs.astype(np.float64) - one_hot), 0)
    assert kernels.cross_entropy_backward(probs, targets, 0.25) is None
    _close(probs, want, dtype)
    assert np.all(probs[~valid] == 0)


def test_cross_entropy_by_hand(kernels, dtype):
    logits = np.log(np.array([[1, 2, 1], [1, 1, 6], [4, 4, 2], [4, 4, 2], [1, 1, 1]], dtype=dtype))
    targets = np.array([1, 0, 0, 1, IGNORED])
    loss_sum, num_correct = kernels.cross_entropy(logits, targets)
    # -log of 1/2, 1/8, 2/5, 2/5; of two equal logits the first is the choice
    assert loss_sum == pytest.approx(-math.log(0.5 * 0.125 * 0.4 * 0.4), rel=1e-6)
    assert num_correct == 2
    kernels.cross_entropy_backward(logits, targets, 2.0)
    np.testing.assert_allclose(
        logits,
        [[0.5, -1, 0.5], [-1.75, 0.25, 1.5], [-1.2, 0.8, 0.4], [0.8, -1.2, 0.4], [0, 0, 0]],
        atol=1e-6,
    )


def test_cross_entropy_of_ignored_rows_only(kernels, dtype):
    logits = np.array([[math.nan, 1.0], [1.0, 2.0]], dtype=dtype)
    targets = np.full(2, IGNORED)
    assert kernels.cross_entropy(logits, targets) == (0.0, 0)
    kernels.cross_entropy_backward(logits, targets, 1.0)
    assert logits.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_cross_entropy_does_not_hide_a_bad_logit(kernels, dtype, rng, bad):
    logits = rng.standard_normal((3, 40)).astype(dtype)
    logits[1, 20] = bad
    loss_sum, _ = kernels.cross_entropy(logits, np.array([0, 1, 2]))
    assert math.isnan(loss_sum)
    assert np.isnan(logits[1]).all()
    assert np.isfinite(logits[[0, 2]]).all()


def test_cross_entropy_refuses_a_class_beyond_the_logits(kernels):
    with pytest.raises(IndexError):
        kernels.cross_entropy(np.zeros((2, 3)), np.array([0, 3]))


# --- dropout, embedding ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (2, 3, 5), (2, 20000)])
def test_dropout(kernels, dtype, rng, shape):
    x = rng.standard_normal(shape).astype(dtype)
    words = rng.integers(0, 2**64, shape, dtype=np.uint64)
    threshold = int(0.7 * 2**64)
    words.flat[:3] = [threshold - 1, threshold, 2**64 - 1]
    x.flat[1:3] = [math.nan, -math.inf]
    y = kernels.apply_dropout(x, words.reshape(-1), threshold, 1 / 0.7)
    keep = words < threshold
    assert keep.flat[0] and not keep.flat[1] and not keep.flat[2]
    assert y.dtype == dtype and y.shape == shape
    assert _same_bits(y[keep], x[keep] * dtype.type(1 / 0.7))
    assert np.all(y[~keep] == 0)
    x.flat[0] = math.nan
    assert np.isnan(kernels.apply_dropout(x, words, threshold, 2.0).flat[0])


@pytest.mark.parametrize("width", [1, 4, 33])
def test_embedding_backward_adds_in_order(kernels, dtype, rng, width):
    ids = rng.integers(0, 5, 300).astype(np.int32)
    ids[ids == 3] = 4
    dy = rng.standard_normal((300, width)).astype(dtype)
    want = np.zeros((6, width), dtype=dtype)
    for token, row in zip(ids, dy, strict=True):
        want[token] += row
    got = kernels.embedding_backward(ids, dy, 6)
    assert _same_bits(got, want)
    assert not got[[3, 5]].any()


def test_embedding_backward_refuses_an_id_beyond_the_table(kernels, dtype):
    with pytest.raises(IndexError):
        kernels.embedding_backward(np.array([5]), np.ones((1, 2), dtype=dtype), 5)


# --- optimizer -------------------------------------------------------------------------------


def _adamw(kernels, arrays, **changes):
    settings = {"rate": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "shrink": 1.0}
    kernels.adamw_update(*arrays, **{**settings, **changes})


@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
@pytest.mark.parametrize("shrink", [1.0, 0.99])
def test_adamw(kernels, dtype, rng, grad_scale, shrink):
    param, grad, m, v = (rng.standard_normal(40000).astype(dtype) for _ in range(4))
    v *= v
    grad_before = grad.copy()
    p64, g64, m64, v64 = _wide(param, grad, m, v)
    _adamw(kernels, (param, grad, m, v), grad_scale=grad_scale, shrink=shrink)
    g64 = g64 * grad_scale
    m64 = 0.9 * m64 + (1 - 0.9) * g64
    v64 = 0.99 * v64 + (1 - 0.99) * g64**2
    _close(m, m64, dtype)
    _close(v, v64, dtype)
    _close(param, shrink * p64 - 0.02 * m64 / (np.sqrt(v64) + 1e-6), dtype)
    assert _same_bits(grad, grad_before)


def test_adamw_of_a_range_gives_the_bits_of_the_whole(kernels, dtype, rng):
    arrays = [rng.standard_normal(1003).astype(dtype) ** 2 for _ in range(4)]
    cut = [array.copy() for array in arrays]
    scratch = np.empty(7, dtype=dtype)
    _adamw(kernels, arrays, grad_scale=0.3)
    for part in (slice(0, 1), slice(1, 30), slice(30, 1003)):
        _adamw(kernels, [array[part] for array in cut], grad_scale=0.3, scratch=scratch)
    assert all(_same_bits(a, b) for a, b in zip(arrays, cut, strict=True))


def test_squared_norm(kernels, dtype, rng):
    assert kernels.squared_norm(np.array([[3.0, 4.0]], dtype=dtype)) == 25.0
    assert type(kernels.squared_norm(np.zeros((2, 0), dtype=dtype))) is float
    x = rng.standard_normal((37, 1001)).astype(dtype)
    want = math.fsum(float(value) ** 2 for value in x.flat)
    assert kernels.squared_norm(x) == pytest.approx(want, rel=1e-14)
    # float32 sums would overflow, or lose all of the small ones
    assert kernels.squared_norm(np.full(4, 3e38, dtype=np.float32)) == pytest.approx(3.6e77)
    small = np.full(20001, 2.0**-14, dtype=np.float32)
    small[0] = 1
    assert kernels.squared_norm(small) == pytest.approx(1 + 20000 * 2.0**-28, rel=1e-14)
    assert math.isnan(kernels.squared_norm(np.array([1, math.nan, 2], dtype=dtype)))
    assert kernels.squared_norm(np.array([1, -math.inf, 2], dtype=dtype)) == math.inf


# --- 16-bit casts ----------------------------------------------------------------------------


def _as_numpy_casts(x, dtype):
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def _assert_same_values(got, want):
    """Compare bit for bit, but for which nan a nan is."""
    assert got.dtype == want.dtype and got.shape == want.shape
    bits = np.dtype(f"u{got.dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        nan, got_nan = np.isnan(want), np.isnan(got)
    assert np.array_equal(got_nan, nan)
    assert np.array_equal(got[~nan].view(bits), want[~nan].view(bits))


def test_every_16_bit_value_widens_and_narrows_back(kernels, half):
    every = np.arange(65536, dtype=np.uint16).view(half).reshape(256, 256)
    wide = kernels.widen(every)
    assert wide.dtype == np.float32
    _assert_same_values(wide, _as_numpy_casts(every, np.float32))
    _assert_same_values(kernels.narrow(wide, half), every)


def test_widen_of_known_patterns(kernels):
    patterns = np.array([0x3C00, 0x0001, 0x03FF, 0x0400, 0x8000, 0x7BFF, 0xFC00], dtype=np.uint16)
    assert kernels.widen(patterns.view(np.float16)).tolist() == [
        1.0, 2.0**-24, 1023 * 2.0**-24, 2.0**-14, 0.0, 65504.0, -math.inf
    ]  # fmt: skip
    patterns = np.array([0x3F80, 0x0001, 0x8080, 0x7F80, 0x4049], dtype=np.uint16)
    assert kernels.widen(patterns.view(ml_dtypes.bfloat16)).tolist() == [
        1.0, 2.0**-133, -(2.0**-126), math.inf, 3.140625
    ]  # fmt: skip


def test_narrow_rounds_every_exponent_and_every_tie(kernels, half):
    upper = np.arange(65536, dtype=np.uint32) << 16
    # Lower halves at, just below and just above the ties of both dtypes.
    for lower in (0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001,
                  0xB000, 0xF000, 0xFFFF):  # fmt: skip
        x = (upper | np.uint32(lower)).view(np.float32)
        _assert_same_values(kernels.narrow(x, half), _as_numpy_casts(x, half))


def test_narrow_rounds_drawn_values(kernels, half, rng):
    x = rng.integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
    _assert_same_values(kernels.narrow(x, half), _as_numpy_casts(x, half))
    # Ties and their neighbours among the subnormals of float16, which are multiples of 2^-24.
    ties = ((np.arange(1024) + 0.5) * 2.0**-24).astype(np.float32)
    for x in (ties, np.nextafter(ties, 0), np.nextafter(ties, 1), -ties):
        _assert_same_values(kernels.narrow(x, half), _as_numpy_casts(x, half))


def test_narrow_of_known_values(kernels):
    x = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519, 65520, 2.0**-25, 1.5 * 2.0**-25],
                 dtype=np.float32)  # fmt: skip
    assert kernels.narrow(x, np.dtype(np.float16)).tolist() == [
        1.0, 1 + 2.0**-9, 65504.0, math.inf, 0.0, 2.0**-24
    ]  # fmt: skip
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -(2.0**-134)], dtype=np.float32)
    assert kernels.narrow(x, np.dtype(ml_dtypes.bfloat16)).astype(float).tolist() == [
        1.0, 1 + 2.0**-6, math.inf, 0.0
    ]  # fmt: skip


# --- all of them -----------------------------------------------------------------------------


def _call_all(kernels, dtype, num_docs=2):
    """Call every function on drawn arrays; return all results by name."""
    rng = np.random.default_rng(3)
    batch, time, heads, kv_heads, size, width = num_docs, 11, 2, 1, 6, 20
    num_rows = batch * time

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    x, dy, weight = draw(num_rows, width), draw(num_rows, width), draw(width)
    y, rstd = kernels.rms_norm(x, weight, 1e-5)
    results = {"rms_norm": (y, rstd)}
    results["rms_norm_backward"] = kernels.rms_norm_backward(dy, x, weight, rstd)
    cos, sin = _angles(time, size, dtype)
    qkv = draw(num_rows, (heads + 2 * kv_heads) * size)
    rotary = (cos, sin, None)
    results["rotary_split"] = kernels.rotary_split(qkv, *rotary, batch, heads, kv_heads, 0.4)
    grads = [draw(*part.shape) for part in results["rotary_split"]]
    results["rotary_merge"] = (kernels.rotary_merge(*grads, *rotary, 0.4),)
    probs, dprobs = draw(batch, heads, time, time), draw(batch, heads, time, time)
    kernels.causal_softmax(probs, None)
    kernels.causal_softmax_backward(probs, dprobs, None)
    results["causal_softmax"], results["causal_softmax_backward"] = (probs,), (dprobs,)
    results["swiglu"] = (kernels.swiglu(x),)
    results["swiglu_backward"] = (kernels.swiglu_backward(draw(num_rows, width // 2), x),)
    results["gelu"], results["gelu_backward"] = (kernels.gelu(x),), (kernels.gelu_backward(dy, x),)
    logits, targets = draw(num_rows, 13), rng.integers(-1, 13, num_rows)
    loss_sum, num_correct = kernels.cross_entropy(logits, targets)
    results["cross_entropy"] = (logits.copy(), np.array(loss_sum), np.array(num_correct))
    kernels.cross_entropy_backward(logits, targets, 0.5)
    results["cross_entropy_backward"] = (logits,)
    words = rng.integers(0, 2**64, x.size, dtype=np.uint64)
    results["apply_dropout"] = (kernels.apply_dropout(x, words, 2**63, 2.0),)
    ids = rng.integers(0, 9, num_rows)
    results["embedding_backward"] = (kernels.embedding_backward(ids, dy, 9),)
    flats = [draw(x.size), draw(x.size), draw(x.size), draw(x.size) ** 2]
    _adamw(kernels, flats, shrink=0.9, grad_scale=0.7)
    results["adamw_update"] = tuple(flats)
    results["squared_norm"] = (np.array(kernels.squared_norm(x)),)
    for half in HALVES:
        x16 = kernels.narrow(x.astype(np.float32), half)
        results[f"narrow {half}"], results[f"widen {half}"] = (x16,), (kernels.widen(x16),)
    return results


EXACT = ("apply_dropout", "embedding_backward", "adamw_update", "narrow", "widen")


def test_the_sets_agree(dtype):
    want, got = _call_all(_load("numpy"), dtype), _call_all(_load("numba"), dtype)
    assert {name.split()[0] for name in want} == set(FUNCTIONS) - {"prepare", "forget"}
    for name, arrays in want.items():
        for a, b in zip(got[name], arrays, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape, name
            if name.startswith(EXACT):
                assert _same_bits(a, b), name
            else:
                bound = 1e-5 if dtype == np.float32 else 1e-13
                np.testing.assert_allclose(a, b, rtol=bound, atol=bound, err_msg=name)


def test_calls_repeat_their_bits(kernels, dtype):
    first, second = _call_all(kernels, dtype), _call_all(kernels, dtype)
    for name, arrays in first.items():
        assert all(_same_bits(a, b) for a, b in zip(arrays, second[name], strict=True)), name


def test_zero_rows(kernels, dtype):
    for name, arrays in _call_all(kernels, dtype, num_docs=0).items():
        for array in arrays:
            assert array.dtype.itemsize <= 8
            if name not in ("rms_norm_backward", "embedding_backward"):
                assert array.size == 0 or array == 0, name
            assert not np.asarray(array, dtype=np.float64).any(), name


@pytest.mark.parametrize("width", [1, 4, 50, 2500, 40000])
def test_a_row_has_the_same_bits_in_every_company(kernels, dtype, rng, width):
    """Micro-batches must not change the bits of a row (B2)."""
    num_rows = 23
    x = rng.standard_normal((num_rows, 2 * width)).astype(dtype)
    dy = rng.standard_normal((num_rows, 2 * width)).astype(dtype)
    weight, targets = x[0].copy(), rng.integers(0, 2 * width, num_rows)

    def run(rows):
        y, rstd = kernels.rms_norm(x[rows], weight, 1e-5)
        dx, _ = kernels.rms_norm_backward(dy[rows], x[rows], weight, rstd)
        probs = x[rows].copy()
        kernels.cross_entropy(probs, targets[rows])
        dlogits = probs.copy()
        kernels.cross_entropy_backward(dlogits, targets[rows], 0.1)
        z = kernels.swiglu(x[rows])
        dgate_up = kernels.swiglu_backward(z, x[rows])
        act, dact = kernels.gelu(x[rows]), kernels.gelu_backward(dy[rows], x[rows])
        return [y, rstd, dx, probs, dlogits, z, dgate_up, act, dact]

    whole = run(slice(0, num_rows))
    for part in (slice(0, 1), slice(1, 2), slice(2, 9), slice(9, 23)):
        for number, (all_rows, some) in enumerate(zip(whole, run(part), strict=True)):
            assert _same_bits(all_rows[part], some), (number, part)


@pytest.mark.parametrize("kind", ["none", "drawn"])
def test_attention_rows_have_the_same_bits_in_every_batch(kernels, dtype, rng, kind):
    batch, heads, time, size = 7, 3, 45, 8
    starts = _starts(kind, batch, time, rng)
    positions = None if starts is None else np.arange(time, dtype=np.int32) - starts
    scores = rng.standard_normal((batch, heads, time, time)).astype(dtype)
    dprobs = rng.standard_normal((batch, heads, time, time)).astype(dtype)
    qkv = rng.standard_normal((batch, time, 5 * size)).astype(dtype)
    cos, sin = _angles(time, size, dtype)

    def run(rows):
        probs, dscores = scores[rows].copy(), dprobs[rows].copy()
        some = None if starts is None else starts[rows]
        where = None if positions is None else positions[rows].reshape(-1)
        kernels.causal_softmax(probs, some)
        kernels.causal_softmax_backward(probs, dscores, some)
        flat = qkv[rows].reshape(-1, 5 * size)
        split = kernels.rotary_split(flat, cos, sin, where, len(probs), 3, 1, 0.5)
        return [probs, dscores, *split]

    whole = run(slice(0, batch))
    for part in (slice(0, 1), slice(1, 4), slice(4, 7)):
        for all_rows, some in zip(whole, run(part), strict=True):
            assert _same_bits(all_rows[part], some)


def test_arguments_are_left_alone_and_results_are_new(kernels, dtype, rng):
    x, dy = (rng.standard_normal((6, 8)).astype(dtype) for _ in range(2))
    weight, ids = x[0].copy(), np.arange(6, dtype=np.int32)
    _, rstd = kernels.rms_norm(x, weight, 1e-5)
    arguments = [x, dy, weight, rstd, ids]
    before = [array.copy() for array in arguments]
    results = [
        *kernels.rms_norm(x, weight, 1e-5),
        *kernels.rms_norm_backward(dy, x, weight, rstd),
        kernels.swiglu(x),
        kernels.swiglu_backward(dy[:, :4], x),
        kernels.gelu(x),
        kernels.gelu_backward(dy, x),
        kernels.embedding_backward(ids, dy, 6),
        kernels.apply_dropout(x, np.zeros(48, dtype=np.uint64), 1, 1.0),
        *kernels.rotary_split(x[:, :6], x[:, :1].copy(), x[:, 1:2].copy(), None, 1, 1, 1, 1.0),
    ]
    for array, old in zip(arguments, before, strict=True):
        assert _same_bits(array, old)
    for result in results:
        assert result.flags.writeable
        assert not any(np.shares_memory(result, array) for array in arguments)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_reaches_the_results_of_its_row(kernels, dtype, rng, bad):
    x, dy = (rng.standard_normal((5, 34)).astype(dtype) for _ in range(2))
    weight = np.ones(34, dtype=dtype)
    x[2, 20] = dy[2, 20] = bad

    def only_row_2(array):
        rows = ~np.isfinite(array).all(axis=1)
        return rows.tolist() == [False, False, True, False, False]

    y, rstd = kernels.rms_norm(x, weight, 1e-5)
    assert only_row_2(y)
    dx, dweight = kernels.rms_norm_backward(dy, x, weight, rstd)
    assert only_row_2(dx) and not np.isfinite(dweight[20])
    assert only_row_2(kernels.swiglu(x))
    assert only_row_2(kernels.swiglu_backward(dy[:, :17].copy(), x))
    assert only_row_2(kernels.gelu(x))
    assert only_row_2(kernels.gelu_backward(dy, x))
    assert not np.isfinite(kernels.embedding_backward(np.zeros(5, dtype=int), dy, 1)[0, 20])
    cos = np.ones((5, 1), dtype=dtype)
    heads = kernels.rotary_split(dy[:, 20:26].copy(), cos, cos, None, 1, 1, 1, 1.0)
    assert only_row_2(heads[0][0, 0])
    assert all(np.isfinite(head).all() for head in heads[1:])
    assert only_row_2(kernels.rotary_merge(*heads, cos, cos, None, 1.0))
    arrays = [np.ones(5, dtype=dtype) for _ in range(4)]
    arrays[1][3] = bad
    _adamw(kernels, arrays)
    for array in (arrays[0], arrays[2], arrays[3]):
        finite = np.isfinite(array).tolist()
        # m / sqrt(v) of inf / inf is nan
        assert finite == [True, True, True, False, True]


# --- choosing a set --------------------------------------------------------------------------


def _run(code, **env):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numba_is_imported_only_when_it_is_picked():
    out = _run(
        "import sys; import mpisim; from mpisim.nn.kernels import load_kernels;"
        "import mpisim.nn.precision;"
        "print(load_kernels('numpy').name, 'numba' in sys.modules, 'ml_dtypes' in sys.modules)"
    )
    assert out.split() == ["numpy", "False", "False"]


def test_auto_takes_numba_where_it_is_installed(monkeypatch):
    pytest.importorskip("numba")
    assert load_kernels("auto").name == "numba"
    monkeypatch.setattr(kernels_module.importlib.util, "find_spec", lambda name: None)
    assert load_kernels("auto").name == "numpy"


def test_a_numba_that_cannot_be_imported(monkeypatch, caplog):
    def broken(name):
        raise ImportError("Numba needs NumPy 2.0 or less")

    real = kernels_module.importlib.import_module
    monkeypatch.setattr(kernels_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        kernels_module.importlib,
        "import_module",
        lambda name: broken(name) if name.endswith("numba") else real(name),
    )
    with pytest.raises(ConfigError, match=r"compute\.kernels.*NumPy 2\.0.*mpisim\[fast\]"):
        load_kernels("numba")
    with caplog.at_level(logging.WARNING):
        assert load_kernels("auto").name == "numpy"
    assert "Numba cannot be used, NumPy computes instead: Numba needs NumPy" in caplog.text


def test_an_unknown_set_is_refused():
    with pytest.raises(ConfigError, match=r"compute\.kernels must be .* got 'cupy'"):
        load_kernels("cupy")


def test_prepare_takes_every_dtype(kernels):
    kernels.prepare()
    kernels.prepare(*DTYPES, *HALVES)


def test_loops_compile_without_a_folder_for_the_cache(monkeypatch):
    numba = pytest.importorskip("numba")
    from mpisim.nn import numba_loops

    real, asked = numba.njit, []

    def njit(*args, **options):
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'double': no locator available for file")
        return real(*args, **options)

    monkeypatch.setattr(numba_loops.numba, "njit", njit)
    double = numba_loops._jit(frozenset())(lambda x: 2 * x)
    assert asked == [True, False]
    assert double(21) == 42


def _call_squared_norm(queue):
    kernels = load_kernels("numba")
    kernels.prepare(np.dtype(np.float16))
    queue.put(kernels.squared_norm(np.full(3, 2.0, dtype=np.float32)))


def test_processes_may_share_an_empty_cache(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_call_squared_norm, args=(queue,)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=300) for _ in processes] == [12.0] * 3
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert list(tmp_path.rglob("*.nbc"))


_USE_KERNELS = """
import sys, numpy as np
from mpisim.nn.kernels import prepare_kernels
kernels = prepare_kernels(sys.argv[1], np.dtype("f4"))
print(kernels.name, kernels.squared_norm(np.full(3, 2.0, dtype=np.float32)))
"""


def _use_kernels(name, folder, **variables):
    return subprocess.run(
        [sys.executable, "-c", _USE_KERNELS, name],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder), **variables},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("files", "content"),
    [
        ("*.nbc", b"garbage"),
        pytest.param("*.nbi", b"", marks=pytest.mark.full),
        pytest.param("*.nbi", b"garbage", marks=pytest.mark.full),
    ],
)
def test_a_damaged_cache_is_made_anew(tmp_path, files, content):
    pytest.importorskip("numba")
    assert _use_kernels("numba", tmp_path).stdout == "numba 12.0\n"
    damaged = list(tmp_path.rglob(files))
    assert damaged
    for path in damaged:
        path.write_bytes(content)
    again = _use_kernels("numba", tmp_path)
    assert (again.returncode, again.stdout, again.stderr) == (0, "numba 12.0\n", "")
    assert all(path.read_bytes() != content for path in tmp_path.rglob(files))


def test_a_numba_that_may_not_compile_is_passed_by(tmp_path):
    pytest.importorskip("numba")
    plain = _use_kernels("auto", tmp_path, NUMBA_DISABLE_JIT="1")
    assert (plain.returncode, plain.stdout) == (0, "numpy 12.0\n")
    assert "NumPy computes instead: NUMBA_DISABLE_JIT is set" in plain.stderr
    refused = _use_kernels("numba", tmp_path, NUMBA_DISABLE_JIT="1")
    assert refused.returncode and "compute.kernels = 'numba' must find" in refused.stderr
