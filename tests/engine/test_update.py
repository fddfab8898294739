"""What weighs how much in one update, its norm and its rate (B1, B2; classes A, C, D)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from planting import ADAMW, BIAS, WEIGHT, ZERO, decoder_steps, linear_steps, plant, write
from small_jobs import (
    VOCAB,
    after_backward,
    assert_close,
    bits_of,
    linear_model,
    rows_of,
    run_engine,
    small_decoder,
)

from mpisim.config.schema import OptimizerSection
from mpisim.data.batch import Batch
from mpisim.data.documents import documents_batch
from mpisim.engine.loss_scale import LossScale
from mpisim.engine.update import true_gradients
from mpisim.nn.layers import LayerContext
from mpisim.nn.losses import LanguageHead, MeanSquaredError, SoftmaxCrossEntropy
from mpisim.plan.ops import ALL_MICROS, OptimizerStep, WaitSync

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


def test_the_true_gradient_is_a_copy():
    """An observer may keep and change what it gets."""
    seen = []

    def prepare(state):
        def observe(op):
            if op == WaitSync(len(state.buckets) - 1, ALL_MICROS):
                before = [bucket.copy() for bucket in state.buckets]
                for grad in true_gradients(state).values():
                    grad.fill(7.0)
                seen.append(all(map(np.array_equal, state.buckets, before)))

        state.observe_op = observe

    run_engine(
        small_decoder(), decoder_steps(1), prepare=prepare, loss_scale=LossScale("static", 4.0)
    )
    assert seen == [True]
