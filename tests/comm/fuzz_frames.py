"""Mutated and random frames: each must be refused with MessageMismatch or decode exactly.

    python tests/comm/fuzz_frames.py --count 1000000 [--seed 0]

Also holds the plain second implementation of the codecs that the tests compare with: whole arrays,
bits one by one, as many temporaries as it takes.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
import zlib
from collections import Counter

import ml_dtypes
import numpy as np

from mpisim.comm.codecs import SCRATCH_BYTES
from mpisim.comm.frames import FrameHead, encode_frame, open_frame, write_header
from mpisim.comm.transport import DTYPE_NAMES
from mpisim.errors import MessageMismatch
from mpisim.layouts.codecs import CodecSpec, codec_names, codec_spec

FLOATS = ("float32", "float64", "float16", "bfloat16")
CODECS = codec_names()


def dtype_named(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def takes(spec: CodecSpec, dtype: str) -> bool:
    return not spec.dtypes or dtype in spec.dtypes


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Tell whether dtype, shape and every bit agree; nan equals nan only of the same bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# The second implementation


def reference_scale(most: np.float32, bits: int) -> np.float32:
    largest = np.float32(2 ** (bits - 1) - 1)
    if not np.isfinite(most):
        return np.float32(np.nan)
    scale = most / largest
    if scale < np.float32(2.0**-126) and scale * largest < most:
        scale = np.nextafter(scale, np.float32(np.inf))
    if np.isinf(scale * largest):
        scale = np.nextafter(scale, np.float32(0))
    return scale


def reference_rows(shape: tuple[int, ...], per_token: bool) -> int:
    """Return how many scales a tensor with elements has."""
    return math.prod(shape[:-1]) if per_token else 1


def reference_payload(spec: CodecSpec, x: np.ndarray) -> bytes:
    """Return the bytes of a tensor, written down from the format's description."""
    with np.errstate(all="ignore"):
        if spec.kind == "raw":
            return x.tobytes()
        if spec.name == "fp16":
            return x.astype(np.float16).tobytes()
        if spec.name == "bf16":
            return x.astype(np.float32).astype(ml_dtypes.bfloat16).tobytes()
        if not x.size:
            return b"" if spec.per_token else bytes(4)
        table = x.astype(np.float32).reshape(reference_rows(x.shape, spec.per_token), -1)
        scales = [reference_scale(np.abs(row).max(), spec.bits) for row in table]
        rows = [
            np.rint(row / scale) if scale > 0 else np.zeros_like(row)
            for row, scale in zip(table, scales, strict=True)
        ]
        codes = np.concatenate(rows).astype(np.int64)
        bits = codes[:, None] >> np.arange(spec.bits) & 1
        packed = np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")
        return np.array(scales, np.float32).tobytes() + packed.tobytes()


def reference_decode(
    spec: CodecSpec, payload: bytes, shape: tuple[int, ...], dtype: str
) -> np.ndarray:
    """Return the tensor of some bytes."""
    kind = dtype_named(dtype)
    with np.errstate(all="ignore"):
        if spec.kind == "raw":
            return np.frombuffer(payload, kind).reshape(shape)
        if spec.kind == "cast":
            sent = np.float16 if spec.name == "fp16" else ml_dtypes.bfloat16
            return np.frombuffer(payload, sent).astype(np.float32).astype(kind).reshape(shape)
        count = math.prod(shape)
        if not count:
            return np.zeros(shape, kind)
        rows = reference_rows(shape, spec.per_token)
        scales = np.frombuffer(payload[: 4 * rows], np.float32)
        bits = np.unpackbits(np.frombuffer(payload[4 * rows :], np.uint8), bitorder="little")
        weights = 2 ** np.arange(spec.bits)
        weights[-1] *= -1  # two's complement
        codes = bits[: count * spec.bits].reshape(count, spec.bits) @ weights
        values = codes.astype(np.float32).reshape(rows, -1) * scales[:, None]
        return values.reshape(shape).astype(kind)


# Values and frames


def some_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return numbers of one of several sorts: ordinary, tiny, huge, ties, zeros, any bits."""
    kind, count = dtype_named(dtype), math.prod(shape)
    sort = rng.integers(7)
    with np.errstate(all="ignore"):
        if sort == 0:
            x = rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8).view(kind)
        elif sort == 1:
            x = rng.integers(-9, 10, count) / 2
        elif sort == 2:
            x = rng.standard_normal(count) * 10.0 ** rng.uniform(-46, 39)
        elif sort == 3:
            x = rng.standard_normal(count) * (rng.random(count) < 0.3)
            x[rng.random(count) < 0.1] = rng.choice([np.inf, -np.inf, np.nan])
        elif sort == 4:
            x = rng.standard_normal(count) * 10.0 ** rng.uniform(-9, 5, count)
        elif sort == 5:
            x = np.zeros(count) * rng.choice([1, -1])
        else:
            x = rng.standard_normal(count)
        return np.ascontiguousarray(x.astype(kind)).reshape(shape)


def some_shape(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(extent) for extent in rng.integers(0, 6, rng.integers(0, 4)))


def some_frame(rng: np.random.Generator) -> bytes:
    """Return a valid frame, 1 in 8 of no floats."""
    dtype = str(rng.choice(DTYPE_NAMES[:8] if rng.random() < 0.125 else FLOATS))
    codec = str(rng.choice([name for name in CODECS if takes(codec_spec(name), dtype)]))
    shape = some_shape(rng)
    if dtype in FLOATS:
        x = some_values(rng, shape, dtype)
    else:
        x = rng.integers(0, 100, shape).astype(dtype)
    head = FrameHead(
        str(rng.choice(["activation", "grad"])), int(rng.integers(2**63)), int(rng.integers(2**31)),
        int(rng.integers(2**31)), shape, dtype, codec, bool(rng.integers(2)),
    )  # fmt: skip
    return encode_frame(head, x, SCRATCH).tobytes()


SCRATCH = np.empty(SCRATCH_BYTES, np.uint8)
SIZES = (0, 1, 2, 3, 7, 8, 255, 2**31 - 1, 2**31, 2**32 - 1)
LENGTHS = (0, 1, 4, 5, 63, 64, 2**20, 2**63, 2**64 - 1)


def fixed_up(frame: bytearray) -> bytearray:
    """Make the checksum of a header right, so that what lies behind it is checked."""
    if len(frame) >= 64:
        frame[60:64] = struct.pack("<I", zlib.crc32(bytes(frame[:60])))
    return frame


def flip(rng: np.random.Generator, frame: bytearray, start: int, stop: int) -> bytearray:
    # Different ones: flipped twice, a bit is as it was.
    for bit in {int(bit) for bit in rng.integers(8 * start, 8 * stop, rng.integers(1, 4))}:
        frame[bit // 8] ^= 1 << bit % 8
    return frame


def mutate(rng: np.random.Generator, valid: bytes) -> tuple[str, bytes]:
    """Return a frame made wrong in one of several ways, and the way."""
    way, frame = int(rng.integers(11)), bytearray(valid)
    if way == 0:
        return "random", rng.bytes(int(rng.integers(0, 200)))
    if way == 1:
        return "cut", bytes(frame[: rng.integers(len(frame))])
    if way == 2:
        return "extended", bytes(frame + rng.bytes(int(rng.integers(1, 80))))
    if way == 3:
        return "stale checksum", bytes(flip(rng, frame, 0, 64))
    if way == 4:
        return "header bits", bytes(fixed_up(flip(rng, frame, 0, 60)))
    if way == 5:
        if len(frame) > 64:
            flip(rng, frame, 64, len(frame))
        return "payload bits", bytes(frame)
    if way == 6:  # any byte of what says how to read the rest
        frame[rng.integers(4, 12)] = rng.choice(
            [0, 1, 2, 3, 6, 7, 12, 13, 18, 24, 34, 40, 128, 255]
        )
        return "one field", bytes(fixed_up(frame))
    if way == 7:  # a shape of its own
        num_dims = int(rng.integers(0, 8))
        frame[9] = num_dims
        extents = [int(rng.choice(SIZES)) for _ in range(min(num_dims, 6))]
        frame[28:52] = struct.pack("<6I", *extents, *[0] * (6 - len(extents)))
        return "shape", bytes(fixed_up(frame))
    if way == 8:  # another payload length, with the bytes for it or without
        nbytes = LENGTHS[rng.integers(len(LENGTHS))]
        frame[52:60] = struct.pack("<Q", nbytes)
        if nbytes < 100 and rng.integers(2):
            frame[64:] = rng.bytes(nbytes)
        return "length", bytes(fixed_up(frame))
    if way == 9:  # a shape that fits the bytes that are there, for some codecs
        count = int(rng.integers(0, 40))
        frame[9:10], frame[28:52] = b"\1", struct.pack("<6I", count, 0, 0, 0, 0, 0)
        frame[7] = rng.choice([0, 1, 2, *range(18, 25), *range(34, 41)])
        codes = frame[7] - (32 if frame[7] > 32 else 16)
        nbytes = 4 + -(-count * codes // 8) if codes > 0 else count * int(rng.choice([1, 2, 4, 8]))
        frame[52:60] = struct.pack("<Q", nbytes)
        frame[64:] = rng.bytes(nbytes)
        return "any payload", bytes(fixed_up(frame))
    return "nothing", bytes(frame)


def check_one(frame: bytes) -> bool:
    """Open a frame; return whether it was taken, raise if it was neither exact nor refused."""
    try:
        head, x = open_frame(frame, SCRATCH)
    except MessageMismatch as error:
        # The house form: a rule, what came, and what to do.
        assert " must " in str(error) and "; got " in str(error), error
        return False
    assert x.shape == head.shape and x.dtype == dtype_named(head.dtype), head
    assert x.nbytes <= 32 * len(frame), head
    again = np.empty(len(frame), np.uint8)
    write_header(again, head)
    assert again[:64].tobytes() == frame[:64], head
    expected = reference_decode(head.spec, frame[64:], head.shape, head.dtype)
    assert same_bits(x, expected), head
    return True


def fuzz(count: int, seed: int = 0) -> dict[str, tuple[int, int]]:
    """Check `count` frames; return for each way how many were taken and how many refused."""
    rng = np.random.default_rng(seed)
    taken, refused = Counter(), Counter()
    valid = [some_frame(rng) for _ in range(64)]
    for number in range(count):
        if number % 8 == 0:
            valid[rng.integers(len(valid))] = some_frame(rng)
        way, frame = mutate(rng, valid[rng.integers(len(valid))])
        try:
            (taken if check_one(frame) else refused)[way] += 1
        except Exception:
            print(f"frame {number} of seed {seed} ({way}): {frame.hex()}", file=sys.stderr)
            raise
    return {way: (taken[way], refused[way]) for way in sorted(taken | refused)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for way, (taken, refused) in fuzz(options.count, options.seed).items():
        print(f"{way:15} {taken:8} decoded exactly {refused:8} refused")


if __name__ == "__main__":
    main()
