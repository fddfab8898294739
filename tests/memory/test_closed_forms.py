"""The closed forms of this engine against the walk over its plan."""

import pytest

from mpisim.config import config_from_mapping
from mpisim.memory.formulas import (
    kept_activation_bytes,
    model_state_bytes,
    peak_activation_bytes,
    ring_scratch_bytes,
)
from mpisim.plan.forecast import retained_estimate
from mpisim.train.setup import Setup

ROWS = 12
DECODERS = [
    {"kind": "decoder", "d_model": width, "num_blocks": blocks, "num_heads": 2, "dropout": dropout,
     "tied": tied, "d_ff": d_ff, "loss_chunk_tokens": chunk}
    for width in (8, 32) for blocks in (1, 2, 4) for dropout in (0.0, 0.1)
    for tied in (True, False) for d_ff in (0, 200) for chunk in (0, 5)
]  # fmt: skip
HIDDEN = ([], [5], [5, 7, 300], [300, 3])
MLPS = [{"hidden": hidden, "activation": name} for hidden in HIDDEN for name in ("relu", "gelu")]


def setup_of(model, recompute, compute, ranks=1, **sections):
    is_decoder = model.get("kind") == "decoder"
    data = {"kind": "stdlib", "window": 9} if is_decoder else {"kind": "regression"}
    return Setup(
        config_from_mapping(
            {
                "data": data,
                "model": model,
                "memory": {"recompute": recompute},
                "precision": {"compute": compute},
                "train": {"global_batch": 2 * ROWS * ranks, "num_microbatches": 2},
            }
            | sections
        ),
        ranks,
    )


@pytest.mark.parametrize("compute", ["same", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_are_those_of_the_walk(recompute, compute):
    for model in DECODERS + MLPS:
        setup = setup_of(model, recompute, compute)
        plan, blocks = setup.full_plan(), setup.specs(ROWS)
        forecast = setup.forecast(plan, 0, 0)
        assert peak_activation_bytes(blocks, recompute) == forecast.peak["activations"], model
        kept = retained_estimate(plan, 0, 0, setup.specs)
        assert kept_activation_bytes(blocks, recompute) == kept, model


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_model_state_and_scratch_are_those_of_the_walk(zero):
    model = DECODERS[5]
    setup = setup_of(
        model, "none", "bfloat16", 3, parallel={"zero": zero, "bucket_bytes": 1 << 30},
        comm={"algorithm": "ring"},
    )  # fmt: skip
    plan = setup.full_plan()
    start = setup.forecast(plan, 0, 0).live
    counts = [bucket.count for bucket in plan.buckets]
    states = [
        model_state_bytes(
            count, 3, zero, compute="bfloat16", reduce="float32", param="float32",
            has_master=True, optimizer_arrays=2,
        )
        for count in counts
    ]  # fmt: skip
    for category in states[0]:
        assert start[category] == sum(state[category] for state in states), category
    assert ring_scratch_bytes(counts, 3, 4, zero) < start["comm_buffers"]
