"""Ranks, buckets, microbatches, overlap, algorithms: none of them changes what is learned.

Issue 2, bars: the same loss and weights in float64 within 1e-12 * max(1, |r|) after 20 steps.
"""

from __future__ import annotations

import numpy as np
import pytest
from small_jobs import assert_close, linear_model, make_config, run_engine, train

from mpisim.nn.params import init_params

TOLERANCE = 1e-12
BUCKETS = (1, 200, 1 << 20)


def make(tmp_path, kind="regression", **sections):
    """Return a config of 20 steps of 240 rows; the last batch of an epoch is short."""
    base = {
        "data": {"num_rows": 844} if kind == "regression" else {},
        "model": {"hidden": [7, 5]},
        "train": {"steps": 20, "global_batch": 240},
        "optimizer": {"kind": "sgd", "lr": 0.02 if kind == "regression" else 0.2, "momentum": 0.9},
    }
    for name, section in sections.items():
        base.setdefault(name, {}).update(section)
    return make_config(tmp_path, kind, **base)


def assert_same_run(got, want):
    assert len(got.losses) == len(want.losses) == 20
    for a, r in zip(got.losses, want.losses, strict=True):
        assert abs(a - r) <= TOLERANCE * max(1.0, abs(r))
    assert_close(got.params, want.params, TOLERANCE)
    assert len(got.digests) == 1  # replicas are bitwise equal
    for a, r in zip(got.evaluations, want.evaluations, strict=True):
        assert abs(a["heldout_loss"] - r["heldout_loss"]) <= TOLERANCE * max(1, r["heldout_loss"])
        assert a["heldout_rows"] == r["heldout_rows"]
        assert a.get("heldout_top1") == r.get("heldout_top1")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The run that all others must equal, by kind of data."""
    runs = {}

    def get(kind):
        if kind not in runs:
            runs[kind] = train(make(tmp_path_factory.mktemp(kind), kind), 1)
            losses = runs[kind].losses
            assert losses[-1] < 0.9 * losses[0]  # or the comparison would say nothing
        return runs[kind]

    return get


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_any_number_of_ranks_and_any_bucket_size(tmp_path, one_rank, ranks, bucket_bytes):
    """Bar 2, C087: ranks 1, 2, 3, 4, 5, 8, buckets of 1 byte, 200 bytes and the whole model."""
    micros = 2 if BUCKETS.index(bucket_bytes) % 2 == ranks % 2 else 1
    config = make(
        tmp_path, parallel={"bucket_bytes": bucket_bytes}, train={"num_microbatches": micros}
    )
    assert_same_run(train(config, ranks), one_rank("regression"))


@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (3, 1), (5, 2), (8, 1)])
def test_text_over_any_number_of_ranks(tmp_path, one_rank, ranks, micros):
    config = make(
        tmp_path, "text", parallel={"bucket_bytes": 2000}, train={"num_microbatches": micros}
    )
    assert_same_run(train(config, ranks), one_rank("text"))


@pytest.mark.parametrize("micros", [2, 3, 8])
def test_accumulation_equals_the_large_batch(tmp_path, one_rank, micros):
    """A2, C001 on one rank."""
    config = make(tmp_path, train={"num_microbatches": micros})
    assert_same_run(train(config, 1), one_rank("regression"))


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "halving_doubling"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_any_algorithm(tmp_path, one_rank, algorithm, ranks):
    config = make(tmp_path, comm={"algorithm": algorithm}, parallel={"bucket_bytes": 200})
    first = train(config, ranks)
    assert_same_run(first, one_rank("regression"))
    # The order of additions is that of the table, not that of arrival.
    assert train(config, ranks).digests == first.digests


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize(("ranks", "algorithm"), [(2, "auto"), (3, "ring"), (4, "ring")])
def test_overlap_on_and_off_give_the_same_bits(tmp_path, ranks, algorithm, bucket_bytes, micros):
    """Issue 2, item 4: `parallel.overlap = false` gives the same bits without it."""
    on, off = (
        train(
            make(
                tmp_path, train={"num_microbatches": micros}, comm={"algorithm": algorithm},
                parallel={"bucket_bytes": bucket_bytes, "overlap": overlap},
            ),
            ranks,
        )
        for overlap in (True, False)
    )  # fmt: skip
    assert len(on.digests) == 1 and on.digests == off.digests
    assert on.losses == off.losses
    assert [row["grad_norm"] for row in on.steps] == [row["grad_norm"] for row in off.steps]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("ranks", "algorithm"), [(2, "auto"), (3, "ring"), (4, "auto")])
def test_synchronous_sends_give_the_same_bits(tmp_path, ranks, algorithm, overlap):
    """Issue 2, item 3: a switch makes every send synchronous; no plan needs a send's copy."""
    done = [
        train(
            make(
                tmp_path, parallel={"bucket_bytes": 200, "overlap": overlap},
                comm={"algorithm": algorithm, "synchronous_sends": synchronous},
            ),
            ranks,
        )
        for synchronous in (False, True)
    ]  # fmt: skip
    assert done[0].digests == done[1].digests and len(done[0].digests) == 1
    assert done[0].losses == done[1].losses


@pytest.mark.parametrize("overlap", [True, False])
def test_large_buckets_are_segmented_and_still_the_same(tmp_path, overlap):
    """Above 2 MiB the ring is cut into segments and adds in place."""
    sections = {
        "data": {"num_rows": 60, "num_features": 500, "num_targets": 1},
        "model": {"hidden": [600, 3], "dtype": "float64"},
        "train": {"steps": 2, "global_batch": 24},
    }
    one = train(make_config(tmp_path, **sections), 1)
    config = make_config(
        tmp_path, **sections, parallel={"overlap": overlap, "bucket_bytes": 1 << 22}
    )
    three = train(config, 3)
    assert_close(three.params, one.params, TOLERANCE)
    assert len(three.digests) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_repeats_are_bitwise_equal(tmp_path, dtype):
    config = make(tmp_path, model={"dtype": dtype}, parallel={"bucket_bytes": 200})
    runs = [train(config, 3) for _ in range(3)]
    assert len(set().union(*(run.digests for run in runs))) == 1
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert {array.dtype.name for array in runs[0].params.values()} == {dtype}


def test_float32_differs_only_by_rounding_over_ranks(tmp_path):
    one, four = (train(make(tmp_path, model={"dtype": "float32"}), ranks) for ranks in (1, 4))
    assert_close(four.params, one.params, 1e-5)
    assert four.digests != one.digests  # else the ranks did not really add in another order


@pytest.mark.parametrize(
    "optimizer",
    [
        {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.5},
        {"kind": "sgd", "lr": 0.05, "momentum": 0.0, "clip_norm": 0.1, "warmup_steps": 4},
        {"kind": "sgd", "lr": 0.02, "weight_decay": 0.2, "schedule": "cosine"},
    ],
)
def test_optimizers_over_ranks(tmp_path, optimizer):
    one, five = (
        train(
            make(tmp_path, optimizer=optimizer, parallel={"bucket_bytes": 1}), ranks
        )
        for ranks in (1, 5)
    )  # fmt: skip
    assert_same_run(five, one)


@pytest.mark.parametrize(("ranks", "micros"), [(4, 1), (5, 2), (8, 1), (8, 3)])
def test_a_tail_with_fewer_rows_than_ranks(tmp_path, ranks, micros):
    """C085: the last batch of each epoch has 3 rows; the ranks without rows take part with 0."""
    sections = {
        "data": {"num_rows": 255},
        "train": {"steps": 6, "global_batch": 120, "num_microbatches": micros},
        "parallel": {"bucket_bytes": 200},
    }
    one = train(make_config(tmp_path, **sections | {"train": {"steps": 6, "global_batch": 120}}), 1)
    many = train(make_config(tmp_path, **sections), ranks)
    assert one.record["data"]["num_train"] == 2 * 120 + 3
    assert [row["rows"] for row in many.steps] == [120, 120, 3, 120, 120, 3]
    for a, r in zip(many.losses, one.losses, strict=True):
        assert abs(a - r) <= TOLERANCE * max(1.0, abs(r))
    assert_close(many.params, one.params, TOLERANCE)


def test_another_seed_gives_another_run(tmp_path):
    """The comparisons above would also hold if nothing depended on the weights."""
    a, b = (train(make(tmp_path, run={"seed": seed}), 1) for seed in (7, 8))
    assert a.digests != b.digests and a.losses[0] != b.losses[0]


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_first_weights_do_not_depend_on_the_layout(ranks, bucket_bytes):
    """M4: same seed, same weights, whatever the layout."""
    model = linear_model(4, 3)
    first = [None] * ranks

    def keep(state):
        first[state.rank] = {name: array.copy() for name, array in state.params.items()}

    rows = (np.zeros((1, 4)), np.zeros((1, 3)))
    run_engine(model, [[[rows]] * ranks], seed=5, bucket_bytes=bucket_bytes, prepare=keep)
    for params in first:
        assert_close(params, init_params(model, 5, "float64"), 0.0)
