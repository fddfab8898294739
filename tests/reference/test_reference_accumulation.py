"""A2: gradient accumulation equals the large batch, whatever the cut."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.errors import ConfigError
from mpisim.layouts.chunks import chunk_bounds as layouts_chunk_bounds
from mpisim.reference import accumulation, mlp, optimizers
from mpisim.reference.chunks import chunk_bounds


def make_params(sizes=(3, 5, 2), seed=0):
    rng = np.random.default_rng(seed)
    return mlp.init_mlp(lambda name: rng, sizes)


def make_rows(num_rows, seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_rows, 3)), rng.standard_normal((num_rows, 2))


def constant_loss_rows(counts, means):
    """Return a model and microbatches with the given row counts and mean squared errors.

    The model predicts 0 for every row, so a target of sqrt(m) costs exactly m.
    """
    params = {
        "head.linear.weight": np.zeros((1, 1)),
        "head.linear.bias": np.zeros(1),
    }
    microbatches = [
        (np.arange(1.0, count + 1).reshape(count, 1), np.full((count, 1), math.sqrt(mean)))
        for count, mean in zip(counts, means, strict=True)
    ]
    return params, microbatches


# --- chunk_bounds ---


def test_chunk_bounds_by_hand_and_boundaries():
    assert chunk_bounds(10, 4) == [0, 3, 6, 8, 10]
    assert chunk_bounds(3, 4) == [0, 1, 2, 3, 3]
    assert chunk_bounds(0, 2) == [0, 0, 0]
    assert chunk_bounds(7, 1) == [0, 7]


@given(count=st.integers(0, 200), num_chunks=st.integers(1, 40))
def test_chunk_bounds_follow_the_convention_of_the_engine(count, num_chunks):
    assert tuple(chunk_bounds(count, num_chunks)) == layouts_chunk_bounds(count, num_chunks)


def test_chunk_bounds_refuse():
    with pytest.raises(ConfigError, match="count must be an integer >= 0; got -1"):
        chunk_bounds(-1, 2)
    with pytest.raises(ConfigError, match="num_chunks must be an integer >= 1; got 0"):
        chunk_bounds(2, 0)


# --- split_microbatches ---


def test_split_by_hand():
    x, y = np.arange(7), 10 * np.arange(7)
    pieces = accumulation.split_microbatches(x, y, 3)
    assert [piece.tolist() for piece, _ in pieces] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [piece.tolist() for _, piece in pieces] == [[0, 10, 20], [30, 40], [50, 60]]


def test_split_boundaries():
    x, y = make_rows(2)
    assert [len(piece) for piece, _ in accumulation.split_microbatches(x, y, 4)] == [1, 1, 0, 0]
    assert [len(piece) for piece, _ in accumulation.split_microbatches(x[:0], y[:0], 2)] == [0, 0]
    ((whole, _),) = accumulation.split_microbatches(x, y, 1)
    assert np.array_equal(whole, x)


@given(num_rows=st.integers(0, 30), num_microbatches=st.integers(1, 12))
@settings(deadline=None)
def test_split_keeps_every_row_once_in_order_and_copies_nothing(num_rows, num_microbatches):
    x, y = make_rows(num_rows)
    pieces = accumulation.split_microbatches(x, y, num_microbatches)
    lengths = [len(piece) for piece, _ in pieces]
    assert len(pieces) == num_microbatches
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
    assert np.array_equal(np.concatenate([piece for piece, _ in pieces]), x)
    assert np.array_equal(np.concatenate([piece for _, piece in pieces]), y)
    assert all(np.shares_memory(piece, x) for piece, _ in pieces if piece.size)


def test_split_refuses():
    x, y = make_rows(3)
    with pytest.raises(ConfigError, match="num_microbatches must be an integer >= 1; got 0"):
        accumulation.split_microbatches(x, y, 0)
    with pytest.raises(ConfigError, match=r"same number of rows; got shapes \(3, 3\) and \(2, 2\)"):
        accumulation.split_microbatches(x, y[:2], 2)
    with pytest.raises(ConfigError, match=r"same number of rows; got shapes \(\) and \(\)"):
        accumulation.count_rows(np.array(1.0), np.array(1.0))


# --- accumulate_gradients ---


def test_accumulate_by_hand_without_touching_its_arguments():
    first, second = {"w": np.array([1.0, 2.0])}, {"w": np.array([10.0, 20.0])}
    total = accumulation.accumulate_gradients(first, second)
    assert total["w"].tolist() == [11.0, 22.0]
    assert first["w"].tolist() == [1.0, 2.0] and second["w"].tolist() == [10.0, 20.0]


def test_accumulate_from_nothing_copies():
    gradients = {"w": np.array([1.0]), "empty": np.zeros(0)}
    total = accumulation.accumulate_gradients({}, gradients)
    assert total["w"].tolist() == [1.0] and total["empty"].shape == (0,)
    assert not np.shares_memory(total["w"], gradients["w"])
    again = accumulation.accumulate_gradients(total, {})
    assert again["w"].tolist() == [1.0] and not np.shares_memory(total["w"], again["w"])


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=8))
def test_accumulate_equals_the_sum_of_integers_in_any_order(values):
    totals = []
    for order in (values, values[::-1]):
        total = {}
        for value in order:
            total = accumulation.accumulate_gradients(total, {"w": np.array([float(value)])})
        totals.append(total["w"].tolist())
    assert totals[0] == totals[1] == [float(sum(values))]


@pytest.mark.parametrize(
    ("gradient", "sentence"),
    [
        (np.zeros(3), r"gradients\['w'\] must have shape \(2,\) and dtype float64 .*; got \(3,\)"),
        (np.zeros(2, np.float32), r"gradients\['w'\] must have shape .*; got \(2,\) and float32"),
        (np.zeros(2, int), r"gradients\['w'\] must be a float32 or float64 ndarray"),
    ],
)
def test_accumulate_refuses(gradient, sentence):
    with pytest.raises(ConfigError, match=sentence):
        accumulation.accumulate_gradients({"w": np.zeros(2)}, {"w": gradient})


def test_c015_every_window_starts_from_nothing_and_drops_nothing():
    windows = [[1.0, 1.0, 1.0, 1.0], [10.0, 1.0, 1.0, 1.0], [10.0, 1.0, 1.0, 1.0]]
    sums = []
    for index, window in enumerate(windows):
        total = {}
        for micro, value in enumerate(window):
            gradients = {"w": np.array([value])}
            if micro == index:  # a parameter that one microbatch of the window touches
                gradients["rare"] = np.array([5.0])
            total = accumulation.accumulate_gradients(total, gradients)
        sums.append(float(total["w"][0]))
        assert total["rare"].tolist() == [5.0]
    assert sums == [4.0, 13.0, 13.0]
    assert [value / 4 for value in sums] == [1.0, 3.25, 3.25]


# --- accumulated loss, gradients and the step ---


def test_c001_rows_are_weighted_not_microbatches():
    params, microbatches = constant_loss_rows(counts=[2, 4], means=[1.0, 3.0])
    loss, gradients = accumulation.accumulated_loss_and_gradients(params, microbatches)
    assert loss == pytest.approx(7 / 3, rel=1e-14)
    # dL/dw = sum of 2 * (0 - y) * x / 6 over rows
    want = -2 * ((1 + 2) * 1.0 + (1 + 2 + 3 + 4) * math.sqrt(3.0)) / 6
    assert gradients["head.linear.weight"] == pytest.approx(np.array([[want]]), rel=1e-14)
    x, y = (np.concatenate(parts) for parts in zip(*microbatches, strict=True))
    whole_loss, whole = mlp.mlp_loss_and_gradients(params, x, y)
    assert loss == pytest.approx(whole_loss, rel=1e-14)
    for name, gradient in whole.items():
        assert np.allclose(gradients[name], gradient, rtol=1e-13)


def test_c001_with_class_targets():
    # Logits that cost 1 and 3 nats: log(1 + exp(a)) = m for the wrong class ahead by a.
    params = {
        "head.linear.weight": np.array([[0.0, 1.0]]),
        "head.linear.bias": np.zeros(2),
    }
    ahead = [math.log(math.expm1(mean)) for mean in (1.0, 3.0)]
    microbatches = [
        (np.full((count, 1), a), np.zeros(count, int))
        for count, a in zip((2, 4), ahead, strict=True)
    ]
    loss, _ = accumulation.accumulated_loss_and_gradients(
        params, microbatches, loss="softmax_cross_entropy"
    )
    assert loss == pytest.approx(14 / 6, rel=1e-14)


def test_c005_equal_means_stay_what_they_are():
    params, microbatches = constant_loss_rows(counts=[3, 3], means=[1.0, 1.0])
    loss, gradients = accumulation.accumulated_loss_and_gradients(params, microbatches)
    assert loss == 1.0
    assert gradients["head.linear.bias"].tolist() == [-2.0]


def test_c011_the_logged_loss_does_not_depend_on_the_number_of_microbatches():
    params, microbatches = constant_loss_rows(counts=[2] * 8, means=[2.0] * 8)
    loss, _ = accumulation.accumulated_loss_and_gradients(params, microbatches)
    assert loss == pytest.approx(2.0, rel=1e-14)
    _, logged = accumulation.grad_accumulation_step(params, microbatches, lambda p, g: p)
    assert logged == loss


def test_c007_one_update_per_batch_whatever_the_number_of_slices():
    calls = []

    def update(params, gradients):
        calls.append(set(gradients))
        return optimizers.sgd_step(params, gradients, lr=0.01)

    params = make_params()
    for seed in range(2):
        microbatches = accumulation.split_microbatches(*make_rows(7, seed), 3)
        params, _ = accumulation.grad_accumulation_step(params, microbatches, update)
    assert calls == [set(params)] * 2


def test_step_by_hand():
    params, microbatches = constant_loss_rows(counts=[1, 1], means=[4.0, 0.0])
    new, loss = accumulation.grad_accumulation_step(
        params, microbatches, lambda p, g: optimizers.sgd_step(p, g, lr=0.5)
    )
    # prediction 0, targets 2 and 0, inputs 1: dw = db = -2 * 2 / 2 = -2
    assert loss == 2.0
    assert new["head.linear.weight"].tolist() == [[1.0]]
    assert new["head.linear.bias"].tolist() == [1.0]
    assert params["head.linear.bias"].tolist() == [0.0]


def test_empty_microbatches_change_nothing():
    params = make_params()
    x, y = make_rows(3)
    want = accumulation.accumulated_loss_and_gradients(params, [(x[:2], y[:2]), (x[2:], y[2:])])
    empty = (x[:0], y[:0])
    got = accumulation.accumulated_loss_and_gradients(
        params, [empty, (x[:2], y[:2]), empty, (x[2:], y[2:]), empty]
    )
    assert got[0] == want[0]
    for name in params:
        assert np.array_equal(got[1][name], want[1][name])


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    loss=st.sampled_from(sorted(mlp.LOSSES)),
    activation=st.sampled_from(sorted(mlp.ACTIVATIONS)),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_equals_the_large_batch(counts, loss, activation, seed):
    params, (x, y) = make_params(seed=seed), make_rows(sum(counts), seed)
    if loss == "softmax_cross_entropy":
        y = np.random.default_rng(seed).integers(0, 2, len(x))
    stops = np.cumsum(counts)
    cut = [(x[s - n : s], y[s - n : s]) for n, s in zip(counts, stops, strict=True)]
    whole_loss, whole = mlp.mlp_loss_and_gradients(params, x, y, activation, loss)
    cut_loss, pieces = accumulation.accumulated_loss_and_gradients(params, cut, activation, loss)
    assert cut_loss == pytest.approx(whole_loss, rel=1e-12)
    for name, gradient in whole.items():
        assert np.allclose(pieces[name], gradient, rtol=1e-10, atol=1e-13)


def test_ten_accumulated_steps_equal_ten_large_batch_steps():
    def update(params, gradients):
        return optimizers.sgd_step(params, gradients, lr=0.05)

    large, small = make_params(), make_params()
    for seed in range(10):
        x, y = make_rows(11, seed)
        large, large_loss = accumulation.grad_accumulation_step(large, [(x, y)], update, "gelu")
        small, small_loss = accumulation.grad_accumulation_step(
            small, accumulation.split_microbatches(x, y, 4), update, "gelu"
        )
        assert small_loss == pytest.approx(large_loss, rel=1e-12)
    for name in large:
        assert np.max(np.abs(small[name] - large[name])) < 1e-12


def test_accumulation_fits_a_budget_that_the_large_batch_exceeds():
    rng = np.random.default_rng(0)
    params = mlp.init_mlp(lambda name: rng, (4, 64, 64, 1))
    x, y = mlp.make_synthetic_regression_batch(rng, 2048, 4, 1, 0.1)

    def peak_bytes(num_microbatches):
        microbatches = accumulation.split_microbatches(x, y, num_microbatches)
        tracemalloc.start()
        try:
            loss, _ = accumulation.accumulated_loss_and_gradients(params, microbatches)
            return tracemalloc.get_traced_memory()[1], loss
        finally:
            tracemalloc.stop()

    activation_bytes = 4 * 2048 * 64 * 8  # two hidden layers, each kept before and after relu
    (large, large_loss), (small, small_loss) = peak_bytes(1), peak_bytes(16)
    budget = activation_bytes // 4
    assert large > activation_bytes > budget > small
    assert small_loss == pytest.approx(large_loss, rel=1e-12)


def test_step_refuses_an_update_without_rows_before_touching_anything():
    params = make_params()
    x, y = make_rows(0)

    def update(params, gradients):
        raise AssertionError("must not be called")

    for microbatches in ([], [(x, y), (x, y)]):
        with pytest.raises(ConfigError, match="an update must have at least one row; got"):
            accumulation.grad_accumulation_step(params, microbatches, update)
    bad = [(np.zeros((2, 3)), np.zeros((1, 2)))]
    with pytest.raises(ConfigError, match="same number of rows"):
        accumulation.grad_accumulation_step(params, bad, update)
