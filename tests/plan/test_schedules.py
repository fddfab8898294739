"""Schedules as data: the lists by hand, what they keep, user-made ones, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from mpisim.errors import ConfigError, PlanError
from mpisim.plan.ops import (
    BackwardInputStage,
    BackwardStage,
    BackwardWeightStage,
    ForwardStage,
    LoadBatch,
)
from mpisim.plan.schedules import (
    SCHEDULES,
    accumulate,
    check_compute_lists,
    compute_list,
    compute_lists,
    find_schedule,
    register_schedule,
)

F, B, BI, BW = ForwardStage, BackwardStage, BackwardInputStage, BackwardWeightStage
LETTERS = {F: "F", B: "B", BI: "I", BW: "W"}
BUILT_IN = ("accumulate", "naive", "gpipe", "1f1b", "interleaved", "zb-h1")


def text(ops, num_chunks=1):
    """Return a list as ``F0 B0``, with chunks as ``F0.1 B0.1``."""
    return " ".join(
        f"{LETTERS[type(op)]}{op.micro}" + (f".{op.chunk}" if num_chunks > 1 else "") for op in ops
    )


def chunk_counts(name):
    return (1, 2, 3) if SCHEDULES[name].takes_chunks else (1,)


@pytest.fixture
def own_schedules():
    """Take out again what a test registers."""
    before = dict(SCHEDULES)
    yield
    SCHEDULES.clear()
    SCHEDULES.update(before)


def test_the_built_in_names():
    assert tuple(SCHEDULES) == BUILT_IN
    assert [name for name, found in SCHEDULES.items() if found.takes_chunks] == ["interleaved"]
    assert [name for name, found in SCHEDULES.items() if found.splits_backward] == ["zb-h1"]


@pytest.mark.parametrize(
    ("name", "lists"),
    [
        ("naive", ["F0 B0 F1 B1 F2 B2 F3 B3"] * 3),
        ("gpipe", ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3),
        ("1f1b", [
            "F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3",
        ]),
        ("zb-h1", [
            "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
            "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
            "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
        ]),
    ],
)  # fmt: skip
def test_three_stages_and_four_microbatches_by_hand(name, lists):
    assert [text(ops) for ops in compute_lists(name, 3, 4)] == lists


def test_two_chunks_on_two_ranks_by_hand():
    """Megatron's order: groups of 2 through chunk 0, then chunk 1; 4 and 2 forwards of warm-up."""
    first, second = (text(ops, 2) for ops in compute_lists("interleaved", 2, 4, 2))
    assert first == (
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    )
    assert second == (
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    )


def test_a_group_that_is_not_whole_takes_the_order_of_a_whole_one():
    """3 of 4 microbatches: the lists above without microbatch 3."""
    assert [text(ops, 2) for ops in compute_lists("interleaved", 2, 3, 2)] == [
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 B1.1 F2.1 B0.0 B1.0 B2.1 B2.0",
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 B1.0 F2.1 B2.1 B2.0",
    ]
    assert [text(ops, 2) for ops in compute_lists("interleaved", 4, 1, 2)] == [
        "F0.0 F0.1 B0.1 B0.0"
    ] * 4


@pytest.mark.parametrize(
    ("micros", "warm_ups"), [(8, (3, 2, 1, 0)), (2, (2, 2, 1, 0)), (1, (1, 1, 1, 0))]
)
def test_warm_up_forwards_are_clamped_to_the_microbatches(micros, warm_ups):
    """C090: fewer microbatches than stages."""
    for ops, warm_up in zip(compute_lists("1f1b", 4, micros), warm_ups, strict=True):
        steady = [f"F{warm_up + n} B{n}" for n in range(micros - warm_up)]
        cool_down = [f"B{n}" for n in range(micros - warm_up, micros)]
        warming = [f"F{n}" for n in range(warm_up)]
        assert text(ops) == " ".join(warming + steady + cool_down)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_list_holds_everything_once_in_microbatch_order(name):
    """C092: every backward after the forward of its own microbatch, in the order of forwards."""
    for p, m, v in itertools.product((1, 2, 3, 4, 8), range(1, 10), chunk_counts(name)):
        lists = compute_lists(name, p, m, v)
        check_compute_lists(lists, p, m, v)
        parts = (F, BI, BW) if name == "zb-h1" else (F, B)
        for ops in lists:
            assert len(ops) == len(parts) * m * v
            for kind, chunk in itertools.product(parts, range(v)):
                found = [op.micro for op in ops if type(op) is kind and op.chunk == chunk]
                assert found == list(range(m))


def most(ops, ends):
    """Return the most microbatches between their forward and their op of kind `ends`."""
    alive = [0]
    for op in ops:
        alive.append(alive[-1] + isinstance(op, F) - isinstance(op, ends))
    return max(alive)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_microbatches_in_flight(p):
    """P2: min(N - i, M) in 1F1B, M in GPipe, 1 in naive.

    ZB-H1 keeps to 1F1B's bound until the input part; weight parts lag, and fill every rank up to
    the bound of the first.
    """
    for m, i in itertools.product(range(1, 10), range(p)):
        assert most(compute_list("naive", p, i, m), B) == 1
        assert most(compute_list("gpipe", p, i, m), B) == m
        assert most(compute_list("1f1b", p, i, m), B) == min(p - i, m)
        split = compute_list("zb-h1", p, i, m)
        assert most(split, BI) == min(p - i, m)
        assert most(split, BW) <= min(p, m)
        assert most(split, BW) == min(p, m) or m < p


def test_one_stage_accumulates():
    for name in ("accumulate", "naive", "1f1b", "interleaved"):
        assert compute_lists(name, 1, 3) == [accumulate(3)]
    assert text(accumulate(2)) == "F0 B0 F1 B1"


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_interleaving_one_chunk_is_1f1b(p):
    for m in range(1, 10):
        assert compute_lists("interleaved", p, m) == compute_lists("1f1b", p, m)


# --- names -----------------------------------------------------------------------------------


def all_at_once(num_stages, coordinate, num_microbatches, num_chunks):
    """GPipe with chunks: all forwards of a chunk, then of the next; backwards the other way."""
    micros, chunks = range(num_microbatches), range(num_chunks)
    forwards = [F(micro, chunk) for chunk in chunks for micro in micros]
    backwards = [B(micro, chunk) for chunk in reversed(chunks) for micro in micros]
    return forwards + backwards


def test_a_schedule_of_ones_own(own_schedules):
    made = register_schedule("all-at-once", all_at_once, takes_chunks=True)
    assert find_schedule("all-at-once") is made
    assert text(compute_list("all-at-once", 2, 1, 2, 2), 2) == (
        "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0"
    )
    # The file that registers it may be read again.
    again = register_schedule("all-at-once", all_at_once)
    assert find_schedule("all-at-once") is again
    with pytest.raises(ConfigError, match="chunks must be 1 for schedule all-at-once; got 2"):
        compute_list("all-at-once", 2, 1, 2, 2)


def test_a_schedule_of_ones_own_is_checked_where_it_is_used(own_schedules):
    register_schedule("forgets", lambda p, i, m, v: accumulate(m)[:-1])
    with pytest.raises(PlanError, match="backward of microbatch 1, chunk 0 must run once; got no"):
        compute_list("forgets", 2, 0, 2)
    halves = [F(0), BI(0), BW(0)]
    register_schedule("halves", lambda p, i, m, v: halves)
    with pytest.raises(PlanError, match=r"halves must not split backwards; got BackwardInputStage"):
        compute_list("halves", 2, 1, 1)
    register_schedule("halves", lambda p, i, m, v: halves, splits_backward=True)
    assert compute_list("halves", 2, 1, 1) == halves


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_names_stay(name):
    with pytest.raises(ConfigError, match=f"must not be a built-in one; got '{name}'"):
        register_schedule(name, all_at_once)


def test_what_cannot_be_registered():
    with pytest.raises(ConfigError, match="name of a schedule must be a word; got ' '"):
        register_schedule(" ", all_at_once)
    with pytest.raises(ConfigError, match="schedule mine must be a function; got 3"):
        register_schedule("mine", 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("interleave", r"one of interleaved, .*; got 'interleave'. Did you mean interleaved\?"),
        ("1F1b", r"one of 1f1b, .*; got '1F1b'. Did you mean 1f1b\?"),
        ("zbh1", r"one of zb-h1, .*; got 'zbh1'. Did you mean zb-h1\?"),
        ("???", r"one of .*; got '\?\?\?'. Name one of them, or register yours"),
    ],
)
def test_an_unknown_name_lists_those_that_are_known_nearest_first(name, words):
    with pytest.raises(ConfigError, match=words) as caught:
        find_schedule(name)
    assert all(known in str(caught.value) for known in BUILT_IN)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 0, 0, 4), "number of stages must be at least 1; got 0"),
        (("1f1b", 4, 0, 0), "number of microbatches must be at least 1; got 0"),
        (("interleaved", 4, 0, 4, 0), "number of chunks must be at least 1; got 0"),
        (("1f1b", 4, 4, 4), r"coordinate must be in 0..3; got 4"),
        (("1f1b", 4, -1, 4), r"coordinate must be in 0..3; got -1"),
        (("zb-h1", 4, 0, 4, 2), r"chunks must be 1 for schedule zb-h1; got 2.*\(interleaved\)"),
    ],
)
def test_numbers_that_do_not_fit(arguments, words):
    with pytest.raises(ConfigError, match=words):
        compute_list(*arguments)


# --- the check -------------------------------------------------------------------------------

GOOD = [F(0), F(1), B(0), B(1)]


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([F(0), F(1), B(0)],
         "backward of microbatch 1, chunk 0 must run once; got none in the 3 ops of rank 1"),
        ([F(0), B(0)], "forward of microbatch 1, chunk 0 must run once; got none"),
        ([F(0), F(1), BI(0), BI(1), BW(0)],
         "weight part of microbatch 1, chunk 0 must run once; got none"),
        ([F(0), F(0), F(1), B(0), B(1)],
         r"forward of microbatch 0, chunk 0 must run once; got ForwardStage\(micro=0, chunk=0\) "
         r"as op 1 of rank 1 of the pipeline"),
        ([*GOOD, B(1)], "backward of microbatch 1, chunk 0 must run once; got .* as op 4"),
        ([F(0), F(1), B(0), BI(1), BW(1), BW(1)], "weight part of microbatch 1, .* must run once"),
        ([F(1), F(0), B(0), B(1)],
         "forwards of chunk 0 must run in microbatch order; got .* as op 0 of rank 1 .*before it"),
        ([F(0), F(1), B(1), B(0)], "backwards of chunk 0 must run in microbatch order; .* op 2"),
        ([F(0), F(1), BI(0), BI(1), BW(1), BW(0)],
         "weight parts of chunk 0 must run in microbatch order; got .* as op 4"),
        ([F(0), F(1), BI(0), B(1), BW(0)], "weight parts of chunk 0 must run in microbatch order"),
        ([B(0), F(0), F(1), B(1)],
         "backward of microbatch 0, chunk 0 must follow its forward; got Back.* as op 0 of rank 1"),
        ([F(0), BW(0), BI(0), F(1), B(1)],
         "weight part of microbatch 0, chunk 0 must follow its backward; got .* as op 1"),
        ([F(0, 1), *GOOD], r"chunk of an op must be in 0..0; got ForwardStage\(micro=0, chunk=1\)"),
        ([*GOOD, F(2)], r"microbatch of an op must be in 0..1; got .* as op 4"),
        ([LoadBatch(0), *GOOD],
         "an op of a schedule must be one of ForwardStage, .*; got LoadBatch.* as op 0 of rank 1"),
    ],
)  # fmt: skip
def test_broken_lists_are_refused(ops, words):
    check_compute_lists([GOOD, GOOD], 2, 2)
    with pytest.raises(PlanError, match=words):
        check_compute_lists([GOOD, ops], 2, 2)


def test_whole_and_split_backwards_may_be_mixed():
    check_compute_lists([[F(0), F(1), B(0), BI(1), BW(1)]], 1, 2)


def test_chunks_are_checked_apart():
    lists = [[F(0, 1), F(0, 0), B(0, 0), B(0, 1)]]
    check_compute_lists(lists, 1, 1, 2)
    with pytest.raises(PlanError, match="forward of microbatch 0, chunk 2 must run once; got none"):
        check_compute_lists(lists, 1, 1, 3)


def test_there_must_be_a_list_per_stage():
    with pytest.raises(PlanError, match="a list for each of 3 stages; got 2"):
        check_compute_lists([GOOD, GOOD], 3, 2)
