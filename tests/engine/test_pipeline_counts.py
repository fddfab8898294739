"""What is counted while a pipeline runs: microbatches in flight, reductions, messages, shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from pipeline_jobs import (
    LENGTH,
    SCHEDULES,
    Case,
    assert_learned,
    learn,
    pipeline_model,
    stage_gradients,
    watch,
    worst_difference,
)
from small_jobs import (
    FLOAT64,
    copies,
    cut,
    make_plans,
    make_state,
    num_targets,
    packed_rows,
    run_engine,
    small_decoder,
)

from mpisim.comm.local import run_threads
from mpisim.config.schema import OptimizerSection
from mpisim.cost.price import message_bytes
from mpisim.engine.step import Engine
from mpisim.layouts.steps import all_reduce_table, reduce_scatter_table
from mpisim.nn.models import build_mlp
from mpisim.plan.check_pipeline import in_flight
from mpisim.plan.ops import (
    Backward,
    BackwardWeight,
    Forward,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)

PLAIN = OptimizerSection(kind="sgd", lr=1.0, momentum=0.0)


# --- in flight -------------------------------------------------------------------------------


def flight(pp, micros, schedule):
    """Return plan, and per rank what was alive at most: bytes by forward, saved microbatches."""
    model = pipeline_model(pp)
    # As many rows in each: all microbatches save as much.
    steps = [cut(packed_rows(2 * micros, 0, LENGTH), 1, micros)]
    nbytes, entries = {}, {}

    def prepare(state):
        nbytes[state.rank], entries[state.rank] = [], 0
        chunk_of = {}

        def act(op):
            step = state.step
            if not chunk_of:
                stages = enumerate(state.stages)
                chunk_of.update({block: s for s, blocks in stages for block in blocks})
            alive = {(chunk_of[block], micro) for block, micro in step.saved}
            entries[state.rank] = max(entries[state.rank], len(alive))
            # The output has left, or was the loss: what is alive is what backwards will read.
            ends = (
                isinstance(op, SendActivation)
                if state.rank < pp - 1
                else (isinstance(op, Forward) and op.block == state.last)
            )
            if ends:
                nbytes[state.rank].append(state.ledger.live["activations"])

        watch(state, act)

    done = run_engine(
        model, steps, pp=pp, schedule=schedule, chunks=SCHEDULES[schedule], prepare=prepare
    )
    return done.plans[0], nbytes, entries


@pytest.mark.parametrize(("pp", "micros"), [(2, 1), (2, 4), (3, 2), (4, 3), (4, 8)])
def test_the_ledger_holds_as_many_microbatches_as_the_schedule_says(pp, micros):
    """1F1B at most min(N - i, M) on stage i, GPipe M, naive one: bytes, in whole microbatches."""
    want = {
        "naive": lambda stage: 1,
        "gpipe": lambda stage: micros,
        "1f1b": lambda stage: min(pp - stage, micros),
    }
    for schedule, most in want.items():
        plan, nbytes, entries = flight(pp, micros, schedule)
        for stage in range(pp):
            readings = nbytes[stage]
            one, rest = divmod(max(readings), readings[0])
            assert len(readings) == micros and readings[0] > 0
            assert (one, rest) == (most(stage), 0), (schedule, stage, readings)
            assert entries[stage] == most(stage) == in_flight(plan, stage)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1"])
@pytest.mark.parametrize(("pp", "micros"), [(2, 1), (2, 4), (3, 3), (4, 8)])
def test_what_is_saved_is_what_the_check_says_is_in_flight(pp, micros, schedule):
    """Chunks count in parts; halves of backwards keep a microbatch until its weights are done."""
    plan, _, entries = flight(pp, micros, schedule)
    for rank in range(pp):
        assert entries[rank] / SCHEDULES[schedule] == in_flight(plan, rank), rank
        if schedule == "zb-h1":
            assert entries[rank] == min(pp, micros)


# --- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("pp", "dp", "schedule"), [(2, 2, "zb-h1"), (2, 3, "interleaved")])
def test_one_reduction_per_bucket_and_step_on_every_stage(pp, dp, schedule, zero):
    """Counted in the transport: one per bucket with ZeRO 0 and 1, M with 2 and 3, under dp x pp.

    `learn` compares all messages and bytes with their price; here they are counted by hand.
    """
    case = Case(pp=pp, dp=dp, zero=zero, schedule=schedule, micros=3, recompute=("full", 2))
    done = learn(case)
    num_steps = len(done.losses)
    times = num_steps * (case.micros if zero >= 2 else 1)
    for state in done.states:
        sent = received = 0
        assert len(state.stores) >= 2
        for store in state.stores:
            if zero:
                table = reduce_scatter_table(store.bucket.count, dp, 8)
            else:
                table = all_reduce_table(store.bucket.count, dp, 8, "auto")
            sent += times * table.sent_messages(state.dp.index)
            received += times * table.received_messages(state.dp.index)
        moved = state.dp.traffic()
        kind, other = ("reduce_scatter", "all_reduce")[:: 1 if zero else -1]
        assert (moved[kind].sent_messages, moved[kind].received_messages) == (sent, received)
        assert sent > 0 and (other not in moved or moved[other].sent_messages == 0)


@pytest.mark.parametrize("codecs", [("none", "none"), ("int4-token", "bf16")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_message_per_boundary_microbatch_and_kind(schedule, codecs):
    """Header and payload formula, difference 0, for both kinds; who sent it to whom, too."""
    case = Case(pp=3, schedule=schedule, micros=3)
    done = learn(case, codecs=codecs)
    num_stages = case.pp * SCHEDULES[schedule]
    for rank, state in enumerate(done.states):
        moved, to = state.links.traffic(), Counter()
        want = {"activation": Counter(), "grad": Counter()}
        for plan in done.plans:
            for op in plan.ranks[rank]:
                if isinstance(op, (SendActivation, RecvActivation, SendGrad, RecvGrad)):
                    kind = "activation" if "Activation" in type(op).__name__ else "grad"
                    way = "sent" if type(op).__name__.startswith("Send") else "received"
                    nbytes = message_bytes(plan, op)
                    want[kind].update({f"{way}_bytes": nbytes, f"{way}_messages": 1})
                    to[op.peer] += nbytes * (way == "sent")
        for kind, fields in want.items():
            assert {name: getattr(moved[kind], name) for name in fields} == fields
        assert state.links.bytes_sent_to() == +to
        stages = [c * case.pp + rank for c in range(SCHEDULES[schedule])]
        leaving = sum(stage < num_stages - 1 for stage in stages)
        assert moved["activation"].sent_messages == len(done.plans) * case.micros * leaving


# --- shapes and pairs ------------------------------------------------------------------------


@pytest.mark.parametrize("micros", [2, 1])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_c090_fewer_microbatches_than_stages(schedule, micros):
    """C090: four stages, warm-up min(P - s - 1, m): 2, 2, 1, 0 and 1, 1, 1, 0; same gradients."""
    case = Case(pp=4, schedule=schedule, micros=micros)
    done = learn(case)
    assert_learned(done, case)
    warm_up = []
    for stage, ops in enumerate(done.plans[0].ranks):
        block = done.plans[0].stages[stage][0]
        kinds = [type(op) for op in ops if getattr(op, "block", "") == block]
        forwards = kinds.index(Backward)
        # In turn comes one forward before each backward, if there are any left.
        warm_up.append(min(forwards, case.pp - stage - 1))
        assert forwards == (min(case.pp - stage, micros) if schedule == "1f1b" else micros)
    want = {2: [2, 2, 1, 0], 1: [1, 1, 1, 0]}
    assert warm_up == want[micros]


def chain():
    """Return two linear stages of one weight each, y = w x, then (w' y - target)^2."""
    return build_mlp(
        input_kind="features", num_features=1, hidden=(1,), activation="relu",
        output=("targets", 1),
    )  # fmt: skip


ONES = {
    "block0.linear.weight": np.ones((1, 1)), "block0.linear.bias": np.zeros(1),
    "head.linear.weight": np.ones((1, 1)), "head.linear.bias": np.zeros(1),
}  # fmt: skip
# The gradient of a mean over two rows is y - target: 10 and 1.
C092_MICROS = [
    (np.array([[1.0]]), np.array([[-9.0]])),
    (np.array([[2.0]]), np.array([[1.0]])),
]


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zb-h1"])
def test_c092_a_backward_takes_what_its_own_forward_saved(schedule):
    """C092: x = [1, 2], gradients [10, 1]: dW = 12, never 21, whatever is in flight."""
    done = run_engine(
        chain(), [[C092_MICROS]], start=ONES, optimizer=PLAIN, pp=2, schedule=schedule
    )
    assert done.rank_grads[0][0]["block0.linear.weight"].tolist() == [[12.0]]
    assert done.rank_grads[0][0]["block0.linear.bias"].tolist() == [11.0]
    assert done.gathered[0]["block0.linear.weight"].tolist() == [[1.0 - 12.0]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_c092_whatever_the_order_of_backwards(order):
    """C092: no schedule may run them in another order than forwards; the engine could."""
    model, steps = chain(), [[C092_MICROS]]
    (plan,) = make_plans(model, steps, schedule="gpipe")
    backwards = [op for op in plan.ranks[0] if isinstance(op, Backward)]
    turned = iter([op for micro in order for op in backwards if op.micro == micro])
    ops = [next(turned) if isinstance(op, Backward) else op for op in plan.ranks[0]]
    # The bucket's sum starts behind the last of them, in either order.
    changed = replace(plan, ranks=(tuple(ops),))
    grads = []

    def body(transport):
        state = make_state(transport, model, plan, start=ONES, optimizer=PLAIN, policy=FLOAT64)
        state.observe_gradients = grads.append
        parts = steps[0][0]
        Engine(state, 1).train_step(changed, 0, copies(parts), num_targets(parts))

    assert not run_threads(body, 1).errors
    assert grads[0]["block0.linear.weight"].tolist() == [[12.0]]


@pytest.mark.parametrize("codecs", [("none", "none"), ("int8", "fp16")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c094_microbatches_of_different_lengths_arrive_whole(schedule, codecs):
    """C094: lengths 3, then 5, then a tail of one row: all of it arrives."""
    model = small_decoder(num_blocks=2, d_model=4, d_ff=4, max_len=5)
    sizes = [(4, 3), (4, 5), (1, 5)]
    micros = [packed_rows(rows, rows + length, length) for rows, length in sizes]
    arrived = {}

    def prepare(state):
        def act(op):
            if isinstance(op, RecvActivation):
                first = state.stages[op.boundary + 1][0]
                x = state.step.flow[first, op.micro]
                assert x.shape == op.shape
                arrived.setdefault(op.boundary, []).append(x.shape[:2])

        watch(state, act)

    want = run_engine(model, [[micros]])
    done = run_engine(
        model, [[micros]], pp=2, schedule=schedule, chunks=SCHEDULES[schedule], prepare=prepare,
        codecs=codecs,
    )  # fmt: skip
    assert arrived == {b: sizes for b in range(2 * SCHEDULES[schedule] - 1)}
    exact = codecs == ("none", "none")
    if exact:
        for grads in stage_gradients(done, Case(), 0):
            assert worst_difference(grads, want.grads[0]) <= 1e-12
    assert done.targets == want.targets
    assert abs(done.losses[0] - want.losses[0]) < (1e-12 if exact else 0.05)


def test_gradients_are_added_in_the_order_of_microbatches():
    """On every rank and for every schedule, so that all of them give the same bits."""
    for schedule in SCHEDULES:
        case = Case(pp=3, schedule=schedule, micros=4)
        (plan, *_) = make_plans(case.model(), case.steps(), **case.options)
        for ops in plan.ranks:
            order = {}
            for op in ops:
                if isinstance(op, (Backward, BackwardWeight)):
                    order.setdefault(op.block, []).append(op.micro)
            assert set(map(tuple, order.values())) == {(0, 1, 2, 3)}, schedule
