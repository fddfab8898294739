"""Tiny decoders, batches and a runner for the tests of the decoder's layers and models."""

from __future__ import annotations

import numpy as np

from mpisim.nn.decoder import build_decoder
from mpisim.nn.layers import LayerContext
from mpisim.nn.models import Model
from mpisim.nn.precision import dtype_of, is_floating

STORED = ("float64", "float32", "bfloat16", "float16")


def small_decoder(**changes) -> Model:
    """Return a decoder of 2 blocks with grouped heads, changed by arguments of build_decoder."""
    sizes = {
        "vocab_size": 11,
        "d_model": 8,
        "num_blocks": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "d_ff": 6,
        "max_len": 6,
    }
    return build_decoder(**{**sizes, **changes})


def token_batch(rows: int, length: int, seed: int = 0, vocab_size: int = 11):
    """Return ids and targets; about every third target is ignored."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab_size, (rows, length)).astype(np.int32)
    targets = rng.integers(0, vocab_size, (rows, length)).astype(np.int32)
    targets[rng.random((rows, length)) < 0.3] = -1
    return ids, targets


def shaken(params: dict, seed: int = 5, scale: float = 0.4) -> dict:
    """Return parameters far from their start, where no gradient is small by symmetry."""
    rng = np.random.default_rng(seed)
    return {
        name: (array + scale * rng.standard_normal(array.shape)).astype(array.dtype)
        for name, array in params.items()
    }


def run(model: Model, params, ids, ctx, seed=1.0, keep="all"):
    """Return (summed loss, gradients by full name, saved of every block)."""
    split = model.split_params(params)
    x, saved = ids, []
    for block, block_params in zip(model.blocks, split, strict=True):
        x, block_saved = block.forward(block_params, x, ctx, keep)
        saved.append(block_saved)
    grads, dy = {}, seed
    for block, block_params, block_saved in reversed(
        list(zip(model.blocks, split, saved, strict=True))
    ):
        if keep == "selective":
            block_saved = block.restore(block_saved, ctx)
        dy, block_grads = block.backward(block_params, block_saved, dy, ctx)
        for name, grad in block_grads.items():
            full_name = block.full_names[name]
            grads[full_name] = grads.get(full_name, 0) + grad
    return float(x), grads, saved


def loss_of(model: Model, params, ids, ctx) -> float:
    """Return the summed loss of a forward pass."""
    x = ids
    for block, block_params in zip(model.blocks, model.split_params(params), strict=True):
        x, _ = block.forward(block_params, x, ctx)
    return float(x)


def hidden_of(model: Model, params, ids, ctx) -> np.ndarray:
    """Return the residual stream before the head, shape (B, T, D)."""
    x = ids
    for block, block_params in list(zip(model.blocks, model.split_params(params), strict=True))[
        :-1
    ]:
        x, _ = block.forward(block_params, x, ctx)
    return x


def central_differences(objective, array: np.ndarray, step: float = 1e-3) -> np.ndarray:
    """Return the gradient of objective() by the element, to the fourth order in `step`.

    The error is step^4 / 30 times the fifth derivative, plus the objective's rounding / step.
    """
    numeric = np.empty_like(array)
    for index in np.ndindex(array.shape):
        old = array[index]
        values = []
        for shift in (2, 1, -1, -2):
            array[index] = old + shift * step
            values.append(objective())
        array[index] = old
        numeric[index] = (8 * (values[1] - values[2]) - (values[0] - values[3])) / (12 * step)
    return numeric


def protect(*arrays):
    """Make arrays read-only, so that a write raises; return them."""
    for array in arrays:
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    return arrays


def float_bytes(arrays) -> int:
    return sum(array.nbytes for array in arrays if is_floating(array.dtype))


def floats(shape, dtype="float64", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype_of(dtype))


def context(targets=None, **others) -> LayerContext:
    return LayerContext(targets=targets, **others)
