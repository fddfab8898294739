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
    DARK_GREY,
    LIGHT_GREY,
    STYLE,
    VERMILION,
    heading,
    ink,
    kind_colour,
    kind_handles,
    whole_numbers,
)
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mpisim.errors import MpisimError
from mpisim.mesh import stages_text
from mpisim.plan.build import Plan
from mpisim.plan.check_pipeline import in_flight
from mpisim.plan.grid import Cell, Message, chunk_letter, flight_note, lay_out, share_rows
from mpisim.plan.text import parse_plan

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
    rows: list[list[tuple[str, Cell]]]
    """Op kind and place of each cell, row by row."""
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
    stages = f"{stages_text(plan.mesh.pp, grid.num_chunks)}, " if plan.mesh.pp > 1 else ""
    notes = [
        f"{round(in_flight(plan, rank), 2):,} in flight" if plan.kind == "train" else ""
        for rank in first
    ]
    return Picture(
        title or f"{stages}{_count(len(plan.rows[0]), 'microbatch')} ({plan.name})",
        [name for name, _ in shared],
        notes,
        [
            [(type(plan.ranks[rank][cell.first]).__name__, cell) for cell in grid.ranks[rank]]
            for rank in first
        ],
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
    finding = _finding(data)
    fig.set_size_inches(
        min(max(8.0, 2.4 + 0.19 * slots), 18),
        min(1.6 + 0.42 * rows + 0.17 * len(finding), 20),
    )
    ax = fig.subplots()
    ax.set_xlim(0, slots)
    ax.set_ylim(rows - 0.5, -0.5)
    waits = [((0, slots), row) for row in range(rows)]
    ax.add_collection(_boxes(waits, LIGHT_GREY, alpha=0.45))
    boxes: dict[str, list] = {}
    for row, cells in enumerate(data.rows):
        for kind, cell in cells:
            colour = kind_colour(kind, cell.chunk, data.num_chunks)
            boxes.setdefault(colour, []).append(((cell.slot, cell.slot + 1), row))
    for colour, found in boxes.items():
        ax.add_collection(_boxes(found, colour, edgecolors="white", linewidths=0.6))
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
    heading(fig, data.title, "\n".join(finding))
    handles = _handles(data)
    in_one_line = 1.5 * len(handles) <= fig.get_size_inches()[0]
    columns = len(handles) if in_one_line else -(-len(handles) // 2)
    fig.legend(handles=handles, loc="outside lower center", ncols=columns)


def _finding(data: Picture) -> list[str]:
    """Return what is below the title, line by line."""
    idle = data.idle_share
    lines = [f"{idle.numerator}/{idle.denominator} of the slots are idle ({float(idle):.1%})"]
    if any(data.notes):
        lines.append(flight_note(data.num_chunks))
    if not all(_is_drawn(*message) for message in data.messages):
        which = " (last rank to first, and back)" if data.num_chunks > 1 else ""
        lines.append(f"messages between rows that are not neighbours{which} are not drawn")
    return lines


def _is_drawn(source: int, dest: int, _message: Message) -> bool:
    """Whether a message runs between neighbouring rows: others would cross all between."""
    return abs(source - dest) == 1


def _boxes(boxes: list[tuple[tuple[float, float], int]], colour, **options) -> PolyCollection:
    corners = [
        [(lo, row + BAR[0]), (hi, row + BAR[0]), (hi, row + BAR[1]), (lo, row + BAR[1])]
        for (lo, hi), row in boxes
    ]
    return PolyCollection(corners, facecolors=[colour], **{"linewidths": 0, **options})


def _messages(ax, data: Picture) -> None:
    """Draw the messages between neighbours, in the room between their rows."""
    for kind, colour, shift in (
        ("activation", DARK_GREY, -SHIFT), ("grad", VERMILION, SHIFT),
    ):  # fmt: skip
        lines = []
        for source, dest, message in data.messages:
            if message.kind != kind or not _is_drawn(source, dest, message):
                continue
            down = dest > source
            start = source + (BAR[1] if down else BAR[0])
            end = dest + (BAR[0] if down else BAR[1])
            sent, taken = message.sent_slot + shift, message.taken_slot + shift
            lines.append([(sent, start), (taken, end)])
        ax.add_collection(LineCollection(lines, colors=[colour], linewidths=1.0, zorder=3))


def _numbers(fig: Figure, ax, data: Picture) -> None:
    """Write microbatch and chunk into each cell, unless cells are too narrow."""
    points = 0.8 * fig.get_size_inches()[0] * 72 / max(data.num_slots, 1)
    texts = {
        cell: f"{cell.micro}" + (chunk_letter(cell.chunk) if data.num_chunks > 1 else "")
        for cells in data.rows
        for _, cell in cells
    }
    digits = max(map(len, texts.values()), default=1)
    size = min(8.0, 1.5 * points / digits)
    if size < 4.5 or sum(map(len, data.rows)) > MAX_LABELS:
        return
    for row, cells in enumerate(data.rows):
        for kind, cell in cells:
            ax.text(
                cell.slot + 0.5, row, texts[cell], ha="center", va="center", fontsize=size,
                color=ink(kind_colour(kind, cell.chunk, data.num_chunks)),
            )  # fmt: skip


def _handles(data: Picture) -> list:
    kinds = {kind for cells in data.rows for kind, _ in cells}
    handles: list = kind_handles(kinds, data.num_chunks)
    handles.append(Patch(color=LIGHT_GREY, alpha=0.45, label="idle"))
    kinds = {message[-1].kind for message in data.messages if _is_drawn(*message)}
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
