"""What a plan costs: messages and bytes per rank, axis and collective, from the step tables."""

from __future__ import annotations

import numpy as np
import pytest
from small_plans import eval_plan, start_sync, train_plan

from mpisim.cost.price import bytes_matrix, op_table, price_rank
from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.mesh import Mesh
from mpisim.nn.models import build_mlp
from mpisim.plan.build import build_train_plan
from mpisim.plan.ops import Forward, GatherMetrics, ReduceScalars

FIGURES = 8 * len(METRIC_NAMES)
"""Bytes of one rank's figures of a step."""


def ten_parameters(dp, dtype="float64", **options):
    """Return the plan of a linear model of 9 features and 1 target: 10 parameters."""
    model = build_mlp(
        input_kind="features", num_features=9, hidden=(), activation="relu", output=("targets", 1)
    )
    return build_train_plan(
        mesh=Mesh(dp=dp), specs=lambda rows, length: model.spec(rows, np.dtype(dtype), length),
        rows=((1,),) * dp, dtype=dtype, itemsize=np.dtype(dtype).itemsize,
        bucket_bytes=1 << 20, overlap=True, **{"algorithm": "ring", **options},
    )  # fmt: skip


def counts(sent_messages, sent_bytes, received_messages, received_bytes):
    return {
        "sent_messages": sent_messages,
        "sent_bytes": sent_bytes,
        "received_messages": received_messages,
        "received_bytes": received_bytes,
    }


@pytest.mark.parametrize(("rank", "sent"), list(enumerate([112, 120, 128, 120])))
def test_ten_numbers_in_a_ring_of_four(rank, sent):
    """DESIGN: chunks of 3, 3, 2, 2 elements make 112, 120, 128, 120 bytes, not 120 each.

    By hand, rank 0: reduce-scatter sends chunks 3, 2, 1 (2 + 2 + 3), all-gather sends 0, 3, 2
    (3 + 2 + 2), together 14 elements. What a rank receives is what its left neighbour sends.
    """
    priced = price_rank(ten_parameters(4), rank)
    received = [112, 120, 128, 120][rank - 1]
    assert priced == {
        ("dp", "all_reduce"): counts(6, sent, 6, received),
        # One int64, two float64, one int64, each to the neighbours at distance 1 and 2.
        ("control", "all_reduce"): counts(6, 64, 6, 64),
        ("control", "gather"): (
            counts(0, 0, 3, 3 * FIGURES) if rank == 0 else counts(1, FIGURES, 0, 0)
        ),
    }


def test_the_bytes_matrix_of_ten_numbers_in_a_ring_of_four():
    """The ring to the right, all sums (32 bytes) to ranks at distance 1 and 2, figures to 0."""
    assert bytes_matrix(ten_parameters(4)) == [
        [0, 112 + 32, 32, 0],
        [FIGURES + 32, 0, 120, 32],
        [FIGURES + 32, 0, 0, 128 + 32],
        [FIGURES + 120, 32, 32, 0],
    ]


def test_half_the_bytes_in_float32():
    single, double = (
        price_rank(ten_parameters(4, dtype), 0)["dp", "all_reduce"]
        for dtype in ("float32", "float64")
    )
    assert single["sent_bytes"] * 2 == double["sent_bytes"] == 112
    assert single["sent_messages"] == double["sent_messages"]


def test_recursive_doubling_sends_the_whole_buffer_twice():
    priced = price_rank(ten_parameters(4, algorithm="recursive_doubling"), 2)
    assert priced["dp", "all_reduce"] == counts(2, 160, 2, 160)


def test_one_rank_sends_nothing():
    priced = price_rank(ten_parameters(1), 0)
    assert all(value == 0 for entry in priced.values() for value in entry.values())
    assert bytes_matrix(ten_parameters(1)) == [[0]]


def test_an_evaluation_costs_one_sum():
    """Three float64 over three ranks: rank 1 folds into 0 and gets the result back."""
    priced = [price_rank(eval_plan([[1], [1], [1]]), rank) for rank in range(3)]
    assert [entry["control", "all_reduce"] for entry in priced] == [
        counts(2, 48, 2, 48), counts(1, 24, 1, 24), counts(1, 24, 1, 24),
    ]  # fmt: skip
    assert all(entry.keys() == {("control", "all_reduce")} for entry in priced)


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "recursive_doubling", "halving_doubling"])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_the_matrix_adds_up_to_what_ranks_send_and_receive(dp, algorithm, bucket_bytes):
    plan = train_plan([[1, 1]] * dp, bucket_bytes=bucket_bytes, algorithm=algorithm)
    matrix = np.array(bytes_matrix(plan))
    priced = [price_rank(plan, rank) for rank in range(dp)]
    for rank in range(dp):
        entries = priced[rank].values()
        assert matrix[rank].sum() == sum(entry["sent_bytes"] for entry in entries)
        assert matrix[:, rank].sum() == sum(entry["received_bytes"] for entry in entries)
    assert not matrix.diagonal().any()
    everything = [entry for rank in priced for entry in rank.values()]
    sent, received = (
        sum(entry[f"{side}_messages"] for entry in everything) for side in ("sent", "received")
    )
    assert sent == received


def test_overlap_and_microbatches_cost_no_byte():
    """C017 in bytes: one reduction per bucket, whatever M."""
    base = train_plan([[4]] * 3, bucket_bytes=1)
    for plan in (
        train_plan([[4]] * 3, bucket_bytes=1, overlap=False),
        train_plan([[1] * 4] * 3, bucket_bytes=1),
    ):
        assert [price_rank(plan, rank) for rank in range(3)] == [
            price_rank(base, rank) for rank in range(3)
        ]


def test_the_table_of_an_op_is_that_of_its_collective():
    plan = train_plan([[1]] * 3)
    axis, table, itemsize = op_table(plan, start_sync(0, 20))
    assert (axis, table.collective, table.count, table.size, itemsize) == (
        "dp", "all_reduce", 20, 3, 8,
    )  # fmt: skip
    axis, table, itemsize = op_table(plan, ReduceScalars("target_count", 1, "int64"))
    assert (axis, table.collective, table.count, itemsize) == ("control", "all_reduce", 1, 8)
    axis, table, itemsize = op_table(plan, GatherMetrics(5))
    assert (axis, table.collective, table.count, itemsize) == ("control", "gather", 15, 8)
    assert op_table(plan, Forward("head", 0)) is None


def test_a_dp_group_inside_a_larger_mesh_is_priced_by_its_members():
    """The seam of phase 1: with pp = 2 the dp groups are ranks 0, 2 and 1, 3."""
    from dataclasses import replace

    plan = ten_parameters(2)
    plan = replace(plan, mesh=Mesh(dp=2, pp=2), ranks=plan.ranks * 2, rows=plan.rows * 2)
    matrix = bytes_matrix(plan)
    priced = [price_rank(plan, rank) for rank in range(4)]
    # A ring of two: 5 of 10 elements, twice.
    assert [entry["dp", "all_reduce"]["sent_bytes"] for entry in priced] == [80] * 4
    assert matrix[3][1] == 80 + 32 and matrix[1][3] == 80 + 32
    assert matrix[0][2] == 80 + 32 and matrix[0][3] == 0
