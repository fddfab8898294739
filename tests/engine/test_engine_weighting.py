"""Every row weighs the same, however the rows of an update are cut (cases.jsonl, classes A, H).

A linear model with zero weights: the loss of a row is target^2, the gradient of the bias is the
mean of -2 * target over the rows of the update.
"""

from __future__ import annotations

import numpy as np
import pytest
from small_jobs import assert_close, linear_model, rows_of, run_engine

from mpisim.config.schema import OptimizerSection
from mpisim.plan.passes import frame_update

LINEAR = linear_model()
ZERO = {"head.linear.weight": np.zeros((1, 1)), "head.linear.bias": np.zeros(1)}
LR = 0.125


def step_of(*ranks, **options):
    """Run one step; each rank is a list of microbatches, each a list of targets."""
    parts = [[rows_of(targets) for targets in micros] for micros in ranks]
    return run_engine(LINEAR, [parts], start=ZERO, **options)


def check(done, loss, bias_gradient):
    assert done.losses[0] == pytest.approx(loss, rel=1e-15)
    assert done.grads[0]["head.linear.bias"][0] == pytest.approx(bias_gradient, rel=1e-15)
    assert done.norms[0] == pytest.approx(abs(bias_gradient), rel=1e-15)
    for state in done.states:
        assert state.params["head.linear.bias"][0] == pytest.approx(-LR * bias_gradient, rel=1e-15)


ROOT3 = 3**0.5


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_c001_microbatches_of_unequal_size(order):
    """C001, B1: counts 2 and 4 with means 1 and 3 give 7/3, not 2."""
    micros = [[[1.0, 1.0], [ROOT3] * 4][index] for index in order]
    check(step_of(micros), 7 / 3, -2 * (2 + 4 * ROOT3) / 6)


def test_c001_one_batch_of_six_rows_is_the_same():
    accumulated, whole = step_of([[1.0, 1.0], [ROOT3] * 4]), step_of([[1.0, 1.0] + [ROOT3] * 4])
    assert accumulated.losses == pytest.approx(whole.losses, rel=1e-15)
    assert_close(accumulated.params, whole.params, 1e-15)


def test_c001_over_two_ranks():
    check(step_of([[1.0], [ROOT3] * 3], [[1.0], [ROOT3]]), 7 / 3, -2 * (2 + 4 * ROOT3) / 6)


def test_c002_the_denominator_is_the_count_of_all_ranks():
    """C002: counts 1 and 3 with sums 6 and 10 give 16/4 = 4, not (6 + 10/3)/2."""
    a, b = 6**0.5, (10 / 3) ** 0.5
    done = step_of([[a]], [[b] * 3])
    check(done, 4.0, -2 * (a + 3 * b) / 4)
    assert done.targets == [4]


def test_c002_the_count_is_summed_as_a_whole_number():
    """A float32 sum of counts would stop counting at 2**24."""
    first = frame_update([], ())[0]
    assert (first.kind, first.dtype) == ("target_count", "int64")
    done = step_of([[1.0]], [[1.0]])
    assert all(state.scalars["target_count"].dtype == np.int64 for state in done.states)


@pytest.mark.parametrize(
    "ranks",
    [
        [[[2.0, 0.0, 0.0, 0.0]]],
        [[[2.0]], [[0.0, 0.0, 0.0]]],
        [[[2.0]], [[0.0]], [[0.0, 0.0]]],
        [[[2.0]], [[0.0]], [[0.0]], [[0.0]]],
        [[[]], [[0.0, 0.0, 0.0]], [[2.0]], [[]]],
    ],
)
def test_c003_the_result_does_not_depend_on_the_number_of_ranks(ranks):
    """C003: sums 4 and 0 over counts 1 and 3 give 1.0 for any W; averaging again gives 1/W."""
    check(step_of(*ranks), 1.0, -1.0)


def test_c011_the_logged_loss_is_not_divided_by_the_number_of_microbatches():
    """C011: 8 microbatches with mean 2.0 log 2.0, not 0.25 or 16."""
    done = step_of([[2**0.5, -(2**0.5)]] * 8)
    assert done.losses[0] == pytest.approx(2.0, rel=1e-15)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("owner", [0, -1])
def test_c013_one_row_on_one_rank(num_ranks, owner):
    """C013: the only row has gradient 1.0 on 1, 2 and 4 ranks, not 0.5 and 0.25."""
    ranks = [[[]] for _ in range(num_ranks)]
    ranks[owner] = [[-0.5]]
    check(step_of(*ranks), 0.25, 1.0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_c017_every_microbatch_is_in_the_reduced_gradient(overlap, bucket_bytes):
    """C017: microbatch gradients 1 and 10 on both ranks add to 11, over 2 rows a rank 5.5."""
    micros = [[-0.5], [-5.0]]
    done = step_of(micros, micros, overlap=overlap, bucket_bytes=bucket_bytes)
    check(done, (0.25 + 25) / 2, 5.5)


def test_c017_gradients_of_the_last_step_are_gone():
    """The first microbatch of a step overwrites, the second adds."""
    steps = [[[rows_of([-0.5]), rows_of([-5.0])]] * 2] * 3
    frozen = OptimizerSection(kind="sgd", lr=1e-300, momentum=0.0)
    done = run_engine(LINEAR, steps, start=ZERO, optimizer=frozen)
    for grads in done.grads:
        assert grads["head.linear.bias"][0] == pytest.approx(5.5)


def test_c085_a_rank_that_runs_out_of_rows_takes_part_with_none():
    """C085, policy (b): gradients 1, 1, 1 and 3, 3, none: the third step has 1, not 0.5."""
    one, three = rows_of([-0.5]), rows_of([-1.5])
    steps = [[[one], [three]], [[one], [three]], [[one], [rows_of([])]]]
    frozen = OptimizerSection(kind="sgd", lr=1e-300, momentum=0.0)
    done = run_engine(LINEAR, steps, start=ZERO, optimizer=frozen)
    assert [g["head.linear.bias"][0] for g in done.grads] == pytest.approx([2.0, 2.0, 1.0])
    assert done.targets == [2, 2, 1]


def whole_numbers(cuts, **options):
    """Train 8 steps on 8 rows of small whole numbers, cut as `cuts[rank][micro]`.

    With N = 8 and lr = 1/8 every product and sum fits into 53 bits for 8 steps, so the order of
    additions cannot show: what differs in any bit is an error, not rounding.
    """
    rng = np.random.default_rng(5)
    x = rng.integers(-1, 3, (8, 4)).astype(float)
    y = rng.integers(-2, 3, (8, 3)).astype(float)
    parts, lo = [], 0
    for micros in cuts:
        parts.append([])
        for count in micros:
            parts[-1].append((x[lo : lo + count], y[lo : lo + count]))
            lo += count
    assert lo == 8
    start = {
        "head.linear.weight": rng.integers(-1, 2, (4, 3)).astype(float),
        "head.linear.bias": np.zeros(3),
    }
    return run_engine(linear_model(4, 3), [parts] * 8, start=start, **options)


@pytest.mark.parametrize(
    "cuts",
    [
        [[4, 4]], [[1] * 8], [[3], [5]], [[8], [0]], [[2, 1], [1, 4]], [[3], [3], [2]],
        [[2]] * 4, [[0, 2], [3, 0], [1, 1], [0, 1]], [[2], [2], [2], [1], [1]], [[1]] * 8,
    ],
)  # fmt: skip
@pytest.mark.parametrize("bucket_bytes", [1, 7 * 8, 1 << 20])
def test_c087_exact_gradients_give_the_same_bits_in_every_layout(cuts, bucket_bytes):
    """C087: bucket capacity, overlap, ranks and microbatches change nothing at all."""
    want = whole_numbers([[8]])
    for overlap, algorithm in ((True, "ring"), (False, "auto")):
        got = whole_numbers(cuts, bucket_bytes=bucket_bytes, overlap=overlap, algorithm=algorithm)
        # The squares of the loss need twice the bits.
        assert got.losses == pytest.approx(want.losses, rel=1e-14)
        for state in got.states:
            assert_close(state.params, want.params, 0.0)


def test_the_exact_run_above_does_learn_and_is_exact():
    done = whole_numbers([[8]])
    assert 0 < done.losses[-1] < done.losses[0] / 2
    for array in done.params.values():
        # Whole multiples of 2**-40: eight steps of 5 bits each.
        assert np.array_equal(array * 2.0**40, np.rint(array * 2.0**40))
        assert np.max(np.abs(array)) < 2.0**12
