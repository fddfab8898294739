"""How the ladder cuts things into consecutive pieces: rows into microbatches, vectors into chunks.

States in plain code the convention that the engine's own tables follow, so that pieces line up.
"""

from __future__ import annotations

from mpisim.reference.checks import require_int


def chunk_bounds(count: int, num_chunks: int) -> list[int]:
    """Return the offsets that cut `count` elements into `num_chunks` consecutive chunks.

    Parameters
    ----------
    count : int
        Elements to cut, >= 0.
    num_chunks : int
        Chunks to make, >= 1.

    Returns
    -------
    list of int, length num_chunks + 1
        Chunk c is ``[bounds[c], bounds[c + 1])``. The first ``count % num_chunks`` chunks are one
        element longer; with ``count < num_chunks`` the last ones are empty.

    Raises
    ------
    ConfigError
        A number is out of range.

    Examples
    --------
    >>> chunk_bounds(10, 4)
    [0, 3, 6, 8, 10]
    """
    count = require_int("count", count, 0)
    num_chunks = require_int("num_chunks", num_chunks, 1)
    shortest, longer = divmod(count, num_chunks)
    bounds = [0]
    for chunk in range(num_chunks):
        bounds.append(bounds[-1] + shortest + (1 if chunk < longer else 0))
    return bounds
