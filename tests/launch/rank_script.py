"""A rank that behaves as its first argument says; started by the tests of the launcher."""

import os
import signal
import sys
import time

from mpisim.errors import CommTimeout, ConfigError
from mpisim.launch import run_as_rank

how, culprit = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1


def act(job):
    if how == "config-before-mpi":
        raise ConfigError("run.dir must be new; got an old one. Add --overwrite.")
    transport = job.connect(timeout_s=30.0)
    transport.barrier()
    line = f"rank {job.rank} of {job.size} is process {os.getpid()}\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    if path := os.environ.get("TEST_PROCESSES"):
        # A launcher that aborts a job may lose what other ranks have written just before.
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)
    transport.barrier()
    job.step = 7
    if job.rank == culprit:
        if how == "user-error":
            raise CommTimeout("a message must arrive in time; got none. Look at rank 0.")
        if how == "crash":
            raise ZeroDivisionError("made up for a test")
        if how == "config":
            raise ConfigError("data.path must exist on every host; got none here. Copy it.")
        if how == "disk":
            raise OSError(28, "No space left on device", "runs/x/metrics.jsonl")
        if how == "exit":
            sys.exit(0)
        if how == "return":
            return
        if how == "vanish":
            os._exit(0)
        if how.startswith("signal-"):
            os.kill(os.getpid(), getattr(signal, how.removeprefix("signal-")))
    if how == "endless-bar" and job.rank == 0:
        job.screen.write("\rno end of line")
        job.screen.flush()
    if how == "bar":
        if job.rank == 0:
            job.screen.write(f"\rterminal={job.terminal} 50%|#####     |")
            job.screen.flush()
        transport.barrier()
        time.sleep(0.2)
        if job.rank == culprit:
            raise CommTimeout("it must move; got stuck. Push.")
    while how == "chatter" and job.rank == 0:
        sys.stdout.write("and on it goes\n")
        sys.stdout.flush()
        time.sleep(0.01)
    if culprit >= 0 or how in ("hang", "chatter", "endless-bar"):
        # As a rank that waits for a message of the culprit: it polls, and would wait for long.
        end = time.monotonic() + 600
        while time.monotonic() < end:
            time.sleep(0.001)
    transport.close()
    job.finish()


sys.exit(run_as_rank(act))
