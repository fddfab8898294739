"""Jobs of real MPI processes: every way to end, one message each, and nobody left behind."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ENV = os.environ | {"PYTHONPATH": str(ROOT)}

pytestmark = pytest.mark.mpi


def pids(text):
    return sorted({int(pid) for pid in re.findall(r"is process (\d+)", text)})


def survivors(text):
    alive = []
    for pid in pids(text):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            alive.append(pid)
    return alive


def job(ranks, *how, **env):
    """Run a job; its output is followed by the ranks' own record of their processes."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as processes:
        done = subprocess.run(
            [sys.executable, HERE / "parent_script.py", str(ranks), *map(str, how)],
            env=ENV | {"TEST_PROCESSES": processes.name} | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        done.printed = done.stdout
        done.stdout += processes.read()
    return done


def messages(text):
    return [line for line in text.splitlines() if line.startswith("mpisim: ")]


def test_a_job_that_is_done():
    done = job(3, "ok")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(pids(done.printed)) == 3 and not survivors(done.stdout)


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("user-error", 1, "rank 1: at step 7: a message must arrive in time; got none."),
        ("disk", 1, "rank 1: at step 7: file runs/x/metrics.jsonl must be writable; got No space"),
        ("config", 2, "rank 1: data.path must exist on every host; got none here."),
        ("exit", 1, "got an exit with status 0: rank 1 left at step 7."),
        ("return", 1, "got a return before its work was finished: rank 1 left at step 7."),
    ],
)
def test_a_rank_that_fails_ends_the_job_with_one_line(how, status, message):
    done = job(3, how, 1)
    (line,) = done.stderr.splitlines()
    assert line.startswith("mpisim: rank 1: ") and message in line
    assert done.returncode == status
    assert len(pids(done.stdout)) == 3 and not survivors(done.stdout)


def test_a_rank_that_crashes_shows_its_traceback_once():
    done = job(3, "crash", 2)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "mpisim: rank 2: at step 7: ZeroDivisionError: made up for a test"
    assert done.stderr.count("Traceback") == len(messages(done.stderr)) == 1
    assert not survivors(done.stdout)


def test_a_mistake_that_all_ranks_find_is_told_once():
    done = job(3, "config-before-mpi")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("run.dir must be new; got an old one. Add --overwrite.")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_rank_that_is_killed_is_named_with_its_signal(rank, name):
    done = job(3, f"signal-{name}", rank)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mpisim: rank {rank} must run to the end of the job; got its process ")
    number = int(getattr(signal, name))
    assert f"killed by signal {number} ({name}), process id " in line
    pid = int(re.search(r"process id (\d+)", line)[1])
    assert f"rank {rank} of 3 is process {pid}\n" in done.stdout
    assert not survivors(done.stdout)


def test_a_rank_that_vanishes_without_an_error_is_no_success():
    done = job(3, "vanish", 1)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("mpisim: rank 1 must run to the end of the job; got its process gone")
    assert not survivors(done.stdout)


@contextlib.contextmanager
def endless_job(how="hang", ignored=(), **env):
    """Start a job that never ends; yield its parent and what its ranks printed."""
    parent = subprocess.Popen(
        [sys.executable, HERE / "parent_script.py", "3", how],
        env=ENV | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored],
    )
    with parent:
        try:
            yield parent, "".join(parent.stdout.readline() for _ in range(3))
        finally:
            parent.kill()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_job_ends_whole(name):
    with endless_job() as (parent, printed):
        # A terminal sends its signals to the whole group of processes.
        os.killpg(parent.pid, getattr(signal, name))
        out, err = parent.communicate(timeout=60)
    assert parent.returncode == 1
    (line,) = err.splitlines()
    assert line.startswith("mpisim: interrupted by ") and name in line
    assert out == ""
    assert len(pids(printed)) == 3 and not survivors(printed)


def test_signals_that_were_ignored_at_the_start():
    """A shell starts background jobs of scripts without SIGINT, and nohup without SIGHUP."""
    with endless_job("hang", [signal.SIGINT]) as (parent, _):
        parent.send_signal(signal.SIGINT)
        assert "SIGINT" in parent.communicate(timeout=60)[1]
    with endless_job("hang", [signal.SIGHUP]) as (parent, _):
        parent.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        parent.send_signal(signal.SIGTERM)
        err = parent.communicate(timeout=60)[1]
        assert "SIGTERM" in err and "SIGHUP" not in err


def leftovers(folder):
    return {path.name for path in folder.iterdir()}


def test_a_job_whose_launcher_is_killed_ends_whole_and_leaves_nothing(tmp_path):
    with endless_job(TMPDIR=str(tmp_path)) as (parent, printed):
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        if not children.exists():
            pytest.skip("needs Linux to find the launcher")
        (launcher,) = map(int, children.read_text().split())
        os.kill(launcher, signal.SIGKILL)
        _, err = parent.communicate(timeout=60)
    assert parent.returncode == 1
    (line,) = err.splitlines()
    assert "the launcher must outlive its ranks" in line
    assert len(pids(printed)) == 3 and not survivors(printed)
    assert leftovers(tmp_path) == set()


def test_output_that_nobody_reads_ends_the_job():
    with endless_job("chatter") as (parent, printed):
        parent.stdout.close()
        err = parent.stderr.read()
        assert parent.wait(timeout=60) == 1
    (line,) = err.splitlines()
    assert "interrupted by the end of its reader" in line
    assert not survivors(printed)


@contextlib.contextmanager
def on_a_terminal(*arguments):
    """Start a job whose output goes to a terminal; yield its parent and what it shows."""
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb", buffering=0) as screen:
        parent = subprocess.Popen(
            [sys.executable, HERE / "parent_script.py", *arguments],
            env=ENV,
            stdin=subprocess.DEVNULL,
            stdout=follower,
            stderr=follower,
        )
        os.close(follower)

        def shown():
            # Nothing for half a minute is the end as well: the job is stuck.
            with contextlib.suppress(OSError):  # how the end of a terminal looks
                while select.select([screen], [], [], 30)[0] and (data := screen.read(4096)):
                    yield data

        with parent:
            try:
                yield parent, shown()
            finally:
                parent.kill()


def test_only_the_parent_knows_whether_a_person_watches():
    done = job(2, "bar")
    assert "terminal=False" in done.stdout
    with on_a_terminal("2", "bar") as (parent, shown):
        text = b"".join(shown)
        assert parent.wait(timeout=60) == 0
    assert b"\rterminal=True 50%|#####     |" in text


def test_a_progress_bar_is_shown_while_it_moves():
    with on_a_terminal("2", "endless-bar") as (parent, shown):
        text = b""
        for data in shown:
            text += data
            if b"\rno end of line" in text:
                break
        assert b"\rno end of line" in text
        parent.send_signal(signal.SIGINT)
        text += b"".join(shown)
        assert parent.wait(timeout=60) == 1
    assert text.count(b"\rno end of line") == 1
    assert not survivors(text.decode())


def test_a_message_stands_below_a_progress_bar():
    with on_a_terminal("2", "bar", "1") as (parent, shown):
        text = b"".join(shown).decode()
        assert parent.wait(timeout=60) == 1
    said = "\r\nmpisim: rank 1: at step 7: it must move; got stuck. Push.\r\n"
    assert 0 <= text.find("terminal=True 50%|#####     |") < text.find(said)


def test_ranks_that_never_reported_are_ended_too(tmp_path):
    code = "import sys; from mpisim.launch import launch; sys.exit(launch(['sleep', '600'], 2))"
    mark = str(tmp_path)

    def marked():
        count = 0
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                count += mark.encode() in path.read_bytes()
        return count

    with subprocess.Popen(
        [sys.executable, "-c", code], env=ENV | {"MPISIM_TEST": mark}, stderr=subprocess.PIPE
    ) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        if not children.exists():
            parent.kill()
            pytest.skip("needs Linux to find the launcher")
        while marked() < 4:  # the parent, the launcher and both ranks
            assert parent.poll() is None
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert marked() == 0


def test_a_job_with_a_killed_rank_leaves_nothing(tmp_path):
    done = job(2, "signal-SIGKILL", 1, TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert leftovers(tmp_path) == set()


def test_ranks_that_say_nothing_are_no_success():
    code = "import sys; from mpisim.launch import launch; "
    code += "sys.exit(launch([sys.executable, '-c', 'pass'], 2))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "every rank must run to the end of the job; got 0 of 2 done." in line


OTHER = {".venv": ".venv-mpich", ".venv-mpich": ".venv"}


@pytest.mark.skipif(Path(sys.prefix).name not in OTHER, reason="not in an environment of make")
def test_C076_the_launcher_of_another_mpi_is_refused_once():
    other = Path(sys.prefix).with_name(OTHER[Path(sys.prefix).name]) / "bin" / "mpirun"
    if not other.exists():
        pytest.skip("the other environment is not there")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    forced = {"MPI4PY_LIBMPI": str(Path(sys.prefix) / "lib" / "libmpi.so.40")}
    # With its library chosen by hand, nothing warns before MPI starts: each rank is 0 of 1 then.
    # The other way round MPICH's own start ends the process.
    for force in ({}, {} if "mpich" in sys.prefix else forced):
        done = subprocess.run(
            [other, "-n", "2", sys.executable, HERE / "rank_script.py", "ok"],
            env=ENV | root | force,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2
        (line,) = messages(done.stderr)
        assert "launcher and MPI library must be of the same MPI; got " in line
        assert "is process" not in done.stdout
