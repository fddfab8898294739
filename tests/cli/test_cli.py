"""The command line: exit statuses, one-line errors, lazy imports, and what it hands on."""

import json
import os
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import mpisim
import mpisim.bench
import mpisim.launch
import mpisim.train
from mpisim.cli import main
from mpisim.config import RunConfig, config_from_mapping
from mpisim.errors import CommTimeout, ConfigError

ROOT = Path(__file__).parents[2]


def python(*arguments, **env):
    """Run Python with the package importable and no trace of an MPI launcher around it."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'run.dir = "{tmp_path}/runs"\ntrain.steps = 3\n')
    return path


@pytest.fixture
def launched(monkeypatch):
    """Record jobs instead of starting them."""
    jobs = []

    def launch(command, ranks, *, hostfile=None, mpi_args=()):
        jobs.append(SimpleNamespace(command=command, ranks=ranks, hostfile=hostfile, args=mpi_args))
        return 1

    monkeypatch.setattr(mpisim.launch, "launch", launch)
    return jobs


def complaint(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("mpisim: ")
    return line


# -- what starts quickly ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], "mpi4py matplotlib numpy pydantic mpisim.launch"),
        (["--version"], "mpi4py matplotlib numpy pydantic mpisim.launch"),
        (["train", "--help"], "mpi4py matplotlib numpy pydantic mpisim.launch"),
        (["completion", "bash"], "mpi4py matplotlib numpy pydantic mpisim.launch"),
        (["config", "CONFIG"], "mpi4py matplotlib numpy mpisim.launch"),
    ],
)
def test_a_command_loads_only_what_it_needs(config, arguments, absent):
    arguments = [str(config) if word == "CONFIG" else word for word in arguments]
    code = (
        "import sys; from mpisim.cli import main; status = main(sys.argv[1:]); "
        "print('loaded', *sorted(sys.modules)); sys.exit(status)"
    )
    done = python("-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "click" in loaded
    assert loaded.isdisjoint(absent.split())


def test_importing_the_package_loads_nothing_heavy():
    done = python("-c", "import sys, mpisim; print(*sys.modules)")
    assert set(done.stdout.split()).isdisjoint({"mpi4py", "matplotlib", "numpy", "pydantic"})


def test_python_dash_m_is_the_same_command():
    done = python("-m", "mpisim", "--version")
    assert (done.returncode, done.stdout) == (0, f"mpisim {mpisim.__version__}\n")


def test_help_tells_the_exit_statuses(capsys):
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for line in ("0  done", "1  the job failed", "2  wrong use"):
        assert line in out


def test_without_arguments_it_helps(capsys):
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


# -- wrong use -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["train"],
        ["train", "a.toml", "--rank"],
        ["train", "a.toml", "--ranks", "0"],
        ["train", "a.toml", "--ranks", "two"],
        ["train", "a.toml", "b.toml"],
        ["check", "a.toml"],
        ["plan", "shwo"],
        ["trace", "export", "--format", "vhs", "x"],
        ["bench", "collectives"],
        ["bench", "collectives", "--ranks", "2", "--sizes", "3 parsecs"],
        ["completion", "tcsh"],
        ["config", "no-such-file.toml"],
        ["report", "no-such-run"],
    ],
)
def test_wrong_use_is_one_sentence_and_status_2(capsys, arguments):
    assert main(arguments) == 2
    complaint(capsys)


def test_all_faults_of_a_config_are_told_without_a_traceback(capsys, config):
    config.write_text("train.steps = 0\noptimizer.lr = -1\nmodle = 1\n")
    assert main(["train", str(config), "--ranks", "2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("mpisim: ") for line in lines)


def test_a_failure_that_is_no_wrong_use_has_status_1(capsys, monkeypatch, config):
    def fail(config, ranks):
        raise CommTimeout("a message must arrive; got none. Wait.")

    monkeypatch.setattr(mpisim.train, "check", fail)
    assert main(["check", str(config), "--ranks", "2"]) == 1
    assert complaint(capsys) == "mpisim: a message must arrive; got none. Wait."


def test_ctrl_c_is_one_sentence_and_status_1(capsys, monkeypatch, config):
    def interrupt(config, ranks):
        raise KeyboardInterrupt

    monkeypatch.setattr(mpisim.train, "check", interrupt)
    assert main(["check", str(config), "--ranks", "2"]) == 1
    assert "interrupted" in capsys.readouterr().err.splitlines()[-1]


def test_a_reader_that_went_away_is_no_traceback(config):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "mpisim", "config", config],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


# -- commands --------------------------------------------------------------------------------------


def test_config_prints_the_resolved_config(capsys, config):
    assert main(["config", str(config), "--set", "optimizer.lr=0.25"]) == 0
    printed = config_from_mapping(tomllib.loads(capsys.readouterr().out))
    assert (printed.train.steps, printed.optimizer.lr) == (3, 0.25)
    assert printed.model == RunConfig().model


def test_train_starts_ranks_with_its_own_python(config, launched):
    arguments = ["train", str(config), "--ranks", "3", "--set", "train.steps=4", "--overwrite"]
    assert main([*arguments, "--mpi-args", "--mca pml 'u x'", "--mpi-args", "-v"]) == 1
    (job,) = launched
    assert job.command == [
        sys.executable, "-m", "mpisim", "train", str(config), "--set", "train.steps=4",
        "--overwrite",
    ]  # fmt: skip
    assert (job.ranks, job.hostfile, list(job.args)) == (3, None, ["--mca", "pml", "u x", "-v"])


def test_the_number_of_ranks_comes_from_the_option_or_the_config(capsys, config, launched):
    assert main(["train", str(config), "--set", "parallel.dp=5"]) == 1
    assert [job.ranks for job in launched] == [5]
    assert main(["train", str(config)]) == 2
    assert "number of ranks must be given" in complaint(capsys)
    assert len(launched) == 1


def test_an_existing_run_is_refused_before_anything_starts(capsys, config, launched, tmp_path):
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"config": {}, "versions": {}}')
    assert main(["train", str(config), "--ranks", "2"]) == 2
    assert "--overwrite" in complaint(capsys)
    assert not launched
    assert main(["train", str(config), "--ranks", "2", "--overwrite"]) == 1
    assert len(launched) == 1


def test_open_quotes_in_mpi_args_are_refused(capsys, config, launched):
    assert main(["train", str(config), "--ranks", "2", "--mpi-args", "'x"]) == 2
    assert "--mpi-args" in complaint(capsys)


def test_check_prints_text_or_rows_and_nothing_else(capsys, monkeypatch, config):
    seen = []

    def check(resolved, ranks):
        seen.append((resolved.train.steps, ranks))
        return SimpleNamespace(text=lambda: "all is well\n", rows=lambda: [{"a": 1}, {"a": 2}])

    monkeypatch.setattr(mpisim.train, "check", check)
    assert main(["check", str(config), "--ranks", "4"]) == 0
    assert capsys.readouterr().out == "all is well\n"
    assert main(["check", str(config), "--ranks", "4", "--json", "--set", "train.steps=9"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"a": 1}, {"a": 2}]
    assert seen == [(3, 4), (9, 4)]


def test_report_and_export_need_a_run_directory(capsys, monkeypatch, tmp_path):
    exported = []
    stub = SimpleNamespace(
        report_text=lambda run: f"report of {run.name}",
        report_rows=lambda run: [],
        export_perfetto=lambda run, out, steps: exported.append((out, steps)),
    )
    monkeypatch.setitem(sys.modules, "mpisim.report", stub)
    assert main(["report", str(tmp_path)]) == 2
    assert "run.json" in complaint(capsys)
    (tmp_path / "run.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"report of {tmp_path.name}\n"
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["trace", "export", str(tmp_path), "--format", "perfetto"]) == 0
    chosen = ["--out", str(tmp_path / "x.json"), "--steps", "3:5"]
    assert main(["trace", "export", str(tmp_path), *chosen]) == 0
    assert exported == [(tmp_path / "perfetto.json", None), (tmp_path / "x.json", (3, 5))]
    capsys.readouterr()
    for wrong in ("5", "5:3", "a:b", "3:3"):
        assert main(["trace", "export", str(tmp_path), "--steps", wrong]) == 2
        assert "FIRST:END" in complaint(capsys)


def test_bench_hands_on_its_options_and_its_status(capsys, monkeypatch):
    calls = []

    def measure(status, **options):
        calls.append(options)
        return SimpleNamespace(status=status, text="a table", rows=[{"ranks": options["ranks"]}])

    monkeypatch.setattr(mpisim.bench, "bench_collectives", partial(measure, 0))
    monkeypatch.setattr(mpisim.bench, "bench_trace", partial(measure, 1))
    command = ["bench", "collectives", "--ranks", "2", "--sizes", "7, 1KiB,4MiB", "--launches", "3"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"ranks": 2}]
    assert main(command) == 0
    assert capsys.readouterr().out == "a table\n"
    assert main(["bench", "trace", "--ranks", "4"]) == 1
    assert capsys.readouterr().out == ""  # the job has told why
    same = {"ranks": 2, "launches": 3, "sizes": (7, 1024, 4 << 20)}
    assert calls == [same, same, {"ranks": 4}]


# -- shell completion ------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(capsys, shell):
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "_MPISIM_COMPLETE" in out and "mpisim" in out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("mpisim tr", {"train", "trace"}), ("mpisim train x --set optimizer.l", {"optimizer.lr="})],
)
def test_completion_answers(typed, offered):
    done = python(
        "-m",
        "mpisim",
        _MPISIM_COMPLETE="bash_complete",
        COMP_WORDS=typed,
        COMP_CWORD=str(len(typed.split()) - 1),
    )
    assert {line.rpartition(",")[2] for line in done.stdout.splitlines()} == offered


# -- as a rank -------------------------------------------------------------------------------------


def ranks_of_one_launch(tmp_path, count, *arguments):
    """Run the command once per rank, as a launcher that is not ours would."""
    return [
        python(
            "-m", "mpisim", *arguments,
            TMPDIR=str(tmp_path), PMIX_NAMESPACE="test-1", OMPI_COMM_WORLD_SIZE=str(count),
            OMPI_COMM_WORLD_RANK=str(rank), MPI4PY_LIBMPI="whatever.so",
        )
        for rank in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [["train", "nowhere.toml"], ["train", "--nonsense"], ["train", "CONFIG", "--ranks", "5"]],
)
def test_under_mpirun_a_mistake_of_all_ranks_is_told_once(tmp_path, config, arguments):
    arguments = [str(config) if word == "CONFIG" else word for word in arguments]
    done = ranks_of_one_launch(tmp_path, 2, *arguments)
    assert [rank.returncode for rank in done] == [2, 2]
    (line,) = "".join(rank.stderr for rank in done).splitlines()
    assert line.startswith("mpisim: rank 0: ")


def test_a_rank_has_one_blas_thread_unless_the_user_chose(config):
    code = (
        "import os, sys, mpisim.train; from mpisim.cli import main\n"
        "def work(config, job, overwrite):\n"
        "    print(os.environ['OPENBLAS_NUM_THREADS'], os.environ['OMP_NUM_THREADS'], job.size)\n"
        "    job.finish()\n"
        "mpisim.train.train_rank = work\n"
        "assert 'numpy' not in sys.modules\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    env = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    env |= {"OPENBLAS_NUM_THREADS": "3"}
    done = python("-c", code, "train", config, **env)
    assert (done.returncode, done.stdout) == (0, "3 1 1\n"), done.stderr


# -- from Python -----------------------------------------------------------------------------------


def test_run_takes_a_file_a_mapping_or_a_config(monkeypatch, config):
    seen = []
    monkeypatch.setattr(mpisim.train, "run", lambda config, **kw: seen.append((config, kw)))
    mpisim.run(config, ranks=2)
    mpisim.run(str(config), overwrite=True)
    mpisim.run({"train": {"steps": 3}}, transport="local")
    mpisim.run(RunConfig())
    assert [each.train.steps for each, _ in seen] == [3, 3, 3, RunConfig().train.steps]
    assert [options for _, options in seen] == [
        {"ranks": 2, "overwrite": False, "transport": "mpi"},
        {"ranks": None, "overwrite": True, "transport": "mpi"},
        {"ranks": None, "overwrite": False, "transport": "local"},
        {"ranks": None, "overwrite": False, "transport": "mpi"},
    ]
    with pytest.raises(ConfigError, match="train.steps must be at least 1; got 0"):
        mpisim.run({"train": {"steps": 0}})
