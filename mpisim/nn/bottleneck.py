"""A learned bottleneck at a boundary between stages: fewer values per token cross it.

Two affine maps, blocks of their own on either side of the boundary, that are trained like all
others. Here: their layers, how they are put into a model, and how they start. Rounding what
crosses is a codec's business, gathering activations for the start the caller's.

Shape suffixes: D width of an activation, W values of a token that cross, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from mpisim.errors import ConfigError
from mpisim.layouts.specs import Conditions, LayerSpec, Tape
from mpisim.nn import kernel_memory
from mpisim.nn.arrays import Initial, as_rows, normal_weights, wide_dtype
from mpisim.nn.blocks import Block
from mpisim.nn.layers import Arrays, LayerContext, Linear, NoParams, RngFor, Saved
from mpisim.nn.models import Model
from mpisim.nn.numerics import tile_slices
from mpisim.nn.params import rng_for_name

BottleneckKind = Literal["calibrated", "random", "layernorm"]
"""How a bottleneck starts. `calibrated`: principal components of activations; `random`: orthonormal
directions; `layernorm`: as calibrated, on activations that are normalised first."""

CALIBRATION_TILE = 1 << 10
"""Tokens whose float64 copy exists at one time while they are added up."""


@dataclass(frozen=True)
class TokenMap(Linear):
    """An affine map of every token: `Linear` for rows of tokens.

    Notes
    -----
    Forward: ``y = x @ weight + bias`` over the last dim of x, of any shape (..., I).

    Saved and backward: as `Linear`, with all tokens as rows.

    Weights start normal with variance ``1 / max(I, O)``, the scale of orthonormal directions;
    biases start at 0. `BottleneckStart` holds better values.
    """

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return ``{"weight": (I, O), "bias": (O,)}``."""
        shape = (self.in_features, self.out_features)
        return {
            "weight": normal_weights(rng_for("weight"), shape, max(shape) ** -0.5, dtype),
            "bias": np.zeros(self.out_features, dtype=dtype),
        }

    def initial(self, local: str) -> Initial:
        """Return how a parameter starts."""
        if local == "bias":
            return Initial()
        return Initial(scale=max(self.in_features, self.out_features) ** -0.5)

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return ``(y, (x,))``; y of shape (..., O) and x's dtype."""
        y_NO, _ = super().forward(params, as_rows(x), ctx)
        return y_NO.reshape(*x.shape[:-1], self.out_features), (x,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray | None, Saved]:
        """Return ``(dx, (dy,))``; dx of shape (..., I), or None without `input_grad`."""
        dx_NI, _ = super().backward_input(params, saved, as_rows(dy), ctx)
        if dx_NI is None:
            return None, (dy,)
        return dx_NI.reshape(*dy.shape[:-1], self.in_features), (dy,)

    def backward_weight(self, saved: Saved, kept: Saved, ctx: LayerContext) -> Arrays:
        """Return the gradients of weight and bias, summed over all tokens."""
        return super().backward_weight((as_rows(saved[0]),), (as_rows(kept[0]),), ctx)

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for an input of shape `x_shape` (..., I)."""
        rows_shape = (math.prod(x_shape[:-1]), x_shape[-1])
        spec = super().spec(rows_shape, dtype, name, conditions)
        return replace(spec, output_shape=(*x_shape[:-1], self.out_features))


@dataclass(frozen=True)
class LayerNorm(NoParams):
    """Take the mean off each token and divide it by its standard deviation; no parameters.

    Notes
    -----
    Forward: ``y = (x - mean) * r`` with ``r = 1 / sqrt(variance + eps)``, both over the last dim
    (Ba et al. 2016, eq. 3, without gain and bias).

    Saved: y, shape (..., D), and r, shape (N, 1), wide dtype.

    Backward: ``dx = r * (dy - mean of dy - y * mean of (dy * y))``.
    """

    width: int
    """Features of a token, D."""
    eps: float = 1e-5
    """Added to the variance."""

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return ``(y, (y, r))``; y of x's shape (..., D) and dtype."""
        x_ND = as_rows(ctx.wide(x))
        dtype = x_ND.dtype
        mean_N1 = self._mean(x_ND)
        y_ND = x_ND - mean_N1
        del x_ND, mean_N1  # here and below: at the latest moment what has been read is freed
        r_N1 = self._mean(y_ND * y_ND)
        r_N1 += np.array(self.eps, dtype)
        np.sqrt(r_N1, out=r_N1)
        np.reciprocal(r_N1, out=r_N1)
        y_ND *= r_N1
        y = ctx.narrow(y_ND, x.dtype).reshape(x.shape)
        return y, (y, r_N1)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, ())``; dx of shape (..., D) and dy's dtype."""
        y, r_N1 = saved
        dy_ND, y_ND = as_rows(ctx.wide(dy)), as_rows(ctx.wide(y))
        dx_ND = dy_ND * y_ND
        along_N1 = self._mean(dx_ND)
        np.multiply(y_ND, along_N1, out=dx_ND)
        del y_ND, along_N1
        np.subtract(dy_ND, dx_ND, out=dx_ND)
        dx_ND -= self._mean(dy_ND)
        del dy_ND
        dx_ND *= r_N1
        return ctx.narrow(dx_ND, dy.dtype).reshape(dy.shape), ()

    def _mean(self, array_ND: np.ndarray) -> np.ndarray:
        """Return the mean of each row, shape (N, 1)."""
        mean_N1 = np.add.reduce(array_ND, axis=1, keepdims=True)
        # As an array: NumPy would make one of a number, too.
        mean_N1 *= np.array(1 / self.width, array_ND.dtype)
        return mean_N1

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for an input of shape `x_shape` (..., D)."""
        num_tokens, num_elements = math.prod(x_shape[:-1]), math.prod(x_shape)
        num_bytes = num_elements * np.dtype(dtype).itemsize
        wide = wide_dtype(dtype).itemsize
        all_bytes, row_bytes = num_elements * wide, num_tokens * wide

        forward = Tape()
        copied = kernel_memory.widen(forward, num_elements, dtype, conditions)
        forward.call(peak=row_bytes + wide, left=row_bytes)  # mean
        forward.new(all_bytes)
        forward.free(copied, row_bytes)
        forward.new(all_bytes)  # squares
        forward.call(peak=row_bytes + wide, left=row_bytes)  # r
        forward.free(all_bytes)
        kernel_memory.narrow_result(forward, num_elements, dtype, conditions)

        backward = Tape()
        copied = kernel_memory.widen(backward, num_elements, dtype, conditions)
        kernel_memory.widen(backward, num_elements, dtype, conditions)
        backward.new(all_bytes)  # dx
        backward.call(peak=row_bytes + wide, left=row_bytes)
        backward.free(copied, row_bytes)
        backward.call(peak=row_bytes + wide)
        backward.free(copied)
        kernel_memory.narrow_result(backward, num_elements, dtype, conditions)
        return LayerSpec(
            forward_flops=5 * num_elements,
            backward_flops=7 * num_elements,
            output_shape=tuple(x_shape),
            input_bytes=num_bytes,
            output_bytes=num_bytes,
            saves_output=True,
            extra_saved_bytes=row_bytes,
            forward_peak_bytes=forward.peak,
            input_peak_bytes=backward.peak,
        )


def encode_name(boundary: int) -> str:
    """Return the name of the block before a boundary."""
    return f"boundary{boundary}.encode"


def decode_name(boundary: int) -> str:
    """Return the name of the block behind a boundary."""
    return f"boundary{boundary}.decode"


def is_bottleneck(param: str) -> bool:
    """Tell whether a parameter, by its full name, is one of a bottleneck."""
    block = param.partition(".map.")[0]
    number = block.removeprefix("boundary").partition(".")[0]
    return number.isdigit() and block in (encode_name(int(number)), decode_name(int(number)))


def insert_bottlenecks(
    model: Model, after_blocks: Mapping[int, str], width: int, kind: BottleneckKind = "calibrated"
) -> Model:
    """Return a model whose activations are narrow at some boundaries.

    Parameters
    ----------
    model : Model
    after_blocks : mapping of int to str
        Number of a boundary -> name of the last block before it.
    width : int
        Values of a token that cross, W; at least 1, at most the width of the activation.
    kind : {"calibrated", "random", "layernorm"}
        With "layernorm" the encoding block normalises its input first. The first values of the maps
        are in `BottleneckStart`, not here.

    Returns
    -------
    Model
        With blocks ``boundaryK.encode`` and ``boundaryK.decode``, one behind the other, after each
        named block; each has one map, ``map``. All other names are as they were.

    Raises
    ------
    ConfigError
        No block has that name, it is the last one, a name comes twice, or the width does not fit.
    """
    specs = {spec.name: spec for spec in model.spec(1, np.dtype("f4"))}
    places = {name: boundary for boundary, name in after_blocks.items()}
    if len(places) < len(after_blocks):
        raise ConfigError(
            f"a block must have at most one bottleneck behind it; got {dict(after_blocks)}. Name "
            f"each block once."
        )
    possible = [block.name for block in model.blocks[:-1]]
    blocks: list[Block] = []
    for name in places:
        if name not in possible:
            raise ConfigError(
                f"a bottleneck must come after one of the blocks {', '.join(possible)}; got "
                f"{name!r}. Choose one of them."
            )
    for block in model.blocks:
        blocks.append(block)
        if block.name not in places:
            continue
        boundary, full_width = places[block.name], specs[block.name].output_shape[-1]
        if not 1 <= width <= full_width:
            raise ConfigError(
                f"the width of a bottleneck must be at least 1 and at most {full_width}, that of "
                f"the activation of {block.name}; got {width}. Choose a smaller one."
            )
        norm = (("norm", LayerNorm(full_width)),) if kind == "layernorm" else ()
        blocks += [
            Block(encode_name(boundary), (*norm, ("map", TokenMap(full_width, width)))),
            Block(decode_name(boundary), (("map", TokenMap(width, full_width)),)),
        ]
    return replace(model, blocks=tuple(blocks))


class BottleneckStart(NamedTuple):
    """First values of both halves of a bottleneck, float64."""

    encode_weight: np.ndarray
    """(D, W), orthonormal columns."""
    encode_bias: np.ndarray
    """(W,): minus the encoded mean."""
    decode_weight: np.ndarray
    """(W, D): the other one transposed."""
    decode_bias: np.ndarray
    """(D,): the mean."""

    def named(self, boundary: int) -> Arrays:
        """Return the values by full name of the parameter."""
        names = (f"{half}.map.{local}" for half in (encode_name(boundary), decode_name(boundary))
                 for local in ("weight", "bias"))  # fmt: skip
        return dict(zip(names, self, strict=True))


def start_from(directions_DW: np.ndarray, mean_D: np.ndarray) -> BottleneckStart:
    """Return the pair of maps that projects on orthonormal directions around a mean.

    ``z = (x - mean) @ directions`` and ``y = z @ directions.T + mean``.
    """
    return BottleneckStart(
        directions_DW, -(mean_D @ directions_DW), directions_DW.T.copy(), mean_D.copy()
    )


def random_start(seed: int, boundary: int, d_model: int, width: int) -> BottleneckStart:
    """Return orthonormal directions, uniformly distributed, and mean 0.

    Parameters
    ----------
    seed : int
        The run's seed; with the name of the encoding weight it is all that the values depend on.
    boundary : int
    d_model, width : int
        D and W, W <= D.
    """
    rng = rng_for_name(seed, f"{encode_name(boundary)}.map.weight")
    q_DW, r_WW = np.linalg.qr(rng.standard_normal((d_model, width)))
    # Without this the signs, and so the distribution, are the library's (Mezzadri 2007, section 5).
    q_DW *= np.copysign(1.0, np.diagonal(r_WW))
    return start_from(q_DW, np.zeros(d_model))


def principal_components(covariance_DD: np.ndarray, width: int) -> np.ndarray:
    """Return the directions of largest variance, largest first.

    Parameters
    ----------
    covariance_DD : ndarray of shape (D, D), float64
        Symmetric.
    width : int
        W, in 1..D.

    Returns
    -------
    ndarray of shape (D, W), float64
        Orthonormal columns. The largest element of each by amount, the first of equal ones, is
        positive: the sign of an eigenvector is the library's choice.

    Raises
    ------
    ValueError
        The width is out of range.
    """
    d_model = len(covariance_DD)
    if not 1 <= width <= d_model:
        raise ValueError(f"width must be in 1..{d_model}; got {width}. Choose a smaller one.")
    _, vectors_DD = np.linalg.eigh(covariance_DD)
    directions_DW = vectors_DD[:, ::-1][:, :width].copy()
    largest_W = np.argmax(np.abs(directions_DW), axis=0)
    directions_DW *= np.copysign(1.0, directions_DW[largest_W, np.arange(width)])
    return directions_DW


class ActivationStatistics:
    """Running float64 sums over tokens, from which a bottleneck starts.

    Parameters
    ----------
    d_model : int
        Width of an activation, D.

    Attributes
    ----------
    totals : ndarray of shape (1 + D + D * D,), float64
        Number of tokens, ``sum of x`` and ``sum of x x^T``, in this order: the sum of several of
        these arrays is the statistics of all their tokens, so ranks can reduce it as it is.

    Notes
    -----
    The covariance is a difference of these sums: it loses the digits by which the squared mean
    exceeds the variance, of 16.
    """

    def __init__(self, d_model: int) -> None:
        self.totals = np.zeros(1 + d_model + d_model * d_model)
        self._sum_D = self.totals[1 : 1 + d_model]
        self._products_DD = self.totals[1 + d_model :].reshape(d_model, d_model)

    @property
    def count(self) -> int:
        """Number of tokens."""
        return int(self.totals[0])

    def add(self, x: np.ndarray) -> None:
        """Add activations of shape (..., D) and any floating dtype, tile by tile."""
        x_ND = as_rows(x)
        for tile in tile_slices(len(x_ND), CALIBRATION_TILE):
            tokens_ND = x_ND[tile].astype(np.float64)
            self.totals[0] += len(tokens_ND)
            self._sum_D += np.add.reduce(tokens_ND, axis=0)
            self._products_DD += tokens_ND.T @ tokens_ND

    def merge(self, other: ActivationStatistics) -> None:
        """Add the tokens of other statistics of the same width."""
        self.totals += other.totals

    def mean_and_covariance(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean (D,) and the covariance (D, D), divided by the number of tokens less 1.

        Raises
        ------
        ValueError
            There are fewer than 2 tokens, or their sums are not finite.
        """
        if self.count < 2:
            raise ValueError(
                f"a covariance must be taken over at least 2 tokens; got {self.count}. Give more "
                f"tokens for calibration."
            )
        if not np.isfinite(self.totals).all():
            raise ValueError(
                "activations must be finite for calibration; got sums that are not. Calibrate a "
                "model whose loss is finite."
            )
        mean_D = self._sum_D / self.count
        scatter_DD = self._products_DD - np.outer(self._sum_D, mean_D)
        return mean_D, scatter_DD / (self.count - 1)

    def components(self, width: int) -> BottleneckStart:
        """Return the maps on the first `width` principal components and back.

        Raises
        ------
        ValueError
            There are fewer than 2 tokens, their sums are not finite, or the width is not in 1..D.
        """
        mean_D, covariance_DD = self.mean_and_covariance()
        return start_from(principal_components(covariance_DD, width), mean_D)
