"""What a search found, as rows for programs and as a table for people.

Plain text where it is read by a program or kept in a file; on a terminal the same cells by rich.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpisim.mesh import stages_text
from mpisim.planner.search import Search, layout_facts
from mpisim.train.changes import FLOPS_PER_BYTE
from mpisim.train.fit import breakdown
from mpisim.units import format_bytes

MOST_LINES = 12
"""Layouts of each kind that the table shows; `--json` has all."""

_HEAD = (
    "microbatches", "recompute", "zero", "bucket", "numbers", "peak", "bytes moved", "recomputed",
)  # fmt: skip

Cells = list[list[str]]


def search_rows(search: Search) -> list[dict[str, Any]]:
    """Return one row per layout: those that fit, best first, then the others, nearest first."""
    rows = []
    for place, layout in enumerate((*search.fits, *search.rejected)):
        facts = layout_facts(layout, search.budget_bytes)
        rows.append(
            {
                "ranks": search.ranks,
                "budget_bytes": search.budget_bytes,
                "with_data": search.with_data,
                "place": place + 1 if facts["fits"] else None,
                **facts,
                "why": "" if facts["fits"] else _why(facts),
            }
        )
    return rows


def search_text(search: Search, terminal_columns: int | None = None) -> str:
    """Return what was found, for people.

    Parameters
    ----------
    search : Search
    terminal_columns : int, optional
        Draw with rich, so many characters wide; by default plain text.
    """
    facts = [layout_facts(layout, search.budget_bytes) for layout in search.fits]
    others = [layout_facts(layout, search.budget_bytes) for layout in search.rejected]
    data = (
        f"data set {format_bytes(search.sizes.data_bytes)} included"
        if search.with_data
        else "without the data set: all peaks are lower bounds"
    )
    parts = [
        f"{_ranks(search)}, {format_bytes(search.budget_bytes)} each ({search.budget_bytes} "
        f"bytes; {data}): {len(facts) + len(others)} layouts tried, {len(facts)} fit"
    ]
    draw = _plain_table if terminal_columns is None else _rich_table(terminal_columns)
    if facts:
        parts.append(draw("fit, best first", [*_HEAD, "to spare"], _fitting(facts)))
        parts += _left_out(len(facts))
    if others:
        parts.append(draw("do not fit, nearest first", [*_HEAD, "why"], _failing(others)))
        parts += _left_out(len(others))
    if any(entry["changes_numbers"] for entry in [*facts[:MOST_LINES], *others[:MOST_LINES]]):
        parts.append("* rounds numbers otherwise than the config does: other losses, other weights")
    if facts:
        parts.append(
            f"order: bytes moved by all ranks in a step, and recomputed flops ({FLOPS_PER_BYTE} "
            f"count as a byte)"
        )
    parts.append(_verdict(search))
    return "\n".join(parts) + "\n"


def _ranks(search: Search) -> str:
    """Return how many ranks there are, and of a pipeline what all layouts have in common."""
    parallel = search.config.parallel
    text = f"{search.ranks} rank{'s' * (search.ranks > 1)}"
    if parallel.pp == 1:
        return text
    stages = stages_text(parallel.pp, parallel.chunks)
    return (
        f"{text} (dp {search.ranks // parallel.pp} x pp {parallel.pp}, {parallel.schedule}, "
        f"{stages})"
    )


def _verdict(search: Search) -> str:
    chosen = search.chosen
    if chosen is not None:
        return (
            f"chosen: {chosen.options or 'the config as it is'} (peak {chosen.peak_total} bytes on "
            f"rank {chosen.worst.rank} in {chosen.worst.peak_op})"
        )
    nearest = search.rejected[0]
    if search.sizes.data_bytes >= search.budget_bytes:
        return (
            f"nothing fits: the data set alone keeps {search.sizes.data_bytes} bytes. Use "
            f"less of it (data.max_bytes, data.num_rows), or give at least {nearest.peak_total} "
            f"bytes"
        )
    return (
        f"nothing fits. The nearest layout is {nearest.options or 'the config as it is'}: its peak "
        f"of {nearest.peak_total} bytes is {nearest.peak_total - search.budget_bytes} bytes too "
        f"many, on rank {nearest.worst.rank} in {nearest.worst.peak_op} "
        f"({breakdown(nearest.worst.at_peak)})"
    )


def _left_out(count: int) -> list[str]:
    return [f"... and {count - MOST_LINES} more (see --json)"] if count > MOST_LINES else []


def _fitting(facts: list[dict[str, Any]]) -> Cells:
    return [[*_cells(entry), format_bytes(entry["spare_bytes"])] for entry in facts[:MOST_LINES]]


def _failing(facts: list[dict[str, Any]]) -> Cells:
    return [[*_cells(entry), _why(entry)] for entry in facts[:MOST_LINES]]


def _why(entry: dict[str, Any]) -> str:
    return (
        f"{entry['missing_bytes']} bytes too many; most is {entry['dominant']} "
        f"({format_bytes(entry['dominant_bytes'])}) in {entry['peak_op']}"
    )


def _cells(entry: dict[str, Any]) -> list[str]:
    recompute = entry["recompute"]
    if recompute == "full" and entry["recompute_every"] > 1:
        recompute += f"/{entry['recompute_every']}"
    numbers = "as set"
    if entry["changes_numbers"]:
        numbers = f"{entry['compute']}*"
        if entry["reduce"] == "bfloat16":
            numbers += " reduce too"
    # With stages, too, every block is a bucket of its own.
    by_block = entry["zero"] == 3 or entry["pp"] > 1 or not entry["bucket_bytes"]
    return [
        str(entry["num_microbatches"]),
        recompute,
        f"{entry['zero']}{' prefetch' if entry['prefetch'] else ''}",
        "by block" if by_block else format_bytes(entry["bucket_bytes"]),
        numbers,
        format_bytes(entry["peak_bytes"]),
        format_bytes(entry["bytes_moved"]),
        f"{entry['recomputed_flops']:.3g}",
    ]


def _plain_table(title: str, head: Sequence[str], cells: Cells) -> str:
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = ["", f"{title}:"]
    for line in [list(head), *cells]:
        *numbers, last = line
        padded = [word.rjust(width) for word, width in zip(numbers, widths, strict=False)]
        lines.append("  ".join([*padded, last]).rstrip())
    return "\n".join(lines)


def _rich_table(columns: int):
    """Return what draws a table `columns` characters wide with rich."""
    from io import StringIO

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    def draw(title: str, head: Sequence[str], cells: Cells) -> str:
        table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
        for name in head[:-1]:
            table.add_column(name, justify="right")
        table.add_column(head[-1], overflow="fold")
        for place, line in enumerate(cells):
            table.add_row(*line, style="bold" if place == 0 and head[-1] != "why" else None)
        screen = StringIO()
        Console(file=screen, width=columns, force_terminal=True, highlight=False).print(table)
        return screen.getvalue().rstrip("\n")

    return draw
