"""Prices a plan: messages and bytes per rank, axis and collective, from the step tables.

The report shows these figures beside what the transport counted; the difference must be 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.metrics import TRAFFIC_FIELDS
from mpisim.layouts.steps import (
    StepTable,
    all_gather_table,
    all_reduce_table,
    gather_table,
    reduce_scatter_table,
)
from mpisim.plan.build import Plan
from mpisim.plan.ops import (
    IF_COMMITTED,
    GatherMetrics,
    GatherParams,
    Op,
    ReduceScalars,
    StartSync,
    StartUnshard,
)

_ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}

Priced = dict[tuple[str, str], dict[str, int]]
"""(axis, collective) -> `TRAFFIC_FIELDS` -> exact count."""


def op_table(plan: Plan, op: Op) -> tuple[str, StepTable, int] | None:
    """Return the axis, step table and itemsize of the collective an op starts, if it starts one."""
    if isinstance(op, StartSync):
        itemsize = _ITEMSIZES[plan.dtype]
        if op.collective == "reduce_scatter":
            return "dp", reduce_scatter_table(op.count, plan.mesh.dp, itemsize), itemsize
        table = all_reduce_table(op.count, plan.mesh.dp, itemsize, plan.algorithm)
        return "dp", table, itemsize
    if isinstance(op, (StartUnshard, GatherParams)):
        itemsize = _ITEMSIZES[plan.param_dtype]
        bounds = chunk_bounds(op.count, plan.mesh.dp)
        return "dp", all_gather_table(bounds, itemsize), itemsize
    if isinstance(op, ReduceScalars):
        itemsize = _ITEMSIZES[op.dtype]
        return "control", all_reduce_table(op.count, plan.mesh.size, itemsize, "auto"), itemsize
    if isinstance(op, GatherMetrics):
        return "control", gather_table(op.count, plan.mesh.size), 8
    return None


def price_rank(plan: Plan, rank: int, committed: bool = True) -> Priced:
    """Return what one step of `plan` makes `rank` send and receive.

    Parameters
    ----------
    plan : Plan
    rank : int
    committed : bool
        The update is made; False: it is skipped, and with it what follows from it only.

    Returns
    -------
    dict
        Keyed by (axis, collective); values count messages and bytes (see `TRAFFIC_FIELDS`).
    """
    totals: Priced = {}
    for axis, table, itemsize in _tables(plan, rank, committed):
        index = plan.mesh.coordinate(rank)["dp"] if axis == "dp" else rank
        entry = totals.setdefault((axis, table.collective), dict.fromkeys(TRAFFIC_FIELDS, 0))
        entry["sent_messages"] += table.sent_messages(index)
        entry["sent_bytes"] += table.sent_bytes(index, itemsize)
        entry["received_messages"] += table.received_messages(index)
        entry["received_bytes"] += table.received_bytes(index, itemsize)
    return totals


def bytes_matrix(plan: Plan, committed: bool = True) -> list[list[int]]:
    """Return bytes sent per step as ``matrix[sender][receiver]``, all axes together."""
    size = plan.mesh.size
    matrix = [[0] * size for _ in range(size)]
    for rank in range(size):
        for axis, table, itemsize in _tables(plan, rank, committed):
            group = plan.mesh.group(rank, "dp") if axis == "dp" else tuple(range(size))
            for row in table.transfers(group.index(rank)):
                if row.send_to >= 0:
                    matrix[rank][group[row.send_to]] += row.send_count * itemsize
    return matrix


def _tables(plan: Plan, rank: int, committed: bool) -> Iterator[tuple[str, StepTable, int]]:
    for op in plan.ranks[rank]:
        if type(op) in IF_COMMITTED and not committed:
            continue
        found = op_table(plan, op)
        if found is not None:
            yield found
