"""The measurement of NumPy's memory: exact with the hook, honest without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpisim
from mpisim.errors import ConfigError
from mpisim.memory import tracker as tracker_module
from mpisim.memory.tracker import (
    hook_is_built,
    open_tracker,
    peak_resident_bytes,
    reset_peak_resident,
    resident_bytes,
)

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

needs_hook = pytest.mark.skipif(not hook_is_built(), reason="the allocator hook is not built")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def tracker():
    tracker = open_tracker("hook")
    yield tracker
    tracker.close()


@pytest.fixture
def not_built(monkeypatch):
    monkeypatch.setattr(tracker_module, "_allocator", None)
    monkeypatch.setattr(tracker_module, "_why_not_built", "no module")


def handler_name():
    core = np._core if hasattr(np, "_core") else np.core
    return core.multiarray.get_handler_name()


# The build


def compiler_is_here():
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return shutil.which(compiler) is not None and header.is_file()


def test_the_hook_is_built_where_a_compiler_is():
    """Otherwise a build that broke would only show as skipped tests."""
    if Path(mpisim.__file__).parents[1] != ROOT or not compiler_is_here():
        pytest.skip("not a development install, or no compiler")
    assert hook_is_built(), "run `make install` or `pip install -e .` again"


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler", None])
def test_a_build_without_a_compiler_goes_on_without_the_hook(tmp_path, compiler):
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("setuptools is older than the build asks for")
    if compiler is None and not compiler_is_here():
        pytest.skip("no compiler")
    environment = os.environ | ({} if compiler is None else {"CC": compiler})
    command = ["setup.py", "build_ext", "--build-lib", tmp_path / "lib"]
    done = subprocess.run(
        [sys.executable, *command, "--build-temp", tmp_path / "temp"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    built = [path.name.split(".")[0] for path in tmp_path.rglob("*.so")]
    assert built == ([] if compiler else ["_allocator"])
    assert ('"mpisim.memory._allocator" failed' in done.stdout + done.stderr) == bool(compiler)


# Exactness of the hook

MADE = {
    "empty": (lambda: np.empty(1000, "f4"), 4000),
    "zeros": (lambda: np.zeros((3, 5, 7), "f8"), 840),
    "large zeros": (lambda: np.zeros(5 * MIB, "u1"), 5 * MIB),
    "large empty": (lambda: np.empty(5 * MIB + 1, "u1"), 5 * MIB + 1),
    "one byte": (lambda: np.empty(1, "u1"), 1),
    "bool": (lambda: np.ones(13, bool), 13),
    "complex": (lambda: np.ones((2, 2), "c16"), 64),
    "float16": (lambda: np.full(3, 1, "f2"), 6),
    "bfloat16": (lambda: np.zeros(11, ml_dtypes.bfloat16), 22),
    "record": (lambda: np.zeros(4, "f8,i2"), 40),
    "string": (lambda: np.array(["ab", "cde"]), 24),
    "Fortran order": (lambda: np.empty((3, 4), "i4", order="F"), 48),
    "no dimension": (lambda: np.array(1.5), 8),
    "size zero": (lambda: np.empty((0, 5), "f8"), 1),
    "size zero of zeros": (lambda: np.zeros((3, 0), "f4"), 1),
    "sum of two": (lambda: FIXED + FIXED, 800),
    "copy": (lambda: FIXED.copy(), 800),
    "astype": (lambda: FIXED.astype("f4"), 400),
    "fancy index": (lambda: FIXED[np.array([1, 2, 3])], 24),
    "concatenate": (lambda: np.concatenate([FIXED, FIXED]), 1600),
    "matmul": (lambda: SQUARE @ SQUARE, 800),
    "repeated, then cut": (lambda: np.resize(FIXED, 250), 2400),  # a view of three copies
    "view": (lambda: FIXED[10:20], 0),
    "reshape": (lambda: FIXED.reshape(10, 10), 0),
    "transpose": (lambda: SQUARE.T, 0),
    "from a buffer": (lambda: np.frombuffer(b"01234567", "f8"), 0),
    "in place": (lambda: np.add(FIXED, 0, out=FIXED), 0),
}
FIXED = np.arange(100.0)
SQUARE = np.ones((10, 10))


@needs_hook
@pytest.mark.parametrize("name", MADE)
def test_live_is_what_an_array_owns_and_nothing_after_it_is_gone(tracker, name):
    make, nbytes = MADE[name]
    array = make()
    assert tracker.live() == nbytes
    assert tracker.peak() >= nbytes
    del array
    assert tracker.live() == 0


@needs_hook
def test_random_shapes_and_dtypes_are_counted_to_the_byte(tracker):
    with tracker.aside():  # a generator has arrays as well
        generator = np.random.default_rng(5)
        shapes = generator.integers(1, 40, size=(300, 3)).tolist()
    held, want = [], 0
    for i, shape in enumerate(shapes):
        array = np.empty(shape, ["u1", "f2", "f4", "f8", "c16"][i % 5])
        held.append(array)
        want += array.nbytes
        if i % 3 == 2:
            want -= held.pop(i % len(held)).nbytes
        del array
        assert tracker.live() == want
    held.clear()
    assert tracker.live() == 0


@needs_hook
def test_data_lie_at_multiples_of_64(tracker):
    for size in (1, 7, 64, 1000, 1024, 5000, 1 << 17, 5 * MIB):
        arrays = [np.empty(size, "u1") for _ in range(3)]
        arrays.append(np.zeros(size, "u1"))
        assert [array.ctypes.data % 64 for array in arrays] == [0] * 4
        assert not arrays[-1].any()


@needs_hook
@pytest.mark.parametrize("start", [1, 100, 5000, MIB])
def test_a_buffer_that_grows_or_shrinks_keeps_its_bytes(tracker, start):
    array = np.arange(start, dtype="f8")
    # Blocks in between, so that growing in place often fails and the block moves.
    between = []
    for size in (start * 2, start * 9 + 1, start // 2 + 1, 300_000, 3):
        between.append(np.zeros(997, "u1"))
        kept = min(size, array.size)
        array.resize(size, refcheck=False)
        assert tracker.live() == size * 8 + 997 * len(between)
        assert array.ctypes.data % 64 == 0
        assert (array[:kept] == range(kept)).all() and not array[kept:].any()
        array[:] = range(size)
    assert not any(block.any() for block in between)


@needs_hook
def test_arrays_of_unknown_length_end_at_their_own_size(tracker):
    array = np.fromiter((i * i for i in range(1000)), "i4")
    assert array.tolist() == [i * i for i in range(1000)]
    assert tracker.live() == 4000
    assert tracker.peak() >= 4000


@needs_hook
def test_peak_is_the_most_at_one_time_and_starts_again(tracker):
    a = np.empty(1000, "u1")
    b = np.empty(500, "u1")
    del a
    assert (tracker.live(), tracker.peak()) == (500, 1500)
    tracker.reset_peak()
    assert (tracker.live(), tracker.peak()) == (500, 500)
    c = np.empty(10, "u1")
    del b, c
    assert (tracker.live(), tracker.peak()) == (0, 510)


@needs_hook
def test_the_peak_counts_temporaries_of_an_expression(tracker):
    x = np.ones((10, 100))
    tracker.reset_peak()
    y = np.exp(x.reshape(-1)) * np.log(x.reshape(-1))
    # x, then exp and log; NumPy multiplies into one of the two only when they are large.
    assert (tracker.live(), tracker.peak()) == (16000, 32000)
    del y


@needs_hook
def test_buffers_and_frees_are_counted():
    from mpisim.memory import _allocator

    counter = _allocator.Counter()
    previous = counter.install()
    try:
        assert counter.installed()
        arrays = [np.empty(10, "u1") for _ in range(5)]
        arrays[0].resize(20, refcheck=False)
        del arrays[1:3]
        assert (counter.allocations, counter.frees, counter.live) == (5, 2, 40)
    finally:
        _allocator.restore(previous)
    assert not counter.installed()
    with pytest.raises(TypeError, match=r"must get what install\(\) returned; got None"):
        _allocator.restore(None)
    with pytest.raises(TypeError, match="takes no arguments"):
        _allocator.Counter(1)
    with pytest.raises(AttributeError):
        counter.live = 0


# Whose arrays


@needs_hook
def test_arrays_made_before_are_not_counted_when_they_go():
    array = np.ones(1000)
    tracker = open_tracker("hook")
    try:
        del array
        assert (tracker.live(), tracker.peak()) == (0, 0)
    finally:
        tracker.close()


@needs_hook
def test_an_array_outlives_its_tracker_and_is_still_counted_out():
    tracker = open_tracker("hook")
    array = np.arange(1000)
    tracker.close()
    after = np.ones(10)
    assert tracker.live() == 8000
    live = tracker.live
    del tracker
    assert array.sum() == 499500
    del array
    assert live() == 0
    assert after.sum() == 10


@needs_hook
def test_arrays_outlive_every_python_object_of_their_counter():
    """Their capsules keep the figures; a free would otherwise write into memory given back."""
    from mpisim.memory import _allocator

    arrays = []
    for i in range(50):
        counter = _allocator.Counter()
        previous = counter.install()
        arrays.append(np.full(100 + i, i))
        _allocator.restore(previous)
        del counter, previous
    assert [int(array[-1]) for array in arrays] == list(range(50))
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join(timeout=30)
    assert arrays == []


@needs_hook
def test_two_threads_count_their_own_arrays_only():
    figures, barrier, foreign = {}, threading.Barrier(3, timeout=30), []

    def rank(index):
        tracker = open_tracker("hook")
        try:
            barrier.wait()
            arrays = [np.empty(1000 * (index + 1), "u1") for _ in range(20)]
            foreign.append(np.empty(7 * (index + 1), "u1"))
            barrier.wait()
            del arrays[:5]
            figures[index] = tracker.live(), tracker.peak()
            barrier.wait()
            barrier.wait()
            figures[index] += (tracker.live(),)
        finally:
            tracker.close()

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    barrier.wait()
    mine = np.ones(5000)  # of a thread without a tracker: counted by nobody
    barrier.wait()
    barrier.wait()
    foreign.clear()  # freed by another thread than made them
    barrier.wait()
    for thread in threads:
        thread.join(timeout=30)
    assert figures == {0: (15_007, 20_007, 15_000), 1: (30_014, 40_014, 30_000)}
    assert mine.sum() == 5000


@needs_hook
def test_arrays_passed_to_and_fro_between_threads_leave_nothing():
    trackers, boxes = [], [[], []]
    barrier = threading.Barrier(2, timeout=30)

    def rank(index):
        tracker = open_tracker("hook")
        trackers.append(tracker)
        for _ in range(20):
            boxes[index] = [np.empty(50 + i, "u2") for i in range(100)]
            barrier.wait()
            boxes[1 - index].clear()
            barrier.wait()
        tracker.close()

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [tracker.live() for tracker in trackers] == [0, 0]
    assert [tracker.peak() for tracker in trackers] == [2 * sum(range(50, 150))] * 2


@needs_hook
def test_closing_puts_the_own_allocator_back():
    before = handler_name()
    outer = open_tracker("hook")
    inner = open_tracker("hook")
    assert handler_name() == "mpisim_counter"
    array = np.empty(100, "u1")
    assert (outer.live(), inner.live()) == (0, 100)
    inner.close()
    other = np.empty(10, "u1")
    assert (outer.live(), inner.live()) == (10, 100)
    inner.close()  # nothing more, though the outer one is open
    assert handler_name() == "mpisim_counter"
    outer.close()
    outer.close()
    assert handler_name() == before == "default_allocator"
    with outer.aside():
        assert handler_name() == before
    del array, other


@needs_hook
def test_closing_in_another_thread_leaves_that_threads_allocator_alone():
    mine = open_tracker("hook")
    try:
        opened = []
        thread = threading.Thread(target=lambda: opened.append(open_tracker("hook")))
        thread.start()
        thread.join(timeout=30)
        opened[0].close()
        array = np.empty(100, "u1")
        assert (mine.live(), opened[0].live()) == (100, 0)
        del array
    finally:
        mine.close()


# The cap


@needs_hook
@pytest.mark.parametrize("make", [np.empty, np.zeros])
def test_the_cap_refuses_one_byte_more_and_changes_nothing(tracker, make):
    held = make(400, "u1")
    tracker.set_cap(1000)
    at_cap = make(600, "u1")
    assert tracker.live() == 1000
    del at_cap
    with pytest.raises(MemoryError):
        make(601, "u1")
    assert (tracker.live(), tracker.peak()) == (400, 1000)
    assert tracker._counter.refused == 1
    tracker.set_cap(None)
    assert tracker._counter.cap is None
    more = make(5000, "u1")
    assert tracker.live() == 5400
    del held, more


@needs_hook
def test_the_cap_holds_for_a_buffer_that_grows(tracker):
    array = np.arange(100, dtype="u1")
    tracker.set_cap(200)
    array.resize(200, refcheck=False)
    with pytest.raises(MemoryError):
        array.resize(201, refcheck=False)
    assert (tracker.live(), tracker.peak()) == (200, 200)
    assert array[:100].tolist() == list(range(100)) and array.size == 200
    # A cap below what is live: nothing new, but shrinking and freeing go on.
    tracker.set_cap(50)
    array.resize(100, refcheck=False)
    with pytest.raises(MemoryError):
        np.empty(1, "u1")
    assert tracker.live() == 100


@needs_hook
def test_the_system_without_memory_is_no_refusal_and_leaves_the_figures(tracker):
    with pytest.raises(MemoryError):
        np.empty(1 << 60, "u1")
    with pytest.raises(MemoryError):
        np.zeros(1 << 60, "u1")
    assert (tracker.live(), tracker.peak(), tracker._counter.refused) == (0, 0, 0)


@needs_hook
@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_cap_that_is_no_number_of_bytes_is_refused(tracker, nbytes):
    message = f"memory cap must be a positive number of bytes; got {nbytes}. Use None for no cap."
    with pytest.raises(ConfigError, match=re.escape(message)):
        tracker.set_cap(nbytes)


# Aside


@needs_hook
def test_arrays_made_aside_are_counted_apart(tracker):
    tracker.set_cap(1000)
    kept = np.empty(100, "u1")
    with tracker.aside():
        recorded = np.empty(3000, "u1")  # past the cap, which is for the others
        with tracker.aside():
            nested = np.empty(50, "u1")
        passing = np.empty(7, "u1")
        del passing
    after = np.empty(20, "u1")
    assert (tracker.live(), tracker.peak()) == (120, 120)
    assert (tracker.aside_live(), tracker.aside_peak()) == (3050, 3057)
    del recorded
    tracker.reset_peak()
    assert (tracker.aside_live(), tracker.aside_peak()) == (50, 50)
    del kept, nested, after


@needs_hook
def test_an_error_inside_aside_ends_it(tracker):
    with pytest.raises(KeyError), tracker.aside():
        raise KeyError
    array = np.empty(9, "u1")
    assert (tracker.live(), tracker.aside_live()) == (9, 0)
    del array


# Without the hook


def test_auto_takes_the_hook_where_it_is_built():
    tracker = open_tracker()
    try:
        assert tracker.kind == ("hook" if hook_is_built() else "tracemalloc")
        assert tracker.exact == hook_is_built()
    finally:
        tracker.close()


def test_auto_falls_back_and_the_hook_by_name_is_refused(not_built):
    assert not hook_is_built()
    tracker = open_tracker("auto")
    tracker.close()
    assert tracker.kind == "tracemalloc" and not tracker.exact
    with pytest.raises(ConfigError, match=r"must be compiled with the package; got 'no module'\. "):
        open_tracker("hook")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="'tracemalloc' or 'off'; got 'fast'"):
        open_tracker("fast")


def test_tracemalloc_finds_the_live_bytes_of_numpy():
    assert not tracemalloc.is_tracing()
    tracker = open_tracker("tracemalloc")
    try:
        arrays = [np.empty(MIB, "u1"), np.zeros((3, 5))]
        objects = [str(i) for i in range(1000)]  # Python's own, which live() must not see
        assert tracker.live() == MIB + 120
        assert MIB + 120 <= tracker.peak() < MIB + 500_000
        del arrays[0], objects
        assert tracker.live() == 120
        assert tracker.peak() >= MIB + 120
        tracker.reset_peak()
        assert 120 <= tracker.peak() < 500_000
        with tracker.aside():
            arrays.append(np.empty(1000, "u1"))
        assert tracker.live() == 1120
        assert tracker.aside_live() == tracker.aside_peak() == 0
        with pytest.raises(ConfigError, match="must have the memory tracker 'hook'; got 'tracem"):
            tracker.set_cap(1000)
        tracker.set_cap(None)
    finally:
        tracker.close()
    assert not tracemalloc.is_tracing()
    tracker.reset_peak()
    tracker.close()
    assert tracker.live() == 1120 and tracker.peak() >= 1120
    del arrays


def test_tracemalloc_goes_on_until_the_last_tracker_is_closed():
    first = open_tracker("tracemalloc")
    array = np.empty(1000, "u1")
    second = open_tracker("tracemalloc")
    other = np.empty(10, "u1")
    first.close()
    assert tracemalloc.is_tracing()
    assert (first.live(), second.live()) == (1010, 10)
    second.close()
    assert not tracemalloc.is_tracing()
    del array, other


def test_tracing_that_someone_else_started_is_left_on():
    tracemalloc.start()
    try:
        array = np.empty(1000, "u1")
        tracker = open_tracker("tracemalloc")
        assert tracker.live() == 0
        tracker.close()
        assert tracemalloc.is_tracing()
        del array
    finally:
        tracemalloc.stop()


def test_off_measures_nothing_and_changes_nothing():
    tracker = open_tracker("off")
    with tracker.aside():
        array = np.ones(1000)
    assert handler_name() == "default_allocator" and not tracemalloc.is_tracing()
    tracker.reset_peak()
    tracker.set_cap(None)
    assert tracker.live() == tracker.peak() == 0
    assert tracker.aside_live() == tracker.aside_peak() == 0
    assert (tracker.kind, tracker.exact) == ("off", False)
    with pytest.raises(ConfigError, match="must have the memory tracker 'hook'; got 'off'"):
        tracker.set_cap(1)
    tracker.close()
    del array


# The resident set


def test_maxrss_is_bytes_on_macos_and_kib_elsewhere():
    """C139: the same figure, 1024 times apart."""
    assert tracker_module._maxrss_bytes(2048, "darwin") == 2048
    assert tracker_module._maxrss_bytes(2048, "linux") == 2 << 20


LAZY = """
import numpy as np
from mpisim.memory.tracker import open_tracker, peak_resident_bytes, resident_bytes
tracker = open_tracker("auto")
size = 240_000_000
def figures():
    return resident_bytes(), peak_resident_bytes(), tracker.live()
start = figures()
ones = np.ones(size, "u1")
full = figures()
del ones
freed = figures()
zeros = np.zeros(size, "u1")
lazy = figures()
print([[now - then for now, then in zip(f, start)] for f in (full, freed, lazy)])
"""


@linux_only
def test_resident_pages_are_not_array_bytes():
    """C139: a high-water mark never falls, freed memory leaves, untouched zeros add nothing."""
    command = [sys.executable, "-c", LAZY]
    environment = os.environ | {"PYTHONPATH": str(Path(mpisim.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (full, freed, lazy) = [
        [int(n) for n in row.split(",")] for row in re.findall(r"\[([-0-9, ]+)\]", done.stdout)
    ]
    size, slack = 240_000_000, 4 * MIB
    assert [abs(n - size) < slack for n in full[:2]] == [True, True]
    assert abs(freed[0]) < slack and abs(freed[1] - size) < slack
    assert abs(lazy[0]) < slack and abs(lazy[1] - size) < slack
    # What a budget is checked against: the bytes asked for, whatever the pages do.
    assert [full[2], freed[2], lazy[2]] == [size, 0, size]


@linux_only
def test_the_resident_peak_can_be_taken_back():
    array = np.ones(64 * MIB, "u1")
    assert peak_resident_bytes() >= resident_bytes() >= 64 * MIB
    high = peak_resident_bytes()
    del array
    if not reset_peak_resident():
        pytest.skip("this system does not let a process reset its peak")
    assert peak_resident_bytes() <= high - 32 * MIB


def test_a_system_without_proc_has_a_peak_and_no_current_figure(monkeypatch):
    def no_file(*_args, **_kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(tracker_module, "open", no_file, raising=False)
    assert resident_bytes() is None
    assert peak_resident_bytes() > MIB
    assert not reset_peak_resident()
