"""The rank side of `mpisim bench trace`: the same training steps with tracing on and off."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpisim.config import config_from_mapping
from mpisim.data.sampler import microbatch_bounds, shard_rows
from mpisim.engine.step import Engine
from mpisim.layouts.metrics import MEMORY_CATEGORIES
from mpisim.trace.recorder import Recorder
from mpisim.train.setup import Setup

STEPS_PER_GROUP = 5
"""Steps timed together; groups with and without tracing alternate."""

_CONFIG = {
    "data": {"kind": "stdlib", "window": 16},
    "model": {"hidden": [256, 256, 256, 256], "embed_dim": 16},
    "train": {"global_batch": 1024, "num_microbatches": 2},
    "parallel": {"bucket_bytes": 1 << 18},
}
"""A step of the size that people run on a laptop: six blocks, five buckets."""


def measure_steps(transport: Any, rounds: int) -> dict[str, Any]:
    """Time groups of steps with tracing on and off, interleaved.

    Parameters
    ----------
    transport : MpiTransport
    rounds : int
        Pairs of groups.

    Returns
    -------
    dict
        Median times per step in microseconds and the median of the rounds' ratios, minus one;
        the slowest rank of each group counts.
    """
    with tempfile.TemporaryDirectory(prefix="mpisim-bench-") as folder:
        path = Path(folder) / f"rank-{transport.rank:04d}.bin"
        groups = [_group(transport, path), _group(transport, None)]
        for group in groups:
            group()
        before = path.stat().st_size
        times = np.array([[_slowest(transport, group) for group in groups] for _ in range(rounds)])
        written = path.stat().st_size - before
    traced, untraced = np.median(times, axis=0) / STEPS_PER_GROUP * 1e6
    return {
        "ranks": transport.size,
        "step_traced_us": float(traced),
        "step_untraced_us": float(untraced),
        "overhead": float(np.median(times[:, 0] / times[:, 1])) - 1.0,
        "rounds": rounds,
        "trace_bytes_per_step": written / (rounds * STEPS_PER_GROUP),
    }


def _group(transport: Any, path: Path | None):
    config = config_from_mapping(_CONFIG)
    setup = Setup(config, transport.size)
    recorder = Recorder(
        path, {"rank": transport.rank, "memory_categories": list(MEMORY_CATEGORIES)}
    )
    state = setup.build_state(transport, recorder)
    engine = Engine(state, 1_000_000)
    plan = setup.full_plan()
    batch = config.train.global_batch
    lo, hi = shard_rows(batch, transport.size, transport.rank)
    bounds = microbatch_bounds(0, hi - lo, config.train.num_microbatches)
    random = np.random.default_rng(transport.rank)
    x = random.integers(0, 256, (hi - lo, config.data.window), dtype=np.uint8)
    targets = random.integers(0, 256, hi - lo, dtype=np.uint8)

    def load(micro: int):
        rows = slice(bounds[micro], bounds[micro + 1])
        return x[rows].copy(), targets[rows].copy()

    def run() -> None:
        for _ in range(STEPS_PER_GROUP):
            engine.train_step(plan, state.committed, load)

    return run


def _slowest(transport: Any, group) -> float:
    transport.barrier()
    start = time.perf_counter()
    group()
    mine = np.array([time.perf_counter() - start])
    everyone = np.empty(transport.size)
    transport.raw.Allgather(mine, everyone)
    return float(everyone.max())
