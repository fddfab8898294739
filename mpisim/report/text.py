"""Report rows as tables for people. No number is computed here that `rows.py` does not have.

Ranks with the same figures share one line, so the tables stay short whatever the number of ranks.
"""

from __future__ import annotations

from mpisim.report.excess import excess_lines
from mpisim.report.rows import Row
from mpisim.report.stage_text import pipeline_lines, replica_lines
from mpisim.report.tables import MARK, lay_table, merge_ranks, plural
from mpisim.units import format_bytes, format_seconds

CAUSES = {"recv": "receive", "send": "send"}
"""What a rank waited for, in words; "send" is the completion of one."""

_MOST_RANKS = 16
"""Ranks up to which each has a line in the table of stalls."""


def make_text(rows: list[Row]) -> str:
    """Return the tables of `rows.make_rows` as one string that ends with a line break."""
    by_section: dict[str, list[Row]] = {}
    for row in rows:
        by_section.setdefault(row["section"], []).append(row)
    run = by_section["run"][0]
    lines = [*_alarms(run, by_section), *_head(run)]
    parts = (
        _speed, pipeline_lines, _losses, _traffic, _traffic_so_far, _matrix, _stalls, _memory,
        _memory_so_far, _verdict,
    )  # fmt: skip
    for part in parts:
        made = part(run, by_section)
        if made:
            lines += ["", *made]
    return "\n".join(lines) + "\n"


# The head -----------------------------------------------------------------------------------


def _alarms(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    lines = []
    if run["status"] != "done":
        planned = run["steps_planned"]
        lines.append(
            f"INCOMPLETE: there is no summary.json: the run was cut short, or still goes on; it "
            f"left {run['steps_made']} of {planned} steps"
        )
    for check in sections.get("check", ()):
        faults = _faults(check)
        if faults:
            lines.append(
                "DIFFERENCE: measured is not what was predicted; a count, a table or a message is "
                "wrong:"
            )
            lines += [f"  {fault}" for fault in faults]
    lines += excess_lines(sections.get("over_budget", []))
    if run["damaged_lines"]:
        lines.append(
            f"damaged: {run['damaged_lines']} line(s) of metrics.jsonl are incomplete and left out"
        )
    if run["unreadable_traces"]:
        lines.append(f"damaged: {run['unreadable_traces']} trace file(s) cannot be read")
    return lines


def _faults(check: Row) -> list[str]:
    words = {
        "traffic_figures_differing": "messages or bytes by collective: {} differ",
        "matrix_pairs_differing": "bytes by pair of ranks: {} differ",
        "matrix_rows_differing": "ranks whose bytes by peer and by collective disagree: {}",
        "memory_figures_differing": "memory peaks: {} differ",
        "measured_figures_differing": "measured memory and ledger: {} ranks differ",
    }
    faults = [text.format(check[key]) for key, text in words.items() if check.get(key)]
    if check["replica_sets"] > 1:
        faults.append(f"different sets of parameters that replicas hold: {check['replica_sets']}")
    if check["tied_sets"] > 1:
        faults.append(f"different tables that both ends of a tied one hold: {check['tied_sets']}")
    return faults


def _head(run: Row) -> list[str]:
    made, planned = run["steps_made"], run["steps_planned"]
    hosts = f" on {run['hosts']} hosts" if run["hosts"] > 1 else ""
    wall = f", {format_seconds(run['wall_s'])} wall time" if run["wall_s"] is not None else ""
    steps = f"{made}" if made == planned else f"{made} of {planned}"
    emulated = (
        "emulated compute: ranks slept for their operations, numbers of the training are zeros"
    )
    return [
        f"run {run['name']}: {run['ranks']} rank{plural(run['ranks'])}{hosts} "
        f"({run['transport']}), {steps} steps{wall}",
        *[emulated] * run["emulated"],
        f"data: {run['data']}",
        f"started {run['started']}, " + (f"ended {run['ended']}" if run["ended"] else "not ended"),
    ]


# Speed and loss -----------------------------------------------------------------------------


def _speed(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    if "throughput" not in sections:
        return ["throughput and latency: no step was finished"]
    throughput, latency = sections["throughput"][0], sections["latency"][0]
    steps, left_out = throughput["steps"], throughput["warmup_steps"]
    if left_out:
        which = f"{steps} steps, without the first {left_out} (warm-up)"
    else:
        which = f"all {steps} steps: none is left after warm-up, so warm-up is included"
        if run["steps_made"] == run["steps_planned"]:
            which += "; set train.warmup_report_steps lower"
    unit = "rows" if run["data_kind"] == "regression" else "tokens"
    rate = throughput["tokens_per_s"]
    lines = [
        f"throughput over {which}",
        f"  {'-' if rate is None else f'{rate:,.0f}'} {unit}/s "
        f"({throughput['tokens']:,} {unit} in {format_seconds(throughput['time_s'])})",
        "latency of a step, same steps",
    ]
    names = ("p50", "p95", "p99", "mean", "min", "max")
    lines += lay_table(
        [(name, ">") for name in names],
        [[format_seconds(latency[f"{name}_s"]) for name in names]],
    )
    return lines


def _losses(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    if "loss" not in sections:
        return []
    loss = sections["loss"][0]
    lines = [
        f"loss, {loss['unit']}: {_number(loss['first_loss'])} at step {loss['first_step']} -> "
        f"{_number(loss['last_loss'])} at step {loss['last_step']}"
    ]
    if skipped := loss["skipped_steps"]:
        lines.append(
            f"skipped: {skipped} step{plural(skipped)} with gradients that are not finite; last "
            f"scale {loss['last_loss_scale']:g}"
        )
    heldout = sections.get("heldout", [])
    if heldout:
        lines.append("held out")
        name = heldout[0]["baseline"]
        has_targets = any(row["targets"] != row["rows"] for row in heldout)
        columns = [("step", ">"), ("rows", ">"), *[("targets", ">")] * has_targets, ("loss", ">")]
        has_bytes = any(row["below_byte_baseline"] is not None for row in heldout)
        columns += [("bits/byte", ">"), ("perplexity", ">")] * has_bytes
        has_top1 = any(row["top1"] is not None for row in heldout)
        columns += [("top-1", ">")] * has_top1 + [(f"below {name}", ">")] * (name is not None)
        columns += [("below unigram_bits_per_byte", ">")] * has_bytes
        table = []
        for row in heldout:
            cells = [str(row["step"]), f"{row['rows']:,}"]
            cells += [f"{row['targets']:,}"] * has_targets + [_number(row["loss"])]
            if has_bytes:
                cells += [_number(row["bits_per_byte"]), f"{row['perplexity']:,.2f}"]
            if has_top1:
                cells.append("-" if row["top1"] is None else f"{row['top1']:.1%}")
            if name is not None:
                below = row["below_baseline"]
                cells.append("-" if below is None else f"{below:+.1%}")
            if has_bytes:
                cells.append(f"{row['below_byte_baseline']:+.1%}")
            table.append(cells)
        lines += lay_table(columns, table)
    elif run["status"] == "done":
        lines.append("held out: nothing was held out")
    for row in sections.get("pass", []):
        top1 = "" if row["top1"] is None else f", top-1 {row['top1']:.1%}"
        what = _PASSES.get(row["name"], row["name"])
        lines.append(f"  {what}: held-out loss {_number(row['loss'])}{top1}")
    baselines = sections.get("baseline", [])
    if baselines:
        split = {"heldout": "held-out", "train": "training"}.get(baselines[0]["measured_on"], "")
        lines.append(f"baselines, on the {split} rows")
        lines += lay_table(
            [("name", "<"), ("loss", ">"), ("", "<")],
            [
                [
                    row["name"], _number(row["loss"]),
                    "<- any model must beat this" if row["must_beat"] else "",
                ]
                for row in baselines
            ],
        )  # fmt: skip
    return lines


_PASSES = {
    "base": "without compressors, before the first step",
    "calibrated": "with compressors, before the first step",
    "trained": "with compressors, at the end",
}


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


# Traffic ------------------------------------------------------------------------------------


def _traffic(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    rows = sections.get("traffic", [])
    if not rows:
        return []
    fields = (
        "messages", "predicted_messages", "difference_messages",
        "bytes", "predicted_bytes", "difference_bytes",
    )  # fmt: skip

    def values(row: Row) -> tuple:
        return tuple(row[field] for field in fields)

    table = []
    moved = [row for row in rows if any(values(row))]
    for ranks, row in merge_ranks(moved, ("axis", "collective", "direction"), values):
        off = row["difference_messages"] or row["difference_bytes"]
        table.append(
            [
                ranks, row["axis"], collective_name(row), row["direction"],
                *(f"{row[field]:,}" for field in fields), MARK if off else "",
            ]
        )  # fmt: skip
    columns = [
        ("rank", ">"), ("axis", "<"), ("collective", "<"), ("", "<"), ("messages", ">"),
        ("table", ">"), ("diff", ">"), ("bytes", ">"), ("table", ">"), ("diff", ">"), ("", "<"),
    ]  # fmt: skip
    if not table:
        return ["traffic, whole run: no message, as the step tables say"]
    return ["traffic, whole run: measured beside the step tables", *lay_table(columns, table)]


def collective_name(row: Row) -> str:
    """Return what a row of traffic is about, in words."""
    tied = row["axis"] == "pp" and row["collective"] == "all_reduce"
    return "all_reduce (tied)" if tied else row["collective"]


def _traffic_so_far(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    rows = sections.get("traffic_so_far", [])
    if not rows:
        return []
    columns = [
        ("axis", "<"), ("collective", "<"), ("", "<"), ("messages, rank 0", ">"),
        ("mean rank", ">"), ("bytes, rank 0", ">"), ("mean rank", ">"),
    ]  # fmt: skip
    table = [
        [
            row["axis"], collective_name(row), row["direction"], f"{row['rank0_messages']:,}",
            f"{row['mean_messages']:,.1f}", f"{row['rank0_bytes']:,}",
            f"{row['mean_bytes']:,.0f}",
        ]
        for row in rows
        if row["mean_messages"]
    ]  # fmt: skip
    return [
        "traffic of the training steps made; predicted figures are written when a run ends",
        *lay_table(columns, table),
    ]


def _matrix(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    rows = sections.get("bytes_matrix", [])
    if not rows:
        return []
    wrong = [row for row in rows if row["difference_bytes"]]
    total = sum(row["bytes"] for row in rows)
    if not wrong:
        return [
            f"bytes matrix: {total:,} bytes ({format_bytes(total)}) between {len(rows)} pairs, "
            f"each as predicted (difference 0)"
        ]
    lines = [f"bytes matrix: {len(wrong)} of {len(rows)} pairs differ from the predicted bytes"]
    return lines + lay_table(
        [("sender", ">"), ("receiver", ">"), ("bytes", ">"), ("table", ">"), ("diff", ">"),
         ("", "<")],
        [
            [
                str(row["sender"]), str(row["receiver"]), f"{row['bytes']:,}",
                f"{row['predicted_bytes']:,}", f"{row['difference_bytes']:,}", MARK,
            ]
            for row in wrong
        ],
    )  # fmt: skip


# Stalls -------------------------------------------------------------------------------------


def _stalls(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    rows = sections.get("stalls", [])
    steady = sections.get("steady_stalls", [])
    unused = _unused_axes(sections)
    rows = [row for row in rows if row["axis"] not in unused]
    steady = [row for row in steady if row["axis"] not in unused]
    keys = list(dict.fromkeys((row["axis"], row["cause"]) for row in rows or steady))
    if "pipeline" in sections:  # Three axes leave no room for what nobody waited for.
        waited = {(row["axis"], row["cause"]) for row in rows if row["stall_s"]}
        waited |= {(row["axis"], row["cause"]) for row in steady if row["stall_s_per_step"]}
        keys = [key for key in keys if key in waited]
        steady = [row for row in steady if (row["axis"], row["cause"]) in waited]
    if not keys:
        return []
    lines = ["stalls: time blocked until a receive, or the completion of a send"]
    if rows and rows[0]["source"] == "trace":
        lines[0] += " (read off the trace)"
    names = [f"{axis} {CAUSES.get(cause, cause)}" for axis, cause in keys]
    table = []
    if rows:
        ranks: dict[int, dict[tuple[str, str], Row]] = {}
        for row in rows:
            ranks.setdefault(row["rank"], {})[row["axis"], row["cause"]] = row
        shown = ranks
        if len(ranks) > _MOST_RANKS:
            worst = sorted(
                ranks, key=lambda rank: -sum(row["stall_s"] for row in ranks[rank].values())
            )
            shown = {rank: ranks[rank] for rank in sorted(worst[:_MOST_RANKS])}
            lines.append(f"  the {_MOST_RANKS} of {len(ranks)} ranks that waited longest")
        for cells in shown.values():
            spent = [cells[key]["stall_s"] if key in cells else 0.0 for key in keys]
            shares = [cell["share_of_step_time"] for cell in cells.values()]
            share = None if None in shares else sum(shares)
            table.append(
                [
                    _rank_name(next(iter(cells.values())), sections),
                    *(_seconds(value) for value in spent), _seconds(sum(spent)),
                    "-" if share is None else f"{share:.1%}",
                ]
            )  # fmt: skip
    if steady:
        spent = [row["stall_s_per_step"] for row in steady]
        shares = [row["share_of_step_time"] for row in steady]
        warmup = "without warm-up" if steady[0]["warmup_steps"] else "all steps"
        table.append(
            [
                f"a step, {warmup}", *(_seconds(value) for value in spent),
                _seconds(sum(spent)), "-" if None in shares else f"{sum(shares):.1%}",
            ]
        )  # fmt: skip
    columns = [("", "<"), *((name, ">") for name in names), ("all", ">"), ("of step time", ">")]
    lines += lay_table(columns, table)
    if run["traced"] is False:
        lines.append("  without a trace, all time in a blocking op counts as waiting for a receive")
    return lines


def _unused_axes(sections: dict[str, list[Row]]) -> set[str]:
    """Return the axes that a run does not have: nothing was waited for there."""
    waited = {row["axis"] for row in sections.get("stalls", ()) if row["stall_s"]}
    waited |= {row["axis"] for row in sections.get("steady_stalls", ()) if row["stall_s_per_step"]}
    if "pipeline" not in sections:
        return {"pp"} - waited
    # With one replica its sums end as they begin: what the clock shows is the clock.
    return {"dp"} if sections["pipeline"][0]["dp"] == 1 else set()


def _rank_name(row: Row, sections: dict[str, list[Row]]) -> str:
    name = f"rank {row['rank']}"
    return f"{name}, stage {row['stage']}" if "pipeline" in sections else name


def _seconds(seconds: float) -> str:
    return "0 s" if seconds == 0 else format_seconds(seconds)


# Memory -------------------------------------------------------------------------------------


def _memory(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    rows = sections.get("memory", [])
    if not rows:
        return []
    counted = [
        row
        for row in rows
        if row["category"] != "resident" and (row["peak_bytes"] or row["predicted_peak_bytes"])
    ]

    def values(row: Row) -> tuple:
        return row["peak_bytes"], row["predicted_peak_bytes"]

    table = []
    for ranks, row in merge_ranks(counted, ("category",), values):
        table.append(
            [
                ranks, row["category"], f"{row['peak_bytes']:,}",
                f"{row['predicted_peak_bytes']:,}", f"{row['difference_bytes']:,}",
                format_bytes(row["peak_bytes"]), MARK if row["difference_bytes"] else "",
            ]
        )  # fmt: skip
    columns = [
        ("rank", ">"), ("category", "<"), ("peak bytes", ">"), ("predicted", ">"), ("diff", ">"),
        ("", ">"), ("", "<"),
    ]  # fmt: skip
    lines = ["memory: peak bytes of what the engine owns, by category", *lay_table(columns, table)]
    totals = [row for row in rows if row["category"] == "total"]
    worst = max(totals, key=lambda row: row["peak_bytes"], default=None)
    if worst is not None and worst["peak_op"]:
        lines.append(
            f"  the total peaks on rank {worst['rank']} at: {worst['peak_op']} (categories peak "
            f"at other moments)"
        )
    lines += _measured(sections.get("memory_measured", []))
    resident = [row["peak_bytes"] for row in rows if row["category"] == "resident"]
    resident = [value for value in resident if value is not None]
    if resident:
        each = format_bytes(max(resident))
        if min(resident) != max(resident):
            each = f"{format_bytes(min(resident))} to {each} per rank"
        lines.append(
            f"  resident peak of the process, as the system counts it: {each} (interpreter, "
            f"libraries and all)"
        )
    explained = [row for row in rows if row.get("unexplained_bytes") is not None]
    if explained:
        row = max(explained, key=lambda row: row["unexplained_bytes"])
        total = next(r["peak_bytes"] for r in totals if r["rank"] == row["rank"])
        lines.append(
            f"  of that on rank {row['rank']}: {format_bytes(row['start_bytes'])} before anything "
            f"of the run, {format_bytes(total)} in the ledger,"
        )
        lines.append(
            f"    {_signed_bytes(row['unexplained_bytes'])} unexplained (allocator, compiled code, "
            f"buffers of the MPI library and of Python)"
        )
    return lines


def _signed_bytes(nbytes: int) -> str:
    return ("-" if nbytes < 0 else "") + format_bytes(abs(nbytes))


def _measured(rows: list[Row]) -> list[str]:
    """Say what an independent measurement found."""
    found = [row for row in rows if row["peak_bytes"] is not None]
    traced = [row["traced_gap_bytes"] for row in rows if row.get("traced_gap_bytes") is not None]
    if traced:
        worst = max(traced, key=abs)
        return [
            f"  measured by tracemalloc in the first steps, the whole process: measured - ledger = "
            f"{worst:,}",
            "  at most at the end of an op",
        ]
    if not found:
        return ["  not measured beside the ledger (memory.measure)"] if rows else []
    worst = max(found, key=lambda row: row["peak_bytes"])
    differing = [r for r in found if r["difference_peak_bytes"] or r["difference_gap_bytes"]]
    lines = [
        f"  measured by an allocator hook: peak {worst['peak_bytes']:,} bytes on rank "
        f"{worst['rank']}"
    ]
    if not differing:
        return [*lines, "  measured - ledger = 0 at the peak and at the end of every op, all ranks"]
    row = differing[0]
    lines.append(
        f"  measured - ledger = {row['difference_peak_bytes']:,} at the peak of rank "
        f"{row['rank']}, at most {row['difference_gap_bytes']:,} at the end of an op{MARK}"
    )
    return [*lines, *([f"    after {row['gap_op']}"] if row["gap_op"] else [])]


def _memory_so_far(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    rows = [row for row in sections.get("memory_so_far", []) if row["max_peak_bytes"]]
    if not rows:
        return []
    table = [
        [
            row["category"], f"{row['rank0_peak_bytes']:,}", f"{row['min_peak_bytes']:,}",
            f"{row['max_peak_bytes']:,}", format_bytes(row["max_peak_bytes"]),
        ]
        for row in rows
    ]  # fmt: skip
    columns = [
        ("category", "<"), ("rank 0", ">"), ("least rank", ">"), ("largest rank", ">"), ("", ">"),
    ]  # fmt: skip
    return ["memory: peak bytes so far of what the engine owns", *lay_table(columns, table)]


# The end ------------------------------------------------------------------------------------


def _verdict(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    if "check" not in sections:
        return []
    lines = []
    lines += replica_lines(sections)
    faults = _faults(sections["check"][0])
    lines.append(
        f"check: DIFFERENCE, see the first lines and those marked {MARK.strip()}"
        if faults
        else "check: measured - predicted = 0 for every byte, message, pair and memory peak"
    )
    return lines
