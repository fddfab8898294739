"""Four memory techniques under one budget, each taken away alone: what fits, at what price.

Run by `make memory-ablation`, which puts experiments/ and plots/ on the module path.
"""

from __future__ import annotations

from common import MEMORY_COLOURS, VERMILION, heading
from variants import EXPERIMENTS, Finished, Variant, run_variants, table, write

from mpisim.config import load_config
from mpisim.layouts.metrics import MEMORY_CATEGORIES
from mpisim.plan.ops import Recompute
from mpisim.train.setup import Setup
from mpisim.units import format_bytes

BUDGET = 16 << 20
TECHNIQUES = {
    "recompute": "memory.recompute=full",
    "16-bit values": "precision.compute=bfloat16",
    "ZeRO-3": "parallel.zero=3",
    "accumulation": "train.num_microbatches=8",
}
VARIANTS = (
    Variant("all", "all four", tuple(TECHNIQUES.values())),
    *(
        Variant(f"without-{number}", f"without {name}",
                tuple(value for other, value in TECHNIQUES.items() if other != name))
        for number, name in enumerate(TECHNIQUES, start=1)
    ),
    Variant("none", "none of them"),
)  # fmt: skip


def recomputed_flops(run: Finished) -> int:
    """Return the floating-point operations that the replays of one step take, all ranks."""
    config = load_config(
        EXPERIMENTS / "memory-ablation" / "memory-ablation.toml", list(run.variant.changes)
    )
    setup = Setup(config, run.variant.ranks)
    plan, total = setup.full_plan(), 0
    for rank, ops in enumerate(plan.ranks):
        for op in ops:
            if isinstance(op, Recompute):
                blocks = {block.name: block for block in setup.specs(plan.rows[rank][op.micro])}
                total += blocks[op.block].forward_flops
    return total


def main() -> None:
    """Train, compare, write."""
    runs = run_variants("memory-ablation", VARIANTS)
    rows = []
    for run in runs:
        peak, predicted = run.peak()
        fullest = max(run.summary["ranks"], key=lambda entry: entry["memory"]["peak_total"])
        sent = sum(
            run.steps[-1]["ranks"][f"dp_{name}_sent_bytes"][2] * run.variant.ranks
            for name in ("all_reduce", "reduce_scatter", "all_gather")
        )
        rows.append(
            {
                "variant": run.variant.label,
                "peak_bytes": peak,
                "predicted_peak_bytes": predicted,
                "at_peak": fullest["memory"]["at_peak"],
                "budget_bytes": BUDGET,
                "fits": predicted <= BUDGET,
                "sent_bytes": round(sent),
                "recomputed_flops": recomputed_flops(run),
                "median_step_s": run.median_step_s,
                "last_loss": run.losses[-1],
            }
        )
    fastest = min(row["median_step_s"] for row in rows)
    text = table(
        rows,
        {
            "techniques": lambda r: r["variant"],
            "peak, bytes": lambda r: f"{r['peak_bytes']:,}",
            "predicted": lambda r: f"{r['predicted_peak_bytes']:,}",
            f"fits {format_bytes(BUDGET)}": lambda r: "yes" if r["fits"] else "no",
            "sent a step, bytes": lambda r: f"{r['sent_bytes']:,}",
            "recomputed, Mflop": lambda r: f"{r['recomputed_flops'] / 1e6:,.0f}",
            "step, ms": lambda r: f"{r['median_step_s'] * 1e3:.0f}",
            "step time": lambda r: f"{r['median_step_s'] / fastest:.2f}x",
            "last loss": lambda r: f"{r['last_loss']:.4f}",
        },
    )

    def draw(fig) -> None:
        fig.set_size_inches(11, 4.4)
        ax = fig.subplots()
        names = [row["variant"] for row in rows]
        left = [0.0] * len(rows)
        for category in (*MEMORY_COLOURS, *set(MEMORY_CATEGORIES) - set(MEMORY_COLOURS)):
            widths = [row["at_peak"].get(category, 0) / 2**20 for row in rows]
            if any(widths):
                ax.barh(names, widths, left=left, label=category,
                        color=MEMORY_COLOURS.get(category))  # fmt: skip
            left = [a + b for a, b in zip(left, widths, strict=True)]
        ax.axvline(BUDGET / 2**20, color=VERMILION, linewidth=2,
                   label=f"budget {format_bytes(BUDGET)}")  # fmt: skip
        for y, row in enumerate(rows):
            ax.text(row["peak_bytes"] / 2**20, y, f" {row['peak_bytes'] / 2**20:.1f} MiB",
                    va="center")  # fmt: skip
        ax.invert_yaxis()
        ax.set_xlabel("bytes of the fullest rank at its peak (MiB)")
        ax.set_xlim(right=1.12 * max(row["peak_bytes"] for row in rows) / 2**20)
        fig.legend(loc="outside lower center", ncols=5)
        fitting = sum(row["fits"] for row in rows)
        heading(
            fig, "Memory techniques taken away one at a time (2 ranks)",
            f"{fitting} of {len(rows)} layouts fit; measured and predicted peaks differ by "
            f"{sum(abs(r['peak_bytes'] - r['predicted_peak_bytes']) for r in rows)} bytes",
        )  # fmt: skip

    write("memory-ablation", rows, text, draw)


if __name__ == "__main__":
    main()
