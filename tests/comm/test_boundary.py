"""Messages between stages: order, counts and errors, on threads, emulated links and MPI ranks.

The checks are plain functions that every rank calls with its transport, like those of contract.py:
stages 0 and 1 are ranks 0 and 1, or every rank is a stage. Each leaves no message behind.
"""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from contract import LONG, hear, short_timeout, tell
from mpi_worker import mpi_run

from mpisim.comm.boundary import (
    FIRST_CHANNEL,
    KINDS,
    MAX_BOUNDARIES,
    BoundaryLinks,
    boundary_channel,
)
from mpisim.comm.communicator import Communicator, Traffic, check_drained
from mpisim.comm.emulated import EmulatedTransport
from mpisim.comm.local import run_threads
from mpisim.comm.transport import MAX_CHANNEL, make_tag
from mpisim.errors import CommError, CommTimeout, ConfigError, MessageMismatch, PeerLost
from mpisim.memory.tracker import hook_is_built, open_tracker

UINT8 = np.dtype(np.uint8)
SIZES = (64, 5000, 8 * LONG)


def frame(nbytes, *key):
    return np.random.default_rng(key).integers(0, 256, nbytes, dtype=np.uint8)


def forget_counts(transport):
    """What failed is counted on one side only; real jobs end there."""
    transport.counts.sent.clear()
    transport.counts.received.clear()


def check_order_content_and_counts(transport):
    """Many on their way at once, over two boundaries between the same two ranks, both kinds."""
    links, number = BoundaryLinks(transport), 4
    before = transport.counts.sent.copy()
    for nbytes in SIZES:
        for source, kind in enumerate(KINDS):
            if transport.rank == source:
                handles = [
                    links.send(frame(nbytes, boundary, source, k), 1 - source, boundary, kind)
                    for k in range(number)
                    for boundary in (4, 0)
                ]
                # Last first: the order of the waits says nothing about that of the messages.
                for handle in reversed(handles):
                    assert links.wait_send(handle) >= 0.0
                    assert links.wait_send(handle) == 0.0
            elif transport.rank == 1 - source:
                for boundary in (0, 4):
                    for k in range(number):
                        got = np.zeros(nbytes, np.uint8)
                        assert links.receive(got, source, boundary, kind) > 0.0
                        assert np.array_equal(got, frame(nbytes, boundary, source, k)), (k, kind)
    assert links.idle
    there, messages, nbytes = 1 - transport.rank, 2 * number * len(SIZES), 2 * number * sum(SIZES)
    sent, received = Traffic(messages, nbytes, 0, 0), Traffic(0, 0, messages, nbytes)
    if transport.rank < 2:
        expected = [sent, received] if transport.rank == 0 else [received, sent]
        assert links.traffic() == dict(zip(KINDS, expected, strict=True))
        assert links.bytes_sent_to() == {there: nbytes}
        tags = [make_tag(boundary_channel(b, KINDS[transport.rank]), UINT8) for b in (0, 4)]
        counted = transport.counts.sent - before
        assert counted == {(there, tag): messages // 2 for tag in tags}
        assert links.stall_s["recv"] > 0.0 and links.stall_s["send"] > 0.0
    else:
        assert links.traffic() == dict.fromkeys(KINDS, Traffic())
        assert not links.bytes_sent_to() and links.stall_s == {"recv": 0.0, "send": 0.0}
    check_drained(transport, [links])
    links.close()


def check_no_deadlock_when_both_send_first(transport):
    """One forward, one backward: both neighbours post a long frame before they receive."""
    links, got = BoundaryLinks(transport), np.zeros(8 * LONG, np.uint8)
    rank, last = transport.rank, transport.size - 1
    for k in range(3):
        handles = []
        if rank < last:
            handles.append(links.send(frame(got.size, rank, k, 0), rank + 1, rank, "activation"))
        if rank > 0:
            handles.append(links.send(frame(got.size, rank, k, 1), rank - 1, rank - 1, "grad"))
        if rank < last:
            links.receive(got, rank + 1, rank, "grad")
            assert np.array_equal(got, frame(got.size, rank + 1, k, 1))
        if rank > 0:
            links.receive(got, rank - 1, rank - 1, "activation")
            assert np.array_equal(got, frame(got.size, rank - 1, k, 0))
        for handle in handles:
            links.wait_send(handle)
    check_drained(transport, [links])


def check_other_lengths_are_mismatches(transport):
    """A frame that is too short or too long names both ranks; the next one is received."""
    links = BoundaryLinks(transport)
    # Both sides of where transports stop copying, and an empty frame.
    for sent, wanted in ((8, 64), (64, 8), (0, 64), (4 * LONG, 8 * LONG), (8 * LONG, 4 * LONG)):
        if transport.rank == 0:
            links.wait_send(links.send(frame(sent, 3), 1, 2, "activation"))
            hear(transport, 1)
            links.wait_send(links.send(frame(wanted, 4), 1, 2, "activation"))
        elif transport.rank == 1:
            # Open MPI may write what is too long past the end: what lies there must be ours.
            room = np.zeros(max(sent, wanted), np.uint8)
            before = links.traffic()
            with pytest.raises(MessageMismatch) as caught:
                links.receive(room[:wanted], 0, 2, "activation")
            text = str(caught.value)
            assert "message from rank 0 to rank 1" in text and f"must have {wanted} bytes" in text
            assert f"channel {boundary_channel(2, 'activation')}" in text
            assert f"got {sent} bytes" in text or (sent > wanted and "bytes; got" not in text)
            assert links.traffic() == before and links.idle
            tell(transport, 0)
            links.receive(room[:wanted], 0, 2, "activation")
            assert np.array_equal(room[:wanted], frame(wanted, 4))
    forget_counts(transport)


def check_kinds_and_boundaries_are_apart(transport):
    """A gradient is not taken for an activation, nor another boundary's frame for this one's."""
    links, got = BoundaryLinks(transport), np.zeros(64, np.uint8)
    if transport.rank == 0:
        strays = [links.send(frame(64, 1), 1, 0, "grad"), links.send(frame(64, 2), 1, 1, KINDS[0])]
        hear(transport, 1)
        strays.append(links.send(frame(64, 3), 1, 0, "activation"))
        for handle in strays:
            links.wait_send(handle)
    elif transport.rank == 1:
        with short_timeout(transport), pytest.raises(CommTimeout) as caught:
            links.receive(got, 0, 0, "activation")
        assert "receive of 64 bytes of uint8 from rank 0" in str(caught.value)
        # The library may still write there, until the message that was waited for has come.
        links.abandon()
        assert not links.idle
        tell(transport, 0)
        while not links.idle:
            links.abandon()
        assert np.array_equal(got, frame(64, 3))
        links.receive(got, 0, 1, "activation")
        assert np.array_equal(got, frame(64, 2))
        links.receive(got, 0, 0, "grad")
        assert np.array_equal(got, frame(64, 1))
    forget_counts(transport)


def check_a_blocked_stage_moves_its_collectives(transport):
    """Rank 1 sends only once a ring is done that needs rank 0, which waits for that very frame."""
    if transport.rank > 1:
        return
    group = Communicator(transport, (0, 1), algorithm="ring")
    links = BoundaryLinks(transport, neighbours=[group])
    x = np.full(LONG, 1.0 + transport.rank)
    ring = group.prepare_all_reduce(x, background=True)
    group.start(ring)
    if transport.rank == 0:
        links.receive(np.zeros(8, np.uint8), 1, 0, "grad")
    else:
        group.wait(ring)
        links.wait_send(links.send(frame(8, 1), 0, 0, "grad"))
    group.wait(ring)
    assert (x == 3.0).all()
    group.close()


def check_a_frame_nobody_receives_is_named(transport):
    """Small enough to leave at once: only the comparison of both sides can see it."""
    links = BoundaryLinks(transport)
    before, message = transport.counts.received.copy(), frame(16, 7)
    if transport.rank == 0:
        handle = links.send(message, 1, 3, "activation")
        if not getattr(transport, "told_synchronous", False):
            links.wait_send(handle)
    tag = make_tag(boundary_channel(3, "activation"), UINT8)
    with pytest.raises(CommError) as caught:
        check_drained(transport, [links])
    text = str(caught.value)
    unfinished = "got one of axis pp unfinished on rank 0"
    lost = f"got 1 sent by rank 0 to rank 1 with tag {tag} and 0 received"
    assert (unfinished if getattr(transport, "told_synchronous", False) else lost) in text
    if transport.rank == 1:
        assert transport.counts.received == before
        links.receive(np.zeros(16, np.uint8), 0, 3, "activation")
    elif transport.rank == 0:
        links.wait_send(handle)
    check_drained(transport, [links])


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
CHECKS.remove(check_drained)


def check_a_send_nobody_takes_times_out(transport):
    """The receiver is named; the buffer stays bound until the message is complete."""
    links = BoundaryLinks(transport)
    if transport.rank == 0:
        handle = links.send(frame(8 * LONG, 1), 1, 0, "activation")
        with short_timeout(transport), pytest.raises(CommTimeout) as caught:
            links.wait_send(handle)
        text = str(caught.value)
        assert "rank 1 must answer within" in text and f"send of {8 * LONG} bytes" in text
        links.abandon()
        assert not links.idle and links.traffic()["activation"].sent_messages == 0
        tell(transport, 1)
        while not links.idle:
            links.advance()
        assert links.wait_send(handle) == 0.0
        assert links.traffic()["activation"].sent_messages == 1
    elif transport.rank == 1:
        hear(transport, 0)
        got = np.zeros(8 * LONG, np.uint8)
        links.receive(got, 0, 0, "activation")
        assert np.array_equal(got, frame(8 * LONG, 1))


def told(transport, synchronous):
    transport.told_synchronous = synchronous
    return transport


KINDS_OF_LINKS = {
    "local": lambda transport: transport,
    "synchronous": lambda transport: told(transport, True),
    "emulated": lambda transport: EmulatedTransport(transport, 2e-4, 2e9),
    "emulated synchronous": lambda transport: told(
        EmulatedTransport(transport, 2e-4, 2e9, synchronous=True), True
    ),
}


def run_two(body, size=2, kind="local", timeout_s=10.0):
    return run_threads(
        lambda transport: body(KINDS_OF_LINKS[kind](transport)),
        size,
        timeout_s=timeout_s,
        synchronous="synchronous" in kind,
    )


def run_check(check, kind, size):
    def body(transport):
        check(transport)
        transport.barrier()

    job = run_two(body, size, kind)
    if job.errors:
        raise next(iter(job.errors.values()))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS_OF_LINKS)
def test_links(check, kind):
    run_check(check, kind, 3 if kind == "local" else 2)


@pytest.mark.parametrize("kind", ("local", "synchronous", "emulated synchronous"))
def test_a_send_nobody_takes_times_out(kind):
    run_check(check_a_send_nobody_takes_times_out, kind, 2)


def links_on_mpi(transport):
    """Run every check over normal sends, some over synchronous ones, then over emulated links."""
    from mpisim.comm.mpi import connect

    for check in (*CHECKS, check_a_send_nobody_takes_times_out):
        check(transport)
        transport.barrier()
        yield check.__name__
    synchronous = told(connect(timeout_s=transport.timeout_s, synchronous=True), True)
    for check in CHECKS:
        check(synchronous)
        synchronous.barrier()
        yield check.__name__ + " synchronous"
    synchronous.close()
    emulated = EmulatedTransport(connect(timeout_s=transport.timeout_s), 2e-4, 2e9)
    for check in CHECKS:
        check(emulated)
        emulated.barrier()
        yield check.__name__ + " emulated"
    emulated.close()


@pytest.mark.mpi
def test_links_on_mpi():
    results = mpi_run(links_on_mpi, 2)
    assert [len(names) for names in results] == [3 * len(CHECKS) + 1] * 2


# What threads alone can show ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ("local", "emulated"))
@pytest.mark.parametrize("how", ("raises", "leaves"))
def test_a_stage_that_is_gone_ends_a_receive_from_it(how, kind):
    def body(transport):
        links = BoundaryLinks(transport)
        if transport.rank == 1:
            if how == "raises":
                raise ZeroDivisionError("made up")
            return
        try:
            links.receive(np.zeros(64, np.uint8), 1, 0, "grad")
        finally:
            links.abandon()
            links.close()

    job = run_two(body, kind=kind)
    assert isinstance(job.errors[0], PeerLost)
    assert "rank 1" in str(job.errors[0]) and "on rank 0" in str(job.errors[0])


@pytest.mark.parametrize("kind", ("synchronous", "emulated synchronous"))
def test_a_stage_that_is_gone_ends_a_send_to_it(kind):
    def body(transport):
        links = BoundaryLinks(transport)
        if transport.rank == 1:
            raise ZeroDivisionError("made up")
        links.wait_send(links.send(frame(64, 1), 1, 0, "activation"))

    job = run_two(body, kind=kind)
    assert isinstance(job.errors[0], PeerLost) and "rank 1" in str(job.errors[0])


def test_another_dtype_on_a_boundary_channel_is_named():
    def body(transport):
        if transport.rank == 0:
            x = np.zeros(4, np.float32)
            transport.prepare_send(x, 1, boundary_channel(0, "activation")).start()
            hear(transport, 1)
        else:
            with pytest.raises(MessageMismatch, match="must have dtype uint8; got 16 bytes of fl"):
                BoundaryLinks(transport).receive(np.zeros(16, np.uint8), 0, 0, "activation")
            tell(transport, 0)

    assert not run_two(body).errors


class Counted:
    """A neighbour that completes the receive of whoever advances it, at the third time."""

    def __init__(self, at_last):
        self.times, self.at_last = 0, at_last

    def advance(self):
        self.times += 1
        if self.times == 3:
            self.at_last()


@pytest.mark.parametrize("way", ("send", "receive"))
def test_both_waits_advance_every_neighbour(way):
    def body(transport):
        if transport.rank == 1:
            links = BoundaryLinks(transport)
            hear(transport, 0)
            if way == "receive":
                links.wait_send(links.send(frame(8, 1), 0, 0, "grad"))
            else:
                links.receive(np.zeros(8, np.uint8), 0, 0, "activation")
            return
        go = transport.prepare_send(np.zeros(1, np.int8), 1, 9)
        neighbours = [Counted(lambda: None), Counted(go.start)]
        links = BoundaryLinks(transport, neighbours=neighbours)
        if way == "receive":
            links.receive(np.zeros(8, np.uint8), 1, 0, "grad")
        else:
            links.wait_send(links.send(frame(8, 1), 1, 0, "activation"))
        assert all(neighbour.times >= 3 for neighbour in neighbours)

    job = run_two(body, kind="synchronous", timeout_s=2.0)
    assert not job.errors, job.errors


def test_a_wait_is_measured_by_the_given_clock():
    class Clocked:
        now = 0.0

        def clock(self):
            self.now += 1.0
            return self.now

    def body(transport):
        links = BoundaryLinks(transport, Clocked())
        peer = 1 - transport.rank
        handles = [links.send(frame(8, k), peer, 0, "grad") for k in range(2)]
        assert [links.receive(np.zeros(8, np.uint8), peer, 0, "grad") for _ in range(2)] == [1, 1]
        assert links.wait_send(handles[0]) == 1.0
        # One that is complete already is no wait.
        links.advance()
        assert links.idle and links.wait_send(handles[1]) == 0.0
        assert links.stall_s == {"recv": 2.0, "send": 1.0}

    job = run_two(body)
    assert not job.errors, job.errors


def test_a_collective_that_blocks_may_list_the_links():
    def body(transport):
        group, links = Communicator(transport), BoundaryLinks(transport)
        group.neighbours.append(links)
        peer, got = 1 - transport.rank, np.zeros(8, np.uint8)
        handle = links.send(frame(8, 1), peer, 0, "grad")
        links.receive(got, peer, 0, "grad")
        group.all_reduce(np.ones(LONG))
        links.advance()
        assert links.idle and links.traffic()["grad"] == Traffic(1, 8, 1, 8)
        links.wait_send(handle)
        assert links.traffic()["grad"] == Traffic(1, 8, 1, 8)

    job = run_two(body, kind="synchronous")
    assert not job.errors, job.errors


@pytest.mark.parametrize("kind", ("local", "emulated"))
def test_nothing_keeps_a_buffer_alive_once_its_message_is_complete(kind):
    def body(transport):
        links, peer = BoundaryLinks(transport), 1 - transport.rank
        sent, got = frame(64, 1), np.zeros(64, np.uint8)
        dead = [weakref.ref(sent), weakref.ref(got)]
        handle = links.send(sent, peer, 0, "grad")
        links.receive(got, peer, 0, "grad")
        links.wait_send(handle)
        del sent, got
        return [ref() is None for ref in dead]

    assert run_two(body, kind=kind).results == [[True, True]] * 2


@pytest.mark.parametrize("kind", KINDS_OF_LINKS)
def test_a_message_makes_no_array(kind):
    if not hook_is_built():
        pytest.skip("the allocator hook is not built")

    def body(transport):
        links, peer = BoundaryLinks(transport), 1 - transport.rank
        sent, got = frame(100_000, 1), np.zeros(100_000, np.uint8)
        tracker = open_tracker("hook")
        try:
            handle = links.send(sent, peer, 0, "grad")
            links.receive(got, peer, 0, "grad")
            links.wait_send(handle)
            peak = tracker.peak()
        finally:
            tracker.close()
        transport.barrier()
        return peak

    job = run_two(body, kind=kind)
    assert job.results == [0, 0], job.errors


def test_a_posted_send_that_nobody_waits_for_is_unfinished():
    def body(transport):
        links = BoundaryLinks(transport)
        if transport.rank == 0:
            links.send(frame(8, 1), 1, 0, "activation")
        try:
            check_drained(transport, [links])
        finally:
            links.close()

    job = run_two(body, kind="synchronous")
    # The other rank may hear of this failure before it has read the texts.
    assert "axis pp unfinished on rank 0" in str(next(iter(job.errors.values())))


def test_refused_buffers_boundaries_and_kinds():
    def body(transport):
        links = BoundaryLinks(transport)
        matrix = np.zeros((4, 4), np.uint8)
        fixed = np.zeros(4, np.uint8)
        fixed.flags.writeable = False
        for call in (links.send, links.receive):
            for buffer in (np.zeros(4), np.zeros(4, np.int8), np.zeros(4, bool)):
                with pytest.raises(ValueError, match="buffer of a boundary must be uint8"):
                    call(buffer, 1, 0, "grad")
            for buffer in (matrix[:, 1], matrix.T[1:], matrix[0, ::-1], b"1234", [1]):
                with pytest.raises(ValueError, match="buffer must be"):
                    call(buffer, 1, 0, "grad")
            for peer in (-1, 2):
                with pytest.raises(ValueError, match=f"0..1; got {peer}"):
                    call(fixed.copy(), peer, 0, "grad")
            for boundary in (-1, MAX_BOUNDARIES):
                with pytest.raises(ConfigError, match=f"got {boundary}. Use at most 1016 stages"):
                    call(fixed.copy(), 1, boundary, "grad")
            with pytest.raises(ValueError, match="kind must be activation or grad; got 'loss'"):
                call(fixed.copy(), 1, 0, "loss")
        with pytest.raises(ValueError, match="writeable"):
            links.receive(fixed, 1, 0, "grad")
        assert links.idle

    job = run_two(body)
    assert not job.errors, job.errors


def test_every_boundary_and_kind_has_a_channel_of_its_own():
    channels = [boundary_channel(b, kind) for b in range(MAX_BOUNDARIES) for kind in KINDS]
    assert len(set(channels)) == len(channels)
    assert min(channels) == FIRST_CHANNEL == 16
    assert MAX_CHANNEL - len(KINDS) < max(channels) <= MAX_CHANNEL
    assert boundary_channel(3, "activation") == 22 and boundary_channel(3, "grad") == 23
