"""Numbers that are not finite, and ranks that fail in the middle of a step."""

from __future__ import annotations

import numpy as np
import pytest
from small_jobs import linear_model, make_config, rows_of, run_engine, start_engine, train

import mpisim
from mpisim.comm.local import run_threads
from mpisim.config.schema import OptimizerSection
from mpisim.engine import handlers
from mpisim.errors import ConfigError, MpisimError, PeerLost
from mpisim.launch import Job
from mpisim.nn.models import build_mlp
from mpisim.plan.ops import (
    Backward,
    Forward,
    GatherMetrics,
    LoadBatch,
    OptimizerStep,
    ReduceScalars,
    StartSync,
    WaitSync,
)
from mpisim.train.loop import train_on
from mpisim.train.setup import Setup

# --- numbers that are not finite -------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize(("rank", "micro"), [(0, 0), (1, 1), (2, 0)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_gradient_that_is_not_finite_ends_the_job_without_an_update(bad, rank, micro, optimizer):
    """All ranks see the same norm, so all stop, with weights and moments as they were."""
    good = [rows_of([1.0, 2.0], [3.0, 4.0])] * 2
    broken = [[(x.copy(), y.copy()) for x, y in good] for _ in range(3)]
    broken[rank][micro][0][1, 0] = bad
    kept = [None] * 3

    def prepare(state):
        kept[state.rank] = state

    before = run_engine(
        linear_model(), [[good] * 3], optimizer=OptimizerSection(kind=optimizer, lr=0.01)
    )
    job, outcome = start_engine(
        linear_model(), [[good] * 3, broken], prepare=prepare,
        optimizer=OptimizerSection(kind=optimizer, lr=0.01),
    )  # fmt: skip
    assert sorted(job.errors) == [0, 1, 2]
    assert type(next(iter(job.errors.values()))) is MpisimError
    for error in job.errors.values():
        # A rank may see that another has ended before it has the norm itself.
        if isinstance(error, PeerLost):
            continue
        assert type(error) is MpisimError
        assert str(error).startswith("the gradient norm must be finite; got ")
        assert "No update was made" in str(error) and "optimizer.lr" in str(error)
    assert len(outcome.losses) == 1
    for state, same in zip(kept, before.states, strict=True):
        for name, array in state.params.items():
            assert np.array_equal(array, same.params[name]), name
            for moment, other in zip(state.moments[name], same.moments[name], strict=True):
                assert np.array_equal(moment, other), name


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("kind", ["regression", "text"])
def test_a_run_that_diverges_ends_with_one_clear_error_and_no_warnings(tmp_path, activation, kind):
    """Warnings of NumPy count as errors here: they would surround the one clear line."""
    config = make_config(
        tmp_path, kind, model={"activation": activation, "dtype": "float32"},
        optimizer={"kind": "sgd", "lr": 1e38}, train={"steps": 60},
    )  # fmt: skip
    with pytest.raises(MpisimError, match="(gradient norm|loss) must be finite; got .*No update"):
        train(config, 2)


def test_a_loss_that_is_not_finite_ends_the_job_although_the_gradient_is():
    """Logits of +-3e38 in float32: the softmax saturates, its gradient is 1, its loss infinite."""
    model = build_mlp(
        input_kind="features", num_features=1, hidden=(), activation="relu", output=("classes", 2)
    )
    start = {
        "head.linear.weight": np.zeros((1, 2)),
        "head.linear.bias": np.array([3e38, -3e38]),
    }
    rows = (np.ones((2, 1), np.float32), np.array([0, 1]))
    job, outcome = start_engine(model, [[[rows], [rows]]], start=start)
    first = next(iter(job.errors.values()))
    assert type(first) is MpisimError
    assert str(first).startswith("the loss must be finite; got a sum of inf at step 0. No update")
    for state in outcome.states:
        assert not state.params["head.linear.weight"].any()


def test_a_last_update_that_overflows_is_found_by_the_evaluation(tmp_path):
    """No later gradient would show it; the run must not end as done."""
    config = make_config(
        tmp_path, optimizer={"kind": "sgd", "lr": 1e308, "momentum": 0.0},
        train={"steps": 1}, data={"num_targets": 2},
    )  # fmt: skip
    with pytest.raises(MpisimError, match="the held-out loss must be finite; got .* after step 0"):
        train(config, 2)
    assert not (tmp_path / "runs" / "run" / "summary.json").exists()


def test_an_update_of_zero_by_zero_is_named(tmp_path):
    """Bytes that never occur have zero gradients; without eps their update is 0/0."""
    config = make_config(tmp_path, "text", optimizer={"kind": "adamw", "eps": 0.0})
    with pytest.raises(MpisimError, match=r"the update must be finite; got .*optimizer\.eps"):
        train(config, 2)


# --- ranks that fail -------------------------------------------------------------------------


class MadeUpError(Exception):
    """Raised by a planted handler."""


def plant(monkeypatch, kind, rank, step):
    """Make the handler of `kind` raise on one rank in one step."""
    real = handlers.HANDLERS[kind]

    def broken(state, op):
        if state.rank == rank and state.step.step == step:
            raise MadeUpError(f"rank {rank} step {step}")
        real(state, op)

    monkeypatch.setitem(handlers.HANDLERS, kind, broken)


@pytest.mark.parametrize(
    "kind",
    [
        LoadBatch, Forward, Backward, StartSync, WaitSync, ReduceScalars, OptimizerStep,
        GatherMetrics,
    ],
)  # fmt: skip
@pytest.mark.parametrize(("rank", "step"), [(0, 0), (2, 1)])
def test_a_rank_that_raises_ends_the_job_with_its_own_error(
    tmp_path, monkeypatch, kind, rank, step
):
    """Issue 2, accidents: a rank that raises; nothing hangs, the cause comes first."""
    plant(monkeypatch, kind, rank, step)
    config = make_config(tmp_path, parallel={"bucket_bytes": 1}, train={"steps": 3})
    jobs = [Job(number, 3) for number in range(3)]

    def body(transport):
        train_on(transport, Setup(config, 3), jobs[transport.rank], overwrite=False)

    done = run_threads(body, 3, timeout_s=20.0)
    first = next(iter(done.errors))
    assert first == rank and isinstance(done.errors[rank], MadeUpError)
    assert set(done.errors) == {0, 1, 2}
    for other in {0, 1, 2} - {rank}:
        assert isinstance(done.errors[other], PeerLost)
        assert f"rank {rank}" in str(done.errors[other])
    assert jobs[rank].step == step  # what the failure message names


@pytest.mark.parametrize("synchronous", [False, True])
def test_run_raises_what_the_rank_raised(tmp_path, monkeypatch, synchronous):
    plant(monkeypatch, Backward, 1, 2)
    config = make_config(tmp_path, comm={"synchronous_sends": synchronous})
    with pytest.raises(MadeUpError, match="rank 1 step 2"):
        mpisim.run(config, ranks=3, transport="local")
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2  # the steps before are on disk


def test_data_that_only_one_rank_cannot_read(tmp_path, monkeypatch):
    """The others wait in the first exchange; they are told, not left."""
    import mpisim.train.loop as loop

    config = make_config(tmp_path)
    real = loop.load_data

    def load(config):
        import threading

        if threading.current_thread().name == "rank-1":
            raise ConfigError("data.path must exist; got no such file. Correct it.")
        return real(config)

    monkeypatch.setattr(loop, "load_data", load)

    def body(transport):
        import threading

        threading.current_thread().name = f"rank-{transport.rank}"
        train_on(transport, Setup(config, 3), Job(transport.rank, 3), overwrite=False)

    done = run_threads(body, 3, timeout_s=20.0)
    assert next(iter(done.errors)) == 1 and isinstance(done.errors[1], ConfigError)
    assert isinstance(done.errors[0], PeerLost) and isinstance(done.errors[2], PeerLost)
    assert not (tmp_path / "runs").exists()
