"""Bytes of a training step, from sizes alone, and a training loop that stays below a budget (A7).

First what a rank holds whatever the batch: parameters, gradients, optimizer state and buffers, at
each stage of `zero`. Then what the activations of the MLP add at their fullest moment, with and
without recompute and microbatches. Last the loop that puts both together: it chooses microbatches
and recompute so that what it keeps fits in a budget, counts every array it keeps, and declines if
nothing fits. The engine's own ledger and forecast do not live here.

All figures are bytes of array elements (``nbytes``) kept by name. Not counted: temporaries inside
one function such as a matrix product before its bias is added, and Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpisim.errors import MemoryBudgetExceeded
from mpisim.reference.accumulation import Microbatch, count_update_rows, split_microbatches
from mpisim.reference.checks import require_choice, require_float_array, require_int
from mpisim.reference.mlp import LOSSES, Params, linear_backward, linear_forward, mlp_layers
from mpisim.reference.optimizers import AdamWState, adamw_init, adamw_step
from mpisim.reference.recompute import Block, Segment, mlp_blocks, recompute_block_activations
from mpisim.reference.zero import make_shards, require_stage

ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Name -> bytes per element."""


# --- parameters, gradients, optimizer state --------------------------------------------------


def compute_param_memory_bytes(
    num_params: int, dtype: str = "float16", num_ranks: int = 1, stage: int = 0
) -> int:
    """Return the bytes of the parameters that the fullest rank keeps between steps.

    Parameters
    ----------
    num_params : int
        Elements of the whole model, >= 0; tied tensors once.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of the weights that forward uses; float32 masters count as optimizer state.
    num_ranks : int, default 1
        Ranks that share the model's state, >= 1.
    stage : {0, 1, 2, 3}
        Parameters are split at stage 3 only. What is gathered for a forward comes on top; see
        `compute_buffer_memory_bytes`.

    Returns
    -------
    int
        Bytes. With uneven shards the longest counts: a budget is met by the worst rank or not.

    Raises
    ------
    ConfigError
        A number is out of range or a name is unknown.

    Examples
    --------
    >>> compute_param_memory_bytes(1001, "float16", num_ranks=4, stage=3)
    502
    """
    require_choice("dtype", dtype, ITEMSIZES)
    return _worst_elements(num_params, num_ranks, stage, splits_from=3) * ITEMSIZES[dtype]


def compute_gradient_memory_bytes(
    num_params: int, dtype: str = "float16", num_ranks: int = 1, stage: int = 0
) -> int:
    """Return the bytes of the reduced gradients that the fullest rank holds before the update.

    Parameters
    ----------
    num_params, num_ranks, stage
        As in `compute_param_memory_bytes`; gradients are split at stages 2 and 3.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of gradients. With microbatches this is the accumulation buffer; a microbatch's own
        gradients come on top while they are added, a block or a bucket at a time.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ConfigError
        A number is out of range or a name is unknown.
    """
    require_choice("dtype", dtype, ITEMSIZES)
    return _worst_elements(num_params, num_ranks, stage, splits_from=2) * ITEMSIZES[dtype]


def compute_optimizer_memory_bytes(
    num_params: int,
    dtype: str = "float32",
    num_ranks: int = 1,
    stage: int = 0,
    num_moments: int = 2,
    masters: bool = True,
) -> int:
    """Return the bytes of optimizer state that the fullest rank keeps.

    Parameters
    ----------
    num_params, num_ranks, stage
        As in `compute_param_memory_bytes`; optimizer state is split from stage 1 on.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of moments and masters.
    num_moments : int, default 2
        Numbers per element: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD.
    masters : bool, default True
        Whether a master copy of the weights is kept beside those that forward uses; False when
        forward uses the masters.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ConfigError
        A number is out of range or a name is unknown.
    """
    require_choice("dtype", dtype, ITEMSIZES)
    numbers = require_int("num_moments", num_moments, 0) + (1 if masters else 0)
    elements = _worst_elements(num_params, num_ranks, stage, splits_from=1)
    return elements * numbers * ITEMSIZES[dtype]


def compute_buffer_memory_bytes(
    num_params: int,
    bucket_elements: int,
    param_dtype: str = "float16",
    gradient_dtype: str = "float16",
    num_ranks: int = 1,
    stage: int = 0,
    gathered_elements: int = 0,
) -> int:
    """Return the bytes of what a rank holds only while it communicates.

    Parameters
    ----------
    num_params, num_ranks, stage
        As in `compute_param_memory_bytes`.
    bucket_elements : int
        Largest bucket of gradients that is reduced at a time, >= 1. A small model does not fill
        it: the buffer holds min(bucket, model) elements.
    param_dtype, gradient_dtype : {"float16", "bfloat16", "float32", "float64"}
    gathered_elements : int, default 0
        Parameters that stage 3 has gathered at one time: the largest block, or two with one
        fetched ahead. May exceed `num_params` then.

    Returns
    -------
    int
        Bytes; 0 on one rank, which sends nothing.

    Raises
    ------
    ConfigError
        A number is out of range or a name is unknown.

    Notes
    -----
    These do not shrink with the number of ranks, so a higher stage may need more than a lower
    one when the model is small. Compare totals; do not pick a stage by its number.
    """
    num_params = require_int("num_params", num_params, 0)
    bucket = min(require_int("bucket_elements", bucket_elements, 1), num_params)
    gathered = require_int("gathered_elements", gathered_elements, 0)
    require_choice("param_dtype", param_dtype, ITEMSIZES)
    require_choice("gradient_dtype", gradient_dtype, ITEMSIZES)
    stage = require_stage(stage)
    if require_int("num_ranks", num_ranks, 1) == 1:
        return 0
    if stage < 3:
        gathered = 0
    return bucket * ITEMSIZES[gradient_dtype] + gathered * ITEMSIZES[param_dtype]


class StateBytes(NamedTuple):
    """What the fullest rank holds whatever the batch, in bytes."""

    params: int
    """Weights that forward uses."""
    gradients: int
    """Reduced gradients, before the update."""
    optimizer: int
    """Moments, and masters where there are any."""

    @property
    def total(self) -> int:
        """Sum of the three."""
        return sum(self)


def compute_training_state_bytes(
    num_params: int,
    num_ranks: int = 1,
    stage: int = 0,
    param_dtype: str = "float16",
    gradient_dtype: str = "float16",
    optimizer_dtype: str = "float32",
) -> StateBytes:
    """Return what training with Adam holds on the fullest rank, without activations and buffers.

    Parameters
    ----------
    num_params, num_ranks, stage
        As in `compute_param_memory_bytes`.
    param_dtype, gradient_dtype, optimizer_dtype : {"float16", "bfloat16", "float32", "float64"}
        Masters are counted if weights are of another dtype than optimizer state.

    Returns
    -------
    StateBytes

    Raises
    ------
    ConfigError
        A number is out of range or a name is unknown.

    Examples
    --------
    >>> [compute_training_state_bytes(1000, 4, stage).total for stage in (0, 1, 2, 3)]
    [16000, 7000, 5500, 4000]
    """
    return StateBytes(
        compute_param_memory_bytes(num_params, param_dtype, num_ranks, stage),
        compute_gradient_memory_bytes(num_params, gradient_dtype, num_ranks, stage),
        compute_optimizer_memory_bytes(
            num_params, optimizer_dtype, num_ranks, stage, masters=param_dtype != optimizer_dtype
        ),
    )


def _worst_elements(num_params: int, num_ranks: int, stage: int, splits_from: int) -> int:
    """Return the elements of the longest shard, or all of them below the stage that splits."""
    shards = make_shards(num_params, num_ranks)
    if require_stage(stage) < splits_from:
        return require_int("num_params", num_params, 0)
    return max(shard.padded_numel for shard in shards)


# --- activations -----------------------------------------------------------------------------


class _Change(NamedTuple):
    """Bytes that begin (> 0) or end (< 0) to be kept, in the order in which it happens."""

    category: str
    """"activations" or "gradients"."""
    nbytes: int


def _microbatch_changes(
    num_rows: int, sizes: Sequence[int], itemsize: int, every: int, adds_up: bool
) -> Iterator[_Change]:
    """Yield what `_microbatch_gradients` keeps and drops, from sizes alone, line by line."""
    rows = [num_rows * width * itemsize for width in sizes]
    weights = [(i + 1) * o * itemsize for i, o in zip(sizes, sizes[1:], strict=False)]
    head = len(sizes) - 2
    segments = [
        range(start, min(start + (every or 1), head)) for start in range(0, head, every or 1)
    ]

    def activations(nbytes: int) -> _Change:
        return _Change("activations", nbytes)

    yield activations(rows[0] + rows[-1])  # x and y
    for segment in segments:
        for block in segment:
            yield activations(rows[block + 1])  # z
            yield activations(rows[block + 1])  # h
        if every:  # all z, and all h but the segment's output
            for block in segment:
                yield activations(-rows[block + 1])
            for block in segment[:-1]:
                yield activations(-rows[block + 1])
    yield activations(rows[-1])  # prediction
    yield activations(rows[-1])  # dprediction
    yield activations(-2 * rows[-1])  # prediction and y
    yield activations(rows[head])  # dh
    yield _Change("gradients", weights[head])
    yield activations(-rows[-1])  # dprediction
    if adds_up:
        yield _Change("gradients", -weights[head])
    for segment in reversed(segments):
        if every:
            for block in segment:
                yield activations(rows[block + 1])
            for block in segment[:-1]:
                yield activations(rows[block + 1])
        for block in reversed(segment):
            yield activations(rows[block])  # dx
            yield _Change("gradients", weights[block])
            yield activations(-3 * rows[block + 1])  # dy, z and the block's output
            if adds_up:
                yield _Change("gradients", -weights[block])
    yield activations(-2 * rows[0])  # x and the gradient in it


def compute_peak_activation_memory_bytes(
    num_rows: int,
    sizes: Sequence[int],
    dtype: str = "float64",
    recompute_every: int = 0,
    num_microbatches: int = 1,
) -> int:
    """Return the most bytes of activations and their gradients that the MLP's step keeps at once.

    Parameters
    ----------
    num_rows : int
        Rows of the whole update on this rank, >= 0.
    sizes : sequence of int
        Widths from input to output as in `mlp.init_mlp`, at least two, each >= 1.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of all activations; 16-bit ones as `mixed_precision` stores them.
    recompute_every : int, default 0
        As in `recompute.blocks_forward`: 0 keeps everything, k >= 1 keeps the input of every
        k-th hidden layer.
    num_microbatches : int, default 1
        K >= 1: rows are cut as `accumulation.split_microbatches` does it, and the longest piece
        counts. Pieces follow each other, so K changes nothing else.

    Returns
    -------
    int
        Bytes. Kept are the microbatch's rows x and y, the input and output of each activation,
        the prediction, and the gradients in them while they go back; see the module for what is
        not counted. Gradients of parameters are no activations.

    Raises
    ------
    ConfigError
        A number is out of range or a name is unknown.

    Examples
    --------
    >>> compute_peak_activation_memory_bytes(8, (4, 16, 16, 16, 2))
    8448
    >>> compute_peak_activation_memory_bytes(8, (4, 16, 16, 16, 2), num_microbatches=4)
    2112
    """
    require_choice("dtype", dtype, ITEMSIZES)
    every = require_int("recompute_every", recompute_every, 0)
    micro_rows = _longest_microbatch(num_rows, num_microbatches)
    changes = _microbatch_changes(
        micro_rows, _require_sizes(sizes), ITEMSIZES[dtype], every, adds_up=True
    )
    return _highest(change.nbytes for change in changes if change.category == "activations")


def _highest(changes: Iterator[int]) -> int:
    live = peak = 0
    for nbytes in changes:
        live += nbytes
        peak = max(peak, live)
    return peak


def _longest_microbatch(num_rows: int, num_microbatches: int) -> int:
    num_rows = require_int("num_rows", num_rows, 0)
    return -(-num_rows // require_int("num_microbatches", num_microbatches, 1))


def _require_sizes(sizes: Sequence[int]) -> list[int]:
    require_int("the number of widths in sizes", len(sizes), 2)
    return [require_int(f"sizes[{index}]", size, 1) for index, size in enumerate(sizes)]


# --- the memory-aware loop: plan -------------------------------------------------------------


class MemoryPlan(NamedTuple):
    """How a step of the MLP is cut to fit, and what it will keep."""

    num_microbatches: int
    """K, pieces of the update's rows, >= 1."""
    recompute_every: int
    """0: keep everything; k >= 1: keep the input of every k-th hidden layer."""
    peak_bytes: int
    """Most that the loop keeps at any moment, exact for what `HeldBytes` counts."""


def compute_peak_training_bytes(
    num_rows: int,
    sizes: Sequence[int],
    dtype: str = "float64",
    recompute_every: int = 0,
    num_microbatches: int = 1,
) -> int:
    """Return the most bytes that `memory_aware_train` keeps at any moment of a step.

    Parameters
    ----------
    num_rows, sizes, recompute_every, num_microbatches
        As in `compute_peak_activation_memory_bytes`, with num_rows >= 1.
    dtype : {"float32", "float64"}
        Of parameters, gradients, moments and activations alike.

    Returns
    -------
    int
        Bytes: the fullest moment of parameters, moments, gradients and activations together. It
        is not the sum of the peaks of each, which are at different moments. With K > 1 there is
        one buffer of gradients from the first microbatch to the update; otherwise K, at the same
        rows per microbatch, changes nothing.

    Raises
    ------
    ConfigError
        A number is out of range or a name is unknown.
    """
    require_choice("dtype", dtype, {"float32": 4, "float64": 8})
    every = require_int("recompute_every", recompute_every, 0)
    widths, itemsize = _require_sizes(sizes), ITEMSIZES[dtype]
    micro_rows = _longest_microbatch(require_int("num_rows", num_rows, 1), num_microbatches)
    tensors = []
    for num_in, num_out in zip(widths, widths[1:], strict=False):
        tensors += [num_in * num_out * itemsize, num_out * itemsize]
    model = sum(tensors)
    adds_up = num_microbatches > 1
    changes = _microbatch_changes(micro_rows, widths, itemsize, every, adds_up)
    buffer = model if adds_up else 0
    backward = 3 * model + buffer + _highest(change.nbytes for change in changes)
    # The update, one tensor at a time: the new weight and moments beside the old ones, until the
    # old ones and the gradient are dropped.
    update, gradients = 0, model
    for tensor in tensors:
        update = max(update, 3 * model + gradients + 3 * tensor)
        gradients -= tensor
    return max(backward, update)


def plan_memory_aware_step(
    num_rows: int, sizes: Sequence[int], budget_bytes: int, dtype: str = "float64"
) -> MemoryPlan:
    """Choose microbatches and recompute so that a step fits in a budget.

    Parameters
    ----------
    num_rows, sizes, dtype
        As in `compute_peak_training_bytes`.
    budget_bytes : int
        Most that the loop may keep, >= 0.

    Returns
    -------
    MemoryPlan
        What costs least time comes first: no recompute with as few microbatches as fit; only if
        not even one row at a time does, recompute, again with as few microbatches as fit, at the
        spacing that keeps least. `peak_bytes` is at most the budget.

    Raises
    ------
    MemoryBudgetExceeded
        Nothing fits. The message says how many bytes are missing for the smallest step, and what
        it consists of.
    ConfigError
        A number is out of range or a name is unknown.

    Examples
    --------
    >>> plan_memory_aware_step(64, (4, 32, 32, 1), budget_bytes=100_000)
    MemoryPlan(num_microbatches=2, recompute_every=0, peak_bytes=98592)
    """
    budget = require_int("budget_bytes", budget_bytes, 0)
    num_rows = require_int("num_rows", num_rows, 1)
    num_blocks = len(_require_sizes(sizes)) - 2
    smallest: MemoryPlan | None = None
    for spacings in ([0], range(1, num_blocks + 1)):
        for num_microbatches in _distinct_cuts(num_rows):
            plans = [
                MemoryPlan(
                    num_microbatches,
                    every,
                    compute_peak_training_bytes(num_rows, sizes, dtype, every, num_microbatches),
                )
                for every in spacings
            ]
            if not plans:  # no hidden layer, nothing to compute again
                continue
            best = min(plans, key=lambda plan: plan.peak_bytes)
            if best.peak_bytes <= budget:
                return best
            if smallest is None or best.peak_bytes < smallest.peak_bytes:
                smallest = best
    raise MemoryBudgetExceeded(_declined(smallest, num_rows, sizes, budget, dtype))


def _distinct_cuts(num_rows: int) -> list[int]:
    """Return the numbers of microbatches worth trying: the fewest for each longest length."""
    fewest: dict[int, int] = {}
    for num_microbatches in range(1, num_rows + 1):
        fewest.setdefault(_longest_microbatch(num_rows, num_microbatches), num_microbatches)
    return list(fewest.values())


def _declined(
    plan: MemoryPlan, num_rows: int, sizes: Sequence[int], budget: int, dtype: str
) -> str:
    num_params = sum((i + 1) * o for i, o in zip(sizes, sizes[1:], strict=False))
    weights = compute_param_memory_bytes(num_params, dtype)
    moments = compute_optimizer_memory_bytes(num_params, dtype, masters=False)
    rest = plan.peak_bytes - weights - moments
    how = f"recompute of every {plan.recompute_every}" if plan.recompute_every else "no recompute"
    return (
        f"budget_bytes must be at least {plan.peak_bytes} for the smallest step "
        f"({plan.num_microbatches} microbatches of {num_rows} rows, {how}); got {budget}: "
        f"{plan.peak_bytes - budget} bytes are missing. Parameters take {weights}, moments "
        f"{moments}, gradients, activations and the update {rest}. Raise the budget, narrow the "
        f"model, or split its state over ranks."
    )


# --- the memory-aware loop: run --------------------------------------------------------------


class HeldBytes:
    """Counts the bytes of the arrays that a loop keeps; refuses to pass a budget.

    Parameters
    ----------
    budget_bytes : int, optional
        >= 0; None: count only.

    Notes
    -----
    An array counts once, however often it is kept, and until it was dropped as often; a view
    counts its own bytes. Arrays are held here as long as they count, so none can end, and give
    its identity to another, before it is dropped.
    """

    def __init__(self, budget_bytes: int | None = None):
        if budget_bytes is not None:
            budget_bytes = require_int("budget_bytes", budget_bytes, 0)
        self.budget_bytes = budget_bytes
        """Most that may be kept, None for no limit."""
        self.live_bytes = 0
        """Kept now."""
        self.peak_bytes = 0
        """Most that was kept at any moment."""
        self._arrays: dict[int, list] = {}

    def keep(self, *arrays: np.ndarray) -> None:
        """Begin to count arrays.

        Parameters
        ----------
        *arrays : ndarray
            Not modified.

        Raises
        ------
        MemoryBudgetExceeded
            They do not fit in the budget. The arrays are counted all the same.
        """
        for array in arrays:
            entry = self._arrays.setdefault(id(array), [array, 0])
            entry[1] += 1
            if entry[1] == 1:
                self.live_bytes += array.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.budget_bytes is not None and self.live_bytes > self.budget_bytes:
            raise MemoryBudgetExceeded(
                f"arrays kept must be at most {self.budget_bytes} bytes; got {self.live_bytes}: "
                f"{self.live_bytes - self.budget_bytes} bytes are missing. Raise the budget, or "
                f"use more microbatches."
            )

    def drop(self, *arrays: np.ndarray) -> None:
        """End to count arrays.

        Parameters
        ----------
        *arrays : ndarray
            Each kept before, and not dropped as often since.
        """
        for array in arrays:
            assert id(array) in self._arrays, "an array is dropped that is not kept"
            entry = self._arrays[id(array)]
            entry[1] -= 1
            if entry[1] == 0:
                del self._arrays[id(array)]
                self.live_bytes -= array.nbytes


@dataclass(frozen=True)
class MemoryAwareResult:
    """What a run of the loop gives back."""

    params: Params
    """After the last step."""
    state: AdamWState
    """After the last step."""
    losses: tuple[float, ...]
    """Mean loss of each step, under its old parameters."""
    plans: tuple[MemoryPlan, ...]
    """How each step was cut."""
    peak_bytes: int
    """Most that was kept, counted; the largest `peak_bytes` of the plans."""


def memory_aware_train(
    params: Params,
    batches: Sequence[Microbatch],
    budget_bytes: int,
    lr: float,
    weight_decay: float = 0.0,
    activation: str = "relu",
    loss: str = "mean_squared_error",
) -> MemoryAwareResult:
    """Train the MLP with AdamW, one step per batch, and never keep more than a budget.

    Parameters
    ----------
    params : dict of str to ndarray, float32 or float64
        As `mlp.init_mlp` returns it, all of one dtype. Not modified. The loop counts them until
        it has replaced them; whoever keeps them has them beside the budget.
    batches : sequence of (x, y)
        The rows of each step, one or more; cut by the loop. y must be as wide as the last layer
        and of the parameters' dtype. Not modified; rows count while their microbatch runs, as if
        they were loaded for it.
    budget_bytes : int
        Most that the loop may keep at any moment, >= 0.
    lr, weight_decay : float
        As in `optimizers.adamw_step`, with its default betas and eps.
    activation : {"relu", "tanh", "gelu"}
    loss : {"mean_squared_error"}
        Its targets are rows of floats, which is what the byte figures are made for.

    Returns
    -------
    MemoryAwareResult
        Parameters, moments and losses are those of the plain loop, on all rows at once and with
        everything kept, up to rounding. New arrays.

    Raises
    ------
    MemoryBudgetExceeded
        A step does not fit, however it is cut: raised before the first step, saying how many
        bytes are missing.
    ConfigError
        Anything does not fit together.

    Notes
    -----
    Each microbatch contributes its share n/N of the mean. With more than one, gradients are added
    in place to one buffer, layer by layer as backward makes them. The update replaces one tensor
    at a time, so it needs new moments of one tensor only beside the old ones.
    """
    sizes, dtype = _mlp_sizes(params)
    require_choice("loss", loss, {"mean_squared_error": None})
    plans = []
    for batch in batches:  # all are planned before the first runs: no half-done training
        (num_rows,) = count_update_rows([batch])
        for name, rows in (("x", batch[0]), ("y", batch[1])):
            require_float_array(name, rows, 2)
        plans.append(plan_memory_aware_step(num_rows, sizes, budget_bytes, dtype))
    held = HeldBytes(budget_bytes)
    start, losses = adamw_init(params), []
    params, first, second = dict(params), start.first, start.second
    for tensors in (params, first, second):
        held.keep(*tensors.values())
    for step, ((x, y), plan) in enumerate(zip(batches, plans, strict=True)):
        value, gradients = _planned_gradients(params, x, y, plan, activation, loss, held)
        losses.append(value)
        _update_one_by_one(params, first, second, gradients, step, lr, weight_decay, held)
    state = AdamWState(len(plans), first, second)
    return MemoryAwareResult(params, state, tuple(losses), tuple(plans), held.peak_bytes)


def _mlp_sizes(params: Mapping[str, np.ndarray]) -> tuple[list[int], str]:
    layers = mlp_layers(params)
    for weight, bias in layers:
        require_float_array(weight, params[weight], 2)
        require_float_array(bias, params[bias], 1)
    shapes = [params[weight].shape for weight, _ in layers]
    return [shapes[0][0], *(shape[1] for shape in shapes)], params[layers[0][0]].dtype.name


def _planned_gradients(
    params: Params,
    x: np.ndarray,
    y: np.ndarray,
    plan: MemoryPlan,
    activation: str,
    loss: str,
    held: HeldBytes,
) -> tuple[float, Params]:
    """Return mean loss and gradients of all rows; the gradients stay counted in `held`."""
    gradients: Params = {}
    if plan.num_microbatches > 1:
        gradients = {name: np.zeros_like(param) for name, param in params.items()}
        held.keep(*gradients.values())
    value = 0.0
    for x_i, y_i in split_microbatches(x, y, plan.num_microbatches):
        share = len(x_i) / len(x)
        value += share * _microbatch_gradients(
            params, x_i, y_i, share, plan.recompute_every, gradients, activation, loss, held
        )
    return value, gradients


def _microbatch_gradients(
    params: Params,
    x: np.ndarray,
    y: np.ndarray,
    share: float,
    every: int,
    total: Params,
    activation: str,
    loss: str,
    held: HeldBytes,
) -> float:
    """Run one microbatch, add its gradients to `total` in place, return its mean loss.

    What is kept and dropped, and when, is predicted line by line by `_microbatch_changes`.
    """
    layers = mlp_layers(params)
    blocks = tuple(mlp_blocks(len(layers), activation))
    loss_forward, loss_backward = LOSSES[loss]

    def add(gradients: Params) -> None:
        for name, gradient in gradients.items():
            if name in total:
                total[name] += gradient
                held.drop(gradient)
            else:  # the only microbatch: its gradients are the total, and stay
                total[name] = gradient

    held.keep(x, y)
    h, segments = x, []
    for start in range(0, len(blocks), every or 1):
        segments.append(
            _forward_segment(blocks[start : start + (every or 1)], params, h, every, held)
        )
        h = segments[-1].y
    weight, bias = layers[-1]
    prediction = linear_forward(h, params[weight], params[bias])
    held.keep(prediction)
    value = loss_forward(prediction, y)
    dy = loss_backward(prediction, y, share)
    held.keep(dy)
    held.drop(prediction, y)
    del prediction
    dx, dweight, dbias = linear_backward(h, params[weight], dy)
    held.keep(dx, dweight, dbias)
    held.drop(dy)
    add({weight: dweight, bias: dbias})
    del h, dweight, dbias
    dy = dx
    while segments:
        segment = segments.pop()
        saved = segment.saved
        if saved is None:
            saved = recompute_block_activations(segment, params)
            held.keep(*(z for _, z in saved), *(inner for inner, _ in saved[1:]))
        some, output, saved = segment.blocks, segment.y, list(saved)
        # Names are arrays too: what was dropped must end before the next array begins.
        del segment
        for block in reversed(some):
            block_saved = saved.pop()
            dx, gradients = block.backward(params, block_saved, dy, ())
            held.keep(dx, *gradients.values())
            block_input, z = block_saved
            held.drop(dy, z, output)
            add(gradients)
            dy, output = dx, block_input
            del block_saved, block_input, z, gradients, dx
        del output
    held.drop(x, dy)
    return value


def _forward_segment(
    blocks: tuple[Block, ...], params: Params, x: np.ndarray, every: int, held: HeldBytes
) -> Segment:
    """Run some blocks; with recompute, drop all but the output."""
    saved = []
    h = x
    for block in blocks:
        h, block_saved = block.forward(params, h, ())
        held.keep(block_saved[1], h)
        saved.append(block_saved)
    if every:
        held.drop(*(z for _, z in saved), *(inner for inner, _ in saved[1:]))
    return Segment(blocks, ((),) * len(blocks), x, h, None if every else tuple(saved))


def _update_one_by_one(
    params: Params,
    first: Params,
    second: Params,
    gradients: Params,
    step: int,
    lr: float,
    weight_decay: float,
    held: HeldBytes,
) -> None:
    """Make one AdamW step, replacing the entries of the dicts; `gradients` ends up empty.

    `step` counts the updates before this one: every tensor is updated from the same count.
    """
    for name in params:
        old = params[name], first[name], second[name], gradients.pop(name)
        new_params, new = adamw_step(
            {name: old[0]},
            {name: old[3]},
            AdamWState(step, {name: old[1]}, {name: old[2]}),
            lr,
            weight_decay=weight_decay,
        )
        params[name], first[name], second[name] = (
            new_params[name],
            new.first[name],
            new.second[name],
        )
        held.keep(params[name], first[name], second[name])
        held.drop(*old)
