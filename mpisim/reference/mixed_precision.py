"""Mixed precision: 16-bit values, float32 master weights, and a loss scale (A4).

Values (working weights, activations and their gradients) are stored in float16 or bfloat16; every
product is formed and added up in float32 and rounded once, as accelerators do it. Masters,
parameter gradients and optimizer moments stay float32. float16 has few exponents, so backward
starts from S times the loss and the gradients are divided by S before anything else sees them;
when S was too large the step is skipped as a whole and S is lowered. The model is the MLP of
`mlp`, the update rule AdamW of `optimizers`. Nothing is updated in place.

Overflow to inf and the NaN that follows from it are expected here: they are no warnings, they are
what `has_non_finite_gradients` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from mpisim.errors import ConfigError, LossScaleError
from mpisim.reference.accumulation import Microbatch, accumulate_gradients, count_update_rows
from mpisim.reference.checks import (
    describe,
    require_choice,
    require_dtype,
    require_float_array,
    require_int,
    require_number,
    require_same_tensors,
    require_saved,
    require_shape,
)
from mpisim.reference.mlp import ACTIVATIONS, LOSSES, Params, mlp_layers
from mpisim.reference.optimizers import (
    AdamWState,
    adamw_init,
    adamw_step,
    clip_by_global_norm,
    global_norm,
)

HALF_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""Name -> storage dtype. float16 has 11 significant bits and reaches from 6e-8 to 65504; bfloat16
has 8 and the range of float32."""

LARGEST_SCALE = float(np.finfo(np.float32).max)
"""A loss scale beyond this would be inf in float32."""


# --- storage ---------------------------------------------------------------------------------


def round_to_half(x: np.ndarray, dtype: str) -> np.ndarray:
    """Store float32 values in 16 bits.

    Parameters
    ----------
    x : ndarray of any shape, float32
        Not modified.
    dtype : {"float16", "bfloat16"}
        How to store.

    Returns
    -------
    ndarray of x's shape and the storage dtype
        Rounded to the nearest value, ties to even; beyond the largest value inf, below half the
        smallest one 0; NaN stays NaN. A new array.

    Raises
    ------
    ConfigError
        `x` is not float32 (float64 would be rounded twice), or the dtype is unknown.

    Examples
    --------
    >>> x = np.array([1.0009766, 70000.0, 1e-8], np.float32)
    >>> round_to_half(x, "float16").tolist()
    [1.0009765625, inf, 0.0]
    >>> round_to_half(x, "bfloat16").astype(np.float32).tolist()[:2]
    [1.0, 70144.0]
    """
    require_choice("dtype", dtype, HALF_DTYPES)
    _require_float32("x", x)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(HALF_DTYPES[dtype])


def widen(x: np.ndarray) -> np.ndarray:
    """Return 16-bit values as float32, exactly.

    Parameters
    ----------
    x : ndarray of any shape, float16 or bfloat16
        Not modified.

    Returns
    -------
    ndarray of x's shape, float32
        A new array; `round_to_half` of it gives `x` back.

    Raises
    ------
    ConfigError
        `x` is not a 16-bit float array.
    """
    _require_half("x", x)
    return x.astype(np.float32)


def half_params(masters: Params, dtype: str) -> Params:
    """Return the working weights of a step: the masters, rounded once.

    Parameters
    ----------
    masters : dict of str to ndarray, float32
        Not modified.
    dtype : {"float16", "bfloat16"}

    Returns
    -------
    dict of str to ndarray
        New arrays of the storage dtype. They are made anew from the masters for every step and
        never updated: an update smaller than half a unit in their last place would vanish.

    Raises
    ------
    ConfigError
        A master is not float32, or the dtype is unknown.
    """
    return {name: round_to_half(master, dtype) for name, master in masters.items()}


# --- forward and backward --------------------------------------------------------------------


def half_linear_forward(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return ``x @ weight + bias``, added up in float32 and rounded once.

    Parameters
    ----------
    x : ndarray of shape (R, I), float16 or bfloat16
        Not modified.
    weight : ndarray of shape (I, O), same dtype
        Not modified.
    bias : ndarray of shape (O,), same dtype
        Not modified.

    Returns
    -------
    ndarray of shape (R, O), same dtype
        A new array.

    Raises
    ------
    ConfigError
        Shapes do not fit together, or dtypes differ.

    Examples
    --------
    4096 ones: a sum kept in float16 stops growing at 2048, since 2049 is no float16.

    >>> ones = np.ones((1, 4096), np.float16)
    >>> half_linear_forward(ones, ones.T.copy(), np.zeros(1, np.float16)).tolist()
    [[4096.0]]
    """
    _require_half("x", x, 2)
    _require_half("weight", weight, 2, x.dtype)
    _require_half("bias", bias, 1, x.dtype)
    require_shape("x", x, (x.shape[0], weight.shape[0]))
    require_shape("bias", bias, (weight.shape[1],))
    with np.errstate(over="ignore", invalid="ignore"):
        return (widen(x) @ widen(weight) + widen(bias)).astype(x.dtype)


def half_linear_backward(
    x: np.ndarray, weight: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of `half_linear_forward`: 16 bits to the left, float32 to the weights.

    Parameters
    ----------
    x : ndarray of shape (R, I), float16 or bfloat16
        The input that forward saw. Not modified.
    weight : ndarray of shape (I, O), same dtype
        The working weight that forward used. Not modified.
    dy : ndarray of shape (R, O), same dtype
        Gradient in the output. Not modified.

    Returns
    -------
    dx : ndarray of shape (R, I), the 16-bit dtype
        ``dy @ weight.T``, rounded once.
    dweight : ndarray of shape (I, O), float32
        ``x.T @ dy``, not rounded: it is about to be added to those of other microbatches.
    dbias : ndarray of shape (O,), float32
        Sum of the rows of dy.

    Raises
    ------
    ConfigError
        Shapes do not fit together, or dtypes differ.
    """
    _require_half("x", x, 2)
    _require_half("weight", weight, 2, x.dtype)
    _require_half("dy", dy, 2, x.dtype)
    require_shape("weight", weight, (x.shape[1], dy.shape[1]))
    require_shape("dy", dy, (x.shape[0], dy.shape[1]))
    wide_dy = widen(dy)
    with np.errstate(over="ignore", invalid="ignore"):
        dx = (wide_dy @ widen(weight).T).astype(x.dtype)
        return dx, widen(x).T @ wide_dy, wide_dy.sum(axis=0)


def half_mlp_forward(
    params: Params, x: np.ndarray, activation: str = "relu"
) -> tuple[np.ndarray, tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]]:
    """Run the MLP of `mlp.mlp_forward` on 16-bit values.

    Parameters
    ----------
    params : dict of str to ndarray, float16 or bfloat16
        Working weights, from `half_params`. Not modified.
    x : ndarray of shape (R, I), same dtype
        R >= 0. Not modified.
    activation : {"relu", "tanh", "gelu"}
        Computed in float32 and rounded once.

    Returns
    -------
    prediction : ndarray of shape (R, O), same dtype
    saved : tuple (inputs, preactivations)
        As in `mlp.mlp_forward`, all in 16 bits: half the bytes of float32. ``inputs[0] is x``.

    Raises
    ------
    ConfigError
        Names, shapes or dtypes do not fit together, or the activation is unknown.
    """
    layers = mlp_layers(params)
    require_choice("activation", activation, ACTIVATIONS)
    activation_forward, _ = ACTIVATIONS[activation]
    inputs, preactivations = [], []
    h = x
    for weight, bias in layers:
        inputs.append(h)
        h = half_linear_forward(h, params[weight], params[bias])
        if (weight, bias) != layers[-1]:
            preactivations.append(h)
            with np.errstate(over="ignore", invalid="ignore"):
                h = activation_forward(widen(h)).astype(h.dtype)
    return h, (tuple(inputs), tuple(preactivations))


def half_mlp_backward(
    params: Params,
    saved: tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]],
    dprediction: np.ndarray,
    activation: str = "relu",
) -> Params:
    """Return the gradient in every parameter, in float32.

    Parameters
    ----------
    params : dict of str to ndarray, float16 or bfloat16
        The working weights that forward used. Not modified.
    saved : tuple
        Second result of `half_mlp_forward`. Not modified.
    dprediction : ndarray of shape (R, O), same dtype
        Gradient of the scaled loss in the prediction. Not modified.
    activation : {"relu", "tanh", "gelu"}
        The same as in forward.

    Returns
    -------
    dict of str to ndarray, float32
        Names and shapes of `params`, still scaled by whatever `dprediction` is scaled by.

    Raises
    ------
    ConfigError
        `saved` is of another depth, shapes or dtypes do not fit, or the activation is unknown.
    """
    layers = mlp_layers(params)
    require_choice("activation", activation, ACTIVATIONS)
    _, activation_backward = ACTIVATIONS[activation]
    inputs, preactivations = saved
    require_saved(inputs, preactivations, len(layers), "half_mlp_forward")
    gradients = {}
    dz = dprediction
    for index in reversed(range(len(layers))):
        weight, bias = layers[index]
        dh, gradients[weight], gradients[bias] = half_linear_backward(
            inputs[index], params[weight], dz
        )
        if index > 0:  # the rows of data need no gradient
            with np.errstate(over="ignore", invalid="ignore"):
                dz = activation_backward(widen(preactivations[index - 1]), widen(dh))
                dz = dz.astype(dh.dtype)
    return gradients


def half_loss_and_gradients(
    params: Params,
    x: np.ndarray,
    y: np.ndarray,
    activation: str = "relu",
    loss: str = "mean_squared_error",
    seed: float = 1.0,
) -> tuple[float, Params]:
    """Run forward, loss and backward on one batch in 16 bits.

    Parameters
    ----------
    params : dict of str to ndarray, float16 or bfloat16
        Working weights, from `half_params`. Not modified.
    x : ndarray of shape (R, I), float32
        R >= 1. Rounded to the dtype of the weights first. Not modified.
    y : ndarray
        Targets as in `mlp.mlp_loss_and_gradients`, float32 if they are floats: the loss is
        computed in float32 from the widened prediction. Not modified.
    activation, loss : str
        As in `mlp.mlp_loss_and_gradients`.
    seed : float, default 1.0
        Finite, >= 0. S * n/N for a microbatch of n of an update's N rows under loss scale S; see
        `scale_loss`.

    Returns
    -------
    loss : float
        The mean loss of these rows, without the seed.
    gradients : dict of str to ndarray, float32
        Gradients of ``seed * loss``. The gradient in the prediction is rounded to 16 bits before
        it goes back: this is where too small a seed turns it into 0 and too large a one into inf.

    Raises
    ------
    ConfigError
        Anything does not fit together, or there is no row.
    """
    require_choice("loss", loss, LOSSES)
    loss_forward, loss_backward = LOSSES[loss]
    dtype = params[mlp_layers(params)[0][0]].dtype.name
    prediction, saved = half_mlp_forward(params, round_to_half(x, dtype), activation)
    wide = widen(prediction)
    with np.errstate(over="ignore", invalid="ignore"):
        value = loss_forward(wide, y)
        dwide = loss_backward(wide, y, seed)
    return value, half_mlp_backward(params, saved, round_to_half(dwide, dtype), activation)


# --- loss scale ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossScale:
    """The loss scale and what its next change depends on; all of it belongs in a checkpoint."""

    scale: float = 65536.0
    """S: backward starts from S times the loss. At least `min_scale`, finite in float32."""
    good_steps: int = 0
    """Committed steps since the last change of the scale or the last skip, >= 0."""
    growth_interval: int = 2000
    """Committed steps in a row after which the scale grows, >= 1."""
    growth_factor: float = 2.0
    """> 1."""
    backoff_factor: float = 0.5
    """What a skipped step multiplies the scale by, in (0, 1)."""
    min_scale: float = 1.0
    """The floor, > 0: a skip that would go below it is an error."""

    def __post_init__(self):
        require_number("scale", self.scale, 0.0, low_open=True)
        require_int("good_steps", self.good_steps, 0)
        require_int("growth_interval", self.growth_interval, 1)
        require_number("growth_factor", self.growth_factor, 1.0, low_open=True)
        require_number("backoff_factor", self.backoff_factor, 0.0, 1.0, low_open=True)
        require_number("min_scale", self.min_scale, 0.0, low_open=True)
        if not self.min_scale <= self.scale <= LARGEST_SCALE:
            raise ConfigError(
                f"scale must be between min_scale and the largest float32; got {self.scale!r} "
                f"with min_scale {self.min_scale!r}. Start at a power of two such as 65536."
            )


def update_loss_scale(state: LossScale, skipped: bool) -> LossScale:
    """Make the one decision about the scale that follows every step.

    Parameters
    ----------
    state : LossScale
        Not modified.
    skipped : bool
        True if the step was skipped because a gradient, on any rank, was not finite.

    Returns
    -------
    LossScale
        After a skip: the scale times `backoff_factor`, and counting starts again. After the
        `growth_interval`-th committed step in a row: the scale times `growth_factor`, unless
        that would be inf in float32, and counting starts again. Else one good step more.

    Raises
    ------
    LossScaleError
        A skip would take the scale below `min_scale`: no scale is small enough, so the fault is
        elsewhere and going on would skip for ever.

    Examples
    --------
    >>> state = LossScale(scale=1024.0, growth_interval=2)
    >>> for skipped in (False, True, False, False):
    ...     state = update_loss_scale(state, skipped)
    ...     print(state.scale, state.good_steps)
    1024.0 1
    512.0 0
    512.0 1
    1024.0 0
    """
    if skipped:
        lower = state.scale * state.backoff_factor
        if lower < state.min_scale:
            raise LossScaleError(
                f"the loss scale must stay at or above min_scale = {state.min_scale:g}; got a "
                f"non-finite gradient at scale {state.scale:g}. Look for NaN in the data, lower "
                f"the learning rate, or use bfloat16."
            )
        return replace(state, scale=lower, good_steps=0)
    if state.good_steps + 1 < state.growth_interval:
        return replace(state, good_steps=state.good_steps + 1)
    higher = state.scale * state.growth_factor
    return replace(state, scale=higher if higher <= LARGEST_SCALE else state.scale, good_steps=0)


def scale_loss(loss: float, scale: float) -> float:
    """Return ``loss * scale``; by the chain rule, every gradient is multiplied by the same scale.

    Parameters
    ----------
    loss : float
        A loss, or the share n/N with which a microbatch's mean loss enters that of the update: the
        result is then the seed of its backward pass. Finite, >= 0.
    scale : float
        S, finite, > 0; the same for all microbatches of an update.

    Returns
    -------
    float

    Raises
    ------
    ConfigError
        A number is out of range.

    Examples
    --------
    >>> scale_loss(6 / 9, 128.0), scale_loss(3 / 9, 128.0)
    (85.33333333333333, 42.666666666666664)
    """
    loss = require_number("loss", loss, 0.0)
    return loss * require_number("scale", scale, 0.0, low_open=True)


def unscale_gradients(gradients: Mapping[str, np.ndarray], scale: float) -> Params:
    """Return the gradients of the loss itself: those of the scaled loss divided by the scale.

    Parameters
    ----------
    gradients : mapping of str to ndarray, float16, bfloat16, float32 or float64
        Gradients of ``scale * loss``, summed over all microbatches and ranks. Not modified.
    scale : float
        S, finite, > 0.

    Returns
    -------
    dict of str to ndarray
        New arrays; 16-bit gradients become float32 before they are divided, because many of them
        would be 0 in 16 bits. inf and NaN stay what they are.

    Raises
    ------
    ConfigError
        A gradient is no float array, or the scale is out of range.

    Notes
    -----
    Exact for a power of two, short of float32's smallest numbers. Clip after this, never before:
    the norm of scaled gradients means nothing.

    Examples
    --------
    >>> unscale_gradients({"w": np.array([3072.0, 4096.0], np.float32)}, 1024.0)["w"].tolist()
    [3.0, 4.0]
    """
    scale = require_number("scale", scale, 0.0, low_open=True)
    true = {}
    for name, gradient in gradients.items():
        wide = _as_wide(f"gradients[{name!r}]", gradient)
        with np.errstate(over="ignore"):  # a scale below 1 makes gradients larger
            # Divided in float64 and rounded once: the scale need not be a float32 itself.
            true[name] = np.divide(wide, scale, dtype=np.float64).astype(wide.dtype)
    return true


def has_non_finite_gradients(gradients: Mapping[str, np.ndarray]) -> bool:
    """Return whether any gradient holds inf or NaN.

    Parameters
    ----------
    gradients : mapping of str to ndarray, float16, bfloat16, float32 or float64
        May be empty, and so may its arrays: a rank that owns nothing has nothing wrong. Not
        modified.

    Returns
    -------
    bool
        On several ranks or shards the flags are joined by "or" before any of them decides:
        either all skip or none does.

    Raises
    ------
    ConfigError
        A gradient is no float array.

    Examples
    --------
    >>> has_non_finite_gradients({"w": np.array([1.0, np.inf])}), has_non_finite_gradients({})
    (True, False)
    """
    return any(
        not np.isfinite(_as_wide(f"gradients[{name!r}]", gradient)).all()
        for name, gradient in gradients.items()
    )


# --- the step --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixedPrecisionState:
    """All that a training run in mixed precision remembers between steps."""

    masters: Params
    """float32 weights, by parameter name."""
    optimizer: AdamWState
    """Moments; its `step` counts committed updates, and the learning rate follows that count."""
    loss_scale: LossScale | None
    """None: no scale (bfloat16), so a step that is not finite cannot be skipped: it is an error."""
    skipped: int = 0
    """Steps that were skipped, >= 0."""


@dataclass(frozen=True)
class StepReport:
    """What happened in one step."""

    committed: bool
    """False: the step was skipped and nothing but the loss scale changed."""
    learning_rate: float
    """Rate of this step; a skipped step leaves it to the next."""
    scale: float
    """S of this step, 1.0 without one."""
    grad_norm: float
    """Global norm of the true gradients before clipping; inf or NaN if skipped."""
    loss: float | None = None
    """Mean loss of the update's rows under the old weights; None if only gradients were given."""


def init_mixed_precision(
    params: Params, loss_scale: LossScale | None = None
) -> MixedPrecisionState:
    """Return the state before the first step.

    Parameters
    ----------
    params : dict of str to ndarray, float32
        Copied. Not modified.
    loss_scale : LossScale, optional
        None: no scale.

    Returns
    -------
    MixedPrecisionState
        Owns new arrays.

    Raises
    ------
    ConfigError
        A parameter is not float32.
    """
    for name, param in params.items():
        _require_float32(f"params[{name!r}]", param)
    masters = {name: param.copy() for name, param in params.items()}
    return MixedPrecisionState(masters, adamw_init(masters), loss_scale)


def apply_scaled_gradients(
    state: MixedPrecisionState,
    scaled_gradients: Params,
    learning_rate: Callable[[int], float],
    max_norm: float | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[MixedPrecisionState, StepReport]:
    """Unscale, look for inf and NaN, then clip and update the masters, or skip as a whole.

    Parameters
    ----------
    state : MixedPrecisionState
        Not modified.
    scaled_gradients : dict of str to ndarray, float32
        Gradients of S times the update's mean loss, names and shapes of the masters. Not
        modified.
    learning_rate : callable, int -> float
        Rate of the t-th committed update, t >= 1.
    max_norm : float, optional
        Largest global norm of the true gradients, > 0. None: no clipping.
    beta1, beta2, eps, weight_decay : float
        As in `optimizers.adamw_step`.

    Returns
    -------
    state : MixedPrecisionState
        Committed: new masters and moments. Skipped: the very arrays of the old state, one skip
        more. In both cases the loss scale has made its one decision.
    report : StepReport
        Without a loss.

    Raises
    ------
    ConfigError
        Names, shapes, dtypes or numbers do not fit.
    LossScaleError
        Gradients are not finite and the scale is at its floor, or there is none: trying again
        could not help. The old state is still whole.
    """
    for name, gradient in scaled_gradients.items():
        _require_float32(f"scaled_gradients[{name!r}]", gradient)
    require_same_tensors("scaled_gradients", scaled_gradients, state.masters)
    scale = 1.0 if state.loss_scale is None else state.loss_scale.scale
    rate = require_number("learning_rate", learning_rate(state.optimizer.step + 1), 0.0)
    true = unscale_gradients(scaled_gradients, scale)
    norm = global_norm(true)
    skip = has_non_finite_gradients(true)
    loss_scale = state.loss_scale
    if loss_scale is not None:
        loss_scale = update_loss_scale(loss_scale, skip)
    elif skip:
        raise LossScaleError(
            f"gradients must be finite without a loss scale; got a global norm of {norm}. Look for "
            f"NaN in the data, lower the learning rate, or start with a LossScale."
        )
    report = StepReport(committed=not skip, learning_rate=rate, scale=scale, grad_norm=norm)
    if skip:
        return replace(state, loss_scale=loss_scale, skipped=state.skipped + 1), report
    if max_norm is not None:
        true, _ = clip_by_global_norm(true, max_norm)
    masters, optimizer = adamw_step(
        state.masters, true, state.optimizer, rate, beta1, beta2, eps, weight_decay
    )
    return replace(state, masters=masters, optimizer=optimizer, loss_scale=loss_scale), report


def mixed_precision_train_step(
    state: MixedPrecisionState,
    microbatches: Sequence[Microbatch],
    dtype: str,
    learning_rate: Callable[[int], float],
    max_norm: float | None = None,
    weight_decay: float = 0.0,
    activation: str = "relu",
    loss: str = "mean_squared_error",
) -> tuple[MixedPrecisionState, StepReport]:
    """Make one update of an MLP from all microbatches in 16 bits, or skip it as a whole.

    Parameters
    ----------
    state : MixedPrecisionState
        Not modified.
    microbatches : sequence of (x_i, y_i)
        Any cut of the update's N >= 1 rows, n_i >= 0 each, as in `half_loss_and_gradients`. Not
        modified.
    dtype : {"float16", "bfloat16"}
        How values are stored.
    learning_rate, max_norm, weight_decay
        As in `apply_scaled_gradients`.
    activation, loss : str
        As in `mlp.mlp_loss_and_gradients`.

    Returns
    -------
    state : MixedPrecisionState
        As in `apply_scaled_gradients`. inf or NaN in one microbatch skips all of them.
    report : StepReport
        Its loss is the mean over the N rows; of a skipped step it may be inf or NaN.

    Raises
    ------
    ConfigError
        There is no row at all, or anything does not fit together.
    LossScaleError
        As in `apply_scaled_gradients`.

    Notes
    -----
    Working weights are rounded from the masters once and S is fixed for the whole update;
    microbatch i goes back from the seed S * n_i/N.
    """
    rows = count_update_rows(microbatches)
    total_rows = sum(rows)
    working = half_params(state.masters, dtype)
    scale = 1.0 if state.loss_scale is None else state.loss_scale.scale
    mean_loss = 0.0
    total: Params = {}
    for num_rows, (x, y) in zip(rows, microbatches, strict=True):
        if num_rows == 0:
            continue
        share = num_rows / total_rows
        value, gradients = half_loss_and_gradients(
            working, x, y, activation, loss, seed=scale_loss(share, scale)
        )
        mean_loss += share * value
        with np.errstate(over="ignore", invalid="ignore"):
            total = accumulate_gradients(total, gradients)
    new_state, report = apply_scaled_gradients(
        state, total, learning_rate, max_norm, weight_decay=weight_decay
    )
    return new_state, replace(report, loss=mean_loss)


# --- checks ----------------------------------------------------------------------------------


def _require_float32(name: str, array: np.ndarray) -> None:
    require_dtype(name, array, "float32", "Mixed precision keeps 16-bit and float32 values only")


def _require_half(
    name: str, array: np.ndarray, ndim: int | None = None, dtype: np.dtype | None = None
) -> None:
    """Raise unless `array` is a 16-bit float array of `ndim` dims and of `dtype`, if given."""
    right = isinstance(array, np.ndarray) and array.dtype.name in HALF_DTYPES and array.ndim > 0
    if right and ndim is not None:
        right = array.ndim == ndim
    if right and dtype is not None:
        right = array.dtype == dtype
    if not right:
        wanted = "float16 or bfloat16" if dtype is None else dtype.name
        raise ConfigError(
            f"{name} must be a {wanted} ndarray of {ndim or '1 or more'} dims; got "
            f"{describe(array)}. Store it with round_to_half in the dtype of the working weights."
        )


def _as_wide(name: str, gradient: np.ndarray) -> np.ndarray:
    """Return 16-bit gradients as float32, wider ones as they are."""
    if isinstance(gradient, np.ndarray) and gradient.dtype.name in HALF_DTYPES:
        return gradient.astype(np.float32)
    require_float_array(name, gradient)
    return gradient
