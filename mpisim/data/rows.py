"""Documents as one stream of token ids, and the rows that are cut from it.

A document is a run of tokens; every token but the last predicts its successor in the same
document, and nothing is predicted across a border. That shift is made here, once: a batch's
`targets` stand at the position that predicts them. What packed and padded mean is said in
`documents.DecoderData`.

Shape suffixes: B batch rows, T positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpisim.data.batch import IGNORED, Batch
from mpisim.data.tokenizer import BOS, EOS


class TokenStream(NamedTuple):
    """Documents one after the other."""

    tokens: np.ndarray
    """Ids, shape (num_tokens,), uint8, uint16 or uint32."""
    offsets: np.ndarray
    """Where each document begins, and the end of the last: shape (num_documents + 1,), int64,
    strictly ascending from 0."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned dtype that holds every id of a vocabulary."""
    return np.min_scalar_type(vocab_size - 1)


def stream_of_tokens(documents: Sequence[np.ndarray], dtype: np.dtype) -> TokenStream:
    """Join documents of token ids, taken as they are.

    Parameters
    ----------
    documents : sequence of ndarray of shape (n_i,), integer
        Each with n_i >= 1.
    dtype : numpy.dtype
        Dtype of the stream; the ids must fit.

    Returns
    -------
    TokenStream
    """
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    tokens = np.empty(offsets[-1], dtype)
    for start, document in zip(offsets[:-1].tolist(), documents, strict=True):
        tokens[start : start + len(document)] = document
    return TokenStream(tokens, offsets)


def stream_of_bytes(documents: Sequence[bytes]) -> TokenStream:
    """Join texts as `BOS`, their bytes, `EOS` each; uint16."""
    offsets = np.cumsum([0, *(len(document) + 2 for document in documents)], dtype=np.int64)
    tokens = np.empty(offsets[-1], np.uint16)
    for start, document in zip(offsets[:-1].tolist(), documents, strict=True):
        end = start + 1 + len(document)
        tokens[start] = BOS
        tokens[start + 1 : end] = np.frombuffer(document, np.uint8)
        tokens[end] = EOS
    return TokenStream(tokens, offsets)


class Rows:
    """Rows of one split, computed from the stream when asked for.

    The stream is kept by reference. A row is looked up and cut with Python's own numbers, so that
    a batch allocates its arrays and nothing else, whatever the documents in it.
    """

    def __init__(self, stream: TokenStream, window: int, layout: str, pad: int) -> None:
        self.window, self.pad = window, pad
        self.is_packed = layout == "packed"
        self.offsets = stream.offsets
        self.num_tokens = int(stream.offsets[-1])
        self.num_targets = self.num_tokens - (len(stream.offsets) - 1)
        if self.is_packed:
            count = -(-self.num_tokens // window)
            ends = np.bincount((stream.offsets[1:] - 1) // window, minlength=count)
            # A row of last tokens only has nothing to predict and is no row.
            length = np.full(count, window)
            length[-1:] = self.num_tokens - (count - 1) * window
            kept = np.flatnonzero(length > ends)
            self.num_rows = len(kept)
            # Long rows leave no gap, and then their numbers need not be stored.
            self.numbers = kept if len(kept) < count else None
        else:
            # The last token of a document predicts nothing and is not an input.
            pieces = -(-(np.diff(stream.offsets) - 1) // window)
            self.rows_before = np.concatenate([[0], np.cumsum(pieces)])
            self.num_rows = int(self.rows_before[-1])
        self.tokens = stream.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the stream and of the tables that find a row in it."""
        rows = self.numbers if self.is_packed else self.rows_before
        kept = 0 if rows is None else rows.nbytes
        return self.tokens.nbytes + self.offsets.nbytes + kept

    def batch(self, indices_B: np.ndarray) -> Batch:
        """Return rows: inputs, targets and, packed, starts; all (B, T), int32, new."""
        shape = (len(indices_B), self.window)
        x_BT = np.empty(shape, np.int32)
        targets_BT = np.empty(shape, np.int32)
        starts_BT = np.zeros(shape, np.int32) if self.is_packed else None
        offsets = memoryview(self.offsets)
        for row, (first, inputs) in enumerate(self._places(indices_B)):
            x_T, targets_T = x_BT[row], targets_BT[row]
            x_T[:inputs] = self.tokens[first : first + inputs]
            # The stream's last token has no successor.
            followed = min(inputs, self.num_tokens - 1 - first)
            targets_T[:followed] = self.tokens[first + 1 : first + 1 + followed]
            # fill() and not an assignment, which makes an array of its value.
            x_T[inputs:].fill(self.pad)
            targets_T[followed:].fill(IGNORED)
            if starts_BT is not None:
                self._cut_documents(first, inputs, offsets, targets_T, starts_BT[row])
        return Batch(x_BT, targets_BT, starts_BT)

    def _places(self, indices_B: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield where in the stream each row begins and how many inputs it has."""
        window = self.window
        if self.is_packed:
            numbers = None if self.numbers is None else memoryview(self.numbers)
            for index in indices_B.tolist():
                first = (index if numbers is None else numbers[index]) * window
                yield first, min(window, self.num_tokens - first)
            return
        rows_before, offsets = memoryview(self.rows_before), memoryview(self.offsets)
        for index in indices_B.tolist():
            document = bisect_right(rows_before, index) - 1
            first = offsets[document] + (index - rows_before[document]) * window
            yield first, min(window, offsets[document + 1] - 1 - first)

    def targets_of(self, indices_B: np.ndarray) -> int:
        """Return the valid targets of rows, without computing the rows."""
        offsets, total = memoryview(self.offsets), 0
        for first, inputs in self._places(indices_B):
            total += inputs
            if self.is_packed:
                lo, hi = _borders(offsets, first, inputs)
                total -= hi - lo
        return total

    @staticmethod
    def _cut_documents(
        first: int, inputs: int, offsets: memoryview, targets_T: np.ndarray, starts_T: np.ndarray
    ) -> None:
        """Take away a row's targets across borders; write its starts."""
        lo, hi = _borders(offsets, first, inputs)
        for border in range(lo, hi):
            column = offsets[border] - first
            targets_T[column - 1] = IGNORED
            end = offsets[border + 1] - first if border + 1 < hi else inputs
            starts_T[column:end].fill(column)


def _borders(offsets: memoryview, first: int, inputs: int) -> tuple[int, int]:
    """Return the range of `offsets` that follow an input of a row directly.

    The input before an offset is the last token of its document.
    """
    lo = bisect_right(offsets, first)
    return lo, bisect_right(offsets, first + inputs, lo)
