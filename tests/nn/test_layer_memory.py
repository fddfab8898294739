"""Working memory of the MLP's layers and of the losses: predicted and measured, to the byte."""

from __future__ import annotations

import numpy as np
import pytest
from memory_probe import KERNEL_SETS, check, probe, ready_kernels
from small_decoders import STORED, floats

from mpisim.layouts.specs import Conditions
from mpisim.nn.layers import Activation, Embedding, LayerContext, Linear
from mpisim.nn.losses import LanguageHead, MeanSquaredError, SoftmaxCrossEntropy
from mpisim.nn.numerics import TILE_ELEMENTS
from mpisim.nn.precision import dtype_of

__all__ = ["probe"]

TILE = TILE_ELEMENTS
WIDTHS = (1, 7)
ELEMENTWISE_ROWS = (0, 1, 5, TILE // 7, TILE // 7 + 1, 2 * TILE // 7 + 3)
"""Widths of 1 and 7 columns: below, at and above one tile of elements."""


def ids_of(rows, columns, vocab, seed=0, dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, vocab, (rows, columns)).astype(dtype)


def case(name, rows, dtype):
    """Return (layer, x, targets) of a case; rows of x are `rows`."""
    if name.startswith("embedding"):
        vocab, width = {"embedding": (11, 3), "embedding_wide": (200, 1)}[name]
        return Embedding(vocab, width), ids_of(rows, 4, vocab), None
    if name.startswith("linear"):
        first = name == "linear_first"
        inputs, outputs = {"linear": (5, 3), "linear_first": (5, 3), "linear_tall": (1, 90)}[name]
        return Linear(inputs, outputs, input_grad=not first), floats((rows, inputs), dtype), None
    if name in ("relu", "tanh", "gelu"):
        return Activation(name), floats((rows, 7), dtype), None
    if name.startswith("classes"):
        num = int(name.removeprefix("classes"))
        targets = ids_of(rows, 1, num)[:, 0]
        return SoftmaxCrossEntropy(num), floats((rows, num), dtype), targets
    wide = "float32" if dtype_of(dtype).itemsize == 2 else dtype
    return MeanSquaredError(), floats((rows, 2), dtype), floats((rows, 2), wide, seed=1)


NAMES = (
    "embedding",
    "embedding_wide",
    "linear",
    "linear_first",
    "linear_tall",
    "relu",
    "tanh",
    "gelu",
    "classes1",
    "classes7",
    "classes200",
    "squares",
)


def check_layer(probe, layer, x, dtype, ctx, conditions):
    """Compare all predictions of one layer with what its calls allocate."""
    stored = dtype_of(dtype)
    params = layer.init(lambda local: np.random.default_rng(1), stored)
    spec = layer.spec(x.shape, stored, "block.layer", conditions)
    empty = not x.size

    def same(predicted, measured, what):
        check(predicted, measured, empty=empty, what=what)

    (y, saved), forward = probe(layer.forward, params, x, ctx)
    same(spec.forward_peak_bytes, forward.peak, "forward")
    same(spec.result_bytes + spec.extra_saved_bytes, forward.left, "after forward")
    dy = floats(y.shape, dtype, seed=9) if y.shape else 0.25
    (dx, kept), back_input = probe(layer.backward_input, params, saved, dy, ctx)
    same(spec.input_peak_bytes, back_input.peak, "backward_input")
    same(spec.input_grad_bytes + spec.kept_bytes, back_input.left, "after backward_input")
    assert spec.input_grad_bytes == (0 if dx is None else dx.nbytes)
    grads, back_weight = probe(layer.backward_weight, saved, kept, ctx)
    same(spec.weight_peak_bytes, back_weight.peak, "backward_weight")
    same(spec.grad_bytes, back_weight.left, "after backward_weight")
    assert spec.grad_bytes + spec.handed_on_bytes == sum(grad.nbytes for grad in grads.values())


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("name", NAMES)
def test_every_call_allocates_what_the_spec_says(probe, name, dtype, kernels):
    conditions = Conditions(kernels=kernels)
    for rows in ELEMENTWISE_ROWS:
        layer, x, targets = case(name, rows, dtype)
        ctx = LayerContext(targets, kernels=ready_kernels(kernels))
        check_layer(probe, layer, x, dtype, ctx, conditions)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("chunk_tokens", [0, 1, 4, 30, 700])
def test_the_head_allocates_what_the_spec_says(probe, chunk_tokens, dtype, kernels):
    conditions = Conditions(kernels=kernels)
    # A tile of rows holds 2 * TILE elements: 600 tokens of 60 logits are more than one.
    for rows, length, vocab, width in (
        (0, 5, 11, 4),
        (1, 1, 11, 4),
        (3, 5, 11, 4),
        (6, 5, 2, 40),
        (6, 100, 60, 8),
        (3, 400, 60, 1),
    ):
        layer = LanguageHead(vocab, width, chunk_tokens)
        x = floats((rows, length, width), dtype)
        for targets in (
            ids_of(rows, length, vocab, dtype=np.int32),
            ids_of(rows, length, vocab + 1, dtype=np.int32) - np.int32(1),
            np.full((rows, length), -1, np.int32),
        ):
            ctx = LayerContext(targets, kernels=ready_kernels(kernels))
            check_layer(probe, layer, x, dtype, ctx, conditions)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("ids", ["one", "each", "random"])
def test_an_embedding_needs_the_same_for_any_ids(probe, ids, dtype):
    layer = Embedding(64, 3)
    x = {
        "one": np.full((16, 4), 63, np.uint8),
        "each": np.arange(64, dtype=np.uint8).reshape(16, 4),
        "random": ids_of(16, 4, 64),
    }[ids]
    for id_dtype in (np.uint8, np.int32, np.int64):
        check_layer(probe, layer, x.astype(id_dtype), dtype, LayerContext(), Conditions())


def test_counts_and_losses_have_no_buffer(probe):
    layer = SoftmaxCrossEntropy(3)
    x, targets = floats((4, 3)), np.array([0, 1, 2, 0], np.uint8)
    loss, saved = layer.forward({}, x, LayerContext(targets))
    assert isinstance(loss, np.float64) and isinstance(saved[-1], np.int64)
    head = LanguageHead(3, 2, 2)
    weight = {"weight": floats((3, 2))}
    loss, saved = head.forward(
        weight, floats((1, 4, 2)), LayerContext(targets.astype(np.int32)[np.newaxis])
    )
    assert isinstance(loss, np.float64) and isinstance(saved[-1], np.int64)
    loss, _ = MeanSquaredError().forward({}, x, LayerContext(floats((4, 3), seed=1)))
    assert isinstance(loss, np.float64)
