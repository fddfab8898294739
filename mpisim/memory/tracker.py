"""What NumPy really holds: the independent measurement beside the ledger.

A tracker counts the data buffers of arrays made since it was opened. The hook (`_allocator.c`,
compiled where a C compiler is) counts in the calling thread, to the byte; tracemalloc is the
fallback. The resident set of the process is read here too. Nothing here knows of the ledger.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import tracemalloc
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from mpisim.errors import ConfigError

_why_not_built = ""
try:
    from mpisim.memory import _allocator
except ImportError as error:
    _allocator = None
    _why_not_built = str(error)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

TrackerKind = Literal["auto", "hook", "tracemalloc", "off"]


class Tracker(Protocol):
    """Bytes of NumPy's data buffers, measured and not computed.

    Attributes
    ----------
    kind : {"hook", "tracemalloc", "off"}
        How it measures.
    exact : bool
        Whether every figure is exact to the byte, for this thread alone.

    Notes
    -----
    A buffer counts as many bytes as NumPy asked for; a view asks for none, and an array of size
    zero for one byte. What NumPy takes past its data allocator is never counted: the buffers of
    casting ufuncs and the copies inside products of strided matrices.
    """

    kind: str
    exact: bool

    def live(self) -> int:
        """Return the bytes of buffers that were made since the tracker was opened and still are."""
        ...

    def peak(self) -> int:
        """Return the most live bytes since the last `reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """Make the present live bytes the peak, of both counts."""
        ...

    def set_cap(self, nbytes: int | None) -> None:
        """Let the allocation that would make more than `nbytes` live raise MemoryError.

        Raises
        ------
        ConfigError
            This kind of tracker cannot cap, or `nbytes` is no positive number.
        """
        ...

    def refused(self) -> int:
        """Return how many allocations the cap has turned down."""
        ...

    def aside(self) -> AbstractContextManager[None]:
        """Charge arrays made inside to a second count, which the cap does not see."""
        ...

    def aside_live(self) -> int:
        """Return the live bytes of arrays made inside `aside`."""
        ...

    def aside_peak(self) -> int:
        """Return the most of `aside_live` since the last `reset_peak`."""
        ...

    def close(self) -> None:
        """Put back the allocator that was NumPy's before; a second call does nothing."""
        ...


def hook_is_built() -> bool:
    """Tell whether the allocator hook was compiled when the package was installed."""
    return _allocator is not None


def open_tracker(kind: TrackerKind = "auto") -> Tracker:
    """Start to count the bytes of NumPy arrays.

    Parameters
    ----------
    kind : {"auto", "hook", "tracemalloc", "off"}
        `"hook"` is NumPy's allocator hook: exact, a few nanoseconds an array, this thread only.
        `"tracemalloc"` counts the whole process, slows every allocation of Python down several
        times, and its peak is an upper bound. `"off"` measures nothing, all figures are 0.
        `"auto"` is the hook where it is built, else tracemalloc.

    Returns
    -------
    Tracker
        Open. Close it in the thread that opened it; of several in one thread, the last first.

    Raises
    ------
    ConfigError
        The kind is unknown, or the hook is asked for and not built.

    Examples
    --------
    >>> tracker = open_tracker("off")
    >>> tracker.live(), tracker.exact
    (0, False)
    """
    if kind == "auto":
        kind = "hook" if hook_is_built() else "tracemalloc"
    if kind == "hook":
        if _allocator is None:
            raise ConfigError(
                f"memory tracker 'hook' must be compiled with the package; got {_why_not_built!r}. "
                "Install a C compiler and the package again, or use 'tracemalloc'."
            )
        return _HookTracker()
    if kind == "tracemalloc":
        return _TracemallocTracker()
    if kind == "off":
        return _NoTracker()
    raise ConfigError(
        "memory tracker must be 'auto', 'hook', 'tracemalloc' or 'off'; "
        f"got {kind!r}. Use 'auto' for the best one that is built."
    )


class _HookTracker:
    """Exact figures from two counters; one of them is NumPy's allocator in this context."""

    kind = "hook"
    exact = True

    def __init__(self) -> None:
        self._counter = _allocator.Counter()
        self._aside = _allocator.Counter()
        self._previous = self._counter.install()

    def live(self) -> int:
        return self._counter.live

    def peak(self) -> int:
        return self._counter.peak

    def reset_peak(self) -> None:
        self._counter.reset_peak()
        self._aside.reset_peak()

    def set_cap(self, nbytes: int | None) -> None:
        if nbytes is not None and nbytes <= 0:
            raise ConfigError(
                f"memory cap must be a positive number of bytes; got {nbytes}. Use None for no cap."
            )
        self._counter.cap = nbytes

    def refused(self) -> int:
        return self._counter.refused

    def aside(self) -> AbstractContextManager[None]:
        if self._previous is None:
            return contextlib.nullcontext()
        return _Installed(self._aside)

    def aside_live(self) -> int:
        return self._aside.live

    def aside_peak(self) -> int:
        return self._aside.peak

    def close(self) -> None:
        # Another thread, or a tracker opened later, has a handler of its own: not ours to replace.
        if self._previous is not None and self._counter.installed():
            _allocator.restore(self._previous)
        self._previous = None


class _Installed:
    """A counter that is NumPy's allocator inside a `with`; far cheaper than a generator."""

    __slots__ = ("_counter", "_previous")

    def __init__(self, counter) -> None:
        self._counter = counter

    def __enter__(self) -> None:
        self._previous = self._counter.install()

    def __exit__(self, *_exc_info) -> None:
        _allocator.restore(self._previous)


class _TracemallocTracker:
    """Figures of the whole process from Python's own tracer.

    `live` is exact for the process, all threads together, and takes a snapshot: milliseconds.
    `peak` is that of all that is traced, Python objects and the snapshots themselves too: an upper
    bound of NumPy's. What is made in `aside` cannot be told apart: it is counted with the rest,
    and the second count stays 0.
    """

    kind = "tracemalloc"
    exact = False

    # Tracing is one switch of the process, and each rank of a threaded run has a tracker.
    _lock = threading.Lock()
    _open = 0
    _started = False

    def __init__(self) -> None:
        cls = _TracemallocTracker
        with cls._lock:
            started = not tracemalloc.is_tracing()
            if started:
                tracemalloc.start(1)
                cls._started = True
            cls._open += 1
        # Someone else may have been tracing for long.
        self._before = 0 if started else _numpy_traced()
        self._last: tuple[int, int] | None = None

    def live(self) -> int:
        return _numpy_traced() - self._before if self._last is None else self._last[0]

    def peak(self) -> int:
        if self._last is not None:
            return self._last[1]
        return tracemalloc.get_traced_memory()[1] - self._before

    def reset_peak(self) -> None:
        if self._last is None:
            tracemalloc.reset_peak()

    def set_cap(self, nbytes: int | None) -> None:
        _refuse_cap(self.kind, nbytes)

    def refused(self) -> int:
        return 0

    def aside(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def aside_live(self) -> int:
        return 0

    def aside_peak(self) -> int:
        return 0

    def close(self) -> None:
        if self._last is not None:
            return
        peak = self.peak()  # before the snapshot, which is made of Python objects
        self._last = self.live(), peak
        cls = _TracemallocTracker
        with cls._lock:
            cls._open -= 1
            if cls._open == 0 and cls._started:
                tracemalloc.stop()
                cls._started = False


def _numpy_traced() -> int:
    only_numpy = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    snapshot = tracemalloc.take_snapshot().filter_traces([only_numpy])
    return sum(trace.size for trace in snapshot.traces)


class _NoTracker:
    """Measures nothing and costs nothing."""

    kind = "off"
    exact = False

    def live(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def set_cap(self, nbytes: int | None) -> None:
        _refuse_cap(self.kind, nbytes)

    def refused(self) -> int:
        return 0

    def aside(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def aside_live(self) -> int:
        return 0

    def aside_peak(self) -> int:
        return 0

    def close(self) -> None:
        pass


def _refuse_cap(kind: str, nbytes: int | None) -> None:
    if nbytes is not None:
        raise ConfigError(
            f"memory cap must have the memory tracker 'hook'; got {kind!r}. "
            "Install a C compiler and the package again, or leave the cap out."
        )


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in memory now, or None where that is unknown.

    Notes
    -----
    Pages, not arrays: memory that was never written is not in it, and what was freed may still be,
    kept by the C library for the next allocation. Known on Linux.
    """
    return _linux_status("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most bytes of this process in memory at one time.

    Notes
    -----
    Never falls, except by `reset_peak_resident`.
    """
    # Not ru_maxrss on Linux: a process inherits that of the one which started it.
    peak = _linux_status("VmHWM")
    if peak is None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        peak = _maxrss_bytes(usage.ru_maxrss, sys.platform)
    return peak


def reset_peak_resident() -> bool:
    """Make the present resident bytes the peak; return whether the system could."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _maxrss_bytes(maxrss: int, platform: str) -> int:
    """Return getrusage's figure in bytes: macOS counts bytes, all others KiB."""
    return maxrss if platform == "darwin" else maxrss * 1024


def _linux_status(name: str) -> int | None:
    try:
        with open("/proc/self/status", "rb") as file:
            status = file.read()
    except OSError:
        return None
    _, found, rest = status.partition(f"\n{name}:".encode())
    return int(rest.split(None, 1)[0]) * 1024 if found else None
