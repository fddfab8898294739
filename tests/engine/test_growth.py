"""No growth: a long run of real ranks ends with the memory it had after a few steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from mpi_worker import mpi_run

EARLY, LATE = 20, 2000
LIMIT_BYTES = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train_and_watch(transport, folder):
    """Train over `transport`, tracing on, and return the resident bytes after two step numbers."""
    from mpisim.config import config_from_mapping
    from mpisim.launch import Job
    from mpisim.train import loop
    from mpisim.train.setup import Setup

    config = config_from_mapping(
        {
            "run": {"dir": folder},
            "data": {"kind": "regression", "num_rows": 1000, "num_features": 8},
            "model": {"hidden": [32, 32]},
            "train": {"steps": LATE + 1, "global_batch": 48, "num_microbatches": 2},
            "parallel": {"bucket_bytes": 2000},
        }
    )
    seen = {}
    original = loop._Trainer._step

    def step(trainer, number):
        result = original(trainer, number)
        if number in (EARLY, LATE):
            seen[number] = resident_bytes()
        return result

    loop._Trainer._step = step
    job = Job(transport.rank, transport.size)
    loop.train_on(transport, Setup(config, transport.size), job, False)
    return [seen[EARLY], seen[LATE]]


@pytest.mark.mpi
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
def test_resident_memory_does_not_grow_over_2000_steps(tmp_path):
    for early, late in mpi_run(train_and_watch, 2, folder=str(tmp_path)):
        assert late - early <= LIMIT_BYTES
