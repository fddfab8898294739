"""Rules of a pipeline's ops: messages between stages, split backwards, tied tables.

Messages are checked as if nothing was buffered on the way: a send is complete when the other rank
has come to its receive. What holds there holds with any library and any message size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpisim.errors import PlanError
from mpisim.layouts.codecs import codec_names
from mpisim.plan.build import Plan
from mpisim.plan.ops import (
    Backward,
    BackwardInput,
    BackwardWeight,
    ExchangeTied,
    Op,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    WaitSend,
)
from mpisim.plan.text import op_text
from mpisim.plan.walk import (
    RankState,
    draw_place,
    fail,
    require,
    require_known,
    require_params,
)

Send = SendActivation | SendGrad
Recv = RecvActivation | RecvGrad
_MESSAGES = (SendActivation, SendGrad, RecvActivation, RecvGrad)


@dataclass
class _Channel:
    """Frames from one rank to another over one boundary in one direction, in order."""

    sent: list[tuple[int, Send]] = field(default_factory=list)
    """(position, op) of each send that was posted."""
    received: list[tuple[int, Recv]] = field(default_factory=list)
    finished: int = 0
    """Sends that were waited for."""


class Messages:
    """All frames of a plan, by (sender, receiver, boundary, kind)."""

    def __init__(self) -> None:
        self.channels: dict[tuple[int, int, int, str], _Channel] = defaultdict(_Channel)

    def outgoing(self, state: RankState, op: Send | WaitSend) -> _Channel:
        """Return the channel that an op of the sender is about."""
        return self.channels[state.rank, op.peer, op.boundary, _kind(op)]

    def incoming(self, state: RankState, op: Recv) -> _Channel:
        """Return the channel that an op of the receiver is about."""
        return self.channels[op.peer, state.rank, op.boundary, _kind(op)]

    def require_drained(self, plan: Plan) -> None:
        """Require that every frame was received.

        Raises
        ------
        PlanError
            A send has no receive.
        """
        for (source, dest, boundary, kind), channel in self.channels.items():
            if len(channel.sent) > len(channel.received):
                position, _ = channel.sent[len(channel.received)]
                raise PlanError(
                    f"every send must have its receive; got none on rank {dest} for the {kind} "
                    f"over boundary {boundary} that rank {source} sends:\n"
                    f"{draw_place(plan, {source: position})}\nAdd the receive."
                )


def _kind(op: Op) -> str:
    if isinstance(op, WaitSend):
        return op.kind
    return "activation" if isinstance(op, (SendActivation, RecvActivation)) else "grad"


def waits_for_message(state: RankState, states: list[RankState]) -> list[int]:
    """Return the rank that an op of axis pp waits for, if it does."""
    op = state.op
    size = len(states)
    near = 0 <= op.peer < size and op.peer != state.rank
    require(state, near, f"the other side must be another rank in 0..{size - 1}", "Name the rank "
            "of its pp group that holds the other side.", f"peer={op.peer}")  # fmt: skip
    if isinstance(op, ExchangeTied):
        other = _other_end(state, states[op.peer], op)
        if other is None:
            return [op.peer]
        same = other.dtype == op.dtype
        require(state, same, f"both ends must exchange one dtype, and not {other.dtype}, too",
                "Give both ends one dtype.")  # fmt: skip
        return []
    if isinstance(op, WaitSend):
        waiting = state.frames.get((op.boundary, op.kind), [])
        require(state, op.micro in waiting, "a frame must be posted before it is waited for",
                "Wait once for each send, behind it.")  # fmt: skip
        channel = state.messages.outgoing(state, op)
        turn = channel.finished
        return [] if len(channel.received) > turn else [op.peer]
    channel = state.messages.incoming(state, op)
    return [] if len(channel.sent) > len(channel.received) else [op.peer]


def _other_end(state: RankState, other: RankState, op: ExchangeTied) -> ExchangeTied | None:
    """Return the exchange of the other end, if that rank has come to it."""
    buckets = state.plan.buckets
    known = 0 <= op.bucket < len(buckets) and buckets[op.bucket].twin >= 0
    require(state, known, "a bucket whose ends are added up must have two", "Name the bucket of a "
            "tied table.")  # fmt: skip
    if isinstance(other.op, ExchangeTied) and other.op.peer == state.rank:
        return other.op
    return other.exchanged.get(buckets[op.bucket].twin)


def find_cycle(plan: Plan, states: list[RankState], waits: dict[int, list[int]]) -> str:
    """Return the ranks that wait for each other in a circle, a line each; empty without one.

    Parameters
    ----------
    plan : Plan
    states : list of RankState
    waits : dict of int to list of int
        Blocked rank -> ranks that it waits for.
    """
    cycle = _cycle(waits)
    if not cycle:
        return ""
    lines = [
        f"  rank {rank} in {op_text(states[rank].op)} waits for rank {after}"
        for rank, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    return "\n".join(["They wait in a circle:", *lines, ""])


def _cycle(waits: dict[int, list[int]]) -> list[int]:
    """Return ranks each of which waits for the next one, and the last for the first."""
    for start in waits:
        path = [start]
        while True:
            ahead = [rank for rank in waits.get(path[-1], ()) if rank in waits]
            if not ahead:
                break
            if ahead[0] in path:
                return path[path.index(ahead[0]) :]
            path.append(ahead[0])
    return []


def deadlock_remedy(states: list[RankState], waits: dict[int, list[int]]) -> str:
    """Return what to do about ranks that wait for each other for ever: see `find_cycle`.

    Where a circle is of messages between stages alone, it is the schedule's order that is wrong.
    """
    stuck = f"(first stuck: rank {min(waits)})"
    for rank in waits:
        plan, op = states[rank].plan, states[rank].op
        if isinstance(op, (RecvActivation, RecvGrad)) and 0 <= op.boundary < len(plan.stages) - 1:
            before, after = _ends(states[rank], op.boundary)
            block = before if isinstance(op, RecvActivation) else after
            holders = _holders(plan, rank, block)
            if op.peer not in holders:
                return (
                    f"Set peer={holders[0]} in {op_text(op)} of rank {rank}: that rank holds block "
                    f"{block}."
                )
    circle = [states[rank].op for rank in _cycle(waits)]
    if circle and all(isinstance(op, (*_MESSAGES, WaitSend)) for op in circle):
        return (
            f"Order forwards and backwards so that no rank of the circle waits before it has made "
            f"what the others wait for {stuck}:\na forward comes after that of the stage before, "
            f"a backward after that of the stage after."
        )
    return f"Give all ranks the same order of collectives and messages {stuck}."


def _ends(state: RankState, boundary: int) -> tuple[str, str]:
    """Return the block before a boundary and the one after it."""
    stages = state.plan.stages
    require(state, 0 <= boundary < len(stages) - 1, "a boundary must lie between two stages",
            f"Name one of 0..{len(stages) - 2}.", f"boundary={boundary}")  # fmt: skip
    return stages[boundary][-1], stages[boundary + 1][0]


def _check_frame(state: RankState, op: Send | Recv) -> None:
    """Require a codec that is known and the rows of the microbatch."""
    require(state, op.codec in codec_names(), f"a codec must be one of {', '.join(codec_names())}",
            "Name one of these.", f"codec={op.codec}")  # fmt: skip
    micros = state.num_micros
    require(state, 0 <= op.micro < micros, f"a microbatch must be one of the rank's {micros}",
            f"Name one of 0..{micros - 1}.", f"micro={op.micro}")  # fmt: skip
    rows = state.plan.rows[state.rank][op.micro]
    right = op.shape[:1] == (rows,)
    require(state, right, f"a frame of microbatch {op.micro} must have its {rows} rows",
            f"Give both ends a shape that starts with {rows}.")  # fmt: skip


def _post(state: RankState, op: Send) -> None:
    _check_frame(state, op)
    state.frames.setdefault((op.boundary, _kind(op)), []).append(op.micro)
    state.messages.outgoing(state, op).sent.append((state.position, op))


def _send_activation(state: RankState, op: SendActivation) -> None:
    before, after = _ends(state, op.boundary)
    require_known(state, before)
    _require_holder(state, op, after)
    found = (before, op.micro) in state.outputs
    require(state, found, "a send must follow the forward of its stage")
    state.outputs.discard((before, op.micro))
    _post(state, op)


def _send_grad(state: RankState, op: SendGrad) -> None:
    before, after = _ends(state, op.boundary)
    require_known(state, after)
    _require_holder(state, op, before)
    found = (after, op.micro) in state.grads_of
    require(state, found, "a send must follow the backward of its stage")
    state.grads_of.discard((after, op.micro))
    _post(state, op)


def _take(state: RankState, op: Recv) -> None:
    """Match a receive with the send that is next in line."""
    channel = state.messages.incoming(state, op)
    position, sent = channel.sent[len(channel.received)]
    channel.received.append((state.position, op))
    mine = (op.micro, op.shape, op.codec)
    theirs = (sent.micro, sent.shape, sent.codec)
    if mine != theirs:
        place = draw_place(state.plan, {op.peer: position, state.rank: state.position})
        raise PlanError(
            f"a receive must match the send that is next in line; got {op_text(sent)} on rank "
            f"{op.peer} for {op_text(op)} on rank {state.rank}:\n{place}\n"
            + _mismatch_remedy(sent, op)
        )
    _check_frame(state, op)


def _mismatch_remedy(sent: Send, op: Recv) -> str:
    if sent.micro != op.micro:
        return "Send and receive the microbatches in the same order, each once."
    differing = [what for what in ("shape", "codec") if getattr(sent, what) != getattr(op, what)]
    return f"Give both ends one {' and one '.join(differing)}."


def require_tensor(state: RankState, found: bool, block: str, neighbour: str, micro: int) -> None:
    """Require the tensor that a block's forward or backward takes from a neighbouring block.

    Within a stage the neighbour has to run first; of another rank's the tensor is received.
    """
    if found:
        return
    blocks, stages = state.plan.blocks, state.plan.stages or (state.plan.blocks,)
    is_forward = blocks.index(neighbour) < blocks.index(block)
    mine, other = (
        next(number for number, blocks in enumerate(stages) if name in blocks)
        for name in (block, neighbour)
    )
    what, side = ("forward", "before") if is_forward else ("backward", "after")
    if mine == other:
        fail(state, f"{what} must follow the {what} of the block {side}")
    kind, tensor = (RecvActivation, "output") if is_forward else (RecvGrad, "gradient")
    boundary, peer = min(mine, other), state.plan.mesh.group(state.rank, "pp")
    peer = peer[other % len(peer)]
    ahead = (
        isinstance(op, kind) and (op.boundary, op.micro) == (boundary, micro)
        for op in state.plan.ranks[state.rank][state.position :]
    )  # fmt: skip
    wanted = f"{kind.__name__} boundary={boundary} micro={micro} peer={peer}"
    fail(
        state,
        f"{what} must follow the receive of the {tensor} of block {neighbour}, which rank {peer} "
        f"sends",
        f"{'Move up' if any(ahead) else 'Add'} {wanted} before it.",
    )


def _recv_activation(state: RankState, op: RecvActivation) -> None:
    before, after = _ends(state, op.boundary)
    require_known(state, after)
    _require_holder(state, op, before)
    state.outputs.add((before, op.micro))
    _take(state, op)


def _recv_grad(state: RankState, op: RecvGrad) -> None:
    before, after = _ends(state, op.boundary)
    require_known(state, before)
    _require_holder(state, op, after)
    state.grads_of.add((after, op.micro))
    _take(state, op)


def _require_holder(state: RankState, op: Send | Recv, block: str) -> None:
    """Require that the other side is the rank of the pp group that holds a block."""
    holders = _holders(state.plan, state.rank, block)
    named = " or ".join(map(str, holders))
    require(state, op.peer in holders, f"the other side must be rank {named}, which holds block "
            f"{block}", f"Set peer={named}.", f"peer={op.peer}")  # fmt: skip


def _holders(plan: Plan, rank: int, block: str) -> list[int]:
    group = plan.mesh.group(rank, "pp")
    return [mate for mate in group if block in plan.rank_blocks(mate)]


def _wait_send(state: RankState, op: WaitSend) -> None:
    waiting = state.frames[op.boundary, op.kind]
    first = waiting[0] == op.micro
    require(state, first, "frames of a boundary must be waited for in the order of their sends")
    waiting.pop(0)
    state.messages.outgoing(state, op).finished += 1


def begin_backward(state: RankState, op: Backward | BackwardInput) -> None:
    """Take the gradient of a block's output, and leave that of its input."""
    blocks, key = state.plan.blocks, (op.block, op.micro)
    require_known(state, op.block)
    require(state, key not in state.kept, "backward must follow the replay of its block")
    require(state, key in state.saved, "backward must follow the forward of its block")
    require_params(state, op.block)
    if op.block == blocks[-1]:
        counted = "target_count" in state.sums
        require(state, counted, "backward must follow ReduceScalars of kind target_count")
    else:
        after = (blocks[blocks.index(op.block) + 1], op.micro)
        require_tensor(state, after in state.grads_of, op.block, *after)
        state.grads_of.discard(after)
    if op.block != blocks[0]:
        state.grads_of.add(key)


def finish_backward(state: RankState, op: Backward | BackwardWeight) -> None:
    """Add up the gradients of a block's weights, and free what was saved."""
    busy = [key[1] for key in state.in_flight if key[0] == "sync"]
    for bucket in state.buckets:
        if op.block in bucket.blocks:
            free = bucket.index not in busy
            require(state, free, f"a backward must not add to bucket {bucket.index} while it is "
                    f"summed")  # fmt: skip
    for micro in range(op.micro):
        before = (op.block, micro) in state.backwards
        require(state, before, "gradients must be added in the order of microbatches")
    state.saved.discard((op.block, op.micro))
    state.backwards.add((op.block, op.micro))
    state.drop_batch()


def _backward_input(state: RankState, op: BackwardInput) -> None:
    key = (op.block, op.micro)
    require(state, key not in state.halves, "the input half of a backward must run once",
            "Remove one of them.")  # fmt: skip
    begin_backward(state, op)
    state.halves.add(key)


def _backward_weight(state: RankState, op: BackwardWeight) -> None:
    key = (op.block, op.micro)
    require_known(state, op.block)
    require(state, key in state.halves, "the weight half of a backward must follow the input half")
    state.halves.discard(key)
    finish_backward(state, op)


def _exchange_tied(state: RankState, op: ExchangeTied) -> None:
    plan = state.plan
    mine = [bucket for bucket in state.buckets if bucket.index == op.bucket]
    require(state, bool(mine) and mine[0].twin >= 0, "a bucket whose ends are added up must lie on "
            "the rank, and have two", "Name the bucket of the tied table that is the rank's own.",
            f"bucket={op.bucket}")  # fmt: skip
    bucket = mine[0]
    twin = plan.buckets[bucket.twin]
    holder = plan.mesh.group(state.rank, "pp")[twin.coordinate]
    require(state, op.peer == holder, f"the other end must be on rank {holder}",
            f"Set peer={holder}.", f"peer={op.peer}")  # fmt: skip
    require(state, op.bucket not in state.exchanged, "two ends must be added up once per step",
            "Remove one of the exchanges.")  # fmt: skip
    count = bucket.count
    if plan.zero >= 2:
        lo, hi = bucket.shard(plan.mesh.dp, plan.mesh.coordinate(state.rank)["dp"])
        count = hi - lo
        whole = op.bucket not in state.unreduced
        require(state, whole, "shards must be added up after the last sum over dp")
    else:
        micros = range(state.num_micros)
        whole = all((b, m) in state.backwards for b in bucket.blocks for m in micros)
        require(state, whole, "two ends must be added up when all their gradients are there")
    require(state, op.count == count, f"an exchange must be of {count} elements",
            f"Set count={count}.", f"count={op.count}")  # fmt: skip
    state.exchanged[op.bucket] = op


PIPELINE_RULES: dict[type[Op], Callable[[RankState, Any], None]] = {
    SendActivation: _send_activation,
    RecvActivation: _recv_activation,
    SendGrad: _send_grad,
    RecvGrad: _recv_grad,
    WaitSend: _wait_send,
    BackwardInput: _backward_input,
    BackwardWeight: _backward_weight,
    ExchangeTied: _exchange_tied,
}
"""Op kind -> function: what an op needs and what it leaves on its rank."""


def in_flight(plan: Plan, rank: int) -> int | float:
    """Return the most microbatches whose activations a rank keeps at one time.

    From the first forward of a microbatch to the last op that reads what its forwards saved.
    Microbatches of different chunks count in parts: one that is kept in one of two chunks is half,
    so of eleven that are the result is 5.5. A whole number is an int. An evaluation keeps none.
    """
    if plan.kind != "train":
        return 0
    ends = {}
    ops = plan.ranks[rank]
    chunks = {block: c for c, blocks in enumerate(plan.chunks(rank)) for block in blocks}
    for op in ops:
        if isinstance(op, (Backward, BackwardWeight)):
            ends[chunks[op.block], op.micro] = op
    live: set[tuple[int, int]] = set()
    most = 0
    for op in ops:
        key = (chunks.get(getattr(op, "block", None)), getattr(op, "micro", None))
        if type(op).__name__ == "Forward":
            live.add(key)
            most = max(most, len(live))
        elif ends.get(key) is op:
            live.discard(key)
    whole, rest = divmod(most, len(plan.chunks(rank)))
    return most / len(plan.chunks(rank)) if rest else whole
