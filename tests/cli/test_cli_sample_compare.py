"""`mpisim sample` and `mpisim compare`: what they print, refuse, and do not load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpisim.cli import main
from mpisim.config import config_from_mapping
from mpisim.launch.rank import BLAS_VARIABLES
from mpisim.nn.params import init_params
from mpisim.train.sample import sample
from mpisim.train.setup import build_model
from mpisim.train.weights import WEIGHTS_FILE, save_weights

ROOT = Path(__file__).parents[2]
OVERLAP = ROOT / "experiments" / "overlap" / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run directory of a decoder that was not trained."""
    path = tmp_path_factory.mktemp("run")
    config = config_from_mapping(
        {
            "data": {"kind": "stdlib", "window": 8},
            "model": {"kind": "decoder", "d_model": 8, "num_blocks": 1, "num_heads": 2},
        }
    )
    (path / "run.json").write_text(json.dumps({"config": config.model_dump(mode="json")}))
    # Of this seed; that of others may end its text at once.
    save_weights(path / WEIGHTS_FILE, init_params(build_model(config), 1, "float32"))
    return path


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    """Take back what a command sets for its own process."""
    for name in BLAS_VARIABLES:
        monkeypatch.setenv(name, "1")


def python(*arguments, **env):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        timeout=60,
        check=False,
    )


def complaint(capsys):
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("mpisim: ")
    return line


# -- sample ----------------------------------------------------------------------------------------


def test_sample_prints_prompt_and_text(capsys, run):
    options = ["--tokens", "30", "--temperature", "0.5", "--top-k", "3", "--seed", "4"]
    assert main(["sample", str(run), "--prompt", "def ", *options]) == 0
    out, err = capsys.readouterr()
    text = sample(run, "def ", 30, temperature=0.5, top_k=3, seed=4)
    assert 0 < len(text) <= 30
    assert out.startswith("def ") and out.endswith("\n") and err == ""
    # Neither what is no UTF-8 nor what acts on a terminal gets through.
    assert all(c.isprintable() or c in "\n\t" for c in out)
    printable = bytes(byte for byte in text if 32 <= byte < 127).decode()
    assert "".join(c for c in out[4:] if " " <= c <= "~") == printable


def test_sample_has_defaults_and_each_option_counts(capsys, run):
    def text(*options):
        assert main(["sample", str(run), *options]) == 0
        return capsys.readouterr().out

    first = text()
    explicit = ["--tokens", "200", "--temperature", "0.8", "--top-k", "40", "--seed", "0"]
    assert first == text("--prompt", "", *explicit)
    changed = [
        text(*option)
        for option in (
            ("--seed", "1"), ("--temperature", "0"), ("--top-k", "2"), ("--tokens", "3"),
            ("--prompt", "x"),
        )
    ]  # fmt: skip
    assert len({first, *changed}) == 6
    assert text("--tokens", "0") == "\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "-1"], "--tokens"),
        (["--tokens", "many"], "--tokens"),
        (["--temperature", "-0.5"], "--temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "inf"], "temperature"),
        (["--top-k", "-2"], "--top-k"),
        (["--seed", "-1"], "--seed"),
        (["--prompt", "\ud800"], "prompt"),
        (["--words"], "--words"),
    ],
)
def test_wrong_options_are_one_sentence_and_status_2(capsys, run, options, words):
    assert main(["sample", str(run), *options]) == 2
    assert words in complaint(capsys)


def test_a_run_that_cannot_be_sampled(capsys, run, tmp_path):
    assert main(["sample", str(tmp_path)]) == 2
    assert "run.json" in complaint(capsys)
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    assert main(["sample", str(tmp_path)]) == 1
    assert WEIGHTS_FILE in complaint(capsys)
    (tmp_path / WEIGHTS_FILE).write_bytes((run / WEIGHTS_FILE).read_bytes()[:-1])
    assert main(["sample", str(tmp_path)]) == 1
    assert "whole safetensors file" in complaint(capsys)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_of_any_encoding_gets_what_it_can_show(run, encoding):
    prompt = b"\xc3\xa9\xff".decode("utf-8", "surrogateescape")
    done = python(
        "-m", "mpisim", "sample", run, "--prompt", prompt, "--tokens", "40",
        PYTHONIOENCODING=encoding, PYTHONUTF8="1",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    start = {"ascii": b"??", "latin-1": b"\xe9?", "utf-8": "\u00e9\ufffd".encode()}[encoding]
    assert done.stdout.startswith(start)


def test_sample_uses_one_thread_unless_the_user_chose(run, monkeypatch):
    for name in BLAS_VARIABLES:
        monkeypatch.delenv(name)
    code = (
        "import os, sys; from mpisim.cli import main; assert 'numpy' not in sys.modules; "
        "main(sys.argv[1:]); print(os.environ['OPENBLAS_NUM_THREADS'])"
    )
    for env, threads in (({}, "1"), ({"OPENBLAS_NUM_THREADS": "3"}, "3")):
        done = python("-c", code, "sample", run, "--tokens", "1", **env)
        assert done.stdout.split()[-1].decode() == threads, done.stderr


def test_a_reader_that_went_away_is_no_traceback(run):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "mpisim", "sample", run, "--tokens", "5"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


# -- compare ---------------------------------------------------------------------------------------


def test_compare_prints_text_or_rows_and_nothing_else(capsys):
    assert main(["compare", str(OVERLAP), str(OVERLAP)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.splitlines()[-1].startswith(
        "verdict: final weights, as recorded, are bitwise equal"
    )
    assert main(["compare", str(OVERLAP), str(OVERLAP), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["section"] for row in rows} >= {
        "run", "data", "curve", "figure", "traffic", "stalls", "memory", "verdict", "weights",
    }  # fmt: skip


def test_the_order_of_the_runs_is_that_of_the_arguments(capsys, run, tmp_path):
    for name, seed in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        record = {"ranks": 1, "config": {"run": {"seed": seed}}}
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    for first, second in (("one", "two"), ("two", "one")):
        arguments = [str(tmp_path / first), str(tmp_path / second)]
        assert main(["compare", *arguments, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["path"] for row in rows if row["section"] == "run"] == arguments
        (row,) = (row for row in rows if row["section"] == "config")
        assert (row["a"], row["b"]) == ((1, 2) if first == "one" else (2, 1))


def test_compare_needs_two_run_directories(capsys, tmp_path):
    for arguments in ([], [OVERLAP], [OVERLAP, tmp_path], [tmp_path, OVERLAP], [OVERLAP] * 3):
        assert main(["compare", *map(str, arguments)]) == 2
        complaint(capsys)
    (tmp_path / "run.json").write_text("{}")
    assert main(["compare", str(OVERLAP), str(tmp_path)]) == 1
    assert "how many ranks" in complaint(capsys)


# -- what they load --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["sample", "RUN", "--tokens", "2"], "mpi4py matplotlib numba torch tqdm"),
        (["compare", "OVERLAP", "OVERLAP"], "mpi4py matplotlib numba torch numpy pydantic"),
        (["sample", "--help"], "mpi4py matplotlib numpy pydantic safetensors"),
        (["compare", "--help"], "mpi4py matplotlib numpy pydantic safetensors"),
    ],
)
def test_a_command_loads_only_what_it_needs(run, arguments, absent):
    places = {"RUN": str(run), "OVERLAP": str(OVERLAP)}
    code = (
        "import sys; from mpisim.cli import main; status = main(sys.argv[1:]); "
        "print('loaded', *sorted(sys.modules)); sys.exit(status)"
    )
    done = python("-c", code, *(places.get(word, word) for word in arguments))
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].decode().split())
    assert "click" in loaded and loaded.isdisjoint(absent.split())
