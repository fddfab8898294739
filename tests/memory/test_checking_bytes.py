"""What looks at gradients and outputs works in the rank's scratch, whatever the values are."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from mpisim.engine import update
from mpisim.engine.handlers import _same_bits
from mpisim.engine.state import SCRATCH_BYTES
from mpisim.memory.tracker import hook_is_built, open_tracker
from mpisim.nn.kernels import load_kernels
from mpisim.nn.precision import dtype_of

DTYPES = ("float32", "float64", "bfloat16", "float16")
SIZES = (0, 1, 7, SCRATCH_BYTES, SCRATCH_BYTES + 5)


@pytest.fixture
def scratch():
    return np.empty(SCRATCH_BYTES, np.uint8)


@pytest.fixture
def taken():
    """Return a function: most bytes of new arrays during a call, and its result."""
    if not hook_is_built():
        pytest.skip("the allocator hook is not built")
    tracker = open_tracker("hook")

    def measure(call):
        call()
        before = tracker.live()
        tracker.reset_peak()
        result = call()
        return tracker.peak() - before, result

    yield measure
    tracker.close()


def values(size, dtype):
    return np.linspace(-3.0, 2.0, size, dtype=np.float32).astype(dtype_of(dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_values_are_found_without_a_byte(taken, scratch, dtype, size):
    array = values(size, dtype)
    assert taken(lambda: update._all_finite(array, scratch)) == (0, True)
    for bad in (math.inf, -math.inf, math.nan):
        for place in {0, size - 1} if size else ():
            changed = array.copy()
            changed[place] = bad
            assert taken(lambda c=changed: update._all_finite(c, scratch)) == (0, False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_largest_magnitude_is_found_without_a_byte(taken, scratch, dtype, size):
    array = values(size, dtype)
    largest = float(np.abs(array).max(initial=0.0))
    assert taken(lambda: update._largest(array, scratch)) == (0, largest)
    assert taken(lambda: update._largest(-array, scratch))[1] == largest


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_compared_without_a_byte(taken, scratch, dtype, size):
    array = values(size, dtype)
    other = array.copy()
    assert taken(lambda: _same_bits(array, other, scratch)) == (0, True)
    for place in {0, size - 1} if size else ():
        changed = array.copy()
        changed.view(f"u{array.itemsize}")[place] ^= 1
        assert taken(lambda c=changed: _same_bits(array, c, scratch)) == (0, False)


def test_nan_equals_itself_and_zero_is_not_minus_zero(scratch):
    array = np.array([math.nan, 0.0])
    assert _same_bits(array, array.copy(), scratch)
    assert not _same_bits(array, np.array([math.nan, -0.0]), scratch)


@pytest.mark.parametrize("sizes", [(5,), (3, 40_000), (0, 2)])
def test_a_norm_whose_squares_overflow_needs_a_number(taken, scratch, sizes):
    """Finite float64 gradients of 1e200: the tile of quotients lies in the scratch."""
    stores = [
        SimpleNamespace(own_grads=np.linspace(-1e200, 1e200, size) if size else np.empty(0))
        for size in sizes
    ]
    state = SimpleNamespace(
        stores=stores, update_scratch=scratch, kernels=load_kernels("numpy")
    )  # fmt: skip
    with np.errstate(over="ignore"):
        peak, norm = taken(lambda: update._own_norm(state, state.stores))
    assert peak <= 8
    scaled = np.concatenate([store.own_grads for store in stores]) / 1e200
    assert norm == pytest.approx(1e200 * np.linalg.norm(scaled), rel=1e-12)
