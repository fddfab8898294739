"""Frames: what crosses a boundary between two stages, one buffer of header and payload.

The header says what the frame is, so that a receiver can refuse one that it does not expect; the
payload is written by `codecs`. Nothing is trusted that comes in: every byte of the header is
checked, and every length against the bytes that are there, before an array is made.

    offset  bytes  field                  offset  bytes  field
    0       4      magic                  12      4      micro, int32
    4       1      version                16      4      boundary, int32
    5       1      kind                   20      8      step, int64
    6       1      flags                  28      24     shape, 6 x uint32, the rest of them 0
    7       1      codec                  52      8      bytes of the payload, uint64
    8       1      dtype                  60      4      CRC32 of the 60 bytes before
    9       1      dimensions
    10      2      0

All little endian. A header has one meaning and a head one header, bit for bit.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass, fields

import numpy as np

from mpisim.comm.codecs import SCRATCH_BYTES, decode, encode, encode_with_feedback
from mpisim.comm.transport import DTYPE_NAMES
from mpisim.errors import MessageMismatch
from mpisim.layouts.codecs import CodecSpec, codec_of_code, codec_spec, payload_bytes
from mpisim.layouts.frames import HEADER_BYTES, KINDS, MAX_DIMS

MAGIC = b"MPsf"
VERSION = 1
_EVALUATION = 1
_HEADER = struct.Struct(f"<4s6B2xiiq{MAX_DIMS}IQ")
_CRC = struct.Struct("<I")
_CRC_AT = _HEADER.size
_OP_OF_KIND = {"activation": "Activation", "grad": "Grad"}

# Not bool: most bytes are none. A frame's dtype code is the place of its name in DTYPE_NAMES.
FRAME_DTYPES = tuple(name for name in DTYPE_NAMES if name != "bool")
_ITEMSIZES = {
    name: 2 if name == "bfloat16" else np.dtype(name).itemsize for name in FRAME_DTYPES
}  # fmt: skip


@dataclass(frozen=True)
class FrameHead:
    """What a frame is."""

    kind: str
    """One of `layouts.frames.KINDS`."""
    step: int
    micro: int
    boundary: int
    """Number of the stage before it."""
    shape: tuple[int, ...]
    dtype: str
    """Of the tensor, not of what the codec makes of it."""
    codec: str
    evaluation: bool = False
    """Sent in a pass without backward."""

    @property
    def spec(self) -> CodecSpec:
        """Its codec."""
        return codec_spec(self.codec)

    @property
    def payload_bytes(self) -> int:
        """Bytes after the header."""
        return payload_bytes(self.spec, self.shape, _ITEMSIZES[self.dtype])

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frame."""
        return HEADER_BYTES + self.payload_bytes


def write_header(buffer: np.ndarray, head: FrameHead) -> np.ndarray:
    """Write the header of a frame and return the place of its payload.

    Parameters
    ----------
    buffer : ndarray of shape (head.frame_bytes,), uint8
        Its first 64 bytes are filled.
    head : FrameHead

    Returns
    -------
    ndarray of uint8
        The rest of `buffer`, a view.

    Raises
    ------
    ValueError
        A field cannot be sent, or `buffer` has another length.
    """
    header = _pack(head)
    if (
        buffer.dtype != np.uint8
        or buffer.shape != (head.frame_bytes,)
        or not buffer.flags.c_contiguous
    ):
        raise ValueError(
            f"frame buffer must be {head.frame_bytes} contiguous bytes of uint8; got "
            f"{buffer.dtype} of shape {buffer.shape}. Make it as long as frame_bytes says."
        )
    memoryview(buffer)[:HEADER_BYTES] = header
    return buffer[HEADER_BYTES:]


def read_header(buffer: np.ndarray | bytes) -> FrameHead:
    """Return what a frame says it is, after checking all that can be checked without knowing more.

    Parameters
    ----------
    buffer : ndarray of uint8, or bytes
        The whole frame, nothing before or after it.

    Raises
    ------
    MessageMismatch
        It is no frame, or its length is not what its header says.

    Notes
    -----
    Makes no array, whatever the header says. Of the payload only the bits left over after the last
    code are looked at, which must be 0.
    """
    return _parse(buffer, "frame")


def check_frame(
    buffer: np.ndarray | bytes, expected: FrameHead, rank: int, peer: int
) -> np.ndarray:
    """Check that a frame is the one expected and return its payload.

    Parameters
    ----------
    buffer : ndarray of uint8, or bytes
        The whole frame.
    expected : FrameHead
        What this rank's op waits for.
    rank : int
        World rank of the receiver, this one.
    peer : int
        World rank of the sender.

    Returns
    -------
    ndarray of uint8
        The payload, a view.

    Raises
    ------
    MessageMismatch
        It is no frame or another one; names both ranks, and both ops.
    """
    wanted = _describe(expected, "Recv", rank)
    head = _parse(buffer, f"frame from rank {peer} to {wanted}")
    if head != expected:
        differences = ", ".join(
            f"{field.name} {getattr(head, field.name)} instead of {getattr(expected, field.name)}"
            for field in fields(FrameHead)
            if getattr(head, field.name) != getattr(expected, field.name)
        )
        raise MessageMismatch(
            f"{wanted} must get the frame it waits for from rank {peer}; got that of "
            f"{_describe(head, 'Send', peer)}: {differences}. Run the same plan on both ranks."
        )
    return _as_bytes(buffer)[HEADER_BYTES:]


def encode_frame(
    head: FrameHead,
    x: np.ndarray,
    scratch: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """Return the frame of a tensor as a new array of uint8.

    Parameters
    ----------
    head : FrameHead
        Shape and dtype are those of `x`.
    x : ndarray
        C-contiguous. Not modified.
    scratch : ndarray of shape (131072,), uint8, optional
        Overwritten; without it one is allocated.
    residual : ndarray, optional
        What the frames before it lost is added, and what this one loses kept there: see
        `codecs.encode_with_feedback`.

    Raises
    ------
    ValueError
        `head` cannot be sent or is not that of `x`.
    """
    if x.shape != head.shape or x.dtype != _dtype_of(head.dtype):
        raise ValueError(
            f"tensor must be {head.dtype} of shape {head.shape} as its head says; got {x.dtype} "
            f"of shape {x.shape}. Make the head from the tensor."
        )
    _pack(head)  # a shape that cannot be sent is refused before it is allocated
    buffer = np.empty(head.frame_bytes, np.uint8)
    payload = write_header(buffer, head)
    if residual is None:
        encode(head.spec, x, payload, _scratch(scratch))
    else:
        encode_with_feedback(head.spec, x, residual, payload, _scratch(scratch))
    return buffer


def decode_frame(
    buffer: np.ndarray | bytes,
    expected: FrameHead,
    rank: int,
    peer: int,
    scratch: np.ndarray | None = None,
) -> np.ndarray:
    """Check a frame and return its tensor.

    Parameters
    ----------
    buffer, expected, rank, peer
        See `check_frame`.
    scratch : ndarray of shape (131072,), uint8, optional
        Overwritten; without it one is allocated if the codec needs it.

    Returns
    -------
    ndarray
        Without codec ("none") a view of `buffer`, aligned if `buffer` is; else a new array.

    Raises
    ------
    MessageMismatch
        It is no frame or another one.
    """
    payload = check_frame(buffer, expected, rank, peer)
    return _decode(expected, payload, scratch, f"frame from rank {peer} to rank {rank}")


def open_frame(
    buffer: np.ndarray | bytes, scratch: np.ndarray | None = None
) -> tuple[FrameHead, np.ndarray]:
    """Return head and tensor of any frame, whatever it says it is.

    Raises
    ------
    MessageMismatch
        It is no frame.

    Notes
    -----
    Allocates the tensor, no more than 32 times the bytes of `buffer`, and the scratch.
    """
    head = _parse(buffer, "frame")
    return head, _decode(head, _as_bytes(buffer)[HEADER_BYTES:], scratch, "frame")


def _describe(head: FrameHead, verb: str, rank: int) -> str:
    evaluation = " in evaluation" if head.evaluation else ""
    return (
        f"{verb}{_OP_OF_KIND[head.kind]} boundary {head.boundary} micro {head.micro} of step "
        f"{head.step}{evaluation} on rank {rank}"
    )


def _dtype_of(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _scratch(scratch: np.ndarray | None) -> np.ndarray:
    return np.empty(SCRATCH_BYTES, np.uint8) if scratch is None else scratch


def _as_bytes(buffer: np.ndarray | bytes) -> np.ndarray:
    if isinstance(buffer, np.ndarray):
        return buffer
    return np.frombuffer(buffer, np.uint8)


def _fault(head: FrameHead) -> tuple[str, object, str] | None:
    """Return what of a head cannot be sent: rule, value and remedy."""
    for name, most in (("step", 2**63), ("micro", 2**31), ("boundary", 2**31)):
        value = getattr(head, name)
        if not 0 <= value < most:
            return f"have a {name} in 0..{most - 1}", value, "Count from 0."
    if len(head.shape) > MAX_DIMS:
        return f"have at most {MAX_DIMS} dimensions", head.shape, "Reshape the tensor."
    if not all(0 <= extent < 2**32 for extent in head.shape):
        return f"have extents in 0..{2**32 - 1}", head.shape, "Split the tensor."
    # NumPy refuses this even of a tensor without elements.
    if math.prod(extent or 1 for extent in head.shape) * _ITEMSIZES[head.dtype] >= 2**63:
        return "have fewer than 2^63 bytes", head.shape, "Split the tensor."
    spec = head.spec
    if spec.dtypes and head.dtype not in spec.dtypes:
        rule = f"have dtype {' or '.join(spec.dtypes)} with codec {spec.name!r}"
        return rule, head.dtype, "Use another codec."
    return None


def _pack(head: FrameHead) -> bytes:
    if head.kind not in KINDS:
        raise ValueError(
            f"kind of a frame must be {' or '.join(KINDS)}; got {head.kind!r}. Choose one."
        )
    if head.dtype not in _ITEMSIZES:
        raise ValueError(
            f"dtype of a frame must be one of {', '.join(FRAME_DTYPES)}; got {head.dtype!r}. "
            f"Convert the tensor."
        )
    fault = _fault(head)
    if fault is not None:
        rule, value, remedy = fault
        raise ValueError(f"frame must {rule}; got {value}. {remedy}")
    shape = tuple(head.shape)
    start = _HEADER.pack(
        MAGIC,
        VERSION,
        KINDS.index(head.kind),
        _EVALUATION if head.evaluation else 0,
        head.spec.code,
        DTYPE_NAMES.index(head.dtype),
        len(shape),
        head.micro,
        head.boundary,
        head.step,
        *shape,
        *(0,) * (MAX_DIMS - len(shape)),
        head.payload_bytes,
    )
    return start + _CRC.pack(zlib.crc32(start))


def _parse(buffer: np.ndarray | bytes, what: str) -> FrameHead:
    """Return the head of a frame; `what` is the subject of the error."""

    def error(rule: str, got: object) -> MessageMismatch:
        return MessageMismatch(
            f"{what} must {rule}; got {got}. Run the same version and plan on both ranks."
        )

    data = _as_bytes(buffer)
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise error("be contiguous bytes of uint8", f"{data.dtype} of shape {data.shape}")
    if data.size < HEADER_BYTES:
        raise error(f"begin with a header of {HEADER_BYTES} bytes", f"{data.size} bytes")
    header = bytes(memoryview(data)[:HEADER_BYTES])
    magic, version, kind, flags, codec, dtype, num_dims, micro, boundary, step, *rest = (
        _HEADER.unpack_from(header)
    )
    if magic != MAGIC:
        raise error(f"begin with {MAGIC!r}", repr(magic))
    if version != VERSION:
        raise error(f"be of version {VERSION}", version)
    (crc,) = _CRC.unpack_from(header, _CRC_AT)
    computed = zlib.crc32(header[:_CRC_AT])
    if crc != computed:
        raise error(f"have the checksum {computed:#010x} of its header", f"{crc:#010x}")
    *extents, num_bytes = rest
    if header[10:12] != b"\0\0" or any(extents[num_dims:]):
        raise error("have zeros in what its header does not use", header.hex())
    if kind >= len(KINDS):
        raise error(f"be of kind {' or '.join(KINDS)}", f"code {kind}")
    if flags & ~_EVALUATION:
        raise error("have flags that are known", f"{flags:#04x}")
    spec = codec_of_code(codec)
    if spec is None:
        raise error("have a codec that this rank knows", f"code {codec}")
    if dtype >= len(DTYPE_NAMES) or DTYPE_NAMES[dtype] not in _ITEMSIZES:
        raise error(f"have a dtype of {', '.join(FRAME_DTYPES)}", f"code {dtype}")
    if num_dims > MAX_DIMS:
        raise error(f"have at most {MAX_DIMS} dimensions", num_dims)
    head = FrameHead(
        KINDS[kind], step, micro, boundary, tuple(extents[:num_dims]), DTYPE_NAMES[dtype],
        spec.name, bool(flags & _EVALUATION),
    )  # fmt: skip
    fault = _fault(head)
    if fault is not None:
        raise error(*fault[:2])
    if num_bytes != head.payload_bytes:
        raise error(
            f"have {head.payload_bytes} bytes of payload for {head.dtype} of shape {head.shape} "
            f"with codec {spec.name!r}",
            f"{num_bytes} in its header",
        )
    if data.size != HEADER_BYTES + num_bytes:
        raise error(
            f"have the {HEADER_BYTES} + {num_bytes} bytes that its header says",
            f"{data.size} bytes",
        )
    used = math.prod(head.shape) * spec.bits % 8 if spec.kind == "quantize" else 0
    if used and memoryview(data)[-1] >> used:
        raise error(
            f"end in zeros after the {used} bits of its last byte that hold codes",
            f"{memoryview(data)[-1]:#04x}",
        )
    return head


def _decode(
    head: FrameHead, payload: np.ndarray, scratch: np.ndarray | None, what: str
) -> np.ndarray:
    spec = head.spec
    if spec.kind == "raw":
        return payload.view(_dtype_of(head.dtype)).reshape(head.shape)
    out = np.empty(head.shape, _dtype_of(head.dtype))
    try:
        decode(spec, payload, out, _scratch(scratch))
    except ValueError as error:
        # The functions of a user's codec have no other way to refuse bytes.
        raise MessageMismatch(
            f"{what} must be one that codec {spec.name!r} can decode; got {error}. "
            f"Look at what changed it on the way."
        ) from error
    return out
