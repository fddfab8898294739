"""What each ZeRO stage takes off a rank, and what it sends for it: measured beside the formulas.

Run by `make zero`, which puts experiments/ and plots/ on the module path.
"""

from __future__ import annotations

from common import BLACK, BLUE, DARK_GREY, GREEN, MEMORY_COLOURS, ORANGE, VERMILION, heading
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
    write,
)

from mpisim.cost.price import price_rank
from mpisim.memory.formulas import model_state_bytes
from mpisim.memory.published import zero_model_state_bytes
from mpisim.plan.ops import CheckGradients
from mpisim.report.traces import read_traces
from mpisim.train.fit import STATE_CATEGORIES

RANKS = (1, 2, 4, 8)
STAGES = (0, 1, 2, 3)
COLOURS = (BLACK, BLUE, GREEN, VERMILION)
SHOWN_RANKS = 4
"""Ranks of the bars that show what a peak is made of."""
LAYOUTS = [(ranks, stage) for ranks in RANKS for stage in (STAGES if ranks > 1 else (0,))]


def state_after_backward(run: Finished, plan) -> int:
    """Return the largest model state of a rank when all gradients are summed, before the update."""
    largest = 0
    for trace in read_traces(run.path)[0]:
        names = list(trace.header["memory_categories"])
        columns = [2 + names.index(name) for name in STATE_CATEGORIES]
        ops = plan.ranks[trace.rank]
        check = next(i for i, op in enumerate(ops) if isinstance(op, CheckGradients))
        step, _, values = trace.memory[0]
        assert step == 0
        row = next(row for row in values if int(row[0]) == check)
        largest = max(largest, sum(int(row[column]) for column in columns))
    return largest


def ring_bytes(ranks: int, stage: int, micros: int, param_bytes: int) -> int:
    """Return what all ranks send per step on a ring: (N - 1) x {2, 2, M + 1, 3M} x parameters."""
    return (ranks - 1) * (2, 2, micros + 1, 3 * micros)[stage] * param_bytes


def row_of(ranks: int, stage: int, run: Finished) -> Row:
    """Return what one run came to."""
    config = config_of("zero", run.variant.changes)
    setup, worst = predicted(config, ranks)
    plan, itemsizes = setup.full_plan(), setup.itemsizes
    num_params = sum(param.size for param in setup.model.param_specs())
    formula = model_state_bytes(
        num_params, ranks, stage, compute=setup.policy.compute, reduce=setup.policy.reduce,
        param=setup.policy.param, has_master=setup.policy.has_master, optimizer_arrays=2,
    )  # fmt: skip
    priced = sum(
        counts["sent_bytes"]
        for rank in range(ranks)
        for (axis, _), counts in price_rank(plan, rank).items()
        if axis == "dp"
    )
    micros = config.train.num_microbatches
    fullest = max((entry["memory"] for entry in run.summary["ranks"]),
                  key=lambda memory: memory["peak_total"])  # fmt: skip
    return {
        "ranks": ranks,
        "stage": stage,
        "settings": run.variant.changes,
        "data_sizes": data_sizes(config)._asdict(),
        "kernels": run.summary["kernels"],
        "parameters": num_params,
        "microbatches": micros,
        "state_bytes": state_after_backward(run, plan),
        "forecast_state_bytes": sum(worst.state.values()),
        "formula_state_bytes": sum(formula.values()),
        "paper_state_bytes": float(zero_model_state_bytes(num_params, ranks, stage)),
        "peak_bytes": run.peak()[0],
        "hook_peak_bytes": run.hook_peak(),
        "forecast_peak_bytes": worst.peak_total,
        "at_peak": fullest["at_peak"],
        "sent_bytes_per_step": run.sent_bytes_per_step(),
        "priced_bytes_per_step": priced,
        "ring_formula_bytes": ring_bytes(ranks, stage, micros, num_params * itemsizes.compute),
        "losses": run.losses,
    }


def main() -> None:
    """Train, compare, write."""
    runs = run_variants(
        "zero",
        [
            Variant(
                f"ranks{ranks}-zero{stage}",
                f"{ranks} rank{'s' * (ranks > 1)}, stage {stage}",
                (f"parallel.zero={stage}",),
                ranks,
            )
            for ranks, stage in LAYOUTS
        ],
    )
    rows = [row_of(ranks, stage, run) for (ranks, stage), run in zip(LAYOUTS, runs, strict=True)]
    text = table(
        rows,
        {
            "ranks": lambda r: str(r["ranks"]),
            "stage": lambda r: str(r["stage"]),
            "model state, bytes": lambda r: f"{r['state_bytes']:,}",
            "forecast": lambda r: f"{r['forecast_state_bytes']:,}",
            "the paper's formula": lambda r: f"{r['paper_state_bytes']:,.0f}",
            "peak of all, bytes": lambda r: f"{r['peak_bytes']:,}",
            "allocator hook": lambda r: f"{r['hook_peak_bytes']:,}",
            "forecast of the peak": lambda r: f"{r['forecast_peak_bytes']:,}",
            "sent per step, bytes": lambda r: f"{r['sent_bytes_per_step']:,}",
            "(N-1) x {2, 2, M+1, 3M} x parameters": lambda r: f"{r['ring_formula_bytes']:,}",
        },
    )
    write("zero", rows, text, lambda fig: draw(fig, rows))


def draw(fig, rows: list[Row]) -> None:
    """Draw state beside the paper's curves, what a peak is made of, and what is sent."""
    fig.set_size_inches(13, 5)
    left, middle, right = fig.subplots(1, 3)
    mib = 1 << 20
    num_params, micros = rows[0]["parameters"], rows[0]["microbatches"]
    points = [2 ** (step / 20) for step in range(61)]
    for stage, colour in zip(STAGES, COLOURS, strict=True):
        curve = [paper_curve(num_params, ranks, stage) / mib for ranks in points]
        left.plot(points, curve, color=colour, linewidth=1.4)
        measured = [r for r in rows if r["stage"] == stage or r["ranks"] == 1]
        left.plot(
            [r["ranks"] for r in measured], [r["state_bytes"] / mib for r in measured], "o",
            color=colour, markersize=6,
        )  # fmt: skip
        left.annotate(
            f"stage {stage}", (8, curve[-1]), xytext=(6, 0), textcoords="offset points",
            color=colour, va="center", annotation_clip=False,
        )  # fmt: skip
    left.set_xscale("log", base=2)
    left.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    left.set_ylim(0)
    left.set_xlabel("ranks")
    left.set_ylabel("model state of a rank (MiB)")
    left.legend(
        handles=[
            Line2D([], [], color=BLACK, marker="o", linestyle="", label="measured"),
            Line2D([], [], color=BLACK, linewidth=1.4, label="the ZeRO paper's formula"),
        ],
        loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2,
    )  # fmt: skip

    shown = [r for r in rows if r["ranks"] == SHOWN_RANKS]
    base = [0.0] * len(shown)
    for name, colour in MEMORY_COLOURS.items():
        heights = [r["at_peak"][name] / mib for r in shown]
        middle.bar(STAGES, heights, 0.7, bottom=base, color=colour, label=name)
        base = [a + b for a, b in zip(base, heights, strict=True)]
    middle.plot(
        STAGES, [r["forecast_peak_bytes"] / mib for r in shown], "_", color=DARK_GREY,
        markersize=44, markeredgewidth=2,
    )  # fmt: skip
    middle.set_ylim(0, max(base) * 1.4)
    middle.set_xticks(STAGES)
    middle.set_xlabel("ZeRO stage")
    middle.set_ylabel(f"fullest moment of a rank of {SHOWN_RANKS} (MiB)")
    handles, labels = middle.get_legend_handles_labels()
    handles = [*handles[::-1], Line2D([], [], color=DARK_GREY, linewidth=2)]
    middle.legend(handles, [*labels[::-1], "forecast"], fontsize=8, ncols=2, loc="upper right")

    groups = [ranks for ranks in RANKS if ranks > 1]
    for stage, colour in zip(STAGES, COLOURS, strict=True):
        chosen = [r for r in rows if r["stage"] == stage and r["ranks"] > 1]
        places = [group + (stage - 1.5) * 0.2 for group in range(len(groups))]
        right.bar(
            places, [r["sent_bytes_per_step"] / mib for r in chosen], 0.19, color=colour,
            label=f"stage {stage}",
        )  # fmt: skip
        right.plot(
            places, [r["ring_formula_bytes"] / mib for r in chosen], "_", color=ORANGE,
            markersize=13, markeredgewidth=2.5,
            label="(N-1) x {2, 2, M+1, 3M}\nx parameters" if stage == STAGES[-1] else None,
        )  # fmt: skip
    right.set_xticks(range(len(groups)), [str(ranks) for ranks in groups])
    right.set_xlabel("ranks")
    right.set_ylabel("sent by all ranks in a step (MiB)")
    right.legend(loc="upper left", fontsize=8)
    last = rows[-1]
    heading(
        fig, f"ZeRO: state for messages ({num_params:,} parameters, bfloat16 with float32 masters, "
        f"AdamW, {micros} micro-batches)",
        f"on {last['ranks']} ranks stage {last['stage']} keeps "
        f"{last['state_bytes'] / rows[0]['state_bytes']:.1%} of the state and sends "
        f"{last['sent_bytes_per_step'] / rows[-4]['sent_bytes_per_step']:g} times the bytes of "
        f"stage 0",
    )  # fmt: skip


def paper_curve(num_params: int, ranks: float, stage: int) -> float:
    """Return the paper's formula between whole numbers of ranks, bytes."""
    whole = float(zero_model_state_bytes(num_params, 1, stage))
    # What two ranks save is half of what they share out.
    shared = 2 * (whole - float(zero_model_state_bytes(num_params, 2, stage)))
    return whole - shared + shared / ranks


if __name__ == "__main__":
    main()
