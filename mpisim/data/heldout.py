"""Which documents are held out: every 20th, unless a near-copy of it is trained on.

Many files of a library are copies with a few words changed (character tables, licence headers).
Held out beside a trained-on twin, such a file measures memory, not prediction. Called by `text`
and `documents`; the choice depends on the documents alone, so all ranks make the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mpisim.data.arrays import concatenate_ranges

HELDOUT_EVERY = 20
"""One document of this many is held out; fewer documents than that have no held-out split."""
NEAR_COPY = 0.5
"""Share of distinct words, of those in either document, from which two are near-copies."""
HELDOUT_RULE = f"every {HELDOUT_EVERY}th document, or the next that is no near-copy of another"
"""The rule in words, for the run record."""

# Words of so many documents ("the") tell none apart, and looking them up would take quadratic time.
_MAX_DOCUMENTS_OF_WORD = 1000


def choose_heldout(documents: Sequence[bytes]) -> tuple[int, ...]:
    """Return the numbers of the documents to hold out.

    Parameters
    ----------
    documents : sequence of bytes
        In the order of the data.

    Returns
    -------
    tuple of int
        Ascending; empty with fewer than 20 documents, or if all are near-copies of others.

    Notes
    -----
    Each 20 documents in a row offer their last one. If it has a near-copy anywhere, the next
    document that has none takes its place, but not one past the next 20th, which is offered
    itself. So a whole group of near-copies is trained on; where most documents are copies, at most
    a tenth of the distinct ones is held out. Likeness is the Jaccard index of the
    sets of words, split at white space: words of both over words of either, near-copy from
    `NEAR_COPY`; words that more than 1,000 documents have are not counted, and a document
    without any other word counts as a copy. The comparison is exact, no sketch and no hash of
    words. Near 0.3 s for the standard library (12 MB, 700 files), 2 s for 14 MB of prose in 75,000
    paragraphs; text cut into hundreds of thousands of look-alikes takes longer.
    """
    if len(documents) < HELDOUT_EVERY:
        return ()
    likeness = _Likeness(documents)
    most = len(set(documents)) // (HELDOUT_EVERY // 2)
    chosen: list[int] = []
    for offered in range(HELDOUT_EVERY - 1, len(documents), HELDOUT_EVERY):
        for index in range(offered, min(offered + HELDOUT_EVERY, len(documents))):
            if len(chosen) < most and not likeness.has_near_copy(index):
                chosen.append(index)
                break
    return tuple(chosen)


class _Likeness:
    """An index from words to documents."""

    def __init__(self, documents: Sequence[bytes]) -> None:
        self._documents = documents
        self._copies = Counter(documents)
        number_of: dict[bytes, int] = {}
        words = [
            np.fromiter(
                {number_of.setdefault(word, len(number_of)) for word in document.split()}, np.int64
            )
            for document in documents
        ]
        flat = np.concatenate(words)
        lengths = np.array([len(found) for found in words])
        owners = np.repeat(np.arange(len(documents)), lengths)
        counts = np.bincount(flat, minlength=len(number_of))
        counted = counts[flat] <= _MAX_DOCUMENTS_OF_WORD
        flat, owners = flat[counted], owners[counted]
        self._sizes = np.bincount(owners, minlength=len(documents))
        self._bounds = np.concatenate([[0], np.cumsum(self._sizes)])
        self._words = flat
        # The documents of word w are _owners[_first[w] : _first[w] + _counts[w]].
        self._owners = owners[np.argsort(flat, kind="stable")]
        self._counts = np.bincount(flat, minlength=len(number_of))
        self._first = np.cumsum(self._counts) - self._counts

    def has_near_copy(self, index: int) -> bool:
        """Return whether another document is nearly the same."""
        if self._copies[self._documents[index]] > 1:
            return True
        words = self._words[self._bounds[index] : self._bounds[index + 1]]
        if not words.size:
            return True
        found = self._owners[concatenate_ranges(self._first[words], self._counts[words])]
        others, shared = np.unique(found[found != index], return_counts=True)
        either = words.size + self._sizes[others] - shared
        return bool(np.any(shared >= NEAR_COPY * either))
