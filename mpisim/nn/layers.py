"""Layers: frozen dataclasses that hold sizes and nothing else.

Parameters, saved arrays and gradients are passed in and returned; no layer changes an argument.
Here: the interface, what several layers share, and the layers of the MLP. The decoder's are in
`transformer` and `attention`, loss layers in `losses`, groups of layers in `blocks`; `spec` feeds
plan, cost and memory.

Storage: a layer returns and saves arrays of its input's dtype. 16-bit values are widened to
float32, computed with, and what is returned or saved is rounded once; gradients of parameters and
saved statistics stay wide.

Shape suffixes: B batch rows, K window, V vocabulary, D embedding width, I inputs, O outputs,
F features of an activation, N positions (B * K), U distinct ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from mpisim.layouts.specs import Conditions, LayerSpec, ParamSpec, Tape
from mpisim.nn import kernel_memory
from mpisim.nn.arrays import Initial, normal_weights, wide_dtype
from mpisim.nn.dropout import DropoutMasks
from mpisim.nn.kernels import Kernels, load_kernels

ActivationKind = Literal["relu", "tanh", "gelu"]
InitScheme = Literal["he", "xavier"]
RngFor = Callable[[str], np.random.Generator]
Arrays = dict[str, np.ndarray]
Saved = tuple[np.ndarray | np.integer, ...]

# Arrays, since NumPy makes one of a Python number in each call, which would be counted as memory.
_ZERO = {np.dtype(real): np.zeros((), real) for real in (np.float32, np.float64)}
_ONE = {np.dtype(real): np.ones((), real) for real in (np.float32, np.float64)}

_INTP = np.dtype(np.intp).itemsize


def _numpy_kernels() -> Kernels:
    return load_kernels("numpy")


@dataclass(frozen=True, eq=False)
class LayerContext:
    """What a call needs and a layer must not hold."""

    targets: np.ndarray | None = None
    """Read by loss layers: class ids of shape (B,) or (B, T), where -1 means no target, or floats
    of shape (B, num_targets)."""
    starts: np.ndarray | None = None
    """Read by attention: column of the first token of the document that each position belongs to,
    shape (B, T), integer; None means that every row is one document from column 0."""
    dropout: DropoutMasks | None = None
    """Masks of this microbatch; None drops nothing (evaluation)."""
    kernels: Kernels = field(default_factory=_numpy_kernels)
    """Element-wise work on float32 and float64 arrays."""

    def wide(self, array: np.ndarray) -> np.ndarray:
        """Return a float32 copy of a 16-bit array; float32 and float64 arrays as they are."""
        return self.kernels.widen(array) if array.dtype.itemsize == 2 else array

    def narrow(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return `array` rounded once to a 16-bit `dtype`; as it is if it has the dtype."""
        return array if array.dtype == dtype else self.kernels.narrow(array, dtype)


class Layer(Protocol):
    """What every layer offers.

    `saved` is a plain tuple of arrays: the sum of `nbytes` of its floating arrays is the layer's
    activation memory, and dropping it is freeing it. Integer arrays in `saved` (token ids) are
    data and are not counted; a count is a NumPy scalar, which has no buffer. Zero rows are legal
    everywhere. A layer whose `saved` has an interior that can be dropped and computed again is an
    `InteriorLayer`.
    """

    @property
    def param_names(self) -> tuple[str, ...]:
        """Local names of the parameters, in registration order."""
        ...

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return fresh parameters; `rng_for(local_name)` is the generator of one of them."""
        ...

    def initial(self, local: str) -> Initial:
        """Return how a parameter of this local name starts."""
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

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for one input shape; parameter names are prefixed with `name`."""
        ...


@runtime_checkable
class InteriorLayer(Protocol):
    """What a layer offers beside if part of its `saved` can be computed again from the rest."""

    def trim(self, saved: Saved) -> Saved:
        """Return `saved` without its interior, with a few values of it as a check."""
        ...

    def restore(self, trimmed: Saved, ctx: LayerContext) -> Saved:
        """Return the `saved` that `trim` got; raise RecomputeMismatch if the check differs."""
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
class TokenTable(PlainBackward):
    """The parameter of the layers that turn tokens into features, and features into logits.

    Notes
    -----
    The table starts normal with mean 0 and variance 1 / D: a row has length 1 at any width, and
    the fresh logits of a tied head, whose inputs have mean square 1, have variance 1, which is
    close to a uniform guess. The common 0.02 starts closer still but is too small beside what the
    first block adds: with it a small decoder on text was 0.14 to 0.31 bits per byte behind after
    240 steps, at learning rates of 0.001, 0.003 and 0.006.
    """

    vocab_size: int
    """Number of ids, V."""
    d_model: int
    """Width of a row, D."""

    param_names: ClassVar[tuple[str, ...]] = ("weight",)

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return ``{"weight": (V, D)}``."""
        shape = (self.vocab_size, self.d_model)
        return {"weight": normal_weights(rng_for("weight"), shape, self.d_model**-0.5, dtype)}

    def initial(self, local: str) -> Initial:
        """Return how a parameter starts."""
        return Initial(scale=self.d_model**-0.5)

    def table_spec(self, name: str) -> ParamSpec:
        """Return the name and shape of the table in a layer of this name."""
        return ParamSpec(name=f"{name}.weight", shape=(self.vocab_size, self.d_model))


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
        return {"weight": normal_weights(rng_for("weight"), shape, 1.0, dtype)}

    def initial(self, local: str) -> Initial:
        """Return how a parameter starts."""
        return Initial(scale=1.0)

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
        # NumPy would convert narrower ids alone; this way memory does not depend on their dtype.
        rows_ND = np.take(params["weight"], x.astype(np.intp).reshape(-1), axis=0)
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
        than `np.add.at` and its order of additions does not depend on the NumPy version. Every id
        gets a run, of no slices if it does not occur: so the memory depends on shapes alone.
        """
        (ids_BK,) = saved
        (dy,) = kept
        ids_N = ids_BK.astype(np.intp).reshape(-1)
        wide = wide_dtype(dy.dtype)
        dweight_VD = np.zeros((self.vocab_size, self.embed_dim), dtype=wide)
        if not ids_N.size:
            return {"weight": dweight_VD}
        order_N = np.argsort(ids_N, kind="stable")
        dy_ND = np.take(dy.reshape(ids_N.size, self.embed_dim), order_N, axis=0)
        dy_ND = ctx.wide(dy_ND)
        ids_N = ids_N[order_N]
        del order_N
        bounds_V1 = np.searchsorted(ids_N, np.arange(self.vocab_size + 1))
        num_runs = int(ids_N[-1]) + 1  # those above would start behind the last slice
        np.add.reduceat(dy_ND, bounds_V1[:num_runs], axis=0, out=dweight_VD[:num_runs])
        # An empty run gives the slice at its start.
        empty_V = bounds_V1[:-1] == bounds_V1[1:]
        np.copyto(dweight_VD, _ZERO[wide], where=empty_V[:, np.newaxis])
        return {"weight": dweight_VD}

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for ids of shape `x_shape` (B, K).

        `input_bytes` counts the smallest unsigned integer dtype that holds V - 1, the one the
        data sets deliver (uint8 for bytes).
        """
        num_rows, window = x_shape
        num_ids = num_rows * window
        num_out = num_ids * self.embed_dim
        output_bytes = num_out * np.dtype(dtype).itemsize
        table_bytes = self.vocab_size * self.embed_dim * wide_dtype(dtype).itemsize
        return LayerSpec(
            params=(ParamSpec(name=f"{name}.weight", shape=(self.vocab_size, self.embed_dim)),),
            forward_flops=0,
            backward_flops=num_out,
            weight_flops=num_out,
            keeps_output_grad=True,
            output_shape=(num_rows, window * self.embed_dim),
            input_bytes=num_ids * np.min_scalar_type(self.vocab_size - 1).itemsize,
            output_bytes=output_bytes,
            forward_peak_bytes=num_ids * _INTP + output_bytes,
            weight_peak_bytes=self._weight_peak(num_ids, dtype, conditions),
            grad_bytes=table_bytes,
        )

    def _weight_peak(self, num_ids: int, dtype: np.dtype, conditions: Conditions) -> int:
        """Walk backward_weight."""
        num_out = num_ids * self.embed_dim
        stored, wide = np.dtype(dtype).itemsize, wide_dtype(dtype).itemsize
        tape = Tape()
        tape.new(num_ids * _INTP, self.vocab_size * self.embed_dim * wide)  # ids, dweight
        if not num_ids:
            return tape.peak
        tape.new(num_ids * _INTP)  # order
        tape.new(num_out * stored)
        if kernel_memory.widen(tape, num_out, dtype, conditions):
            tape.free(num_out * stored)
        tape.new(num_ids * _INTP)  # sorted ids
        tape.free(2 * num_ids * _INTP)  # ids as they came, order
        bounds_bytes = (self.vocab_size + 1) * _INTP
        tape.new(bounds_bytes, bounds_bytes)  # range, bounds
        tape.free(bounds_bytes)
        tape.new(self.vocab_size)  # empty
        return tape.peak


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
            "weight": normal_weights(rng_for("weight"), shape, math.sqrt(variance), dtype),
            "bias": np.zeros(self.out_features, dtype=dtype),
        }

    def initial(self, local: str) -> Initial:
        """Return how a parameter starts."""
        if local == "bias":
            return Initial()
        sizes = self.in_features + (0 if self.init_scheme == "he" else self.out_features)
        return Initial(scale=math.sqrt(2.0 / sizes))

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
        y_BO = ctx.wide(x) @ ctx.wide(weight_IO)
        y_BO += ctx.wide(params["bias"])
        return ctx.narrow(y_BO, x.dtype), (x,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray | None, Saved]:
        """Return ``(dy @ weight.T, (dy,))``; the first is None without `input_grad`."""
        if not self.input_grad:
            return None, (dy,)
        dx_BI = ctx.wide(dy) @ ctx.wide(params["weight"]).T
        return ctx.narrow(dx_BI, dy.dtype), (dy,)

    def backward_weight(self, saved: Saved, kept: Saved, ctx: LayerContext) -> Arrays:
        """Return ``{"weight": x.T @ dy, "bias": sum of dy over rows}``."""
        (x_BI,) = saved
        (dy_BO,) = kept
        assert x_BI.dtype == dy_BO.dtype, (x_BI.dtype, dy_BO.dtype)
        x_BI, dy_BO = ctx.wide(x_BI), ctx.wide(dy_BO)
        return {"weight": x_BI.T @ dy_BO, "bias": np.add.reduce(dy_BO, axis=0)}

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for an input of shape `x_shape` (B, I)."""
        num_rows = x_shape[0]
        itemsize, wide = np.dtype(dtype).itemsize, wide_dtype(dtype).itemsize
        num_in, num_out = num_rows * self.in_features, num_rows * self.out_features
        num_weights = self.in_features * self.out_features
        matmul_flops = 2 * num_rows * num_weights

        def product_peak(num_left: int, num_result: int, num_added: int = 0) -> int:
            """Walk a product with the weight: widen both, multiply, add, narrow."""
            tape = Tape()
            left = kernel_memory.widen(tape, num_left, dtype, conditions)
            left += kernel_memory.widen(tape, num_weights, dtype, conditions)
            tape.new(num_result * wide)
            tape.free(left)
            tape.free(kernel_memory.widen(tape, num_added, dtype, conditions))
            kernel_memory.narrow_result(tape, num_result, dtype, conditions)
            return tape.peak

        grad_bytes = (num_weights + self.out_features) * wide
        tape = Tape()
        kernel_memory.widen(tape, num_in, dtype, conditions)
        kernel_memory.widen(tape, num_out, dtype, conditions)
        tape.new(grad_bytes)
        return LayerSpec(
            params=(
                ParamSpec(name=f"{name}.weight", shape=(self.in_features, self.out_features)),
                ParamSpec(name=f"{name}.bias", shape=(self.out_features,)),
            ),
            forward_flops=matmul_flops + num_out,
            backward_flops=matmul_flops * (1 + self.input_grad) + num_out,
            weight_flops=matmul_flops + num_out,
            keeps_output_grad=True,
            output_shape=(num_rows, self.out_features),
            input_bytes=num_in * itemsize,
            output_bytes=num_out * itemsize,
            saves_input=True,
            forward_peak_bytes=product_peak(num_in, num_out, self.out_features),
            input_peak_bytes=product_peak(num_out, num_in) if self.input_grad else 0,
            weight_peak_bytes=tape.peak,
            grad_bytes=grad_bytes,
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
        x : ndarray of shape (B, F), floating
            Not modified; kept by reference in `saved` for kind "gelu".
        ctx : LayerContext
            Not read.

        Returns
        -------
        y : ndarray of shape (B, F), same dtype
        saved : (x,) for gelu, (y,) otherwise
        """
        if self.kind == "gelu":
            return ctx.narrow(ctx.kernels.gelu(ctx.wide(x)), x.dtype), (x,)
        wide = ctx.wide(x)
        y = np.empty(x.shape, dtype=x.dtype) if wide is x else wide
        if self.kind == "relu":
            np.maximum(wide, _ZERO[wide.dtype], out=y)
        else:
            np.tanh(wide, out=y)
        y = ctx.narrow(y, x.dtype)
        return y, (y,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, ())``, dx of shape (B, F) and dy's dtype."""
        (kept_BF,) = saved
        assert dy.dtype == kept_BF.dtype, (dy.dtype, kept_BF.dtype)
        wide = wide_dtype(dy.dtype)
        # A copy made by widening is changed in place.
        if self.kind == "relu":
            is_positive = ctx.wide(kept_BF) > _ZERO[wide]
            dx = ctx.wide(dy)
            # A boolean factor keeps the dtype; it is 15 times faster here than np.where.
            dx = np.multiply(dx, is_positive, out=None if dx is dy else dx)
            del is_positive
        elif self.kind == "tanh":
            dx = ctx.wide(kept_BF)
            dx = np.multiply(dx, dx, out=None if dx is kept_BF else dx)
            np.subtract(_ONE[wide], dx, out=dx)
            dx *= ctx.wide(dy)
        else:
            dx = ctx.kernels.gelu_backward(ctx.wide(dy), ctx.wide(kept_BF))
        return ctx.narrow(dx, dy.dtype), ()

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
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
            forward_peak_bytes=self._forward_peak(num_elements, dtype, conditions),
            input_peak_bytes=self._input_peak(num_elements, dtype, conditions),
        )

    def _forward_peak(self, size: int, dtype: np.dtype, conditions: Conditions) -> int:
        """Walk forward."""
        wide = wide_dtype(dtype).itemsize
        tape = Tape()
        copied = kernel_memory.widen(tape, size, dtype, conditions)
        if self.kind == "gelu":
            tape.call(kernel_memory.gelu_peak(size, wide, conditions), left=size * wide)
            tape.free(copied)
        elif not copied:
            tape.new(size * wide)
        kernel_memory.narrow_result(tape, size, dtype, conditions)
        return tape.peak

    def _input_peak(self, size: int, dtype: np.dtype, conditions: Conditions) -> int:
        """Walk backward_input."""
        wide = wide_dtype(dtype).itemsize
        tape = Tape()
        if self.kind == "relu":
            copied = kernel_memory.widen(tape, size, dtype, conditions)
            tape.new(size)  # is_positive
            tape.free(copied)
            if not kernel_memory.widen(tape, size, dtype, conditions):
                tape.new(size * wide)
            tape.free(size)
        elif self.kind == "tanh":
            if not kernel_memory.widen(tape, size, dtype, conditions):
                tape.new(size * wide)
            tape.free(kernel_memory.widen(tape, size, dtype, conditions))
        else:
            copied = kernel_memory.widen(tape, size, dtype, conditions)
            copied += kernel_memory.widen(tape, size, dtype, conditions)
            tape.call(kernel_memory.gelu_backward_peak(size, wide, conditions), left=size * wide)
            tape.free(copied)
        kernel_memory.narrow_result(tape, size, dtype, conditions)
        return tape.peak
