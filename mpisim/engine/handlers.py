"""Op kind -> function: what running each op means.

Arrays that an op makes are held in the ledger before those it frees are dropped, so a peak is
what really was alive at one time; `plan.forecast` walks the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpisim.data.batch import Batch
from mpisim.engine.buckets import add_gradient, set_gradient
from mpisim.engine.metrics import fill_metrics
from mpisim.engine.state import EngineState
from mpisim.engine.update import check_gradients, finish_update, update_overflows
from mpisim.errors import BatchError, RecomputeMismatch
from mpisim.layouts.specs import Keep
from mpisim.nn.numerics import tile_slices
from mpisim.nn.precision import is_floating
from mpisim.plan.ops import (
    Backward,
    CheckGradients,
    Forward,
    GatherMetrics,
    GatherParams,
    LoadBatch,
    Op,
    OptimizerStep,
    Recompute,
    ReduceScalars,
    Reshard,
    StartSync,
    StartUnshard,
    WaitSync,
    WaitUnshard,
)

OVERFLOWS, NON_FINITE = 1, 2
"""What a rank tells the others: its update would not be finite, or its gradients are not."""


def load_batch(state: EngineState, op: LoadBatch) -> None:
    """Fetch the rows of one microbatch and see that it is what the plan was built for."""
    step = state.step
    batch = Batch(*step.load(op.micro))
    wanted = (state.plan_rows[op.micro], state.row_width(op.micro))
    if batch.x.shape != wanted or len(batch.targets) != wanted[0]:
        raise BatchError(
            f"microbatch {op.micro} must have inputs of shape {wanted} and as many targets; got "
            f"{batch.x.shape} and {batch.targets.shape}. Give the plan the shapes of the data."
        )
    if state.policy.has_master and is_floating(batch.x.dtype):
        batch = batch._replace(x=state.kernels.narrow(batch.x, state.policy.compute_dtype))
    state.ledger.hold("data", *batch.arrays())
    step.batches[op.micro] = batch
    step.flow[op.micro] = batch.x
    step.loaded_targets += batch.num_targets


def forward(state: EngineState, op: Forward) -> None:
    """Run one block forward and keep what the op says; the last one adds to the loss sum."""
    step, ledger = state.step, state.ledger
    key = (op.block, op.micro)
    block = state.blocks[op.block]
    x = step.flow.pop(op.micro)
    is_last = op.block == state.last
    keep: Keep = "selective" if op.keep == "selective" else "nothing"
    if op.keep == "all" and step.update_number:
        keep = "all"
    y, saved = block.forward(
        state.block_params[op.block], x, state.context(op.block, op.micro), keep
    )
    step.block_forwards += 1
    if step.update_number:
        if op.keep in ("all", "selective"):
            ledger.hold("activations", *_owned(block.saved_arrays(saved), step, op.micro))
            step.saved[key] = saved
        elif op.keep == "input":
            ledger.hold("activations", *_owned([x], step, op.micro))
            step.inputs[key] = x
    if is_last:
        step.loss_sum += float(y)
        step.num_correct += state.model.num_correct(saved) or 0
        if not step.update_number:
            ledger.drop(*step.batches.pop(op.micro).arrays())
    else:
        ledger.hold("activations", y)
        step.flow[op.micro] = y
        if key in state.replay_ends:
            ledger.hold("activations", y)
            step.first_outputs[key] = y
    if op.block != state.first:
        ledger.drop(x)


def recompute(state: EngineState, op: Recompute) -> None:
    """Run again what forward did not keep, and compare with what it left."""
    step, ledger = state.step, state.ledger
    key = (op.block, op.micro)
    block, params = state.blocks[op.block], state.block_params[op.block]
    ctx = state.context(op.block, op.micro)
    if state.plan_keeps[key] == "selective":
        trimmed = step.saved[key]
        step.saved[key] = saved = block.restore(trimmed, ctx)
        ledger.hold("activations", *_owned(block.saved_arrays(saved), step, op.micro))
        ledger.drop(*_owned(block.saved_arrays(trimmed), step, op.micro))
        return
    x = step.inputs.pop(key)
    between = None if state.dp.idle else state.dp.advance
    y, saved = block.forward(params, x, ctx, between=between)
    step.block_forwards += 1
    ledger.hold("activations", *_owned(block.saved_arrays(saved), step, op.micro), y)
    step.saved[key] = saved
    ledger.drop(*_owned([x], step, op.micro))
    if key not in state.replay_ends:
        step.inputs[state.block_after[op.block], op.micro] = y
        return
    first = step.first_outputs.pop(key)
    if not _same_bits(y, first, state.update_scratch):
        raise RecomputeMismatch(
            f"the replay of block {op.block} must give the bits of its first forward; got other "
            f"values for microbatch {op.micro} in step {step.step}. A layer draws new random "
            f"numbers, or something changed its parameters or input."
        )
    ledger.drop(y, first)


def backward(state: EngineState, op: Backward) -> None:
    """Run one block backward and add to its gradients; advance rings between layers."""
    step, ledger = state.step, state.ledger
    block = state.blocks[op.block]
    saved = step.saved.pop((op.block, op.micro))
    is_last, is_first = op.block == state.last, op.block == state.first
    # The seed of the mean over the whole update: every target weighs the same on every layout.
    dy = step.loss_scale / step.global_targets if is_last else step.grad_flow.pop(op.micro)
    between = None if state.dp.idle else state.dp.advance
    dx, grads = block.backward(
        state.block_params[op.block], saved, dy, state.context(op.block, op.micro), between
    )
    if not is_first:
        ledger.hold("activations", dx)
        step.grad_flow[op.micro] = dx
    if state.zero >= 2:
        for bucket in state.block_buckets[op.block]:
            state.grads |= state.stores[bucket].open_grads()
    for local, grad in grads.items():
        name = block.full_names[local]
        write = add_gradient if name in step.accumulated else set_gradient
        write(state.kernels, state.grads[name], grad, state.update_scratch)
        step.accumulated.add(name)
    ledger.drop(*_owned(block.saved_arrays(saved), step, op.micro))
    if not is_last:
        ledger.drop(dy)
    if is_first:
        ledger.drop(*step.batches.pop(op.micro).arrays())


def start_sync(state: EngineState, op: StartSync) -> None:
    """Queue the bucket's sum over the ranks; where it is rounded first, shards free the rest."""
    store = state.stores[op.bucket]
    if state.zero >= 2:
        for name in store.offsets:
            state.grads.pop(name)
            state.step.accumulated.discard(name)
    store.start_sync(op.collective)


def wait_sync(state: EngineState, op: WaitSync) -> None:
    """Block until the bucket is summed; with gradients in shards, add the shard and free it."""
    state.stores[op.bucket].wait_sync(state.update_scratch)


def start_unshard(state: EngineState, op: StartUnshard) -> None:
    """Make room for a bucket's parameters and queue their gather."""
    state.stores[op.bucket].start_unshard()


def wait_unshard(state: EngineState, op: WaitUnshard) -> None:
    """Block until a bucket's parameters are here and show them to their blocks."""
    state.show_params(op.bucket, state.stores[op.bucket].wait_unshard())


def reshard(state: EngineState, op: Reshard) -> None:
    """Free a bucket's gathered parameters."""
    state.hide_params(op.bucket)
    state.stores[op.bucket].reshard()


def gather_params(state: EngineState, op: GatherParams) -> None:
    """Collect what the ranks have updated, unless the update was skipped."""
    if not state.step.skipped:
        state.stores[op.bucket].gather_updated()
        state.broken = op.bucket < len(state.stores) - 1


def reduce_scalars(state: EngineState, op: ReduceScalars) -> None:
    """Reduce the numbers of one kind over all ranks."""
    step = state.step
    if op.kind == "target_count":
        step.global_targets = int(state.sum_scalars(op, [step.num_targets])[0])
        if step.global_targets == 0:
            raise BatchError(
                f"an update must have at least one valid target over all ranks and microbatches; "
                f"got 0 in step {step.step}. No update was made. Use rows with more text."
            )
    elif op.kind == "loss":
        if step.loaded_targets != step.num_targets:
            raise BatchError(
                f"the microbatches of an update must have the targets that were counted before; "
                f"got {step.loaded_targets} instead of {step.num_targets} on rank {state.rank} in "
                f"step {step.step}. No update was made. Count the rows that are loaded."
            )
        total = state.sum_scalars(op, [step.loss_sum, step.num_correct])
        step.global_loss_sum, step.global_correct = float(total[0]), int(total[1])
    elif op.kind == "norm":
        norms = [0.0] * op.count
        norms[state.rank] = step.own_norm
        # The list of norms, not a sum of squares: those overflow where the norm does not.
        step.grad_norm = math.hypot(*state.sum_scalars(op, norms).tolist()) / step.loss_scale
        # Finite norms of shards may have one that is not; all ranks see the same bits.
        step.non_finite_here = step.non_finite_here or not math.isfinite(step.grad_norm)
    elif op.kind == "non_finite":
        worst = NON_FINITE if step.non_finite_here else OVERFLOWS * update_overflows(state)
        found = int(state.sum_scalars(op, [worst])[0])
        step.found_non_finite = found == NON_FINITE
        step.overflow_found = found == OVERFLOWS
    else:
        total = state.sum_scalars(op, [step.loss_sum, step.num_correct, step.loaded_targets])
        step.global_loss_sum = float(total[0])
        step.global_correct, step.global_targets = map(int, total[1:])


def look_at_gradients(state: EngineState, op: CheckGradients) -> None:
    """Take the global norm and note whether this rank saw a bad number."""
    check_gradients(state)


def optimizer_step(state: EngineState, op: OptimizerStep) -> None:
    """Commit the update, or skip it."""
    finish_update(state)


def gather_metrics(state: EngineState, op: GatherMetrics) -> None:
    """Send this rank's figures to rank 0."""
    # Figures about the run are no part of it: their arrays are counted apart.
    with state.watch.tracker.aside():
        fill_metrics(state)
    collected = state.control.gather(state.metrics, state.all_metrics)
    if collected is not None:
        with state.watch.tracker.aside():
            # A copy: the buffer serves every step.
            state.step.metrics = collected.reshape(state.mesh.size, -1).copy()


HANDLERS: dict[type[Op], Callable[[EngineState, Op], None]] = {
    LoadBatch: load_batch,
    Forward: forward,
    Recompute: recompute,
    Backward: backward,
    StartSync: start_sync,
    WaitSync: wait_sync,
    StartUnshard: start_unshard,
    WaitUnshard: wait_unshard,
    Reshard: reshard,
    ReduceScalars: reduce_scalars,
    CheckGradients: look_at_gradients,
    OptimizerStep: optimizer_step,
    GatherParams: gather_params,
    GatherMetrics: gather_metrics,
}


def _same_bits(a: np.ndarray, b: np.ndarray, scratch: np.ndarray) -> bool:
    """Compare bits, not values: a NaN equals itself, and 0 is not -0. `scratch` is bytes."""
    bits, flags = f"u{a.itemsize}", scratch.view(np.bool_)
    a, b = a.reshape(-1).view(bits), b.reshape(-1).view(bits)
    for tile in tile_slices(a.size, flags.size):
        same = np.equal(a[tile], b[tile], out=flags[: tile.stop - tile.start])
        if np.count_nonzero(same) < same.size:
            return False
    return True


def _owned(arrays: list[np.ndarray], step, micro: int) -> list[np.ndarray]:
    """Leave out a saved array that is the batch itself: it is category "data"."""
    x = step.batches[micro][0]
    return [array for array in arrays if array is not x]
