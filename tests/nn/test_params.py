"""Any range of a parameter's first weights, bit for bit those of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.memory.tracker import hook_is_built, open_tracker
from mpisim.nn.models import build_mlp
from mpisim.nn.params import (
    INIT_SCRATCH_BYTES,
    TILE_NUMBERS,
    fill_param,
    init_params,
    initial_of,
)
from mpisim.nn.precision import dtype_of
from tests.nn.small_decoders import STORED, small_decoder

MODELS = {
    "mlp": build_mlp(
        input_kind="tokens", window=5, vocab_size=40, embed_dim=3, hidden=(2 * TILE_NUMBERS // 50,),
        activation="relu", output=("classes", 60),
    ),
    "features": build_mlp(
        input_kind="features", num_features=5, hidden=(7,), activation="tanh",
        output=("targets", 2),
    ),
    "tied": small_decoder(),
    "untied": small_decoder(tied=False),
}  # fmt: skip


def bits(array):
    return array.reshape(-1).view(f"u{array.itemsize}")


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("kind", MODELS)
def test_whole_parameters_equal_init_params(kind, dtype):
    model = MODELS[kind]
    for name, whole in init_params(model, 3, dtype_of(dtype)).items():
        out = np.full(whole.size, 9.0).astype(whole.dtype)
        fill_param(model, 3, name, out)
        assert np.array_equal(bits(out), bits(whole)), name


@settings(deadline=None, max_examples=40)
@given(data=st.data(), dtype=st.sampled_from(STORED), kind=st.sampled_from(sorted(MODELS)))
def test_any_range_equals_that_of_the_whole(data, dtype, kind):
    model = MODELS[kind]
    params = init_params(model, 1, dtype_of(dtype))
    name = data.draw(st.sampled_from(sorted(params)))
    whole = params[name].reshape(-1)
    lo = data.draw(st.integers(0, whole.size))
    out = np.full(data.draw(st.integers(0, whole.size - lo)), 9.0).astype(whole.dtype)
    fill_param(model, 1, name, out, lo)
    assert np.array_equal(bits(out), bits(whole[lo : lo + out.size]))


@pytest.mark.parametrize("lo", [1, TILE_NUMBERS - 1, TILE_NUMBERS, TILE_NUMBERS + 1])
def test_ranges_at_the_edges_of_tiles(lo):
    model = MODELS["mlp"]
    name, whole = max(init_params(model, 0, "float32").items(), key=lambda item: item[1].size)
    assert whole.size > 2 * TILE_NUMBERS
    out = np.empty(TILE_NUMBERS + 1, np.float32)
    fill_param(model, 0, name, out, lo)
    assert np.array_equal(out, whole.reshape(-1)[lo : lo + out.size])


def test_what_is_drawn_and_what_is_constant():
    assert initial_of(MODELS["features"], "block0.linear.bias") == (0.0, 0.0)
    assert initial_of(MODELS["features"], "block0.linear.weight").scale == math.sqrt(2 / 12)
    norm = next(n for n in init_params(MODELS["tied"], 0, "float32") if "norm" in n)
    assert initial_of(MODELS["tied"], norm) == (0.0, 1.0)


def test_unknown_names_and_negative_starts_are_refused():
    with pytest.raises(KeyError, match="must be a parameter of the model; got 'block0.nothing'"):
        fill_param(MODELS["features"], 0, "block0.nothing", np.empty(1))
    with pytest.raises(ValueError, match="lo must be at least 0; got -1"):
        fill_param(MODELS["features"], 0, "block0.linear.bias", np.empty(1), -1)


@pytest.mark.skipif(not hook_is_built(), reason="the allocator hook is not built")
@pytest.mark.parametrize("dtype", STORED)
def test_scratch_is_the_same_for_every_range(dtype):
    model = MODELS["mlp"]
    hook = open_tracker("hook")
    try:
        fill_param(model, 0, "head.linear.weight", np.empty(1, np.float32))
        for size, lo in ((1, 0), (5, 40), (TILE_NUMBERS + 3, 1), (9, 2 * TILE_NUMBERS)):
            out = np.empty(size, dtype_of(dtype))
            before = hook.live()
            hook.reset_peak()
            fill_param(model, 0, "head.linear.weight", out, lo)
            assert hook.live() == before
            assert hook.peak() - before == INIT_SCRATCH_BYTES
    finally:
        hook.close()
