"""From a config to a model, a mesh and plans; and the static check of `mpisim check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mpisim.comm.transport import Transport
from mpisim.config.effects import settings_without_effect
from mpisim.config.schema import RunConfig
from mpisim.cost.price import MESSAGES, Priced, message_bytes, price_rank
from mpisim.data.footprint import held_batch_bytes, sampling_bytes
from mpisim.data.load import check_data_section
from mpisim.data.sampler import microbatch_bounds, shard_rows
from mpisim.data.tokenizer import VOCAB_SIZE
from mpisim.engine.buckets import FillParam
from mpisim.engine.emulate import EmulatedBlock
from mpisim.engine.loss_scale import LossScale
from mpisim.engine.state import SCRATCH_BYTES, EngineState, num_optimizer_arrays
from mpisim.engine.working import engine_working
from mpisim.errors import ConfigError, PlanError
from mpisim.layouts.specs import BlockSpec, Conditions
from mpisim.memory.tracker import Tracker
from mpisim.mesh import build_mesh
from mpisim.nn.blocks import Block
from mpisim.nn.decoder import build_decoder
from mpisim.nn.kernels import Kernels, prepare_kernels, resolve_kernels
from mpisim.nn.models import Model, build_mlp
from mpisim.nn.precision import loss_scale_kind, policy_of
from mpisim.plan.build import Pipeline, Plan, build_eval_plan, build_train_plan
from mpisim.plan.check import check_plan
from mpisim.plan.forecast import Itemsizes, MemoryForecast, predict_memory
from mpisim.plan.ops import SendGrad
from mpisim.plan.schedules import BUILT_IN
from mpisim.trace.recorder import Recorder
from mpisim.train.extensions import MODELS, load_extensions, require_names
from mpisim.train.pipeline import build_pipeline, with_bottlenecks
from mpisim.units import format_bytes

EVAL_ROWS_PER_FORWARD = 1024
"""Rows of one forward of an evaluation, at most; more are cut into several."""
EVAL_TOKENS_PER_FORWARD = 4096
"""Tokens of one forward of a decoder's evaluation, at most, if one row is not longer."""


def build_model(config: RunConfig) -> Model:
    """Return the model that a config describes."""
    require_names(config)
    data, model = config.data, config.model
    if model.kind in MODELS:
        try:
            built = MODELS[model.kind](config)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            built = f"{type(error).__name__}: {error}"
        if not isinstance(built, Model):
            raise ConfigError(
                f"the builder of model.kind = {model.kind!r} must return a Model; got {built}. "
                f"Correct it."
            )
        return built
    if model.kind == "decoder":
        max_len = model.max_len or data.window
        if data.window > max_len:
            raise ConfigError(
                f"data.window must be at most model.max_len; got {data.window} with "
                f"{max_len}. Lower data.window, or set model.max_len = 0."
            )
        decoder = build_decoder(
            vocab_size=model.vocab_size or VOCAB_SIZE, d_model=model.d_model,
            num_blocks=model.num_blocks, num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads, d_ff=model.d_ff, tied=model.tied, max_len=max_len,
            rope_theta=model.rope_theta, norm_eps=model.norm_eps, dropout=model.dropout,
            loss_chunk_tokens=model.loss_chunk_tokens,
        )  # fmt: skip
        return replace(decoder, input_width=data.window)
    if data.kind == "regression":
        return build_mlp(
            input_kind="features", num_features=data.num_features, hidden=model.hidden,
            activation=model.activation, output=("targets", data.num_targets),
        )  # fmt: skip
    return build_mlp(
        input_kind="tokens", window=data.window, vocab_size=256, embed_dim=model.embed_dim,
        hidden=model.hidden, activation=model.activation, output=("classes", 256),
    )  # fmt: skip


class Setup:
    """Everything about a run that follows from its config and the number of ranks.

    Parameters
    ----------
    config : RunConfig
    num_ranks : int

    Raises
    ------
    ConfigError
        The ranks do not match the mesh, or the batch does not divide.
    """

    def __init__(self, config: RunConfig, num_ranks: int) -> None:
        self.config = config
        self.extensions = load_extensions(config.run.extensions)
        """Files of users -> sha256 of what was run."""
        self.mesh = build_mesh(config.parallel.dp, num_ranks, config.parallel.pp)
        check_data_section(config)
        pieces = self.mesh.dp * config.train.num_microbatches
        if config.train.global_batch % pieces:
            batch = config.train.global_batch
            who = "ranks" if self.mesh.pp == 1 else "parallel.dp"
            lower = max(batch // pieces, 1) * pieces
            raise ConfigError(
                f"train.global_batch must be divisible by {who} * train.num_microbatches; got "
                f"{batch} with {self.mesh.dp} * {config.train.num_microbatches} = {pieces}. Set "
                f"train.global_batch = {lower} or change train.num_microbatches or the number of "
                f"ranks."
            )
        self.base_model = build_model(config)
        """The model without bottlenecks."""
        self.model = self.base_model
        self._check_shards(self.mesh.dp)
        self.policy = policy_of(config.model.dtype, config.precision)
        self.loss_scale()
        self._specs: dict[tuple[int, int | None, str, bool], tuple[BlockSpec, ...]] = {}
        self._plans: dict[tuple, Plan] = {}
        self.base_pipeline = build_pipeline(config, self.mesh, self.specs(1), self.policy)
        """Stages without bottlenecks, codecs included."""
        self.pipeline = self.base_pipeline
        if config.compression.bottleneck and self.mesh.pp > 1:
            self.model, self.pipeline = with_bottlenecks(config, self.model, self.base_pipeline)
            self._specs.clear()
        self._check_waits()

    def _check_shards(self, num_ranks: int) -> None:
        """Refuse to share out over the `num_ranks` ranks of axis dp what cannot be."""
        stage = self.config.parallel.zero
        if not stage:
            return
        if num_ranks == 1:
            alone = "one rank" if self.mesh.pp == 1 else "parallel.dp = 1"
            raise ConfigError(
                f"parallel.zero must be 0 with {alone}, which has nobody to share with; got "
                f"{stage}. Set parallel.zero = 0, or start more ranks."
            )
        num_params = sum(param.size for param in self.model.param_specs())
        if num_ranks > num_params:
            raise ConfigError(
                f"parallel.zero must leave every rank a parameter; got {num_params} parameters "
                f"for {num_ranks} ranks with parallel.zero = {stage}. Start at most {num_params} "
                f"ranks, or set parallel.zero = 0."
            )

    def _check_waits(self) -> None:
        """Refuse an emulated machine on which a rank would give up waiting."""
        cluster, limit = self.config.cluster, self.config.comm.timeout_s
        if cluster.latency_s >= limit:
            raise ConfigError(
                f"cluster.latency_s must be below comm.timeout_s; got {cluster.latency_s} with "
                f"{limit}. Lower it, or raise comm.timeout_s."
            )
        if cluster.bytes_per_s:
            plan = self.full_plan()
            sizes = [b.count * self.policy.wire_dtype.itemsize for b in plan.buckets]
            sizes += [
                message_bytes(plan, op) for ops in plan.ranks for op in ops
                if isinstance(op, MESSAGES)
            ]  # fmt: skip
            if cluster.latency_s + max(sizes) / cluster.bytes_per_s >= limit:
                raise ConfigError(
                    f"cluster.bytes_per_s must let every message arrive within comm.timeout_s = "
                    f"{limit}; got {cluster.bytes_per_s:g} with one of {max(sizes)} bytes. Raise "
                    f"one of them."
                )
        if self.config.compute.mode == "real":
            return
        rows = max(map(max, self.signature(self.config.train.global_batch)))
        flops = max(max(b.forward_flops, b.backward_flops) for b in self.specs(rows))
        if flops >= limit * cluster.flops_per_s:
            raise ConfigError(
                f"cluster.flops_per_s must let every block end within comm.timeout_s = {limit}; "
                f"got {cluster.flops_per_s:g} with {flops} operations in one. Raise one of them."
            )

    def share_specs(self, other: Setup) -> None:
        """Use the block specs of a setup of the same model, precision and kernels."""
        self._specs = other._specs

    def specs(
        self, rows: int, length: int | None = None, kind: str = "train", base: bool = False
    ) -> tuple[BlockSpec, ...]:
        """Return the block specs for a microbatch of `rows` rows, `length` tokens long.

        `kind` is that of the plan: nothing is dropped out while evaluating. `base`: those of the
        model without bottlenecks.
        """
        base = base and self.model is not self.base_model
        found = self._specs.get((rows, length, kind, base))
        if found is None:
            model = self.base_model if base else self.model
            found = model.spec(rows, self.policy.compute_dtype, length, self._conditions(kind))
            self._specs[rows, length, kind, base] = found
        return found

    @property
    def compresses(self) -> bool:
        """Whether activations that cross a boundary are changed on the way."""
        compression = self.config.compression
        changed = compression.bottleneck > 0 or compression.activations != "none"
        return self.mesh.pp > 1 and changed

    def _conditions(self, kind: str) -> Conditions:
        config = self.config
        return Conditions(
            kernels=resolve_kernels(config.compute.kernels),
            starts=config.model.kind == "decoder" and config.data.layout == "packed",
            dropout=kind == "train",
        )

    def loss_scale(self) -> LossScale:
        """Return a fresh loss scale as the config asks for."""
        precision = self.config.precision
        kind = loss_scale_kind(self.policy, precision)
        if kind == "none":
            return LossScale()
        return LossScale(
            kind=kind, value=precision.init_scale, growth_interval=precision.growth_interval,
            growth_factor=precision.growth_factor, backoff_factor=precision.backoff_factor,
            min_scale=precision.min_scale,
        )  # fmt: skip

    @property
    def itemsizes(self) -> Itemsizes:
        """Bytes of one value of each kind, for the memory forecast."""
        policy = self.policy
        return Itemsizes(
            param=policy.param_dtype.itemsize, compute=policy.compute_dtype.itemsize,
            reduce=policy.reduce_dtype.itemsize, wire=policy.wire_dtype.itemsize,
            has_master=policy.has_master, has_wire_copy=policy.wire != policy.reduce,
        )  # fmt: skip

    def build_state(
        self,
        transport: Transport,
        recorder: Recorder,
        data_bytes: int = 0,
        tracker: Tracker | None = None,
        fill: FillParam | None = None,
    ) -> EngineState:
        """Return what a rank owns at the start of a run; compiles the kernels if need be.

        Parameters
        ----------
        transport : Transport
        recorder : Recorder
        data_bytes : int
            Bytes that the loaded data set keeps.
        tracker : Tracker, optional
            Measures NumPy's memory; by default nothing does.
        fill : callable, optional
            Writes first values of parameters; by default random ones.
        """
        config = self.config
        return EngineState(
            model=self.model, mesh=self.mesh, transport=transport, optimizer=config.optimizer,
            buckets=self.full_plan().buckets, seed=config.run.seed, policy=self.policy,
            algorithm=config.comm.algorithm, recorder=recorder, data_bytes=data_bytes,
            overlap=config.parallel.overlap, zero=config.parallel.zero,
            loss_scale=self.loss_scale(), kernels=self.kernels(), tracker=tracker,
            budget_bytes=config.memory.budget_bytes,
            blocks=self.full_plan().rank_blocks(transport.rank),
            wrap=self._stand_in(transport), fill=fill,
            residuals=self.residuals(transport.rank),
        )  # fmt: skip

    def _stand_in(self, transport: Transport) -> Callable[[EngineState, Block], Block] | None:
        """Return what puts an emulated block in a real one's place; None: nothing does."""
        if self.config.compute.mode == "real":
            return None
        rate = self.config.cluster.flops_per_s

        def emulate(state: EngineState, block: Block) -> Block:
            # Rings go on while a rank that computes would work.
            return EmulatedBlock(
                block, flops_per_s=rate,
                sleep=lambda seconds: transport.sleep(seconds, between=state.advance),
            )  # fmt: skip

        return emulate

    def residuals(self, rank: int) -> dict[int, tuple[int, ...]]:
        """Return the shapes of the gradients whose losses a rank keeps, by boundary."""
        if not self.config.compression.error_feedback:
            return {}
        shapes: dict[int, tuple[int, ...]] = {}
        for op in self.full_plan().ranks[rank]:
            if isinstance(op, SendGrad):
                shapes.setdefault(op.boundary, op.shape)
        return shapes

    def kernels(self) -> Kernels:
        """Return the kernel set that the config asks for, compiled for the run's dtypes."""
        return prepare_kernels(self.config.compute.kernels, *self.policy.dtypes)

    def signature(self, num_rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the rows per rank and microbatch of an update of `num_rows` rows."""
        micros = self.config.train.num_microbatches
        return self._rows(num_rows, lambda _: micros)

    def _rows(
        self, num_rows: int, num_microbatches: Callable[[int], int]
    ) -> tuple[tuple[int, ...], ...]:
        """Return rows per rank and microbatch: all stages of a replica see the same rows.

        `num_microbatches` says into how many pieces so many rows are cut.
        """
        rows = []
        for index in range(self.mesh.dp):
            lo, hi = shard_rows(num_rows, self.mesh.dp, index)
            bounds = microbatch_bounds(lo, hi, num_microbatches(hi - lo))
            counts = tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False))
            rows += [counts] * self.mesh.pp
        return tuple(rows)

    def train_plan(self, num_rows: int) -> Plan:
        """Return the checked plan of an update of `num_rows` rows, built once per shape.

        Raises
        ------
        ConfigError
            A schedule of an extension makes a plan that breaks a rule.
        """
        try:
            return self._train_plan(num_rows)
        except PlanError as error:
            name = self.config.parallel.schedule
            if name in BUILT_IN:
                raise
            raise ConfigError(f"parallel.schedule = {name!r}: {error}") from error

    def _train_plan(self, num_rows: int) -> Plan:
        key = ("train", num_rows)
        if key not in self._plans:
            config = self.config
            plan = build_train_plan(
                mesh=self.mesh, specs=self.specs, rows=self.signature(num_rows),
                dtype=self.policy.wire, itemsize=self.policy.reduce_dtype.itemsize,
                bucket_bytes=config.parallel.bucket_bytes, overlap=config.parallel.overlap,
                algorithm=config.comm.algorithm, recompute=config.memory.recompute,
                recompute_every=config.memory.recompute_every, zero=config.parallel.zero,
                prefetch=config.parallel.prefetch, param_dtype=self.policy.compute,
                pipeline=self.pipeline, reduce_dtype=self.policy.reduce,
            )  # fmt: skip
            check_plan(plan)
            # What users' codecs and all-reduces say of their sizes is asked for here, first.
            for rank in range(self.mesh.size if self.extensions else 0):
                price_rank(plan, rank)
            self._plans[key] = plan
        return self._plans[key]

    def full_plan(self) -> Plan:
        """Return the plan of an update with the whole global batch."""
        return self.train_plan(self.config.train.global_batch)

    def eval_plan(self, num_rows: int, base: bool = False) -> Plan:
        """Return the checked plan of an evaluation of `num_rows` rows.

        `base`: without compressors, neither bottlenecks nor codecs.
        """
        base = base and self.compresses
        key = ("eval", num_rows, base)
        if key not in self._plans:
            most = -(-num_rows // self.mesh.dp)

            def pieces(mine: int) -> int:
                # Where every forward gathers parameters, all ranks make equally many.
                mine = most if self.config.parallel.zero == 3 else mine
                return max(1, -(-mine // self._rows_per_eval()))

            plan = build_eval_plan(
                mesh=self.mesh, specs=partial(self.specs, base=base),
                rows=self._rows(num_rows, pieces), tag="base" * base,
                dtype=self.policy.wire, algorithm=self.config.comm.algorithm,
                buckets=self.full_plan().buckets, zero=self.config.parallel.zero,
                prefetch=self.config.parallel.prefetch, param_dtype=self.policy.compute,
                pipeline=self._plain_pipeline if base else self.pipeline,
            )  # fmt: skip
            check_plan(plan)
            self._plans[key] = plan
        return self._plans[key]

    @property
    def _plain_pipeline(self) -> Pipeline:
        return replace(self.base_pipeline, activation_codec="none", grad_codec="none")

    def _rows_per_eval(self) -> int:
        if self.config.memory.budget_bytes:
            # An evaluation must not be what breaks the budget.
            return max(1, max(map(max, self.full_plan().rows)))
        if self.config.model.kind == "decoder":
            return max(1, EVAL_TOKENS_PER_FORWARD // self.config.data.window)
        return EVAL_ROWS_PER_FORWARD

    def forecast(self, plan: Plan, rank: int, data_bytes: int) -> MemoryForecast:
        """Return the predicted bytes of a rank while it runs `plan`."""
        optimizer = self.config.optimizer
        blocks = plan.rank_blocks(rank)
        kept = {"inputs": plan.blocks[0] in blocks, "targets": plan.blocks[-1] in blocks}
        return predict_memory(
            plan, rank, partial(self.specs, kind=plan.kind, base=plan.tag == "base"),
            itemsizes=self.itemsizes,
            optimizer_arrays=num_optimizer_arrays(optimizer.kind, optimizer.momentum),
            scratch_bytes=SCRATCH_BYTES + self.model.tables_bytes(self.policy.compute_dtype),
            batch_bytes=lambda rows, length: held_batch_bytes(self.config, rows, length, **kept),
            data_bytes=data_bytes + sampling_bytes(sum(plan.rows[rank])),
            working=engine_working(self.config, self.policy, self._conditions("train"), **kept),
            residuals=self.residuals(rank),
        )  # fmt: skip


@dataclass
class CheckReport:
    """What `mpisim check` found: figures per rank of one full step, no data involved."""

    plan: Plan
    priced: list[Priced]
    memory: list[MemoryForecast]
    notes: list[str]
    """Settings that have no effect."""

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per rank."""
        rows = []
        for rank, (priced, memory) in enumerate(zip(self.priced, self.memory, strict=True)):
            row: dict[str, Any] = {"rank": rank, "ops": len(self.plan.ranks[rank])}
            for (axis, collective), counts in priced.items():
                for field, value in counts.items():
                    row[f"{axis}_{collective}_{field}"] = value
            row |= {f"peak_{name}_bytes": value for name, value in memory.peak.items()}
            row["peak_total_bytes"] = memory.peak_total
            row["peak_op"] = memory.peak_op
            rows.append(row)
        return rows

    def text(self) -> str:
        """Return a table for people."""
        plan = self.plan
        lines = [
            f"plan {plan.name}: {len(plan.ranks)} ranks, {len(plan.blocks)} blocks, "
            f"{len(plan.buckets)} gradient buckets",
            "ok: order, matching, deadlock, leaks",
            *(f"note: {note}" for note in self.notes),
            "",
            f"{'rank':>4} {'ops':>5} {'messages out':>12} {'bytes out':>12} {'peak memory':>12}  "
            f"peaks in (without the data set)",
        ]
        for rank, (priced, memory) in enumerate(zip(self.priced, self.memory, strict=True)):
            messages = sum(counts["sent_messages"] for counts in priced.values())
            sent = sum(counts["sent_bytes"] for counts in priced.values())
            lines.append(
                f"{rank:>4} {len(plan.ranks[rank]):>5} {messages:>12} {sent:>12} "
                f"{format_bytes(memory.peak_total):>12}  {memory.peak_op}"
            )
        return "\n".join(lines)


def check(config: RunConfig, ranks: int) -> CheckReport:
    """Build and prove the plan of a full step, without data and without MPI.

    Parameters
    ----------
    config : RunConfig
    ranks : int

    Returns
    -------
    CheckReport

    Raises
    ------
    ConfigError, PlanError
        The layout is impossible, the plan breaks a rule, or it cannot keep the budget.
    """
    from mpisim.train.fit import require_fit

    setup = Setup(config, ranks)
    require_fit(setup)
    plan = setup.full_plan()
    return CheckReport(
        plan,
        [price_rank(plan, rank) for rank in range(ranks)],
        [setup.forecast(plan, rank, 0) for rank in range(ranks)],
        settings_without_effect(config),
    )
