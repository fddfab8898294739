"""Weights that a run starts from, and what is refused before anything is replaced."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_jobs import make_config, train

from mpisim.comm.local import run_threads
from mpisim.engine import handlers
from mpisim.engine.step import Engine
from mpisim.errors import CheckpointError, ConfigError, MpisimError, PeerLost
from mpisim.launch import Job
from mpisim.plan.ops import OptimizerStep
from mpisim.train import loop
from mpisim.train.loop import train_on
from mpisim.train.record import digest
from mpisim.train.setup import Setup
from mpisim.train.stage_files import MANIFEST_FILE, stage_file
from mpisim.train.stage_reader import load_run_weights
from mpisim.train.start import Start

SMALL = {"kind": "decoder", "d_model": 8, "num_heads": 2, "d_ff": 8, "num_blocks": 3}
TEXT = b"\n\n".join(b"%d dogs, %d" % (i, i * i * 7919) + b" cats" * (i % 4) for i in range(40))


def config_of(folder, **sections):
    """Return the config of a decoder of three blocks on two stages."""
    values = {
        "run": {"name": "a"},
        "model": SMALL | {"dtype": "float64"},
        "data": {"window": 6},
        "train": {"steps": 1, "global_batch": 8, "num_microbatches": 2, "eval_rows": 8},
        "parallel": {"pp": 2},
        "trace": {"enabled": False},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    config = make_config(folder, "text", **values)
    Path(config.data.path).write_bytes(TEXT)
    return config


def tree(folder):
    """Return everything below a folder: bytes and time of change."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*") if path.is_file()
    }  # fmt: skip


def refusal(config, ranks, kind, overwrite=True):
    """Run with overwrite, or without; return the one sentence with which all ranks refused to."""

    def body(transport):
        train_on(transport, Setup(config, ranks), Job(transport.rank, ranks), overwrite)

    done = run_threads(body, ranks, timeout_s=20.0)
    assert len(done.errors) == ranks
    texts = {str(error) for error in done.errors.values() if not isinstance(error, PeerLost)}
    kinds = kind if isinstance(kind, tuple) else (kind,)
    assert {type(error) for error in done.errors.values()} <= {*kinds, PeerLost}
    assert len(texts) == 1, texts
    return texts.pop()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a finished run on two stages."""
    return train(config_of(tmp_path_factory.mktemp("finished")), 2).path


@pytest.fixture
def earlier(tmp_path, finished):
    """Return a copy of it where runs of the name `a` go."""
    return shutil.copytree(finished, tmp_path / "runs" / "a")


# What is no start ----------------------------------------------------------------------------


def missing(source):
    shutil.rmtree(source)
    return "which does not exist"


def unfinished(source):
    (source / "weights" / MANIFEST_FILE).unlink()
    return "got stage files without manifest.json"


def cut_manifest(source):
    path = source / "weights" / MANIFEST_FILE
    path.write_bytes(path.read_bytes()[:-20])
    return "manifest.json"


def gone_stage(source):
    (source / "weights" / stage_file(1)).unlink()
    return "stage-01.safetensors must hold the weights of a stage; got no such file"


def cut_stage(source):
    """Only the second rank opens this one."""
    path = source / "weights" / stage_file(1)
    path.write_bytes(path.read_bytes()[:-8])
    return "stage-01.safetensors"


def corrupt_stage(source):
    path = source / "weights" / stage_file(1)
    data = bytearray(path.read_bytes())
    data[9:11] = b"{{"
    path.write_bytes(data)
    return "stage-01.safetensors"


def other_stage(source):
    """A stage of another run, as large as it should be."""
    path = source / "weights" / stage_file(1)
    data = path.read_bytes()
    place = data.index(b"data_sha256") + 20
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    return "stage-01.safetensors"


def flipped_bit(source):
    """Of a number: only its sha256 tells."""
    path = source / "weights" / stage_file(1)
    data = path.read_bytes()
    path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    return "sha256"


@pytest.mark.parametrize(
    "spoil",
    [
        flipped_bit,
        missing,
        unfinished,
        cut_manifest,
        gone_stage,
        cut_stage,
        corrupt_stage,
        other_stage,
    ],
    ids=lambda spoil: spoil.__name__,
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_damaged_start_leaves_the_earlier_run_alone(tmp_path, earlier, spoil, ranks):
    source = shutil.copytree(earlier, tmp_path / "source")
    words = spoil(source)
    before = tree(earlier)
    config = config_of(tmp_path, run={"name": "a", "init_from": str(source)})
    kind = ConfigError if spoil is missing else CheckpointError
    text = refusal(config, ranks, kind)
    assert words in text and str(source) in text, text
    assert "\n" not in text
    assert tree(earlier) == before
    assert [path.name for path in earlier.parent.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"d_ff": 12}, r"must have shape"),
        ({"num_blocks": 4}, r"parameters of the run's model; got no"),
        ({"num_blocks": 2}, r"parameters of the run's model; got block"),
    ],
)
def test_weights_of_another_model_leave_the_earlier_run_alone(
    tmp_path, finished, earlier, model, words
):
    before = tree(earlier)
    config = config_of(tmp_path, run={"name": "a", "init_from": str(finished)}, model=model)
    assert words in refusal(config, 2, CheckpointError)
    assert tree(earlier) == before


@pytest.mark.parametrize(
    "inside", [".", "weights", f"weights/{MANIFEST_FILE}", f"weights/{stage_file(0)}", "../a"]
)
def test_a_run_does_not_replace_what_it_starts_from(tmp_path, earlier, inside):
    before = tree(earlier)
    config = config_of(tmp_path, run={"name": "a", "init_from": os.path.join(earlier, inside)})
    text = refusal(config, 2, ConfigError)
    assert "run.init_from must lie outside of the run directory" in text
    assert "Choose another run.name" in text
    assert tree(earlier) == before


def test_nor_what_a_link_to_it_names(tmp_path, earlier):
    (tmp_path / "link").symlink_to(earlier)
    before = tree(earlier)
    config = config_of(tmp_path, run={"name": "a", "init_from": str(tmp_path / "link")})
    assert "must lie outside of the run directory" in refusal(config, 2, ConfigError)
    assert tree(earlier) == before


def test_a_start_without_a_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.init_from must not be empty"):
        config_of(tmp_path, run={"init_from": ""})


def test_without_overwrite_the_run_directory_is_what_is_refused(tmp_path, earlier):
    before = tree(earlier)
    config = config_of(tmp_path, run={"name": "a", "init_from": str(tmp_path / "gone")})
    assert "run directory must be new" in refusal(config, 2, ConfigError, overwrite=False)
    assert tree(earlier) == before


# One start for all ranks ----------------------------------------------------------------------


@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_that_see_other_weights_are_refused(tmp_path, finished, earlier, monkeypatch, odd):
    """One path, and on one host another run of the same model."""
    other = train(config_of(tmp_path, run={"name": "other", "seed": 8}), 2).path
    here = config_of(tmp_path, run={"name": "a", "init_from": str(finished)})
    there = Setup(config_of(tmp_path, run={"name": "a", "init_from": str(other)}), 2)
    monkeypatch.setattr(
        loop, "Start", lambda setup, rank: Start(there if rank == odd else setup, rank)
    )
    before = tree(earlier)
    text = refusal(here, 2, ConfigError)
    assert text.startswith("all ranks must have the same weights to start from; got ")
    assert "on rank 1" in text and "Give every host the same files" in text
    assert tree(earlier) == before


def test_a_rank_that_starts_at_random_is_refused(tmp_path, finished, monkeypatch):
    config = config_of(tmp_path, run={"name": "a", "init_from": str(finished)})
    alone = Setup(config_of(tmp_path), 2)
    monkeypatch.setattr(loop, "Start", lambda setup, rank: Start(setup if rank else alone, rank))
    assert "the same weights to start from; got " in refusal(config, 2, ConfigError)
    assert not (tmp_path / "runs").exists()


def test_the_record_says_which_weights_and_which_stages(tmp_path, finished):
    trained = train(config_of(tmp_path, run={"name": "b", "init_from": str(finished)}), 2)
    manifest = (finished / "weights" / MANIFEST_FILE).read_bytes()
    record = json.loads((trained.path / "run.json").read_text(encoding="utf-8"))
    assert record["init_from_sha256"] == hashlib.sha256(manifest).hexdigest()
    assert record["config"]["run"]["init_from"] == str(finished)
    plan = Setup(config_of(tmp_path), 2).full_plan()
    assert record["stages"] == [list(stage) for stage in plan.stages]
    assert len(record["stages"]) == 2
    first = json.loads((finished / "run.json").read_text(encoding="utf-8"))
    assert first["init_from_sha256"] is None


# Bottlenecks ----------------------------------------------------------------------------------


NARROW = {"bottleneck": 4, "calibration_tokens": 60}


@pytest.fixture
def calibrations(monkeypatch):
    """Return the ranks that calibrated, in a list that fills up."""
    ranks, real = [], loop.start_bottlenecks

    def start(transport, *others):
        ranks.append(transport.rank)
        real(transport, *others)

    monkeypatch.setattr(loop, "start_bottlenecks", start)
    return ranks


def losses_of(trained):
    return {entry["pass"]: entry["heldout_loss"] for entry in trained.summary["passes"]}


@pytest.mark.parametrize(("ranks", "zero"), [(2, 0), (4, 3)])
def test_bottlenecks_go_on_from_their_own_weights(tmp_path, finished, calibrations, ranks, zero):
    parallel = {"pp": 2, "zero": zero}

    def run(name, source):
        return train(
            config_of(
                tmp_path, run={"name": name, "init_from": str(source)}, parallel=parallel,
                compression=NARROW,
            ), ranks,
        )  # fmt: skip

    first = run("first", finished)
    assert sorted(calibrations) == list(range(ranks))
    calibrations.clear()
    then = run("then", first.path)
    assert calibrations == []
    # All parameters were taken: what the first run ended with is what the second begins with.
    assert losses_of(then)["calibrated"] == losses_of(first)["trained"]
    assert losses_of(then)["trained"] != losses_of(first)["trained"]
    specs = Setup(config_of(tmp_path, compression=NARROW), 2).model.param_specs()
    names = {spec.name for spec in specs if spec.name.startswith("boundary")}
    assert len(names) == 4
    ended, began = (load_run_weights(done.path, specs)[0] for done in (first, then))
    for name in names:
        np.testing.assert_allclose(began[name], ended[name], atol=0.1)


@pytest.mark.parametrize(
    ("ranks", "sections", "words"),
    [
        (2, {"compression": {"bottleneck": 3}}, "must have shape (8, 3); got (8, 4)"),
        (2, {}, "must have the bottlenecks of the run, or none"),
        (
            3,
            {"compression": {"bottleneck": 4}, "parallel": {"pp": 3}},
            "must have the bottlenecks of the run, or none",
        ),
    ],
    ids=["width", "none", "stages"],
)
def test_other_bottlenecks_are_refused(tmp_path, earlier, finished, ranks, sections, words):
    source = train(
        config_of(
            tmp_path, run={"name": "narrow", "init_from": str(finished)}, compression=NARROW
        ), 2,
    ).path  # fmt: skip
    before = tree(earlier)
    config = config_of(tmp_path, run={"name": "a", "init_from": str(source)}, **sections)
    text = refusal(config, ranks, CheckpointError)
    assert words in text and str(source) in text, text
    assert tree(earlier) == before


# Residuals of error feedback ------------------------------------------------------------------


FED_BACK = {"grads": "int4", "error_feedback": True}


@pytest.fixture
def residuals(monkeypatch):
    """Return what is left of every step of the rank that sends gradients back, as it ends."""
    rows, real = [], Engine.train_step

    def step(engine, plan, number, *others):
        state = engine.state
        scale = state.loss_scale.value
        outcome = "failed"
        try:
            current = real(engine, plan, number, *others)
            outcome = "skipped" if current.skipped else "committed"
            if state.loss_scale.value > scale:
                outcome = "grown"
            return current
        finally:
            left = [np.abs(array.astype(np.float64)).max() for array in state.residuals.values()]
            assert len(left) == (state.rank == 1)
            if left:
                rows.append((outcome, float(left[0])))

    monkeypatch.setattr(Engine, "train_step", step)
    return rows


def test_residuals_are_those_of_steps_that_were_made(tmp_path, residuals):
    """A skipped step leaves none; one that is made leaves some, in units of the new loss scale."""
    train(
        config_of(
            tmp_path, model={"dtype": "float32"},
            train={"steps": 12, "global_batch": 4, "num_microbatches": 2, "eval_rows": 4},
            precision={
                "compute": "float16", "loss_scale": "dynamic", "init_scale": 2.0**20,
                "growth_interval": 3,
            },
            compression=FED_BACK,
        ), 2,
    )  # fmt: skip
    outcomes = [outcome for outcome, _ in residuals]
    assert {"skipped", "committed", "grown"} <= set(outcomes)
    for outcome, left in residuals:
        assert (left > 0) == (outcome != "skipped"), residuals


def test_a_loss_scale_that_grows_changes_no_number(tmp_path):
    """Powers of two: what was lost is taken into the new units, bit for bit."""
    losses = []
    for settings in ({"loss_scale": "static"}, {"loss_scale": "dynamic", "growth_interval": 2}):
        config = config_of(
            tmp_path, model={"dtype": "float32"}, precision={"init_scale": 4.0, **settings},
            train={"steps": 7, "global_batch": 4}, compression=FED_BACK,
        )  # fmt: skip
        losses.append(train(config, 2).losses)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_residuals_stay_without_a_loss_scale(tmp_path, residuals, dtype):
    config = config_of(
        tmp_path,
        compression=FED_BACK,
        train={"steps": 3, "global_batch": 4},
        model={"dtype": dtype},
    )
    train(config, 2)
    assert [outcome for outcome, _ in residuals] == ["committed"] * 3
    assert all(left > 0 for _, left in residuals)


def test_a_failed_step_leaves_no_residual(tmp_path, residuals, monkeypatch):
    real, sizes = handlers.HANDLERS[OptimizerStep], []

    def fail(state, op):
        if state.step.step == 1 and state.residuals:
            sizes.extend(float(np.abs(array).max()) for array in state.residuals.values())
            raise MpisimError("planted")
        real(state, op)

    monkeypatch.setitem(handlers.HANDLERS, OptimizerStep, fail)
    config = config_of(tmp_path, compression=FED_BACK, train={"steps": 3, "global_batch": 4})
    with pytest.raises(MpisimError, match="planted"):
        train(config, 2)
    assert sizes and all(size > 0 for size in sizes)
    assert [outcome for outcome, _ in residuals] == ["committed", "failed"]
    assert residuals[0][1] > 0 and residuals[1][1] == 0


# Machines on which a rank would give up waiting -----------------------------------------------


@pytest.mark.parametrize("latency", [5.0, 30.0])
def test_latencies_beyond_the_time_out_are_refused(tmp_path, latency):
    settings = {"comm": {"timeout_s": 5.0}, "cluster": {"latency_s": latency}}
    with pytest.raises(
        ConfigError, match=r"cluster\.latency_s must be below comm\.timeout_s; .*, or raise"
    ):
        Setup(config_of(tmp_path, **settings), 2)


def test_machines_that_are_too_slow_are_refused(tmp_path):
    """The bound is the largest block of the full batch, and only emulated blocks have one."""

    def setup(rate, mode="emulated"):
        return Setup(
            config_of(
                tmp_path, comm={"timeout_s": 5.0}, cluster={"flops_per_s": rate},
                compute={"mode": mode},
            ), 2,
        )  # fmt: skip

    specs = setup(1e9).specs(4)
    bound = max(max(spec.forward_flops, spec.backward_flops) for spec in specs) / 5.0
    setup(bound * 1.01)
    setup(1e-300, "real")
    for rate in (bound * 0.99, 1e-300):
        with pytest.raises(ConfigError, match=r"cluster\.flops_per_s must let every block end"):
            setup(rate)


# One digest for the whole model ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "pp", "zero", "tied", "precision"),
    [
        (2, 2, 0, True, {}), (3, 3, 0, False, {}), (4, 2, 1, True, {}), (4, 2, 3, True, {}),
        (2, 2, 0, True, {"compute": "bfloat16"}),
    ],
)  # fmt: skip
def test_the_digest_of_a_pipeline_is_that_of_its_weights(
    tmp_path, ranks, pp, zero, tied, precision
):
    config = config_of(
        tmp_path, model={"dtype": "float32", "tied": tied}, parallel={"pp": pp, "zero": zero},
        precision=precision,
    )  # fmt: skip
    trained = train(config, ranks)
    specs = Setup(config, ranks).model.param_specs()
    weights, _ = load_run_weights(trained.path, specs, np.float32)
    assert weights.keys() == {spec.name for spec in specs}
    assert trained.summary["params_sha256"] == digest(weights)


def test_the_digest_of_a_pipeline_is_that_of_one_process(tmp_path):
    found = [
        train(
            make_config(
                tmp_path, run={"name": f"on{pp}"}, model={"hidden": [6, 6, 6]}, parallel={"pp": pp},
                train={"steps": 2, "num_microbatches": 2},
            ), pp,
        ).summary["params_sha256"]
        for pp in (1, 2, 4)
    ]  # fmt: skip
    assert len(set(found)) == 1


def test_nor_what_a_link_within_its_folder_names(tmp_path, earlier):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").symlink_to(earlier / "weights")
    before = tree(earlier)
    config = config_of(tmp_path, run={"name": "a", "init_from": str(tmp_path / "source")})
    assert "must lie outside of the run directory" in refusal(config, 2, ConfigError)
    assert tree(earlier) == before


def test_single_files_of_two_runs_are_told_apart(tmp_path):
    digests = set()
    for seed in (7, 8):
        one = {"parallel": {"pp": 1}}
        trained = train(config_of(tmp_path, run={"name": "b", "seed": seed}, **one), 1)
        config = config_of(tmp_path, run={"init_from": str(trained.path)}, **one)
        start = Start(Setup(config, 1), 0)
        start.close()
        digests.add(start.digest)
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, earlier, name):
    before = tree(earlier)
    config = config_of(tmp_path, run={"name": "a", "init_from": name})
    refusal(config, 2, (CheckpointError, ConfigError))
    assert tree(earlier) == before
