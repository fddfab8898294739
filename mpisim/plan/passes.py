"""Passes: each takes a list of ops and returns a new one with ops added.

`build.py` calls them in one fixed order; a feature is a pass in that order, not a trainer class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.plan.ops import (
    CONTROL_SUMS,
    Backward,
    BackwardStage,
    CheckGradients,
    Forward,
    ForwardStage,
    GatherMetrics,
    LoadBatch,
    Op,
    OptimizerStep,
    Recompute,
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


def insert_recompute(
    ops: Iterable[Op], blocks: Sequence[str], mode: str, every: int = 1
) -> list[Op]:
    """Let forwards keep less and compute it again right before it is needed.

    Parameters
    ----------
    ops : iterable of Op
        Expanded into blocks.
    blocks : sequence of str
        Blocks that may be recomputed, in forward order, without gaps. The last block of a model
        is not among them: its backward follows its forward.
    mode : {"none", "selective", "full"}
        Keep all; all but the layers' interiors; only the input of every `every`-th block.
    every : int, default 1
        Blocks of one segment, >= 1 (full): they share the kept input of the first, and are
        replayed together before the backward of the last.
    """
    if mode == "none":
        return list(ops)
    if mode == "selective":
        segments = {block: (block,) for block in blocks}
        keeps = dict.fromkeys(blocks, "selective")
    else:
        pieces = [tuple(blocks[at : at + every]) for at in range(0, len(blocks), every)]
        segments = {piece[-1]: piece for piece in pieces}
        keeps = {block: "nothing" for block in blocks} | {piece[0]: "input" for piece in pieces}
    result: list[Op] = []
    for op in ops:
        if isinstance(op, Forward) and op.block in keeps:
            op = Forward(op.block, op.micro, keeps[op.block])
        elif isinstance(op, Backward):
            result += [Recompute(block, op.micro) for block in segments.get(op.block, ())]
        result.append(op)
    return result


def replay_ends(ops: Iterable[Op], blocks: Sequence[str]) -> set[tuple[str, int]]:
    """Return (block, micro) of every replay whose output is compared with the first one.

    These are the last blocks of their segments: the block after them keeps its input, so the
    first output is there to be compared with. Their forward holds it until the replay.
    """
    keeps = {(op.block, op.micro): op.keep for op in ops if isinstance(op, Forward)}
    after = dict(zip(blocks, blocks[1:], strict=False))
    return {
        (block, micro)
        for (block, micro), keep in keeps.items()
        if keep in ("input", "nothing") and keeps.get((after.get(block), micro)) != "nothing"
    }


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


def reduce_scalars(kind: str) -> ReduceScalars:
    """Return the op of one control sum."""
    return ReduceScalars(kind, *CONTROL_SUMS[kind])


def frame_update(ops: Iterable[Op]) -> list[Op]:
    """Put the update around the gradients: the global target count before, the rest after."""
    return [
        reduce_scalars("target_count"),
        *ops,
        reduce_scalars("loss"),
        CheckGradients(),
        reduce_scalars("non_finite"),
        OptimizerStep(),
        GatherMetrics(len(METRIC_NAMES)),
    ]
