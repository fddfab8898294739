"""What each stage of a pipeline holds, by schedule: ledger and allocator hook beside the forecast.

Run by `make pipeline-memory`, which puts experiments/ and plots/ on the module path.
"""

from __future__ import annotations

import numpy as np
from common import BLACK, BLUE, DARK_GREY, GREEN, MEMORY_COLOURS, ORANGE, VERMILION, heading
from matplotlib.lines import Line2D
from variants import (
    Finished,
    Row,
    Variant,
    config_of,
    data_sizes,
    machine,
    run_variants,
    table,
    write,
)

from mpisim.plan.check_pipeline import in_flight
from mpisim.report.traces import read_traces
from mpisim.train.setup import Setup

NAME = "pipeline-memory"
SCHEDULES = {
    "naive": ((), BLACK),
    "gpipe": ((), ORANGE),
    "1f1b": ((), BLUE),
    "interleaved": (("parallel.chunks=2", "parallel.split=[]"), GREEN),
    "zb-h1": ((), VERMILION),
}
"""Schedule -> further settings, colour."""
SHOWN = ("gpipe", "1f1b", "zb-h1")
"""Whose live activations are drawn over a step."""
KIB, MIB = 1 << 10, 1 << 20


def rows_of(run: Finished) -> list[Row]:
    """Return what one run came to on every stage."""
    config = config_of(NAME, run.variant.changes)
    setup = Setup(config, run.variant.ranks)
    plan = setup.full_plan()
    sizes = data_sizes(config)
    rows = []
    for entry in run.summary["ranks"]:
        rank, memory = entry["rank"], entry["memory"]
        hook = memory["measured"]
        if not (hook["exact"] and hook["gap_bytes"] == 0):
            raise SystemExit(f"{NAME} must be measured by the allocator hook; got {hook}.")
        rows.append(
            {
                "schedule": config.parallel.schedule,
                "stage": rank,
                "stages": config.parallel.pp,
                "microbatches": config.train.num_microbatches,
                "blocks": [" ".join(chunk) for chunk in plan.chunks(rank)],
                "in_flight": in_flight(plan, rank),
                "peak_activation_bytes": memory["peak"]["activations"],
                "predicted_activation_bytes": entry["predicted_memory"]["peak"]["activations"],
                "peak_bytes": memory["peak_total"],
                "hook_peak_bytes": hook["peak_bytes"],
                "predicted_peak_bytes": entry["predicted_memory"]["peak_total"],
                "at_peak": memory["at_peak"],
                "settings": run.variant.changes,
                "data_sizes": sizes._asdict(),
                "losses": run.losses,
                **machine(run),
            }
        )
    return rows


def live_activations(run: Finished, rank: int) -> tuple[list[float], list[float]]:
    """Return the activations that a rank held in the last step, MiB, over the share of its ops."""
    trace = next(trace for trace in read_traces(run.path)[0] if trace.rank == rank)
    column = 2 + list(trace.header["memory_categories"]).index("activations")
    values = next(
        values
        for _, ident, values in reversed(trace.memory)
        if trace.plans[ident].name.startswith("train")
    )
    return list(np.linspace(0, 1, len(values))), list(values[:, column] / MIB)


def held(rows: list[Row], schedule: str, stage: int) -> float:
    """Return how many microbatches a stage held, by the ledger alone.

    naive holds one and GPipe all: the difference of their peaks tells what one more takes.
    """
    peak = {r["schedule"]: r["peak_activation_bytes"] for r in rows if r["stage"] == stage}
    micros = rows[0]["microbatches"]
    return 1 + (peak[schedule] - peak["naive"]) * (micros - 1) / (peak["gpipe"] - peak["naive"])


def main() -> None:
    """Train, compare, write."""
    runs = run_variants(
        NAME,
        [
            Variant(schedule, schedule, (f"parallel.schedule={schedule}", *changes), 4)
            for schedule, (changes, _) in SCHEDULES.items()
        ],
    )
    rows = [row for run in runs for row in rows_of(run)]
    for row in rows:
        row["held_microbatches"] = held(rows, row["schedule"], row["stage"])
    text = table(
        rows,
        {
            "schedule": lambda r: r["schedule"],
            "stage": lambda r: str(r["stage"]),
            "microbatches held": lambda r: f"{r['held_microbatches']:.2f}",
            "of the plan": lambda r: str(r["in_flight"]),
            "activations, bytes": lambda r: f"{r['peak_activation_bytes']:,}",
            "their forecast": lambda r: f"{r['predicted_activation_bytes']:,}",
            "peak of all, bytes": lambda r: f"{r['peak_bytes']:,}",
            "allocator hook": lambda r: f"{r['hook_peak_bytes']:,}",
            "forecast": lambda r: f"{r['predicted_peak_bytes']:,}",
        },
    )
    curves = {
        (run.variant.name, rank): live_activations(run, rank)
        for run in runs
        if run.variant.name in SHOWN
        for rank in (0, 3)
    }
    write(NAME, rows, text, lambda fig: draw(fig, rows, curves))


def draw(fig, rows: list[Row], curves: dict) -> None:
    """Draw the peaks by stage, what they are made of, and activations over a step."""
    fig.set_size_inches(13, 5)
    left, middle, right = fig.subplots(1, 3, width_ratios=(1, 1.35, 1))
    stages = range(rows[0]["stages"])
    for schedule, (_, colour) in SCHEDULES.items():
        here = [r for r in rows if r["schedule"] == schedule]
        left.plot(
            stages, [r["peak_activation_bytes"] / MIB for r in here], "o-", color=colour,
            label=schedule, markersize=5,
        )  # fmt: skip
    left.plot(
        [r["stage"] for r in rows], [r["predicted_activation_bytes"] / MIB for r in rows], "_",
        color=DARK_GREY, markersize=16, markeredgewidth=1.5, label="forecast", zorder=3,
    )  # fmt: skip
    left.set_ylim(0)
    left.set_xticks(list(stages))
    left.set_xlabel("stage")
    left.set_ylabel("peak of activations (MiB)")
    left.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.84), ncols=2)
    width = 0.8 / len(SCHEDULES)
    for place, schedule in enumerate(SCHEDULES):
        here = [r for r in rows if r["schedule"] == schedule]
        xs = [r["stage"] + (place - (len(SCHEDULES) - 1) / 2) * width for r in here]
        base = np.zeros(len(here))
        for name, colour in MEMORY_COLOURS.items():
            if not any(r["at_peak"].get(name) for r in rows):
                continue
            heights = np.array([r["at_peak"].get(name, 0) / MIB for r in here])
            middle.bar(
                xs, heights, width * 0.86, bottom=base, color=colour,
                label=name if place == 0 else None,
            )  # fmt: skip
            base += heights
        for x, top in zip(xs, base, strict=True):
            middle.annotate(schedule, (x, top), xytext=(0, 3), textcoords="offset points",
                            rotation=90, ha="center", va="bottom", fontsize=7)  # fmt: skip
    middle.set_ylim(0, max(r["peak_bytes"] for r in rows) / MIB * 1.5)
    middle.set_xticks(list(stages))
    middle.set_xlabel("stage")
    middle.set_ylabel("fullest moment of a rank (MiB)")
    handles, labels = middle.get_legend_handles_labels()
    middle.legend(handles[::-1], labels[::-1], fontsize=8, ncols=3, loc="upper center")
    for schedule in SHOWN:
        for rank, style in ((0, "solid"), (3, (0, (1.5, 1.5)))):
            xs, ys = curves[schedule, rank]
            right.plot(xs, ys, color=SCHEDULES[schedule][1], linestyle=style, linewidth=1.2)
    right.set_ylim(0)
    right.set_xlim(0, 1)
    right.set_xticks([0, 0.5, 1], ["start", "half of its ops", "end"])
    right.set_xlabel("a step")
    right.set_ylabel("live activations (MiB)")
    right.legend(
        handles=[
            *(Line2D([], [], color=SCHEDULES[name][1], label=name) for name in SHOWN),
            Line2D([], [], color=BLACK, label="stage 0"),
            Line2D([], [], color=BLACK, linestyle=(0, (1.5, 1.5)), label="stage 3"),
        ],
        fontsize=8, loc="upper right",
    )  # fmt: skip
    largest = max(abs(r["peak_bytes"] - r["predicted_peak_bytes"]) for r in rows)
    counts = ", ".join(f"{held(rows, '1f1b', stage):.0f}" for stage in stages)
    heading(
        fig,
        f"What the {len(stages)} stages of a decoder hold, {rows[0]['microbatches']} microbatches",
        f"1F1B keeps {counts} microbatches, GPipe all on every stage; forecast and measured differ "
        f"by {largest} bytes",
    )  # fmt: skip


if __name__ == "__main__":
    main()
