"""Signs only: a codec of your own. One bit per value, and the mean magnitude of the tensor.

A tensor x of n values becomes m = mean |x| as a float32, then n sign bits, the first in the lowest
bit of the first byte: 4 + ceil(n / 8) bytes, 32 times less than float32. It arrives as +m or -m.
Meant for gradients with compression.error_feedback, which adds what was lost to the next one
(Seide et al. 2014; Karimireddy et al. 2019, "scaled sign").

Everything works in tiles within the scratch, so that memory is as forecast, to the byte.
"""

import math

import numpy as np

from mpisim.comm.codecs import register_codec
from mpisim.layouts.codecs import CodecSpec

TILE = 8192
PLACES = [np.array(place, np.uint8) for place in range(8)]
ONE = np.array(1, np.uint8)


def size(shape, itemsize):
    """Return the bytes of a payload."""
    return 4 + (math.prod(shape) + 7) // 8


def encode(x, payload, scratch):
    """Fill `payload` from `x`, float32."""
    x = x.reshape(-1)
    mean, part = payload[:4].view(np.float32), scratch[:4].view(np.float32)
    magnitudes, bits = scratch[64 : 64 + 4 * TILE].view(np.float32), scratch[-2 * TILE : -TILE]
    shifted = scratch[-TILE:][: TILE // 8]
    mean.fill(0)
    for start in range(0, x.size, TILE):
        piece = x[start : start + TILE]
        np.absolute(piece, out=magnitudes[: piece.size])
        # Where something is not finite, the mean is not, and so nothing is that arrives.
        np.add.reduce(magnitudes[: piece.size], out=part, keepdims=True)
        np.add(mean, part, out=mean)
        bits.fill(0)
        np.signbit(piece, out=bits[: piece.size].view(np.bool_))
        packed = payload[4 + start // 8 : 4 + (start + piece.size + 7) // 8]
        packed.fill(0)
        for place, column in zip(PLACES, bits.reshape(-1, 8).T, strict=True):
            np.left_shift(column, place, out=shifted)
            np.bitwise_or(packed, shifted[: packed.size], out=packed)
    part.fill(max(x.size, 1))
    np.divide(mean, part, out=mean)


def decode(payload, out, scratch):
    """Fill `out`, float32, from `payload`."""
    out = out.reshape(-1)
    mean, minus = payload[:4].view(np.float32), scratch[:4].view(np.float32)
    bits = scratch[-TILE:]
    np.negative(mean, out=minus)
    for start in range(0, out.size, TILE):
        piece = out[start : start + TILE]
        packed = payload[4 + start // 8 : 4 + (start + piece.size + 7) // 8]
        for place, column in zip(PLACES, bits.reshape(-1, 8).T, strict=True):
            np.right_shift(packed, place, out=column[: packed.size])
        np.bitwise_and(bits, ONE, out=bits)
        np.copyto(piece, mean)
        np.copyto(piece, minus, where=bits[: piece.size].view(np.bool_))


register_codec(CodecSpec("sign", 128, "custom", dtypes=("float32",), size=size), encode, decode)
