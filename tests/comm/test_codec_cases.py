"""Known faults of quantizing codecs, each by its id in the list of failure cases."""

from __future__ import annotations

import numpy as np
import pytest

from mpisim.comm import codecs
from mpisim.comm.codecs import SCRATCH_BYTES, decode, encode, roundtrip
from mpisim.layouts.codecs import codec_names, codec_spec, payload_bytes

INTS = [name for name in codec_names() if name.startswith("int")]
BITS = range(2, 9)


def sent(name, x):
    """Return payload and decoded tensor."""
    spec = codec_spec(name)
    payload = np.full(payload_bytes(spec, x.shape, x.itemsize), 0xFF, np.uint8)
    out, scratch = np.full_like(x, 9), np.full(SCRATCH_BYTES, 0xFF, np.uint8)
    encode(spec, x, payload, scratch)
    decode(spec, payload, out, scratch)
    return payload, out


@pytest.mark.parametrize("name", INTS)
def test_c108_a_block_of_zeros(name):
    payload, out = sent(name, np.zeros(4, np.float32))
    assert not payload.any(), "codes 0, scale 0"
    assert out.tobytes() == bytes(16), "0 exactly, no -0 and no nan"


@pytest.mark.parametrize("name", INTS)
def test_c108_a_row_of_zeros_among_others(name):
    x = np.array([[1, -2, 3, 7], [0, 0, -0.0, 0], [5, 6, 7, -8]], np.float32)
    payload, out = sent(name, x)
    assert out[1].tobytes() == bytes(16)
    assert np.isfinite(out).all() and out[0].any() and out[2].any()
    if name.endswith("token"):
        scales = payload[:12].view(np.float32)
        assert scales[1] == 0 and scales[0] > 0 and scales[2] > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", INTS)
def test_c108_what_is_not_finite_is_signalled(name, bad):
    for rest in (0.0, 1.0):
        x = np.full((2, 4), rest, np.float32)
        x[0, 1] = bad
        _, out = sent(name, x)
        assert not np.isfinite(out[0]).any()
        if name.endswith("token"):
            assert (out[1] == rest).all()


@pytest.mark.parametrize("bits", BITS)
def test_c110_every_code_comes_back_with_its_sign(bits):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    # 3 of each in a row, so that every code stands at every place of a byte.
    all_codes = np.tile(np.repeat(np.arange(low, high), 3), 3).astype(np.int8)
    space = codecs._cut(np.full(SCRATCH_BYTES, 0xFF, np.uint8))
    for start in range(9):
        given = all_codes[start:]
        packed = np.full(-(-given.size * bits // 8), 0xFF, np.uint8)
        space.codes[: given.size] = given
        codecs._pack(given.size, bits, packed, space)
        space.codes.fill(0x55)
        codecs._unpack(packed, bits, given.size, space)
        assert np.array_equal(space.codes[: given.size], given)


def test_c110_minus_one_is_not_fifteen():
    packed = np.array([0xFF], np.uint8)
    payload = np.concatenate([np.array([1], np.float32).view(np.uint8), packed])
    out = np.zeros(2, np.float32)
    decode(codec_spec("int4"), payload, out, np.empty(SCRATCH_BYTES, np.uint8))
    assert out.tolist() == [-1, -1]
    out = np.zeros(4, np.float32)
    decode(codec_spec("int2"), payload, out, np.empty(SCRATCH_BYTES, np.uint8))
    assert out.tolist() == [-1, -1, -1, -1]


@pytest.mark.parametrize(
    "name, count, nbytes",
    [("int4", 5, 3), ("int4", 1, 1), ("int4", 0, 0), ("int2", 5, 2), ("int3", 5, 2)],
)
def test_c112_odd_counts(name, count, nbytes):
    x = np.array([3, -3, 1, -1, 3], np.float32)[:count]
    if name == "int2":
        x = np.sign(x)
    payload, out = sent(name, x)
    assert payload.size == nbytes + 4, "codes, and one scale"
    assert out.shape == (count,) and np.abs(out - x).max(initial=0) < 0.25


@pytest.mark.parametrize("bits", BITS)
def test_c112_the_last_code_of_every_count(bits):
    most = 2 ** (bits - 1) - 1
    for count in [*range(1, 40), codecs.TILE - 1, codecs.TILE, codecs.TILE + 1]:
        x = np.zeros(count, np.float32)
        x[-1], x[0] = -most, most
        if count == 1:
            x[0] = most
        assert np.array_equal(roundtrip(codec_spec(f"int{bits}"), x), x), count
