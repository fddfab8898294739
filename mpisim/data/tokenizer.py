"""Text to token ids and back: a token is a byte, or one of ten special ids above them.

Pure functions without a vocabulary file, so that every text of any language has tokens and
`decode(encode(text))` is the text. Called by `rows`, `load_documents` and whoever prompts a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_BYTES = 256
"""Ids below it are bytes."""
PAD = 256
"""Fills a row after its document; predicts nothing and is never predicted."""
BOS = 257
"""First token of a document."""
EOS = 258
"""Last token of a document."""
UNK = 259
"""Unknown token; bytes leave nothing unknown, so no text has it."""
SEP = 260
"""Separator of two parts of one document, for the user's own token files."""
MASK = 261
"""Hidden token, for the user's own token files."""

SPECIAL_NAMES = (
    "<pad>", "<bos>", "<eos>", "<unk>", "<sep>", "<mask>",
    "<reserved0>", "<reserved1>", "<reserved2>", "<reserved3>",
)  # fmt: skip
"""How `decode` shows ids 256..265."""
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_NAMES)
"""Number of ids, 266."""


def encode(text: bytes | str, *, bos: bool = False, eos: bool = False) -> np.ndarray:
    """Return the token ids of a text.

    Parameters
    ----------
    text : bytes or str
        A str is encoded as UTF-8; undecodable bytes of a command line (surrogate escapes) become
        the bytes that they were.
    bos, eos : bool
        Put `BOS` in front, `EOS` at the end.

    Returns
    -------
    ndarray of shape (n,), int32
        Newly allocated.

    Raises
    ------
    ValueError
        The str has a lone surrogate that stands for no byte.
    """
    if isinstance(text, str):
        try:
            text = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text must be encodable as UTF-8; got {text[error.start : error.end]!r} at "
                f"character {error.start}. Remove it or pass bytes."
            ) from None
    ids = np.empty(len(text) + bos + eos, np.int32)
    ids[bos : bos + len(text)] = np.frombuffer(text, np.uint8)
    if bos:
        ids[0] = BOS
    if eos:
        ids[-1] = EOS
    return ids


def decode(ids: np.ndarray | Sequence[int], *, show_specials: bool = False) -> bytes:
    """Return the bytes of token ids.

    Parameters
    ----------
    ids : array-like of shape (n,), integer
        Each in 0..265.
    show_specials : bool
        Write special ids as their names, such as ``<eos>``; without it they are left out.

    Returns
    -------
    bytes
        Any bytes; a model may well write something that is not UTF-8.

    Raises
    ------
    ValueError
        The ids are no integers of one dim, or one is out of range.
    """
    ids = np.asarray(ids)
    if not ids.size and ids.ndim == 1:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"token ids must be integers of one dim; got {ids.dtype} of shape {ids.shape}. "
            f"Decode one row at a time."
        )
    if int(ids.min()) < 0 or int(ids.max()) >= VOCAB_SIZE:
        raise ValueError(
            f"token ids must be in 0..{VOCAB_SIZE - 1}; got {int(ids.min())}..{int(ids.max())}. "
            f"Decode with the tokenizer that made them."
        )
    is_byte = ids < NUM_BYTES
    if not show_specials or is_byte.all():
        return ids[is_byte].astype(np.uint8).tobytes()
    parts, start = [], 0
    for place in np.flatnonzero(~is_byte).tolist():
        parts.append(ids[start:place].astype(np.uint8).tobytes())
        parts.append(SPECIAL_NAMES[int(ids[place]) - NUM_BYTES].encode())
        start = place + 1
    return b"".join(parts) + ids[start:].astype(np.uint8).tobytes()
