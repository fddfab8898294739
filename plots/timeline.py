"""Gantt chart: what every rank computed, waited for and received during a step.

Each rank has a bar of plan ops and, below it, a thin lane of the messages it received, from the
moment it could take them to the moment they were there. A message below compute is hidden by it.
Bars carry the names of their blocks; where only a number fits, it is that of the name. With stages
they carry the number of the microbatch, and a letter for the chunk where a rank holds several; a
thin line leads from where a stage sent a message to where the next one had it.
Between two ops the engine advances started collectives; that time is drawn like their start.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import (
    BLACK,
    GREY,
    LIGHT_VERMILION,
    MID_GREY,
    OP_COLOURS,
    VERMILION,
    VIOLET,
    WAIT_COLOURS,
    NoData,
    heading,
    ink,
    kind_colour,
    kind_handles,
    main,
    read_traces,
    run_title,
    skipped_steps,
    time_unit,
)
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mpisim.cost.bubbles import closed_form
from mpisim.plan.grid import chunk_letter
from mpisim.report import load_run
from mpisim.report.load import Layout, layout_of
from mpisim.report.stages import recorded_stages
from mpisim.report.traces import (
    TRAIN,
    Overlap,
    expand_stage_messages,
    op_fields,
    overlap,
    stage_message_keys,
)
from mpisim.trace.store import RankTrace, expand_messages, expand_ops

BAR = (-0.34, 0.14)
LANE = (0.19, 0.36)
"""From top to bottom of a rank's row, in rows."""

WAIT_LABELS = {
    "pp": "wait for another stage (pp)",
    "sends": "wait for a send to leave (pp)",
    "dp": "wait for gradients (dp)",
    "params": "wait for parameters (dp)",
    "control": "wait for scalars (control)",
}
BUCKET_COLOURS = (VERMILION, LIGHT_VERMILION)
"""Of even and of odd buckets, so that neighbours differ."""
SCALARS_COLOUR = MID_GREY
PARAMS_COLOUR = VIOLET
PARAMS = -1
"""In place of a gradient bucket: parameters that are gathered."""
CROSSING_STYLES = {False: "solid", True: (0, (4, 2))}
"""Of messages between stages: activations, gradients."""
DRAWN_AS = {
    "CheckGradients": "OptimizerStep", "StartUnshard": "StartSync", "Reshard": "StartSync",
    "SendActivation": "StartSync", "SendGrad": "StartSync",
}  # fmt: skip
"""Kinds that share the colour and the label of another one."""


@dataclass
class Lane:
    """One rank's bars; times in seconds since the first op shown."""

    rank: int
    ops: list[tuple[float, float, str, str]] = field(default_factory=list)
    """Start, end, colour key (op kind or ``wait AXIS``), name of the block."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Start, end: between two ops of one plan."""
    messages: list[tuple[float, float, int | None]] = field(default_factory=list)
    """Posted, completed, gradient bucket; `PARAMS`: parameters; None: scalars."""
    stage: int | None = None
    """Place on axis pp; None: there are no stages."""
    cells: list[tuple[float, float, str, str]] = field(default_factory=list)
    """With stages: start, end, colour key, microbatch and chunk of neighbours that share these."""


@dataclass
class Crossing:
    """A message from one stage to another."""

    source: int
    """Row of the sender."""
    dest: int
    sent_s: float
    received_s: float
    is_grad: bool


@dataclass
class Timeline:
    """What `draw` needs."""

    title: str
    lanes: list[Lane]
    overlap: Overlap | None = None
    crossings: list[Crossing] = field(default_factory=list)
    bubble: float | None = None
    """Idle share of the schedule by its closed form, if stages were equal."""
    chunks: dict[str, int] = field(default_factory=dict)
    """Block -> chunk of its rank, where ranks hold several."""
    num_chunks: int = 1


def load(run_dir: Path, step: int | None = None, steps: int = 1) -> Timeline:
    """Read `steps` steps from `step` on; by default one of the middle that made an update."""
    run = load_run(run_dir)
    traces = read_traces(run)
    common = set.intersection(*(_training_steps(trace) for trace in traces))
    if not common:
        raise NoData("no step is complete in the trace of every rank.")
    skipped = skipped_steps(run)
    if step is None:
        steady = sorted(number for number in common if number >= run.warmup_steps)
        updated = [number for number in steady if number not in skipped]
        choice = updated or steady or sorted(common)
        step = choice[len(choice) // 2]
    if step not in common:
        raise NoData(f"step {step} is not in the trace; it has {min(common)} to {max(common)}.")
    last = max(number for number in common if number < step + steps)
    layout = layout_of(run)
    stages = dict(enumerate(recorded_stages(run)))
    chunks = {block: stage // layout.pp for stage, blocks in stages.items() for block in blocks}
    letters = {
        block: chunk_letter(chunk) if layout.chunks > 1 else "" for block, chunk in chunks.items()
    }
    lanes = [_lane(trace, step, last, letters) for trace in traces]
    crossings = _crossings(traces, step, last) if layout.pp > 1 else []
    zero = min(start for lane in lanes for start, *_ in lane.ops)
    for lane in lanes:
        lane.ops = [(a - zero, b - zero, *rest) for a, b, *rest in lane.ops]
        lane.gaps = [(a - zero, b - zero) for a, b in lane.gaps]
        lane.messages = [(a - zero, b - zero, bucket) for a, b, bucket in lane.messages]
        lane.cells = [(a - zero, b - zero, *rest) for a, b, *rest in lane.cells]
        lane.stage = layout.stage_of(lane.rank) if layout.pp > 1 else None
    for crossing in crossings:
        crossing.sent_s -= zero
        crossing.received_s -= zero
    shown = _which(step, last, [number for number in skipped if step <= number <= last])
    counted = overlap(traces, run.warmup_steps)
    return Timeline(
        run_title(run, f"Timeline of {shown}"), lanes, counted if counted.ring_steps else None,
        crossings, _bubble(layout), chunks, layout.chunks,
    )  # fmt: skip


def _bubble(layout: Layout) -> float | None:
    if layout.pp == 1:
        return None
    found = closed_form(layout.schedule, layout.pp, layout.num_microbatches, layout.chunks)
    return None if found is None else float(found)


def _which(first: int, last: int, skipped: list[int]) -> str:
    """Return which steps are shown, and which of them no rank made."""
    if first == last:
        return f"step {first}, skipped" if skipped else f"step {first}"
    text = f"steps {first} to {last}"
    if not skipped:
        return text
    named = ", ".join(map(str, skipped)) if len(skipped) <= 4 else f"{len(skipped)} of them"
    return f"{text}, skipped: {named}"


def _training_steps(trace: RankTrace) -> set[int]:
    return {step for step, plan, _ in trace.ops if trace.plans[plan].name.startswith(TRAIN)}


def _crossings(traces: list[RankTrace], first: int, last: int) -> list[Crossing]:
    """Return the messages between stages whose both sides are shown."""
    sides: dict[tuple, dict[bool, tuple[int, float]]] = {}
    for row, trace in enumerate(traces):
        messages = expand_stage_messages(trace)
        # Occurrences below 0 are those of evaluations.
        shown = (messages["step"] >= first) & (messages["step"] <= last)
        messages = messages[shown & (messages["occurrence"] >= 0)]
        for key, message in zip(stage_message_keys(trace.rank, messages), messages, strict=True):
            is_send = bool(message["is_send"])
            at = message["posted_s" if is_send else "completed_s"]
            sides.setdefault(key, {})[is_send] = (row, float(at))
    return [
        Crossing(both[True][0], both[False][0], both[True][1], both[False][1], bool(key[-1]))
        for key, both in sides.items()
        if len(both) == 2
    ]


def _lane(trace: RankTrace, first: int, last: int, chunks: dict[str, str]) -> Lane:
    lane = Lane(trace.rank)
    ops = expand_ops(trace)
    before = None
    for row in ops[(ops["step"] >= first) & (ops["step"] <= last)]:
        plan = trace.plans[int(row["plan"])]
        # The evaluation after the last step shown is no part of it.
        if int(row["step"]) == last and not plan.name.startswith(TRAIN):
            continue
        index = int(row["op_index"])
        kind, axis, words = plan.kinds[index], plan.waits[index], plan.texts[index].split()
        if kind in ("WaitUnshard", "GatherParams"):
            axis = "params"
        elif kind == "WaitSend":
            axis = "sends"
        kind = DRAWN_AS.get(kind, kind)
        key = f"wait {axis}" if axis else kind if kind in OP_COLOURS else "other compute"
        block = next((word[6:] for word in words if word.startswith("block=")), "")
        start, end = float(row["start_s"]), float(row["end_s"])
        if before is not None and before[:2] == (row["step"], row["plan"]):
            lane.gaps.append((before[2], start))
        lane.ops.append((start, end, key, block))
        before = (row["step"], row["plan"], end)
        if block and chunks:
            label = op_fields(plan.texts[index])["micro"] + chunks.get(block, "")
            _add_cell(lane.cells, (start, end, key, label), follows=lane.ops[-2:-1])
    end = max(op[1] for op in lane.ops)
    # Between stages all that is not of axis dp is waited for in the open: the bars show it.
    axes = ("dp",) if chunks else ("dp", "control")
    hidden = [ident for ident, program in trace.programs.items() if program.axis not in axes]
    messages = expand_messages(trace)
    shown = ~messages["is_send"] & (messages["step"] >= first) & (messages["step"] <= last)
    shown &= ~np.isin(messages["program"], hidden)
    for row in messages[shown & (messages["completed_s"] <= end)]:
        program = trace.programs[int(row["program"])]
        what, _, number = program.label.rpartition(" ")
        bucket = int(number) if program.axis == "dp" and number.isdigit() else None
        if what == "params":
            bucket = PARAMS
        lane.messages.append((float(row["posted_s"]), float(row["completed_s"]), bucket))
    return lane


def _add_cell(
    cells: list[tuple[float, float, str, str]],
    op: tuple[float, float, str, str],
    follows: list[tuple[float, float, str, str]],
) -> None:
    """Add an op of a block to the cells: to the last one if it goes on with that."""
    start, end, key, label = op
    if cells and cells[-1][2:] == (key, label) and follows and follows[0][1] == cells[-1][1]:
        cells[-1] = (cells[-1][0], end, key, label)
    else:
        cells.append(op)


def draw(fig: Figure, data: Timeline) -> None:
    """Draw the lanes of all ranks below each other."""
    ranks = len(data.lanes)
    fig.set_size_inches(11, min(1.9 + 0.72 * ranks, 20))
    ax = fig.subplots()
    end_s = max(end for lane in data.lanes for _, end, *_ in lane.ops)
    size, unit = time_unit(end_s)
    seen: set = set()
    ax.set_xlim(0, end_s / size)
    for row, lane in enumerate(data.lanes):
        bars = [(a / size, b / size, _colour(data, key, block)) for a, b, key, block in lane.ops]
        gaps = [(a / size, b / size, OP_COLOURS["StartSync"]) for a, b in lane.gaps]
        # A gap of a few microseconds is the loop itself.
        _bars(ax, bars + [gap for gap in gaps if _points(ax, gap[1] - gap[0]) > 1], row, BAR)
        received = [(a / size, b / size, _message_colour(key)) for a, b, key in lane.messages]
        _bars(ax, received, row, LANE)
        # A wait that nobody can see needs no name.
        seen |= {
            key for a, b, key, _ in lane.ops
            if not key.startswith("wait") or _points(ax, (b - a) / size) > 0.5
        }  # fmt: skip
        if ranks <= 16:
            _names(ax, data, row, size)
    _lines(ax, data.crossings, size)
    ax.set_ylim(ranks - 0.5, -0.5)
    every = max(1, ranks // 32)
    shown = range(0, ranks, every)
    bar_middle = float(np.mean(BAR))
    word = "place" if data.num_chunks > 1 else "stage"
    ax.set_yticks(
        [row + bar_middle for row in shown],
        [_row_name(data.lanes[row], ranks, word) for row in shown],
    )
    if ranks <= 16 and any(lane.messages for lane in data.lanes):
        ax.set_yticks(
            [row + float(np.mean(LANE)) for row in shown], ["received"] * ranks, minor=True
        )
    ax.tick_params(axis="y", which="both", length=0)
    ax.tick_params(axis="y", which="minor", labelsize=7, labelcolor=GREY)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"time since the first op shown ({unit})")
    ax.grid(axis="x")
    finding = ""
    if data.overlap is not None:
        finding = (
            f"after warm-up, {data.overlap.share:.0%} of the ring steps of all buckets but the "
            f"last were over before backward ended"
        )
    if data.lanes[0].stage is not None:
        finding = _waits(data) + (f"\n{finding}" if finding else "")
    heading(fig, data.title, finding)
    handles = kind_handles(seen, data.num_chunks)
    handles += [
        Patch(color=WAIT_COLOURS[axis], label=label)
        for axis, label in WAIT_LABELS.items()
        if f"wait {axis}" in seen
    ]
    handles += [
        Line2D([], [], color=BLACK, linewidth=0.9, linestyle=style, label=label)
        for (is_grad, style), label in zip(
            CROSSING_STYLES.items(), ("activations cross", "gradients cross"), strict=True
        )
        if any(crossing.is_grad == is_grad for crossing in data.crossings)
    ]
    handles += _message_handles({key for lane in data.lanes for *_, key in lane.messages})
    fig.legend(handles=handles, loc="outside lower center", ncols=5)


def _row_name(lane: Lane, ranks: int, word: str) -> str:
    stage = "" if lane.stage is None else f"{word} {lane.stage}"
    between = "\n" if ranks <= 16 else ", "
    return f"rank {lane.rank}" + (f"{between}{stage}" if stage else "")


def _colour(data: Timeline, key: str, block: str) -> str:
    axis = key.removeprefix("wait ")
    if axis != key:
        return WAIT_COLOURS[axis]
    return kind_colour(key, data.chunks.get(block, 0), data.num_chunks)


def _waits(data: Timeline) -> str:
    """Say which part of what is shown the ranks waited for each other."""
    span = max(end for lane in data.lanes for _, end, *_ in lane.ops) * len(data.lanes)

    def share(*keys: str) -> float:
        return sum(b - a for lane in data.lanes for a, b, key, _ in lane.ops if key in keys) / span

    numbers = "; numbers: microbatches"
    if data.num_chunks > 1:
        numbers = "\nnumbers: microbatches, letters: chunks of the rank"
    alone = ""
    if data.bubble is not None:
        alone = f" (equal stages by the schedule: {data.bubble:.0%} idle)"
    return (
        f"mean over ranks: {share('wait pp'):.0%} waiting for another stage, "
        f"{share('wait control'):.0%} for all ranks{alone}{numbers}"
    )


def _lines(ax, crossings: list[Crossing], size: float) -> None:
    """Draw a line per message, from the sender's bar to the receiver's."""
    for is_grad, style in CROSSING_STYLES.items():
        lines = []
        for item in crossings:
            if item.is_grad == is_grad:
                down = item.dest > item.source
                ends = (BAR[1], BAR[0]) if down else (BAR[0], BAR[1])
                lines.append(
                    [(item.sent_s / size, item.source + ends[0]),
                     (item.received_s / size, item.dest + ends[1])]
                )  # fmt: skip
        ax.add_collection(
            LineCollection(lines, colors=BLACK, linewidths=0.6, linestyles=[style], alpha=0.75)
        )


def _message_colour(bucket: int | None) -> str:
    if bucket == PARAMS:
        return PARAMS_COLOUR
    return SCALARS_COLOUR if bucket is None else BUCKET_COLOURS[bucket % 2]


def _message_handles(received: set[int | None]) -> list[Patch]:
    """Return the legend of the messages; it names buckets that are there, and no others."""
    handles = []
    for parity, colour in enumerate(BUCKET_COLOURS):
        buckets = sorted(key for key in received if key not in (None, PARAMS) and key % 2 == parity)
        if buckets:
            named = ", ".join(map(str, buckets[:2])) + (", ..." if len(buckets) > 2 else "")
            word = "bucket" if len(buckets) == 1 else "buckets"
            handles.append(Patch(color=colour, label=f"received: {word} {named}"))
    if PARAMS in received:
        handles.append(Patch(color=PARAMS_COLOUR, label="received: parameters"))
    if None in received:
        handles.append(Patch(color=SCALARS_COLOUR, label="received: scalars"))
    return handles


def _points(ax, span: float) -> float:
    """Return about how many points wide a span of time is in the picture."""
    low, high = ax.get_xlim()
    return span / (high - low) * ax.figure.get_size_inches()[0] * 72 * 0.88


def _bars(ax, bars: list[tuple[float, float, str]], row: int, place: tuple[float, float]) -> None:
    top, bottom = row + place[0], row + place[1]
    wide = [_points(ax, b - a) > 2.5 for a, b, _ in bars]
    ax.add_collection(
        PolyCollection(
            [[(a, top), (b, top), (b, bottom), (a, bottom)] for a, b, _ in bars],
            facecolors=[colour for *_, colour in bars],
            # A white edge parts neighbours; around a hairline it would hide it.
            edgecolors=[
                "white" if is_wide else colour
                for is_wide, (*_, colour) in zip(wide, bars, strict=True)
            ],
            linewidths=0.35,
        )
    )


def _names(ax, data: Timeline, row: int, size: float) -> None:
    """Write block names, or else their numbers, into the bars that are wide enough for them."""
    lane = data.lanes[row]
    starts = {start: block for start, _, _, block in lane.ops}
    for start, stop, key, name in lane.cells or lane.ops:
        number = "" if lane.cells else re.search(r"\d*$", name).group()
        room = _points(ax, (stop - start) / size)
        text = next((text for text in (name, number) if text and room > 5.2 * len(text) + 4), "")
        font = 7.0
        if lane.cells and not text and room > 4.2 * len(name) + 1:
            text, font = name, 6.0
        if text:
            # A cell of several ops is of the colour of its first.
            colour = _colour(data, key, starts.get(start, ""))
            ax.text(
                (start + stop) / 2 / size, row + float(np.mean(BAR)), text, ha="center",
                va="center", fontsize=font, color=ink(colour), clip_on=True,
            )  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --step and --steps."""
    parser.add_argument("--step", type=int, help="first step shown; default: a middle one")
    parser.add_argument("--steps", type=int, default=1, metavar="K", help="steps shown; default 1")


if __name__ == "__main__":
    raise SystemExit(main("timeline", load, draw, __doc__, add_options))
