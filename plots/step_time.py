"""Latency: the time of every step, and how it is distributed without warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common import (
    BLUE,
    GREY,
    LIGHT_GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    NoData,
    format_seconds,
    main,
    run_title,
    time_unit,
    whole_numbers,
)
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mpisim.report import load_run
from mpisim.report.rows import percentile

PERCENTILES = {50: ORANGE, 95: VERMILION, 99: PURPLE}


@dataclass
class StepTime:
    """What `draw` needs."""

    title: str
    steps: list[int]
    seconds: list[float]
    warmup_steps: int
    """First steps that the distribution leaves out."""


def load(run_dir: Path) -> StepTime:
    """Read the step times of rank 0."""
    run = load_run(run_dir)
    if not run.steps:
        raise NoData("no step is logged.")
    _, left_out = run.steady_steps()
    return StepTime(
        run_title(run, "Latency of a step"),
        [row["step"] for row in run.steps],
        [row["step_s"] for row in run.steps],
        left_out,
    )


def draw(fig: Figure, data: StepTime) -> None:
    """Draw time over steps and, beside it on the same scale, the histogram."""
    steady = data.seconds[data.warmup_steps :]
    size, unit = time_unit(percentile(steady, 50))
    fig.set_size_inches(11, 4.8)
    left, right = fig.subplots(1, 2, sharey=True, width_ratios=[2.2, 1])
    cut = data.warmup_steps
    left.scatter(data.steps[:cut], [v / size for v in data.seconds[:cut]], s=14, color=GREY)
    left.scatter(data.steps[cut:], [v / size for v in steady], s=14, color=BLUE)
    if cut:
        left.axvspan(data.steps[0] - 0.5, data.steps[cut - 1] + 0.5, color=LIGHT_GREY, alpha=0.5)
    left.set_xlim(data.steps[0] - 0.5, data.steps[-1] + 0.5)
    whole_numbers(left.xaxis)
    left.set_xlabel("step (optimizer updates)")
    left.set_ylabel(f"time of a step ({unit})")
    left.set_title("in the order of the run")
    values = [v / size for v in steady]
    right.hist(values, bins=min(40, max(5, len(values) // 4)), orientation="horizontal", color=BLUE)
    right.set_xlabel("number of steps")
    whole_numbers(right.xaxis, most=5)
    right.set_title("distribution" + (" without warm-up" if cut else ""))
    handles = [Line2D([], [], marker="o", color=BLUE, linestyle="", markersize=5, label="a step")]
    if cut:
        handles.append(Patch(color=LIGHT_GREY, label=f"warm-up, {cut} steps"))
    for percent, colour in PERCENTILES.items():
        value = percentile(steady, percent)
        for ax in (left, right):
            ax.axhline(value / size, color=colour, linewidth=1.4)
        handles.append(Line2D([], [], color=colour, label=f"p{percent} = {format_seconds(value)}"))
    left.set_ylim(0, max(data.seconds) / size * 1.06)
    for ax in (left, right):
        ax.grid(axis="y")
    fig.legend(handles=handles, loc="outside lower center", ncols=5)
    fig.suptitle(f"{data.title}: {_numbers(steady)}", x=0.02, ha="left", fontsize=11)


def _numbers(steady: list[float]) -> str:
    parts = [f"p{percent} {format_seconds(percentile(steady, percent))}" for percent in PERCENTILES]
    return f"{', '.join(parts)} over {len(steady)} steps"


if __name__ == "__main__":
    raise SystemExit(main("step_time", load, draw, __doc__))
