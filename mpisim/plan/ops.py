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
    """This op is read as: run the blocks of one chunk of this rank forward for one microbatch.

    Schedules emit it; `passes.expand_blocks` replaces it.
    """

    micro: int
    chunk: int = 0
    """Which of the rank's chunks, 0 the one nearest the model's input."""


@dataclass(frozen=True, slots=True)
class BackwardStage(Op):
    """This op is read as: run the blocks of one chunk of this rank backward for one microbatch.

    Schedules emit it; `passes.expand_blocks` replaces it.
    """

    micro: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardInputStage(Op):
    """This op is read as: as BackwardStage, but only the gradient of the chunk's input.

    The chunk's BackwardWeightStage follows, at any time.
    """

    micro: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardWeightStage(Op):
    """This op is read as: compute the weight gradients that a BackwardInputStage left for later."""

    micro: int
    chunk: int = 0


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


@dataclass(frozen=True, slots=True)
class BackwardInput(Op):
    """This op is read as: compute the gradient of a block's input; keep what its weights need."""

    block: str
    micro: int


@dataclass(frozen=True, slots=True)
class BackwardWeight(Op):
    """This op is read as: compute and add a block's weight gradients, free what was kept."""

    block: str
    micro: int


@dataclass(frozen=True, slots=True)
class SendActivation(Op):
    """This op is read as: frame a stage's output and post it to the rank of the next stage.

    The frame belongs to the message until its WaitSend.
    """

    boundary: int
    """Number of the stage whose output crosses."""
    micro: int
    peer: int
    """World rank of the other side."""
    shape: tuple[int, ...]
    """Of the tensor."""
    codec: str


@dataclass(frozen=True, slots=True)
class RecvActivation(Op):
    """This op is read as: block until the output of the stage before is here, and decode it."""

    boundary: int
    micro: int
    peer: int
    shape: tuple[int, ...]
    codec: str


@dataclass(frozen=True, slots=True)
class SendGrad(Op):
    """This op is read as: frame the gradient of a stage's input, post it to the stage before."""

    boundary: int
    """Number of the stage whose output it is the gradient of."""
    micro: int
    peer: int
    shape: tuple[int, ...]
    codec: str


@dataclass(frozen=True, slots=True)
class RecvGrad(Op):
    """This op is read as: block until the gradient of a stage's output is here, and decode it."""

    boundary: int
    micro: int
    peer: int
    shape: tuple[int, ...]
    codec: str


@dataclass(frozen=True, slots=True)
class WaitSend(Op):
    """This op is read as: block until a posted frame has left, and free it."""

    boundary: int
    micro: int
    peer: int
    kind: str
    """``activation`` or ``grad``."""


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
class ExchangeTied(Op):
    """This op is read as: add up the gradients of a table that two stages hold, on both.

    Without sharded gradients before the bucket's sum over axis dp; with them (ZeRO 2, 3) shard by
    shard after the last one.
    """

    bucket: int
    peer: int
    """World rank of the other end."""
    count: int
    """Elements: the bucket, or this rank's shard of it."""
    dtype: str


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
"""Kind -> elements, dtype, reduction (0 elements: one per part of the gradients).

target_count: valid targets of the update. loss: sum of losses and top-1 hits. norm: of each part of
the gradients, in a place of its own (a sum of squares could overflow, a list of norms cannot).
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
        ForwardStage, BackwardStage, BackwardInputStage, BackwardWeightStage, LoadBatch, Forward,
        Recompute, Backward, BackwardInput, BackwardWeight, SendActivation, RecvActivation,
        SendGrad, RecvGrad, WaitSend, StartSync, WaitSync, ExchangeTied, StartUnshard, WaitUnshard,
        Reshard, ReduceScalars, CheckGradients, OptimizerStep, GatherParams, GatherMetrics,
    )
}  # fmt: skip

WAIT_AXIS: dict[type[Op], str] = {
    RecvActivation: "pp",
    RecvGrad: "pp",
    WaitSend: "pp",
    ExchangeTied: "pp",
    WaitSync: "dp",
    WaitUnshard: "dp",
    GatherParams: "dp",
    ReduceScalars: "control",
    GatherMetrics: "control",
}
"""Ops that may block, and the axis they wait on; all others only compute or post."""

ADDS_GRADIENTS = (Backward, BackwardWeight)
"""Ops that add to the gradients of a block's parameters."""

IF_COMMITTED: frozenset[type[Op]] = frozenset({GatherParams})
"""Ops that run only if the update was committed; they are priced both ways."""


def control_count(kind: str, num_norms: int) -> int:
    """Return the elements of a control sum; `num_norms`: see `partition.num_norms`."""
    return CONTROL_SUMS[kind][0] or num_norms
