"""Which gradients are reduced together: buckets, in the order that backward fills them."""

from __future__ import annotations

from dataclasses import dataclass

from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.specs import BlockSpec, ParamSpec


@dataclass(frozen=True)
class Bucket:
    """Gradients that one all-reduce sums: one flat array."""

    index: int
    blocks: tuple[str, ...]
    """Blocks that add to it, in backward order; those that borrow a parameter of it, too."""
    params: tuple[ParamSpec, ...]
    """Their parameters, in the order they lie in the array."""

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


def buckets_by_block(
    blocks: tuple[BlockSpec, ...], buckets: tuple[Bucket, ...]
) -> dict[str, tuple[int, ...]]:
    """Return which buckets hold the parameters that each block reads, borrowed ones too.

    In the order of the block's own parameters, then of the borrowed ones.
    """
    owner = {param.name: bucket.index for bucket in buckets for param in bucket.params}
    found = {}
    for block in blocks:
        names = [*(param.name for param in block.params), *block.borrows]
        found[block.name] = tuple(dict.fromkeys(owner[name] for name in names))
    return found
