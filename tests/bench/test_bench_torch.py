"""Loss and gradients beside PyTorch's, where it is installed."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch")

from mpisim.bench import step_rank, torch_steps
from mpisim.bench.step_rank import CASES, TOLERANCES, check_batch, check_cases, make_batch
from mpisim.cli import main
from mpisim.errors import MpisimError

SMALL = [
    "--rounds", "2", "--rows", "2", "--kernels", "numpy", "--json",
    "--set", "model.d_model=32", "--set", "model.num_blocks=2", "--set", "data.window=16",
    "--set", "model.d_ff=48",
]  # fmt: skip


def test_every_gradient_equals_pytorchs():
    """Grouped heads, tied head and padding; neither of them; packed documents."""
    errors = check_cases("numpy", torch_steps.VARIANTS)
    assert errors.keys() == TOLERANCES.keys()
    assert 0 < errors["float64"] < 1e-12 and 0 < errors["float32"] < 1e-4


@pytest.mark.parametrize("variant", torch_steps.VARIANTS)
@pytest.mark.parametrize(
    ("number", "wrong"),
    [
        (0, {"rope_theta": 9999.0}),
        (0, {"norm_eps": 2e-5}),
        (1, {"rope_theta": 9999.0}),
        (2, {"norm_eps": 2e-5}),
    ],
)
def test_a_small_difference_of_the_models_is_found(monkeypatch, variant, number, wrong):
    case = CASES[number]
    right = step_rank.decoder_shape
    monkeypatch.setattr(step_rank, "decoder_shape", lambda config: right(config) | wrong)
    config = step_rank._case_config(case, "float64", "numpy")
    batch = make_batch(
        np.random.default_rng(5), case.rows, case.window, 61, padded=case.padded, packed=case.packed
    )
    with pytest.raises(MpisimError, match="must equal PyTorch's within 1e-09"):
        check_batch(config, batch, (variant,), 1e-9, case.name)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_whole_benchmark(capfd, ranks, dtype):
    assert main(["bench", "step", "--ranks", str(ranks), "--dtype", dtype, *SMALL]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert (row["ranks"], row["threads"], row["dtype"], row["kernels"]) == (
        ranks,
        1,
        dtype,
        "numpy",
    )
    assert row["model"]["d_ff"] == 48 and row["model"]["vocab_size"] == 266
    assert row["tokens_per_s"] > 0 and row["ratio"] > 0
    variants = row["torch_variants"]
    assert set(variants) == {"separate", "joined"}
    assert row["torch_tokens_per_s"] == max(found["tokens_per_s"] for found in variants.values())
    assert (row["float32"] is None) == (dtype == "float32")
    assert row["gradient_error"].keys() == {"float32", "float64"}
    assert row["profile"]["matmul"]["share"] > 0
