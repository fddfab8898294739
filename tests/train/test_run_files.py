"""run.json, metrics.jsonl and summary.json of real runs: complete, and equal to what was priced."""

from __future__ import annotations

import datetime
import json
import math
import platform
import re
import shutil
import subprocess

import numpy as np
import pytest
from small_jobs import TEXT, make_config, train

import mpisim
from mpisim.config import config_from_mapping
from mpisim.cost.price import price_rank
from mpisim.layouts.metrics import (
    CHANNELS,
    MEMORY_CATEGORIES,
    METRIC_NAMES,
    STALL_CAUSES,
    TRAFFIC_FIELDS,
)
from mpisim.train.loop import _Trainer
from mpisim.train.setup import Setup

NOTHING = dict.fromkeys(TRAFFIC_FIELDS, 0)

# --- run.json (S6) ---------------------------------------------------------------------------


def test_the_run_record_has_every_field(tmp_path):
    """S6, one by one."""
    import hashlib

    config = make_config(tmp_path, "text")
    record = train(config, 3).record
    assert record["seed"] == 7 and record["name"] == "run" and record["version"] == 1
    assert record["data"]["name"] == "text.txt"
    assert record["data"]["sha256"] == hashlib.sha256(TEXT).hexdigest()
    versions = record["versions"]
    assert versions["mpisim"] == mpisim.__version__
    assert versions["numpy"] == np.__version__
    assert versions["python"] == platform.python_version()
    assert re.match(r"\d+\.\d+", versions["mpi4py"])
    assert versions["mpi"] == "threads of one process"
    assert versions["commit"] is None or re.fullmatch("[0-9a-f]{40}", versions["commit"])
    assert record["ranks"] == 3 and record["mesh"] == {"dp": 3, "pp": 1, "tp": 1}
    assert record["hosts"] == [platform.node()] * 3
    assert record["cores"] >= 1
    assert isinstance(record["blas_threads"], str)
    assert record["platform"] and record["processor"]
    start, end = (datetime.datetime.fromisoformat(record[key]) for key in ("started", "ended"))
    assert start.tzinfo is not None and start <= end


def test_the_recorded_config_makes_the_same_run_again(tmp_path):
    """The resolved config is stored whole."""
    config = make_config(tmp_path, model={"hidden": [4, 3]})
    first = train(config, 2)
    assert config_from_mapping(first.record["config"]) == config
    again = train(config_from_mapping(first.record["config"]), 2)
    assert again.digests == first.digests and again.losses == first.losses


def test_the_synthetic_data_is_recorded_too(tmp_path):
    one, two = (train(make_config(tmp_path, run={"seed": seed}), 1).record for seed in (1, 2))
    assert one["data"]["name"] == "synthetic regression"
    assert re.fullmatch("[0-9a-f]{64}", one["data"]["sha256"])
    assert one["data"]["sha256"] != two["data"]["sha256"]


def test_the_commit_is_that_of_the_package(tmp_path, monkeypatch):
    """Not that of the folder the user stands in."""
    monkeypatch.chdir(tmp_path)
    root = mpisim.__file__.rsplit("/", 2)[0]
    if shutil.which("git") is None:
        pytest.skip("needs git")
    done = subprocess.run(
        ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    commit = train(make_config(tmp_path), 1).record["versions"]["commit"]
    assert commit == (done.stdout.strip() if done.returncode == 0 else None)


# --- metrics.jsonl (S3) ----------------------------------------------------------------------


def test_one_line_per_step_with_every_figure(tmp_path):
    config = make_config(tmp_path, train={"steps": 5, "eval_every": 2})
    done = train(config, 3)
    assert [row["step"] for row in done.steps] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in done.evaluations] == [1, 3, 4]
    for row in done.steps:
        assert set(row) == {
            "step", "loss", "lr", "grad_norm", "rows", "targets", "loss_scale", "skipped",
            "step_s", "tokens_per_s", "ranks",
        }  # fmt: skip
        assert list(row["ranks"]) == list(METRIC_NAMES)
        for name, (rank0, least, mean, largest) in row["ranks"].items():
            assert least <= rank0 <= largest, name
            assert least <= mean * (1 + 1e-12) and mean <= largest * (1 + 1e-12), name
            assert least >= 0, name
        assert row["tokens_per_s"] == pytest.approx(row["targets"] / row["step_s"])
        assert row["targets"] == row["rows"] == 24
        assert (row["loss_scale"], row["skipped"]) == (1.0, False)
        assert row["ranks"]["rows"] == [8.0, 8.0, 8.0, 8.0]
        assert row["grad_norm"] > 0 and math.isfinite(row["loss"])


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("eval_every", [0, 1, 2])
def test_the_traffic_of_every_step_is_that_of_its_plan(tmp_path, eval_every, enabled):
    """An evaluation between two steps counts for neither of them."""
    config = make_config(
        tmp_path, data={"num_rows": 55}, parallel={"bucket_bytes": 1},
        train={"steps": 6, "eval_every": eval_every}, trace={"enabled": enabled},
    )  # fmt: skip
    done = train(config, 3)
    setup = Setup(config, 3)
    assert [row["rows"] for row in done.steps] == [24, 24, 5, 24, 24, 5]
    for row in done.steps:
        plan = setup.train_plan(row["rows"])
        for axis, collective in CHANNELS:
            for field in TRAFFIC_FIELDS:
                values = [
                    price_rank(plan, rank).get((axis, collective), NOTHING)[field]
                    for rank in range(3)
                ]
                spread = [values[0], min(values), sum(values) / 3, max(values)]
                assert row["ranks"][f"{axis}_{collective}_{field}"] == pytest.approx(spread)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_of_a_step_fit_into_it(tmp_path, monkeypatch, ranks, overlap, enabled):
    """S3: compute and stalls of a rank are disjoint parts of its step, never negative."""
    everything = []
    real = _Trainer._log

    def keep(self, current, step_s):
        everything.append(current.metrics.copy())
        real(self, current, step_s)

    monkeypatch.setattr(_Trainer, "_log", keep)
    config = make_config(
        tmp_path, model={"hidden": [30, 20]}, trace={"enabled": enabled},
        train={"num_microbatches": 2, "steps": 5, "eval_every": 2},
        parallel={"overlap": overlap, "bucket_bytes": 500},
    )  # fmt: skip
    done = train(config, ranks)
    figures = np.array(everything)
    assert figures.shape == (5, ranks, len(METRIC_NAMES))
    column = {name: figures[:, :, index] for index, name in enumerate(METRIC_NAMES)}
    stalls = [column[f"stall_{axis}_{cause}_s"] for axis, cause in STALL_CAUSES]
    assert all((values >= 0).all() for values in stalls)
    assert (column["compute_s"] > 0).all()
    parts = column["compute_s"] + sum(stalls)
    assert (parts <= column["step_s"] * (1 + 1e-9)).all()
    for rank, totals in enumerate(done.summary["ranks"]):
        for axis, cause in STALL_CAUSES:
            per_step = column[f"stall_{axis}_{cause}_s"][:, rank].sum()
            assert totals["stall_s"][f"{axis} {cause}"] == pytest.approx(per_step)
            assert ranks > 1 or per_step == 0 or not enabled


def test_the_live_and_peak_bytes_are_those_of_the_ledger(tmp_path):
    done = train(make_config(tmp_path), 2)
    last = done.steps[-1]["ranks"]
    totals = done.summary["ranks"]
    for category in MEMORY_CATEGORIES:
        # At the end of a step, before the evaluation.
        live = totals[0]["memory"]["live"][category]
        # Within the step, the numbers of its 12 rows are alive, too.
        assert last[f"live_{category}_bytes"][0] == live + 8 * 12 * (category == "data")
        assert last[f"peak_{category}_bytes"][3] <= max(
            rank["memory"]["peak"][category] for rank in totals
        )
    assert last["peak_total_bytes"][0] <= totals[0]["memory"]["peak_total"]


# --- summary.json ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ranks", "sections"),
    [
        ("regression", 1, {}),
        ("regression", 2, {"parallel": {"bucket_bytes": 1}}),
        ("regression", 3, {"train": {"eval_every": 1}}),
        ("regression", 4, {"comm": {"algorithm": "ring"}, "parallel": {"overlap": False}}),
        ("regression", 5, {"train": {"global_batch": 25}, "data": {"num_rows": 60}}),
        ("regression", 8, {"comm": {"algorithm": "halving_doubling"}}),
        ("regression", 6, {"comm": {"algorithm": "recursive_doubling"}}),
        ("text", 3, {"parallel": {"bucket_bytes": 900}, "model": {"dtype": "float32"}}),
        ("text", 4, {"train": {"num_microbatches": 3, "eval_rows": 7}}),
        ("text", 2, {"trace": {"enabled": False}}),
    ],
)
def test_measured_traffic_equals_the_predicted(tmp_path, kind, ranks, sections):
    """DESIGN: what was recorded equals what was priced, difference 0; replicas are equal."""
    done = train(make_config(tmp_path, kind, **sections), ranks)
    summary = done.summary
    assert summary["status"] == "done" and summary["steps"] == 4
    assert summary["bytes_matrix"] == summary["predicted_bytes_matrix"]
    assert sum(summary["plans"].values()) == 4 + len(done.evaluations)
    matrix = np.array(summary["bytes_matrix"])
    for number, rank in enumerate(summary["ranks"]):
        assert rank["rank"] == number
        assert rank["traffic"] == rank["predicted_traffic"]
        sent, received = (
            sum(entry[f"{side}_bytes"] for entry in rank["traffic"].values())
            for side in ("sent", "received")
        )
        assert (sent, received) == (matrix[number].sum(), matrix[:, number].sum())
        assert all(seconds >= 0 for seconds in rank["stall_s"].values())
        assert rank["resident_peak_bytes"] > rank["memory"]["peak_total"]
    assert len(done.digests) == 1
    if ranks > 1:
        assert matrix.sum() > 0


def test_losses_and_baselines_of_the_summary(tmp_path):
    done = train(make_config(tmp_path, "text", train={"eval_every": 2}), 2)
    summary = done.summary
    assert summary["first_loss"] == done.losses[0]
    assert summary["last_loss"] == done.losses[-1]
    assert summary["evaluations"] == done.evaluations and len(done.evaluations) == 2
    assert summary["primary_baseline"] in summary["baselines"]
    assert summary["wall_s"] >= sum(row["step_s"] for row in done.steps)


def test_the_digest_is_that_of_the_parameters(tmp_path):
    """Names and bytes, so that two runs can be compared without their weights."""
    import hashlib

    done = train(make_config(tmp_path), 2)
    digest = hashlib.sha256()
    for name in sorted(done.params):
        own = hashlib.sha256(done.params[name].tobytes()).hexdigest()
        digest.update(f"{own} {name}\n".encode())
    assert done.digests == {digest.hexdigest()}


# --- evaluation ------------------------------------------------------------------------------


@pytest.mark.parametrize("eval_rows", [0, 1, 10])
@pytest.mark.parametrize("kind", ["regression", "text"])
def test_an_evaluation_counts_every_row_once(tmp_path, kind, eval_rows):
    """C128: 10 rows on 4 ranks are 10 rows; padding to 12 would count two twice."""
    runs = [
        train(
            make_config(
                tmp_path, kind, data={"num_rows": 260},
                train={"steps": 1, "global_batch": 12, "eval_rows": eval_rows},
            ),
            ranks,
        )
        for ranks in (1, 2, 3, 4)
    ]  # fmt: skip
    (want,) = runs[0].evaluations
    available = runs[0].record["data"]["num_heldout"]
    assert want["heldout_rows"] == (min(eval_rows, available) or available)
    for run in runs[1:]:
        (got,) = run.evaluations
        assert got["heldout_rows"] == want["heldout_rows"]
        assert got["heldout_loss"] == pytest.approx(want["heldout_loss"], rel=1e-12)
        assert got.get("heldout_top1") == want.get("heldout_top1")


def test_eight_of_ten_right_is_four_fifths_on_any_number_of_ranks(tmp_path, monkeypatch):
    """C128 itself: ten samples, the first two wrong: 0.8, not 8/12."""
    from mpisim.data.text import TextData

    def batch(self, indices):
        # Byte "a" is the target of the right ones; the model below always says "a".
        targets = np.where(indices < 2, ord("b"), ord("a")).astype(np.uint8)
        return np.zeros((len(indices), self.window), np.uint8), targets

    monkeypatch.setattr(TextData, "num_heldout", 10)
    monkeypatch.setattr(TextData, "heldout_batch", batch)
    monkeypatch.setattr(TextData, "train_batch", lambda self, indices: batch(self, indices + 2))
    config = make_config(
        tmp_path, "text", optimizer={"kind": "sgd", "lr": 1.0}, train={"global_batch": 12}
    )
    for ranks in (1, 2, 3, 4):
        (done,) = train(config, ranks).evaluations
        assert done["heldout_rows"] == 10 and done["heldout_top1"] == 0.8


def test_a_large_evaluation_is_cut_into_several_forwards(tmp_path):
    config = make_config(tmp_path, data={"num_rows": 50_000}, train={"steps": 1})
    one, two = train(config, 1), train(config, 2)
    assert list(one.summary["plans"])[-1].startswith("eval-1x3x")
    assert one.evaluations[0]["heldout_rows"] == 2500
    assert two.evaluations[0]["heldout_loss"] == pytest.approx(
        one.evaluations[0]["heldout_loss"], rel=1e-12
    )


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("eval_every", [0, 1])
def test_fewer_than_twenty_rows_have_no_held_out_split(tmp_path, ranks, eval_every):
    """P7: nothing is evaluated, and nobody waits for it."""
    config = make_config(
        tmp_path, data={"num_rows": 19}, train={"global_batch": 6, "eval_every": eval_every}
    )
    done = train(config, ranks)
    assert done.record["data"]["num_heldout"] == 0 and done.record["data"]["num_train"] == 19
    assert done.evaluations == done.summary["evaluations"] == []
    assert len(done.steps) == 4
    assert all(name.startswith("train") for name in done.summary["plans"])


# --- trace on and off ------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_tracing_changes_no_bit(tmp_path, overlap):
    on, off = (
        train(
            make_config(
                tmp_path, trace={"enabled": enabled}, model={"hidden": [7, 5]},
                parallel={"bucket_bytes": 200, "overlap": overlap},
                train={"steps": 8, "eval_every": 3}, run={"name": f"trace-{enabled}"},
            ),
            3,
        )
        for enabled in (True, False)
    )  # fmt: skip
    assert on.digests == off.digests and on.losses == off.losses
    assert on.evaluations == off.evaluations
    assert on.summary["bytes_matrix"] == off.summary["bytes_matrix"]
    assert len(list((on.path / "trace").iterdir())) == 3
    assert list((off.path / "trace").iterdir()) == []


def test_the_lines_of_a_step_are_on_disk_before_the_next_one(tmp_path, monkeypatch):
    """A killed run keeps what it had."""
    config = make_config(tmp_path)
    seen = []
    real = _Trainer._step

    def look(self, step):
        if self.is_root:
            seen.append(len((self.run_dir / "metrics.jsonl").read_text().splitlines()))
        return real(self, step)

    monkeypatch.setattr(_Trainer, "_step", look)
    train(config, 2)
    assert seen == [0, 1, 2, 3]
    assert json.loads((tmp_path / "runs" / "run" / "run.json").read_text())["ended"]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_stalls_of_the_steps_are_those_of_the_trace(tmp_path, monkeypatch, overlap):
    """Two readers of the same stamps: what is logged while running, and what is read back."""
    from mpisim.trace.events import RECV
    from mpisim.trace.store import expand_stalls, read_run

    logged = []
    real = _Trainer._log

    def keep(self, current, step_s):
        logged.append(current.metrics.copy())
        real(self, current, step_s)

    monkeypatch.setattr(_Trainer, "_log", keep)
    config = make_config(
        tmp_path, model={"hidden": [30, 20]}, parallel={"overlap": overlap, "bucket_bytes": 500},
        train={"num_microbatches": 2}, data={"num_rows": 19 * 12}, comm={"algorithm": "ring"},
    )  # fmt: skip
    done = train(config, 4)
    figures = np.array(logged)
    for rank, trace in enumerate(read_run(done.path)):
        stalls = expand_stalls(trace)
        kinds = {number: plan.kinds for number, plan in trace.plans.items()}
        axes = {number: program.axis for number, program in trace.programs.items()}
        train_ops = next(ops for ops in kinds.values() if "Backward" in ops)
        # The figures are sent before the gather that carries them has run.
        stalls = stalls[stalls["op_index"] < train_ops.index("GatherMetrics")]
        for step in range(3):
            mine = stalls[stalls["step"] == step]
            for axis, cause in STALL_CAUSES:
                chosen = [
                    (row["activity"] == RECV) == (cause == "recv")
                    and axes[row["program"]] == axis
                    for row in mine
                ]  # fmt: skip
                seconds = (mine["end_s"] - mine["start_s"])[np.array(chosen, dtype=bool)].sum()
                index = METRIC_NAMES.index(f"stall_{axis}_{cause}_s")
                assert figures[step, rank, index] == pytest.approx(seconds, abs=1e-9)
    assert figures[:, :, METRIC_NAMES.index("stall_dp_recv_s")].any()
