"""Real processes learn, bit for bit, what threads learn (bar 2: real processes up to 4 ranks)."""

from __future__ import annotations

import json

import pytest
from small_jobs import make_config, train

import mpisim

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("ranks", "kind", "algorithm", "synchronous"),
    [(2, "text", "auto", False), (3, "regression", "ring", True), (4, "regression", "auto", False)],
)
def test_processes_and_threads_give_the_same_bits(
    tmp_path, capfd, ranks, kind, algorithm, synchronous
):
    """S1, S2: overlap, short batches, and synchronous sends over MPI itself."""
    config = make_config(
        tmp_path, kind, model={"hidden": [7, 5]}, data={"num_rows": 130},
        optimizer={"kind": "adamw", "lr": 0.01, "clip_norm": 0.5},
        train={"steps": 6, "global_batch": 48, "num_microbatches": 2, "eval_every": 3},
        parallel={"bucket_bytes": 300}, run={"name": "threads"},
        comm={"algorithm": algorithm, "synchronous_sends": synchronous},
    )  # fmt: skip
    threads = train(config, ranks)
    values = config.model_dump(mode="json")
    values["run"]["name"] = "processes"
    capfd.readouterr()
    processes = mpisim.run(values, ranks=ranks, transport="mpi")
    screen = capfd.readouterr()
    assert screen.err == ""
    assert "measured - predicted = 0; replicas bitwise equal" in screen.out
    ours, theirs = threads.summary, processes.summary
    assert {rank["params_sha256"] for rank in theirs["ranks"]} == threads.digests
    assert len(threads.digests) == 1
    assert ours["evaluations"] == theirs["evaluations"]
    lines = (processes.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert losses == threads.losses
    assert theirs["bytes_matrix"] == theirs["predicted_bytes_matrix"] == ours["bytes_matrix"]
    for mine, other in zip(ours["ranks"], theirs["ranks"], strict=True):
        assert other["traffic"] == other["predicted_traffic"] == mine["traffic"]
        assert other["memory"]["peak"] == mine["memory"]["peak"]
        assert other["memory"]["peak"] == other["predicted_memory"]["peak"]
        assert other["memory"]["peak_total"] == mine["memory"]["peak_total"]
    assert len(processes.record["hosts"]) == ranks
    assert processes.record["versions"]["mpi"] != threads.record["versions"]["mpi"]
    assert processes.record["blas_threads"] == "1"
