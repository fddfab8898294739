"""Step tables of the collectives: who sends which slice to whom, step by step.

The executor in `comm/collectives.py` runs a table, `cost/price.py` prices the same table, and the
report compares the two. Bytes and messages are read off the table, never off a textbook formula:
10 float64 over 4 ranks make a ring all-reduce send 112, 120, 128 and 120 bytes, not 120 each.

Conventions: group indices 0..size-1; rank r owns chunk r after a reduce-scatter, as in MPI; the
ring runs r -> r + 1. Sources: Thakur, Rabenseifner and Gropp 2005 (recursive doubling, halving);
Patarasuk and Yuan 2009 (ring).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from mpisim.errors import ConfigError
from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.proofs import prove_all_reduce

NO_PEER = -1

ALGORITHMS = ("auto", "ring", "recursive_doubling", "halving_doubling")
"""Built-in choices of an all-reduce; `register_all_reduce` adds to them."""

REDUCTIONS = ("sum", "max")
"""How an all-reduce combines what arrives with what is there; the same tables serve all."""

# Switch-over sizes of `auto`, bytes of the whole buffer; measured by `mpisim bench collectives`
# (experiments/bench/README.md shows the tables that these numbers come from).
LATENCY_BYTES = 64 << 10
"""At or below: recursive doubling (fewest messages in a row)."""
BUFFERED_BYTES = 4000
"""Sends of recursive doubling and gather up to this size leave from a copy of their own, so that
nobody waits for their completion (it is Open MPI's eager limit)."""
HALVING_BYTES = 2 << 20
"""At or below, on 4, 8, 16, ... ranks: halving and doubling (few messages, no byte twice)."""
PIPELINE_BYTES = 2 << 20
"""Above, a ring is cut into segments, so that adding one overlaps receiving the next."""
STREAM_BYTES = 4 << 20
"""Above, no private cache holds the buffer: its pieces are sent with one copy (see comm)."""
SEGMENT_BYTES = 1 << 20
"""Largest segment of a pipelined ring; a chunk has at least two."""
LARGE_BYTES = 32 << 20
"""Above, segments are shorter, which bounds the scratch of any buffer."""
LARGE_SEGMENT_BYTES = 512 << 10
"""Largest segment above `LARGE_BYTES`."""

PIPELINE_DEPTH = 2
"""Receives that a pipelined program keeps posted ahead of the segment it is adding."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One row of a step table: a send and a receive that are in flight together.

    Slices are element offsets into the collective's whole buffer. `NO_PEER` switches a side off.
    """

    step: int
    segment: int
    send_to: int
    send_lo: int
    send_hi: int
    recv_from: int
    recv_lo: int
    recv_hi: int
    combine: bool
    """True: combine what arrives with this rank's own values; False: take it as it is."""

    @property
    def send_count(self) -> int:
        """Elements sent (0 when nothing is sent)."""
        return self.send_hi - self.send_lo

    @property
    def recv_count(self) -> int:
        """Elements received (0 when nothing is received)."""
        return self.recv_hi - self.recv_lo


@dataclass(frozen=True)
class StepTable:
    """All transfers of one collective over one group, as a pure function of the sizes.

    Rows of one rank are executed in order; rows of one peer pair match in order.
    """

    collective: str
    """all_reduce, reduce_scatter, all_gather, gather."""
    algorithm: str
    count: int
    """Elements of the whole buffer."""
    size: int
    """Ranks in the group."""
    bounds: tuple[int, ...]
    """Chunk offsets, length size + 1."""
    segments: int
    """Pieces that every chunk is cut into; 1 means not pipelined."""
    rows: Callable[[int], tuple[Transfer, ...]] = field(repr=False, compare=False)

    def transfers(self, index: int) -> tuple[Transfer, ...]:
        """Return the rows of group index `index`, in order."""
        cached = self._cache.get(index)
        if cached is None:
            cached = self._cache[index] = self.rows(index)
        return cached

    @cached_property
    def _cache(self) -> dict[int, tuple[Transfer, ...]]:
        return {}

    def sent_bytes(self, index: int, itemsize: int) -> int:
        """Return the bytes that `index` sends."""
        return itemsize * sum(row.send_count for row in self.transfers(index))

    def received_bytes(self, index: int, itemsize: int) -> int:
        """Return the bytes that `index` receives."""
        return itemsize * sum(row.recv_count for row in self.transfers(index))

    def sent_messages(self, index: int) -> int:
        """Return the number of messages that `index` sends, empty ones included."""
        return sum(row.send_to != NO_PEER for row in self.transfers(index))

    def received_messages(self, index: int) -> int:
        """Return the number of messages that `index` receives, empty ones included."""
        return sum(row.recv_from != NO_PEER for row in self.transfers(index))


def scratch_slots(table: StepTable, index: int, in_place: bool = False) -> tuple[int, int]:
    """Return how many scratch slots the program of `index` needs, and the elements of one.

    `in_place` tells of a reduce-scatter whose result takes the place of this rank's own chunk.
    Scratch of a rank: ``number * longest * itemsize`` bytes. The executor cuts its slots by this
    function and `plan.check` predicts "comm_buffers" with it.
    """
    combined = [row.recv_count for row in table.transfers(index) if row.combine]
    if not combined:
        return 0, 0
    longest = max(combined)
    if table.collective == "reduce_scatter":
        if table.segments > 1:
            # A partial sum stays in its slot until it is sent, and the neighbour may be a whole
            # step behind: with fewer slots both could wait for each other.
            needed = table.size > 2 or in_place
            return (table.segments + PIPELINE_DEPTH if needed else 0), longest
        return min(2, len(combined) - (not in_place)), longest
    if table.algorithm == "recursive_doubling":
        return 1, longest
    if table.segments > 1:
        return PIPELINE_DEPTH, longest
    return min(2, len(combined)), longest


def buffered_count(table: StepTable, index: int, itemsize: int) -> int:
    """Return the elements of the private copies that the small sends of `index` leave from.

    0 where sends are too large, belong to an algorithm that forwards what it has received, or
    where two ranks exchange: they wait for each other anyway, and the copy costs 5% at 1 KiB.
    """
    if table.algorithm not in ("recursive_doubling", "direct"):
        return 0
    if table.algorithm == "recursive_doubling" and table.size == 2:
        return 0
    counts = [row.send_count for row in table.transfers(index) if row.send_to != NO_PEER]
    return sum(counts) if max(counts, default=0) * itemsize <= BUFFERED_BYTES else 0


def choose_algorithm(nbytes: int, size: int, algorithm: str = "auto") -> str:
    """Return the all-reduce algorithm for a buffer of `nbytes` over `size` ranks.

    `auto`: recursive doubling up to `LATENCY_BYTES`; then, up to `HALVING_BYTES`, halving and
    doubling on 4, 8, 16, ... ranks; else the ring, segmented above `PIPELINE_BYTES`. A forced
    `halving_doubling` needs a power-of-two group and falls to the ring elsewhere, because a group
    size is decided by the mesh and not by the one who picks the algorithm.
    """
    power_of_two = size & (size - 1) == 0
    if algorithm == "auto":
        if nbytes <= LATENCY_BYTES:
            return "recursive_doubling"
        if nbytes <= HALVING_BYTES and power_of_two and size >= 4:
            return "halving_doubling"
        return "ring"
    if algorithm == "halving_doubling" and not power_of_two:
        return "ring"
    return algorithm


def num_segments(bounds: tuple[int, ...], itemsize: int) -> int:
    """Return into how many pieces each chunk of a pipelined ring is cut.

    All chunks get the same number of pieces, or the row numbers of two ranks would not match.
    """
    nbytes = bounds[-1] * itemsize
    if nbytes <= PIPELINE_BYTES:
        return 1
    longest = max(hi - lo for lo, hi in zip(bounds, bounds[1:], strict=False)) * itemsize
    segment = SEGMENT_BYTES if nbytes <= LARGE_BYTES else LARGE_SEGMENT_BYTES
    return max(2, -(-longest // segment))


RowsFunction = Callable[[int, int, int], Sequence["Transfer"]]
"""``rows(count, size, index)``: the transfers of one rank of an all-reduce, in order."""

_REGISTERED: dict[str, RowsFunction] = {}


def register_all_reduce(name: str, rows: RowsFunction) -> None:
    """Make an all-reduce algorithm known under `name`, for the config's comm.algorithm.

    Parameters
    ----------
    name : str
        Not a built-in one. One that was registered before means this one from now on.
    rows : callable
        See `RowsFunction`; called for groups of two ranks or more. Proven before a message is sent
        (`layouts.proofs`); the executor runs them as they are, and bytes and messages are predicted
        from them.

    Raises
    ------
    ConfigError
        The name is built in, or something is not as said here.
    """
    if not isinstance(name, str) or not name.strip() or name in (*ALGORITHMS, "direct"):
        raise ConfigError(
            f"name of an all-reduce must be a word of its own; got {name!r}. Choose one that is "
            f"none of {', '.join(ALGORITHMS)}."
        )
    if not callable(rows):
        raise ConfigError(f"rows of {name} must be a function; got {rows!r}. Give one of (count, "
                         f"size, index).")  # fmt: skip
    _REGISTERED[name] = rows
    all_reduce_table.cache_clear()
    _registered_rows.cache_clear()


@lru_cache(maxsize=512)
def _registered_rows(name: str, count: int, size: int) -> tuple[tuple[Transfer, ...], ...]:
    """Return the proven rows of all ranks."""
    try:
        ranks = tuple(tuple(_REGISTERED[name](count, size, index)) for index in range(size))
        known = all(isinstance(row, Transfer) for rows in ranks for row in rows)
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise ConfigError(
            f"rows of all-reduce {name!r} must be a list of Transfer for each rank; got "
            f"{type(error).__name__}: {error} with {count} elements on {size} ranks. Correct it."
        ) from error
    if not known:
        raise ConfigError(
            f"rows of all-reduce {name!r} must be a list of Transfer for each rank; got other "
            f"things with {count} elements on {size} ranks. Correct it."
        )
    prove_all_reduce(name, count, ranks)
    return ranks


def algorithm_names() -> tuple[str, ...]:
    """Return all choices of an all-reduce."""
    return (*ALGORITHMS, *_REGISTERED)


@lru_cache(maxsize=512)
def all_reduce_table(count: int, size: int, itemsize: int, algorithm: str = "auto") -> StepTable:
    """Return the table of an all-reduce of `count` elements over `size` ranks.

    Parameters
    ----------
    count : int
        Elements of the buffer, >= 0.
    size : int
        Ranks in the group, >= 1.
    itemsize : int
        Bytes of one element; decides `auto` and the segment length.
    algorithm : str
        One of `algorithm_names`.

    Returns
    -------
    StepTable
        Ring: 2 * (size - 1) steps; recursive doubling: ceil(log2 size) steps, two more on some
        ranks when size is no power of two; halving and doubling: 2 * log2(size) steps.

    Examples
    --------
    >>> table = all_reduce_table(10, 4, 8, "ring")
    >>> [table.sent_bytes(r, 8) for r in range(4)], table.sent_messages(0)
    ([112, 120, 128, 120], 6)
    """
    chosen = choose_algorithm(count * itemsize, size, algorithm)
    bounds = chunk_bounds(count, size)
    segments = num_segments(bounds, itemsize) if chosen == "ring" else 1

    def rows(index: int) -> tuple[Transfer, ...]:
        if size == 1:
            return ()
        if chosen in _REGISTERED:
            return _registered_rows(chosen, count, size)[index]
        if chosen == "recursive_doubling":
            return _recursive_doubling_rows(count, size, index)
        if chosen == "halving_doubling":
            return _halving_doubling_rows(count, size, index)
        reduce = _ring_reduce_rows(bounds, segments, index)
        return reduce + _ring_gather_rows(bounds, segments, index, first_step=size - 1)

    return StepTable("all_reduce", chosen, count, size, bounds, segments, rows)


@lru_cache(maxsize=512)
def reduce_scatter_table(count: int, size: int, itemsize: int) -> StepTable:
    """Return the table of a ring reduce-scatter: size - 1 steps, rank r keeps chunk r."""
    bounds = chunk_bounds(count, size)
    segments = num_segments(bounds, itemsize)

    def rows(index: int) -> tuple[Transfer, ...]:
        return _ring_reduce_rows(bounds, segments, index)

    return StepTable("reduce_scatter", "ring", count, size, bounds, segments, rows)


@lru_cache(maxsize=512)
def all_gather_table(bounds: tuple[int, ...], itemsize: int) -> StepTable:
    """Return the table of a ring all-gather: size - 1 steps, chunk r comes from rank r.

    `bounds` are the chunk offsets, usually `chunk_bounds(count, size)`; any non-decreasing
    offsets from 0 are allowed, so ranks may contribute unequal lengths, or nothing.
    """
    size = len(bounds) - 1
    segments = num_segments(bounds, itemsize)

    def rows(index: int) -> tuple[Transfer, ...]:
        return _ring_gather_rows(bounds, segments, index, first_step=0)

    return StepTable("all_gather", "ring", bounds[-1], size, bounds, segments, rows)


@lru_cache(maxsize=512)
def gather_table(count: int, size: int) -> StepTable:
    """Return the table of a gather of `count` elements per rank to group index 0.

    Index 0 receives size - 1 messages in index order; the others send one each.
    """
    bounds = tuple(count * index for index in range(size + 1))

    def rows(index: int) -> tuple[Transfer, ...]:
        if index == 0:
            return tuple(
                Transfer(0, 0, NO_PEER, 0, 0, peer, bounds[peer], bounds[peer + 1], False)
                for peer in range(1, size)
            )
        return (Transfer(0, 0, 0, bounds[index], bounds[index + 1], NO_PEER, 0, 0, False),)

    return StepTable("gather", "direct", count * size, size, bounds, 1, rows)


def _pieces(lo: int, hi: int, segments: int) -> list[tuple[int, int]]:
    cuts = chunk_bounds(hi - lo, segments)
    return [(lo + a, lo + b) for a, b in zip(cuts, cuts[1:], strict=False)]


def _ring_rows(
    bounds: tuple[int, ...],
    segments: int,
    index: int,
    first_step: int,
    first_sent: int,
    combine: bool,
) -> tuple[Transfer, ...]:
    size = len(bounds) - 1
    right, left = (index + 1) % size, (index - 1) % size
    rows = []
    for step in range(size - 1):
        sent, received = (first_sent - step) % size, (first_sent - step - 1) % size
        send_pieces = _pieces(bounds[sent], bounds[sent + 1], segments)
        recv_pieces = _pieces(bounds[received], bounds[received + 1], segments)
        for segment, (send, recv) in enumerate(zip(send_pieces, recv_pieces, strict=True)):
            rows.append(Transfer(first_step + step, segment, right, *send, left, *recv, combine))
    return tuple(rows)


def _ring_reduce_rows(bounds: tuple[int, ...], segments: int, index: int) -> tuple[Transfer, ...]:
    # Chunk r must arrive at rank r in the last of size - 1 steps, so the first one sent is r - 1.
    return _ring_rows(bounds, segments, index, 0, index - 1, True)


def _ring_gather_rows(
    bounds: tuple[int, ...], segments: int, index: int, first_step: int
) -> tuple[Transfer, ...]:
    return _ring_rows(bounds, segments, index, first_step, index, False)


def _recursive_doubling_rows(count: int, size: int, index: int) -> tuple[Transfer, ...]:
    """Exchange whole buffers with partners at distance 1, 2, 4, ...

    When size is no power of two, the first 2 * extra ranks pair up: the odd one folds into the
    even one, sits out, and gets the result back at the end.
    """
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    rows: list[Transfer] = []
    step = 0
    if extra:
        if index < 2 * extra and index % 2:
            rows.append(Transfer(0, 0, index - 1, 0, count, NO_PEER, 0, 0, False))
            last = power.bit_length()
            rows.append(Transfer(last, 0, NO_PEER, 0, 0, index - 1, 0, count, False))
            return tuple(rows)
        if index < 2 * extra:
            rows.append(Transfer(0, 0, NO_PEER, 0, 0, index + 1, 0, count, True))
        step = 1
    position = index // 2 if index < 2 * extra else index - extra
    distance = 1
    while distance < power:
        partner = position ^ distance
        peer = partner * 2 if partner < extra else partner + extra
        rows.append(Transfer(step, 0, peer, 0, count, peer, 0, count, True))
        distance *= 2
        step += 1
    if extra and index < 2 * extra:
        rows.append(Transfer(step, 0, index + 1, 0, count, NO_PEER, 0, 0, False))
    return tuple(rows)


def _halving_doubling_rows(count: int, size: int, index: int) -> tuple[Transfer, ...]:
    """Halve the range with ever nearer partners while adding, then double it back."""
    lo, hi = 0, count
    distance = size // 2
    rows: list[Transfer] = []
    undo: list[tuple[int, int, int, int, int]] = []
    step = 0
    while distance:
        peer = index ^ distance
        middle = lo + (hi - lo) // 2
        keep, give = (
            ((middle, hi), (lo, middle))
            if index & distance
            else (
                (lo, middle),
                (middle, hi),
            )
        )
        rows.append(Transfer(step, 0, peer, *give, peer, *keep, True))
        undo.append((peer, *keep, *give))
        lo, hi = keep
        distance //= 2
        step += 1
    for peer, keep_lo, keep_hi, give_lo, give_hi in reversed(undo):
        rows.append(Transfer(step, 0, peer, keep_lo, keep_hi, peer, give_lo, give_hi, False))
        step += 1
    return tuple(rows)
