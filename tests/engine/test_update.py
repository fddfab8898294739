"""One logical update as a transaction (B1, B2, B6; classes A, B, C, D of cases.jsonl).

Gradients are planted where exact numbers matter: right after the last backward of a rank, before
they are summed, or after the sum. A planted gradient is that of the scaled loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_jobs import (
    FLOAT64,
    VOCAB,
    after_backward,
    assert_close,
    bits_of,
    copies,
    cut,
    gradients_are_zero,
    linear_model,
    make_plans,
    make_state,
    num_targets,
    packed_rows,
    rows_of,
    run_engine,
    small_decoder,
    snapshot,
    start_engine,
)

from mpisim.comm.local import run_threads
from mpisim.config.schema import OptimizerSection
from mpisim.data.batch import Batch
from mpisim.data.documents import documents_batch
from mpisim.engine.loss_scale import LossScale
from mpisim.engine.state import EngineState
from mpisim.engine.step import Engine
from mpisim.engine.update import clear_gradients, true_gradients
from mpisim.errors import BatchError, LossScaleError, MpisimError
from mpisim.nn.layers import LayerContext
from mpisim.nn.losses import LanguageHead, MeanSquaredError, SoftmaxCrossEntropy
from mpisim.nn.precision import Policy
from mpisim.plan.ops import GatherMetrics, OptimizerStep, WaitSync

SGD = OptimizerSection(kind="sgd", lr=1.0, momentum=0.0)
ADAMW = OptimizerSection(
    kind="adamw", lr=0.01, weight_decay=0.1, clip_norm=0.5, schedule="cosine", warmup_steps=2
)
FLOAT32 = Policy(*["float32"] * 4)
FLOAT16 = Policy("float32", "float16", "float32", "float32")
WEIGHT, BIAS = "head.linear.weight", "head.linear.bias"
ZERO = {WEIGHT: np.zeros((1, 1)), BIAS: np.zeros(1)}
Act = Callable[[EngineState], None]


def write(**values: Any) -> Act:
    """Return what writes gradients of the linear model: ``weight=``, ``bias=``."""

    def act(state: EngineState) -> None:
        for name, value in values.items():
            state.grads[f"head.linear.{name}"][...] = np.reshape(
                value, state.grads[f"head.linear.{name}"].shape
            )

    return act


def plant(act: Act, *, rank: int | None = None, step: int | None = None, micro: int = 0) -> Act:
    """Return a `prepare` that acts before the sums, after a microbatch's last backward."""

    def prepare(state: EngineState) -> None:
        if rank is None or state.rank == rank:
            after_backward(state, micro, act, step=step)

    return prepare


def plant_after_sum(act: Act, *, rank: int | None = None, step: int | None = None) -> Act:
    """Return a `prepare` that acts after the last bucket is summed."""

    def prepare(state: EngineState) -> None:
        last = WaitSync(len(state.buckets) - 1)

        def observe(op: Any) -> None:
            if op == last and rank in (None, state.rank) and step in (None, state.step.step):
                act(state)

        state.observe_op = observe

    return prepare


def linear_steps(count: int, ranks: int = 1, micros: int = 1, features: int = 1) -> list:
    rng = np.random.default_rng(3)
    return [
        [
            [(rng.standard_normal((2, features)), rng.standard_normal((2, 1)))] * micros
            for _ in range(ranks)
        ]
        for _ in range(count)
    ]


def decoder_steps(count: int, ranks: int = 1, micros: int = 1, rows: int = 4) -> list:
    return [cut(packed_rows(rows, seed), ranks, micros) for seed in range(count)]


# --- A: what weighs how much, with tokens ----------------------------------------------------


def tokens(*counts: int, columns: int = 6) -> Batch:
    """Return rows with the given numbers of valid targets, at their ends."""
    rng = np.random.default_rng(counts)
    x = rng.integers(0, VOCAB, (len(counts), columns)).astype(np.int32)
    targets = rng.integers(0, VOCAB, (len(counts), columns)).astype(np.int32)
    for row, count in enumerate(counts):
        targets[row, : columns - count] = -1
    return Batch(x, targets)


def alone(batch: Batch) -> float:
    """Return the loss sum of rows trained alone."""
    done = run_engine(small_decoder(), [[[batch]]]).done[0][0]
    assert done.global_targets == batch.num_targets
    return done.global_loss_sum


@pytest.mark.parametrize("layout", ["microbatches", "ranks", "both", "swapped"])
def test_c001_c002_tokens_weigh_the_same_wherever_they_are(layout):
    """C001, C002, C011: counts 2 and 4: the mean over 6 tokens, not the mean of two means."""
    two, four = tokens(2), tokens(3, 1)
    parts = {
        "microbatches": [[two, four]], "ranks": [[two], [four]],
        "both": [[two, tokens(3)], [tokens(1), tokens(0)]], "swapped": [[four, two]],
    }[layout]  # fmt: skip
    done = run_engine(small_decoder(), [parts])
    sums = [[alone(batch) for batch in micros if batch.num_targets] for micros in parts]
    total = math.fsum(math.fsum(micros) for micros in sums)
    assert done.targets == [6]
    assert done.losses[0] == pytest.approx(total / 6, rel=1e-13)
    rows = [batch for micros in parts for batch in micros]
    whole = Batch(*(np.concatenate(arrays) for arrays in zip(*(b[:2] for b in rows), strict=True)))
    assert_close(done.grads[0], run_engine(small_decoder(), [[[whole]]]).grads[0], 1e-14)
    if layout != "both":
        means = (alone(two) / 2 + alone(four) / 4) / 2
        assert abs(done.losses[0] - means) > 1e-6


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_c003_c013_the_update_does_not_depend_on_the_number_of_ranks(ranks):
    """C003, C013: all valid targets in one rank's microbatch; the others have none, or no row."""
    batch = tokens(1)
    none, empty = tokens(0), Batch(*(a if a is None else a[:0] for a in batch))
    parts = [[batch]] + [[none if rank % 2 else empty] for rank in range(1, ranks)]
    settings = OptimizerSection(kind="sgd", lr=0.5, momentum=0.0)
    want = run_engine(small_decoder(), [[[batch]]] * 2, optimizer=settings)
    for turned in (parts, parts[::-1]):
        got = run_engine(small_decoder(), [turned] * 2, optimizer=settings)
        assert got.targets == [1, 1]
        assert got.losses == pytest.approx(want.losses, rel=1e-14)
        assert_close(got.params, want.params, 1e-14)


def test_c005_equal_means_report_that_mean():
    """C005: two microbatches of mean 1.0 report 1.0; a sum of means would be 2.0."""
    done = run_engine(linear_model(), [[[rows_of([1.0, -1.0])] * 2]], start=ZERO)
    assert done.losses == [1.0]


@pytest.mark.parametrize(
    ("layer", "x", "targets"),
    [
        (SoftmaxCrossEntropy(3), np.ones((2, 3)), np.array([0, 2])),
        (MeanSquaredError(), np.ones((2, 2)), np.zeros((2, 2))),
        (LanguageHead(3, 2, 0), np.ones((2, 4, 2)), np.zeros((2, 4), np.int32)),
        (LanguageHead(3, 2, 3), np.ones((2, 4, 2)), np.zeros((2, 4), np.int32)),
    ],
)
def test_c005_a_loss_is_a_sum_over_its_targets(layer, x, targets):
    """C005: what the engine divides by the global count grows with the rows."""
    params = layer.init(lambda name: np.random.default_rng(0), np.dtype("f8"))
    once, _ = layer.forward(params, x, LayerContext(targets=targets))
    twice, _ = layer.forward(
        params, np.concatenate([x, x]), LayerContext(targets=np.concatenate([targets] * 2))
    )
    assert once.shape == () and once.dtype == np.float64 and once > 0
    assert twice == pytest.approx(2 * once, rel=1e-14)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        # Five tokens have four successors.
        (documents_batch([np.array([1, 2, 3, 4, 5])]), 4),
        # Documents of 3 and 2 tokens in one row: the last of each predicts nothing.
        (
            Batch(
                np.array([[1, 2, 3, 4, 5]], np.int32), np.array([[2, 3, -1, 5, -1]], np.int32),
                np.array([[0, 0, 0, 3, 3]], np.int32),
            ),
            3,
        ),
    ],
)  # fmt: skip
def test_c009_the_denominator_is_the_number_of_terms_that_were_added(batch, count):
    """C009: 4 and 3, not 5 and 2; every term alone, added up, is the loss sum."""
    done = run_engine(small_decoder(), [[[batch]]]).done[0][0]
    assert done.global_targets == count
    terms = []
    for place in np.argwhere(batch.targets >= 0):
        single = np.full_like(batch.targets, -1)
        single[tuple(place)] = batch.targets[tuple(place)]
        terms.append(alone(batch._replace(targets=single)))
    assert len(terms) == count and min(terms) > 0
    assert done.global_loss_sum == pytest.approx(math.fsum(terms), rel=1e-13)


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_c011_the_logged_loss_has_no_factor(factor):
    """C011: not the scale's, and not the number of microbatches."""
    scale = LossScale("static", factor)
    done = run_engine(linear_model(), [[[rows_of([2**0.5])] * 8]], start=ZERO, loss_scale=scale)
    assert done.losses[0] == pytest.approx(2.0, rel=1e-15)


@pytest.mark.parametrize("ranks", [1, 2])
def test_c015_every_window_starts_anew(ranks):
    """C015: windows of gradients [1,1,1,1], [10,1,1,1], [1,1,1,10]: means 1, 3.25, 3.25.

    Rows with x = 1 only in one microbatch: a parameter that only one of them moves.
    """
    windows = ([1, 1, 1, 1], [10, 1, 1, 1], [1, 1, 1, 10], [1, 1, 1, 1])
    steps = []
    for window in windows:
        micros = [rows_of([-g / 2], [float(m == 2)]) for m, g in enumerate(window)]
        per_rank = 4 // ranks
        steps.append([micros[r * per_rank : (r + 1) * per_rank] for r in range(ranks)])
    frozen = OptimizerSection(kind="sgd", lr=1e-300, momentum=0.0)
    done = run_engine(linear_model(), steps, start=ZERO, optimizer=frozen)
    assert [g[BIAS][0] for g in done.grads] == [1.0, 3.25, 3.25, 1.0]
    assert [g[WEIGHT][0, 0] for g in done.grads] == [0.25, 0.25, 0.25, 0.25]


def test_one_seed_for_the_whole_update():
    """B1: the seed of every microbatch is S / N, so its share of the gradient is S * n_i / N."""
    seeds = []

    def prepare(state):
        real = state.blocks[state.last].backward

        class Watched:
            def __getattr__(self, name):
                return getattr(block, name)

            def backward(self, params, saved, dy, *rest):
                seeds.append(dy)
                return real(params, saved, dy, *rest)

        block = state.blocks[state.last]
        state.blocks[state.last] = Watched()

    run_engine(
        small_decoder(), [[[tokens(2), tokens(3, 1)], [tokens(0), tokens(5)]]], prepare=prepare,
        loss_scale=LossScale("dynamic", 128.0, growth_interval=1),
    )  # fmt: skip
    assert seeds == [128.0 / 11] * 4


def test_weights_do_not_move_between_microbatches():
    """B2: one update after the last."""
    seen = []

    def prepare(state):
        for micro in range(3):
            after_backward(state, micro, lambda state: seen.append(bits_of(state.params)))

    done = run_engine(small_decoder(), decoder_steps(1, micros=3), prepare=prepare)
    assert seen[0] == seen[1] == seen[2] != bits_of(done.params)


# --- B: the loss scale -----------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["none", "static"])
def test_a_fixed_scale_ends_the_run_instead_of_skipping(kind):
    value = 1.0 if kind == "none" else 128.0
    job, outcome = start_engine(
        linear_model(), linear_steps(2, 2), start=ZERO, overlap=False,
        prepare=plant(write(bias=np.inf), rank=1, step=0), loss_scale=LossScale(kind, value),
    )  # fmt: skip
    # A rank may see that another has ended before it raises itself.
    text = str(next(iter(job.errors.values())))
    assert "gradient norm must be finite" in text and "No update was made" in text
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


# --- C: the norm -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_c035_replicated_gradients_are_counted_once(ranks, bucket_bytes):
    """C035: 3, 4 and 12 have norm 13 on any number of ranks, each of which holds all."""
    model = linear_model(2)
    start = {WEIGHT: np.zeros((2, 1)), BIAS: np.zeros(1)}
    rows = (np.zeros((1, 2)), np.zeros((1, 1)))
    done = run_engine(
        model, [[[rows]] * ranks], start=start, overlap=False, bucket_bytes=bucket_bytes,
        prepare=plant(write(weight=np.array([3.0, 4.0]) / ranks, bias=12.0 / ranks)),
    )  # fmt: skip
    for (step,) in done.done:
        assert step.grad_norm == 13.0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2])
def test_c036_a_tied_table_is_counted_once(tied, bucket_bytes, ranks):
    """C036: table 3 and another 4 make 5; counted at both places sqrt(34) = 5.831."""
    model = small_decoder(tied=tied)

    def act(state):
        for bucket in state.buckets:
            bucket.fill(0)
        state.grads["embed.tokens.weight"][2, 1] = 3.0 / ranks
        state.grads["head.norm.weight"][0] = 4.0 / ranks

    done = run_engine(
        model, decoder_steps(1, ranks), overlap=False, bucket_bytes=bucket_bytes,
        prepare=plant(act),
    )  # fmt: skip
    assert done.norms == [5.0]
    # The statistics of the table have the same trap.
    specs = model.param_specs()
    assert len({spec.name for spec in specs}) == len(specs) == len(done.params)
    assert sum(bucket.size for bucket in done.states[0].buckets) == sum(s.size for s in specs)
    assert ("head.output.weight" in done.params) is not tied


@pytest.mark.parametrize("ranks", [1, 3])
def test_c036_the_norm_by_hand_over_distinct_parameters(ranks):
    """The same of real gradients, whose table is the sum of embedding and head."""
    done = run_engine(
        small_decoder(), decoder_steps(3, ranks), optimizer=ADAMW, bucket_bytes=700,
        loss_scale=LossScale("static", 3.0),
    )  # fmt: skip
    for norm, grads in zip(done.norms, done.grads, strict=True):
        by_hand = math.sqrt(math.fsum(float(v) ** 2 for g in grads.values() for v in g.ravel()))
        assert norm == pytest.approx(by_hand, rel=1e-14)
        assert np.all(np.abs(grads["embed.tokens.weight"]).sum(axis=1) > 0)


# --- D: steps and rates ----------------------------------------------------------------------


@pytest.mark.parametrize("skip_in", [None, 0, 1])
def test_c039_bias_correction_follows_the_committed_updates(skip_in):
    """C039: constant gradient 1 without eps: 0.9, 0.8; without correction 0.68377, 0.25881."""
    settings = OptimizerSection(kind="adamw", lr=0.1, beta1=0.9, beta2=0.999, eps=0.0)
    seen = []

    def prepare(state):
        def act(state):
            value = np.inf if state.step.step == skip_in else state.step.loss_scale
            write(weight=value, bias=value)(state)

        after_backward(state, 0, act)
        state_observe = state.observe_op

        def observe(op):
            state_observe(op)
            if isinstance(op, OptimizerStep) and not state.step.skipped:
                seen.append((state.params[WEIGHT][0, 0], state.params[BIAS][0]))

        state.observe_op = observe

    ones = {WEIGHT: np.ones((1, 1)), BIAS: np.ones(1)}
    run_engine(
        linear_model(), linear_steps(2 if skip_in is None else 3), start=ones, prepare=prepare,
        optimizer=settings, overlap=False, loss_scale=LossScale("dynamic", 4.0),
    )  # fmt: skip
    assert np.array(seen) == pytest.approx(np.array([[0.9, 0.9], [0.8, 0.8]]), rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("skips", [(), (0, 7, 19)])
def test_c043_the_schedule_follows_the_committed_updates(ranks, micros, skips):
    """C043: linear decay from 1 to 0 at update 100: 0.75 after 25 updates, for any W."""
    settings = OptimizerSection(
        kind="sgd", lr=1.0, momentum=0.0, schedule="linear", min_lr_ratio=0.0
    )

    def prepare(state):
        def act(state):
            bad = state.step.step in skips and state.rank == ranks - 1
            write(weight=np.inf if bad else 0.0, bias=0.0)(state)

        after_backward(state, micros - 1, act)

    done = run_engine(
        linear_model(), linear_steps(26 + len(skips), ranks, micros), optimizer=settings,
        overlap=False, total_steps=101, prepare=prepare, loss_scale=LossScale("dynamic", 1024.0),
    )  # fmt: skip
    for state, steps in zip(done.states, done.done, strict=True):
        assert state.committed == 26
        assert steps[-1].lr == pytest.approx(0.75, rel=1e-15)


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


# --- what fails leaves nothing behind (B6) ---------------------------------------------------


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
            if op == WaitSync(len(state.buckets) - 1):
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


def test_the_true_gradient_is_a_copy():
    """An observer may keep and change what it gets."""
    seen = []

    def prepare(state):
        def observe(op):
            if op == WaitSync(len(state.buckets) - 1):
                before = [bucket.copy() for bucket in state.buckets]
                for grad in true_gradients(state).values():
                    grad.fill(7.0)
                seen.append(all(map(np.array_equal, state.buckets, before)))

        state.observe_op = observe

    run_engine(
        small_decoder(), decoder_steps(1), prepare=prepare, loss_scale=LossScale("static", 4.0)
    )
    assert seen == [True]
