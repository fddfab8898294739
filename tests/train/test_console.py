"""What rank 0 prints about the layout of a job, and about its replicas at the end."""

from __future__ import annotations

import pytest

from mpisim.config import config_from_mapping
from mpisim.launch import Job
from mpisim.train.console import Console
from mpisim.train.setup import Setup

TRAFFIC = {"pp activation": {"sent_bytes": 7}}


def told(capsys, *, ranks=4, **sections):
    """Return the lines before the first step."""
    config = config_from_mapping(
        {
            "run": {"name": "x"},
            "data": {"kind": "text", "path": "none.txt", "window": 8},
            "model": {"kind": "decoder", "d_model": 8, "num_blocks": 4, "num_heads": 2},
            "train": {"global_batch": 16, "num_microbatches": 4},
            **sections,
        }
    )
    console = Console(config, Job(0, ranks), "baseline")
    console.start({}, {"name": "text"}, Setup(config, ranks))
    return capsys.readouterr().out.splitlines()


def test_data_parallel_ranks_and_no_word_of_stages(capsys):
    head, after = told(capsys)[:2]
    assert ", 4 ranks; data text" in head
    assert after.split()[0] == "step"


def test_one_rank_is_one(capsys):
    assert ", 1 rank; data" in told(capsys, ranks=1)[0]


def test_a_pipeline_says_its_mesh_its_schedule_and_its_stages(capsys):
    head, pipeline = told(capsys, parallel={"pp": 2})[:2]
    assert ", 4 ranks (dp 2 x pp 2); data text" in head
    assert pipeline == "pipeline: schedule 1f1b, 2 stages, 4 microbatches; blocks per stage 4, 2"


def test_chunks_and_codecs_are_said(capsys):
    line = told(
        capsys,
        parallel={"pp": 2, "chunks": 2, "schedule": "interleaved", "split": [1, 2, 2, 1]},
        compression={"activations": "int8", "grads": "bf16"},
    )[1]
    assert line == (
        "pipeline: schedule interleaved, 4 stages on 2 places of axis pp, 2 chunks each, "
        "4 microbatches; blocks per place, chunk by chunk, 1+2, 2+1; activations as int8, "
        "gradients as bf16"
    )


def entry(digest, **more):
    return {"traffic": TRAFFIC, "predicted_traffic": TRAFFIC, "params_sha256": digest, **more}


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        ([entry("a"), entry("a")], "replicas bitwise equal"),
        ([entry("a"), entry("b")], "replicas DIFFER"),
        ([entry("a", working_sha256="x"), entry("a", working_sha256="y")], "replicas DIFFER"),
        ([entry("a", stage=0), entry("b", stage=1)], "no replicas"),
        (
            [entry("a", stage=0), entry("b", stage=1)] * 2,
            "replicas of each stage bitwise equal",
        ),
        (
            [entry("a", stage=0), entry("b", stage=1), entry("a", stage=0), entry("c", stage=1)],
            "replicas of each stage DIFFER",
        ),
        (
            [entry("a", stage=0, tied_sha256="t"), entry("b", stage=1, tied_sha256="t")],
            "ends of the tied table bitwise equal",
        ),
        (
            [entry("a", stage=0, tied_sha256="t"), entry("b", stage=1, tied_sha256="u")],
            "ends of the tied table DIFFER",
        ),
    ],
)
def test_replicas_are_those_of_a_stage(capsys, tmp_path, totals, words):
    config = config_from_mapping({"run": {"name": "x"}, "data": {"kind": "regression"}})
    Console(config, Job(0, len(totals)), "baseline").summary(tmp_path, totals)
    done = capsys.readouterr().out.splitlines()[0]
    assert done == f"done: bytes and messages measured - predicted = 0; {words}"
