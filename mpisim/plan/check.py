"""Proves a plan before it runs: an interpreter that holds sets and byte counts, not arrays.

`check_plan` walks the ops of all ranks together. Per rank it proves that every op finds what it
needs, that every bucket is reduced once and complete, and that nothing is left at the end; across
ranks it proves that collectives match and that nobody waits for ever. `forecast.predict_memory`
walks one rank with byte counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpisim.errors import DeadlockError, PlanError
from mpisim.mesh import AXES
from mpisim.plan.build import Plan
from mpisim.plan.check_pipeline import (
    PIPELINE_RULES,
    Messages,
    begin_backward,
    deadlock_remedy,
    find_cycle,
    finish_backward,
    require_tensor,
    waits_for_message,
)
from mpisim.plan.ops import (
    ALL_MICROS,
    CONTROL_SUMS,
    KEEPS,
    WAIT_AXIS,
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
    control_count,
)
from mpisim.plan.partition import Bucket
from mpisim.plan.walk import (
    RankState,
    draw_place,
    fail,
    require,
    require_known,
    require_params,
)

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of what a plan moves over axes dp and pp."""

_SUMS = {"train": ("target_count", "loss", "non_finite"), "eval": ("eval",)}
"""Kinds of `ReduceScalars` that a plan of each kind has, once each."""


def _sums(plan: Plan) -> tuple[str, ...]:
    in_parts = plan.zero or plan.mesh.pp > 1
    return (*_SUMS[plan.kind], *(("norm",) if plan.kind == "train" and in_parts else ()))


def check_plan(plan: Plan) -> None:
    """Prove that `plan` can run.

    Raises
    ------
    PlanError
        An op does not find what it needs, a bucket is reduced too early, twice or never, ranks
        disagree on a collective, or something is left at the end. The text draws the ops around
        the place, rank by rank, with a mark.
    DeadlockError
        The ranks would wait for each other for ever.
    """
    _check_head(plan)
    for what, number in (("ops", len(plan.ranks)), ("rows", len(plan.rows))):
        if number != plan.mesh.size:
            raise PlanError(
                f"plan must have {what} for every rank of the mesh; got {number} for "
                f"{plan.mesh.size}. Build it with plan.build."
            )
    if plan.lengths and [*map(len, plan.lengths)] != [*map(len, plan.rows)]:
        raise PlanError(
            f"plan must have lengths for every microbatch of every rank, or none; got "
            f"{plan.lengths} for rows {plan.rows}. Build it with plan.build."
        )
    if plan.zero not in (0, 1, 2, 3):
        raise PlanError(f"plan zero must be 0, 1, 2 or 3; got {plan.zero}. Build it with "
                        f"plan.build.")  # fmt: skip
    if plan.kind not in _SUMS:
        raise PlanError(
            f"plan kind must be {' or '.join(_SUMS)}; got {plan.kind!r}. Build it with plan.build."
        )
    _check_stages(plan)
    messages = Messages()
    states = [RankState(rank, plan, messages) for rank in range(plan.mesh.size)]
    while any(state.op is not None for state in states):
        progressed = False
        for state in states:
            while state.op is not None and not _waits_for(state, states):
                _execute(state)
                state.position += 1
                progressed = True
        _match(states)
        if not progressed:
            waits = {s.rank: _waits_for(s, states) for s in states if s.op is not None}
            cycle = find_cycle(plan, states, waits)
            raise DeadlockError(
                "ranks must not wait for each other for ever; got every unfinished rank blocked:\n"
                + draw_place(plan, {s.rank: s.position for s in states if s.op is not None})
                + f"\n{cycle}{deadlock_remedy(states, waits)}"
            )
    messages.require_drained(plan)
    for state in states:
        _check_end(state)


def _check_head(plan: Plan) -> None:
    """Require what no op could make up for; a plan may come from a file."""

    def refuse(rule: str, got: object) -> None:
        raise PlanError(f"{rule}; got {got}. Build the plan with plan.build.")

    degrees = {axis: plan.mesh.degree(axis) for axis in AXES}
    if min(degrees.values()) < 1:
        refuse("degrees of the mesh must be at least 1", degrees)
    for what, dtype in (("dtype", plan.dtype), ("params", plan.param_dtype)):
        if dtype not in DTYPES:
            refuse(f"{what} of a plan must be one of {', '.join(DTYPES)}", dtype)
    if any(count < 0 for counts in plan.rows for count in counts):
        refuse("rows must be 0 or more", plan.rows)
    for bucket in plan.buckets:
        if not 0 <= bucket.coordinate < plan.mesh.pp:
            refuse(f"a bucket must lie on one of the {plan.mesh.pp} places of axis pp",
                   bucket.coordinate)  # fmt: skip
        if bucket.twin == -1:
            continue
        twin = plan.buckets[bucket.twin] if 0 <= bucket.twin < len(plan.buckets) else None
        if twin is None or twin.twin != bucket.index or twin.params != bucket.params:
            refuse("twins must name each other, with the same parameters",
                   f"bucket {bucket.index} with twin {bucket.twin}")  # fmt: skip


def _check_stages(plan: Plan) -> None:
    stages = plan.stages or (plan.blocks,)
    flat = tuple(block for stage in stages for block in stage)
    if flat != plan.blocks or not all(stages) or len(stages) % plan.mesh.pp:
        raise PlanError(
            f"stages must hold all blocks in order, none empty, equally many on each of the "
            f"{plan.mesh.pp} places of axis pp; got {len(stages)} stages of {len(flat)} blocks. "
            f"Build the plan with plan.build."
        )
    for rank in range(plan.mesh.size):
        first = plan.mesh.group(rank, "pp")[0]
        mine = plan.rows[rank], plan.lengths[rank] if plan.lengths else ()
        theirs = plan.rows[first], plan.lengths[first] if plan.lengths else ()
        if mine != theirs:
            raise PlanError(
                f"all stages of a replica must see the same rows; got {mine} on rank {rank} and "
                f"{theirs} on rank {first}. Build the plan with plan.build."
            )


def _waits_for(state: RankState, states: list[RankState]) -> list[int]:
    """Return the ranks that a rank's op waits for; none: it can run.

    A collective waits until its whole group has entered it; a message until both its ends have
    come to it, as if nothing was buffered on the way.
    """
    op = state.op
    axis = WAIT_AXIS.get(type(op))
    if axis is None:
        return []
    if axis == "pp":
        return waits_for_message(state, states)
    group = state.plan.mesh.group(state.rank, "dp") if axis == "dp" else range(len(states))
    if axis == "dp":
        if isinstance(op, GatherParams):
            wanted = ("gather", op.bucket)
            if wanted not in state.started:
                state.start(wanted)
        elif isinstance(op, WaitSync):
            wanted = ("sync", op.bucket, op.micro)
        else:
            wanted = _last_unshard(state, op.bucket)
        if wanted not in state.started:
            fail(state, f"bucket {op.bucket} must be started before it is waited for")
        turn = state.started.index(wanted)
        return [rank for rank in group if len(states[rank].started) <= turn]
    key = (type(op).__name__, *(getattr(op, name) for name in op.__dataclass_fields__))
    marker = (state.position, key)
    if not state.entered or state.entered[-1] != marker:
        state.entered.append(marker)
    turn = len(state.entered) - 1
    return [rank for rank in group if len(states[rank].entered) <= turn]


def _last_unshard(state: RankState, bucket: int) -> tuple | None:
    found = [key for key in state.started if key[:2] == ("unshard", bucket)]
    return found[-1] if found else None


def _match(states: list[RankState]) -> None:
    for other in states[1:]:
        for (at_first, first), (at_other, key) in zip(
            states[0].entered, other.entered, strict=False
        ):
            if first != key:
                place = draw_place(states[0].plan, {0: at_first, other.rank: at_other})
                raise PlanError(
                    f"ranks must enter the same collectives in the same order; got {first} on "
                    f"rank 0 and {key} on rank {other.rank}:\n{place}\nMake the plans agree."
                )
    for state in states:
        leader = states[state.plan.mesh.group(state.rank, "dp")[0]]
        for turn, (mine, theirs) in enumerate(zip(state.started, leader.started, strict=False)):
            if mine != theirs:
                marks = {s.rank: s.started_at[turn] for s in (leader, state)}
                raise PlanError(
                    f"ranks of a dp group must start the same buckets in the same order; got "
                    f"{_key_text(theirs)} on rank {leader.rank} and {_key_text(mine)} on rank "
                    f"{state.rank} at turn {turn}:\n{draw_place(state.plan, marks)}\nMake the "
                    f"plans agree."
                )


def _key_text(key: tuple) -> str:
    what = {"sync": "the sum", "unshard": "the gather", "gather": "the gather after the update"}
    return f"{what[key[0]]} of bucket {key[1]}"


def _load_batch(state: RankState, op: LoadBatch) -> None:
    micros = state.num_micros
    require(state, 0 <= op.micro < micros, f"a microbatch must be one of the rank's {micros}")
    require(state, op.micro not in state.seen, "a microbatch must be loaded once")
    state.loaded.add(op.micro)
    state.seen.add(op.micro)


def _forward(state: RankState, op: Forward) -> None:
    plan, key = state.plan, (op.block, op.micro)
    require_known(state, op.block)
    is_first, is_last = op.block == plan.blocks[0], op.block == plan.blocks[-1]
    before = None if is_first else (plan.blocks[plan.blocks.index(op.block) - 1], op.micro)
    if is_first:
        require(state, op.micro in state.loaded, "a microbatch must be loaded before forward")
    else:
        require_tensor(state, before in state.outputs, op.block, *before)
        state.outputs.discard(before)
    require(state, key not in state.forwards, "a block must run forward once per microbatch")
    require(state, op.micro in state.loaded, "a forward must find its microbatch loaded")
    require_params(state, op.block)
    state.forwards.add(key)
    require(state, op.keep in KEEPS, f"keep must be one of {', '.join(KEEPS)}")
    kept_loss = not is_last or op.keep in ("all", "selective")
    require(state, kept_loss, "the last block must keep all: its output is the loss")
    if plan.kind == "train":
        _keep(state, op, before)
    state.drop_batch()
    if not is_last:
        state.outputs.add(key)


def _keep(state: RankState, op: Forward, before: tuple[str, int] | None) -> None:
    """Note what a training forward leaves to backward, or to the replay that completes it."""
    if op.keep == "all":
        state.saved.add((op.block, op.micro))
        return
    if op.keep == "nothing":
        found = state.kept.get(before) in ("input", "nothing")
        require(state, found, "a forward that keeps nothing must follow one that keeps its input")
    state.kept[op.block, op.micro] = op.keep


def _recompute(state: RankState, op: Recompute) -> None:
    blocks, key = state.plan.blocks, (op.block, op.micro)
    keep = state.kept.pop(key, None)
    require(state, keep is not None, "a replay must follow a forward that kept less than all")
    state.saved.add(key)
    if keep == "selective":
        return
    require_params(state, op.block)
    number = blocks.index(op.block)
    if keep == "nothing":
        before = (blocks[number - 1], op.micro)
        require(state, before in state.replayed, "a replay must follow the replay of the block "
                 "before")  # fmt: skip
        state.replayed.discard(before)
    after = (blocks[number + 1], op.micro) if number + 1 < len(blocks) else None
    if state.kept.get(after) == "nothing":
        state.replayed.add(key)


def _backward(state: RankState, op: Backward) -> None:
    begin_backward(state, op)
    finish_backward(state, op)


def _known_bucket(state: RankState, op: StartSync | StartUnshard | GatherParams) -> Bucket:
    buckets = state.plan.buckets
    bucket = buckets[op.bucket] if 0 <= op.bucket < len(buckets) else None
    require(state, bucket is not None, "a bucket must be in the plan's head")
    require(state, bucket in state.buckets, "a bucket must lie on the rank")
    require(state, bucket.count == op.count, f"bucket must have {bucket.count} elements")
    return bucket


def _start_sync(state: RankState, op: StartSync) -> None:
    zero, micros = state.plan.zero, state.num_micros
    bucket = _known_bucket(state, op)
    article, collective = ("a", "reduce_scatter") if zero else ("an", "all_reduce")
    rule = f"the sum must be {article} {collective} with zero {zero}"
    require(state, op.collective == collective, rule)
    if zero >= 2:
        require(state, 0 <= op.micro < micros, f"a sum must be of one of {micros} microbatches")
        summed = [op.micro]
    else:
        require(state, op.micro == ALL_MICROS, f"the sum must be of all microbatches "
                 f"({ALL_MICROS}) with zero {zero}")  # fmt: skip
        summed = list(range(micros))
    key = ("sync", op.bucket, op.micro)
    often = "once per microbatch" if zero >= 2 else "once per step"
    require(state, key not in state.started, f"a bucket must be reduced {often}")
    # No gradient can change from here on: no backward of these blocks is left.
    for block in bucket.blocks:
        whose = f"microbatch {op.micro}" if zero >= 2 else f"all {micros} microbatches"
        require(
            state, all((block, micro) in state.backwards for micro in summed),
            f"a bucket must hold the gradients of {whose} of block {block}",
        )  # fmt: skip
    if zero < 2:
        whole = op.bucket not in state.apart
        require(state, whole, "the ends of a tied table must be added up before the sum over dp")
    state.start(key)


def _wait_sync(state: RankState, op: WaitSync) -> None:
    key = ("sync", op.bucket, op.micro)
    require(state, key not in state.waited, "a bucket must be waited for once")
    state.waited.add(key)


def _start_unshard(state: RankState, op: StartUnshard) -> None:
    require(state, state.plan.zero == 3, "parameters must be gathered by block with zero 3 only")
    _known_bucket(state, op)
    require(state, op.bucket not in state.unsharded, "a bucket must be freed before it is "
             "gathered again")  # fmt: skip
    state.unsharded[op.bucket] = False
    state.num_gathers += 1
    state.start(("unshard", op.bucket, state.num_gathers))


def _wait_unshard(state: RankState, op: WaitUnshard) -> None:
    require(state, not state.unsharded.get(op.bucket, True), "a gather must be waited for once")
    state.unsharded[op.bucket] = True
    state.waited.add(_last_unshard(state, op.bucket))


def _reshard(state: RankState, op: Reshard) -> None:
    here = state.unsharded.pop(op.bucket, False)
    require(state, here, "parameters must be gathered before they are freed")


def _gather_params(state: RankState, op: GatherParams) -> None:
    zero = state.plan.zero
    require(state, zero in (1, 2), "updated parameters must be gathered with zero 1 or 2 only")
    _known_bucket(state, op)
    require(state, state.stepped, "updated parameters must be gathered after OptimizerStep")
    key = ("gather", op.bucket)
    require(state, key not in state.waited, "updated parameters must be gathered once")
    state.waited.add(key)


def _reduce_scalars(state: RankState, op: ReduceScalars) -> None:
    kinds, micros, last = _sums(state.plan), state.num_micros, state.blocks[-1]
    require(state, op.kind in kinds, f"kind of a sum must be {' or '.join(kinds)}")
    require(state, op.kind not in state.sums, f"{op.kind} must be summed once per step")
    meant = (control_count(op.kind, state.plan.num_norms), *CONTROL_SUMS[op.kind][1:])
    got = (op.count, op.dtype, op.reduction)
    require(state, got == meant, f"the sum {op.kind} must be of {meant}, and not of {got}")
    if op.kind != "target_count":
        whole = all((last, micro) in state.forwards for micro in range(micros))
        rule = f"the sum {op.kind} must follow the forwards of all {micros} microbatches"
        require(state, whole, rule)
    if op.kind in ("norm", "non_finite"):
        what = {"norm": "the norm", "non_finite": "the flag"}[op.kind]
        require(state, state.checked, f"{what} must follow CheckGradients")
    if op.kind == "non_finite" and "norm" in kinds:
        require(state, "norm" in state.sums, "the flag must follow the sum norm")
    state.sums.add(op.kind)


def _check_gradients(state: RankState, op: CheckGradients) -> None:
    missing, apart = state.unreduced, state.apart
    require(state, not missing, f"the norm must follow WaitSync of buckets {missing}")
    require(state, not apart, f"the norm must follow ExchangeTied of buckets {apart}")
    summed = "loss" in state.sums
    require(state, summed, "CheckGradients must follow ReduceScalars of kind loss")
    require(state, not state.checked, "a step must check its gradients once")
    state.checked = True


def _optimizer_step(state: RankState, op: OptimizerStep) -> None:
    require(state, state.plan.kind == "train", "an evaluation must not update the parameters")
    missing = state.unreduced
    require(state, not missing, f"the update must follow WaitSync of buckets {missing}")
    agreed = "non_finite" in state.sums
    require(state, agreed, "the update must follow ReduceScalars of kind non_finite")
    require(state, not state.stepped, "a step must update once")
    state.stepped = True


def _gather_metrics(state: RankState, op: GatherMetrics) -> None:
    """Nothing that a rank could lack: only the order over ranks counts, see `_match`."""


_RULES: dict[type[Op], Callable[[RankState, Any], None]] = {
    LoadBatch: _load_batch,
    Forward: _forward,
    Recompute: _recompute,
    Backward: _backward,
    StartSync: _start_sync,
    WaitSync: _wait_sync,
    StartUnshard: _start_unshard,
    WaitUnshard: _wait_unshard,
    Reshard: _reshard,
    ReduceScalars: _reduce_scalars,
    CheckGradients: _check_gradients,
    OptimizerStep: _optimizer_step,
    GatherParams: _gather_params,
    GatherMetrics: _gather_metrics,
    **PIPELINE_RULES,
}
"""Op kind -> function: what an op needs and what it leaves on its rank."""


def _execute(state: RankState) -> None:
    op = state.op
    if type(op) not in _RULES:
        fail(state, f"{type(op).__name__} must be replaced by a pass before the plan is checked")
    _RULES[type(op)](state, op)


def _check_end(state: RankState) -> None:
    left = {
        "loaded microbatches": state.loaded,
        "block outputs": state.outputs,
        "saved activations": state.saved | state.kept.keys(),
        "replayed outputs": state.replayed,
        "activation gradients": state.grads_of,
        "weight gradients to compute": state.halves,
        "frames": {key for key, micros in state.frames.items() if micros},
        "buckets in flight": {key[1] for key in state.in_flight},
        "gathered parameters of buckets": state.unsharded,
    }
    found = [f"{what} {sorted(things)}" for what, things in left.items() if things]
    if found:
        raise PlanError(
            f"a plan must leave nothing behind; got {' and '.join(found)} on rank {state.rank}:\n"
            f"{_last_place(state)}\nAdd the ops that use or free them."
        )
    if state.plan.kind == "train" and not state.stepped:
        raise PlanError(
            f"a training plan must update the parameters; got no OptimizerStep on rank "
            f"{state.rank}:\n{_last_place(state)}\nAdd one after the last WaitSync."
        )
    plan = state.plan
    if plan.kind == "train" and plan.zero in (1, 2):
        stale = [b.index for b in state.buckets if ("gather", b.index) not in state.waited]
        if stale:
            raise PlanError(
                f"a plan must gather what the update has changed; got no GatherParams of buckets "
                f"{stale} on rank {state.rank}:\n{_last_place(state)}\nAdd them after "
                f"OptimizerStep."
            )
    missing = [kind for kind in _sums(plan) if kind not in state.sums]
    if missing:
        raise PlanError(
            f"a plan must sum {' and '.join(_sums(plan))} over all ranks; got none of "
            f"{' and '.join(missing)} on rank {state.rank}:\n{_last_place(state)}\nAdd "
            f"ReduceScalars."
        )


def _last_place(state: RankState) -> str:
    """Draw the end of a rank's ops."""
    return draw_place(state.plan, {state.rank: len(state.plan.ranks[state.rank]) - 1})
