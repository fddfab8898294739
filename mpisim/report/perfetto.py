"""A trace as Chrome JSON, which ui.perfetto.dev and chrome://tracing open.

Process = rank. Its threads, each a track on which slices nest and never cross:

    steps              one slice per step or evaluation
    compute            plan ops that only compute or post
    waiting            plan ops that may block
    AXIS collectives   one slice per run of a collective; inside it what it did when
    AXIS send, recv    one slice per message, from posting until this rank saw it complete;
                       messages in flight together get lanes of their own (send 2, send 3, ...);
                       a message between stages is complete for its sender when its WaitSend ends

A flow arrow goes from every send to its receive: number n from a to b with a tag is number n that
b receives from a with it; between stages boundary, microbatch and kind say which. A step that was
skipped says so in its name and in that of its OptimizerStep; both tell the loss scale and the
branch that was taken. Counters show live bytes by category where the trace has them. Times are
microseconds since the first event, in steps of a nanosecond, on rank 0's clock.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpisim.errors import CheckpointError
from mpisim.layouts.codecs import codec_spec
from mpisim.layouts.frames import frame_bytes
from mpisim.report.traces import (
    TRAIN,
    boundary_itemsize,
    expand_stage_messages,
    op_fields,
    read_step_rows,
    read_traces,
    select_steps,
    stage_message_keys,
)
from mpisim.trace.events import ACTIVITIES, ProgramTable
from mpisim.trace.store import (
    RankTrace,
    expand_activities,
    expand_messages,
    expand_ops,
)

# In this order at equal times: a slice must be open before an arrow can be tied to it.
_SLICE, _FLOW, _COUNTER = 0, 1, 2

_DOING = {
    "recv": "wait for receive",
    "combine": "add",
    "send": "wait for send completion",
    "copy": "copy",
}


class _Event(NamedTuple):
    """Sorts as the file does: by time, outer slices before inner ones."""

    ts_ns: int
    order: int
    minus_dur_ns: int
    text: str


def export(run_dir: Path, out: Path, steps: tuple[int, int] | None = None) -> None:
    """Write the trace of a run; see the module docstring.

    Parameters
    ----------
    run_dir : Path
    out : Path
        Written in one piece: whatever happens, it is complete JSON or what it was before.
    steps : (int, int), optional
        First step, and the first one that is left out again.

    Raises
    ------
    CheckpointError
        The run has no trace, or none of these steps.
    """
    traces, left_out = read_traces(run_dir)
    if steps is not None:
        traces = [select_steps(trace, *steps) for trace in traces]
        if traces and not any(trace.ops for trace in traces):
            raise CheckpointError(
                f"steps must lie in the run; got {steps[0]}:{steps[1]}, of which {run_dir} has "
                f"none. Leave --steps out to see all."
            )
    if not traces:
        got = f"{left_out} that end before their first record" if left_out else "none"
        raise CheckpointError(
            f"run directory must hold trace/rank-*.bin to export; got {got} in {run_dir}. Run with "
            f"trace.enabled = true."
        )
    lines = event_lines(traces, read_step_rows(run_dir), boundary_itemsize(run_dir))
    part = out.with_name(out.name + ".part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","otherData":')
            file.write(_json(_about(run_dir, traces)))
            file.write(',"traceEvents":[\n')
            for number, text in enumerate(lines):
                file.write(",\n" if number else "")
                file.write(text)
            file.write("\n]}\n")
        os.replace(part, out)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def event_lines(
    traces: list[RankTrace],
    step_rows: dict[int, dict[str, Any]] | None = None,
    itemsize: int = 0,
) -> Iterator[str]:
    """Yield every event as one line of JSON: first the names of the tracks, then by time.

    `step_rows` are the lines of metrics.jsonl by step, which tell what was skipped; `itemsize` is
    that of what crosses from stage to stage, 0 if it is not known.
    """
    ranks = [_Rank(trace, step_rows or {}, itemsize) for trace in traces]
    flows = match_messages({rank.pid: rank.messages for rank in ranks})
    match_stage_messages(ranks, 1 + max(int(f.max(initial=-1)) for f in flows.values()))
    zero_s = min(rank.first_s for rank in ranks)
    # A job that ended before its first step has tracks and no event.
    zero_s = zero_s if np.isfinite(zero_s) else 0.0
    streams = [rank.events(zero_s, flows[rank.pid]) for rank in ranks]
    for rank in ranks:
        yield from rank.names()
    yield from (event.text for event in heapq.merge(*streams))


def match_messages(messages: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Give a send and the receive that it meets the same number.

    Parameters
    ----------
    messages : dict
        Rank -> array of `MESSAGE_DTYPE`.

    Returns
    -------
    dict
        Rank -> int64 array, one number per message; -1 where the other side is not in the trace
        (its rank was killed, or its file is missing).
    """
    numbers = {rank: np.full(len(rows), -1, dtype=np.int64) for rank, rows in messages.items()}
    used = 0
    for sender, rows in messages.items():
        sends = np.flatnonzero(rows["is_send"])
        for receiver in np.unique(rows["peer"][sends]).tolist():
            if receiver not in messages:
                continue
            theirs = messages[receiver]
            receives = np.flatnonzero(~theirs["is_send"] & (theirs["peer"] == sender))
            mine = sends[rows["peer"][sends] == receiver]
            for tag in np.unique(rows["tag"][mine]).tolist():
                there = receives[theirs["tag"][receives] == tag]
                here = mine[rows["tag"][mine] == tag]
                here = here[np.argsort(rows["sequence"][here])]
                there = there[np.argsort(theirs["sequence"][there])]
                both = min(len(here), len(there))
                numbers[sender][here[:both]] = np.arange(used, used + both)
                numbers[receiver][there[:both]] = np.arange(used, used + both)
                used += both
    return numbers


def match_stage_messages(ranks: list[_Rank], first: int) -> None:
    """Give both sides of every message between stages a number, from `first` on; -1: one side."""
    sides: dict[tuple, list[tuple[np.ndarray, int]]] = {}
    for rank in ranks:
        for place, key in enumerate(stage_message_keys(rank.pid, rank.stage_messages)):
            sides.setdefault(key, []).append((rank.stage_flows, place))
    for both in sides.values():
        if len(both) == 2:
            for flows, place in both:
                flows[place] = first
            first += 1


def assign_lanes(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Put intervals on as few lanes as possible so that no two on one lane overlap.

    Parameters
    ----------
    start, end : ndarray of shape (n,)
        Times, in one unit.

    Returns
    -------
    ndarray of shape (n,)
        Lane of each interval, from 0: the lowest one that is free.
    """
    lanes = np.zeros(len(start), dtype=np.int64)
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    num_lanes = 0
    for index in np.lexsort((end, start)).tolist():
        while busy and busy[0][0] <= start[index]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = num_lanes
            num_lanes += 1
        lanes[index] = lane
        heapq.heappush(busy, (end[index], lane))
    return lanes


def _about(run_dir: Path, traces: list[RankTrace]) -> dict[str, Any]:
    about: dict[str, Any] = {"run": run_dir.resolve().name, "ranks": len(traces)}
    cut = [trace.rank for trace in traces if trace.truncated]
    if cut:
        about["truncated_ranks"] = cut
    return about


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


class _Rank:
    """The events of one rank."""

    def __init__(
        self, trace: RankTrace, step_rows: dict[int, dict[str, Any]], itemsize: int
    ) -> None:
        self.trace, self.pid, self._itemsize = trace, trace.rank, itemsize
        self._outcomes = {step: _outcome(row) for step, row in step_rows.items()}
        self.ops = expand_ops(trace)
        self.activities = expand_activities(trace)
        self.messages = expand_messages(trace)
        self.stage_messages = expand_stage_messages(trace)
        self.stage_flows = np.full(len(self.stage_messages), -1)
        """Number of the arrow of each message between stages; -1: it has none."""
        self.first_s, self._last_s = self._span()
        self._tracks: dict[str, int] = {}
        # Perfetto takes thread 0 of process 0 for the idle task, so threads count from 1.
        for name in ("steps", "compute", "waiting"):
            self._track(name)
        self._lanes = np.zeros(len(self.messages), dtype=np.int64)
        self._stage_lanes = np.zeros(len(self.stage_messages), dtype=np.int64)
        self._name_lanes()

    def _track(self, name: str) -> int:
        return self._tracks.setdefault(name, len(self._tracks) + 1)

    def _name_lanes(self) -> None:
        """Give each axis a track for its collectives and lanes for its sends and receives."""
        axes = {ident: program.axis for ident, program in self.trace.programs.items()}
        start = self.messages["posted_s"]
        end, _ = self._message_ends(self.messages)
        of_axis = np.array([axes[ident] for ident in self.messages["program"].tolist()])
        between = self.stage_messages
        between_end, _ = self._message_ends(between)
        for axis in dict.fromkeys([*axes.values(), *["pp"] * bool(len(between))]):
            if axis in axes.values():
                self._track(f"{axis} collectives")
            for is_send, way in ((True, "send"), (False, "recv")):
                mine = np.flatnonzero((self.messages["is_send"] == is_send) & (of_axis == axis))
                stages = np.flatnonzero((between["is_send"] == is_send) & (axis == "pp"))
                lanes = assign_lanes(
                    np.concatenate([start[mine], between["posted_s"][stages]]),
                    np.concatenate([end[mine], between_end[stages]]),
                )
                for lane in range(int(lanes.max()) + 1 if len(lanes) else 0):
                    track = self._track(f"{axis} {way}" + (f" {lane + 1}" if lane else ""))
                    self._lanes[mine[lanes[: len(mine)] == lane]] = track
                    self._stage_lanes[stages[lanes[len(mine) :] == lane]] = track

    def _span(self) -> tuple[float, float]:
        """Return the first start and the last known moment, (inf, -inf) if there is none."""
        ops, activities, messages = self.ops, self.activities, self.messages
        starts = np.concatenate([ops["start_s"], activities["start_s"], messages["posted_s"]])
        ends = np.concatenate([ops["end_s"], activities["end_s"], messages["completed_s"]])
        known = np.concatenate([starts, ends[np.isfinite(ends)]])
        return float(starts.min(initial=np.inf)), float(known.max(initial=-np.inf))

    def _closed(self, start_s: np.ndarray, end_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Close what has no end at the last moment that is known; also tell what that was."""
        unfinished = ~np.isfinite(end_s) | (end_s < start_s)
        return np.where(unfinished, self._last_s, end_s), unfinished

    def _message_ends(self, messages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return when each message was complete, and which never were.

        A small send is done when it is posted; an arrow needs a slice of a nanosecond at least.
        """
        start = messages["posted_s"]
        ends, unfinished = self._closed(start, messages["completed_s"])
        return np.maximum(ends, start + 2e-9), unfinished

    def names(self) -> Iterator[str]:
        """Yield the metadata events that name and order the process and its tracks."""

        def metadata(kind: str, tid: int, **args: Any) -> str:
            return _json(
                {"ph": "M", "name": kind, "pid": self.pid, "tid": tid, "ts": 0, "args": args}
            )

        host = self.trace.header.get("host")
        label = f"rank {self.pid}" + (f" on {host}" if host else "")
        yield metadata("process_name", 1, name=label)
        yield metadata("process_sort_index", 1, sort_index=self.pid)
        for name, tid in self._tracks.items():
            yield metadata("thread_name", tid, name=name)
            yield metadata("thread_sort_index", tid, sort_index=tid)

    def events(self, zero_s: float, flows: np.ndarray) -> Iterator[_Event]:
        """Return all timed events of this rank in the order of the file."""
        made = [
            *self._op_events(zero_s), *self._collective_events(zero_s),
            *self._message_events(zero_s, flows), *self._stage_events(zero_s),
            *self._memory_events(zero_s),
        ]  # fmt: skip
        made.sort()
        return iter(made)

    def _slice(
        self, tid: int, start_ns: int, end_ns: int, name: str, category: str, args: dict[str, Any]
    ) -> _Event:
        duration = max(end_ns - start_ns, 0)
        text = _json(
            {
                "ph": "X", "name": name, "cat": category, "pid": self.pid, "tid": tid,
                "ts": start_ns / 1000, "dur": duration / 1000, "args": args,
            }
        )  # fmt: skip
        return _Event(start_ns, _SLICE, -duration, text)

    def _op_events(self, zero_s: float) -> Iterator[_Event]:
        ops, plans = self.ops, self.trace.plans
        ends, unfinished = self._closed(ops["start_s"], ops["end_s"])
        start, end = _nanoseconds(ops["start_s"], ends, zero_s)
        compute, waiting = self._track("compute"), self._track("waiting")
        steps: dict[tuple[int, int], tuple[int, int]] = {}
        rows = zip(
            ops["step"].tolist(), ops["plan"].tolist(), ops["op_index"].tolist(), start.tolist(),
            end.tolist(), unfinished.tolist(), strict=True,
        )  # fmt: skip
        for step, ident, index, begin, finish, cut in rows:
            plan = plans[ident]
            axis = plan.waits[index]
            args = {"op": plan.texts[index], "op_index": index, "step": step, "plan": plan.name}
            if axis:
                args["waits_on"] = axis
            if cut:
                args["unfinished"] = True
            name = _short(plan.texts[index])
            if len(self.stage_messages) and (micro := op_fields(plan.texts[index]).get("micro")):
                name += f", micro {micro}"
            if plan.kinds[index] == "OptimizerStep":
                # The plan is the same for both: only here is it known what the op did.
                mark, outcome = self._outcomes.get(step, ("", {}))
                name, args = name + mark, {**args, **outcome}
            yield self._slice(
                waiting if axis else compute, begin, finish, name,
                "wait" if axis else "compute", args,
            )  # fmt: skip
            first, last = steps.get((step, ident), (begin, finish))
            steps[step, ident] = min(first, begin), max(last, finish)
        for (step, ident), (begin, finish) in steps.items():
            name = plans[ident].name
            args = {"step": step, "plan": name}
            if name.startswith(TRAIN):
                mark, outcome = self._outcomes.get(step, ("", {}))
                label, args = f"step {step}{mark}", {**args, **outcome}
            else:
                label = f"evaluation after step {step}"
            yield self._slice(self._track("steps"), begin, finish, label, "step", args)

    def _collective_events(self, zero_s: float) -> Iterator[_Event]:
        rows, programs = self.activities, self.trace.programs
        ends, _ = self._closed(rows["start_s"], rows["end_s"])
        start, end = _nanoseconds(rows["start_s"], ends, zero_s)
        runs: dict[tuple[int, int], list[int]] = {}
        columns = zip(
            rows["step"].tolist(), rows["program"].tolist(), rows["run"].tolist(),
            rows["row"].tolist(), rows["activity"].tolist(), start.tolist(), end.tolist(),
            strict=True,
        )  # fmt: skip
        for step, ident, number, row, activity, begin, finish in columns:
            program = programs[ident]
            kind = ACTIVITIES[activity]
            ring_step, segment, *_ = program.rows[row]
            yield self._slice(
                self._track(f"{program.axis} collectives"), begin, finish, _DOING[kind],
                program.axis, {"ring_step": ring_step, "segment": segment},
            )  # fmt: skip
            run = runs.setdefault((ident, number), [begin, finish, step])
            run[0], run[1] = min(run[0], begin), max(run[1], finish)
        for (ident, _), (begin, finish, step) in runs.items():
            program = programs[ident]
            sent = sum(row[3] for row in program.rows)
            yield self._slice(
                self._track(f"{program.axis} collectives"), begin, finish,
                f"{program.collective} {program.label}".rstrip(), program.axis,
                {
                    "collective": program.collective, "algorithm": program.algorithm,
                    "axis": program.axis, "step": step, "count": program.count,
                    "dtype": program.dtype, "bytes_sent": sent,
                },
            )  # fmt: skip

    def _message_events(self, zero_s: float, flows: np.ndarray) -> Iterator[_Event]:
        rows, programs = self.messages, self.trace.programs
        ends, unfinished = self._message_ends(rows)
        start, end = _nanoseconds(rows["posted_s"], ends, zero_s)
        texts = {ident: self._op_of(program) for ident, program in programs.items()}
        columns = zip(
            rows["step"].tolist(), rows["program"].tolist(), rows["row"].tolist(),
            rows["is_send"].tolist(), rows["peer"].tolist(), rows["tag"].tolist(),
            rows["sequence"].tolist(), rows["ring_step"].tolist(), rows["nbytes"].tolist(),
            start.tolist(), end.tolist(), unfinished.tolist(), self._lanes.tolist(),
            flows.tolist(), strict=True,
        )  # fmt: skip
        for (
            step, ident, row, is_send, peer, tag, sequence, ring_step, nbytes, begin, finish, cut,
            tid, flow,
        ) in columns:  # fmt: skip
            program = programs[ident]
            way = f"to {peer}" if is_send else f"from {peer}"
            args = {
                "bytes": nbytes, "peer": peer, "collective": program.collective,
                "axis": program.axis, "ring_step": ring_step, "segment": program.rows[row][1],
                "op": texts[ident], "step": step, "tag": tag, "sequence": sequence,
            }  # fmt: skip
            if cut:
                args["unfinished"] = True
            label = program.label or program.collective
            yield self._slice(tid, begin, finish, f"{label} {way}", program.axis, args)
            if flow >= 0:
                yield self._arrow(tid, program.axis, flow, is_send, begin, finish)

    def _arrow(
        self, tid: int, axis: str, flow: int, is_send: bool, begin: int, finish: int
    ) -> _Event:
        """Return one end of an arrow, tied to the slice of its message."""
        arrow = {"name": "message", "cat": axis, "pid": self.pid, "tid": tid}
        if is_send:
            at, arrow = begin, {"ph": "s", **arrow}
        else:
            # Inside the slice, whose last nanosecond is its end.
            at, arrow = max(finish - 1, begin), {"ph": "f", "bp": "e", **arrow}
        return _Event(at, _FLOW, 0, _json({**arrow, "ts": at / 1000, "id": flow}))

    def _stage_events(self, zero_s: float) -> Iterator[_Event]:
        """Yield slices and arrow ends of the messages between stages."""
        rows, plans = self.stage_messages, self.trace.plans
        ends, unfinished = self._message_ends(rows)
        start, end = _nanoseconds(rows["posted_s"], ends, zero_s)
        columns = zip(
            *(rows[name].tolist() for name in ("step", "plan", "op_index", "is_send", "peer")),
            start.tolist(), end.tolist(), unfinished.tolist(), self._stage_lanes.tolist(),
            self.stage_flows.tolist(), strict=True,
        )  # fmt: skip
        for step, ident, index, is_send, peer, begin, finish, cut, tid, flow in columns:
            text = plans[ident].texts[index]
            words = op_fields(text)
            kind = "grad" if plans[ident].kinds[index].endswith("Grad") else "activation"
            args = {
                "peer": peer, "axis": "pp", "kind": kind, "boundary": int(words["boundary"]),
                "micro": int(words["micro"]), "codec": words["codec"], "op": text, "step": step,
            }  # fmt: skip
            nbytes = _frame_bytes(words, self._itemsize)
            if nbytes is not None:
                args["bytes"] = nbytes
            if cut:
                args["unfinished"] = True
            way = f"to {peer}" if is_send else f"from {peer}"
            yield self._slice(tid, begin, finish, f"{kind} {words['micro']} {way}", "pp", args)
            if flow >= 0:
                yield self._arrow(tid, "pp", flow, is_send, begin, finish)

    def _op_of(self, program: ProgramTable) -> str:
        """Return the text of the plan op that starts a collective, "" if none does."""
        what, _, number = program.label.partition(" ")
        kinds = {"bucket": ("StartSync",), "params": ("StartUnshard", "GatherParams")}
        if program.axis == "pp":
            kinds = {"bucket": ("ExchangeTied",)}
        for plan in self.trace.plans.values():
            for text in plan.texts:
                kind, *pairs = text.split()
                if program.collective == "gather":
                    found = kind == "GatherMetrics" and program.axis == "control"
                elif number:
                    found = kind in kinds.get(what, ()) and f"bucket={number}" in pairs
                else:
                    found = bool(program.label) and f"kind={program.label}" in pairs
                if found:
                    return text
        return ""

    def _memory_events(self, zero_s: float) -> Iterator[_Event]:
        names = self.trace.header.get("memory_categories", [])
        offset = self.trace.header.get("clock_offset_s", 0.0)
        samples = [values for _, _, values in self.trace.memory]
        if not samples:
            return
        values = np.concatenate(samples)
        # A category that is never used would only be a flat line.
        used = [number for number in range(len(names)) if values[:, 2 + number].any()]
        times, _ = _nanoseconds(values[:, 1] + offset, values[:, 1] + offset, zero_s)
        for at, row in zip(times.tolist(), values.tolist(), strict=True):
            args = {names[number]: int(row[2 + number]) for number in used}
            text = _json(
                {
                    "ph": "C", "name": "live bytes", "cat": "memory", "pid": self.pid, "tid": 1,
                    "ts": at / 1000, "args": args,
                }
            )  # fmt: skip
            yield _Event(at, _COUNTER, 0, text)


def _nanoseconds(
    start_s: np.ndarray, end_s: np.ndarray, zero_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Round both ends to whole nanoseconds: what touched still touches, what nested still nests."""
    start = np.rint((start_s - zero_s) * 1e9).astype(np.int64)
    return start, np.rint((end_s - zero_s) * 1e9).astype(np.int64)


def _frame_bytes(words: dict[str, str], itemsize: int) -> int | None:
    """Return the bytes of a message between stages; None: dtype or codec is not known here."""
    if not itemsize:
        return None
    try:
        shape = [int(size) for size in words["shape"].split("x")]
        return frame_bytes(codec_spec(words["codec"]), shape, itemsize)
    except ValueError:  # a codec of an extension
        return None


def _outcome(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what a step's line says of its end: a mark for names, and arguments."""
    if "skipped" not in row:
        return "", {}
    outcome = {"branch": "skip" if row["skipped"] else "commit"}
    if "loss_scale" in row:
        outcome["loss_scale"] = row["loss_scale"]
    return " (skipped)" if row["skipped"] else "", outcome


def _short(op_text: str) -> str:
    """Return an op's kind and its first field, such as ``Forward head``."""
    kind, *pairs = op_text.split()
    values = [pair.partition("=") for pair in pairs[:1]]
    return " ".join([kind, *(f"{k} {v}" if v.isdigit() else v for k, _, v in values)])
