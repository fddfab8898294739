"""Which blocks live together, and which gradients are reduced together: stages and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mpisim.errors import ConfigError
from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.specs import BlockSpec, ParamSpec
from mpisim.mesh import Mesh


@dataclass(frozen=True)
class Bucket:
    """Gradients that one all-reduce sums: one flat array."""

    index: int
    blocks: tuple[str, ...]
    """Blocks that add to it, in backward order; those that borrow a parameter of it, too."""
    params: tuple[ParamSpec, ...]
    """Their parameters, in the order they lie in the array."""
    coordinate: int = 0
    """Place on axis pp of the ranks that hold it."""
    twin: int = -1
    """The bucket with the same parameters at the other end of the pipeline; -1: none."""

    @property
    def is_copy(self) -> bool:
        """Another coordinate owns the parameters: they are counted, and saved, there."""
        return 0 <= self.twin < self.index

    def shard(self, size: int, index: int) -> tuple[int, int]:
        """Return the range of elements that rank `index` of `size` owns (ZeRO)."""
        bounds = chunk_bounds(self.count, size)
        return bounds[index], bounds[index + 1]

    @property
    def count(self) -> int:
        """Elements."""
        return sum(param.size for param in self.params)

    def offsets(self) -> dict[str, tuple[int, int]]:
        """Return the element range of each parameter, by name."""
        ranges, position = {}, 0
        for param in self.params:
            ranges[param.name] = (position, position + param.size)
            position += param.size
        return ranges


def make_buckets(
    blocks: tuple[BlockSpec, ...], itemsize: int, bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Group blocks into buckets, last block first.

    Parameters
    ----------
    blocks : tuple of BlockSpec
        In forward order.
    itemsize : int
        Bytes per gradient element.
    bucket_bytes : int
        A bucket is closed when the next block would take it past this size; a block that is
        larger alone gets a bucket of its own; 0: every block does. Blocks are never cut, parameters
        never moved.

    Returns
    -------
    tuple of Bucket
        Blocks without parameters are in none.
    """
    groups: list[list[BlockSpec]] = []
    filled = 0
    for block in reversed(blocks):
        nbytes = itemsize * sum(param.size for param in block.params)
        if nbytes == 0:
            continue
        if not groups or filled + nbytes > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(block)
        filled += nbytes
    buckets = []
    for index, group in enumerate(groups):
        params = tuple(param for block in group for param in block.params)
        names = {param.name for param in params}
        adding = tuple(
            block.name
            for block in reversed(blocks)
            if block in group or names.intersection(block.borrows)
        )
        buckets.append(Bucket(index, adding, params))
    return tuple(buckets)


def make_stage_buckets(
    blocks: tuple[BlockSpec, ...], coordinates: dict[str, int]
) -> tuple[Bucket, ...]:
    """Give every block a bucket of its own, on the coordinate where the block lives.

    Parameters
    ----------
    blocks : tuple of BlockSpec
        In forward order.
    coordinates : dict of str to int
        Block -> place on axis pp.

    Returns
    -------
    tuple of Bucket
        Last block first. A parameter that a block elsewhere borrows has a bucket to itself, and
        there is another one, its twin, where it is borrowed; twins have the same layout, so that
        their sums over axis dp have the same bits.

    Notes
    -----
    One block a bucket, because then neither the split into stages nor the schedule changes which
    ranks add in which order: every layout gives the same bits.
    """
    homes = {param.name: coordinates[block.name] for block in blocks for param in block.params}
    borrowed: dict[str, list[str]] = {}
    for block in blocks:
        for name in block.borrows:
            borrowed.setdefault(name, []).append(block.name)
    shared = {
        name: readers
        for name, readers in borrowed.items()
        if any(coordinates[reader] != homes[name] for reader in readers)
    }
    buckets: list[Bucket] = []
    twins: dict[str, int] = {}
    for block in reversed(blocks):
        home = coordinates[block.name]
        own = tuple(param for param in block.params if param.name not in shared)
        if own:
            names = {param.name for param in own}
            adding = tuple(
                other.name
                for other in reversed(blocks)
                if other is block or names.intersection(other.borrows)
            )
            buckets.append(Bucket(len(buckets), adding, own, home))
        for param in block.params:
            if param.name in shared:
                near = {name for name in shared[param.name] if coordinates[name] == home}
                adding = tuple(
                    other.name for other in reversed(blocks) if other is block or other.name in near
                )
                twins[param.name] = len(buckets)
                buckets.append(Bucket(len(buckets), adding, (param,), home))
    for name, first in twins.items():
        readers = [reader for reader in shared[name] if coordinates[reader] != homes[name]]
        away = {coordinates[reader] for reader in readers}
        if len(away) != 1:
            raise ConfigError(
                f"{name} must be borrowed by blocks of one other place on axis pp, because its "
                f"gradient is added up by pairs; got places {sorted(away)}. Set parallel.split."
            )
        adding = tuple(reversed(readers))
        copy = Bucket(len(buckets), adding, buckets[first].params, away.pop(), first)
        buckets[first] = replace(buckets[first], twin=copy.index)
        buckets.append(copy)
    return tuple(buckets)


def num_norms(mesh: Mesh, num_buckets: int) -> int:
    """Return the elements of the control sum "norm".

    With stages one per bucket and rank of axis dp: whatever the split over stages, the same numbers
    are added. Without, one per rank.
    """
    return num_buckets * mesh.dp if mesh.pp > 1 else mesh.size


def buckets_by_block(
    blocks: tuple[BlockSpec, ...],
    buckets: tuple[Bucket, ...],
    coordinates: dict[str, int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return which buckets hold the parameters that each block reads, borrowed ones too.

    In the order of the block's own parameters, then of the borrowed ones; of twins the one on the
    block's coordinate.
    """
    owner = {(param.name, b.coordinate): b.index for b in buckets for param in b.params}
    found = {}
    for block in blocks:
        at = coordinates[block.name] if coordinates else 0
        names = [*(param.name for param in block.params), *block.borrows]
        found[block.name] = tuple(dict.fromkeys(owner[name, at] for name in names))
    return found


def block_costs(blocks: Sequence[BlockSpec]) -> list[float]:
    """Return each block's share of the model: half its floating-point operations, half its weights.

    A borrowed table weighs on both its ends: each holds it.
    """
    sizes = {param.name: param.size for block in blocks for param in block.params}
    flops = [block.forward_flops + block.backward_flops for block in blocks]
    params = [
        sum(param.size for param in block.params) + sum(sizes[name] for name in block.borrows)
        for block in blocks
    ]
    all_flops, all_params = max(sum(flops), 1), max(sum(params), 1)
    return [f / all_flops + n / all_params for f, n in zip(flops, params, strict=True)]


def split_evenly(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return how many neighbours each stage gets so that the costliest stage costs least.

    Parameters
    ----------
    costs : sequence of float
        Per block, in forward order; at least `num_stages`.
    num_stages : int

    Returns
    -------
    tuple of int
        Blocks per stage, each >= 1. Among equally good splits the one whose squares of costs are
        least: stages are alike, too, where one block is the bottleneck.

    Examples
    --------
    >>> split_evenly([1, 1, 1, 1, 2], 3)
    (2, 2, 1)
    """
    total = [0.0, *accumulate(costs)]
    # best[k][j]: (largest cost, sum of squares, blocks per stage) of the first j blocks in k stages
    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, ())}]
    for stage in range(1, num_stages + 1):
        row = {}
        for end in range(stage, len(costs) - (num_stages - stage) + 1):
            choices = []
            for start, (largest, squares, counts) in best[-1].items():
                if start < end:
                    cost = total[end] - total[start]
                    # Rounded: costs that differ by an ulp are equal.
                    key = round(max(largest, cost), 12), round(squares + cost * cost, 12)
                    choices.append((*key, (*counts, end - start)))
            row[end] = min(choices)
        best.append(row)
    return best[num_stages][len(costs)][2]
