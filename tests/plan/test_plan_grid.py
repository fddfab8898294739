"""A plan as a grid of text: slots by the closed forms and by the clock, marks, what is left out."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
from small_plans import edited, eval_plan, pipeline_plan, removed, train_plan

from mpisim.cost.simulate import simulate_schedule
from mpisim.plan.grid import draw_grid, lay_out
from mpisim.plan.ops import (
    Backward,
    Forward,
    GatherMetrics,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    WaitSend,
)

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1")


def body(text):
    """Return the rows of a grid without the line of slots and the legend."""
    return text.splitlines()[1:-1]


# --- slots -----------------------------------------------------------------------------------


def test_1f1b_of_four_stages_and_eight_microbatches():
    """The bars' own example: 22 slots, share 3/11."""
    plan = pipeline_plan(4, 8, "1f1b")
    assert draw_grid(plan).splitlines() == [
        "  slot    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20 21",
        "  rank 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7",
        "  rank 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7 .",
        "  rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .  B7 .  .",
        "  rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .  .  .",
        "  F forward, B backward, number: microbatch, . idle",
    ]
    assert lay_out(plan).idle_share == Fraction(3, 11)


def test_chunks_are_told_apart_by_a_letter():
    assert body(draw_grid(pipeline_plan(2, 2, "interleaved"))) == [
        "  rank 0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a",
        "  rank 1  .   F0a F1a F0b B0b F1b B1b B0a B1a .",
    ]
    legend = draw_grid(pipeline_plan(2, 2, "interleaved", chunks=3)).splitlines()[-1]
    assert "a..c: chunk of the rank" in legend


def test_halves_of_a_backward_have_slots_of_their_own():
    text = draw_grid(pipeline_plan(2, 2, "zb-h1"))
    assert body(text) == [
        "  rank 0  F0 F1 .  B0 W0 B1 W1",
        "  rank 1  .  F0 B0 F1 B1 W0 W1",
    ]
    assert "B input half of backward, W weight half" in text


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_slots_are_those_of_the_closed_forms(pp, groups):
    """Equal forward, backward and halves; microbatches a multiple of the stages."""
    micros = pp * groups
    shares = {
        "naive": Fraction(pp - 1, pp),
        "gpipe": Fraction(pp - 1, micros + pp - 1),
        "1f1b": Fraction(pp - 1, micros + pp - 1),
        "interleaved": Fraction(pp - 1, 2 * micros + pp - 1),
        "zb-h1": Fraction(pp - 1, 3 * micros + pp - 1),
    }
    for schedule, share in shares.items():
        assert lay_out(pipeline_plan(pp, micros, schedule)).idle_share == share, schedule


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micros", [1, 2, 3, 5, 8])
def test_slots_are_those_of_the_simulation(schedule, micros):
    """Another clock over the same lists, with messages in no time and nothing buffered."""
    for pp in (2, 3, 4):
        chunks = 2 if schedule == "interleaved" else 1
        line = simulate_schedule(
            schedule, pp, micros, chunks, forward_s=1, backward_s=1,
            weight_s=int(schedule == "zb-h1"), synchronous=True,
        )  # fmt: skip
        grid = lay_out(pipeline_plan(pp, micros, schedule))
        assert grid.num_slots == line.step_s
        assert grid.num_chunks == chunks
        for cells, waits in zip(grid.ranks, line.waits, strict=True):
            assert grid.num_slots - len(cells) == sum(waits.values())


def test_what_passes_add_takes_no_slots():
    """Replays, gathers, sums and replicas change nothing; neither do other codecs."""
    plain = body(draw_grid(pipeline_plan(3, 4, "1f1b")))
    full = pipeline_plan(
        3, 4, "1f1b", dp=2, zero=3, prefetch=True, recompute="full", codecs=("int4", "bf16")
    )
    shared = body(draw_grid(full))
    assert [line.split(None, 3)[3] for line in shared] == [line.split(None, 2)[2] for line in plain]
    assert [line.split()[:3] for line in shared] == [
        ["ranks", "0,", "3"], ["ranks", "1,", "4"], ["ranks", "2,", "5"],
    ]  # fmt: skip


def test_replicas_that_run_apart_have_rows_of_their_own():
    plan = pipeline_plan(2, 2, "1f1b", dp=2)
    # Rank 2 runs only the forward of its first microbatch.
    plan = edited(plan, lambda ops: ops.__delitem__(slice(5, None)), ranks=[2])
    names = [re.match(r"  (ranks? [\d, ]*\d)", line)[1] for line in body(draw_grid(plan))]
    assert names == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_many_replicas_are_named_by_their_ends():
    assert body(draw_grid(train_plan([[1]] * 6)))[0].startswith("  ranks 0, 1 .. 5  F0 B0")


def test_a_plan_without_stages_and_an_evaluation_are_drawn():
    assert body(draw_grid(train_plan([[2, 2]]))) == ["  rank 0  F0 B0 F1 B1"]
    assert body(draw_grid(eval_plan([[2, 2]]))) == ["  rank 0  F0 F1"]
    assert body(draw_grid(pipeline_plan(2, 2, "interleaved", kind="eval"))) == [
        "  rank 0  F0a .   F0b F1a .   F1b .",
        "  rank 1  .   F0a .   F0b F1a .   F1b",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_message_is_there_once_and_taken_when_both_are_ready(schedule):
    plan = pipeline_plan(3, 4, schedule)
    grid = lay_out(plan)
    receives = [
        (rank, op.peer, op.micro, isinstance(op, RecvGrad))
        for rank, ops in enumerate(plan.ranks)
        for op in ops
        if isinstance(op, (RecvActivation, RecvGrad))
    ]
    found = [(m.dest, m.source, m.micro, m.kind == "grad") for m in grid.messages]
    assert sorted(found) == sorted(receives)
    for message in grid.messages:
        assert 1 <= message.sent_slot <= message.taken_slot < grid.num_slots
        # The cell that needs it starts when it is taken.
        assert message.taken_slot in {cell.slot for cell in grid.ranks[message.dest]}


def test_two_slots_of_a_rank_never_overlap():
    for schedule in SCHEDULES:
        for cells in lay_out(pipeline_plan(3, 5, schedule)).ranks:
            slots = [cell.slot for cell in cells]
            assert slots == sorted(set(slots))


# --- marks -----------------------------------------------------------------------------------

PLAN = pipeline_plan(2, 3, "1f1b", num_blocks=2)


def marked(plan, rank, index):
    """Return the label that is marked, and check that it is one, on that rank."""
    lines = body(draw_grid(plan, {rank: index}))
    found = [line for line in lines if ">" in line]
    assert len(found) == 1 and found[0].startswith(f"  rank {rank} "), lines
    (label,) = re.findall(r">(\w+)<", found[0])
    # The cell is there once, whichever of its ops the rank stands at.
    assert re.findall(r"\w+", found[0]).count(label) == 1
    return label


def test_the_mark_is_at_the_cell_that_an_op_belongs_to():
    """A receive belongs to the cell behind it, a send and a sum to the one before it."""
    ops = PLAN.ranks[1]
    places = {
        "ReduceScalars": "F0", "LoadBatch": "F0", "RecvActivation": "F0", "Forward": "F0",
        "Backward": "B0", "SendGrad": "B0", "WaitSend": "B1", "StartSync": "B2",
        "ExchangeTied": "B2", "OptimizerStep": "B2", "GatherMetrics": "B2",
    }  # fmt: skip
    seen = set()
    for index, op in enumerate(ops):
        name = type(op).__name__
        if name not in seen:
            seen.add(name)
            assert marked(PLAN, 1, index) == places.get(name, "B2"), op
    assert set(places) <= seen


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_op_has_its_place(schedule, recompute):
    """A block's op is in the cell of its own kind, microbatch and chunk."""
    plan = pipeline_plan(2, 3, schedule, recompute=recompute, num_blocks=4)
    letters = {"Forward": "F", "Backward": "B", "BackwardInput": "B", "BackwardWeight": "W"}
    for rank, ops in enumerate(plan.ranks):
        chunks = plan.chunks(rank)
        for index, op in enumerate(ops):
            label = marked(plan, rank, index)
            letter = letters.get(type(op).__name__)
            if letter is None and type(op).__name__ != "Recompute":
                continue
            chunk = next(n for n, blocks in enumerate(chunks) if op.block in blocks)
            suffix = "ab"[chunk] if len(chunks) > 1 else ""
            assert label == f"{letter or 'B'}{op.micro}{suffix}"


def test_nothing_behind_a_mark_is_drawn_as_done():
    at = PLAN.ranks[0].index(Backward("block0", 0))
    assert body(draw_grid(PLAN, {0: at})) == [
        "  rank 0   F0  F1  .  >B0< .",
        "  rank 1   .   F0  B0  F1  B1",
    ]


def test_marks_of_several_ranks_are_those_of_a_deadlock():
    first = PLAN.ranks[0].index(next(op for op in PLAN.ranks[0] if isinstance(op, RecvGrad)))
    assert body(draw_grid(PLAN, {0: first, 1: 2})) == [
        "  rank 0   F0  F1 >B0<",
        "  rank 1  >F0< .   .",
    ]


def test_only_ranks_that_trade_messages_with_a_marked_one_are_drawn():
    plan = pipeline_plan(2, 3, "1f1b", dp=3)
    lines = body(draw_grid(plan, {3: 4}))
    assert [line.split()[1] for line in lines] == ["2", "3"]


# --- plans that cannot run -------------------------------------------------------------------


def test_what_waits_for_ever_is_left_out():
    last = next(op for op in reversed(PLAN.ranks[0]) if isinstance(op, SendActivation))
    assert body(draw_grid(removed(PLAN, last, ranks=[0]))) == [
        "  rank 0  F0 F1 .  B0 F2 B1",
        "  rank 1  .  F0 B0 F1 B1 .",
    ]


def test_a_send_that_nobody_takes_ends_its_row():
    """As if nothing was buffered: each rank waits at once for what it has sent."""

    def edit(ops):
        waits = {(w.micro, w.kind): w for w in ops if isinstance(w, WaitSend)}
        rest = [op for op in ops if not isinstance(op, WaitSend)]
        ops.clear()
        for op in rest:
            ops.append(op)
            if isinstance(op, (SendActivation, SendGrad)):
                kind = "grad" if isinstance(op, SendGrad) else "activation"
                ops.append(waits[op.micro, kind])

    assert body(draw_grid(edited(PLAN, edit))) == ["  rank 0  F0 F1 .", "  rank 1  .  F0 B0"]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_any_op_may_be_missing_or_twice_or_of_nobody(schedule):
    """Errors draw what they are about: whatever is broken, drawing is not."""
    plan = pipeline_plan(2, 2, schedule, num_blocks=2, dp=2, zero=3)
    for rank in (0, 1):
        for index, op in enumerate(plan.ranks[rank]):
            wrongs = [[], [op, op]]
            for name, value in (("peer", 9), ("micro", -1), ("boundary", 7), ("block", "nobody")):
                if hasattr(op, name):
                    wrongs.append([replace(op, **{name: value})])
            for wrong in wrongs:
                lists = list(plan.ranks)
                lists[rank] = (*lists[rank][:index], *wrong, *lists[rank][index + 1 :])
                broken = replace(plan, ranks=tuple(lists))
                for marks in (None, {rank: index}, {0: index, 1: 0}):
                    assert len(draw_grid(broken, marks).splitlines()) >= 4


def test_ranks_without_ops_are_drawn():
    plan = replace(PLAN, ranks=(PLAN.ranks[0], ()))
    assert body(draw_grid(plan)) == ["  rank 0  F0 F1", "  rank 1  .  ."]
    assert body(draw_grid(plan, {1: -1}))[1] == "  rank 1  .  ."
    draw_grid(replace(PLAN, ranks=((), ())))


# --- width -----------------------------------------------------------------------------------


@cache
def long_plan(pp, schedule):
    return pipeline_plan(pp, 32, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_long_plan_keeps_its_ends_within_the_width(schedule):
    """M = 32 on up to 8 ranks: the middle is left out, start and end are what differs."""
    plan = long_plan(8 if schedule == "1f1b" else 4, schedule)
    lines = draw_grid(plan).splitlines()
    assert max(map(len, lines)) <= 100
    assert all(" ... " in line for line in lines[:-1])
    assert len({line.index("...") for line in lines[:-1]}) == 1
    assert lines[1].split()[2].startswith("F0") and lines[0].split()[1] == "0"
    last = lay_out(plan).num_slots - 1
    assert lines[0].split()[-1] == str(last)
    narrow = draw_grid(plan, width=60).splitlines()[:-1]
    assert max(map(len, narrow)) <= 60 and all(" ... " in line for line in narrow)


def test_a_gap_stands_apart_from_narrow_cells():
    lines = draw_grid(pipeline_plan(4, 8, "naive")).splitlines()[:-1]
    assert all(" ... " in line for line in lines) and max(map(len, lines)) <= 100


def test_a_mark_in_the_middle_is_shown():
    plan = long_plan(8, "1f1b")
    at = plan.ranks[3].index(next(op for op in plan.ranks[3] if op == Forward("block2", 16)))
    lines = draw_grid(plan, {3: at}).splitlines()
    assert max(map(len, lines)) <= 100
    assert ">F16<" in lines[4]
    # What surrounds it, in order, without a gap beside it.
    slots = [word for word in lines[0].split()[1:] if word != "..."]
    assert slots == sorted(slots, key=int)
    cells = lines[4].split()[2:]
    place = cells.index(">F16<")
    assert "..." not in cells[place - 2 : place + 1]


@pytest.mark.parametrize("width", [1, 20, 40])
def test_however_narrow_every_mark_is_shown(width):
    plan = pipeline_plan(4, 8, "1f1b")
    marks = {rank: len(plan.ranks[rank]) // 2 for rank in range(4)}
    lines = body(draw_grid(plan, marks, width=width))
    assert all(len(re.findall(r">\w+<", line)) == 1 for line in lines)


def test_columns_are_aligned():
    """Every cell starts below its slot's number."""
    for plan, marks in (
        (pipeline_plan(4, 8, "zb-h1"), None),
        (pipeline_plan(4, 8, "interleaved"), {2: 60}),
        (long_plan(4, "interleaved"), {2: 160, 3: 100}),
    ):
        lines = draw_grid(plan, marks).splitlines()
        starts = {found.start() for found in re.finditer(r"\d+|\.\.\.", lines[0])}
        for line in lines[1:-1]:
            assert "><" not in line
            cells = re.finditer(r"[FBW]\d+[ab]?|\.\.\.|(?<!\.)\.(?!\.)", line[8:])
            assert {found.start() + 8 for found in cells} <= starts, line


def test_metrics_end_the_grid_too():
    """The last op of a rank marks its last cell."""
    assert isinstance(PLAN.ranks[0][-1], GatherMetrics)
    assert marked(PLAN, 0, len(PLAN.ranks[0]) - 1) == "B2"
    kinds = {type(op) for op in PLAN.ranks[0]}
    assert {WaitSend, SendActivation} <= kinds and SendGrad not in kinds
