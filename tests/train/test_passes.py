"""Held-out evaluation in three passes, and runs that start from the weights of another one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_jobs import make_config, train

from mpisim.data.splits import TwoSplits
from mpisim.errors import CheckpointError

DECODER = {
    "kind": "decoder", "d_model": 8, "num_heads": 2, "d_ff": 8, "num_blocks": 3, "dtype": "float64",
}  # fmt: skip
TOLERANCE = 1e-12
NARROW = {"bottleneck": 4, "activations": "int8", "calibration_tokens": 100}
TEXT = b"\n\n".join(
    b"%d dogs, %d" % (i, i * i * 7919) + b" cats" * (i % 4) for i in range(120)
)  # fmt: skip


def job(folder, ranks=1, name="run", source=None, text=TEXT, **sections):
    """Train a small decoder on threads."""
    settings = {
        "run": {"name": name}, "model": dict(DECODER), "data": {"window": 6},
        "optimizer": {"kind": "adamw", "lr": 0.01},
        "train": {"steps": 2, "global_batch": 12, "num_microbatches": 2},
        "trace": {"enabled": False},
    }  # fmt: skip
    if source is not None:
        settings["run"]["init_from"] = str(source)
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    folder.mkdir(exist_ok=True)
    config = make_config(folder, "text", **settings)
    Path(config.data.path).write_bytes(text)
    return train(config, ranks)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A decoder that one process has trained, in one file."""
    return job(
        tmp_path_factory.mktemp("trained"), train={"steps": 8, "num_microbatches": 1},
        optimizer={"lr": 0.03},
    )  # fmt: skip


LAYOUTS = {
    "pp2": (2, {"pp": 2}),
    "pp3": (3, {"pp": 3, "schedule": "gpipe"}),
    "pp4": (4, {"pp": 4}),
    "interleaved": (2, {"pp": 2, "schedule": "interleaved", "chunks": 2, "split": [1, 1, 1, 2]}),
    "dp2": (4, {"pp": 2, "dp": 2}),
    "dp2 zero3": (4, {"pp": 2, "dp": 2, "zero": 3}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_passes_and_the_base_is_the_one_process(tmp_path, trained, layout):
    """P7: without a compressor the stages are the model that was trained, whatever the layout."""
    ranks, parallel = LAYOUTS[layout]
    done = job(tmp_path, ranks, source=trained.path, parallel=parallel, compression=NARROW)
    base, calibrated, last = done.summary["passes"]
    assert [p["pass"] for p in (base, calibrated, last)] == ["base", "calibrated", "trained"]
    want, after = trained.evaluations[-1], done.evaluations[-1]
    for key in want.keys() - {"step"}:
        assert base[key] == pytest.approx(want[key], rel=TOLERANCE), key
        assert last[key] == after[key], key
    for key in ("heldout_loss", "heldout_perplexity", "heldout_top1", "heldout_targets"):
        assert {key} <= base.keys() & calibrated.keys() & last.keys()
    losses = [p["heldout_loss"] for p in (base, calibrated, last)]
    assert len(set(losses)) == 3
    assert len({p["heldout_targets"] for p in (base, calibrated, last)}) == 1


def test_the_passes_are_printed_in_their_order(tmp_path, trained, capsys):
    job(tmp_path, 2, source=trained.path, parallel={"pp": 2}, compression={"activations": "int4"})
    lines = [line.split(": held-out loss ") for line in capsys.readouterr().out.splitlines()]
    found = [line for line in lines if len(line) == 2]
    assert [name for name, _ in found] == ["base", "calibrated", "trained"]
    assert all(", top-1 " in text and " rows)" in text for _, text in found)


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (2, {"parallel": {"pp": 2}}),
        (2, {"parallel": {"pp": 2}, "compression": {"grads": "int4", "error_feedback": True}}),
        (2, {"parallel": {"dp": 2}, "compression": {"activations": "int4", "bottleneck": 4}}),
    ],
    ids=["no codec", "gradients only", "no boundary"],
)
def test_nothing_to_compare_is_no_pass(tmp_path, capsys, ranks, sections):
    done = job(tmp_path, ranks, **sections)
    assert done.summary["passes"] == [] and len(done.evaluations) == 1
    assert "base: " not in capsys.readouterr().out


@pytest.mark.parametrize(("documents", "passes"), [(19, 0), (20, 3)])
@pytest.mark.parametrize("zero", [0, 3])
def test_fewer_than_20_documents_evaluate_nothing_and_nobody_waits(
    tmp_path, documents, passes, zero
):
    """P7: such data has no validation split; the bottleneck is calibrated all the same."""
    text = b"\n\n".join(bytes([65 + i]) * 12 for i in range(documents))
    done = job(
        tmp_path, 4, text=text, parallel={"pp": 2, "dp": 2, "zero": zero}, compression=NARROW,
        train={"global_batch": 4, "eval_every": 1}, comm={"timeout_s": 10.0},
    )  # fmt: skip
    assert len(done.summary["passes"]) == passes
    assert len(done.evaluations) == (2 if passes else 0)
    assert len(done.steps) == 2 and all(np.isfinite(done.losses))


@pytest.mark.parametrize(("rows", "passes"), [(19, 0), (20, 3)])
def test_fewer_than_20_rows_evaluate_nothing(tmp_path, rows, passes):
    config = make_config(
        tmp_path, data={"num_rows": rows}, train={"steps": 2, "global_batch": 4},
        model={"hidden": [5, 4]}, parallel={"pp": 2}, compression={"activations": "int8"},
    )  # fmt: skip
    done = train(config, 2)
    assert len(done.summary["passes"]) == passes
    assert len(done.evaluations) == bool(passes)


def test_held_out_rows_are_neither_trained_on_nor_calibrated_on(tmp_path, monkeypatch):
    """P7: every 20th document; each document is one character, so that a row tells its own."""
    seen = {"train": set(), "heldout": set()}
    before = TwoSplits.train_batch, TwoSplits.heldout_batch

    def watch(split, load):
        def watched(data, indices):
            batch = load(data, indices)
            seen[split].update(batch.x.reshape(-1).tolist())
            return batch

        return watched

    monkeypatch.setattr(TwoSplits, "train_batch", watch("train", before[0]))
    monkeypatch.setattr(TwoSplits, "heldout_batch", watch("heldout", before[1]))
    text = b"\n\n".join(bytes([65 + i]) * 12 for i in range(60))
    job(
        tmp_path, 4, text=text, parallel={"pp": 2, "dp": 2}, train={"steps": 12},
        compression=NARROW | {"calibration_tokens": 10_000},
    )  # fmt: skip
    letters = set(range(65, 65 + 60))
    heldout = {65 + 19, 65 + 39, 65 + 59}
    assert seen["heldout"] & letters == heldout
    assert seen["train"] & letters == letters - heldout


# -- starting from weights ------------------------------------------------------------------------


def first_losses(folder, source):
    """Return the first training loss of runs from the same weights in several layouts."""
    layouts = {
        "one": (1, {}), "pp3": (3, {"pp": 3}), "pp2-dp2": (4, {"pp": 2, "dp": 2}),
        "zero3": (4, {"pp": 2, "dp": 2, "zero": 3}),
    }  # fmt: skip
    return {
        name: job(
            folder, ranks, name=name, source=source, parallel=parallel,
            train={"num_microbatches": 1},
        ).losses[0]
        for name, (ranks, parallel) in layouts.items()
    }  # fmt: skip


def test_weights_start_any_layout_whoever_wrote_them(tmp_path, trained):
    """One process, then three stages, then two stages of two replicas: the model stays itself."""
    fresh = job(tmp_path, 3, name="fresh", parallel={"pp": 3}, train={"num_microbatches": 1})
    source = trained.path
    for writer in ("pp3", "pp2-dp2", "zero3"):
        found = first_losses(tmp_path / writer, source)
        assert set(found) == {"one", "pp3", "pp2-dp2", "zero3"}
        for loss in found.values():
            assert loss == pytest.approx(found["one"], rel=TOLERANCE)
        assert abs(found["one"] - fresh.losses[0]) > 1e-3  # not the weights of the seed
        # Now from the stage files that a layout wrote: other weights by then.
        source = tmp_path / writer / "runs" / writer


def test_weights_of_stages_are_evaluated_as_the_stages_were(tmp_path, trained):
    staged = job(tmp_path, 3, name="staged", source=trained.path, parallel={"pp": 3})
    again = job(
        tmp_path, 2, name="again", source=staged.path, parallel={"pp": 2},
        compression={"activations": "fp16"},
    )  # fmt: skip
    want = staged.evaluations[-1]["heldout_loss"]
    assert again.summary["passes"][0]["heldout_loss"] == pytest.approx(want, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"d_model": 12}, "must have shape (266, 12); got (266, 8)"),
        ({"num_blocks": 4}, "must hold the 38 parameters of the run's model; got no block3."),
        ({"num_blocks": 2}, "must hold the 20 parameters of the run's model; got block2."),
    ],
    ids=["other width", "more blocks", "fewer blocks"],
)  # fmt: skip
@pytest.mark.parametrize("stages", [1, 2])
def test_weights_of_another_model_are_one_error_on_all_ranks(
    tmp_path, trained, capfd, model, words, stages
):
    source = trained.path
    if stages > 1:
        source = job(tmp_path, 2, name="source", parallel={"pp": 2}).path
    capfd.readouterr()
    with pytest.raises(CheckpointError) as caught:
        job(tmp_path, 3, source=source, parallel={"pp": 3}, model=model, compression=NARROW)
    text = str(caught.value)
    assert words in text and str(source) in text and text.endswith(".")
    assert not (tmp_path / "runs" / "run" / "summary.json").exists()


def test_a_stage_file_that_is_cut_off_is_one_error_and_nobody_waits(tmp_path):
    """Only the ranks that read it can know."""
    source = job(tmp_path, 2, name="source", parallel={"pp": 2}).path
    manifest = next((source / "weights").glob("*.json"))
    files = sorted(p for p in (source / "weights").iterdir() if p != manifest)
    files[1].write_bytes(files[1].read_bytes()[:-8])
    assert json.loads(manifest.read_text())
    with pytest.raises(CheckpointError, match="must "):
        job(
            tmp_path, 3, source=source, parallel={"pp": 3}, compression=NARROW,
            comm={"timeout_s": 10.0},
        )  # fmt: skip
