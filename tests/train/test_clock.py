"""One time axis: ranks of one host share a clock; others estimate how far theirs is off."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from small_jobs import make_config, train

import mpisim.train.clock as clock
from mpisim.comm.local import run_threads
from mpisim.trace.store import expand_messages, read_run


@pytest.fixture
def hosts(monkeypatch):
    """Give every rank (thread) a host and a clock of its own; return the settings."""
    mine = threading.local()
    names: list[str] = []
    skews: list[float] = []

    def domain():
        return names[mine.rank]

    def now():
        return time.perf_counter() + skews[mine.rank]

    monkeypatch.setattr(clock, "_clock_domain", domain)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=now, monotonic=time.monotonic))

    def offsets(given, *, synchronous=False):
        names[:] = [name for name, _ in given]
        skews[:] = [skew for _, skew in given]

        def body(transport):
            mine.rank = transport.rank
            offset = clock.clock_offset_s(transport)
            sent, received = (sum(side.values()) for side in (
                transport.counts.sent, transport.counts.received,
            ))  # fmt: skip
            return offset, sent, received

        job = run_threads(body, len(given), synchronous=synchronous)
        assert not job.errors
        return job.results

    return offsets


def test_ranks_of_one_host_have_no_offset_and_send_nothing(hosts):
    assert hosts([("a", 0.0)] * 4) == [(0.0, 0, 0)] * 4


def test_one_rank(hosts):
    assert hosts([("a", 5.0)]) == [(0.0, 0, 0)]


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("skew", [1000.0, -250.0, 0.0])
def test_another_host_finds_its_skew(hosts, skew, synchronous):
    """Its clock is ahead by `skew`: what is to be added is the negative."""
    results = hosts([("a", 3.0), ("b", 3.0 + skew)], synchronous=synchronous)
    assert results[0][0] == 0.0
    # At most half of the shortest round trip, which a busy machine can stretch.
    assert results[1][0] == pytest.approx(-skew, abs=1.0)
    assert results[0][1:] == results[1][1:] == (20, 20)


def test_several_hosts_in_any_order(hosts):
    """Ranks beside rank 0 stay at exactly 0; every far rank asks for itself."""
    results = hosts([("a", 0.0), ("b", 700.0), ("a", 0.0), ("c", -200.0), ("b", 700.0)])
    offsets = [offset for offset, _, _ in results]
    assert offsets[0] == offsets[2] == 0.0
    assert offsets[1] == pytest.approx(-700.0, abs=1.0)
    assert offsets[3] == pytest.approx(200.0, abs=1.0)
    assert offsets[4] == pytest.approx(-700.0, abs=1.0)
    assert [sent for _, sent, _ in results] == [60, 20, 0, 20, 20]


def test_the_shortest_round_trip_decides(monkeypatch):
    """Cristian 1989: of a slow and a fast sample the fast one counts."""

    class Transport:
        def prepare_send(self, *args):
            return SimpleNamespace(start=lambda: None)

        def prepare_recv(self, buffer, *args):
            return SimpleNamespace(start=lambda: next(answers)(buffer))

    # (start, answer, end): a round trip of 10 with a wrong middle, then one of 2 with the right.
    samples = [(0.0, 109.0, 10.0), (20.0, 121.0, 22.0)] + [(40.0, 0.0, 60.0)] * 18
    times = iter([t for start, _, end in samples for t in (start, end)])
    answers = iter([
        lambda buffer, value=value: buffer.__setitem__(0, value) for _, value, _ in samples
    ])  # fmt: skip
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(clock, "_complete", lambda transport, message: None)
    assert clock._ask(Transport()) == 100.0


def test_a_domain_is_a_host_since_its_last_start():
    assert clock._clock_domain() == clock._clock_domain()
    assert clock.host_name() in clock._clock_domain()


def test_the_trace_is_on_the_time_axis_of_rank_0(tmp_path, hosts, monkeypatch):
    """A rank whose clock is 500 s ahead: its receives still follow the sends of rank 0."""
    import mpisim.train.loop as loop
    from mpisim.trace.recorder import Recorder

    monkeypatch.setattr(
        loop, "clock_offset_s", lambda transport: -500.0 if transport.rank == 1 else 0.0
    )
    mine = threading.local()

    class Skewed(Recorder):
        def __init__(self, path=None, header=None):
            mine.skew = 500.0 if header["rank"] == 1 else 0.0
            super().__init__(path, header)

        clock = staticmethod(lambda: time.perf_counter() + mine.skew)

    monkeypatch.setattr(loop, "Recorder", Skewed)
    done = train(make_config(tmp_path), 2)
    traces = read_run(done.path)
    assert [trace.header["clock_offset_s"] for trace in traces] == [0.0, -500.0]
    sends, receives = (
        {
            (row["tag"], row["sequence"]): row
            for row in expand_messages(trace)
            if row["is_send"] == is_send
        }
        for trace, is_send in ((traces[0], True), (traces[1], False))
    )
    assert sends.keys() == receives.keys() and len(sends) > 4
    for key, send in sends.items():
        assert send["posted_s"] <= receives[key]["completed_s"] < send["posted_s"] + 100
