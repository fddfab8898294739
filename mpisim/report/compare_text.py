"""Rows of `compare.py` as tables for people. No number is computed here that they do not have."""

from __future__ import annotations

import json
from typing import Any

from mpisim.report.rows import Row
from mpisim.report.tables import MARK, lay_table
from mpisim.report.text import CAUSES, collective_name
from mpisim.units import format_bytes, format_seconds

_LONGEST_CELL = 34
"""Values up to this long stand side by side, longer ones below each other."""

_MOST_ALONE = 5
"""Fields that one run alone has, as between versions, up to which they are listed."""


def make_compare_text(rows: list[Row]) -> str:
    """Return the tables of `compare.compare_rows` as one string that ends with a line break."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(row["section"], []).append(row)
    lines = [*_alarms(sections), *_head(sections)]
    parts = (_inputs, _curves, _figures, _traffic, _pipeline, _stalls, _memory, _verdicts)
    for part in parts:
        made = part(sections)
        if made:
            lines += ["", *made]
    return "\n".join(lines) + "\n"


# What went in ---------------------------------------------------------------------------------


def _alarms(sections: dict[str, list[Row]]) -> list[str]:
    lines = []
    for row in sections["run"]:
        side = row["run"].upper()
        if row["status"] != "done":
            lines.append(
                f"INCOMPLETE: {side} has no summary.json: it was cut short, or still goes on; "
                f"{row['steps_made']} of {row['steps_planned']} steps are compared"
            )
        if row["figures_differing"]:
            lines.append(
                f"DIFFERENCE: in {side} measured is not what was predicted; see `mpisim report "
                f"{_clean(row['path'])}`"
            )
        if row["damaged_lines"]:
            lines.append(
                f"damaged: {row['damaged_lines']} line(s) of metrics.jsonl of {side} are "
                f"incomplete and left out"
            )
    return lines


def _head(sections: dict[str, list[Row]]) -> list[str]:
    table = []
    for row in sections["run"]:
        hosts = f" on {row['hosts']} hosts" if row["hosts"] > 1 else ""
        made, planned = row["steps_made"], row["steps_planned"]
        table.append(
            [
                row["run"].upper(),
                _clean(row["path"]),
                f"{row['ranks']} rank{'' if row['ranks'] == 1 else 's'}{hosts}",
                f"{made} steps" if made == planned else f"{made} of {planned} steps",
                _clean(row["transport"]),
            ]
        )
    return [line[2:] for line in lay_table([("", "<")] * 5, table)[1:]]


def _inputs(sections: dict[str, list[Row]]) -> list[str]:
    lines = []
    for section, what in (("config", "config"), ("machine", "versions and machine")):
        rows = sections.get(section, [])
        count = f"{len(rows)} field{'s' * (len(rows) > 1)}" if rows else "nothing"
        lines.append(f"{what}: {count} differ{'s' * (len(rows) < 2)}")
        lines += _facts(rows)
    data, *rest = sections["data"]
    if data["same"] is None:
        lines.append("data: unknown whether it is the same, a sha256 is missing")
    elif data["same"]:
        lines.append(f"data: the same bytes (sha256 {_clean(data['a'])[:16]})")
    else:
        lines.append("data: DIFFERENT bytes")
        rest = [data, *rest]
    return lines + _facts(rest)


def _facts(rows: list[Row]) -> list[str]:
    """Lay values side by side, or below each other where one is long."""
    if not rows:
        return []
    lines, cells = [], []
    for side in ("a", "b"):
        only = [row for row in rows if row.get("only_in") == side]
        if len(only) > _MOST_ALONE:
            rows = [row for row in rows if row.get("only_in") != side]
            lines.append(f"  {len(only)} fields in {side.upper()} only (--json lists them)")
    for row in rows:
        absent = {"a": "b", "b": "a"}.get(row.get("only_in"))
        cells.append(
            [
                _clean(row["field"]),
                *("(none)" if side == absent else json.dumps(row[side]) for side in ("a", "b")),
            ]
        )
    short = [line for line in cells if max(len(line[1]), len(line[2])) <= _LONGEST_CELL]
    table = lay_table([("field", "<"), ("A", "<"), ("B", "<")], short) if short else []
    for field, a, b in cells:
        if max(len(a), len(b)) > _LONGEST_CELL:
            table += [f"  {field}", f"    A  {a}", f"    B  {b}"]
    return table + lines


def _clean(text: Any) -> str:
    """Keep from the terminal what could act on it: texts come from files."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


# What came out ----------------------------------------------------------------------------------


def _curves(sections: dict[str, list[Row]]) -> list[str]:
    lines = []
    titles = {"curve": "training loss", "heldout": "held-out loss"}
    for (section, title), verdict in zip(titles.items(), sections["verdict"], strict=True):
        rows = sections.get(section, [])
        if not rows or (section == "heldout" and len(rows) < 2):
            continue  # a single evaluation stands among the figures
        count, total = len(rows), verdict["common_steps"]
        which = "all" if count == total else f"{count} of"
        lines.append(
            f"{title}, {verdict['a_unit']}: {which} {total} common step{'s' * (total > 1)}"
        )
        lines += lay_table(
            [("step", ">"), ("A", ">"), ("B", ">"), ("B - A", ">")],
            [
                [str(row["step"]), _loss(row["a"]), _loss(row["b"]), _difference(row["difference"])]
                for row in rows
            ],
        )
    return lines


def _loss(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.6f}" if abs(value) < 1e5 else f"{value:.6e}"


def _difference(value: float | None) -> str:
    if value is None:
        return "not finite"
    return "0" if value == 0 else f"{value:+.3g}"


def _figures(sections: dict[str, list[Row]]) -> list[str]:
    table = []
    for row in sections.get("figure", []):
        name, unit = row["name"], row["unit"]
        if unit in ("nats", "squared error"):
            name += f", {unit}"
        steps = [row[f"{side}_step"] for side in ("a", "b")]
        known = {step for step in steps if step is not None}
        if len(known) == 1:
            name += f" (step {known.pop()})"
        elif known:
            name += f" (steps {steps[0]}, {steps[1]})"
        sides = [_figure(row[side], unit) for side in ("a", "b")]
        table.append([name, *sides, _times(row["ratio"])])
    if not table:
        return ["figures: no step was finished"]
    columns = [("", "<"), ("A", ">"), ("B", ">"), ("B / A", ">")]
    return ["figures; rates, latency and stalls are without warm-up", *lay_table(columns, table)]


def _figure(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return _time(value)
    if unit in ("tokens/s", "rows/s"):
        return f"{value:,.0f} {unit}"
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "0 s"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3g}"


def _traffic(sections: dict[str, list[Row]]) -> list[str]:
    table = []
    for row in sections.get("traffic", []):
        counts = [row["a"], row["a_predicted"], row["b"], row["b_predicted"]]
        if not any(counts):
            continue
        off = any(
            measured is not None and predicted is not None and measured != predicted
            for measured, predicted in (counts[:2], counts[2:])
        )
        table.append(
            [
                f"{row['axis']} {collective_name(row)}", row["what"], *map(_count, counts),
                _times(row["ratio"]), MARK if off else "",
            ]
        )  # fmt: skip
    if not table:
        return ["traffic: no message in either run"]
    columns = [
        ("channel", "<"), ("", "<"), ("A", ">"), ("table", ">"), ("B", ">"), ("table", ">"),
        ("B / A", ">"), ("", "<"),
    ]  # fmt: skip
    cut = [row["run"].upper() for row in sections["run"] if row["status"] != "done"]
    part = f" ({' and '.join(cut)}: of the training steps made)" if cut else ""
    title = f"traffic sent by all ranks{part}: measured beside the step tables"
    return [title, *lay_table(columns, table)]


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


_IDLE = {
    "closed_form_bubble": "idle by the closed form, stages equal",
    "replayed_idle_share": "idle in a replay, messages free",
    "idle_share": "idle as measured",
    "replayed_step_s": "step in the replay",
}


def _pipeline(sections: dict[str, list[Row]]) -> list[str]:
    rows = sections.get("pipeline", [])
    if not rows:
        return []
    layouts = [
        f"{run['run'].upper()} dp {run['dp']} x pp {run['pp']}"
        + (f", {run['schedule']}" if run["schedule"] else "")
        for run in sections["run"]
    ]
    table = [
        [_IDLE[row["name"]], *(_figure(row[side], row["unit"]) for side in ("a", "b"))]
        for row in rows
    ]
    columns = [("", "<"), ("A", ">"), ("B", ">")]
    return [f"stages: {_clean('; '.join(layouts))}", *lay_table(columns, table)]


def _stalls(sections: dict[str, list[Row]]) -> list[str]:
    table = []
    stages = "pipeline" in sections
    for row in sections.get("stalls", []):
        if row["axis"] == "pp" and not (stages or row["a_s_per_step"] or row["b_s_per_step"]):
            continue
        cells = [f"{row['axis']} {CAUSES.get(row['cause'], row['cause'])}"]
        for side in ("a", "b"):
            seconds, share = row[f"{side}_s_per_step"], row[f"{side}_share_of_step_time"]
            cells.append("-" if seconds is None else _time(seconds))
            cells.append("-" if share is None else f"{share:.1%}")
        table.append(cells)
    if not table:
        return []
    columns = [("waited for", "<"), ("A", ">"), ("", ">"), ("B", ">"), ("", ">")]
    title = "stalls of a step, mean over ranks, without warm-up, and their share of step time"
    return [title, *lay_table(columns, table)]


def _memory(sections: dict[str, list[Row]]) -> list[str]:
    table = []
    for row in sections.get("memory", []):
        if not (row["a"] or row["b"]):
            continue
        pairs = [(row[side], row[f"{side}_predicted"]) for side in ("a", "b")]
        off = any(p is not None and m is not None and m != p for m, p in pairs)
        cells = [row["category"]]
        for measured, predicted in pairs:
            cells += [_size(measured), _size(predicted)]
        table.append([*cells, _times(row["ratio"]), MARK if off else ""])
    if not table:
        return []
    columns = [
        ("category", "<"), ("A", ">"), ("predicted", ">"), ("B", ">"), ("predicted", ">"),
        ("B / A", ">"), ("", "<"),
    ]  # fmt: skip
    return ["memory: peak of the largest rank", *lay_table(columns, table)]


def _size(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


# The end ----------------------------------------------------------------------------------------


def _verdicts(sections: dict[str, list[Row]]) -> list[str]:
    lines = []
    for row in sections["verdict"]:
        if row["curve"] == "training" or row["common_steps"]:
            lines.append(f"verdict: {_verdict(row)}")
    return [*lines, *_weights(sections["weights"][0])]


def _weights(row: Row) -> list[str]:
    if row["bitwise_equal"] is None:
        none = [side.upper() for side in ("a", "b") if row[f"{side}_sha256"] is None]
        why = f"no one set in {', '.join(none)}" if none else "stages differ, and files are missing"
        return [f"verdict: final weights cannot be compared: {why}"]
    if row["compared"] == "files":
        common = f"{row['common_params']} parameters"
        if row["bitwise_equal"]:
            return [f"verdict: final weights in the files are bitwise equal ({common})"]
        lines = [f"verdict: final weights differ in {row['differing_params']} of {common}"]
        if row["params_of_one"]:
            lines[0] += f"; {row['params_of_one']} are in one run only"
        if row["largest_difference_param"]:
            lines[0] += ";"
            lines.append(
                f"  largest difference {row['largest_difference']:.3g} in "
                f"{_clean(row['largest_difference_param'])}"
            )
        return lines
    if row["bitwise_equal"]:
        digest = _clean(row["a_sha256"])[:16]
        return [f"verdict: final weights, as recorded, are bitwise equal (sha256 {digest})"]
    return ["verdict: final weights differ"]


def _verdict(row: Row) -> str:
    what = f"{row['curve']} losses"
    common = row["common_steps"]
    counts = f"{common} common step{'' if common == 1 else 's'}"
    if row["a_steps"] != row["b_steps"]:
        counts += f" (A has {row['a_steps']}, B {row['b_steps']})"
    if not row["comparable"]:
        return f"{what} cannot be compared: {row['a_unit']} in A, {row['b_unit']} in B"
    if not common:
        return f"{what} cannot be compared: {counts}"
    if row["bitwise_equal"]:
        return f"{what} are bitwise equal at {counts}"
    size = "not finite in one run"
    if row["largest_difference"] is not None:
        size = (
            f"{row['largest_difference']:.3g} (relative {row['largest_relative_difference']:.3g})"
        )
    return (
        f"{what} differ at {row['differing_steps']} of {counts}, first at step "
        f"{row['first_differing_step']};\n  largest difference {size} at step "
        f"{row['largest_difference_step']}"
    )
