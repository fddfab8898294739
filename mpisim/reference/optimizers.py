"""Update rules and gradient clipping as pure functions over name -> array dicts (A1, A2, A5).

Nothing is updated in place: every function returns new arrays and leaves its arguments alone.
State is keyed by parameter name, never by position. Learning-rate schedules and loss scaling do
not live here. Called with the gradients of `mlp`, `accumulation` or `data_parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mpisim.errors import ConfigError
from mpisim.reference.checks import require_float_array, require_number, require_same_tensors
from mpisim.reference.mlp import Params


def zeros_like_params(params: Params) -> Params:
    """Return zeros named and shaped like `params`: the state before the first step.

    Parameters
    ----------
    params : dict of str to ndarray
        Not modified.

    Returns
    -------
    dict of str to ndarray
        New arrays of the same names, shapes and dtypes.
    """
    return {name: np.zeros_like(param) for name, param in params.items()}


def sgd_step(params: Params, gradients: Params, lr: float) -> Params:
    """Return ``w - lr * g`` for every parameter.

    Parameters
    ----------
    params : dict of str to ndarray, float32 or float64
        Not modified.
    gradients : dict of str to ndarray
        Same names, shapes and dtypes. Not modified.
    lr : float
        Learning rate, finite, >= 0.

    Returns
    -------
    dict of str to ndarray
        New arrays, in the order of `params`.

    Raises
    ------
    ConfigError
        Names, shapes or dtypes differ, or `lr` is out of range.
    """
    _require_update(params, gradients)
    lr = require_number("lr", lr, 0.0)
    return {name: param - lr * gradients[name] for name, param in params.items()}


def sgd_momentum_step(
    params: Params,
    gradients: Params,
    velocity: Params,
    lr: float,
    momentum: float,
    weight_decay: float = 0.0,
) -> tuple[Params, Params]:
    """Make one SGD step with (heavy-ball) momentum: ``v = momentum * v + g; w = w - lr * v``.

    Parameters
    ----------
    params : dict of str to ndarray, float32 or float64
        Not modified.
    gradients : dict of str to ndarray
        Same names, shapes and dtypes. Not modified.
    velocity : dict of str to ndarray
        v of the last step, `zeros_like_params` before the first. Same names, shapes and dtypes.
        Not modified.
    lr : float
        Learning rate, finite, >= 0.
    momentum : float
        In [0, 1); 0 is plain SGD.
    weight_decay : float, default 0.0
        Finite, >= 0. Adds ``weight_decay * w`` to the gradient (an L2 term, so it enters v) of
        tensors with two or more dims; biases and gains are not decayed.

    Returns
    -------
    params, velocity : dict of str to ndarray
        New arrays, in the order of `params`.

    Raises
    ------
    ConfigError
        Names, shapes or dtypes differ, or a number is out of range.

    Notes
    -----
    No damping and no Nesterov look-ahead: the first step moves by exactly ``lr * g``.
    """
    _require_update(params, gradients)
    require_same_tensors("velocity", velocity, params)
    lr = require_number("lr", lr, 0.0)
    momentum = require_number("momentum", momentum, 0.0, 1.0)
    weight_decay = require_number("weight_decay", weight_decay, 0.0)
    new_params, new_velocity = {}, {}
    for name, param in params.items():
        gradient = gradients[name]
        if param.ndim >= 2 and weight_decay:
            gradient = gradient + weight_decay * param
        new_velocity[name] = momentum * velocity[name] + gradient
        new_params[name] = param - lr * new_velocity[name]
    return new_params, new_velocity


@dataclass(frozen=True)
class AdamWState:
    """What AdamW remembers between steps."""

    step: int
    """Updates made so far; one number for all parameters."""
    first: Params
    """Running mean of gradients (m), by parameter name."""
    second: Params
    """Running mean of squared gradients (v), by parameter name."""


def adamw_init(params: Params) -> AdamWState:
    """Return AdamW's state before its first step: step 0, zero moments.

    Parameters
    ----------
    params : dict of str to ndarray
        Not modified.

    Returns
    -------
    AdamWState
        Owns new arrays of the same names, shapes and dtypes.
    """
    return AdamWState(step=0, first=zeros_like_params(params), second=zeros_like_params(params))


def adamw_step(
    params: Params,
    gradients: Params,
    state: AdamWState,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Params, AdamWState]:
    """Make one AdamW step with bias correction and decoupled weight decay.

    Parameters
    ----------
    params : dict of str to ndarray, float32 or float64
        Not modified.
    gradients : dict of str to ndarray
        Same names, shapes and dtypes. Not modified.
    state : AdamWState
        From `adamw_init` or the last step. Not modified.
    lr : float
        Learning rate, finite, >= 0.
    beta1, beta2 : float
        Decay of the first and second moment, in [0, 1).
    eps : float
        Added to the square root, finite, >= 0. With 0, every element must have had a non-zero
        gradient, else its update is 0/0.
    weight_decay : float, default 0.0
        Finite, >= 0. Shrinks tensors with two or more dims by ``lr * weight_decay * w``, apart
        from the gradient and its moments.

    Returns
    -------
    params : dict of str to ndarray
        New arrays, in the order of `params`.
    state : AdamWState
        With `step` one higher and new moments.

    Raises
    ------
    ConfigError
        Names, shapes or dtypes differ, a number is out of range, or an update is 0/0.

    Notes
    -----
    Loshchilov and Hutter (2019), algorithm 2. With t the new step:
    m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    w = w - lr wd w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).
    One t serves all parameters, so every parameter must bring a gradient to every step: zeros if
    it was not used. Its moments then decay like all others.

    Examples
    --------
    >>> params = {"w": np.array([1.0])}
    >>> state = adamw_init(params)
    >>> params, state = adamw_step(params, {"w": np.array([1.0])}, state, lr=0.1, eps=0.0)
    >>> round(float(params["w"][0]), 12), state.step
    (0.9, 1)
    """
    _require_update(params, gradients)
    require_same_tensors("state.first", state.first, params)
    require_same_tensors("state.second", state.second, params)
    lr = require_number("lr", lr, 0.0)
    beta1 = require_number("beta1", beta1, 0.0, 1.0)
    beta2 = require_number("beta2", beta2, 0.0, 1.0)
    eps = require_number("eps", eps, 0.0)
    weight_decay = require_number("weight_decay", weight_decay, 0.0)
    step = state.step + 1
    new_params, first, second = {}, {}, {}
    for name, param in params.items():
        gradient = gradients[name]
        first[name] = beta1 * state.first[name] + (1 - beta1) * gradient
        second[name] = beta2 * state.second[name] + (1 - beta2) * np.square(gradient)
        mean = first[name] / (1 - beta1**step)
        denominator = np.sqrt(second[name] / (1 - beta2**step)) + eps
        if not denominator.all():
            raise ConfigError(
                f"eps must be > 0 while an element has only seen zero gradients; got eps = {eps:g} "
                f"and a zero second moment in {name!r}. Use an eps such as 1e-8."
            )
        decay = lr * weight_decay if param.ndim >= 2 else 0.0
        new_params[name] = param - decay * param - lr * (mean / denominator)
    return new_params, AdamWState(step=step, first=first, second=second)


def global_norm(gradients: Mapping[str, np.ndarray]) -> float:
    """Return the Euclidean norm of all gradients taken as one vector.

    Parameters
    ----------
    gradients : mapping of str to ndarray, float32 or float64
        One entry per parameter: a tied or replicated parameter appears once. May be empty, and so
        may its arrays. Not modified.

    Returns
    -------
    float
        ``sqrt(sum of squares)``, 0.0 without elements. Squares are formed and added in float64,
        so float32 gradients of any finite size have a finite norm; float64 gradients beyond about
        1e154 give inf. An inf or NaN in any gradient shows in the norm.

    Raises
    ------
    ConfigError
        A gradient is no float32 or float64 array.

    Examples
    --------
    >>> global_norm({"a": np.array([3.0]), "b": np.array([[4.0]])})
    5.0
    """
    total = 0.0
    for name, gradient in gradients.items():
        require_float_array(f"gradients[{name!r}]", gradient)
        with np.errstate(over="ignore"):  # an overflow is reported as a norm of inf
            total += float(np.sum(np.square(gradient, dtype=np.float64)))
    return math.sqrt(total)


def clip_by_global_norm(
    gradients: Mapping[str, np.ndarray], max_norm: float
) -> tuple[Params, float]:
    """Shrink all gradients by one factor so that their global norm is at most `max_norm`.

    Parameters
    ----------
    gradients : mapping of str to ndarray, float32 or float64
        True gradients: with a loss scale in use, divided by it before. Not modified.
    max_norm : float
        Largest norm allowed, finite, > 0.

    Returns
    -------
    gradients : dict of str to ndarray
        New arrays: ``g * (max_norm / norm)`` when the norm exceeds `max_norm`, else copies. The
        direction never changes.
    norm : float
        The global norm before clipping.

    Raises
    ------
    ConfigError
        The norm is inf or NaN: a factor of 1/inf would turn inf into NaN and everything else into
        zeros, so the caller must skip the step. Or `max_norm` is out of range.

    Examples
    --------
    >>> clipped, norm = clip_by_global_norm({"w": np.array([3.0, 4.0])}, max_norm=2.5)
    >>> clipped["w"].tolist(), norm
    ([1.5, 2.0], 5.0)
    """
    max_norm = require_number("max_norm", max_norm, 0.0, low_open=True)
    norm = global_norm(gradients)
    if not math.isfinite(norm):
        raise ConfigError(
            f"gradients must have a finite global norm to be clipped; got {norm}. "
            f"Skip this step on every rank and keep the weights."
        )
    if norm <= max_norm:
        return {name: gradient.copy() for name, gradient in gradients.items()}, norm
    # Multiplied in float64 and rounded once: beside huge gradients the factor is too small for
    # float32.
    factor = max_norm / norm
    clipped = {
        name: np.multiply(gradient, factor, dtype=np.float64).astype(gradient.dtype)
        for name, gradient in gradients.items()
    }
    return clipped, norm


def _require_update(params: Params, gradients: Params) -> None:
    for name, param in params.items():
        require_float_array(f"params[{name!r}]", param)
    require_same_tensors("gradients", gradients, params)
