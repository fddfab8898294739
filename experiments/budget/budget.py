"""The largest decoder that trains under a budget, with all techniques and without each.

Sizes are found on plans, without data; then one run fits and the next size hits the wall.

Run by `make budget`, which puts experiments/ and plots/ on the module path.
"""

from __future__ import annotations

import json

from common import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, VIOLET, heading
from matplotlib.lines import Line2D
from variants import (
    Finished,
    Row,
    Variant,
    config_of,
    data_sizes,
    predicted,
    run_variants,
    table,
    technique_sets,
    write,
)

from mpisim.errors import MpisimError

NAME = "budget"
RANKS = 4
WIDTH_STEP = 8
"""The rule of growth: model.d_model = 8k; four heads and four blocks, d_ff follows the width."""
CURVES = {
    "all": BLACK,
    "without recompute": BLUE,
    "without 16 bits": GREEN,
    "without ZeRO": VERMILION,
    "without accumulation": ORANGE,
    "none": PURPLE,
}
"""Whose peaks are drawn over the size; the others get a grey bar."""


def size(k: int) -> str:
    """Return the setting of the k-th size."""
    return f"model.d_model={WIDTH_STEP * k}"


def sizes_up_to_budget(changes: tuple[str, ...]) -> list[Row]:
    """Return all sizes from the smallest to the first that does not fit, with their forecast."""
    found: list[Row] = []
    while not found or found[-1]["predicted_peak_bytes"] <= found[-1]["budget_bytes"]:
        k = len(found) + 1
        config = config_of(NAME, (*changes, size(k)))
        setup, worst = predicted(config, RANKS)
        found.append(
            {
                "d_model": config.model.d_model,
                "parameters": sum(param.size for param in setup.model.param_specs()),
                "predicted_peak_bytes": worst.peak_total,
                "data_sizes": data_sizes(config)._asdict(),
                "budget_bytes": config.memory.budget_bytes,
            }
        )
    return found


def verdict(run: Finished) -> Row:
    """Return what the wall said: the record of the first rank that wrote one."""
    records = [json.loads(path.read_text()) for path in sorted(run.path.glob("memory-rank-*.json"))]
    if bool(run.error) != bool(records):
        raise MpisimError(
            f"{run.path} must end well, or by its budget; got {run.error!r} and {len(records)} "
            f"records of ranks. Look at what the run printed."
        )
    if not records:
        return {}
    return {name: records[0][name] for name in ("rank", "step", "op", "budget_bytes")}


def main() -> None:
    """Search, train, compare, write."""
    sets = technique_sets(alone=True)
    searched = {name: sizes_up_to_budget(changes) for name, changes in sets.items()}
    wall = "memory.static_check=false"
    variants = []
    for name, changes in sets.items():
        short, k = name.replace(" ", "-").lower(), len(searched[name])
        for end, which in (("fits", size(k - 1)), ("refused", size(k))):
            variants.append(
                Variant(
                    f"{short}-{end}", f"{name}, {which}: {end}", (*changes, which, wall), RANKS,
                    may_fail=end == "refused",
                )
            )  # fmt: skip
    runs = iter(run_variants(NAME, variants))
    rows = []
    for name, found in searched.items():
        fitting, refused = next(runs), next(runs)
        largest, beyond = found[-2:]
        rows.append(
            {
                "techniques": name,
                "settings": sets[name],
                "ranks": RANKS,
                **largest,
                "peak_bytes": fitting.peak()[0],
                "hook_peak_bytes": fitting.hook_peak(),
                "steps": len(fitting.steps),
                "losses": fitting.losses,
                "next_d_model": beyond["d_model"],
                "next_parameters": beyond["parameters"],
                "next_predicted_peak_bytes": beyond["predicted_peak_bytes"],
                "wall": verdict(refused),
                "kernels": fitting.summary["kernels"],
                "searched": [
                    [each["d_model"], each["parameters"], each["predicted_peak_bytes"]]
                    for each in found
                ],
            }
        )
        assert not verdict(fitting)
    text = table(
        rows,
        {
            "techniques": lambda r: r["techniques"],
            "largest width": lambda r: str(r["d_model"]),
            "parameters": lambda r: f"{r['parameters']:,}",
            "share of all": lambda r: f"{r['parameters'] / rows[0]['parameters']:.0%}",
            "peak of a rank, bytes": lambda r: f"{r['peak_bytes']:,}",
            "allocator hook": lambda r: f"{r['hook_peak_bytes']:,}",
            "forecast": lambda r: f"{r['predicted_peak_bytes']:,}",
            "one size up: forecast": lambda r: f"{r['next_predicted_peak_bytes']:,}",
            "its run was ended in": lambda r: f"`{r['wall']['op']}`, step {r['wall']['step']}",
        },
    )
    write(NAME, rows, text, lambda fig: draw(fig, rows))


def draw(fig, rows: list[Row]) -> None:
    """Draw the largest sizes, and how the peak grows up to the budget."""
    fig.set_size_inches(12, 5)
    left, right = fig.subplots(1, 2, width_ratios=(1, 1.25))
    mib, places = 1 << 20, list(range(len(rows)))
    budget = rows[0]["budget_bytes"] / mib
    left.barh(places, [r["parameters"] / 1e6 for r in rows], 0.68,
              color=[CURVES.get(r["techniques"], GREY) for r in rows])  # fmt: skip
    for place, row in zip(places, rows, strict=True):
        left.annotate(
            f"{row['parameters'] / 1e6:.2f}", (row["parameters"] / 1e6, place), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    left.set_yticks(places, [r["techniques"] for r in rows])
    left.invert_yaxis()
    left.margins(x=0.12)
    left.set_xlabel(f"largest decoder under {budget:g} MiB a rank (million parameters)")
    for row in rows:
        if (colour := CURVES.get(row["techniques"])) is None:
            continue
        right.plot(
            [count / 1e6 for _, count, _ in row["searched"]],
            [peak / mib for _, _, peak in row["searched"]],
            color=colour, label=row["techniques"],
        )  # fmt: skip
        right.plot(row["parameters"] / 1e6, row["peak_bytes"] / mib, "o", color=colour)
        right.plot(
            row["next_parameters"] / 1e6, row["next_predicted_peak_bytes"] / mib, "x",
            color=colour, markeredgewidth=2,
        )  # fmt: skip
    right.axhline(budget, color=VIOLET, linestyle=(0, (5, 2)), linewidth=1.4)
    right.set_xlim(0)
    right.set_ylim(0)
    right.set_xlabel("parameters (millions)")
    right.set_ylabel("peak of the fullest rank (MiB)")
    handles, _ = right.get_legend_handles_labels()
    handles += [
        Line2D([], [], color=BLACK, marker="o", linestyle="", label="run: trained, measured peak"),
        Line2D([], [], color=BLACK, marker="x", linestyle="", markeredgewidth=2,
               label="run: ended by the wall"),
        Line2D([], [], color=VIOLET, linestyle=(0, (5, 2)), linewidth=1.4,
               label=f"budget: {budget:g} MiB"),
    ]  # fmt: skip
    right.legend(handles=handles, loc="lower right", fontsize=8)
    heading(
        fig, f"How large a decoder trains under {budget:g} MiB a rank ({RANKS} ranks, AdamW)",
        f"with all techniques {rows[0]['parameters'] / rows[-1]['parameters']:.1f} times the "
        f"parameters that fit with none; curves are forecasts, dots and crosses are runs",
    )  # fmt: skip


if __name__ == "__main__":
    main()
