"""Passes: each takes a list of ops and returns a new one with ops added.

`build.py` calls them in one fixed order; a feature is a pass in that order, not a trainer class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.plan.ops import (
    ADDS_GRADIENTS,
    ALL_MICROS,
    CONTROL_SUMS,
    Backward,
    BackwardInput,
    BackwardInputStage,
    BackwardStage,
    BackwardWeight,
    BackwardWeightStage,
    CheckGradients,
    ExchangeTied,
    Forward,
    ForwardStage,
    GatherMetrics,
    GatherParams,
    LoadBatch,
    Op,
    OptimizerStep,
    Recompute,
    RecvActivation,
    RecvGrad,
    ReduceScalars,
    Reshard,
    SendActivation,
    SendGrad,
    StartSync,
    StartUnshard,
    WaitSend,
    WaitSync,
    WaitUnshard,
    control_count,
)
from mpisim.plan.partition import Bucket


def load_batches(ops: Iterable[Op]) -> list[Op]:
    """Load every microbatch right before the first forward that reads it."""
    loaded: set[int] = set()
    result: list[Op] = []
    for op in ops:
        if isinstance(op, ForwardStage) and op.micro not in loaded:
            loaded.add(op.micro)
            result.append(LoadBatch(op.micro))
        result.append(op)
    return result


@dataclass(frozen=True)
class Boundaries:
    """What a rank needs to know to talk to its neighbours on axis pp."""

    coordinate: int
    """Its own place on the axis."""
    peers: tuple[int, ...]
    """World ranks of its pp group, in order."""
    num_stages: int
    shapes: Callable[[int, int], tuple[int, ...]]
    """(boundary, microbatch) -> shape of the tensor that crosses."""
    activation_codec: str = "none"
    grad_codec: str = "none"

    def stage(self, chunk: int) -> int:
        """Return the stage that is this rank's chunk `chunk`."""
        return chunk * len(self.peers) + self.coordinate

    def peer(self, stage: int) -> int:
        """Return the world rank that holds a stage."""
        return self.peers[stage % len(self.peers)]


def insert_messages(ops: Iterable[Op], near: Boundaries) -> list[Op]:
    """Send every stage's results over its boundaries, and receive what it needs.

    A rank receives right before it needs the tensor and posts a send right after it has made it.
    The frame is waited for right before the next one over the same boundary: one per boundary and
    direction is alive, and by then a receiver at the same pace has taken it.
    """
    posted: dict[tuple[int, str], WaitSend] = {}
    result: list[Op] = []

    def send(op: SendActivation | SendGrad, kind: str) -> None:
        before = posted.pop((op.boundary, kind), None)
        if before is not None:
            result.append(before)
        result.append(op)
        posted[op.boundary, kind] = WaitSend(op.boundary, op.micro, op.peer, kind)

    last = near.num_stages - 1
    for op in ops:
        if not isinstance(op, (ForwardStage, BackwardStage, BackwardInputStage)):
            result.append(op)
            continue
        stage, micro = near.stage(op.chunk), op.micro
        before, after = near.peer(stage - 1), near.peer(stage + 1)
        if isinstance(op, ForwardStage):
            codec = near.activation_codec
            if stage:
                shape = near.shapes(stage - 1, micro)
                result.append(RecvActivation(stage - 1, micro, before, shape, codec))
            result.append(op)
            if stage < last:
                shape = near.shapes(stage, micro)
                send(SendActivation(stage, micro, after, shape, codec), "activation")
        else:
            codec = near.grad_codec
            if stage < last:
                shape = near.shapes(stage, micro)
                result.append(RecvGrad(stage, micro, after, shape, codec))
            result.append(op)
            if stage:
                shape = near.shapes(stage - 1, micro)
                send(SendGrad(stage - 1, micro, before, shape, codec), "grad")
    return result + list(posted.values())


def expand_blocks(ops: Iterable[Op], chunks: Sequence[Sequence[str]]) -> Iterator[Op]:
    """Replace stage ops by one op per block; `chunks` are the blocks of each of the rank's chunks.

    The weight halves of a split backward run in the order of the input halves, last block first.
    """
    for op in ops:
        if isinstance(op, ForwardStage):
            yield from (Forward(block, op.micro) for block in chunks[op.chunk])
        elif type(op) in _BACKWARDS:
            kind = _BACKWARDS[type(op)]
            yield from (kind(block, op.micro) for block in reversed(chunks[op.chunk]))
        else:
            yield op


_BACKWARDS: dict[type[Op], type[Backward | BackwardInput | BackwardWeight]] = {
    BackwardStage: Backward,
    BackwardInputStage: BackwardInput,
    BackwardWeightStage: BackwardWeight,
}


def insert_recompute(
    ops: Iterable[Op], chunks: Sequence[Sequence[str]], mode: str, every: int = 1
) -> list[Op]:
    """Let forwards keep less and compute it again right before it is needed.

    Parameters
    ----------
    ops : iterable of Op
        Expanded into blocks.
    chunks : sequence of sequence of str
        Blocks that may be recomputed, chunk by chunk, in forward order, without gaps within a
        chunk. The last block of a model is not among them: its backward follows its forward.
    mode : {"none", "selective", "full"}
        Keep all; all but the layers' interiors; only the input of every `every`-th block.
    every : int, default 1
        Blocks of one segment, >= 1 (full): they share the kept input of the first, and are
        replayed together before the backward of the last. A segment ends with its chunk.
    """
    if mode == "none":
        return list(ops)
    if mode == "selective":
        segments = {block: (block,) for blocks in chunks for block in blocks}
        keeps = dict.fromkeys(segments, "selective")
    else:
        pieces = [
            tuple(blocks[at : at + every])
            for blocks in chunks
            for at in range(0, len(blocks), every)
        ]
        segments = {piece[-1]: piece for piece in pieces}
        keeps = {block: "nothing" for piece in pieces for block in piece}
        keeps |= {piece[0]: "input" for piece in pieces}
    result: list[Op] = []
    for op in ops:
        if isinstance(op, Forward) and op.block in keeps:
            op = Forward(op.block, op.micro, keeps[op.block])
        elif isinstance(op, (Backward, BackwardInput)):
            result += [Recompute(block, op.micro) for block in segments.get(op.block, ())]
        result.append(op)
    return result


def replay_ends(ops: Iterable[Op], blocks: Sequence[str]) -> dict[tuple[str, int], bool]:
    """Return (block, micro) of every replay whose output is compared with the first one.

    These are the last blocks of their segments. Where the block after them is on this rank it keeps
    its input, so the first output is there to be compared with: their forward holds it until the
    replay. Where it is not, the output leaves, and what is compared is a checksum.

    Returns
    -------
    dict
        The value tells whether the first output is there.
    """
    keeps = {(op.block, op.micro): op.keep for op in ops if isinstance(op, Forward)}
    after = dict(zip(blocks, blocks[1:], strict=False))
    return {
        (block, micro): (after.get(block), micro) in keeps
        for (block, micro), keep in keeps.items()
        if keep in ("input", "nothing") and keeps.get((after.get(block), micro)) != "nothing"
    }


def batch_ends(ops: Iterable[Op]) -> dict[int, Op]:
    """Return the op that is the last to read each microbatch's rows: they are freed with it."""
    readers = (Forward, Backward, BackwardWeight)
    return {op.micro: op for op in ops if isinstance(op, readers)}


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
        All of the plan, one per block that owns parameters.
    needs : dict of str to tuple of int
        Block -> buckets that it reads (`partition.buckets_by_block`).
    prefetch : bool
        Begin to gather for the next block before this one runs: twice the room, less waiting.

    Notes
    -----
    A replay of a whole block and its backward share one gather, also where other replays lie
    between them. A restored interior needs no parameters, and neither do weight gradients.
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
        if not (isinstance(op, (Forward, Backward, BackwardInput)) or replays_whole):
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
    ops: Iterable[Op],
    buckets: Sequence[Bucket],
    overlap: bool,
    zero: int = 0,
    exchanges: dict[int, ExchangeTied] | None = None,
) -> list[Op]:
    """Sum every bucket over the ranks, after the last backward that adds to it.

    Parameters
    ----------
    ops : iterable of Op
        Expanded into blocks.
    buckets : sequence of Bucket
        Those of the rank's coordinate.
    overlap : bool
        A bucket starts as soon as its last gradient is there, and is waited for as late as can be.
    zero : int
        0: all-reduce, once a step; 1: reduce-scatter, once a step; 2 and 3: reduce-scatter after
        every microbatch, so that a rank keeps no more than its shards and one or two buckets.
    exchanges : dict of int to ExchangeTied, optional
        Bucket -> the op that adds up the two ends of a tied table: before the bucket's sum (zero 0
        and 1), or shard by shard after the last one (2 and 3). The pipeline's first stage has
        its part of such a gradient last of all, so nobody waits for it before the end.

    Notes
    -----
    The order of buckets, and so the order of every addition, does not depend on `overlap`.
    """
    exchanges = exchanges or {}
    if zero >= 2:
        return [*_sync_each_micro(list(ops), buckets, overlap), *exchanges.values()]
    collective = "reduce_scatter" if zero else "all_reduce"
    ops = list(ops)
    last = {
        op.block: _behind_sends(ops, index)
        for index, op in enumerate(ops)
        if isinstance(op, ADDS_GRADIENTS)
    }
    early = [bucket for bucket in buckets if bucket.index not in exchanges]
    tied = [bucket for bucket in buckets if bucket.index in exchanges]
    ready: dict[int, list[Bucket]] = {}
    for bucket in early:
        ready.setdefault(max(last[block] for block in bucket.blocks), []).append(bucket)
    result: list[Op] = []
    for index, op in enumerate(ops):
        result.append(op)
        if overlap:
            result += [_start(bucket, ALL_MICROS, collective) for bucket in ready.get(index, ())]
    # At the end, where no other stage waits for this rank any more.
    for bucket in (*early, *tied):
        if bucket.index in exchanges:
            result.append(exchanges[bucket.index])
        if bucket in tied or not overlap:
            result.append(_start(bucket, ALL_MICROS, collective))
        if not overlap:
            result.append(WaitSync(bucket.index, ALL_MICROS))
    if overlap:
        result += [WaitSync(bucket.index, ALL_MICROS) for bucket in (*early, *tied)]
    return result


def _behind_sends(ops: Sequence[Op], index: int) -> int:
    """Return the place behind a backward where its sums start.

    The parameters of its block are freed by then, and the stage before has what it waits for.
    """
    while index + 1 < len(ops) and isinstance(ops[index + 1], (Reshard, WaitSend, SendGrad)):
        index += 1
    return index


def _sync_each_micro(ops: list[Op], buckets: Sequence[Bucket], overlap: bool) -> list[Op]:
    last = {
        (op.block, op.micro): _behind_sends(ops, place)
        for place, op in enumerate(ops)
        if isinstance(op, ADDS_GRADIENTS)
    }
    micros = sorted({micro for _, micro in last})
    ready: dict[int, list[tuple[Bucket, int]]] = {}
    for micro in micros:
        for bucket in buckets:
            place = max(last[block, micro] for block in bucket.blocks)
            ready.setdefault(place, []).append((bucket, micro))
    # Nothing of the microbatch is left behind which a sum could hide.
    ends = {max(at for (_, m), at in last.items() if m == micro) for micro in micros}
    result: list[Op] = []
    running: WaitSync | None = None
    adding = {bucket.index: bucket.blocks for bucket in buckets}
    for index, op in enumerate(ops):
        adds = isinstance(op, ADDS_GRADIENTS) and running is not None
        if adds and op.block in adding[running.bucket]:
            # Of another microbatch: chunks of a rank take turns.
            result.append(running)
            running = None
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


def reduce_scalars(kind: str, num_norms: int = 1) -> ReduceScalars:
    """Return the op of one control sum over all ranks; `num_norms`: see `partition.num_norms`."""
    return ReduceScalars(kind, control_count(kind, num_norms), *CONTROL_SUMS[kind][1:])


def frame_update(
    ops: Iterable[Op], buckets: Sequence[Bucket], zero: int = 0, num_norms: int = 0
) -> list[Op]:
    """Put the update around the gradients: the global target count before, the rest after.

    With `num_norms` the gradients lie on several ranks in parts, and their norm is one of all
    ranks; where every rank keeps all working weights of its blocks (`zero` 1 and 2) they are
    collected once they are updated.
    """
    return [
        reduce_scalars("target_count"),
        *ops,
        reduce_scalars("loss"),
        CheckGradients(),
        *([reduce_scalars("norm", num_norms)] if num_norms else []),
        reduce_scalars("non_finite"),
        OptimizerStep(),
        *(GatherParams(bucket.index, bucket.count) for bucket in buckets if zero in (1, 2)),
        GatherMetrics(len(METRIC_NAMES)),
    ]
