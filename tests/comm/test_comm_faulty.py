"""Faults on purpose: each is noticed by the layer above, and both ranks are named."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from collective_checks import bits, rounding, tiny_segments
from contract import CHANNEL, LONG, recv, send, wait

from mpisim.comm.communicator import Communicator
from mpisim.comm.faulty import (
    Delay,
    Drop,
    FaultyTransport,
    FlipBit,
    InjectedError,
    Raise,
    Short,
    WrongDtype,
)
from mpisim.comm.local import run_threads
from mpisim.errors import CommError, CommTimeout, MessageMismatch, PeerLost
from mpisim.reference.data_parallel import ring_all_reduce as reference_ring

SIZE = 3
COUNT = 30


def all_reduce_with(*faults, algorithm="ring", turns=3, timeout_s=10.0, size=SIZE, **options):
    """Run a few all-reduces; returns the job, results as bytes per turn."""

    def body(transport):
        group = Communicator(FaultyTransport(transport, faults), algorithm=algorithm)
        x, results = np.zeros(COUNT, np.float32), []
        for _ in range(turns):
            x[:] = rounding("float32", COUNT, transport.rank)
            group.all_reduce(x)
            results.append(bits(x))
        # As a job does at its end. Messages carry no numbers: when one is lost, the next of its
        # tag takes its place, and the last one is missed here.
        transport.barrier()
        return results

    return run_threads(body, size, timeout_s=timeout_s, **options)


def expected():
    inputs = [rounding("float32", COUNT, rank) for rank in range(SIZE)]
    return bits(reference_ring(inputs)[0])


def root_cause(job):
    """The first error that is not the loss of a peer: what a user is shown."""
    return next(error for error in job.errors.values() if not isinstance(error, PeerLost))


def test_without_faults_nothing_happens():
    job = all_reduce_with()
    assert not job.errors
    assert all(result == [expected()] * 3 for result in job.results)
    # Faults of a rank or of a message that is never reached do nothing either.
    job = all_reduce_with(Drop(rank=7, number=0), Raise(rank=1, number=10**6))
    assert not job.errors


# Ring over three ranks: 4 sends per rank and turn; message 5 of rank 1 is in the second turn of
# three, message 11 the very last.
@pytest.mark.parametrize("number", (5, 11))
@pytest.mark.parametrize("way", ({}, {"synchronous": True}), ids=("eager", "synchronous"))
class TestInARing:
    def test_a_dropped_message_is_a_timeout_that_names_its_sender(self, number, way):
        job = all_reduce_with(Drop(rank=1, number=number), timeout_s=0.3, **way)
        assert isinstance(root_cause(job), CommTimeout)
        # Rank 2 misses it, whether its own time was up first or another rank's.
        assert "receive of 40 bytes of float32 from rank 1" in str(job.errors[2])

    def test_a_short_message_is_a_mismatch_of_both(self, number, way):
        job = all_reduce_with(Short(rank=1, number=number, elements=2), **way)
        error = root_cause(job)
        assert isinstance(error, MessageMismatch)
        assert "message from rank 1 to rank 2 must have 40 bytes of float32; got 32" in str(error)

    def test_another_dtype_is_a_mismatch_of_both(self, number, way):
        job = all_reduce_with(WrongDtype(rank=1, number=number, dtype="int32"), **way)
        error = root_cause(job)
        assert isinstance(error, MessageMismatch)
        text = "message from rank 1 to rank 2 must have dtype float32; got 40 bytes of int32"
        assert text in str(error)

    def test_a_rank_that_raises_is_the_cause(self, number, way):
        job = all_reduce_with(Raise(rank=1, number=number), **way)
        assert isinstance(job.errors[1], InjectedError)
        assert "rank 1 must fail here" in str(job.errors[1])
        assert next(iter(job.errors)) == 1
        for rank in (0, 2):
            assert isinstance(job.errors[rank], PeerLost)
            assert "rank 1" in str(job.errors[rank])
        assert set(job.errors) == {0, 1, 2}

    def test_a_message_that_is_late_changes_nothing(self, number, way):
        for side in ("send", "recv"):
            fault = Delay(rank=1, number=number, seconds=0.1, side=side)
            job = all_reduce_with(fault, **way)
            assert not job.errors
            assert all(result == [expected()] * 3 for result in job.results)

    def test_a_message_that_is_too_late_is_a_timeout(self, number, way):
        job = all_reduce_with(Delay(rank=1, number=number, seconds=30.0), timeout_s=0.3, **way)
        assert isinstance(root_cause(job), CommTimeout)
        assert "rank 1" in " ".join(str(error) for error in job.errors.values())


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize(
    "algorithm", ("ring", "recursive_doubling", "halving_doubling", "segments")
)
def test_a_short_message_is_noticed_by_every_kind_of_program(algorithm, size):
    """Fewer bytes than a whole buffer are never taken for it; the right rank is named."""
    segments = {"pipeline_bytes": 0, "segment_bytes": 16} if algorithm == "segments" else None
    number = 1 if segments else 0
    with tiny_segments(**segments) if segments else contextlib.nullcontext():
        forced = "ring" if segments else algorithm
        job = all_reduce_with(Short(rank=0, number=number), algorithm=forced, size=size)
    error = root_cause(job)
    assert isinstance(error, MessageMismatch) and "message from rank 0 to rank" in str(error)


@pytest.mark.parametrize("algorithm", ("ring", "recursive_doubling"))
@pytest.mark.parametrize("seed", range(3))
def test_no_single_fault_hangs_or_passes_unnoticed(algorithm, seed):
    """Whatever the message, a fault that loses or changes its frame ends the job by name."""
    generator = np.random.default_rng(seed)
    for kind in (Drop, Short, Raise):
        fault = kind(rank=int(generator.integers(SIZE)), number=int(generator.integers(3)))
        job = all_reduce_with(fault, algorithm=algorithm, timeout_s=0.4)
        assert job.errors, fault
        assert all(isinstance(error, CommError) for error in job.errors.values()), job.errors


def test_a_flipped_bit_while_summing_reaches_every_replica():
    """Sent in the first half of a ring (sends 0 and 1): one wrong sum, the same everywhere."""
    job = all_reduce_with(FlipBit(rank=1, number=4, bit=30))
    assert not job.errors
    assert all(result[0] == expected() for result in job.results)
    assert all(result[1] != expected() for result in job.results)
    assert job.results[0] == job.results[1] == job.results[2]
    # The sender's own memory is as it was: the next turn is right again.
    assert all(result[2] == expected() for result in job.results)


def test_a_flipped_bit_while_gathering_makes_replicas_differ():
    """Sent in the last step (send 3): only the receiver has it."""
    job = all_reduce_with(FlipBit(rank=1, number=7, bit=30))
    assert not job.errors
    turn = [result[1] for result in job.results]
    assert turn[0] == turn[1] == expected()
    assert turn[2] != expected()
    wrong = np.frombuffer(turn[2], np.uint32) ^ np.frombuffer(expected(), np.uint32)
    assert np.count_nonzero(wrong) == 1 and wrong.max() == 1 << 30


@pytest.mark.parametrize("bit", (0, 7, 8, 8 * 12 - 1))
def test_the_bit_that_flips(bit):
    def body(transport):
        faulty = FaultyTransport(transport, [FlipBit(rank=0, number=0, bit=bit)])
        x = np.zeros(3, np.float32)
        if transport.rank == 0:
            send(faulty, x, 1)
            assert not x.any()
        else:
            recv(faulty, x, 0)
            return np.flatnonzero(np.unpackbits(x.view(np.uint8), bitorder="little")).tolist()

    assert run_threads(body, 2).results[1] == [bit]


def test_late_messages_of_a_pair_stay_in_order():
    """The first is held up, so those behind it are too; another pair is not."""

    def body(transport):
        faulty = FaultyTransport(transport, [Delay(rank=0, number=0, seconds=0.5)])
        if transport.rank == 0:
            sends = [faulty.prepare_send(np.full(2, float(k)), 1, CHANNEL) for k in range(4)]
            sends.append(faulty.prepare_send(np.full(2, 9.0), 2, CHANNEL))
            for message in sends:
                message.start()
            wait(faulty, sends[-1])
            assert not sends[0].test() and not sends[3].test()
            for message in sends:
                wait(faulty, message)
        elif transport.rank == 1:
            return [recv(faulty, np.zeros(2), 0)[0] for _ in range(4)]
        else:
            return recv(faulty, np.zeros(2), 0)[0]

    job = run_threads(body, 3)
    assert job.results[1:] == [[0.0, 1.0, 2.0, 3.0], 9.0], job.errors


@pytest.mark.parametrize("meet", ("exchange", "barrier"))
def test_a_small_send_held_up_goes_out_although_its_rank_only_waits_for_all(meet):
    """Nobody waits for the completion of a small send, so nobody polls for it either."""

    def body(transport):
        faulty = FaultyTransport(transport, [Delay(rank=2, number=0, seconds=0.2)])
        group = Communicator(faulty)
        mine = np.array([float(transport.rank)])
        collected = np.zeros(3) if transport.rank == 0 else None
        group.gather(mine, collected)
        if meet == "exchange":
            assert faulty.exchange(str(transport.rank)) == ["0", "1", "2"]
        else:
            faulty.barrier()
        return collected

    job = run_threads(body, 3, timeout_s=2.0)
    assert not job.errors, job.errors
    assert job.results[0].tolist() == [0.0, 1.0, 2.0]


def test_a_dropped_message_is_dropped_once():
    """The same bound message goes through when it is started again."""

    def body(transport):
        faulty = FaultyTransport(transport, [Drop(rank=0, number=1)])
        x = np.zeros(1)
        if transport.rank == 0:
            message = faulty.prepare_send(x, 1, CHANNEL)
            for k in range(3):
                x[:] = k
                message.start()
                wait(faulty, message)
            message.free()
            assert faulty.started == {"send": 3, "recv": 0}
            assert faulty.started_bytes == {"send": 24, "recv": 0}
        else:
            return [float(recv(faulty, np.zeros(1), 0)[0]) for _ in range(2)]

    assert run_threads(body, 2).results[1] == [0.0, 2.0]


def test_short_messages_may_be_empty():
    def body(transport):
        faulty = FaultyTransport(transport, [Short(rank=0, number=0, elements=50)])
        if transport.rank == 0:
            send(faulty, np.zeros(3), 1)
        else:
            recv(faulty, np.zeros(3), 0)

    job = run_threads(body, 2)
    assert "must have 24 bytes of float64; got 0 bytes" in str(job.errors[1])


def test_faults_that_cannot_be():
    for kind in (Drop, Short, FlipBit):
        with pytest.raises(ValueError, match="side must be send"):
            kind(rank=0, number=0, side="recv")
    with pytest.raises(ValueError, match="side must be send or recv"):
        Delay(rank=0, number=0, side="both", seconds=1.0)


class TestStrict:
    """What the watching mode itself finds."""

    def two(self, body):
        def on_rank(transport):
            return body(FaultyTransport(transport, strict=True))

        return run_threads(on_rank, 2, timeout_s=2.0)

    @pytest.mark.parametrize("length", (4, LONG))
    def test_a_send_buffer_that_changes_in_flight(self, length):
        def body(transport):
            x = np.zeros(length)
            if transport.rank == 0:
                message = transport.prepare_send(x, 1, CHANNEL)
                message.start()
                x[-1] = 1.0
                wait(transport, message)
            else:
                recv(transport, x, 0)

        error = self.two(body).errors[0]
        assert isinstance(error, CommError) and "must not change" in str(error)

    def test_a_receive_buffer_that_is_read_too_early(self):
        def body(transport):
            x = np.zeros(2)
            if transport.rank == 0:
                time.sleep(0.02)
                send(transport, x, 1)
            else:
                message = transport.prepare_recv(x, 0, CHANNEL)
                message.start()
                seen = x.copy()
                wait(transport, message)
                return bool(seen.any()), bool(x.any())

        assert self.two(body).results[1] == (True, False)

    @pytest.mark.parametrize("first", ("prepare_send", "prepare_recv"))
    def test_a_receive_into_memory_that_another_message_uses(self, first):
        def body(transport):
            x, peer = np.zeros(LONG), 1 - transport.rank
            getattr(transport, first)(x[:-1], peer, CHANNEL).start()
            transport.prepare_recv(x[-1:], peer, CHANNEL + 1).start()  # beside it: allowed
            transport.prepare_recv(x[-2:-1], peer, CHANNEL + 2).start()

        assert "belong to one message" in str(self.two(body).errors[0])

    def test_two_sends_of_the_same_memory_are_allowed(self):
        def body(transport):
            x, peer = np.zeros(LONG), 1 - transport.rank
            for channel in (CHANNEL, CHANNEL + 1):
                transport.prepare_send(x, peer, channel).start()

        assert not self.two(body).errors

    def test_a_second_start(self):
        def body(transport):
            message = transport.prepare_send(np.zeros(LONG), 1 - transport.rank, CHANNEL)
            message.start()
            message.start()

        assert "started again" in str(self.two(body).errors[0])

    def test_a_start_after_it_was_freed(self):
        def body(transport):
            message = transport.prepare_send(np.zeros(1), 1 - transport.rank, CHANNEL)
            message.free()
            message.start()

        assert "once it was freed" in str(self.two(body).errors[0])

    def test_a_wait_for_a_receive_that_was_not_started(self):
        def body(transport):
            transport.prepare_recv(np.zeros(2), 1 - transport.rank, CHANNEL).test()

        assert "must be started before" in str(self.two(body).errors[0])
