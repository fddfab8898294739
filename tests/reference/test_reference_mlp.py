"""A1: forward, losses and the hand-written backward pass of the reference MLP."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.errors import ConfigError
from mpisim.reference import mlp

F64 = np.float64


def rng_for(name, seed=0):
    """Give each parameter name a generator of its own."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def relative_error(got, want):
    """Largest difference, relative to the largest element."""
    return float(np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30))


# --- make_synthetic_regression_batch ---


def test_synthetic_batch_has_the_asked_shapes_and_spread():
    x, y = mlp.make_synthetic_regression_batch(np.random.default_rng(0), 4000, 5, 2, 0.5)
    assert x.shape == (4000, 5) and y.shape == (4000, 2)
    assert x.dtype == y.dtype == np.float64
    assert abs(x.mean()) < 0.05 and abs(x.std() - 1) < 0.05
    residual = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    assert abs(residual.std() - 0.5) < 0.03


def test_synthetic_batch_by_hand_from_the_same_draws():
    draws = np.random.default_rng(3)
    teacher, x_want = draws.standard_normal((4, 1)) / 2, draws.standard_normal((3, 4))
    y_want = x_want @ teacher + 0.25 * draws.standard_normal((3, 1))
    x, y = mlp.make_synthetic_regression_batch(np.random.default_rng(3), 3, 4, 1, 0.25)
    assert np.array_equal(x, x_want) and np.array_equal(y, y_want)


def test_synthetic_batch_without_rows_or_with_one():
    for rows in (0, 1):
        x, y = mlp.make_synthetic_regression_batch(np.random.default_rng(0), rows, 3, 2, 0.1)
        assert x.shape == (rows, 3) and y.shape == (rows, 2)


@given(seed=st.integers(0, 2**32), rows=st.integers(8, 30), features=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_synthetic_batch_without_noise_is_exactly_linear_and_repeatable(seed, rows, features):
    def draw(noise):
        return mlp.make_synthetic_regression_batch(
            np.random.default_rng(seed), rows, features, 1, noise
        )

    x, y = draw(0.0)
    teacher = np.linalg.lstsq(x, y, rcond=None)[0]
    assert np.max(np.abs(x @ teacher - y)) < 1e-10
    assert all(np.array_equal(a, b) for a, b in zip(draw(0.3), draw(0.3), strict=True))
    assert np.array_equal(draw(0.3)[0], x)  # noise changes the targets, never the inputs


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"num_rows": -1}, r"num_rows must be an integer >= 0; got -1\."),
        ({"num_features": 0}, r"num_features must be an integer >= 1; got 0\."),
        ({"num_targets": 1.0}, r"num_targets must be an integer >= 1; got 1\.0\."),
        ({"noise": -0.1}, r"noise must be finite, >= 0; got -0\.1\."),
        ({"noise": math.inf}, r"noise must be finite"),
        ({"noise": "loud"}, r"noise must be finite, >= 0; got 'loud'\."),
        ({"rng": 7}, r"rng must be a numpy.random.Generator; got type int\."),
    ],
)
def test_synthetic_batch_refuses(changed, sentence):
    arguments = {
        "rng": np.random.default_rng(0),
        "num_rows": 2,
        "num_features": 2,
        "num_targets": 1,
        "noise": 0.0,
    }
    with pytest.raises(ConfigError, match=sentence):
        mlp.make_synthetic_regression_batch(**{**arguments, **changed})


# --- init_mlp and the names of parameters ---


def test_init_by_hand():
    params = mlp.init_mlp(rng_for, (4, 3, 2), "float32")
    assert list(params) == [
        "block0.linear.weight",
        "block0.linear.bias",
        "head.linear.weight",
        "head.linear.bias",
    ]
    want = rng_for("block0.linear.weight").standard_normal((4, 3)) / 2.0
    assert np.array_equal(params["block0.linear.weight"], want.astype(np.float32))
    assert not params["head.linear.bias"].any()
    assert {param.dtype for param in params.values()} == {np.dtype(np.float32)}


def test_init_of_the_smallest_model():
    params = mlp.init_mlp(rng_for, (1, 1))
    assert {name: param.shape for name, param in params.items()} == {
        "head.linear.weight": (1, 1),
        "head.linear.bias": (1,),
    }
    assert mlp.mlp_layers(params) == [("head.linear.weight", "head.linear.bias")]


def test_layers_are_found_in_any_order_of_the_dict():
    params = mlp.init_mlp(rng_for, (1, 2, 3, 4))
    assert mlp.mlp_layers(dict(reversed(params.items()))) == mlp.layer_param_names(3)
    assert [weight for weight, _ in mlp.layer_param_names(3)] == [
        "block0.linear.weight",
        "block1.linear.weight",
        "head.linear.weight",
    ]
    with pytest.raises(ConfigError, match="num_layers must be an integer >= 1; got 0"):
        mlp.layer_param_names(0)


def test_init_depends_on_names_not_on_what_else_is_initialised():
    shallow = mlp.init_mlp(rng_for, (4, 3, 2))
    deep = mlp.init_mlp(rng_for, (4, 3, 5, 3, 2))
    for name, param in shallow.items():
        assert np.array_equal(param, deep[name])


@pytest.mark.parametrize(
    ("sizes", "dtype", "sentence"),
    [
        ((3,), "float64", r"sizes must name at least an input and an output width; got \(3,\)\."),
        ((3, 0), "float64", r"sizes\[1\] must be an integer >= 1; got 0\."),
        ((3, True), "float64", r"sizes\[1\] must be an integer >= 1; got True\."),
        ((3, 1), "float16", r"dtype must be one of float32, float64; got float16\."),
        ((3, 1), "int64", r"dtype must be one of"),
    ],
)
def test_init_refuses(sizes, dtype, sentence):
    with pytest.raises(ConfigError, match=sentence):
        mlp.init_mlp(rng_for, sizes, dtype)


@pytest.mark.parametrize("drop", [None, "block0.linear.bias", "head.linear.weight"])
def test_params_with_gaps_are_refused(drop):
    params = mlp.init_mlp(rng_for, (2, 2, 2))
    params = {name: param for name, param in params.items() if drop and name != drop}
    with pytest.raises(ConfigError, match=r"params must hold the linear\.weight and linear\.bias"):
        mlp.mlp_layers(params)


# --- linear layer ---

X = np.array([[1.0, 2.0], [3.0, 4.0]])
W = np.array([[1.0, 0.0, -1.0], [2.0, 1.0, 0.0]])
B = np.array([10.0, 20.0, 30.0])
DY = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]])


def test_linear_forward_by_hand():
    want = [[15.0, 22.0, 29.0], [21.0, 24.0, 27.0]]
    assert mlp.linear_forward(X, W, B).tolist() == want


def test_linear_backward_by_hand():
    dx, dweight, dbias = mlp.linear_backward(X, W, DY)
    assert dx.tolist() == [[-1.0, 2.0], [1.0, 1.0]]
    assert dweight.tolist() == [[1.0, 3.0, -1.0], [2.0, 4.0, 0.0]]
    assert dbias.tolist() == [1.0, 1.0, 1.0]


def test_first_layer_backward_is_linear_backward_without_the_input():
    dweight, dbias = mlp.first_layer_backward(X, DY)
    _, dweight_want, dbias_want = mlp.linear_backward(X, W, DY)
    assert np.array_equal(dweight, dweight_want) and np.array_equal(dbias, dbias_want)
    assert dweight.tolist() == [[1.0, 3.0, -1.0], [2.0, 4.0, 0.0]]
    assert dbias.tolist() == [1.0, 1.0, 1.0]


def test_linear_without_rows_gives_zero_gradients():
    x, dy = np.zeros((0, 2)), np.zeros((0, 3))
    assert mlp.linear_forward(x, W, B).shape == (0, 3)
    dx, dweight, dbias = mlp.linear_backward(x, W, dy)
    assert dx.shape == (0, 2)
    assert dweight.shape == (2, 3) and not dweight.any() and not dbias.any()
    assert not mlp.first_layer_backward(x, dy)[0].any()


def test_linear_leaves_its_arguments_alone_and_shares_nothing():
    x, weight, bias, dy = X.copy(), W.copy(), B.copy(), DY.copy()
    results = [mlp.linear_forward(x, weight, bias), *mlp.linear_backward(x, weight, dy)]
    for array, before in ((x, X), (weight, W), (bias, B), (dy, DY)):
        assert np.array_equal(array, before)
        assert not any(np.shares_memory(array, result) for result in results)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_linear_keeps_the_dtype(dtype):
    x, weight, bias, dy = (array.astype(dtype) for array in (X, W, B, DY))
    results = [mlp.linear_forward(x, weight, bias), *mlp.linear_backward(x, weight, dy)]
    assert {result.dtype for result in results} == {np.dtype(dtype)}


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 4), outputs=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_linear_backward_matches_central_differences(seed, rows, outputs):
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, 3)), rng.standard_normal((3, outputs))
    bias, dy = rng.standard_normal(outputs), rng.standard_normal((rows, outputs))
    dx, dweight, dbias = mlp.linear_backward(x, weight, dy)
    numeric = mlp.central_difference_gradient
    assert (
        relative_error(
            numeric(lambda p: float(np.sum(mlp.linear_forward(p, weight, bias) * dy)), x), dx
        )
        < 1e-6
    )
    assert (
        relative_error(
            numeric(lambda p: float(np.sum(mlp.linear_forward(x, p, bias) * dy)), weight), dweight
        )
        < 1e-6
    )
    assert (
        relative_error(
            numeric(lambda p: float(np.sum(mlp.linear_forward(x, weight, p) * dy)), bias), dbias
        )
        < 1e-6
    )


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: mlp.linear_forward(X[0], W, B), r"x must be a float32 or float64 ndarray of 2 d"),
        (lambda: mlp.linear_forward(X, W, B[:2]), r"bias must have shape \(3,\); got"),
        (lambda: mlp.linear_forward(X[:, :1], W, B), r"x must have shape \(2, 2\); got \(2, 1\)\."),
        (lambda: mlp.linear_forward(X.astype(int), W, B), r"x must be a float32 or float64"),
        (lambda: mlp.linear_forward(X.tolist(), W, B), r"got type list\."),
        (lambda: mlp.linear_forward(X.astype("f4"), W, B), r"must have one dtype; got x float32"),
        (lambda: mlp.linear_backward(X, W.T, DY), r"weight must have shape \(2, 3\); got \(3, 2\)"),
        (lambda: mlp.linear_backward(X, W, DY[:1]), r"dy must have shape \(2, 3\); got \(1, 3\)\."),
        (lambda: mlp.linear_backward(X, W.astype("f4"), DY), r"must have one dtype"),
        (lambda: mlp.first_layer_backward(X, DY[:1]), r"dy must have shape \(2, 3\)"),
        (lambda: mlp.first_layer_backward(X, DY.astype("f4")), r"must have one dtype"),
    ],
)
def test_linear_refuses(call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call()


# --- activations ---


def test_relu_by_hand():
    z, dy = np.array([-2.0, 0.0, 3.0]), np.array([5.0, 6.0, 7.0])
    assert mlp.relu_forward(z).tolist() == [0.0, 0.0, 3.0]
    assert mlp.relu_backward(z, dy).tolist() == [0.0, 0.0, 7.0]


def test_relu_does_not_let_an_infinite_gradient_through_a_closed_gate():
    assert mlp.relu_backward(np.array([-1.0, 1.0]), np.array([np.inf, np.inf])).tolist() == [
        0.0,
        math.inf,
    ]


def test_tanh_by_hand():
    z, dy = np.array([0.0, math.log(2.0)]), np.array([2.0, 25.0])
    assert mlp.tanh_forward(z) == pytest.approx([0.0, 0.6], abs=1e-15)  # (2 - 1/2) / (2 + 1/2)
    assert mlp.tanh_backward(z, dy) == pytest.approx([2.0, 16.0], abs=1e-13)


def test_gelu_by_hand():
    inner = math.tanh(math.sqrt(2 / math.pi) * 1.044715)
    assert mlp.gelu_forward(np.array([0.0, 1.0, -1.0])) == pytest.approx(
        [0.0, 0.5 * (1 + inner), -0.5 * (1 - inner)], abs=1e-15
    )
    slope_at_one = 0.5 * (1 + inner) + 0.5 * (1 - inner**2) * math.sqrt(2 / math.pi) * 1.134145
    assert mlp.gelu_backward(np.array([0.0, 1.0]), np.array([4.0, 1.0])) == pytest.approx(
        [2.0, slope_at_one], abs=1e-15
    )
    # The exact gelu is z * Phi(z); the tanh form stays close to it.
    z = np.linspace(-6, 6, 241)
    exact = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z]
    assert np.max(np.abs(mlp.gelu_forward(z) - exact)) < 5e-4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", sorted(mlp.ACTIVATIONS))
def test_activations_saturate_without_overflow(name, dtype):
    forward, backward = mlp.ACTIVATIONS[name]
    largest = np.finfo(dtype).max
    z = np.array([largest, -largest, 1e20, -1e20], dtype)
    with np.errstate(all="raise", under="ignore"):
        y, dz = forward(z), backward(z, np.ones_like(z))
    assert y.dtype == dz.dtype == dtype
    assert y.tolist() == ([1, -1, 1, -1] if name == "tanh" else [z[0], 0, z[2], 0])
    assert dz.tolist() == ([0, 0, 0, 0] if name == "tanh" else [1, 0, 1, 0])


@pytest.mark.parametrize("name", sorted(mlp.ACTIVATIONS))
def test_activations_take_empty_arrays(name):
    forward, backward = mlp.ACTIVATIONS[name]
    assert forward(np.zeros((0, 3))).shape == (0, 3)
    assert backward(np.zeros((0, 3)), np.zeros((0, 3))).shape == (0, 3)


@given(
    z=st.lists(st.floats(-12, 12).filter(lambda v: abs(v) > 1e-3), min_size=1, max_size=6),
    name=st.sampled_from(sorted(mlp.ACTIVATIONS)),
)
@settings(max_examples=60, deadline=None)
def test_activation_slopes_match_central_differences(z, name):
    forward, backward = mlp.ACTIVATIONS[name]
    z = np.array(z)
    dy = np.linspace(1, 2, z.size)
    before = z.copy(), dy.copy()
    got = backward(z, dy)
    want = mlp.central_difference_gradient(lambda p: float(np.sum(forward(p) * dy)), z)
    assert np.max(np.abs(got - want)) < 1e-6
    assert np.array_equal(z, before[0]) and np.array_equal(dy, before[1])


@pytest.mark.parametrize("name", sorted(mlp.ACTIVATIONS))
def test_activations_refuse(name):
    forward, backward = mlp.ACTIVATIONS[name]
    with pytest.raises(ConfigError, match="z must be a float32 or float64 ndarray of 1 or more"):
        forward(np.array([1, 2]))
    with pytest.raises(ConfigError, match="z must be a float32 or float64 ndarray of 1 or more"):
        forward(np.array(1.0))
    with pytest.raises(ConfigError, match=r"dy must have shape \(2,\); got \(3,\)"):
        backward(np.zeros(2), np.zeros(3))
    with pytest.raises(ConfigError, match="must have one dtype; got z float64, dy float32"):
        backward(np.zeros(2), np.zeros(2, np.float32))


# --- mean squared error ---


def test_mean_squared_error_sums_outputs_and_averages_rows():
    prediction, target = np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[0.0, 0.0], [3.0, 4.0]])
    assert mlp.mean_squared_error(prediction, target) == (1 + 4 + 0 + 1) / 2
    assert mlp.mean_squared_error_backward(prediction, target).tolist() == [[1, 2], [0, 1]]
    assert mlp.mean_squared_error_backward(prediction, target, seed=0.5).tolist() == [
        [0.5, 1.0],
        [0.0, 0.5],
    ]


def test_mean_squared_error_boundaries():
    assert mlp.mean_squared_error(np.zeros((1, 1)), np.zeros((1, 1))) == 0.0
    # Squares are summed in float64: 2**26 + 1 does not exist in float32.
    prediction = np.array([[2.0**13, 1.0]], np.float32)
    assert mlp.mean_squared_error(prediction, np.zeros((1, 2), np.float32)) == 2.0**26 + 1


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), outputs=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_mean_squared_error_gradient_and_row_order(seed, rows, outputs):
    rng = np.random.default_rng(seed)
    prediction, target = rng.standard_normal((2, rows, outputs))
    got = mlp.mean_squared_error_backward(prediction, target)
    want = mlp.central_difference_gradient(lambda p: mlp.mean_squared_error(p, target), prediction)
    assert relative_error(got, want) < 1e-6
    order = rng.permutation(rows)
    assert mlp.mean_squared_error(prediction[order], target[order]) == pytest.approx(
        mlp.mean_squared_error(prediction, target), rel=1e-14
    )


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda f, s: f(np.zeros((0, 1)), np.zeros((0, 1)), *s), "at least one row; got 0 rows"),
        (lambda f, s: f(np.zeros((2, 1)), np.zeros((2, 2)), *s), r"target must have shape \(2, 1"),
        (lambda f, s: f(np.zeros(2), np.zeros(2), *s), r"prediction must be .* of 2 dims"),
        (lambda f, s: f(np.zeros((2, 1)), np.zeros((2, 1), "f4"), *s), "must have one dtype"),
    ],
)
def test_mean_squared_error_refuses(call, sentence):
    for function, seed in (
        (mlp.mean_squared_error, ()),
        (mlp.mean_squared_error_backward, (1.0,)),
    ):
        with pytest.raises(ConfigError, match=sentence):
            call(function, seed)


@pytest.mark.parametrize("seed", [-1.0, math.nan, math.inf])
def test_losses_refuse_a_bad_seed(seed):
    with pytest.raises(ConfigError, match="seed must be finite, >= 0"):
        mlp.mean_squared_error_backward(np.zeros((1, 1)), np.zeros((1, 1)), seed)
    with pytest.raises(ConfigError, match="seed must be finite, >= 0"):
        mlp.softmax_cross_entropy_backward(np.zeros((1, 2)), np.array([0]), seed)
    with pytest.raises(ConfigError, match="seed must be finite, >= 0"):
        mlp.softmax_cross_entropy_sum_backward(np.zeros((1, 2)), np.array([0]), seed=seed)


# --- softmax cross entropy ---

LOGITS = np.log(np.array([[1.0, 3.0], [1.0, 1.0], [4.0, 1.0]]))
IDS = np.array([1, 0, 1])


def test_cross_entropy_by_hand():
    want = math.log(4 / 3) + math.log(2) + math.log(5)
    loss_sum, count = mlp.softmax_cross_entropy_sum(LOGITS, IDS)
    assert loss_sum == pytest.approx(want, abs=1e-14) and count == 3
    assert mlp.softmax_cross_entropy(LOGITS, IDS) == pytest.approx(want / 3, abs=1e-14)
    dsum = np.array([[0.25, -0.25], [-0.5, 0.5], [0.8, -0.8]])
    assert np.allclose(mlp.softmax_cross_entropy_sum_backward(LOGITS, IDS), dsum, atol=1e-15)
    assert np.allclose(mlp.softmax_cross_entropy_backward(LOGITS, IDS), dsum / 3, atol=1e-15)


def test_cross_entropy_boundaries():
    assert mlp.softmax_cross_entropy_sum(np.zeros((0, 3)), np.zeros(0, int)) == (0.0, 0)
    assert mlp.softmax_cross_entropy_sum_backward(np.zeros((0, 3)), np.zeros(0, int)).shape == (
        0,
        3,
    )
    assert mlp.softmax_cross_entropy(np.array([[7.0]]), np.array([0])) == 0.0  # one class
    no_row = np.array([False, False, False])
    assert mlp.softmax_cross_entropy_sum(LOGITS, IDS, no_row) == (0.0, 0)
    assert not mlp.softmax_cross_entropy_sum_backward(LOGITS, IDS, no_row).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cross_entropy_is_stable_for_saturated_logits(dtype):
    logits = np.array([[1e4, 0.0, -1e4], [1e4, 0.0, -1e4]], dtype)
    ids = np.array([0, 2], np.uint8)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        assert mlp.softmax_cross_entropy_sum(logits, ids) == (2e4, 2)
        dlogits = mlp.softmax_cross_entropy_sum_backward(logits, ids)
    assert dlogits.dtype == dtype
    assert dlogits.tolist() == [[0, 0, 0], [1, 0, -1]]


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 5),
    classes=st.integers(2, 5),
    offset=st.floats(-50, 50),
)
@settings(max_examples=30, deadline=None)
def test_cross_entropy_invariants(seed, rows, classes, offset):
    rng = np.random.default_rng(seed)
    logits, ids = rng.standard_normal((rows, classes)), rng.integers(0, classes, rows)
    before = logits.copy()
    got = mlp.softmax_cross_entropy_backward(logits, ids)
    want = mlp.central_difference_gradient(lambda p: mlp.softmax_cross_entropy(p, ids), logits)
    assert relative_error(got, want) < 1e-6
    assert np.max(np.abs(got.sum(axis=1))) < 1e-15  # probabilities and one-hot both sum to 1
    assert mlp.softmax_cross_entropy(logits + offset, ids) == pytest.approx(
        mlp.softmax_cross_entropy(logits, ids), rel=1e-11
    )
    # Sums and counts of any two parts add up to the whole.
    valid = rng.integers(0, 2, rows).astype(bool)
    part, other = (mlp.softmax_cross_entropy_sum(logits, ids, v) for v in (valid, ~valid))
    whole = mlp.softmax_cross_entropy_sum(logits, ids)
    assert part[0] + other[0] == pytest.approx(whole[0], rel=1e-13)
    assert part[1] + other[1] == whole[1] == rows
    assert np.array_equal(logits, before)


def test_c009_the_denominator_counts_the_terms_that_are_summed():
    rng = np.random.default_rng(0)
    labels = np.array([3, 1, 4, 1, 5])
    # One text of five labels: the last position predicts nothing.
    shifted, valid = np.append(labels[1:], -100), np.array([True, True, True, True, False])
    logits = rng.standard_normal((5, 6))
    loss_sum, count = mlp.softmax_cross_entropy_sum(logits, shifted, valid)
    terms = [
        mlp.softmax_cross_entropy_sum(logits[i : i + 1], shifted[i : i + 1])[0] for i in range(4)
    ]
    assert count == 4 == np.count_nonzero(terms)
    assert loss_sum == pytest.approx(sum(terms), rel=1e-14)
    # Two packed texts of 3 and 2 labels: 2 + 1 targets.
    packed_valid = np.array([True, True, False, True, False])
    _, packed_count = mlp.softmax_cross_entropy_sum(logits, shifted, packed_valid)
    dlogits = mlp.softmax_cross_entropy_sum_backward(logits, shifted, packed_valid)
    assert packed_count == 3 == np.count_nonzero(dlogits.any(axis=1))


@pytest.mark.parametrize(
    ("logits", "ids", "valid", "sentence"),
    [
        (LOGITS, np.array([0, 1, 2]), None, r"class ids must be in 0\.\.1; got 2\."),
        (LOGITS, np.array([0, -1, 1]), None, r"class ids must be in 0\.\.1; got -1\."),
        (
            LOGITS,
            np.array([0.0, 1.0, 1.0]),
            None,
            "class_ids must be an ndarray of integers; got f",
        ),
        (LOGITS, [0, 1, 1], None, "class_ids must be an ndarray of integers; got list"),
        (LOGITS, np.array([0, 1]), None, r"class_ids must have shape \(3,\); got \(2,\)"),
        (
            LOGITS,
            IDS,
            np.array([1, 1, 0]),
            r"valid must be a bool ndarray of shape \(3,\); got int",
        ),
        (LOGITS, IDS, [True], r"valid must be a bool ndarray of shape \(3,\); got \[True\]"),
        (np.zeros((3, 0)), IDS, None, "the number of classes must be an integer >= 1; got 0"),
        (LOGITS[0], IDS, None, "logits must be a float32 or float64 ndarray of 2 dims"),
    ],
)
def test_cross_entropy_refuses(logits, ids, valid, sentence):
    for function in (mlp.softmax_cross_entropy_sum, mlp.softmax_cross_entropy_sum_backward):
        with pytest.raises(ConfigError, match=sentence):
            function(logits, ids, valid)


def test_mean_cross_entropy_refuses_no_rows():
    for function in (mlp.softmax_cross_entropy, mlp.softmax_cross_entropy_backward):
        with pytest.raises(ConfigError, match="must have at least one row; got 0 rows"):
            function(np.zeros((0, 2)), np.zeros(0, int))


# --- the whole network ---


def test_two_layer_forward_and_backward_by_hand():
    params = {
        "block0.linear.weight": np.array([[1.0, -1.0]]),
        "block0.linear.bias": np.array([0.0, 1.0]),
        "head.linear.weight": np.array([[2.0], [3.0]]),
        "head.linear.bias": np.array([0.5]),
    }
    x, y = np.array([[2.0]]), np.array([[1.5]])
    # z = (2, -1), h = relu(z) = (2, 0), prediction 4.5, loss 9, dprediction 6
    prediction, (inputs, preactivations) = mlp.mlp_forward(params, x)
    assert prediction.tolist() == [[4.5]]
    assert inputs[0] is x and inputs[1].tolist() == [[2.0, 0.0]]
    assert [z.tolist() for z in preactivations] == [[[2.0, -1.0]]]
    loss, gradients = mlp.mlp_loss_and_gradients(params, x, y)
    assert loss == 9.0
    assert {name: gradient.tolist() for name, gradient in gradients.items()} == {
        "head.linear.weight": [[12.0], [0.0]],
        "head.linear.bias": [6.0],
        "block0.linear.weight": [[24.0, 0.0]],  # dz = (6 * 2, 0): the second unit is off
        "block0.linear.bias": [12.0, 0.0],
    }
    assert list(gradients)[0] == "head.linear.weight"  # the order backward finishes them in


def test_forward_without_rows_and_without_hidden_layers():
    params = mlp.init_mlp(rng_for, (3, 4, 2))
    prediction, saved = mlp.mlp_forward(params, np.zeros((0, 3)))
    assert prediction.shape == (0, 2)
    gradients = mlp.mlp_backward(params, saved, np.zeros((0, 2)))
    assert not any(gradient.any() for gradient in gradients.values())
    linear = mlp.init_mlp(rng_for, (3, 2))
    x = np.arange(3.0).reshape(1, 3)
    want = mlp.linear_forward(x, linear["head.linear.weight"], linear["head.linear.bias"])
    assert np.array_equal(mlp.mlp_forward(linear, x)[0], want)


@pytest.mark.parametrize("loss", sorted(mlp.LOSSES))
@pytest.mark.parametrize("activation", sorted(mlp.ACTIVATIONS))
@pytest.mark.parametrize("sizes", [(4, 3), (4, 5, 3), (4, 6, 5, 2, 3)])
def test_backward_matches_central_differences(sizes, activation, loss):
    rng = np.random.default_rng(11)
    params = mlp.init_mlp(rng_for, sizes)
    for _, bias in mlp.mlp_layers(params):  # zeros would hide a fault in the gradients of biases
        params[bias] = 0.3 * rng.standard_normal(params[bias].shape)
    x = rng.standard_normal((7, 4))
    classes = loss == "softmax_cross_entropy"
    y = rng.integers(0, 3, 7) if classes else rng.standard_normal((7, 3))
    before = {name: param.copy() for name, param in params.items()}
    _, gradients = mlp.mlp_loss_and_gradients(params, x, y, activation, loss, seed=0.75)
    assert set(gradients) == set(params)
    for name, param in params.items():
        assert np.array_equal(param, before[name])

        def seeded_loss(moved, name=name):
            replaced = {**params, name: moved}
            return 0.75 * mlp.mlp_loss_and_gradients(replaced, x, y, activation, loss)[0]

        want = mlp.central_difference_gradient(seeded_loss, param)
        assert relative_error(gradients[name], want) < 1e-6, name


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_rows_are_independent(seed, rows):
    rng = np.random.default_rng(seed)
    params = mlp.init_mlp(lambda name: rng_for(name, seed), (3, 4, 2))
    x, y = rng.standard_normal((rows, 3)), rng.standard_normal((rows, 2))
    loss, gradients = mlp.mlp_loss_and_gradients(params, x, y, "tanh")
    parts = [
        mlp.mlp_loss_and_gradients(params, x[i : i + 1], y[i : i + 1], "tanh") for i in range(rows)
    ]
    assert loss == pytest.approx(sum(part[0] for part in parts) / rows, rel=1e-12)
    for name, gradient in gradients.items():
        mean = sum(part[1][name] for part in parts) / rows
        assert np.allclose(gradient, mean, rtol=1e-11, atol=1e-13)


def test_float32_stays_float32():
    params = mlp.init_mlp(rng_for, (3, 4, 2), "float32")
    x, y = np.ones((2, 3), np.float32), np.ones((2, 2), np.float32)
    for activation in mlp.ACTIVATIONS:
        prediction, _ = mlp.mlp_forward(params, x, activation)
        _, gradients = mlp.mlp_loss_and_gradients(params, x, y, activation, seed=1 / 3)
        assert prediction.dtype == np.float32
        assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(np.float32)}


def test_gradient_descent_learns_the_synthetic_teacher():
    x, y = mlp.make_synthetic_regression_batch(np.random.default_rng(5), 64, 4, 1, 0.0)
    params = mlp.init_mlp(rng_for, (4, 16, 1))
    losses = []
    for _ in range(200):
        loss, gradients = mlp.mlp_loss_and_gradients(params, x, y, "gelu")
        losses.append(loss)
        params = {name: param - 0.05 * gradients[name] for name, param in params.items()}
    assert losses[-1] < 0.02 * losses[0]


def test_network_refuses():
    params = mlp.init_mlp(rng_for, (3, 4, 2))
    x, y = np.zeros((2, 3)), np.zeros((2, 2))
    with pytest.raises(ConfigError, match="activation must be one of relu, tanh, gelu; got 'elu'"):
        mlp.mlp_forward(params, x, "elu")
    with pytest.raises(ConfigError, match="loss must be one of mean_squared_error, softmax_cross_"):
        mlp.mlp_loss_and_gradients(params, x, y, loss="hinge")
    with pytest.raises(ConfigError, match="must have one dtype"):
        mlp.mlp_forward(params, x.astype(np.float32))
    with pytest.raises(ConfigError, match=r"x must have shape \(2, 3\); got \(2, 5\)"):
        mlp.mlp_forward(params, np.zeros((2, 5)))
    prediction, saved = mlp.mlp_forward(params, x)
    with pytest.raises(ConfigError, match="saved must hold 1 layer inputs and 0 preactivations"):
        mlp.mlp_backward(mlp.init_mlp(rng_for, (3, 2)), saved, prediction)
    with pytest.raises(ConfigError, match=r"dprediction must have shape \(2, 2\); got \(1, 2\)"):
        mlp.mlp_backward(params, saved, prediction[:1])
    with pytest.raises(ConfigError, match="activation must be one of"):
        mlp.mlp_backward(params, saved, prediction, "elu")


def test_c005_only_losses_that_are_means_can_be_asked_for():
    # A loss that returned a sum would be weighted by rows twice; none is registered.
    for forward, _ in mlp.LOSSES.values():
        y = np.zeros((1, 2)) if forward is mlp.mean_squared_error else np.array([0])
        one, three = np.ones((1, 2)), np.ones((3, 2))
        assert forward(one, y) == pytest.approx(forward(three, np.repeat(y, 3, axis=0)), rel=1e-14)


# --- central_difference_gradient ---


def test_central_difference_by_hand():
    point = np.array([[1.0, -2.0]])
    got = mlp.central_difference_gradient(lambda p: float(p[0, 0] ** 2 + 3 * p[0, 1]), point)
    assert got == pytest.approx(np.array([[2.0, 3.0]]), abs=1e-9)
    assert point.tolist() == [[1.0, -2.0]]


def test_central_difference_of_nothing_and_of_a_parabola():
    assert mlp.central_difference_gradient(lambda p: 0.0, np.zeros(0)).shape == (0,)
    # Exact for polynomials of degree two, whatever the step.
    for step in (1.0, 0.25):
        got = mlp.central_difference_gradient(lambda p: float(p[0] ** 2), np.array([3.0]), step)
        assert got.tolist() == [6.0]


def test_central_difference_refuses():
    with pytest.raises(ConfigError, match="point must be float64; got float32"):
        mlp.central_difference_gradient(lambda p: 0.0, np.zeros(1, np.float32))
    with pytest.raises(ConfigError, match="step must be finite, > 0; got 0.0"):
        mlp.central_difference_gradient(lambda p: 0.0, np.zeros(1), step=0.0)
