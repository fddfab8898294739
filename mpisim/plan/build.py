"""Builds a plan: the passes, in their one fixed order, for every rank of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mpisim.layouts.specs import BlockSpec
from mpisim.mesh import Mesh
from mpisim.plan.ops import Forward, LoadBatch, Op, ReduceScalars
from mpisim.plan.partition import Bucket, make_buckets
from mpisim.plan.passes import expand_blocks, frame_update, sync_gradients
from mpisim.plan.schedules import accumulate


@dataclass(frozen=True)
class Plan:
    """All ops of all ranks for one step, and what they refer to."""

    kind: str
    """``train`` or ``eval``."""
    mesh: Mesh
    dtype: str
    algorithm: str
    rows: tuple[tuple[int, ...], ...]
    """Rows per rank and microbatch: the shape signature the plan was built for."""
    blocks: tuple[str, ...]
    """Block names, in forward order."""
    buckets: tuple[Bucket, ...]
    ranks: tuple[tuple[Op, ...], ...] = field(repr=False)
    """The ops, per rank, in order."""

    @property
    def name(self) -> str:
        """Kind and shape, such as ``train-4x2x64``: ranks x microbatches x largest rows."""
        largest = max((max(rows, default=0) for rows in self.rows), default=0)
        even = all(count == largest for rows in self.rows for count in rows)
        suffix = "" if even else f"-of-{sum(map(sum, self.rows))}"
        return f"{self.kind}-{len(self.rows)}x{len(self.rows[0])}x{largest}{suffix}"


BlockSpecs = Callable[[int], tuple[BlockSpec, ...]]
"""Block specs as a function of the rows of a microbatch."""


def build_train_plan(
    *,
    mesh: Mesh,
    specs: BlockSpecs,
    rows: tuple[tuple[int, ...], ...],
    dtype: str,
    itemsize: int,
    bucket_bytes: int,
    overlap: bool,
    algorithm: str,
) -> Plan:
    """Return the plan of one optimizer step.

    Parameters
    ----------
    mesh : Mesh
    specs : callable
        Block specs for a number of rows.
    rows : tuple of tuple of int
        Rows per rank and microbatch; may be uneven, and zero.
    dtype : str
    itemsize : int
        Bytes of one gradient element.
    bucket_bytes : int
    overlap : bool
    algorithm : str
        All-reduce algorithm.
    """
    block_specs = specs(max(max(counts) for counts in rows))
    blocks = tuple(block.name for block in block_specs)
    buckets = make_buckets(block_specs, itemsize, bucket_bytes)
    ranks = []
    for counts in rows:
        ops = accumulate(len(counts))
        ops = expand_blocks(ops, blocks)
        ops = sync_gradients(ops, buckets, overlap)
        ranks.append(tuple(frame_update(ops)))
    return Plan("train", mesh, dtype, algorithm, rows, blocks, buckets, tuple(ranks))


def build_eval_plan(
    *,
    mesh: Mesh,
    specs: BlockSpecs,
    rows: tuple[tuple[int, ...], ...],
    dtype: str,
    algorithm: str,
) -> Plan:
    """Return the plan of one held-out evaluation: forwards, then one sum over all ranks."""
    blocks = tuple(block.name for block in specs(1))
    ranks = []
    for counts in rows:
        ops: list[Op] = []
        for micro in range(len(counts)):
            ops.append(LoadBatch(micro))
            ops += [Forward(block, micro) for block in blocks]
        ops.append(ReduceScalars("eval", 3, "float64"))
        ranks.append(tuple(ops))
    return Plan("eval", mesh, dtype, algorithm, rows, blocks, (), tuple(ranks))
