"""Seeded synthetic rows for regression: a linear teacher with noise.

The same numbers on every rank and for both dtypes; nothing is read from disk. The order of rows
in training is the sampler's business.

Shape suffixes: B batch rows, F features, T targets.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

HELDOUT_EVERY = 20


class RegressionData:
    """Rows of standard normal features and the noisy outputs of a linear teacher.

    Parameters
    ----------
    num_rows : int
        Rows to draw, >= 1; every 20th is held out, none of fewer than 20.
    num_features, num_targets : int
        Widths F and T, >= 1.
    noise : float
        Standard deviation of the normal noise on each target, >= 0.
    seed : int
        Keys the generator, >= 0.
    dtype : numpy.dtype or str
        float32 or float64; drawn in float64 and rounded once.

    Notes
    -----
    ``targets = features @ teacher + noise * z``, teacher and z normal, the teacher with variance
    1 / F, so that a target's standard deviation is near 1 without noise. The best loss that any
    model can reach is ``num_targets * noise^2`` in the mean.
    """

    primary_baseline = "mean_predictor_loss"
    """Key of `baselines` that any model must beat."""

    def __init__(
        self,
        *,
        num_rows: int,
        num_features: int,
        num_targets: int,
        noise: float,
        seed: int,
        dtype: np.dtype | str,
    ) -> None:
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        teacher = rng.standard_normal((num_features, num_targets)) / math.sqrt(num_features)
        x = rng.standard_normal((num_rows, num_features))
        targets = x @ teacher
        targets += noise * rng.standard_normal((num_rows, num_targets))
        heldout = np.zeros(num_rows, dtype=bool)
        if num_rows >= HELDOUT_EVERY:
            heldout[HELDOUT_EVERY - 1 :: HELDOUT_EVERY] = True
        dtype = np.dtype(dtype)
        self._splits = {
            split: (x[mask].astype(dtype), targets[mask].astype(dtype))
            for split, mask in (("train", ~heldout), ("heldout", heldout))
        }
        self._settings = {
            "num_features": num_features,
            "num_targets": num_targets,
            "noise": float(noise),
            "seed": seed,
            "dtype": dtype.name,
        }

    @property
    def num_train(self) -> int:
        """Number of training rows."""
        return self._splits["train"][0].shape[0]

    @property
    def num_heldout(self) -> int:
        """Number of held-out rows; 0 if there is no held-out split."""
        return self._splits["heldout"][0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all features and targets."""
        return sum(array.nbytes for pair in self._splits.values() for array in pair)

    def train_batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return training rows.

        Parameters
        ----------
        indices : ndarray of shape (B,), integer
            Row numbers in 0..num_train-1.

        Returns
        -------
        x : ndarray of shape (B, F)
            Features; a copy that the caller owns.
        targets : ndarray of shape (B, T), same dtype
            Targets; a copy.

        Raises
        ------
        IndexError
            A row number is out of range.
        """
        return self._batch("train", indices)

    def heldout_batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return held-out rows; as `train_batch`, with numbers in 0..num_heldout-1."""
        return self._batch("heldout", indices)

    def baselines(self) -> dict[str, float | str]:
        """Return losses to compare a model with.

        Returns
        -------
        dict
            ``mean_predictor_loss``: loss of predicting the training targets' mean;
            ``noise_floor_loss``: expected loss of the teacher itself, ``T * noise^2``; both are
            squared errors summed over targets, averaged over rows. ``split``: "heldout", or
            "train" if nothing is held out: the rows the first was measured on.
        """
        split = "heldout" if self.num_heldout else "train"
        mean_T = self._splits["train"][1].mean(axis=0, dtype=np.float64)
        errors_BT = self._splits[split][1] - mean_T
        noise = self._settings["noise"]
        return {
            "mean_predictor_loss": float(np.sum(errors_BT**2)) / errors_BT.shape[0],
            "noise_floor_loss": self._settings["num_targets"] * noise * noise,
            "split": split,
        }

    def record(self) -> dict[str, object]:
        """Return what identifies the data, for the run record.

        Returns
        -------
        dict
            ``name``, ``sha256`` (of the features and targets of both splits as stored, training
            first), the settings, and rows of each split. Only str, int and float values.
        """
        digest = hashlib.sha256()
        for pair in self._splits.values():
            for array in pair:
                digest.update(array.data if array.size else b"")
        return {
            "name": "synthetic regression",
            "sha256": digest.hexdigest(),
            **self._settings,
            "num_train": self.num_train,
            "num_heldout": self.num_heldout,
        }

    def _batch(self, split: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, targets = self._splits[split]
        indices = np.asarray(indices)
        if not indices.size:
            return x[:0].copy(), targets[:0].copy()
        # A negative number would silently count from the end.
        if int(indices.min()) < 0 or int(indices.max()) >= x.shape[0]:
            raise IndexError(
                f"{split} rows must be in 0..{x.shape[0] - 1}; got "
                f"{int(indices.min())}..{int(indices.max())}. Take them from a Sampler."
            )
        return x[indices], targets[indices]
