"""The picture scripts as modules, and small runs to draw."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import matplotlib.style
import pytest
from matplotlib.figure import Figure

import mpisim

PLOTS = Path(__file__).parents[2] / "plots"


@pytest.fixture(scope="session")
def plots():
    """Return a function that imports a script of plots/ by name, as `python plots/NAME.py` does."""
    sys.path.insert(0, str(PLOTS))
    yield importlib.import_module
    sys.path.remove(str(PLOTS))


def train(folder, name, ranks, **sections):
    config = {
        "run": {"name": name, "dir": str(folder)},
        "data": {"kind": "regression", "num_rows": 240, "num_features": 6},
        "model": {"hidden": [8, 8]},
        "train": {
            "steps": 9, "global_batch": 24, "num_microbatches": 2, "warmup_report_steps": 2,
            "eval_every": 4,
        },
        "parallel": {"bucket_bytes": 200},
        **sections,
    }  # fmt: skip
    return mpisim.run(config, ranks=ranks, transport="local").path


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Return run directories by name: several, one, killed, untraced, text, decoder, stages.

    `decoder` recomputes, stores float16, sends bfloat16, and skips its first steps; `stages` has
    two pipelines of two stages, whose backwards are split.
    """
    folder = tmp_path_factory.mktemp("runs")
    source = folder / "source.txt"
    source.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    documents = folder / "documents.txt"
    documents.write_text("\n\n".join(f"document {number}" * 3 for number in range(200)))
    made = {
        "several": train(folder, "several", 3),
        "one": train(folder, "one", 1),
        "untraced": train(folder, "untraced", 2, trace={"enabled": False}),
        "text": train(
            folder, "text", 2,
            data={"kind": "text", "path": str(source), "window": 3},
            train={"steps": 30, "global_batch": 16, "eval_every": 10},
        ),
        "decoder": train(
            folder, "decoder", 2,
            data={"kind": "text", "path": str(documents), "window": 8, "layout": "padded"},
            model={"kind": "decoder", "d_model": 8, "num_blocks": 2, "num_heads": 2},
            precision={"compute": "float16", "wire": "bfloat16", "init_scale": 2.0**30},
            memory={"recompute": "full"},
            parallel={"bucket_bytes": 1 << 20},
            train={"steps": 24, "global_batch": 4, "eval_every": 12, "warmup_report_steps": 1},
        ),
        "stages": train(
            folder, "stages", 4,
            data={"kind": "text", "path": str(documents), "window": 8, "layout": "padded"},
            model={"kind": "decoder", "d_model": 8, "num_blocks": 3, "num_heads": 2},
            parallel={"pp": 2, "schedule": "zb-h1"},
            train={"steps": 4, "global_batch": 16, "num_microbatches": 4, "eval_every": 2,
                   "warmup_report_steps": 1},
        ),
    }  # fmt: skip
    killed = shutil.copytree(made["several"], folder / "killed")
    (killed / "summary.json").unlink()
    metrics = killed / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-400])
    for path in (killed / "trace").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])
    return {**made, "killed": killed}


@pytest.fixture
def figure(plots):
    """Return an empty figure in the style of all pictures."""
    with matplotlib.style.context(plots("common").STYLE):
        yield Figure()
