"""The committed results of the experiments say what their READMEs say, and what they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def results(name):
    folder = EXPERIMENTS / name
    assert (folder / f"{name}.png").is_file()
    rows = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return rows, (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("accumulation", [("peak_activation_bytes", "predicted_activation_bytes")]),
        (
            "recompute",
            [
                ("retained_bytes", "estimated_retained_bytes"),
                ("peak_activation_bytes", "predicted_activation_bytes"),
            ],
        ),
        ("precision", [("dp_bytes_sent", "dp_bytes_predicted")]),
        ("ranks", [("dp_bytes_sent", "dp_bytes_predicted")]),
    ],
)
def test_bytes_are_those_of_the_plan_and_of_the_table(name, pairs):
    rows, readme = results(name)
    for row in rows:
        for measured, predicted in pairs:
            assert row[measured] == row[predicted], row
            assert f"| {row[measured]:,} |" in readme


def test_micro_batches_keep_the_curve_and_shrink_the_activations():
    rows, _ = results("accumulation")
    whole = rows[0]["peak_activation_bytes"]
    for row in rows:
        assert row["largest_relative_loss_difference"] < 1e-6
        assert row["peak_activation_bytes"] * row["microbatches"] == whole


def test_recompute_keeps_every_bit_and_fewer_bytes():
    rows, _ = results("recompute")
    assert [row["recompute"] for row in rows] == ["none", "selective", "full", "every 2", "every 4"]
    assert all(row["same_bits_as_none"] for row in rows)
    kept = [row["retained_bytes"] for row in rows]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


def test_16_bit_storage_halves_its_bytes_and_only_the_scaled_run_skips():
    rows, _ = results("precision")
    wide, bfloat16, on_the_wire, scaled, small, plain = rows
    assert bfloat16["peak_activation_bytes"] < 0.51 * wide["peak_activation_bytes"]
    assert 2 * on_the_wire["dp_bytes_sent"] == wide["dp_bytes_sent"]
    assert scaled["skipped"][:3] == [0, 1, 2]
    assert not any(row["skipped"] for row in (wide, bfloat16, on_the_wire, small, plain))
    for row in (bfloat16, on_the_wire, scaled, plain):
        assert abs(row["heldout_loss"] - wide["heldout_loss"]) < 0.05
    assert small["heldout_loss"] > wide["heldout_loss"] + 1.0


def test_ranks_give_one_curve():
    rows, _ = results("ranks")
    for row in rows:
        bound = 1e-12 if row["dtype"] == "float64" else 1e-6
        assert row["largest_relative_loss_difference"] <= bound


def test_the_committed_step_bench_is_above_its_bars():
    """Ratios to PyTorch: NumPy 0.8, Numba 1.0, two ranks 1.0; 16 bits cost 2.0 and 1.2."""
    text = (EXPERIMENTS / "bench" / "README.md").read_text(encoding="utf-8")
    cells = {
        cells[0]: cells[1:]
        for line in text.splitlines()
        if line.startswith("| ")
        and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) >= 3
    }
    assert float(cells["1 rank, NumPy kernels"][-1]) >= 0.80
    assert float(cells["1 rank, Numba kernels"][-1]) >= 1.0
    assert float(cells["2 ranks, Numba kernels, beside DDP"][-1]) >= 1.0
    for name in ("bfloat16", "float16"):
        numba, numpy = map(float, cells[name])
        assert numba <= 1.2 and numpy <= 2.0
