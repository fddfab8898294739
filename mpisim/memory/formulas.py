"""Closed forms of what this engine holds, from sizes alone: no arrays, no plan.

Published forms of others are in `published.py`.
"""

from __future__ import annotations

from mpisim.layouts.chunks import chunk_len

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def model_state_bytes(
    num_params: int,
    ranks: int,
    zero: int,
    *,
    compute: str,
    reduce: str,
    param: str,
    has_master: bool,
    optimizer_arrays: int,
) -> dict[str, int]:
    """Return the bytes of model state on the rank that holds most, by category.

    Parameters
    ----------
    num_params : int
        Parameters of the whole model, >= 0, in one flat shard layout.
    ranks : int
        Ranks that share the state, >= 1.
    zero : int
        0: every rank holds all; 1: masters and moments are sharded; 2: gradients too; 3: working
        weights too.
    compute, reduce, param : str
        Dtypes of the working weights, of the gradients, and of masters and moments.
    has_master : bool
        Whether a copy of the weights in `param` stands beside the working weights. Without one the
        working weights are in `param` themselves.
    optimizer_arrays : int
        Arrays of the optimizer as long as the parameters: 2 for Adam, 1 for momentum, 0 for SGD.

    Returns
    -------
    dict of str to int
        ``params``, ``master_params``, ``grads``, ``optimizer``: names of the ledger.

    Raises
    ------
    ValueError
        A size is out of range or a dtype is unknown.

    Notes
    -----
    The worst rank is the first one: `chunk_bounds` gives it the longest shard. Gathered blocks,
    communication buffers and activations are no model state and are left out.

    Examples
    --------
    >>> adam = dict(compute="bfloat16", param="float32", has_master=True, optimizer_arrays=2)
    >>> [sum(model_state_bytes(1000, 4, z, reduce="bfloat16", **adam).values()) for z in range(4)]
    [16000, 7000, 5500, 4000]
    >>> [sum(model_state_bytes(1000, 4, z, reduce="float32", **adam).values()) for z in range(4)]
    [18000, 9000, 6000, 4500]
    """
    for name, value, least in (
        ("num_params", num_params, 0),
        ("ranks", ranks, 1),
        ("optimizer_arrays", optimizer_arrays, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}. Give a whole number.")
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero must be 0, 1, 2 or 3; got {zero}. 0 shards nothing.")
    for name, value in (("compute", compute), ("reduce", reduce), ("param", param)):
        if value not in _ITEM_BYTES:
            raise ValueError(
                f"{name} must be one of {', '.join(_ITEM_BYTES)}; got {value!r}. Name a dtype."
            )
    shard = chunk_len(num_params, ranks, 0)

    def count(sharded_from: int) -> int:
        return shard if zero >= sharded_from else num_params

    return {
        "params": count(3) * _ITEM_BYTES[compute if has_master else param],
        "master_params": count(1) * _ITEM_BYTES[param] * has_master,
        "grads": count(2) * _ITEM_BYTES[reduce],
        "optimizer": count(1) * _ITEM_BYTES[param] * optimizer_arrays,
    }
