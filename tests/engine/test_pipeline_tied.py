"""A table on both ends of a pipeline: one sum, one norm, the same bits for ever.

Gradients are planted where exact numbers matter: what a rank adds is its part of the gradient of
the mean over the whole update, so the sum over replicas and ends is that gradient.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from pipeline_jobs import (
    ADAMW,
    TIED,
    Case,
    assert_learned,
    batches,
    learn,
    pipeline_model,
    watch,
)
from planting import FLOAT16
from small_jobs import cut, make_plans, packed_rows, run_engine

from mpisim.config.schema import OptimizerSection
from mpisim.engine.loss_scale import LossScale
from mpisim.errors import PlanError
from mpisim.layouts.steps import all_reduce_table
from mpisim.plan.check import check_plan
from mpisim.plan.ops import (
    Backward,
    BackwardWeight,
    CheckGradients,
    ExchangeTied,
    GatherMetrics,
    ReduceScalars,
    StartSync,
)

PLAIN = OptimizerSection(kind="sgd", lr=0.125, momentum=0.0)


def tied_store(state):
    """Return the rank's copy of the table, None in the middle of the pipeline."""
    return next((store for store in state.stores if store.bucket.twin >= 0), None)


def own_copy(state):
    """Return the bytes of a rank's part of the table: weights, masters, moments."""
    store = tied_store(state)
    return tuple(a.tobytes() for a in (store.master, store.working, *store.moments))


# --- the same bits ---------------------------------------------------------------------------

NUM_STEPS, SKIPPED = 20, 7


def drifting_run(dp, zero, schedule, pp=2):
    """Train 20 steps in float16 with clipping; one overflows. Return every step's copies."""
    copies = {}

    def prepare(state):
        if tied_store(state) is None:
            return

        def act(op):
            step = state.step.step
            if isinstance(op, GatherMetrics):
                copies[state.rank, step] = (own_copy(state), state.step.skipped)
            last = isinstance(op, (Backward, BackwardWeight)) and op.block == state.last
            if last and op.micro == 0 and step == SKIPPED and state.rank == pp - 1:
                # Of the first replica, on the last stage only: all must skip.
                state.grads[state.blocks[op.block].full_names["norm.weight"]][0] = np.inf

        watch(state, act)

    steps = [cut(packed_rows(7, seed, 3), dp, 2) for seed in range(NUM_STEPS)]
    done = run_engine(
        pipeline_model(pp), steps, policy=FLOAT16, optimizer=ADAMW, prepare=prepare, pp=pp,
        schedule=schedule, chunks=2 if schedule == "interleaved" else 1, zero=zero,
        loss_scale=LossScale("dynamic", 2.0**10, growth_interval=4),
    )  # fmt: skip
    return done, copies


@pytest.mark.parametrize(
    ("dp", "zero", "schedule"), [(3, 0, "1f1b"), (3, 2, "interleaved"), (4, 1, "zb-h1")]
)
def test_c097_tied_copies_never_drift(dp, zero, schedule):
    """C097: max|first - last| = 0 at every step, with clipping, float16 and a skipped step."""
    done, copies = drifting_run(dp, zero, schedule)
    assert len(copies) == 2 * dp * NUM_STEPS
    for step in range(NUM_STEPS):
        for replica in range(dp):
            first, last = copies[2 * replica, step], copies[2 * replica + 1, step]
            assert first == last, (step, replica)
            assert first[1] == (step == SKIPPED)
            if zero == 0:
                assert first == copies[0, step], (step, replica)
    # They do change, but for the skipped step.
    history = [copies[0, step][0] for step in range(NUM_STEPS)]
    same = [step for step in range(1, NUM_STEPS) if history[step] == history[step - 1]]
    assert same == [SKIPPED]
    assert max(done.norms) > ADAMW.clip_norm
    tables = {params[TIED].tobytes() for params in done.gathered if TIED in params}
    assert len(tables) == 1


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [3, 4])
def test_c097_tied_copies_never_drift_in_any_layout(dp, zero, schedule):
    test_c097_tied_copies_never_drift(dp, zero, schedule)


def test_tied_copies_start_from_the_same_bits():
    """M4: the same seed and name give the same table on both ends."""
    found = {}

    def prepare(state):
        if tied_store(state) is not None:
            found[state.rank] = own_copy(state)

    run_engine(
        pipeline_model(3), [cut(packed_rows(4, 0, 3), 2, 1)], pp=3, optimizer=ADAMW, prepare=prepare
    )
    assert sorted(found) == [0, 2, 3, 5] and len(set(found.values())) == 1


# --- exact numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("zero", range(4))
def test_c096_both_ends_add_up_before_anything_is_divided(zero, overlap):
    """C096: means (1 + 3) / 2 + (5 + 7) / 2 = 8 on every owner, not 7 or 9.

    Here a replica's gradient is its part of the mean over all replicas: g / 2 of two. The sum of
    all four parts, 0.5 + 1.5 + 2.5 + 3.5, is the same 8.
    """
    parts = {(0, 0): 1 / 2, (1, 0): 3 / 2, (0, 1): 5 / 2, (1, 1): 7 / 2}
    seen = {}

    def prepare(state):
        place = divmod(state.rank, 2)
        end = state.first if state.first in state.blocks else state.last

        def act(op):
            if op == Backward(end, 0):
                state.grads[TIED][...] = parts[place]
            if isinstance(op, CheckGradients):
                seen[place] = tied_store(state).own_grads.copy()

        watch(state, act)

    done = run_engine(
        pipeline_model(2), [cut(packed_rows(4, 0, 3), 2, 1)], pp=2, zero=zero, overlap=overlap,
        optimizer=PLAIN, prepare=prepare, start={TIED: np.zeros((1, 1))},
    )  # fmt: skip
    for replica, stage in parts:
        owned = seen[replica, stage]
        assert owned.size and set(owned.tolist()) == {8.0}
        table = done.gathered[2 * replica + stage][TIED]
        assert set(table.reshape(-1).tolist()) == {-0.125 * 8.0}
    whole = done.gathered[0][TIED].size
    for stage in (0, 1):
        sizes = [seen[replica, stage].size for replica in (0, 1)]
        assert sum(sizes) == (2 * whole if zero == 0 else whole)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (2, 2), (3, 3)])
def test_c036_a_tied_table_counts_once_in_the_norm(pp, dp, zero):
    """C036: the table's gradient has norm 3, all others 4: together 5, not 5.831."""

    def prepare(state):
        def act(op):
            if isinstance(op, ReduceScalars) and op.kind == "loss":
                for store in state.stores:
                    store.own_grads[...] = 0.0
                    if store.bucket.twin >= 0:
                        store.own_grads[...] = 3.0 / np.sqrt(store.bucket.count)
                    elif store.bucket.blocks == ("block0",):
                        store.own_grads[...] = 4.0 / np.sqrt(store.bucket.count)

        watch(state, act)

    done = run_engine(
        pipeline_model(pp), [cut(packed_rows(4, 0, 3), dp, 2)], pp=pp, zero=zero, prepare=prepare,
        optimizer=PLAIN.model_copy(update={"clip_norm": 1.0}),
    )  # fmt: skip
    norms = {step.grad_norm for steps in done.done for step in steps}
    assert len(norms) == 1 and norms.pop() == pytest.approx(5.0, rel=1e-15)


@pytest.mark.parametrize("zero", [0, 2])
def test_c089_a_tied_table_is_summed_once_though_two_blocks_add_to_it(zero):
    """C089: recompute on, two replicas: one reduction of the summed gradient per step.

    A second one is refused by name before anything runs.
    """
    case = Case(pp=2, micros=3, recompute=("full", 2), dp=2, zero=zero)
    done = learn(case)
    assert_learned(done, case)
    for rank, state in enumerate(done.states):
        ops = done.plans[0].ranks[rank]
        bucket = tied_store(state).bucket
        starts = [op for op in ops if isinstance(op, StartSync) and op.bucket == bucket.index]
        assert len(starts) == (case.micros if zero == 2 else 1)
        exchanges = [op for op in ops if isinstance(op, ExchangeTied)]
        assert len(exchanges) == 1
        # All that the two ends tell each other, counted in the transport: a table per step.
        sent = state.tied.traffic()["all_reduce"].sent_messages
        table = all_reduce_table(exchanges[0].count, 2, 8, state.tied.algorithm)
        assert sent == len(batches()) * table.sent_messages(state.tied.index)
    plan = done.plans[0]
    ops = list(plan.ranks[0])
    ops.insert(ops.index(exchange := next(op for op in ops if isinstance(op, ExchangeTied))),
               exchange)  # fmt: skip
    again = type(plan)(**{**vars(plan), "ranks": (tuple(ops), *plan.ranks[1:])})
    with pytest.raises(PlanError, match="two ends must be added up once per step"):
        check_plan(again)


def test_no_layout_has_a_table_of_its_own_on_each_end():
    """A copy that nobody adds up would be an untied model."""
    model = pipeline_model(4)
    for dp, zero in itertools.product((1, 2), range(4)):
        (plan,) = make_plans(model, [cut(packed_rows(8, 0, 3), dp, 2)], pp=4, zero=zero)
        names = Counter(param.name for bucket in plan.buckets for param in bucket.params)
        assert {name for name, count in names.items() if count > 1} == {TIED}
        copies = [bucket for bucket in plan.buckets if bucket.twin >= 0]
        assert [bucket.is_copy for bucket in copies] == [False, True]
        assert copies[0].params == copies[1].params
