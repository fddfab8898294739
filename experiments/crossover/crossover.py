"""From which link latency on 1F1B loses to GPipe: measured beside simulation and closed forms.

Run by `make crossover`, which puts experiments/ and plots/ on the module path. All runs share one
launch.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

from common import BLACK, BLUE, GREEN, ORANGE, PURPLE, heading
from emulated import (
    WARM_UP_STEPS,
    host_of,
    median_step_s,
    read_steps,
    run_many,
    simulated,
)
from matplotlib.lines import Line2D
from variants import EXPERIMENTS, Row, config_of, table, write

NAME = "crossover"
RECOMPUTE = ("memory.recompute=full", "memory.recompute_every=2")
VARIANTS = {
    "1f1b": ("1F1B", ("parallel.schedule=1f1b",), BLUE, "o"),
    "eager": ("eager 1F1B", ("parallel.schedule=eager-1f1b",), GREEN, "^"),
    "gpipe": ("GPipe", ("parallel.schedule=gpipe",), ORANGE, "s"),
    "gpipe-recompute": ("GPipe, recompute", ("parallel.schedule=gpipe", *RECOMPUTE), PURPLE, "D"),
}
"""Name -> label, settings, colour, marker."""
LATENCIES_MS = (0, 1, 2, 4, 6, 8, 10, 12, 15, 20, 25)


def changes_of(name: str, latency_ms: float) -> list[str]:
    """Return the settings of one point."""
    return [
        f"run.dir=runs/{NAME}",
        f"run.name={name}-{latency_ms}ms",
        f"cluster.latency_s={latency_ms / 1e3!r}",
        *VARIANTS[name][1],
    ]


def closed_form_s(name: str, latency_s: float) -> float:
    """Return the seconds of a step by the closed forms of README.md.

    Those of 1F1B are for a number of microbatches that the number of stages divides; that of eager
    1F1B is for latencies up to (F + B) / 2, beyond it holds as the period of its slowest stage.
    """
    config = config_of(NAME, VARIANTS[name][1])
    stages, micros = config.parallel.pp, config.train.num_microbatches
    forward_s, backward_s = stage_seconds()
    replay_s = forward_s if name == "gpipe-recompute" else 0.0
    work = (micros + stages - 1) * (forward_s + replay_s + backward_s)
    trips = 2 * (stages - 1)
    if name == "1f1b":
        trips = trips * micros / stages + 2 * (stages - 2)
    return work + trips * latency_s


def stage_seconds() -> tuple[float, float]:
    """Return what a stage's forward and backward take, seconds."""
    config = config_of(NAME)
    flops = 2 * config.data.num_features**2 * config.model.num_blocks / config.parallel.pp
    return flops / config.cluster.flops_per_s, 2 * flops / config.cluster.flops_per_s


def row_of(name: str, latency_ms: float) -> Row:
    """Return what one run came to."""
    changes = changes_of(name, latency_ms)
    config = config_of(NAME, changes)
    path = Path(config.run.dir) / config.run.name
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    steps = read_steps(path)
    return {
        "schedule": config.parallel.schedule,
        "recompute": config.memory.recompute,
        "variant": name,
        "stages": config.parallel.pp,
        "microbatches": config.train.num_microbatches,
        "latency_s": config.cluster.latency_s,
        "pipeline_s": pipeline_s(steps),
        "step_s": median_step_s(steps),
        "simulated_step_s": float(simulated(config, config.parallel.pp).step_s),
        "closed_form_step_s": closed_form_s(name, config.cluster.latency_s),
        "peak_activation_bytes": [e["memory"]["peak"]["activations"] for e in summary["ranks"]],
        "predicted_activation_bytes": [
            e["predicted_memory"]["peak"]["activations"] for e in summary["ranks"]
        ],
        "repeats": len(steps) - 1,
        "settings": changes[2:],
    }


def pipeline_s(steps: list[dict]) -> float:
    """Return the median seconds of a step until its last backward has ended.

    That is on rank 0, whose waits in sums over all ranks come before and after the pipeline: they
    cross the slow links, too, and cost all schedules the same.
    """
    names = ("stall_control_recv_s", "stall_control_send_s")
    return statistics.median(
        row["ranks"]["step_s"][0] - sum(row["ranks"][name][0] for name in names)
        for row in steps[WARM_UP_STEPS:]
    )


def crossing_s(rows: list[Row], name: str, other: str, key: str) -> float | None:
    """Return the latency from which on `name` takes longer than `other`, between points linearly.

    None: it does not, or it does from the first point on.
    """
    mine, its = ([r for r in rows if r["variant"] == each] for each in (name, other))
    gaps = [(a["latency_s"], a[key] - b[key]) for a, b in zip(mine, its, strict=True)]
    for (low, before), (high, after) in itertools.pairwise(gaps):
        if before < 0 <= after:
            return low + (high - low) * -before / (after - before)
    return None


def crossings(rows: list[Row]) -> dict[str, float | None]:
    """Return where 1F1B begins to lose to GPipe with recompute, by every kind of figure."""
    keys = ("pipeline_s", "simulated_step_s", "closed_form_step_s")
    return {key: crossing_s(rows, "1f1b", "gpipe-recompute", key) for key in keys}


def main() -> None:
    """Train, compare, write."""
    points = list(itertools.product(VARIANTS, LATENCIES_MS))
    changes = [changes_of(*point) for point in points]
    stages = config_of(NAME).parallel.pp
    print(f"== {NAME}: {stages} stages, {len(points)} runs", flush=True)
    run_many(EXPERIMENTS / NAME / f"{NAME}.toml", changes, stages)
    report(points)


def report(points: list[tuple[str, float]]) -> None:
    """Write what the runs of these points came to."""
    rows = [row_of(*point) for point in points]
    host = host_of(Path(f"runs/{NAME}") / f"1f1b-{LATENCIES_MS[0]}ms")
    for row in rows:
        row["host"] = host
    cells = {(r["variant"], round(r["latency_s"] * 1e3)): r for r in rows}
    columns = {"latency, ms": lambda latency: str(latency)}
    for name, (label, *_) in VARIANTS.items():
        columns[f"{label}, ms"] = lambda latency, name=name: cell(cells[name, latency])
    write(NAME, rows, table(LATENCIES_MS, columns), lambda fig: draw(fig, rows))
    for key, found in crossings(rows).items():
        print(f"1f1b loses to gpipe with recompute by {key}: {found}")


def cell(row: Row) -> str:
    """Return measured / simulated, ms."""
    return f"{row['pipeline_s'] * 1e3:.0f} / {row['simulated_step_s'] * 1e3:.0f}"


def draw(fig, rows: list[Row]) -> None:
    """Draw step times and what 1F1B loses to GPipe, over the latency, and the memory beside."""
    fig.set_size_inches(13, 5)
    left, middle, right = fig.subplots(1, 3, width_ratios=(1.3, 1, 0.9))
    cells = {(r["variant"], r["latency_s"]): r for r in rows}
    latencies = sorted({r["latency_s"] for r in rows})
    shown = [latency * 1e3 for latency in latencies]
    for name, (label, _, colour, marker) in VARIANTS.items():
        here = [cells[name, latency] for latency in latencies]
        left.plot(shown, [r["simulated_step_s"] * 1e3 for r in here], color=colour, linewidth=1.3)
        left.plot(shown, [r["pipeline_s"] * 1e3 for r in here], marker, color=colour, markersize=5,
                  label=label)  # fmt: skip
    if found := crossings(rows)["pipeline_s"]:
        height = min(r["pipeline_s"] for r in rows) * 1e3
        left.axvline(found * 1e3, color=BLACK, linewidth=0.8, linestyle=(0, (1.5, 2)))
        left.annotate(
            f"with recompute GPipe\nwins from {found * 1e3:.1f} ms on", (found * 1e3, height),
            xytext=(6, -8), textcoords="offset points", fontsize=8, va="top",
        )  # fmt: skip
    left.set_ylim(0)
    left.set_xlim(0)
    left.set_xlabel("latency of a link (ms)")
    left.set_ylabel("a step, until its last backward (ms)")
    handles, _ = left.get_legend_handles_labels()
    left.legend(
        handles=[*handles, Line2D([], [], color=BLACK, linewidth=1.3, label="simulation")],
        loc="upper left", fontsize=8,
    )  # fmt: skip
    for name in ("1f1b", "eager"):
        label, _, colour, marker = VARIANTS[name]
        for key, style in (("simulated_step_s", "-"), ("pipeline_s", marker)):
            lost = [cells[name, at][key] - cells["gpipe", at][key] for at in latencies]
            middle.plot(shown, [each * 1e3 for each in lost], style, color=colour, markersize=5,
                        linewidth=1.3, label=label if style == marker else None)  # fmt: skip
    half = sum(stage_seconds()) / 2 * 1e3
    middle.axvline(half, color=BLACK, linewidth=0.8, linestyle=(0, (1.5, 2)))
    middle.annotate("(F + B) / 2", (half, 0), xytext=(-4, 60), textcoords="offset points",
                    ha="right", fontsize=8)  # fmt: skip
    middle.set_xlim(0)
    middle.set_xlabel("latency of a link (ms)")
    middle.set_ylabel("longer than with GPipe by (ms)")
    middle.legend(loc="upper left", fontsize=8)
    for name, (label, _, colour, marker) in VARIANTS.items():
        peaks = cells[name, latencies[0]]["peak_activation_bytes"]
        right.plot(range(len(peaks)), [peak / 1024 for peak in peaks], marker + "-", color=colour,
                   markersize=5, label=label)  # fmt: skip
    right.set_ylim(0)
    right.set_xticks(range(rows[0]["stages"]))
    right.set_xlabel("stage")
    right.set_ylabel("peak of activations (KiB)")
    heading(
        fig,
        f"1F1B and GPipe over slow links ({rows[0]['stages']} stages, "
        f"{rows[0]['microbatches']} microbatches, F = {stage_seconds()[0] * 1e3:.0f} ms, "
        f"B = {stage_seconds()[1] * 1e3:.0f} ms)",
        "at equal work 1F1B loses from any latency on, eager 1F1B only beyond (F + B) / 2",
    )  # fmt: skip


if __name__ == "__main__":
    main()
