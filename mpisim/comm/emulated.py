"""A transport that wraps another one and gives it links of a chosen latency and rate.

Every byte still travels, as a message of the same length, tag and order. The sending side takes a
copy and starts the real message when the last byte could have arrived over a link of its own to
that rank; so eight ranks on two cores see the messages of eight machines. Compute that is emulated
as well sleeps here (`EmulatedTransport.sleep`), because held messages must start meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mpisim.comm.transport import Message, Transport, checked_tag
from mpisim.errors import CommError

SLICE_S = 0.0005
"""Longest nap while something may want to be moved, seconds."""

PAUSE_S = 0.0001
"""Nap of a blocked wait between two rounds of polls, seconds."""

CLOSE_S = 1.0
"""Longest wait of `close` for messages that were started and nobody has taken yet, seconds."""


class _Flight:
    """One started send: a copy of its bytes on the wire, and the real message that carries it."""

    __slots__ = ("arrives_s", "carrier", "done", "leaves_s", "started")

    def __init__(self, carrier: Message, leaves_s: float, arrives_s: float) -> None:
        self.carrier, self.leaves_s, self.arrives_s = carrier, leaves_s, arrives_s
        self.started = self.done = False


class _Link:
    """The way from this rank to another one."""

    __slots__ = ("flying", "free_s", "held")

    def __init__(self) -> None:
        self.free_s = 0.0
        """When the last byte accepted so far will have left."""
        # A link is first in, first out, so messages of a pair keep their order over all tags.
        self.held: deque[_Flight] = deque()
        self.flying: deque[_Flight] = deque()


class EmulatedSend:
    """A send over an emulated link (see `Message`)."""

    __slots__ = (
        "_bytes", "_channel", "_dtype", "_flight", "_transport", "is_send", "nbytes", "one_copy",
        "peer", "tag",
    )  # fmt: skip

    def __init__(
        self,
        transport: EmulatedTransport,
        buffer: np.ndarray,
        dest: int,
        channel: int,
        one_copy: bool,
    ) -> None:
        self.tag = checked_tag(buffer, dest, transport.size, channel, receive=False)
        self.is_send, self.peer, self.nbytes, self.one_copy = True, dest, buffer.nbytes, one_copy
        self._transport, self._channel, self._dtype = transport, channel, buffer.dtype
        self._bytes: np.ndarray | None = buffer.reshape(-1).view(np.uint8)
        self._flight: _Flight | None = None

    def start(self) -> None:
        """Copy the bytes onto the wire and give the link its times."""
        transport = self._transport
        # A copy outside NumPy: what is on its way belongs to the network, not to a rank.
        data = bytearray(self._bytes)
        wire = np.ndarray(len(data) // self._dtype.itemsize, self._dtype, data)
        carrier = transport.inner.prepare_send(wire, self.peer, self._channel, self.one_copy)
        self._flight = transport._accept(carrier)
        transport.progress()

    def test(self, status: Any = None) -> bool:
        """Say whether the bytes have left, or, when synchronous, been taken."""
        transport = self._transport
        transport.progress()
        flight = self._flight
        if flight is None:
            return True
        if transport.synchronous:
            return transport._landed(flight)
        return transport._clock() >= flight.leaves_s

    def free(self) -> None:
        """Let go of the buffer; copies that are still on their way go on by themselves."""
        self._bytes = self._flight = None


class EmulatedRecv:
    """A receive: as the wrapped transport makes it, but polling it also starts what is due."""

    __slots__ = ("_bound", "_transport", "is_send", "nbytes", "peer", "tag")

    def __init__(self, transport: EmulatedTransport, bound: Message) -> None:
        self._transport, self._bound = transport, bound
        self.is_send, self.peer, self.tag = False, bound.peer, bound.tag
        self.nbytes = bound.nbytes

    def start(self) -> None:
        """Post it."""
        self._bound.start()

    def test(self, status: Any = None) -> bool:
        """Say whether the bytes have arrived."""
        self._transport.progress()
        return self._bound.test(status)

    def free(self) -> None:
        """Let go of the buffer."""
        self._bound.free()


class EmulatedTransport:
    """Any transport, over links of a latency and a rate (see `Transport`).

    Parameters
    ----------
    inner : Transport
        What moves the bytes.
    latency_s : float
        Time from the moment a byte leaves until it arrives, seconds.
    bytes_per_s : float
        Rate at which bytes leave; 0 means at once.
    synchronous : bool
        A send completes when the wrapped transport's does, instead of when its bytes have left.
    clock, nap : callable
        Seconds on a clock that never goes back, and a sleep on it; tests pass their own.

    Notes
    -----
    There is one link from this rank to every other; messages on one follow each other:

        leaves  = max(start, leaves of the one before) + nbytes / bytes_per_s
        arrives = leaves + latency_s

    The real message is started by whoever uses this transport first after `arrives`: a poll, a
    pause, `sleep`, `progress`, or one of `exchange`, `barrier` and `close`. Unless `synchronous`,
    a send of any length completes although nobody receives it, as if links had endless memory.
    The copies live outside NumPy, from the start of a message until it has been taken.
    """

    def __init__(
        self,
        inner: Transport,
        latency_s: float = 0.0,
        bytes_per_s: float = 0.0,
        *,
        synchronous: bool = False,
        clock: Callable[[], float] = time.monotonic,
        nap: Callable[[float], None] = time.sleep,
    ) -> None:
        for name, value in (("latency_s", latency_s), ("bytes_per_s", bytes_per_s)):
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0; got {value}.")
        self.inner, self.synchronous = inner, synchronous
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.polls_per_pause = min(4, inner.polls_per_pause)
        # Read at every poll: bound once, as the wrapped transport does.
        self.status: Any = inner.status
        self.received_bytes: Callable[[], int] = inner.received_bytes
        self._clock, self._nap = clock, nap
        self._links: dict[int, _Link] = {}

    @property
    def rank(self) -> int:
        """World rank."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self.inner.size

    @property
    def timeout_s(self) -> float:
        """Longest wait for one message, seconds; the time on the link counts for its receiver."""
        return self.inner.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.inner.timeout_s = seconds

    @property
    def counts(self) -> Any:
        """Messages by peer and tag, for `check_drained`."""
        return self.inner.counts

    @property
    def library(self) -> str:
        """Name of what moves the bytes."""
        return self.inner.library

    def prepare_send(
        self, buffer: np.ndarray, dest: int, channel: int, one_copy: bool = False
    ) -> EmulatedSend:
        """Bind a send."""
        return EmulatedSend(self, buffer, dest, channel, one_copy)

    def prepare_recv(
        self, buffer: np.ndarray, source: int, channel: int, one_copy: bool = False
    ) -> EmulatedRecv:
        """Bind a receive."""
        return EmulatedRecv(self, self.inner.prepare_recv(buffer, source, channel, one_copy))

    def pause(self, pending: EmulatedSend | EmulatedRecv, waited_s: float) -> None:
        """Give the core away for a moment; raise when waiting is in vain."""
        self.progress()
        flight = pending._flight if pending.is_send else None
        now, due_s = self._clock(), self._next_due()
        if flight is not None and not flight.started:
            due_s = min(due_s, flight.leaves_s)
            waited_s = 0.0  # nothing was asked of the peer yet
        elif flight is not None:
            waited_s = min(waited_s, now - flight.arrives_s)
        self._nap(min(PAUSE_S, max(0.0, due_s - now)))
        self.inner.pause(self._inside(pending), waited_s)

    def sleep(self, seconds: float, between: Callable[[], object] | None = None) -> None:
        """Sleep as long as emulated compute takes, and keep messages moving meanwhile.

        Parameters
        ----------
        seconds : float
            From now until the call returns, whatever `between` takes of it.
        between : callable, optional
            Called again and again, at least every `SLICE_S` unless it takes longer itself:
            advances started collectives.
        """
        deadline = self._clock() + seconds
        while True:
            self.progress()
            if between is not None:
                between()
            now = self._clock()
            if now >= deadline:
                return
            until = min(deadline, self._next_due())
            if between is not None or any(link.flying for link in self._links.values()):
                until = min(until, now + SLICE_S)
            self._nap(max(0.0, until - now))

    def progress(self) -> None:
        """Start every held message whose time has come, and free those that were taken."""
        for link in self._links.values():
            held, flying = link.held, link.flying
            if held:
                now = self._clock()
                while held and held[0].arrives_s <= now:
                    self._release(link)
            # The oldest tells enough: its link keeps the order, and polls are not free.
            while flying and self._landed(flying[0]):
                flying.popleft()

    def flush(self) -> None:
        """Wait until no message is held any more: nobody may be left to poll for it."""
        while (due_s := self._next_due()) < float("inf"):
            self._nap(max(0.0, due_s - self._clock()))
            self.progress()

    def translate(self, error: Exception, pending: Message | None) -> Exception:
        """Turn an error of a library into one of ours."""
        return self.inner.translate(error, self._inside(pending))

    def exchange(self, text: str) -> list[str]:
        """Collect one text per rank; links are not emulated for it."""
        self.flush()
        return self.inner.exchange(text)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.flush()
        self.inner.barrier()

    def abort(self, code: int) -> None:
        """End the job."""
        self.inner.abort(code)

    def close(self) -> None:
        """Send what is held, free what is taken within `CLOSE_S`, and close what is wrapped."""
        # At a regular end everybody has met at a barrier, and nothing is held. After a failure
        # the rest goes out as well as it can: the error to be seen is the first one.
        with contextlib.suppress(CommError):
            for link in self._links.values():
                while link.held:
                    self._release(link)
            since = self._clock()
            while (left := self._oldest_flying()) is not None:
                waited_s = self._clock() - since
                if waited_s > CLOSE_S:
                    break
                self._nap(PAUSE_S)
                self.inner.pause(left.carrier, waited_s)
                self.progress()
        self.inner.close()

    # Inside ------------------------------------------------------------------------------

    def _accept(self, carrier: Message) -> _Flight:
        link = self._links.get(carrier.peer)
        if link is None:
            link = self._links[carrier.peer] = _Link()
        seconds = carrier.nbytes / self.bytes_per_s if self.bytes_per_s else 0.0
        link.free_s = max(self._clock(), link.free_s) + seconds
        flight = _Flight(carrier, link.free_s, link.free_s + self.latency_s)
        link.held.append(flight)
        return flight

    def _release(self, link: _Link) -> None:
        flight = link.held.popleft()
        flight.started = True
        link.flying.append(flight)
        try:
            flight.carrier.start()
        except Exception as error:
            # It never left: nobody can wait for it.
            link.flying.pop()
            raise self.inner.translate(error, flight.carrier) from error

    def _landed(self, flight: _Flight) -> bool:
        if flight.started and not flight.done:
            try:
                flight.done = flight.carrier.test()
            except Exception as error:
                raise self.inner.translate(error, flight.carrier) from error
            if flight.done:
                flight.carrier.free()
        return flight.done

    def _next_due(self) -> float:
        return min(
            (link.held[0].arrives_s for link in self._links.values() if link.held),
            default=float("inf"),
        )

    def _oldest_flying(self) -> _Flight | None:
        self.progress()
        return next((link.flying[0] for link in self._links.values() if link.flying), None)

    def _inside(self, pending: Any) -> Any:
        """Return what the wrapped transport knows a message by."""
        if isinstance(pending, EmulatedRecv):
            return pending._bound
        if isinstance(pending, EmulatedSend) and pending._flight is not None:
            return pending._flight.carrier
        return pending
