"""A run directory read into plain data; a killed run's is read as far as it goes.

`train/rundir.py` says what the files hold. No NumPy here: `mpisim report` answers in 0.3 s.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisim.errors import CheckpointError

_SUMMARY_KEYS = ("ranks", "bytes_matrix", "predicted_bytes_matrix")


@dataclass(frozen=True)
class Run:
    """The files of one run directory, parsed."""

    path: Path
    record: dict[str, Any]
    """run.json."""
    steps: list[dict[str, Any]]
    """Lines of metrics.jsonl about a step, in order."""
    evaluations: list[dict[str, Any]]
    """Lines of metrics.jsonl about a held-out evaluation, in order."""
    summary: dict[str, Any] | None
    """summary.json; None while the run goes on, or if it was cut short."""
    damaged_lines: int
    """Lines of metrics.jsonl that are incomplete or no JSON; they are left out."""

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config, as plain data."""
        return self.record.get("config", {})

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return int(self.record["ranks"])

    @property
    def warmup_steps(self) -> int:
        """First steps that throughput and latency leave out, as configured."""
        return int(self.config.get("train", {}).get("warmup_report_steps", 0))

    def steady_steps(self) -> tuple[list[dict[str, Any]], int]:
        """Return the steps after warm-up and how many were left out.

        A run that is no longer than its warm-up has no such steps: then all are returned, and 0.
        """
        steady = [row for row in self.steps if row["step"] >= self.warmup_steps]
        if steady:
            return steady, len(self.steps) - len(steady)
        return self.steps, 0


@dataclass(frozen=True)
class Layout:
    """How a run was laid out, as its record says; a run without stages has one."""

    dp: int
    pp: int
    """Places on axis pp. A place holds `chunks` stages of the model."""
    schedule: str
    chunks: int
    num_microbatches: int
    activation_codec: str
    grad_codec: str

    def stage_of(self, rank: int) -> int:
        """Return a rank's place on axis pp."""
        return rank % self.pp


def layout_of(run: Run) -> Layout:
    """Return the layout of a run; what a run of an earlier version does not say is 1, or none."""
    mesh, config = run.record.get("mesh") or {}, run.config
    parallel, codecs = config.get("parallel") or {}, config.get("compression") or {}
    pp = int(mesh.get("pp") or 1)
    pp = pp if pp > 0 and run.num_ranks % pp == 0 else 1
    return Layout(
        dp=int(mesh.get("dp") or run.num_ranks // pp),
        pp=pp,
        schedule=str(parallel.get("schedule", "1f1b")),
        chunks=int(parallel.get("chunks") or 1),
        num_microbatches=int((config.get("train") or {}).get("num_microbatches") or 1),
        activation_codec=str(codecs.get("activations", "none")),
        grad_codec=str(codecs.get("grads", "none")),
    )


def load_run(run_dir: Path | str) -> Run:
    """Read a run directory.

    Parameters
    ----------
    run_dir : Path or str

    Returns
    -------
    Run

    Raises
    ------
    CheckpointError
        There is no run.json, or run.json or summary.json cannot be read. Damaged lines of
        metrics.jsonl are counted and left out.
    """
    path = Path(run_dir)
    if not (path / "run.json").is_file():
        got = "one without run.json" if path.is_dir() else "no such directory"
        raise CheckpointError(
            f"{path} must be a run directory; got {got}. Name one that `mpisim train` wrote, like "
            f"runs/NAME."
        )
    record = _read_object(path / "run.json")
    ranks = record.get("ranks")
    if not isinstance(ranks, int) or ranks < 1:
        raise CheckpointError(
            f"run.json must say how many ranks the run has; got {ranks!r} in {path}. Run the job "
            f"again."
        )
    steps, evaluations, damaged = _read_metrics(path / "metrics.jsonl")
    summary = None
    if (path / "summary.json").is_file():
        summary = _read_object(path / "summary.json")
        missing = [key for key in _SUMMARY_KEYS if key not in summary]
        if missing:
            raise CheckpointError(
                f"summary.json must hold {', '.join(_SUMMARY_KEYS)}; got none of {missing} in "
                f"{path}. Run the job again with this version of mpisim."
            )
    return Run(
        path=path,
        record=record,
        steps=steps,
        evaluations=evaluations,
        summary=summary,
        damaged_lines=damaged,
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} must be readable; got {error.strerror}. Check its permissions."
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{path.name} must be JSON; got {path}: {error}. Run the job again."
        ) from None
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{path.name} must be a JSON object; got a {type(data).__name__} in {path}. Run the "
            f"job again."
        )
    return data


def _read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    try:
        # A killed writer may leave half a character behind.
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], [], 0
    except OSError as error:
        raise CheckpointError(
            f"{path} must be readable; got {error.strerror}. Check its permissions."
        ) from None
    steps, evaluations, damaged = [], [], 0
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            kind = evaluations if "heldout_loss" in row else steps
            needed = ("step",) if kind is evaluations else ("step", "loss", "rows", "step_s")
            if any(key not in row for key in needed):
                raise ValueError("a key is missing")
            for key in ("loss", "grad_norm"):
                # JSON has no NaN: null stands for a number that is not finite (a skipped step).
                if key in row and row[key] is None:
                    row[key] = math.nan
        except (ValueError, TypeError):
            damaged += 1
            continue
        kind.append(row)
    return steps, evaluations, damaged
