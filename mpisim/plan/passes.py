"""Passes: each takes a list of ops and returns a new one with ops added.

`build.py` calls them in one fixed order; a feature is a pass in that order, not a trainer class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.plan.ops import (
    Backward,
    BackwardStage,
    Forward,
    ForwardStage,
    GatherMetrics,
    LoadBatch,
    Op,
    OptimizerStep,
    ReduceScalars,
    StartSync,
    WaitSync,
)
from mpisim.plan.partition import Bucket


def expand_blocks(ops: Iterable[Op], blocks: Sequence[str]) -> Iterator[Op]:
    """Replace stage ops by one op per block; a forward first loads its microbatch."""
    for op in ops:
        if isinstance(op, ForwardStage):
            yield LoadBatch(op.micro)
            yield from (Forward(block, op.micro) for block in blocks)
        elif isinstance(op, BackwardStage):
            yield from (Backward(block, op.micro) for block in reversed(blocks))
        else:
            yield op


def sync_gradients(ops: Iterable[Op], buckets: Sequence[Bucket], overlap: bool) -> list[Op]:
    """Reduce each bucket once, after the last backward of its last block.

    With `overlap` a bucket starts as soon as its last gradient is there and is waited for at the
    end; without, all start after the last backward. The order of buckets, and so the order of
    every addition, is the same.
    """
    ops = list(ops)
    last = {op.block: index for index, op in enumerate(ops) if isinstance(op, Backward)}
    ready: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        ready.setdefault(max(last[block] for block in bucket.blocks), []).append(bucket)
    end = max(ready, default=len(ops) - 1)
    result: list[Op] = []
    for index, op in enumerate(ops):
        result.append(op)
        if overlap:
            result += [StartSync(bucket.index, bucket.count) for bucket in ready.get(index, ())]
        if index == end:
            for bucket in buckets:
                if not overlap:
                    result.append(StartSync(bucket.index, bucket.count))
                result.append(WaitSync(bucket.index))
    return result


def frame_update(ops: Iterable[Op]) -> list[Op]:
    """Put the update around the gradients: the global target count before, the rest after."""
    return [
        ReduceScalars("target_count", 1, "int64"),
        *ops,
        ReduceScalars("loss", 2, "float64"),
        OptimizerStep(),
        GatherMetrics(len(METRIC_NAMES)),
    ]
