"""Argument checks that the ladder's functions share.

Each function raises `ConfigError` with a sentence of the form ``<thing> must <rule>; got <value>.
<what to do>.`` and returns nothing else than what its name says. Called by the other modules of
`mpisim.reference`; not meant for callers outside.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np

from mpisim.errors import ConfigError

COMPUTE_DTYPES = ("float32", "float64")
"""Names of the dtypes that forward, backward and optimizers accept."""


def describe(value: object) -> str:
    """Return shape and dtype of an array, and the type of anything else."""
    if isinstance(value, np.ndarray):
        return f"shape {value.shape} and dtype {value.dtype}"
    return f"type {type(value).__name__}"


def require_float_array(name: str, array: object, ndim: int | None = None) -> None:
    """Raise unless `array` is a float32 or float64 ndarray with `ndim` dims (None: 1 or more).

    Arrays without dims are refused because NumPy turns the result of their arithmetic into
    scalars, which are no arrays.
    """
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.name not in COMPUTE_DTYPES
        or array.ndim == 0
        or ndim not in (None, array.ndim)
    ):
        dims = "1 or more dims" if ndim is None else f"{ndim} dim{'s' if ndim > 1 else ''}"
        raise ConfigError(
            f"{name} must be a float32 or float64 ndarray of {dims}; got {describe(array)}. "
            f"Convert it with numpy.asarray(..., dtype=numpy.float64)."
        )


def require_dtype(
    name: str, array: object, dtype: str, reason: str, ndim: int | None = None
) -> None:
    """Raise unless `array` has the one float dtype that a function takes, for a reason to give."""
    require_float_array(name, array, ndim)
    if array.dtype != np.dtype(dtype):
        raise ConfigError(
            f"{name} must be {dtype}; got {array.dtype}. {reason}: convert with "
            f"astype(numpy.{dtype})."
        )


def require_same_dtype(**arrays: np.ndarray) -> None:
    """Raise unless all arrays have the dtype of the first."""
    if len({array.dtype for array in arrays.values()}) > 1:
        got = ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
        raise ConfigError(
            f"{', '.join(arrays)} must have one dtype; got {got}. "
            f"Convert the inputs to the dtype of the parameters."
        )


def require_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise unless `array` has exactly `shape`."""
    if array.shape != shape:
        raise ConfigError(
            f"{name} must have shape {shape}; got {array.shape}. "
            f"Check which dim holds rows and which holds features."
        )


def require_int(name: str, value: object, minimum: int) -> int:
    """Return `value` as an int; raise unless it is an integer >= `minimum`."""
    try:
        number = operator.index(value)  # refuses 2.0 and "2", accepts NumPy integers
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)) or number < minimum:
        raise ConfigError(
            f"{name} must be an integer >= {minimum}; got {value!r}. "
            f"Pass a whole number in that range."
        )
    return number


def require_number(
    name: str, value: float, low: float, high: float = math.inf, low_open: bool = False
) -> float:
    """Return `value` as a float; raise unless finite and in [low, high), or (low, high)."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    above = number > low if low_open else number >= low
    if not (math.isfinite(number) and above and number < high):
        rule = f"{'>' if low_open else '>='} {low:g}"
        if high != math.inf:
            rule += f" and < {high:g}"
        raise ConfigError(
            f"{name} must be finite, {rule}; got {value!r}. Choose a value in that range."
        )
    return number


def require_choice(name: str, value: str, choices: Mapping[str, object]) -> None:
    """Raise unless `value` is a key of `choices`."""
    if value not in choices:
        raise ConfigError(
            f"{name} must be one of {', '.join(choices)}; got {value!r}. Use one of these names."
        )


def require_same_tensors(
    name: str, tensors: Mapping[str, np.ndarray], params: Mapping[str, np.ndarray]
) -> None:
    """Raise unless `tensors` has the names, shapes and dtypes of `params`, in any order."""
    missing = sorted(set(params) - set(tensors))
    unknown = sorted(set(tensors) - set(params))
    if missing or unknown:
        raise ConfigError(
            f"{name} must have one tensor for every parameter; got {missing or 'nothing'} missing "
            f"and {unknown or 'nothing'} unknown. Key every tensor by the name of its parameter."
        )
    for key, param in params.items():
        if tensors[key].shape != param.shape or tensors[key].dtype != param.dtype:
            raise ConfigError(
                f"{name}[{key!r}] must have shape {param.shape} and dtype {param.dtype} of its "
                f"parameter; got {describe(tensors[key])}. Check what this name is bound to."
            )


def require_saved(
    inputs: Sequence[np.ndarray], preactivations: Sequence[np.ndarray], num_layers: int, by: str
) -> None:
    """Raise unless what the forward function `by` saved is that of an MLP of `num_layers`."""
    if len(inputs) != num_layers or len(preactivations) != num_layers - 1:
        raise ConfigError(
            f"saved must hold {num_layers} layer inputs and {num_layers - 1} preactivations; got "
            f"{len(inputs)} and {len(preactivations)}. Pass what {by} returned for these "
            f"parameters."
        )
