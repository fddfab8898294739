"""Builds a plan: the passes, in their one fixed order, for every rank of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mpisim.layouts.specs import BlockSpec
from mpisim.mesh import Mesh
from mpisim.plan.ops import Forward, LoadBatch, Op
from mpisim.plan.partition import Bucket, buckets_by_block, make_buckets
from mpisim.plan.passes import (
    expand_blocks,
    frame_update,
    insert_recompute,
    reduce_scalars,
    sync_gradients,
    unshard_params,
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
    zero: int = 0
    """What is sharded over axis dp: nothing; optimizer state (1); gradients, too (2); parameters,
    too (3)."""
    param_dtype: str = "float32"
    """Dtype of working weights in messages."""

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
    zero: int = 0,
    prefetch: bool = False,
    param_dtype: str = "float32",
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
    zero : {0, 1, 2, 3}
        What is sharded: see `Plan.zero`. With 3 every block is a bucket of its own.
    prefetch : bool
        See `passes.unshard_params`.
    param_dtype : str
        Of working weights in messages.
    """
    block_specs = specs(max(max(counts) for counts in rows), None)
    blocks = tuple(block.name for block in block_specs)
    buckets = make_buckets(block_specs, itemsize, 0 if zero == 3 else bucket_bytes)
    needs = buckets_by_block(block_specs, buckets)
    ranks = []
    for counts in rows:
        ops = accumulate(len(counts))
        ops = expand_blocks(ops, blocks)
        ops = insert_recompute(
            ops, recomputable(block_specs, recompute), recompute, recompute_every
        )
        if zero == 3:
            ops = unshard_params(ops, buckets, needs, prefetch)
        ops = sync_gradients(ops, buckets, overlap, zero)
        ranks.append(tuple(frame_update(ops, buckets, zero, mesh.size)))
    return Plan(
        "train", mesh, dtype, algorithm, rows, blocks, buckets, tuple(ranks), lengths, zero,
        param_dtype,
    )  # fmt: skip


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
    buckets: tuple[Bucket, ...] = (),
    zero: int = 0,
    prefetch: bool = False,
    param_dtype: str = "float32",
) -> Plan:
    """Return the plan of one held-out evaluation: forwards, then one sum over all ranks.

    `buckets` are those of the training plan, whose parameters are gathered if they are sharded;
    the other parameters are those of `build_train_plan`.
    """
    block_specs = specs(1, None)
    blocks = tuple(block.name for block in block_specs)
    ranks = []
    for counts in rows:
        ops: list[Op] = []
        for micro in range(len(counts)):
            ops.append(LoadBatch(micro))
            ops += [Forward(block, micro) for block in blocks]
        if zero == 3:
            ops = unshard_params(ops, buckets, buckets_by_block(block_specs, buckets), prefetch)
        ops.append(reduce_scalars("eval"))
        ranks.append(tuple(ops))
    return Plan(
        "eval", mesh, dtype, algorithm, rows, blocks, buckets, tuple(ranks), (), zero, param_dtype
    )
