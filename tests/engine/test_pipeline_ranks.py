"""Pipelines on real processes: what one process learns, in the bits of threads.

One launch of four ranks works through the whole cover; cases of fewer ranks leave some idle.
"""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import numpy as np
import pytest
from mpi_worker import RanksFailed, mpi_run
from pipeline_jobs import (
    ADAMW,
    FACTORS,
    SCHEDULES,
    TIED,
    TOLERANCE,
    Case,
    cover,
    one_process,
    product,
    watch,
    worst_difference,
)
from small_jobs import copies, make_plans, make_state, num_targets

from mpisim.comm.local import run_threads
from mpisim.engine.step import Engine
from mpisim.plan.ops import RecvGrad

pytestmark = pytest.mark.mpi

NUM_RANKS, NUM_CASES = 4, 60
LIMITS = {"pp": (2, 3, 4), "dp": (1, 2)}
CASES, MISSING = cover(
    NUM_CASES, [case for case in product(**LIMITS) if case.dp * case.pp <= NUM_RANKS]
)


class FirstRanks:
    """A job of the first ranks of another one; the others do not take part."""

    def __init__(self, transport: Any, size: int) -> None:
        self._transport, self.size = transport, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def train_case(transport: Any, case: Case, num_steps: int) -> dict[str, Any]:
    """Train one case on all ranks of a transport; return what this rank has learned."""
    model, steps = case.model(), case.steps()[:num_steps]
    plans = make_plans(model, steps, **case.options)
    state = make_state(transport, model, plans[0], optimizer=ADAMW)
    engine = Engine(state, len(steps))
    grads: list[dict[str, np.ndarray]] = []
    state.observe_gradients = grads.append
    losses = []
    for number, (plan, parts) in enumerate(zip(plans, steps, strict=True)):
        mine = parts[transport.rank // case.pp]
        done = engine.train_step(plan, number, copies(mine), num_targets(mine))
        losses.append([done.global_loss_sum / done.global_targets, done.grad_norm])
    params: dict[str, np.ndarray] = {}
    for store in state.stores:
        params |= store.views(store.gather_master())
    want = one_process(case.pp, case.tied, num_steps)
    # Shards of gradients are compared on threads; here what they make of the weights.
    worst = [worst_difference(params, want.gathered[0])]
    if case.zero == 0:
        worst += [worst_difference(*pair) for pair in zip(grads, want.grads, strict=True)]
    for where in state.communicators:
        where.close()
    return {
        "losses": losses, "worst": max(worst),
        "params": {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in params.items()},
        "live": state.ledger.live["activations"] + state.ledger.live["data"],
    }  # fmt: skip


def walk(transport: Any, cases: list, num_steps: int) -> Any:
    """Train one case after the other; yield what this rank learned, None where it was idle."""
    for values in cases:
        values = dict(values, recompute=tuple(values["recompute"]))
        case, found = Case(**values), None
        if transport.rank < case.dp * case.pp:
            found = train_case(FirstRanks(transport, case.dp * case.pp), case, num_steps)
        transport.barrier()
        yield found


def told(cases: list[Case]) -> list[dict[str, Any]]:
    return [case._asdict() for case in cases]


def test_the_cases_cover_all_pairs_of_settings():
    assert not MISSING and len(CASES) <= NUM_CASES
    for name, values in (FACTORS | LIMITS).items():
        assert {getattr(case, name) for case in CASES} == set(values)
    assert {case.dp * case.pp for case in CASES} == {2, 3, 4}


def test_processes_learn_what_one_process_learns():
    """Loss, norm, gradients and weights: float64 within 1e-12; replicas and tied ends bitwise."""
    results = mpi_run(walk, NUM_RANKS, cases=told(CASES), num_steps=1)
    for number, case in enumerate(CASES):
        found = [results[rank][number] for rank in range(case.dp * case.pp)]
        assert all(rank[number] is None for rank in results[len(found) :])
        want = one_process(case.pp, case.tied, 1)
        for rank, entry in enumerate(found):
            assert entry["worst"] <= TOLERANCE, (case, rank)
            right = [list(pair) for pair in zip(want.losses, want.norms, strict=True)]
            np.testing.assert_allclose(entry["losses"], right, rtol=TOLERANCE, err_msg=str(case))
            assert entry["params"] == found[rank % case.pp]["params"], case
            assert entry["live"] == 0
        ends = [entry["params"].get(TIED) for entry in found[:: case.pp]]
        if case.tied:
            ends += [entry["params"][TIED] for entry in found[case.pp - 1 :: case.pp]]
        assert len(set(ends)) == 1, case


def test_processes_give_the_bits_of_threads_under_synchronous_sends():
    """All schedules alike, whoever sends synchronously: no plan needs the library's copies."""
    cases = [Case(schedule=schedule, dp=2) for schedule in SCHEDULES]
    options = {"cases": told(cases), "num_steps": 2}
    threads = run_threads(lambda transport: list(walk(transport, **options)), NUM_RANKS)
    assert not threads.errors, threads.errors
    processes = mpi_run(walk, NUM_RANKS, synchronous=True, **options)
    assert processes == threads.results
    learned = []
    for number in range(len(cases)):
        whole: dict[str, str] = {}
        for rank in processes:
            mine = rank[number]["params"]
            assert (whole | mine).items() == (mine | whole).items()  # replicas and tied ends
            whole |= mine
        learned.append((processes[0][number]["losses"], whole))
    assert all(entry == learned[0] for entry in learned)


def kill_one(transport: Any) -> None:
    """Train; rank 1 is killed in the second step, when it has a gradient in its hands."""

    def act(op: Any) -> None:
        if isinstance(op, RecvGrad) and op.micro == 1 and state.step.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    case = Case(pp=3, micros=4)
    model, steps = case.model(), case.steps()
    plans = make_plans(model, steps, **case.options)
    state = make_state(transport, model, plans[0], optimizer=ADAMW)
    if transport.rank == 1:
        watch(state, act)
    engine = Engine(state, len(steps))
    for number, plan in enumerate(plans):
        engine.train_step(plan, number, copies(steps[number][0]), num_targets(steps[number][0]))
        yield number


def test_a_stage_that_is_killed_ends_the_job_with_one_clear_error(capfd):
    capfd.readouterr()
    with pytest.raises(RanksFailed) as caught:
        mpi_run(kill_one, 3)
    assert caught.value.results == [[0]] * 3  # all had made one step, none the second
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mpisim: ")]
    assert len(lines) == 1
    assert lines[0].startswith("mpisim: rank 1 must run to the end of the job; got its process ")
    assert "killed by signal 9 (SIGKILL)" in lines[0]
