"""Update rules and clipping of the reference ladder."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.errors import ConfigError
from mpisim.reference import optimizers

finite = st.floats(-100, 100)


def tensors(**values):
    return {name: np.array(value, np.float64) for name, value in values.items()}


def constant_adamw(num_steps, gradient=1.0, start=1.0, **settings_):
    """Run AdamW on one weight with a constant gradient; return the weights after each step."""
    params = tensors(w=[start])
    state = optimizers.adamw_init(params)
    weights = []
    for _ in range(num_steps):
        params, state = optimizers.adamw_step(params, tensors(w=[gradient]), state, **settings_)
        weights.append(float(params["w"][0]))
    return weights


# --- sgd ---


def test_sgd_by_hand():
    params, gradients = tensors(w=[[1.0, 2.0]], b=[3.0]), tensors(w=[[10.0, 20.0]], b=[-30.0])
    new = optimizers.sgd_step(params, gradients, lr=0.5)
    assert new["w"].tolist() == [[-4.0, -8.0]] and new["b"].tolist() == [18.0]
    assert params["w"].tolist() == [[1.0, 2.0]] and gradients["b"].tolist() == [-30.0]


def test_sgd_with_lr_zero_and_with_no_elements():
    params = tensors(w=[1.5], empty=[])
    new = optimizers.sgd_step(params, tensors(w=[7.0], empty=[]), lr=0.0)
    assert new["w"].tolist() == [1.5] and new["empty"].shape == (0,)
    assert not np.shares_memory(new["w"], params["w"])


@given(st.lists(finite, min_size=1, max_size=5), finite, st.floats(0, 10))
def test_momentum_zero_is_plain_sgd(weights, gradient, lr):
    params = tensors(w=weights)
    gradients = {"w": np.full(len(weights), gradient)}
    velocity = optimizers.zeros_like_params(params)
    new, velocity = optimizers.sgd_momentum_step(params, gradients, velocity, lr, momentum=0.0)
    assert np.array_equal(new["w"], optimizers.sgd_step(params, gradients, lr)["w"])
    assert np.array_equal(velocity["w"], gradients["w"])


def test_momentum_by_hand():
    params, velocity = tensors(w=[1.0]), tensors(w=[0.0])
    seen = []
    for gradient in (1.0, 1.0, -2.0):
        params, velocity = optimizers.sgd_momentum_step(
            params, tensors(w=[gradient]), velocity, lr=0.5, momentum=0.5
        )
        seen.append((float(params["w"][0]), float(velocity["w"][0])))
    # v: 1, 1.5, -1.25
    assert seen == [(0.5, 1.0), (-0.25, 1.5), (0.375, -1.25)]


def test_sgd_decay_goes_through_the_velocity_and_leaves_biases_alone():
    params, zeros = tensors(w=[[4.0]], b=[4.0]), tensors(w=[[0.0]], b=[0.0])
    new, velocity = optimizers.sgd_momentum_step(
        params, zeros, zeros, lr=0.5, momentum=0.9, weight_decay=0.25
    )
    assert new["w"].tolist() == [[3.5]] and velocity["w"].tolist() == [[1.0]]
    assert new["b"].tolist() == [4.0] and velocity["b"].tolist() == [0.0]


# --- adamw ---


def test_c039_bias_correction():
    settings_ = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 0.0}
    assert constant_adamw(2, **settings_) == pytest.approx([0.9, 0.8], abs=1e-12)
    # The faulty rule, to show that the case tells them apart.
    first, second, weight, faulty = 0.0, 0.0, 1.0, []
    for _ in range(2):
        first, second = 0.9 * first + 0.1, 0.999 * second + 0.001
        weight -= 0.1 * first / math.sqrt(second)
        faulty.append(weight)
    assert faulty == pytest.approx([0.68377, 0.25881], abs=1e-5)


def test_adamw_by_hand_with_a_changing_gradient():
    params = tensors(w=[1.0])
    state = optimizers.adamw_init(params)
    numbers = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 1.0}
    params, state = optimizers.adamw_step(params, tensors(w=[2.0]), state, **numbers)
    # m = 1, v = 1; corrected 2 and 4; step 0.5 * 2 / (2 + 1)
    assert state.first["w"].tolist() == [1.0] and state.second["w"].tolist() == [1.0]
    assert params["w"] == pytest.approx(np.array([1 - 1 / 3]), abs=1e-15)
    params, state = optimizers.adamw_step(params, tensors(w=[-4.0]), state, **numbers)
    # m = 0.5 - 2 = -1.5, v = 0.75 + 4 = 4.75; corrected -2 and 4.75 / 0.4375
    assert state.step == 2
    assert state.first["w"].tolist() == [-1.5] and state.second["w"].tolist() == [4.75]
    step = 0.5 * -2 / (math.sqrt(4.75 / 0.4375) + 1)
    assert params["w"] == pytest.approx(np.array([2 / 3 - step]), abs=1e-15)


def test_adamw_decay_is_decoupled_from_the_moments_and_leaves_biases_alone():
    params, gradients = tensors(w=[[4.0]], b=[4.0]), tensors(w=[[1.0]], b=[1.0])
    state = optimizers.adamw_init(params)
    plain, plain_state = optimizers.adamw_step(params, gradients, state, lr=0.5)
    decayed, decayed_state = optimizers.adamw_step(
        params, gradients, state, lr=0.5, weight_decay=0.25
    )
    assert plain["w"] - decayed["w"] == pytest.approx(np.array([[0.5 * 0.25 * 4.0]]), abs=1e-15)
    assert np.array_equal(plain["b"], decayed["b"])
    for moment in ("first", "second"):
        assert np.array_equal(
            getattr(plain_state, moment)["w"], getattr(decayed_state, moment)["w"]
        )


def test_c041_one_step_counter_for_all_parameters():
    params = tensors(a=[1.0], b=[1.0])
    state = optimizers.adamw_init(params)
    # A parameter without a gradient is an error, not a silent second meaning of t ...
    with pytest.raises(
        ConfigError, match=r"gradients must have one tensor .*; got \['b'\] missing"
    ):
        optimizers.adamw_step(params, tensors(a=[0.5]), state, lr=0.01)
    # ... and with a zero gradient it shares the global t.
    params, state = optimizers.adamw_step(params, tensors(a=[0.5], b=[0.0]), state, lr=0.01)
    assert params["b"].tolist() == [1.0]
    params, state = optimizers.adamw_step(params, tensors(a=[0.5], b=[0.5]), state, lr=0.01)
    assert 1.0 - float(params["b"][0]) == pytest.approx(0.0074414, abs=1e-7)
    assert 1.0 - float(params["a"][0]) == pytest.approx(0.02, abs=1e-8)


def test_c045_state_follows_the_name_not_the_position():
    params = tensors(p1=[1.0], p2=[1.0])
    state = optimizers.AdamWState(
        step=1, first=tensors(p2=[2.0], p1=[1.0]), second=tensors(p2=[4.0], p1=[1.0])
    )
    zeros = tensors(p2=[0.0], p1=[0.0])
    _, state = optimizers.adamw_step(params, zeros, state, lr=0.1, beta1=0.5)
    assert state.first["p1"].tolist() == [0.5] and state.first["p2"].tolist() == [1.0]
    _, velocity = optimizers.sgd_momentum_step(
        params, zeros, tensors(p2=[2.0], p1=[1.0]), lr=0.1, momentum=0.5
    )
    assert velocity["p1"].tolist() == [0.5] and velocity["p2"].tolist() == [1.0]
    wrong = optimizers.AdamWState(step=1, first=tensors(p1=[1.0], q=[2.0]), second=zeros)
    with pytest.raises(ConfigError, match=r"state.first must have .* \['p2'\] missing and \['q'\]"):
        optimizers.adamw_step(params, zeros, wrong, lr=0.1)


@given(gradient=st.floats(1e-3, 1e3), num_steps=st.integers(1, 20), sign=st.sampled_from([-1, 1]))
@settings(max_examples=30, deadline=None)
def test_adamw_moves_by_lr_whatever_the_size_of_a_constant_gradient(gradient, num_steps, sign):
    weights = constant_adamw(num_steps, gradient=sign * gradient, lr=0.01, eps=0.0)
    assert weights[-1] == pytest.approx(1 - sign * 0.01 * num_steps, abs=1e-9)


def test_adamw_changes_none_of_its_arguments():
    params, gradients = tensors(w=[[1.0, 2.0]]), tensors(w=[[0.5, -0.5]])
    _, state = optimizers.adamw_step(params, gradients, optimizers.adamw_init(params), lr=0.1)
    first, second = state.first["w"].copy(), state.second["w"].copy()
    optimizers.adamw_step(params, gradients, state, lr=0.1, weight_decay=0.1)
    assert params["w"].tolist() == [[1.0, 2.0]] and gradients["w"].tolist() == [[0.5, -0.5]]
    assert np.array_equal(state.first["w"], first) and np.array_equal(state.second["w"], second)
    assert state.step == 1


def test_adamw_boundaries():
    params = tensors(empty=[])
    new, state = optimizers.adamw_step(
        params, tensors(empty=[]), optimizers.adamw_init(params), lr=0.1, eps=0.0
    )
    assert new["empty"].shape == (0,) and state.step == 1
    # A zero gradient moves nothing as long as eps is there to divide by.
    assert constant_adamw(3, gradient=0.0, lr=0.1) == [1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match="eps must be > 0 while an element has only seen zero"):
        constant_adamw(1, gradient=0.0, lr=0.1, eps=0.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_updates_keep_the_dtype(dtype):
    params, gradients = {"w": np.ones((2, 2), dtype)}, {"w": np.full((2, 2), 0.3, dtype)}
    zeros = optimizers.zeros_like_params(params)
    sgd, velocity = optimizers.sgd_momentum_step(params, gradients, zeros, 0.1, 0.9, 0.1)
    adam, state = optimizers.adamw_step(
        params, gradients, optimizers.adamw_init(params), 0.1, weight_decay=0.1
    )
    clipped, _ = optimizers.clip_by_global_norm(gradients, 0.1)
    for result in (sgd, velocity, adam, state.first, state.second, clipped):
        assert result["w"].dtype == dtype


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"lr": -0.1}, r"lr must be finite, >= 0; got -0\.1\."),
        ({"lr": math.nan}, "lr must be finite, >= 0; got nan"),
        ({"beta1": 1.0}, r"beta1 must be finite, >= 0 and < 1; got 1\.0"),
        ({"beta2": -0.5}, "beta2 must be finite, >= 0 and < 1"),
        ({"eps": -1e-8}, "eps must be finite, >= 0"),
        ({"weight_decay": math.inf}, "weight_decay must be finite, >= 0"),
    ],
)
def test_adamw_refuses(changed, sentence):
    params = tensors(w=[1.0])
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    with pytest.raises(ConfigError, match=sentence):
        optimizers.adamw_step(
            params, params, optimizers.adamw_init(params), **{**numbers, **changed}
        )


def test_updates_refuse_what_does_not_match():
    params = tensors(w=[1.0, 2.0])
    zeros = optimizers.zeros_like_params(params)
    with pytest.raises(ConfigError, match=r"gradients\['w'\] must have shape \(2,\) and dtype flo"):
        optimizers.sgd_step(params, tensors(w=[1.0]), lr=0.1)
    with pytest.raises(ConfigError, match=r"gradients must have .* \['x'\] unknown"):
        optimizers.sgd_step(params, tensors(w=[1.0, 1.0], x=[1.0]), lr=0.1)
    with pytest.raises(ConfigError, match=r"gradients\['w'\] must have .* dtype float32"):
        optimizers.sgd_step(params, {"w": np.zeros(2, np.float32)}, lr=0.1)
    with pytest.raises(ConfigError, match=r"params\['w'\] must be a float32 or float64 ndarray"):
        optimizers.sgd_step({"w": np.array([1])}, {"w": np.array([1])}, lr=0.1)
    with pytest.raises(ConfigError, match="velocity must have one tensor for every parameter"):
        optimizers.sgd_momentum_step(params, zeros, {}, 0.1, 0.9)
    with pytest.raises(ConfigError, match="momentum must be finite, >= 0 and < 1; got 1.0"):
        optimizers.sgd_momentum_step(params, zeros, zeros, 0.1, 1.0)
    with pytest.raises(ConfigError, match="lr must be finite, >= 0; got inf"):
        optimizers.sgd_step(params, zeros, math.inf)


# --- global_norm and clipping ---


def test_global_norm_by_hand():
    assert optimizers.global_norm(tensors(a=[3.0], b=[[4.0]])) == 5.0


def test_global_norm_boundaries():
    assert optimizers.global_norm({}) == 0.0
    assert optimizers.global_norm(tensors(a=[])) == 0.0
    assert optimizers.global_norm(tensors(a=[-2.0])) == 2.0
    assert optimizers.global_norm({"a": np.array([1e20, 1e20], np.float32)}) == pytest.approx(
        math.sqrt(2) * 1e20, rel=1e-6
    )
    assert optimizers.global_norm(tensors(a=[1e200])) == math.inf
    assert math.isnan(optimizers.global_norm(tensors(a=[1.0, math.nan])))


def test_global_norm_adds_squares_in_float64():
    gradients = {"large": np.array([4096.0], np.float32), "small": np.ones(100, np.float32)}
    assert optimizers.global_norm(gradients) == math.sqrt(2.0**24 + 100)
    assert optimizers.global_norm({"one": np.concatenate(list(gradients.values()))}) == math.sqrt(
        2.0**24 + 100
    )


def test_c033_c035_c036_shards_replicas_and_ties_count_once():
    # Shards 3 and 4 make one norm of 5; with a replicated bias of 12 it is 13.
    assert optimizers.global_norm(tensors(shard0=[3.0], shard1=[4.0])) == 5.0
    assert optimizers.global_norm(tensors(shard0=[3.0], shard1=[4.0], bias=[12.0])) == 13.0
    clipped, _ = optimizers.clip_by_global_norm(tensors(shard0=[3.0], shard1=[4.0]), 1.0)
    assert clipped["shard0"] == pytest.approx(np.array([0.6]), abs=1e-15)
    assert clipped["shard1"] == pytest.approx(np.array([0.8]), abs=1e-15)
    # A tied table of norm 3 has one name, so it counts once beside a norm of 4.
    assert optimizers.global_norm(tensors(table=[3.0], rest=[4.0])) == 5.0


def test_c020_unscale_then_clip():
    scale, scaled = 1024.0, tensors(w=[3072.0, 4096.0])
    true = {name: gradient / scale for name, gradient in scaled.items()}
    clipped, norm = optimizers.clip_by_global_norm(true, max_norm=1.0)
    assert norm == 5.0
    assert clipped["w"] == pytest.approx(np.array([0.6, 0.8]), abs=1e-15)
    wrong, _ = optimizers.clip_by_global_norm(scaled, max_norm=1.0)
    assert wrong["w"] / scale == pytest.approx(np.array([0.000586, 0.000781]), abs=1e-6)


def test_c026_an_infinite_norm_is_refused_and_a_large_finite_one_is_clipped():
    for bad in (math.inf, -math.inf, math.nan):
        gradients = tensors(w=[bad, 1.0])
        with pytest.raises(ConfigError, match="must have a finite global norm to be clipped; got"):
            optimizers.clip_by_global_norm(gradients, max_norm=1.0)
        assert gradients["w"][1] == 1.0
    large = {"w": np.array([1e20, 1e20], np.float32)}
    clipped, norm = optimizers.clip_by_global_norm(large, max_norm=1.0)
    assert norm == pytest.approx(1.4142e20, rel=1e-4)
    assert clipped["w"] == pytest.approx(np.array([0.7071, 0.7071]), abs=1e-4)
    assert clipped["w"].dtype == np.float32


def test_clipping_the_largest_float32_gradients_keeps_their_precision():
    largest = np.finfo(np.float32).max
    clipped, _ = optimizers.clip_by_global_norm({"w": np.full(10000, largest)}, max_norm=1.0)
    assert clipped["w"].dtype == np.float32
    assert np.max(np.abs(clipped["w"] / 0.01 - 1.0)) < 1e-6


def test_clipping_leaves_small_and_zero_gradients_alone():
    gradients = tensors(a=[3.0], b=[4.0], empty=[])
    clipped, norm = optimizers.clip_by_global_norm(gradients, max_norm=5.0)
    assert norm == 5.0 and clipped["a"].tolist() == [3.0] and clipped["b"].tolist() == [4.0]
    assert not np.shares_memory(clipped["a"], gradients["a"])
    zero, norm = optimizers.clip_by_global_norm(tensors(a=[0.0, 0.0]), max_norm=1.0)
    assert norm == 0.0 and zero["a"].tolist() == [0.0, 0.0]


@given(
    st.lists(finite, min_size=1, max_size=6),
    st.lists(finite, min_size=1, max_size=6),
    st.floats(0.01, 1000),
)
def test_clipping_bounds_the_norm_and_keeps_the_direction(a, b, max_norm):
    gradients = tensors(a=a, b=b)
    clipped, norm = optimizers.clip_by_global_norm(gradients, max_norm)
    after = optimizers.global_norm(clipped)
    assert norm == optimizers.global_norm(gradients)
    assert after <= max_norm * (1 + 1e-12)
    assert after == pytest.approx(min(norm, max_norm), rel=1e-12)
    for name in gradients:
        factor = min(1.0, max_norm / norm) if norm else 1.0
        assert np.allclose(clipped[name], gradients[name] * factor, rtol=1e-12, atol=0)
        assert gradients[name].tolist() == (a if name == "a" else b)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.inf, math.nan])
def test_clipping_refuses_a_bad_limit(max_norm):
    with pytest.raises(ConfigError, match="max_norm must be finite, > 0; got"):
        optimizers.clip_by_global_norm(tensors(a=[1.0]), max_norm)


def test_norm_refuses_what_is_not_a_gradient():
    with pytest.raises(ConfigError, match=r"gradients\['a'\] must be a float32 or float64 ndarray"):
        optimizers.global_norm({"a": np.array([3, 4])})
