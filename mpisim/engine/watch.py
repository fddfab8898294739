"""Compares the ledger with an independent measurement, op by op, and keeps the budget.

A `tracker` (allocator hook, tracemalloc, or none) counts NumPy's buffers. At the end of every op
what it counts must be what the ledger holds; what the op needed on top at its fullest moment is its
temp. With an exact tracker the budget is a wall: the allocation that would pass it fails.
"""

from __future__ import annotations

from typing import Any

from mpisim.errors import MemoryBudgetExceeded
from mpisim.memory.ledger import Ledger
from mpisim.memory.tracker import Tracker


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

    def start(self) -> None:
        """Take what is there now as the start: everything the rank keeps is in the ledger."""
        if not self.measures:
            return
        ledger = self.ledger
        self.unknown_bytes = self.tracker.live() - ledger.total
        if ledger.budget_bytes:
            self.tracker.set_cap(max(1, ledger.budget_bytes + self.unknown_bytes))

    def begin(self, op: str) -> None:
        """Begin an op."""
        self.ledger.begin_op(op)
        if self.measures:
            self.tracker.reset_peak()

    def end(self, predicted_temp: int) -> None:
        """End an op: note its temp, and whether measurement and ledger agree."""
        ledger = self.ledger
        if not self.measures:
            ledger.end_op(predicted_temp)
            return
        tracker, unknown = self.tracker, self.unknown_bytes
        peak = tracker.peak() - unknown
        if peak > self.measured_peak:
            self.measured_peak = peak
        aside = tracker.aside_peak()
        if aside > self.figures_peak:
            self.figures_peak = aside
        gap = tracker.live() - unknown - ledger.total
        if abs(gap) > abs(self.gap_bytes):
            self.gap_bytes, self.gap_op = gap, ledger.op
        ledger.end_op(peak - ledger.op_total)

    def explain(self, error: MemoryError) -> MemoryBudgetExceeded | MemoryError:
        """Turn the error of an allocation that hit the wall into one that says what was held."""
        if self.ledger.budget_bytes and self.measures:
            return self.ledger.exceeded()
        return error

    def facts(self) -> dict[str, Any]:
        """Return the figures for the summary; "kind" says who measured."""
        facts: dict[str, Any] = {"kind": self.tracker.kind, "exact": self.measures}
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
