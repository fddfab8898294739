"""Curves: training loss per step, held-out loss, and the baselines a model must beat."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path

from common import (
    BLACK,
    BLUE,
    DARK_GREY,
    SKY,
    VERMILION,
    NoData,
    heading,
    main,
    run_title,
    skipped_steps,
    whole_numbers,
)
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from mpisim.report import load_run

BASELINES = {
    "unigram_entropy_nats": "unigram entropy",
    "bigram_cross_entropy_nats": "bigram",
    "mean_predictor_loss": "mean predictor",
    "noise_floor_loss": "noise floor",
}
"""Those that are drawn, and what they are called in the picture."""


@dataclass
class Convergence:
    """What `draw` needs."""

    title: str
    unit: str
    steps: list[int]
    losses: list[float]
    heldout: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss)."""
    baselines: dict[str, float] = field(default_factory=dict)
    bits: tuple[float, float] | None = None
    """Last held-out bits per byte, and those of the unigram model."""
    skipped: list[int] = field(default_factory=list)
    """Steps that no rank made, also those whose loss is not finite."""
    not_finite: int = 0
    """Losses that are left out, of steps and of evaluations."""


def load(run_dir: Path) -> Convergence:
    """Read the losses; baselines are known only when a run has ended."""
    run = load_run(run_dir)
    rows = [row for row in run.steps if math.isfinite(row["loss"])]
    if not rows:
        raise NoData("no step with a finite loss is logged.")
    regression = run.config.get("data", {}).get("kind") == "regression"
    known = (run.summary or {}).get("baselines", {})
    decoder = run.config.get("model", {}).get("kind") == "decoder"
    evaluations = [row for row in run.evaluations if _is_finite(row["heldout_loss"])]
    last = evaluations[-1] if evaluations else {}
    names = dict(BASELINES)
    if decoder and "unigram_cross_entropy_nats" in known:
        # Bits per byte are compared with it; the entropy is that of the held-out bytes themselves.
        del names["unigram_entropy_nats"]
        names["unigram_cross_entropy_nats"] = "unigram"
    bits = None
    if "heldout_bits_per_byte" in last and "unigram_bits_per_byte" in known:
        bits = (last["heldout_bits_per_byte"], known["unigram_bits_per_byte"])
    return Convergence(
        run_title(run, "Loss by step"),
        "squared error" if regression else f"nats per {'token' if decoder else 'byte'}",
        [row["step"] for row in rows],
        [row["loss"] for row in rows],
        [(row["step"], row["heldout_loss"]) for row in evaluations],
        {label: known[name] for name, label in names.items() if name in known},
        bits,
        skipped_steps(run),
        len(run.steps) - len(rows) + len(run.evaluations) - len(evaluations),
    )


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def centred_mean(values: list[float], reach: int) -> list[float]:
    """Return the mean of each value and up to `reach` neighbours on either side.

    Near the ends both sides are cut alike, so the curve neither leads nor lags.
    """
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for number in range(len(values)):
        side = min(reach, number, len(values) - 1 - number)
        means.append((sums[number + side + 1] - sums[number - side]) / (2 * side + 1))
    return means


def spread(places: list[float], gap: float) -> list[float]:
    """Move sorted label places apart until neighbours are at least `gap` from each other."""
    moved = list(places)
    for _ in range(50):
        for low in range(len(moved) - 1):
            lack = gap - (moved[low + 1] - moved[low])
            if lack > 1e-12:
                moved[low] -= lack / 2
                moved[low + 1] += lack / 2
    return moved


def draw(fig: Figure, data: Convergence) -> None:
    """Draw the curves; baselines are named at the right edge."""
    ax = fig.subplots()
    reach = max(1, len(data.losses) // 100)
    window = 2 * reach + 1
    smooth = centred_mean(data.losses, reach)
    ax.plot(data.steps, data.losses, color=SKY, linewidth=0.9, label="training loss of each step")
    if len(data.losses) > window:
        ax.plot(
            data.steps,
            smooth,
            color=BLUE,
            linewidth=2.2,
            label=f"its centred mean over {window} steps",
        )
    if data.heldout:
        steps, losses = zip(*data.heldout, strict=True)
        ax.plot(
            steps, losses, color=VERMILION, marker="o", markersize=6, linestyle=(0, (2, 2)),
            linewidth=1.2, label="held-out loss", clip_on=False, zorder=3,
        )  # fmt: skip
    if data.skipped:
        # On the upper edge, above all curves: a mark has no loss.
        ax.plot(
            data.skipped, [1.0] * len(data.skipped), transform=ax.get_xaxis_transform(),
            color=BLACK, marker="x", markersize=5, linestyle="none", clip_on=False,
            label=f"skipped steps: {len(data.skipped)}",
        )  # fmt: skip
    shown = [*data.losses, *(loss for _, loss in data.heldout), *data.baselines.values()]
    logarithmic = min(shown) > 0 and max(shown) / min(shown) > 30
    if logarithmic:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _limits(ax, shown, logarithmic)
    _draw_baselines(ax, data.baselines, logarithmic)
    first, last = min(data.steps + data.skipped), max(data.steps + data.skipped)
    ax.set_xlim(first, max(last, first + 1))
    lost = data.not_finite
    note = f" ({lost} loss{'es' if lost > 1 else ''} not finite, left out)" if lost else ""
    ax.set_xlabel(f"step{note}")
    ax.set_ylabel(f"loss ({data.unit})" + (", logarithmic" if logarithmic else ""))
    whole_numbers(ax.xaxis)
    ax.grid(axis="y")
    heading(fig, data.title, _outcome(data))
    fig.legend(loc="outside lower center", ncols=4)


def _limits(ax, shown: list[float], logarithmic: bool) -> None:
    low, high = min(shown), max(shown)
    if logarithmic:
        ax.set_ylim(low / 1.3, high * 1.3)
    else:
        margin = max(high - low, 1e-3 * max(abs(high), 1e-9)) * 0.07
        ax.set_ylim(low - margin, high + margin)


def _draw_baselines(ax, baselines: dict[str, float], logarithmic: bool) -> None:
    scale = math.log if logarithmic else float
    bottom, top = (scale(value) for value in ax.get_ylim())
    ordered = sorted(baselines.items(), key=lambda item: item[1])
    places = spread([(scale(value) - bottom) / (top - bottom) for _, value in ordered], 0.09)
    for (name, value), place in zip(ordered, places, strict=True):
        ax.axhline(value, color=DARK_GREY, linewidth=1.1, linestyle=(0, (5, 3)))
        ax.annotate(
            f"{name}\n{value:.3f}", (1.0, place), xycoords="axes fraction", xytext=(7, 0),
            textcoords="offset points", va="center", fontsize=8.5, color=DARK_GREY,
            annotation_clip=False,
        )  # fmt: skip


def _outcome(data: Convergence) -> str:
    text = f"training {data.losses[0]:.3f} to {data.losses[-1]:.3f}"
    if not data.heldout:
        return text
    step, last = data.heldout[-1]
    text += f"; held out {last:.3f} after step {step}"
    if data.bits is not None:
        value, unigram = data.bits
        side = "below" if value <= unigram else "above"
        share = abs(1 - value / unigram)
        return f"{text} = {value:.3f} bits per byte, {share:.1%} {side} the unigram model"
    for name in ("unigram entropy", "mean predictor"):
        if data.baselines.get(name):
            share = 1 - last / data.baselines[name]
            text += f", {abs(share):.1%} {'below' if share >= 0 else 'above'} the {name}"
    return text


if __name__ == "__main__":
    raise SystemExit(main("convergence", load, draw, __doc__))
