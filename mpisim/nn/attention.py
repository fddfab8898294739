"""Causal self-attention with rotary positions and grouped keys and values.

Projections into and out of it are layers of their own (`transformer.Projection`).

Shape suffixes: B batch rows, T query positions, S key positions (S = T), H query heads, G key and
value heads, R = H / G query heads per group, K head size, P positions of the rotary tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mpisim.errors import BatchError, RecomputeMismatch
from mpisim.layouts.specs import LayerSpec
from mpisim.nn.arrays import as_rows, require_length
from mpisim.nn.layers import Arrays, LayerContext, NoParams, Saved


@lru_cache(maxsize=32)
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
        split = ctx.kernels.rotary_split(
            x_NC, *self._tables(x_NC.dtype), self._positions(ctx, length), num_rows, heads, groups,
            size**-0.5,
        )  # fmt: skip
        if not num_rows:
            # Without rows the kernel cannot tell how long they are.
            split = [np.reshape(array, (0, array.shape[1], length, size)) for array in split]
        # Probabilities are computed from the rounded q and k, so that `restore` can repeat them.
        stored = tuple(ctx.narrow(array, x.dtype) for array in split)
        q, k, v = (ctx.wide(array) for array in stored)
        probs = ctx.narrow(self._probabilities(q, k, ctx), x.dtype)
        y = np.empty((num_rows, length, heads * size), dtype=q.dtype)
        by_head = (num_rows, groups, heads // groups, length, length)
        np.matmul(ctx.wide(probs).reshape(by_head), v[:, :, np.newaxis], out=self._heads_of(y))
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
        ctx.kernels.causal_softmax_backward(probs, dprobs, ctx.starts)
        dscores = dprobs.reshape(square)
        dq = np.matmul(dscores, k).reshape(q.shape)
        dk = np.matmul(dscores.swapaxes(-1, -2), q.reshape(tall))
        dx_NC = ctx.kernels.rotary_merge(
            dq, dk, dv, *self._tables(q.dtype), self._positions(ctx, length), size**-0.5
        )
        dx = ctx.narrow(dx_NC, dy.dtype).reshape(num_rows, length, self.in_features)
        return dx, ()

    def trim(self, saved: Saved) -> Saved:
        """Return ``(q, k, v, diagonal of p)``."""
        q, k, v, probs = saved
        return q, k, v, np.diagonal(probs, axis1=2, axis2=3).copy()

    def restore(self, trimmed: Saved, ctx: LayerContext) -> Saved:
        """Return ``(q, k, v, p)`` with p computed again.

        Raises
        ------
        RecomputeMismatch
            The diagonal differs in some bit from the first one.
        """
        q, k, v, check = trimmed
        probs = ctx.narrow(self._probabilities(ctx.wide(q), ctx.wide(k), ctx), q.dtype)
        again = np.diagonal(probs, axis1=2, axis2=3).copy()
        bits = f"u{check.dtype.itemsize}"
        different = int(np.count_nonzero(again.view(bits) != check.view(bits)))
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

    def _tables(self, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        return rotary_tables(self.max_len, self.head_size, self.theta, dtype)

    @staticmethod
    def _positions(ctx: LayerContext, length: int) -> np.ndarray | None:
        """Return each token's position in its document, shape (B * T,); None if it is t."""
        if ctx.starts is None or not ctx.starts.size:
            return None
        return (np.arange(length, dtype=np.int64) - ctx.starts).reshape(-1)

    def spec(self, x_shape: tuple[int, ...], dtype: np.dtype, name: str) -> LayerSpec:
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
        return LayerSpec(
            forward_flops=2 * product_flops + 5 * num_scores + rotary_flops,
            backward_flops=4 * product_flops + 4 * num_scores + rotary_flops,
            output_shape=(num_rows, length, self.num_heads * self.head_size),
            input_bytes=num_tokens * self.in_features * itemsize,
            output_bytes=num_q * itemsize,
            extra_saved_bytes=(num_tokens * self.in_features + num_scores) * itemsize,
            interior_bytes=num_scores * itemsize,
            check_bytes=num_tokens * self.num_heads * itemsize,
            interior_flops=product_flops + 5 * num_scores,
        )


def _check_starts(starts: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise BatchError unless every start is a column up to its own position."""
    if starts.shape != shape or starts.dtype.kind not in "iu":
        raise BatchError(
            f"document starts must be integers of shape {shape}; got {starts.dtype} "
            f"{starts.shape}. Pass one column per token."
        )
    wrong = (starts < 0) | (starts > np.arange(shape[1]))
    if wrong.any():
        row, column = (int(index) for index in np.argwhere(wrong)[0])
        raise BatchError(
            f"a document's start must be a column in 0..{column} at column {column}; got "
            f"{int(starts[row, column])} in row {row}. Check how rows are packed."
        )
