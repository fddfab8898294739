"""Latency: the time of every step, and how it is distributed without warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from common import (
    BLACK,
    BLUE,
    LIGHT_GREY,
    MID_GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    NoData,
    heading,
    main,
    run_title,
    skipped_steps,
    time_unit,
    whole_numbers,
)
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mpisim.report import load_run
from mpisim.report.rows import percentile
from mpisim.units import format_seconds

PERCENTILES = {50: ORANGE, 95: VERMILION, 99: PURPLE}


@dataclass
class StepTime:
    """What `draw` needs."""

    title: str
    steps: list[int]
    seconds: list[float]
    warmup_steps: int
    """First steps that the distribution leaves out."""
    skipped: list[int] = field(default_factory=list)
    """Steps that no rank made; they took their time all the same."""


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
        skipped_steps(run),
    )


def draw(fig: Figure, data: StepTime) -> None:
    """Draw time over steps and, beside it on the same scale, the histogram."""
    steady = data.seconds[data.warmup_steps :]
    size, unit = time_unit(percentile(steady, 50))
    fig.set_size_inches(11, 4.8)
    left, right = fig.subplots(1, 2, sharey=True, width_ratios=[2.2, 1])
    cut = data.warmup_steps
    # Many steps get smaller points, or they would be one blot.
    area = min(26.0, max(4.0, 4000 / len(data.steps)))
    left.scatter(data.steps[:cut], [v / size for v in data.seconds[:cut]], s=area, color=MID_GREY)
    left.scatter(data.steps[cut:], [v / size for v in steady], s=area, color=BLUE)
    if data.skipped:
        took = dict(zip(data.steps, data.seconds, strict=True))
        left.scatter(
            data.skipped, [took[step] / size for step in data.skipped], s=2.4 * area, marker="x",
            linewidths=1.1, color=BLACK, zorder=3,
        )  # fmt: skip
    if cut:
        left.axvspan(
            data.steps[0] - 0.5, data.steps[cut - 1] + 0.5, color=LIGHT_GREY, alpha=0.5, zorder=0
        )
    left.set_xlim(data.steps[0] - 0.5, data.steps[-1] + 0.5)
    whole_numbers(left.xaxis)
    left.set_xlabel("step")
    left.set_ylabel(f"time of a step ({unit})")
    # A first step that takes a hundred times as long must not flatten all others.
    top = max(steady)
    if max(data.seconds) <= 3 * top:
        top = max(data.seconds)
    above = sum(value > top for value in data.seconds)
    note = f"; {above} of the warm-up above the scale" if above else ""
    left.set_title(f"in the order of the run{note}")
    values = [v / size for v in steady]
    right.hist(values, bins=_edges(values, top / size), orientation="horizontal", color=BLUE)
    right.set_xlabel("number of steps")
    whole_numbers(right.xaxis, most=5)
    right.set_title("distribution" + (" without warm-up" if cut else ""))
    handles = [Line2D([], [], marker="o", color=BLUE, linestyle="", markersize=5, label="a step")]
    if cut:
        handles.append(Patch(color=LIGHT_GREY, label=f"warm-up, {cut} steps"))
    if data.skipped:
        handles.append(
            Line2D([], [], marker="x", color=BLACK, linestyle="", markersize=6,
                   label="a skipped step")
        )  # fmt: skip
    for percent, colour in PERCENTILES.items():
        value = percentile(steady, percent)
        for ax in (left, right):
            ax.axhline(value / size, color=colour, linewidth=1.4)
        handles.append(Line2D([], [], color=colour, label=f"p{percent} = {format_seconds(value)}"))
    left.set_ylim(0, top / size * 1.06)
    for ax in (left, right):
        ax.grid(axis="y")
    fig.legend(handles=handles, loc="outside lower center", ncols=6)
    heading(fig, data.title, _numbers(steady))


def _edges(values: list[float], top: float) -> list[float]:
    """Return the edges of the bars; one is never too thin to be seen on a scale up to `top`."""
    low, high = min(values), max(values)
    width = max((high - low) / min(40, max(5, len(values) // 4)), top / 60)
    count = max(1, math.ceil((high - low) / width - 1e-9))
    return [low + (high - low) / 2 + (number - count / 2) * width for number in range(count + 1)]


def _numbers(steady: list[float]) -> str:
    parts = [f"p{percent} {format_seconds(percentile(steady, percent))}" for percent in PERCENTILES]
    return f"{', '.join(parts)} over {len(steady)} steps"


if __name__ == "__main__":
    raise SystemExit(main("step_time", load, draw, __doc__))
