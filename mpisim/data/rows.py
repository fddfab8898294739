"""Documents as one stream of token ids, and the rows that are cut from it.

A document is a run of tokens; every token but the last predicts its successor in the same
document, and nothing is predicted across a border. That shift is made here, once: a batch's
`targets` stand at the position that predicts them. What packed and padded mean is said in
`documents.DecoderData`.

Shape suffixes: B batch rows, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpisim.data.arrays import concatenate_ranges
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
    """Rows of one split, computed from the stream when asked for."""

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
            end = count * window + 1
        else:
            # The last token of a document predicts nothing and is not an input.
            pieces = -(-(np.diff(stream.offsets) - 1) // window)
            self.rows_before = np.concatenate([[0], np.cumsum(pieces)])
            self.num_rows = int(self.rows_before[-1])
            end = self.num_tokens + window
        end = max(end, window + 1)
        # So far beyond the last document that a row's window always lies in the stream.
        self.tokens = np.full(end, pad, stream.tokens.dtype)
        self.tokens[: self.num_tokens] = stream.tokens
        self.windows = np.lib.stride_tricks.sliding_window_view(self.tokens, window + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the stream and of the tables that find a row in it."""
        rows = self.numbers if self.is_packed else self.rows_before
        kept = 0 if rows is None else rows.nbytes
        return self.tokens.nbytes + self.offsets.nbytes + kept

    def batch(self, indices_B: np.ndarray) -> Batch:
        """Return rows: inputs, targets and, packed, starts; all (B, T), int32, new."""
        first_B, inputs_B = self.places(indices_B)
        window = self.windows[first_B]
        x_BT = window[:, :-1].astype(np.int32)
        targets_BT = window[:, 1:].astype(np.int32)
        starts_BT = self._cut_documents(first_B, targets_BT) if self.is_packed else None
        if inputs_B.size and int(inputs_B.min()) < self.window:
            beyond_BT = np.arange(self.window) >= inputs_B[:, None]
            np.copyto(x_BT, self.pad, where=beyond_BT)
            np.copyto(targets_BT, IGNORED, where=beyond_BT)
            if starts_BT is not None:
                np.copyto(starts_BT, 0, where=beyond_BT)
        return Batch(x_BT, targets_BT, starts_BT)

    def places(self, indices_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where in the stream each row begins and how many inputs it has."""
        if self.is_packed:
            first_B = indices_B if self.numbers is None else self.numbers[indices_B]
            first_B = first_B * self.window
            return first_B, np.minimum(self.window, self.num_tokens - first_B)
        document_B = np.searchsorted(self.rows_before, indices_B, side="right") - 1
        first_B = indices_B - self.rows_before[document_B]
        first_B *= self.window
        first_B += self.offsets[document_B]
        last_B = self.offsets[document_B + 1] - 1
        return first_B, np.minimum(self.window, last_B - first_B)

    def targets_of(self, indices_B: np.ndarray) -> int:
        """Return the valid targets of rows, without computing the rows."""
        first_B, inputs_B = self.places(indices_B)
        total = int(inputs_B.sum())
        if self.is_packed:
            lo, hi = self._borders(first_B)
            total -= int((hi - lo).sum())
        return total

    def _borders(self, first_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the range of `offsets` that follow an input of each row directly.

        The input before an offset is the last token of its document.
        """
        lo = np.searchsorted(self.offsets, first_B, side="right")
        return lo, np.searchsorted(self.offsets, first_B + self.window, side="right")

    def _cut_documents(self, first_B: np.ndarray, targets_BT: np.ndarray) -> np.ndarray:
        """Take away the targets across borders; return the starts."""
        lo, hi = self._borders(first_B)
        counts = hi - lo
        row = np.repeat(np.arange(len(first_B)), counts)
        column = self.offsets[concatenate_ranges(lo, counts)] - first_B[row]
        targets_BT[row, column - 1] = IGNORED
        inside = column < self.window
        row, column = row[inside], column[inside]
        starts_BT = np.zeros(targets_BT.shape, np.int32)
        starts_BT[row, column] = column
        return np.maximum.accumulate(starts_BT, axis=1, out=starts_BT)
