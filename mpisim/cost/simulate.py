"""A plan on a clock: when every op of every rank would run on machines of a given speed.

The same ops that run are walked here, with a time per op in place of arrays and a link in place of
a transport. Times may be whole numbers or `Fraction`s: the results are exact then. `bubbles` holds
the closed forms that this is tested against, and the schedules that are only published.

    compute op        takes op_seconds(rank, op)
    Send              is posted; it occupies the link to its peer for bytes / bytes_per_s
    Recv              waits until the message is here: it left the link latency_s ago
    WaitSend          waits until the message has left the link
    StartSync, ...    a sum begins once every rank of the dp group has started it, one at a time
    ExchangeTied      waits for the other end
    ReduceScalars,    wait for all ranks
    GatherMetrics
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Rational

from mpisim.errors import DeadlockError
from mpisim.mesh import Mesh
from mpisim.plan.build import Plan
from mpisim.plan.ops import (
    WAIT_AXIS,
    Backward,
    BackwardInput,
    BackwardInputStage,
    BackwardStage,
    BackwardWeight,
    BackwardWeightStage,
    ExchangeTied,
    Forward,
    ForwardStage,
    GatherMetrics,
    GatherParams,
    Op,
    Recompute,
    RecvActivation,
    RecvGrad,
    ReduceScalars,
    SendActivation,
    SendGrad,
    StartSync,
    StartUnshard,
    WaitSend,
    WaitSync,
    WaitUnshard,
)
from mpisim.plan.passes import Boundaries, insert_messages
from mpisim.plan.schedules import compute_lists
from mpisim.plan.text import op_text

Number = int | float | Fraction

CAUSES = ("receive", "send", "tied", "dp", "control", "end")
"""What a rank waits for. receive: a message. send: its own message to leave. tied: the other end
of a tied table. dp: a sum or a gather over axis dp. control: all ranks, before the last forward or
backward. end: all ranks, after it, until the step has ended everywhere."""

_STAGE_OPS = (ForwardStage, BackwardStage, BackwardInputStage, BackwardWeightStage)
_BLOCK_OPS = (Forward, Backward, BackwardInput, BackwardWeight, Recompute)
_KINDS = {
    SendActivation: "activation",
    RecvActivation: "activation",
    SendGrad: "grad",
    RecvGrad: "grad",
}


@dataclass(frozen=True)
class Link:
    """What every ordered pair of ranks is joined by; both directions are apart."""

    latency_s: Number = 0
    """Seconds from the moment a message has left to its arrival; the link is free meanwhile."""
    bytes_per_s: Number = 0
    """0: no limit."""


@dataclass(frozen=True)
class PlanTimeline:
    """When every op of a plan ran."""

    ranks: tuple[tuple[Op, ...], ...] = field(repr=False)
    """The ops that were walked, per rank."""
    spans: tuple[tuple[tuple[int, Number, Number], ...], ...] = field(repr=False)
    """Per rank: (index of the op, start, end), in order."""
    waits: tuple[dict[str, Number], ...]
    """Per rank: one of `CAUSES` -> seconds."""
    in_flight: tuple[Fraction, ...]
    """Per rank: the most microbatches alive, from the first forward of a chunk to the end of its
    last backward or weight part; one of v chunks counts 1 / v."""

    @property
    def step_s(self) -> Number:
        """Seconds until the last rank has ended."""
        return max((ops[-1][2] for ops in self.spans if ops), default=0)

    @property
    def stall_share(self) -> Number:
        """Mean over ranks of (waits on receive + waits at the end of the step) / step."""
        stall = sum(waits["receive"] + waits["end"] for waits in self.waits)
        total = self.step_s * len(self.waits)
        if not total:
            return Fraction(0)
        exact = isinstance(stall, Rational) and isinstance(total, Rational)
        return Fraction(stall) / Fraction(total) if exact else stall / total


def simulate_plan(
    plan: Plan,
    op_seconds: Callable[[int, Op], Number],
    link: Link | None = None,
    *,
    message_bytes: Callable[[Op], int] | None = None,
    sync_seconds: Callable[[Op], Number] | None = None,
    barrier_s: Number = 0,
    synchronous: bool = False,
) -> PlanTimeline:
    """Run a plan on a clock.

    Parameters
    ----------
    plan : Plan
        Checked: see `plan.check`.
    op_seconds : callable
        (rank, op) -> seconds of an op that neither sends nor waits.
    link : Link, optional
        By default messages take no time.
    message_bytes : callable, optional
        SendActivation or SendGrad -> bytes of its message; by default 0.
    sync_seconds : callable, optional
        StartSync, StartUnshard, GatherParams or ExchangeTied -> seconds from its begin, when all
        its ranks have come, to its end; by default 0. What a dp group does is done one after the
        other.
    barrier_s : int, float or Fraction
        Seconds of a control sum once all ranks have come.
    synchronous : bool
        A message has left only when its receive is posted, too.

    Returns
    -------
    PlanTimeline

    Raises
    ------
    DeadlockError
        The ranks wait for each other for ever.
    """
    clock = _Clock(
        plan.ranks, plan.mesh, op_seconds, link or Link(), message_bytes or _nothing,
        sync_seconds or _nothing, barrier_s, synchronous,
    )  # fmt: skip
    clock.run()
    in_flight = []
    for rank, ops in enumerate(plan.ranks):
        chunks = plan.chunks(rank)
        place_of = {block: place for place, blocks in enumerate(chunks) for block in blocks}
        places = [place_of.get(getattr(op, "block", None)) for op in ops]
        in_flight.append(_most_alive(ops, places, len(chunks)))
    return clock.timeline(tuple(in_flight))


def simulate_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    forward_s: Number,
    backward_s: Number,
    weight_s: Number = 0,
    link: Link | None = None,
    message_bytes: int = 0,
    synchronous: bool = False,
) -> PlanTimeline:
    """Run a schedule alone on a clock: equal stages, one message per boundary and microbatch.

    Parameters
    ----------
    name : str
        One of `plan.schedules.SCHEDULES`.
    num_stages, num_microbatches, num_chunks : int
    forward_s, backward_s, weight_s : int, float or Fraction
        Seconds of one chunk's forward, of the gradient of its input, and of its weights. Where
        backwards are not split one takes `backward_s` + `weight_s`.
    link : Link, optional
        By default messages take no time.
    message_bytes : int
        Bytes of every message.
    synchronous : bool
        See `simulate_plan`.

    Returns
    -------
    PlanTimeline

    Examples
    --------
    >>> line = simulate_schedule("1f1b", 4, 8, forward_s=1, backward_s=1)
    >>> line.step_s, line.stall_share, [int(most) for most in line.in_flight]
    (22, Fraction(3, 11), [4, 3, 2, 1])
    >>> far = Link(latency_s=1)
    >>> [
    ...     simulate_schedule(name, 2, 8, forward_s=1, backward_s=1, link=far).step_s
    ...     for name in ("gpipe", "1f1b")
    ... ]
    [20, 26]
    """
    seconds = {
        ForwardStage: forward_s,
        BackwardStage: backward_s + weight_s,
        BackwardInputStage: backward_s,
        BackwardWeightStage: weight_s,
    }
    lists = compute_lists(name, num_stages, num_microbatches, num_chunks)
    peers = tuple(range(num_stages))
    ranks = tuple(
        tuple(
            insert_messages(
                ops, Boundaries(rank, peers, num_stages * num_chunks, lambda boundary, micro: ())
            )
        )
        for rank, ops in enumerate(lists)
    )
    clock = _Clock(
        ranks, Mesh(pp=num_stages), lambda rank, op: seconds[type(op)], link or Link(),
        lambda op: message_bytes, _nothing, 0, synchronous,
    )  # fmt: skip
    clock.run()
    return clock.timeline(
        tuple(_most_alive(ops, [op.chunk for op in ops], num_chunks) for ops in lists)
    )


def _nothing(op: Op) -> int:
    return 0


class _Clock:
    """Walks the ops of all ranks; a rank stops at an op whose end is not known yet.

    The order in which ranks are walked changes nothing: every time follows from what an op waits
    for, a link has one sender, and sums of a group are numbered by each rank.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[Op]],
        mesh: Mesh,
        op_seconds: Callable[[int, Op], Number],
        link: Link,
        message_bytes: Callable[[Op], int],
        sync_seconds: Callable[[Op], Number],
        barrier_s: Number,
        synchronous: bool,
    ) -> None:
        self.ranks, self.mesh, self.link = ranks, mesh, link
        self.op_seconds, self.message_bytes = op_seconds, message_bytes
        self.sync_seconds, self.barrier_s = sync_seconds, barrier_s
        self.synchronous = synchronous
        size = len(ranks)
        self.now: list[Number] = [0] * size
        self.spans: list[list[tuple[int, Number, Number]]] = [[] for _ in ranks]
        self.waits = [dict.fromkeys(CAUSES, 0) for _ in ranks]
        self.last_compute = [
            max((at for at, op in enumerate(ops) if isinstance(op, _STAGE_OPS + _BLOCK_OPS)),
                default=-1)
            for ops in ranks
        ]  # fmt: skip
        # Messages by (kind, boundary, microbatch, from, to).
        self.left: dict[tuple, Number] = {}
        self.receives: dict[tuple, Number] = {}
        self.free: dict[tuple[int, int], Number] = {}
        self.meetings: dict[tuple, dict[int, Number]] = {}
        # Meetings that each rank has left, by group: all ranks, or both ends of a tied table.
        self.met = [collections.Counter() for _ in ranks]
        # What each rank has started on axis dp, in order, and when each turn of a group ended.
        self.started: list[list[tuple[Op, Number]]] = [[] for _ in ranks]
        self.ended: dict[tuple[int, ...], list[Number]] = {}

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.ranks)):
                while self._advance(rank):
                    moved = True
        stuck = {
            rank: ops[len(self.spans[rank])]
            for rank, ops in enumerate(self.ranks)
            if len(self.spans[rank]) < len(ops)
        }
        if stuck:
            where = ", ".join(
                f"rank {rank} at op {len(self.spans[rank])} ({op_text(op)})"
                for rank, op in stuck.items()
            )
            raise DeadlockError(
                f"ranks must not wait for each other for ever; got {where}. Change the order of "
                f"the schedule."
            )

    def timeline(self, in_flight: tuple[Fraction, ...]) -> PlanTimeline:
        step_s = max(self.now)
        for rank, waits in enumerate(self.waits):
            waits["end"] += step_s - self.now[rank]
        return PlanTimeline(
            tuple(map(tuple, self.ranks)), tuple(map(tuple, self.spans)), tuple(self.waits),
            in_flight,
        )  # fmt: skip

    def _advance(self, rank: int) -> bool:
        """Run the next op of a rank if its end is known."""
        index = len(self.spans[rank])
        if index == len(self.ranks[rank]):
            return False
        op, now = self.ranks[rank][index], self.now[rank]
        cause = _cause(op, index > self.last_compute[rank])
        end: Number | None = now
        if cause is not None:
            ready = self._ready(rank, op)
            end = None if ready is None else max(now, ready)
        elif isinstance(op, (SendActivation, SendGrad)):
            self._post(rank, op)
        elif isinstance(op, (StartSync, StartUnshard)):
            self.started[rank].append((op, now))
        else:
            end = now + self.op_seconds(rank, op)
        if end is None:
            return False
        if cause is not None:
            self.waits[rank][cause] += end - now
        if isinstance(op, (ReduceScalars, GatherMetrics, ExchangeTied)):
            self.met[rank][self._group(rank, op)] += 1
        self.spans[rank].append((index, now, end))
        self.now[rank] = end
        return True

    def _post(self, rank: int, op: SendActivation | SendGrad) -> None:
        pair = (rank, op.peer)
        start = max(self.now[rank], self.free.get(pair, 0))
        rate, size = self.link.bytes_per_s, self.message_bytes(op)
        self.free[pair] = start + (Fraction(size) / rate if rate else 0)
        self.left[_KINDS[type(op)], op.boundary, op.micro, *pair] = self.free[pair]

    def _ready(self, rank: int, op: Op) -> Number | None:
        """Return when what an op waits for has happened; None: not known yet."""
        if isinstance(op, (RecvActivation, RecvGrad)):
            key = (_KINDS[type(op)], op.boundary, op.micro, op.peer, rank)
            self.receives.setdefault(key, self.now[rank])
            left = self.left.get(key)
            return None if left is None else left + self.link.latency_s
        if isinstance(op, WaitSend):
            key = (op.kind, op.boundary, op.micro, rank, op.peer)
            if not self.synchronous:
                return self.left.get(key)
            posted = self.receives.get(key)
            return None if posted is None or key not in self.left else max(posted, self.left[key])
        if isinstance(op, (ReduceScalars, GatherMetrics, ExchangeTied)):
            return self._meeting_end(rank, op)
        return self._turn_end(rank, op)

    def _group(self, rank: int, op: Op) -> tuple[object, ...]:
        if isinstance(op, ExchangeTied):
            return ("tied", *sorted((rank, op.peer)))
        return ("control", *range(len(self.ranks)))

    def _meeting_end(self, rank: int, op: Op) -> Number | None:
        """Return when all who meet in an op have come, and are done."""
        group = self._group(rank, op)
        here = self.meetings.setdefault((*group, self.met[rank][group]), {})
        here.setdefault(rank, self.now[rank])
        if len(here) < len(group) - 1:
            return None
        seconds = self.sync_seconds(op) if isinstance(op, ExchangeTied) else self.barrier_s
        return max(here.values()) + seconds

    def _turn_end(self, rank: int, op: WaitSync | WaitUnshard | GatherParams) -> Number | None:
        """Return when what a rank waits for on axis dp has ended."""
        mine = self.started[rank]
        if isinstance(op, GatherParams) and (not mine or mine[-1][0] is not op):
            mine.append((op, self.now[rank]))
        turns = [turn for turn, (started, _) in enumerate(mine) if _waited_by(started, op)]
        if not turns:
            return None
        group = self.mesh.group(rank, "dp")
        ended = self.ended.setdefault(group, [])
        while len(ended) <= turns[-1]:
            if any(len(self.started[other]) <= len(ended) for other in group):
                return None
            begun = [self.started[other][len(ended)][1] for other in group]
            start = max(*begun, ended[-1]) if ended else max(begun)
            ended.append(start + self.sync_seconds(mine[len(ended)][0]))
        return ended[turns[-1]]


def _cause(op: Op, is_over: bool) -> str | None:
    """Return what an op waits for; None: it does not wait."""
    if isinstance(op, (RecvActivation, RecvGrad)):
        return "receive"
    if isinstance(op, WaitSend):
        return "send"
    if isinstance(op, ExchangeTied):
        return "tied"
    axis = WAIT_AXIS.get(type(op))
    return "end" if axis == "control" and is_over else axis


def _waited_by(started: Op, op: Op) -> bool:
    """Tell whether `op` waits for what `started` has begun; for a gather, the last one counts."""
    if isinstance(op, GatherParams):
        return started is op
    kind = StartSync if isinstance(op, WaitSync) else StartUnshard
    same = isinstance(started, kind) and started.bucket == op.bucket
    return same and (kind is StartUnshard or started.micro == op.micro)


def _most_alive(ops: Sequence[Op], places: Sequence[int | None], num_chunks: int) -> Fraction:
    """Return the most (microbatch, chunk) pairs alive at a time, in units of all chunks.

    `places` names the chunk of each op.
    """
    lives: dict[tuple[int, int], tuple[int, int]] = {}
    for at, (op, place) in enumerate(zip(ops, places, strict=True)):
        if place is not None and isinstance(op, _STAGE_OPS + _BLOCK_OPS):
            first, _ = lives.get((op.micro, place), (at, at))
            lives[op.micro, place] = (first, at)
    changes = [0] * (len(ops) + 1)
    for first, last in lives.values():
        changes[first] += 1
        changes[last + 1] -= 1
    return Fraction(max(itertools.accumulate(changes)), num_chunks)
