"""The ops of a plan: one frozen class per kind, each with only its own fields.

`engine/handlers.py` runs them, `cost/price.py` prices them, `check.py` proves their order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Op:
    """Base of all ops."""


@dataclass(frozen=True, slots=True)
class ForwardStage(Op):
    """This op is read as: run all blocks of this rank forward for one microbatch.

    Schedules emit it; `passes.expand_blocks` replaces it.
    """

    micro: int


@dataclass(frozen=True, slots=True)
class BackwardStage(Op):
    """This op is read as: run all blocks of this rank backward for one microbatch.

    Schedules emit it; `passes.expand_blocks` replaces it.
    """

    micro: int


@dataclass(frozen=True, slots=True)
class LoadBatch(Op):
    """This op is read as: fetch this rank's rows of one microbatch, inputs and targets."""

    micro: int


@dataclass(frozen=True, slots=True)
class Forward(Op):
    """This op is read as: run one block forward and keep what its backward needs.

    The last block holds the loss: its forward adds to the rank's loss sum.
    """

    block: str
    micro: int


@dataclass(frozen=True, slots=True)
class Backward(Op):
    """This op is read as: run one block backward, add to its gradients, free what was kept."""

    block: str
    micro: int


@dataclass(frozen=True, slots=True)
class StartSync(Op):
    """This op is read as: begin the all-reduce of one gradient bucket over axis dp.

    The bucket belongs to the collective until its WaitSync.
    """

    bucket: int
    count: int
    """Elements of the bucket."""


@dataclass(frozen=True, slots=True)
class WaitSync(Op):
    """This op is read as: block until the bucket's all-reduce is complete."""

    bucket: int


@dataclass(frozen=True, slots=True)
class ReduceScalars(Op):
    """This op is read as: sum a few numbers over all ranks and wait for the result.

    Kinds: `target_count` (int64: valid targets of the update), `loss` (float64: sum of losses,
    top-1 hits).
    """

    kind: str
    count: int
    dtype: str


@dataclass(frozen=True, slots=True)
class OptimizerStep(Op):
    """This op is read as: take the global norm, clip, and update all parameters."""


@dataclass(frozen=True, slots=True)
class GatherMetrics(Op):
    """This op is read as: send this rank's figures of the step to rank 0."""

    count: int
    """float64 values per rank."""


OP_TYPES: dict[str, type[Op]] = {
    op.__name__: op
    for op in (
        ForwardStage, BackwardStage, LoadBatch, Forward, Backward, StartSync, WaitSync,
        ReduceScalars, OptimizerStep, GatherMetrics,
    )
}  # fmt: skip

WAIT_AXIS: dict[type[Op], str] = {
    WaitSync: "dp",
    ReduceScalars: "control",
    GatherMetrics: "control",
}
"""Ops that may block, and the axis they wait on; all others only compute or post."""
