"""Index arithmetic that several data sets share. No data and no files here."""

from __future__ import annotations

import numpy as np


def checked_indices(indices: np.ndarray, count: int, what: str) -> np.ndarray:
    """Return sample numbers as int64, or refuse them.

    Parameters
    ----------
    indices : array-like of shape (n,), integer
        Sample numbers; empty is fine, of any dtype.
    count : int
        Samples there are.
    what : str
        How to call them: "train samples".

    Returns
    -------
    ndarray of shape (n,), int64

    Raises
    ------
    IndexError
        A number is outside 0..count-1.
    """
    indices = np.asarray(indices)
    if not indices.size:
        return np.empty(0, np.int64)
    indices = indices.astype(np.int64, casting="same_kind", copy=False)
    # Python's numbers: NumPy's min and max allocate their results, and a batch counts every byte.
    numbers = indices.tolist()
    least, largest = min(numbers), max(numbers)
    # A negative number would silently count from the end.
    if least < 0 or largest >= count:
        raise IndexError(
            f"{what} must be in 0..{count - 1}; got {least}..{largest}. Take them from a Sampler."
        )
    return indices


def concatenate_ranges(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return ``first[0], first[0] + 1, ...`` (lengths[0] numbers), then those of first[1], ...

    Parameters
    ----------
    first, lengths : ndarray of shape (n,), int64
        Lengths may be 0.

    Returns
    -------
    ndarray of shape (sum of lengths,), int64
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(first - ends + lengths, lengths) + np.arange(total)
