"""Rows of a report against the files they come from."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisim.errors import CheckpointError
from mpisim.layouts.metrics import MEMORY_CATEGORIES
from mpisim.report import load_run, report_rows
from mpisim.report.rows import percentile
from mpisim.trace.store import expand_messages, read_run


def section(rows, name):
    return [row for row in rows if row["section"] == name]


def metrics(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "heldout_loss" not in line]
    return steps, [line for line in lines if "heldout_loss" in line]


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.sampled_from([0, 50, 95, 99, 100])
)
def test_percentile_is_numpys(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_throughput_and_latency_leave_warm_up_out(finished_run):
    rows = report_rows(finished_run)
    steps, _ = metrics(finished_run)
    steady = steps[2:]
    times = [step["step_s"] for step in steady]
    (throughput,) = section(rows, "throughput")
    assert (throughput["steps"], throughput["warmup_steps"]) == (7, 2)
    assert throughput["tokens"] == 7 * 24
    assert throughput["tokens_per_s"] == pytest.approx(7 * 24 / sum(times))
    (latency,) = section(rows, "latency")
    for percent in (50, 95, 99):
        assert latency[f"p{percent}_s"] == pytest.approx(np.percentile(times, percent))
    assert (latency["min_s"], latency["max_s"]) == (min(times), max(times))


def test_loss_and_heldout_stand_beside_the_baseline(finished_run):
    rows = report_rows(finished_run)
    steps, evaluations = metrics(finished_run)
    (loss,) = section(rows, "loss")
    assert (loss["first_loss"], loss["last_loss"]) == (steps[0]["loss"], steps[8]["loss"])
    heldout = section(rows, "heldout")
    assert [row["step"] for row in heldout] == [3, 7, 8]
    baseline = {row["name"]: row["loss"] for row in section(rows, "baseline")}
    assert [row["name"] for row in section(rows, "baseline") if row["must_beat"]] == [
        "mean_predictor_loss"
    ]
    for row, line in zip(heldout, evaluations, strict=True):
        assert row["loss"] == line["heldout_loss"]
        expected = 1 - line["heldout_loss"] / baseline["mean_predictor_loss"]
        assert row["below_baseline"] == pytest.approx(expected)


def test_traffic_is_what_the_trace_shows_and_the_tables_say(finished_run):
    rows = section(report_rows(finished_run), "traffic")
    # Without stages or ZeRO all but the sums and the gather is counted, and is nothing.
    moved = [row for row in rows if row["bytes"]]
    assert {(row["axis"], row["collective"]) for row in moved} == {
        ("dp", "all_reduce"), ("control", "all_reduce"), ("control", "gather"),
    }  # fmt: skip
    for trace in read_run(finished_run):
        messages = expand_messages(trace)
        for row in rows:
            if row["rank"] != trace.rank:
                continue
            idents = [
                ident
                for ident, program in trace.programs.items()
                if (program.axis, program.collective) == (row["axis"], row["collective"])
            ]
            mine = messages[np.isin(messages["program"], idents)]
            mine = mine[mine["is_send"] == (row["direction"] == "sent")]
            assert row["messages"] == row["predicted_messages"] == len(mine)
            assert row["bytes"] == row["predicted_bytes"] == mine["nbytes"].sum()
            assert row["difference_bytes"] == row["difference_messages"] == 0
    assert sum(row["bytes"] for row in rows if row["axis"] == "dp") > 0


def test_matrix_rows_sum_to_what_ranks_sent(finished_run):
    rows = report_rows(finished_run)
    pairs = section(rows, "bytes_matrix")
    assert {(row["sender"], row["receiver"]) for row in pairs} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }
    for rank in range(3):
        sent = sum(
            row["bytes"]
            for row in section(rows, "traffic")
            if row["rank"] == rank and row["direction"] == "sent"
        )
        assert sent == sum(row["bytes"] for row in pairs if row["sender"] == rank)


def test_memory_has_every_category_total_and_resident(finished_run):
    rows = [row for row in section(report_rows(finished_run), "memory") if row["rank"] == 1]
    assert [row["category"] for row in rows] == [*MEMORY_CATEGORIES, "total", "resident"]
    by_name = {row["category"]: row for row in rows}
    assert all(row["difference_bytes"] == 0 for row in rows[:-1])
    # 6*8+8 + 8*8+8 + 8+1 float64 parameters; AdamW keeps two more of each.
    assert by_name["params"]["peak_bytes"] == 137 * 8
    assert by_name["optimizer"]["peak_bytes"] == 2 * 137 * 8
    assert by_name["total"]["peak_op"]
    assert by_name["resident"]["peak_bytes"] > by_name["total"]["peak_bytes"]


def test_stalls_per_rank_and_cause(finished_run):
    rows = section(report_rows(finished_run), "stalls")
    assert {(row["rank"], row["axis"], row["cause"]) for row in rows} == {
        (rank, axis, cause)
        for rank in range(3)
        for axis in ("dp", "pp", "control")
        for cause in ("recv", "send")
    }
    summary = json.loads((finished_run / "summary.json").read_text())
    steps, _ = metrics(finished_run)
    step_time_s = sum(step["step_s"] for step in steps)
    for row in rows:
        stall_s = summary["ranks"][row["rank"]]["stall_s"][f"{row['axis']} {row['cause']}"]
        assert row["stall_s"] == stall_s
        assert row["share_of_step_time"] == pytest.approx(stall_s / step_time_s)


def test_all_is_well(finished_run):
    rows = report_rows(finished_run)
    (check,) = section(rows, "check")
    assert set(check.values()) == {"check", 0, 1}
    assert (check["replica_sets"], check["tied_sets"]) == (1, 0)
    (run,) = section(rows, "run")
    assert (run["status"], run["ranks"], run["steps_made"]) == ("done", 3, 9)


@pytest.mark.parametrize(
    ("change", "figure"),
    [
        (
            lambda s: s["ranks"][1]["traffic"]["dp all_reduce"].__setitem__("received_bytes", 1),
            "traffic_figures_differing",
        ),
        (
            lambda s: s["ranks"][2]["predicted_traffic"].__setitem__(
                "tp all_gather", dict.fromkeys(("sent_messages", "sent_bytes"), 1)
            ),
            "traffic_figures_differing",
        ),
        (
            lambda s: s["predicted_bytes_matrix"][0].__setitem__(2, 7),
            "matrix_pairs_differing",
        ),
        (
            lambda s: s["ranks"][0]["memory"]["peak"].__setitem__("grads", 3),
            "memory_figures_differing",
        ),
        (
            lambda s: s["ranks"][0]["predicted_memory"].__setitem__("peak_total", 3),
            "memory_figures_differing",
        ),
    ],
)
def test_one_wrong_figure_is_found(run_copy, edit_json, change, figure):
    edit_json(run_copy / "summary.json", change)
    (check,) = section(report_rows(run_copy), "check")
    assert check[figure] == 1


def test_bytes_by_peer_must_be_bytes_by_collective(run_copy, edit_json):
    def move(summary):
        for name in ("bytes_matrix", "predicted_bytes_matrix"):
            summary[name][0][1] += 8

    edit_json(run_copy / "summary.json", move)
    (check,) = section(report_rows(run_copy), "check")
    assert (check["matrix_pairs_differing"], check["matrix_rows_differing"]) == (0, 1)


def test_a_replica_that_drifted_is_named(run_copy, edit_json):
    edit_json(
        run_copy / "summary.json", lambda s: s["ranks"][2].__setitem__("params_sha256", "f" * 64)
    )
    rows = section(report_rows(run_copy), "replicas")
    assert [(row["first_rank"], row["ranks"], row["bitwise_equal"]) for row in rows] == [
        (0, 2, False),
        (2, 1, False),
    ]


def test_a_killed_run_reports_what_it_left(killed_run):
    rows = report_rows(killed_run)
    (run,) = section(rows, "run")
    assert (run["status"], run["steps_made"], run["steps_planned"]) == ("incomplete", 6, 9)
    assert (run["damaged_lines"], run["unreadable_traces"]) == (1, 0)
    assert section(rows, "throughput")[0]["steps"] == 4
    assert len(section(rows, "heldout")) == 1
    assert {row["source"] for row in section(rows, "stalls")} == {"trace"}
    assert len(section(rows, "stalls")) == 3 * 6
    steps, _ = metrics_until_damage(killed_run)
    (sent,) = [
        row
        for row in section(rows, "traffic_so_far")
        if (row["axis"], row["collective"], row["direction"]) == ("dp", "all_reduce", "sent")
    ]
    assert sent["rank0_bytes"] == sum(
        step["ranks"]["dp_all_reduce_sent_bytes"][0] for step in steps
    )
    assert section(rows, "memory_so_far")[-1]["category"] == "total"
    for name in ("traffic", "memory", "check", "replicas", "bytes_matrix"):
        assert not section(rows, name)


def metrics_until_damage(run_dir):
    run = load_run(run_dir)
    return run.steps, run.evaluations


def test_a_rank_killed_before_its_first_record_is_counted(killed_run):
    (killed_run / "trace" / "rank-0001.bin").write_bytes(b"MPISIMT1\0\0")
    (killed_run / "trace" / "rank-0002.bin").write_bytes(b"MPI")
    rows = report_rows(killed_run)
    assert section(rows, "run")[0]["unreadable_traces"] == 2
    assert {row["rank"] for row in section(rows, "stalls")} == {0}


def test_bytes_that_are_no_text_are_a_damaged_line(run_copy):
    with open(run_copy / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 9, "loss": \xff\xc3')
    (run,) = section(report_rows(run_copy), "run")
    assert (run["steps_made"], run["damaged_lines"]) == (9, 1)


def test_nothing_but_a_record(run_copy):
    for path in [run_copy / "summary.json", run_copy / "metrics.jsonl"]:
        path.unlink()
    for path in (run_copy / "trace").iterdir():
        path.unlink()
    rows = report_rows(run_copy)
    assert [row["section"] for row in rows] == ["run"]


def test_a_run_no_longer_than_its_warm_up_takes_all_steps(run_copy, edit_json):
    edit_json(
        run_copy / "run.json",
        lambda r: r["config"]["train"].__setitem__("warmup_report_steps", 9),
    )
    (throughput,) = section(report_rows(run_copy), "throughput")
    assert (throughput["steps"], throughput["warmup_steps"]) == (9, 0)


def test_values_that_are_not_finite_become_null(run_copy, edit_json):
    lines = (run_copy / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-2])
    last["loss"] = float("nan")
    lines[-2] = json.dumps(last)
    (run_copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rows = report_rows(run_copy)
    json.dumps(rows, allow_nan=False)
    assert section(rows, "loss")[0]["last_loss"] is None


def test_every_row_is_plain_json(finished_run):
    for row in report_rows(finished_run):
        assert json.loads(json.dumps(row, allow_nan=False)) == row
        assert all(not isinstance(value, dict | list) for value in row.values())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "run.json").unlink(), "must be a run directory"),
        (lambda run: (run / "run.json").write_text("{"), "run.json must be JSON"),
        (lambda run: (run / "run.json").write_text("[]"), "must be a JSON object"),
        (lambda run: (run / "run.json").write_text('{"ranks": 0}'), "how many ranks"),
        (lambda run: (run / "summary.json").write_text("{}"), "summary.json must hold ranks"),
        (lambda run: (run / "summary.json").write_text("nonsense"), "summary.json must be JSON"),
    ],
)
def test_what_is_no_run_directory_is_refused_in_one_sentence(run_copy, damage, words):
    damage(run_copy)
    with pytest.raises(CheckpointError, match=words):
        report_rows(run_copy)


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        report_rows(tmp_path / "nowhere")


def test_a_report_loads_neither_numpy_nor_mpi(finished_run):
    code = (
        "import sys; from mpisim.report import report_text; report_text(sys.argv[1]);"
        "print(sorted({'numpy', 'mpi4py', 'pydantic', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(finished_run)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
