"""Ranks as threads of one process: the in-process twin of MPI, for fast tests and small demos.

Messages up to `eager_bytes` are copied when the send starts; longer ones complete only when the
receiver takes them straight from the sender's buffer, as MPI's rendezvous does. So a buffer that
is reused too early, or a blocking order that only small messages survive, fails here as well.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpisim.comm.transport import (
    Message,
    MessageCounts,
    checked_tag,
    length_error,
    lost_error,
    stranger_error,
    tag_channel,
    timeout_error,
)
from mpisim.errors import CommTimeout, PeerLost


class _Packet:
    """One message on its way."""

    __slots__ = ("data", "delivered")

    def __init__(self, data: np.ndarray | memoryview, delivered: bool) -> None:
        self.data: np.ndarray | memoryview | None = data
        self.delivered = delivered


class _World:
    """What the threads of one job share."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Appending to and popping from a deque are atomic, so the queues need no lock.
        self.queues: dict[tuple[int, int, int], deque[_Packet]] = defaultdict(deque)
        self.failed: dict[int, str] = {}
        self.left: set[int] = set()
        self.texts: list[str] = [""] * size
        self.gate = threading.Barrier(size)


@dataclass
class _Status:
    nbytes: int = 0


class LocalMessage:
    """A send or a receive between two threads."""

    __slots__ = ("_packet", "_transport", "_view", "is_send", "nbytes", "peer", "tag")

    def __init__(
        self, transport: LocalTransport, view: np.ndarray, is_send: bool, peer: int, tag: int
    ) -> None:
        self._transport = transport
        self._view: np.ndarray | None = view
        self.is_send, self.peer, self.tag, self.nbytes = is_send, peer, tag, view.nbytes
        self._packet: _Packet | None = None

    def start(self) -> None:
        """Post the message."""
        if not self.is_send:
            return
        transport = self._transport
        eager = self.nbytes <= transport.eager_bytes
        # A copy outside NumPy: what is on its way belongs to the network, not to a rank.
        data = memoryview(self._view.tobytes()) if eager else self._view
        self._packet = _Packet(data, eager)
        key = (transport.rank, self.peer, self.tag)
        transport.world.queues[key].append(self._packet)

    def test(self, status: _Status | None = None) -> bool:
        """Has it completed? A receive copies its bytes here."""
        if self.is_send:
            return self._packet is None or self._packet.delivered
        transport = self._transport
        queue = transport.world.queues[self.peer, transport.rank, self.tag]
        if not queue:
            return False
        packet = queue.popleft()
        received = packet.data.nbytes
        if received > self.nbytes:
            packet.delivered = True
            raise length_error(self, transport.rank, received)
        self._view[:received] = packet.data
        # Before the sender hears of it: it may free the buffer at once and count its memory.
        packet.data = None
        packet.delivered = True
        if status is not None:
            status.nbytes = received
        return True

    def free(self) -> None:
        """Let go of the buffer; whoever still holds the message must not keep it alive."""
        self._view = self._packet = None


class LocalTransport:
    """One thread's end of the job (see `Transport`).

    Parameters
    ----------
    world : _World
        Shared by all threads of the job.
    rank : int
    timeout_s : float
        Longest wait for one message, seconds.
    eager_bytes : int
        Longest message that a send copies instead of lending its buffer; -1 lends even an empty
        one, which makes every send synchronous.
    """

    # A thread that polls holds the interpreter lock: every failed poll must let go of it.
    polls_per_pause = 1

    def __init__(self, world: _World, rank: int, timeout_s: float, eager_bytes: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.timeout_s, self.eager_bytes = timeout_s, eager_bytes
        self.status = _Status()
        self.counts = MessageCounts()
        self.library = "threads of one process"
        self._suspect: Message | None = None
        self._left_behind: Message | None = None

    def received_bytes(self) -> int:
        """Bytes of the last receive that completed."""
        return self.status.nbytes

    def prepare_send(
        self, buffer: np.ndarray, dest: int, channel: int, one_copy: bool = False
    ) -> LocalMessage:
        """Bind a send."""
        tag = checked_tag(buffer, dest, self.size, channel, receive=False)
        return LocalMessage(self, buffer.reshape(-1).view(np.uint8), True, dest, tag)

    def prepare_recv(
        self, buffer: np.ndarray, source: int, channel: int, one_copy: bool = False
    ) -> LocalMessage:
        """Bind a receive."""
        tag = checked_tag(buffer, source, self.size, channel, receive=True)
        return LocalMessage(self, buffer.reshape(-1).view(np.uint8), False, source, tag)

    def pause(self, pending: Message, waited_s: float) -> None:
        """Let other threads run; raise when waiting is in vain (see `Transport`)."""
        time.sleep(0 if waited_s < 0.001 else 0.0002)
        world = self.world
        if world.failed:
            raise lost_error(pending, self.rank, f"rank {next(iter(world.failed))} failed")
        if waited_s > 0.05:
            if pending.peer in world.left:
                # Its last message may have come since the last poll: one more decides.
                if self._left_behind is pending:
                    raise lost_error(pending, self.rank, "it left")
                self._left_behind = pending
                return
            if not pending.is_send:
                self._look_for_stranger(pending)
        if waited_s > self.timeout_s:
            raise timeout_error(pending, self.rank, waited_s)

    def _look_for_stranger(self, pending: Message) -> None:
        for (source, dest, tag), queue in list(self.world.queues.items()):
            if (source, dest) != (pending.peer, self.rank) or not queue or tag == pending.tag:
                continue
            if tag_channel(tag) == tag_channel(pending.tag):
                # The expected message may have come between the last poll and this look; messages
                # of a pair keep their order, so one more poll decides.
                if self._suspect is not pending:
                    self._suspect = pending
                    return
                raise stranger_error(pending, self.rank, tag, queue[0].data.nbytes)
        self._suspect = None

    def translate(self, error: Exception, pending: Message | None) -> Exception:
        """Errors are already ours."""
        return error

    def exchange(self, text: str) -> list[str]:
        """Collect one text per rank."""
        self.world.texts[self.rank] = text
        self.barrier()
        texts = list(self.world.texts)
        self.barrier()
        return texts

    def barrier(self) -> None:
        """Wait for all threads."""
        try:
            self.world.gate.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            if self.world.failed:
                raise PeerLost(
                    f"all ranks must reach the barrier; got a failure on rank "
                    f"{next(iter(self.world.failed))}. Its own message says why."
                ) from None
            raise CommTimeout(
                f"all ranks must reach the barrier within {self.timeout_s:.3g} s; got rank "
                f"{self.rank} waiting alone. Look for a rank that ended or hangs."
            ) from None

    def abort(self, code: int) -> None:
        """Make every other rank's next wait fail."""
        self.world.failed.setdefault(self.rank, f"status {code}")
        self.world.gate.abort()

    def close(self) -> None:
        """Nothing to release."""


@dataclass
class LocalJob:
    """What `run_threads` hands back."""

    results: list[Any]
    """The return value of each rank; None where it raised."""
    errors: dict[int, BaseException] = field(default_factory=dict)
    """What each failed rank raised, the first failure first."""


def run_threads(
    body: Callable[[LocalTransport], Any],
    size: int,
    *,
    timeout_s: float = 20.0,
    synchronous: bool = False,
    eager_bytes: int = 4096,
) -> LocalJob:
    """Run `body(transport)` on `size` threads and wait for all of them.

    Parameters
    ----------
    body : callable
        What each rank does. An exception ends the other ranks at their next wait (`PeerLost`).
    size : int
        Number of ranks, >= 1.
    timeout_s : float
        Longest wait for one message, seconds.
    synchronous : bool
        A send completes only when it is received.
    eager_bytes : int
        Longest message that a send copies (ignored when synchronous).

    Returns
    -------
    LocalJob
        Results by rank and errors, root cause first.
    """
    world = _World(size)
    job = LocalJob([None] * size)

    def rank_main(rank: int) -> None:
        transport = LocalTransport(world, rank, timeout_s, -1 if synchronous else eager_bytes)
        try:
            job.results[rank] = body(transport)
        except BaseException as error:  # also SystemExit: a rank that leaves strands the others
            job.errors[rank] = error
            transport.abort(1)
        finally:
            world.left.add(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return job
