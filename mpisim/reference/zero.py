"""ZeRO in one process: optimizer state, gradients and parameters split over ranks (A6).

Ranks are entries of lists, as workers are in `data_parallel`; a message is an assignment. All
tensors of a model are laid end to end in one flat vector, a `Slot` says where each lies, and a
`Shard` says which elements a rank owns. Elements are found by their global index, never by
convention, so bounds may be any that cover the vector once. AdamW is that of `optimizers`; what the
stages weigh in bytes is in `memory`; the engine's own shards and messages are elsewhere.

What a rank holds between steps, and when gradients are reduced:

    stage   parameters   gradients   optimizer state   reduced
    0       whole        whole       whole             once a step, to all ranks
    1       whole        whole       shard             once a step, to the owner
    2       whole        shard       shard             after every microbatch, to the owner
    3       shard        shard       shard             after every microbatch, to the owner
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpisim.errors import ConfigError
from mpisim.reference.accumulation import Microbatch, count_update_rows
from mpisim.reference.checks import (
    describe,
    require_float_array,
    require_int,
    require_number,
    require_same_tensors,
)
from mpisim.reference.chunks import chunk_bounds
from mpisim.reference.data_parallel import add_received, local_gradients
from mpisim.reference.mixed_precision import has_non_finite_gradients
from mpisim.reference.mlp import Params
from mpisim.reference.optimizers import AdamWState, adamw_init, adamw_step, global_norm

STAGES = (0, 1, 2, 3)
"""What is split: nothing; optimizer state; gradients too; parameters too."""


def require_stage(stage: object) -> int:
    """Return `stage` as an int; raise unless it is 0, 1, 2 or 3.

    Parameters
    ----------
    stage : int
        ZeRO stage.

    Returns
    -------
    int

    Raises
    ------
    ConfigError
        It is anything else.
    """
    number = require_int("stage", stage, 0)
    if number not in STAGES:
        raise ConfigError(
            f"stage must be 0, 1, 2 or 3; got {number}. Stage 3 splits all there is to split."
        )
    return number


# --- where tensors and shards lie ------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in the flat vector."""

    name: str
    """Of the parameter."""
    shape: tuple[int, ...]
    """Of the parameter, one dim or more."""
    start: int
    """Global index of its first element, >= 0."""

    @property
    def stop(self) -> int:
        """Global index after its last element."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Shard:
    """The elements of the flat vector that one rank owns."""

    start: int
    """Global index of the first, >= 0."""
    stop: int
    """Global index after the last, >= start; equal for an empty shard."""
    padding: int = 0
    """Zeros behind them, >= 0: part of the rank's array and of messages, of nothing else."""

    def __post_init__(self):
        require_int("start", self.start, 0)
        require_int("padding", self.padding, 0)
        if require_int("stop", self.stop, 0) < self.start:
            raise ConfigError(
                f"a shard must stop at or after its start; got [{self.start}, {self.stop}). "
                f"Use equal bounds for an empty shard."
            )

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return self.stop - self.start

    @property
    def padded_numel(self) -> int:
        """Elements of the rank's array."""
        return self.numel + self.padding


def flat_slots(params: Params) -> tuple[Slot, ...]:
    """Lay tensors end to end in their order in `params`.

    Parameters
    ----------
    params : dict of str to ndarray, float32 or float64
        One or more dims each, any may be empty; all of one dtype. Not modified.

    Returns
    -------
    tuple of Slot
        Without gaps, from index 0. Empty without tensors.

    Raises
    ------
    ConfigError
        A tensor is no such array, or dtypes differ: one flat vector has one.

    Examples
    --------
    >>> [(slot.name, slot.start, slot.stop)
    ...  for slot in flat_slots({"w": np.zeros((2, 3)), "b": np.zeros(2)})]
    [('w', 0, 6), ('b', 6, 8)]
    """
    slots: list[Slot] = []
    dtypes = set()
    for name, param in params.items():
        require_float_array(f"params[{name!r}]", param)
        dtypes.add(param.dtype.name)
        slots.append(Slot(name, param.shape, slots[-1].stop if slots else 0))
    if len(dtypes) > 1:
        raise ConfigError(
            f"params must have one dtype; got {', '.join(sorted(dtypes))}. "
            f"Convert the tensors to one, or lay out each dtype on its own."
        )
    return tuple(slots)


def flatten_params(params: Params, slots: Sequence[Slot]) -> np.ndarray:
    """Copy tensors into one flat vector, each to its slot.

    Parameters
    ----------
    params : dict of str to ndarray
        One tensor per slot, found by name, in any order; all of one dtype. Not modified.
    slots : sequence of Slot
        From `flat_slots`, at least one.

    Returns
    -------
    ndarray of shape (numel,), the dtype of the tensors
        Each tensor in row-major order. A new array.

    Raises
    ------
    ConfigError
        Names or shapes are not those of the slots, or there is no slot.
    """
    if not slots:
        raise ConfigError("slots must hold one or more tensors; got none. Pass a model.")
    missing = sorted({slot.name for slot in slots} ^ set(params))
    if missing:
        raise ConfigError(
            f"params must have one tensor for every slot; got {missing} on one side only. "
            f"Key every tensor by the name of its parameter."
        )
    for slot in slots:
        if params[slot.name].shape != slot.shape:
            raise ConfigError(
                f"params[{slot.name!r}] must have shape {slot.shape} of its slot; got "
                f"{params[slot.name].shape}. Check what this name is bound to."
            )
    return np.concatenate([params[slot.name].reshape(-1) for slot in slots])


def unflatten_params(flat: np.ndarray, slots: Sequence[Slot]) -> Params:
    """Cut a flat vector into named tensors.

    Parameters
    ----------
    flat : ndarray of shape (numel,), float32 or float64
        Without padding. Not modified.
    slots : sequence of Slot
        From `flat_slots`.

    Returns
    -------
    dict of str to ndarray
        In the order of the slots. New arrays.

    Raises
    ------
    ConfigError
        `flat` is not as long as the slots together: padding was not cut off, or it belongs to
        another model.
    """
    numel = slots[-1].stop if slots else 0
    require_float_array("flat", flat, 1)
    if flat.size != numel:
        raise ConfigError(
            f"flat must have the {numel} elements of its slots; got {flat.size}. "
            f"Cut padding off first; gather_by_global_index does."
        )
    return {slot.name: flat[slot.start : slot.stop].reshape(slot.shape).copy() for slot in slots}


def make_shards(numel: int, num_ranks: int, multiple: int | None = None) -> list[Shard]:
    """Cut a flat vector into one shard per rank.

    Parameters
    ----------
    numel : int
        Elements of the vector, >= 0.
    num_ranks : int
        P >= 1.
    multiple : int, optional
        None: no padding; sizes differ by at most one, the first ranks own the longer ones, and
        with fewer elements than ranks the last own nothing. Else the vector is padded to a
        multiple of this, which must be a multiple of P, and all arrays are equally long.

    Returns
    -------
    list of Shard, length num_ranks
        Together they cover [0, numel) once. Padding is at the end of the vector: the last ranks
        carry it, and with few elements some arrays are nothing but padding.

    Raises
    ------
    ConfigError
        A number is out of range, or `multiple` does not fit `num_ranks`.

    Examples
    --------
    >>> make_shards(57, 2, multiple=4)
    [Shard(start=0, stop=30, padding=0), Shard(start=30, stop=57, padding=3)]
    >>> [(shard.start, shard.stop) for shard in make_shards(2, 3)]
    [(0, 1), (1, 2), (2, 2)]
    """
    numel = require_int("numel", numel, 0)
    num_ranks = require_int("num_ranks", num_ranks, 1)
    if multiple is None:
        bounds = chunk_bounds(numel, num_ranks)
        return [Shard(bounds[rank], bounds[rank + 1]) for rank in range(num_ranks)]
    multiple = require_int("multiple", multiple, 1)
    if multiple % num_ranks:
        raise ConfigError(
            f"multiple must be a multiple of the number of ranks; got {multiple} for {num_ranks} "
            f"ranks. Use {num_ranks * -(-multiple // num_ranks)}, or None for no padding."
        )
    length = -(-numel // multiple) * multiple // num_ranks
    edges = [min(rank * length, numel) for rank in range(num_ranks + 1)]
    return [
        Shard(start, stop, padding=length - (stop - start))
        for start, stop in zip(edges, edges[1:], strict=False)
    ]


def scatter_to_shards(flat: np.ndarray, shards: Sequence[Shard]) -> list[np.ndarray]:
    """Give every rank its elements of a flat vector.

    Parameters
    ----------
    flat : ndarray of shape (numel,), float32 or float64
        Not modified.
    shards : sequence of P Shard
        Together they cover [0, numel) once, in any order.

    Returns
    -------
    list of P ndarrays of shape (shard.padded_numel,), the dtype of `flat`
        The rank's elements and then zeros. New arrays.

    Raises
    ------
    ConfigError
        The shards do not cover the vector once.
    """
    require_float_array("flat", flat, 1)
    _require_cover(shards, flat.size)
    return [_padded(flat[shard.start : shard.stop], shard.padding) for shard in shards]


def gather_by_global_index(arrays: Sequence[np.ndarray], shards: Sequence[Shard]) -> np.ndarray:
    """Put the elements of all shards back where they belong.

    Parameters
    ----------
    arrays : sequence of P ndarrays of shape (shard.padded_numel,), float32 or float64
        What each rank holds. Not modified.
    shards : sequence of P Shard
        Which elements that is: the bounds these arrays were written with, whatever the reader's
        own would be. They cover [0, numel) once, in any order.

    Returns
    -------
    ndarray of shape (numel,), the dtype of the arrays
        Without padding. A new array.

    Raises
    ------
    ConfigError
        Lengths or dtypes do not fit, or the shards leave a gap or overlap.

    Examples
    --------
    >>> gather_by_global_index(
    ...     [np.array([2.0, 0.0]), np.array([0.0, 1.0])], [Shard(2, 3, padding=1), Shard(0, 2)]
    ... ).tolist()
    [0.0, 1.0, 2.0]
    """
    _require_shard_arrays(arrays, shards)
    numel = sum(shard.numel for shard in shards)
    _require_cover(shards, numel)
    flat = np.empty(numel, arrays[0].dtype)
    for array, shard in zip(arrays, shards, strict=True):
        flat[shard.start : shard.stop] = array[: shard.numel]
    return flat


def all_gather_param_shards(
    arrays: Sequence[Mapping[str, np.ndarray]],
    shards: Mapping[str, Sequence[Shard]],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[Params]:
    """Give every rank the full parameters, where each tensor was split on its own.

    Parameters
    ----------
    arrays : sequence of P dicts of str to ndarray, P >= 1
        Each rank's flat part of every tensor, float32 or float64. Not modified.
    shards : dict of str to sequence of P Shard
        For each tensor, from `make_shards` of its size: indices count within the tensor, and
        every tensor has its own padding.
    shapes : dict of str to tuple of int
        Of the full tensors.

    Returns
    -------
    list of P dicts of str to ndarray
        Equal on all ranks, in the order of `shapes`. New arrays, none shared.

    Raises
    ------
    ConfigError
        Names, lengths or dtypes do not fit, or a tensor's shards leave a gap or overlap.

    Notes
    -----
    The flat shards of ranks must not be joined as a whole: with tensors of 3 and 5 elements, 2
    ranks and padding to 4 and 6, that would give a0 a1 b0 b1 b2 a2 pad b3 b4 pad.
    """
    if len(arrays) == 0:
        raise ConfigError(
            "arrays must hold one dict per rank; got an empty list. Pass at least one."
        )
    for rank, tensors in enumerate(arrays):
        if not set(tensors) == set(shards) == set(shapes):
            names = sorted(set(tensors) ^ set(shapes) | set(shards) ^ set(shapes))
            raise ConfigError(
                f"arrays of rank {rank}, shards and shapes must name the same tensors; got "
                f"{names} not in all. Key every tensor by the name of its parameter."
            )
    full: Params = {}
    for name, shape in shapes.items():
        flat = gather_by_global_index([tensors[name] for tensors in arrays], shards[name])
        if flat.size != math.prod(shape):
            raise ConfigError(
                f"the shards of {name!r} must hold its {math.prod(shape)} elements; got "
                f"{flat.size}. Store the bounds beside the shards and pass those."
            )
        full[name] = flat.reshape(shape)
    return [{name: tensor.copy() for name, tensor in full.items()} for _ in arrays]


def _padded(elements: np.ndarray, padding: int) -> np.ndarray:
    return np.concatenate([elements, np.zeros(padding, elements.dtype)])


def _require_cover(shards: Sequence[Shard], numel: int) -> None:
    """Raise unless the shards hold every global index below `numel` exactly once."""
    reached = 0
    for start, stop in sorted((shard.start, shard.stop) for shard in shards):
        if start == stop:
            continue
        if start != reached:
            fault = "overlap before" if start < reached else "leave a gap before"
            raise ConfigError(
                f"shards must cover [0, {numel}) exactly once; got shards that {fault} index "
                f"{max(start, reached)}. Pass the bounds of all ranks as they were written."
            )
        reached = stop
    if reached != numel:
        raise ConfigError(
            f"shards must cover [0, {numel}) exactly once; got shards that end at {reached}. "
            f"Pass the bounds of all ranks as they were written."
        )


def _require_shard_arrays(arrays: Sequence[np.ndarray], shards: Sequence[Shard]) -> None:
    if len(arrays) != len(shards) or len(shards) == 0:
        raise ConfigError(
            f"arrays must have one entry per shard, and there must be one or more; got "
            f"{len(arrays)} arrays and {len(shards)} shards. Pass empty arrays for empty shards."
        )
    for rank, (array, shard) in enumerate(zip(arrays, shards, strict=True)):
        require_float_array(f"the array of rank {rank}", array, 1)
        if array.size != shard.padded_numel or array.dtype != arrays[0].dtype:
            raise ConfigError(
                f"the array of rank {rank} must have {shard.padded_numel} elements of dtype "
                f"{arrays[0].dtype}; got {describe(array)}. Padding counts in the length."
            )


# --- gradients -------------------------------------------------------------------------------


def reduce_scatter_gradients(
    gradients: Sequence[np.ndarray], shards: Sequence[Shard]
) -> list[np.ndarray]:
    """Sum flat gradients over ranks; each rank keeps the elements it owns.

    Parameters
    ----------
    gradients : sequence of P ndarrays of shape (numel,), float32 or float64
        Each rank's addend, without padding, already weighted by its share of the update. Not
        modified.
    shards : sequence of P Shard
        Together they cover [0, numel) once, in any order.

    Returns
    -------
    list of P ndarrays of shape (shard.padded_numel,)
        Sums, not means; padding is zero. New arrays.

    Raises
    ------
    ConfigError
        There is not one gradient per shard, shapes or dtypes differ, or the shards do not fit.

    Notes
    -----
    Rank r's shard is summed in the ring's order r+1, r+2, ..., r (modulo P), so that with
    unpadded shards of `make_shards` the result is `data_parallel.ring_reduce_scatter`'s, bit for
    bit.

    Examples
    --------
    >>> [part.tolist() for part in reduce_scatter_gradients(
    ...     [np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0])], make_shards(3, 2))]
    [[11.0, 22.0], [33.0]]
    """
    num_ranks = len(shards)
    if len(gradients) != num_ranks or num_ranks == 0:
        raise ConfigError(
            f"gradients must have one entry per shard, and there must be one or more; got "
            f"{len(gradients)} gradients and {num_ranks} shards. Pass zeros for an idle rank."
        )
    for rank, gradient in enumerate(gradients):
        require_float_array(f"the gradient of rank {rank}", gradient, 1)
        if gradient.shape != gradients[0].shape or gradient.dtype != gradients[0].dtype:
            raise ConfigError(
                f"the gradient of rank {rank} must have shape {gradients[0].shape} and dtype "
                f"{gradients[0].dtype} of rank 0; got {describe(gradient)}. "
                f"All ranks of a collective bring the same."
            )
    _require_cover(shards, gradients[0].size)
    reduced = []
    for rank, shard in enumerate(shards):
        total = gradients[(rank + 1) % num_ranks][shard.start : shard.stop].copy()
        for hop in range(2, num_ranks + 1):
            own = gradients[(rank + hop) % num_ranks][shard.start : shard.stop]
            total = add_received(own, total)
        reduced.append(_padded(total, shard.padding))
    return reduced


def shard_ring_bytes(shards: Sequence[Shard], itemsize: int) -> list[int]:
    """Return the payload bytes each rank sends in one ring reduce-scatter over these shards.

    Parameters
    ----------
    shards : sequence of P Shard, P >= 1
    itemsize : int
        Bytes per element, >= 1.

    Returns
    -------
    list of P int
        All shards but the rank's own, padding included: (P - 1) / P of the vector if they are
        equally long. Over all ranks an all-gather sends the same, an all-reduce twice that.

    Raises
    ------
    ConfigError
        There is no shard or the item size is out of range.

    Examples
    --------
    >>> shard_ring_bytes(make_shards(1000, 4), itemsize=4)
    [3000, 3000, 3000, 3000]
    """
    itemsize = require_int("itemsize", itemsize, 1)
    require_int("the number of shards", len(shards), 1)
    total = sum(shard.padded_numel for shard in shards)
    return [(total - shard.padded_numel) * itemsize for shard in shards]


def sharded_global_norm(
    arrays: Sequence[np.ndarray],
    shards: Sequence[Shard],
    replicated: Sequence[Params] | None = None,
) -> float:
    """Return the norm of the whole gradient, which no rank holds.

    Parameters
    ----------
    arrays : sequence of P ndarrays of shape (shard.padded_numel,), float32 or float64
        Reduced gradient shards. Not modified.
    shards : sequence of P Shard
        Their bounds; what lies in `padding` is not counted.
    replicated : sequence of P dicts of str to ndarray, optional
        Reduced gradients of parameters that every rank holds whole, equal on all ranks. Counted
        once, not once per rank. Not modified.

    Returns
    -------
    float
        The square root of the sum of all squares, formed in float64: what every rank computes
        after the sums of squares were added over ranks. inf or NaN if a gradient is not finite.

    Raises
    ------
    ConfigError
        Lengths or dtypes do not fit, or a replicated gradient differs between ranks.

    Examples
    --------
    >>> sharded_global_norm([np.array([3.0]), np.array([4.0])], make_shards(2, 2))
    5.0
    """
    _require_shard_arrays(arrays, shards)
    parts = {
        f"shard of rank {rank}": array[: shard.numel]
        for rank, (array, shard) in enumerate(zip(arrays, shards, strict=True))
    }
    if replicated is not None:
        _require_replicas(replicated, len(shards))
        parts |= {f"replicated {name}": gradient for name, gradient in replicated[0].items()}
    return global_norm(parts)


def clip_sharded_gradients(
    arrays: Sequence[np.ndarray],
    shards: Sequence[Shard],
    max_norm: float,
    replicated: Sequence[Params] | None = None,
) -> tuple[list[np.ndarray], list[Params], float]:
    """Shrink all shards by the one factor that the global norm asks for.

    Parameters
    ----------
    arrays, shards, replicated
        As in `sharded_global_norm`. Not modified.
    max_norm : float
        Largest norm allowed, finite, > 0.

    Returns
    -------
    arrays : list of P ndarrays
        Clipped shards, padding as it was given. New arrays.
    replicated : list of dicts of str to ndarray
        Clipped replicated gradients, one dict per rank; empty if none were given. New arrays.
    norm : float
        The global norm before clipping.

    Raises
    ------
    ConfigError
        As in `sharded_global_norm`; the norm is inf or NaN; or `max_norm` is out of range.
    """
    max_norm = require_number("max_norm", max_norm, 0.0, low_open=True)
    norm = sharded_global_norm(arrays, shards, replicated)
    if not math.isfinite(norm):
        raise ConfigError(
            f"gradients must have a finite global norm to be clipped; got {norm}. "
            f"Skip this step on every rank and keep the weights."
        )
    factor = max_norm / norm if norm > max_norm else 1.0

    def scaled(gradient: np.ndarray) -> np.ndarray:
        # In float64 and rounded once, as `optimizers.clip_by_global_norm` does.
        return np.multiply(gradient, factor, dtype=np.float64).astype(gradient.dtype)

    copies = [
        {name: scaled(gradient) for name, gradient in gradients.items()}
        for gradients in replicated or ()
    ]
    return [scaled(array) for array in arrays], copies, norm


def any_rank_non_finite(arrays: Sequence[np.ndarray], shards: Sequence[Shard]) -> bool:
    """Return whether any rank's gradient shard holds inf or NaN.

    Parameters
    ----------
    arrays : sequence of P ndarrays of shape (shard.padded_numel,), float32 or float64
        Not modified.
    shards : sequence of P Shard
        Padding is not looked at.

    Returns
    -------
    bool
        The maximum over ranks of a flag 0 or 1, the same on all: either every rank skips or none
        does. A rank that owns nothing brings 0.

    Raises
    ------
    ConfigError
        Lengths or dtypes do not fit.
    """
    _require_shard_arrays(arrays, shards)
    flags = [
        int(has_non_finite_gradients({"shard": array[: shard.numel]}))
        for array, shard in zip(arrays, shards, strict=True)
    ]
    return bool(max(flags))


def _require_replicas(replicas: Sequence[Params], num_ranks: int) -> None:
    if len(replicas) != num_ranks:
        raise ConfigError(
            f"replicated tensors must come from every rank; got {len(replicas)} for {num_ranks} "
            f"ranks. Pass one dict per rank."
        )
    for rank, replica in enumerate(replicas):
        require_same_tensors(f"the replica of rank {rank}", replica, replicas[0])
        for name, tensor in replica.items():
            if not np.array_equal(tensor, replicas[0][name], equal_nan=True):
                raise ConfigError(
                    f"replicated tensors must be equal on all ranks; got another {name!r} on rank "
                    f"{rank} than on rank 0. Reduce it over ranks first."
                )


# --- optimizer state -------------------------------------------------------------------------


@dataclass(frozen=True)
class AdamShard:
    """AdamW's state for the elements that one rank owns."""

    step: int
    """Updates made so far, the same on all ranks, also on those that own nothing."""
    shard: Shard
    """Which elements; stored with the moments so that no reader has to guess."""
    first: np.ndarray
    """Running mean of gradients, shape (shard.padded_numel,)."""
    second: np.ndarray
    """Running mean of squared gradients, same shape."""


def partition_optimizer_state(
    state: AdamWState, slots: Sequence[Slot], shards: Sequence[Shard]
) -> list[AdamShard]:
    """Split AdamW's state over ranks.

    Parameters
    ----------
    state : AdamWState
        Of the whole model, moments keyed by parameter name. Not modified.
    slots : sequence of Slot
        Where each parameter lies, from `flat_slots`.
    shards : sequence of P Shard
        Together they cover the slots once, such as `make_shards` makes them: empty ones, uneven
        ones and padded ones are all right.

    Returns
    -------
    list of P AdamShard
        Each element of each moment is in exactly one; padding is zero. New arrays.

    Raises
    ------
    ConfigError
        Names or shapes are not those of the slots, or the shards do not cover them once.

    Examples
    --------
    >>> params = {"w": np.zeros(3)}
    >>> parts = partition_optimizer_state(adamw_init(params), flat_slots(params), make_shards(3, 2))
    >>> [part.first.size for part in parts]
    [2, 1]
    """
    firsts = scatter_to_shards(flatten_params(state.first, slots), shards)
    seconds = scatter_to_shards(flatten_params(state.second, slots), shards)
    return [
        AdamShard(state.step, shard, first, second)
        for shard, first, second in zip(shards, firsts, seconds, strict=True)
    ]


def gather_optimizer_state(parts: Sequence[AdamShard], slots: Sequence[Slot]) -> AdamWState:
    """Join what `partition_optimizer_state` split, wherever its bounds were.

    Parameters
    ----------
    parts : sequence of AdamShard
        Of all ranks, in any order. Not modified.
    slots : sequence of Slot
        Where each parameter lies.

    Returns
    -------
    AdamWState
        Moments keyed by name. New arrays.

    Raises
    ------
    ConfigError
        Ranks made different numbers of steps, or the shards do not cover the slots once.
    """
    steps = sorted({part.step for part in parts})
    if len(steps) != 1:
        raise ConfigError(
            f"all ranks must have made the same number of steps; got {steps}. "
            f"Take the shards of one step from every rank."
        )
    shards = [part.shard for part in parts]
    first = gather_by_global_index([part.first for part in parts], shards)
    second = gather_by_global_index([part.second for part in parts], shards)
    return AdamWState(steps[0], unflatten_params(first, slots), unflatten_params(second, slots))


def sharded_adamw_step(
    param_shard: np.ndarray,
    gradient_shard: np.ndarray,
    state: AdamShard,
    slots: Sequence[Slot],
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[np.ndarray, AdamShard]:
    """Make one AdamW step on the elements that a rank owns.

    Parameters
    ----------
    param_shard, gradient_shard : ndarray of shape (shard.padded_numel,), float32 or float64
        The rank's parameters and reduced, clipped gradients. Not modified.
    state : AdamShard
        Not modified.
    slots : sequence of Slot
        Of the whole model: elements of tensors with two or more dims decay, others do not.
    lr, beta1, beta2, eps, weight_decay : float
        As in `optimizers.adamw_step`.

    Returns
    -------
    param_shard : ndarray
        New parameters of these elements, padding zero. A new array.
    state : AdamShard
        With `step` one higher, also for an empty shard.

    Raises
    ------
    ConfigError
        Lengths or dtypes do not fit, or as in `optimizers.adamw_step`.

    Notes
    -----
    AdamW works on each element alone, so every element gets the bits of the unsharded step.
    """
    arrays = (param_shard, gradient_shard, state.first, state.second)
    _require_shard_arrays(arrays, [state.shard] * len(arrays))
    params, gradients, first, second = (_pieces(array, state.shard, slots) for array in arrays)
    new_params, new_state = adamw_step(
        params,
        gradients,
        AdamWState(state.step, first, second),
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
    )

    def joined(pieces: Params) -> np.ndarray:
        flat = [pieces[name].reshape(-1) for name in params]
        empty = np.zeros(0, param_shard.dtype)
        return _padded(np.concatenate([empty, *flat]), state.shard.padding)

    return joined(new_params), AdamShard(
        new_state.step, state.shard, joined(new_state.first), joined(new_state.second)
    )


def _pieces(array: np.ndarray, shard: Shard, slots: Sequence[Slot]) -> Params:
    """Cut a shard at the borders of tensors; keep what tells matrices from vectors."""
    pieces = {}
    for slot in slots:
        start, stop = max(slot.start, shard.start), min(slot.stop, shard.stop)
        if start < stop:
            piece = array[start - shard.start : stop - shard.start]
            # adamw_step decays what has two dims: a part of a matrix becomes a matrix of one row.
            pieces[slot.name] = piece.reshape(1, -1) if len(slot.shape) >= 2 else piece
    return pieces


# --- the step --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZeroState:
    """What all ranks hold between two steps."""

    stage: int
    """0, 1, 2 or 3; see the module's table."""
    slots: tuple[Slot, ...]
    """Where tensors lie in the flat vector."""
    shards: tuple[Shard, ...]
    """Which elements each rank reduces and, from stage 1 on, owns."""
    params: tuple[np.ndarray, ...]
    """Per rank: the whole flat vector without padding below stage 3, the padded shard at stage
    3."""
    optimizer: tuple[AdamShard, ...]
    """Per rank: of all elements at stage 0, else of the rank's shard."""


@dataclass(frozen=True)
class ZeroReport:
    """What one step found."""

    loss: float
    """Mean over all rows of all ranks, under the old parameters."""
    grad_norm: float
    """Global norm before clipping; inf or NaN if the step was skipped."""
    skipped: bool
    """True if a gradient on any rank was not finite: no rank has changed anything."""
    gradient_sent_bytes: tuple[int, ...]
    """Payload that each rank sent to reduce gradients, over a ring."""


def init_zero(params: Params, num_ranks: int, stage: int, multiple: int | None = None) -> ZeroState:
    """Split a model over ranks before its first step.

    Parameters
    ----------
    params : dict of str to ndarray, float32 or float64
        All of one dtype, at least one. Not modified.
    num_ranks : int
        P >= 1.
    stage : {0, 1, 2, 3}
    multiple : int, optional
        Padding, as in `make_shards`.

    Returns
    -------
    ZeroState
        With zero moments. Owns new arrays, none shared between ranks.

    Raises
    ------
    ConfigError
        A number is out of range or the tensors do not fit into one vector.
    """
    stage = require_stage(stage)
    slots = flat_slots(params)
    flat = flatten_params(params, slots)
    shards = make_shards(flat.size, num_ranks, multiple)
    owned = [Shard(0, flat.size)] * num_ranks if stage == 0 else shards
    state = adamw_init(params)
    if stage == 0:
        optimizer = [partition_optimizer_state(state, slots, [owned[0]])[0] for _ in shards]
    else:
        optimizer = partition_optimizer_state(state, slots, shards)
    held = scatter_to_shards(flat, shards) if stage == 3 else [flat.copy() for _ in shards]
    return ZeroState(stage, slots, tuple(shards), tuple(held), tuple(optimizer))


def full_params(state: ZeroState) -> list[Params]:
    """Return the whole model as each rank sees it.

    Parameters
    ----------
    state : ZeroState
        Not modified.

    Returns
    -------
    list of P dicts of str to ndarray
        Below stage 3 what the rank holds, at stage 3 what it gathers. New arrays.

    Raises
    ------
    ConfigError
        Arrays are not those of the state's shards.
    """
    if state.stage == 3:
        flat = gather_by_global_index(state.params, state.shards)
        return [unflatten_params(flat, state.slots) for _ in state.shards]
    return [unflatten_params(flat, state.slots) for flat in state.params]


def zero_train_step(
    state: ZeroState,
    rank_microbatches: Sequence[Sequence[Microbatch]],
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_norm: float | None = None,
    gradients_of: Callable[..., tuple[float, Params]] = local_gradients,
) -> tuple[ZeroState, ZeroReport]:
    """Make one AdamW step of a model that is split over ranks.

    Parameters
    ----------
    state : ZeroState
        From `init_zero` or the last step; its `stage` says what is split. Not modified.
    rank_microbatches : sequence of P sequences of (x, y)
        Each rank's K >= 1 microbatches, the same K on all ranks; some, but not all, may have no
        rows. Not modified.
    lr, beta1, beta2, eps, weight_decay : float
        As in `optimizers.adamw_step`.
    max_norm : float, optional
        Largest global norm, > 0. None: gradients are not clipped.
    gradients_of : callable, (params, x, y, total_rows) -> (loss share, gradients)
        What a rank computes of one microbatch: its share of the mean over the N = `total_rows`
        rows of the step, and the gradients of that share. The default is the MLP with its
        default activation and loss. Must not modify `params`.

    Returns
    -------
    state : ZeroState
        New arrays; the given state itself if the step was skipped.
    report : ZeroReport

    Raises
    ------
    ConfigError
        Anything does not fit together.

    Notes
    -----
    Equals one step of the whole model on all rows up to rounding, for every stage, however rows
    are spread. At stages 0 and 1 microbatches are added up on each rank and reduced once, after
    the last. At stages 2 and 3 each microbatch's own gradients are reduced and the owner adds up
    what it gets: a rank never holds the whole accumulated gradient, and sends K times as much.
    All ranks look at the same flag and the same norm before any of them changes anything.
    """
    num_ranks, stage = len(state.shards), state.stage
    num_microbatches = _require_microbatches(rank_microbatches, num_ranks)
    total_rows = sum(count_update_rows([m for batch in rank_microbatches for m in batch]))

    loss, num_reductions = 0.0, 0
    accumulated: list[np.ndarray] | None = None
    for micro in range(num_microbatches):
        gradients = []
        # Parameters do not change between microbatches; at stage 3 they are gathered for each.
        for rank, params in enumerate(full_params(state)):
            x, y = rank_microbatches[rank][micro]
            share, tensors = gradients_of(params, x, y, total_rows)
            loss += share
            gradients.append(flatten_params(tensors, state.slots))
        if stage >= 2:
            gradients = reduce_scatter_gradients(gradients, state.shards)
            num_reductions += 1
        if accumulated is None:  # every step starts from nothing
            accumulated = gradients
        else:
            accumulated = [a + g for a, g in zip(accumulated, gradients, strict=True)]
    if stage < 2:
        accumulated = reduce_scatter_gradients(accumulated, state.shards)
        num_reductions += 1

    itemsize = accumulated[0].itemsize
    sent = [num_reductions * bytes_ for bytes_ in shard_ring_bytes(state.shards, itemsize)]
    if stage == 0:  # an all-reduce goes on to gather what the reduce-scatter left
        gathered = [_ring_gather_bytes(state.shards, rank, itemsize) for rank in range(num_ranks)]
        sent = [a + b for a, b in zip(sent, gathered, strict=True)]

    norm = sharded_global_norm(accumulated, state.shards)
    skipped = any_rank_non_finite(accumulated, state.shards)
    report = ZeroReport(loss, norm, skipped, tuple(sent))
    if skipped:
        return state, report
    if max_norm is not None:
        accumulated, _, _ = clip_sharded_gradients(accumulated, state.shards, max_norm)

    if stage == 0:
        whole = gather_by_global_index(accumulated, state.shards)
        accumulated, own_params = [whole.copy() for _ in state.shards], state.params
    elif stage == 3:
        own_params = state.params
    else:
        own_params = [
            scatter_to_shards(flat, state.shards)[rank] for rank, flat in enumerate(state.params)
        ]
    new_params, new_optimizer = [], []
    for own, gradient, part in zip(own_params, accumulated, state.optimizer, strict=True):
        own, part = sharded_adamw_step(
            own, gradient, part, state.slots, lr, beta1, beta2, eps, weight_decay
        )
        new_params.append(own)
        new_optimizer.append(part)
    if stage in (1, 2):
        whole = gather_by_global_index(new_params, state.shards)
        new_params = [whole.copy() for _ in state.shards]
    new = ZeroState(stage, state.slots, state.shards, tuple(new_params), tuple(new_optimizer))
    return new, report


def _ring_gather_bytes(shards: Sequence[Shard], rank: int, itemsize: int) -> int:
    """Return what a rank sends in a ring all-gather: all shards but its right neighbour's."""
    neighbour = shards[(rank + 1) % len(shards)]
    return sum(s.padded_numel for s in shards) * itemsize - neighbour.padded_numel * itemsize


def _require_microbatches(rank_microbatches: Sequence[Sequence[Microbatch]], num_ranks: int) -> int:
    """Return K; raise unless every rank brings K >= 1 microbatches."""
    counts = [len(microbatches) for microbatches in rank_microbatches]
    if len(counts) != num_ranks or len(set(counts)) != 1 or counts[0] == 0:
        raise ConfigError(
            f"rank_microbatches must hold the same number of microbatches, one or more, for each "
            f"of {num_ranks} ranks; got {counts}. Every rank takes part in every reduction: pass "
            f"microbatches without rows to a rank that has none left."
        )
    return counts[0]
