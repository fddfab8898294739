"""What a microbatch is: inputs, targets, and where documents start.

Data sets return it, the engine hands its parts to the layers. No loading and no shuffling here.

Shape suffixes: B batch rows, T positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpisim.data.footprint import COUNTING_TILE
from mpisim.data.tokenizer import NUM_BYTES

IGNORED = -1
"""Target of a position that predicts nothing: padding, or the last token of a document."""


def token_positions(batch: Batch) -> np.ndarray:
    """Return a mask of shape (B, T): True up to the last position of a row that predicts something.

    What lies behind is padding. (A position before it without a target ends a document.)
    """
    predicts = batch.targets != IGNORED
    return np.logical_or.accumulate(predicts[:, ::-1], axis=1)[:, ::-1]


class Batch(NamedTuple):
    """Rows of one microbatch; arrays that the caller owns."""

    x: np.ndarray
    """Token ids of shape (B, T), or floats of shape (B, num_features)."""
    targets: np.ndarray
    """Class ids of shape (B,) or (B, T) with `IGNORED` where nothing is predicted, or floats of
    shape (B, num_targets)."""
    starts: np.ndarray | None = None
    """Column of the first token of the document that each position belongs to, shape (B, T),
    int32; None: every row is one document from column 0."""

    @property
    def num_targets(self) -> int:
        """Valid targets: rows, or positions whose target is not `IGNORED`."""
        if self.targets.ndim == 2 and self.targets.dtype.kind in "iu":
            # Tile by tile, so that the mask stays small (footprint.counting_bytes).
            flat = self.targets.reshape(-1)
            return sum(
                int(np.count_nonzero(flat[start : start + COUNTING_TILE] != IGNORED))
                for start in range(0, flat.size, COUNTING_TILE)
            )
        return len(self.targets)

    @property
    def num_bytes(self) -> int:
        """Valid targets that are bytes: token ids in 0..255; meant for token data only."""
        return int(np.count_nonzero((self.targets >= 0) & (self.targets < NUM_BYTES)))

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the arrays that there are."""
        return tuple(array for array in self if array is not None)
