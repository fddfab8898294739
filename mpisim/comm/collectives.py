"""Step tables compiled to programs: the rows of a table bound to buffers and messages.

Which array a row sends from, receives into and adds is decided here, with the measured reasons;
how the rows are run is in `programs.py`. Called by `communicator`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpisim.comm.programs import (
    Program,
    Row,
    Runtime,
    do_nothing,
    doubling_steps,
    exchange_steps,
    pipeline_steps,
)
from mpisim.comm.transport import Message, Transport
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
from mpisim.trace.recorder import ProgramStamps, Recorder


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

    def doubling(self, x: np.ndarray) -> list[Row]:
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
                built = Row(row, sent, recv, (*pair, x), combine_last=buffered is None)
            else:
                built = Row(row, sent, self.recv(row, x))
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

    def private(self, x: np.ndarray, out: np.ndarray | None) -> list[Row]:
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
                rows.append(Row(row, self.send(row, sent), self.recv(row, slot), add))
                held = (row.recv_lo, row.recv_hi, slot)
                continue
            built = Row(row, self.send(row, sent), self.recv(row, x[row.recv_lo : row.recv_hi]))
            if held is not None and not copied:
                built.copy = (_as_bits(x[held[0] : held[1]]), _as_bits(held[2]))
                copied, held = True, None
            rows.append(built)
        return rows

    def pipelined(self, x: np.ndarray) -> list[Row]:
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
                built = Row(row, send, self.recv(row, slot), (place, slot, place))
            else:
                # Receives where this rank sent from `reducing` rows ago.
                built = Row(row, send, self.recv(row, place), recv_after=number - reducing)
            built.starts_after = after
            rows.append(built)
        return rows

    def pipelined_scatter(self, x: np.ndarray, out: np.ndarray) -> list[Row]:
        """Segmented ring reduce-scatter that leaves `x` alone (slots: see `scratch_slots`)."""
        segments = self.table.segments
        last_step = self.table.size - 2
        in_place = np.may_share_memory(x, out)
        slots = self.slots(x.dtype, in_place)
        num_slots = len(slots)
        base = self.table.bounds[self.index]
        rows: list[Row] = []
        held: list[np.ndarray] = []
        for number, row in enumerate(self.transfers):
            own = x[row.recv_lo : row.recv_hi]
            last = row.step == last_step
            target = out[row.recv_lo - base : row.recv_hi - base] if last else None
            apart = last and not in_place
            slot = target if apart else slots[number % num_slots][: row.recv_count]
            sent = x[row.send_lo : row.send_hi] if row.step == 0 else held[number - segments]
            add = (own, slot, target if last else slot)
            built = Row(row, self.send(row, sent), self.recv(row, slot), add)
            built.starts_after = number - segments if number >= segments else -1
            # Slot k was filled by row k - num_slots and sent on by the row `segments` later.
            if not apart and number >= num_slots:
                built.recv_after = number - num_slots + segments
            held.append(slot)
            rows.append(built)
        return rows

    def pipelined_gather(self, out: np.ndarray) -> list[Row]:
        """Segmented ring all-gather into `out`."""
        segments = self.table.segments
        return [
            Row(
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
    reduction: str = "sum",
    stamps: ProgramStamps | None = None,
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
    reduction : str
        One of `mpisim.layouts.steps.REDUCTIONS`; changes no message.
    stamps : ProgramStamps, optional
        Those of a program of the same table that is bound again.
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
    if stamps is None and recorder is not None and rows:
        stamps = recorder.add_program(_describe(table, rows, steps, x.dtype, axis, label))
    runtime = Runtime(
        add=_choose_add(x.dtype, reduction),
        copyto=np.copyto,
        clock=clock,
        stamps=stamps.stamps if stamps is not None else [],
        spill=partial(recorder.spill, stamps) if stamps is not None else do_nothing,
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


def _choose_add(dtype: np.dtype, reduction: str) -> Callable[..., Any]:
    """Return what combines two arrays of `dtype` into a third."""
    if reduction == "max":
        return _take_larger
    return _add_halves if dtype.itemsize == 2 else np.add


def _add_halves(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Add float16 or bfloat16 in float32 and round each sum once, to nearest even.

    That is what the adders of NumPy and ml_dtypes do, element by element and without a buffer;
    tiles in float32 take as long (float16: 3.6 ns an element, tiles 4.1; bfloat16: 1.1 and 0.8)
    and would be scratch to account for. What overflows is inf on every rank, and opposite
    infinities are NaN: whoever uses the sums looks for both, so neither is worth a warning.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(left, right, out)


def _take_larger(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Keep the larger of each two; NaN beside anything is NaN."""
    np.maximum(left, right, out=out)


def _build_rows(
    builder: _Builder, x: np.ndarray, out: np.ndarray | None
) -> tuple[list[Row], Callable, tuple | None]:
    table, index = builder.table, builder.index
    before = None
    if table.collective == "all_reduce":
        if table.algorithm == "recursive_doubling":
            rows = builder.doubling(x)
            small = x.nbytes <= BUFFERED_BYTES
            plain = small and all(row.send and row.combine for row in rows)
            return rows, doubling_steps if plain else exchange_steps, None
        if table.segments > 1:
            return builder.pipelined(x), pipeline_steps, None
        return builder.private(x, None), exchange_steps, None
    own = slice(table.bounds[index], table.bounds[index + 1])
    if table.collective == "reduce_scatter":
        if np.may_share_memory(x, out) and not _same_memory(x[own], out):
            raise ValueError(
                "out must not overlap x, except that it may be this rank's chunk of x; got another "
                "overlap. Pass an array of its own."
            )
        if table.size == 1:
            return [], exchange_steps, (_as_bits(out), _as_bits(x))
        if table.segments > 1:
            return builder.pipelined_scatter(x, out), pipeline_steps, None
        return builder.private(x, out), exchange_steps, None
    if out is not None and not _same_memory(out[own], x):
        before = (_as_bits(out[own]), _as_bits(x))
    if table.collective == "gather":
        target = out if out is not None else x
        rows = []
        for row in builder.transfers:
            sent, buffered = builder.buffer(row, x)
            received = builder.recv(row, target[row.recv_lo : row.recv_hi])
            rows.append(Row(row, sent, received, buffered=buffered))
        return rows, exchange_steps, before
    rows = builder.pipelined_gather(out)
    return rows, (pipeline_steps if table.segments > 1 else exchange_steps), before


def _as_bits(array: np.ndarray) -> np.ndarray:
    """View values as integers: a copy of bfloat16 makes an array of one value on the way."""
    return array.view(f"u{array.itemsize}")


def _same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    return (
        a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
        and a.nbytes == b.nbytes
    )


def _describe(
    table: StepTable,
    rows: list[Row],
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
            if not (self.is_send and steps is doubling_steps):  # one stamp per row: its arrival
                last[0] = (SEND if self.is_send else RECV, self.number)
            received[0] = self.nbytes
            return True

    received = [0]
    fakes = []
    for number, row in enumerate(rows):
        fake = Row(**vars(row))
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

    runtime = Runtime(
        add=did_add, copyto=did_copy, clock=lambda: last[0], stamps=stamps,
        spill=do_nothing, status=None, received_bytes=lambda: received[0], rank=-1,
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
