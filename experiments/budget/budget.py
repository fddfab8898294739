"""The largest decoder that trains under 64 MiB per rank, with and without each technique.

Run by `make budget`, which puts experiments/ and plots/ on the module path. The width is found on
plans, without a run; then that width is trained, and the next one is shown to hit the wall.
"""

from __future__ import annotations

from common import BLUE, GREY, heading
from variants import EXPERIMENTS, Variant, run_variants, table, write

from mpisim.config import load_config
from mpisim.data.load import load_data
from mpisim.train.fit import sizes_of, worst_forecast
from mpisim.train.setup import Setup

RANKS = 2
STEP = 8
TECHNIQUES = {
    "recompute": ("memory.recompute=full",),
    "16-bit values": ("precision.compute=bfloat16", "precision.reduce=bfloat16"),
    "ZeRO-1": ("parallel.zero=1",),
    "ZeRO-2": ("parallel.zero=2",),
    "ZeRO-3": ("parallel.zero=3",),
    "accumulation": ("train.num_microbatches=8",),
}
ALL = ("recompute", "16-bit values", "ZeRO-3", "accumulation")


def together(*names: str) -> tuple[str, ...]:
    """Return the settings of several techniques."""
    return tuple(change for name in names for change in TECHNIQUES[name])


SETS = {
    "none": (),
    **{name: together(name) for name in TECHNIQUES},
    **{f"all but {name}": together(*(other for other in ALL if other != name)) for name in ALL},
    "all": together(*ALL),
}


class Fits:
    """Predicted peaks by settings and width."""

    def __init__(self) -> None:
        config = load_config(EXPERIMENTS / "budget" / "budget.toml")
        self.budget = config.memory.budget_bytes
        # The data are the same for all widths.
        self.sizes = sizes_of(config, load_data(config))

    def peak(self, changes: tuple[str, ...], width: int) -> int:
        """Return the bytes of the fullest rank."""
        overrides = [*changes, f"model.d_model={width}"]
        config = load_config(EXPERIMENTS / "budget" / "budget.toml", overrides)
        return worst_forecast(Setup(config, RANKS), *self.sizes).peak_total

    def largest(self, changes: tuple[str, ...]) -> int:
        """Return the largest width that fits; peaks grow with it."""
        low, high = 1, 2
        while self.peak(changes, high * STEP) <= self.budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.peak(changes, middle * STEP) <= self.budget:
                low = middle
            else:
                high = middle
        return low * STEP


def main() -> None:
    """Search, train, write."""
    fits, rows, variants = Fits(), [], []
    for number, (label, changes) in enumerate(SETS.items()):
        width = fits.largest(changes)
        overrides = [*changes, f"model.d_model={width}"]
        setup = Setup(load_config(EXPERIMENTS / "budget" / "budget.toml", overrides), RANKS)
        for kind, wide in (("fits", width), ("too-wide", width + STEP)):
            variants.append(
                Variant(f"{number}-{kind}", f"{label}, d_model {wide}",
                        (*changes, f"model.d_model={wide}"), RANKS, may_fail=kind == "too-wide")
            )  # fmt: skip
        rows.append(
            {
                "techniques": label,
                "d_model": width,
                "parameters": sum(param.size for param in setup.model.param_specs()),
                "predicted_peak_bytes": fits.peak(changes, width),
                "predicted_next_peak_bytes": fits.peak(changes, width + STEP),
                "budget_bytes": fits.budget,
            }
        )
    runs = run_variants("budget", variants)
    for row, trained, refused in zip(rows, runs[::2], runs[1::2], strict=True):
        row["peak_bytes"] = trained.peak()[0]
        row["next_hits_the_wall"] = bool(refused.error) and any(
            refused.path.glob("memory-rank-*.json")
        )
    text = table(
        rows,
        {
            "techniques": lambda r: r["techniques"],
            "d_model": lambda r: str(r["d_model"]),
            "parameters": lambda r: f"{r['parameters']:,}",
            "peak, bytes": lambda r: f"{r['peak_bytes']:,}",
            "predicted": lambda r: f"{r['predicted_peak_bytes']:,}",
            "one size up, predicted": lambda r: f"{r['predicted_next_peak_bytes']:,}",
            "hits the wall": lambda r: "yes" if r["next_hits_the_wall"] else "no",
        },
    )

    def draw(fig) -> None:
        fig.set_size_inches(11, 4.6)
        ax = fig.subplots()
        names = [row["techniques"] for row in rows]
        sizes = [row["parameters"] / 1e6 for row in rows]
        ax.barh(names, sizes, color=BLUE)
        ax.axvline(sizes[0], color=GREY, linestyle="--")
        for y, row in enumerate(rows):
            ax.text(sizes[y], y, f" {sizes[y]:.2f} M, d_model {row['d_model']}", va="center")
        ax.set_xlim(right=1.2 * max(sizes))
        ax.invert_yaxis()
        ax.set_xlabel("parameters of the largest decoder that trains (millions)")
        confirmed = sum(row["next_hits_the_wall"] for row in rows)
        heading(
            fig, "The largest decoder under 64 MiB per rank (2 ranks, AdamW)",
            f"found on plans; trained at that width, and {confirmed} of {len(rows)} hit the wall "
            f"one size up",
        )  # fmt: skip

    write("budget", rows, text, draw)


if __name__ == "__main__":
    main()
