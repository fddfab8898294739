"""The collectives on ranks as threads: exact sums, exact traffic, the reference's bits."""

from __future__ import annotations

import collective_checks as checks
import numpy as np
import pytest

from mpisim.comm.faulty import Delay, FaultyTransport
from mpisim.comm.local import run_threads

RANKS = (1, 2, 3, 4, 5, 8)


def run(check, size, *, strict=False, faults=(), wrap=True, **options):
    """Run a check on threads; raise what the first failing rank raised."""

    def body(transport):
        check(FaultyTransport(transport, faults, strict=strict) if wrap else transport)

    job = run_threads(body, size, timeout_s=20.0, **options)
    if job.errors:
        raise next(iter(job.errors.values()))


@pytest.mark.parametrize("size", RANKS)
def test_results_and_traffic_are_exact(size):
    """Every collective x count x dtype x algorithm, difference 0 to the step tables."""
    run(checks.check_matrix, size)


@pytest.mark.parametrize("size", (2, 3, 8))
def test_results_and_traffic_are_exact_without_eager_sends(size):
    run(
        lambda t: checks.check_matrix(t, counts=(0, 1, 3, 10, 257), dtypes=("float32", "bfloat16")),
        size, synchronous=True, strict=True,
    )  # fmt: skip


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("check", checks.BITS, ids=lambda check: check.__name__)
def test_collectives(check, size):
    run(check, size)
