"""Predicted bytes equal the ledger of a real run, per category and in total, difference 0."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from small_jobs import make_config, train

from mpisim.comm.local import run_threads
from mpisim.engine.state import SCRATCH_BYTES, EngineState
from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.mesh import Mesh
from mpisim.nn.models import build_mlp
from mpisim.nn.precision import Policy
from mpisim.plan.build import build_train_plan
from mpisim.trace.recorder import Recorder
from mpisim.train.setup import Setup, check

OPTIMIZERS = (
    {"kind": "sgd", "momentum": 0.0},
    {"kind": "sgd", "momentum": 0.9},
    {"kind": "adamw"},
)
HIDDEN = ((), (7,), (16, 8))
ACTIVATIONS = ("relu", "tanh", "gelu")
BUCKETS = (1, 500, 1 << 20)


def assert_forecast_is_exact(done):
    for rank in done.summary["ranks"]:
        measured, predicted = rank["memory"], rank["predicted_memory"]
        assert measured["peak"] == predicted["peak"], rank["rank"]
        assert measured["peak_total"] == predicted["peak_total"], rank["rank"]
        assert measured["at_peak"] == predicted["at_peak"], rank["rank"]


@pytest.mark.parametrize("kind", ["regression", "text"])
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_predicted_peaks_are_the_measured_ones(tmp_path, kind, hidden, activation):
    """DESIGN, ledger: exact over M, dp, optimizers, buckets and dtypes; nothing is left over."""
    layouts = list(itertools.product((1, 2, 3), (1, 2, 3, 4)))
    # Each layout meets other optimizers, buckets and dtypes than its neighbours.
    shift = HIDDEN.index(hidden) + 3 * ACTIVATIONS.index(activation)
    for number, (micros, dp) in enumerate(layouts[shift % 2 :: 2], start=shift):
        config = make_config(
            tmp_path, kind,
            model={
                "hidden": list(hidden), "activation": activation,
                "dtype": ("float32", "float64")[number % 2],
            },
            optimizer=OPTIMIZERS[number % 3],
            train={"steps": 2, "global_batch": 72, "num_microbatches": micros},
            parallel={"bucket_bytes": BUCKETS[number // 3 % 3], "overlap": number % 4 > 0},
        )  # fmt: skip
        done = train(config, dp)
        assert_forecast_is_exact(done)
        for rank in done.summary["ranks"]:
            # After the last op only what outlives a step is held.
            live, peak = rank["memory"]["live"], rank["memory"]["peak"]
            assert live["activations"] == 0
            assert live["data"] < peak["data"]
            assert live["temp"] == SCRATCH_BYTES <= peak["temp"]
            for category in ("params", "grads", "optimizer", "comm_buffers"):
                assert live[category] == peak[category]


@pytest.mark.parametrize("kind", ["regression", "text"])
@pytest.mark.parametrize(("dp", "micros"), [(1, 3), (3, 2), (4, 1)])
def test_a_short_last_batch_of_an_epoch(tmp_path, kind, dp, micros):
    """The last batch has 2 rows: some ranks have one, some none; its plan has its own peaks."""
    rows = 2 * 24 + 2
    data = {"num_rows": 52} if kind == "regression" else {"max_bytes": 53, "window": 1}
    config = make_config(
        tmp_path, kind, data=data, model={"hidden": [7]},
        train={"steps": 6, "global_batch": 24, "num_microbatches": micros},
    )  # fmt: skip
    done = train(config, dp)
    assert done.record["data"]["num_train"] == rows
    assert len(done.summary["plans"]) == 3  # full, short, evaluation
    assert_forecast_is_exact(done)


@pytest.mark.parametrize("kind", ["regression", "text"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_an_evaluation_that_is_larger_than_a_step(tmp_path, kind, hidden):
    """The peak is then in a forward of the evaluation, where nothing is saved."""
    data = {"num_rows": 6000} if kind == "regression" else {"window": 2}
    config = make_config(
        tmp_path, kind, data=data, model={"hidden": list(hidden)},
        train={"steps": 1, "global_batch": 3, "eval_every": 1},
    )  # fmt: skip
    for dp in (1, 3):
        done = train(config, dp)
        assert done.evaluations[0]["heldout_rows"] > 20
        assert_forecast_is_exact(done)
        row = 5 * 8 if kind == "regression" else 3
        for rank in done.summary["ranks"]:
            memory = rank["memory"]
            batch = memory["peak"]["data"] - memory["live"]["data"]
            assert batch >= done.evaluations[0]["heldout_rows"] // dp * row > 3 * row


def test_a_run_without_evaluation(tmp_path):
    config = make_config(tmp_path, data={"num_rows": 19}, train={"global_batch": 6})
    done = train(config, 3)
    assert done.evaluations == []
    assert_forecast_is_exact(done)


@pytest.mark.parametrize("algorithm", ["auto", "ring", "recursive_doubling", "halving_doubling"])
@pytest.mark.parametrize("dp", [2, 3, 4])
def test_scratch_of_every_algorithm(tmp_path, algorithm, dp):
    config = make_config(
        tmp_path, model={"hidden": [16, 8]}, parallel={"bucket_bytes": 300},
        train={"steps": 1}, comm={"algorithm": algorithm},
    )  # fmt: skip
    assert_forecast_is_exact(train(config, dp))


def test_a_forecast_by_hand(tmp_path):
    """A7: one rank, 3 features, 5 tanh units, 2 targets, float64, adamw, 24 rows."""
    config = make_config(tmp_path, optimizer={"kind": "adamw"})
    (memory,) = check(config, 1).memory
    params = (3 * 5 + 5 + 5 * 2 + 2) * 8
    assert memory.live["params"] == memory.live["grads"] == params
    assert memory.live["optimizer"] == 2 * params
    # One rank needs no scratch: the scalars (1 + 2 + 1 + 3), its figures, and their collection.
    assert memory.live["comm_buffers"] == (7 + 2 * len(METRIC_NAMES)) * 8
    # Features, targets, and which samples they are.
    assert memory.peak["data"] == 24 * (3 + 2) * 8 + 24 * 8
    # Forward keeps y (24, 5) once for tanh and for the head, and the head the difference (24, 2);
    # the gradient of y comes on top while the head runs backward.
    assert memory.peak["activations"] == 24 * (5 + 2 + 5) * 8
    # Block 0 then holds y and its gradient; it makes the one before tanh and those of its weights.
    assert memory.peak_op == "Backward block=block0 micro=0"
    assert memory.at_peak["activations"] == 24 * (5 + 5) * 8
    assert memory.at_peak["temp"] == SCRATCH_BYTES + 24 * 5 * 8 + (3 * 5 + 5) * 8
    assert memory.peak_total == sum(memory.at_peak.values())


def test_a_forecast_does_not_change_the_live_bytes_of_its_start(tmp_path):
    """Walking a whole step ends where it began."""
    setup = Setup(make_config(tmp_path), 2)
    for plan in (setup.full_plan(), setup.eval_plan(9)):
        forecast = setup.forecast(plan, 0, data_bytes=1000)
        assert forecast.live["activations"] == 0
        assert forecast.live["data"] == 1000 + 8 * sum(plan.rows[0])


def scratch_kept_alive(communicator):
    """Return the bytes of all memory, but the buffers themselves, that programs refer to."""
    owners = {}
    for program in communicator.programs():
        buffers = {buffer.__array_interface__["data"][0] for buffer in program.buffers}
        for message in program.messages:
            array = message._view
            while isinstance(array.base, np.ndarray):
                array = array.base
            if array.__array_interface__["data"][0] not in buffers and array.nbytes:
                owners[array.__array_interface__["data"][0]] = array.nbytes
    return sum(owners.values())


@pytest.mark.parametrize("hidden", [(3, 40), (40, 3), (40, 40), (2, 9, 30)])
@pytest.mark.parametrize("dp", [2, 3])
def test_no_scratch_is_kept_that_the_ledger_does_not_count(hidden, dp):
    """A larger bucket behind a smaller one must not leave the smaller scratch allocated."""
    model = build_mlp(
        input_kind="features", num_features=4, hidden=hidden, activation="relu",
        output=("targets", 1),
    )  # fmt: skip
    plan = build_train_plan(
        mesh=Mesh(dp=dp), specs=lambda rows, length: model.spec(rows, np.dtype("float64"), length),
        rows=((1,),) * dp, dtype="float64", itemsize=8, bucket_bytes=1, overlap=True,
        algorithm="ring",
    )  # fmt: skip

    def body(transport):
        from mpisim.config.schema import OptimizerSection

        state = EngineState(
            model=model, mesh=plan.mesh, transport=transport, optimizer=OptimizerSection(),
            buckets=plan.buckets, seed=0, policy=Policy(*["float64"] * 4), algorithm="ring",
            recorder=Recorder(),
        )  # fmt: skip
        return [
            (scratch_kept_alive(group), group.scratch_bytes) for group in (state.dp, state.control)
        ]

    job = run_threads(body, dp)
    assert not job.errors
    for rank in job.results:
        for kept, counted in rank:
            assert kept == counted
            assert counted or dp == 1


@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_scratch_of_buckets_beyond_the_latency_size(tmp_path, algorithm, dp):
    """Buckets of 96 KiB and of 20 KiB take different algorithms under `auto`."""
    config = make_config(
        tmp_path, data={"num_features": 40, "num_rows": 60}, model={"hidden": [300, 8]},
        parallel={"bucket_bytes": 1}, comm={"algorithm": algorithm}, train={"steps": 1},
    )  # fmt: skip
    assert_forecast_is_exact(train(config, dp))
