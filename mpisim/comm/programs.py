"""Programs: resumable sequences of sends, receives and sums.

A program is a generator that never ends. Each ``next()`` advances it as far as arrived messages
allow and returns the message it now waits for, or None when a run is complete; the next call
starts the next run. A blocked caller and an engine that advances a program between backward ops
run the same code, so overlap cannot change a bit.

Two shapes of program exist. `exchange_steps` does one exchange at a time (tables without
segments; `doubling_steps` is its short form for small messages); `pipeline_steps` keeps several
segments in flight, so that adding one overlaps receiving the next. `collectives.py` builds the
rows that they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpisim.comm.transport import Message, length_error
from mpisim.layouts.steps import PIPELINE_DEPTH, StepTable, Transfer
from mpisim.trace.recorder import SPILL_STAMPS, ProgramStamps

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass
class Row:
    """One transfer with its buffers and messages."""

    transfer: Transfer
    send: Message | None
    recv: Message | None
    combine: Arrays | None = None
    """(left, right, out): out = left + right (or their maximum) once the receive is complete."""
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


class Runtime(NamedTuple):
    """What a program's generator calls; the dry run that lists its stamps replaces all of it."""

    add: Callable[..., Any]
    """``add(left, right, out)``, as the reduction and the dtype want it."""
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


def do_nothing() -> None:
    """Start a side that does not exist."""


def _at_once(status: Any = None) -> bool:
    """Complete a side that does not exist."""
    return True


def exchange_steps(
    rows: list[Row], runtime: Runtime, traced: bool, before: tuple | None
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
                recv.start if recv else do_nothing,
                send.start if send else do_nothing,
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


def doubling_steps(
    rows: list[Row], runtime: Runtime, traced: bool, before: tuple | None
) -> Iterator[Message | None]:
    """Run `exchange_steps` for rows that all send, receive and add: the small messages.

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


def pipeline_steps(
    rows: list[Row], runtime: Runtime, traced: bool, before: tuple | None
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


class Link(NamedTuple):
    """What stays of a message when its buffer is gone."""

    is_send: bool
    peer: int
    tag: int
    nbytes: int


def _unbound() -> None:
    raise AssertionError("a program must be bound to buffers before it runs")


class Program:
    """A compiled collective over fixed buffers (see the module docstring).

    Where buffers come and go, `unbind` lets go of them and `bind_as` takes new ones of the same
    sizes: counts, stamps and identity stay.
    """

    __slots__ = (
        "advance", "buffers", "copies_bytes", "kept", "links", "messages", "runs", "stamps",
        "table", "traffic", "x",
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
        self.x: np.ndarray | None = buffers[0]
        self.messages = messages
        self.links = tuple(Link(m.is_send, m.peer, m.tag, m.nbytes) for m in messages)
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

    def unbind(self) -> None:
        """Let go of buffers and messages; no run may be in progress."""
        self.free()
        self.messages, self.buffers, self.x = [], (), None
        self.advance = _unbound

    def bind_as(self, other: Program) -> None:
        """Take the buffers and messages of a program compiled from the same table."""
        assert other.links == self.links, (other.links, self.links)
        self.messages, self.buffers, self.x = other.messages, other.buffers, other.x
        self.advance, self.copies_bytes = other.advance, other.copies_bytes
