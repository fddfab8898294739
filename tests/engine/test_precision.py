"""16-bit storage and traffic: what is rounded, where, and what it costs (M2; C028, C030)."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
from small_jobs import (
    Outcome,
    after_backward,
    bits_of,
    cut,
    linear_model,
    make_plans,
    packed_rows,
    run_engine,
    small_decoder,
    start_engine,
)

from mpisim.config.schema import OptimizerSection
from mpisim.cost.price import price_rank
from mpisim.engine.loss_scale import LossScale
from mpisim.errors import LossScaleError
from mpisim.nn.precision import Policy, dtype_of
from mpisim.plan.ops import ALL_MICROS, GatherMetrics, WaitSync

FLOAT32 = Policy(*["float32"] * 4)
POLICIES = {
    "float32": FLOAT32,
    "bfloat16": Policy("float32", "bfloat16", "float32", "float32"),
    "bfloat16 wire": Policy("float32", "bfloat16", "float32", "bfloat16"),
    "bfloat16 reduce": Policy("float32", "bfloat16", "bfloat16", "bfloat16"),
    "float16": Policy("float32", "float16", "float32", "float32"),
    "float16 wire": Policy("float32", "float16", "float32", "float16"),
    "float16 reduce": Policy("float32", "float16", "float16", "float16"),
    "float32 wire bfloat16": Policy("float32", "float32", "float32", "bfloat16"),
}
ADAMW = OptimizerSection(kind="adamw", lr=0.02, clip_norm=1.0)
SGD = OptimizerSection(kind="sgd", lr=1.0, momentum=0.0)
WEIGHT, BIAS = "head.linear.weight", "head.linear.bias"
ZERO = {WEIGHT: np.zeros((1, 1)), BIAS: np.zeros(1)}
STEPS = 40


def scale_of(name: str, first: float = 1024.0) -> LossScale | None:
    return LossScale("dynamic", first) if POLICIES[name].compute == "float16" else None


@functools.cache
def trained(name: str, ranks: int = 2) -> Outcome:
    """Learn the same few rows by heart."""
    batch = packed_rows(6, 5)
    return run_engine(
        small_decoder(), [cut(batch, ranks, 2)] * STEPS, optimizer=ADAMW, policy=POLICIES[name],
        loss_scale=scale_of(name), bucket_bytes=1500,
    )  # fmt: skip


def rounded(master: dict[str, np.ndarray], policy: Policy) -> dict[str, bytes]:
    return {name: a.astype(policy.compute_dtype).tobytes() for name, a in master.items()}


# --- what is learned -------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(POLICIES)[1:])
def test_every_policy_learns_nearly_what_float32_learns(name):
    """bfloat16 without a loss scale, float16 with one; no step is skipped on the way."""
    want, got = trained("float32"), trained(name)
    assert want.losses[-1] < 0.1 * want.losses[0]
    assert not any(step.skipped for step in got.done[0])
    apart = [abs(a - r) for a, r in zip(got.losses, want.losses, strict=True)]
    # From 3.2 down to 0.26; 8 bits of bfloat16 leave more than 11 of float16.
    early, late = (0.08, 0.12) if name.startswith("bfloat16") else (0.01, 0.05)
    assert 0 < max(apart[:15]) < early and max(apart) < late
    for state in got.states:
        assert bits_of(state.master) == bits_of(got.master)  # replicas


def wire_of(store):
    """Return the array that travels: a rounded copy, or the gradients themselves."""
    return store.grads if store.wire is None else store.wire


@pytest.mark.parametrize("name", POLICIES)
def test_dtypes_are_those_of_the_policy(name):
    policy, (state, _) = POLICIES[name], trained(name).states
    assert {a.dtype for a in state.master.values()} == {np.dtype("f4")}
    assert {m.dtype for moments in state.moments.values() for m in moments} == {np.dtype("f4")}
    assert {a.dtype for a in state.params.values()} == {policy.compute_dtype}
    assert {a.dtype for a in state.grads.values()} == {policy.reduce_dtype}
    assert {wire_of(store).dtype for store in state.stores} == {policy.wire_dtype}
    assert all(
        np.shares_memory(state.params[name], state.master[name]) is (policy.compute == "float32")
        for name in state.params
    )
    assert all((store.wire is None) is (policy.wire == policy.reduce) for store in state.stores)
    # Observed gradients are wide, whatever they were added up in.
    assert {g.dtype for g in trained(name).grads[0].values()} == {np.dtype("f4")}


@pytest.mark.parametrize("name", list(POLICIES)[1:-1])
def test_working_weights_are_the_rounded_masters_after_every_step(name):
    policy, seen = POLICIES[name], []

    def prepare(state):
        assert bits_of(state.params) == rounded(state.master, policy)

        def observe(op):
            if isinstance(op, GatherMetrics):
                seen.append(bits_of(state.params) == rounded(state.master, policy))

        state.observe_op = observe

    run_engine(
        small_decoder(), [cut(packed_rows(4, n), 1, 1) for n in range(4)], prepare=prepare,
        optimizer=ADAMW, policy=policy, loss_scale=scale_of(name),
    )  # fmt: skip
    assert seen == [True] * 4


@pytest.mark.parametrize("name", POLICIES)
def test_repeats_are_bitwise_equal(name):
    batch = packed_rows(6, 5)
    options = {
        "optimizer": ADAMW, "policy": POLICIES[name], "loss_scale": scale_of(name),
        "bucket_bytes": 1500,
    }  # fmt: skip
    done = [run_engine(small_decoder(0.2), [cut(batch, 3, 2)] * 3, **options) for _ in range(2)]
    assert bits_of(done[0].master) == bits_of(done[1].master)
    assert done[0].losses == done[1].losses and done[0].norms == done[1].norms


@pytest.mark.parametrize(
    ("dtype", "update", "stuck"), [("bfloat16", 6e-4, 1.0), ("float16", 1e-4, 1.0)]
)
def test_c030_small_updates_add_up_in_the_masters(dtype, update, stuck):
    """C030: w = 1 less 0.0006 a hundred times: 0.94 (float16, 1e-4: 0.99), rounded once each."""
    compute = dtype_of(dtype)
    policy = Policy("float32", dtype, "float32", "float32")
    assert compute.type(np.float32(1.0) - np.float32(update)) == compute.type(stuck)

    def prepare(state):
        def act(state):
            state.grads[BIAS][...] = update
            state.grads[WEIGHT][...] = 0.0

        after_backward(state, 0, act)

    rows = (np.zeros((1, 1), compute), np.zeros((1, 1), "f4"))
    done = run_engine(
        linear_model(), [[[rows]]] * 100, start={BIAS: np.ones(1)}, prepare=prepare,
        optimizer=SGD, policy=policy, overlap=False,
    )  # fmt: skip
    assert done.master[BIAS][0] == pytest.approx(1.0 - 100 * update, abs=2e-6)
    assert done.params[BIAS][0] == done.master[BIAS].astype(compute)[0]
    assert float(done.params[BIAS][0]) < 0.995


# --- sums over ranks -------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("gradient", "scale"), [(-40000.0, 1.0), (2.0**-23, 65536.0), (2.0**-20, 1.0)]
)
def test_c028_means_over_ranks_neither_overflow_nor_vanish(ranks, gradient, scale):
    """C028: float16 gradients of 40000 and about 1e-7 on every rank keep their mean.

    Every addend carries its share 1/N from the start, so no sum is larger than the mean.
    """
    target = -gradient / 2
    rows = (np.zeros((1, 1), "f2"), np.full((1, 1), target, "f4"))
    for wire in ("float32", "float16"):
        done = run_engine(
            linear_model(), [[[rows]] * ranks], start=ZERO,
            policy=Policy("float32", "float16", "float32", wire),
            optimizer=OptimizerSection(kind="sgd", lr=1e-6, momentum=0.0),
            loss_scale=LossScale("static", scale),
        )  # fmt: skip
        assert done.grads[0][BIAS][0] == gradient


def test_c028_addends_in_float16_that_overflow_are_skipped():
    """The sum of 40000 on four ranks does not fit the wire: noticed, not clipped to something."""
    rows = (np.zeros((1, 1), "f2"), np.zeros((1, 1), "f4"))

    def prepare(state):
        def act(state):
            state.grads[BIAS][...] = 40000.0

        after_backward(state, 0, act, step=0)

    small = SGD.model_copy(update={"lr": 1e-6})
    options = {"start": ZERO, "prepare": prepare, "overlap": False, "optimizer": small}
    narrow = run_engine(
        linear_model(), [[[rows]] * 4] * 2, policy=POLICIES["float16 wire"],
        loss_scale=LossScale("dynamic", 1024.0), **options,
    )  # fmt: skip
    assert [[s.skipped for s in steps] for steps in narrow.done] == [[True, False]] * 4
    wide = run_engine(
        linear_model(), [[[rows]] * 4] * 2, policy=POLICIES["float16"],
        loss_scale=LossScale("dynamic", 1024.0), **options,
    )  # fmt: skip
    assert not any(step.skipped for steps in wide.done for step in steps)
    assert wide.grads[0][BIAS][0] == 160000.0 / 1024.0


def test_a_wire_copy_is_rounded_once_and_widened():
    """Two ranks, bfloat16 on the wire: the sum of the rounded addends, rounded."""
    wire = dtype_of("bfloat16")
    values = np.array([1.00390625, 3.1415927], "f4")
    seen = {}

    def prepare(state):
        def act(state):
            state.buckets[0][:] = values if state.rank == 0 else 0.001

        after_backward(state, 0, act)
        inner = state.observe_op

        def observe(op):
            inner(op)
            if op == WaitSync(0, ALL_MICROS):
                seen[state.rank] = state.buckets[0].copy()

        state.observe_op = observe

    rows = (np.zeros((1, 1), "f4"), np.zeros((1, 1), "f4"))
    run_engine(
        linear_model(), [[[rows]] * 2], prepare=prepare, overlap=False, start=ZERO,
        policy=POLICIES["float32 wire bfloat16"],
    )  # fmt: skip
    addends = values.astype(wire).astype("f4"), np.full(2, 0.001, "f4").astype(wire).astype("f4")
    want = (addends[0] + addends[1]).astype(wire).astype("f4")
    assert seen[0].tolist() == seen[1].tolist() == want.tolist()
    assert seen[0].dtype == np.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_in_16_bits_are_added_in_float32_and_rounded_once(dtype):
    """`reduce` in 16 bits over three microbatches, by hand."""
    low = dtype_of(dtype)
    policy = Policy("float32", dtype, dtype, dtype)
    grads = [0.7, 0.0123, -0.31]
    rows = [(np.zeros((1, 1), low), np.array([[-g / 2]], "f4")) for g in grads]
    seen = []

    def prepare(state):
        after_backward(state, 2, lambda state: seen.append(state.grads[BIAS].astype("f4")[0]))

    run_engine(
        linear_model(), [[rows]], start=ZERO, policy=policy, prepare=prepare, overlap=False,
        loss_scale=LossScale("static", 3.0),
    )  # fmt: skip
    total = np.float32(0)
    for _, target in rows:
        difference = (np.float32(0) - target.astype(low).astype("f4")).astype(low)
        unrounded = (np.float32(0) - target).astype(low)
        addend = (unrounded.astype("f4") * 2).astype(low).astype("f4")
        assert addend == pytest.approx(difference.astype("f4") * 2, rel=2**-7)
        total = (np.float32(total) + addend).astype(low).astype("f4")[0, 0]
    assert seen == [total]


# --- float16 and its scale -------------------------------------------------------------------


def test_float16_finds_a_scale_that_works():
    """A first scale far too high: gradients really overflow, steps are skipped, then it learns."""
    batch = packed_rows(6, 5)
    done = run_engine(
        small_decoder(), [cut(batch, 2, 1)] * STEPS, optimizer=ADAMW,
        policy=POLICIES["float16"], loss_scale=LossScale("dynamic", 2.0**26),
    )  # fmt: skip
    skipped = [step.skipped for step in done.done[0]]
    count = sum(skipped)
    assert 4 <= count <= 16 and all(skipped[:4]) and not any(skipped[-4:])
    for state, steps in zip(done.states, done.done, strict=True):
        assert [step.skipped for step in steps] == skipped
        assert state.loss_scale.value == 2.0 ** (26 - count)
        assert state.committed == STEPS - count
    assert all(math.isfinite(loss) for loss in done.losses)
    assert done.losses[-1] < 0.7 * done.losses[0]


def test_small_gradients_need_the_scale():
    """Without a scale gradients below 6e-8 are gone in float16; with it they are not."""
    rows = (np.zeros((1, 1), "f2"), np.full((1, 1), -(2.0**-24), "f4"))
    many = [[rows] * 64]
    lost, kept = (
        run_engine(
            linear_model(), [many], start=ZERO, policy=POLICIES["float16"], loss_scale=scale
        ).grads[0][BIAS][0]
        for scale in (LossScale("none"), LossScale("static", 1024.0))
    )
    assert (lost, kept) == (0.0, 2.0**-23)


def test_bfloat16_needs_none():
    rows = (np.zeros((1, 1), dtype_of("bfloat16")), np.full((1, 1), -(2.0**-100), "f4"))
    done = run_engine(
        linear_model(), [[[rows] * 64]], start=ZERO, policy=POLICIES["bfloat16"],
        optimizer=SGD,
    )  # fmt: skip
    assert done.grads[0][BIAS][0] == 2.0**-99


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_input_that_is_not_finite_reaches_the_floor_and_ends(ranks):
    """NaN in the data: every scale fails, and the run says so instead of skipping for ever."""
    good = (np.ones((1, 1), "f2"), np.ones((1, 1), "f4"))
    bad = (np.full((1, 1), np.nan, "f2"), np.ones((1, 1), "f4"))
    steps = [[[good]] * ranks] + [[[good]] * (ranks - 1) + [[bad]]] * 1000
    job, outcome = start_engine(
        linear_model(), steps, policy=POLICIES["float16"],
        loss_scale=LossScale("dynamic", 65536.0, min_scale=8.0),
    )  # fmt: skip
    error = next(iter(job.errors.values()))
    assert type(error) is LossScaleError
    text = str(error)
    assert "precision.min_scale = 8" in text and "after 14 skipped steps" in text
    assert "look for NaN in the data" in text and text.count(". ") <= 3
    assert len(outcome.done[0]) == 14 and outcome.states[0].committed == 1


# --- bytes -----------------------------------------------------------------------------------


def moved(name: str, ranks: int, algorithm: str) -> list[dict]:
    """Return what every rank sent and received over axis dp in one step, counted and priced."""
    policy = POLICIES[name]
    steps = [cut(packed_rows(6, 5), ranks, 2)] * 2
    options = {"policy": policy, "bucket_bytes": 1500, "algorithm": algorithm}
    done = run_engine(small_decoder(), steps, optimizer=ADAMW, loss_scale=scale_of(name), **options)
    plan = make_plans(small_decoder(), steps, **options)[0]
    assert plan.dtype == policy.wire
    rows = []
    for rank, state in enumerate(done.states):
        counted = state.dp.traffic()["all_reduce"]
        priced = price_rank(plan, rank)["dp", "all_reduce"]
        for field, value in priced.items():
            assert getattr(counted, field) == len(steps) * value, (rank, field)
        rows.append(priced)
    return rows


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_bytes_on_the_wire_follow_the_policy(name, ranks, algorithm):
    """M2: counted equals priced exactly; 16 bits on the wire are half the bytes of 32."""
    got, full = moved(name, ranks, algorithm), moved("float32", ranks, algorithm)
    half = POLICIES[name].wire != "float32"
    if name.endswith("reduce"):
        # Smaller elements make larger buckets, so other messages; and still half of the bytes.
        assert sum(row["sent_bytes"] for row in got) * 2 == sum(row["sent_bytes"] for row in full)
        return
    for mine, theirs in zip(got, full, strict=True):
        assert mine["sent_messages"] == theirs["sent_messages"]
        assert mine["sent_bytes"] * (2 if half else 1) == theirs["sent_bytes"] > 0


def test_the_ledger_follows_the_policy():
    """Parameters, masters, gradients, moments in the bytes of their dtypes."""
    size = sum(spec.size for spec in small_decoder().param_specs())
    for name, policy in POLICIES.items():
        live = trained(name).states[0].ledger.live
        assert live["params"] == size * policy.compute_itemsize
        assert live["master_params"] == size * 4 * policy.has_master
        assert live["grads"] == size * policy.reduce_itemsize
        assert live["optimizer"] == 2 * size * 4
    wide = trained("float32").states[0].ledger.live["comm_buffers"]
    copy = trained("float32 wire bfloat16").states[0].ledger.live["comm_buffers"]
    assert copy > wide  # scratch is half, but there is a copy of all gradients


def test_the_loss_scale_of_a_state_is_its_own():
    """Two ranks that shared one would count every step twice."""
    scale = LossScale("dynamic", 8.0, growth_interval=1)
    done = run_engine(
        linear_model(), [[[tuple(a.astype("f4") for a in (np.ones((1, 1)),) * 2)]] * 2],
        policy=FLOAT32, loss_scale=scale,
    )  # fmt: skip
    assert [state.loss_scale.value for state in done.states] == [16.0, 16.0]
    assert scale == replace(scale, value=8.0)
