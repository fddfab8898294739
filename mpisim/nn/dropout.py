"""Dropout masks as a function of where an element is: seed, step, site, row, position, feature.

Masks address a logical array and are not drawn in order. For every update each site owns one
array of words of shape (rows of the update, max_len, width), padding included, at a fixed place of
one counter range. So masks do not depend on the number of ranks, on micro-batches, on the length
to which rows are padded, or on how often a forward is run again, and nothing has to be saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Philox

from mpisim.errors import BatchError
from mpisim.nn.numerics import TILE_ELEMENTS, tile_slices

WORDS_PER_COUNT = 4
"""64-bit words that one step of Philox's counter yields."""
WORD_TILE = TILE_ELEMENTS
"""Words that `DropoutMasks.tiles` holds at a time."""
STREAM_BYTES = 49
"""What NumPy's arrays take at most while a stream is placed: key, counter, and a seed of none."""


def keep_threshold(rate: float) -> int:
    """Return floor((1 - rate) * 2^64): an element is kept if its word is below.

    Parameters
    ----------
    rate : float
        Share that is dropped, in [0, 1).
    """
    # Scaling by a power of two is exact, and so is the conversion to a Python integer.
    return min(int((1.0 - rate) * 2.0**64), 2**64 - 1)


def dropout_key(seed: int, step: int) -> int:
    """Return the 128-bit Philox key of one update.

    Parameters
    ----------
    seed : int
        The run's seed, >= 0.
    step : int
        Committed updates before this one: an update that is skipped and tried again with other
        data sees the masks it would have seen.
    """
    digest = hashlib.sha256(f"{seed}/dropout/{step}".encode()).digest()
    return int.from_bytes(digest[:16], "little")


def words_per_update(num_sites: int, rows: int, max_len: int, width: int) -> int:
    """Return the length of the counter range of one update, in words.

    Examples
    --------
    >>> words_per_update(1, 3, 4, 4), words_per_update(6, 3, 4, 4)
    (48, 288)
    """
    return num_sites * rows * max_len * width


@dataclass(frozen=True)
class DropoutMasks:
    """The words of one microbatch's dropout sites.

    Word of (site, row, position, feature), rows counted over the whole update:
    ``base + ((site * rows + row) * max_len + position) * width + feature``.
    """

    key: int
    """Philox key of the update, see `dropout_key`."""
    rows: int
    """Rows of the global update, over all ranks and microbatches."""
    max_len: int
    """Positions that are addressed per row, padding included."""
    width: int
    """Features per position."""
    first_row: int = 0
    """Number of the microbatch's first row in the update."""
    base: int = 0
    """First word of the update's range."""
    on_draw: Callable[[int, int], None] | None = field(default=None, compare=False, repr=False)
    """Called with the first word of every range that is drawn and the one after its last."""

    def site_range(self, site: int) -> tuple[int, int]:
        """Return the first word of a site and the one after its last, over all rows.

        Examples
        --------
        >>> DropoutMasks(key=0, rows=3, max_len=4, width=4).site_range(5)
        (240, 288)
        """
        words = self.rows * self.max_len * self.width
        return self.base + site * words, self.base + (site + 1) * words

    def words(self, site: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the words of one site for the microbatch.

        Parameters
        ----------
        site : int
            Which site, from 0.
        shape : (B, T, D)
            The microbatch's rows, its padded length, and `width`.

        Returns
        -------
        ndarray of shape (B, T, D), uint64
            Independent of B, T and `first_row` in every place that another call addresses, too.

        Raises
        ------
        BatchError
            The rows or the length do not fit into the update's array: another site's words would
            be used twice.
        """
        words = np.empty(shape, np.uint64)
        flat = words.reshape(-1)
        for tile, part in self.tiles(site, shape):
            flat[tile] = part
        return words

    def tiles(self, site: int, shape: tuple[int, ...]) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the words of `words` a few at a time, in order.

        Parameters
        ----------
        site, shape
            As in `words`.

        Yields
        ------
        part : slice
            Which elements of the flat array of this shape.
        words : ndarray of uint64
            Their words. A part lies within one row and has at most `WORD_TILE` elements, so that
            what is allocated depends on the shape alone.
        """
        num_rows, length, width = shape
        if (
            self.first_row < 0
            or self.first_row + num_rows > self.rows
            or length > self.max_len
            or width != self.width
        ):
            raise BatchError(
                f"a microbatch must lie within its update's {self.rows} rows x {self.max_len} "
                f"tokens x {self.width} features; got rows {self.first_row}.."
                f"{self.first_row + num_rows - 1}, {length} tokens, {width} features. Count rows "
                f"over all ranks and microbatches."
            )
        row_words = self.max_len * width
        start = self.site_range(site)[0] + self.first_row * row_words
        row_size = length * width
        if not num_rows * row_size:
            return
        stream = None
        for row in range(num_rows):
            if stream is None or length != self.max_len:
                # Rows of full length follow each other in the stream.
                count = num_rows * row_size if length == self.max_len else row_size
                stream = self._stream_at(start + row * row_words, count)
            for part in tile_slices(row_size, WORD_TILE):
                place = slice(row * row_size + part.start, row * row_size + part.stop)
                yield place, stream.random_raw(part.stop - part.start)

    def _stream_at(self, start: int, count: int) -> Philox:
        """Return the stream placed at word `start`, `count` words of which will be drawn."""
        if self.on_draw is not None:
            self.on_draw(start, start + count)
        counter, skipped = divmod(start, WORDS_PER_COUNT)
        stream = Philox(key=self.key, counter=counter)
        stream.random_raw(skipped, output=False)
        return stream
