"""float16 to float32 and back with integer arithmetic, in NumPy alone.

`astype` does the same bit for bit, but one value at a time, and takes 40 times as long where the
result is subnormal, which small gradients are. Called by `kernels_numpy`; bfloat16 needs none of
this, `ml_dtypes` converts it fast.

Layout: float16 has 5 bits of exponent (bias 15) and 10 of mantissa, float32 has 8 (bias 127) and
23: a shift by 13 lines the mantissas up, 112 is the difference of the biases.
"""

from __future__ import annotations

import numpy as np

from mpisim.nn.numerics import TILE_ELEMENTS, tile_slices

_SIGN_EXPONENT_MANTISSA = np.int32(-0x70002000)  # 0x8fffe000
_TO_FLOAT32 = np.float32(2.0**112)
_ABOVE_FLOAT16 = np.float32(2.0**16)
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SMALLEST_NORMAL = np.uint32((127 - 14) << 23)  # 2^-14
_OVERFLOW = np.uint32(0x477FF000)  # 65520, halfway between the largest float16 and 2^16
_HALF, _HALF_BITS = np.float32(0.5), np.uint32(0x3F000000)
_REBIAS = np.uint32((112 << 23) - 0xFFF)


def half_to_float32(x: np.ndarray) -> np.ndarray:
    """Return the float32 array of the same values.

    Parameters
    ----------
    x : ndarray, float16
        Any shape. Not modified.

    Returns
    -------
    ndarray of float32, same shape, C-contiguous
        Bit for bit what ``x.astype(np.float32)`` gives, nan payloads included.

    Notes
    -----
    The bits, shifted, are a float32 that is 2^112 too small; one product corrects normal and
    subnormal numbers alike. Scratch: none beside a mask of one tile.
    """
    halves = np.ascontiguousarray(x).reshape(-1).view(np.int16)
    out = np.empty(x.shape, np.float32)
    values = out.reshape(-1)
    for tile in tile_slices(halves.size):
        value = values[tile]
        bits = value.view(np.int32)
        np.copyto(bits, halves[tile])  # the sign fills the upper half
        bits <<= 13
        bits &= _SIGN_EXPONENT_MANTISSA
        value *= _TO_FLOAT32
        special = np.abs(value) >= _ABOVE_FLOAT16  # was inf or nan
        if special.any():
            bits[special] |= np.int32(_INFINITY)
    return out


def float32_to_half(x: np.ndarray) -> np.ndarray:
    """Return the array rounded to float16.

    Parameters
    ----------
    x : ndarray, float32
        Any shape. Not modified.

    Returns
    -------
    ndarray of float16, same shape, C-contiguous
        Rounded to nearest, ties to even; above 65520 inf, nan stays nan.

    Notes
    -----
    Normal numbers round by adding half a unit of the new last place to the bits. A number below
    2^-14 is added to 0.5, whose unit is that of the float16 subnormals: the hardware rounds.
    Scratch: two tiles.
    """
    wide = np.ascontiguousarray(x).reshape(-1).view(np.uint32)
    out = np.empty(x.shape, np.float16)
    halves = out.reshape(-1).view(np.uint16)
    size = min(wide.size, TILE_ELEMENTS)
    magnitudes, roundeds = np.empty(size, np.uint32), np.empty(size, np.uint32)
    for tile in tile_slices(wide.size):
        bits = wide[tile]
        magnitude, rounded = magnitudes[: bits.size], roundeds[: bits.size]
        np.bitwise_and(bits, _MAGNITUDE, out=magnitude)
        np.right_shift(magnitude, 13, out=rounded)
        rounded &= np.uint32(1)  # a tie goes to the even one
        rounded += magnitude
        rounded -= _REBIAS
        rounded >>= np.uint32(13)
        if int(magnitude.min(initial=_OVERFLOW)) < _SMALLEST_NORMAL:
            small = magnitude < _SMALLEST_NORMAL
            sums = magnitude[small].view(np.float32)
            sums += _HALF
            rounded[small] = sums.view(np.uint32) - _HALF_BITS
        if int(magnitude.max(initial=0)) >= _OVERFLOW:
            large = magnitude >= _OVERFLOW
            is_nan = magnitude[large] > _INFINITY
            rounded[large] = np.where(is_nan, np.uint32(0x7E00), np.uint32(0x7C00))
        np.right_shift(bits, 16, out=magnitude)
        magnitude &= np.uint32(0x8000)
        rounded |= magnitude
        halves[tile] = rounded
    return out
