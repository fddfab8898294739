"""Which dtype parameters, activations, gradient sums and messages have, and the loss scale's kind.

A Policy is resolved once from the config and passed on; arithmetic itself is in the kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpisim.config.schema import PrecisionSection
from mpisim.errors import ConfigError

DtypeName = Literal["float32", "float64", "bfloat16", "float16"]
LossScaleKind = Literal["none", "static", "dynamic"]

_ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_HALVES = ("bfloat16", "float16")
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@functools.cache
def dtype_of(name: str) -> np.dtype:
    """Return the NumPy dtype of a dtype name; bfloat16 is that of `ml_dtypes`.

    Parameters
    ----------
    name : {"float32", "float64", "bfloat16", "float16"}

    Returns
    -------
    dtype

    Raises
    ------
    ValueError
        The name is another.
    """
    if name not in _ITEMSIZES:
        raise ValueError(
            f"dtype must be float32, float64, bfloat16 or float16; got {name!r}. "
            f"Choose one of them."
        )
    if name == "bfloat16":
        # Here and not above: most runs have no bfloat16 and need not load the package.
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def itemsize(name: str) -> int:
    """Return the bytes of one element of a dtype name."""
    return _ITEMSIZES[name]


def is_floating(dtype: np.dtype) -> bool:
    """Return whether a dtype holds real numbers; bfloat16 does, though NumPy's kind of it is V."""
    dtype = np.dtype(dtype)
    return dtype.kind == "f" or dtype.name == "bfloat16"


@dataclass(frozen=True)
class Policy:
    """The four dtypes of a run, by name; refuses combinations that make no sense.

    Raises
    ------
    ConfigError
        A dtype does not fit the others; names the field of the config.

    Notes
    -----
    =======  =============================================  ====================================
    field    dtype of                                       may be
    =======  =============================================  ====================================
    param    parameters that the optimizer updates          float32, float64
    compute  working weights, activations, their gradients  param; 16-bit if param is float32
    reduce   sums of gradients over microbatches and ranks  param; compute if that is 16-bit
    wire     gradients in messages                          reduce; 16-bit if reduce is float32
    =======  =============================================  ====================================

    Examples
    --------
    >>> policy = Policy("float32", "bfloat16", "float32", "bfloat16")
    >>> policy.has_master, policy.compute_dtype.itemsize, policy.wire_dtype.name
    (True, 2, 'bfloat16')
    """

    param: str
    """Dtype of the parameters; `model.dtype`."""
    compute: str
    """Dtype in which working weights, activations and their gradients are stored."""
    reduce: str
    """Dtype in which gradients are added up."""
    wire: str
    """Dtype of gradients in messages."""

    def __post_init__(self) -> None:
        if self.param not in ("float32", "float64"):
            raise ConfigError(
                f"model.dtype must be float32 or float64; got {self.param}. Set "
                f"model.dtype = 'float32' and precision.compute = {self.param!r}."
            )
        if self.compute != self.param and not (self.compute in _HALVES and self.param == "float32"):
            raise ConfigError(
                f"precision.compute must be model.dtype or, with model.dtype float32, bfloat16 or "
                f"float16; got {self.compute} with model.dtype {self.param}. "
                + (
                    "Set model.dtype = 'float32'."
                    if self.compute in _HALVES
                    else "Set precision.compute = 'same'."
                )
            )
        if self.reduce != self.param and not (
            self.reduce in _HALVES and self.reduce == self.compute
        ):
            raise ConfigError(
                f"precision.reduce must be model.dtype or a 16-bit precision.compute; got "
                f"{self.reduce} with model.dtype {self.param} and precision.compute "
                f"{self.compute}. Set precision.reduce = 'same'."
            )
        if self.wire != self.reduce and not (self.wire in _HALVES and self.reduce == "float32"):
            raise ConfigError(
                f"precision.wire must be precision.reduce or, with float32 there, bfloat16 or "
                f"float16; got {self.wire} with precision.reduce {self.reduce}. "
                f"Set precision.wire = 'same'."
            )

    @property
    def has_master(self) -> bool:
        """Whether working weights are a rounded copy of the parameters."""
        return self.compute != self.param

    @property
    def names(self) -> tuple[str, str, str, str]:
        """The four names, in the order of the fields."""
        return self.param, self.compute, self.reduce, self.wire

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """The distinct dtypes."""
        return tuple(map(dtype_of, dict.fromkeys(self.names)))

    @property
    def param_dtype(self) -> np.dtype:
        """Dtype of the parameters."""
        return dtype_of(self.param)

    @property
    def compute_dtype(self) -> np.dtype:
        """Dtype of working weights, activations and their gradients."""
        return dtype_of(self.compute)

    @property
    def reduce_dtype(self) -> np.dtype:
        """Dtype of gradient sums."""
        return dtype_of(self.reduce)

    @property
    def wire_dtype(self) -> np.dtype:
        """Dtype of gradients in messages."""
        return dtype_of(self.wire)

    @property
    def param_itemsize(self) -> int:
        """Bytes per parameter."""
        return _ITEMSIZES[self.param]

    @property
    def compute_itemsize(self) -> int:
        """Bytes per element of working weights and activations."""
        return _ITEMSIZES[self.compute]

    @property
    def reduce_itemsize(self) -> int:
        """Bytes per element of gradient sums."""
        return _ITEMSIZES[self.reduce]

    @property
    def wire_itemsize(self) -> int:
        """Bytes per gradient element in messages."""
        return _ITEMSIZES[self.wire]


def policy_of(model_dtype: str, precision: PrecisionSection) -> Policy:
    """Return the policy of a config, with every `same` replaced by what it stands for.

    Parameters
    ----------
    model_dtype : str
        `model.dtype`.
    precision : PrecisionSection

    Returns
    -------
    Policy

    Raises
    ------
    ConfigError
        The combination makes no sense; names the field.
    """
    compute = model_dtype if precision.compute == "same" else precision.compute
    reduce = model_dtype if precision.reduce == "same" else precision.reduce
    wire = reduce if precision.wire == "same" else precision.wire
    return Policy(param=model_dtype, compute=compute, reduce=reduce, wire=wire)


def loss_scale_kind(policy: Policy, precision: PrecisionSection) -> LossScaleKind:
    """Return how the loss is scaled, with `auto` resolved, after checking the scale's numbers.

    Parameters
    ----------
    policy : Policy
        `auto` is "dynamic" if one of its dtypes is float16, else "none": bfloat16 has the
        exponents of float32 and loses no small gradients.
    precision : PrecisionSection

    Returns
    -------
    {"none", "static", "dynamic"}

    Raises
    ------
    ConfigError
        The first scale is beyond float32, or a dynamic scale starts below its floor.
    """
    kind = precision.loss_scale
    if kind == "auto":
        halves = (policy.compute, policy.reduce, policy.wire)
        kind = "dynamic" if "float16" in halves else "none"
    if kind != "none" and precision.init_scale > _FLOAT32_MAX:
        raise ConfigError(
            f"precision.init_scale must be at most {_FLOAT32_MAX:.3g}, the largest float32; got "
            f"{precision.init_scale:g}. Lower it."
        )
    if kind == "dynamic" and precision.min_scale > precision.init_scale:
        raise ConfigError(
            f"precision.min_scale must be at most precision.init_scale; got "
            f"{precision.min_scale:g} with precision.init_scale {precision.init_scale:g}. "
            f"Lower precision.min_scale or raise precision.init_scale."
        )
    return kind
