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
from mpisim.data.baselines import count_ids, count_pairs, entropy_nats, smoothed_nats
from mpisim.data.batch import Batch
from mpisim.data.corpus import library_name, read_file, read_library, require_bytes
from mpisim.data.footprint import window_row_bytes
from mpisim.data.heldout import HELDOUT_EVERY, HELDOUT_RULE, choose_heldout
from mpisim.data.splits import TwoSplits
from mpisim.data.tokens import read_token_file
from mpisim.errors import ConfigError
from mpisim.layouts.chunks import chunk_bounds

VOCAB_SIZE = 256
SEPARATOR = b"\0"

_COUNT_PIECE = 1 << 16
"""Bytes that are counted at a time."""


class TextData(TwoSplits):
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
        # A view, so that the targets' numbers need no array.
        self._following = {split: stream[window:] for split, stream in self._streams.items()}

    def num_rows(self, split: str) -> int:
        """Return how many samples a split has: positions with a full window before them."""
        return max(0, self._streams[split].size - self.window)

    @property
    def nbytes(self) -> int:
        """Bytes of both streams."""
        return sum(stream.nbytes for stream in self._streams.values())

    def batch_bytes(self, rows: int, length: int | None = None) -> int:
        """Return the bytes of a batch of `rows` rows; `length` is not used."""
        return rows * window_row_bytes(self.window)

    def batch(self, split: str, indices: np.ndarray) -> Batch:
        """Return samples of a split.

        Parameters
        ----------
        split : {"train", "heldout"}
        indices : ndarray of shape (B,), integer
            Sample numbers, from 0.

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
        indices = checked_indices(indices, self.num_rows(split), f"{split} samples")
        if not indices.size:
            return Batch(np.empty((0, self.window), np.uint8), np.empty(0, np.uint8))
        x_BK = self._windows[split][indices]
        return Batch(x_BK, self._following[split][indices])

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
        unigram_nats = smoothed_nats(_byte_counts(train), targets)
        # The pair that predicts the first target begins one byte before it, inside the window.
        pairs = _pair_counts(measured[self.window - 1 :])
        bigram_nats = smoothed_nats(_pair_counts(train), pairs)
        return {
            "unigram_entropy_nats": entropy_nats(targets),
            "unigram_cross_entropy_nats": unigram_nats / num_targets,
            "bigram_cross_entropy_nats": bigram_nats / num_targets,
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
    """Return the documents as one stream, in an array: Python's bytes are not counted as memory."""
    stream = np.empty(sum(map(len, documents)) + len(documents) - 1, np.uint8)
    start = 0
    for document in documents:
        if start:
            stream[start - 1] = SEPARATOR[0]
        stream[start : start + len(document)] = np.frombuffer(document, np.uint8)
        start += len(document) + 1
    return stream


def _byte_counts(stream: np.ndarray) -> np.ndarray:
    return count_ids(stream, VOCAB_SIZE, _COUNT_PIECE)


def _pair_counts(stream: np.ndarray) -> np.ndarray:
    return count_pairs(stream, VOCAB_SIZE, _COUNT_PIECE)
