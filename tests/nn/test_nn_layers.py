"""Layers and losses: values by hand, gradients by central differences, bytes against the spec."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpisim.nn.arrays import normal_weights
from mpisim.nn.layers import Activation, Embedding, LayerContext, Linear
from mpisim.nn.losses import MeanSquaredError, SoftmaxCrossEntropy
from mpisim.nn.numerics import TILE_ELEMENTS, flat_view, squared_norm, tile_slices
from mpisim.nn.precision import dtype_of, is_floating
from mpisim.reference.mlp import (
    gelu_backward,
    gelu_forward,
    softmax_cross_entropy_sum,
    softmax_cross_entropy_sum_backward,
)

DTYPES = ("float32", "float64")
STORED = (*DTYPES, "bfloat16", "float16")
NO_TARGETS = LayerContext()


def make_rng_for(local):
    return np.random.default_rng(sum(local.encode()))


def floats(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype_of(dtype))


def wide_of(dtype):
    return np.dtype("f4") if dtype in ("bfloat16", "float16") else np.dtype(dtype)


def case(name, rows, dtype):
    """Return (layer, x, ctx) of the layer called `name`, with `rows` rows."""
    rng = np.random.default_rng(rows)
    if name == "embedding":
        return Embedding(11, 3), rng.integers(0, 11, (rows, 4)).astype(np.uint8), NO_TARGETS
    if name == "linear":
        return Linear(5, 3), floats((rows, 5), dtype), NO_TARGETS
    if name == "linear_first":
        return Linear(5, 3, "xavier", input_grad=False), floats((rows, 5), dtype), NO_TARGETS
    if name in ("relu", "tanh", "gelu"):
        return Activation(name), floats((rows, 6), dtype), NO_TARGETS
    if name == "softmax_cross_entropy":
        targets = rng.integers(0, 7, rows).astype(np.uint8)
        return SoftmaxCrossEntropy(7), floats((rows, 7), dtype), LayerContext(targets)
    targets = floats((rows, 2), dtype, seed=1)
    return MeanSquaredError(), floats((rows, 2), dtype), LayerContext(targets)


NAMES = (
    "embedding",
    "linear",
    "linear_first",
    "relu",
    "tanh",
    "gelu",
    "softmax_cross_entropy",
    "mean_squared_error",
)
LOSSES = NAMES[-2:]


def output_grad(name, y, dtype):
    return 0.25 if name in LOSSES else floats(y.shape, dtype, seed=9)


def float_bytes(arrays):
    return sum(array.nbytes for array in arrays if is_floating(array.dtype))


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_shapes_and_names_equal_the_spec(name, dtype, rows):
    layer, x, ctx = case(name, rows, dtype)
    params = layer.init(make_rng_for, dtype_of(dtype))
    y, saved = layer.forward(params, x, ctx)
    dy = output_grad(name, y, dtype)
    _, kept = layer.backward_input(params, saved, dy, ctx)
    spec = layer.spec(x.shape, dtype_of(dtype), "block.layer")

    assert spec.output_shape == y.shape
    assert spec.output_bytes == y.nbytes
    assert spec.input_bytes == x.nbytes
    assert spec.saved_bytes == float_bytes(saved)
    if is_floating(x.dtype):
        assert spec.saves_input == any(array is x for array in saved)
    assert spec.saves_output == any(array is y for array in saved)
    new = [array for array in kept if array is not dy and not any(array is s for s in saved)]
    assert spec.kept_bytes == float_bytes(new)
    assert {param.name: param.shape for param in spec.params} == {
        f"block.layer.{local}": array.shape for local, array in params.items()
    }
    assert tuple(params) == layer.param_names


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("name", NAMES)
def test_dtype_and_shape_are_kept_and_arguments_unchanged(name, dtype, rows):
    layer, x, ctx = case(name, rows, dtype)
    params = layer.init(make_rng_for, dtype_of(dtype))
    y, saved = layer.forward(params, x, ctx)
    dy = output_grad(name, y, dtype)
    given = [x, *params.values(), *saved]
    given += [dy] if isinstance(dy, np.ndarray) else []
    copies = [array.copy() for array in given]
    dx, grads = layer.backward(params, saved, dy, ctx)
    again, _ = layer.forward(params, x, ctx)

    assert y.dtype == (np.float64 if name in LOSSES else dtype_of(dtype))
    assert np.array_equal(again, y)
    for array, copy in zip(given, copies, strict=True):
        assert np.array_equal(array, copy)
    if name in ("embedding", "linear_first"):
        assert dx is None
    else:
        assert dx.shape == x.shape and dx.dtype == dtype_of(dtype)
    assert {key: (grad.shape, grad.dtype) for key, grad in grads.items()} == {
        key: (param.shape, wide_of(dtype)) for key, param in params.items()
    }
    if rows == 0:
        assert all(not grad.any() for grad in grads.values())
        assert name not in LOSSES or float(y) == 0.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_16_bit_storage_is_float32_arithmetic_rounded_once(name, dtype):
    layer, x, ctx = case(name, 5, dtype)
    params = layer.init(make_rng_for, dtype_of(dtype))
    y, saved = layer.forward(params, x, ctx)
    dy = output_grad(name, y, dtype)
    dx, grads = layer.backward(params, saved, dy, ctx)

    def wide(array):
        return array.astype("f4") if is_floating(array.dtype) else array

    wide_params = {key: wide(array) for key, array in params.items()}
    wide_ctx = LayerContext(None if ctx.targets is None else wide(ctx.targets))
    wide_y, _ = layer.forward(wide_params, wide(x), wide_ctx)
    # The backward of the same saved values: rounding those is part of the storage.
    wide_dy = dy if name in LOSSES else wide(dy)
    wide_dx, wide_grads = layer.backward(wide_params, tuple(map(wide, saved)), wide_dy, wide_ctx)
    assert np.array_equal(y, wide_y if name in LOSSES else wide_y.astype(y.dtype))
    if dx is not None:
        assert np.array_equal(dx, wide_dx.astype(dx.dtype))
    for key, grad in grads.items():
        assert np.array_equal(grad, wide_grads[key])


def test_hits_are_counted_before_probabilities_are_rounded():
    # In bfloat16 both probabilities of a row are 0.5.
    logits = np.array([[0.0, 2**-9], [2**-9, 0.0]]).astype(dtype_of("bfloat16"))
    _, saved = SoftmaxCrossEntropy(2).forward({}, logits, LayerContext(np.array([1, 1])))
    assert saved[0].astype("f4").tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert int(saved[1]) == 1


def test_mean_squared_error_takes_float32_targets_beside_16_bit_predictions():
    x = floats((3, 2), "bfloat16")
    targets = floats((3, 2), "float32", seed=1)
    loss, saved = MeanSquaredError().forward({}, x, LayerContext(targets))
    assert saved[0].dtype == dtype_of("bfloat16")
    expected = np.square(x.astype("f8") - targets.astype("f8")).sum()
    assert math.isclose(float(loss), expected, rel_tol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_match_central_differences(name):
    layer, x, ctx = case(name, 4, "float64")
    params = layer.init(make_rng_for, np.dtype("f8"))
    y, saved = layer.forward(params, x, ctx)
    dy = output_grad(name, y, "float64")
    dx, grads = layer.backward(params, saved, dy, ctx)

    def objective():
        return float(np.sum(layer.forward(params, x, ctx)[0] * dy))

    checked = dict(grads) if dx is None else {"x": dx, **grads}
    assert checked
    for key, analytic in checked.items():
        array = x if key == "x" else params[key]
        numeric = np.empty_like(array)
        for index in np.ndindex(array.shape):
            old = array[index]
            array[index] = old + 1e-6
            above = objective()
            array[index] = old - 1e-6
            below = objective()
            array[index] = old
            numeric[index] = (above - below) / 2e-6
        assert np.abs(numeric - analytic).max() <= 1e-6 * max(1.0, np.abs(analytic).max())


def test_embedding_by_hand():
    weight = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    ids = np.array([[2, 0], [2, 2]], dtype=np.uint8)
    y, saved = Embedding(3, 2).forward({"weight": weight}, ids, NO_TARGETS)
    assert y.tolist() == [[5, 6, 1, 2], [5, 6, 5, 6]]
    dy = np.array([[1.0, 2, 3, 4], [10, 20, 100, 200]])
    dx, grads = Embedding(3, 2).backward({"weight": weight}, saved, dy, NO_TARGETS)
    assert dx is None
    assert grads["weight"].tolist() == [[3, 4], [0, 0], [111, 222]]


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "uint16"])
def test_embedding_takes_any_integer_dtype_and_refuses_bad_ids(dtype):
    layer = Embedding(4, 2)
    params = layer.init(make_rng_for, np.dtype("f4"))
    good = np.array([[0, 3]], dtype=dtype)
    y, _ = layer.forward(params, good, NO_TARGETS)
    assert np.array_equal(y, params["weight"][[0, 3]].reshape(1, 4))
    with pytest.raises(IndexError):
        layer.forward(params, np.array([[0, 4]], dtype=dtype), NO_TARGETS)
    if np.dtype(dtype).kind == "i":
        with pytest.raises(IndexError, match="got -1"):
            layer.forward(params, np.array([[0, -1]], dtype=dtype), NO_TARGETS)
    with pytest.raises(TypeError, match="float32"):
        layer.forward(params, np.zeros((1, 2), np.float32), NO_TARGETS)


def test_embedding_gradient_equals_an_unbuffered_scatter():
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 256, (50, 8)).astype(np.uint8)
    dy = rng.standard_normal((50, 8 * 5))
    expected = np.zeros((256, 5))
    np.add.at(expected, ids.reshape(-1), dy.reshape(-1, 5))
    grads = Embedding(256, 5).backward_weight((ids,), (dy,), NO_TARGETS)
    assert np.allclose(grads["weight"], expected, rtol=1e-13, atol=1e-13)


def test_linear_by_hand():
    params = {"weight": np.array([[1.0, 2.0], [3.0, 4.0]]), "bias": np.array([10.0, 20.0])}
    x = np.array([[1.0, 1.0], [2.0, 0.0]])
    layer = Linear(2, 2)
    y, saved = layer.forward(params, x, NO_TARGETS)
    assert y.tolist() == [[14, 26], [12, 24]]
    dx, grads = layer.backward(params, saved, np.array([[1.0, 0.0], [0.0, 1.0]]), NO_TARGETS)
    assert dx.tolist() == [[1, 3], [2, 4]]
    assert grads["weight"].tolist() == [[1, 2], [1, 0]]
    assert grads["bias"].tolist() == [1, 1]
    spec = layer.spec((2, 2), np.dtype("f8"), "l")
    assert (spec.forward_flops, spec.backward_flops) == (16 + 4, 32 + 4)
    first = Linear(2, 2, input_grad=False)
    assert first.spec((2, 2), np.dtype("f8"), "l").backward_flops == 16 + 4


def test_activations_by_hand():
    x = np.array([[-1.0, 0.0, 1.0, 2.0]])
    ones = np.ones_like(x)
    y, saved = Activation("relu").forward({}, x, NO_TARGETS)
    assert y.tolist() == [[0, 0, 1, 2]]
    assert Activation("relu").backward_input({}, saved, ones, NO_TARGETS)[0].tolist() == [
        [0, 0, 1, 1]
    ]
    y, saved = Activation("tanh").forward({}, x, NO_TARGETS)
    assert np.allclose(y, [[math.tanh(value) for value in x[0]]], rtol=1e-15)
    assert Activation("tanh").backward_input({}, saved, ones, NO_TARGETS)[0][0, 1] == 1.0
    y, saved = Activation("gelu").forward({}, x, NO_TARGETS)
    # 0.5 * (1 + tanh(sqrt(2 / pi) * 1.044715)) = 0.84119199...
    assert np.allclose(y, [[-0.15880801, 0.0, 0.84119199, 1.95459769]], atol=1e-8)
    assert Activation("gelu").backward_input({}, saved, ones, NO_TARGETS)[0][0, 1] == 0.5


def test_gelu_over_several_tiles_equals_the_reference():
    x = 3 * floats((3, TILE_ELEMENTS // 2 + 7), "float64")
    dy = floats(x.shape, "float64", seed=2)
    y, saved = Activation("gelu").forward({}, x, NO_TARGETS)
    dx, _ = Activation("gelu").backward_input({}, saved, dy, NO_TARGETS)
    assert np.allclose(y, gelu_forward(x), rtol=1e-13, atol=1e-15)
    assert np.allclose(dx, gelu_backward(x, dy), rtol=1e-12, atol=1e-14)


def test_gelu_of_a_strided_input_equals_that_of_its_copy():
    x = floats((6, 4), "float32").T
    dy = floats((6, 4), "float32", seed=1).T
    layer = Activation("gelu")
    y, saved = layer.forward({}, x, NO_TARGETS)
    assert np.array_equal(y, layer.forward({}, x.copy(order="C"), NO_TARGETS)[0])
    expected, _ = layer.backward_input({}, (x.copy(order="C"),), dy.copy(order="C"), NO_TARGETS)
    assert np.array_equal(layer.backward_input({}, saved, dy, NO_TARGETS)[0], expected)


def test_softmax_cross_entropy_by_hand():
    layer = SoftmaxCrossEntropy(2)
    logits = np.array([[0.0, 0.0], [math.log(3.0), 0.0]])
    ctx = LayerContext(np.array([0, 1]))
    loss, saved = layer.forward({}, logits, ctx)
    assert math.isclose(float(loss), math.log(2) + math.log(4), rel_tol=1e-15)
    dx, _ = layer.backward_input({}, saved, 0.5, ctx)
    assert np.allclose(dx, [[-0.25, 0.25], [0.375, -0.375]], rtol=1e-15)
    assert layer.num_correct(saved[0], ctx.targets) == layer.num_correct(logits, ctx.targets) == 1


def test_softmax_cross_entropy_equals_the_reference():
    logits = floats((9, 5), "float64")
    targets = np.arange(9) % 5
    ctx = LayerContext(targets)
    loss, saved = SoftmaxCrossEntropy(5).forward({}, logits, ctx)
    dx, _ = SoftmaxCrossEntropy(5).backward_input({}, saved, np.float64(0.125), ctx)
    assert math.isclose(float(loss), softmax_cross_entropy_sum(logits, targets)[0], rel_tol=1e-14)
    expected = softmax_cross_entropy_sum_backward(logits, targets, seed=0.125)
    assert np.allclose(dx, expected, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_cross_entropy_of_huge_logits_is_finite(dtype):
    logits = np.array([[1e30, 0.0, -1e30], [-1e4, 1e4, 0.0]], dtype=dtype)
    ctx = LayerContext(np.array([0, 0]))
    loss, saved = SoftmaxCrossEntropy(3).forward({}, logits, ctx)
    assert float(loss) == 2e4
    assert np.isfinite(saved[0]).all()


def test_loss_is_summed_in_float64():
    # 2**24 + 1 has no float32: a float32 sum of these rows would lose the ones.
    prediction = np.zeros((11, 1), np.float32)
    prediction[0], prediction[1:] = 4096.0, 1.0
    ctx = LayerContext(np.zeros((11, 1), np.float32))
    loss, _ = MeanSquaredError().forward({}, prediction, ctx)
    assert float(loss) == 2.0**24 + 10
    rows = 3000
    ctx = LayerContext(np.zeros(rows, np.int64))
    logits = np.zeros((rows, 3), np.float32)
    loss, _ = SoftmaxCrossEntropy(3).forward({}, logits, ctx)
    assert math.isclose(float(loss), rows * math.log(3.0), rel_tol=1e-12)


def test_mean_squared_error_by_hand():
    ctx = LayerContext(np.array([[1.0, 1.0], [0.0, 2.0]]))
    loss, saved = MeanSquaredError().forward({}, np.array([[2.0, 4.0], [0.0, 0.0]]), ctx)
    assert float(loss) == 1 + 9 + 0 + 4
    dx, _ = MeanSquaredError().backward_input({}, saved, 0.5, ctx)
    assert dx.tolist() == [[1, 3], [0, -2]]


@pytest.mark.parametrize(
    "targets",
    [
        None,
        np.zeros(3, np.int64),
        np.zeros((2, 1), np.int64),
        np.zeros(2),
        np.array([0, 4]),
        np.array([-1, 0]),
    ],
    ids=["none", "too many", "two dims", "floats", "too large", "negative"],
)
def test_softmax_cross_entropy_refuses_bad_targets(targets):
    with pytest.raises(ValueError, match="targets must be"):
        SoftmaxCrossEntropy(4).forward({}, np.zeros((2, 4)), LayerContext(targets))


@pytest.mark.parametrize(
    "targets",
    [None, np.zeros(2), np.zeros((2, 1), np.float32), np.zeros((1, 1))],
    ids=["none", "would broadcast", "other dtype", "other length"],
)
def test_mean_squared_error_refuses_bad_targets(targets):
    with pytest.raises(ValueError, match="targets must be"):
        MeanSquaredError().forward({}, np.zeros((2, 1)), LayerContext(targets))


@pytest.mark.parametrize(
    ("layer", "variance"),
    [
        (Linear(400, 100, "he"), 2 / 400),
        (Linear(400, 100, "xavier"), 2 / 500),
        (Embedding(400, 100), 1.0),
    ],
)
def test_initial_weights_have_the_stated_variance(layer, variance):
    params = layer.init(make_rng_for, np.dtype("f4"))
    weight = params["weight"].astype(np.float64)
    # 40,000 draws: the sample variance is within 3.5% (5 sigma) of the true one.
    assert abs(weight.var() / variance - 1) < 0.035
    assert abs(weight.mean()) < 5 * math.sqrt(variance / 40000)
    assert not params.get("bias", np.zeros(1)).any()
    wide = layer.init(make_rng_for, np.dtype("f8"))["weight"]
    assert wide.dtype == np.float64
    assert np.array_equal(wide.astype(np.float32), params["weight"])


def test_16_bit_weights_are_the_rounded_float32_weights():
    # Rounding straight from float64 gives another number for one draw in 10,000 or so.
    rng = np.random.default_rng
    half = normal_weights(rng(1), (400, 1000), 1.0, np.dtype("f2"))
    single = normal_weights(rng(1), (400, 1000), 1.0, np.dtype("f4"))
    assert half.dtype == np.float16 and np.array_equal(half, single.astype("f2"))
    assert not np.array_equal(half, normal_weights(rng(1), half.shape, 1.0, "f8").astype("f2"))


def test_squared_norm_spans_tiles_and_does_not_overflow_float32():
    count = 2 * TILE_ELEMENTS + 5
    assert squared_norm(np.ones(count, np.float32)) == count
    assert squared_norm(np.ones((5, 7))) == 35
    assert math.isclose(squared_norm(np.full(2, 1e20, np.float32)), 2e40, rel_tol=1e-6)
    assert squared_norm(np.empty((0, 3), np.float32)) == 0.0
    assert math.isnan(squared_norm(np.array([1, np.nan], np.float32)))
    assert squared_norm(np.arange(6.0, dtype=np.float32).reshape(2, 3).T) == 55


def test_tiles_cover_once_and_flat_view_never_copies():
    assert [(tile.start, tile.stop) for tile in tile_slices(7, 3)] == [(0, 3), (3, 6), (6, 7)]
    assert list(tile_slices(0)) == []
    array = np.zeros((2, 3))
    flat_view(array)[4] = 1
    assert array[1, 1] == 1
    with pytest.raises(ValueError, match="C-contiguous"):
        flat_view(array.T)
