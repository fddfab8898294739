"""Collectives that we do not run, as lists of sends: enough to count their messages and bytes.

A send is (round, sender, receiver, elements). Those that we run are counted on their own step
tables; these four stand beside them so that a page need not leave a published row out.
"""

from __future__ import annotations

Sends = list[tuple[int, int, int, int]]


def pairwise_all_to_all(count: int, size: int) -> Sends:
    """Return the sends of an all-to-all: in round k every rank sends a chunk to rank + k."""
    return [
        (k - 1, rank, (rank + k) % size, count // size)
        for k in range(1, size)
        for rank in range(size)
    ]


def chain_broadcast(count: int, size: int) -> Sends:
    """Return the sends of a broadcast along a chain; its mirror image is a reduce."""
    return [(rank, rank, rank + 1, count) for rank in range(size - 1)]


def binomial_broadcast(count: int, size: int) -> Sends:
    """Return the sends of a broadcast in which all who have the data send it, round by round."""
    sends, having, turn = [], 1, 0
    while having < size:
        sends += [(turn, rank, rank + having, count) for rank in range(min(having, size - having))]
        having, turn = min(size, 2 * having), turn + 1
    return sends


def bruck_all_gather(count: int, size: int) -> Sends:
    """Return the sends of Bruck's all-gather: what a rank has doubles until it has all chunks."""
    sends, having, turn = [], 1, 0
    while having < size:
        chunks = min(having, size - having)
        sends += [
            (turn, rank, (rank - having) % size, chunks * (count // size)) for rank in range(size)
        ]
        having, turn = having + chunks, turn + 1
    return sends


def busiest(sends: Sends) -> int:
    """Return the most elements that one rank sends, or receives."""
    totals: dict[tuple[str, int], int] = {}
    for _, sender, receiver, elements in sends:
        for key in (("sent", sender), ("received", receiver)):
            totals[key] = totals.get(key, 0) + elements
    return max(totals.values(), default=0)


def critical_path(sends: Sends) -> tuple[int, int]:
    """Return rounds, and the elements of the largest send of each round in sum."""
    longest: dict[int, int] = {}
    for turn, _, _, elements in sends:
        longest[turn] = max(longest.get(turn, 0), elements)
    return len(longest), sum(longest.values())
