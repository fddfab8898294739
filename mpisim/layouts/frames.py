"""Size of a boundary frame: a header of fixed length, then the payload its codec makes.

`comm.frames` writes and checks the bytes; plans, prices and forecasts need only the numbers here.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpisim.layouts.codecs import CodecSpec, payload_bytes

HEADER_BYTES = 64
"""A cache line: the payload of an aligned frame is aligned for every dtype."""
KINDS = ("activation", "grad")
"""What crosses a boundary, forward and backward."""
MAX_DIMS = 6
"""Dimensions that a header has room for."""


def frame_bytes(spec: CodecSpec, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of the frame of one tensor, header and payload.

    Parameters
    ----------
    spec : CodecSpec
    shape : sequence of int
        Of the tensor.
    itemsize : int
        Bytes of one of its elements.

    Examples
    --------
    >>> from mpisim.layouts.codecs import codec_spec
    >>> frame_bytes(codec_spec("none"), (2, 8), 4), frame_bytes(codec_spec("int4"), (2, 8), 4)
    (128, 76)
    """
    return HEADER_BYTES + payload_bytes(spec, shape, itemsize)
