"""What a run records about itself: where, when and with what it ran, and what came out, to the bit.

Called by `loop`; nothing here sends messages.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import mpisim
from mpisim.comm.transport import Transport
from mpisim.data.load import Dataset
from mpisim.train.setup import Setup


def run_record(
    setup: Setup, transport: Transport, data: Dataset, hosts: list[str], start_digest: str = ""
) -> dict[str, Any]:
    """Return what run.json holds: everything needed to repeat the run."""
    import importlib.metadata as metadata

    config = setup.config
    mesh = setup.mesh
    return {
        "version": 1,
        "name": config.run.name,
        "seed": config.run.seed,
        "config": config.model_dump(mode="json"),
        "data": data.record(),
        "extensions": setup.extensions,
        "init_from_sha256": start_digest or None,
        "ranks": transport.size,
        "mesh": {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp},
        "stages": [list(stage) for stage in setup.pipeline.stages],
        "hosts": hosts,
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "library default"),
        "versions": {
            "mpisim": mpisim.__version__,
            "commit": _commit(),
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "mpi4py": metadata.version("mpi4py"),
            "mpi": transport.library,
        },
        "started": iso_time(time.time()),
        "ended": None,
    }


def _commit() -> str | None:
    """Return the git commit the package runs from, if it runs from a checkout."""
    here = Path(mpisim.__file__).resolve().parent
    if not (here.parent / "pyproject.toml").is_file():
        return None
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=here, capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def iso_time(seconds: float) -> str:
    """Return a time since the epoch as ISO 8601, UTC, to the millisecond."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def digest(params: Mapping[str, np.ndarray]) -> str:
    """Return one digest of all parameters: equal bits, equal digest."""
    return joint_digest({name: array_digest(array) for name, array in params.items()})


def array_digest(array: np.ndarray) -> str:
    """Return the sha256 of an array's bytes in row order."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def joint_digest(digests: Mapping[str, str]) -> str:
    """Return the `digest` of parameters whose own digests are known: no need to hold them all."""
    lines = "".join(f"{digests[name]} {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
