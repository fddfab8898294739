"""The same global batch on 1, 2 and 4 ranks: the same curve.

Run by `make ranks`, which puts experiments/ and plots/ on the module path.
"""

from __future__ import annotations

from common import BLUE, ORANGE, VERMILION, heading, whole_numbers
from variants import Variant, largest_difference, run_variants, table, write

RANKS = (1, 2, 4)
DTYPES = ("float64", "float32")


def main() -> None:
    """Train, compare, write."""
    runs = run_variants(
        "ranks",
        [
            Variant(
                f"{dtype}-{ranks}", f"{dtype}, {ranks} rank{'s' * (ranks > 1)}",
                (f"model.dtype={dtype}", "model.dropout=0.1"), ranks,
            )
            for dtype in DTYPES
            for ranks in RANKS
        ],
    )  # fmt: skip
    rows = []
    for index, run in enumerate(runs):
        one = runs[index - index % len(RANKS)]
        measured, predicted = run.sent_bytes()
        rows.append(
            {
                "dtype": DTYPES[index // len(RANKS)],
                "ranks": run.variant.ranks,
                "last_loss": run.losses[-1],
                "heldout_loss": run.heldout["heldout_loss"],
                "largest_relative_loss_difference": largest_difference(run, one),
                "dp_bytes_sent": measured,
                "dp_bytes_predicted": predicted,
                "median_step_s": run.median_step_s,
            }
        )
    text = table(
        rows,
        {
            "dtype": lambda r: r["dtype"],
            "ranks": lambda r: str(r["ranks"]),
            "last loss": lambda r: f"{r['last_loss']:.12f}",
            "held out": lambda r: f"{r['heldout_loss']:.6f}",
            "largest relative difference to 1 rank": lambda r: (
                f"{r['largest_relative_loss_difference']:.1e}"
            ),
            "gradient bytes sent": lambda r: f"{r['dp_bytes_sent']:,}",
            "from the step tables": lambda r: f"{r['dp_bytes_predicted']:,}",
            "step, ms": lambda r: f"{r['median_step_s'] * 1e3:.0f}",
        },
    )

    def draw(fig) -> None:
        left, right = fig.subplots(1, 2)
        colours, widths = (BLUE, ORANGE, VERMILION), (5.0, 2.6, 1.0)
        for run, colour, width in zip(runs[3:], colours, widths, strict=True):
            left.plot(run.losses, color=colour, linewidth=width, label=run.variant.label)
        left.set_ylabel("training loss (nats per token)")
        left.legend()
        for index, run in enumerate(runs):
            one = runs[index - index % len(RANKS)]
            if run is one:
                continue
            # Equal values have no place on a logarithmic axis; they sit at its foot.
            gaps = [
                max(abs(a - b) / abs(b), 1e-17) for a, b in zip(run.losses, one.losses, strict=True)
            ]
            right.plot(
                gaps, color=colours[index % len(RANKS)], label=run.variant.label,
                linestyle="-" if index >= len(RANKS) else "--",
            )  # fmt: skip
        right.set_yscale("log")
        right.set_ylabel("relative difference to 1 rank")
        right.legend()
        for ax in (left, right):
            ax.set_xlabel("step (optimizer updates)")
            whole_numbers(ax.xaxis)
        worst = max(r["largest_relative_loss_difference"] for r in rows[:3])
        heading(
            fig, "Ranks: one global batch, one curve (with dropout)",
            f"in float64 1, 2 and 4 ranks differ by {worst:.0e} at most",
        )  # fmt: skip

    write("ranks", rows, text, draw)


if __name__ == "__main__":
    main()
