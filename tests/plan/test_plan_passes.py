"""Schedules, buckets and passes: what each adds to a list of ops."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import SIZES, eval_plan, specs, start_sync, train_plan, wait_sync

from mpisim.layouts.metrics import METRIC_NAMES
from mpisim.layouts.specs import BlockSpec, LayerSpec, ParamSpec
from mpisim.plan.build import Plan
from mpisim.plan.ops import (
    OP_TYPES,
    WAIT_AXIS,
    Backward,
    BackwardInput,
    BackwardInputStage,
    BackwardStage,
    BackwardWeight,
    BackwardWeightStage,
    CheckGradients,
    Forward,
    ForwardStage,
    GatherMetrics,
    LoadBatch,
    Op,
    OptimizerStep,
    ReduceScalars,
    StartSync,
    WaitSync,
)
from mpisim.plan.partition import make_buckets
from mpisim.plan.passes import expand_blocks, frame_update, load_batches, sync_gradients
from mpisim.plan.schedules import accumulate


def blocks_of(*sizes):
    """Return blocks a, b, c, ... with one parameter each of the given sizes (0: none)."""
    return tuple(
        BlockSpec(
            name=name,
            layers=(
                LayerSpec(params=(ParamSpec(name=f"{name}.w", shape=(size,)),) if size else ()),
            ),
        )
        for name, size in zip("abcdefghij", sizes, strict=False)
    )


# --- schedules and expansion -----------------------------------------------------------------


def test_accumulation_has_one_microbatch_alive_at_a_time():
    """A2: forward and backward of one microbatch, then of the next."""
    assert accumulate(3) == [
        ForwardStage(0), BackwardStage(0), ForwardStage(1), BackwardStage(1), ForwardStage(2),
        BackwardStage(2),
    ]  # fmt: skip
    assert accumulate(0) == []


def test_stage_ops_become_block_ops_backward_in_reverse():
    ops = list(expand_blocks([ForwardStage(1), OptimizerStep(), BackwardStage(1)], [["a", "b"]]))
    assert ops == [
        Forward("a", 1), Forward("b", 1), OptimizerStep(), Backward("b", 1), Backward("a", 1),
    ]  # fmt: skip


def test_a_chunk_becomes_its_own_blocks():
    ops = [ForwardStage(0, 1), ForwardStage(0), BackwardStage(0, 1), BackwardStage(0)]
    assert list(expand_blocks(ops, [["a", "b"], ["c"]])) == [
        Forward("c", 0), Forward("a", 0), Forward("b", 0), Backward("c", 0), Backward("b", 0),
        Backward("a", 0),
    ]  # fmt: skip


def test_both_halves_of_a_backward_start_at_the_last_block():
    """Weight gradients are freed in the order in which they were left."""
    ops = [BackwardInputStage(1), ForwardStage(2), BackwardWeightStage(1)]
    assert list(expand_blocks(ops, [["a", "b"]])) == [
        BackwardInput("b", 1), BackwardInput("a", 1), Forward("a", 2), Forward("b", 2),
        BackwardWeight("b", 1), BackwardWeight("a", 1),
    ]  # fmt: skip


def test_a_microbatch_is_loaded_once_right_before_its_first_forward():
    ops = [ForwardStage(1), ForwardStage(0), BackwardStage(1), ForwardStage(1, 1), BackwardStage(0)]
    assert load_batches(ops) == [
        LoadBatch(1), ForwardStage(1), LoadBatch(0), ForwardStage(0), BackwardStage(1),
        ForwardStage(1, 1), BackwardStage(0),
    ]  # fmt: skip


def test_the_update_is_framed_by_the_sums():
    """C002, C019: the target count is summed before the first op; after the last the loss, then
    the norm is taken, then the flag is agreed on, and only then the update."""
    assert frame_update([LoadBatch(0)], ()) == [
        ReduceScalars("target_count", 1, "int64"),
        LoadBatch(0),
        ReduceScalars("loss", 2, "float64"),
        CheckGradients(),
        ReduceScalars("non_finite", 1, "int64", "max"),
        OptimizerStep(),
        GatherMetrics(len(METRIC_NAMES)),
    ]


# --- buckets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, 23])
def test_a_tiny_bucket_size_gives_every_block_its_own_in_backward_order(bucket_bytes):
    """C087, capacity 1 byte: blocks are never cut."""
    buckets = make_buckets(specs(1), 8, bucket_bytes)
    assert [bucket.blocks for bucket in buckets] == [("head",), ("block1",), ("block0",)]
    assert [bucket.count for bucket in buckets] == [3, 8, 9]
    assert [bucket.index for bucket in buckets] == [0, 1, 2]


def test_seven_elements_hold_the_head_and_nothing_else():
    """C087, capacity 7 elements: head (3) and block1 (8) do not fit together."""
    buckets = make_buckets(specs(1), 8, 7 * 8)
    assert [bucket.blocks for bucket in buckets] == [("head",), ("block1",), ("block0",)]


@pytest.mark.parametrize(
    ("elements", "groups"),
    [
        (10, [["head"], ["block1"], ["block0"]]),
        (11, [["head", "block1"], ["block0"]]),
        (16, [["head", "block1"], ["block0"]]),
        (17, [["head", "block1"], ["block0"]]),  # closed by the next block, not by the sum of two
        (19, [["head", "block1"], ["block0"]]),
        (20, [["head", "block1", "block0"]]),
    ],
)
def test_a_bucket_is_closed_when_the_next_block_would_pass_its_size(elements, groups):
    buckets = make_buckets(specs(1), 8, elements * 8)
    assert [list(bucket.blocks) for bucket in buckets] == groups


def test_a_whole_model_in_one_bucket():
    (bucket,) = make_buckets(specs(1), 8, 1 << 40)
    assert bucket.blocks == ("head", "block1", "block0") and bucket.count == 20
    assert bucket.offsets() == {
        "head.linear.weight": (0, 2),
        "head.linear.bias": (2, 3),
        "block1.linear.weight": (3, 9),
        "block1.linear.bias": (9, 11),
        "block0.linear.weight": (11, 17),
        "block0.linear.bias": (17, 20),
    }


def test_the_size_of_an_element_counts():
    blocks = blocks_of(4, 4)
    assert len(make_buckets(blocks, 4, 32)) == 1
    assert len(make_buckets(blocks, 8, 32)) == 2


def test_blocks_without_parameters_are_in_no_bucket():
    buckets = make_buckets(blocks_of(0, 3, 0, 2, 0), 8, 1 << 20)
    assert [bucket.blocks for bucket in buckets] == [("d", "b")]
    assert make_buckets(blocks_of(0, 0), 8, 1) == ()


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=10), bucket_bytes=st.integers(1, 400)
)
def test_every_parameter_is_in_exactly_one_bucket_in_backward_order(sizes, bucket_bytes):
    """A5: the buckets partition the gradients; each is filled from the back."""
    blocks = blocks_of(*sizes)
    buckets = make_buckets(blocks, 8, bucket_bytes)
    names = [name for bucket in buckets for name in bucket.blocks]
    assert names == [block.name for block in reversed(blocks) if block.params]
    params = [param for bucket in buckets for param in bucket.params]
    assert params == [param for block in reversed(blocks) for param in block.params]
    for number, bucket in enumerate(buckets):
        assert bucket.index == number
        assert len(bucket.blocks) == 1 or bucket.count * 8 <= bucket_bytes
        ranges = list(bucket.offsets().values())
        assert [lo for lo, _ in ranges] == [0, *(hi for _, hi in ranges)][:-1]
        assert ranges[-1][1] == bucket.count
    for bucket, following in zip(buckets, buckets[1:], strict=False):
        first = sizes["abcdefghij".index(following.blocks[0])]
        assert (bucket.count + first) * 8 > bucket_bytes  # it was closed for a reason


# --- gradient sync ---------------------------------------------------------------------------


def synced(num_microbatches, bucket_bytes, overlap):
    buckets = make_buckets(specs(1), 8, bucket_bytes)
    ops = expand_blocks(load_batches(accumulate(num_microbatches)), [list(SIZES)])
    return buckets, sync_gradients(ops, buckets, overlap)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("micros", [1, 2, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_one_reduction_per_bucket_and_step(bucket_bytes, micros, overlap):
    """Issue 2, item 4: one reduction per bucket per step, whatever the number of microbatches."""
    buckets, ops = synced(micros, bucket_bytes, overlap)
    starts = [op for op in ops if isinstance(op, StartSync)]
    waits = [op for op in ops if isinstance(op, WaitSync)]
    assert starts == [start_sync(bucket.index, bucket.count) for bucket in buckets]
    assert waits == [wait_sync(bucket.index) for bucket in buckets]
    compute = [op for op in ops if not isinstance(op, (StartSync, WaitSync))]
    assert compute == list(expand_blocks(load_batches(accumulate(micros)), [list(SIZES)]))


@pytest.mark.parametrize("micros", [1, 3])
def test_with_overlap_a_bucket_starts_right_after_its_last_gradient(micros):
    _, ops = synced(micros, 100, True)
    last = micros - 1
    assert ops[-8:] == [
        Forward("head", last), Backward("head", last), Backward("block1", last),
        start_sync(0, 11), Backward("block0", last), start_sync(1, 9), wait_sync(0), wait_sync(1),
    ]  # fmt: skip


def test_without_overlap_nothing_starts_before_the_last_backward():
    _, ops = synced(2, 100, False)
    end = max(index for index, op in enumerate(ops) if isinstance(op, Backward))
    assert ops[end + 1 :] == [start_sync(0, 11), wait_sync(0), start_sync(1, 9), wait_sync(1)]
    assert not any(isinstance(op, StartSync) for op in ops[:end])


def test_a_model_without_gradients_is_not_synchronized():
    ops = list(expand_blocks(accumulate(1), [["a"]]))
    for overlap in (True, False):
        assert sync_gradients(ops, (), overlap) == ops


# --- whole plans -----------------------------------------------------------------------------


def test_the_order_of_additions_does_not_depend_on_overlap():
    on, off = (train_plan([[1, 1]] * 3, bucket_bytes=1, overlap=value) for value in (True, False))
    starts = [[op for op in plan.ranks[0] if isinstance(op, StartSync)] for plan in (on, off)]
    assert starts[0] == starts[1] and on.buckets == off.buckets


def test_all_ranks_have_the_same_ops_however_many_rows():
    plan = train_plan([[3, 0], [1, 2], [0, 0]])
    assert plan.ranks[0] == plan.ranks[1] == plan.ranks[2]
    assert plan.rows == ((3, 0), (1, 2), (0, 0))


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (train_plan([[2, 2], [2, 2]]), "train-2x2x2"),
        (train_plan([[2, 2], [2, 1]]), "train-2x2x2-of-7"),
        (train_plan([[0], [0]]), "train-2x1x0"),
        (eval_plan([[5]]), "eval-1x1x5"),
    ],
)
def test_a_plan_is_named_by_its_shape(plan, name):
    assert plan.name == name


def test_plans_of_different_shapes_of_a_run_have_different_names():
    """Traces and totals are kept by plan name."""
    from mpisim.data.sampler import microbatch_bounds, shard_rows

    names = set()
    for num_rows in range(1, 40):
        rows = []
        for rank in range(3):
            bounds = microbatch_bounds(*shard_rows(num_rows, 3, rank), 2)
            rows.append(tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False)))
        names.add(train_plan(rows).name)
    assert len(names) == 39


def test_an_evaluation_has_forwards_and_one_sum():
    assert eval_plan([[2, 1]]).ranks[0] == (
        LoadBatch(0), Forward("block0", 0), Forward("block1", 0), Forward("head", 0),
        LoadBatch(1), Forward("block0", 1), Forward("block1", 1), Forward("head", 1),
        ReduceScalars("eval", 3, "float64"),
    )  # fmt: skip


def test_plans_are_values():
    """Two builds give equal plans; nothing in them can be changed."""
    one, two = train_plan(), train_plan()
    assert one == two and hash(one) == hash(two)
    with pytest.raises(AttributeError):
        one.kind = "eval"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        one.ranks[0][0].count = 2  # type: ignore[attr-defined]
    assert isinstance(one, Plan)


def test_every_op_says_how_it_is_read():
    """DESIGN, ops: each class documents itself and is known by name."""

    def classes(kind):
        for child in kind.__subclasses__():
            yield child
            yield from classes(child)

    # A slotted dataclass is made twice; only the one that its module holds counts.
    import mpisim.plan.ops as module

    found = {kind for kind in classes(Op) if getattr(module, kind.__name__, None) is kind}
    assert found == set(OP_TYPES.values())
    for name, kind in OP_TYPES.items():
        assert kind.__name__ == name
        assert kind.__doc__.startswith("This op is read as: ")
    assert set(WAIT_AXIS) <= found


def test_every_op_that_runs_has_a_handler():
    from mpisim.engine.handlers import HANDLERS

    schedule = {ForwardStage, BackwardStage, BackwardInputStage, BackwardWeightStage}
    assert set(HANDLERS) == set(OP_TYPES.values()) - schedule
