"""16-bit sums and maxima on ranks as threads: bits, bytes, replicas, memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import reduction_checks as checks
from collective_checks import tiny_segments
from contract import dtype_of
from test_comm_collectives import first_error, over_ranks, run

from mpisim.comm.communicator import Communicator
from mpisim.comm.local import run_threads
from mpisim.errors import MessageMismatch
from mpisim.layouts.steps import all_reduce_table

test_halves_hop_by_hop = over_ranks(checks.check_halves_hop_by_hop)
test_halves_beside_compute = over_ranks(checks.check_halves_beside_compute)
test_C028_average_of_large_and_of_tiny_gradients = over_ranks(
    checks.check_C028_average_of_large_and_of_tiny_gradients
)
test_C019_one_rank_raises_the_flag = over_ranks(checks.check_C019_one_rank_raises_the_flag)
test_sum_and_max_of_one_buffer = over_ranks(checks.check_sum_and_max_of_one_buffer)
test_refused_reductions = over_ranks(checks.check_refused_reductions, (1, 2, 3))
test_scratch_is_what_the_tables_say = over_ranks(checks.check_scratch_is_what_the_tables_say)


@pytest.mark.parametrize("size", (2, 3))
def test_halves_above_two_mebibytes(size):
    run(checks.check_real_pipelined_halves, size, strict=True)


@pytest.mark.parametrize("size", (2, 3, 4, 8))
def test_halves_in_segments_of_a_few_bytes(size):
    with tiny_segments(pipeline_bytes=64, segment_bytes=16):
        assert all_reduce_table(257, size, 2, "ring").segments > 1
        for check in (checks.check_halves_hop_by_hop, checks.check_halves_beside_compute):
            run(lambda t, c=check: c(t, counts=(33, 257)), size, strict=True, eager_bytes=0)
        run(lambda t: checks.check_scratch_is_what_the_tables_say(t, (0, 1, 33, 257)), size)


def rounded_once(total, name):
    """Round float32 sums to 16 bits, to nearest even, without the adder or the cast under test."""
    if name == "bfloat16":
        raw = total.view(np.uint32).astype(np.uint64)
        return ((raw + 0x7FFF + (raw >> 16 & 1)) >> 16).astype(np.uint16)
    wide = total.astype(np.float64)
    exponent = np.maximum(np.frexp(wide)[1] - 1, -14)
    step = np.ldexp(1.0, exponent - 10)
    value = np.rint(wide / step) * step  # rint ties to even
    exponent = np.maximum(np.frexp(value)[1] - 1, -14)
    mantissa = np.abs(value) * np.ldexp(1.0, 10 - exponent)
    code = np.where(mantissa >= 1024, (exponent + 15) * 1024 + mantissa - 1024, mantissa)
    code = np.minimum(code, 0x7C00).astype(np.uint16)
    return code | (np.signbit(wide).astype(np.uint16) << 15)


@pytest.mark.parametrize("name", checks.HALVES)
def test_each_sum_is_rounded_once_to_nearest_even(name):
    """All finite 16-bit values against a few hundred others, over two ranks."""
    dtype = dtype_of(name)
    patterns = np.arange(65536, dtype=np.uint16)
    finite = patterns[np.isfinite(patterns.view(dtype).astype(np.float32))]
    generator = np.random.default_rng(4)
    others = np.concatenate([finite[:3], finite[-2:], generator.choice(finite, 60)])
    # Neighbours in size make ties: an odd last bit against half of it.
    left = np.concatenate([finite] * (others.size + 2))
    near = (finite.view(dtype).astype(np.float32) * np.float32(2.0**-9)).astype(dtype)
    nearer = (finite.view(dtype).astype(np.float32) * np.float32(2.0**-12)).astype(dtype)
    right = np.concatenate(
        [np.repeat(others, finite.size), near.view(np.uint16), nearer.view(np.uint16)]
    )

    def body(transport):
        x = [left, right][transport.rank].view(dtype).copy()
        with np.errstate(all="raise"):
            Communicator(transport).all_reduce(x)
        return x.view(np.uint16)

    job = run_threads(body, 2)
    assert not job.errors, job.errors
    with np.errstate(over="ignore"):
        total = left.view(dtype).astype(np.float32) + right.view(dtype).astype(np.float32)
    expected = rounded_once(total, name)
    for result in job.results:
        assert np.array_equal(result, expected)


@pytest.mark.parametrize("name", checks.HALVES)
@pytest.mark.parametrize("algorithm", ("ring", "recursive_doubling"))
def test_sums_make_no_wide_copy(name, algorithm):
    """While 16-bit buffers are summed nothing of their size is allocated."""
    count = 1 << 20

    def body(transport):
        group = Communicator(transport, algorithm=algorithm)
        x = np.ones(count, dtype_of(name))
        program = group.prepare_all_reduce(x)
        peak = 0
        for _ in range(2):
            transport.barrier()
            if transport.rank == 0:
                tracemalloc.start()
            transport.barrier()
            group.start(program)
            group.wait(program)
            transport.barrier()
            if transport.rank == 0:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            transport.barrier()  # what others allocate from here on must not count
        assert (x == 4).all()
        return peak

    job = run_threads(body, 2)
    assert not job.errors, job.errors
    assert job.results[0] < 64 << 10


@pytest.mark.parametrize("pair", [("float16", "bfloat16"), ("bfloat16", "float16")])
@pytest.mark.parametrize("algorithm", ("ring", "recursive_doubling", "halving_doubling"))
def test_ranks_that_disagree_on_the_half_are_told(pair, algorithm):
    """Both have 2 bytes: only the tag tells them apart."""

    def body(transport):
        group = Communicator(transport, algorithm=algorithm)
        group.all_reduce(np.ones(64, dtype_of(pair[transport.rank])))

    first = first_error(run_threads(body, 2, timeout_s=10.0))
    assert isinstance(first, MessageMismatch)
    assert all(name in str(first) for name in pair)
