"""ZeRO on real processes: the bits of threads. One launch per number of ranks runs all cases."""

from __future__ import annotations

import hashlib
from dataclasses import asdict

import numpy as np
import pytest
from mpi_worker import mpi_run
from small_jobs import (
    FLOAT64,
    copies,
    cut,
    make_plans,
    make_state,
    num_targets,
    packed_rows,
    small_decoder,
)

from mpisim.comm.local import run_threads
from mpisim.config.schema import OptimizerSection
from mpisim.engine.step import Engine
from mpisim.nn.precision import Policy

ADAMW = OptimizerSection(kind="adamw", lr=0.01, eps=1e-6, weight_decay=0.1, clip_norm=0.5)
WIRE = Policy("float32", "bfloat16", "float32", "bfloat16")
CASES = [
    (1, FLOAT64, {"bucket_bytes": 700}),
    (2, FLOAT64, {"bucket_bytes": 1}),
    (2, WIRE, {"bucket_bytes": 700, "overlap": False}),
    (3, FLOAT64, {"recompute": "full"}),
    (3, FLOAT64, {"recompute": "full", "every": 2, "prefetch": True}),
    (3, WIRE, {"prefetch": True, "overlap": False}),
]


def train_all(transport):
    """Train every case for four steps; yield what this rank has learnt and moved."""
    model = small_decoder(0.2)
    steps = [cut(packed_rows(6, seed), transport.size, 2) for seed in range(4)]
    for zero, policy, options in CASES:
        plans = make_plans(model, steps, zero=zero, policy=policy, **options)
        state = make_state(
            transport, model, plans[0], policy=policy, optimizer=ADAMW,
            overlap=options.get("overlap", True),
        )  # fmt: skip
        engine = Engine(state, len(steps))
        losses = []
        for number, (plan, parts) in enumerate(zip(plans, steps, strict=True)):
            mine = parts[transport.rank]
            done = engine.train_step(plan, number, copies(mine), num_targets(mine))
            losses.append((done.global_loss_sum, done.grad_norm))
        moved = {name: asdict(traffic) for name, traffic in state.dp.traffic().items()}
        digest = hashlib.sha256()
        for store in state.stores:
            digest.update(store.gather_master().tobytes())
        live = dict(state.ledger.live)
        state.dp.close()
        state.control.close()
        transport.barrier()
        yield {
            "zero": zero, "losses": [list(pair) for pair in losses], "params": digest.hexdigest(),
            "moved": moved, "live": live,
        }  # fmt: skip


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "synchronous"), [(2, False), (3, True), (4, False)])
def test_processes_and_threads_give_the_same_bits(ranks, synchronous):
    """A6, S1: stages 1 to 3 over MPI itself, also with synchronous sends."""
    # The cache of these tables is the process's: threads that fill it at once would keep several.
    for dtype in ("float32", "float64"):
        small_decoder(0.2).tables(np.dtype(dtype))
    threads = run_threads(lambda transport: list(train_all(transport)), ranks)
    assert not threads.errors, threads.errors
    processes = mpi_run(train_all, ranks, synchronous=synchronous)
    assert processes == threads.results
    assert [entry["zero"] for entry in processes[0]] == [zero for zero, _, _ in CASES]
    for case in zip(*processes, strict=True):
        assert len({entry["params"] for entry in case}) == 1
    # The stages learn, and not all the same: what is compared is not a constant.
    assert len({entry["params"] for entry in processes[0]}) >= 3
