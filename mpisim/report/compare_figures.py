"""What came out of two runs, as rows of `compare.py`: figures, traffic, stalls, memory peaks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mpisim.report.load import Run
from mpisim.report.rows import Row

SIDES = ("a", "b")

Sections = dict[str, list[Row]]
"""Rows of one run's report by section."""


def as_float(value: Any) -> float:
    """Return a figure as a float; NaN for whatever is no number."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            pass
    return math.nan


def loss_unit(run: Run) -> str:
    """Return what a run's losses are counted in."""
    return "squared error" if run.config.get("data", {}).get("kind") == "regression" else "nats"


# Figures --------------------------------------------------------------------------------------


def figures(runs: tuple[Run, Run], sections: tuple[Sections, Sections]) -> list[Row]:
    """Return one row per figure that a run has; figures of different units are two rows."""
    found = [
        _losses_of(run, parts) | _times_of(run, parts)
        for run, parts in zip(runs, sections, strict=True)
    ]
    rows = []
    for name, unit in dict.fromkeys([*found[0], *found[1]]):
        row: Row = {"section": "figure", "name": name, "unit": unit}
        for side, each in zip(SIDES, found, strict=True):
            row[side], row[f"{side}_step"] = each.get((name, unit), (None, None))
        rows.append({**row, "ratio": _ratio(row["a"], row["b"])})
    return rows


Figures = dict[tuple[str, str], tuple[Any, int | None]]
"""(name, unit) -> (value, step it belongs to)."""


def _losses_of(run: Run, parts: Sections) -> Figures:
    found: Figures = {}
    for row in parts.get("loss", ()):
        for when in ("first", "last"):
            found[f"{when} loss", row["unit"]] = (row[f"{when}_loss"], row[f"{when}_step"])
    if run.evaluations:
        row = run.evaluations[-1]
        step, loss, unit = row["step"], as_float(row["heldout_loss"]), loss_unit(run)
        found["held-out loss", unit] = (loss, step)
        bits = row.get("heldout_bits_per_byte")
        if bits is None and unit == "nats" and run.config.get("model", {}).get("kind") == "mlp":
            bits = loss / math.log(2)  # each of its targets is one byte
        for name, of_unit, value in (
            ("held-out bits per byte", "bits", bits),
            ("held-out perplexity", "", row.get("heldout_perplexity")),
            ("held-out top-1", "share", row.get("heldout_top1")),
        ):
            if value is not None:
                found[name, of_unit] = (value, step)
    skipped = [row["skipped"] for row in run.steps if row.get("skipped") is not None]
    if skipped:
        found["skipped steps", "steps"] = (sum(map(bool, skipped)), None)
    scales = [row for row in run.steps if row.get("loss_scale") is not None]
    if scales:
        found["last loss scale", ""] = (scales[-1]["loss_scale"], scales[-1]["step"])
    return found


def _times_of(run: Run, parts: Sections) -> Figures:
    found: Figures = {}
    kind = run.config.get("data", {}).get("kind")
    for row in parts.get("throughput", ()):
        unit = "rows/s" if kind == "regression" else "tokens/s"
        found["throughput", unit] = (row["tokens_per_s"], None)
    for row in parts.get("latency", ()):
        for name in ("p50", "p95"):
            found[f"step {name}", "s"] = (row[f"{name}_s"], None)
    waited = [row["stall_s_per_step"] for row in parts.get("steady_stalls", ())]
    if waited:
        found["stall per step", "s"] = (sum(waited), None)
    wall_s = parts["run"][0]["wall_s"]
    if wall_s is not None:
        found["wall time", "s"] = (wall_s, None)
    return found


def _ratio(a: Any, b: Any) -> float | None:
    a, b = as_float(a), as_float(b)
    return b / a if a and math.isfinite(a) and math.isfinite(b) else None


# Traffic, stalls, memory ------------------------------------------------------------------------


def traffic(sections: tuple[Sections, Sections]) -> list[Row]:
    """Return messages and bytes that all ranks sent, one row each per channel."""
    sides = [_sent(parts) for parts in sections]
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        axis, collective, what = key
        row: Row = {"section": "traffic", "axis": axis, "collective": collective, "what": what}
        for side, sent in zip(SIDES, sides, strict=True):
            row[side], row[f"{side}_predicted"] = sent.get(key, (None, None))
        rows.append({**row, "ratio": _ratio(row["a"], row["b"])})
    return rows


def _sent(parts: Sections) -> dict[tuple[str, str, str], tuple[int, int | None]]:
    """Return (measured, predicted) of all ranks by (axis, collective, what)."""
    found: dict[tuple[str, str, str], tuple[int, int | None]] = {}
    ranks = parts["run"][0]["ranks"]
    for row in _of_sends(parts.get("traffic", ())):
        for what in ("messages", "bytes"):
            key = (row["axis"], row["collective"], what)
            measured, predicted = found.get(key, (0, 0))
            found[key] = (measured + row[what], (predicted or 0) + row[f"predicted_{what}"])
    for row in _of_sends(parts.get("traffic_so_far", ())):
        for what in ("messages", "bytes"):
            total = round(row[f"mean_{what}"] * ranks)
            found[row["axis"], row["collective"], what] = (total, None)
    return found


def _of_sends(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["direction"] == "sent"]


def pipeline(sections: tuple[Sections, Sections]) -> list[Row]:
    """Return the idle shares of stages, one row each; none if neither run has stages."""
    heads = [(parts.get("pipeline") or [{}])[0] for parts in sections]
    names = {
        "closed_form_bubble": "share", "replayed_idle_share": "share", "idle_share": "share",
        "replayed_step_s": "s",
    }  # fmt: skip
    rows = []
    for name, unit in names.items():
        values = [head.get(name) for head in heads]
        if values != [None, None]:
            row = {"section": "pipeline", "name": name, "unit": unit}
            rows.append({**row, "a": values[0], "b": values[1]})
    return rows


def stalls(sections: tuple[Sections, Sections]) -> list[Row]:
    """Return seconds waited per step, mean over ranks, by axis and cause."""
    sides = [
        {(row["axis"], row["cause"]): row for row in parts.get("steady_stalls", ())}
        for parts in sections
    ]
    rows = []
    for axis, cause in dict.fromkeys([*sides[0], *sides[1]]):
        row: Row = {"section": "stalls", "axis": axis, "cause": cause}
        for side, found in zip(SIDES, sides, strict=True):
            waited = found.get((axis, cause), {})
            row[f"{side}_s_per_step"] = waited.get("stall_s_per_step")
            row[f"{side}_share_of_step_time"] = waited.get("share_of_step_time")
        rows.append(row)
    return rows


def memory(sections: tuple[Sections, Sections]) -> list[Row]:
    """Return the peak bytes of the largest rank, by category."""
    sides = [_peaks(parts) for parts in sections]
    rows = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        row: Row = {"section": "memory", "category": name}
        for side, peaks in zip(SIDES, sides, strict=True):
            row[side], row[f"{side}_predicted"] = peaks.get(name, (None, None))
        rows.append({**row, "ratio": _ratio(row["a"], row["b"])})
    return rows


def _peaks(parts: Sections) -> dict[str, tuple[int | None, int | None]]:
    """Return the (measured, predicted) peak of the largest rank by category."""
    by_category: dict[str, list[Row]] = {}
    for row in parts.get("memory", ()):
        by_category.setdefault(row["category"], []).append(row)
    found: dict[str, tuple[int | None, int | None]] = {}
    for name, rows in by_category.items():
        values = [
            [row[key] for row in rows if row[key] is not None]
            for key in ("peak_bytes", "predicted_peak_bytes")
        ]
        found[name] = (max(values[0], default=None), max(values[1], default=None))
    for row in parts.get("memory_so_far", ()):
        found[row["category"]] = (row["max_peak_bytes"], None)
    return found
