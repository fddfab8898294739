"""What the engine's own code needs beside what the ledger holds, as arithmetic on sizes.

The forecast (`plan.forecast.Working`) reads it; the lines follow `handlers`, `buckets` and `update`
and change together with them. Working space that stays is the rank's scratch, `SCRATCH_BYTES`.
"""

from __future__ import annotations

from mpisim.config.schema import RunConfig
from mpisim.data.footprint import batch_bytes, counting_bytes, held_batch_bytes
from mpisim.engine.state import SCRATCH_TILE
from mpisim.layouts.specs import Conditions
from mpisim.nn.kernel_memory import (
    adamw_update_peak,
    narrow_peak,
    sgd_update_peak,
    squared_norm_peak,
    widen_peak,
)
from mpisim.nn.precision import Policy
from mpisim.plan.forecast import Working


def engine_working(
    config: RunConfig,
    policy: Policy,
    conditions: Conditions,
    *,
    inputs: bool = True,
    targets: bool = True,
) -> Working:
    """Return what the ops of a run need beside what they hold.

    Parameters
    ----------
    config : RunConfig
    policy : Policy
    conditions : Conditions
        The kernel set is read.
    inputs, targets : bool
        What the rank keeps of a batch: see `held_batch_bytes`.
    """
    compute, wire = policy.compute_dtype, policy.wire_dtype
    has_wire = policy.wire != policy.reduce
    reduces_halves = policy.reduce_dtype.itemsize == 2

    def load(rows: int, length: int | None) -> int:
        counting = 0
        if config.model.kind == "decoder":
            counting = counting_bytes(rows, length or config.data.window)
        loaded = batch_bytes(config, rows, length)
        held = held_batch_bytes(config, rows, length, inputs=inputs, targets=targets)
        # What the rank does not keep is there while the targets are counted.
        loading = loaded + counting - held
        if not (inputs and policy.has_master and config.data.kind == "regression"):
            return loading
        # The features as they came live on until their rounded copy has taken their place.
        features = rows * config.data.num_features
        rounded = narrow_peak(features, compute, conditions)
        itemsize = policy.param_dtype.itemsize
        kept = loaded - (0 if targets else rows * config.data.num_targets * itemsize)
        return max(kept + rounded - held, loading)

    def accumulate(size: int) -> int:
        if not reduces_halves:
            return 0
        tile = min(size, 1 << 15)
        return max(
            narrow_peak(size, policy.reduce_dtype, conditions, out=True),
            widen_peak(tile, policy.reduce_dtype, conditions, out=True),
        )

    def wait_sync(own: int) -> int:
        return widen_peak(own, wire, conditions, out=True) if has_wire else 0

    def check(own: int) -> int:
        norm = squared_norm_peak(own, policy.reduce_dtype.itemsize, conditions, scratch=True)
        # NumPy's sum of words, which looks for changed weights, has one of them as its result.
        # Widening bfloat16 to float64 makes an array of one value of each on the way.
        return max(norm, 10 if own and policy.reduce == "bfloat16" else 8)

    def update(own: int) -> int:
        if reduces_halves:
            own = min(own, SCRATCH_TILE)
        itemsize = policy.param_dtype.itemsize
        if config.optimizer.kind == "adamw":
            working = adamw_update_peak(own, itemsize, conditions)
        else:
            working = sgd_update_peak(own, itemsize)
        if policy.has_master:
            working = max(working, narrow_peak(own, compute, conditions, out=True))
        if reduces_halves:
            working = max(working, widen_peak(own, policy.reduce_dtype, conditions, out=True))
        return working

    return Working(
        load=load,
        accumulate=accumulate,
        start_sync=lambda count: narrow_peak(count, wire, conditions, out=True) if has_wire else 0,
        wait_sync=wait_sync,
        check=check,
        update=update,
    )
