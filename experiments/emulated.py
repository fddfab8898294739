"""Many short runs of emulated machines inside one launch: what a launch costs is paid once.

`run_many` is for the experiments; the file itself is what every rank runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mpisim.config import load_config
from mpisim.config.schema import RunConfig
from mpisim.cost.price import message_bytes
from mpisim.cost.simulate import Link, PlanTimeline, simulate_plan
from mpisim.launch import (
    EXIT_DONE,
    Job,
    keep_freed_memory,
    launch,
    limit_blas_threads,
    run_as_rank,
)
from mpisim.plan.ops import Backward, BackwardInput, BackwardWeight, Forward, Op, Recompute
from mpisim.train.loop import train_on
from mpisim.train.setup import Setup

_FLOPS = {
    Forward: "forward_flops",
    Recompute: "forward_flops",
    Backward: "backward_flops",
    BackwardInput: "input_flops",
    BackwardWeight: "weight_flops",
}
"""Kind of op -> what a block's spec calls its floating-point operations."""

WARM_UP_STEPS = 1
"""First steps that no figure counts."""


def run_many(file: Path, changes: Sequence[Sequence[str]], ranks: int) -> None:
    """Train a config on `ranks` ranks once for every list of ``section.key=value`` texts.

    Each list names its own run.name; an earlier run of that name is replaced.
    """
    with tempfile.TemporaryDirectory(prefix="mpisim-many-") as folder:
        jobs = Path(folder) / "jobs.json"
        jobs.write_text(json.dumps([str(file), list(map(list, changes))]), encoding="utf-8")
        status = launch([sys.executable, __file__, str(jobs)], ranks)
    if status != EXIT_DONE:
        raise SystemExit(status)


def stall_shares(steps: Sequence[dict]) -> list[float]:
    """Return for every step but the first ones what share of it a rank waited, mean over ranks.

    Counted: waits for messages of the pipeline, and for the sums over all ranks that a step starts
    and ends with. What a rank waits for a send of its own to leave does not count.
    """
    names = ("stall_pp_recv_s", "stall_control_recv_s", "stall_control_send_s")
    return [
        sum(row["ranks"][name][2] for name in names) / row["ranks"]["step_s"][2]
        for row in steps[WARM_UP_STEPS:]
    ]


def median_step_s(steps: Sequence[dict]) -> float:
    """Return the median over steps of the seconds of a step, the first ones left out."""
    return statistics.median(row["ranks"]["step_s"][2] for row in steps[WARM_UP_STEPS:])


def read_steps(run_dir: Path) -> list[dict]:
    """Return the lines of metrics.jsonl that are training steps."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def host_of(run_dir: Path) -> dict:
    """Return where and with what a run was made."""
    record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    names = ("mpisim", "python", "numpy", "mpi")
    host = {name: record[name] for name in ("cores", "platform", "processor", "blas_threads")}
    return host | {name: record["versions"][name] for name in names}


def simulated(config: RunConfig, ranks: int) -> PlanTimeline:
    """Return when every op of a full step would run on the machine that the config emulates."""
    setup = Setup(config, ranks)
    plan, cluster = setup.full_plan(), config.cluster
    specs = {spec.name: spec for spec in setup.specs(plan.rows[0][0])}
    assert len({rows for counts in plan.rows for rows in counts}) == 1, plan.rows

    def op_seconds(rank: int, op: Op) -> float:
        name = _FLOPS.get(type(op))
        return getattr(specs[op.block], name) / cluster.flops_per_s if name else 0.0

    return simulate_plan(
        plan, op_seconds, Link(cluster.latency_s, cluster.bytes_per_s),
        message_bytes=lambda op: message_bytes(plan, op),
    )  # fmt: skip


def _work(job: Job) -> None:
    file, changes = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    configs = [load_config(file, each) for each in changes]
    transport = job.connect(timeout_s=configs[0].comm.timeout_s)
    for config in configs:
        # A run's own lines would hide how far all of them are.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train_on(transport, Setup(config, job.size), job, True)
        if job.rank == 0:
            print(f"   {config.run.name}", flush=True)
    job.finish()


if __name__ == "__main__":
    limit_blas_threads()
    keep_freed_memory()
    sys.exit(run_as_rank(_work))
