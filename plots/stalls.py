"""Stacked bars: seconds each rank spent blocked, by what it waited for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common import (
    STALL_COLOURS,
    STALL_LABELS,
    NoData,
    heading,
    main,
    rank_name,
    run_title,
    time_unit,
)
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpisim.report import load_run
from mpisim.report.rows import stalls_per_rank
from mpisim.units import format_seconds


@dataclass
class Stalls:
    """What `draw` needs."""

    title: str
    ranks: dict[int, dict[tuple[str, str], float]]
    """Rank -> (axis, cause) -> seconds."""
    step_time_s: float
    """Time of all steps on rank 0, warm-up included; shares are of this."""
    names: list[str] | None = None
    """Of the bars; by default the ranks."""


def load(run_dir: Path) -> Stalls:
    """Read the stalls from the summary, or off the trace of a run that was cut short."""
    run = load_run(run_dir)
    if run.num_ranks == 1:
        raise NoData("one rank waits for nobody.")
    ranks = stalls_per_rank(run).ranks
    if not ranks:
        raise NoData("the run was cut short and has no trace.")
    step_time_s = sum(row["step_s"] for row in run.steps)
    names = [rank_name(run, rank) for rank in ranks]
    return Stalls(run_title(run, "Time blocked in training steps"), ranks, step_time_s, names)


def draw(fig: Figure, data: Stalls) -> None:
    """Draw one bar per rank; the share of the step time stands at its end."""
    ranks = list(data.ranks)
    fig.set_size_inches(10, min(2.3 + 0.5 * len(ranks), 18))
    ax = fig.subplots()
    totals = [sum(spent.values()) for spent in data.ranks.values()]
    size, unit = time_unit(max(max(totals), 1e-9))
    left = [0.0] * len(ranks)
    handles = []
    for (axis, cause), colour in STALL_COLOURS.items():
        values = [spent.get((axis, cause), 0.0) / size for spent in data.ranks.values()]
        ax.barh(range(len(ranks)), values, 0.66, left=left, color=colour)
        left = [a + b for a, b in zip(left, values, strict=True)]
        if any(values):
            handles.append(Patch(color=colour, label=f"{axis}: {STALL_LABELS[cause]}"))
    for row, total in enumerate(totals):
        share = f" = {total / data.step_time_s:.0%}" if data.step_time_s > 0 else ""
        ax.annotate(
            f"{format_seconds(total) if total else '0 s'}{share}", (total / size, row),
            xytext=(6, 0), textcoords="offset points", va="center", fontsize=9,
            bbox={"facecolor": "white", "pad": 1.5},
        )  # fmt: skip
    every = max(1, len(ranks) // 32)
    names = data.names or [f"rank {rank}" for rank in ranks]
    ax.set_yticks(range(0, len(ranks), every), names[::every])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.set_xlim(0, max(max(totals) / size, 1e-9) * 1.16)
    ax.set_xlabel(f"time blocked over all steps ({unit}); at the end of a bar: share of step time")
    ax.grid(axis="x")
    mean = sum(totals) / len(totals)
    share = f", {mean / data.step_time_s:.0%} of the step time" if data.step_time_s > 0 else ""
    heading(fig, data.title, f"mean over ranks {format_seconds(mean)}{share}")
    if handles:
        fig.legend(handles=handles, loc="outside lower center", ncols=4, title="waited for")


if __name__ == "__main__":
    raise SystemExit(main("stalls", load, draw, __doc__))
