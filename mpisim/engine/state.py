"""What a rank holds while it trains: parameters, gradients, optimizer state, saved activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from mpisim.comm.communicator import Communicator
from mpisim.comm.programs import Program
from mpisim.comm.transport import Transport
from mpisim.config.schema import OptimizerSection
from mpisim.engine.meter import StepMeter
from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.layouts.steps import all_reduce_table, scratch_slots
from mpisim.memory.ledger import Ledger
from mpisim.mesh import Mesh
from mpisim.nn.models import Model
from mpisim.nn.params import init_params
from mpisim.plan.ops import Op, ReduceScalars
from mpisim.plan.partition import Bucket
from mpisim.trace.recorder import Recorder

UPDATE_SCRATCH = 1 << 14
"""Elements of working space that the optimizer update uses."""

SCALARS = {"target_count": (1, "int64"), "loss": (2, "float64"), "eval": (3, "float64")}
"""Control sums: kind -> elements and dtype."""

DP_CHANNEL, CONTROL_CHANNEL = 1, 2

LoadRows = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""Microbatch number -> (inputs, targets) of this rank's rows."""


@dataclass
class StepState:
    """What lives only within one step."""

    load: LoadRows
    step: int
    lr: float = 0.0
    update_number: int = 0
    """Committed updates, this one included."""
    batches: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    flow: dict[int, np.ndarray] = field(default_factory=dict)
    """Output of the last block that ran forward, by microbatch."""
    grad_flow: dict[int, np.ndarray | float] = field(default_factory=dict)
    saved: dict[tuple[str, int], tuple] = field(default_factory=dict)
    accumulated: set[str] = field(default_factory=set)
    """Blocks whose gradients already hold a microbatch of this step."""
    loss_sum: float = 0.0
    num_correct: int = 0
    num_targets: int = 0
    global_targets: int = 0
    global_loss_sum: float = 0.0
    global_correct: int = 0
    grad_norm: float = 0.0
    metrics: np.ndarray | None = None
    """On rank 0 after GatherMetrics: shape (ranks, len(METRIC_NAMES))."""


class EngineState:
    """Everything a rank owns, registered in its ledger.

    Parameters
    ----------
    model : Model
    mesh : Mesh
    transport : Transport
    optimizer : OptimizerSection
    buckets : tuple of Bucket
        Gradients that are reduced together.
    seed : int
        Parameters are drawn by (seed, name), so every layout starts from the same weights.
    dtype : str
        float32 or float64.
    algorithm : str
        All-reduce algorithm of axis dp.
    recorder : Recorder
    data_bytes : int
        Bytes that the loaded data set keeps (category "data").
    overlap : bool
        Buckets are reduced beside backward ops.
    """

    def __init__(
        self,
        *,
        model: Model,
        mesh: Mesh,
        transport: Transport,
        optimizer: OptimizerSection,
        buckets: tuple[Bucket, ...],
        seed: int,
        dtype: str,
        algorithm: str,
        recorder: Recorder,
        data_bytes: int = 0,
        overlap: bool = True,
    ) -> None:
        self.model, self.mesh, self.optimizer = model, mesh, optimizer
        self.dtype = np.dtype(dtype)
        self.recorder = recorder
        self.ledger = Ledger()
        self.rank = transport.rank
        self.blocks = {block.name: block for block in model.blocks}
        self.first, self.last = model.blocks[0].name, model.blocks[-1].name
        self.dp = Communicator(
            transport, mesh.group(transport.rank, "dp"), axis="dp", channel=DP_CHANNEL,
            recorder=recorder, algorithm=algorithm,
        )  # fmt: skip
        self.control = Communicator(
            transport, axis="control", channel=CONTROL_CHANNEL, recorder=recorder
        )
        self.control.neighbours.append(self.dp)

        self.params = init_params(model, seed, self.dtype)
        self.ledger.hold("params", *self.params.values())
        self.block_params = dict(zip(self.blocks, model.split_params(self.params), strict=True))
        self._build_buckets(buckets, overlap)
        self._build_optimizer()
        self._build_control()
        self.ledger.set_bytes("data", data_bytes)
        self.update_scratch = np.empty(UPDATE_SCRATCH, self.dtype)
        self.ledger.hold("temp", self.update_scratch)
        self.meter = StepMeter()
        self.step: StepState | None = None
        self.plan_rows: tuple[int, ...] = ()
        self.plan_kinds: list[type[Op]] = []

    def _build_buckets(self, buckets: tuple[Bucket, ...], overlap: bool) -> None:
        self.buckets = [np.zeros(bucket.count, self.dtype) for bucket in buckets]
        self.ledger.hold("grads", *self.buckets)
        self.grads: dict[str, np.ndarray] = {}
        for bucket, flat in zip(buckets, self.buckets, strict=True):
            shapes = {param.name: param.shape for param in bucket.params}
            for name, (lo, hi) in bucket.offsets().items():
                self.grads[name] = flat[lo:hi].reshape(shapes[name])
        _reserve_scratch(self.dp, self.buckets)
        self.bucket_programs: list[Program] = [
            self.dp.prepare_all_reduce(flat, f"bucket {bucket.index}", overlap)
            for bucket, flat in zip(buckets, self.buckets, strict=True)
        ]

    def _build_optimizer(self) -> None:
        kind, momentum = self.optimizer.kind, self.optimizer.momentum
        arrays = num_optimizer_arrays(kind, momentum)
        self.moments = {
            name: tuple(np.zeros_like(param) for _ in range(arrays))
            for name, param in self.params.items()
        }
        for moments in self.moments.values():
            self.ledger.hold("optimizer", *moments)

    def _build_control(self) -> None:
        self.scalars = {kind: np.zeros(count, dtype) for kind, (count, dtype) in SCALARS.items()}
        _reserve_scratch(self.control, self.scalars.values())
        for kind, array in self.scalars.items():
            self.control.prepare_all_reduce(array, kind)
        self.metrics = np.zeros(len(METRIC_NAMES))
        self.all_metrics = np.zeros(self.mesh.size * len(METRIC_NAMES)) if self.rank == 0 else None
        gather = self.control.prepare_gather(self.metrics, self.all_metrics)
        self.gather_traffic = gather.traffic
        owned = [*self.scalars.values(), self.metrics]
        if self.all_metrics is not None:
            owned.append(self.all_metrics)
        self.ledger.hold("comm_buffers", *owned)
        scratch = self.dp.scratch_bytes + self.control.scratch_bytes
        self.ledger.set_bytes("comm_buffers", self.ledger.live["comm_buffers"] + scratch)

    def sum_scalars(self, op: ReduceScalars, values: list[float]) -> np.ndarray:
        """Sum a few numbers over all ranks; every rank gets the same bits."""
        array = self.scalars[op.kind]
        array[:] = values
        return self.control.all_reduce(array)


def _reserve_scratch(group: Communicator, summed: Iterable[np.ndarray]) -> None:
    """Allocate once what the all-reduces of all these arrays will share."""
    needs = [0]
    for array in summed:
        table = all_reduce_table(array.size, group.size, array.itemsize, group.algorithm)
        number, longest = scratch_slots(table, group.index)
        needs.append(number * longest * array.itemsize)
    group.reserve(max(needs))


def num_optimizer_arrays(kind: str, momentum: float) -> int:
    """Return how many state arrays the optimizer keeps per parameter."""
    if kind == "adamw":
        return 2
    return 1 if momentum else 0
