"""Memory of the two halves of a block's backward: predicted, and measured by the allocator."""

from __future__ import annotations

import numpy as np
import pytest
from memory_probe import KERNEL_SETS, check, probe, ready_kernels
from small_decoders import STORED, floats, small_decoder, token_batch

from mpisim.layouts.specs import Conditions
from mpisim.nn.blocks import Block
from mpisim.nn.dropout import DropoutMasks
from mpisim.nn.layers import Activation, LayerContext, Linear
from mpisim.nn.models import build_mlp
from mpisim.nn.numerics import TILE_ELEMENTS
from mpisim.nn.params import init_params
from mpisim.nn.precision import dtype_of
from mpisim.nn.transformer import Dropout

__all__ = ["probe"]

SEED = 0.25


def check_halves(probe, block, spec, params, x, ctx, *, empty=False):
    """Compare all predictions of both halves with what they allocate; return the output."""

    def same(predicted, measured, what):
        check(predicted, measured, empty=empty, what=(block.name, what))

    y, saved = block.forward(params, x, ctx)
    is_loss = not y.shape
    dys = [SEED if is_loss else floats(y.shape, str(y.dtype), seed=9)]
    dy_bytes = 0 if is_loss else dys[0].nbytes
    (dx, kept), back_input = probe(block.backward_input, params, saved, dys[0], ctx)
    same(spec.input_peak(), back_input.peak, "backward_input")
    grads, back_weight = probe(block.backward_weight, saved, kept, ctx)
    same(spec.weight_peak(), back_weight.peak, "backward_weight")
    same(spec.new_grad_bytes, back_weight.left, "after backward_weight")
    assert spec.grad_bytes == sum(grad.nbytes for grad in grads.values())
    del grads

    boundaries = spec.kept_grad_boundaries()
    held = spec.kept_extra_bytes + sum(map(spec.boundary_bytes, boundaries))
    assert held == sum(array.nbytes for array in block.kept_arrays(kept))
    assert (len(spec.layers) in boundaries) == any(a is dys[0] for a in block.kept_arrays(kept))
    passed_on = dx is dys[0]
    made = held - dy_bytes * (len(spec.layers) in boundaries)
    made += 0 if dx is None or passed_on or 0 in boundaries else dx.nbytes
    same(made, back_input.left, "after backward_input")

    def drop():
        """Let go of all but what is kept, which is then all that is left of both calls."""
        nonlocal dx
        dys.clear()
        dx = None

    _, dropped = probe(drop)
    same(held, back_input.left + dropped.left + dy_bytes, "kept alone")
    return y


def check_model(probe, model, dtype, x, length, ctx, conditions):
    params = init_params(model, 0, dtype)
    specs = model.spec(len(x), dtype_of(dtype), length, conditions)
    for block, spec, block_params in zip(
        model.blocks, specs, model.split_params(params), strict=True
    ):
        x = check_halves(probe, block, spec, block_params, x, ctx, empty=not x.size)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("kind", ["tokens", "features"])
def test_halves_of_an_mlps_blocks(probe, kind, activation, dtype, kernels):
    wide = "float32" if dtype_of(dtype).itemsize == 2 else dtype
    if kind == "tokens":
        model = build_mlp(
            input_kind="tokens", window=3, vocab_size=256, embed_dim=2, hidden=(40, 6),
            activation=activation, output=("classes", 256),
        )  # fmt: skip
    else:
        model = build_mlp(
            input_kind="features", num_features=5, hidden=(40, 6), activation=activation,
            output=("targets", 2),
        )  # fmt: skip
    for rows in (0, 1, 7, TILE_ELEMENTS // 40 + 1):
        if kind == "tokens":
            rng = np.random.default_rng(rows)
            x = rng.integers(0, 256, (rows, 3)).astype(np.uint8)
            targets = rng.integers(0, 256, rows).astype(np.uint8)
        else:
            x, targets = floats((rows, 5), dtype), floats((rows, 2), wide, seed=1)
        ctx = LayerContext(targets, kernels=ready_kernels(kernels))
        check_model(probe, model, dtype, x, None, ctx, Conditions(kernels=kernels))


VARIANTS = {
    "untied": {"tied": False},
    "shared_heads": {"num_kv_heads": 2},
    "dropout": {"dropout": 0.25},
    "dropout_at_rest": {"dropout": 0.25},
    "chunks": {"loss_chunk_tokens": 4},
}


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_halves_of_a_decoders_blocks(probe, variant, dtype, packed, kernels):
    training = variant != "dropout_at_rest"
    for rows, length, sizes in (
        (0, 5, {}),
        (1, 1, {}),
        (4, 5, {}),
        (3, 70, {"max_len": 80, "d_model": 96, "d_ff": 50}),
        # The feed-forward, not attention, needs most.
        (2, 2, {"d_ff": 300}),
    ):
        model = small_decoder(**{**sizes, **VARIANTS[variant]})
        ids, targets = token_batch(rows, length)
        starts = np.zeros((rows, length), np.int32)
        starts[:, length // 2 :] = length // 2
        masks = DropoutMasks(key=3, rows=rows, max_len=model.input_width, width=model.d_model)
        ctx = LayerContext(
            targets,
            starts=starts if packed else None,
            dropout=masks if training else None,
            kernels=ready_kernels(kernels),
        )
        conditions = Conditions(kernels=kernels, starts=packed, dropout=training)
        check_model(probe, model, dtype, ids, length, ctx, conditions)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(
    ("layers", "skips"),
    [
        ((("one", Linear(8, 8)), ("drop", Dropout(0.5, 0))), ((0, 2),)),
        ((("one", Linear(8, 8)), ("drop", Dropout(0.5, 0)), ("two", Linear(8, 8))),
         ((0, 2), (2, 3))),
        ((("one", Linear(8, 8)), ("two", Linear(8, 8))), ((0, 2), (1, 2))),
        ((("one", Linear(8, 8)), ("two", Linear(8, 8)), ("act", Activation("gelu"))),
         ((1, 2), (1, 3))),
        # A layer that passes its input on comes first or last: dx or dy goes by two names.
        ((("drop", Dropout(0.5, 0)), ("one", Linear(8, 8)), ("two", Linear(8, 8))), ()),
        ((("one", Linear(8, 8)), ("two", Linear(8, 8)), ("drop", Dropout(0.5, 0))), ()),
        ((("drop", Dropout(0.5, 0)),), ()),
        # The peak is where the wide gradient is made, while those before it are kept.
        ((("wide", Linear(64, 8)), ("two", Linear(8, 8)), ("three", Linear(8, 8))), ()),
        ((("two", Linear(8, 8)), ("three", Linear(8, 8)), ("wide", Linear(8, 64))), ()),
    ],
)  # fmt: skip
def test_halves_of_blocks_with_other_skips(probe, layers, skips, dtype):
    block = Block("b", layers, skips)
    params = block.init(lambda name: np.random.default_rng(0), dtype_of(dtype))
    width = layers[0][1].in_features if isinstance(layers[0][1], Linear) else 8
    spec = block.spec((30, width), dtype_of(dtype), Conditions(dropout=False))
    check_halves(probe, block, spec, params, floats((30, width), dtype), LayerContext())


def test_the_input_half_keeps_gradients_that_backward_frees():
    spec = small_decoder(d_model=8, d_ff=64).spec(4, np.dtype("f4"), 6)[1]
    inner = [boundary for boundary in spec.kept_grad_boundaries() if 0 < boundary < 8]
    assert inner == [2, 4, 6]
    assert spec.input_peak() >= sum(map(spec.boundary_bytes, [0, *inner])) + spec.kept_extra_bytes
    assert spec.weight_peak() == spec.new_grad_bytes == spec.grad_bytes - 2 * 8 * 4
