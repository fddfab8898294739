"""Policies: what "same" stands for, which combinations are refused, sizes; the loss scale."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from mpisim.config.schema import PrecisionSection
from mpisim.errors import ConfigError
from mpisim.nn.precision import (
    Policy,
    dtype_of,
    is_floating,
    itemsize,
    loss_scale_kind,
    policy_of,
)

NAMES = ("float32", "float64", "bfloat16", "float16")


def test_dtypes_by_name():
    assert dtype_of("float32") == np.float32
    assert dtype_of("float64") == np.float64
    assert dtype_of("float16") == np.float16
    assert dtype_of("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert [itemsize(name) for name in NAMES] == [4, 8, 2, 2]
    assert all(dtype_of(name).itemsize == itemsize(name) for name in NAMES)
    with pytest.raises(ValueError, match="got 'int8'"):
        dtype_of("int8")


def test_bfloat16_is_floating_though_its_kind_is_not():
    assert all(is_floating(dtype_of(name)) for name in NAMES)
    others = (np.int32, np.uint16, bool, np.dtype("V2"), np.complex64, np.dtype("S2"))
    assert not any(is_floating(dtype) for dtype in others)


@pytest.mark.parametrize("model_dtype", ["float32", "float64"])
def test_same_is_the_dtype_of_the_model(model_dtype):
    policy = policy_of(model_dtype, PrecisionSection())
    assert policy == Policy(model_dtype, model_dtype, model_dtype, model_dtype)
    assert not policy.has_master


def test_wire_same_is_the_dtype_of_reduce():
    policy = policy_of("float32", PrecisionSection(compute="bfloat16", reduce="bfloat16"))
    assert policy == Policy("float32", "bfloat16", "bfloat16", "bfloat16")
    assert policy_of("float32", PrecisionSection(compute="float16")).reduce == "float32"


def test_sizes_and_dtypes_of_a_policy():
    policy = policy_of("float32", PrecisionSection(compute="float16", wire="bfloat16"))
    assert policy.has_master
    sizes = (
        policy.param_itemsize,
        policy.compute_itemsize,
        policy.reduce_itemsize,
        policy.wire_itemsize,
    )
    assert sizes == (4, 2, 4, 2)
    assert policy.param_dtype == policy.reduce_dtype == np.float32
    assert policy.compute_dtype == np.float16
    assert policy.wire_dtype == np.dtype(ml_dtypes.bfloat16)


LEGAL = {
    ("float32", "float32", "float32", "float32"),
    ("float32", "float32", "float32", "bfloat16"),
    ("float32", "float32", "float32", "float16"),
    ("float32", "bfloat16", "float32", "float32"),
    ("float32", "bfloat16", "float32", "bfloat16"),
    ("float32", "bfloat16", "float32", "float16"),
    ("float32", "bfloat16", "bfloat16", "bfloat16"),
    ("float32", "float16", "float32", "float32"),
    ("float32", "float16", "float32", "bfloat16"),
    ("float32", "float16", "float32", "float16"),
    ("float32", "float16", "float16", "float16"),
    ("float64", "float64", "float64", "float64"),
}


def test_exactly_these_policies_are_legal():
    legal = set()
    for names in itertools.product(NAMES, repeat=4):
        try:
            Policy(*names)
        except ConfigError:
            continue
        legal.add(names)
    assert legal == LEGAL


@pytest.mark.parametrize(
    ("model_dtype", "settings", "field"),
    [
        ("float32", {"compute": "float64"}, r"precision\.compute must"),
        ("float64", {"compute": "float32"}, r"precision\.compute must"),
        ("float64", {"compute": "bfloat16"}, r"precision\.compute must.*Set model\.dtype"),
        ("float32", {"reduce": "float64"}, r"precision\.reduce must"),
        ("float32", {"reduce": "bfloat16"}, r"precision\.reduce must"),
        ("float32", {"compute": "float16", "reduce": "bfloat16"}, r"precision\.reduce must"),
        ("float32", {"wire": "float64"}, r"precision\.wire must"),
        ("float64", {"wire": "float32"}, r"precision\.wire must"),
        ("float64", {"wire": "float16"}, r"precision\.wire must"),
        (
            "float32",
            {"compute": "float16", "reduce": "float16", "wire": "bfloat16"},
            r"precision\.wire must.*got bfloat16",
        ),
        (
            "float32",
            {"compute": "float16", "reduce": "float16", "wire": "float32"},
            r"precision\.wire must.*got float32",
        ),
        ("bfloat16", {}, r"model\.dtype must"),
    ],
)
def test_combinations_without_sense_are_refused(model_dtype, settings, field):
    with pytest.raises(ConfigError, match=field):
        policy_of(model_dtype, PrecisionSection(**settings))


@pytest.mark.parametrize(
    ("compute", "kind", "want"),
    [
        ("float16", "auto", "dynamic"),
        ("bfloat16", "auto", "none"),
        ("float32", "auto", "none"),
        ("float16", "none", "none"),
        ("float32", "static", "static"),
        ("bfloat16", "dynamic", "dynamic"),
    ],
)
def test_kind_of_the_loss_scale(compute, kind, want):
    section = PrecisionSection(compute=compute, loss_scale=kind)
    assert loss_scale_kind(policy_of("float32", section), section) == want


def test_a_floor_above_the_first_scale_is_refused():
    section = PrecisionSection(compute="float16", init_scale=8.0, min_scale=16.0)
    policy = policy_of("float32", section)
    with pytest.raises(ConfigError, match=r"precision\.min_scale must .* got 16 .*init_scale 8"):
        loss_scale_kind(policy, section)
    equal = PrecisionSection(compute="float16", init_scale=8.0, min_scale=8.0)
    assert loss_scale_kind(policy, equal) == "dynamic"
    static = PrecisionSection(loss_scale="static", init_scale=0.5)
    assert loss_scale_kind(policy, static) == "static"


def test_a_first_scale_beyond_float32_is_refused():
    section = PrecisionSection(loss_scale="static", init_scale=1e39)
    policy = policy_of("float32", section)
    with pytest.raises(ConfigError, match=r"precision\.init_scale must .* got 1e\+39"):
        loss_scale_kind(policy, section)
    assert loss_scale_kind(policy, PrecisionSection(init_scale=1e39)) == "none"
