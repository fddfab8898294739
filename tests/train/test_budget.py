"""The budget: verdicts before a run, the wall while it goes on, and what a rank leaves behind."""

from __future__ import annotations

import json
import random
import threading

import numpy as np
import pytest
from budget_ranks import NO_LIMIT, budgeted, real_pairs
from mpi_worker import mpi_run
from small_jobs import make_config

import mpisim
from mpisim.comm.communicator import Communicator
from mpisim.comm.local import run_threads
from mpisim.config import config_from_mapping
from mpisim.data.load import load_data
from mpisim.engine import handlers
from mpisim.engine.state import SCRATCH_BYTES
from mpisim.errors import ConfigError, MemoryBudgetExceeded, MpisimError, PeerLost
from mpisim.launch import Job
from mpisim.memory.tracker import hook_is_built
from mpisim.nn.params import INIT_SCRATCH_BYTES
from mpisim.plan.ops import Forward
from mpisim.report import report_rows, report_text
from mpisim.trace.store import read_run
from mpisim.train import changes, loop
from mpisim.train.changes import smallest_change, with_settings
from mpisim.train.fit import DataSizes, require_fit, sizes_of, worst_forecast
from mpisim.train.setup import Setup, check

with_hook = pytest.mark.skipif(not hook_is_built(), reason="the allocator hook is not built")


def run_job(config, ranks, overwrite=True):
    """Run a job on threads; returns the errors by rank, the cause first."""

    def body(transport):
        loop.train_on(transport, Setup(config, ranks), Job(transport.rank, ranks), overwrite)

    return run_threads(body, ranks, timeout_s=20.0).errors


def worst_of(config, ranks):
    """Return the forecast of what a run of this config needs."""
    setup = Setup(config, ranks)
    return worst_forecast(setup, *sizes_of(config, load_data(config)))


def run_path(config):
    from mpisim.train.rundir import run_dir_of

    return run_dir_of(config)


# --- verdicts at the edge -------------------------------------------------------------------------


def draw_config(rng, folder, ranks=None):
    """Return a small random config and its ranks; some of them are refused for other reasons."""
    ranks = ranks or rng.choice([1, 1, 2, 3])
    micros = rng.choice([1, 1, 2, 3])
    dtype = rng.choice(["float32", "float64"])
    compute = rng.choice(["same", "same", "bfloat16", "float16"])
    reduce = rng.choice(["same", "same", "bfloat16", "float16"]) if compute != "same" else "same"
    takes_wire = reduce == "same" and dtype == "float32"
    values = {
        "run": {"dir": str(folder / "runs"), "seed": rng.randrange(100)},
        "comm": {"timeout_s": 20.0},
        "train": {
            "steps": rng.choice([1, 2]), "num_microbatches": micros,
            "global_batch": ranks * micros * rng.choice([1, 2, 5]),
            "eval_rows": rng.choice([0, 1, 7]),
        },
        "memory": {
            "static_check": False, "budget_bytes": NO_LIMIT,
            "recompute": rng.choice(["none", "selective", "full"]),
            "recompute_every": rng.choice([1, 2]),
        },
        # A skipped update needs less than one that is made: no overflow, please.
        "precision": {
            "compute": compute, "reduce": reduce, "init_scale": 1.0,
            "wire": rng.choice(["same", "bfloat16"]) if takes_wire else "same",
        },
        "optimizer": {
            "kind": rng.choice(["sgd", "adamw"]), "momentum": rng.choice([0.0, 0.9]),
            "clip_norm": rng.choice([0.0, 1.0]), "lr": 1e-3,
        },
        "compute": {"kernels": rng.choice(["numpy", "auto"])},
        "parallel": {
            "zero": rng.choice([0, 1, 2, 3]) if ranks > 1 else 0,
            "prefetch": rng.random() < 0.5, "overlap": rng.random() < 0.5,
            "bucket_bytes": rng.choice([1, 600, 1 << 20]),
        },
    }  # fmt: skip
    text = {"kind": "text", "path": str(folder / "text.txt")}
    kind = rng.choice(["decoder", "decoder", "text", "regression"])
    if kind == "decoder":
        values["data"] = text | {
            "window": rng.choice([5, 8, 16]), "layout": rng.choice(["packed", "padded"]),
        }  # fmt: skip
        values["model"] = {
            "kind": "decoder", "d_model": rng.choice([8, 16]), "num_blocks": rng.choice([1, 2, 3]),
            "num_heads": 2, "num_kv_heads": rng.choice([1, 2]), "tied": rng.random() < 0.5,
            "dropout": rng.choice([0.0, 0.1]), "loss_chunk_tokens": rng.choice([0, 3, 64]),
        }  # fmt: skip
    else:
        values["model"] = {
            "hidden": rng.choice([[], [5], [30, 7, 9]]), "embed_dim": 3,
            "activation": rng.choice(["relu", "tanh", "gelu"]),
        }  # fmt: skip
        values["data"] = text | {"window": rng.choice([3, 8]), "max_bytes": rng.choice([0, 200])}
        if kind == "regression":
            values["data"] = {
                "kind": "regression", "num_rows": rng.choice([40, 300]), "num_targets": 2,
                "num_features": rng.choice([1, 3, 40]),
            }  # fmt: skip
    values["model"]["dtype"] = dtype
    return values, ranks


def draw_pairs(folder, count, seed, ranks=None):
    """Yield (config with a budget near the edge, ranks, whether it is predicted to fit)."""
    (folder / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog; \n\n" * 60)
    rng = random.Random(seed)
    made = 0
    while made < count:
        values, on = draw_config(rng, folder, ranks)
        try:
            config = config_from_mapping(values)
            worst = worst_of(config, on)
        except ConfigError:
            continue
        share = int(worst.peak_total * rng.choice([-0.01, 0.01]))
        delta = rng.choice([-1, 0, 1, rng.randint(-400, 400), share])
        made += 1
        yield budgeted(config, worst.peak_total + delta), on, delta >= 0


@with_hook
@pytest.mark.parametrize(
    "seed", [0, 1, 2, 3, *(pytest.param(seed, marks=pytest.mark.full) for seed in (4, 5))]
)
def test_fits_means_that_the_run_ends_and_does_not_fit_that_it_hits_the_wall(tmp_path, seed):
    """A8: 4 x 50 random pairs (with --full 6) within 1% or 400 bytes of the edge of the hook."""
    verdicts = []
    for config, ranks, fits in draw_pairs(tmp_path, 50, seed):
        errors = run_job(config, ranks)
        hit = bool(errors) and isinstance(next(iter(errors.values())), MemoryBudgetExceeded)
        what = (config.model_dump_json(), ranks, fits, errors)
        assert hit or not errors, what
        assert hit != fits, what
        verdicts.append(fits)
    assert 10 <= sum(verdicts) <= 40


@pytest.mark.mpi
@with_hook
def test_verdicts_on_real_ranks(tmp_path):
    for rank in mpi_run(real_pairs, 2, folder=str(tmp_path)):
        assert [pair["hit"] for pair in rank] == [not pair["fits"] for pair in rank]
        assert [pair["fits"] for pair in rank] == [True, True, False] * 2


# --- before the run -------------------------------------------------------------------------------


def small(tmp_path, **sections):
    values = {
        "data": {"num_features": 6}, "model": {"hidden": [16, 8], "dtype": "float32"},
        "optimizer": {"kind": "adamw"}, "train": {"steps": 2, "global_batch": 960},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    values["data"] = {"num_rows": 1200} | values["data"]
    return make_config(tmp_path, **values)


def test_a_budget_is_refused_before_data_is_loaded(tmp_path, monkeypatch):
    config = small(tmp_path)
    least = worst_forecast(Setup(budgeted(config, NO_LIMIT), 2)).peak_total
    loaded = []
    monkeypatch.setattr(loop, "load_data", loaded.append)
    refused = budgeted(config, least - 1, static_check=True)
    errors = run_job(refused, 2)
    assert not loaded and not run_path(config).exists()
    (first, *_) = errors.values()
    assert isinstance(first, ConfigError)
    text = str(first)
    assert f"must stay within memory.budget_bytes = {least - 1}; got a predicted peak of at" in text
    assert f"at least {least}, 1 bytes too many, on rank 0 in Backward block=" in text
    assert "params" in text and "activations" in text
    assert "The smallest change that fits: --set train.num_microbatches=2" in text
    with pytest.raises(ConfigError, match="1 bytes too many"):
        check(refused, 2)
    check(budgeted(config, least, static_check=True), 2)
    check(refused.model_copy(update={"memory": config.memory}), 2)


def test_with_the_data_loaded_the_figures_are_exact(tmp_path, monkeypatch):
    """Between the lower bound and the exact figure only the second look can refuse."""
    config = small(tmp_path)
    exact = worst_of(budgeted(config, NO_LIMIT), 2).peak_total
    built = []
    monkeypatch.setattr(Setup, "build_state", lambda self, *_, **__: built.append(self))
    errors = run_job(budgeted(config, exact - 1, static_check=True), 2)
    (first, *_) = errors.values()
    assert isinstance(first, ConfigError) and not built
    assert f"got a predicted peak of {exact}, 1 bytes too many" in str(first)
    assert not run_path(config).exists()


def test_a_budget_below_the_model_state_says_so(tmp_path):
    config = small(tmp_path)
    params = 6 * 16 + 16 + 16 * 8 + 8 + 8 * 2 + 2
    with pytest.raises(ConfigError) as refused:
        check(budgeted(config, 1000, static_check=True), 2)
    text = str(refused.value)
    assert text.startswith(
        f"memory.budget_bytes must hold at least the parameters and what belongs to them; got 1000 "
        f"for {16 * params} bytes on rank 0 (params 1.04 KiB, grads 1.04 KiB, optimizer 2.08 KiB), "
        f"{16 * params - 1000} bytes too few"
    )
    assert "No change of one or two settings was found that fits" in text


def test_the_short_last_batch_and_the_evaluation_count(tmp_path):
    """A run that never gets to the short batch is not charged for it."""
    config = small(tmp_path, train={"steps": 1, "eval_rows": 5})
    data = load_data(config)
    assert sizes_of(config, data) == DataSizes(data.nbytes, 5, 0)
    longer = with_settings(config, [("train.steps", 2), ("train.eval_rows", 0)])
    assert sizes_of(longer, data) == DataSizes(data.nbytes, data.num_heldout, data.num_train - 960)
    setup = Setup(config, 1)
    planned, real = [], setup.train_plan
    setup.train_plan = lambda num_rows: planned.append(num_rows) or real(num_rows)
    worst_forecast(setup, short_rows=7)
    assert {7, 960} <= set(planned)
    alone = worst_forecast(setup)
    assert alone.plan.startswith("train-")
    assert worst_forecast(setup, eval_rows=50_000).plan.startswith("eval-")


@pytest.mark.parametrize(("ranks", "zero"), [(1, 1), (1, 3)])
def test_zero_with_one_rank_is_refused(tmp_path, ranks, zero):
    config = small(tmp_path, parallel={"zero": zero})
    with pytest.raises(ConfigError, match=f"must be 0 with one rank.*; got {zero}. Set"):
        Setup(config, ranks)


def test_more_ranks_than_parameters_is_refused(tmp_path):
    """E: with stage 0 the same ranks are fine."""
    config = make_config(
        tmp_path, data={"num_features": 1, "num_targets": 1}, model={"hidden": []},
        train={"global_batch": 24}, parallel={"zero": 3},
    )  # fmt: skip
    Setup(config, 2)
    with pytest.raises(
        ConfigError, match="must leave every rank a parameter; got 2 parameters for"
    ):
        Setup(config, 3)
    Setup(with_settings(config, [("parallel.zero", 0)]), 3)


# --- the smallest change --------------------------------------------------------------------------


@with_hook
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.35])
def test_the_smallest_change_really_fits(tmp_path, share):
    """Tried on the plan, not guessed: with it the same budget is kept by a run."""
    config = make_config(
        tmp_path, "text", train={"steps": 1, "global_batch": 16, "eval_rows": 3},
        data={"window": 16}, optimizer={"kind": "adamw"},
        model={
            "kind": "decoder", "d_model": 16, "num_blocks": 3, "num_heads": 2, "dtype": "float32",
        },
    )  # fmt: skip
    (tmp_path / "text.txt").write_bytes(b"some words of a text; \n\n" * 100)
    config = budgeted(config, NO_LIMIT)
    setup = Setup(config, 2)
    sizes = sizes_of(config, load_data(config))
    worst = worst_forecast(setup, *sizes)
    state = sum(worst.at_peak.values()) - worst.at_peak["activations"]
    budget = int(state + share * worst.at_peak["activations"])
    tight = budgeted(config, budget)
    change = smallest_change(tight, 2, *sizes)
    assert change is not None and change.peak_total <= budget
    assert change.peak_total == worst_of(change.config, 2).peak_total
    assert not run_job(change.config, 2)
    errors = run_job(budgeted(change.config, change.peak_total - 1), 2)
    assert isinstance(next(iter(errors.values())), MemoryBudgetExceeded)


def test_the_cheapest_change_comes_first(tmp_path):
    """More microbatches cost nothing with stage 0; recompute and a ZeRO stage do."""
    config = small(tmp_path, train={"global_batch": 960}, model={"hidden": [64, 64, 64]})
    config = budgeted(config, worst_forecast(Setup(budgeted(config, NO_LIMIT), 2)).peak_total - 1)
    change = smallest_change(config, 2)
    assert change.settings == (("train.num_microbatches", 2),)
    assert change.work.score == changes.work_of(Setup(config, 2)).score
    assert not change.changes_numbers
    # With one row a rank there is nothing to cut; less is sent nowhere, so 16-bit numbers, which
    # change results, are the last resort and pairs come after all single changes.
    cut = with_settings(config, [("train.global_batch", 2), ("train.num_microbatches", 1)])
    cut = budgeted(cut, worst_forecast(Setup(budgeted(cut, NO_LIMIT), 2)).peak_total - 1)
    again = smallest_change(cut, 2)
    assert again is not None and len({name for name, _ in again.settings}) == 1
    assert not again.changes_numbers


def test_a_search_gives_up_in_time(tmp_path):
    config = budgeted(small(tmp_path), 10)
    assert smallest_change(config, 2, until_s=0.0) is None


# --- while it runs --------------------------------------------------------------------------------


def assert_left_readable(path, rank, ranks):
    """The record, the traces and the report of a job that hit the wall."""
    record = json.loads((path / f"memory-rank-{rank:04d}.json").read_text())
    assert record["rank"] == rank
    traces = read_run(path)
    assert [trace.rank for trace in traces] == list(range(ranks))
    assert not any(trace.truncated for trace in traces)
    text = report_text(path)
    assert f"OVER BUDGET: rank {rank} " in text and "INCOMPLETE" in text
    assert record["advice"] in text
    (row,) = [r for r in report_rows(path) if r["section"] == "over_budget" and r["rank"] == rank]
    assert row["op"] == record["op"] and row["missing_bytes"] == record["missing_bytes"]
    return record


@pytest.mark.parametrize("measure", [pytest.param("hook", marks=with_hook), "off"])
def test_the_rank_that_hits_the_wall_leaves_a_record(tmp_path, measure):
    """One byte less than rank 0 needs: only rank 0, which collects figures, hits the wall."""
    config = small(tmp_path)
    worst = worst_of(budgeted(config, NO_LIMIT), 3)
    assert worst.rank == 0
    errors = run_job(budgeted(config, worst.peak_total - 1, measure=measure), 3)
    assert next(iter(errors)) == 0 and set(errors) == {0, 1, 2}
    first = errors.pop(0)
    assert isinstance(first, MemoryBudgetExceeded)
    assert all(isinstance(error, PeerLost) for error in errors.values())
    record = assert_left_readable(run_path(config), 0, 3)
    assert record["step"] == 0 and record["op"] == worst.peak_op
    assert f"block={record['block']} micro={record['micro']}" in worst.peak_op
    assert record["missing_bytes"] == 1
    assert record["predicted_peak_bytes"] == worst.peak_total
    assert record["live"]["activations"] > 0
    assert sum(record["live"].values()) == record["held_bytes"]
    change = record["smallest_change"]
    assert change["predicted_peak_bytes"] < worst.peak_total
    text = str(first)
    assert change["options"] in text and worst.peak_op in text
    assert f"The run needs {worst.peak_total} bytes, 1 more, on rank 0" in text
    assert not (run_path(config) / "memory-rank-0001.json").exists()


@with_hook
def test_code_that_forgot_the_ledger_hits_the_wall(tmp_path, monkeypatch):
    """Arrays that nobody registered: the plan fits, the allocator says no."""
    config = small(tmp_path, train={"steps": 3})
    worst = worst_of(budgeted(config, NO_LIMIT), 2)
    real, hoard, lock = handlers.HANDLERS[Forward], [], threading.Lock()

    def leaking(state, op):
        real(state, op)
        if state.rank == 1 and state.step.step == 1:
            with lock:
                hoard.append(np.ones(5000))

    monkeypatch.setitem(handlers.HANDLERS, Forward, leaking)
    errors = run_job(budgeted(config, worst.peak_total + 1000), 2)
    hoard.clear()
    first = errors[1]
    assert next(iter(errors)) == 1 and isinstance(first, MemoryBudgetExceeded)
    assert "look for code that allocates what the plan does not know of" in str(first)
    record = assert_left_readable(run_path(config), 1, 2)
    assert record["step"] == 1 and record["op"].startswith(("Forward", "Backward"))
    assert record["measured_bytes"] - record["held_bytes"] >= 40_000 or record["asked_bytes"] >= 8
    assert record["smallest_change"] is None
    # The step before is in the trace, and in the report.
    assert "1 of 3 steps" in report_text(run_path(config))


@pytest.mark.parametrize("budget", [0, NO_LIMIT])
def test_a_memory_error_that_is_not_ours_stays_what_it_is(tmp_path, monkeypatch, budget):
    """The machine is full: nothing of it is about the budget."""
    real = handlers.HANDLERS[Forward]
    error = MemoryError("the machine is full")

    def failing(state, op):
        if state.rank == 1:
            raise error
        real(state, op)

    monkeypatch.setitem(handlers.HANDLERS, Forward, failing)
    config = budgeted(small(tmp_path), budget)
    errors = run_job(config, 2)
    assert next(iter(errors)) == 1 and errors[1] is error
    assert not list(run_path(config).glob("memory-*"))


@pytest.mark.parametrize("measure", [pytest.param("hook", marks=with_hook), "off"])
def test_a_state_that_does_not_fit_ends_before_the_first_step(tmp_path, measure):
    config = budgeted(small(tmp_path, model={"hidden": [40, 40]}), 40_000, measure=measure)
    errors = run_job(config, 2)
    exceeded = [e for e in errors.values() if isinstance(e, MemoryBudgetExceeded)]
    assert exceeded and set(errors) == {0, 1}
    records = [json.loads(p.read_text()) for p in run_path(config).glob("memory-rank-*.json")]
    assert len(records) == len(exceeded)
    assert all(record["step"] is None and record["op"] == "start" for record in records)
    assert "OVER BUDGET: rank" in report_text(run_path(config))
    assert "before the first step" in report_text(run_path(config))


@with_hook
def test_the_budget_ends_before_the_weights_are_gathered(tmp_path):
    """Stage 3: no rank ever holds all parameters while it trains, but rank 0 writes them."""
    config = small(
        tmp_path, model={"hidden": [200] * 12, "dtype": "float64"},
        train={"steps": 1, "global_batch": 3}, parallel={"zero": 3},
        optimizer={"kind": "sgd", "momentum": 0.0},
    )  # fmt: skip
    config = budgeted(config, NO_LIMIT)
    worst = worst_of(config, 3)
    whole = 8 * sum(param.size for param in Setup(config, 3).model.param_specs())
    assert whole + sum(worst.state.values()) > worst.peak_total
    assert not run_job(budgeted(config, worst.peak_total), 3)
    assert (run_path(config) / "weights.safetensors").stat().st_size > whole


@with_hook
def test_a_figure_about_the_data_is_not_charged(tmp_path):
    """Baselines of a text take 256 x 256 counts, more than this run needs at all."""
    config = make_config(
        tmp_path, "text", model={"hidden": [], "dtype": "float32"},
        train={"steps": 1, "global_batch": 2, "eval_rows": 1},
    )  # fmt: skip
    config = budgeted(config, NO_LIMIT)
    worst = worst_of(config, 1)
    assert worst.peak_total < 256 * 256 * 8
    assert not run_job(budgeted(config, worst.peak_total), 1)


def test_drawing_the_first_weights_takes_less_than_the_scratch_that_comes_last():
    """So building the state never needs more than the state."""
    assert INIT_SCRATCH_BYTES <= SCRATCH_BYTES


@with_hook
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_nothing_is_allocated_between_the_first_and_the_last_message(tmp_path, monkeypatch, zero):
    """So a budget cannot be hit inside a ring, where the others would wait for the rest of it.

    In-process messages are copies that the twin of MPI makes; they are told apart by size 0 here:
    synchronous sends make none.
    """
    found = {"runs": 0, "allocations": 0}
    lock, trackers = threading.Lock(), threading.local()

    def counted(name):
        real = getattr(Communicator, name)

        def run(self, *arguments):
            counter = getattr(trackers, "counter", None)
            before = counter.allocations if counter else 0
            done = real(self, *arguments)
            if counter:
                with lock:
                    found["runs"] += 1
                    found["allocations"] += counter.allocations - before
            return done

        monkeypatch.setattr(Communicator, name, run)

    counted("_run")
    counted("advance")
    counted("wait")
    opened = loop.open_tracker

    def open_tracker(kind):
        tracker = opened(kind)
        trackers.counter = tracker._counter
        return tracker

    monkeypatch.setattr(loop, "open_tracker", open_tracker)
    config = small(
        tmp_path, comm={"synchronous_sends": True}, parallel={"zero": zero, "bucket_bytes": 500},
        train={"num_microbatches": 2},
    )  # fmt: skip

    def body(transport):
        loop.train_on(transport, Setup(config, 3), Job(transport.rank, 3), True)

    assert not run_threads(body, 3, timeout_s=20.0, synchronous=True).errors
    assert found["runs"] > 100
    assert found["allocations"] == 0


def test_no_check_is_made_without_a_budget_or_if_it_is_switched_off(tmp_path, monkeypatch):
    def never(*_, **__):
        raise MpisimError("a forecast was made")

    monkeypatch.setattr("mpisim.train.fit.worst_forecast", never)
    require_fit(Setup(small(tmp_path), 2))
    require_fit(Setup(budgeted(small(tmp_path), 10), 2))


@pytest.mark.mpi
@with_hook
@pytest.mark.parametrize("overlap", [True, False])
def test_a_hit_ends_all_real_ranks(tmp_path, capfd, overlap):
    """Only rank 0 hits the wall, the others wait for it: no hang, one clear line, status 1."""
    config = small(tmp_path, parallel={"overlap": overlap, "bucket_bytes": 300})
    worst = worst_of(budgeted(config, NO_LIMIT), 3)
    config = budgeted(config, worst.peak_total - 1)
    with pytest.raises(MpisimError, match="must end with status 0; got 1"):
        mpisim.run(config, ranks=3, transport="mpi")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("mpisim: rank 0: at step 0: memory of a rank must stay within")
    assert "The smallest change that fits: --set" in line
    record = assert_left_readable(run_path(config), 0, 3)
    assert record["op"] == worst.peak_op and record["missing_bytes"] == 1
