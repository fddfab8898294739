"""Files of a run are JSON that any reader takes, whatever its numbers did."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
from small_jobs import make_config

import mpisim
from mpisim.data.synthetic import RegressionData
from mpisim.report import load_run, report_rows, report_text
from mpisim.report.compare import compare_rows, compare_text

PLOTS = Path(__file__).parents[2] / "plots"
STEPS, BAD = 6, (0, 3, 5)


def strict(text):
    """Parse JSON as the standard has it: no NaN, no Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return two float16 runs, and what they said: losses of three steps are not finite."""
    folder = tmp_path_factory.mktemp("runs")
    real = RegressionData.train_batch
    paths, screens = [], []
    for name in ("first", "second"):
        calls = []

        def train_batch(self, indices, calls=calls):
            batch = real(self, indices)
            calls.append(len(calls))
            # Rows that overflow: the forward pass gives no finite loss.
            return batch._replace(x=batch.x * 1e30) if calls[-1] in BAD else batch

        config = make_config(
            folder, run={"name": name}, model={"dtype": "float32", "activation": "relu"},
            precision={"compute": "float16", "init_scale": 1024.0},
            train={"steps": STEPS, "eval_every": 2, "warmup_report_steps": 1, "log_every": 1},
        )  # fmt: skip
        patch = pytest.MonkeyPatch()
        patch.setattr(RegressionData, "train_batch", train_batch)
        patch.setattr("sys.stdout", screen := Screen())
        patch.setattr("sys.stderr", screen)
        try:
            paths.append(mpisim.run(config, ranks=1, transport="local").path)
        finally:
            patch.undo()
        screens.append(screen.text)
        assert len(calls) == STEPS
    return paths, screens


class Screen:
    """Keeps what is printed."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError


def test_every_line_and_file_is_strict_json(runs):
    (path, _), _ = runs
    rows = [strict(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["skipped"] for row in steps] == [number in BAD for number in range(STEPS)]
    for number, row in enumerate(steps):
        for key in ("loss", "grad_norm"):
            assert (row[key] is None) == (number in BAD), (number, key)
            assert row[key] is None or math.isfinite(row[key])
    assert len(rows) - len(steps) == 3
    summary = strict((path / "summary.json").read_text())
    assert summary["first_loss"] is None and summary["last_loss"] is None
    assert (summary["skipped_steps"], summary["committed_steps"]) == (3, 3)
    strict((path / "run.json").read_text())


def test_a_good_run_has_its_losses_in_the_summary(tmp_path):
    path = mpisim.run(make_config(tmp_path), ranks=1, transport="local").path
    summary = strict((path / "summary.json").read_text())
    rows = [strict(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert summary["first_loss"] == losses[0] and summary["last_loss"] == losses[-1]


def test_a_reader_gets_a_number_that_is_none(runs):
    (path, _), _ = runs
    run = load_run(path)
    assert len(run.steps) == STEPS and run.damaged_lines == 0
    for key in ("loss", "grad_norm"):
        assert [number for number in range(STEPS) if math.isnan(run.steps[number][key])] == [*BAD]
    assert all(isinstance(row["loss"], float) for row in run.steps)


def test_the_report_shows_it(runs):
    (path, _), _ = runs
    rows = report_rows(path)
    loss = next(row for row in rows if row["section"] == "loss")
    assert loss["skipped_steps"] == 3
    text = report_text(path)
    assert "not finite at step 0 -> not finite at step 5" in text
    assert "skipped: 3 steps with gradients that are not finite; last scale 256" in text


def test_two_such_runs_compare(runs):
    (first, second), _ = runs
    rows = compare_rows(first, second)
    strict(json.dumps(rows, allow_nan=False))
    curve = [row for row in rows if row["section"] == "curve"]
    assert [row["step"] for row in curve if row["a"] is None] == [*BAD]
    assert "skipped" in compare_text(first, second)
    assert "nan" not in compare_text(first, second).lower()


def test_every_picture_of_it_is_drawn(runs, monkeypatch):
    from matplotlib.figure import Figure

    (path, _), _ = runs
    monkeypatch.syspath_prepend(str(PLOTS))
    before = set(sys.modules)
    names = importlib.import_module("all").NAMES
    common = importlib.import_module("common")
    drawn = []
    try:
        for name in names:
            module = importlib.import_module(name)
            try:
                data = module.load(path)
            except common.NoData:
                continue  # of one rank there is no traffic
            module.draw(Figure(), data)
            drawn.append(name)
        assert "convergence" in drawn and "step_time" in drawn and "memory" in drawn
        figure = Figure()
        convergence = importlib.import_module("convergence")
        convergence.draw(figure, convergence.load(path))
        (curve, *_) = figure.axes[0].lines
        assert curve.get_xdata().tolist() == [1, 2, 4]
    finally:
        for name in {"all", "common", *names} - before:
            sys.modules.pop(name, None)


def test_the_run_says_what_is_not_finite(runs):
    _, (screen, _) = runs
    lines = screen.splitlines()
    skipped = [line for line in lines if "skipped: gradients are not finite" in line]
    assert [int(line.split()[0]) for line in skipped] == [*BAD]
    assert sum("not finite " in line and "skipped" not in line for line in lines) == 3
    assert " nan" not in screen
