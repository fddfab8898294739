"""A decoder-only transformer in float64, forward and backward written out by hand (M1).

One function per piece: RMSNorm, rotary positions, causal attention with grouped keys and values,
SwiGLU, a block, the head; `decoder_loss_and_gradients` strings them together. Attention is a loop
over rows, heads and positions, so that each line is the formula of the textbook. Nothing is fast
and everything is float64: this is what faster decoders are compared with. Inputs are never
modified, results are new arrays. Recompute of the blocks lives in `recompute`.

Shapes: B rows, T positions, D model width, H query heads, G key and value heads, K head size,
F feed-forward width, V vocabulary. Non-finite numbers are not looked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpisim.errors import ConfigError
from mpisim.reference.checks import require_dtype, require_int, require_number, require_shape
from mpisim.reference.mlp import (
    Params,
    softmax_cross_entropy_sum,
    softmax_cross_entropy_sum_backward,
)

IGNORED = -1
"""Target of a position that has nothing to predict; it counts in no sum."""

DropoutFactors = tuple[np.ndarray, np.ndarray]
"""What a block multiplies the outputs of attention and of feed-forward by: 0 or 1/(1-p) each."""


@dataclass(frozen=True)
class DecoderSettings:
    """What the shapes of the parameters do not tell."""

    num_heads: int
    """H, query heads, >= 1."""
    num_kv_heads: int
    """G, key and value heads, >= 1; divides H. Query head h reads key and value head h // (H/G)."""
    rope_theta: float
    """Base of the rotary angles, > 0."""
    norm_eps: float
    """Added to the mean square in RMSNorm, > 0."""

    def __post_init__(self):
        require_int("num_heads", self.num_heads, 1)
        require_int("num_kv_heads", self.num_kv_heads, 1)
        require_number("rope_theta", self.rope_theta, 0.0, low_open=True)
        require_number("norm_eps", self.norm_eps, 0.0, low_open=True)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads; got {self.num_heads} and "
                f"{self.num_kv_heads}. Every key head serves the same number of query heads."
            )


# --- parameters ------------------------------------------------------------------------------


def decoder_param_shapes(
    num_blocks: int,
    d_model: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    d_ff: int,
    vocab_size: int,
    tied: bool,
) -> dict[str, tuple[int, ...]]:
    """Return the name and the shape of every parameter, in forward order.

    Parameters
    ----------
    num_blocks : int
        >= 0.
    d_model, num_heads, num_kv_heads, head_size, d_ff, vocab_size : int
        D, H, G, K, F, V, each >= 1.
    tied : bool
        True: the head uses the token table, and there is no ``head.output.weight``.

    Returns
    -------
    dict of str to tuple of int
        Weights are (in, out), so that forward is ``x @ weight``; the two tables are (V, D).

    Raises
    ------
    ConfigError
        A number is out of range.

    Examples
    --------
    >>> shapes = decoder_param_shapes(3, 4, 1, 1, 4, 8, 266, tied=True)
    >>> len(shapes), sum(math.prod(shape) for shape in shapes.values())
    (29, 1572)
    """
    num_blocks = require_int("num_blocks", num_blocks, 0)
    d = require_int("d_model", d_model, 1)
    size = require_int("head_size", head_size, 1)
    query = require_int("num_heads", num_heads, 1) * size
    key = require_int("num_kv_heads", num_kv_heads, 1) * size
    f = require_int("d_ff", d_ff, 1)
    v = require_int("vocab_size", vocab_size, 1)
    shapes = {"embed.tokens.weight": (v, d)}
    for index in range(num_blocks):
        shapes |= {
            f"block{index}.norm1.weight": (d,),
            f"block{index}.qkv.query": (d, query),
            f"block{index}.qkv.key": (d, key),
            f"block{index}.qkv.value": (d, key),
            f"block{index}.out.weight": (query, d),
            f"block{index}.norm2.weight": (d,),
            f"block{index}.gate_up.gate": (d, f),
            f"block{index}.gate_up.up": (d, f),
            f"block{index}.down.weight": (f, d),
        }
    shapes["head.norm.weight"] = (d,)
    if not tied:
        shapes["head.output.weight"] = (v, d)
    return shapes


def count_decoder_blocks(params: Params, settings: DecoderSettings) -> int:
    """Check that `params` is a whole decoder and return how many blocks it has.

    Parameters
    ----------
    params : dict of str to ndarray, float64
        In any order. Not modified.
    settings : DecoderSettings
        Its heads must fit the widths of the weights, with an even head size.

    Returns
    -------
    int
        >= 0.

    Raises
    ------
    ConfigError
        A name is missing or unknown, or a shape or dtype does not fit.
    """
    num_blocks = len({name.partition(".")[0] for name in params if name.startswith("block")})
    tied = "head.output.weight" not in params
    names = set(decoder_param_shapes(num_blocks, 1, 1, 1, 1, 1, 1, tied))
    if set(params) != names:
        raise ConfigError(
            f"params must hold the tensors of a whole decoder; got "
            f"{sorted(names - set(params)) or 'nothing'} missing and "
            f"{sorted(set(params) - names) or 'nothing'} unknown. Name them as "
            f"decoder_param_shapes does."
        )
    for name, param in params.items():
        _require_float64(f"params[{name!r}]", param, 1 if ".norm" in name else 2)
    vocab_size, d_model = params["embed.tokens.weight"].shape
    head_size, d_ff = 2, 1
    if num_blocks:
        query_width = params["block0.qkv.query"].shape[1]
        d_ff = params["block0.gate_up.gate"].shape[1]
        head_size, rest = divmod(query_width, settings.num_heads)
        if rest or head_size % 2 or head_size == 0:
            raise ConfigError(
                f"the width of block0.qkv.query must be num_heads times an even head size; got "
                f"{query_width} with {settings.num_heads} heads. Rotary positions turn pairs."
            )
    shapes = decoder_param_shapes(
        num_blocks,
        d_model,
        settings.num_heads,
        settings.num_kv_heads,
        head_size,
        d_ff,
        vocab_size,
        tied,
    )
    for name, param in params.items():
        require_shape(f"params[{name!r}]", param, shapes[name])
    return num_blocks


# --- norm ------------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Divide each vector by its root mean square and multiply by a gain.

    Parameters
    ----------
    x : ndarray of shape (..., D), float64
        Not modified.
    weight : ndarray of shape (D,), float64
        The gain. Not modified.
    eps : float
        Added to the mean square, > 0.

    Returns
    -------
    ndarray of x's shape
        ``x * r * weight`` with ``r = 1 / sqrt(mean(x**2) + eps)``. A vector of zeros stays zeros.

    Raises
    ------
    ConfigError
        A shape, dtype or eps does not fit.

    Examples
    --------
    >>> rms_norm(np.array([[2.0, -2.0]]), np.array([5.0, 10.0]), 1e-300).tolist()
    [[5.0, -10.0]]
    """
    _require_norm(x, weight, eps)
    return x * _inverse_rms(x, eps) * weight


def rms_norm_backward(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of `rms_norm` in its input and its gain.

    Parameters
    ----------
    dy : ndarray of x's shape, float64
        Gradient in the output. Not modified.
    x, weight, eps
        As in forward. Not modified.

    Returns
    -------
    dx : ndarray of x's shape
        ``r * weight * dy - x * r**3 * mean(x * weight * dy)``: the second term is what x does
        through r.
    dweight : ndarray of shape (D,)
        Sum of ``dy * x * r`` over all vectors.

    Raises
    ------
    ConfigError
        A shape, dtype or eps does not fit.
    """
    _require_norm(x, weight, eps)
    _require_float64("dy", dy)
    require_shape("dy", dy, x.shape)
    r = _inverse_rms(x, eps)
    dnormed = dy * weight
    dx = r * dnormed - x * r**3 * np.mean(x * dnormed, axis=-1, keepdims=True)
    return dx, (dy * x * r).reshape(-1, x.shape[-1]).sum(axis=0)


def _inverse_rms(x: np.ndarray, eps: float) -> np.ndarray:
    return 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def _require_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> None:
    _require_float64("x", x)
    _require_float64("weight", weight, 1)
    require_int("the width of x", x.shape[-1], 1)
    require_shape("weight", weight, x.shape[-1:])
    require_number("eps", eps, 0.0, low_open=True)


# --- rotary positions ------------------------------------------------------------------------


def rotate(
    x_BTHK: np.ndarray, positions_BT: np.ndarray, theta: float, backward: bool = False
) -> np.ndarray:
    """Turn each pair of features of each head by an angle that grows with the position.

    Parameters
    ----------
    x_BTHK : ndarray of shape (B, T, H, K), float64
        K even. Not modified.
    positions_BT : ndarray of shape (B, T), any integer dtype
        Position of each token within its document, >= 0. Not modified.
    theta : float
        Base of the angles, > 0.
    backward : bool, default False
        True: turn by the opposite angle. A rotation's inverse is its transpose, so this is both
        its inverse and its backward pass.

    Returns
    -------
    ndarray of x's shape
        Feature i of the first half and feature i of the second half are a pair, turned by
        ``position * theta**(-2 i / K)``. The length of each pair is kept; position 0 is unchanged.

    Raises
    ------
    ConfigError
        A shape, dtype or theta does not fit.

    Notes
    -----
    Su et al. (2021), with halves as pairs instead of neighbours. The dot product of two turned
    vectors depends on the difference of their positions only.
    """
    _require_float64("x", x_BTHK, 4)
    require_number("theta", theta, 0.0, low_open=True)
    size = x_BTHK.shape[-1]
    if size % 2 or size == 0:
        raise ConfigError(
            f"the head size must be even to form pairs; got {size}. Choose another width or "
            f"number of heads."
        )
    _require_ids("positions", positions_BT, x_BTHK.shape[:2], 0, np.iinfo(np.int64).max)
    rates = theta ** (-2 * np.arange(size // 2) / size)
    angles = positions_BT[:, :, np.newaxis, np.newaxis] * rates
    cos, sin = np.cos(angles), np.sin(angles)
    if backward:
        sin = -sin
    first, second = x_BTHK[..., : size // 2], x_BTHK[..., size // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


# --- attention -------------------------------------------------------------------------------


def causal_attention(
    q_BTHK: np.ndarray, k_BTGK: np.ndarray, v_BTGK: np.ndarray, starts_BT: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mix values by how well each query matches the keys of its own document so far.

    Parameters
    ----------
    q_BTHK : ndarray of shape (B, T, H, K), float64
        Queries, turned already. Not modified.
    k_BTGK, v_BTGK : ndarray of shape (B, T, G, K), float64
        Keys (turned already) and values, H a multiple of G. Not modified.
    starts_BT : ndarray of shape (B, T), any integer dtype
        Position i sees keys ``starts[i]..i``, 0 <= starts[i] <= i. Not modified.

    Returns
    -------
    mixed_BTHK : ndarray of shape (B, T, H, K)
        ``sum over j of probs[i, j] * v[j]``.
    probs_BHTT : ndarray of shape (B, H, T, T)
        Softmax over the visible keys of ``q[i] . k[j] / sqrt(K)``; exactly 0 elsewhere.

    Raises
    ------
    ConfigError
        A shape, dtype or start does not fit.
    """
    group = _require_attention(q_BTHK, k_BTGK, v_BTGK, starts_BT)
    num_rows, length, num_heads, size = q_BTHK.shape
    mixed = np.zeros_like(q_BTHK)
    probs = np.zeros((num_rows, num_heads, length, length))
    for b, h, i in np.ndindex(num_rows, num_heads, length):
        seen = slice(int(starts_BT[b, i]), i + 1)
        scores = k_BTGK[b, seen, h // group] @ q_BTHK[b, i, h] / math.sqrt(size)
        weights = np.exp(scores - scores.max())
        probs[b, h, i, seen] = weights / weights.sum()
        mixed[b, i, h] = probs[b, h, i, seen] @ v_BTGK[b, seen, h // group]
    return mixed, probs


def causal_attention_backward(
    dmixed_BTHK: np.ndarray,
    q_BTHK: np.ndarray,
    k_BTGK: np.ndarray,
    v_BTGK: np.ndarray,
    probs_BHTT: np.ndarray,
    starts_BT: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of `causal_attention` in queries, keys and values.

    Parameters
    ----------
    dmixed_BTHK : ndarray of shape (B, T, H, K), float64
        Gradient in the first result. Not modified.
    q_BTHK, k_BTGK, v_BTGK, starts_BT
        As in forward. Not modified.
    probs_BHTT : ndarray of shape (B, H, T, T)
        Second result of forward. Not modified.

    Returns
    -------
    dq_BTHK, dk_BTGK, dv_BTGK : ndarray
        A key or value head that several query heads read gets the sum of their gradients.

    Raises
    ------
    ConfigError
        A shape, dtype or start does not fit.

    Notes
    -----
    For one query with probs p: dp[j] = dmixed . v[j]; dscore[j] = p[j] (dp[j] - sum p dp);
    dq = sum dscore[j] k[j] / sqrt(K); dk[j] += dscore[j] q / sqrt(K); dv[j] += p[j] dmixed.
    """
    group = _require_attention(q_BTHK, k_BTGK, v_BTGK, starts_BT)
    num_rows, length, num_heads, size = q_BTHK.shape
    _require_float64("dmixed", dmixed_BTHK, 4)
    require_shape("dmixed", dmixed_BTHK, q_BTHK.shape)
    _require_float64("probs", probs_BHTT, 4)
    require_shape("probs", probs_BHTT, (num_rows, num_heads, length, length))
    dq, dk, dv = np.zeros_like(q_BTHK), np.zeros_like(k_BTGK), np.zeros_like(v_BTGK)
    for b, h, i in np.ndindex(num_rows, num_heads, length):
        g, seen = h // group, slice(int(starts_BT[b, i]), i + 1)
        p, dout = probs_BHTT[b, h, i, seen], dmixed_BTHK[b, i, h]
        dp = v_BTGK[b, seen, g] @ dout
        dscores = p * (dp - p @ dp) / math.sqrt(size)
        dq[b, i, h] = dscores @ k_BTGK[b, seen, g]
        dk[b, seen, g] += np.outer(dscores, q_BTHK[b, i, h])
        dv[b, seen, g] += np.outer(p, dout)
    return dq, dk, dv


def _require_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, starts: np.ndarray) -> int:
    """Check the arguments and return H/G, the query heads that share a key head."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        _require_float64(name, array, 4)
    num_rows, length, num_heads, size = q.shape
    num_kv_heads = k.shape[2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ConfigError(
            f"the heads of q must be a multiple of the heads of k; got {num_heads} and "
            f"{num_kv_heads}. Every key head serves the same number of query heads."
        )
    require_shape("k", k, (num_rows, length, num_kv_heads, size))
    require_shape("v", v, k.shape)
    _require_starts(starts, (num_rows, length))
    return num_heads // num_kv_heads


# --- feed-forward ----------------------------------------------------------------------------


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return ``gate * sigmoid(gate) * up``.

    Parameters
    ----------
    gate, up : ndarray of one shape, float64
        Finite. Not modified.

    Returns
    -------
    ndarray of the same shape
        A new array.

    Raises
    ------
    ConfigError
        Shapes or dtypes differ.

    Examples
    --------
    >>> swiglu(np.array([0.0, 1000.0, -1000.0]), np.array([3.0, 2.0, 2.0])).tolist()
    [0.0, 2000.0, -0.0]
    """
    _require_pair(gate=gate, up=up)
    return gate * _sigmoid(gate) * up


def swiglu_backward(
    dz: np.ndarray, gate: np.ndarray, up: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of `swiglu` in gate and up.

    Parameters
    ----------
    dz : ndarray, float64
        Gradient in the output. Not modified.
    gate, up : ndarray of dz's shape, float64
        As in forward. Not modified.

    Returns
    -------
    dgate, dup : ndarray
        With s = sigmoid(gate): ``dz * up * (s + gate * s * (1 - s))`` and ``dz * gate * s``.

    Raises
    ------
    ConfigError
        Shapes or dtypes differ.
    """
    _require_pair(gate=gate, up=up)
    _require_pair(gate=gate, dz=dz)
    s = _sigmoid(gate)
    return dz * up * (s + gate * s * (1 - s)), dz * gate * s


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # 1 / (1 + e^-x), written so that neither a large nor a very negative x overflows.
    return np.exp(-np.logaddexp(0.0, -x))


# --- a block ---------------------------------------------------------------------------------


class BlockSaved(NamedTuple):
    """What the backward pass of a block needs, all float64; dropout factors are not among it."""

    x: np.ndarray
    """(B, T, D): input of the block."""
    normed1: np.ndarray
    """(B, T, D): input of the query, key and value weights."""
    q: np.ndarray
    """(B, T, H, K): queries, turned."""
    k: np.ndarray
    """(B, T, G, K): keys, turned."""
    v: np.ndarray
    """(B, T, G, K): values."""
    probs: np.ndarray
    """(B, H, T, T): attention weights."""
    mixed: np.ndarray
    """(B, T, H, K): attention's result, input of the output weight."""
    middle: np.ndarray
    """(B, T, D): after the first residual connection, input of the second norm."""
    normed2: np.ndarray
    """(B, T, D): input of the gate and up weights."""
    gate: np.ndarray
    """(B, T, F)."""
    up: np.ndarray
    """(B, T, F)."""
    hidden: np.ndarray
    """(B, T, F): swiglu of the two, input of the down weight."""


def decoder_block_forward(
    params: Params,
    name: str,
    x_BTD: np.ndarray,
    starts_BT: np.ndarray,
    settings: DecoderSettings,
    factors: DropoutFactors | None = None,
) -> tuple[np.ndarray, BlockSaved]:
    """Run one block: ``m = x + attention(norm1(x)); y = m + feed_forward(norm2(m))``.

    Parameters
    ----------
    params : dict of str to ndarray, float64
        Parameters of a decoder; those that begin with `name` are read. Not modified.
    name : str
        "block0", "block1" and so on.
    x_BTD : ndarray of shape (B, T, D), float64
        Not modified, but kept in the second result: do not overwrite it before backward.
    starts_BT : ndarray of shape (B, T), any integer dtype
        First position of each token's document. Not modified.
    settings : DecoderSettings
    factors : pair of ndarray of shape (B, T, D), optional
        Dropout: the outputs of attention and of feed-forward are multiplied by these before they
        are added. None: no dropout. Not modified.

    Returns
    -------
    y_BTD : ndarray of shape (B, T, D)
    saved : BlockSaved
        Drop it to free the activations.

    Raises
    ------
    ConfigError
        A name is missing, or a shape or dtype does not fit.
    """
    weights = _block_weights(params, name)
    _require_float64("x", x_BTD, 3)
    _require_factors(factors, x_BTD.shape)
    positions_BT = _positions(starts_BT, x_BTD.shape[:2])
    heads, kv_heads = settings.num_heads, settings.num_kv_heads
    normed1 = rms_norm(x_BTD, weights["norm1.weight"], settings.norm_eps)
    q = rotate(_split(normed1 @ weights["qkv.query"], heads), positions_BT, settings.rope_theta)
    k = rotate(_split(normed1 @ weights["qkv.key"], kv_heads), positions_BT, settings.rope_theta)
    v = _split(normed1 @ weights["qkv.value"], kv_heads)
    mixed, probs = causal_attention(q, k, v, starts_BT)
    attended = _merge(mixed) @ weights["out.weight"]
    middle = x_BTD + (attended if factors is None else attended * factors[0])
    normed2 = rms_norm(middle, weights["norm2.weight"], settings.norm_eps)
    gate, up = normed2 @ weights["gate_up.gate"], normed2 @ weights["gate_up.up"]
    hidden = swiglu(gate, up)
    fed = hidden @ weights["down.weight"]
    y = middle + (fed if factors is None else fed * factors[1])
    saved = BlockSaved(x_BTD, normed1, q, k, v, probs, mixed, middle, normed2, gate, up, hidden)
    return y, saved


def decoder_block_backward(
    params: Params,
    name: str,
    saved: BlockSaved,
    dy_BTD: np.ndarray,
    starts_BT: np.ndarray,
    settings: DecoderSettings,
    factors: DropoutFactors | None = None,
) -> tuple[np.ndarray, Params]:
    """Return the gradients of `decoder_block_forward` in its input and its parameters.

    Parameters
    ----------
    params, name, starts_BT, settings, factors
        As in forward. Not modified.
    saved : BlockSaved
        Second result of forward. Not modified.
    dy_BTD : ndarray of shape (B, T, D), float64
        Gradient in the output. Not modified.

    Returns
    -------
    dx_BTD : ndarray of shape (B, T, D)
    gradients : dict of str to ndarray
        Full names, summed over rows and positions: any share or scale belongs to the loss.

    Raises
    ------
    ConfigError
        A name is missing, or a shape or dtype does not fit.
    """
    weights = _block_weights(params, name)
    _require_float64("dy", dy_BTD, 3)
    require_shape("dy", dy_BTD, saved.x.shape)
    _require_factors(factors, saved.x.shape)
    positions_BT = _positions(starts_BT, saved.x.shape[:2])
    gradients = {}

    dfed = dy_BTD if factors is None else dy_BTD * factors[1]
    dhidden, gradients["down.weight"] = _matmul_backward(saved.hidden, weights["down.weight"], dfed)
    dgate, dup = swiglu_backward(dhidden, saved.gate, saved.up)
    dnormed_gate, gradients["gate_up.gate"] = _matmul_backward(
        saved.normed2, weights["gate_up.gate"], dgate
    )
    dnormed_up, gradients["gate_up.up"] = _matmul_backward(
        saved.normed2, weights["gate_up.up"], dup
    )
    dnorm, gradients["norm2.weight"] = rms_norm_backward(
        dnormed_gate + dnormed_up, saved.middle, weights["norm2.weight"], settings.norm_eps
    )
    dmiddle = dy_BTD + dnorm  # the residual connection passes dy on beside the feed-forward

    dattended = dmiddle if factors is None else dmiddle * factors[0]
    dmixed, gradients["out.weight"] = _matmul_backward(
        _merge(saved.mixed), weights["out.weight"], dattended
    )
    dq, dk, dv = causal_attention_backward(
        dmixed.reshape(saved.mixed.shape), saved.q, saved.k, saved.v, saved.probs, starts_BT
    )
    dq = rotate(dq, positions_BT, settings.rope_theta, backward=True)
    dk = rotate(dk, positions_BT, settings.rope_theta, backward=True)
    dnormed1 = np.zeros_like(saved.normed1)
    for part, dpart in (("query", dq), ("key", dk), ("value", dv)):
        dnormed, gradients[f"qkv.{part}"] = _matmul_backward(
            saved.normed1, weights[f"qkv.{part}"], _merge(dpart)
        )
        dnormed1 += dnormed
    dnorm, gradients["norm1.weight"] = rms_norm_backward(
        dnormed1, saved.x, weights["norm1.weight"], settings.norm_eps
    )
    return dmiddle + dnorm, {f"{name}.{part}": grad for part, grad in gradients.items()}


def _block_weights(params: Params, name: str) -> Params:
    """Return the parameters of one block by what follows the block's name."""
    wanted = decoder_param_shapes(1, 1, 1, 1, 1, 1, 1, tied=True)
    parts = [key.removeprefix("block0.") for key in wanted if key.startswith("block0.")]
    missing = [f"{name}.{part}" for part in parts if f"{name}.{part}" not in params]
    if missing:
        raise ConfigError(
            f"params must hold every tensor of {name}; got {missing} missing. Name them as "
            f"decoder_param_shapes does."
        )
    return {part: params[f"{name}.{part}"] for part in parts}


def _positions(starts_BT: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the position of every token within its own document."""
    _require_starts(starts_BT, shape)
    return np.arange(shape[1]) - starts_BT.astype(np.int64)


def _split(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Return (B, T, heads * K) as (B, T, heads, K)."""
    return x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads)


def _merge(x: np.ndarray) -> np.ndarray:
    """Return (B, T, heads, K) as (B, T, heads * K)."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def _matmul_backward(
    x: np.ndarray, weight: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of ``x @ weight``, the weight's summed over rows and positions."""
    return dy @ weight.T, np.einsum("bti,bto->io", x, dy)


# --- the whole decoder -----------------------------------------------------------------------


def embed_tokens(params: Params, tokens_BT: np.ndarray) -> np.ndarray:
    """Return the row of the token table for every token.

    Parameters
    ----------
    params : dict of str to ndarray, float64
        ``embed.tokens.weight`` of shape (V, D) is read. Not modified.
    tokens_BT : ndarray of shape (B, T), any integer dtype
        0 <= id < V. Not modified.

    Returns
    -------
    ndarray of shape (B, T, D), float64
        A new array.

    Raises
    ------
    ConfigError
        A token is out of range, or a shape or dtype does not fit.
    """
    table = params["embed.tokens.weight"]
    _require_tokens(tokens_BT, table.shape[0])
    return table[tokens_BT]


def embed_tokens_backward(dx_BTD: np.ndarray, tokens_BT: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the gradient in the token table: each token adds to its own row.

    Parameters
    ----------
    dx_BTD : ndarray of shape (B, T, D), float64
        Gradient in what `embed_tokens` returned. Not modified.
    tokens_BT : ndarray of shape (B, T), any integer dtype
        0 <= id < vocab_size. Not modified.
    vocab_size : int
        V, >= 1.

    Returns
    -------
    ndarray of shape (V, D), float64
        Rows of tokens that do not occur are 0. Added in the order of rows and positions.

    Raises
    ------
    ConfigError
        A token is out of range, or a shape or dtype does not fit.
    """
    _require_float64("dx", dx_BTD, 3)
    _require_tokens(tokens_BT, require_int("vocab_size", vocab_size, 1))
    require_shape("tokens", tokens_BT, dx_BTD.shape[:2])
    dtable = np.zeros((vocab_size, dx_BTD.shape[-1]))
    np.add.at(dtable, tokens_BT.reshape(-1), dx_BTD.reshape(-1, dx_BTD.shape[-1]))
    return dtable


def head_logits(params: Params, x_BTD: np.ndarray, settings: DecoderSettings) -> np.ndarray:
    """Norm the last block's output and compare it with every row of the output table.

    Parameters
    ----------
    params : dict of str to ndarray, float64
        ``head.norm.weight`` and ``head.output.weight``, or the token table if that is missing
        (tied), are read. Not modified.
    x_BTD : ndarray of shape (B, T, D), float64
        Not modified.
    settings : DecoderSettings

    Returns
    -------
    ndarray of shape (B, T, V), float64
        Unnormalised log probabilities of the next token.
    """
    normed = rms_norm(x_BTD, params["head.norm.weight"], settings.norm_eps)
    return normed @ params[_output_table(params)].T


def head_loss_and_gradients(
    params: Params,
    x_BTD: np.ndarray,
    targets_BT: np.ndarray,
    settings: DecoderSettings,
    seed_per_target: float = 1.0,
) -> tuple[float, np.ndarray, Params]:
    """Run norm, output table and loss, and go back to the last block's output.

    Parameters
    ----------
    params, x_BTD, settings
        As in `head_logits`. Not modified.
    targets_BT : ndarray of shape (B, T), any integer dtype
        0 <= id < V, or -1 where there is nothing to predict. Not modified.
    seed_per_target : float, default 1.0
        As in `decoder_loss_and_gradients`.

    Returns
    -------
    loss_sum : float
        Cross entropy in nats, summed over valid targets, without the seed.
    dx_BTD : ndarray of shape (B, T, D)
        Gradient of ``seed_per_target * loss_sum``.
    gradients : dict of str to ndarray
        Of the norm and of the output table. With a tied head the latter has the token table's
        name and is only the head's part of its gradient.

    Raises
    ------
    ConfigError
        A target is out of range, or a shape or dtype does not fit.
    """
    logits = head_logits(params, x_BTD, settings)
    vocab_size = logits.shape[-1]
    _require_ids("targets", targets_BT, x_BTD.shape[:2], IGNORED, vocab_size - 1)
    rows, ids = logits.reshape(-1, vocab_size), targets_BT.reshape(-1)
    valid = ids != IGNORED
    loss_sum, _ = softmax_cross_entropy_sum(rows, ids, valid)
    drows = softmax_cross_entropy_sum_backward(rows, ids, valid, seed_per_target)
    dlogits = drows.reshape(logits.shape)
    table = _output_table(params)
    normed = rms_norm(x_BTD, params["head.norm.weight"], settings.norm_eps)
    dnormed = dlogits @ params[table]
    dx, dgain = rms_norm_backward(dnormed, x_BTD, params["head.norm.weight"], settings.norm_eps)
    dtable = np.einsum("btv,btd->vd", dlogits, normed)
    return loss_sum, dx, {table: dtable, "head.norm.weight": dgain}


def decoder_logits(
    params: Params,
    tokens: np.ndarray,
    *,
    num_heads: int,
    num_kv_heads: int,
    rope_theta: float,
    norm_eps: float,
    starts: np.ndarray | None = None,
) -> np.ndarray:
    """Return the unnormalised log probabilities of the token that follows each position.

    Parameters
    ----------
    params, tokens, num_heads, num_kv_heads, rope_theta, norm_eps, starts
        As in `decoder_loss_and_gradients`, without dropout. Not modified.

    Returns
    -------
    ndarray of shape (B, T, V), float64

    Raises
    ------
    ConfigError
        Anything does not fit together.
    """
    settings = DecoderSettings(num_heads, num_kv_heads, rope_theta, norm_eps)
    num_blocks = count_decoder_blocks(params, settings)
    x = embed_tokens(params, tokens)
    starts_BT = fill_starts(starts, tokens.shape)
    for index in range(num_blocks):
        x, _ = decoder_block_forward(params, f"block{index}", x, starts_BT, settings)
    return head_logits(params, x, settings)


def decoder_loss_and_gradients(
    params: Params,
    tokens: np.ndarray,
    targets: np.ndarray,
    *,
    num_heads: int,
    num_kv_heads: int,
    rope_theta: float,
    norm_eps: float,
    starts: np.ndarray | None = None,
    seed_per_target: float = 1.0,
    factors: Sequence[DropoutFactors] | None = None,
) -> tuple[float, Params]:
    """Run forward, loss and backward of a decoder on one batch of token rows.

    Parameters
    ----------
    params : dict of str to ndarray, float64
        Named and shaped as `decoder_param_shapes` says, in any order. Not modified.
    tokens : ndarray of shape (B, T), any integer dtype
        0 <= id < V. Not modified.
    targets : ndarray of shape (B, T), any integer dtype
        The token to predict at each position, or -1 where there is none. Not modified.
    num_heads, num_kv_heads, rope_theta, norm_eps
        As in `DecoderSettings`.
    starts : ndarray of shape (B, T), any integer dtype, optional
        Position in the row of the first token of the document that each token belongs to,
        0 <= starts[t] <= t. Tokens see their own document only, and rotary positions count from
        its start. None: every row is one document. Not modified.
    seed_per_target : float, default 1.0
        The gradients are those of ``seed_per_target * loss_sum``, finite and >= 0. For a mean
        over the N valid targets of an update under loss scale S it is S/N, the same for every
        microbatch.
    factors : sequence of pairs of ndarray of shape (B, T, D), optional
        Dropout, one pair per block, as in `decoder_block_forward`. None: none.

    Returns
    -------
    loss_sum : float
        Cross entropy in nats, summed over valid targets, without the seed; 0.0 if there are none.
    gradients : dict of str to ndarray
        Names, shapes and order of `params`. A tied table has one gradient: what the
        head and the embedding contribute, added. New arrays.

    Raises
    ------
    ConfigError
        Anything does not fit together.

    Examples
    --------
    With all weights 0 every one of the V tokens is as likely as the next:

    >>> shapes = decoder_param_shapes(1, 2, 1, 1, 2, 3, 5, tied=True)
    >>> loss_sum, gradients = decoder_loss_and_gradients(
    ...     {name: np.zeros(shape) for name, shape in shapes.items()},
    ...     np.array([[0, 1, 2]]), np.array([[1, 2, -1]]),
    ...     num_heads=1, num_kv_heads=1, rope_theta=1e4, norm_eps=1e-5)
    >>> math.isclose(loss_sum, 2 * math.log(5)), len(gradients)
    (True, 11)
    """
    settings = DecoderSettings(num_heads, num_kv_heads, rope_theta, norm_eps)
    num_blocks = count_decoder_blocks(params, settings)
    if factors is not None and len(factors) != num_blocks:
        raise ConfigError(
            f"factors must hold one pair per block; got {len(factors)} for {num_blocks} blocks. "
            f"Pass None to run without dropout."
        )
    pairs = [None] * num_blocks if factors is None else factors
    x = embed_tokens(params, tokens)
    starts_BT = fill_starts(starts, tokens.shape)
    saved = []
    for index in range(num_blocks):
        x, block_saved = decoder_block_forward(
            params, f"block{index}", x, starts_BT, settings, pairs[index]
        )
        saved.append(block_saved)
    loss_sum, dx, gradients = head_loss_and_gradients(params, x, targets, settings, seed_per_target)
    for index in reversed(range(num_blocks)):
        dx, block_gradients = decoder_block_backward(
            params, f"block{index}", saved[index], dx, starts_BT, settings, pairs[index]
        )
        gradients |= block_gradients
    gradients = add_embedding_gradient(gradients, dx, tokens, params)
    return loss_sum, {name: gradients[name] for name in params}


def add_embedding_gradient(
    gradients: Params, dx_BTD: np.ndarray, tokens_BT: np.ndarray, params: Params
) -> Params:
    """Return `gradients` with the embedding's part added to that of the token table.

    Parameters
    ----------
    gradients : dict of str to ndarray
        Holds the head's part under the table's name if the head is tied. Not modified.
    dx_BTD : ndarray of shape (B, T, D), float64
        Gradient in the input of the first block. Not modified.
    tokens_BT : ndarray of shape (B, T), any integer dtype
    params : dict of str to ndarray, float64
        The table's size is read. Not modified.

    Returns
    -------
    dict of str to ndarray
        The arrays of `gradients`, and a new one for the token table.

    Raises
    ------
    ConfigError
        As in `embed_tokens_backward`.
    """
    name = "embed.tokens.weight"
    dtable = embed_tokens_backward(dx_BTD, tokens_BT, params[name].shape[0])
    head_part = gradients.get(name)
    return gradients | {name: dtable if head_part is None else head_part + dtable}


def fill_starts(starts: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    """Return `starts`, checked, or zeros for None: every row is one document from position 0.

    Parameters
    ----------
    starts : ndarray of shape (B, T), any integer dtype, or None
        As in `decoder_loss_and_gradients`. Not modified.
    shape : pair of int
        (B, T).

    Returns
    -------
    ndarray of shape (B, T), integers
        `starts` itself, or new zeros.

    Raises
    ------
    ConfigError
        A shape, dtype or start does not fit.
    """
    if starts is None:
        return np.zeros(shape, np.int64)
    _require_starts(starts, shape)
    return starts


def _output_table(params: Params) -> str:
    """Return the name of the table that the head compares with."""
    return "head.output.weight" if "head.output.weight" in params else "embed.tokens.weight"


# --- checks ----------------------------------------------------------------------------------


def _require_float64(name: str, array: np.ndarray, ndim: int | None = None) -> None:
    reason = "This decoder is what rounding errors are measured against"
    require_dtype(name, array, "float64", reason, ndim)


def _require_pair(**arrays: np.ndarray) -> None:
    """Raise unless both arrays are float64 and of one shape."""
    (_, first), (name, second) = arrays.items()
    for each, array in arrays.items():
        _require_float64(each, array)
    require_shape(name, second, first.shape)


def _require_factors(factors: DropoutFactors | None, shape: tuple[int, ...]) -> None:
    for site, factor in enumerate(factors or ()):
        _require_float64(f"factors[{site}]", factor, 3)
        require_shape(f"factors[{site}]", factor, shape)


def _require_ids(name: str, ids: np.ndarray, shape: tuple[int, ...], low: int, high: int) -> None:
    """Raise unless `ids` are integers of `shape` in low..high."""
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
        got = getattr(ids, "dtype", type(ids).__name__)
        raise ConfigError(
            f"{name} must be an ndarray of integers; got {got}. Convert it with numpy.asarray."
        )
    require_shape(name, ids, shape)
    wrong = ids[(ids < low) | (ids > high)]
    if wrong.size:
        raise ConfigError(
            f"{name} must be in {low}..{high}; got {int(wrong[0])}. "
            f"Check that they belong to this vocabulary or this row."
        )


def _require_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 2:
        got = f"shape {tokens.shape}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise ConfigError(
            f"tokens must be an ndarray of shape (rows, positions); got {got}. "
            f"Pass one row of token ids per document or window."
        )
    _require_ids("tokens", tokens, tokens.shape, 0, vocab_size - 1)


def _require_starts(starts: np.ndarray, shape: tuple[int, ...]) -> None:
    _require_ids("starts", starts, shape, 0, max(0, shape[1] - 1))
    late = np.argwhere(starts > np.arange(shape[1]))
    if late.size:
        b, t = (int(index) for index in late[0])
        raise ConfigError(
            f"starts must not lie behind their token; got {int(starts[b, t])} at position {t} of "
            f"row {b}. A document starts at or before each of its tokens."
        )
