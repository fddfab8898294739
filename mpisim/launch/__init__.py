"""Start ranks with the installed MPI, watch over them, and say once what went wrong.

    launchers.py   which mpirun there is, and the flags and environment it needs
    job.py         the parent: one supervised job from start to exit status
    noise.py       keeps the launchers' own banners out of the ranks' output
    rank.py        the child: what a rank does around its work, however it was started
    record.py      the folder and the failure record that both sides share

Knows nothing of training: `launch` takes a command, `run_as_rank` takes a function. Called by
`cli` and by what starts ranks itself; parses no options.

Exit statuses, the same under every MPI: 0 the job is done; 2 wrong use or a wrong config; 1 the
job failed, lost a rank or was interrupted.
"""

from mpisim.launch.job import launch, rank_command
from mpisim.launch.launchers import Launcher, find_launcher
from mpisim.launch.rank import (
    Job,
    check_world,
    keep_freed_memory,
    limit_blas_threads,
    run_as_rank,
    under_mpi,
)
from mpisim.launch.record import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_USE

__all__ = [
    "EXIT_DONE",
    "EXIT_FAILED",
    "EXIT_WRONG_USE",
    "Job",
    "Launcher",
    "check_world",
    "find_launcher",
    "keep_freed_memory",
    "launch",
    "limit_blas_threads",
    "rank_command",
    "run_as_rank",
    "under_mpi",
]
