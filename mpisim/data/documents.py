"""Documents as a data set for the decoder: rows of token ids, packed or padded, and baselines.

How rows are cut is in `rows`, where documents come from in `load_documents`. The order of rows is
the sampler's business.

Shape suffixes: B batch rows, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpisim.data.arrays import checked_indices
from mpisim.data.baselines import count_ids, count_pairs, entropy_nats, smoothed_nats
from mpisim.data.batch import IGNORED, Batch
from mpisim.data.footprint import token_row_bytes
from mpisim.data.rows import Rows, TokenStream
from mpisim.data.splits import TwoSplits
from mpisim.data.tokenizer import NUM_BYTES, PAD, VOCAB_SIZE

_COUNT_PIECE = 1 << 18
"""Tokens that are counted, or rows' positions that are computed, at a time."""
# Counts of pairs take vocab_size^2 numbers of 8 bytes: 32 MiB at most.
_MAX_PAIR_VOCAB = 2048


class DecoderData(TwoSplits):
    """Rows of token ids, cut from documents.

    Parameters
    ----------
    train, heldout : TokenStream
        Ids below `vocab_size`. The held-out one may be empty.
    window : int
        T, columns of a row, >= 1.
    layout : {"packed", "padded"}
        See Notes.
    vocab_size : int
        Ids that a model knows, >= 1. With 266 they are those of `tokenizer`: ids below 256 are
        bytes.
    source : dict
        What `record` reports about where the documents come from.

    Raises
    ------
    ValueError
        An id is out of range, a document is empty, nothing is predicted in the training stream,
        or the layout is unknown.

    Notes
    -----
    packed: the stream of all tokens, each document's last one included, is cut into rows of T. A
    document goes on in the next row, where it begins at column 0 and sees nothing of the row
    before; the target of a row's last column is the next row's first token if that belongs to the
    same document. Positions with a target: T less the documents that end in the row.

    padded: each document is cut into pieces of T inputs, the last piece is shorter and filled up;
    the last token of a document is a target only, never an input, so every row has a target.

    Every token of a document but the first is the target of exactly one position, in both
    layouts. Filled-up positions have x `PAD` (a smaller vocabulary: its last id), target
    `IGNORED` and start 0.
    """

    primary_baseline = "unigram_entropy_nats"
    """Key of `baselines` that any model must beat."""

    def __init__(
        self,
        train: TokenStream,
        heldout: TokenStream,
        *,
        window: int,
        layout: str,
        vocab_size: int,
        source: dict[str, object],
    ) -> None:
        if layout not in ("packed", "padded"):
            raise ValueError(
                f"layout must be packed or padded; got {layout!r}. Take it from data.layout."
            )
        for stream in (train, heldout):
            largest = int(stream.tokens.max()) if stream.tokens.size else 0
            if largest >= vocab_size or not np.all(np.diff(stream.offsets) > 0):
                raise ValueError(
                    f"documents must have tokens and ids below {vocab_size}; got a largest id of "
                    f"{largest}, offsets {stream.offsets}. Leave empty documents out."
                )
        self.window, self.layout, self.vocab_size = window, layout, vocab_size
        self._source = dict(source)
        pad = min(PAD, vocab_size - 1)
        self._rows = {
            "train": Rows(train, window, layout, pad),
            "heldout": Rows(heldout, window, layout, pad),
        }
        if not self._rows["train"].num_targets:
            raise ValueError(
                "the training documents must have a target; got none of two tokens or more. "
                "Use longer documents."
            )

    def num_rows(self, split: str) -> int:
        """Return how many rows a split has."""
        return self._rows[split].num_rows

    @property
    def nbytes(self) -> int:
        """Bytes of both streams and of the tables that find a row in them."""
        return sum(rows.nbytes for rows in self._rows.values())

    @property
    def has_bytes(self) -> bool:
        """Whether ids below 256 are bytes, so that bits per byte mean something."""
        return self.vocab_size == VOCAB_SIZE or "num_bytes" in self._source

    def batch_bytes(self, rows: int, length: int | None = None) -> int:
        """Return the bytes of a batch of `rows` rows; `length` None is `window`."""
        return rows * token_row_bytes(length or self.window, self.layout)

    def batch(self, split: str, indices: np.ndarray) -> Batch:
        """Return rows of a split.

        Parameters
        ----------
        split : {"train", "heldout"}
        indices : ndarray of shape (B,), integer
            Row numbers, from 0.

        Returns
        -------
        Batch
            x, targets (B, T) and, packed, starts (B, T); int32, newly allocated.

        Raises
        ------
        IndexError
            A row number is out of range.
        """
        return self._rows[split].batch(self._checked(split, indices))

    def count_targets(self, split: str, indices: np.ndarray) -> int:
        """Return the valid targets of rows, without computing the rows.

        Parameters
        ----------
        split : {"train", "heldout"}
        indices : ndarray of shape (B,), integer
            Row numbers, as for the batches.

        Returns
        -------
        int
            What ``train_batch(indices).num_targets`` would be.
        """
        return self._rows[split].targets_of(self._checked(split, indices))

    def count_bytes(self, split: str, indices: np.ndarray) -> int:
        """Return the valid targets of rows that are bytes; 0 without `has_bytes`.

        The divisor of bits per byte; the end of a document is predicted and paid for, but is no
        byte.
        """
        if not self.has_bytes:
            return 0
        rows = self._rows[split]
        indices = self._checked(split, indices)
        step = max(1, _COUNT_PIECE // self.window)
        return sum(
            rows.batch(indices[start : start + step]).num_bytes
            for start in range(0, len(indices), step)
        )

    def baselines(self) -> dict[str, float | str]:
        """Return the losses of models that look at no or one token of context.

        Returns
        -------
        dict
            ``unigram_entropy_nats``: entropy of the targets themselves, which no model without
            context can beat; ``unigram_cross_entropy_nats`` and ``bigram_cross_entropy_nats``:
            cross-entropy of the training targets' unigrams and bigrams (counts plus one over all
            `vocab_size` ids) on the targets; all in nats per target. ``unigram_bits_per_byte``
            and ``bigram_bits_per_byte``: the same two models, their nats summed over all
            targets, divided by ln 2 and by the number of targets that are bytes. ``split``:
            "heldout", or "train" if nothing is held out.

        Notes
        -----
        Measured on all valid targets of the split, those that an evaluation of the whole split
        predicts. Without the bigrams for more than 2,048 ids, without bits per byte if ids are
        no bytes.
        """
        split = "heldout" if self.num_heldout else "train"
        targets = self._target_counts(split)
        num_targets, num_bytes = int(targets.sum()), int(targets[:NUM_BYTES].sum())
        result: dict[str, float | str] = {"unigram_entropy_nats": entropy_nats(targets)}
        sums = {"unigram": smoothed_nats(self._target_counts("train"), targets)}
        if self.vocab_size <= _MAX_PAIR_VOCAB:
            sums["bigram"] = smoothed_nats(self._pair_counts("train"), self._pair_counts(split))
        for name, value in sums.items():
            result[f"{name}_cross_entropy_nats"] = value / num_targets
        if self.has_bytes and num_bytes:
            for name, value in sums.items():
                result[f"{name}_bits_per_byte"] = value / math.log(2) / num_bytes
        return {**result, "split": split}

    def record(self) -> dict[str, object]:
        """Return what identifies the data, for the run record.

        Returns
        -------
        dict
            ``name``, ``sha256`` (of all documents' bytes in order, of the text file as read, or
            of the ids of a token file), ``num_documents``, ``num_bytes`` or ``num_tokens``,
            ``heldout_rule``, the settings, and documents, tokens, targets and rows of each
            split. Only str and int values.
        """
        result: dict[str, object] = {
            **self._source,
            "layout": self.layout,
            "window": self.window,
            "vocab_size": self.vocab_size,
        }
        for split, rows in self._rows.items():
            result[f"num_{split}_documents"] = len(rows.offsets) - 1
            result[f"num_{split}_tokens"] = rows.num_tokens
            result[f"num_{split}_targets"] = rows.num_targets
            result[f"num_{split}"] = rows.num_rows
        return result

    def _checked(self, split: str, indices: np.ndarray) -> np.ndarray:
        return checked_indices(indices, self.num_rows(split), f"{split} rows")

    def _target_counts(self, split: str) -> np.ndarray:
        """Return how often each id is a target, shape (vocab_size,), int64."""
        rows = self._rows[split]
        counts = count_ids(rows.tokens[: rows.num_tokens], self.vocab_size, _COUNT_PIECE)
        # All tokens but the documents' first.
        counts -= np.bincount(rows.tokens[rows.offsets[:-1]], minlength=self.vocab_size)
        return counts

    def _pair_counts(self, split: str) -> np.ndarray:
        """Return how often target b follows token a, shape (vocab_size of a, vocab_size of b)."""
        rows = self._rows[split]
        counts = count_pairs(rows.tokens[: rows.num_tokens], self.vocab_size, _COUNT_PIECE)
        # All neighbours but those on two sides of a border.
        borders = rows.offsets[1:-1]
        across = rows.tokens[borders - 1].astype(np.int64) * self.vocab_size + rows.tokens[borders]
        counts -= np.bincount(across, minlength=counts.size).reshape(counts.shape)
        return counts


def documents_batch(
    documents: Sequence[np.ndarray], *, pad_to: int | None = None, pad: int = PAD
) -> Batch:
    """Return one row for each document, padded to the longest.

    Parameters
    ----------
    documents : sequence of ndarray of shape (n_i,), integer
        Token ids, n_i >= 2: every token but the last is an input, every one but the first a
        target.
    pad_to : int, optional
        Columns; by default the inputs of the longest document.
    pad : int
        Id that fills a row up.

    Returns
    -------
    Batch
        x and targets of shape (number of documents, pad_to), int32; starts None.

    Raises
    ------
    ValueError
        There is no document, one has fewer than two tokens, or one does not fit.

    Examples
    --------
    >>> batch = documents_batch([np.array([1, 2, 3]), np.array([7, 8])])
    >>> batch.x.tolist(), batch.targets.tolist()
    ([[1, 2], [7, 256]], [[2, 3], [8, -1]])
    """
    lengths = [len(document) - 1 for document in documents]
    columns = max(lengths, default=0) if pad_to is None else pad_to
    if not lengths or min(lengths) < 1 or max(lengths) > columns:
        raise ValueError(
            f"documents must have 2..{columns + 1} tokens; got lengths "
            f"{[length + 1 for length in lengths]}. Cut them or raise pad_to."
        )
    x_BT = np.full((len(documents), columns), pad, np.int32)
    targets_BT = np.full((len(documents), columns), IGNORED, np.int32)
    for row, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        x_BT[row, :length] = document[:-1]
        targets_BT[row, :length] = document[1:]
    return Batch(x_BT, targets_BT)
