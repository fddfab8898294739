"""Two runs side by side, as flat rows: what differs in config and machine, and in what came out.

Sections, in order; ``a`` and ``b`` are the first and the second run:

    run       one row per run: path, status, ranks, steps made and planned
    config    fields of the resolved config that differ, by dotted name
    machine   versions, hosts and platform that differ
    data      whether both read the same data, and what differs in its record
    curve     training loss at about ten common steps
    heldout   held-out loss at about ten common evaluations
    figure    losses, bits per byte, skipped steps, throughput, latency, wall time
    traffic   messages and bytes sent by all ranks, by channel, measured and predicted
    pipeline  idle share of stages: by the schedule, replayed, measured
    stalls    seconds waited per step, mean over ranks, without warm-up
    memory    peak bytes of the largest rank, by category, measured and predicted
    verdict   whether the losses at all common steps are the same bits, else by how much they differ
    weights   whether the final weights are the same bits, by record or, of stages, by file

`compare_text.py` prints these rows, `--json` dumps them.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from mpisim.errors import CheckpointError
from mpisim.report.compare_figures import (
    SIDES,
    Sections,
    as_float,
    figures,
    loss_unit,
    memory,
    pipeline,
    stalls,
    traffic,
)
from mpisim.report.compare_weights import weights_row
from mpisim.report.load import Run, layout_of, load_run
from mpisim.report.rows import Row, make_rows

CURVE_ROWS = 10
"""Common steps whose losses are listed."""

# Of run.json: what is compared elsewhere, or differs between any two runs.
_NO_MACHINE = frozenset(
    ("version", "name", "seed", "config", "data", "ranks", "mesh", "started", "ended")
)


def compare_rows(first: Path | str, second: Path | str) -> list[Row]:
    """Compare two run directories.

    Parameters
    ----------
    first, second : Path or str
        Run directories; ranks and numbers of steps may differ, and a run may be cut short or
        still go on: then what it left is compared. They may be the same directory.

    Returns
    -------
    list of dict
        Each row has a ``section`` (see the module docstring). Values are strings, bools, ints,
        finite floats, lists of these or None (unknown, or not finite), so every row is plain JSON.

    Raises
    ------
    CheckpointError
        One is no run directory, or a file in it is damaged.
    """
    runs = (load_run(first), load_run(second))
    sections = (_by_section(runs[0]), _by_section(runs[1]))
    try:
        training, heldout = _losses(runs), _heldout_losses(runs)
        rows = [
            *_runs(runs, sections), *_differing("config", _configs(runs)),
            *_differing("machine", _machines(runs)), *_data(runs),
            *_curve("curve", runs, *training), *_curve("heldout", runs, *heldout),
            *figures(runs, sections), *traffic(sections), *pipeline(sections), *stalls(sections),
            *memory(sections),
            _verdict("training", runs, *training), _verdict("held-out", runs, *heldout),
            weights_row(runs, (sections[0].get("replicas", []), sections[1].get("replicas", []))),
        ]  # fmt: skip
    except (AttributeError, KeyError, TypeError) as error:
        raise _strange(f"{runs[0].path} or {runs[1].path}", error) from None
    return [{key: _plain(value) for key, value in row.items()} for row in rows]


def compare_text(first: Path | str, second: Path | str) -> str:
    """Compare two run directories, as tables; see `compare_rows`.

    Returns
    -------
    str
        Lines of at most 100 characters, unless a name or a value is longer. The last lines say
        whether the losses and the weights are the same bits.

    Raises
    ------
    CheckpointError
        One is no run directory, or a file in it is damaged.
    """
    from mpisim.report.compare_text import make_compare_text

    return make_compare_text(compare_rows(first, second))


def _by_section(run: Run) -> Sections:
    found: Sections = {}
    try:
        for row in make_rows(run):
            found.setdefault(row["section"], []).append(row)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise _strange(run.path, error) from None
    return found


def _strange(where: Path | str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"files of a run must hold what mpisim wrote; got a {type(error).__name__} ({error}) from "
        f"those in {where}. Run the job again with this version of mpisim."
    )


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# What went in ---------------------------------------------------------------------------------


def _runs(runs: tuple[Run, Run], sections: tuple[Sections, Sections]) -> list[Row]:
    rows = []
    for side, run, parts in zip(SIDES, runs, sections, strict=True):
        row = parts["run"][0]
        check = parts.get("check", [{}])[0]
        faults = sum(value for key, value in check.items() if key.endswith("_differing"))
        # One set of parameters per stage is right, and one of a tied table.
        faults += sum(max(0, check.get(key, 1) - 1) for key in ("replica_sets", "tied_sets"))
        layout = layout_of(run)
        names = (
            "name", "status", "ranks", "hosts", "transport", "data", "data_kind", "steps_made",
            "steps_planned", "damaged_lines", "started", "ended",
        )  # fmt: skip
        rows.append(
            {
                "section": "run",
                "run": side,
                "path": str(run.path),
                **{name: row[name] for name in names},
                "dp": layout.dp,
                "pp": layout.pp,
                "schedule": layout.schedule if layout.pp > 1 else None,
                "figures_differing": faults if check else None,
            }
        )
    return rows


def _configs(runs: tuple[Run, Run]) -> tuple[dict[str, Any], dict[str, Any]]:
    return _flat("", runs[0].config), _flat("", runs[1].config)


def _machines(runs: tuple[Run, Run]) -> tuple[dict[str, Any], dict[str, Any]]:
    found = []
    for run in runs:
        facts = {key: value for key, value in run.record.items() if key not in _NO_MACHINE}
        flat = {"ranks": run.num_ranks, **_flat("", facts)}
        flat["hosts"] = sorted({str(host) for host in run.record.get("hosts", ())})
        found.append({key.removeprefix("versions."): value for key, value in flat.items()})
    return found[0], found[1]


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    """Return nested mappings as one, keyed by dotted names."""
    if not isinstance(value, dict):
        return {prefix: value}
    found = {}
    for key, item in value.items():
        found.update(_flat(f"{prefix}.{key}" if prefix else key, item))
    return found


def _differing(section: str, facts: tuple[dict[str, Any], dict[str, Any]]) -> list[Row]:
    """Return one row per fact that differs; a fact of one side alone has `only_in`."""
    a, b = facts
    rows = []
    for field in dict.fromkeys([*a, *b]):
        # JSON tells 1 from 1.0 and from true, as the config does.
        same = field in a and field in b and repr(a[field]) == repr(b[field])
        if not same:
            only_in = None if field in a and field in b else "a" if field in a else "b"
            row = {"section": section, "field": field, "a": a.get(field), "b": b.get(field)}
            rows.append({**row, "only_in": only_in})
    return rows


def _data(runs: tuple[Run, Run]) -> list[Row]:
    a, b = (_flat("", run.record.get("data", {})) for run in runs)
    digests = [each.get("sha256") for each in (a, b)]
    same = None if None in digests else digests[0] == digests[1]
    head = {"section": "data", "field": "sha256", "a": digests[0], "b": digests[1], "same": same}
    rest = [row for row in _differing("data", (a, b)) if row["field"] != "sha256"]
    return [head, *({**row, "same": False} for row in rest)]


# Losses ---------------------------------------------------------------------------------------

Losses = dict[int, float]


def _losses(runs: tuple[Run, Run]) -> tuple[Losses, Losses]:
    a, b = ({row["step"]: as_float(row["loss"]) for row in run.steps} for run in runs)
    return a, b


def _heldout_losses(runs: tuple[Run, Run]) -> tuple[Losses, Losses]:
    a, b = ({row["step"]: as_float(row["heldout_loss"]) for row in run.evaluations} for run in runs)
    return a, b


def _curve(section: str, runs: tuple[Run, Run], a: Losses, b: Losses) -> list[Row]:
    if loss_unit(runs[0]) != loss_unit(runs[1]):
        return []
    return [
        {
            "section": section,
            "step": step,
            "a": a[step],
            "b": b[step],
            "difference": b[step] - a[step],
        }
        for step in _spread(sorted(a.keys() & b.keys()), CURVE_ROWS)
    ]


def _spread(items: list[int], count: int) -> list[int]:
    """Return at most `count` of the items, evenly spread, with the first and the last."""
    if len(items) <= count:
        return items
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _verdict(curve: str, runs: tuple[Run, Run], a: Losses, b: Losses) -> Row:
    """Compare the losses at all common steps, bit by bit."""
    units = [loss_unit(run) for run in runs]
    common = sorted(a.keys() & b.keys())
    differing = [step for step in common if _bits(a[step]) != _bits(b[step])]
    # What is not finite on one side only differs more than any number.
    sizes = [(_distance(a[step], b[step]), -step) for step in differing]
    largest, place = max(sizes, default=(0.0, 0))
    step = -place if differing else None
    scale = max(abs(a[step]), abs(b[step])) if differing else 0.0
    return {
        "section": "verdict",
        "curve": curve,
        "comparable": units[0] == units[1],
        "a_unit": units[0],
        "b_unit": units[1],
        "a_steps": len(a),
        "b_steps": len(b),
        "common_steps": len(common),
        "differing_steps": len(differing),
        "bitwise_equal": not differing if common else None,
        "first_differing_step": differing[0] if differing else None,
        "largest_difference": largest if common else None,
        "largest_difference_step": step,
        "largest_relative_difference": largest / scale if scale else largest,
    }


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _distance(a: float, b: float) -> float:
    return abs(b - a) if math.isfinite(a) and math.isfinite(b) else math.inf
