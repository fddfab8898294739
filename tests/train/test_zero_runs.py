"""Whole runs with sharded state: what they write is what a run without shards writes."""

from __future__ import annotations

import numpy as np
import pytest
from small_jobs import make_config, train

import mpisim.train.summary
from mpisim.comm.local import run_threads
from mpisim.launch import Job
from mpisim.memory.tracker import hook_is_built, open_tracker
from mpisim.train.loop import train_on
from mpisim.train.record import array_digest, digest, joint_digest
from mpisim.train.setup import Setup
from mpisim.train.weights import WEIGHTS_FILE, load_weights

ADAM = {"kind": "adamw", "lr": 0.01, "eps": 1e-6, "clip_norm": 1.0}


def trained(folder, zero, **sections):
    config = make_config(
        folder, run={"name": f"zero-{zero}"}, optimizer=ADAM,
        parallel={"zero": zero, "bucket_bytes": 64}, **sections,
    )  # fmt: skip
    return train(config, 3)


def test_the_weights_of_a_run_and_their_digest_do_not_depend_on_the_stage(tmp_path):
    runs = [trained(tmp_path, zero) for zero in range(4)]
    for run in runs:
        weights, _ = load_weights(run.path / WEIGHTS_FILE)
        assert run.digests == {digest(weights)}
        for name, array in weights.items():
            np.testing.assert_allclose(array, runs[0].params[name], rtol=0, atol=1e-12)
            np.testing.assert_array_equal(array, run.params[name])


def test_a_digest_is_that_of_its_parts():
    params = {"b": np.arange(3.0), "a": np.zeros((2, 2), np.float32)}
    whole = joint_digest({name: array_digest(array) for name, array in params.items()})
    assert digest(params) == digest(dict(reversed(params.items()))) == whole
    assert digest(params | {"a": np.ones((2, 2), np.float32)}) != whole
    assert digest({"a": params["b"], "b": params["a"]}) != whole


@pytest.mark.parametrize("zero", [1, 2])
def test_working_weights_that_drifted_apart_are_found(tmp_path, monkeypatch, zero):
    """Masters are gathered: they cannot tell. The working copies are compared, too."""
    real = mpisim.train.summary._gather_params

    def drifted(state):
        if state.rank == 1:
            state.stores[0].working[0] += 1.0
        return real(state)

    monkeypatch.setattr(mpisim.train.summary, "_gather_params", drifted)
    with pytest.raises(mpisim.errors.PlanError, match="replicas must hold the same bits"):
        trained(tmp_path, zero, precision={"compute": "bfloat16"}, model={"dtype": "float32"})


@pytest.mark.skipif(not hook_is_built(), reason="there is no allocator hook")
def test_the_last_gather_leaves_the_parameters_with_rank_0_only(tmp_path, monkeypatch):
    left = {}
    real = mpisim.train.summary._gather_params

    def watched(state):
        tracker = open_tracker("hook")
        params, digests = real(state)
        left[state.rank] = tracker.live()
        tracker.close()
        return params, digests

    monkeypatch.setattr(mpisim.train.summary, "_gather_params", watched)
    done = trained(tmp_path, 3, model={"hidden": [64]})
    assert left[0] == sum(array.nbytes for array in done.params.values())
    assert left[1] == left[2] == 0


def test_without_the_hook_the_first_steps_are_traced_and_the_others_are_not(tmp_path):
    config = make_config(tmp_path, memory={"measure": "tracemalloc"})
    kinds = []

    def body(transport):
        state, _ = train_on(transport, Setup(config, 1), Job(0, 1), True)
        kinds.append(state.watch.facts())

    job = run_threads(body, 1, timeout_s=20.0)
    assert not job.errors
    (facts,) = kinds
    assert facts["kind"] == "tracemalloc" and facts["steps"] == 2 and not facts["exact"]
    # What it sees beside the ledger are figures about the run.
    assert 0 <= facts["gap_bytes"] < 20_000
    import tracemalloc

    assert not tracemalloc.is_tracing()
