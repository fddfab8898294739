"""A plan as a picture: what every rank computes in which slot, and the messages between them.

`python plots/plan.py FILE [--out PNG]` draws a plan text, which `mpisim plan show CONFIG --ops`
prints (``-``: from standard input); `mpisim plan show CONFIG --png PNG` calls it.

Slots are those of `mpisim.plan.grid`: a chunk's forward, its backward, and each half of a split
backward are equally long. How long they really take is in the timeline of a run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import matplotlib.style
from common import (
    BLUE,
    DARK_GREY,
    GREEN,
    LIGHT_GREY,
    SKY,
    STYLE,
    VERMILION,
    heading,
    whole_numbers,
)
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mpisim.errors import MpisimError
from mpisim.plan.build import Plan
from mpisim.plan.check_pipeline import in_flight
from mpisim.plan.grid import Cell, Message, lay_out, share_rows
from mpisim.plan.text import parse_plan

COLOURS = {"F": SKY, "B": BLUE, "W": GREEN}
LABELS = {"F": "forward", "B": "backward", "W": "its weight half"}
TINT = {"F": (0.55, "white"), "B": (0.55, "black"), "W": (0.55, "white")}
"""How near to which colour the last chunk of a rank is: neighbours stay apart."""
SHIFT = 0.07
"""Slots that activations and gradients are drawn apart, where they cross at the same time."""
BAR = (-0.36, 0.36)
"""From top to bottom of a rank's row, in rows."""
MAX_LABELS = 3000


@dataclass
class Picture:
    """What `draw` needs."""

    title: str
    names: list[str]
    """Of the rows: ranks that run alike share one."""
    notes: list[str]
    """Of each row, written on its right."""
    rows: list[tuple[Cell, ...]]
    messages: list[tuple[int, int, Message]]
    """Row of the sender, row of the receiver, message."""
    num_slots: int
    num_chunks: int
    idle_share: Fraction


def load(plan: Plan, title: str = "") -> Picture:
    """Lay out a plan."""
    grid = lay_out(plan)
    shared = share_rows(plan, grid, range(len(plan.ranks)))
    first = {}
    for row, (_, cells) in enumerate(shared):
        rank = next(rank for rank, found in enumerate(grid.ranks) if found is cells)
        first[rank] = row
    stages = f"{_count(plan.mesh.pp, 'stage')}, " if plan.mesh.pp > 1 else ""
    notes = [f"{in_flight(plan, rank)} alive" if plan.kind == "train" else "" for rank in first]
    return Picture(
        title or f"{stages}{_count(len(plan.rows[0]), 'microbatch')} ({plan.name})",
        [name for name, _ in shared],
        notes,
        [cells for _, cells in shared],
        [
            (first[message.source], first[message.dest], message)
            for message in grid.messages
            if message.source in first and message.dest in first
        ],
        grid.num_slots,
        grid.num_chunks,
        grid.idle_share,
    )


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{number} {what if number == 1 else plural}"


def draw(fig: Figure, data: Picture) -> None:
    """Draw a row per rank."""
    rows, slots = len(data.rows), max(data.num_slots, 1)
    fig.set_size_inches(min(max(8.0, 2.4 + 0.19 * slots), 18), min(1.7 + 0.42 * rows, 20))
    ax = fig.subplots()
    ax.set_xlim(0, slots)
    ax.set_ylim(rows - 0.5, -0.5)
    waits = [((0, slots), row) for row in range(rows)]
    ax.add_collection(_boxes(waits, LIGHT_GREY, alpha=0.45))
    for letter in COLOURS:
        for chunk in range(data.num_chunks):
            boxes = [
                ((cell.slot, cell.slot + 1), row)
                for row, cells in enumerate(data.rows)
                for cell in cells
                if (cell.letter, cell.chunk) == (letter, chunk)
            ]
            colour = _colour(letter, chunk, data.num_chunks)
            ax.add_collection(_boxes(boxes, colour, edgecolors="white", linewidths=0.6))
    _messages(ax, data)
    _numbers(fig, ax, data)
    ax.set_yticks(range(rows), data.names)
    ax.tick_params(axis="y", length=0)
    right = ax.secondary_yaxis("right")
    right.set_yticks(range(rows), data.notes)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)
    ax.spines["left"].set_visible(False)
    whole_numbers(ax.xaxis)
    ax.set_xlabel("slot: the time of one forward, of one backward, or of one half of it")
    idle = data.idle_share
    finding = f"{idle.numerator}/{idle.denominator} of the slots are idle ({float(idle):.1%})"
    if any(data.notes):
        finding += "; alive: most microbatches whose activations a rank keeps"
    heading(fig, data.title, finding)
    handles = _handles(data)
    in_one_line = len(handles) <= 6 or fig.get_size_inches()[0] >= 13
    columns = len(handles) if in_one_line else -(-len(handles) // 2)
    fig.legend(handles=handles, loc="outside lower center", ncols=columns)


def _boxes(boxes: list[tuple[tuple[float, float], int]], colour, **options) -> PolyCollection:
    corners = [
        [(lo, row + BAR[0]), (hi, row + BAR[0]), (hi, row + BAR[1]), (lo, row + BAR[1])]
        for (lo, hi), row in boxes
    ]
    return PolyCollection(corners, facecolors=[colour], **{"linewidths": 0, **options})


def _colour(letter: str, chunk: int, num_chunks: int) -> tuple[float, ...]:
    most, towards = TINT[letter]
    share = most * chunk / max(num_chunks - 1, 1)
    pairs = zip(to_rgb(COLOURS[letter]), to_rgb(towards), strict=True)
    return tuple(part + (end - part) * share for part, end in pairs)


def _ink(colour: tuple[float, ...]) -> str:
    """Return what can be read on a colour."""
    red, green, blue = colour
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _messages(ax, data: Picture) -> None:
    """Draw the messages between neighbours, in the room between their rows.

    Those from the last rank back to the first, between chunks, would cross all others.
    """
    for kind, colour, shift in (
        ("activation", DARK_GREY, -SHIFT), ("grad", VERMILION, SHIFT),
    ):  # fmt: skip
        lines = []
        for source, dest, message in data.messages:
            if message.kind != kind or abs(source - dest) != 1:
                continue
            down = dest > source
            start = source + (BAR[1] if down else BAR[0])
            end = dest + (BAR[0] if down else BAR[1])
            sent, taken = message.sent_slot + shift, message.taken_slot + shift
            lines.append([(sent, start), (taken, end)])
        ax.add_collection(LineCollection(lines, colors=[colour], linewidths=1.0, zorder=3))


def _numbers(fig: Figure, ax, data: Picture) -> None:
    """Write the microbatch into each cell, unless cells are too narrow."""
    points = 0.8 * fig.get_size_inches()[0] * 72 / max(data.num_slots, 1)
    digits = max((len(str(cell.micro)) for cells in data.rows for cell in cells), default=1)
    size = min(8.0, 1.5 * points / digits)
    if size < 4.5 or sum(map(len, data.rows)) > MAX_LABELS:
        return
    for row, cells in enumerate(data.rows):
        for cell in cells:
            ax.text(
                cell.slot + 0.5, row, str(cell.micro), ha="center", va="center", fontsize=size,
                color=_ink(_colour(cell.letter, cell.chunk, data.num_chunks)),
            )  # fmt: skip


def _handles(data: Picture) -> list:
    letters = {cell.letter for cells in data.rows for cell in cells}
    handles: list = []
    for letter, label in LABELS.items():
        if letter not in letters:
            continue
        label = "backward, input half" if letter == "B" and "W" in letters else label
        for chunk in range(data.num_chunks):
            which = f", chunk {chunk}" if data.num_chunks > 1 else ""
            colour = _colour(letter, chunk, data.num_chunks)
            handles.append(Patch(color=colour, label=label + which))
    handles.append(Patch(color=LIGHT_GREY, alpha=0.45, label="idle"))
    kinds = {message.kind for source, dest, message in data.messages if abs(source - dest) == 1}
    if "activation" in kinds:
        handles.append(Line2D([], [], color=DARK_GREY, linewidth=1, label="activation"))
    if "grad" in kinds:
        handles.append(Line2D([], [], color=VERMILION, linewidth=1, label="gradient"))
    return handles


def main() -> int:
    """Write the picture and print its name; returns the exit status."""
    parser = argparse.ArgumentParser(prog="plots/plan.py", description=__doc__)
    parser.add_argument("plan", metavar="FILE", help="a plan text; - for standard input")
    parser.add_argument("--out", type=Path, metavar="PNG", default=Path("plan.png"))
    parser.add_argument("--title", default="", help="by default the plan's shape")
    options = parser.parse_args()
    try:
        text = sys.stdin.read() if options.plan == "-" else Path(options.plan).read_text("utf-8")
        data = load(parse_plan(text), options.title)
        with matplotlib.style.context(STYLE):
            fig = Figure()
            draw(fig, data)
            part = options.out.with_name(options.out.name + ".part")
            fig.savefig(part, format="png")
        part.replace(options.out)
    except (MpisimError, OSError, UnicodeDecodeError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
