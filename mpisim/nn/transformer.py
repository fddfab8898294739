"""Layers of the decoder beside attention: token table, RMSNorm, projections, SwiGLU, dropout.

Attention is in `attention`, the head in `losses`, the model that is built of them in `decoder`.

Shape suffixes: B batch rows, T positions, N tokens (B * T), D model width, F hidden width,
V vocabulary, C columns of a projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpisim.errors import BatchError
from mpisim.layouts.specs import Conditions, LayerSpec, ParamSpec, Tape
from mpisim.nn import kernel_memory as memory
from mpisim.nn.arrays import Initial, as_rows, normal_weights, require_length, wide_dtype
from mpisim.nn.dropout import STREAM_BYTES, WORD_TILE, keep_threshold
from mpisim.nn.layers import (
    Arrays,
    LayerContext,
    NoParams,
    PlainBackward,
    RngFor,
    Saved,
    TokenTable,
)
from mpisim.nn.numerics import TILE_ELEMENTS, tile_slices


@dataclass(frozen=True)
class TokenEmbedding(TokenTable):
    """Look up one row of a table per token.

    Notes
    -----
    Forward: ``y[b, t] = weight[ids[b, t]]``.

    Saved: the ids, shape (B, T), as they came: data, 0 bytes in `spec`.

    Backward: ``dweight[v]`` is the sum of ``dy[b, t]`` over the places where ``ids == v``, added in
    the order of the tokens; the ids have no gradient.
    """

    max_len: int
    """Longest row of tokens that the model takes."""

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return the rows of the table.

        Parameters
        ----------
        params : dict
            ``{"weight": (V, D)}``.
        x : ndarray of shape (B, T), any integer dtype
            Ids in 0..V-1.
        ctx : LayerContext
            Not read.

        Returns
        -------
        y : ndarray of shape (B, T, D), the weight's dtype
        saved : (ids,)

        Raises
        ------
        BatchError
            The ids are not integers, not of two dims, out of range, or more than `max_len` a row.
        """
        if x.dtype.kind not in "iu" or x.ndim != 2:
            raise BatchError(
                f"token ids must be integers of shape (rows, tokens); got {x.dtype} {x.shape}. "
                f"Convert them first."
            )
        require_length(x.shape[1], self.max_len)
        if x.size and not (0 <= int(x.min()) and int(x.max()) < self.vocab_size):
            raise BatchError(
                f"token ids must be in 0..{self.vocab_size - 1}; got {int(x.min())}.."
                f"{int(x.max())}. Check the tokenizer, or set model.vocab_size."
            )
        y = np.empty((*x.shape, self.d_model), dtype=params["weight"].dtype)
        y_ND, ids_N = y.reshape(x.size, self.d_model), x.reshape(-1)
        # NumPy would copy all ids to its index type, and the output, too, with mode "raise".
        places = np.empty(min(x.size, TILE_ELEMENTS), dtype=np.intp)
        for tile in tile_slices(x.size):
            place = places[: tile.stop - tile.start]
            np.copyto(place, ids_N[tile], casting="unsafe")
            np.take(params["weight"], place, axis=0, out=y_ND[tile], mode="clip")
        return y, (x,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[None, Saved]:
        """Return ``(None, (dy,))``: ids have no gradient."""
        return None, (dy,)

    def backward_weight(self, saved: Saved, kept: Saved, ctx: LayerContext) -> Arrays:
        """Return ``{"weight": (V, D)}``, zero in the rows of ids that do not occur."""
        (ids_BT,) = saved
        dy_ND = as_rows(ctx.wide(kept[0]))
        ids_N = np.ascontiguousarray(ids_BT).reshape(-1)
        return {"weight": ctx.kernels.embedding_backward(ids_N, dy_ND, self.vocab_size)}

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for ids of shape `x_shape` (B, T); they count as int32, 4 bytes each."""
        num_tokens = math.prod(x_shape)
        num_out = num_tokens * self.d_model
        itemsize, wide_itemsize = np.dtype(dtype).itemsize, wide_dtype(dtype).itemsize
        forward, weight = Tape(), Tape()
        forward.new(num_out * itemsize, min(num_tokens, TILE_ELEMENTS) * np.intp().itemsize)
        memory.widen(weight, num_out, dtype, conditions)
        table_bytes = memory.embedding_backward_peak(self.vocab_size, self.d_model, wide_itemsize)
        weight.call(peak=table_bytes)
        return LayerSpec(
            params=(self.table_spec(name),),
            backward_flops=num_out,
            weight_flops=num_out,
            keeps_output_grad=True,
            output_shape=(*x_shape, self.d_model),
            input_bytes=num_tokens * 4,
            output_bytes=num_out * itemsize,
            forward_peak_bytes=forward.peak,
            weight_peak_bytes=weight.peak,
            grad_bytes=table_bytes,
        )


@dataclass(frozen=True)
class RMSNorm(PlainBackward):
    """Divide each token by its root mean square and scale its features.

    Notes
    -----
    Forward: ``y = x * r * weight`` with ``r = 1 / sqrt(mean over d of x^2 + eps)`` per token
    (Zhang and Sennrich 2019, eq. 4, with eps inside the root).

    Saved: x, shape (B, T, D), and r, shape (N,), wide dtype.

    Backward: with ``g = dy * weight``, ``dx = r * (g - x * r^2 * mean over d of (g * x))`` and
    ``dweight`` is the sum over tokens of ``dy * x * r``. One pass computes both, so backward_input
    keeps dweight, shape (D,).

    Weights start at 1.
    """

    width: int
    """Features of a token, D."""
    eps: float
    """Added to the mean square."""

    param_names: ClassVar[tuple[str, ...]] = ("weight",)

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return ``{"weight": (D,)}``, ones."""
        return {"weight": np.ones(self.width, dtype=dtype)}

    def initial(self, local: str) -> Initial:
        """Return how a parameter starts."""
        return Initial(constant=1.0)

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return ``(y, (x, r))``; y of x's shape (B, T, D) and dtype."""
        y_ND, r_N = ctx.kernels.rms_norm(as_rows(ctx.wide(x)), ctx.wide(params["weight"]), self.eps)
        return ctx.narrow(y_ND, x.dtype).reshape(x.shape), (x, r_N)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, (dweight,))``; dx of shape (B, T, D) and dy's dtype."""
        x, r_N = saved
        dx_ND, dweight_D = ctx.kernels.rms_norm_backward(
            as_rows(ctx.wide(dy)), as_rows(ctx.wide(x)), ctx.wide(params["weight"]), r_N
        )
        return ctx.narrow(dx_ND, dy.dtype).reshape(x.shape), (dweight_D,)

    def backward_weight(self, saved: Saved, kept: Saved, ctx: LayerContext) -> Arrays:
        """Return ``{"weight": dweight}``, which backward_input kept."""
        return {"weight": kept[0]}

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for an input of shape `x_shape` (B, T, D)."""
        num_elements, num_rows = math.prod(x_shape), math.prod(x_shape[:-1])
        num_bytes = num_elements * np.dtype(dtype).itemsize
        wide_itemsize = wide_dtype(dtype).itemsize
        sizes = (num_rows, self.width, wide_itemsize)
        forward, backward = Tape(), Tape()
        widened = memory.widen(forward, num_elements, dtype, conditions)
        widened += memory.widen(forward, self.width, dtype, conditions)
        forward.call(
            peak=memory.rms_norm_peak(*sizes, conditions),
            left=(num_elements + num_rows) * wide_itemsize,
        )
        forward.free(widened)
        memory.narrow_result(forward, num_elements, dtype, conditions)
        widened = memory.widen(backward, num_elements, dtype, conditions)
        widened += memory.widen(backward, num_elements, dtype, conditions)
        widened += memory.widen(backward, self.width, dtype, conditions)
        backward.call(
            peak=memory.rms_norm_backward_peak(*sizes, conditions),
            left=(num_elements + self.width) * wide_itemsize,
        )
        backward.free(widened)
        memory.narrow_result(backward, num_elements, dtype, conditions)
        return LayerSpec(
            params=(ParamSpec(name=f"{name}.weight", shape=(self.width,)),),
            forward_flops=4 * num_elements,
            backward_flops=9 * num_elements,
            output_shape=tuple(x_shape),
            input_bytes=num_bytes,
            output_bytes=num_bytes,
            saves_input=True,
            extra_saved_bytes=num_rows * wide_itemsize,
            kept_bytes=self.width * wide_itemsize,
            forward_peak_bytes=forward.peak,
            input_peak_bytes=backward.peak,
        )


@dataclass(frozen=True)
class Projection(PlainBackward):
    """One or more linear maps of the same input, without bias, outputs side by side.

    Notes
    -----
    Forward: ``y[..., columns of i] = x @ weight_i`` for every output i, in order.

    Saved: x, shape (B, T, D).

    Backward: ``dx = dy @ [weight_0 | weight_1 | ...].T``, ``dweight_i = x.T @ dy[columns of i]``.

    Weights start normal with mean 0 and variance ``init_scale^2 / D``.
    """

    in_features: int
    """Input width, D."""
    outs: tuple[tuple[str, int], ...]
    """(parameter name, width) of each output, left to right."""
    init_scale: float = 1.0
    """Factor of the first weights: below 1 for projections that add to the residual stream."""

    @property
    def param_names(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(name for name, _ in self.outs)

    @property
    def out_features(self) -> int:
        """Columns of the output, C."""
        return sum(width for _, width in self.outs)

    def _columns(self) -> list[tuple[str, slice]]:
        """Pair each name with its columns of the output."""
        columns, start = [], 0
        for name, width in self.outs:
            columns.append((name, slice(start, start + width)))
            start += width
        return columns

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return one weight of shape (D, width) per output."""
        scale = self.init_scale / math.sqrt(self.in_features)
        return {
            name: normal_weights(rng_for(name), (self.in_features, width), scale, dtype)
            for name, width in self.outs
        }

    def initial(self, local: str) -> Initial:
        """Return how a parameter starts."""
        return Initial(scale=self.init_scale / math.sqrt(self.in_features))

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return ``(y, (x,))``; y of shape (B, T, C) and x's dtype."""
        x_ND = as_rows(ctx.wide(x))
        y_NC = np.empty((len(x_ND), self.out_features), dtype=x_ND.dtype)
        for name, columns in self._columns():
            np.matmul(x_ND, ctx.wide(params[name]), out=y_NC[:, columns])
        del x_ND  # before the output is rounded: in 16-bit runs a wide copy
        return ctx.narrow(y_NC, x.dtype).reshape(*x.shape[:-1], self.out_features), (x,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, (dy,))``; dx of shape (B, T, D) and dy's dtype."""
        dy_NC = as_rows(ctx.wide(dy))
        if len(self.outs) == 1:
            weight_DC = ctx.wide(params[self.outs[0][0]])
        else:
            # The copy costs D * C moves, a dx per output would cost N * D additions each.
            weight_DC = np.empty((self.in_features, self.out_features), dtype=dy_NC.dtype)
            for name, columns in self._columns():
                weight_DC[:, columns] = ctx.wide(params[name])
        dx_ND = dy_NC @ weight_DC.T
        del dy_NC, weight_DC
        return ctx.narrow(dx_ND, dy.dtype).reshape(*dy.shape[:-1], self.in_features), (dy,)

    def backward_weight(self, saved: Saved, kept: Saved, ctx: LayerContext) -> Arrays:
        """Return the gradient of each weight, shape (D, width)."""
        x_ND, dy_NC = as_rows(ctx.wide(saved[0])), as_rows(ctx.wide(kept[0]))
        return {name: x_ND.T @ dy_NC[:, columns] for name, columns in self._columns()}

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for an input of shape `x_shape` (B, T, D)."""
        num_tokens = math.prod(x_shape[:-1])
        itemsize = np.dtype(dtype).itemsize
        matmul_flops = 2 * num_tokens * self.in_features * self.out_features
        forward, backward, weight = self._tapes(num_tokens, dtype, conditions)
        return LayerSpec(
            params=tuple(
                ParamSpec(name=f"{name}.{local}", shape=(self.in_features, width))
                for local, width in self.outs
            ),
            forward_flops=matmul_flops,
            backward_flops=2 * matmul_flops,
            weight_flops=matmul_flops,
            keeps_output_grad=True,
            output_shape=(*x_shape[:-1], self.out_features),
            input_bytes=num_tokens * self.in_features * itemsize,
            output_bytes=num_tokens * self.out_features * itemsize,
            saves_input=True,
            forward_peak_bytes=forward.peak,
            input_peak_bytes=backward.peak,
            weight_peak_bytes=weight.peak,
            grad_bytes=self.in_features * self.out_features * wide_dtype(dtype).itemsize,
        )

    def _tapes(
        self, num_tokens: int, dtype: np.dtype, conditions: Conditions
    ) -> tuple[Tape, Tape, Tape]:
        """Write down what forward, backward_input and backward_weight allocate."""
        wide_itemsize = wide_dtype(dtype).itemsize
        num_in, num_out = num_tokens * self.in_features, num_tokens * self.out_features
        num_weights = self.in_features * self.out_features
        forward, backward, weight = Tape(), Tape(), Tape()

        x_bytes = memory.widen(forward, num_in, dtype, conditions)
        forward.new(num_out * wide_itemsize)
        for _, width in self.outs:
            forward.free(memory.widen(forward, self.in_features * width, dtype, conditions))
        forward.free(x_bytes)
        memory.narrow_result(forward, num_out, dtype, conditions)

        dy_bytes = memory.widen(backward, num_out, dtype, conditions)
        if len(self.outs) == 1:
            weight_bytes = memory.widen(backward, num_weights, dtype, conditions)
        else:
            weight_bytes = num_weights * wide_itemsize
            backward.new(weight_bytes)
            for _, width in self.outs:
                backward.free(memory.widen(backward, self.in_features * width, dtype, conditions))
        backward.new(num_in * wide_itemsize)
        backward.free(dy_bytes, weight_bytes)
        memory.narrow_result(backward, num_in, dtype, conditions)

        memory.widen(weight, num_in, dtype, conditions)
        memory.widen(weight, num_out, dtype, conditions)
        weight.new(num_weights * wide_itemsize)
        return forward, backward, weight


@dataclass(frozen=True)
class SwiGLU(NoParams):
    """A gated unit: the swish of one half of the features times the other half.

    Notes
    -----
    Forward: ``z = gate * s(gate) * up`` with ``[gate | up] = x`` and s the logistic function
    (Shazeer 2020, eq. 6; the three projections are layers of their own, without bias).

    Saved: x, shape (B, T, 2 F).

    Backward: ``dup = dz * gate * s``, ``dgate = dz * up * s * (1 + gate * (1 - s))``.
    """

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return ``(z, (x,))``; z of shape (B, T, F) and x's dtype."""
        z_NF = ctx.kernels.swiglu(as_rows(ctx.wide(x)))
        return ctx.narrow(z_NF, x.dtype).reshape(*x.shape[:-1], x.shape[-1] // 2), (x,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, ())``; dx of shape (B, T, 2 F) and dy's dtype."""
        (x,) = saved
        dx = ctx.kernels.swiglu_backward(as_rows(ctx.wide(dy)), as_rows(ctx.wide(x)))
        return ctx.narrow(dx, dy.dtype).reshape(x.shape), ()

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for an input of shape `x_shape` (B, T, 2 F)."""
        num_out = math.prod(x_shape) // 2
        itemsize, wide_itemsize = np.dtype(dtype).itemsize, wide_dtype(dtype).itemsize
        sizes = (math.prod(x_shape[:-1]), x_shape[-1] // 2, wide_itemsize)
        forward, backward = Tape(), Tape()
        widened = memory.widen(forward, 2 * num_out, dtype, conditions)
        forward.call(peak=memory.swiglu_peak(*sizes, conditions), left=num_out * wide_itemsize)
        forward.free(widened)
        memory.narrow_result(forward, num_out, dtype, conditions)
        widened = memory.widen(backward, num_out, dtype, conditions)
        widened += memory.widen(backward, 2 * num_out, dtype, conditions)
        backward.call(
            peak=memory.swiglu_backward_peak(*sizes, conditions), left=2 * num_out * wide_itemsize
        )
        backward.free(widened)
        memory.narrow_result(backward, 2 * num_out, dtype, conditions)
        return LayerSpec(
            forward_flops=5 * num_out,
            backward_flops=11 * num_out,
            output_shape=(*x_shape[:-1], x_shape[-1] // 2),
            input_bytes=2 * num_out * itemsize,
            output_bytes=num_out * itemsize,
            saves_input=True,
            forward_peak_bytes=forward.peak,
            input_peak_bytes=backward.peak,
        )


@dataclass(frozen=True)
class Dropout(NoParams):
    """Zero a random share of the features and scale up the others.

    Notes
    -----
    Forward: ``y = x * keep / (1 - rate)``, where an element is kept if the word of the counter
    range of site `site` that belongs to its (row, position, feature) is below
    ``(1 - rate) * 2^64`` (see `mpisim.nn.dropout`). Without masks in the context ``y is x``.

    Saved: nothing. Backward draws the same words again: ``dx = dy * keep / (1 - rate)``.
    """

    rate: float
    """Share that is dropped, in (0, 1)."""
    site: int
    """Which of the model's dropout sites this is, from 0."""

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return ``(y, ())``; y of x's shape (B, T, D) and dtype."""
        return self._masked(x, ctx), ()

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, ())``; dx of dy's shape and dtype; dy itself without masks."""
        return self._masked(dy, ctx), ()

    def _masked(self, x: np.ndarray, ctx: LayerContext) -> np.ndarray:
        if ctx.dropout is None:
            return x
        threshold, factor = keep_threshold(self.rate), 1.0 / (1.0 - self.rate)
        apply, is_half = ctx.kernels.apply_dropout, x.dtype.itemsize == 2
        wides = np.empty(_tile_words(x.shape), dtype=np.float32) if is_half else None
        y = np.empty(x.shape, dtype=x.dtype)
        x_flat, y_flat = np.ascontiguousarray(x).reshape(-1), y.reshape(-1)
        # Words are twice as large as float32 elements: those of the whole array never exist.
        for part, words in ctx.dropout.tiles(self.site, x.shape):
            if is_half:
                wide = wides[: words.size]
                ctx.kernels.widen(x_flat[part], out=wide)
                apply(wide, words, threshold, factor, out=wide)
                ctx.kernels.narrow(wide, x.dtype, out=y_flat[part])
            else:
                apply(x_flat[part], words, threshold, factor, out=y_flat[part])
            del words  # before the next ones are drawn
        return y

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for an input of shape `x_shape` (B, T, D); drawing is not counted."""
        num_elements = math.prod(x_shape)
        num_bytes = num_elements * np.dtype(dtype).itemsize
        tape = Tape()
        if conditions.dropout:
            tape.new(num_bytes)
            num_words = _tile_words(x_shape)
            if num_words:
                wide_itemsize = wide_dtype(dtype).itemsize
                is_half = np.dtype(dtype).itemsize == 2
                tape.new(num_words * wide_itemsize * is_half)
                tape.call(peak=STREAM_BYTES)
                tape.new(num_words * np.uint64().itemsize)
                tape.call(
                    peak=memory.apply_dropout_peak(num_words, wide_itemsize, conditions, out=True)
                )
                if is_half:
                    tape.call(peak=memory.widen_peak(num_words, dtype, conditions, out=True))
                    tape.call(peak=memory.narrow_peak(num_words, dtype, conditions, out=True))
        return LayerSpec(
            forward_flops=num_elements,
            backward_flops=num_elements,
            output_shape=tuple(x_shape),
            input_bytes=num_bytes,
            output_bytes=num_bytes,
            forward_peak_bytes=tape.peak,
            input_peak_bytes=tape.peak,
            passes_through=not conditions.dropout,
        )


def _tile_words(shape: tuple[int, ...]) -> int:
    """Return how many words of a dropout site exist at a time: a tile, at most one row."""
    return min(math.prod(shape), math.prod(shape[1:]), WORD_TILE)
