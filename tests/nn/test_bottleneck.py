"""Learned bottlenecks: their layers, their place in a model, and how they start."""

from __future__ import annotations

import numpy as np
import pytest
from memory_probe import KERNEL_SETS, probe, ready_kernels
from small_decoders import (
    STORED,
    central_differences,
    floats,
    run,
    shaken,
    small_decoder,
    token_batch,
)
from test_block_memory import check_block
from test_layer_memory import check_layer
from test_split_memory import check_halves

from mpisim.errors import ConfigError
from mpisim.layouts.specs import Conditions
from mpisim.nn.bottleneck import (
    CALIBRATION_TILE,
    ActivationStatistics,
    LayerNorm,
    TokenMap,
    insert_bottlenecks,
    principal_components,
    random_start,
)
from mpisim.nn.layers import LayerContext, Linear
from mpisim.nn.models import build_mlp
from mpisim.nn.params import fill_param, init_params
from mpisim.nn.precision import dtype_of

__all__ = ["probe"]

CTX = LayerContext()


# --- layers ----------------------------------------------------------------------------------


def test_a_map_of_tokens_is_a_linear_layer_of_rows():
    tokens, rows = TokenMap(4, 3), Linear(4, 3)
    params = {"weight": floats((4, 3)), "bias": floats((3,), seed=1)}
    x, dy = floats((2, 5, 4), seed=2), floats((2, 5, 3), seed=3)
    y, saved = tokens.forward(params, x, CTX)
    dx, kept = tokens.backward_input(params, saved, dy, CTX)
    grads = tokens.backward_weight(saved, kept, CTX)
    assert saved[0] is x and kept[0] is dy
    y_rows, saved = rows.forward(params, x.reshape(10, 4), CTX)
    dx_rows, kept = rows.backward_input(params, saved, dy.reshape(10, 3), CTX)
    want = rows.backward_weight(saved, kept, CTX)
    assert y.shape == (2, 5, 3) and y.tobytes() == y_rows.tobytes()
    assert dx.shape == (2, 5, 4) and dx.tobytes() == dx_rows.tobytes()
    assert {name: a.tobytes() for name, a in grads.items()} == {
        name: a.tobytes() for name, a in want.items()
    }
    assert TokenMap(4, 3, input_grad=False).backward_input(params, saved, dy, CTX)[0] is None


def test_a_layer_norm_by_hand():
    y, (kept, r) = LayerNorm(2, eps=0.0).forward({}, np.array([[[1.0, 5.0], [4.0, 2.0]]]), CTX)
    np.testing.assert_allclose(y, [[[-1.0, 1.0], [1.0, -1.0]]], rtol=1e-15)
    np.testing.assert_allclose(r, [[0.5], [1.0]], rtol=1e-15)
    assert kept is y
    tokens = floats((3, 4, 6), seed=1) * 10 + 3
    y, _ = LayerNorm(6, eps=0.5).forward({}, tokens, CTX)
    mean, variance = tokens.mean(-1, keepdims=True), tokens.var(-1, keepdims=True)
    np.testing.assert_allclose(y, (tokens - mean) / np.sqrt(variance + 0.5), rtol=1e-12)


@pytest.mark.parametrize("layer", [TokenMap(5, 3), TokenMap(3, 5), LayerNorm(5, eps=0.3)])
def test_gradients_are_central_differences(layer):
    width = getattr(layer, "in_features", 5)
    params = {
        "weight": floats((width, getattr(layer, "out_features", 1))),
        "bias": floats((getattr(layer, "out_features", 1),), seed=4),
    }
    x = floats((2, 3, width), seed=1)
    weights = floats(layer.forward(params, x, CTX)[0].shape, seed=2)

    def objective():
        return float(np.sum(layer.forward(params, x, CTX)[0] * weights))

    _, saved = layer.forward(params, x, CTX)
    dx, kept = layer.backward_input(params, saved, weights, CTX)
    grads = layer.backward_weight(saved, kept, CTX)
    assert set(grads) == set(layer.param_names)
    np.testing.assert_allclose(dx, central_differences(objective, x), rtol=1e-7, atol=1e-8)
    for name, grad in grads.items():
        numeric = central_differences(objective, params[name])
        np.testing.assert_allclose(grad, numeric, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layer", [TokenMap(8, 3), LayerNorm(8)])
def test_16_bit_values_are_computed_with_in_float32(layer, dtype):
    params = layer.init(lambda name: np.random.default_rng(0), dtype_of(dtype))
    x = floats((2, 3, 8), dtype, seed=1)
    y, _ = layer.forward(params, x, CTX)
    wide = {name: array.astype(np.float32) for name, array in params.items()}
    exact, _ = layer.forward(wide, x.astype(np.float32), CTX)
    assert y.dtype == x.dtype and y.tobytes() == exact.astype(x.dtype).tobytes()
    assert np.array_equal(x, floats((2, 3, 8), dtype, seed=1))


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(
    "layer", [TokenMap(7, 3), TokenMap(3, 7), TokenMap(1, 90), LayerNorm(7), LayerNorm(1)]
)
def test_every_call_allocates_what_the_spec_says(probe, layer, dtype, kernels):
    ctx = LayerContext(kernels=ready_kernels(kernels))
    width = getattr(layer, "in_features", None) or layer.width
    for shape in ((0, 5), (1, 1), (3, 5), (40, 300)):
        x = floats((*shape, width), dtype)
        check_layer(probe, layer, x, dtype, ctx, Conditions(kernels=kernels))


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("kind", ["calibrated", "layernorm"])
def test_its_blocks_allocate_what_their_specs_say(probe, kind, dtype, kernels):
    model = insert_bottlenecks(small_decoder(), {0: "block0"}, 3, kind)
    ctx = LayerContext(kernels=ready_kernels(kernels))
    params = model.split_params(init_params(model, 0, dtype_of(dtype)))
    specs = model.spec(4, dtype_of(dtype), 5, Conditions(kernels=kernels))
    x = floats((4, 5, 8), dtype)
    for index in (2, 3):
        block, spec = model.blocks[index], specs[index]
        check_halves(probe, block, spec, params[index], x, ctx)
        _, saved = block.forward(params[index], x, ctx)
        saved_bytes = sum(map(spec.boundary_bytes, spec.saved_boundaries()))
        assert saved_bytes + spec.extra_saved_bytes == sum(
            array.nbytes for array in block.saved_arrays(saved)
        )
        x = check_block(probe, block, spec, params[index], x, ctx)


# --- in a model ------------------------------------------------------------------------------


def test_blocks_are_put_around_the_boundary():
    model = small_decoder()
    narrow = insert_bottlenecks(model, {0: "embed", 1: "block1"}, 3)
    assert [block.name for block in narrow.blocks] == [
        "embed", "boundary0.encode", "boundary0.decode", "block0", "block1", "boundary1.encode",
        "boundary1.decode", "head",
    ]  # fmt: skip
    assert [spec.output_shape for spec in narrow.spec(2, np.dtype("f4"), 4)[:3]] == [
        (2, 4, 8), (2, 4, 3), (2, 4, 8),
    ]  # fmt: skip
    names = [param.name for param in narrow.param_specs()]
    assert [name for name in names if "boundary1" in name] == [
        "boundary1.encode.map.weight", "boundary1.encode.map.bias",
        "boundary1.decode.map.weight", "boundary1.decode.map.bias",
    ]  # fmt: skip
    assert [name for name in names if "boundary" not in name] == [
        param.name for param in model.param_specs()
    ]
    assert narrow.d_model == model.d_model and insert_bottlenecks(model, {}, 3) == model
    normed = insert_bottlenecks(model, {0: "embed"}, 3, "layernorm")
    assert [name for name, _ in normed.blocks[1].layers] == ["norm", "map"]
    assert [param.name for param in normed.param_specs()] == [
        name for name in names if "boundary1" not in name
    ]


def test_an_mlp_has_the_width_of_the_block_before():
    model = build_mlp(
        input_kind="features", num_features=5, hidden=(7, 4), activation="tanh",
        output=("targets", 2),
    )  # fmt: skip
    narrow = insert_bottlenecks(model, {0: "block0"}, 2)
    shapes = {param.name: param.shape for param in narrow.param_specs()}
    assert shapes["boundary0.encode.map.weight"] == (7, 2)
    assert shapes["boundary0.decode.map.weight"] == (2, 7)


@pytest.mark.parametrize(
    ("after", "width", "words"),
    [
        ({0: "head"}, 3, "one of the blocks embed, block0, block1; got 'head'"),
        ({0: "block7"}, 3, "got 'block7'"),
        ({0: "block0", 1: "block0"}, 3, "at most one bottleneck"),
        ({0: "block0"}, 9, "at least 1 and at most 8"),
        ({0: "block0"}, 0, "got 0"),
    ],
)
def test_what_does_not_fit_is_refused(after, width, words):
    with pytest.raises(ConfigError, match=words):
        insert_bottlenecks(small_decoder(), after, width)


def test_every_parameter_can_be_filled_by_name():
    model = insert_bottlenecks(small_decoder(), {0: "block0"}, 3)
    for name, values in init_params(model, 5, "float64").items():
        if "boundary" in name:
            out = np.empty(values.size)
            fill_param(model, 5, name, out)
            assert out.tobytes() == values.tobytes()
            assert not values.any() if name.endswith("bias") else np.std(values) < 0.8


def test_a_models_gradients_reach_through_a_bottleneck():
    model = insert_bottlenecks(small_decoder(), {0: "block0"}, 3, "layernorm")
    params = shaken(init_params(model, 0, "float64"))
    ids, targets = token_batch(2, 4)
    ctx = LayerContext(targets)
    _, grads, _ = run(model, params, ids, ctx)
    for name in ("block0.down.weight", "boundary0.encode.map.weight", "boundary0.decode.map.bias"):
        array = params[name]
        place = tuple(extent // 2 for extent in array.shape)

        def objective(array=array):
            return run(model, params, ids, ctx)[0]

        old, losses = array[place], []
        for shift in (1e-4, -1e-4):
            array[place] = old + shift
            losses.append(objective())
        array[place] = old
        slope = (losses[0] - losses[1]) / 2e-4
        assert grads[name][place] == pytest.approx(slope, rel=1e-5, abs=1e-7), name


# --- how they start --------------------------------------------------------------------------


def with_statistics(*batches):
    statistics = ActivationStatistics(batches[0].shape[-1])
    for batch in batches:
        statistics.add(batch)
    return statistics


def through(start, x):
    return (x @ start.encode_weight + start.encode_bias) @ start.decode_weight + start.decode_bias


def test_a_small_case_by_hand():
    # Tokens on the line (1, 2) + t * (3, 4) / 5 at t = -5, 0, 5.
    x = np.array([[-2.0, -2.0], [1.0, 2.0], [4.0, 6.0]])
    statistics = with_statistics(x)
    assert statistics.count == 3
    assert statistics.totals.tolist() == [3, 3, 6, 21, 30, 30, 44]
    mean, covariance = statistics.mean_and_covariance()
    np.testing.assert_allclose(mean, [1, 2], rtol=1e-15)
    np.testing.assert_allclose(covariance, [[9, 12], [12, 16]], rtol=1e-15)
    start = statistics.components(1)
    np.testing.assert_allclose(start.encode_weight, [[0.6], [0.8]], rtol=1e-14)
    np.testing.assert_allclose(start.encode_bias, [-2.2], rtol=1e-14)
    np.testing.assert_allclose(start.decode_weight, [[0.6, 0.8]], rtol=1e-14)
    np.testing.assert_allclose(start.decode_bias, [1, 2], rtol=1e-14)
    z = x @ start.encode_weight + start.encode_bias
    np.testing.assert_allclose(z, [[-5], [0], [5]], atol=1e-13)


def test_statistics_are_those_of_numpy():
    x = floats((3, CALIBRATION_TILE, 6), seed=1) @ floats((6, 6), seed=2) + np.arange(6.0) * 3
    flat = x.reshape(-1, 6)
    statistics = with_statistics(x[:2, :700], x[:2, 700:], x[2])
    assert statistics.count == len(flat)
    mean, covariance = statistics.mean_and_covariance()
    np.testing.assert_allclose(mean, flat.mean(0), rtol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(flat.T), rtol=1e-10, atol=1e-12)
    first, second = with_statistics(x[:1]), with_statistics(x[1:])
    first.merge(second)
    np.testing.assert_allclose(first.totals, statistics.totals, rtol=1e-12)
    assert first.count == statistics.count


def test_sums_are_taken_in_float64():
    x = (1000 + floats((5000, 2), seed=3)).astype(np.float32)
    mean, covariance = with_statistics(x).mean_and_covariance()
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-13)
    # A float32 sum of squares would be off by more than the variance.
    np.testing.assert_allclose(covariance, np.cov(exact.T), rtol=1e-6, atol=1e-7)
    halves = floats((50, 3), "bfloat16")
    mean, _ = with_statistics(halves).mean_and_covariance()
    np.testing.assert_allclose(mean, halves.astype(np.float64).mean(0), rtol=1e-13)


def test_activations_of_a_low_rank_come_back_exactly():
    rank, width = 3, 8
    x = floats((40, rank), seed=1) @ floats((rank, width), seed=2) + floats((width,), seed=3)
    for kept in (rank, rank + 2, width):
        start = with_statistics(x).components(kept)
        np.testing.assert_allclose(through(start, x), x, atol=1e-12)
        eye = start.encode_weight.T @ start.encode_weight
        np.testing.assert_allclose(eye, np.eye(kept), atol=1e-12)
        assert start.decode_weight.tobytes() == start.encode_weight.T.copy().tobytes()
    lost = x - through(with_statistics(x).components(rank - 1), x)
    # What is lost is the smallest of the variances.
    smallest = np.sort(np.linalg.eigvalsh(np.cov(x.T)))[-rank]
    assert np.sum(lost**2) / (len(x) - 1) == pytest.approx(smallest, rel=1e-9)
    assert np.max(np.abs(through(random_start(0, 0, width, rank), x) - x)) > 0.5


def test_components_keep_more_than_random_directions():
    x = floats((300, 16), seed=1) * 0.8 ** np.arange(16) + 2.0
    best, chance = with_statistics(x).components(4), random_start(3, 0, 16, 4)

    def error(start):
        return np.sum((through(start, x) - x) ** 2)

    assert error(best) < 0.5 * error(chance)


def test_components_have_one_sign_and_come_by_size():
    turned = np.linalg.qr(floats((5, 5), seed=4))[0]
    variances = np.array([3.0, 7.0, 1.0, 5.0, 2.0])
    covariance = (turned * variances) @ turned.T
    directions = principal_components(covariance, 4)
    largest = np.abs(directions).argmax(axis=0)
    assert (directions[largest, np.arange(4)] > 0).all()
    np.testing.assert_allclose(np.abs(directions.T @ turned), np.eye(5)[[1, 3, 0, 4]], atol=1e-12)
    for width in (1, 2, 3):
        assert np.array_equal(principal_components(covariance, width), directions[:, :width])


def test_a_random_start_is_the_names_and_orthonormal():
    start = random_start(7, 1, 12, 5)
    np.testing.assert_allclose(start.encode_weight.T @ start.encode_weight, np.eye(5), atol=1e-12)
    assert start.decode_weight.tobytes() == start.encode_weight.T.copy().tobytes()
    assert not start.encode_bias.any() and not start.decode_bias.any()
    assert start.encode_weight.tobytes() == random_start(7, 1, 12, 5).encode_weight.tobytes()
    for other in (random_start(8, 1, 12, 5), random_start(7, 2, 12, 5)):
        assert np.abs(start.encode_weight - other.encode_weight).max() > 0.05
    # Either sign is as likely: the library's would make every first element negative.
    signs = [np.sign(random_start(seed, 0, 3, 1).encode_weight[0, 0]) for seed in range(40)]
    assert 8 < signs.count(1.0) < 32


def test_a_start_fits_the_parameters_of_its_model():
    model = insert_bottlenecks(small_decoder(), {2: "block0"}, 3)
    x = floats((6, 5, 8), seed=1) @ np.diag([3, 2, 1, 0, 0, 0, 0, 0.0]) + 1.0
    named = with_statistics(x).components(3).named(2)
    shapes = {p.name: p.shape for p in model.param_specs() if "boundary" in p.name}
    assert {name: array.shape for name, array in named.items()} == shapes
    assert all(array.dtype == np.float64 for array in named.values())
    params = init_params(model, 0, "float64") | named
    y = x
    for block, block_params in list(zip(model.blocks, model.split_params(params), strict=True))[
        2:4
    ]:
        y, _ = block.forward(block_params, y, CTX)
    np.testing.assert_allclose(y, x, atol=1e-12)


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(ValueError, match="at least 2 tokens; got 1"):
        with_statistics(np.ones((1, 3))).components(1)
    with pytest.raises(ValueError, match="must be finite"):
        with_statistics(np.array([[1.0, np.inf], [1.0, 2.0], [2.0, 2.0]])).components(1)
    for width in (0, 4):
        with pytest.raises(ValueError, match=f"in 1..3; got {width}"):
            principal_components(np.eye(3), width)
