"""Pages zero-table1 and zero-table2: model states by ZeRO stage, and the largest models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from mpisim.layouts.chunks import chunk_bounds
from mpisim.layouts.steps import all_gather_table, all_reduce_table, reduce_scatter_table
from mpisim.memory.formulas import model_state_bytes
from mpisim.memory.published import zero_largest_model
from mpisim.reproduce.rounding import EXACT, RULE, parse_printed
from mpisim.reproduce.rows import CONTEXT, Page

Read = Callable[[str], Mapping[str, Any]]

STAGES = (0, 1, 2, 3)
_SIZES = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000}
_RANKS = (1, 4, 16, 64, 256, 1024)

_MEMORY_BYTES = 32_000_000_000
_SHARED_BY = 64
_MODEL_PARALLEL = (1, 2, 4, 8, 16)
_HUNDRED_MILLION = 10**8

# Which collectives of the whole gradient or parameter buffer a step makes, one microbatch.
_RINGS = {
    0: ("all_reduce",),
    1: ("reduce_scatter", "all_gather"),
    2: ("reduce_scatter", "all_gather"),
    3: ("all_gather", "all_gather", "reduce_scatter"),
}


def paper_state_bytes(num_params: int, ranks: int, zero: int) -> int:
    """Return what our formula says of ZeRO's run: Adam, 16-bit weights and gradients, masters."""
    return sum(
        model_state_bytes(
            num_params, ranks, zero, compute="float16", reduce="float16", param="float32",
            has_master=True, optimizer_arrays=2,
        ).values()
    )  # fmt: skip


def ring_elements(num_params: int, ranks: int, zero: int) -> int:
    """Return the elements that all ranks send in one step, read off the step tables."""
    tables = {
        "all_reduce": all_reduce_table(num_params, ranks, 4, "ring"),
        "reduce_scatter": reduce_scatter_table(num_params, ranks, 4),
        "all_gather": all_gather_table(chunk_bounds(num_params, ranks), 4),
    }
    return sum(tables[name].sent_bytes(index, 1) for name in _RINGS[zero] for index in range(ranks))


def build_table1(read: Read) -> Page:
    """Make the page of ZeRO's Table 1 and Figure 1."""
    oracle = read("zero_table1")
    page = Page(
        "zero-table1",
        "ZeRO, Table 1 and Figure 1: model states per rank",
        f"In {oracle['unit']}. Source: {oracle['source']}. GB are 1e9 "
        f"bytes here, not GiB: 31.4 GB are 29.2 GiB. Ours: model_state_bytes of the worst rank, "
        f"with its real shard, 16-bit gradients. Elements sent are read off our ring tables for 4 "
        f"ranks, summed over ranks and divided by N - 1.",
        f"{RULE}; formulas: {EXACT}",
    )
    table = oracle["table"]
    rows = {row["dp"]: row for row in table["rows"]}
    for ranks in _RANKS:
        for size, num_params in _SIZES.items():
            for zero in STAGES[1:]:
                cell = rows[ranks][size][table["columns"].index(f"zero{zero}")]
                ours = Fraction(paper_state_bytes(num_params, ranks, zero), 10**9)
                page.printed(f"{size} on {ranks}, zero {zero}", cell, ours, table["provenance"])
    figure = oracle["figure1"]
    for zero in STAGES:
        ours = Fraction(paper_state_bytes(_SIZES["7.5B"], 64, zero), 10**9)
        page.printed(f"figure 1, zero {zero}", figure[f"zero{zero}"], ours, figure["provenance"])
    for zero in STAGES:
        page.formula(
            f"formula, zero {zero}, in bytes", oracle["formulas"][f"zero{zero}"],
            {"Psi": _SIZES["7.5B"], "N": 64, "K": 12}, paper_state_bytes(_SIZES["7.5B"], 64, zero),
            oracle["formulas"]["provenance"],
        )  # fmt: skip
    for zero in STAGES:
        page.formula(
            f"elements sent, zero {zero}", oracle["sent_elements"][f"zero{zero}"], {"Psi": 1001},
            Fraction(ring_elements(1001, 4, zero), 3), oracle["sent_elements"]["provenance"],
        )  # fmt: skip
    page.flaws = [
        "the 128B and 1T columns are truncated (4187.5 is 4187, 513.5 is 513), the 7.5B column is "
        "rounded (41.25 is 41.3): two rules in one table",
        "elements sent are without the ring's factor (N - 1) / N, and for one microbatch: with M "
        "of them our stages 2 and 3 send M + 1 and 3 M times the parameters",
        "no temporary buffer, gathered layer or activation is in the table",
    ]
    return page


def build_table2(read: Read) -> Page:
    """Make the page of ZeRO's Table 2."""
    oracle = read("zero_table2")
    page = Page(
        "zero-table2",
        "ZeRO, Table 2: the largest model that fits",
        f"The {oracle['unit']}, shared by 64 data parallel ranks in each of mp groups. "
        f"Source: {oracle['source']}. GB are 1e9 bytes. Ours: the first row from the formula; the "
        f"others are mp times the first row as it is printed, to 0.1e9 parameters, because the "
        f"paper multiplies what it has rounded. Exact rows below are mp times the formula.",
        RULE,
    )
    rows = {row["mp"]: row for row in oracle["rows"]}
    largest = {zero: zero_largest_model(_MEMORY_BYTES, _SHARED_BY, zero) for zero in STAGES}
    for mp in _MODEL_PARALLEL:
        for zero in STAGES:
            tenths = (largest[zero] / _HUNDRED_MILLION + Fraction(1, 2)) // 1
            ours = largest[zero] if mp == 1 else Fraction(mp * tenths * _HUNDRED_MILLION)
            page.printed(
                f"mp {mp}, zero {zero}", rows[mp][f"zero{zero}"], ours, oracle["provenance"]
            )
    for mp in _MODEL_PARALLEL[1:]:
        for zero in STAGES:
            published = parse_printed(rows[mp][f"zero{zero}"])
            page.aside(f"exact, mp {mp}, zero {zero}", published, mp * largest[zero], CONTEXT)
    page.flaws = [
        "rows with mp > 1 multiply the rounded first row: 32e9 / (4 + 12 / 64) is 7.64e9, so mp 4 "
        "is 30.6e9 and not 30.4e9, mp 16 is 122.3e9 and not 121.6e9",
        "cells in T have one significant digit: 0.5T is 512e9, 1T is 1024e9, 2T is 2048e9",
        "the whole 32 GB are given to model states: nothing is left for activations",
    ]
    return page
