"""All to all: an all-reduce of your own. Every rank talks to every other one, nobody forwards.

Each rank first collects its own chunk from all the others and adds it up, then sends the sum to all
of them: 2 (P - 1) messages and the bytes of a ring. In a ring a message can only leave when the one
before it has arrived; here all of a half could leave at once. Replicas get equal bits, because each
chunk is added up by one rank, in one order.
"""

from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.steps import Transfer, register_all_reduce


def rows(count, size, index):
    """Return the transfers of rank `index`: `size` - 1 that add, then as many that copy."""
    bounds = chunk_bounds(count, size)
    chunks = list(zip(bounds, bounds[1:], strict=False))
    table = []
    for step in range(1, size):
        to, source = (index + step) % size, (index - step) % size
        table.append(Transfer(step - 1, 0, to, *chunks[to], source, *chunks[index], True))
    for step in range(1, size):
        to, source = (index + step) % size, (index - step) % size
        last = size + step - 2
        table.append(Transfer(last, 0, to, *chunks[index], source, *chunks[source], False))
    return table


register_all_reduce("all-to-all", rows)
