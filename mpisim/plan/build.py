"""Builds a plan: the passes, in their one fixed order, for every rank of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mpisim.layouts.specs import BlockSpec
from mpisim.mesh import Mesh
from mpisim.plan.ops import ExchangeTied, ForwardStage, Op
from mpisim.plan.partition import (
    Bucket,
    buckets_by_block,
    make_buckets,
    make_stage_buckets,
    num_norms,
)
from mpisim.plan.passes import (
    Boundaries,
    expand_blocks,
    frame_update,
    insert_messages,
    insert_recompute,
    load_batches,
    reduce_scalars,
    sync_gradients,
    unshard_params,
)
from mpisim.plan.schedules import compute_list


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
    """Dtype of working weights, activations and their gradients in messages."""
    stages: tuple[tuple[str, ...], ...] = ()
    """Blocks per stage of the pipeline; stage s is on place s mod pp of axis pp. Empty: one stage
    of all blocks."""
    tag: str = ""
    """Part of the name where there are several plans of a kind."""

    def length(self, rank: int, micro: int) -> int | None:
        """Return the tokens per row of a microbatch; None: the model's full width."""
        return self.lengths[rank][micro] if self.lengths else None

    def chunks(self, rank: int) -> tuple[tuple[str, ...], ...]:
        """Return the blocks of the stages that a rank holds, stage by stage."""
        stages = self.stages or (self.blocks,)
        return stages[self.mesh.coordinate(rank)["pp"] :: self.mesh.pp]

    def rank_blocks(self, rank: int) -> tuple[str, ...]:
        """Return the blocks that a rank holds, in forward order."""
        return tuple(block for chunk in self.chunks(rank) for block in chunk)

    def rank_buckets(self, rank: int) -> tuple[Bucket, ...]:
        """Return the buckets that a rank holds."""
        coordinate = self.mesh.coordinate(rank)["pp"]
        return tuple(bucket for bucket in self.buckets if bucket.coordinate == coordinate)

    @property
    def num_norms(self) -> int:
        """Elements of the control sum "norm"."""
        return num_norms(self.mesh, len(self.buckets))

    @property
    def name(self) -> str:
        """Kind and shape, such as ``train-4x2x64``: ranks x microbatches x largest rows."""
        largest = max((max(rows, default=0) for rows in self.rows), default=0)
        even = all(count == largest for rows in self.rows for count in rows)
        suffix = "" if even else f"-of-{sum(map(sum, self.rows[:: self.mesh.pp]))}"
        if self.lengths:
            suffix += "-by-" + "-".join(",".join(map(str, counts)) for counts in self.lengths)
        kind = f"{self.kind}-{self.tag}" if self.tag else self.kind
        return f"{kind}-{len(self.rows)}x{len(self.rows[0])}x{largest}{suffix}"


@dataclass(frozen=True)
class Pipeline:
    """How the model is cut into stages, and in which order they work."""

    stages: tuple[tuple[str, ...], ...] = ()
    """See `Plan.stages`."""
    schedule: str = "1f1b"
    """One of `schedules.SCHEDULES`; with one stage naive and 1f1b are plain accumulation, while
    gpipe and zb-h1 keep more microbatches alive."""
    activation_codec: str = "none"
    grad_codec: str = "none"
    """Codecs of what crosses a boundary: see `layouts.codecs`."""


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
    pipeline: Pipeline | None = None,
    reduce_dtype: str = "float32",
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
        Of working weights, activations and their gradients in messages.
    pipeline : Pipeline, optional
        Needed if the mesh has stages. Every block is a bucket of its own then.
    reduce_dtype : str
        Of gradients as they are added up.
    """
    pipeline = pipeline or Pipeline()
    block_specs = specs(max(max(counts) for counts in rows), None)
    blocks = tuple(block.name for block in block_specs)
    stages = pipeline.stages or (blocks,)
    places = {block: s % mesh.pp for s, names in enumerate(stages) for block in names}
    if mesh.pp > 1:
        buckets = make_stage_buckets(block_specs, places)
    else:
        buckets = make_buckets(block_specs, itemsize, 0 if zero == 3 else bucket_bytes)
    needs = buckets_by_block(block_specs, buckets, places)
    replayed = set(recomputable(block_specs, recompute))
    draft = Plan(
        "train", mesh, dtype, algorithm, rows, blocks, buckets, (), lengths, zero, param_dtype,
        pipeline.stages,
    )  # fmt: skip
    ranks = []
    for rank, counts in enumerate(rows):
        coordinate = mesh.coordinate(rank)["pp"]
        chunks = draft.chunks(rank)
        own = draft.rank_buckets(rank)
        ops = compute_list(pipeline.schedule, mesh.pp, coordinate, len(counts), len(chunks))
        ops = load_batches(ops)
        if mesh.pp > 1:
            ops = insert_messages(ops, _boundaries(draft, rank, specs, pipeline))
        ops = expand_blocks(ops, chunks)
        ops = insert_recompute(
            ops, [[name for name in chunk if name in replayed] for chunk in chunks],
            recompute, recompute_every,
        )  # fmt: skip
        if zero == 3:
            ops = unshard_params(ops, buckets, needs, prefetch)
        exchanges = {b.index: _exchange(draft, rank, b, reduce_dtype) for b in own if b.twin >= 0}
        ops = sync_gradients(ops, own, overlap, zero, exchanges)
        norms = draft.num_norms if zero or mesh.pp > 1 else 0
        ranks.append(tuple(frame_update(ops, own, zero, norms)))
    return replace(draft, ranks=tuple(ranks))


def _boundaries(plan: Plan, rank: int, specs: BlockSpecs, pipeline: Pipeline) -> Boundaries:
    """Return what a rank needs to know to talk to the stages beside its own."""
    ends = [plan.blocks.index(stage[-1]) for stage in plan.stages]
    sizes = [specs(rows, plan.length(rank, micro)) for micro, rows in enumerate(plan.rows[rank])]
    return Boundaries(
        plan.mesh.coordinate(rank)["pp"], plan.mesh.group(rank, "pp"), len(plan.stages),
        lambda boundary, micro: sizes[micro][ends[boundary]].output_shape,
        pipeline.activation_codec, pipeline.grad_codec,
    )  # fmt: skip


def _exchange(plan: Plan, rank: int, bucket: Bucket, dtype: str) -> ExchangeTied:
    peer = plan.mesh.group(rank, "pp")[plan.buckets[bucket.twin].coordinate]
    count = bucket.count
    if plan.zero >= 2:
        lo, hi = bucket.shard(plan.mesh.dp, plan.mesh.coordinate(rank)["dp"])
        count = hi - lo
    return ExchangeTied(bucket.index, peer, count, dtype)


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
    pipeline: Pipeline | None = None,
    tag: str = "",
) -> Plan:
    """Return the plan of one held-out evaluation: forwards, then one sum over all ranks.

    `buckets` are those of the training plan, whose parameters are gathered if they are sharded;
    the other parameters are those of `build_train_plan`.
    """
    pipeline = pipeline or Pipeline()
    block_specs = specs(1, None)
    blocks = tuple(block.name for block in block_specs)
    stages = pipeline.stages or (blocks,)
    places = {block: s % mesh.pp for s, names in enumerate(stages) for block in names}
    draft = Plan(
        "eval", mesh, dtype, algorithm, rows, blocks, buckets, (), (), zero, param_dtype,
        pipeline.stages, tag,
    )  # fmt: skip
    ranks = []
    for rank, counts in enumerate(rows):
        chunks = draft.chunks(rank)
        ops: list[Op] = [
            ForwardStage(micro, chunk)
            for micro in range(len(counts))
            for chunk in range(len(chunks))
        ]
        ops = load_batches(ops)
        if mesh.pp > 1:
            ops = insert_messages(ops, _boundaries(draft, rank, specs, pipeline))
        ops = list(expand_blocks(ops, chunks))
        if zero == 3:
            needs = buckets_by_block(block_specs, buckets, places)
            ops = unshard_params(ops, buckets, needs, prefetch)
        ops.append(reduce_scalars("eval"))
        ranks.append(tuple(ops))
    return replace(draft, ranks=tuple(ranks))
