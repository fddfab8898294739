"""`check_plan` accepts every plan that is built and refuses every fault that is planted."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from small_plans import (
    edited,
    eval_plan,
    moved,
    refused,
    removed,
    start_sync,
    train_plan,
    wait_sync,
)

from mpisim.errors import DeadlockError, PlanError
from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.mesh import Mesh
from mpisim.plan.check import check_plan, draw_place
from mpisim.plan.ops import (
    Backward,
    BackwardStage,
    CheckGradients,
    Forward,
    GatherMetrics,
    LoadBatch,
    OptimizerStep,
    ReduceScalars,
    StartSync,
    WaitSync,
)
from mpisim.plan.text import op_text

TARGETS = ReduceScalars("target_count", 1, "int64")
LOSS = ReduceScalars("loss", 2, "float64")
FLAG = ReduceScalars("non_finite", 1, "int64", "max")
EVAL = ReduceScalars("eval", 3, "float64")
NORM = CheckGradients()
METRICS = GatherMetrics(len(METRIC_NAMES))


@pytest.mark.parametrize("dp", range(1, 9))
@pytest.mark.parametrize("overlap", [True, False])
def test_every_built_plan_passes(dp, overlap):
    """A1/A5 layouts: dp 1..8, M 1..4, buckets of any size, uneven rows, ranks without rows."""
    for micros in range(1, 5):
        shapes = [
            [[2] * micros] * dp,
            [[rank % 2] * micros for rank in range(dp)],
            [[max(0, 3 - rank - micro) for micro in range(micros)] for rank in range(dp)],
            [[0] * micros] * dp,
        ]
        for rows in shapes:
            for bucket_bytes in (1, 64, 136, 160):
                plan = train_plan(rows, bucket_bytes=bucket_bytes, overlap=overlap)
                assert len(plan.buckets) == {1: 3, 64: 3, 136: 2, 160: 1}[bucket_bytes]
                check_plan(plan)
            check_plan(eval_plan(rows))


PLAN = train_plan([[2, 2], [2, 1]], bucket_bytes=1)
"""Two ranks, two microbatches, buckets head (3), block1 (8), block0 (9)."""


# --- gradient sync ---------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_an_update_before_a_wait_is_refused(bucket):
    plan = moved(PLAN, OptimizerStep(), wait_sync(bucket))
    missing = list(range(bucket, 3))
    refused(plan, re.escape(f"must follow WaitSync of buckets {missing}"), op="OptimizerStep")


@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_a_norm_before_a_wait_is_refused(bucket):
    """C019: a norm taken before the sum is there would miss what another rank found."""
    plan = PLAN
    for op in (LOSS, NORM, FLAG):
        plan = moved(plan, op, wait_sync(bucket))
    missing = list(range(bucket, 3))
    rule = re.escape(f"the norm must follow WaitSync of buckets {missing}")
    refused(plan, rule, op="CheckGradients")


def test_a_flag_without_or_before_the_check_is_refused():
    """The flag would be that of the step before, or False."""
    for plan in (removed(PLAN, NORM), moved(PLAN, FLAG, NORM)):
        refused(plan, "the flag must follow CheckGradients", op=op_text(FLAG))
    plan = removed(PLAN, NORM, ranks=[1])
    refused(plan, "the flag must follow CheckGradients", op=op_text(FLAG), ranks=[1])


def test_a_check_before_the_loss_is_summed_is_refused():
    """A loss of another rank that is not finite would be missed."""
    plan = moved(PLAN, NORM, LOSS)
    refused(plan, "CheckGradients must follow ReduceScalars of kind loss", op="CheckGradients")


def test_a_second_check_is_refused():
    plan = edited(PLAN, lambda ops: ops.insert(ops.index(FLAG), NORM))
    refused(plan, "must check its gradients once", op="CheckGradients")


def test_a_missing_wait_is_refused():
    refused(removed(PLAN, wait_sync(1)), r"must follow WaitSync of buckets \[1\]")


def test_a_missing_wait_on_one_rank_is_refused_there():
    plan = removed(PLAN, wait_sync(1), ranks=[1])
    refused(plan, r"WaitSync of buckets \[1\]", op="CheckGradients", ranks=[1])


def test_a_missing_start_is_refused():
    plan = removed(PLAN, start_sync(1, 8))
    refused(plan, "bucket 1 must be started before it is waited for", op=op_text(wait_sync(1)))


@pytest.mark.parametrize(("block", "bucket", "count"), [("head", 0, 3), ("block0", 2, 9)])
def test_a_reduction_before_the_last_backward_is_refused(block, bucket, count):
    """C017: with two microbatches a reduction in the first one would miss the second."""
    start = start_sync(bucket, count)

    def edit(ops):
        ops.remove(start)
        ops.insert(ops.index(Backward(block, 0)) + 1, start)

    refused(
        edited(PLAN, edit),
        f"gradients of all 2 microbatches of block {block}",
        op=op_text(start_sync(bucket, count)),
    )


def test_a_reduction_of_its_blocks_first_half_is_refused():
    """C017 for a bucket of two blocks: the last gradient decides, not the first."""
    plan = train_plan([[2, 2], [2, 1]], bucket_bytes=100)
    plan = moved(plan, start_sync(0, 11), Backward("block1", 1))
    refused(plan, "all 2 microbatches of block block1", op=op_text(start_sync(0, 11)))


def test_a_second_reduction_is_refused():
    """C089: one reduction per bucket and step; a second start is an error with a name."""
    plan = edited(PLAN, lambda ops: ops.insert(ops.index(wait_sync(0)), start_sync(1, 8)))
    refused(plan, "a bucket must be reduced once per step", op=op_text(start_sync(1, 8)))


def test_a_second_reduction_after_the_wait_is_refused():
    """C089, late: also when the first one is complete."""

    def edit(ops):
        place = ops.index(OptimizerStep())
        ops[place:place] = [start_sync(0, 3), wait_sync(0)]

    refused(edited(PLAN, edit), "reduced once per step", op=op_text(start_sync(0, 3)))


def test_a_second_wait_is_refused():
    plan = edited(PLAN, lambda ops: ops.insert(ops.index(OptimizerStep()), wait_sync(0)))
    refused(plan, "a bucket must be waited for once", op=op_text(wait_sync(0)))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_wrong_bucket_count_is_refused(count):
    def edit(ops):
        ops[ops.index(start_sync(0, 3))] = start_sync(0, count)

    refused(edited(PLAN, edit), "bucket must have 3 elements", op=op_text(start_sync(0, count)))


@pytest.mark.parametrize("bucket", [3, -1])
def test_an_unknown_bucket_is_refused(bucket):
    def edit(ops):
        ops[ops.index(start_sync(2, 9))] = start_sync(bucket, 9)

    refused(edited(PLAN, edit), "a bucket must be in the plan's head")


def test_a_bucket_in_flight_at_the_end_is_refused():
    plan = PLAN
    for op in (wait_sync(2), NORM, FLAG, OptimizerStep()):
        plan = removed(plan, op)
    refused(plan, r"nothing behind; got buckets in flight \[2\] on rank 0")


# --- forwards and backwards ------------------------------------------------------------------


def test_a_backward_without_its_forward_is_refused():
    plan = removed(PLAN, Forward("head", 0))
    refused(plan, "backward must follow the forward of its block", op="Backward block=head micro=0")


def test_a_forward_out_of_order_is_refused():
    plan = moved(PLAN, Forward("block1", 0), Forward("block0", 0))
    refused(plan, "forward must follow the forward of the block before")


def test_a_backward_out_of_order_is_refused():
    plan = moved(PLAN, Backward("block0", 0), Backward("block1", 0))
    refused(plan, "backward must follow the backward of the block after")


def test_a_forward_before_its_batch_is_refused():
    plan = moved(PLAN, Forward("block0", 1), LoadBatch(1))
    refused(plan, "loaded before forward", op="Forward block=block0 micro=1 keep=all")


def test_a_forward_that_runs_twice_is_refused():
    plan = edited(PLAN, lambda ops: ops.insert(ops.index(Forward("block1", 0)), ops[2]))
    assert plan.ranks[0][3] == Forward("block0", 0)
    refused(plan, "forward once per microbatch", op="Forward block=block0 micro=0 keep=all")


def test_a_missing_last_backward_leaves_activations():
    """The update is skipped too, so that only the leftovers are at fault."""

    def edit(ops):
        gone = [op for op in ops if isinstance(op, (StartSync, WaitSync, OptimizerStep))]
        for op in [*gone, NORM, FLAG, Backward("block0", 1)]:
            ops.remove(op)

    refused(
        edited(PLAN, edit),
        r"nothing behind; got saved activations \[\('block0', 1\)\] and activation gradients "
        r"\[\('block1', 1\)\] on rank 0",
    )


def test_a_microbatch_that_is_loaded_and_never_read_is_left_behind():
    """The sum is left out, too, so that only the leftover is at fault."""

    def edit(ops):
        ops[:] = [op for op in ops if isinstance(op, LoadBatch) or getattr(op, "micro", 1) != 1]

    rule = r"nothing behind; got loaded microbatches \[1\] on rank 0"
    refused(edited(eval_plan([[2, 2], [2, 2]]), edit), rule, op="LoadBatch micro=1")


def test_a_microbatch_that_is_never_run_is_refused():
    """Two backwards are not enough: they must be those of both microbatches (B1)."""

    def edit(ops):
        for index, op in enumerate(ops):
            if getattr(op, "micro", None) == 1:
                ops[index] = replace(op, micro=0)

    refused(edited(PLAN, edit), "microbatch")


@pytest.mark.parametrize("micro", [2, -1])
def test_a_microbatch_that_does_not_exist_is_refused(micro):
    def edit(ops):
        for index, op in enumerate(ops):
            if getattr(op, "micro", None) == 1:
                ops[index] = replace(op, micro=micro)

    refused(edited(PLAN, edit), "microbatch", op=f"LoadBatch micro={micro}")


@pytest.mark.parametrize("op", [Forward("head", 0), Backward("head", 0)])
def test_an_unknown_block_is_refused(op):
    def edit(ops):
        ops[ops.index(op)] = replace(op, block="tail")

    refused(edited(PLAN, edit), "block", op=op_text(replace(op, block="tail")))


def test_a_backward_before_the_global_target_count_is_refused():
    """C002: the denominator is the count of all ranks, so it must be there first."""
    plan = moved(PLAN, TARGETS, LOSS)
    refused(plan, "target_count", op="Backward block=head micro=0")


def test_a_plan_without_the_global_target_count_is_refused():
    refused(removed(PLAN, TARGETS), "target_count", op="Backward block=head micro=0")


def test_a_loss_sum_before_the_last_forward_is_refused():
    plan = moved(PLAN, LOSS, Forward("head", 1))
    refused(plan, "loss", op=op_text(LOSS))


def test_a_training_plan_without_a_loss_sum_is_refused():
    refused(removed(PLAN, LOSS), "loss")


def test_a_sum_of_an_unknown_kind_is_refused():
    def edit(ops):
        ops[ops.index(LOSS)] = replace(LOSS, kind="lost")

    refused(edited(PLAN, edit), "kind", op=op_text(replace(LOSS, kind="lost")))


def test_an_op_of_a_schedule_is_refused():
    plan = edited(PLAN, lambda ops: ops.insert(1, BackwardStage(0)))
    refused(plan, "BackwardStage must be replaced by a pass", op="BackwardStage micro=0 chunk=0")


# --- the update ------------------------------------------------------------------------------


def test_a_second_update_is_refused():
    plan = edited(PLAN, lambda ops: ops.insert(ops.index(OptimizerStep()), OptimizerStep()))
    refused(plan, "a step must update once", op="OptimizerStep")


def test_a_training_plan_without_update_is_refused():
    refused(removed(PLAN, OptimizerStep()), "must update the parameters; got no OptimizerStep")


def test_an_update_in_an_evaluation_is_refused():
    plan = edited(eval_plan(), lambda ops: ops.append(OptimizerStep()))
    refused(plan, "evaluation|eval", op="OptimizerStep")


def test_an_evaluation_without_its_sum_is_refused():
    refused(removed(eval_plan(), EVAL), "eval")


def test_a_backward_in_an_evaluation_is_refused():
    plan = edited(eval_plan(), lambda ops: ops.insert(ops.index(EVAL), Backward("head", 0)))
    refused(plan, "backward must follow the forward", op="Backward block=head micro=0")


def test_an_evaluation_that_leaves_out_a_microbatch_is_refused():
    """Every row counts (C128)."""

    def edit(ops):
        ops[:] = [op for op in ops if getattr(op, "micro", None) != 1]

    refused(edited(eval_plan([[2, 2], [2, 2]]), edit), "microbatch")


# --- between ranks ---------------------------------------------------------------------------


def test_collectives_in_another_order_are_a_deadlock_drawn_on_both_ranks():
    """Rank 1 sums the loss before it starts what rank 0 waits for."""

    def late(ops):
        ops.remove(LOSS)
        ops.insert(ops.index(start_sync(2, 9)), LOSS)

    plan = edited(PLAN, late, ranks=[1])
    with pytest.raises(DeadlockError) as caught:
        check_plan(plan)
    text = str(caught.value)
    marked = re.findall(r"^  rank (\d+) op +\d+ >> (.*)$", text, flags=re.MULTILINE)
    assert marked == [
        ("0", op_text(wait_sync(2))),
        ("1", op_text(LOSS)),
    ]
    # Both ranks with what stands before the place, and one op after it.
    assert text.count("rank 0 op") == text.count("rank 1 op") == 5


def test_buckets_in_another_order_are_refused_with_both_ranks():
    """A ring would add bucket 0 of one rank to bucket 1 of the other."""

    def swap(ops):
        ops.remove(start_sync(0, 3))
        ops.insert(ops.index(start_sync(1, 8)) + 1, start_sync(0, 3))

    plan = edited(PLAN, swap, ranks=[1])
    with pytest.raises(PlanError, match="same buckets in the same order") as caught:
        check_plan(plan)
    text = str(caught.value)
    assert re.search(rf"rank 0 op +\d+ >> {op_text(start_sync(0, 3))}", text), text
    assert re.search(rf"rank 1 op +\d+ >> {op_text(start_sync(1, 8))}", text), text


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_leaves_out_a_sum_strands_the_others(rank):
    plan = train_plan([[1], [1], [1]])
    plan = removed(plan, METRICS, ranks=[rank])
    others = [other for other in range(3) if other != rank]
    refused(
        plan, "wait for each other for ever", op=op_text(METRICS), ranks=others,
        error=DeadlockError,
    )  # fmt: skip


def test_a_rank_without_ops_strands_the_others():
    plan = replace(PLAN, ranks=(PLAN.ranks[0], ()))
    refused(plan, "for ever", op=op_text(TARGETS), ranks=[0], error=DeadlockError)


@pytest.mark.parametrize("rank", [0, 1])
def test_sums_of_different_kinds_are_refused_on_both_ranks(rank):
    def other(ops):
        ops[ops.index(METRICS)] = replace(METRICS, count=3)

    refused(edited(PLAN, other, ranks=[rank]), "same collectives in the same order", ranks=(0, 1))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_never_starts_a_bucket_deadlocks(rank):
    plan = train_plan([[1], [1], [1]])

    def edit(ops):
        ops.remove(start_sync(0, 20))
        ops.remove(wait_sync(0))
        ops.remove(OptimizerStep())

    refused(edited(plan, edit, ranks=[rank]), "for ever", ranks=(0, 1, 2), error=DeadlockError)


@pytest.mark.parametrize("dp", [1, 3])
def test_a_plan_for_another_number_of_ranks_is_refused(dp):
    with pytest.raises(PlanError, match=f"every rank of the mesh; got 2 for {dp}"):
        check_plan(replace(PLAN, mesh=Mesh(dp=dp)))


def test_a_plan_without_the_rows_of_a_rank_is_refused():
    with pytest.raises(PlanError, match="rows"):
        check_plan(replace(PLAN, rows=PLAN.rows[:1]))


def test_the_drawing_marks_the_place_and_shows_its_surroundings():
    assert draw_place(PLAN, {1: 0}).splitlines() == [
        "  rank 1 op    0 >> ReduceScalars kind=target_count count=1 dtype=int64 reduction=sum",
        "  rank 1 op    1    LoadBatch micro=0",
    ]
    last = len(PLAN.ranks[0]) - 1
    assert draw_place(PLAN, {0: last}).splitlines()[-1] == (
        f"  rank 0 op {last:4d} >> {op_text(METRICS)}"
    )
