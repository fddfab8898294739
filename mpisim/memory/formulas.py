"""Closed forms of what this engine holds, from sizes alone: no arrays, no plan.

Published forms of others are in `published.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpisim.layouts.chunks import chunk_len
from mpisim.layouts.specs import BlockSpec
from mpisim.layouts.steps import all_reduce_table, reduce_scatter_table, scratch_slots

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


def kept_activation_bytes(blocks: Sequence[BlockSpec], recompute: str = "none") -> int:
    """Return what one microbatch keeps between the forward of its loss and its backward.

    Parameters
    ----------
    blocks : sequence of BlockSpec
        For the shape of the microbatch, in forward order; the last one ends in the loss.
    recompute : {"none", "selective", "full"}
        As `memory.recompute`; "full" with a kept input per block.

    Notes
    -----
    Sum over blocks of what forward saves, with every boundary between two blocks counted once, or
    with "full" the inputs of the blocks and what the last block saves. The batch is data.
    """
    sizes = _sizes(blocks)
    return _kept(sizes, len(sizes) - 1, recompute)


def peak_activation_bytes(blocks: Sequence[BlockSpec], recompute: str = "none") -> int:
    """Return the peak of category "activations" of this engine, one microbatch alive at a time.

    Parameters
    ----------
    blocks, recompute
        As for `kept_activation_bytes`.

    Notes
    -----
    The largest of these moments over blocks i of L, with K(i) what blocks 0..i keep, x(i) the input
    of block i and S(i) what it saves beyond boundaries:

        forward    K(i - 1) + x(i) + S(i) + x(i + 1)
        recompute  K(i) + dx(i + 1) + what the replay makes
        backward   K(i) + dx(i + 1) + dx(i), block i complete

    Schedules that hold p microbatches of a stage add (p - 1) times `kept_activation_bytes`.
    """
    sizes = _sizes(blocks)
    last = len(sizes) - 1
    peak = 0
    for i, block in enumerate(sizes):
        mode = recompute if block.can(recompute) and i < last else "none"
        before = _kept(sizes, i - 1, recompute, plus_input=True)
        saved = block.saved if mode == "none" else block.trimmed if mode == "selective" else 0
        peak = max(peak, before + saved + block.output)
        around = block.output + block.input
        kept = _kept(sizes, i, recompute)
        if mode == "selective":
            peak = max(peak, kept + block.interior + block.output)
            kept += block.saved - block.trimmed
        elif mode == "full":
            # The first output is held (in `kept`); the replay's stands beside it, then both go,
            # but for what the block saves of them.
            peak = max(peak, kept + block.saved + 2 * block.output)
            kept += block.saved + block.output * block.keeps_output - block.output
        peak = max(peak, kept + around)
    return peak


def ring_scratch_bytes(counts: Sequence[int], ranks: int, itemsize: int, zero: int) -> int:
    """Return the scratch that the ring sums of buckets of `counts` elements share on rank 0.

    The largest number of slots times the longest slot over the buckets (`layouts.steps`); all
    programs of a group run one after the other.
    """
    needs = [0]
    for count in counts:
        if zero:
            table = reduce_scatter_table(count, ranks, itemsize)
        else:
            table = all_reduce_table(count, ranks, itemsize, "ring")
        number, longest = scratch_slots(table, 0, in_place=zero > 0)
        needs.append(number * longest * itemsize)
    return max(needs)


class _Sizes(NamedTuple):
    """Bytes of one block, without what it shares with its neighbours."""

    input: int
    output: int
    saved: int
    """Kept beside the boundaries to other blocks."""
    interior: int
    trimmed: int
    """`saved` when forward keeps selectively."""
    keeps_input: bool
    keeps_output: bool
    has_saved: bool

    def can(self, recompute: str) -> bool:
        """Tell whether the mode saves anything of this block."""
        return bool(self.interior) if recompute == "selective" else self.has_saved


def _sizes(blocks: Sequence[BlockSpec]) -> list[_Sizes]:
    found = []
    for number, block in enumerate(blocks):
        boundaries, last = block.saved_boundaries(), len(block.layers)
        inner = [boundary for boundary in boundaries if 0 < boundary < last]
        saved = block.extra_saved_bytes + sum(map(block.boundary_bytes, inner))
        found.append(
            _Sizes(
                block.boundary_bytes(0) if number else 0,
                block.boundary_bytes(last) if number < len(blocks) - 1 else 0,
                saved,
                block.interior_bytes,
                saved - block.interior_bytes + block.check_bytes,
                0 in boundaries,
                last in boundaries,
                bool(boundaries or block.extra_saved_bytes),
            )
        )
    return found


def _kept(sizes: list[_Sizes], upto: int, recompute: str, plus_input: bool = False) -> int:
    """Return what blocks 0..upto keep; with `plus_input` also the output of the last of them."""
    total, last = 0, len(sizes) - 1
    boundaries = set()
    for i, block in enumerate(sizes[: upto + 1]):
        mode = recompute if recompute != "none" and block.can(recompute) and i < last else "none"
        if mode == "full":
            # Its input, and its output until a replay has been compared with it.
            boundaries |= {i, i + 1}
            continue
        total += block.saved if mode == "none" else block.trimmed
        boundaries |= {i} if block.keeps_input else set()
        boundaries |= {i + 1} if block.keeps_output else set()
    if plus_input:
        boundaries.add(upto + 1)
    return total + sum(sizes[b].input for b in boundaries if 0 < b <= last)
