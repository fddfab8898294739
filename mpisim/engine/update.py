"""One logical update as a transaction: all of it happens on every rank, or nothing does.

The handlers gather gradients of ``S * sum of losses / N`` with the loss scale S and the valid
targets N of the whole update. Then, in this order:

    check    weights unchanged? norm and loss finite? (CheckGradients, each rank for itself)
    agree    one flag, the maximum over ranks (ReduceScalars non_finite)
    commit   or skip: parameters, moments, step count, scale (OptimizerStep, the same everywhere)

What fails up to the agreement leaves parameters, moments, step count, schedule and scale as they
were, and the gradients zero. A commit that could give a number that is not finite is made on top
of a copy and taken back. What fails after it (the figures' gather, a full disk) finds the update
made; `EngineState.committed` says which it was.
"""

from __future__ import annotations

import math

import numpy as np

from mpisim.engine.buckets import BucketStore
from mpisim.engine.state import EngineState
from mpisim.errors import BatchError, MpisimError
from mpisim.nn.numerics import squared_norm
from mpisim.nn.optim import adamw_update, clip_coefficient, sgd_update

FLOAT16_MAX = 65504.0


def require_clean_start(state: EngineState) -> None:
    """Refuse to start an update on gradients that are not zero, or on half an update.

    Raises
    ------
    BatchError
        Something wrote to the gradients since the last update.
    MpisimError
        An update was cut off while it changed the weights.
    """
    if state.broken:
        raise MpisimError(
            "weights must be those of a whole update; got some of an update that was cut off. "
            "Start again from saved weights."
        )
    dirty = [
        name
        for store in state.stores
        for name, grad in (
            store.views(store.grads).items()
            if state.zero < 2
            else [(piece.name, store.own_grads[piece.lo : piece.hi]) for piece in store.pieces]
        )
        if grad.any()
    ]
    if dirty:
        raise BatchError(
            f"gradients must be zero at the start of an update; got other values in "
            f"{', '.join(dirty[:3])}. Call clear_gradients first."
        )


def clear_gradients(state: EngineState) -> None:
    """Set all gradients to zero."""
    for store in state.stores:
        store.clear_grads()
    if state.zero >= 2:
        state.grads.clear()


def fingerprint(state: EngineState) -> dict[str, int]:
    """Return a number per parameter that changes if any one of its values does.

    A sum of words that wraps around: 20 us per MiB, so it can be taken twice a step. It does not
    see two values that changed places.
    """
    sums = {}
    for name, array in (pair for store in state.stores for pair in store.named_weights()):
        flat = array.reshape(-1)
        words = np.uint64 if array.nbytes % 8 == 0 else np.dtype(f"u{array.itemsize}")
        sums[name] = int(np.add.reduce(flat.view(words), dtype=np.uint64))
    return sums


def require_same_weights(state: EngineState) -> None:
    """Refuse gradients of weights that changed between microbatches: they are stale.

    Raises
    ------
    BatchError
        Something wrote to the weights since the update began.
    """
    now = fingerprint(state)
    stale = [name for name, value in state.step.weights.items() if now[name] != value]
    if stale:
        raise BatchError(
            f"weights must stay the same within an update; got other values in "
            f"{', '.join(stale[:3])} in step {state.step.step}. No update was made. Change them "
            f"between updates only."
        )


def check_gradients(state: EngineState) -> None:
    """Take the norm of the gradients that this rank owns, and note whether it saw a bad number.

    They are summed over the replicas and every parameter has one place, however many blocks or
    ranks share it, so each is counted once. Without shards a rank owns all: the norm is global.
    """
    # Before the flag is agreed on: a rank that refuses must not leave others to commit.
    require_same_weights(state)
    step = state.step
    step.own_norm = _own_norm(state)
    step.grad_norm = step.own_norm / step.loss_scale
    step.non_finite_here = not (
        math.isfinite(step.grad_norm) and math.isfinite(step.global_loss_sum)
    )


def _own_norm(state: EngineState) -> float:
    owned = [store.own_grads for store in state.stores]
    total = sum(_squared_norm(state, grads) for grads in owned)
    if math.isfinite(total):
        return math.sqrt(total)
    if not all(np.isfinite(grads).all() for grads in owned):
        return math.inf if total == math.inf else math.nan
    # Finite float64 values whose squares overflow: take the norm at their own scale.
    largest = max(float(np.max(np.abs(grads), initial=0.0)) for grads in owned)
    return largest * math.sqrt(sum(squared_norm(grads / largest) for grads in owned))


def _squared_norm(state: EngineState, grads: np.ndarray) -> float:
    if grads.itemsize == 2:
        return squared_norm(grads)
    return state.kernels.squared_norm(grads)


def finish_update(state: EngineState) -> None:
    """Commit the step or skip it, on every rank alike, and clear the gradients.

    Raises
    ------
    MpisimError
        The step cannot be committed and there is no dynamic loss scale to skip it with.
    LossScaleError
        The scale is at its floor.
    """
    step = state.step
    if step.found_non_finite:
        _refuse(state)
        step.skipped = True
    else:
        _commit(state)
        state.committed += 1
        state.loss_scale.commit()
    clear_gradients(state)


def _refuse(state: EngineState) -> None:
    step = state.step
    if state.loss_scale.skips:
        state.loss_scale.skip(step.step)
        return
    if state.loss_scale.kind == "static" or "float16" in state.policy.names:
        raise MpisimError(
            f"scaled gradients must be finite; got a number that is not at loss scale "
            f"{step.loss_scale:g} in step {step.step}. No update was made. Set "
            f"precision.loss_scale = 'dynamic', or lower precision.init_scale."
        )
    # Names the norm if that is what is not finite.
    clip_coefficient(step.grad_norm, state.optimizer.clip_norm)
    if math.isfinite(step.global_loss_sum):
        raise MpisimError(
            f"gradients and losses must be finite on all ranks; got a number that is not on "
            f"another rank in step {step.step}. No update was made. Lower optimizer.lr."
        )
    # A saturated softmax has finite gradients and an infinite loss.
    raise MpisimError(
        f"the loss must be finite; got a sum of {step.global_loss_sum} at step {step.step}. No "
        f"update was made. Lower optimizer.lr."
    )


def _commit(state: EngineState) -> None:
    step = state.step
    coefficient = clip_coefficient(step.grad_norm, state.optimizer.clip_norm)
    if state.observe_gradients is not None:
        state.observe_gradients(true_gradients(state))
    # All that can run out of memory comes before the first change.
    grads = [_as_param(state, store.own_grads) for store in state.stores]
    backup = [array.copy() for array in _changed_arrays(state)] if _may_overflow(state) else None
    try:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            for store, owned in zip(state.stores, grads, strict=True):
                # Divided by the scale first: the true gradient is what was clipped.
                _update_store(state, store, owned, coefficient / step.loss_scale)
        if backup is not None and not all(
            np.isfinite(array).all() for array in _changed_arrays(state)
        ):
            raise MpisimError(
                f"the update must be finite; got a number that is not at step {step.step}. No "
                f"update was made. Set optimizer.eps above 0, or lower optimizer.lr."
            )
    except BaseException:
        if backup is None:
            state.broken = True
        else:
            for array, old in zip(_changed_arrays(state), backup, strict=True):
                np.copyto(array, old)
        raise


def _update_store(
    state: EngineState, store: BucketStore, grads: np.ndarray, scale: float
) -> None:
    """Update the parameters of a bucket that this rank owns, piece by piece."""
    step, settings = state.step, state.optimizer
    for piece in store.pieces:
        own = slice(piece.lo, piece.hi)
        decay = settings.weight_decay if piece.decays else 0.0
        moments = [moment[own] for moment in store.moments]
        if settings.kind == "adamw":
            adamw_update(
                store.master[own], grads[own], *moments, lr=step.lr, beta1=settings.beta1,
                beta2=settings.beta2, eps=settings.eps, weight_decay=decay,
                step=step.update_number, grad_scale=scale, scratch=state.update_scratch,
                kernels=state.kernels,
            )  # fmt: skip
        else:
            sgd_update(
                store.master[own], grads[own], moments[0] if moments else None, lr=step.lr,
                momentum=settings.momentum, weight_decay=decay, grad_scale=scale,
                scratch=state.update_scratch,
            )  # fmt: skip
    if state.policy.has_master:
        working = store.own_working
        np.copyto(working, state.kernels.narrow(store.master, working.dtype))


def _as_param(state: EngineState, grad: np.ndarray) -> np.ndarray:
    return state.kernels.widen(grad) if grad.dtype != state.policy.param_dtype else grad


def true_gradients(state: EngineState) -> dict[str, np.ndarray]:
    """Return copies of the gradients of the mean loss by name: scale divided out, not clipped.

    Of sharded gradients the rank's pieces, flat.
    """
    factor = 1.0 / state.step.loss_scale
    if state.zero == 0:
        return {name: _as_param(state, grad) * factor for name, grad in state.grads.items()}
    return {
        piece.name: _as_param(state, store.own_grads[piece.lo : piece.hi]) * factor
        for store in state.stores
        for piece in store.pieces
    }


def _may_overflow(state: EngineState) -> bool:
    """Tell whether finite gradients could still give an update that is not finite.

    Squares overflow above the root of the largest number, 0/0 needs eps = 0, a rate this large
    moves a weight out of range, and decay above 1 makes it grow from step to step; with none of
    these every intermediate value is finite. Working weights in float16 have a range of their own.
    """
    step, settings = state.step, state.optimizer
    largest = float(np.finfo(state.policy.param_dtype).max)
    risky = (
        step.grad_norm > math.sqrt(largest) / 1e3
        or step.lr * (1.0 + settings.weight_decay) > 1e6
        or step.lr * settings.weight_decay > 1.0
        or (settings.kind == "adamw" and settings.eps < 1e-30)
    )
    if state.policy.compute == "float16" and not risky:
        # AdamW moves a weight by a few rates at most, momentum by the sum of many gradients.
        stride = 100.0 if settings.kind == "adamw" else step.grad_norm / (1.0 - settings.momentum)
        reach = max(float(np.max(np.abs(s.master), initial=0.0)) for s in state.stores)
        risky = reach + step.lr * stride > FLOAT16_MAX / 2
    return bool(risky)


def _changed_arrays(state: EngineState) -> list[np.ndarray]:
    arrays = [store.master for store in state.stores]
    arrays += [moment for store in state.stores for moment in store.moments]
    return arrays + [store.own_working for store in state.stores] * state.policy.has_master


def abandon_step(state: EngineState) -> None:
    """Undo what a failed step left: activations, batches, partial gradients, stamps."""
    state.recorder.drop_step()
    clear_gradients(state)
    if state.zero == 3:
        for store in state.stores:
            state.hide_params(store.bucket.index)
            store.drop_gathered()
    state.ledger.release("activations")
    step = state.step
    if step is not None:
        for batch in step.batches.values():
            state.ledger.drop(*batch.arrays())
    state.step = None
