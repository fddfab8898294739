"""Traces: what is written is what is read, killed ranks leave readable files, rows match."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mpisim.comm import programs as programs_module
from mpisim.comm.communicator import Communicator
from mpisim.comm.local import run_threads
from mpisim.errors import CheckpointError
from mpisim.layouts import steps
from mpisim.layouts.steps import all_gather_table, all_reduce_table, reduce_scatter_table
from mpisim.trace.events import RECV, SEND, PlanTable, ProgramTable
from mpisim.trace.recorder import Recorder
from mpisim.trace.store import (
    MAGIC,
    expand_activities,
    expand_messages,
    expand_ops,
    expand_stalls,
    read_rank,
    read_run,
)

PLAN = PlanTable(
    name="p", kinds=("Forward", "WaitSync"), texts=("forward", "wait 0"), waits=("", "dp")
)
PROGRAM = ProgramTable(
    axis="dp", collective="all_reduce", algorithm="ring", label="bucket 0", dtype="float32",
    count=4, tag=26, rows=((0, 0, 1, 8, 1, 8), (1, 0, 1, 8, 1, 8)),
    activities=((RECV, 0), (SEND, 0), (RECV, 1), (SEND, 1)),
    recv_posted=(0, 2), send_posted=(0, 2),
)  # fmt: skip
HEADER = {"rank": 1, "ranks": 2, "memory_categories": ["params", "grads"], "clock_offset_s": 0.0}


@pytest.fixture
def tiny_segments(monkeypatch):
    for name, value in (
        ("PIPELINE_BYTES", 64), ("SEGMENT_BYTES", 16), ("LARGE_SEGMENT_BYTES", 16),
    ):  # fmt: skip
        monkeypatch.setattr(steps, name, value)
    tables = (all_reduce_table, reduce_scatter_table, all_gather_table)
    for table in tables:
        table.cache_clear()
    yield
    for table in tables:
        table.cache_clear()


def write_sample(path):
    """Write a trace with one of every kind of record; returns the stamps by step."""
    recorder = Recorder(path, HEADER)
    program = recorder.add_program(PROGRAM)
    plan = recorder.add_plan(PLAN)
    written = {}
    for step in range(3):
        recorder.step = step
        ops = [10.0 * step + value for value in (0.0, 1.0, 1.5, 4.0)]
        recorder.op_stamps.extend(ops)
        runs = [10.0 * step + 2 + k / 8 for k in range(5 * (1 + step % 2))]
        program.stamps.extend(runs)
        recorder.clock = lambda step=step: 10.0 * step + 1.0
        recorder.add_memory(0, (100, 200 + step))
        recorder.end_step(plan)
        written[step] = (ops, runs)
    recorder.close()
    return written


def test_round_trip(tmp_path):
    path = tmp_path / "rank-0001.bin"
    written = write_sample(path)
    trace = read_rank(path)
    assert trace.header == HEADER and trace.rank == 1
    assert trace.plans == {0: PLAN} and trace.programs == {0: PROGRAM}
    assert not trace.truncated
    assert [step for step, _, _ in trace.ops] == [0, 1, 2]
    for step, plan, stamps in trace.ops:
        assert plan == 0
        assert stamps.tolist() == np.reshape(written[step][0], (2, 2)).tolist()
    for step, ident, stamps in trace.runs:
        assert ident == 0 and stamps.shape == (1 + step % 2, 5)
        assert stamps.ravel().tolist() == written[step][1]
    assert [(s, p, m.tolist()) for s, p, m in trace.memory] == [
        (step, 0, [[0.0, 10.0 * step + 1.0, 100.0, 200.0 + step]]) for step in range(3)
    ]


def test_a_trace_cut_anywhere_reads_up_to_the_record_before(tmp_path):
    """Killed at any moment: every length of the file, from the header's end on."""
    path = tmp_path / "rank-0001.bin"
    write_sample(path)
    whole = path.read_bytes()
    full = read_rank(path)
    lengths = []
    position = len(MAGIC)
    while position < len(whole):
        lengths.append(position)
        position += 16 + int.from_bytes(whole[position + 12 : position + 16], "little")
    lengths.append(position)
    assert position == len(whole)
    assert len(lengths) - 1 == 3 + 3 * 3  # header, program, plan; per step runs, ops, memory
    cut = tmp_path / "cut.bin"
    for length in range(len(MAGIC), len(whole) + 1):
        cut.write_bytes(whole[:length])
        trace = read_rank(cut)
        complete = sum(end <= length for end in lengths[1:])
        assert trace.truncated == (length not in lengths)
        found = (
            bool(trace.header) + len(trace.programs) + len(trace.plans)
            + len(trace.ops) + len(trace.runs) + len(trace.memory)
        )  # fmt: skip
        assert found == complete, length
        for kind in ("ops", "runs", "memory"):
            for mine, theirs in zip(getattr(trace, kind), getattr(full, kind), strict=False):
                assert mine[:2] == theirs[:2] and np.array_equal(mine[2], theirs[2])
        # What is there can be expanded.
        assert len(expand_ops(trace)) == 2 * len(trace.ops)
        assert len(expand_activities(trace)) == 4 * sum(len(runs) for _, _, runs in trace.runs)
        assert len(expand_messages(trace)) == 4 * sum(len(runs) for _, _, runs in trace.runs)


@pytest.mark.parametrize("content", [b"", b"MPISIM", b"PK\3\4 something else", b"\0" * 100])
def test_what_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "rank-0000.bin"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="must start with MPISIMT1"):
        read_rank(path)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="must be readable"):
        read_rank(tmp_path / "rank-0000.bin")
    with pytest.raises(CheckpointError, match="must hold trace"):
        read_run(tmp_path)


@pytest.mark.parametrize("offset", range(8, 400, 7))
def test_a_damaged_trace_is_an_error_of_ours(tmp_path, offset):
    """Flipped bytes: read as far as possible or refused with a sentence, never another error."""
    path = tmp_path / "rank-0001.bin"
    write_sample(path)
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)
    try:
        read_rank(path)
    except CheckpointError as refused:
        assert str(path) in str(refused)


def test_no_file_and_no_growth_without_a_path():
    recorder = Recorder()
    assert not recorder.enabled
    program = recorder.add_program(PROGRAM)
    recorder.op_stamps.extend([1.0, 2.0])
    program.stamps.extend([1.0] * 5)
    recorder.add_memory(0, (1, 2))
    recorder.end_step(recorder.add_plan(PLAN))
    assert recorder.op_stamps == [] and recorder._memory == []
    recorder.spill(program)
    assert program.stamps == []
    recorder.close()


def test_a_disabled_recorder_leaves_collectives_untraced():
    def body(transport):
        group = Communicator(transport, recorder=Recorder())
        group.all_reduce(np.zeros(5))
        return [program.stamps for program in group.programs()]

    assert run_threads(body, 2).results == [[None], [None]]


def test_a_full_disk_is_told_and_leaves_whole_records(tmp_path, monkeypatch):
    """A write that takes only part of a record must not be followed by another record."""
    import os

    from mpisim.trace import store

    path = tmp_path / "rank-0001.bin"
    recorder = Recorder(path, HEADER)
    recorder.op_stamps.extend([0.0, 1.0, 2.0, 3.0])
    plan = recorder.add_plan(PLAN)
    real_write, left = os.write, [25]

    def write(fd, data):
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        taken = real_write(fd, data[: left[0]])
        left[0] -= taken
        return taken

    monkeypatch.setattr(store.os, "write", write)
    with pytest.raises(OSError, match="No space"):
        recorder.end_step(plan)
    monkeypatch.undo()
    trace = read_rank(path)
    assert trace.truncated and trace.plans == {0: PLAN} and trace.ops == []


def test_a_write_that_is_split_by_the_system_is_completed(tmp_path, monkeypatch):
    import os

    from mpisim.trace import store

    real_write = os.write
    monkeypatch.setattr(store.os, "write", lambda fd, data: real_write(fd, data[:7]))
    path = tmp_path / "rank-0001.bin"
    written = write_sample(path)
    trace = read_rank(path)
    assert not trace.truncated
    assert [stamps.ravel().tolist() for _, _, stamps in trace.runs] == [
        written[step][1] for step in range(3)
    ]


# Traces of real collectives ------------------------------------------------------------------


def traced(tmp_path, size, work, turns=2, **options):
    """Run `work(group, rank, turn)` in steps on threads; returns the traces in rank order."""
    folder = tmp_path / "trace"
    folder.mkdir(exist_ok=True)

    def body(transport):
        recorder = Recorder(
            folder / f"rank-{transport.rank:04d}.bin",
            {"rank": transport.rank, "ranks": size, "memory_categories": []},
        )
        group = Communicator(transport, recorder=recorder, **options)
        plan = recorder.add_plan(PLAN)
        for turn in range(turns):
            recorder.step = turn
            recorder.op_stamps.append(recorder.clock())
            work(group, transport.rank, turn)
            recorder.op_stamps.append(recorder.clock())
            recorder.end_step(plan)
        recorder.close()
        return {program.stamps.ident: program for program in group.programs()}

    job = run_threads(body, size, timeout_s=10.0)
    if job.errors:
        raise next(iter(job.errors.values()))
    return read_run(tmp_path), job.results


class Everything:
    """All collectives, on buffers of its own per rank, twice each."""

    def __init__(self, size, counts):
        self.size, self.counts = size, counts
        self.buffers = {}

    def __call__(self, group, rank, turn):
        for count in self.counts:
            if (rank, count) not in self.buffers:
                bounds = steps.chunk_bounds(count, self.size)
                self.buffers[rank, count] = (
                    np.zeros(count), np.zeros(bounds[rank + 1] - bounds[rank]), np.zeros(count),
                    np.zeros(count * self.size),
                )  # fmt: skip
            x, shard, whole, collected = self.buffers[rank, count]
            for _ in range(2):
                group.all_reduce(x)
                group.reduce_scatter(x, shard)
                group.all_gather(shard, whole)
                group.gather(x, collected if rank == 0 else None)


def check_traces(traces, programs, size):
    sides = [expand_messages(trace) for trace in traces]
    for trace, known in zip(traces, programs, strict=True):
        assert not trace.truncated
        activities = expand_activities(trace)
        runs_of = dict.fromkeys(trace.programs, 0)
        for _step, ident, stamps in trace.runs:
            table = trace.programs[ident]
            assert stamps.shape[1] == 1 + len(table.activities)
            assert (np.diff(stamps, axis=1) >= 0).all()
            runs_of[ident] += len(stamps)
        # Every run of every program was recorded.
        assert runs_of == {ident: program.runs for ident, program in known.items()}
        # Activities of a run follow each other without a gap, so they add up to the run.
        for ident, program in known.items():
            mine = activities[activities["program"] == ident]
            if not trace.programs[ident].activities:  # small sends alone: nothing is waited for
                assert not len(mine)
                continue
            assert mine["run"].max(initial=-1) == program.runs - 1
            for run in range(program.runs):
                spans = mine[mine["run"] == run]
                assert (spans["start_s"][1:] == spans["end_s"][:-1]).all()
                total = (spans["end_s"] - spans["start_s"]).sum()
                assert total == pytest.approx(spans["end_s"][-1] - spans["start_s"][0], abs=1e-9)
    # Send number n of a pair and tag is receive number n on the other side, with the same bytes.
    for rank, messages in enumerate(sides):
        for message in messages[messages["is_send"]]:
            there = sides[message["peer"]]
            found = there[
                ~there["is_send"]
                & (there["peer"] == rank)
                & (there["tag"] == message["tag"])
                & (there["sequence"] == message["sequence"])
            ]
            assert len(found) == 1
            assert found["nbytes"][0] == message["nbytes"]
            assert found["ring_step"][0] == message["ring_step"]
            # One clock: nothing arrives before it was sent.
            assert found["completed_s"][0] >= message["posted_s"]
            assert message["completed_s"] >= message["posted_s"]
        assert (messages["completed_s"] >= messages["posted_s"]).all()
        sequences = {}
        for peer, tag, is_send, sequence in messages[
            ["peer", "tag", "is_send", "sequence"]
        ].tolist():
            sequences.setdefault((peer, tag, is_send), []).append(sequence)
        assert all(numbers == list(range(len(numbers))) for numbers in sequences.values())
    sent = sum(int(side["is_send"].sum()) for side in sides)
    assert sent == sum(int((~side["is_send"]).sum()) for side in sides)
    assert sent == sum(
        program.runs * program.traffic[0] for known in programs for program in known.values()
    )
    nbytes = sum(int(side["nbytes"][side["is_send"]].sum()) for side in sides)
    assert nbytes == sum(
        program.runs * program.traffic[1] for known in programs for program in known.values()
    )


@pytest.mark.parametrize("algorithm", steps.ALGORITHMS)
@pytest.mark.parametrize("size", (2, 3, 4))
def test_messages_match_across_ranks(tmp_path, size, algorithm):
    traces, programs = traced(
        tmp_path, size, Everything(size, (0, 3, 50, 3000)), algorithm=algorithm
    )
    check_traces(traces, programs, size)


@pytest.mark.parametrize("size", (2, 3, 4))
def test_messages_of_pipelined_rings_match_across_ranks(tmp_path, size, tiny_segments):
    traces, programs = traced(tmp_path, size, Everything(size, (31, 100)), algorithm="ring")
    assert any(program.table.segments > 2 for program in programs[0].values())
    check_traces(traces, programs, size)


def test_overlapped_programs_match_too(tmp_path):
    """Several queued at once, advanced a little, finished in one wait."""
    buffers = {}

    def work(group, rank, turn):
        mine = buffers.setdefault(rank, [np.zeros(n) for n in (40, 3, 700)])
        programs = [group.prepare_all_reduce(x, f"bucket {k}") for k, x in enumerate(mine)]
        for program in programs:
            group.start(program)
            group.advance()
        group.wait(programs[-1])

    traces, programs = traced(tmp_path, 3, work, turns=3)
    check_traces(traces, programs, 3)
    assert {table.label for table in traces[0].programs.values()} == {
        "bucket 0", "bucket 1", "bucket 2",
    }  # fmt: skip


def test_clock_offset_shifts_every_time(tmp_path):
    path = tmp_path / "rank-0001.bin"
    write_sample(path)
    trace = read_rank(path)
    shifted = read_rank(path)
    shifted.header = {**trace.header, "clock_offset_s": 5.0}
    for expand, fields in (
        (expand_ops, ("start_s", "end_s")),
        (expand_activities, ("start_s", "end_s")),
        (expand_messages, ("posted_s", "completed_s")),
    ):
        for field in fields:
            assert np.allclose(expand(shifted)[field], expand(trace)[field] + 5.0)


def test_stalls_are_the_waits_inside_blocking_ops(tmp_path):
    """Waits beside compute cost nothing; a wait that lasts into a blocking op counts from there."""
    path = tmp_path / "rank-0001.bin"
    recorder = Recorder(path, HEADER)
    program, plan = recorder.add_program(PROGRAM), recorder.add_plan(PLAN)
    recorder.step = 3
    recorder.op_stamps.extend([0.0, 1.0, 1.5, 4.0])  # forward, then the blocking wait
    program.stamps.extend([0.5, 1.25, 2.0, 3.0, 5.0])  # start; recv 0, send 0, recv 1, send 1
    recorder.end_step(plan)
    recorder.close()
    stalls = expand_stalls(read_rank(path))
    found = stalls[["step", "op_index", "activity", "peer", "start_s", "end_s"]].tolist()
    assert found == [
        (3, 1, SEND, 1, 1.5, 2.0),
        (3, 1, RECV, 1, 2.0, 3.0),
        (3, 1, SEND, 1, 3.0, 4.0),
    ]


def test_memory_is_bounded_by_spilling(tmp_path, monkeypatch):
    """Thousands of runs within one step: the lists stay short and nothing is lost."""
    monkeypatch.setattr(programs_module, "SPILL_STAMPS", 60)
    longest = [0, 0]
    buffers = [np.zeros(7), np.zeros(7)]

    def work(group, rank, turn):
        for _ in range(300):
            group.all_reduce(buffers[rank])
            for program in group.programs():
                longest[rank] = max(longest[rank], len(program.stamps.stamps))

    traces, programs = traced(tmp_path, 2, work, turns=1)
    per_run = 1 + len(traces[0].programs[0].activities)
    assert 60 <= max(longest) <= 60 + per_run
    assert len(traces[0].runs) > 5
    check_traces(traces, programs, 2)


# Do the stamps mean what the table says? ------------------------------------------------------


class Logged:
    """A message that writes down when it is started and when it is seen complete."""

    def __init__(self, inner, log):
        self.inner, self.log = inner, log
        self.is_send, self.peer, self.tag = inner.is_send, inner.peer, inner.tag
        self.nbytes = inner.nbytes

    def start(self):
        self.log.append(("start", self))
        self.inner.start()

    def test(self, status=None):
        done = self.inner.test(status)
        if done:
            self.log.append(("done", self))
        return done

    def free(self):
        self.inner.free()


class LoggedTransport:
    def __init__(self, inner, log):
        self.inner, self.log = inner, log

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def prepare_send(self, *args, **options):
        return Logged(self.inner.prepare_send(*args, **options), self.log)

    def prepare_recv(self, *args, **options):
        return Logged(self.inner.prepare_recv(*args, **options), self.log)

    def pause(self, pending, waited_s):
        self.inner.pause(pending.inner, waited_s)


def check_meaning(tmp_path, size, collective, count, algorithm):
    """Replay each rank's log beside its program table."""

    def body(transport):
        log = []
        recorder = Recorder(
            tmp_path / f"{transport.rank}.bin",
            {"rank": transport.rank, "ranks": size, "memory_categories": []},
        )
        recorder.clock = lambda: log.append(("stamp", None)) or 0.0
        group = Communicator(
            LoggedTransport(transport, log), recorder=recorder, algorithm=algorithm
        )
        bounds = steps.chunk_bounds(count, size)
        x, shard = np.zeros(count), np.zeros(bounds[transport.rank + 1] - bounds[transport.rank])
        whole = np.zeros(count * size if collective == "gather" else count)
        run = {
            "all_reduce": lambda: group.all_reduce(x),
            "reduce_scatter": lambda: group.reduce_scatter(x, shard),
            "all_gather": lambda: group.all_gather(shard, whole),
            "gather": lambda: group.gather(x, whole if transport.rank == 0 else None),
        }[collective]
        run()
        log.clear()
        run()
        (program,) = group.programs()
        recorder.close()
        return log, program

    job = run_threads(body, size, timeout_s=10.0)
    assert not job.errors, job.errors
    for rank, (log, program) in enumerate(job.results):
        table = read_rank(tmp_path / f"{rank}.bin").programs[0]
        rows_of = {}
        for is_send, column in ((True, 2), (False, 4)):
            used = [number for number, row in enumerate(table.rows) if row[column] >= 0]
            mine = [message for message in program.messages if message.is_send == is_send]
            rows_of |= dict(zip(mine, used, strict=True))
        stamp, done_since, started = -1, set(), set()
        for event, message in log:
            if event == "stamp":
                stamp += 1
                if stamp:
                    code, row = table.activities[stamp - 1]
                    if code in (RECV, SEND):
                        assert (code, row) in done_since, (rank, stamp, code, row)
                done_since = set()
            elif event == "start":
                posted = table.send_posted if message.is_send else table.recv_posted
                assert posted[rows_of[message]] == stamp, (rank, rows_of[message])
                started.add(message)
            else:
                done_since.add((SEND if message.is_send else RECV, rows_of[message]))
        assert stamp == len(table.activities)
        assert started == set(program.messages)
        # Every receive has a stamp of its own.
        receives = [row for row, transfer in enumerate(table.rows) if transfer[4] >= 0]
        assert sorted(row for code, row in table.activities if code == RECV) == receives


@pytest.mark.parametrize("algorithm", steps.ALGORITHMS)
@pytest.mark.parametrize("size", (2, 3, 4, 5))
@pytest.mark.parametrize("count", (3, 2000))
def test_stamps_mean_what_the_table_says(tmp_path, size, count, algorithm):
    check_meaning(tmp_path, size, "all_reduce", count, algorithm)


@pytest.mark.parametrize("collective", ("reduce_scatter", "all_gather", "gather"))
@pytest.mark.parametrize("size", (2, 3, 4))
def test_stamps_of_the_other_collectives(tmp_path, size, collective):
    check_meaning(tmp_path, size, collective, 20, "ring")


@pytest.mark.parametrize("collective", ("all_reduce", "reduce_scatter", "all_gather"))
@pytest.mark.parametrize("size", (2, 3, 4))
def test_stamps_of_pipelined_rings(tmp_path, size, collective, tiny_segments):
    check_meaning(tmp_path, size, collective, 61, "ring")


def test_program_tables_survive_json(tmp_path):
    text = json.dumps(PROGRAM.to_json())
    assert ProgramTable.from_json(json.loads(text)) == PROGRAM
    assert PlanTable.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


def test_a_step_that_failed_leaves_no_stamps_and_no_memory_behind(tmp_path):
    recorder = Recorder(tmp_path / "rank-0000.bin", {"rank": 0, "memory_categories": ["data"]})
    recorder.add_plan(PLAN)
    recorder.op_stamps.extend([1.0, 2.0])
    recorder.add_memory(0, (7,))
    recorder.drop_step()
    recorder.step = 1
    recorder.op_stamps.extend([3.0, 4.0])
    recorder.add_memory(0, (9,))
    recorder.end_step(0)
    recorder.close()
    trace = read_rank(tmp_path / "rank-0000.bin")
    ((step, _, stamps),) = trace.ops
    assert (step, stamps.tolist()) == (1, [[3.0, 4.0]])
    ((_, _, memory),) = trace.memory
    assert memory[:, 2].tolist() == [9.0]
