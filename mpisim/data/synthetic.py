"""Seeded synthetic data: rows for regression (a linear teacher with noise), repeated patterns.

The same numbers on every rank and for both dtypes; nothing is read from disk. The order of rows
in training is the sampler's business.

Shape suffixes: B batch rows, F features, T targets.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from mpisim.data.arrays import checked_indices
from mpisim.data.batch import Batch
from mpisim.data.documents import DecoderData
from mpisim.data.heldout import HELDOUT_EVERY
from mpisim.data.rows import stream_of_tokens, token_dtype
from mpisim.data.splits import TwoSplits
from mpisim.data.tokenizer import NUM_BYTES
from mpisim.errors import ConfigError


class RegressionData(TwoSplits):
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

    Raises
    ------
    ConfigError
        The noise takes a target beyond the range of the dtype.

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
        errors = rng.standard_normal((num_rows, num_targets))
        errors *= noise
        targets += errors
        del errors
        heldout = np.zeros(num_rows, dtype=bool)
        if num_rows >= HELDOUT_EVERY:
            heldout[HELDOUT_EVERY - 1 :: HELDOUT_EVERY] = True
        dtype = np.dtype(dtype)
        # Rounded one after the other, so that the wide numbers do not outlive their use.
        x = x.astype(dtype, copy=False)
        with np.errstate(over="ignore"):
            targets = targets.astype(dtype, copy=False)
        if not np.all(np.isfinite(targets)):
            raise ConfigError(
                f"data.noise must keep every target finite in {dtype.name}; got {noise}. "
                f"Lower data.noise."
            )
        self._splits = {
            split: (x[mask], targets[mask])
            for split, mask in (("train", ~heldout), ("heldout", heldout))
        }
        self._settings = {
            "num_features": num_features,
            "num_targets": num_targets,
            "noise": float(noise),
            "seed": seed,
            "dtype": dtype.name,
        }

    def num_rows(self, split: str) -> int:
        """Return how many rows a split has."""
        return self._splits[split][0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all features and targets."""
        return sum(array.nbytes for pair in self._splits.values() for array in pair)

    def batch_bytes(self, rows: int, length: int | None = None) -> int:
        """Return the bytes of a batch of `rows` rows; `length` is not used."""
        return rows * sum(array.shape[1] * array.itemsize for array in self._splits["train"])

    def batch(self, split: str, indices: np.ndarray) -> Batch:
        """Return rows of a split.

        Parameters
        ----------
        split : {"train", "heldout"}
        indices : ndarray of shape (B,), integer
            Row numbers, from 0.

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
        x, targets = self._splits[split]
        indices = checked_indices(indices, x.shape[0], f"{split} rows")
        return Batch(x[indices], targets[indices])

    def count_targets(self, split: str, indices: np.ndarray) -> int:
        """Return the targets of rows: one each."""
        return len(indices)

    def count_bytes(self, split: str, indices: np.ndarray) -> int:
        """Return the targets of rows that are bytes: none."""
        return 0

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


class SyntheticDocuments(DecoderData):
    """Documents of different lengths that repeat short patterns; for tests of the decoder.

    Parameters
    ----------
    num_documents : int
        Documents to draw, >= 1; every 20th is held out, none of fewer than 20.
    max_len : int
        Tokens of the longest document, >= 2.
    vocab_size : int
        Ids of the model, >= 1; documents use those below 256.
    seed : int
        Keys the generator, >= 0.
    window : int
        Columns of a row.
    layout : {"packed", "padded"}
        See `DecoderData`.

    Notes
    -----
    A document repeats a pattern of 1..4 random ids up to a length of 2..max_len, so a model that
    looks back four tokens can predict nearly all of it.
    """

    def __init__(
        self,
        *,
        num_documents: int,
        max_len: int,
        vocab_size: int,
        seed: int,
        window: int,
        layout: str = "packed",
    ) -> None:
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        documents = []
        for _ in range(num_documents):
            pattern = rng.integers(0, min(vocab_size, NUM_BYTES), int(rng.integers(1, 5)))
            documents.append(np.resize(pattern, int(rng.integers(2, max_len + 1))))
        heldout = documents[HELDOUT_EVERY - 1 :: HELDOUT_EVERY]
        train = [d for i, d in enumerate(documents) if i % HELDOUT_EVERY != HELDOUT_EVERY - 1]
        dtype = token_dtype(vocab_size)
        every = stream_of_tokens(documents, np.dtype("<u4")).tokens
        source = {
            "name": "synthetic documents",
            "sha256": hashlib.sha256(every.tobytes()).hexdigest(),
            "num_documents": num_documents,
            "num_tokens": int(every.size),
            "heldout_rule": f"every {HELDOUT_EVERY}th document"
            if heldout
            else f"none (fewer than {HELDOUT_EVERY} documents)",
            "max_len": max_len,
            "seed": seed,
        }
        super().__init__(
            stream_of_tokens(train, dtype), stream_of_tokens(heldout, dtype),
            window=window, layout=layout, vocab_size=vocab_size, source=source,
        )  # fmt: skip
