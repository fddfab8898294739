"""Every number of a report, as flat rows: one dict per figure or table line.

Sections, in order:

    run           status, ranks, steps made and planned
    throughput    tokens per second without warm-up (a token is one target row)
    latency       step time p50, p95, p99 without warm-up
    loss          first and last training loss
    baseline      what any model must beat
    heldout       held-out evaluations
    pass          the same without compressors, with them before the first step, and trained
    traffic       messages and bytes per rank, axis, collective and direction
    bytes_matrix  bytes per pair of ranks
    pipeline      with stages: layout, schedule, its idle share predicted and measured
    stages        one row per stage: blocks, microbatches in flight, peak memory, shares of the step
    stalls        seconds waited per rank, axis and cause
    steady_stalls the same per step, mean over ranks, without warm-up
    memory        peak bytes per rank and category
    memory_measured  what an allocator hook counted, beside the ledger
    replicas      whether all ranks of a stage hold the same parameters
    tied          whether both ends of a tied table are the same
    over_budget   ranks whose memory would have passed the budget, and what they held
    check         how many figures differ from the predicted ones

A `difference` is measured minus predicted; the `stage` of a rank is its place on axis pp. `text.py`
prints these rows, `--json` dumps them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mpisim.layouts.metrics import CHANNELS, MEMORY_CATEGORIES, STALL_CAUSES
from mpisim.report.excess import excess_rows
from mpisim.report.load import Run, layout_of

Row = dict[str, Any]

DIRECTIONS = ("sent", "received")


def make_rows(run: Run) -> list[Row]:
    """Return all rows of a run (see the module docstring)."""
    stalls = stalls_per_rank(run)
    rows = [
        _run(run, stalls), *_throughput(run), *_latency(run), *_loss(run), *_baselines(run),
        *_heldout(run), *_passes(run), *_traffic(run), *_bytes_matrix(run), *_stages(run),
        *_stalls(run, stalls), *_steady_stalls(run), *_memory(run), *_replicas(run), *_tied(run),
        *excess_rows(run),
    ]  # fmt: skip
    if run.summary is not None:
        rows.append(_check(rows))
    return [{key: _plain(value) for key, value in row.items()} for row in rows]


def percentile(values: Iterable[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between the two nearest values.

    Parameters
    ----------
    values : iterable of float
        At least one.
    percent : float
        0..100.

    Examples
    --------
    >>> percentile([4.0, 1.0, 3.0, 2.0], 50), percentile([1.0, 2.0], 95)
    (2.5, 1.95)
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _plain(value: Any) -> Any:
    """Turn a float that JSON cannot hold into None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run(run: Run, stalls: Stalls) -> Row:
    record, config = run.record, run.config
    return {
        "section": "run",
        "name": record.get("name"),
        "status": "done" if run.summary is not None else "incomplete",
        "ranks": run.num_ranks,
        "hosts": len(set(record.get("hosts", []))),
        "transport": record.get("versions", {}).get("mpi"),
        "data": record.get("data", {}).get("name"),
        "data_kind": config.get("data", {}).get("kind"),
        "steps_made": len(run.steps),
        "steps_planned": config.get("train", {}).get("steps"),
        "damaged_lines": run.damaged_lines,
        "unreadable_traces": stalls.unreadable,
        "traced": config.get("trace", {}).get("enabled"),
        "emulated": config.get("compute", {}).get("mode") == "emulated",
        "started": record.get("started"),
        "ended": record.get("ended"),
        "wall_s": None if run.summary is None else run.summary.get("wall_s"),
    }


def _throughput(run: Run) -> list[Row]:
    steady, left_out = run.steady_steps()
    if not steady:
        return []
    tokens, time_s = sum(_targets(row) for row in steady), sum(row["step_s"] for row in steady)
    return [
        {
            "section": "throughput",
            "steps": len(steady),
            "warmup_steps": left_out,
            "tokens": tokens,
            "time_s": time_s,
            "tokens_per_s": tokens / time_s if time_s > 0 else None,
        }
    ]


def _targets(row: Row) -> int:
    """Return what a step predicted; a run of an earlier version logs rows of one target each."""
    return row.get("targets", row["rows"])


def _latency(run: Run) -> list[Row]:
    steady, left_out = run.steady_steps()
    if not steady:
        return []
    times = [row["step_s"] for row in steady]
    return [
        {
            "section": "latency",
            "steps": len(times),
            "warmup_steps": left_out,
            "p50_s": percentile(times, 50),
            "p95_s": percentile(times, 95),
            "p99_s": percentile(times, 99),
            "mean_s": sum(times) / len(times),
            "min_s": min(times),
            "max_s": max(times),
        }
    ]


def _loss(run: Run) -> list[Row]:
    if not run.steps:
        return []
    first, last = run.steps[0], run.steps[-1]
    return [
        {
            "section": "loss",
            "unit": _loss_unit(run),
            "first_step": first["step"],
            "first_loss": first["loss"],
            "last_step": last["step"],
            "last_loss": last["loss"],
            "skipped_steps": sum(bool(row.get("skipped")) for row in run.steps),
            "last_loss_scale": last.get("loss_scale"),
        }
    ]


def _loss_unit(run: Run) -> str:
    return "squared error" if run.config.get("data", {}).get("kind") == "regression" else "nats"


def _baselines(run: Run) -> list[Row]:
    if run.summary is None:
        return []
    baselines = run.summary.get("baselines", {})
    return [
        {
            "section": "baseline",
            "name": name,
            "loss": value,
            "measured_on": baselines.get("split"),
            "must_beat": name == run.summary.get("primary_baseline"),
        }
        for name, value in baselines.items()
        if not isinstance(value, str)
    ]


def _passes(run: Run) -> list[Row]:
    return [
        {
            "section": "pass", "name": row["pass"], "rows": row["heldout_rows"],
            "loss": row["heldout_loss"], "top1": row.get("heldout_top1"),
        }
        for row in (run.summary or {}).get("passes", [])
    ]  # fmt: skip


def _heldout(run: Run) -> list[Row]:
    summary = run.summary or {}
    name = summary.get("primary_baseline")
    baselines = summary.get("baselines", {})
    baseline, byte_baseline = baselines.get(name), baselines.get("unigram_bits_per_byte")
    return [
        {
            "section": "heldout",
            "step": row["step"],
            "rows": row.get("heldout_rows"),
            "targets": row.get("heldout_targets", row.get("heldout_rows")),
            "loss": row["heldout_loss"],
            "bits_per_byte": row.get("heldout_bits_per_byte"),
            "perplexity": row.get("heldout_perplexity"),
            "top1": row.get("heldout_top1"),
            "baseline": name,
            "below_baseline": 1 - row["heldout_loss"] / baseline if baseline else None,
            "below_byte_baseline": 1 - row["heldout_bits_per_byte"] / byte_baseline
            if byte_baseline and "heldout_bits_per_byte" in row
            else None,
        }
        for row in run.evaluations
    ]


def _traffic(run: Run) -> list[Row]:
    if run.summary is None:
        return _traffic_spread(run)
    rows = []
    for entry in run.summary["ranks"]:
        measured, predicted = entry["traffic"], entry["predicted_traffic"]
        # In the order of CHANNELS, then whatever else was counted.
        names = dict.fromkeys(
            [f"{axis} {collective}" for axis, collective in CHANNELS] + [*measured, *predicted]
        )
        for name in names:
            if name not in measured and name not in predicted:
                continue
            axis, _, collective = name.partition(" ")
            for direction in DIRECTIONS:
                row = {
                    "section": "traffic",
                    "rank": entry["rank"],
                    "stage": entry.get("stage", 0),
                    "axis": axis,
                    "collective": collective,
                    "direction": direction,
                }
                for what in ("messages", "bytes"):
                    field = f"{direction}_{what}"
                    row[what] = measured.get(name, {}).get(field, 0)
                    row[f"predicted_{what}"] = predicted.get(name, {}).get(field, 0)
                    row[f"difference_{what}"] = row[what] - row[f"predicted_{what}"]
                rows.append(row)
    return rows


def _spread(run: Run, name: str) -> list[list[float]]:
    """Return a figure's (rank 0, least, mean, largest) of every step that has it."""
    return [row["ranks"][name] for row in run.steps if name in row.get("ranks", {})]


def _traffic_spread(run: Run) -> list[Row]:
    rows = []
    # A run of an earlier version has not counted all of them.
    logged = [key for key in CHANNELS if _spread(run, f"{key[0]}_{key[1]}_sent_bytes")]
    for axis, collective in logged:
        for direction in DIRECTIONS:
            row: Row = {
                "section": "traffic_so_far",
                "axis": axis,
                "collective": collective,
                "direction": direction,
            }
            for what in ("messages", "bytes"):
                steps = _spread(run, f"{axis}_{collective}_{direction}_{what}")
                row[f"rank0_{what}"] = int(sum(step[0] for step in steps))
                row[f"mean_{what}"] = sum(step[2] for step in steps)
            rows.append(row)
    return rows


def _bytes_matrix(run: Run) -> list[Row]:
    if run.summary is None:
        return []
    rows = []
    measured, predicted = run.summary["bytes_matrix"], run.summary["predicted_bytes_matrix"]
    for sender, (line, predicted_line) in enumerate(zip(measured, predicted, strict=True)):
        for receiver, (nbytes, expected) in enumerate(zip(line, predicted_line, strict=True)):
            if sender != receiver or nbytes or expected:
                rows.append(
                    {
                        "section": "bytes_matrix",
                        "sender": sender,
                        "receiver": receiver,
                        "bytes": nbytes,
                        "predicted_bytes": expected,
                        "difference_bytes": nbytes - expected,
                    }
                )
    return rows


@dataclass(frozen=True)
class Stalls:
    """Stall seconds of a run, and where they were read."""

    ranks: dict[int, dict[tuple[str, str], float]]
    """Rank -> (axis, cause) -> seconds. Causes: ``recv`` (a message), ``send`` (the completion
    of a send). Empty when nothing is known."""
    source: str
    """``summary.json``, ``trace`` or ""."""
    unreadable: int = 0
    """Trace files that could not be read."""


def stalls_per_rank(run: Run) -> Stalls:
    """Return the stalls of every rank; without a summary they are read off the trace."""
    if run.summary is not None:
        ranks = {}
        for entry in run.summary["ranks"]:
            stalls = dict.fromkeys(STALL_CAUSES, 0.0)
            for name, seconds in entry["stall_s"].items():
                axis, _, cause = name.partition(" ")
                stalls[axis, cause] = seconds
            ranks[entry["rank"]] = stalls
        return Stalls(ranks, "summary.json")
    if not any((run.path / "trace").glob("rank-*.bin")):
        return Stalls({}, "")
    from mpisim.report.traces import read_traces, stall_totals

    traces, unreadable = read_traces(run.path)
    return Stalls({trace.rank: stall_totals(trace) for trace in traces}, "trace", unreadable)


def _stages(run: Run) -> list[Row]:
    if layout_of(run).pp == 1:
        return []
    from mpisim.report.stages import stage_rows

    return stage_rows(run)


def _stalls(run: Run, stalls: Stalls) -> list[Row]:
    step_time_s = sum(row["step_s"] for row in run.steps)
    layout = layout_of(run)
    return [
        {
            "section": "stalls",
            "rank": rank,
            "stage": layout.stage_of(rank),
            "axis": axis,
            "cause": cause,
            "stall_s": seconds,
            "share_of_step_time": seconds / step_time_s if step_time_s > 0 else None,
            "source": stalls.source,
        }
        for rank, spent in stalls.ranks.items()
        for (axis, cause), seconds in spent.items()
    ]


def _steady_stalls(run: Run) -> list[Row]:
    steady, left_out = run.steady_steps()
    steady = [row for row in steady if "ranks" in row]
    if not steady:
        return []
    step_s = sum(row["ranks"]["step_s"][2] for row in steady)
    rows = []
    for axis, cause in STALL_CAUSES:
        name = f"stall_{axis}_{cause}_s"
        if any(name not in row["ranks"] for row in steady):
            continue  # a run of an earlier version
        stall_s = sum(row["ranks"][name][2] for row in steady)
        rows.append(
            {
                "section": "steady_stalls",
                "axis": axis,
                "cause": cause,
                "steps": len(steady),
                "warmup_steps": left_out,
                "stall_s_per_step": stall_s / len(steady),
                "share_of_step_time": stall_s / step_s if step_s > 0 else None,
            }
        )
    return rows


def _memory(run: Run) -> list[Row]:
    if run.summary is None:
        return _memory_spread(run)
    rows = []
    for entry in run.summary["ranks"]:
        measured, predicted = entry["memory"], entry["predicted_memory"]
        names = dict.fromkeys([*MEMORY_CATEGORIES, *measured["peak"], *predicted["peak"]])
        figures = [
            (name, measured["peak"].get(name, 0), predicted["peak"].get(name, 0)) for name in names
        ]
        figures.append(("total", measured["peak_total"], predicted["peak_total"]))
        for name, peak, expected in figures:
            rows.append(
                {
                    "section": "memory",
                    "rank": entry["rank"],
                    "stage": entry.get("stage", 0),
                    "category": name,
                    "peak_bytes": peak,
                    "predicted_peak_bytes": expected,
                    "difference_bytes": peak - expected,
                    "peak_op": predicted.get("peak_op") if name == "total" else None,
                }
            )
        rows.append(_measured_memory(entry["rank"], measured))
        rows.append(
            {
                "section": "memory",
                "rank": entry["rank"],
                "stage": entry.get("stage", 0),
                "category": "resident",
                "peak_bytes": entry.get("resident_peak_bytes"),
                "predicted_peak_bytes": None,
                "difference_bytes": None,
                "peak_op": None,
                "start_bytes": entry.get("resident_start_bytes"),
                "unexplained_bytes": _unexplained(entry),
            }
        )
    return rows


def _measured_memory(rank: int, memory: dict[str, Any]) -> Row:
    """Return what an allocator hook counted beside the ledger: peak, and gap at the end of ops."""
    facts = memory.get("measured", {})
    peak = facts.get("peak_bytes")
    return {
        "section": "memory_measured",
        "rank": rank,
        "kind": facts.get("kind", "off"),
        "peak_bytes": peak,
        "ledger_peak_bytes": memory["peak_total"],
        "difference_peak_bytes": None if peak is None else peak - memory["peak_total"],
        # Python's tracer sees the whole process: figures about the run, and other rank threads.
        "difference_gap_bytes": facts.get("gap_bytes") if facts.get("exact") else None,
        "traced_gap_bytes": facts.get("gap_bytes") if facts.get("steps") else None,
        "gap_op": facts.get("gap_op"),
        "start_up_bytes": facts.get("start_up_bytes"),
        "figures_peak_bytes": facts.get("figures_peak_bytes"),
    }


def _unexplained(entry: dict[str, Any]) -> int | None:
    """Return the resident bytes that neither start-up nor the ledger's peak explains."""
    peak, start = entry.get("resident_peak_bytes"), entry.get("resident_start_bytes")
    if peak is None or start is None:
        return None
    return peak - start - entry["memory"]["peak_total"]


def _memory_spread(run: Run) -> list[Row]:
    rows = []
    for name in (*MEMORY_CATEGORIES, "total"):
        steps = _spread(run, f"peak_{name}_bytes")
        if steps:
            rank0, least, _, largest = steps[-1]
            rows.append(
                {
                    "section": "memory_so_far",
                    "category": name,
                    "rank0_peak_bytes": int(rank0),
                    "min_peak_bytes": int(least),
                    "max_peak_bytes": int(largest),
                }
            )
    return rows


def _replicas(run: Run) -> list[Row]:
    """Return one row per stage and set of parameters that ranks of it hold."""
    if run.summary is None:
        return []
    # What is updated, and what is worked with where that is another copy.
    sets: dict[int, dict[tuple[str, str | None], list[int]]] = {}
    for entry in run.summary["ranks"]:
        held = (entry["params_sha256"], entry.get("working_sha256"))
        of_stage = sets.setdefault(entry.get("stage", 0), {})
        of_stage.setdefault(held, []).append(entry["rank"])
    return [
        {
            "section": "replicas",
            "stage": stage,
            "bitwise_equal": len(of_stage) == 1,
            "params_sha256": digest,
            "working_sha256": working,
            "ranks": len(ranks),
            "first_rank": ranks[0],
        }
        for stage, of_stage in sorted(sets.items())
        for (digest, working), ranks in of_stage.items()
    ]


def _tied(run: Run) -> list[Row]:
    """Return one row per content of the tables that two stages hold; one if all is well."""
    ends: dict[str, list[int]] = {}
    for entry in (run.summary or {}).get("ranks", ()):
        if "tied_sha256" in entry:
            ends.setdefault(entry["tied_sha256"], []).append(entry["rank"])
    return [
        {
            "section": "tied",
            "bitwise_equal": len(ends) == 1,
            "tied_sha256": digest,
            "ranks": len(ranks),
            "first_rank": ranks[0],
        }
        for digest, ranks in ends.items()
    ]


def _check(rows: list[Row]) -> Row:
    """Count the figures that are not what was predicted; all must be 0.

    Sets of parameters are counted in the stage that has most of them: 1 is right. So it is of a
    tied table, if there is one.
    """

    def differing(section: str) -> int:
        return sum(
            any(value for key, value in row.items() if key.startswith("difference_"))
            for row in rows
            if row["section"] == section
        )

    # What a rank sent by collective must be what it sent by peer.
    sent: dict[int, int] = {}
    for row in rows:
        if row["section"] == "traffic" and row["direction"] == "sent":
            sent[row["rank"]] = sent.get(row["rank"], 0) + row["bytes"]
        elif row["section"] == "bytes_matrix":
            sent[row["sender"]] = sent.get(row["sender"], 0) - row["bytes"]
    sets = Counter(row["stage"] for row in rows if row["section"] == "replicas")
    return {
        "section": "check",
        "traffic_figures_differing": differing("traffic"),
        "matrix_pairs_differing": differing("bytes_matrix"),
        "matrix_rows_differing": sum(value != 0 for value in sent.values()),
        "memory_figures_differing": differing("memory"),
        "measured_figures_differing": differing("memory_measured"),
        "replica_sets": max(sets.values(), default=0),
        "tied_sets": sum(row["section"] == "tied" for row in rows),
    }
