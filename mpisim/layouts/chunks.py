"""Split `count` things over `size` owners; the first owners take the remainder."""

from __future__ import annotations


def chunk_bounds(count: int, size: int) -> tuple[int, ...]:
    """Return the `size + 1` offsets that cut `count` elements into `size` chunks.

    Parameters
    ----------
    count : int
        Number of elements, >= 0.
    size : int
        Number of chunks, >= 1.

    Returns
    -------
    tuple of int, length size + 1
        Chunk r is ``[bounds[r], bounds[r + 1])``. The first ``count % size`` chunks hold one
        element more than the rest; with ``count < size`` the last chunks are empty.

    Examples
    --------
    >>> chunk_bounds(10, 4)
    (0, 3, 6, 8, 10)
    >>> chunk_bounds(3, 4)
    (0, 1, 2, 3, 3)
    """
    base, extra = divmod(count, size)
    return tuple(rank * base + min(rank, extra) for rank in range(size + 1))


def chunk_len(count: int, size: int, index: int) -> int:
    """Return the number of elements in chunk `index` of `chunk_bounds(count, size)`.

    Examples
    --------
    >>> [chunk_len(10, 4, r) for r in range(4)]
    [3, 3, 2, 2]
    """
    base, extra = divmod(count, size)
    return base + (1 if index < extra else 0)
