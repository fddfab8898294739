"""Losses of models that look at no or one token of context, from counts.

Counting runs over pieces, because np.bincount widens its input to 8 bytes an element.
"""

from __future__ import annotations

import numpy as np


def count_ids(stream: np.ndarray, vocab_size: int, piece: int) -> np.ndarray:
    """Return how often each id occurs.

    Parameters
    ----------
    stream : ndarray of shape (n,), unsigned integer
        Ids below `vocab_size`.
    vocab_size : int
    piece : int
        Ids that are counted at a time.

    Returns
    -------
    ndarray of shape (vocab_size,), int64
    """
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, stream.size, piece):
        counts += np.bincount(stream[start : start + piece], minlength=vocab_size)
    return counts


def count_pairs(stream: np.ndarray, vocab_size: int, piece: int) -> np.ndarray:
    """Return how often id b follows id a; parameters as for `count_ids`.

    Returns
    -------
    ndarray of shape (vocab_size of a, vocab_size of b), int64
    """
    counts = np.zeros(vocab_size * vocab_size, np.int64)
    for start in range(0, stream.size - 1, piece):
        ids = stream[start : start + piece + 1]
        codes = ids[:-1].astype(np.int64)
        codes *= vocab_size
        codes += ids[1:]
        counts += np.bincount(codes, minlength=counts.size)
    return counts.reshape(vocab_size, vocab_size)


def entropy_nats(counts: np.ndarray) -> float:
    """Return the entropy of what was counted, which no model without context can beat."""
    shares = counts[counts > 0] / int(counts.sum())
    return float(-np.sum(shares * np.log(shares)))


def smoothed_nats(train_counts: np.ndarray, counts: np.ndarray) -> float:
    """Return the cross-entropy of the training counts plus one on `counts`, summed, in nats.

    Parameters
    ----------
    train_counts, counts : ndarray of the same shape, int64
        The last dim is what is predicted; a dim before it is what it is predicted from.
    """
    smoothed = train_counts + 1
    nats = np.log(smoothed.sum(axis=-1, keepdims=True)) - np.log(smoothed)
    return float(np.sum(counts * nats))
