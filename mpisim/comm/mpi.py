"""Ranks as MPI processes: the only module that imports mpi4py. Importing it starts MPI.

Persistent requests over upper-case buffer calls; waits poll (`Test`) and yield, so a wait can
raise, time out, and run signal handlers. The library's collectives are used for the barrier and
the control texts of job start and end, and as the baseline of `mpisim bench`, nothing else.
"""

from __future__ import annotations

import os
import time

import mpi4py
import numpy as np

# One thread per rank calls MPI, and Open MPI is faster when it knows. MPICH gives the core away
# while it waits only where it expects more threads: without, a message between ranks that share a
# core takes a time slice, 8 ms instead of 30 us. Open MPI's launcher says which of them it is.
mpi4py.rc.thread_level = "funneled" if "OMPI_COMM_WORLD_SIZE" in os.environ else "multiple"

from mpi4py import MPI  # noqa: E402

from mpisim.comm.transport import (  # noqa: E402
    MAX_TAG,
    Message,
    MessageCounts,
    channel_tags,
    checked_tag,
    length_error,
    lost_error,
    stranger_error,
    tag_channel,
    timeout_error,
)
from mpisim.errors import CommTimeout, ConfigError  # noqa: E402

# Open MPI moves a message above its eager limit by reading the sender's memory through the kernel
# (CMA), which pins every page. Up to about 2 MiB a copy through shared memory is faster: 32 KiB
# exchanged both ways takes 4.3 us instead of 6.4, 512 KiB 47 instead of 55. The library takes that
# way for data that is not contiguous, so messages in this range are described as two blocks, the
# last 64 bytes first. Both ends describe them alike; the bytes and their places are the same.
# The copy needs both ranks inside MPI: messages beside compute, and segments of buffers that no
# cache holds, are better off with the single copy (`one_copy`).
_COPIED_FROM, _COPIED_TO = 4000, 2 << 20
_TAIL = 64


def _yield_core() -> None:
    """Let another rank of this core run."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


class MpiMessage:
    """A persistent MPI send or receive."""

    __slots__ = ("_request", "is_send", "nbytes", "peer", "start", "tag", "test")

    def __init__(self, request: MPI.Prequest, is_send: bool, peer: int, tag: int, nbytes: int):
        self._request = request
        self.is_send, self.peer, self.tag, self.nbytes = is_send, peer, tag, nbytes
        self.start = request.Start
        self.test = request.Test

    def free(self) -> None:
        """Free the request. It must not be active.

        Whoever still holds the message must not keep the buffer alive.
        """
        self._request.Free()
        self._request = self.start = self.test = None


class MpiTransport:
    """The end of the job that this process holds.

    Parameters
    ----------
    timeout_s : float
        Longest wait for one message, seconds.
    synchronous : bool
        Use synchronous sends (`Ssend_init`): a send completes only when its receive has started.
    """

    def __init__(self, *, timeout_s: float = 60.0, synchronous: bool = False) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.timeout_s = timeout_s
        self._init_send = self._comm.Ssend_init if synchronous else self._comm.Send_init
        self.status = MPI.Status()
        self.received_bytes = self.status.Get_count
        self.counts = MessageCounts()
        self._suspect: Message | None = None
        self._copies = "Open MPI" in self.library
        # Open MPI's test gives the core away by itself where ranks share one; MPICH's does not.
        self.polls_per_pause = 1000 if self._copies else 4
        self._types: dict[int, MPI.Datatype] = {}

    def prepare_send(
        self, buffer: np.ndarray, dest: int, channel: int, one_copy: bool = False
    ) -> MpiMessage:
        """Bind a persistent send (see `Transport`)."""
        tag = checked_tag(buffer, dest, self.size, channel, receive=False)
        request = self._init_send(self._describe(buffer, one_copy), dest, tag)
        return MpiMessage(request, True, dest, tag, buffer.nbytes)

    def prepare_recv(
        self, buffer: np.ndarray, source: int, channel: int, one_copy: bool = False
    ) -> MpiMessage:
        """Bind a persistent receive (see `Transport`)."""
        tag = checked_tag(buffer, source, self.size, channel, receive=True)
        request = self._comm.Recv_init(self._describe(buffer, one_copy), source, tag)
        return MpiMessage(request, False, source, tag, buffer.nbytes)

    def _describe(self, buffer: np.ndarray, one_copy: bool) -> list:
        # MPI knows no bfloat16, and float16 only in some builds: everything travels as raw bytes.
        flat, nbytes = buffer.reshape(-1).view(np.uint8), buffer.nbytes
        if one_copy or not self._copies or not _COPIED_FROM < nbytes <= _COPIED_TO:
            return [flat, MPI.BYTE]
        kind = self._types.get(nbytes)
        if kind is None:
            head = nbytes - _TAIL
            kind = MPI.BYTE.Create_hindexed([_TAIL, head], [head, 0]).Commit()
            self._types[nbytes] = kind
        return [flat, 1, kind]

    def pause(self, pending: Message, waited_s: float) -> None:
        """Yield the core; look for a message that can never match (see `Transport`)."""
        _yield_core()
        if waited_s > 0.05 and not pending.is_send:
            self._look_for_stranger(pending)
        if waited_s > self.timeout_s:
            raise timeout_error(pending, self.rank, waited_s)

    def _look_for_stranger(self, pending: Message) -> None:
        status = MPI.Status()
        # A probe for any tag would show the oldest message only, perhaps of another channel.
        for tag in channel_tags(tag_channel(pending.tag)):
            if tag == pending.tag or not self._comm.Iprobe(pending.peer, tag, status):
                continue
            # Messages of a pair keep their order: if the expected one was sent, the polls
            # between two looks have completed it.
            if self._suspect is not pending:
                self._suspect = pending
                return
            raise stranger_error(pending, self.rank, tag, status.Get_count())
        self._suspect = None

    def translate(self, error: Exception, pending: Message | None) -> Exception:
        """Turn an MPI error into one of ours where it has a name of ours."""
        if isinstance(error, MPI.Exception) and pending is not None:
            kind = error.Get_error_class()
            if kind == MPI.ERR_TRUNCATE:
                return length_error(pending, self.rank, self.received_bytes())
            text = error.Get_error_string().upper()
            # MPICH copies straight from the peer's memory, which is gone with it.
            if "PROC_FAILED" in text or "PROCESS_VM_READV" in text:
                return lost_error(pending, self.rank, "it failed")
        return error

    def exchange(self, text: str) -> list[str]:
        """Collect one text per rank through the library's all-gather of raw bytes."""
        mine = np.frombuffer(text.encode(), dtype=np.uint8)
        lengths = np.empty(self.size, dtype=np.int64)
        self._comm.Allgather(np.array([mine.size], dtype=np.int64), lengths)
        everyone = np.empty(int(lengths.sum()), dtype=np.uint8)
        self._comm.Allgatherv(mine, [everyone, lengths.tolist()])
        ends = np.cumsum(lengths)
        return [
            everyone[end - length : end].tobytes().decode()
            for end, length in zip(ends, lengths, strict=True)
        ]

    def barrier(self) -> None:
        """Wait for all ranks (see `Transport`)."""
        request = self._comm.Ibarrier()
        deadline = time.monotonic() + self.timeout_s
        while not request.Test():
            _yield_core()
            if time.monotonic() > deadline:
                raise CommTimeout(
                    f"all ranks must reach the barrier within {self.timeout_s:.3g} s; got rank "
                    f"{self.rank} waiting alone. Look for a rank that ended or hangs."
                )

    def abort(self, code: int) -> None:
        """End every rank of the job with status `code`; does not return."""
        MPI.COMM_WORLD.Abort(code)

    def close(self) -> None:
        """Free the private communicator and datatypes."""
        for kind in self._types.values():
            kind.Free()
        self._types.clear()
        self._comm.Free()

    @property
    def library(self) -> str:
        """Name and version of the MPI library, one line."""
        first = MPI.Get_library_version().split("\n")[0].split(",")[0]
        return " ".join(first.replace("\0", "").replace("Version:", "").split())

    @property
    def raw(self) -> MPI.Comm:
        """The mpi4py communicator, for the baselines of `mpisim bench`."""
        return self._comm


def connect(*, timeout_s: float = 60.0, synchronous: bool = False) -> MpiTransport:
    """Return this process's transport.

    Raises
    ------
    ConfigError
        The library cannot carry our tags.
    """
    limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    if limit is not None and limit < MAX_TAG:
        raise ConfigError(
            f"the MPI library must carry tags up to {MAX_TAG}; got a limit of {limit}. Use "
            f"another MPI."
        )
    return MpiTransport(timeout_s=timeout_s, synchronous=synchronous)
