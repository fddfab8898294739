"""The run directory: what it holds, when it may be created, how its files are written.

    run.json        config, seed, data, versions, host, ranks, start and end time
    metrics.jsonl   one line per step
    summary.json    totals of all ranks, predicted beside measured; written at the end
    weights.safetensors  the trained parameters, by name; written at the end
    trace/          one file per rank
    memory-rank-0002.json  only of a rank whose memory would have passed the budget: what it held

Written by rank 0, except its trace file by every rank.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpisim.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from mpisim.config.schema import RunConfig


def run_dir_of(config: RunConfig) -> Path:
    """Return the run directory that a config names."""
    return Path(config.run.dir) / config.run.name


def check_run_dir(config: RunConfig, overwrite: bool) -> None:
    """Refuse a run directory that must not, or cannot, be written; changes nothing.

    Raises
    ------
    ConfigError
        It exists and `overwrite` is off, is no run directory, or its parent is not writable.
    """
    path = run_dir_of(config)
    if path.exists():
        if not overwrite:
            raise ConfigError(
                f"run directory must be new; got {path}, which exists. Set run.name to another "
                f"name, or add --overwrite to replace it."
            )
        if path.is_symlink() or not path.is_dir() or (any(path.iterdir()) and not _is_run(path)):
            raise ConfigError(
                f"run directory must hold an earlier run to be overwritten; got {path}, which "
                f"holds something else. Set run.name to another name."
            )
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"run.dir must be a writable folder; got {config.run.dir} ({parent} cannot be "
            f"written). Set run.dir to another folder."
        )


def create_run_dir(path: Path, overwrite: bool) -> None:
    """Create an empty run directory; replaces an earlier run only now that all is checked.

    Raises
    ------
    ConfigError
        The folder cannot be created.
    """
    try:
        if path.exists() and overwrite:
            shutil.rmtree(path)
        (path / "trace").mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir must be a writable folder; got {path}: {error.strerror or error}. Set "
            f"run.dir to another folder."
        ) from None


def _is_run(path: Path) -> bool:
    """Tell whether a folder holds a run of ours: another run.json must not cost its owner all."""
    try:
        record = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and {"config", "versions"} <= record.keys()


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file in one piece: a reader sees the old file or the new one."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file of a run directory.

    Raises
    ------
    CheckpointError
        It is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"run directory must hold {path.name}; got {path}: {error.strerror}. Name a directory "
            f"that mpisim train wrote."
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{path.name} must be JSON; got {path}: {error}. Run the job again."
        ) from None
