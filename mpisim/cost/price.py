"""Prices a plan: messages and bytes per rank, axis and collective, from the step tables.

The report shows these figures beside what the transport counted; the difference must be 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.codecs import codec_spec
from mpisim.layouts.frames import frame_bytes
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
    ExchangeTied,
    GatherMetrics,
    GatherParams,
    Op,
    RecvActivation,
    RecvGrad,
    ReduceScalars,
    SendActivation,
    SendGrad,
    StartSync,
    StartUnshard,
)

MESSAGES = (SendActivation, RecvActivation, SendGrad, RecvGrad)
"""Ops that move a frame between two stages."""

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
    if isinstance(op, ExchangeTied):
        itemsize = _ITEMSIZES[op.dtype]
        return "pp", all_reduce_table(op.count, 2, itemsize, plan.algorithm), itemsize
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
    for op in plan.ranks[rank]:
        if isinstance(op, MESSAGES):
            kind = "activation" if isinstance(op, (SendActivation, RecvActivation)) else "grad"
            entry = totals.setdefault(("pp", kind), dict.fromkeys(TRAFFIC_FIELDS, 0))
            way = "sent" if isinstance(op, (SendActivation, SendGrad)) else "received"
            entry[f"{way}_messages"] += 1
            entry[f"{way}_bytes"] += message_bytes(plan, op)
    for axis, group, table, itemsize in _tables(plan, rank, committed):
        index = group.index(rank)
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
        for op in plan.ranks[rank]:
            if isinstance(op, (SendActivation, SendGrad)):
                matrix[rank][op.peer] += message_bytes(plan, op)
        for _, group, table, itemsize in _tables(plan, rank, committed):
            for row in table.transfers(group.index(rank)):
                if row.send_to >= 0:
                    matrix[rank][group[row.send_to]] += row.send_count * itemsize
    return matrix


def message_bytes(plan: Plan, op: Op) -> int:
    """Return the bytes of the frame that an op between two stages sends or receives."""
    return frame_bytes(codec_spec(op.codec), op.shape, _ITEMSIZES[plan.param_dtype])


def _tables(
    plan: Plan, rank: int, committed: bool
) -> Iterator[tuple[str, tuple[int, ...], StepTable, int]]:
    """Yield axis, world ranks of the group, table and itemsize of each collective of a rank."""
    for op in plan.ranks[rank]:
        if type(op) in IF_COMMITTED and not committed:
            continue
        found = op_table(plan, op)
        if found is None:
            continue
        if isinstance(op, ExchangeTied):
            group = tuple(sorted((rank, op.peer)))
        elif found[0] == "dp":
            group = plan.mesh.group(rank, "dp")
        else:
            group = tuple(range(plan.mesh.size))
        yield found[0], group, *found[1:]
