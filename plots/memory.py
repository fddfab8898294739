"""Stacked areas: bytes by category at the fullest moment of each op of a step and an evaluation."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import (
    BLACK,
    MEMORY_COLOURS,
    ORANGE,
    VERMILION,
    NoData,
    byte_unit,
    heading,
    main,
    rank_name,
    read_traces,
    run_title,
    skipped_steps,
    time_unit,
)
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mpisim.report import load_run
from mpisim.trace.store import RankTrace
from mpisim.units import format_bytes


@dataclass
class Curve:
    """Live bytes over one run of a plan."""

    name: str
    time_s: np.ndarray
    """Shape (samples + 1,): start of the plan, then the end of each op; from 0."""
    live_bytes: dict[str, np.ndarray]
    """Category -> shape (samples,): held at the fullest moment of each op."""


@dataclass
class Memory:
    """What `draw` needs."""

    title: str
    curves: list[Curve]
    lines: dict[str, int] = field(default_factory=dict)
    """"measured peak", "predicted peak", "budget" -> bytes."""
    recompute: str = "none"
    """memory.recompute of the run."""


def load(run_dir: Path, rank: int | None = None) -> Memory:
    """Read one rank's samples; by default those of the rank with the largest peak."""
    run = load_run(run_dir)
    traces = {trace.rank: trace for trace in read_traces(run)}
    lines: dict[str, int] = {}
    ranks = run.summary["ranks"] if run.summary is not None else []
    if rank is None:
        peaks = {entry["rank"]: entry["memory"]["peak_total"] for entry in ranks}
        rank = max(peaks, key=peaks.get) if peaks else min(traces)
    if rank not in traces:
        raise NoData(f"rank {rank} has no trace; there are ranks {min(traces)} to {max(traces)}.")
    for entry in ranks:
        if entry["rank"] == rank:
            lines["predicted peak"] = entry["predicted_memory"]["peak_total"]
            lines["measured peak"] = entry["memory"]["peak_total"]
    section = run.config.get("memory", {})
    if budget := section.get("budget_bytes"):
        lines["budget"] = budget
    curves = _curves(traces[rank], skipped_steps(run))
    if not curves:
        raise NoData("no step is complete in the trace.")
    title = run_title(run, f"Live bytes by category on {rank_name(run, rank)}")
    return Memory(title, curves, lines, section.get("recompute", "none"))


def _curves(trace: RankTrace, skipped: list[int]) -> list[Curve]:
    """Return the last recorded run of the first training plan and of the first evaluation."""
    names = list(trace.header["memory_categories"])
    chosen: dict[str, tuple[int, int, np.ndarray]] = {}
    for step, ident, values in trace.memory:
        kind = trace.plans[ident].name.partition("-")[0]
        if kind not in chosen or chosen[kind][1] == ident:
            chosen[kind] = (step, ident, values)
    curves = []
    for kind in sorted(chosen, key=lambda name: name != "train"):
        step, ident, values = chosen[kind]
        starts = [s[0, 0] for number, plan, s in trace.ops if (number, plan) == (step, ident)]
        start = starts[0] if starts else values[0, 1]
        label = f"training step {step}" if kind == "train" else f"evaluation after step {step}"
        label += ", skipped" * (kind == "train" and step in skipped)
        curves.append(
            Curve(
                label,
                np.concatenate([[0.0], values[:, 1] - start]),
                {name: values[:, 2 + number] for number, name in enumerate(names)},
            )
        )
    return curves


def draw(fig: Figure, data: Memory) -> None:
    """Draw the curves side by side on one scale, with the peaks and the budget across."""
    fig.set_size_inches(11, 5.4)
    axes = fig.subplots(1, len(data.curves), sharey=True, squeeze=False, width_ratios=[
        2.0 if number == 0 else 1.0 for number in range(len(data.curves))
    ])[0]  # fmt: skip
    highest = max(sum(curve.live_bytes.values()).max() for curve in data.curves)
    highest = max([highest, *data.lines.values()])
    size, unit = byte_unit(highest)
    used = [
        name
        for name in MEMORY_COLOURS
        if any(curve.live_bytes.get(name, np.zeros(1)).any() for curve in data.curves)
    ]
    styles = {
        "predicted peak": (ORANGE, (0, (6, 3))), "measured peak": (BLACK, (0, (1, 2))),
        "budget": (VERMILION, "solid"),
    }  # fmt: skip
    for ax, curve in zip(axes, data.curves, strict=True):
        time_size, time_name = time_unit(curve.time_s[-1])
        times = curve.time_s / time_size
        # The level of an op spans the op.
        layers = [np.append(curve.live_bytes[name][0], curve.live_bytes[name]) for name in used]
        ax.stackplot(
            times, [layer / size for layer in layers], step="pre",
            colors=[MEMORY_COLOURS[name] for name in used],
        )  # fmt: skip
        for name, value in data.lines.items():
            colour, style = styles[name]
            ax.axhline(value / size, color=colour, linestyle=style, linewidth=1.6)
        ax.set_xlim(0, times[-1])
        ax.set_ylim(0, highest / size * 1.06)
        ax.set_xlabel(f"time since its start ({time_name})")
        ax.set_title(curve.name)
        ax.grid(axis="y")
    axes[0].set_ylabel(f"live bytes ({unit})")
    handles = [Patch(color=MEMORY_COLOURS[name], label=name) for name in reversed(used)]
    handles += [
        Line2D([], [], color=styles[name][0], linestyle=styles[name][1],
               label=f"{name}: {format_bytes(value)}")
        for name, value in data.lines.items()
    ]  # fmt: skip
    fig.legend(handles=handles, loc="outside right center", handlelength=2.6)
    finding = "the fullest moment of each op"
    if data.recompute != "none":
        finding += f"; backward computes forwards again (recompute {data.recompute})"
    heading(fig, data.title, finding)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --rank."""
    parser.add_argument("--rank", type=int, help="default: the rank with the largest peak")


if __name__ == "__main__":
    raise SystemExit(main("memory", load, draw, __doc__, add_options))
