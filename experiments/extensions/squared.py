"""Squared ReLU: a layer of your own, y = max(x, 0)^2 (So et al. 2021, "Primer").

It keeps its output alone, which the layer after it keeps anyway, and takes the root of it in the
backward: dx = 2 sqrt(y) dy. So it saves no byte of its own, where one that keeps x would double
what the hidden layers save. `spec` says what it makes, and the forecast of memory follows.
"""

import math
from dataclasses import dataclass

import numpy as np

from mpisim.layouts.specs import LayerSpec
from mpisim.nn.layers import NoParams
from mpisim.nn.models import register_activation

# NumPy makes an array of every Python number it is given; these are made once.
ZERO = {np.dtype(kind): np.array(0, kind) for kind in (np.float32, np.float64)}


@dataclass(frozen=True)
class SquaredReLU(NoParams):
    """For float32 and float64."""

    def forward(self, params, x, ctx):
        """Return ``(y, (y,))``."""
        y = np.maximum(x, ZERO[x.dtype])
        np.multiply(y, y, out=y)
        return y, (y,)

    def backward_input(self, params, saved, dy, ctx):
        """Return ``(dx, ())``."""
        (y,) = saved
        dx = np.sqrt(y)
        np.multiply(dx, dy, out=dx)
        np.add(dx, dx, out=dx)
        return dx, ()

    def spec(self, x_shape, dtype, name, conditions=None):
        """Return the costs: one array forward, one backward, and the output kept."""
        count = math.prod(x_shape)
        nbytes = count * np.dtype(dtype).itemsize
        return LayerSpec(
            forward_flops=2 * count, backward_flops=3 * count, output_shape=tuple(x_shape),
            input_bytes=nbytes, output_bytes=nbytes, saves_output=True,
            forward_peak_bytes=nbytes, input_peak_bytes=nbytes,
        )  # fmt: skip


register_activation("squared-relu", SquaredReLU)
