"""The contract of a transport, as plain functions: every rank calls each with its transport.

Run on LocalTransport, FaultyTransport and, in real processes, MpiTransport; see the callers in
test_comm_transports.py and test_comm_mpi.py. Ranks 0 and 1 talk, or all ranks in a ring; a check
starts and ends with all ranks together and leaves no message behind. Raises AssertionError.
"""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

from mpisim.comm.transport import DTYPE_NAMES, MAX_CHANNEL, MAX_TAG, length_error, make_tag
from mpisim.errors import CommTimeout, MessageMismatch

CHANNEL = 3
LONG = 100_000
"""Elements of a message that no transport sends eagerly (800 kB in float64)."""


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def wait(transport, message) -> None:
    """Complete a message as the layers above do: poll, pause, check the length, name errors."""
    since = time.monotonic()
    try:
        while not message.test(transport.status):
            transport.pause(message, time.monotonic() - since)
    except Exception as error:
        raise transport.translate(error, message) from error
    if not message.is_send and transport.received_bytes() != message.nbytes:
        raise length_error(message, transport.rank, transport.received_bytes())


def poll(transport, message) -> None:
    """Complete a message while a stranger waits beside it, however long a busy machine takes."""
    deadline = time.monotonic() + transport.timeout_s
    while not message.test(transport.status):
        assert time.monotonic() < deadline
        time.sleep(0)


def send(transport, buffer, dest, channel=CHANNEL) -> None:
    message = transport.prepare_send(buffer, dest, channel)
    message.start()
    wait(transport, message)
    message.free()


def recv(transport, buffer, source, channel=CHANNEL):
    message = transport.prepare_recv(buffer, source, channel)
    message.start()
    wait(transport, message)
    message.free()
    return buffer


def tell(transport, dest) -> None:
    """Let rank `dest` go on past its `hear`."""
    send(transport, np.zeros(1, np.int8), dest, channel=9)


def hear(transport, source) -> None:
    recv(transport, np.ones(1, np.int8), source, channel=9)


@contextmanager
def short_timeout(transport, seconds=0.2):
    saved = transport.timeout_s
    transport.timeout_s = seconds
    try:
        yield
    finally:
        transport.timeout_s = saved


def check_every_dtype(transport):
    """All bit patterns of every dtype arrive unchanged; bfloat16 included."""
    rank, size = transport.rank, transport.size
    right, left = (rank + 1) % size, (rank - 1) % size

    def pattern(name, source):
        if name == "bool":
            return np.arange(512) % (3 + source) == 0
        raw = np.random.default_rng([source, len(name)]).integers(0, 256, 4096, dtype=np.uint8)
        return raw.view(dtype_of(name))

    for name in DTYPE_NAMES:
        sent = pattern(name, rank)
        received = np.zeros_like(sent)
        post = transport.prepare_recv(received, left, CHANNEL)
        post.start()
        out = transport.prepare_send(sent, right, CHANNEL)
        out.start()
        wait(transport, post)
        wait(transport, out)
        assert received.tobytes() == pattern(name, left).tobytes(), name
        assert received.dtype == sent.dtype


def check_C071_half_precision(transport):
    """16-bit floats travel whatever the installed MPI knows."""
    for name in ("float16", "bfloat16"):
        x = np.array([1.0, 2.0], dtype_of(name))
        got = np.zeros_like(x)
        if transport.rank == 0:
            send(transport, x, 1)
        elif transport.rank == 1:
            recv(transport, got, 0)
            assert got.astype(float).tolist() == [1.0, 2.0]


def check_sizes(transport):
    """Lengths around every switch-over of the transports, both ways at once."""
    rank = transport.rank
    sizes = (0, 1, 2, 63, 64, 65, 3999, 4000, 4001, 4064, 4065, 4096, 4097, 65_537)
    sizes += ((2 << 20) - 1, 2 << 20, (2 << 20) + 1)
    if rank > 1:
        return
    peer = 1 - rank
    for nbytes, one_copy in itertools.product(sizes, (False, True)):
        mine = (np.arange(nbytes) % 251 + rank).astype(np.uint8)
        guarded = np.full(nbytes + 16, 77, np.uint8)
        post = transport.prepare_recv(guarded[8 : 8 + nbytes], peer, CHANNEL, one_copy)
        post.start()
        out = transport.prepare_send(mine, peer, CHANNEL, one_copy)
        out.start()
        wait(transport, post)
        wait(transport, out)
        expected = (np.arange(nbytes) % 251 + peer).astype(np.uint8)
        assert np.array_equal(guarded[8 : 8 + nbytes], expected), nbytes
        assert (guarded[:8] == 77).all() and (guarded[8 + nbytes :] == 77).all(), nbytes
        assert mine.tobytes() == (expected - peer + rank).astype(np.uint8).tobytes()
        post.free()
        out.free()


def check_empty_messages(transport):
    """A message of no bytes is a message: it must arrive, and only once."""
    empty = np.empty(0, np.float32)
    if transport.rank == 0:
        for _ in range(3):
            send(transport, empty, 1)
        send(transport, np.ones(1, np.float32), 1)
    elif transport.rank == 1:
        for _ in range(3):
            recv(transport, empty, 0)
            assert transport.received_bytes() == 0
        assert recv(transport, np.zeros(1, np.float32), 0)[0] == 1.0


def check_order_of_a_pair(transport):
    """Messages of one pair and tag arrive in the order they were started, many in flight."""
    number = 12
    for length in (1, 3000):
        if transport.rank == 0:
            buffers = [np.full(length, float(k)) for k in range(number)]
            sends = [transport.prepare_send(buffer, 1, CHANNEL) for buffer in buffers]
            for message in sends:
                message.start()
            for message in sends:
                wait(transport, message)
        elif transport.rank == 1:
            buffers = [np.full(length, -1.0) for _ in range(number)]
            receives = [transport.prepare_recv(buffer, 0, CHANNEL) for buffer in buffers]
            for message in receives:
                message.start()
            for k, message in enumerate(receives):
                wait(transport, message)
                assert (buffers[k] == k).all(), (k, buffers[k][:3])


def check_channels_are_apart(transport):
    """A message is received on its own channel only, whatever came before on another."""
    if transport.rank == 0:
        sends = []
        for channel in (0, 1, MAX_CHANNEL):
            sends.append(transport.prepare_send(np.full(4, float(channel)), 1, channel))
            sends[-1].start()
        for message in sends:
            wait(transport, message)
    elif transport.rank == 1:
        for channel in (MAX_CHANNEL, 0, 1):
            assert recv(transport, np.zeros(4), 0, channel).tolist() == [channel] * 4


def check_sources_are_apart(transport):
    """A receive takes a message of its own source only."""
    rank, size = transport.rank, transport.size
    if rank:
        send(transport, np.full(2, float(rank)), 0)
        return
    for source in range(size - 1, 0, -1):
        assert recv(transport, np.zeros(2), source).tolist() == [source] * 2


def check_restart(transport):
    """A bound message can be started again once it is complete, with what its buffer holds."""
    for length in (2, 5000):
        if transport.rank == 0:
            x = np.zeros(length)
            message = transport.prepare_send(x, 1, CHANNEL)
            for k in range(20):
                x[:] = k
                message.start()
                wait(transport, message)
            message.free()
        elif transport.rank == 1:
            y = np.zeros(length)
            message = transport.prepare_recv(y, 0, CHANNEL)
            for k in range(20):
                y[:] = -1
                message.start()
                wait(transport, message)
                assert (y == k).all(), (k, y[:2])
            message.free()


def check_C073_send_buffer_belongs_to_the_message(transport):
    """Until a send is complete its bytes may be read; after, the buffer is free."""
    for length in (10, LONG):
        if transport.rank == 0:
            x = np.ones(length)
            message = transport.prepare_send(x, 1, CHANNEL)
            message.start()
            if length == LONG:
                # Rank 1 has not posted a receive: a long message cannot be complete.
                assert not any(message.test(transport.status) for _ in range(50))
            tell(transport, 1)
            wait(transport, message)
            x[:] = 999.0
        elif transport.rank == 1:
            hear(transport, 0)
            assert (recv(transport, np.zeros(length), 0) == 1.0).all()


def check_no_deadlock_when_both_send_first(transport):
    """Long messages in both directions, sends posted before the receives."""
    rank, size = transport.rank, transport.size
    right, left = (rank + 1) % size, (rank - 1) % size
    x, y = np.full(LONG, float(rank)), np.zeros(LONG)
    out = transport.prepare_send(x, right, CHANNEL)
    out.start()
    post = transport.prepare_recv(y, left, CHANNEL)
    post.start()
    wait(transport, post)
    wait(transport, out)
    assert (y == left).all()


def check_C068_shorter_message(transport):
    """Fewer bytes than the buffer holds are counted, never taken for the whole."""
    for length in (4, LONG):
        if transport.rank == 0:
            send(transport, np.arange(length // 2, dtype=float), 1)
        elif transport.rank == 1:
            y = np.full(length, -9.0)
            with pytest.raises(MessageMismatch) as caught:
                recv(transport, y, 0)
            text = str(caught.value)
            assert "from rank 0 to rank 1" in text
            assert f"must have {8 * length} bytes" in text and f"got {4 * length} bytes" in text
            assert transport.received_bytes() == 4 * length


def check_C068_longer_message(transport):
    """More bytes than the buffer holds are an error that names both ranks."""
    for length in (4, 1000, LONG):
        if transport.rank == 0:
            send(transport, np.arange(length, dtype=float), 1)
        elif transport.rank == 1:
            # Open MPI 5.0 with single-copy transfers writes past the end of the receive buffer
            # before it reports the truncation, so what lies behind it must be ours.
            y = np.zeros(2 * length)[: length // 2]
            with pytest.raises(MessageMismatch) as caught:
                recv(transport, y, 0)
            text = str(caught.value)
            assert "from rank 0 to rank 1" in text and f"must have {4 * length} bytes" in text
            assert f"got {4 * length} bytes" not in text


def check_wrong_dtype_of_the_same_length(transport):
    """Another dtype on the same channel is named within moments; it is neither taken nor a hang."""
    for strange, expected, length in (
        ("int32", "float32", 8),
        ("int32", "float32", LONG),
        ("uint16", "bfloat16", 8),
        ("bfloat16", "float16", 8),
        ("float16", "uint16", LONG),
    ):
        given, wanted = dtype_of(strange), dtype_of(expected)
        if transport.rank == 0:
            stray = transport.prepare_send((np.arange(length) % 100).astype(given), 1, CHANNEL)
            stray.start()
            hear(transport, 1)
            send(transport, np.ones(length, wanted), 1)
            wait(transport, stray)
        elif transport.rank == 1:
            y = np.zeros(length, wanted)
            message = transport.prepare_recv(y, 0, CHANNEL)
            message.start()
            with pytest.raises(MessageMismatch) as caught:
                wait(transport, message)
            text = str(caught.value)
            assert "from rank 0 to rank 1" in text
            nbytes = given.itemsize * length
            assert f"must have dtype {expected}" in text and f"{nbytes} bytes of {strange}" in text
            assert getattr(transport, "strict", False) or not y.any()
            tell(transport, 0)
            poll(transport, message)
            assert (y == 1.0).all()
            assert recv(transport, np.zeros(length, given), 0)[-1] == (length - 1) % 100


def check_wrong_dtype_behind_another_channel(transport):
    """The stranger is found although an older message of another channel waits before it."""
    if transport.rank == 0:
        older = transport.prepare_send(np.zeros(1), 1, CHANNEL + 1)
        older.start()
        stray = transport.prepare_send(np.zeros(2, np.int32), 1, CHANNEL)
        stray.start()
        hear(transport, 1)
        send(transport, np.zeros(1), 1)
        wait(transport, older)
        wait(transport, stray)
    elif transport.rank == 1:
        message = transport.prepare_recv(np.zeros(1), 0, CHANNEL)
        message.start()
        with short_timeout(transport, 2.0), pytest.raises(MessageMismatch):
            wait(transport, message)
        tell(transport, 0)
        poll(transport, message)
        recv(transport, np.zeros(1), 0, CHANNEL + 1)
        recv(transport, np.zeros(2, np.int32), 0)


def check_C065_C066_refused_buffers(transport):
    """Buffers that would travel scrambled, or not at all, are refused before anything starts."""
    peer = (transport.rank + 1) % transport.size
    matrix = np.arange(16.0).reshape(4, 4)
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    refused = {
        "Fortran-ordered": np.arange(6.0).reshape(2, 3).T,
        "column": matrix[:, 1],
        "every other": np.arange(6.0)[::2],
        "reversed": np.arange(6.0)[::-1],
        "objects": np.array([1, "a", None], dtype=object),
        "text": np.array(["ab"]),
        "fields": np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
        "complex": np.zeros(2, complex),
        "dates": np.zeros(2, "M8[s]"),
        "other byte order": np.arange(3.0).astype(np.dtype(float).newbyteorder()),
        "list": [1.0, 2.0],
        "scalar": np.float64(1.0),
    }
    for what, buffer in refused.items():
        for prepare in (transport.prepare_send, transport.prepare_recv):
            with pytest.raises(ValueError, match="buffer"):
                prepare(buffer, peer, CHANNEL)
                raise AssertionError(f"{what} must be refused")
    with pytest.raises(ValueError, match="read-only"):
        transport.prepare_recv(fixed, peer, CHANNEL)
    with pytest.raises(ValueError, match="ascontiguousarray"):
        transport.prepare_send(matrix.T, peer, CHANNEL)


def check_read_only_send(transport):
    """What is only read may be read-only; a row of a matrix and a scalar array are fine."""
    x = np.arange(12.0).reshape(3, 4)
    x.flags.writeable = False
    y, z = np.zeros((3, 4)), np.zeros(())
    if transport.rank == 0:
        send(transport, x, 1)
        send(transport, x[1], 1)
        send(transport, np.array(5.0), 1)
    elif transport.rank == 1:
        assert np.array_equal(recv(transport, y, 0), x)
        assert recv(transport, y[2], 0).tolist() == [4.0, 5.0, 6.0, 7.0]
        assert recv(transport, z, 0) == 5.0


def check_refused_peers_and_channels(transport):
    """No such rank, no such channel."""
    x = np.zeros(1)
    for prepare in (transport.prepare_send, transport.prepare_recv):
        for peer in (-1, transport.size, -2):
            with pytest.raises(ValueError, match=f"0..{transport.size - 1}; got {peer}"):
                prepare(x, peer, CHANNEL)
        for channel in (-1, MAX_CHANNEL + 1):
            with pytest.raises(ValueError, match=f"got {channel}"):
                prepare(x, 0, channel)


def check_C074_tags_at_the_window_edge(transport):
    """The highest channel carries every dtype, on tags that the standard promises."""
    for name in DTYPE_NAMES:
        dtype = dtype_of(name)
        assert 0 <= make_tag(MAX_CHANNEL, dtype) <= MAX_TAG == 32767
        x = np.ones(3, dtype)
        if transport.rank == 0:
            send(transport, x, 1, MAX_CHANNEL)
        elif transport.rank == 1:
            y = np.zeros(3, dtype)
            recv(transport, y, 0, MAX_CHANNEL)
            assert y.tobytes() == x.tobytes()


def check_C069_bytes_are_counted_by_the_call(transport):
    """Counts are bytes, from the message itself, whatever the dtype."""
    if transport.rank == 0:
        message = transport.prepare_send(np.arange(4, dtype=np.int32), 1, CHANNEL)
        assert message.nbytes == 16 and message.is_send and message.peer == 1
        message.start()
        wait(transport, message)
    elif transport.rank == 1:
        y = np.full(4, -1, np.int32)
        recv(transport, y, 0)
        assert transport.received_bytes() == 16
        assert y.tolist() == [0, 1, 2, 3]


def check_receive_timeout(transport):
    """A peer that does not send is named when the time is up, and may still send later."""
    if transport.rank == 0:
        hear(transport, 1)
        send(transport, np.ones(2), 1)
    elif transport.rank == 1:
        y = np.zeros(2)
        message = transport.prepare_recv(y, 0, CHANNEL)
        message.start()
        with short_timeout(transport), pytest.raises(CommTimeout) as caught:
            wait(transport, message)
        text = str(caught.value)
        assert "rank 0 must answer within" in text and "on rank 1" in text, text
        assert "receive of 16 bytes of float64 from rank 0" in text and "channel 3" in text
        tell(transport, 0)
        wait(transport, message)
        assert y.tolist() == [1.0, 1.0]


def check_send_timeout(transport):
    """A peer that does not receive a long message is named when the time is up."""
    if transport.rank == 0:
        message = transport.prepare_send(np.ones(LONG), 1, CHANNEL)
        message.start()
        with short_timeout(transport), pytest.raises(CommTimeout) as caught:
            wait(transport, message)
        text = str(caught.value)
        assert "rank 1 must answer within" in text and "on rank 0" in text, text
        assert f"send of {8 * LONG} bytes" in text
        tell(transport, 1)
        wait(transport, message)
    elif transport.rank == 1:
        hear(transport, 0)
        recv(transport, np.zeros(LONG), 0)


def check_a_slow_peer_is_waited_for(transport):
    """Waits outlast the moment after which strangers are looked for."""
    for length in (3, LONG):
        if transport.rank == 0:
            hear(transport, 1)
            time.sleep(0.08)
            send(transport, np.ones(length), 1)
        elif transport.rank == 1:
            message = transport.prepare_recv(np.zeros(length), 0, CHANNEL)
            message.start()
            tell(transport, 0)
            wait(transport, message)


def check_exchange(transport):
    """Every rank gets every rank's text, in rank order, of any length, again and again."""
    rank, size = transport.rank, transport.size
    texts = ["", "r\u00e4nk \u2603", "x" * 100_000]
    for turn in range(4):
        # The last rank's text sorts first.
        got = transport.exchange(f"{size - rank}:{turn}:{texts[(rank + turn) % 3]}")
        assert got == [f"{size - r}:{turn}:{texts[(r + turn) % 3]}" for r in range(size)]
    assert transport.exchange("") == [""] * size


def check_barrier(transport):
    """Nobody leaves before the last one has come (all ranks of a test read one clock)."""
    for late in range(transport.size):
        if transport.rank == late:
            time.sleep(0.02)
        came = time.monotonic()
        transport.barrier()
        left = time.monotonic()
        seen = [tuple(map(float, text.split())) for text in transport.exchange(f"{came} {left}")]
        assert min(left for _, left in seen) >= max(came for came, _ in seen)


def synchronous_sends_wait(transport):
    """With synchronous sends even a short, even an empty message waits for its receive."""
    for length in (0, 1, 100):
        if transport.rank == 0:
            message = transport.prepare_send(np.ones(length), 1, CHANNEL)
            message.start()
            hear(transport, 1)
            assert not any(message.test(transport.status) for _ in range(50))
            tell(transport, 1)
            wait(transport, message)
        elif transport.rank == 1:
            tell(transport, 0)
            hear(transport, 0)
            recv(transport, np.zeros(length), 0)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
LENT = (check_C073_send_buffer_belongs_to_the_message, check_send_timeout)
"""Checks that a long send waits for its receiver; an emulated link takes a copy instead."""
BUFFERED = [check for check in CHECKS if check not in LENT]


def all_checks(transport, synchronous=False, checks=CHECKS):
    """Run every check; yields the name of each that has passed."""
    for check in checks:
        transport.barrier()
        check(transport)
        yield check.__name__ + (" synchronous" if synchronous else "")
    if synchronous:
        synchronous_sends_wait(transport)
        yield "synchronous_sends_wait"
    transport.barrier()
