"""With stages, too, every byte is predicted, held and measured: on every stage, for every op.

The settings and their exceptions are those of `test_exact_matrix`, and beside them the number of
stages, the schedule, the codecs of both directions, error feedback and bottlenecks.
"""

from __future__ import annotations

import functools

import pytest
from exactness import (
    FACTORS,
    PIPELINE_FACTORS,
    STARTUP_BYTES,
    config_of,
    cover,
    forecast_differences,
    name_of,
    op_differences,
    size_of,
    strict_ops,
)
from small_jobs import train

from mpisim.config import config_from_mapping
from mpisim.memory.tracker import hook_is_built
from mpisim.train.setup import Setup

pytestmark = pytest.mark.skipif(not hook_is_built(), reason="the allocator hook is not built")

NUM_CASES, NUM_FULL = 16, 160
LIMITS = {
    **PIPELINE_FACTORS,
    "ranks": (1, 2, 3), "hidden": (3, 0), "activation": ("relu", "gelu"), "micros": (4, 1, 2, 3),
    "algorithm": ("auto",), "bucket_bytes": (1,), "eval_rows": (1, 11), "wide": (False,),
    "optimizer": ("adamw",), "clip": (True,), "kernels": FACTORS["kernels"][:1],
}  # fmt: skip
"""Fewer settings of what `test_exact_matrix` varies and stages do not change."""
FULL_LIMITS = LIMITS | {
    name: FACTORS[name] for name in ("optimizer", "clip", "kernels", "wide", "algorithm")
}


@functools.cache
def cases():
    return cover(NUM_CASES, seed=2, samples=400, **LIMITS)


@functools.cache
def full_cases():
    return cover(NUM_FULL, seed=3, **FULL_LIMITS)


def test_the_cases_have_every_setting():
    chosen, _ = cases()
    for name, values in LIMITS.items():
        assert {case[name] for case in chosen} == set(values), name
    for name in ("zero", "recompute", "precision", "tail", "tied", "job", "overlap"):
        assert {case[name] for case in chosen} == set(FACTORS[name]), name


def assert_exact(case, folder):
    config = config_of(case, folder)
    size = size_of(case)
    setup = Setup(config, size)
    # Here and not by one of the ranks: they share the tables, which belong to the process.
    shared = sum(t.nbytes for t in setup.model.tables(setup.policy.compute_dtype))
    with strict_ops() as watches:
        done = train(config, size)
    found = [watch.found() for watch in watches]
    assert len(found) == size
    wrong = forecast_differences(done.summary, case["micros"]) + op_differences(found)
    assert not wrong, "\n".join([name_of(case), *wrong[:30]])
    for watch in found:
        assert 0 <= watch["unknown_bytes"] + shared <= STARTUP_BYTES, name_of(case)
        assert watch["num_ops"] > 5 * len(done.steps)
    for rank in done.summary["ranks"]:
        assert rank["traffic"] == rank["predicted_traffic"], name_of(case)
    if "skipped" in case["precision"]:
        assert [row["skipped"] for row in done.steps] == [True, False, False]


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_every_byte_of_every_stage_is_predicted_held_and_measured(tmp_path, number):
    """Peaks per category, in total, at the peak, and op by op: difference 0."""
    assert_exact(cases()[0][number], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("number", range(NUM_FULL))
def test_every_byte_over_a_cover_of_all_pairs(tmp_path, number):
    chosen, missing = full_cases()
    assert missing == 0
    assert_exact(chosen[number], tmp_path)


def test_a_stage_of_1f1b_holds_less_the_later_it_comes(tmp_path):
    """The profile of activations falls from stage to stage; that of GPipe does not."""
    plain = {
        "pp": 4, "micros": 4, "job": "packed", "ranks": 1, "recompute": "none", "codecs": "none",
        "bottleneck": 0, "zero": 0, "blocks": 6, "precision": "float32", "dropout": 0.0, "tail": 0,
        "eval_rows": 1,
    }  # fmt: skip
    peaks = {}
    for schedule in ("1f1b", "gpipe"):
        config = config_of(cases()[0][0] | plain | {"schedule": schedule}, tmp_path)
        values = config.model_dump(mode="json")
        values["parallel"]["split"] = [2, 2, 2, 2]
        summary = train(config_from_mapping(values), 4).summary
        peaks[schedule] = [rank["memory"]["peak"]["activations"] for rank in summary["ranks"]]
        assert peaks[schedule] == [
            rank["predicted_memory"]["peak"]["activations"] for rank in summary["ranks"]
        ]
    # The two in the middle are alike: no embedding, no head.
    assert peaks["gpipe"][1] == peaks["gpipe"][2] > peaks["1f1b"][1] > peaks["1f1b"][2]
