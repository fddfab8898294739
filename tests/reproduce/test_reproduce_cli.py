"""`mpisim reproduce`: what it prints, its exit status, and that its help is light."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import mpisim.reproduce
from mpisim.cli import main
from mpisim.reproduce import PAGES, Reproduction


def test_all_as_json_is_rows_and_nothing_else(capsys):
    assert main(["reproduce", "all", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["page"] for row in rows} == set(PAGES)
    assert not [row for row in rows if row["ok"] is False]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_printed(page, capsys):
    assert main(["reproduce", page]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(f"{page}: ")
    assert " 0 wrong" in out.splitlines()[-1]


def test_a_wrong_value_fails(monkeypatch, capsys):
    fake = Reproduction([], "a page\n", 1)
    monkeypatch.setattr(mpisim.reproduce, "reproduce", lambda name: fake)
    assert main(["reproduce", "busbw"]) == 1
    assert capsys.readouterr().out == "a page\n"


def test_a_bad_name_is_wrong_use(capsys):
    assert main(["reproduce", "zero-tabel2"]) == 2
    assert capsys.readouterr().err == (
        "mpisim: NAME must be one of zero-table1, zero-table2, korthikanti, playbook, estimators, "
        "busbw, bubbles or all; got 'zero-tabel2'. Did you mean zero-table2?\n"
    )


def test_help_names_every_page_and_loads_no_page(capsys):
    code = (
        "import sys; from mpisim.cli import main; status = main(['reproduce', '--help']); "
        "print('loaded', *sorted(sys.modules)); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    *text, loaded = done.stdout.splitlines()
    words = " ".join(text).replace(",", " ").replace(".", " ").split()
    assert set(PAGES) | {"all"} <= set(words)
    assert not {
        name for name in loaded.split()
        if name.split(".")[0] in ("numpy", "mpi4py", "pydantic", "fractions", "decimal")
        or name.startswith(("mpisim.reproduce", "mpisim.memory", "mpisim.launch"))
    }  # fmt: skip


def test_pages_start_no_mpi_and_draw_nothing():
    code = (
        "import sys; from mpisim.reproduce import reproduce; reproduce('all'); "
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    names = {name.split(".")[0] for name in done.stdout.split()}
    assert not names & {"mpi4py", "matplotlib"}
