"""A block: layers in a row, the smallest unit of bucketing and of the plan's Forward and Backward.

Chains the layers' pure functions and names their parameters. Which block runs when, and on what
rank, is the plan's business; accumulating the gradients that come out is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpisim.layouts.specs import BlockSpec
from mpisim.nn.layers import Arrays, Layer, LayerContext, RngFor, Saved

BlockSaved = tuple[Saved, ...]


@dataclass(frozen=True)
class Block:
    """A named row of named layers.

    Parameters of a block are a dict keyed ``layer.local``, such as ``linear.weight``; prefixed
    with the block's name this is the full name that the rest of the package uses.
    """

    name: str
    """Unique in the model, such as ``block0``."""
    layers: tuple[tuple[str, Layer], ...]
    """(name, layer) pairs, first to last."""

    @property
    def param_names(self) -> tuple[str, ...]:
        """Names of the parameters within the block, in registration order."""
        return tuple(
            f"{layer_name}.{local}"
            for layer_name, layer in self.layers
            for local in layer.param_names
        )

    def init(self, rng_for: RngFor, dtype: np.dtype) -> Arrays:
        """Return fresh parameters of all layers.

        Parameters
        ----------
        rng_for : callable of str to numpy.random.Generator
            Called with the name within the block, such as ``linear.weight``.
        dtype : numpy.dtype
            float32 or float64.

        Returns
        -------
        dict of str to ndarray
            In registration order.
        """
        params = {}
        for layer_name, layer in self.layers:
            fresh = layer.init(lambda local, name=layer_name: rng_for(f"{name}.{local}"), dtype)
            params.update((f"{layer_name}.{local}", array) for local, array in fresh.items())
        return params

    def forward(
        self, params: Arrays, x: np.ndarray, ctx: LayerContext
    ) -> tuple[np.ndarray, BlockSaved]:
        """Run the layers first to last.

        Parameters
        ----------
        params : dict of str to ndarray
            The block's parameters. Not modified.
        x : ndarray
            Input of the first layer. Not modified; layers may keep it by reference, so its
            buffer must not be reused before backward.
        ctx : LayerContext
            Handed to every layer.

        Returns
        -------
        y : ndarray
            Output of the last layer; for a block that ends in a loss, the summed loss (float64,
            shape ()).
        saved : tuple of tuple of ndarray
            What each layer saved, first to last.
        """
        saved = []
        for layer_name, layer in self.layers:
            x, layer_saved = layer.forward(_layer_params(params, layer_name, layer), x, ctx)
            saved.append(layer_saved)
        return x, tuple(saved)

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
            Second result of forward. Not modified.
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
            Newly allocated gradients keyed as `params`, in registration order.
        """
        by_layer = []
        for index in reversed(range(len(self.layers))):
            layer_name, layer = self.layers[index]
            if between is not None and by_layer:
                between()
            dx, kept = layer.backward_input(
                _layer_params(params, layer_name, layer), saved[index], dy, ctx
            )
            if between is not None:
                between()
            by_layer.append(layer.backward_weight(saved[index], kept, ctx))
            dy = dx
        grads = {
            f"{layer_name}.{local}": grad
            for (layer_name, _), layer_grads in zip(self.layers, reversed(by_layer), strict=True)
            for local, grad in layer_grads.items()
        }
        return dy, grads

    def saved_arrays(self, saved: BlockSaved) -> list[np.ndarray]:
        """List the floating arrays of `saved`, each object once, in layer order.

        The sum of their `nbytes` is the block's activation memory, and equals what `spec` says:
        `boundary_bytes` over `saved_boundaries()` plus `extra_saved_bytes`. Token ids are data
        and are left out.
        """
        unique = {
            id(array): array
            for layer_saved in saved
            for array in layer_saved
            if array.dtype.kind == "f"
        }
        return list(unique.values())

    def spec(self, x_shape: tuple[int, ...], dtype: np.dtype) -> BlockSpec:
        """Return the block's costs for an input of shape `x_shape` and arrays of `dtype`."""
        specs = []
        for layer_name, layer in self.layers:
            specs.append(layer.spec(x_shape, dtype, f"{self.name}.{layer_name}"))
            x_shape = specs[-1].output_shape
        return BlockSpec(name=self.name, layers=tuple(specs))


def _layer_params(params: Arrays, layer_name: str, layer: Layer) -> Arrays:
    """Pick one layer's parameters, by local name."""
    return {local: params[f"{layer_name}.{local}"] for local in layer.param_names}
