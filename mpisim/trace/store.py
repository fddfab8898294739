"""The trace file of one rank: framed records, those of a step appended with one `write`.

    8 bytes   file magic "MPISIMT1"
    records   16-byte head: kind (u1), 3 zero bytes, id (u4), step (i4), payload bytes (u4);
              then the payload

A record is complete or it is the last one: a rank that is killed in the middle of a write leaves
a file that reads up to the record before. JSON payloads are tables, the others are float64.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpisim.errors import CheckpointError
from mpisim.trace.events import (
    ACTIVITY_DTYPE,
    MESSAGE_DTYPE,
    OP_DTYPE,
    RECV,
    SEND,
    STALL_DTYPE,
    PlanTable,
    ProgramTable,
    program_rows,
)

MAGIC = b"MPISIMT1"
_HEAD = struct.Struct("<B3xIiI")
HEADER, PLAN, PROGRAM, OPS, RUNS, MEMORY = range(6)


class TraceWriter:
    """Appends records to a new trace file, unbuffered, one system call per `write`."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._write_all(MAGIC)

    def write(self, *records: tuple[int, int, int, bytes]) -> None:
        """Append records, each given as (kind, id, step, payload)."""
        parts = []
        for kind, ident, step, payload in records:
            parts += (_HEAD.pack(kind, ident, step, len(payload)), payload)
        self._write_all(b"".join(parts))

    def _write_all(self, data: bytes) -> None:
        # A nearly full disk takes a part; going on behind a part would garble the file.
        rest = memoryview(data)
        while len(rest):
            rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


@dataclass
class RankTrace:
    """One rank's trace, as stored: tables and stamps."""

    header: dict[str, Any] = field(default_factory=dict)
    plans: dict[int, PlanTable] = field(default_factory=dict)
    programs: dict[int, ProgramTable] = field(default_factory=dict)
    ops: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    """Per step: step, plan, stamps (start and end of every op, seconds)."""
    runs: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    """Per spill: step, program, stamps of shape (runs, stamps per run), seconds."""
    memory: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    """Per step: step, plan, array of shape (samples, 2 + categories): op, time, live bytes."""
    truncated: bool = False
    """The last record is incomplete: the rank was killed while it wrote."""

    @property
    def rank(self) -> int:
        """The rank that wrote it."""
        return int(self.header["rank"])


def _records(data: bytes) -> Iterator[tuple[int, int, int, bytes] | None]:
    position = len(MAGIC)
    while position < len(data):
        if position + _HEAD.size > len(data):
            yield None
            return
        kind, ident, step, nbytes = _HEAD.unpack_from(data, position)
        position += _HEAD.size
        if position + nbytes > len(data):
            yield None
            return
        yield kind, ident, step, data[position : position + nbytes]
        position += nbytes


def read_rank(path: Path) -> RankTrace:
    """Read one rank's trace file, up to the last complete record.

    Raises
    ------
    CheckpointError
        The file is missing or is no trace.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"trace file must be readable; got {path}: {error.strerror}. Run with trace.enabled."
        ) from None
    if not data.startswith(MAGIC):
        raise CheckpointError(
            f"trace file must start with {MAGIC.decode()}; got {data[:8]!r} in {path}. Name the "
            f"run directory of a traced run."
        )
    trace = RankTrace()
    try:
        _collect(data, trace)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"trace file must hold whole records; got a damaged one in {path} ({error}). Use "
            f"another run, or the ranks whose files are whole."
        ) from None
    return trace


def _collect(data: bytes, trace: RankTrace) -> None:
    """Add the records of a file to `trace`, up to the last complete one."""
    for record in _records(data):
        if record is None:
            trace.truncated = True
            break
        kind, ident, step, payload = record
        if kind == HEADER:
            trace.header = json.loads(payload)
        elif kind == PLAN:
            trace.plans[ident] = PlanTable.from_json(json.loads(payload))
        elif kind == PROGRAM:
            trace.programs[ident] = ProgramTable.from_json(json.loads(payload))
        else:
            values = np.frombuffer(payload, dtype=np.float64)
            if kind == OPS:
                trace.ops.append((step, ident, values.reshape(-1, 2)))
            elif kind == RUNS:
                per_run = 1 + len(trace.programs[ident].activities)
                trace.runs.append((step, ident, values.reshape(-1, per_run)))
            elif kind == MEMORY:
                width = 2 + len(trace.header["memory_categories"])
                trace.memory.append((step, ident, values.reshape(-1, width)))


def read_run(run_dir: Path) -> list[RankTrace]:
    """Read all trace files of a run directory, in rank order."""
    paths = sorted(Path(run_dir, "trace").glob("rank-*.bin"))
    if not paths:
        raise CheckpointError(
            f"run directory must hold trace/rank-*.bin; got none in {run_dir}. Run with "
            f"trace.enabled = true."
        )
    return [read_rank(path) for path in paths]


def expand_ops(trace: RankTrace) -> np.ndarray:
    """Return the executed ops of a rank as an array of `OP_DTYPE`, in time order."""
    offset = trace.header.get("clock_offset_s", 0.0)
    parts = []
    for step, plan, stamps in trace.ops:
        rows = np.empty(len(stamps), dtype=OP_DTYPE)
        rows["step"], rows["plan"] = step, plan
        rows["op_index"] = np.arange(len(stamps))
        rows["start_s"], rows["end_s"] = stamps[:, 0] + offset, stamps[:, 1] + offset
        parts.append(rows)
    return np.concatenate(parts) if parts else np.empty(0, dtype=OP_DTYPE)


def expand_activities(trace: RankTrace) -> np.ndarray:
    """Return what the collectives of a rank did, as an array of `ACTIVITY_DTYPE`."""
    offset = trace.header.get("clock_offset_s", 0.0)
    parts = []
    seen: dict[int, int] = {}
    for step, ident, stamps in trace.runs:
        activities = np.array(trace.programs[ident].activities, dtype=np.int64).reshape(-1, 2)
        runs, per_run = stamps.shape
        rows = np.empty((runs, per_run - 1), dtype=ACTIVITY_DTYPE)
        rows["step"], rows["program"] = step, ident
        first = seen.get(ident, 0)
        rows["run"] = np.arange(first, first + runs)[:, None]
        seen[ident] = first + runs
        rows["activity"], rows["row"] = activities[:, 0], activities[:, 1]
        rows["start_s"], rows["end_s"] = stamps[:, :-1] + offset, stamps[:, 1:] + offset
        parts.append(rows.reshape(-1))
    return np.concatenate(parts) if parts else np.empty(0, dtype=ACTIVITY_DTYPE)


def expand_messages(trace: RankTrace) -> np.ndarray:
    """Return both sides' messages of a rank as an array of `MESSAGE_DTYPE`, in posting order."""
    offset = trace.header.get("clock_offset_s", 0.0)
    parts = []
    seen: dict[int, int] = {}
    for step, ident, stamps in trace.runs:
        program = trace.programs[ident]
        table = program_rows(program)
        runs = len(stamps)
        first = seen.get(ident, 0)
        seen[ident] = first + runs
        done = {tuple(item): i + 1 for i, item in enumerate(program.activities)}
        for is_send in (True, False):
            peers = table[:, 2] if is_send else table[:, 4]
            used = np.flatnonzero(peers >= 0)
            if not len(used):
                continue
            posted = np.array(program.send_posted if is_send else program.recv_posted)[used]
            code = SEND if is_send else RECV
            # A small send has no stamp of its own: it left from a copy, done when posted, or its
            # completion is part of the wait for its row's receive.
            completed = np.array(
                [done.get((code, int(row)), at) for row, at in zip(used, posted, strict=True)]
            )
            rows = np.empty((runs, len(used)), dtype=MESSAGE_DTYPE)
            rows["step"], rows["program"], rows["tag"] = step, ident, program.tag
            rows["run"] = np.arange(first, first + runs)[:, None]
            rows["row"], rows["is_send"], rows["peer"] = used, is_send, peers[used]
            rows["ring_step"] = table[used, 0]
            rows["nbytes"] = table[used, 3 if is_send else 5]
            rows["posted_s"] = stamps[:, posted] + offset
            rows["completed_s"] = stamps[:, completed] + offset
            parts.append(rows.reshape(-1))
    if not parts:
        return np.empty(0, dtype=MESSAGE_DTYPE)
    messages = np.concatenate(parts)
    # Within one run the rows of a direction are posted in order; runs follow each other in time.
    order = np.lexsort((messages["row"], messages["run"], messages["posted_s"]))
    messages = messages[order]
    counters: dict[tuple[int, int, bool], int] = {}
    keys = zip(
        messages["peer"].tolist(), messages["tag"].tolist(), messages["is_send"].tolist(),
        strict=True,
    )  # fmt: skip
    for position, key in enumerate(keys):
        number = counters.get(key, 0)
        messages["sequence"][position] = number
        counters[key] = number + 1
    return messages


def expand_stalls(trace: RankTrace) -> np.ndarray:
    """Return a rank's waits inside blocking ops as an array of `STALL_DTYPE`.

    A collective that runs beside compute waits without cost; only the part of a wait that falls
    into an op which does nothing but wait is a stall.
    """
    ops, activities = expand_ops(trace), expand_activities(trace)
    waits = activities[(activities["activity"] == RECV) | (activities["activity"] == SEND)]
    waits = waits[waits["end_s"] > waits["start_s"]]
    waits = waits[np.argsort(waits["start_s"], kind="stable")]
    blocks = {ident: [bool(axis) for axis in plan.waits] for ident, plan in trace.plans.items()}
    pairs = zip(ops["plan"].tolist(), ops["op_index"].tolist(), strict=True)
    blocking = ops[np.array([blocks[plan][index] for plan, index in pairs], dtype=bool)]
    # Ops of a rank follow each other, so the blocking ops that a wait meets are neighbours.
    first = np.searchsorted(blocking["end_s"], waits["start_s"], side="right")
    last = np.searchsorted(blocking["start_s"], waits["end_s"], side="left")
    met = np.maximum(last - first, 0)
    wait = np.repeat(np.arange(len(waits)), met)
    within = np.arange(len(wait)) - np.repeat(np.cumsum(met) - met, met)
    op, waits = blocking[first[wait] + within], waits[wait]
    rows = np.empty(len(waits), dtype=STALL_DTYPE)
    rows["step"], rows["op_index"] = op["step"], op["op_index"]
    rows["program"], rows["activity"] = waits["program"], waits["activity"]
    rows["start_s"] = np.maximum(waits["start_s"], op["start_s"])
    rows["end_s"] = np.minimum(waits["end_s"], op["end_s"])
    for ident, program in trace.programs.items():
        mine = rows["program"] == ident
        if mine.any():
            peers = program_rows(program)[waits["row"][mine]]
            rows["peer"][mine] = np.where(rows["activity"][mine] == SEND, peers[:, 2], peers[:, 4])
    return rows[np.lexsort((rows["start_s"], rows["op_index"], rows["step"]))]
