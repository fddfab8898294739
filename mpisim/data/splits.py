"""What every data set does alike for its two splits, "train" and "heldout"."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from mpisim.data.batch import Batch


class TwoSplits:
    """The members of `load.Dataset` that name a split, from the two that take its name."""

    def num_rows(self, split: str) -> int:
        """Return how many samples a split has."""
        raise NotImplementedError

    def batch(self, split: str, indices: np.ndarray) -> Batch:
        """Return the samples of a split with these numbers."""
        raise NotImplementedError

    def batch_bytes(self, rows: int, length: int | None = None) -> int:
        """Return the bytes of a batch."""
        raise NotImplementedError

    def batch_peak_bytes(self, rows: int, length: int | None = None) -> int:
        """Return the most bytes of new arrays alive while a batch is made: its own."""
        return self.batch_bytes(rows, length)

    @property
    def num_train(self) -> int:
        """Number of training samples."""
        return self.num_rows("train")

    @property
    def num_heldout(self) -> int:
        """Number of held-out samples; 0 if there is no held-out split."""
        return self.num_rows("heldout")

    def train_batch(self, indices: np.ndarray) -> Batch:
        """Return training samples: ``batch("train", indices)``."""
        return self.batch("train", indices)

    def heldout_batch(self, indices: np.ndarray) -> Batch:
        """Return held-out samples: ``batch("heldout", indices)``."""
        return self.batch("heldout", indices)
