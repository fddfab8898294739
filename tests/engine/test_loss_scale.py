"""The loss scale: divided out exactly, lowered together, never for ever (B2, B6; class B)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from planting import (
    ADAMW,
    BIAS,
    FLOAT16,
    FLOAT32,
    SGD,
    WEIGHT,
    ZERO,
    decoder_steps,
    linear_steps,
    plant,
    plant_after_sum,
    write,
)
from small_jobs import (
    FLOAT64,
    after_backward,
    assert_close,
    bits_of,
    gradients_are_zero,
    linear_model,
    rows_of,
    run_engine,
    small_decoder,
    snapshot,
    start_engine,
)

from mpisim.config.schema import OptimizerSection
from mpisim.engine.handlers import NON_FINITE
from mpisim.engine.loss_scale import LossScale
from mpisim.errors import LossScaleError
from mpisim.plan.ops import GatherMetrics


@pytest.mark.parametrize("scale", [2.0**-3, 128.0, 65536.0])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD.model_copy(update={"clip_norm": 0.1})])
def test_a_power_of_two_changes_no_bit(scale, optimizer):
    """B2: divided out before norm, clipping and update, so nothing of it remains."""
    steps = decoder_steps(4, ranks=2, micros=2)
    plain, scaled = (
        run_engine(small_decoder(0.3), steps, optimizer=optimizer, loss_scale=loss_scale)
        for loss_scale in (None, LossScale("static", scale))
    )
    assert scaled.norms == plain.norms and scaled.losses == plain.losses
    assert bits_of(scaled.params) == bits_of(plain.params)
    for got, want in zip(scaled.grads, plain.grads, strict=True):
        assert bits_of(got) == bits_of(want)
    assert {step.loss_scale for step in scaled.done[0]} == {scale}


def test_any_other_scale_changes_rounding_only():
    plain, scaled = (
        run_engine(small_decoder(), decoder_steps(4), optimizer=ADAMW, loss_scale=loss_scale)
        for loss_scale in (None, LossScale("static", 3.7))
    )
    assert_close(scaled.params, plain.params, 1e-12)


@pytest.mark.parametrize("where", ["before the sum", "after the sum"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_c019_what_one_rank_sees_all_ranks_skip(where, rank, bad):
    """C019: scale 2, back-off 0.5: both scales become 1, weights stay in every bit."""
    plant_it = plant if where == "before the sum" else plant_after_sum
    done = run_engine(
        linear_model(), [[[rows_of([1.0])], [rows_of([1.0])]]], start=ZERO, optimizer=SGD,
        overlap=False, prepare=plant_it(write(bias=bad), rank=rank),
        loss_scale=LossScale("dynamic", 2.0),
    )  # fmt: skip
    for state, (step,) in zip(done.states, done.done, strict=True):
        assert step.skipped and step.found_non_finite
        assert (state.loss_scale.value, state.loss_scale.num_skipped) == (1.0, 1)
        assert state.committed == 0 and gradients_are_zero(state)
        assert not any(array.any() for array in state.params.values())
        # The maximum of the flags, not how many ranks saw it.
        assert state.scalars["non_finite"].tolist() == [NON_FINITE]


def test_c019_a_rank_without_rows_takes_part():
    """C019, second run: an empty share contributes 0 and does not raise."""
    none = rows_of([])
    steps = [[[rows_of([1.0])], [none]]] * 2
    done = run_engine(
        linear_model(), steps, start=ZERO, optimizer=SGD, overlap=False,
        prepare=plant(write(bias=np.inf), rank=0, step=0), loss_scale=LossScale("dynamic", 2.0),
    )  # fmt: skip
    assert [[step.skipped for step in rank] for rank in done.done] == [[True, False]] * 2
    assert [state.loss_scale.value for state in done.states] == [1.0, 1.0]
    assert [state.params[BIAS][0] for state in done.states] == [2.0, 2.0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_c020_clipped_after_the_scale_is_divided_out(scale, ranks):
    """C020: true gradient [3, 4], limit 1: [0.6, 0.8], whatever the scale."""
    share = scale / ranks
    done = run_engine(
        linear_model(), [[[rows_of([1.0])]] * ranks], start=ZERO, overlap=False,
        optimizer=SGD.model_copy(update={"clip_norm": 1.0}),
        prepare=plant(write(weight=3 * share, bias=4 * share)),
        loss_scale=LossScale("static", scale),
    )  # fmt: skip
    assert done.norms == [5.0]
    assert done.params[WEIGHT][0, 0] == pytest.approx(-0.6, rel=1e-15)
    assert done.params[BIAS][0] == pytest.approx(-0.8, rel=1e-15)
    # What is observed is the true gradient, not clipped.
    assert (done.grads[0][WEIGHT][0, 0], done.grads[0][BIAS][0]) == (3.0, 4.0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_c022_the_growth_counter_starts_anew_after_a_skip(ranks):
    """C022: 1024, growth every 2; good, overflow, good, good: 1024, 512, 512, 1024."""
    seen: list[list] = [[] for _ in range(ranks)]

    def prepare(state):
        plant(write(bias=np.inf), rank=ranks - 1, step=1)(state)
        inner = state.observe_op

        def observe(op):
            if inner is not None:
                inner(op)
            if isinstance(op, GatherMetrics):
                seen[state.rank].append((state.loss_scale.value, state.loss_scale.good_steps))

        state.observe_op = observe

    done = run_engine(
        linear_model(), linear_steps(4, ranks), prepare=prepare, overlap=False,
        loss_scale=LossScale("dynamic", 1024.0, growth_interval=2),
    )  # fmt: skip
    assert seen == [[(1024.0, 1), (512.0, 0), (512.0, 1), (1024.0, 0)]] * ranks
    # The scale of a step is fixed before it.
    assert [step.loss_scale for step in done.done[0]] == [1024.0, 1024.0, 512.0, 512.0]


def test_the_scale_of_a_step_is_fixed_within_it():
    """B1: growth after every update, four microbatches: one scale for all of them."""
    seen = []

    def prepare(state):
        for micro in range(4):
            after_backward(state, micro, lambda state: seen.append(state.step.loss_scale))

    run_engine(
        small_decoder(), decoder_steps(3, micros=4), prepare=prepare,
        loss_scale=LossScale("dynamic", 128.0, growth_interval=1),
    )  # fmt: skip
    assert seen == [128.0] * 4 + [256.0] * 4 + [512.0] * 4


@pytest.mark.parametrize("kind", ["none", "static"])
def test_only_a_dynamic_scale_moves_or_skips(kind):
    scale = LossScale(kind, 8.0, growth_interval=1)
    assert not scale.skips
    scale.commit()
    assert (scale.value, scale.good_steps) == (8.0, 0)


@pytest.mark.parametrize(
    ("kind", "policy", "said"),
    [
        ("none", FLOAT64, ["gradient norm must be finite"]),
        ("static", FLOAT64, ["got a number that is not at loss scale 128", "'dynamic'"]),
        ("none", FLOAT16, ["got a number that is not at loss scale 1 in step 0", "'dynamic'"]),
    ],
)
def test_a_fixed_scale_ends_the_run_instead_of_skipping(kind, policy, said):
    """The remedy is that of the scale if a scale may be what overflowed."""
    value = 1.0 if kind == "none" else 128.0
    steps = linear_steps(2, 2)
    if policy is FLOAT16:
        steps = [[[tuple(a.astype("f4") for a in b) for b in p] for p in parts] for parts in steps]
    job, outcome = start_engine(
        linear_model(), steps, start=ZERO, overlap=False, policy=policy,
        prepare=plant(write(bias=np.inf), rank=1, step=0), loss_scale=LossScale(kind, value),
    )  # fmt: skip
    # A rank may see that another has ended before it raises itself.
    text = str(next(iter(job.errors.values())))
    assert all(part in text for part in [*said, "No update was made"]), text
    assert sorted(job.errors) == [0, 1]
    for state in outcome.states:
        assert state.committed == 0 and gradients_are_zero(state)
        assert not any(array.any() for array in state.params.values())
        assert state.loss_scale == LossScale(kind, value)


def test_the_scale_never_grows_out_of_range():
    """A scale beyond float32 makes every seed infinite; half of infinity is infinite, too."""
    for first in (2.0**120, 1e38, 3e38):
        scale = LossScale("dynamic", first, growth_interval=1)
        for _ in range(2000):
            scale.commit()
        assert first <= scale.value <= np.finfo(np.float32).max
        scale.skip(0)
        assert scale.value < np.finfo(np.float32).max / 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_scale_at_its_floor_ends_the_run(ranks):
    """M2: no endless loop: 4 -> 2 -> 1, and the third skip is an error on every rank."""
    job, outcome = start_engine(
        linear_model(), linear_steps(50, ranks), start=ZERO, overlap=False,
        prepare=plant(write(bias=np.inf), rank=ranks - 1),
        loss_scale=LossScale("dynamic", 4.0, min_scale=1.0),
    )  # fmt: skip
    first = next(iter(job.errors.values()))
    assert type(first) is LossScaleError
    text = str(first)
    assert text.startswith("the loss scale must stay at or above precision.min_scale = 1; got ")
    assert "at scale 1 in step 2, after 3 skipped steps. No update was made." in text
    for state, done in zip(outcome.states, outcome.done, strict=True):
        assert [step.skipped for step in done] == [True, True]
        assert state.loss_scale.value == 1.0 and state.loss_scale.num_skipped == 2
        assert state.committed == 0 and gradients_are_zero(state)
        assert not any(array.any() for array in state.params.values())


def test_c024_a_skipped_step_uses_up_no_rate():
    """C024: lr(t) = 0.1 t; ok, skip, ok: 0.1, (0.2 not applied), 0.2."""
    settings = OptimizerSection(kind="sgd", lr=1.0, momentum=0.0, warmup_steps=10)
    done = run_engine(
        linear_model(), [[[rows_of([1.0])] * 2]] * 3, start=ZERO, optimizer=settings,
        overlap=False, loss_scale=LossScale("dynamic", 2.0), total_steps=100,
        prepare=plant(write(bias=np.inf), step=1, micro=1),
    )  # fmt: skip
    (state,) = done.states
    assert [step.lr for step in done.done[0]] == pytest.approx([0.1, 0.2, 0.2], rel=1e-15)
    assert [step.skipped for step in done.done[0]] == [False, True, False]
    assert [step.step for step in done.done[0]] == [0, 1, 2]
    assert [step.update_number for step in done.done[0]] == [1, 2, 2]
    assert (state.committed, state.loss_scale.num_skipped) == (2, 1)
    # b = 0: gradient -2 and rate 0.1; then b = 0.2: gradient -1.6 and rate 0.2.
    assert state.params[BIAS][0] == pytest.approx(0.2 + 0.2 * 1.6, rel=1e-15)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_c026_an_infinite_gradient_never_reaches_the_optimizer(optimizer, clip_norm):
    """C026: coefficient 1/inf = 0 and 0 * inf is NaN: skipped, moments as they were."""
    done = run_engine(
        linear_model(), linear_steps(3), start=ZERO, overlap=False,
        optimizer=OptimizerSection(kind=optimizer, lr=0.1, clip_norm=clip_norm),
        loss_scale=LossScale("dynamic", 4.0),
        prepare=plant(write(weight=np.inf, bias=1.0), step=1),
    )  # fmt: skip
    control = run_engine(
        linear_model(), [step for n, step in enumerate(linear_steps(3)) if n != 1], start=ZERO,
        optimizer=OptimizerSection(kind=optimizer, lr=0.1, clip_norm=clip_norm),
        loss_scale=LossScale("dynamic", 4.0), total_steps=3,
    )  # fmt: skip
    assert [step.skipped for step in done.done[0]] == [False, True, False]
    assert math.isinf(done.done[0][1].grad_norm)
    assert bits_of(done.params) == bits_of(control.params)
    for name, moments in done.states[0].moments.items():
        for got, want in zip(moments, control.states[0].moments[name], strict=True):
            assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("policy", "value"), [(FLOAT32, 1e20), (FLOAT64, 1e20), (FLOAT64, 1e200), (FLOAT64, 1e-200)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_c026_squares_that_overflow_have_a_norm(policy, value, ranks):
    """C026: [1e20, 1e20] in float32: norm 1.4142e20, clipped to [0.7071, 0.7071]."""
    rows = tuple(a.astype(policy.compute_dtype) for a in rows_of([1.0]))
    done = run_engine(
        linear_model(), [[[rows]] * ranks], start=ZERO, policy=policy, overlap=False,
        optimizer=SGD.model_copy(update={"clip_norm": 1.0}),
        prepare=plant_after_sum(write(weight=value, bias=value)),
    )  # fmt: skip
    assert not done.done[0][0].skipped
    if value == 1e-200:  # squares that underflow: nothing to clip
        assert done.params[BIAS][0] == -value
        return
    assert done.norms[0] == pytest.approx(2**0.5 * float(policy.param_dtype.type(value)), rel=1e-7)
    for array in done.params.values():
        assert array.ravel()[0] == pytest.approx(-(2**-0.5), rel=1e-6)


# --- a step that overflows, against a run without it -----------------------------------------


@pytest.mark.parametrize(("ranks", "rank", "micro"), [(2, 0, 1), (2, 1, 0), (3, 1, 1), (3, 2, 0)])
@pytest.mark.parametrize("optimizer", [ADAMW, SGD.model_copy(update={"lr": 0.1, "momentum": 0.9})])
def test_a_skipped_step_leaves_the_run_that_never_had_it(ranks, rank, micro, optimizer):
    """Bar: float16, overflow on one rank in step 3; the control has its scale halved there.

    Dropout is on: masks follow the committed updates. The scale grows again on the way.
    """
    steps = decoder_steps(8, ranks, 2)
    options: dict[str, Any] = {
        "optimizer": optimizer, "policy": FLOAT16, "total_steps": 7, "recompute": "full",
        "loss_scale": LossScale("dynamic", 1024.0, growth_interval=3), "bucket_bytes": 700,
    }  # fmt: skip

    def overflow(state):
        state.buckets[-1][0] = np.inf

    def halve(state):
        def observe(op):
            if isinstance(op, GatherMetrics) and state.step.step == 2:
                state.loss_scale.value, state.loss_scale.good_steps = 1024.0, 0

        state.observe_op = observe

    done = run_engine(
        small_decoder(0.3), steps, prepare=plant(overflow, rank=rank, step=3, micro=micro),
        **options,
    )  # fmt: skip
    control = run_engine(small_decoder(0.3), steps[:3] + steps[4:], prepare=halve, **options)
    for got, want in zip(done.done, control.done, strict=True):
        assert [step.skipped for step in got] == [n == 3 for n in range(8)]
        assert not any(step.skipped for step in want)
        # It had grown to 2048 after three updates; half of that is what the control starts from.
        assert [s.loss_scale for s in got[3:]] == [2048.0, 1024.0, 1024.0, 1024.0, 2048.0]
        assert [s.loss_scale for s in want[3:]] == [1024.0, 1024.0, 1024.0, 2048.0]
        kept = got[:3] + got[4:]
        assert [s.lr for s in kept] == [s.lr for s in want]
        assert [s.global_loss_sum for s in kept] == [s.global_loss_sum for s in want]
        assert [s.grad_norm for s in kept] == [s.grad_norm for s in want]
    for got, want in zip(done.states, control.states, strict=True):
        assert bits_of(got.master) == bits_of(want.master)
        assert bits_of(got.params) == bits_of(want.params)
        assert snapshot(got)["moments"] == snapshot(want)["moments"]
        assert got.committed == want.committed == 7
        assert (got.loss_scale.num_skipped, want.loss_scale.num_skipped) == (1, 0)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_overflow_anywhere_is_skipped_everywhere(rank, micro, overlap):
    """B6: any microbatch, any rank: nothing moves, 128 -> 64, the update is still to come."""
    before: dict[int, Any] = {}

    def overflow(state):
        state.buckets[-1][0] = np.nan

    def prepare(state):
        plant(overflow, rank=rank, step=1, micro=micro)(state)
        inner = state.observe_op

        def observe(op):
            if inner is not None:
                inner(op)
            if isinstance(op, GatherMetrics) and state.step.step == 0:
                before[state.rank] = snapshot(state)

        state.observe_op = observe

    done = run_engine(
        small_decoder(0.3), decoder_steps(2, 3, 2), optimizer=ADAMW, prepare=prepare,
        overlap=overlap, loss_scale=LossScale("dynamic", 128.0), bucket_bytes=1,
    )  # fmt: skip
    for state, steps in zip(done.states, done.done, strict=True):
        assert [step.skipped for step in steps] == [False, True]
        after = snapshot(state)
        for what in ("params", "master", "moments", "committed", "live"):
            assert after[what] == before[state.rank][what], what
        assert (state.loss_scale.value, state.committed) == (64.0, 1)
        assert gradients_are_zero(state)
        assert steps[1].update_number == 2
