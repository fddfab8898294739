"""The job folder: what the parent and the ranks of one host tell each other through files.

The parent makes one folder per job in the temporary directory and removes it at the end. Ranks on
other hosts do not see it and do without. Used by `job` (reads) and `rank` (writes).

    job.json          written by the parent: a rank that sees it shares the parent's host
    rank-0003.pid     the rank's process id, written when it starts
    rank-0003.alive   a pipe that the rank holds open for as long as it lives; what it writes
                      into it goes to the terminal
    rank-0003.done    written when its work is done
    failure.json      the one failure that is told to the user; whoever creates it tells it
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

EXIT_DONE = 0
"""The job is done."""
EXIT_FAILED = 1
"""The job failed, lost a rank or was interrupted."""
EXIT_WRONG_USE = 2
"""Wrong use or a wrong config."""

JOB_VARIABLE = "MPISIM_JOB"
"""Environment variable in which the parent tells its ranks about the job; configures nothing."""

MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class Failure:
    """Why a job ended: the first failure of any of its ranks."""

    rank: int
    kind: str
    """config, error, crash, left or interrupted."""
    code: int
    """Exit status of the job."""
    message: str
    """One or more lines fit for a user."""
    traceback: str = ""
    """Only for a crash, which is nobody's known mistake."""

    def text(self) -> str:
        """Return the lines to print, with the rank on each, ended by a line break."""
        lines = [f"mpisim: rank {self.rank}: {line}" for line in self.message.splitlines()]
        return self.traceback + "\n".join(lines) + "\n"

    def claim(self, path: Path) -> bool:
        """Write this failure to `path` if no other is there; return whether it was written.

        One call that creates, one that writes: of all ranks that fail at once, one succeeds.
        """
        data = json.dumps(asdict(self)).encode()
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        return True


def read_failure(folder: Path) -> Failure | None:
    """Return the failure recorded in a job folder, or None."""
    try:
        with (folder / "failure.json").open("rb") as file:
            return Failure(**json.loads(file.read(MAX_RECORD_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        # Its rank was killed between creating and writing it.
        return None


def rank_file(folder: Path, rank: int, kind: str) -> Path:
    """Return the path of a rank's `kind` (pid, alive or done) file."""
    return folder / f"rank-{rank:04d}.{kind}"


def read_pid(folder: Path, rank: int) -> int | None:
    """Return the process id that a rank wrote, or None if it has not started."""
    try:
        return int(rank_file(folder, rank, "pid").read_text())
    except (OSError, ValueError):
        return None
