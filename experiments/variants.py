"""What the experiments share: train variants of one config, collect their figures, write them down.

An experiment is a config file, a list of `Variant` and a picture. Its results go to
``runs/NAME/``: one run directory per variant, results.json, a table, the picture.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.style
from common import STYLE
from matplotlib.figure import Figure

import mpisim
from mpisim.config import load_config
from mpisim.config.schema import DataSection, RunConfig
from mpisim.data.load import Dataset, load_data
from mpisim.errors import MpisimError
from mpisim.layouts.metrics import CHANNELS
from mpisim.report import load_run
from mpisim.train.fit import DataSizes, WorstForecast, sizes_of, worst_forecast
from mpisim.train.setup import Setup

EXPERIMENTS = Path(__file__).parent

TECHNIQUES = {
    "recompute": ("memory.recompute=none",),
    "16 bits": ("precision.compute=same", "precision.reduce=same"),
    "ZeRO": ("parallel.zero=0",),
    "accumulation": ("train.num_microbatches=1",),
}
"""What saves memory -> the settings without it; a config with all of them is where one starts."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One run of an experiment."""

    name: str
    label: str
    changes: tuple[str, ...] = ()
    """``section.key=value`` texts."""
    ranks: int = 2
    may_fail: bool = False
    """Whether the run may end early; what it logged until then counts."""


@dataclass
class Finished:
    """What a variant left."""

    variant: Variant
    path: Path
    summary: Row
    """Empty if the run ended early."""
    steps: list[Row]
    evaluations: list[Row]
    error: str = ""
    record: Row = field(default_factory=dict)
    """run.json."""

    @property
    def losses(self) -> list[float]:
        """Training loss of every step, nats."""
        return [row["loss"] for row in self.steps]

    @property
    def skipped(self) -> list[int]:
        """Steps that no rank made."""
        return [row["step"] for row in self.steps if row["skipped"]]

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step, the first five left out."""
        return statistics.median([row["step_s"] for row in self.steps[5:]] or [float("nan")])

    @property
    def heldout(self) -> Row:
        """The last evaluation."""
        return self.evaluations[-1] if self.evaluations else {}

    def peak(self, category: str = "total") -> tuple[int, int]:
        """Return the largest peak over ranks, measured and predicted, bytes."""
        key = "peak_total" if category == "total" else "peak"
        pairs = [
            (entry["memory"][key], entry["predicted_memory"][key])
            for entry in self.summary["ranks"]
        ]
        if category != "total":
            pairs = [(measured[category], predicted[category]) for measured, predicted in pairs]
        return max(pairs)

    def hook_peak(self) -> int:
        """Return the largest peak over ranks that the allocator hook counted, bytes.

        Raises
        ------
        MpisimError
            No hook counted, or at the end of some op the ledger held something else.
        """
        facts = [entry["memory"]["measured"] for entry in self.summary["ranks"]]
        if not all(fact["exact"] and fact["gap_bytes"] == 0 for fact in facts):
            raise MpisimError(
                f"ranks of {self.path} must be measured by the allocator hook, without a gap to "
                f"the ledger; got {facts}. Install mpisim where a C compiler is."
            )
        return max(fact["peak_bytes"] for fact in facts)

    def sent_bytes_per_step(self, axis: str = "dp") -> int:
        """Return the bytes that all ranks sent on an axis in the last training step."""
        ranks = self.steps[-1]["ranks"]
        names = [f"{a}_{collective}_sent_bytes" for a, collective in CHANNELS if a == axis]
        # The log keeps the mean over ranks.
        return round(sum(ranks[name][2] for name in names) * self.variant.ranks)

    def sent_bytes(self, axis: str = "dp") -> tuple[int, int]:
        """Return bytes that all ranks sent on an axis, measured and predicted."""
        totals = [0, 0]
        for entry in self.summary["ranks"]:
            for place, kind in enumerate(("traffic", "predicted_traffic")):
                for name, counts in entry[kind].items():
                    if name.startswith(f"{axis} "):
                        totals[place] += counts["sent_bytes"]
        return totals[0], totals[1]


def config_of(name: str, changes: Sequence[str] = ()) -> RunConfig:
    """Return the config of an experiment with some settings changed."""
    return load_config(EXPERIMENTS / name / f"{name}.toml", changes)


_DATA: dict[tuple[DataSection, str], Dataset] = {}


def technique_sets(alone: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the settings of: all techniques, each one removed, each one `alone`, none; by name."""

    def removed(*names: str) -> tuple[str, ...]:
        return tuple(change for name in names for change in TECHNIQUES[name])

    sets = {"all": ()} | {f"without {name}": removed(name) for name in TECHNIQUES}
    if alone:
        for name in TECHNIQUES:
            sets[f"only {name}"] = removed(*(other for other in TECHNIQUES if other != name))
    return sets | {"none": removed(*TECHNIQUES)}


def data_sizes(config: RunConfig) -> DataSizes:
    """Return what the data adds to the memory of a run; variants of one data set load it once."""
    key = config.data, config.model.kind
    if key not in _DATA:
        _DATA[key] = load_data(config)
    return sizes_of(config, _DATA[key])


def predicted(config: RunConfig, ranks: int) -> tuple[Setup, WorstForecast]:
    """Return what follows from a config, and the fullest moment of the run, from its plans."""
    setup = Setup(config, ranks)
    return setup, worst_forecast(setup, *data_sizes(config))


def machine(run: Finished) -> Row:
    """Return where and with what a run was made."""
    record = run.record
    versions = {name: record["versions"][name] for name in ("mpisim", "python", "numpy", "mpi")}
    host = {name: record[name] for name in ("cores", "platform", "processor", "blas_threads")}
    return {"host": host, "versions": versions, "kernels": run.summary["kernels"]}


def run_variants(name: str, variants: Sequence[Variant]) -> list[Finished]:
    """Train every variant of experiment `name` and read back what it left."""
    done = []
    for variant in variants:
        overrides = [f"run.dir=runs/{name}", f"run.name={variant.name}", *variant.changes]
        config = config_of(name, overrides)
        print(f"== {name}: {variant.label}", flush=True)
        error, summary = "", {}
        path = Path(config.run.dir) / config.run.name
        try:
            summary = mpisim.run(config, ranks=variant.ranks, overwrite=True).summary
        except MpisimError as failed:
            if not variant.may_fail:
                raise
            error = str(failed)
        run = load_run(path)
        done.append(Finished(variant, path, summary, run.steps, run.evaluations, error, run.record))
    return done


def largest_difference(run: Finished, other: Finished) -> float:
    """Return the largest relative difference of two loss curves."""
    return max(
        (abs(a - b) / abs(b) for a, b in zip(run.losses, other.losses, strict=True)), default=0.0
    )


def table(rows: Sequence[Row], columns: dict[str, Callable[[Row], str]]) -> str:
    """Return rows as a table in Markdown; `columns` maps a heading to what stands below it."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(show(row) for show in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def write(name: str, rows: Sequence[Row], text: str, draw: Callable[[Figure], None]) -> None:
    """Write results.json, results.md and the picture to ``runs/NAME/`` and print the table."""
    folder = Path("runs") / name
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(text + "\n", encoding="utf-8")
    with matplotlib.style.context(STYLE):
        fig = Figure()
        draw(fig)
        fig.savefig(folder / f"{name}.png")
    print(text)
    print(f"results: {folder / 'results.json'}, {folder / f'{name}.png'}")
