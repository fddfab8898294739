"""Bytes of a training step from sizes alone, and the loop that stays below a budget (A7)."""

import doctest
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.errors import ConfigError, MemoryBudgetExceeded
from mpisim.reference import accumulation, memory, mixed_precision, mlp, optimizers, recompute, zero

SIZES = (3, 7, 6, 8, 5, 2)


def make_mlp(sizes=SIZES, dtype="float64"):
    return mlp.init_mlp(lambda name: np.random.default_rng(list(name.encode())), sizes, dtype)


def make_batches(num_rows, num_steps=1, sizes=SIZES, dtype="float64"):
    rng = np.random.default_rng(1)
    return [
        (
            rng.standard_normal((num_rows, sizes[0])).astype(dtype),
            rng.standard_normal((num_rows, sizes[-1])).astype(dtype),
        )
        for _ in range(num_steps)
    ]


def plain_loop(params, batches, lr, weight_decay=0.0, activation="relu"):
    state, losses = optimizers.adamw_init(params), []
    for x, y in batches:
        value, gradients = mlp.mlp_loss_and_gradients(params, x, y, activation)
        params, state = optimizers.adamw_step(
            params, gradients, state, lr, weight_decay=weight_decay
        )
        losses.append(value)
    return params, state, losses


def test_examples_in_docstrings():
    result = doctest.testmod(memory)
    assert result.attempted > 0 and result.failed == 0


# --- parameters, gradients, optimizer state ---


def test_c135_bytes_per_stage():
    def totals(gradient_dtype, num_params=1000):
        return [
            memory.compute_training_state_bytes(
                num_params, 4, stage, gradient_dtype=gradient_dtype
            ).total
            for stage in range(4)
        ]

    assert totals("float16") == totals("bfloat16") == [16000, 7000, 5500, 4000]
    assert totals("float32") == [18000, 9000, 6000, 4500]
    # 1001 elements on 4 ranks: the longest shard has 251, not 250.25.
    assert totals("float16", 1001) == [16016, 4 * 1001 + 12 * 251, 2 * 1001 + 14 * 251, 16 * 251]


def test_each_part_by_hand():
    assert memory.compute_param_memory_bytes(10, "float32") == 40
    assert memory.compute_param_memory_bytes(10, "float32", num_ranks=4, stage=2) == 40
    assert memory.compute_param_memory_bytes(10, "float32", num_ranks=4, stage=3) == 12
    assert memory.compute_gradient_memory_bytes(10, "bfloat16", num_ranks=4, stage=1) == 20
    assert memory.compute_gradient_memory_bytes(10, "bfloat16", num_ranks=4, stage=2) == 6
    assert memory.compute_optimizer_memory_bytes(10) == 120
    assert memory.compute_optimizer_memory_bytes(10, num_ranks=4, stage=1) == 36
    assert memory.compute_optimizer_memory_bytes(10, num_moments=1, masters=False) == 40
    assert memory.compute_optimizer_memory_bytes(10, num_moments=0, masters=False) == 0
    # Weights and moments of one dtype: forward uses the masters, there is no second copy.
    full = memory.compute_training_state_bytes(10, 1, 0, "float32", "float32", "float32")
    assert full == (40, 40, 80)


def test_parts_of_nothing_and_of_fewer_elements_than_ranks():
    for stage in range(4):
        assert memory.compute_training_state_bytes(0, 3, stage).total == 0
    assert memory.compute_training_state_bytes(1, 8, 3).total == 16  # the rank that owns it


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 40])
def test_the_fullest_rank_is_the_fullest_of_the_ranks(stage, num_ranks):
    state = zero.init_zero(make_mlp((3, 4, 2)), num_ranks, stage)  # 26 elements
    want = memory.compute_training_state_bytes(26, num_ranks, stage, *["float64"] * 3)
    assert max(array.nbytes for array in state.params) == want.params
    moments = [part.first.nbytes + part.second.nbytes for part in state.optimizer]
    assert max(moments) == want.optimizer
    flat = np.zeros(26)
    reduced = (
        zero.reduce_scatter_gradients([flat] * num_ranks, state.shards) if stage >= 2 else [flat]
    )
    assert max(array.nbytes for array in reduced) == want.gradients


@given(st.integers(0, 500), st.integers(1, 12))
def test_no_stage_holds_more_than_the_one_before(num_params, num_ranks):
    totals = [
        memory.compute_training_state_bytes(num_params, num_ranks, stage).total
        for stage in range(4)
    ]
    assert totals == sorted(totals, reverse=True)


def test_c137_buffers_may_rank_stage_3_above_stage_1():
    # A model of 4 kB in float32, a bucket of 64 kB, two ranks, one block and one fetched ahead.
    def total(stage, bucket=16_000):
        numbers = ("float32", "float32")
        buffers = memory.compute_buffer_memory_bytes(
            1000, bucket, *numbers, num_ranks=2, stage=stage, gathered_elements=2000
        )
        state = memory.compute_training_state_bytes(1000, 2, stage, *numbers, "float32")
        return state.total + buffers, buffers

    assert [total(stage)[1] for stage in (1, 2, 3)] == [4000, 4000, 12000]  # not 64000
    assert total(1)[0] == 4000 + 4000 + 4000 + 4000 == 16000
    assert total(2)[0] == 14000
    assert total(3)[0] == 2000 + 2000 + 4000 + 12000 == 20000 > total(1)[0]
    assert total(1, bucket=10)[1] == 40
    assert memory.compute_buffer_memory_bytes(1000, 10, num_ranks=1, stage=3) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory.compute_param_memory_bytes(-1), r"numel must be an integer >= 0; got -1"),
        (lambda: memory.compute_param_memory_bytes(1, "int8"), r"dtype must be one of .*'int8'"),
        (lambda: memory.compute_param_memory_bytes(1, num_ranks=0), r"num_ranks must .*got 0"),
        (lambda: memory.compute_gradient_memory_bytes(1, stage=4), r"stage must be 0, 1, 2 or 3;"),
        (lambda: memory.compute_gradient_memory_bytes(1, "x"), r"dtype must be one of"),
        (lambda: memory.compute_optimizer_memory_bytes(1, num_moments=-1), r"num_moments must"),
        (lambda: memory.compute_buffer_memory_bytes(1, 0), r"bucket_elements must .*got 0"),
        (lambda: memory.compute_training_state_bytes(1, 1, 1.0), r"stage must be an integer"),
        (lambda: memory.compute_peak_activation_memory_bytes(-1, (1, 1)), r"num_rows must"),
        (lambda: memory.compute_peak_activation_memory_bytes(1, (1,)), r"number of widths"),
        (lambda: memory.compute_peak_activation_memory_bytes(1, (1, 0)), r"sizes\[1\] must"),
        (lambda: memory.compute_peak_activation_memory_bytes(1, (1, 1), "int8"), r"dtype must"),
        (
            lambda: memory.compute_peak_activation_memory_bytes(1, (1, 1), num_microbatches=0),
            r"num_microbatches must",
        ),
        (lambda: memory.compute_peak_training_bytes(0, (1, 1)), r"num_rows must .*got 0"),
        (lambda: memory.compute_peak_training_bytes(1, (1, 1), "float16"), r"dtype must"),
        (lambda: memory.plan_memory_aware_step(1, (1, 1), -1), r"budget_bytes must .*got -1"),
        (lambda: memory.HeldBytes(-1), r"budget_bytes must"),
    ],
)
def test_bytes_refuse(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


# --- activations ---


def test_peak_activations_by_hand():
    peak = memory.compute_peak_activation_memory_bytes
    # One layer, 2 rows of 3 -> 1, float64: x 48, y, prediction and its gradient 16 each; at the
    # end x, the gradient of the prediction and that of x: 48 + 16 + 48.
    assert peak(2, (3, 1)) == 112
    # One hidden layer 1 -> 4 -> 1, one row: at the end of backward x, z(4), h(4), the gradients of
    # h(4) and x.
    assert peak(1, (1, 4, 1)) == 14 * 8
    assert peak(1, (1, 4, 1), "float32") == 14 * 4
    assert peak(1, (1, 4, 1), "bfloat16") == 14 * 2
    assert peak(0, (1, 4, 1)) == 0
    assert peak(10, (1, 4, 1), num_microbatches=3) == 4 * 14 * 8  # the longest piece has 4 rows
    assert peak(2, (1, 4, 1), num_microbatches=5) == 14 * 8
    # Four hidden layers of 10, one row, recompute of each: x, y and the outputs 1 + 40, dh 10;
    # the replay adds 10 and the gradient of the block's input 10: without y 1 + 40 + 30.
    assert peak(1, (1, 10, 10, 10, 10, 1), recompute_every=1) == (1 + 40 + 10 + 10 + 10) * 8
    assert peak(1, (1, 10, 10, 10, 10, 1)) == (1 + 80 + 10 + 10) * 8


def test_what_stays_after_the_forward_is_what_recompute_measures():
    """The forecast's activations at the end of forward, against arrays that another module kept."""
    num_rows, itemsize = 4, 8
    x, y = make_batches(num_rows)[0]
    for every in (0, 1, 2, 3, 4):
        _, segments = recompute.blocks_forward(
            recompute.mlp_blocks(5), make_mlp(), x, recompute_every=every
        )
        blocks_kept = recompute.measure_kept_bytes(segments).total
        changes = list(memory._microbatch_changes(num_rows, SIZES, itemsize, every, True))
        at_loss = next(i for i, c in enumerate(changes) if c.nbytes == -2 * y.nbytes)
        live = sum(change.nbytes for change in changes[: at_loss - 2])
        assert live == blocks_kept + y.nbytes


def test_half_precision_keeps_half_of_what_float32_keeps():
    params = make_mlp(dtype="float32")
    x = make_batches(4, dtype="float32")[0][0]
    _, saved = mixed_precision.half_mlp_forward(
        mixed_precision.half_params(params, "float16"), x.astype(np.float16)
    )
    _, wide = mlp.mlp_forward(params, x)
    nbytes = [sum(a.nbytes for part in kept for a in part) for kept in (saved, wide)]
    assert 2 * nbytes[0] == nbytes[1]
    peaks = [
        memory.compute_peak_activation_memory_bytes(4, SIZES, dtype)
        for dtype in ("float16", "float32")
    ]
    assert 2 * peaks[0] == peaks[1] and peaks[0] > nbytes[0]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=7),
    num_rows=st.integers(1, 9),
    every=st.integers(0, 6),
    num_microbatches=st.integers(1, 9),
    dtype=st.sampled_from(["float32", "float64"]),
)
@settings(max_examples=60, deadline=None)
def test_the_forecast_is_what_the_loop_counts(sizes, num_rows, every, num_microbatches, dtype):
    params = make_mlp(sizes, dtype)
    (x, y) = make_batches(num_rows, 1, sizes, dtype)[0]
    num_microbatches = min(num_microbatches, num_rows)
    plan = memory.MemoryPlan(num_microbatches, every, 0)
    held, state = memory.HeldBytes(), optimizers.adamw_init(params)
    fixed = 3 * sum(param.nbytes for param in params.values())
    parts = (dict(params), state.first, state.second)
    for tensors in parts:
        held.keep(*tensors.values())
    value, gradients = memory._planned_gradients(
        params, x, y, plan, "tanh", "mean_squared_error", held
    )
    want_loss, want = mlp.mlp_loss_and_gradients(params, x, y, "tanh")
    tolerance = 1e-12 if dtype == "float64" else 1e-4
    assert value == pytest.approx(want_loss, rel=tolerance)
    for name in params:
        assert np.allclose(gradients[name], want[name], rtol=tolerance, atol=tolerance)
    # Activations are gone, and gradients are all that was added.
    assert held.live_bytes == fixed + fixed // 3
    memory._update_one_by_one(*parts, gradients, 0, 0.1, 0.0, held)
    assert held.live_bytes == fixed and gradients == {}
    assert held.peak_bytes == memory.compute_peak_training_bytes(
        num_rows, sizes, dtype, every, num_microbatches
    )


# --- the loop ---


@pytest.mark.parametrize("activation", sorted(mlp.ACTIVATIONS))
def test_the_loop_equals_the_plain_loop_under_every_budget(activation):
    params, batches = make_mlp(), make_batches(6, 5)
    before = {name: param.copy() for name, param in params.items()}
    want, want_state, want_losses = plain_loop(params, batches, 0.05, 0.1, activation)
    roomy = memory.plan_memory_aware_step(6, SIZES, 10**9)
    tight = min(
        memory.compute_peak_training_bytes(6, SIZES, recompute_every=every, num_microbatches=cut)
        for every in range(5)
        for cut in range(1, 7)
    )
    seen = set()
    for budget in range(tight, roomy.peak_bytes + 1, 8):
        plan = memory.plan_memory_aware_step(6, SIZES, budget)
        assert plan.peak_bytes <= budget
        if plan in seen:
            continue
        seen.add(plan)
        got = memory.memory_aware_train(params, batches, budget, 0.05, 0.1, activation)
        assert got.peak_bytes == plan.peak_bytes <= budget
        assert got.plans == (plan,) * 5 and got.state.step == 5
        assert got.losses == pytest.approx(want_losses, rel=1e-12)
        for name in params:
            assert np.allclose(got.params[name], want[name], rtol=1e-12, atol=1e-12)
            for moment in ("first", "second"):
                pair = (getattr(got.state, moment)[name], getattr(want_state, moment)[name])
                assert np.allclose(*pair, rtol=1e-12, atol=1e-12)
            assert np.array_equal(params[name], before[name])
    assert len(seen) > 2 and roomy in seen and roomy[:2] == (1, 0)


def test_recompute_is_chosen_only_when_one_row_at_a_time_does_not_fit():
    # Long and narrow: activations outweigh the weights.
    sizes = (1, *[2] * 30, 1)
    num_rows = 40
    one_row = memory.compute_peak_training_bytes(num_rows, sizes, num_microbatches=num_rows)
    plan = memory.plan_memory_aware_step(num_rows, sizes, one_row)
    assert (plan.num_microbatches, plan.recompute_every) == (num_rows, 0)
    plan = memory.plan_memory_aware_step(num_rows, sizes, one_row - 1)
    assert plan.recompute_every > 1 and plan.peak_bytes < one_row
    result = memory.memory_aware_train(
        make_mlp(sizes), make_batches(num_rows, 2, sizes), one_row - 1, lr=0.01
    )
    assert result.plans[0] == plan and result.peak_bytes == plan.peak_bytes
    want, _, _ = plain_loop(make_mlp(sizes), make_batches(num_rows, 2, sizes), 0.01)
    for name, param in want.items():
        assert np.allclose(result.params[name], param, rtol=1e-12, atol=1e-12)


def test_a_budget_one_byte_short_is_declined_with_the_bytes_missing():
    tight = min(
        memory.compute_peak_training_bytes(6, SIZES, recompute_every=every, num_microbatches=cut)
        for every in range(5)
        for cut in range(1, 7)
    )
    assert memory.plan_memory_aware_step(6, SIZES, tight).peak_bytes == tight
    for short in (1, 100, tight):
        with pytest.raises(
            MemoryBudgetExceeded, match=rf"at least {tight} .*got {tight - short}: {short} bytes"
        ):
            memory.memory_aware_train(make_mlp(), make_batches(6), tight - short, lr=0.1)
    # No hidden layer: the message does not offer recompute.
    with pytest.raises(MemoryBudgetExceeded, match="no recompute"):
        memory.plan_memory_aware_step(3, (2, 1), 0)


def test_nothing_is_done_when_a_later_step_does_not_fit():
    params = make_mlp()
    peak = memory.compute_peak_training_bytes(1, SIZES)
    with pytest.raises(MemoryBudgetExceeded):
        memory.memory_aware_train(params, make_batches(1) + make_batches(50), peak - 1, lr=0.1)
    assert memory.memory_aware_train(params, [], peak, lr=0.1).losses == ()


@pytest.mark.parametrize("every", [0, 2])
def test_c141_the_peak_does_not_grow_with_the_number_of_microbatches(every):
    num_elements = sum(param.size for param in make_mlp().values())
    activations = {
        cut: memory.compute_peak_activation_memory_bytes(
            16 * cut, SIZES, recompute_every=every, num_microbatches=cut
        )
        for cut in (1, 2, 8)
    }
    assert len(set(activations.values())) == 1
    peaks = {}
    for cut in (1, 2, 8):  # 16 rows a microbatch
        held, params = memory.HeldBytes(), make_mlp()
        (x, y) = make_batches(16 * cut)[0]
        plan = memory.MemoryPlan(cut, every, 0)
        memory._planned_gradients(params, x, y, plan, "relu", "mean_squared_error", held)
        peaks[cut] = held.peak_bytes
    assert peaks[2] == peaks[8]
    assert 0 < peaks[2] - peaks[1] <= 8 * num_elements


@pytest.mark.parametrize("plan", [(1, 0), (3, 0), (1, 2), (3, 2), (2, 4)])
def test_what_is_dropped_has_ended_before_the_next_array_is_kept(plan):
    """The count is true: no name holds on to an array that counts no more."""

    class Watch(memory.HeldBytes):
        watched: list = []

        def keep(self, *arrays):
            for ref in self.watched:
                array = ref()
                assert array is None or array.base is not None, "dropped, but alive"
            super().keep(*arrays)

        def drop(self, *arrays):
            super().drop(*arrays)
            self.watched = [*self.watched, *(weakref.ref(array) for array in arrays)]

    held = Watch()
    params = make_mlp()
    state = optimizers.adamw_init(params)
    for tensors in (params, state.first, state.second):
        held.keep(*tensors.values())
    (x, y) = make_batches(6)[0]
    _, gradients = memory._planned_gradients(
        params, x, y, memory.MemoryPlan(*plan, 0), "tanh", "mean_squared_error", held
    )
    memory._update_one_by_one(params, state.first, state.second, gradients, 0, 0.1, 0.0, held)
    held.keep(np.zeros(1))
    assert len(held.watched) > 30


def test_the_counter():
    held = memory.HeldBytes(budget_bytes=100)
    one, two = np.zeros(5), np.zeros(7)
    held.keep(one, one)
    assert (held.live_bytes, held.peak_bytes) == (40, 40)
    held.keep(two)
    held.drop(one)
    assert (held.live_bytes, held.peak_bytes) == (96, 96)
    held.drop(one, two)
    assert (held.live_bytes, held.peak_bytes) == (0, 96)
    held.keep(np.zeros(0))
    with pytest.raises(MemoryBudgetExceeded, match=r"at most 100 bytes; got 104: 4 bytes are"):
        held.keep(np.zeros(13))
    with pytest.raises(AssertionError):
        held.drop(two)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": make_batches(0)}, "an update must have at least one row"),
        ({"batches": [(np.zeros((2, 3)), np.zeros(2, int))]}, "y must be a float32 or float64"),
        ({"loss": "softmax_cross_entropy"}, "loss must be one of"),
        ({"activation": "swish"}, "activation must be one of"),
        ({"budget_bytes": 1.5}, "budget_bytes must be an integer"),
        ({"params": {"w": np.zeros((2, 2))}}, "params must hold"),
        ({"batches": [(np.zeros((2, 4)), np.zeros((2, 2)))]}, "x must have shape"),
        ({"batches": [(np.zeros((2, 3)), np.zeros((2, 1)))]}, "target must have shape"),
    ],
)
def test_the_loop_refuses(change, message):
    arguments = {"params": make_mlp(), "batches": make_batches(2), "budget_bytes": 10**6, "lr": 0.1}
    with pytest.raises(ConfigError, match=message):
        memory.memory_aware_train(**arguments | change)


def test_microbatches_of_the_loop_are_those_of_accumulation():
    x, y = make_batches(7)[0]
    longest = max(len(x_i) for x_i, _ in accumulation.split_microbatches(x, y, 3))
    assert memory._longest_microbatch(7, 3) == longest == 3
