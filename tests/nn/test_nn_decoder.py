"""Whole decoders: gradients, what attention may see, tying, recompute, bytes, storage, sizes."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from small_decoders import (
    STORED,
    central_differences,
    context,
    float_bytes,
    floats,
    hidden_of,
    loss_of,
    protect,
    run,
    shaken,
    small_decoder,
    token_batch,
)

from mpisim.errors import BatchError, ConfigError
from mpisim.nn import decoder
from mpisim.nn.blocks import Block
from mpisim.nn.dropout import DropoutMasks
from mpisim.nn.kernels import load_kernels
from mpisim.nn.layers import Activation, LayerContext, Linear
from mpisim.nn.params import init_params
from mpisim.nn.precision import dtype_of
from mpisim.nn.transformer import Dropout, RMSNorm, SwiGLU

VARIANTS = {
    "grouped, tied": {},
    "one key head per query head, untied": {"num_kv_heads": 0, "tied": False},
    "chunked": {"loss_chunk_tokens": 4},
    "chunked, untied": {"loss_chunk_tokens": 7, "tied": False},
    "dropout": {"dropout": 0.5},
    "one block, one head": {"num_blocks": 1, "num_heads": 1, "d_model": 4},
}
STARTS = np.array([[0, 0, 0, 3, 3], [0, 1, 1, 1, 4], [0, 0, 0, 0, 0]], dtype=np.int32)


def make(variant="grouped, tied", dtype="float64", starts=None, kernels="numpy"):
    """Return (model, params far from their start, ids, context) of 3 rows of 5 tokens."""
    model = small_decoder(**VARIANTS[variant])
    params = shaken(init_params(model, 0, dtype_of(dtype)))
    ids, targets = token_batch(3, 5)
    masks = DropoutMasks(3, rows=3, max_len=6, width=model.d_model)
    ctx = context(
        targets,
        starts=starts,
        dropout=masks if model.num_dropout_sites else None,
        kernels=load_kernels(kernels),
    )
    return model, params, ids, ctx


# --- what is built ---------------------------------------------------------------------------


def test_b3_the_fixture_has_29_tensors_and_1572_scalars():
    """B3: 3 blocks, width 4, one head, feed-forward 8, tied head, 266 vocabulary rows."""
    model = small_decoder(
        vocab_size=266, d_model=4, num_blocks=3, num_heads=1, num_kv_heads=0, d_ff=8, max_len=4
    )
    specs = model.param_specs()
    assert (len(specs), sum(spec.size for spec in specs)) == (29, 1572)
    block = [("norm1.weight", (4,)), ("qkv.query", (4, 4)), ("qkv.key", (4, 4))]
    block += [("qkv.value", (4, 4)), ("out.weight", (4, 4)), ("norm2.weight", (4,))]
    block += [("gate_up.gate", (4, 8)), ("gate_up.up", (4, 8)), ("down.weight", (8, 4))]
    expected = [("embed.tokens.weight", (266, 4))]
    expected += [(f"block{n}.{name}", shape) for n in range(3) for name, shape in block]
    expected += [("head.norm.weight", (4,))]
    assert [(spec.name, spec.shape) for spec in specs] == expected
    assert list(init_params(model, 0, "float32")) == [name for name, _ in expected]


def test_an_untied_head_owns_a_weight_of_the_table_s_shape():
    model = small_decoder(tied=False)
    last = model.param_specs()[-1]
    assert (last.name, last.shape) == ("head.output.weight", (11, 8))
    assert model.blocks[-1].borrows == () and model.spec(1, np.dtype("f4"))[-1].borrows == ()


@pytest.mark.parametrize(
    ("d_model", "num_heads", "hidden"), [(8, 2, 24), (24, 2, 64), (64, 4, 176), (256, 4, 688)]
)
def test_d_ff_0_is_8_thirds_of_d_model_rounded_up_to_a_multiple_of_8(d_model, num_heads, hidden):
    model = small_decoder(d_model=d_model, num_heads=num_heads, d_ff=0)
    shapes = {spec.name: spec.shape for spec in model.param_specs()}
    assert shapes["block0.gate_up.up"] == (d_model, hidden)
    assert hidden >= 8 * d_model / 3 > hidden - 8


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_heads": 3}, "model.num_heads must divide model.d_model = 8; got 3"),
        ({"num_heads": 8}, "model.num_heads must leave an even head size.*got 8, head size 1"),
        ({"num_heads": 4, "num_kv_heads": 3}, "model.num_kv_heads must divide .* = 4; got 3"),
        ({"vocab_size": 0}, "model.vocab_size must be at least 1; got 0"),
        ({"num_blocks": 0}, "model.num_blocks must be at least 1"),
        ({"max_len": 0}, "model.max_len must be at least 1"),
        ({"d_ff": -8}, "model.d_ff must be at least 0"),
        ({"dropout": 1.0}, "model.dropout must be at least 0 and below 1; got 1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(change, match):
    with pytest.raises(ConfigError, match=match):
        small_decoder(**change)


def test_parameters_depend_on_name_and_seed_alone():
    few, many = small_decoder(num_blocks=2), small_decoder(num_blocks=2, tied=False, dropout=0.5)
    first, second = init_params(few, 7, "float64"), init_params(many, 7, "float64")
    assert set(second) - set(first) == {"head.output.weight"}
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["block0.qkv.query"], first["block1.qkv.query"])
    narrow, half = init_params(few, 7, "float32"), init_params(few, 7, dtype_of("bfloat16"))
    for name, array in first.items():
        assert np.array_equal(narrow[name], array.astype("f4"))
        assert np.array_equal(half[name], narrow[name].astype(dtype_of("bfloat16")))


def test_residual_projections_start_smaller_with_depth():
    model = small_decoder(d_model=64, num_heads=2, d_ff=128, num_blocks=8)
    params = init_params(model, 0, "float64")
    assert math.isclose(params["block3.qkv.query"].std(), 1 / 8, rel_tol=0.05)
    assert math.isclose(params["block3.out.weight"].std(), 1 / 8 / 4, rel_tol=0.05)
    assert math.isclose(params["block3.down.weight"].std(), 128**-0.5 / 4, rel_tol=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_decoder_is_close_to_a_uniform_guess(tied):
    model = small_decoder(vocab_size=200, d_model=64, num_heads=4, d_ff=0, tied=tied, max_len=16)
    ids, targets = token_batch(32, 16, vocab_size=200)
    loss = loss_of(model, init_params(model, 0, "float64"), ids, context(targets))
    # Logits of variance 1 cost half a nat on targets that cannot be guessed.
    assert abs(loss / np.count_nonzero(targets >= 0) - math.log(200) - 0.5) < 0.2


# --- gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["one document a row", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_match_central_differences(variant, packed):
    model, params, ids, ctx = make(variant, starts=STARTS if packed else None)
    _, grads, _ = run(model, params, ids, ctx, seed=0.5)
    assert set(grads) == set(params)
    rng = np.random.default_rng(1)
    for name, grad in grads.items():
        flat, flat_grad = params[name].reshape(-1), grad.reshape(-1)
        # The largest elements and a few of any size.
        for index in {*np.argsort(-np.abs(flat_grad))[:3], *rng.integers(0, flat.size, 2)}:
            numeric = central_differences(
                lambda: 0.5 * loss_of(model, params, ids, ctx), flat[index : index + 1], 2e-5
            )
            error = abs(numeric.item() - flat_grad[index])
            assert error <= 1e-8 * np.abs(flat_grad).max(), (name, index)


def test_a_tied_gradient_is_the_sum_of_both_ends():
    tied, params, ids, ctx = make()
    untied = small_decoder(tied=False)
    same = {**params, "head.output.weight": params["embed.tokens.weight"].copy()}
    loss, grads, _ = run(tied, params, ids, ctx)
    same_loss, ends, _ = run(untied, same, ids, ctx)
    assert loss == same_loss
    total = ends["embed.tokens.weight"] + ends["head.output.weight"]
    assert np.allclose(grads["embed.tokens.weight"], total, rtol=1e-13, atol=1e-15)
    assert ends["embed.tokens.weight"].any() and ends["head.output.weight"].any()


def test_a_borrowed_parameter_is_the_owner_s_array_under_its_name():
    model, params, _, _ = make()
    split = model.split_params(params)
    assert split[-1]["output.weight"] is params["embed.tokens.weight"] is split[0]["tokens.weight"]
    head = model.blocks[-1]
    assert head.param_names == ("norm.weight",)
    assert head.full_names == {
        "norm.weight": "head.norm.weight",
        "output.weight": "embed.tokens.weight",
    }
    spec = model.spec(1, np.dtype("f4"))[-1]
    assert spec.borrows == ("embed.tokens.weight",)
    assert [param.name for param in spec.params] == ["head.norm.weight"]
    assert list(head.init(lambda name: np.random.default_rng(0), np.dtype("f4"))) == ["norm.weight"]


@pytest.mark.parametrize("kernels", ["numpy", "auto"])
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_selective_keeping_changes_no_bit(variant, dtype, kernels):
    model, params, ids, ctx = make(variant, dtype, STARTS, kernels)
    loss, grads, _ = run(model, params, ids, ctx)
    same_loss, same_grads, _ = run(model, params, ids, ctx, keep="selective")
    assert loss == same_loss
    for name, grad in grads.items():
        assert grad.tobytes() == same_grads[name].tobytes(), name


def test_a_block_run_again_gives_the_same_bits():
    model, params, ids, ctx = make("dropout", "float32")
    split = model.split_params(params)
    x, _ = model.blocks[0].forward(split[0], ids, ctx)
    y, saved = model.blocks[1].forward(split[1], x, ctx)
    again, saved_again = model.blocks[1].forward(split[1], x, ctx, "selective")
    assert y.tobytes() == again.tobytes()
    restored = model.blocks[1].restore(saved_again, ctx)
    arrays = [model.blocks[1].saved_arrays(each) for each in (saved, restored)]
    assert [array.tobytes() for array in arrays[0]] == [array.tobytes() for array in arrays[1]]


def test_rows_in_micro_batches_add_up_to_the_batch():
    model, params, ids, ctx = make()
    loss, grads, _ = run(model, params, ids, ctx, seed=0.25)
    total, sums = 0.0, dict.fromkeys(grads, 0.0)
    for rows in (slice(0, 2), slice(2, 2), slice(2, 3)):
        part, part_grads, _ = run(model, params, ids[rows], context(ctx.targets[rows]), seed=0.25)
        total += part
        for name, grad in part_grads.items():
            sums[name] = sums[name] + grad
    assert math.isclose(total, loss, rel_tol=1e-14)
    for name, grad in grads.items():
        assert np.allclose(sums[name], grad, rtol=1e-11, atol=1e-13), name


def test_a_microbatch_without_a_valid_target_has_no_loss_and_no_gradient():
    model, params, ids, _ = make()
    ctx = context(np.full((3, 5), -1, np.int32))
    loss, grads, saved = run(model, params, ids, ctx)
    assert loss == 0.0 and model.num_correct(saved[-1]) == 0
    assert not any(grad.any() for grad in grads.values())


def test_num_correct_counts_valid_targets_with_the_largest_logit():
    model, params, ids, ctx = make()
    hidden = hidden_of(model, params, ids, ctx)
    normed = hidden / np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + 1e-5)
    best = np.argmax(normed * params["head.norm.weight"] @ params["embed.tokens.weight"].T, axis=-1)
    targets = best.astype(np.int32)
    targets[0], targets[1, 0] = -1, (best[1, 0] + 1) % 11
    for chunk in (0, 4):
        _, _, saved = run(small_decoder(loss_chunk_tokens=chunk), params, ids, context(targets))
        assert model.num_correct(saved[-1]) == 9
    assert model.has_token_targets


# --- what attention may see ------------------------------------------------------------------


def test_a_later_token_changes_no_earlier_output():
    model, params, ids, ctx = make()
    before = hidden_of(model, params, ids, ctx)
    for column in (1, 4):
        changed = ids.copy()
        changed[:, column] = (changed[:, column] + 1) % 11
        after = hidden_of(model, params, changed, ctx)
        assert np.array_equal(before[:, :column], after[:, :column])
        assert (before[:, column:] != after[:, column:]).any(axis=-1).all()


def test_a_packed_row_equals_its_documents_in_rows_of_their_own():
    model, params, _, _ = make()
    ids, targets = token_batch(1, 6, seed=3)
    starts = np.array([[0, 0, 2, 2, 2, 5]], dtype=np.int32)
    packed = context(targets, starts=starts)
    loss, grads, _ = run(model, params, ids, packed)
    hidden = hidden_of(model, params, ids, packed)
    total, sums = 0.0, dict.fromkeys(grads, 0.0)
    for columns in (slice(0, 2), slice(2, 5), slice(5, 6)):
        alone = context(targets[:, columns])
        part, part_grads, _ = run(model, params, ids[:, columns], alone)
        total += part
        for name, grad in part_grads.items():
            sums[name] = sums[name] + grad
        assert np.allclose(
            hidden[:, columns], hidden_of(model, params, ids[:, columns], alone), rtol=1e-12
        )
    assert math.isclose(total, loss, rel_tol=1e-13)
    for name, grad in grads.items():
        assert np.allclose(sums[name], grad, rtol=1e-11, atol=1e-13), name


def test_a_padded_row_equals_the_row_alone():
    model, params, _, _ = make()
    ids, targets = token_batch(2, 3, seed=4)
    loss, grads, _ = run(model, params, ids, context(targets))
    wide_ids = np.full((2, 6), 10, np.int32)
    wide_targets = np.full((2, 6), -1, np.int32)
    wide_ids[:, :3], wide_targets[:, :3] = ids, targets
    for starts in (None, np.zeros((2, 6), np.int32)):
        ctx = context(wide_targets, starts=starts)
        padded_loss, padded_grads, _ = run(model, params, wide_ids, ctx)
        assert math.isclose(padded_loss, loss, rel_tol=1e-14)
        for name, grad in grads.items():
            assert np.allclose(padded_grads[name], grad, rtol=1e-11, atol=1e-14), name


def test_rows_beyond_max_len_are_refused():
    model, params, _, _ = make()
    ids, targets = token_batch(1, 7)
    with pytest.raises(BatchError, match="model.max_len = 6 tokens; got 7"):
        run(model, params, ids, context(targets))


# --- bytes and storage -----------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("keep", ["all", "selective"])
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_bytes_of_every_block_equal_its_spec(variant, dtype, keep, rows):
    model, params, ids, ctx = make(variant, dtype, STARTS)
    part = context(ctx.targets[:rows], starts=STARTS[:rows], dropout=ctx.dropout)
    loss, grads, saved = run(model, params, ids[:rows], part, keep=keep)
    wide = dtype_of("float32") if dtype_of(dtype).itemsize == 2 else dtype_of(dtype)
    assert {grad.dtype for grad in grads.values()} == {wide}
    assert rows or (loss == 0.0 and not any(grad.any() for grad in grads.values()))
    specs = model.spec(rows, dtype_of(dtype), 5)
    for block, block_saved, spec in zip(model.blocks, saved, specs, strict=True):
        arrays = block.saved_arrays(block_saved)
        assert len({id(array) for array in arrays}) == len(arrays)
        boundaries = sum(map(spec.boundary_bytes, spec.saved_boundaries()))
        assert float_bytes(arrays) == boundaries + spec.extra_saved_bytes_for(keep)


def test_specs_default_to_the_longest_row():
    model = small_decoder()
    assert model.spec(2, np.dtype("f4")) == model.spec(2, np.dtype("f4"), 6)
    assert model.spec(2, np.dtype("f4"), 3)[1].output_shape == (2, 3, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_storage_is_close_to_float32(dtype):
    model, fresh, ids, ctx = make("dropout", "float32", STARTS)
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    errors = []
    for seed in range(5):
        half_params = {
            name: array.astype(dtype_of(dtype)) for name, array in shaken(fresh, seed).items()
        }
        params = {name: array.astype("f4") for name, array in half_params.items()}
        loss, grads, _ = run(model, params, ids, ctx)
        half_loss, half_grads, _ = run(model, half_params, ids, ctx)
        assert half_loss != loss and abs(half_loss - loss) < 2 * unit * loss
        whole, half = (
            np.concatenate([each[name].reshape(-1) for name in grads])
            for each in (grads, half_grads)
        )
        errors.append(np.linalg.norm(half - whole) / np.linalg.norm(whole))
    # A point where a norm divides by little multiplies every rounding: the median says more.
    assert np.median(errors) < 16 * unit


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_that_is_passed_in_is_changed(variant, dtype):
    model, params, ids, ctx = make(variant, dtype, STARTS)
    protect(ids, ctx.targets, ctx.starts, *params.values())
    x = ids
    for block, block_params in zip(model.blocks, model.split_params(params), strict=True):
        y, saved = block.forward(block_params, x, ctx, "selective")
        for array in block.saved_arrays(saved):
            protect(array)
        dy = 0.5 if block is model.blocks[-1] else protect(floats(y.shape, dtype))[0]
        block.backward(block_params, block.restore(saved, ctx), dy, ctx)
        (x,) = protect(y)


# --- blocks with skips -----------------------------------------------------------------------


def test_skips_add_a_boundary_and_its_gradient():
    block = Block(
        "b", (("one", RMSNorm(4, 0.1)), ("two", SwiGLU()), ("up", Linear(2, 4))), ((0, 3),)
    )
    plain = Block("b", block.layers)
    params = {"one.weight": np.full(4, 2.0), "up.weight": floats((2, 4)), "up.bias": floats(4)}
    x, dy = floats((5, 4)), floats((5, 4), seed=1)
    ctx = context()
    y, saved = block.forward(params, x, ctx)
    inner, _ = plain.forward(params, x, ctx)
    assert np.allclose(y, x + inner, rtol=1e-14)
    dx, grads = block.backward(params, saved, dy, ctx)
    inner_dx, inner_grads = plain.backward(params, saved, dy, ctx)
    assert np.allclose(dx, dy + inner_dx, rtol=1e-14)
    assert all(np.array_equal(grads[name], inner_grads[name]) for name in grads)


def test_a_layer_that_passes_its_input_on_is_not_added_to_in_place():
    block = Block("b", (("norm", RMSNorm(4, 0.1)), ("drop", Dropout(0.5, 0))), ((0, 1), (1, 2)))
    params = {"norm.weight": np.ones(4)}
    (x,) = protect(floats((1, 2, 4)))
    passing = Block("b", (("drop", Dropout(0.5, 0)),), ((0, 1),))
    assert np.array_equal(passing.forward({}, x, context())[0], 2 * x)
    y, saved = block.forward(params, x, context())
    once = RMSNorm(4, 0.1).forward({"weight": np.ones(4)}, x, context())[0] + x
    assert np.allclose(y, 2 * once, rtol=1e-14)
    (dy,) = protect(np.ones((1, 2, 4)))
    block.backward(params, saved, dy, context())


def test_a_skip_that_would_keep_a_tensor_of_its_own_is_not_priced():
    # Nothing keeps boundary 1: relu saves its output, boundary 2, and that is the skip's end.
    layers = (("norm", RMSNorm(4, 0.1)), ("act", Activation("relu")))
    with pytest.raises(AssertionError):
        Block("b", layers, ((1, 2),)).spec((1, 4), np.dtype("f8"))


def test_saved_arrays_looks_into_nested_tuples():
    a, b = np.zeros(3), np.zeros(2, np.int64)
    assert [id(x) for x in Block("b", ()).saved_arrays(((a, (b, (a,))),))] == [id(a)]


def test_between_is_called_between_the_halves_and_between_layers():
    model, params, ids, ctx = make()
    split = model.split_params(params)
    x, _ = model.blocks[0].forward(split[0], ids, ctx)
    _, saved = model.blocks[1].forward(split[1], x, ctx)
    calls = []
    dy = np.ones_like(x)
    model.blocks[1].backward(split[1], saved, dy, ctx, lambda: calls.append(1))
    assert len(calls) == 2 * 8 - 1


def test_default_context_has_the_numpy_kernels():
    assert LayerContext().kernels.name == "numpy"


def test_docstring_examples_hold():
    result = doctest.testmod(decoder)
    assert result.attempted and not result.failed
