"""Running totals turned into figures per step: traffic, and stalls by cause.

A stall is read off the stamps of the step's own collectives: the part of a wait for a message, or
for the completion of a send, that falls into an op which does nothing but wait.
"""

from __future__ import annotations

import numpy as np

from mpisim.comm.boundary import BoundaryLinks
from mpisim.comm.communicator import Communicator, Traffic
from mpisim.layouts.metrics import STALL_CAUSES
from mpisim.trace.events import ACTIVITIES, RECV, SEND
from mpisim.trace.recorder import ProgramStamps

_CAUSES = {"recv": RECV, "send": SEND}
_BETWEEN_RUNS = len(ACTIVITIES)


class StepMeter:
    """Turns running totals into figures per step, and keeps the stall totals of the job."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], Traffic] = {}
        self._codes: dict[tuple, np.ndarray] = {}
        self._waited_before: dict[str, float] = {}
        self.stall_totals = dict.fromkeys(STALL_CAUSES, 0.0)

    def traffic(self, communicator: Communicator | BoundaryLinks) -> dict[tuple[str, str], Traffic]:
        """Return what `communicator` has moved since the last call, by (axis, collective)."""
        moved = {}
        for collective, total in communicator.traffic().items():
            key = (communicator.axis, collective)
            moved[key] = total - self._before.get(key, Traffic())
            self._before[key] = total
        return moved

    def stalls(
        self, communicator: Communicator, blocked: list[float]
    ) -> dict[tuple[str, str], float]:
        """Return this step's stall seconds on `communicator`, by (axis, cause).

        Parameters
        ----------
        communicator : Communicator
        blocked : list of float
            Start and end of every op that did nothing but wait on this axis, in order, seconds.
            Only waiting inside them counts: beside it, compute went on.
        """
        edges = np.array(blocked or [0.0, 0.0])
        # Time spent blocked up to each edge; between two edges it grows with the time, or not.
        waited = np.repeat(np.cumsum(edges[1::2] - edges[::2]), 2)
        waited[::2] -= edges[1::2] - edges[::2]
        stamps: list[float] = []
        ran: list[tuple[ProgramStamps, int]] = []
        for program in communicator.programs():
            recorded = program.stamps
            if recorded is not None and recorded.stamps:
                stamps += recorded.stamps
                ran.append((recorded, len(recorded.stamps) // recorded.per_run))
        if not stamps:
            return {(communicator.axis, cause): 0.0 for cause in _CAUSES}
        # All stamps of the step at once; the span between two runs is nobody's.
        spans = np.diff(np.interp(stamps, edges, waited))
        seconds = np.bincount(self._span_codes(ran), weights=spans, minlength=_BETWEEN_RUNS)
        return {(communicator.axis, cause): float(seconds[code]) for cause, code in _CAUSES.items()}

    def link_stalls(self, links: BoundaryLinks) -> dict[tuple[str, str], float]:
        """Return the seconds waited for messages between stages since the last call."""
        now = dict(links.stall_s)
        before, self._waited_before = self._waited_before, now
        return {(links.axis, cause): now[cause] - before.get(cause, 0.0) for cause in now}

    def whole_stalls(self, communicator: Communicator) -> dict[tuple[str, str], float]:
        """Return `stalls` of a communicator whose runs all lie inside blocking ops.

        The few stamps of the control sums take a microsecond so, a twentieth of the arrays' way.
        """
        seconds = [0.0] * _BETWEEN_RUNS
        for program in communicator.programs():
            recorded = program.stamps
            if recorded is None or not recorded.stamps:
                continue
            times, per_run = recorded.stamps, recorded.per_run
            for first in range(0, len(times), per_run):
                for place, code in enumerate(recorded.activity_codes, start=first):
                    seconds[code] += times[place + 1] - times[place]
        return {(communicator.axis, cause): seconds[code] for cause, code in _CAUSES.items()}

    def _span_codes(self, ran: list[tuple[ProgramStamps, int]]) -> np.ndarray:
        """Return what each span between two stamps was spent on; the same every step, so kept."""
        key = tuple((recorded.ident, runs) for recorded, runs in ran)
        codes = self._codes.get(key)
        if codes is None:
            listed = [
                code
                for recorded, runs in ran
                for code in (*recorded.activity_codes, _BETWEEN_RUNS) * runs
            ]
            codes = self._codes[key] = np.array(listed[:-1])
        return codes
