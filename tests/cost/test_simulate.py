"""Plans on a clock: schedules against closed forms and the published clock, small plans by hand."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from mpisim.cost import bubbles
from mpisim.cost.bubbles import closed_form
from mpisim.cost.simulate import CAUSES, Link, simulate_plan, simulate_schedule
from mpisim.errors import DeadlockError
from mpisim.mesh import Mesh
from mpisim.plan.build import Plan
from mpisim.plan.ops import (
    ALL_MICROS,
    Backward,
    BackwardInput,
    BackwardStage,
    BackwardWeight,
    CheckGradients,
    ExchangeTied,
    Forward,
    ForwardStage,
    GatherMetrics,
    GatherParams,
    OptimizerStep,
    RecvActivation,
    RecvGrad,
    ReduceScalars,
    SendActivation,
    SendGrad,
    StartSync,
    StartUnshard,
    WaitSend,
    WaitSync,
    WaitUnshard,
)
from mpisim.plan.schedules import SCHEDULES, register_schedule

BUILT_IN = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1")


def chunk_counts(name):
    return (1, 2, 3) if name == "interleaved" else (1,)


def run(name, p, m, v=1, f=1, b=1, w=0, **options):
    return simulate_schedule(name, p, m, v, forward_s=f, backward_s=b, weight_s=w, **options)


# --- schedules alone -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "m", "b", "makespan", "share", "peaks"),
    [
        (4, 8, 1, 22, Fraction(3, 11), (4, 3, 2, 1)),
        (4, 8, 2, 33, Fraction(3, 11), (4, 3, 2, 1)),
        (8, 32, 2, 117, 1 - Fraction(96, 117), (8, 7, 6, 5, 4, 3, 2, 1)),
    ],
)
def test_the_published_clock_of_1f1b(p, m, b, makespan, share, peaks):
    line = run("1f1b", p, m, b=b)
    assert (line.step_s, line.stall_share, line.in_flight) == (makespan, share, peaks)


@pytest.mark.parametrize(("m", "share"), [(2, Fraction(3, 5)), (1, Fraction(3, 4))])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fewer_microbatches_than_stages(name, m, share):
    """C090."""
    assert run(name, 4, m, b=2).stall_share == closed_form(name, 4, m) == share


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_stall_share_is_the_closed_form(name, p):
    """P14: equal parts for zb-h1; the other forms hold for any."""
    for m, v in itertools.product(range(1, 33), chunk_counts(name)):
        form = closed_form(name, p, m, v)
        line = run(name, p, m, v, w=1)
        if name == "interleaved":
            assert (form is None) == (v > 1 and m % p > 0)
        else:
            assert (form is None) == (name == "zb-h1" and m < p)
        if form is not None:
            assert line.stall_share == form
        if form is not None and name != "zb-h1":
            assert run(name, p, m, v, f=2, b=5).stall_share == form


def test_closed_forms_by_hand():
    assert [closed_form(name, 4, 8, 1) for name in BUILT_IN] == [
        Fraction(3, 4), Fraction(3, 11), Fraction(3, 11), Fraction(3, 11), Fraction(3, 27),
    ]  # fmt: skip
    assert closed_form("interleaved", 4, 8, 2) == Fraction(3, 19)
    assert closed_form("interleaved", 4, 6, 2) is None
    assert closed_form("somebody's own", 4, 8) is None


@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_most_microbatches_in_flight(p):
    for m in range(1, 33):
        assert run("gpipe", p, m).in_flight == (m,) * p
        assert run("naive", p, m).in_flight == (1,) * p
        assert run("1f1b", p, m).in_flight == tuple(min(p - i, m) for i in range(p))
        assert max(run("zb-h1", p, m, w=1).in_flight) == min(p, m)
    for v in (2, 3):
        first = run("interleaved", p, 4 * p, v).in_flight[0]
        assert (
            first == bubbles.most_in_flight("interleaved", p, 4 * p, 0, v) == p + Fraction(p - 1, v)
        )


@pytest.mark.parametrize("p", [2, 4, 8])
def test_interleaving_groups_that_are_not_whole_never_costs(p):
    for m, v in itertools.product(range(1, 2 * p + 2), (2, 3)):
        line = run("interleaved", p, m, v, f=Fraction(1, v), b=Fraction(2, v))
        assert line.step_s <= run("1f1b", p, m, b=2).step_s
        whole = -(-m // p) * p
        assert line.step_s <= run("interleaved", p, whole, v, f=Fraction(1, v), b=Fraction(2, v)
                                  ).step_s  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("naive", "naive"), ("gpipe", "gpipe"), ("1f1b", "one_f_one_b"),
     ("interleaved", "interleaved"), ("zb-h1", "zb_h1")],
)  # fmt: skip
def test_both_clocks_agree_where_messages_are_free(ours, theirs):
    for p, m, v in itertools.product((1, 2, 3, 4), (1, 3, 4, 12), chunk_counts(ours)):
        if ours == "interleaved" and m % p:
            continue
        line = run(ours, p, m, v, f=3, b=4, w=2)
        lists = bubbles.compute_lists(theirs, p, m, v)
        split = any(task.kind == "W" for task in lists[0])
        seconds = {"F": 3, "B": 4, "W": 2} if split else {"F": 3, "B": 6}
        other = bubbles.simulate(lists, seconds, v)
        assert line.step_s == other.makespan
        assert line.stall_share == other.bubble_of_total
        assert line.in_flight == other.in_flight


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_schedule_deadlocks_with_synchronous_sends(name):
    """P2: one frame per boundary and direction, waited for before the next is sent."""
    for p, m, v in itertools.product((2, 3, 4, 8), range(1, 10), chunk_counts(name)):
        line = run(name, p, m, v, w=1, synchronous=True)
        assert all(len(spans) == len(ops) for spans, ops in zip(line.spans, line.ranks,
                                                                strict=True))  # fmt: skip
        # Waiting for a receiver may cost, but never gains.
        assert line.step_s >= run(name, p, m, v, w=1).step_s


def test_a_schedule_that_deadlocks_is_named():
    """Stage 0 wants a gradient of microbatch 0 before it sends 1; stage 1 wants both first."""

    def crossed(p, i, m, v):
        forwards, backwards = [ForwardStage(0), ForwardStage(1)], [BackwardStage(0)]
        if i == 0:
            return [forwards[0], backwards[0], forwards[1], BackwardStage(1)]
        return [*forwards, *backwards, BackwardStage(1)]

    register_schedule("crossed", crossed)
    try:
        with pytest.raises(
            DeadlockError, match=r"got rank 0 at op 2 \(RecvGrad .*rank 1 at op 2 \(RecvActivation"
        ):
            run("crossed", 2, 2)
    finally:
        del SCHEDULES["crossed"]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("latency", [0, 1, Fraction(1, 3)])
def test_every_second_of_every_rank_is_work_or_a_wait(name, latency):
    link = Link(latency, Fraction(10))
    for p, m, v in [(2, 3, 1), (4, 8, 1), (4, 8, 2), (4, 6, 2)]:
        if v in chunk_counts(name):
            line = run(name, p, m, v, f=2, b=2, w=1, link=link, message_bytes=5)
            for waits in line.waits:
                assert set(waits) == set(CAUSES)
                assert sum(waits.values()) == line.step_s - m * v * 5
                assert all(seconds >= 0 for seconds in waits.values())


def test_latency_costs_1f1b_more_than_gpipe():
    """By hand, 2 stages, 8 microbatches, latency 1.

    GPipe pays one hop each way. 1F1B on stage 0 sees B0 at 5, and then runs two microbatches in
    every 6 units: B0, F2, a wait, B1, F3, a wait.
    """
    far = Link(latency_s=1)
    assert run("gpipe", 2, 8, link=far).step_s == 18 + 2
    line = run("1f1b", 2, 8, link=far)
    assert line.step_s == 26
    backwards = [
        start
        for index, start, _ in line.spans[0]
        if isinstance(line.ranks[0][index], BackwardStage)
    ]
    assert backwards == [5, 7, 11, 13, 17, 19, 23, 25]


# --- small plans by hand ---------------------------------------------------------------------


def plan(*ranks, pp=None, stages=()):
    mesh = Mesh(dp=len(ranks) // (pp or len(ranks)), pp=pp or len(ranks))
    return Plan(
        kind="train", mesh=mesh, dtype="float64", algorithm="auto", rows=((1,),) * len(ranks),
        blocks=tuple(name for names in stages for name in names) or ("a",), buckets=(),
        ranks=tuple(map(tuple, ranks)), stages=stages,
    )  # fmt: skip


SECONDS = {Forward: 2, Backward: 3, BackwardInput: 2, BackwardWeight: 1, OptimizerStep: 1}


def seconds(rank, op):
    return SECONDS.get(type(op), 0)


def starts(line, rank):
    return [start for _, start, _ in line.spans[rank]]


def ends(line, rank):
    return [end for _, _, end in line.spans[rank]]


def activation(boundary, micro, peer):
    return SendActivation(boundary, micro, peer, (1,), "none")


def incoming(boundary, micro, peer):
    return RecvActivation(boundary, micro, peer, (1,), "none")


def test_messages_take_their_turn_on_the_link():
    """8 bytes at 2 a second and latency 10: two posted at 0 leave at 4 and 8, are there at 14, 18.

    The third is posted when the first has left; the link is busy till 8.
    """
    line = simulate_plan(
        plan(
            [activation(0, 0, 1), activation(0, 1, 1), WaitSend(0, 0, 1, "activation"),
             activation(0, 2, 1), Forward("a", 3), WaitSend(0, 2, 1, "activation")],
            [incoming(0, 0, 0), Forward("b", 0), incoming(0, 1, 0), Forward("b", 1),
             incoming(0, 2, 0)],
            stages=(("a",), ("b",)),
        ),
        seconds, Link(latency_s=10, bytes_per_s=2), message_bytes=lambda op: 8,
    )  # fmt: skip
    assert ends(line, 0) == [0, 0, 4, 4, 6, 12]
    assert ends(line, 1) == [14, 16, 18, 20, 22]
    assert line.waits[0] == {
        "receive": 0, "send": 4 + 6, "tied": 0, "dp": 0, "control": 0, "end": 10,
    }  # fmt: skip
    assert line.waits[1]["receive"] == 14 + 2 + 2
    assert line.step_s == 22
    assert line.stall_share == Fraction(10 + 18, 44)


def test_directions_and_peers_have_links_of_their_own():
    """Both ends post at 0; rank 1 also posts to rank 2, and no message waits for another."""
    line = simulate_plan(
        plan(
            [activation(0, 0, 1), RecvGrad(0, 0, 1, (1,), "none")],
            [SendGrad(0, 0, 0, (1,), "none"), activation(1, 0, 2), incoming(0, 0, 0)],
            [incoming(1, 0, 1)],
            stages=(("a",), ("b",), ("c",)),
        ),
        seconds, Link(bytes_per_s=1),
        message_bytes=lambda op: 5 if isinstance(op, SendGrad) else 3,
    )  # fmt: skip
    assert [ends(line, rank)[-1] for rank in range(3)] == [5, 3, 3]


def test_synchronous_sends_wait_for_the_receive():
    ranks = (
        [activation(0, 0, 1), WaitSend(0, 0, 1, "activation"), Forward("a", 1)],
        [Forward("b", 1), incoming(0, 0, 0)],
    )
    stages = (("a",), ("b",))
    free = simulate_plan(plan(*ranks, stages=stages), seconds)
    assert starts(free, 0) == [0, 0, 0]
    bound = simulate_plan(plan(*ranks, stages=stages), seconds, synchronous=True)
    assert starts(bound, 0) == [0, 0, 2]


def test_what_deadlocks_with_synchronous_sends_only():
    """Both send two frames before they receive: buffered sends let it pass."""

    def grad(micro):
        return SendGrad(0, micro, 0, (1,), "none")

    ranks = (
        [activation(0, 0, 1), WaitSend(0, 0, 1, "activation"), activation(0, 1, 1),
         RecvGrad(0, 0, 1, (1,), "none"), RecvGrad(0, 1, 1, (1,), "none")],
        [grad(0), WaitSend(0, 0, 0, "grad"), grad(1), incoming(0, 0, 0), incoming(0, 1, 0)],
    )  # fmt: skip
    crossed = plan(*ranks, stages=(("a",), ("b",)))
    assert simulate_plan(crossed, seconds).step_s == 0
    with pytest.raises(DeadlockError, match=r"rank 0 at op 1 \(WaitSend .*rank 1 at op 1 \(Wait"):
        simulate_plan(crossed, seconds, synchronous=True)


TARGETS = ReduceScalars("target_count", 1, "int64")
LOSS = ReduceScalars("loss", 2, "float64")
FLAG = ReduceScalars("non_finite", 1, "int64", "max")


def test_control_sums_are_barriers_before_and_after_the_work():
    """Rank 1 has twice the work; only what follows a rank's last backward counts as its end."""
    update = [LOSS, CheckGradients(), FLAG, OptimizerStep(), GatherMetrics(3)]
    line = simulate_plan(
        plan(
            [TARGETS, Forward("a", 0), Backward("a", 0), *update],
            [Forward("a", 9), TARGETS, Forward("a", 0), Backward("a", 0), Forward("a", 1),
             Backward("a", 1), *update],
            pp=1,
        ),
        seconds, barrier_s=1,
    )  # fmt: skip
    # 2 until rank 1 comes, 1 for each sum and for the figures.
    assert line.waits[0]["control"] == 3
    assert line.waits[1]["control"] == 1
    assert line.waits[0]["end"] == 5 + 3
    assert line.waits[1]["end"] == 3
    assert line.step_s == 2 + 1 + 10 + 2 + 1 + 1
    assert line.stall_share == Fraction(8 + 3, 2 * 17)


def test_a_sum_begins_when_its_whole_group_has_started_it():
    """Two groups of two: ranks 0 and 2, 1 and 3. A group's sums run one after the other."""

    def work(times):
        ops = [Forward("a", micro) for micro in range(times)]
        sums = [StartSync(bucket, ALL_MICROS, 4, "all_reduce") for bucket in (1, 0)]
        return [*ops, *sums, Forward("a", 9), WaitSync(1, ALL_MICROS), WaitSync(0, ALL_MICROS)]

    line = simulate_plan(
        plan(work(1), work(0), work(3), work(5), pp=2, stages=(("a",), ("b",))), seconds,
        sync_seconds=lambda op: 5 if op.bucket else 7,
    )  # fmt: skip
    # Started at 2 and 6, and at 0 and 10: bucket 1 takes 5, bucket 0 then 7.
    assert [ends(line, rank)[-2:] for rank in range(4)] == [
        [11, 18], [15, 22], [11, 18], [15, 22],
    ]  # fmt: skip
    assert [waits["dp"] for waits in line.waits] == [14, 20, 10, 10]
    assert [waits["end"] for waits in line.waits] == [4, 0, 4, 0]


def test_gathers_are_matched_one_by_one():
    """A bucket is gathered twice, then once more after the update; each time both ranks come."""

    def work(first, second):
        return [
            *(Forward("a", micro) for micro in range(first)), StartUnshard(0, 4), WaitUnshard(0),
            *(Forward("a", micro) for micro in range(second)), StartUnshard(0, 4), WaitUnshard(0),
            GatherParams(0, 4), GatherParams(1, 4),
        ]  # fmt: skip

    line = simulate_plan(plan(work(1, 3), work(2, 1), pp=1), seconds, sync_seconds=lambda op: 1)
    assert ends(line, 0) == [2, 2, 5, 7, 9, 11, 11, 12, 13, 14]
    assert line.waits[0]["dp"] == (5 - 2) + 1 + 2
    assert line.waits[1]["dp"] == (5 - 4) + (12 - 7) + 2


def test_both_ends_of_a_tied_table_meet():
    """The bucket has another number on either end."""
    line = simulate_plan(
        plan(
            [Forward("a", 0), ExchangeTied(0, 2, 4, "float64")],
            [Forward("b", 0), Forward("b", 1)],
            [ExchangeTied(3, 0, 4, "float64"), Forward("c", 0)],
            stages=(("a",), ("b",), ("c",)),
        ),
        seconds, sync_seconds=lambda op: 4,
    )  # fmt: skip
    assert [ends(line, rank)[-1] for rank in range(3)] == [6, 4, 8]
    assert [waits["tied"] for waits in line.waits] == [4, 0, 6]
    assert [waits["end"] for waits in line.waits] == [2, 4, 0]


def test_microbatches_in_flight_of_an_expanded_plan():
    """From the first block's forward to the end of the last block's last part, chunk by chunk."""
    ops = [
        Forward("a", 0), Forward("b", 0), Forward("a", 1), Forward("b", 1), Forward("c", 0),
        BackwardInput("c", 0), BackwardInput("b", 0), BackwardInput("a", 0),
        BackwardWeight("c", 0), BackwardWeight("b", 0), Forward("c", 1), BackwardWeight("a", 0),
        Backward("c", 1), Backward("b", 1), Backward("a", 1),
    ]  # fmt: skip
    two_chunks = plan(ops, stages=(("a", "b"), ("c",)))
    # At most: chunk 0 of both microbatches and chunk 1 of one.
    assert simulate_plan(two_chunks, seconds).in_flight == (Fraction(3, 2),)
    assert simulate_plan(plan(ops, stages=(("a", "b", "c"),)), seconds).in_flight == (2,)


def test_a_forward_alone_is_in_flight_while_it_runs():
    line = simulate_plan(plan([Forward("a", 0), Forward("a", 1)]), seconds)
    assert line.in_flight == (1,)


def test_a_plan_with_nothing_to_wait_for():
    line = simulate_plan(plan([]), seconds)
    assert (line.step_s, line.stall_share, line.in_flight) == (0, 0, (0,))


def test_times_in_floating_point():
    """Measured seconds are no fractions."""
    line = simulate_schedule("1f1b", 2, 2, forward_s=0.5, backward_s=1.0, link=Link(0.25))
    assert isinstance(line.stall_share, float)
    assert line.stall_share == pytest.approx(1 - 3.0 / line.step_s)
