"""The ledger: every array the engine owns, by category, with live and peak bytes.

An array is held and dropped by identity of the memory it owns, so two layers that keep the same
tensor count it once. The engine calls `hold` and `drop`, and `begin_op` and `end_op` around every
op; `plan.forecast` predicts the same figures.

What an op needs beside what it holds at its end (working arrays, and results that are not there
any more) is the op's temp: measured by an allocator hook (`memory.tracker`) or, without one, as
predicted.
"""

from __future__ import annotations

import numpy as np

from mpisim.errors import MemoryBudgetExceeded
from mpisim.layouts.metrics import MEMORY_CATEGORIES as CATEGORIES
from mpisim.units import format_bytes


class Ledger:
    """Live and peak bytes of one rank, by category.

    Parameters
    ----------
    budget_bytes : int
        What the rank may hold at one time; 0 means no limit.

    Notes
    -----
    `peak` is per category, each at its own worst moment; `peak_total` is the largest sum at any
    one moment, `at_peak` its composition and `peak_op` the op that ran.
    """

    def __init__(self, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.peak: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peak_total = 0
        self.at_peak: dict[str, int] = dict(self.live)
        self.peak_op = "start"
        self.op = "start"
        """The op that runs, as text: where an allocation happens."""
        self.op_total = 0
        """Largest total since the op began, without its temp."""
        self._op_live = dict(self.live)
        self._op_temp = 0
        # id -> [array, category, nbytes, holders]; the reference keeps the id from being reused.
        self._held: dict[int, list] = {}

    def hold(self, category: str, *arrays: np.ndarray) -> None:
        """Count the memory of `arrays` under `category` until it is dropped as often.

        Raises
        ------
        ValueError
            The memory is already held under another category.
        MemoryBudgetExceeded
            It passes the budget.
        """
        for array in arrays:
            owner = _owner(array)
            entry = self._held.get(id(owner))
            if entry is not None:
                if entry[1] != category:
                    raise ValueError(
                        f"array must stay in one category; got {category} for one held as "
                        f"{entry[1]}. Drop it first."
                    )
                entry[3] += 1
                continue
            self._held[id(owner)] = [owner, category, owner.nbytes, 1]
            self._change(category, owner.nbytes)

    def drop(self, *arrays: np.ndarray) -> None:
        """Undo one `hold` of each array."""
        for array in arrays:
            key = id(_owner(array))
            entry = self._held[key]
            entry[3] -= 1
            if entry[3] == 0:
                del self._held[key]
                self._change(entry[1], -entry[2])

    def release(self, category: str) -> None:
        """Drop everything of a category at once, however often it is held: a step was given up."""
        gone = [key for key, entry in self._held.items() if entry[1] == category]
        for key in gone:
            self._change(category, -self._held.pop(key)[2])

    def set_bytes(self, category: str, nbytes: int) -> None:
        """Set a category whose arrays are counted elsewhere (scratch of communicators)."""
        self._change(category, nbytes - self.live[category])

    def holds(self, array: np.ndarray) -> bool:
        """Tell whether the memory of `array` is held."""
        return id(_owner(array)) in self._held

    def vector(self) -> tuple[int, ...]:
        """Return live bytes in the order of `layouts.metrics.MEMORY_CATEGORIES`."""
        return tuple(self.live.values())

    def op_vector(self) -> tuple[int, ...]:
        """Return the bytes at the fullest moment of the op, as `vector` does."""
        return tuple((self._op_live | {"temp": self._op_live["temp"] + self._op_temp}).values())

    def begin_op(self, op: str) -> None:
        """Say which op runs from here on."""
        self.op = op
        self.op_total = self.total
        self._op_live = dict(self.live)
        self._op_temp = 0

    def end_op(self, temp: int) -> None:
        """Say what the op needed at its fullest moment beside what is held.

        Parameters
        ----------
        temp : int
            Bytes on top of `op_total`.

        Raises
        ------
        MemoryBudgetExceeded
            With it the op passed the budget.
        """
        self._op_temp = max(0, temp)
        if temp <= 0:
            return
        with_temp = self._op_live["temp"] + temp
        if with_temp > self.peak["temp"]:
            self.peak["temp"] = with_temp
        total = self.op_total + temp
        if total > self.peak_total:
            self.peak_total, self.peak_op = total, self.op
            self.at_peak = self._op_live | {"temp": with_temp}
        if 0 < self.budget_bytes < total:
            raise self.exceeded(total - self.budget_bytes)

    def exceeded(
        self, missing: int | None = None, asked: int | None = None
    ) -> MemoryBudgetExceeded:
        """Return the error of an allocation that would pass the budget, with the breakdown.

        Parameters
        ----------
        missing : int, optional
            Bytes by which the budget is passed; None where only the allocator knows.
        asked : int, optional
            Bytes of the allocation that the allocator refused, if it told.
        """
        parts = ", ".join(
            f"{name} {format_bytes(nbytes)}" for name, nbytes in self.live.items() if nbytes
        )
        if missing is not None:
            got = f"{missing} bytes too many in op {self.op}, beside or within"
        elif asked is not None:
            got = f"an allocation of {asked} bytes in op {self.op}, beside its working arrays and"
        else:
            got = f"more in op {self.op}, beside its working arrays and"
        return MemoryBudgetExceeded(
            f"memory of a rank must stay within memory.budget_bytes = {self.budget_bytes}; got "
            f"{got} {self.total} bytes held ({parts}).",
            op=self.op, live=dict(self.live), total=self.total, budget_bytes=self.budget_bytes,
            missing=missing, asked=asked,
        )  # fmt: skip

    def _change(self, category: str, nbytes: int) -> None:
        live = self.live
        live[category] += nbytes
        self.total += nbytes
        if nbytes <= 0:
            return
        if live[category] > self.peak[category]:
            self.peak[category] = live[category]
        if self.total > self.op_total:
            self.op_total, self._op_live = self.total, dict(live)
            if self.total > self.peak_total:
                self.peak_total, self.at_peak, self.peak_op = self.total, self._op_live, self.op
        if 0 < self.budget_bytes < self.total:
            raise self.exceeded(self.total - self.budget_bytes)


def _owner(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
