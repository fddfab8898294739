"""The transport protocol and the checks that every transport makes before a message starts.

A transport moves bytes between ranks; it knows nothing of groups, collectives or plans. It is
implemented by `local.LocalTransport` and `mpi.MpiTransport`, wrapped by `faulty.FaultyTransport`,
and called by `communicator`. One contract suite (tests/comm/contract.py) runs on each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from mpisim.errors import CommTimeout, MessageMismatch, PeerLost

MAX_TAG = 32767
"""The MPI standard promises no tag above this (MPI-4.1, section 3.2.3)."""

# A tag is channel * 16 + dtype code: a message of another dtype never matches, and a stalled
# wait can say so, because it finds the stranger waiting on the same channel.
DTYPE_NAMES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "bool",
)  # fmt: skip
_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}
_TAG_DTYPES = 16
MAX_CHANNEL = MAX_TAG // _TAG_DTYPES - 1


class Message(Protocol):
    """A send or a receive bound to its buffer; it can be started again once it has completed."""

    is_send: bool
    peer: int
    """World rank of the other side."""
    tag: int
    nbytes: int
    start: Callable[[], None]
    """Post it. The buffer belongs to the message until `test` says True."""
    test: Callable[..., bool]
    """``test(status)``: has it completed? Never blocks. Status is the transport's `status`."""
    free: Callable[[], None]


class Transport(Protocol):
    """What `communicator` needs of a transport.

    Notes
    -----
    Every rank of the job owns one transport. Only one thread uses it. Buffers are C-contiguous
    NumPy arrays whose dtype is one of `DTYPE_NAMES`; they are sent in place, never pickled.
    """

    rank: int
    size: int
    timeout_s: float
    """Longest wait for one message, seconds."""
    polls_per_pause: int
    """How often a blocked wait polls before it calls `pause`."""
    status: Any
    received_bytes: Callable[[], int]
    """Bytes of the receive that the last successful ``test(status)`` completed."""

    def prepare_send(
        self, buffer: np.ndarray, dest: int, channel: int, one_copy: bool = False
    ) -> Message:
        """Bind a send; raises ValueError for a buffer that cannot be sent in place.

        `one_copy` asks that the receiver take the bytes straight from the sender's memory: best
        for pieces of a buffer that no cache holds, and for messages that travel beside compute,
        because the sender need not help. Both ends of a message give the same value. It may
        change how fast the bytes move, nothing else.
        """

    def prepare_recv(
        self, buffer: np.ndarray, source: int, channel: int, one_copy: bool = False
    ) -> Message:
        """Bind a receive into `buffer` (see `prepare_send`)."""

    def pause(self, pending: Message, waited_s: float) -> None:
        """Yield the core; raise if the peer is lost, the time is up or a stranger waits."""

    def exchange(self, text: str) -> list[str]:
        """Collect one short text from every rank, in rank order.

        Before the first step or after the last only.
        """

    def barrier(self) -> None:
        """Return once every rank has called it (start and end of a job only)."""

    def close(self) -> None:
        """Release what the transport holds."""


def dtype_code(dtype: np.dtype) -> int:
    """Return the wire code of `dtype`; raise ValueError for one that is not sent."""
    code = _CODES.get(dtype.name)
    # The name says nothing of the byte order, and swapped bytes would arrive as other numbers.
    if code is None or not dtype.isnative:
        raise ValueError(
            f"buffer dtype must be one of {', '.join(DTYPE_NAMES)}, in this machine's byte order; "
            f"got {dtype.str if code is not None else dtype}. Convert it first."
        )
    return code


def make_tag(channel: int, dtype: np.dtype) -> int:
    """Return the tag of messages of `dtype` on `channel`, at most `MAX_TAG`."""
    if not 0 <= channel <= MAX_CHANNEL:
        raise ValueError(
            f"channel must be in 0..{MAX_CHANNEL}; got {channel}. Reuse channels modulo this."
        )
    return channel * _TAG_DTYPES + dtype_code(dtype)


def channel_tags(channel: int) -> range:
    """Return the tags of all dtypes on `channel`."""
    return range(channel * _TAG_DTYPES, channel * _TAG_DTYPES + len(DTYPE_NAMES))


def tag_channel(tag: int) -> int:
    """Return the channel of a tag."""
    return tag // _TAG_DTYPES


def tag_dtype(tag: int) -> str:
    """Return the dtype name of a tag."""
    return DTYPE_NAMES[tag % _TAG_DTYPES]


def checked_tag(buffer: np.ndarray, peer: int, size: int, channel: int, *, receive: bool) -> int:
    """Check that `buffer` can travel in place to or from `peer`, and return its tag.

    Raises
    ------
    ValueError
        Not an array, not C-contiguous (MPI would send a transposed array in memory order without
        an error), read-only on receive, a dtype that is not sent, or no such peer.
    """
    if not isinstance(buffer, np.ndarray):
        raise ValueError(f"buffer must be a NumPy array; got {type(buffer).__name__}.")
    if not buffer.flags.c_contiguous:
        raise ValueError(
            f"buffer must be C-contiguous; got shape {buffer.shape} with strides "
            f"{buffer.strides}. Send numpy.ascontiguousarray(x), and copy back after a receive."
        )
    if receive and not buffer.flags.writeable:
        raise ValueError("receive buffer must be writeable; got a read-only array. Pass a copy.")
    if not 0 <= peer < size:
        raise ValueError(f"peer must be a rank in 0..{size - 1}; got {peer}.")
    return make_tag(channel, buffer.dtype)


def describe(message: Message, rank: int) -> str:
    """Say what a message is, for error texts."""
    verb, way = ("send", "to") if message.is_send else ("receive", "from")
    return (
        f"{verb} of {message.nbytes} bytes of {tag_dtype(message.tag)} {way} rank {message.peer} "
        f"(channel {tag_channel(message.tag)}) on rank {rank}"
    )


def timeout_error(message: Message, rank: int, waited_s: float) -> CommTimeout:
    """Build the error of a wait that took too long."""
    return CommTimeout(
        f"rank {message.peer} must answer within {waited_s:.3g} s; got nothing for the "
        f"{describe(message, rank)}. Look at what rank {message.peer} does, or raise "
        f"comm.timeout_s."
    )


def lost_error(message: Message, rank: int, why: str) -> PeerLost:
    """Build the error of a wait for a peer that is gone."""
    return PeerLost(
        f"rank {message.peer} must take part until the job ends; {why} during the "
        f"{describe(message, rank)}. Its own message says why it ended."
    )


def length_error(message: Message, rank: int, received: int) -> MessageMismatch:
    """Build the error of a message that is longer or shorter than its buffer."""
    # Of a message that is too long, MPICH tells how much of it was taken, not its own length.
    got = "more" if received == message.nbytes else f"{received} bytes"
    return MessageMismatch(
        f"message from rank {message.peer} to rank {rank} must have {message.nbytes} bytes of "
        f"{tag_dtype(message.tag)}; got {got} on channel {tag_channel(message.tag)}. "
        f"Give both ranks the same shape and dtype."
    )


def stranger_error(message: Message, rank: int, tag: int, nbytes: int) -> MessageMismatch:
    """Build the error of a wait whose peer sent another dtype on the same channel."""
    return MessageMismatch(
        f"message from rank {message.peer} to rank {rank} must have dtype "
        f"{tag_dtype(message.tag)}; got {nbytes} bytes of {tag_dtype(tag)} on channel "
        f"{tag_channel(tag)}. Give both ranks the same shape and dtype."
    )


class MessageCounts:
    """Messages by (peer, tag), sent and received, so that a job's end can match them.

    `transport.close` cannot see a message that nobody received: some libraries hang at finalize,
    others lose it silently. `communicator.check_drained` compares both sides instead.
    """

    def __init__(self) -> None:
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()

    def add(self, message: Message, times: int = 1) -> None:
        """Count `times` completed transfers of `message`."""
        side = self.sent if message.is_send else self.received
        side[message.peer, message.tag] += times
