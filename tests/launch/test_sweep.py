"""What a killed job leaves behind is removed; what others use is not."""

import mmap
import os
import time
from pathlib import Path

import pytest

from mpisim.launch import Launcher
from mpisim.launch.job import _sweep

SHM = Path("/dev/shm")


@pytest.mark.skipif(not SHM.is_dir(), reason="shared memory has no folder here")
@pytest.mark.parametrize(("kind", "prefix"), [("mpich", "mpich_shm_"), ("openmpi", "sm_segment.")])
def test_segments_of_the_job_go_and_others_stay(kind, prefix):
    names = [SHM / f"{prefix}test_{os.getpid()}_{what}" for what in ("left", "used", "old")]
    left, used, old = names
    try:
        for path in names:
            path.write_bytes(bytes(mmap.PAGESIZE))
        os.utime(old, (1, 1))
        with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            _sweep(Launcher(kind, "/x", "5"), os.getpid(), time.time())
        assert [path.exists() for path in names] == [False, True, True]
    finally:
        for path in names:
            path.unlink(missing_ok=True)


def test_the_launchers_own_folder_goes(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for number in (7, 8):
        (tmp_path / f"ompi.{number}").mkdir()
    _sweep(Launcher("openmpi", "/x", "5"), 7, time.time())
    assert [path.name for path in tmp_path.iterdir()] == ["ompi.8"]
