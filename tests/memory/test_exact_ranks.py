"""What `test_exact_matrix` shows on threads holds on real ranks: one launch walks many cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

for folder in ("tests", "tests/engine"):
    # A rank loads this file without a conftest.
    sys.path.append(str(Path(__file__).parents[2] / folder))

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
from mpi_worker import mpi_run

from mpisim.config import config_from_mapping
from mpisim.launch import Job
from mpisim.memory.tracker import hook_is_built
from mpisim.nn import attention
from mpisim.train.loop import train_on
from mpisim.train.setup import Setup

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not hook_is_built(), reason="the allocator hook is not built"),
]

RANKS = (2, 3, 4)
NUM_CASES = 60


def cases():
    return cover(NUM_CASES, seed=1, ranks=RANKS)


def test_the_cases_cover_all_pairs():
    chosen, missing = cases()
    assert len(chosen) == NUM_CASES
    assert missing == 0
    assert {case["ranks"] for case in chosen} == set(RANKS)
    for name in FACTORS.keys() - {"ranks"}:
        assert {case[name] for case in chosen} == set(FACTORS[name]), name


def walk(transport, folder):
    """Train every case for this number of ranks; yield what rank 0 found, per case."""
    for case in cases()[0]:
        if case["ranks"] != transport.size:
            continue
        told = ""
        if transport.rank == 0:
            told = config_of(case, Path(folder)).model_dump_json()
        config = config_from_mapping(json.loads(transport.exchange(told)[0]))
        # Every case starts as a fresh process does: whoever watches memory makes the tables.
        attention._tables.cache_clear()
        with strict_ops() as watches:
            state, _ = train_on(
                transport, Setup(config, transport.size), Job(transport.rank, transport.size), True
            )
        state.watch.close()
        found = [json.loads(text) for text in transport.exchange(json.dumps(watches[0].found()))]
        if transport.rank == 0:
            summary = json.loads(
                Path(folder, "runs", config.run.name, "summary.json").read_text(encoding="utf-8")
            )
            yield {
                "case": name_of(case), "wrong": forecast_differences(summary) + op_differences(found),
                "unknown_bytes": [watch["unknown_bytes"] for watch in found],
                "num_ops": sum(watch["num_ops"] for watch in found),
            }  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
def test_every_byte_is_predicted_held_and_measured_on_real_ranks(tmp_path, ranks):
    """A6, A7, B5: difference 0 per category, in total, at the peak, and op by op."""
    results = mpi_run(walk, ranks, folder=str(tmp_path))[0]
    assert len(results) == sum(case["ranks"] == ranks for case in cases()[0]) >= 15
    wrong = [f"{result['case']}: {result['wrong'][:5]}" for result in results if result["wrong"]]
    assert not wrong, "\n".join(wrong)
    for result in results:
        assert result["num_ops"] > 20 * ranks
        for nbytes in result["unknown_bytes"]:
            assert 0 <= nbytes <= STARTUP_BYTES, result
