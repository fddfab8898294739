"""What all ranks must agree on before the first message of a step, and at the end."""

from __future__ import annotations

import pytest
from small_jobs import make_config, train

import mpisim
import mpisim.train.loop as loop
from mpisim.comm.local import run_threads
from mpisim.engine import handlers
from mpisim.errors import CommError, ConfigError, MpisimError, PeerLost, PlanError
from mpisim.launch import Job
from mpisim.plan.ops import OptimizerStep
from mpisim.train.loop import train_on
from mpisim.train.setup import Setup
from mpisim.train.summary import assert_replicas_equal


def run_with(configs, **options):
    """Run one job whose ranks were given different configs."""

    def body(transport):
        setup = Setup(configs[transport.rank], len(configs))
        train_on(transport, setup, Job(transport.rank, len(configs)), overwrite=False)

    return run_threads(body, len(configs), timeout_s=20.0, **options)


def told(done, kind=ConfigError):
    """Return what the job says: every rank raised `kind`, or saw that another one had ended."""
    assert len(done.errors) == len(done.results)
    first, *others = done.errors.values()
    assert type(first) is kind
    for error in others:
        assert type(error) in (kind, PeerLost)
        assert isinstance(error, PeerLost) or str(error) == str(first)
    return str(first)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"optimizer": {"lr": 0.5}}, "config"),
        ({"run": {"seed": 8}}, "config"),
        ({"model": {"hidden": [6]}}, "config"),
        ({"train": {"steps": 5}}, "config"),
        ({"comm": {"timeout_s": 21.0}}, "config"),
        ({"trace": {"enabled": False}}, "config"),
    ],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_with_another_config_is_named(tmp_path, change, what, odd):
    """Issue 2: hosts with different files; every rank says the same sentence."""
    configs = [make_config(tmp_path) for _ in range(3)]
    configs[odd] = make_config(tmp_path, **change)
    done = run_with(configs)
    other = odd or 1
    text = told(done)
    assert text.startswith(f"all ranks must have the same {what}; got ")
    assert "on rank 0" in text and f"on rank {other} (" in text
    assert "Give every host the same files" in text
    assert not (tmp_path / "runs").exists()  # nothing was made


def test_a_rank_with_another_text_is_named(tmp_path):
    """The same path names another file on one host."""
    config = make_config(tmp_path, "text")

    def body(transport):
        data = loop.load_data(config)
        if transport.rank == 1:
            data._source["sha256"] = "0" * 64
        loop._agree_and_create(transport, Setup(config, 2), data, False)

    done = run_threads(body, 2, timeout_s=20.0)
    text = told(done)
    assert "the same data; got" in text and "on rank 1" in text


def test_versions_are_compared(tmp_path, monkeypatch):
    """A rank with another NumPy may round differently."""
    config = make_config(tmp_path)

    class Skewed:
        """A transport that changes what rank 1 tells."""

        def __init__(self, transport):
            self._inner = transport

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def exchange(self, text):
            import numpy as np

            if self._inner.rank == 1:
                text = text.replace(f'"NumPy version": "{np.__version__}"', '"NumPy version": "0"')
            return self._inner.exchange(text)

    def body(transport):
        train_on(Skewed(transport), Setup(config, 2), Job(transport.rank, 2), overwrite=False)

    done = run_threads(body, 2, timeout_s=20.0)
    text = told(done)
    assert "the same NumPy version; got" in text and "0 on rank 1" in text


def test_a_refused_run_directory_is_told_by_every_rank(tmp_path):
    """Only rank 0 looks; all end with its sentence."""
    config = make_config(tmp_path)
    mpisim.run(config, ranks=1, transport="local")
    assert "run directory must be new" in told(run_with([config] * 3))


def test_a_directory_that_cannot_be_made_is_told_by_every_rank(tmp_path, monkeypatch):
    def fail(path, overwrite):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(loop, "create_run_dir", fail)
    assert "No space left on device" in told(run_with([make_config(tmp_path)] * 3))


# --- the end ---------------------------------------------------------------------------------


def test_replicas_that_drift_apart_fail_the_job(tmp_path, monkeypatch):
    """A5: replicas are bitwise equal, or the run is no success."""
    real = handlers.HANDLERS[OptimizerStep]

    def drift(state, op):
        real(state, op)
        if state.rank == 1 and state.step.step == 2:
            first = next(iter(state.params.values()))
            first.ravel()[0] += 1e-15 * abs(first.ravel()[0]) + 1e-300

    monkeypatch.setitem(handlers.HANDLERS, OptimizerStep, drift)
    with pytest.raises(MpisimError, match=r"replicas must hold the same bits; got 2 different"):
        train(make_config(tmp_path), 3)


def test_equal_replicas_pass():
    assert_replicas_equal([{"params_sha256": "a"}] * 3)
    with pytest.raises(PlanError, match="3 different sets"):
        assert_replicas_equal([{"params_sha256": name} for name in "abca"])


def test_a_message_that_nobody_received_fails_the_job(tmp_path, monkeypatch):
    """DESIGN: all that was sent was received, per pair and tag."""
    import numpy as np

    def stray(state, op):
        real(state, op)
        if state.rank == 0 and state.step.step == 1:
            transport = state.dp.transport
            message = transport.prepare_send(np.zeros(3), 1, 9)
            message.start()
            transport.counts.add(message)

    real = handlers.HANDLERS[OptimizerStep]
    monkeypatch.setitem(handlers.HANDLERS, OptimizerStep, stray)
    with pytest.raises(CommError, match="every message must be received by the end of the job"):
        train(make_config(tmp_path), 2)
