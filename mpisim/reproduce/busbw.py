"""Page busbw: factors of bus bandwidth and terms of cost, read off our step tables."""

from __future__ import annotations

from fractions import Fraction

from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.steps import (
    StepTable,
    all_gather_table,
    all_reduce_table,
    reduce_scatter_table,
)
from mpisim.reproduce.rounding import EXACT
from mpisim.reproduce.rows import Page
from mpisim.reproduce.textbook import (
    binomial_broadcast,
    bruck_all_gather,
    busiest,
    chain_broadcast,
    critical_path,
    pairwise_all_to_all,
)
from mpisim.reproduce.zero import Read

RANKS = (2, 3, 4, 8)
_COUNT = 2400  # elements that all of RANKS divide
_COST_RANKS = 8
_ITEM_BYTES = 8


def table_factor(table: StepTable) -> Fraction:
    """Return the bytes of all ranks over ranks times size; 0 for one rank."""
    total = sum(table.sent_bytes(index, 1) for index in range(table.size))
    return Fraction(total, table.size * table.count)


def table_cost(table: StepTable) -> dict[str, Fraction]:
    """Return the terms of the busiest rank: messages in a row, sent and added shares."""
    rows = [table.transfers(index) for index in range(table.size)]
    return {
        "alpha": Fraction(max(len({row.step for row in own}) for own in rows)),
        "beta": Fraction(max(sum(row.send_count for row in own) for own in rows), table.count),
        "gamma": Fraction(
            max(sum(row.recv_count for row in own if row.combine) for own in rows), table.count
        ),
    }


def factor(collective: str, n: int) -> Fraction:
    """Return the share of the buffer that a rank moves in `collective` over `n` ranks."""
    if collective == "all_reduce":
        return table_factor(all_reduce_table(_COUNT, n, _ITEM_BYTES, "ring"))
    if collective == "reduce_scatter":
        return table_factor(reduce_scatter_table(_COUNT, n, _ITEM_BYTES))
    if collective == "all_gather":
        return table_factor(all_gather_table(chunk_bounds(_COUNT, n), _ITEM_BYTES))
    sends = (pairwise_all_to_all if collective == "all_to_all" else chain_broadcast)(_COUNT, n)
    return Fraction(busiest(sends), _COUNT)


def costs(p: int) -> dict[str, dict[str, Fraction]]:
    """Return the terms of each algorithm over `p` ranks, a power of two."""
    halving = all_reduce_table(_COUNT, p, _ITEM_BYTES, "halving_doubling")
    first_half = StepTable(
        "reduce_scatter", "recursive_halving", _COUNT, p, halving.bounds, 1,
        lambda index: tuple(row for row in halving.transfers(index) if row.combine),
    )  # fmt: skip

    def counted(sends: list) -> dict[str, Fraction]:
        rounds, elements = critical_path(sends)
        return {"alpha": Fraction(rounds), "beta": Fraction(elements, _COUNT)}

    return {
        "ring_all_reduce": table_cost(all_reduce_table(_COUNT, p, _ITEM_BYTES, "ring")),
        "recursive_doubling": table_cost(
            all_reduce_table(_COUNT, p, _ITEM_BYTES, "recursive_doubling")
        ),
        "rabenseifner": table_cost(halving),
        "ring_all_gather": table_cost(all_gather_table(chunk_bounds(_COUNT, p), _ITEM_BYTES)),
        "recursive_halving_reduce_scatter": table_cost(first_half),
        "bruck_all_gather": counted(bruck_all_gather(_COUNT, p)),
        "binomial_broadcast": counted(binomial_broadcast(_COUNT, p)),
    }


def build(read: Read) -> Page:
    """Make the page."""
    oracle = read("collectives")
    page = Page(
        "busbw",
        "Bus bandwidth and cost of collectives",
        f"Bus bandwidth is algorithm bandwidth (size over time; size is the whole buffer: total "
        f"output of an all-gather, total input of a reduce-scatter) times a factor without unit. "
        f"Source: {oracle['source']}. Ours: bytes that all ranks send by our step tables over "
        f"n * size. All-to-all, broadcast and reduce, Bruck's and the binomial algorithm are none "
        f"of ours: their sends are listed on the spot and the busiest rank is counted. Cost over "
        f"{_COST_RANKS} ranks: alpha counts messages in a row, beta the buffers a rank sends, "
        f"gamma those it adds.",
        EXACT,
    )
    factors = oracle["busbw_factor"]
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
                       "reduce"):  # fmt: skip
        for n in RANKS:
            page.formula(
                f"factor, {collective}, n = {n}", factors[collective], {"n": n},
                factor(collective, n), factors["provenance"],
            )  # fmt: skip
    ring = oracle["ring_all_reduce"]
    table = all_reduce_table(10, 4, _ITEM_BYTES, "ring")
    sizes = {"p": 4, "n": 10, "itemsize": _ITEM_BYTES}
    page.formula(
        "ring all_reduce, messages of a rank", ring["messages_of_a_rank"], sizes,
        table.sent_messages(0), ring["provenance"],
    )  # fmt: skip
    page.formula(
        "ring all_reduce of 10, bytes of all ranks", ring["bytes_of_all_ranks"], sizes,
        sum(table.sent_bytes(index, _ITEM_BYTES) for index in range(4)), ring["provenance"],
    )  # fmt: skip
    for algorithm, terms in costs(_COST_RANKS).items():
        for term, text in oracle["cost"][algorithm].items():
            page.formula(
                f"cost, {algorithm}, {term}", text, {"p": _COST_RANKS}, terms[term],
                oracle["cost"]["provenance"],
            )  # fmt: skip
    _add_derived(page, oracle)
    page.flaws = [
        "a factor holds where the ranks divide the buffer: with 10 elements over 4 ranks one rank "
        "sends 112 bytes and another 128, and the busiest one sets the time; only the total is "
        "always 2 (n - 1) times the buffer",
        "nccl-tests' factor of broadcast and reduce is that of the root; the mean over ranks of a "
        "chain is (n - 1) / n",
        "bucket messages are those of 6 collectives; 5632 elements in buckets of 128 would be 44, "
        "so the published size of a bucket is no number of elements",
    ]
    return page


def _add_derived(page: Page, oracle: dict) -> None:
    uneven = oracle["uneven"]
    for count in (10, 2):
        table = all_reduce_table(count, 4, _ITEM_BYTES, "ring")
        for index in range(4):
            page.printed(
                f"ring all_reduce of {count} float64, bytes of rank {index}",
                uneven[str(count)][index], table.sent_bytes(index, _ITEM_BYTES),
                uneven["provenance"],
            )  # fmt: skip
    worked = oracle["worked"]
    for name, share in (
        ("all_reduce", factor("all_reduce", 4)),
        ("all_gather", factor("all_gather", 4)),
        ("one rank", factor("all_reduce", 1)),
    ):
        algbw = Fraction(10**9) / Fraction(1, 100) / 10**9
        for what, cell, ours in zip(
            ("algbw", "busbw"), worked[name], (algbw, algbw * share), strict=True
        ):
            page.printed(f"1 GB in 0.01 s, {name}, {what}, GB/s", cell, ours, worked["provenance"])
    buckets = oracle["buckets"]
    for collectives in (32, 6):
        tables = _split(5632, collectives)
        page.printed(
            f"{collectives} collectives over 8 ranks, messages",
            buckets[f"messages_of_{collectives}"],
            sum(table.sent_messages(index) for table in tables for index in range(8)),
            buckets["provenance"],
        )  # fmt: skip
    page.printed(
        "elements that they move", buckets["moved_elements"],
        sum(table.sent_bytes(index, 1) for table in _split(5632, 6) for index in range(8)),
        buckets["provenance"],
    )  # fmt: skip


def _split(count: int, collectives: int) -> list[StepTable]:
    cuts = chunk_bounds(count, collectives)
    return [all_reduce_table(hi - lo, 8, 4, "ring") for lo, hi in zip(cuts, cuts[1:], strict=False)]
