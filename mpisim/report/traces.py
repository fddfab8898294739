"""What only a trace can tell: stalls of a run without a summary, overlap, messages of stages.

`rows.py` comes here when summary.json is missing; `perfetto.py` and `plots/` read traces with
`read_traces`, which takes what a killed job left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpisim.errors import CheckpointError
from mpisim.layouts.metrics import STALL_CAUSES
from mpisim.report.load import load_run
from mpisim.trace.events import ACTIVITIES
from mpisim.trace.store import (
    RankTrace,
    expand_messages,
    expand_ops,
    expand_stalls,
    read_rank,
)

TRAIN = "train-"
"""Names of training plans start with this."""

SENDS, RECEIVES = ("SendActivation", "SendGrad"), ("RecvActivation", "RecvGrad")
"""Kinds of ops that move a message between two stages."""


def read_traces(run_dir: Path) -> tuple[list[RankTrace], int]:
    """Read the traces of a run as far as they go.

    Returns
    -------
    list of RankTrace
        In rank order; those whose rank was killed before its first record are left out.
    int
        Trace files that were left out.
    """
    traces, left_out = [], 0
    for path in sorted((Path(run_dir) / "trace").glob("rank-*.bin")):
        try:
            trace = read_rank(path)
        except CheckpointError:
            left_out += 1
            continue
        if "rank" in trace.header:
            traces.append(trace)
        else:
            left_out += 1
    return traces, left_out


def read_step_rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of metrics.jsonl about steps, by step; a step that was cut has none.

    Empty for a folder that holds traces alone: they can be looked at without the run's record.
    """
    if not (Path(run_dir) / "run.json").is_file():
        return {}
    return {row["step"]: row for row in load_run(run_dir).steps}


def boundary_itemsize(run_dir: Path) -> int:
    """Return the bytes of an element of what crosses from stage to stage; 0: not known."""
    if not (Path(run_dir) / "run.json").is_file():
        return 0
    config = load_run(run_dir).config
    compute = (config.get("precision") or {}).get("compute", "same")
    name = (config.get("model") or {}).get("dtype") if compute == "same" else compute
    return {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}.get(name, 0)


def training_part(trace: RankTrace) -> RankTrace:
    """Return a trace without the ops of evaluations."""
    training = {ident for ident, plan in trace.plans.items() if plan.name.startswith(TRAIN)}
    return replace(trace, ops=[item for item in trace.ops if item[1] in training])


def select_steps(trace: RankTrace, first: int, end: int) -> RankTrace:
    """Return the part of a trace that belongs to steps `first` to `end` - 1."""

    def part(records: list) -> list:
        return [record for record in records if first <= record[0] < end]

    return replace(trace, ops=part(trace.ops), runs=part(trace.runs), memory=part(trace.memory))


def stall_totals(trace: RankTrace) -> dict[tuple[str, str], float]:
    """Return a rank's stall seconds by (axis, cause), as summary.json has them.

    Training steps only, without the gather of the figures at their ends. What waits for a message
    between stages has no stamps of its own: all time of its op counts, decoding included.
    """
    trace = training_part(trace)
    plan_of_step = {step: ident for step, ident, _ in trace.ops}
    totals = dict.fromkeys(STALL_CAUSES, 0.0)
    for row in expand_stalls(trace):
        plan = trace.plans[plan_of_step[int(row["step"])]]
        axis = trace.programs[int(row["program"])].axis
        # A ring that goes on while its rank waits for something else is not what it waits for.
        if plan.kinds[row["op_index"]] == "GatherMetrics" or plan.waits[row["op_index"]] != axis:
            continue
        # Both ends of a tied table come to its exchange when their pipeline is empty.
        cause = "recv" if axis == "pp" else ACTIVITIES[row["activity"]]
        totals[axis, cause] = totals.get((axis, cause), 0.0) + float(row["end_s"] - row["start_s"])
    for _, ident, stamps in trace.ops:
        kinds = np.array(trace.plans[ident].kinds[: len(stamps)])
        for cause, of_cause in (("recv", RECEIVES), ("send", ("WaitSend",))):
            spans = stamps[np.isin(kinds, of_cause)]
            totals["pp", cause] += float((spans[:, 1] - spans[:, 0]).sum())
    return totals


@dataclass(frozen=True)
class Overlap:
    """How many gradient ring steps were over before the last backward of their update ended."""

    ring_steps: int
    """Ring steps of all buckets but the last one, over all ranks and updates."""
    hidden: int
    """Those of them whose message had arrived before the last backward op ended."""

    @property
    def share(self) -> float:
        """`hidden` as a share of `ring_steps`; 0 when there are none."""
        return self.hidden / self.ring_steps if self.ring_steps else 0.0


def overlap(traces: Iterable[RankTrace], first_step: int = 0) -> Overlap:
    """Count the ring steps of axis dp that backward hid.

    Parameters
    ----------
    traces : iterable of RankTrace
    first_step : int
        Earlier updates (warm-up) are left out.

    Returns
    -------
    Overlap
        The last bucket is left out: it starts when backward is over, so nothing can hide it.
    """
    total = hidden = 0
    for full in traces:
        trace = training_part(full)
        buckets = {
            ident: int(program.label.split()[-1])
            for ident, program in trace.programs.items()
            if program.axis == "dp" and program.label.startswith("bucket ")
        }
        if not buckets:
            continue
        last = max(buckets.values())
        messages = expand_messages(trace)
        counted = np.array([ident for ident, number in buckets.items() if number != last])
        arrived = messages[~messages["is_send"] & np.isin(messages["program"], counted)]
        ends = _last_backward_ends(trace)
        known = np.isin(arrived["step"], np.array(sorted(ends), dtype=np.int64))
        arrived = arrived[known & (arrived["step"] >= first_step)]
        if not len(arrived):
            continue
        # A segmented ring step is over when its last segment is.
        keys = np.stack([arrived["program"], arrived["run"], arrived["ring_step"]], axis=1)
        _, groups = np.unique(keys, axis=0, return_inverse=True)
        groups = groups.reshape(-1)
        done = np.zeros(groups.max() + 1)
        np.maximum.at(done, groups, arrived["completed_s"])
        limit = np.zeros(len(done))
        limit[groups] = [ends[step] for step in arrived["step"].tolist()]
        total += len(done)
        hidden += int(np.count_nonzero(done <= limit))
    return Overlap(total, hidden)


def _last_backward_ends(trace: RankTrace) -> dict[int, float]:
    ends: dict[int, float] = {}
    ops = expand_ops(trace)
    for step, plan, index, end in zip(
        ops["step"].tolist(), ops["plan"].tolist(), ops["op_index"].tolist(),
        ops["end_s"].tolist(), strict=True,
    ):  # fmt: skip
        if trace.plans[plan].kinds[index].startswith("Backward"):
            ends[step] = max(end, ends.get(step, end))
    return ends


# Messages between stages --------------------------------------------------------------------------


def op_fields(text: str) -> dict[str, str]:
    """Return the fields of an op's text.

    Examples
    --------
    >>> op_fields("WaitSend boundary=0 micro=3 peer=1 kind=grad")["micro"]
    '3'
    """
    return dict(pair.split("=", 1) for pair in text.split()[1:] if "=" in pair)


STAGE_MESSAGE_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("plan", "i4"),
        ("op_index", "i4"),
        ("is_send", "?"),
        ("peer", "i4"),
        ("boundary", "i4"),
        ("micro", "i4"),
        ("is_grad", "?"),
        ("occurrence", "i4"),
        ("posted_s", "f8"),
        ("completed_s", "f8"),
    ]
)
"""One message between stages, one side of it. A send is complete when its WaitSend has ended, NaN
if that never ran; `occurrence` counts runs of the same op within a step (evaluations)."""


def expand_stage_messages(trace: RankTrace) -> np.ndarray:
    """Return a rank's messages of axis pp as an array of `STAGE_MESSAGE_DTYPE`, in order."""
    ops = expand_ops(trace)
    found: list[tuple] = []
    open_sends: dict[tuple, int] = {}
    seen: dict[tuple, int] = {}
    kept = {
        ident: {
            index: (kind, op_fields(text))
            for index, (kind, text) in enumerate(zip(plan.kinds, plan.texts, strict=True))
            if kind in SENDS or kind in RECEIVES or kind == "WaitSend"
        }
        for ident, plan in trace.plans.items()
    }
    columns = (ops[name].tolist() for name in ("step", "plan", "op_index", "start_s", "end_s"))
    for step, ident, index, start, end in zip(*columns, strict=True):
        if index not in kept[ident]:
            continue
        kind, words = kept[ident][index]
        peer, boundary, micro = (int(words[name]) for name in ("peer", "boundary", "micro"))
        if kind == "WaitSend":
            place = open_sends.pop((peer, boundary, micro, words["kind"] == "grad"), None)
            if place is not None:
                found[place] = (*found[place][:-1], end)
            continue
        is_send, is_grad = kind in SENDS, kind.endswith("Grad")
        train = trace.plans[ident].name.startswith(TRAIN)
        key = (step, train, is_send, peer, boundary, micro, is_grad)
        occurrence = seen.get(key, 0)
        seen[key] = occurrence + 1
        if is_send:
            open_sends[peer, boundary, micro, is_grad] = len(found)
        # Training and evaluation of one step are told apart by the sign.
        number = occurrence if train else -1 - occurrence
        found.append(
            (
                step, ident, index, is_send, peer, boundary, micro, is_grad, number, start,
                np.nan if is_send else end,
            )
        )  # fmt: skip
    return np.array(found, dtype=STAGE_MESSAGE_DTYPE)


def stage_message_keys(rank: int, messages: np.ndarray) -> list[tuple]:
    """Return a key per message that its two sides, and they alone, have in common."""
    names = ("is_send", "peer", "step", "occurrence", "boundary", "micro", "is_grad")
    return [
        ((rank, peer) if is_send else (peer, rank), *rest)
        for is_send, peer, *rest in zip(*(messages[name].tolist() for name in names), strict=True)
    ]
