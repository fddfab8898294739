"""Pipelines in the report: stages compared with themselves, idle time, messages, the trace."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mpisim.cost.bubbles import closed_form
from mpisim.layouts.metrics import CHANNELS
from mpisim.report import export_perfetto, report_rows, report_text
from mpisim.report.compare import compare_rows, compare_text
from mpisim.report.load import Layout, layout_of, load_run
from mpisim.report.perfetto import event_lines
from mpisim.report.stage_text import pipeline_lines, replica_lines
from mpisim.report.stages import (
    RankTimes,
    _in_flight,
    _replay,
    _traced_plan,
    rank_times,
    stage_blocks,
)
from mpisim.report.traces import (
    expand_stage_messages,
    read_traces,
    stage_message_keys,
    stall_totals,
)
from mpisim.trace.events import PlanTable
from mpisim.trace.store import RankTrace

OVERLAP = Path(__file__).parents[2] / "experiments" / "overlap" / "run"


def section(rows, name):
    return [row for row in rows if row["section"] == name]


def table(text, first):
    """Return the lines of a report from the one that starts so to the next empty one."""
    return re.search(rf"^{first}.*?(?=\n\n|\Z)", text, re.M | re.S)[0].splitlines()


# -- replicas, by stage ----------------------------------------------------------------------------


def test_stages_are_compared_with_their_own_replicas_only(stage_run):
    rows = report_rows(stage_run)
    replicas = section(rows, "replicas")
    assert [(row["stage"], row["ranks"], row["first_rank"]) for row in replicas] == [
        (0, 2, 0), (1, 2, 1),
    ]  # fmt: skip
    assert all(row["bitwise_equal"] for row in replicas)
    assert replicas[0]["params_sha256"] != replicas[1]["params_sha256"]
    (tied,) = section(rows, "tied")
    assert tied["bitwise_equal"] and tied["ranks"] == 4
    (check,) = section(rows, "check")
    assert (check["replica_sets"], check["tied_sets"]) == (1, 1)
    text = report_text(stage_run)
    assert text.startswith("run stages: 4 ranks")
    assert "replicas: parameters of each of 2 stages bitwise equal on its 2 ranks" in text
    assert "tied table: bitwise equal on both ends, 4 ranks" in text
    assert text.rstrip().endswith("and memory peak")


def test_a_replica_of_a_stage_that_drifted_is_named(stage_copy, edit_json):
    edit_json(stage_copy / "summary.json", lambda s: s["ranks"][3].update(params_sha256="f" * 64))
    replicas = section(report_rows(stage_copy), "replicas")
    assert [(row["stage"], row["first_rank"], row["bitwise_equal"]) for row in replicas] == [
        (0, 0, True), (1, 1, False), (1, 3, False),
    ]  # fmt: skip
    lines = report_text(stage_copy).splitlines()
    assert lines[0].startswith("DIFFERENCE") and "that replicas hold: 2" in lines[1]
    marked = [line for line in lines if line.startswith("replicas: stage 1: 1 rank from rank")]
    assert len(marked) == 2 and all(line.endswith("<-- DIFFERS") for line in marked)
    assert any(line.startswith("replicas: stage 0: parameters bitwise equal") for line in lines)
    assert lines[-1].startswith("check: DIFFERENCE")


def test_working_parameters_that_differ_are_another_set(stage_copy, edit_json):
    def change(summary):
        for entry in summary["ranks"]:
            entry["working_sha256"] = "ab" * 32 if entry["rank"] else "cd" * 32

    edit_json(stage_copy / "summary.json", change)
    assert section(report_rows(stage_copy), "check")[0]["replica_sets"] == 2


def test_ends_of_a_tied_table_that_differ_are_said_first(stage_copy, edit_json):
    edit_json(stage_copy / "summary.json", lambda s: s["ranks"][1].update(tied_sha256="f" * 64))
    lines = report_text(stage_copy).splitlines()
    assert lines[0].startswith("DIFFERENCE")
    assert lines[1].strip() == "different tables that both ends of a tied one hold: 2"
    assert sum(line.startswith("tied table: ") for line in lines) == 2
    assert section(compare_rows(stage_copy, stage_copy), "run")[0]["figures_differing"] == 1


# -- what each stage did ---------------------------------------------------------------------------


def test_stages_have_their_blocks_memory_and_shares(stage_run):
    rows = report_rows(stage_run)
    (head,), stages = section(rows, "pipeline"), section(rows, "stages")
    assert (head["dp"], head["pp"], head["schedule"], head["microbatches"]) == (2, 2, "zb-h1", 4)
    manifest = json.loads((stage_run / "weights" / "manifest.json").read_text())
    for row, entry in zip(stages, manifest["stages"], strict=True):
        assert row["stage"] == entry["stage"]
        assert row["blocks"] == ",".join(entry["blocks"])
        assert row["num_blocks"] == len(entry["blocks"])
    totals = json.loads((stage_run / "summary.json").read_text())["ranks"]
    for row in stages:
        peaks = [e["memory"]["peak_total"] for e in totals if e["stage"] == row["stage"]]
        assert row["peak_bytes"] == row["predicted_peak_bytes"] == max(peaks)
        assert (row["ranks"], row["first_rank"]) == (2, row["stage"])
        assert row["in_flight"] == 2  # ZB-H1 keeps as many as there are stages
        parts = ("compute", "receive", "send", "dp", "control")
        shares = [row[f"{name}_share"] for name in parts]
        assert all(0 <= share <= 1 for share in shares) and 0 < sum(shares) <= 1 + 1e-9
        assert row["idle_share"] == row["receive_share"] + row["control_share"]
    assert head["source"] == "trace"
    assert head["closed_form_bubble"] == float(closed_form("zb-h1", 2, 4)) == 1 / 13
    assert 0 < head["replayed_idle_share"] < 1
    assert head["replayed_step_s"] <= head["step_s"]


def test_the_table_of_stages(stage_run):
    lines = table(report_text(stage_run), "pipeline: ")
    assert lines[0] == "pipeline: zb-h1, 2 stages, 4 microbatches, dp 2"
    assert lines[1].split()[:4] == ["7.7%", "idle", "by", "the"]
    names = next(line for line in lines if line.startswith("  stage "))
    assert names.split()[:3] == ["stage", "ranks", "blocks"]
    rows = [line.split() for line in lines if re.match(r" +[01]  ", line)]
    assert [row[0] for row in rows] == ["0", "1"] and rows[1][4].endswith("..head")
    assert [row[1:3] for row in rows] == [["0,", "2"], ["1,", "3"]]
    assert "(as predicted)" in "".join(lines)
    assert lines[-1].startswith("  slowest: stage ")
    assert max(map(len, report_text(stage_run).splitlines())) <= 120


def test_the_table_of_places_with_chunks(stage_run):
    """A place holds several stages; a microbatch that is kept in one of two chunks is half."""
    rows = report_rows(stage_run)
    sections = {name: section(rows, name) for name in ("pipeline", "stages", "replicas")}
    sections["pipeline"][0].update(schedule="interleaved", chunks=2)
    for row, most in zip(sections["stages"], (2.5, 5 / 3), strict=True):
        row.update(in_flight=most, blocks="embed,block0 + head")
    lines = pipeline_lines({}, sections)
    assert lines[0] == (
        "pipeline: interleaved, 4 stages on 2 places of axis pp, 2 chunks each, 4 microbatches, "
        "dp 2"
    )
    title = next(line for line in lines if "peak memory" in line)
    assert title.startswith("  places: blocks, microbatches in flight (one of its 2 chunks: 1/2), ")
    names = next(n for n, line in enumerate(lines) if line.startswith("  place "))
    for line, place, most in zip(lines[names + 1 : names + 3], "01", ("2.5", "1.67"), strict=True):
        assert line.split()[0] == place and f"embed..block0 + head  {most:>9}" in line
    assert lines[-1].startswith("  slowest: place ")
    assert "of each of 2 places bitwise equal on its 2" in replica_lines(sections)[0]


def test_without_a_plan_microbatches_in_flight_are_those_of_the_schedule():
    def most(schedule, chunks):
        layout = Layout(1, 4, schedule, chunks, 8, "none", "none")
        return [_in_flight(layout, place, None) for place in range(4)]

    assert most("interleaved", 2) == [5.5, 4.5, 3.5, 2.5]
    assert json.dumps(most("1f1b", 1)) == "[4, 3, 2, 1]"
    assert most("of an extension", 1) == [None] * 4


def test_a_stage_whose_peak_differs_is_marked(stage_copy, edit_json):
    edit_json(
        stage_copy / "summary.json",
        lambda s: s["ranks"][3]["predicted_memory"].update(
            peak_total=s["ranks"][3]["memory"]["peak_total"] + 7
        ),
    )
    lines = table(report_text(stage_copy), "pipeline: ")
    (marked,) = [line for line in lines if line.endswith("<-- DIFFERS")]
    assert marked.split()[0] == "1" and " -7 " in marked
    assert "(as predicted)" not in "".join(lines)


def test_without_traces_shares_come_from_the_summary(stage_copy):
    for path in (stage_copy / "trace").iterdir():
        path.unlink()
    rows = report_rows(stage_copy)
    (head,), stages = section(rows, "pipeline"), section(rows, "stages")
    assert head["source"] == "summary.json" and head["replayed_idle_share"] is None
    assert [row["in_flight"] for row in stages] == [2, 2]
    assert stages[0]["blocks"].startswith("embed,") and stages[1]["blocks"].endswith(",head")
    run = load_run(stage_copy)
    step_s = sum(row["step_s"] for row in run.steps)
    waited = [entry["stall_s"]["pp recv"] for entry in run.summary["ranks"] if entry["stage"] == 1]
    assert stages[1]["receive_share"] == pytest.approx(sum(waited) / 2 / step_s)
    assert "all steps" in "".join(table(report_text(stage_copy), "pipeline: "))


def test_a_pipeline_that_was_cut_reports_what_it_left(stage_copy):
    full = {trace.rank: trace for trace in read_traces(stage_copy)[0]}
    (stage_copy / "summary.json").unlink()
    rows = report_rows(stage_copy)
    stages = section(rows, "stages")
    assert [row["peak_bytes"] for row in stages] == [None, None]
    assert all(row["receive_share"] is not None for row in stages)
    stalls = section(rows, "stalls")
    assert {row["source"] for row in stalls} == {"trace"}
    for row in stalls:
        assert row["stall_s"] == stall_totals(full[row["rank"]])[row["axis"], row["cause"]]
    moved = {(row["axis"], row["collective"]) for row in section(rows, "traffic_so_far")}
    assert moved == set(CHANNELS)
    text = report_text(stage_copy)
    assert "activation         sent" in text and "all_reduce (tied)  sent" in text
    assert "rank 3, stage 1" in text
    # A rank killed before its first record takes the replay with it, not the report.
    (stage_copy / "trace" / "rank-0003.bin").write_bytes(b"MPI")
    (head,) = section(report_rows(stage_copy), "pipeline")
    assert head["replayed_idle_share"] is None
    assert report_text(stage_copy)


def test_stalls_of_the_trace_are_those_of_the_summary(stage_run):
    """But for the decoding of a message, which only the engine can tell from the wait."""
    run = load_run(stage_run)
    for trace in read_traces(stage_run)[0]:
        spent = run.summary["ranks"][trace.rank]["stall_s"]
        found = stall_totals(trace)
        for (axis, cause), seconds in found.items():
            counted = spent[f"{axis} {cause}"]
            if axis == "pp":
                assert seconds >= counted * (1 - 1e-6)
            else:
                assert seconds == pytest.approx(counted, rel=0.05, abs=2e-4), (axis, cause)


def test_traffic_of_stages_is_measured_beside_predicted(stage_run, stage_copy, edit_json):
    rows = section(report_rows(stage_run), "traffic")
    sent = {
        (row["stage"], row["collective"]): row["messages"]
        for row in rows
        if row["axis"] == "pp" and row["direction"] == "sent"
    }
    evaluations = sent[0, "activation"] - 4 * 4
    assert evaluations >= 0 and sent[1, "grad"] == 4 * 4
    assert sent[1, "activation"] == sent[0, "grad"] == 0
    assert sent[0, "all_reduce"] == sent[1, "all_reduce"] > 0
    assert not any(row["difference_bytes"] or row["difference_messages"] for row in rows)
    edit_json(
        stage_copy / "summary.json",
        lambda s: s["ranks"][2]["traffic"]["pp activation"].update(sent_bytes=3),
    )
    lines = report_text(stage_copy).splitlines()
    assert lines[0].startswith("DIFFERENCE")
    (marked,) = [line for line in lines[:-1] if line.endswith("<-- DIFFERS")]
    assert marked.split()[:4] == ["2", "pp", "activation", "sent"]


# -- times and replay ------------------------------------------------------------------------------

OPS = (
    "ReduceScalars kind=target_count count=1 dtype=int64 reduction=sum",
    "LoadBatch micro=0",
    "Forward block=a micro=0 keep=all",
    "SendActivation boundary=0 micro=0 peer=1 shape=2x2 codec=none",
    "RecvGrad boundary=0 micro=0 peer=1 shape=2x2 codec=none",
    "Backward block=a micro=0",
    "WaitSend boundary=0 micro=0 peer=1 kind=activation",
    "GatherMetrics count=3",
)
PEER = (
    "ReduceScalars kind=target_count count=1 dtype=int64 reduction=sum",
    "LoadBatch micro=0",
    "RecvActivation boundary=0 micro=0 peer=0 shape=2x2 codec=none",
    "Forward block=b micro=0 keep=all",
    "Backward block=b micro=0",
    "SendGrad boundary=0 micro=0 peer=0 shape=2x2 codec=none",
    "WaitSend boundary=0 micro=0 peer=0 kind=grad",
    "GatherMetrics count=3",
)
WAITS = {
    "ReduceScalars": "control", "GatherMetrics": "control", "RecvGrad": "pp",
    "RecvActivation": "pp", "WaitSend": "pp",
}  # fmt: skip


def rank_trace(rank, texts, seconds, steps=(0,)):
    """Return a trace whose ops follow each other without gaps."""
    kinds = tuple(text.split()[0] for text in texts)
    ends = np.cumsum(seconds)
    stamps = np.stack([ends - seconds, ends], axis=1)
    plan = PlanTable(
        name="train-2x1x2", kinds=kinds, texts=texts,
        waits=tuple(WAITS.get(kind, "") for kind in kinds),
    )  # fmt: skip
    ops = [(step, 0, stamps + 100 * step) for step in steps]
    return RankTrace(header={"rank": rank}, plans={0: plan}, ops=ops)


FIRST = np.array([1.0, 0.5, 2.0, 0.25, 4.0, 3.0, 0.75, 9.0])
SECOND = np.array([1.0, 0.5, 2.0, 1.0, 2.0, 0.25, 0.5, 9.0])


def test_times_of_a_hand_made_rank():
    times = rank_times(rank_trace(0, OPS, FIRST), 0)
    assert times.step_s == pytest.approx(11.5)  # without the gather of the figures
    assert times.compute_s == pytest.approx(5.75)
    assert times.wait_s == pytest.approx({"receive": 4.0, "send": 0.75, "dp": 0.0, "control": 1.0})
    assert times.op_s["Backward block=a micro=0"] == 3.0
    assert not any("Recv" in text or "Wait" in text for text in times.op_s)


def test_warm_up_and_steps_that_were_cut_are_left_out():
    slow, fast = rank_trace(0, OPS, 10 * FIRST), rank_trace(0, OPS, FIRST, steps=(1,))
    cut = (2, 0, fast.ops[0][2][:3])
    made = RankTrace(header={"rank": 0}, plans=fast.plans, ops=[*slow.ops, *fast.ops, cut])
    assert rank_times(made, 1).step_s == pytest.approx(11.5)
    assert rank_times(made, 7).step_s == pytest.approx((11.5 + 115) / 2)
    assert rank_times(RankTrace(header={"rank": 0}, plans=fast.plans, ops=[cut]), 0) is None


def test_stalls_of_a_hand_made_rank():
    totals = stall_totals(rank_trace(0, OPS, FIRST))
    assert (totals["pp", "recv"], totals["pp", "send"]) == pytest.approx((4.0, 0.75))


def two_ranks(stage_copy):
    """Return the layout of a pipeline of two ranks, and their hand-made traces."""
    record = json.loads((stage_copy / "run.json").read_text())
    record["ranks"], record["mesh"] = 2, {"dp": 1, "pp": 2, "tp": 1}
    record["stages"] = [["a"], ["b"]]
    record["config"]["train"]["num_microbatches"] = 1
    (stage_copy / "run.json").write_text(json.dumps(record))
    return load_run(stage_copy), [rank_trace(0, OPS, FIRST), rank_trace(1, PEER, SECOND)]


def test_a_replay_takes_measured_compute_and_nothing_for_messages(stage_copy):
    run, traces = two_ranks(stage_copy)
    blocks = stage_blocks(run)
    assert blocks == {0: (("a",),), 1: (("b",),)}
    plan = _traced_plan(layout_of(run), traces, blocks)
    times = {trace.rank: rank_times(trace, 0) for trace in traces}
    played = _replay(plan, times)
    # Load and forward of stage 0, both of stage 1, backward of stage 0.
    assert played.step_s == pytest.approx(0.5 + 2 + 3 + 3, abs=0.3)
    assert played.waits[0]["receive"] == pytest.approx(3, abs=0.3)
    assert _replay(plan, {0: RankTimes(1.0, 1.0)}) is None


# -- messages between stages in the exported trace -------------------------------------------------


def test_both_sides_of_a_stage_message_have_one_key(stage_run):
    sent, received = Counter(), Counter()
    for trace in read_traces(stage_run)[0]:
        messages = expand_stage_messages(trace)
        keys = stage_message_keys(trace.rank, messages)
        for key, is_send in zip(keys, messages["is_send"].tolist(), strict=True):
            (sent if is_send else received)[key] += 1
        assert not np.isnan(messages["completed_s"]).any()
        assert (messages["completed_s"] >= messages["posted_s"]).all()
    assert sent == received and set(sent.values()) == {1}
    summary = json.loads((stage_run / "summary.json").read_text())
    assert len(sent) == sum(
        entry["traffic"][f"pp {kind}"]["sent_messages"]
        for entry in summary["ranks"]
        for kind in ("activation", "grad")
    )


@pytest.fixture(scope="module")
def exported(stage_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "trace.json"
    export_perfetto(stage_run, out)
    return json.loads(out.read_text())["traceEvents"]


def test_arrows_lead_from_each_send_to_its_receive(exported, stage_run):
    arrows = {"s": {}, "f": {}}
    for event in exported:
        if event["ph"] in arrows:
            assert event["id"] not in arrows[event["ph"]]
            arrows[event["ph"]][event["id"]] = event
    assert arrows["s"].keys() == arrows["f"].keys()
    slices = {}
    for event in exported:
        if event["ph"] == "X" and "boundary" in event.get("args", {}):
            slices.setdefault((event["pid"], event["tid"]), []).append(event)

    def slice_at(arrow):
        at = round(arrow["ts"] * 1000)
        found = [
            event
            for event in slices.get((arrow["pid"], arrow["tid"]), ())
            if round(event["ts"] * 1000) <= at < round((event["ts"] + event["dur"]) * 1000)
        ]
        return found[0] if found else None

    seen = 0
    for number, start in arrows["s"].items():
        sent, received = slice_at(start), slice_at(arrows["f"][number])
        assert (sent is None) == (received is None)
        if sent is None:
            continue
        seen += 1
        assert sent["args"]["op"].startswith("Send") and received["args"]["op"].startswith("Recv")
        assert (sent["args"]["peer"], received["args"]["peer"]) == (received["pid"], sent["pid"])
        for key in ("boundary", "micro", "kind", "step", "bytes", "codec"):
            assert sent["args"][key] == received["args"][key]
        assert start["ts"] <= arrows["f"][number]["ts"]
    summary = json.loads((stage_run / "summary.json").read_text())
    counted = sum(
        entry["traffic"][f"pp {kind}"]["sent_messages"]
        for entry in summary["ranks"]
        for kind in ("activation", "grad")
    )
    assert seen == counted > 0


def test_the_bytes_of_slices_are_those_that_were_counted(exported, stage_run):
    summary = json.loads((stage_run / "summary.json").read_text())
    for entry in summary["ranks"]:
        for kind in ("activation", "grad"):
            nbytes = sum(
                event["args"]["bytes"]
                for event in exported
                if event["ph"] == "X" and event["pid"] == entry["rank"]
                and event["args"].get("kind") == kind and event["args"]["op"].startswith("Send")
            )  # fmt: skip
            assert nbytes == entry["traffic"][f"pp {kind}"]["sent_bytes"]


def test_tracks_of_stages_nest_and_ops_tell_their_microbatch(exported):
    tracks = {}
    for event in exported:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            tracks.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    for events in tracks.values():
        open_until = []
        for start, end in events:
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    names = {event["name"] for event in exported if event.get("cat") == "compute"}
    assert {"BackwardInput embed, micro 3", "BackwardWeight embed, micro 3"} <= names
    waits = {event["args"]["op"].split()[0] for event in exported if event.get("cat") == "wait"}
    assert {"RecvActivation", "RecvGrad", "WaitSend", "ExchangeTied"} <= waits
    tied = [
        event["args"]["op"]
        for event in exported
        if event.get("cat") == "pp" and "sequence" in event.get("args", {})
    ]
    assert tied and {text.split()[0] for text in tied} == {"ExchangeTied"}


def test_messages_of_a_middle_stage_in_flight_together_get_lanes_of_their_own():
    texts = (
        "Forward block=a micro=1 keep=all",
        "SendActivation boundary=1 micro=1 peer=2 shape=2x2 codec=none",
        "Backward block=a micro=0",
        "SendGrad boundary=0 micro=0 peer=0 shape=2x2 codec=none",
        "WaitSend boundary=1 micro=1 peer=2 kind=activation",
        "WaitSend boundary=0 micro=0 peer=0 kind=grad",
    )
    made = rank_trace(1, texts, np.ones(6))
    events = [json.loads(line) for line in event_lines([made])]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    sends = [e for e in events if e["ph"] == "X" and e["cat"] == "pp"]
    assert {(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in sends} == {
        ("pp send", "activation 1 to 2", 1e6, 4e6),
        ("pp send 2", "grad 0 to 0", 3e6, 3e6),
    }
    # The other sides are not here, nor is the dtype of what was sent.
    assert not any(e["ph"] in "sf" or "bytes" in e.get("args", {}) for e in events)


def test_a_send_that_never_left_is_closed_and_flagged():
    made = rank_trace(0, OPS[:4], FIRST[:4])
    (sent,) = [
        event
        for event in map(json.loads, event_lines([made]))
        if event["ph"] == "X" and event["cat"] == "pp"
    ]
    assert sent["args"]["unfinished"] and (sent["ts"], sent["dur"]) == (3.5e6, 0.25e6)


def test_a_cut_pipeline_exports_without_half_open_arrows(stage_copy, tmp_path):
    path = stage_copy / "trace" / "rank-0001.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    export_perfetto(stage_copy, tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    starts, ends = (Counter(e["id"] for e in events if e["ph"] == kind) for kind in "sf")
    assert starts == ends and starts and max(starts.values()) == 1


# -- two runs --------------------------------------------------------------------------------------


def test_a_pipeline_and_one_rank_are_compared_by_their_weights_files(stage_run, whole_run):
    rows = compare_rows(stage_run, whole_run)
    json.dumps(rows, allow_nan=False)
    (weights,) = section(rows, "weights")
    assert weights["compared"] == "files" and weights["params_of_one"] == 0
    assert weights["common_params"] > 10 and weights["largest_difference"] < 1e-10
    for row in section(rows, "verdict"):
        assert row["common_steps"] > 0 and row["largest_difference"] < 1e-10
    shares = {row["name"]: (row["a"], row["b"]) for row in section(rows, "pipeline")}
    assert shares["closed_form_bubble"] == (1 / 13, None)
    text = compare_text(stage_run, whole_run)
    assert "stages: A dp 2 x pp 2, zb-h1; B dp 1 x pp 1" in text
    assert "pp activation         messages" in text
    assert re.search(r"verdict: final weights (differ in|in the files are)", text)


def test_a_pipeline_equals_itself_by_record(stage_run, stage_copy, edit_json):
    (weights,) = section(compare_rows(stage_run, stage_copy), "weights")
    assert weights["bitwise_equal"] is True and weights["compared"] == "record"
    assert section(compare_rows(stage_run, stage_copy), "run")[0]["figures_differing"] == 0
    # Another digest of one stage: the files decide, and they are the same.
    edit_json(
        stage_copy / "summary.json",
        lambda s: [e.update(params_sha256="a" * 64) for e in s["ranks"] if e["stage"] == 1],
    )
    (weights,) = section(compare_rows(stage_run, stage_copy), "weights")
    assert (weights["bitwise_equal"], weights["compared"]) == (True, "files")
    assert "in the files are bitwise equal" in compare_text(stage_run, stage_copy)
    for path in (stage_copy / "weights").iterdir():
        path.unlink()
    (weights,) = section(compare_rows(stage_run, stage_copy), "weights")
    assert weights["bitwise_equal"] is None
    assert "stages differ, and files are missing" in compare_text(stage_run, stage_copy)


def test_one_number_of_one_stage_is_found_in_the_files(stage_run, stage_copy, edit_json):
    edit_json(
        stage_copy / "summary.json",
        lambda s: [e.update(params_sha256="a" * 64) for e in s["ranks"] if e["stage"] == 1],
    )
    path = stage_copy / "weights" / "stage-01.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x01  # of the exponent of the last number
    path.write_bytes(data)
    (weights,) = section(compare_rows(stage_run, stage_copy), "weights")
    assert weights["bitwise_equal"] is False and weights["differing_params"] == 1
    assert weights["largest_difference"] > 0
    assert weights["largest_difference_param"] in compare_text(stage_run, stage_copy)


# -- runs of before --------------------------------------------------------------------------------


def test_a_run_of_before_is_read_as_one_stage():
    rows = report_rows(OVERLAP)
    assert not section(rows, "pipeline") and not section(rows, "stages")
    assert {row["stage"] for row in section(rows, "replicas")} == {0}
    assert {row["axis"] for row in section(rows, "steady_stalls")} == {"dp", "control"}
    text = report_text(OVERLAP)
    assert " pp " not in text and "replicas: parameters bitwise equal on 4 ranks" in text


def test_a_run_of_before_that_was_cut_tells_the_traffic_it_logged(tmp_path):
    for name in ("run.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((OVERLAP / name).read_bytes())
    rows = section(report_rows(tmp_path), "traffic_so_far")
    assert {(row["axis"], row["collective"]) for row in rows} == {
        ("dp", "all_reduce"), ("control", "all_reduce"), ("control", "gather"),
    }  # fmt: skip


def test_a_run_of_before_beside_a_pipeline(stage_run):
    for pair in ((OVERLAP, stage_run), (stage_run, OVERLAP)):
        assert section(compare_rows(*pair), "stalls")
        assert "pp receive" in compare_text(*pair)
