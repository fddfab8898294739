"""Tiny jobs on threads for the tests of engine, memory and train.

`train` runs a whole job from a config; `run_engine` runs plans over rows chosen by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import mpisim
from mpisim.comm.local import LocalJob, run_threads
from mpisim.config import RunConfig, config_from_mapping
from mpisim.config.schema import OptimizerSection
from mpisim.engine.state import EngineState
from mpisim.engine.step import Engine
from mpisim.mesh import Mesh
from mpisim.nn.models import Model, build_mlp
from mpisim.nn.precision import Policy
from mpisim.plan.build import build_train_plan
from mpisim.plan.check import check_plan
from mpisim.trace.recorder import Recorder

TEXT = (b"the quick brown fox jumps over the lazy dog; " * 30)[:1200]


# --- whole jobs ------------------------------------------------------------------------------


def make_config(folder: Path, kind: str = "regression", **sections: dict[str, Any]) -> RunConfig:
    """Return a tiny config, changed by sections such as ``train={"steps": 3}``."""
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "runs"), "seed": 7},
        "data": {"kind": "regression", "num_rows": 300, "num_features": 3, "num_targets": 2},
        "model": {"hidden": [5], "activation": "tanh", "dtype": "float64"},
        "optimizer": {"kind": "sgd", "lr": 0.01},
        "train": {"steps": 4, "global_batch": 24},
        "comm": {"timeout_s": 20.0},
    }
    if kind == "text":
        path = folder / "text.txt"
        path.write_bytes(TEXT)
        values["data"] = {"kind": "text", "path": str(path), "window": 3}
        values["model"] |= {"embed_dim": 2}
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return config_from_mapping(values)


@dataclass
class Trained:
    """A finished job."""

    path: Path
    record: dict[str, Any]
    summary: dict[str, Any]
    params: dict[str, np.ndarray]
    """Rank 0's."""
    steps: list[dict[str, Any]]
    """Lines of metrics.jsonl with a loss."""
    evaluations: list[dict[str, Any]]
    """Its other lines."""

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.steps]

    @property
    def digests(self) -> set[str]:
        return {rank["params_sha256"] for rank in self.summary["ranks"]}


def train(config: RunConfig, ranks: int, *, overwrite: bool = True) -> Trained:
    """Run a job on threads and read back what it wrote."""
    result = mpisim.run(config, ranks=ranks, overwrite=overwrite, transport="local")
    lines = (result.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return Trained(
        result.path,
        result.record,
        result.summary,
        result.params,
        [row for row in rows if "loss" in row],
        [row for row in rows if "loss" not in row],
    )


# --- plans over chosen rows ------------------------------------------------------------------

Rows = tuple[np.ndarray, np.ndarray]


@dataclass
class Outcome:
    """What `run_engine` leaves, on rank 0; `states` of all ranks."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    grads: list[dict[str, np.ndarray]] = field(default_factory=list)
    """Per committed step, before clipping."""
    states: list[EngineState] = field(default_factory=list)

    @property
    def params(self) -> dict[str, np.ndarray]:
        return self.states[0].params


def linear_model(num_features: int = 1, num_targets: int = 1) -> Model:
    """Return a linear model with squared error: loss of a row with zero weights is target^2."""
    return build_mlp(
        input_kind="features", num_features=num_features, hidden=(), activation="relu",
        output=("targets", num_targets),
    )  # fmt: skip


def rows_of(targets: Sequence[float], features: Sequence[float] | None = None) -> Rows:
    """Return rows of one feature (0 by default) and one target."""
    x = np.zeros(len(targets)) if features is None else np.array(features, dtype=float)
    return x.reshape(-1, 1), np.array(targets, dtype=float).reshape(-1, 1)


def start_engine(
    model: Model,
    steps: Sequence[Sequence[Sequence[Rows]]],
    *,
    optimizer: OptimizerSection | None = None,
    start: dict[str, np.ndarray] | None = None,
    bucket_bytes: int = 1 << 20,
    overlap: bool = True,
    algorithm: str = "auto",
    seed: int = 0,
    synchronous: bool = False,
    prepare: Callable[[EngineState], None] = lambda state: None,
) -> tuple[LocalJob, Outcome]:
    """Train on ``steps[step][rank][micro]`` = (inputs, targets), one thread per rank.

    Parameters
    ----------
    start : dict, optional
        First parameters by name; by default those of `seed`.
    prepare : callable
        Called on every rank's state before the first step.
    """
    dp = len(steps[0])
    dtype = steps[0][0][0][0].dtype if model.input_kind == "features" else np.dtype("float64")
    plans = []
    for parts in steps:
        plans.append(
            build_train_plan(
                mesh=Mesh(dp=dp),
                specs=lambda rows, length: model.spec(rows, dtype, length),
                rows=tuple(tuple(len(x) for x, _ in micros) for micros in parts),
                dtype=dtype.name,
                itemsize=dtype.itemsize,
                bucket_bytes=bucket_bytes,
                overlap=overlap,
                algorithm=algorithm,
            )  # fmt: skip
        )
        check_plan(plans[-1])
    outcome = Outcome(states=[None] * dp)

    def body(transport):
        state = EngineState(
            model=model, mesh=Mesh(dp=dp), transport=transport,
            optimizer=optimizer or OptimizerSection(kind="sgd", lr=0.125, momentum=0.0),
            buckets=plans[0].buckets, seed=seed, policy=Policy(*[dtype.name] * 4),
            algorithm=algorithm, recorder=Recorder(), overlap=overlap,
        )  # fmt: skip
        outcome.states[transport.rank] = state
        for name, values in (start or {}).items():
            state.params[name][...] = values
        prepare(state)
        engine = Engine(state, len(steps))
        grads = []
        state.observe_gradients = grads.append
        for number, (plan, parts) in enumerate(zip(plans, steps, strict=True)):
            mine = parts[transport.rank]
            done = engine.train_step(
                plan, number, lambda micro, mine=mine: tuple(a.copy() for a in mine[micro])
            )
            if transport.rank == 0:
                outcome.losses.append(done.global_loss_sum / done.global_targets)
                outcome.norms.append(done.grad_norm)
                outcome.targets.append(done.global_targets)
                outcome.grads += grads
            grads.clear()

    job = run_threads(body, dp, timeout_s=20.0, synchronous=synchronous)
    return job, outcome


def run_engine(model: Model, steps: Sequence[Sequence[Sequence[Rows]]], **options: Any) -> Outcome:
    """As `start_engine`; raises what the first failed rank raised."""
    job, outcome = start_engine(model, steps, **options)
    for error in job.errors.values():
        raise error
    return outcome


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float) -> None:
    """Compare parameters by name: ``|got - want| <= tolerance * max(1, |want|)``."""
    assert got.keys() == want.keys()
    for name, right in want.items():
        assert got[name].shape == right.shape, name
        worst = np.max(np.abs(got[name] - right) / np.maximum(1.0, np.abs(right)), initial=0.0)
        assert worst <= tolerance, (name, worst)
