"""A small real run on threads, and copies of it that a test may damage."""

from __future__ import annotations

import json
import shutil

import pytest

import mpisim

SMALL = {
    "data": {"kind": "regression", "num_rows": 240, "num_features": 6},
    "model": {"hidden": [8, 8], "dtype": "float64"},
    "train": {
        "steps": 9, "global_batch": 24, "num_microbatches": 2, "warmup_report_steps": 2,
        "eval_every": 4,
    },
    "parallel": {"bucket_bytes": 200},
    "comm": {"algorithm": "ring"},
}  # fmt: skip


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """Return the directory of a run over three ranks; do not change it."""
    folder = tmp_path_factory.mktemp("runs")
    config = {**SMALL, "run": {"name": "small", "dir": str(folder)}}
    return mpisim.run(config, ranks=3, transport="local").path


@pytest.fixture(scope="session")
def stage_run(tmp_path_factory):
    """Return a run of two pipelines of two stages with a tied table; do not change it."""
    folder = tmp_path_factory.mktemp("stages")
    return mpisim.run(stage_config(folder, "stages", 2), ranks=4, transport="local").path


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """Return a run of one rank with the same job as `stage_run`; do not change it."""
    folder = tmp_path_factory.mktemp("whole")
    return mpisim.run(stage_config(folder, "whole", 1), ranks=1, transport="local").path


def stage_config(folder, name, stages):
    source = folder / "source.txt"
    source.write_text("\n\n".join(f"document {number}" * 3 for number in range(100)))
    return {
        "run": {"name": name, "dir": str(folder)},
        "data": {"kind": "text", "path": str(source), "window": 8, "layout": "padded"},
        "model": {"kind": "decoder", "d_model": 8, "num_blocks": 4, "num_heads": 2, "d_ff": 12,
                  "dtype": "float64"},
        "train": {"steps": 4, "global_batch": 24, "num_microbatches": 4, "eval_every": 2,
                  "warmup_report_steps": 1},
        "parallel": {"pp": stages, "schedule": "zb-h1" if stages > 1 else "1f1b"},
    }  # fmt: skip


@pytest.fixture
def stage_copy(stage_run, tmp_path):
    """Return a copy of `stage_run` that the test owns."""
    return shutil.copytree(stage_run, tmp_path / "stages")


@pytest.fixture
def run_copy(finished_run, tmp_path):
    """Return a copy of the run that the test owns."""
    return shutil.copytree(finished_run, tmp_path / "copy")


@pytest.fixture
def killed_run(run_copy):
    """Return a run as a kill leaves it: no summary, files cut in the middle of a record."""
    (run_copy / "summary.json").unlink()
    metrics = run_copy / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    # Steps 0 to 3, the evaluation after 3, steps 4 and 5 and half of the line of step 6.
    metrics.write_bytes(b"".join(lines[:7]) + lines[7][:100])
    for path in (run_copy / "trace").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])
    record = json.loads((run_copy / "run.json").read_text())
    record["ended"] = None
    (run_copy / "run.json").write_text(json.dumps(record))
    return run_copy


@pytest.fixture
def edit_json():
    """Return a function that changes a JSON file through a callback."""

    def edit(path, change):
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return edit
