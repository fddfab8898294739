"""Figures 1 of ZeRO and of Korthikanti et al., ours with their values marked.

`python plots/reproduce.py [--out FOLDER]` draws both; they need no run. `mpisim reproduce` prints
the same values as tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import matplotlib.style
from common import (
    BLACK,
    MEMORY_COLOURS,
    ORANGE,
    STYLE,
    heading,
)
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mpisim.memory.formulas import model_state_bytes
from mpisim.memory.published import (
    korthikanti_first_stage_bytes,
    korthikanti_weights_optimizer_bytes,
)
from mpisim.reproduce.korthikanti import RUNS
from mpisim.reproduce.rows import read_oracle

NUM_PARAMS, RANKS = 7_500_000_000, 64
STAGE_NAMES = ("baseline", "zero 1 (Pos)", "zero 2 (Pos+g)", "zero 3 (Pos+g+p)")
DEVICE_GIB = 80
LABELS = {
    "params": "16-bit weights",
    "master_params": "float32 master copy",
    "grads": "16-bit gradients",
    "optimizer": "moments of Adam",
}
MODES = {"tp": "tensor parallel", "tp_sp_selective": "present work"}


@dataclass
class Bars:
    """Stacked bars: what each is made of, and what was published for the whole."""

    names: list[str]
    parts: dict[str, list[float]]
    """Part -> value of each bar."""
    published: list[float] = field(default_factory=list)

    @property
    def totals(self) -> list[float]:
        """Sum of each bar."""
        return [sum(values) for values in zip(*self.parts.values(), strict=True)]


def load_zero() -> Bars:
    """Return ZeRO's Figure 1 in GB of a rank: parts from our formula, printed totals."""
    states = [
        model_state_bytes(
            NUM_PARAMS, RANKS, zero, compute="float16", reduce="float16", param="float32",
            has_master=True, optimizer_arrays=2,
        )
        for zero in range(4)
    ]  # fmt: skip
    figure = read_oracle("zero_table1")["figure1"]
    return Bars(
        list(STAGE_NAMES),
        {name: [state[name] / 1e9 for state in states] for name in LABELS},
        [float(figure[f"zero{zero}"]) for zero in range(4)],
    )


def load_korthikanti() -> Bars:
    """Return Korthikanti's Figure 1 in GiB of a device: two bars for each model."""
    cells = read_oracle("korthikanti")["figure1"]
    keys = dict(zip(MODES, ("act_tp", "act_sp_selective"), strict=True))
    names, weights, activations, published = [], [], [], []
    for model, run in RUNS.items():
        for mode, label in MODES.items():
            names.append(f"{model}\n{label}")
            weights.append(float(korthikanti_weights_optimizer_bytes(run) / (1 << 30)))
            activations.append(float(korthikanti_first_stage_bytes(run, mode) / (1 << 30)))
            cell = cells[model]
            published.append(
                float(Fraction(cell["weights_optimizer"]) + Fraction(cell[keys[mode]]))
            )
    return Bars(names, {"weights and optimizer": weights, "activations": activations}, published)


def draw_zero(fig: Figure, data: Bars) -> None:
    """Draw one horizontal bar for each stage, with the printed totals."""
    fig.set_size_inches(10, 4.2)
    ax = fig.subplots()
    places = range(len(data.names))
    left = [0.0] * len(data.names)
    for part, values in data.parts.items():
        ax.barh(places, values, left=left, height=0.62, color=MEMORY_COLOURS[part])
        left = [a + b for a, b in zip(left, values, strict=True)]
    ax.plot(
        data.published, places, linestyle="", marker="D", markersize=7, color=ORANGE,
        markeredgecolor=BLACK, markeredgewidth=0.8, clip_on=False, zorder=4,
    )  # fmt: skip
    for place, total, published in zip(places, data.totals, data.published, strict=True):
        ax.annotate(
            f"{total:.5g} GB; printed {published:g}", (max(total, published), place),
            xytext=(10, 0), textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    ax.set_yticks(list(places), data.names)
    ax.invert_yaxis()
    ax.set_xlim(0, max(data.totals) * 1.3)
    ax.set_xlabel("model states of a rank (GB, 1e9 bytes)")
    ax.grid(axis="x")
    ax.grid(False, axis="y")
    handles = [Patch(color=MEMORY_COLOURS[part], label=LABELS[part]) for part in data.parts]
    fig.legend(handles=[*handles, _diamond("printed in the paper")], loc="outside lower center",
               ncols=5)  # fmt: skip
    heading(
        fig, f"ZeRO, Figure 1: {NUM_PARAMS / 1e9:g}e9 parameters on {RANKS} ranks, Adam, 16-bit",
        f"bars are our closed form; {_largest_gap(data, 'GB')}",
    )  # fmt: skip


def draw_korthikanti(fig: Figure, data: Bars) -> None:
    """Draw two bars for each model, with the memory of the device they ran on."""
    fig.set_size_inches(11, 5.2)
    ax = fig.subplots()
    count = len(MODES)
    places = [number + 0.5 * (number // count) for number in range(len(data.names))]
    colours = {"weights and optimizer": MEMORY_COLOURS["params"],
               "activations": MEMORY_COLOURS["activations"]}  # fmt: skip
    bottom = [0.0] * len(places)
    for part, values in data.parts.items():
        ax.bar(places, values, bottom=bottom, width=0.8, color=colours[part])
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    ax.plot(
        places, data.published, linestyle="", marker="D", markersize=6, color=ORANGE,
        markeredgecolor=BLACK, markeredgewidth=0.8, zorder=4,
    )  # fmt: skip
    for place, total in zip(places, data.totals, strict=True):
        ax.annotate(f"{total:.1f}", (place, total), xytext=(0, 7), textcoords="offset points",
                    ha="center", fontsize=9)  # fmt: skip
    ax.axhline(DEVICE_GIB, color=BLACK, linestyle=(0, (6, 3)), linewidth=1.6)
    ax.set_xticks(places, data.names)
    ax.set_ylim(0, max(data.totals) * 1.1)
    ax.set_ylabel("memory of a first-stage device (GiB)")
    ax.grid(axis="y")
    handles = [Patch(color=colour, label=part) for part, colour in colours.items()]
    line = Line2D([], [], color=BLACK, linestyle=(0, (6, 3)), label=f"{DEVICE_GIB} GiB device")
    fig.legend(handles=[*handles, line, _diamond("worked out from the paper's forms")],
               loc="outside lower center", ncols=4)  # fmt: skip
    fitting = sum(total <= DEVICE_GIB for total in data.totals[1::count])
    heading(
        fig, "Korthikanti et al., Figure 1: weights, optimizer and activations of four models",
        f"with sequence parallelism and selective recompute {fitting} of {len(RUNS)} fit, without "
        f"{sum(total <= DEVICE_GIB for total in data.totals[::count])}; "
        f"{_largest_gap(data, 'GiB')}",
    )  # fmt: skip


def _diamond(label: str) -> Line2D:
    return Line2D([], [], linestyle="", marker="D", markersize=6, color=ORANGE,
                  markeredgecolor=BLACK, markeredgewidth=0.8, label=label)  # fmt: skip


def _largest_gap(data: Bars, unit: str) -> str:
    gap = max(abs(a - b) for a, b in zip(data.totals, data.published, strict=True))
    return f"bars and diamonds differ by at most {gap:.2g} {unit}"


FIGURES: dict[str, tuple[Callable[[], Bars], Callable[[Figure, Bars], None]]] = {
    "zero_figure1": (load_zero, draw_zero),
    "korthikanti_figure1": (load_korthikanti, draw_korthikanti),
}
"""File name -> what it loads and how it is drawn."""


def main() -> int:
    """Be the command; returns the exit status: 0, or 2 where the folder cannot be written."""
    parser = argparse.ArgumentParser(prog="plots/reproduce.py", description=__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=Path("runs/reproduce"),
        help="default: runs/reproduce",
    )  # fmt: skip
    folder = parser.parse_args().out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (load, draw) in FIGURES.items():
            with matplotlib.style.context(STYLE):
                fig = Figure()
                draw(fig, load())
                fig.savefig(folder / f"{name}.png")
            print(folder / f"{name}.png", flush=True)
    except OSError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
