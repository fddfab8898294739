"""Loss layers: the last layer of the last block, with the interface of every other layer.

Each returns the sum of the losses of its targets in float64; the engine divides by the number of
targets of the whole update, so micro-batches and ranks of unequal size weigh targets equally.

Shape suffixes: B batch rows, C classes, T targets or positions, N tokens (B * T), D model width,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpisim.errors import BatchError
from mpisim.layouts.specs import Conditions, LayerSpec, Tape
from mpisim.nn import kernel_memory
from mpisim.nn.arrays import as_rows, wide_dtype
from mpisim.nn.layers import Arrays, LayerContext, NoParams, Saved, TokenTable
from mpisim.nn.numerics import squared_norm, tile_slices

_INTP = np.dtype(np.intp).itemsize
_SCALAR = 8
"""NumPy makes an array for a moment when it turns a Python number into a scalar."""


@dataclass(frozen=True)
class SoftmaxCrossEntropy(NoParams):
    """Cross-entropy of a softmax over classes, in nats, summed over rows.

    Notes
    -----
    Forward: ``y = sum over b of log(sum over c of exp(x[b, c])) - x[b, target[b]]``, computed
    after subtracting each row's maximum, so that no exponential overflows.

    Saved: the softmax probabilities, shape (B, C), and the number of rows whose most probable class
    is the target, an integer scalar. The logits can be freed.

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
        x : ndarray of shape (B, C), floating
            Logits. Not modified.
        ctx : LayerContext
            `ctx.targets`: class ids of shape (B,), any integer dtype, in 0..C-1.

        Returns
        -------
        y : numpy.float64
            Sum of the losses of the rows, nats; 0 for zero rows. A scalar has no buffer to count.
        saved : (probabilities, hits), ndarray of shape (B, C) and x's dtype, and numpy.int64

        Raises
        ------
        ValueError
            The targets are missing, of another length, not integer, or out of range.
        """
        # One dtype on both sides of an operation: NumPy converts small arrays as a whole.
        targets_B = self._checked_targets(x, ctx).astype(np.intp)
        probs_BC = ctx.wide(x)
        largest_B1 = np.max(probs_BC, axis=1, keepdims=True)
        # A copy made by widening is changed in place.
        probs_BC = np.subtract(probs_BC, largest_B1, out=None if probs_BC is x else probs_BC)
        del largest_B1
        picked_B = probs_BC[np.arange(x.shape[0]), targets_B].astype(np.float64)
        np.exp(probs_BC, out=probs_BC)
        sums_B = np.add.reduce(probs_BC, axis=1)
        probs_BC /= sums_B[:, np.newaxis]
        losses_B = sums_B.astype(np.float64)
        np.log(losses_B, out=losses_B)
        losses_B -= picked_B
        loss = np.float64(np.add.reduce(losses_B))
        del picked_B, sums_B, losses_B
        # Counted before rounding: 16-bit probabilities tie where the logits do not.
        hits = np.int64(self.num_correct(probs_BC, targets_B))
        del targets_B
        return loss, (ctx.narrow(probs_BC, x.dtype), hits)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray | float, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, ())``: dx of shape (B, C) in the logits' dtype; `dy` is the scalar seed."""
        probs_BC, _ = saved
        dx_BC = ctx.wide(probs_BC)
        seed = np.array(float(dy), dtype=dx_BC.dtype)
        dx_BC = np.multiply(dx_BC, seed, out=None if dx_BC is probs_BC else dx_BC)
        places = np.arange(len(dx_BC)), ctx.targets.astype(np.intp)
        picked_B = dx_BC[places]
        picked_B -= seed
        dx_BC[places] = picked_B
        del places, picked_B, seed
        return ctx.narrow(dx_BC, probs_BC.dtype), ()

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

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
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
            forward_peak_bytes=self._forward_peak(x_shape[0], dtype, conditions),
            input_peak_bytes=self._input_peak(x_shape[0], dtype, conditions),
        )

    def _forward_peak(self, num_rows: int, dtype: np.dtype, conditions: Conditions) -> int:
        """Walk forward."""
        num_elements, wide = num_rows * self.num_classes, wide_dtype(dtype).itemsize
        ids, losses = num_rows * _INTP, num_rows * 8
        tape = Tape()
        tape.new(ids)  # targets
        copied = kernel_memory.widen(tape, num_elements, dtype, conditions)
        tape.new(num_rows * wide)  # largest
        if not copied:
            tape.new(num_elements * wide)
        tape.free(num_rows * wide)
        tape.new(ids, num_rows * wide)  # rows, picked
        tape.free(ids)
        tape.new(losses)  # picked as float64
        tape.free(num_rows * wide)
        tape.new(num_rows * wide, losses, 8 * (num_rows > 0))  # sums, losses, their sum
        tape.free(num_rows * wide, losses, losses, 8 * (num_rows > 0))
        tape.new(ids, num_rows)  # best, whether it is the target
        tape.free(ids, num_rows, ids)
        kernel_memory.narrow_result(tape, num_elements, dtype, conditions)
        return tape.peak

    def _input_peak(self, num_rows: int, dtype: np.dtype, conditions: Conditions) -> int:
        """Walk backward_input."""
        num_elements, wide = num_rows * self.num_classes, wide_dtype(dtype).itemsize
        tape = Tape()
        copied = kernel_memory.widen(tape, num_elements, dtype, conditions)
        tape.new(wide)  # seed
        if not copied:
            tape.new(num_elements * wide)
        places = num_rows * (2 * _INTP + wide)  # and picked
        tape.new(places)
        tape.free(places, wide)
        kernel_memory.narrow_result(tape, num_elements, dtype, conditions)
        return tape.peak

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
        x : ndarray of shape (B, T), floating
            Predictions. Not modified.
        ctx : LayerContext
            `ctx.targets`: floats of shape (B, T), x's dtype; float32 beside 16-bit predictions is
            fine, too.

        Returns
        -------
        y : numpy.float64
            Sum of the losses of the rows; 0 for zero rows.
        saved : (difference,), shape (B, T), x's dtype

        Raises
        ------
        ValueError
            The targets are missing or of another shape or dtype. (A target of shape (B,) beside
            predictions of shape (B, 1) would broadcast to (B, B) without an error.)
        """
        targets_BT = ctx.targets
        if (
            targets_BT is None
            or targets_BT.shape != x.shape
            or targets_BT.dtype not in (x.dtype, wide_dtype(x.dtype))
        ):
            got = "none" if targets_BT is None else f"{targets_BT.dtype} {targets_BT.shape}"
            raise ValueError(
                f"targets must be {x.dtype} of shape {x.shape}; got {got}. "
                f"Pass one row of targets per row of predictions in LayerContext."
            )
        difference_BT = ctx.wide(x)
        # A copy made by widening is changed in place.
        difference_BT = np.subtract(
            difference_BT, ctx.wide(targets_BT), out=None if difference_BT is x else difference_BT
        )
        loss = np.float64(squared_norm(difference_BT))
        return loss, (ctx.narrow(difference_BT, x.dtype),)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray | float, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return ``(dx, ())``: dx of shape (B, T) in x's dtype; `dy` is the scalar seed."""
        (difference_BT,) = saved
        dx_BT = ctx.wide(difference_BT)
        factor = np.array(2.0 * float(dy), dtype=dx_BT.dtype)
        dx_BT = np.multiply(dx_BT, factor, out=None if dx_BT is difference_BT else dx_BT)
        del factor
        return ctx.narrow(dx_BT, difference_BT.dtype), ()

    def spec(
        self,
        x_shape: tuple[int, ...],
        dtype: np.dtype,
        name: str,
        conditions: Conditions = Conditions(),
    ) -> LayerSpec:
        """Return the costs for predictions of shape `x_shape` (B, T).

        Targets count as the engine hands them in: float32 beside 16-bit predictions.
        """
        num_elements = x_shape[0] * x_shape[1]
        num_bytes = num_elements * np.dtype(dtype).itemsize
        wide = wide_dtype(dtype).itemsize
        forward, backward = Tape(), Tape()
        if not kernel_memory.widen(forward, num_elements, dtype, conditions):
            forward.new(num_elements * wide)
        # The sum of squares is NumPy's with both kernel sets.
        forward.call(kernel_memory.squared_norm_peak(num_elements, wide, Conditions()))
        kernel_memory.narrow_result(forward, num_elements, dtype, conditions)
        copied = kernel_memory.widen(backward, num_elements, dtype, conditions)
        backward.new(wide)  # factor
        if not copied:
            backward.new(num_elements * wide)
        backward.free(wide)
        kernel_memory.narrow_result(backward, num_elements, dtype, conditions)
        return LayerSpec(
            forward_flops=3 * num_elements,
            backward_flops=num_elements,
            output_shape=(),
            input_bytes=num_bytes,
            output_bytes=8,
            extra_saved_bytes=num_bytes,
            forward_peak_bytes=forward.peak,
            input_peak_bytes=backward.peak,
        )


@dataclass(frozen=True)
class LanguageHead(TokenTable):
    """Project every token to the vocabulary and take the cross-entropy of the valid targets.

    One layer, not two, because only so the logits of all tokens need not exist at one time.

    Notes
    -----
    Forward: ``logits[n] = x[n] @ weight.T``, ``y = sum over n with target[n] >= 0 of
    log(sum over v of exp(logits[n, v])) - logits[n, target[n]]``, in nats.

    Saved without chunks: x, shape (B, T, D); the softmax probabilities, shape (N, V); the number
    of valid targets that have the largest logit, an integer scalar.

    Saved with chunks: x and the number. At any time the logits of one chunk of tokens exist, and
    backward computes them again.

    Backward: ``dlogits = seed * (probabilities - one_hot(target))``, 0 where the target is -1;
    ``dx = dlogits @ weight``, ``dweight = dlogits.T @ x``. Without chunks backward_input keeps
    dlogits, (N, V); with chunks dweight, (V, D), added up chunk by chunk.

    The table may be the one of the embedding: a block can borrow parameters.
    """

    chunk_tokens: int = 0
    """Tokens of a chunk; 0 means all at once."""

    def forward(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> tuple[np.ndarray, Saved]:
        """Return the summed loss.

        Parameters
        ----------
        params : dict
            ``{"weight": (V, D)}``.
        x : ndarray of shape (B, T, D), floating
            Kept by reference in `saved`.
        ctx : LayerContext
            `ctx.targets`: ids of shape (B, T), any integer dtype, in 0..V-1, or -1 for none.

        Returns
        -------
        y : numpy.float64
            Sum of the losses of the valid targets, nats; 0 without any.
        saved : (x, probabilities, hits), or (x, hits) with chunks

        Raises
        ------
        BatchError
            The targets are missing, of another shape, not integer, or out of range.
        """
        targets_N = self._checked_targets(x, ctx)
        x_ND, weight_VD = as_rows(x), ctx.wide(params["weight"])
        loss, hits, probs_NV = 0.0, 0, None
        for chunk, probs_NV in self._each_logits(x_ND, weight_VD, ctx):
            chunk_loss, chunk_hits = ctx.kernels.cross_entropy(probs_NV, targets_N[chunk])
            loss += chunk_loss
            hits += chunk_hits
        del weight_VD
        total, counted = np.float64(loss), np.int64(hits)
        if self.chunk_tokens:
            return total, (x, counted)
        return total, (x, ctx.narrow(probs_NV, x.dtype), counted)

    def backward_input(
        self, params: Arrays, saved: Saved, dy: np.ndarray | float, ctx: LayerContext
    ) -> tuple[np.ndarray, Saved]:
        """Return dx, of shape (B, T, D) and x's dtype, and what backward_weight needs.

        `dy` is the scalar seed. The second result is ``(dlogits,)``, or ``(dweight,)`` with chunks.
        """
        x = saved[0]
        seed = float(dy)
        targets_N = ctx.targets.reshape(-1)
        weight_VD = ctx.wide(params["weight"])
        if not self.chunk_tokens:
            probs_NV = saved[1]
            dlogits_NV = ctx.wide(probs_NV) if probs_NV.dtype.itemsize == 2 else probs_NV.copy()
            ctx.kernels.cross_entropy_backward(dlogits_NV, targets_N, seed)
            kept_NV = ctx.narrow(dlogits_NV, x.dtype)
            del dlogits_NV
            dx_ND = ctx.wide(kept_NV) @ weight_VD
            del weight_VD
            return ctx.narrow(dx_ND, x.dtype).reshape(x.shape), (kept_NV,)
        x_ND = as_rows(x)
        dx_ND = np.empty(x_ND.shape, dtype=x.dtype)
        dweight_VD = np.zeros(weight_VD.shape, dtype=weight_VD.dtype)
        addend_VD = np.empty_like(weight_VD)
        for chunk, dlogits_NV in self._each_logits(x_ND, weight_VD, ctx):
            ctx.kernels.cross_entropy(dlogits_NV, targets_N[chunk])
            ctx.kernels.cross_entropy_backward(dlogits_NV, targets_N[chunk], seed)
            if dx_ND.dtype == weight_VD.dtype:
                np.matmul(dlogits_NV, weight_VD, out=dx_ND[chunk])
            else:
                dx_ND[chunk] = ctx.narrow(dlogits_NV @ weight_VD, x.dtype)
            np.matmul(dlogits_NV.T, ctx.wide(x_ND[chunk]), out=addend_VD)
            dweight_VD += addend_VD
        return dx_ND.reshape(x.shape), (dweight_VD,)

    def backward_weight(self, saved: Saved, kept: Saved, ctx: LayerContext) -> Arrays:
        """Return ``{"weight": (V, D)}``."""
        if self.chunk_tokens:
            return {"weight": kept[0]}
        return {"weight": ctx.wide(kept[0]).T @ as_rows(ctx.wide(saved[0]))}

    def _each_logits(
        self, x_ND: np.ndarray, weight_VD: np.ndarray, ctx: LayerContext
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield each chunk of tokens and its wide logits; the array is reused by the next one."""
        num_tokens = len(x_ND)
        chunk_tokens = min(self.chunk_tokens or num_tokens, num_tokens)
        buffer = np.empty((chunk_tokens, self.vocab_size), dtype=weight_VD.dtype)
        for chunk in tile_slices(num_tokens, chunk_tokens) if num_tokens else [slice(0, 0)]:
            logits_NV = buffer[: chunk.stop - chunk.start]
            np.matmul(ctx.wide(x_ND[chunk]), weight_VD.T, out=logits_NV)
            yield chunk, logits_NV

    def num_correct(self, saved: Saved) -> int:
        """Return how many valid targets had the largest logit, from what forward saved."""
        return int(saved[-1])

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
        num_logits = num_tokens * self.vocab_size
        matmul_flops = 2 * num_logits * self.d_model
        logits_flops = matmul_flops + 5 * num_logits
        chunked = self.chunk_tokens > 0
        weight_bytes = self.vocab_size * self.d_model * wide_dtype(dtype).itemsize
        input_peak = self._chunked_input_peak if chunked else self._input_peak
        return LayerSpec(
            params=(self.table_spec(name),),
            forward_flops=logits_flops,
            backward_flops=2 * matmul_flops + 2 * num_logits + chunked * logits_flops,
            weight_flops=0 if chunked else matmul_flops,
            output_shape=(),
            input_bytes=num_tokens * self.d_model * itemsize,
            output_bytes=8,
            saves_input=True,
            extra_saved_bytes=0 if chunked else num_logits * itemsize,
            kept_bytes=weight_bytes if chunked else num_logits * itemsize,
            forward_peak_bytes=self._forward_peak(num_tokens, dtype, conditions),
            input_peak_bytes=input_peak(num_tokens, dtype, conditions),
            weight_peak_bytes=0 if chunked else self._weight_peak(num_tokens, dtype, conditions),
            grad_bytes=0 if chunked else weight_bytes,
        )

    def _num_weights(self) -> int:
        return self.vocab_size * self.d_model

    def _chunk_of(self, num_tokens: int) -> int:
        """Return the tokens of the largest chunk."""
        return min(self.chunk_tokens or num_tokens, num_tokens)

    def _forward_peak(self, num_tokens: int, dtype: np.dtype, conditions: Conditions) -> int:
        """Walk forward; the first chunk is the largest."""
        wide, chunk = wide_dtype(dtype).itemsize, self._chunk_of(num_tokens)
        tape = Tape()
        weight = kernel_memory.widen(tape, self._num_weights(), dtype, conditions)
        tape.new(chunk * self.vocab_size * wide)
        tape.free(kernel_memory.widen(tape, chunk * self.d_model, dtype, conditions))
        tape.call(kernel_memory.cross_entropy_peak(chunk, self.vocab_size, wide, conditions))
        tape.free(weight)
        tape.call(_SCALAR)
        if not self.chunk_tokens:
            kernel_memory.narrow_result(tape, chunk * self.vocab_size, dtype, conditions)
        return tape.peak

    def _input_peak(self, num_tokens: int, dtype: np.dtype, conditions: Conditions) -> int:
        """Walk backward_input without chunks."""
        wide, num_logits = wide_dtype(dtype).itemsize, num_tokens * self.vocab_size
        tape = Tape()
        weight = kernel_memory.widen(tape, self._num_weights(), dtype, conditions)
        if not kernel_memory.widen(tape, num_logits, dtype, conditions):
            tape.new(num_logits * wide)
        tape.call(
            kernel_memory.cross_entropy_backward_peak(num_tokens, self.vocab_size, wide, conditions)
        )
        kernel_memory.narrow_result(tape, num_logits, dtype, conditions)
        kept = kernel_memory.widen(tape, num_logits, dtype, conditions)
        tape.new(num_tokens * self.d_model * wide)
        tape.free(kept, weight)
        kernel_memory.narrow_result(tape, num_tokens * self.d_model, dtype, conditions)
        return tape.peak

    def _chunked_input_peak(self, num_tokens: int, dtype: np.dtype, conditions: Conditions) -> int:
        """Walk backward_input with chunks; the first chunk is the largest."""
        wide, chunk = wide_dtype(dtype).itemsize, self._chunk_of(num_tokens)
        num_in = chunk * self.d_model
        tape = Tape()
        kernel_memory.widen(tape, self._num_weights(), dtype, conditions)
        tape.new(num_tokens * self.d_model * np.dtype(dtype).itemsize)  # dx
        tape.new(2 * self._num_weights() * wide)  # dweight, addend
        tape.new(chunk * self.vocab_size * wide)
        tape.free(kernel_memory.widen(tape, num_in, dtype, conditions))
        tape.call(kernel_memory.cross_entropy_peak(chunk, self.vocab_size, wide, conditions))
        tape.call(
            kernel_memory.cross_entropy_backward_peak(chunk, self.vocab_size, wide, conditions)
        )
        if np.dtype(dtype).itemsize == 2:
            tape.new(num_in * wide)
            tape.free(kernel_memory.narrow(tape, num_in, dtype, conditions), num_in * wide)
        kernel_memory.widen(tape, num_in, dtype, conditions)
        return tape.peak

    def _weight_peak(self, num_tokens: int, dtype: np.dtype, conditions: Conditions) -> int:
        """Walk backward_weight without chunks."""
        tape = Tape()
        kernel_memory.widen(tape, num_tokens * self.vocab_size, dtype, conditions)
        kernel_memory.widen(tape, num_tokens * self.d_model, dtype, conditions)
        tape.new(self._num_weights() * wide_dtype(dtype).itemsize)
        return tape.peak

    def _checked_targets(self, x: np.ndarray, ctx: LayerContext) -> np.ndarray:
        targets = ctx.targets
        if targets is None or targets.shape != x.shape[:-1] or targets.dtype.kind not in "iu":
            got = "none" if targets is None else f"{targets.dtype} {targets.shape}"
            raise BatchError(
                f"targets must be integers of shape {x.shape[:-1]}; got {got}. Pass one id per "
                f"token in LayerContext, -1 for none."
            )
        if targets.size and not (int(targets.min()) >= -1 and int(targets.max()) < self.vocab_size):
            raise BatchError(
                f"targets must be in 0..{self.vocab_size - 1}, or -1 for none; got "
                f"{int(targets.min())}..{int(targets.max())}. Check the tokenizer."
            )
        return targets.reshape(-1)
