"""Checks of 16-bit sums and of maxima that every rank runs with its transport.

As in `collective_checks`: inputs are functions of (dtype, count, rank). Sums are compared with the
step table run over plain arrays, each addition in float32 and rounded once.
"""

from __future__ import annotations

import functools
import hashlib
import threading

import numpy as np
import pytest
from collective_checks import (
    COUNTS,
    FORCED,
    Meter,
    bits,
    check_real_pipelined_size,
    expected_traffic,
    simulate,
)
from contract import dtype_of

from mpisim.comm.communicator import Communicator, Traffic, check_drained
from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.steps import (
    all_gather_table,
    all_reduce_table,
    buffered_count,
    gather_table,
    reduce_scatter_table,
    scratch_slots,
)
from mpisim.reference.data_parallel import ring_reduce_scatter

HALVES = ("float16", "bfloat16")
_LOCK = threading.Lock()


def extremes(name, count, rank):
    """Values from below the smallest normal to sums that overflow, with ties and infinities."""
    generator = np.random.default_rng([count, rank, 5])
    low, high = (-26, 16) if name == "float16" else (-135, 128)
    with np.errstate(all="ignore"):
        values = generator.standard_normal(count) * 2.0 ** generator.integers(low, high, count)
        values[3::7] = 40000.0 if name == "float16" else 3e38  # overflows in the second hop
        values[5::11] = -np.inf if rank else np.inf
        values[6::13] = generator.integers(-4, 5, values[6::13].size) * 2.0**-24
        return values.astype(dtype_of(name))


@functools.lru_cache(maxsize=64)
def _sums(table, name):
    inputs = [extremes(name, table.count, rank) for rank in range(table.size)]
    with np.errstate(all="ignore"):
        if table.collective == "reduce_scatter":
            return ring_reduce_scatter(inputs)
        return simulate(table, inputs)


def sums(table, name):
    """Return what each rank must end with; threads of one job share the work."""
    with _LOCK:
        return _sums(table, name)


def algorithms(size):
    """Return the algorithms that differ on `size` ranks."""
    return [a for a in FORCED if a != "halving_doubling" or size & (size - 1) == 0]


def check_halves_hop_by_hop(transport, counts=COUNTS, names=HALVES):
    """Every collective of 16-bit floats: the bits of the table, its bytes, equal replicas.

    Nothing warns, not even where the caller turns warnings into errors.
    """
    rank, size = transport.rank, transport.size
    for algorithm in algorithms(size):
        group = Communicator(transport, algorithm=algorithm)
        meter = Meter(group, transport)
        digest = hashlib.sha256()
        for name in names:
            for count in counts:
                what = (algorithm, name, count, rank, size)
                mine = extremes(name, count, rank)
                table = all_reduce_table(count, size, 2, algorithm)
                expected, moves = sums(table, name)[rank], expected_traffic(table, rank, 2)
                x = mine.copy()
                for _ in range(2):
                    x[:] = mine
                    with np.errstate(all="raise"):
                        group.all_reduce(x)
                    assert bits(x) == bits(expected), what
                    meter.assert_moved(moves, what)
                digest.update(x.view(np.uint8))
        assert len(set(transport.exchange(digest.hexdigest()))) == 1, algorithm
        group.close()
    group = Communicator(transport)
    meter = Meter(group, transport)
    for name in names:
        for count in counts:
            what = (name, count, rank, size)
            mine = extremes(name, count, rank)
            bounds = chunk_bounds(count, size)
            table = reduce_scatter_table(count, size, 2)
            parts = sums(table, name)
            x, out = mine.copy(), np.zeros_like(parts[rank])
            with np.errstate(all="raise"):
                group.reduce_scatter(x, out)
            assert bits(out) == bits(parts[rank]) and bits(x) == bits(mine), what
            meter.assert_moved(expected_traffic(table, rank, 2), what)
            place = x[bounds[rank] : bounds[rank + 1]]
            with np.errstate(all="raise"):
                group.reduce_scatter(x, place)
            assert bits(place) == bits(parts[rank]), what
            meter.assert_moved(expected_traffic(table, rank, 2), what)
            whole = np.zeros_like(x)
            group.all_gather(out, whole)
            assert bits(whole) == bits(np.concatenate(parts)), what
            meter.assert_moved(expected_traffic(all_gather_table(bounds, 2), rank, 2), what)
            collected = np.zeros(count * size, x.dtype) if rank == 0 else None
            group.gather(mine, collected)
            if rank == 0:
                everyone = [extremes(name, count, r) for r in range(size)]
                assert bits(collected) == bits(np.concatenate(everyone)), what
            meter.assert_moved(expected_traffic(gather_table(count, size), rank, 2), what)
    check_drained(transport, [group])
    group.close()


def check_halves_beside_compute(transport, counts=(1000, 7, 0, 257)):
    """Queued 16-bit sums, advanced in a pattern of this rank's own: the bits of blocking ones."""
    rank, size = transport.rank, transport.size
    generator = np.random.default_rng([rank, 3])
    for algorithm in algorithms(size):
        group = Communicator(transport, algorithm=algorithm)
        cases = [(name, count) for count in counts for name in HALVES]
        buffers = [extremes(name, count, rank) for name, count in cases]
        programs = [
            group.prepare_all_reduce(x, f"bucket {number}", background=True)
            for number, x in enumerate(buffers)
        ]
        for _ in range(2):
            for x, (name, count) in zip(buffers, cases, strict=True):
                x[:] = extremes(name, count, rank)
            with np.errstate(all="raise"):
                for program in programs:
                    group.start(program)
                    for _ in range(int(generator.integers(0, 4))):
                        group.advance()
                group.wait(programs[-1])
            for x, (name, count) in zip(buffers, cases, strict=True):
                table = all_reduce_table(count, size, 2, algorithm)
                assert bits(x) == bits(sums(table, name)[rank]), (algorithm, name, count)
        group.close()


def check_real_pipelined_halves(transport):
    """16-bit buffers above 2 MiB: segmented rings, with the sizes that ship."""
    for name in HALVES:
        check_real_pipelined_size(transport, 1_100_001, name)


def check_C028_average_of_large_and_of_tiny_gradients(transport):
    """float16 gradients 40000 and 1e-7 on every rank: averages 40000 and 1e-7.

    They are right where the sum is made in float32; one in float16 overflows before the division,
    or loses the tiny ones if it divides first, and every rank can see that it overflowed.
    """
    size = transport.size
    share = np.float32(1.0 / size)
    for algorithm in algorithms(size):
        group = Communicator(transport, algorithm=algorithm)
        for value in (40000.0, 1e-7):
            gradient = np.full(1000, value, np.float16)
            wide = gradient.astype(np.float32) * share
            group.all_reduce(wide)
            assert (wide.astype(np.float16) == gradient).all(), (algorithm, value)
            # Sum, then divide.
            total = gradient.copy()
            with np.errstate(all="raise"):
                group.all_reduce(total)
            seen = np.array([not np.isfinite(total).all()], np.int64)
            group.all_reduce(seen, reduction="max")
            assert seen[0] == (value > 1 and size > 1), (algorithm, value)
            if seen[0]:
                assert (total == np.inf).all()
            # Divide, then sum.
            early = gradient * np.float16(share)
            group.all_reduce(early)
            if size == 4:
                assert (early == (0.0 if value < 1 else value)).all()
        group.close()


def check_C019_one_rank_raises_the_flag(transport):
    """A flag of one rank is everyone's after a max, for every algorithm, dtype and length."""
    rank, size = transport.rank, transport.size
    for algorithm in algorithms(size):
        group = Communicator(transport, algorithm=algorithm)
        meter = Meter(group, transport)
        for dtype in (np.int64, np.float64):
            for count in (0, 1, 3, 10, 1000):
                x = np.zeros(count, dtype)
                for flagged in (*range(size), None):
                    x[:] = rank == flagged
                    assert group.all_reduce(x, reduction="max") is x
                    assert (x == (flagged is not None)).all(), (algorithm, dtype, count, flagged)
                    table = all_reduce_table(count, size, 8, algorithm)
                    meter.assert_moved(expected_traffic(table, rank, 8), (algorithm, count))
                # Negative ones: no rank brings in a zero.
                x[:] = -5 - (rank + 1) % size
                out = np.zeros_like(x)
                before = x.copy()
                assert group.all_reduce(x, out, reduction="max") is out
                assert (out == -5).all() and np.array_equal(x, before)
                meter.assert_moved(expected_traffic(table, rank, 8), (algorithm, count))
        assert set(group.traffic()) == {"all_reduce"}
        # What float64 cannot tell apart, and the ends of the range.
        x = np.array([2**53 + (rank == size - 1), np.iinfo(np.int64).min, -(rank + 1)])
        x[1] += rank == 0
        group.all_reduce(x, reduction="max")
        assert x.tolist() == [2**53 + 1, np.iinfo(np.int64).min + 1, -1]
        # NaN of one rank is everyone's; infinities are ordinary values.
        y = np.array([np.nan if rank == size - 1 else 7.0, -np.inf, np.inf if rank == 0 else 1.0])
        with np.errstate(all="raise"):
            group.all_reduce(y, reduction="max")
        assert np.isnan(y[0]) and y[1:].tolist() == [-np.inf, np.inf]
        noisy = np.array([rank * 37 % 11 - 5.5] * 300) * np.arange(300)
        largest = np.max([(r * 37 % 11 - 5.5) * np.arange(300) for r in range(size)], axis=0)
        group.all_reduce(noisy, reduction="max")
        assert np.array_equal(noisy, largest)
        assert len(set(transport.exchange(bits(noisy).hex() + bits(y).hex()))) == 1
        check_drained(transport, [group])
        group.close()


def check_sum_and_max_of_one_buffer(transport):
    """They are two programs, prepared or not, started or blocking, whichever came first."""
    rank, size = transport.rank, transport.size
    total = size * (size + 1) // 2
    for first in ("sum", "max"):
        group = Communicator(transport)
        x = np.zeros(3, np.int64)
        for reduction in (first, "max", "sum", first):
            expected = total if reduction == "sum" else size
            program = group.prepare_all_reduce(x, reduction, reduction=reduction)
            assert group.prepare_all_reduce(x, reduction=reduction) is program
            x[:] = rank + 1
            group.start(program)
            group.wait(program)
            assert x.tolist() == [expected] * 3, (first, reduction)
            x[:] = rank + 1
            group.all_reduce(x, reduction=reduction)
            assert x.tolist() == [expected] * 3, (first, reduction)
            x[:] = rank + 1
            group.all_reduce(x)
            assert x.tolist() == [total] * 3, (first, reduction)
        assert len(group.programs()) == 2
        # A max that blocks runs after what is queued.
        y = np.full(2000, rank, np.float32)
        queued = group.prepare_all_reduce(y)
        group.start(queued)
        x[:] = rank
        group.all_reduce(x, reduction="max")
        assert queued.runs == 1 and x[0] == size - 1 and y[-1] == size * (size - 1) / 2
        group.close()


def check_refused_reductions(transport):
    """Unknown reductions, and maxima of what is not a flag, before any message."""
    group = Communicator(transport)
    x = np.zeros(4, np.int64)
    for call in (group.all_reduce, group.prepare_all_reduce):
        for name in ("min", "MAX", "", None):
            with pytest.raises(
                ValueError, match=f"reduction must be one of sum, max; got {name!r}"
            ):
                call(x, reduction=name)
        for name in ("float32", "float16", "bfloat16", "int32", "uint8", "bool"):
            with pytest.raises(
                ValueError, match=f"maximum must be one of float64, int64; got {name}"
            ):
                call(np.zeros(4, dtype_of(name)), reduction="max")
    assert group.programs() == [] and group.traffic() == {}
    assert sum(group.traffic().values(), Traffic()) == Traffic()
    group.close()


def check_scratch_is_what_the_tables_say(transport, counts=(0, 1, 7, 1000, 4099, 65537)):
    """No dtype and no reduction holds a byte more than slots and copies, before or after runs."""
    rank, size = transport.rank, transport.size
    for algorithm in algorithms(size):
        for name in ("float16", "bfloat16", "float32", "int64"):
            for count in counts:
                reduction = "max" if name == "int64" else "sum"
                x = np.ones(count, dtype_of(name))
                group = Communicator(transport, algorithm=algorithm)
                program = group.prepare_all_reduce(x, reduction=reduction)
                table = all_reduce_table(count, size, x.itemsize, algorithm)
                number, longest = scratch_slots(table, rank)
                told = number * longest + buffered_count(table, rank, x.itemsize)
                assert group.scratch_bytes == told * x.itemsize, (algorithm, name, count)
                group.start(program)
                group.wait(program)
                assert group.scratch_bytes == told * x.itemsize, (algorithm, name, count)
                assert (x == (1 if name == "int64" else size)).all()
                group.close()


CHECKS = [
    check_halves_hop_by_hop,
    check_halves_beside_compute,
    check_C028_average_of_large_and_of_tiny_gradients,
    check_C019_one_rank_raises_the_flag,
    check_sum_and_max_of_one_buffer,
    check_refused_reductions,
    check_scratch_is_what_the_tables_say,
]
"""Checks that leave the transport as they found it; any number of ranks."""
