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


KEEPS = ("all", "selective", "input", "nothing")
"""What a forward keeps for backward: all that backward needs; all but what layers can compute
again from it; the block's input; nothing, because a block before it keeps its input."""


@dataclass(frozen=True, slots=True)
class Forward(Op):
    """This op is read as: run one block forward and keep what `keep` says.

    The last block holds the loss: its forward adds to the rank's loss sum.
    """

    block: str
    micro: int
    keep: str = "all"
    """One of `KEEPS`."""


@dataclass(frozen=True, slots=True)
class Recompute(Op):
    """This op is read as: compute again what the block's forward did not keep, and compare.

    After a forward that kept "selective" the interiors of its layers are computed again, after
    "input" or "nothing" the whole block.
    """

    block: str
    micro: int


@dataclass(frozen=True, slots=True)
class Backward(Op):
    """This op is read as: run one block backward, add to its gradients, free what was kept."""

    block: str
    micro: int


ALL_MICROS = -1
"""In place of a microbatch: the gradients of all of them, added up."""


@dataclass(frozen=True, slots=True)
class StartSync(Op):
    """This op is read as: begin to sum one gradient bucket over axis dp.

    The bucket belongs to the collective until its WaitSync.
    """

    bucket: int
    micro: int
    """Whose gradients: `ALL_MICROS` once a step, or one microbatch after the other (ZeRO 2, 3)."""
    count: int
    """Elements of the bucket."""
    collective: str
    """``all_reduce``: every rank gets the sum; ``reduce_scatter``: its own shard of it (ZeRO)."""


@dataclass(frozen=True, slots=True)
class WaitSync(Op):
    """This op is read as: block until the bucket is summed.

    If gradients are sharded, add this rank's shard of the sum to its own and free the bucket.
    """

    bucket: int
    micro: int


@dataclass(frozen=True, slots=True)
class StartUnshard(Op):
    """This op is read as: make room for all parameters of a bucket and begin to gather them."""

    bucket: int
    count: int
    """Elements of the bucket."""


@dataclass(frozen=True, slots=True)
class WaitUnshard(Op):
    """This op is read as: block until the bucket's parameters are here."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Reshard(Op):
    """This op is read as: free the gathered parameters of a bucket; the shard stays."""

    bucket: int


@dataclass(frozen=True, slots=True)
class ReduceScalars(Op):
    """This op is read as: reduce a few numbers over all ranks and wait for the result.

    The kinds are those of `CONTROL_SUMS`.
    """

    kind: str
    count: int
    dtype: str
    reduction: str = "sum"
    """``sum`` or ``max``."""


CONTROL_SUMS: dict[str, tuple[int, str, str]] = {
    "target_count": (1, "int64", "sum"),
    "loss": (2, "float64", "sum"),
    "norm": (0, "float64", "sum"),
    "non_finite": (1, "int64", "max"),
    "eval": (3, "float64", "sum"),
}
"""Kind -> elements, dtype, reduction (0 elements: one per rank).

target_count: valid targets of the update. loss: sum of losses and top-1 hits. norm: of each rank's
gradient shard, in a place of its own (a sum of squares could overflow, a list of norms cannot).
non_finite: whether some rank found a number that is not finite. eval: sum of losses, top-1 hits,
valid targets."""


@dataclass(frozen=True, slots=True)
class CheckGradients(Op):
    """This op is read as: take the norm of the gradients that this rank owns, look for NaN and inf.

    Where gradients are sharded a sum of kind "norm" makes it the global one.
    """


@dataclass(frozen=True, slots=True)
class OptimizerStep(Op):
    """This op is read as: commit the update, or skip it on all ranks; clear the gradients."""


@dataclass(frozen=True, slots=True)
class GatherParams(Op):
    """This op is read as: collect what every rank has updated of a bucket's parameters.

    Skipped on all ranks alike if the update is.
    """

    bucket: int
    count: int
    """Elements of the bucket."""


@dataclass(frozen=True, slots=True)
class GatherMetrics(Op):
    """This op is read as: send this rank's figures of the step to rank 0."""

    count: int
    """float64 values per rank."""


OP_TYPES: dict[str, type[Op]] = {
    op.__name__: op
    for op in (
        ForwardStage, BackwardStage, LoadBatch, Forward, Recompute, Backward, StartSync, WaitSync,
        StartUnshard, WaitUnshard, Reshard, ReduceScalars, CheckGradients, OptimizerStep,
        GatherParams, GatherMetrics,
    )
}  # fmt: skip

WAIT_AXIS: dict[type[Op], str] = {
    WaitSync: "dp",
    WaitUnshard: "dp",
    GatherParams: "dp",
    ReduceScalars: "control",
    GatherMetrics: "control",
}
"""Ops that may block, and the axis they wait on; all others only compute or post."""

IF_COMMITTED: frozenset[type[Op]] = frozenset({GatherParams})
"""Ops that run only if the update was committed; they are priced both ways."""


def control_count(kind: str, num_ranks: int) -> int:
    """Return the elements of a control sum over `num_ranks` ranks."""
    return CONTROL_SUMS[kind][0] or num_ranks
