"""What a rank does from joining the job to its last message."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpisim
from mpisim.comm.communicator import check_drained
from mpisim.comm.emulated import EmulatedTransport
from mpisim.comm.transport import Transport
from mpisim.config.schema import RunConfig
from mpisim.data.batch import Batch
from mpisim.data.load import Dataset, load_data
from mpisim.data.sampler import Sampler, microbatch_bounds, shard_rows, spread_indices
from mpisim.engine.state import EngineState, StepState
from mpisim.engine.step import Engine
from mpisim.errors import CheckpointError, ConfigError, MemoryBudgetExceeded, MpisimError
from mpisim.launch import Job
from mpisim.layouts.metrics import MEMORY_CATEGORIES, METRIC_NAMES
from mpisim.memory.tracker import open_tracker, resident_bytes
from mpisim.plan.build import Plan
from mpisim.plan.schedules import BUILT_IN
from mpisim.plan.text import plan_text
from mpisim.trace.recorder import Recorder
from mpisim.train.calibrate import start_bottlenecks
from mpisim.train.clock import clock_offset_s, host_name
from mpisim.train.console import Console
from mpisim.train.excess import record_excess
from mpisim.train.fit import DRAWING, require_fit, sizes_of
from mpisim.train.record import run_record
from mpisim.train.rundir import check_run_dir, create_run_dir, run_dir_of, write_json
from mpisim.train.setup import Setup
from mpisim.train.start import Start, require_same_start
from mpisim.train.summary import (
    History,
    assert_replicas_equal,
    collect_totals,
    finite_or_none,
    write_summary,
    write_weights,
)


def train_rank(config: RunConfig, job: Job, *, overwrite: bool = False) -> None:
    """Do one rank's part of a run and declare it finished.

    Parameters
    ----------
    config : RunConfig
    job : Job
        Where this rank stands; `job.step` is kept up to date for failure messages.
    overwrite : bool
        Replace an earlier run of the same name.

    Raises
    ------
    ConfigError
        Before any step: the layout, the data or the run directory breaks a rule.
    MpisimError
        During the run: see `mpisim.errors`.
    """
    setup = Setup(config, job.size)
    # What a user's schedule gets wrong is refused before anything else.
    setup.full_plan()
    transport = job.connect(
        timeout_s=config.comm.timeout_s, synchronous=config.comm.synchronous_sends
    )
    train_on(transport, setup, job, overwrite)
    job.finish()


def train_on(
    transport: Transport, setup: Setup, job: Job, overwrite: bool
) -> tuple[EngineState, dict[str, np.ndarray]]:
    """Train over a connected transport; returns this rank's final state, and the parameters.

    The parameters are those of the rank's stage, complete on the first rank of axis dp.
    """
    config = setup.config
    setup.full_plan()
    require_fit(setup)
    # Before the first message, so that no rank waits in one while another compiles.
    setup.kernels()
    transport = over_cluster(transport, setup.config)
    resident_start = resident_bytes()
    tracker = open_tracker(config.memory.measure)
    try:
        data = load_data(config)
        sizes = sizes_of(config, data)
        require_fit(setup, sizes, with_data=True)
        sampler = Sampler(data.num_train, config.train.global_batch, config.run.seed)
        run_dir, start = _agree_and_create(transport, setup, data, overwrite)
        offset = clock_offset_s(transport)
        recorder = Recorder(
            run_dir / "trace" / f"rank-{transport.rank:04d}.bin" if config.trace.enabled else None,
            {
                "rank": transport.rank,
                "ranks": transport.size,
                "host": host_name(),
                "clock_offset_s": offset,
                "memory_categories": list(MEMORY_CATEGORIES),
            },
        )
        try:
            # Before the budget holds: figures about the data are no part of the training.
            history = History(data.baselines() if transport.rank == 0 else {})
            with contextlib.closing(start):
                state = setup.build_state(transport, recorder, data.nbytes, tracker, start.fill)
            if start.digest:
                require_same_start(transport, state)
            trainer = _Trainer(transport, setup, job, data, sampler, state, run_dir, history)
            trainer.resident_start_bytes = resident_start
            trainer.has_bottlenecks = start.has_bottlenecks
            try:
                trainer.run()
            finally:
                trainer.close()
            # The budget ends here: summing up gathers what was shared out.
            tracker.close()
            check_drained(transport, state.communicators)
            trainer.sum_up()
        except MemoryBudgetExceeded as error:
            raise record_excess(run_dir, setup, job, sizes, error) from error
        finally:
            # Also of a rank that fails: what it has recorded is complete and readable.
            recorder.close()
    finally:
        tracker.close()
    for communicator in state.communicators:
        communicator.close()
    transport.barrier()
    return state, trainer.params


def over_cluster(transport: Transport, config: RunConfig) -> Transport:
    """Return the transport over emulated links, if the config asks for them or for sleep."""
    cluster = config.cluster
    if config.compute.mode == "real" and not (cluster.latency_s or cluster.bytes_per_s):
        return transport
    return EmulatedTransport(
        transport, cluster.latency_s, cluster.bytes_per_s,
        synchronous=config.comm.synchronous_sends,
    )  # fmt: skip


class _Trainer:
    """The loop over steps of one rank."""

    def __init__(
        self,
        transport: Transport,
        setup: Setup,
        job: Job,
        data: Dataset,
        sampler: Sampler,
        state: EngineState,
        run_dir: Path,
        history: History,
    ) -> None:
        self.transport, self.setup, self.job = transport, setup, job
        self.config = setup.config
        self.data, self.sampler, self.state = data, sampler, state
        self.run_dir = run_dir
        self.engine = Engine(state, self.config.train.steps, self._predict_temps)
        self.is_root = transport.rank == 0
        self._num_heldout_bytes: int | None = None
        self.history = history
        self.console = Console(self.config, job, data.primary_baseline) if self.is_root else None
        self.metrics_file = None
        self.params: dict[str, np.ndarray] = {}
        self.resident_start_bytes: int | None = None
        self.has_bottlenecks = False
        """The weights that the run starts from have bottlenecks already."""
        if self.is_root:
            self.metrics_file = open(run_dir / "metrics.jsonl", "w", encoding="utf-8")

    def run(self) -> None:
        """Make all steps and evaluations.

        Raises
        ------
        MemoryBudgetExceeded
            An allocation would have passed the budget, in an op or between two plans.
        """
        try:
            self._run()
        except MemoryError as error:
            exceeded = self.state.watch.explained(error)
            raise exceeded from exceeded.__cause__

    def _run(self) -> None:
        steps, every = self.config.train.steps, self.config.train.eval_every
        if self.console is not None:
            self.console.start(self.history.baselines, self.data.record(), self.setup)
        self._compare_before()
        before = time.perf_counter()
        for step in range(steps):
            self.job.step = step
            current = self._step(step)
            now = time.perf_counter()
            if self.is_root:
                with self.state.watch.tracker.aside():
                    self._log(current, now - before)
            before = now
            if (every and (step + 1) % every == 0) or step == steps - 1:
                self._evaluate(step)
                before = time.perf_counter()
        if self.setup.compresses and self.history.evaluations:
            self._note_pass("trained", self.history.evaluations[-1])

    def _compare_before(self) -> None:
        """Start the bottlenecks, and evaluate without compressors and with them, untrained."""
        setup = self.setup
        if not setup.compresses:
            return
        if setup.config.compute.mode == "real":
            self._note_pass("base", self._measure_heldout(None, base=True))
        if setup.config.compression.bottleneck and not self.has_bottlenecks:
            start_bottlenecks(self.transport, setup, self.state, self._run_base)
        if setup.config.compute.mode == "real":
            self._note_pass("calibrated", self._measure_heldout(None))

    def _note_pass(self, name: str, result: dict[str, Any] | None) -> None:
        if result is None:
            return
        result = {"pass": name} | {key: value for key, value in result.items() if key != "step"}
        self.history.passes.append(result)
        if self.is_root:
            self.console.passed(result)

    def _run_base(self, note: Callable[[int, Batch], None]) -> None:
        """Run the model without compressors over the first training rows (`start_bottlenecks`)."""
        width = self.config.data.window if self.setup.model.has_token_targets else 1
        rows = -(-self.config.compression.calibration_tokens // width)
        rows = min(max(rows, self.setup.mesh.dp), self.data.num_train)
        plan = self.setup.eval_plan(rows, base=True)
        numbers = itertools.count()

        def load(indices: np.ndarray) -> Batch:
            batch = Batch(*self.data.train_batch(indices))
            if self.config.model.kind == "decoder" and self.config.data.layout == "padded":
                note(next(numbers), batch)
            return batch

        self._run_forward(plan, rows, 0, np.arange, load)

    def _predict_temps(self, plan: Plan) -> list[int]:
        return self.setup.forecast(plan, self.transport.rank, self.data.nbytes).op_temps

    def close(self) -> None:
        """Close what rank 0 writes to while it trains; also after a failure."""
        if self.is_root:
            self.metrics_file.close()
            self.console.finish()

    def _step(self, step: int) -> StepState:
        plan = self.setup.train_plan(self.sampler.num_rows(step))
        lo, hi = self._my_rows(self.sampler.num_rows(step))
        self.state.watch.begin(DRAWING)
        indices = self.sampler.batch_indices(step, lo, hi)
        bounds = microbatch_bounds(0, hi - lo, self.config.train.num_microbatches)
        self.state.ledger.hold("data", indices)
        current = self.engine.train_step(
            plan, step, lambda m: self.data.train_batch(indices[bounds[m] : bounds[m + 1]]),
            self.data.count_targets("train", indices),
        )  # fmt: skip
        self.state.ledger.drop(indices)
        self.history.count_run(plan, not current.skipped)
        return current

    def _evaluate(self, step: int) -> None:
        result = self._measure_heldout(step)
        if result is None:
            return
        self.history.evaluations.append(result)
        if self.is_root:
            self.metrics_file.write(json.dumps(result) + "\n")
            self.metrics_file.flush()
            self.console.evaluated(result, self.history.baselines)

    def _run_forward(
        self,
        plan: Plan,
        num_rows: int,
        step: int,
        choose: Callable[[int, int], np.ndarray],
        load: Callable[[np.ndarray], Batch],
    ) -> StepState:
        """Run a forward-only plan over rows; ``choose(lo, hi)`` gives the numbers of a replica's.

        ``load(numbers)`` gives the rows themselves.
        """
        lo, hi = self._my_rows(num_rows)
        self.state.watch.begin(DRAWING)
        indices = choose(lo, hi)
        self.state.ledger.hold("data", indices)
        rows = plan.rows[self.transport.rank]
        bounds = microbatch_bounds(0, hi - lo, len(rows))
        current = self.engine.evaluate(
            plan, step, lambda m: load(indices[bounds[m] : bounds[m + 1]])
        )
        self.state.ledger.drop(indices)
        self.history.count_run(plan)
        return current

    def _measure_heldout(self, step: int | None, base: bool = False) -> dict[str, Any] | None:
        """Evaluate the held-out rows, with what compresses or without; None if there are none.

        `step` None: before the first step.
        """
        num_rows = min(self.config.train.eval_rows or self.data.num_heldout, self.data.num_heldout)
        if not num_rows:
            return None
        current = self._run_forward(
            self.setup.eval_plan(num_rows, base), num_rows, step or 0,
            lambda lo, hi: spread_indices(self.data.num_heldout, num_rows, lo, hi),
            self.data.heldout_batch,
        )  # fmt: skip
        if not math.isfinite(current.global_loss_sum):
            when = "before the first step" if step is None else f"after step {step}"
            raise MpisimError(
                f"the held-out loss must be finite; got a sum of {current.global_loss_sum} {when}. "
                f"Lower optimizer.lr or set optimizer.clip_norm."
            )
        loss = current.global_loss_sum / current.global_targets
        result = {
            "step": step,
            "heldout_loss": loss,
            "heldout_rows": num_rows,
            "heldout_targets": current.global_targets,
        }
        if self.config.data.kind != "regression":
            result["heldout_top1"] = current.global_correct / current.global_targets
            # Beyond that a float has no value for it; the loss says enough.
            result["heldout_perplexity"] = math.exp(min(loss, 700.0))
            if num_bytes := self._heldout_bytes(num_rows):
                nats_per_byte = current.global_loss_sum / num_bytes
                result["heldout_bits_per_byte"] = nats_per_byte / math.log(2.0)
        return result

    def _heldout_bytes(self, num_rows: int) -> int:
        """Return the evaluated targets that are bytes; every evaluation has the same rows."""
        if self._num_heldout_bytes is None:
            with self.state.watch.tracker.aside():
                indices = spread_indices(self.data.num_heldout, num_rows)
                self._num_heldout_bytes = self.data.count_bytes("heldout", indices)
        return self._num_heldout_bytes

    def _my_rows(self, num_rows: int) -> tuple[int, int]:
        mesh = self.setup.mesh
        return shard_rows(num_rows, mesh.dp, mesh.coordinate(self.transport.rank)["dp"])

    def _log(self, current: StepState, step_s: float) -> None:
        loss = current.global_loss_sum / current.global_targets
        if current.step == 0:
            self.history.first_loss = loss
        self.history.last_loss = loss
        values = current.metrics
        spread = np.stack([values[0], values.min(0), values.mean(0), values.max(0)], axis=1)
        row: dict[str, Any] = {
            "step": current.step,
            "loss": finite_or_none(loss),
            "lr": current.lr,
            "grad_norm": finite_or_none(current.grad_norm),
            "rows": self.sampler.num_rows(current.step),
            "targets": current.global_targets,
            "loss_scale": current.loss_scale,
            "skipped": current.skipped,
            "step_s": step_s,
            "tokens_per_s": current.global_targets / step_s,
            # Per figure: rank 0, then least, mean and largest over ranks.
            "ranks": dict(zip(METRIC_NAMES, spread.tolist(), strict=True)),
        }
        self.metrics_file.write(json.dumps(row, allow_nan=False) + "\n")
        self.metrics_file.flush()
        self.console.step(row)

    def sum_up(self) -> None:
        """Write the summary and compare the replicas; all ranks call it."""
        totals, self.params = collect_totals(self.transport, self.state, self.resident_start_bytes)
        if self.is_root:
            write_summary(
                self.run_dir, totals, self.history,
                setup=self.setup, data=self.data, state=self.state,
            )  # fmt: skip
        # Last, so that a disk that is full by now costs the weights and not the figures, too.
        write_weights(self.run_dir, self.transport, self.setup, self.state, self.params)
        if self.is_root:
            self.console.summary(self.run_dir, totals)
            assert_replicas_equal(totals)


def _agree_and_create(
    transport: Transport, setup: Setup, data: Dataset, overwrite: bool
) -> tuple[Path, Start]:
    """Compare what all ranks are about to do, then let rank 0 create the run directory.

    Returns it, and the weights to start from, opened.
    """
    start: Start | None = None
    error: MpisimError | None = None
    try:
        if transport.rank == 0:
            check_run_dir(setup.config, overwrite)
        # Before anything is replaced; a file may be damaged for one stage only.
        start = Start(setup, transport.rank)
    except MpisimError as refused:
        error = refused
    try:
        digest = start.digest if start is not None else ""
        run_dir = _agree(transport, setup, data, overwrite, digest, error)
        assert start is not None
        return run_dir, start
    except BaseException:
        if start is not None:
            start.close()
        raise


def _agree(
    transport: Transport,
    setup: Setup,
    data: Dataset,
    overwrite: bool,
    start_digest: str,
    error: MpisimError | None,
) -> Path:
    config = setup.config
    order = [[p.name, list(p.shape), config.model.dtype] for p in setup.model.param_specs()]
    mine = {
        "config": hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16],
        "data": str(data.record().get("sha256", ""))[:16],
        "extensions": hashlib.sha256(json.dumps(setup.extensions).encode()).hexdigest()[:16],
        "weights to start from": start_digest[:16],
        "plan": _plan_digest(setup),
        "parameter order": hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16],
        "mpisim version": mpisim.__version__,
        "NumPy version": np.__version__,
    }
    run_dir = run_dir_of(config).absolute()
    refusal = [type(error).__name__, str(error)] if error is not None else None
    texts = transport.exchange(json.dumps([mine, refusal, str(run_dir), host_name()]))
    told = [json.loads(text) for text in texts]
    for _, refused, *_ in told:
        if refused:
            kind = CheckpointError if refused[0] == CheckpointError.__name__ else ConfigError
            raise kind(refused[1])
    for rank, (theirs, *_) in enumerate(told):
        for what, value in theirs.items():
            if value != told[0][0][what]:
                raise ConfigError(
                    f"all ranks must have the same {what}; got {told[0][0][what]} on rank 0 and "
                    f"{value} on rank {rank} ({told[rank][3]}). Give every host the same files."
                )
    run_dir = Path(told[0][2])
    failed = ""
    if transport.rank == 0:
        try:
            # First all that can fail: creating the directory deletes an earlier run.
            hosts = [entry[3] for entry in told]
            record = run_record(setup, transport, data, hosts, start_digest)
            create_run_dir(run_dir, overwrite)
            write_json(run_dir / "run.json", record)
        except (ConfigError, OSError) as refused:
            failed = str(refused)
    failed = transport.exchange(failed)[0]
    if failed:
        raise ConfigError(failed)
    # On another host without a shared file system a rank keeps its trace in a folder of its own.
    (run_dir / "trace").mkdir(parents=True, exist_ok=True)
    return run_dir


def _plan_digest(setup: Setup) -> str:
    """Return a digest of the plan that a user's schedule makes: it may differ from rank to rank."""
    if setup.config.parallel.schedule in BUILT_IN:
        return ""
    return hashlib.sha256(plan_text(setup.full_plan()).encode()).hexdigest()[:16]
