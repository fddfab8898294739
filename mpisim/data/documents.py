"""Documents as rows of token ids for the decoder, packed or padded.

A document is a run of tokens; every token but the last predicts its successor in the same
document, and nothing is predicted across a border. That shift is made here, once: a batch's
`targets` stand at the position that predicts them. The order of rows is the sampler's business.

Shape suffixes: B batch rows, T positions.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpisim.data.arrays import checked_indices, concatenate_ranges
from mpisim.data.batch import IGNORED, Batch
from mpisim.data.corpus import (
    library_name,
    read_file,
    read_library,
    require_bytes,
    split_documents,
)
from mpisim.data.heldout import HELDOUT_EVERY, HELDOUT_RULE, choose_heldout
from mpisim.data.tokenizer import BOS, EOS, NUM_BYTES, PAD, VOCAB_SIZE, decode
from mpisim.data.tokens import read_tokens
from mpisim.errors import ConfigError

# Counting runs over pieces, because np.bincount widens its input to 8 bytes an element.
_COUNT_PIECE = 1 << 18
# Counts of pairs take vocab_size^2 numbers of 8 bytes: 32 MiB at most.
_MAX_PAIR_VOCAB = 2048


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


class _Rows:
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
        rows = self.numbers if self.is_packed else self.rows_before
        kept = 0 if rows is None else rows.nbytes
        return self.tokens.nbytes + self.offsets.nbytes + kept

    def batch(self, indices_B: np.ndarray) -> Batch:
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


class DecoderData:
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
            "train": _Rows(train, window, layout, pad),
            "heldout": _Rows(heldout, window, layout, pad),
        }
        if not self._rows["train"].num_targets:
            raise ValueError(
                "the training documents must have a target; got none of two tokens or more. "
                "Use longer documents."
            )

    @property
    def num_train(self) -> int:
        """Number of training rows."""
        return self._rows["train"].num_rows

    @property
    def num_heldout(self) -> int:
        """Number of held-out rows; 0 if there is no held-out split."""
        return self._rows["heldout"].num_rows

    @property
    def nbytes(self) -> int:
        """Bytes of both streams and of the tables that find a row in them."""
        return sum(rows.nbytes for rows in self._rows.values())

    @property
    def has_bytes(self) -> bool:
        """Whether ids below 256 are bytes, so that bits per byte mean something."""
        return self.vocab_size == VOCAB_SIZE or "num_bytes" in self._source

    def train_batch(self, indices: np.ndarray) -> Batch:
        """Return training rows.

        Parameters
        ----------
        indices : ndarray of shape (B,), integer
            Row numbers in 0..num_train-1.

        Returns
        -------
        Batch
            x, targets (B, T) and, packed, starts (B, T); int32, newly allocated.

        Raises
        ------
        IndexError
            A row number is out of range.
        """
        return self._batch("train", indices)

    def heldout_batch(self, indices: np.ndarray) -> Batch:
        """Return held-out rows; as `train_batch`, with numbers in 0..num_heldout-1."""
        return self._batch("heldout", indices)

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
        rows = self._rows[split]
        return rows.targets_of(checked_indices(indices, rows.num_rows, f"{split} rows"))

    def count_bytes(self, split: str, indices: np.ndarray) -> int:
        """Return the valid targets of rows that are bytes; 0 without `has_bytes`.

        The divisor of bits per byte; the end of a document is predicted and paid for, but is no
        byte.
        """
        if not self.has_bytes:
            return 0
        rows = self._rows[split]
        indices = checked_indices(indices, rows.num_rows, f"{split} rows")
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
        train, measured = self._rows["train"], self._rows[split]
        targets = _target_counts(measured, self.vocab_size)
        num_targets, num_bytes = int(targets.sum()), int(targets[:NUM_BYTES].sum())
        shares = targets[targets > 0] / num_targets
        unigrams = _target_counts(train, self.vocab_size) + 1
        sums = {"unigram": np.sum(targets * (np.log(unigrams.sum()) - np.log(unigrams)))}
        if self.vocab_size <= _MAX_PAIR_VOCAB:
            bigrams = _pair_counts(train, self.vocab_size) + 1
            nats = np.log(bigrams.sum(axis=1, keepdims=True)) - np.log(bigrams)
            sums["bigram"] = np.sum(_pair_counts(measured, self.vocab_size) * nats)
        result: dict[str, float | str] = {
            "unigram_entropy_nats": float(-np.sum(shares * np.log(shares)))
        }
        for name, value in sums.items():
            result[f"{name}_cross_entropy_nats"] = float(value) / num_targets
        if self.has_bytes and num_bytes:
            for name, value in sums.items():
                result[f"{name}_bits_per_byte"] = float(value) / math.log(2) / num_bytes
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

    def _batch(self, split: str, indices: np.ndarray) -> Batch:
        rows = self._rows[split]
        return rows.batch(checked_indices(indices, rows.num_rows, f"{split} rows"))


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


def load_documents(
    *,
    kind: str,
    window: int,
    layout: str,
    path: str | os.PathLike[str] | None = None,
    max_bytes: int = 0,
    vocab_size: int = 0,
) -> DecoderData:
    """Read documents and split them.

    Parameters
    ----------
    kind : {"stdlib", "text"}
        The running Python's standard library sources, or the file `path`: a text, or the ids of
        an array file whose name ends in ``.npy``.
    window, layout
        As in `DecoderData`.
    path : path-like, optional
        The file, for kind "text".
    max_bytes : int, default 0
        Use at most this many bytes: whole documents of the library, the start of a text, so many
        ids of a token file. 0 means all.
    vocab_size : int, default 0
        Ids that the model knows; 0 means 266.

    Returns
    -------
    DecoderData

    Raises
    ------
    ConfigError
        The file is missing, unreadable, empty or too short, or an id is not in the vocabulary.
        The message names the field.

    Notes
    -----
    Library: every ``.py`` file is a document. Text: blank lines end documents and belong to none.
    Both become `BOS`, bytes, `EOS`. Token file: taken as it is; with 266 ids a document ends
    after each `EOS`, with another vocabulary the file is one document. Held out is what
    `heldout.choose_heldout` says: every 20th document, nothing of fewer than 20.
    """
    vocab_size = vocab_size or VOCAB_SIZE
    if kind == "text" and path is None:
        raise ConfigError('data.path must be set for data.kind "text"; got none. Set it.')
    if kind == "text" and Path(path).suffix == ".npy":
        return _load_token_file(path, window, layout, max_bytes, vocab_size)
    if vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"model.vocab_size must be at least {VOCAB_SIZE} for text (256 bytes and ten "
            f"specials); got {vocab_size}. Set it to 0, or give ids of your own as a .npy file."
        )
    if kind == "stdlib":
        name, texts = library_name(), read_library(max_bytes)
        pieces: Sequence[bytes] = texts
    else:
        name, content = Path(path).name, read_file(path, max_bytes)
        texts, pieces = split_documents(content), [content]
        if content and not texts:
            raise ConfigError(
                f"data.path must hold text; got blank lines only in {os.fspath(path)!r}. "
                f"Use another file."
            )
    num_bytes = sum(map(len, texts))
    require_bytes(num_bytes, 1, "one token", kind=kind, path=path, max_bytes=max_bytes)
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    source = {
        "name": name,
        "sha256": digest.hexdigest(),
        "num_documents": len(texts),
        "num_bytes": num_bytes,
    }
    return _split(texts, texts, stream_of_bytes, window, layout, vocab_size, source)


def _load_token_file(
    path: str | os.PathLike[str], window: int, layout: str, max_tokens: int, vocab_size: int
) -> DecoderData:
    name = repr(os.fspath(path))
    ids = read_tokens(path, max_tokens)
    if ids.size < 2:
        field = "data.max_bytes" if max_tokens == 1 else "data.path"
        raise ConfigError(
            f"{field} must leave at least 2 tokens, one to predict the other; got {ids.size} of "
            f"{name}. Use a longer file, or set data.max_bytes = 0."
        )
    least, largest = int(ids.min()), int(ids.max())
    if largest >= vocab_size:
        raise ConfigError(
            f"model.vocab_size must be larger than every token id; got {vocab_size} with id "
            f"{largest} in {name}. Set model.vocab_size = {largest + 1} or more."
        )
    if least < 0:
        raise ConfigError(
            f"data.path must hold token ids from 0 on; got {least} in {name}. Leave ignored "
            f"positions out: data.layout packs or pads the documents."
        )
    dtype = token_dtype(vocab_size)
    ids = ids.astype(dtype)
    documents, texts = [ids], [b""]
    if vocab_size == VOCAB_SIZE:
        if np.any(ids == PAD):
            raise ConfigError(
                f"data.path must hold no padding (id {PAD}); got {np.count_nonzero(ids == PAD)} "
                f"in {name}. Leave it out: data.layout packs or pads the documents."
            )
        documents = [part for part in np.split(ids, np.flatnonzero(ids == EOS) + 1) if part.size]
        texts = [decode(document) for document in documents]
    source = {
        "name": Path(path).name,
        "sha256": hashlib.sha256(ids.astype(dtype.newbyteorder("<")).tobytes()).hexdigest(),
        "num_documents": len(documents),
        "num_tokens": int(ids.size),
    }
    return _split(
        documents, texts, lambda chosen: stream_of_tokens(chosen, dtype), window, layout,
        vocab_size, source,
    )  # fmt: skip


def _split(
    documents: Sequence,
    texts: Sequence[bytes],
    join: Callable[[Sequence], TokenStream],
    window: int,
    layout: str,
    vocab_size: int,
    source: dict[str, object],
) -> DecoderData:
    """Choose by the texts, join what was chosen."""
    heldout = choose_heldout(texts)
    if heldout:
        rule = HELDOUT_RULE
    elif len(texts) < HELDOUT_EVERY:
        rule = f"none (fewer than {HELDOUT_EVERY} documents)"
    else:
        rule = "none (every document offered is a near-copy of another)"
    chosen = set(heldout)
    train = join([document for index, document in enumerate(documents) if index not in chosen])
    if train.tokens.size < len(train.offsets):
        raise ConfigError(
            f"data.path must hold a document of two tokens or more to train on; got "
            f"{train.tokens.size} of one. Use another file."
        )
    return DecoderData(
        train, join([documents[index] for index in heldout]),
        window=window, layout=layout, vocab_size=vocab_size,
        source={**source, "heldout_rule": rule},
    )  # fmt: skip


def _target_counts(rows: _Rows, vocab_size: int) -> np.ndarray:
    """Return how often each id is a target, shape (vocab_size,), int64."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, rows.num_tokens, _COUNT_PIECE):
        end = min(start + _COUNT_PIECE, rows.num_tokens)
        counts += np.bincount(rows.tokens[start:end], minlength=vocab_size)
    # All tokens but the documents' first.
    counts -= np.bincount(rows.tokens[rows.offsets[:-1]], minlength=vocab_size)
    return counts


def _pair_counts(rows: _Rows, vocab_size: int) -> np.ndarray:
    """Return how often target b follows token a, shape (vocab_size of a, vocab_size of b)."""
    counts = np.zeros(vocab_size * vocab_size, np.int64)

    def codes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return first.astype(np.int64) * vocab_size + second

    for start in range(0, rows.num_tokens - 1, _COUNT_PIECE):
        piece = rows.tokens[start : min(start + _COUNT_PIECE + 1, rows.num_tokens)]
        counts += np.bincount(codes(piece[:-1], piece[1:]), minlength=counts.size)
    # All neighbours but those on two sides of a border.
    borders = rows.offsets[1:-1]
    across = codes(rows.tokens[borders - 1], rows.tokens[borders])
    counts -= np.bincount(across, minlength=counts.size)
    return counts.reshape(vocab_size, vocab_size)
