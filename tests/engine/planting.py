"""Gradients planted where exact numbers matter, for the tests of one update.

A planted gradient is that of the scaled loss: it is written right after the last backward of a
rank, before the sums, or after the last sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from small_jobs import (
    after_backward,
    cut,
    packed_rows,
)

from mpisim.config.schema import OptimizerSection
from mpisim.engine.state import EngineState
from mpisim.nn.precision import Policy
from mpisim.plan.ops import ALL_MICROS, WaitSync

SGD = OptimizerSection(kind="sgd", lr=1.0, momentum=0.0)
ADAMW = OptimizerSection(
    kind="adamw", lr=0.01, weight_decay=0.1, clip_norm=0.5, schedule="cosine", warmup_steps=2
)
FLOAT32 = Policy(*["float32"] * 4)
FLOAT16 = Policy("float32", "float16", "float32", "float32")
WEIGHT, BIAS = "head.linear.weight", "head.linear.bias"
ZERO = {WEIGHT: np.zeros((1, 1)), BIAS: np.zeros(1)}
Act = Callable[[EngineState], None]


def write(**values: Any) -> Act:
    """Return what writes gradients of the linear model: ``weight=``, ``bias=``."""

    def act(state: EngineState) -> None:
        for name, value in values.items():
            state.grads[f"head.linear.{name}"][...] = np.reshape(
                value, state.grads[f"head.linear.{name}"].shape
            )

    return act


def plant(act: Act, *, rank: int | None = None, step: int | None = None, micro: int = 0) -> Act:
    """Return a `prepare` that acts before the sums, after a microbatch's last backward."""

    def prepare(state: EngineState) -> None:
        if rank is None or state.rank == rank:
            after_backward(state, micro, act, step=step)

    return prepare


def plant_after_sum(act: Act, *, rank: int | None = None, step: int | None = None) -> Act:
    """Return a `prepare` that acts after the last bucket is summed."""

    def prepare(state: EngineState) -> None:
        last = WaitSync(len(state.buckets) - 1, ALL_MICROS)

        def observe(op: Any) -> None:
            if op == last and rank in (None, state.rank) and step in (None, state.step.step):
                act(state)

        state.observe_op = observe

    return prepare


def linear_steps(count: int, ranks: int = 1, micros: int = 1, features: int = 1) -> list:
    rng = np.random.default_rng(3)
    return [
        [
            [(rng.standard_normal((2, features)), rng.standard_normal((2, 1)))] * micros
            for _ in range(ranks)
        ]
        for _ in range(count)
    ]


def decoder_steps(count: int, ranks: int = 1, micros: int = 1, rows: int = 4) -> list:
    return [cut(packed_rows(rows, seed), ranks, micros) for seed in range(count)]
