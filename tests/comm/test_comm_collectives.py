"""The collectives on ranks as threads: exact sums, exact traffic, the reference's bits."""

from __future__ import annotations

import itertools

import collective_checks as checks
import numpy as np
import pytest
from contract import short_timeout

from mpisim.comm.communicator import Communicator, check_drained
from mpisim.comm.faulty import Delay, FaultyTransport
from mpisim.comm.local import run_threads
from mpisim.errors import CommError, CommTimeout, MessageMismatch, PeerLost

RANKS = (1, 2, 3, 4, 5, 8)
WAYS = {
    "eager": {},
    "rendezvous": {"eager_bytes": 0},
    "synchronous": {"synchronous": True},
}


def run(check, size, *, strict=False, faults=(), **options):
    """Run a check on threads; raise what the first failing rank raised."""
    job = run_threads(
        lambda transport: check(FaultyTransport(transport, faults, strict=strict)),
        size, **{"timeout_s": 20.0, **options},
    )  # fmt: skip
    if job.errors:
        raise next(iter(job.errors.values()))
    return job.results


def first_error(job):
    """Return what ended the job; the other ranks found out, or were told that a peer is lost."""
    first, *others = job.errors.values()
    assert all(type(error) in (type(first), PeerLost) for error in others), job.errors
    return first


def over_ranks(check, sizes=RANKS):
    """Make a test of a check, on several numbers of ranks."""

    @pytest.mark.parametrize("size", sizes)
    def test(size):
        run(check, size)
        if size in (2, 3, 5):  # again with every send synchronous and every buffer watched
            run(check, size, synchronous=True, strict=True)

    test.__doc__ = check.__doc__
    return test


@pytest.mark.parametrize("size", RANKS)
def test_results_and_traffic_are_exact(size):
    """Every collective x count x dtype x algorithm: sums exact, difference 0 to the step tables."""
    run(checks.check_matrix, size)


@pytest.mark.parametrize("size", (2, 3, 8))
def test_results_and_traffic_are_exact_without_eager_sends(size):
    run(
        lambda t: checks.check_matrix(t, counts=(0, 1, 3, 10, 257), dtypes=("float32", "bfloat16")),
        size, synchronous=True, strict=True,
    )  # fmt: skip


test_bits_equal_the_reference = over_ranks(checks.check_bits_equal_the_reference, (1, 2, 3, 4, 5))
test_replicas_are_equal = over_ranks(checks.check_replicas_are_equal)
test_C051_reduce_scatter_agrees_with_all_reduce = over_ranks(
    checks.check_C051_reduce_scatter_agrees_with_all_reduce
)
test_C053_reduce_scatter_sends_half = over_ranks(
    checks.check_C053_reduce_scatter_sends_half_of_an_all_reduce
)
test_C054_fewer_elements_than_ranks = over_ranks(checks.check_C054_fewer_elements_than_ranks)
test_C056_empty_contributions = over_ranks(checks.check_C056_empty_contributions)
test_C060_order_of_additions = over_ranks(checks.check_C060_order_of_additions)
test_C061_fused_and_unfused = over_ranks(checks.check_C061_fused_and_unfused)
test_C064_codes_are_not_summed = over_ranks(checks.check_C064_codes_are_not_summed)
test_C071_sixteen_bit_sums = over_ranks(checks.check_C071_sixteen_bit_sums)
test_C083_same_array_in_and_out = over_ranks(checks.check_C083_same_array_in_and_out)
test_started_collectives = over_ranks(checks.check_started_collectives)
test_two_groups_at_once = over_ranks(checks.check_two_groups_at_once)
test_sub_groups = over_ranks(checks.check_sub_groups)
test_refused_calls = over_ranks(checks.check_refused_calls)
test_forced_ring_after_auto = over_ranks(checks.check_forced_ring_after_auto)
test_many_buffers = over_ranks(checks.check_many_buffers, (1, 2, 3))


def test_C054_bytes_of_the_case():
    """Four ranks, fp32: 240, 72, 24 and 0 bytes in six rounds."""

    def body(transport):
        group = Communicator(transport, algorithm="ring")
        sent = []
        for count in (10, 3, 1, 0):
            before = transport.started_bytes["send"], transport.started["send"]
            group.all_reduce(np.zeros(count, np.float32))
            assert transport.started["send"] - before[1] == 6
            sent.append(transport.started_bytes["send"] - before[0])
        return sent

    assert np.sum(run(body, 4), axis=0).tolist() == [240, 72, 24, 0]


def test_C058_reduce_scatter_of_large_chunks():
    run(checks.check_C058_reduce_scatter_of_large_chunks, 2)


def test_C058_under_rendezvous_with_watched_buffers():
    run(
        lambda t: checks.check_C058_reduce_scatter_of_large_chunks(t, repeats=2),
        3, synchronous=True, strict=True,
    )  # fmt: skip


def test_C073_buffers_are_not_touched_in_flight():
    """Every collective under synchronous sends: what is being sent keeps its bytes."""
    run(
        lambda t: checks.check_matrix(t, counts=(1000,), dtypes=("float64",)),
        5, synchronous=True, strict=True,
    )  # fmt: skip


@pytest.mark.parametrize("size, way", [*itertools.product((2, 3, 4), WAYS), (8, "rendezvous")])
def test_pipelined_rings(size, way):
    """Segments of a few bytes: odd counts, empty segments, counts below the segments."""
    with checks.tiny_segments(pipeline_bytes=64, segment_bytes=16):
        run(checks.check_pipelined, size, strict=True, **WAYS[way])
    with checks.tiny_segments(pipeline_bytes=0, segment_bytes=4):
        run(
            lambda t: checks.check_pipelined(t, counts=(1, 2, 3, 7, 61), names=("bfloat16",)),
            size, strict=True, **WAYS[way],
        )  # fmt: skip


@pytest.mark.parametrize("size", (2, 3, 4))
def test_pipelined_rings_in_place_and_queued(size):
    with checks.tiny_segments(pipeline_bytes=64, segment_bytes=200):
        for check in (
            checks.check_C083_same_array_in_and_out,
            checks.check_started_collectives,
            checks.check_two_groups_at_once,
            checks.check_sub_groups,
        ):
            run(check, size, strict=True, synchronous=True)


@pytest.mark.parametrize("size", (2, 3))
def test_a_buffer_above_two_mebibytes(size):
    run(checks.check_real_pipelined_size, size, strict=True)


@pytest.mark.parametrize("seed", range(4))
def test_results_do_not_depend_on_who_is_late(seed):
    """Messages held up at random, sends and receives: the same bits."""
    generator = np.random.default_rng(seed)
    faults = [
        Delay(
            rank=int(generator.integers(4)),
            number=int(generator.integers(120)),
            side=("send", "recv")[int(generator.integers(2))],
            seconds=float(generator.uniform(0, 0.004)),
        )
        for _ in range(60)
    ]
    run(lambda t: checks.check_started_collectives(t, seed), 4, faults=faults, strict=True)
    with checks.tiny_segments(pipeline_bytes=64, segment_bytes=16):
        run(checks.check_pipelined, 4, faults=faults, strict=True, synchronous=True)


@pytest.mark.parametrize("algorithm", checks.FORCED)
@pytest.mark.parametrize("size", (2, 3, 4))
def test_ranks_that_disagree_on_the_length_are_both_named(size, algorithm):
    def body(transport):
        group = Communicator(transport, algorithm=algorithm)
        group.all_reduce(np.zeros(64 if transport.rank else 60))

    job = run_threads(body, size, timeout_s=10.0)
    first = first_error(job)
    assert isinstance(first, MessageMismatch)
    text = str(first)
    assert "message from rank" in text and "Give both ranks the same shape" in text


@pytest.mark.parametrize(
    "pair",
    [
        ("float32", "int32"),
        ("float16", "bfloat16"),
        ("uint16", "float16"),
        ("bfloat16", "uint16"),
    ],
)
def test_ranks_that_disagree_on_the_dtype_are_told_both(pair):
    def body(transport):
        group = Communicator(transport)
        x = np.zeros(64, checks.dtype_of(pair[transport.rank]))
        out = np.zeros(128, x.dtype)
        group.all_gather(x, out)

    job = run_threads(body, 2, timeout_s=10.0)
    first = first_error(job)
    assert isinstance(first, MessageMismatch)
    assert all(name in str(first) for name in pair)
    assert "rank 0" in str(first) and "rank 1" in str(first)


def test_ranks_that_disagree_on_the_order_of_collectives_are_told():
    """C062: two buffers of different sizes, started in another order on each rank."""

    def body(transport):
        group = Communicator(transport)
        sizes = (5, 7) if transport.rank else (7, 5)
        for size in sizes:
            group.all_reduce(np.zeros(size))

    job = run_threads(body, 2, timeout_s=10.0)
    assert isinstance(first_error(job), MessageMismatch)


def test_a_collective_that_one_rank_does_not_join_times_out_by_name():
    def body(transport):
        group = Communicator(transport)
        group.all_reduce(np.zeros(5))
        if transport.rank == 1:
            with short_timeout(transport, 10.0):
                transport.barrier()
            return
        with short_timeout(transport), pytest.raises(CommTimeout, match="rank 1 must answer"):
            group.all_reduce(np.zeros(5))
        transport.barrier()

    job = run_threads(body, 2, timeout_s=10.0)
    assert not job.errors, job.errors


@pytest.mark.parametrize("blocking", [True, False])
def test_C079_a_message_that_nobody_receives_is_found_at_the_end(blocking):
    """A gather that index 0 never joins: its sender is done, the message is lost."""

    def body(transport):
        group = Communicator(transport)
        group.all_reduce(np.zeros(3))
        check_drained(transport, [group])
        if transport.rank == 2:
            part = np.zeros(2, np.float32)
            if blocking:
                group.gather(part)
            else:
                group.start(group.prepare_gather(part, None))
                while not group.idle:
                    group.advance()
        check_drained(transport, [group])

    job = run_threads(body, 3, timeout_s=10.0)
    tag = 1 * 16 + 10
    assert set(job.errors) == {0, 1, 2}
    assert type(first_error(job)) is CommError
    text = f"1 sent by rank 2 to rank 0 with tag {tag} and 0 received"
    assert text in str(first_error(job))


def test_C079_messages_outside_collectives_are_counted_too():
    def body(transport):
        if transport.rank == 0:
            message = transport.prepare_send(np.zeros(1), 1, 5)
            message.start()
            assert message.test(transport.status)
            transport.counts.add(message)
        check_drained(transport, [])

    job = run_threads(body, 2, timeout_s=10.0)
    assert len(job.errors) == 2
    assert "1 sent by rank 0 to rank 1" in str(first_error(job))


def test_C079_a_receive_without_its_send_is_found():
    """The books of a rank say it received what nobody sent (a lost count, or a stray)."""

    def body(transport):
        message = transport.prepare_recv(np.zeros(1), (transport.rank + 1) % 2, 5)
        if transport.rank == 1:
            transport.counts.add(message, 2)
        check_drained(transport, [])

    job = run_threads(body, 2, timeout_s=10.0)
    assert len(job.errors) == 2
    assert "0 sent by rank 0 to rank 1" in str(first_error(job))
    assert "and 2 received" in str(first_error(job))


def test_C079_a_collective_that_was_started_and_left_is_found():
    """Rank 0's first messages are under way, and nobody will ever take them."""

    def body(transport):
        group = Communicator(transport, axis="dp")
        if transport.rank == 0:
            group.start(group.prepare_all_reduce(np.zeros(3)))
        check_drained(transport, [group])

    job = run_threads(body, 2, timeout_s=10.0)
    assert len(job.errors) == 2
    assert type(first_error(job)) is CommError
    assert "axis dp unfinished on rank 0" in str(first_error(job))


def test_drained_after_everything_was_closed():
    def body(transport):
        group = Communicator(transport, algorithm="ring")
        x = np.zeros(100)
        for _ in range(3):
            group.all_reduce(x)
            group.reduce_scatter(x, np.zeros([34, 33, 33][transport.rank]))
        group.close()
        check_drained(transport, [group])
        assert sum(transport.counts.sent.values()) == 3 * (2 * 2 + 2)

    job = run_threads(body, 3, timeout_s=10.0)
    assert not job.errors, job.errors


def test_collectives_of_one_rank_send_nothing():
    def body(transport):
        group = Communicator(transport)
        x = np.arange(4.0)
        group.all_reduce(x)
        out, whole = np.zeros(4), np.zeros(4)
        group.reduce_scatter(x, out)
        group.all_gather(out, whole)
        group.gather(whole, out)
        assert x.tolist() == out.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert transport.started == {"send": 0, "recv": 0}
        assert all(moved.sent_messages == 0 for moved in group.traffic().values())
        assert group.scratch_bytes == 0

    run(body, 1)
