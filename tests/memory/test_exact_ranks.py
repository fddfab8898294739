"""What `test_exact_matrix` shows on threads holds on real ranks: one launch walks many cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

# A rank loads this file without a conftest.
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("", "engine")]

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

NUM_CASES = 48
LIMITS = {
    "ranks": (2, 3, 4), "hidden": (0, 3), "activation": ("relu", "gelu"), "blocks": (1, 3),
    "eval_rows": (1, 11), "algorithm": ("auto", "ring", "halving_doubling"),
    "optimizer": ("momentum", "adamw"),
    "precision": (
        "float32", "float64", "bfloat16, float32 sums", "bfloat16, bfloat16 sums",
        "float16, float16 sums", "float16, first step skipped", "float32, bfloat16 messages",
    ),
}  # fmt: skip
"""Fewer settings than on threads, so that few cases cover all pairs of them."""


def cases():
    return cover(NUM_CASES, seed=1, **LIMITS)


def test_the_cases_cover_all_pairs():
    chosen, missing = cases()
    assert len(chosen) == NUM_CASES <= 60
    assert missing == 0
    for name, values in (FACTORS | LIMITS).items():
        assert {case[name] for case in chosen} == set(values), name


def walk(transport, folder, chosen):
    """Train every case; yield what rank 0 found, per case."""
    for case in chosen:
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
                "case": name_of(case),
                "wrong": forecast_differences(summary) + op_differences(found),
                "unknown_bytes": [watch["unknown_bytes"] for watch in found],
                "num_ops": sum(watch["num_ops"] for watch in found),
            }  # fmt: skip


@pytest.mark.parametrize("ranks", LIMITS["ranks"])
def test_every_byte_is_predicted_held_and_measured_on_real_ranks(tmp_path, ranks):
    """A6, A7, B5: difference 0 per category, in total, at the peak, and op by op."""
    chosen = [case for case in cases()[0] if case["ranks"] == ranks]
    assert len(chosen) >= 12
    results = mpi_run(walk, ranks, folder=str(tmp_path), chosen=chosen)[0]
    assert len(results) == len(chosen)
    wrong = [f"{result['case']}: {result['wrong'][:5]}" for result in results if result["wrong"]]
    assert not wrong, "\n".join(wrong)
    for result in results:
        assert result["num_ops"] > 20 * ranks
        for nbytes in result["unknown_bytes"]:
            assert 0 <= nbytes <= STARTUP_BYTES, result
