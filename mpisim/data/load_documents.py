"""Documents from files: the standard library's sources, a text, or the ids of an array file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mpisim.data.corpus import (
    library_name,
    read_file,
    read_library,
    require_bytes,
    split_documents,
)
from mpisim.data.documents import DecoderData
from mpisim.data.heldout import HELDOUT_EVERY, HELDOUT_RULE, choose_heldout
from mpisim.data.rows import TokenStream, stream_of_bytes, stream_of_tokens, token_dtype
from mpisim.data.tokenizer import EOS, PAD, VOCAB_SIZE, decode
from mpisim.data.tokens import read_tokens
from mpisim.errors import ConfigError


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
