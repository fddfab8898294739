"""Small pipelines: cases and their covers, the one process they must equal, what they moved."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from small_jobs import (
    Outcome,
    bits_of,
    cut,
    gradients_are_zero,
    packed_rows,
    run_engine,
    small_decoder,
)

from mpisim.config.schema import OptimizerSection
from mpisim.cost.price import price_rank
from mpisim.engine.state import EngineState
from mpisim.layouts.metrics import CHANNELS, TRAFFIC_FIELDS
from mpisim.nn.models import Model
from mpisim.plan.build import Plan
from mpisim.plan.ops import GatherMetrics

TOLERANCE = 1e-12
ADAMW = OptimizerSection(kind="adamw", lr=0.01, eps=1e-6, weight_decay=0.1, clip_norm=0.5)
SCHEDULES = {"naive": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}
"""Schedule -> chunks of a rank."""
TIED = "embed.tokens.weight"
NUM_ROWS, LENGTH, NUM_STEPS = 37, 3, 2


class Case(NamedTuple):
    """A layout; the model has as many blocks as the most stages on `pp` ranks."""

    pp: int = 2
    schedule: str = "1f1b"
    micros: int = 3
    recompute: tuple[str, int] = ("none", 1)
    tied: bool = True
    dp: int = 1
    zero: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `run_engine`."""
        return {
            "pp": self.pp, "schedule": self.schedule, "chunks": SCHEDULES[self.schedule],
            "recompute": self.recompute[0], "every": self.recompute[1], "zero": self.zero,
        }  # fmt: skip

    def model(self) -> Model:
        return pipeline_model(self.pp, self.tied)

    @property
    def num_steps(self) -> int:
        """One of the deepest pipelines: they take longest."""
        return 1 if self.pp == 8 else NUM_STEPS

    def steps(self) -> list:
        return [cut(rows, self.dp, self.micros) for rows in batches()[: self.num_steps]]


FACTORS: dict[str, tuple[Any, ...]] = {
    "pp": (2, 3, 4, 8),
    "schedule": tuple(SCHEDULES),
    "micros": (1, 2, 3, 4, 8),
    "recompute": (("none", 1), ("selective", 1), ("full", 2)),
    "tied": (True, False),
    "dp": (1, 2, 3, 4),
    "zero": (0, 1, 2, 3),
}


def product(**limits: tuple[Any, ...]) -> list[Case]:
    """Return all cases; with one replica there is nothing to shard."""
    cases = itertools.product(*(FACTORS | limits).values())
    return [case for case in map(Case._make, cases) if case.dp > 1 or case.zero == 0]


def pairs_of(case: Case) -> set[tuple]:
    return set(itertools.combinations(zip(case._fields, case, strict=True), 2))


def cover(count: int, cases: Sequence[Case]) -> tuple[list[Case], set[tuple]]:
    """Return at most `count` of the cases, and the pairs of settings that none of them has.

    Always the same ones: of 60 drawn cases with a missing pair the one that has most that is new,
    with few ranks rather than many.
    """
    draws = random.Random(5)
    having: dict[tuple, list[Case]] = {}
    for case in cases:
        for pair in pairs_of(case):
            having.setdefault(pair, []).append(case)
    missing = set(having)
    chosen: list[Case] = []
    while missing and len(chosen) < count:
        able = having[draws.choice(sorted(missing, key=repr))]
        some = draws.sample(able, min(60, len(able)))
        best = max(some, key=lambda case: (len(missing & pairs_of(case)), -case.pp * case.dp))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen, missing


def pipeline_model(pp: int, tied: bool = True, dropout: float = 0.0) -> Model:
    """Return a decoder of 2 * pp blocks, embedding and head counted."""
    return small_decoder(
        dropout, num_blocks=2 * pp - 2, tied=tied, d_model=4, d_ff=4, max_len=LENGTH
    )


@functools.cache
def batches() -> tuple:
    """Return the rows of each step: a prime number, so that no layout cuts them evenly."""
    return tuple(packed_rows(NUM_ROWS, seed, LENGTH) for seed in range(NUM_STEPS))


@functools.cache
def one_process(pp: int, tied: bool, num_steps: int = NUM_STEPS) -> Outcome:
    """Return what one process learns from whole batches."""
    steps = [cut(rows, 1, 1) for rows in batches()[:num_steps]]
    done = run_engine(pipeline_model(pp, tied), steps, optimizer=ADAMW)
    assert max(done.norms) > ADAMW.clip_norm  # or clipping would be for nothing
    return done


# --- what was learned ------------------------------------------------------------------------


def stage_gradients(done: Outcome, case: Case, step: int) -> list[dict[str, np.ndarray]]:
    """Return the flat gradients of a step of each stage's ranks: shards put together.

    Without shards one dict per rank, with them one per coordinate.
    """
    grads = [steps[step] for steps in done.rank_grads]
    if case.zero == 0:
        return [{name: g.reshape(-1) for name, g in rank.items()} for rank in grads]
    found = []
    for coordinate in range(case.pp):
        replicas = grads[coordinate :: case.pp]
        names = dict.fromkeys(name for rank in replicas for name in rank)
        found.append(
            {
                name: np.concatenate([rank[name] for rank in replicas if name in rank])
                for name in names
            }
        )
    return found


def worst_difference(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """Return the largest ``|got - want| / max(1, |want|)`` of arrays by name."""
    worst = 0.0
    for name, array in got.items():
        right = want[name].reshape(-1)
        flat = array.reshape(-1)
        assert flat.shape == right.shape, name
        worst = max(worst, np.max(np.abs(flat - right) / np.maximum(1.0, np.abs(right))))
    return worst


def assert_learned(done: Outcome, case: Case) -> None:
    """Compare losses, norms, every gradient and all weights with those of one process."""
    want = one_process(case.pp, case.tied, case.num_steps)
    for mine, right in ((done.losses, want.losses), (done.norms, want.norms)):
        for a, r in zip(mine, right, strict=True):
            assert abs(a - r) <= TOLERANCE * max(1.0, abs(r)), case
    for step, right in enumerate(want.grads):
        by_stage = stage_gradients(done, case, step)
        assert set().union(*by_stage) == right.keys(), case
        for grads in by_stage:
            assert worst_difference(grads, right) <= TOLERANCE, (case, step)
    assert set().union(*done.gathered) == want.gathered[0].keys()
    for rank, params in enumerate(done.gathered):
        assert worst_difference(params, want.gathered[0]) <= TOLERANCE, case
        assert bits_of(params) == bits_of(done.gathered[rank % case.pp]), case
    if case.tied:
        assert done.gathered[0][TIED].tobytes() == done.gathered[case.pp - 1][TIED].tobytes()
    for state in done.states:
        assert gradients_are_zero(state)
        assert not any(state.ledger.live[name] for name in ("activations", "data")), case
        assert state.links.idle and state.dp.idle


# --- what was moved --------------------------------------------------------------------------


def watch(state: EngineState, act: Callable[[Any], None]) -> None:
    """Call ``act(op)`` after every op of a rank, beside what is called already."""
    before = state.observe_op

    def observe(op: Any) -> None:
        if before is not None:
            before(op)
        act(op)

    state.observe_op = observe


class Moved:
    """What each rank's transport has moved when its last step ends, by (axis, kind)."""

    def __init__(self) -> None:
        self.ranks: dict[int, dict[tuple[str, str], Any]] = {}

    def prepare(self, state: EngineState) -> None:
        def observe(op: Any) -> None:
            if isinstance(op, GatherMetrics):
                self.ranks[state.rank] = {
                    (where.axis, name): traffic
                    for where in state.communicators
                    for name, traffic in where.traffic().items()
                }

        watch(state, observe)

    def assert_predicted(self, plans: Sequence[Plan], committed: Sequence[bool] = ()) -> None:
        """Compare messages and bytes with the price of all plans: the difference is 0."""
        assert len(self.ranks) == plans[0].mesh.size
        runs = Counter(zip(map(id, plans), committed or [True] * len(plans), strict=True))
        by_id = {id(plan): plan for plan in plans}
        for rank, measured in self.ranks.items():
            want: Counter[tuple] = Counter()
            for (plan, made), times in runs.items():
                for channel, fields in price_rank(by_id[plan], rank, made).items():
                    want.update({(*channel, name): times * n for name, n in fields.items()})
            got = Counter(
                {
                    (*channel, name): getattr(traffic, name)
                    for channel, traffic in measured.items()
                    for name in TRAFFIC_FIELDS
                }
            )
            assert +got == +want, rank
            assert {key[:2] for key in +got} <= set(CHANNELS)


def learn(case: Case, **options: Any) -> Outcome:
    """Train a case, and see that what it moved is what was predicted."""
    moved = Moved()
    done = run_engine(
        case.model(), case.steps(), optimizer=ADAMW, prepare=moved.prepare, **case.options | options
    )
    moved.assert_predicted(done.plans)
    return done
