"""Forecast, ledger and allocator hook agree to the byte over a cover of all settings, on threads.

Exact for every op of every rank: what the hook counts at its end is what the ledger holds, and what
it needed at its fullest moment is what was predicted. Three exceptions, all in `exactness`: empty
arrays of microbatches without rows, the update of a skipped step, and the copy of bfloat16 in a
collective.
"""

from __future__ import annotations

import functools

import pytest
from exactness import (
    FACTORS,
    STARTUP_BYTES,
    config_of,
    cover,
    forecast_differences,
    name_of,
    op_differences,
    strict_ops,
)
from small_jobs import train

from mpisim.memory.tracker import hook_is_built
from mpisim.train.setup import Setup

pytestmark = pytest.mark.skipif(not hook_is_built(), reason="the allocator hook is not built")

NUM_CASES = 220


@functools.cache
def cases():
    return cover(NUM_CASES)


def test_the_cases_cover_all_pairs():
    chosen, missing = cases()
    assert len(chosen) == NUM_CASES >= 200
    assert missing == 0
    for name, values in FACTORS.items():
        assert {case[name] for case in chosen} == set(values), name


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_every_byte_is_predicted_held_and_measured(tmp_path, number):
    """A6, A7, B5, M2: difference 0 per category, in total, at the peak, and op by op."""
    case = cases()[0][number]
    config = config_of(case, tmp_path)
    setup = Setup(config, case["ranks"])
    # Here and not by one of the ranks: they share the tables, which belong to the process.
    shared = sum(t.nbytes for t in setup.model.tables(setup.policy.compute_dtype))
    with strict_ops() as watches:
        done = train(config, case["ranks"])
    found = [watch.found() for watch in watches]
    assert len(found) == case["ranks"]
    wrong = forecast_differences(done.summary) + op_differences(found)
    assert not wrong, "\n".join([name_of(case), *wrong[:30]])
    rows = [row["rows"] for row in done.steps]
    assert rows[0] == config.train.global_batch
    for watch in found:
        assert 0 <= watch["unknown_bytes"] + shared <= STARTUP_BYTES, name_of(case)
        assert watch["num_ops"] > 5 * len(rows)
    if "skipped" in case["precision"]:
        assert [row["skipped"] for row in done.steps] == [True, False, False]


def test_the_cases_have_short_batches_and_evaluations(tmp_path):
    """The cover would be exact too if nothing of this happened."""
    short = evaluated = empty = 0
    for case in cases()[0][:12]:
        with strict_ops() as watches:
            done = train(config_of(case, tmp_path), case["ranks"])
        short += len({row["rows"] for row in done.steps}) > 1
        evaluated += bool(done.evaluations)
        empty += any(watch.num_empty_ops for watch in watches)
    assert short >= 3 and evaluated >= 1 and empty >= 1
