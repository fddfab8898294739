"""Distributed training as a plan: NumPy ranks, real messages, every byte accounted for.

`mpisim.run(config)` trains from Python what `mpisim train CONFIG` trains from the shell. Importing
this package loads neither NumPy nor MPI nor pydantic: what a call needs is imported by the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mpisim.config import RunConfig

__all__ = ["__version__", "run"]

__version__ = "0.1.0"


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    ranks: int | None = None,
    overwrite: bool = False,
    transport: str = "mpi",
) -> Any:
    """Train a run from Python, as `mpisim train` does from the shell.

    Parameters
    ----------
    config : RunConfig, mapping, str or Path
        The run; a mapping has the sections of the file, a str or Path names the file.
    ranks : int, optional
        Ranks to start. By default `parallel.dp`.
    overwrite : bool
        Replace the run directory if it exists; otherwise that is refused.
    transport : {"mpi", "local"}
        `"mpi"` starts one process per rank; `"local"` runs the ranks as threads of this one.

    Returns
    -------
    object
        What `mpisim.train.run` returns: the finished run.

    Raises
    ------
    ConfigError
        The config, the number of ranks or the run directory breaks a rule; nothing was started.
    MpisimError
        The job failed on some rank.
    """
    from collections.abc import Mapping
    from pathlib import Path

    from mpisim.config import config_from_mapping, load_config
    from mpisim.train import run as run_job

    if isinstance(config, str | Path):
        config = load_config(config)
    elif isinstance(config, Mapping):
        config = config_from_mapping(config)
    return run_job(config, ranks=ranks, overwrite=overwrite, transport=transport)
