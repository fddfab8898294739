"""The element-wise and row-wise work of layers, losses and optimizers, as one set of functions.

Two sets offer the same functions: `kernels_numpy`, the reference, and `kernels_numba`, fused
loops of the extra `fast`. Layers receive a set through LayerContext and never import one. Matrix
products are not here: they stay with NumPy's BLAS.

Shape suffixes: N rows (batch * time), D width, B batch, T time, S keys (= T), H query heads,
G key/value heads, K head size, C = (H + 2 G) K, F hidden, V vocabulary, P = max_len.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Literal, Protocol, cast

import numpy as np

from mpisim.errors import ConfigError

_logger = logging.getLogger(__name__)


class Kernels(Protocol):
    """What both sets offer.

    Notes
    -----
    Arrays are float32 or float64, one dtype per call, and C-contiguous; 16-bit values are widened
    before and narrowed after (`widen`, `narrow`). Results are newly allocated and have the
    inputs' dtype, unless an argument is changed in place, as said below. Zero rows are legal.

    What a call allocates depends on shapes and dtypes alone: `kernel_memory` says how much.

    Non-finite values are never hidden: a row with nan or inf gives the nan or inf of its formula,
    without a warning; the engine looks for them once per update.

    A set gives the same bits on every call, and a row's bits do not depend on how many rows share
    the call, so micro-batches and replayed forwards keep them. (Sums over rows, such as the
    gradients of weights, follow the order of rows within the call.) The two sets agree to
    rounding: 1e-5 relative in float32, 1e-13 in float64; `embedding_backward`, `adamw_update`,
    `apply_dropout`, `widen` and `narrow` agree bit for bit.
    """

    name: str
    """"numpy" or "numba"."""

    def prepare(self, *dtypes: np.dtype) -> None:
        """Get all functions ready for arrays of these dtypes, so that no step waits for it.

        Parameters
        ----------
        *dtypes : dtype
            float32 and float64: everything; float16 and bfloat16: their casts.

        Notes
        -----
        Optional, and nothing to do for NumPy. Numba compiles here, 3 to 6 s of one core for
        float32 the first time and 0.3 s from the disk afterwards. Processes of one host take
        turns, so that one of them compiles and the others read what it stored.
        """
        ...

    def forget(self) -> None:
        """Delete compiled functions that are kept on disk."""
        ...

    def rms_norm(
        self, x_ND: np.ndarray, weight_D: np.ndarray, eps: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(y, rstd)``: y = x * rstd * weight, rstd_N = 1 / sqrt(mean(x^2) + eps)."""
        ...

    def rms_norm_backward(
        self, dy_ND: np.ndarray, x_ND: np.ndarray, weight_D: np.ndarray, rstd_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(dx_ND, dweight_D)``.

        With ``u = x * rstd`` and ``g = dy * weight``: ``dx = rstd * (g - u * mean(g * u))`` and
        ``dweight = sum over rows of dy * u``.
        """
        ...

    def rotary_split(
        self,
        qkv_NC: np.ndarray,
        cos_PK2: np.ndarray,
        sin_PK2: np.ndarray,
        positions_N: np.ndarray | None,
        batch: int,
        heads: int,
        kv_heads: int,
        scale: float,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut projections into heads, turn queries and keys, scale queries.

        Parameters
        ----------
        qkv_NC : ndarray of shape (batch * T, (heads + 2 * kv_heads) * K)
            Rows are ``[query heads | key heads | value heads]``; K is even.
        cos_PK2, sin_PK2 : ndarray of shape (max_len, K / 2), same dtype
            Row p holds the angles of position p.
        positions_N : ndarray of shape (batch * T,), integer, or None
            Position of each row in its document, 0..max_len-1; None means its column, 0..T-1.
            int32 is taken as it is, other dtypes may be copied.
        batch, heads, kv_heads : int
            Sizes that the shape of qkv does not tell.
        scale : float
            Factor of the queries, 1 / sqrt(K).

        Returns
        -------
        q_BHTK, k_BGTK, v_BGTK : ndarray
            Element i of a head is paired with element i + K/2:
            ``k1' = k1 cos - k2 sin``, ``k2' = k2 cos + k1 sin``; q likewise, times `scale`.
        """
        ...

    def rotary_merge(
        self,
        dq_BHTK: np.ndarray,
        dk_BGTK: np.ndarray,
        dv_BGTK: np.ndarray,
        cos_PK2: np.ndarray,
        sin_PK2: np.ndarray,
        positions_N: np.ndarray | None,
        scale: float,
    ) -> np.ndarray:
        """Return dqkv_NC: the transpose of `rotary_split` applied to the three gradients."""
        ...

    def causal_softmax(self, scores_BHTS: np.ndarray, starts_BT: np.ndarray | None) -> None:
        """Turn scores into weights in place: row i is a softmax over keys starts[i]..i.

        Everything else becomes exactly 0, whatever it held. None means starts of 0.
        ``0 <= starts[b, i] <= i``.
        """
        ...

    def causal_softmax_backward(
        self, probs_BHTS: np.ndarray, dprobs_BHTS: np.ndarray, starts_BT: np.ndarray | None
    ) -> None:
        """Turn `dprobs` into dscores in place: ``probs * (dprobs - sum(probs * dprobs))``.

        The sum is over the keys of the row; outside them the result is 0, whatever dprobs held.
        """
        ...

    def swiglu(self, gate_up_N2F: np.ndarray) -> np.ndarray:
        """Return z_NF = gate * sigmoid(gate) * up, where rows are ``[gate | up]``."""
        ...

    def swiglu_backward(self, dz_NF: np.ndarray, gate_up_N2F: np.ndarray) -> np.ndarray:
        """Return dgate_up_N2F.

        With ``s = sigmoid(gate)``: ``dgate = dz * up * s * (1 + gate * (1 - s))`` and
        ``dup = dz * gate * s``.
        """
        ...

    def gelu(self, x: np.ndarray) -> np.ndarray:
        """Return ``x * (1 + tanh(u)) / 2``, ``u = sqrt(2/pi) * (x + 0.044715 x^3)``; any shape."""
        ...

    def gelu_backward(self, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return ``dy * (h + x * h * (2 - 2 h) * u'(x))`` with ``h = (1 + tanh(u)) / 2``."""
        ...

    def cross_entropy(self, logits_NV: np.ndarray, targets_N: np.ndarray) -> tuple[float, int]:
        """Turn logits into probabilities in place.

        Parameters
        ----------
        logits_NV : ndarray
            Changed in place, ignored rows too.
        targets_N : ndarray, integer
            Class ids in 0..V-1, or -1 (`mpisim.data.batch.IGNORED`): no target, nothing is added.

        Returns
        -------
        loss_sum : float
            Sum over valid rows of ``log(sum(exp(logits))) - logits[target]``, nats, added up in
            float64.
        num_correct : int
            Valid rows whose largest logit is the target's; of equal logits the first counts.
        """
        ...

    def cross_entropy_backward(
        self, probs_NV: np.ndarray, targets_N: np.ndarray, seed: float
    ) -> None:
        """Turn probabilities into dlogits in place: ``seed * (probs - one_hot(target))``.

        Ignored rows become 0, whatever they held.
        """
        ...

    def apply_dropout(
        self,
        x: np.ndarray,
        words: np.ndarray,
        threshold: int,
        factor: float,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return x * factor where word < threshold, else exactly 0.

        Parameters
        ----------
        x : ndarray
            Any shape.
        words : ndarray of uint64, x.size elements
            Any shape.
        threshold : int
            In 0..2^64-1.
        factor : float
            1 / (1 - p).
        out : ndarray, same shape and dtype, C-contiguous, optional
            Receives the result; may be `x`.
        """
        ...

    def embedding_backward(
        self, ids_N: np.ndarray, dy_ND: np.ndarray, vocab_size: int
    ) -> np.ndarray:
        """Return dweight_VD: row v is the sum, in the order of N, of the dy with id v."""
        ...

    def adamw_update(
        self,
        param: np.ndarray,
        grad: np.ndarray,
        m: np.ndarray,
        v: np.ndarray,
        *,
        rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        shrink: float,
        grad_scale: float = 1.0,
        scratch: np.ndarray | None = None,
    ) -> None:
        """Take one AdamW step on flat arrays in place.

        Parameters
        ----------
        param, m, v : ndarray of shape (n,)
            Updated in place.
        grad : ndarray of shape (n,)
            Not modified.
        rate : float
            ``lr * sqrt(1 - beta2^step) / (1 - beta1^step)``.
        beta1, beta2 : float
            Decay of the moments.
        eps : float
            ``eps * sqrt(1 - beta2^step)``.
        shrink : float
            ``1 - lr * weight_decay``.
        grad_scale : float
            Multiplies the gradient first (clipping, unscaling).
        scratch : ndarray of shape (s,), s >= 1, optional
            Working space of the NumPy set, used up to one tile; without it one tile is allocated.
            With it the NumPy set allocates one element at a time, the Numba set 4 bytes for
            float32 and nothing for float64.

        Notes
        -----
        ``g = grad_scale * grad``, ``m = beta1 m + (1 - beta1) g``,
        ``v = beta2 v + (1 - beta2) g^2``, ``param = shrink * param - rate * m / (sqrt(v) + eps)``,
        each operation rounded once, so a range of a flat buffer gives the bits of the whole.
        """
        ...

    def squared_norm(self, grad: np.ndarray, scratch: np.ndarray | None = None) -> float:
        """Return the sum of squares of all elements, accumulated in float64.

        `scratch`: see `numerics.squared_norm`; the Numba set needs none.
        """
        ...

    def widen(self, x16: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return the float32 array with the values of a float16 or bfloat16 array.

        `out`, C-contiguous and of x16's shape, receives the result if it is given.
        """
        ...

    def narrow(self, x32: np.ndarray, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
        """Return a float32 array rounded to a 16-bit `dtype`.

        To nearest, ties to even; too large becomes inf, nan stays nan; subnormals are exact.
        `out`, C-contiguous, of that dtype and x32's shape, receives the result if it is given.
        """
        ...


def resolve_kernels(name: Literal["auto", "numpy", "numba"]) -> Literal["numpy", "numba"]:
    """Return which set `load_kernels` picks, without loading it."""
    if name == "auto":
        return "numba" if importlib.util.find_spec("numba") is not None else "numpy"
    return name


def prepare_kernels(name: Literal["auto", "numpy", "numba"], *dtypes: np.dtype) -> Kernels:
    """Return a kernel set with all its functions compiled for these dtypes.

    Parameters
    ----------
    name : {"auto", "numpy", "numba"}
        As for `load_kernels`.
    *dtypes : numpy.dtype
        What the run computes with and stores.

    Returns
    -------
    Kernels

    Raises
    ------
    ConfigError
        Numba is asked for and cannot be used.

    Notes
    -----
    Compiled functions are kept on disk. Files that cannot be read back are deleted and made anew;
    if that fails, too, "auto" falls back to NumPy with a warning.
    """
    kernels = load_kernels(name)
    try:
        kernels.prepare(*dtypes)
    except Exception:
        # Whatever Numba raises on a damaged file: its reader names no error of its own.
        try:
            kernels.forget()
            kernels.prepare(*dtypes)
        except Exception as error:
            if name == "numba":
                raise _no_numba(error) from error
            _logger.warning("mpisim: Numba cannot be used, NumPy computes instead: %s", error)
            return load_kernels("numpy")
    return kernels


def _no_numba(error: Exception) -> ConfigError:
    reason = str(error).strip().rstrip(".") or type(error).__name__
    return ConfigError(
        f"compute.kernels = 'numba' must find a Numba that works; got: {reason}. Install the extra "
        f"'fast' (pip install 'mpisim[fast]') or set compute.kernels = 'numpy'."
    )


def load_kernels(name: Literal["auto", "numpy", "numba"] = "auto") -> Kernels:
    """Return a kernel set; Numba is imported only if it is picked.

    Parameters
    ----------
    name : {"auto", "numpy", "numba"}
        `compute.kernels`; "auto" picks Numba if it is installed.

    Returns
    -------
    Kernels

    Raises
    ------
    ConfigError
        The name is unknown, or Numba is asked for and cannot be imported.

    Notes
    -----
    Numba compiles a function at its first call with a dtype and keeps the result on disk, beside
    the module or in NUMBA_CACHE_DIR or the user's cache folder, whichever can be written. With
    none of them, every process compiles anew.
    """
    if name not in ("auto", "numpy", "numba"):
        raise ConfigError(
            f"compute.kernels must be auto, numpy or numba; got {name!r}. Choose one of them."
        )
    if name == "numba" or (name == "auto" and importlib.util.find_spec("numba") is not None):
        try:
            return cast(Kernels, importlib.import_module("mpisim.nn.kernels_numba"))
        except ImportError as error:
            if name == "numba":
                raise _no_numba(error) from error
            _logger.warning("mpisim: Numba cannot be used, NumPy computes instead: %s", error)
    return cast(Kernels, importlib.import_module("mpisim.nn.kernels_numpy"))
