"""Causal self-attention with rotary positions and grouped keys and values.

Projections into and out of it are layers of their own (`transformer.Projection`).

Shape suffixes: B batch rows, T query positions, S key positions (S = T), H query heads, G key and
value heads, R = H / G query heads per group, K head size, P positions of the rotary tables.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mpisim.errors import BatchError, RecomputeMismatch
from mpisim.layouts.specs import Conditions, LayerSpec, Tape
from mpisim.nn import kernel_memory as memory
from mpisim.nn.arrays import as_rows, require_length, wide_dtype
from mpisim.nn.layers import Arrays, LayerContext, NoParams, Saved

_making_tables = threading.Lock()
"""Ranks may be threads: two that miss the cache together would keep two pairs of tables."""


def rotary_tables(
    max_len: int, head_size: int, theta: float, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and sines of the rotary angles.

    Parameters
    ----------
    max_len : int
        Positions, P.
    head_size : int
        K, even.
    theta : float
        Base of the angles.
    dtype : numpy.dtype
        float32 or float64; computed in float64 and rounded once.

    Returns
    -------
    cos, sin : ndarray of shape (P, K / 2), read-only
        Of ``position * theta^(-2 i / K)`` (Su et al. 2021, section 3.2.2). The same arrays on
        every call: they belong to the process, not to a layer or a step.
    """
    with _making_tables:
        return _tables(max_len, head_size, theta, dtype)


@lru_cache(maxsize=32)
def _tables(
    max_len: int, head_size: int, theta: float, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    frequencies = theta ** (-2.0 * np.arange(head_size // 2) / head_size)
    angles = np.arange(max_len)[:, np.newaxis] * frequencies
    tables = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    for table in tables:
        table.setflags(write=False)
    return tables


@dataclass(frozen=True)
class Attention(NoParams):
    """Each position reads the values of its document's earlier positions and its own.

    Notes
    -----
    The input of a token is ``[q of H heads | k of G heads | v of G heads]``, each K wide; query
    head h reads key and value head ``h // (H / G)`` (Ainslie et al. 2023).

    Forward, per row and head: q and k are turned by the angles of their position within the
    document, ``(a, b) -> (a cos - b sin, b cos + a sin)`` for pairs of the first and the second
    half of a head, and q is multiplied by ``1 / sqrt(K)``. Then
    ``p[i, j] = exp(q[i] . k[j]) / sum over j' of exp(q[i] . k[j'])`` for j, j' in
    ``starts[i]..i`` and exactly 0 elsewhere, and ``y[i] = sum over j of p[i, j] v[j]``.

    Saved: turned q (B, H, T, K), turned k (B, G, T, K), v (B, G, T, K), p (B, H, T, T).

    Backward: ``dv = p.T @ dy``, ``dp = dy @ v.T``, ``ds = p * (dp - sum over j of p * dp)``,
    ``dq = ds @ k``, ``dk = ds.T @ q``; dk and dv are summed over the heads of a group, dq and dk
    turned back and dq scaled.

    The interior is p, which grows with the square of the length: `trim` keeps its diagonal,
    (B, H, T), and `restore` computes p from q and k and compares. The diagonal is the one column
    that no mask ever empties, and each of its elements depends on the whole of its row.
    """

    num_heads: int
    """Query heads, H."""
    num_kv_heads: int
    """Key and value heads, G; divides H."""
    head_size: int
    """K, even."""
    max_len: int
    """Longest row, P."""
    theta: float = 10000.0
    """Base of the rotary angles."""

    @property
    def in_features(self) -> int:
        """Columns of the input."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return the context of every token.

        Parameters
        ----------
        params : dict
            Empty.
        x : ndarray of shape (B, T, (H + 2 G) K)
            Queries, keys and values side by side.
        ctx : LayerContext
            `ctx.starts`: see `LayerContext`.

        Returns
        -------
        y : ndarray of shape (B, T, H K), x's dtype
            Heads side by side.
        saved : (q, k, v, p), x's dtype

        Raises
        ------
        BatchError
            Rows are longer than `max_len`, or the starts do not fit.
        """
        num_rows, length = x.shape[:2]
        require_length(length, self.max_len)
        if ctx.starts is not None:
            _check_starts(ctx.starts, x.shape[:2])
        heads, groups, size = self.num_heads, self.num_kv_heads, self.head_size
        x_NC = as_rows(ctx.wide(x))
        q, k, v = ctx.kernels.rotary_split(
            x_NC, *self.tables(x_NC.dtype), _positions(ctx.starts), num_rows, heads, groups,
            size**-0.5,
        )  # fmt: skip
        del x_NC  # as below: in 16-bit runs this frees a wide copy
        if not num_rows:
            # Without rows the kernel cannot tell how long they are.
            q, k, v = (np.reshape(array, (0, array.shape[1], length, size)) for array in (q, k, v))
        # Probabilities are computed from the rounded q and k, so that `restore` can repeat them.
        stored = tuple(_rounded(array, x.dtype, ctx) for array in (q, k, v))
        wide_probs = self._probabilities(q, k, ctx)
        del q, k
        probs = _rounded(wide_probs, x.dtype, ctx)
        y = np.empty((num_rows, length, heads * size), dtype=wide_probs.dtype)
        by_head = (num_rows, groups, heads // groups, length, length)
        np.matmul(wide_probs.reshape(by_head), v[:, :, np.newaxis], out=self._heads_of(y))
        del v, wide_probs
        return ctx.narrow(y, x.dtype), (*stored, probs)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, ())``; dx of shape (B, T, (H + 2 G) K) and dy's dtype."""
        q, k, v, probs = (ctx.wide(array) for array in saved)
        num_rows, heads, length, size = q.shape
        groups, shared = self.num_kv_heads, heads // self.num_kv_heads
        # The R heads of a group are one tall matrix: their sum over heads is part of the product.
        tall = (num_rows, groups, shared * length, size)
        square = (num_rows, groups, shared * length, length)
        dy_heads = self._heads_of(np.ascontiguousarray(ctx.wide(dy)))
        dprobs = np.matmul(dy_heads, v[:, :, np.newaxis].swapaxes(-1, -2)).reshape(probs.shape)
        dv = np.matmul(probs.reshape(square).swapaxes(-1, -2), dy_heads.reshape(tall))
        del v, dy_heads  # here and below: at the latest moment what has been read is freed
        ctx.kernels.causal_softmax_backward(probs, dprobs, ctx.starts)
        del probs
        dscores = dprobs.reshape(square)
        dq = np.matmul(dscores, k).reshape(q.shape)
        dk = np.matmul(dscores.swapaxes(-1, -2), q.reshape(tall))
        tables = self.tables(q.dtype)
        del dprobs, dscores, q, k
        dx_NC = ctx.kernels.rotary_merge(dq, dk, dv, *tables, _positions(ctx.starts), size**-0.5)
        del dq, dk, dv
        dx = ctx.narrow(dx_NC, dy.dtype).reshape(num_rows, length, self.in_features)
        return dx, ()

    def trim(self, saved: Saved) -> Saved:
        """Return ``(q, k, v, diagonal of p)``."""
        q, k, v, probs = saved
        # As integers: NumPy copies a strided bfloat16 array through one more element.
        bits = f"u{probs.dtype.itemsize}"
        check = np.empty(probs.shape[:3], dtype=probs.dtype)
        np.copyto(check.view(bits), np.diagonal(probs.view(bits), axis1=2, axis2=3))
        return q, k, v, check

    def restore(self, trimmed: Saved, ctx: LayerContext) -> Saved:
        """Return ``(q, k, v, p)`` with p computed again.

        Raises
        ------
        RecomputeMismatch
            The diagonal differs in some bit from the first one.
        """
        q, k, v, check = trimmed
        probs = ctx.narrow(self._probabilities(ctx.wide(q), ctx.wide(k), ctx), q.dtype)
        bits = f"u{check.dtype.itemsize}"
        again = np.diagonal(probs.view(bits), axis1=2, axis2=3)
        different = int(np.count_nonzero(again != check.view(bits)))
        if different:
            raise RecomputeMismatch(
                f"attention weights computed again must equal the first ones in every bit; got "
                f"{different} of {check.size} rows different. Something that forward read has "
                f"changed since: its inputs, document starts, or the kernels."
            )
        return q, k, v, probs

    def _probabilities(self, q: np.ndarray, k: np.ndarray, ctx: LayerContext) -> np.ndarray:
        """Return p of shape (B, H, T, T) from wide q and k."""
        num_rows, heads, length, size = q.shape
        tall = q.reshape(num_rows, self.num_kv_heads, heads // self.num_kv_heads * length, size)
        scores = np.matmul(tall, k.swapaxes(-1, -2)).reshape(num_rows, heads, length, length)
        ctx.kernels.causal_softmax(scores, ctx.starts)
        return scores

    def _heads_of(self, rows: np.ndarray) -> np.ndarray:
        """View heads side by side, (B, T, H K), as (B, G, R, T, K)."""
        num_rows, length, _ = rows.shape
        groups = self.num_kv_heads
        shape = (num_rows, length, groups, self.num_heads // groups, self.head_size)
        return rows.reshape(shape).transpose(0, 2, 3, 1, 4)

    def tables(self, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Return the rotary tables for arrays of `dtype`; the first call makes them.

        Notes
        -----
        They stay for the life of the process and `spec` counts them nowhere: `tables_bytes`
        says how large they are. Whoever watches memory calls this before the first step.
        """
        return rotary_tables(self.max_len, self.head_size, self.theta, wide_dtype(dtype))

    def tables_bytes(self, dtype: np.dtype) -> int:
        """Return the `nbytes` of `tables`, both together."""
        return 2 * self.max_len * (self.head_size // 2) * wide_dtype(dtype).itemsize

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for an input of shape `x_shape` (B, T, (H + 2 G) K).

        Scores are counted in full, as they are computed: half of them are masked.
        """
        num_rows, length, _ = x_shape
        num_tokens = num_rows * length
        itemsize = np.dtype(dtype).itemsize
        num_scores = num_tokens * self.num_heads * length
        product_flops = 2 * num_scores * self.head_size
        num_turned = num_tokens * (self.num_heads + self.num_kv_heads) * self.head_size
        num_q = num_tokens * self.num_heads * self.head_size
        rotary_flops = 3 * num_turned + num_q
        check_bytes = num_tokens * self.num_heads * itemsize
        return LayerSpec(
            forward_flops=2 * product_flops + 5 * num_scores + rotary_flops,
            backward_flops=4 * product_flops + 4 * num_scores + rotary_flops,
            output_shape=(num_rows, length, self.num_heads * self.head_size),
            input_bytes=num_tokens * self.in_features * itemsize,
            output_bytes=num_q * itemsize,
            extra_saved_bytes=(num_tokens * self.in_features + num_scores) * itemsize,
            interior_bytes=num_scores * itemsize,
            check_bytes=check_bytes,
            interior_flops=product_flops + 5 * num_scores,
            forward_peak_bytes=self._forward_tape(num_rows, length, dtype, conditions).peak,
            input_peak_bytes=self._backward_tape(num_rows, length, dtype, conditions).peak,
            trim_peak_bytes=check_bytes,
            restore_peak_bytes=self._restore_tape(num_rows, length, dtype, conditions).peak,
        )

    def _forward_tape(
        self, num_rows: int, length: int, dtype: np.dtype, conditions: Conditions
    ) -> Tape:
        """Write down what forward allocates."""
        tape, wide_itemsize = Tape(), wide_dtype(dtype).itemsize
        is_half = np.dtype(dtype).itemsize == 2
        num_tokens = num_rows * length
        num_q = num_tokens * self.num_heads * self.head_size
        num_k = num_tokens * self.num_kv_heads * self.head_size
        num_probs = num_tokens * self.num_heads * length
        x_bytes = memory.widen(tape, num_tokens * self.in_features, dtype, conditions)
        positions_bytes = _positions_on(tape, num_rows, length, conditions)
        tape.call(
            peak=memory.rotary_split_peak(*self._sizes(num_rows, length, dtype), conditions),
            left=num_tokens * self.in_features * wide_itemsize,
        )
        tape.free(positions_bytes, x_bytes)
        for size in (num_q, num_k, num_k):
            _rounded_on(tape, size, dtype, conditions)
        self._probabilities_on(tape, num_rows, length, dtype, conditions)
        if is_half:
            tape.free((num_q + num_k) * wide_itemsize)
        _rounded_on(tape, num_probs, dtype, conditions)
        tape.new(num_q * wide_itemsize)
        if is_half:
            tape.free((num_k + num_probs) * wide_itemsize)
        memory.narrow_result(tape, num_q, dtype, conditions)
        return tape

    def _backward_tape(
        self, num_rows: int, length: int, dtype: np.dtype, conditions: Conditions
    ) -> Tape:
        """Write down what backward_input allocates."""
        tape, wide_itemsize = Tape(), wide_dtype(dtype).itemsize
        num_tokens = num_rows * length
        num_q = num_tokens * self.num_heads * self.head_size
        num_k = num_tokens * self.num_kv_heads * self.head_size
        num_probs = num_tokens * self.num_heads * length
        q_bytes, k_bytes, v_bytes, p_bytes, dy_bytes = (
            memory.widen(tape, size, dtype, conditions)
            for size in (num_q, num_k, num_k, num_probs, num_q)
        )
        dprobs_bytes = num_probs * wide_itemsize
        tape.new(dprobs_bytes)
        # Heads of a group lie apart in dy: as one tall matrix they are a copy while dv is made.
        is_view = self.num_heads == self.num_kv_heads or length == 1
        tall_bytes = 0 if is_view else num_q * wide_itemsize
        tape.new(tall_bytes, num_k * wide_itemsize)
        tape.free(tall_bytes, v_bytes, dy_bytes)
        scores_sizes = (num_rows, self.num_heads, length, wide_itemsize)
        tape.call(peak=memory.causal_softmax_backward_peak(*scores_sizes, conditions))
        tape.free(p_bytes)
        tape.new(num_q * wide_itemsize, num_k * wide_itemsize)  # dq, dk
        tape.free(dprobs_bytes, q_bytes, k_bytes)
        positions_bytes = _positions_on(tape, num_rows, length, conditions)
        tape.call(
            peak=memory.rotary_merge_peak(*self._sizes(num_rows, length, dtype), conditions),
            left=num_tokens * self.in_features * wide_itemsize,
        )
        tape.free(positions_bytes, (num_q + 2 * num_k) * wide_itemsize)
        memory.narrow_result(tape, num_tokens * self.in_features, dtype, conditions)
        return tape

    def _restore_tape(
        self, num_rows: int, length: int, dtype: np.dtype, conditions: Conditions
    ) -> Tape:
        """Write down what restore allocates."""
        tape = Tape()
        num_tokens = num_rows * length
        widened = memory.widen(
            tape, num_tokens * self.num_heads * self.head_size, dtype, conditions
        )
        widened += memory.widen(
            tape, num_tokens * self.num_kv_heads * self.head_size, dtype, conditions
        )
        self._probabilities_on(tape, num_rows, length, dtype, conditions)
        tape.free(widened)
        memory.narrow_result(tape, num_tokens * self.num_heads * length, dtype, conditions)
        tape.call(peak=num_tokens * self.num_heads)  # which elements of the check differ
        return tape

    def _probabilities_on(
        self, tape: Tape, num_rows: int, length: int, dtype: np.dtype, conditions: Conditions
    ) -> None:
        """Write down what `_probabilities` allocates; its result is left."""
        wide_itemsize = wide_dtype(dtype).itemsize
        tape.new(num_rows * self.num_heads * length * length * wide_itemsize)
        sizes = (num_rows, self.num_heads, length, wide_itemsize)
        tape.call(peak=memory.causal_softmax_peak(*sizes, conditions))

    def _sizes(self, num_rows: int, length: int, dtype: np.dtype) -> tuple[int, ...]:
        """Return what `kernel_memory` wants to know of a call of the rotary kernels."""
        heads = (self.num_heads, self.num_kv_heads, self.head_size)
        return num_rows, length, *heads, wide_dtype(dtype).itemsize


def _rounded(array: np.ndarray, dtype: np.dtype, ctx: LayerContext) -> np.ndarray:
    """Return `array` in `dtype`; what is left in a wide `array` are the rounded values."""
    stored = ctx.narrow(array, dtype)
    if stored is not array:
        ctx.kernels.widen(stored, out=array)
    return stored


def _rounded_on(tape: Tape, size: int, dtype: np.dtype, conditions: Conditions) -> None:
    """Write down what `_rounded` allocates; a 16-bit result is left."""
    if memory.narrow(tape, size, dtype, conditions):
        tape.call(peak=memory.widen_peak(size, dtype, conditions, out=True))


def _positions(starts: np.ndarray | None) -> np.ndarray | None:
    """Return each token's position in its document, shape (B * T,), int32; None if it is t."""
    if starts is None or not starts.size:
        return None
    positions_BT = np.empty(starts.shape, dtype=np.int32)
    np.copyto(positions_BT, starts, casting="same_kind")
    columns_T = np.arange(starts.shape[1], dtype=np.int32)
    return np.subtract(columns_T, positions_BT, out=positions_BT).reshape(-1)


def _positions_on(tape: Tape, num_rows: int, length: int, conditions: Conditions) -> int:
    """Write down what `_positions` allocates and return the bytes that are left."""
    if not conditions.starts or not num_rows * length:
        return 0
    positions_bytes, columns_bytes = num_rows * length * 4, length * 4
    tape.new(positions_bytes, columns_bytes)
    tape.free(columns_bytes)
    return positions_bytes


def _check_starts(starts: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise BatchError unless every start is a column up to its own position."""
    if starts.shape != shape or starts.dtype.kind not in "iu":
        raise BatchError(
            f"document starts must be integers of shape {shape}; got {starts.dtype} "
            f"{starts.shape}. Pass one column per token."
        )
    if not starts.size:
        return
    # These masks come and go before forward makes its first array, and take less than it.
    wrong = (starts < 0) | (starts > np.arange(shape[1]))
    if wrong.any():
        row, column = (int(index) for index in np.argwhere(wrong)[0])
        raise BatchError(
            f"a document's start must be a column in 0..{column} at column {column}; got "
            f"{int(starts[row, column])} in row {row}. Check how rows are packed."
        )
