"""Codecs: the bytes of a plain second implementation, exact extremes, no memory of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fuzz_frames import (
    CODECS,
    FLOATS,
    dtype_named,
    reference_decode,
    reference_payload,
    same_bits,
    some_values,
    takes,
)

from mpisim.comm import codecs
from mpisim.comm.codecs import (
    SCRATCH_BYTES,
    TILE,
    decode,
    encode,
    encode_with_feedback,
    register_codec,
    roundtrip,
)
from mpisim.comm.frames import FrameHead, decode_frame, encode_frame, open_frame
from mpisim.errors import MessageMismatch
from mpisim.layouts import codecs as sizes
from mpisim.layouts.codecs import CodecSpec, codec_spec, payload_bytes
from mpisim.memory.tracker import hook_is_built, open_tracker

PAIRS = [(name, dtype) for name in CODECS for dtype in FLOATS if takes(codec_spec(name), dtype)]
INTS = [name for name in CODECS if name.startswith("int")]
FLOAT32_MAX = np.finfo(np.float32).max

every_pair = pytest.mark.parametrize("name, dtype", PAIRS)
needs_hook = pytest.mark.skipif(not hook_is_built(), reason="the allocator hook was not compiled")


def make_scratch():
    # What is in it before must not matter.
    return np.full(SCRATCH_BYTES, 0xA5, np.uint8)


def encoded(spec, x):
    payload = np.full(payload_bytes(spec, x.shape, x.itemsize), 0x5A, np.uint8)
    encode(spec, x, payload, make_scratch())
    return payload


def decoded(spec, payload, x):
    out = np.full_like(x, 3)
    decode(spec, payload, out, make_scratch())
    return out


def largest_code(spec):
    return 2 ** (spec.bits - 1) - 1


# Against the second implementation


SHAPES = (
    (), (0,), (0, 4), (4, 0), (1,), (7,), (9, 1), (3, 5), (2, 3, 4), (TILE - 1,), (TILE,),
    (TILE + 1,), (3, TILE), (2, TILE + 5), (5, 3001), (TILE + 3, 1), (1700, 7), (2 * TILE + 11, 2),
)  # fmt: skip
"""Rows below, at and above a tile, in whole numbers of rows and not, and odd counts of codes."""


@every_pair
def test_bytes_and_values_are_those_of_the_description(name, dtype):
    spec, rng = codec_spec(name), np.random.default_rng(5)
    for shape in SHAPES:
        x = some_values(rng, shape, dtype)
        before = x.copy()
        payload = encoded(spec, x)
        assert payload.tobytes() == reference_payload(spec, x), shape
        assert same_bits(x, before)
        out = decoded(spec, payload, x)
        expected = reference_decode(spec, payload.tobytes(), shape, dtype)
        assert same_bits(out, expected), shape
        assert same_bits(roundtrip(spec, x), expected)


@pytest.mark.parametrize("name, kind", [("fp16", np.float16), ("bf16", dtype_named("bfloat16"))])
def test_casts_round_as_casts_of_the_dtype(name, kind):
    # Every 16-bit number, those just beside, halfway to the next one and just beside that.
    upper = np.arange(2**16, dtype=np.uint32)
    tops = [(upper << 16) + np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    with np.errstate(all="ignore"):
        halves = upper.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        between = [halves + np.uint32(low) for low in (0x0FFF, 0x1000, 0x1001)]
        # Subnormal float16: multiples of 2^-24 and what is near their halves.
        small = np.arange(0, 2**11 + 8, dtype=np.float32) * np.float32(2.0**-25)
        small = [np.nextafter(small, np.float32(way)).view(np.uint32) for way in (-1, 1)]
        x = np.concatenate([*tops, halves, *between, *small]).view(np.float32)
        expected = x.astype(kind)
    for values in (x, -x):
        payload = encoded(codec_spec(name), values)
        with np.errstate(all="ignore"):
            expected = values.astype(kind)
        assert payload.tobytes() == expected.tobytes()
        with np.errstate(all="ignore"):
            back = expected.astype(np.float32)
        assert same_bits(decoded(codec_spec(name), payload, values), back)


def test_float64_is_rounded_to_float16_once():
    # Halfway between two float16 but for 2^-40: by way of float32 it would go down to the even one.
    x = np.array([1 + 2.0**-11 + 2.0**-40], np.float64)
    assert roundtrip(codec_spec("fp16"), x)[0] == 1 + 2.0**-10


@pytest.mark.parametrize("name", INTS)
def test_codes_are_the_nearest_and_ties_go_to_even(name):
    spec = codec_spec(name)
    most = largest_code(spec)
    # The scale is 1, so the decoded values are the codes.
    x = np.concatenate([np.arange(-2 * most, 2 * most + 1) / 2, [most]]).astype(np.float32)
    expected = np.array([round(value) for value in x.tolist()], np.float32) + np.float32(0)
    assert same_bits(roundtrip(spec, x), expected)


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_error_is_at_most_half_a_scale(name, dtype):
    spec = codec_spec(name)
    rng = np.random.default_rng(7)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 2.0**-23)
    for power in (-41, -30, 0, 3, 30, 38):
        if dtype == "float16" and not -5 < power < 5:
            continue
        x = (rng.uniform(-1, 1, (6, 501)) * 10.0**power).astype(dtype_named(dtype))
        rows = 6 if spec.per_token else 1
        scales = encoded(spec, x)[: 4 * rows].view(np.float32).astype(np.float64)
        y = roundtrip(spec, x).astype(np.float64).reshape(rows, -1)
        wide = x.astype(np.float64).reshape(rows, -1)
        # Half a scale, and the rounding of the result to its own dtype.
        bound = scales[:, None] * 0.5000001 + np.abs(wide) * unit + 2.0**-149
        assert (np.abs(y - wide) <= bound).all(), power


# Extremes


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_stay_finite(name, dtype):
    # Times its code a scale that was rounded up would pass the largest float32.
    kind = dtype_named(dtype)
    most = np.array(65504 if dtype == "float16" else FLOAT32_MAX, np.float32)
    if dtype == "bfloat16":
        most = np.array(0x7F7F, np.uint16).view(kind).astype(np.float32)
    for value in (most, np.nextafter(most, np.float32(0)), most / 2):
        x = np.array([value, -value, 0, value / 2]).astype(kind)
        y = roundtrip(codec_spec(name), x).astype(np.float64)
        wide = x.astype(np.float64)
        assert np.isfinite(y).all()
        assert (np.abs(y[:2] - wide[:2]) <= 2.0**-7 * np.abs(wide[:2])).all() and y[2] == 0


@pytest.mark.parametrize("name", INTS)
def test_every_subnormal_magnitude_keeps_its_largest_number(name):
    spec = codec_spec(name)
    # Multiples of the smallest float32; a scale that was rounded down would cut them off.
    for units in (1, 2, 3, 64, 126, 127, 128, 190, 191, 255, 1000, 2**23 - 1, 2**23, 2**24 + 1):
        x = np.array([units, -units, units // 2, 0], np.float64) * 2.0**-149
        x = x.astype(np.float32)
        (scale,) = encoded(spec, x)[:4].view(np.float32).astype(np.float64)
        y = roundtrip(spec, x).astype(np.float64)
        assert scale > 0 and y[0] > 0 and y[3] == 0
        # A unit or two of the scale itself, times the code.
        assert np.abs(y - x).max() <= scale / 2 * 1.000001, units


@pytest.mark.parametrize("name", INTS)
def test_float64_beyond_float32_arrives_as_nan(name):
    spec = codec_spec(name)
    for value in (3.5e38, 1e300, -1e300):
        assert np.isnan(roundtrip(spec, np.array([1.0, value]))).all()
    assert np.isfinite(roundtrip(spec, np.array([1.0, float(FLOAT32_MAX)]))).all()
    # And what is too small for it as 0.
    assert not roundtrip(spec, np.array([1e-60, -1e-300])).any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_number_that_is_not_finite_is_never_sent_as_one(bad, dtype):
    x = np.ones((4, 3 * TILE // 4), dtype_named(dtype))
    x[2, 17] = bad
    for name in CODECS:
        spec = codec_spec(name)
        if not takes(spec, dtype):
            continue
        y = roundtrip(spec, x).astype(np.float64)
        if spec.kind != "quantize":
            # Where it is and as it is.
            assert np.count_nonzero(np.isfinite(y)) == x.size - 1
            assert np.array_equal(y[2, 17], bad, equal_nan=True)
        elif spec.per_token:
            assert np.isnan(y[2]).all() and (y[[0, 1, 3]] == 1).all()
        else:
            assert np.isnan(y).all()


def test_rows_without_a_scale_are_zero_before_they_become_codes():
    # What a nan is as an integer differs between processors, so no code is made of one.
    scales = np.array([0, np.nan, 2], np.float32)
    out = np.full((3, 2), 9, np.float32)
    with np.errstate(all="ignore"):
        part = np.array([[0, 0], [np.inf, np.nan], [4, -2]], np.float32).reshape(-1)
        codecs._divide(part, scales, out.reshape(-1), codecs._cut(make_scratch()))
    assert out.tolist() == [[0, 0], [0, 0], [2, -1]]


def test_what_is_too_large_for_float16_becomes_inf():
    x = np.array([65519, 65520, -1e30, 1e-9], np.float32)
    assert roundtrip(codec_spec("fp16"), x).tolist() == [65504, np.inf, -np.inf, 0]


@every_pair
def test_an_empty_tensor_comes_back_empty(name, dtype):
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 5)):
        x = np.empty(shape, dtype_named(dtype))
        y = roundtrip(codec_spec(name), x)
        assert y.shape == shape and y.dtype == x.dtype


# Memory


def kinds_of_numbers(dtype):
    """Return tensors that take every way through the code."""
    kind, rng = dtype_named(dtype), np.random.default_rng(3)
    shape = (7, 2401)  # more than two tiles, no whole number of rows or of bytes of codes
    ordinary = rng.standard_normal(shape)
    yield ordinary.astype(kind)
    yield np.zeros(shape, kind)
    yield (ordinary * 1e-7).astype(kind)
    with np.errstate(all="ignore"):
        yield (ordinary * 1e-41).astype(kind)
        yield (ordinary * 1e38).astype(kind)
        ordinary[3] = 0
        ordinary[1, 5], ordinary[2, 6] = np.nan, np.inf
        yield ordinary.astype(kind)
    yield np.zeros((0, 3), kind)
    yield np.ones((), kind)
    yield np.ones((20000, 1), kind)


def bytes_of_call(function, *arguments):
    tracker = open_tracker("hook")
    try:
        before = tracker.live()
        tracker.reset_peak()
        function(*arguments)
        return tracker.peak() - before, tracker.live() - before
    finally:
        tracker.close()


@needs_hook
@every_pair
def test_nothing_is_allocated(name, dtype):
    spec = codec_spec(name)
    scratch = make_scratch()
    for x in kinds_of_numbers(dtype):
        payload = np.empty(payload_bytes(spec, x.shape, x.itemsize), np.uint8)
        out, residual = np.empty_like(x), np.zeros_like(x)
        assert bytes_of_call(encode, spec, x, payload, scratch) == (0, 0)
        assert bytes_of_call(decode, spec, payload, out, scratch) == (0, 0)
        arguments = (spec, x, residual, payload, scratch)
        assert bytes_of_call(encode_with_feedback, *arguments) == (0, 0)


@needs_hook
def test_the_measurement_sees_a_single_number():
    assert bytes_of_call(np.ones(4, np.float32).sum) == (4, 0)


@every_pair
def test_scratch_of_just_its_size_is_enough(name, dtype):
    """Guard bytes on both sides of scratch and payload stay as they were."""
    spec = codec_spec(name)
    x = next(kinds_of_numbers(dtype))
    nbytes = payload_bytes(spec, x.shape, x.itemsize)
    around, outer = np.full(SCRATCH_BYTES + 128, 7, np.uint8), np.full(nbytes + 128, 7, np.uint8)
    scratch, payload = around[64:-64], outer[64:-64]
    encode(spec, x, payload, scratch)
    decode(spec, payload, np.empty_like(x), scratch)
    encode_with_feedback(spec, x, np.zeros_like(x), payload, scratch)
    for guarded in (around, outer):
        assert (guarded[:64] == 7).all() and (guarded[-64:] == 7).all()


# Error feedback


@every_pair
def test_feedback_is_the_plain_formula(name, dtype):
    spec, rng = codec_spec(name), np.random.default_rng(11)
    kind = dtype_named(dtype)
    residual, kept = (np.zeros((3, TILE // 2 + 3), kind) for _ in range(2))
    for _ in range(4):
        x = rng.standard_normal(residual.shape).astype(kind)
        before = x.copy()
        payload = np.empty(payload_bytes(spec, x.shape, x.itemsize), np.uint8)
        encode_with_feedback(spec, x, residual, payload, make_scratch())
        assert same_bits(x, before)
        total = kept + x
        assert payload.tobytes() == reference_payload(spec, total)
        kept = total - reference_decode(spec, payload.tobytes(), x.shape, dtype)
        if spec.kind == "raw":
            assert not residual.any()
        assert same_bits(residual, kept)


def test_feedback_delivers_in_the_long_run_what_codes_lose():
    spec = codec_spec("int2")
    # 0.3 of the largest is rounded to 0 each time.
    x = np.array([1, 0.3, -0.2, 0.05], np.float32)
    sent, residual = np.zeros(4), np.zeros_like(x)
    payload = np.empty(payload_bytes(spec, x.shape, 4), np.uint8)
    for _ in range(400):
        encode_with_feedback(spec, x, residual, payload, make_scratch())
        sent += decoded(spec, payload, x)
    assert np.abs(sent / 400 - x).max() < 0.01
    assert np.abs(roundtrip(spec, x) - x).max() > 0.29


@every_pair
def test_feedback_forgets_what_is_not_finite(name, dtype):
    spec = codec_spec(name)
    x = np.ones((2, 9), dtype_named(dtype))
    x[0, 3] = np.nan
    residual = np.full_like(x, 0.25)
    payload = np.empty(payload_bytes(spec, x.shape, x.itemsize), np.uint8)
    encode_with_feedback(spec, x, residual, payload, make_scratch())
    assert np.isnan(decoded(spec, payload, x)[0, 3])
    assert np.isfinite(residual).all() and residual[0, 3] == 0
    if spec.kind == "quantize" and not spec.per_token:
        assert not residual.any()
    # The next step is as if nothing had been.
    x[0, 3] = 1
    encode_with_feedback(spec, x, residual, payload, make_scratch())
    assert np.isfinite(decoded(spec, payload, x)).all()


def test_feedback_forgets_an_overflow_of_the_cast():
    x, residual = np.array([1e6, 1.0], np.float32), np.zeros(2, np.float32)
    payload = np.empty(4, np.uint8)
    encode_with_feedback(codec_spec("fp16"), x, residual, payload, make_scratch())
    assert decoded(codec_spec("fp16"), payload, x)[0] == np.inf and residual.tolist() == [0, 0]


# Refusals


def test_arguments_that_do_not_fit_are_refused():
    spec, x = codec_spec("int4"), np.ones((4, 6), np.float32)
    payload, scratch = np.empty(payload_bytes(spec, x.shape, 4), np.uint8), make_scratch()
    with pytest.raises(ValueError, match="x must be C-contiguous; got shape"):
        encode(spec, x.T, payload, scratch)
    with pytest.raises(ValueError, match="out must be C-contiguous"):
        decode(spec, payload, x[:, ::2], scratch)
    with pytest.raises(ValueError, match="x must be float16 or .*; got int32"):
        encode(spec, x.astype(np.int32), payload, scratch)
    with pytest.raises(ValueError, match="for codec 'bf16'; got float16"):
        encode(codec_spec("bf16"), x.astype(np.float16), payload, scratch)
    for wrong in (payload[1:], np.append(payload, payload), payload.view(np.int8)):
        with pytest.raises(ValueError, match="payload must be 16 bytes of uint8"):
            encode(spec, x, wrong, scratch)
        with pytest.raises(ValueError, match="payload must be 16 bytes of uint8"):
            decode(spec, wrong, x, scratch)
    for wrong in (scratch[1:], scratch.view(np.int8), np.empty((2, SCRATCH_BYTES), np.uint8)):
        with pytest.raises(ValueError, match="scratch must be 131072 bytes"):
            encode(spec, x, payload, wrong)


@pytest.mark.parametrize("wrong", [np.zeros((6, 4), np.float32), np.zeros((4, 6))])
def test_a_residual_of_another_tensor_is_refused(wrong):
    spec, x = codec_spec("int4"), np.ones((4, 6), np.float32)
    with pytest.raises(
        ValueError, match=r"residual must be C-contiguous float32 of shape \(4, 6\)"
    ):
        encode_with_feedback(spec, x, wrong, np.empty(16, np.uint8), make_scratch())


def test_a_refused_call_leaves_the_residual():
    spec, x = codec_spec("int4"), np.ones((4, 6), np.float32)
    residual = np.zeros_like(x)
    for payload, scratch in ((np.empty(15, np.uint8), make_scratch()), (np.empty(16, np.uint8), x)):
        with pytest.raises(ValueError):
            encode_with_feedback(spec, x, residual, payload, scratch)
    assert not residual.any()


# Users' own


@pytest.fixture
def largest_only(monkeypatch):
    """Register a codec that sends the largest element of a tensor and its place."""
    monkeypatch.setattr(sizes, "_SPECS", dict(sizes._SPECS))
    monkeypatch.setattr(codecs, "_user_codecs", dict(codecs._user_codecs))
    spec = CodecSpec(
        "largest", 130, "custom", dtypes=("float32",), size=lambda shape, itemsize: 4 + itemsize
    )

    def encode_largest(x, payload, scratch):
        place = int(np.abs(x).argmax())
        payload[:4].view(np.uint32)[0] = place
        payload[4:].view(x.dtype)[0] = x.reshape(-1)[place]

    def decode_largest(payload, out, scratch):
        (place,) = payload[:4].view(np.uint32)
        if place >= out.size:
            raise ValueError(f"place must be below {out.size}; got {place}.")
        out[...] = 0
        out.reshape(-1)[place] = payload[4:].view(out.dtype)[0]

    register_codec(spec, encode_largest, decode_largest)
    return spec


def test_a_codec_of_ones_own_runs_like_the_others(largest_only):
    x = np.array([[1, -5], [2, 3]], np.float32)
    assert codec_spec("largest") is largest_only
    assert roundtrip(largest_only, x).tolist() == [[0, -5], [0, 0]]
    residual, payload = np.zeros_like(x), np.empty(8, np.uint8)
    encode_with_feedback(largest_only, x, residual, payload, make_scratch())
    assert residual.tolist() == [[1, 0], [2, 3]]
    with pytest.raises(ValueError, match="codec 'largest'; got float64"):
        roundtrip(largest_only, x.astype(np.float64))
    # A file that registers it may be read again; built-in names and codes of others are taken.
    again = replace(largest_only, dtypes=("float32", "float64"))
    register_codec(again, *codecs._user_codecs["largest"])
    assert codec_spec("largest") is again
    with pytest.raises(ValueError, match="name must be new"):
        register_codec(replace(again, name="fp16"), encode, decode)
    with pytest.raises(ValueError, match="not in use; got 130"):
        register_codec(replace(again, name="other"), encode, decode)
    with pytest.raises(ValueError, match="encode of codec 'largest' must be a function; got None"):
        register_codec(again, None, decode)


def test_bytes_that_ones_own_codec_refuses_are_a_mismatch(largest_only):
    x = np.array([[1, -5], [2, 3]], np.float32)
    head = FrameHead("grad", 0, 0, 0, x.shape, "float32", "largest")
    frame = encode_frame(head, x)
    assert open_frame(frame)[1].tolist() == [[0, -5], [0, 0]]
    frame[64:68] = 255
    with pytest.raises(MessageMismatch, match="codec 'largest' can decode; got place must be"):
        decode_frame(frame, head, rank=0, peer=1)
