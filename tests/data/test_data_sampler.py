"""The order of samples: a bijection per epoch, disjoint and covering shards, short tails."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.data.sampler import (
    Sampler,
    microbatch_bounds,
    permute_indices,
    shard_rows,
    spread_indices,
)
from mpisim.errors import ConfigError

QUICK = settings(max_examples=60, derandomize=True, deadline=None)


@QUICK
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_permutation_is_a_bijection(count, seed, epoch):
    samples = permute_indices(np.arange(count), count, seed, epoch)
    assert samples.dtype == np.int64 and samples.shape == (count,)
    assert np.array_equal(np.sort(samples), np.arange(count))


@pytest.mark.parametrize("count", [*range(1, 70), 255, 256, 257, 1024, 1025, 65536, 99991])
def test_permutation_is_a_bijection_at_the_edges_of_the_grid(count):
    samples = permute_indices(np.arange(count), count, 5, 1)
    assert np.array_equal(np.sort(samples), np.arange(count))


@QUICK
@given(count=st.integers(10, 10**15), seed=st.integers(0, 1000), data=st.data())
def test_permutation_needs_no_neighbours(count, seed, data):
    index = st.integers(0, count - 1)
    positions = np.array(data.draw(st.lists(index, min_size=2, max_size=9, unique=True)))
    together = permute_indices(positions, count, seed, 0)
    alone = [int(permute_indices(positions[i : i + 1], count, seed, 0)[0]) for i in range(2)]
    assert together[:2].tolist() == alone
    assert len(set(together.tolist())) == len(positions)
    assert 0 <= together.min() and together.max() < count


def test_order_differs_by_epoch_and_seed_and_repeats_by_key():
    def order(seed, epoch):
        return permute_indices(np.arange(1000), 1000, seed, epoch).tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) != order(1, 0) != list(range(1000))
    # Seed 1 in epoch 23 is not seed 12 in epoch 3.
    assert order(1, 23) != order(12, 3)


def test_order_never_changes_with_a_version():
    assert permute_indices(np.arange(10), 10, 0, 0).tolist() == GOLDEN_SMALL
    assert permute_indices(np.arange(4), 10**9, 7, 3).tolist() == GOLDEN_LARGE


GOLDEN_SMALL = [2, 0, 4, 7, 3, 1, 9, 6, 8, 5]
GOLDEN_LARGE = [457539769, 996395706, 334170965, 813074783]


def test_all_orders_of_few_samples_are_about_equally_likely():
    orders = Counter(
        tuple(permute_indices(np.arange(4), 4, 1, epoch).tolist()) for epoch in range(2400)
    )
    assert len(orders) == 24
    # 100 expected each; chi-squared of 23 degrees of freedom is below 50 in 99.9% of cases.
    assert sum((number - 100) ** 2 / 100 for number in orders.values()) < 50


def test_neighbouring_positions_give_unrelated_samples():
    count = 50_000
    samples = permute_indices(np.arange(count), count, 3, 0)
    for other in (np.arange(count), np.roll(samples, 1)):
        assert abs(np.corrcoef(samples, other)[0, 1]) < 5 / math.sqrt(count)


def test_permutation_accepts_any_integer_dtype_and_refuses_bad_positions():
    want = permute_indices(np.arange(200), 300, 0, 0)
    for dtype in (np.uint8, np.int32, np.uint64):
        assert np.array_equal(permute_indices(np.arange(200).astype(dtype), 300, 0, 0), want)
    assert permute_indices(np.arange(0), 300, 0, 0).shape == (0,)
    for bad in ([300], [-1, 0]):
        with pytest.raises(IndexError, match=r"indices must be in 0\.\.299"):
            permute_indices(np.array(bad), 300, 0, 0)


def shards(sampler, step, dp_size):
    """Return each rank's samples of a step, asked for rank by rank."""
    rows = sampler.num_rows(step)
    return [
        sampler.batch_indices(step, *shard_rows(rows, dp_size, index)) for index in range(dp_size)
    ]


@pytest.mark.parametrize("dp_size", range(1, 9))
@pytest.mark.parametrize("global_batch", [1, 3, 7, 16, 50, 99, 100])
def test_every_epoch_covers_every_sample_once_on_any_number_of_ranks(global_batch, dp_size):
    sampler = Sampler(100, global_batch, seed=4)
    for epoch in range(2):
        seen = []
        for step_in_epoch in range(sampler.steps_per_epoch):
            step = epoch * sampler.steps_per_epoch + step_in_epoch
            parts = shards(sampler, step, dp_size)
            # The layout never changes the batch: ranks hold consecutive parts of it.
            assert np.array_equal(np.concatenate(parts), sampler.batch_indices(step))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            seen += np.concatenate(parts).tolist()
        assert sorted(seen) == list(range(100))


def test_the_tail_of_an_epoch_is_short_and_the_next_epoch_starts_anew():
    sampler = Sampler(10, 4, seed=0)
    assert sampler.steps_per_epoch == 3
    assert [sampler.num_rows(step) for step in range(7)] == [4, 4, 2, 4, 4, 2, 4]
    assert [sampler.position(step) for step in range(7)] == [0, 4, 8, 10, 14, 18, 20]
    assert [sampler.epoch(step) for step in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [len(sampler.batch_indices(step)) for step in range(4)] == [4, 4, 2, 4]


def test_batch_indices_refuses_rows_that_the_step_does_not_have():
    sampler = Sampler(10, 4, seed=0)
    assert sampler.batch_indices(2, 2, 2).tolist() == []
    for lo, hi in ((0, 3), (-1, 2), (2, 1)):
        with pytest.raises(IndexError, match=r"rows of step 2 must be a range in 0\.\.2"):
            sampler.batch_indices(2, lo, hi)


@pytest.mark.parametrize(("num_samples", "global_batch"), [(3, 4), (0, 1), (5, 0)])
def test_a_batch_larger_than_the_data_is_refused(num_samples, global_batch):
    with pytest.raises(ConfigError, match="train.global_batch must be in"):
        Sampler(num_samples, global_batch, seed=0)


def test_microbatches_cut_a_shard_without_gap():
    assert microbatch_bounds(3, 10, 3) == (3, 6, 8, 10)
    assert microbatch_bounds(4, 5, 3) == (4, 5, 5, 5)
    assert microbatch_bounds(4, 4, 2) == (4, 4, 4)


def test_spread_indices_are_even_and_distinct():
    assert spread_indices(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert spread_indices(10, 4).tolist() == [0, 2, 5, 7]
    assert spread_indices(10, 4, 1, 3).tolist() == [2, 5]
    assert spread_indices(10, 0, 3, 6).tolist() == [3, 4, 5]
    assert spread_indices(10, 0).tolist() == spread_indices(10, 99).tolist() == list(range(10))
    assert spread_indices(0, 0).tolist() == spread_indices(0, 5).tolist() == []
    for limit in range(1, 50):
        chosen = spread_indices(49, limit)
        assert chosen.dtype == np.int64
        assert len(set(chosen.tolist())) == limit and chosen.max() < 49
    assert spread_indices(10**12, 10**6)[-1] == 10**12 - 10**6


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
def test_c128_evaluation_repeats_no_sample(dp_size):
    """C128: 10 samples of which the first two are wrong: accuracy 0.8, not 8/12."""
    right = np.array([False] * 2 + [True] * 8)
    samples = spread_indices(10, 0)
    correct = rows = 0
    for index in range(dp_size):
        lo, hi = shard_rows(len(samples), dp_size, index)
        correct += int(right[samples[lo:hi]].sum())
        rows += hi - lo
    assert (correct, rows) == (8, 10)
    assert correct / rows == 0.8


@pytest.mark.parametrize("global_batch", [4, 5, 10, 20])
def test_c130_a_resume_inside_an_epoch_repeats_and_misses_nothing(global_batch):
    """C130: 64 samples, stop after 20, resume: the union is each sample once."""
    before = Sampler(64, global_batch, seed=9)
    stop = next(step for step in range(99) if before.position(step) == 20)
    first = [index for step in range(stop) for index in before.batch_indices(step).tolist()]
    assert len(first) == 20
    # A new process has nothing but the seed and the step.
    after = Sampler(64, global_batch, seed=9)
    second = [
        index
        for step in range(stop, after.steps_per_epoch)
        for index in after.batch_indices(step).tolist()
    ]
    assert sorted(first + second) == list(range(64))


def test_c132_steps_go_on_across_the_border_of_an_epoch():
    """C132: 60 steps an epoch, resumed at 60 with target 120: 60 more steps, all samples again."""
    sampler = Sampler(240, 4, seed=2)
    assert sampler.steps_per_epoch == 60
    steps = range(60, 120)
    assert [sampler.num_rows(step) for step in steps] == [4] * 60
    second = np.concatenate([sampler.batch_indices(step) for step in steps])
    first = np.concatenate([sampler.batch_indices(step) for step in range(60)])
    assert sorted(second.tolist()) == sorted(first.tolist()) == list(range(240))
    assert second.tolist() != first.tolist()


def test_c134_with_fewer_rows_than_ranks_the_last_ranks_have_none():
    """C134: 3 rows on 4 ranks: rank 3 contributes zero rows, no row is on two ranks."""
    parts = [part.tolist() for part in shards(Sampler(3, 3, seed=0), 0, 4)]
    assert [len(part) for part in parts] == [1, 1, 1, 0]
    assert sorted(sum(parts, [])) == [0, 1, 2]


def test_c085_ranks_make_the_same_number_of_steps_and_count_rows():
    """C085: 5 rows, batch 2, 2 ranks: three steps on both; the last is rank 0's row alone.

    Rank 0's gradients are 1 and rank 1's are 3: means 2, 2 and 1, not 0.5 (a division by ranks).
    """
    sampler = Sampler(5, 2, seed=0)
    means = []
    for step in range(sampler.steps_per_epoch):
        sizes = [len(part) for part in shards(sampler, step, 2)]
        means.append((1.0 * sizes[0] + 3.0 * sizes[1]) / sum(sizes))
    assert means == [2, 2, 1]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
def test_c007_the_end_of_the_data_belongs_to_a_step_not_to_its_slices(num_microbatches):
    """C007: 2 batches of 3 slices each are 2 updates; the faulty count is 1 + 3 = 4."""
    sampler = Sampler(12, 6, seed=0)
    updates, rows = 0, []
    while sampler.epoch(updates) == 0:
        indices = sampler.batch_indices(updates)
        bounds = microbatch_bounds(0, len(indices), num_microbatches)
        for lo, hi in itertools.pairwise(bounds):
            rows += indices[lo:hi].tolist()
        updates += 1
    assert updates == sampler.steps_per_epoch == 2
    assert sorted(rows) == list(range(12))
