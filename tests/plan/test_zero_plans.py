"""Plans of ZeRO stages 1 to 3: what they gather and sum, what is refused, and what it costs.

Golden files of these plans are among those of `test_plan_text`.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import (
    decoder_specs,
    deep_specs,
    edited,
    eval_plan,
    moved,
    refused,
    removed,
    replaced,
    train_plan,
)

from mpisim.cost.price import bytes_matrix, op_table, price_rank
from mpisim.errors import DeadlockError, PlanError
from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.mesh import Mesh
from mpisim.nn.decoder import build_decoder
from mpisim.nn.models import build_mlp
from mpisim.plan.build import build_train_plan
from mpisim.plan.check import check_plan
from mpisim.plan.ops import (
    ALL_MICROS,
    IF_COMMITTED,
    Backward,
    CheckGradients,
    Forward,
    GatherMetrics,
    GatherParams,
    OptimizerStep,
    Recompute,
    ReduceScalars,
    Reshard,
    StartSync,
    StartUnshard,
    WaitSync,
    WaitUnshard,
    control_count,
)
from mpisim.plan.partition import Bucket
from mpisim.plan.text import op_text, parse_plan, plan_text

SCATTER = "reduce_scatter"
FLAG = ReduceScalars("non_finite", 1, "int64", "max")
NORM = ReduceScalars("norm", 2, "float64")
METRICS = GatherMetrics(len(METRIC_NAMES))

ROWS = [[2, 2], [2, 1]]
ONE, TWO, THREE = (train_plan(ROWS, bucket_bytes=1, zero=zero) for zero in (1, 2, 3))
"""Two ranks, two microbatches, buckets head (3), block1 (8), block0 (9)."""
REPLAYED = train_plan(ROWS, zero=3, recompute="full")


def insert(plan, op, before, ranks=None):
    return edited(plan, lambda ops: ops.insert(ops.index(before), op), ranks)


# --- what the passes build -------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefetch", [True, False])
def test_every_built_plan_passes(zero, overlap, prefetch):
    """A6 layouts: ranks 1 to 4, M 1, 2, 4, all recompute modes, tied tables, any bucket size."""
    for dp in range(1, 5):
        for rows in ([[2] * m] * dp for m in (1, 2, 4)):
            for mode in (("none", 1), ("selective", 1), ("full", 1), ("full", 2), ("full", 3)):
                for specs in (deep_specs, decoder_specs):
                    plan = train_plan(
                        rows, zero=zero, overlap=overlap, prefetch=prefetch, specs=specs,
                        recompute=mode[0], every=mode[1], bucket_bytes=300,
                    )  # fmt: skip
                    check_plan(plan)
                    assert plan.zero == zero
            check_plan(eval_plan(rows, specs=decoder_specs, zero=zero, prefetch=prefetch))


def kinds(plan, kind):
    return [op for op in plan.ranks[0] if isinstance(op, kind)]


def test_stage_1_scatters_once_a_step_and_gathers_after_the_update():
    assert kinds(ONE, StartSync) == [
        StartSync(0, ALL_MICROS, 3, SCATTER), StartSync(1, ALL_MICROS, 8, SCATTER),
        StartSync(2, ALL_MICROS, 9, SCATTER),
    ]  # fmt: skip
    ops = ONE.ranks[0]
    assert ops[ops.index(OptimizerStep()) :] == (
        OptimizerStep(), GatherParams(0, 3), GatherParams(1, 8), GatherParams(2, 9), METRICS,
    )  # fmt: skip
    assert ops[ops.index(CheckGradients()) :][:3] == (CheckGradients(), NORM, FLAG)


@pytest.mark.parametrize("overlap", [True, False])
def test_stage_2_scatters_every_microbatch_one_bucket_at_a_time(overlap):
    """C017: each microbatch's own gradients; never more than one bucket is summed."""
    plan = train_plan(ROWS, bucket_bytes=1, zero=2, overlap=overlap)
    want = [StartSync(b, m, (3, 8, 9)[b], SCATTER) for m in (0, 1) for b in (0, 1, 2)]
    assert kinds(plan, StartSync) == want
    running, filling = set(), 0
    for op in plan.ranks[0]:
        if isinstance(op, StartSync):
            assert not running
            running.add(op.bucket)
        elif isinstance(op, WaitSync):
            running.remove(op.bucket)
        elif isinstance(op, Backward):
            filling += bool(running)
    assert filling == (4 if overlap else 0)


def test_stage_3_holds_a_block_at_a_time_and_two_with_prefetch():
    for prefetch, most in ((False, 1), (True, 2)):
        plan = train_plan(ROWS, zero=3, prefetch=prefetch)
        held, seen = set(), 0
        for op in plan.ranks[0]:
            if isinstance(op, StartUnshard):
                held.add(op.bucket)
                seen = max(seen, len(held))
            elif isinstance(op, Reshard):
                held.remove(op.bucket)
        assert seen == most and not held
    assert not kinds(THREE, GatherParams) and not kinds(TWO, StartUnshard)


def test_a_replay_and_its_backward_share_a_gather():
    """Three gathers would be 4M of traffic: forward, and one for replay and backward."""
    for every in (1, 2, 5):
        plan = train_plan([[2]], zero=3, recompute="full", every=every, specs=deep_specs)
        for bucket in range(6):
            assert len([op for op in kinds(plan, StartUnshard) if op.bucket == bucket]) == 2
    ops = REPLAYED.ranks[0]
    at = ops.index(Recompute("block0", 0))
    assert ops[at + 1] == Backward("block0", 0)
    assert ops[at - 1] == WaitUnshard(2)


def test_a_restored_interior_needs_no_parameters():
    plan = train_plan([[2]], zero=3, recompute="selective", specs=decoder_specs)
    ops = plan.ranks[0]
    at = ops.index(Recompute("block2", 0))
    assert isinstance(ops[at + 1], StartUnshard)


def test_a_tied_table_is_gathered_for_both_readers_and_summed_after_the_last():
    plan = train_plan([[2]], zero=3, specs=decoder_specs)
    (table,) = (bucket for bucket in plan.buckets if bucket.params[0].name == "embed.tokens.weight")
    assert table.blocks == ("head", "embed")
    gathers = [op for op in kinds(plan, StartUnshard) if op.bucket == table.index]
    assert len(gathers) == 4  # embed and head, forward and backward
    ops = plan.ranks[0]
    start = ops.index(StartSync(table.index, 0, 10, SCATTER))
    assert start > ops.index(Backward("embed", 0))


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 3, 7, 8, 20])
def test_shards_cover_a_bucket_without_gap_or_overlap(size, count):
    """More ranks than elements: the last ranks own nothing."""
    bucket = Bucket(0, ("a",), train_plan(bucket_bytes=1).buckets[0].params[:0])
    assert bucket.count == 0
    bucket = Bucket(0, ("a",), (replace(ONE.buckets[0].params[0], shape=(count,)),))
    shards = [bucket.shard(size, index) for index in range(size)]
    assert [lo for lo, _ in shards] == [0, *(hi for _, hi in shards)][:-1]
    assert shards[-1][1] == count
    lengths = [hi - lo for lo, hi in shards]
    assert max(lengths) - min(lengths) <= 1


def test_a_norm_is_one_number_per_rank():
    assert control_count("norm", 5) == 5 and control_count("loss", 5) == 2
    assert kinds(train_plan([[1]] * 3, zero=2), ReduceScalars)[2] == replace(NORM, count=3)


# --- what is refused: sums -------------------------------------------------------------------


@pytest.mark.parametrize("plan", [ONE, TWO, THREE], ids=["1", "2", "3"])
def test_another_collective_is_refused(plan):
    start = kinds(plan, StartSync)[1]
    wrong = replace(start, collective="all_reduce")
    rule = f"must be a reduce_scatter with zero {plan.zero}"
    refused(replaced(plan, start, wrong), rule, op=op_text(wrong))


def test_a_scatter_without_zero_is_refused():
    plan = train_plan(ROWS)
    (start,) = kinds(plan, StartSync)
    wrong = replace(start, collective=SCATTER)
    refused(replaced(plan, start, wrong), "all_reduce with zero 0", op=op_text(wrong))


@pytest.mark.parametrize("micro", [0, 1, 7])
def test_one_microbatch_alone_is_refused_where_all_are_summed(micro):
    start = StartSync(1, ALL_MICROS, 8, SCATTER)
    wrong = replace(start, micro=micro)
    rule = r"must be of all microbatches \(-1\) with zero 1"
    refused(replaced(ONE, start, wrong), rule, op=op_text(wrong))


@pytest.mark.parametrize("micro", [ALL_MICROS, 2])
@pytest.mark.parametrize("plan", [TWO, THREE], ids=["2", "3"])
def test_a_sum_of_no_microbatch_is_refused_where_each_is_summed(plan, micro):
    wrong = StartSync(1, micro, 8, SCATTER)
    rule = "must be of one of 2 microbatches"
    refused(replaced(plan, StartSync(1, 1, 8, SCATTER), wrong), rule, op=op_text(wrong))


def test_the_sum_of_the_next_microbatch_is_refused():
    wrong = StartSync(1, 1, 8, SCATTER)
    rule = "must hold the gradients of microbatch 1 of block block1"
    refused(replaced(TWO, StartSync(1, 0, 8, SCATTER), wrong), rule, op=op_text(wrong))


def test_a_second_sum_of_a_microbatch_is_refused():
    """C015, C017: the second microbatch's gradients would never be summed."""
    wrong = StartSync(1, 0, 8, SCATTER)
    rule = "reduced once per microbatch"
    refused(replaced(TWO, StartSync(1, 1, 8, SCATTER), wrong), rule, op=op_text(wrong))


def test_a_missing_sum_of_a_microbatch_is_refused():
    """C017: reduced in the first microbatch and never again."""
    plan = TWO
    for op in (StartSync(1, 1, 8, SCATTER), WaitSync(1, 1)):
        plan = removed(plan, op)
    refused(plan, r"must follow WaitSync of buckets \[1\]", op="CheckGradients")


def test_a_wait_for_another_microbatch_is_refused():
    plan = replaced(TWO, WaitSync(1, 0), WaitSync(1, 1))
    refused(plan, "bucket 1 must be started before", op="WaitSync bucket=1 micro=1")


def test_a_second_wait_is_refused():
    plan = insert(TWO, WaitSync(1, 0), CheckGradients())
    refused(plan, "waited for once", op="WaitSync bucket=1 micro=0")


@pytest.mark.parametrize("bucket", [0, 1, 2])
@pytest.mark.parametrize("plan", [TWO, THREE], ids=["2", "3"])
def test_a_backward_that_adds_to_a_bucket_in_flight_is_refused(plan, bucket):
    """C017: later microbatches write into what is being summed."""
    block = ("head", "block1", "block0")[bucket]
    late = Backward(block, 1)

    def edit(ops):
        ops.remove(WaitSync(bucket, 0))
        ops.insert(ops.index(late) + 1, WaitSync(bucket, 0))

    rule = f"must not add to bucket {bucket} while it is summed"
    refused(edited(plan, edit), rule, op=op_text(late))


def test_a_tied_table_summed_before_its_last_backward_is_refused():
    plan = train_plan([[2]], zero=3, specs=decoder_specs)
    start = StartSync(6, 0, 10, SCATTER)
    rule = "gradients of microbatch 0 of block embed"
    refused(moved(plan, start, Backward("embed", 0)), rule, op=op_text(start))


# --- what is refused: parameters -------------------------------------------------------------


def without_gather(plan, nth):
    """Return `plan` without its nth gather, from start to reshard."""

    def edit(ops):
        at = [n for n, op in enumerate(ops) if isinstance(op, StartUnshard)][nth]
        bucket = ops[at].bucket
        del ops[ops.index(Reshard(bucket), at)]
        del ops[ops.index(WaitUnshard(bucket), at)]
        del ops[at]

    return edited(plan, edit)


@pytest.mark.parametrize(
    ("plan", "nth", "op", "bucket"),
    [
        (THREE, 0, Forward("block0", 0), 2),
        (THREE, 2, Forward("head", 0), 0),
        (THREE, 3, Backward("head", 0), 0),
        (THREE, 5, Backward("block0", 0), 2),
        (REPLAYED, 4, Recompute("block1", 0), 1),
        (eval_plan(ROWS, zero=3), 1, Forward("block1", 0), 1),
    ],
)
def test_a_block_without_its_parameters_is_refused(plan, nth, op, bucket):
    rule = f"block {op.block} must find the parameters of bucket {bucket} gathered"
    refused(without_gather(plan, nth), rule)


def test_a_head_without_the_tied_table_is_refused():
    plan = train_plan([[2]], zero=3, specs=decoder_specs)
    places = [op.bucket for op in kinds(plan, StartUnshard)]
    nth = len(places) - 1 - places[::-1].index(0) + 1  # behind the head's own, for its backward
    assert places[nth] == 6
    refused(without_gather(plan, nth), "block head must find the parameters of bucket 6 gathered")


def test_a_gather_that_is_not_waited_for_is_refused():
    rule = "block block0 must find the parameters of bucket 2 gathered"
    refused(removed(THREE, WaitUnshard(2)), rule, op="Forward block=block0 micro=0 keep=all")


def test_parameters_freed_before_the_block_runs_are_refused():
    plan = moved(THREE, Reshard(2), Forward("block0", 0))
    refused(plan, "must find the parameters of bucket 2 gathered")


def test_a_wait_without_a_start_is_refused():
    plan = removed(THREE, StartUnshard(2, 9))
    refused(plan, "bucket 2 must be started before it is waited for", op="WaitUnshard bucket=2")


def test_a_second_wait_for_a_gather_is_refused():
    plan = insert(THREE, WaitUnshard(2), Forward("block0", 0))
    refused(plan, "a gather must be waited for once", op="WaitUnshard bucket=2")


@pytest.mark.parametrize("before", [WaitUnshard(2), Forward("block0", 0)])
def test_a_second_gather_is_refused(before):
    plan = insert(THREE, StartUnshard(2, 9), before)
    refused(plan, "must be freed before it is gathered again", op="StartUnshard bucket=2 count=9")


def test_a_missing_reshard_is_refused():
    rule = "must be freed before it is gathered again"
    refused(removed(THREE, Reshard(2)), rule, op="StartUnshard bucket=2 count=9")
    plan = edited(eval_plan([[2], [2]], zero=3), lambda ops: ops.remove(Reshard(0)))
    refused(plan, r"nothing behind; got gathered parameters of buckets \[0\] on rank 0")


def test_a_second_reshard_is_refused():
    plan = insert(THREE, Reshard(2), Forward("block1", 0))
    refused(plan, "must be gathered before they are freed", op="Reshard bucket=2")


def test_a_reshard_of_what_is_on_its_way_is_refused():
    """Its messages would arrive in freed memory."""
    plan = insert(THREE, Reshard(2), WaitUnshard(2))
    refused(plan, "must be gathered before they are freed", op="Reshard bucket=2")


@pytest.mark.parametrize("wrong", [StartUnshard(2, 8), StartUnshard(3, 9), StartUnshard(-1, 9)])
def test_a_gather_of_another_bucket_or_size_is_refused(wrong):
    rule = "bucket must have 9 elements" if wrong.bucket == 2 else "must be in the plan's head"
    refused(replaced(THREE, StartUnshard(2, 9), wrong), rule, op=op_text(wrong))


@pytest.mark.parametrize("plan", [train_plan(ROWS, bucket_bytes=1), ONE, TWO])
def test_a_gather_by_block_is_refused_where_every_rank_has_all(plan):
    plan = edited(plan, lambda ops: ops.__setitem__(slice(1, 1), [StartUnshard(2, 9)]))
    refused(plan, "gathered by block with zero 3 only", op="StartUnshard bucket=2 count=9")


# --- what is refused: the update -------------------------------------------------------------


@pytest.mark.parametrize("plan", [ONE, TWO], ids=["1", "2"])
def test_updated_parameters_that_nobody_gathers_are_refused(plan):
    """The replicas would go on with old weights."""
    refused(removed(plan, GatherParams(1, 8)), r"no GatherParams of buckets \[1\] on rank 0")


def test_updated_parameters_that_one_rank_does_not_gather_are_refused():
    plan = removed(ONE, GatherParams(1, 8), ranks=[1])
    with pytest.raises(PlanError, match="the gather after the update of bucket 1 on rank 0 and"):
        check_plan(plan)
    plan = removed(ONE, GatherParams(2, 9), ranks=[1])
    refused(plan, "for ever", ranks=(0, 1), error=DeadlockError)


def test_parameters_gathered_before_the_update_are_refused():
    plan = moved(ONE, GatherParams(0, 3), OptimizerStep())
    refused(plan, "gathered after OptimizerStep", op="GatherParams bucket=0 count=3")


def test_parameters_gathered_twice_are_refused():
    plan = insert(ONE, GatherParams(0, 3), METRICS)
    refused(plan, "must be gathered once", op="GatherParams bucket=0 count=3")


@pytest.mark.parametrize("wrong", [GatherParams(0, 8), GatherParams(3, 3)])
def test_a_gather_after_the_update_of_another_bucket_or_size_is_refused(wrong):
    rule = "bucket must have 3 elements" if wrong.bucket == 0 else "must be in the plan's head"
    refused(replaced(TWO, GatherParams(0, 3), wrong), rule, op=op_text(wrong))


@pytest.mark.parametrize("plan", [train_plan(ROWS, bucket_bytes=1), THREE])
def test_a_gather_after_the_update_is_refused_where_it_has_no_sense(plan):
    plan = insert(plan, GatherParams(0, 3), METRICS)
    refused(plan, "with zero 1 or 2 only", op="GatherParams bucket=0 count=3")


@pytest.mark.parametrize("plan", [ONE, TWO, THREE], ids=["1", "2", "3"])
def test_a_norm_of_one_rank_is_refused(plan):
    """C033: each rank would clip with the norm of its own shard."""
    refused(removed(plan, NORM), "the flag must follow the sum norm", op=op_text(FLAG))
    refused(moved(plan, NORM, CheckGradients()), "must follow CheckGradients", op=op_text(NORM))
    rule = "the flag must follow the sum norm"
    refused(moved(plan, FLAG, NORM), rule, op=op_text(FLAG))
    refused(insert(plan, NORM, FLAG), "norm must be summed once", op=op_text(NORM))


@pytest.mark.parametrize(
    "wrong", [replace(NORM, count=1), replace(NORM, dtype="int64"), replace(NORM, reduction="max")]
)
def test_a_norm_of_another_shape_is_refused(wrong):
    refused(replaced(ONE, NORM, wrong), r"the sum norm must be of \(2, ", op=op_text(wrong))


def test_a_sum_of_norms_is_refused_where_every_rank_has_all():
    """C035: replicas would be counted once per rank."""
    plan = insert(train_plan(ROWS), NORM, FLAG)
    rule = "kind of a sum must be target_count or loss or non_finite"
    refused(plan, rule, op=op_text(NORM))


def test_an_evaluation_takes_no_norm():
    plan = edited(eval_plan(ROWS, zero=3), lambda ops: ops.append(NORM))
    refused(plan, "kind of a sum must be eval", op=op_text(NORM))


# --- what is refused: order over ranks -------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "first", "second", "said"),
    [
        (ONE, GatherParams(0, 3), GatherParams(1, 8), "the gather after the update of bucket 0"),
        (
            train_plan(ROWS, zero=3, prefetch=True, specs=decoder_specs),
            StartUnshard(0, 2), StartUnshard(6, 10), "the gather of bucket 0",
        ),
        (
            train_plan([[2], [2]], zero=1, bucket_bytes=1, overlap=True),
            StartSync(1, -1, 8, SCATTER), StartSync(2, -1, 9, SCATTER), "the sum of bucket 1",
        ),
    ],
)  # fmt: skip
def test_another_order_on_one_rank_is_refused(plan, first, second, said):
    def edit(ops):
        one = ops.index(first)
        two = ops.index(second, one)
        del ops[one]
        ops.insert(two, first)

    with pytest.raises(PlanError) as caught:
        check_plan(edited(plan, edit, ranks=[1]))
    text = str(caught.value)
    assert f"got {said} on rank 0" in text, text
    assert re.search(r"rank 0 op +\d+ >> ", text) and re.search(r"rank 1 op +\d+ >> ", text)


def test_a_gather_against_a_sum_is_refused():
    """Both are ops of axis dp, of the same bucket even: their messages would be mixed up."""
    plan = train_plan([[2], [2]], zero=3, prefetch=True)
    # Rank 1 begins the gather for block0 behind the sum of block1, rank 0 before it.
    start = StartUnshard(2, 9)

    def edit(ops):
        at = len(ops) - 1 - ops[::-1].index(start)
        del ops[at]
        ops.insert(ops.index(StartSync(1, 0, 8, SCATTER)) + 1, start)

    with pytest.raises(PlanError, match="the gather of bucket 2 on rank 0 and the sum of bucket 1"):
        check_plan(edited(plan, edit, ranks=[1]))


# --- as text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_plan_is_read_back_equal(zero, prefetch, every):
    plan = train_plan(
        ROWS, zero=zero, prefetch=prefetch, specs=decoder_specs, every=max(every, 1),
        recompute="full" if every else "none", bucket_bytes=500,
    )  # fmt: skip
    assert parse_plan(plan_text(plan)) == plan
    plan = eval_plan(ROWS, zero=zero, prefetch=prefetch)
    assert parse_plan(plan_text(plan)) == plan


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("zero 3", "zero"), ("zero 3", "zero three"), ("zero 3", "zero 03"), ("zero 3", "zero 3 3"),
        ("zero 3", "zero +3"),
        ("  StartUnshard", "  StartUnshard bucket=2"),
        ("  StartUnshard", "  StartUnshard bucket=2 count=9 micro=0"),
        ("  WaitUnshard", "  WaitUnshard bucket=two"),
        ("  Reshard", "  Reshards bucket=2"),
        ("  StartSync", "  StartSync bucket=0 count=3"),
        ("  StartSync", "  StartSync bucket=0 micro=x count=3 collective=reduce_scatter"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(line, becomes):
    lines = plan_text(THREE).splitlines()
    number = next(n for n, found in enumerate(lines, 1) if found.startswith(line))
    lines[number - 1] = becomes
    with pytest.raises(PlanError, match=rf"plan line {number} must .*; got .*mpisim plan show"):
        parse_plan("\n".join(lines) + "\n")


def by_hand(plan, old, new):
    text = plan_text(plan)
    assert old in text
    return parse_plan(text.replace(old, new))


@pytest.mark.parametrize("zero", [-1, 4, 33])
def test_an_unknown_stage_in_a_file_is_refused_by_its_number(zero):
    with pytest.raises(PlanError, match=f"plan zero must be 0, 1, 2 or 3; got {zero}"):
        check_plan(by_hand(TWO, "zero 2", f"zero {zero}"))


@pytest.mark.parametrize(
    ("plan", "zero", "rule"),
    [
        (ONE, 0, "must be an all_reduce with zero 0"), (ONE, 2, "must be of one of 2 microbatches"),
        (ONE, 3, "must find the parameters of bucket 2 gathered"),
        (TWO, 0, "must be an all_reduce with zero 0"),
        (TWO, 1, r"must be of all microbatches \(-1\) with zero 1"),
        (TWO, 3, "must find the parameters of bucket 2 gathered"),
        (THREE, 0, "gathered by block with zero 3 only"),
        (THREE, 1, "gathered by block with zero 3 only"),
        (THREE, 2, "gathered by block with zero 3 only"),
        (train_plan(ROWS, bucket_bytes=1), 1, "must be a reduce_scatter with zero 1"),
    ],
)  # fmt: skip
def test_another_stage_in_a_file_is_refused(plan, zero, rule):
    with pytest.raises(PlanError, match=rule):
        check_plan(by_hand(plan, f"zero {plan.zero}", f"zero {zero}"))


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (TWO, "StartSync bucket=1 micro=0 count=8"), (THREE, "StartUnshard bucket=1 count=8"),
        (ONE, "GatherParams bucket=1 count=8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [0, 7, 9])
def test_another_count_in_a_file_is_refused_by_its_number(plan, line, count):
    wrong = line.replace("count=8", f"count={count}")
    with pytest.raises(PlanError, match="bucket must have 8 elements") as caught:
        check_plan(by_hand(plan, line, wrong))
    assert f">> {wrong}" in str(caught.value)


# --- bytes -----------------------------------------------------------------------------------


def model_plan(model, rows, *, dtype="float32", **options):
    options = {"algorithm": "ring", "overlap": True, "bucket_bytes": 1 << 20, **options}
    return build_train_plan(
        mesh=Mesh(dp=len(rows)), specs=lambda n, length: model.spec(n, np.dtype(dtype), length),
        rows=tuple(map(tuple, rows)), dtype=dtype, itemsize=np.dtype(dtype).itemsize,
        param_dtype=dtype, **options,
    )  # fmt: skip


def linear(count):
    """Return a linear model of `count` parameters."""
    return build_mlp(
        input_kind="features", num_features=count - 1, hidden=(), activation="relu",
        output=("targets", 1),
    )  # fmt: skip


def sent(plan, axis="dp", **options):
    """Return the bytes that all ranks send on an axis."""
    return sum(
        entry["sent_bytes"]
        for rank in range(plan.mesh.size)
        for (where, _), entry in price_rank(plan, rank, **options).items()
        if where == axis
    )


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 8),
    micros=st.sampled_from((1, 2, 4)),
    hidden=st.lists(st.integers(1, 9), max_size=3),
    features=st.integers(1, 7),
    dtype=st.sampled_from(("float32", "float64")),
    bucket_bytes=st.sampled_from((1, 100, 1 << 20)),
    every=st.integers(1, 3),
    prefetch=st.booleans(),
    overlap=st.booleans(),
    kind=st.sampled_from(("mlp", "decoder")),
)
def test_bytes_are_those_of_the_closed_form(
    ranks, micros, hidden, features, dtype, bucket_bytes, every, prefetch, overlap, kind
):
    """A6: (N - 1) x {2, 2, M + 1, 3M} x parameter bytes, whatever divides or does not."""
    if kind == "mlp":
        model = build_mlp(
            input_kind="features", num_features=features, hidden=tuple(hidden), activation="relu",
            output=("targets", 1),
        )  # fmt: skip
    else:
        model = build_decoder(
            vocab_size=features + 1, d_model=2 * (1 + len(hidden)), num_blocks=1 + len(hidden),
            num_heads=1 + len(hidden), num_kv_heads=1, d_ff=features, tied=False, max_len=4,
            dropout=0.0,
        )  # fmt: skip
    nbytes = np.dtype(dtype).itemsize * sum(spec.size for spec in model.param_specs())
    for zero, factor in enumerate((2, 2, micros + 1, 3 * micros)):
        plan = model_plan(
            model, [[2] * micros] * ranks, dtype=dtype, zero=zero, recompute="full",
            recompute_every=every, prefetch=prefetch, overlap=overlap, bucket_bytes=bucket_bytes,
        )  # fmt: skip
        check_plan(plan)
        assert sent(plan) == (ranks - 1) * factor * nbytes, zero


def test_a_tied_table_is_gathered_twice_as_often():
    """The closed form is for untied tables: embed and head each gather a tied one."""
    sizes = {"vocab_size": 7, "d_model": 4, "num_blocks": 2, "num_heads": 2, "num_kv_heads": 1,
             "d_ff": 5, "max_len": 4, "dropout": 0.0}  # fmt: skip
    model = build_decoder(tied=True, **sizes)
    plan = model_plan(model, [[2]] * 3, zero=3, recompute="full")
    count = sum(spec.size for spec in model.param_specs())
    assert sent(plan) == 2 * 4 * (3 * count + 2 * 7 * 4)


@pytest.mark.parametrize("rank", range(4))
def test_c053_a_reduction_sends_three_quarters(rank):
    """C053: 1000 fp32 parameters, 4 ranks: 3000 B per rank and reduction; an all-reduce 6000."""
    rows = [[1, 1]] * 4
    priced = {z: price_rank(model_plan(linear(1000), rows, zero=z), rank) for z in range(4)}
    assert priced[0]["dp", "all_reduce"]["sent_bytes"] == 6000
    assert priced[1]["dp", "reduce_scatter"]["sent_bytes"] == 3000
    assert priced[2]["dp", "reduce_scatter"]["sent_bytes"] == 2 * 3000
    assert priced[3]["dp", "reduce_scatter"]["sent_bytes"] == 2 * 3000
    assert priced[1]["dp", "all_gather"]["sent_bytes"] == 3000
    assert priced[2]["dp", "all_gather"]["sent_bytes"] == 3000
    assert priced[3]["dp", "all_gather"]["sent_bytes"] == 4 * 3000
    for zero in (1, 2, 3):
        assert ("dp", "all_reduce") not in priced[zero]
        assert priced[zero]["dp", "reduce_scatter"]["sent_messages"] == 3 * (1 if zero == 1 else 2)
    start = StartSync(0, 0, 1000, SCATTER)
    plan = model_plan(linear(1000), rows, zero=2)
    axis, table, itemsize = op_table(plan, start)
    assert (axis, table.collective, table.sent_bytes(rank, itemsize)) == ("dp", SCATTER, 3000)


def test_gathers_are_in_the_dtype_of_the_working_weights():
    """Gradients travel as float32, weights as bfloat16."""
    plan = replace(model_plan(linear(1000), [[1]] * 4, zero=1), param_dtype="bfloat16")
    priced = price_rank(plan, 0)
    assert priced["dp", "all_gather"]["sent_bytes"] == 1500
    assert priced["dp", "reduce_scatter"]["sent_bytes"] == 3000


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_skipped_update_gathers_nothing_after_it(zero):
    plan = model_plan(linear(1000), [[1, 1]] * 4, zero=zero)
    saved = 4 * 3000 if zero in (1, 2) else 0
    assert sent(plan) - sent(plan, committed=False) == saved
    matrices = [np.array(bytes_matrix(plan, committed)) for committed in (True, False)]
    assert (matrices[0] - matrices[1]).sum() == saved
    assert sent(plan, "control") == sent(plan, "control", committed=False)
    assert {GatherParams} == IF_COMMITTED


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 3, 5, 8])
def test_the_matrix_adds_up_to_what_ranks_send_and_receive(dp, zero):
    plan = train_plan([[1, 1]] * dp, bucket_bytes=100, zero=zero)
    matrix = np.array(bytes_matrix(plan))
    for rank in range(dp):
        entries = price_rank(plan, rank).values()
        assert matrix[rank].sum() == sum(entry["sent_bytes"] for entry in entries)
        assert matrix[:, rank].sum() == sum(entry["received_bytes"] for entry in entries)


def test_control_traffic_is_that_of_stage_0_and_the_norms():
    """One float64 per rank more, in 4 ranks by recursive doubling: 2 messages of 32 bytes."""
    plain, sharded = (
        price_rank(model_plan(linear(10), [[1]] * 4, zero=zero), 2)["control", "all_reduce"]
        for zero in (0, 1)
    )
    assert sharded["sent_bytes"] - plain["sent_bytes"] == 2 * 4 * 8
    assert sharded["sent_messages"] - plain["sent_messages"] == 2
