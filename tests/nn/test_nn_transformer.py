"""The decoder's layers one by one: values by hand, gradients, bytes, storage, bad input."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from small_decoders import STORED, central_differences, context, float_bytes, floats, protect

from mpisim.errors import BatchError, RecomputeMismatch
from mpisim.nn.attention import Attention, rotary_tables
from mpisim.nn.dropout import DropoutMasks
from mpisim.nn.kernels import load_kernels
from mpisim.nn.layers import InteriorLayer
from mpisim.nn.losses import LanguageHead
from mpisim.nn.precision import dtype_of, is_floating
from mpisim.nn.transformer import Dropout, Projection, RMSNorm, SwiGLU, TokenEmbedding

ROWS, LENGTH = 3, 5
STARTS = np.array([[0, 0, 0, 3, 3], [0, 1, 1, 1, 4], [0, 0, 0, 0, 0]], dtype=np.int32)


def make_rng_for(local):
    return np.random.default_rng(sum(local.encode()))


def masks(rows=ROWS, width=4, **others):
    return DropoutMasks(key=3, rows=rows, max_len=6, width=width, **others)


def case(name, dtype, rows=ROWS, length=LENGTH):
    """Return (layer, x, ctx) of the layer called `name`."""
    rng = np.random.default_rng(7)
    if name == "tokens":
        ids = rng.integers(0, 9, (rows, length)).astype(np.int32)
        return TokenEmbedding(9, 4, 6), ids, context()
    if name == "norm":
        return RMSNorm(4, 1e-5), floats((rows, length, 4), dtype), context()
    if name == "projection":
        layer = Projection(4, (("query", 3), ("key", 2), ("value", 1)))
        return layer, floats((rows, length, 4), dtype), context()
    if name == "one_output":
        return Projection(4, (("weight", 3),)), floats((rows, length, 4), dtype), context()
    if name.startswith("attention"):
        groups = {"attention": 4, "attention_grouped": 2, "attention_packed": 1}[name]
        starts = STARTS[:rows, :length] if name == "attention_packed" else None
        layer = Attention(4, groups, 2, 6)
        x = floats((rows, length, layer.in_features), dtype)
        return layer, x, context(starts=starts)
    if name == "swiglu":
        return SwiGLU(), floats((rows, length, 6), dtype), context()
    if name == "dropout":
        return Dropout(0.5, 1), floats((rows, length, 4), dtype), context(dropout=masks())
    targets = rng.integers(-1, 9, (rows, length)).astype(np.int32)
    if targets.size:
        targets[0, 0] = -1
    layer = LanguageHead(9, 4, {"head": 0, "head_chunked": 4}[name])
    return layer, floats((rows, length, 4), dtype), context(targets)


NAMES = (
    "tokens",
    "norm",
    "projection",
    "one_output",
    "attention",
    "attention_grouped",
    "attention_packed",
    "swiglu",
    "dropout",
    "head",
    "head_chunked",
)
LOSSES = ("head", "head_chunked")
SHAPES = [(ROWS, LENGTH), (1, 1), (0, LENGTH)]


def fresh_params(layer, dtype):
    """Return parameters that are not at a special point."""
    params = layer.init(make_rng_for, np.dtype("f8"))
    return {
        key: (array + 0.5 * floats(array.shape, seed=4)).astype(dtype_of(dtype))
        for key, array in params.items()
    }


def output_grad(name, y, dtype):
    return 0.25 if name in LOSSES else floats(y.shape, dtype, seed=9)


@pytest.mark.parametrize("kernels", ["numpy", "auto"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_shapes_and_dtypes_equal_the_spec_and_nothing_is_changed(name, dtype, shape, kernels):
    layer, x, ctx = case(name, dtype, *shape)
    ctx = context(ctx.targets, starts=ctx.starts, dropout=ctx.dropout, kernels=load(kernels))
    params = fresh_params(layer, dtype)
    protect(x, ctx.targets, ctx.starts, *params.values())
    y, saved = layer.forward(params, x, ctx)
    dy = output_grad(name, y, dtype)
    protect(y, *saved, dy)
    dx, kept = layer.backward_input(params, saved, dy, ctx)
    new = [array for array in kept if array is not dy and not any(array is s for s in saved)]
    grads = layer.backward_weight(saved, kept, ctx)
    spec = layer.spec(x.shape, dtype_of(dtype), "block.layer")

    assert spec.output_shape == y.shape and spec.output_bytes == y.nbytes
    assert spec.input_bytes == x.nbytes
    assert spec.saved_bytes == float_bytes(saved)
    assert spec.kept_bytes == float_bytes(new)
    if is_floating(x.dtype):
        assert spec.saves_input == any(array is x for array in saved)
    assert not any(array is y for array in saved)
    assert y.dtype == (np.float64 if name in LOSSES else dtype_of(dtype))
    wide = dtype_of("float32") if dtype_of(dtype).itemsize == 2 else dtype_of(dtype)
    if name == "tokens":
        assert dx is None
    else:
        assert dx.shape == x.shape and dx.dtype == dtype_of(dtype)
    assert {key: (grad.shape, grad.dtype) for key, grad in grads.items()} == {
        key: (param.shape, wide) for key, param in params.items()
    }
    assert {param.name: param.shape for param in spec.params} == {
        f"block.layer.{local}": array.shape for local, array in params.items()
    }
    assert tuple(params) == tuple(layer.param_names)
    if isinstance(layer, InteriorLayer):
        trimmed = layer.trim(saved)
        assert spec.extra_saved_bytes_for("selective") == float_bytes(trimmed)
        assert spec.extra_saved_bytes_for("all") == spec.extra_saved_bytes
        restored = layer.restore(protect(*trimmed), ctx)
        assert [a.tobytes() for a in restored] == [a.tobytes() for a in saved]
    if not x.size:
        assert all(not grad.any() for grad in grads.values())
        assert name not in LOSSES or float(y) == 0.0


def load(name):
    return load_kernels(name)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_match_central_differences(name):
    layer, x, ctx = case(name, "float64")
    params = fresh_params(layer, "float64")
    y, saved = layer.forward(params, x, ctx)
    dy = output_grad(name, y, "float64")
    dx, grads = layer.backward(params, saved, dy, ctx)

    def objective():
        return float(np.sum(layer.forward(params, x, ctx)[0] * dy))

    checked = dict(grads) if dx is None else {"x": dx, **grads}
    assert checked
    for key, analytic in checked.items():
        numeric = central_differences(objective, x if key == "x" else params[key])
        assert np.abs(numeric - analytic).max() <= 1e-9 * np.abs(analytic).max(), key


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_16_bit_storage_is_close_to_float32(name, dtype):
    layer, x, ctx = case(name, dtype)
    params = fresh_params(layer, dtype)
    y, saved = layer.forward(params, x, ctx)
    dy = output_grad(name, y, dtype)
    dx, grads = layer.backward(params, saved, dy, ctx)
    wide_x = x.astype("f4") if is_floating(x.dtype) else x
    wide_params = {key: array.astype("f4") for key, array in params.items()}
    wide_dy = dy if name in LOSSES else dy.astype("f4")
    wide_y, wide_saved = layer.forward(wide_params, wide_x, ctx)
    wide_dx, wide_grads = layer.backward(wide_params, wide_saved, wide_dy, ctx)
    # Half a unit in the last place, times the few roundings on the way to an element.
    tolerance = 6 * (2.0**-9 if dtype == "bfloat16" else 2.0**-12)

    def close(narrow, wide):
        error = np.abs(narrow.astype("f8") - wide.astype("f8")).max()
        return error <= tolerance * np.abs(wide).max()

    assert close(y, wide_y)
    assert dx is None or close(dx, wide_dx)
    assert all(close(grad, wide_grads[key]) for key, grad in grads.items())


def test_token_embedding_by_hand():
    weight = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    layer = TokenEmbedding(3, 2, 2)
    ids = np.array([[2, 0], [2, 2]])
    y, saved = layer.forward({"weight": weight}, ids, context())
    assert y.tolist() == [[[5, 6], [1, 2]], [[5, 6], [5, 6]]]
    dy = np.array([[[1.0, 2], [3, 4]], [[10, 20], [100, 200]]])
    dx, grads = layer.backward({"weight": weight}, saved, dy, context())
    assert dx is None and grads["weight"].tolist() == [[3, 4], [0, 0], [111, 222]]


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (np.array([[0, 9]]), "token ids must be in 0..8; got 0..9"),
        (np.array([[-1, 2]]), "token ids must be in 0..8; got -1..2"),
        (np.zeros((1, 2)), "token ids must be integers .*; got float64"),
        (np.zeros(2, np.int32), r"got int32 \(2,\)"),
        (np.zeros((1, 7), np.int32), "at most model.max_len = 6 tokens; got 7"),
    ],
    ids=["too large", "negative", "floats", "one dim", "too long"],
)
def test_token_embedding_refuses_bad_ids(ids, match):
    layer = TokenEmbedding(9, 4, 6)
    with pytest.raises(BatchError, match=match):
        layer.forward(fresh_params(layer, "float32"), ids, context())


def test_rms_norm_by_hand():
    layer = RMSNorm(2, 0.0)
    params = {"weight": np.array([1.0, 10.0])}
    x = np.array([[[3.0, 4.0], [1.0, 1.0]]])
    y, saved = layer.forward(params, x, context())
    root = math.sqrt(12.5)
    assert np.allclose(y, [[[3 / root, 40 / root], [1, 10]]], rtol=1e-15)
    assert np.allclose(saved[1], [1 / root, 1.0], rtol=1e-15)
    # Scaling a token changes nothing, so the gradient is at right angles to it.
    dx, _ = layer.backward(params, saved, np.array([[[1.0, 2.0], [3.0, 4.0]]]), context())
    assert np.allclose((dx * x).sum(axis=-1), 0.0, atol=1e-14)


def test_rms_norm_eps_is_added_inside_the_root():
    y, _ = RMSNorm(1, 3.0).forward({"weight": np.ones(1)}, np.ones((1, 1, 1)), context())
    assert y.item() == 0.5


def test_projection_lays_outputs_side_by_side():
    layer = Projection(2, (("left", 1), ("right", 2)))
    params = {"left": np.array([[1.0], [2.0]]), "right": np.array([[3.0, 4.0], [5.0, 6.0]])}
    y, saved = layer.forward(params, np.array([[[1.0, 10.0]]]), context())
    assert y.tolist() == [[[21, 53, 64]]]
    dx, grads = layer.backward(params, saved, np.array([[[1.0, 2.0, 3.0]]]), context())
    assert dx.tolist() == [[[1 + 6 + 12, 2 + 10 + 18]]]
    assert grads["left"].tolist() == [[1], [10]]
    assert grads["right"].tolist() == [[2, 3], [20, 30]]
    spec = layer.spec((1, 1, 2), np.dtype("f8"), "p")
    assert (spec.forward_flops, spec.backward_flops) == (12, 24)


def test_swiglu_by_hand():
    x = np.array([[[0.0, 1.0, 5.0, 7.0]]])
    y, saved = SwiGLU().forward({}, x, context())
    swish = 1 / (1 + math.exp(-1))
    assert np.allclose(y, [[[0, 7 * swish]]], rtol=1e-15)
    dx, _ = SwiGLU().backward({}, saved, np.ones((1, 1, 2)), context())
    slope = swish * (1 + (1 - swish))
    assert np.allclose(dx, [[[2.5, 7 * slope, 0, swish]]], rtol=1e-14)


# --- attention -------------------------------------------------------------------------------


def plain_attention(layer, x, starts):
    """Compute attention token by token, from the formulas of the docstring."""
    heads, groups, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    y = np.zeros((*x.shape[:2], heads * size))

    def turned(vector, position):
        result = np.empty(size)
        for i in range(size // 2):
            angle = position * layer.theta ** (-2 * i / size)
            a, b = vector[i], vector[i + size // 2]
            result[i] = a * math.cos(angle) - b * math.sin(angle)
            result[i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return result

    for b, row in enumerate(x):
        parts = row.reshape(len(row), heads + 2 * groups, size)
        for i in range(len(row)):
            start = int(starts[b, i]) if starts is not None else 0
            for h in range(heads):
                group = h // (heads // groups)
                q = turned(parts[i, h], i - start) / math.sqrt(size)
                keys = range(start, i + 1)
                scores = np.array([q @ turned(parts[j, heads + group], j - start) for j in keys])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                values = parts[start : i + 1, heads + groups + group]
                y[b, i, h * size : (h + 1) * size] = weights @ values
    return y


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_equals_the_formulas_token_by_token(groups, packed):
    layer = Attention(4, groups, 4, 6, theta=100.0)
    x = floats((ROWS, LENGTH, layer.in_features))
    starts = STARTS if packed else None
    y, saved = layer.forward({}, x, context(starts=starts))
    assert np.allclose(y, plain_attention(layer, x, starts), rtol=1e-12, atol=1e-14)
    later = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
    assert not saved[3][:, :, later].any()


def test_positions_count_from_the_document_s_start():
    # Scores would be the same from the row's start, but not bit for bit those of the row alone.
    layer, x, ctx = case("attention_packed", "float32")
    _, (q, k, _, _) = layer.forward({}, x, ctx)
    parts = x.reshape(ROWS, LENGTH, 6, 2)
    firsts = np.argwhere(np.arange(LENGTH) == STARTS)
    assert len(firsts) == 6
    for b, t in firsts:
        assert np.array_equal(k[b, :, t], parts[b, t, 4:5])
        assert np.array_equal(q[b, :, t], parts[b, t, :4] * np.float32(2**-0.5))
    assert not np.array_equal(k[0, :, 4], parts[0, 4, 4:5])


def test_rotary_scores_depend_on_the_distance_alone():
    cos, sin = rotary_tables(40, 8, 10000.0, np.dtype("f8"))
    q, k = floats(8), floats(8, seed=1)

    def turned(vector, position):
        a, b = vector[:4], vector[4:]
        return np.concatenate(
            (a * cos[position] - b * sin[position], b * cos[position] + a * sin[position])
        )

    for distance in (0, 1, 7):
        scores = [turned(q, p + distance) @ turned(k, p) for p in (0, 3, 30)]
        assert np.allclose(scores, scores[0], rtol=1e-12)
    assert not math.isclose(turned(q, 1) @ turned(k, 0), turned(q, 2) @ turned(k, 0), rel_tol=1e-3)


def test_rotary_tables_are_made_once_and_rounded_from_float64():
    cos, sin = rotary_tables(50, 6, 10000.0, np.dtype("f4"))
    assert rotary_tables(50, 6, 10000.0, np.dtype("f4"))[0] is cos
    wide_cos, wide_sin = rotary_tables(50, 6, 10000.0, np.dtype("f8"))
    assert cos.dtype == np.float32 and not cos.flags.writeable
    assert np.array_equal(cos, wide_cos.astype("f4")) and np.array_equal(sin, wide_sin.astype("f4"))
    assert math.isclose(wide_sin[49, 2], math.sin(49 * 10000.0 ** (-4 / 6)), rel_tol=1e-15)


def test_trimming_drops_the_probabilities_and_keeps_their_diagonal():
    layer, x, ctx = case("attention_packed", "float64")
    _, saved = layer.forward({}, x, ctx)
    trimmed = layer.trim(saved)
    assert [array.shape for array in trimmed] == [
        (3, 4, 5, 2),
        (3, 1, 5, 2),
        (3, 1, 5, 2),
        (3, 4, 5),
    ]
    assert all(a is b for a, b in zip(trimmed[:3], saved[:3], strict=True))
    assert trimmed[3].base is None  # a view would keep the probabilities alive
    # The first column is 0 in every row of a later document; the diagonal never is.
    assert trimmed[3].all() and not saved[3][:, :, :, 0].all()


@pytest.mark.parametrize(("part", "different"), [(0, 1), (1, 2), (3, 1)], ids=["q", "k", "check"])
def test_a_difference_in_one_element_raises_recompute_mismatch(part, different):
    layer, x, ctx = case("attention_grouped", "float32")
    _, saved = layer.forward({}, x, ctx)
    trimmed = [array.copy() for array in layer.trim(saved)]
    layer.restore(tuple(trimmed), ctx)
    flat = trimmed[part].reshape(-1)
    flat[-1] = np.nextafter(flat[-1], np.float32(9)) if part == 3 else flat[-1] + 0.25
    with pytest.raises(RecomputeMismatch, match=rf"in every bit; got {different} of 60"):
        layer.restore(tuple(trimmed), ctx)


def test_other_document_starts_raise_recompute_mismatch():
    layer, x, ctx = case("attention_packed", "float32")
    _, saved = layer.forward({}, x, ctx)
    with pytest.raises(RecomputeMismatch):
        layer.restore(layer.trim(saved), context(starts=np.zeros_like(STARTS)))


@pytest.mark.parametrize("starts", [STARTS[:, :4], STARTS[:2], STARTS.astype("f4")])
def test_attention_refuses_starts_that_do_not_fit(starts):
    layer, x, _ = case("attention", "float32")
    with pytest.raises(BatchError, match=r"document starts must be integers of shape \(3, 5\)"):
        layer.forward({}, x, context(starts=starts))


@pytest.mark.parametrize("wrong", [-1, 3])
def test_attention_refuses_a_start_that_is_not_at_or_before_its_position(wrong):
    layer, x, _ = case("attention", "float32")
    starts = STARTS.copy()
    starts[1, 2] = wrong
    with pytest.raises(BatchError, match=rf"in 0..2 at column 2; got {wrong} in row 1"):
        layer.forward({}, x, context(starts=starts))


def test_attention_refuses_rows_beyond_its_tables():
    layer = Attention(2, 2, 2, 4)
    with pytest.raises(BatchError, match="model.max_len = 4 tokens; got 5"):
        layer.forward({}, np.zeros((1, 5, 12)), context())


def test_attention_counts_scores_in_full():
    spec = Attention(4, 2, 8, 16).spec((2, 16, 64), np.dtype("f4"), "a")
    scores = 2 * 4 * 16 * 16
    turned = 2 * 16 * (4 + 2) * 8
    assert spec.forward_flops == 2 * 2 * scores * 8 + 5 * scores + 3 * turned + 2 * 16 * 32
    assert spec.interior_bytes == scores * 4 and spec.check_bytes == 2 * 4 * 16 * 4
    assert spec.interior_flops == 2 * scores * 8 + 5 * scores


# --- dropout ---------------------------------------------------------------------------------


@pytest.mark.parametrize("site", [0, 2])
def test_dropout_zeroes_and_scales_and_backward_uses_the_same_mask(site):
    x = np.ones((ROWS, LENGTH, 4))
    ctx = context(dropout=masks())
    layer = Dropout(0.25, site)
    y, saved = layer.forward({}, x, ctx)
    assert saved == () and set(np.unique(y)) == {0.0, 1 / 0.75}
    dx, _ = layer.backward({}, saved, np.full_like(x, 3.0), ctx)
    assert np.array_equal(dx, 3 * y)
    words = masks().words(site, x.shape)
    assert np.array_equal(y > 0, words < np.uint64(3 * 2**62))


def test_dropout_without_masks_passes_its_input_on():
    x = floats((2, 3, 4))
    layer = Dropout(0.5, 0)
    assert layer.forward({}, x, context())[0] is x
    assert layer.backward_input({}, (), x, context())[0] is x


# --- head ------------------------------------------------------------------------------------


def test_language_head_by_hand():
    layer = LanguageHead(2, 1)
    params = {"weight": np.array([[math.log(3.0)], [0.0]])}
    x = np.array([[[0.0], [1.0], [1.0]]])
    ctx = context(np.array([[0, 1, -1]], dtype=np.int32))
    loss, saved = layer.forward(params, x, ctx)
    assert math.isclose(float(loss), math.log(2) + math.log(4), rel_tol=1e-15)
    assert np.allclose(saved[1][1], [0.75, 0.25], rtol=1e-15)
    assert layer.num_correct(saved) == 1  # a tie goes to the lower id; the third does not count
    dx, grads = layer.backward(params, saved, 0.5, ctx)
    assert np.allclose(dx.reshape(-1), np.array([-0.25, 0.375, 0]) * math.log(3), rtol=1e-14)
    assert np.allclose(grads["weight"], [[0.375], [-0.375]], rtol=1e-14)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 15, 100])
def test_chunks_change_neither_loss_nor_gradients(chunk_tokens):
    whole, x, ctx = case("head", "float64")
    chunked = LanguageHead(9, 4, chunk_tokens)
    params = fresh_params(whole, "float64")
    loss, saved = whole.forward(params, x, ctx)
    same_loss, same_saved = chunked.forward(params, x, ctx)
    assert math.isclose(float(loss), float(same_loss), rel_tol=1e-14)
    assert whole.num_correct(saved) == chunked.num_correct(same_saved) > 0
    dx, grads = whole.backward(params, saved, 0.5, ctx)
    same_dx, same_grads = chunked.backward(params, same_saved, 0.5, ctx)
    assert np.allclose(dx, same_dx, rtol=1e-13, atol=1e-16)
    assert np.allclose(grads["weight"], same_grads["weight"], rtol=1e-13, atol=1e-16)


def peak_bytes(call):
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_p12_chunks_bound_the_memory_of_the_loss(dtype):
    """P12: never more than one chunk's logits, whatever the number of tokens."""
    vocab, width, chunk = 2000, 4, 16
    layer = LanguageHead(vocab, width, chunk)
    x = floats((4, 256, width), dtype)
    ctx = context(np.zeros((4, 256), np.int32))
    params = fresh_params(layer, dtype)
    _, saved = layer.forward(params, x, ctx)
    chunk_bytes, weight_bytes = chunk * vocab * 4, vocab * width * 4
    # Beside the chunk: the kernels' tile and row statistics, and the weight and its gradient.
    slack = 2 * 16384 * 4 + 8 * weight_bytes
    assert peak_bytes(lambda: layer.forward(params, x, ctx)) < chunk_bytes + slack
    assert peak_bytes(lambda: layer.backward_input(params, saved, 1.0, ctx)) < chunk_bytes + slack
    assert chunk_bytes + slack < x.shape[0] * x.shape[1] * vocab * 2 / 4


@pytest.mark.parametrize(
    ("targets", "match"),
    [
        (None, "got none"),
        (np.zeros((3, 4), np.int32), r"got int32 \(3, 4\)"),
        (np.zeros((3, 5)), "got float64"),
        (np.full((3, 5), 9), "in 0..8, or -1 for none; got 9..9"),
        (np.full((3, 5), -2), "got -2..-2"),
    ],
    ids=["none", "other shape", "floats", "too large", "negative"],
)
def test_language_head_refuses_bad_targets(targets, match):
    layer, x, _ = case("head", "float32")
    with pytest.raises(BatchError, match=match):
        layer.forward(fresh_params(layer, "float32"), x, context(targets))


@pytest.mark.parametrize(
    ("layer", "name", "std"),
    [
        (TokenEmbedding(400, 100, 8), "weight", 0.1),
        (LanguageHead(400, 100), "weight", 0.1),
        (Projection(400, (("a", 100), ("b", 3))), "a", 1 / 20),
        (Projection(400, (("a", 100),), 0.5), "a", 1 / 40),
    ],
)
def test_initial_weights_have_the_stated_spread(layer, name, std):
    weight = layer.init(make_rng_for, np.dtype("f8"))[name]
    # 40,000 draws: the sample's standard deviation is within 1.8% (5 sigma) of the true one.
    assert abs(weight.std() / std - 1) < 0.018
    assert abs(weight.mean()) < 5 * std / 200
    assert (RMSNorm(4, 0.0).init(make_rng_for, np.dtype("f4"))["weight"] == 1).all()
