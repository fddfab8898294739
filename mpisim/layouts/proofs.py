"""Proves that the rows of an all-reduce add up: of a user's, before any message is sent."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpisim.errors import ConfigError

if TYPE_CHECKING:
    from mpisim.layouts.steps import Transfer

_NO_PEER = -1


def prove_all_reduce(name: str, count: int, ranks: Sequence[Sequence[Transfer]]) -> None:
    """Run the rows of all ranks with numbers of addends in place of values.

    Parameters
    ----------
    name : str
        Of the algorithm, for the error.
    count : int
        Elements of the buffer.
    ranks : sequence of sequence of Transfer
        The rows of each rank.

    Raises
    ------
    ConfigError
        A row is none, a send has no receive of its length, ranks wait in a circle, or at the end
        some element on some rank is not the sum of each rank's own once.

    Notes
    -----
    The buffer is cut at every border of every slice; a piece on a rank is a tuple: how often each
    rank's value is in it. A row ends when what it receives was sent.
    """
    size = len(ranks)

    def refuse(rank: int, problem: str) -> ConfigError:
        return ConfigError(
            f"rows of all-reduce {name!r} must add every rank's values once, on every rank; got "
            f"{problem} on rank {rank} of {size} with {count} elements. Correct its function."
        )

    for rank, rows in enumerate(ranks):
        for row in rows:
            for peer, lo, hi in (
                (row.send_to, row.send_lo, row.send_hi),
                (row.recv_from, row.recv_lo, row.recv_hi),
            ):
                right = peer == _NO_PEER or (0 <= peer < size and peer != rank)
                if not right or not 0 <= lo <= hi <= count:
                    raise refuse(rank, f"the row {row}")
    cuts = sorted(
        {0, count}
        | {
            border
            for rows in ranks
            for row in rows
            for border in (row.send_lo, row.send_hi, row.recv_lo, row.recv_hi)
        }
    )
    place = {border: number for number, border in enumerate(cuts)}
    own = [tuple(int(rank == other) for other in range(size)) for rank in range(size)]
    held = [[own[rank]] * (len(cuts) - 1) for rank in range(size)]
    sent: dict[tuple[int, int], deque] = defaultdict(deque)
    at, posted = [0] * size, [False] * size
    progressed = True
    while progressed:
        progressed = False
        for rank, rows in enumerate(ranks):
            while at[rank] < len(rows):
                row = rows[at[rank]]
                if not posted[rank]:
                    posted[rank] = progressed = True
                    if row.send_to != _NO_PEER:
                        values = held[rank][place[row.send_lo] : place[row.send_hi]]
                        sent[rank, row.send_to].append((row.send_hi - row.send_lo, values))
                if row.recv_from != _NO_PEER:
                    queue = sent[row.recv_from, rank]
                    if not queue:
                        break
                    length, values = queue.popleft()
                    lo, hi = place[row.recv_lo], place[row.recv_hi]
                    if length != row.recv_hi - row.recv_lo or len(values) != hi - lo:
                        raise refuse(rank, f"{length} elements from rank {row.recv_from} for {row}")
                    if row.combine:
                        pairs = zip(held[rank][lo:hi], values, strict=True)
                        values = [
                            tuple(map(sum, zip(mine, theirs, strict=True)))
                            for mine, theirs in pairs
                        ]
                    held[rank][lo:hi] = values
                at[rank] += 1
                posted[rank] = False
                progressed = True
    for rank, rows in enumerate(ranks):
        if at[rank] < len(rows):
            raise refuse(rank, f"a wait for ever in {rows[at[rank]]}")
    for (source, dest), queue in sent.items():
        if queue:
            raise refuse(source, f"a send to rank {dest} that is not received")
    whole = (1,) * size
    for rank, pieces in enumerate(held):
        for number, piece in enumerate(pieces):
            if piece != whole and cuts[number] < cuts[number + 1]:
                raise refuse(
                    rank, f"elements {cuts[number]} to {cuts[number + 1] - 1} with addends {piece}"
                )
