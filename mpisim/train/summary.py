"""What a run came to: every rank's totals beside what the plans predict, in summary.json.

`loop` calls in here after the last step; the only messages are the ranks' totals, once.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import mpisim
from mpisim.comm.communicator import Traffic
from mpisim.comm.transport import Transport
from mpisim.cost.price import Priced, bytes_matrix, price_rank
from mpisim.data.load import Dataset
from mpisim.engine.state import EngineState
from mpisim.errors import CheckpointError, PlanError
from mpisim.layouts.metrics import MEMORY_CATEGORIES, TRAFFIC_FIELDS
from mpisim.memory.tracker import peak_resident_bytes
from mpisim.plan.build import Plan
from mpisim.train.clock import host_name
from mpisim.train.record import array_digest, digest, iso_time, joint_digest
from mpisim.train.rundir import write_json
from mpisim.train.setup import Setup
from mpisim.train.stage_files import (
    WEIGHTS_FOLDER,
    aliases_of,
    part_of,
    save_manifest,
    save_stage,
    stage_file,
)
from mpisim.train.weights import WEIGHTS_FILE, save_weights

PlanRuns = dict[tuple[str, bool], tuple[Plan, int]]
"""Name of a plan, and whether its update was committed -> the plan and how often it ran so."""


@dataclass
class History:
    """What happened while a rank trained; rank 0 alone knows the baselines and losses."""

    baselines: dict[str, float | str]
    started_s: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    first_loss: float = math.nan
    last_loss: float = math.nan
    evaluations: list[dict[str, float]] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    """Evaluations without compressors, with them untrained, and trained; empty without any."""
    plan_runs: PlanRuns = field(default_factory=dict)

    def count_run(self, plan: Plan, committed: bool = True) -> None:
        """Count one run of a plan, by the branch it took."""
        key = (plan.name, committed)
        _, times = self.plan_runs.get(key, (plan, 0))
        self.plan_runs[key] = (plan, times + 1)

    def times(self) -> dict[str, int]:
        """Return how often each plan ran, by name."""
        totals: dict[str, int] = {}
        for (name, _), (_, times) in self.plan_runs.items():
            totals[name] = totals.get(name, 0) + times
        return totals


def collect_totals(
    transport: Transport, state: EngineState, resident_start_bytes: int | None = None
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the totals of every rank, by rank, and the trained parameters. All ranks call it.

    Parameters
    ----------
    transport : Transport
    state : EngineState
    resident_start_bytes : int, optional
        Resident memory of the process before it held anything of the run.

    Returns
    -------
    totals : list of dict
    params : dict of str to ndarray
        All parameters of its stage on the first rank of axis dp; elsewhere what the rank holds
        whole.
    """
    # First: gathering what is sharded is no traffic of a step.
    mine = _rank_totals(state)
    mine["resident_start_bytes"] = resident_start_bytes
    params, digests = _gather_params(state)
    mine |= digests
    if state.mesh.pp > 1 and state.dp.index == 0:
        copies = {n for s in state.stores if s.bucket.is_copy for n in s.offsets}
        mine["digests"] = {n: array_digest(a) for n, a in params.items() if n not in copies}
    return [json.loads(text) for text in transport.exchange(json.dumps(mine))], params


def _gather_params(state: EngineState) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return parameters as they are updated, and digests that are equal on equal replicas."""
    tied = _tied_digests(state)
    if state.zero == 0:
        return state.master, {"params_sha256": digest(state.master), **tied}
    digests, working_digests, params = {}, {}, {}
    for store in state.stores:
        # A bucket at a time: no rank but the one that writes them ever holds all.
        views = store.views(store.gather_master())
        digests |= {name: array_digest(array) for name, array in views.items()}
        if state.zero < 3:
            working = store.views(store.working)
            working_digests |= {name: array_digest(array) for name, array in working.items()}
        if state.dp.index == 0:
            params |= views
        if store.bucket.twin >= 0:
            tied["tied_sha256"] = joint_digest({name: digests[name] for name in views})
    return params, {
        **tied,
        "params_sha256": joint_digest(digests), "working_sha256": joint_digest(working_digests),
    }  # fmt: skip


def _tied_digests(state: EngineState) -> dict[str, str]:
    """Return the digest of the table that another stage holds, too, if there is one."""
    digests = {
        name: array_digest(state.master[name])
        for store in state.stores
        if store.bucket.twin >= 0 and state.zero == 0
        for name in store.offsets
    }
    return {"tied_sha256": joint_digest(digests)} if digests else {}


def write_summary(
    run_dir: Path,
    totals: list[dict[str, Any]],
    history: History,
    *,
    setup: Setup,
    data: Dataset,
    state: EngineState,
) -> None:
    """Finish run.json and write summary.json; rank 0 calls it.

    Parameters
    ----------
    run_dir : Path
    totals : list of dict
        As `collect_totals` returns them. Changed: the bytes sent to each peer go into the matrix
        of the summary, and each rank gets "predicted_traffic" and "predicted_memory".
    history : History
    setup : Setup
    data : Dataset
    state : EngineState
        Rank 0's.
    """
    ended_s = time.time()
    record_path = run_dir / "run.json"
    record = json.loads(record_path.read_text(encoding="utf-8"))
    record["ended"] = iso_time(ended_s)
    write_json(record_path, record)
    runs = history.plan_runs
    # With stages no rank has all parameters: the digest of the whole comes from those of each.
    digests = [entry.pop("digests", {}) for entry in totals]
    whole = {name: digest for part in digests for name, digest in part.items()}
    matrix = _measured_matrix(totals)
    for rank, entry in enumerate(totals):
        entry["predicted_traffic"] = _predicted_traffic(runs, rank)
        entry["predicted_memory"] = _predicted_memory(runs, rank, setup, data.nbytes)
    write_json(
        run_dir / "summary.json",
        {
            "status": "done",
            "steps": setup.config.train.steps,
            "kernels": state.kernels.name,
            "committed_steps": state.committed,
            "skipped_steps": state.loss_scale.num_skipped,
            "wall_s": ended_s - history.started_s,
            "first_loss": finite_or_none(history.first_loss),
            "last_loss": finite_or_none(history.last_loss),
            "baselines": history.baselines,
            "primary_baseline": data.primary_baseline,
            "params_sha256": joint_digest(whole) if whole else totals[0]["params_sha256"],
            "evaluations": history.evaluations,
            "passes": history.passes,
            "plans": history.times(),
            "bytes_matrix": matrix,
            "predicted_bytes_matrix": _predicted_matrix(runs, len(totals)),
            "ranks": totals,
        },
    )


def write_weights(
    run_dir: Path,
    transport: Transport,
    setup: Setup,
    state: EngineState,
    params: dict[str, np.ndarray],
) -> None:
    """Write the trained weights: one file, or one per stage. All ranks call it.

    Parameters
    ----------
    run_dir : Path
    transport : Transport
    setup : Setup
    state : EngineState
    params : dict of str to ndarray
        As `collect_totals` returns them.

    Raises
    ------
    CheckpointError
        A file cannot be written, on whatever rank.
    """
    facts = {
        "run": setup.config.run.name,
        "committed_steps": str(state.committed),
        "mpisim": mpisim.__version__,
    }
    if setup.mesh.pp == 1:
        if transport.rank == 0:
            save_weights(run_dir / WEIGHTS_FILE, params, facts)
        return
    folder = run_dir / WEIGHTS_FOLDER
    record = error = ""
    if state.dp.index == 0:
        copies = {n for s in state.stores if s.bucket.is_copy for n in s.offsets}
        owned = {name: array for name, array in params.items() if name not in copies}
        stage = setup.mesh.coordinate(transport.rank)["pp"]
        try:
            record = save_stage(
                folder, stage, owned, facts, specs=setup.model.param_specs(),
                blocks=setup.full_plan().rank_blocks(transport.rank),
            ).to_json()  # fmt: skip
        except CheckpointError as failed:
            error = str(failed)
    told = [json.loads(text) for text in transport.exchange(json.dumps([record, error]))]
    if failures := [error for _, error in told if error]:
        if state.dp.index == 0:
            part_of(folder / stage_file(setup.mesh.coordinate(transport.rank)["pp"])).unlink(
                missing_ok=True
            )
        raise CheckpointError(failures[0])
    if transport.rank == 0:
        records = [record for record, _ in told if record]
        save_manifest(folder, records, aliases=aliases_of(setup.model), metadata=facts)


def assert_replicas_equal(totals: list[dict[str, Any]]) -> None:
    """Compare the digests of all replicas' parameters, stage by stage, and of a tied table's ends.

    Raises
    ------
    PlanError
        Two replicas, or two ends, differ in some bit.
    """
    by_stage: dict[int, set[tuple]] = {}
    for entry in totals:
        digests = by_stage.setdefault(entry.get("stage", 0), set())
        digests.add((entry["params_sha256"], entry.get("working_sha256")))
    for stage, digests in by_stage.items():
        if len(digests) > 1:
            of = f" of stage {stage}" if len(by_stage) > 1 else ""
            raise PlanError(
                f"replicas{of} must hold the same bits; got {len(digests)} different sets of "
                f"parameters. Report this: a collective or an update is wrong."
            )
    ends = {entry["tied_sha256"] for entry in totals if "tied_sha256" in entry}
    if len(ends) > 1:
        raise PlanError(
            f"both ends of a tied table must hold the same bits; got {len(ends)} different "
            f"tables. Report this: an exchange or an update is wrong."
        )


def finite_or_none(value: float) -> float | None:
    """Return a number as JSON can hold it: a skipped step may have a loss that is not finite."""
    return value if math.isfinite(value) else None


def _rank_totals(state: EngineState) -> dict[str, Any]:
    """Return what this rank sent, waited for and held over the whole run."""
    sent_to: dict[int, int] = {}
    traffic: dict[str, Traffic] = {}
    for communicator in state.communicators:
        for collective, moved in communicator.traffic().items():
            traffic[f"{communicator.axis} {collective}"] = moved
        for peer, nbytes in communicator.bytes_sent_to().items():
            sent_to[peer] = sent_to.get(peer, 0) + nbytes
    ledger = state.ledger
    return {
        "rank": state.rank,
        "stage": state.mesh.coordinate(state.rank)["pp"],
        "host": host_name(),
        "traffic": {
            name: {field: getattr(moved, field) for field in TRAFFIC_FIELDS}
            for name, moved in traffic.items()
        },
        "sent_to": sent_to,
        "stall_s": {
            f"{axis} {cause}": seconds
            for (axis, cause), seconds in state.meter.stall_totals.items()
        },
        "memory": {
            "live": ledger.live,
            "peak": ledger.peak,
            "peak_total": ledger.peak_total,
            "at_peak": ledger.at_peak,
            "peak_op": ledger.peak_op,
            "measured": state.watch.facts(),
        },
        "resident_peak_bytes": peak_resident_bytes(),
    }


def _measured_matrix(totals: list[dict[str, Any]]) -> list[list[int]]:
    """Take "sent_to" out of the totals; return the bytes from each rank (row) to each other."""
    matrix = [[0] * len(totals) for _ in totals]
    for line, entry in zip(matrix, totals, strict=True):
        for peer, nbytes in entry.pop("sent_to").items():
            line[int(peer)] += nbytes
    return matrix


def _predicted_matrix(runs: PlanRuns, num_ranks: int) -> list[list[int]]:
    matrix = [[0] * num_ranks for _ in range(num_ranks)]
    for (_, committed), (plan, times) in runs.items():
        for sender, line in enumerate(bytes_matrix(plan, committed)):
            for receiver, nbytes in enumerate(line):
                matrix[sender][receiver] += nbytes * times
    return matrix


def _predicted_traffic(runs: PlanRuns, rank: int) -> dict[str, dict[str, int]]:
    """Return what a rank sends and receives in all runs, by axis and collective."""
    totals: Priced = {}
    for (_, committed), (plan, times) in runs.items():
        for key, counts in price_rank(plan, rank, committed).items():
            entry = totals.setdefault(key, dict.fromkeys(TRAFFIC_FIELDS, 0))
            for name, value in counts.items():
                entry[name] += value * times
    return {f"{axis} {collective}": counts for (axis, collective), counts in totals.items()}


def _predicted_memory(runs: PlanRuns, rank: int, setup: Setup, data_bytes: int) -> dict[str, Any]:
    """Return the peaks over all plans: of each category, and of the plan with the largest sum."""
    forecasts = [setup.forecast(plan, rank, data_bytes) for plan, _ in runs.values()]
    # The first of equals: `max` keeps it.
    worst = max(forecasts, key=lambda forecast: forecast.peak_total)
    return {
        "peak": {
            name: max(0, *(forecast.peak[name] for forecast in forecasts))
            for name in MEMORY_CATEGORIES
        },
        "peak_total": worst.peak_total,
        "at_peak": worst.at_peak,
        "peak_op": worst.peak_op,
    }
