"""Checks of the collectives that every rank runs with its transport, on threads and on MPI.

Inputs are functions of (dtype, count, rank), so every rank knows what all others hold.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from contract import dtype_of

from mpisim.comm import communicator as communicator_module
from mpisim.comm.communicator import Communicator, Traffic, check_drained, ring_all_reduce
from mpisim.errors import MessageMismatch
from mpisim.layouts import steps
from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.steps import (
    all_gather_table,
    all_reduce_table,
    gather_table,
    reduce_scatter_table,
)
from mpisim.reference.data_parallel import (
    add_received,
    recursive_doubling_all_reduce,
    ring_reduce_scatter,
)
from mpisim.reference.data_parallel import ring_all_reduce as reference_ring

COUNTS = (0, 1, 2, 3, 7, 10, 1000, 65537)
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64")
FORCED = ("ring", "recursive_doubling", "halving_doubling", "auto")


def exact(name, count, rank):
    """Small integers: every sum over up to 8 ranks is exact in every dtype, in any order."""
    values = (np.arange(count) * (rank + 3) + 5 * rank) % 17 - 8
    return values.astype(dtype_of(name))


def rounding(name, count, rank):
    """Values over many magnitudes: any change of the order of additions shows in the bits."""
    generator = np.random.default_rng([count, rank, 77])
    if name == "int64":
        return generator.integers(-(2**62), 2**62, count)
    values = generator.standard_normal(count) * 2.0 ** generator.integers(-9, 9, count)
    return values.astype(dtype_of(name))


def bits(x):
    return x.view(np.uint8).tobytes()


def simulate(make_table, inputs):
    """Run an all-reduce table over plain arrays: the oracle where `reference` has none."""
    values = [x.copy() for x in inputs]
    rows = [list(make_table.transfers(index)) for index in range(len(inputs))]
    queues: dict[tuple[int, int], list[np.ndarray]] = {}
    sent = [False] * len(inputs)
    while any(rows):
        moved = False
        for index, mine in enumerate(rows):
            if not mine:
                continue
            row = mine[0]
            if not sent[index] and row.send_to >= 0:
                data = values[index][row.send_lo : row.send_hi].copy()
                queues.setdefault((index, row.send_to), []).append(data)
                moved = True
            sent[index] = True
            if row.recv_from >= 0:
                queue = queues.get((row.recv_from, index))
                if not queue:
                    continue
                arrived = queue.pop(0)
                place = values[index][row.recv_lo : row.recv_hi]
                place[:] = add_received(place, arrived) if row.combine else arrived
            mine.pop(0)
            sent[index] = False
            moved = True
        assert moved, "the table deadlocks"
    assert not any(queues.values()), "a message is left"
    return values


@contextmanager
def tiny_segments(pipeline_bytes, segment_bytes, latency_bytes=0):
    """Make rings pipelined at a few bytes. Every rank of the process sees it."""
    names = {
        "PIPELINE_BYTES": pipeline_bytes,
        "SEGMENT_BYTES": segment_bytes,
        "LARGE_SEGMENT_BYTES": segment_bytes,
        "LATENCY_BYTES": latency_bytes,
    }
    saved = {name: getattr(steps, name) for name in names}
    tables = (all_reduce_table, reduce_scatter_table, all_gather_table)
    try:
        for name, value in names.items():
            setattr(steps, name, value)
        for table in tables:
            table.cache_clear()
        yield
    finally:
        for name, value in saved.items():
            setattr(steps, name, value)
        for table in tables:
            table.cache_clear()


def expected_traffic(table, index, itemsize, runs=1):
    return Traffic(
        runs * table.sent_messages(index),
        runs * table.sent_bytes(index, itemsize),
        runs * table.received_messages(index),
        runs * table.received_bytes(index, itemsize),
    )


class Meter:
    """What moved between two looks: by the communicator's books and by the wrapper's count."""

    def __init__(self, communicator, transport):
        self.communicator, self.transport = communicator, transport
        self.look()

    def look(self):
        total = sum(self.communicator.traffic().values(), Traffic())
        started = getattr(self.transport, "started", None)
        counted = None
        if started is not None:
            nbytes = self.transport.started_bytes
            counted = Traffic(started["send"], nbytes["send"], started["recv"], nbytes["recv"])
        self.total, self.counted = total, counted

    def assert_moved(self, expected, what):
        total, counted = self.total, self.counted
        self.look()
        assert self.total - total == expected, what
        if counted is not None:
            assert self.counted - counted == expected, f"{what}: what was started"


def check_matrix(transport, counts=COUNTS, dtypes=DTYPES, values=exact):
    """Exact results and exact traffic: every collective x count x dtype x algorithm."""
    rank, size = transport.rank, transport.size
    for algorithm in FORCED:
        if algorithm == "halving_doubling" and size & (size - 1):
            table = all_reduce_table(10, size, 8, algorithm)
            assert table.algorithm == "ring"
            continue
        group = Communicator(transport, algorithm=algorithm)
        meter = Meter(group, transport)
        for name in dtypes:
            for count in counts:
                what = f"all_reduce {algorithm} {name} {count} rank {rank} of {size}"
                inputs = [values(name, count, r) for r in range(size)]
                total = np.sum([x.astype(np.int64) for x in inputs], axis=0)
                total = total.reshape(count).astype(dtype_of(name))
                table = all_reduce_table(count, size, inputs[0].itemsize, algorithm)
                moves = expected_traffic(table, rank, inputs[0].itemsize)
                x = inputs[rank].copy()
                assert group.all_reduce(x) is x
                assert bits(x) == bits(total), what
                meter.assert_moved(moves, what)
                x[:] = inputs[rank]
                out = np.full(count, 3).astype(x.dtype)
                assert group.all_reduce(x, out) is out
                assert bits(out) == bits(total) and bits(x) == bits(inputs[rank]), what
                meter.assert_moved(moves, what)
        group.close()
    check_scatter_and_gather(transport, counts, dtypes)


def check_scatter_and_gather(transport, counts=COUNTS, dtypes=DTYPES):
    """Exact results and traffic of reduce_scatter, all_gather and gather."""
    rank, size = transport.rank, transport.size
    group = Communicator(transport)
    meter = Meter(group, transport)
    for name in dtypes:
        for count in counts:
            what = f"{name} {count} rank {rank} of {size}"
            inputs = [exact(name, count, r) for r in range(size)]
            itemsize = inputs[0].itemsize
            total = np.sum([x.astype(np.int64) for x in inputs], axis=0)
            total = total.reshape(count).astype(dtype_of(name))
            bounds = chunk_bounds(count, size)
            mine = slice(bounds[rank], bounds[rank + 1])

            x, out = inputs[rank].copy(), np.full(bounds[rank + 1] - bounds[rank], 3)
            out = out.astype(x.dtype)
            assert group.reduce_scatter(x, out) is out
            assert bits(out) == bits(total[mine]), f"reduce_scatter {what}"
            assert bits(x) == bits(inputs[rank]), f"reduce_scatter changes its input: {what}"
            table = reduce_scatter_table(count, size, itemsize)
            meter.assert_moved(expected_traffic(table, rank, itemsize), f"reduce_scatter {what}")

            gathered = np.full(count, 3).astype(x.dtype)
            assert group.all_gather(out, gathered) is gathered
            assert bits(gathered) == bits(total), f"all_gather {what}"
            assert bits(out) == bits(total[mine]), what
            table = all_gather_table(bounds, itemsize)
            moves = expected_traffic(table, rank, itemsize)
            meter.assert_moved(moves, f"all_gather {what}")

            whole = np.full(count, 3).astype(x.dtype)
            whole[mine] = inputs[rank][mine]
            group.all_gather(whole[mine], whole)
            parts = [inputs[r][bounds[r] : bounds[r + 1]] for r in range(size)]
            assert bits(whole) == bits(np.concatenate(parts)), f"all_gather in place {what}"
            meter.assert_moved(moves, f"all_gather in place {what}")

            collected = np.full(count * size, 3).astype(x.dtype) if rank == 0 else None
            assert group.gather(x, collected) is collected
            if rank == 0:
                assert bits(collected) == bits(np.concatenate(inputs)), f"gather {what}"
            meter.assert_moved(
                expected_traffic(gather_table(count, size), rank, itemsize), f"gather {what}"
            )
    group.close()


def check_bits_equal_the_reference(transport, counts=(1, 7, 1000, 4099), names=DTYPES):
    """Rounded sums have the reference's bits: its order, 16-bit floats added in float32."""
    rank, size = transport.rank, transport.size
    references = {
        "ring": lambda inputs, itemsize: reference_ring(inputs),
        "recursive_doubling": lambda inputs, itemsize: recursive_doubling_all_reduce(inputs),
        "halving_doubling": lambda inputs, itemsize: simulate(
            all_reduce_table(inputs[0].size, size, itemsize, "halving_doubling"), inputs
        ),
    }
    for algorithm, reference in references.items():
        group = Communicator(transport, algorithm=algorithm)
        for name in names:
            for count in counts:
                inputs = [rounding(name, count, r) for r in range(size)]
                x = inputs[rank].copy()
                group.all_reduce(x)
                expected = reference(inputs, x.itemsize)[rank]
                assert bits(x) == bits(expected), (algorithm, name, count, rank)
        group.close()
    group = Communicator(transport)
    for name in names:
        for count in counts:
            inputs = [rounding(name, count, r) for r in range(size)]
            expected = ring_reduce_scatter(inputs)[rank]
            out = np.zeros_like(expected)
            x = inputs[rank].copy()
            group.reduce_scatter(x, out)
            assert bits(out) == bits(expected), ("reduce_scatter", name, count, rank)
            assert bits(x) == bits(inputs[rank])
    group.close()


def check_replicas_are_equal(transport):
    """Every rank ends with the same bits, read off the ranks themselves."""
    rank = transport.rank
    for algorithm in FORCED:
        group = Communicator(transport, algorithm=algorithm)
        for name in ("float32", "bfloat16", "float16", "float64"):
            x = rounding(name, 501, rank)
            # Infinities and NaN must agree as well, down to the payload.
            with np.errstate(all="ignore"):
                x[:4] = [np.inf, -np.inf if rank else np.inf, np.nan, 0.0]
                if name == "float32":
                    x.view(np.uint32)[4] = 0x7FC00000 + rank
                if x.itemsize == 2:
                    x.view(np.uint16)[4:6] = [[0x7E00, 0xFE03], [0x7FC0, 0xFFC3]][
                        name == "bfloat16"
                    ]
                    x.view(np.uint16)[4] += rank
                group.all_reduce(x)
            texts = transport.exchange(bits(x).hex())
            assert len(set(texts)) == 1, (algorithm, name)
        group.close()


def check_C060_order_of_additions(transport):
    """1e8, 1, -1e8: the sum depends on the order, so all ranks must use one."""
    value = [1e8, 1.0, -1e8][transport.rank % 3]
    for algorithm in ("ring", "recursive_doubling", "auto"):
        group = Communicator(transport, algorithm=algorithm)
        x = np.full(7, value, np.float32)
        group.all_reduce(x)
        assert len(set(transport.exchange(bits(x).hex()))) == 1, algorithm
        assert transport.size != 3 or set(x.tolist()) <= {0.0, 1.0}
        group.close()


def check_C054_fewer_elements_than_ranks(transport):
    """N = 10, 3, 1, 0 over four ranks; bytes as the case says."""
    size, rank = transport.size, transport.rank
    group = Communicator(transport, algorithm="ring")
    for count in (10, 3, 1, 0):
        x = np.full(count, rank + 1.0, np.float32)
        before = group.traffic().get("all_reduce", Traffic())
        group.all_reduce(x)
        assert x.tolist() == [size * (size + 1) / 2] * count
        moved = group.traffic()["all_reduce"] - before
        assert moved.sent_messages == moved.received_messages == 2 * (size - 1)
        sent = [int(text) for text in transport.exchange(str(moved.sent_bytes))]
        assert sum(sent) == 2 * (size - 1) * count * 4
    group.close()


def check_C056_empty_contributions(transport):
    """All-gather of unequal and of no lengths; reduce-scatter of 2 elements over 3 ranks."""
    rank, size = transport.rank, transport.size
    group = Communicator(transport)
    for lengths in ([2, 0, 1], [0, 0, 0], [0, 5, 0], [1, 1, 1000]):
        lengths = (lengths * size)[:size]
        bounds = tuple(int(b) for b in np.cumsum([0, *lengths]))
        mine = np.arange(bounds[rank], bounds[rank + 1], dtype=float)
        out = np.full(bounds[-1], -1.0)
        group.all_gather(mine, out, bounds)
        assert out.tolist() == list(range(bounds[-1]))
    empty = np.empty(0, np.float32)
    assert group.all_reduce(empty).size == 0
    if size > 1:
        shard = np.full(1 if rank < 2 else 0, -1.0)
        group.reduce_scatter(np.array([1.0, 10.0]), shard)
        assert shard.tolist() == [[size], [10 * size], []][min(rank, 2)]
    group.close()


def check_C058_reduce_scatter_of_large_chunks(transport, repeats=None):
    """The input stays as it was and sums stay exact, far above any eager limit."""
    size, rank = transport.size, transport.rank
    repeats = repeats or (30 if size == 2 else 5)
    group = Communicator(transport)
    for chunk_bytes in (256 << 10, 4 << 20):
        count = chunk_bytes // 4 * size
        source = (np.arange(count) % 97).astype(np.float32)
        x, out = source + rank, np.zeros(chunk_bytes // 4, np.float32)
        lo = rank * out.size
        expected = source[lo : lo + out.size] * size + sum(range(size))
        for _ in range(repeats):
            out[:] = -1
            group.reduce_scatter(x, out)
            assert np.array_equal(out, expected)
        assert np.array_equal(x, source + rank)
    group.close()


def check_C061_fused_and_unfused(transport):
    """5 and 7 values apart or as one buffer of 12: close; repeats and ranks: equal bits."""
    rank = transport.rank
    group = Communicator(transport, algorithm="ring")
    a, b = rounding("float32", 5, rank), rounding("float32", 7, rank)
    fused = np.concatenate([a, b])
    exact_sum = sum(
        np.concatenate([rounding("float64", 5, r), rounding("float64", 7, r)])
        for r in range(transport.size)
    )
    first = group.all_reduce(fused, np.empty_like(fused))
    again = group.all_reduce(fused, np.empty_like(fused))
    assert bits(first) == bits(again)
    group.all_reduce(a)
    group.all_reduce(b)
    scale = np.abs(exact_sum).max()
    assert np.abs(np.concatenate([a, b]) - first).max() <= 1e-6 * scale * 4
    # Integer-valued floats are exact however they are cut.
    whole = exact("float32", 12, rank)
    parts = [whole[:5].copy(), whole[5:].copy()]
    group.all_reduce(whole)
    for part in parts:
        group.all_reduce(part)
    assert bits(np.concatenate(parts)) == bits(whole)
    group.close()


def check_C083_same_array_in_and_out(transport):
    """In place means in place: x and out may be the same array, and the same memory."""
    rank, size = transport.rank, transport.size
    group = Communicator(transport)
    x = exact("float32", 100, rank)
    expected = sum(exact("float32", 100, r) for r in range(size))
    assert group.all_reduce(x, x) is x
    assert np.array_equal(x, expected)
    y = exact("float32", 100, rank)
    assert np.array_equal(group.all_reduce(y, y[:]), expected)
    assert np.array_equal(y, expected)
    # A reduce-scatter may put its chunk into the very place of its input.
    bounds = chunk_bounds(100, size)
    z = exact("float32", 100, rank)
    before = z.copy()
    mine = slice(bounds[rank], bounds[rank + 1])
    group.reduce_scatter(z, z[mine])
    assert np.array_equal(z[mine], expected[mine])
    before[mine] = z[mine]
    assert np.array_equal(z, before)
    if size > 2:
        shifted = z[bounds[rank] + (-1 if rank else 1) :][: mine.stop - mine.start]
        with pytest.raises(ValueError, match="must not overlap"):
            group.reduce_scatter(z, shifted)
    group.close()


def check_C051_reduce_scatter_agrees_with_all_reduce(transport):
    """Bucket of 7, gradient r + 1: both paths sum alike, each shard is its slice."""
    rank, size = transport.rank, transport.size
    group = Communicator(transport, algorithm="ring")
    x = np.full(7, rank + 1.0, np.float32)
    bounds = chunk_bounds(7, size)
    shard = np.zeros(bounds[rank + 1] - bounds[rank], np.float32)
    group.reduce_scatter(x, shard)
    group.all_reduce(x)
    assert x.tolist() == [size * (size + 1) / 2] * 7
    assert shard.tolist() == x[bounds[rank] : bounds[rank + 1]].tolist()
    noisy = rounding("float32", 1000, rank)
    bounds = chunk_bounds(1000, size)
    shard = np.zeros(bounds[rank + 1] - bounds[rank], np.float32)
    group.reduce_scatter(noisy, shard)
    group.all_reduce(noisy)
    assert bits(shard) == bits(noisy[bounds[rank] : bounds[rank + 1]])
    group.close()


def check_C053_reduce_scatter_sends_half_of_an_all_reduce(transport):
    """N = 1000 fp32: (W - 1) / W * N * 4 bytes where W divides N."""
    rank, size = transport.rank, transport.size
    group = Communicator(transport, algorithm="ring")
    count = 250 * size
    group.reduce_scatter(np.zeros(count, np.float32), np.zeros(250, np.float32))
    group.all_reduce(np.zeros(count, np.float32))
    moved = group.traffic()
    assert moved["reduce_scatter"].sent_bytes == (size - 1) * 250 * 4  # 3000 over four ranks
    assert moved["all_reduce"].sent_bytes == 2 * (size - 1) * 250 * 4
    group.close()
    del rank


def check_C071_sixteen_bit_sums(transport):
    """[1, 2] everywhere in 16 bits."""
    for name in ("float16", "bfloat16"):
        for algorithm in FORCED:
            group = Communicator(transport, algorithm=algorithm)
            x = np.array([1.0, 2.0], dtype_of(name))
            group.all_reduce(x)
            size = transport.size
            assert x.astype(float).tolist() == [size, 2 * size]
            group.close()


def check_C064_codes_are_not_summed(transport):
    """int8 sums would wrap without notice, so there is no plain reduce on such codes."""
    group = Communicator(transport)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64", "bool"):
        x = np.full(4, 1, name)
        with pytest.raises(ValueError, match=name):
            group.all_reduce(x)
        with pytest.raises(ValueError, match=name):
            group.reduce_scatter(x, x[:1])
        # They may be moved, though.
        out = np.zeros(4 * transport.size, name)
        group.all_gather(x, out)
        assert (out == 1).all()
    values = np.array([120, 100][min(transport.rank, 1)], np.int8)
    wide = values.astype(np.int64).reshape(1)
    group.all_reduce(wide)
    assert wide[0] == 120 + 100 * (transport.size - 1)
    group.close()


def check_pipelined(transport, counts=(17, 33, 100, 257, 1000), names=("float32", "float16")):
    """Segmented rings: bits of the plain ring, exact traffic, any count; `tiny_segments` is on."""
    rank, size = transport.rank, transport.size
    group = Communicator(transport, algorithm="ring")
    meter = Meter(group, transport)
    pipelined = 0
    for name in names:
        for count in counts:
            inputs = [rounding(name, count, r) for r in range(size)]
            itemsize = inputs[0].itemsize
            what = (name, count, rank, size)
            table = all_reduce_table(count, size, itemsize, "ring")
            pipelined += table.segments > 1
            moves = expected_traffic(table, rank, itemsize)
            x = inputs[rank].copy()
            for _ in range(2):
                x[:] = inputs[rank]
                group.all_reduce(x)
                assert bits(x) == bits(reference_ring(inputs)[rank]), what
                meter.assert_moved(moves, what)
            expected = ring_reduce_scatter(inputs)[rank]
            x[:], out = inputs[rank], np.zeros_like(expected)
            for _ in range(2):
                out[:] = 0
                group.reduce_scatter(x, out)
                assert bits(out) == bits(expected), what
                assert bits(x) == bits(inputs[rank]), what
                table = reduce_scatter_table(count, size, itemsize)
                meter.assert_moved(expected_traffic(table, rank, itemsize), what)
            bounds = chunk_bounds(count, size)
            gathered = np.zeros_like(x)
            for _ in range(2):
                gathered[:] = 0
                group.all_gather(inputs[rank][bounds[rank] : bounds[rank + 1]].copy(), gathered)
                parts = [inputs[r][bounds[r] : bounds[r + 1]] for r in range(size)]
                assert bits(gathered) == bits(np.concatenate(parts)), what
                moves = expected_traffic(all_gather_table(bounds, itemsize), rank, itemsize)
                meter.assert_moved(moves, what)
    assert pipelined or size == 1
    group.close()


def check_real_pipelined_size(transport, count=700_001, name="float32"):
    """A buffer above 2 MiB, with the sizes that ship: more than one segment, uneven."""
    rank, size = transport.rank, transport.size
    inputs = [rounding(name, count, r) for r in range(size)]
    table = all_reduce_table(count, size, inputs[0].itemsize, "auto")
    assert table.algorithm == "ring" and table.segments > 1
    group = Communicator(transport)
    x = inputs[rank].copy()
    group.all_reduce(x)
    assert bits(x) == bits(reference_ring(inputs)[rank])
    expected = ring_reduce_scatter(inputs)[rank]
    out = np.zeros_like(expected)
    group.reduce_scatter(inputs[rank], out)
    assert bits(out) == bits(expected)
    gathered = np.zeros_like(x)
    group.all_gather(out, gathered)
    assert bits(gathered) == bits(x)
    group.close()


def check_started_collectives(transport, seed=0):
    """Queued collectives advanced in odd patterns give the bits of blocking ones."""
    rank = transport.rank
    generator = np.random.default_rng([seed, rank])
    names = ("float32", "float64", "bfloat16", "float32", "float16")
    counts = (1000, 3, 257, 0, 40)
    inputs = [rounding(name, count, rank) for name, count in zip(names, counts, strict=True)]
    for algorithm in FORCED:
        group = Communicator(transport, algorithm=algorithm)
        blocking = [group.all_reduce(x, x.copy()) for x in inputs]
        started = [x.copy() for x in inputs]
        programs = [group.prepare_all_reduce(x) for x in started]
        for turn in range(3):
            for x, source in zip(started, inputs, strict=True):
                x[:] = source
            for program in programs:
                group.start(program)
                for _ in range(int(generator.integers(0, 4))):
                    group.advance()
            if turn == 0:  # wait for the last: all before it complete as well
                group.wait(programs[-1])
            elif turn == 1:  # in order
                for number, program in enumerate(programs):
                    group.wait(program)
                    assert bits(started[number]) == bits(blocking[number])
            else:  # never wait, only advance
                while not group.idle:
                    transport.pause(group.advance() or programs[-1].messages[0], 0.0)
            assert group.idle
            for x, expected in zip(started, blocking, strict=True):
                assert bits(x) == bits(expected), (algorithm, turn)
        # A blocking call while others are queued runs after them.
        x, y = inputs[0].copy(), inputs[1].copy()
        group.start(group.prepare_all_reduce(x))
        group.all_reduce(y)
        assert bits(x) == bits(blocking[0]) and bits(y) == bits(blocking[1])
        # The same program queued twice sums twice.
        z = exact("float64", 5, rank)
        once = sum(exact("float64", 5, r) for r in range(transport.size))
        program = group.prepare_all_reduce(z)
        group.start(program)
        group.start(program)
        group.wait(program)
        assert program.runs == 2 and np.array_equal(z, once * transport.size)
        group.close()


def check_two_groups_at_once(transport):
    """A control sum that blocks keeps a started ring of another group moving, same bits."""
    rank, size = transport.rank, transport.size
    dp = Communicator(transport, axis="dp", channel=1, algorithm="ring")
    control = Communicator(transport, axis="control", channel=2)
    control.neighbours.append(dp)
    inputs = [rounding("float32", 5000, r) for r in range(size)]
    x = inputs[rank].copy()
    program = dp.prepare_all_reduce(x, "bucket", background=True)
    for turn in range(4):
        x[:] = inputs[rank]
        dp.start(program)
        if turn == 3 and rank % 2:
            # Rank 0 blocks in its control sum, and must still help this ring to its end.
            dp.wait(program)
        scalar = np.array([rank + turn])
        control.all_reduce(scalar)
        assert scalar[0] == sum(range(size)) + turn * size
        dp.wait(program)
        assert bits(x) == bits(reference_ring(inputs)[rank])
    check_drained(transport, [dp, control])
    dp.close()
    control.close()


def check_sub_groups(transport):
    """Groups that are no prefix of the ranks, in an order of their own; others stand by."""
    size, rank = transport.size, transport.rank
    groups = [tuple(range(1, size)), tuple(range(0, size, 2)), tuple(range(size))[::-1]]
    for channel, members in enumerate(groups, start=1):
        if rank not in members:
            with pytest.raises(ValueError, match="must contain this rank"):
                Communicator(transport, members, channel=channel)
            continue
        index, number = members.index(rank), len(members)
        for algorithm in FORCED:
            group = Communicator(transport, members, channel=channel, algorithm=algorithm)
            assert (group.index, group.size) == (index, number)
            inputs = [rounding("float32", 101, r) for r in members]
            x = inputs[index].copy()
            group.all_reduce(x)
            table = all_reduce_table(101, number, 4, algorithm)
            assert bits(x) == bits(simulate(table, inputs)[index])
            sent = {members[row.send_to]: 0 for row in table.transfers(index) if row.send_to >= 0}
            for row in table.transfers(index):
                if row.send_to >= 0:
                    sent[members[row.send_to]] += 4 * row.send_count
            assert dict(group.bytes_sent_to()) == sent
            expected = ring_reduce_scatter(inputs)[index]
            out = np.zeros_like(expected)
            group.reduce_scatter(inputs[index], out)
            assert bits(out) == bits(expected)
            whole = np.zeros(101, np.float32)
            group.all_gather(out, whole)
            assert bits(whole) == bits(np.concatenate(ring_reduce_scatter(inputs)))
            first = np.array([float(rank)])
            collected = np.zeros(number) if index == 0 else None
            group.gather(first, collected)
            assert index or collected.tolist() == list(map(float, members))
            group.close()


def check_refused_calls(transport):
    """What a collective cannot run is refused on every rank, before any message."""
    size, rank = transport.size, transport.rank
    group = Communicator(transport)
    x = np.zeros(6)
    with pytest.raises(ValueError, match="one dim"):
        group.all_reduce(np.zeros((2, 3)))
    for out in (np.zeros(5), np.zeros(7), np.zeros(6, np.float32), np.zeros((6, 1)), np.zeros(1)):
        with pytest.raises(ValueError, match="must have shape"):
            group.all_reduce(x, out)
        with pytest.raises(ValueError, match="must have shape"):
            group.all_reduce(out if out.ndim == 1 else np.zeros(2), x)
    chunk = np.zeros(chunk_bounds(6, size)[rank + 1] - chunk_bounds(6, size)[rank])
    with pytest.raises(ValueError, match="must have shape"):
        group.reduce_scatter(x, np.zeros(chunk.size + 1))
    with pytest.raises(ValueError, match="must have shape"):
        group.reduce_scatter(x, chunk.astype(np.float32))
    with pytest.raises(ValueError, match="must have shape"):
        group.all_gather(np.zeros(chunk.size + 1), x)
    with pytest.raises(ValueError, match="bounds must be"):
        group.all_gather(x, x, (0,) * size + (6, 6))
    with pytest.raises(ValueError, match="bounds must be"):
        group.all_gather(x, x, (1,) + (6,) * size)
    if rank == 0:
        with pytest.raises(ValueError, match="out must be given"):
            group.gather(x)
        with pytest.raises(ValueError, match="must have shape"):
            group.gather(x, np.zeros(6 * size + 1))
    # C066: strided buffers, refused on one rank as on many.
    with pytest.raises(ValueError, match="C-contiguous"):
        group.all_reduce(np.zeros(8 * size)[::2])
    with pytest.raises(ValueError, match="C-contiguous"):
        group.all_reduce(np.zeros((6, 2))[:, 1], np.zeros(6))
    with pytest.raises(ValueError, match="C-contiguous"):
        group.reduce_scatter(np.zeros(4 * size)[::2], np.zeros(2))
    with pytest.raises(ValueError, match="C-contiguous"):
        group.gather(np.zeros(4)[::2], np.zeros(2 * size))
    with pytest.raises(ValueError, match="must be one of"):
        Communicator(transport, algorithm="best")
    assert group.traffic() == {} or sum(group.traffic().values(), Traffic()) == Traffic()
    group.close()


def check_forced_ring_after_auto(transport):
    """`ring_all_reduce` runs the ring, also on a buffer that another algorithm has reduced."""
    rank, size = transport.rank, transport.size
    inputs = [rounding("float32", 50, r) for r in range(size)]
    group = Communicator(transport, algorithm="recursive_doubling")
    x = inputs[rank].copy()
    for name in ("doubling", "ring", "doubling", "ring"):
        x[:] = inputs[rank]
        before = sum(group.traffic().values(), Traffic())
        if name == "ring":
            ring_all_reduce(group, x)
            expected, table = reference_ring(inputs), all_reduce_table(50, size, 4, "ring")
        else:
            group.all_reduce(x)
            expected = recursive_doubling_all_reduce(inputs)
            table = all_reduce_table(50, size, 4, "recursive_doubling")
        assert bits(x) == bits(expected[rank]), name
        moved = sum(group.traffic().values(), Traffic()) - before
        assert moved == expected_traffic(table, rank, 4), name
    out = np.zeros(50, np.float32)
    assert ring_all_reduce(group, inputs[rank], out) is out
    assert bits(out) == bits(reference_ring(inputs)[rank])
    assert group.algorithm == "recursive_doubling"
    group.close()


def check_many_buffers(transport, kept=7):
    """More buffers than programs are kept: totals stay exact and prepared programs stay usable."""
    rank, size = transport.rank, transport.size
    saved = communicator_module.CACHED_PROGRAMS
    transport.barrier()
    communicator_module.CACHED_PROGRAMS = kept
    try:
        group = Communicator(transport, algorithm="ring")
        table = all_reduce_table(11, size, 8, "ring")
        mine = [exact("float64", 11, rank) for _ in range(3 * kept)]
        programs = [group.prepare_all_reduce(x) for x in mine]
        for program in programs:
            group.start(program)
        group.wait(programs[-1])
        total = sum(exact("float64", 11, r) for r in range(size))
        assert all(np.array_equal(x, total) for x in mine)
        runs = len(mine)
        buffers = [exact("float64", 11, rank) for _ in range(3 * kept)]
        for x in buffers + buffers[::-1]:
            x[:] = exact("float64", 11, rank)
            group.all_reduce(x)
            assert np.array_equal(x, total)
            runs += 1
        assert len(group.programs()) <= 3 * kept + kept + 1
        assert group.traffic()["all_reduce"] == expected_traffic(table, rank, 8, runs)
        assert sum(group.bytes_sent_to().values()) == runs * table.sent_bytes(rank, 8)
        check_drained(transport, [group])
        group.close()
        assert group.traffic()["all_reduce"] == expected_traffic(table, rank, 8, runs)
        check_drained(transport, [])
    finally:
        transport.barrier()
        communicator_module.CACHED_PROGRAMS = saved


def check_mismatched_counts(transport):
    """Ranks that bring different lengths to a collective are told so, both ranks named.

    Leaves messages behind: the last check of a job. Longer and shorter messages both occur.
    """
    group = Communicator(transport, algorithm="ring")
    x = np.zeros((60 + 4 * transport.rank) * transport.size)
    left = (transport.rank - 1) % transport.size
    rule = f"from rank {left} to rank {transport.rank} must have {8 * (60 + 4 * transport.rank)} "
    with pytest.raises(MessageMismatch, match=rule):
        group.all_reduce(x)


BITS = [
    check_bits_equal_the_reference,
    check_replicas_are_equal,
    check_C054_fewer_elements_than_ranks,
    check_C056_empty_contributions,
    check_C060_order_of_additions,
    check_C061_fused_and_unfused,
    check_C064_codes_are_not_summed,
    check_C071_sixteen_bit_sums,
    check_C083_same_array_in_and_out,
    check_C051_reduce_scatter_agrees_with_all_reduce,
    check_C053_reduce_scatter_sends_half_of_an_all_reduce,
    check_started_collectives,
    check_two_groups_at_once,
    check_sub_groups,
    check_refused_calls,
    check_forced_ring_after_auto,
    check_many_buffers,
]
"""Checks that leave the transport as they found it; any number of ranks."""
