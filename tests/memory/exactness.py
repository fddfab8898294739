"""Jobs whose every op is compared with the allocator hook, and a cover of configurations.

`strict_ops` makes each rank write down the ops whose temp is not the predicted one, or after which
the hook and the ledger differ; `differences` compares a finished job with its forecast.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from small_jobs import make_config

from mpisim.config import RunConfig, config_from_mapping
from mpisim.data.load import load_data
from mpisim.engine import state as state_module
from mpisim.engine.state import EngineState, StepState
from mpisim.engine.watch import MemoryWatch
from mpisim.layouts.metrics import MEMORY_CATEGORIES
from mpisim.plan.build import Plan

KERNELS = ("numpy", "numba") if importlib.util.find_spec("numba") else ("numpy",)
TEXT = b"\n\n".join(b"%d dogs, %d" % (i, i * i * 7919) + b" cats" * (i % 4) for i in range(600))
EMPTY_BYTES = 64
"""What empty arrays may add in a step for each microbatch without rows that is alive: NumPy has no
buffer of no bytes and takes one or an item, which are counted as 0."""
STARTUP_BYTES = 24
"""Arrays of a process that are there when training starts and in no category: the first random
generator leaves 16 bytes, and empty arrays of the loaded data take one each."""

# --- what a rank sees -------------------------------------------------------------------------


class StrictWatch(MemoryWatch):
    """A watch that remembers every difference and not only the largest."""

    opened: list[StrictWatch] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.differences: Counter[tuple[str, int, int, int]] = Counter()
        """(op, predicted temp, measured less predicted, hook less ledger) -> how often."""
        self.step: StepState | None = None
        self.empty = 0
        """Microbatches without rows that may be alive at a time in the running step."""
        self.num_empty_ops = 0
        self.num_ops = 0
        StrictWatch.opened.append(self)

    def end(self, predicted_temp: int) -> None:
        tracker, ledger = self.tracker, self.ledger
        temp = tracker.peak() - self.unknown_bytes - ledger.op_total
        gap = tracker.live() - self.unknown_bytes - ledger.total
        self.num_ops += 1
        if self.empty:
            self.num_empty_ops += 1
        allowed = EMPTY_BYTES * self.empty
        beyond = temp - predicted_temp
        if self.step.skipped and ledger.op == "OptimizerStep":
            # It only clears the gradients; the forecast is that of an update.
            beyond = max(0, beyond)
        if not (0 <= gap <= allowed and 0 <= beyond <= allowed):
            self.differences[ledger.op, predicted_temp, temp - predicted_temp, gap] += 1
        super().end(predicted_temp)

    def found(self) -> dict[str, Any]:
        """Return what the rank saw, as JSON can hold it."""
        return {
            "differences": [[*key, times] for key, times in self.differences.items()],
            "num_ops": self.num_ops, "num_empty_ops": self.num_empty_ops,
            "unknown_bytes": self.unknown_bytes,
        }  # fmt: skip


@contextlib.contextmanager
def strict_ops() -> Iterator[list[StrictWatch]]:
    """Give every rank that is built inside a `StrictWatch`; they are listed as they are built."""
    before = state_module.MemoryWatch, EngineState.enter
    StrictWatch.opened = opened = []

    def enter(state: EngineState, plan: Plan, step: StepState) -> None:
        empty = plan.rows[state.rank].count(0)
        state.watch.empty = empty if plan.mesh.pp > 1 else min(empty, 1)
        state.watch.step = step
        before[1](state, plan, step)

    state_module.MemoryWatch, EngineState.enter = StrictWatch, enter
    try:
        yield opened
    finally:
        state_module.MemoryWatch, EngineState.enter = before


def forecast_differences(summary: dict[str, Any], alive: int = 1) -> list[str]:
    """Return every figure of a job's ledgers that is not the predicted one.

    `alive`: how many microbatches are at most alive at a time.
    """
    found = []
    for rank in summary["ranks"]:
        measured, predicted, hook = (
            rank["memory"], rank["predicted_memory"], rank["memory"]["measured"],
        )  # fmt: skip
        pairs = {
            f"{what} {category}": (measured[what][category], predicted[what][category])
            for what in ("peak", "at_peak") for category in MEMORY_CATEGORIES
        }  # fmt: skip
        if (
            hook["gap_bytes"] > 0
            and 0 <= pairs["peak temp"][0] - pairs["peak temp"][1] <= EMPTY_BYTES * alive
        ):
            # Empty arrays on top of an op that needs as much in a step without rows as in others.
            del pairs["peak temp"]
        pairs["peak_total"] = measured["peak_total"], predicted["peak_total"]
        pairs["peak_op"] = measured["peak_op"], predicted["peak_op"]
        pairs["sum at the peak"] = sum(measured["at_peak"].values()), measured["peak_total"]
        pairs["activations after the run"] = measured["live"]["activations"], 0
        pairs["peak by the hook"] = hook["peak_bytes"], measured["peak_total"]
        pairs["kind of the hook"] = hook["kind"], "hook"
        found += [
            f"rank {rank['rank']}: {what} is {got}, not {want}"
            for what, (got, want) in pairs.items()
            if got != want
        ]
    return found


def op_differences(watches: list[dict[str, Any]]) -> list[str]:
    """Return every op of a job whose bytes were not the predicted ones."""
    return [
        f"{op}: predicted temp {predicted}, {temp:+} measured, hook {gap:+} beside the ledger "
        f"({times} times)"
        for watch in watches
        for op, predicted, temp, gap, times in watch["differences"]
    ]


# --- configurations ---------------------------------------------------------------------------

PRECISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("float32", {}),
    "float64": ("float64", {}),
    "bfloat16, float32 sums": ("float32", {"compute": "bfloat16"}),
    "bfloat16, bfloat16 sums": ("float32", {"compute": "bfloat16", "reduce": "bfloat16"}),
    "float16, float32 sums": ("float32", {"compute": "float16", "init_scale": 64.0}),
    "float16, float16 sums": (
        "float32", {"compute": "float16", "reduce": "float16", "init_scale": 64.0},
    ),
    "float16, first step skipped": (
        "float32", {"compute": "float16", "init_scale": 2.0**60, "backoff_factor": 2.0**-54},
    ),
    "float32, bfloat16 messages": ("float32", {"wire": "bfloat16"}),
    "float32, float16 messages": ("float32", {"wire": "float16", "init_scale": 64.0}),
    "bfloat16, bfloat16 messages": ("float32", {"compute": "bfloat16", "wire": "bfloat16"}),
}  # fmt: skip

FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 3, 4, 5, 6, 7, 8),
    "zero": (0, 1, 2, 3),
    "prefetch": (False, True),
    "overlap": (False, True),
    "recompute": ("none", "selective", "full", "full every 2"),
    "micros": (1, 2, 4),
    "precision": tuple(PRECISIONS),
    "kernels": KERNELS,
    "job": ("text", "regression", "packed", "padded"),
    "tail": (0, 1, 3),
    "eval_rows": (1, 5, 11),
    "bucket_bytes": (1, 3000, 1 << 20),
    "algorithm": ("auto", "ring", "recursive_doubling", "halving_doubling"),
    "optimizer": ("sgd", "momentum", "adamw"),
    "clip": (False, True),
    "wide": (False, True),
    "activation": ("relu", "tanh", "gelu"),
    "hidden": (0, 1, 3),
    "tied": (False, True),
    "kv_heads": (1, 2),
    "dropout": (0.0, 0.3),
    "chunk": (0, 7),
    "blocks": (1, 2, 3),
}
"""What is varied. `tail`: rows of a short last batch; with fewer than ranks or microbatches some of
them get none. `wide`: parameters that take more than one tile of working space."""

WIDE_CODECS = "fp16 and bf16"
PIPELINE_FACTORS: dict[str, tuple[Any, ...]] = {
    "pp": (2, 3, 4),
    "schedule": ("1f1b", "naive", "gpipe", "interleaved", "zb-h1"),
    "codecs": ("none", "int8 and int3-token", "int2-token and int8, feedback", WIDE_CODECS),
    "bottleneck": (0, 5),
}
"""What is varied beside `FACTORS` where a cover's limits say so; `ranks` is then the degree of axis
dp. Models of too few blocks for their stages get more."""

CANDIDATES = 60
"""Cases of which the one that adds most to a cover is taken."""

Case = dict[str, Any]

_OF_DECODERS = ("tied", "kv_heads", "dropout", "chunk", "blocks")
_OF_MLPS = ("activation", "hidden")


def size_of(case: Case) -> int:
    """Return how many ranks a case has."""
    return case["ranks"] * case.get("pp", 1)


def _canonical(case: Case) -> Case:
    """Set what has no effect beside the other settings to its first value."""
    case = dict(case)
    fixed: list[str] = []
    if case["ranks"] == 1:
        fixed += ["zero", "overlap", "algorithm"]
    if case["ranks"] == 1 or case["zero"] != 3:
        fixed += ["prefetch"]
    if case["ranks"] == 1 or case["zero"]:
        fixed += ["algorithm"]
    if case["ranks"] > 1 and case["zero"] == 3:
        fixed += ["bucket_bytes"]
    if case["job"] in ("packed", "padded"):
        fixed += _OF_MLPS
    else:
        fixed += _OF_DECODERS
        if case["recompute"] == "selective":
            fixed += ["recompute"]
    if "pp" in case:
        fixed += ["bucket_bytes"]
        if case["job"] not in ("packed", "padded"):
            fixed += ["bottleneck"]
        if case["codecs"] == WIDE_CODECS and "float16" in case["precision"].partition(",")[0]:
            fixed += ["codecs"]  # a cast to 16 bits of numbers of 16 bits
    factors = FACTORS | PIPELINE_FACTORS
    case |= {name: factors[name][0] for name in fixed if name in case}
    return case


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(case.items(), 2))


def _draw(draws: random.Random, factors: dict[str, tuple], wanted: Iterable = ()) -> Case:
    case = {name: draws.choice(values) for name, values in factors.items()}
    return _canonical(case | dict(wanted))


@functools.cache
def _cover(
    count: int, seed: int, samples: int, limits: tuple[tuple[str, tuple[Any, ...]], ...]
) -> tuple[list[Case], int]:
    draws = random.Random(seed)
    factors = FACTORS | dict(limits)
    missing = set().union(*(_pairs(_draw(draws, factors)) for _ in range(samples)))
    cases: list[Case] = []
    while len(cases) < count:
        # In a fixed order: that of a set differs from process to process.
        left = sorted(missing, key=repr)
        some = [
            _draw(draws, factors, draws.choice(left) if left else ())
            for _ in range(CANDIDATES if left else 1)
        ]
        best = max(some, key=lambda case: len(missing & _pairs(case)))
        if best not in cases:
            missing -= _pairs(best)
            cases.append(best)
    return cases, len(missing)


def cover(
    count: int, seed: int = 0, *, samples: int = 4000, **limits: tuple[Any, ...]
) -> tuple[list[Case], int]:
    """Choose cases so that two settings of different factors meet as often as `count` allows.

    Parameters
    ----------
    count : int
    seed : int
        The same seed gives the same cases on every machine.
    samples : int
        Drawn cases whose pairs are taken for all that are possible.
    **limits : tuple
        Other values of a factor.

    Returns
    -------
    cases : list of dict
    missing : int
        Pairs of settings that are possible and in no case.
    """
    cases, missing = _cover(count, seed, samples, tuple(limits.items()))
    return [dict(case) for case in cases], missing


def name_of(case: Case) -> str:
    """Return the settings of a case that are not the first of their factor."""
    first = {name: values[0] for name, values in (FACTORS | PIPELINE_FACTORS).items()}
    named = [f"{name}={value}" for name, value in case.items() if value != first[name]]
    return ", ".join(named) or "all first values"


def config_of(case: Case, folder: Path) -> RunConfig:
    """Return the config of a case; writes its text to `folder`."""
    pieces = case["ranks"] * case["micros"]
    batch = pieces * max(1, 24 // pieces)
    dtype, precision = PRECISIONS[case["precision"]]
    wide, (recompute, _, every) = case["wide"], case["recompute"].partition(" every ")
    blocks, hidden = case["blocks"], ((130, 70, 9) if wide else (7, 5, 6))[: case["hidden"]]
    sections: dict[str, dict[str, Any]] = {
        "precision": precision,
        "memory": {"recompute": recompute, "recompute_every": int(every or 1), "measure": "hook"},
        "compute": {"kernels": case["kernels"]},
        "optimizer": {
            "kind": "adamw" if case["optimizer"] == "adamw" else "sgd", "lr": 1e-3,
            "momentum": 0.9 if case["optimizer"] == "momentum" else 0.0,
            "clip_norm": 0.5 * case["clip"], "weight_decay": 0.01,
        },
        "train": {
            "steps": 3 if "skipped" in case["precision"] else 2, "global_batch": batch,
            "num_microbatches": case["micros"], "eval_rows": case["eval_rows"],
        },
        "parallel": {
            "zero": case["zero"], "prefetch": case["prefetch"], "overlap": case["overlap"],
            "bucket_bytes": case["bucket_bytes"],
        },
        "comm": {"algorithm": case["algorithm"]},
        "trace": {"enabled": False},
    }  # fmt: skip
    if "pp" in case:
        blocks, hidden = _add_stages(sections, case, blocks, hidden)
    if case["job"] in ("text", "regression"):
        sections["model"] = {
            "hidden": hidden, "activation": case["activation"], "dtype": dtype,
        }  # fmt: skip
        if case["job"] == "text":
            sections["data"] = {"window": 5}
            sections["model"]["embed_dim"] = 16 if wide else 3
        else:
            sections["data"] = {"num_features": 130 if wide else 3}
    else:
        sections["data"] = {"window": 9, "layout": case["job"]}
        sections["model"] = {
            "kind": "decoder", "dtype": dtype, "d_model": 36 if wide else 12, "num_heads": 2,
            "num_kv_heads": case["kv_heads"], "d_ff": 23, "num_blocks": blocks,
            "tied": case["tied"], "dropout": case["dropout"], "loss_chunk_tokens": case["chunk"],
        }  # fmt: skip
    kind = "regression" if case["job"] == "regression" else "text"
    config = make_config(folder, kind, **sections)
    if kind == "text":
        Path(config.data.path).write_bytes(TEXT)
    return _with_rows(config, batch + case["tail"])


def _add_stages(
    sections: dict[str, dict[str, Any]], case: Case, blocks: int, hidden: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """Write what a config says of stages; return blocks and hidden widths that suffice for them."""
    chunks = 2 if case["schedule"] == "interleaved" else 1
    stages = case["pp"] * chunks
    # Beside what is inside: a head, and an embedding unless the rows are features.
    ends = 1 if case["job"] == "regression" else 2
    blocks = max(blocks, stages - ends)
    hidden += (6, 9, 4, 7, 5, 8, 3)[: max(0, stages - ends - len(hidden))]
    inner = len(hidden) if case["job"] in ("text", "regression") else blocks
    names, _, feedback = case["codecs"].partition(", ")
    activations, _, grads = names.partition(" and ")
    sections["parallel"] |= {
        "pp": case["pp"], "schedule": case["schedule"], "chunks": chunks,
        "split": (*(1,) * (stages - 1), inner + ends - stages + 1) if chunks > 1 else (),
    }  # fmt: skip
    sections["compression"] = {
        "activations": activations, "grads": grads or "none", "error_feedback": bool(feedback),
        "bottleneck": case["bottleneck"], "start": "random",
    }  # fmt: skip
    return blocks, hidden


def _with_rows(config: RunConfig, wanted: int) -> RunConfig:
    """Cut the data so that an epoch has at least `wanted` rows, as few as possible."""
    field = "num_rows" if config.data.kind == "regression" else "max_bytes"
    values = config.model_dump(mode="json")
    shape = config.model.kind, config.data.layout, config.data.window
    key = (config.data.kind, *shape) if field == "max_bytes" else ("regression",)

    def count(size: int) -> int:
        if (key, size) not in _ROWS:
            changed = values | {
                "data": values["data"] | {field: size},
                "train": values["train"] | {"global_batch": 1},
            }
            _ROWS[key, size] = load_data(config_from_mapping(changed)).num_train
        return _ROWS[key, size]

    low, high = 40, len(TEXT)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if count(middle) >= wanted else (middle + 1, high)
    values["data"][field] = low
    return config_from_mapping(values)


_ROWS: dict[tuple, int] = {}
