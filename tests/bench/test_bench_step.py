"""`mpisim bench step`: its config, table, batches, comparison and clocks; all without PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mpisim.bench
from mpisim.bench import step_profile, step_rank
from mpisim.bench.step import bench_config, bench_step, step_text
from mpisim.bench.step_profile import KERNEL_KINDS, LAYER_KINDS, Clock, profile_steps
from mpisim.bench.step_rank import OurTrainer, compare, make_batch
from mpisim.cli import main
from mpisim.comm.local import run_threads
from mpisim.data.batch import IGNORED
from mpisim.engine.handlers import HANDLERS
from mpisim.errors import ConfigError, MpisimError
from mpisim.nn import attention, kernels_numpy, losses, transformer
from mpisim.trace.recorder import Recorder

TINY = (
    "model.d_model=8",
    "model.num_blocks=2",
    "model.num_heads=2",
    "model.d_ff=12",
    "model.vocab_size=270",
    "data.window=6",
)


# --- config ----------------------------------------------------------------------------------


def test_the_timed_decoder_is_the_one_that_the_bars_are_set_for():
    config = bench_config(2, "float32", "numpy", 8)
    model = config.model
    assert (model.kind, model.d_model, model.num_blocks, model.num_heads, model.d_ff) == (
        "decoder", 256, 4, 4, 1024,
    )  # fmt: skip
    assert model.tied and (model.vocab_size, model.num_kv_heads, config.data.window) == (0, 0, 128)
    assert (config.train.global_batch, config.train.num_microbatches) == (16, 1)
    assert (config.compute.kernels, config.memory.recompute) == ("numpy", "none")
    assert (config.optimizer.kind, model.dropout, config.parallel.dp) == ("adamw", 0.0, 0)


@pytest.mark.parametrize(
    ("dtype", "stored", "compute"),
    [
        ("float32", "float32", "same"),
        ("float64", "float64", "same"),
        ("bfloat16", "float32", "bfloat16"),
        ("float16", "float32", "float16"),
    ],
)
def test_a_dtype_is_that_of_activations_with_float32_masters(dtype, stored, compute):
    config = bench_config(1, dtype, "numpy", 8)
    assert (config.model.dtype, config.precision.compute) == (stored, compute)
    assert config.precision.reduce == "same"


def test_overrides_change_the_model_and_the_run():
    config = bench_config(1, "float32", "auto", 2, [*TINY, "memory.recompute=full"])
    assert (config.model.d_model, config.data.window, config.train.global_batch) == (8, 6, 2)
    assert config.memory.recompute == "full"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.kind=mlp", "model.kind must be decoder"),
        ("model.dropout=0.5", "model.dropout must be 0.0"),
        ("optimizer.kind=sgd", "optimizer.kind must be adamw"),
        ("optimizer.clip_norm=1.0", "optimizer.clip_norm must be 0.0"),
        ("train.global_batch=3", "--rows"),
        ("version=1", "field of a section"),
        ("model.widht=3", "widht"),
    ],
)
def test_what_makes_the_sides_differ_is_refused(override, words):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        bench_config(1, "float32", "numpy", 8, [override])


def test_without_pytorch_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("mpisim.bench.step.start_ranks", lambda *_: pytest.fail("was started"))
    with pytest.raises(ConfigError, match=r"PyTorch must be .*'mpisim\[torch\]'"):
        bench_step()


def test_nothing_loads_pytorch_before_the_measurement():
    code = (
        "import sys, mpisim.bench, mpisim.bench.step_rank, mpisim.bench.ranks, mpisim.cli\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60).returncode == 0


# --- command line and table ------------------------------------------------------------------


def test_the_command_hands_on_its_options(capsys, monkeypatch):
    calls = []

    def measure(**options):
        calls.append(options)
        return SimpleNamespace(status=options["ranks"] - 1, text="a table", rows=[{"ratio": 1.0}])

    monkeypatch.setattr(mpisim.bench, "bench_step", measure)
    assert main(["bench", "step"]) == 0
    assert capsys.readouterr().out == "a table\n"
    words = "--dtype bfloat16 --kernels numpy --rounds 3 --rows 2 --set model.d_model=8".split()
    assert main(["bench", "step", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"ratio": 1.0}]
    assert main(["bench", "step", "--ranks", "2"]) == 1
    defaults = {
        "ranks": 1, "dtype": "float32", "kernels": "auto", "rounds": 15, "rows": 8, "overrides": (),
    }  # fmt: skip
    changed = {
        "dtype": "bfloat16", "kernels": "numpy", "rounds": 3, "rows": 2,
        "overrides": ("model.d_model=8",),
    }  # fmt: skip
    assert calls == [defaults, defaults | changed, defaults | {"ranks": 2}]


def test_the_table_shows_both_sides_and_the_profile():
    row = {
        "model": {
            "d_model": 8, "num_blocks": 2, "num_heads": 4, "num_kv_heads": 2, "d_ff": 12,
            "vocab_size": 270, "tied": True, "window": 50, "rows": 10,
        },
        "ranks": 2, "threads": 1, "dtype": "bfloat16", "kernels": "numba",
        "tokens_per_s": 5000.0, "torch_tokens_per_s": 4000.0, "ratio": 1.25,
        "torch_variants": {
            "separate": {"tokens_per_s": 4000.0, "ratio": 1.25},
            "joined": {"tokens_per_s": 2500.0, "ratio": 2.0},
        },
        "float32": {"tokens_per_s": 6250.0, "cost": 1.2345},
        "torch_version": "9.8.7", "gradient_error": {"float32": 2e-6}, "rounds": 7, "quiet": True,
        "profile": {"matmul": {"seconds": 0.15, "share": 0.75},
                    "norm": {"seconds": 0.05, "share": 0.25}},
    }  # fmt: skip
    text = step_text(row, "Some MPI")
    lines = {line.split("  ")[0].strip(): line.split()[-3:] for line in text.splitlines()}
    assert lines["mpisim bfloat16, numba kernels"][1:] == ["200.0", "5000"]
    assert lines["mpisim float32"][1:] == ["160.0", "6250"]
    assert "bfloat16 takes 1.23x the time of float32" in text
    assert lines["PyTorch 9.8.7 DDP, separate"] == ["250.0", "4000", "1.25"]
    assert lines["PyTorch 9.8.7 DDP, joined"] == ["400.0", "2500", "2.00"]
    assert "ratio 1.25" in text and "(200.0 ms)" in text and "2.0e-06 (float32)" in text
    assert "DISTURBED" not in text
    alone = row | {"ranks": 1, "float32": None, "quiet": False}
    text = step_text(alone, "Some MPI")
    assert "eager" in text and "DDP" not in text and "DISTURBED" in text
    assert "mpisim float32" not in text


# --- batches and comparison ------------------------------------------------------------------


def test_targets_are_the_next_tokens_where_there_are_any():
    plain = make_batch(np.random.default_rng(0), 3, 12, 20)
    assert plain.starts is None and plain.num_targets == 36
    np.testing.assert_array_equal(plain.targets[:, :-1], plain.x[:, 1:])
    padded = make_batch(np.random.default_rng(0), 3, 12, 20, padded=True)
    counts = np.count_nonzero(padded.targets != IGNORED, axis=1)
    assert len(set(counts)) == 3 and 0 < counts.min() and counts.max() < 12
    packed = make_batch(np.random.default_rng(0), 3, 12, 20, packed=True)
    columns = np.arange(12)
    assert (packed.starts <= columns).all() and packed.starts.max() > 0
    # A document's last token predicts nothing: the next one belongs to another document.
    ends = packed.starts[:, 1:] != packed.starts[:, :-1]
    np.testing.assert_array_equal(packed.targets[:, :-1] == IGNORED, ends)


def test_a_difference_is_told_with_the_tensor_name():
    right = {"a": np.array([1.0, -4.0]), "b": np.array([[2.0]])}
    same = {name: array.copy() for name, array in right.items()}
    assert compare(3.0, same, 3.0, right, 1e-9, "here") == 0.0
    off = same | {"a": np.array([1.0 + 4e-3, -4.0])}
    assert compare(3.0, off, 3.0, right, 1e-2, "here") == pytest.approx(1e-3)
    for loss, grads, words in (
        (3.0, off, r"gradient of a must equal.*0\.001 \(here\)"),
        (3.1, same, r"the loss must equal"),
        (float("nan"), same, r"the loss must equal.*nan"),
        (3.0, same | {"b": np.array([[np.nan]])}, r"gradient of b must.*nan"),
        (3.0, same | {"b": np.array([2.0])}, r"gradient of b must.*inf"),
        (3.0, {"a": right["a"]}, r"same tensors; got b on one"),
    ):
        with pytest.raises(MpisimError, match=words):
            compare(loss, grads, 3.0, right, 1e-4, "here")


# --- clocks ----------------------------------------------------------------------------------


def test_a_clock_counts_each_moment_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_profile, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = Clock()

    def work(seconds, *inner):
        now[0] += seconds
        for call in inner:
            call()
        now[0] += seconds

    kernel = clock.timed("norm", lambda: work(1.0))
    layer = clock.timed("matmul", lambda: work(10.0, kernel, kernel))
    clock.timed("other", lambda: work(100.0, layer, kernel))()
    assert clock.seconds == {"norm": 6.0, "matmul": 20.0, "other": 200.0}
    assert sum(clock.seconds.values()) == now[0]


def test_what_the_profile_names_exists():
    for name in KERNEL_KINDS:
        assert hasattr(kernels_numpy, name), name
    for name in LAYER_KINDS:
        assert any(hasattr(module, name) for module in (transformer, attention, losses)), name


def run_tiny(steps, *overrides, profiled=False):
    """Run updates of a tiny decoder; return the losses, the profile and the state."""
    config = bench_config(1, "float32", "numpy", 2, [*TINY, *overrides])
    batch = make_batch(np.random.default_rng(1), 2, 6, 20)
    found = {}

    def body(transport):
        trainer = OurTrainer(transport, config, batch, Recorder())
        found["losses"] = [trainer() for _ in range(steps)]
        if profiled:
            found["profile"] = profile_steps(trainer.state, trainer, 2)
        found["losses"] += [trainer()]
        found["state"] = trainer.state

    for error in run_threads(body, 1).errors.values():
        raise error
    return found


def test_the_profile_leaves_the_engine_as_it_was():
    """Clocks change neither the numbers nor, afterwards, the engine."""
    handlers = dict(HANDLERS)
    timed, plain = run_tiny(1, profiled=True), run_tiny(3)
    assert handlers == HANDLERS
    assert timed["state"].kernels is plain["state"].kernels
    assert timed["losses"][-1] == plain["losses"][-1] < plain["losses"][0]
    for name, array in plain["state"].master.items():
        np.testing.assert_array_equal(timed["state"].master[name], array)
    for name, block in plain["state"].blocks.items():
        again = timed["state"].blocks[name]
        assert [type(layer) for _, layer in again.layers] == [type(x) for _, x in block.layers]


def test_the_profile_has_every_kind_of_work_and_adds_up():
    profile = run_tiny(1, profiled=True)["profile"]
    assert set(profile) == {
        "matmul", "attention", "norm", "rotary", "softmax", "swiglu", "loss", "embedding",
        "optimizer", "messages", "other",
    }  # fmt: skip
    assert all(part["seconds"] > 0 for part in profile.values())
    assert sum(part["share"] for part in profile.values()) == pytest.approx(1.0)
    shares = [part["share"] for part in profile.values()]
    assert shares == sorted(shares, reverse=True)


def test_16_bit_storage_shows_its_casts():
    assert "casts" in run_tiny(1, "precision.compute=bfloat16", profiled=True)["profile"]


def test_microbatches_and_recompute_may_be_measured():
    losses = [
        run_tiny(2, *more)["losses"]
        for more in ((), ("train.num_microbatches=2",), ("memory.recompute=full",))
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    assert losses[2] == losses[0]


def test_a_skipped_step_is_no_measurement():
    with pytest.raises(MpisimError, match="must not be skipped.*precision.init_scale"):
        run_tiny(1, "precision.compute=float16", "precision.loss_scale=dynamic",
                 "precision.init_scale=1e30")  # fmt: skip


# --- rounds ----------------------------------------------------------------------------------


class OneRank:
    """A transport of one rank, as far as rounds ask."""

    size, rank = 1, 0

    def __init__(self):
        self.raw = self

    def barrier(self):
        pass

    def Allgather(self, mine, everyone):
        everyone[:] = mine

    def allreduce(self, value):
        return value

    def bcast(self, value, root):
        return value


@pytest.mark.parametrize(("wrong", "told"), [(0.0, False), (5e-5, False), (2e-4, True)])
def test_updates_that_go_apart_end_the_benchmark(wrong, told):
    def side(factor):
        losses = iter([4.0, 3.0, 2.0 * (1.0 + factor)])
        return lambda: next(losses)

    calls = {"ours": side(0.0), "separate": side(0.0), "joined": side(wrong)}
    if not told:
        step_rank._warm_up(OneRank(), calls, 1e-4)
        return
    with pytest.raises(MpisimError, match=r"losses of 3 updates must equal.*\(joined\)"):
        step_rank._warm_up(OneRank(), calls, 1e-4)


@pytest.mark.parametrize(
    ("shares", "wanted", "kept", "quiet"),
    [
        ([0.0, 0.0], 2, [0, 1], True),
        ([0.0, 0.5, float("nan")], 2, [0, 2], True),
        # Too few quiet ones: the least disturbed fill up.
        ([0.9, 0.6, 0.0, 0.8, 0.7, 0.4, 0.9, 0.9], 2, [2, 5], False),
        # Out of time after twelve: five quiet ones are enough, four are not.
        ([0.5] * 7 + [0.0] * 5, 6, [7, 8, 9, 10, 11], True),
        ([0.5] * 7 + [0.3] + [0.0] * 4, 6, [8, 9, 10, 11, 7, 0], False),
    ],
)
def test_rounds_that_others_disturbed_are_dropped(monkeypatch, shares, wanted, kept, quiet):
    left = list(shares)
    now = [0.0]
    monkeypatch.setattr(step_rank, "foreign_share", lambda *_: left.pop(0))
    monkeypatch.setattr(step_rank, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    calls, order = {"a": 0, "b": 0}, []

    def call(name, cost):
        def run():
            order.append(name)
            calls[name] += 1
            now[0] += cost * calls[name]

        return run

    # Ends inside of the twelfth round.
    monkeypatch.setattr(step_rank, "MAX_ROUNDS_S", 11.0 * sum(range(1, 13)) - 1.0)
    both = [call("a", 1.0), call("b", 10.0)]
    times, found = step_rank._rounds(OneRank(), both, wanted)
    assert found is quiet and not left
    assert order[:4] == ["a", "b", "b", "a"]  # none always follows the same
    np.testing.assert_allclose(times, [[1 + n, 10.0 * (1 + n)] for n in kept])
