"""The rank side of `mpisim bench collectives`: one launch, all sizes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpisim.bench.quiet import MAX_FOREIGN_SHARE, ForeignLoad, foreign_share
from mpisim.comm.communicator import Communicator
from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.steps import all_gather_table, all_reduce_table, reduce_scatter_table
from mpisim.trace.recorder import Recorder

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
BLOCK_S = 0.2
"""Rounds are kept or dropped in blocks of about this length."""
WANTED_BLOCKS = 3
MAX_BLOCKS = 12
_FILL = 1.0


def measure(transport: Any, sizes: list[int], trace_dir: Path) -> list[dict[str, Any]]:
    """Time every collective at every size.

    Parameters
    ----------
    transport : MpiTransport
    sizes : list of int
        Bytes of the whole buffer.
    trace_dir : Path
        Where this rank's trace goes: tracing is on, as it is in training.

    Returns
    -------
    list of dict
        One row per collective and size, the same on every rank; times in microseconds.
    """
    recorder = Recorder(
        trace_dir / f"bench-{transport.rank:04d}.bin",
        {"rank": transport.rank, "memory_categories": []},
    )
    rows = []
    for nbytes in sizes:
        for collective in COLLECTIVES:
            recorder.step += 1
            rows.append(_measure_one(transport, recorder, collective, nbytes))
            recorder.end_step(0)
    recorder.close()
    return rows


def _measure_one(
    transport: Any, recorder: Recorder, collective: str, nbytes: int
) -> dict[str, Any]:
    from mpisim.comm.mpi import MPI

    raw, size, rank = transport.raw, transport.size, transport.rank
    # A channel of its own per measurement is not needed: one collective runs at a time.
    communicator = Communicator(transport, axis="dp", channel=1, recorder=recorder)
    count = nbytes // 4
    bounds = chunk_bounds(count, size)
    counts = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    x, y = np.empty(count, np.float32), np.empty(count, np.float32)
    mine = np.empty(counts[rank], np.float32)
    library_mine = np.empty(counts[rank], np.float32)
    copied = np.empty(count, np.float32)
    if collective == "all_reduce":
        table = all_reduce_table(count, size, 4)
        calls: list[Callable[[], Any]] = [
            lambda: communicator.all_reduce(x),
            lambda: raw.Allreduce(MPI.IN_PLACE, y),
        ]
    elif collective == "reduce_scatter":
        table = reduce_scatter_table(count, size, 4)
        calls = [
            lambda: communicator.reduce_scatter(x, mine),
            lambda: raw.Reduce_scatter(y, library_mine, counts),
        ]
    else:
        table = all_gather_table(bounds, 4)
        calls = [
            lambda: communicator.all_gather(mine, x),
            lambda: raw.Allgatherv(library_mine, [y, counts]),
        ]
    calls.append(lambda: np.copyto(copied, y))
    # Filled just before each call: fresh values in this core's cache, as a gradient bucket has
    # when its ring starts; the same for all three.
    inputs = [(x, mine), (y, library_mine), (y, copied)]
    errors = _count_errors(collective, calls[0], rank, bounds, x, mine)
    for call in calls[1:]:
        call()
    times = _rounds(raw, calls, inputs)
    ours, library, copy = np.median(times, axis=0) * 1e6
    factor = (2 if collective == "all_reduce" else 1) * (size - 1) / size
    gathered = np.array([errors, communicator.scratch_bytes], dtype=np.float64)
    worst = np.empty_like(gathered)
    raw.Allreduce(gathered, worst, MPI.MAX)
    row = {
        "collective": collective,
        "ranks": size,
        "bytes": nbytes,
        "dtype": "float32",
        "algorithm": table.algorithm + (" pipelined" if table.segments > 1 else ""),
        "time_us": float(ours),
        "library_us": float(library),
        "copy_us": float(copy),
        "speedup": float(np.median(times[:, 1] / times[:, 0])),
        "algbw_gbps": float(nbytes / ours / 1e3),
        "busbw_gbps": float(nbytes / ours / 1e3 * factor),
        "wire_bytes": max(table.sent_bytes(index, 4) for index in range(size)),
        "scratch_bytes": int(worst[1]),
        "errors": int(worst[0]),
    }
    communicator.close()
    return row


def _count_errors(
    collective: str,
    call: Callable[[], Any],
    rank: int,
    bounds: tuple[int, ...],
    x: np.ndarray,
    mine: np.ndarray,
) -> int:
    """Run `call` once on values that differ by rank, and count wrong elements of its result."""
    size = len(bounds) - 1
    if collective == "all_gather":
        x.fill(-1.0)
        mine.fill(rank + 1.0)
        call()
        return sum(
            int(np.count_nonzero(x[bounds[owner] : bounds[owner + 1]] != owner + 1.0))
            for owner in range(size)
        )
    x.fill(rank + 1.0)
    mine.fill(-1.0)
    call()
    result = x if collective == "all_reduce" else mine
    return int(np.count_nonzero(result != size * (size + 1) / 2))


def _rounds(
    raw: Any, calls: list[Callable[[], Any]], inputs: list[tuple[np.ndarray, ...]]
) -> np.ndarray:
    """Return the time of each call per kept round, seconds, slowest rank; shape (rounds, calls)."""
    from mpisim.comm.mpi import MPI

    clock = time.perf_counter
    mine = np.empty(len(calls))
    slowest = np.empty(len(calls))
    kept: list[np.ndarray] = []
    best: tuple[float, list[np.ndarray]] = (float("inf"), [])
    num_kept = 0
    for _ in range(MAX_BLOCKS):
        load = ForeignLoad()
        block: list[np.ndarray] = []
        going = True
        while going:
            for position, call in enumerate(calls):
                for array in inputs[position]:
                    array.fill(_FILL)
                raw.Barrier()
                start = clock()
                call()
                mine[position] = clock() - start
            raw.Allreduce(mine, slowest, MPI.MAX)
            block.append(slowest.copy())
            # All ranks leave together: rank 0's clock decides.
            going = bool(raw.bcast(load.measure()[2] < BLOCK_S, root=0))
        busy, own, wall = load.measure()
        job = raw.allreduce(own, MPI.SUM)
        share = raw.bcast(foreign_share(busy, job, wall), root=0)
        if share < best[0]:
            best = (share, block)
        if not share > MAX_FOREIGN_SHARE:
            kept += block
            num_kept += 1
            if num_kept == WANTED_BLOCKS:
                break
    return np.array(kept or best[1])


def temporary_dir() -> tempfile.TemporaryDirectory:
    """Return a folder for traces that nobody reads."""
    return tempfile.TemporaryDirectory(prefix="mpisim-bench-")
