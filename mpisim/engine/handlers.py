"""Op kind -> function: what running each op means."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpisim.engine.metrics import fill_metrics
from mpisim.engine.state import EngineState
from mpisim.errors import MpisimError
from mpisim.nn.layers import LayerContext
from mpisim.nn.optim import (
    adamw_update,
    clip_coefficient,
    decay_applies,
    sgd_update,
    squared_norm,
)
from mpisim.plan.ops import (
    Backward,
    Forward,
    GatherMetrics,
    LoadBatch,
    Op,
    OptimizerStep,
    ReduceScalars,
    StartSync,
    WaitSync,
)


def load_batch(state: EngineState, op: LoadBatch) -> None:
    """Fetch the rows of one microbatch."""
    step = state.step
    x, targets = step.load(op.micro)
    state.ledger.hold("data", x, targets)
    step.batches[op.micro] = (x, targets)
    step.flow[op.micro] = x
    step.num_targets += len(targets)


def forward(state: EngineState, op: Forward) -> None:
    """Run one block forward; the last one adds to the loss sum."""
    step, ledger = state.step, state.ledger
    block = state.blocks[op.block]
    x = step.flow.pop(op.micro)
    targets = step.batches[op.micro][1]
    is_last = op.block == state.last
    ctx = LayerContext(targets=targets if is_last else None)
    y, saved = block.forward(state.block_params[op.block], x, ctx)
    if step.update_number:
        ledger.hold("activations", *_owned(block.saved_arrays(saved), step, op.micro))
        step.saved[op.block, op.micro] = saved
    if is_last:
        step.loss_sum += float(y)
        step.num_correct += state.model.num_correct(saved, targets) or 0
        if not step.update_number:
            ledger.drop(*step.batches.pop(op.micro))
    else:
        ledger.hold("activations", y)
        step.flow[op.micro] = y
    if op.block != state.first:
        ledger.drop(x)


def backward(state: EngineState, op: Backward) -> None:
    """Run one block backward and add to its gradients; advance rings between layers."""
    step, ledger = state.step, state.ledger
    block = state.blocks[op.block]
    saved = step.saved.pop((op.block, op.micro))
    is_last, is_first = op.block == state.last, op.block == state.first
    ctx = LayerContext(targets=step.batches[op.micro][1] if is_last else None)
    # The seed of the mean over the whole update: every row weighs the same on every layout.
    dy = 1.0 / step.global_targets if is_last else step.grad_flow.pop(op.micro)
    params = state.block_params[op.block]
    between = None if state.dp.idle else state.dp.advance
    dx, grads = block.backward(params, saved, dy, ctx, between)
    if not is_first:
        ledger.hold("activations", dx)
        step.grad_flow[op.micro] = dx
    for name, grad in grads.items():
        total = state.grads[f"{op.block}.{name}"]
        if op.block in step.accumulated:
            np.add(total, grad, out=total)
        else:
            np.copyto(total, grad)
    step.accumulated.add(op.block)
    ledger.drop(*_owned(block.saved_arrays(saved), step, op.micro))
    if not is_last:
        ledger.drop(dy)
    if is_first:
        ledger.drop(*step.batches.pop(op.micro))


def start_sync(state: EngineState, op: StartSync) -> None:
    """Queue the bucket's all-reduce."""
    state.dp.start(state.bucket_programs[op.bucket])


def wait_sync(state: EngineState, op: WaitSync) -> None:
    """Block until the bucket is reduced."""
    state.dp.wait(state.bucket_programs[op.bucket])


def reduce_scalars(state: EngineState, op: ReduceScalars) -> None:
    """Sum the numbers of one kind over all ranks."""
    step = state.step
    if op.kind == "target_count":
        rows = sum(state.plan_rows)
        step.global_targets = int(state.sum_scalars(op, [rows])[0])
    elif op.kind == "loss":
        total = state.sum_scalars(op, [step.loss_sum, step.num_correct])
        step.global_loss_sum, step.global_correct = float(total[0]), int(total[1])
    else:
        total = state.sum_scalars(op, [step.loss_sum, step.num_correct, step.num_targets])
        step.global_loss_sum, step.global_correct = float(total[0]), int(total[1])
        step.global_targets = int(total[2])


def optimizer_step(state: EngineState, op: OptimizerStep) -> None:
    """Take the global norm once, clip, and update every parameter in place."""
    step, settings = state.step, state.optimizer
    step.grad_norm = math.sqrt(sum(squared_norm(bucket) for bucket in state.buckets))
    coefficient = clip_coefficient(step.grad_norm, settings.clip_norm)
    if not math.isfinite(step.global_loss_sum):
        # A saturated softmax has finite gradients and an infinite loss.
        raise MpisimError(
            f"the loss must be finite; got a sum of {step.global_loss_sum} at step {step.step}. No "
            f"update was made. Lower optimizer.lr."
        )
    if coefficient != 1.0:
        for bucket in state.buckets:
            bucket *= coefficient
    try:
        with np.errstate(invalid="raise"):
            _update(state)
    except FloatingPointError as error:
        # With eps = 0 an element that has only seen zero gradients is 0/0, and no norm shows it.
        raise MpisimError(
            f"the update must be finite; got {error} at step {step.step}. Set optimizer.eps above "
            f"0, or lower optimizer.lr."
        ) from None


def _update(state: EngineState) -> None:
    step, settings = state.step, state.optimizer
    for name, param in state.params.items():
        decay = settings.weight_decay if decay_applies(param.shape) else 0.0
        moments = state.moments[name]
        if settings.kind == "adamw":
            adamw_update(
                param, state.grads[name], *moments, lr=step.lr, beta1=settings.beta1,
                beta2=settings.beta2, eps=settings.eps, weight_decay=decay,
                step=step.update_number, scratch=state.update_scratch,
            )  # fmt: skip
        else:
            sgd_update(
                param, state.grads[name], moments[0] if moments else None, lr=step.lr,
                momentum=settings.momentum, weight_decay=decay, scratch=state.update_scratch,
            )  # fmt: skip


def gather_metrics(state: EngineState, op: GatherMetrics) -> None:
    """Send this rank's figures to rank 0."""
    fill_metrics(state)
    collected = state.control.gather(state.metrics, state.all_metrics)
    if collected is not None:
        state.step.metrics = collected.reshape(state.mesh.size, -1)


HANDLERS: dict[type[Op], Callable[[EngineState, Op], None]] = {
    LoadBatch: load_batch,
    Forward: forward,
    Backward: backward,
    StartSync: start_sync,
    WaitSync: wait_sync,
    ReduceScalars: reduce_scalars,
    OptimizerStep: optimizer_step,
    GatherMetrics: gather_metrics,
}


def _owned(arrays: list[np.ndarray], step, micro: int) -> list[np.ndarray]:
    """Leave out a saved array that is the batch itself: it is category "data"."""
    x = step.batches[micro][0]
    return [array for array in arrays if array is not x]
