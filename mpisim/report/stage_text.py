"""Report rows about stages and replicas as text, for people who look into a pipeline."""

from __future__ import annotations

from mpisim.mesh import stages_text
from mpisim.report.rows import Row
from mpisim.report.tables import MARK, lay_table, plural
from mpisim.units import format_bytes, format_seconds


def pipeline_lines(run: Row, sections: dict[str, list[Row]]) -> list[str]:
    """Say how a pipeline is laid out, how idle it was, and what each stage did."""
    if "pipeline" not in sections:
        return []
    head, stages = sections["pipeline"][0], sections["stages"]
    codecs = {"activations": head["activation_codec"], "gradients": head["grad_codec"]}
    named = ", ".join(f"{what} as {codec}" for what, codec in codecs.items() if codec != "none")
    lines = [
        f"pipeline: {head['schedule']}, {stages_text(head['pp'], head['chunks'])}, "
        f"{head['microbatches']} microbatches, dp {head['dp']}" + (f"; {named}" if named else "")
    ]
    lines += _idle(head)
    lines += _stage_table(head, stages)
    return lines + _slowest(head, stages)


def _idle(head: Row) -> list[str]:
    """Return the three figures of idle time, from the schedule alone to what was measured."""
    lines = []
    if head["closed_form_bubble"] is not None:
        lines.append(
            f"  {head['closed_form_bubble']:6.1%} idle by the closed form of the schedule, if all "
            f"stages were equal"
        )
    if head["replayed_idle_share"] is not None:
        lines.append(
            f"  {head['replayed_idle_share']:6.1%} idle in a replay with the compute times of "
            f"this run and messages that take no time"
        )
    if head["idle_share"] is not None:
        lines.append(
            f"  {head['idle_share']:6.1%} idle as measured: waits for another stage (receive) and "
            f"for all ranks (barrier)"
        )
    if head["replayed_step_s"] is not None and head["step_s"] is not None:
        lines.append(
            f"  a step took {format_seconds(head['step_s'])}, in the replay "
            f"{format_seconds(head['replayed_step_s'])}"
        )
    return lines


def _stage_table(head: Row, stages: list[Row]) -> list[str]:
    differs = any(row["difference_bytes"] for row in stages)
    columns = [
        (_row_word(head["chunks"]), ">"), *[("ranks", ">")] * (head["dp"] > 1), ("blocks", ">"),
        ("", "<"), ("in flight", ">"), ("peak", ">"), *[("diff", ">")] * differs,
    ]  # fmt: skip
    shares = {
        "compute": "compute_share", "receive": "receive_share", "send": "send_share",
        "dp": "dp_share", "barrier": "control_share", "idle": "idle_share",
        "replayed": "replayed_idle_share",
    }  # fmt: skip
    if head["dp"] == 1:
        del shares["dp"]
    shares = {
        name: key for name, key in shares.items() if any(row[key] is not None for row in stages)
    }
    columns += [(name, ">") for name in shares] + [("", "<")]
    table = []
    for row in stages:
        peak, off = row["peak_bytes"], row["difference_bytes"]
        table.append(
            [
                str(row["stage"]), *[_ranks_of(row, head)] * (head["dp"] > 1),
                _cell(row["num_blocks"]), _first_and_last(row["blocks"]), _cell(row["in_flight"]),
                "-" if peak is None else format_bytes(peak), *[_cell(off)] * differs,
                *("-" if row[key] is None else f"{row[key]:.1%}" for key in shares.values()),
                MARK if off else "",
            ]
        )  # fmt: skip
    which = {"trace": "traced steps without warm-up", "summary.json": "all steps"}
    source = which.get(head["source"])
    chunks = head["chunks"]
    part = f" (one of its {chunks} chunks: 1/{chunks})" if chunks > 1 else ""
    title = f"  {_row_word(chunks)}s: blocks, microbatches in flight{part}, peak memory"
    if any(row["peak_bytes"] is not None for row in stages) and not differs:
        title += " (as predicted)"
    if source:
        title += f"; shares of step time,\n  {source}"
    return [title, *lay_table(columns, table)]


def _row_word(chunks: int) -> str:
    """Return what a row is: with chunks a place holds several stages."""
    return "place" if chunks > 1 else "stage"


def _ranks_of(row: Row, head: Row) -> str:
    if row["ranks"] == 1:
        return str(row["first_rank"])
    if row["ranks"] == 2:
        return f"{row['first_rank']}, {row['first_rank'] + head['pp']}"
    last = row["first_rank"] + (row["ranks"] - 1) * head["pp"]
    return f"{row['first_rank']}, {row['first_rank'] + head['pp']}..{last}"


def _cell(value: int | float | None) -> str:
    return "-" if value is None else f"{round(value, 2):,}"


def _first_and_last(blocks: str | None) -> str:
    """Return a stage's blocks as their first and last, chunk by chunk."""
    if blocks is None:
        return "-"
    ends = []
    for chunk in blocks.split(" + "):
        names = chunk.split(",")
        ends.append(names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}")
    return " + ".join(ends)


def _slowest(head: Row, stages: list[Row]) -> list[str]:
    times = [row["compute_s"] for row in stages]
    if None in times or not sum(times):
        return []
    worst = max(stages, key=lambda row: row["compute_s"])
    mean = sum(times) / len(times)
    return [
        f"  slowest: {_row_word(head['chunks'])} {worst['stage']}, "
        f"{format_seconds(worst['compute_s'])} of compute a step, "
        f"{worst['compute_s'] / mean:.2f} times the mean"
    ]


def replica_lines(sections: dict[str, list[Row]]) -> list[str]:
    """Say which ranks hold the same parameters: by stage, in one line if all is well."""
    rows, lines = sections["replicas"], []
    stages = {row["stage"] for row in rows}
    word = _row_word(sections["pipeline"][0]["chunks"] if "pipeline" in sections else 1)
    equal = all(row["bitwise_equal"] for row in rows)
    if len(stages) > 1 and equal:
        ranks = max(row["ranks"] for row in rows)
        digests = ", ".join(row["params_sha256"][:8] for row in rows[:6])
        digests += ", ..." * (len(rows) > 6)
        lines.append(
            f"replicas: parameters of each of {len(stages)} {word}s "
            + (f"bitwise equal on its {ranks} ranks" if ranks > 1 else "on one rank, nothing to "
               "compare")
            + f" (sha256 {digests})"
        )  # fmt: skip
    for row in rows if len(stages) == 1 or not equal else ():
        of = f"{word} {row['stage']}: " if len(stages) > 1 else ""
        ranks = f"{row['ranks']} rank{plural(row['ranks'])}"
        if row["bitwise_equal"]:
            lines.append(
                f"replicas: {of}parameters bitwise equal on {ranks} "
                f"(sha256 {row['params_sha256'][:16]})"
            )
        else:
            working = (
                f", to work with {row['working_sha256'][:16]}" if row["working_sha256"] else ""
            )
            lines.append(
                f"replicas: {of}{ranks} from rank {row['first_rank']} hold sha256 "
                f"{row['params_sha256'][:16]}{working}{MARK}"
            )
    for row in sections.get("tied", ()):
        if row["bitwise_equal"]:
            lines.append(
                f"tied table: bitwise equal on both ends, {row['ranks']} ranks "
                f"(sha256 {row['tied_sha256'][:16]})"
            )
        else:
            lines.append(
                f"tied table: {row['ranks']} rank{plural(row['ranks'])} from rank "
                f"{row['first_rank']} hold sha256 {row['tied_sha256'][:16]}{MARK}"
            )
    return lines
