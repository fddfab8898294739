"""What backward keeps and what it computes again: bytes and time, beside the estimate.

Run by `make recompute`, which puts experiments/ and plots/ on the module path.
"""

from __future__ import annotations

from pathlib import Path

from common import MEASURED, PREDICTED, heading
from variants import Finished, Variant, run_variants, table, write

from mpisim.config import load_config
from mpisim.plan.forecast import retained_estimate
from mpisim.plan.ops import Backward, Forward, Recompute
from mpisim.report.traces import read_traces
from mpisim.train.setup import Setup

MODES = (
    ("none", ("memory.recompute=none",)),
    ("selective", ("memory.recompute=selective",)),
    ("full", ("memory.recompute=full",)),
    ("every 2", ("memory.recompute=full", "memory.recompute_every=2")),
    ("every 4", ("memory.recompute=full", "memory.recompute_every=4")),
)


def setup_of(run: Finished) -> Setup:
    """Return what follows from the config of a run."""
    config = load_config(Path(__file__).with_name("recompute.toml"), run.variant.changes)
    return Setup(config, run.variant.ranks)


def flops_per_step(setup: Setup) -> int:
    """Return the floating-point operations of one step of rank 0, from the plan."""
    plan = setup.full_plan()
    total, keeps = 0, {}
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


def retained_bytes(run: Finished, setup: Setup) -> tuple[int, int]:
    """Return what rank 0 held between the loss and backward: from the trace, and estimated."""
    plan = setup.full_plan()
    after_loss = plan.ranks[0].index(Forward(plan.blocks[-1], 0))
    traces, _ = read_traces(run.path)
    place = 2 + list(traces[0].header["memory_categories"]).index("activations")
    _, _, values = traces[0].memory[0]
    measured = next(int(row[place]) for row in values if int(row[0]) == after_loss)
    return measured, retained_estimate(plan, 0, 0, setup.specs)


def main() -> None:
    """Train, compare, write."""
    runs = run_variants(
        "recompute",
        [Variant(mode.replace(" ", "-"), mode, changes) for mode, changes in MODES],
    )
    base, base_flops = runs[0], flops_per_step(setup_of(runs[0]))
    rows = []
    for (mode, _), run in zip(MODES, runs, strict=True):
        setup = setup_of(run)
        measured, predicted = run.peak("activations")
        retained, estimate = retained_bytes(run, setup)
        rows.append(
            {
                "recompute": mode,
                "same_bits_as_none": run.losses == base.losses,
                "retained_bytes": retained,
                "estimated_retained_bytes": estimate,
                "peak_activation_bytes": measured,
                "predicted_activation_bytes": predicted,
                "share_of_none": measured / base.peak("activations")[0],
                "median_step_s": run.median_step_s,
                "step_time_ratio": run.median_step_s / base.median_step_s,
                "predicted_flops_ratio": flops_per_step(setup) / base_flops,
            }
        )
    text = table(
        rows,
        {
            "recompute": lambda r: r["recompute"],
            "losses equal none, bit for bit": lambda r: "yes" if r["same_bits_as_none"] else "NO",
            "retained, bytes": lambda r: f"{r['retained_bytes']:,}",
            "estimated": lambda r: f"{r['estimated_retained_bytes']:,}",
            "peak activations, bytes": lambda r: f"{r['peak_activation_bytes']:,}",
            "predicted": lambda r: f"{r['predicted_activation_bytes']:,}",
            "step, ms": lambda r: f"{r['median_step_s'] * 1e3:.0f}",
            "step time": lambda r: f"{r['step_time_ratio']:.2f}x",
            "flops, estimated": lambda r: f"{r['predicted_flops_ratio']:.2f}x",
        },
    )

    def draw(fig) -> None:
        panels = (
            ("retained_bytes", "estimated_retained_bytes", 1 << 20,
             "held between loss and backward (MiB)"),
            ("peak_activation_bytes", "predicted_activation_bytes", 1 << 20,
             "peak activations (MiB)"),
            ("step_time_ratio", "predicted_flops_ratio", 1, "time, or flops, of a step / none"),
        )  # fmt: skip
        places = list(range(len(rows)))
        for ax, (measured, predicted, unit, label) in zip(fig.subplots(1, 3), panels, strict=True):
            for shift, key, colour, name in (
                (-0.2, measured, MEASURED, "measured"),
                (0.2, predicted, PREDICTED, "from the plan"),
            ):
                ax.bar(
                    [place + shift for place in places], [row[key] / unit for row in rows], 0.4,
                    color=colour, label=name,
                )  # fmt: skip
            ax.set_xticks(places, [row["recompute"].replace(" ", "\n") for row in rows], fontsize=8)
            ax.set_ylabel(label)
            ax.margins(y=0.2)
            ax.legend(loc="upper right", fontsize=8)
        full = rows[2]
        heading(
            fig, "Recompute: bytes for time (8 blocks, 2 ranks, float32)",
            f"full holds {full['retained_bytes'] / rows[0]['retained_bytes']:.0%} of the bytes, "
            f"peaks at {full['share_of_none']:.0%}, and takes {full['step_time_ratio']:.2f}x the "
            f"time; the losses are the same, bit for bit",
        )  # fmt: skip

    write("recompute", rows, text, draw)


if __name__ == "__main__":
    main()
