"""A run's stages: what each holds, how long it waited, and what its schedule alone would cost.

    layout_of     mesh, schedule and microbatches, as recorded
    stage_blocks  blocks of every coordinate of axis pp
    stage_rows    section ``pipeline`` (one row) and ``stages`` (one per coordinate)

Three figures stand beside each other: the idle share that the schedule has by its closed form, if
all stages were equal; that of a *replay*, the run's own ops on a clock (`cost.simulate`) with the
compute times that were measured and messages that take no time; and the measured one. From the
first to the second it is the balance of the stages, from the second to the third the messages.

Imported for pipelines only: this reads traces, so it needs NumPy.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from mpisim.cost.bubbles import closed_form
from mpisim.cost.simulate import PlanTimeline, simulate_plan, simulate_schedule
from mpisim.errors import MpisimError
from mpisim.plan.build import Plan
from mpisim.plan.check_pipeline import in_flight
from mpisim.plan.ops import Op
from mpisim.plan.text import op_text, parse_plan
from mpisim.report.load import Layout, Run, layout_of
from mpisim.report.traces import RECEIVES, TRAIN, read_traces
from mpisim.trace.store import RankTrace

Row = dict[str, Any]


@dataclass
class RankTimes:
    """Where the time of one rank's training steps went, mean per step in seconds.

    Of the steps without warm-up; the gather of the figures at the end of a step is left out.
    """

    step_s: float
    compute_s: float
    """In ops that never wait."""
    wait_s: dict[str, float] = field(default_factory=dict)
    """``receive`` (messages of axis pp), ``send``, ``dp``, ``control`` (all ranks)."""
    op_s: dict[str, float] = field(default_factory=dict)
    """Text of an op that never waits -> seconds, mean over its runs."""


def stage_blocks(run: Run) -> dict[int, tuple[tuple[str, ...], ...]]:
    """Return the blocks of each coordinate of axis pp, one tuple per chunk it holds."""
    pp = layout_of(run).pp
    stages = recorded_stages(run)
    return {place: stages[place::pp] for place in range(pp if stages else 0)}


def recorded_stages(run: Run) -> tuple[tuple[str, ...], ...]:
    """Return the blocks of each stage as run.json lists them; none without stages."""
    return tuple(tuple(map(str, stage)) for stage in run.record.get("stages", ()))


def stage_rows(run: Run) -> list[Row]:
    """Return the sections ``pipeline`` and ``stages`` of a run; none for one stage."""
    layout = layout_of(run)
    if layout.pp == 1:
        return []
    traces, _ = read_traces(run.path)
    times = {trace.rank: made for trace in traces if (made := rank_times(trace, run.warmup_steps))}
    blocks = stage_blocks(run)
    plan = _traced_plan(layout, traces, blocks)
    played = _replay(plan, times) if plan is not None else None
    if len(times) < run.num_ranks:
        times = {}
    measured = {rank: _shares(made) for rank, made in times.items()}
    source = "trace"
    if not times:
        source, measured = "summary.json", _summary_shares(run)
    rows = [
        _stage_row(run, place, blocks.get(place, ()), measured, times, plan, played)
        for place in range(layout.pp)
    ]
    idle = [row["idle_share"] for row in rows if row["idle_share"] is not None]
    alone = [_replayed_idle(played, rank) for rank in range(run.num_ranks if played else 0)]
    head = {
        "section": "pipeline",
        "dp": layout.dp,
        "pp": layout.pp,
        "schedule": layout.schedule,
        "chunks": layout.chunks,
        "microbatches": layout.num_microbatches,
        "activation_codec": layout.activation_codec,
        "grad_codec": layout.grad_codec,
        "closed_form_bubble": _closed_form(layout),
        "replayed_idle_share": None if played is None else sum(alone) / len(alone),
        "idle_share": sum(idle) / len(idle) if len(idle) == layout.pp else None,
        "step_s": max((made.step_s for made in times.values()), default=None),
        "replayed_step_s": None if played is None else float(played.step_s),
        "source": source if measured else "",
    }
    return [head, *rows]


def _stage_row(
    run: Run,
    place: int,
    chunks: tuple[tuple[str, ...], ...],
    measured: dict[int, dict[str, float]],
    times: dict[int, RankTimes],
    plan: Plan | None,
    played: PlanTimeline | None,
) -> Row:
    layout = layout_of(run)
    ranks = [rank for rank in range(run.num_ranks) if layout.stage_of(rank) == place]
    entries = [e for e in (run.summary or {}).get("ranks", ()) if e["rank"] in ranks]
    peak = max((e["memory"]["peak_total"] for e in entries), default=None)
    predicted = max((e["predicted_memory"]["peak_total"] for e in entries), default=None)

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    def share(cause: str) -> float | None:
        return mean([measured[rank][cause] for rank in ranks if rank in measured])

    alone = None
    if played is not None:
        alone = mean([_replayed_idle(played, rank) for rank in ranks])
    receive, control = share("receive"), share("control")
    return {
        "section": "stages",
        "stage": place,
        "ranks": len(ranks),
        "first_rank": ranks[0],
        "blocks": " + ".join(",".join(blocks) for blocks in chunks) or None,
        "num_blocks": sum(map(len, chunks)) or None,
        "in_flight": _in_flight(layout, place, plan),
        "peak_bytes": peak,
        "predicted_peak_bytes": predicted,
        "difference_bytes": None if peak is None else peak - predicted,
        "compute_s": mean([times[rank].compute_s for rank in ranks if rank in times]),
        "compute_share": mean(
            [times[rank].compute_s / times[rank].step_s for rank in ranks if rank in times]
        ),
        "receive_share": receive,
        "send_share": share("send"),
        "dp_share": share("dp"),
        "control_share": control,
        "idle_share": None if receive is None else receive + control,
        "replayed_idle_share": alone,
    }


def _replayed_idle(played: PlanTimeline, rank: int) -> float:
    """Return a rank's idle share of a replayed step: what counts as idle when it is measured."""
    waits = played.waits[rank]
    idle = sum(waits[cause] for cause in ("receive", "tied", "control", "end"))
    return float(idle / played.step_s) if played.step_s else 0.0


def _closed_form(layout: Layout) -> float | None:
    found = closed_form(layout.schedule, layout.pp, layout.num_microbatches, layout.chunks)
    return None if found is None else float(found)


def _in_flight(layout: Layout, place: int, plan: Plan | None) -> int | float | None:
    """Return the most microbatches that a rank keeps, by its plan; without one, by schedule."""
    if plan is not None:
        return in_flight(plan, place)
    try:
        line = simulate_schedule(
            layout.schedule, layout.pp, layout.num_microbatches, layout.chunks, forward_s=1,
            backward_s=1,
        )  # fmt: skip
    except MpisimError:  # a schedule of an extension that is not here
        return None
    most = line.in_flight[place]
    return int(most) if most.denominator == 1 else float(most)


# Times --------------------------------------------------------------------------------------------


def rank_times(trace: RankTrace, first_step: int) -> RankTimes | None:
    """Return where a rank's time went in training steps from `first_step` on; None: none is whole.

    A run that is no longer than its warm-up has no such steps: then all are taken.
    """
    whole = [
        (step, ident, stamps)
        for step, ident, stamps in trace.ops
        if trace.plans[ident].name.startswith(TRAIN)
        and len(stamps) == len(trace.plans[ident].kinds)
    ]
    chosen = [item for item in whole if item[0] >= first_step] or whole
    if not chosen:
        return None
    total = RankTimes(0.0, 0.0, dict.fromkeys(("receive", "send", "dp", "control"), 0.0))
    seconds: dict[str, list[float]] = defaultdict(list)
    for _, ident, stamps in chosen:
        plan = trace.plans[ident]
        spans = (stamps[:, 1] - stamps[:, 0]).tolist()
        end = stamps[0, 0]
        for kind, axis, text, span, stop in zip(
            plan.kinds, plan.waits, plan.texts, spans, stamps[:, 1].tolist(), strict=True
        ):
            if kind == "GatherMetrics":
                continue
            end = max(end, stop)
            if not axis:
                total.compute_s += span
                seconds[text].append(span)
            else:
                total.wait_s[_cause(kind, axis)] += span
        total.step_s += float(end - stamps[0, 0])
    count = len(chosen)
    return RankTimes(
        total.step_s / count,
        total.compute_s / count,
        {cause: spent / count for cause, spent in total.wait_s.items()},
        {text: sum(spans) / len(spans) for text, spans in seconds.items()},
    )


def _cause(kind: str, axis: str) -> str:
    if axis != "pp":
        return axis
    return "receive" if kind in (*RECEIVES, "ExchangeTied") else "send"


def _shares(times: RankTimes) -> dict[str, float]:
    return {cause: spent / (times.step_s or 1.0) for cause, spent in times.wait_s.items()}


def _summary_shares(run: Run) -> dict[int, dict[str, float]]:
    """Return the same off summary.json: of all steps, warm-up included."""
    step_s = sum(row["step_s"] for row in run.steps)
    if run.summary is None or step_s <= 0:
        return {}
    found = {}
    for entry in run.summary["ranks"]:
        shares = dict.fromkeys(("receive", "send", "dp", "control"), 0.0)
        for name, seconds in entry["stall_s"].items():
            axis, _, cause = name.partition(" ")
            key = ("receive" if cause == "recv" else "send") if axis == "pp" else axis
            shares[key] = shares.get(key, 0.0) + seconds / step_s
        found[entry["rank"]] = shares
    return found


# Replay -------------------------------------------------------------------------------------------


def _traced_plan(
    layout: Layout, traces: list[RankTrace], blocks: dict[int, tuple[tuple[str, ...], ...]]
) -> Plan | None:
    """Return the first training plan as traced; None: a rank's part is missing, or not today's."""
    parts = {}
    for trace in traces:
        plan = next((plan for plan in trace.plans.values() if plan.name.startswith(TRAIN)), None)
        if plan is not None:
            parts[trace.rank] = plan.texts
    size = layout.dp * layout.pp
    known = set(parts) == set(range(size)) and set(blocks) == set(range(layout.pp))
    if not known or any(len(c) != layout.chunks for c in blocks.values()):
        return None
    stages = [blocks[s % layout.pp][s // layout.pp] for s in range(layout.pp * layout.chunks)]
    lines = [
        "mpisim plan 1", "kind train", f"mesh dp={layout.dp} pp={layout.pp} tp=1", "dtype float32",
        "algorithm auto", "zero 0", "params float32",
        "blocks " + " ".join(name for stage in stages for name in stage),
        "stages " + " ".join(map(",".join, stages)),
    ]  # fmt: skip
    for rank in range(size):
        lines += [f"rank {rank} rows=", *(f"  {text}" for text in parts[rank])]
    try:
        return parse_plan("\n".join(lines) + "\n")
    except MpisimError:  # ops of another version
        return None


def _replay(plan: Plan, times: dict[int, RankTimes]) -> PlanTimeline | None:
    """Run the traced ops on a clock with measured compute times and messages that take none."""
    if len(times) < len(plan.ranks):
        return None

    def seconds(rank: int, op: Op) -> float:
        return times[rank].op_s.get(op_text(op), 0.0)

    try:
        return simulate_plan(plan, seconds)
    except (MpisimError, KeyError, IndexError):
        return None
