"""One time axis: how far this rank's clock is from rank 0's.

Ranks of one host read the same clock. Across hosts each rank exchanges a few small messages with
rank 0 and keeps the sample with the shortest round trip (Cristian 1989); its error is at most half
of that round trip.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

import numpy as np

from mpisim.comm.transport import Message, Transport

CLOCK_CHANNEL = 0
_SAMPLES = 20


def host_name() -> str:
    """Return the name of this host, as the run record and error texts show it."""
    return socket.gethostname()


def _clock_domain() -> str:
    """Name what shares a monotonic clock: a host since its last start."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return json.dumps([host_name(), boot])


def clock_offset_s(transport: Transport) -> float:
    """Return the seconds to add to this rank's clock to get rank 0's.

    Notes
    -----
    Collective over the whole job. Ranks on rank 0's host get exactly 0.
    """
    domains = transport.exchange(_clock_domain())
    far = [rank for rank, domain in enumerate(domains) if domain != domains[0]]
    offset = 0.0
    for rank in far:
        if transport.rank == rank:
            offset = _ask(transport)
        elif transport.rank == 0:
            _answer(transport, rank)
    return offset


def _ask(transport: Transport) -> float:
    mine, theirs = np.zeros(1), np.zeros(1)
    send = transport.prepare_send(mine, 0, CLOCK_CHANNEL)
    recv = transport.prepare_recv(theirs, 0, CLOCK_CHANNEL)
    best = (float("inf"), 0.0)
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        recv.start()
        send.start()
        _complete(transport, send)
        _complete(transport, recv)
        end = time.perf_counter()
        best = min(best, (end - start, float(theirs[0]) - (start + end) / 2))
    return best[1]


def _answer(transport: Transport, rank: int) -> None:
    question, answer = np.zeros(1), np.zeros(1)
    recv = transport.prepare_recv(question, rank, CLOCK_CHANNEL)
    send = transport.prepare_send(answer, rank, CLOCK_CHANNEL)
    for _ in range(_SAMPLES):
        recv.start()
        _complete(transport, recv)
        answer[0] = time.perf_counter()
        send.start()
        _complete(transport, send)


def _complete(transport: Transport, message: Message) -> None:
    since = time.monotonic()
    while not message.test(transport.status):
        transport.pause(message, time.monotonic() - since)
    transport.counts.add(message)
