"""Passes: each takes a list of ops and returns a new one with ops added.

`build.py` calls them in one fixed order; a feature is a pass in that order, not a trainer class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.plan.ops import (
    ALL_MICROS,
    CONTROL_SUMS,
    Backward,
    BackwardStage,
    CheckGradients,
    Forward,
    ForwardStage,
    GatherMetrics,
    GatherParams,
    LoadBatch,
    Op,
    OptimizerStep,
    Recompute,
    ReduceScalars,
    Reshard,
    StartSync,
    StartUnshard,
    WaitSync,
    WaitUnshard,
    control_count,
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


def unshard_params(
    ops: Iterable[Op],
    buckets: Sequence[Bucket],
    needs: dict[str, tuple[int, ...]],
    prefetch: bool = False,
) -> list[Op]:
    """Gather the parameters of each block right before it runs and free them right after (ZeRO-3).

    Parameters
    ----------
    ops : iterable of Op
        Expanded into blocks, with replays.
    buckets : sequence of Bucket
        One per block that owns parameters.
    needs : dict of str to tuple of int
        Block -> buckets that it reads (`partition.buckets_by_block`).
    prefetch : bool
        Begin to gather for the next block before this one runs: twice the room, less waiting.

    Notes
    -----
    A replay of a whole block and its backward share one gather, also where other replays lie
    between them. A restored interior needs no parameters.
    """
    ops = list(ops)
    keeps = {(op.block, op.micro): op.keep for op in ops if isinstance(op, Forward)}
    held: set[int] = set()
    result: list[Op] = []
    # What the reader before reads, and where it stands.
    previous: tuple[int, ...] = ()
    slot = 0
    for op in ops:
        replays_whole = isinstance(op, Recompute) and keeps[op.block, op.micro] != "selective"
        if not (isinstance(op, (Forward, Backward)) or replays_whole):
            result.append(op)
            continue
        wanted = [index for index in needs[op.block] if index not in held]
        starts: list[Op] = [StartUnshard(index, buckets[index].count) for index in wanted]
        if prefetch and not set(wanted) & set(previous):
            # Before the op that the last gathers were for, behind their waits.
            result[slot:slot] = starts
        else:
            result += starts
        result += [WaitUnshard(index) for index in wanted]
        slot = len(result)
        result.append(op)
        previous = needs[op.block]
        if replays_whole:
            held.update(wanted)
            continue
        freed = needs[op.block]
        held.difference_update(freed)
        result += [Reshard(index) for index in freed]
    return result


def sync_gradients(
    ops: Iterable[Op], buckets: Sequence[Bucket], overlap: bool, zero: int = 0
) -> list[Op]:
    """Sum every bucket over the ranks, after the last backward that adds to it.

    Parameters
    ----------
    ops : iterable of Op
        Expanded into blocks.
    buckets : sequence of Bucket
    overlap : bool
        A bucket starts as soon as its last gradient is there, and is waited for as late as can be.
    zero : int
        0: all-reduce, once a step; 1: reduce-scatter, once a step; 2 and 3: reduce-scatter after
        every microbatch, so that a rank keeps no more than its shards and one or two buckets.

    Notes
    -----
    The order of buckets, and so the order of every addition, does not depend on `overlap`.
    """
    if zero >= 2:
        return _sync_each_micro(list(ops), buckets, overlap)
    collective = "reduce_scatter" if zero else "all_reduce"
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
            result += [_start(bucket, ALL_MICROS, collective) for bucket in ready.get(index, ())]
        if index == end:
            for bucket in buckets:
                if not overlap:
                    result.append(_start(bucket, ALL_MICROS, collective))
                result.append(WaitSync(bucket.index, ALL_MICROS))
    return result


def _sync_each_micro(ops: list[Op], buckets: Sequence[Bucket], overlap: bool) -> list[Op]:
    last: dict[tuple[str, int], int] = {}
    for place, op in enumerate(ops):
        if isinstance(op, Backward):
            key = (op.block, op.micro)
            last[key] = place
        elif isinstance(op, Reshard) and place and last and last[key] == place - 1:
            # A sum starts when the parameters of the block are freed.
            last[key] = place
    micros = sorted({micro for _, micro in last})
    ready: dict[int, list[tuple[Bucket, int]]] = {}
    for micro in micros:
        for bucket in buckets:
            place = max(last[block, micro] for block in bucket.blocks)
            ready.setdefault(place, []).append((bucket, micro))
    ends = {max(at for (_, m), at in last.items() if m == micro) for micro in micros}
    result: list[Op] = []
    running: WaitSync | None = None
    for index, op in enumerate(ops):
        result.append(op)
        for bucket, micro in ready.get(index, ()):
            # One at a time: two buckets are alive, the one that is summed and the one that fills.
            if running is not None:
                result.append(running)
            result.append(_start(bucket, micro, "reduce_scatter"))
            running = WaitSync(bucket.index, micro)
            if not overlap:
                result.append(running)
                running = None
        if index in ends and running is not None:
            result.append(running)
            running = None
    return result


def _start(bucket: Bucket, micro: int, collective: str) -> StartSync:
    return StartSync(bucket.index, micro, bucket.count, collective)


def reduce_scalars(kind: str, num_ranks: int = 1) -> ReduceScalars:
    """Return the op of one control sum over `num_ranks` ranks."""
    return ReduceScalars(kind, control_count(kind, num_ranks), *CONTROL_SUMS[kind][1:])


def frame_update(
    ops: Iterable[Op], buckets: Sequence[Bucket], zero: int = 0, num_ranks: int = 1
) -> list[Op]:
    """Put the update around the gradients: the global target count before, the rest after.

    With gradients in shards (`zero` >= 1) the norm is one of all ranks; where every rank keeps all
    working weights (1 and 2) they are collected once they are updated.
    """
    return [
        reduce_scalars("target_count"),
        *ops,
        reduce_scalars("loss"),
        CheckGradients(),
        *([reduce_scalars("norm", num_ranks)] if zero else []),
        reduce_scalars("non_finite"),
        OptimizerStep(),
        *(GatherParams(bucket.index, bucket.count) for bucket in buckets if zero in (1, 2)),
        GatherMetrics(len(METRIC_NAMES)),
    ]
