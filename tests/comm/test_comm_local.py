"""Ranks as threads: what happens when a rank raises, leaves, or is only slow."""

from __future__ import annotations

import time

import numpy as np
import pytest
from contract import LONG, hear, recv, send, tell, wait

from mpisim.comm.communicator import Communicator
from mpisim.comm.local import LocalTransport, _World, run_threads
from mpisim.errors import CommTimeout, PeerLost


def test_results_come_in_rank_order():
    job = run_threads(lambda transport: (transport.rank, transport.size), 5)
    assert job.results == [(rank, 5) for rank in range(5)]
    assert job.errors == {}


def test_a_rank_that_raises_ends_the_others_with_peer_lost():
    def body(transport):
        if transport.rank == 2:
            raise ZeroDivisionError("made up")
        recv(transport, np.zeros(1), 2)

    job = run_threads(body, 4, timeout_s=10.0)
    assert list(job.errors)[0] == 2  # the cause first
    assert isinstance(job.errors[2], ZeroDivisionError)
    for rank in (0, 1, 3):
        assert isinstance(job.errors[rank], PeerLost)
        assert "rank 2" in str(job.errors[rank]) and f"on rank {rank}" in str(job.errors[rank])


def test_a_rank_that_raises_ends_a_wait_for_another_rank():
    """The chain is followed: 0 waits for 1, which waits for 2, which has failed."""

    def body(transport):
        if transport.rank == 2:
            hear(transport, 1)
            raise ZeroDivisionError("made up")
        if transport.rank == 1:
            tell(transport, 2)
            recv(transport, np.zeros(1), 2)
        send(transport, np.zeros(LONG), 1) if transport.rank == 0 else None

    job = run_threads(body, 3, timeout_s=10.0)
    assert isinstance(job.errors[0], PeerLost) and isinstance(job.errors[1], PeerLost)
    assert "rank 2 failed" in str(job.errors[0])


@pytest.mark.parametrize("how", ["return", "exit"])
def test_C078_a_rank_that_leaves_ends_a_wait_for_it(how):
    def body(transport):
        if transport.rank == 1:
            if how == "exit":
                raise SystemExit(0)
            return
        recv(transport, np.zeros(1), 1)

    job = run_threads(body, 2, timeout_s=10.0)
    assert isinstance(job.errors[0], PeerLost)
    assert "rank 1 must take part until the job ends" in str(job.errors[0])


def test_C078_a_rank_that_leaves_before_a_collective():
    def body(transport):
        communicator = Communicator(transport)
        communicator.all_reduce(np.ones(3))
        if transport.rank == 1:
            return
        communicator.all_reduce(np.ones(3))

    job = run_threads(body, 3, timeout_s=10.0)
    assert set(job.errors) == {0, 2}
    assert all(isinstance(error, PeerLost) for error in job.errors.values())


def test_the_last_message_of_a_rank_that_leaves_is_received():
    """Sent after a long wait, just before its sender ends: it arrived, so nobody is lost."""

    def body(transport):
        if transport.rank == 1:
            hear(transport, 0)
            time.sleep(0.08)
            send(transport, np.ones(1), 0)
            return
        y = np.zeros(1)
        message = transport.prepare_recv(y, 1, 3)
        message.start()
        tell(transport, 1)
        wait(transport, message)
        assert y[0] == 1.0

    for _ in range(12):
        job = run_threads(body, 2, timeout_s=10.0)
        assert not job.errors, job.errors


def test_the_last_look_before_peer_lost_polls_again():
    """The same without a race: one rank polls, the other sends and leaves, the first looks."""
    world = _World(2)
    here, there = (LocalTransport(world, rank, 10.0, 4096) for rank in range(2))
    y = np.zeros(1)
    message = here.prepare_recv(y, 1, 3)
    message.start()
    assert not message.test(here.status)
    there.prepare_send(np.ones(1), 0, 3).start()
    world.left.add(1)
    here.pause(message, 0.06)
    assert message.test(here.status) and y[0] == 1.0
    message.start()
    with pytest.raises(PeerLost):
        for _ in range(3):
            assert not message.test(here.status)
            here.pause(message, 0.06)


def test_barrier_names_a_rank_that_never_comes():
    def body(transport):
        transport.timeout_s = 0.2
        if transport.rank == 0:
            transport.barrier()

    job = run_threads(body, 2)
    assert isinstance(job.errors[0], CommTimeout)
    assert "got rank 0 waiting alone" in str(job.errors[0])


def test_barrier_ends_when_a_rank_raises():
    def body(transport):
        if transport.rank == 1:
            raise ZeroDivisionError("made up")
        transport.barrier()

    job = run_threads(body, 2, timeout_s=10.0)
    assert isinstance(job.errors[0], PeerLost) and "rank 1" in str(job.errors[0])
