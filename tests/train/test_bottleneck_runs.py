"""Whole runs with bottlenecks: one calibration on both sides, its statistics, and its bytes.

Also what codecs do to gradients: they pass straight through, as a single process says.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from small_jobs import cut, make_config, packed_rows, run_engine, small_decoder, train

from mpisim.comm.codecs import roundtrip
from mpisim.data.load import load_data
from mpisim.engine.state import EngineState
from mpisim.errors import ConfigError
from mpisim.layouts.codecs import codec_spec
from mpisim.memory.tracker import hook_is_built
from mpisim.nn.layers import LayerContext
from mpisim.nn.params import init_params
from mpisim.train import calibrate, loop
from mpisim.train.setup import build_model

TEXT = b"\n\n".join(b"%d dogs, %d" % (i, i * i * 7919) + b" cats" * (i % 4) for i in range(120))
WINDOW, WIDTH, TOKENS, SEED = 6, 4, 300, 7
TOLERANCE = 1e-12


def config_of(folder, **sections):
    """Return the config of a small decoder with a bottleneck at each boundary."""
    settings = {
        "run": {"seed": SEED},
        "model": {
            "kind": "decoder", "d_model": 8, "num_heads": 2, "d_ff": 8, "num_blocks": 3,
            "dtype": "float64",
        },
        "data": {"window": WINDOW},
        "train": {"steps": 1, "global_batch": 12, "num_microbatches": 2, "eval_rows": 12},
        "compression": {
            "bottleneck": WIDTH, "activations": "int8", "calibration_tokens": TOKENS,
        },
        "trace": {"enabled": False},
    }  # fmt: skip
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    config = make_config(folder, "text", **settings)
    Path(config.data.path).write_bytes(TEXT)
    return config


class Calibrated:
    """What all ranks of a run had right after calibration."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, np.ndarray]] = {}
        """Rank -> parameters of its stage, whole."""
        self.totals: dict[int, dict[int, np.ndarray]] = {}
        """Rank -> boundary -> sums over tokens."""


@pytest.fixture
def calibrated(monkeypatch):
    """Watch calibrations."""
    found = Calibrated()
    start, measure = calibrate.start_bottlenecks, calibrate._measure

    def started(transport, setup, state, run_base):
        start(transport, setup, state, run_base)
        mine = found.weights[transport.rank] = {}
        for store in state.stores:
            whole = store.views(store.gather_master())
            mine.update((name, array.copy()) for name, array in whole.items())

    def measured(transport, *others):
        totals = measure(transport, *others)
        found.totals[transport.rank] = {
            boundary: statistics.totals.copy() for boundary, statistics in totals.items()
        }
        return totals

    monkeypatch.setattr(loop, "start_bottlenecks", started)
    monkeypatch.setattr(calibrate, "_measure", measured)
    return found


LAYOUTS = [
    (2, 1, 0, "pca"), (3, 1, 0, "layernorm"), (4, 1, 0, "pca"), (3, 1, 0, "random"),
    (2, 2, 0, "pca"), (2, 2, 1, "layernorm"), (3, 2, 2, "pca"), (2, 2, 3, "pca"),
    (2, 2, 3, "random"),
]  # fmt: skip


@pytest.mark.parametrize(("pp", "dp", "zero", "start"), LAYOUTS)
def test_both_halves_start_from_one_calibration(tmp_path, calibrated, pp, dp, zero, start):
    """P6: bitwise, on the two ranks of each boundary and on all replicas."""
    train(
        config_of(
            tmp_path, parallel={"pp": pp, "dp": dp, "zero": zero}, compression={"start": start}
        ),
        pp * dp,
    )
    assert sorted(calibrated.weights) == list(range(pp * dp))
    for boundary in range(pp - 1):
        encode, decode = f"boundary{boundary}.encode.map", f"boundary{boundary}.decode.map"
        halves = []
        for rank, weights in sorted(calibrated.weights.items()):
            assert (f"{encode}.weight" in weights) == (rank % pp == boundary)
            assert (f"{decode}.weight" in weights) == (rank % pp == boundary + 1)
            if rank % pp == boundary:
                halves.append((weights[f"{encode}.weight"], weights[f"{encode}.bias"]))
            if rank % pp == boundary + 1:
                halves.append((weights[f"{decode}.weight"].T, weights[f"{decode}.bias"]))
        assert len(halves) == 2 * dp
        first = halves[0][0]
        assert first.shape == (8, WIDTH) and np.isfinite(first).all()
        np.testing.assert_allclose(first.T @ first, np.eye(WIDTH), atol=1e-12)
        assert {half[0].tobytes() for half in halves} == {first.tobytes()}
        for encoder, decoder in zip(halves[::2], halves[1::2], strict=True):
            np.testing.assert_allclose(encoder[1], -(decoder[1] @ first), rtol=0, atol=1e-14)
        assert np.any(halves[1][1]) == (start != "random")  # the mean


def crossing(config, pp, rows):
    """Return what crosses each boundary in one process, (tokens, D), for the first rows."""
    model = build_model(config)
    params = model.split_params(init_params(model, SEED, config.model.dtype))
    batch = load_data(config).train_batch(np.arange(rows))
    names, x, found = [block.name for block in model.blocks], batch.x, []
    counts = {2: (3,), 3: (2, 4)}[pp]
    for place, (block, values) in enumerate(zip(model.blocks[:-1], params, strict=False)):
        x, _ = block.forward(values, x, LayerContext(starts=batch.starts))
        if place + 1 in counts:
            found.append(x.reshape(-1, x.shape[-1]))
    assert len(found) == pp - 1, names
    return found


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("pp", "dp", "zero"), [(2, 1, 0), (3, 1, 0), (2, 2, 0), (2, 2, 3)])
def test_statistics_are_float64_and_those_of_one_process(tmp_path, calibrated, pp, dp, zero, dtype):
    """P6: mean and covariance over the first tokens, whoever holds which rows."""
    split = {2: [3, 2], 3: [2, 2, 1]}[pp]
    config = config_of(
        tmp_path, parallel={"pp": pp, "dp": dp, "zero": zero, "split": split},
        model={"dtype": dtype},
    )  # fmt: skip
    train(config, pp * dp)
    rows = TOKENS // WINDOW
    for boundary, tokens in enumerate(crossing(config, pp, rows)):
        wide = tokens.astype(np.float64)
        count, depth = wide.shape
        assert count == TOKENS
        near = [r for r in range(pp * dp) if r % pp in (boundary, boundary + 1)]
        found = {rank: calibrated.totals[rank][boundary] for rank in near}
        assert {totals.dtype for totals in found.values()} == {np.dtype(np.float64)}
        assert len({totals.tobytes() for totals in found.values()}) == 1
        totals = found[near[0]]
        # The activations are float32 there and may differ in a bit; the sums may not.
        bound = TOLERANCE if dtype == "float64" else 1e-6
        assert totals[0] == count
        want = np.concatenate([wide.sum(0), (wide.T @ wide).reshape(-1)])
        np.testing.assert_allclose(totals[1:], want, rtol=bound, atol=bound * np.abs(want).max())
        decode = calibrated.weights[boundary + 1]
        np.testing.assert_allclose(
            decode[f"boundary{boundary}.decode.map.bias"], wide.mean(0), rtol=max(bound, 1e-9),
            atol=bound,
        )  # fmt: skip
        # The directions hold as much of the variance as any of so many can.
        directions = decode[f"boundary{boundary}.decode.map.weight"].astype(np.float64)
        covariance = np.cov(wide.T)
        held = np.trace(directions @ covariance @ directions.T)
        best = np.linalg.eigvalsh(covariance)[-WIDTH:].sum()
        np.testing.assert_allclose(held, best, rtol=1e-5)


def test_other_bits_on_one_rank_are_refused_by_all(tmp_path, monkeypatch):
    """Both halves from one calibration, or no run: here one side of boundary 0 sees other sums."""
    measure = calibrate._measure

    def measured(transport, *others):
        totals = measure(transport, *others)
        if transport.rank == 1:
            totals[0].totals[1:] *= 1.0 + 2.0**-40
        return totals

    monkeypatch.setattr(calibrate, "_measure", measured)
    with pytest.raises(ConfigError, match="rank 1 than on rank 0 at boundary 0") as caught:
        train(config_of(tmp_path, parallel={"pp": 3}), 3)
    assert "both halves of a bottleneck must start from one calibration" in str(caught.value)


def test_a_calibration_of_one_token_is_refused(tmp_path):
    config = config_of(
        tmp_path, model={"kind": "mlp", "hidden": [6, 5]}, parallel={"pp": 2},
        compression={"calibration_tokens": 1},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="calibration_tokens must be enough") as caught:
        train(config, 2)
    assert "got 1" in str(caught.value)


@pytest.mark.skipif(not hook_is_built(), reason="NumPy's memory is measured by the hook")
@pytest.mark.parametrize(
    ("pp", "dp", "sections"),
    [
        (3, 1, {}),
        (3, 1, {"compression": {"start": "layernorm", "grads": "int4", "error_feedback": True}}),
        (2, 2, {"parallel": {"zero": 3}, "memory": {"recompute": "full"}}),
        (2, 2, {"parallel": {"zero": 2, "schedule": "zb-h1"}, "precision": {"compute": "bfloat16"},
                "model": {"dtype": "float32"}}),
    ],
    ids=["plain", "layernorm", "zero3", "bfloat16"],
)  # fmt: skip
def test_memory_is_the_forecast_also_while_calibrating(tmp_path, monkeypatch, pp, dp, sections):
    """Difference 0 in every op, the forwards over training rows included; statistics aside."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "memory")
    exactness = importlib.import_module("exactness")
    sections = sections | {
        "memory": {"measure": "hook"} | sections.get("memory", {}),
        "parallel": {"pp": pp, "dp": dp} | sections.get("parallel", {}),
    }
    with exactness.strict_ops() as watches:
        done = train(config_of(tmp_path, **sections), pp * dp)
    assert len(watches) == pp * dp and all(watch.num_ops > 20 for watch in watches)
    found = exactness.op_differences([watch.found() for watch in watches])
    assert not found + exactness.forecast_differences(done.summary)
    assert [entry["pass"] for entry in done.summary["passes"]] == ["base", "calibrated", "trained"]


def test_tables_of_kernels_that_calibration_loads_are_aside(tmp_path, monkeypatch):
    """The layer norm's NumPy kernels make a table when they are first loaded, on whatever rank."""
    if not hook_is_built():
        pytest.skip("NumPy's memory is measured by the hook")
    load = calibrate.load_kernels
    tables = []

    def loading(name):
        tables.append(np.ones((32, 32), bool))
        return load(name)

    monkeypatch.setattr(calibrate, "load_kernels", loading)
    config = config_of(tmp_path, parallel={"pp": 2}, memory={"measure": "hook"})
    done = train(config, 2)
    assert len(tables) == 2
    for entry in done.summary["ranks"]:
        assert entry["memory"]["measured"]["gap_bytes"] == 0, entry["memory"]["measured"]


# -- straight through ------------------------------------------------------------------------------

CODECS = [
    ("int4", "none"), ("none", "int3-token"), ("int2-token", "int8"), ("fp16", "bf16"),
    ("bf16", "int2"),
]  # fmt: skip


def straight_through(model, stages, micros, codecs, feedback=False):
    """Return loss and gradients of one process that works with what the codecs leave.

    Between stages the decoded activation takes the encoded one's place; on the way back the decoded
    gradient goes to the block before as if nothing had been rounded.
    """
    forward, back = (codec_spec(name) for name in codecs)
    params = model.split_params(init_params(model, 0, np.dtype("f8")))
    ends = {stage[-1]: boundary for boundary, stage in enumerate(stages[:-1])}
    starts = {stage[0]: boundary for boundary, stage in enumerate(stages[1:])}
    total, targets, grads, lost = 0.0, sum(batch.num_targets for batch in micros), {}, {}
    for batch in micros:
        x, kept = batch.x, []
        for block, values in zip(model.blocks, params, strict=True):
            ctx = LayerContext(
                starts=batch.starts, targets=batch.targets if block is model.blocks[-1] else None
            )
            x, saved = block.forward(values, x, ctx)
            kept.append((block, values, ctx, saved))
            if block.name in ends:
                x = roundtrip(forward, x)
        total += float(x)
        dy = 1.0 / targets
        for block, values, ctx, saved in reversed(kept):
            dy, found = block.backward(values, saved, dy, ctx)
            if block.name in starts:
                if feedback:
                    dy = dy + lost.get(starts[block.name], 0.0)
                sent = roundtrip(back, dy)
                lost[starts[block.name]] = dy - sent
                dy = sent
            for local, grad in found.items():
                name = block.full_names[local]
                grads[name] = grads.get(name, 0.0) + grad
    return total / targets, grads


@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize("codecs", CODECS, ids="-".join)
@pytest.mark.parametrize("pp", [2, 3])
def test_gradients_go_straight_through(monkeypatch, pp, codecs, feedback):
    """P5: the pipeline's loss and gradients are those of the decoded values, float64 1e-12."""
    model = small_decoder(num_blocks=4, tied=False)
    parts = cut(packed_rows(12, 3), 1, 3)

    def prepare(state: EngineState) -> None:
        if feedback and state.rank > 0:
            shape = (4, *packed_rows(1, 0).x.shape[1:], 8)
            state.residuals = {state.rank - 1: np.zeros(shape)}

    done = run_engine(
        model, [parts], pp=pp, codecs=codecs, prepare=prepare, schedule={2: "1f1b", 3: "zb-h1"}[pp]
    )  # fmt: skip
    loss, grads = straight_through(model, done.plans[0].stages, parts[0], codecs, feedback)
    assert done.losses[0] == pytest.approx(loss, rel=TOLERANCE)
    found = {name: grad for rank in done.rank_grads for name, grad in rank[0].items()}
    assert found.keys() == grads.keys()
    plain = straight_through(model, done.plans[0].stages, parts[0], ("none", "none"))
    for name, grad in grads.items():
        scale = np.abs(grad).max()
        np.testing.assert_allclose(
            found[name].reshape(grad.shape), grad, rtol=0, atol=TOLERANCE * scale, err_msg=name
        )
    # Or nothing would have been compressed.
    moved = [name for name in grads if np.abs(grads[name] - plain[1][name]).max() > 1e-6 * scale]
    assert "embed.tokens.weight" in moved
