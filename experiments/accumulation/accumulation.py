"""K micro-batches instead of one: the same curve, less memory.

Run by `make accumulation`, which puts experiments/ and plots/ on the module path.
"""

from __future__ import annotations

from common import MEASURED, PREDICTED, heading, whole_numbers
from variants import Variant, largest_difference, run_variants, table, write

COUNTS = (1, 2, 4, 8, 16)


def main() -> None:
    """Train, compare, write."""
    runs = run_variants(
        "accumulation",
        [
            Variant(f"k{count}", f"{count} micro-batches", (f"train.num_microbatches={count}",))
            for count in COUNTS
        ],
    )
    rows = []
    for count, run in zip(COUNTS, runs, strict=True):
        activations, predicted = run.peak("activations")
        rows.append(
            {
                "microbatches": count,
                "last_loss": run.losses[-1],
                "largest_relative_loss_difference": largest_difference(run, runs[0]),
                "peak_activation_bytes": activations,
                "predicted_activation_bytes": predicted,
                "peak_total_bytes": run.peak()[0],
                "median_step_s": run.median_step_s,
            }
        )
    text = table(
        rows,
        {
            "micro-batches": lambda r: str(r["microbatches"]),
            "last loss": lambda r: f"{r['last_loss']:.6f}",
            "largest relative difference to 1": lambda r: (
                f"{r['largest_relative_loss_difference']:.1e}"
            ),
            "peak activations, bytes": lambda r: f"{r['peak_activation_bytes']:,}",
            "predicted": lambda r: f"{r['predicted_activation_bytes']:,}",
            "peak of all, bytes": lambda r: f"{r['peak_total_bytes']:,}",
            "step, ms": lambda r: f"{r['median_step_s'] * 1e3:.0f}",
        },
    )

    def draw(fig) -> None:
        left, right = fig.subplots(1, 2)
        for run, width in zip(runs, (5.0, 3.6, 2.4, 1.4, 0.7), strict=True):
            left.plot(run.losses, linewidth=width, label=run.variant.label)
        left.set_xlabel("step (optimizer updates)")
        left.set_ylabel("training loss (nats per token)")
        left.legend()
        whole_numbers(left.xaxis)
        places = range(len(rows))
        mib = 1 << 20
        right.bar(
            [p - 0.2 for p in places], [r["peak_activation_bytes"] / mib for r in rows], 0.4,
            color=MEASURED, label="measured",
        )  # fmt: skip
        right.bar(
            [p + 0.2 for p in places], [r["predicted_activation_bytes"] / mib for r in rows], 0.4,
            color=PREDICTED, label="predicted",
        )  # fmt: skip
        right.set_xticks(list(places), [str(count) for count in COUNTS])
        right.set_xlabel("micro-batches per rank and update")
        right.set_ylabel("peak activations of a rank (MiB)")
        right.legend()
        first, last = rows[0]["peak_activation_bytes"], rows[-1]["peak_activation_bytes"]
        worst = max(r["largest_relative_loss_difference"] for r in rows)
        heading(
            fig, "Accumulation: one curve, less memory (2 ranks, float32)",
            f"losses agree to {worst:.0e}; activations shrink {first / last:.1f}-fold with "
            f"{COUNTS[-1]} micro-batches",
        )  # fmt: skip

    write("accumulation", rows, text, draw)


if __name__ == "__main__":
    main()
