"""Working memory of whole blocks: predicted by walking their layers, measured by the allocator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from memory_probe import KERNEL_SETS, check, probe, ready_kernels
from small_decoders import STORED, floats, protect, small_decoder, token_batch

from mpisim.layouts.specs import Conditions
from mpisim.nn.blocks import Block, _add, _add_bytes
from mpisim.nn.dropout import DropoutMasks
from mpisim.nn.layers import Activation, LayerContext, Linear
from mpisim.nn.models import build_mlp
from mpisim.nn.numerics import TILE_ELEMENTS
from mpisim.nn.params import init_params
from mpisim.nn.precision import dtype_of
from mpisim.nn.transformer import Dropout

__all__ = ["probe"]

KEEPS = ("all", "selective", "nothing")
SEED = 0.25


def check_block(probe, block, spec, params, x, ctx, *, empty=False):
    """Compare all predictions of a block with what its calls allocate; return its output."""

    def same(predicted, measured, what):
        check(predicted, measured, empty=empty, what=(block.name, what))

    block.forward(params, x, ctx)  # makes tables that belong to the process
    saved_of = {}
    for keep in KEEPS:
        (y, saved), forward = probe(block.forward, params, x, ctx, keep)
        same(spec.forward_peak(keep), forward.peak, f"forward, keep {keep}")
        saved_of[keep] = saved
    own = [a for a in block.saved_arrays(saved_of["nothing"]) if isinstance(a, np.ndarray)]
    assert own == []
    restored, restore = probe(block.restore, saved_of["selective"], ctx)
    same(spec.restore_peak(), restore.peak, "restore")
    dy = floats(y.shape, str(y.dtype), seed=9) if y.shape else SEED
    (dx, grads), backward = probe(block.backward, params, saved_of["all"], dy, ctx)
    same(spec.backward_peak(), backward.peak, "backward")
    grad_bytes = sum(grad.nbytes for grad in grads.values())
    passed_on = dx is None or dx is dy
    same(grad_bytes + (0 if passed_on else dx.nbytes), backward.left, "after backward")
    return y


def check_model(probe, model, dtype, x, length, ctx, conditions):
    params = init_params(model, 0, dtype)
    specs = model.spec(len(x), dtype_of(dtype), length, conditions)
    for block, spec, block_params in zip(
        model.blocks, specs, model.split_params(params), strict=True
    ):
        x = check_block(probe, block, spec, block_params, x, ctx, empty=not x.size)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("kind", ["tokens", "features"])
def test_blocks_of_an_mlp(probe, kind, activation, dtype, kernels):
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
    "plain": {},
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
def test_blocks_of_a_decoder(probe, variant, dtype, packed, kernels):
    training = variant != "dropout_at_rest"
    for rows, length, sizes in (
        (0, 5, {}),
        (1, 1, {}),
        (4, 5, {}),
        (3, 70, {"max_len": 80, "d_model": 96, "d_ff": 50}),
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
        # What is added to is an input that was passed on: the sum is a new array.
        ((("one", Linear(8, 8)), ("drop", Dropout(0.5, 0))), ((0, 2),)),
        ((("one", Linear(8, 8)), ("drop", Dropout(0.5, 0)), ("two", Linear(8, 8))),
         ((0, 2), (2, 3))),
        # Two branches end at one boundary, and two start at one.
        ((("one", Linear(8, 8)), ("two", Linear(8, 8))), ((0, 2), (1, 2))),
        ((("one", Linear(8, 8)), ("two", Linear(8, 8)), ("act", Activation("gelu"))),
         ((1, 2), (1, 3))),
        # What was added must be gone when the wide layer runs, if nothing is kept.
        ((("one", Activation("gelu")), ("two", Activation("gelu")), ("wide", Linear(8, 64))),
         ((1, 2),)),
    ],
)  # fmt: skip
def test_blocks_with_other_skips(probe, layers, skips, dtype):
    block = Block("b", layers, skips)
    params = block.init(lambda name: np.random.default_rng(0), dtype_of(dtype))
    conditions = Conditions(dropout=False)
    spec = block.spec((30, 8), dtype_of(dtype), conditions)
    check_block(probe, block, spec, params, floats((30, 8), dtype), LayerContext())


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("in_place", [True, False])
def test_an_addition_needs_tiles_only(probe, in_place, dtype, kernels):
    ctx = LayerContext(kernels=ready_kernels(kernels))
    for size in (1, TILE_ELEMENTS, 2 * TILE_ELEMENTS + 5):
        y, addend = floats((size,), dtype), floats((size,), dtype, seed=1)
        wanted = ctx.narrow(ctx.wide(y) + ctx.wide(addend), y.dtype)
        total, measured = probe(_add, y, addend, ctx, in_place=in_place)
        made = 0 if in_place else y.nbytes
        needed = made + _add_bytes(size, dtype_of(dtype), Conditions(kernels=kernels))
        assert (measured.peak, measured.left) == (needed, made)
        assert (total is y) == in_place and total.tobytes() == wanted.tobytes()


def test_what_is_kept_changes_no_result():
    model = small_decoder(dropout=0.25)
    params = init_params(model, 0, "float32")
    ids, targets = token_batch(3, 5)
    masks = DropoutMasks(key=3, rows=3, max_len=6, width=8)
    ctx = LayerContext(targets, dropout=masks)
    outputs = []
    for keep in KEEPS:
        x = ids
        for block, block_params in zip(model.blocks, model.split_params(params), strict=True):
            x, saved = block.forward(block_params, x, ctx, keep)
            protect(x)
        outputs.append((float(x), model.num_correct(saved)))
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_selective_forward_needs_less_and_none_the_least():
    spec = small_decoder().spec(4, np.dtype("f4"), 6)[1]
    peaks = [spec.forward_peak(keep) for keep in KEEPS]
    assert peaks[0] >= peaks[1] > peaks[2] > 0
    assert spec.extra_saved_bytes_for("nothing") == 0


def test_a_skip_costs_the_branch_that_waits():
    spec = small_decoder().spec(4, np.dtype("f4"), 6)[1]
    plain = replace(spec, skips=(), add_bytes=())
    assert spec.backward_peak() >= plain.backward_peak()
