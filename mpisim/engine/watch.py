"""Compares the ledger with an independent measurement, op by op, and keeps the budget.

A `tracker` (allocator hook, tracemalloc, or none) counts NumPy's buffers. At the end of every op
what it counts must be what the ledger holds; what the op needed on top at its fullest moment is its
temp. With an exact tracker the budget is a wall: the allocation that would pass it fails.
"""

from __future__ import annotations

import math
from typing import Any

from mpisim.errors import MemoryBudgetExceeded
from mpisim.memory.ledger import Ledger
from mpisim.memory.tracker import Tracker

SAMPLED_STEPS = 2
"""Steps that Python's tracer watches, where there is no allocator hook."""


class MemoryWatch:
    """Watches one rank.

    Parameters
    ----------
    ledger : Ledger
    tracker : Tracker
        Opened before the rank made any array that the ledger holds.

    Attributes
    ----------
    gap_bytes : int
        Largest difference, measured minus ledger, at the end of any op (by amount).
    gap_op : str
        That op; empty without a difference.
    """

    def __init__(self, ledger: Ledger, tracker: Tracker) -> None:
        self.ledger, self.tracker = ledger, tracker
        self.gap_bytes, self.gap_op = 0, ""
        self.unknown_bytes = 0
        """Measured bytes at the start of training that the ledger does not hold: start-up."""
        self.measured_peak = 0
        """Largest measured total in any op."""
        self.figures_peak = 0
        """Most bytes of arrays for figures about the run, which the budget does not count."""
        self.measures = tracker.exact
        self._samples_left = SAMPLED_STEPS if tracker.kind == "tracemalloc" else 0

    def start(self) -> None:
        """Take what is there now, but not in the ledger, as start-up; raise the wall.

        Called when the rank begins to build what it keeps, and again when all is there.
        """
        if not self.measures and not self._samples_left:
            return
        self.unknown_bytes = self.tracker.live() - self.ledger.total
        if self.measures and self.ledger.budget_bytes:
            self.tracker.set_cap(max(1, self.ledger.budget_bytes + self.unknown_bytes))

    def lift_wall(self) -> None:
        """Allow what the budget does not: the job is about to end."""
        if self.measures and self.ledger.budget_bytes:
            self.tracker.set_cap(None)

    def begin(self, op: str) -> None:
        """Begin an op."""
        self.ledger.begin_op(op)
        if self.measures:
            self.tracker.reset_peak()

    def end(self, predicted_temp: int) -> None:
        """End an op: note its temp, and whether measurement and ledger agree."""
        ledger = self.ledger
        if not self.measures:
            if self._samples_left:
                self._note_gap(self.tracker.live() - self.unknown_bytes - ledger.total)
            ledger.end_op(predicted_temp)
            return
        tracker, unknown = self.tracker, self.unknown_bytes
        peak = tracker.peak() - unknown
        if peak > self.measured_peak:
            self.measured_peak = peak
        aside = tracker.aside_peak()
        if aside > self.figures_peak:
            self.figures_peak = aside
        self._note_gap(tracker.live() - unknown - ledger.total)
        ledger.end_op(peak - ledger.op_total)

    def _note_gap(self, gap: int) -> None:
        if abs(gap) > abs(self.gap_bytes):
            self.gap_bytes, self.gap_op = gap, self.ledger.op

    def end_step(self) -> None:
        """Stop what is too slow to go on for a whole run: the steps repeat one curve."""
        if self._samples_left:
            self._samples_left -= 1
            if not self._samples_left:
                self.tracker.close()

    def explained(self, error: MemoryError) -> MemoryBudgetExceeded | MemoryError:
        """Return the error of a failed allocation; one at the wall says what was held.

        Lifts the wall: what follows must not fail, too. An error that is none of the wall's comes
        back as it is.
        """
        if not (self.measures and self.ledger.budget_bytes and self.tracker.refused()):
            return error
        self.lift_wall()
        # How much is missing cannot be told: what was freed on the way here is gone.
        exceeded = self.ledger.exceeded(asked=_asked_bytes(error))
        exceeded.facts["in_use"] = self.tracker.live() - self.unknown_bytes
        exceeded.__cause__ = error
        return exceeded

    def facts(self) -> dict[str, Any]:
        """Return the figures for the summary; "kind" says who measured."""
        facts: dict[str, Any] = {"kind": self.tracker.kind, "exact": self.measures}
        if self.tracker.kind == "tracemalloc":
            facts |= {"gap_bytes": self.gap_bytes, "gap_op": self.gap_op, "steps": SAMPLED_STEPS}
        if self.measures:
            facts |= {
                "peak_bytes": self.measured_peak, "gap_bytes": self.gap_bytes,
                "gap_op": self.gap_op, "start_up_bytes": self.unknown_bytes,
                "figures_peak_bytes": self.figures_peak,
            }  # fmt: skip
        return facts

    def close(self) -> None:
        """Put NumPy's own allocator back."""
        self.tracker.close()


def _asked_bytes(error: MemoryError) -> int | None:
    """Return how many bytes NumPy asked for in vain, if the error tells."""
    try:
        shape, dtype = error.args
        return math.prod(shape) * dtype.itemsize
    except (TypeError, ValueError, AttributeError):
        return None
