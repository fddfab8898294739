"""float32, bfloat16 and float16 storage: curves, skipped steps, bytes.

Run by `make precision`, which puts experiments/ and plots/ on the module path.
"""

from __future__ import annotations

from common import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION, heading, whole_numbers
from variants import Variant, run_variants, table, write

HALF = ("precision.compute=float16", "precision.growth_interval=40")
VARIANTS = (
    Variant("float32", "float32"),
    Variant("bfloat16", "bfloat16", ("precision.compute=bfloat16",)),
    Variant(
        "bfloat16-wire", "bfloat16, also on the wire",
        ("precision.compute=bfloat16", "precision.wire=bfloat16"),
    ),
    Variant("float16-scaled", "float16, dynamic loss scale from 2^24",
            (*HALF, "precision.loss_scale=dynamic", "precision.init_scale=16777216.0")),
    Variant("float16-small", "float16, seeds times 2^-12: those of 8 million tokens",
            (*HALF, "precision.loss_scale=static", f"precision.init_scale={2.0**-12}")),
    Variant("float16-plain", "float16, no loss scale", (*HALF, "precision.loss_scale=none"),
            may_fail=True),
)  # fmt: skip
COLOURS = (BLUE, GREEN, ORANGE, VERMILION, BLACK, PURPLE)
WIDTHS = (6.0, 4.5, 3.0, 1.4, 1.4, 1.4)


def main() -> None:
    """Train, compare, write."""
    runs = run_variants("precision", VARIANTS)
    rows = []
    for run in runs:
        rows.append(
            {
                "variant": run.variant.label,
                "steps": len(run.steps),
                "skipped": run.skipped,
                "last_loss": run.losses[-1],
                "heldout_loss": run.heldout.get("heldout_loss"),
                "last_loss_scale": run.steps[-1]["loss_scale"],
                "peak_activation_bytes": run.peak("activations")[0] if run.summary else None,
                "dp_bytes_sent": run.sent_bytes()[0] if run.summary else None,
                "dp_bytes_predicted": run.sent_bytes()[1] if run.summary else None,
                "median_step_s": run.median_step_s,
                "error": run.error,
            }
        )

    def number(value: int | None) -> str:
        return "-" if value is None else f"{value:,}"

    text = table(
        rows,
        {
            "storage": lambda r: r["variant"],
            "steps": lambda r: str(r["steps"]),
            "skipped": lambda r: str(len(r["skipped"])),
            "last scale": lambda r: f"{r['last_loss_scale']:g}",
            "last loss": lambda r: f"{r['last_loss']:.4f}",
            "held out": lambda r: "-" if r["heldout_loss"] is None else f"{r['heldout_loss']:.4f}",
            "peak activations, bytes": lambda r: number(r["peak_activation_bytes"]),
            "gradient bytes sent": lambda r: number(r["dp_bytes_sent"]),
            "step, ms": lambda r: f"{r['median_step_s'] * 1e3:.0f}",
        },
    )

    def draw(fig) -> None:
        top, bottom = fig.subplots(2, 1, height_ratios=(3, 1), sharex=True)
        for run, colour, width in zip(runs, COLOURS, WIDTHS, strict=True):
            top.plot(run.losses, color=colour, linewidth=width, label=run.variant.label)
            bottom.step(
                range(len(run.steps)), [row["loss_scale"] for row in run.steps], color=colour,
                where="mid",
            )  # fmt: skip
            if run.skipped:
                bottom.plot(
                    run.skipped, [run.steps[s]["loss_scale"] for s in run.skipped], "x",
                    color=colour, label="skipped step",
                )  # fmt: skip
        top.set_ylabel("training loss (nats per token)")
        bottom.set_yscale("log", base=2)
        bottom.set_ylabel("loss scale")
        bottom.set_xlabel("step (batches; a skipped one makes no update)")
        whole_numbers(bottom.xaxis)
        fig.legend(loc="outside lower center", ncols=2)
        scaled = rows[3]
        heading(
            fig, "Precision: 16-bit storage, float32 masters and sums (2 ranks)",
            f"the scaled float16 run skipped {len(scaled['skipped'])} steps and follows float32; "
            f"without a scale, seeds of a very large batch vanish",
        )  # fmt: skip

    write("precision", rows, text, draw)


if __name__ == "__main__":
    main()
