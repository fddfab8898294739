"""Step tables as pure data: chunks, who sends what to whom, how much, and in which order.

An interpreter that holds sets instead of arrays runs the tables: every element must end as the sum
of every rank's addend, each taken once, on every rank that should have it.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.layouts import steps
from mpisim.layouts.chunks import chunk_bounds, chunk_len
from mpisim.layouts.steps import (
    ALGORITHMS,
    NO_PEER,
    all_gather_table,
    all_reduce_table,
    choose_algorithm,
    gather_table,
    num_segments,
    reduce_scatter_table,
    scratch_slots,
)
from mpisim.reference.data_parallel import ring_bytes

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)
COUNTS = (0, 1, 2, 3, 7, 10, 33)
TABLES = (all_reduce_table, reduce_scatter_table, all_gather_table)


@pytest.fixture
def tiny_segments(monkeypatch):
    for name, value in (("PIPELINE_BYTES", 32), ("SEGMENT_BYTES", 8), ("LARGE_SEGMENT_BYTES", 8)):
        monkeypatch.setattr(steps, name, value)
    for table in TABLES:
        table.cache_clear()
    yield
    for table in TABLES:
        table.cache_clear()


def run(table, start):
    """Interpret a table; `start[rank][element]` is a tuple of (rank, times) or None.

    Rows of a rank run in order, its send before its receive; the rows of one pair match in order.
    """
    size = table.size
    holds = [list(values) for values in start]
    rows = [list(table.transfers(index)) for index in range(size)]
    wires: dict[tuple[int, int], list[list]] = {}
    position, sent = [0] * size, [False] * size
    progressed = True
    while progressed:
        progressed = False
        for rank in range(size):
            if position[rank] == len(rows[rank]):
                continue
            row = rows[rank][position[rank]]
            if not sent[rank] and row.send_to != NO_PEER:
                piece = holds[rank][row.send_lo : row.send_hi]
                assert None not in piece, f"rank {rank} sends what it does not have: {row}"
                wires.setdefault((rank, row.send_to), []).append(list(piece))
                progressed = True
            sent[rank] = True
            if row.recv_from != NO_PEER:
                wire = wires.get((row.recv_from, rank))
                if not wire:
                    continue
                arrived = wire.pop(0)
                assert len(arrived) == row.recv_count, f"rank {rank}: {row}"
                for offset, value in enumerate(arrived):
                    place = row.recv_lo + offset
                    mine = holds[rank][place]
                    holds[rank][place] = tuple(sorted(mine + value)) if row.combine else value
            position[rank] += 1
            sent[rank] = False
            progressed = True
    assert all(position[r] == len(rows[r]) for r in range(size)), "ranks wait for each other"
    assert not any(wires.values()), "a message is never received"
    return holds


def all_addends(size, count):
    return [[(rank,)] * count for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_adds_every_addend_once_everywhere(algorithm, size):
    everything = tuple(range(size))
    for count in COUNTS:
        table = all_reduce_table(count, size, 8, algorithm)
        holds = run(table, all_addends(size, count))
        assert holds == [[everything] * count] * size


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_leaves_chunk_r_on_rank_r(size):
    for count in COUNTS:
        table = reduce_scatter_table(count, size, 8)
        holds = run(table, all_addends(size, count))
        for rank in range(size):
            lo, hi = table.bounds[rank], table.bounds[rank + 1]
            assert holds[rank][lo:hi] == [tuple(range(size))] * (hi - lo)


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_brings_every_chunk_everywhere(size):
    for count in COUNTS:
        for bounds in (chunk_bounds(count, size), (0,) * size + (count,), (0,) + (count,) * size):
            table = all_gather_table(bounds, 4)
            owner = [
                next(r for r in range(size) if bounds[r] <= element < bounds[r + 1])
                for element in range(count)
            ]
            start = [[(o,) if o == rank else None for o in owner] for rank in range(size)]
            assert run(table, start) == [[(o,) for o in owner]] * size


@pytest.mark.parametrize("size", SIZES)
def test_gather_brings_everything_to_index_0(size):
    table = gather_table(3, size)
    start = [
        [(rank,) if element // 3 == rank else None for element in range(3 * size)]
        for rank in range(size)
    ]
    assert run(table, start)[0] == [(element // 3,) for element in range(3 * size)]
    assert [row.recv_from for row in table.transfers(0)] == list(range(1, size))
    assert table.count == 3 * size


@pytest.mark.parametrize("size", SIZES[1:])
def test_pipelined_tables_are_right_too(tiny_segments, size):
    pipelined = 0
    for count in (5, 9, 33, 100):
        for table in (
            all_reduce_table(count, size, 8, "ring"),
            reduce_scatter_table(count, size, 8),
        ):
            pipelined += table.segments > 1
            holds = run(table, all_addends(size, count))
            for rank in range(size):
                mine = slice(table.bounds[rank], table.bounds[rank + 1])
                whole = slice(None) if table.collective == "all_reduce" else mine
                assert set(holds[rank][whole]) <= {tuple(range(size))}
            for index in range(size):
                for row in table.transfers(index):
                    assert row.send_count * 8 <= max(8, steps.SEGMENT_BYTES)
    assert pipelined


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_sent_is_received(algorithm, size):
    """Per pair of ranks, in order, row by row; and so in bytes and messages of the whole group."""
    for count in COUNTS:
        for table in (
            all_reduce_table(count, size, 4, algorithm),
            reduce_scatter_table(count, size, 4),
            all_gather_table(chunk_bounds(count, size), 4),
            gather_table(count, size),
        ):
            sent, received = {}, {}
            for index in range(size):
                for row in table.transfers(index):
                    if row.send_to != NO_PEER:
                        lengths = sent.setdefault((index, row.send_to), [])
                        lengths.append((row.send_lo, row.send_hi))
                    if row.recv_from != NO_PEER:
                        lengths = received.setdefault((row.recv_from, index), [])
                        lengths.append((row.recv_lo, row.recv_hi))
                    assert row.send_to not in (index, *range(size, 99))
            assert sent == received
            messages = [table.sent_messages(r) for r in range(size)]
            assert sum(messages) == sum(table.received_messages(r) for r in range(size))
            assert sum(table.sent_bytes(r, 4) for r in range(size)) == sum(
                table.received_bytes(r, 4) for r in range(size)
            )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_ring_bytes_equal_the_reference(size, count):
    for itemsize in (2, 4, 8):
        table = all_reduce_table(count, size, itemsize, "ring")
        found = [table.sent_bytes(r, itemsize) for r in range(size)]
        assert found == ring_bytes(count, size, itemsize)
        assert sum(found) == 2 * (size - 1) * count * itemsize
        assert {table.sent_messages(r) for r in range(size)} == {2 * (size - 1)}
        table = reduce_scatter_table(count, size, itemsize)
        found = [table.sent_bytes(r, itemsize) for r in range(size)]
        assert found == ring_bytes(count, size, itemsize, "reduce_scatter")
        table = all_gather_table(chunk_bounds(count, size), itemsize)
        found = [table.sent_bytes(r, itemsize) for r in range(size)]
        assert found == ring_bytes(count, size, itemsize, "all_gather")


def test_C054_chunks_and_bytes():
    """N = 10, 3, 1, 0 in fp32 over four ranks."""
    for count, lengths, total in (
        (10, (3, 3, 2, 2), 240),
        (3, (1, 1, 1, 0), 72),
        (1, (1, 0, 0, 0), 24),
        (0, (0, 0, 0, 0), 0),
    ):
        table = all_reduce_table(count, 4, 4, "ring")
        assert tuple(chunk_len(count, 4, r) for r in range(4)) == lengths
        assert sum(table.sent_bytes(r, 4) for r in range(4)) == total
        assert [table.sent_messages(r) for r in range(4)] == [6] * 4


def test_C053_reduce_scatter_sends_half_of_an_all_reduce():
    assert {reduce_scatter_table(1000, 4, 4).sent_bytes(r, 4) for r in range(4)} == {3000}
    assert {all_reduce_table(1000, 4, 4, "ring").sent_bytes(r, 4) for r in range(4)} == {6000}


def test_ten_float64_over_four_ranks():
    """The textbook's 2 (P - 1) / P n is 120 for everybody; the table knows better."""
    table = all_reduce_table(10, 4, 8, "ring")
    assert [table.sent_bytes(r, 8) for r in range(4)] == [112, 120, 128, 120]
    assert [table.received_bytes(r, 8) for r in range(4)] == [120, 112, 120, 128]


def test_the_first_steps_of_a_ring_by_hand():
    """Rank 1 of 4, 8 elements: it sends chunk 0 first and receives chunk 3, its own comes last."""
    rows = all_reduce_table(8, 4, 4, "ring").transfers(1)
    assert [(r.step, r.send_to, r.send_lo, r.recv_from, r.recv_lo, r.combine) for r in rows] == [
        (0, 2, 0, 0, 6, True),
        (1, 2, 6, 0, 4, True),
        (2, 2, 4, 0, 2, True),
        (3, 2, 2, 0, 0, False),
        (4, 2, 0, 0, 6, False),
        (5, 2, 6, 0, 4, False),
    ]


@pytest.mark.parametrize(
    "size, messages",
    [
        (2, [1, 1]),
        (3, [2, 1, 1]),
        (4, [2] * 4),
        (5, [3, 1, 2, 2, 2]),
        (6, [3, 1, 3, 1, 2, 2]),
        (8, [3] * 8),
    ],
)
def test_recursive_doubling_messages(size, messages):
    table = all_reduce_table(7, size, 4, "recursive_doubling")
    assert [table.sent_messages(r) for r in range(size)] == messages
    assert [table.sent_bytes(r, 4) for r in range(size)] == [28 * n for n in messages]


@pytest.mark.parametrize("size", (2, 4, 8, 16))
def test_halving_doubling_sends_no_byte_twice(size):
    table = all_reduce_table(16 * 5, size, 4, "halving_doubling")
    rounds = 2 * (size.bit_length() - 1)
    for rank in range(size):
        assert table.sent_messages(rank) == rounds
        assert table.sent_bytes(rank, 4) == 2 * (size - 1) * 16 * 5 * 4 // size


def test_steps_are_numbered_in_order():
    for size in SIZES:
        for algorithm in ALGORITHMS:
            for rank in range(size):
                rows = all_reduce_table(50, size, 4, algorithm).transfers(rank)
                numbers = [row.step for row in rows]
                assert numbers == sorted(numbers)


class TestChoice:
    """What `auto` takes, at the edges of the documented sizes."""

    def test_small_messages_take_few_steps(self):
        for size in SIZES:
            for nbytes in (0, 1, steps.LATENCY_BYTES):
                assert choose_algorithm(nbytes, size) == "recursive_doubling"

    def test_above_that_halving_on_powers_of_two_from_four_up(self):
        for nbytes in (steps.LATENCY_BYTES + 1, steps.HALVING_BYTES):
            for size in (4, 8, 16, 64):
                assert choose_algorithm(nbytes, size) == "halving_doubling"
            for size in (2, 3, 5, 6, 7, 9, 12):
                assert choose_algorithm(nbytes, size) == "ring"

    def test_large_messages_take_the_ring(self):
        assert {choose_algorithm(steps.HALVING_BYTES + 1, size) for size in SIZES} == {"ring"}

    def test_a_forced_algorithm_is_taken_where_it_can_run(self):
        for nbytes in (0, 1 << 30):
            for size in SIZES:
                power = size & (size - 1) == 0
                assert choose_algorithm(nbytes, size, "ring") == "ring"
                chosen = choose_algorithm(nbytes, size, "recursive_doubling")
                assert chosen == "recursive_doubling"
                chosen = choose_algorithm(nbytes, size, "halving_doubling")
                assert chosen == ("halving_doubling" if power else "ring")

    def test_all_ranks_choose_alike(self):
        """The choice knows only what is equal on all ranks: bytes, size, algorithm."""
        for count in (10, 5000, 40_000, 600_000):
            for size in (2, 3, 4):
                table = all_reduce_table(count, size, 4)
                assert table.algorithm == choose_algorithm(4 * count, size)

    def test_segments_start_above_the_pipeline_size(self):
        edge = steps.PIPELINE_BYTES // 4
        assert num_segments(chunk_bounds(edge, 2), 4) == 1
        assert num_segments(chunk_bounds(edge + 1, 2), 4) > 1
        for count in (edge + 1, 3 * edge, 40 * edge):
            for size in (2, 3, 8):
                bounds = chunk_bounds(count, size)
                segments = num_segments(bounds, 4)
                longest = -(-(bounds[1] - bounds[0]) // segments) * 4
                largest = (
                    steps.SEGMENT_BYTES if 4 * count <= steps.LARGE_BYTES
                    else steps.LARGE_SEGMENT_BYTES
                )  # fmt: skip
                assert longest <= largest


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scratch_is_small_and_sufficient(algorithm, size):
    for count in COUNTS:
        table = all_reduce_table(count, size, 8, algorithm)
        for index in range(size):
            number, longest = scratch_slots(table, index)
            received = [row.recv_count for row in table.transfers(index) if row.combine]
            assert longest == max(received, default=0)
            assert number <= 2 and (number > 0) == bool(received)


def test_scratch_of_a_reduce_scatter():
    for size in SIZES[1:]:
        table = reduce_scatter_table(100, size, 8)
        assert scratch_slots(table, 0)[0] == min(2, size - 2)
        assert scratch_slots(table, 0, in_place=True)[0] == min(2, size - 1)


def test_scratch_of_a_large_all_reduce_does_not_grow():
    """At most 1.5 MiB beside a buffer of 64 MiB, on any number of ranks."""
    for size in (2, 3, 4, 8):
        for nbytes in (4 << 20, 64 << 20, 1 << 30):
            table = all_reduce_table(nbytes // 4, size, 4)
            number, longest = scratch_slots(table, 0)
            assert number * longest * 4 <= 3 << 19 or nbytes < 64 << 20
            assert number == steps.PIPELINE_DEPTH


@given(count=st.integers(0, 10**6), size=st.integers(1, 64))
@settings(max_examples=200, deadline=None)
def test_chunks_are_disjoint_covering_and_even(count, size):
    bounds = chunk_bounds(count, size)
    lengths = [hi - lo for lo, hi in zip(bounds, bounds[1:], strict=False)]
    assert len(bounds) == size + 1 and bounds[0] == 0 and bounds[-1] == count
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)
    assert lengths == [chunk_len(count, size, r) for r in range(size)]


@given(
    count=st.integers(0, 60),
    size=st.integers(1, 12),
    itemsize=st.sampled_from((2, 4, 8)),
    algorithm=st.sampled_from(ALGORITHMS),
)
@settings(max_examples=150, deadline=None)
def test_any_all_reduce(count, size, itemsize, algorithm):
    table = all_reduce_table(count, size, itemsize, algorithm)
    assert run(table, all_addends(size, count)) == [[tuple(range(size))] * count] * size


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=9))
@settings(max_examples=100, deadline=None)
def test_any_all_gather(lengths):
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    owner = [rank for rank, length in enumerate(lengths) for _ in range(length)]
    start = [[(o,) if o == rank else None for o in owner] for rank in range(len(lengths))]
    table = all_gather_table(tuple(bounds), 4)
    assert run(table, start) == [[(o,) for o in owner]] * len(lengths)
