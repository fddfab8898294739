"""The running side of a trace: lists of clock readings, spilled to the rank's file once a step.

One clock reading per boundary is all that is done while messages are in flight; what a stamp
means was registered before. A rank without tracing has a recorder too, with `enabled` False.
"""

from __future__ import annotations

import json
import time
from array import array
from pathlib import Path
from typing import Any

from mpisim.trace.events import PlanTable, ProgramTable
from mpisim.trace.store import HEADER, MEMORY, OPS, PLAN, PROGRAM, RUNS, TraceWriter

SPILL_STAMPS = 1 << 16
"""A list of stamps is spilled when it reaches this length, also in the middle of a step."""


class ProgramStamps:
    """The stamps of one registered program since the last spill."""

    __slots__ = ("activity_codes", "ident", "per_run", "stamps")

    def __init__(self, ident: int, activity_codes: tuple[int, ...]) -> None:
        self.ident, self.activity_codes = ident, activity_codes
        self.per_run = 1 + len(activity_codes)
        self.stamps: list[float] = []


class Recorder:
    """Collects the stamps of one rank.

    Parameters
    ----------
    path : Path or None
        The rank's trace file; None records nothing.
    header : dict
        Written first: rank, world size, clock offset.

    Notes
    -----
    The lists live outside NumPy and hold at most `SPILL_STAMPS` floats per program.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, path: Path | None = None, header: dict[str, Any] | None = None) -> None:
        self.enabled = path is not None
        self._writer = TraceWriter(path) if path is not None else None
        self._programs: list[ProgramStamps] = []
        self._num_plans = 0
        self.step = -1
        self.op_stamps: list[float] = []
        self._memory: list[float] = []
        if self._writer is not None:
            self._writer.write((HEADER, 0, -1, json.dumps(header or {}).encode()))

    def add_program(self, table: ProgramTable) -> ProgramStamps:
        """Register a compiled collective; its runs append to the returned object's list."""
        stamps = ProgramStamps(len(self._programs), tuple(code for code, _ in table.activities))
        self._programs.append(stamps)
        if self._writer is not None:
            text = json.dumps(table.to_json(), separators=(",", ":"))
            self._writer.write((PROGRAM, stamps.ident, self.step, text.encode()))
        return stamps

    def add_plan(self, table: PlanTable) -> int:
        """Register a plan; returns its number for `end_step`."""
        ident = self._num_plans
        self._num_plans += 1
        if self._writer is not None:
            text = json.dumps(table.to_json(), separators=(",", ":"))
            self._writer.write((PLAN, ident, self.step, text.encode()))
        return ident

    def add_memory(self, op_index: int, values: tuple[int, ...]) -> None:
        """Note the bytes per category at the fullest moment of op `op_index` of this step."""
        self._memory.append(float(op_index))
        self._memory.append(self.clock())
        self._memory.extend(values)

    def spill(self, program: ProgramStamps) -> None:
        """Write one program's stamps out (complete runs only)."""
        if self._writer is not None and program.stamps:
            self._writer.write(self._runs(program))
        program.stamps.clear()

    def _runs(self, program: ProgramStamps) -> tuple[int, int, int, bytes]:
        return RUNS, program.ident, self.step, array("d", program.stamps).tobytes()

    def end_step(self, plan: int) -> None:
        """Write everything recorded since the last call, as step `self.step` of plan `plan`."""
        if self._writer is not None:
            ran = [program for program in self._programs if program.stamps]
            records = [self._runs(program) for program in ran]
            records.append((OPS, plan, self.step, array("d", self.op_stamps).tobytes()))
            if self._memory:
                records.append((MEMORY, plan, self.step, array("d", self._memory).tobytes()))
            self._writer.write(*records)
            for program in ran:
                program.stamps.clear()
        self.op_stamps.clear()
        self._memory.clear()

    def drop_step(self) -> None:
        """Forget what was recorded since the last step: it failed, and its stamps mean nothing."""
        for program in self._programs:
            program.stamps.clear()
        self.op_stamps.clear()
        self._memory.clear()

    def close(self) -> None:
        """Spill what is left and close the file."""
        for program in self._programs:
            self.spill(program)
        if self._writer is not None:
            self._writer.close()
