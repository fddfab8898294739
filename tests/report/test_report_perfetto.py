"""The exported trace: what viewers need (C144, C146, C148), and every arrow with both ends."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpisim
from mpisim.errors import CheckpointError
from mpisim.report import export_perfetto, perfetto
from mpisim.report.perfetto import assign_lanes, event_lines, match_messages
from mpisim.trace.events import RECV, SEND, PlanTable, ProgramTable
from mpisim.trace.store import RankTrace, expand_messages, read_run


def export(run_dir, out):
    export_perfetto(run_dir, out)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory):
    return export(finished_run, tmp_path_factory.mktemp("out") / "trace.json")


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    """A run whose large bucket goes round in segments, so that messages are in flight together."""
    folder = tmp_path_factory.mktemp("segmented")
    config = {
        "run": {"name": "large", "dir": str(folder)},
        "data": {"kind": "regression", "num_rows": 40, "num_features": 768},
        "model": {"hidden": [1024]},
        "train": {"steps": 2, "global_batch": 6},
        "comm": {"algorithm": "ring"},
    }
    run_dir = mpisim.run(config, ranks=3, transport="local").path
    rows = [p.rows for p in read_run(run_dir)[0].programs.values() if p.axis == "dp"]
    assert max(segment for table in rows for _, segment, *_ in table) > 0
    return export(run_dir, folder / "trace.json")


def slices(data):
    """Return (pid, tid) -> [(start, end, event)] in nanoseconds, in the order of the file."""
    tracks = {}
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            tracks.setdefault((event["pid"], event["tid"]), []).append(
                (start, start + length, event)
            )
    return tracks


def names(data, kind="thread_name"):
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in data["traceEvents"]
        if event["name"] == kind
    }


def test_ids_are_integers_and_every_track_has_a_name(exported):
    """C148: integer pid = rank and tid = lane, named; times in microseconds, sorted."""
    tracks, processes = names(exported), names(exported, "process_name")
    assert {pid for pid, _ in processes} == {0, 1, 2}
    assert all(name.startswith(f"rank {pid}") for (pid, _), name in processes.items())
    for event in exported["traceEvents"]:
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert (event["pid"], event["tid"]) in tracks
    times = [event["ts"] for event in exported["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)
    assert times[0] == 0
    assert len(set(tracks.values())) == len([track for track in tracks if track[0] == 0])


def test_durations_are_those_of_the_trace_in_microseconds(exported, finished_run):
    """C148: ts and dur are microseconds: a step lasts what the trace says."""
    trace = read_run(finished_run)[1]
    stamps = next(s for step, plan, s in trace.ops if step == 3)
    (event,) = [
        event for event in exported["traceEvents"] if (event["pid"], event["name"]) == (1, "step 3")
    ]
    assert event["dur"] == pytest.approx((stamps[-1, 1] - stamps[0, 0]) * 1e6, abs=0.002)


@pytest.mark.parametrize("which", ["exported", "segmented"])
def test_slices_of_a_track_nest_and_never_cross(which, request):
    data = request.getfixturevalue(which)
    for events in slices(data).values():
        open_until = []
        for start, end, _ in events:
            assert start <= end
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_messages_in_flight_together_get_lanes_of_their_own(segmented):
    assert "dp send 2" in names(segmented).values()
    assert "control send 2" not in names(segmented).values()
    tracks = names(segmented)
    for track, events in slices(segmented).items():
        if " send" in tracks[track] or " recv" in tracks[track]:
            for (_, end, _), (start, _, _) in zip(events, events[1:], strict=False):
                assert end <= start


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=40))
def test_lanes_hold_no_overlap_and_are_as_few_as_can_be(pairs):
    start = np.array([a for a, _ in pairs], dtype=float)
    end = np.array([a + b for a, b in pairs], dtype=float)
    lanes = assign_lanes(start, end)
    for i in range(len(pairs)):
        for j in range(i):
            if lanes[i] == lanes[j]:
                assert end[i] <= start[j] or end[j] <= start[i]
    busiest = max((int(((start <= t) & (t < end)).sum()) for t in start), default=0)
    # An interval of no length needs a lane too.
    assert (lanes.max() + 1 if len(lanes) else 0) <= max(busiest, 1) + int((start == end).any())


@pytest.mark.parametrize("which", ["exported", "segmented"])
def test_every_arrow_has_both_ends_inside_its_slices(which, request):
    data = request.getfixturevalue(which)
    arrows = {"s": {}, "f": {}}
    for event in data["traceEvents"]:
        if event["ph"] in arrows:
            assert event["id"] not in arrows[event["ph"]]
            arrows[event["ph"]][event["id"]] = event
    assert arrows["s"].keys() == arrows["f"].keys()
    sends = [
        item for events in slices(data).values() for item in events if "sequence" in item[2]["args"]
    ]
    assert len(sends) == 2 * len(arrows["s"])
    by_track = {}
    for start, end, event in sends:
        by_track.setdefault((event["pid"], event["tid"]), []).append((start, end, event))

    def slice_at(arrow):
        at = round(arrow["ts"] * 1000)
        (found,) = [
            event for start, end, event in by_track[arrow["pid"], arrow["tid"]] if start <= at < end
        ]
        return found

    for number, start in arrows["s"].items():
        end = arrows["f"][number]
        assert end["bp"] == "e"
        sent, received = slice_at(start), slice_at(end)
        assert (sent["args"]["peer"], received["args"]["peer"]) == (end["pid"], start["pid"])
        for key in ("bytes", "tag", "sequence", "ring_step", "segment", "step", "op"):
            assert sent["args"][key] == received["args"][key]
        assert start["ts"] <= end["ts"]


def test_arrows_are_as_many_as_messages(exported, finished_run):
    sent = sum(int(expand_messages(trace)["is_send"].sum()) for trace in read_run(finished_run))
    kinds = Counter(event["ph"] for event in exported["traceEvents"])
    assert kinds["s"] == kinds["f"] == sent > 0


def test_args_say_what_moved_and_which_op_asked_for_it(exported):
    texts = {
        event["args"]["op"]
        for event in exported["traceEvents"]
        if event["ph"] == "X" and "sequence" in event["args"]
    }
    assert {text.split()[0] for text in texts} == {"StartSync", "ReduceScalars", "GatherMetrics"}
    assert {event["args"]["collective"] for event in exported["traceEvents"]
            if "sequence" in event.get("args", {})} == {"all_reduce", "gather"}  # fmt: skip
    compute = [e for e in exported["traceEvents"] if e.get("cat") == "compute"]
    assert {e["args"]["op"].split()[0] for e in compute} == {
        "LoadBatch", "Forward", "Backward", "StartSync", "CheckGradients", "OptimizerStep",
    }  # fmt: skip
    waits = [e for e in exported["traceEvents"] if e.get("cat") == "wait"]
    assert {(e["args"]["op"].split()[0], e["args"]["waits_on"]) for e in waits} == {
        ("WaitSync", "dp"), ("ReduceScalars", "control"), ("GatherMetrics", "control"),
    }  # fmt: skip


def test_counters_show_live_bytes_by_category(exported):
    counters = [event for event in exported["traceEvents"] if event["ph"] == "C"]
    assert counters and {event["pid"] for event in counters} == {0, 1, 2}
    for event in counters:
        assert event["args"]["params"] == 137 * 8
        assert "master_params" not in event["args"]
        assert all(type(value) is int for value in event["args"].values())


@pytest.mark.parametrize("share", [0.02, 0.3, 0.62, 0.999])
def test_a_trace_cut_anywhere_exports_to_complete_json(run_copy, tmp_path, share):
    """C144: json.load succeeds after a kill at any moment; a half-open arrow is left out."""
    path = run_copy / "trace" / "rank-0001.bin"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    exported = export(run_copy, tmp_path / "out.json")
    kinds = Counter(event["ph"] for event in exported["traceEvents"])
    assert kinds["s"] == kinds["f"]
    assert exported["otherData"]["truncated_ranks"] == [1]


def test_a_missing_rank_leaves_the_others_whole(run_copy, tmp_path):
    (run_copy / "trace" / "rank-0002.bin").unlink()
    exported = export(run_copy, tmp_path / "out.json")
    kinds = Counter(event["ph"] for event in exported["traceEvents"])
    assert kinds["s"] == kinds["f"] > 0
    peers = {e["args"]["peer"] for e in exported["traceEvents"] if "peer" in e.get("args", {})}
    assert peers == {0, 1, 2}


def test_a_failed_export_leaves_the_old_file_and_no_other(finished_run, tmp_path, monkeypatch):
    """C144: the file is complete or what it was."""
    out = tmp_path / "out.json"
    out.write_text("old")

    def lines(*_):
        yield "{}"
        raise OSError("disk full")

    monkeypatch.setattr(perfetto, "event_lines", lines)
    with pytest.raises(OSError, match="disk full"):
        export_perfetto(finished_run, out)
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


PLAN = PlanTable(
    name="train-1x1x1",
    kinds=("Forward", "WaitSync"),
    texts=("Forward block=a micro=0", "WaitSync bucket=0"),
    waits=("", "dp"),
)


def test_an_op_that_never_ended_is_closed_and_flagged():
    """C146: an unset or earlier end never makes a negative or giant duration."""
    program = ProgramTable(
        axis="dp", collective="all_reduce", algorithm="ring", label="bucket 0", dtype="float64",
        count=1, tag=16, rows=((0, 0, 1, 8, 1, 8),), activities=((RECV, 0), (SEND, 0)),
        recv_posted=(0,), send_posted=(0,),
    )  # fmt: skip
    trace = RankTrace(
        header={"rank": 4},
        plans={0: PLAN},
        programs={0: program},
        ops=[
            (0, 0, np.array([[1.0, 2.0], [2.0, np.nan]])),
            (1, 0, np.array([[3.0, 0.0], [3.5, 4.0]])),
        ],
        runs=[(0, 0, np.array([[2.0, 2.5, np.nan]]))],
    )  # fmt: skip
    events = [json.loads(line) for line in event_lines([trace])]
    made = [event for event in events if event["ph"] == "X"]
    assert all(0 <= event["dur"] <= 3e6 for event in made)
    flagged = {(e["name"], e["ts"], e["dur"]) for e in made if e["args"].get("unfinished")}
    assert flagged == {
        ("WaitSync bucket 0", 1e6, 2e6),
        ("Forward a", 2e6, 1e6),
        ("bucket 0 to 1", 1e6, 2e6),
    }
    assert all(event["ph"] != "s" for event in events)


def test_messages_match_by_sender_receiver_tag_and_number():
    dtype = [("is_send", "?"), ("peer", "i4"), ("tag", "i4"), ("sequence", "i8")]
    # Rank 0 sends two messages with tag 5 and one with tag 6; rank 1 has got one of each.
    zero = np.array([(True, 1, 5, 0), (True, 1, 6, 0), (True, 1, 5, 1), (True, 9, 5, 0)], dtype)
    one = np.array([(False, 0, 6, 0), (False, 0, 5, 0)], dtype)
    numbers = match_messages({0: zero, 1: one})
    assert numbers[0][0] == numbers[1][1] != -1
    assert numbers[0][1] == numbers[1][0] != -1
    assert numbers[0][0] != numbers[0][1]
    assert numbers[0][2:].tolist() == [-1, -1]


def test_one_rank_and_a_rank_that_made_no_step_export_too(tmp_path):
    alone = RankTrace(header={"rank": 0}, plans={0: PLAN})
    events = [json.loads(line) for line in event_lines([alone])]
    assert {event["ph"] for event in events} == {"M"}


def test_a_run_without_traces_cannot_be_exported(run_copy, tmp_path):
    for path in (run_copy / "trace").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="trace.enabled"):
        export_perfetto(run_copy, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_chosen_steps_export_alone_and_whole(finished_run, tmp_path):
    """A part of a run has its own arrows, all of them; steps that do not exist are refused."""
    out = tmp_path / "part.json"
    export_perfetto(finished_run, out, (3, 5))
    events = json.loads(out.read_text())["traceEvents"]
    steps = {e["name"] for e in events if e["ph"] == "X" and e["name"].startswith("step ")}
    assert steps == {"step 3", "step 4"}
    starts = Counter(e["id"] for e in events if e["ph"] == "s")
    assert starts and starts == Counter(e["id"] for e in events if e["ph"] == "f")
    with pytest.raises(CheckpointError, match="90:95"):
        export_perfetto(finished_run, out, (90, 95))
