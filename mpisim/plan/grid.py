"""A plan as a grid of text: one row per rank, one column per slot of time, what runs in the cells.

A slot is the time of one chunk's forward, of its backward, or of one half of a split backward:
all alike, as in the papers that the schedules come from. Messages take no time, but must be there.
The clock also draws a plan that cannot run, as far as it gets: errors show the place in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from mpisim.plan.build import Plan
from mpisim.plan.ops import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    LoadBatch,
    Op,
    Recompute,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    StartUnshard,
    WaitSend,
    WaitUnshard,
)

_LETTERS: dict[type[Op], str] = {
    Forward: "F",
    Backward: "B",
    BackwardInput: "B",
    BackwardWeight: "W",
}
_KINDS = {
    SendActivation: "activation",
    RecvActivation: "activation",
    SendGrad: "grad",
    RecvGrad: "grad",
}
_LEADS = (RecvActivation, RecvGrad, LoadBatch, StartUnshard, WaitUnshard, Recompute)
"""Ops that prepare the cell behind them; all others belong to the cell before them."""

_WIDTH = 100
"""Columns of text."""
_GAP = "..."
_IDLE = "."


@dataclass(frozen=True)
class Cell:
    """One chunk's forward, backward or half of a backward, of one microbatch."""

    letter: str
    """``F`` forward; ``B`` backward, or its input half; ``W`` its weight half."""
    micro: int
    chunk: int
    """The rank's own, 0 the nearest to the model's input."""
    slot: int
    first: int
    """Index of its first op among those of the rank."""
    marked: bool = False

    def label(self, num_chunks: int) -> str:
        """Return what is written in the cell, such as ``F3``, or ``F3b`` of a second chunk."""
        return f"{self.letter}{self.micro}" + (chunk_letter(self.chunk) if num_chunks > 1 else "")


@dataclass(frozen=True)
class Message:
    """A tensor that crosses from one rank to another."""

    kind: str
    """``activation`` or ``grad``."""
    micro: int
    source: int
    dest: int
    sent_slot: int
    """The slot at whose start it is on its way."""
    taken_slot: int
    """The slot at whose start the receiver takes it."""


@dataclass(frozen=True)
class Grid:
    """When everything of a plan runs, in slots."""

    ranks: tuple[tuple[Cell, ...], ...]
    """Cells per rank, in order."""
    messages: tuple[Message, ...]
    """Those that were taken, by receiver."""
    num_slots: int
    num_chunks: int

    @property
    def idle_share(self) -> Fraction:
        """Idle slots by all slots, until the last rank has ended."""
        total = self.num_slots * len(self.ranks)
        return Fraction(total - sum(map(len, self.ranks)), max(total, 1))


def lay_out(plan: Plan, marks: dict[int, int] | None = None) -> Grid:
    """Return when every cell of a plan runs.

    Parameters
    ----------
    plan : Plan
        It need not be one that can run: what waits for ever is left out.
    marks : dict of int to int, optional
        Rank -> index of the op it stands at: nothing behind it has run, and the cell that it
        belongs to is marked.
    """
    marks = marks or {}
    rows = [_Row(plan, rank, marks.get(rank)) for rank in range(len(plan.ranks))]
    sent: dict[tuple, int] = {}
    asked: dict[tuple, int] = {}
    messages: list[list[Message]] = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while row.position < row.end:
                op = plan.ranks[rank][row.position]
                if isinstance(op, (RecvActivation, RecvGrad)):
                    key = (_KINDS[type(op)], op.boundary, op.micro, op.peer, rank)
                    asked.setdefault(key, row.now)
                    if key not in sent:
                        break
                    row.now = max(row.now, sent[key])
                    kind, _, micro, source, dest = key
                    messages[rank].append(Message(kind, micro, source, dest, sent[key], row.now))
                elif isinstance(op, WaitSend):
                    key = (op.kind, op.boundary, op.micro, rank, op.peer)
                    if key not in asked:
                        break
                    row.now = max(row.now, asked[key])
                elif isinstance(op, (SendActivation, SendGrad)):
                    key = (_KINDS[type(op)], op.boundary, op.micro, rank, op.peer)
                    sent.setdefault(key, row.now)
                else:
                    row.run(op)
                row.position += 1
                moved = True
    for rank in marks.keys() & set(range(len(rows))):
        rows[rank].mark()
    num_slots = max((cell.slot + 1 for row in rows for cell in row.cells), default=0)
    return Grid(
        tuple(tuple(row.cells) for row in rows),
        tuple(message for taken in messages for message in taken),
        num_slots,
        max(1, len(plan.stages) // plan.mesh.pp),
    )


@dataclass
class _Row:
    """A rank on the clock."""

    plan: Plan
    rank: int
    stop: int | None
    """Index of the op it stands at for ever; None: it runs to its end."""
    position: int = 0
    now: int = 0
    cells: list[Cell] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chunks = {
            block: number
            for number, blocks in enumerate(self.plan.chunks(self.rank))
            for block in blocks
        }
        self.ops = self.plan.ranks[self.rank]
        self.end = len(self.ops) if self.stop is None else min(self.stop, len(self.ops))

    def key(self, op: Op) -> tuple[str, int, int] | None:
        """Return the letter, microbatch and chunk of the cell that a compute op makes."""
        letter = _LETTERS.get(type(op))
        return None if letter is None else (letter, op.micro, self.chunks.get(op.block, 0))

    def run(self, op: Op) -> None:
        """Give the first op of a cell its slot."""
        key = self.key(op)
        if key is not None and not (self.cells and _same(self.cells[-1], key)):
            self.cells.append(Cell(*key, self.now, self.position))
            self.now += 1

    def mark(self) -> None:
        """Mark the cell of the op that the rank stands at, and put it on the grid."""
        at = min(self.stop, len(self.ops) - 1)
        if at < 0:
            return
        ahead = next((n for n in range(at, len(self.ops)) if self.key(self.ops[n])), None)
        starts = ahead is not None and (
            ahead == at or not self.cells or isinstance(self.ops[at], _LEADS)
        )
        if starts:
            key = self.key(self.ops[ahead])
            # A replay may stand within the cell, and so may the next block of the chunk.
            if not (self.cells and _same(self.cells[-1], key)):
                self.cells.append(Cell(*key, self.now, ahead))
        if self.cells:
            self.cells[-1] = replace(self.cells[-1], marked=True)


def _same(cell: Cell, key: tuple[str, int, int]) -> bool:
    return (cell.letter, cell.micro, cell.chunk) == key


def chunk_letter(chunk: int) -> str:
    """Return what a rank's chunk is called in grids and pictures: a, b, and so on."""
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def draw_grid(plan: Plan, marks: dict[int, int] | None = None, width: int = _WIDTH) -> str:
    """Draw a plan as rank x slot.

    Parameters
    ----------
    plan : Plan
    marks : dict of int to int, optional
        See `lay_out`; the cell is drawn as ``>F3<``.
    width : int
        Columns of text at most: slots in the middle are left out, those near a mark are not.

    Returns
    -------
    str
        Lines without a newline at the end. Replicas that run alike share a row.
    """
    grid = lay_out(plan, marks)
    rows = share_rows(plan, grid, _near(plan, marks))
    names = [name for name, _ in rows]
    cells = [row for _, row in rows]
    num_slots = max((cell.slot + 1 for row in cells for cell in row), default=0)
    texts = [cell.label(grid.num_chunks) for row in cells for cell in row]
    marked = [cell.slot for row in cells for cell in row if cell.marked]
    cell_width = max(map(len, [*texts, str(max(num_slots - 1, 0))]))
    # A mark takes the blanks on both sides of its cell.
    blank = " " if marked else ""
    indent = max(map(len, [*names, "slot"])) + 4
    columns = _columns(num_slots, width - indent, cell_width + len(blank) + 1, marked)
    head = {slot: f"{blank}{slot}" for slot in range(num_slots)}
    lines = [_line("slot", indent, columns, head, cell_width + len(blank))]
    for name, row in zip(names, cells, strict=True):
        found = {slot: f"{blank}{_IDLE}" for slot in range(num_slots)}
        for cell in row:
            label = cell.label(grid.num_chunks)
            found[cell.slot] = f">{label}<" if cell.marked else f"{blank}{label}"
        lines.append(_line(name, indent, columns, found, cell_width + len(blank)))
    return "\n".join([*lines, f"  {_legend(plan, grid)}"])


def flight_note(num_chunks: int) -> str:
    """Return what is counted as microbatches in flight."""
    part = f"; one of its {num_chunks} chunks counts 1/{num_chunks}" if num_chunks > 1 else ""
    return f"in flight: most microbatches whose activations a rank keeps{part}"


def share_rows(plan: Plan, grid: Grid, ranks: Sequence[int]) -> list[tuple[str, tuple[Cell, ...]]]:
    """Return the rows of a grid, each with its name: replicas that run alike share one."""
    rows: dict[tuple[int, tuple[Cell, ...]], list[int]] = {}
    for rank in ranks:
        alike = tuple(replace(cell, first=0) for cell in grid.ranks[rank])
        rows.setdefault((plan.mesh.coordinate(rank)["pp"], alike), []).append(rank)
    return [(_rank_names(found), grid.ranks[found[0]]) for found in rows.values()]


def _near(plan: Plan, marks: dict[int, int] | None) -> list[int]:
    """Return the marked ranks and those that they trade messages with; without marks all."""
    if not marks:
        return list(range(len(plan.ranks)))
    return sorted({mate for rank in marks for mate in plan.mesh.group(rank, "pp")})


def _rank_names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 4:
        return "ranks " + ", ".join(map(str, ranks))
    return f"ranks {ranks[0]}, {ranks[1]} .. {ranks[-1]}"


def _columns(
    num_slots: int, width: int, cell_width: int, marked: Sequence[int]
) -> list[int | None]:
    """Return the slots that are drawn, in order; None: some are left out here."""
    if num_slots * cell_width <= width:
        return list(range(num_slots))
    anchors = sorted({0, num_slots - 1, *marked})
    # Something may be left out between any two of them.
    gaps = (len(anchors) - 1) * (max(len(_GAP) + 1, cell_width))
    room = max(len(anchors), (width - gaps) // cell_width)

    def distance(slot: int) -> int:
        return min(abs(slot - anchor) for anchor in anchors)

    kept = sorted(sorted(range(num_slots), key=distance)[:room])
    columns: list[int | None] = []
    for slot in kept:
        if columns and slot != columns[-1] + 1:
            columns.append(None)
        columns.append(slot)
    return columns


def _line(
    name: str,
    indent: int,
    columns: Sequence[int | None],
    texts: dict[int, str],
    cell_width: int,
) -> str:
    shown = (f"{_GAP} " if slot is None else texts[slot] for slot in columns)
    cells = (f"{text:<{cell_width + 1}}" for text in shown)
    return (f"  {name:<{indent - 2}}" + "".join(cells)).rstrip()


def _legend(plan: Plan, grid: Grid) -> str:
    letters = {cell.letter for cells in grid.ranks for cell in cells}
    backward = "input half of backward" if "W" in letters else "backward"
    names = {"F": "forward", "B": backward, "W": "weight half"}
    parts = [f"{letter} {names[letter]}" for letter in "FBW" if letter in letters]
    parts.append("number: microbatch")
    if grid.num_chunks > 1:
        last = chunk_letter(grid.num_chunks - 1)
        parts.append(f"a{', ' if grid.num_chunks == 2 else '..'}{last}: chunk of the rank")
    return ", ".join([*parts, f"{_IDLE} idle"])
