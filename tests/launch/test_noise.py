"""Banners of the launchers are withheld; everything else passes, at once and unchanged."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisim.launch import noise
from mpisim.launch.noise import Filter

RULE = b"-" * 74 + b"\n"
ABORTED = (
    RULE + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Errorcode: 1\n\n"
    b"NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n" + RULE + RULE
    + b'prterun has exited due to process rank 1 with PID 0 on node vm calling\n"abort". This\n'
    + RULE + b"\0"
)  # fmt: skip
KILLED = (
    RULE + b"prterun noticed that process rank 1 with PID 5100 on node vm exited on\n"
    b"signal 9 (Killed).\n" + RULE
)
DOUBLE = b"=" * 83 + b"\n"
BAD_END = (
    b"\n" + DOUBLE + b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 5\n"
    + DOUBLE + b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    b"This typically refers to a problem with your application.\n"
    b"Please see the FAQ page for debugging suggestions\n"
)  # fmt: skip
ABORT_LINE = (
    b"Abort(1) on node 1 (rank 1 in comm 0): application called "
    b"MPI_Abort(MPI_COMM_WORLD, 1) - process 1\n"
)
CODES = b"[mpiexec@vm] Exit codes: [vm] 0,9,0,0\n"
BANNERS = [ABORTED, KILLED, BAD_END, ABORT_LINE, CODES]


def passed(chunks, idle=False):
    quiet = Filter()
    out = b""
    for chunk in chunks:
        out += quiet.feed(chunk)
        if idle:
            out += quiet.idle()
    return out + quiet.finish(), quiet


@pytest.mark.parametrize("banner", BANNERS)
def test_a_banner_is_withheld_and_kept(banner):
    out, quiet = passed([b"step 1\n", banner])
    assert out == b"step 1\n"
    assert banner.strip(b"\0\n") in quiet.withheld


@pytest.mark.parametrize("banner", BANNERS)
@given(data=st.data())
def test_however_it_is_cut_into_reads(banner, data):
    text = b"loss 3.2\n" + banner + b"last words\n"
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    out, _ = passed(chunks)
    assert out == b"loss 3.2\nlast words\n"


@given(st.lists(st.sampled_from(
    [b"a", b"step 1\n", b"\n", b"-", b"--", b"\r50%|## |", RULE, b"=" * 90 + b"\n", b"[x] y\n",
     b"Abort(", b" "]
)), st.booleans())  # fmt: skip
def test_what_is_no_banner_passes_unchanged(chunks, idle):
    out, quiet = passed(chunks, idle)
    assert out == b"".join(chunks)
    assert quiet.withheld == b""


def test_a_progress_bar_passes_at_once_and_hides_no_banner():
    quiet = Filter()
    assert quiet.feed(b"\rtrain: 50%|##   |") == b"\rtrain: 50%|##   |"
    assert quiet.feed(KILLED) == b""
    assert quiet.midline and b"signal 9" in quiet.withheld
    assert quiet.feed(CODES[:20]) + quiet.feed(CODES[20:]) == b""


def test_a_line_that_may_become_a_banner_is_held_for_a_moment_only():
    quiet = Filter()
    assert quiet.feed(b"-") == b""
    assert quiet.idle() == b"-"


def test_a_launcher_that_explains_why_it_does_not_start_is_heard():
    text = RULE + b"There are not enough slots available in the system\n" + RULE
    assert passed([text])[0] == text


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(noise)
    assert results.attempted and not results.failed
