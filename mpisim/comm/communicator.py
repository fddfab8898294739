"""A group of ranks on one mesh axis, and the collectives they run together.

`Communicator` keeps compiled programs, runs them one after the other, and counts what they moved.
The engine starts a collective, advances it between ops and waits for it; anyone else just calls
`all_reduce` and friends. The rings are in `collectives.py`, their tables in `layouts/steps.py`.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from mpisim.comm.collectives import compile_program
from mpisim.comm.programs import Program
from mpisim.comm.transport import Message, Transport
from mpisim.errors import CommError
from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.steps import (
    REDUCTIONS,
    StepTable,
    algorithm_names,
    all_gather_table,
    all_reduce_table,
    gather_table,
    reduce_scatter_table,
)
from mpisim.trace.recorder import ProgramStamps, Recorder

CACHED_PROGRAMS = 256
"""Programs of plain calls kept per communicator; beyond this the oldest is freed."""

SUMMED = ("float64", "float32", "float16", "bfloat16", "int64")
"""Dtypes that collectives add. Narrow integers are moved but not added: they wrap in silence."""

COMPARED = ("float64", "int64")
"""Dtypes that an all-reduce takes the maximum of: flags and extremes of the control group."""


@dataclass(frozen=True)
class Traffic:
    """What one rank has moved, exact counts."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """Add field by field."""
        return Traffic(
            self.sent_messages + other.sent_messages,
            self.sent_bytes + other.sent_bytes,
            self.received_messages + other.received_messages,
            self.received_bytes + other.received_bytes,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        """Subtract field by field."""
        return Traffic(
            self.sent_messages - other.sent_messages,
            self.sent_bytes - other.sent_bytes,
            self.received_messages - other.received_messages,
            self.received_bytes - other.received_bytes,
        )


class Communicator:
    """One group of ranks and its queue of collectives.

    Parameters
    ----------
    transport : Transport
    ranks : tuple of int
        World ranks of the group, in group order; `index` is this rank's place in it.
    axis : str
        Mesh axis, such as ``dp``; names the group in traces and byte tables.
    channel : int
        Message channel; groups whose messages may be in flight together need different ones.
    recorder : Recorder or None
        Where stamps go.
    algorithm : str
        All-reduce algorithm, one of `mpisim.layouts.steps.algorithm_names`.

    Notes
    -----
    Every rank of the group calls the same collectives in the same order with the same counts and
    dtypes. Collectives of one communicator run one after the other, so they share one piece of
    scratch and the order of messages between two ranks is the order of the calls. Buffers stay
    referenced by the compiled programs (the last `CACHED_PROGRAMS` distinct ones).
    """

    def __init__(
        self,
        transport: Transport,
        ranks: tuple[int, ...] | None = None,
        *,
        axis: str = "dp",
        channel: int = 1,
        recorder: Recorder | None = None,
        algorithm: str = "auto",
    ) -> None:
        self.transport = transport
        self.ranks = tuple(range(transport.size)) if ranks is None else tuple(ranks)
        if transport.rank not in self.ranks:
            raise ValueError(
                f"group must contain this rank; got ranks {self.ranks} on rank {transport.rank}."
            )
        if algorithm not in algorithm_names():
            raise ValueError(
                f"comm.algorithm must be one of {', '.join(algorithm_names())}; got {algorithm!r}."
            )
        self.index = self.ranks.index(transport.rank)
        self.size = len(self.ranks)
        self.axis, self.channel, self.algorithm = axis, channel, algorithm
        self._recorder = recorder if recorder is not None and recorder.enabled else None
        self._clock = recorder.clock if recorder is not None else time.perf_counter
        # Sums by id(x), because they are looked up in a hurry; the others by (id(x), reduction).
        self._all_reduces: dict[int | tuple[int, str], Program] = {}
        self._others: dict[tuple, Program] = {}
        self._queue: deque[Program] = deque()
        self._scratch = np.empty(0, dtype=np.uint8)
        self._retired_bytes_to: Counter[int] = Counter()
        self._retired_traffic: dict[str, Traffic] = {}
        self._polls = transport.polls_per_pause
        self.neighbours: list[Communicator] = []
        """Communicators whose started collectives a blocked wait here keeps advancing."""

    # Collectives -------------------------------------------------------------------------

    def all_reduce(
        self, x: np.ndarray, out: np.ndarray | None = None, reduction: str = "sum"
    ) -> np.ndarray:
        """Combine `x` over the group; every rank ends with the same bits.

        Parameters
        ----------
        x : ndarray of shape (n,), one of `SUMMED` (max: `COMPARED`)
            This rank's part. Overwritten when `out` is None, else not modified.
        out : ndarray of shape (n,), same dtype, optional
            Receives the result.
        reduction : str
            ``sum``, or ``max``: the largest of each element, NaN where any rank has NaN.

        Returns
        -------
        ndarray
            `out`, or `x`.

        Raises
        ------
        MessageMismatch, CommTimeout, PeerLost
            See `mpisim.errors`.

        Notes
        -----
        Collective: every rank calls it with the same n, dtype and reduction. Messages and bytes:
        the step table (`mpisim.layouts.steps.all_reduce_table`), whatever the reduction. Memory:
        the group's scratch, at most two chunks up to 2 MiB, two segments of at most 1 MiB up to
        32 MiB, two of at most 512 KiB above. The order of additions is fixed by the table, the
        same on every run. 16-bit values travel as 2 bytes, are added in float32 and rounded once
        a hop; a sum that overflows is inf, without a warning.
        """
        if out is not None:
            _check_vector(x)
            _check_out(out, x.dtype, x.size)
            np.copyto(out, x)
            x = out
        if reduction != "sum":
            program = self._find_all_reduce(x, reduction=reduction)
            self.start(program)
            self.wait(program)
            return x
        # As `_run`, with as few look-ups as can be: at 1 KiB all this is a tenth of the time.
        try:
            program = self._all_reduces[id(x)]
        except KeyError:
            program = self._compile_all_reduce(x)
        if program.x is not x:
            program = self._compile_all_reduce(x)
        if self._queue:
            self.start(program)
            self.wait(program)
            return x
        pending = program.advance()
        if pending is not None:
            self._block(program, pending)
        program.runs += 1
        return x

    def prepare_all_reduce(
        self, x: np.ndarray, label: str = "", background: bool = False, reduction: str = "sum"
    ) -> Program:
        """Compile the in-place all-reduce of `x`, or return the one compiled before.

        `label` names it in the trace; `background` says that it will be advanced beside compute
        (the same on every rank; it changes how messages travel, not what they say); `reduction`
        is that of `all_reduce`, and the sum and the maximum of one buffer are two programs. The
        program is kept until `close`.
        """
        program = self._find_all_reduce(x, label, background, reduction)
        program.kept = True
        return program

    def _find_all_reduce(
        self, x: np.ndarray, label: str = "", background: bool = False, reduction: str = "sum"
    ) -> Program:
        program = self._all_reduces.get(id(x) if reduction == "sum" else (id(x), reduction))
        if program is None or program.x is not x:
            program = self._compile_all_reduce(x, label, background, reduction)
        return program

    def _compile_all_reduce(
        self, x: np.ndarray, label: str = "", background: bool = False, reduction: str = "sum"
    ) -> Program:
        _check_vector(x)
        table = all_reduce_table(x.size, self.size, x.itemsize, self.algorithm)
        program = self._compile(table, x, None, label, background, reduction)
        self._all_reduces[id(x) if reduction == "sum" else (id(x), reduction)] = program
        self._evict(self._all_reduces)
        return program

    def reduce_scatter(self, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Sum `x` over the group and keep this rank's chunk.

        Parameters
        ----------
        x : ndarray of shape (n,), one of `SUMMED`
            This rank's addend. Not modified.
        out : ndarray of shape (chunk_len(n, size, index),), same dtype
            Receives the chunk. It may be this rank's chunk of `x`, in place; any other overlap
            is refused.

        Returns
        -------
        ndarray
            `out`.

        Notes
        -----
        Collective. Messages: size - 1 times the segments of the table. Memory: up to two chunks
        of scratch (`mpisim.layouts.steps.scratch_slots`), none on two ranks unless in place.
        """
        table = reduce_scatter_table(x.size, self.size, x.itemsize)
        _check_vector(x)
        _check_out(out, x.dtype, table.bounds[self.index + 1] - table.bounds[self.index])
        self._run_cached(("reduce_scatter", id(x), id(out)), table, x, out)
        return out

    def all_gather(
        self, x: np.ndarray, out: np.ndarray, bounds: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Collect every rank's chunk on every rank.

        Parameters
        ----------
        x : ndarray of shape (bounds[index + 1] - bounds[index],)
            This rank's chunk; may be that very part of `out`. Not modified.
        out : ndarray of shape (n,), same dtype
            Receives the chunks, in rank order.
        bounds : tuple of int, length size + 1, optional
            Chunk offsets; the default is `chunk_bounds(n, size)`.

        Returns
        -------
        ndarray
            `out`.

        Notes
        -----
        Collective. Messages: size - 1 times the segments of the table. Memory: none.
        """
        bounds = chunk_bounds(out.size, self.size) if bounds is None else tuple(bounds)
        if len(bounds) != self.size + 1 or bounds[0] != 0 or list(bounds) != sorted(bounds):
            raise ValueError(
                f"bounds must be {self.size + 1} non-decreasing offsets from 0; got {bounds}."
            )
        _check_vector(x)
        _check_out(x, out.dtype, bounds[self.index + 1] - bounds[self.index])
        _check_out(out, x.dtype, bounds[-1])
        table = all_gather_table(bounds, out.itemsize)
        self._run_cached(("all_gather", id(x), id(out), bounds), table, x, out)
        return out

    def gather(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray | None:
        """Collect every rank's `x` on group index 0.

        Parameters
        ----------
        x : ndarray of shape (n,)
            This rank's part. Not modified.
        out : ndarray of shape (size * n,), same dtype, or None
            Needed on index 0, ignored elsewhere.

        Returns
        -------
        ndarray or None
            `out` on index 0.

        Notes
        -----
        Collective. Messages: one from every rank but index 0.
        """
        _check_vector(x)
        if self.index == 0:
            if out is None:
                raise ValueError("out must be given on group index 0; got None.")
            _check_out(out, x.dtype, x.size * self.size)
        else:
            out = None
        self._run_cached(("gather", id(x), id(out)), gather_table(x.size, self.size), x, out)
        return out

    def prepare_gather(self, x: np.ndarray, out: np.ndarray | None) -> Program:
        """Compile the gather of `x`, or return the one compiled before; kept until `close`."""
        table = gather_table(x.size, self.size)
        program = self._cached(("gather", id(x), id(out)), table, x, out)
        program.kept = True
        return program

    # Collectives over buffers that come and go ---------------------------------------------

    def bind_reduce_scatter(
        self, key: str, x: np.ndarray, out: np.ndarray, background: bool = False
    ) -> Program:
        """Compile the reduce-scatter of `x` into `out`, or bind the one of this key again.

        Parameters
        ----------
        key : str
            Names it here and in the trace; one count and dtype for ever.
        x, out : ndarray
            As for `reduce_scatter`. Held until `unbind`.
        background : bool
            See `prepare_all_reduce`.

        Returns
        -------
        Program
            To be started. The same object on every call with this key.
        """
        _check_vector(x)
        table = reduce_scatter_table(x.size, self.size, x.itemsize)
        _check_out(out, x.dtype, table.bounds[self.index + 1] - table.bounds[self.index])
        return self._bind(("reduce_scatter", key), table, x, out, key, background)

    def bind_all_gather(
        self, key: str, x: np.ndarray, out: np.ndarray, background: bool = False
    ) -> Program:
        """Compile the all-gather of `x` into `out`, or bind the one of this key again.

        See `bind_reduce_scatter`; the chunks are those of `chunk_bounds`.
        """
        bounds = chunk_bounds(out.size, self.size)
        _check_vector(x)
        _check_out(x, out.dtype, bounds[self.index + 1] - bounds[self.index])
        table = all_gather_table(bounds, out.itemsize)
        return self._bind(("all_gather", key), table, x, out, key, background)

    def unbind(self, program: Program) -> None:
        """Let go of a bound program's buffers; it has run to its end."""
        assert program not in self._queue, program
        program.unbind()

    def _bind(
        self,
        key: tuple,
        table: StepTable,
        x: np.ndarray,
        out: np.ndarray,
        label: str,
        background: bool,
    ) -> Program:
        known = self._others.get(key)
        if (
            known is not None
            and known.buffers
            and all(a is b for a, b in zip(known.buffers, (x, out), strict=True))
        ):
            return known
        stamps = known.stamps if known is not None else None
        program = self._compile(table, x, out, label, background, stamps=stamps)
        if known is None:
            program.kept = True
            self._others[key] = program
            return program
        if known.buffers:
            self.unbind(known)
        known.bind_as(program)
        return known

    # Started collectives -----------------------------------------------------------------

    def start(self, program: Program) -> None:
        """Queue a run of `program`; it begins when the runs before it are done."""
        self._queue.append(program)
        if len(self._queue) == 1:
            self.advance()

    def advance(self) -> Message | None:
        """Move the queue as far as arrived messages allow; never blocks.

        Returns
        -------
        Message or None
            What the first unfinished run waits for; None when the queue is empty.
        """
        queue = self._queue
        while queue:
            program = queue[0]
            try:
                pending = program.advance()
            except Exception as error:
                raise self.transport.translate(error, None) from error
            if pending is not None:
                return pending
            queue.popleft()
            program.runs += 1
        return None

    def wait(self, program: Program) -> None:
        """Block until the queued run of `program`, and all before it, are complete."""
        target = program.runs + sum(queued is program for queued in self._queue)
        waited_for, since = None, 0.0
        while program.runs < target:
            for _ in range(self._polls):
                pending = self.advance()
                if pending is None or program.runs >= target:
                    return
            waited_for, since = self._pause(pending, waited_for, since)

    @property
    def idle(self) -> bool:
        """True when no started collective is unfinished."""
        return not self._queue

    # Accounting --------------------------------------------------------------------------

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch that the compiled programs share, and of their small sends' copies."""
        return self._scratch.nbytes + sum(program.copies_bytes for program in self.programs())

    def traffic(self) -> dict[str, Traffic]:
        """Return what this rank has moved so far, by collective."""
        totals = dict(self._retired_traffic)
        for program in self.programs():
            moved = _times(program)
            name = program.table.collective
            totals[name] = totals[name] + moved if name in totals else moved
        return totals

    def bytes_sent_to(self) -> Counter[int]:
        """Return the bytes sent so far, by world rank of the receiver."""
        totals = Counter(self._retired_bytes_to)
        for program in self.programs():
            for link in program.links:
                if link.is_send:
                    totals[link.peer] += link.nbytes * program.runs
        return totals

    def close(self) -> None:
        """Free all programs; no run may be in progress."""
        for program in self.programs():
            self._retire(program)
        self._all_reduces.clear()
        self._others.clear()

    def reserve(self, nbytes: int) -> None:
        """Have at least `nbytes` of scratch from now on.

        Who knows all programs to come reserves for the largest: a smaller piece that a later
        program outgrows stays allocated for the earlier ones, and nothing counts it.
        """
        if nbytes > self._scratch.nbytes:
            self._scratch = np.empty(nbytes, dtype=np.uint8)

    # Inside ------------------------------------------------------------------------------

    def programs(self) -> list[Program]:
        """Return the compiled programs that are kept."""
        return [*self._all_reduces.values(), *self._others.values()]

    def _compile(
        self,
        table: StepTable,
        x: np.ndarray,
        out: np.ndarray | None,
        label: str = "",
        background: bool = False,
        reduction: str = "sum",
        stamps: ProgramStamps | None = None,
    ) -> Program:
        recorder = self._recorder
        if reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}. Name one "
                f"of these."
            )
        if reduction == "max" and x.dtype.name not in COMPARED:
            raise ValueError(
                f"dtype of a maximum must be one of {', '.join(COMPARED)}; got {x.dtype}. Convert "
                f"it first."
            )
        if table.collective in ("all_reduce", "reduce_scatter") and x.dtype.name not in SUMMED:
            raise ValueError(
                f"dtype of a sum must be one of {', '.join(SUMMED)}; got {x.dtype}. Convert it "
                f"first: a narrow integer would wrap without notice."
            )
        return compile_program(
            table,
            self.index,
            self.ranks,
            self.transport,
            self.channel,
            x,
            out,
            self._lend_scratch,
            recorder,
            self._clock,
            self.axis,
            label,
            background,
            reduction,
            stamps,
        )

    def _lend_scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        nbytes = count * dtype.itemsize
        self.reserve(nbytes)
        return self._scratch[:nbytes].view(dtype)

    def _cached(
        self, key: tuple, table: StepTable, x: np.ndarray, out: np.ndarray | None
    ) -> Program:
        program = self._others.get(key)
        buffers = (x,) if out is None else (x, out)
        if program is None or any(
            a is not b for a, b in zip(program.buffers, buffers, strict=True)
        ):
            program = self._compile(table, x, out)
            self._others[key] = program
            self._evict(self._others)
        return program

    def _run_cached(
        self, key: tuple, table: StepTable, x: np.ndarray, out: np.ndarray | None
    ) -> None:
        program = self._cached(key, table, x, out)
        if self._queue:
            self.start(program)
            self.wait(program)
        else:
            self._run(program)

    def _run(self, program: Program) -> None:
        """Run `program` to its end, blocking; the queue is empty."""
        try:
            pending = program.advance()
            if pending is not None:
                self._block(program, pending)
        except Exception as error:
            raise self.transport.translate(error, None) from error
        program.runs += 1

    def _block(self, program: Program, pending: Message) -> None:
        """Poll until the run is complete; every `polls_per_pause` polls let others run."""
        advance, polls = program.advance, self._polls
        waited_for, since, polled = None, 0.0, 0
        while pending is not None:
            polled += 1
            if polled == polls:
                waited_for, since = self._pause(pending, waited_for, since)
                polled = 0
            pending = advance()

    def _pause(
        self, pending: Message, waited_for: Message | None, since: float
    ) -> tuple[Message, float]:
        now = time.monotonic()
        if pending is not waited_for:
            since = now
        for other in self.neighbours:
            other.advance()
        self.transport.pause(pending, now - since)
        return pending, since

    def _evict(self, cache: dict) -> None:
        # Whoever prepared a program may still start it; the newest is about to run.
        spare = [key for key, p in cache.items() if not p.kept and p not in self._queue]
        for key in spare[:-CACHED_PROGRAMS]:
            self._retire(cache.pop(key))

    def _retire(self, program: Program) -> None:
        name = program.table.collective
        moved = _times(program)
        before = self._retired_traffic.get(name)
        self._retired_traffic[name] = moved if before is None else before + moved
        for message in program.messages:
            self._complete_send(message)
        for link in program.links:
            self.transport.counts.add(link, program.runs)
            if link.is_send:
                self._retired_bytes_to[link.peer] += link.nbytes * program.runs
        program.free()

    def _complete_send(self, message: Message) -> None:
        """Wait for a small send that its run did not wait for."""
        waited_for, since = None, 0.0
        while message.is_send and not message.test():
            waited_for, since = self._pause(message, waited_for, since)


def ring_all_reduce(
    communicator: Communicator, x: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Sum `x` over the group with the ring, whatever its size (see `Communicator.all_reduce`)."""
    _check_vector(x)
    if out is not None:
        _check_out(out, x.dtype, x.size)
        np.copyto(out, x)
        x = out
    table = all_reduce_table(x.size, communicator.size, x.itemsize, "ring")
    communicator._run_cached(("ring_all_reduce", id(x)), table, x, None)
    return x


def ring_reduce_scatter(communicator: Communicator, x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Sum and keep this rank's chunk (see `Communicator.reduce_scatter`)."""
    return communicator.reduce_scatter(x, out)


def ring_all_gather(communicator: Communicator, x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Collect all chunks everywhere (see `Communicator.all_gather`)."""
    return communicator.all_gather(x, out)


def check_drained(transport: Transport, communicators: list[Communicator]) -> None:
    """Compare, over all ranks, messages sent with messages received, per pair and tag.

    Call it once on every rank after the last step.

    Raises
    ------
    CommError
        A message was sent that nobody received, or the other way round (both ranks are named), or
        a rank started a collective and never finished it.
    """
    sent: Counter = Counter()
    received: Counter = Counter()
    sent.update(transport.counts.sent)
    received.update(transport.counts.received)
    for communicator in communicators:
        for program in communicator.programs():
            for link in program.links:
                side = sent if link.is_send else received
                side[link.peer, link.tag] += program.runs
    mine = [[peer, tag, number] for (peer, tag), number in sorted(sent.items())]
    theirs = [[peer, tag, number] for (peer, tag), number in sorted(received.items())]
    unfinished = [c.axis for c in communicators if not c.idle]
    texts = transport.exchange(json.dumps([mine, theirs, unfinished]))
    everyone = [json.loads(text) for text in texts]
    for rank, (_, _, axes) in enumerate(everyone):
        if axes:
            raise CommError(
                f"every started collective must be finished by the end of the job; got one of axis "
                f"{axes[0]} unfinished on rank {rank}. Look for a start without its wait."
            )
    all_sent = {(r, p, tag): n for r, (rows, _, _) in enumerate(everyone) for p, tag, n in rows}
    arrived = {(p, r, tag): n for r, (_, rows, _) in enumerate(everyone) for p, tag, n in rows}
    for source, dest, tag in sorted(all_sent.keys() | arrived.keys()):
        went = all_sent.get((source, dest, tag), 0)
        came = arrived.get((source, dest, tag), 0)
        if went != came:
            raise CommError(
                f"every message must be received by the end of the job; got {went} sent by rank "
                f"{source} to rank {dest} with tag {tag} and {came} received. Look for a send "
                f"without its receive in the plan."
            )


def _times(program: Program) -> Traffic:
    return Traffic(*(program.runs * number for number in program.traffic))


def _check_vector(x: np.ndarray) -> None:
    if x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(
            f"buffer must have one dim and be C-contiguous; got shape {x.shape} with strides "
            f"{x.strides}. Pass x.reshape(-1) of a contiguous array."
        )


def _check_out(out: np.ndarray, dtype: np.dtype, count: int) -> None:
    if out.dtype != dtype or out.shape != (count,):
        raise ValueError(
            f"buffer must have shape ({count},) and dtype {dtype}; got {out.shape} and {out.dtype}."
        )
