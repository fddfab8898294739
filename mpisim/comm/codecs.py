"""Boundary codecs: a tensor to the bytes that cross between two stages, and back.

`layouts.codecs` says how many bytes; `frames` puts the header before them. What the receiver
decodes is what the next stage trains on: gradients pass straight through the rounding.

Everything works in tiles within a scratch that the caller owns and makes no arrays of its own, so
that a forecast of memory need not know a tensor's numbers. Constants are arrays without dimensions
made at import, because NumPy makes one of every Python number it is given.

Layout of a quantized payload: the float32 scales, then the codes: two's complement of `bits` bits,
the first in the lowest bits of the first byte, without gaps; bits left over in the last byte are 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from mpisim.errors import ConfigError, MpisimError
from mpisim.layouts.codecs import (
    MAX_BITS,
    MIN_BITS,
    SCALE_BYTES,
    CodecSpec,
    add_codec_spec,
    code_bytes,
    num_scales,
    payload_bytes,
)

SCRATCH_BYTES = 1 << 17
"""Bytes of the scratch that `encode` and `decode` work in."""
TILE = 1 << 13
"""Elements of a tile. A multiple of 8, so that a tile's codes start and end at whole bytes."""

Encode = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""``encode(x, payload, scratch)``"""
Decode = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""``decode(payload, out, scratch)``"""
_user_codecs: dict[str, tuple[Encode, Decode]] = {}


def _constant(value: float, dtype: type) -> np.ndarray:
    array = np.array(value, dtype)
    array.setflags(write=False)
    return array


_WIDTHS = range(MIN_BITS, MAX_BITS + 1)
_LARGEST = {bits: _constant(2 ** (bits - 1) - 1, np.float32) for bits in _WIDTHS}
_SIGN = {bits: _constant(2 ** (bits - 1), np.uint8) for bits in _WIDTHS}
_ZERO, _INF, _NAN = (_constant(value, np.float32) for value in (0.0, np.inf, np.nan))
_TINY = _constant(2.0**-126, np.float32)
_ZEROS = {
    size: _constant(0, kind) for size, kind in ((2, np.uint16), (4, np.uint32), (8, np.uint64))
}
_ONE, _SIXTEEN = _constant(1, np.uint32), _constant(16, np.uint32)
_ROUND_BF16, _NAN_BF16 = _constant(0x7FFF, np.uint32), _constant(0x7FC0_0000, np.uint32)
_SIGN_BIT = _constant(0x8000_0000, np.uint32)
_LEAST_HALF, _HALF = _constant(2.0**-14, np.float32), _constant(0.5, np.float32)
_HALF_BITS = _constant(0x3F00_0000, np.uint32)


class _Step(NamedTuple):
    """Moves the upper halves of all lanes of a 64-bit word down to the lower ones, or back."""

    low: np.ndarray
    spread: np.ndarray
    packed: np.ndarray
    shift: np.ndarray


def _packing(bits: int) -> tuple[_Step, ...]:
    # 8 codes a word: lanes of 16 bits take 2 codes, of 32 bits 4, of 64 bits 8.
    #   00000bbb 00000aaa  ->  0000000000bbbaaa
    steps = []
    for lane in (16, 32, 64):
        used = bits * lane // 16
        ones = sum(((1 << used) - 1) << start for start in range(0, 64, lane))
        values = (ones, ones << lane // 2, ones << used, lane // 2 - used)
        steps.append(_Step(*(_constant(value, np.uint64) for value in values)))
    return tuple(steps)


_STEPS = {bits: _packing(bits) for bits in _WIDTHS}
_CODE_MASK = {bits: _constant((1 << bits) - 1, np.uint8) for bits in _WIDTHS}


class _Space(NamedTuple):
    """The scratch, cut up; every part holds one tile."""

    values: np.ndarray
    """float32"""
    spare: np.ndarray
    """float32"""
    keep: np.ndarray
    """uint32"""
    codes: np.ndarray
    """int8"""
    words: np.ndarray
    """uint64, 8 codes each"""
    mask: np.ndarray
    """bool"""
    halves: np.ndarray
    """uint16; the same bytes as `codes` and `words`"""
    doubles: np.ndarray
    """float64; the same bytes as `spare` and `keep`"""


def _cut(scratch: np.ndarray) -> _Space:
    if (
        scratch.dtype != np.uint8
        or scratch.ndim != 1
        or scratch.size < SCRATCH_BYTES
        or not scratch.flags.c_contiguous
    ):
        raise ValueError(
            f"scratch must be {SCRATCH_BYTES} bytes of uint8; got {scratch.dtype} of shape "
            f"{scratch.shape}. Pass numpy.empty({SCRATCH_BYTES}, numpy.uint8)."
        )
    parts, start = [], 0
    for kind, nbytes in (
        (np.float32, 4 * TILE),
        (np.float32, 4 * TILE),
        (np.uint32, 4 * TILE),
        (np.int8, TILE),
        (np.uint64, TILE),
        (np.bool_, TILE),
    ):
        parts.append(scratch[start : start + nbytes].view(kind))
        start += nbytes
    halves = scratch[12 * TILE : 14 * TILE].view(np.uint16)
    return _Space(*parts, halves, scratch[4 * TILE : 12 * TILE].view(np.float64))


def register_codec(spec: CodecSpec, encode: Encode, decode: Decode) -> None:
    """Add a codec of your own.

    Parameters
    ----------
    spec : CodecSpec
        Of kind custom, with a code in 128..255 and a `size` function.
    encode : callable
        ``encode(x, payload, scratch)`` fills `payload`, uint8, from the C-contiguous `x`.
    decode : callable
        ``decode(payload, out, scratch)`` fills `out`, C-contiguous, from `payload`.

    Raises
    ------
    ConfigError
        The name or the code is taken, something is no function, or the spec is not one of a user's
        codec.

    Notes
    -----
    Call it on every rank before the run. The size of a payload follows from shape and dtype alone.
    `scratch` is 128 KiB of uint8; arrays that the functions make are not in the memory forecast.
    Bytes that are no payload make `decode` raise ValueError.
    """
    for what, function in (("encode", encode), ("decode", decode)):
        if not callable(function):
            raise ConfigError(
                f"{what} of codec {spec.name!r} must be a function; got {function!r}. Give one."
            )
    add_codec_spec(spec)
    _user_codecs[spec.name] = encode, decode


@contextlib.contextmanager
def _named(codec: str, what: str) -> Iterator[None]:
    """Say whose function failed; a decode refuses bytes by ValueError, which its caller reads."""
    try:
        yield
    except Exception as error:
        if what == "decode" and isinstance(error, ValueError):
            raise
        raise MpisimError(
            f"{what} of codec {codec!r} must run without an error; got {type(error).__name__}: "
            f"{error}. Correct it."
        ) from error


def encode(spec: CodecSpec, x: np.ndarray, payload: np.ndarray, scratch: np.ndarray) -> None:
    """Write the bytes of a tensor.

    Parameters
    ----------
    spec : CodecSpec
    x : ndarray
        C-contiguous, of a dtype that the codec takes. Not modified.
    payload : ndarray of shape (payload_bytes(spec, x.shape, x.itemsize),), uint8
        Filled.
    scratch : ndarray of shape (131072,), uint8
        Overwritten.

    Raises
    ------
    ValueError
        An argument is not as said here.

    Notes
    -----
    Memory: none; a user's codec does as it likes.

    Casts round to nearest, ties to even; what is too large for float16 becomes inf, nan stays nan.

    Quantized codes of b bits are symmetric, so that zero is exact: with q = 2^(b-1) - 1 the scale
    of a tensor (or of a row) is max|x| / q and a code is x / scale, rounded to nearest, ties to
    even. All of it in float32: float64 is rounded to that first. Three exceptions:

    - All zeros: scale 0, codes 0.
    - A subnormal scale has few digits; it is rounded up where x would be cut off otherwise. Next to
      the largest float32 it is rounded down where a decoded value would be inf otherwise.
    - If some number of the tensor (or row) is inf or nan, or beyond float32, the scale is nan and
      the codes are 0: the whole tensor (or row) arrives as nan, and the receiver's search for
      non-finite numbers sees it. It is never sent as a number.
    """
    _check(spec, x, payload, "x")
    if spec.kind == "custom":
        with _named(spec.name, "encode"):
            _user_codecs[spec.name][0](x, payload, scratch)
    elif spec.kind == "raw":
        np.copyto(payload, _bytes_of(x))
    else:
        work = _encode_cast if spec.kind == "cast" else _encode_codes
        with np.errstate(all="ignore"):
            work(spec, x, payload, _cut(scratch))


def decode(spec: CodecSpec, payload: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    """Fill a tensor from its bytes.

    Parameters
    ----------
    spec : CodecSpec
    payload : ndarray of shape (payload_bytes(spec, out.shape, out.itemsize),), uint8
        As `encode` wrote it. Not modified.
    out : ndarray
        C-contiguous, the dtype of the tensor that was encoded. Overwritten.
    scratch : ndarray of shape (131072,), uint8
        Overwritten.

    Raises
    ------
    ValueError
        An argument is not as said here.

    Notes
    -----
    Memory: none; a user's codec does as it likes.
    A quantized value is code * scale, computed in float32 and rounded to the dtype of `out`.
    """
    _check(spec, out, payload, "out")
    if spec.kind == "custom":
        with _named(spec.name, "decode"):
            _user_codecs[spec.name][1](payload, out, scratch)
    elif spec.kind == "raw":
        np.copyto(_bytes_of(out), payload)
    else:
        space, flat = _cut(scratch), out.reshape(-1)
        with np.errstate(all="ignore"):
            for start, stop in _tiles(flat.size):
                place = flat[start:stop]
                values = place if flat.dtype == np.float32 else space.values[: stop - start]
                _decode_tile(spec, payload, out.shape, start, values, space)
                if values is not place:
                    _narrow(values, place, space)


def roundtrip(spec: CodecSpec, x: np.ndarray) -> np.ndarray:
    """Return what the other side gets of a tensor, as a new array."""
    x = np.asarray(x, order="C")
    payload = np.empty(payload_bytes(spec, x.shape, x.itemsize), np.uint8)
    scratch, out = np.empty(SCRATCH_BYTES, np.uint8), np.empty_like(x)
    encode(spec, x, payload, scratch)
    decode(spec, payload, out, scratch)
    return out


def encode_with_feedback(
    spec: CodecSpec, x: np.ndarray, residual: np.ndarray, payload: np.ndarray, scratch: np.ndarray
) -> None:
    """Encode a tensor together with what was lost of those before it.

    Parameters
    ----------
    spec : CodecSpec
    x : ndarray
        Not modified.
    residual : ndarray, same shape and dtype
        What the calls before it lost, zeros at first; holds what is still lost afterwards.
    payload, scratch : ndarray
        As `encode` takes them.

    Raises
    ------
    ValueError
        An argument is not as said here.

    Notes
    -----
    e = x + residual is sent, and residual = e - decoded e; both in the tensor's dtype. Where that
    is not finite the residual becomes 0: a step that is skipped leaves nothing behind.
    Memory: none; with a user's codec one array of the size of `x`.
    """
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.flags.c_contiguous:
        raise ValueError(
            f"residual must be C-contiguous {x.dtype} of shape {x.shape}; got {residual.dtype} of "
            f"shape {residual.shape}. Start with numpy.zeros_like(x)."
        )
    # Before the residual changes: a refused call leaves it as it was.
    _check(spec, x, payload, "x")
    space, flat = _cut(scratch), residual.reshape(-1)
    with np.errstate(all="ignore"):
        np.add(residual, x, out=residual)
        encode(spec, residual, payload, scratch)
        decoded = None
        if spec.kind == "custom":
            decoded = np.empty_like(residual)
            decode(spec, payload, decoded, scratch)
            decoded = decoded.reshape(-1)
        for start, stop in _tiles(flat.size):
            tile = flat[start:stop]
            if spec.kind == "raw":
                _unsigned(tile).fill(0)
                continue
            sent = space.values[: tile.size]
            if decoded is not None:
                sent = decoded[start:stop]
            else:
                _decode_tile(spec, payload, x.shape, start, sent, space)
                sent = _as_dtype(sent, tile.dtype, space)
            np.subtract(tile, sent, out=tile)
            _clear_non_finite(tile, space)


def _check(spec: CodecSpec, x: np.ndarray, payload: np.ndarray, name: str) -> None:
    if not x.flags.c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous; got shape {x.shape} with strides {x.strides}. Pass "
            f"numpy.ascontiguousarray({name})."
        )
    if spec.dtypes and x.dtype.name not in spec.dtypes:
        raise ValueError(
            f"{name} must be {' or '.join(spec.dtypes)} for codec {spec.name!r}; got {x.dtype}. "
            f"Use another codec."
        )
    nbytes = payload_bytes(spec, x.shape, x.itemsize)
    if payload.dtype != np.uint8 or payload.shape != (nbytes,):
        raise ValueError(
            f"payload must be {nbytes} bytes of uint8 for {x.dtype} of shape {x.shape} with codec "
            f"{spec.name!r}; got {payload.dtype} of shape {payload.shape}. Make it as long as "
            f"payload_bytes says."
        )


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)


def _unsigned(x: np.ndarray) -> np.ndarray:
    """View values as integers: a number cannot be written as bfloat16 without making an array."""
    return x.view(_ZEROS[x.itemsize].dtype)


def _tiles(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, TILE):
        yield start, min(start + TILE, count)


# Conversions of one tile. ml_dtypes makes an array of one value whenever it casts, so bfloat16 is
# converted by its bits, which are the upper half of a float32.


def _widen(part: np.ndarray, space: _Space) -> np.ndarray:
    """Return a tile as float32: itself, or a copy in `space.values`."""
    if part.dtype == np.float32:
        return part
    values = space.values[: part.size]
    if part.dtype.name == "bfloat16":
        _widen_bf16(part.view(np.uint16), values)
    else:
        np.copyto(values, part, casting="unsafe")
    return values


def _widen_bf16(bits: np.ndarray, values: np.ndarray) -> None:
    wide = values.view(np.uint32)
    np.copyto(wide, bits)
    np.left_shift(wide, _SIXTEEN, out=wide)


def _narrow(values: np.ndarray, out: np.ndarray, space: _Space) -> None:
    """Round float32 to the dtype of `out`. Spoils `values`."""
    if out.dtype.name == "bfloat16":
        _narrow_bf16(values, out.view(np.uint16), space)
    elif out.dtype == np.float16:
        _narrow_half(values, out, space)
    else:
        np.copyto(out, values)


def _narrow_bf16(values: np.ndarray, out: np.ndarray, space: _Space) -> None:
    """Write the bits of bfloat16, rounded as `ml_dtypes` does. Spoils `values`."""
    mask, bits = space.mask[: values.size], values.view(np.uint32)
    rest = space.spare[: values.size].view(np.uint32)
    np.isnan(values, out=mask)
    if np.count_nonzero(mask):
        # The carry of a nan could run into its sign; these bits stay a nan.
        np.bitwise_and(bits, _SIGN_BIT, out=rest)
        np.bitwise_or(rest, _NAN_BF16, out=bits, where=mask)
    np.right_shift(bits, _SIXTEEN, out=rest)
    np.bitwise_and(rest, _ONE, out=rest)  # a tie goes to the even one
    np.add(rest, _ROUND_BF16, out=rest)
    np.add(bits, rest, out=bits)
    np.right_shift(bits, _SIXTEEN, out=bits)
    np.copyto(out, bits, casting="unsafe")


def _narrow_half(values: np.ndarray, out: np.ndarray, space: _Space) -> None:
    """Round float32 to float16 as a cast does. Spoils `values`.

    A cast takes 40 times as long where the result is subnormal, and small gradients are. Added to
    0.5, whose unit is theirs, the hardware rounds them.
    """
    count = values.size
    mask, sums, keep = space.mask[:count], space.spare[:count], space.keep[:count]
    np.absolute(values, out=sums)
    np.less(sums, _LEAST_HALF, out=mask)
    if not np.count_nonzero(mask):
        np.copyto(out, values, casting="unsafe")
        return
    # Ones where small. Masked loops would be slow: small numbers lie anywhere.
    np.copyto(keep, mask)
    np.subtract(_ZEROS[4], keep, out=keep)
    np.add(sums, _HALF, out=sums)
    small, bits, halves = sums.view(np.uint32), values.view(np.uint32), out.view(np.uint16)
    np.subtract(small, _HALF_BITS, out=small)
    np.bitwise_and(small, keep, out=small)
    # The others are cast with zeros in place of the small ones, the sign kept.
    np.invert(keep, out=keep)
    np.bitwise_or(keep, _SIGN_BIT, out=keep)
    np.bitwise_and(bits, keep, out=bits)
    np.copyto(out, values, casting="unsafe")
    np.copyto(bits, halves)
    np.bitwise_or(bits, small, out=bits)
    np.copyto(halves, bits, casting="unsafe")


def _as_dtype(values: np.ndarray, dtype: np.dtype, space: _Space) -> np.ndarray:
    """Return a tile of float32 as another dtype, within the scratch. Spoils `values`."""
    if dtype == np.float32:
        return values
    place = space.doubles if dtype == np.float64 else space.halves.view(dtype)
    place = place[: values.size]
    _narrow(values, place, space)
    return place


def _clear_non_finite(tile: np.ndarray, space: _Space) -> None:
    mask = space.mask[: tile.size]
    np.isfinite(tile, out=mask)
    if np.count_nonzero(mask) < tile.size:
        np.logical_not(mask, out=mask)
        np.copyto(_unsigned(tile), _ZEROS[tile.itemsize], where=mask)


# Casts


def _encode_cast(spec: CodecSpec, x: np.ndarray, payload: np.ndarray, space: _Space) -> None:
    flat, halves = x.reshape(-1), payload.view(np.uint16)
    for start, stop in _tiles(flat.size):
        part, out, values = flat[start:stop], halves[start:stop], space.values[: stop - start]
        if spec.name == "fp16" and flat.dtype == np.float64:
            # By way of float32 it would be rounded twice.
            np.copyto(out.view(np.float16), part, casting="unsafe")
            continue
        np.copyto(values, part, casting="unsafe")
        if spec.name == "fp16":
            _narrow_half(values, out.view(np.float16), space)
        else:
            _narrow_bf16(values, out, space)


def _decode_tile(
    spec: CodecSpec,
    payload: np.ndarray,
    shape: tuple[int, ...],
    start: int,
    values: np.ndarray,
    space: _Space,
) -> None:
    """Decode the tile that begins at element `start` into `values`, float32."""
    stop = start + values.size
    if spec.kind == "quantize":
        _decode_codes(spec, payload, shape, start, values, space)
    elif spec.name == "bf16":
        _widen_bf16(payload.view(np.uint16)[start:stop], values)
    else:
        np.copyto(values, payload.view(np.float16)[start:stop])


# Quantized codes. One scale per tensor is one row as long as the tensor.


def _split(
    spec: CodecSpec, shape: tuple[int, ...], payload: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the scales, the packed codes, and the elements that share a scale."""
    end = num_scales(spec, shape) * SCALE_BYTES
    count = 1
    for extent in shape[-1:] if spec.per_token else shape:
        count *= extent
    return payload[:end].view(np.float32), payload[end:], count


def _rows(start: int, stop: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Cut a tile into whole rows and pieces of one; yield its rows and its place in the tile."""
    at = start
    while at < stop:
        row, offset = divmod(at, width)
        count = 1 if offset else max((stop - at) // width, 1)
        end = min(at - offset + count * width, stop)
        yield slice(row, row + count), slice(at - start, end - start)
        at = end


def _encode_codes(spec: CodecSpec, x: np.ndarray, payload: np.ndarray, space: _Space) -> None:
    flat, bits = x.reshape(-1), spec.bits
    scales, packed, width = _split(spec, x.shape, payload)
    scales.fill(0)
    for start, stop in _tiles(flat.size):
        part = _widen(flat[start:stop], space)
        values = space.values[: part.size]
        np.absolute(part, out=values)
        for rows, place in _rows(start, stop, width):
            count = rows.stop - rows.start
            most = space.spare[:count]
            # maximum hands nan on.
            np.maximum.reduce(values[place].reshape(count, -1), axis=1, out=most)
            np.maximum(scales[rows], most, out=scales[rows])
    for start, stop in _tiles(scales.size):
        _make_scales(scales[start:stop], bits, space)
    for start, stop in _tiles(flat.size):
        part = _widen(flat[start:stop], space)
        values, codes = space.values[: part.size], space.codes[: part.size]
        for rows, place in _rows(start, stop, width):
            _divide(part[place], scales[rows], values[place], space)
        # At most q by more than one rounding error, so nothing is left to clip.
        np.rint(values, out=values)
        np.copyto(codes, values, casting="unsafe")
        first = start * bits // 8
        _pack(codes.size, bits, packed[first : first + code_bytes(codes.size, bits)], space)


def _make_scales(scales: np.ndarray, bits: int, space: _Space) -> None:
    """Turn the largest magnitudes of some rows into their scales, in place."""
    count = scales.size
    new, back = space.values[:count], space.spare[:count]
    mask, other = space.mask[:count], space.codes[:count].view(np.bool_)
    np.divide(scales, _LARGEST[bits], out=new)
    np.multiply(new, _LARGEST[bits], out=back)
    np.less(back, scales, out=mask)
    np.less(new, _TINY, out=other)
    np.logical_and(mask, other, out=mask)
    np.nextafter(new, _INF, out=new, where=mask)
    np.isinf(back, out=mask)
    np.nextafter(new, _ZERO, out=new, where=mask)
    np.isfinite(scales, out=mask)
    np.logical_not(mask, out=mask)
    np.copyto(scales, new)
    np.copyto(scales, _NAN, where=mask)


def _divide(part: np.ndarray, scales: np.ndarray, out: np.ndarray, space: _Space) -> None:
    """Divide rows by their scales; rows whose scale is 0 or nan become 0."""
    count = scales.size
    table = out.reshape(count, -1)
    np.divide(part.reshape(count, -1), scales[:, None], out=table)
    mask = space.mask[:count]
    np.greater(scales, _ZERO, out=mask)
    if np.count_nonzero(mask) < count:
        np.logical_not(mask, out=mask)
        np.copyto(table, _ZERO, where=mask[:, None])


def _decode_codes(
    spec: CodecSpec,
    payload: np.ndarray,
    shape: tuple[int, ...],
    start: int,
    values: np.ndarray,
    space: _Space,
) -> None:
    scales, packed, width = _split(spec, shape, payload)
    first = start * spec.bits // 8
    nbytes = code_bytes(values.size, spec.bits)
    _unpack(packed[first : first + nbytes], spec.bits, values.size, space)
    np.copyto(values, space.codes[: values.size])
    for rows, place in _rows(start, start + values.size, width):
        count = rows.stop - rows.start
        table = values[place].reshape(count, -1)
        np.multiply(table, scales[rows, None], out=table)


def _pack(count: int, bits: int, out: np.ndarray, space: _Space) -> None:
    """Write the first `count` codes of `space.codes` to `out`, `bits` bits each. Spoils them."""
    if bits == 8:
        np.copyto(out, space.codes[:count].view(np.uint8))
        return
    groups = -(-count // 8)
    codes = space.codes.view(np.uint8)[: 8 * groups]
    codes[count:].fill(0)
    np.bitwise_and(codes, _CODE_MASK[bits], out=codes)
    words, upper = codes.view(np.uint64), space.words[:groups]
    for step in _STEPS[bits]:
        np.bitwise_and(words, step.spread, out=upper)
        np.right_shift(upper, step.shift, out=upper)
        np.bitwise_and(words, step.low, out=words)
        np.bitwise_or(words, upper, out=words)
    whole = count // 8
    table, target = codes.reshape(-1, 8), out[: whole * bits].reshape(whole, bits)
    for column in range(bits):
        np.copyto(target[:, column], table[:whole, column])
    if whole < groups:
        np.copyto(out[whole * bits :], table[whole, : out.size - whole * bits])


def _unpack(packed: np.ndarray, bits: int, count: int, space: _Space) -> None:
    """Read `count` codes of `bits` bits into `space.codes`."""
    if bits == 8:
        np.copyto(space.codes[:count].view(np.uint8), packed)
        return
    groups, whole = -(-count // 8), count // 8
    codes = space.codes.view(np.uint8)[: 8 * groups]
    codes.fill(0)
    table, source = codes.reshape(-1, 8), packed[: whole * bits].reshape(whole, bits)
    for column in range(bits):
        np.copyto(table[:whole, column], source[:, column])
    if whole < groups:
        np.copyto(table[whole, : packed.size - whole * bits], packed[whole * bits :])
    words, upper = codes.view(np.uint64), space.words[:groups]
    for step in reversed(_STEPS[bits]):
        np.bitwise_and(words, step.packed, out=upper)
        np.left_shift(upper, step.shift, out=upper)
        np.bitwise_and(words, step.low, out=words)
        np.bitwise_or(words, upper, out=words)
    # Two's complement of fewer bits: the sign fills the byte.
    np.bitwise_xor(codes, _SIGN[bits], out=codes)
    np.subtract(codes, _SIGN[bits], out=codes)
