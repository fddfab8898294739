"""Loss layers: the last layer of the last block, with the interface of every other layer.

Each returns the sum of the losses of its rows in float64; the engine divides by the row count of
the whole update, so micro-batches and ranks of unequal size weigh their rows equally.

Shape suffixes: B batch rows, C classes, T targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpisim.layouts.specs import LayerSpec
from mpisim.nn.layers import Arrays, LayerContext, NoParams, Saved
from mpisim.nn.numerics import squared_norm


@dataclass(frozen=True)
class SoftmaxCrossEntropy(NoParams):
    """Cross-entropy of a softmax over classes, in nats, summed over rows.

    Notes
    -----
    Forward: ``y = sum over b of log(sum over c of exp(x[b, c])) - x[b, target[b]]``, computed
    after subtracting each row's maximum, so that no exponential overflows.

    Saved: the softmax probabilities, shape (B, C). The logits can be freed.

    Backward: ``dx = seed * (probabilities - one_hot(target))``.
    """

    num_classes: int
    """Number of classes, C."""

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return the summed loss.

        Parameters
        ----------
        params : dict
            Empty.
        x : ndarray of shape (B, C), float32 or float64
            Logits. Not modified.
        ctx : LayerContext
            `ctx.targets`: class ids of shape (B,), any integer dtype, in 0..C-1.

        Returns
        -------
        y : ndarray of shape (), float64
            Sum of the losses of the rows, nats; 0 for zero rows.
        saved : (probabilities,), shape (B, C), x's dtype

        Raises
        ------
        ValueError
            The targets are missing, of another length, not integer, or out of range.
        """
        targets_B = self._checked_targets(x, ctx)
        probs_BC = x - np.max(x, axis=1, keepdims=True)
        picked_B = probs_BC[np.arange(x.shape[0]), targets_B]
        np.exp(probs_BC, out=probs_BC)
        sums_B = np.add.reduce(probs_BC, axis=1)
        probs_BC /= sums_B[:, np.newaxis]
        losses_B = np.log(sums_B.astype(np.float64))
        losses_B -= picked_B
        return np.asarray(np.add.reduce(losses_B)), (probs_BC,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray | float, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, ())``: dx of shape (B, C) in the logits' dtype; `dy` is the scalar seed."""
        (probs_BC,) = saved
        seed = float(dy)
        dx_BC = probs_BC * seed
        dx_BC[np.arange(dx_BC.shape[0]), ctx.targets] -= seed
        return dx_BC, ()

    def num_correct(self, scores: np.ndarray, targets: np.ndarray) -> int:
        """Count the rows whose largest score is at the target (top-1).

        Parameters
        ----------
        scores : ndarray of shape (B, C)
            Logits, or the probabilities that forward saved. A tie goes to the lower class.
        targets : ndarray of shape (B,), integer
            Class ids.

        Returns
        -------
        int
            Number of rows, 0..B.
        """
        return int(np.count_nonzero(np.argmax(scores, axis=1) == targets))

    def spec(self, x_shape: tuple[int, ...], dtype: np.dtype, name: str) -> LayerSpec:
        """Return the costs for logits of shape `x_shape` (B, C)."""
        num_elements = x_shape[0] * self.num_classes
        num_bytes = num_elements * np.dtype(dtype).itemsize
        return LayerSpec(
            forward_flops=5 * num_elements,
            backward_flops=num_elements + x_shape[0],
            output_shape=(),
            input_bytes=num_bytes,
            output_bytes=8,
            extra_saved_bytes=num_bytes,
        )

    def _checked_targets(self, x: np.ndarray, ctx: LayerContext) -> np.ndarray:
        targets_B = ctx.targets
        if targets_B is None or targets_B.shape != x.shape[:1] or targets_B.dtype.kind not in "iu":
            got = "none" if targets_B is None else f"{targets_B.dtype} {targets_B.shape}"
            raise ValueError(
                f"targets must be integers of shape {x.shape[:1]}; got {got}. "
                f"Pass one class id per row in LayerContext."
            )
        if targets_B.size and not (
            0 <= int(targets_B.min()) and int(targets_B.max()) < self.num_classes
        ):
            raise ValueError(
                f"targets must be in 0..{self.num_classes - 1}; got "
                f"{int(targets_B.min())}..{int(targets_B.max())}. Check the data's class ids."
            )
        return targets_B


@dataclass(frozen=True)
class MeanSquaredError(NoParams):
    """Squared error, summed over the outputs of a row and over rows.

    The mean is taken by the engine, over the rows of the whole update; outputs are summed.

    Notes
    -----
    Forward: ``y = sum over b, t of (x[b, t] - target[b, t])^2``.

    Saved: the difference ``x - target``, shape (B, T).

    Backward: ``dx = 2 * seed * (x - target)``.
    """

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return the summed loss.

        Parameters
        ----------
        params : dict
            Empty.
        x : ndarray of shape (B, T), float32 or float64
            Predictions. Not modified.
        ctx : LayerContext
            `ctx.targets`: floats of shape (B, T), x's dtype.

        Returns
        -------
        y : ndarray of shape (), float64
            Sum of the losses of the rows; 0 for zero rows.
        saved : (difference,), shape (B, T), x's dtype

        Raises
        ------
        ValueError
            The targets are missing or of another shape or dtype. (A target of shape (B,) beside
            predictions of shape (B, 1) would broadcast to (B, B) without an error.)
        """
        targets_BT = ctx.targets
        if targets_BT is None or targets_BT.shape != x.shape or targets_BT.dtype != x.dtype:
            got = "none" if targets_BT is None else f"{targets_BT.dtype} {targets_BT.shape}"
            raise ValueError(
                f"targets must be {x.dtype} of shape {x.shape}; got {got}. "
                f"Pass one row of targets per row of predictions in LayerContext."
            )
        difference_BT = x - targets_BT
        return np.asarray(squared_norm(difference_BT), dtype=np.float64), (difference_BT,)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray | float, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, ())``: dx of shape (B, T) in x's dtype; `dy` is the scalar seed."""
        (difference_BT,) = saved
        return difference_BT * (2.0 * float(dy)), ()

    def spec(self, x_shape: tuple[int, ...], dtype: np.dtype, name: str) -> LayerSpec:
        """Return the costs for predictions of shape `x_shape` (B, T)."""
        num_elements = x_shape[0] * x_shape[1]
        num_bytes = num_elements * np.dtype(dtype).itemsize
        return LayerSpec(
            forward_flops=3 * num_elements,
            backward_flops=num_elements,
            output_shape=(),
            input_bytes=num_bytes,
            output_bytes=8,
            extra_saved_bytes=num_bytes,
        )
