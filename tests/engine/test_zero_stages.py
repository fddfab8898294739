"""ZeRO stages 0 to 3 learn the same, move what was priced, and fail and skip without a trace.

Threads here; real ranks in `test_zero_ranks.py`, plans and prices in `tests/plan`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
from planting import BIAS, FLOAT16, WEIGHT, ZERO, decoder_steps, linear_steps, plant, write
from small_jobs import (
    FLOAT64,
    Outcome,
    assert_close,
    bits_of,
    copies,
    cut,
    gradients_are_zero,
    linear_model,
    make_plans,
    make_state,
    num_targets,
    packed_rows,
    rows_of,
    run_engine,
    small_decoder,
    start_engine,
)

from mpisim.comm.local import run_threads
from mpisim.config.schema import OptimizerSection
from mpisim.cost.price import price_rank
from mpisim.engine.handlers import NON_FINITE
from mpisim.engine.loss_scale import LossScale
from mpisim.engine.state import EngineState
from mpisim.engine.step import Engine
from mpisim.errors import CommError, MpisimError
from mpisim.layouts.metrics import CHANNELS, TRAFFIC_FIELDS
from mpisim.mesh import Mesh
from mpisim.nn.models import build_mlp
from mpisim.nn.precision import Policy
from mpisim.plan.build import build_eval_plan
from mpisim.plan.ops import (
    CheckGradients,
    GatherMetrics,
    GatherParams,
    OptimizerStep,
    StartUnshard,
    WaitUnshard,
)

STEPS = 10
ADAMW = OptimizerSection(
    kind="adamw", lr=0.01, eps=1e-6, weight_decay=0.1, clip_norm=0.5, schedule="cosine",
    warmup_steps=2,
)  # fmt: skip
MOMENTUM = OptimizerSection(kind="sgd", lr=0.05, momentum=0.9, weight_decay=0.1, clip_norm=0.5)
PLAIN = OptimizerSection(kind="sgd", lr=1.0, momentum=0.0)
STAGES = (1, 2, 3)

DROPOUT = 0.2
MODELS = {
    "tied": lambda: small_decoder(DROPOUT),
    "untied": lambda: small_decoder(DROPOUT, tied=False),
    "mlp": lambda: build_mlp(
        input_kind="features", num_features=3, hidden=(5, 2, 3), activation="tanh",
        output=("targets", 1),
    ),
}  # fmt: skip
"""The decoders have grouped heads; the MLP's blocks have 20, 12, 9 and 4 parameters."""
MODES = (("none", 1), ("selective", 1), ("full", 1), ("full", 2))


def batches(kind: str, count: int = STEPS) -> list:
    """Return one batch of six rows per step: too few for four ranks and four microbatches."""
    if kind != "mlp":
        return [packed_rows(6, seed) for seed in range(count)]
    rng = np.random.default_rng(11)
    return [(rng.standard_normal((6, 3)), rng.standard_normal((6, 1))) for _ in range(count)]


def steps_for(kind: str, ranks: int, micros: int, count: int = STEPS) -> list:
    return [cut(batch, ranks, micros) for batch in batches(kind, count)]


@functools.cache
def one_rank(kind: str, optimizer: str = "adamw") -> Outcome:
    """Return what one rank learns without ZeRO, from whole batches."""
    settings = {"adamw": ADAMW, "sgd": MOMENTUM}[optimizer]
    return run_engine(MODELS[kind](), steps_for(kind, 1, 1), optimizer=settings)


def gathered_bits(done: Outcome) -> dict[str, bytes]:
    """Return the bits of all parameters, which every rank must have gathered alike."""
    first = bits_of(done.gathered[0])
    assert all(bits_of(other) == first for other in done.gathered)
    return first


# --- the same weights ------------------------------------------------------------------------


def covered() -> list:
    """Return all stages x ranks x microbatches, the other options in turn."""
    turns = zip(
        itertools.cycle(MODES), itertools.cycle((True, False, False)),
        itertools.cycle((False, True, True, False, True)),
        itertools.cycle(("tied", "untied", "mlp", "tied", "untied", "mlp", "untied")),
        itertools.cycle((1, 700, 1 << 20, 1, 300)), itertools.cycle(("adamw",) * 3 + ("sgd",)),
        itertools.cycle(("auto", "ring", "ring")),
    )  # fmt: skip
    cases = itertools.product((0, 1, 2, 3), (1, 2, 3, 4), (1, 2, 4))
    return [
        pytest.param(
            zero, ranks, micros, *rest,
            id="-".join(map(str, (zero, ranks, micros, *mode, *rest[1:]))),
        )
        for (zero, ranks, micros), rest in zip(cases, turns, strict=False)
        for mode in (rest[0],)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("zero", "ranks", "micros", "mode", "prefetch", "overlap", "kind", "bucket_bytes", "optimizer",
     "algorithm"),
    covered(),
)  # fmt: skip
def test_every_stage_learns_what_one_rank_learns(
    zero, ranks, micros, mode, prefetch, overlap, kind, bucket_bytes, optimizer, algorithm
):
    """A6: float64 within 1e-12 after ten steps; all ranks gather the same bits."""
    want = one_rank(kind, optimizer)
    moved = Moved()
    steps = steps_for(kind, ranks, micros)
    options: dict[str, Any] = {
        "bucket_bytes": bucket_bytes, "overlap": overlap, "recompute": mode[0], "every": mode[1],
        "zero": zero, "prefetch": prefetch, "algorithm": algorithm,
    }  # fmt: skip
    done = run_engine(
        MODELS[kind](), steps, optimizer={"adamw": ADAMW, "sgd": MOMENTUM}[optimizer],
        prepare=moved.prepare, **options,
    )  # fmt: skip
    assert_close(done.gathered[0], want.gathered[0], 1e-12)
    gathered_bits(done)
    np.testing.assert_allclose(done.losses, want.losses, rtol=1e-12)
    np.testing.assert_allclose(done.norms, want.norms, rtol=1e-12)
    # The reference was clipped, or clip and norm would be for nothing.
    assert max(want.norms) > 0.5
    for state, steps_done in zip(done.states, done.done, strict=True):
        assert [step.grad_norm for step in steps_done] == done.norms
        assert gradients_are_zero(state) and at_rest(state)
        assert not any(state.ledger.live[name] for name in ("activations", "data"))
    moved.check(MODELS[kind](), steps, options)


class Moved:
    """What the ranks have moved when the last step ends."""

    def __init__(self) -> None:
        self.ranks: dict[int, dict[tuple[str, str], Any]] = {}

    def prepare(self, state: EngineState) -> None:
        def observe(op: Any) -> None:
            if isinstance(op, GatherMetrics):
                self.ranks[state.rank] = {
                    (where.axis, name): traffic
                    for where in (state.dp, state.control)
                    for name, traffic in where.traffic().items()
                }

        state.observe_op = observe

    def check(
        self, model: Any, steps: list, options: dict[str, Any], committed: Any = None
    ) -> None:
        """Compare with the price of the steps' plans: the difference is 0."""
        plans = make_plans(model, steps, **options)
        committed = committed or [True] * len(plans)
        for rank, measured in self.ranks.items():
            want: Counter[tuple] = Counter()
            for plan, made in zip(plans, committed, strict=True):
                for channel, fields in price_rank(plan, rank, made).items():
                    for field, number in fields.items():
                        want[(*channel, field)] += number
            got = Counter(
                {
                    (*channel, field): getattr(traffic, field)
                    for channel, traffic in measured.items()
                    for field in TRAFFIC_FIELDS
                }
            )
            assert +got == +want, rank
            assert {key[:2] for key in +got} <= set(CHANNELS)


def at_rest(state: EngineState) -> bool:
    """Tell whether nothing is open, gathered or on its way, and the ledger shows the same."""
    ledger, held = state.ledger, Counter()
    for store in state.stores:
        held["params"] += store.working.nbytes
        held["master_params"] += store.master.nbytes * store.policy.has_master
        held["optimizer"] += sum(moment.nbytes for moment in store.moments)
        held["grads"] += (store.own_grads if store.zero >= 2 else store.grads).nbytes
        if store.gathered is not None or (store.zero >= 2 and store.grads is not None):
            return False
        if store.zero >= 2 and not (store.wire is None and store.summed is None):
            return False
    shown = sum(map(len, state.block_params.values()))
    if (state.zero == 3 and shown) or (state.zero >= 2 and state.grads) or not state.dp.idle:
        return False
    return all(ledger.live[name] == held[name] for name in
               ("params", "master_params", "optimizer", "grads"))  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["tied", "mlp"])
def test_c038_one_trajectory_per_stage(kind, ranks):
    """C038: K = 3, clip 1: the same losses, norms and weights; bits where the order is the same."""
    settings = ADAMW.model_copy(update={"clip_norm": 1.0})
    runs = [
        run_engine(
            MODELS[kind](), steps_for(kind, ranks, 3), optimizer=settings, zero=zero,
            bucket_bytes=1, algorithm="ring",
        )
        for zero in range(4)
    ]  # fmt: skip
    for done in runs[1:]:
        np.testing.assert_allclose(done.losses, runs[0].losses, rtol=1e-12)
        np.testing.assert_allclose(done.norms, runs[0].norms, rtol=1e-12)
        assert_close(done.gathered[0], runs[0].gathered[0], 1e-12)
    # Stages 2 and 3 add in one order, whatever is gathered when.
    assert runs[2].losses == runs[3].losses and runs[2].norms == runs[3].norms
    assert gathered_bits(runs[2]) == gathered_bits(runs[3])


@pytest.mark.parametrize("kind", ["untied", "mlp"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_c038_a_scatter_adds_in_the_order_of_a_ring(kind, ranks):
    """C038, C051: without a norm in the update, stages 0 and 1 give the same bits."""
    settings = ADAMW.model_copy(update={"clip_norm": 0.0})
    plain, sharded = (
        run_engine(
            MODELS[kind](), steps_for(kind, ranks, 2), optimizer=settings, zero=zero,
            algorithm="ring",
        )
        for zero in (0, 1)
    )  # fmt: skip
    assert gathered_bits(plain) == gathered_bits(sharded) and plain.losses == sharded.losses


@pytest.mark.parametrize("zero", STAGES)
def test_options_of_a_stage_change_no_bit(zero):
    """Overlap, prefetch, recompute and who is late: the same bits."""
    steps = steps_for("tied", 3, 2, 4)
    runs = [
        run_engine(
            small_decoder(DROPOUT), steps, optimizer=ADAMW, zero=zero, bucket_bytes=1, **options
        )
        for options in (
            {}, {"overlap": False}, {"prefetch": True}, {"recompute": "full", "every": 2},
            {"recompute": "selective", "prefetch": True}, {"synchronous": True},
        )
    ]  # fmt: skip
    bits = [gathered_bits(done) for done in runs]
    assert all(other == bits[0] for other in bits)


POLICIES = {
    "float32": Policy(*["float32"] * 4),
    "bfloat16": Policy("float32", "bfloat16", "float32", "float32"),
    "bfloat16 reduce": Policy("float32", "bfloat16", "bfloat16", "bfloat16"),
    "bfloat16 wire": Policy("float32", "bfloat16", "float32", "bfloat16"),
    "float16 wire": Policy("float32", "float16", "float32", "float16"),
    "float32 wire bfloat16": Policy("float32", "float32", "float32", "bfloat16"),
}


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_learns_what_stage_0_learns(name, zero):
    """Rounded elsewhere, so not the same bits; replicas are, and masters are rounded once."""
    policy, moved = POLICIES[name], Moved()
    steps = steps_for("tied", 3, 2, 5)
    options = {"policy": policy, "bucket_bytes": 700, "recompute": "full"}
    plain = run_engine(small_decoder(), steps, optimizer=MOMENTUM, **options)
    options["zero"] = zero
    done = run_engine(small_decoder(), steps, optimizer=MOMENTUM, prepare=moved.prepare, **options)
    tolerance = 1e-6 if set(policy.names) == {"float32"} else 5e-3
    assert_close(done.gathered[0], plain.gathered[0], tolerance)
    gathered_bits(done)
    moved.check(small_decoder(), steps, options)
    whole = done.gathered[0]
    for state in done.states:
        assert at_rest(state)
        for store in state.stores:
            flat = np.concatenate([whole[p.name].reshape(-1) for p in store.bucket.params])
            rounded = store.policy.has_master and state.kernels.narrow(flat, policy.compute_dtype)
            want = rounded if store.policy.has_master else flat
            part = want if zero < 3 else want[store.lo : store.hi]
            # Stages 1 and 2: working replicas are bitwise equal, being equal to one array.
            assert store.working.tobytes() == part.tobytes()
            assert {m.dtype for m in store.moments} == {np.dtype("f4")}


# --- exact numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_c015_the_first_microbatch_of_a_window_starts_anew(zero, ranks):
    """C015: [1,1,1,1], [10,1,1,1], [1,1,1,10], [1,1,1,1]: means 1, 3.25, 3.25, 1."""
    windows = [[1, 1, 1, 1], [10, 1, 1, 1], [1, 1, 1, 10], [1, 1, 1, 1]]
    steps = [[[rows_of([-g / 2]) for g in window]] * ranks for window in windows]
    still = PLAIN.model_copy(update={"lr": 1e-30})
    done = run_engine(linear_model(), steps, start=ZERO, optimizer=still, zero=zero)
    np.testing.assert_allclose(done.norms, [1.0, 3.25, 3.25, 1.0], rtol=1e-15)


@pytest.mark.parametrize("zero", range(4))
def test_c015_a_parameter_with_a_gradient_in_one_microbatch(zero):
    """C015: the feature of the weight is 0 in all microbatches but one; others add nothing."""
    for place in range(4):
        micros = [rows_of([-0.5], [float(m == place)]) for m in range(4)]
        done = run_engine(
            linear_model(), [[micros] * 2], start=ZERO, optimizer=PLAIN, zero=zero
        )  # fmt: skip
        assert done.gathered[1][WEIGHT].tolist() == [[-0.25]]
        assert done.gathered[1][BIAS].tolist() == [-1.0]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("overlap", [True, False])
def test_c017_every_microbatch_is_in_the_reduced_gradient(zero, overlap):
    """C017: microbatch gradients 1 and 10 on both ranks add to 11, over 2 rows a rank 5.5."""
    micros = [rows_of([-0.5]), rows_of([-5.0])]
    done = run_engine(
        linear_model(), [[micros, micros]], start=ZERO, optimizer=PLAIN, overlap=overlap, zero=zero
    )  # fmt: skip
    assert done.norms == [5.5] and done.losses == [(0.25 + 25) / 2]
    for params in done.gathered:
        assert params[BIAS].tolist() == [-5.5]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_c033_all_ranks_clip_with_the_norm_of_all_shards(zero, ranks):
    """C033: shards [3] and [4], limit 1: norm 5 on both, [0.6] and [0.8]; the third owns none."""
    done = run_engine(
        linear_model(), [[[rows_of([1.0])]] * ranks], start=ZERO, overlap=False, zero=zero,
        optimizer=PLAIN.model_copy(update={"clip_norm": 1.0}),
        prepare=plant(write(weight=3 / ranks, bias=4 / ranks)),
    )  # fmt: skip
    for (step,), params in zip(done.done, done.gathered, strict=True):
        assert step.grad_norm == pytest.approx(5.0, rel=1e-15)
        assert params[WEIGHT][0, 0] == pytest.approx(-0.6, rel=1e-15)
        assert params[BIAS][0] == pytest.approx(-0.8, rel=1e-15)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_c035_every_element_counts_once(zero, ranks):
    """C035: 3, 4 and 12 have norm 13; every rank's copy counted would give 17.692."""
    values = {"weight": np.array([[3.0], [4.0]]) / ranks, "bias": 12.0 / ranks}
    rows = (np.zeros((1, 2)), np.ones((1, 1)))
    done = run_engine(
        linear_model(2), [[[rows]] * ranks], overlap=False, zero=zero, optimizer=PLAIN,
        prepare=plant(write(**values)),
    )  # fmt: skip
    norms = [step.grad_norm for (step,) in done.done]
    assert norms == pytest.approx([13.0] * ranks, rel=1e-15)


@pytest.mark.parametrize("zero", range(4))
def test_c051_a_shard_is_the_slice_of_the_sum(zero):
    """C051: three ranks, 7 elements, gradients rank + 1: sum 6 everywhere."""
    seen: dict[int, list] = {}

    def prepare(state):
        plant(write(weight=np.full((6, 1), state.rank + 1.0), bias=state.rank + 1.0))(state)
        inner = state.observe_op

        def observe(op):
            inner(op)
            if isinstance(op, CheckGradients):
                (store,) = state.stores
                seen[state.rank] = [store.lo, store.hi, *store.own_grads.tolist()]

        state.observe_op = observe

    rows = (np.zeros((1, 6)), np.ones((1, 1)))
    run_engine(linear_model(6), [[[rows]] * 3], overlap=False, zero=zero, prepare=prepare)
    bounds = [(0, 7)] * 3 if zero == 0 else [(0, 3), (3, 5), (5, 7)]
    assert seen == {r: [lo, hi] + [6.0] * (hi - lo) for r, (lo, hi) in enumerate(bounds)}


HALVES = {
    "float16": Policy("float32", "float16", "float16", "float16"),
    "bfloat16": Policy("float32", "bfloat16", "bfloat16", "bfloat16"),
}
SINGLES = {
    "float16 with float32 gradients": Policy("float32", "float16", "float32", "float32"),
    "bfloat16 with float32 gradients": Policy("float32", "bfloat16", "float32", "float32"),
}


@pytest.mark.parametrize(
    ("name", "figures"),
    [(name, (16000, 7000, 5500, 4000)) for name in HALVES]
    + [(name, (18000, 9000, 6000, 4500)) for name in SINGLES],
)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("micros", [1, 2])
def test_model_state_of_a_thousand_parameters(name, figures, zero, micros):
    """Mixed-precision Adam, four ranks, read after the last backward, before the update."""
    seen: dict[int, list[int]] = {}

    def prepare(state):
        def observe(op):
            if isinstance(op, CheckGradients):
                seen[state.rank] = [
                    sum(state.ledger.live[category] for category in
                        ("params", "master_params", "grads", "optimizer")),
                    sum(
                        array.nbytes
                        for store in state.stores
                        for array in (store.working, store.master, *store.moments,
                                      store.own_grads if zero >= 2 else store.grads)
                    ),
                ]  # fmt: skip

        state.observe_op = observe

    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((1, 999)).astype("f4"), np.ones((1, 1), "f4"))
    run_engine(
        linear_model(999), [[[rows] * micros] * 4], policy=(HALVES | SINGLES)[name], zero=zero,
        optimizer=ADAMW, prepare=prepare, loss_scale=LossScale("static", 1.0),
    )  # fmt: skip
    assert seen == dict.fromkeys(range(4), [figures[zero]] * 2)


# --- overflow --------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_c019_what_one_rank_sees_all_ranks_skip(zero, ranks, bad):
    """C019: scale 2, back-off 0.5: all scales 1, weights in every bit; a third shard is empty."""
    for rank in range(ranks):
        done = run_engine(
            linear_model(), [[[rows_of([1.0])]] * ranks], start=ZERO, optimizer=PLAIN,
            overlap=False, prepare=plant(write(bias=bad), rank=rank), zero=zero,
            loss_scale=LossScale("dynamic", 2.0),
        )  # fmt: skip
        for state, (step,), params in zip(done.states, done.done, done.gathered, strict=True):
            assert step.skipped and step.found_non_finite
            assert (state.loss_scale.value, state.loss_scale.num_skipped) == (1.0, 1)
            assert state.committed == 0 and gradients_are_zero(state) and at_rest(state)
            assert not any(array.any() for array in params.values())
            assert state.scalars["non_finite"].tolist() == [NON_FINITE]
    owned = [store.hi - store.lo for state in done.states for store in state.stores]
    assert owned == [1, 1, 0][:ranks]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micros", [1, 2])
def test_a_skipped_step_leaves_no_trace(zero, ranks, micros):
    """Float16: an overflow on the last rank; from then on the run is the control's, bit for bit.

    The control starts at half the scale and has no such step.
    """
    steps = decoder_steps(5, ranks, micros)
    bits: dict[int, list[list]] = {rank: [] for rank in range(ranks)}
    moved = Moved()

    def overflow(state):
        def act(state):
            grads = next(iter(state.grads.values()))
            grads.reshape(-1)[0] = np.inf

        if state.rank == ranks - 1:
            plant(act, step=2, micro=micros - 1)(state)

    def watch(state):
        overflow(state)
        inner = state.observe_op

        def observe(op):
            if inner is not None:
                inner(op)
            if isinstance(op, GatherMetrics):
                kept = resting(state)
                bits[state.rank].append([kept[k] for k in ("weights", "masters", "moments")])

        state.observe_op = observe

    def both(state):
        moved.prepare(state)
        count = state.observe_op
        watch(state)
        look = state.observe_op
        state.observe_op = lambda op: (look(op), count(op))

    options = {"policy": FLOAT16, "zero": zero, "bucket_bytes": 700, "overlap": False}
    done = run_engine(
        small_decoder(), steps, optimizer=ADAMW, prepare=both, total_steps=4,
        loss_scale=LossScale("dynamic", 1024.0, growth_interval=100), **options,
    )  # fmt: skip
    assert [[step.skipped for step in rank] for rank in done.done] == [
        [False, False, True, False, False]
    ] * ranks
    for rank in range(ranks):
        assert bits[rank][2] == bits[rank][1] != bits[rank][3]
        assert done.states[rank].loss_scale.value == 512.0
        assert done.states[rank].committed == 4
        assert at_rest(done.states[rank])
    moved.check(small_decoder(), steps, options, [True, True, False, True, True])
    control = run_engine(
        small_decoder(), steps[:2] + steps[3:], optimizer=ADAMW, **options,
        loss_scale=LossScale("dynamic", 512.0, growth_interval=100),
    )  # fmt: skip
    assert gathered_bits(done) == gathered_bits(control)


@pytest.mark.parametrize("zero", range(4))
def test_an_update_that_overflows_on_one_rank_is_made_on_none(zero):
    """eps = 0: a gradient of 0 gives 0/0 in one rank's shard only; all ranks refuse alike."""
    settings = ADAMW.model_copy(update={"eps": 0.0, "clip_norm": 0.0})
    before: dict[int, list[bytes]] = {}

    def prepare(state):
        before[state.rank] = [store.working.tobytes() for store in state.stores]
        plant(write(weight=1.0, bias=0.0))(state)

    job, outcome = start_engine(
        linear_model(), linear_steps(1, 2), optimizer=settings, overlap=False, zero=zero,
        prepare=prepare,
    )  # fmt: skip
    assert sorted(job.errors) == [0, 1]
    assert "the update must be finite" in str(next(iter(job.errors.values())))
    for state in outcome.states:
        assert state.committed == 0 and not state.broken
        assert [store.working.tobytes() for store in state.stores] == before[state.rank]


# --- failures --------------------------------------------------------------------------------


class MadeUpError(Exception):
    """What the tests raise."""


def resting(state: EngineState) -> dict[str, Any]:
    """Return all that a failed update must leave alone."""
    return {
        "weights": [store.working.tobytes() for store in state.stores],
        "masters": [store.master.tobytes() for store in state.stores],
        "moments": [[m.tobytes() for m in store.moments] for store in state.stores],
        "committed": state.committed,
        "live": dict(state.ledger.live),
    }


def failing_run(zero, *, place=None, ranks=2, policy=FLOAT64, **options):
    """Make two steps, fail at op number `place` of the third on all ranks, and make it again.

    Returns what is left by rank; None if a retry was refused, some messages being on their way.
    """
    model, steps = small_decoder(DROPOUT), decoder_steps(4, ranks, 2)
    plans = make_plans(model, steps, zero=zero, policy=policy, bucket_bytes=700, **options)
    everyone, idle = threading.Barrier(ranks, timeout=20.0), [True] * ranks

    def body(transport):
        state = make_state(transport, model, plans[0], optimizer=ADAMW, policy=policy)
        engine = Engine(state, 4)

        def step(number):
            mine = steps[number][transport.rank]
            engine.train_step(plans[number], number, copies(mine), num_targets(mine))

        step(0)
        step(1)
        if place is not None:
            before, count = resting(state), itertools.count()

            def observe(op):
                if next(count) == place:
                    raise MadeUpError

            state.observe_op = observe
            with pytest.raises(MadeUpError):
                step(2)
            state.observe_op = None
            assert resting(state) == before
            assert gradients_are_zero(state) and state.step is None
            assert state.ledger.live["activations"] == 0
            idle[transport.rank] = state.dp.idle
            everyone.wait()
            if not state.dp.idle:
                with pytest.raises(CommError, match="must be finished before the next one"):
                    step(2)
                assert resting(state) == before
            if not all(idle):
                return None
            assert at_rest(state)
        step(2)
        step(3)
        return resting(state)

    job = run_threads(body, ranks)
    for error in job.errors.values():
        raise error
    return job.results


@functools.cache
def undisturbed(zero, policy):
    return failing_run(zero, policy=policy)


def places_of(zero, **options):
    """Return the numbers of the first and the last op of every kind before the update."""
    model, steps = small_decoder(DROPOUT), decoder_steps(1, 2, 2)
    (plan,) = make_plans(model, steps, zero=zero, bucket_bytes=700, **options)
    found: dict[str, int] = {}
    for number, op in enumerate(plan.ranks[0]):
        if isinstance(op, OptimizerStep):
            break
        kind = type(op).__name__
        found[kind] = number
        found.setdefault(f"first {kind}", number)
    return found


RETRIED = [
    (zero, what, place)
    for zero in STAGES
    for what, place in places_of(zero, overlap=False, recompute="full").items()
]


@pytest.mark.parametrize(("zero", "what", "place"), RETRIED)
@pytest.mark.parametrize("name", ["float64", "wire"])
def test_a_failing_step_leaves_the_state_clean(zero, what, place, name):
    """Whatever op it fails in; then it can be made again, unless messages are on their way."""
    policy = FLOAT64 if name == "float64" else POLICIES["bfloat16 wire"]
    results = failing_run(zero, place=place, policy=policy, overlap=False, recompute="full")
    if None not in results:
        assert results == undisturbed(zero, policy)
    elif "Start" not in what:
        pytest.fail("only a started collective may stand in the way of a retry")


@pytest.mark.parametrize("place", [8, 15, 22, 30, 41])
def test_a_failing_step_with_gathers_ahead_leaves_the_state_clean(place):
    """Stage 3 with prefetch and overlap: something is on its way nearly always."""
    results = failing_run(3, place=place, overlap=True, prefetch=True)
    if None not in results:
        assert results == undisturbed(3, FLOAT64)


@pytest.mark.parametrize(
    ("zero", "after"),
    [
        (0, OptimizerStep), (3, OptimizerStep), (1, OptimizerStep), (2, OptimizerStep),
        (1, GatherParams), (2, GatherParams),
    ],
)  # fmt: skip
def test_a_failure_between_update_and_gather_is_no_silent_start(zero, after):
    """The update is made, its weights are not collected: no next step may start from them."""
    model, steps = small_decoder(), decoder_steps(2, 2)
    plans = make_plans(model, steps, zero=zero, bucket_bytes=700)

    def body(transport):
        state = make_state(transport, model, plans[0], optimizer=ADAMW)
        engine, mine = Engine(state, 2), steps[0][transport.rank]

        def observe(op):
            if isinstance(op, after):
                raise MadeUpError

        state.observe_op = observe
        with pytest.raises(MadeUpError):
            engine.train_step(plans[0], 0, copies(mine), num_targets(mine))
        state.observe_op = None
        assert state.committed == 1
        try:
            mine = steps[1][transport.rank]
            engine.train_step(plans[1], 1, copies(mine), num_targets(mine))
        except MpisimError:
            return "refused"
        return [store.working.tobytes() for store in state.stores]

    job = run_threads(body, 2)
    want = run_engine(model, steps, optimizer=ADAMW, zero=zero, bucket_bytes=700)
    right = [[s.working.tobytes() for s in state.stores] for state in want.states]
    assert job.results in (["refused"] * 2, right)


def test_a_failing_evaluation_leaves_nothing_gathered():
    """Stage 3: the next step finds a clean rank."""
    model, steps = small_decoder(), decoder_steps(1, 2)
    (plan,) = make_plans(model, steps, zero=3)
    evaluation = build_eval_plan(
        mesh=Mesh(dp=2), specs=lambda n, length: model.spec(n, np.dtype("f8"), length),
        rows=plan.rows, dtype="float64", algorithm="auto", buckets=plan.buckets, zero=3,
        param_dtype="float64",
    )  # fmt: skip

    def body(transport):
        state = make_state(transport, model, plan, optimizer=ADAMW)
        engine, mine = Engine(state, 1), steps[0][transport.rank]
        before = resting(state)
        good = engine.evaluate(evaluation, 0, copies(mine)).global_loss_sum
        assert resting(state) == before and at_rest(state)
        for place in range(len(evaluation.ranks[0])):
            done = evaluation.ranks[0][: place + 1]
            starts, waits = (
                sum(isinstance(op, kind) for op in done) for kind in (StartUnshard, WaitUnshard)
            )
            if starts != waits:
                continue  # messages are on their way: no rank may begin anything else
            count = itertools.count()

            def observe(op, place=place, count=count):
                if next(count) == place:
                    raise MadeUpError

            state.observe_op = observe
            with pytest.raises(MadeUpError):
                engine.evaluate(evaluation, 0, copies(mine))
            assert resting(state) == before and at_rest(state), place
            state.observe_op = None
        again = engine.evaluate(evaluation, 0, copies(mine)).global_loss_sum
        assert again == good
        engine.train_step(plan, 0, copies(mine), num_targets(mine))
        return good

    job = run_threads(body, 2)
    for error in job.errors.values():
        raise error


def test_what_a_failed_step_had_gathered_is_really_freed():
    """Nothing is on its way, so nobody may keep what the ledger no longer shows."""
    model, steps = small_decoder(), decoder_steps(1)
    (plan,) = make_plans(model, steps, zero=3)

    def body(transport):
        state = make_state(transport, model, plan, optimizer=ADAMW)
        mine, gathered = steps[0][0], []

        def observe(op):
            if isinstance(op, WaitUnshard):
                found = [store.gathered for store in state.stores]
                gathered.extend(weakref.ref(a) for a in found if a is not None)
                del found
                raise MadeUpError

        state.observe_op = observe
        with pytest.raises(MadeUpError):
            Engine(state, 1).train_step(plan, 0, copies(mine), num_targets(mine))
        gc.collect()
        assert state.dp.idle and gathered
        return [ref() is None for ref in gathered]

    job = run_threads(body, 1)
    assert not job.errors, job.errors
    assert all(job.results[0])
