"""Plans of a tiny model, and surgery on them, for the tests of `mpisim.plan`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from mpisim.errors import PlanError
from mpisim.mesh import Mesh
from mpisim.nn.decoder import build_decoder
from mpisim.nn.models import build_mlp
from mpisim.plan.build import BlockSpecs, Pipeline, Plan, build_eval_plan, build_train_plan
from mpisim.plan.check import check_plan
from mpisim.plan.ops import ALL_MICROS, Op, StartSync, WaitSync

MODEL = build_mlp(
    input_kind="features", num_features=2, hidden=(3, 2), activation="relu", output=("targets", 1)
)
"""Blocks block0 (9 parameters), block1 (8), head (3): in float64 72, 64 and 24 bytes."""

SIZES = {"block0": 9, "block1": 8, "head": 3}


DEEP = build_mlp(
    input_kind="features", num_features=2, hidden=(3, 2, 3, 2, 3), activation="tanh",
    output=("targets", 1),
)  # fmt: skip
"""Blocks block0 .. block4 and head: enough for segments of several blocks."""


DECODER = build_decoder(
    vocab_size=5, d_model=2, num_blocks=5, num_heads=1, num_kv_heads=1, d_ff=3, tied=True,
    max_len=4, dropout=0.0,
)  # fmt: skip
"""Blocks embed, block0 .. block4 and head: attention has an interior to compute again."""


def specs(rows: int, length: int | None = None):
    return MODEL.spec(rows, np.dtype("float64"), length)


def deep_specs(rows: int, length: int | None = None):
    return DEEP.spec(rows, np.dtype("float64"), length)


def decoder_specs(rows: int, length: int | None = None):
    return DECODER.spec(rows, np.dtype("float64"), length)


def train_plan(
    rows: Iterable[Iterable[int]] = ((2,), (2,)),
    *,
    bucket_bytes: int = 1 << 20,
    overlap: bool = True,
    algorithm: str = "auto",
    specs: BlockSpecs = specs,
    lengths: Iterable[Iterable[int]] = (),
    recompute: str = "none",
    every: int = 1,
    zero: int = 0,
    prefetch: bool = False,
) -> Plan:
    rows = tuple(map(tuple, rows))
    return build_train_plan(
        mesh=Mesh(dp=len(rows)), specs=specs, rows=rows, dtype="float64", itemsize=8,
        bucket_bytes=bucket_bytes, overlap=overlap, algorithm=algorithm,
        lengths=tuple(map(tuple, lengths)), recompute=recompute, recompute_every=every,
        zero=zero, prefetch=prefetch, param_dtype="float64",
    )  # fmt: skip


def eval_plan(
    rows: Iterable[Iterable[int]] = ((2,), (2,)),
    *,
    specs: BlockSpecs = specs,
    zero: int = 0,
    prefetch: bool = False,
) -> Plan:
    rows = tuple(map(tuple, rows))
    return build_eval_plan(
        mesh=Mesh(dp=len(rows)), specs=specs, rows=rows, dtype="float64", algorithm="auto",
        buckets=train_plan(rows, specs=specs, zero=zero).buckets if zero else (), zero=zero,
        prefetch=prefetch, param_dtype="float64",
    )  # fmt: skip


def small_decoder(num_blocks: int, tied: bool):
    """Return a decoder of embed, `num_blocks` blocks and head."""
    return build_decoder(
        vocab_size=5, d_model=2, num_blocks=num_blocks, num_heads=1, num_kv_heads=1, d_ff=3,
        tied=tied, max_len=4, dropout=0.0,
    )  # fmt: skip


def cut(names: Iterable[str], parts: int) -> tuple[tuple[str, ...], ...]:
    """Cut a list into neighbours; the first ones get one more if it does not divide."""
    names = tuple(names)
    ends = [-(-len(names) * part // parts) for part in range(parts + 1)]
    return tuple(names[lo:hi] for lo, hi in zip(ends, ends[1:], strict=False))


def pipeline_plan(
    pp: int,
    micros: int,
    schedule: str,
    *,
    dp: int = 1,
    chunks: int | None = None,
    num_blocks: int | None = None,
    tied: bool = True,
    kind: str = "train",
    rows: Iterable[Iterable[int]] | None = None,
    zero: int = 0,
    prefetch: bool = False,
    codecs: tuple[str, str] = ("none", "none"),
    **options,
) -> Plan:
    """Return a plan of a small decoder in stages; interleaved has two chunks a rank by default."""
    chunks = chunks or (2 if schedule == "interleaved" else 1)
    model = small_decoder(num_blocks or max(pp * chunks - 2, 1), tied)

    def specs(rows, length=None):
        return model.spec(rows, np.dtype("float64"), length)

    rows = tuple(map(tuple, rows)) if rows else ((2,) * micros,) * (dp * pp)
    stages = cut((block.name for block in specs(1)), pp * chunks)
    common = {
        "mesh": Mesh(dp=dp, pp=pp), "specs": specs, "rows": rows, "dtype": "float64",
        "algorithm": "auto", "zero": zero, "prefetch": prefetch, "param_dtype": "float64",
        "pipeline": Pipeline(stages, schedule, *codecs),
    }  # fmt: skip
    train = build_train_plan(
        **common,
        itemsize=8,
        bucket_bytes=1,
        **{"overlap": True, "reduce_dtype": "float64"} | options,
    )
    if kind == "train":
        return train
    return build_eval_plan(**common, buckets=train.buckets)


def start_sync(bucket: int, count: int) -> StartSync:
    """Return the op that starts an all-reduce once a step."""
    return StartSync(bucket, ALL_MICROS, count, "all_reduce")


def wait_sync(bucket: int) -> WaitSync:
    """Return the op that waits for it."""
    return WaitSync(bucket, ALL_MICROS)


def edited(
    plan: Plan, edit: Callable[[list[Op]], None], ranks: Iterable[int] | None = None
) -> Plan:
    """Return `plan` after ``edit(ops)`` on the ops of the given ranks (all by default)."""
    chosen = range(len(plan.ranks)) if ranks is None else tuple(ranks)
    lists = [list(ops) for ops in plan.ranks]
    for rank in chosen:
        edit(lists[rank])
    return replace(plan, ranks=tuple(map(tuple, lists)))


def removed(plan: Plan, op: Op, ranks: Iterable[int] | None = None) -> Plan:
    """Return `plan` without the first `op` of the given ranks."""
    return edited(plan, lambda ops: ops.remove(op), ranks)


def moved(plan: Plan, op: Op, before: Op, ranks: Iterable[int] | None = None) -> Plan:
    """Return `plan` with `op` moved to just before `before`."""

    def edit(ops: list[Op]) -> None:
        ops.remove(op)
        ops.insert(ops.index(before), op)

    return edited(plan, edit, ranks)


def replaced(plan: Plan, op: Op, by: Op, ranks: Iterable[int] | None = None) -> Plan:
    """Return `plan` with the first `op` replaced."""

    def edit(ops: list[Op]) -> None:
        ops[ops.index(op)] = by

    return edited(plan, edit, ranks)


def refused(plan, rule, *, op=None, ranks=None, error=PlanError):
    """Check that `plan` is refused by `rule`, with a mark at `op` on `ranks` (or on any one)."""
    with pytest.raises(error) as caught:
        check_plan(plan)
    assert type(caught.value) is error
    text = str(caught.value)
    assert re.search(rule, text), text
    marked = re.findall(r"^  rank (\d+) op +\d+ >> (.*)$", text, flags=re.MULTILINE)
    assert marked, text
    if ranks is None:
        assert len(marked) == 1, text
    else:
        assert [int(rank) for rank, _ in marked] == list(ranks), text
    if op is not None:
        assert {marked_op for _, marked_op in marked} == {op}, text
