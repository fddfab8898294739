"""Gradient accumulation: one update computed in pieces that fit in memory (A2).

The loss of an update is a mean over its N rows, so a microbatch of n rows contributes the share
n/N of it, not 1/M: with 2 and 4 rows of mean loss 1 and 3 the update's loss is 7/3, not 2.
Empty microbatches contribute nothing. Only one microbatch's activations are alive at a time.
Several workers do the same in `data_parallel`; update rules are in `optimizers`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from mpisim.errors import ConfigError
from mpisim.reference.checks import require_float_array, require_int
from mpisim.reference.chunks import chunk_bounds
from mpisim.reference.mlp import Params, mlp_loss_and_gradients

Microbatch = tuple[np.ndarray, np.ndarray]
"""Inputs and targets of some rows, the rows in dim 0 of both."""


def split_microbatches(x: np.ndarray, y: np.ndarray, num_microbatches: int) -> list[Microbatch]:
    """Cut a batch into consecutive pieces whose lengths differ by at most one row.

    Parameters
    ----------
    x : ndarray of shape (N, ...)
        Inputs, N >= 0.
    y : ndarray of shape (N, ...)
        Targets of the same rows.
    num_microbatches : int
        M, pieces to make, >= 1. May exceed N.

    Returns
    -------
    list of (x_i, y_i), length num_microbatches
        The first N % M pieces hold one row more than the rest; with N < M the last pieces are
        empty. Every row is in exactly one piece and order is kept. The pieces are views of `x`
        and `y`: nothing is copied, and writing to them writes to the batch.

    Raises
    ------
    ConfigError
        `x` and `y` differ in rows, or `num_microbatches` is below 1.

    Examples
    --------
    >>> pieces = split_microbatches(np.arange(5), np.arange(5), 3)
    >>> [x.tolist() for x, _ in pieces]
    [[0, 1], [2, 3], [4]]
    """
    num_microbatches = require_int("num_microbatches", num_microbatches, 1)
    bounds = chunk_bounds(count_rows(x, y), num_microbatches)
    return [(x[start:stop], y[start:stop]) for start, stop in itertools.pairwise(bounds)]


def count_rows(x: np.ndarray, y: np.ndarray) -> int:
    """Return the number of rows that `x` and `y` share.

    Parameters
    ----------
    x, y : ndarray with at least one dim
        Rows in dim 0.

    Returns
    -------
    int
        N >= 0.

    Raises
    ------
    ConfigError
        One has no dim, or they differ in rows.
    """
    if x.ndim == 0 or y.ndim == 0 or x.shape[0] != y.shape[0]:
        raise ConfigError(
            f"x and y must have the same number of rows; got shapes {x.shape} and {y.shape}. "
            f"Cut both at the same rows, with rows in dim 0."
        )
    return x.shape[0]


def count_update_rows(microbatches: Sequence[Microbatch]) -> list[int]:
    """Return the rows of each microbatch of an update.

    Parameters
    ----------
    microbatches : sequence of (x, y)
        Some may have no rows. Not modified.

    Returns
    -------
    list of int

    Raises
    ------
    ConfigError
        There is no row at all, or x and y of a microbatch do not fit together.
    """
    rows = [count_rows(x, y) for x, y in microbatches]
    if sum(rows) == 0:
        raise ConfigError(
            f"an update must have at least one row; got {len(rows)} microbatches with 0 rows. "
            f"Skip the update, or pass rows."
        )
    return rows


def accumulate_gradients(accumulated: Params, gradients: Params) -> Params:
    """Add gradients to a running sum, name by name.

    Parameters
    ----------
    accumulated : dict of str to ndarray
        The sum so far; ``{}`` at the start of every update. Not modified.
    gradients : dict of str to ndarray, float32 or float64
        What to add, already weighted by its share of the update. Not modified.

    Returns
    -------
    dict of str to ndarray
        The new sum: a name in both is added, a name in one of them is copied, so a parameter that
        only one microbatch touches keeps its gradient. All arrays are new; additions are made in
        the order of the calls, in the dtype of the arrays.

    Raises
    ------
    ConfigError
        One name has two shapes or dtypes.

    Examples
    --------
    >>> total = accumulate_gradients({}, {"w": np.array([1.0])})
    >>> accumulate_gradients(total, {"w": np.array([2.0])})["w"].tolist()
    [3.0]
    """
    total = {name: array.copy() for name, array in accumulated.items()}
    for name, gradient in gradients.items():
        require_float_array(f"gradients[{name!r}]", gradient)
        if name not in total:
            total[name] = gradient.copy()
            continue
        if (total[name].shape, total[name].dtype) != (gradient.shape, gradient.dtype):
            raise ConfigError(
                f"gradients[{name!r}] must have shape {total[name].shape} and dtype "
                f"{total[name].dtype} of the running sum; got {gradient.shape} and "
                f"{gradient.dtype}. Start every update from an empty sum."
            )
        total[name] = total[name] + gradient
    return total


def accumulated_loss_and_gradients(
    params: Params,
    microbatches: Sequence[Microbatch],
    activation: str = "relu",
    loss: str = "mean_squared_error",
) -> tuple[float, Params]:
    """Return the mean loss of all rows of an update and its gradients, one microbatch at a time.

    Parameters
    ----------
    params : dict of str to ndarray
        As `mlp.init_mlp` returns it; the same for every microbatch. Not modified.
    microbatches : sequence of (x_i, y_i)
        Any cut of the update's rows, n_i >= 0 rows each, N = sum of n_i >= 1. Not modified.
    activation, loss : str
        As in `mlp.mlp_loss_and_gradients`.

    Returns
    -------
    loss : float
        Mean over the N rows: the sum of n_i/N times each microbatch's mean. This is the value to
        log; dividing it by M again would be wrong.
    gradients : dict of str to ndarray
        Gradients of that loss: the backward pass of microbatch i starts from the seed n_i/N.

    Raises
    ------
    ConfigError
        There is no row at all, or anything does not fit together.

    Notes
    -----
    Equals `mlp.mlp_loss_and_gradients` of all rows at once up to rounding; not bit for bit, since
    sums over rows are taken in another order.
    """
    rows = count_update_rows(microbatches)
    total_rows = sum(rows)
    mean_loss = 0.0
    total: Params = {}
    for num_rows, (x, y) in zip(rows, microbatches, strict=True):
        if num_rows == 0:  # the mean of no rows is undefined, its share is zero
            continue
        share = num_rows / total_rows
        value, gradients = mlp_loss_and_gradients(params, x, y, activation, loss, seed=share)
        mean_loss += share * value
        total = accumulate_gradients(total, gradients)
    return mean_loss, total


def grad_accumulation_step(
    params: Params,
    microbatches: Sequence[Microbatch],
    update: Callable[[Params, Params], Params],
    activation: str = "relu",
    loss: str = "mean_squared_error",
) -> tuple[Params, float]:
    """Make one optimizer update from all microbatches.

    Parameters
    ----------
    params : dict of str to ndarray
        Not modified: every microbatch sees the same weights.
    microbatches : sequence of (x_i, y_i)
        As in `accumulated_loss_and_gradients`.
    update : callable, (params, gradients) -> params
        The update rule, such as ``lambda p, g: optimizers.sgd_step(p, g, lr=0.1)``. Called
        exactly once, after the last microbatch.
    activation, loss : str
        As in `mlp.mlp_loss_and_gradients`.

    Returns
    -------
    params : dict of str to ndarray
        What `update` returned.
    loss : float
        Mean loss of the update's rows under the old parameters.

    Raises
    ------
    ConfigError
        As in `accumulated_loss_and_gradients`; `update` has not been called then.
    """
    mean_loss, gradients = accumulated_loss_and_gradients(params, microbatches, activation, loss)
    return update(params, gradients), mean_loss
