"""Predicts the bytes of a rank: a walk over its ops with byte counts instead of arrays.

The ledger of a real run must show the same figures, category by category, to the byte. What is
reduced, replayed and kept follows from the plan; sizes follow from the block specs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mpisim.layouts.codecs import codec_spec
from mpisim.layouts.frames import frame_bytes
from mpisim.layouts.metrics import MEMORY_CATEGORIES, METRIC_NAMES
from mpisim.layouts.specs import BlockSpec, Keep
from mpisim.layouts.steps import (
    all_reduce_table,
    buffered_count,
    gather_table,
    reduce_scatter_table,
    scratch_slots,
)
from mpisim.plan.build import BlockSpecs, Plan
from mpisim.plan.ops import (
    CONTROL_SUMS,
    Backward,
    BackwardInput,
    BackwardWeight,
    CheckGradients,
    Forward,
    LoadBatch,
    Op,
    OptimizerStep,
    Recompute,
    RecvActivation,
    RecvGrad,
    Reshard,
    SendActivation,
    SendGrad,
    StartSync,
    StartUnshard,
    WaitSend,
    WaitSync,
    control_count,
)
from mpisim.plan.partition import Bucket
from mpisim.plan.passes import batch_ends, replay_ends
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
    op_temps: list[int] = field(default_factory=list)
    """Per op of the plan: what it needs at its fullest moment beside what it holds."""


def _nothing(*_: object) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Working:
    """What ops need beside what they hold, bytes by sizes: the engine's code in numbers.

    `engine.working` fills it in. What blocks need is in their specs.
    """

    load: Callable[[int, int | None], int] = _nothing
    """Loading a microbatch of (rows, tokens per row), beyond the batch that is kept."""
    accumulate: Callable[[int], int] = _nothing
    """Adding the gradient of a parameter of so many elements to the sum."""
    start_sync: Callable[[int], int] = _nothing
    """Rounding a bucket of so many elements for the wire."""
    wait_sync: Callable[[int], int] = _nothing
    """Taking this rank's part, so many elements, of a sum."""
    check: Callable[[int], int] = _nothing
    """Looking at so many gradients."""
    update: Callable[[int], int] = _nothing
    """Updating the part of one parameter, so many elements, that a rank owns."""


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
    working: Working | None = None,
    residuals: Mapping[int, tuple[int, ...]] | None = None,
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
        Bytes that the rank keeps of a microbatch of that many rows and tokens per row.
    data_bytes : int
        Bytes that the loaded data set keeps.
    working : Working, optional
        By default ops need nothing beside what they hold and what blocks need.
    residuals : mapping of int to tuple of int, optional
        Boundary -> shape of the gradients sent over it whose losses are kept.

    Returns
    -------
    MemoryForecast
        `peak` holds each category at its own worst moment; `peak_total` the largest sum.
    """
    live = dict.fromkeys(MEMORY_CATEGORIES, 0)
    buckets = plan.rank_buckets(rank)
    whole = sum(bucket.count for bucket in buckets)
    own = sum(hi - lo for lo, hi in (owned_range(plan, bucket, rank) for bucket in buckets))
    live["params"] = (own if plan.zero == 3 else whole) * itemsizes.compute
    live["master_params"] = own * itemsizes.param * itemsizes.has_master
    live["grads"] = (own if plan.zero >= 2 else whole) * itemsizes.reduce
    live["optimizer"] = own * itemsizes.param * optimizer_arrays
    live["comm_buffers"] = comm_buffer_bytes(plan, rank, itemsizes.wire, itemsizes.reduce)
    residuals = residuals or {}
    live["comm_buffers"] += sum(map(math.prod, residuals.values())) * itemsizes.compute
    if plan.zero < 2:
        live["comm_buffers"] += whole * itemsizes.wire * itemsizes.has_wire_copy
    live["data"] = data_bytes
    live["temp"] = scratch_bytes
    walk = _Walk(plan, rank, specs, itemsizes, batch_bytes, live, working or Working())
    walk.residuals = residuals
    for op in plan.ranks[rank]:
        walk.begin()
        if step := _STEPS.get(type(op)):
            step(walk, op)
        walk.end(op)
    return walk.forecast


class _Tensor(NamedTuple):
    """The name of what comes and goes during a step; who holds the same name shares the array."""

    kind: Literal[
        "batch", "boundary", "replay", "own", "interior", "check", "grad", "kept", "frame", "sums",
        "wire", "whole",
    ]  # fmt: skip
    """`batch`: a microbatch as loaded, category "data"; all others are "activations".
    `boundary`: what flows between two layers. `replay`: a replayed output that is compared with
    the first one, an array of its own. `own`: what a block saves beside boundaries, without the
    `interior` that can be dropped and the `check` that stands for it. `grad`: gradient of a
    block's input, or of a boundary within it. `kept`: what the input half of a backward leaves
    beside such gradients. `frame`: a message to the next or, with `boundary` 1, the previous stage;
    one that is received, too, if a tensor is made of it. Of a bucket, while it is there: `sums`,
    all its gradients; `wire`, their rounded copy; `whole`, its gathered parameters."""
    micro: int
    block: int = 0
    """Number of the block, or of the bucket, from 0."""
    boundary: int = 0
    """0 is the block's input; its output is boundary 0 of the block after."""

    @property
    def category(self) -> str:
        """The ledger's category."""
        return _CATEGORIES.get(self.kind, "activations")


_CATEGORIES = {
    "batch": "data", "sums": "grads", "wire": "comm_buffers", "frame": "comm_buffers",
    "whole": "params",
}  # fmt: skip


class _Walk:
    """What one rank holds while its ops are walked.

    Each method is one kind of op: it holds what the op makes and drops what the op frees, in the
    order of `engine.handlers`, and says what it needs at moments between (`_need_now`, beyond what
    is held then). A tensor counts from its first holder to its last.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        specs: BlockSpecs,
        itemsizes: Itemsizes,
        batch_bytes: Callable[[int, int | None], int],
        live: dict[str, int],
        working: Working,
    ) -> None:
        self.working = working
        self.residuals: Mapping[int, tuple[int, ...]] = {}
        self.plan, self.rank, self.batch_bytes = plan, rank, batch_bytes
        self.itemsizes = itemsizes
        self.specs = [
            specs(rows, plan.length(rank, micro)) for micro, rows in enumerate(plan.rows[rank])
        ]
        self.last = len(plan.blocks) - 1
        self.ends = replay_ends(plan.ranks[rank], plan.blocks)
        self.batch_ends = batch_ends(plan.ranks[rank])
        self.buckets = plan.rank_buckets(rank)
        self.keeps: dict[tuple[int, int], str] = {}
        """What the forward of (block, microbatch) kept."""
        self.replayed: set[tuple[int, int]] = set()
        """(block, microbatch) whose output is the replayed one, beside the first."""
        self.live = live
        self.forecast = MemoryForecast(live, dict(live), sum(live.values()), dict(live), "start")
        self.own = sum(hi - lo for lo, hi in (owned_range(plan, b, rank) for b in self.buckets))
        self.sizes = {param.name: param.size for b in plan.buckets for param in b.params}
        self._fullest, self._fullest_live, self._need = 0, dict(live), 0
        self._holders: Counter[_Tensor] = Counter()
        self._sizes: dict[_Tensor, int] = {}

    def load(self, op: LoadBatch) -> None:
        """Hold the batch until the last op that reads it."""
        rows, length = self.plan.rows[self.rank][op.micro], self.plan.length(self.rank, op.micro)
        self._hold(_Tensor("batch", op.micro), self.batch_bytes(rows, length))
        self._need_now(self.working.load(rows, length))

    def forward(self, op: Forward) -> None:
        """Hold what the op keeps, and the output, once more if a replay is compared with it.

        Drops the input, which stays alive if it was kept.
        """
        micro, number, block = self._place(op)
        self.keeps[number, micro] = op.keep
        self._need_now(block.forward_peak(self._mode(op)))
        if self.plan.kind == "train":
            if op.keep in ("all", "selective"):
                self._hold_each(self._kept(micro, number, block))
            if op.keep == "all":
                self._hold(_Tensor("interior", micro, number), block.interior_bytes)
            elif op.keep == "selective":
                self._hold(_Tensor("check", micro, number), block.check_bytes)
            elif op.keep == "input" and number:
                self._hold(_Tensor("boundary", micro, number), block.boundary_bytes(0))
        if number != self.last:
            holders = 2 if self.ends.get((op.block, micro)) else 1
            for _ in range(holders):
                self._hold(self._output(micro, number), _output_bytes(block))
        if number:
            self._drop(_Tensor("boundary", micro, number))
        self._drop_batch(op)

    def _drop_batch(self, op: Forward | Backward | BackwardWeight) -> None:
        if self.batch_ends[op.micro] is op:
            self._drop(_Tensor("batch", op.micro))

    def recompute(self, op: Recompute) -> None:
        """Hold what the forward did not keep.

        After a forward that kept selectively that is the interior, which takes the place of the
        check. Otherwise it is all that backward needs and the output; drops the input, which is
        the kept one or the replayed output of the block before, and at the end of a segment both
        outputs that are compared.
        """
        micro, number, block = self._place(op)
        selective = self.keeps[number, micro] == "selective"
        self._need_now(block.restore_peak() if selective else block.forward_peak())
        self._hold(_Tensor("interior", micro, number), block.interior_bytes)
        if selective:
            self._drop(_Tensor("check", micro, number))
            return
        first = self._output(micro, number)
        # Where the first output has left the rank, its checksum is compared.
        stays = self.ends.get((op.block, micro))
        if stays:
            self.replayed.add((number, micro))
        self._hold_each(self._kept(micro, number, block))
        self._hold(self._output(micro, number), _output_bytes(block))
        if number:
            self._drop(_Tensor("boundary", micro, number))
        if stays is not None:
            self._drop(self._output(micro, number))
        if stays:
            self._drop(first)

    def backward(self, op: Backward) -> None:
        """Hold the gradient of the input.

        Drops what was saved, the gradient of the output, and the batch with its last reader.
        """
        micro, number, block = self._place(op)
        self._need_now(block.backward_peak())
        if number:
            self._hold(_Tensor("grad", micro, number), block.boundary_bytes(0))
        self._add_gradients(op, block, block.grad_bytes)
        self._drop_saved(micro, number, block)
        if number < self.last:
            self._drop(_Tensor("grad", micro, number + 1))
        self._drop_batch(op)

    def backward_input(self, op: BackwardInput) -> None:
        """Hold the gradient of the input and what the weight half needs; drop that of the output.

        Gradients between layers that are kept are named by block and boundary; those of the block's
        ends are the ones that come in and go out.
        """
        micro, number, block = self._place(op)
        self._need_now(block.input_peak())
        self._hold_each(self._half(micro, number, block))
        if number:
            self._hold(_Tensor("grad", micro, number), block.boundary_bytes(0))
        if number < self.last:
            self._drop(_Tensor("grad", micro, number + 1))

    def backward_weight(self, op: BackwardWeight) -> None:
        """Drop what was saved, what the input half kept, and the batch with its last reader."""
        micro, number, block = self._place(op)
        self._need_now(block.weight_peak())
        self._add_gradients(op, block, block.new_grad_bytes)
        self._drop_saved(micro, number, block)
        for tensor in self._half(micro, number, block):
            self._drop(tensor)
        self._drop_batch(op)

    def _half(self, micro: int, number: int, block: BlockSpec) -> dict[_Tensor, int]:
        """Return the bytes of what the input half of a backward keeps for the weight half."""
        kept: dict[_Tensor, int] = {}
        for boundary in block.kept_grad_boundaries():
            nbytes = block.boundary_bytes(boundary)
            if boundary == 0:
                tensor = _Tensor("grad", micro, number)
            elif boundary == len(block.layers):
                tensor = _Tensor("grad", micro, number + 1)
            else:
                tensor = _Tensor("grad", micro, number, boundary)
            if nbytes:
                kept[tensor] = nbytes
        if block.kept_extra_bytes:
            kept[_Tensor("kept", micro, number)] = block.kept_extra_bytes
        return kept

    def _add_gradients(
        self, op: Backward | BackwardWeight, block: BlockSpec, new_bytes: int
    ) -> None:
        if self.plan.zero >= 2:
            for bucket in self.buckets:
                sums = _Tensor("sums", 0, bucket.index)
                if op.block in bucket.blocks and not self._holders[sums]:
                    self._hold(sums, bucket.count * self.itemsizes.reduce)
        names = [*(param.name for param in block.params), *block.borrows]
        adding = max((self.working.accumulate(self.sizes[name]) for name in names), default=0)
        self._need_now(new_bytes + adding)

    def _drop_saved(self, micro: int, number: int, block: BlockSpec) -> None:
        for tensor in self._kept(micro, number, block):
            self._drop(tensor)
        self._drop(_Tensor("interior", micro, number))

    def send(self, op: SendActivation | SendGrad) -> None:
        """Hold the frame, drop the tensor that it is made of."""
        after = self._first_block(op.boundary + 1)
        is_grad = isinstance(op, SendGrad)
        self._hold(_Tensor("frame", op.micro, op.boundary, is_grad), self._frame_bytes(op))
        fed_back = is_grad and self.residuals.get(op.boundary) == op.shape
        if fed_back and codec_spec(op.codec).kind == "custom":
            # What a user's codec makes of a tensor is decoded to see what it lost.
            self._need_now(math.prod(op.shape) * self.itemsizes.compute)
        self._drop(_Tensor("grad" if is_grad else "boundary", op.micro, after))

    def receive(self, op: RecvActivation | RecvGrad) -> None:
        """Hold the tensor: the frame itself without codec, else one made of it."""
        after = self._first_block(op.boundary + 1)
        is_grad = isinstance(op, RecvGrad)
        tensor = _Tensor("grad" if is_grad else "boundary", op.micro, after)
        if op.codec == "none":
            self._hold(tensor, self._frame_bytes(op))
            return
        frame = _Tensor("frame", op.micro, op.boundary, 2 + is_grad)
        self._hold(frame, self._frame_bytes(op))
        self._hold(tensor, math.prod(op.shape) * self.itemsizes.compute)
        self._drop(frame)

    def wait_send(self, op: WaitSend) -> None:
        """Drop the frame."""
        self._drop(_Tensor("frame", op.micro, op.boundary, op.kind == "grad"))

    def _first_block(self, stage: int) -> int:
        return self.plan.blocks.index(self.plan.stages[stage][0])

    def _frame_bytes(self, op: SendActivation | SendGrad | RecvActivation | RecvGrad) -> int:
        return frame_bytes(codec_spec(op.codec), op.shape, self.itemsizes.compute)

    def _place(
        self, op: Forward | Recompute | Backward | BackwardInput | BackwardWeight
    ) -> tuple[int, int, BlockSpec]:
        """Return the microbatch, the block's number and its costs."""
        number = self.plan.blocks.index(op.block)
        return op.micro, number, self.specs[op.micro][number]

    def _output(self, micro: int, number: int) -> _Tensor:
        if (number, micro) in self.replayed:
            return _Tensor("replay", micro, number)
        return _Tensor("boundary", micro, number + 1)

    def _kept(self, micro: int, number: int, block: BlockSpec) -> dict[_Tensor, int]:
        """Return the bytes of what backward needs of a block, without its interior."""
        kept: dict[_Tensor, int] = {}
        for boundary in block.saved_boundaries():
            is_output = boundary == len(block.layers)
            tensor = (
                self._output(micro, number)
                if is_output
                else _Tensor("boundary", micro, number, boundary)
            )
            nbytes = block.boundary_bytes(boundary)
            # The model's input is the batch itself.
            if nbytes and (number, boundary) != (0, 0):
                kept[tensor] = nbytes
        if plain := block.extra_saved_bytes - block.interior_bytes:
            kept[_Tensor("own", micro, number)] = plain
        return kept

    def start_sync(self, op: StartSync) -> None:
        """Where gradients are sharded and rounded for the wire, the copy takes their place."""
        if self.plan.zero >= 2 and self.itemsizes.has_wire_copy:
            self._hold(_Tensor("wire", 0, op.bucket), op.count * self.itemsizes.wire)
            self._need_now(self.working.start_sync(op.count))
            self._drop(_Tensor("sums", 0, op.bucket))
        elif self.itemsizes.has_wire_copy:
            self._need_now(self.working.start_sync(op.count))

    def wait_sync(self, op: WaitSync) -> None:
        """Drop what was summed, if gradients are sharded: its share is in the rank's shard."""
        lo, hi = owned_range(self.plan, self.plan.buckets[op.bucket], self.rank)
        self._need_now(self.working.wait_sync(hi - lo))
        if self.plan.zero >= 2:
            kind = "wire" if self.itemsizes.has_wire_copy else "sums"
            self._drop(_Tensor(kind, 0, op.bucket))

    def start_unshard(self, op: StartUnshard) -> None:
        """Hold the bucket's parameters."""
        self._hold(_Tensor("whole", 0, op.bucket), op.count * self.itemsizes.compute)

    def reshard(self, op: Reshard) -> None:
        """Drop the bucket's parameters."""
        self._drop(_Tensor("whole", 0, op.bucket))

    def check_gradients(self, op: CheckGradients) -> None:
        """Look at every gradient that the rank owns."""
        self._need_now(self.working.check(self.own))

    def optimizer_step(self, op: OptimizerStep) -> None:
        """Update what the rank owns."""
        self._need_now(max(map(self.working.update, self._owned_parts()), default=0))

    def _owned_parts(self) -> Iterator[int]:
        """Yield the elements of every parameter that the rank owns."""
        for bucket in self.buckets:
            own_lo, own_hi = owned_range(self.plan, bucket, self.rank)
            for lo, hi in bucket.offsets().values():
                if max(lo, own_lo) < min(hi, own_hi):
                    yield min(hi, own_hi) - max(lo, own_lo)

    def _mode(self, op: Forward) -> Keep:
        """Return what the block's own forward keeps: less than it could, where a replay follows."""
        if op.keep == "selective":
            return "selective"
        return "all" if op.keep == "all" and self.plan.kind == "train" else "nothing"

    def _hold_each(self, tensors: dict[_Tensor, int]) -> None:
        for tensor, nbytes in tensors.items():
            self._hold(tensor, nbytes)

    def _hold(self, tensor: _Tensor, nbytes: int) -> None:
        self._holders[tensor] += 1
        if self._holders[tensor] == 1:
            self._sizes[tensor] = nbytes
            live, peak = self.live, self.forecast.peak
            live[tensor.category] += nbytes
            peak[tensor.category] = max(peak[tensor.category], live[tensor.category])
            self._mark()

    def _drop(self, tensor: _Tensor) -> None:
        self._holders[tensor] -= 1
        if self._holders[tensor] == 0:
            self.live[tensor.category] -= self._sizes[tensor]

    def begin(self) -> None:
        """Begin an op: nothing is needed yet."""
        self._fullest, self._need = 0, 0
        self._mark()

    def _mark(self) -> None:
        """Remember the fullest moment of the op, by what is held."""
        total = sum(self.live.values())
        if total > self._fullest:
            self._fullest, self._fullest_live = total, dict(self.live)

    def _need_now(self, nbytes: int) -> None:
        """Say that so many bytes are needed at this moment beyond what is held."""
        self._need = max(self._need, sum(self.live.values()) + nbytes)

    def end(self, op: Op) -> None:
        """End an op: what it needed beyond its fullest moment is its temp."""
        forecast = self.forecast
        temp = max(0, self._need - self._fullest)
        forecast.op_temps.append(temp)
        at_peak = self._fullest_live | {"temp": self._fullest_live["temp"] + temp}
        forecast.peak["temp"] = max(forecast.peak["temp"], at_peak["temp"])
        if self._fullest + temp > forecast.peak_total:
            forecast.peak_total, forecast.at_peak = self._fullest + temp, at_peak
            forecast.peak_op = op_text(op)


_STEPS: dict[type[Op], Callable[[_Walk, Any], None]] = {
    LoadBatch: _Walk.load,
    Forward: _Walk.forward,
    Recompute: _Walk.recompute,
    Backward: _Walk.backward,
    BackwardInput: _Walk.backward_input,
    BackwardWeight: _Walk.backward_weight,
    SendActivation: _Walk.send,
    RecvActivation: _Walk.receive,
    SendGrad: _Walk.send,
    RecvGrad: _Walk.receive,
    WaitSend: _Walk.wait_send,
    StartSync: _Walk.start_sync,
    WaitSync: _Walk.wait_sync,
    CheckGradients: _Walk.check_gradients,
    OptimizerStep: _Walk.optimizer_step,
    StartUnshard: _Walk.start_unshard,
    Reshard: _Walk.reshard,
}
"""Ops that hold or drop something; what the others use is there from start to end."""


def _output_bytes(block: BlockSpec) -> int:
    return block.boundary_bytes(len(block.layers))


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


def owned_range(plan: Plan, bucket: Bucket, rank: int) -> tuple[int, int]:
    """Return the elements of a bucket whose masters and moments a rank keeps."""
    if plan.zero == 0:
        return 0, bucket.count
    return bucket.shard(plan.mesh.dp, plan.mesh.coordinate(rank)["dp"])


def comm_buffer_bytes(plan: Plan, rank: int, itemsize: int, reduce_itemsize: int) -> int:
    """Return the bytes of scratch and control buffers that a rank's communicators hold.

    `itemsize` is that of gradients in sums over axis dp, `reduce_itemsize` of those that are
    exchanged between the ends of a tied table.
    """
    mesh = plan.mesh
    index = mesh.coordinate(rank)["dp"]
    scratch, copies, tied = 0, 0, 0
    for bucket in plan.rank_buckets(rank):
        if plan.zero:
            table = reduce_scatter_table(bucket.count, mesh.dp, itemsize)
        else:
            table = all_reduce_table(bucket.count, mesh.dp, itemsize, plan.algorithm)
        number, longest = scratch_slots(table, index, in_place=plan.zero > 0)
        scratch = max(scratch, number * longest * itemsize)
        copies += buffered_count(table, index, itemsize) * itemsize
        if bucket.twin >= 0:
            count = tied_count(plan, bucket, rank)
            end = int(bucket.coordinate > plan.buckets[bucket.twin].coordinate)
            table = all_reduce_table(count, 2, reduce_itemsize, plan.algorithm)
            number, longest = scratch_slots(table, end)
            tied = max(tied, number * longest * reduce_itemsize)
            copies += buffered_count(table, end, reduce_itemsize) * reduce_itemsize
    control, scalars = 0, 0
    for kind in CONTROL_SUMS:
        if kind == "norm" and not plan.zero and mesh.pp == 1:
            continue
        kind_count = control_count(kind, plan.num_norms)
        table = all_reduce_table(kind_count, mesh.size, 8, "auto")
        number, longest = scratch_slots(table, rank)
        control = max(control, number * longest * 8)
        copies += buffered_count(table, rank, 8) * 8
        scalars += kind_count * 8
    gather = gather_table(len(METRIC_NAMES), mesh.size)
    copies += buffered_count(gather, rank, 8) * 8
    metrics = len(METRIC_NAMES) * 8
    collected = gather.count * 8 if rank == 0 else 0
    return scratch + copies + tied + control + scalars + metrics + collected


def tied_count(plan: Plan, bucket: Bucket, rank: int) -> int:
    """Return the elements of a tied table that a rank exchanges with the other end."""
    if plan.zero < 2:
        return bucket.count
    lo, hi = bucket.shard(plan.mesh.dp, plan.mesh.coordinate(rank)["dp"])
    return hi - lo
