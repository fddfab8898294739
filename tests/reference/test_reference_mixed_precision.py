"""A4: 16-bit storage, float32 masters, the loss scale, and the step that skips as a whole."""

import dataclasses
import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.errors import ConfigError, LossScaleError
from mpisim.reference import accumulation, mlp, optimizers
from mpisim.reference import data_parallel as dp
from mpisim.reference import mixed_precision as mp
from mpisim.reference.mixed_precision import LossScale

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = ["float16", "bfloat16"]
SMALLEST_FLOAT16 = 2.0**-24


def f32(*values):
    return np.array(values, np.float32)


def make_params(sizes=(3, 6, 2), seed=0):
    rng = np.random.default_rng(seed)
    return mlp.init_mlp(lambda name: rng, sizes, "float32")


def make_rows(num_rows, seed=1):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((num_rows, 3)), rng.standard_normal((num_rows, 2))
    return x.astype(np.float32), y.astype(np.float32)


def constant(rate):
    return lambda update: rate


def bits(tensors):
    return {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in tensors.items()}


def state_bits(state):
    return bits(state.masters), bits(state.optimizer.first), bits(state.optimizer.second)


# --- storage ---


def test_rounding_by_hand():
    # float16 near 1 steps by 2**-10: the halves go to the even neighbour.
    x = f32(1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, 65504.0, 65519.0)
    got = mp.round_to_half(x, "float16")
    assert got.dtype == np.float16
    assert got.tolist() == [1.0, 1 + 2**-9, 1 + 2**-10, 65504.0, 65504.0]
    # bfloat16 near 1 steps by 2**-7.
    got = mp.round_to_half(f32(1 + 2**-8, 1 + 3 * 2**-8, 3e38), "bfloat16")
    assert got.dtype == BFLOAT16
    assert got.astype(np.float32).tolist()[:2] == [1.0, 1 + 2**-6]
    assert np.isfinite(got.astype(np.float32)).all()


def test_rounding_at_the_ends_of_the_range():
    x = f32(65520.0, -1e30, SMALLEST_FLOAT16, SMALLEST_FLOAT16 / 2, -0.0, math.nan, math.inf)
    got = mp.round_to_half(x, "float16")
    assert got[:5].tolist() == [math.inf, -math.inf, SMALLEST_FLOAT16, 0.0, 0.0]
    assert np.signbit(got[4]) and np.isnan(got[5]) and got[6] == math.inf
    largest = np.finfo(np.float32).max
    wide = mp.widen(mp.round_to_half(f32(largest, math.nan), "bfloat16"))
    assert wide[0] == math.inf and np.isnan(wide[1])
    for dtype in HALVES:
        assert mp.round_to_half(np.zeros((0, 2), np.float32), dtype).shape == (0, 2)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_value_survives_widening(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(mp.HALF_DTYPES[dtype])
    wide = mp.widen(every)
    assert wide.dtype == np.float32
    back = mp.round_to_half(wide, dtype)
    number = ~np.isnan(wide)
    assert np.array_equal(back[number].view(np.uint16), every[number].view(np.uint16))
    assert np.isnan(back[~number].astype(np.float32)).all() and (~number).any()


@given(st.floats(-60000, 60000, width=32), st.sampled_from(HALVES))
def test_rounding_errs_by_at_most_half_a_unit(value, dtype):
    got = float(mp.widen(mp.round_to_half(f32(value), dtype))[0])
    relative = 2**-11 if dtype == "float16" else 2**-8
    assert abs(got - value) <= max(relative * abs(value), SMALLEST_FLOAT16 / 2)


def test_storage_refuses():
    with pytest.raises(ConfigError, match="x must be float32; got float64"):
        mp.round_to_half(np.zeros(2), "float16")
    with pytest.raises(ConfigError, match="dtype must be one of float16, bfloat16; got 'int8'"):
        mp.round_to_half(f32(1.0), "int8")
    with pytest.raises(ConfigError, match="x must be a float16 or bfloat16 ndarray of 1 or more"):
        mp.widen(f32(1.0))
    with pytest.raises(ConfigError, match="x must be a float16 or bfloat16 .*; got type list"):
        mp.widen([1.0])


def test_working_weights_are_the_rounded_masters():
    masters = {"w": f32(1.0009, 2.0), "empty": np.zeros(0, np.float32)}
    before = bits(masters)
    working = mp.half_params(masters, "bfloat16")
    assert working["w"].astype(np.float32).tolist() == [1.0, 2.0]
    assert working["empty"].dtype == BFLOAT16
    assert bits(masters) == before
    with pytest.raises(ConfigError, match="must be float32; got float64"):
        mp.half_params({"w": np.zeros(2)}, "float16")


# --- linear layer ---


@pytest.mark.parametrize("dtype", HALVES)
def test_linear_by_hand(dtype):
    half = mp.HALF_DTYPES[dtype]
    x, weight, bias = np.array([[1, 2]], half), np.array([[3], [4]], half), np.array([5], half)
    y = mp.half_linear_forward(x, weight, bias)
    assert y.dtype == half and y.astype(np.float32).tolist() == [[16.0]]
    dx, dweight, dbias = mp.half_linear_backward(x, weight, np.array([[2]], half))
    assert dx.dtype == half and dx.astype(np.float32).tolist() == [[6.0, 8.0]]
    assert dweight.dtype == dbias.dtype == np.float32
    assert dweight.tolist() == [[2.0], [4.0]] and dbias.tolist() == [2.0]


def test_products_are_added_up_in_float32_and_rounded_once():
    x = np.array([[2048.0] + [1.0] * 64], np.float16)  # 2048 + 1 is not a float16
    ones = np.ones((65, 1), np.float16)
    assert mp.half_linear_forward(x, ones, np.zeros(1, np.float16)).tolist() == [[2112.0]]
    _, _, dbias = mp.half_linear_backward(x.T.copy(), np.ones((1, 1), np.float16), x.T.copy())
    assert dbias.tolist() == [2112.0]
    # 300 * 300 is no float16, but the sum with -300 * 300 + 1 is.
    x = np.array([[300.0, 300.0, 1.0]], np.float16)
    weight = np.array([[300.0], [-300.0], [1.0]], np.float16)
    assert mp.half_linear_forward(x, weight, np.zeros(1, np.float16)).tolist() == [[1.0]]
    # The bias is added before rounding: 2048 + 1 - 1 stays 2048 + 0.
    x, weight = np.array([[2048.0, 3.0]], np.float16), np.ones((2, 1), np.float16)
    assert mp.half_linear_forward(x, weight, np.array([-1.0], np.float16)).tolist() == [[2050.0]]


def test_weight_gradients_are_not_rounded_to_16_bits():
    dy = np.array([[1.0], [2**-12]], np.float16)
    _, dweight, dbias = mp.half_linear_backward(
        np.ones((2, 1), np.float16), np.ones((1, 1), np.float16), dy
    )
    assert dweight.tolist() == [[1 + 2**-12]] and dbias.tolist() == [1 + 2**-12]


def test_linear_boundaries():
    empty = np.zeros((0, 2), np.float16)
    weight, bias = np.ones((2, 3), np.float16), np.ones(3, np.float16)
    assert mp.half_linear_forward(empty, weight, bias).shape == (0, 3)
    dx, dweight, dbias = mp.half_linear_backward(empty, weight, np.zeros((0, 3), np.float16))
    assert dx.shape == (0, 2) and not dweight.any() and not dbias.any()
    largest = np.full((1, 2), 65504.0, np.float16)  # overflow is inf, and no warning
    assert mp.half_linear_forward(largest, weight, bias).tolist() == [[math.inf] * 3]


def test_linear_refuses():
    x, weight, bias = np.ones((1, 2), BFLOAT16), np.ones((2, 3), BFLOAT16), np.ones(3, BFLOAT16)
    with pytest.raises(ConfigError, match="weight must be a bfloat16 ndarray of 2 dims; got shape"):
        mp.half_linear_forward(x, weight.astype(np.float16), bias)
    with pytest.raises(ConfigError, match=r"x must have shape \(1, 3\); got \(1, 2\)"):
        mp.half_linear_forward(x, np.ones((3, 3), BFLOAT16), bias)
    with pytest.raises(ConfigError, match="x must be a float16 or bfloat16 ndarray of 2 dims"):
        mp.half_linear_forward(x.astype(np.float32), weight, bias)
    with pytest.raises(ConfigError, match=r"dy must have shape \(1, 3\); got \(2, 3\)"):
        mp.half_linear_backward(x, weight, np.ones((2, 3), BFLOAT16))


# --- the network ---


def test_network_by_hand():
    params = {
        "block0.linear.weight": f32(1.0, -1.0).reshape(1, 2),
        "block0.linear.bias": f32(0.0, 0.0),
        "head.linear.weight": f32(3.0, 5.0).reshape(2, 1),
        "head.linear.bias": f32(1.0),
    }
    working = mp.half_params(params, "float16")
    x, y = f32(2.0).reshape(1, 1), f32(4.0).reshape(1, 1)
    loss, gradients = mp.half_loss_and_gradients(working, x, y, seed=0.5)
    # h = (2, 0), prediction 7, error 3: dprediction = 0.5 * 2 * 3
    assert loss == 9.0
    assert gradients["head.linear.weight"].tolist() == [[6.0], [0.0]]
    assert gradients["head.linear.bias"].tolist() == [3.0]
    assert gradients["block0.linear.weight"].tolist() == [[18.0, 0.0]]
    assert gradients["block0.linear.bias"].tolist() == [9.0, 0.0]


def test_saved_values_take_half_the_bytes():
    params, (x, _) = make_params(), make_rows(5)
    _, (inputs, preactivations) = mlp.mlp_forward(params, x)
    half_x = mp.round_to_half(x, "bfloat16")
    prediction, saved = mp.half_mlp_forward(mp.half_params(params, "bfloat16"), half_x)
    assert prediction.dtype == BFLOAT16
    for wide, half in zip((inputs, preactivations), saved, strict=True):
        assert [2 * a.nbytes for a in half] == [a.nbytes for a in wide]
    assert saved[0][0] is half_x


@pytest.mark.parametrize("activation", sorted(mlp.ACTIVATIONS))
@pytest.mark.parametrize("loss", sorted(mlp.LOSSES))
@pytest.mark.parametrize(("dtype", "unit"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_half_precision_is_close_to_float32_and_no_closer_than_rounding(
    activation, loss, dtype, unit
):
    params, (x, y) = make_params(sizes=(3, 8, 8, 2)), make_rows(16)
    if loss == "softmax_cross_entropy":
        y = np.arange(16) % 2
    want_loss, want = mlp.mlp_loss_and_gradients(params, x, y, activation, loss)
    got_loss, got = mp.half_loss_and_gradients(
        mp.half_params(params, dtype), x, y, activation, loss
    )
    assert got_loss == pytest.approx(want_loss, rel=30 * unit)
    errors = {
        name: float(np.max(np.abs(got[name] - want[name])) / np.max(np.abs(want[name])))
        for name in want
    }
    assert max(errors.values()) < 100 * unit
    assert max(errors.values()) > unit / 100  # or nothing was stored in 16 bits


def test_networks_take_no_rows_and_refuse_what_does_not_fit():
    working = mp.half_params(make_params(), "float16")
    prediction, saved = mp.half_mlp_forward(working, np.zeros((0, 3), np.float16))
    assert prediction.shape == (0, 2)
    gradients = mp.half_mlp_backward(working, saved, prediction)
    assert not any(gradient.any() for gradient in gradients.values())
    with pytest.raises(ConfigError, match="a mean loss must have at least one row"):
        mp.half_loss_and_gradients(working, *make_rows(0))
    with pytest.raises(ConfigError, match="saved must hold 2 layer inputs and 1 preactivations"):
        mp.half_mlp_backward(working, ((), ()), prediction)
    with pytest.raises(ConfigError, match="activation must be one of relu, tanh, gelu; got 'elu'"):
        mp.half_mlp_forward(working, np.zeros((1, 3), np.float16), "elu")
    with pytest.raises(ConfigError, match="x must be float32; got float64"):
        mp.half_loss_and_gradients(working, np.zeros((1, 3)), np.zeros((1, 2), np.float32))


def test_a_loss_scale_keeps_gradients_that_float16_would_lose():
    params = {"head.linear.weight": f32(0.0).reshape(1, 1), "head.linear.bias": f32(0.0)}
    x, y = f32(1.0).reshape(1, 1), f32(-(2**-26)).reshape(1, 1)  # error 2**-26
    working = mp.half_params(params, "float16")
    _, lost = mp.half_loss_and_gradients(working, x, y)
    assert lost["head.linear.weight"].tolist() == [[0.0]]
    _, scaled = mp.half_loss_and_gradients(working, x, y, seed=mp.scale_loss(1.0, 1024.0))
    kept = mp.unscale_gradients(scaled, 1024.0)
    assert kept["head.linear.weight"].tolist() == [[2**-25]]
    _, wide = mp.half_loss_and_gradients(mp.half_params(params, "bfloat16"), x, y)
    assert wide["head.linear.weight"].tolist() == [[2**-25]]  # bfloat16 needs no scale


# --- loss scale ---


def test_c022_growth_starts_again_after_an_overflow_and_survives_a_checkpoint():
    scale = LossScale(scale=1024.0, growth_interval=2)
    trace = []
    for skipped in (False, True, False, False):
        # Through text and back before every decision: nothing of it lives elsewhere.
        scale = LossScale(**json.loads(json.dumps(dataclasses.asdict(scale))))
        scale = mp.update_loss_scale(scale, skipped)
        trace.append((scale.scale, scale.good_steps))
    assert trace == [(1024.0, 1), (512.0, 0), (512.0, 1), (1024.0, 0)]


def test_b3_and_b6_scale_of_the_worked_update():
    assert mp.update_loss_scale(LossScale(128.0, growth_interval=1), skipped=False).scale == 256.0
    assert mp.update_loss_scale(LossScale(128.0, growth_interval=1), skipped=True).scale == 64.0
    assert mp.scale_loss(6 / 9, 128.0) == 85.33333333333333
    assert mp.scale_loss(3 / 9, 128.0) == 42.666666666666664


def test_the_scale_stops_at_its_floor():
    at_floor = mp.update_loss_scale(LossScale(2.0, min_scale=1.0), skipped=True)
    assert at_floor.scale == 1.0
    with pytest.raises(
        LossScaleError, match=r"must stay at or above min_scale = 1; got .* scale 1"
    ):
        mp.update_loss_scale(at_floor, skipped=True)
    assert mp.update_loss_scale(at_floor, skipped=False).good_steps == 1


def test_the_scale_never_grows_to_infinity():
    state = LossScale(2.0**127, growth_interval=1)
    grown = mp.update_loss_scale(state, skipped=False)
    assert grown.scale == 2.0**127 and grown.good_steps == 0


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
@settings(deadline=None)
def test_the_scale_stays_a_power_of_two_between_floor_and_start_times_growth(outcomes, interval):
    state = LossScale(scale=256.0, growth_interval=interval, min_scale=2.0**-60)
    run = commits = 0
    for skipped in outcomes:
        before = state
        state = mp.update_loss_scale(state, skipped)
        run = 0 if skipped else run + 1
        commits += not skipped
        assert math.frexp(state.scale)[0] == 0.5
        assert 0 <= state.good_steps < interval
        assert state.scale / before.scale == (0.5 if skipped else 2.0 if run % interval == 0 else 1)
    assert state.scale <= 256.0 * 2.0 ** (commits // interval)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"scale": 0.0}, "scale must be finite, > 0; got 0.0"),
        ({"scale": math.inf}, "scale must be finite, > 0; got inf"),
        ({"scale": 1e39}, "between min_scale and the largest float32; got 1e"),
        ({"scale": 0.5}, "between min_scale and the largest float32; got 0.5 with min_scale 1.0"),
        ({"good_steps": -1}, "good_steps must be an integer >= 0; got -1"),
        ({"growth_interval": 0}, "growth_interval must be an integer >= 1; got 0"),
        ({"growth_factor": 1.0}, "growth_factor must be finite, > 1; got 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor must be finite, > 0 and < 1; got 1.0"),
        ({"min_scale": 0.0}, "min_scale must be finite, > 0; got 0.0"),
    ],
)
def test_the_scale_refuses(changed, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LossScale(**changed)


def test_scale_loss_boundaries_and_refusals():
    assert mp.scale_loss(0.0, 65536.0) == 0.0
    assert mp.scale_loss(1.5, 1.0) == 1.5
    with pytest.raises(ConfigError, match="scale must be finite, > 0; got 0"):
        mp.scale_loss(1.0, 0)
    with pytest.raises(ConfigError, match="loss must be finite, >= 0; got nan"):
        mp.scale_loss(math.nan, 2.0)


# --- unscale ---


def test_unscale_by_hand_without_touching_its_argument():
    scaled = {"w": f32(3072.0, 4096.0), "empty": np.zeros(0, np.float32)}
    before = bits(scaled)
    true = mp.unscale_gradients(scaled, 1024.0)
    assert true["w"].tolist() == [3.0, 4.0] and true["w"].dtype == np.float32
    assert true["empty"].shape == (0,)
    assert bits(scaled) == before and not np.shares_memory(true["w"], scaled["w"])


def test_unscale_widens_before_it_divides():
    scaled = {"w": np.array([1.0], np.float16), "b": np.array([1.0], BFLOAT16)}
    true = mp.unscale_gradients(scaled, 2.0**30)  # 0 in float16
    assert true["w"].tolist() == true["b"].tolist() == [2.0**-30]
    assert true["w"].dtype == true["b"].dtype == np.float32


def test_unscale_keeps_what_is_not_finite_and_shows_what_a_scale_below_one_makes_so():
    true = mp.unscale_gradients({"w": f32(math.inf, math.nan, 3e38)}, 0.5)
    assert true["w"][0] == math.inf and np.isnan(true["w"][1]) and true["w"][2] == math.inf


@given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=6), st.integers(0, 20))
def test_unscale_undoes_a_power_of_two_exactly(values, exponent):
    gradients = {"w": np.array(values, np.float32)}
    normal = np.abs(gradients["w"]) > 1e-30
    scaled = {"w": gradients["w"] * np.float32(2.0**exponent)}
    true = mp.unscale_gradients(scaled, 2.0**exponent)
    assert np.array_equal(true["w"][normal], gradients["w"][normal])


def test_unscale_refuses():
    for bad in (0.0, -2.0, math.inf):
        with pytest.raises(ConfigError, match="scale must be finite, > 0; got"):
            mp.unscale_gradients({"w": f32(1.0)}, bad)
    with pytest.raises(ConfigError, match=r"gradients\['w'\] must be a float32 or float64 ndarray"):
        mp.unscale_gradients({"w": np.array([1])}, 2.0)


# --- has_non_finite_gradients ---


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_anywhere_is_found(dtype, bad):
    gradients = {"a": np.ones((2, 3), dtype), "b": np.ones(4, dtype)}
    assert not mp.has_non_finite_gradients(gradients)
    for name, index in (("a", (0, 0)), ("a", (1, 2)), ("b", 3)):
        broken = {key: gradient.copy() for key, gradient in gradients.items()}
        broken[name][index] = bad
        assert mp.has_non_finite_gradients(broken)


def test_nothing_is_finite_and_so_are_the_largest_numbers():
    assert not mp.has_non_finite_gradients({})
    assert not mp.has_non_finite_gradients({"empty": np.zeros((0, 3))})
    for dtype in (np.float16, np.float32, np.float64):
        largest = np.finfo(dtype).max  # their sum is inf, they are not
        assert not mp.has_non_finite_gradients({"w": np.array([largest, largest], dtype)})
    with pytest.raises(ConfigError, match=r"gradients\['w'\] must be a float32 or float64 ndarray"):
        mp.has_non_finite_gradients({"w": [1.0]})


def test_c019_shards_join_their_flags_and_an_empty_shard_adds_none():
    clean, broken, empty = {"w": f32(1.0)}, {"w": f32(math.inf)}, {"w": np.zeros(0, np.float32)}
    assert any(mp.has_non_finite_gradients(shard) for shard in (clean, broken))
    assert not any(mp.has_non_finite_gradients(shard) for shard in (clean, empty))
    assert mp.update_loss_scale(LossScale(2.0), skipped=True).scale == 1.0


# --- apply_scaled_gradients ---


def scalar_state(value=1.0, **scale):
    return mp.init_mixed_precision({"w": f32(value)}, LossScale(**scale) if scale else None)


def test_c020_gradients_are_unscaled_and_then_clipped():
    # With beta1 = beta2 = 0 the moments show what the optimizer was given.
    state = mp.init_mixed_precision({"w": f32(0.0, 0.0)}, LossScale(1024.0))
    state, report = mp.apply_scaled_gradients(
        state, {"w": f32(3072.0, 4096.0)}, constant(0.1), max_norm=1.0, beta1=0.0, beta2=0.0
    )
    assert report.grad_norm == 5.0 and report.committed
    assert state.optimizer.first["w"] == pytest.approx(f32(0.6, 0.8), rel=1e-6)


def test_c024_the_learning_rate_follows_committed_updates():
    state = scalar_state(scale=4.0)
    rates = []
    for gradient in (1.0, math.nan, 1.0):
        state, report = mp.apply_scaled_gradients(
            state, {"w": f32(gradient)}, lambda update: 0.1 * update
        )
        rates.append((report.learning_rate, report.committed))
    assert rates == [(0.1, True), (0.2, False), (0.2, True)]
    assert state.optimizer.step == 2 and state.skipped == 1


def test_c026_an_infinite_gradient_never_reaches_the_optimizer_and_a_large_one_is_clipped():
    state = mp.init_mixed_precision({"w": f32(0.5, 0.25)}, LossScale(2.0))
    before = state_bits(state)
    after, report = mp.apply_scaled_gradients(
        state, {"w": f32(math.inf, 1.0)}, constant(0.1), max_norm=1.0
    )
    assert not report.committed and report.grad_norm == math.inf
    assert state_bits(after) == before and after.loss_scale.scale == 1.0
    after, report = mp.apply_scaled_gradients(
        mp.init_mixed_precision({"w": f32(0.5, 0.25)}),
        {"w": f32(1e20, 1e20)},
        constant(0.1),
        max_norm=1.0,
        beta1=0.0,
        beta2=0.0,
    )
    assert report.committed and report.grad_norm == pytest.approx(1.4142e20, rel=1e-4)
    assert after.optimizer.first["w"] == pytest.approx(f32(0.7071, 0.7071), abs=1e-4)


def test_c039_bias_correction_counts_committed_updates():
    state = scalar_state(scale=4.0)
    weights = []
    for gradient in (4.0, math.inf, 2.0):  # true gradient 1 both times: the scale is halved
        state, _ = mp.apply_scaled_gradients(state, {"w": f32(gradient)}, constant(0.1), eps=0.0)
        weights.append(float(state.masters["w"][0]))
    assert weights == pytest.approx([0.9, 0.9, 0.8], rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "update", "want"), [("bfloat16", 0.0006, 0.94), ("float16", 1e-4, 0.99)]
)
def test_c030_masters_keep_updates_that_16_bits_would_lose(dtype, update, want):
    masters = {"w": f32(1.0)}
    alone = mp.half_params(masters, dtype)["w"]
    for _ in range(100):
        masters = optimizers.sgd_step(masters, {"w": f32(1.0)}, lr=update)
        alone = mp.round_to_half(mp.widen(alone) - np.float32(update), dtype)
    assert masters["w"] == pytest.approx(f32(want), rel=1e-5)
    working = mp.half_params(masters, dtype)["w"]
    assert mp.widen(working).tolist() == mp.widen(mp.round_to_half(masters["w"], dtype)).tolist()
    assert abs(float(working[0]) - want) < 0.004
    assert float(alone[0]) == 1.0  # without masters nothing ever moves


def test_c028_16_bit_means_neither_overflow_nor_underflow():
    for value in (40000.0, 1e-7):
        local = [np.array([value], np.float16) for _ in range(4)]
        for mean in dp.all_reduce_mean(local, counts=[1, 1, 1, 1]):
            assert mean.tolist() == local[0].tolist() and mean.dtype == np.float16
        # The same four as microbatches: their sum is formed in float32.
        total = {}
        for gradient in local:
            total = accumulation.accumulate_gradients(total, {"w": mp.widen(gradient)})
        mean = mp.unscale_gradients(total, 4.0)
        assert mean["w"].tolist() == mp.widen(local[0]).tolist()


def test_without_a_scale_what_is_not_finite_is_an_error():
    state = scalar_state()
    before = state_bits(state)
    with pytest.raises(LossScaleError, match="must be finite without a loss scale; got a global"):
        mp.apply_scaled_gradients(state, {"w": f32(math.inf)}, constant(0.1))
    assert state_bits(state) == before and state.skipped == 0


def test_the_floor_ends_the_run_and_leaves_the_state_whole():
    state = scalar_state(scale=2.0, min_scale=1.0)
    state, _ = mp.apply_scaled_gradients(state, {"w": f32(math.nan)}, constant(0.1))
    before = state_bits(state)
    with pytest.raises(LossScaleError, match="Look for NaN in the data"):
        mp.apply_scaled_gradients(state, {"w": f32(math.nan)}, constant(0.1))
    assert state_bits(state) == before and state.skipped == 1 and state.loss_scale.scale == 1.0


def test_applying_refuses_before_anything_changes():
    state = scalar_state(scale=2.0)
    before = state_bits(state)
    cases = [
        ({"w": np.array([1.0])}, constant(0.1), r"scaled_gradients\['w'\] must be float32; got"),
        ({"w": f32(1.0, 2.0)}, constant(0.1), r"scaled_gradients\['w'\] must have shape \(1,\)"),
        ({}, constant(0.1), r"scaled_gradients must have one tensor .* \['w'\] missing"),
        ({"w": f32(1.0)}, constant(-0.1), "learning_rate must be finite, >= 0; got -0.1"),
    ]
    for gradients, rate, sentence in cases:
        with pytest.raises(ConfigError, match=sentence):
            mp.apply_scaled_gradients(state, gradients, rate)
    assert state_bits(state) == before
    with pytest.raises(ConfigError, match=r"params\['w'\] must be float32; got float64"):
        mp.init_mixed_precision({"w": np.zeros(2)})


# --- the step ---


def test_step_by_hand():
    params = {"head.linear.weight": np.zeros((1, 1), np.float32), "head.linear.bias": f32(0.0)}
    state = mp.init_mixed_precision(params, LossScale(128.0, growth_interval=1))
    one = np.ones((1, 1), np.float32)
    state, report = mp.mixed_precision_train_step(
        state, [(one, 2 * one), (one, 0 * one)], "float16", constant(0.5)
    )
    # prediction 0, targets 2 and 0: loss (4 + 0) / 2, dw = db = -2; Adam's first step is the rate
    assert report.loss == 2.0 and report.scale == 128.0 and report.committed
    assert report.grad_norm == pytest.approx(math.sqrt(8), rel=1e-6)
    assert state.masters["head.linear.weight"] == pytest.approx(np.array([[0.5]]), rel=1e-6)
    assert state.loss_scale.scale == 256.0 and state.optimizer.step == 1


def test_b1_rows_are_weighted_not_microbatches():
    params = {"head.linear.weight": np.zeros((1, 1), np.float32), "head.linear.bias": f32(0.0)}
    x2, x4 = np.ones((2, 1), np.float32), np.ones((4, 1), np.float32)
    state = mp.init_mixed_precision(params, LossScale(128.0))
    _, report = mp.mixed_precision_train_step(
        state, [(x2, x2), (x4, x4 * np.float32(math.sqrt(3)))], "float16", constant(0.1)
    )
    assert report.loss == pytest.approx(7 / 3, rel=1e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_overflow_in_one_microbatch_skips_the_whole_update(dtype):
    state = mp.init_mixed_precision(make_params(), LossScale(128.0, growth_interval=1))
    good = make_rows(4)
    for seed in range(2):
        state, report = mp.mixed_precision_train_step(
            state, [make_rows(4, seed)], dtype, constant(0.01), max_norm=1.0
        )
        assert report.committed
    before, scale, copies = state, state.loss_scale.scale, state_bits(state)
    bad_x = good[0].copy()
    bad_x[1:3, 2] = math.nan if dtype == "bfloat16" else [65504.0, -65504.0]
    for microbatches in ([good, (bad_x, good[1])], [(bad_x, good[1]), good]):
        after, report = mp.mixed_precision_train_step(
            before, microbatches, dtype, constant(0.01), max_norm=1.0
        )
        assert not report.committed and not math.isfinite(report.grad_norm)
        assert state_bits(after) == copies == state_bits(before)
        assert after.optimizer.step == before.optimizer.step == 2
        assert after.loss_scale.scale == scale / 2 and after.loss_scale.good_steps == 0
        assert after.skipped == 1
    # What follows is what would have followed with the halved scale and no bad update.
    control = dataclasses.replace(before, loss_scale=LossScale(scale / 2, growth_interval=1))
    for seed in range(3, 5):
        after, _ = mp.mixed_precision_train_step(after, [make_rows(4, seed)], dtype, constant(0.01))
        control, _ = mp.mixed_precision_train_step(
            control, [make_rows(4, seed)], dtype, constant(0.01)
        )
    assert state_bits(after) == state_bits(control)


@given(seed=st.integers(0, 2**16), exponent=st.integers(0, 12))
@settings(max_examples=20, deadline=None)
def test_a_power_of_two_scale_changes_no_bit_in_bfloat16(seed, exponent):
    plain = mp.init_mixed_precision(make_params(seed=seed))
    scaled = mp.init_mixed_precision(make_params(seed=seed), LossScale(2.0**exponent))
    rows = [make_rows(3, seed), make_rows(5, seed + 1)]
    for _ in range(2):
        plain, _ = mp.mixed_precision_train_step(plain, rows, "bfloat16", constant(0.01), 1.0)
        scaled, _ = mp.mixed_precision_train_step(scaled, rows, "bfloat16", constant(0.01), 1.0)
    assert state_bits(plain) == state_bits(scaled)


@pytest.mark.parametrize("dtype", HALVES)
def test_any_cut_into_microbatches_gives_the_update_of_the_large_batch(dtype):
    x, y = make_rows(7)
    want, whole = mp.mixed_precision_train_step(
        mp.init_mixed_precision(make_params(), LossScale(64.0)), [(x, y)], dtype, constant(0.01)
    )
    for num_microbatches in (2, 3, 9):  # with 9 some are empty
        got, report = mp.mixed_precision_train_step(
            mp.init_mixed_precision(make_params(), LossScale(64.0)),
            accumulation.split_microbatches(x, y, num_microbatches),
            dtype,
            constant(0.01),
        )
        assert report.loss == pytest.approx(whole.loss, rel=1e-6)
        assert report.grad_norm == pytest.approx(whole.grad_norm, rel=0.02)
        assert got.optimizer.step == 1 and got.loss_scale == want.loss_scale


@pytest.mark.parametrize("dtype", HALVES)
def test_training_in_16_bits_follows_training_in_float32(dtype):
    rng = np.random.default_rng(0)
    x, y = mlp.make_synthetic_regression_batch(rng, 64, 3, 2, 0.05)
    x, y = x.astype(np.float32), y.astype(np.float32)
    params = make_params(sizes=(3, 16, 2))
    adam = optimizers.adamw_init(params)
    state = mp.init_mixed_precision(params, LossScale(1024.0, growth_interval=20))
    for _ in range(60):
        wide_loss, gradients = mlp.mlp_loss_and_gradients(params, x, y, "gelu")
        params, adam = optimizers.adamw_step(params, gradients, adam, lr=0.02)
        state, report = mp.mixed_precision_train_step(
            state, [(x, y)], dtype, constant(0.02), activation="gelu"
        )
    assert state.optimizer.step == 60 and state.skipped == 0 and state.loss_scale.scale == 8192.0
    assert report.loss == pytest.approx(wide_loss, rel=0.05, abs=0.003)
    assert report.loss < 0.1


def test_step_refuses_an_update_without_rows():
    state = mp.init_mixed_precision(make_params(), LossScale(2.0))
    before = state_bits(state)
    for microbatches in ([], [make_rows(0)]):
        with pytest.raises(ConfigError, match="an update must have at least one row; got"):
            mp.mixed_precision_train_step(state, microbatches, "float16", constant(0.1))
    with pytest.raises(ConfigError, match="dtype must be one of float16, bfloat16; got 'float32'"):
        mp.mixed_precision_train_step(state, [make_rows(2)], "float32", constant(0.1))
    assert state_bits(state) == before
