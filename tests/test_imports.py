"""What importing the package loads, and what its sources may import (DESIGN, Layout)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mpisim"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXT_FILES = [
    path
    for folder in ("mpisim", "tests", "plots")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".txt", ".toml") and "__pycache__" not in path.parts
]
MAX_LINES = 600


def name_of(path):
    return str(path.relative_to(ROOT))


def loaded_by(code):
    """Return the top-level names of all modules that a fresh interpreter has after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "code",
    [
        "import mpisim",
        "import mpisim; mpisim.run; mpisim.__version__",
        "import mpisim.errors, mpisim.units, mpisim.mesh",
        "import mpisim.plan.text, mpisim.plan.check, mpisim.cost.price",
        "import mpisim.train, mpisim.launch, mpisim.cli",
    ],
)
def test_importing_loads_neither_mpi_nor_matplotlib_nor_numpy(code):
    """`--help` and `config` answer at once and never start MPI."""
    loaded = loaded_by(code)
    assert "mpisim" in loaded
    assert not loaded & {"mpi4py", "matplotlib", "numpy", "ml_dtypes"}


def test_training_on_threads_never_loads_mpi(tmp_path):
    code = (
        "import mpisim\n"
        f"values = {{'run': {{'dir': {str(tmp_path)!r}}}, 'data': {{'kind': 'regression'}},\n"
        "          'train': {'steps': 2}}\n"
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    mpisim.run(values, ranks=2, transport='local')"
    )
    loaded = loaded_by(code)
    assert "numpy" in loaded
    assert not loaded & {"mpi4py", "matplotlib"}


def imports_of(path):
    """Return the full names that a source file imports, at any depth, with the line."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
            names.append((node.module, node.lineno))
    return names


def test_sources_were_found():
    assert len(SOURCES) > 50
    assert PACKAGE / "comm" / "mpi.py" in SOURCES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_what_a_source_file_imports(path):
    """mpi4py is imported in comm/mpi.py only; matplotlib, pickle and tests nowhere."""
    forbidden = {"matplotlib", "pickle", "tests", "plots"}
    if path != PACKAGE / "comm" / "mpi.py":
        forbidden |= {"mpi4py"}
    for name, line in imports_of(path):
        assert name.partition(".")[0] not in forbidden, f"line {line}: {name}"


def test_comm_mpi_does_import_mpi4py():
    """Or the rule above would hold for an empty reason."""
    names = [name for name, _ in imports_of(PACKAGE / "comm" / "mpi.py")]
    assert any(name.partition(".")[0] == "mpi4py" for name in names)


@pytest.mark.parametrize("folder", ["plan", "cost"])
def test_plans_and_prices_import_no_arrays_and_no_messages(folder):
    for path in (PACKAGE / folder).glob("*.py"):
        for name, line in imports_of(path):
            parts = name.split(".")
            assert parts[0] != "numpy", f"{name_of(path)}:{line}"
            assert parts[:2] not in (["mpisim", "comm"], ["mpisim", "nn"]), f"{path}:{line}"


def test_the_reference_imports_only_errors_and_itself():
    """The oracle shares no code with what it judges."""
    for path in (PACKAGE / "reference").glob("*.py"):
        for name, line in imports_of(path):
            if name.partition(".")[0] == "mpisim":
                assert name == "mpisim.errors" or name.startswith("mpisim.reference"), line


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_source_file_is_too_long_to_read(path):
    """Docstrings and blank lines apart: 600 lines of code and comments."""
    text = path.read_text(encoding="utf-8")
    docs = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs += isinstance(node.value.value, str) and node.end_lineno - node.lineno + 1
    blank = sum(not line.strip() for line in text.splitlines())
    assert len(text.splitlines()) - docs - blank <= MAX_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_source_file_says_what_it_is(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)


def test_all_text_is_ascii():
    assert len(TEXT_FILES) > 80
    bad = [name_of(path) for path in TEXT_FILES if not path.read_bytes().isascii()]
    assert bad == []
