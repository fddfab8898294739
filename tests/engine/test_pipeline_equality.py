"""Stages and schedules change nothing of what is learned; all schedules give the same bits."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pipeline_jobs import (
    ADAMW,
    FACTORS,
    LENGTH,
    SCHEDULES,
    Case,
    assert_learned,
    batches,
    cover,
    learn,
    one_process,
    pipeline_model,
    product,
)
from small_jobs import bits_of, cut, make_config, packed_rows, run_engine, train

NUM_CASES = 40
CASES, MISSING = cover(NUM_CASES, product())


def name_of(case):
    return "-".join(str(value).replace(" ", "") for value in case)


def test_the_cases_cover_all_pairs_of_settings():
    assert not MISSING and len(CASES) <= NUM_CASES
    seen = Counter((name, value) for case in CASES for name, value in case._asdict().items())
    assert seen.keys() == {(name, value) for name in FACTORS for value in FACTORS[name]}


def test_the_one_process_learns_and_its_rows_are_not_cut_evenly():
    """Or the comparisons would say nothing."""
    done = one_process(2, True)
    assert done.losses[0] != done.losses[1] and len(done.grads) == 2
    assert all(np.any(grad) for grad in done.grads[0].values())
    (rows,) = {len(batch.x) for batch in batches()}
    assert all(rows % pieces for pieces in (2, 3, 4, 8))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_layout_learns_what_one_process_learns(case):
    """Loss, norm, every gradient, every weight: float64 within 1e-12; all that moves is priced."""
    assert_learned(learn(case), case)


FIRST = ("pp", "schedule", "recompute", "tied")
REST = {name: values for name, values in FACTORS.items() if name not in FIRST}


@pytest.mark.full
@pytest.mark.parametrize(
    FIRST,
    [
        pytest.param(*values, id=name_of(values))
        for values in itertools.product(*(FACTORS[name] for name in FIRST))
    ],
)
def test_the_whole_product_learns_what_one_process_learns(pp, schedule, recompute, tied):
    fixed = {"pp": (pp,), "schedule": (schedule,), "recompute": (recompute,), "tied": (tied,)}
    cases = product(**fixed)
    assert len(cases) == len(REST["micros"]) * (1 + (len(REST["dp"]) - 1) * len(REST["zero"]))
    for case in cases:
        assert_learned(learn(case), case)


# --- the same bits ---------------------------------------------------------------------------

NUM_STEPS, DROPOUT = 3, 0.2


def uneven_steps(dp, micros):
    """Return steps whose microbatches have different lengths, and at times few rows or none."""
    steps = []
    for step in range(NUM_STEPS):
        rows = cut(packed_rows(5 + 4 * step, step, LENGTH), dp, micros)
        steps.append(
            [
                [
                    type(batch)(*(a[:, : LENGTH - (step + replica + micro) % 2] for a in batch))
                    for micro, batch in enumerate(parts)
                ]
                for replica, parts in enumerate(rows)
            ]
        )
    return steps


def bits_of_run(case, **options):
    done = run_engine(
        pipeline_model(case.pp, case.tied, DROPOUT), uneven_steps(case.dp, case.micros),
        optimizer=ADAMW, **case.options | options,
    )  # fmt: skip
    whole = {}
    for params in done.gathered:
        for name, bits in bits_of(params).items():
            assert whole.setdefault(name, bits) == bits, name
    return done.losses, done.norms, whole


def assert_one_result(pp, dp, zero, micros, synchronous=(False,)):
    results = [
        bits_of_run(
            Case(pp=pp, schedule=schedule, micros=micros, dp=dp, zero=zero), synchronous=kind
        )
        for schedule in SCHEDULES
        for kind in synchronous
    ]
    assert all(result == results[0] for result in results)
    losses, norms, weights = results[0]
    assert len(set(losses)) == NUM_STEPS and max(norms) > ADAMW.clip_norm
    return weights


def test_some_microbatches_are_short_and_some_empty():
    shapes = {batch.x.shape for parts in uneven_steps(4, 3)[0] for batch in parts}
    assert {rows for rows, _ in shapes} >= {0, 1} and {width for _, width in shapes} == {2, 3}


@pytest.mark.parametrize(
    ("pp", "dp", "zero", "micros"), [(3, 1, 0, 4), (2, 2, 1, 3), (2, 3, 2, 2), (2, 4, 0, 2)]
)
def test_all_schedules_give_the_same_bits(pp, dp, zero, micros):
    """Three steps of AdamW with clipping and dropout, over rows and lengths that differ."""
    assert_one_result(pp, dp, zero, micros)


def test_all_schedules_give_the_same_bits_under_synchronous_sends():
    """No plan needs a copy of what it sends: the bits of eager sends, too."""
    weights = assert_one_result(2, 2, 0, 3, synchronous=(True,))
    assert weights == bits_of_run(Case(dp=2))[2]


def test_stages_do_not_change_bits_and_another_split_neither():
    """Every block is a bucket of its own, so who holds it does not matter."""
    weights = [
        bits_of_run(Case(pp=4, micros=3, dp=2), pp=pp, chunks=chunks, schedule=schedule)
        for pp, chunks, schedule in ((2, 1, "1f1b"), (4, 1, "zb-h1"), (2, 3, "interleaved"))
    ]
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.full
@pytest.mark.parametrize("zero", FACTORS["zero"])
@pytest.mark.parametrize("dp", FACTORS["dp"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_all_schedules_give_the_same_bits_in_every_layout(pp, dp, zero):
    for micros in (1, 3, 8):
        assert_one_result(pp, dp, zero, micros, synchronous=(False, True))


# --- whole jobs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({"pp": 2, "schedule": "zb-h1", "zero": 2}, 4),
        ({"pp": 2, "schedule": "interleaved", "chunks": 2}, 2),
    ],
)
def test_whole_jobs_and_their_evaluations_are_those_of_one_process(tmp_path, parallel, ranks):
    """From a config: batches of data, a short last one, held-out losses and hits."""
    sections = {
        "model": {"kind": "decoder", "d_model": 4, "num_heads": 2, "d_ff": 4, "num_blocks": 4},
        "train": {"steps": 6, "global_batch": 96, "eval_every": 2, "eval_rows": 7},
        "optimizer": {"kind": "adamw", "lr": 0.01, "clip_norm": 0.5},
    }
    one_config = make_config(tmp_path, "text", **sections)
    sections |= {"parallel": parallel, "train": sections["train"] | {"num_microbatches": 3}}
    many_config = make_config(tmp_path, "text", **sections)
    # Of many documents some are held out.
    text = b"\n\n".join(b"%d dogs, %d cats" % (i, i * i * 7919) for i in range(70))
    Path(many_config.data.path).write_bytes(text)
    one, many = train(one_config, 1), train(many_config, ranks)
    assert len({row["rows"] for row in one.steps}) == 2
    np.testing.assert_allclose(many.losses, one.losses, rtol=1e-12)
    assert len(many.evaluations) == len(one.evaluations) >= 2
    for mine, right in zip(many.evaluations, one.evaluations, strict=True):
        np.testing.assert_allclose(mine["heldout_loss"], right["heldout_loss"], rtol=1e-12)
        assert mine["heldout_rows"] == right["heldout_rows"]
        assert mine.get("heldout_top1") == right.get("heldout_top1")
