"""The tables people read: exact on a hand-made run, loud where something differs."""

from __future__ import annotations

import json

import pytest

from mpisim.layouts.metrics import CHANNELS, MEMORY_CATEGORIES, METRIC_NAMES, TRAFFIC_FIELDS
from mpisim.report import report_text
from mpisim.report.tables import ranges


def make_run(path, *, steps=4, ranks=2):
    """Write a run directory with round numbers; two ranks do the same."""
    (path / "trace").mkdir(parents=True)
    record = {
        "name": "made",
        "ranks": ranks,
        "hosts": ["a"] * ranks,
        "versions": {"mpi": "none"},
        "data": {"name": "by hand"},
        "config": {
            "data": {"kind": "stdlib"},
            "train": {"steps": steps, "warmup_report_steps": 1},
            "trace": {"enabled": True},
        },
        "started": "then",
        "ended": "now",
    }
    (path / "run.json").write_text(json.dumps(record))
    figures = {name: [0.0] * 4 for name in METRIC_NAMES}
    figures |= {"step_s": [0.01] * 4, "stall_dp_recv_s": [0.002, 0.001, 0.0025, 0.004]}
    lines = [
        {
            "step": step, "loss": 5.0 - step, "rows": 100, "step_s": 1.0 if step == 0 else 0.01,
            "ranks": figures,
        }
        for step in range(steps)
    ]  # fmt: skip
    lines.append({"step": steps - 1, "heldout_loss": 1.5, "heldout_rows": 10, "heldout_top1": 0.25})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = dict(zip(TRAFFIC_FIELDS, (6, 1000, 6, 1000), strict=True))
    nothing = dict.fromkeys(TRAFFIC_FIELDS, 0)
    traffic = {
        f"{axis} {name}": counts if (axis, name) == ("dp", "all_reduce") else nothing
        for axis, name in CHANNELS
    }
    peak = {**dict.fromkeys(MEMORY_CATEGORIES, 0), "params": 2048}
    totals = [
        {
            "rank": rank,
            "traffic": traffic,
            "predicted_traffic": traffic,
            "stall_s": {"dp recv": 0.103, "dp send": 0.0},
            "memory": {"peak": peak, "peak_total": 2048},
            "predicted_memory": {"peak": peak, "peak_total": 2048, "peak_op": "Forward block=x"},
            "resident_peak_bytes": 1 << 20,
            "params_sha256": "ab" * 32,
        }
        for rank in range(ranks)
    ]
    matrix = [[0 if a == b else 1000 for b in range(ranks)] for a in range(ranks)]
    summary = {
        "wall_s": 2.0,
        "baselines": {"unigram_entropy_nats": 3.0, "split": "heldout"},
        "primary_baseline": "unigram_entropy_nats",
        "bytes_matrix": matrix,
        "predicted_bytes_matrix": matrix,
        "ranks": totals,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path


EXPECTED = """\
run made: 2 ranks (none), 4 steps, 2 s wall time
data: by hand
started then, ended now

throughput over 3 steps, without the first 1 (warm-up)
  10,000 tokens/s (300 tokens in 30 ms)
latency of a step, same steps
    p50    p95    p99   mean    min    max
  10 ms  10 ms  10 ms  10 ms  10 ms  10 ms

loss, nats: 5.0000 at step 0 -> 2.0000 at step 3
held out
  step  rows    loss  top-1  below unigram_entropy_nats
     3    10  1.5000  25.0%                      +50.0%
baselines, on the held-out rows
  name                    loss
  unigram_entropy_nats  3.0000  <- any model must beat this

traffic, whole run: measured beside the step tables
  rank  axis  collective            messages  table  diff  bytes  table  diff
   0-1  dp    all_reduce  sent             6      6     0  1,000  1,000     0
   0-1  dp    all_reduce  received         6      6     0  1,000  1,000     0

bytes matrix: 2,000 bytes (1.95 KiB) between 2 pairs, each as predicted (difference 0)

stalls: time blocked until a receive, or the completion of a send
                           dp receive  dp send  control receive  control send     all  of step time
  rank 0                       103 ms      0 s              0 s           0 s  103 ms         10.0%
  rank 1                       103 ms      0 s              0 s           0 s  103 ms         10.0%
  a step, without warm-up      2.5 ms      0 s              0 s           0 s  2.5 ms         25.0%

memory: peak bytes of what the engine owns, by category
  rank  category  peak bytes  predicted  diff
   0-1  params         2,048      2,048     0  2.00 KiB
   0-1  total          2,048      2,048     0  2.00 KiB
  the total peaks on rank 0 at: Forward block=x (categories peak at other moments)
  not measured beside the ledger (memory.measure)
  resident peak of the process, as the system counts it: 1.00 MiB (interpreter, libraries and all)

replicas: parameters bitwise equal on 2 ranks (sha256 abababababababab)
check: measured - predicted = 0 for every byte, message, pair and memory peak
"""


def test_a_hand_made_run_to_the_letter(tmp_path):
    assert report_text(make_run(tmp_path / "made")) == EXPECTED


def test_one_wrong_byte_is_said_first_and_marked_in_its_place(tmp_path, edit_json):
    run = make_run(tmp_path / "made")
    edit_json(
        run / "summary.json",
        lambda s: s["ranks"][1]["traffic"]["dp all_reduce"].__setitem__("sent_bytes", 1001),
    )
    lines = report_text(run).splitlines()
    assert lines[0].startswith("DIFFERENCE")
    assert "messages or bytes by collective: 1 differ" in lines[1]
    assert "disagree: 1" in lines[2]
    (marked,) = [line for line in lines[:-1] if line.endswith("<-- DIFFERS")]
    assert marked.split() == (
        "1 dp all_reduce sent 6 6 0 1,001 1,000 1 <-- DIFFERS".split()  # rank 1 alone
    )
    assert lines[-1].startswith("check: DIFFERENCE")


def test_replicas_that_differ_are_said_first(tmp_path, edit_json):
    run = make_run(tmp_path / "made")
    edit_json(run / "summary.json", lambda s: s["ranks"][1].__setitem__("params_sha256", "0"))
    lines = report_text(run).splitlines()
    assert lines[0].startswith("DIFFERENCE")
    assert "parameters that replicas hold: 2" in lines[1]


def test_a_wrong_pair_is_listed(tmp_path, edit_json):
    run = make_run(tmp_path / "made")
    edit_json(run / "summary.json", lambda s: s["bytes_matrix"][1].__setitem__(0, 900))
    text = report_text(run)
    assert "bytes matrix: 1 of 2 pairs differ" in text
    assert "-100" in text


def test_a_killed_run_says_so_in_its_first_line(killed_run):
    lines = report_text(killed_run).splitlines()
    assert lines[0].startswith("INCOMPLETE") and "6 of 9 steps" in lines[0]
    assert "1 line(s) of metrics.jsonl" in lines[1]
    text = "\n".join(lines)
    assert "read off the trace" in text
    assert "traffic of the training steps made" in text
    assert "memory: peak bytes so far" in text
    assert "check:" not in text


def test_warm_up_that_ate_the_run_is_said(tmp_path):
    text = report_text(make_run(tmp_path / "made", steps=1))
    assert "all 1 steps: none is left after warm-up, so warm-up is included" in text


def test_a_run_killed_before_its_first_step(tmp_path):
    run = make_run(tmp_path / "made")
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text("")
    text = report_text(run)
    assert "it left 0 of 4 steps" in text
    assert "no step was finished" in text


def test_one_rank_has_no_messages(tmp_path):
    run = make_run(tmp_path / "made", ranks=1)
    summary = json.loads((run / "summary.json").read_text())
    for name in ("traffic", "predicted_traffic"):
        for counts in summary["ranks"][0][name].values():
            counts.update(dict.fromkeys(counts, 0))
    (run / "summary.json").write_text(json.dumps(summary))
    text = report_text(run)
    assert text.startswith("run made: 1 rank (none)")
    assert "no message, as the step tables say" in text
    assert "bytes matrix" not in text


def test_stalls_of_many_ranks_show_those_that_waited_longest(tmp_path, edit_json):
    run = make_run(tmp_path / "made", ranks=40)
    edit_json(
        run / "summary.json",
        lambda s: [e["stall_s"].update({"dp recv": e["rank"] * 1e-3}) for e in s["ranks"]],
    )
    text = report_text(run)
    assert "the 16 of 40 ranks that waited longest" in text
    assert "rank 39" in text and "rank 24" in text and "rank 23 " not in text
    assert "  0-39  dp    all_reduce  sent" in text


def test_tables_fit_a_terminal(finished_run):
    assert max(len(line) for line in report_text(finished_run).splitlines()) <= 110


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7")]
)
def testranges(ranks, text):
    assert ranges(ranks) == text
