"""Codecs as numbers: bytes of every payload, names and header codes, and what goes together."""

from __future__ import annotations

import math

import pytest

from mpisim.errors import ConfigError
from mpisim.layouts import codecs
from mpisim.layouts.codecs import (
    CodecSpec,
    add_codec_spec,
    check_codec,
    code_bytes,
    codec_names,
    codec_of_code,
    codec_spec,
    payload_bytes,
)
from mpisim.layouts.frames import HEADER_BYTES, frame_bytes

SHAPES = (
    (), (0,), (1,), (5,), (8,), (0, 7), (7, 0), (3, 5), (2, 3, 5), (4, 1), (1, 1000), (2, 3, 4, 5),
    (1, 2, 1, 2, 1, 3), (2, 0, 3),
)  # fmt: skip
BITS = range(2, 9)
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@pytest.fixture
def own_registry(monkeypatch):
    """Let a test add codecs that no other test sees."""
    monkeypatch.setattr(codecs, "_SPECS", dict(codecs._SPECS))


def rows_of(shape):
    """Return the rows of a tensor, counted one by one."""
    if not math.prod(shape):
        return 0
    return math.prod(shape) // (shape[-1] if shape else 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_payload_bytes_follow_the_formula(shape, itemsize):
    n = math.prod(shape)
    expected = {"none": n * itemsize, "fp16": 2 * n, "bf16": 2 * n}
    for bits in BITS:
        codes = math.ceil(n * bits / 8)
        expected[f"int{bits}"] = codes + 4
        expected[f"int{bits}-token"] = codes + 4 * rows_of(shape)
    got = {name: payload_bytes(codec_spec(name), shape, itemsize) for name in codec_names()}
    assert got == expected
    frames = {name: frame_bytes(codec_spec(name), shape, itemsize) for name in codec_names()}
    assert frames == {name: 64 + nbytes for name, nbytes in expected.items()}
    assert HEADER_BYTES == 64


def test_sizes_are_exact_beyond_64_bits():
    shape = (2**32 - 1,) * 6
    assert payload_bytes(codec_spec("int3"), shape, 4) == -(-3 * math.prod(shape) // 8) + 4
    assert code_bytes(10**20 + 1, 7) == (7 * (10**20 + 1) + 7) // 8


def test_every_codec_has_a_code_of_its_own():
    specs = [codec_spec(name) for name in codec_names()]
    assert [codec_of_code(spec.code) for spec in specs] == specs
    # Frames on disk and peers of another build read these.
    assert {spec.name: spec.code for spec in specs} == {
        "none": 0, "fp16": 1, "bf16": 2,
        **{f"int{bits}": 16 + bits for bits in BITS},
        **{f"int{bits}-token": 32 + bits for bits in BITS},
    }  # fmt: skip
    assert codec_of_code(255) is None


@pytest.mark.parametrize("name", ["int9", "int1", "", "FP16", "int4_token", None, ["none"]])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"codec must be one of none, fp16, .*; got .*\. ") as info:
        codec_spec(name)
    assert all(known in str(info.value) for known in codec_names())


def test_which_codec_takes_which_dtype():
    takes = {(name, dtype) for name in codec_names() for dtype in ITEMSIZES if accepts(name, dtype)}
    wide = {"float32", "float64"}
    assert {dtype for name, dtype in takes if name == "fp16"} == wide
    assert {dtype for name, dtype in takes if name == "bf16"} == wide
    others = set(codec_names()) - {"fp16", "bf16"}
    assert {(name, dtype) for name, dtype in takes if name in others} == {
        (name, dtype) for name in others for dtype in ITEMSIZES
    }
    assert accepts("none", "int32") and not accepts("int8", "int32")


def accepts(name, dtype):
    try:
        check_codec(codec_spec(name), dtype)
    except ConfigError:
        return False
    return True


def test_a_cast_to_the_same_size_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"codec must make float16 tensors smaller; got 'bf16'"):
        check_codec(codec_spec("bf16"), "float16")
    with pytest.raises(ConfigError, match=r"codec must take int64 tensors; got 'int8'.*'none'"):
        check_codec(codec_spec("int8"), "int64")


def test_a_codec_never_makes_a_long_tensor_larger():
    for name in codec_names():
        for dtype, itemsize in ITEMSIZES.items():
            if accepts(name, dtype):
                raw = payload_bytes(codec_spec("none"), (64, 64), itemsize)
                compressed = payload_bytes(codec_spec(name), (64, 64), itemsize)
                assert compressed < raw if name != "none" else compressed == raw


def own(**changes):
    fields = {"name": "mine", "code": 200, "kind": "custom", "size": lambda shape, itemsize: 7}
    return CodecSpec(**{**fields, **changes})


def test_a_user_codec_is_known_by_name_and_code(own_registry):
    spec = own(size=lambda shape, itemsize: shape[0] * itemsize + 1, dtypes=("float32",))
    add_codec_spec(spec)
    assert codec_spec("mine") is spec and codec_of_code(200) is spec
    assert payload_bytes(spec, [3, 9], 4) == 13
    assert codec_names()[-1] == "mine"
    assert accepts("mine", "float32") and not accepts("mine", "float64")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kind": "raw"}, "kind 'custom'"),
        ({"size": None}, "size function"),
        ({"name": "int8"}, "name must be new"),
        ({"name": ""}, "name must be new"),
        ({"code": 127}, r"in 128\.\.255"),
        ({"code": 256}, r"in 128\.\.255"),
        ({"name": "other"}, "not in use"),
    ],
)
def test_a_user_codec_that_would_be_confused_is_refused(own_registry, changes, words):
    add_codec_spec(own())
    before = codec_names()
    with pytest.raises(ValueError, match=words):
        add_codec_spec(own(**{"name": "second", "code": 201} | changes | code_of(changes)))
    assert codec_names() == before


def code_of(changes):
    return {"code": 200} if changes.get("name") == "other" else {}
