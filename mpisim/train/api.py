"""`mpisim.run`: the command line's training job, from Python."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpisim.config import dump_config
from mpisim.config.schema import RunConfig
from mpisim.errors import ConfigError, MpisimError
from mpisim.train.rundir import check_run_dir, read_json, run_dir_of


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    path: Path
    """The run directory."""
    record: dict[str, Any]
    """run.json."""
    summary: dict[str, Any]
    """summary.json."""
    params: dict[str, Any] | None = None
    """Final parameters by name (ndarrays), of all stages; only with transport "local"."""


def run(
    config: RunConfig,
    *,
    ranks: int | None = None,
    overwrite: bool = False,
    transport: str = "mpi",
) -> RunResult:
    """Train a run and wait for it.

    Parameters
    ----------
    config : RunConfig
    ranks : int, optional
        Ranks to start; by default `parallel.dp` * `parallel.pp`.
    overwrite : bool
        Replace an earlier run of the same name.
    transport : {"mpi", "local"}
        Processes over MPI, or threads of this process.

    Returns
    -------
    RunResult

    Raises
    ------
    ConfigError
        The config, the number of ranks or the run directory breaks a rule; nothing was started.
    MpisimError
        The job failed; its own message is on standard error.
    """
    num_ranks = config.parallel.dp * config.parallel.pp if ranks is None else ranks
    if num_ranks < 1:
        got = "neither ranks nor parallel.dp" if ranks is None else f"ranks={ranks}"
        raise ConfigError(f"the number of ranks must be 1 or more; got {got}. Pass ranks=N.")
    check_run_dir(config, overwrite)
    path = run_dir_of(config).absolute()
    params = None
    if transport == "local":
        params = _run_threads(config, num_ranks, overwrite)
    elif transport == "mpi":
        _run_processes(config, num_ranks, overwrite)
    else:
        raise ConfigError(f'transport must be "mpi" or "local"; got {transport!r}. Choose one.')
    return RunResult(path, read_json(path / "run.json"), read_json(path / "summary.json"), params)


def _run_processes(config: RunConfig, ranks: int, overwrite: bool) -> None:
    from mpisim.launch import EXIT_DONE, EXIT_WRONG_USE, launch, rank_command

    with tempfile.TemporaryDirectory(prefix="mpisim-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(dump_config(config), encoding="utf-8")
        words = ["train", str(file)]
        if overwrite:
            words.append("--overwrite")
        status = launch(rank_command(words), ranks)
    if status != EXIT_DONE:
        kind = ConfigError if status == EXIT_WRONG_USE else MpisimError
        raise kind(
            f"the job must end with status 0; got {status}. Its own message is on standard error."
        )
    sys.stdout.flush()


def _run_threads(config: RunConfig, ranks: int, overwrite: bool) -> dict[str, Any]:
    from mpisim.comm.local import LocalTransport, run_threads
    from mpisim.launch import Job
    from mpisim.train.loop import train_on
    from mpisim.train.setup import Setup

    setups = [Setup(config, ranks) for _ in range(ranks)]

    def body(transport: LocalTransport) -> dict[str, Any]:
        job = Job(transport.rank, transport.size)
        return train_on(transport, setups[transport.rank], job, overwrite)[1]

    done = run_threads(
        body, ranks, timeout_s=config.comm.timeout_s, synchronous=config.comm.synchronous_sends
    )
    if done.errors:
        raise next(iter(done.errors.values()))
    # The first replica; what two stages hold, both hold alike.
    parts = done.results[: config.parallel.pp]
    return {name: array for part in parts for name, array in part.items()}
