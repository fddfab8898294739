"""A rank's figures of one step, in the order in which they travel to rank 0."""

from __future__ import annotations

from mpisim.comm.communicator import Traffic
from mpisim.engine.state import EngineState
from mpisim.layouts.metrics import (
    CHANNELS,
    MEMORY_CATEGORIES,
    METRIC_NAMES,
    TRAFFIC_FIELDS,
)
from mpisim.plan.ops import WAIT_AXIS

_INDEX = {name: position for position, name in enumerate(METRIC_NAMES)}


def fill_metrics(state: EngineState) -> None:
    """Write this rank's figures of the running step into `state.metrics`.

    Times and stalls are those before the gather of the figures themselves; traffic includes it.
    """
    meter, recorder, values = state.meter, state.recorder, state.metrics
    values[:] = 0.0
    stamps, kinds = recorder.op_stamps, state.plan_kinds
    done = len(stamps) // 2
    values[_INDEX["step_s"]] = recorder.clock() - stamps[0]
    compute = 0.0
    # Start and end of every op that may wait on the axis, in order.
    blocked: dict[str, list[float]] = {"dp": [], "pp": [], "control": []}
    for index in range(done):
        axis = WAIT_AXIS.get(kinds[index])
        span = stamps[2 * index : 2 * index + 2]
        if axis is None:
            compute += span[1] - span[0]
        else:
            blocked[axis] += span
    values[_INDEX["compute_s"]] = compute
    values[_INDEX["rows"]] = sum(state.plan_rows)
    if recorder.enabled:
        stalls = meter.stalls(state.dp, blocked["dp"])
        stalls |= meter.whole_stalls(state.control)
    else:
        # Without stamps inside the collectives, all time in a blocking op counts as waiting.
        stalls = {
            (axis, "recv"): sum(times[1::2]) - sum(times[::2]) for axis, times in blocked.items()
        }
    waited = meter.link_stalls(state.links)
    if state.tied is not None:
        # Both ends come to it when their pipeline is empty.
        waited["pp", "recv"] += sum(meter.whole_stalls(state.tied).values())
    stalls |= waited
    for (axis, cause), seconds in stalls.items():
        values[_INDEX[f"stall_{axis}_{cause}_s"]] = seconds
        meter.stall_totals[axis, cause] += seconds
    moved = {**meter.traffic(state.dp), **meter.traffic(state.control)}
    moved |= meter.traffic(state.links)
    if state.tied is not None:
        moved |= meter.traffic(state.tied)
    for axis, collective in CHANNELS:
        traffic = moved.get((axis, collective), Traffic())
        if collective == "gather":
            # The gather that carries these figures is about to run.
            traffic = Traffic(*state.gather_traffic)
        for field in TRAFFIC_FIELDS:
            values[_INDEX[f"{axis}_{collective}_{field}"]] = getattr(traffic, field)
    for category in MEMORY_CATEGORIES:
        values[_INDEX[f"live_{category}_bytes"]] = state.ledger.live[category]
        values[_INDEX[f"peak_{category}_bytes"]] = state.ledger.peak[category]
    values[_INDEX["peak_total_bytes"]] = state.ledger.peak_total
