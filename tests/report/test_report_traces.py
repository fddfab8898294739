"""Stalls and overlap of hand-made traces, where every second is known."""

from __future__ import annotations

import numpy as np
import pytest

from mpisim.report.traces import Overlap, overlap, read_traces, stall_totals
from mpisim.trace.events import RECV, SEND, PlanTable, ProgramTable
from mpisim.trace.store import RankTrace, expand_messages, expand_stalls


def program(axis="dp", label="bucket 0", rows=1):
    """Rows that send 8 bytes to rank 1 and receive 8 from it, one after the other."""
    activities = [(kind, row) for row in range(rows) for kind in (RECV, SEND)]
    posted = tuple(2 * row for row in range(rows))
    return ProgramTable(
        axis=axis, collective="all_reduce", algorithm="ring", label=label, dtype="float64",
        count=1, tag=16, rows=tuple((row, 0, 1, 8, 1, 8) for row in range(rows)),
        activities=tuple(activities), recv_posted=posted, send_posted=posted,
    )  # fmt: skip


TRAIN = PlanTable(
    name="train-2x1x1",
    kinds=("Backward", "StartSync", "Backward", "WaitSync", "GatherMetrics"),
    texts=("Backward", "StartSync bucket=0", "Backward", "WaitSync bucket=0", "GatherMetrics"),
    waits=("", "", "", "dp", "control"),
)
EVAL = PlanTable(name="eval-2x1x1", kinds=("ReduceScalars",), texts=("x",), waits=("control",))
OPS = np.array([[0.0, 1.0], [1.0, 1.1], [1.1, 3.0], [3.0, 5.0], [5.0, 6.0]])


def trace(runs, programs, ops=((0, 0, OPS),), **header):
    return RankTrace(
        header={"rank": 0, **header}, plans={0: TRAIN, 1: EVAL}, programs=programs,
        ops=list(ops), runs=[(step, ident, np.array(stamps)) for step, ident, stamps in runs],
    )  # fmt: skip


def test_only_the_part_of_a_wait_inside_a_blocking_op_is_a_stall():
    # Waits for its message from 1.1 to 4, for its send to complete from 4 to 4.5.
    made = trace([(0, 0, [[1.1, 4.0, 4.5]])], {0: program()})
    rows = expand_stalls(made)
    assert [(row["op_index"], row["start_s"], row["end_s"]) for row in rows] == [
        (3, 3.0, 4.0),
        (3, 4.0, 4.5),
    ]
    assert rows["activity"].tolist() == [RECV, SEND]
    assert rows["peer"].tolist() == [1, 1]
    totals = stall_totals(made)
    assert totals["dp", "recv"] == pytest.approx(1.0)
    assert totals["dp", "send"] == pytest.approx(0.5)
    assert totals["control", "recv"] == totals["control", "send"] == 0


def test_a_wait_over_two_blocking_ops_counts_in_both():
    made = trace([(0, 0, [[2.0, 5.5, 5.5]])], {0: program(axis="control", label="loss")})
    rows = expand_stalls(made)
    assert [(row["op_index"], row["start_s"], row["end_s"]) for row in rows] == [
        (3, 3.0, 5.0),
        (4, 5.0, 5.5),
    ]


def test_evaluations_and_the_gather_of_figures_are_no_stall_of_a_step():
    control = program(axis="control", label="")
    ops = [(0, 0, OPS), (0, 1, np.array([[7.0, 9.0]]))]
    made = trace([(0, 0, [[5.2, 5.9, 5.9], [7.0, 8.0, 8.0]])], {0: control}, ops)
    assert len(expand_stalls(made)) == 2
    assert set(stall_totals(made).values()) == {0.0}


def test_a_rank_that_never_waited():
    assert len(expand_stalls(trace([], {}))) == 0
    assert set(stall_totals(trace([], {})).values()) == {0.0}


def test_clock_offset_moves_ops_and_waits_alike():
    made = trace([(0, 0, [[1.1, 4.0, 4.5]])], {0: program()}, clock_offset_s=100.0)
    assert stall_totals(made)["dp", "recv"] == pytest.approx(1.0)
    assert expand_stalls(made)["start_s"].tolist() == [103.0, 104.0]


def test_overlap_counts_ring_steps_of_all_buckets_but_the_last():
    first, last = program(label="bucket 0", rows=4), program(label="bucket 1", rows=4)
    # Receives of bucket 0 arrive at 1.5, 2.5, 2.9 and 3.5; backward ends at 3.
    early = [1.1, 1.5, 1.6, 2.5, 2.6, 2.9, 2.95, 3.5, 3.6]
    made = trace([(0, 0, [early]), (0, 1, [[1.1, *np.linspace(1.2, 1.9, 8)]])], {0: first, 1: last})
    assert overlap([made, made]) == Overlap(ring_steps=8, hidden=6)
    assert overlap([made]).share == 0.75
    assert overlap([made], first_step=1) == Overlap(0, 0)
    assert Overlap(0, 0).share == 0


def test_a_segmented_ring_step_is_over_with_its_last_segment():
    one_step = program(label="bucket 0", rows=2)
    one_step = ProgramTable(**{**vars(one_step), "rows": ((0, 0, 1, 8, 1, 8), (0, 1, 1, 8, 1, 8))})
    other = program(label="bucket 1")
    made = trace([(0, 0, [[1.1, 1.2, 1.3, 3.5, 3.6]])], {0: one_step, 1: other})
    assert len(expand_messages(made)) == 4
    assert overlap([made]) == Overlap(ring_steps=1, hidden=0)


def test_traces_of_a_real_run_and_of_a_damaged_one(finished_run, run_copy):
    traces, left_out = read_traces(finished_run)
    assert ([trace.rank for trace in traces], left_out) == ([0, 1, 2], 0)
    counted = overlap(traces)
    # Two buckets but the last, four ring steps each, on three ranks in nine updates.
    buckets = {p.label for p in traces[0].programs.values() if p.axis == "dp"}
    assert counted.ring_steps == (len(buckets) - 1) * 4 * 3 * 9
    assert 0 <= counted.hidden <= counted.ring_steps
    (run_copy / "trace" / "rank-0001.bin").write_bytes(b"")
    traces, left_out = read_traces(run_copy)
    assert ([trace.rank for trace in traces], left_out) == ([0, 2], 1)
