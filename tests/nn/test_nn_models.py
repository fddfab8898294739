"""Blocks, models and initial weights: against the reference, the spec, and one another."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from mpisim.errors import ConfigError
from mpisim.nn import models, optim
from mpisim.nn.layers import Activation, LayerContext, Linear
from mpisim.nn.models import build_mlp
from mpisim.nn.params import init_params, rng_for_name
from mpisim.reference.mlp import mlp_loss_and_gradients

TOKENS = {"input_kind": "tokens", "window": 3, "vocab_size": 256, "embed_dim": 2}
FEATURES = {"input_kind": "features", "num_features": 5}


def tokens_model(hidden=(6, 4), activation="relu"):
    return build_mlp(**TOKENS, hidden=hidden, activation=activation, output=("classes", 256))


def features_model(hidden=(6, 4), activation="relu", targets=2):
    return build_mlp(**FEATURES, hidden=hidden, activation=activation, output=("targets", targets))


def make_batch(model, rows, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    if model.input_kind == "tokens":
        ids = rng.integers(0, 256, (rows, model.input_width)).astype(np.uint8)
        return ids, rng.integers(0, 256, rows).astype(np.uint8)
    x = rng.standard_normal((rows, model.input_width)).astype(dtype)
    return x, rng.standard_normal((rows, 2)).astype(dtype)


def run(model, params, x, targets, seed):
    """Return (summed loss, gradients by full name, saved of every block)."""
    split = model.split_params(params)
    ctx = LayerContext(targets)
    saved = []
    for block, block_params in zip(model.blocks, split, strict=True):
        x, block_saved = block.forward(block_params, x, ctx)
        saved.append(block_saved)
    grads = {}
    dy = seed
    for block, block_params, block_saved in reversed(
        list(zip(model.blocks, split, saved, strict=True))
    ):
        dy, block_grads = block.backward(block_params, block_saved, dy, ctx)
        grads |= {f"{block.name}.{name}": grad for name, grad in block_grads.items()}
    return float(x), grads, saved


def test_names_and_order_of_blocks_and_parameters():
    model = tokens_model()
    assert [block.name for block in model.blocks] == ["embed", "block0", "block1", "head"]
    assert [(param.name, param.shape) for param in model.param_specs()] == [
        ("embed.embedding.weight", (256, 2)),
        ("block0.linear.weight", (6, 6)),
        ("block0.linear.bias", (6,)),
        ("block1.linear.weight", (6, 4)),
        ("block1.linear.bias", (4,)),
        ("head.linear.weight", (4, 256)),
        ("head.linear.bias", (256,)),
    ]
    assert list(init_params(model, 0, "float32")) == [p.name for p in model.param_specs()]
    assert model.loss_block_index == 3


def test_empty_hidden_is_a_linear_model():
    model = features_model(hidden=())
    assert [block.name for block in model.blocks] == ["head"]
    assert [param.shape for param in model.param_specs()] == [(5, 2), (2,)]


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("hidden", [(), (7,), (7, 3, 4)])
def test_loss_and_gradients_equal_the_reference(hidden, activation):
    model = features_model(hidden, activation)
    params = init_params(model, 3, "float64")
    x, y = make_batch(model, 9)
    loss, grads, _ = run(model, params, x, y, seed=1 / 9)
    want_loss, want_grads = mlp_loss_and_gradients(params, x, y, activation)
    assert math.isclose(loss / 9, want_loss, rel_tol=1e-13)
    assert set(grads) == set(want_grads) == set(params)
    for name, grad in grads.items():
        assert np.allclose(grad, want_grads[name], rtol=1e-12, atol=1e-14), name


def test_token_model_gradients_match_central_differences():
    model = tokens_model(hidden=(5,), activation="tanh")
    params = init_params(model, 0, "float64")
    ids, targets = make_batch(model, 4)
    _, grads, _ = run(model, params, ids, targets, seed=0.25)
    rng = np.random.default_rng(1)
    for name, grad in grads.items():
        flat, flat_grad = params[name].reshape(-1), grad.reshape(-1)
        # The largest elements and a few of any size: most embedding rows do not occur.
        chosen = {*np.argsort(-np.abs(flat_grad))[:5], *rng.integers(0, flat.size, 3)}
        for index in chosen:
            old = flat[index]
            flat[index] = old + 1e-5
            above = run(model, params, ids, targets, 0.25)[0]
            flat[index] = old - 1e-5
            below = run(model, params, ids, targets, 0.25)[0]
            flat[index] = old
            numeric = 0.25 * (above - below) / 2e-5
            assert abs(numeric - flat_grad[index]) <= 1e-6 * max(1.0, abs(numeric)), name


@pytest.mark.parametrize("make_model", [tokens_model, features_model])
def test_microbatches_of_unequal_size_add_up_to_the_batch(make_model):
    model = make_model()
    params = init_params(model, 1, "float64")
    x, targets = make_batch(model, 10)
    loss, grads, _ = run(model, params, x, targets, seed=0.1)
    total, sums = 0.0, {name: np.zeros_like(array) for name, array in params.items()}
    for lo, hi in ((0, 4), (4, 4), (4, 7), (7, 10)):
        part, part_grads, _ = run(model, params, x[lo:hi], targets[lo:hi], seed=0.1)
        total += part
        for name, grad in part_grads.items():
            sums[name] += grad
    assert math.isclose(total, loss, rel_tol=1e-13)
    for name, grad in grads.items():
        assert np.allclose(sums[name], grad, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("make_model", [tokens_model, features_model])
def test_saved_bytes_of_every_block_equal_its_spec(make_model, activation, dtype, rows):
    model = make_model(activation=activation)
    params = init_params(model, 0, dtype)
    x, targets = make_batch(model, rows, dtype)
    loss, grads, saved = run(model, params, x, targets, seed=0.5)
    assert rows or loss == 0.0
    assert {grad.dtype for grad in grads.values()} == {np.dtype(dtype)}
    specs = model.spec(rows, np.dtype(dtype))
    for block, block_saved, spec in zip(model.blocks, saved, specs, strict=True):
        arrays = block.saved_arrays(block_saved)
        assert len({id(array) for array in arrays}) == len(arrays)
        boundaries = sum(map(spec.boundary_bytes, spec.saved_boundaries()))
        assert sum(array.nbytes for array in arrays) == boundaries + spec.extra_saved_bytes


def test_an_array_that_two_layers_save_counts_once():
    # relu saves its output, which is the next linear's input.
    model = features_model(hidden=(4,))
    block = type(model.blocks[0])("pair", (("act", Activation("relu")), ("linear", Linear(5, 3))))
    params = block.init(lambda name: np.random.default_rng(0), np.dtype("f8"))
    _, saved = block.forward(params, np.ones((2, 5)), LayerContext())
    assert saved[0][0] is saved[1][0]
    assert [array.nbytes for array in block.saved_arrays(saved)] == [2 * 5 * 8]
    assert block.spec((2, 5), np.dtype("f8")).saved_boundaries() == (1,)


def test_between_is_called_between_the_halves_and_between_layers():
    model = tokens_model()
    params = init_params(model, 0, "float64")
    ids, targets = make_batch(model, 2)
    head = model.blocks[-1]
    ctx = LayerContext(targets)
    head_params = model.split_params(params)[-1]
    _, saved = head.forward(head_params, np.ones((2, 4)), ctx)
    calls = []
    dx, grads = head.backward(head_params, saved, 1.0, ctx, lambda: calls.append(1))
    assert len(calls) == 3  # loss input | loss weight | linear input | linear weight
    same_dx, same_grads = head.backward(head_params, saved, 1.0, ctx)
    assert np.array_equal(dx, same_dx)
    assert list(grads) == list(same_grads) == ["linear.weight", "linear.bias"]


def test_first_layer_over_features_computes_no_input_gradient():
    model = features_model()
    x, targets = make_batch(model, 3)
    params = init_params(model, 0, "float64")
    first = model.blocks[0]
    y, saved = first.forward(model.split_params(params)[0], x, LayerContext())
    dx, _ = first.backward(model.split_params(params)[0], saved, np.ones_like(y), LayerContext())
    assert dx is None
    block0, block1, _ = model.spec(3, np.dtype("f8"))
    assert block0.backward_flops == 2 * 3 * 5 * 6 + 3 * 6 + 2 * 3 * 6
    assert block1.backward_flops == 2 * 2 * 3 * 6 * 4 + 3 * 4 + 2 * 3 * 4


def test_num_correct_counts_the_argmax():
    model = tokens_model(hidden=())
    params = init_params(model, 0, "float64")
    params["head.linear.weight"][:] = 0
    params["head.linear.bias"][65] = 1.0
    ids, _ = make_batch(model, 3)
    targets = np.array([65, 66, 65], dtype=np.uint8)
    _, _, saved = run(model, params, ids, targets, 1.0)
    assert model.num_correct(saved[-1]) == 2
    regression = features_model()
    x, y = make_batch(regression, 3)
    _, _, saved = run(regression, init_params(regression, 0, "float64"), x, y, 1.0)
    assert regression.num_correct(saved[-1]) is None


def test_parameters_depend_on_seed_and_name_alone():
    deep, flat = tokens_model(hidden=(6, 4)), tokens_model(hidden=(6,))
    a, b = init_params(deep, 7, "float64"), init_params(flat, 7, "float64")
    for name in ("embed.embedding.weight", "block0.linear.weight"):
        assert np.array_equal(a[name], b[name])
    assert not np.array_equal(
        a["block0.linear.weight"], init_params(deep, 8, "float64")["block0.linear.weight"]
    )
    square = features_model(hidden=(5, 5))
    c = init_params(square, 7, "float64")
    assert not np.array_equal(c["block0.linear.weight"], c["block1.linear.weight"])


def test_float32_starts_at_the_rounded_float64_weights():
    model = tokens_model()
    narrow, wide = init_params(model, 0, "float32"), init_params(model, 0, np.float64)
    for name, array in narrow.items():
        assert array.dtype == np.float32 and wide[name].dtype == np.float64
        assert np.array_equal(array, wide[name].astype(np.float32))


def test_random_streams_never_change_with_a_version():
    # Raw words of Philox are fixed by its definition: another value would change every run.
    words = rng_for_name(0, "block0.linear.weight").bit_generator.random_raw(2)
    assert [int(word) for word in words] == GOLDEN_WORDS
    # Without a separator seed 1 with name "2x" would be seed 12 with name "x".
    first, second = rng_for_name(1, "2x"), rng_for_name(12, "x")
    assert first.bit_generator.random_raw() != second.bit_generator.random_raw()


GOLDEN_WORDS = [11025851744505430963, 9354482299417164394]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"input_kind": "images"}, "input_kind must be one of tokens, features; got 'images'"),
        ({"activation": "selu"}, "activation must be one of"),
        ({"output": ("ranks", 2)}, "output must be one of"),
        ({"output": ("classes", 0)}, "output must be at least 1; got 0"),
        ({"hidden": (4, 0)}, r"hidden\[1\] must be at least 1"),
        ({"window": 0}, "window must be at least 1"),
    ],
)
def test_build_mlp_refuses_unknown_names_and_sizes(change, match):
    good = {**TOKENS, "hidden": (4,), "activation": "relu", "output": ("classes", 256)}
    build_mlp(**good)
    with pytest.raises(ConfigError, match=match):
        build_mlp(**{**good, **change})


@pytest.mark.parametrize("module", [models, optim])
def test_docstring_examples_hold(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
