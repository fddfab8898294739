"""What the engine keeps between ops: buckets, optimizer state, plans, the update count."""

from __future__ import annotations

import numpy as np
import pytest
from small_jobs import FLOAT64, assert_close, linear_model, rows_of, run_engine, start_engine

from mpisim.comm.local import run_threads
from mpisim.config.schema import OptimizerSection
from mpisim.engine.state import EngineState, num_optimizer_arrays
from mpisim.engine.step import Engine
from mpisim.errors import BatchError
from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.mesh import Mesh
from mpisim.nn.models import build_mlp
from mpisim.nn.precision import Policy
from mpisim.plan.build import build_eval_plan, build_train_plan
from mpisim.trace.recorder import Recorder

MODEL = build_mlp(
    input_kind="features", num_features=2, hidden=(3, 2), activation="relu", output=("targets", 1)
)


def specs(rows, length=None):
    return MODEL.spec(rows, np.dtype("float64"), length)


def plan_of(rows, bucket_bytes=1 << 20, kind="train"):
    rows = tuple(map(tuple, rows))
    mesh = Mesh(dp=len(rows))
    if kind == "eval":
        return build_eval_plan(mesh=mesh, specs=specs, rows=rows, dtype="float64", algorithm="auto")
    return build_train_plan(
        mesh=mesh, specs=specs, rows=rows, dtype="float64", itemsize=8,
        bucket_bytes=bucket_bytes, overlap=True, algorithm="auto",
    )  # fmt: skip


def state_on(transport, plan, **optimizer):
    return EngineState(
        model=MODEL, mesh=plan.mesh, transport=transport,
        optimizer=OptimizerSection(**{"kind": "sgd", "lr": 0.1} | optimizer),
        buckets=plan.buckets, seed=0, policy=Policy(*["float64"] * 4), algorithm="auto",
        recorder=Recorder(),
    )  # fmt: skip


def rows(count, seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 2)), rng.standard_normal((count, 1))


def on_one_rank(body):
    job = run_threads(body, 1)
    for error in job.errors.values():
        raise error
    return job.results[0]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_gradients_are_views_into_the_buckets(bucket_bytes):
    """A5: nothing is copied between a gradient and what is sent."""

    def body(transport):
        plan = plan_of([[2]], bucket_bytes)
        state = state_on(transport, plan)
        assert len(state.buckets) == len(plan.buckets)
        assert state.grads.keys() == state.params.keys()
        for bucket, flat in zip(plan.buckets, state.buckets, strict=True):
            flat[:] = np.arange(bucket.count)
            for name, (lo, hi) in bucket.offsets().items():
                grad = state.grads[name]
                assert grad.shape == state.params[name].shape
                assert np.shares_memory(grad, flat)
                assert grad.ravel().tolist() == list(range(lo, hi))
        return True

    assert on_one_rank(body)


@pytest.mark.parametrize(
    ("settings", "arrays"),
    [
        ({"kind": "sgd", "momentum": 0.0}, 0),
        ({"kind": "sgd", "momentum": 0.9}, 1),
        ({"kind": "adamw"}, 2),
        ({"kind": "adamw", "momentum": 0.0}, 2),
    ],
)
def test_optimizer_state(settings, arrays):
    def body(transport):
        return state_on(transport, plan_of([[2]]), **settings)

    state = on_one_rank(body)
    assert num_optimizer_arrays(settings["kind"], settings.get("momentum", 0.9)) == arrays
    for name, param in state.params.items():
        assert len(state.moments[name]) == arrays
        for moment in state.moments[name]:
            assert moment.shape == param.shape and not moment.any()
    assert state.ledger.live["optimizer"] == arrays * state.ledger.live["params"]


def test_an_evaluation_changes_nothing_and_counts_no_update():
    """Parameters, gradients and the update count stay; loss and count are exact."""

    def body(transport):
        plan, evaluation = plan_of([[2]]), plan_of([[3, 2]], kind="eval")
        state = state_on(transport, plan, kind="adamw", warmup_steps=5)
        engine = Engine(state, 5)
        rates = [engine.train_step(plan, 0, lambda micro: rows(2, 1)).lr]
        before = {name: array.copy() for name, array in state.params.items()}
        grads = [flat.copy() for flat in state.buckets]
        done = engine.evaluate(evaluation, 0, lambda micro: rows(3 - micro, 2 + micro))
        assert done.global_targets == 5 and done.global_loss_sum > 0
        assert state.committed == 1
        assert_close(state.params, before, 0.0)
        assert all(map(np.array_equal, state.buckets, grads))
        assert state.ledger.live["activations"] == 0
        rates.append(engine.train_step(plan, 1, lambda micro: rows(2, 1)).lr)
        return rates

    assert on_one_rank(body) == pytest.approx([1e-1 / 5, 2e-1 / 5])


def test_the_loss_of_an_evaluation_is_that_of_a_step_on_the_same_rows():
    def body(transport):
        plan, evaluation = plan_of([[4]]), plan_of([[4]], kind="eval")
        engine = Engine(state_on(transport, plan), 1)
        evaluated = engine.evaluate(evaluation, 0, lambda micro: rows(4, 3))
        trained = engine.train_step(plan, 0, lambda micro: rows(4, 3))
        return evaluated.global_loss_sum, trained.global_loss_sum

    evaluated, trained = on_one_rank(body)
    assert evaluated == trained


def test_an_evaluation_between_steps_does_not_change_the_training():
    def train(evaluate):
        def body(transport):
            plan, evaluation = plan_of([[2]]), plan_of([[9]], kind="eval")
            engine = Engine(state_on(transport, plan), 4)
            for step in range(4):
                engine.train_step(plan, step, lambda micro, step=step: rows(2, step))
                if evaluate:
                    engine.evaluate(evaluation, step, lambda micro: rows(9, 50))
            return engine.state.params

        return on_one_rank(body)

    assert_close(train(True), train(False), 0.0)


def test_a_step_adds_no_bytes_that_stay():
    """No growth: the ledger after step 2 and after step 12 hold the same."""

    def body(transport):
        plan = plan_of([[2, 2], [2, 1]], bucket_bytes=1)
        engine = Engine(state_on(transport, plan, kind="adamw"), 12)
        live = []
        for step in range(12):
            count = plan.rows[transport.rank]
            engine.train_step(plan, step, lambda micro, count=count: rows(count[micro], micro))
            live.append(dict(engine.state.ledger.live))
        assert not engine.state.ledger.live["activations"]
        return live

    job = run_threads(body, 2)
    assert not job.errors
    for live in job.results:
        assert all(entry == live[0] for entry in live)


def test_a_batch_of_the_wrong_dtype_is_refused_before_the_update():
    """Nothing is converted silently."""

    def body(transport):
        plan = plan_of([[2]])
        state = state_on(transport, plan)
        before = {name: array.copy() for name, array in state.params.items()}
        x, y = rows(2, 0)
        with pytest.raises((ValueError, AssertionError)):
            Engine(state, 1).train_step(plan, 0, lambda micro: (x.astype("f4"), y))
        assert_close(state.params, before, 0.0)
        return True

    assert on_one_rank(body)


@pytest.mark.parametrize(
    ("policy", "dtype", "message"),
    [
        (FLOAT64, "f4", "must have dtype float64"),
        (Policy(*["float32"] * 4), "f8", "must have dtype float32"),
        (Policy("float32", "float32", "float32", "bfloat16"), "f8", "must have dtype float32"),
        (Policy("float32", "bfloat16", "float32", "float32"), "f4", None),
        (Policy("float32", "float16", "float32", "float32"), "f4", None),
    ],
)
def test_features_are_rounded_for_16_bit_policies_only(policy, dtype, message):
    """Nothing is converted silently; but data sets make no 16-bit rows."""
    rows_ = tuple(a.astype(dtype) for a in rows_of([1.0, -1.0], [0.1, 3.0]))
    job, outcome = start_engine(linear_model(), [[[rows_]]], policy=policy)
    (state,) = outcome.states
    if message is None:
        assert not job.errors and state.committed == 1
    else:
        assert type(job.errors[0]) in (ValueError, AssertionError, BatchError), job.errors
        assert state.committed == 0


def test_figures_of_a_step_stay_those_of_the_step():
    """The buffer that gathers them serves every step; what a step returns is its own."""
    steps = [[[rows_of([1.0] * count)], [rows_of([2.0])]] for count in (1, 2, 3)]
    done = run_engine(linear_model(), steps).done
    column = METRIC_NAMES.index("rows")
    assert [step.metrics[:, column].tolist() for step in done[0]] == [[1, 1], [2, 1], [3, 1]]
    assert [step.metrics for step in done[1]] == [None] * 3


def test_the_gradient_norm_is_global_and_taken_once():
    """B2: over all parameters, of the sum over ranks, before clipping."""
    settings = OptimizerSection(kind="sgd", lr=0.5, momentum=0.0, clip_norm=1.0)
    start = {"head.linear.weight": np.zeros((1, 1)), "head.linear.bias": np.zeros(1)}
    # Rows (x, t) = (1, -3) and (2, 0): bias gradient 2 * 3 / 2 = 3, weight gradient 3 too.
    for parts in (
        [[rows_of([-3.0, 0.0], [1.0, 2.0])]],
        [[rows_of([-3.0], [1.0])], [rows_of([0.0], [2.0])]],
    ):
        done = run_engine(linear_model(), [parts], start=start, optimizer=settings, bucket_bytes=1)
        assert done.norms[0] == pytest.approx(18**0.5, rel=1e-15)
        for state in done.states:
            for array in state.params.values():
                # Clipped to norm 1, each of the two equal gradients is 1 / sqrt(2).
                assert array.ravel()[0] == pytest.approx(-0.5 / 2**0.5, rel=1e-14)


def test_a_gradient_within_the_limit_is_left_alone_bit_for_bit():
    rows_ = [[rows_of([0.1, 0.3], [0.7, -0.2])]]
    off, on = (
        run_engine(
            linear_model(), [rows_],
            optimizer=OptimizerSection(kind="sgd", lr=0.3, momentum=0.0, clip_norm=limit),
        )
        for limit in (0.0, 1e6)
    )  # fmt: skip
    assert_close(on.params, off.params, 0.0)


@pytest.mark.parametrize("synchronous", [False, True])
def test_ranks_with_the_most_and_the_least_work(synchronous):
    """Rank 0 has all rows in many microbatches, the others none: nobody waits for ever."""
    some, none = rows_of([1.0] * 5, [2.0] * 5), rows_of([])
    steps = [[[some] * 6, [none] * 6, [none] * 6]] * 3
    job, outcome = start_engine(
        linear_model(), steps, synchronous=synchronous, bucket_bytes=1, algorithm="ring"
    )
    assert not job.errors
    one = run_engine(linear_model(), [[[some] * 6]] * 3)
    assert_close(outcome.params, one.params, 1e-12)


def test_the_recorder_gets_one_pair_of_stamps_per_op(tmp_path):
    """The trace of a step can be matched with its plan op by op."""
    from mpisim.trace.store import expand_ops, read_rank

    def body(transport):
        plan = plan_of([[2, 1]])
        recorder = Recorder(tmp_path / "rank.bin", {"rank": 0, "memory_categories": []})
        state = state_on(transport, plan)
        state.recorder = recorder
        engine = Engine(state, 2)
        for step in range(2):
            engine.train_step(plan, step, lambda micro, step=step: rows(2 - micro, step))
        recorder.close()
        return len(plan.ranks[0])

    num_ops = on_one_rank(body)
    trace = read_rank(tmp_path / "rank.bin")
    ops = expand_ops(trace)
    assert ops["op_index"].tolist() == list(range(num_ops)) * 2
    assert ops["step"].tolist() == [0] * num_ops + [1] * num_ops
    assert (ops["start_s"] <= ops["end_s"]).all()
    assert (np.diff(ops["start_s"]) >= 0).all()
    (plan,) = trace.plans.values()
    assert len(plan.kinds) == len(plan.texts) == len(plan.waits) == num_ops
