"""The committed result of `compression` says what its README says, and what it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from mpisim.config import load_config
from mpisim.cost.price import price_rank
from mpisim.layouts.codecs import codec_spec, payload_bytes
from mpisim.layouts.frames import HEADER_BYTES
from mpisim.train.setup import Setup

FOLDER = Path(__file__).parents[2] / "experiments" / "compression"
SEEDS = {1, 2, 3}


@pytest.fixture(scope="module")
def rows():
    return json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def readme():
    return (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sweep(rows):
    """(label, error feedback) -> rows of all seeds."""
    found = {}
    for row in rows:
        if row["part"] == "from scratch":
            found.setdefault((row["label"], row["error_feedback"]), []).append(row)
    return found


def loss_of(group):
    return fmean(row["heldout_loss"] for row in group)


def test_all_that_was_asked_for_is_there(sweep):
    wanted = {"none", "fp16", "bf16"} | {f"int{b}" for b in range(2, 9)}
    wanted |= {f"int{b}-token" for b in range(2, 9)}
    wanted |= {f"bottleneck {width}, int{bits}" for width in (32, 16) for bits in (8, 4)}
    assert wanted <= {label for label, feedback in sweep if not feedback}
    assert {"int4", "int3", "int2"} <= {label for label, feedback in sweep if feedback}
    for group in sweep.values():
        assert {row["seed"] for row in group} == SEEDS and len(group) == 3
    assert (FOLDER / "compression.png").is_file()


def test_bytes_are_header_and_payload_today_as_well(sweep, readme):
    """P5: measured, priced from today's plan and from the formula: difference 0."""
    for group in sweep.values():
        for row in group:
            assert (
                row["boundary_bytes_per_step"]
                == row["priced_bytes_per_step"]
                == row["formula_bytes_per_step"]
            )
        config = load_config(FOLDER / "compression.toml", group[0]["settings"])
        stages = config.parallel.pp
        plan = Setup(config, stages).full_plan()
        priced = [price_rank(plan, rank) for rank in range(stages)]
        today = sum(
            rank["pp", kind]["sent_bytes"] for rank in priced for kind in ("activation", "grad")
        )
        micros = config.train.num_microbatches
        width = config.compression.bottleneck or config.model.d_model
        shape = (config.train.global_batch // micros, config.data.window, width)
        formula = sum(
            HEADER_BYTES + payload_bytes(codec_spec(codec), shape, 4)
            for codec in (config.compression.activations, config.compression.grads)
        )
        assert {row["boundary_bytes_per_step"] for row in group} == {today}
        assert today == micros * (stages - 1) * formula
        assert f"| {today:,} | {today:,} |" in readme


def test_the_table_shows_the_results(sweep, readme):
    for (label, feedback), group in sweep.items():
        losses = [row["heldout_loss"] for row in group]
        cells = (
            f"| {label} | {'yes' if feedback else 'no'} |",
            f"| {fmean(losses):.3f} | {min(losses):.3f} to {max(losses):.3f} |",
            f"| {fmean(row['heldout_top1'] for row in group):.1%} |",
        )
        assert any(all(cell in line for cell in cells) for line in readme.splitlines()), cells


def test_what_the_readme_concludes(sweep):
    def loss(label, feedback=False):
        return loss_of(sweep[label, feedback])

    plain = loss("none")
    least, most = (pick(row["heldout_loss"] for row in sweep["none", False]) for pick in (min, max))
    for label in ("fp16", "bf16", "int8", *(f"int{bits}-token" for bits in (8, 7, 6, 5))):
        assert abs(loss(label) - plain) < most - least, label
    # A scale a token costs bytes, and is worth them from 7 bits down.
    for bits in range(7, 1, -1):
        assert loss(f"int{bits}-token") < loss(f"int{bits}") - 0.03, bits
        if bits < 7:
            assert loss(f"int{bits}") > loss(f"int{bits + 1}") + 0.1, bits
    # It is the gradients that one scale a tensor ruins, and feedback that mends them.
    for bits in (4, 3, 2):
        name = f"int{bits} (gradients only)"
        assert loss(name) - loss(name, True) > 0.3, bits
    assert loss("int4 (gradients only)") > plain + 0.5
    assert abs(loss("int4 (gradients only)", True) - plain) < most - least
    # It does not always: with both directions at 2 or 3 bits nothing is gained.
    assert loss("int4") - loss("int4", True) > 0.5
    assert loss("int3", True) > loss("int3") and loss("int2", True) > loss("int2")
    for width in (32, 16):
        assert loss(f"bottleneck {width}, int4") - loss(f"bottleneck {width}, int4", True) > 0.5
    few = sweep["bottleneck 16, int4", True]
    assert few[0]["boundary_bytes_per_step"] < 0.032 * sweep["none", False][0][
        "boundary_bytes_per_step"
    ]  # fmt: skip
    assert loss_of(few) < loss("int4")


def starts(rows, **wanted):
    found = [row for row in rows if row["part"] == "starts"]
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def test_the_calibrated_bottleneck_keeps_its_share_untrained(rows, readme):
    """P6: at least 90% of held-out top-1 at half width and 8 bits, on every boundary."""
    cases = {("decoder", 3, seed) for seed in SEEDS} | {("decoder", 4, 1)}
    cases |= {("mlp", 3, seed) for seed in SEEDS}
    for model, stages, seed in cases:
        (pca,) = starts(rows, model=model, stages=stages, seed=seed, start="pca")
        assert "compression.activations=int8" in pca["settings"]
        width = {"decoder": 64, "mlp": 96}[model] // 2
        assert f"compression.bottleneck={width}" in pca["settings"]
        assert pca["kept_untrained"] >= 0.98
        base = {p["pass"]: p["heldout_top1"] for p in pca["passes"]}["base"]
        for other in ("random", "layernorm"):
            (row,) = starts(rows, model=model, stages=stages, seed=seed, start=other)
            assert row["kept_untrained"] < 0.9, row
            assert row["kept_untrained"] < row["kept_trained"] <= pca["kept_trained"]
            # One trained model in front of all three.
            assert row["passes"][0] == pca["passes"][0]
        (control,) = starts(rows, model=model, stages=stages, seed=seed, start="none")
        assert control["passes"] == [] and control["kept_trained"] >= pca["kept_trained"]
        for row in starts(rows, model=model, stages=stages, seed=seed):
            assert f"| {row['kept_trained']:.1%} |" in readme
            assert row["kept_trained"] == row["heldout"]["heldout_top1"] / base
            if row is control:
                continue
            passes = {p["pass"]: p["heldout_top1"] for p in row["passes"]}
            assert list(passes) == ["base", "calibrated", "trained"]
            assert row["kept_untrained"] == passes["calibrated"] / base
            assert row["kept_trained"] == passes["trained"] / base
            assert f"| {row['kept_untrained']:.1%} |" in readme
    assert len(starts(rows)) == 4 * len(cases)


def test_one_scale_a_tensor_makes_most_gradients_zero(rows):
    found = [row for row in rows if row["part"] == "zeros"]
    assert len(found) == 2 * 2 * len(SEEDS)
    for row in found:
        assert row["token"] < 0.17
        if row["kind"] == "gradient":
            assert row["tensor"] > 0.4 and row["tensor"] > 2.5 * row["token"]


def test_a_norm_takes_the_decoders_scale_away(rows):
    """Why the start behind a layer norm loses there: with the scale put back it is all there."""
    norms = [row for row in rows if row["part"] == "norm"]
    assert {(row["model"], row["seed"]) for row in norms} == {
        (model, seed) for model in ("decoder", "mlp") for seed in SEEDS
    }
    for row in norms:
        base, normalised, scaled_back = row["top1"]
        assert normalised < 0.9 * base
        if row["model"] == "decoder":
            assert row["scale"] > 2.0 and scaled_back > 0.97 * base
            assert row["half"] > 0.98
        else:
            assert scaled_back < 0.9 * base
