"""Finding the launcher, and the flags and environment for it."""

import os
import sys

import pytest

from mpisim.errors import ConfigError
from mpisim.launch import Launcher, find_launcher, launch
from mpisim.launch.launchers import num_cores

OPENMPI = "mpirun (Open MPI) 5.0.11\\n\\nReport bugs to nobody"
MPICH = "HYDRA build details:\\n    Version:                                 5.0.2"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return a function that installs a launcher beside Python or on PATH."""
    beside, on_path = tmp_path / "env", tmp_path / "path"
    for folder in (beside / "bin", on_path):
        folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(beside))
    monkeypatch.setenv("PATH", str(on_path))

    def install(where, name, answer, status=0):
        path = {"beside": beside / "bin", "path": on_path}[where] / name
        path.write_text(f"#!/bin/sh\nprintf '{answer}\\n'\nexit {status}\n")
        path.chmod(0o755)
        return str(path)

    return install


@pytest.mark.parametrize(
    ("answer", "kind", "version"),
    [
        (OPENMPI, "openmpi", "5.0.11"),
        (MPICH, "mpich", "5.0.2"),
        ("Some other MPI 3", "unknown", "Some other MPI 3"),
    ],
)
def test_a_launcher_is_told_by_its_own_words(places, answer, kind, version):
    path = places("path", "mpirun", answer)
    assert find_launcher() == Launcher(kind, path, version)


def test_the_one_beside_python_is_preferred(places):
    places("path", "mpirun", OPENMPI)
    path = places("beside", "mpiexec", MPICH)
    assert find_launcher().path == path


def test_one_that_says_nothing_is_passed_over(places):
    places("beside", "mpirun", "", 1)
    path = places("path", "mpiexec", MPICH)
    assert find_launcher().path == path


def test_without_any_the_remedy_is_named(places):
    with pytest.raises(ConfigError, match=r'must be installed; got none .* pip install "mpisim'):
        find_launcher()
    broken = places("path", "mpirun", "")
    with pytest.raises(ConfigError, match=f"got no answer from {broken}"):
        find_launcher()


def test_flags():
    words = Launcher("openmpi", "/x/mpirun", "5").command_line(
        ["prog", "-n"], 4, hostfile="hosts", mpi_args=["--mca", "a", "b"], exported=["A", "B"]
    )
    assert words[:3] == ["/x/mpirun", "-n", "4"]
    assert words[-2:] == ["prog", "-n"]
    text = " ".join(words)
    assert "--map-by :OVERSUBSCRIBE" in text and "--hostfile hosts" in text
    assert "-x A -x B" in text and text.endswith("--mca a b prog -n")
    text = " ".join(Launcher("mpich", "/x/mpirun", "5").command_line(["prog"], 4, hostfile="hosts"))
    assert text.startswith("/x/mpirun -n 4 ") and "-f hosts" in text and "OVERSUB" not in text
    assert Launcher("unknown", "/x/mpirun", "5").command_line(["p"], 2) == [
        "/x/mpirun", "-n", "2", "p",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["openmpi", "mpich", "unknown"])
def test_C081_ranks_get_one_blas_thread_and_what_a_user_set_stays(kind):
    launcher = Launcher(kind, "/x/mpirun", "5")
    added = launcher.environment(2, {"OMP_NUM_THREADS": "7", "OMPI_MCA_btl": "tcp,self"})
    assert added["OPENBLAS_NUM_THREADS"] == added["MKL_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in added and "OMPI_MCA_btl" not in added
    assert "MPIR_CVAR_POLLS_BEFORE_YIELD" not in launcher.environment(
        2, {"MPIR_CVAR_POLLS_BEFORE_YIELD": "0"}
    )


def test_open_mpi_is_told_about_root_devices_and_crowded_cores():
    launcher = Launcher("openmpi", "/x/mpirun", "5")
    few, many = launcher.environment(1, {}), launcher.environment(num_cores() + 1, {})
    assert few["OMPI_MCA_btl"] == "^ofi"
    assert "OMPI_MCA_mpi_yield_when_idle" not in few
    assert many["OMPI_MCA_mpi_yield_when_idle"] == "1"
    is_root = os.geteuid() == 0
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in few) == is_root
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in few) == is_root


def test_mpich_yields_soon():
    assert Launcher("mpich", "/x", "5").environment(2, {})["MPIR_CVAR_POLLS_BEFORE_YIELD"] == "10"


def test_a_job_that_cannot_be_is_refused(places, tmp_path):
    with pytest.raises(ConfigError, match="number of ranks must be at least 1; got 0"):
        launch(["true"], 0)
    with pytest.raises(ConfigError, match="hostfile must be a file; got .*nowhere"):
        launch(["true"], 1, hostfile=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="must be installed"):
        launch(["true"], 1)
