"""Tiny jobs on threads for the tests of engine, memory and train.

`train` runs a whole job from a config; `run_engine` runs plans over rows chosen by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import mpisim
from mpisim.comm.local import LocalJob, run_threads
from mpisim.config import RunConfig, config_from_mapping
from mpisim.config.schema import OptimizerSection
from mpisim.data.batch import IGNORED, Batch
from mpisim.data.sampler import microbatch_bounds, shard_rows
from mpisim.engine.loss_scale import LossScale
from mpisim.engine.state import EngineState, StepState
from mpisim.engine.step import Engine
from mpisim.mesh import Mesh
from mpisim.nn.decoder import build_decoder
from mpisim.nn.models import Model, build_mlp
from mpisim.nn.precision import Policy
from mpisim.plan.build import Pipeline, Plan, build_train_plan
from mpisim.plan.check import check_plan
from mpisim.plan.ops import Backward, Op
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

Rows = tuple[np.ndarray, ...]
"""A `Batch`, or plain (inputs, targets)."""
Steps = Sequence[Sequence[Sequence[Rows]]]
"""``steps[step][rank][micro]``."""

FLOAT64 = Policy(*["float64"] * 4)


@dataclass
class Outcome:
    """What `run_engine` leaves, on rank 0; `states` and `done` of all ranks."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    grads: list[dict[str, np.ndarray]] = field(default_factory=list)
    """Per committed step, before clipping."""
    rank_grads: list[list[dict[str, np.ndarray]]] = field(default_factory=list)
    """The same of every rank: those of its stage."""
    states: list[EngineState] = field(default_factory=list)
    done: list[list[StepState]] = field(default_factory=list)
    """Per rank and step."""
    gathered: list[dict[str, np.ndarray]] = field(default_factory=list)
    """All parameters as every rank gathers them at the end."""
    plans: list[Plan] = field(default_factory=list)
    """Of every step."""

    @property
    def params(self) -> dict[str, np.ndarray]:
        return self.states[0].params

    @property
    def master(self) -> dict[str, np.ndarray]:
        return self.states[0].master


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


VOCAB, LENGTH = 13, 6


def small_decoder(dropout: float = 0.0, **sizes: Any) -> Model:
    """Return a tied decoder with grouped heads and three blocks, so that a segment can be short."""
    values = {
        "vocab_size": VOCAB, "d_model": 8, "num_blocks": 3, "num_heads": 2, "num_kv_heads": 1,
        "d_ff": 8, "tied": True, "max_len": LENGTH, "dropout": dropout,
    } | sizes  # fmt: skip
    return build_decoder(**values)


def packed_rows(count: int, seed: int, length: int = LENGTH) -> Batch:
    """Return rows of several documents each: the last token of a document predicts nothing."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, VOCAB, (count, length)).astype(np.int32)
    targets = rng.integers(0, VOCAB, (count, length)).astype(np.int32)
    begins = rng.random((count, length)) < 0.3
    begins[:, 0] = True
    starts = np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1)
    targets[:, :-1][begins[:, 1:]] = IGNORED
    return Batch(x, targets, starts.astype(np.int32))


def cut(batch: Rows, ranks: int, micros: int) -> list[list[Rows]]:
    """Cut rows as a run does: evenly over ranks, then over microbatches; some may get none."""
    parts = []
    for rank in range(ranks):
        bounds = microbatch_bounds(*shard_rows(len(batch[0]), ranks, rank), micros)
        parts.append(
            [
                type(batch)(*(None if a is None else a[lo:hi] for a in batch))
                if isinstance(batch, Batch)
                else tuple(a[lo:hi] for a in batch)
                for lo, hi in zip(bounds, bounds[1:], strict=False)
            ]
        )
    return parts


def make_plans(
    model: Model,
    steps: Steps,
    *,
    policy: Policy = FLOAT64,
    bucket_bytes: int = 1 << 20,
    overlap: bool = True,
    algorithm: str = "auto",
    recompute: str = "none",
    every: int = 1,
    zero: int = 0,
    prefetch: bool = False,
    pp: int = 1,
    schedule: str = "1f1b",
    chunks: int = 1,
    codecs: tuple[str, str] = ("none", "none"),
) -> list[Plan]:
    """Return the checked plan of every step; those of one shape are the same object.

    With `pp` stages ``steps[step][rank]`` are the rows of replica `rank`.
    """
    pipeline = make_pipeline(model, pp, schedule, chunks, codecs)
    known: dict[tuple, Plan] = {}
    plans = []
    for parts in steps:
        every_rank = [micros for micros in parts for _ in range(pp)]
        rows = tuple(tuple(len(batch[0]) for batch in micros) for micros in every_rank)
        lengths = ()
        if model.has_token_targets:
            lengths = tuple(tuple(batch[0].shape[1] for batch in micros) for micros in every_rank)
            if set(sum(lengths, ())) == {model.input_width}:
                lengths = ()
        if (rows, lengths) not in known:
            known[rows, lengths] = build_train_plan(
                mesh=Mesh(dp=len(parts), pp=pp),
                specs=lambda rows, length: model.spec(rows, policy.compute_dtype, length),
                rows=rows, lengths=lengths, dtype=policy.wire,
                itemsize=policy.reduce_dtype.itemsize, bucket_bytes=bucket_bytes,
                overlap=overlap, algorithm=algorithm, recompute=recompute, recompute_every=every,
                zero=zero, prefetch=prefetch, param_dtype=policy.compute, pipeline=pipeline,
                reduce_dtype=policy.reduce,
            )  # fmt: skip
            check_plan(known[rows, lengths])
        plans.append(known[rows, lengths])
    return plans


def make_pipeline(
    model: Model, pp: int, schedule: str, chunks: int, codecs: tuple[str, str]
) -> Pipeline:
    """Return stages of equally many blocks, or nearly: the first ones get more."""
    names = [block.name for block in model.blocks]
    if pp == 1:
        return Pipeline((), schedule)
    bounds = microbatch_bounds(0, len(names), pp * chunks)
    stages = tuple(tuple(names[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))
    return Pipeline(stages, schedule, *codecs)


def num_targets(parts: Sequence[Rows]) -> int:
    return sum(Batch(*batch).num_targets for batch in parts)


def make_state(
    transport: Any,
    model: Model,
    plan: Plan,
    *,
    policy: Policy = FLOAT64,
    optimizer: OptimizerSection | None = None,
    start: dict[str, np.ndarray] | None = None,
    overlap: bool = True,
    seed: int = 0,
    loss_scale: LossScale | None = None,
) -> EngineState:
    """Return a rank's state for a plan; `loss_scale` is copied."""
    state = EngineState(
        model=model, mesh=plan.mesh, transport=transport,
        optimizer=optimizer or OptimizerSection(kind="sgd", lr=0.125, momentum=0.0),
        buckets=plan.buckets, seed=seed, policy=policy, algorithm=plan.algorithm,
        recorder=Recorder(), overlap=overlap, zero=plan.zero,
        loss_scale=None if loss_scale is None else replace(loss_scale),
        blocks=plan.rank_blocks(transport.rank),
    )  # fmt: skip
    set_weights(state, start or {})
    return state


def set_weights(state: EngineState, start: dict[str, np.ndarray]) -> None:
    """Write parameters into whatever part of them the rank keeps."""
    for store in state.stores:
        for piece in store.pieces:
            if piece.name in start:
                values = np.broadcast_to(start[piece.name], store.shapes[piece.name]).reshape(-1)
                count = piece.hi - piece.lo
                store.master[piece.lo : piece.hi] = values[piece.start : piece.start + count]
        if store.policy.has_master:
            store.own_working[...] = store.master.astype(store.policy.compute_dtype)
        if store.zero < 3:
            for name, view in store.views(store.working).items():
                if name in start:
                    view[...] = np.asarray(start[name]).astype(store.policy.compute_dtype)


def start_engine(
    model: Model,
    steps: Steps,
    *,
    policy: Policy | None = None,
    optimizer: OptimizerSection | None = None,
    start: dict[str, np.ndarray] | None = None,
    bucket_bytes: int = 1 << 20,
    overlap: bool = True,
    algorithm: str = "auto",
    recompute: str = "none",
    every: int = 1,
    zero: int = 0,
    prefetch: bool = False,
    pp: int = 1,
    schedule: str = "1f1b",
    chunks: int = 1,
    codecs: tuple[str, str] = ("none", "none"),
    seed: int = 0,
    synchronous: bool = False,
    loss_scale: LossScale | None = None,
    total_steps: int | None = None,
    prepare: Callable[[EngineState], None] = lambda state: None,
) -> tuple[LocalJob, Outcome]:
    """Train on ``steps[step][replica][micro]``, one thread per rank.

    Parameters
    ----------
    policy : Policy, optional
        By default the dtype of the inputs everywhere, float64 for tokens.
    start : dict, optional
        First parameters by name; by default those of `seed`.
    total_steps : int, optional
        Of the learning-rate schedule; by default the number of steps.
    prepare : callable
        Called on every rank's state before the first step.
    """
    size = len(steps[0]) * pp
    if policy is None:
        dtype = steps[0][0][0][0].dtype
        policy = Policy(*[dtype.name] * 4) if model.input_kind == "features" else FLOAT64
    plans = make_plans(
        model, steps, policy=policy, bucket_bytes=bucket_bytes, overlap=overlap,
        algorithm=algorithm, recompute=recompute, every=every, zero=zero, prefetch=prefetch,
        pp=pp, schedule=schedule, chunks=chunks, codecs=codecs,
    )  # fmt: skip
    outcome = Outcome(states=[None] * size, done=[[] for _ in range(size)], plans=plans)
    outcome.rank_grads = [[] for _ in range(size)]
    gathered: list[dict[str, np.ndarray]] = [{} for _ in range(size)]

    def body(transport):
        state = make_state(
            transport, model, plans[0], policy=policy, optimizer=optimizer, start=start,
            overlap=overlap, seed=seed, loss_scale=loss_scale,
        )  # fmt: skip
        outcome.states[transport.rank] = state
        prepare(state)
        engine = Engine(state, total_steps or len(steps))
        grads = []
        state.observe_gradients = grads.append
        for number, (plan, parts) in enumerate(zip(plans, steps, strict=True)):
            mine = parts[transport.rank // pp]
            done = engine.train_step(plan, number, copies(mine), num_targets(mine))
            outcome.done[transport.rank].append(done)
            if transport.rank == 0:
                outcome.losses.append(done.global_loss_sum / done.global_targets)
                outcome.norms.append(done.grad_norm)
                outcome.targets.append(done.global_targets)
                outcome.grads += grads
            outcome.rank_grads[transport.rank] += grads
            grads.clear()
        for store in state.stores:
            gathered[transport.rank] |= store.views(store.gather_master())

    job = run_threads(body, size, timeout_s=20.0, synchronous=synchronous)
    outcome.gathered = gathered
    return job, outcome


def copies(parts: Sequence[Rows]) -> Callable[[int], Rows]:
    """Return what loads a microbatch: copies, so that a step cannot change another's rows."""
    return lambda micro: tuple(None if a is None else a.copy() for a in parts[micro])


def run_engine(model: Model, steps: Steps, **options: Any) -> Outcome:
    """As `start_engine`; raises what the first failed rank raised."""
    job, outcome = start_engine(model, steps, **options)
    for error in job.errors.values():
        raise error
    return outcome


def after_backward(
    state: EngineState, micro: int, act: Callable[[EngineState], None], *, step: int | None = None
) -> None:
    """Call ``act(state)`` right after the last backward op of a microbatch (of one step only)."""
    before = state.observe_op

    def observe(op: Op) -> None:
        if before is not None:
            before(op)
        wanted = step is None or state.step.step == step
        if wanted and op == Backward(state.first, micro):
            act(state)

    state.observe_op = observe


def snapshot(state: EngineState) -> dict[str, Any]:
    """Return copies of all that a failed update must leave alone."""
    return {
        "params": {name: a.tobytes() for name, a in state.params.items()},
        "master": {name: a.tobytes() for name, a in state.master.items()},
        "moments": {name: [a.tobytes() for a in m] for name, m in state.moments.items()},
        "committed": state.committed,
        "loss_scale": replace(state.loss_scale),
        "live": dict(state.ledger.live),
    }


def bits_of(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def gradients_are_zero(state: EngineState) -> bool:
    return not any(bucket.any() for bucket in state.buckets)


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float) -> None:
    """Compare parameters by name: ``|got - want| <= tolerance * max(1, |want|)``."""
    assert got.keys() == want.keys()
    for name, right in want.items():
        assert got[name].shape == right.shape, name
        worst = np.max(np.abs(got[name] - right) / np.maximum(1.0, np.abs(right)), initial=0.0)
        assert worst <= tolerance, (name, worst)
