"""Tells whether other programs used the cores during a measurement (Linux; elsewhere: unknown)."""

from __future__ import annotations

import contextlib
import os
import time

MAX_FOREIGN_SHARE = 0.05
"""A block of rounds is dropped when other programs used more of all cores than this."""


def _busy_s() -> float:
    """Return the seconds that all cores of this host have been busy since it started."""
    with open("/proc/stat", encoding="ascii") as file:
        fields = [int(value) for value in file.readline().split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """Busy time of the host minus that of this job, over one block of rounds."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._own = time.process_time()
        self._busy: float | None = None
        with contextlib.suppress(OSError, ValueError):
            self._busy = _busy_s()

    def measure(self) -> tuple[float, float, float]:
        """Return the host's busy seconds, this rank's own, and the wall seconds since the start.

        The busy seconds are NaN where the host does not tell.
        """
        wall = time.perf_counter() - self._wall
        own = time.process_time() - self._own
        busy = float("nan") if self._busy is None else _busy_s() - self._busy
        return busy, own, wall


def foreign_share(busy_s: float, job_s: float, wall_s: float) -> float:
    """Return the share of all cores that other programs used; NaN if unknown.

    Examples
    --------
    >>> round(foreign_share(1.9, 1.8, 1.0) * (os.cpu_count() or 1), 3)
    0.1
    """
    return (busy_s - job_s) / ((os.cpu_count() or 1) * wall_s)
