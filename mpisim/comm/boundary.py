"""Messages between pipeline stages: posted sends, blocking receives, exact counts.

Boundary b lies between stage b and stage b + 1: activations cross it forward, gradients backward,
each kind on a channel of its own, so neither is ever taken for the other and the messages of one
boundary and kind keep their order. What a message says is in its frame, which is not known here.
The engine calls this; `communicator` runs the collectives beside it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from mpisim.comm.communicator import Traffic
from mpisim.comm.programs import Program
from mpisim.comm.transport import MAX_CHANNEL, Message, Transport, length_error
from mpisim.errors import ConfigError
from mpisim.layouts.frames import KINDS
from mpisim.trace.recorder import Recorder

FIRST_CHANNEL = 16
"""Channel of the activations of boundary 0; those below are for groups and control."""

MAX_BOUNDARIES = (MAX_CHANNEL + 1 - FIRST_CHANNEL) // len(KINDS)
"""Boundaries that have channels of their own: one less than the most stages of a job."""


class Advancing(Protocol):
    """What a blocked wait keeps moving: a communicator, or the links of the boundaries."""

    advance: Callable[[], object]


class BoundarySend:
    """A send on its way, as `BoundaryLinks.send` hands it out."""

    __slots__ = ("kind", "message")

    def __init__(self, message: Message, kind: str) -> None:
        self.message: Message | None = message
        """None once it is complete, so that a handle keeps no buffer alive."""
        self.kind = kind


def boundary_channel(boundary: int, kind: str) -> int:
    """Return the channel of the messages of one kind across one boundary.

    Raises
    ------
    ConfigError
        No such boundary can have one: the tags of MPI end (`transport.MAX_TAG`).
    """
    if not 0 <= boundary < MAX_BOUNDARIES:
        raise ConfigError(
            f"boundary must be in 0..{MAX_BOUNDARIES - 1}; got {boundary}. Use at most "
            f"{MAX_BOUNDARIES + 1} stages."
        )
    if kind not in KINDS:
        raise ValueError(f"kind must be {' or '.join(KINDS)}; got {kind!r}. Name one of these.")
    return FIRST_CHANNEL + len(KINDS) * boundary + KINDS.index(kind)


class BoundaryLinks:
    """One rank's ends of all boundaries of its pipeline.

    Parameters
    ----------
    transport : Transport
    recorder : Recorder or None
        Whose clock measures the waits; None means `time.perf_counter`.
    neighbours : iterable of Advancing
        Communicators whose started collectives a blocked wait here keeps advancing. They may list
        this object as theirs in turn.

    Notes
    -----
    Both ends of a boundary send and receive its messages in the same order. No array is made
    here: a message travels between the two given buffers.
    """

    axis = "pp"
    """Names the links to `communicator.check_drained`, like a communicator's axis."""

    def __init__(
        self,
        transport: Transport,
        recorder: Recorder | None = None,
        neighbours: Iterable[Advancing] = (),
    ) -> None:
        self.transport = transport
        self.neighbours: list[Advancing] = list(neighbours)
        self.stall_s = {"recv": 0.0, "send": 0.0}
        """Seconds waited so far, by what was waited for."""
        self._clock = recorder.clock if recorder is not None else time.perf_counter
        self._polls = transport.polls_per_pause
        self._sends: list[BoundarySend] = []
        # More than the one waited for only after a failed step: the library may still write there.
        self._receives: list[Message] = []
        self._moved = {kind: [0, 0, 0, 0] for kind in KINDS}
        self._bytes_to: Counter[int] = Counter()

    # Messages ----------------------------------------------------------------------------

    def send(self, buffer: np.ndarray, peer: int, boundary: int, kind: str) -> BoundarySend:
        """Post a message and return at once.

        Parameters
        ----------
        buffer : ndarray of uint8, C-contiguous
            All of it is sent. It belongs to the message until `wait_send` has returned.
        peer : int
            World rank of the other side.
        boundary : int
        kind : str
            ``activation`` or ``grad``.

        Returns
        -------
        BoundarySend
            For `wait_send`.

        Raises
        ------
        ValueError
            The buffer cannot be sent in place, or no such peer, boundary or kind.
        """
        _check_bytes(buffer)
        # The sender goes on computing, so the receiver had better take the bytes by itself.
        message = self.transport.prepare_send(
            buffer, peer, boundary_channel(boundary, kind), one_copy=True
        )
        message.start()
        handle = BoundarySend(message, kind)
        self._sends.append(handle)
        return handle

    def wait_send(self, handle: BoundarySend) -> float:
        """Block until a posted message has left its buffer, and free it.

        Returns
        -------
        float
            Seconds waited.

        Raises
        ------
        CommTimeout, PeerLost
            See `mpisim.errors`. The buffer must then be left alone until the job ends.
        """
        message = handle.message
        if message is None:
            return 0.0
        began = self._clock()
        self._wait(message)
        self._complete(handle)
        return self._add_stall("send", began)

    def receive(self, buffer: np.ndarray, peer: int, boundary: int, kind: str) -> float:
        """Block until the next message of this boundary and kind fills `buffer`.

        Parameters
        ----------
        buffer : ndarray of uint8, C-contiguous, writeable
            Has exactly the length of the message.
        peer : int
            World rank of the other side.
        boundary : int
        kind : str
            ``activation`` or ``grad``.

        Returns
        -------
        float
            Seconds from posting the receive until the bytes were there.

        Raises
        ------
        MessageMismatch
            The message is longer or shorter, or of another dtype.
        CommTimeout, PeerLost
            See `mpisim.errors`.
        ValueError
            As for `send`.
        """
        _check_bytes(buffer)
        transport = self.transport
        message = transport.prepare_recv(
            buffer, peer, boundary_channel(boundary, kind), one_copy=True
        )
        began = self._clock()
        message.start()
        self._receives.append(message)
        self._wait(message)
        received = transport.received_bytes()
        self._receives.remove(message)
        message.free()
        if received != message.nbytes:
            raise length_error(message, transport.rank, received)
        self._count(message, kind)
        return self._add_stall("recv", began)

    def advance(self) -> None:
        """Move what was posted, without blocking; a communicator's blocked wait may call it."""
        for handle in tuple(self._sends):
            if self._test(handle.message):
                self._complete(handle)

    @property
    def idle(self) -> bool:
        """True when no message is on its way from or into a buffer of this rank."""
        return not self._sends and not self._receives

    # Accounting --------------------------------------------------------------------------

    def traffic(self) -> dict[str, Traffic]:
        """Return what this rank has moved so far, by kind; complete messages only."""
        return {kind: Traffic(*numbers) for kind, numbers in self._moved.items()}

    def bytes_sent_to(self) -> Counter[int]:
        """Return the bytes sent so far, by world rank of the receiver."""
        return Counter(self._bytes_to)

    def programs(self) -> list[Program]:
        """Return nothing: messages are counted in the transport (see `check_drained`)."""
        return []

    # The end -----------------------------------------------------------------------------

    def abandon(self) -> None:
        """Free what is complete after a failed step; what is not stays bound to its buffer.

        If it is `idle` afterwards, no buffer is in use any more. Else the job must end.
        """
        for handle in tuple(self._sends):
            # The step has failed already, and its own error says why.
            with contextlib.suppress(Exception):
                if self._test(handle.message):
                    self._complete(handle)
        for message in tuple(self._receives):
            with contextlib.suppress(Exception):
                if self._test(message):
                    self._receives.remove(message)
                    message.free()

    def close(self) -> None:
        """Free what is complete. Waits for nothing: an unfinished message shows in `idle`."""
        self.abandon()

    # Inside ------------------------------------------------------------------------------

    def _test(self, message: Message) -> bool:
        try:
            return message.test(self.transport.status)
        except Exception as error:
            # A receive that ends with an error has ended: nothing writes into its buffer any more.
            if message in self._receives:
                self._receives.remove(message)
                message.free()
            raise self.transport.translate(error, message) from error

    def _wait(self, message: Message) -> None:
        """Poll; every `polls_per_pause` polls advance the neighbours and let others run."""
        transport, polls = self.transport, self._polls
        since = time.monotonic()
        while True:
            for _ in range(polls):
                if self._test(message):
                    return
            for other in self.neighbours:
                other.advance()
            transport.pause(message, time.monotonic() - since)

    def _complete(self, handle: BoundarySend) -> None:
        message, handle.message = handle.message, None
        self._sends.remove(handle)
        self._count(message, handle.kind)
        message.free()

    def _count(self, message: Message, kind: str) -> None:
        self.transport.counts.add(message)
        numbers = self._moved[kind]
        side = 0 if message.is_send else 2
        numbers[side] += 1
        numbers[side + 1] += message.nbytes
        if message.is_send:
            self._bytes_to[message.peer] += message.nbytes

    def _add_stall(self, cause: str, began: float) -> float:
        waited_s = self._clock() - began
        self.stall_s[cause] += waited_s
        return waited_s


def _check_bytes(buffer: np.ndarray) -> None:
    # The rest is checked where the message is bound.
    if isinstance(buffer, np.ndarray) and buffer.dtype != np.uint8:
        raise ValueError(
            f"buffer of a boundary must be uint8; got {buffer.dtype}. Pass x.view(numpy.uint8)."
        )
