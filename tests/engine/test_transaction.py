"""An update that fails leaves nothing behind (B6)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from planting import ADAMW, BIAS, FLOAT16, FLOAT32, WEIGHT, decoder_steps, linear_steps
from small_jobs import (
    FLOAT64,
    VOCAB,
    after_backward,
    assert_close,
    bits_of,
    copies,
    gradients_are_zero,
    linear_model,
    make_plans,
    make_state,
    num_targets,
    rows_of,
    run_engine,
    small_decoder,
    snapshot,
    start_engine,
)

from mpisim.comm.local import run_threads
from mpisim.config.schema import OptimizerSection
from mpisim.data.batch import Batch
from mpisim.engine.loss_scale import LossScale
from mpisim.engine.step import Engine
from mpisim.engine.update import clear_gradients
from mpisim.errors import BatchError, CommError, MpisimError, PeerLost
from mpisim.nn.precision import Policy
from mpisim.plan.ops import ALL_MICROS, LoadBatch, OptimizerStep, StartSync, WaitSync


def good_then_bad(
    bad: Callable[[Engine, Any, list], None], *, ranks: int = 1, recompute: str = "none",
    policy: Policy = FLOAT64, optimizer: OptimizerSection = ADAMW, dropout: float = 0.3,
    loss_scale: LossScale | None = None,
) -> None:  # fmt: skip
    """Make two good steps, one that `bad` lets fail on every rank, and one good step again."""
    model, steps = small_decoder(dropout), decoder_steps(4, ranks, 2)
    plans = make_plans(model, steps, recompute=recompute, policy=policy, bucket_bytes=700)

    def body(transport, with_failure):
        state = make_state(
            transport, model, plans[0], optimizer=optimizer, policy=policy, loss_scale=loss_scale
        )
        engine = Engine(state, 4)
        for number in (0, 1, 2, 3):
            mine = steps[number][transport.rank]
            if number != 2:
                engine.train_step(plans[number], number, copies(mine), num_targets(mine))
            elif with_failure:
                before = snapshot(state)
                bad(engine, plans[number], mine)
                assert snapshot(state) == before
                assert gradients_are_zero(state)
                assert state.step is None and state.ledger.live["activations"] == 0
        return snapshot(state)

    jobs = [
        run_threads(functools.partial(body, with_failure=failing), ranks)
        for failing in (True, False)
    ]
    for job in jobs:
        for error in job.errors.values():
            raise error
    assert jobs[0].results == jobs[1].results


def spoiled(parts: list, change: Callable[[Batch], Batch]) -> list:
    """Change the second microbatch: the first has filled the gradients by then."""
    return [parts[0], change(Batch(*(a.copy() for a in parts[1])))]


def longer(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, array[:, :1]], axis=1)


def with_value(array: np.ndarray, value: int) -> np.ndarray:
    array[0, 2] = value
    return array


BROKEN = {
    "longer rows": (lambda b: Batch(*map(longer, b)), "must have inputs of shape"),
    "a row less": (lambda b: Batch(*(a[1:] for a in b)), "must have inputs of shape"),
    "a target row less": (lambda b: b._replace(targets=b.targets[1:]), "as many targets"),
    "shorter targets": (lambda b: b._replace(targets=b.targets[:, 1:]), "targets must be"),
    "an id out of range": (lambda b: b._replace(x=with_value(b.x, VOCAB)), "token ids must be"),
    "a negative id": (lambda b: b._replace(x=with_value(b.x, -1)), "token ids must be"),
    "float ids": (lambda b: b._replace(x=b.x.astype("f4")), "token ids must be"),
    "a target out of range": (
        lambda b: b._replace(targets=with_value(b.targets, VOCAB)), "targets must be",
    ),
    "a target below -1": (
        lambda b: b._replace(targets=with_value(b.targets, -2)), "targets must be",
    ),
    "starts after their token": (
        lambda b: b._replace(starts=with_value(b.starts, 5)), "document's start must be",
    ),
    "starts of another shape": (
        lambda b: b._replace(starts=longer(b.starts)), "document starts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_microbatch_leaves_nothing_behind(what, recompute):
    """B6: wrong shape, wrong values: one BatchError, and the next update is that of a good run."""
    change, text = BROKEN[what]

    def bad(engine, plan, mine):
        with pytest.raises(BatchError, match=text):
            engine.train_step(plan, 2, copies(spoiled(mine, change)), num_targets(mine))

    good_then_bad(bad, recompute=recompute)


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("policy", [FLOAT64, FLOAT16])
def test_a_wrong_count_leaves_nothing_behind(off, policy):
    """B6: the denominator was announced before the rows were loaded."""

    def bad(engine, plan, mine):
        count = num_targets(mine)
        with pytest.raises(BatchError, match=f"got {count} instead of {count + off} on rank 0"):
            engine.train_step(plan, 2, copies(mine), count + off)

    good_then_bad(bad, policy=policy)


@pytest.mark.parametrize("value", [1e-300, np.nan, -1.0])
def test_dirty_gradients_are_refused(value):
    """B6: somebody else's numbers are not added to the update, nor thrown away silently."""

    def bad(engine, plan, mine):
        state = engine.state
        state.grads["block1.down.weight"][1, 1] = value
        for _ in range(2):
            with pytest.raises(BatchError, match=r"must be zero .* in block1\.down\.weight\. Call"):
                engine.train_step(plan, 2, copies(mine), num_targets(mine))
        assert state.step is None
        clear_gradients(state)

    good_then_bad(bad)


@pytest.mark.parametrize("policy", [FLOAT64, FLOAT16])
def test_weights_that_change_within_an_update_are_refused(policy):
    """B6, stale weights: half of the gradients would belong to another function."""

    def bad(engine, plan, mine):
        state = engine.state
        weight = state.params["block2.qkv.key"]
        before = weight.copy()
        after_backward(state, 0, lambda state: weight.__setitem__((1, 1), 0.5))
        with pytest.raises(BatchError, match=r"weights must stay .* block2\.qkv\.key in step 2"):
            engine.train_step(plan, 2, copies(mine), num_targets(mine))
        state.observe_op = None
        weight[...] = before

    good_then_bad(bad, policy=policy)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["weights", "count", "shape"])
def test_what_only_one_rank_refuses_no_rank_commits(rank, what):
    """B6: the others learn of it before they decide, so no replica is ahead of another."""
    steps = decoder_steps(2, 2, 2)
    if what == "shape":
        steps[1][rank][1] = Batch(*map(longer, steps[1][rank][1]))

    def prepare(state):
        def act(state):
            if what == "weights":
                state.params["block2.qkv.key"][1, 1] += 1.0
            elif what == "count":
                state.step.num_targets += 1

        if state.rank == rank:
            after_backward(state, 0, act, step=1)

    if what == "shape":
        plans = make_plans(small_decoder(), decoder_steps(2, 2, 2))

    def body(transport):
        state = make_state(transport, small_decoder(), plans[0], optimizer=ADAMW)
        states[transport.rank] = state
        engine = Engine(state, 2)
        for number, parts in enumerate(steps):
            mine = parts[transport.rank]
            engine.train_step(plans[number], number, copies(mine), num_targets(mine))

    if what == "shape":
        states = [None, None]
        job = run_threads(body, 2)
    else:
        job, outcome = start_engine(small_decoder(), steps, optimizer=ADAMW, prepare=prepare)
        states = outcome.states
    assert type(job.errors[rank]) is BatchError
    assert isinstance(job.errors[1 - rank], PeerLost)
    want = run_engine(small_decoder(), decoder_steps(1, 2, 2), optimizer=ADAMW, total_steps=2)
    for state, same in zip(states, want.states, strict=True):
        assert state.committed == 1 and gradients_are_zero(state)
        assert snapshot(state)["moments"] == snapshot(same)["moments"]
        if what != "weights" or state.rank != rank:
            assert bits_of(state.params) == bits_of(same.params)


def test_no_step_follows_one_that_failed_with_gradients_on_their_way():
    """What was sent for the failed step would be added into the next one, without a word."""
    steps = decoder_steps(2, 2, 1)
    plans = make_plans(small_decoder(), steps, bucket_bytes=1)
    finished = threading.Barrier(2, timeout=20.0)

    def body(transport):
        state = make_state(transport, small_decoder(), plans[0], optimizer=ADAMW)
        engine, before = Engine(state, 2), snapshot(state)

        def observe(op):
            # Rank 1 fails before it starts what rank 0 has started.
            if isinstance(op, LoadBatch if transport.rank else StartSync):
                raise MadeUpError

        state.observe_op = observe
        mine = steps[0][transport.rank]
        with pytest.raises(MadeUpError):
            engine.train_step(plans[0], 0, copies(mine), num_targets(mine))
        state.observe_op = None
        assert state.dp.idle is (transport.rank == 1)
        if transport.rank == 0:
            mine = steps[1][0]
            with pytest.raises(CommError, match=r"a step that failed must be finished .* step 1\."):
                engine.train_step(plans[1], 1, copies(mine), num_targets(mine))
        assert snapshot(state) == before and gradients_are_zero(state)
        finished.wait()

    job = run_threads(body, 2, timeout_s=20.0)
    assert not job.errors, job.errors


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_update_without_a_target_is_refused(ranks):
    """Zero valid targets over all ranks: named on every rank, before anything is computed."""

    def bad(engine, plan, mine):
        none = [batch._replace(targets=np.full_like(batch.targets, -1)) for batch in mine]
        with pytest.raises(BatchError, match="at least one valid target .*got 0 in step 2"):
            engine.train_step(plan, 2, copies(none), 0)

    good_then_bad(bad, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("where", [(0, 0), (-1, 1)])
def test_a_microbatch_without_a_target_weighs_nothing(ranks, where):
    """Issue: target count 0 in a microbatch or on a rank is fine."""
    parts = decoder_steps(1, ranks, 2, rows=6)[0]
    rank, micro = where
    batch = parts[rank][micro]
    parts[rank][micro] = batch._replace(targets=np.full_like(batch.targets, -1))
    rest = [b for micros in parts for b in micros if b is not parts[rank][micro]]
    whole = Batch(*(np.concatenate(arrays) for arrays in zip(*rest, strict=True)))
    got = run_engine(small_decoder(), [parts] * 3, optimizer=ADAMW)
    want = run_engine(small_decoder(), [[[whole]]] * 3, optimizer=ADAMW)
    assert got.targets == want.targets == [whole.num_targets] * 3
    assert_close(got.params, want.params, 1e-12)


class MadeUpError(BaseException):
    """Not even an Exception, as an interrupt from the keyboard."""


def test_a_failure_after_any_op_leaves_nothing_behind():
    """B6 at every place: after each op before the update, with replays and a chunked loss."""
    model = small_decoder(0.3, loss_chunk_tokens=4)
    steps = decoder_steps(4, 1, 2)
    plans = make_plans(model, steps, recompute="full", every=2, bucket_bytes=700)
    ops = plans[0].ranks[0]
    end = ops.index(OptimizerStep())
    assert end > 40

    def body(transport, failing):
        state = make_state(transport, model, plans[0], optimizer=ADAMW)
        engine = Engine(state, 4)
        engine.train_step(plans[0], 0, copies(steps[0][0]), num_targets(steps[0][0]))
        before, mine = snapshot(state), steps[1][0]
        for index in range(end) if failing else ():
            left = [index]

            def observe(op, left=left):
                left[0] -= 1
                if left[0] < 0:
                    raise MadeUpError

            state.observe_op = observe
            with pytest.raises(MadeUpError):
                engine.train_step(plans[1], 1, copies(mine), num_targets(mine))
            assert snapshot(state) == before, ops[index]
            assert gradients_are_zero(state) and state.step is None, ops[index]
        state.observe_op = None
        engine.train_step(plans[2], 2, copies(steps[2][0]), num_targets(steps[2][0]))
        return snapshot(state)

    failed, fine = (
        run_threads(functools.partial(body, failing=failing), 1) for failing in (True, False)
    )
    for job in (failed, fine):
        for error in job.errors.values():
            raise error
    assert failed.results == fine.results


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", [FLOAT64, FLOAT32, FLOAT16])
def test_a_late_failure_restores_everything(ranks, policy):
    """Squares of finite gradients overflow in the second moment: half the arrays had changed."""
    large = 1e200 if policy is FLOAT64 else 1e30
    settings = ADAMW.model_copy(update={"clip_norm": 0.0})

    def bad(engine, plan, mine):
        state = engine.state

        def observe(op):
            if op == WaitSync(len(state.buckets) - 1, ALL_MICROS):
                # The last array to be updated.
                state.grads["head.norm.weight"][-1] = large

        state.observe_op = observe
        with pytest.raises(MpisimError, match=r"the update must be finite; .*step 2.*optimizer"):
            engine.train_step(plan, 2, copies(mine), num_targets(mine))
        state.observe_op = None

    good_then_bad(bad, ranks=ranks, policy=policy, optimizer=settings)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_update_of_zero_by_zero_restores_everything(ranks):
    """eps = 0 and no gradient yet: 0/0; the next rows have one, and the run goes on."""
    settings = OptimizerSection(kind="adamw", lr=0.1, eps=0.0)
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((2, 1)) + 2, rng.standard_normal((2, 1)) - 5)
    flat = (np.zeros((2, 1)), rows[1])  # no gradient of the weight
    plans = make_plans(linear_model(), [[[rows]] * ranks])

    def body(transport, failing):
        state = make_state(transport, linear_model(), plans[0], optimizer=settings)
        engine, before = Engine(state, 2), snapshot(state)
        if failing:
            with pytest.raises(MpisimError, match=r"the update must be finite.*optimizer\.eps"):
                engine.train_step(plans[0], 0, copies([flat]), 2)
            assert snapshot(state) == before and gradients_are_zero(state)
        engine.train_step(plans[0], 1, copies([rows]), 2)
        return snapshot(state)

    failed, fine = (
        run_threads(functools.partial(body, failing=failing), ranks) for failing in (True, False)
    )
    assert not failed.errors and not fine.errors, (failed.errors, fine.errors)
    assert failed.results == fine.results


@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSection(kind="sgd", lr=1e308, momentum=0.9),
        OptimizerSection(kind="adamw", lr=1e308, weight_decay=0.5),
        OptimizerSection(kind="adamw", lr=10.0, weight_decay=1e307),
    ],
)
def test_a_rate_that_leaves_the_range_restores_everything(settings):
    start = {WEIGHT: np.full((1, 1), 100.0), BIAS: np.zeros(1)}
    job, outcome = start_engine(linear_model(), linear_steps(1), start=start, optimizer=settings)
    assert "the update must be finite" in str(job.errors[0])
    (state,) = outcome.states
    assert state.params[WEIGHT][0, 0] == 100.0 and state.params[BIAS][0] == 0.0
    assert not any(array.any() for moments in state.moments.values() for array in moments)
    assert state.committed == 0 and gradients_are_zero(state)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_decay_that_blows_a_weight_up_is_found(kind):
    """lr * decay = 1e5: a weight without gradient grows 1e5-fold a step, with modest norms."""
    settings = OptimizerSection(kind=kind, lr=1.0, momentum=0.0, weight_decay=1e5)
    rows = tuple(a.astype("f4") for a in rows_of([0.5]))
    start = {WEIGHT: np.ones((1, 1)), BIAS: np.zeros(1)}
    job, outcome = start_engine(
        linear_model(), [[[rows]]] * 20, start=start, policy=FLOAT32, optimizer=settings
    )
    assert "the update must be finite" in str(job.errors[0])
    assert np.isfinite(outcome.states[0].params[WEIGHT]).all()


def test_an_evaluation_that_fails_leaves_nothing_behind():
    from mpisim.plan.build import build_eval_plan

    model, (parts,) = small_decoder(), decoder_steps(1, 1, 2)
    plans = make_plans(model, [parts])
    evaluation = build_eval_plan(
        mesh=plans[0].mesh, specs=lambda rows, length: model.spec(rows, np.dtype("f8"), length),
        rows=plans[0].rows, dtype="float64", algorithm="auto",
    )  # fmt: skip

    def body(transport):
        state = make_state(transport, model, plans[0])
        engine, before = Engine(state, 1), snapshot(state)
        for change, text in BROKEN.values():
            with pytest.raises(BatchError, match=text):
                engine.evaluate(evaluation, 0, copies(spoiled(parts[0], change)))
            assert snapshot(state) == before and state.step is None

    job = run_threads(body, 1)
    assert not job.errors, job.errors
