"""Builds a plan: the passes, in their one fixed order, for every rank of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mpisim.layouts.specs import BlockSpec
from mpisim.mesh import Mesh
from mpisim.plan.ops import Forward, LoadBatch, Op
from mpisim.plan.partition import Bucket, make_buckets
from mpisim.plan.passes import (
    expand_blocks,
    frame_update,
    insert_recompute,
    reduce_scalars,
    sync_gradients,
)
from mpisim.plan.schedules import accumulate


@dataclass(frozen=True)
class Plan:
    """All ops of all ranks for one step, and what they refer to."""

    kind: str
    """``train`` or ``eval``."""
    mesh: Mesh
    dtype: str
    """Dtype of gradients in messages."""
    algorithm: str
    rows: tuple[tuple[int, ...], ...]
    """Rows per rank and microbatch: the shape signature the plan was built for."""
    blocks: tuple[str, ...]
    """Block names, in forward order."""
    buckets: tuple[Bucket, ...]
    ranks: tuple[tuple[Op, ...], ...] = field(repr=False)
    """The ops, per rank, in order."""
    lengths: tuple[tuple[int, ...], ...] = ()
    """Tokens per row, per rank and microbatch; empty: every row has the model's full width."""

    def length(self, rank: int, micro: int) -> int | None:
        """Return the tokens per row of a microbatch; None: the model's full width."""
        return self.lengths[rank][micro] if self.lengths else None

    @property
    def name(self) -> str:
        """Kind and shape, such as ``train-4x2x64``: ranks x microbatches x largest rows."""
        largest = max((max(rows, default=0) for rows in self.rows), default=0)
        even = all(count == largest for rows in self.rows for count in rows)
        suffix = "" if even else f"-of-{sum(map(sum, self.rows))}"
        if self.lengths:
            suffix += "-by-" + "-".join(",".join(map(str, counts)) for counts in self.lengths)
        return f"{self.kind}-{len(self.rows)}x{len(self.rows[0])}x{largest}{suffix}"


BlockSpecs = Callable[[int, int | None], tuple[BlockSpec, ...]]
"""Block specs as a function of a microbatch's rows and tokens per row (None: full width)."""


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
    lengths: tuple[tuple[int, ...], ...] = (),
    recompute: str = "none",
    recompute_every: int = 1,
) -> Plan:
    """Return the plan of one optimizer step.

    Parameters
    ----------
    mesh : Mesh
    specs : callable
        Block specs for a number of rows and tokens per row.
    rows : tuple of tuple of int
        Rows per rank and microbatch; may be uneven, and zero.
    dtype : str
        Of gradients in messages.
    itemsize : int
        Bytes of one gradient element in a bucket.
    bucket_bytes : int
    overlap : bool
    algorithm : str
        All-reduce algorithm.
    lengths : tuple of tuple of int, optional
        Tokens per row, per rank and microbatch; by default the model's full width.
    recompute : {"none", "selective", "full"}
    recompute_every : int
        See `passes.insert_recompute`.
    """
    block_specs = specs(max(max(counts) for counts in rows), None)
    blocks = tuple(block.name for block in block_specs)
    buckets = make_buckets(block_specs, itemsize, bucket_bytes)
    ranks = []
    for counts in rows:
        ops = accumulate(len(counts))
        ops = expand_blocks(ops, blocks)
        ops = insert_recompute(
            ops, recomputable(block_specs, recompute), recompute, recompute_every
        )
        ops = sync_gradients(ops, buckets, overlap)
        ranks.append(tuple(frame_update(ops)))
    return Plan("train", mesh, dtype, algorithm, rows, blocks, buckets, tuple(ranks), lengths)


def recomputable(blocks: tuple[BlockSpec, ...], mode: str) -> tuple[str, ...]:
    """Return the names of the blocks that recompute mode `mode` saves bytes of, without the last.

    An embedding keeps its token ids only, which are data; a block of an MLP has no interior; the
    last block's backward follows its forward at once.
    """
    if mode == "selective":
        return tuple(block.name for block in blocks[:-1] if block.interior_bytes)
    return tuple(
        block.name for block in blocks[:-1] if block.saved_boundaries() or block.extra_saved_bytes
    )


def build_eval_plan(
    *,
    mesh: Mesh,
    specs: BlockSpecs,
    rows: tuple[tuple[int, ...], ...],
    dtype: str,
    algorithm: str,
) -> Plan:
    """Return the plan of one held-out evaluation: forwards, then one sum over all ranks."""
    blocks = tuple(block.name for block in specs(1, None))
    ranks = []
    for counts in rows:
        ops: list[Op] = []
        for micro in range(len(counts)):
            ops.append(LoadBatch(micro))
            ops += [Forward(block, micro) for block in blocks]
        ops.append(reduce_scalars("eval"))
        ranks.append(tuple(ops))
    return Plan("eval", mesh, dtype, algorithm, rows, blocks, (), tuple(ranks))
