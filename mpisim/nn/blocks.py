"""A block: layers in a row, the smallest unit of bucketing and of the plan's Forward and Backward.

Chains the layers' pure functions, adds residual connections and names the parameters. Which block
runs when, and on what rank, is the plan's business; accumulating the gradients that come out is
the engine's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from mpisim.layouts.specs import BlockSpec, Conditions, Keep, Tape
from mpisim.nn import kernel_memory
from mpisim.nn.layers import Arrays, InteriorLayer, Layer, LayerContext, RngFor, Saved
from mpisim.nn.numerics import TILE_ELEMENTS, tile_slices
from mpisim.nn.precision import is_floating

BlockSaved = tuple[Saved, ...]
BlockKept = tuple[Saved, ...]


@dataclass(frozen=True)
class Block:
    """A named row of named layers.

    Parameters of a block are a dict keyed ``layer.local``, such as ``linear.weight``; prefixed
    with the block's name this is the full name that the rest of the package uses. A parameter that
    another block owns has that block's name in `full_names`.

    Boundaries are numbered: 0 is the block's input, i the output of layer i - 1 with what `skips`
    adds to it.
    """

    name: str
    """Unique in the model, such as ``block0``."""
    layers: tuple[tuple[str, Layer], ...]
    """(name, layer) pairs, first to last."""
    skips: tuple[tuple[int, int], ...] = ()
    """Residual connections: (source, end) adds the tensor at boundary source to that at end."""
    borrows: tuple[tuple[str, str], ...] = ()
    """(name within the block, full name) of each parameter that another block owns."""

    def __post_init__(self) -> None:
        assert all(0 <= source < end <= len(self.layers) for source, end in self.skips), self.skips
        assert {local for local, _ in self.borrows} <= set(self._all_names()), self.borrows

    def _all_names(self) -> Iterator[str]:
        for layer_name, layer in self.layers:
            for local in layer.param_names:
                yield f"{layer_name}.{local}"

    @property
    def param_names(self) -> tuple[str, ...]:
        """Names within the block of the parameters that it owns, in registration order."""
        borrowed = dict(self.borrows)
        return tuple(name for name in self._all_names() if name not in borrowed)

    @property
    def full_names(self) -> dict[str, str]:
        """Name within the block -> full name, of all parameters that the block reads.

        Keys of `params` and of the gradients; two blocks whose full names meet share the parameter,
        and its gradient is the sum of theirs.
        """
        borrowed = dict(self.borrows)
        return {name: borrowed.get(name, f"{self.name}.{name}") for name in self._all_names()}

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return fresh parameters of all layers, without borrowed ones.

        Parameters
        ----------
        rng_for : callable of str to numpy.random.Generator
            Called with the name within the block, such as ``linear.weight``.
        dtype : numpy.dtype
            Any floating dtype.

        Returns
        -------
        dict of str to ndarray
            In registration order.
        """
        params = {}
        owned = set(self.param_names)
        for layer_name, layer in self.layers:
            names = {f"{layer_name}.{local}" for local in layer.param_names}
            # A layer's parameters are borrowed together or not at all.
            assert names <= owned or not names & owned, names
            if not names <= owned:
                continue
            fresh = layer.init(lambda local, name=layer_name: rng_for(f"{name}.{local}"), dtype)
            params.update((f"{layer_name}.{local}", array) for local, array in fresh.items())
        return params

    def forward(
        self,
        params: Arrays,
        x: np.ndarray,
        ctx: LayerContext,
        keep: Keep = "all",
        between: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray, BlockSaved]:
        """Run the layers first to last.

        Parameters
        ----------
        params : dict of str to ndarray
            The block's parameters, borrowed ones too, keyed as `full_names`. Not modified.
        x : ndarray
            Input of the first layer. Not modified; layers may keep it by reference, so its
            buffer must not be reused before backward.
        ctx : LayerContext
            Handed to every layer.
        keep : {"all", "selective", "nothing"}
            With "selective", layers drop the interior of what they save as soon as they have run;
            `restore` computes it again. With "nothing", for evaluation, what they save is dropped
            as soon as they have run, but for the count that `Model.num_correct` reads.
        between : callable without arguments, optional
            Called between the layers: a replay may run beside communication.

        Returns
        -------
        y : ndarray
            Output of the last layer; for a block that ends in a loss, the summed loss, a
            numpy.float64.
        saved : tuple of tuple of ndarray
            What each layer saved, first to last.
        """
        saved = []
        last_end = {source: end for source, end in sorted(self.skips)}
        held: dict[int, np.ndarray] = {}
        for index, (layer_name, layer) in enumerate(self.layers):
            if between is not None and index:
                between()
            if index in last_end:
                held[index] = x
            y, layer_saved = layer.forward(_layer_params(params, layer_name, layer), x, ctx)
            if keep == "selective" and isinstance(layer, InteriorLayer):
                layer_saved = layer.trim(layer_saved)
            elif keep == "nothing":
                layer_saved = tuple(
                    each for each in layer_saved if not isinstance(each, np.ndarray)
                )
            saved.append(layer_saved)
            # An output is fresh, and the layer that made it has not saved it (see spec), unless
            # the layer passed its input on.
            fresh = y is not x
            for source in self._sources_of(index + 1):
                y = _add(y, held[source], ctx, in_place=fresh)
                fresh = True
                if last_end[source] == index + 1:
                    del held[source]
            x = y
        return x, tuple(saved)

    def restore(self, saved: BlockSaved, ctx: LayerContext) -> BlockSaved:
        """Compute again what forward dropped with `keep` "selective".

        Parameters
        ----------
        saved : tuple of tuple of ndarray
            Second result of forward. Not modified.
        ctx : LayerContext
            The context of the forward call.

        Returns
        -------
        tuple of tuple of ndarray
            What forward would have saved with `keep` "all"; arrays that were not dropped are the
            same objects.

        Raises
        ------
        RecomputeMismatch
            A value that was kept as a check differs in some bit.
        """
        return tuple(
            layer.restore(layer_saved, ctx) if isinstance(layer, InteriorLayer) else layer_saved
            for (_, layer), layer_saved in zip(self.layers, saved, strict=True)
        )

    def _sources_of(self, end: int) -> list[int]:
        """Return which boundaries are added to boundary `end`."""
        return [source for source, skip_end in self.skips if skip_end == end]

    def backward(
        self,
        params: Arrays,
        saved: BlockSaved,
        dy: np.ndarray | float,
        ctx: LayerContext,
        between: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray | None, Arrays]:
        """Run the layers' backwards last to first.

        Parameters
        ----------
        params : dict of str to ndarray
            The parameters that forward saw. Not modified.
        saved : tuple of tuple of ndarray
            Second result of forward, or of restore. Not modified.
        dy : ndarray or float
            Gradient of the output; for a block that ends in a loss, the scalar seed. Not modified.
        ctx : LayerContext
            The context of the forward call.
        between : callable without arguments, optional
            Called between the input half and the weight half of each layer and between layers:
            the place where the caller advances its communication.

        Returns
        -------
        dx : ndarray or None
            Gradient of the block's input; None if the input has none.
        grads : dict of str to ndarray
            Newly allocated gradients keyed as `params`, borrowed ones too, in registration order.
        """
        by_layer: list[Arrays] = []

        def finish(index: int, kept: Saved) -> None:
            if between is not None:
                between()
            by_layer.append(self.layers[index][1].backward_weight(saved[index], kept, ctx))

        dx = self._walk_back(params, saved, dy, ctx, between, finish)
        return dx, self._named(by_layer)

    def backward_input(
        self,
        params: Arrays,
        saved: BlockSaved,
        dy: np.ndarray | float,
        ctx: LayerContext,
        between: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray | None, BlockKept]:
        """Run the input halves of the layers' backwards, last to first.

        Parameters
        ----------
        params, saved, dy, ctx
            As for `backward`.
        between : callable without arguments, optional
            Called between layers.

        Returns
        -------
        dx : ndarray or None
            As from `backward`, bit for bit.
        kept : tuple of tuple of ndarray
            What each layer keeps for its weight half, first to last. It may hold `dy`, `dx` and
            gradients between layers by reference: nobody may change those until the weight half
            has run.

        Notes
        -----
        All of `saved` is needed until `backward_weight` has run.
        """
        by_layer: list[Saved] = []
        dx = self._walk_back(params, saved, dy, ctx, between, lambda _, kept: by_layer.append(kept))
        return dx, tuple(reversed(by_layer))

    def backward_weight(
        self,
        saved: BlockSaved,
        kept: BlockKept,
        ctx: LayerContext,
        between: Callable[[], None] | None = None,
    ) -> Arrays:
        """Run the weight halves of the layers' backwards, last to first.

        Parameters
        ----------
        saved : tuple of tuple of ndarray
            What backward_input got. Not modified.
        kept : tuple of tuple of ndarray
            Second result of backward_input. Not modified.
        ctx : LayerContext
            The context of the forward call.
        between : callable without arguments, optional
            Called between layers.

        Returns
        -------
        dict of str to ndarray
            The gradients that `backward` returns, bit for bit. Those that the input half computed
            on its way are the arrays in `kept`, the others newly allocated.
        """
        by_layer: list[Arrays] = []
        for index in reversed(range(len(self.layers))):
            if between is not None and by_layer:
                between()
            by_layer.append(self.layers[index][1].backward_weight(saved[index], kept[index], ctx))
        return self._named(by_layer)

    def _walk_back(
        self,
        params: Arrays,
        saved: BlockSaved,
        dy: np.ndarray | float,
        ctx: LayerContext,
        between: Callable[[], None] | None,
        take: Callable[[int, Saved], None],
    ) -> np.ndarray | None:
        """Return dx; `take` gets each layer's index and what its input half kept, last to first."""
        branches: dict[int, list[np.ndarray]] = defaultdict(list)
        for index in reversed(range(len(self.layers))):
            layer_name, layer = self.layers[index]
            for source in self._sources_of(index + 1):
                branches[source].append(dy)
            if between is not None and index < len(self.layers) - 1:
                between()
            dx, kept = layer.backward_input(
                _layer_params(params, layer_name, layer), saved[index], dy, ctx
            )
            take(index, kept)
            # No name outlives its use: what it names would stay in memory during the next layer.
            del kept
            # Only an array that this layer made may be changed: any other may be in `kept`.
            fresh = dx is not dy
            added = branches.pop(index, [])
            while added:
                dx = _add(dx, added.pop(0), ctx, in_place=fresh)
                fresh = True
            dy = dx
            del dx
        return dy

    def _named(self, by_layer: list[Arrays]) -> Arrays:
        """Return the gradients of all layers, given last to first, in registration order."""
        return {
            f"{layer_name}.{local}": grad
            for (layer_name, _), layer_grads in zip(self.layers, reversed(by_layer), strict=True)
            for local, grad in layer_grads.items()
        }

    def saved_arrays(self, saved: BlockSaved) -> list[np.ndarray]:
        """List the floating arrays of `saved`, each object once, in layer order.

        The sum of their `nbytes` is the block's activation memory, and equals what `spec` says:
        `boundary_bytes` over `saved_boundaries()` plus `extra_saved_bytes_for(keep)`. Integers
        (token ids, counts) are data and are left out.
        """
        return _floating_once(saved)

    def kept_arrays(self, kept: BlockKept) -> list[np.ndarray]:
        """List the floating arrays of `kept`, each object once, in layer order.

        The sum of their `nbytes` is what `spec` says: `boundary_bytes` over
        `kept_grad_boundaries()` plus `kept_extra_bytes`.
        """
        return _floating_once(kept)

    def spec(
        self, x_shape: tuple[int, ...], dtype: np.dtype, conditions: Conditions = Conditions()
    ) -> BlockSpec:
        """Return the block's costs for an input of shape `x_shape` and arrays of `dtype`.

        Additions of residual connections are counted with the layer whose output they change.
        """
        specs = []
        owned = {f"{self.name}.{name}" for name in self.param_names}
        for index, (layer_name, layer) in enumerate(self.layers):
            spec = layer.spec(x_shape, dtype, f"{self.name}.{layer_name}", conditions)
            x_shape = spec.output_shape
            added = len(self._sources_of(index + 1)) * math.prod(x_shape)
            specs.append(
                replace(
                    spec,
                    params=tuple(param for param in spec.params if param.name in owned),
                    forward_flops=spec.forward_flops + added,
                    backward_flops=spec.backward_flops + added,
                )
            )
        for source, end in self.skips:
            # What is added costs no memory of its own: a layer keeps it anyway. What is added to
            # may be changed in place: the layer that made it does not keep it.
            assert specs[source].saves_input or (source and specs[source - 1].saves_output)
            assert not specs[end - 1].saves_output
        return BlockSpec(
            name=self.name,
            layers=tuple(specs),
            borrows=tuple(full_name for _, full_name in self.borrows),
            skips=self.skips,
            add_bytes=tuple(
                _add_bytes(math.prod(specs[end - 1].output_shape), dtype, conditions)
                for _, end in self.skips
            ),
        )


def _add(y: np.ndarray, addend: np.ndarray, ctx: LayerContext, *, in_place: bool) -> np.ndarray:
    """Return the sum in y's dtype; in y itself if that may be, and 16-bit sums rounded once."""
    total = y if in_place else np.empty(y.shape, dtype=y.dtype)
    if y.dtype.itemsize != 2:
        return np.add(y, addend, out=total)
    # Boundary tensors are contiguous: layers return them so.
    flat_total, flat_y, flat_addend = total.reshape(-1), y.reshape(-1), addend.reshape(-1)
    for tile in tile_slices(flat_y.size):
        wide = ctx.wide(flat_y[tile])
        wide += ctx.wide(flat_addend[tile])
        flat_total[tile] = ctx.narrow(wide, y.dtype)
    return total


def _add_bytes(size: int, dtype: np.dtype, conditions: Conditions) -> int:
    """Return the most bytes alive at one time in `_add` beside its result."""
    tape, tile = Tape(), min(size, TILE_ELEMENTS)
    kernel_memory.widen(tape, tile, dtype, conditions)
    tape.free(kernel_memory.widen(tape, tile, dtype, conditions))
    kernel_memory.narrow(tape, tile, dtype, conditions)
    return tape.peak


def _floating_once(arrays: tuple) -> list[np.ndarray]:
    """List the floating arrays of nested tuples, each object once."""
    unique = {id(array): array for array in _flatten(arrays) if is_floating(array.dtype)}
    return list(unique.values())


def _flatten(saved: tuple) -> Iterator[np.ndarray]:
    """Yield the arrays of nested tuples, in order."""
    for item in saved:
        if isinstance(item, tuple):
            yield from _flatten(item)
        else:
            yield item


def _layer_params(params: Arrays, layer_name: str, layer: Layer) -> Arrays:
    """Pick one layer's parameters, by local name."""
    return {local: params[f"{layer_name}.{local}"] for local in layer.param_names}
