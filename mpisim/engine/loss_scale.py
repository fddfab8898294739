"""The loss scale: what it is, when it grows, when it falls, and where it ends.

A pure state machine that every rank runs on the same outcomes; `update` tells it whether a step
was committed or skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpisim.errors import LossScaleError

MAX_SCALE = 2.0**127
"""The scale does not grow past it: the largest power of two in float32."""


@dataclass
class LossScale:
    """The factor S that the loss is multiplied by before backward.

    It is fixed within an update. A dynamic scale grows after `growth_interval` commits in a row
    and falls with every skip; a static one stays; kind "none" is S = 1.
    """

    kind: Literal["none", "static", "dynamic"] = "none"
    value: float = 1.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    good_steps: int = 0
    """Commits since the last change of the scale."""
    num_skipped: int = 0

    @property
    def skips(self) -> bool:
        """Whether a step that is not finite is skipped (else it ends the run)."""
        return self.kind == "dynamic"

    def commit(self) -> None:
        """Count a committed step; grow if it completes the interval."""
        if self.kind != "dynamic":
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.good_steps = 0
            # A scale beyond float32 would make every seed infinite.
            if self.value * self.growth_factor <= MAX_SCALE:
                self.value *= self.growth_factor

    def skip(self, step: int) -> None:
        """Count a skipped step and lower the scale.

        Raises
        ------
        LossScaleError
            The scale would fall below its floor: no scale makes the gradients finite.
        """
        lower = self.value * self.backoff_factor
        if lower < self.min_scale:
            raise LossScaleError(
                f"the loss scale must stay at or above precision.min_scale = {self.min_scale:g}; "
                f"got gradients that are not finite at scale {self.value:g} in step {step}, after "
                f"{self.num_skipped + 1} skipped steps. No update was made. Lower optimizer.lr, "
                f"look for NaN in the data, or set precision.compute to another dtype."
            )
        self.value = lower
        self.good_steps = 0
        self.num_skipped += 1
