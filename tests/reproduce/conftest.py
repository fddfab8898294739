"""The oracles, and copies of them that are wrong."""

from __future__ import annotations

import copy

import pytest

from mpisim.reproduce.rows import read_oracle

LABELS = {"source", "unit", "note", "provenance", "columns", "order", "known_irreproducible"}
KEYS = {"dp", "mp", "gpus", "p", "m", "F", "B"}
"""Entries that find a cell; all others are cells."""


def damage(value, key=""):
    """Return an oracle with every published cell another number or formula.

    By two: where rounding and truncation are both right, one more may be right too.
    """
    if isinstance(value, dict):
        return {
            name: cell if name in LABELS or (name in KEYS and isinstance(cell, int))
            else damage(cell, name)
            for name, cell in value.items()
        }  # fmt: skip
    if isinstance(value, list):
        return [damage(cell, key) for cell in value]
    if isinstance(value, int):
        return value + 2
    if isinstance(value, float):
        return value + 2.0
    suffix = value[-1] if value[-1] in "BT" and value[0].isdigit() else ""
    number = value.removesuffix(suffix)
    if number.replace(".", "", 1).isdigit():
        whole, dot, decimals = number.partition(".")
        return f"{int(whole) + 2}{dot}{decimals}{suffix}"
    return f"({value}) + 1"


@pytest.fixture
def wrong():
    """Return a reader of oracles in which every cell is wrong."""
    return lambda name: damage(copy.deepcopy(read_oracle(name)))
