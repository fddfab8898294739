"""What all pictures share: colours by meaning, units on axes, the command line.

A script has `load(run_dir)`, which returns plain data or raises `NoData` with one sentence, and
`draw(fig, data)`, which only draws. Colours are those of Okabe and Ito, told apart by readers with
any colour vision; the lightness differs too. A light tint stands for the same thing as its colour.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mpisim.errors import MpisimError
from mpisim.plan.grid import chunk_letter
from mpisim.report import Run
from mpisim.report.load import layout_of
from mpisim.report.traces import read_traces as traces_of
from mpisim.trace.store import RankTrace

STYLE = Path(__file__).with_name("mpisim.mplstyle")

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
LIGHT_VERMILION, VIOLET, BROWN = "#F7B98F", "#8A2BE2", "#704214"
NAVY, LAVENDER, CREAM, PALE_GREEN = "#112277", "#9988FF", "#FFEECC", "#99FF77"
GREY, LIGHT_GREY, MID_GREY, DARK_GREY = "#999999", "#D9D9D9", "#666666", "#3C3C3C"

OP_COLOURS = {
    "LoadBatch": YELLOW,
    "Forward": SKY,
    "Recompute": PURPLE,
    "Backward": BLUE,
    "BackwardInput": NAVY,
    "BackwardWeight": LAVENDER,
    "OptimizerStep": GREEN,
    "StartSync": DARK_GREY,
    "other compute": BLACK,
}
KIND_LABELS = {
    "LoadBatch": "load batch",
    "Forward": "forward",
    "Recompute": "recompute",
    "Backward": "backward",
    "BackwardInput": "backward, input half",
    "BackwardWeight": "backward, weight half",
    "StartSync": "send, start or advance rings",
    "OptimizerStep": "gradient norm, optimizer",
    "other compute": "other compute",
}
_SHADES = {
    "Forward": ("#FFFFFF", 0.45),
    "Backward": (BLACK, 0.45),
    "BackwardInput": (BLACK, 0.65),
    "BackwardWeight": (BLACK, 0.5),
}
"""Towards which colour, and how far, the last chunk of a rank is shaded: see `kind_colour`."""
WAIT_COLOURS = {
    "pp": CREAM, "sends": PALE_GREEN, "dp": ORANGE, "params": BROWN, "control": LIGHT_GREY,
}  # fmt: skip
STALL_COLOURS = {
    ("dp", "recv"): BLUE,
    ("dp", "send"): SKY,
    ("pp", "recv"): GREEN,
    ("pp", "send"): PALE_GREEN,
    ("control", "recv"): VERMILION,
    ("control", "send"): ORANGE,
}
STALL_LABELS = {"recv": "a message", "send": "completion of a send"}
MEMORY_COLOURS = {
    "data": LIGHT_GREY,
    "params": BLUE,
    "master_params": BLACK,
    "grads": SKY,
    "optimizer": GREEN,
    "comm_buffers": ORANGE,
    "temp": PURPLE,
    "activations": VERMILION,
}
"""In the order in which they are stacked: what never moves lies at the bottom."""

MEASURED, PREDICTED = BLUE, ORANGE


def kind_colour(kind: str, chunk: int = 0, num_chunks: int = 1) -> str:
    """Return the colour of an op kind; the chunks of a rank are shades of it, the first the full.

    A replay has one colour for all chunks.
    """
    if kind not in _SHADES or num_chunks == 1:
        return OP_COLOURS[kind]
    towards, most = _SHADES[kind]
    share = most * chunk / (num_chunks - 1)
    pairs = zip(to_rgb(OP_COLOURS[kind]), to_rgb(towards), strict=True)
    return to_hex([part + (end - part) * share for part, end in pairs]).upper()


def kind_handles(kinds: Collection[str], num_chunks: int) -> list[Patch]:
    """Return the legend of op kinds, chunk by chunk where chunks differ in colour."""
    handles = []
    for kind, label in KIND_LABELS.items():
        if kind not in kinds:
            continue
        for chunk in range(num_chunks if kind in _SHADES else 1):
            which = f", chunk {chunk_letter(chunk)}" if num_chunks > 1 and kind in _SHADES else ""
            handles.append(Patch(color=kind_colour(kind, chunk, num_chunks), label=label + which))
    return handles


def ink(colour: str) -> str:
    """Return what can be read on a colour."""
    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


class NoData(Exception):
    """A picture has nothing to show; the text says why in one sentence."""


def run_title(run: Run, what: str) -> str:
    """Return a picture's title: what is seen, and of which run."""
    layout = layout_of(run)
    ranks = "1 rank" if run.num_ranks == 1 else f"{run.num_ranks} ranks"
    if layout.pp > 1:
        ranks += f": dp {layout.dp} x pp {layout.pp}, {layout.schedule}"
    cut = "" if run.summary is not None else ", cut short"
    return f"{what} (run {run.record.get('name', run.path.name)}, {ranks}{cut})"


def rank_name(run: Run, rank: int) -> str:
    """Return how a rank is called on an axis: with its stage, or its place if it holds several."""
    layout = layout_of(run)
    word = "place" if layout.chunks > 1 else "stage"
    return f"rank {rank}" + (f", {word} {layout.stage_of(rank)}" if layout.pp > 1 else "")


def skipped_steps(run: Run) -> list[int]:
    """Return the steps that were skipped: their gradients were not finite, no rank updated."""
    return [row["step"] for row in run.steps if row.get("skipped")]


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the binary unit in which `largest` bytes is a handy number, as (bytes, name)."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if largest >= size:
            return float(size), name
    return 1.0, "bytes"


def time_unit(largest_s: float) -> tuple[float, str]:
    """Return the unit in which `largest_s` seconds is a handy number, as (seconds, name)."""
    for size, name in ((1.0, "s"), (1e-3, "ms")):
        if largest_s >= size:
            return size, name
    return 1e-6, "us"


def whole_numbers(axis: Any, most: int = 12) -> None:
    """Put ticks on whole numbers only: ranks, steps."""
    axis.set_major_locator(
        MaxNLocator(nbins=most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def read_traces(run: Run) -> list[RankTrace]:
    """Read what traces a run left, or say that there is none."""
    traces, left_out = traces_of(run.path)
    if not traces and left_out:
        raise NoData("no trace file holds a complete record.")
    if not traces:
        raise NoData("the run has no trace (see trace.enabled).")
    return traces


def heading(fig: Figure, what: str, finding: str = "") -> None:
    """Put a picture's title, and below it what it shows in numbers, at the top left."""
    fig.suptitle(f"{what}\n{finding}" if finding else what, x=0.012, ha="left", linespacing=1.35)


def save(
    run_dir: Path,
    name: str,
    load: Callable[..., Any],
    draw: Callable[[Figure, Any], None],
    out: Path | None = None,
    **options: Any,
) -> Path:
    """Draw one picture of a run into a PNG file and return its path.

    Raises
    ------
    NoData
        The run has nothing to show in it.
    MpisimError
        It is no run directory, or a file is damaged.
    """
    data = load(run_dir, **options)
    target = out or run_dir / "plots" / f"{name}.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.style.context(STYLE):
        # Without pyplot there is no display to find: a PNG is drawn by Agg.
        fig = Figure()
        draw(fig, data)
        part = target.with_name(target.name + ".part")
        fig.savefig(part, format="png")
    part.replace(target)
    return target


def main(
    name: str,
    load: Callable[..., Any],
    draw: Callable[[Figure, Any], None],
    description: str,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Be the command `python plots/NAME.py RUN_DIR [--out FILE]`; returns the exit status.

    0: the file was written; 1: the run has nothing to show; 2: wrong use.
    """
    parser = argparse.ArgumentParser(prog=f"plots/{name}.py", description=description)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: RUN_DIR/plots/{name}.png"
    )
    if add_options is not None:
        add_options(parser)
    options = vars(parser.parse_args())
    try:
        print(save(options.pop("run_dir"), name, load, draw, **options))
    except NoData as reason:
        print(f"{name}: not drawn: {reason}", file=sys.stderr)
        return 1
    except (MpisimError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
