"""Update rules by hand, in place, on slices, without allocation; schedule; clipping."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from mpisim.errors import MpisimError
from mpisim.nn.numerics import TILE_ELEMENTS
from mpisim.nn.optim import (
    adamw_update,
    clip_coefficient,
    decay_applies,
    learning_rate,
    sgd_update,
    squared_norm,
)

ADAMW = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}


def test_sgd_by_hand():
    param, velocity = np.array([1.0, -2.0]), np.zeros(2)
    settings = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25}
    sgd_update(param, np.array([1.0, 1.0]), velocity, **settings)
    # v = g + 0.25 p = [1.25, 0.5]; p -= 0.5 v
    assert velocity.tolist() == [1.25, 0.5]
    assert param.tolist() == [0.375, -2.25]
    sgd_update(param, np.array([0.0, 0.0]), velocity, **settings)
    # v = 0.5 v + 0.25 p = [0.625 + 0.09375, 0.25 - 0.5625]
    assert velocity.tolist() == [0.71875, -0.3125]
    assert param.tolist() == [0.015625, -2.09375]


def test_sgd_without_momentum_needs_no_velocity():
    param = np.array([1.0])
    sgd_update(param, np.array([2.0]), None, lr=0.25, momentum=0.0, weight_decay=0.0)
    assert param.tolist() == [0.5]
    with pytest.raises(ValueError, match="velocity"):
        sgd_update(param, np.array([2.0]), None, lr=0.25, momentum=0.9, weight_decay=0.0)


def test_adamw_first_step_moves_by_lr_whatever_the_scale():
    param = np.array([1.0, 1.0, 1.0])
    m, v = np.zeros(3), np.zeros(3)
    adamw_update(param, np.array([1e-3, -5.0, 0.0]), m, v, step=1, **ADAMW)
    assert np.allclose(param, [0.9, 1.1, 1.0], rtol=1e-5)
    assert np.allclose(m, [1e-4, -0.5, 0.0], rtol=1e-15)
    assert np.allclose(v, [1e-8, 0.25, 0.0], rtol=1e-15)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adamw_equals_the_textbook_over_steps(weight_decay):
    rng = np.random.default_rng(0)
    param, m, v = rng.standard_normal(7), np.zeros(7), np.zeros(7)
    want, want_m, want_v = param.copy(), m.copy(), v.copy()
    settings = {**ADAMW, "weight_decay": weight_decay}
    for step in range(1, 6):
        grad = rng.standard_normal(7)
        adamw_update(param, grad, m, v, step=step, **settings)
        want_m = 0.9 * want_m + 0.1 * grad
        want_v = 0.99 * want_v + 0.01 * grad**2
        m_hat, v_hat = want_m / (1 - 0.9**step), want_v / (1 - 0.99**step)
        want = (1 - 0.1 * weight_decay) * want - 0.1 * m_hat / (np.sqrt(v_hat) + 1e-8)
        assert np.allclose(param, want, rtol=1e-13, atol=1e-15)
    assert np.allclose(m, want_m, rtol=1e-13) and np.allclose(v, want_v, rtol=1e-13)


def test_adamw_adds_eps_after_correcting_the_root():
    # With eps as large as the root the place of the correction shows.
    param, m, v = np.array([0.0]), np.zeros(1), np.zeros(1)
    adamw_update(param, np.array([2.0]), m, v, step=1, **{**ADAMW, "eps": 2.0})
    assert math.isclose(param[0], -0.1 * 2.0 / (2.0 + 2.0), rel_tol=1e-14)


def test_adamw_decay_is_decoupled():
    param, m, v = np.array([2.0]), np.zeros(1), np.zeros(1)
    adamw_update(param, np.zeros(1), m, v, step=1, **{**ADAMW, "weight_decay": 0.5})
    assert param[0] == 2.0 * (1 - 0.1 * 0.5)
    assert m[0] == v[0] == 0.0


def test_adamw_refuses_step_zero():
    with pytest.raises(ValueError, match="step must be at least 1; got 0"):
        adamw_update(np.ones(1), np.ones(1), np.ones(1), np.ones(1), step=0, **ADAMW)


def updates(dtype):
    """Return name -> function (param, grad, state1, state2, scratch) with NumPy scalar settings."""
    number = np.float64

    def sgd(param, grad, state, _, scratch):
        sgd_update(
            param,
            grad,
            state,
            lr=number(0.1),
            momentum=number(0.9),
            weight_decay=number(0.01),
            scratch=scratch,
        )

    def adamw(param, grad, m, v, scratch):
        settings = {key: number(value) for key, value in ADAMW.items()}
        adamw_update(
            param, grad, m, v, step=3, scratch=scratch, **{**settings, "weight_decay": number(0.01)}
        )

    return {"sgd": sgd, "adamw": adamw}


def make_state(dtype, count=2 * TILE_ELEMENTS + 11):
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal(count).astype(dtype) for _ in range(4)]
    arrays[3] = np.abs(arrays[3])
    return arrays


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_any_slicing_and_scratch_give_the_same_bits(name, dtype):
    update = updates(dtype)[name]
    whole, pieces, shaped = make_state(dtype), make_state(dtype), make_state(dtype)
    update(*whole, None)
    count = whole[0].size
    for lo, hi in ((0, 1), (1, 1), (1, 5000), (5000, count)):
        update(*(array[lo:hi] for array in pieces), np.empty(777, dtype))
    update(*(array.reshape(1, -1) for array in shaped), np.empty(count, dtype))
    for index in (0, 2, 3):
        assert whole[index].dtype == np.dtype(dtype)
        assert np.array_equal(whole[index], pieces[index])
        assert np.array_equal(whole[index], shaped[index])
    assert np.array_equal(whole[1], make_state(dtype)[1])  # the gradient is not touched
    assert not np.array_equal(whole[0], make_state(dtype)[0])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_float32_is_computed_in_float32(name):
    # Without hidden float64 every product is rounded: tile by tile it equals plain float32 code.
    update = updates("float32")[name]
    param, grad, state, v = make_state("float32", 1000)
    want, g, s, w = (array.copy() for array in (param, grad, state, v))
    update(param, grad, state, v, None)
    f = np.float32
    if name == "sgd":
        s = s * f(0.9) + (want * f(0.01) + g)
        want = want - s * f(0.1)
        assert np.array_equal(state, s)
    else:
        s = s * f(0.9) + g * f(1 - 0.9)
        w = w * f(0.99) + (g * g) * f(1 - 0.99)
        root = math.sqrt(1 - 0.99**3)
        step = s / (np.sqrt(w) + f(1e-8 * root)) * f(0.1 * root / (1 - 0.9**3))
        want = want * f(1 - 0.1 * 0.01) - step
        assert np.array_equal(state, s) and np.array_equal(v, w)
    assert want.dtype == np.float32
    assert np.array_equal(param, want)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_updates_allocate_nothing_beyond_the_scratch(name):
    update = updates("float32")[name]
    arrays = make_state("float32", 1_000_000)
    scratch = np.empty(TILE_ELEMENTS, np.float32)
    update(*arrays, scratch)
    tracemalloc.start()
    try:
        update(*arrays, scratch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16_384  # views and Python numbers; one tile would be 65,536 bytes


def test_squared_norm_makes_no_wide_copy():
    grad = np.ones(1_000_000, np.float32)
    tracemalloc.start()
    try:
        assert squared_norm(grad) == 1_000_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * TILE_ELEMENTS + 16_384


@pytest.mark.parametrize(
    "wrong",
    [
        {"grad": np.ones(3)},
        {"grad": np.ones(2, np.float32)},
        {"velocity": np.ones((1, 3))},
        {"scratch": np.ones(2, np.float32)},
        {"scratch": np.empty(0)},
        {"velocity": np.ones((2, 2))[:, 0]},
    ],
    ids=["size", "dtype", "state size", "scratch dtype", "no scratch", "strided"],
)
def test_updates_refuse_arrays_that_do_not_fit(wrong):
    arrays = {"param": np.ones(2), "grad": np.ones(2), "velocity": np.ones(2), "scratch": None}
    with pytest.raises(ValueError):
        sgd_update(**{**arrays, **wrong}, lr=0.1, momentum=0.9, weight_decay=0.0)


def test_decay_applies_to_matrices_alone():
    assert decay_applies((3, 4)) and not decay_applies((3,)) and not decay_applies(())


def rates(count, **settings):
    defaults = {
        "lr": 1.0,
        "warmup_steps": 0,
        "schedule": "constant",
        "min_lr_ratio": 0.1,
        "total_steps": count,
    }
    return [learning_rate(step, **{**defaults, **settings}) for step in range(count)]


def test_learning_rate_by_hand():
    assert rates(3) == [1, 1, 1]
    assert rates(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1]
    assert np.allclose(rates(4, schedule="linear"), [1, 0.7, 0.4, 0.1])
    assert np.allclose(rates(3, schedule="cosine"), [1, 0.55, 0.1])
    assert np.allclose(
        rates(5, schedule="cosine", warmup_steps=2, min_lr_ratio=0.0, lr=2.0),
        [1, 2, 1.5, 0.5, 0],
    )


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_learning_rate_at_the_edges(schedule):
    assert rates(1, schedule=schedule) == [1.0]
    assert rates(2, schedule=schedule, min_lr_ratio=0.5) == [1.0, 0.5]
    assert rates(2, schedule=schedule, warmup_steps=5) == [0.2, 0.4]
    later = learning_rate(
        50, lr=1.0, warmup_steps=0, schedule=schedule, min_lr_ratio=0.25, total_steps=10
    )
    assert later == 0.25
    with pytest.raises(ValueError, match="schedule"):
        rates(2, schedule="step")


def test_c020_clip_the_true_gradient():
    """C020: unscale by 1024 first, then clip [3, 4] to norm 1: [0.6, 0.8]."""
    grad = np.array([3072.0, 4096.0], np.float32)
    grad /= 1024
    norm = math.sqrt(squared_norm(grad))
    assert norm == 5.0
    grad *= clip_coefficient(norm, 1.0)
    assert np.allclose(grad, [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_c026_no_coefficient_exists_for_a_norm_that_is_not_finite(bad):
    """C026: [inf, 1] must be skipped, because inf * 0 is nan."""
    norm = math.sqrt(squared_norm(np.array([bad, 1.0], np.float32)))
    for max_norm in (1.0, 0.0):
        with pytest.raises(MpisimError, match="gradient norm must be finite"):
            clip_coefficient(norm, max_norm)


def test_c026_large_float32_values_are_clipped_not_zeroed():
    """C026: [1e20, 1e20] in float32 has norm 1.4142e20, not inf."""
    grad = np.full(2, 1e20, np.float32)
    norm = math.sqrt(squared_norm(grad))
    assert math.isclose(norm, 1.4142135e20, rel_tol=1e-6)
    grad *= clip_coefficient(norm, 1.0)
    assert grad.dtype == np.float32
    assert np.allclose(grad, [0.7071, 0.7071], rtol=1e-4)


def test_clip_coefficient_is_one_at_or_below_the_limit():
    assert clip_coefficient(1.0, 1.0) == clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(100.0, 0.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == 0.25


@pytest.mark.parametrize("steps", [1, 3])
def test_c114_momentum_of_a_part_is_updated_in_place(steps):
    """C114: momentum 1, decay 0.9, gradient 1: it stays 1, and a frozen part stays as it is."""
    param, grad = np.zeros(8), np.ones(8)
    m, v = np.ones(8), np.ones(8)
    part = slice(2, 5)
    for step in range(1, steps + 1):
        adamw_update(param[part], grad[part], m[part], v[part], step=step, **ADAMW)
    # On a copy of the part the gradient would be lost, and 0.9, 0.81, ... left.
    assert m[part].tolist() == pytest.approx([1.0] * 3, rel=1e-15)
    assert np.all(param[part] < 0)
    frozen = np.r_[0:2, 5:8]
    assert not param[frozen].any() and np.all(m[frozen] == 1.0) and np.all(v[frozen] == 1.0)
    velocity = np.ones(8)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    sgd_update(param[part], 0.1 * grad[part], velocity[part], **settings)
    assert velocity.tolist() == pytest.approx([1.0] * 8, rel=1e-15)
