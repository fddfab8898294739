"""A transport that wraps another one and does to chosen messages what networks and bugs do.

Tests wrap `local.LocalTransport` or `mpi.MpiTransport` in it to show that every fault is noticed
and named by the layer above. Without faults it must behave as what it wraps: the same contract
suite runs on it. A fault names its message by number, so that a run can be repeated exactly.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from mpisim.comm.transport import Message, Transport, describe, tag_channel
from mpisim.errors import CommError

Side = Literal["send", "recv"]

_POISON = 0xA5


class InjectedError(CommError):
    """The failure that the fault `Raise` makes up."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Which message something happens to; the subclasses say what."""

    sides: ClassVar[tuple[Side, ...]] = ("send",)
    """Sides on which this kind of fault can happen."""
    rank: int
    """World rank whose message it is."""
    number: int
    """Messages of the same side that the rank has started before it."""
    side: Side = "send"

    def __post_init__(self) -> None:
        if self.side not in self.sides:
            raise ValueError(
                f"{type(self).__name__}.side must be {' or '.join(self.sides)}; got "
                f"{self.side!r}. Choose another fault."
            )


@dataclass(frozen=True, kw_only=True)
class Delay(Fault):
    """The message starts `seconds` later than its rank asks; later ones of its pair queue up."""

    sides: ClassVar[tuple[Side, ...]] = ("send", "recv")
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Raise(Fault):
    """Starting the message raises `InjectedError`."""

    sides: ClassVar[tuple[Side, ...]] = ("send", "recv")


@dataclass(frozen=True, kw_only=True)
class Drop(Fault):
    """The message is lost; its sender sees it complete."""


@dataclass(frozen=True, kw_only=True)
class Short(Fault):
    """The message lacks its last `elements` elements (all of them if it has fewer)."""

    elements: int = 1


@dataclass(frozen=True, kw_only=True)
class WrongDtype(Fault):
    """The same bytes travel as `dtype`, which must divide the message's length."""

    dtype: str


@dataclass(frozen=True, kw_only=True)
class FlipBit(Fault):
    """One bit of the message arrives flipped: bit ``bit % 8`` of byte ``bit // 8``."""

    bit: int = 0


class FaultyMessage:
    """A send or a receive to which faults may happen (see `Message`)."""

    __slots__ = (
        "_active", "_bound", "_buffer", "_carrier", "_checksum", "_due_s", "_extras", "_freed",
        "_transport", "is_send", "nbytes", "peer", "one_copy", "tag",
    )  # fmt: skip

    def __init__(
        self,
        transport: FaultyTransport,
        bound: Message,
        buffer: np.ndarray,
        one_copy: bool,
    ) -> None:
        self._transport, self._bound, self._buffer = transport, bound, buffer.reshape(-1)
        self.is_send, self.peer, self.tag = bound.is_send, bound.peer, bound.tag
        self.nbytes, self.one_copy = bound.nbytes, one_copy
        self._carrier: Message | None = bound
        """What moves the bytes of this run; None when they are lost."""
        self._extras: list[Message] = []
        self._due_s: float | None = None
        self._active = self._freed = False
        self._checksum = 0

    def start(self) -> None:
        """Post it, as the faults that fall on it allow."""
        transport = self._transport
        if transport.strict and self._freed:
            raise CommError(
                f"a message must not be started once it was freed; got a start of the "
                f"{describe(self, transport.rank)}. Bind a new one."
            )
        if transport.strict and self._active:
            raise CommError(
                f"a message must complete before it is started again; got a second start of the "
                f"{describe(self, transport.rank)}. Wait for it first."
            )
        self._active = True
        self._carrier, self._due_s = self._bound, None
        faults = transport._next(self)
        if transport.strict:
            transport._claim(self)
            if self.is_send:
                self._checksum = zlib.crc32(self._buffer.view(np.uint8))
            else:
                self._buffer.view(np.uint8)[:] = _POISON
        for fault in faults:
            if isinstance(fault, Raise):
                self._active = False
                transport._active.discard(self)
                raise InjectedError(
                    f"rank {transport.rank} must fail here; got {fault} at the "
                    f"{describe(self, transport.rank)}. Remove the fault."
                )
            if isinstance(fault, Delay):
                self._due_s = time.monotonic() + fault.seconds
            elif isinstance(fault, Drop):
                self._carrier = None
            else:
                self._carrier = self._altered(fault)
        transport._post(self)

    def _altered(self, fault: Fault) -> Message:
        flat = self._buffer
        if isinstance(fault, Short):
            flat = flat[: max(0, flat.size - fault.elements)]
        elif isinstance(fault, WrongDtype):
            flat = flat.view(np.dtype(fault.dtype))
        else:
            flat = flat.copy()
            flat.view(np.uint8)[fault.bit // 8] ^= np.uint8(1 << fault.bit % 8)
        inner, channel = self._transport.inner, tag_channel(self.tag)
        self._extras.append(inner.prepare_send(flat, self.peer, channel, self.one_copy))
        return self._extras[-1]

    def test(self, status: Any = None) -> bool:
        """Has it completed? Messages that were held up start here when their time has come."""
        transport = self._transport
        transport._release()
        if self._due_s is not None:
            return False
        if transport.strict and not self._active and not self.is_send:
            raise CommError(
                f"a message must be started before it is waited for; got a test of the "
                f"{describe(self, transport.rank)}. Start it first."
            )
        if self._carrier is not None and not self._carrier.test(status):
            return False
        if transport.strict and self._active and self.is_send:
            if zlib.crc32(self._buffer.view(np.uint8)) != self._checksum:
                raise CommError(
                    f"a buffer must not change until its message is complete; got other bytes at "
                    f"the end of the {describe(self, transport.rank)}. Wait before reusing it."
                )
        self._active = False
        transport._active.discard(self)
        return True

    def free(self) -> None:
        """Free what the wrapped transport made."""
        self._freed = True
        for message in (self._bound, *self._extras):
            message.free()


class FaultyTransport:
    """Any transport, with faults (see `Transport`).

    Parameters
    ----------
    inner : Transport
        What moves the bytes.
    faults : iterable of Fault
        What happens; faults of other ranks are left out, so that all ranks can pass the same.
    strict : bool
        Also overwrite a receive buffer when its receive is started, and raise `CommError` when a
        send buffer changes in flight, memory that one message writes is lent to another, a
        message is started twice or after it was freed, or a receive is waited for that was not
        started. What only works because messages happen to be quick or late fails under it.
    """

    def __init__(
        self, inner: Transport, faults: Iterable[Fault] = (), *, strict: bool = False
    ) -> None:
        self.inner, self.strict = inner, strict
        self.faults = tuple(fault for fault in faults if fault.rank == inner.rank)
        self.started: dict[Side, int] = {"send": 0, "recv": 0}
        """Messages started so far."""
        self.started_bytes: dict[Side, int] = {"send": 0, "recv": 0}
        self._late: list[FaultyMessage] = []
        self._active: set[FaultyMessage] = set()
        # Read at every poll: bound once, as the wrapped transport does.
        self.status: Any = inner.status
        self.received_bytes: Callable[[], int] = inner.received_bytes

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
        """Longest wait for one message, seconds."""
        return self.inner.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.inner.timeout_s = seconds

    @property
    def polls_per_pause(self) -> int:
        """How often a blocked wait polls before it calls `pause`."""
        return self.inner.polls_per_pause

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
    ) -> FaultyMessage:
        """Bind a send."""
        bound = self.inner.prepare_send(buffer, dest, channel, one_copy)
        return FaultyMessage(self, bound, buffer, one_copy)

    def prepare_recv(
        self, buffer: np.ndarray, source: int, channel: int, one_copy: bool = False
    ) -> FaultyMessage:
        """Bind a receive."""
        bound = self.inner.prepare_recv(buffer, source, channel, one_copy)
        return FaultyMessage(self, bound, buffer, one_copy)

    def pause(self, pending: FaultyMessage, waited_s: float) -> None:
        """Yield the core; raise when waiting is in vain."""
        self._release()
        if pending._due_s is not None and waited_s <= self.timeout_s:
            waited_s = 0.0  # nothing was asked of the peer yet
        self.inner.pause(pending._carrier or pending._bound, waited_s)

    def translate(self, error: Exception, pending: FaultyMessage | None) -> Exception:
        """Turn an error of a library into one of ours."""
        return self.inner.translate(error, pending._bound if pending is not None else None)

    def exchange(self, text: str) -> list[str]:
        """Collect one text per rank; faults do not touch it."""
        self._release_all()
        return self.inner.exchange(text)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._release_all()
        self.inner.barrier()

    def abort(self, code: int) -> None:
        """End the job."""
        self.inner.abort(code)

    def close(self) -> None:
        """Release what the wrapped transport holds."""
        self.inner.close()

    def _claim(self, message: FaultyMessage) -> None:
        """Refuse memory that a message in flight writes, or that this one would write."""
        for other in self._active:
            if message.is_send and other.is_send:
                continue
            if np.may_share_memory(message._buffer, other._buffer):
                raise CommError(
                    f"a buffer must belong to one message at a time; got a start of the "
                    f"{describe(message, self.rank)} during the {describe(other, self.rank)}. "
                    f"Wait for that first."
                )
        self._active.add(message)

    def _next(self, message: FaultyMessage) -> list[Fault]:
        """Count a start and return the faults that fall on it."""
        side: Side = "send" if message.is_send else "recv"
        number = self.started[side]
        self.started[side] += 1
        self.started_bytes[side] += message.nbytes
        return [f for f in self.faults if (f.side, f.number) == (side, number)]

    def _post(self, message: FaultyMessage) -> None:
        """Start the carrier now, or once its time and that of those before it has come."""
        key = (message.is_send, message.peer, message.tag)
        for late in self._late:
            if (late.is_send, late.peer, late.tag) == key:
                # Messages of a pair and tag never overtake each other.
                message._due_s = max(message._due_s or 0.0, late._due_s)
        if message._due_s is not None:
            self._late.append(message)
        elif message._carrier is not None:
            message._carrier.start()

    def _release(self) -> None:
        if not self._late:
            return
        now = time.monotonic()
        late, self._late = self._late, []
        for message in late:
            if message._due_s > now:
                self._late.append(message)
                continue
            message._due_s = None
            if message._carrier is not None:
                message._carrier.start()

    def _release_all(self) -> None:
        """Wait until nothing is held up: a small send that nobody waits for may still be."""
        deadline = time.monotonic() + self.timeout_s
        while self._late and time.monotonic() < deadline:
            due_s = min(deadline, *(message._due_s for message in self._late))
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._release()
