"""Update rules as functions that change flat arrays in place, and what goes with them.

Called by the engine per parameter or per flat range: every rule is element-wise, so a range of a
flat buffer gives the same bits as the whole. Which step is committed, and the sum of norms over
ranks, are the engine's business.
"""

from __future__ import annotations

import math

import numpy as np

from mpisim.errors import MpisimError
from mpisim.nn.kernels import Kernels, load_kernels
from mpisim.nn.numerics import TILE_ELEMENTS, flat_view, squared_norm, tile_slices

__all__ = [
    "adamw_update",
    "clip_coefficient",
    "decay_applies",
    "learning_rate",
    "sgd_update",
    "squared_norm",
]


def decay_applies(shape: tuple[int, ...]) -> bool:
    """Return whether weight decay acts on a parameter: on two or more dims, so not on biases."""
    return len(shape) >= 2


def sgd_update(
    param: np.ndarray,
    grad: np.ndarray,
    velocity: np.ndarray | None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    scratch: np.ndarray | None = None,
) -> None:
    """Take one step of gradient descent with momentum, in place.

    Parameters
    ----------
    param : ndarray, float32 or float64, C-contiguous
        Updated in place.
    grad : ndarray, same size and dtype
        Gradient of the mean loss times anything that `grad_scale` takes away. Not modified.
    velocity : ndarray, same size and dtype, or None
        Updated in place; zeros before the first step. None only without momentum.
    lr : float
        Learning rate of this step.
    momentum : float
        Share of the velocity that stays; 0 means off.
    weight_decay : float
        L2 term added to the gradient; 0 means off.
    grad_scale : float, default 1
        Factor applied to the gradient first: clipping, and the inverse of the loss scale.
    scratch : ndarray of shape (s,), same dtype, optional
        Working space of any length >= 1, used up to one tile (16384 elements); without it that
        much is allocated. With it one element is allocated at a time, for scalar operands.

    Raises
    ------
    ValueError
        Sizes or dtypes differ, an array is not C-contiguous, or velocity is None with momentum.

    Notes
    -----
    ``v = momentum * v + (grad + weight_decay * param)``, then ``param -= lr * v``. There is no
    dampening; without momentum v is the gradient itself.
    """
    arrays = (param, grad) if velocity is None else (param, grad, velocity)
    if velocity is None and momentum:
        raise ValueError(
            f"velocity must be an array when momentum is not 0; got None with momentum "
            f"{momentum}. Allocate zeros like the parameter."
        )
    flats, scratch = _checked(arrays, scratch)
    if not param.size:
        return
    real = param.dtype.type
    decays, scaled = float(weight_decay) != 0.0, float(grad_scale) != 1.0
    decay = real(float(weight_decay) / float(grad_scale))
    lr, momentum, grad_scale = real(lr), real(momentum), real(grad_scale)
    for tile in tile_slices(param.size, scratch.size):
        p, addend = flats[0][tile], flats[1][tile]
        work = scratch[: p.size]
        if decays:
            # The scale is applied to the sum, so that one tile of scratch is enough.
            np.multiply(p, decay, out=work)
            work += addend
            addend = work
        if scaled:
            addend = np.multiply(addend, grad_scale, out=work)
        if velocity is not None:
            v = flats[2][tile]
            v *= momentum
            v += addend
            addend = v
        np.multiply(addend, lr, out=work)
        p -= work


def adamw_update(
    param: np.ndarray,
    grad: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    scratch: np.ndarray | None = None,
    kernels: Kernels | None = None,
) -> None:
    """Take one AdamW step in place.

    Parameters
    ----------
    param : ndarray, float32 or float64, C-contiguous
        Updated in place.
    grad : ndarray, same size and dtype
        Gradient of the mean loss times anything that `grad_scale` takes away. Not modified.
    m, v : ndarray, same size and dtype
        First and second moment; updated in place, zeros before the first step.
    lr : float
        Learning rate of this step.
    beta1, beta2 : float
        Decay of the moments, in [0, 1).
    eps : float
        Added to the denominator, outside the square root.
    weight_decay : float
        Decoupled decay: the parameter shrinks by ``lr * weight_decay`` of itself; 0 means off.
    step : int
        Number of committed steps including this one, so 1 at the first; a skipped step does not
        count (bias correction).
    grad_scale : float, default 1
        Factor applied to the gradient first: clipping, and the inverse of the loss scale.
    scratch : ndarray of shape (s,), same dtype, optional
        Working space of any length >= 1, used up to one tile (16384 elements); without it that
        much is allocated. With it one element is allocated at a time, for scalar
        operands.
    kernels : Kernels, optional
        Who computes it; by default NumPy.

    Raises
    ------
    ValueError
        Sizes or dtypes differ, an array is not C-contiguous, or `step` is below 1.

    Notes
    -----
    Loshchilov and Hutter 2019, algorithm 2, with the schedule in `lr`:
    ``m = beta1 m + (1 - beta1) grad``, ``v = beta2 v + (1 - beta2) grad^2``,
    ``param = (1 - lr weight_decay) param - lr m_hat / (sqrt(v_hat) + eps)`` with
    ``m_hat = m / (1 - beta1^step)`` and ``v_hat = v / (1 - beta2^step)``.
    """
    if step < 1:
        raise ValueError(
            f"step must be at least 1; got {step}. Count the committed steps, this one included."
        )
    flats, scratch = _checked((param, grad, m, v), scratch)
    # Python floats take the arrays' dtype in NumPy 1.26 and 2.x alike; NumPy floats do not.
    beta1, beta2 = float(beta1), float(beta2)
    # m_hat / (sqrt(v_hat) + eps) with the correction of v moved to the other factors saves a pass.
    root_correction = math.sqrt(1.0 - beta2**step)
    rate = float(lr) * root_correction / (1.0 - beta1**step)
    corrected_eps = float(eps) * root_correction
    shrink = 1.0 - float(lr) * float(weight_decay)
    p, g, m_flat, v_flat = flats
    (kernels or load_kernels("numpy")).adamw_update(
        p, g, m_flat, v_flat, rate=rate, beta1=beta1, beta2=beta2, eps=corrected_eps,
        shrink=shrink, grad_scale=float(grad_scale), scratch=scratch,
    )  # fmt: skip


def learning_rate(
    step: int,
    *,
    lr: float,
    warmup_steps: int,
    schedule: str,
    min_lr_ratio: float,
    total_steps: int,
) -> float:
    """Return the learning rate of one step.

    Parameters
    ----------
    step : int
        Which step, counted from 0.
    lr : float
        Rate at the end of warm-up.
    warmup_steps : int
        Steps 0..warmup_steps - 1 rise linearly from ``lr / warmup_steps`` to `lr`; 0 means off.
    schedule : {"constant", "linear", "cosine"}
        Shape after warm-up.
    min_lr_ratio : float
        The last step has ``lr * min_lr_ratio`` (linear and cosine).
    total_steps : int
        Steps of the whole run; the last is ``total_steps - 1``. Later steps keep its rate.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        The schedule is unknown.

    Notes
    -----
    The decay starts at the step whose rate is `lr`: the last of warm-up, or step 0. A run of one
    step has no decay.

    Examples
    --------
    >>> [learning_rate(step, lr=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.0,
    ...                total_steps=6) for step in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(
            f"schedule must be constant, linear or cosine; got {schedule!r}. Choose one of them."
        )
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    full_step = max(warmup_steps - 1, 0)
    decay_steps = total_steps - 1 - full_step
    if schedule == "constant" or decay_steps <= 0:
        return lr
    progress = min((step - full_step) / decay_steps, 1.0)
    if schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (min_lr_ratio + (1.0 - min_lr_ratio) * share)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return the factor that brings a gradient of the given norm down to `max_norm`.

    Parameters
    ----------
    norm : float
        Global norm of the true (unscaled) gradient over all parameters and ranks.
    max_norm : float
        Largest norm allowed; 0 means off.

    Returns
    -------
    float
        ``max_norm / norm`` if the norm is larger than `max_norm`, else exactly 1.0.

    Raises
    ------
    MpisimError
        The norm is inf or nan: no factor helps, since inf * 0 is nan. The caller must decide to
        skip the step before it asks.
    """
    if not math.isfinite(norm):
        raise MpisimError(
            f"the gradient norm must be finite; got {norm}. No update was made. "
            f"Lower optimizer.lr or set optimizer.clip_norm."
        )
    if max_norm == 0.0 or norm <= max_norm:
        return 1.0
    return max_norm / norm


def _checked(
    arrays: tuple[np.ndarray, ...], scratch: np.ndarray | None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return flat views of the arrays and the scratch; raise unless sizes and dtypes agree."""
    param = arrays[0]
    if scratch is None:
        scratch = np.empty(max(1, min(param.size, TILE_ELEMENTS)), dtype=param.dtype)
    if (
        any(array.size != param.size for array in arrays)
        or any(array.dtype != param.dtype for array in (*arrays, scratch))
        or scratch.ndim != 1
        or not scratch.size
    ):
        got = ", ".join(f"{array.dtype} {array.shape}" for array in (*arrays, scratch))
        raise ValueError(
            f"param, grad and state must agree in size and dtype, scratch in dtype with one dim "
            f"of 1 or more; got {got}. Pass arrays of one flat range."
        )
    return [flat_view(array) for array in arrays], scratch[:TILE_ELEMENTS]
