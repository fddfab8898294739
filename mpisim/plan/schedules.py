"""Schedules: the order of forwards and backwards on every stage, compute only.

A schedule is a function of (num_stages, coordinate, num_microbatches, num_chunks) that returns the
list of one rank: the one at `coordinate` of axis pp. Chunk c of that rank is stage
c * num_stages + coordinate of the model. Messages, recompute and gradient sync are added by passes;
`check_compute_lists` proves what every list must keep, also one a user made.

Forwards, backwards and weight parts of one chunk run in microbatch order in all of them: gradients
are added in the same order, so that all schedules give the same bits.

Sources: GPipe arXiv 1811.06965; PipeDream-Flush (1F1B) and interleaving arXiv 2104.04473; Zero
Bubble (ZB-H1) arXiv 2401.10241.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpisim.errors import ConfigError, PlanError
from mpisim.plan.ops import (
    BackwardInputStage,
    BackwardStage,
    BackwardWeightStage,
    ForwardStage,
    Op,
)

ScheduleFunction = Callable[[int, int, int, int], list[Op]]
"""(num_stages, coordinate, num_microbatches, num_chunks) -> what that rank computes, in order."""


@dataclass(frozen=True)
class Schedule:
    """A schedule under its name."""

    name: str
    """As in the config."""
    function: ScheduleFunction
    takes_chunks: bool = False
    """A rank may hold more than one chunk of the model."""
    splits_backward: bool = False
    """Backwards come as `BackwardInputStage` and `BackwardWeightStage`."""


# The lists ------------------------------------------------------------------------------------


def accumulate(num_microbatches: int) -> list[Op]:
    """Forward and backward of one microbatch after the other: one is alive at a time.

    Examples
    --------
    >>> [type(op).__name__ + str(op.micro) for op in accumulate(2)]
    ['ForwardStage0', 'BackwardStage0', 'ForwardStage1', 'BackwardStage1']
    """
    return _alternate(num_microbatches, 1)


def naive(num_stages: int, coordinate: int, num_microbatches: int, num_chunks: int) -> list[Op]:
    """One microbatch after the other passes all stages, there and back: one stage works at a time.

    ::

        stage 0   F0          B0 F1          B1
        stage 1      F0    B0       F1    B1
        stage 2         F0B0           F1B1
    """
    return accumulate(num_microbatches)


def gpipe(num_stages: int, coordinate: int, num_microbatches: int, num_chunks: int) -> list[Op]:
    """All forwards, then all backwards: every stage keeps all microbatches."""
    return _alternate(num_microbatches, num_microbatches)


def one_f_one_b(
    num_stages: int, coordinate: int, num_microbatches: int, num_chunks: int
) -> list[Op]:
    """Run warm-up forwards, then one forward and one backward in turn, then what is left.

    Warm-up is one forward for every stage that follows, or all there are: at most
    min(num_stages - coordinate, num_microbatches) microbatches are alive.
    """
    return _alternate(num_microbatches, num_stages - coordinate)


def interleaved(
    num_stages: int, coordinate: int, num_microbatches: int, num_chunks: int
) -> list[Op]:
    """1F1B over several chunks a rank: groups of microbatches take one chunk after the other.

    Notes
    -----
    The published order is for whole groups of `num_stages` microbatches. Any other number takes
    the order of the next whole one without the microbatches that do not exist: what is left waits
    for less, so it cannot deadlock where the whole one does not.
    """
    if num_chunks == 1:
        return one_f_one_b(num_stages, coordinate, num_microbatches, 1)
    order = [
        (first + place, chunk)
        for first in range(0, num_microbatches, num_stages)
        for chunk in range(num_chunks)
        for place in range(num_stages)
    ]
    forwards = [ForwardStage(micro, chunk) for micro, chunk in order]
    backwards = [BackwardStage(micro, num_chunks - 1 - chunk) for micro, chunk in order]
    # Twice the distance of 1F1B, and a group through all chunks but the last.
    ahead = 2 * (num_stages - coordinate - 1) + (num_chunks - 1) * num_stages + 1
    ops: list[Op] = forwards[:ahead]
    for number, backward in enumerate(backwards):
        ops += [backward, *forwards[ahead + number : ahead + number + 1]]
    return [op for op in ops if op.micro < num_microbatches]


def zb_h1(num_stages: int, coordinate: int, num_microbatches: int, num_chunks: int) -> list[Op]:
    """1F1B with the gradients of weights apart, run where a rank would wait.

    Notes
    -----
    Forwards run ahead of input gradients as in 1F1B. Weight gradients lag `coordinate` microbatches
    behind, so that every rank keeps as many as the first: at most min(num_stages,
    num_microbatches) until their weight gradients are there. With no more than 1F1B keeps on each
    rank, the last would run F, B, W of one microbatch after the other, and the bubble would be
    (num_stages - 1) (F + B) in place of (num_stages - 1) (F + B - W).
    """
    return lag_weights(num_stages, coordinate, num_microbatches, 1)


def lag_weights(num_stages: int, coordinate: int, num_microbatches: int, reach: int) -> list[Op]:
    """Return ZB-H1 (`reach` 1) or ZB-H2 (2), which keeps nearly twice as much and never waits.

    Rank d runs reach * (num_stages - d) forwards ahead, one less per turn beyond the first, and
    its weight gradients lag reach * d microbatches behind.
    """
    ahead = min(num_microbatches, reach * (num_stages - coordinate) - (reach - 1))
    lag = reach * coordinate
    ops: list[Op] = [ForwardStage(micro) for micro in range(ahead)]
    for micro in range(num_microbatches):
        ops.append(BackwardInputStage(micro))
        if micro >= lag:
            ops.append(BackwardWeightStage(micro - lag))
        if ahead + micro < num_microbatches:
            ops.append(ForwardStage(ahead + micro))
    rest = range(max(0, num_microbatches - lag), num_microbatches)
    return ops + [BackwardWeightStage(micro) for micro in rest]


def _alternate(num_microbatches: int, ahead: int) -> list[Op]:
    """Run `ahead` forwards before the first backward, then one of each in turn."""
    ops: list[Op] = [ForwardStage(micro) for micro in range(min(ahead, num_microbatches))]
    for micro in range(num_microbatches):
        ops.append(BackwardStage(micro))
        if ahead + micro < num_microbatches:
            ops.append(ForwardStage(ahead + micro))
    return ops


# Names ----------------------------------------------------------------------------------------

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("accumulate", naive),
        Schedule("naive", naive),
        Schedule("gpipe", gpipe),
        Schedule("1f1b", one_f_one_b),
        Schedule("interleaved", interleaved, takes_chunks=True),
        Schedule("zb-h1", zb_h1, splits_backward=True),
    )
}
"""Name -> schedule: the built-in ones, and those that were registered. accumulate is naive on one
stage."""

BUILT_IN = frozenset(SCHEDULES)


def register_schedule(
    name: str,
    function: ScheduleFunction,
    *,
    takes_chunks: bool = False,
    splits_backward: bool = False,
) -> Schedule:
    """Make a schedule known under `name`.

    Parameters
    ----------
    name : str
        Not one of the built-in names. A name that was registered before now means this one, so
        that a file which registers it may be read again.
    function : callable
        See `ScheduleFunction`. It must not depend on anything but its arguments: every rank builds
        the lists of all.
    takes_chunks, splits_backward : bool
        See `Schedule`.

    Raises
    ------
    ConfigError
        The name is empty or built in, or `function` cannot be called.

    Examples
    --------
    >>> from mpisim.plan.ops import BackwardStage, ForwardStage
    >>> def two_ahead(num_stages, coordinate, num_microbatches, num_chunks):
    ...     forwards = [ForwardStage(micro) for micro in range(num_microbatches)]
    ...     backwards = [BackwardStage(micro) for micro in range(num_microbatches)]
    ...     return forwards[:2] + [
    ...         op for pair in zip(backwards, forwards[2:]) for op in pair
    ...     ] + backwards[max(0, num_microbatches - 2):]
    >>> register_schedule("two-ahead", two_ahead).name
    'two-ahead'
    >>> [op.micro for op in compute_lists("two-ahead", 2, 4)[0]]
    [0, 1, 0, 2, 1, 3, 2, 3]
    >>> del SCHEDULES["two-ahead"]
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(
            f"name of a schedule must be a word; got {name!r}. Give one, as it will stand in the "
            f"config."
        )
    if name in BUILT_IN:
        raise ConfigError(
            f"name of a schedule must not be a built-in one; got {name!r}. Choose another name."
        )
    if not callable(function):
        raise ConfigError(
            f"schedule {name} must be a function; got {function!r}. Give one of (num_stages, "
            f"coordinate, num_microbatches, num_chunks)."
        )
    SCHEDULES[name] = Schedule(name, function, takes_chunks, splits_backward)
    return SCHEDULES[name]


def find_schedule(name: str) -> Schedule:
    """Return the schedule of a name.

    Raises
    ------
    ConfigError
        No schedule has that name; the text lists those that are known, nearest first.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]

    def unlikeness(known: str) -> float:
        return -difflib.SequenceMatcher(None, str(name).lower(), known.lower()).ratio()

    known = sorted(SCHEDULES, key=unlikeness)
    fix = "Name one of them, or register yours (register_schedule)."
    if unlikeness(known[0]) <= -0.5:
        fix = f"Did you mean {known[0]}?"
    raise ConfigError(f"schedule must be one of {', '.join(known)}; got {name!r}. {fix}")


def compute_list(
    name: str, num_stages: int, coordinate: int, num_microbatches: int, num_chunks: int = 1
) -> list[Op]:
    """Return what the rank at `coordinate` computes, in order.

    Parameters
    ----------
    name : str
        One of `SCHEDULES`.
    num_stages : int
        Degree of axis pp, >= 1.
    coordinate : int
        Place on axis pp.
    num_microbatches : int
        At least 1; fewer than stages works.
    num_chunks : int
        Chunks of every rank, >= 1; above 1 only if the schedule takes chunks.

    Raises
    ------
    ConfigError
        The name is unknown, or a number does not fit.
    PlanError
        The list breaks a rule of `check_compute_lists`, or splits backwards though the schedule
        does not say so.
    """
    schedule = find_schedule(name)
    for what, number in (
        ("stages", num_stages), ("microbatches", num_microbatches), ("chunks", num_chunks),
    ):  # fmt: skip
        if number < 1:
            raise ConfigError(f"number of {what} must be at least 1; got {number}. Raise it.")
    if not 0 <= coordinate < num_stages:
        raise ConfigError(
            f"coordinate must be in 0..{num_stages - 1}; got {coordinate}. Name a rank of the "
            f"pipeline."
        )
    if num_chunks > 1 and not schedule.takes_chunks:
        takers = ", ".join(known.name for known in SCHEDULES.values() if known.takes_chunks)
        raise ConfigError(
            f"chunks must be 1 for schedule {name}; got {num_chunks}. Set them to 1, or choose a "
            f"schedule that takes chunks ({takers})."
        )
    try:
        ops = list(schedule.function(num_stages, coordinate, num_microbatches, num_chunks))
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise PlanError(
            f"schedule {name} must return a list of ops; got {type(error).__name__}: {error} for "
            f"rank {coordinate} of {num_stages} with {num_microbatches} microbatches. Correct its "
            f"function."
        ) from error
    _check_list(coordinate, ops, num_microbatches, num_chunks)
    split = next((op for op in ops if isinstance(op, BackwardInputStage)), None)
    if split is not None and not schedule.splits_backward:
        raise PlanError(
            f"schedule {name} must not split backwards; got {split} on rank {coordinate} of the "
            f"pipeline. Register it with splits_backward = True."
        )
    return ops


def compute_lists(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> list[list[Op]]:
    """Return what every rank of a pipeline computes: `compute_list` for all coordinates."""
    return [
        compute_list(name, num_stages, coordinate, num_microbatches, num_chunks)
        for coordinate in range(num_stages)
    ]


# The check ------------------------------------------------------------------------------------

_PARTS: dict[type[Op], tuple[str, ...]] = {
    ForwardStage: ("forward",),
    BackwardStage: ("backward", "weight part"),
    BackwardInputStage: ("backward",),
    BackwardWeightStage: ("weight part",),
}
"""What an op of a schedule computes; a whole backward is both parts."""

_BEFORE = {"backward": "forward", "weight part": "backward"}


def check_compute_lists(
    lists: Sequence[Sequence[Op]], num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> None:
    """Prove that compute lists hold everything once and in an order that can be run.

    Every (microbatch, chunk) runs forward once and backward once, whole or in two parts, each part
    behind what it needs of its own rank; the forwards of a chunk run in microbatch order, so do its
    backwards and its weight parts.
    That ranks do not wait for each other for ever is proved by `check_plan`, with their messages.

    Raises
    ------
    PlanError
        A rule is broken; the text names the rank (its place on axis pp) and the op.
    """
    if len(lists) != num_stages:
        raise PlanError(
            f"a schedule must have a list for each of {num_stages} stages; got {len(lists)}. "
            f"Return one per coordinate."
        )
    for rank, ops in enumerate(lists):
        _check_list(rank, ops, num_microbatches, num_chunks)


def _check_list(rank: int, ops: Sequence[Op], num_microbatches: int, num_chunks: int) -> None:
    parts = dict.fromkeys(part for kinds in _PARTS.values() for part in kinds)
    done = {(part, chunk): 0 for part in parts for chunk in range(num_chunks)}
    for place, op in enumerate(ops):
        rule, fix = _broken_rule(op, done, num_microbatches, num_chunks)
        if rule:
            raise PlanError(f"{rule}; got {op} as op {place} of rank {rank} of the pipeline. {fix}")
        for part in _PARTS[type(op)]:
            done[part, op.chunk] += 1
    for (part, chunk), reached in done.items():
        if reached < num_microbatches:
            raise PlanError(
                f"{part} of microbatch {reached}, chunk {chunk} must run once; got none in the "
                f"{len(ops)} ops of rank {rank} of the pipeline. Add it."
            )


def _broken_rule(
    op: Op, done: dict[tuple[str, int], int], num_microbatches: int, num_chunks: int
) -> tuple[str, str]:
    """Return the rule that an op breaks and what to do, or nothing; `done` counts what ran."""
    if type(op) not in _PARTS:
        names = ", ".join(kind.__name__ for kind in _PARTS)
        return f"an op of a schedule must be one of {names}", "Leave all others to the passes."
    for what, number, end in (
        ("microbatch", op.micro, num_microbatches),
        ("chunk", op.chunk, num_chunks),
    ):
        if type(number) is not int or not 0 <= number < end:
            return f"{what} of an op must be in 0..{end - 1}", "Name one of these."
    where = f"microbatch {op.micro}, chunk {op.chunk}"
    for part in _PARTS[type(op)]:
        reached, before = done[part, op.chunk], _BEFORE.get(part)
        if op.micro < reached:
            return f"{part} of {where} must run once", "Take it out."
        if op.micro > reached:
            rule = f"{part}s of chunk {op.chunk} must run in microbatch order"
            return rule, f"Put that of microbatch {reached} before it."
        ready = before is None or before in _PARTS[type(op)] or done[before, op.chunk] > op.micro
        if not ready:
            return f"{part} of {where} must follow its {before}", "Move it behind."
    return "", ""
