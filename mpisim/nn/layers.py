"""Layers: frozen dataclasses that hold sizes and nothing else.

Parameters, saved arrays and gradients are passed in and returned; no layer changes an argument.
Loss layers live in `losses`, groups of layers in `blocks`; `spec` feeds plan, cost and memory.

Shape suffixes: B batch rows, K window, V vocabulary, D embedding width, I inputs, O outputs,
F features of an activation, N positions (B * K), U distinct ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np

from mpisim.layouts.specs import LayerSpec, ParamSpec
from mpisim.nn.numerics import flat_view, tile_slices

ActivationKind = Literal["relu", "tanh", "gelu"]
InitScheme = Literal["he", "xavier"]
RngFor = Callable[[str], np.random.Generator]
Arrays = dict[str, np.ndarray]
Saved = tuple[np.ndarray, ...]

_GELU_SCALE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


@dataclass(frozen=True, eq=False)
class LayerContext:
    """What a call needs and a layer must not hold."""

    targets: np.ndarray | None = None
    """Read by loss layers: class ids of shape (B,), or floats of shape (B, num_targets)."""


class Layer(Protocol):
    """What every layer offers.

    `saved` is a plain tuple of arrays: the sum of `nbytes` of its floating arrays is the layer's
    activation memory, and dropping it is freeing it. Integer arrays in `saved` (token ids) are
    data that the caller holds anyway and are not counted. Zero rows are legal everywhere.
    """

    param_names: ClassVar[tuple[str, ...]]

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return fresh parameters; `rng_for(local_name)` is the generator of one of them."""
        ...

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return the output and what backward needs."""
        ...

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray | None, Saved]:
        """Return the input's gradient (None if it has none) and what backward_weight needs."""
        ...

    def backward_weight(self, saved: Saved, kept: Saved, ctx: LayerContext) -> Arrays:
        """Return newly allocated gradients of the parameters, by local name."""
        ...

    def backward(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray | None, Arrays]:
        """Return both: backward_input, then backward_weight."""
        ...

    def spec(self, x_shape: tuple[int, ...], dtype: np.dtype, name: str) -> LayerSpec:
        """Return the costs for one input shape; parameter names are prefixed with `name`."""
        ...


class PlainBackward:
    """The plain backward of every layer: both halves in order."""

    def backward(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray | None, Arrays]:
        """Return `(dx, grads)`: backward_input, then backward_weight.

        Parameters
        ----------
        params : dict of str to ndarray
            The layer's parameters by local name.
        saved : tuple of ndarray
            Second result of the forward call.
        dy : ndarray
            Gradient of the output.
        ctx : LayerContext
            The context of the forward call.

        Returns
        -------
        dx : ndarray or None
            Gradient of the input; None if the input has none.
        grads : dict of str to ndarray
            Gradients of the parameters by local name, newly allocated.
        """
        dx, kept = self.backward_input(params, saved, dy, ctx)
        return dx, self.backward_weight(saved, kept, ctx)


class NoParams(PlainBackward):
    """The parts of the interface that a layer without parameters leaves empty."""

    param_names: ClassVar[tuple[str, ...]] = ()

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return no parameters."""
        return {}

    def backward_weight(self, saved: Saved, kept: Saved, ctx: LayerContext) -> Arrays:
        """Return no gradients."""
        return {}


@dataclass(frozen=True)
class Embedding(PlainBackward):
    """Look up one row of a table per id and lay the rows of a window side by side.

    Notes
    -----
    Forward: ``y[b, k * D : (k + 1) * D] = weight[ids[b, k]]``.

    Saved: the ids, shape (B, K), as they came. They are data, not activations: integer, held by
    the caller, 0 bytes in `spec`.

    Backward: ``dweight[v]`` is the sum of the slices of `dy` at the places where ``ids == v``,
    added in the order of the batch; the ids have no gradient.

    Weights start as standard normal numbers, so that a slice has unit variance per element.
    """

    vocab_size: int
    """Number of ids, V."""
    embed_dim: int
    """Width of one row, D."""

    param_names: ClassVar[tuple[str, ...]] = ("weight",)

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return ``{"weight": (V, D)}`` drawn from the standard normal distribution."""
        shape = (self.vocab_size, self.embed_dim)
        return {"weight": _normal(rng_for("weight"), shape, 1.0, dtype)}

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return the flattened embeddings.

        Parameters
        ----------
        params : dict
            ``{"weight": (V, D)}``.
        x : ndarray of shape (B, K), any integer dtype
            Ids in 0..V-1.
        ctx : LayerContext
            Not read.

        Returns
        -------
        y : ndarray of shape (B, K * D), the weight's dtype
        saved : (ids,)

        Raises
        ------
        TypeError
            `x` is not of an integer dtype.
        IndexError
            An id is negative or not below V.
        """
        if x.dtype.kind not in "iu":
            raise TypeError(
                f"token ids must be of an integer dtype; got {x.dtype}. Convert them first."
            )
        if x.dtype.kind == "i" and x.size and int(x.min()) < 0:
            # NumPy would read a negative id as counted from the end of the table.
            raise IndexError(
                f"token ids must be in 0..{self.vocab_size - 1}; got {int(x.min())}. "
                f"Check the tokenizer."
            )
        rows_ND = np.take(params["weight"], x.reshape(-1), axis=0)
        return rows_ND.reshape(x.shape[0], x.shape[1] * self.embed_dim), (x,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[None, Saved]:
        """Return ``(None, (dy,))``: ids have no gradient."""
        return None, (dy,)

    def backward_weight(self, saved: Saved, kept: Saved, ctx: LayerContext) -> Arrays:
        """Return ``{"weight": (V, D)}``, zero in the rows of ids that do not occur.

        Notes
        -----
        Scratch: one copy of `dy`, its slices sorted by id. Adding sorted runs is 5 times faster
        than `np.add.at` and its order of additions does not depend on the NumPy version.
        """
        (ids_BK,) = saved
        (dy,) = kept
        dweight_VD = np.zeros((self.vocab_size, self.embed_dim), dtype=dy.dtype)
        ids_N = ids_BK.reshape(-1)
        if ids_N.size:
            order_N = np.argsort(ids_N, kind="stable")
            sorted_N = ids_N[order_N]
            starts_U = np.flatnonzero(sorted_N[1:] != sorted_N[:-1]) + 1
            starts_U = np.concatenate((np.zeros(1, dtype=starts_U.dtype), starts_U))
            dy_ND = dy.reshape(ids_N.size, self.embed_dim)[order_N]
            dweight_VD[sorted_N[starts_U]] = np.add.reduceat(dy_ND, starts_U, axis=0)
        return {"weight": dweight_VD}

    def spec(self, x_shape: tuple[int, ...], dtype: np.dtype, name: str) -> LayerSpec:
        """Return the costs for ids of shape `x_shape` (B, K).

        `input_bytes` counts the smallest unsigned integer dtype that holds V - 1, the one the
        data sets deliver (uint8 for bytes).
        """
        num_rows, window = x_shape
        num_out = num_rows * window * self.embed_dim
        id_bytes = np.min_scalar_type(self.vocab_size - 1).itemsize
        return LayerSpec(
            params=(ParamSpec(name=f"{name}.weight", shape=(self.vocab_size, self.embed_dim)),),
            forward_flops=0,
            backward_flops=num_out,
            output_shape=(num_rows, window * self.embed_dim),
            input_bytes=num_rows * window * id_bytes,
            output_bytes=num_out * np.dtype(dtype).itemsize,
        )


@dataclass(frozen=True)
class Linear(PlainBackward):
    """An affine map.

    Notes
    -----
    Forward: ``y = x @ weight + bias`` with weight (I, O) and bias (O,).

    Saved: x, shape (B, I).

    Backward: ``dx = dy @ weight.T``, ``dweight = x.T @ dy``, ``dbias = sum of dy over rows``.

    Weights start normal with mean 0 and variance ``2 / I`` (init "he", before a rectifier; He et
    al. 2015, eq. 10) or ``2 / (I + O)`` (init "xavier"; Glorot and Bengio 2010, eq. 12); biases
    start at 0.
    """

    in_features: int
    """Input width, I."""
    out_features: int
    """Output width, O."""
    init_scheme: InitScheme = "he"
    """Scale of the first weights."""
    input_grad: bool = True
    """False for a first layer over data: its `dx` is None and costs nothing."""

    param_names: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return ``{"weight": (I, O), "bias": (O,)}``, scaled as the class notes say."""
        if self.init_scheme == "he":
            variance = 2.0 / self.in_features
        else:
            variance = 2.0 / (self.in_features + self.out_features)
        shape = (self.in_features, self.out_features)
        return {
            "weight": _normal(rng_for("weight"), shape, math.sqrt(variance), dtype),
            "bias": np.zeros(self.out_features, dtype=dtype),
        }

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return ``x @ weight + bias``.

        Parameters
        ----------
        params : dict
            ``{"weight": (I, O), "bias": (O,)}``.
        x : ndarray of shape (B, I), the parameters' dtype
            Kept by reference in `saved`.
        ctx : LayerContext
            Not read.

        Returns
        -------
        y : ndarray of shape (B, O), same dtype
        saved : (x,)
        """
        weight_IO = params["weight"]
        assert x.dtype == weight_IO.dtype, (x.dtype, weight_IO.dtype)
        y_BO = x @ weight_IO
        y_BO += params["bias"]
        return y_BO, (x,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray | None, Saved]:
        """Return ``(dy @ weight.T, (dy,))``; the first is None without `input_grad`."""
        dx_BI = dy @ params["weight"].T if self.input_grad else None
        return dx_BI, (dy,)

    def backward_weight(self, saved: Saved, kept: Saved, ctx: LayerContext) -> Arrays:
        """Return ``{"weight": x.T @ dy, "bias": sum of dy over rows}``."""
        (x_BI,) = saved
        (dy_BO,) = kept
        assert x_BI.dtype == dy_BO.dtype, (x_BI.dtype, dy_BO.dtype)
        return {"weight": x_BI.T @ dy_BO, "bias": np.add.reduce(dy_BO, axis=0)}

    def spec(self, x_shape: tuple[int, ...], dtype: np.dtype, name: str) -> LayerSpec:
        """Return the costs for an input of shape `x_shape` (B, I)."""
        num_rows = x_shape[0]
        itemsize = np.dtype(dtype).itemsize
        matmul_flops = 2 * num_rows * self.in_features * self.out_features
        num_out = num_rows * self.out_features
        return LayerSpec(
            params=(
                ParamSpec(name=f"{name}.weight", shape=(self.in_features, self.out_features)),
                ParamSpec(name=f"{name}.bias", shape=(self.out_features,)),
            ),
            forward_flops=matmul_flops + num_out,
            backward_flops=matmul_flops * (1 + self.input_grad) + num_out,
            output_shape=(num_rows, self.out_features),
            input_bytes=num_rows * self.in_features * itemsize,
            output_bytes=num_out * itemsize,
            saves_input=True,
        )


@dataclass(frozen=True)
class Activation(NoParams):
    """An element-wise nonlinearity without parameters.

    Notes
    -----
    ====  ==========================  ========  ===============================================
    kind  forward                     saved     backward
    ====  ==========================  ========  ===============================================
    relu  max(x, 0)                   y (B, F)  dy where y > 0, else 0 (0 at x = 0)
    tanh  tanh(x)                     y (B, F)  dy * (1 - y^2)
    gelu  x * (1 + tanh(u)) / 2       x (B, F)  dy * (h + x * h * (2 - 2 h) * u'), with
                                                h = (1 + tanh(u)) / 2
    ====  ==========================  ========  ===============================================

    gelu is the tanh approximation (Hendrycks and Gimpel 2016, section 2):
    ``u = sqrt(2 / pi) * (x + 0.044715 x^3)``, ``u' = sqrt(2 / pi) * (1 + 0.134145 x^2)``.
    """

    kind: ActivationKind
    """Which function."""

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return the function of every element.

        Parameters
        ----------
        params : dict
            Empty.
        x : ndarray of shape (B, F), float32 or float64
            Not modified; kept by reference in `saved` for kind "gelu".
        ctx : LayerContext
            Not read.

        Returns
        -------
        y : ndarray of shape (B, F), same dtype
        saved : (x,) for gelu, (y,) otherwise
        """
        if self.kind == "relu":
            y = np.maximum(x, 0)
            return y, (y,)
        if self.kind == "tanh":
            y = np.tanh(x)
            return y, (y,)
        return _gelu(x), (x,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, ())``, dx of shape (B, F) and dy's dtype."""
        (kept_BF,) = saved
        assert dy.dtype == kept_BF.dtype, (dy.dtype, kept_BF.dtype)
        if self.kind == "relu":
            # A boolean factor keeps the dtype; it is 15 times faster here than np.where.
            return dy * (kept_BF > 0), ()
        if self.kind == "tanh":
            dx = kept_BF * kept_BF
            np.subtract(1, dx, out=dx)
            dx *= dy
            return dx, ()
        return _gelu_backward(kept_BF, dy), ()

    def spec(self, x_shape: tuple[int, ...], dtype: np.dtype, name: str) -> LayerSpec:
        """Return the costs for an input of shape `x_shape`; one pass per element is one flop."""
        num_elements = math.prod(x_shape)
        num_bytes = num_elements * np.dtype(dtype).itemsize
        forward_passes, backward_passes = {"relu": (1, 2), "tanh": (1, 3), "gelu": (9, 18)}[
            self.kind
        ]
        return LayerSpec(
            forward_flops=forward_passes * num_elements,
            backward_flops=backward_passes * num_elements,
            output_shape=tuple(x_shape),
            input_bytes=num_bytes,
            output_bytes=num_bytes,
            saves_input=self.kind == "gelu",
            saves_output=self.kind != "gelu",
        )


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], scale: float, dtype: np.dtype
) -> np.ndarray:
    """Draw in float64 and round once, so that both dtypes start from the same numbers."""
    draws = rng.standard_normal(shape)
    draws *= scale
    return draws.astype(dtype, copy=False)


def _half_one_plus_tanh(x: np.ndarray, out: np.ndarray) -> None:
    """Write ``(1 + tanh(u(x))) / 2`` to `out`."""
    np.multiply(x, x, out=out)
    out *= _GELU_CUBIC
    out += 1
    out *= x
    out *= _GELU_SCALE
    np.tanh(out, out=out)
    out += 1
    out *= 0.5


def _gelu(x: np.ndarray) -> np.ndarray:
    """Return gelu(x); no scratch beside the result."""
    y = np.empty_like(x, order="C")
    x_flat, y_flat = flat_view(np.ascontiguousarray(x)), flat_view(y)
    for tile in tile_slices(x_flat.size):
        _half_one_plus_tanh(x_flat[tile], y_flat[tile])
        y_flat[tile] *= x_flat[tile]
    return y


def _gelu_backward(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Return the gradient of gelu at `x`; scratch is two tiles."""
    dx = np.empty_like(x, order="C")
    x_flat, dy_flat = flat_view(np.ascontiguousarray(x)), flat_view(np.ascontiguousarray(dy))
    dx_flat = flat_view(dx)
    for tile in tile_slices(x_flat.size):
        x_tile, dx_tile = x_flat[tile], dx_flat[tile]
        half = np.empty_like(x_tile)
        _half_one_plus_tanh(x_tile, half)
        slope = x_tile * x_tile
        slope *= 3 * _GELU_CUBIC
        slope += 1
        slope *= 2 * _GELU_SCALE
        slope *= x_tile
        # dx = half * (1 + slope * (1 - half)), the product rule with tanh' = 4 half (1 - half)
        np.subtract(1, half, out=dx_tile)
        dx_tile *= slope
        dx_tile += 1
        dx_tile *= half
        dx_tile *= dy_flat[tile]
    return dx
