"""Running totals turned into figures per step: traffic, and stalls by cause.

A stall is read off the stamps of the step's own collectives: the part of a wait for a message, or
for the completion of a send, that falls into an op which does nothing but wait.
"""

from __future__ import annotations

import numpy as np

from mpisim.comm.communicator import Communicator, Traffic
from mpisim.layouts.metrics import STALL_CAUSES
from mpisim.trace.events import RECV, SEND

_CAUSES = {"recv": RECV, "send": SEND}


class StepMeter:
    """Turns running totals into figures per step, and keeps the stall totals of the job."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], Traffic] = {}
        self._codes: dict[int, np.ndarray] = {}
        self.stall_totals = dict.fromkeys(STALL_CAUSES, 0.0)

    def traffic(self, communicator: Communicator) -> dict[tuple[str, str], Traffic]:
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
        seconds = np.zeros(4)
        edges = np.array(blocked or [0.0, 0.0])
        # Time spent blocked up to each edge; between two edges it grows with the time, or not.
        waited = np.repeat(np.cumsum(edges[1::2] - edges[::2]), 2)
        waited[::2] -= edges[1::2] - edges[::2]
        for program in communicator.programs():
            stamps = program.stamps
            if stamps is None or not stamps.stamps:
                continue
            codes = self._codes.get(id(program))
            if codes is None:
                codes = self._codes[id(program)] = np.array(stamps.activity_codes)
            times = np.interp(stamps.stamps, edges, waited).reshape(-1, stamps.per_run)
            spans = np.diff(times, axis=1).sum(axis=0)
            seconds += np.bincount(codes, weights=spans, minlength=4)
        return {(communicator.axis, cause): float(seconds[code]) for cause, code in _CAUSES.items()}
