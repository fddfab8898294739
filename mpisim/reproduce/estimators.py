"""Page estimators: one job through seven published estimators, and what each forgets."""

from __future__ import annotations

from fractions import Fraction

from mpisim.memory.formulas import model_state_bytes
from mpisim.memory.published import ESTIMATORS, deepspeed_zero3_bytes, scaled_weight_bytes
from mpisim.reproduce.rounding import RULE
from mpisim.reproduce.rows import CONTEXT, DERIVED, MEASURED, NAMED, Page, Row
from mpisim.reproduce.zero import Read, paper_state_bytes

NUM_PARAMS = 7_500_000_000
RANKS = 64
STAGES = (1, 2, 3)

# The parts of `published.Estimator` by the categories of our ledger.
_OUR_PARTS = {
    "weights": "params",
    "main_grads": "grads",
    "master": "master_params",
    "moments": "optimizer",
}
_NAMES = {
    "weights": "16-bit weights",
    "grads": "16-bit gradients",
    "main_grads": "float32 gradients",
    "master": "float32 master copy",
    "moments": "moments of Adam",
}
# A block of a 7.5e9-parameter decoder (36 blocks, width 4096): 12 h^2 + 13 h.
_BLOCK_PARAMS = 12 * 4096**2 + 13 * 4096

# What huggingface/nanotron#261 trained: parameters, ranks.
_NANOTRON_PARAMS, _NANOTRON_RANKS = 1_040_000_000, 24
_NANOTRON_MIB = ("19909.64", "6517.47")

# Hundredths of a byte that a weight takes, scales of its block included.
_WEIGHT_BYTES = {"bfloat16": 200, "int8": 106, "nf4": 52}
_GB, _GIB, _MIB = 10**9, 1 << 30, 1 << 20


def our_state_bytes(num_params: int, ranks: int, zero: int) -> dict[str, int]:
    """Return the bytes by category of a run of ours that sums gradients in float32."""
    return model_state_bytes(
        num_params, ranks, zero, compute="bfloat16", reduce="float32", param="float32",
        has_master=True, optimizer_arrays=2,
    )  # fmt: skip


def gaps(estimate: dict[str, Fraction], ours: dict[str, int]) -> dict[str, Fraction]:
    """Return named bytes that an estimate has beyond ours (negative: forgets), without zeros."""
    have = {part: Fraction(ours[category]) for part, category in _OUR_PARTS.items()}
    parts = {part: estimate.get(part, Fraction(0)) - have.get(part, Fraction(0)) for part in _NAMES}
    return {part: value for part, value in parts.items() if value}


def build(read: Read) -> Page:
    """Make the page."""
    oracle = read("estimators")
    cells = oracle["model_states"]
    page = Page(
        "estimators",
        "Seven estimators of one job: 7.5e9 parameters, 64 ranks, mixed-precision Adam",
        f"Model states: {cells['unit']}, not GiB. First each estimator as its source writes it, "
        f"against the figures that were worked out from it (derived). Then each beside "
        f"our run with float32 gradients (model_state_bytes, worst rank), and the bytes that "
        f"make the difference, by name. Sources: "
        f"{oracle['source']}; each one's in memory.published.",
        f"{RULE}; a gap is ok if its named bytes sum to it, to the byte",
    )
    for estimator in ESTIMATORS:
        for zero in STAGES:
            total = estimator.total(NUM_PARAMS, RANKS, zero)
            if total is not None:
                page.printed(
                    f"{estimator.name}, zero {zero}", cells[estimator.name][f"zero{zero}"],
                    total / _GB, cells["provenance"],
                )  # fmt: skip
    for zero in STAGES:
        ours = sum(our_state_bytes(NUM_PARAMS, RANKS, zero).values())
        page.aside(f"ours, zero {zero}, float32 gradients", None, Fraction(ours, _GB), CONTEXT)
        ours = paper_state_bytes(NUM_PARAMS, RANKS, zero)
        page.aside(f"ours, zero {zero}, 16-bit gradients", None, Fraction(ours, _GB), CONTEXT)
    for estimator in ESTIMATORS:
        for zero in STAGES:
            total = estimator.total(NUM_PARAMS, RANKS, zero)
            if total is None:
                continue
            categories = our_state_bytes(NUM_PARAMS, RANKS, zero)
            ours = sum(categories.values())
            named = gaps(estimator.parts(NUM_PARAMS, RANKS, zero), categories)
            closed = sum(named.values()) == total - ours
            page.rows.append(
                Row(
                    f"gap of {estimator.name}, zero {zero}", total / _GB, Fraction(ours, _GB),
                    NAMED, closed, (ours - total) / _GB,
                )
            )  # fmt: skip
            for part, value in named.items():
                item = f"  it {'counts' if value > 0 else 'forgets'} {_NAMES[part]}"
                page.rows.append(Row(item, None, None, NAMED, None, -value / _GB))
    block = Fraction(2 * _BLOCK_PARAMS, _GB)
    page.aside("zero 3: a gathered block, in none above", None, block, CONTEXT)
    largest = (deepspeed_zero3_bytes(0, RANKS, _BLOCK_PARAMS)) / _GB
    page.aside("  DeepSpeed code adds 4 bytes of it", largest, block, CONTEXT)
    _add_measured(page, oracle["nanotron"])
    weights = oracle["weights_32B"]
    for dtype, hundredths in _WEIGHT_BYTES.items():
        ours = scaled_weight_bytes(32_000_000_000, hundredths) / _GIB
        page.printed(f"32e9 weights, {dtype}, GiB", weights[dtype], ours, weights["provenance"])
    page.flaws = [
        "all seven leave out communication buckets and the scratch of a ring; they are "
        "min(bucket, model) and may be more than all the rest of a small model",
        "stage 1 of Megatron, EleutherAI and llm-analysis is ours to the byte; ZeRO's paper is "
        "ours with 16-bit gradients",
        "DeepSpeed's documentation and code disagree: the text keeps 16-bit gradients unsharded",
        "all divide by the ranks exactly; a real shard is rounded up (here 7.5e9 / 64 is whole)",
        "nanotron holds 2.07 bytes a parameter more than our form without ZeRO and 0.07 with "
        "ZeRO-1: 2 fit 16-bit gradients that stay beside the float32 ones; 0.07 (about 70 MiB) no "
        "form names",
        "the weights of 32e9 parameters are from bytes rounded first: 1.06 is 1.0625 (8 bits, one "
        "float32 scale for 64), 0.52 is 0.516 (4 bits, scales quantized twice)",
    ]
    return page


def _add_measured(page: Page, cells: dict) -> None:
    """Show a measurement of others beside the formula: memory in use, not a model of it."""
    for zero, per_param in enumerate(cells["bytes_per_param"]):
        ours = sum(our_state_bytes(_NANOTRON_PARAMS, _NANOTRON_RANKS, zero).values())
        measured = Fraction(cells[f"zero{zero}"])
        page.aside(f"nanotron, zero {zero}, MiB in use", measured, Fraction(ours, _MIB), MEASURED)
        page.aside(
            f"nanotron, zero {zero}, bytes a parameter", Fraction(per_param),
            Fraction(ours, _NANOTRON_PARAMS), MEASURED,
        )  # fmt: skip
        page.printed(
            f"nanotron, zero {zero}, MiB over its parameters", per_param,
            Fraction(_NANOTRON_MIB[zero]) * _MIB / _NANOTRON_PARAMS, DERIVED,
        )  # fmt: skip
