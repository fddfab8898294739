"""Rows and pages: one published value beside ours, and what counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from importlib.resources import files
from typing import Any

from mpisim.reproduce.rounding import agrees, evaluate, parse_printed

PRINTED, FIGURE_DATA, FORMULA = "printed", "figure-data", "printed formula"
DERIVED, IRREPRODUCIBLE = "derived", "known_irreproducible"
MEASURED, NAMED, CONTEXT = "measured", "named bytes", "context"

COUNTED = (PRINTED, FIGURE_DATA, FORMULA)
"""Provenances of the cells that a reproduction is judged by."""

Number = Fraction | Decimal | int


@dataclass(frozen=True)
class Row:
    """One line: a published value and ours."""

    item: str
    published: Number | None
    ours: Number | None
    provenance: str
    ok: bool | None
    """None where nothing is compared; see `reproduce`."""
    difference: Number | None = None
    """ours - published where both are there."""

    def as_json(self, page: str) -> dict[str, Any]:
        """Return the row with its page as plain JSON; numbers as the nearest float."""
        return {
            "page": page,
            "item": self.item,
            "published": _plain(self.published),
            "ours": _plain(self.ours),
            "difference": _plain(self.difference),
            "provenance": self.provenance,
            "ok": self.ok,
        }


@dataclass
class Page:
    """One page: what it is about, its rows, and what was noticed."""

    name: str
    title: str
    about: str
    """What is compared, its source and its unit."""
    rule: str
    """When a cell is right."""
    rows: list[Row] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    """What is wrong, or may mislead, in the published values."""
    causes: dict[str, str] = field(default_factory=dict)
    """Item of a known_irreproducible row -> why it cannot be recovered."""

    def printed(self, item: str, text: str | int, ours: Number, provenance: str = PRINTED) -> None:
        """Compare ours with a printed number, by its digits."""
        value = parse_printed(str(text))
        self.rows.append(_row(item, value, ours, provenance, agrees(ours, value)))

    def formula(
        self,
        item: str,
        text: str,
        names: Mapping[str, int],
        ours: Number,
        provenance: str = FORMULA,
    ) -> None:
        """Compare ours with a published formula, exactly, at one set of sizes."""
        value = evaluate(text, names)
        self.rows.append(_row(item, value, ours, provenance, value == ours))

    def irreproducible(self, item: str, text: str, ours: Number | None, cause: str) -> None:
        """Show a published value that cannot be recovered, and why."""
        value = Fraction(text) if "/" in text else parse_printed(text)
        self.rows.append(_row(item, value, ours, IRREPRODUCIBLE, None))
        self.causes[item] = cause

    def aside(
        self, item: str, published: Number | None, ours: Number | None, provenance: str
    ) -> None:
        """Show values side by side that no rule compares."""
        self.rows.append(_row(item, published, ours, provenance, None))


def _row(
    item: str, published: Number | None, ours: Number | None, provenance: str, ok: bool | None
) -> Row:
    difference = None
    if published is not None and ours is not None:
        difference = Fraction(ours) - Fraction(published)
    return Row(item, published, ours, provenance, ok, difference)


def count(rows: Iterable[Row]) -> dict[str, int]:
    """Return how many rows are ok, wrong, irreproducible, derived, gaps, or only shown.

    derived and gaps are all of their kind; derived_wrong and gaps_open are those not ok.
    """
    names = ("ok", "wrong", "irreproducible", "derived", "derived_wrong", "gaps", "gaps_open")
    counts = dict.fromkeys((*names, "shown"), 0)
    for row in rows:
        if row.provenance == IRREPRODUCIBLE:
            counts["irreproducible"] += 1
        elif row.ok is None:
            counts["shown"] += 1
        elif row.provenance in COUNTED:
            counts["ok" if row.ok else "wrong"] += 1
        else:
            kind, bad = {DERIVED: ("derived", "derived_wrong")}.get(
                row.provenance, ("gaps", "gaps_open")
            )
            counts[kind] += 1
            counts[bad] += not row.ok
    return counts


def read_oracle(name: str) -> dict[str, Any]:
    """Return the published values of ``oracles/NAME.json``."""
    path = files("mpisim.reproduce").joinpath("oracles", f"{name}.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _plain(value: Number | None) -> int | float | None:
    if value is None:
        return None
    exact = Fraction(value)
    return exact.numerator if exact.denominator == 1 else float(exact)
