"""Schedules on a clock: against closed forms, by hand, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import pytest

from mpisim.cost import bubbles
from mpisim.cost.bubbles import SCHEDULES, Task, compute_lists, crossings, simulate

UNIT = {"F": 1, "B": 1, "W": 1}
SIZES = [(1, 1), (1, 4), (2, 2), (3, 7), (4, 4), (4, 8), (5, 3), (8, 32)]


def chunks(schedule, v=1):
    return 2 if schedule in ("v_min", "v_half", "v_zb") else v


def test_four_stages_and_eight_microbatches_by_hand():
    """Makespan 22, 3/11 of it idle, and 4, 3, 2, 1 microbatches kept."""
    line = simulate(compute_lists("one_f_one_b", 4, 8), {"F": 1, "B": 1})
    assert line.makespan == 22
    assert line.bubble_of_total == Fraction(3, 11)
    assert line.in_flight == (4, 3, 2, 1)
    assert simulate(compute_lists("one_f_one_b", 4, 8), {"F": 1, "B": 2}).makespan == 33
    assert simulate(compute_lists("one_f_one_b", 8, 32), {"F": 1, "B": 2}).makespan == 117
    assert simulate(compute_lists("naive", 4, 8), {"F": 1, "B": 2}).makespan == 4 * 8 * 3


def test_the_first_and_the_last_stage_by_hand():
    lists = compute_lists("one_f_one_b", 3, 4)
    texts = [" ".join(f"{task.kind}{task.micro}" for task in tasks) for tasks in lists]
    assert texts == [
        "F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3",
    ]  # fmt: skip
    spans = simulate(lists, {"F": 1, "B": 2}).spans
    assert [(start, end) for _, start, end in spans[2]] == [
        (2, 3), (3, 5), (5, 6), (6, 8), (8, 9), (9, 11), (11, 12), (12, 14),
    ]  # fmt: skip
    assert spans[0][-1] == (Task("B", 3, 0), 16, 18)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_gpipe_and_1f1b_have_the_same_bubble_and_other_peaks(schedule, p, m):
    for seconds in ({"F": 1, "B": 1}, {"F": 2, "B": 5}):
        line = simulate(compute_lists(schedule, p, m), seconds)
        assert line.bubble_over_ideal == bubbles.bubble_over_ideal(p, m)
        assert line.bubble_of_total == bubbles.bubble_of_total(p, m)
        assert line.makespan == (m + p - 1) * sum(seconds.values())
    for device in range(p):
        assert line.in_flight[device] == bubbles.most_in_flight(schedule, p, m, device)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 2), (4, 16, 4)])
def test_interleaving_divides_the_bubble_and_keeps_more(p, m, v):
    line = simulate(compute_lists("interleaved", p, m, v), {"F": 1, "B": 2}, v)
    assert line.bubble_over_ideal == bubbles.bubble_over_ideal(p, m, v)
    assert line.in_flight[0] == bubbles.most_in_flight("interleaved", p, m, 0, v)
    assert line.in_flight[0] == max(line.in_flight)


def test_interleaving_one_chunk_is_1f1b():
    assert compute_lists("interleaved", 4, 8, 1) == compute_lists("one_f_one_b", 4, 8)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2"])
@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (2, 2, 1), (3, 4, 2), (3, 2, 2)])
@pytest.mark.parametrize(("p", "m"), [(2, 8), (3, 9), (4, 12), (8, 32)])
def test_zero_bubble_schedules_have_their_published_bubbles(schedule, p, m, f, b, w):
    line = simulate(compute_lists(schedule, p, m), {"F": f, "B": b, "W": w})
    assert line.bubble == bubbles.zero_bubble_bubble(schedule, p, f, b, w)
    assert max(line.in_flight) == bubbles.most_in_flight(schedule, p, m)
    base = simulate(compute_lists("one_f_one_b", p, m), {"F": f, "B": b + w})
    assert base.bubble == bubbles.zero_bubble_bubble("one_f_one_b", p, f, b, w)


@pytest.mark.parametrize("p", [2, 8, 14])
@pytest.mark.parametrize(("schedule", "growth"), [("v_min", 4), ("v_half", 3), ("v_zb", 1)])
def test_v_shaped_schedules_keep_what_is_published(schedule, growth, p):
    line = simulate(compute_lists(schedule, p, 4 * p), UNIT, 2)
    assert max(line.in_flight) == max(2, bubbles.most_in_flight(schedule, p, 4 * p))
    # Of 1F1B's 6 (p - 1) units of half a stage: 4, 3 and 1 of 6 for each device that is added.
    more = simulate(compute_lists(schedule, p + 6, 4 * p + 24), UNIT, 2)
    if p > 2:
        assert more.bubble - line.bubble == 6 * growth


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_task_runs_once_on_its_device_and_waits_for_what_it_needs(schedule):
    p, m, v = 8, 16, 2 if schedule == "interleaved" else 1
    lists = compute_lists(schedule, p, m, v)
    kinds = "FBW" if any(task.kind == "W" for task in lists[0]) else "FB"
    per_device = chunks(schedule, v)
    runs = Counter(task for tasks in lists for task in tasks)
    assert runs == Counter(
        Task(kind, micro, chunk)
        for kind in kinds for micro in range(m) for chunk in range(p * per_device)
    )  # fmt: skip
    for device, tasks in enumerate(lists):
        places = {task.chunk for task in tasks}
        back = 2 * p - 1 - device if schedule.startswith("v_") else device + p
        assert places == ({device} if per_device == 1 else {device, back})
    ends = {}
    spans = simulate(lists, {"F": 2, "B": 3, "W": 1}, per_device).spans
    for device in spans:
        for (_, _, end), (_, start, _) in itertools.pairwise(device):
            assert start >= end
        ends |= {task: end for task, _, end in device}
    for device in spans:
        for task, start, _ in device:
            if task.kind == "W":
                assert start >= ends[Task("B", task.micro, task.chunk)]
            elif task.kind == "F" and task.chunk:
                assert start >= ends[Task("F", task.micro, task.chunk - 1)]
            elif task.kind == "B":
                assert start >= ends[Task("F", task.micro, task.chunk)]
                if task.chunk < p * per_device - 1:
                    assert start >= ends[Task("B", task.micro, task.chunk + 1)]


def test_devices_that_wait_for_each_other_are_named():
    lists = [list(tasks) for tasks in compute_lists("one_f_one_b", 2, 2)]
    lists[0].insert(0, lists[0].pop(2))  # its backward before any forward
    with pytest.raises(ValueError, match=r"got devices \[0, 1\] waiting for each other"):
        simulate(lists, UNIT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 4, 8), "schedule must be one of naive, gpipe"),
        (("gpipe", 0, 8), "p, m and v must be at least 1; got 0, 8, 1"),
        (("gpipe", 4, 8, 2), "v must be 1 for gpipe; got 2"),
        (("interleaved", 4, 6, 2), "m must be a multiple of p; got 6 with p = 4"),
        (("v_min", 6, 12), r"p must be 2, 8, 14, ... for v_min; got 6"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        compute_lists(*arguments)


def test_closed_forms_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="Simulate it"):
        bubbles.most_in_flight("interleaved", 4, 8, 1, 2)


def test_a_v_sends_twice_as_much_as_a_chain_and_less_than_a_spiral():
    chain, v, spiral = [0, 1, 2], [0, 1, 2, 2, 1, 0], [0, 1, 2, 0, 1, 2]
    assert (crossings(chain), crossings(v), crossings(spiral)) == (2, 4, 5)
