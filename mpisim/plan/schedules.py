"""Schedules: the order of forwards and backwards of one stage, compute only.

Messages, recompute and gradient sync are added by passes.
"""

from __future__ import annotations

from mpisim.plan.ops import BackwardStage, ForwardStage, Op


def accumulate(num_microbatches: int) -> list[Op]:
    """Forward and backward of one microbatch after the other: one is alive at a time.

    Examples
    --------
    >>> accumulate(2)
    [ForwardStage(micro=0), BackwardStage(micro=0), ForwardStage(micro=1), BackwardStage(micro=1)]
    """
    ops: list[Op] = []
    for micro in range(num_microbatches):
        ops += [ForwardStage(micro), BackwardStage(micro)]
    return ops
