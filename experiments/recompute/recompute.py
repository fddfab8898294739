"""What backward keeps and what it computes again: bytes and time, beside the estimate.

Usage: python experiments/recompute/recompute.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import MEASURED, PREDICTED, heading
from variants import Finished, Variant, run_variants, table, write

from mpisim.config import load_config
from mpisim.plan.ops import Backward, Forward, Recompute
from mpisim.train.setup import Setup

MODES = (
    ("none", ("memory.recompute=none",)),
    ("selective", ("memory.recompute=selective",)),
    ("full", ("memory.recompute=full",)),
    ("every 2", ("memory.recompute=full", "memory.recompute_every=2")),
    ("every 4", ("memory.recompute=full", "memory.recompute_every=4")),
)


def flops_per_step(run: Finished) -> int:
    """Return the floating-point operations of one step of a rank, from the plan."""
    config = load_config(
        Path(__file__).with_name("recompute.toml"), [*run.variant.changes, "run.name=x"]
    )
    setup = Setup(config, run.variant.ranks)
    plan = setup.full_plan()
    total = 0
    keeps = {}
    for op in plan.ranks[0]:
        if not isinstance(op, Forward | Recompute | Backward):
            continue
        spec = setup.specs(plan.rows[0][op.micro])[plan.blocks.index(op.block)]
        if isinstance(op, Forward):
            keeps[op.block, op.micro] = op.keep
            total += spec.forward_flops
        elif isinstance(op, Backward):
            total += spec.backward_flops
        elif keeps[op.block, op.micro] == "selective":
            total += spec.interior_flops
        else:
            total += spec.forward_flops
    return total


def main() -> None:
    """Train, compare, write."""
    runs = run_variants(
        "recompute",
        [Variant(mode.replace(" ", "-"), mode, changes) for mode, changes in MODES],
    )
    base, base_flops = runs[0], flops_per_step(runs[0])
    rows = []
    for (mode, _), run in zip(MODES, runs, strict=True):
        measured, predicted = run.peak("activations")
        rows.append(
            {
                "recompute": mode,
                "same_bits_as_none": run.losses == base.losses,
                "peak_activation_bytes": measured,
                "predicted_activation_bytes": predicted,
                "share_of_none": measured / base.peak("activations")[0],
                "median_step_s": run.median_step_s,
                "step_time_ratio": run.median_step_s / base.median_step_s,
                "predicted_flops_ratio": flops_per_step(run) / base_flops,
            }
        )
    text = table(
        rows,
        {
            "recompute": lambda r: r["recompute"],
            "losses equal none, bit for bit": lambda r: "yes" if r["same_bits_as_none"] else "NO",
            "peak activations, bytes": lambda r: f"{r['peak_activation_bytes']:,}",
            "predicted": lambda r: f"{r['predicted_activation_bytes']:,}",
            "share of none": lambda r: f"{r['share_of_none']:.1%}",
            "step, ms": lambda r: f"{r['median_step_s'] * 1e3:.0f}",
            "step time": lambda r: f"{r['step_time_ratio']:.2f}x",
            "flops, estimated": lambda r: f"{r['predicted_flops_ratio']:.2f}x",
        },
    )

    def draw(fig) -> None:
        left, right = fig.subplots(1, 2)
        places = list(range(len(rows)))
        names = [r["recompute"] for r in rows]
        mib = 1 << 20
        left.bar(
            [p - 0.2 for p in places], [r["peak_activation_bytes"] / mib for r in rows], 0.4,
            color=MEASURED, label="measured",
        )  # fmt: skip
        left.bar(
            [p + 0.2 for p in places], [r["predicted_activation_bytes"] / mib for r in rows], 0.4,
            color=PREDICTED, label="predicted from the plan",
        )  # fmt: skip
        left.set_ylabel("peak activations of a rank (MiB)")
        right.bar(
            [p - 0.2 for p in places], [r["step_time_ratio"] for r in rows], 0.4,
            color=MEASURED, label="step time, measured",
        )  # fmt: skip
        right.bar(
            [p + 0.2 for p in places], [r["predicted_flops_ratio"] for r in rows], 0.4,
            color=PREDICTED, label="flops, from the plan",
        )  # fmt: skip
        right.set_ylabel("times those of none")
        for ax in (left, right):
            ax.set_xticks(places, names)
            ax.set_xlabel("memory.recompute")
            ax.margins(y=0.25)
            ax.legend(loc="upper right")
        full = rows[2]
        heading(
            fig, "Recompute: bytes for time (8 blocks, 2 ranks, float32)",
            f"full keeps {full['share_of_none']:.0%} of the bytes and takes "
            f"{full['step_time_ratio']:.2f}x the time",
        )  # fmt: skip

    write("recompute", rows, text, draw)


if __name__ == "__main__":
    main()
