"""Measure what a call allocates, to compare it with what a spec predicts."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from mpisim.memory.tracker import open_tracker
from mpisim.nn.kernels import Kernels, prepare_kernels
from mpisim.nn.precision import dtype_of

KERNEL_SETS = ("numpy", "numba") if importlib.util.find_spec("numba") else ("numpy",)

EMPTY_SLACK = 64
"""NumPy allocates a byte for an array without elements, which predictions count as 0."""


@functools.cache
def ready_kernels(name: str) -> Kernels:
    """Return a kernel set whose functions are compiled: compiling allocates arrays, too."""
    return prepare_kernels(name, *map(dtype_of, ("float32", "float64", "bfloat16", "float16")))


class Measured(NamedTuple):
    """Bytes of new arrays at the fullest moment of a call, and after it."""

    peak: int
    left: int


class Probe:
    """Counts the bytes of the arrays of this thread."""

    def __init__(self, tracker) -> None:
        self._tracker = tracker

    def __call__(self, function: Callable, *args, **kwargs):
        """Return (result, Measured) of a call; arguments are alive before."""
        before = self._tracker.live()
        self._tracker.reset_peak()
        result = function(*args, **kwargs)
        measured = Measured(self._tracker.peak() - before, self._tracker.live() - before)
        return result, measured


@pytest.fixture(scope="module")
def probe() -> Iterator[Probe]:
    tracker = open_tracker("hook")
    yield Probe(tracker)
    tracker.close()


def check(predicted: int, measured: int, *, empty: bool, what: str) -> None:
    """Compare to the byte; a call with zero rows may take up to EMPTY_SLACK bytes more."""
    slack = EMPTY_SLACK if empty else 0
    assert predicted <= measured <= predicted + slack, (what, predicted, measured)
