"""Rows laid out as text: columns of one width, ranks that say the same on one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mpisim.report.rows import Row

MARK = "  <-- DIFFERS"
"""At the end of a line whose figures are not what was predicted."""


def plural(number: int) -> str:
    """Return the ending of a word that is counted."""
    return "" if number == 1 else "s"


def merge_ranks(
    rows: Iterable[Row], keys: Sequence[str], values: Callable[[Row], tuple]
) -> list[tuple[str, Row]]:
    """Join the rows of ranks that say the same, key by key; returns (ranks as text, row)."""
    by_key: dict[tuple, dict[tuple, list[Row]]] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        by_key.setdefault(key, {}).setdefault(values(row), []).append(row)
    return [
        (ranges([row["rank"] for row in same]), same[0])
        for groups in by_key.values()
        for same in groups.values()
    ]


def ranges(ranks: list[int]) -> str:
    """Return sorted numbers as text, such as ``0, 2-5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in parts)


def lay_table(columns: list[tuple[str, str]], rows: list[list[str]]) -> list[str]:
    """Return a head and one line per row; columns are (name, "<" or ">")."""
    widths = [
        max(len(name), *(len(row[number]) for row in rows)) if rows else len(name)
        for number, (name, _) in enumerate(columns)
    ]
    lines = [[name for name, _ in columns], *rows]
    return [
        (
            "  "
            + "  ".join(
                f"{cell:{side}{width}}"
                for cell, (_, side), width in zip(line, columns, widths, strict=True)
            )
        ).rstrip()
        for line in lines
    ]
