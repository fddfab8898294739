"""Collectives over buffers that come and go: new arrays each time, one program per key."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from mpisim.comm.communicator import Communicator, check_drained
from mpisim.comm.faulty import FaultyTransport
from mpisim.comm.local import run_threads
from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.steps import all_gather_table, reduce_scatter_table
from mpisim.trace.recorder import Recorder

RANKS = (1, 2, 3, 4, 5)
WAYS = {
    "eager": {},
    "rendezvous": {"eager_bytes": 0},
    "synchronous": {"synchronous": True},
}
COUNTS = (1, 3, 10, 257)


def run(body, size, **options):
    """Run on threads, buffers watched; return what every rank returned."""
    job = run_threads(
        lambda transport: body(FaultyTransport(transport, (), strict=True)), size,
        timeout_s=20.0, **options,
    )  # fmt: skip
    for error in job.errors.values():
        raise error
    return job.results


def own(count, size, index):
    bounds = chunk_bounds(count, size)
    return slice(bounds[index], bounds[index + 1])


def addend(count, rank, turn):
    return np.arange(count) + 1000.0 * turn + 7.0 * rank


def total(count, size, turn):
    return sum(addend(count, rank, turn) for rank in range(size))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("background", [False, True])
def test_new_buffers_every_time(tmp_path, size, way, background):
    """Right values, counts that add up, nothing left on the way, nothing kept alive."""
    turns = 4

    def body(transport):
        rank = transport.rank
        recorder = Recorder(tmp_path / f"{rank}.bin", {"rank": rank})
        group = Communicator(transport, axis="dp", recorder=recorder)
        programs: dict[str, list] = {}
        dead = []
        for turn in range(turns):
            for count in COUNTS:
                mine = own(count, size, rank)
                x = addend(count, rank, turn)
                out = np.full(mine.stop - mine.start, np.nan)
                scatter = group.bind_reduce_scatter(f"sum {count}", x, out, background)
                group.start(scatter)
                group.wait(scatter)
                assert out.tolist() == total(count, size, turn)[mine].tolist()
                group.unbind(scatter)
                whole = np.full(count, np.nan)
                gather = group.bind_all_gather(f"get {count}", out, whole, background)
                group.start(gather)
                group.wait(gather)
                assert whole.tolist() == total(count, size, turn).tolist()
                group.unbind(gather)
                for name, program in (("sum", scatter), ("get", gather)):
                    programs.setdefault(f"{name} {count}", []).append(program)
                dead += [weakref.ref(array) for array in (x, out, whole)]
                del x, out, whole
        # What the last message of a rank reads may be on its way to another one.
        transport.barrier()
        gc.collect()
        assert [ref() for ref in dead] == [None] * len(dead)
        assert all(len(set(map(id, same))) == 1 for same in programs.values())
        assert all(same[0].runs == turns for same in programs.values())
        assert len(recorder._programs) == (2 * len(COUNTS) if size > 1 else 0)
        moved = group.traffic()
        for name, tables in (
            ("reduce_scatter", [reduce_scatter_table(n, size, 8) for n in COUNTS]),
            ("all_gather", [all_gather_table(chunk_bounds(n, size), 8) for n in COUNTS]),
        ):
            assert moved[name].sent_bytes == turns * sum(t.sent_bytes(rank, 8) for t in tables)
            assert moved[name].sent_messages == turns * sum(t.sent_messages(rank) for t in tables)
            assert moved[name].received_bytes == turns * sum(
                t.received_bytes(rank, 8) for t in tables
            )
        sent = group.bytes_sent_to()
        assert sum(sent.values()) == sum(entry.sent_bytes for entry in moved.values())
        check_drained(transport, [group])
        group.close()
        recorder.close()
        check_drained(transport, [])
        assert group.traffic() == moved and group.bytes_sent_to() == sent
        return True

    assert run(body, size, **WAYS[way]) == [True] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_same_buffers_are_not_bound_again(size):
    def body(transport):
        group = Communicator(transport)
        x = addend(10, transport.rank, 0)
        mine = own(10, size, transport.rank)
        out = x[mine]  # a view of the same memory, as the engine has it
        first = group.bind_reduce_scatter("sum", x, out)
        advance = first.advance
        assert group.bind_reduce_scatter("sum", x, out) is first
        assert first.advance is advance
        group.start(first)
        group.wait(first)
        assert out.tolist() == total(10, size, 0)[mine].tolist()
        # Other buffers without an unbind before: the old ones are let go.
        other = addend(10, transport.rank, 1)
        assert group.bind_reduce_scatter("sum", other, other[mine]) is first
        assert first.advance is not advance and first.x is other
        group.start(first)
        group.wait(first)
        assert other[mine].tolist() == total(10, size, 1)[mine].tolist()
        assert out.tolist() == total(10, size, 0)[mine].tolist()
        check_drained(transport, [group])
        group.close()

    run(body, size)


def test_a_program_without_buffers_does_not_run():
    def body(transport):
        group = Communicator(transport)
        x = np.ones(6)
        program = group.bind_all_gather("get", x[own(6, 2, transport.rank)].copy(), x)
        group.unbind(program)
        assert program.buffers == () and program.x is None and program.messages == []
        with pytest.raises(AssertionError, match="must be bound to buffers"):
            program.advance()
        group.close()

    run(body, 2)


def test_a_program_that_runs_keeps_its_buffers():
    """Rank 0 has queued its run; the others come later."""
    sent = []

    def body(transport):
        group = Communicator(transport)
        x = addend(300, transport.rank, 0)
        out = np.empty(own(300, 2, transport.rank).stop - own(300, 2, transport.rank).start)
        program = group.bind_reduce_scatter("sum", x, out)
        if transport.rank == 0:
            group.start(program)
            assert not group.idle
            with pytest.raises(AssertionError):
                group.unbind(program)
            assert program.x is x
        transport.barrier()
        if transport.rank == 1:
            group.start(program)
        group.wait(program)
        assert out.tolist() == total(300, 2, 0)[own(300, 2, transport.rank)].tolist()
        group.unbind(program)
        sent.append(group.traffic()["reduce_scatter"].sent_bytes)
        group.close()

    run(body, 2, eager_bytes=0)
    assert sent == [150 * 8] * 2


def test_another_size_under_a_known_key_is_refused():
    """One count and dtype for ever: the counts of the program would be wrong."""

    def body(transport):
        group = Communicator(transport)
        for count in (10, 12):
            x = addend(count, transport.rank, 0)
            mine = own(count, 2, transport.rank)
            if count == 10:
                group.unbind(group.bind_reduce_scatter("sum", x, x[mine]))
            else:
                with pytest.raises(AssertionError):
                    group.bind_reduce_scatter("sum", x, x[mine])
        for out in (np.empty(4), np.empty(5, np.float32)):
            with pytest.raises(ValueError, match="must have shape"):
                group.bind_reduce_scatter("other", np.empty(10), out)
        group.close()

    run(body, 2)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathers_share_a_queue(size):
    """As stage 3 with prefetch: a gather is queued behind a sum, and waited for first."""

    def body(transport):
        rank = transport.rank
        group = Communicator(transport)
        for turn in range(3):
            x, mine = addend(50, rank, turn), own(50, size, rank)
            part = addend(50, 0, turn)[mine]
            whole = np.zeros(50)
            scatter = group.bind_reduce_scatter("sum", x, x[mine], True)
            gather = group.bind_all_gather("get", part, whole, True)
            group.start(scatter)
            group.start(gather)
            group.wait(gather)
            assert group.idle
            group.unbind(gather)
            group.wait(scatter)
            group.unbind(scatter)
            assert whole.tolist() == addend(50, 0, turn).tolist()
            assert x[mine].tolist() == total(50, size, turn)[mine].tolist()
        check_drained(transport, [group])
        group.close()

    run(body, size, synchronous=True)
