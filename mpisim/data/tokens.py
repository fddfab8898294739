"""Token files: one dim of token ids in NumPy's own format, read without trusting the header.

`numpy.load` believes whatever shape a header names and may run code for object arrays; here the
header is read first and must agree with the file's size. Called by `text` and `load_documents`.
"""

from __future__ import annotations

import os

import numpy as np

from mpisim.errors import ConfigError

_FIX = "Save numpy.asarray(ids, dtype=numpy.uint16) with numpy.save."


def read_token_file(path: str | os.PathLike[str], max_tokens: int = 0) -> bytes:
    """Return the byte tokens of a ``.npy`` file as bytes, one a token.

    Parameters
    ----------
    path, max_tokens
        As for `read_tokens`; values in 0..255.

    Returns
    -------
    bytes

    Raises
    ------
    ConfigError
        As `read_tokens`, or a token is out of range. The message names `data.path`.
    """
    tokens = read_tokens(path, max_tokens)
    if tokens.size and not (0 <= int(tokens.min()) and int(tokens.max()) <= 255):
        raise ConfigError(
            f"data.path must hold byte tokens 0..255 for an mlp; got {int(tokens.min())}.."
            f"{int(tokens.max())} in {os.fspath(path)!r}. {_FIX}"
        )
    return tokens.astype(np.uint8).tobytes()


def read_tokens(path: str | os.PathLike[str], max_tokens: int = 0) -> np.ndarray:
    """Return the token ids of a ``.npy`` file.

    Parameters
    ----------
    path : path-like
        A one-dim array of any integer dtype and byte order.
    max_tokens : int
        Read at most this many; 0 means all.

    Returns
    -------
    ndarray of shape (n,)
        Of the file's dtype; read-only. The range of ids is the caller's business.

    Raises
    ------
    ConfigError
        No such file, not that format, another shape or dtype, or a header that disagrees with
        the file's size. The message names `data.path`.
    """
    name = repr(os.fspath(path))
    if os.path.exists(path) and not os.path.isfile(path):
        # Opening a pipe would wait for a writer for ever.
        raise ConfigError(
            f"data.path must name a readable file; got {name} (not a regular file). "
            f"Correct data.path; a relative path starts where the command is started."
        )
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            reader = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = reader(file)
            start, size = file.tell(), os.fstat(file.fileno()).st_size
            if dtype.kind not in "iu" or len(shape) != 1:
                raise ConfigError(
                    f"data.path must hold one dim of integer tokens; got shape {shape} of {dtype} "
                    f"in {name}. {_FIX}"
                )
            if shape[0] * dtype.itemsize != size - start:
                raise ConfigError(
                    f"data.path must be as long as its header says; got {size - start} bytes for "
                    f"{shape[0]} tokens of {dtype} in {name}. {_FIX}"
                )
            count = min(shape[0], max_tokens) if max_tokens else shape[0]
            return np.frombuffer(file.read(count * dtype.itemsize), dtype=dtype)
    except (ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"data.path must be a NumPy array file when its name ends in .npy; got {name} "
            f"({error}). {_FIX}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"data.path must name a readable file; got {name} ({error.strerror}). "
            f"Correct data.path; a relative path starts where the command is started."
        ) from None
