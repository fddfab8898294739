"""Activation recompute: keep the inputs of blocks, run each block again in backward (A3).

Backward of a block needs what its forward computed on the way. Instead of keeping that for all
blocks at once, forward keeps what is needed to run them again: block inputs and dropout tickets.
The replay must give the first output bit for bit, or the gradient would belong to another
function, so it is compared. Blocks are pairs of pure functions (`Block`); `mlp_blocks` and
`decoder_blocks` make them from `mlp` and `decoder`, and two functions at the end run a whole loss
and backward either way. Files of weights, the other "checkpoints", do not live here.

Dropout draws are addressed, not drawn in turn: a ticket names a range of the words that
NumPy's Philox generator yields for one key. Whoever holds the ticket gets the same words, in any
order and any number of times, and no generator's state moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mpisim.errors import ConfigError, RecomputeMismatch
from mpisim.reference import decoder, mlp
from mpisim.reference.checks import require_choice, require_int, require_number
from mpisim.reference.mlp import Params

WORDS_PER_COUNTER = 4
"""64-bit words that one step of Philox's counter yields."""


# --- dropout tickets -------------------------------------------------------------------------


@dataclass(frozen=True)
class DropoutTicket:
    """The right to the random words of some rows of one dropout site of one update."""

    key: int
    """Philox key of the update, in 0..2**128-1; see `dropout_key`."""
    first_word: int
    """Where the site's words begin, >= 0."""
    num_rows: int
    """Rows of the whole update, over all microbatches and ranks, >= 0."""
    max_len: int
    """Positions that a row owns, used or not, >= 1."""
    width: int
    """Features per position, >= 1."""
    first_row: int = 0
    """Row of the update that is row 0 of this microbatch, in 0..num_rows."""

    def __post_init__(self):
        if require_int("key", self.key, 0) >= 2**128:
            raise ConfigError(
                f"key must be below 2**128; got {self.key}. Make it with dropout_key."
            )
        require_int("first_word", self.first_word, 0)
        require_int("num_rows", self.num_rows, 0)
        require_int("max_len", self.max_len, 1)
        require_int("width", self.width, 1)
        if require_int("first_row", self.first_row, 0) > self.num_rows:
            raise ConfigError(
                f"first_row must be at most the {self.num_rows} rows of the update; got "
                f"{self.first_row}. Count rows from the start of the update."
            )


Tickets = tuple[DropoutTicket, ...]
"""The tickets of one block, one per dropout site."""


def dropout_key(seed: int, num_updates: int) -> int:
    """Return a Philox key that no other seed and no other update has.

    Parameters
    ----------
    seed : int
        Of the run, in 0..2**64-1.
    num_updates : int
        Updates committed so far, in 0..2**64-1: an update that is skipped and tried again draws
        the same words.

    Returns
    -------
    int
        In 0..2**128-1.

    Raises
    ------
    ConfigError
        A number is out of range.

    Examples
    --------
    >>> dropout_key(5, 0), dropout_key(0, 1) == 2**64
    (5, True)
    """
    for name, number in (("seed", seed), ("num_updates", num_updates)):
        if require_int(name, number, 0) >= 2**64:
            raise ConfigError(f"{name} must be below 2**64; got {number}. Use a smaller number.")
    return num_updates * 2**64 + seed


def issue_dropout_tickets(
    key: int,
    widths: Sequence[int],
    num_rows: int,
    max_len: int = 1,
    first_word: int = 0,
) -> tuple[Tickets, int]:
    """Give every dropout site of an update its own range of words.

    Parameters
    ----------
    key : int
        Philox key of the update, such as `dropout_key` makes.
    widths : sequence of int
        Features per position of each site, in forward order. May be empty.
    num_rows : int
        Rows of the whole update, >= 0.
    max_len : int, default 1
        Positions that a row owns, whether its text fills them or not.
    first_word : int, default 0
        The counter before: where the first range begins.

    Returns
    -------
    tickets : tuple of DropoutTicket, length len(widths)
        Ranges follow each other without gaps, ``num_rows * max_len * width`` words each.
    next_word : int
        The counter after. It depends on the update alone, not on how it is cut into
        microbatches, and drawing, first or again, never moves it.

    Raises
    ------
    ConfigError
        A number is out of range.

    Examples
    --------
    >>> tickets, next_word = issue_dropout_tickets(7, [4] * 6, num_rows=3, max_len=4)
    >>> [ticket.first_word for ticket in tickets], next_word
    ([0, 48, 96, 144, 192, 240], 288)
    """
    tickets = []
    for width in widths:
        ticket = DropoutTicket(key, first_word, num_rows, max_len, width)
        tickets.append(ticket)
        first_word += num_rows * max_len * width
    return tuple(tickets), first_word


def tickets_from_row(tickets: Tickets, first_row: int) -> Tickets:
    """Return the tickets of a microbatch that begins at a row of the update.

    Parameters
    ----------
    tickets : tuple of DropoutTicket
        Those of the update. Not modified.
    first_row : int
        In 0..num_rows.

    Returns
    -------
    tuple of DropoutTicket
        Same ranges, read from that row on.

    Raises
    ------
    ConfigError
        The row is out of range.
    """
    return tuple(replace(ticket, first_row=first_row) for ticket in tickets)


def draw_dropout_words(ticket: DropoutTicket, shape: tuple[int, ...]) -> np.ndarray:
    """Return the random words of a microbatch's elements.

    Parameters
    ----------
    ticket : DropoutTicket
        Not modified, and never used up.
    shape : tuple of int
        (B, T, width) with T <= max_len, or (B, width) for rows of one position.

    Returns
    -------
    ndarray of `shape`, uint64
        Word ``first_word + ((first_row + b) * max_len + t) * width + d`` of the key's stream.
        Words of positions beyond T are passed over, so a row gets the same words however far it
        is padded.

    Raises
    ------
    ConfigError
        The shape does not fit in the ticket's rows, positions or width.
    """
    rows_first = (shape[0], 1, shape[1]) if len(shape) == 2 else tuple(shape)
    left = ticket.num_rows - ticket.first_row
    if (
        len(rows_first) != 3
        or rows_first[0] > left
        or rows_first[1] > ticket.max_len
        or rows_first[2] != ticket.width
    ):
        raise ConfigError(
            f"the shape must fit the ticket's {left} rows, {ticket.max_len} positions and width "
            f"{ticket.width}; got {shape}. Issue tickets for all rows of the update at its longest."
        )
    num_rows, length, width = rows_first
    row_words = ticket.max_len * ticket.width
    start = ticket.first_word + ticket.first_row * row_words
    generator = np.random.Philox(key=ticket.key)
    generator.advance(start // WORDS_PER_COUNTER)
    passed = start % WORDS_PER_COUNTER
    words = generator.random_raw(passed + num_rows * row_words)[passed:]
    return words.reshape(num_rows, ticket.max_len, width)[:, :length].reshape(shape)


def draw_dropout_factors(
    ticket: DropoutTicket, shape: tuple[int, ...], rate: float, dtype: str = "float64"
) -> np.ndarray:
    """Return what dropout multiplies each element by: 0 or ``1 / (1 - rate)``.

    Parameters
    ----------
    ticket, shape
        As in `draw_dropout_words`.
    rate : float
        Probability of 0, in [0, 1).
    dtype : {"float32", "float64"}

    Returns
    -------
    ndarray of `shape` and `dtype`
        An element is kept if its word is below ``floor((1 - rate) * 2**64)``; their mean is 1 over
        many elements. All ones for rate 0. The same for the same ticket, every time.

    Raises
    ------
    ConfigError
        The rate is out of range, or the shape does not fit.

    Examples
    --------
    >>> (ticket,), _ = issue_dropout_tickets(0, [4], num_rows=1)
    >>> first = draw_dropout_factors(ticket, (1, 4), 0.5)
    >>> np.array_equal(first, draw_dropout_factors(ticket, (1, 4), 0.5)), set(first[0].tolist())
    (True, {0.0, 2.0})
    """
    rate = require_number("rate", rate, 0.0, 1.0)
    words = draw_dropout_words(ticket, shape)
    threshold = math.floor((1 - rate) * 2**64)
    # At rate 0 the threshold is 2**64, which is no uint64; every word is below it.
    kept = words < np.uint64(threshold) if threshold < 2**64 else np.ones(shape, bool)
    return np.where(kept, 1 / (1 - rate), 0.0).astype(dtype)


# --- blocks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A differentiable piece of a model as two pure functions; what recompute runs again."""

    name: str
    """For error messages."""
    forward: Callable[[Params, np.ndarray, Tickets], tuple[np.ndarray, tuple[np.ndarray, ...]]]
    """(params, x, tickets) -> (y, saved): a new y, and the tuple of arrays backward needs."""
    backward: Callable[[Params, Any, np.ndarray, Tickets], tuple[np.ndarray, Params]]
    """(params, saved, dy, tickets) -> (dx, gradients of the block's own parameters)."""


def mlp_blocks(num_layers: int, activation: str = "relu", dropout: float = 0.0) -> list[Block]:
    """Return the hidden layers of an MLP as blocks: linear, activation, dropout.

    Parameters
    ----------
    num_layers : int
        L >= 1, with the head, which is not among the blocks.
    activation : {"relu", "tanh", "gelu"}
    dropout : float, default 0.0
        Rate of each block's one site, in [0, 1). At 0 a block takes no tickets.

    Returns
    -------
    list of Block, length num_layers - 1
        Block i saves its input (R, I) and the input of its activation (R, O). Dropout factors are
        drawn again in backward.

    Raises
    ------
    ConfigError
        A number or name is out of range.
    """
    names = mlp.layer_param_names(num_layers)[:-1]
    require_choice("activation", activation, mlp.ACTIVATIONS)
    dropout = require_number("dropout", dropout, 0.0, 1.0)
    activation_forward, activation_backward = mlp.ACTIVATIONS[activation]

    def make_block(weight: str, bias: str) -> Block:
        block_name = weight.partition(".")[0]

        def drop(h, tickets):
            factors = _site_factors(block_name, tickets, 1, dropout, h.shape, h.dtype.name)
            return h if factors is None else h * factors[0]

        def forward(params, x, tickets):
            z = mlp.linear_forward(x, params[weight], params[bias])
            return drop(activation_forward(z), tickets), (x, z)

        def backward(params, saved, dy, tickets):
            x, z = saved
            dz = activation_backward(z, drop(dy, tickets))
            dx, dweight, dbias = mlp.linear_backward(x, params[weight], dz)
            return dx, {weight: dweight, bias: dbias}

        return Block(block_name, forward, backward)

    return [make_block(weight, bias) for weight, bias in names]


def decoder_blocks(
    num_blocks: int,
    starts_BT: np.ndarray,
    settings: decoder.DecoderSettings,
    dropout: float = 0.0,
) -> list[Block]:
    """Return the blocks of a decoder for one batch.

    Parameters
    ----------
    num_blocks : int
        >= 0.
    starts_BT : ndarray of shape (B, T), any integer dtype
        First position of each token's document; part of the data, not of the activations. Kept:
        do not overwrite it.
    settings : decoder.DecoderSettings
    dropout : float, default 0.0
        Rate of each block's two sites (outputs of attention and of feed-forward), in [0, 1). At 0
        a block takes no tickets.

    Returns
    -------
    list of Block, length num_blocks
        Each saves a `decoder.BlockSaved`. Dropout factors are drawn again in backward.

    Raises
    ------
    ConfigError
        A number is out of range.
    """
    num_blocks = require_int("num_blocks", num_blocks, 0)
    dropout = require_number("dropout", dropout, 0.0, 1.0)

    def make_block(name: str) -> Block:
        def forward(params, x, tickets):
            factors = _site_factors(name, tickets, 2, dropout, x.shape, "float64")
            return decoder.decoder_block_forward(params, name, x, starts_BT, settings, factors)

        def backward(params, saved, dy, tickets):
            factors = _site_factors(name, tickets, 2, dropout, dy.shape, "float64")
            return decoder.decoder_block_backward(
                params, name, saved, dy, starts_BT, settings, factors
            )

        return Block(name, forward, backward)

    return [make_block(f"block{index}") for index in range(num_blocks)]


def _site_factors(
    name: str, tickets: Tickets, num_sites: int, rate: float, shape: tuple[int, ...], dtype: str
) -> tuple[np.ndarray, ...] | None:
    """Return the factors of each site of a block; None without dropout."""
    wanted = num_sites if rate else 0
    if len(tickets) != wanted:
        raise ConfigError(
            f"{name} must get one ticket per dropout site; got {len(tickets)} for {wanted} sites "
            f"at rate {rate:g}. Issue them for every block, and none without dropout."
        )
    if not rate:
        return None
    return tuple(draw_dropout_factors(ticket, shape, rate, dtype) for ticket in tickets)


# --- forward, replay, backward ---------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """What forward keeps of one or more consecutive blocks."""

    blocks: tuple[Block, ...]
    tickets: tuple[Tickets, ...]
    """Those of each block: with `blocks` and `x`, the recipe of a replay."""
    x: np.ndarray
    """Input of the first block."""
    y: np.ndarray
    """First output of the last block: the next segment's `x`, or what the head was given."""
    saved: tuple[tuple[np.ndarray, ...], ...] | None
    """What each block saved; None if it was dropped and must be computed again."""


def blocks_forward(
    blocks: Sequence[Block],
    params: Params,
    x: np.ndarray,
    tickets: Sequence[Tickets] | None = None,
    recompute_every: int = 0,
) -> tuple[np.ndarray, list[Segment]]:
    """Run blocks one after the other and keep what backward will need.

    Parameters
    ----------
    blocks : sequence of Block
        May be empty.
    params : dict of str to ndarray
        Not modified.
    x : ndarray of any shape the first block takes
        Not modified, but kept: do not overwrite it before backward.
    tickets : sequence of Tickets, optional
        Those of each block. None: no block has a dropout site.
    recompute_every : int, default 0
        0: keep everything each block saves. k >= 1: keep the input of every k-th block only, and
        run k blocks again at a time.

    Returns
    -------
    y : ndarray
        Output of the last block; `x` itself without blocks.
    segments : list of Segment
        One per block, or one per k blocks (the last may be shorter).

    Raises
    ------
    ConfigError
        A number is out of range, or the tickets are not one tuple per block.
    """
    every = require_int("recompute_every", recompute_every, 0)
    tickets = [()] * len(blocks) if tickets is None else list(tickets)
    if len(tickets) != len(blocks):
        raise ConfigError(
            f"tickets must hold one tuple per block; got {len(tickets)} for {len(blocks)} blocks. "
            f"Pass None to run without dropout."
        )
    segments = []
    for start in range(0, len(blocks), every or 1):
        stop = start + (every or 1)
        some, their_tickets = tuple(blocks[start:stop]), tuple(tickets[start:stop])
        y, saved = _run(some, params, x, their_tickets)
        segments.append(Segment(some, their_tickets, x, y, None if every else saved))
        x = y
    return x, segments


def recompute_block_activations(
    segment: Segment, params: Params
) -> tuple[tuple[np.ndarray, ...], ...]:
    """Run the blocks of a segment again and return what each of them saves.

    Parameters
    ----------
    segment : Segment
        From `blocks_forward`. Not modified: it still keeps what it kept.
    params : dict of str to ndarray
        The parameters that forward used. Not modified.

    Returns
    -------
    tuple of tuple of ndarray
        One entry per block, as forward saved it the first time, bit for bit. Owned by the caller,
        who drops it after the backward pass of these blocks.

    Raises
    ------
    RecomputeMismatch
        The output differs from the first one in shape, dtype or any bit: parameters were updated
        in between, the input was overwritten, tickets are others, or a block is not a pure
        function. -0.0 differs from 0.0; NaN of the same bits are equal.

    Notes
    -----
    Costs one forward of each block. The output of a segment is its successor's input, which is
    kept anyway, so the comparison needs no bytes of its own.
    """
    y, saved = _run(segment.blocks, params, segment.x, segment.tickets)
    if not _same_bits(y, segment.y):
        names = ", ".join(block.name for block in segment.blocks)
        got = f"{y.dtype} {y.shape}"
        if (y.shape, y.dtype) == (segment.y.shape, segment.y.dtype):
            same = [_same_bits(*pair) for pair in zip(y.flat, segment.y.flat, strict=True)]
            got = f"{same.count(False)} of {y.size} elements changed"
        raise RecomputeMismatch(
            f"the replayed output of {names} must equal the first one bit for bit; got {got}. "
            f"Keep parameters and inputs unchanged until backward, and replay with the same "
            f"tickets."
        )
    return saved


def blocks_backward(
    params: Params, segments: Sequence[Segment], dy: np.ndarray
) -> tuple[np.ndarray, Params, int]:
    """Go back through all segments, computing again what was not kept.

    Parameters
    ----------
    params : dict of str to ndarray
        The parameters that forward used. Not modified.
    segments : sequence of Segment
        From `blocks_forward`. Not modified.
    dy : ndarray
        Gradient in the output of the last block. Not modified.

    Returns
    -------
    dx : ndarray
        Gradient in the input of the first block; `dy` itself without blocks.
    gradients : dict of str to ndarray
        Of all parameters of the blocks, the same bits with and without recompute.
    extra_forwards : int
        Block forwards that were run again.

    Raises
    ------
    RecomputeMismatch
        As in `recompute_block_activations`.
    """
    gradients: Params = {}
    extra_forwards = 0
    for segment in reversed(segments):
        saved = segment.saved
        if saved is None:
            saved = recompute_block_activations(segment, params)
            extra_forwards += len(segment.blocks)
        for block, block_saved, tickets in reversed(
            list(zip(segment.blocks, saved, segment.tickets, strict=True))
        ):
            dy, block_gradients = block.backward(params, block_saved, dy, tickets)
            gradients |= block_gradients
    return dy, gradients, extra_forwards


def _run(
    blocks: tuple[Block, ...], params: Params, x: np.ndarray, tickets: tuple[Tickets, ...]
) -> tuple[np.ndarray, tuple[tuple[np.ndarray, ...], ...]]:
    saved = []
    for block, block_tickets in zip(blocks, tickets, strict=True):
        x, block_saved = block.forward(params, x, block_tickets)
        saved.append(block_saved)
    return x, tuple(saved)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


# --- bytes -----------------------------------------------------------------------------------


class KeptBytes(NamedTuple):
    """Bytes of the arrays that forward keeps for backward, each array counted once."""

    values: int
    """Inputs of segments, and the output of the last one, that no context holds."""
    contexts: int
    """What blocks saved, block inputs among it."""

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.values + self.contexts


def measure_kept_bytes(segments: Sequence[Segment]) -> KeptBytes:
    """Add up the ``nbytes`` of what is kept between forward and backward.

    Parameters
    ----------
    segments : sequence of Segment
        From `blocks_forward`. Not modified.

    Returns
    -------
    KeptBytes
        Not counted: parameters, batch data such as `starts`, tickets (a few integers each), and
        whatever embedding, head and loss keep for themselves.
    """
    counted: set[int] = set()

    def count(arrays):
        total = 0
        for array in arrays:
            if id(array) not in counted:
                counted.add(id(array))
                total += array.nbytes
        return total

    contexts = count(
        array for segment in segments for saved in segment.saved or () for array in saved
    )
    values = count(array for segment in segments for array in (segment.x, segment.y))
    return KeptBytes(values, contexts)


class BlockBytes(NamedTuple):
    """Sizes of one block's activations."""

    input: int
    """Of its input."""
    saved: int
    """Of all it saves, its input included."""
    output: int
    """Of its output."""


def mlp_block_bytes(
    num_rows: int, sizes: Sequence[int], dtype: str = "float64"
) -> list[BlockBytes]:
    """Return the sizes of the blocks of `mlp_blocks`, from shapes alone.

    Parameters
    ----------
    num_rows : int
        R of one microbatch, >= 0.
    sizes : sequence of int
        Widths of the MLP from input to output, as in `mlp.init_mlp`.
    dtype : {"float32", "float64"}

    Returns
    -------
    list of BlockBytes, length len(sizes) - 2

    Raises
    ------
    ConfigError
        A number is out of range.

    Examples
    --------
    >>> mlp_block_bytes(2, (3, 5, 1))
    [BlockBytes(input=48, saved=128, output=80)]
    """
    num_rows = require_int("num_rows", num_rows, 0)
    widths = [require_int(f"sizes[{index}]", size, 1) for index, size in enumerate(sizes)]
    itemsize = np.dtype(dtype).itemsize
    rows = [num_rows * width * itemsize for width in widths]
    return [BlockBytes(rows[i], rows[i] + rows[i + 1], rows[i + 1]) for i in range(len(rows) - 2)]


def decoder_block_bytes(
    num_rows: int,
    length: int,
    d_model: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    d_ff: int,
) -> BlockBytes:
    """Return the sizes of one block of `decoder_blocks`, from shapes alone; all float64.

    Parameters
    ----------
    num_rows, length : int
        B and T of one microbatch, >= 0.
    d_model, num_heads, num_kv_heads, head_size, d_ff : int
        D, H, G, K, F, each >= 1.

    Returns
    -------
    BlockBytes
        Saved, per position: four vectors of D, two of H K, two of G K, three of F, and H T
        attention weights.

    Raises
    ------
    ConfigError
        A number is out of range.

    Examples
    --------
    >>> decoder_block_bytes(3, 4, 4, 1, 1, 4, 8)
    BlockBytes(input=384, saved=5760, output=384)
    """
    positions = require_int("num_rows", num_rows, 0) * require_int("length", length, 0)
    d, f = require_int("d_model", d_model, 1), require_int("d_ff", d_ff, 1)
    h, g = require_int("num_heads", num_heads, 1), require_int("num_kv_heads", num_kv_heads, 1)
    k = require_int("head_size", head_size, 1)
    per_position = 4 * d + 2 * h * k + 2 * g * k + 3 * f + h * length
    return BlockBytes(8 * positions * d, 8 * positions * per_position, 8 * positions * d)


class CheckpointingEstimate(NamedTuple):
    """What recompute saves and what it costs."""

    bytes_without: int
    """Kept between forward and backward if nothing is computed again."""
    bytes_with: int
    """Kept with recompute."""
    saved_bytes: int
    """Their difference."""
    extra_forwards: int
    """Block forwards that recompute adds to an update of one microbatch."""
    replay_bytes: int
    """Most that a replay adds while its segment goes back: what its blocks save, without the
    segment's input, which is kept already."""


def estimate_checkpointing_memory_savings(
    blocks: Sequence[BlockBytes], recompute_every: int = 1
) -> CheckpointingEstimate:
    """Predict, from sizes alone, what `measure_kept_bytes` will find with and without recompute.

    Parameters
    ----------
    blocks : sequence of BlockBytes
        One entry per block, from `mlp_block_bytes` or `decoder_block_bytes`. May be empty. The
        output of each must be as large as the input of the next.
    recompute_every : int, default 1
        k >= 1, as in `blocks_forward`.

    Returns
    -------
    CheckpointingEstimate
        Exact, for what `measure_kept_bytes` counts.

    Raises
    ------
    ConfigError
        A number is out of range, or the blocks do not follow each other.

    Notes
    -----
    Without: all that blocks save, and the last output. With: the input of every k-th block, and
    the last output. For n equal blocks the sum of kept and replay bytes is least near
    k = sqrt(n) (Chen et al., 2016).

    Examples
    --------
    >>> estimate_checkpointing_memory_savings([decoder_block_bytes(3, 4, 4, 1, 1, 4, 8)] * 3)
    ... # doctest: +NORMALIZE_WHITESPACE
    CheckpointingEstimate(bytes_without=17664, bytes_with=1536, saved_bytes=16128,
                          extra_forwards=3, replay_bytes=5376)
    """
    every = require_int("recompute_every", recompute_every, 1)
    for index, (block, following) in enumerate(zip(blocks, blocks[1:], strict=False)):
        if block.output != following.input:
            raise ConfigError(
                f"blocks[{index + 1}].input must equal the output of the block before it; got "
                f"{following.input} and {block.output} bytes. List the blocks in forward order."
            )
    if not blocks:
        return CheckpointingEstimate(0, 0, 0, 0, 0)
    last_output = blocks[-1].output
    without = sum(block.saved for block in blocks) + last_output
    kept = sum(block.input for block in blocks[::every]) + last_output
    replay = max(
        sum(block.saved for block in blocks[start : start + every]) - blocks[start].input
        for start in range(0, len(blocks), every)
    )
    return CheckpointingEstimate(without, kept, without - kept, len(blocks), replay)


# --- whole models ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RecomputeResult:
    """One forward and backward, and what it kept and cost."""

    loss: float
    """As the function without recompute returns it."""
    gradients: Params
    """Of all parameters, in their order."""
    kept: KeptBytes
    """Measured when the blocks' forward is done and backward has not begun."""
    block_forwards: int
    """Blocks run the first time."""
    extra_forwards: int
    """Blocks run again; 0 without recompute."""


def mlp_loss_and_gradients_with_recompute(
    params: Params,
    x: np.ndarray,
    y: np.ndarray,
    activation: str = "relu",
    loss: str = "mean_squared_error",
    seed: float = 1.0,
    recompute_every: int = 1,
    dropout: float = 0.0,
    tickets: Tickets = (),
) -> RecomputeResult:
    """Run `mlp.mlp_loss_and_gradients` with recompute of the hidden layers, and dropout.

    Parameters
    ----------
    params, x, y, activation, loss, seed
        As in `mlp.mlp_loss_and_gradients`. Not modified.
    recompute_every : int, default 1
        As in `blocks_forward`; 0 keeps everything.
    dropout : float, default 0.0
        Rate after each hidden layer, in [0, 1).
    tickets : tuple of DropoutTicket
        One per hidden layer if the rate is not 0, else none.

    Returns
    -------
    RecomputeResult
        Loss and gradients have the same bits for every `recompute_every`.

    Raises
    ------
    ConfigError
        Anything does not fit together.
    RecomputeMismatch
        As in `recompute_block_activations`.
    """
    layers = mlp.mlp_layers(params)
    require_choice("loss", loss, mlp.LOSSES)
    loss_forward, loss_backward = mlp.LOSSES[loss]
    blocks = mlp_blocks(len(layers), activation, dropout)
    block_tickets = _tickets_per_block(tickets, len(blocks), 1 if dropout else 0)
    h, segments = blocks_forward(blocks, params, x, block_tickets, recompute_every)
    weight, bias = layers[-1]
    prediction = mlp.linear_forward(h, params[weight], params[bias])
    value = loss_forward(prediction, y)
    kept = measure_kept_bytes(segments)
    dprediction = loss_backward(prediction, y, seed)
    dh, dweight, dbias = mlp.linear_backward(h, params[weight], dprediction)
    _, gradients, extra = blocks_backward(params, segments, dh)
    gradients |= {weight: dweight, bias: dbias}
    return RecomputeResult(
        value, {name: gradients[name] for name in params}, kept, len(blocks), extra
    )


def decoder_loss_and_gradients_with_recompute(
    params: Params,
    tokens: np.ndarray,
    targets: np.ndarray,
    *,
    settings: decoder.DecoderSettings,
    starts: np.ndarray | None = None,
    seed_per_target: float = 1.0,
    recompute_every: int = 1,
    dropout: float = 0.0,
    tickets: Tickets = (),
) -> RecomputeResult:
    """Run `decoder.decoder_loss_and_gradients` with recompute of the blocks, and dropout.

    Parameters
    ----------
    params, tokens, targets, settings, starts, seed_per_target
        As in `decoder.decoder_loss_and_gradients`. Not modified.
    recompute_every : int, default 1
        As in `blocks_forward`; 0 keeps everything.
    dropout : float, default 0.0
        Rate of the two sites of each block, in [0, 1).
    tickets : tuple of DropoutTicket
        Two per block if the rate is not 0, else none; in forward order.

    Returns
    -------
    RecomputeResult
        The loss is the sum over valid targets. Loss and gradients have the same bits for every
        `recompute_every`.

    Raises
    ------
    ConfigError
        Anything does not fit together.
    RecomputeMismatch
        As in `recompute_block_activations`.
    """
    num_blocks = decoder.count_decoder_blocks(params, settings)
    x = decoder.embed_tokens(params, tokens)
    blocks = decoder_blocks(
        num_blocks, decoder.fill_starts(starts, tokens.shape), settings, dropout
    )
    block_tickets = _tickets_per_block(tickets, num_blocks, 2 if dropout else 0)
    h, segments = blocks_forward(blocks, params, x, block_tickets, recompute_every)
    kept = measure_kept_bytes(segments)
    loss_sum, dh, gradients = decoder.head_loss_and_gradients(
        params, h, targets, settings, seed_per_target
    )
    dx, block_gradients, extra = blocks_backward(params, segments, dh)
    gradients = decoder.add_embedding_gradient(gradients | block_gradients, dx, tokens, params)
    return RecomputeResult(
        loss_sum, {name: gradients[name] for name in params}, kept, num_blocks, extra
    )


def _tickets_per_block(tickets: Tickets, num_blocks: int, num_sites: int) -> list[Tickets]:
    """Cut the tickets of a model into those of its blocks."""
    if len(tickets) != num_blocks * num_sites:
        raise ConfigError(
            f"tickets must hold {num_sites} per block for {num_blocks} blocks; got {len(tickets)}. "
            f"Issue one per dropout site, and none without dropout."
        )
    return [
        tuple(tickets[index * num_sites : (index + 1) * num_sites]) for index in range(num_blocks)
    ]
