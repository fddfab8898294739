"""The rank sides of the benchmarks still run, on real ranks, over the engine as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpi_worker import mpi_run


def trace(transport):
    from mpisim.bench.tracing import measure_steps

    return measure_steps(transport, rounds=1)


def collectives(transport, folder):
    from mpisim.bench.collectives import measure

    return measure(transport, [64], Path(folder))


@pytest.mark.mpi
def test_the_cost_of_tracing_is_measured():
    for row in mpi_run(trace, 2):
        assert row["ranks"] == 2 and row["rounds"] == 1
        assert row["step_traced_us"] > 0 and row["step_untraced_us"] > 0
        assert row["trace_bytes_per_step"] > 100


@pytest.mark.mpi
def test_every_collective_is_measured(tmp_path):
    for rows in mpi_run(collectives, 2, folder=str(tmp_path)):
        assert [row["collective"] for row in rows] == ["all_reduce", "reduce_scatter", "all_gather"]
