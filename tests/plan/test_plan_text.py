"""Plans as text: golden files, round trips, and lines that are refused by their number.

Run this file as a script to write the golden files anew; read the difference before keeping it.
"""

from __future__ import annotations

import string
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import decoder_specs, deep_specs, eval_plan, pipeline_plan, train_plan

from mpisim.errors import PlanError
from mpisim.layouts.specs import ParamSpec
from mpisim.layouts.steps import ALGORITHMS
from mpisim.mesh import Mesh
from mpisim.plan.build import Plan
from mpisim.plan.ops import (
    OP_TYPES,
    Backward,
    BackwardInput,
    BackwardInputStage,
    BackwardStage,
    BackwardWeight,
    BackwardWeightStage,
    CheckGradients,
    ExchangeTied,
    Forward,
    ForwardStage,
    GatherMetrics,
    GatherParams,
    LoadBatch,
    OptimizerStep,
    Recompute,
    RecvActivation,
    RecvGrad,
    ReduceScalars,
    Reshard,
    SendActivation,
    SendGrad,
    StartSync,
    StartUnshard,
    WaitSend,
    WaitSync,
    WaitUnshard,
)
from mpisim.plan.partition import Bucket
from mpisim.plan.text import parse_plan, plan_text

GOLDEN = Path(__file__).parent / "golden"

PLANS = {
    "one_rank": lambda: train_plan([[4]]),
    "two_ranks_two_microbatches_overlap": lambda: train_plan(
        [[2, 2], [2, 1]], bucket_bytes=100, overlap=True
    ),
    "two_ranks_two_microbatches_no_overlap": lambda: train_plan(
        [[2, 2], [2, 1]], bucket_bytes=100, overlap=False
    ),
    "four_ranks_three_buckets": lambda: train_plan(
        [[1], [1], [1], [0]], bucket_bytes=1, algorithm="ring"
    ),
    "evaluation": lambda: eval_plan([[2, 2], [1, 0]]),
    "recompute_selective": lambda: train_plan([[4]], recompute="selective", specs=decoder_specs),
    "recompute_full_two_microbatches": lambda: train_plan([[2, 2]], recompute="full"),
    "recompute_every_two": lambda: train_plan(
        [[4]], recompute="full", every=2, specs=deep_specs, bucket_bytes=150
    ),
    "microbatches_of_different_lengths": lambda: train_plan(
        [[2, 1], [2, 0]], lengths=[[4, 3], [4, 2]], overlap=False
    ),
    "zero_1": lambda: train_plan([[2, 2], [2, 1]], bucket_bytes=100, zero=1),
    "zero_2": lambda: train_plan([[2, 2], [2, 1]], bucket_bytes=100, zero=2),
    "zero_2_no_overlap": lambda: train_plan([[2, 2]] * 3, bucket_bytes=1, zero=2, overlap=False),
    "zero_3": lambda: train_plan([[2, 2], [2, 1]], zero=3),
    "zero_3_prefetch": lambda: train_plan([[2], [2]], zero=3, prefetch=True),
    "zero_3_recompute_full": lambda: train_plan([[2], [2]], zero=3, recompute="full"),
    "zero_3_recompute_every_two": lambda: train_plan(
        [[2], [2]], zero=3, recompute="full", every=2, specs=deep_specs
    ),
    "zero_3_tied_prefetch": lambda: train_plan(
        [[2], [2]], zero=3, recompute="full", prefetch=True, specs=decoder_specs
    ),
    "zero_3_evaluation": lambda: eval_plan([[2, 2], [1, 0]], zero=3, prefetch=True),
    "pipeline_naive": lambda: pipeline_plan(2, 3, "naive"),
    "pipeline_gpipe": lambda: pipeline_plan(2, 3, "gpipe"),
    "pipeline_1f1b": lambda: pipeline_plan(3, 3, "1f1b", tied=False),
    "pipeline_interleaved": lambda: pipeline_plan(2, 3, "interleaved"),
    "pipeline_zb-h1": lambda: pipeline_plan(3, 3, "zb-h1"),
    "pipeline_zero_3_recompute": lambda: pipeline_plan(
        2, 2, "1f1b", dp=2, zero=3, recompute="full", codecs=("fp16", "int8")
    ),
    "pipeline_evaluation": lambda: pipeline_plan(2, 2, "interleaved", kind="eval"),
}


@pytest.mark.parametrize("name", PLANS)
def test_plan_text_is_the_golden_one(name):
    """Issue 2, item 4: config -> plan has a text form with golden files."""
    assert plan_text(PLANS[name]()) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_every_golden_file_belongs_to_a_plan():
    assert {path.stem for path in GOLDEN.iterdir()} == set(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_read_back_equal(name):
    plan = PLANS[name]()
    assert parse_plan(plan_text(plan)) == plan


NAMES = st.text(string.ascii_lowercase + string.digits + "._", min_size=1, max_size=12)
NUMBERS = st.integers(0, 10**12)
MICROS = st.integers(-1, 10**6)
SHAPES = st.lists(st.integers(0, 10**6), max_size=4).map(tuple)
OPS = st.one_of(
    *(
        st.builds(kind, NUMBERS, NUMBERS)
        for kind in (ForwardStage, BackwardStage, BackwardInputStage, BackwardWeightStage)
    ),
    st.builds(LoadBatch, NUMBERS),
    st.builds(Forward, NAMES, NUMBERS),
    st.builds(Forward, NAMES, NUMBERS, NAMES),
    st.builds(Recompute, NAMES, NUMBERS),
    st.builds(Backward, NAMES, NUMBERS),
    st.builds(BackwardInput, NAMES, NUMBERS),
    st.builds(BackwardWeight, NAMES, NUMBERS),
    *(
        st.builds(kind, NUMBERS, NUMBERS, NUMBERS, SHAPES, NAMES)
        for kind in (SendActivation, RecvActivation, SendGrad, RecvGrad)
    ),
    st.builds(WaitSend, NUMBERS, NUMBERS, NUMBERS, NAMES),
    st.builds(ExchangeTied, NUMBERS, NUMBERS, NUMBERS, NAMES),
    st.builds(StartSync, NUMBERS, MICROS, NUMBERS, NAMES),
    st.builds(WaitSync, NUMBERS, MICROS),
    st.builds(StartUnshard, NUMBERS, NUMBERS),
    st.builds(WaitUnshard, NUMBERS),
    st.builds(Reshard, NUMBERS),
    st.builds(GatherParams, NUMBERS, NUMBERS),
    st.builds(CheckGradients),
    st.builds(ReduceScalars, NAMES, NUMBERS, NAMES),
    st.builds(ReduceScalars, NAMES, NUMBERS, NAMES, NAMES),
    st.builds(OptimizerStep),
    st.builds(GatherMetrics, NUMBERS),
)
PARAMS = st.builds(
    lambda name, shape: ParamSpec(name=name, shape=tuple(shape)),
    NAMES,
    st.lists(st.integers(1, 10**6), max_size=4),
)


@st.composite
def any_plans(draw):
    """Any plan that can be written down, also one that could never run."""
    num_ranks = draw(st.integers(1, 4))
    rows = tuple(tuple(draw(st.lists(NUMBERS, max_size=3))) for _ in range(num_ranks))
    # Some have tokens per row for every microbatch, most the model's width.
    lengths = tuple(tuple(draw(NUMBERS) for _ in counts) for counts in rows)
    return Plan(
        draw(st.sampled_from(("train", "eval"))),
        Mesh(*(draw(st.integers(1, 9)) for _ in range(3))),
        draw(NAMES),
        draw(st.sampled_from(ALGORITHMS)),
        rows,
        tuple(draw(st.lists(NAMES, max_size=4))),
        tuple(
            Bucket(
                index,
                tuple(draw(st.lists(NAMES, min_size=1, max_size=3))),
                tuple(draw(st.lists(PARAMS, max_size=3))),
                draw(st.integers(0, 9)),
                draw(st.integers(-1, 9)),
            )
            for index in range(draw(st.integers(0, 3)))
        ),
        tuple(tuple(draw(st.lists(OPS, max_size=5))) for _ in range(num_ranks)),
        draw(st.sampled_from(((), (), lengths))),
        draw(st.integers(0, 9)),
        draw(NAMES),
        tuple(map(tuple, draw(st.lists(st.lists(NAMES, min_size=1, max_size=3), max_size=4)))),
        draw(st.sampled_from(("", "pass-2"))),
    )


def test_every_op_that_runs_is_in_a_golden_file():
    """One that was left out would be written and read by nobody."""
    found = {type(op) for name in PLANS for ops in PLANS[name]().ranks for op in ops}
    schedule = {ForwardStage, BackwardStage, BackwardInputStage, BackwardWeightStage}
    assert found == set(OP_TYPES.values()) - schedule


@settings(max_examples=60, deadline=None)
@given(any_plans())
def test_any_plan_is_read_back_equal(plan):
    assert parse_plan(plan_text(plan)) == plan


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5).flatmap(
        lambda micros: st.lists(
            st.lists(st.integers(0, 4), min_size=micros, max_size=micros), min_size=1, max_size=6
        )
    ),
    bucket_bytes=st.integers(1, 200),
    overlap=st.booleans(),
    recompute=st.sampled_from(("none", "selective", "full")),
    every=st.integers(1, 6),
    longest=st.integers(0, 9),
)
def test_built_plans_are_read_back_equal(rows, bucket_bytes, overlap, recompute, every, longest):
    lengths = [[longest + number for number in counts] for counts in rows] if longest else ()
    plan = train_plan(
        rows, bucket_bytes=bucket_bytes, overlap=overlap, recompute=recompute, every=every,
        specs=deep_specs, lengths=lengths,
    )  # fmt: skip
    assert parse_plan(plan_text(plan)) == plan


def lines_of(plan=None):
    return plan_text(plan or train_plan(bucket_bytes=1)).splitlines()


def number_of(start, nth=0):
    """Return the number, counted from 1, of the nth line that starts with `start`."""
    return [number for number, line in enumerate(lines_of(), 1) if line.startswith(start)][nth]


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("  Forward block=head", "  Forwards block=head micro=0 keep=all"),  # no such op
        ("  Forward block=head", "  Forward block=head micro=0"),  # a field is missing
        ("  Forward block=head", "  Forward block=head micro=0 keep=all bucket=1"),  # one too many
        ("  Forward block=head", "  Forward block=head micro=0 keep=all micro=0"),  # twice
        ("  Forward block=head", "  Forward block=head micro=zero keep=all"),  # no number
        ("  Forward block=head", "  Forward micro=0 block=head keep=all"),  # another order
        ("  Forward block=head", "  Forward block"),
        ("  Forward block=head", "  Forward block=head micro=+0 keep=all"),
        ("  Backward block=head", "  Recompute block=head"),
        ("  Backward block=head", "  Recompute block=head micro=0 keep=all"),
        ("  OptimizerStep", "OptimizerStep"),  # not indented
        ("  OptimizerStep", ""),
        ("  OptimizerStep", "  "),
        ("dtype", "type float64"),
        ("dtype", "kind eval"),  # a head line twice, another missing
        ("mesh", "mesh dp=two pp=1 tp=1"),
        ("mesh", "mesh dp=2 pp=1"),
        ("mesh", "mesh dp=2 pp=1 tp=1 ep=1"),
        ("bucket 1", "bucket 1 blocks=block1 block1.linear.weight:3by2"),
        ("bucket 1", "bucket one blocks=block1 block1.linear.weight:3x2"),
        ("bucket 1", "bucket 2 blocks=block1 block1.linear.weight:3x2"),  # out of order
        ("bucket 1", "bucket 1 block1 block1.linear.weight:3x2"),  # no blocks=
        ("bucket 1", "bucket"),
        ("rank 1", "rank 2 rows=2"),  # out of order
        ("rank 1", "rank one rows=2"),
        ("rank 1", "rank 1"),
        ("rank 1", "rank 1 rows=2,x"),
        ("rank 1", "rank 1 rows=2 lengths=x"),
        ("rank 1", "rank 1 rows=2 length=4"),
        ("rank 1", "rank 1 lengths=4 rows=2"),
    ],
)
def test_a_malformed_line_is_named(line, becomes):
    lines = lines_of()
    number = number_of(line)
    lines[number - 1] = becomes
    with pytest.raises(PlanError, match=rf"plan line {number} must .*; got .*mpisim plan show"):
        parse_plan("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("stages", "stages"),
        ("stages", "stages embed,block0  head"),
        ("stages", "stage embed,block0 head"),
        ("bucket 2", "bucket 2 twin=0 at=0 blocks=embed embed.tokens.weight:5x2"),
        ("bucket 2", "bucket 2 at=0 twin=3 blocks=embed embed.tokens.weight:5x2"),
        ("bucket 2", "bucket 2 twin=-1 blocks=embed embed.tokens.weight:5x2"),
        ("bucket 2", "bucket 2 twin=three blocks=embed embed.tokens.weight:5x2"),
        ("bucket 3", "bucket 3 at=one twin=2 blocks=head embed.tokens.weight:5x2"),
        ("  SendActivation", "  SendActivation boundary=0 micro=0 peer=1 shape=2x4x2"),
        ("  SendActivation", "  SendActivation boundary=0 micro=0 peer=1 shape=2,4 codec=none"),
        ("  SendActivation", "  SendActivation boundary=0 micro=0 peer=1 shape=2x4xD codec=none"),
        ("  WaitSend", "  WaitSend boundary=0 micro=0 peer=1"),
        ("  ExchangeTied", "  ExchangeTied bucket=2 peer=1 count=10 dtype=float64 shape=5x2"),
    ],
)
def test_a_malformed_line_of_a_pipeline_is_named(line, becomes):
    lines = lines_of(pipeline_plan(2, 2, "1f1b"))
    number = next(number for number, found in enumerate(lines, 1) if found.startswith(line))
    lines[number - 1] = becomes
    with pytest.raises(PlanError, match=rf"plan line {number} must .*; got .*mpisim plan show"):
        parse_plan("\n".join(lines) + "\n")


def test_stages_are_written_once():
    lines = lines_of(pipeline_plan(2, 2, "1f1b"))
    number = next(number for number, found in enumerate(lines, 1) if found.startswith("stages"))
    lines.insert(number, lines[number - 1])
    with pytest.raises(PlanError, match=f"plan line {number + 1} must .*one that came before"):
        parse_plan("\n".join(lines) + "\n")


def test_an_op_before_the_first_rank_is_named():
    lines = lines_of()
    lines.insert(2, "  OptimizerStep")
    with pytest.raises(PlanError, match="plan line 3 "):
        parse_plan("\n".join(lines))


@pytest.mark.parametrize("text", ["", "\n", "mpisim plan 2\nkind train\n", "# notes\n"])
def test_text_of_another_kind_is_refused(text):
    with pytest.raises(PlanError, match="plan text must start with 'mpisim plan 1'; got "):
        parse_plan(text)


@pytest.mark.parametrize("word", ["kind", "mesh", "dtype", "algorithm", "zero", "params", "blocks"])
def test_a_missing_head_line_is_refused(word):
    lines = [line for line in lines_of() if not line.startswith(word)]
    with pytest.raises(PlanError, match=word):
        parse_plan("\n".join(lines))


if __name__ == "__main__":
    for key, build in PLANS.items():
        (GOLDEN / f"{key}.txt").write_text(plan_text(build()), encoding="utf-8")
        sys.stdout.write(f"wrote {key}.txt\n")
