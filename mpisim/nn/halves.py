"""float16 to float32 and back with integer arithmetic, in NumPy alone.

`astype` does the same bit for bit, but one value at a time, and takes 40 times as long where the
result is subnormal, which small gradients are. Called by `kernels_numpy`; bfloat16 needs none of
this, `ml_dtypes` converts it fast.

Layout: float16 has 5 bits of exponent (bias 15) and 10 of mantissa, float32 has 8 (bias 127) and
23: a shift by 13 lines the mantissas up, 112 is the difference of the biases.
"""

from __future__ import annotations

import numpy as np

from mpisim.nn.numerics import TILE_ELEMENTS, flat_view, tile_slices

_SIGN_EXPONENT_MANTISSA = np.int32(-0x70002000)  # 0x8fffe000
_EXPONENT = np.int16(0x7C00)
_SHIFT = np.int32(13)
_TO_FLOAT32 = np.float32(2.0**112)
_INFINITY, _INFINITY_BITS = np.uint32(0x7F800000), np.int32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SMALLEST_NORMAL = np.uint32((127 - 14) << 23)  # 2^-14
_OVERFLOW = np.uint32(0x477FF000)  # 65520, halfway between the largest float16 and 2^16
# As Python numbers: NumPy 1.26 makes arrays to compare one with a scalar of its own.
_LEAST_LARGE, _MOST_SMALL = int(_OVERFLOW), int(_SMALLEST_NORMAL) - 1
_HALF, _HALF_BITS = np.float32(0.5), np.uint32(0x3F000000)
_REBIAS = np.uint32((112 << 23) - 0xFFF)
_ONE, _THIRTEEN, _SIXTEEN = np.uint32(1), np.uint32(13), np.uint32(16)
_HALF_SIGN, _HALF_INFINITY, _HALF_NAN = np.uint32(0x8000), np.uint32(0x7C00), np.uint32(0x7E00)


def half_to_float32(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the float32 array of the same values.

    Parameters
    ----------
    x : ndarray, float16
        Any shape. Not modified.
    out : ndarray of float32, same shape, C-contiguous, optional
        Receives the result; without it an array is allocated.

    Returns
    -------
    ndarray of float32, same shape, C-contiguous
        Bit for bit what ``x.astype(np.float32)`` gives, nan payloads included.

    Notes
    -----
    The bits, shifted, are a float32 that is 2^112 too small; one product corrects normal and
    subnormal numbers alike. Scratch: one tile of float16 and one of bool, whatever the values.
    """
    halves = np.ascontiguousarray(x).reshape(-1).view(np.int16)
    if out is None:
        out = np.empty(x.shape, np.float32)
    values = flat_view(out)
    size = min(halves.size, TILE_ELEMENTS)
    exponents, masks = np.empty(size, np.int16), np.empty(size, bool)
    for tile in tile_slices(halves.size):
        value = values[tile]
        bits = value.view(np.int32)
        np.copyto(bits, halves[tile])  # the sign fills the upper half
        bits <<= _SHIFT
        bits &= _SIGN_EXPONENT_MANTISSA
        value *= _TO_FLOAT32
        exponent, special = exponents[: bits.size], masks[: bits.size]
        np.bitwise_and(halves[tile], _EXPONENT, out=exponent)
        np.equal(exponent, _EXPONENT, out=special)  # inf or nan
        if special.any():
            np.bitwise_or(bits, _INFINITY_BITS, out=bits, where=special)
    return out


def float32_to_half(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the array rounded to float16.

    Parameters
    ----------
    x : ndarray, float32
        Any shape. Not modified.
    out : ndarray of float16, same shape, C-contiguous, optional
        Receives the result; without it an array is allocated.

    Returns
    -------
    ndarray of float16, same shape, C-contiguous
        Rounded to nearest, ties to even; above 65520 inf, nan stays nan.

    Notes
    -----
    Normal numbers round by adding half a unit of the new last place to the bits. A number below
    2^-14 is added to 0.5, whose unit is that of the float16 subnormals: the hardware rounds.
    Scratch: two tiles of float32 and one of bool, whatever the values.
    """
    wide = np.ascontiguousarray(x).reshape(-1).view(np.uint32)
    if out is None:
        out = np.empty(x.shape, np.float16)
    halves = flat_view(out).view(np.uint16)
    size = min(wide.size, TILE_ELEMENTS)
    magnitudes, roundeds = np.empty(size, np.uint32), np.empty(size, np.uint32)
    masks = np.empty(size, bool)
    for tile in tile_slices(wide.size):
        bits = wide[tile]
        magnitude, rounded = magnitudes[: bits.size], roundeds[: bits.size]
        mask = masks[: bits.size]
        np.bitwise_and(bits, _MAGNITUDE, out=magnitude)
        np.right_shift(magnitude, _THIRTEEN, out=rounded)
        rounded &= _ONE  # a tie goes to the even one
        rounded += magnitude
        rounded -= _REBIAS
        rounded >>= _THIRTEEN
        if int(magnitude.max()) >= _LEAST_LARGE:
            np.greater_equal(magnitude, _OVERFLOW, out=mask)
            np.copyto(rounded, _HALF_INFINITY, where=mask)
            np.greater(magnitude, _INFINITY, out=mask)
            np.copyto(rounded, _HALF_NAN, where=mask)
        if int(magnitude.min()) <= _MOST_SMALL:
            np.less(magnitude, _SMALLEST_NORMAL, out=mask)
            # In place, and for all: the sums of the others are not read.
            sums = magnitude.view(np.float32)
            sums += _HALF
            np.subtract(magnitude, _HALF_BITS, out=rounded, where=mask)
        np.right_shift(bits, _SIXTEEN, out=magnitude)
        magnitude &= _HALF_SIGN
        rounded |= magnitude
        halves[tile] = rounded
    return out
