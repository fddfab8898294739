"""What a rank holds of one bucket: weights, gradients and optimizer state, whole or its shard.

The memory of a bucket is flat: parameters lie one after the other as in `plan.partition.Bucket`,
and arrays by name are views. Which part a rank keeps follows from the ZeRO stage alone:

    stage   working weights   masters, moments   gradients between ops
    0       all               all                all
    1       all               shard              all
    2       all               shard              shard
    3       shard             shard              shard

The shard of rank r is chunk r of the bucket, what a reduce-scatter leaves with it. Where a stage
keeps a shard only, the whole is made before it is needed and freed after (`open_grads`, `unshard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mpisim.comm.communicator import Communicator
from mpisim.comm.programs import Program
from mpisim.memory.ledger import Ledger
from mpisim.nn.kernels import Kernels
from mpisim.nn.numerics import tile_slices
from mpisim.nn.optim import decay_applies
from mpisim.nn.precision import Policy
from mpisim.plan.partition import Bucket

FillParam = Callable[[str, np.ndarray, int], None]
"""``fill(name, out, lo)`` writes elements from `lo` on of a parameter's first values to `out`."""


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that a rank owns: a range of its shard."""

    name: str
    lo: int
    hi: int
    """Elements of the rank's shard."""
    start: int
    """First element within the flattened parameter."""
    is_whole: bool
    """The rank owns all of the parameter."""
    decays: bool
    """Weight decay acts on it."""


class BucketStore:
    """The arrays of one bucket on one rank.

    Parameters
    ----------
    bucket : Bucket
    zero : int
    group : Communicator
        Axis dp: its size and this rank's place in it decide what is owned.
    policy : Policy
    kernels : Kernels
    ledger : Ledger
    fill : callable
        Writes first values.
    num_moments : int
        Optimizer arrays per parameter.
    background : bool
        Collectives are advanced beside compute.

    Attributes
    ----------
    working : ndarray of shape (n,)
        Working weights that stay: all, or with stage 3 the shard.
    master, moments : ndarray, tuple of ndarray
        Of the shard; `master` is part of `working` if the dtypes are equal.
    grads : ndarray or None
        All gradients of the bucket, in the dtype of the sum; None while they do not exist.
    own_grads : ndarray
        Gradients of the shard: part of `grads` with stages 0 and 1.
    gathered : ndarray or None
        All working weights with stage 3, between `unshard` and `reshard`.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        zero: int,
        group: Communicator,
        policy: Policy,
        kernels: Kernels,
        ledger: Ledger,
        fill: FillParam,
        num_moments: int,
        background: bool,
    ) -> None:
        self.bucket, self.zero, self.group = bucket, zero, group
        self.policy, self.kernels, self.ledger = policy, kernels, ledger
        self.background = background
        self.has_wire = policy.wire != policy.reduce
        self.offsets = bucket.offsets()
        self.shapes = {param.name: param.shape for param in bucket.params}
        self.lo, self.hi = (0, bucket.count) if zero == 0 else bucket.shard(group.size, group.index)
        self.own = slice(self.lo, self.hi)
        self.pieces = tuple(self._pieces())
        self._hold_weights(fill)
        self.moments = tuple(
            np.zeros(self.hi - self.lo, policy.param_dtype) for _ in range(num_moments)
        )
        ledger.hold("optimizer", *self.moments)
        self.grads: np.ndarray | None = None
        self.wire: np.ndarray | None = None
        self.summed: np.ndarray | None = None
        """The rank's part of what is being summed."""
        self.gathered: np.ndarray | None = None
        self.sync: Program | None = None
        self.gather: Program | None = None
        self.shard_filled = False
        """The shard of the gradients holds a microbatch of this step."""
        if zero >= 2:
            self.own_grads = np.zeros(self.hi - self.lo, policy.reduce_dtype)
            ledger.hold("grads", self.own_grads)
        else:
            self.grads = np.zeros(bucket.count, policy.reduce_dtype)
            self.own_grads = self.grads[self.own]
            ledger.hold("grads", self.grads)
            if self.has_wire:
                self.wire = np.zeros(bucket.count, policy.wire_dtype)
                ledger.hold("comm_buffers", self.wire)

    def _pieces(self) -> Iterator[Piece]:
        for name, (lo, hi) in self.offsets.items():
            begin, end = max(lo, self.lo), min(hi, self.hi)
            if begin < end:
                yield Piece(
                    name, begin - self.lo, end - self.lo, begin - lo, (begin, end) == (lo, hi),
                    decay_applies(self.shapes[name]),
                )  # fmt: skip

    def _hold_weights(self, fill: FillParam) -> None:
        policy, ledger = self.policy, self.ledger
        keeps_all = self.zero < 3
        self.working = np.empty(
            self.bucket.count if keeps_all else self.hi - self.lo, policy.compute_dtype
        )
        ledger.hold("params", self.working)
        if keeps_all:
            for name, (lo, hi) in self.offsets.items():
                fill(name, self.working[lo:hi], 0)
        self.own_working = self.working[self.own] if keeps_all else self.working
        self.master = self.own_working
        if policy.has_master:
            self.master = np.empty(self.hi - self.lo, policy.param_dtype)
            ledger.hold("master_params", self.master)
        if policy.has_master or not keeps_all:
            for piece in self.pieces:
                fill(piece.name, self.master[piece.lo : piece.hi], piece.start)
        if policy.has_master and not keeps_all:
            for piece in self.pieces:
                fill(piece.name, self.working[piece.lo : piece.hi], piece.start)

    def prepare(self) -> None:
        """Compile the collectives whose buffers stay."""
        if self.zero == 0:
            flat = self.wire if self.has_wire else self.grads
            self.group.prepare_all_reduce(flat, self.key, self.background)
        elif self.zero == 1:
            flat = self.wire if self.has_wire else self.grads
            self.summed = flat[self.own]
            self.group.bind_reduce_scatter(self.key, flat, self.summed, self.background)
        if self.zero in (1, 2):
            self.group.bind_all_gather(self.gather_key, self.own_working, self.working)

    @property
    def tied_grads(self) -> np.ndarray:
        """What is added to the other end of the pipeline: all gradients, or this rank's shard."""
        return self.own_grads if self.zero >= 2 else self.grads

    @property
    def key(self) -> str:
        """Name of the bucket's sum in traces."""
        return f"bucket {self.bucket.index}"

    @property
    def gather_key(self) -> str:
        """Name of the bucket's gather in traces."""
        return f"params {self.bucket.index}"

    # Views by name ------------------------------------------------------------------------

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parameters' places in an array of the whole bucket, by name."""
        return {
            name: flat[lo:hi].reshape(self.shapes[name]) for name, (lo, hi) in self.offsets.items()
        }

    def whole_pieces(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parameters that lie whole in the shard, as views of an array of it."""
        return {
            piece.name: flat[piece.lo : piece.hi].reshape(self.shapes[piece.name])
            for piece in self.pieces
            if piece.is_whole
        }

    def named_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield what stays here of working weights and masters, piece by piece."""
        if self.zero < 3:
            yield from self.views(self.working).items()
        else:
            for piece in self.pieces:
                yield piece.name, self.working[piece.lo : piece.hi]
        if self.policy.has_master:
            for piece in self.pieces:
                yield f"master of {piece.name}", self.master[piece.lo : piece.hi]

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Write parameters, given whole by name, into whatever part of them the rank keeps.

        Parameters
        ----------
        values : mapping of str to ndarray
            float64 or float32; names of other buckets are passed over.
        """
        for piece in self.pieces:
            if piece.name in values:
                flat = values[piece.name].reshape(-1)
                part = flat[piece.start : piece.start + piece.hi - piece.lo]
                self.master[piece.lo : piece.hi] = part
                if self.policy.has_master:
                    self.own_working[piece.lo : piece.hi] = self._rounded(part)
        if self.zero < 3:
            for name, (lo, hi) in self.offsets.items():
                if name in values:
                    self.working[lo:hi] = self._rounded(values[name].reshape(-1))

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        # 16-bit weights are the rounded float32 ones, as when they are drawn.
        wide = values if self.policy.compute_dtype.itemsize > 2 else values.astype(np.float32)
        return wide.astype(self.policy.compute_dtype)

    # Gradients ----------------------------------------------------------------------------

    def open_grads(self) -> dict[str, np.ndarray]:
        """Make room for all gradients of the bucket; return the new views by name, if any."""
        if self.grads is not None:
            return {}
        self.grads = np.empty(self.bucket.count, self.policy.reduce_dtype)
        self.ledger.hold("grads", self.grads)
        return self.views(self.grads)

    def start_sync(self, collective: str) -> None:
        """Queue the sum over the ranks, rounded to the wire's dtype if that is another one."""
        if self.has_wire:
            if self.wire is None:
                self.wire = np.empty(self.bucket.count, self.policy.wire_dtype)
                self.ledger.hold("comm_buffers", self.wire)
            self.kernels.narrow(self.grads, self.policy.wire_dtype, out=self.wire)
            if self.zero >= 2:
                self._free_grads()
        flat = self.wire if self.has_wire else self.grads
        if collective == "all_reduce":
            program = self.group.prepare_all_reduce(flat, self.key, self.background)
        else:
            if self.summed is None:
                self.summed = flat[self.own]
            program = self.group.bind_reduce_scatter(self.key, flat, self.summed, self.background)
        self.sync = program
        self.group.start(program)

    def wait_sync(self, scratch: np.ndarray) -> None:
        """Block until the bucket is summed, and take this rank's part of the sum.

        `scratch` is bytes to work in.
        """
        self.group.wait(self.sync)
        if self.zero < 2:
            if self.has_wire:
                sums = self.wire if self.zero == 0 else self.summed
                self.kernels.widen(sums, out=self.own_grads)
            return
        self.group.unbind(self.sync)
        add = add_gradient if self.shard_filled else set_gradient
        add(self.kernels, self.own_grads, self.summed, scratch)
        self.shard_filled = True
        self.summed = None
        if self.has_wire:
            self.ledger.drop(self.wire)
            self.wire = None
        else:
            self._free_grads()

    def clear_grads(self) -> None:
        """Set all gradients to zero; free those that do not stay."""
        if self.zero < 2:
            self.grads.fill(0)
            return
        self.own_grads.fill(0)
        self.shard_filled = False
        # What a failed step left. The program holds its buffers as long as messages may use them.
        if self.grads is not None:
            self._free_grads()
        if self.wire is not None:
            self.ledger.drop(self.wire)
            self.wire = None
        self.summed = None

    def _free_grads(self) -> None:
        self.ledger.drop(self.grads)
        self.grads = None

    # Weights ------------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Make room for all working weights and queue their gather (stage 3)."""
        self.gathered = np.empty(self.bucket.count, self.policy.compute_dtype)
        self.ledger.hold("params", self.gathered)
        self.gather = self.group.bind_all_gather(
            self.gather_key, self.working, self.gathered, self.background
        )
        self.group.start(self.gather)

    def wait_unshard(self) -> dict[str, np.ndarray]:
        """Block until the weights are here; return their views by name."""
        self.group.wait(self.gather)
        return self.views(self.gathered)

    def reshard(self) -> None:
        """Free the gathered weights."""
        self.group.unbind(self.gather)
        self.drop_gathered()

    def drop_gathered(self) -> None:
        """Forget the gathered weights, if any; messages may still use them."""
        if self.gathered is not None:
            self.ledger.drop(self.gathered)
            self.gathered = None

    def let_go(self) -> None:
        """Unbind collectives from buffers that a failed step left; none of them runs."""
        for program in (self.sync, self.gather):
            if program is not None and program.buffers:
                self.group.unbind(program)

    def gather_updated(self) -> None:
        """Collect what the ranks have updated of the working weights (stages 1 and 2)."""
        program = self.group.bind_all_gather(self.gather_key, self.own_working, self.working)
        self.group.start(program)
        self.group.wait(program)

    def gather_master(self) -> np.ndarray:
        """Return all parameters of the bucket in the dtype they are updated in. Collective."""
        if self.zero == 0:
            return self.master
        whole = np.empty(self.bucket.count, self.policy.param_dtype)
        program = self.group.bind_all_gather(f"master {self.bucket.index}", self.master, whole)
        self.group.start(program)
        self.group.wait(program)
        # Or it would keep the array alive, on every rank.
        self.group.unbind(program)
        return whole


def set_gradient(
    kernels: Kernels, total: np.ndarray, grad: np.ndarray, scratch: np.ndarray
) -> None:
    """Write a first gradient, rounded to the dtype of the sum."""
    if grad.dtype == total.dtype:
        # Bits: a copy of bfloat16 makes an array of one value on the way.
        bits = f"u{total.itemsize}"
        np.copyto(total.view(bits), grad.view(bits))
    elif total.itemsize == 2:
        kernels.narrow(grad.reshape(-1), total.dtype, out=total.reshape(-1))
    else:
        kernels.widen(grad.reshape(-1), out=total.reshape(-1))


def add_gradient(
    kernels: Kernels, total: np.ndarray, grad: np.ndarray, scratch: np.ndarray
) -> None:
    """Add another gradient; 16-bit sums are added in float32, rounded once.

    `scratch` is bytes to work in.
    """
    if grad.dtype == total.dtype:
        np.add(total, grad, out=total)
        return
    wide = scratch.view(np.float32)
    total, grad = total.reshape(-1), grad.reshape(-1)
    for tile in tile_slices(total.size, wide.size):
        part, addend = total[tile], grad[tile]
        work = wide[: part.size]
        if part.itemsize == 2:
            kernels.widen(part, out=work)
            work += addend
            kernels.narrow(work, part.dtype, out=part)
        else:
            kernels.widen(addend, out=work)
            part += work
