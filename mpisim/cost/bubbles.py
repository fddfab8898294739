"""Pipeline bubbles: closed forms, and compute-only schedules run on a clock of whole numbers.

Messages cost nothing here: what is seen is the schedule alone. A schedule is one list of tasks per
device; a task starts when its device is free and the task it waits for has ended. `reproduce`
compares the clock with published closed forms. Schedules that can run are those of
`plan.schedules`; what is only here (ZB-H2, the V shapes) is published, and not built.

    forward  of chunk c, microbatch i   waits for the forward of chunk c - 1
    backward of chunk c, microbatch i   waits for the backward of chunk c + 1 (last: its forward)
    weight   of chunk c, microbatch i   waits for its backward

Sources: GPipe arXiv 1811.06965; PipeDream-Flush and interleaving arXiv 2104.04473; Zero Bubble
arXiv 2401.10241; V-shaped schedules arXiv 2405.15362.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mpisim.plan.ops import BackwardWeightStage, ForwardStage, Op
from mpisim.plan.schedules import compute_list, lag_weights

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"

SCHEDULES = (
    "naive", "gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "v_min", "v_half", "v_zb",
)  # fmt: skip

_PLANNED = {
    "naive": "naive",
    "gpipe": "gpipe",
    "one_f_one_b": "1f1b",
    "interleaved": "interleaved",
    "zb_h1": "zb-h1",
}
"""Schedule here -> schedule of a plan."""

# Distance between neighbour devices of F down, F up, B down, B up; and of the turns between them.
# A microbatch repeats every 6 units: two chunks, three kinds of task.
_V_OFFSETS = {
    "v_min": ((1, 1, 1, 1), (1, 1, 1)),
    "v_half": ((2, 1, 2, 1), (4, 1, 5)),
    "v_zb": ((3, 3, 3, 3), (1, 1, 1)),
}
_V_PERIOD = 6


@dataclass(frozen=True)
class Task:
    """One unit of compute of a device."""

    kind: str
    """`FORWARD`, `BACKWARD` (of inputs, or of both), `WEIGHT` (gradients of weights, apart)."""
    micro: int
    chunk: int
    """Part of the model, 0..p*v-1 from input to output. Chunk c lives on device c mod p; in a V,
    whose second half comes back, chunk 2p-1-c lives with chunk c."""


@dataclass(frozen=True)
class Timeline:
    """When every task of a schedule ran."""

    spans: tuple[tuple[tuple[Task, int, int], ...], ...]
    """Per device: (task, start, end)."""
    chunks_per_device: int
    keeps_until: str
    """The kind of task that frees a microbatch's activations: backward, or weight."""

    @property
    def makespan(self) -> int:
        """Time from the first start to the last end."""
        return max(device[-1][2] for device in self.spans)

    @property
    def bubble_of_total(self) -> Fraction:
        """Share of all devices' time that is idle."""
        work = sum(end - start for device in self.spans for _, start, end in device)
        return 1 - Fraction(work, self.makespan * len(self.spans))

    @property
    def bubble(self) -> int:
        """Most idle time of a device between its own first start and last end."""
        return max(
            device[-1][2] - device[0][1] - sum(end - start for _, start, end in device)
            for device in self.spans
        )

    @property
    def bubble_over_ideal(self) -> Fraction:
        """Time beyond that of a device that never waits, over that time."""
        ideal = max(sum(end - start for _, start, end in device) for device in self.spans)
        return Fraction(self.makespan - ideal, ideal)

    @property
    def in_flight(self) -> tuple[Fraction, ...]:
        """Per device the most microbatches that are kept at a time, in units of a whole stage."""
        peaks = []
        for device in self.spans:
            live = most = 0
            for task, _, _ in device:
                live += (task.kind == FORWARD) - (task.kind == self.keeps_until)
                most = max(most, live + (task.kind == self.keeps_until))
            peaks.append(Fraction(most, self.chunks_per_device))
        return tuple(peaks)


def compute_lists(schedule: str, p: int, m: int, v: int = 1) -> tuple[tuple[Task, ...], ...]:
    """Return what each device computes, in order.

    Parameters
    ----------
    schedule : str
        One of `SCHEDULES`. naive: one microbatch after the other; zb_h1, zb_h2: the handcrafted
        ones of Zero Bubble, with the gradients of weights as tasks of their own; v_min, v_half,
        v_zb: two chunks a device in a V, p one of 2, 8, 14, 20, ... (others need other offsets).
    p : int
        Devices, >= 1.
    m : int
        Microbatches, >= 1; a multiple of p for interleaved.
    v : int
        Chunks of a device, >= 1; above 1 for interleaved only.

    Raises
    ------
    ValueError
        The schedule is unknown, or a size does not fit it.

    Examples
    --------
    >>> ["".join(f"{t.kind}{t.micro}" for t in tasks) for tasks in compute_lists("gpipe", 2, 2)]
    ['F0F1B0B1', 'F0F1B0B1']
    """
    if schedule not in SCHEDULES:
        raise ValueError(
            f"schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}. Name one of them."
        )
    if min(p, m, v) < 1:
        raise ValueError(f"p, m and v must be at least 1; got {p}, {m}, {v}. Raise the least.")
    if v > 1 and schedule != "interleaved":
        raise ValueError(f"v must be 1 for {schedule}; got {v}. Choose interleaved.")
    if schedule == "interleaved" and m % p:
        # The published order and its closed forms are those of whole groups.
        raise ValueError(f"m must be a multiple of p; got {m} with p = {p}. Raise m.")
    if schedule in _V_OFFSETS:
        if p % _V_PERIOD != 2:
            raise ValueError(f"p must be 2, 8, 14, ... for {schedule}; got {p}. Choose one.")
        return _v_shaped(p, m, *_V_OFFSETS[schedule])
    if schedule == "zb_h2":
        return tuple(_tasks(lag_weights(p, device, m, 2), p, device) for device in range(p))
    return tuple(
        _tasks(compute_list(_PLANNED[schedule], p, device, m, v), p, device) for device in range(p)
    )


def _tasks(ops: Sequence[Op], p: int, device: int) -> tuple[Task, ...]:
    kinds = {ForwardStage: FORWARD, BackwardWeightStage: WEIGHT}
    return tuple(Task(kinds.get(type(op), BACKWARD), op.micro, op.chunk * p + device) for op in ops)


def simulate(
    lists: Sequence[Sequence[Task]], seconds: Mapping[str, int], chunks_per_device: int = 1
) -> Timeline:
    """Run task lists on a clock.

    Parameters
    ----------
    lists : sequence of sequences of Task
        As `compute_lists` returns them.
    seconds : mapping of str to int
        Time of each kind of task; with chunks, of one chunk.
    chunks_per_device : int

    Returns
    -------
    Timeline

    Raises
    ------
    ValueError
        The devices wait for each other for ever.

    Examples
    --------
    >>> line = simulate(compute_lists("one_f_one_b", 4, 8), {"F": 1, "B": 1})
    >>> line.makespan, line.bubble_of_total, [int(n) for n in line.in_flight]
    (22, Fraction(3, 11), [4, 3, 2, 1])
    """
    last_chunk = len(lists) * chunks_per_device - 1
    ended: dict[Task, int] = {}
    spans: list[list[tuple[Task, int, int]]] = [[] for _ in lists]
    free = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for device, tasks in enumerate(lists):
            for task in tasks[len(spans[device]) :]:
                before = _waits_for(task, last_chunk)
                if before is not None and before not in ended:
                    break
                start = max(free[device], ended.get(before, 0))
                free[device] = ended[task] = start + seconds[task.kind]
                spans[device].append((task, start, free[device]))
                moved = True
    stuck = [device for device, tasks in enumerate(lists) if len(spans[device]) < len(tasks)]
    if stuck:
        raise ValueError(
            f"task lists must run to their ends; got devices {stuck} waiting for each other. "
            f"Move the task they wait for forward."
        )
    kept = WEIGHT if any(task.kind == WEIGHT for tasks in lists for task in tasks) else BACKWARD
    return Timeline(tuple(tuple(device) for device in spans), chunks_per_device, kept)


def _waits_for(task: Task, last_chunk: int) -> Task | None:
    if task.kind == FORWARD:
        return Task(FORWARD, task.micro, task.chunk - 1) if task.chunk else None
    if task.kind == WEIGHT:
        return Task(BACKWARD, task.micro, task.chunk)
    if task.chunk == last_chunk:
        return Task(FORWARD, task.micro, task.chunk)
    return Task(BACKWARD, task.micro, task.chunk + 1)


def _v_shaped(
    p: int, m: int, offsets: tuple[int, ...], turns: tuple[int, ...]
) -> tuple[tuple[Task, ...], ...]:
    """Order forwards and backwards by one repeating pattern; weight gradients fill what is idle.

    A forward waits for a weight gradient only where the pattern's own peak would be passed.
    """
    down, up, back_down, back_up = offsets
    orders: list[list[Task]] = []
    limit = 0
    for device in range(p):
        there, back = device, 2 * p - 1 - device
        first = (
            (down * device, Task(FORWARD, 0, there)),
            (down * (p - 1) + turns[0] + up * (p - 1 - device), Task(FORWARD, 0, back)),
            (
                (down + up) * (p - 1) + sum(turns[:2]) + back_down * device,
                Task(BACKWARD, 0, back),
            ),
            (
                (down + up + back_down) * (p - 1) + sum(turns) + back_up * (p - 1 - device),
                Task(BACKWARD, 0, there),
            ),
        )
        slots = {
            start + _V_PERIOD * micro: Task(task.kind, micro, task.chunk)
            for start, task in first
            for micro in range(m)
        }
        limit = max(limit, _pattern_peak(slots))
        orders.append([slots[slot] for slot in sorted(slots)])
    return _fill_with_weights(orders, limit)


def _pattern_peak(slots: Mapping[int, Task]) -> int:
    """Return the most chunks kept if every idle slot takes a weight gradient at once."""
    live = most = waiting = 0
    for slot in range(max(slots) + 1):
        task = slots.get(slot)
        if task is None:
            live -= waiting > 0
            waiting -= waiting > 0
            continue
        live += task.kind == FORWARD
        waiting += task.kind == BACKWARD
        most = max(most, live)
    return most


def _fill_with_weights(orders: list[list[Task]], limit: int) -> tuple[tuple[Task, ...], ...]:
    """Run orders on a clock where each task takes 1; put a weight gradient where one would wait."""
    p = len(orders)
    done: set[Task] = set()
    lists: list[list[Task]] = [[] for _ in range(p)]
    weights: list[list[Task]] = [[] for _ in range(p)]
    reached, live = [0] * p, [0] * p
    while any(weights) or any(reached[d] < len(orders[d]) for d in range(p)):
        started = []
        for d in range(p):
            task = orders[d][reached[d]] if reached[d] < len(orders[d]) else None
            if task is not None:
                before = _waits_for(task, 2 * p - 1)
                full = task.kind == FORWARD and live[d] >= limit
                if full or (before is not None and before not in done):
                    task = None
                else:
                    reached[d] += 1
                    live[d] += task.kind == FORWARD
            if task is None and weights[d]:
                task = weights[d].pop(0)
                live[d] -= 1
            if task is not None:
                started.append((d, task))
        for d, task in started:
            lists[d].append(task)
            done.add(task)
            if task.kind == BACKWARD:
                weights[d].append(Task(WEIGHT, task.micro, task.chunk))
    return tuple(tuple(tasks) for tasks in lists)


# Closed forms ---------------------------------------------------------------------------------


def bubble_over_ideal(p: int, m: int, v: int = 1) -> Fraction:
    """Return (p - 1) / (v m): GPipe and 1F1B with v = 1, interleaved 1F1B with more."""
    return Fraction(p - 1, v * m)


def bubble_of_total(p: int, m: int) -> Fraction:
    """Return (p - 1) / (m + p - 1): GPipe's and 1F1B's share of idle time."""
    return Fraction(p - 1, m + p - 1)


def closed_form(schedule: str, p: int, m: int, v: int = 1) -> Fraction | None:
    """Return the share of idle time of a schedule of a plan; None: no closed form holds.

    Parameters
    ----------
    schedule : str
        Named as in `plan.schedules`.
    p, m, v : int
        Stages, microbatches, chunks of a rank.

    Notes
    -----
    For chunks of equal cost and free messages. interleaved: m a multiple of p. zb-h1: m >= p, and
    forwards, input gradients and weight gradients that take equally long.

    Examples
    --------
    >>> closed_form("1f1b", 4, 8), closed_form("interleaved", 4, 8, 2), closed_form("zb-h1", 4, 3)
    (Fraction(3, 11), Fraction(3, 19), None)
    """
    if schedule == "naive":
        return Fraction(p - 1, p)
    if schedule in ("gpipe", "1f1b") or (schedule == "interleaved" and (v == 1 or m % p == 0)):
        return bubble_of_total(p, v * m)
    if schedule == "zb-h1" and m >= p:
        return bubble_of_total(p, 3 * m)
    return None


def most_in_flight(schedule: str, p: int, m: int, device: int = 0, v: int = 1) -> Fraction:
    """Return the most microbatches that `device` keeps, in units of a whole stage.

    Raises
    ------
    ValueError
        There is no closed form: interleaved beyond device 0, or an unknown schedule.
    """
    if schedule == "naive":
        return Fraction(1)
    if schedule == "gpipe":
        return Fraction(m)
    if schedule == "one_f_one_b":
        return Fraction(min(m, p - device))
    if schedule == "interleaved" and device == 0:
        return min(Fraction(m), p + Fraction(p - 1, v))
    if schedule in ("zb_h1", "zb_h2"):
        return Fraction(min(m, p if schedule == "zb_h1" else 2 * p - 1))
    if schedule in _V_OFFSETS:
        # Qi et al. 2024; for as many microbatches as the pattern needs.
        return Fraction({"v_min": (p + 4) // 3, "v_half": (p + 2) // 2, "v_zb": p}[schedule])
    raise ValueError(
        f"schedule must have a closed form on device {device}; got {schedule!r}. Simulate it."
    )


def zero_bubble_bubble(schedule: str, p: int, f: int, b: int, w: int) -> int:
    """Return the bubble of one_f_one_b, zb_h1 or zb_h2 when a task takes f, b or w (Zero Bubble).

    With enough microbatches, and w not above f and b.
    """
    return (p - 1) * (f + b + {"one_f_one_b": w, "zb_h1": -w, "zb_h2": -2 * w}[schedule])


def crossings(placement: Sequence[int]) -> int:
    """Return how many messages a forward sends when chunk c lives on device ``placement[c]``.

    Examples
    --------
    >>> crossings([0, 1, 2, 3]), crossings([0, 1, 2, 3, 3, 2, 1, 0])
    (3, 6)
    """
    return sum(a != b for a, b in zip(placement, placement[1:], strict=False))
