"""The rank's side, under environments made up for it; no MPI is started here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpisim.errors import ConfigError
from mpisim.launch import Job, check_world, limit_blas_threads, run_as_rank, under_mpi
from mpisim.launch import rank as rank_module
from mpisim.launch.record import Failure, read_failure

ROOT = Path(__file__).parents[2]
LAUNCHER_NAMES = ("OMPI_", "PMI", "SLURM_", "MPISIM_", "HYDI_", "MPI4PY_")


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets a launcher's variables; all others of its kind are gone."""
    for name in list(os.environ):
        if name.startswith(LAUNCHER_NAMES):
            monkeypatch.delenv(name)

    def set_all(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_all


SLURM_STEP = {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 4, "SLURM_PROCID": 3}


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 3}, (1, 3)),
        ({"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 1}, (0, 1)),
        ({"PMI_RANK": 2, "PMI_SIZE": 4}, (2, 4)),
        ({"PMI_RANK": 4, "PMI_SIZE": 4}, None),
        ({"PMI_RANK": "x", "PMI_SIZE": 4}, None),
        ({"PMI_SIZE": 4}, None),
        (SLURM_STEP, (3, 4)),
        (SLURM_STEP | {"PMIX_RANK": 2}, (2, 4)),
        ({"SLURM_STEP_ID": 0, "SLURM_NTASKS": 4, "SLURM_PROCID": 1}, (1, 4)),
        # A batch script, and a login shell that is a step of one task.
        ({"SLURM_JOB_ID": 9, "SLURM_NTASKS": 4, "SLURM_PROCID": 0}, None),
        (SLURM_STEP | {"SLURM_STEP_NUM_TASKS": 1, "SLURM_NTASKS": 4, "SLURM_PROCID": 0}, None),
    ],
)
def test_the_place_of_a_rank_in_its_launch(environment, values, place):
    environment(**values)
    assert under_mpi() == place


def test_a_launcher_and_a_library_that_disagree_are_refused():
    check_world(4, 4)
    with pytest.raises(ConfigError) as caught:
        check_world(4, 1, "Some MPI 3")
    text = str(caught.value)
    assert "must be of the same MPI; got 4 ranks from the launcher but 1 in Some MPI 3" in text
    assert "mpisim train" in text


@pytest.mark.parametrize(
    ("values", "library", "refused"),
    [
        ({"OMPI_COMM_WORLD_SIZE": 2}, "mpich", True),
        ({"HYDI_CONTROL_FD": 7}, "openmpi", True),
        ({"OMPI_COMM_WORLD_SIZE": 2}, "openmpi", False),
        ({"HYDI_CONTROL_FD": 7}, "mpich", False),
        ({"OMPI_COMM_WORLD_SIZE": 2}, None, False),
        ({}, "mpich", False),
        ({"OMPI_COMM_WORLD_SIZE": 2, "MPI4PY_LIBMPI": "/x/libmpi.so"}, "mpich", False),
    ],
)
def test_the_wrong_library_is_refused_before_it_starts(
    environment, monkeypatch, values, library, refused
):
    environment(**values)
    monkeypatch.setattr(rank_module, "_library_flavour", lambda: library)
    if refused:
        with pytest.raises(ConfigError, match="got the launcher of .* and the library of "):
            rank_module._check_flavour(2)
    else:
        rank_module._check_flavour(2)


def test_C081_blas_threads_are_one_unless_chosen(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "")  # so that it is put back afterwards
    limit_blas_threads()
    assert os.environ["OMP_NUM_THREADS"] == "5"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"


def test_work_that_is_declared_done_ends_well(environment, tmp_path):
    environment(PMI_RANK=2, PMI_SIZE=3)
    jobs = []

    def work(job):
        jobs.append(job)
        job.finish()

    assert run_as_rank(work, claim_dir=tmp_path) == 0
    (job,) = jobs
    assert isinstance(job, Job) and (job.rank, job.size, job.terminal) == (2, 3, False)
    assert list(tmp_path.iterdir()) == []


def run_ranks(tmp_path, body, ranks=(0, 1), **env):
    """Run `body` as several ranks of one made-up launch, one after another."""
    code = (
        "import os, sys, time\nfrom mpisim.errors import *\nfrom mpisim.launch import run_as_rank\n"
        f"def work(job):\n    {body}\n"
        f"sys.exit(run_as_rank(work, claim_dir={str(tmp_path)!r}))\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_NAMES)}
    launch = {"PYTHONPATH": str(ROOT), "PMI_SIZE": "2", "PMI_JOBID": "made-up"} | env
    return [
        subprocess.run(
            [sys.executable, "-c", code],
            env=clean | launch | {"PMI_RANK": str(rank)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("raise ConfigError('a must b; got c.')", 2, "a must b; got c."),
        ("raise PeerLost('a must b; got c.')", 1, "a must b; got c."),
        ("job.step = 4; raise PeerLost('x.')", 1, "at step 4: x."),
        ("raise KeyboardInterrupt", 1, "interrupted by Ctrl-C (SIGINT)."),
        ("os.write(os.open('/dev/full', os.O_WRONLY), b'x')", 1, "every file of the run must be"),
        ("raise OSError(30, 'Read-only file system', 'runs/x')", 1, "file runs/x must be writable"),
        ("raise MemoryError('Unable to allocate 8 TiB')", 1, "got Unable to allocate 8 TiB."),
        ("job.step = 3; sys.exit(0)", 1, "got an exit with status 0: rank 0 left at step 3."),
        ("sys.exit()", 1, "got an exit with status 0: rank 0 left before its first step."),
        ("sys.exit('bye')", 1, "got an exit with status bye"),
        ("return", 1, "got a return before its work was finished: rank 0 left before its first"),
    ],
)
def test_a_failure_is_one_line_told_by_one_rank(tmp_path, body, status, message):
    first, second = run_ranks(tmp_path, body)
    assert (first.returncode, second.returncode) == (status, status)
    (line,) = first.stderr.splitlines()
    assert line.startswith("mpisim: rank 0: ") and message in line
    assert second.stderr == ""


def test_a_crash_comes_with_its_traceback_and_rank_once(tmp_path):
    first, second = run_ranks(tmp_path, "job.step = 2; [].pop()", ranks=(1, 0))
    assert (first.returncode, second.returncode) == (1, 1)
    lines = first.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "mpisim: rank 1: at step 2: IndexError: pop from empty list"
    assert second.stderr == ""


@pytest.mark.parametrize(
    ("env", "name", "value"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_MCA_btl", "^ofi"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_btl": "tcp"}, "OMPI_MCA_btl", "tcp"),
        ({"HYDI_CONTROL_FD": "7"}, "MPIR_CVAR_POLLS_BEFORE_YIELD", "10"),
        ({}, "OMPI_MCA_btl", None),
    ],
)
def test_a_plain_mpirun_gets_the_settings_that_a_launch_gets(tmp_path, env, name, value):
    body = (
        "import types; mpi = types.ModuleType('mpi')\n"
        "    sys.modules['mpisim.comm.mpi'] = mpi\n"
        f"    def connect(**options): print(os.environ.get({name!r})); raise PeerLost('x')\n"
        "    mpi.connect = connect; job.connect()"
    )
    (done,) = run_ranks(tmp_path, body, (0,), MPI4PY_LIBMPI="any", **env)
    assert done.stdout == f"{value}\n", done.stderr


def test_clean_up_cannot_hold_a_failed_rank(tmp_path):
    """What runs at exit, such as MPI's own clean-up, would wait for ranks that never come."""
    body = "import atexit; atexit.register(time.sleep, 600); raise PeerLost('gone.')"
    (done,) = run_ranks(tmp_path, body, ranks=(0,))
    assert done.returncode == 1 and "gone." in done.stderr


def test_a_claim_of_an_earlier_launch_does_not_silence_this_one(tmp_path):
    run_ranks(tmp_path, "raise PeerLost('first.')", ranks=(0,))
    (claim,) = tmp_path.iterdir()
    os.utime(claim, (1, 1))
    (done,) = run_ranks(tmp_path, "raise PeerLost('second.')", ranks=(0,))
    assert done.stderr == "mpisim: rank 0: second.\n"


def test_a_rank_that_sees_the_job_folder_leaves_its_marks_there(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    told = {"dir": str(folder), "ranks": 2, "terminal": True, "columns": 70}
    (folder / "job.json").write_text("{}")
    body = "assert job.terminal and job.columns == 70; job.finish()"
    (done,) = run_ranks(tmp_path, body, ranks=(1,), MPISIM_JOB=json.dumps(told))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {
        "job.json", "rank-0001.done", "rank-0001.pid",
    }  # fmt: skip
    (done,) = run_ranks(tmp_path, "raise PeerLost('x.')", (0,), MPISIM_JOB=json.dumps(told))
    assert (done.returncode, done.stderr) == (1, "")  # the parent tells it
    assert read_failure(folder) == Failure(0, "error", 1, "x.", "")


def test_fewer_ranks_than_the_parent_started_are_refused(tmp_path):
    told = {"dir": str(tmp_path / "elsewhere"), "ranks": 4, "terminal": False, "columns": 80}
    first, second = run_ranks(tmp_path, "job.finish()", MPISIM_JOB=json.dumps(told))
    assert (first.returncode, second.returncode) == (2, 2)
    assert "got 4 ranks from the launcher but 2 in its environment" in first.stderr
    assert second.stderr == ""


def test_a_parents_word_that_makes_no_sense_is_ignored(tmp_path):
    (done,) = run_ranks(tmp_path, "job.finish()", (0,), MPISIM_JOB='{"dir": 3}')
    assert (done.returncode, done.stderr) == (0, "")


def test_a_record_cut_short_is_no_record(tmp_path):
    assert read_failure(tmp_path) is None
    (tmp_path / "failure.json").write_text("")
    assert read_failure(tmp_path) is None
    (tmp_path / "failure.json").write_text('{"rank": 1}')
    assert read_failure(tmp_path) is None
