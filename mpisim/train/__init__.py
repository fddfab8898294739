"""Trains: from a config to a finished run directory.

    setup.py     config -> model, mesh, plans; the static check behind `mpisim check`
    pipeline.py  the stages of a config
    extensions.py  files of users that register names
    start.py     the weights to start from
    calibrate.py how bottlenecks start
    fit.py       whether all plans of a run keep its budget
    changes.py   the smallest change that would, tried on real plans
    excess.py    what a rank leaves behind that passed its budget
    rundir.py    the run directory: run.json, metrics.jsonl, summary.json, trace/
    clock.py     one time axis for ranks on several hosts
    record.py    what a run records about itself
    loop.py      what a rank does from joining the job to the last message
    summary.py   every rank's totals beside the predicted ones: summary.json
    console.py   what rank 0 shows while it runs
    weights.py   the trained parameters as a safetensors file; stage_files.py: as one per stage
    stage_reader.py  reads any part of either
    sample.py    text from trained weights
    worked.py    the worked example of accumulation and recompute
    api.py       `mpisim.run`

Importing this package loads no NumPy: the command line checks a run directory with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpisim.train.rundir import check_run_dir

if TYPE_CHECKING:
    from mpisim.config.schema import RunConfig
    from mpisim.launch import Job
    from mpisim.train.setup import CheckReport

__all__ = ["check", "check_run_dir", "plan_text", "run", "train_rank"]


def train_rank(config: RunConfig, job: Job, *, overwrite: bool = False) -> None:
    """Do one rank's part of a run (see `mpisim.train.loop.train_rank`)."""
    from mpisim.train.loop import train_rank as work

    work(config, job, overwrite=overwrite)


def check(config: RunConfig, ranks: int) -> CheckReport:
    """Prove the plan of a config without data (see `mpisim.train.setup.check`)."""
    from mpisim.train.setup import check as work

    return work(config, ranks)


def plan_text(config: RunConfig, ranks: int) -> str:
    """Return the plan of a full step as text."""
    from mpisim.plan.text import plan_text as as_text
    from mpisim.train.setup import Setup

    return as_text(Setup(config, ranks).full_plan())


def run(config: RunConfig, **options: Any) -> Any:
    """Train from Python (see `mpisim.train.api.run`)."""
    from mpisim.train.api import run as work

    return work(config, **options)
