"""Real text as bytes: the running Python's own standard library, or a file of the user's.

A token is a byte; a sample is a window of bytes and the byte that follows it. Training and
held-out bytes are two separate streams. The order of samples is the sampler's business.

Shape suffixes: B batch rows, K window.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpisim.data.arrays import checked_indices
from mpisim.data.batch import Batch
from mpisim.data.corpus import library_name, read_file, read_library, require_bytes
from mpisim.data.heldout import HELDOUT_EVERY, HELDOUT_RULE, choose_heldout
from mpisim.data.tokens import read_token_file
from mpisim.errors import ConfigError
from mpisim.layouts.chunks import chunk_bounds

VOCAB_SIZE = 256
SEPARATOR = b"\0"

# Counting runs over pieces, because np.bincount widens its input to 8 bytes an element.
_COUNT_PIECE = 1 << 16


class TextData:
    """Windows of bytes and the byte that follows each.

    Parameters
    ----------
    train, heldout : ndarray of shape (n,), uint8
        The two streams, kept by reference. The held-out one may be empty.
    window : int
        K, bytes that predict the next one, >= 1.
    source : dict
        What `record` reports about where the bytes come from.

    Raises
    ------
    ValueError
        The training stream has no sample, or a stream is not uint8.
    """

    primary_baseline = "unigram_entropy_nats"
    """Key of `baselines` that any model must beat."""

    def __init__(
        self, train: np.ndarray, heldout: np.ndarray, window: int, source: dict[str, object]
    ) -> None:
        if train.dtype != np.uint8 or heldout.dtype != np.uint8 or train.size <= window:
            raise ValueError(
                f"streams must be uint8 and the training stream longer than the window of "
                f"{window}; got {train.dtype} of {train.size} and {heldout.dtype} of "
                f"{heldout.size} elements. Load them with load_text."
            )
        self.window = window
        self._source = dict(source)
        self._streams = {"train": train, "heldout": heldout}
        self._windows = {
            split: np.lib.stride_tricks.sliding_window_view(stream, window)
            for split, stream in self._streams.items()
            if stream.size > window
        }

    @property
    def num_train(self) -> int:
        """Number of training samples: positions with a full window before them."""
        return self._num_samples("train")

    @property
    def num_heldout(self) -> int:
        """Number of held-out samples; 0 if there is no held-out split."""
        return self._num_samples("heldout")

    @property
    def nbytes(self) -> int:
        """Bytes of both streams."""
        return sum(stream.nbytes for stream in self._streams.values())

    def train_batch(self, indices: np.ndarray) -> Batch:
        """Return training samples.

        Parameters
        ----------
        indices : ndarray of shape (B,), integer
            Sample numbers in 0..num_train-1.

        Returns
        -------
        x : ndarray of shape (B, K), uint8
            The windows; a copy that the caller owns.
        targets : ndarray of shape (B,), uint8
            The byte after each window.

        Raises
        ------
        IndexError
            A sample number is out of range.
        """
        return self._batch("train", indices)

    def heldout_batch(self, indices: np.ndarray) -> Batch:
        """Return held-out samples; as `train_batch`, with numbers in 0..num_heldout-1."""
        return self._batch("heldout", indices)

    def count_targets(self, split: str, indices: np.ndarray) -> int:
        """Return the targets of samples: one each."""
        return len(indices)

    def count_bytes(self, split: str, indices: np.ndarray) -> int:
        """Return the targets of samples that are bytes: all."""
        return len(indices)

    def baselines(self) -> dict[str, float | str]:
        """Return the losses of models that look at no or one byte of context.

        Returns
        -------
        dict
            ``unigram_entropy_nats``: entropy of the predicted bytes themselves, which no model
            without context can beat; ``unigram_cross_entropy_nats`` and
            ``bigram_cross_entropy_nats``: cross-entropy of the training stream's unigrams and
            bigrams (counts plus one) on the predicted bytes; all in nats per byte. ``split``:
            "heldout", or "train" if nothing is held out.

        Notes
        -----
        The predicted bytes are those with a full window before them, the same that an
        evaluation of the whole split predicts. The three tables take 1 MiB while it runs.
        """
        split = "heldout" if self.num_heldout else "train"
        train, measured = self._streams["train"], self._streams[split]
        targets = _byte_counts(measured[self.window :])
        num_targets = int(targets.sum())
        shares = targets[targets > 0] / num_targets

        unigrams = _byte_counts(train) + 1
        unigram_nats = np.log(unigrams.sum()) - np.log(unigrams)

        bigrams = _pair_counts(train) + 1
        bigram_nats = np.log(bigrams.sum(axis=1, keepdims=True)) - np.log(bigrams)
        # The pair that predicts the first target begins one byte before it, inside the window.
        pairs = _pair_counts(measured[self.window - 1 :])
        return {
            "unigram_entropy_nats": float(-np.sum(shares * np.log(shares))),
            "unigram_cross_entropy_nats": float(np.sum(targets * unigram_nats)) / num_targets,
            "bigram_cross_entropy_nats": float(np.sum(pairs * bigram_nats)) / num_targets,
            "split": split,
        }

    def record(self) -> dict[str, object]:
        """Return what identifies the data, for the run record.

        Returns
        -------
        dict
            ``name``, ``sha256`` (of all documents' bytes in order, without separators),
            ``num_documents``, ``num_bytes``, ``heldout_rule``, and bytes and samples of each
            split. Only str and int values.
        """
        return {
            **self._source,
            "window": self.window,
            "num_train_bytes": self._streams["train"].nbytes,
            "num_heldout_bytes": self._streams["heldout"].nbytes,
            "num_train": self.num_train,
            "num_heldout": self.num_heldout,
        }

    def _num_samples(self, split: str) -> int:
        return max(0, self._streams[split].size - self.window)

    def _batch(self, split: str, indices: np.ndarray) -> Batch:
        indices = checked_indices(indices, self._num_samples(split), f"{split} samples")
        if not indices.size:
            return Batch(np.empty((0, self.window), np.uint8), np.empty(0, np.uint8))
        x_BK = self._windows[split][indices]
        return Batch(x_BK, self._streams[split][indices + self.window])


def load_text(
    *, kind: str, window: int, path: str | os.PathLike[str] | None = None, max_bytes: int = 0
) -> TextData:
    """Read the bytes of a text and split them.

    Parameters
    ----------
    kind : {"stdlib", "text"}
        The running Python's standard library sources, or the file `path`: its bytes, or the
        tokens of an array file whose name ends in ``.npy``.
    window : int
        Bytes that predict the next one, >= 1.
    path : path-like, optional
        The file, for kind "text".
    max_bytes : int, default 0
        Use at most this many bytes: whole documents of the library, passing by those that no
        longer fit, or the start of the file. 0 means all.

    Returns
    -------
    TextData

    Raises
    ------
    ConfigError
        The file or folder is missing, unreadable, not a file, empty, or too short for a window
        and one more byte. The message names the config field and the counts.

    Notes
    -----
    Library: every ``.py`` file is a document, in the order of its relative path, without test
    folders, installed packages and empty files; every 20th document is held out (see
    `heldout.choose_heldout`), and documents of a stream are joined with one zero byte. A file, or
    fewer than 20 documents: the last of 20 equal pieces of the bytes is held out. A held-out
    stream without a single sample is not made: everything is trained on and `num_heldout` is 0.
    """
    if kind == "stdlib":
        name, documents = library_name(), read_library(max_bytes)
    else:
        if path is None:
            raise ConfigError('data.path must be set for data.kind "text"; got none. Set it.')
        name = Path(path).name
        tokens = Path(path).suffix == ".npy"
        documents = [(read_token_file if tokens else read_file)(path, max_bytes)]
    num_bytes = sum(map(len, documents))
    require_bytes(
        num_bytes, window + 1, "data.window + 1", kind=kind, path=path, max_bytes=max_bytes
    )
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document)
    train, heldout, rule = _split(documents, window)
    source = {
        "name": name,
        "sha256": digest.hexdigest(),
        "num_documents": len(documents),
        "num_bytes": num_bytes,
        "heldout_rule": rule,
    }
    return TextData(train, heldout, window, source)


def _split(documents: Sequence[bytes], window: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the training stream, the held-out stream and the rule that was used, in words."""
    chosen = choose_heldout(documents)
    if chosen:
        heldout = _join([documents[index] for index in chosen])
        if heldout.size > window:
            kept = [document for index, document in enumerate(documents) if index not in chosen]
            return _join(kept), heldout, HELDOUT_RULE
    stream = _join(documents)
    cut = chunk_bounds(stream.size, HELDOUT_EVERY)[-2]
    train, heldout = stream[:cut], stream[cut:]
    if heldout.size > window and train.size > window:
        return train, heldout, f"the last of {HELDOUT_EVERY} equal pieces"
    return stream, stream[:0], "none (too few bytes)"


def _join(documents: Sequence[bytes]) -> np.ndarray:
    """Return the documents as one read-only stream; a single one is not copied."""
    return np.frombuffer(
        documents[0] if len(documents) == 1 else SEPARATOR.join(documents), dtype=np.uint8
    )


def _byte_counts(stream: np.ndarray) -> np.ndarray:
    """Return how often each byte occurs, shape (256,), int64."""
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    for start in range(0, stream.size, _COUNT_PIECE):
        counts += np.bincount(stream[start : start + _COUNT_PIECE], minlength=VOCAB_SIZE)
    return counts


def _pair_counts(stream: np.ndarray) -> np.ndarray:
    """Return how often byte b follows byte a, shape (256 of a, 256 of b), int64."""
    counts = np.zeros(VOCAB_SIZE * VOCAB_SIZE, dtype=np.int64)
    for start in range(0, stream.size - 1, _COUNT_PIECE):
        piece = stream[start : start + _COUNT_PIECE + 1]
        codes = piece[:-1].astype(np.int64)
        codes *= VOCAB_SIZE
        codes += piece[1:]
        counts += np.bincount(codes, minlength=counts.size)
    return counts.reshape(VOCAB_SIZE, VOCAB_SIZE)
