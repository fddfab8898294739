"""What a rank holds while it trains: parameters, gradients, optimizer state, saved activations.

Built once by `train`; the handlers read and change it, `update` commits to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from mpisim.comm.boundary import BoundaryLinks, BoundarySend
from mpisim.comm.communicator import Communicator
from mpisim.comm.transport import Transport
from mpisim.config.schema import OptimizerSection
from mpisim.data.batch import Batch
from mpisim.engine.buckets import BucketStore, FillParam
from mpisim.engine.loss_scale import LossScale
from mpisim.engine.meter import StepMeter
from mpisim.engine.watch import MemoryWatch
from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.layouts.steps import all_reduce_table, reduce_scatter_table, scratch_slots
from mpisim.memory.ledger import Ledger
from mpisim.memory.tracker import Tracker, open_tracker
from mpisim.mesh import Mesh
from mpisim.nn.blocks import Block
from mpisim.nn.dropout import DropoutMasks, dropout_key, words_per_update
from mpisim.nn.kernels import Kernels, load_kernels
from mpisim.nn.layers import Arrays, LayerContext
from mpisim.nn.models import Model
from mpisim.nn.params import fill_param
from mpisim.nn.precision import Policy
from mpisim.plan.build import Plan
from mpisim.plan.ops import CONTROL_SUMS, Forward, Op, ReduceScalars, control_count
from mpisim.plan.partition import Bucket, num_norms
from mpisim.plan.passes import batch_ends, replay_ends
from mpisim.trace.recorder import Recorder

SCRATCH_BYTES = 1 << 17
"""Working space of a rank: one tile of float64, or two of float32."""
SCRATCH_TILE = 1 << 13
"""Parameters that are updated together where the update needs copies; two tiles fit in any dtype.
"""

DP_CHANNEL, CONTROL_CHANNEL, TIED_CHANNEL = 1, 2, 3

LoadRows = Callable[[int], tuple[np.ndarray, ...]]
"""Microbatch number -> this rank's rows: a `Batch`, or plain (inputs, targets)."""


@dataclass
class StepState:
    """What lives only within one step."""

    load: LoadRows | None
    """None once the step is over."""
    step: int
    num_targets: int = 0
    """Valid targets of this rank's rows, as announced before they are loaded."""
    lr: float = 0.0
    update_number: int = 0
    """Committed updates, this one included; 0 while evaluating."""
    loss_scale: float = 1.0
    weights: dict[str, int] = field(default_factory=dict)
    """Fingerprint of the working weights at the start of the update."""
    batches: dict[int, Batch] = field(default_factory=dict)
    flow: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    """Inputs of blocks that have not run yet, also of a block on the next stage."""
    grad_flow: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    """Gradients of outputs of blocks that have not run backward yet, likewise."""
    kept: dict[tuple[str, int], tuple] = field(default_factory=dict)
    """What input halves of backwards left for the weight halves."""
    frames: dict[tuple[int, str, int], tuple[BoundarySend, np.ndarray]] = field(
        default_factory=dict
    )
    """Posted messages and their buffers, by (boundary, kind, microbatch)."""
    checksums: dict[tuple[str, int], int] = field(default_factory=dict)
    """Of outputs that left the rank: what a replay is compared with."""
    saved: dict[tuple[str, int], tuple] = field(default_factory=dict)
    inputs: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    """Inputs of blocks that are replayed: kept ones, and replayed outputs of the block before."""
    first_outputs: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    """What the outputs of replays are compared with."""
    accumulated: set[str] = field(default_factory=set)
    """Parameters whose gradients already hold a microbatch of this step."""
    loss_sum: float = 0.0
    num_correct: int = 0
    loaded_targets: int = 0
    global_targets: int = 0
    global_loss_sum: float = 0.0
    global_correct: int = 0
    block_forwards: int = 0
    """Block forwards that ran, replays included."""
    dropout_words: int = 0
    """Random words that the dropout sites of the update own: the counter after all forwards."""
    own_norms: list[float] = field(default_factory=list)
    """Norm of the scaled gradients that this rank owns, or of each bucket's if there are stages."""
    grad_norm: float = 0.0
    """Global norm of the true gradient: loss scale divided out, before clipping."""
    non_finite_here: bool = False
    """A gradient or loss of this step is not finite, as far as this rank sees."""
    overflow_found: bool = False
    """The update would not be finite, on some rank."""
    found_non_finite: bool = False
    """A gradient or loss of this step is not finite, on some rank."""
    skipped: bool = False
    metrics: np.ndarray | None = None
    """On rank 0 after GatherMetrics: shape (ranks, len(METRIC_NAMES))."""


class EngineState:
    """Everything a rank owns, registered in its ledger.

    Parameters
    ----------
    model : Model
    mesh : Mesh
    transport : Transport
    optimizer : OptimizerSection
    buckets : tuple of Bucket
        Gradients that are reduced together, of all stages.
    seed : int
        Parameters are drawn by (seed, name), so every layout starts from the same weights.
    policy : Policy
        Dtypes of parameters, working weights, gradients and messages.
    algorithm : str
        All-reduce algorithm of axis dp.
    recorder : Recorder
    data_bytes : int
        Bytes that the loaded data set keeps (category "data").
    overlap : bool
        Buckets are reduced beside backward ops.
    zero : {0, 1, 2, 3}
        What is sharded over axis dp: see `engine.buckets`.
    loss_scale : LossScale, optional
        By default none: the scale is 1 for ever.
    kernels : Kernels, optional
        Who computes the element-wise work; by default NumPy.
    tracker : Tracker, optional
        Measures NumPy's memory beside the ledger; by default nothing does.
    budget_bytes : int
        What the rank may hold at one time; 0 means no limit.
    blocks : sequence of str, optional
        Names of the blocks that the rank holds, in forward order; by default all.
    wrap : callable of (EngineState, Block) to Block, optional
        What stands in for a block; by default the block itself.
    fill : callable, optional
        Writes first values of parameters: see `buckets.FillParam`; by default random ones.
    residuals : dict of int to tuple of int, optional
        Boundary -> shape of the gradients sent over it whose losses are made up for by the next
        ones; by default nothing is.

    Attributes
    ----------
    params : dict of str to ndarray
        Working weights, in the policy's `compute` dtype: what forward reads.
    master : dict of str to ndarray
        Parameters in the policy's `param` dtype: what the optimizer updates. The same arrays as
        `params` if the dtypes are equal.
    grads : dict of str to ndarray
        Gradients of the scaled loss; zero between updates. With stages 2 and 3 those of open
        buckets only.
    moments : dict of str to tuple of ndarray
        Optimizer state.
    stores : tuple of BucketStore
        The flat arrays that all of these are views of. What is sharded is found here piece by
        piece; the dicts list only what this rank holds whole.
    """

    def __init__(
        self,
        *,
        model: Model,
        mesh: Mesh,
        transport: Transport,
        optimizer: OptimizerSection,
        buckets: tuple[Bucket, ...],
        seed: int,
        policy: Policy,
        algorithm: str,
        recorder: Recorder,
        data_bytes: int = 0,
        overlap: bool = True,
        zero: int = 0,
        loss_scale: LossScale | None = None,
        kernels: Kernels | None = None,
        tracker: Tracker | None = None,
        budget_bytes: int = 0,
        blocks: Sequence[str] = (),
        wrap: Callable[[EngineState, Block], Block] | None = None,
        fill: FillParam | None = None,
        residuals: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        self._fill = fill or partial(fill_param, model, seed)
        self.model, self.mesh, self.optimizer = model, mesh, optimizer
        self.policy, self.seed = policy, seed
        self.zero = zero
        self.kernels = kernels or load_kernels("numpy")
        self.loss_scale = loss_scale or LossScale()
        self.recorder = recorder
        self.ledger = Ledger(budget_bytes)
        self.watch = MemoryWatch(self.ledger, tracker or open_tracker("off"))
        self.rank = transport.rank
        own = set(blocks or (block.name for block in model.blocks))
        stand_in = wrap or (lambda _, block: block)
        self.blocks = {
            block.name: stand_in(self, block) for block in model.blocks if block.name in own
        }
        self.first, self.last = model.blocks[0].name, model.blocks[-1].name
        self.has_loss = self.last in self.blocks
        """This rank runs the last block: losses and targets are counted here."""
        coordinate = mesh.coordinate(transport.rank)["pp"]
        self.num_buckets = len(buckets)
        everywhere = buckets
        buckets = tuple(bucket for bucket in buckets if bucket.coordinate == coordinate)
        self.dp = Communicator(
            transport, mesh.group(transport.rank, "dp"), axis="dp", channel=DP_CHANNEL,
            recorder=recorder, algorithm=algorithm,
        )  # fmt: skip
        self.control = Communicator(
            transport, axis="control", channel=CONTROL_CHANNEL, recorder=recorder
        )
        self.control.neighbours.append(self.dp)
        self.links = BoundaryLinks(transport, recorder, neighbours=[self.dp])
        self.tied = self._connect_ends(transport, everywhere, algorithm)

        self.ledger.set_bytes("data", data_bytes)
        self.watch.start()
        try:
            self._build_arrays(buckets, overlap, residuals or {})
        except MemoryError as error:
            exceeded = self.watch.explained(error)
            raise exceeded from exceeded.__cause__
        self.watch.start()
        self.meter = StepMeter()
        self.step: StepState | None = None
        self.committed = 0
        """Updates made so far; skipped steps do not count."""
        self.broken = False
        """An update was cut off in the middle of changing the weights."""
        self.plan_rows: tuple[int, ...] = ()
        self.plan_lengths: tuple[int, ...] = ()
        self.plan_kinds: list[type[Op]] = []
        self.plan_keeps: dict[tuple[str, int], str] = {}
        self.replay_ends: dict[tuple[str, int], bool] = {}
        self.batch_ends: dict[int, Op] = {}
        self.block_before: dict[str, str] = {}
        self.block_after: dict[str, str] = {}
        self.stages: tuple[tuple[str, ...], ...] = ()
        self.is_evaluation = False
        self._masks: list[DropoutMasks | None] = []
        self.observe_gradients: Callable[[dict[str, np.ndarray]], None] | None = None
        """Called before a commit with copies of the true gradients, by name: loss scale divided
        out, before clipping."""
        self.observe_draws: Callable[[int, int], None] | None = None
        """Called with start and end of every range of dropout words that is drawn."""
        self.observe_boundary: Callable[[int, int, np.ndarray], None] | None = None
        """Called with boundary, microbatch and tensor of every activation that is sent or
        received."""
        self.observe_op: Callable[[Op], None] | None = None
        """Called after every op of a step; tests plant faults here."""

    def _connect_ends(
        self, transport: Transport, buckets: tuple[Bucket, ...], algorithm: str
    ) -> Communicator | None:
        """Return the group of the two ranks that hold a tied table, if this is one of them."""
        group = self.mesh.group(self.rank, "pp")
        ends = sorted({group[bucket.coordinate] for bucket in buckets if bucket.twin >= 0})
        if self.rank not in ends:
            return None
        communicator = Communicator(
            transport, tuple(ends), axis="pp", channel=TIED_CHANNEL,
            recorder=self.recorder, algorithm=algorithm,
        )  # fmt: skip
        communicator.neighbours.append(self.dp)
        return communicator

    def _build_arrays(
        self,
        buckets: tuple[Bucket, ...],
        overlap: bool,
        residuals: Mapping[int, tuple[int, ...]],
    ) -> None:
        self._build_stores(buckets, overlap)
        self.residuals = {
            boundary: np.zeros(shape, self.policy.compute_dtype)
            for boundary, shape in residuals.items()
        }
        self.ledger.hold("comm_buffers", *self.residuals.values())
        self._build_control()
        # Last: what drawing the first weights needs for a moment is less than this (nn.params), so
        # the budget cannot be passed while the state is built, but by the state itself.
        self.update_scratch = np.empty(SCRATCH_BYTES, np.uint8)
        self.ledger.hold("temp", self.update_scratch)
        for table in self.model.tables(self.policy.compute_dtype):
            self.ledger.hold("temp", table)

    def _build_stores(self, buckets: tuple[Bucket, ...], overlap: bool) -> None:
        policy, settings = self.policy, self.optimizer
        self._reserve_scratch(buckets)
        self.stores = tuple(
            BucketStore(
                bucket, zero=self.zero, group=self.dp, policy=policy, kernels=self.kernels,
                ledger=self.ledger, fill=self._fill, background=overlap,
                num_moments=num_optimizer_arrays(settings.kind, settings.momentum),
            )
            for bucket in buckets
        )  # fmt: skip
        self.store_of = {store.bucket.index: store for store in self.stores}
        # Programs that stay are compiled before the first step.
        for store in self.stores:
            store.prepare()
            if store.bucket.twin >= 0:
                self.tied.prepare_all_reduce(store.tied_grads, store.key)
        self.readers = {bucket.index: self._readers(bucket) for bucket in buckets}
        self.block_buckets = {
            name: [i for i, uses in self.readers.items() if any(b == name for b, _, _ in uses)]
            for name in self.blocks
        }
        self.block_params: dict[str, Arrays] = {name: {} for name in self.blocks}
        order = [param.name for param in self.model.param_specs()]
        found: dict[str, Arrays] = {"params": {}, "master": {}, "grads": {}}
        moments: dict[str, tuple[np.ndarray, ...]] = {}
        for store in self.stores:
            if self.zero < 3:
                views = store.views(store.working)
                found["params"] |= views
                self.show_params(store.bucket.index, views)
            else:
                found["params"] |= store.whole_pieces(store.working)
            found["master"] |= store.whole_pieces(store.master)
            if self.zero < 2:
                found["grads"] |= store.views(store.grads)
            by_moment = [store.whole_pieces(moment) for moment in store.moments]
            for name in store.whole_pieces(store.master):
                moments[name] = tuple(views[name] for views in by_moment)
        in_order = {
            kind: {name: views[name] for name in order if name in views}
            for kind, views in found.items()
        }
        self.params, self.master = in_order["params"], in_order["master"]
        self.grads = in_order["grads"]
        self.moments = {name: moments[name] for name in order if name in moments}

    def _reserve_scratch(self, buckets: tuple[Bucket, ...]) -> None:
        """Allocate once what the sums of all buckets will share."""
        itemsize, size = self.policy.wire_dtype.itemsize, self.dp.size
        needs = [0]
        for bucket in buckets:
            if self.zero:
                table = reduce_scatter_table(bucket.count, size, itemsize)
            else:
                table = all_reduce_table(bucket.count, size, itemsize, self.dp.algorithm)
            number, longest = scratch_slots(table, self.dp.index, in_place=self.zero > 0)
            needs.append(number * longest * itemsize)
        self.dp.reserve(max(needs))
        for bucket in buckets:
            if bucket.twin >= 0:
                lo, hi = bucket.shard(size, self.dp.index) if self.zero >= 2 else (0, bucket.count)
                itemsize = self.policy.reduce_dtype.itemsize
                table = all_reduce_table(hi - lo, 2, itemsize, self.tied.algorithm)
                number, longest = scratch_slots(table, self.tied.index)
                self.tied.reserve(number * longest * itemsize)

    def _readers(self, bucket: Bucket) -> list[tuple[str, str, str]]:
        """Return (block, name within the block, full name) of all uses of a bucket."""
        names = bucket.offsets()
        return [
            (block.name, local, full)
            for block in self.blocks.values()
            for local, full in block.full_names.items()
            if full in names
        ]

    def advance(self) -> None:
        """Move started messages on, as far as they go; never blocks."""
        if not self.dp.idle:
            self.dp.advance()
        if not self.links.idle:
            self.links.advance()

    @property
    def communicators(self) -> list[Communicator | BoundaryLinks]:
        """All that moves messages of this rank."""
        between = [self.links] if self.mesh.pp > 1 else []
        return [self.dp, self.control, *between, *([self.tied] if self.tied else [])]

    @property
    def buckets(self) -> list[np.ndarray]:
        """Gradients that stay, bucket by bucket: all of it, or this rank's shard."""
        return [s.own_grads if s.zero >= 2 else s.grads for s in self.stores]

    def show_params(self, bucket: int, views: Arrays) -> None:
        """Let blocks read the parameters of a bucket."""
        for block, local, full in self.readers[bucket]:
            self.block_params[block][local] = views[full]

    def hide_params(self, bucket: int) -> None:
        """Take the parameters of a bucket from the blocks that read them."""
        for block, local, _ in self.readers[bucket]:
            self.block_params[block].pop(local, None)

    def _build_control(self) -> None:
        size = self.mesh.size
        norms = num_norms(self.mesh, self.num_buckets)
        self.scalars = {
            kind: np.zeros(control_count(kind, norms), dtype)
            for kind, (_, dtype, _) in CONTROL_SUMS.items()
            if kind != "norm" or self.zero or self.mesh.pp > 1
        }
        needs = [0]
        for array in self.scalars.values():
            table = all_reduce_table(array.size, size, array.itemsize, self.control.algorithm)
            number, longest = scratch_slots(table, self.control.index)
            needs.append(number * longest * array.itemsize)
        self.control.reserve(max(needs))
        for kind, array in self.scalars.items():
            self.control.prepare_all_reduce(array, kind, reduction=CONTROL_SUMS[kind][2])
        self.metrics = np.zeros(len(METRIC_NAMES))
        self.all_metrics = np.zeros(self.mesh.size * len(METRIC_NAMES)) if self.rank == 0 else None
        gather = self.control.prepare_gather(self.metrics, self.all_metrics)
        self.gather_traffic = gather.traffic
        owned = [*self.scalars.values(), self.metrics]
        if self.all_metrics is not None:
            owned.append(self.all_metrics)
        self.ledger.hold("comm_buffers", *owned)
        scratch = self.dp.scratch_bytes + self.control.scratch_bytes
        if self.tied is not None:
            scratch += self.tied.scratch_bytes
        self.ledger.set_bytes("comm_buffers", self.ledger.live["comm_buffers"] + scratch)

    def enter(self, plan: Plan, step: StepState) -> None:
        """Take up a step: what the handlers need of its plan, and its random numbers."""
        ops = plan.ranks[self.rank]
        self.step = step
        self.plan_rows = plan.rows[self.rank]
        self.plan_lengths = plan.lengths[self.rank] if plan.lengths else ()
        self.plan_kinds = [type(op) for op in ops]
        self.plan_keeps = {(op.block, op.micro): op.keep for op in ops if isinstance(op, Forward)}
        self.replay_ends = replay_ends(ops, plan.blocks)
        self.batch_ends = batch_ends(ops)
        self.block_after = dict(zip(plan.blocks, plan.blocks[1:], strict=False))
        self.block_before = dict(zip(plan.blocks[1:], plan.blocks, strict=False))
        self.stages = plan.stages
        self.is_evaluation = plan.kind == "eval"
        self._masks = [None] * len(self.plan_rows)
        sites = self.model.num_dropout_sites
        if plan.kind == "train" and sites:
            self._reserve_dropout(plan, sites)

    def _reserve_dropout(self, plan: Plan, sites: int) -> None:
        """Give every dropout site its range of words: the logical array of the whole update."""
        longest = max(map(max, plan.lengths)) if plan.lengths else self.model.input_width
        group = self.mesh.group(self.rank, "dp")
        rows = sum(sum(plan.rows[rank]) for rank in group)
        width = self.model.d_model
        self.step.dropout_words = words_per_update(sites, rows, longest, width)
        key = dropout_key(self.seed, self.committed)
        first = sum(sum(plan.rows[rank]) for rank in group[: group.index(self.rank)])
        for micro, count in enumerate(self.plan_rows):
            self._masks[micro] = DropoutMasks(
                key, rows, longest, width, first, on_draw=self.observe_draws
            )
            first += count

    def context(self, block: str, micro: int) -> LayerContext:
        """Return what the layers of a block need beside their input."""
        batch = self.step.batches[micro]
        return LayerContext(
            targets=batch.targets if block == self.last else None, starts=batch.starts,
            dropout=self._masks[micro], kernels=self.kernels,
        )  # fmt: skip

    def row_width(self, micro: int) -> int:
        """Return the width of a microbatch's rows: tokens or features."""
        return self.plan_lengths[micro] if self.plan_lengths else self.model.input_width

    def sum_scalars(self, op: ReduceScalars, values: list[float]) -> np.ndarray:
        """Reduce a few numbers over all ranks; every rank gets the same bits."""
        array = self.scalars[op.kind]
        # One by one: an assignment of the list would make an array of it first.
        for place, value in enumerate(values):
            array[place] = value
        return self.control.all_reduce(array, reduction=op.reduction)


def num_optimizer_arrays(kind: str, momentum: float) -> int:
    """Return how many state arrays the optimizer keeps per parameter."""
    if kind == "adamw":
        return 2
    return 1 if momentum else 0
