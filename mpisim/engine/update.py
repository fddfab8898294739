"""One logical update as a transaction: all of it happens on every rank, or nothing does.

The handlers gather gradients of ``S * sum of losses / N`` with the loss scale S and the valid
targets N of the whole update. Then, in this order:

    check    weights unchanged? norm and loss finite? (CheckGradients, each rank for itself)
    agree    one flag, the maximum over ranks (ReduceScalars non_finite)
    commit   or skip: parameters, moments, step count, scale (OptimizerStep, the same everywhere)

What fails up to the agreement leaves parameters, moments, step count, schedule and scale as they
were, and the gradients zero. An update that could give a number that is not finite is rehearsed
on copies before the agreement. What fails after it (the figures' gather, a full disk) finds the
update made; `EngineState.committed` says which it was.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np

from mpisim.engine.buckets import BucketStore
from mpisim.engine.state import SCRATCH_TILE, EngineState
from mpisim.errors import BatchError, MpisimError
from mpisim.nn.numerics import squared_norm, tile_slices
from mpisim.nn.optim import adamw_update, clip_coefficient, sgd_update

FLOAT16_MAX = 65504.0
FLOAT32_MAX = float(np.finfo(np.float32).max)


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


def clear_residuals(state: EngineState) -> None:
    """Forget what gradients have lost on their way: the step that they belong to was not made."""
    for residual in state.residuals.values():
        residual.reshape(-1).view(np.uint8).fill(0)


def _rescale_residuals(state: EngineState, factor: float) -> None:
    """Take what gradients have lost into the units of a new loss scale."""
    for residual in state.residuals.values():
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(residual, np.array(factor, residual.dtype), out=residual)
        # Beyond the dtype's range nothing is worth keeping.
        residual[~np.isfinite(residual)] = 0


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
    ranks share it, so each is counted once. Without shards and stages a rank owns all: the norm is
    global. With stages every bucket has a norm of its own.
    """
    # Before the flag is agreed on: a rank that refuses must not leave others to commit.
    require_same_weights(state)
    step = state.step
    groups = [(store,) for store in state.stores] if state.mesh.pp > 1 else [state.stores]
    step.own_norms = [_own_norm(state, stores) for stores in groups]
    step.grad_norm = math.hypot(*step.own_norms) / step.loss_scale
    step.non_finite_here = not (
        math.isfinite(step.grad_norm) and math.isfinite(step.global_loss_sum)
    )


def _own_norm(state: EngineState, stores: Sequence[BucketStore]) -> float:
    owned = [store.own_grads for store in stores]
    total = sum(_squared_norm(state, grads) for grads in owned)
    if math.isfinite(total):
        return math.sqrt(total)
    scratch = state.update_scratch
    if not all(_all_finite(grads, scratch) for grads in owned):
        return math.inf if total == math.inf else math.nan
    # Finite float64 values whose squares overflow: take the norm at their own scale.
    largest = max(_largest(grads, scratch) for grads in owned)
    wide, scaled_sum = scratch.view(np.float64), 0.0
    for grads in owned:
        for tile in tile_slices(grads.size, wide.size):
            part = grads[tile]
            scaled_sum += squared_norm(np.divide(part, largest, out=wide[: part.size]))
    return largest * math.sqrt(scaled_sum)


def _squared_norm(state: EngineState, grads: np.ndarray) -> float:
    scratch = state.update_scratch.view(np.float64)
    if grads.itemsize == 2:
        return squared_norm(grads, scratch)
    return state.kernels.squared_norm(grads, scratch)


# What a step needs must not depend on its numbers, so these work in the rank's scratch.


def _all_finite(flat: np.ndarray, scratch: np.ndarray) -> bool:
    """Tell whether all values are finite; allocates nothing. `scratch` is bytes."""
    flags = scratch.view(np.bool_)
    for tile in tile_slices(flat.size, flags.size):
        part = flat[tile]
        if np.count_nonzero(np.isfinite(part, out=flags[: part.size])) < part.size:
            return False
    return True


def _largest(flat: np.ndarray, scratch: np.ndarray) -> float:
    """Return the largest magnitude, 0 of nothing; allocates nothing. `scratch` is bytes."""
    # NumPy makes an array of a single number, too, unless it is given one.
    place = scratch.view(flat.dtype)[:1].reshape(())
    low = float(np.minimum.reduce(flat, initial=0.0, out=place))
    return max(-low, float(np.maximum.reduce(flat, initial=0.0, out=place)))


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
    if step.overflow_found:
        raise MpisimError(
            f"the update must be finite; got a number that is not at step {step.step}. No "
            f"update was made. Set optimizer.eps above 0, or lower optimizer.lr."
        )
    if step.found_non_finite:
        _refuse(state)
        step.skipped = True
        clear_residuals(state)
    else:
        _commit(state)
        state.committed += 1
        state.loss_scale.commit()
        if state.loss_scale.value != step.loss_scale:
            _rescale_residuals(state, state.loss_scale.value / step.loss_scale)
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
    if state.observe_gradients is not None:
        state.observe_gradients(true_gradients(state))
    # Until all of it is done, on every rank: working weights that wait for their gather are stale.
    state.broken = True
    for store in state.stores:
        _update_store(state, store)
    state.broken = state.zero in (1, 2)


def update_overflows(state: EngineState) -> bool:
    """Tell whether the update would give a number that is not finite on this rank.

    Where finite gradients could do that, the update is made on copies, a tile at a time.
    """
    step = state.step
    if not math.isfinite(step.grad_norm) or not _may_overflow(state):
        return False
    return not all(_update_store(state, store, rehearse=True) for store in state.stores)


def _update_store(state: EngineState, store: BucketStore, rehearse: bool = False) -> bool:
    """Update the parameters of a bucket that this rank owns; nothing is allocated.

    With `rehearse` only copies are changed, and the result tells whether all of them are finite.
    """
    step, settings, policy = state.step, state.optimizer, state.policy
    # Divided by the scale first: the true gradient is what was clipped.
    scale = clip_coefficient(step.grad_norm, settings.clip_norm) / step.loss_scale
    widens = store.own_grads.dtype != policy.param_dtype
    scratch, tile = state.update_scratch, SCRATCH_TILE
    if rehearse:
        tile //= 8
    parts = scratch.view(policy.param_dtype)
    work, wide, *copies = (parts[k * tile : (k + 1) * tile] for k in range(5 if rehearse else 2))
    finite = True
    for piece in store.pieces:
        count = piece.hi - piece.lo
        for start in range(piece.lo, piece.hi, tile if widens or rehearse else count):
            own = slice(start, min(start + tile, piece.hi) if widens or rehearse else piece.hi)
            changed = [store.master[own], *(moment[own] for moment in store.moments)]
            grads = store.own_grads[own]
            if widens:
                grads = state.kernels.widen(grads, out=wide[: grads.size])
            if rehearse:
                for copy, array in zip(copies, changed, strict=False):
                    np.copyto(copy[: array.size], array)
                changed = [copy[: grads.size] for copy in copies[: len(changed)]]
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                _update_range(state, changed, grads, piece.decays, scale, work)
                if policy.has_master:
                    target = store.own_working[own]
                    if rehearse:
                        target = work.view(target.dtype)[: target.size]
                    state.kernels.narrow(changed[0], target.dtype, out=target)
                    changed.append(target)
            if rehearse:
                flags = scratch[-tile:]  # no copy reaches that far
                finite = finite and all(_all_finite(array, flags) for array in changed)
    return finite


def _update_range(
    state: EngineState,
    changed: list[np.ndarray],
    grads: np.ndarray,
    decays: bool,
    scale: float,
    work: np.ndarray,
) -> None:
    """Update one range of parameters, ``changed[0]``, and their moments, the others."""
    step, settings = state.step, state.optimizer
    decay = settings.weight_decay if decays else 0.0
    if settings.kind == "adamw":
        adamw_update(
            changed[0], grads, *changed[1:], lr=step.lr, beta1=settings.beta1,
            beta2=settings.beta2, eps=settings.eps, weight_decay=decay, step=step.update_number,
            grad_scale=scale, scratch=work, kernels=state.kernels,
        )  # fmt: skip
    else:
        sgd_update(
            changed[0], grads, changed[1] if len(changed) > 1 else None, lr=step.lr,
            momentum=settings.momentum, weight_decay=decay, grad_scale=scale, scratch=work,
        )  # fmt: skip


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
    largest = FLOAT32_MAX if state.policy.param == "float32" else sys.float_info.max
    risky = (
        step.grad_norm > math.sqrt(largest) / 1e3
        or step.lr * (1.0 + settings.weight_decay) > 1e6
        or step.lr * settings.weight_decay > 1.0
        or (settings.kind == "adamw" and settings.eps < 1e-30)
    )
    if state.policy.compute == "float16" and not risky:
        # AdamW moves a weight by a few rates at most, momentum by the sum of many gradients.
        stride = 100.0 if settings.kind == "adamw" else step.grad_norm / (1.0 - settings.momentum)
        largest = [_largest(store.master, state.update_scratch) for store in state.stores]
        reach = max(largest, default=0.0)
        risky = reach + step.lr * stride > FLOAT16_MAX / 2
    return bool(risky)


def abandon_step(state: EngineState) -> None:
    """Undo what a failed step left: activations, batches, partial gradients, stamps."""
    state.recorder.drop_step()
    clear_gradients(state)
    clear_residuals(state)
    state.links.abandon()
    for store in state.stores:
        if state.zero == 3:
            state.hide_params(store.bucket.index)
            store.drop_gathered()
        # Messages that are still on their way may use the buffers: then they stay, until the end.
        if state.zero >= 2 and state.dp.idle:
            store.let_go()
    state.ledger.release("activations")
    step = state.step
    if step is not None:
        for batch in step.batches.values():
            state.ledger.drop(*batch.arrays())
        # Where a message is still on its way its library holds the buffer.
        state.ledger.drop(*(frame for _, frame in step.frames.values()))
    state.step = None
