"""Which kind of work the time of a training step goes to.

Layers, kernels and handlers of one engine are wrapped in clocks, each of which leaves out what
clocks within it count. Done in steps of its own: the rounds that are compared run without clocks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from mpisim.engine.handlers import HANDLERS
from mpisim.engine.state import EngineState
from mpisim.plan.ops import CheckGradients, OptimizerStep, ReduceScalars, StartSync, WaitSync

KERNEL_KINDS = {
    "rms_norm": "norm",
    "rms_norm_backward": "norm",
    "rotary_split": "rotary",
    "rotary_merge": "rotary",
    "causal_softmax": "softmax",
    "causal_softmax_backward": "softmax",
    "swiglu": "swiglu",
    "swiglu_backward": "swiglu",
    "cross_entropy": "loss",
    "cross_entropy_backward": "loss",
    "apply_dropout": "dropout",
    "embedding_backward": "embedding",
    "adamw_update": "optimizer",
    "squared_norm": "optimizer",
    "widen": "casts",
    "narrow": "casts",
}
LAYER_KINDS = {
    "TokenEmbedding": "embedding",
    "RMSNorm": "norm",
    "Projection": "matmul",
    "LanguageHead": "matmul",
    "Attention": "attention",
    "SwiGLU": "swiglu",
    "Dropout": "dropout",
}
"""A layer's time without its kernels; matrix products in Projection, LanguageHead, Attention."""
OP_KINDS = {
    CheckGradients: "optimizer",
    OptimizerStep: "optimizer",
    ReduceScalars: "messages",
    StartSync: "messages",
    WaitSync: "messages",
}
OTHER = "other"
"""Residual additions, sums of gradients over microbatches, the ledger, the engine's loop."""
_LAYER_METHODS = ("forward", "backward_input", "backward_weight", "restore")


class Clock:
    """Adds up time by kind, each moment counted once: for the innermost call."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def timed(self, kind: str, function: Callable) -> Callable:
        """Return `function` with its own time, inner clocks left out, added to `kind`."""

        def run(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                passed = time.perf_counter() - start
                self.seconds[kind] += passed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += passed

        return run


def profile_steps(state: EngineState, step: Callable[[], Any], num_steps: int) -> dict[str, Any]:
    """Run some steps with clocks.

    Parameters
    ----------
    state : EngineState
        Of the engine that `step` runs. As before when this returns.
    step : callable without arguments
    num_steps : int

    Returns
    -------
    dict
        Kind of work to its `seconds` per step and `share` of the step, largest first.
    """
    clock = Clock()
    with _clocks(state, clock):
        whole = clock.timed(OTHER, step)
        for _ in range(num_steps):
            whole()
    total = sum(clock.seconds.values())
    ordered = sorted(clock.seconds.items(), key=lambda item: -item[1])
    return {
        kind: {"seconds": seconds / num_steps, "share": seconds / total}
        for kind, seconds in ordered
    }


@contextlib.contextmanager
def _clocks(state: EngineState, clock: Clock) -> Iterator[None]:
    kernels, blocks, handlers = state.kernels, state.blocks, dict(HANDLERS)
    state.kernels = _TimedKernels(kernels, clock)
    state.blocks = {name: _timed_block(block, clock) for name, block in blocks.items()}
    for op, kind in OP_KINDS.items():
        HANDLERS[op] = clock.timed(kind, HANDLERS[op])
    try:
        yield
    finally:
        state.kernels, state.blocks = kernels, blocks
        HANDLERS.update(handlers)


class _TimedKernels:
    """A kernel set behind clocks."""

    def __init__(self, kernels: Any, clock: Clock) -> None:
        self._kernels = kernels
        for name, kind in KERNEL_KINDS.items():
            if hasattr(kernels, name):
                setattr(self, name, clock.timed(kind, getattr(kernels, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def _timed_block(block: Any, clock: Clock) -> Any:
    layers = tuple((name, _timed_layer(layer, clock)) for name, layer in block.layers)
    return dataclasses.replace(block, layers=layers)


def _timed_layer(layer: Any, clock: Clock) -> Any:
    """Return the layer with clocks: of a class derived from its own, so that it is still one."""
    own = type(layer)
    kind = LAYER_KINDS.get(own.__name__, OTHER)
    methods = {
        name: clock.timed(kind, getattr(own, name)) for name in _LAYER_METHODS if hasattr(own, name)
    }
    timed = copy.copy(layer)
    object.__setattr__(timed, "__class__", type(own.__name__, (own,), methods))
    return timed
