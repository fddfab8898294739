"""Documents from disk: the running Python's standard library, or a text file of the user's.

Reads bytes and cuts them into documents; what becomes of them is the business of `text` (windows
of bytes) and `load_documents` (rows of tokens).
"""

from __future__ import annotations

import math
import os
import platform
import re
import sysconfig
from pathlib import Path

from mpisim.errors import ConfigError

_SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
)
# Blank lines: the start of the file or of a line, then lines of nothing but blanks.
_BLANK_LINES = re.compile(rb"(?:\A|(?<=\n))(?:[ \t\r\f\v]*\n)+")


def library_name() -> str:
    """Return what the standard library is called in a run record."""
    return f"{platform.python_implementation()} {platform.python_version()} standard library"


def read_library(max_bytes: int = 0) -> list[bytes]:
    """Return the sources of the running Python's standard library.

    Parameters
    ----------
    max_bytes : int
        Take whole documents of at most this many bytes together, passing by those that no longer
        fit; 0 means all.

    Returns
    -------
    list of bytes
        Every ``.py`` file in the order of its relative path, without test folders, installed
        packages and empty files.

    Raises
    ------
    ConfigError
        There are no sources, or one is unreadable.
    """
    root = sysconfig.get_path("stdlib")
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        paths += (Path(folder, name) for name in files if name.endswith(".py"))
    # Compared part by part with "/" between, so that the order is the same on every system.
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    documents = []
    room = max_bytes or math.inf
    for path in paths:
        try:
            # One large document must not end the list early, and need not be read to be passed by.
            if path.stat().st_size > room:
                continue
            document = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"the standard library's sources must be readable; got {error.strerror} for "
                f'{str(path)!r}. Repair the Python installation, or set data.kind = "text".'
            ) from error
        if document:
            documents.append(document)
            room -= len(document)
    if not paths:
        raise ConfigError(
            f"the standard library must have .py files; got none in {root!r}. "
            f'This Python keeps it elsewhere: set data.kind = "text" and data.path.'
        )
    return documents


def read_file(path: str | os.PathLike[str], max_bytes: int = 0) -> bytes:
    """Return the bytes of a regular file, or its first `max_bytes`.

    Raises
    ------
    ConfigError
        The file is missing, unreadable, a directory or a device.
    """
    if os.path.isdir(path):
        problem = "a directory"
    elif not os.path.exists(path):
        problem = "no such file"
    elif not os.path.isfile(path):
        # A device or a pipe may never end, and every rank must read the same bytes.
        problem = "not a regular file"
    else:
        try:
            with open(path, "rb") as file:
                return file.read(max_bytes or -1)
        except OSError as error:
            problem = error.strerror or str(error)
    raise ConfigError(
        f"data.path must name a readable file; got {os.fspath(path)!r} ({problem}). "
        f"Correct data.path; a relative path starts where the command is started."
    )


def split_documents(text: bytes) -> list[bytes]:
    r"""Cut a text at its blank lines.

    Parameters
    ----------
    text : bytes
        Lines may end in ``\n`` or ``\r\n``.

    Returns
    -------
    list of bytes
        The stretches between blank lines, each with the end of its last line; a line of nothing
        but blanks is blank. Empty for a text of blank lines only.
    """
    return [document for document in _BLANK_LINES.split(text) if document.strip()]


def require_bytes(
    num_bytes: int,
    needed: int,
    why: str,
    *,
    kind: str,
    path: str | os.PathLike[str] | None,
    max_bytes: int,
) -> None:
    """Refuse a text that is too short.

    Parameters
    ----------
    num_bytes, needed : int
        Bytes found and bytes needed.
    why : str
        What needs them, such as "data.window + 1".
    kind, path, max_bytes
        As in the config.

    Raises
    ------
    ConfigError
        Fewer than needed; the message names the field to change.
    """
    if num_bytes >= needed:
        return
    if max_bytes:
        raise ConfigError(
            f"data.max_bytes must leave at least {needed} bytes ({why}) of whole "
            f"documents; got {num_bytes} bytes with data.max_bytes = {max_bytes}. "
            f"Raise data.max_bytes or set it to 0."
        )
    if kind == "stdlib":
        raise ConfigError(
            f"the standard library must hold at least {needed} bytes ({why}) of "
            f'sources; got {num_bytes}. Lower data.window, or set data.kind = "text".'
        )
    found = f"{num_bytes} bytes" if num_bytes else "an empty file (0 bytes)"
    raise ConfigError(
        f"data.path must name a file of at least {needed} bytes ({why}); got {found} "
        f"in {str(path)!r}. Use a longer file or lower data.window."
    )
