"""The two halves of a block's backward: the bits of the whole one, whatever runs between them."""

from __future__ import annotations

import numpy as np
import pytest
from memory_probe import KERNEL_SETS, ready_kernels
from small_decoders import STORED, floats, protect, small_decoder, token_batch

from mpisim.layouts.specs import BlockSpec, Conditions, LayerSpec
from mpisim.nn.blocks import Block
from mpisim.nn.dropout import DropoutMasks
from mpisim.nn.layers import Activation, LayerContext, Linear
from mpisim.nn.models import Model, build_mlp
from mpisim.nn.params import init_params
from mpisim.nn.precision import dtype_of
from mpisim.nn.transformer import Dropout

SEED = 0.25

DECODERS = {
    "tied": {"num_kv_heads": 2},
    "untied": {"tied": False},
    "dropout": {"dropout": 0.25},
    "dropout_at_rest": {"dropout": 0.25},
    "chunks": {"loss_chunk_tokens": 4},
}


def bits_of(array) -> bytes:
    return b"" if array is None else array.tobytes()


def check_halves(block: Block, params, x, ctx: LayerContext, dy=None):
    """Compare the halves of one block with its backward; return its output and gradients."""
    y, saved = block.forward(params, x, ctx)
    if dy is None:
        dy = floats(y.shape, str(y.dtype), seed=9) if y.shape else SEED
    protect(dy)
    whole_dx, whole = block.backward(params, saved, dy, ctx)
    places = []
    dx, kept = block.backward_input(params, saved, dy, ctx, lambda: places.append("input"))
    assert bits_of(dx) == bits_of(whole_dx)
    assert (dx is None) == (whole_dx is None)
    assert len(kept) == len(block.layers)
    # What the next block does with dx must not reach the weight half, nor the other way round.
    before = [array.tobytes() for array in block.kept_arrays(kept)]
    protect(dx, *block.kept_arrays(kept))
    grads = block.backward_weight(saved, kept, ctx, lambda: places.append("weight"))
    assert [array.tobytes() for array in block.kept_arrays(kept)] == before
    assert list(grads) == list(whole) == list(block.full_names)
    for name, grad in grads.items():
        assert grad.dtype == whole[name].dtype and grad.shape == whole[name].shape
        assert grad.tobytes() == whole[name].tobytes(), (block.name, name)
    gaps = len(block.layers) - 1
    assert places == ["input"] * gaps + ["weight"] * gaps
    return y, grads


def check_model(model: Model, dtype: str, x, ctx: LayerContext) -> None:
    """Check every block and that no gradient of the model is zero throughout."""
    for block, params in zip(
        model.blocks, model.split_params(init_params(model, 0, dtype)), strict=True
    ):
        x, grads = check_halves(block, params, x, ctx)
        assert all(np.any(grad.astype(np.float64)) for grad in grads.values()), block.name


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("variant", DECODERS)
def test_the_halves_of_a_decoders_blocks_give_the_bits_of_backward(variant, dtype, kernels):
    model = small_decoder(**DECODERS[variant])
    ids, targets = token_batch(3, 5)
    masks = DropoutMasks(key=3, rows=3, max_len=6, width=8)
    ctx = LayerContext(
        targets,
        dropout=None if variant == "dropout_at_rest" else masks,
        kernels=ready_kernels(kernels),
    )
    check_model(model, dtype, ids, ctx)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("kind", ["tokens", "features"])
def test_the_halves_of_an_mlps_blocks_give_the_bits_of_backward(kind, activation, dtype, kernels):
    wide = "float32" if dtype_of(dtype).itemsize == 2 else dtype
    rng = np.random.default_rng(0)
    if kind == "tokens":
        model = build_mlp(
            input_kind="tokens", window=3, vocab_size=11, embed_dim=2, hidden=(5, 6),
            activation=activation, output=("classes", 11),
        )  # fmt: skip
        x = rng.integers(0, 11, (7, 3)).astype(np.uint8)
        targets = rng.integers(0, 11, 7).astype(np.uint8)
    else:
        model = build_mlp(
            input_kind="features", num_features=5, hidden=(5, 6), activation=activation,
            output=("targets", 2),
        )  # fmt: skip
        x, targets = floats((7, 5), dtype), floats((7, 2), wide, seed=1)
    check_model(model, dtype, x, LayerContext(targets, kernels=ready_kernels(kernels)))


SKIPS = [
    # The gradient that a layer keeps is what the layer after it passed on, and more is added to it.
    ((("one", Linear(8, 8)), ("drop", Dropout(0.5, 0)), ("two", Linear(8, 8))), ((1, 3), (2, 3))),
    # Two branches are added to one gradient, one after the other.
    ((("one", Linear(8, 8)), ("two", Linear(8, 8)), ("three", Linear(8, 8))),
     ((0, 2), (1, 2), (1, 3))),
    ((("drop", Dropout(0.5, 0)), ("one", Linear(8, 8)), ("act", Activation("gelu"))), ((1, 3),)),
    # What is passed on is the caller's.
    ((("one", Linear(8, 8)), ("drop", Dropout(0.5, 0))), ((1, 2),)),
    ((("one", Linear(8, 8)), ("drop", Dropout(0.5, 0))), ((0, 2),)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(("layers", "skips"), SKIPS)
def test_additions_change_no_gradient_that_is_kept(layers, skips, dtype):
    block = Block("b", layers, skips)
    params = block.init(lambda name: np.random.default_rng(0), dtype_of(dtype))
    check_halves(block, params, floats((30, 8), dtype), LayerContext())


def test_a_sum_leaves_a_gradient_that_another_branch_waits_for():
    layers = (("one", Linear(3, 3)), ("drop", Dropout(0.5, 0)), ("two", Linear(3, 3)))
    block = Block("b", layers, ((0, 2), (1, 3)))
    params = block.init(lambda name: np.random.default_rng(0), np.dtype("f8"))
    x, dy = floats((4, 3)), floats((4, 3), seed=1)
    _, saved = block.forward(params, x, LayerContext())
    dx, kept = block.backward_input(params, saved, dy, LayerContext())
    grads = block.backward_weight(saved, kept, LayerContext())
    # h = one(x), m = h + x, y = two(m) + h
    dm = dy @ params["two.weight"].T
    dh = dm + dy
    np.testing.assert_allclose(dx, dh @ params["one.weight"].T + dm, rtol=1e-12)
    np.testing.assert_allclose(grads["one.weight"], x.T @ dh, rtol=1e-12)


def test_what_is_kept_is_the_gradient_itself():
    block = Block("b", (("one", Linear(4, 4)), ("act", Activation("gelu")), ("two", Linear(4, 4))))
    params = block.init(lambda name: np.random.default_rng(0), np.dtype("f8"))
    _, saved = block.forward(params, floats((3, 4)), LayerContext())
    dy = floats((3, 4), seed=1)
    _, kept = block.backward_input(params, saved, dy, LayerContext())
    assert kept[2][0] is dy and len(kept[0]) == 1 and kept[1] == ()
    assert [array is dy for array in block.kept_arrays(kept)] == [False, True]
    assert block.kept_arrays((kept[2], kept[2])) == [dy]


@pytest.mark.parametrize("chunk", [0, 4])
def test_the_flops_of_the_halves_are_those_of_backward(chunk):
    model = small_decoder(dropout=0.25, loss_chunk_tokens=chunk)
    embed, block, _, head = model.spec(3, np.dtype("f4"), 5)
    tokens, width, hidden, vocab = 15, 8, 6, 11
    for spec in (embed, block, head):
        assert spec.input_flops + spec.weight_flops == spec.backward_flops
        assert spec.input_flops >= 0 and spec.weight_flops >= 0
    # Every weight costs a multiply-add per token; norms have nothing left to do.
    weights = width * (width + 2 * 4) + width * width + width * 2 * hidden + hidden * width
    assert block.weight_flops == 2 * tokens * weights
    assert head.weight_flops == (0 if chunk else 2 * tokens * vocab * width)
    assert (embed.input_flops, embed.weight_flops) == (0, tokens * width)


def test_the_flops_of_an_mlp_split_where_a_first_layer_has_no_input_gradient():
    model = build_mlp(
        input_kind="features", num_features=5, hidden=(4,), activation="relu",
        output=("targets", 2),
    )  # fmt: skip
    hidden, head = model.spec(3, np.dtype("f4"))
    assert (hidden.input_flops, hidden.weight_flops) == (2 * 12, 2 * 3 * 20 + 12)
    assert (head.input_flops, head.weight_flops) == (2 * 3 * 8 + 6, 2 * 3 * 8 + 6)


def passing(**others) -> LayerSpec:
    return LayerSpec(input_bytes=8, output_bytes=8, output_shape=(2,), **others)


@pytest.mark.parametrize(
    ("layers", "skips", "owners", "kept"),
    [
        ("kkk", (), (0, 1, 2, 3), (1, 2, 3)),
        ("kpk", (), (0, 2, 2, 3), (2, 3)),
        ("kkp", (), (0, 1, 3, 3), (1, 3)),
        ("pkk", (), (0, 0, 2, 3), (2, 3)),
        ("pnk", (), (0, 0, 2, 3), (3,)),
        ("npk", (), (0, 2, 2, 3), (3,)),
        ("kpp", (), (0, 3, 3, 3), (3,)),
        ("ppp", (), (3, 3, 3, 3), ()),
        # The sum with the branch is a new array.
        ("kpk", ((1, 3),), (0, 1, 2, 3), (1, 3)),
        ("kpk", ((0, 3),), (0, 2, 2, 3), (2, 3)),
        ("ppp", ((0, 3),), (0, 3, 3, 3), ()),
    ],
)
def test_gradients_go_by_one_name(layers, skips, owners, kept):
    spec = BlockSpec(
        name="b",
        layers=tuple(
            passing(keeps_output_grad=kind == "k", passes_through=kind == "p") for kind in layers
        ),
        skips=skips,
        add_bytes=(0,) * len(skips),
    )
    assert spec.grad_owners() == owners
    assert spec.kept_grad_boundaries() == kept


def test_a_decoders_block_keeps_the_gradients_of_its_projections():
    # norm1 qkv attention out dropout1, norm2 gate_up swiglu down dropout2
    embed, block, _, head = small_decoder(dropout=0.25).spec(3, np.dtype("f4"), 5)
    assert block.kept_grad_boundaries() == (2, 4, 7, 9)
    plain = small_decoder().spec(3, np.dtype("f4"), 5)[1]
    assert plain.kept_grad_boundaries() == (2, 4, 6, 8)
    at_rest = small_decoder(dropout=0.25).spec(3, np.dtype("f4"), 5, Conditions(dropout=False))[1]
    assert at_rest.kept_grad_boundaries() == (2, 5, 7, 10)
    assert embed.kept_grad_boundaries() == (1,)
    assert head.kept_grad_boundaries() == ()
    assert block.kept_extra_bytes == 2 * 8 * 4
    assert head.kept_extra_bytes == 8 * 4 + 15 * 11 * 4
