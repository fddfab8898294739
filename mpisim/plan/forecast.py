"""Predicts the bytes of a rank: a walk over its ops with byte counts instead of arrays.

The ledger of a real run must show the same figures, category by category, to the byte. What is
reduced, replayed and kept follows from the plan; sizes follow from the block specs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mpisim.layouts.metrics import MEMORY_CATEGORIES, METRIC_NAMES
from mpisim.layouts.specs import BlockSpec
from mpisim.layouts.steps import all_reduce_table, buffered_count, gather_table, scratch_slots
from mpisim.plan.build import BlockSpecs, Plan
from mpisim.plan.ops import CONTROL_SUMS, Backward, Forward, LoadBatch, Op, Recompute
from mpisim.plan.passes import replay_ends
from mpisim.plan.text import op_text


@dataclass(frozen=True)
class Itemsizes:
    """Bytes of one value, by what it is."""

    param: int
    """Parameters as they are updated, and optimizer state."""
    compute: int
    """Working weights; a copy of their own if the size differs from `param`."""
    reduce: int
    """Gradients as they are added up."""
    wire: int
    """Gradients in messages."""
    has_master: bool = False
    """Working weights are a copy beside the parameters."""
    has_wire_copy: bool = False
    """Gradients are rounded into a copy that travels."""


@dataclass
class MemoryForecast:
    """Predicted bytes of one rank by category, as the ledger counts them."""

    live: dict[str, int]
    peak: dict[str, int]
    peak_total: int
    at_peak: dict[str, int]
    peak_op: str
    """The op during which the total peaks."""


def predict_memory(
    plan: Plan,
    rank: int,
    specs: BlockSpecs,
    *,
    itemsizes: Itemsizes,
    optimizer_arrays: int,
    scratch_bytes: int,
    batch_bytes: Callable[[int, int | None], int],
    data_bytes: int,
) -> MemoryForecast:
    """Walk one rank's ops with byte counts.

    Parameters
    ----------
    plan : Plan
    rank : int
    specs : callable
        Block specs for a number of rows and tokens per row.
    itemsizes : Itemsizes
    optimizer_arrays : int
        State arrays per parameter: 2 for adamw, 1 for sgd with momentum, else 0.
    scratch_bytes : int
        The update's working space, category "temp".
    batch_bytes : callable of (int, int or None) to int
        Bytes of a microbatch of that many rows and tokens per row.
    data_bytes : int
        Bytes that the loaded data set keeps.

    Returns
    -------
    MemoryForecast
        `peak` holds each category at its own worst moment; `peak_total` the largest sum.
    """
    per_micro = [
        specs(rows, plan.length(rank, micro)) for micro, rows in enumerate(plan.rows[rank])
    ]
    num_params = sum(p.size for block in specs(1, None) for p in block.params)
    num_grads = sum(bucket.count for bucket in plan.buckets)
    live = dict.fromkeys(MEMORY_CATEGORIES, 0)
    live["params"] = num_params * itemsizes.compute
    live["master_params"] = num_params * itemsizes.param * itemsizes.has_master
    live["grads"] = num_grads * itemsizes.reduce
    live["optimizer"] = num_params * itemsizes.param * optimizer_arrays
    live["comm_buffers"] = comm_buffer_bytes(plan, rank, itemsizes.wire)
    live["comm_buffers"] += num_grads * itemsizes.wire * itemsizes.has_wire_copy
    live["data"] = data_bytes
    live["temp"] = scratch_bytes
    forecast = MemoryForecast(live, dict(live), sum(live.values()), dict(live), "start")
    held: Counter[tuple] = Counter()
    sizes: dict[tuple, int] = {}

    def hold(category: str, key: tuple, nbytes: int) -> None:
        held[key] += 1
        if held[key] == 1:
            sizes[key] = nbytes
            live[category] += nbytes

    def drop(category: str, key: tuple) -> None:
        held[key] -= 1
        if held[key] == 0:
            live[category] -= sizes[key]

    def note(op: Op) -> None:
        for category, nbytes in live.items():
            forecast.peak[category] = max(forecast.peak[category], nbytes)
        if sum(live.values()) > forecast.peak_total:
            forecast.peak_total, forecast.at_peak = sum(live.values()), dict(live)
            forecast.peak_op = op_text(op)

    # A replayed output that is compared with the first one is an array of its own.
    outputs: dict[tuple[int, int], tuple] = {}

    def kept(block: BlockSpec, number: int, micro: int) -> list[tuple[tuple, int]]:
        """List saved tensors: boundaries numbered over the model, and the block's own arrays."""
        items = [
            (("saved", number, boundary if boundary < len(block.layers) else 0, micro), nbytes)
            if boundary < len(block.layers)
            else (outputs.get((number, micro), ("saved", number + 1, 0, micro)), nbytes)
            for boundary in block.saved_boundaries()
            if (nbytes := block.boundary_bytes(boundary)) and not (number == 0 and boundary == 0)
        ]
        if plain := block.extra_saved_bytes - block.interior_bytes:
            items.append((("extra", number, micro), plain))
        return items

    def interior(block: BlockSpec, number: int, micro: int) -> tuple[tuple, int]:
        return ("interior", number, micro), block.interior_bytes

    last = len(plan.blocks) - 1
    keeps: dict[tuple[int, int], str] = {}
    ends = {
        (plan.blocks.index(block), micro)
        for block, micro in replay_ends(plan.ranks[rank], plan.blocks)
    }
    for op in plan.ranks[rank]:
        if isinstance(op, LoadBatch):
            nbytes = batch_bytes(plan.rows[rank][op.micro], plan.length(rank, op.micro))
            hold("data", ("batch", op.micro), nbytes)
            note(op)
            continue
        if not isinstance(op, Forward | Recompute | Backward):
            continue
        micro, number = op.micro, plan.blocks.index(op.block)
        block = per_micro[micro][number]
        key_in, key_out = ("saved", number, 0, micro), ("saved", number + 1, 0, micro)
        if isinstance(op, Forward):
            keeps[number, micro] = op.keep
            if plan.kind == "train":
                if op.keep in ("all", "selective"):
                    for key, nbytes in kept(block, number, micro):
                        hold("activations", key, nbytes)
                    if op.keep == "all":
                        hold("activations", *interior(block, number, micro))
                    else:
                        hold("activations", ("check", number, micro), block.check_bytes)
                elif op.keep == "input" and number:
                    hold("activations", key_in, block.boundary_bytes(0))
            if number != last:
                output = block.boundary_bytes(len(block.layers))
                hold("activations", key_out, output)
                if (number, micro) in ends:
                    hold("activations", key_out, output)
            note(op)
            if number:
                drop("activations", key_in)
            if number == last and plan.kind == "eval":
                drop("data", ("batch", micro))
        elif isinstance(op, Recompute):
            keep = keeps[number, micro]
            hold("activations", *interior(block, number, micro))
            if keep == "selective":
                note(op)
                drop("activations", ("check", number, micro))
                continue
            if (number, micro) in ends:
                outputs[number, micro] = ("replay", number, micro)
            for key, nbytes in kept(block, number, micro):
                hold("activations", key, nbytes)
            output = block.boundary_bytes(len(block.layers))
            replayed = outputs.get((number, micro), key_out)
            hold("activations", replayed, output)
            note(op)
            # The kept input, or the replayed output of the block before.
            if number:
                drop("activations", key_in)
            if (number, micro) in ends:
                drop("activations", replayed)
                drop("activations", key_out)
        else:
            if number:
                hold("activations", ("grad", number, micro), block.boundary_bytes(0))
            note(op)
            for key, _ in kept(block, number, micro):
                drop("activations", key)
            drop("activations", interior(block, number, micro)[0])
            if number < last:
                drop("activations", ("grad", number + 1, micro))
            if number == 0:
                drop("data", ("batch", micro))
    return forecast


def retained_estimate(plan: Plan, rank: int, micro: int, specs: BlockSpecs) -> int:
    """Return what a microbatch keeps between the forward of its loss and its backward, bytes.

    Parameters
    ----------
    plan : Plan
    rank, micro : int
    specs : callable
        Block specs for a number of rows and tokens per row.

    Returns
    -------
    int
        Saved activations and kept inputs, each array once. Not the batch itself, and no random
        words: dropout draws them again.
    """
    keeps = {
        op.block: op.keep
        for op in plan.ranks[rank]
        if isinstance(op, Forward) and op.micro == micro
    }
    boundaries: dict[tuple[int, int], int] = {}
    total = 0
    for number, spec in enumerate(specs(plan.rows[rank][micro], plan.length(rank, micro))):
        keep = keeps[spec.name]
        if keep == "input":
            boundaries[number, 0] = spec.boundary_bytes(0)
        elif keep in ("all", "selective"):
            total += spec.extra_saved_bytes_for(keep)
            for boundary in spec.saved_boundaries():
                last = boundary == len(spec.layers)
                key = (number + 1, 0) if last else (number, boundary)
                boundaries[key] = spec.boundary_bytes(boundary)
    boundaries.pop((0, 0), None)
    return total + sum(boundaries.values())


def comm_buffer_bytes(plan: Plan, rank: int, itemsize: int) -> int:
    """Return the bytes of scratch and control buffers that a rank's communicators hold."""
    mesh = plan.mesh
    index = mesh.coordinate(rank)["dp"]
    scratch, copies = 0, 0
    for bucket in plan.buckets:
        table = all_reduce_table(bucket.count, mesh.dp, itemsize, plan.algorithm)
        number, longest = scratch_slots(table, index)
        scratch = max(scratch, number * longest * itemsize)
        copies += buffered_count(table, index, itemsize) * itemsize
    control, scalars = 0, 0
    for kind_count, _, _ in CONTROL_SUMS.values():
        table = all_reduce_table(kind_count, mesh.size, 8, "auto")
        number, longest = scratch_slots(table, rank)
        control = max(control, number * longest * 8)
        copies += buffered_count(table, rank, 8) * 8
        scalars += kind_count * 8
    gather = gather_table(len(METRIC_NAMES), mesh.size)
    copies += buffered_count(gather, rank, 8) * 8
    metrics = len(METRIC_NAMES) * 8
    collected = gather.count * 8 if rank == 0 else 0
    return scratch + copies + control + scalars + metrics + collected
