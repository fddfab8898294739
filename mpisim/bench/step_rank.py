"""The rank side of `mpisim bench step`: gradients against PyTorch's, then interleaved rounds."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpisim.bench.quiet import MAX_FOREIGN_SHARE, ForeignLoad, foreign_share
from mpisim.bench.step_profile import profile_steps
from mpisim.comm.local import run_threads
from mpisim.config import RunConfig, config_from_mapping
from mpisim.data.batch import IGNORED, Batch
from mpisim.data.tokenizer import VOCAB_SIZE
from mpisim.engine.step import Engine
from mpisim.errors import MpisimError
from mpisim.layouts.metrics import MEMORY_CATEGORIES
from mpisim.trace.recorder import Recorder
from mpisim.train.setup import Setup

TOLERANCES = {"float32": 1e-4, "float64": 1e-9}
"""Largest legal difference: of the loss relative to it, of a gradient relative to its largest."""

UPDATE_TOLERANCES = {"float32": 1e-4, "float64": 1e-9}
"""Largest legal relative difference of the losses of the first updates."""
WARM_UP_STEPS = 3
PROFILED_STEPS = 5
ROUNDS_PER_WANTED = 4
"""A measurement ends after this many times the rounds it wants, if too few were quiet."""
MIN_ROUNDS = 5
"""Fewer quiet rounds than these, and the least disturbed others count too, and it is said."""
MAX_ROUNDS_S = 240.0
"""Or when its rounds took this long: PyTorch's float16 step takes 5 s on CPUs without float16."""


@dataclass(frozen=True)
class Case:
    """A small decoder and batch for the comparison of gradients."""

    name: str
    model: Mapping[str, Any]
    rows: int = 3
    window: int = 12
    padded: bool = False
    packed: bool = False


CASES = (
    Case("grouped, tied, padded", {"num_heads": 4, "num_kv_heads": 2, "tied": True}, padded=True),
    Case("ungrouped, untied", {"num_heads": 2, "num_kv_heads": 2, "tied": False}),
    Case("grouped, tied, packed", {"num_heads": 4, "num_kv_heads": 1, "tied": True}, packed=True),
)
_CASE_MODEL = {"kind": "decoder", "d_model": 32, "num_blocks": 2, "d_ff": 40, "vocab_size": 271}


# --- our side --------------------------------------------------------------------------------


class OurTrainer:
    """An engine and one batch; every call is one update.

    Parameters
    ----------
    transport : Transport
    config : RunConfig
    batch : Batch
        This rank's rows, in one microbatch or several.
    recorder : Recorder
    """

    def __init__(self, transport: Any, config: RunConfig, batch: Batch, recorder: Recorder) -> None:
        setup = Setup(config, transport.size)
        self._plan = setup.full_plan()
        self.state = setup.build_state(transport, recorder)
        self._engine = Engine(self.state, 1_000_000)
        self._batch = batch
        bounds = np.cumsum([0, *self._plan.rows[transport.rank]])
        self._slices = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]

    def __call__(self) -> float:
        """Run forward, backward and AdamW; return the mean loss of all ranks before the update."""
        done = self._engine.train_step(
            self._plan, self.state.committed, self._load, self._batch.num_targets
        )
        if done.skipped:
            raise MpisimError(
                f"a timed step must not be skipped; got an overflow at loss scale "
                f"{done.loss_scale:g}. Lower it with --set precision.init_scale."
            )
        return done.global_loss_sum / done.global_targets

    def _load(self, micro: int) -> Batch:
        # Copied, as a data set would: the step owns its rows.
        rows = self._slices[micro]
        return Batch(*(None if part is None else part[rows].copy() for part in self._batch))

    def loss_and_grads(self) -> tuple[float, dict[str, np.ndarray]]:
        """Make one update and return the mean loss and the gradients that it followed."""
        seen: dict[str, np.ndarray] = {}
        self.state.observe_gradients = seen.update
        loss = self()
        self.state.observe_gradients = None
        return loss, seen


def make_batch(
    random: np.random.Generator, rows: int, window: int, vocab_size: int,
    *, padded: bool = False, packed: bool = False,
) -> Batch:  # fmt: skip
    """Draw token ids; every token's target is its successor.

    Parameters
    ----------
    random : numpy.random.Generator
    rows, window, vocab_size : int
    padded : bool
        Rows end early, each elsewhere; the targets of their tails are ignored.
    packed : bool
        Rows hold several documents; the target of a document's last token is ignored.

    Returns
    -------
    Batch
    """
    ids = random.integers(0, vocab_size, (rows, window + 1), dtype=np.int32)
    x, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
    starts = None
    if padded:
        for row in range(rows):
            targets[row, window - 1 - row * 3 % window :] = IGNORED
    if packed:
        starts = np.zeros((rows, window), np.int32)
        for row in range(rows):
            for column in range(2 + row, window, 4 + row):
                targets[row, column - 1] = IGNORED
                starts[row, column:] = column
    return Batch(x, targets, starts)


# --- gradients against PyTorch's -------------------------------------------------------------


def check_cases(kernels: str, variants: tuple[str, ...]) -> dict[str, float]:
    """Compare loss and gradients with PyTorch's on small decoders.

    Parameters
    ----------
    kernels : str
        As `compute.kernels`.
    variants : tuple of str
        PyTorch's.

    Returns
    -------
    dict
        Dtype to the largest relative difference.

    Raises
    ------
    MpisimError
        One is above `TOLERANCES`; names the tensor.
    """
    worst = {}
    for dtype, tolerance in TOLERANCES.items():
        errors = []
        for case in CASES:
            random = np.random.default_rng(5)
            config = _case_config(case, dtype, kernels)
            batch = make_batch(
                random, case.rows, case.window, config.model.vocab_size,
                padded=case.padded, packed=case.packed,
            )  # fmt: skip
            errors.append(check_batch(config, batch, variants, tolerance, case.name))
        worst[dtype] = max(errors)
    return worst


def _case_config(case: Case, dtype: str, kernels: str) -> RunConfig:
    return config_from_mapping(
        {
            "data": {"window": case.window},
            "model": {**_CASE_MODEL, **case.model, "dtype": dtype},
            "compute": {"kernels": kernels},
            "train": {"global_batch": case.rows},
        }
    )


def check_batch(
    config: RunConfig, batch: Batch, variants: tuple[str, ...], tolerance: float, name: str
) -> float:
    """Compare loss and gradients of one config and batch with PyTorch's.

    Returns
    -------
    float
        The largest relative difference.

    Raises
    ------
    MpisimError
        It is above `tolerance`; names the tensor.
    """
    from mpisim.bench.torch_steps import loss_and_grads

    found: list[Any] = []

    def run(transport: Any) -> None:
        trainer = OurTrainer(transport, config, batch, Recorder())
        weights = {name: array.copy() for name, array in trainer.state.master.items()}
        found.extend([weights, *trainer.loss_and_grads()])

    for error in run_threads(run, 1).errors.values():
        raise error
    weights, loss, grads = found
    worst = 0.0
    for variant in variants:
        wanted_loss, wanted = loss_and_grads(variant, weights, decoder_shape(config), batch)
        where = f"{name}, {config.model.dtype}, PyTorch {variant}"
        worst = max(worst, compare(loss, grads, wanted_loss, wanted, tolerance, where))
    return worst


def compare(
    loss: float,
    grads: Mapping[str, np.ndarray],
    wanted_loss: float,
    wanted: Mapping[str, np.ndarray],
    tolerance: float,
    where: str,
) -> float:
    """Return the largest relative difference of loss and gradients.

    Parameters
    ----------
    loss, wanted_loss : float
    grads, wanted : mapping of str to ndarray
        Differences of a tensor count relative to the largest element of the wanted one.
    tolerance : float
    where : str
        What was compared, for the message.

    Raises
    ------
    MpisimError
        A tensor is missing or of another shape, or a difference is above the tolerance.
    """
    if grads.keys() != wanted.keys():
        odd = sorted(grads.keys() ^ wanted.keys())
        raise MpisimError(
            f"both sides must have the same tensors; got {', '.join(odd)} on one only ({where}). "
            f"Compare mpisim.bench.torch_decoder with the decoder."
        )
    errors = {"loss": abs(loss - wanted_loss) / abs(wanted_loss)}
    for name, right in wanted.items():
        got = grads[name]
        if got.shape != right.shape:
            errors[name] = float("inf")
            continue
        largest = float(np.max(np.abs(right)))
        errors[name] = float(np.max(np.abs(got - right))) / (largest or 1.0)
    # A nan compares as not above anything.
    worst = max(errors, key=lambda name: errors[name] if errors[name] >= 0 else float("inf"))
    if not errors[worst] <= tolerance:
        what = "the loss" if worst == "loss" else f"the gradient of {worst}"
        raise MpisimError(
            f"{what} must equal PyTorch's within {tolerance:g}; got a relative difference of "
            f"{errors[worst]:.3g} ({where}). No figure was taken: one of the two sides is wrong."
        )
    return errors[worst]


def decoder_shape(config: RunConfig) -> dict[str, Any]:
    """Return what PyTorch's side must know beside the weights."""
    model = config.model
    return {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads or model.num_heads,
        "rope_theta": model.rope_theta,
        "norm_eps": model.norm_eps,
    }


# --- the measurement -------------------------------------------------------------------------


def measure_step(transport: Any, config: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Check gradients, then time updates of both sides, interleaved, and profile ours.

    Parameters
    ----------
    transport : MpiTransport
    config : dict
        A RunConfig as JSON.
    rounds : int
        Rounds to keep.

    Returns
    -------
    dict
        The row of `bench_step`; the same on every rank but for the profile, which is this rank's.
    """
    from mpisim.bench import torch_steps

    torch_steps.use_one_thread()
    run = config_from_mapping(config)
    window, rows = run.data.window, run.train.global_batch // transport.size
    random = np.random.default_rng(transport.rank)
    batch = make_batch(random, rows, window, run.model.vocab_size or VOCAB_SIZE)
    errors = check_cases(run.compute.kernels, torch_steps.VARIANTS)
    dtype = run.model.dtype if run.precision.compute == "same" else run.precision.compute
    if dtype in TOLERANCES:
        alone = _with(run, train={"global_batch": rows}, parallel={"dp": 0})
        timed = check_batch(alone, batch, torch_steps.VARIANTS, TOLERANCES[dtype], "timed decoder")
        errors[dtype] = max(errors[dtype], timed)
    with tempfile.TemporaryDirectory(prefix="mpisim-bench-") as folder, _torch_group(transport):
        ours = OurTrainer(transport, run, batch, _recorder(transport, Path(folder) / "ours"))
        calls: dict[str, Callable[[], float]] = {"ours": ours}
        weights = {name: array.copy() for name, array in ours.state.master.items()}
        if dtype in ("bfloat16", "float16"):
            wide = _with(run, precision={"compute": "same", "loss_scale": "none"})
            recorder = _recorder(transport, Path(folder) / "float32")
            calls["float32"] = OurTrainer(transport, wide, batch, recorder)
        for variant in torch_steps.VARIANTS:
            calls[variant] = torch_steps.TorchTrainer(
                variant, weights, decoder_shape(run), batch, dtype=dtype, settings=run.optimizer,
                parallel=transport.size > 1,
            )  # fmt: skip
        _warm_up(transport, calls, UPDATE_TOLERANCES.get(dtype, math.inf))
        times, quiet = _rounds(transport, list(calls.values()), rounds)
        profile = profile_steps(ours.state, ours, PROFILED_STEPS)
    return _row(run, transport.size, dtype, ours, dict(zip(calls, times.T, strict=True))) | {
        "torch_version": torch_steps.VERSION,
        "gradient_error": errors,
        "rounds": len(times),
        "quiet": quiet,
        "profile": profile,
    }


def _row(
    run: RunConfig, size: int, dtype: str, ours: OurTrainer, times: dict[str, np.ndarray]
) -> dict[str, Any]:
    model = run.model
    tokens = run.train.global_batch * run.data.window
    mine = times["ours"]
    found = {
        name: {
            "tokens_per_s": tokens / float(np.median(other)),
            "ratio": float(np.median(other / mine)),
        }
        for name, other in times.items()
        if name != "ours"
    }
    wide = found.pop("float32", None)
    if wide is not None:
        wide = {
            "tokens_per_s": wide["tokens_per_s"],
            "cost": float(np.median(mine / times["float32"])),
        }
    fastest = max(found, key=lambda variant: found[variant]["tokens_per_s"])
    table = ours.state.master["embed.tokens.weight"]
    hidden = ours.state.master["block0.down.weight"]
    return {
        "model": {
            "d_model": model.d_model,
            "num_blocks": model.num_blocks,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads or model.num_heads,
            "d_ff": len(hidden),
            "vocab_size": len(table),
            "tied": model.tied,
            "window": run.data.window,
            "rows": run.train.global_batch // size,
        },
        "ranks": size,
        "threads": 1,
        "dtype": dtype,
        "kernels": ours.state.kernels.name,
        "tokens_per_s": tokens / float(np.median(mine)),
        "torch_tokens_per_s": found[fastest]["tokens_per_s"],
        "ratio": found[fastest]["ratio"],
        "torch_variants": found,
        "float32": wide,
    }


def _warm_up(transport: Any, calls: dict[str, Callable[[], float]], tolerance: float) -> None:
    """Make a few updates on every side and see that the losses stay together.

    Gradients alone do not show the optimizer, nor what happens between ranks.
    """
    mine = np.array([[call() for call in calls.values()] for _ in range(WARM_UP_STEPS)])
    losses = np.empty((transport.size, *mine.shape))
    transport.raw.Allgather(mine, losses)
    # Ours are those of all ranks already; PyTorch's are each rank's own.
    losses = losses.mean(axis=0)
    for column, name in enumerate(calls):
        worst = float(np.max(np.abs(losses[:, column] / losses[:, 0] - 1.0)))
        if worst > tolerance:
            raise MpisimError(
                f"losses of {WARM_UP_STEPS} updates must equal PyTorch's within {tolerance:g}; got "
                f"{losses[:, 0]} and {losses[:, column]} ({name}). No figure was taken: one of the "
                f"two sides updates wrongly."
            )


def _rounds(
    transport: Any, calls: list[Callable[[], float]], wanted: int
) -> tuple[np.ndarray, bool]:
    """Return the seconds of each call per kept round, slowest rank, and whether all were quiet.

    Every round runs every call once, each time from another one on, so that none always follows
    the same.
    """
    mine, slowest = np.empty(len(calls)), np.empty((transport.size, len(calls)))
    kept: list[np.ndarray] = []
    disturbed: list[tuple[float, np.ndarray]] = []
    began = time.perf_counter()
    for number in range(wanted * ROUNDS_PER_WANTED):
        load = ForeignLoad()
        for offset in range(len(calls)):
            position = (number + offset) % len(calls)
            transport.barrier()
            start = time.perf_counter()
            calls[position]()
            mine[position] = time.perf_counter() - start
        busy, own, wall = load.measure()
        transport.raw.Allgather(mine, slowest)
        share = foreign_share(busy, transport.raw.allreduce(own), wall)
        late = time.perf_counter() - began > MAX_ROUNDS_S
        # All ranks keep the same rounds and leave together: rank 0 decides.
        share, late = transport.raw.bcast((share, late), root=0)
        if share > MAX_FOREIGN_SHARE:
            disturbed.append((share, slowest.max(axis=0)))
        else:
            kept.append(slowest.max(axis=0))
        if late or len(kept) == wanted:
            break
    quiet = len(kept) >= min(wanted, MIN_ROUNDS)
    if not quiet:
        disturbed.sort(key=lambda item: item[0])
        kept += [times for _, times in disturbed[: wanted - len(kept)]]
    return np.array(kept), quiet


@contextlib.contextmanager
def _torch_group(transport: Any) -> Iterator[None]:
    if transport.size == 1:
        yield
        return
    from mpisim.bench.torch_steps import gloo_group

    folder = None
    if transport.rank == 0:
        folder = tempfile.TemporaryDirectory(prefix="mpisim-gloo-")
    path = transport.raw.bcast(folder and str(Path(folder.name) / "store"), root=0)
    try:
        with gloo_group(transport.rank, transport.size, path):
            yield
            transport.barrier()
    finally:
        if folder is not None:
            folder.cleanup()


def _with(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    values = config.model_dump(mode="json")
    for section, changed in sections.items():
        values[section].update(changed)
    return config_from_mapping(values)


def _recorder(transport: Any, path: Path) -> Recorder:
    return Recorder(
        path.with_suffix(f".{transport.rank}"),
        {"rank": transport.rank, "memory_categories": list(MEMORY_CATEGORIES)},
    )
