"""Step tables compiled to programs: resumable sequences of sends, receives and sums.

A program is a generator that never ends. Each ``next()`` advances it as far as arrived messages
allow and returns the message it now waits for, or None when a run is complete; the next call
starts the next run. A blocked caller and an engine that advances a program between backward ops
run the same code, so overlap cannot change a bit.

Two shapes of program exist. `_exchange_steps` does one exchange at a time (tables without
segments; `_doubling_steps` is its short form for small messages); `_pipeline_steps` keeps several
segments in flight, so that adding one overlaps receiving the next. Measured reasons stand where
the choices are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpisim.comm.transport import Message, Transport, length_error
from mpisim.layouts.steps import (
    BUFFERED_BYTES,
    NO_PEER,
    PIPELINE_DEPTH,
    STREAM_BYTES,
    StepTable,
    Transfer,
    buffered_count,
    scratch_slots,
)
from mpisim.trace.events import COMBINE, COPY, RECV, SEND, ProgramTable
from mpisim.trace.recorder import SPILL_STAMPS, ProgramStamps, Recorder

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass
class _Row:
    """One transfer with its buffers and messages."""

    transfer: Transfer
    send: Message | None
    recv: Message | None
    combine: Arrays | None = None
    """(left, right, out): out = left + right once the receive is complete."""
    combine_last: bool = False
    """`combine` writes what is being sent, so the send must complete first."""
    copy: tuple[np.ndarray, np.ndarray] | None = None
    """(to, from), done while this row's messages are in flight."""
    buffered: tuple[memoryview, memoryview] | None = None
    """(to, from): the send leaves from a copy made just before, once the last one is complete."""
    starts_after: int = -1
    """Row that must be combined before this row's send starts (pipelined)."""
    recv_after: int = -1
    """Row whose send must be complete before this row's receive is posted (pipelined)."""


class _Runtime(NamedTuple):
    """What a program's generator calls; the dry run that lists its stamps replaces all of it."""

    add: Callable[..., Any]
    copyto: Callable[..., Any]
    clock: Callable[[], Any]
    stamps: list
    spill: Callable[[], None]
    """Writes the stamps out and empties the list."""
    status: Any
    received_bytes: Callable[[], int]
    rank: int
    translate: Callable[[Exception, Message | None], Exception]
    """Names an error of the library, given the receive that raised it."""


def _nothing() -> None:
    """Start a side that does not exist."""


def _at_once(status: Any = None) -> bool:
    """Complete a side that does not exist."""
    return True


def _exchange_steps(
    rows: list[_Row], runtime: _Runtime, traced: bool, before: tuple | None
) -> Iterator[Message | None]:
    """Run the rows one after the other.

    Everything is bound to local names first: at 1 KiB a whole all-reduce takes about a
    microsecond, and one attribute look-up per message would be felt.
    """
    add, copyto = runtime.add, runtime.copyto
    clock, stamps, status = runtime.clock, runtime.stamps, runtime.status
    append = stamps.append
    received_bytes, rank, spill = runtime.received_bytes, runtime.rank, runtime.spill
    translate = runtime.translate
    code = []
    for row in rows:
        recv, send = row.recv, row.send
        code.append(
            (
                recv.start if recv else _nothing,
                send.start if send else _nothing,
                recv.test if recv else _at_once,
                send.test if send else _at_once,
                recv.nbytes if recv else -1,
                recv,
                send,
                row.buffered,
                row.copy,
                row.combine,
                row.combine_last,
            )
        )
    while True:
        if traced:
            if len(stamps) > SPILL_STAMPS:
                spill()
            append(clock())
        if before is not None:
            copyto(*before)
        for (
            start_recv, start_send, recv_done, send_done, nbytes, recv, send,
            buffered, copy, combine, last,
        ) in code:  # fmt: skip
            start_recv()
            if buffered is not None:
                while not send_done():
                    yield send
                buffered[0][:] = buffered[1]
            start_send()
            if copy is not None:
                copyto(*copy)
                if traced:
                    append(clock())
            if nbytes >= 0:
                try:
                    while not recv_done(status):
                        yield recv
                except Exception as error:
                    raise translate(error, recv) from error
                if received_bytes() != nbytes:
                    raise length_error(recv, rank, received_bytes())
                if traced:
                    append(clock())
                if combine is not None and not last:
                    add(*combine)
                    if traced:
                        append(clock())
            if send is not None and buffered is None:
                while not send_done():
                    yield send
                if traced:
                    append(clock())
            if last:
                add(*combine)
                if traced:
                    append(clock())
        yield None


def _doubling_steps(
    rows: list[_Row], runtime: _Runtime, traced: bool, before: tuple | None
) -> Iterator[Message | None]:
    """Run `_exchange_steps` for rows that all send, receive and add: the small messages.

    The same order of calls with nothing left to decide: at 1 KiB worth a tenth of the time. So is
    every stamp: there is one per row, at its arrival; the sum of a row, less than a microsecond,
    counts with what follows.
    """
    add = runtime.add
    clock, stamps, status = runtime.clock, runtime.stamps, runtime.status
    append = stamps.append
    received_bytes, rank, spill = runtime.received_bytes, runtime.rank, runtime.spill
    translate = runtime.translate
    code = [
        (
            row.recv.start, row.send.start, row.recv.test, row.send.test, row.recv.nbytes,
            row.recv, row.send, *(row.buffered or (None, None)), *row.combine,
        )
        for row in rows
    ]  # fmt: skip
    while True:
        if traced:
            if len(stamps) > SPILL_STAMPS:
                spill()
            append(clock())
        for (
            start_recv, start_send, recv_done, send_done, nbytes, recv, send, copy, x,
            left, right, out,
        ) in code:  # fmt: skip
            start_recv()
            if copy is not None:
                while not send_done():
                    yield send
                copy[:] = x
            start_send()
            try:
                # A few polls here are cheaper than the way out to the caller and back.
                polls = 0
                while not recv_done(status):
                    polls += 1
                    if polls & 15 == 0:
                        yield recv
            except Exception as error:
                raise translate(error, recv) from error
            if received_bytes() != nbytes:
                raise length_error(recv, rank, received_bytes())
            if copy is None:
                while not send_done():
                    yield send
            if traced:
                append(clock())
            add(left, right, out)
        yield None


def _pipeline_steps(
    rows: list[_Row], runtime: _Runtime, traced: bool, before: tuple | None
) -> Iterator[Message | None]:
    """Run the rows with `PIPELINE_DEPTH` receives posted ahead; forward a segment once added."""
    add, copyto = runtime.add, runtime.copyto
    clock, stamps, status = runtime.clock, runtime.stamps, runtime.status
    append = stamps.append
    received_bytes, rank, spill = runtime.received_bytes, runtime.rank, runtime.spill
    translate = runtime.translate
    num_rows = len(rows)
    first_sends = [row.send.start for row in rows if row.starts_after < 0]
    forwards: list[Callable[[], None] | None] = [None] * num_rows
    for row in rows:
        if row.starts_after >= 0:
            forwards[row.starts_after] = row.send.start
    code = [(row.recv.test, row.recv.nbytes, row.recv, row.combine) for row in rows]
    starts = [
        (
            row.recv.start,
            rows[row.recv_after].send if row.recv_after >= 0 else None,
            rows[row.recv_after].send.test if row.recv_after >= 0 else _at_once,
        )
        for row in rows
    ]
    waited_early = {row.recv_after for row in rows}
    tail = [row.send for number, row in enumerate(rows) if number not in waited_early]
    while True:
        if traced:
            if len(stamps) > SPILL_STAMPS:
                spill()
            append(clock())
        if before is not None:
            copyto(*before)
        posted = 0
        # Rows that wait for no send can be posted at once; the others follow row by row.
        while posted < min(PIPELINE_DEPTH, num_rows) and starts[posted][1] is None:
            starts[posted][0]()
            posted += 1
        for start in first_sends:
            start()
        for number, (recv_done, nbytes, recv, combine) in enumerate(code):
            try:
                while not recv_done(status):
                    yield recv
            except Exception as error:
                raise translate(error, recv) from error
            if received_bytes() != nbytes:
                raise length_error(recv, rank, received_bytes())
            if traced:
                append(clock())
            if combine is not None:
                add(*combine)
                if traced:
                    append(clock())
            forward = forwards[number]
            if forward is not None:
                forward()
            while posted < num_rows and posted <= number + PIPELINE_DEPTH:
                start, send, send_done = starts[posted]
                if send is not None:
                    while not send_done():
                        yield send
                    if traced:
                        append(clock())
                start()
                posted += 1
        for send in tail:
            while not send.test():
                yield send
            if traced:
                append(clock())
        yield None


class Program:
    """A compiled collective over fixed buffers (see the module docstring)."""

    __slots__ = (
        "advance", "buffers", "copies_bytes", "kept", "messages", "runs", "stamps", "table",
        "traffic", "x",
    )  # fmt: skip

    def __init__(
        self,
        table: StepTable,
        buffers: tuple[np.ndarray, ...],
        messages: list[Message],
        advance: Callable[[], Message | None],
        stamps: ProgramStamps | None,
    ) -> None:
        self.table = table
        self.buffers = buffers
        self.x = buffers[0]
        self.messages = messages
        self.advance = advance
        self.stamps = stamps
        self.copies_bytes = 0
        """Bytes of the private copies that small sends leave from."""
        self.runs = 0
        self.kept = False
        """Never freed before its communicator is closed, because somebody holds it."""
        sends = [message for message in messages if message.is_send]
        receives = [message for message in messages if not message.is_send]
        # Read off the bound messages, not off the table: the report compares the two.
        self.traffic = (
            len(sends),
            sum(message.nbytes for message in sends),
            len(receives),
            sum(message.nbytes for message in receives),
        )

    def free(self) -> None:
        """Free the messages; no run may be in progress."""
        for message in self.messages:
            message.free()


class _Builder:
    """Binds one rank's rows of a table to buffers."""

    def __init__(
        self,
        table: StepTable,
        index: int,
        group: tuple[int, ...],
        make_send: Callable[[np.ndarray, int], Message],
        make_recv: Callable[[np.ndarray, int], Message],
        scratch: Callable[[int, np.dtype], np.ndarray],
    ) -> None:
        self.table, self.index, self.group = table, index, group
        self.transfers = table.transfers(index)
        self.make_send, self.make_recv, self.scratch = make_send, make_recv, scratch
        self.copies_bytes = 0

    def send(self, row: Transfer, view: np.ndarray) -> Message | None:
        if row.send_to == NO_PEER:
            return None
        return self.make_send(view, self.group[row.send_to])

    def recv(self, row: Transfer, view: np.ndarray) -> Message | None:
        if row.recv_from == NO_PEER:
            return None
        return self.make_recv(view, self.group[row.recv_from])

    def slots(self, dtype: np.dtype, in_place: bool = False) -> list[np.ndarray]:
        """Cut the scratch of this program into its equal slots."""
        number, longest = scratch_slots(self.table, self.index, in_place)
        area = self.scratch(longest * number, dtype)
        return [area[k * longest : (k + 1) * longest] for k in range(number)]

    def doubling(self, x: np.ndarray) -> list[_Row]:
        """Recursive doubling, in place.

        The whole buffer is sent, so a sum has to wait for the send, unless that leaves from a
        copy: with more ranks than cores that wait costs a time slice, a thousand times the copy.
        """
        slots = self.slots(x.dtype)
        slot = slots[0] if slots else x[:0]
        rows = []
        for row in self.transfers:
            sent, buffered = self.buffer(row, x)
            if row.combine:
                # The lower index stands left on both sides, so even NaN payloads agree.
                pair = (slot, x) if row.recv_from < self.index else (x, slot)
                recv = self.recv(row, slot)
                built = _Row(row, sent, recv, (*pair, x), combine_last=buffered is None)
            else:
                built = _Row(row, sent, self.recv(row, x))
            built.buffered = buffered
            rows.append(built)
        return rows

    def buffer(
        self, row: Transfer, view: np.ndarray
    ) -> tuple[Message | None, tuple[memoryview, memoryview] | None]:
        """Bind the send of `view`, from a copy of its own if it is small."""
        if row.send_to == NO_PEER:
            return None, None
        if not buffered_count(self.table, self.index, view.itemsize):
            return self.send(row, view), None
        copy = np.empty_like(view)
        self.copies_bytes += copy.nbytes
        views = memoryview(copy.view(np.uint8)), memoryview(view.view(np.uint8))
        return self.send(row, copy), views

    def private(self, x: np.ndarray, out: np.ndarray | None) -> list[_Row]:
        """Exchange rows whose partial sums live in private scratch.

        After a send the sender's cache lines are shared with the receiver, and adding into them
        costs an ownership request per line: at 1 MiB on two ranks 159 us instead of 18. So what
        arrives is summed in scratch, sent on from there, and copied to `x` once, while the first
        gather exchange is in flight. With `out` (reduce-scatter) `x` is left as it was and the
        last sum goes to `out`.
        """
        combines = [row for row in self.transfers if row.combine]
        in_place = out is not None and np.may_share_memory(x, out)
        slots = self.slots(x.dtype, in_place)
        held: tuple[int, int, np.ndarray] | None = None
        copied = False
        rows = []

        def current(lo: int, hi: int) -> np.ndarray:
            if held is not None and held[0] <= lo and hi <= held[1]:
                return held[2][lo - held[0] : hi - held[0]]
            return x[lo:hi]

        for number, row in enumerate(self.transfers):
            sent = current(row.send_lo, row.send_hi)
            if row.combine:
                last = out is not None and number == len(combines) - 1
                # In place, `out` holds this rank's addend until the very last sum.
                apart = last and not in_place
                slot = out if apart else slots[number % len(slots)][: row.recv_count]
                own = current(row.recv_lo, row.recv_hi)
                add = (own, slot, out if last else slot)
                rows.append(_Row(row, self.send(row, sent), self.recv(row, slot), add))
                held = (row.recv_lo, row.recv_hi, slot)
                continue
            built = _Row(row, self.send(row, sent), self.recv(row, x[row.recv_lo : row.recv_hi]))
            if held is not None and not copied:
                built.copy = (x[held[0] : held[1]], held[2])
                copied, held = True, None
            rows.append(built)
        return rows

    def pipelined(self, x: np.ndarray) -> list[_Row]:
        """Segmented ring all-reduce, in place: segments are added into `x`.

        Above 2 MiB `x` no longer sits in a private cache, so adding in place costs nothing extra
        and saves the copy; scratch is `PIPELINE_DEPTH` segments, whatever the buffer.
        """
        slots = self.slots(x.dtype)
        segments = self.table.segments
        reducing = sum(row.combine for row in self.transfers)
        rows = []
        for number, row in enumerate(self.transfers):
            place = x[row.recv_lo : row.recv_hi]
            send = self.send(row, x[row.send_lo : row.send_hi])
            after = number - segments if number >= segments else -1
            if row.combine:
                slot = slots[number % PIPELINE_DEPTH][: row.recv_count]
                built = _Row(row, send, self.recv(row, slot), (place, slot, place))
            else:
                # Receives where this rank sent from `reducing` rows ago.
                built = _Row(row, send, self.recv(row, place), recv_after=number - reducing)
            built.starts_after = after
            rows.append(built)
        return rows

    def pipelined_scatter(self, x: np.ndarray, out: np.ndarray) -> list[_Row]:
        """Segmented ring reduce-scatter that leaves `x` alone (slots: see `scratch_slots`)."""
        segments = self.table.segments
        last_step = self.table.size - 2
        in_place = np.may_share_memory(x, out)
        slots = self.slots(x.dtype, in_place)
        num_slots = len(slots)
        base = self.table.bounds[self.index]
        rows: list[_Row] = []
        held: list[np.ndarray] = []
        for number, row in enumerate(self.transfers):
            own = x[row.recv_lo : row.recv_hi]
            last = row.step == last_step
            target = out[row.recv_lo - base : row.recv_hi - base] if last else None
            apart = last and not in_place
            slot = target if apart else slots[number % num_slots][: row.recv_count]
            sent = x[row.send_lo : row.send_hi] if row.step == 0 else held[number - segments]
            add = (own, slot, target if last else slot)
            built = _Row(row, self.send(row, sent), self.recv(row, slot), add)
            built.starts_after = number - segments if number >= segments else -1
            # Slot k was filled by row k - num_slots and sent on by the row `segments` later.
            if not apart and number >= num_slots:
                built.recv_after = number - num_slots + segments
            held.append(slot)
            rows.append(built)
        return rows

    def pipelined_gather(self, out: np.ndarray) -> list[_Row]:
        """Segmented ring all-gather into `out`."""
        segments = self.table.segments
        return [
            _Row(
                row,
                self.send(row, out[row.send_lo : row.send_hi]),
                self.recv(row, out[row.recv_lo : row.recv_hi]),
                starts_after=number - segments if number >= segments else -1,
            )
            for number, row in enumerate(self.transfers)
        ]


def compile_program(
    table: StepTable,
    index: int,
    group: tuple[int, ...],
    transport: Transport,
    channel: int,
    x: np.ndarray,
    out: np.ndarray | None,
    scratch: Callable[[int, np.dtype], np.ndarray],
    recorder: Recorder | None,
    clock: Callable[[], float],
    axis: str,
    label: str = "",
    background: bool = False,
) -> Program:
    """Bind one rank's rows of `table` to buffers and messages.

    Parameters
    ----------
    table : StepTable
    index : int
        This rank's index in the group.
    group : tuple of int
        World rank per group index.
    transport : Transport
    channel : int
        Message channel of the group.
    x : ndarray of shape (n,)
        The buffer; all_reduce works on it in place.
    out : ndarray or None
        Receives the result of reduce_scatter, all_gather and gather.
    scratch : callable
        ``scratch(count, dtype)`` lends an array that programs of the same queue may share,
        because they run one after the other.
    recorder : Recorder or None
        Where stamps go; None: no trace.
    clock : callable
        Seconds.
    axis, label : str
        Named in the trace.
    background : bool
        The program will be advanced beside compute; the same on every rank.
    """
    made: list[Message] = []
    one_copy = background or (table.segments > 1 and table.count * x.itemsize > STREAM_BYTES)

    def make_send(view: np.ndarray, peer: int) -> Message:
        made.append(transport.prepare_send(view, peer, channel, one_copy))
        return made[-1]

    def make_recv(view: np.ndarray, peer: int) -> Message:
        made.append(transport.prepare_recv(view, peer, channel, one_copy))
        return made[-1]

    builder = _Builder(table, index, group, make_send, make_recv, scratch)
    rows, steps, before = _build_rows(builder, x, out)
    stamps = None
    if recorder is not None and rows:
        stamps = recorder.add_program(_describe(table, rows, steps, x.dtype, axis, label))
    runtime = _Runtime(
        add=np.add,
        copyto=np.copyto,
        clock=clock,
        stamps=stamps.stamps if stamps is not None else [],
        spill=partial(recorder.spill, stamps) if stamps is not None else _nothing,
        status=transport.status,
        received_bytes=transport.received_bytes,
        rank=transport.rank,
        translate=transport.translate,
    )
    generator = steps(rows, runtime, stamps is not None, before)
    buffers = (x,) if out is None else (x, out)
    program = Program(table, buffers, made, generator.__next__, stamps)
    program.copies_bytes = builder.copies_bytes
    return program


def _build_rows(
    builder: _Builder, x: np.ndarray, out: np.ndarray | None
) -> tuple[list[_Row], Callable, tuple | None]:
    table, index = builder.table, builder.index
    before = None
    if table.collective == "all_reduce":
        if table.algorithm == "recursive_doubling":
            rows = builder.doubling(x)
            small = x.nbytes <= BUFFERED_BYTES
            plain = small and all(row.send and row.combine for row in rows)
            return rows, _doubling_steps if plain else _exchange_steps, None
        if table.segments > 1:
            return builder.pipelined(x), _pipeline_steps, None
        return builder.private(x, None), _exchange_steps, None
    own = slice(table.bounds[index], table.bounds[index + 1])
    if table.collective == "reduce_scatter":
        if np.may_share_memory(x, out) and not _same_memory(x[own], out):
            raise ValueError(
                "out must not overlap x, except that it may be this rank's chunk of x; got another "
                "overlap. Pass an array of its own."
            )
        if table.size == 1:
            return [], _exchange_steps, (out, x)
        if table.segments > 1:
            return builder.pipelined_scatter(x, out), _pipeline_steps, None
        return builder.private(x, out), _exchange_steps, None
    if out is not None and not _same_memory(out[own], x):
        before = (out[own], x)
    if table.collective == "gather":
        target = out if out is not None else x
        rows = []
        for row in builder.transfers:
            sent, buffered = builder.buffer(row, x)
            received = builder.recv(row, target[row.recv_lo : row.recv_hi])
            rows.append(_Row(row, sent, received, buffered=buffered))
        return rows, _exchange_steps, before
    rows = builder.pipelined_gather(out)
    return rows, (_pipeline_steps if table.segments > 1 else _exchange_steps), before


def _same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    return (
        a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
        and a.nbytes == b.nbytes
    )


def _describe(
    table: StepTable,
    rows: list[_Row],
    steps: Callable,
    dtype: np.dtype,
    axis: str,
    label: str,
) -> ProgramTable:
    """List what each stamp of a program means, by running its own code over fake messages."""
    last: list[Any] = [None]
    stamps: list[Any] = []
    recv_posted, send_posted = [-1] * len(rows), [-1] * len(rows)

    class Fake:
        def __init__(self, message: Message, number: int) -> None:
            self.is_send, self.nbytes, self.number = message.is_send, message.nbytes, number

        def start(self) -> None:
            posted = send_posted if self.is_send else recv_posted
            posted[self.number] = len(stamps) - 1

        def test(self, status: Any = None) -> bool:
            if not (self.is_send and steps is _doubling_steps):  # one stamp per row: its arrival
                last[0] = (SEND if self.is_send else RECV, self.number)
            received[0] = self.nbytes
            return True

    received = [0]
    fakes = []
    for number, row in enumerate(rows):
        fake = _Row(**vars(row))
        fake.send = Fake(row.send, number) if row.send else None
        fake.recv = Fake(row.recv, number) if row.recv else None
        # The fake sum and copy are called with what stands here: their row number.
        fake.combine = (number, None, None) if row.combine is not None else None
        fake.copy = (number,) if row.copy is not None else None
        fakes.append(fake)

    def did_add(number: int, *_: None) -> None:
        last[0] = (COMBINE, number)

    def did_copy(number: int) -> None:
        last[0] = (COPY, number)

    runtime = _Runtime(
        add=did_add, copyto=did_copy, clock=lambda: last[0], stamps=stamps,
        spill=_nothing, status=None, received_bytes=lambda: received[0], rank=-1,
        translate=lambda error, message: error,
    )  # fmt: skip
    next(steps(fakes, runtime, True, None))
    messages = [message for row in rows for message in (row.send, row.recv) if message]
    return ProgramTable(
        axis=axis,
        collective=table.collective,
        algorithm=table.algorithm,
        label=label,
        dtype=dtype.name,
        count=table.count,
        tag=messages[0].tag,
        rows=tuple(
            (
                row.transfer.step,
                row.transfer.segment,
                row.send.peer if row.send else NO_PEER,
                row.send.nbytes if row.send else 0,
                row.recv.peer if row.recv else NO_PEER,
                row.recv.nbytes if row.recv else 0,
            )
            for row in rows
        ),
        activities=tuple(stamps[1:]),
        recv_posted=tuple(recv_posted),
        send_posted=tuple(send_posted),
    )
