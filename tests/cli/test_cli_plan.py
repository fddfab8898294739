"""`mpisim plan`: the search by its short name, the ops of a step, a plan text that is proved."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mpisim.cli import main
from mpisim.config import load_config


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        f'run.dir = "{tmp_path}/runs"\ntrain.steps = 2\ntrain.global_batch = 24\n'
        'data.kind = "regression"\ndata.num_rows = 60\nmodel.hidden = [16, 16]\n'
    )
    return path


def complaint(capsys):
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    (line,) = err.splitlines()
    return line.removeprefix("mpisim: ")


@pytest.mark.parametrize("words", [["plan"], ["plan", "search"]])
def test_the_search_by_both_names(config, capsys, words):
    assert main([*words, str(config), "--ranks", "2", "--budget", "1MiB"]) == 0
    out = capsys.readouterr().out
    assert "fit, best first:" in out and "\x1b" not in out
    last = out.splitlines()[-1]
    assert last == f"run it: mpisim train {config} --ranks 2 --set memory.budget_bytes=1048576"


def test_options_may_come_before_the_config(config, capsys):
    assert main(["plan", "--ranks", "2", "--budget", "1MiB", "--json", str(config)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["place"] == 1 and rows[0]["fits"] and rows[0]["budget_bytes"] == 1 << 20


def test_the_config_may_say_the_budget(config, capsys):
    words = ["plan", str(config), "--ranks", "1", "--set", "memory.budget_bytes=1MiB", "--no-data"]
    assert main(words) == 0
    assert "without the data set" in capsys.readouterr().out


def test_nothing_fits_is_status_1(config, capsys):
    assert main(["plan", str(config), "--ranks", "2", "--budget", "100KiB"]) == 1
    out, err = capsys.readouterr()
    assert "nothing fits. The nearest layout is" in out and "bytes too many" in out
    assert "run it" not in out and err == ""


def test_write_and_run_what_it_says(config, tmp_path, capsys):
    path = tmp_path / "best.toml"
    words = ["plan", str(config), "--ranks", "2", "--budget", "160KiB", "--write", str(path)]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"run it: mpisim train {path} --ranks 2"
    assert load_config(path).memory.budget_bytes == 160 << 10
    assert main(["check", str(path), "--ranks", "2"]) == 0
    capsys.readouterr()
    assert main(words) == 2
    assert "must be new" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ranks", "2", "--budget", "1MB"], "size must be a number with a unit of B, KiB, MiB"),
        (["--ranks", "2"], "the budget must be at least 1 byte; got 0"),
        (["--budget", "1MiB"], "Missing option '--ranks'"),
        (["--ranks", "5", "--budget", "1MiB"], "train.global_batch must be divisible"),
        (
            ["--ranks", "2", "--set", "memory.budget_bytes=5parsecs"],
            "memory.budget_bytes must be a number with a unit of B, KiB, MiB, GiB, TiB; got",
        ),
    ],
)
def test_what_is_refused(config, capsys, words, says):
    assert main(["plan", str(config), *words]) == 2
    assert says in complaint(capsys)


def test_help_explains_the_search_and_the_commands(capsys):
    assert main(["plan", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "mpisim plan CONFIG --ranks N [--budget SIZE]" in out
    for word in ("--budget SIZE", "--precision [keep|if-needed|any]", "--write FILE", "--no-data"):
        assert word in out
    for command in ("check Prove the plan", "search Search a layout", "show Print the plan"):
        assert command in out


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from mpisim.cli import main; main(['plan', '--help']); "
        "print(*[n for n in ('numpy', 'rich', 'pydantic', 'mpi4py') if n in sys.modules], 'end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "end"


def test_a_plan_text_and_its_edit(config, tmp_path, capsys):
    assert main(["plan", "show", str(config), "--ranks", "2"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "plan.txt"
    path.write_text(text)
    assert main(["plan", "check", str(path)]) == 0
    assert "ok: order, matching, deadlock, leaks" in capsys.readouterr().out
    number = next(n for n, x in enumerate(text.splitlines(), 1) if "StartSync" in x)
    count = text.split("StartSync")[1].split("count=")[1].split()[0]
    path.write_text(text.replace(f"count={count}", "count=3", 1))
    assert main(["plan", "check", str(path)]) == 1
    assert f"plan line {number} must move all {count} elements" in complaint(capsys)
    path.write_text(text.replace("micro=0", "micro=x", 1))
    assert main(["plan", "check", str(path)]) == 2
    assert "must be an op or a head line" in complaint(capsys)
