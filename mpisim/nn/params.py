"""Initial weights, keyed by parameter name: the same on every rank and in every layout.

The formulas are in the layers; this module gives each parameter a random stream of its own.
"""

from __future__ import annotations

import hashlib

import numpy as np

from mpisim.nn.layers import Arrays
from mpisim.nn.models import Model


def rng_for_name(seed: int, name: str) -> np.random.Generator:
    """Return the random stream of one named thing.

    Parameters
    ----------
    seed : int
        The run's seed, >= 0.
    name : str
        Full parameter name, such as ``block0.linear.weight``.

    Returns
    -------
    numpy.random.Generator
        Philox keyed with the first 128 bits of the SHA-256 of seed and name, at its start. It
        depends on nothing else: not on the rank, the order of calls, or what other names exist.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def init_params(model: Model, seed: int, dtype: np.dtype | str) -> Arrays:
    """Draw all parameters of a model.

    Parameters
    ----------
    model : Model
        What to initialise.
    seed : int
        The run's seed, >= 0.
    dtype : numpy.dtype or str
        float32, float64, float16 or bfloat16. Numbers are drawn in float64 and rounded, so a
        float32 model starts at the rounded weights of the float64 one, and a 16-bit model at the
        rounded weights of the float32 one, its master.

    Returns
    -------
    dict of str to ndarray
        Keyed by full name, in registration order; each parameter once, by the block that owns it.
        The layers' docstrings give the distributions.
    """
    params = {}
    for block in model.blocks:
        fresh = block.init(
            lambda local, name=block.name: rng_for_name(seed, f"{name}.{local}"), np.dtype(dtype)
        )
        params.update((f"{block.name}.{local}", array) for local, array in fresh.items())
    return params
