"""What a schedule adds over a plain loop over micro-batches on the same two ranks.

Run by `make accumulate-or-pipeline`, which puts experiments/ and plots/ on the module path.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from common import (
    BLUE,
    BROWN,
    DARK_GREY,
    GREEN,
    LIGHT_GREY,
    MEMORY_COLOURS,
    ORANGE,
    SKY,
    heading,
)
from emulated import (
    WARM_UP_STEPS,
    host_of,
    median_step_s,
    read_steps,
    run_many,
    simulated,
)
from matplotlib.lines import Line2D
from variants import EXPERIMENTS, Row, config_of, data_sizes, table, write

from mpisim.layouts.metrics import CHANNELS

NAME = "accumulate-or-pipeline"
REPLICAS = ("parallel.dp=2", "train.num_microbatches=4")
VARIANTS = {
    "loop": ("1 rank: the loop alone", 1, ()),
    "naive": ("2 stages: the loop", 2, ("parallel.pp=2", "parallel.schedule=naive")),
    "gpipe": ("2 stages: GPipe", 2, ("parallel.pp=2", "parallel.schedule=gpipe")),
    "1f1b": ("2 stages: 1F1B", 2, ("parallel.pp=2", "parallel.schedule=1f1b")),
    "zb-h1": ("2 stages: ZB-H1", 2, ("parallel.pp=2", "parallel.schedule=zb-h1")),
    "dp": ("2 replicas", 2, REPLICAS),
    "dp-zero1": ("2 replicas, ZeRO 1", 2, (*REPLICAS, "parallel.zero=1")),
}
"""Name -> label, ranks, settings. Every forward has 4 rows."""
KINDS = {
    "compute": (BLUE, "work"),
    "stall_pp": (ORANGE, "wait for a stage"),
    "stall_dp": (BROWN, "wait for a sum"),
    "stall_control": (LIGHT_GREY, "wait for all ranks"),
}
"""What a rank's step is made of -> colour, label."""
CROSSING = {
    ("pp", "activation"): (SKY, "activations"),
    ("pp", "grad"): (BLUE, "their gradients"),
    ("dp", "all_reduce"): (ORANGE, "gradients of parameters"),
    ("dp", "reduce_scatter"): (ORANGE, ""),
    ("dp", "all_gather"): (GREEN, "parameters"),
}
"""Channel -> colour, label."""
MIB = 1 << 20


def changes_of(name: str) -> list[str]:
    """Return the settings of one run."""
    return [f"run.dir=runs/{NAME}", f"run.name={name}", *VARIANTS[name][2]]


def row_of(name: str) -> Row:
    """Return what one run came to."""
    label, ranks, _ = VARIANTS[name]
    config = config_of(NAME, changes_of(name))
    path = Path(config.run.dir) / config.run.name
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    steps = read_steps(path)
    figures = [step["ranks"] for step in steps[WARM_UP_STEPS:]]

    def mean_s(*names: str) -> float:
        return statistics.median(sum(each[name][2] for name in names) for each in figures)

    hooks = [entry["memory"]["measured"] for entry in summary["ranks"]]
    assert all(hook["exact"] and hook["gap_bytes"] == 0 for hook in hooks), hooks
    fullest = max((e["memory"] for e in summary["ranks"]), key=lambda memory: memory["peak_total"])
    step_s = median_step_s(steps)
    waits = {f"stall_{axis}_s": mean_s(f"stall_{axis}_recv_s", f"stall_{axis}_send_s")
             for axis in ("pp", "dp", "control")}  # fmt: skip
    return {
        "variant": name,
        "label": label,
        "ranks": ranks,
        "schedule": config.parallel.schedule if config.parallel.pp > 1 else None,
        "microbatches": config.train.num_microbatches,
        "step_s": step_s,
        "simulated_step_s": None
        if config.parallel.pp == 1
        else float(simulated(config, ranks).step_s),
        **waits,
        "compute_s": step_s - sum(waits.values()),
        "peak_bytes": [entry["memory"]["peak_total"] for entry in summary["ranks"]],
        "hook_peak_bytes": [hook["peak_bytes"] for hook in hooks],
        "predicted_peak_bytes": [e["predicted_memory"]["peak_total"] for e in summary["ranks"]],
        "at_peak": fullest["at_peak"],
        "sent_bytes": {
            f"{axis} {kind}": round(figures[-1][f"{axis}_{kind}_sent_bytes"][2] * ranks)
            for axis, kind in CHANNELS
            if axis != "control"
        },
        "repeats": len(figures),
        "data_sizes": data_sizes(config)._asdict(),
        "settings": VARIANTS[name][2],
    }


def main() -> None:
    """Train, compare, write."""
    for ranks in (1, 2):
        names = [name for name, variant in VARIANTS.items() if variant[1] == ranks]
        print(f"== {NAME}: {ranks} ranks, {len(names)} runs", flush=True)
        run_many(EXPERIMENTS / NAME / f"{NAME}.toml", list(map(changes_of, names)), ranks)
    report()


def report() -> None:
    """Write what the runs came to."""
    rows = [row_of(name) for name in VARIANTS]
    for row in rows:
        row["host"] = host_of(Path(f"runs/{NAME}/naive"))
    naive = next(row for row in rows if row["variant"] == "naive")
    text = table(
        rows,
        {
            "layout": lambda r: r["label"],
            "step, ms": lambda r: f"{r['step_s'] * 1e3:.0f}",
            "simulated": lambda r: (
                f"{r['simulated_step_s'] * 1e3:.0f}" if r["simulated_step_s"] else ""
            ),
            "times the loop over 2 stages": lambda r: f"{naive['step_s'] / r['step_s']:.2f}",
            "peak of each rank, bytes": lambda r: ", ".join(f"{n:,}" for n in r["peak_bytes"]),
            "its forecast": lambda r: ", ".join(f"{n:,}" for n in r["predicted_peak_bytes"]),
            "sent per step, bytes": lambda r: f"{sum(r['sent_bytes'].values()):,}",
        },
    )
    write(NAME, rows, text, lambda fig: draw(fig, rows))


def draw(fig, rows: list[Row]) -> None:
    """Draw a step's time, the fullest rank's peak, and what is sent, as bars side by side."""
    fig.set_size_inches(13, 4.6)
    left, middle, right = fig.subplots(1, 3, sharey=True)
    places = range(len(rows))

    def stack(ax, parts: dict[str, tuple[str, str]], value, scale: float) -> list:
        base, handles = [0.0] * len(rows), []
        for key, (colour, label) in parts.items():
            widths = [value(row, key) / scale for row in rows]
            if any(widths):
                bars = ax.barh(places, widths, 0.68, left=base, color=colour)
                handles += [(bars, label)] if label else []
            base = [a + b for a, b in zip(base, widths, strict=True)]
        for place, end in zip(places, base, strict=True):
            if end:
                ax.annotate(f"{end:,.{0 if scale < 1 else 1}f}", (end, place), xytext=(4, 0),
                            textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        ax.set_xlim(0, max(base) * 1.14)
        return handles

    for ax, columns, handles in (
        (left, 2, stack(left, KINDS, lambda r, key: r[f"{key}_s"], 1e-3)),
        (
            middle,
            3,
            stack(
                middle,
                {key: (colour, key) for key, colour in MEMORY_COLOURS.items()},
                lambda r, key: r["at_peak"].get(key, 0),
                MIB,
            ),
        ),
        (
            right,
            2,
            stack(
                right,
                {f"{axis} {kind}": look for (axis, kind), look in CROSSING.items()},
                lambda r, key: r["sent_bytes"][key],
                MIB,
            ),
        ),
    ):
        if ax is middle:
            ax.plot([max(r["predicted_peak_bytes"]) / MIB for r in rows], places, "|",
                    color=DARK_GREY, markersize=18, markeredgewidth=1.5)  # fmt: skip
            handles.append((Line2D([], [], color=DARK_GREY), "forecast"))
        ax.legend(
            [handle for handle, _ in handles], [label for _, label in handles], fontsize=8,
            loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2,
        )  # fmt: skip
    left.set_yticks(places, [r["label"] for r in rows])
    left.invert_yaxis()
    left.set_xlabel("a step, mean over ranks (ms)")
    middle.set_xlabel("fullest moment of the fullest rank (MiB)")
    right.set_xlabel("sent by all ranks in a step (MiB)")
    times = {r["variant"]: r["step_s"] for r in rows}
    heading(
        fig, "The same batch on two ranks: a loop over micro-batches, schedules, and replicas",
        f"over the loop on two stages 1F1B is {times['naive'] / times['1f1b']:.2f} times as fast, "
        f"two replicas {times['naive'] / times['dp']:.2f} times",
    )  # fmt: skip


if __name__ == "__main__":
    main()
