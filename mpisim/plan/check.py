"""Proves a plan before it runs: an interpreter that holds sets and byte counts, not arrays.

`check_plan` walks the ops of all ranks together. Per rank it proves that every op finds what it
needs, that every bucket is reduced once and complete, and that nothing is left at the end; across
ranks it proves that collectives match and that nobody waits for ever. `forecast.predict_memory`
walks one rank with byte counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpisim.errors import DeadlockError, PlanError
from mpisim.plan.build import Plan
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
from mpisim.plan.text import op_text

_CONTEXT_OPS = 3

_SUMS = {"train": ("target_count", "loss", "non_finite"), "eval": ("eval",)}
"""Kinds of `ReduceScalars` that a plan of each kind has, once each."""


def _sums(plan: Plan) -> tuple[str, ...]:
    return (*_SUMS[plan.kind], *(("norm",) if plan.kind == "train" and plan.zero else ()))


@dataclass
class _RankState:
    """What one rank holds while its ops are walked."""

    rank: int
    plan: Plan
    position: int = 0
    loaded: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    """Microbatches that were ever loaded."""
    outputs: set[tuple[str, int]] = field(default_factory=set)
    saved: set[tuple[str, int]] = field(default_factory=set)
    kept: dict[tuple[str, int], str] = field(default_factory=dict)
    """What forwards kept that must be completed by a replay."""
    replayed: set[tuple[str, int]] = field(default_factory=set)
    """Outputs of replays that the next replay of the segment reads."""
    grads_of: set[tuple[str, int]] = field(default_factory=set)
    forwards: set[tuple[str, int]] = field(default_factory=set)
    backwards: set[tuple[str, int]] = field(default_factory=set)
    sums: set[str] = field(default_factory=set)
    started: list[tuple] = field(default_factory=list)
    """Collectives this rank has started on axis dp, in order: what, bucket, and which."""
    started_at: list[int] = field(default_factory=list)
    """Positions of the ops that started them."""
    waited: set[tuple] = field(default_factory=set)
    """Those it has waited for."""
    unsharded: dict[int, bool] = field(default_factory=dict)
    """Buckets whose parameters were asked for; True once they are here."""
    num_gathers: int = 0
    entered: list[tuple] = field(default_factory=list)
    """Collectives this rank has entered on axis control, in order."""
    checked: bool = False
    stepped: bool = False

    @property
    def op(self) -> Op | None:
        ops = self.plan.ranks[self.rank]
        return ops[self.position] if self.position < len(ops) else None

    @property
    def num_micros(self) -> int:
        return len(self.plan.rows[self.rank])

    @property
    def unreduced(self) -> list[int]:
        """Buckets that are not waited for yet."""
        plan = self.plan
        micros = range(self.num_micros) if plan.zero >= 2 else (ALL_MICROS,)
        return [
            bucket.index
            for bucket in plan.buckets
            if any(("sync", bucket.index, micro) not in self.waited for micro in micros)
        ]

    @property
    def in_flight(self) -> list[tuple]:
        """Collectives that were started and not waited for."""
        return [key for key in self.started if key not in self.waited]

    def start(self, key: tuple) -> None:
        """Queue a collective on axis dp."""
        self.started.append(key)
        self.started_at.append(self.position)


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
    states = [_RankState(rank, plan) for rank in range(plan.mesh.size)]
    while any(state.op is not None for state in states):
        progressed = False
        for state in states:
            while state.op is not None and not _blocked(state, states):
                _execute(state)
                state.position += 1
                progressed = True
        _match(states)
        if not progressed:
            stuck = next(state for state in states if state.op is not None)
            raise DeadlockError(
                "ranks must not wait for each other for ever; got every unfinished rank blocked:\n"
                + draw_place(plan, {s.rank: s.position for s in states if s.op is not None})
                + f"\nGive all ranks the same order of collectives (first stuck: rank "
                f"{stuck.rank})."
            )
    for state in states:
        _check_end(state)


def _blocked(state: _RankState, states: list[_RankState]) -> bool:
    """Tell whether a rank must wait: until its whole group has entered the same collective."""
    op = state.op
    axis = WAIT_AXIS.get(type(op))
    if axis is None:
        return False
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
            _fail(state, f"bucket {op.bucket} must be started before it is waited for")
        turn = state.started.index(wanted)
        return any(len(states[rank].started) <= turn for rank in group)
    key = (type(op).__name__, *(getattr(op, name) for name in op.__dataclass_fields__))
    marker = (state.position, key)
    if not state.entered or state.entered[-1] != marker:
        state.entered.append(marker)
    turn = len(state.entered) - 1
    return any(len(states[rank].entered) <= turn for rank in group)


def _last_unshard(state: _RankState, bucket: int) -> tuple | None:
    found = [key for key in state.started if key[:2] == ("unshard", bucket)]
    return found[-1] if found else None


def _match(states: list[_RankState]) -> None:
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


def _load_batch(state: _RankState, op: LoadBatch) -> None:
    micros = state.num_micros
    _require(state, 0 <= op.micro < micros, f"a microbatch must be one of the rank's {micros}")
    _require(state, op.micro not in state.seen, "a microbatch must be loaded once")
    state.loaded.add(op.micro)
    state.seen.add(op.micro)


def _forward(state: _RankState, op: Forward) -> None:
    plan, key = state.plan, (op.block, op.micro)
    _require_known(state, op.block)
    is_first, is_last = op.block == plan.blocks[0], op.block == plan.blocks[-1]
    before = None if is_first else (plan.blocks[plan.blocks.index(op.block) - 1], op.micro)
    if is_first:
        _require(state, op.micro in state.loaded, "a microbatch must be loaded before forward")
    else:
        found = before in state.outputs
        _require(state, found, "forward must follow the forward of the block before")
        state.outputs.discard(before)
    _require(state, key not in state.forwards, "a block must run forward once per microbatch")
    _require_params(state, op.block)
    state.forwards.add(key)
    _require(state, op.keep in KEEPS, f"keep must be one of {', '.join(KEEPS)}")
    kept_loss = not is_last or op.keep in ("all", "selective")
    _require(state, kept_loss, "the last block must keep all: its output is the loss")
    if plan.kind == "train":
        _keep(state, op, before)
    elif is_last:
        state.loaded.discard(op.micro)
    if not is_last:
        state.outputs.add(key)


def _keep(state: _RankState, op: Forward, before: tuple[str, int] | None) -> None:
    """Note what a training forward leaves to backward, or to the replay that completes it."""
    if op.keep == "all":
        state.saved.add((op.block, op.micro))
        return
    if op.keep == "nothing":
        found = state.kept.get(before) in ("input", "nothing")
        _require(state, found, "a forward that keeps nothing must follow one that keeps its input")
    state.kept[op.block, op.micro] = op.keep


def _recompute(state: _RankState, op: Recompute) -> None:
    blocks, key = state.plan.blocks, (op.block, op.micro)
    keep = state.kept.pop(key, None)
    _require(state, keep is not None, "a replay must follow a forward that kept less than all")
    state.saved.add(key)
    if keep == "selective":
        return
    _require_params(state, op.block)
    number = blocks.index(op.block)
    if keep == "nothing":
        before = (blocks[number - 1], op.micro)
        _require(state, before in state.replayed, "a replay must follow the replay of the block "
                 "before")  # fmt: skip
        state.replayed.discard(before)
    after = (blocks[number + 1], op.micro) if number + 1 < len(blocks) else None
    if state.kept.get(after) == "nothing":
        state.replayed.add(key)


def _backward(state: _RankState, op: Backward) -> None:
    blocks, key = state.plan.blocks, (op.block, op.micro)
    _require_known(state, op.block)
    _require(state, key not in state.kept, "backward must follow the replay of its block")
    _require(state, key in state.saved, "backward must follow the forward of its block")
    _require_params(state, op.block)
    busy = [key[1] for key in state.in_flight if key[0] == "sync"]
    for bucket in state.plan.buckets:
        if op.block in bucket.blocks:
            free = bucket.index not in busy
            _require(state, free, f"a backward must not add to bucket {bucket.index} while it is "
                     f"summed")  # fmt: skip
    if op.block == blocks[-1]:
        counted = "target_count" in state.sums
        _require(state, counted, "backward must follow ReduceScalars of kind target_count")
    else:
        after = (blocks[blocks.index(op.block) + 1], op.micro)
        found = after in state.grads_of
        _require(state, found, "backward must follow the backward of the block after")
        state.grads_of.discard(after)
    state.saved.discard(key)
    state.backwards.add(key)
    if op.block == blocks[0]:
        state.loaded.discard(op.micro)
    else:
        state.grads_of.add(key)


def _require_params(state: _RankState, block: str) -> None:
    """Require that the parameters a block reads are here, if they are sharded."""
    if state.plan.zero < 3:
        return
    for bucket in state.plan.buckets:
        if block in bucket.blocks:
            here = state.unsharded.get(bucket.index, False)
            _require(state, here, f"block {block} must find the parameters of bucket "
                     f"{bucket.index} gathered")  # fmt: skip


def _known_bucket(state: _RankState, op: StartSync | StartUnshard | GatherParams) -> Bucket:
    buckets = state.plan.buckets
    bucket = buckets[op.bucket] if 0 <= op.bucket < len(buckets) else None
    _require(state, bucket is not None, "a bucket must be in the plan's head")
    _require(state, bucket.count == op.count, f"bucket must have {bucket.count} elements")
    return bucket


def _start_sync(state: _RankState, op: StartSync) -> None:
    zero, micros = state.plan.zero, state.num_micros
    bucket = _known_bucket(state, op)
    article, collective = ("a", "reduce_scatter") if zero else ("an", "all_reduce")
    rule = f"the sum must be {article} {collective} with zero {zero}"
    _require(state, op.collective == collective, rule)
    if zero >= 2:
        _require(state, 0 <= op.micro < micros, f"a sum must be of one of {micros} microbatches")
        summed = [op.micro]
    else:
        _require(state, op.micro == ALL_MICROS, f"the sum must be of all microbatches "
                 f"({ALL_MICROS}) with zero {zero}")  # fmt: skip
        summed = list(range(micros))
    key = ("sync", op.bucket, op.micro)
    often = "once per microbatch" if zero >= 2 else "once per step"
    _require(state, key not in state.started, f"a bucket must be reduced {often}")
    # No gradient can change from here on: no backward of these blocks is left.
    for block in bucket.blocks:
        whose = f"microbatch {op.micro}" if zero >= 2 else f"all {micros} microbatches"
        _require(
            state, all((block, micro) in state.backwards for micro in summed),
            f"a bucket must hold the gradients of {whose} of block {block}",
        )  # fmt: skip
    state.start(key)


def _wait_sync(state: _RankState, op: WaitSync) -> None:
    key = ("sync", op.bucket, op.micro)
    _require(state, key not in state.waited, "a bucket must be waited for once")
    state.waited.add(key)


def _start_unshard(state: _RankState, op: StartUnshard) -> None:
    _require(state, state.plan.zero == 3, "parameters must be gathered by block with zero 3 only")
    _known_bucket(state, op)
    _require(state, op.bucket not in state.unsharded, "a bucket must be freed before it is "
             "gathered again")  # fmt: skip
    state.unsharded[op.bucket] = False
    state.num_gathers += 1
    state.start(("unshard", op.bucket, state.num_gathers))


def _wait_unshard(state: _RankState, op: WaitUnshard) -> None:
    _require(state, not state.unsharded.get(op.bucket, True), "a gather must be waited for once")
    state.unsharded[op.bucket] = True
    state.waited.add(_last_unshard(state, op.bucket))


def _reshard(state: _RankState, op: Reshard) -> None:
    here = state.unsharded.pop(op.bucket, False)
    _require(state, here, "parameters must be gathered before they are freed")


def _gather_params(state: _RankState, op: GatherParams) -> None:
    zero = state.plan.zero
    _require(state, zero in (1, 2), "updated parameters must be gathered with zero 1 or 2 only")
    _known_bucket(state, op)
    _require(state, state.stepped, "updated parameters must be gathered after OptimizerStep")
    key = ("gather", op.bucket)
    _require(state, key not in state.waited, "updated parameters must be gathered once")
    state.waited.add(key)


def _reduce_scalars(state: _RankState, op: ReduceScalars) -> None:
    kinds, micros, last = _sums(state.plan), state.num_micros, state.plan.blocks[-1]
    _require(state, op.kind in kinds, f"kind of a sum must be {' or '.join(kinds)}")
    _require(state, op.kind not in state.sums, f"{op.kind} must be summed once per step")
    meant = (control_count(op.kind, state.plan.mesh.size), *CONTROL_SUMS[op.kind][1:])
    got = (op.count, op.dtype, op.reduction)
    _require(state, got == meant, f"the sum {op.kind} must be of {meant}, and not of {got}")
    if op.kind != "target_count":
        whole = all((last, micro) in state.forwards for micro in range(micros))
        rule = f"the sum {op.kind} must follow the forwards of all {micros} microbatches"
        _require(state, whole, rule)
    if op.kind in ("norm", "non_finite"):
        what = {"norm": "the norm", "non_finite": "the flag"}[op.kind]
        _require(state, state.checked, f"{what} must follow CheckGradients")
    if op.kind == "non_finite" and "norm" in kinds:
        _require(state, "norm" in state.sums, "the flag must follow the sum norm")
    state.sums.add(op.kind)


def _check_gradients(state: _RankState, op: CheckGradients) -> None:
    missing = state.unreduced
    _require(state, not missing, f"the norm must follow WaitSync of buckets {missing}")
    summed = "loss" in state.sums
    _require(state, summed, "CheckGradients must follow ReduceScalars of kind loss")
    _require(state, not state.checked, "a step must check its gradients once")
    state.checked = True


def _optimizer_step(state: _RankState, op: OptimizerStep) -> None:
    _require(state, state.plan.kind == "train", "an evaluation must not update the parameters")
    missing = state.unreduced
    _require(state, not missing, f"the update must follow WaitSync of buckets {missing}")
    agreed = "non_finite" in state.sums
    _require(state, agreed, "the update must follow ReduceScalars of kind non_finite")
    _require(state, not state.stepped, "a step must update once")
    state.stepped = True


def _gather_metrics(state: _RankState, op: GatherMetrics) -> None:
    """Nothing that a rank could lack: only the order over ranks counts, see `_match`."""


_RULES: dict[type[Op], Callable[[_RankState, Any], None]] = {
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
}
"""Op kind -> function: what an op needs and what it leaves on its rank."""


def _execute(state: _RankState) -> None:
    op = state.op
    if type(op) not in _RULES:
        _fail(state, f"{type(op).__name__} must be replaced by a pass before the plan is checked")
    _RULES[type(op)](state, op)


def _check_end(state: _RankState) -> None:
    place = draw_place(state.plan, {state.rank: len(state.plan.ranks[state.rank]) - 1})
    left = {
        "loaded microbatches": state.loaded,
        "block outputs": state.outputs,
        "saved activations": state.saved | state.kept.keys(),
        "replayed outputs": state.replayed,
        "activation gradients": state.grads_of,
        "buckets in flight": {key[1] for key in state.in_flight},
        "gathered parameters of buckets": state.unsharded,
    }
    found = [f"{what} {sorted(things)}" for what, things in left.items() if things]
    if found:
        raise PlanError(
            f"a plan must leave nothing behind; got {' and '.join(found)} on rank {state.rank}:\n"
            f"{place}\nAdd the ops that use or free them."
        )
    if state.plan.kind == "train" and not state.stepped:
        raise PlanError(
            f"a training plan must update the parameters; got no OptimizerStep on rank "
            f"{state.rank}:\n{place}\nAdd one after the last WaitSync."
        )
    plan = state.plan
    if plan.kind == "train" and plan.zero in (1, 2):
        stale = [b.index for b in plan.buckets if ("gather", b.index) not in state.waited]
        if stale:
            raise PlanError(
                f"a plan must gather what the update has changed; got no GatherParams of buckets "
                f"{stale} on rank {state.rank}:\n{place}\nAdd them after OptimizerStep."
            )
    missing = [kind for kind in _sums(plan) if kind not in state.sums]
    if missing:
        raise PlanError(
            f"a plan must sum {' and '.join(_sums(plan))} over all ranks; got none of "
            f"{' and '.join(missing)} on rank {state.rank}:\n{place}\nAdd ReduceScalars."
        )


def _require(state: _RankState, holds: bool, rule: str) -> None:
    if not holds:
        _fail(state, rule)


def _require_known(state: _RankState, block: str) -> None:
    _require(state, block in state.plan.blocks, "a block must be in the plan's head")


def _fail(state: _RankState, rule: str) -> None:
    place = draw_place(state.plan, {state.rank: state.position})
    raise PlanError(f"{rule}; got rank {state.rank}:\n{place}\nFix the order of its ops.")


def draw_place(plan: Plan, marks: dict[int, int]) -> str:
    """Draw the ops around a position of each given rank, with a mark at the position."""
    lines = []
    for rank, position in sorted(marks.items()):
        ops = plan.ranks[rank]
        for index in range(max(0, position - _CONTEXT_OPS), min(len(ops), position + 2)):
            mark = ">>" if index == position else "  "
            lines.append(f"  rank {rank} op {index:4d} {mark} {op_text(ops[index])}")
    return "\n".join(lines)
