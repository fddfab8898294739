"""Emulated links: when a message leaves and arrives, on a clock that the test moves.

Rank 0 sends over an emulated link; the others look with the wrapped transport, which shows exactly
when the real message was started. Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import collective_checks
import contract
import numpy as np
import pytest
from collective_checks import bits, rounding, tiny_segments
from contract import CHANNEL, LONG, hear, recv, short_timeout, tell, wait
from mpi_worker import mpi_run

from mpisim.comm import emulated as emulated_module
from mpisim.comm.communicator import Communicator, check_drained
from mpisim.comm.emulated import PAUSE_S, SLICE_S, EmulatedTransport
from mpisim.comm.faulty import Delay, Drop, FaultyTransport, InjectedError, Raise
from mpisim.comm.local import LocalTransport, _World, run_threads
from mpisim.errors import CommTimeout, PeerLost


class Clock:
    """A clock that only moves when somebody naps, or when the test says so."""

    def __init__(self):
        self.now, self.naps = 0.0, []

    def __call__(self):
        return self.now

    def nap(self, seconds):
        assert seconds >= 0.0
        self.naps.append(seconds)
        self.now += seconds


class Job:
    """Rank 0 with emulated links in a job of one thread, and what the other ranks have got."""

    def __init__(self, latency_s=0.0, bytes_per_s=0.0, *, size=3, synchronous=False, wrap=None):
        self.world, self.clock = _World(size), Clock()
        eager_bytes = -1 if synchronous else 10**6
        inner = [LocalTransport(self.world, rank, 5.0, eager_bytes) for rank in range(size)]
        self.others = inner[1:]
        self.transport = EmulatedTransport(
            wrap(inner[0]) if wrap else inner[0], latency_s, bytes_per_s,
            synchronous=synchronous, clock=self.clock, nap=self.clock.nap,
        )  # fmt: skip

    def send(self, nbytes, dest=1, value=0, channel=CHANNEL):
        message = self.transport.prepare_send(np.full(nbytes, value, np.uint8), dest, channel)
        message.start()
        return message

    def arrived(self, dest=1, channel=CHANNEL):
        """Take everything that has really been sent to `dest`: the first byte of each message."""
        got, y = [], np.zeros(10**6, np.uint8)
        other = self.others[dest - 1]
        while other.prepare_recv(y, 0, channel).test(other.status):
            got.append(int(y[0]) if other.received_bytes() else None)
        return got

    def times(self, until, step, dest=1, channel=CHANNEL):
        """Advance in steps; return [(time, first byte)] of what `dest` gets."""
        seen = []
        while self.clock.now <= until:
            self.transport.progress()
            seen += [(self.clock.now, value) for value in self.arrived(dest, channel)]
            self.clock.now += step
        return seen


# When messages leave and arrive ------------------------------------------------------------


def test_without_latency_and_rate_a_message_arrives_at_once():
    job = Job()
    message = job.send(1000, value=7)
    assert message.test() and job.arrived() == [7] and not job.clock.naps


def test_a_message_arrives_one_latency_after_it_left():
    job = Job(latency_s=2.0)
    job.clock.now = 1.0
    message = job.send(10, value=5)
    # At no limit of the rate, the bytes have left as soon as they are given to the link.
    assert message.test() and job.arrived() == []
    assert job.times(5.0, 0.25) == [(3.0, 5)]


def test_messages_of_one_link_leave_one_after_the_other():
    """100 bytes and 300 bytes at 100 bytes/s: 1 s and 3 s on the way out, then 0.5 s on the way."""
    job = Job(latency_s=0.5, bytes_per_s=100.0)
    first, second = job.send(100, value=1), job.send(300, value=2)
    empty = job.send(0)
    left = {}
    while job.clock.now < 6.0:
        for name, message in (("first", first), ("second", second), ("empty", empty)):
            if message.test():
                left.setdefault(name, job.clock.now)
        for value in job.arrived():
            left[value] = job.clock.now
        job.clock.now += 0.125
    expected = {"first": 1.0, "second": 4.0, "empty": 4.0, 1: 1.5, 2: 4.5, None: 4.5}
    assert left == expected


def test_a_link_that_was_idle_starts_anew():
    job = Job(bytes_per_s=100.0)
    job.send(100, value=1)
    assert job.times(2.0, 0.5) == [(1.0, 1)]
    job.clock.now = 10.0
    job.send(100, value=2)
    assert job.times(12.0, 0.5) == [(11.0, 2)]


def test_links_to_two_ranks_do_not_wait_for_each_other():
    job = Job(latency_s=0.25, bytes_per_s=100.0)
    for dest, nbytes in ((1, 200), (2, 100)):
        job.send(nbytes, dest, value=dest)
    seen = {}
    while job.clock.now <= 3.0:
        job.transport.progress()
        for dest in (1, 2):
            for value in job.arrived(dest):
                seen[value] = job.clock.now
        job.clock.now += 0.25
    assert seen == {1: 2.25, 2: 1.25}


def test_a_short_message_of_another_channel_does_not_overtake():
    job = Job(bytes_per_s=100.0)
    job.send(200, value=1)
    job.send(0, channel=CHANNEL + 1)
    job.clock.now = 1.5
    job.transport.progress()
    assert job.arrived(channel=CHANNEL + 1) == []
    job.clock.now = 2.0
    job.transport.progress()
    assert job.arrived() == [1] and job.arrived(channel=CHANNEL + 1) == [None]


@pytest.mark.parametrize("how", ("receive", "send", "pause", "progress", "sleep"))
def test_whoever_uses_the_transport_starts_what_is_due(how):
    job = Job(latency_s=1.0)
    transport = job.transport
    bound = transport.prepare_recv(np.zeros(1, np.uint8), 2, CHANNEL)
    other = transport.prepare_send(np.zeros(1, np.uint8), 2, CHANNEL)
    job.send(10, value=4)
    use = {
        "receive": lambda: bound.test(transport.status),
        "send": other.test,
        "pause": lambda: transport.pause(bound, 0.0),
        "progress": transport.progress,
        "sleep": lambda: transport.sleep(0.0),
    }[how]
    use()
    assert job.arrived() == []
    job.clock.now = 1.0
    assert job.arrived() == []
    use()
    assert job.arrived() == [4]


def test_two_starts_of_one_message_arrive_in_order_with_what_each_said():
    job = Job(latency_s=5.0, bytes_per_s=10.0)
    x = np.zeros(10, np.uint8)
    message = job.transport.prepare_send(x, 1, CHANNEL)
    for value in (1, 2, 3):
        x[:] = value
        message.start()
        while not message.test():
            job.clock.now += 0.5
        x[:] = 99  # the bytes have left: the buffer is free
    assert job.clock.now == 3.0 and job.arrived() == []
    assert job.times(9.0, 0.5) == [(6.0, 1), (7.0, 2), (8.0, 3)]


def test_a_message_freed_while_it_is_on_its_way_still_arrives():
    job = Job(latency_s=1.0)
    message = job.send(10, value=6)
    assert message.test()
    message.free()
    assert job.times(2.0, 0.5) == [(1.0, 6)]


def test_copies_are_freed_once_they_were_taken():
    class Counting:
        """Counts the messages that are bound and not freed."""

        bound = 0

        def wrap(self, inner):
            prepare = inner.prepare_send

            def prepare_send(*args):
                self.bound += 1
                message = prepare(*args)
                return Freed(message, self)

            inner.prepare_send = prepare_send
            return inner

    class Freed:
        def __init__(self, message, counting):
            self.message, self.counting = message, counting

        def __getattr__(self, name):
            return getattr(self.message, name)

        def free(self):
            self.counting.bound -= 1
            self.message.free()

    counting = Counting()
    job = Job(latency_s=1.0, wrap=counting.wrap, synchronous=True)
    for dest in (1, 2, 1):
        job.send(10, dest)
    assert counting.bound == 3
    job.clock.now = 1.0
    job.transport.progress()
    assert counting.bound == 3
    job.arrived(2)
    job.transport.progress()
    assert counting.bound == 2
    job.arrived(1)
    job.transport.progress()
    assert counting.bound == 0


def test_a_synchronous_send_completes_when_it_is_received():
    job = Job(latency_s=1.0, bytes_per_s=10.0, synchronous=True)
    message = job.send(10, value=3)
    seen = []
    for now in (0.5, 1.0, 1.5, 2.0, 2.5):
        job.clock.now = now
        seen.append(message.test())
        if now == 2.5:
            assert job.arrived() == [3]
    assert seen == [False] * 5 and message.test()


# Sleeping and waiting ----------------------------------------------------------------------


def test_sleep_with_nothing_to_do_is_one_nap():
    job = Job()
    job.clock.now = 1.0
    job.transport.sleep(0.75)
    assert job.clock.now == 1.75 and job.clock.naps == [0.75]


def test_sleep_wakes_for_each_message_that_falls_due():
    """Three arrivals within one sleep, each started at its own moment, not at the end."""
    job = Job(latency_s=0.25, bytes_per_s=100.0)
    for value in (1, 2, 3):
        job.send(100, value=value)
    seen, nap = [], job.transport._nap

    def watch(seconds):
        seen.extend((job.clock.now, value) for value in job.arrived())
        nap(seconds)

    job.transport._nap = watch
    job.transport.sleep(5.0)
    assert seen == [(1.25, 1), (2.25, 2), (3.25, 3)]
    assert job.clock.now == 5.0


def test_sleep_calls_between_every_slice_and_ends_on_time():
    job = Job()
    calls = []
    job.transport.sleep(0.0103, lambda: calls.append(job.clock.now))
    assert job.clock.now == pytest.approx(0.0103, abs=1e-12)
    assert calls[0] == 0.0 and calls[-1] == job.clock.now
    gaps = np.diff(calls)
    assert gaps.max() <= SLICE_S + 1e-12 and 0 < len(calls) <= 0.0103 / SLICE_S + 3


def test_time_that_between_takes_is_part_of_the_sleep():
    job = Job()

    def between():
        job.clock.now += 0.25

    job.transport.sleep(1.0, between)
    assert 1.0 <= job.clock.now <= 1.25


def test_sleep_of_nothing_still_moves_what_is_due():
    job = Job()
    calls = []
    job.transport.sleep(0.0, lambda: calls.append(1))
    assert calls == [1] and not job.clock.naps


def test_sleep_looks_after_messages_that_nobody_has_taken():
    """Long messages need their sender's polls in some libraries."""
    job = Job(synchronous=True)
    job.send(10)
    job.transport.sleep(0.01)
    assert max(job.clock.naps) <= SLICE_S + 1e-12
    job.arrived()
    job.clock.naps.clear()
    job.transport.sleep(0.01)
    assert job.clock.naps == [pytest.approx(0.01)]


def test_a_pause_is_short_and_ends_when_something_falls_due():
    job = Job(latency_s=PAUSE_S / 4)
    bound = job.transport.prepare_recv(np.zeros(1, np.uint8), 1, CHANNEL)
    job.transport.pause(bound, 0.0)
    assert job.clock.naps == [PAUSE_S]
    job.send(1)
    job.transport.pause(bound, 0.0)
    assert job.clock.naps[1] == pytest.approx(PAUSE_S / 4)
    # The moment at which a buffer is free again is one to wake for, too.
    job = Job(bytes_per_s=4 / PAUSE_S, latency_s=1.0)
    job.transport.pause(job.send(1), 0.0)
    assert job.clock.naps == [pytest.approx(PAUSE_S / 4)]


def test_time_on_the_link_is_no_delay_of_the_peer():
    job = Job(bytes_per_s=1.0, latency_s=1.0, synchronous=True)
    message = job.send(100)
    with short_timeout(job.transport, 3.0):
        job.clock.now = 50.0
        job.transport.pause(message, 50.0)
        job.clock.now = 103.0
        job.transport.progress()
        job.transport.pause(message, 103.0)
        job.clock.now = 104.5
        with pytest.raises(CommTimeout, match="rank 1 must answer within"):
            job.transport.pause(message, 104.5)


# The end of a job --------------------------------------------------------------------------


@pytest.mark.parametrize("meet", ("exchange", "barrier"))
def test_what_is_held_goes_out_before_all_meet(meet):
    """Nobody polls behind a barrier: the receiver has the message when it returns."""

    def body(transport):
        clock = Clock()
        linked = EmulatedTransport(transport, 30.0, clock=clock, nap=clock.nap)
        if transport.rank == 0:
            linked.prepare_send(np.ones(2), 1, CHANNEL).start()
        linked.exchange("") if meet == "exchange" else linked.barrier()
        if transport.rank == 1:
            y = np.zeros(2)
            assert transport.prepare_recv(y, 0, CHANNEL).test() and y.all()
        return clock.now

    job = run_threads(body, 2)
    assert job.results == [30.0, 0.0], job.errors


def test_counts_of_both_sides_agree_at_the_end():
    def body(transport):
        linked = EmulatedTransport(transport, 0.001, 1e8)
        peer, x, y = 1 - transport.rank, np.ones(100), np.zeros(100)
        for _ in range(3):
            message = linked.prepare_send(x, peer, CHANNEL)
            message.start()
            wait(linked, message)
            linked.counts.add(message)
            message.free()
        for _ in range(2 if transport.rank else 3):
            message = linked.prepare_recv(y, peer, CHANNEL)
            message.start()
            wait(linked, message)
            linked.counts.add(message)
        check_drained(linked, [])

    job = run_threads(body, 2)
    text = str(next(iter(job.errors.values())))
    assert "got 3 sent by rank 0 to rank 1" in text and "2 received" in text


def test_close_sends_what_is_held_without_waiting_for_its_time():
    job = Job(latency_s=1000.0, synchronous=False)
    job.send(10, value=1)
    job.send(10, 2, value=2)
    job.transport.close()
    assert (job.arrived(1), job.arrived(2)) == ([1], [2]) and job.clock.now < 1000.0


@pytest.mark.parametrize("how", ("failed", "left", "deaf"))
def test_close_ends_although_nobody_takes_what_is_held(how, monkeypatch):
    monkeypatch.setattr(emulated_module, "CLOSE_S", 0.3 if how == "left" else 0.02)
    job = Job(latency_s=1000.0, synchronous=True)
    closed = []
    job.transport.inner.close = lambda: closed.append(True)
    job.send(10)
    if how == "failed":
        job.world.failed[1] = "made up"
    elif how == "left":
        job.world.left.add(1)
    job.transport.close()
    assert closed == [True]
    assert (job.clock.now < 0.01) if how == "failed" else (job.clock.now < 1.0)


def test_a_peer_that_is_lost_while_messages_to_it_are_held():
    def body(transport):
        linked = EmulatedTransport(transport, 20.0)
        if transport.rank == 1:
            raise ZeroDivisionError("made up")
        linked.prepare_send(np.ones(LONG), 1, CHANNEL).start()
        try:
            recv(linked, np.zeros(1), 1)
        finally:
            linked.close()

    job = run_threads(body, 2, timeout_s=5.0)
    assert isinstance(job.errors[0], PeerLost) and "rank 1" in str(job.errors[0])


def test_links_that_cannot_be():
    inner = LocalTransport(_World(1), 0, 1.0, 0)
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="latency_s must be finite"):
            EmulatedTransport(inner, latency_s=wrong)
        with pytest.raises(ValueError, match="bytes_per_s must be finite"):
            EmulatedTransport(inner, bytes_per_s=wrong)


# As a transport ----------------------------------------------------------------------------

LINKS = {"ideal": (0.0, 0.0), "short": (2e-4, 0.0), "narrow": (1e-4, 2e9)}


def run_linked(body, links, size, synchronous=False):
    job = run_threads(
        lambda transport: body(EmulatedTransport(transport, *links, synchronous=synchronous)),
        size,
        timeout_s=10.0,
        synchronous=synchronous,
    )
    if job.errors:
        raise next(iter(job.errors.values()))
    return job.results


@pytest.mark.parametrize("check", contract.BUFFERED, ids=lambda check: check.__name__)
def test_contract(check):
    def body(transport):
        check(transport)
        transport.barrier()

    run_linked(body, LINKS["narrow"], 3)


@pytest.mark.parametrize(
    "check",
    (*contract.CHECKS, contract.synchronous_sends_wait),
    ids=lambda check: check.__name__,
)
def test_contract_synchronous(check):
    def body(transport):
        check(transport)
        transport.barrier()

    run_linked(body, LINKS["short"], 2, synchronous=True)


def reduce_with(transport, algorithm, advance=None):
    """A few all-reduces; returns their bits and what was sent to whom."""
    group, results = Communicator(transport, algorithm=algorithm), []
    for count in (1, 30, 4099):
        x = np.zeros(count, np.float32)
        program = group.prepare_all_reduce(x, background=advance is not None)
        for turn in range(2):
            x[:] = rounding("float32", count, transport.rank + turn)
            group.start(program)
            if advance is not None:
                advance(group)
            group.wait(program)
            results.append(bits(x).hex())
    sent = sorted(group.bytes_sent_to().items())
    check_drained(transport, [group])
    group.close()
    transport.barrier()
    return [results, sent, [vars(t) for t in group.traffic().values()]]


ALGORITHMS = ("ring", "recursive_doubling", "halving_doubling", "segments")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", (2, 3, 4))
def test_collectives_have_the_same_bits_and_bytes(size, algorithm):
    forced = "ring" if algorithm == "segments" else algorithm
    small = {"pipeline_bytes": 0, "segment_bytes": 4096} if forced != algorithm else None
    with tiny_segments(**small) if small else tiny_segments(10**9, 10**9):
        plain = run_threads(lambda transport: reduce_with(transport, forced), size).results
        for links, synchronous in (("ideal", False), ("narrow", False), ("short", True)):
            linked = run_linked(
                lambda transport: reduce_with(transport, forced), LINKS[links], size, synchronous
            )
            assert linked == plain


def test_a_ring_finishes_within_a_sleep_that_advances_it():
    """Every rank sleeps as if it computed; the ring needs all of them and none waits for it."""

    def body(transport):
        group = Communicator(transport, algorithm="ring")
        x = np.full(1000, 1.0 + transport.rank)
        group.start(group.prepare_all_reduce(x, background=True))
        for _ in range(1000):
            transport.sleep(0.002, group.advance)
            if group.idle:
                break
        transport.barrier()
        return bool((x == 6.0).all())

    assert run_linked(body, LINKS["short"], 3) == [True] * 3


def test_faults_are_seen_through_it_and_under_it():
    """Wrapped in either order; an error of the wrapped transport names its own message."""

    def outside(transport):
        return FaultyTransport(EmulatedTransport(transport, 1e-3), [Raise(rank=0, number=1)])

    def inside(transport):
        return EmulatedTransport(FaultyTransport(transport, [Raise(rank=0, number=1)]), 1e-3)

    for wrap in (outside, inside):

        def body(transport, wrap=wrap):
            linked = wrap(transport)
            if transport.rank == 0:
                for _ in range(2):
                    message = linked.prepare_send(np.zeros(3), 1, CHANNEL)
                    message.start()
                recv(linked, np.zeros(1), 1)
            else:
                recv(linked, np.zeros(3), 0)
                recv(linked, np.zeros(3), 0)

        job = run_threads(body, 2, timeout_s=5.0)
        assert isinstance(job.errors[0], InjectedError), job.errors
        assert "send of 24 bytes of float64 to rank 1" in str(job.errors[0])
        assert isinstance(job.errors[1], PeerLost)


def test_late_and_lost_messages_under_it():
    def body(transport):
        faults = [Delay(rank=0, number=0, seconds=0.05), Drop(rank=0, number=2)]
        linked = EmulatedTransport(FaultyTransport(transport, faults), 1e-3)
        if transport.rank == 0:
            for k in range(3):
                message = linked.prepare_send(np.full(2, float(k)), 1, CHANNEL)
                message.start()
                wait(linked, message)
                message.free()
            hear(linked, 1)
            linked.barrier()
            return None
        got = [float(recv(linked, np.zeros(2), 0)[0]) for _ in range(2)]
        with short_timeout(linked), pytest.raises(CommTimeout):
            recv(linked, np.zeros(2), 0)
        tell(linked, 0)
        linked.barrier()
        return got

    job = run_threads(body, 2)
    assert job.results[1] == [0.0, 1.0] and not job.errors, job.errors


# On real ranks -----------------------------------------------------------------------------


def emulated_on_mpi(transport):
    """The contract and the rings over emulated links; yields what has passed."""
    from mpisim.comm.mpi import connect

    plain = reduce_with(transport, "ring")
    linked = EmulatedTransport(connect(timeout_s=transport.timeout_s), *LINKS["narrow"])
    yield from contract.all_checks(linked, checks=contract.BUFFERED)

    def sleep(group):
        linked.sleep(0.002, group.advance)

    for advance in (None, sleep):
        assert reduce_with(linked, "ring", advance) == plain
        yield "rings"
    with tiny_segments(pipeline_bytes=0, segment_bytes=4096):
        assert reduce_with(linked, "ring") == reduce_with(transport, "ring")
    collective_checks.check_started_collectives(linked)
    yield "started"
    linked.close()
    inner = connect(timeout_s=transport.timeout_s, synchronous=True)
    linked = EmulatedTransport(inner, *LINKS["short"], synchronous=True)
    yield from contract.all_checks(linked, synchronous=True)
    assert reduce_with(linked, "ring") == plain
    linked.close()
    yield "synchronous rings"


@pytest.mark.mpi
def test_emulated_on_mpi():
    number = len(contract.BUFFERED) + 3 + len(contract.CHECKS) + 1 + 1
    assert [len(names) for names in mpi_run(emulated_on_mpi, 2)] == [number] * 2
