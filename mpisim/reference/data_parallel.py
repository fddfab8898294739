"""Data parallelism in one process: shards, local gradients, all-reduce, buckets, one step (A5).

A "worker" is what the engine calls a rank; here all workers are entries of a list, and a message
is an assignment from one entry to another. The collectives move the same chunks and add in the
same order as the engine's, so results can be compared bit for bit. Real messages are in `comm`.

The ring with P workers. Worker r sends to r + 1 and receives from r - 1 (modulo P). Vectors are
cut into P chunks; the first (count mod P) of them are one element longer. For P = 4, sent chunks:

    step            0  1  2 | 0  1  2        reduce-scatter | all-gather
    worker 0        3  2  1 | 0  3  2        after the first half worker r holds
    worker 1        0  3  2 | 1  0  3        the finished sum of chunk r
    worker 2        1  0  3 | 2  1  0
    worker 3        2  1  0 | 3  2  1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpisim.errors import ConfigError
from mpisim.reference.accumulation import Microbatch, count_rows
from mpisim.reference.checks import require_choice, require_int, require_same_tensors
from mpisim.reference.chunks import chunk_bounds
from mpisim.reference.mlp import Params, mlp_layers, mlp_loss_and_gradients

SUM_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64")
"""Names of the dtypes that may be summed over workers. Narrow integers would wrap silently."""

HALF_DTYPES = ("float16", "bfloat16")
"""16-bit floats: stored and sent in 16 bits, added in float32."""


# --- data ------------------------------------------------------------------------------------


def shard_dataset_across_workers(num_samples: int, num_workers: int) -> list[np.ndarray]:
    """Give every sample to exactly one worker.

    Parameters
    ----------
    num_samples : int
        Samples in the data set, >= 0, numbered from 0.
    num_workers : int
        P, workers to share them, >= 1.

    Returns
    -------
    list of ndarray of shape (samples of that worker,), int64, length num_workers
        Sample numbers in rising order, consecutive, disjoint, together all of them. Sizes differ
        by at most one, the first workers taking the remainder; nothing is padded, repeated or
        dropped, so with fewer samples than workers the last ones get none. New arrays.

    Raises
    ------
    ConfigError
        A number is out of range.

    Notes
    -----
    Uneven shards need weighting by sample count wherever something is averaged over workers.

    Examples
    --------
    >>> [shard.tolist() for shard in shard_dataset_across_workers(5, 3)]
    [[0, 1], [2, 3], [4]]
    """
    num_samples = require_int("num_samples", num_samples, 0)
    num_workers = require_int("num_workers", num_workers, 1)
    bounds = chunk_bounds(num_samples, num_workers)
    return [
        np.arange(bounds[worker], bounds[worker + 1], dtype=np.int64)
        for worker in range(num_workers)
    ]


# --- collectives over a list of per-worker arrays ---------------------------------------------


def add_received(own: np.ndarray, received: np.ndarray) -> np.ndarray:
    """Return ``own + received`` as one hop of a reduction computes it.

    Parameters
    ----------
    own, received : ndarray of one shape and one of `SUM_DTYPES`
        Not modified.

    Returns
    -------
    ndarray of the same shape and dtype
        A new array. 16-bit floats are added in float32 and rounded once; a sum too large for
        them becomes inf. int64 wraps.
    """
    if own.dtype.name in HALF_DTYPES:
        with np.errstate(over="ignore"):  # inf is the defined result, and no other rank warns
            return (own.astype(np.float32) + received.astype(np.float32)).astype(own.dtype)
    return own + received


def reduce_scatter_chunks(worker: int, step: int, num_workers: int) -> tuple[int, int]:
    """Return which chunk a worker sends and which it receives at a step of the first half.

    Parameters
    ----------
    worker : int
        r, 0 <= r < num_workers.
    step : int
        k, 0 <= k < num_workers - 1.
    num_workers : int
        P.

    Returns
    -------
    send, receive : int
        Chunk ``r - k - 1`` goes to worker r + 1, chunk ``r - k - 2`` comes from worker r - 1
        (all modulo P). At the last step chunk r comes in, so worker r ends up owning it.
    """
    return (worker - step - 1) % num_workers, (worker - step - 2) % num_workers


def all_gather_chunks(worker: int, step: int, num_workers: int) -> tuple[int, int]:
    """Return which chunk a worker sends and which it receives at a step of the second half.

    Parameters
    ----------
    worker, step, num_workers : int
        As in `reduce_scatter_chunks`.

    Returns
    -------
    send, receive : int
        Chunk ``r - k`` goes to worker r + 1, chunk ``r - k - 1`` comes from worker r - 1 (all
        modulo P): first the own chunk, then always the one that has just arrived.
    """
    return (worker - step) % num_workers, (worker - step - 1) % num_workers


def ring_reduce_scatter(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sum vectors over the ring; worker r keeps chunk r of the sum.

    Parameters
    ----------
    arrays : sequence of P ndarrays of shape (count,), P >= 1
        Each worker's addend, all of one dtype of `SUM_DTYPES`; count >= 0. Not modified.

    Returns
    -------
    list of P ndarrays
        Entry r has shape (bounds[r + 1] - bounds[r],) with ``bounds = chunk_bounds(count, P)``.
        New arrays.

    Raises
    ------
    ConfigError
        There is no worker, shapes or dtypes differ, or a dtype cannot be summed.

    Notes
    -----
    P - 1 steps, one message per worker and step, empty chunks included. Chunk c is summed in the
    order c+1, c+2, ..., c (workers modulo P), each adding its own to what it received.
    """
    _require_worker_arrays(arrays, ndim=1)
    num_workers = len(arrays)
    bounds = chunk_bounds(arrays[0].size, num_workers)
    chunks = [
        [array[bounds[chunk] : bounds[chunk + 1]].copy() for chunk in range(num_workers)]
        for array in arrays
    ]
    for step in range(num_workers - 1):
        # All messages of a step are in flight before anyone adds: nobody sends what it receives.
        messages = []
        for worker in range(num_workers):
            send, _ = reduce_scatter_chunks(worker, step, num_workers)
            messages.append(chunks[worker][send])
        for worker in range(num_workers):
            _, receive = reduce_scatter_chunks(worker, step, num_workers)
            received = messages[(worker - 1) % num_workers]
            chunks[worker][receive] = add_received(chunks[worker][receive], received)
    return [chunks[worker][worker] for worker in range(num_workers)]


def ring_all_gather(shards: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Give every worker the shards of all workers, in worker order.

    Parameters
    ----------
    shards : sequence of P ndarrays of shape (any,), P >= 1
        Each worker's part, all of one dtype (any); lengths may differ and may be 0. Not modified.

    Returns
    -------
    list of P ndarrays of shape (sum of lengths,)
        Equal bit for bit on all workers. New arrays, none shared.

    Raises
    ------
    ConfigError
        There is no worker, a shard is not one-dimensional, or dtypes differ.

    Notes
    -----
    P - 1 steps, one message per worker and step, empty shards included. Nothing is added.
    """
    _require_worker_arrays(shards, ndim=1, same_shape=False, summed=False)
    num_workers = len(shards)
    chunks: list[list[np.ndarray | None]] = [[None] * num_workers for _ in shards]
    for worker, shard in enumerate(shards):
        chunks[worker][worker] = shard
    for step in range(num_workers - 1):
        messages = []
        for worker in range(num_workers):
            send, _ = all_gather_chunks(worker, step, num_workers)
            messages.append(chunks[worker][send])
        for worker in range(num_workers):
            _, receive = all_gather_chunks(worker, step, num_workers)
            chunks[worker][receive] = messages[(worker - 1) % num_workers]
    return [np.concatenate(row) for row in chunks]


def ring_all_reduce(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sum arrays over the ring; every worker gets the whole sum.

    Parameters
    ----------
    arrays : sequence of P ndarrays of one shape, P >= 1
        Each worker's addend, all of one dtype of `SUM_DTYPES`. Taken as flat vectors in row-major
        order. Not modified.

    Returns
    -------
    list of P ndarrays of the same shape and dtype
        Equal bit for bit on all workers, because each chunk is summed once and then copied. New
        arrays, none shared.

    Raises
    ------
    ConfigError
        There is no worker, shapes or dtypes differ, or a dtype cannot be summed.

    Notes
    -----
    A reduce-scatter and an all-gather: 2 (P - 1) steps, one message per worker and step. Bytes
    per worker: `ring_bytes`. Order of additions: `ring_reduce_scatter`; it depends on which chunk
    an element falls into, so two vectors reduced apart or joined may differ in the last bits.

    Examples
    --------
    >>> [total.tolist() for total in ring_all_reduce([np.array([1.0, 2.0]), np.array([3.0, 4.0])])]
    [[4.0, 6.0], [4.0, 6.0]]
    """
    _require_worker_arrays(arrays)
    shape = arrays[0].shape
    shards = ring_reduce_scatter([array.reshape(-1) for array in arrays])
    return [total.reshape(shape) for total in ring_all_gather(shards)]


def ring_bytes(
    count: int, num_workers: int, itemsize: int, collective: str = "all_reduce"
) -> list[int]:
    """Return the payload bytes that each worker sends in one ring collective.

    Parameters
    ----------
    count : int
        Elements of the full vector, >= 0.
    num_workers : int
        P >= 1.
    itemsize : int
        Bytes per element, >= 1.
    collective : {"all_reduce", "reduce_scatter", "all_gather"}
        What is run; an all-gather is one of chunks cut by `chunk_bounds`.

    Returns
    -------
    list of int, length num_workers
        Bytes sent by each worker. Worker r receives what worker r - 1 sends. When P does not
        divide `count` the workers differ: which one depends on who owns a longer chunk. The sum
        over workers is ``2 (P - 1) count itemsize`` for an all-reduce, half of it for the others.

    Raises
    ------
    ConfigError
        A number is out of range or the collective is unknown.

    Examples
    --------
    >>> ring_bytes(10, 4, 8)
    [112, 120, 128, 120]
    """
    halves = {
        "all_reduce": (reduce_scatter_chunks, all_gather_chunks),
        "reduce_scatter": (reduce_scatter_chunks,),
        "all_gather": (all_gather_chunks,),
    }
    require_choice("collective", collective, halves)
    num_workers = require_int("num_workers", num_workers, 1)
    itemsize = require_int("itemsize", itemsize, 1)
    bounds = chunk_bounds(count, num_workers)
    sent = [0] * num_workers
    for chunks_of in halves[collective]:
        for step in range(num_workers - 1):
            for worker in range(num_workers):
                send, _ = chunks_of(worker, step, num_workers)
                sent[worker] += (bounds[send + 1] - bounds[send]) * itemsize
    return sent


def recursive_doubling_all_reduce(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sum arrays in pairs at distance 1, 2, 4, ...; every worker gets the whole sum.

    Parameters
    ----------
    arrays : sequence of P ndarrays of one shape, P >= 1
        Each worker's addend, all of one dtype of `SUM_DTYPES`. Not modified.

    Returns
    -------
    list of P ndarrays of the same shape and dtype
        Equal bit for bit on all workers, because both ends of a pair add the same two numbers.
        New arrays, none shared.

    Raises
    ------
    ConfigError
        There is no worker, shapes or dtypes differ, or a dtype cannot be summed.

    Notes
    -----
    Few messages, whole vectors: log2(P) exchanges for a power of two. Otherwise let p2 be the
    largest power of two below P and extra = P - p2. First each odd worker 2i + 1 with i < extra
    sends its vector to worker 2i, which adds it and stands for both. The p2 workers left are
    renumbered in order and exchange with the worker at distance 1, 2, 4, ... in the new numbers.
    Last, worker 2i sends the result back to 2i + 1. For P = 6:

        worker      0   1   2   3   4   5
        fold        0+1 .   2+3 .   4   5
        renumbered  0   .   1   .   2   3
        distance 1  0 <---> 1       2 <-> 3
        distance 2  0 <-----------> 2,  1 <---> 3
    """
    _require_worker_arrays(arrays)
    num_workers = len(arrays)
    power = 1
    while 2 * power <= num_workers:
        power *= 2
    extra = num_workers - power
    values = [array.reshape(-1).copy() for array in arrays]
    for index in range(extra):
        values[2 * index] = add_received(values[2 * index], values[2 * index + 1])
    active = [2 * index for index in range(extra)] + list(range(2 * extra, num_workers))
    distance = 1
    while distance < power:
        messages = [values[worker] for worker in active]
        for number, worker in enumerate(active):
            # Flipping one bit of the number finds the partner at this distance, both ways.
            values[worker] = add_received(messages[number], messages[number ^ distance])
        distance *= 2
    for index in range(extra):
        values[2 * index + 1] = values[2 * index].copy()
    return [value.reshape(arrays[0].shape) for value in values]


def all_reduce_mean(local_means: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
    """Average per-worker means, each weighted by how many rows (or tokens) it is a mean of.

    Parameters
    ----------
    local_means : sequence of P ndarrays of one shape, P >= 1
        Each worker's mean over its own rows, all of one floating dtype of `SUM_DTYPES`. Not
        modified.
    counts : sequence of P int
        n_r, rows behind each mean, >= 0, at least one of them > 0. Where it is 0 the array is
        taken as zeros, whatever it holds (the mean of nothing is NaN).

    Returns
    -------
    list of P ndarrays of the same shape and dtype
        ``sum(n_r * mean_r) / sum(n_r)``, equal bit for bit on all workers. New arrays.

    Raises
    ------
    ConfigError
        Shapes, dtypes or lengths do not fit, a count is negative, or all are 0.

    Notes
    -----
    Sums are made by `ring_all_reduce`, the counts in int64 in a ring of their own, and divided
    once at the end, so the result does not depend on how rows are spread over workers. 16-bit
    means are weighted, summed and divided in float32 and rounded once at the end: neither does
    the sum overflow 16 bits nor does a pre-division underflow.

    Examples
    --------
    >>> mean, same = all_reduce_mean([np.array([6.0]), np.array([2.0])], counts=[1, 3])
    >>> mean.tolist(), same.tolist()
    ([3.0], [3.0])
    """
    _require_worker_arrays(local_means)
    dtype = local_means[0].dtype
    if dtype.name == "int64":
        raise ConfigError(
            "local_means must hold floats; got int64. A mean of integers is no integer: convert, "
            "or sum with ring_all_reduce."
        )
    if len(counts) != len(local_means):
        raise ConfigError(
            f"counts must have one entry per worker; got {len(counts)} for {len(local_means)} "
            f"workers. Pass 0 for a worker without rows."
        )
    counts = [require_int(f"counts[{worker}]", count, 0) for worker, count in enumerate(counts)]
    totals = ring_all_reduce([np.array([count], np.int64) for count in counts])
    if totals[0][0] == 0:
        raise ConfigError(
            f"counts must not all be 0; got {counts}. Skip the update when no worker has rows."
        )
    wide = np.dtype(np.float32) if dtype.name in HALF_DTYPES else dtype
    local_sums = [
        mean.astype(wide) * count if count else np.zeros(mean.shape, wide)
        for mean, count in zip(local_means, counts, strict=True)
    ]
    sums = ring_all_reduce([np.asarray(local_sum, wide) for local_sum in local_sums])
    return [
        np.asarray(total / int(total_count[0]), wide).astype(dtype)
        for total, total_count in zip(sums, totals, strict=True)
    ]


def _require_worker_arrays(
    arrays: Sequence[np.ndarray],
    ndim: int | None = None,
    same_shape: bool = True,
    summed: bool = True,
) -> None:
    """Check what every collective asks of its list of per-worker arrays."""
    if len(arrays) == 0:
        raise ConfigError(
            "arrays must hold one array per worker; got an empty list. Pass at least one."
        )
    first = arrays[0]
    for worker, array in enumerate(arrays):
        if not isinstance(array, np.ndarray) or (ndim is not None and array.ndim != ndim):
            dims = "" if ndim is None else f" of {ndim} dim"
            got = (
                f"shape {array.shape}"
                if isinstance(array, np.ndarray)
                else f"type {type(array).__name__}"
            )
            raise ConfigError(
                f"the array of worker {worker} must be an ndarray{dims}; got {got}. "
                f"Flatten it with reshape(-1), or convert it with numpy.asarray."
            )
        if array.dtype != first.dtype or (same_shape and array.shape != first.shape):
            raise ConfigError(
                f"the array of worker {worker} must have shape {first.shape} and dtype "
                f"{first.dtype} of worker 0; got {array.shape} and {array.dtype}. "
                f"All workers of a collective bring the same."
            )
    if summed and first.dtype.name not in SUM_DTYPES:
        raise ConfigError(
            f"arrays must be of {', '.join(SUM_DTYPES)} to be summed; got {first.dtype}. "
            f"Convert first: sums of narrow integers would wrap without notice."
        )


# --- buckets and the step --------------------------------------------------------------------


def make_buckets(
    sizes_bytes_in_backward_order: Sequence[int], bucket_bytes: int
) -> list[list[int]]:
    """Group blocks, in the order backward finishes them, into buckets that are reduced together.

    Parameters
    ----------
    sizes_bytes_in_backward_order : sequence of int
        Gradient bytes of each block, >= 0, the last block of the model first.
    bucket_bytes : int
        Largest bucket in bytes, >= 1.

    Returns
    -------
    list of list of int
        Positions in the given sequence. Every position is in exactly one bucket and order is
        kept. A bucket is closed when the next block would take it past `bucket_bytes`; a block
        larger than that has a bucket of its own. No blocks, no buckets.

    Raises
    ------
    ConfigError
        A number is out of range.

    Examples
    --------
    >>> make_buckets([40, 40, 40, 200, 10], bucket_bytes=100)
    [[0, 1], [2], [3], [4]]
    """
    bucket_bytes = require_int("bucket_bytes", bucket_bytes, 1)
    buckets: list[list[int]] = []
    filled = 0
    for position, size in enumerate(sizes_bytes_in_backward_order):
        size = require_int(f"sizes_bytes_in_backward_order[{position}]", size, 0)
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(position)
        filled += size
    return buckets


def local_gradients(
    params: Params,
    x: np.ndarray,
    y: np.ndarray,
    total_rows: int,
    activation: str = "relu",
    loss: str = "mean_squared_error",
) -> tuple[float, Params]:
    """Return one worker's share of the global mean loss and of its gradients.

    Parameters
    ----------
    params : dict of str to ndarray
        As `mlp.init_mlp` returns it. Not modified.
    x, y : ndarray
        This worker's rows, n >= 0 of them, as in `mlp.mlp_loss_and_gradients`. Not modified.
    total_rows : int
        N, rows of all workers together, >= 1 and >= n.
    activation, loss : str
        As in `mlp.mlp_loss_and_gradients`.

    Returns
    -------
    loss_share : float
        n/N times this worker's mean loss; 0.0 without rows.
    gradients : dict of str to ndarray
        Gradients of `loss_share`; zeros without rows. Summed, not averaged, over workers they are
        the gradients of the global mean. New arrays.

    Raises
    ------
    ConfigError
        Anything does not fit together.
    """
    num_rows = count_rows(x, y)
    total_rows = require_int("total_rows", total_rows, max(1, num_rows))
    if num_rows == 0:  # still takes part in every collective, with zeros
        return 0.0, {name: np.zeros_like(param) for name, param in params.items()}
    share = num_rows / total_rows
    value, gradients = mlp_loss_and_gradients(params, x, y, activation, loss, seed=share)
    return share * value, gradients


def all_reduce_gradients(
    worker_gradients: Sequence[Params], bucket_bytes: int | None = None
) -> list[Params]:
    """Sum MLP gradients over workers, one ring all-reduce per bucket.

    Parameters
    ----------
    worker_gradients : sequence of P dicts of str to ndarray, P >= 1
        Each worker's gradients, names as `mlp.init_mlp` gives them, in any order. Not modified.
    bucket_bytes : int, optional
        Largest bucket in bytes, >= 1; see `make_buckets`. None: one bucket holds everything.

    Returns
    -------
    list of P dicts of str to ndarray
        The sums, equal bit for bit on all workers. New arrays.

    Raises
    ------
    ConfigError
        Names, shapes or dtypes differ between workers, or `bucket_bytes` is out of range.

    Notes
    -----
    A block is one layer: its weight, then its bias, flat. Blocks go into buckets from the last
    layer to the first, the order in which backward finishes them. Which tensors share a bucket is
    decided by layer order alone, never by the order of a dict, so it is the same on all workers.
    """
    if len(worker_gradients) == 0:
        raise ConfigError(
            "worker_gradients must hold one dict per worker; got an empty list. Pass at least one."
        )
    first = worker_gradients[0]
    for worker, gradients in enumerate(worker_gradients):
        require_same_tensors(f"the gradients of worker {worker}", gradients, first)
    blocks = mlp_layers(first)[::-1]
    sizes = [sum(first[name].nbytes for name in block) for block in blocks]
    if bucket_bytes is None:
        bucket_bytes = max(1, sum(sizes))
    reduced: list[Params] = [{} for _ in worker_gradients]
    for bucket in make_buckets(sizes, bucket_bytes):
        names = [name for position in bucket for name in blocks[position]]
        flat = [
            np.concatenate([gradients[name].reshape(-1) for name in names])
            for gradients in worker_gradients
        ]
        for worker, total in enumerate(ring_all_reduce(flat)):
            start = 0
            for name in names:
                stop = start + first[name].size
                reduced[worker][name] = total[start:stop].reshape(first[name].shape).copy()
                start = stop
    return reduced


def data_parallel_train_step(
    replicas: Sequence[Params],
    worker_batches: Sequence[Microbatch],
    update: Callable[[Params, Params], Params],
    activation: str = "relu",
    loss: str = "mean_squared_error",
    bucket_bytes: int | None = None,
) -> tuple[list[Params], float]:
    """Make one training step on P workers that hold a replica of the model each.

    Parameters
    ----------
    replicas : sequence of P dicts of str to ndarray, P >= 1
        Each worker's parameters, equal on all workers. Not modified.
    worker_batches : sequence of P (x_r, y_r)
        Each worker's rows of the global batch, n_r >= 0, not all 0. Not modified.
    update : callable, (params, gradients) -> params
        The update rule, such as ``lambda p, g: optimizers.sgd_step(p, g, lr=0.1)``. Called once
        per worker, with the same gradients everywhere.
    activation, loss : str
        As in `mlp.mlp_loss_and_gradients`.
    bucket_bytes : int, optional
        As in `all_reduce_gradients`; changes the result by rounding only.

    Returns
    -------
    replicas : list of P dicts of str to ndarray
        What `update` returned, equal bit for bit on all workers if `update` is a pure function.
    loss : float
        Mean loss over all rows of all workers, under the old parameters.

    Raises
    ------
    ConfigError
        Replicas differ, there is not one batch per worker, no worker has a row, or anything does
        not fit together.

    Notes
    -----
    Equals the single-process step on all rows up to rounding, however rows are spread: row counts
    are summed over workers first, every worker divides by the global count, gradients are summed.
    """
    if len(worker_batches) != len(replicas):
        raise ConfigError(
            f"worker_batches must have one entry per replica; got {len(worker_batches)} for "
            f"{len(replicas)} replicas. Pass empty arrays for a worker without rows."
        )
    for worker, replica in enumerate(replicas):
        require_same_tensors(f"the replica of worker {worker}", replica, replicas[0])
        for name, param in replica.items():
            if not np.array_equal(param, replicas[0][name], equal_nan=True):
                raise ConfigError(
                    f"replicas must be equal on all workers; got another {name!r} on worker "
                    f"{worker} than on worker 0. Start all workers from the same parameters."
                )
    row_counts = [np.array([count_rows(x, y)], np.int64) for x, y in worker_batches]
    total_rows = int(ring_all_reduce(row_counts)[0][0])
    if total_rows == 0:
        raise ConfigError(
            f"a step must have at least one row; got {len(worker_batches)} workers with 0 rows. "
            f"Skip the step, or pass rows."
        )
    loss_shares, worker_gradients = [], []
    for replica, (x, y) in zip(replicas, worker_batches, strict=True):
        share, gradients = local_gradients(replica, x, y, total_rows, activation, loss)
        loss_shares.append(np.array([share]))
        worker_gradients.append(gradients)
    mean_loss = float(ring_all_reduce(loss_shares)[0][0])
    reduced = all_reduce_gradients(worker_gradients, bucket_bytes)
    return [update(*pair) for pair in zip(replicas, reduced, strict=True)], mean_loss
