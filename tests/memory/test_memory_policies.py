"""Predicted bytes equal the ledger of a real run, with recompute, decoders and every policy."""

from __future__ import annotations

import itertools

import pytest
from small_jobs import make_config, make_plans, packed_rows, run_engine, small_decoder, train

from mpisim.config.schema import OptimizerSection
from mpisim.engine.state import SCRATCH_BYTES
from mpisim.engine.watch import MemoryWatch
from mpisim.layouts.metrics import MEMORY_CATEGORIES
from mpisim.layouts.specs import Conditions
from mpisim.memory.tracker import hook_is_built, open_tracker
from mpisim.nn.precision import Policy
from mpisim.plan.forecast import Itemsizes, predict_memory, retained_estimate
from mpisim.plan.ops import Forward
from mpisim.train.setup import Setup

MODES = ({"recompute": "none"}, {"recompute": "selective"}, {"recompute": "full"},
         {"recompute": "full", "recompute_every": 2})  # fmt: skip
POLICIES = (
    ("float64", {}),
    ("float32", {}),
    ("float32", {"compute": "bfloat16"}),
    ("float32", {"compute": "float16", "init_scale": 256.0}),
    ("float32", {"compute": "bfloat16", "wire": "bfloat16"}),
    ("float32", {"compute": "float16", "reduce": "float16", "init_scale": 256.0}),
    ("float32", {"wire": "bfloat16"}),
)
DECODER = {
    "kind": "decoder", "d_model": 8, "num_blocks": 3, "num_heads": 2, "num_kv_heads": 1, "d_ff": 8,
}  # fmt: skip
TEXT = {"window": 6}


def assert_exact(config, ranks):
    """Train; difference 0 in every category, live and peak, and in total, on every rank."""
    done = train(config, ranks)
    setup = Setup(config, ranks)
    data = done.summary["ranks"][0]["memory"]["live"]["data"]
    for rank in done.summary["ranks"]:
        measured, predicted = rank["memory"], rank["predicted_memory"]
        assert list(measured["peak"]) == list(MEMORY_CATEGORIES)
        for category in MEMORY_CATEGORIES:
            assert measured["peak"][category] == predicted["peak"][category], category
        assert measured["peak_total"] == predicted["peak_total"]
        assert measured["at_peak"] == predicted["at_peak"]
        assert sum(measured["at_peak"].values()) == measured["peak_total"]
        forecast = setup.forecast(setup.full_plan(), rank["rank"], data)
        # Between steps the numbers of its samples are gone.
        assert measured["live"] == forecast.live | {"data": data}
    return done


def config_of(tmp_path, kind, mode, policy, micros, layout="packed", **sections):
    dtype, precision = POLICIES[policy]
    model = DECODER if kind == "decoder" else {"hidden": [7, 5, 6], "activation": "tanh"}
    return make_config(
        tmp_path, "text", model=model | {"dtype": dtype} | sections.pop("model", {}),
        data=TEXT | ({"layout": layout} if kind == "decoder" else {}), memory=MODES[mode],
        precision=precision, optimizer={"kind": "adamw", "lr": 0.001},
        train={"steps": 1, "global_batch": 12, "num_microbatches": micros, "eval_rows": 7},
        parallel={"bucket_bytes": 1500, "overlap": policy % 2 == 0},
        comm={"algorithm": ("auto", "ring")[mode % 2]}, trace={"enabled": False}, **sections,
    )  # fmt: skip


@pytest.mark.parametrize("policy", range(len(POLICIES)))
@pytest.mark.parametrize("mode", range(len(MODES)))
@pytest.mark.parametrize("kind", ["decoder", "mlp"])
def test_predicted_bytes_are_the_measured_ones(tmp_path, kind, mode, policy):
    """A7, B5, M2: recompute x microbatches x policies, packed and padded, ranks 1, 2, 3."""
    # Each layout meets other ranks than its neighbours; all meet all over the policies and modes.
    layouts = itertools.product((1, 2), ("packed", "padded") if kind == "decoder" else ("packed",))
    for number, (micros, layout) in enumerate(layouts):
        ranks = 1 + (number + mode + policy) % 3
        assert_exact(config_of(tmp_path, kind, mode, policy, micros, layout), ranks)


@pytest.mark.parametrize("mode", range(len(MODES)))
@pytest.mark.parametrize("changes", [
    {"dropout": 0.3}, {"loss_chunk_tokens": 5}, {"tied": False, "num_kv_heads": 0},
    {"num_blocks": 1}, {"num_blocks": 5}, {"max_len": 9},
])  # fmt: skip
def test_decoders_of_other_kinds(tmp_path, mode, changes):
    for policy, ranks in ((0, 2), (2, 1)):
        assert_exact(config_of(tmp_path, "decoder", mode, policy, 2, model=changes), ranks)


@pytest.mark.parametrize("mode", [1, 3])
def test_microbatches_without_rows_and_short_batches(tmp_path, mode):
    """The last batch of an epoch has fewer rows than there are microbatches."""
    config = config_of(tmp_path, "decoder", mode, 0, 2)
    values = config.model_dump(mode="json")
    values["train"] |= {"global_batch": 12, "steps": 20}
    values["data"]["max_bytes"] = 600
    from mpisim.config import config_from_mapping

    done = assert_exact(config_from_mapping(values), 3)
    assert len({row["rows"] for row in done.steps}) > 1


@pytest.mark.parametrize("policy", [0, 2])
def test_every_mode_keeps_less_than_the_one_before(tmp_path, policy):
    """The figures above would also agree if recompute freed nothing."""
    peaks = [
        assert_exact(config_of(tmp_path, "decoder", mode, policy, 1), 1).summary["ranks"][0]
        ["memory"]["peak"]["activations"]
        for mode in range(3)
    ]  # fmt: skip
    assert peaks[0] > peaks[1] > peaks[2]


class BlockWatch(MemoryWatch):
    """Measures what blocks need: the forecast below is not told what the other ops do."""

    def end(self, predicted_temp):
        if self.ledger.op.startswith(("Forward", "Recompute", "Backward")):
            super().end(predicted_temp)
        else:
            self.ledger.end_op(0)


def measure_blocks(state):
    state.watch = BlockWatch(state.ledger, open_tracker("hook"))
    state.watch.start()


@pytest.mark.skipif(not hook_is_built(), reason="the allocator hook is not built")
@pytest.mark.parametrize("mode", range(len(MODES)))
@pytest.mark.parametrize("ranks", [1, 2])
def test_microbatches_of_different_length(mode, ranks):
    """Padded microbatches are as long as their longest row; one has no row at all."""
    recompute = MODES[mode]["recompute"]
    every = MODES[mode].get("recompute_every", 1)
    model, policy = small_decoder(0.3), Policy("float32", "bfloat16", "float32", "bfloat16")
    batches = [packed_rows(2, 0), packed_rows(3, 1, length=4), packed_rows(0, 2, length=3)]
    parts = [batches, batches[::-1]][:ranks]
    options = {
        "policy": policy, "recompute": recompute, "every": every, "bucket_bytes": 1500,
        "overlap": False,
    }  # fmt: skip
    # One step: copies of its gradients are kept, which the hook would see in the next.
    done = run_engine(
        model, [parts], optimizer=OptimizerSection(kind="adamw"), prepare=measure_blocks, **options
    )
    (plan,) = make_plans(model, [parts], **options)
    conditions = Conditions(kernels="numpy", starts=True, dropout=True)
    assert plan.lengths == ((6, 4, 3), (3, 4, 6))[:ranks]
    for rank, state in enumerate(done.states):
        forecast = predict_memory(
            plan, rank,
            lambda rows, length: model.spec(rows, policy.compute_dtype, length, conditions),
            itemsizes=Itemsizes(4, 2, 4, 2, has_master=True, has_wire_copy=True),
            optimizer_arrays=2,
            scratch_bytes=SCRATCH_BYTES + model.tables_bytes(policy.compute_dtype),
            batch_bytes=lambda rows, length: 3 * 4 * rows * length, data_bytes=0,
        )  # fmt: skip
        assert state.ledger.live == forecast.live
        assert state.ledger.peak == forecast.peak
        assert state.ledger.peak_total == forecast.peak_total
        assert state.ledger.at_peak == forecast.at_peak


@pytest.mark.parametrize("changes", [{}, {"loss_chunk_tokens": 5}, {"num_blocks": 5}])
@pytest.mark.parametrize("mode", range(len(MODES)))
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_what_is_retained_at_the_loss_is_what_was_estimated(mode, compute, changes):
    """B5: between the loss and its backward the ledger holds the estimate, in every microbatch."""
    model, policy = small_decoder(0.3, **changes), Policy("float32", compute, "float32", "float32")
    parts = [[packed_rows(2, 0), packed_rows(3, 1)], [packed_rows(1, 2), packed_rows(0, 3)]]
    options = {
        "policy": policy, "recompute": MODES[mode]["recompute"],
        "every": MODES[mode].get("recompute_every", 1),
    }  # fmt: skip
    (plan,) = make_plans(model, [parts], **options)
    measured = {}

    def prepare(state):
        def observe(op):
            if isinstance(op, Forward) and op.block == state.last:
                measured[state.rank, op.micro] = state.ledger.live["activations"]

        state.observe_op = observe

    run_engine(model, [parts], prepare=prepare, **options)
    for rank, micro in itertools.product((0, 1), (0, 1)):
        estimate = retained_estimate(
            plan, rank, micro, lambda rows, length: model.spec(rows, policy.compute_dtype, length)
        )
        assert measured[rank, micro] == estimate
        assert (estimate > 0) is (len(parts[rank][micro].x) > 0)
