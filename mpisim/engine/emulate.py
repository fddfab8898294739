"""Blocks that compute nothing: arrays of the sizes of the real ones, and sleep in place of work.

A run with them has the messages and the memory of a real one, and the compute times of a rank of
any given speed. Losses, activations and gradients are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from mpisim.layouts.specs import BlockSpec, Conditions, Keep
from mpisim.nn.arrays import wide_dtype
from mpisim.nn.blocks import Block
from mpisim.nn.layers import Arrays, LayerContext
from mpisim.nn.precision import is_floating

Some = tuple[np.ndarray, ...]

_NO_LOSS = np.float64(0)
"""Made once: NumPy turns a number into a scalar through an array."""


class _Call(NamedTuple):
    """What a forward call was made with, as far as the calls after it want to know."""

    spec: BlockSpec
    x_shape: tuple[int, ...]
    dtype: np.dtype
    """Of activations."""
    is_data: bool
    """The input is ids, which have no gradient."""


class EmulatedSaved(NamedTuple):
    """What an emulated forward saves, by what it stands for."""

    boundaries: Some
    """Tensors between layers; the block's input and output by reference."""
    own: Some
    """What layers save beside, without their interiors."""
    interior: Some
    check: Some
    """What is kept in place of the interior."""
    tail: tuple[_Call, int]
    """The call, and 0 right answers: where a loss layer saves their number."""


class EmulatedKept(NamedTuple):
    """What an emulated backward_input keeps for backward_weight."""

    boundaries: Some
    """Gradients of boundaries; those of the block's input and output by reference."""
    ready: Arrays
    """Gradients of parameters that the input half computes on its way."""
    own: Some
    """What layers keep beside."""


class EmulatedBlock:
    """Takes the place of a `nn.blocks.Block` in the engine.

    Parameters
    ----------
    block : Block
        What is emulated.
    flops_per_s : float
        Floating-point operations per second, > 0.
    sleep : callable of float
        Called with the seconds that the work would take: once for all layers, or once for each half
        of each layer where the caller wants to act `between` them.

    Notes
    -----
    The methods are those of `Block`. Each allocates at its fullest moment what the real one does,
    to the byte, and leaves as much, shared with its arguments in the same way; working arrays are
    one array that comes and goes. What no message and no optimizer reads is never written to, so it
    takes address space and no memory. All that is returned is zeros, the same bits on every call: a
    replay gives what the first forward gave.

    A block whose first layer passes its input on (dropout without masks) is taken for one that
    makes an array of its own; no block that trains has one.
    """

    def __init__(self, block: Block, *, flops_per_s: float, sleep: Callable[[float], None]) -> None:
        self.block = block
        self.name = block.name
        self.param_names = block.param_names
        self.full_names = block.full_names
        self._flops_per_s, self._sleep = flops_per_s, sleep
        self._calls: dict[tuple, _Call] = {}
        self._grad_likes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        """Shape and dtype of each parameter's gradient; backward_weight gets no parameters."""

    def forward(
        self,
        params: Arrays,
        x: np.ndarray,
        ctx: LayerContext,
        keep: Keep = "all",
        between: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray, EmulatedSaved]:
        """Return zeros, and what takes the place of what layers save."""
        call = self._call(params, x, ctx)
        spec, num_layers = call.spec, len(call.spec.layers)
        self._work((layer.forward_flops for layer in spec.layers), between)
        y = np.zeros(spec.output_shape, call.dtype) if spec.output_shape else _NO_LOSS
        tail = call, 0
        if keep == "nothing":
            saved = EmulatedSaved((), (), (), (), tail)
        else:
            saved = EmulatedSaved(
                _tensors(spec, spec.saved_boundaries(), {0: x, num_layers: y}),
                _blank(spec.extra_saved_bytes - spec.interior_bytes),
                _blank(spec.interior_bytes if keep == "all" else 0),
                _blank(spec.check_bytes if keep == "selective" else 0),
                tail,
            )
        made = _bytes_beside((x,), (*self.saved_arrays(saved), y))
        _need(spec.forward_peak(keep) - made)
        return y, saved

    def restore(self, saved: EmulatedSaved, ctx: LayerContext) -> EmulatedSaved:
        """Return `saved` with an interior in place of the check."""
        spec = saved.tail[0].spec
        self._work([spec.interior_flops])
        interior = _blank(spec.interior_bytes)
        _need(spec.restore_peak() - spec.interior_bytes)
        return saved._replace(interior=interior, check=())

    def backward(
        self,
        params: Arrays,
        saved: EmulatedSaved,
        dy: np.ndarray | float,
        ctx: LayerContext,
        between: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray | None, Arrays]:
        """Return zeros in place of the input's gradient and those of the parameters."""
        call = saved.tail[0]
        spec = call.spec
        halves = (
            flops
            for layer in reversed(spec.layers)
            for flops in (layer.input_flops, layer.weight_flops)
        )
        self._work(halves, between)
        dx, grads = _input_grad(call), self._zero_grads(self.full_names)
        _need(spec.backward_peak() - _bytes_beside((dy,), (dx, *grads.values())))
        return dx, grads

    def backward_input(
        self,
        params: Arrays,
        saved: EmulatedSaved,
        dy: np.ndarray | float,
        ctx: LayerContext,
        between: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray | None, EmulatedKept]:
        """Return zeros in place of the input's gradient, and what the weight half needs."""
        call = saved.tail[0]
        spec = call.spec
        self._work((layer.input_flops for layer in reversed(spec.layers)), between)
        dx = _input_grad(call)
        ready = self._zero_grads(
            f"{layer_name}.{local}"
            for (layer_name, layer), costs in zip(self.block.layers, spec.layers, strict=True)
            if costs.handed_on_bytes
            for local in layer.param_names
        )
        ready_bytes = sum(grad.nbytes for grad in ready.values())
        kept = EmulatedKept(
            _tensors(spec, spec.kept_grad_boundaries(), {0: dx, len(spec.layers): dy}),
            ready,
            _blank(spec.kept_extra_bytes - ready_bytes),
        )
        _need(spec.input_peak() - _bytes_beside((dy,), (dx, *self.kept_arrays(kept))))
        return dx, kept

    def backward_weight(
        self,
        saved: EmulatedSaved,
        kept: EmulatedKept,
        ctx: LayerContext,
        between: Callable[[], None] | None = None,
    ) -> Arrays:
        """Return zeros in place of the gradients of the parameters."""
        spec = saved.tail[0].spec
        self._work((layer.weight_flops for layer in reversed(spec.layers)), between)
        made = self._zero_grads(name for name in self.full_names if name not in kept.ready)
        _need(spec.weight_peak() - spec.new_grad_bytes)
        grads = made | kept.ready
        return {name: grads[name] for name in self.full_names}

    def saved_arrays(self, saved: EmulatedSaved) -> list[np.ndarray]:
        """List the arrays of `saved`, each object once."""
        return _once((*saved.boundaries, *saved.own, *saved.interior, *saved.check))

    def kept_arrays(self, kept: EmulatedKept) -> list[np.ndarray]:
        """List the arrays of `kept`, each object once."""
        return _once((*kept.boundaries, *kept.ready.values(), *kept.own))

    def _call(self, params: Arrays, x: np.ndarray, ctx: LayerContext) -> _Call:
        """Return the costs of a call, worked out once per shape; note the gradients' shapes."""
        if not self._grad_likes:
            self._grad_likes = {
                name: (array.shape, wide_dtype(array.dtype)) for name, array in params.items()
            }
        dtype = x.dtype if is_floating(x.dtype) else next(iter(params.values())).dtype
        conditions = Conditions(
            kernels=ctx.kernels.name,
            starts=ctx.starts is not None,
            dropout=ctx.dropout is not None,
        )
        key = x.shape, x.dtype, conditions
        if key not in self._calls:
            spec = self.block.spec(x.shape, dtype, conditions)
            self._calls[key] = _Call(spec, x.shape, dtype, not is_floating(x.dtype))
        return self._calls[key]

    def _work(self, parts: Iterable[int], between: Callable[[], None] | None = None) -> None:
        """Sleep for parts of so many operations each, and act between them."""
        if between is None:
            parts = [sum(parts)]
        for number, flops in enumerate(parts):
            if number:
                between()
            if flops:
                self._sleep(flops / self._flops_per_s)

    def _zero_grads(self, names: Iterable[str]) -> Arrays:
        return {name: np.zeros(*self._grad_likes[name]) for name in names}


def _input_grad(call: _Call) -> np.ndarray | None:
    """Return the gradient of a block's input: new zeros, or None if it has none."""
    first = call.spec.layers[0]
    # A layer without rows makes nothing, whether or not its input has a gradient.
    has_grad = first.passes_through or first.input_grad_bytes or not first.input_bytes
    if call.is_data or not has_grad:
        return None
    return np.zeros(call.x_shape, call.dtype)


def _tensors(spec: BlockSpec, boundaries: Iterable[int], shared: dict) -> Some:
    """Return an array for each boundary: one of `shared`, or a new one of its size."""
    arrays: list[np.ndarray] = []
    for boundary in boundaries:
        if boundary in shared:
            arrays.append(shared[boundary])
        else:
            arrays += _blank(spec.boundary_bytes(boundary))
    return tuple(arrays)


def _blank(nbytes: int) -> Some:
    """Return one array of so many bytes, which nobody reads; none for 0 bytes."""
    return (np.empty(nbytes, np.uint8),) if nbytes else ()


def _need(nbytes: int) -> None:
    """Take so many bytes and give them back."""
    _blank(nbytes)


def _once(arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
    return list({id(array): array for array in arrays}.values())


def _bytes_beside(given: tuple, arrays: tuple) -> int:
    """Return the bytes of `arrays` that are arrays and not among those `given`."""
    known = {id(array) for array in given}
    return sum(
        array.nbytes
        for array in _once(array for array in arrays if isinstance(array, np.ndarray))
        if id(array) not in known
    )
