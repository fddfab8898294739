"""What a rank leaves behind whose memory would have passed the budget: its record and its words.

`memory-rank-0002.json` in the run directory, written before the error is told to anybody: the
others may be ended the moment they hear of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mpisim.errors import MemoryBudgetExceeded
from mpisim.launch import Job
from mpisim.train.changes import change_record, change_sentence, smallest_change
from mpisim.train.fit import DataSizes, WorstForecast, breakdown, worst_forecast
from mpisim.train.rundir import write_json
from mpisim.train.setup import Setup

_SEARCH_SHARE = 0.25
"""Part of comm.timeout_s that the search for a change may take: the others wait for this rank."""


def excess_file(rank: int) -> str:
    """Return the name of a rank's record.

    Examples
    --------
    >>> excess_file(2)
    'memory-rank-0002.json'
    """
    return f"memory-rank-{rank:04d}.json"


def record_excess(
    run_dir: Path, setup: Setup, job: Job, sizes: DataSizes, error: MemoryBudgetExceeded
) -> MemoryBudgetExceeded:
    """Write a rank's record and return the error with all that it says, to be raised.

    Parameters
    ----------
    run_dir : Path
    setup : Setup
    job : Job
        Its rank and step.
    sizes : DataSizes
    error : MemoryBudgetExceeded
        As the ledger or the watch raised it.
    """
    config = setup.config
    facts = error.facts
    op = str(facts.get("op", ""))
    record: dict[str, Any] = {
        "rank": job.rank,
        "step": job.step,
        "op": op,
        **_place(op),
        "budget_bytes": config.memory.budget_bytes,
        "held_bytes": facts.get("total"),
        "missing_bytes": facts.get("missing"),
        "asked_bytes": facts.get("asked"),
        "measured_bytes": facts.get("in_use"),
        "live": facts.get("live"),
    }
    path = run_dir / excess_file(job.rank)
    # At once, and again with what follows from a search.
    write_json(path, record)
    worst = worst_forecast(setup, *sizes)
    change = None
    if worst.peak_total > config.memory.budget_bytes:
        until_s = time.monotonic() + _SEARCH_SHARE * config.comm.timeout_s
        change = smallest_change(config, setup.mesh.size, *sizes, like=setup, until_s=until_s)
        advice = f"{_prediction(worst, config.memory.budget_bytes)} {change_sentence(change)}"
    else:
        advice = (
            f"Its plans need {worst.peak_total} bytes at most: look for code that allocates what "
            f"the plan does not know of."
        )
    if worst.peak_total > config.memory.budget_bytes:
        record["missing_bytes"] = worst.peak_total - config.memory.budget_bytes
    record |= {
        "predicted_peak_bytes": worst.peak_total,
        "predicted_at_peak": worst.at_peak,
        "predicted_peak_op": worst.peak_op,
        "predicted_rank": worst.rank,
        "smallest_change": change_record(change),
        "advice": advice,
    }
    write_json(path, record)
    return MemoryBudgetExceeded(f"{error} {advice}", **facts, record=str(path))


def _place(op: str) -> dict[str, Any]:
    """Return block and microbatch of an op's text; None where it has none."""
    fields = dict(word.split("=", 1) for word in op.split()[1:] if "=" in word)
    micro = fields.get("micro", "")
    return {"block": fields.get("block"), "micro": int(micro) if micro.isdigit() else None}


def _prediction(worst: WorstForecast, budget: int) -> str:
    return (
        f"The run needs {worst.peak_total} bytes, {worst.peak_total - budget} more, on rank "
        f"{worst.rank} in {worst.peak_op} ({breakdown(worst.at_peak)})."
    )
