"""Arrays as layers need them: first values, the dtype they are computed in, tokens as rows.

No layer and no formula of one here; reductions and tiles are in `numerics`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mpisim.errors import BatchError


class Initial(NamedTuple):
    """How a parameter starts: every element `constant`, or normal with deviation `scale`."""

    scale: float = 0.0
    """Standard deviation; 0: no number is drawn."""
    constant: float = 0.0
    """Value of every element if none is drawn."""


def normal_weights(
    rng: np.random.Generator, shape: tuple[int, ...], scale: float, dtype: np.dtype
) -> np.ndarray:
    """Draw normal numbers of standard deviation `scale` in float64 and round them to `dtype`.

    All dtypes start from the same numbers; 16-bit weights are the rounded float32 weights, which
    the float32 masters of a 16-bit run start from.
    """
    draws = rng.standard_normal(shape)
    draws *= scale
    return draws.astype(wide_dtype(dtype), copy=False).astype(dtype, copy=False)


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values stored as `dtype` are computed with."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def as_rows(array: np.ndarray) -> np.ndarray:
    """Return `array` as a C-contiguous matrix whose columns are its last dim."""
    return np.ascontiguousarray(array).reshape(math.prod(array.shape[:-1]), array.shape[-1])


def require_length(num_tokens: int, max_len: int) -> None:
    """Raise BatchError if a row of tokens is longer than the model's range."""
    if num_tokens > max_len:
        raise BatchError(
            f"a row must have at most model.max_len = {max_len} tokens; got {num_tokens}. Cut the "
            f"rows, or raise model.max_len."
        )
