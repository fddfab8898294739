"""The recompute pass, what is compared with what, and the faults `check_plan` finds around it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import (
    decoder_specs,
    deep_specs,
    edited,
    eval_plan,
    moved,
    removed,
    replaced,
    train_plan,
)

from mpisim.errors import PlanError
from mpisim.layouts.specs import BlockSpec, LayerSpec
from mpisim.plan.build import recomputable
from mpisim.plan.check import check_plan
from mpisim.plan.ops import (
    KEEPS,
    Backward,
    BackwardInput,
    BackwardInputStage,
    BackwardStage,
    BackwardWeight,
    BackwardWeightStage,
    Forward,
    ForwardStage,
    LoadBatch,
    OptimizerStep,
    Recompute,
)
from mpisim.plan.passes import expand_blocks, insert_recompute, load_batches, replay_ends
from mpisim.plan.schedules import accumulate
from mpisim.plan.text import op_text

NAMES = ("a", "b", "c", "d", "head")
BLOCKS = NAMES[:-1]


def expanded(micros=1):
    return list(expand_blocks(load_batches(accumulate(micros)), [NAMES]))


def keeps_of(ops):
    return {(op.block, op.micro): op.keep for op in ops if isinstance(op, Forward)}


# --- the pass --------------------------------------------------------------------------------


def test_without_recompute_the_ops_stay():
    assert insert_recompute(expanded(2), [BLOCKS], "none", 3) == expanded(2)


def test_selective_replays_the_interiors_of_a_block_right_before_its_backward():
    assert insert_recompute(expanded(), [("b", "c")], "selective") == [
        LoadBatch(0),
        Forward("a", 0), Forward("b", 0, "selective"), Forward("c", 0, "selective"),
        Forward("d", 0), Forward("head", 0),
        Backward("head", 0), Backward("d", 0),
        Recompute("c", 0), Backward("c", 0), Recompute("b", 0), Backward("b", 0),
        Backward("a", 0),
    ]  # fmt: skip


def test_full_keeps_the_input_of_every_block_in_every_microbatch():
    """A golden of two microbatches: nothing of one microbatch waits for the other."""
    ops = insert_recompute(expanded(2), [BLOCKS], "full")
    assert ops == [
        op
        for micro in range(2)
        for op in (
            LoadBatch(micro),
            Forward("a", micro, "input"), Forward("b", micro, "input"),
            Forward("c", micro, "input"), Forward("d", micro, "input"), Forward("head", micro),
            Backward("head", micro),
            Recompute("d", micro), Backward("d", micro),
            Recompute("c", micro), Backward("c", micro),
            Recompute("b", micro), Backward("b", micro),
            Recompute("a", micro), Backward("a", micro),
        )
    ]  # fmt: skip


def test_every_two_blocks_share_the_kept_input_of_the_first():
    """A golden of three blocks in segments of two: the last segment is short."""
    assert insert_recompute(expanded(), [("b", "c", "d")], "full", 2) == [
        LoadBatch(0),
        Forward("a", 0), Forward("b", 0, "input"), Forward("c", 0, "nothing"),
        Forward("d", 0, "input"), Forward("head", 0),
        Backward("head", 0),
        Recompute("d", 0), Backward("d", 0),
        Recompute("b", 0), Recompute("c", 0), Backward("c", 0), Backward("b", 0),
        Backward("a", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("every", [4, 5, 100])
def test_one_segment_of_all_blocks(every):
    ops = insert_recompute(expanded(), [BLOCKS], "full", every)
    assert [keeps_of(ops)[name, 0] for name in NAMES] == ["input", *["nothing"] * 3, "all"]
    place = ops.index(Backward("d", 0))
    assert ops[place - 4 : place] == [Recompute(name, 0) for name in BLOCKS]
    assert sum(isinstance(op, Recompute) for op in ops) == 4


@settings(max_examples=80, deadline=None)
@given(
    micros=st.integers(1, 4),
    first=st.integers(0, 3),
    mode=st.sampled_from(("selective", "full")),
    every=st.integers(1, 6),
)
def test_every_chosen_block_is_replayed_once_per_microbatch_and_nothing_else_moves(
    micros, first, mode, every
):
    """B5: n recomputed blocks cost n extra forwards per microbatch, whatever the segments."""
    chosen = BLOCKS[first:]
    ops = insert_recompute(expanded(micros), [chosen], mode, every)
    replays = [(op.block, op.micro) for op in ops if isinstance(op, Recompute)]
    assert sorted(replays) == sorted((name, m) for name in chosen for m in range(micros))
    plain = [
        Forward(op.block, op.micro) if isinstance(op, Forward) else op
        for op in ops
        if not isinstance(op, Recompute)
    ]
    assert plain == expanded(micros)
    keeps = keeps_of(ops)
    assert {keeps[name, 0] for name in NAMES if name not in chosen} == {"all"}
    assert sum(keep == "input" for keep in keeps.values()) == (
        micros * -(-len(chosen) // every) if mode == "full" else 0
    )
    for index, op in enumerate(ops):
        if isinstance(op, Backward) and (op.block, op.micro) in replays:
            assert Recompute(op.block, op.micro) in ops[:index]


# --- which blocks, and what is compared ------------------------------------------------------


def test_the_last_block_and_blocks_that_keep_nothing_are_not_replayed():
    """An embedding keeps its token ids only; the loss's backward follows at once."""
    embed = BlockSpec(name="embed", layers=(LayerSpec(output_bytes=64),))
    keeps_input = LayerSpec(input_bytes=64, saves_input=True)
    keeps_more = LayerSpec(input_bytes=64, extra_saved_bytes=4)
    interior = LayerSpec(input_bytes=64, extra_saved_bytes=12, interior_bytes=4)
    blocks = tuple(
        BlockSpec(name=name, layers=(layer,))
        for name, layer in (
            ("b", keeps_input), ("c", keeps_more), ("d", interior), ("head", interior),
        )
    )  # fmt: skip
    assert recomputable((embed, *blocks), "full") == ("b", "c", "d")
    assert recomputable((embed, *blocks), "selective") == ("d",)
    for mode in ("full", "selective"):
        assert recomputable(blocks[:1], mode) == recomputable(blocks[-1:], mode) == ()


def test_selective_replays_nothing_of_a_model_without_attention():
    """A block of an MLP has no interior: replaying it would cost time and save no byte."""
    plan = train_plan([[2, 2]], recompute="selective", specs=deep_specs)
    assert plan.ranks == train_plan([[2, 2]], specs=deep_specs).ranks


def test_the_output_of_every_segment_is_compared_and_no_other():
    """B4: the block after a segment keeps its input, which is the segment's first output."""
    ops = insert_recompute(expanded(2), [("b", "c", "d")], "full", 2)
    assert replay_ends(ops, NAMES) == {
        ("c", 0): True, ("d", 0): True, ("c", 1): True, ("d", 1): True,
    }  # fmt: skip
    ops = insert_recompute(expanded(), [BLOCKS], "full")
    assert replay_ends(ops, NAMES) == {(name, 0): True for name in BLOCKS}
    ops = insert_recompute(expanded(), [BLOCKS], "full", 9)
    assert replay_ends(ops, NAMES) == {("d", 0): True}


def test_the_output_that_leaves_a_stage_is_compared_by_its_checksum():
    """Behind a send nobody holds the first output, whatever chunk of the rank follows."""
    chunks = [("a", "b"), ("d", "head")]
    ops = [ForwardStage(0), ForwardStage(0, 1), BackwardStage(0, 1), BackwardStage(0)]
    ops = insert_recompute(expand_blocks(ops, chunks), [("a", "b"), ("d",)], "full", 2)
    assert list(keeps_of(ops).values()) == ["input", "nothing", "input", "all"]
    assert replay_ends(ops, NAMES) == {("b", 0): False, ("d", 0): True}


def test_a_segment_ends_with_its_chunk():
    chunks = [("a", "b", "c"), ("d",)]
    ops = [ForwardStage(0), ForwardStage(0, 1), BackwardStage(0, 1), BackwardStage(0)]
    assert insert_recompute(expand_blocks(ops, chunks), chunks, "full", 2) == [
        Forward("a", 0, "input"), Forward("b", 0, "nothing"), Forward("c", 0, "input"),
        Forward("d", 0, "input"), Recompute("d", 0), Backward("d", 0), Recompute("c", 0),
        Backward("c", 0), Recompute("a", 0), Recompute("b", 0), Backward("b", 0), Backward("a", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_split_backward_is_replayed_before_its_input_half(mode):
    ops = [ForwardStage(0), BackwardInputStage(0), BackwardWeightStage(0)]
    ops = insert_recompute(expand_blocks(ops, [("a", "b")]), [("a", "b")], mode)
    assert ops[2:] == [
        Recompute("b", 0), BackwardInput("b", 0), Recompute("a", 0), BackwardInput("a", 0),
        BackwardWeight("b", 0), BackwardWeight("a", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_interiors_are_compared_by_their_layers(mode):
    assert replay_ends(insert_recompute(expanded(), [BLOCKS], mode), NAMES) == {}


# --- whole plans -----------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 6])
def test_every_built_plan_passes(recompute, every):
    for rows in ([[2]], [[1, 2], [0, 3]], [[0, 0, 0, 0]] * 3, [[2, 1], [1, 1], [1, 0]]):
        for overlap in (True, False):
            for specs in (deep_specs, decoder_specs):
                plan = train_plan(
                    rows, recompute=recompute, every=every, specs=specs, overlap=overlap,
                    bucket_bytes=100,
                )  # fmt: skip
                check_plan(plan)
                replays = [op for op in plan.ranks[0] if isinstance(op, Recompute)]
                silent = recompute == "none" or (
                    recompute == "selective" and (specs is deep_specs or not any(map(sum, rows)))
                )
                assert len(replays) == (0 if silent else 5 * len(rows[0]))


def test_recompute_changes_no_message():
    """The collectives, their order and the order of additions stay."""
    plans = [
        train_plan([[1, 2], [2, 1]], recompute=mode, specs=decoder_specs, bucket_bytes=100)
        for mode in ("none", "selective", "full")
    ]

    def messages(plan):
        return [
            [op for op in ops if not isinstance(op, (Forward, Recompute))] for ops in plan.ranks
        ]

    assert messages(plans[0]) == messages(plans[1]) == messages(plans[2])
    assert plans[0].buckets == plans[1].buckets == plans[2].buckets


# --- planted faults --------------------------------------------------------------------------

FULL = train_plan([[2, 2], [2, 1]], recompute="full", specs=deep_specs, bucket_bytes=1)
EVERY = train_plan([[2, 2], [2, 1]], recompute="full", every=2, specs=deep_specs, bucket_bytes=1)
"""Segments (block0, block1), (block2, block3), (block4)."""
SELECTIVE = train_plan([[2, 2], [2, 1]], recompute="selective", specs=decoder_specs)


def refused(plan, rule, *, op):
    """Check that `plan` is refused by `rule`, with a mark at `op` on one rank."""
    with pytest.raises(PlanError) as caught:
        check_plan(plan)
    text = str(caught.value)
    assert re.search(rule, text), text
    marked = re.findall(r"^  rank \d+ op +\d+ >> (.*)$", text, flags=re.MULTILINE)
    assert marked == [op_text(op)], text


@pytest.mark.parametrize("plan", [FULL, EVERY, SELECTIVE])
@pytest.mark.parametrize("block", ["block4", "block1"])
def test_a_missing_replay_is_refused(plan, block):
    rule = "backward must follow the replay of its block"
    refused(removed(plan, Recompute(block, 1)), rule, op=Backward(block, 1))


def test_a_missing_replay_at_the_head_of_a_segment_is_refused():
    plan = removed(EVERY, Recompute("block2", 1))
    refused(plan, "a replay must follow the replay of the block before", op=Recompute("block3", 1))


@pytest.mark.parametrize("plan", [FULL, EVERY, SELECTIVE])
def test_a_replay_that_runs_twice_is_refused(plan):
    op = Recompute("block4", 0)
    plan = edited(plan, lambda ops: ops.insert(ops.index(op), op))
    refused(plan, "a replay must follow a forward that kept less than all", op=op)


@pytest.mark.parametrize("plan", [FULL, EVERY, SELECTIVE])
def test_a_replay_before_its_forward_is_refused(plan):
    keep = "selective" if plan is SELECTIVE else "input"
    op = Recompute("block2", 0)
    plan = moved(plan, op, Forward("block2", 0, keep))
    refused(plan, "a replay must follow a forward that kept less than all", op=op)


def test_a_replay_of_a_forward_that_kept_all_is_refused():
    op = Recompute("head", 0)
    plan = edited(FULL, lambda ops: ops.insert(ops.index(Backward("head", 0)), op))
    refused(plan, "a replay must follow a forward that kept less than all", op=op)


@pytest.mark.parametrize("block", ["block9", "embed"])
def test_a_replay_of_an_unknown_block_is_refused(block):
    op = Recompute(block, 0)
    refused(replaced(FULL, Recompute("block2", 0), op), "replay", op=op)


@pytest.mark.parametrize("micro", [-1, 2])
def test_a_replay_of_a_microbatch_that_does_not_exist_is_refused(micro):
    op = Recompute("block2", micro)
    refused(replaced(FULL, Recompute("block2", 1), op), "replay", op=op)


def test_replays_of_a_segment_out_of_order_are_refused():
    plan = moved(EVERY, Recompute("block3", 0), Recompute("block2", 0))
    refused(plan, "a replay must follow the replay of the block before", op=Recompute("block3", 0))


@pytest.mark.parametrize("plan", [FULL, EVERY, SELECTIVE])
def test_a_backward_before_the_replay_is_refused(plan):
    plan = moved(plan, Backward("block4", 1), Recompute("block4", 1))
    refused(plan, "backward must follow the replay of its block", op=Backward("block4", 1))


def test_a_replay_after_its_backward_is_refused():
    plan = moved(EVERY, Recompute("block3", 1), Backward("block2", 1))
    refused(plan, "backward must follow the replay of its block", op=Backward("block3", 1))


@pytest.mark.parametrize("before", ["all", "selective"])
def test_nothing_kept_after_a_block_that_does_not_keep_its_input_is_refused(before):
    """The replay would have no input to start from."""
    plan = replaced(EVERY, Forward("block2", 0, "input"), Forward("block2", 0, before))
    rule = "keeps nothing must follow one that keeps its input"
    refused(plan, rule, op=Forward("block3", 0, "nothing"))


def test_nothing_kept_by_the_first_block_is_refused():
    plan = replaced(EVERY, Forward("block0", 0, "input"), Forward("block0", 0, "nothing"))
    rule = "keeps nothing must follow one that keeps its input"
    refused(plan, rule, op=Forward("block0", 0, "nothing"))


def test_an_input_kept_in_another_microbatch_does_not_count():
    plan = replaced(EVERY, Forward("block2", 1, "input"), Forward("block2", 1, "all"))
    rule = "keeps nothing must follow one that keeps its input"
    refused(plan, rule, op=Forward("block3", 1, "nothing"))


@pytest.mark.parametrize("keep", ["", "everything", "All"])
def test_an_unknown_keep_is_refused(keep):
    plan = replaced(FULL, Forward("block1", 0, "input"), Forward("block1", 0, keep))
    rule = f"keep must be one of {', '.join(KEEPS)}"
    refused(plan, rule, op=Forward("block1", 0, keep))


@pytest.mark.parametrize("keep", ["input", "nothing"])
def test_a_last_block_that_does_not_keep_all_is_refused(keep):
    """Its output is the loss, a number: there is nothing to compare a replay with."""
    plan = replaced(FULL, Forward("head", 0), Forward("head", 0, keep))
    refused(plan, "the last block must keep", op=Forward("head", 0, keep))


def test_a_replay_in_an_evaluation_is_refused():
    op = Recompute("block0", 0)
    plan = edited(eval_plan([[2]]), lambda ops: ops.insert(2, op))
    refused(plan, "a replay must follow a forward that kept less than all", op=op)


def test_a_replay_that_nobody_uses_is_left_behind():
    """All of the backward is missing, so only the leftovers are at fault."""

    def edit(ops):
        keep = (LoadBatch, Forward)
        end = ops.index(Recompute("block4", 1))
        ops[:] = [op for op in ops[:end] if isinstance(op, keep)]

    with pytest.raises(PlanError, match=r"nothing behind; got .*saved activations .*'block4', 1"):
        check_plan(edited(FULL, edit))


def test_an_update_without_the_flag_is_refused():
    """C019: nobody may step before all know whether all may."""
    flag = next(op for op in FULL.ranks[0] if getattr(op, "kind", "") == "non_finite")
    rule = "the update must follow ReduceScalars of kind non_finite"
    refused(removed(FULL, flag), rule, op=OptimizerStep())
    refused(moved(FULL, OptimizerStep(), flag), rule, op=OptimizerStep())


@pytest.mark.parametrize("lengths", [((4, 3),), ((4, 3), (4,)), ((4, 3), (4, 3), (4, 3))])
def test_lengths_that_do_not_fit_the_rows_are_refused(lengths):
    from dataclasses import replace

    with pytest.raises(PlanError, match="lengths"):
        check_plan(replace(FULL, lengths=lengths))
