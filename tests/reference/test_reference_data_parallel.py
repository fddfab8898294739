"""A5: shards, collectives in one process, buckets, and the data-parallel step."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.errors import ConfigError
from mpisim.reference import accumulation, mlp, optimizers
from mpisim.reference import data_parallel as dp
from mpisim.reference.chunks import chunk_bounds

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in ("f8", "f4", "f2", "i8")] + [BFLOAT16]
RANKS = [1, 2, 3, 4, 5, 6, 7, 8]
COUNTS = [0, 1, 2, 3, 7, 10, 1000]
ALL_REDUCES = [dp.ring_all_reduce, dp.recursive_doubling_all_reduce]


def small_integers(num_workers, count, dtype=np.float64, seed=0):
    """Draw addends whose sums are exact in every dtype, so any order gives the same bits."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-8, 9, count).astype(dtype) for _ in range(num_workers)]


def random_floats(num_workers, count, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(count).astype(dtype) for _ in range(num_workers)]


def bits(array):
    return array.dtype.str, array.shape, array.tobytes()


def make_params(sizes=(3, 5, 2), seed=0):
    rng = np.random.default_rng(seed)
    return mlp.init_mlp(lambda name: rng, sizes)


def make_rows(num_rows, seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_rows, 3)), rng.standard_normal((num_rows, 2))


def copies(params, num_workers):
    return [{name: param.copy() for name, param in params.items()} for _ in range(num_workers)]


def sgd(params, gradients):
    return optimizers.sgd_step(params, gradients, lr=0.05)


# --- shard_dataset_across_workers ---


def test_shards_by_hand():
    shards = dp.shard_dataset_across_workers(10, 4)
    assert [shard.tolist() for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert {shard.dtype for shard in shards} == {np.dtype(np.int64)}


def test_c134_fewer_samples_than_workers_and_none():
    shards = dp.shard_dataset_across_workers(3, 4)
    assert [shard.tolist() for shard in shards] == [[0], [1], [2], []]
    assert [shard.size for shard in dp.shard_dataset_across_workers(0, 3)] == [0, 0, 0]
    assert [shard.tolist() for shard in dp.shard_dataset_across_workers(2, 1)] == [[0, 1]]


@given(num_samples=st.integers(0, 300), num_workers=st.integers(1, 40))
def test_shards_are_disjoint_and_cover_everything(num_samples, num_workers):
    shards = dp.shard_dataset_across_workers(num_samples, num_workers)
    assert len(shards) == num_workers
    assert np.concatenate(shards).tolist() == list(range(num_samples))
    sizes = [shard.size for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_c128_every_sample_counts_once_in_an_evaluation(num_workers):
    right = np.array([False, False] + [True] * 8)
    shards = dp.shard_dataset_across_workers(10, num_workers)
    hits = dp.ring_all_reduce([np.array([right[shard].sum()], np.int64) for shard in shards])
    seen = dp.ring_all_reduce([np.array([shard.size], np.int64) for shard in shards])
    assert int(hits[0][0]) / int(seen[0][0]) == 0.8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((-1, 2), r"num_samples must be an integer >= 0; got -1\."),
        ((4, 0), r"num_workers must be an integer >= 1; got 0\."),
        ((4.0, 2), r"num_samples must be an integer >= 0; got 4\.0\."),
    ],
)
def test_shards_refuse(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        dp.shard_dataset_across_workers(*arguments)


# --- ring: step tables, reduce-scatter, all-gather ---


@pytest.mark.parametrize("num_workers", RANKS)
def test_ring_tables_send_only_what_is_ready(num_workers):
    ranks, steps = range(num_workers), range(num_workers - 1)
    for worker in ranks:
        left = (worker - 1) % num_workers
        for table in (dp.reduce_scatter_chunks, dp.all_gather_chunks):
            for step in steps:
                send, receive = table(worker, step, num_workers)
                assert receive == table(left, step, num_workers)[0]  # sender and receiver agree
                if step > 0:
                    assert send == table(worker, step - 1, num_workers)[1]  # what just came in
        if num_workers > 1:
            assert dp.reduce_scatter_chunks(worker, num_workers - 2, num_workers)[1] == worker
            assert dp.all_gather_chunks(worker, 0, num_workers)[0] == worker
        received = {dp.all_gather_chunks(worker, step, num_workers)[1] for step in steps}
        assert received == set(ranks) - {worker}


def test_reduce_scatter_by_hand():
    arrays = [np.array([1.0, 2, 3, 4, 5]), np.array([10.0, 20, 30, 40, 50])]
    assert [shard.tolist() for shard in dp.ring_reduce_scatter(arrays)] == [[11, 22, 33], [44, 55]]


def test_ring_adds_each_chunk_in_ring_order():
    # Worker r adds its own to what it received; chunk c starts at worker c + 1 and ends at c.
    arrays = random_floats(4, 11, np.float32, seed=3)
    bounds = chunk_bounds(11, 4)
    for chunk, shard in enumerate(dp.ring_reduce_scatter(arrays)):
        part = slice(bounds[chunk], bounds[chunk + 1])
        want = arrays[(chunk + 1) % 4][part]
        for hop in (2, 3, 4):
            want = arrays[(chunk + hop) % 4][part] + want
        assert bits(shard) == bits(want)
    # The order shows: adding in rank order gives other bits somewhere.
    in_rank_order = arrays[0] + arrays[1] + arrays[2] + arrays[3]
    assert np.concatenate(dp.ring_reduce_scatter(arrays)).tobytes() != in_rank_order.tobytes()


@pytest.mark.parametrize("num_workers", RANKS)
@pytest.mark.parametrize("count", COUNTS)
def test_reduce_scatter_gives_worker_r_chunk_r(num_workers, count):
    arrays = small_integers(num_workers, count)
    before = [bits(array) for array in arrays]
    bounds = chunk_bounds(count, num_workers)
    total = np.sum(arrays, axis=0)
    shards = dp.ring_reduce_scatter(arrays)
    for worker, shard in enumerate(shards):
        assert np.array_equal(shard, total[bounds[worker] : bounds[worker + 1]])
        assert not any(np.shares_memory(shard, array) for array in arrays)
    assert [bits(array) for array in arrays] == before


def test_c056_empty_shards_take_their_turn():
    lengths = [2, 0, 1]
    gathered = dp.ring_all_gather([np.full(n, float(r)) for r, n in enumerate(lengths)])
    assert [whole.tolist() for whole in gathered] == [[0.0, 0.0, 2.0]] * 3
    assert [whole.size for whole in dp.ring_all_gather([np.zeros(0)] * 3)] == [0, 0, 0]
    assert [total.size for total in dp.ring_all_reduce([np.zeros(0)] * 3)] == [0, 0, 0]
    shards = dp.ring_reduce_scatter([np.ones(2)] * 3)
    assert [shard.tolist() for shard in shards] == [[3.0], [3.0], []]


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    dtype=st.sampled_from(["f8", "f2", "i8", "u1"]),
)
@settings(deadline=None)
def test_all_gather_equals_concatenation_on_every_worker(lengths, dtype):
    rng = np.random.default_rng(len(lengths))
    shards = [rng.integers(0, 100, length).astype(dtype) for length in lengths]
    want = np.concatenate(shards)
    gathered = dp.ring_all_gather(shards)
    assert all(bits(whole) == bits(want) for whole in gathered)
    for index, whole in enumerate(gathered):  # nobody shares memory with anybody
        assert not any(np.shares_memory(whole, other) for other in gathered[index + 1 :])
        assert not any(np.shares_memory(whole, shard) for shard in shards)


def test_all_gather_by_hand_and_alone():
    assert [a.tolist() for a in dp.ring_all_gather([np.array([1, 2]), np.array([3])])] == [
        [1, 2, 3],
        [1, 2, 3],
    ]
    assert [a.tolist() for a in dp.ring_all_gather([np.array([7])])] == [[7]]


def test_c058_reduce_scatter_leaves_large_inputs_alone():
    for count in (2 * 4 * 2**20 // 8, 2 * 256 * 2**10 // 8):
        pattern = np.arange(count, dtype=np.float64) % 97
        arrays = [pattern.copy(), pattern.copy()]
        shards = dp.ring_reduce_scatter(arrays)
        assert np.array_equal(np.concatenate(shards), 2 * pattern)
        assert all(np.array_equal(array, pattern) for array in arrays)


# --- all-reduce ---


@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
def test_all_reduce_by_hand(all_reduce):
    arrays = [np.array([[1, 2], [3, 4]]) * 10**r for r in range(3)]
    for total in all_reduce(arrays):
        assert total.tolist() == [[111, 222], [333, 444]]


@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
@pytest.mark.parametrize("num_workers", RANKS)
@pytest.mark.parametrize("count", COUNTS)
def test_all_reduce_is_exact_for_small_integers_in_every_dtype(all_reduce, num_workers, count):
    for dtype in DTYPES:
        arrays = small_integers(num_workers, count, dtype)
        before = [bits(array) for array in arrays]
        want = np.sum([array.astype(np.float64) for array in arrays], axis=0).astype(dtype)
        totals = all_reduce(arrays)
        assert len(totals) == num_workers
        assert all(bits(total) == bits(want) for total in totals)
        assert [bits(array) for array in arrays] == before
        owned = totals + arrays
        if count:
            assert not any(
                np.shares_memory(owned[i], owned[j])
                for i in range(len(owned))
                for j in range(i + 1, len(owned))
            )


@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != np.int64])
@pytest.mark.parametrize("num_workers", [2, 3, 5, 6, 8])
def test_all_workers_end_with_the_same_bits(all_reduce, dtype, num_workers):
    arrays = random_floats(num_workers, 23, dtype, seed=num_workers)
    totals = all_reduce(arrays)
    assert len({bits(total) for total in totals}) == 1
    want = np.sum([array.astype(np.float64) for array in arrays], axis=0)
    tolerance = {8: 1e-13, 4: 1e-5, 2: 0.2 if dtype == BFLOAT16 else 0.02}[dtype.itemsize]
    assert np.max(np.abs(totals[0].astype(np.float64) - want)) < tolerance
    assert all(
        bits(a) == bits(b) for a, b in zip(totals, all_reduce(arrays), strict=True)
    )  # repeatable


@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 0), (2, 1, 3)])
def test_all_reduce_keeps_shapes_and_takes_row_major_order(all_reduce, shape):
    rising = np.arange(math.prod(shape), dtype=float).reshape(shape)
    arrays = [np.array(rising + worker, order="F") for worker in range(3)]
    for total in all_reduce(arrays):
        assert isinstance(total, np.ndarray) and total.shape == shape
        assert np.array_equal(total, arrays[0] + arrays[1] + arrays[2])


@pytest.mark.parametrize("count", [10, 3, 1, 0])
def test_c054_any_count_over_four_workers(count):
    arrays = [np.full(count, worker + 1, np.float32) for worker in range(4)]
    for total in dp.ring_all_reduce(arrays):
        assert total.tolist() == [10.0] * count
    assert sum(dp.ring_bytes(count, 4, 4)) == {10: 240, 3: 72, 1: 24, 0: 0}[count]


@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
def test_c060_everyone_adds_in_the_same_order(all_reduce):
    values = [np.float32(1e8), np.float32(1), np.float32(-1e8)]
    totals = all_reduce([np.full(5, value) for value in values])
    assert len({bits(total) for total in totals}) == 1
    # The order matters here, so equal bits are no accident.
    assert (values[0] + values[1]) + values[2] != (values[0] + values[2]) + values[1]


def test_c061_fused_and_unfused_agree_up_to_rounding():
    five, seven = random_floats(4, 5, np.float32, 1), random_floats(4, 7, np.float32, 2)
    fused = dp.ring_all_reduce([np.concatenate(pair) for pair in zip(five, seven, strict=True)])[0]
    apart = np.concatenate([dp.ring_all_reduce(five)[0], dp.ring_all_reduce(seven)[0]])
    assert np.allclose(fused, apart, rtol=1e-5, atol=1e-6)
    five, seven = small_integers(4, 5, np.float32, 1), small_integers(4, 7, np.float32, 2)
    fused = dp.ring_all_reduce([np.concatenate(pair) for pair in zip(five, seven, strict=True)])[0]
    apart = np.concatenate([dp.ring_all_reduce(five)[0], dp.ring_all_reduce(seven)[0]])
    assert bits(fused) == bits(apart)


@pytest.mark.parametrize(
    "collective", [dp.ring_reduce_scatter, dp.ring_all_reduce, dp.recursive_doubling_all_reduce]
)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.bool_, np.complex128])
def test_c064_narrow_integers_are_refused(collective, dtype):
    arrays = [np.array([120, 100]).astype(dtype)] * 2
    with pytest.raises(ConfigError, match="arrays must be of float64, .* to be summed; got"):
        collective(arrays)


def test_int64_counts_are_exact_beyond_float64():
    large = 2**53
    for all_reduce in ALL_REDUCES:
        total = all_reduce([np.array([large]), np.array([1]), np.array([0])])[2]
        assert total.tolist() == [large + 1]


def test_16_bit_sums_are_rounded_once_per_hop():
    # bfloat16 has 8 significant bits: 256 + 1 rounds back to 256 at every hop, so the three ones
    # vanish if they arrive one by one; summed first, 256 + 3 rounds to 260.
    one, large = np.array([1.0], BFLOAT16), np.array([256.0], BFLOAT16)
    # One element over four workers is chunk 0: its sum starts at worker 1 and ends at worker 0.
    assert dp.ring_all_reduce([large, one, one, one])[0].astype(float).tolist() == [260.0]
    assert dp.ring_all_reduce([one, large, one, one])[0].astype(float).tolist() == [256.0]
    # In pairs: 256 + 1 rounds to 256, 1 + 1 is 2.
    assert dp.recursive_doubling_all_reduce([large, one, one, one])[0].astype(float).tolist() == [
        258.0
    ]


@given(seed=st.integers(0, 2**32), dtype=st.sampled_from([np.dtype("f2"), BFLOAT16]))
@settings(max_examples=30, deadline=None)
def test_one_hop_in_16_bits_is_the_float32_sum_rounded(seed, dtype):
    own, received = random_floats(2, 64, dtype, seed)
    want = (own.astype(np.float32) + received.astype(np.float32)).astype(dtype)
    assert bits(dp.add_received(own, received)) == bits(want)
    assert bits(dp.add_received(received, own)) == bits(want)


def test_saturated_16_bit_sums_become_infinite_without_a_warning():
    arrays = [np.full(2, 40000, np.float16)] * 4
    with np.errstate(all="raise"):
        assert dp.ring_all_reduce(arrays)[0].tolist() == [math.inf, math.inf]


def test_recursive_doubling_adds_in_its_documented_order():
    arrays = random_floats(6, 17, np.float32, seed=9)
    folded = [arrays[0] + arrays[1], arrays[2] + arrays[3], arrays[4], arrays[5]]
    pairs = [folded[0] + folded[1], folded[2] + folded[3]]
    want = pairs[0] + pairs[1]
    for total in dp.recursive_doubling_all_reduce(arrays):
        assert bits(total) == bits(want)
    arrays = random_floats(5, 17, np.float32, seed=9)
    want = ((arrays[0] + arrays[1]) + arrays[2]) + (arrays[3] + arrays[4])
    for total in dp.recursive_doubling_all_reduce(arrays):
        assert bits(total) == bits(want)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ([], "arrays must hold one array per worker; got an empty list"),
        ([np.zeros(2), np.zeros(3)], r"worker 1 must have shape \(2,\) .*; got \(3,\) and float64"),
        ([np.zeros(2), np.zeros(2, "f4")], r"worker 1 must have .* dtype float64 .* and float32"),
        ([np.zeros(2), [0.0, 0.0]], "the array of worker 1 must be an ndarray.*; got type list"),
    ],
)
def test_collectives_refuse(arrays, sentence):
    for collective in (*ALL_REDUCES, dp.ring_reduce_scatter):
        with pytest.raises(ConfigError, match=sentence):
            collective(arrays)


def test_flat_collectives_refuse_other_shapes():
    for collective in (dp.ring_reduce_scatter, dp.ring_all_gather):
        with pytest.raises(ConfigError, match=r"must be an ndarray of 1 dim; got shape \(2, 2\)"):
            collective([np.zeros((2, 2))])
    with pytest.raises(ConfigError, match="arrays must hold one array per worker"):
        dp.ring_all_gather([])
    with pytest.raises(ConfigError, match=r"worker 1 must have .*; got \(1,\) and int64"):
        dp.ring_all_gather([np.zeros(2), np.zeros(1, np.int64)])


# --- ring_bytes ---


def test_ring_bytes_by_hand():
    assert dp.ring_bytes(10, 4, 8) == [112, 120, 128, 120]
    assert dp.ring_bytes(2, 4, 8) == [16, 24, 32, 24]
    # Reduce-scatter: worker r sends everything but its own chunk (3, 3, 2, 2 elements).
    assert dp.ring_bytes(10, 4, 8, "reduce_scatter") == [56, 56, 64, 64]
    # All-gather: everything but the chunk of worker r + 1, which it would only get back.
    assert dp.ring_bytes(10, 4, 8, "all_gather") == [56, 64, 64, 56]


def test_c053_a_reduce_scatter_sends_half_of_an_all_reduce():
    assert dp.ring_bytes(1000, 4, 4, "reduce_scatter") == [3000] * 4
    assert dp.ring_bytes(1000, 4, 4, "all_reduce") == [6000] * 4


@given(
    count=st.integers(0, 500), num_workers=st.integers(1, 12), itemsize=st.sampled_from([2, 4, 8])
)
def test_ring_bytes_add_up(count, num_workers, itemsize):
    reduce_scatter, all_gather, both = (
        dp.ring_bytes(count, num_workers, itemsize, name)
        for name in ("reduce_scatter", "all_gather", "all_reduce")
    )
    assert sum(reduce_scatter) == sum(all_gather) == (num_workers - 1) * count * itemsize
    assert [a + b for a, b in zip(reduce_scatter, all_gather, strict=True)] == both


def test_ring_bytes_boundaries_and_refusals():
    assert dp.ring_bytes(1000, 1, 8) == [0]
    assert dp.ring_bytes(0, 3, 8) == [0, 0, 0]
    with pytest.raises(ConfigError, match="count must be an integer >= 0; got -1"):
        dp.ring_bytes(-1, 2, 8)
    with pytest.raises(ConfigError, match="num_workers must be an integer >= 1; got 0"):
        dp.ring_bytes(1, 0, 8)
    with pytest.raises(ConfigError, match="itemsize must be an integer >= 1; got 0"):
        dp.ring_bytes(1, 2, 0)
    with pytest.raises(ConfigError, match="collective must be one of all_reduce, .* got 'gossip'"):
        dp.ring_bytes(1, 2, 8, "gossip")


# --- all_reduce_mean ---


def test_c002_counts_are_global():
    means = [np.array([6.0 / 1]), np.array([10.0 / 3])]
    for mean in dp.all_reduce_mean(means, counts=[1, 3]):
        assert mean.tolist() == [4.0]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_c003_the_mean_does_not_depend_on_the_number_of_workers(num_workers):
    rows = np.array([4.0, 0.0, 0.0, 0.0])  # row losses: mean 1
    shards = dp.shard_dataset_across_workers(4, num_workers)
    means = [np.array([rows[shard].mean()]) for shard in shards]
    for mean in dp.all_reduce_mean(means, [shard.size for shard in shards]):
        assert mean == pytest.approx(np.array([1.0]), rel=1e-15)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_c013_workers_without_tokens_do_not_dilute(num_workers):
    means = [np.array([1.0])] + [np.array([math.nan])] * (num_workers - 1)
    for mean in dp.all_reduce_mean(means, [1] + [0] * (num_workers - 1)):
        assert mean.tolist() == [1.0]


def test_c017_a_reduction_holds_all_microbatches():
    window = [1.0, 10.0]
    per_worker = []
    for _ in range(2):
        total = {}
        for value in window:
            total = accumulation.accumulate_gradients(total, {"w": np.array([value, value])})
        per_worker.append(total["w"])
    assert dp.all_reduce_mean(per_worker, [1, 1])[0].tolist() == [11.0, 11.0]
    # Reducing and scattering each microbatch and adding the shards gives the same.
    shards = [np.zeros(1), np.zeros(1)]
    for value in window:
        parts = dp.ring_reduce_scatter([np.full(2, value)] * 2)
        shards = [shard + part / 2 for shard, part in zip(shards, parts, strict=True)]
    assert np.concatenate(shards).tolist() == [11.0, 11.0]


@pytest.mark.parametrize("value", [40000.0, 1e-7])
def test_c028_16_bit_averages_neither_overflow_nor_vanish(value):
    half = np.array([value], np.float16)
    means = dp.all_reduce_mean([half] * 4, [1, 1, 1, 1])
    assert all(bits(mean) == bits(half) for mean in means)


def test_c051_reduce_scatter_and_all_reduce_agree():
    arrays = [np.full(7, worker + 1.0) for worker in range(3)]
    mean = dp.all_reduce_mean(arrays, [1, 1, 1])[0]
    assert mean.tolist() == [2.0] * 7
    bounds = chunk_bounds(7, 3)
    for worker, shard in enumerate(dp.ring_reduce_scatter(arrays)):
        assert (shard / 3).tolist() == mean[bounds[worker] : bounds[worker + 1]].tolist()


def test_c085_a_worker_that_ran_out_joins_with_count_zero():
    steps = [((1.0, 1), (3.0, 1)), ((1.0, 1), (3.0, 1)), ((1.0, 1), (0.0, 0))]
    means = []
    for step in steps:
        values, counts = zip(*step, strict=True)
        means.append(dp.all_reduce_mean([np.array([v]) for v in values], counts)[1].tolist())
    assert means == [[2.0], [2.0], [1.0]]


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_weighted_mean_equals_the_mean_of_all_rows(counts, seed):
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal((count, 3)) for count in counts]
    means = [part.mean(axis=0) if len(part) else np.zeros(3) for part in rows]
    before = [bits(mean) for mean in means]
    results = dp.all_reduce_mean(means, counts)
    assert len({bits(result) for result in results}) == 1
    assert np.allclose(results[0], np.concatenate(rows).mean(axis=0), rtol=1e-12, atol=1e-14)
    assert [bits(mean) for mean in means] == before


@pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("f2"), BFLOAT16])
def test_mean_keeps_shape_and_dtype(dtype):
    for shape in ((), (2, 3), (0,)):
        for mean in dp.all_reduce_mean([np.ones(shape, dtype)] * 3, [1, 2, 3]):
            assert isinstance(mean, np.ndarray)
            assert mean.shape == shape and mean.dtype == dtype
            assert np.all(mean.astype(float) == 1.0)


@pytest.mark.parametrize(
    ("means", "counts", "sentence"),
    [
        ([np.zeros(1)] * 2, [1], "counts must have one entry per worker; got 1 for 2 workers"),
        ([np.zeros(1)] * 2, [1, -1], r"counts\[1\] must be an integer >= 0; got -1"),
        ([np.zeros(1)] * 2, [1, 0.5], r"counts\[1\] must be an integer >= 0; got 0\.5"),
        ([np.zeros(1)] * 2, [0, 0], r"counts must not all be 0; got \[0, 0\]"),
        ([np.zeros(1, int)] * 2, [1, 1], "local_means must hold floats; got int64"),
        ([], [], "arrays must hold one array per worker"),
    ],
)
def test_mean_refuses(means, counts, sentence):
    with pytest.raises(ConfigError, match=sentence):
        dp.all_reduce_mean(means, counts)


# --- buckets ---


def test_buckets_by_hand():
    assert dp.make_buckets([40, 40, 40, 200, 10], 100) == [[0, 1], [2], [3], [4]]
    assert dp.make_buckets([50, 50], 100) == [[0, 1]]  # exactly full is not past the size
    assert dp.make_buckets([50, 51], 100) == [[0], [1]]


def test_buckets_boundaries():
    assert dp.make_buckets([], 100) == []
    assert dp.make_buckets([1000], 1) == [[0]]
    assert dp.make_buckets([1, 1, 1], 1) == [[0], [1], [2]]
    assert dp.make_buckets([0, 5, 0], 5) == [[0, 1, 2]]


@given(sizes=st.lists(st.integers(0, 50), max_size=20), bucket_bytes=st.integers(1, 120))
def test_buckets_keep_order_and_size(sizes, bucket_bytes):
    buckets = dp.make_buckets(sizes, bucket_bytes)
    assert [position for bucket in buckets for position in bucket] == list(range(len(sizes)))
    for index, bucket in enumerate(buckets):
        filled = sum(sizes[position] for position in bucket)
        assert filled <= bucket_bytes or len(bucket) == 1
        if index + 1 < len(buckets):  # closed only because the next one did not fit
            assert filled + sizes[buckets[index + 1][0]] > bucket_bytes


def test_buckets_refuse():
    with pytest.raises(ConfigError, match="bucket_bytes must be an integer >= 1; got 0"):
        dp.make_buckets([1], 0)
    with pytest.raises(ConfigError, match=r"backward_order\[1\] must be an integer >= 0; got -4"):
        dp.make_buckets([1, -4], 8)


# --- local gradients and their reduction ---


def test_local_gradients_by_hand():
    params = {"head.linear.weight": np.zeros((1, 1)), "head.linear.bias": np.zeros(1)}
    # prediction 0, target 2, input 3: row loss 4, dw = -2 * 2 * 3, db = -4; a quarter of each
    loss, gradients = dp.local_gradients(params, np.array([[3.0]]), np.array([[2.0]]), 4)
    assert loss == 1.0
    assert gradients["head.linear.weight"].tolist() == [[-3.0]]
    assert gradients["head.linear.bias"].tolist() == [-1.0]


def test_local_gradients_without_rows_are_zero():
    params = make_params()
    loss, gradients = dp.local_gradients(params, *make_rows(0), total_rows=4)
    assert loss == 0.0 and set(gradients) == set(params)
    assert all(gradients[name].shape == params[name].shape for name in params)
    assert not any(gradient.any() for gradient in gradients.values())


@given(cut=st.integers(0, 9))
def test_local_gradients_of_two_parts_add_up(cut):
    params, (x, y) = make_params(), make_rows(9)
    whole_loss, whole = mlp.mlp_loss_and_gradients(params, x, y)
    parts = [
        dp.local_gradients(params, x[part], y[part], 9) for part in (slice(cut), slice(cut, None))
    ]
    assert parts[0][0] + parts[1][0] == pytest.approx(whole_loss, rel=1e-13)
    for name, gradient in whole.items():
        assert np.allclose(parts[0][1][name] + parts[1][1][name], gradient, rtol=1e-12, atol=1e-14)


def test_local_gradients_refuse():
    params, (x, y) = make_params(), make_rows(3)
    with pytest.raises(ConfigError, match="total_rows must be an integer >= 3; got 2"):
        dp.local_gradients(params, x, y, 2)
    with pytest.raises(ConfigError, match="total_rows must be an integer >= 1; got 0"):
        dp.local_gradients(params, x[:0], y[:0], 0)
    with pytest.raises(ConfigError, match="same number of rows"):
        dp.local_gradients(params, x, y[:1], 3)


def test_gradient_reduction_by_hand_and_bucket_by_bucket():
    first = {
        "block0.linear.weight": np.array([[1.0, 2.0]]),
        "block0.linear.bias": np.array([3.0, 4.0]),
        "head.linear.weight": np.array([[5.0], [6.0]]),
        "head.linear.bias": np.array([7.0]),
    }
    second = {name: 10 * gradient for name, gradient in first.items()}
    for bucket_bytes in (None, 1, 24, 56):
        for total in dp.all_reduce_gradients([first, second], bucket_bytes):
            assert {name: array.tolist() for name, array in total.items()} == {
                name: (11 * array).tolist() for name, array in first.items()
            }


def test_gradient_reduction_is_one_ring_per_bucket_from_the_last_layer_on():
    workers = [
        {
            name: np.random.default_rng([w, i]).standard_normal(param.shape)
            for i, (name, param) in enumerate(make_params().items())
        }
        for w in range(3)
    ]
    backward = [
        "head.linear.weight",
        "head.linear.bias",
        "block0.linear.weight",
        "block0.linear.bias",
    ]
    flat = [np.concatenate([worker[name].reshape(-1) for name in backward]) for worker in workers]
    want = dp.ring_all_reduce(flat)[0]
    got = dp.all_reduce_gradients(workers)[0]
    assert np.concatenate([got[name].reshape(-1) for name in backward]).tobytes() == want.tobytes()
    last = [
        np.concatenate([worker[name].reshape(-1) for name in backward[:2]]) for worker in workers
    ]
    got = dp.all_reduce_gradients(workers, bucket_bytes=1)[0]
    assert (
        np.concatenate([got[name].reshape(-1) for name in backward[:2]]).tobytes()
        == dp.ring_all_reduce(last)[0].tobytes()
    )


def test_c062_the_order_of_names_in_a_dict_does_not_matter():
    workers = [
        {
            name: np.full(param.shape, float(10**w + i))
            for i, (name, param) in enumerate(make_params((2, 2, 2)).items())
        }
        for w in range(2)
    ]
    shuffled = [workers[0], dict(reversed(workers[1].items()))]
    want, got = dp.all_reduce_gradients(workers, 1), dp.all_reduce_gradients(shuffled, 1)
    for worker in range(2):
        for name in workers[0]:
            assert bits(got[worker][name]) == bits(want[worker][name])


def test_gradient_reduction_refuses():
    params = make_params()
    with pytest.raises(ConfigError, match="worker_gradients must hold one dict per worker"):
        dp.all_reduce_gradients([])
    fewer = {name: param for name, param in params.items() if name != "block0.linear.bias"}
    with pytest.raises(
        ConfigError, match=r"gradients of worker 1 must .* \['block0.linear.bias'\]"
    ):
        dp.all_reduce_gradients([params, fewer])
    with pytest.raises(ConfigError, match="bucket_bytes must be an integer >= 1; got 0"):
        dp.all_reduce_gradients([params], 0)


# --- the step ---


def test_step_by_hand():
    params = {"head.linear.weight": np.zeros((1, 1)), "head.linear.bias": np.zeros(1)}
    x = np.array([[1.0], [1.0], [1.0]])
    y = np.array([[3.0], [0.0], [0.0]])
    # Uneven workers: the first has one row of loss 9, the second two of loss 0. dw = -2 * 3 / 3.
    replicas, loss = dp.data_parallel_train_step(
        copies(params, 2),
        [(x[:1], y[:1]), (x[1:], y[1:])],
        lambda p, g: optimizers.sgd_step(p, g, lr=0.5),
    )
    assert loss == pytest.approx(3.0, rel=1e-15)
    for replica in replicas:
        assert replica["head.linear.weight"] == pytest.approx(np.array([[1.0]]), rel=1e-15)
        assert replica["head.linear.bias"] == pytest.approx(np.array([1.0]), rel=1e-15)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("bucket_bytes", [None, 8, 56, 1 << 20])
def test_c087_twenty_steps_equal_one_process_for_any_workers_and_buckets(num_workers, bucket_bytes):
    single = make_params()
    replicas = copies(single, num_workers)
    for seed in range(20):
        x, y = make_rows(7, seed)  # fewer rows than eight workers: one has none
        shards = dp.shard_dataset_across_workers(7, num_workers)
        replicas, loss = dp.data_parallel_train_step(
            replicas,
            [(x[shard], y[shard]) for shard in shards],
            sgd,
            "gelu",
            "mean_squared_error",
            bucket_bytes,
        )
        want, gradients = mlp.mlp_loss_and_gradients(single, x, y, "gelu")
        single = sgd(single, gradients)
        assert abs(loss - want) < 1e-12 * max(1.0, abs(want))
    for name, param in single.items():
        assert len({bits(replica[name]) for replica in replicas}) == 1
        assert np.max(np.abs(replicas[0][name] - param)) < 1e-12


def test_step_with_class_targets_and_adamw():
    single, (x, _) = make_params(), make_rows(9)
    y = np.random.default_rng(2).integers(0, 2, 9)
    state = optimizers.adamw_init(single)

    def adamw(params, gradients):
        return optimizers.adamw_step(params, gradients, state, lr=0.01)[0]

    replicas, loss = dp.data_parallel_train_step(
        copies(single, 2), [(x[:7], y[:7]), (x[7:], y[7:])], adamw, loss="softmax_cross_entropy"
    )
    want, gradients = mlp.mlp_loss_and_gradients(single, x, y, loss="softmax_cross_entropy")
    assert loss == pytest.approx(want, rel=1e-13)
    for name, param in adamw(single, gradients).items():
        assert np.allclose(replicas[1][name], param, rtol=1e-9)


def test_step_updates_once_per_worker_and_changes_no_argument():
    calls = []

    def update(params, gradients):
        calls.append({name: bits(gradient) for name, gradient in gradients.items()})
        return sgd(params, gradients)

    replicas, (x, y) = copies(make_params(), 3), make_rows(5)
    before = [{name: bits(param) for name, param in replica.items()} for replica in replicas]
    dp.data_parallel_train_step(replicas, [(x[:2], y[:2]), (x[2:], y[2:]), (x[:0], y[:0])], update)
    assert len(calls) == 3 and calls[0] == calls[1] == calls[2]
    after = [{name: bits(param) for name, param in replica.items()} for replica in replicas]
    assert after == before
    assert np.array_equal(x, make_rows(5)[0])


def test_step_refuses():
    replicas, (x, y) = copies(make_params(), 2), make_rows(4)
    halves = [(x[:2], y[:2]), (x[2:], y[2:])]
    with pytest.raises(ConfigError, match="worker_batches must have one entry per replica; got 1"):
        dp.data_parallel_train_step(replicas, halves[:1], sgd)
    with pytest.raises(ConfigError, match="a step must have at least one row; got 2 workers"):
        dp.data_parallel_train_step(replicas, [(x[:0], y[:0])] * 2, sgd)
    with pytest.raises(ConfigError, match="arrays must hold one array per worker"):
        dp.data_parallel_train_step([], [], sgd)
    replicas[1]["head.linear.bias"][0] += 1e-9
    with pytest.raises(
        ConfigError, match="replicas must be equal on all workers; got another 'head"
    ):
        dp.data_parallel_train_step(replicas, halves, sgd)
    del replicas[1]["head.linear.bias"]
    with pytest.raises(ConfigError, match="the replica of worker 1 must have one tensor for every"):
        dp.data_parallel_train_step(replicas, halves, sgd)
