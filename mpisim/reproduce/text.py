"""Pages as text of at most 100 characters a line."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from mpisim.reproduce.rows import DERIVED, IRREPRODUCIBLE, Number, Page, Row, count

_WIDTH = 100
_LONG = 10**13  # from here on a number has nine digits and an exponent


def page_text(page: Page) -> str:
    """Return one page: what it is, its table, its flaws, its counts."""
    lines = [page.title, "=" * len(page.title), *_wrap(page.about), *_wrap(f"Rule: {page.rule}.")]
    lines += ["", *_table(page.rows), ""]
    for flaw in page.flaws:
        lines += _wrap(f"flaw: {flaw}", "      ")
    for item, cause in page.causes.items():
        lines += _wrap(f"known_irreproducible: {item}: {cause}", "      ")
    return "\n".join([*lines, _counts(f"{page.name}:", [page])])


def totals_text(pages: Sequence[Page]) -> str:
    """Return the counts of all pages."""
    width = max(len(page.name) for page in pages) + 1
    title = "All pages"
    lines = [title, "=" * len(title)]
    lines += [_counts(f"{page.name + ':':{width}}", [page]) for page in pages]
    return "\n".join([*lines, _counts(f"{'total:':{width}}", pages)])


def _counts(name: str, pages: Sequence[Page]) -> str:
    counts = count(row for page in pages for row in page.rows)
    gaps = f"{counts['gaps']} gaps ({counts['gaps_open']} open), " if counts["gaps"] else ""
    return (
        f"{name} {counts['ok']} ok, {counts['wrong']} wrong, "
        f"{counts['irreproducible']} irreproducible; {counts['derived']} derived "
        f"({counts['derived_wrong']} wrong), {gaps}{counts['shown']} shown only"
    )


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [("item", "published", "ours", "difference", "")]
    for row in rows:
        cells.append(
            (
                row.item,
                number_text(row.published),
                number_text(row.ours),
                number_text(row.difference, signed=True),
                _verdict(row),
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    return [
        "  ".join(
            f"{cell:{'<' if column in (0, 4) else '>'}{widths[column]}}"
            for column, cell in enumerate(line)
        ).rstrip()
        for line in cells
    ]


def _verdict(row: Row) -> str:
    if row.provenance == IRREPRODUCIBLE:
        return "irreproducible"
    if row.ok is None:
        return row.provenance
    mark = "" if row.provenance != DERIVED else " (derived)"
    return ("ok" if row.ok else "WRONG  <--") + mark


def number_text(value: Number | None, signed: bool = False) -> str:
    """Return a number for a table: printed ones with their digits, others with up to eight."""
    if value is None:
        return "-"
    if isinstance(value, Decimal):
        return f"{value:,f}"
    exact = Fraction(value)
    sign = "+" if signed and exact else ""
    if abs(exact) >= _LONG:
        return f"{float(exact):{sign}.9g}"
    if exact.denominator == 1:
        return f"{exact.numerator:{sign},}"
    digits = max(0, min(8, 7 - len(str(abs(int(exact))))))
    text = f"{float(exact):{sign},.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
