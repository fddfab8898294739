"""Which samples make up which step, as pure functions of seed, epoch and position.

A position is the number of samples consumed since the start of the run, over all ranks; the order
of an epoch is a keyed bijection that is computed and never stored. So ranks need no message to
agree, a run resumes from its position alone, and another number of ranks sees the same batches.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mpisim.data.footprint import SAMPLING_CONSTANTS, SAMPLING_TILE
from mpisim.errors import ConfigError
from mpisim.layouts.chunks import chunk_bounds

# Two constants of SplitMix64 (Steele, Lea and Flood 2014) that spread the bits of small inputs. Any
# constants keep the bijection, but another choice changes the order of every run.
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
_HALF_WORD = 32


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int, num_rounds: int) -> tuple[int, ...]:
    digest = hashlib.shake_256(f"{seed}/{epoch}".encode()).digest(8 * num_rounds)
    # No array: a cached one would stay allocated between steps.
    return tuple(
        int.from_bytes(digest[start : start + 8], "little") for start in range(0, len(digest), 8)
    )


class _Network:
    """A Feistel network on a grid, with the working space for one tile of values.

    All constants are views of one array and all results go to arrays made beforehand: NumPy would
    make an array of every number that it is given.
    """

    def __init__(self, count: int, seed: int, epoch: int, tile: int) -> None:
        num_columns = math.isqrt(max(count - 1, 0)) + 1
        # On a tiny grid the hashes take few values: more rounds until all orders are equally
        # likely.
        keys = _round_keys(seed, epoch, 16 if count < 256 else 8)
        others = (-(-count // num_columns), num_columns, count, *_MULTIPLIERS, _HALF_WORD)
        table = np.zeros(SAMPLING_CONSTANTS, np.uint64)
        for place, value in enumerate((*others, *keys)):
            table[place] = value
        self._constants = [table[place : place + 1] for place in range(len(others))]
        self._keys = [table[len(others) + i : len(others) + i + 1] for i in range(len(keys))]
        self._scratch = np.empty((4, tile), np.uint64)
        self._outside = np.empty(tile, np.bool_)

    def permute(self, values: np.ndarray) -> None:
        """Replace values in 0..count-1 by their samples, at most a tile of them."""
        self._encrypt(values, values)
        count = self._constants[2]
        outside, again = self._outside[: values.size], self._scratch[3, : values.size]
        while np.count_nonzero(np.greater_equal(values, count, out=outside)):
            # The whole tile again: how many are outside must not decide how much memory it takes.
            self._encrypt(values, again)
            np.copyto(values, again, where=outside)

    def _encrypt(self, values: np.ndarray, out: np.ndarray) -> None:
        """Permute 0..num_rows * num_columns - 1."""
        num_rows, num_columns, _, multiplier_a, multiplier_b, half_word = self._constants
        row, column, mixed = self._scratch[:3, : values.size]
        np.floor_divide(values, num_columns, out=row)
        np.remainder(values, num_columns, out=column)
        # Not needed by the caller until the last line writes it.
        shifted = out if out is not values else self._scratch[3, : values.size]
        for index, key in enumerate(self._keys):
            # Each round adds a hash of one coordinate to the other, so it can be undone.
            np.add(row if index % 2 else column, key, out=mixed)
            np.multiply(mixed, multiplier_a, out=mixed)
            np.right_shift(mixed, half_word, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, multiplier_b, out=mixed)
            np.right_shift(mixed, half_word, out=mixed)
            if index % 2:
                np.add(column, mixed, out=column)
                np.remainder(column, num_columns, out=column)
            else:
                np.add(row, mixed, out=row)
                np.remainder(row, num_rows, out=row)
        np.multiply(row, num_columns, out=out)
        np.add(out, column, out=out)


def _permute_in_place(positions: np.ndarray, count: int, seed: int, epoch: int) -> None:
    """Replace int64 positions by their samples, tile by tile."""
    tile = min(positions.size, SAMPLING_TILE)
    if not tile:
        return
    network, values = _Network(count, seed, epoch, tile), positions.view(np.uint64)
    for start in range(0, values.size, tile):
        network.permute(values[start : start + tile])


def permute_indices(indices: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Map positions within an epoch to samples by a keyed bijection on 0..count-1.

    Parameters
    ----------
    indices : ndarray of shape (n,), integer
        Positions, each in 0..count-1. Not modified.
    count : int
        Number of samples, >= 1.
    seed : int
        Seed of the run, >= 0.
    epoch : int
        Which pass over the data, >= 0; every epoch has an order of its own.

    Returns
    -------
    ndarray of shape (n,), int64
        Samples; distinct for distinct positions, and all of 0..count-1 for all positions.

    Raises
    ------
    IndexError
        An index is outside 0..count-1.

    Notes
    -----
    A Feistel network permutes a nearly square grid of at least `count` cells; a value that lands
    in one of the spare cells, fewer than sqrt(count) of them, is permuted again until it does
    not (Black and Rogaway 2002, generalized Feistel and cycle walking). Memory and time depend
    on n, not on count: 256 indices take about 40 us.
    """
    indices = np.asarray(indices)
    if indices.size and not (0 <= int(indices.min()) and int(indices.max()) < count):
        raise IndexError(
            f"indices must be in 0..{count - 1}; got {int(indices.min())}..{int(indices.max())}. "
            f"Reduce them to a position within the epoch."
        )
    samples = indices.astype(np.int64)
    _permute_in_place(samples, count, seed, epoch)
    return samples


@dataclass(frozen=True)
class Sampler:
    """Cuts every epoch's order into the batches of global steps.

    The last batch of an epoch may be short: no sample is repeated to fill it and none is dropped.
    """

    num_samples: int
    """Samples of one epoch, >= 1."""
    global_batch: int
    """Rows of one step over all ranks and microbatches, 1..num_samples."""
    seed: int
    """Seed of the run."""

    def __post_init__(self) -> None:
        """Refuse a batch that one epoch cannot fill."""
        if not 1 <= self.global_batch <= self.num_samples:
            raise ConfigError(
                f"train.global_batch must be in 1..{self.num_samples}, the number of training "
                f"rows; got {self.global_batch}. Lower train.global_batch or use more data."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps that pass over all samples once, the short last one included."""
        return -(-self.num_samples // self.global_batch)

    def epoch(self, step: int) -> int:
        """Return the epoch of the global step `step`, both counted from 0."""
        return step // self.steps_per_epoch

    def position(self, step: int) -> int:
        """Return the number of samples that all steps before `step` consumed."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return epoch * self.num_samples + step_in_epoch * self.global_batch

    def num_rows(self, step: int) -> int:
        """Return the rows of global step `step`: `global_batch`, or fewer at an epoch's end."""
        return self.position(step + 1) - self.position(step)

    def batch_indices(self, step: int, lo: int = 0, hi: int | None = None) -> np.ndarray:
        """Return the samples of a step.

        Parameters
        ----------
        step : int
            Global step, counted from 0 over all epochs.
        lo, hi : int, optional
            Return rows ``lo..hi - 1`` of the step only, as `shard_rows` cuts them.

        Returns
        -------
        ndarray of shape (hi - lo,), int64
            Sample numbers in 0..num_samples-1.

        Raises
        ------
        IndexError
            The range does not lie in the step's rows.
        """
        rows = self.num_rows(step)
        hi = rows if hi is None else hi
        if not 0 <= lo <= hi <= rows:
            raise IndexError(
                f"rows of step {step} must be a range in 0..{rows}; got {lo}..{hi}. "
                f"Cut it with shard_rows."
            )
        epoch = self.epoch(step)
        start = self.position(step) - epoch * self.num_samples
        indices = np.arange(start + lo, start + hi, dtype=np.int64)
        _permute_in_place(indices, self.num_samples, self.seed, epoch)
        return indices


def shard_rows(num_rows: int, dp_size: int, dp_index: int) -> tuple[int, int]:
    """Return the rows ``[lo, hi)`` of a step that one data-parallel rank computes.

    Parameters
    ----------
    num_rows : int
        Rows of the step, >= 0.
    dp_size, dp_index : int
        Data-parallel degree and this rank's place on the axis.

    Returns
    -------
    tuple of int
        Disjoint over the ranks and covering; sizes differ by at most one, and with fewer rows
        than ranks the last ranks have none.
    """
    bounds = chunk_bounds(num_rows, dp_size)
    return bounds[dp_index], bounds[dp_index + 1]


def microbatch_bounds(lo: int, hi: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the offsets that cut rows ``[lo, hi)`` into microbatches.

    Parameters
    ----------
    lo, hi : int
        A rank's rows.
    num_microbatches : int
        Number of pieces, >= 1.

    Returns
    -------
    tuple of int, length num_microbatches + 1
        Microbatch i is ``[bounds[i], bounds[i + 1])``; it may be empty.
    """
    return tuple(lo + bound for bound in chunk_bounds(hi - lo, num_microbatches))


def spread_indices(num_samples: int, limit: int, lo: int = 0, hi: int | None = None) -> np.ndarray:
    """Return evenly spread, distinct sample numbers for an evaluation.

    Parameters
    ----------
    num_samples : int
        Samples there are, >= 0.
    limit : int
        Samples wanted at most; 0 means all.
    lo, hi : int
        Which of these numbers are returned; by default all of them.

    Returns
    -------
    ndarray of shape (hi - lo,), int64
        Ascending; the same on every rank.
    """
    wanted = num_samples if limit == 0 else min(limit, num_samples)
    numbers = np.arange(lo, wanted if hi is None else hi, dtype=np.int64)
    if wanted < num_samples:
        numbers *= num_samples
        numbers //= wanted
    return numbers
