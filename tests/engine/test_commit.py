"""The commit itself: what a failure inside it and behind it leaves (B6)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np
import pytest
from planting import (
    ADAMW,
    BIAS,
    FLOAT16,
    FLOAT32,
    WEIGHT,
    decoder_steps,
    linear_steps,
    plant_after_sum,
    write,
)
from small_jobs import (
    FLOAT64,
    after_backward,
    bits_of,
    copies,
    gradients_are_zero,
    linear_model,
    make_plans,
    make_state,
    num_targets,
    run_engine,
    small_decoder,
    snapshot,
    start_engine,
)

from mpisim.comm.local import run_threads
from mpisim.config.schema import OptimizerSection
from mpisim.engine import update
from mpisim.engine.handlers import NON_FINITE
from mpisim.engine.state import EngineState
from mpisim.engine.step import Engine
from mpisim.errors import BatchError, MpisimError
from mpisim.nn.precision import Policy
from mpisim.plan.ops import OptimizerStep

RISKY = ADAMW.model_copy(update={"eps": 0.0})
"""An update that may give 0/0 is made on top of a copy."""
BFLOAT16 = Policy("float32", "bfloat16", "float32", "float32")


class MadeUpError(BaseException):
    """Not even an Exception, as an interrupt from the keyboard."""


class FailingUpdate:
    """`adamw_update` that fails at its n-th call from now on, with half an array written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        real = update.adamw_update

        def failing(param, *rest, **options):
            real(param, *rest, **options)
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    self.left = None
                    raise MadeUpError

        monkeypatch.setattr(update, "adamw_update", failing)


def on_one_rank(
    body: Callable[[EngineState, Engine, Callable[[int], None]], object],
    optimizer: OptimizerSection,
    policy: Policy = FLOAT64,
) -> object:
    """Call ``body(state, engine, step)``; ``step(n)`` trains on the n-th rows."""
    model, steps = small_decoder(), decoder_steps(4)
    plans = make_plans(model, steps, policy=policy)

    def on_rank(transport):
        state = make_state(transport, model, plans[0], policy=policy, optimizer=optimizer)
        engine = Engine(state, 4)

        def step(number: int) -> None:
            (mine,) = steps[number]
            engine.train_step(plans[number], number, copies(mine), num_targets(mine))

        return body(state, engine, step)

    job = run_threads(on_rank, 1)
    for error in job.errors.values():
        raise error
    return job.results[0]


# --- inside ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FLOAT64, FLOAT32, FLOAT16, BFLOAT16])
def test_half_an_update_without_a_copy_ends_the_training(monkeypatch, policy):
    """No step can follow: some weights are those of the update, the others are not."""
    failing = FailingUpdate(monkeypatch)

    def body(state, engine, step):
        step(0)
        assert not state.broken
        before = snapshot(state)
        failing.left = 3
        with pytest.raises(MadeUpError):
            step(1)
        assert state.broken and state.committed == 1
        assert snapshot(state)["master"] != before["master"]
        assert gradients_are_zero(state) and state.step is None
        half = snapshot(state)
        for _ in range(2):
            with pytest.raises(MpisimError, match=r"those of a whole update; .* Start again"):
                step(1)
        assert snapshot(state) == half

    on_one_rank(body, ADAMW, policy)


@pytest.mark.parametrize("policy", [FLOAT64, FLOAT32, FLOAT16, BFLOAT16])
def test_a_copy_brings_everything_back_wherever_the_update_fails(monkeypatch, policy):
    """Parameters, masters, moments, counters; then the run goes on as if nothing had been."""
    failing = FailingUpdate(monkeypatch)

    def body(state, engine, step, fails):
        # Every element moves, so that no moment is 0 when the next update divides by it.
        after_backward(state, 0, lambda state: state.buckets[0].__iadd__(1e-3))
        step(0)
        before = snapshot(state)
        for left in range(len(state.params)) if fails else ():
            failing.left = left
            with pytest.raises(MadeUpError):
                step(1)
            assert failing.left is None
            assert snapshot(state) == before and not state.broken, left
            assert gradients_are_zero(state) and state.step is None
        step(1)
        step(2)
        return snapshot(state)

    failed, fine = (
        on_one_rank(functools.partial(body, fails=fails), RISKY, policy) for fails in (True, False)
    )
    assert failed == fine and failed["committed"] == 3


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("settings", [
    OptimizerSection(kind="adamw", lr=1e5),
    OptimizerSection(kind="sgd", lr=1e5, momentum=0.0),
    OptimizerSection(kind="sgd", lr=1e5, momentum=0.9),
])  # fmt: skip
def test_working_weights_beyond_float16_are_an_error_and_not_infinite(settings, ranks):
    """The masters are fine at 1e5; rounded to float16 they would be infinite."""
    start = {WEIGHT: np.full((1, 1), 3.0), BIAS: np.full(1, -2.0)}
    rows = [[[tuple(a.astype("f4") for a in linear_steps(1)[0][0][0])]] * ranks]
    kept = {}

    def prepare(state):
        kept[state.rank] = snapshot(state)

    job, outcome = start_engine(
        linear_model(), rows, start=start, policy=FLOAT16, optimizer=settings, prepare=prepare
    )
    text = str(next(iter(job.errors.values())))
    assert text.startswith("the update must be finite; got a number that is not at step 0.")
    assert "No update was made" in text and "optimizer.lr" in text
    for rank, state in enumerate(outcome.states):
        assert snapshot(state) == kept[rank]
        assert state.params[WEIGHT].dtype == np.float16 and not state.broken
        assert float(state.params[WEIGHT][0, 0]) == 3.0 and float(state.params[BIAS][0]) == -2.0
        assert state.committed == 0 and gradients_are_zero(state)


@pytest.mark.parametrize("policy", [FLOAT32, BFLOAT16])
def test_the_same_rate_is_fine_where_the_range_is_wide(policy):
    rows = [[[tuple(a.astype("f4") for a in linear_steps(1)[0][0][0])]]]
    settings = OptimizerSection(kind="adamw", lr=1e5)
    (state,) = run_engine(linear_model(), rows, policy=policy, optimizer=settings).states
    assert state.committed == 1
    assert all(np.abs(a.astype("f4")).max() > 65504.0 for a in state.params.values())


@pytest.mark.parametrize("policy", [FLOAT16, BFLOAT16])
def test_masters_that_change_within_an_update_are_refused(policy):
    """B6: forward does not read them, but the update would start from them."""
    name = "block2.qkv.key"

    def body(state, engine, step):
        step(0)
        before, old = snapshot(state), state.master[name][1, 1]

        def act(state):
            # Too little to be seen in the working weights.
            state.master[name][1, 1] = np.nextafter(old, np.float32(9))

        after_backward(state, 0, act)
        with pytest.raises(BatchError, match=rf"weights must stay .* in master of {name} in step"):
            step(1)
        state.observe_op = None
        state.master[name][1, 1] = old
        assert snapshot(state) == before
        step(1)
        assert state.committed == 2

    on_one_rank(body, ADAMW, policy)


# --- agreed on -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_flag_of_another_rank_says_so(bad):
    """Here every number is finite, and it is not here that anybody should look."""
    finished = []

    def prepare(state):
        plant_after_sum(write(bias=np.nan), rank=bad)(state)
        real = state.control.all_reduce

        def all_reduce(array, **options):
            result = real(array, **options)
            if array is state.scalars["non_finite"]:
                # Every rank has its answer before one of them ends.
                everyone.wait()
                finished.append(int(result[0]))
            return result

        state.control.all_reduce = all_reduce

    everyone = threading.Barrier(3, timeout=20.0)
    job, outcome = start_engine(linear_model(), linear_steps(1, 3), overlap=False, prepare=prepare)
    assert finished == [NON_FINITE] * 3 and sorted(job.errors) == [0, 1, 2]
    for rank, error in job.errors.items():
        text = str(error)
        assert type(error) is MpisimError and "No update was made" in text
        if rank == bad:
            assert text.startswith("the gradient norm must be finite; got nan")
        else:
            assert "got a number that is not on another rank in step 0" in text
    assert all(state.committed == 0 and not state.broken for state in outcome.states)


# --- behind ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["op", "gather", "record"])
@pytest.mark.parametrize("policy", [FLOAT64, FLOAT16])
def test_what_fails_behind_the_commit_finds_the_update_made(where, policy):
    """Figures that cannot be gathered or written take no update back; `committed` tells."""

    def body(state, engine, step, fails):
        step(0)
        if fails:
            if where == "op":

                def observe(op):
                    if op == OptimizerStep():
                        raise MadeUpError

                state.observe_op = observe
            else:
                owner, name = {
                    "gather": (state.control, "gather"), "record": (state.recorder, "end_step"),
                }[where]  # fmt: skip

                def full(*_):
                    raise MadeUpError

                setattr(owner, name, full)
            with pytest.raises(MadeUpError):
                step(1)
            state.observe_op = None
            if where != "op":
                delattr(owner, name)
        else:
            step(1)
        assert state.committed == 2 and not state.broken
        assert gradients_are_zero(state) and state.step is None
        made = snapshot(state)
        step(2)
        return made, snapshot(state)

    failed, fine = (
        on_one_rank(functools.partial(body, fails=fails), ADAMW, policy) for fails in (True, False)
    )
    assert failed == fine
    want = run_engine(small_decoder(), decoder_steps(3), optimizer=ADAMW, policy=policy,
                      total_steps=4)  # fmt: skip
    assert bits_of(want.params) == failed[1]["params"]
