"""Working memory of the decoder's layers: what `spec` says against the allocator hook, in bytes."""

import functools
import math

import ml_dtypes
import numpy as np
import pytest

from mpisim.layouts.specs import Conditions
from mpisim.memory.tracker import hook_is_built, open_tracker
from mpisim.nn import kernel_memory as memory
from mpisim.nn import optim
from mpisim.nn.arrays import wide_dtype
from mpisim.nn.attention import Attention
from mpisim.nn.dropout import WORD_TILE, DropoutMasks
from mpisim.nn.kernels import load_kernels
from mpisim.nn.layers import LayerContext
from mpisim.nn.numerics import ROW_BLOCK, ROW_TILE, TILE_ELEMENTS
from mpisim.nn.transformer import Dropout, Projection, RMSNorm, SwiGLU, TokenEmbedding

pytestmark = pytest.mark.skipif(not hook_is_built(), reason="the allocator hook is not built")

DTYPES = [np.dtype(name) for name in ("float32", "float64", "float16")]
DTYPES.append(np.dtype(ml_dtypes.bfloat16))
EMPTY_BYTES = 32
"""An empty array counts 0 in a spec and 1 byte in NumPy; with zero rows all of a call are empty."""


@pytest.fixture(scope="module")
def tracker():
    tracker = open_tracker("hook")
    yield tracker
    tracker.close()


@pytest.fixture(params=["numpy", "numba"])
def kernels(request):
    if request.param == "numba":
        pytest.importorskip("numba")
    return load_kernels(request.param)


def measure(tracker, call):
    """Return the most bytes that were alive beside those before, those left, and the result."""
    before = tracker.live()
    tracker.reset_peak()
    result = call()
    return tracker.peak() - before, tracker.live() - before, result


def values(shape, dtype, seed=0, scale=1.0):
    draws = np.random.default_rng(seed).standard_normal(shape) * scale
    return draws.astype(np.float32).astype(dtype)


def params_of(layer, dtype):
    return layer.init(lambda name: np.random.default_rng(len(name)), dtype)


def starts_of(num_rows, length, kind, seed=0):
    """Return document starts: one document a row, one a token, or cut at random."""
    if kind == "token":
        return np.tile(np.arange(length, dtype=np.int32), (num_rows, 1))
    borders = np.random.default_rng(seed).random((num_rows, length)) < 0.2
    columns = np.arange(length, dtype=np.int32)
    starts = np.where(borders & (kind == "random"), columns, np.int32(0))
    return np.maximum.accumulate(starts, axis=1).astype(np.int32)


def check_layer(tracker, layer, x, dtype, ctx, conditions, special=()):
    """Compare every method of a layer with its spec."""
    params = params_of(layer, dtype)
    spec = layer.spec(x.shape, dtype, "layer", conditions)
    dy = values(spec.output_shape, dtype, seed=1)
    for index, value in enumerate(special):
        if dy.size > index:
            dy.reshape(-1)[index] = value
    empty = 0 if x.size else EMPTY_BYTES
    # Twice: the first call may import, compile or make tables.
    for _ in range(2):
        peak, left, (y, saved) = measure(tracker, lambda: layer.forward(params, x, ctx))
    made = 0 if spec.passes_through else spec.output_bytes
    got, want = {"forward": (peak, left)}, {}
    want["forward"] = (spec.forward_peak_bytes, made + spec.extra_saved_bytes)
    for _ in range(2):
        kept = None
        peak, left, (dx, kept) = measure(
            tracker, lambda: layer.backward_input(params, saved, dy, ctx)
        )
    got["input"] = peak, left
    made = 0 if spec.passes_through or dx is None else spec.input_bytes
    want["input"] = (spec.input_peak_bytes, made + spec.kept_bytes)
    peak, left, grads = measure(tracker, lambda: layer.backward_weight(saved, kept, ctx))
    got["weight"], want["weight"] = (peak, left), (spec.weight_peak_bytes, spec.grad_bytes)
    if isinstance(layer, Attention):
        for _ in range(2):
            trimmed = None
            peak, left, trimmed = measure(tracker, lambda: layer.trim(saved))
        got["trim"], want["trim"] = (peak, left), (spec.trim_peak_bytes, spec.check_bytes)
        peak, left, again = measure(tracker, lambda: layer.restore(trimmed, ctx))
        got["restore"] = peak, left
        want["restore"] = (spec.restore_peak_bytes, spec.interior_bytes)
    if empty:
        for name, pair in got.items():
            difference = np.subtract(pair, want[name])
            assert (abs(difference) <= empty).all(), (name, pair, want[name])
    else:
        assert got == want


def conditions_of(kernels, **settings):
    return Conditions(kernels=kernels.name, **settings)


SHAPES = [
    (0, 5),
    (1, 1),
    (3, 7),
    (2, TILE_ELEMENTS // 16),
    (1, TILE_ELEMENTS // 16 + 1),
    (5, ROW_TILE // 64 - 1),
]
"""Rows and length; with a width of 16, some are a tile, one more, or many."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_embedding_norm_projection_and_swiglu(tracker, kernels, dtype, shape):
    ctx, conditions = LayerContext(kernels=kernels), conditions_of(kernels)
    x = values((*shape, 16), dtype)
    if x.size:
        x.reshape(-1)[:3] = (6e-8, math.inf, math.nan)  # a float16 cast treats them apart
    for layer in (
        RMSNorm(width=16, eps=1e-5),
        Projection(16, (("out", 24),)),
        Projection(16, (("q", 8), ("k", 4), ("v", 4))),
        SwiGLU(),
    ):
        check_layer(tracker, layer, x, dtype, ctx, conditions, special=(6e-8, math.inf, math.nan))
    ids = np.random.default_rng(2).integers(0, 11, shape).astype(np.int32)
    table = TokenEmbedding(vocab_size=11, d_model=16, max_len=1 << 20)
    check_layer(tracker, table, ids, dtype, ctx, conditions)


@pytest.mark.parametrize("width", [1, 3, ROW_TILE, ROW_TILE + 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths_at_the_border_of_a_tile(tracker, kernels, dtype, width):
    ctx, conditions = LayerContext(kernels=kernels), conditions_of(kernels)
    x = values((1, 3, width), dtype)
    check_layer(tracker, RMSNorm(width, eps=1e-5), x, dtype, ctx, conditions)
    x = values((1, 3, 2 * width), dtype)
    check_layer(tracker, SwiGLU(), x, dtype, ctx, conditions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "longest"),
    [
        ((0, 3, 8), 4),
        ((1, 1, 1), 1),
        ((3, 5, 7), 5),
        ((3, 4, 7), 5),
        ((2, WORD_TILE // 8, 8), WORD_TILE // 8),
        ((2, WORD_TILE // 8 + 1, 8), WORD_TILE),
    ],
    ids=str,
)
def test_dropout(tracker, kernels, dtype, shape, longest):
    masks = DropoutMasks(key=7, rows=9, max_len=longest, width=shape[2], first_row=3)
    layer, x = Dropout(rate=0.3, site=1), values(shape, dtype)
    check_layer(
        tracker, layer, x, dtype, LayerContext(dropout=masks, kernels=kernels),
        conditions_of(kernels),
    )  # fmt: skip
    spec = layer.spec(shape, dtype, "drop", conditions_of(kernels, dropout=False))
    assert spec.passes_through
    check_layer(
        tracker, layer, x, dtype, LayerContext(kernels=kernels),
        conditions_of(kernels, dropout=False),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("starts", [None, "row", "token", "random"])
@pytest.mark.parametrize(
    ("num_rows", "length", "heads", "groups", "size"),
    [
        (0, 5, 2, 1, 4),
        (1, 1, 1, 1, 2),
        (1, 1, 4, 2, 2),
        (2, 7, 4, 2, 6),
        (3, ROW_BLOCK, 2, 2, 4),
        (2, ROW_BLOCK + 1, 3, 1, 2),
        (40, 2 * ROW_BLOCK + 5, 1, 1, 2),
        (3, 4 * ROW_BLOCK, 12, 4, 32),
        (1, 1100, 1, 1, 2),
    ],
)
def test_attention(tracker, kernels, dtype, starts, num_rows, length, heads, groups, size):
    layer = Attention(heads, groups, size, max_len=length + 3)
    x = values((num_rows, length, layer.in_features), dtype)
    _, left, tables = measure(tracker, lambda: layer.tables(dtype))
    assert sum(table.nbytes for table in tables) == layer.tables_bytes(dtype)
    ctx = LayerContext(
        starts=None if starts is None else starts_of(num_rows, length, starts), kernels=kernels
    )
    conditions = conditions_of(kernels, starts=starts is not None)
    check_layer(tracker, layer, x, dtype, ctx, conditions)


def test_rotary_tables_are_made_once_and_for_the_wide_dtype():
    layer = Attention(2, 1, 4, max_len=5)
    for dtype in DTYPES:
        assert layer.tables(dtype)[0] is layer.tables(wide_dtype(dtype))[0]
    assert layer.tables_bytes("float16") == 2 * 5 * 2 * 4


@pytest.mark.parametrize("size", [1, 7, TILE_ELEMENTS, 2 * TILE_ELEMENTS + 1])
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
@pytest.mark.parametrize("special", [0.0, 6e-8, 1e6, math.inf, math.nan, 1.0])
def test_casts_need_the_same_whatever_the_values(tracker, kernels, dtype, size, special):
    wide = values(size, np.float32)
    wide[: size // 2 + 1] = special
    with np.errstate(over="ignore"):
        half = wide.astype(dtype)
    conditions = conditions_of(kernels)
    again, out = np.empty(size, np.float32), np.empty(size, dtype)
    peak, _, result = measure(tracker, lambda: kernels.widen(half))
    assert peak == memory.widen_peak(size, dtype, conditions)
    peak, left, returned = measure(tracker, lambda: kernels.widen(half, out=again))
    assert (peak, left) == (memory.widen_peak(size, dtype, conditions, out=True), 0)
    assert returned is again
    assert np.array_equal(result, again, equal_nan=True)
    peak, _, result = measure(tracker, lambda: kernels.narrow(wide, dtype))
    assert peak == memory.narrow_peak(size, dtype, conditions)
    peak, left, returned = measure(tracker, lambda: kernels.narrow(wide, dtype, out=out))
    assert (peak, left) == (memory.narrow_peak(size, dtype, conditions, out=True), 0)
    assert returned is out
    assert result.tobytes() == out.tobytes()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("targets", ["none", "half", "all", "first"])
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 1), (5, 7), (ROW_TILE // 64, 64), (ROW_TILE // 64 + 1, 64), (2, 40000)]
)
def test_cross_entropy(tracker, kernels, dtype, targets, rows, vocab):
    logits, conditions = values((rows, vocab), dtype), conditions_of(kernels)
    ids = np.random.default_rng(3).integers(0, vocab, rows).astype(np.int32)
    if targets != "all":
        ids[{"none": slice(None), "half": slice(0, None, 2), "first": slice(1)}[targets]] = -1
    for _ in range(2):
        peak, left, _ = measure(tracker, lambda: kernels.cross_entropy(logits, ids))
    assert (peak, left) == (memory.cross_entropy_peak(rows, vocab, dtype.itemsize, conditions), 0)
    for _ in range(2):
        peak, left, _ = measure(tracker, lambda: kernels.cross_entropy_backward(logits, ids, 0.5))
    expected = memory.cross_entropy_backward_peak(rows, vocab, dtype.itemsize, conditions)
    assert (peak, left) == (expected, 0)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("size", [1, 9, TILE_ELEMENTS, TILE_ELEMENTS + 1])
def test_gelu(tracker, kernels, dtype, size):
    x, dy, conditions = values(size, dtype), values(size, dtype, 1), conditions_of(kernels)
    for _ in range(2):
        peak, _, y = measure(tracker, lambda: kernels.gelu(x))
    assert peak == memory.gelu_peak(size, dtype.itemsize, conditions)
    for _ in range(2):
        peak, _, dx = measure(tracker, lambda: kernels.gelu_backward(dy, x))
    assert peak == memory.gelu_backward_peak(size, dtype.itemsize, conditions)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("size", [0, 1, 9, TILE_ELEMENTS, 2 * TILE_ELEMENTS + 1])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_updates_with_scratch_allocate_a_scalar_at_most(tracker, kernels, dtype, size, factor):
    param, grad, m, v = (np.abs(values(size, dtype, seed)) for seed in range(4))
    scratch, conditions = np.empty(TILE_ELEMENTS, dtype), conditions_of(kernels)
    wide = np.empty(TILE_ELEMENTS, np.float64)

    def adamw():
        optim.adamw_update(
            param, grad, m, v, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3,
            grad_scale=factor, scratch=scratch, kernels=kernels,
        )  # fmt: skip

    def sgd():
        optim.sgd_update(
            param, grad, m, lr=0.1, momentum=0.9, weight_decay=0.1, grad_scale=factor,
            scratch=scratch,
        )  # fmt: skip

    for _ in range(2):
        peaks = [measure(tracker, call)[:2] for call in (adamw, sgd)]
    assert peaks == [
        (memory.adamw_update_peak(size, dtype.itemsize, conditions), 0),
        (memory.sgd_update_peak(size, dtype.itemsize), 0),
    ]
    for given in (None, wide):
        for _ in range(2):
            call = functools.partial(kernels.squared_norm, grad, given)
            peak, left, _ = measure(tracker, call)
        scratch = given is not None
        expected = memory.squared_norm_peak(size, dtype.itemsize, conditions, scratch=scratch)
        assert (peak, left) == (expected, 0)
