"""ZeRO in one process: shards, sharded updates and the step of every stage (A6)."""

import doctest
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.errors import ConfigError
from mpisim.reference import data_parallel, mlp, optimizers, zero
from mpisim.reference.mixed_precision import LossScale, update_loss_scale
from mpisim.reference.zero import Shard

SIZES = (3, 5, 4, 2)  # 54 elements


def make_mlp(sizes=SIZES, dtype="float64"):
    return mlp.init_mlp(lambda name: np.random.default_rng(list(name.encode())), sizes, dtype)


def make_rows(num_rows, seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_rows, SIZES[0])), rng.standard_normal((num_rows, SIZES[-1]))


def given_gradients(params, x, y, total_rows):
    """Take x as the gradient itself, one row."""
    return 0.0, {"w": x[0]}


def gradient_rows(*values):
    return [(np.array([np.atleast_1d(value)], np.float64), np.zeros(1)) for value in values]


def test_examples_in_docstrings():
    result = doctest.testmod(zero)
    assert result.attempted > 0 and result.failed == 0


# --- where tensors and shards lie ---


def test_c046_padding_is_stored_and_cut_off():
    flat = np.arange(1.0, 58.0)
    shards = zero.make_shards(57, 2, multiple=4)
    assert [(s.numel, s.padding, s.padded_numel) for s in shards] == [(30, 0, 30), (27, 3, 30)]
    arrays = zero.scatter_to_shards(flat, shards)
    assert [array.size for array in arrays] == [30, 30]
    assert arrays[1][27:].tolist() == [0, 0, 0]
    arrays[1][27:] = np.nan  # whatever is there is in no value, norm or flag
    assert np.array_equal(zero.gather_by_global_index(arrays, shards), flat)
    assert zero.sharded_global_norm(arrays, shards) == optimizers.global_norm({"w": flat})
    assert not zero.any_rank_non_finite(arrays, shards)
    # The sizes of the report, 30 + 29, cannot be read as anything.
    with pytest.raises(ConfigError, match="the array of rank 1 must have 29 elements"):
        zero.gather_by_global_index(arrays, [Shard(0, 30), Shard(30, 59)])


def test_c047_every_tensor_has_its_own_padding():
    tensors = {"a": np.arange(3.0), "b": np.arange(3.0, 8.0)}
    shards = {name: zero.make_shards(t.size, 2, multiple=2) for name, t in tensors.items()}
    parts = {name: zero.scatter_to_shards(t, shards[name]) for name, t in tensors.items()}
    ranks = [{name: parts[name][rank] for name in tensors} for rank in range(2)]
    assert [{name: a.size for name, a in rank.items()} for rank in ranks] == [{"a": 2, "b": 3}] * 2
    shapes = {name: t.shape for name, t in tensors.items()}
    for full in zero.all_gather_param_shards(ranks, shards, shapes):
        assert full["a"].tolist() == [0, 1, 2] and full["b"].tolist() == [3, 4, 5, 6, 7]
    faulty = np.concatenate([np.concatenate([*rank.values()]) for rank in ranks])
    assert faulty.tolist() == [0, 1, 3, 4, 5, 2, 0, 6, 7, 0]


def test_c049_values_are_found_by_global_index_not_by_convention():
    written = zero.make_shards(10, 3)
    arrays = zero.scatter_to_shards(np.arange(10.0), written)
    assert [array.size for array in arrays] == [4, 3, 3]
    read = [Shard(0, 4), Shard(4, 8), Shard(8, 10)]
    again = zero.scatter_to_shards(zero.gather_by_global_index(arrays, written), read)
    assert [array.tolist() for array in again] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(ConfigError, match="the array of rank 1 must have 4 elements"):
        zero.gather_by_global_index(arrays, read)


def test_slots_and_shards_by_hand():
    params = {"w": np.array([[1.0, 2.0], [3.0, 4.0]]), "none": np.zeros((0, 3)), "b": np.ones(1)}
    slots = zero.flat_slots(params)
    assert [(slot.name, slot.start, slot.stop) for slot in slots] == [
        ("w", 0, 4),
        ("none", 4, 4),
        ("b", 4, 5),
    ]
    flat = zero.flatten_params(dict(reversed(params.items())), slots)  # by name, not by order
    assert flat.tolist() == [1, 2, 3, 4, 1]
    back = zero.unflatten_params(flat, slots)
    assert {name: a.tolist() for name, a in back.items()} == {
        name: a.tolist() for name, a in params.items()
    }
    assert not np.shares_memory(back["w"], flat)
    assert [s.padded_numel for s in zero.make_shards(1, 4, multiple=4)] == [1, 1, 1, 1]
    assert [s.numel for s in zero.make_shards(1, 4, multiple=4)] == [1, 0, 0, 0]
    assert zero.make_shards(0, 2, multiple=2) == [Shard(0, 0), Shard(0, 0)]


@given(st.integers(0, 60), st.integers(1, 9), st.sampled_from([None, 1, 2, 8]), st.randoms())
def test_scatter_and_gather_return_every_element_in_any_order(numel, num_ranks, factor, random):
    multiple = None if factor is None else factor * num_ranks
    shards = zero.make_shards(numel, num_ranks, multiple)
    assert sum(shard.numel for shard in shards) == numel
    if multiple:
        (length,) = {shard.padded_numel for shard in shards}
        assert length * num_ranks == -(-numel // multiple) * multiple
    flat = np.arange(1.0, numel + 1)
    pairs = list(zip(zero.scatter_to_shards(flat, shards), shards, strict=True))
    random.shuffle(pairs)
    assert np.array_equal(zero.gather_by_global_index(*zip(*pairs, strict=True)), flat)


W = {"w": np.zeros(3)}
SLOTS = zero.flat_slots(W)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Shard(2, 1), r"stop at or after its start; got \[2, 1\)"),
        (lambda: Shard(0, 1, -1), "padding must be an integer >= 0"),
        (lambda: zero.make_shards(-1, 2), "numel must"),
        (lambda: zero.make_shards(1, 0), "num_ranks must"),
        (lambda: zero.make_shards(5, 2, multiple=3), "got 3 for 2 ranks. Use 4"),
        (lambda: zero.flat_slots({"w": np.zeros(2, int)}), "must be a float32 or float64"),
        (lambda: zero.flat_slots(W | {"b": np.zeros(1, "f4")}), "one dtype; got float32, float64"),
        (lambda: zero.flatten_params({"v": np.zeros(3)}, SLOTS), r"got \['v', 'w'\]"),
        (lambda: zero.flatten_params({"w": np.zeros(4)}, SLOTS), r"must have shape \(3,\)"),
        (lambda: zero.flatten_params({}, ()), "slots must hold one or more"),
        (lambda: zero.unflatten_params(np.zeros(4), SLOTS), "must have the 3 elements .* got 4"),
        (lambda: zero.scatter_to_shards(np.zeros(3), [Shard(0, 2)]), "shards that end at 2"),
        (lambda: zero.scatter_to_shards(np.zeros(3), [Shard(0, 1), Shard(2, 3)]), "gap before"),
        (lambda: zero.scatter_to_shards(np.zeros(3), [Shard(0, 2), Shard(1, 3)]), "overlap"),
        (lambda: zero.gather_by_global_index([], []), "one entry per shard"),
        (lambda: zero.all_gather_param_shards([], {}, {}), "one dict per rank; got an empty"),
        (
            lambda: zero.all_gather_param_shards([W], {"w": [Shard(0, 3)]}, {"v": (3,)}),
            r"got \['v', 'w'\] not in all",
        ),
        (
            lambda: zero.all_gather_param_shards([W], {"w": [Shard(0, 3)]}, {"w": (4,)}),
            "must hold its 4 elements; got 3",
        ),
        (lambda: zero.reduce_scatter_gradients([], []), "one entry per shard"),
        (
            lambda: zero.reduce_scatter_gradients([np.zeros(3), np.zeros(2)], [Shard(0, 3)] * 2),
            r"rank 1 must have shape \(3,\)",
        ),
        (lambda: zero.shard_ring_bytes([], 4), "number of shards must"),
        (
            lambda: zero.sharded_global_norm([np.zeros(3)], [Shard(0, 3)], []),
            "must come from every rank; got 0 for 1",
        ),
        (
            lambda: zero.sharded_global_norm(
                [np.zeros(1)] * 2, zero.make_shards(2, 2), [W, {"w": np.ones(3)}]
            ),
            "another 'w' on rank 1",
        ),
        (
            lambda: zero.clip_sharded_gradients([np.zeros(3)], [Shard(0, 3)], 0.0),
            "max_norm must be finite, > 0",
        ),
        (
            lambda: zero.clip_sharded_gradients([np.full(3, np.nan)], [Shard(0, 3)], 1.0),
            "finite global norm to be clipped; got nan",
        ),
        (lambda: zero.init_zero(W, 2, 4), "stage must be 0, 1, 2 or 3; got 4"),
        (lambda: zero.init_zero(W, 2, True), "stage must be an integer"),
        (
            lambda: zero.zero_train_step(zero.init_zero(W, 2, 1), [gradient_rows(1)], 0.1),
            r"each of 2 ranks; got \[1\]",
        ),
        (
            lambda: zero.zero_train_step(
                zero.init_zero(W, 2, 1), [gradient_rows(1), gradient_rows(1, 2)], 0.1
            ),
            r"got \[1, 2\]",
        ),
        (
            lambda: zero.zero_train_step(zero.init_zero(W, 1, 1), [[make_rows(0)]], 0.1),
            "at least one row",
        ),
        (
            lambda: zero.gather_optimizer_state(
                [
                    zero.AdamShard(step, Shard(step, step), np.zeros(0), np.zeros(0))
                    for step in (1, 2)
                ],
                SLOTS,
            ),
            r"same number of steps; got \[1, 2\]",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


# --- gradients ---


def test_c051_reduce_scatter_agrees_with_all_reduce():
    gradients = [np.full(7, rank + 1.0) for rank in range(3)]
    shards = zero.make_shards(7, 3)
    scattered = zero.reduce_scatter_gradients(gradients, shards)
    for reduced, shard in zip(data_parallel.ring_all_reduce(gradients), shards, strict=True):
        assert reduced.tolist() == [6.0] * 7 and (reduced / 3).tolist() == [2.0] * 7
        rank = shards.index(shard)
        assert np.array_equal(scattered[rank], reduced[shard.start : shard.stop])


def test_c053_bytes_of_one_gradient_reduction():
    shards = zero.make_shards(1000, 4)
    assert zero.shard_ring_bytes(shards, 4) == [3000] * 4  # (W-1)/W * N * 4, not 6000
    params = {"w": np.zeros(1000, np.float32)}
    batches = [[(np.ones((1, 1000), np.float32), np.zeros(1))] * 3] * 4

    def sent(stage):
        state = zero.init_zero(params, 4, stage)
        _, report = zero.zero_train_step(state, batches, 0.1, gradients_of=given_gradients)
        return report.gradient_sent_bytes

    assert sent(0) == (6000,) * 4 and sent(1) == (3000,) * 4
    assert sent(2) == sent(3) == (9000,) * 4  # three microbatches, each reduced


@given(st.integers(1, 30), st.integers(1, 7), st.integers(0, 99))
@settings(deadline=None)
def test_reduce_scatter_has_the_bits_and_the_bytes_of_the_ring(numel, num_ranks, seed):
    rng = np.random.default_rng(seed)
    gradients = [rng.standard_normal(numel) for _ in range(num_ranks)]
    shards = zero.make_shards(numel, num_ranks)
    ring = data_parallel.ring_reduce_scatter(gradients)
    for got, want in zip(zero.reduce_scatter_gradients(gradients, shards), ring, strict=True):
        assert np.array_equal(got, want)
    padded = zero.make_shards(numel, num_ranks, 2 * num_ranks)
    joined = zero.gather_by_global_index(zero.reduce_scatter_gradients(gradients, padded), padded)
    assert np.allclose(joined, sum(gradients), rtol=1e-12, atol=1e-12)
    want = data_parallel.ring_bytes(numel, num_ranks, 8, "reduce_scatter")
    assert zero.shard_ring_bytes(shards, 8) == want
    want = data_parallel.ring_bytes(numel, num_ranks, 8, "all_gather")
    assert [zero._ring_gather_bytes(shards, rank, 8) for rank in range(num_ranks)] == want


def test_c033_all_ranks_clip_with_the_global_norm():
    arrays, shards = [np.array([3.0]), np.array([4.0])], zero.make_shards(2, 2)
    clipped, replicas, norm = zero.clip_sharded_gradients(arrays, shards, max_norm=1.0)
    assert norm == 5.0 and replicas == []
    assert [float(a[0]) for a in clipped] == pytest.approx([0.6, 0.8], abs=1e-15)
    clipped, _, _ = zero.clip_sharded_gradients(arrays, shards, max_norm=5.0)
    assert [a.tolist() for a in clipped] == [[3.0], [4.0]]
    assert not np.shares_memory(clipped[0], arrays[0])


def test_c035_replicated_parameters_count_once():
    arrays, shards = [np.array([3.0]), np.array([4.0])], zero.make_shards(2, 2)
    bias = [{"bias": np.array([12.0])} for _ in range(2)]
    assert zero.sharded_global_norm(arrays, shards, bias) == 13.0
    clipped, replicas, norm = zero.clip_sharded_gradients(arrays, shards, 6.5, bias)
    assert norm == 13.0 and [a.tolist() for a in clipped] == [[1.5], [2.0]]
    assert [replica["bias"].tolist() for replica in replicas] == [[6.0], [6.0]]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_c019_one_rank_s_inf_stops_all_ranks(bad):
    shards = zero.make_shards(2, 2)
    assert zero.any_rank_non_finite([np.array([1.0]), np.array([bad])], shards)
    # Rank 1 owns nothing: it brings 0 and does not raise.
    shards = zero.make_shards(1, 2)
    assert not zero.any_rank_non_finite([np.array([1.0]), np.zeros(0)], shards)
    assert zero.any_rank_non_finite([np.array([bad]), np.zeros(0)], shards)


@pytest.mark.parametrize("stage", zero.STAGES)
@pytest.mark.parametrize("width", [1, 2])
def test_c019_a_skipped_step_changes_nothing_on_any_rank(stage, width):
    state = zero.init_zero({"w": np.ones(width)}, 2, stage)
    bad = np.ones(width)
    bad[-1] = np.inf
    batches = [gradient_rows(np.ones(width)), gradient_rows(bad)]
    after, report = zero.zero_train_step(
        state, batches, 1.0, max_norm=1.0, gradients_of=given_gradients
    )
    assert report.skipped and after is state and report.grad_norm == np.inf
    scale = update_loss_scale(LossScale(scale=2.0, backoff_factor=0.5), report.skipped)
    assert scale.scale == 1.0
    assert all(part.step == 0 for part in after.optimizer)
    assert all(full["w"].tolist() == [1.0] * width for full in zero.full_params(after))


# --- optimizer state ---


def test_partition_by_hand():
    state = optimizers.AdamWState(
        7,
        {"w": np.array([[1.0, 2.0], [3.0, 4.0]]), "b": np.array([5.0])},
        {"b": np.array([50.0]), "w": np.array([[10.0, 20.0], [30.0, 40.0]])},
    )
    slots = zero.flat_slots(state.first)
    parts = zero.partition_optimizer_state(state, slots, zero.make_shards(5, 2, multiple=2))
    assert [part.first.tolist() for part in parts] == [[1, 2, 3], [4, 5, 0]]
    assert [part.second.tolist() for part in parts] == [[10, 20, 30], [40, 50, 0]]
    assert [part.step for part in parts] == [7, 7]
    back = zero.gather_optimizer_state(parts[::-1], slots)
    assert back.step == 7
    for name in state.first:
        assert np.array_equal(back.first[name], state.first[name])
        assert np.array_equal(back.second[name], state.second[name])


def test_an_empty_shard_counts_the_step():
    part = zero.AdamShard(3, Shard(1, 1, padding=2), np.zeros(2), np.zeros(2))
    slots = zero.flat_slots({"w": np.zeros(1)})
    params, after = zero.sharded_adamw_step(np.zeros(2), np.zeros(2), part, slots, lr=0.1)
    assert params.tolist() == [0, 0] and after.step == 4 and after.shard == part.shard


def test_a_sharded_step_refuses_arrays_of_another_shard():
    part = zero.AdamShard(0, Shard(0, 2), np.zeros(2), np.zeros(2))
    with pytest.raises(ConfigError, match="must have 2 elements"):
        zero.sharded_adamw_step(np.zeros(2), np.zeros(3), part, SLOTS, lr=0.1)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 60])
@pytest.mark.parametrize("factor", [None, 1, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_sharded_update_has_the_bits_of_the_whole_one(num_ranks, factor, dtype):
    params = make_mlp(dtype=dtype)
    slots = zero.flat_slots(params)
    shards = zero.make_shards(54, num_ranks, None if factor is None else factor * num_ranks)
    whole = optimizers.adamw_init(params)
    parts = zero.partition_optimizer_state(whole, slots, shards)
    held = zero.scatter_to_shards(zero.flatten_params(params, slots), shards)
    rng = np.random.default_rng(0)
    for _ in range(4):
        gradients = {name: rng.standard_normal(p.shape).astype(dtype) for name, p in params.items()}
        flat = zero.flatten_params(gradients, slots)
        params, whole = optimizers.adamw_step(params, gradients, whole, 0.1, weight_decay=0.5)
        stepped = [
            zero.sharded_adamw_step(*arrays, slots, 0.1, weight_decay=0.5)
            for arrays in zip(held, zero.scatter_to_shards(flat, shards), parts, strict=True)
        ]
        held, parts = [pair[0] for pair in stepped], [pair[1] for pair in stepped]
    got = zero.unflatten_params(zero.gather_by_global_index(held, shards), slots)
    state = zero.gather_optimizer_state(parts, slots)
    assert state.step == 4
    for name in params:
        assert np.array_equal(got[name], params[name])
        assert np.array_equal(state.first[name], whole.first[name])
        assert np.array_equal(state.second[name], whole.second[name])


# --- the step ---


@pytest.mark.parametrize("stage", zero.STAGES)
def test_c015_every_step_starts_from_nothing(stage):
    state = zero.init_zero({"w": np.zeros(1)}, 2, stage)
    norms = []
    for window in ([1, 1, 1, 1], [10, 1, 1, 1], [1, 1, 1, 10], [0, 0, 0, 2]):
        # Rank 1's gradients are zeros, so the sum over ranks is rank 0's.
        batches = [gradient_rows(*window), gradient_rows(0, 0, 0, 0)]
        state, report = zero.zero_train_step(state, batches, 0.1, gradients_of=given_gradients)
        norms.append(report.grad_norm)
    assert norms == [4.0, 13.0, 13.0, 2.0]


@pytest.mark.parametrize("stage", zero.STAGES)
def test_c017_every_microbatch_is_in_the_reduced_gradient(stage):
    state = zero.init_zero({"w": np.zeros(1)}, 2, stage)
    batches = [gradient_rows(1, 10)] * 2
    # Plain sums over ranks: 22, a mean of 11.
    _, report = zero.zero_train_step(state, batches, 0.1, gradients_of=given_gradients)
    assert report.grad_norm / 2 == 11.0


@pytest.mark.parametrize("stage", zero.STAGES)
@pytest.mark.parametrize(("num_ranks", "factor"), [(1, None), (2, None), (3, 2), (60, None)])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_the_full_model_equals_the_unsharded_one(stage, num_ranks, factor, max_norm):
    params = make_mlp()
    state = zero.init_zero(params, num_ranks, stage, factor and factor * num_ranks)
    whole = optimizers.adamw_init(params)
    gradients_of = functools.partial(data_parallel.local_gradients, activation="tanh")
    for step in range(4):
        x, y = make_rows(11, seed=step)
        # Two microbatches a rank of uneven length, some of them without rows.
        edges = np.sort(np.random.default_rng(step).integers(0, 12, 2 * num_ranks - 1))
        pieces = list(zip(np.split(x, edges), np.split(y, edges), strict=True))
        batches = [pieces[2 * rank : 2 * rank + 2] for rank in range(num_ranks)]
        state, report = zero.zero_train_step(
            state, batches, 0.05, weight_decay=0.1, max_norm=max_norm, gradients_of=gradients_of
        )
        loss, gradients = mlp.mlp_loss_and_gradients(params, x, y, "tanh")
        norm = optimizers.global_norm(gradients)
        if max_norm is not None:
            gradients, _ = optimizers.clip_by_global_norm(gradients, max_norm)
        params, whole = optimizers.adamw_step(params, gradients, whole, 0.05, weight_decay=0.1)
        assert report.loss == pytest.approx(loss, rel=1e-12) and not report.skipped
        assert report.grad_norm == pytest.approx(norm, rel=1e-12)
        assert norm > 0.5
    fulls = zero.full_params(state)
    for full in fulls:
        for name, param in params.items():
            assert np.allclose(full[name], param, rtol=0, atol=1e-12)
            assert np.array_equal(full[name], fulls[0][name])
    parts = state.optimizer[:1] if stage == 0 else state.optimizer
    joined = zero.gather_optimizer_state(parts, state.slots)
    assert joined.step == 4
    for name in params:
        assert np.allclose(joined.first[name], whole.first[name], rtol=0, atol=1e-12)
        assert np.allclose(joined.second[name], whole.second[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", zero.STAGES)
def test_a_step_leaves_its_arguments_alone_and_shares_nothing(stage):
    params = make_mlp()
    state = zero.init_zero(params, 2, stage)
    before = [array.copy() for array in state.params]
    batches = [[make_rows(2)], [make_rows(3)]]
    after, _ = zero.zero_train_step(state, batches, 0.1)
    for array, copy, new in zip(state.params, before, after.params, strict=True):
        assert np.array_equal(array, copy) and not np.array_equal(new, copy)
    assert not np.shares_memory(after.params[0], after.params[1])
    assert not any(np.shares_memory(after.params[0], part.first) for part in after.optimizer)
    whole = {0: 54, 1: 54, 2: 54, 3: 27}[stage]
    assert [array.size for array in after.params] == [whole] * 2
    assert [part.first.size for part in after.optimizer] == [54 if stage == 0 else 27] * 2
