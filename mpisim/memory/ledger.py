"""The ledger: every array the engine owns, by category, with live and peak bytes.

An array is held and dropped by identity of the memory it owns, so two layers that keep the same
tensor count it once. The engine calls `hold` and `drop`; `plan.check` predicts the same figures.
"""

from __future__ import annotations

import numpy as np

from mpisim.layouts.metrics import MEMORY_CATEGORIES as CATEGORIES


class Ledger:
    """Live and peak bytes of one rank, by category.

    Notes
    -----
    `peak` is per category, each at its own worst moment; `peak_total` is the largest sum at any
    one moment, and `at_peak` its composition.
    """

    def __init__(self) -> None:
        self.live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.peak: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peak_total = 0
        self.at_peak: dict[str, int] = dict(self.live)
        # id -> [array, category, nbytes, holders]; the reference keeps the id from being reused.
        self._held: dict[int, list] = {}

    def hold(self, category: str, *arrays: np.ndarray) -> None:
        """Count the memory of `arrays` under `category` until it is dropped as often.

        Raises
        ------
        ValueError
            The memory is already held under another category.
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

    def _change(self, category: str, nbytes: int) -> None:
        live = self.live
        live[category] += nbytes
        self.total += nbytes
        if live[category] > self.peak[category]:
            self.peak[category] = live[category]
        if self.total > self.peak_total:
            self.peak_total = self.total
            self.at_peak = dict(live)


def _owner(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
