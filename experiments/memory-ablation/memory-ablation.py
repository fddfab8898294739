"""What each technique is worth under one budget: all of them, each one removed, none.

Run by `make memory-ablation`, which puts experiments/ and plots/ on the module path.
"""

from __future__ import annotations

import statistics

from common import BLACK, BLUE, DARK_GREY, GREEN, MEMORY_COLOURS, VIOLET, heading
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from variants import (
    Row,
    Variant,
    config_of,
    data_sizes,
    machine,
    predicted,
    run_variants,
    table,
    technique_sets,
    write,
)

from mpisim.train.changes import work_of
from mpisim.units import format_bytes

NAME = "memory-ablation"
RANKS = 2
ROUNDS = 3
"""Times every variant is run, in turn, so that what else the machine does strikes all alike."""
WARM_UP = 3
"""First steps of a run whose time does not count."""
LIFTED = "memory.budget_bytes=1GiB"
"""What does not fit runs all the same, with the same evaluation, to be measured."""


def main() -> None:
    """Predict, train, compare, write."""
    budget = config_of(NAME).memory.budget_bytes
    forecasts = {
        name: predicted(config_of(NAME, changes), RANKS)
        for name, changes in technique_sets().items()
    }
    fits = {name: worst.peak_total <= budget for name, (_, worst) in forecasts.items()}
    runs = run_variants(
        NAME,
        [
            Variant(
                f"{name.replace(' ', '-').lower()}-{number}",
                f"{name}{'' if fits[name] else ', budget lifted'}, round {number} of {ROUNDS}",
                changes if fits[name] else (*changes, LIFTED), RANKS,
            )
            for number in range(1, ROUNDS + 1)
            for name, changes in technique_sets().items()
        ],
    )  # fmt: skip
    rounds = [runs[start :: len(forecasts)] for start in range(len(forecasts))]
    step_s = [
        statistics.median(row["step_s"] for run in same for row in run.steps[WARM_UP:])
        for same in rounds
    ]
    rows = []
    for (run, *again), median_s, (name, (setup, worst)) in zip(
        rounds, step_s, forecasts.items(), strict=True
    ):
        assert all(other.peak() == run.peak() and other.losses == run.losses for other in again)
        fullest = max((entry["memory"] for entry in run.summary["ranks"]),
                      key=lambda memory: memory["peak_total"])  # fmt: skip
        work = work_of(setup)
        sent = run.sent_bytes_per_step("dp") + run.sent_bytes_per_step("control")
        rows.append(
            {
                "techniques": name,
                "settings": run.variant.changes,
                "ranks": RANKS,
                "data_sizes": data_sizes(setup.config)._asdict(),
                "budget_bytes": budget,
                "fits": fits[name],
                "peak_bytes": run.peak()[0],
                "hook_peak_bytes": run.hook_peak(),
                "predicted_peak_bytes": worst.peak_total,
                "at_peak": fullest["at_peak"],
                "sent_bytes_per_step": sent,
                "predicted_sent_bytes_per_step": work.bytes_moved,
                "recomputed_flops_per_step": work.recomputed_flops,
                "median_step_s": median_s,
                "step_time_ratio": median_s / step_s[0],
                "last_loss": run.losses[-1],
                **machine(run),
            }
        )
    text = table(
        rows,
        {
            "techniques": lambda r: r["techniques"],
            f"fits {format_bytes(budget)}": lambda r: "yes" if r["fits"] else "no",
            "peak of a rank, bytes": lambda r: f"{r['peak_bytes']:,}",
            "allocator hook": lambda r: f"{r['hook_peak_bytes']:,}",
            "forecast": lambda r: f"{r['predicted_peak_bytes']:,}",
            "share of the budget": lambda r: f"{r['peak_bytes'] / budget:.0%}",
            "sent per step, bytes": lambda r: f"{r['sent_bytes_per_step']:,}",
            "from the step tables": lambda r: f"{r['predicted_sent_bytes_per_step']:,}",
            "recomputed, Gflop per step": lambda r: f"{r['recomputed_flops_per_step'] / 1e9:.2f}",
            "step, ms": lambda r: f"{r['median_step_s'] * 1e3:.0f}",
            "step time": lambda r: f"{r['step_time_ratio']:.2f}x",
            "last loss": lambda r: f"{r['last_loss']:.4f}",
        },
    )
    write(NAME, rows, text, lambda fig: draw(fig, rows))


def draw(fig, rows: list[Row]) -> None:
    """Draw what the fullest moment is made of, and beside it what is paid."""
    fig.set_size_inches(13, 5)
    axes = fig.subplots(1, 4, width_ratios=(2.4, 1, 1, 1), sharey=True)
    mib, places = 1 << 20, list(range(len(rows)))
    budget = rows[0]["budget_bytes"] / mib
    peaks, *others = axes
    base = [0.0] * len(rows)
    for name, colour in MEMORY_COLOURS.items():
        widths = [r["at_peak"][name] / mib for r in rows]
        peaks.barh(places, widths, 0.68, left=base, color=colour)
        base = [a + b for a, b in zip(base, widths, strict=True)]
    peaks.axvline(budget, color=VIOLET, linestyle=(0, (5, 2)), linewidth=1.8)
    peaks.plot(
        [r["predicted_peak_bytes"] / mib for r in rows], places, "|", color=DARK_GREY,
        markersize=34, markeredgewidth=2,
    )  # fmt: skip
    # What is far beyond the budget is cut off: the others are what one compares.
    right = min(2.6 * budget, max(base) * 1.24)
    peaks.set_xlim(0, right)
    for place, row in zip(places, rows, strict=True):
        peak = row["peak_bytes"] / mib
        over = "fits" if row["fits"] else f"{peak - budget:.1f} MiB over"
        inside = peak < 0.8 * right
        peaks.annotate(
            over if inside else f"goes on to {peak:.1f} MiB",
            (max(peak, budget) if inside else right, place),
            xytext=(7 if inside else -7, 0), textcoords="offset points",
            va="center", ha="left" if inside else "right", fontsize=8,
            color=BLACK if inside else "white",
        )  # fmt: skip
    peaks.set_yticks(places, [r["techniques"] for r in rows])
    peaks.invert_yaxis()
    peaks.set_xlabel("fullest moment of a rank (MiB)")
    panels = (
        ("sent_bytes_per_step", mib, "sent in a step (MiB)", BLUE),
        ("recomputed_flops_per_step", 1e9, "recomputed in a step (Gflop)", GREEN),
        ("step_time_ratio", 1, "median step time / all", BLACK),
    )
    for ax, (key, unit, label, colour) in zip(others, panels, strict=True):
        ax.barh(places, [r[key] / unit for r in rows], 0.68, color=colour)
        ax.set_xlabel(label)
    handles = [Patch(color=colour, label=name) for name, colour in MEMORY_COLOURS.items()]
    handles += [
        Line2D([], [], color=DARK_GREY, linewidth=2, label="forecast"),
        Line2D([], [], color=VIOLET, linestyle=(0, (5, 2)), label=f"budget: {budget:g} MiB"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=5)
    fitting = sum(r["fits"] for r in rows[1:-1])
    verdict = (
        "without any one of them it does not" if not fitting
        else f"without one of them it does in {fitting} of {len(rows) - 2} cases"
    )  # fmt: skip
    heading(
        fig, f"One decoder under {budget:g} MiB a rank: every technique, and each removed "
        f"({RANKS} ranks)",
        f"with all the run fits; {verdict}; with none a rank holds "
        f"{rows[-1]['peak_bytes'] / rows[0]['peak_bytes']:.1f} times as much, and a step takes "
        f"{rows[-1]['step_time_ratio']:.2f}x the time",
    )  # fmt: skip


if __name__ == "__main__":
    main()
