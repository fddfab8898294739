"""The parent side of the benchmarks: launches, medians over launches, tables."""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisim.launch import EXIT_DONE, launch
from mpisim.units import format_bytes

_log = logging.getLogger(__name__)

DEFAULT_SIZES = tuple(1 << shift for shift in range(10, 27, 2)) + (2 << 20,)
"""1 KiB to 64 MiB, each four times the last, and 2 MiB, where an algorithm ends."""

_COLUMNS = (
    ("collective", "{:<14}"),
    ("ranks", "{:>5}"),
    ("bytes", "{:>9}"),
    ("count", "{:>9}"),
    ("dtype", "{:>8}"),
    ("algorithm", "{:<18}"),
    ("time_us", "{:>10.1f}"),
    ("algbw_gbps", "{:>7.2f}"),
    ("busbw_gbps", "{:>7.2f}"),
    ("errors", "{:>6}"),
    ("library_us", "{:>10.1f}"),
    ("copy_us", "{:>9.1f}"),
    ("speedup", "{:>7.2f}"),
    ("wire_bytes", "{:>10}"),
    ("scratch_bytes", "{:>13}"),
)


@dataclass(frozen=True)
class BenchResult:
    """What a benchmark found."""

    status: int
    """Exit status; not 0: the launch failed and said why."""
    rows: list[dict[str, Any]]
    text: str
    """The rows as a table for people."""


def bench_collectives(
    *, ranks: int, launches: int = 5, sizes: tuple[int, ...] | None = None
) -> BenchResult:
    """Time the rings beside the library's collectives and a memory copy.

    Parameters
    ----------
    ranks : int
    launches : int
        Independent starts; every figure is the median over them.
    sizes : tuple of int, optional
        Bytes of the whole buffer (all_gather: of the result; reduce_scatter: of the input).

    Returns
    -------
    BenchResult
        One row per collective and size. Times in microseconds; `speedup` is the library's time
        over ours, the median of the rounds' ratios; bandwidths in 1e9 bytes/s as nccl-tests
        defines them; `wire_bytes` of the rank that sends most.
    """
    chosen = sorted(sizes or DEFAULT_SIZES)
    results = []
    library = ""
    for number in range(launches):
        status, found = start_ranks("collectives", {"sizes": chosen}, ranks)
        if status != EXIT_DONE:
            return BenchResult(status, [], "")
        rows, library = found
        results.append(rows)
        _log.info("launch %d of %d done", number + 1, launches)
    rows = [_median_row(same) for same in zip(*results, strict=True)]
    lines = [
        f"{library}; {ranks} ranks; medians of {launches} launches; speedup = library / ours",
        " ".join(_title(name, form) for name, form in _COLUMNS),
    ]
    for row in sorted(rows, key=lambda row: row["collective"]):
        shown = {**row, "count": row["bytes"] // 4}
        lines.append(" ".join(form.format(shown[name]) for name, form in _COLUMNS))
    return BenchResult(EXIT_DONE, rows, "\n".join(lines))


def bench_trace(*, ranks: int, rounds: int = 60) -> BenchResult:
    """Time a training step with tracing on and off, interleaved.

    Parameters
    ----------
    ranks : int
    rounds : int
        Pairs of step groups.

    Returns
    -------
    BenchResult
        One row: `step_traced_us`, `step_untraced_us`, `overhead` (a share: 0.01 is 1%).
    """
    status, found = start_ranks("trace", {"rounds": rounds}, ranks)
    if status != EXIT_DONE:
        return BenchResult(status, [], "")
    row, library = found
    text = (
        f"{library}; {ranks} ranks; medians of {row['rounds']} interleaved rounds\n"
        f"step traced {row['step_traced_us']:.1f} us, untraced {row['step_untraced_us']:.1f} us, "
        f"overhead {row['overhead']:+.2%} ({format_bytes(row['trace_bytes_per_step'])} per step)"
    )
    return BenchResult(status, [row], text)


def start_ranks(kind: str, options: dict[str, Any], ranks: int) -> tuple[int, Any]:
    """Start the ranks of one benchmark and wait for them.

    Parameters
    ----------
    kind : str
        Which benchmark; see ranks.py.
    options : dict
        Handed to the ranks as JSON.
    ranks : int

    Returns
    -------
    status : int
        Exit status; not 0: the launch failed and said why.
    found : list or None
        What rank 0 found, and the MPI library's name.
    """
    with tempfile.TemporaryDirectory(prefix="mpisim-bench-") as folder:
        out = Path(folder) / "rows.json"
        command = [
            sys.executable, "-m", "mpisim.bench.ranks", kind, json.dumps(options), str(out),
        ]  # fmt: skip
        status = launch(command, ranks)
        return status, json.loads(out.read_text("utf-8")) if status == EXIT_DONE else None


def _median_row(same: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    row = dict(same[0])
    for name, value in row.items():
        if isinstance(value, float):
            row[name] = statistics.median(other[name] for other in same)
    row["errors"] = max(other["errors"] for other in same)
    return row


def _title(name: str, form: str) -> str:
    width = "".join(c for c in form.split(">")[-1].split("<")[-1].split(".")[0] if c.isdigit())
    side = "<" if "<" in form else ">"
    return f"{name:{side}{width}}"
