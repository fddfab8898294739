"""Ranks whose memory would have passed the budget: what each left in `memory-rank-0002.json`.

Section `over_budget`, one row per rank. A rank that was ended while it wrote leaves less, or a file
that cannot be read; the row then says so.
"""

from __future__ import annotations

import json
from typing import Any

from mpisim.report.load import Run
from mpisim.units import format_bytes

_FIELDS = (
    "step", "op", "block", "micro", "budget_bytes", "held_bytes", "asked_bytes", "measured_bytes",
    "missing_bytes", "predicted_peak_bytes",
)  # fmt: skip


def excess_rows(run: Run) -> list[dict[str, Any]]:
    """Return one row per record in the run directory, by rank."""
    rows = []
    for path in sorted(run.path.glob("memory-rank-*.json")):
        row: dict[str, Any] = {"section": "over_budget", "file": path.name}
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            row["rank"] = int(record["rank"])
            row |= {name: record.get(name) for name in _FIELDS}
            live = record.get("live") or {}
            row |= {f"live_{name}_bytes": int(nbytes) for name, nbytes in live.items()}
            change = record.get("smallest_change") or {}
            row["smallest_change"] = change.get("options")
            row["advice"] = record.get("advice")
            row["readable"] = True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            row |= {"rank": None, "readable": False}
        rows.append(row)
    return rows


def excess_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows as text."""
    lines = []
    for row in rows:
        if not row["readable"]:
            lines.append(f"damaged: {row['file']} cannot be read")
            continue
        missing = row["missing_bytes"]
        beyond = "" if missing is None else f", {missing} bytes too few"
        held = ", ".join(
            f"{name[len('live_') : -len('_bytes')]} {format_bytes(nbytes)}"
            for name, nbytes in row.items()
            if name.startswith("live_") and nbytes
        )
        step = "before the first step" if row["step"] is None else f"at step {row['step']}"
        lines.append(
            f"OVER BUDGET: rank {row['rank']} {step} in {row['op']}; budget "
            f"{row['budget_bytes']}{beyond}; held {row['held_bytes']} ({held})"
        )
    advice = dict.fromkeys(row["advice"] for row in rows if row.get("advice"))
    return lines + [f"  {text}" for text in advice]
