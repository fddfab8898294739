"""One supervised job: start the ranks, pass their output on, notice an end, say why, clean up.

The parent of `mpisim train` and `mpisim bench`. It never imports MPI or NumPy; it watches the
launcher's two output streams and one pipe per rank (see `record`) in a single loop. Flags are in
`launchers`, the ranks' side in `rank`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mpisim.errors import ConfigError
from mpisim.launch.launchers import BLAS_VARIABLES, Launcher, find_launcher
from mpisim.launch.noise import Filter
from mpisim.launch.record import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_USE,
    JOB_VARIABLE,
    rank_file,
    read_failure,
    read_pid,
)

_TICK_S = 0.05
_DAEMONS = ("hydra_pmi_proxy", "prted")
_GRACE_S = 1.0
"""From the first sign of the end to the end of the launcher; then it is killed."""


def rank_command(arguments: Iterable[str]) -> list[str]:
    """Return the command that runs ``mpisim ARGUMENTS`` as a rank, with the running Python.

    Parameters
    ----------
    arguments : iterable of str
        As on the command line.

    Returns
    -------
    list of str
    """
    return [sys.executable, "-m", "mpisim", *arguments]


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    hostfile: str | Path | None = None,
    mpi_args: Iterable[str] = (),
) -> int:
    """Start `ranks` processes of `command` under MPI and wait for the job to end.

    Parameters
    ----------
    command : sequence of str
        Program and arguments of every rank, which calls `run_as_rank`.
    ranks : int
        Number of ranks, at least 1.
    hostfile : str or Path, optional
        Hosts to run on, in the format of the installed MPI.
    mpi_args : iterable of str
        Further flags for the launcher.

    Returns
    -------
    int
        0 the job is done; 2 a rank found a wrong config; 1 the job failed, lost a rank or was
        interrupted. Whatever is not 0 has been explained on standard error, once.

    Raises
    ------
    ConfigError
        Nothing was started: no launcher, no such hostfile, or fewer than one rank.

    Notes
    -----
    SIGINT, SIGTERM and SIGHUP end the whole job; no process of it is left when this returns.
    """
    if ranks < 1:
        raise ConfigError(f"the number of ranks must be at least 1; got {ranks}. Set --ranks.")
    if hostfile is not None and not Path(hostfile).is_file():
        raise ConfigError(f"hostfile must be a file; got {hostfile}. Check its path.")
    launcher = find_launcher()
    with tempfile.TemporaryDirectory(prefix="mpisim-job-", ignore_cleanup_errors=True) as name:
        watch = _Watch(launcher, Path(name), ranks)
        _adopt_orphans(True)
        try:
            with _signals(watch):
                watch.start(command, hostfile, tuple(mpi_args))
                watch.run()
        finally:
            watch.kill()
            _adopt_orphans(False)
        code, text = watch.verdict()
    if text:
        if watch.midline or any(stream.midline for stream in watch.filters.values()):
            text = "\n" + text  # below a progress bar, not behind it
        sys.stderr.write(text)
        sys.stderr.flush()
    return code


class _Watch:
    """A running job as its parent sees it."""

    def __init__(self, launcher: Launcher, folder: Path, ranks: int) -> None:
        self.launcher, self.folder, self.ranks = launcher, folder, ranks
        self.selector = selectors.DefaultSelector()
        self.filters = {1: Filter(), 2: Filter()}
        self.midline = False  # the cursor stands behind text of a rank's screen
        self.spoke = False  # something arrived on the ranks' standard error
        self.interrupt = ""  # what ended the job from outside
        self.lost: list[int] = []  # ranks that went without a word, in the order they went
        self.signals: dict[int, int | None] = {}  # and what killed them, where it showed
        self.alive: dict[int, int] = {}  # rank to the read end of its pipe
        self.process: subprocess.Popen | None = None
        self.deadline: float | None = None
        self.forced = False  # we had to kill the launcher
        self.ending = False  # what goes from now on was killed by us
        self.local = True
        self.began_s = time.time()

    def start(self, command: Sequence[str], hostfile: Any, mpi_args: tuple[str, ...]) -> None:
        """Start the launcher."""
        terminal = _is_terminal(sys.stdout) and _is_terminal(sys.stderr)
        told = {
            "dir": str(self.folder),
            "ranks": self.ranks,
            "terminal": terminal,
            "columns": shutil.get_terminal_size().columns,
        }
        (self.folder / "job.json").write_text(json.dumps(told))
        for rank in range(self.ranks):
            path = rank_file(self.folder, rank, "alive")
            os.mkfifo(path, 0o600)
            self.alive[rank] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self.selector.register(self.alive[rank], selectors.EVENT_READ, ("rank", rank))
        env = dict(os.environ)
        env |= self.launcher.environment(self.ranks, env) | {JOB_VARIABLE: json.dumps(told)}
        exported = [JOB_VARIABLE, *BLAS_VARIABLES]
        exported += ["PYTHONPATH"] if "PYTHONPATH" in env else []
        # Only on this host do the ranks' marks show here.
        self.local = hostfile is None and not any(
            name in env for name in ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE")
        )
        self.process = subprocess.Popen(
            self.launcher.command_line(
                command, self.ranks, hostfile=hostfile, mpi_args=mpi_args, exported=exported
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            # Ctrl-C must reach this process alone, which then ends the job in order.
            start_new_session=True,
        )
        for number, stream in ((1, self.process.stdout), (2, self.process.stderr)):
            os.set_blocking(stream.fileno(), False)
            self.selector.register(stream, selectors.EVENT_READ, ("stream", number))

    def run(self) -> None:
        """Pass output on until the launcher has ended, by itself or because it had to."""
        open_streams = 2
        while open_streams:
            events = self.selector.select(_TICK_S)
            for key, _ in events:
                what, number = key.data
                if what == "rank":
                    self._hear_rank(number)
                elif not self._pass_on(key.fileobj, number):
                    self.selector.unregister(key.fileobj)
                    open_streams -= 1
            if not events:
                for number, stream in self.filters.items():
                    self._write(number, stream.idle())
            self._press_on()
            # A process that outlives its launcher may hold the streams open for ever.
            if self.process.poll() is not None:
                self._end_by(time.monotonic() + _GRACE_S)
                if time.monotonic() > self.deadline:
                    break
        for number, stream in self.filters.items():
            self._write(number, stream.finish())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)

    def end(self, why: str) -> None:
        """End the job because of `why`; the second time at once."""
        if self.interrupt:
            self.deadline = time.monotonic()
            return
        self.interrupt = why
        self._end_by(time.monotonic() + _GRACE_S)
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Leave no process of the job behind, dead or alive."""
        process = self.process
        if process is None:
            return
        for key, _ in self.selector.select(0):
            if key.data[0] == "rank":
                self._hear_rank(key.data[1])
        self.ending = True
        if process.poll() != 0 or self.alive:
            _reap(self._kill_all())
        process.wait()
        for stream in (process.stdout, process.stderr):
            stream.close()
        for fd in self.alive.values():
            os.close(fd)
        self.selector.close()
        if process.returncode != 0:
            _sweep(self.launcher, process.pid, self.began_s)

    def _kill_all(self) -> set[int]:
        """Kill whatever is left of the job; return the ids of all of its processes."""
        # An open pipe proves that the process in a rank's file is still that rank.
        doomed = {pid for rank in self.alive if (pid := read_pid(self.folder, rank)) is not None}
        doomed |= set(_processes_of(self.folder.name, self.process.pid))
        for pid in doomed:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        dead = {pid for r in range(self.ranks) if (pid := read_pid(self.folder, r)) is not None}
        return (doomed | dead) - {self.process.pid}

    def verdict(self) -> tuple[int, str]:
        """Return the exit status of the ended job and what to print about it."""
        status = self.process.returncode
        done = sum(rank_file(self.folder, rank, "done").exists() for rank in range(self.ranks))
        if self.interrupt:
            return EXIT_FAILED, (
                f"mpisim: interrupted by {self.interrupt}; all {self.ranks} ranks have ended.\n"
            )
        if (failure := read_failure(self.folder)) is not None:
            return failure.code, failure.text()
        said = b"\n".join(stream.withheld for stream in self.filters.values())
        said = said.decode(errors="replace")
        if status < 0 and not self.forced:
            return EXIT_FAILED, (
                f"mpisim: the launcher must outlive its ranks; got {self.launcher.path} killed by "
                f"signal {-status}. All ranks were ended.\n"
            )
        if self.lost or (status and (found := _OPENMPI_LOST.search(" ".join(said.split())))):
            rank = self.lost[0] if self.lost else int(found[1])
            return EXIT_FAILED, self._lost_text(rank, " ".join(said.split()))
        if status == 0 and (done == self.ranks or not self.local):
            return EXIT_DONE, ""
        if status == 0:
            return EXIT_FAILED, (
                f"mpisim: every rank must run to the end of the job; got {done} of {self.ranks} "
                f"done. The job has failed.\n"
            )
        where = "; its words are above" if self.spoke else ""
        text = (
            f"mpisim: the launcher must end with status 0; got {status} from "
            f"{self.launcher.path}{where}. The job has failed.\n"
        )
        code = EXIT_WRONG_USE if status == EXIT_WRONG_USE else EXIT_FAILED
        return code, text if self.spoke else said + text

    def _lost_text(self, rank: int, said: str) -> str:
        pid = read_pid(self.folder, rank)
        number = self.signals.get(rank)
        for found in _OPENMPI_LOST.finditer(said):
            if int(found[1]) == rank:
                number = int(found[2])
        for found in _MPICH_CODES.finditer(said):
            codes = [int(code) for code in found[1].split(",")]
            # One list per host, in the order of its ranks: only a single one is in rank order.
            if len(codes) == self.ranks and 0 < codes[rank] < 65:
                number = codes[rank]
        how = "its process gone without a word"
        advice = "Look for its last words above."
        if number is not None:
            try:
                name = signal.Signals(number).name
            except ValueError:
                name = "unknown"
            how = f"its process killed by signal {number} ({name})"
            if number == signal.SIGKILL:
                advice = (
                    "If nobody killed it, the machine ran out of memory: use fewer ranks or a "
                    "smaller model."
                )
        suffix = f", process id {pid}" if pid is not None else ""
        return f"mpisim: rank {rank} must run to the end of the job; got {how}{suffix}. {advice}\n"

    def _hear_rank(self, rank: int) -> None:
        """Read a rank's pipe: text for the screen, or the end, which is that of the process."""
        fd = self.alive[rank]
        try:
            if data := os.read(fd, 1 << 16):
                self.midline = not data.endswith(b"\n")
                self._write(1, data)
                return
        except BlockingIOError:
            return
        self.selector.unregister(fd)
        os.close(fd)
        del self.alive[rank]
        done = rank_file(self.folder, rank, "done").exists()
        if done or self.ending or read_pid(self.folder, rank) is None:
            return
        if read_failure(self.folder) is None:
            self.lost.append(rank)
            self.signals[rank] = _fatal_signal(read_pid(self.folder, rank))
        # The launcher should end the others now; some wait for a rank that left politely.
        self._end_by(time.monotonic() + _GRACE_S)

    def _pass_on(self, stream: Any, number: int) -> bool:
        """Pass on what is there to read; return False at the end of the stream."""
        try:
            data = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        self._write(number, self.filters[number].feed(data))
        return bool(data)

    def _write(self, number: int, data: bytes) -> None:
        if not data:
            return
        self.spoke = self.spoke or number == 2
        target = sys.stdout if number == 1 else sys.stderr
        try:
            if (raw := getattr(target, "buffer", None)) is not None:
                raw.write(data)
                raw.flush()
            else:
                target.write(data.decode(errors="replace"))
                target.flush()
        except BrokenPipeError:
            # Nobody reads any more, as after `| head`: point the stream at nothing and stop.
            os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
            self.end("the end of its reader (broken pipe)")

    def _end_by(self, deadline: float) -> None:
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)

    def _press_on(self) -> None:
        """Kill a launcher that does not end by itself in time."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.forced = self.forced or self.process.poll() is None
            self.ending = True
            self._kill_all()


_OPENMPI_LOST = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_MPICH_CODES = re.compile(r"Exit codes: \[[^\]]*\] ([\d,]+)")


@contextlib.contextmanager
def _signals(watch: _Watch) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end the job instead of this process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; its owner decides
        return
    names = {signal.SIGINT: "Ctrl-C (SIGINT)", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
    former = {
        number: signal.signal(number, lambda n, _: watch.end(names[n]))
        for number in names
        # nohup stays nohup. A script's shell starts its background jobs with SIGINT ignored, but
        # who sends it to this job means it.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _fatal_signal(pid: int | None) -> int | None:
    """Return the signal that kills a process whose files are closed already, if Linux tells."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return None  # reaped by its parent in the meantime; the launcher may know more
    return status & 0x7F or None


def _processes_of(token: str, launcher: int) -> Iterator[int]:
    """Yield the ids of the living processes of a job, the launcher's included.

    They inherited the job's folder in their environment. Where no process shows it (macOS), they
    are found by descent.
    """
    if Path("/proc/self/environ").exists():
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != os.getpid():
                    if token.encode() in Path(entry.path, "environ").read_bytes():
                        yield int(entry.name)
        return
    listing = subprocess.run(
        ["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=False
    ).stdout
    family = {launcher}
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()]
    while more := {child for child, parent in pairs if parent in family} - family:
        family |= more
    yield from family


def _adopt_orphans(adopt: bool) -> None:
    """Become, or cease to be, the parent of the orphans of this process's children (Linux).

    A rank that outlives its launcher would otherwise go to process 1, which in many containers
    reaps nothing: the dead would stay in the process table for ever.
    """
    if sys.platform == "linux":
        import ctypes

        set_child_subreaper = 36
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_child_subreaper, int(adopt), 0, 0, 0)


def _reap(pids: set[int]) -> None:
    """Wait until processes that were killed are gone, for a moment."""
    deadline = time.monotonic() + _GRACE_S / 2
    pids = pids | _dead_daemons()
    while pids and time.monotonic() < deadline:
        for pid in tuple(pids):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                # Not ours, or not yet: an orphan comes to us only when its parent has gone.
                with contextlib.suppress(OSError):
                    os.kill(pid, 0)
                    continue
                pids.discard(pid)
        time.sleep(0.002)


def _dead_daemons() -> set[int]:
    """Return the launchers' own helper processes that ended as children of this process."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit():
                    head, _, tail = Path(entry.path, "stat").read_text().rpartition(")")
                    state, parent = tail.split()[:2]
                    name = head.partition("(")[2]
                    if state == "Z" and int(parent) == os.getpid() and name in _DAEMONS:
                        found.add(int(entry.name))
    return found


def _sweep(launcher: Launcher, pid: int, since_s: float) -> None:
    """Remove what a killed job leaves in shared memory and the temporary directory."""
    if launcher.kind == "openmpi":
        shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{pid}", ignore_errors=True)
    pattern = {"openmpi": "sm_segment.*", "mpich": "mpich_shm_*"}.get(launcher.kind)
    if pattern is None or not Path("/dev/shm").is_dir():
        return
    segments = set()
    for path in Path("/dev/shm").glob(pattern):
        with contextlib.suppress(OSError):
            found = path.stat()
            # Its clock is coarser than ours.
            if found.st_uid == os.getuid() and found.st_mtime >= since_s - 1:
                segments.add(str(path))
    if not segments:
        return
    for maps in Path("/proc").glob("[0-9]*/maps"):  # what another job still uses stays
        with contextlib.suppress(OSError):
            text = maps.read_text(errors="replace")
            segments = {name for name in segments if name not in text}
    for name in segments:
        with contextlib.suppress(OSError):
            os.unlink(name)
