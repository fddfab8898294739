"""How much of a step each schedule waits: measured, beside closed forms and our own simulation.

Run by `make bubble`, which puts experiments/ and plots/ on the module path. All points of one
number of stages are trained in one launch.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

from common import BLACK, BLUE, GREEN, ORANGE, VERMILION, heading
from emulated import (
    WARM_UP_STEPS,
    host_of,
    median_step_s,
    read_steps,
    run_many,
    simulated,
    stall_shares,
)
from matplotlib.lines import Line2D
from variants import EXPERIMENTS, Row, config_of, table, write

from mpisim.cost.bubbles import closed_form
from mpisim.train.setup import Setup

NAME = "bubble"
STAGES = (2, 4, 8)
MICROS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
SCHEDULES = {
    "naive": (1, BLACK, "x"),
    "gpipe": (1, ORANGE, "s"),
    "1f1b": (1, BLUE, "o"),
    "interleaved": (2, GREEN, "^"),
    "zb-h1": (1, VERMILION, "D"),
}
"""Schedule -> chunks of a rank, colour, marker."""
FORWARD_S = {"naive": 0.004}
"""Seconds of a stage's forward. The share of naive, where one rank at a time works, hardly depends
on what an op costs beside its sleep; its steps are long."""
DEFAULT_FORWARD_S = 0.016
STEPS = {1: 5, 2: 5, 3: 5, 4: 5}
"""Microbatches -> steps beside the first; long steps need fewer."""
DEFAULT_STEPS = 3


def changes_of(schedule: str, stages: int, micros: int) -> list[str]:
    """Return the settings of one point: one row a microbatch, one block a chunk."""
    chunks = SCHEDULES[schedule][0]
    width = config_of(NAME).data.num_features
    chunk_s = FORWARD_S.get(schedule, DEFAULT_FORWARD_S) / chunks
    return [
        f"run.dir=runs/{NAME}",
        f"run.name={schedule}-{stages}x{micros}",
        f"model.num_blocks={stages * chunks}",
        f"parallel.pp={stages}",
        f"parallel.schedule={schedule}",
        f"parallel.chunks={chunks}",
        f"train.global_batch={micros}",
        f"train.num_microbatches={micros}",
        f"train.steps={WARM_UP_STEPS + STEPS.get(micros, DEFAULT_STEPS)}",
        f"cluster.flops_per_s={2 * width**2 / chunk_s!r}",
    ]


def row_of(schedule: str, stages: int, micros: int) -> Row:
    """Return what one run came to."""
    changes = changes_of(schedule, stages, micros)
    config = config_of(NAME, changes)
    steps = read_steps(Path(config.run.dir) / config.run.name)
    shares = stall_shares(steps)
    line = simulated(config, stages)
    form = closed_form(schedule, stages, micros, config.parallel.chunks)
    setup = Setup(config, stages)
    return {
        "schedule": schedule,
        "stages": stages,
        "chunks": config.parallel.chunks,
        "microbatches": micros,
        "stall_share": statistics.median(shares),
        "closed_form": None if form is None else float(form),
        "fraction": None if form is None else str(form),
        "simulated": float(line.stall_share),
        "step_s": median_step_s(steps),
        "simulated_step_s": float(line.step_s),
        "forward_s": setup.specs(1)[0].forward_flops * config.parallel.chunks
        / config.cluster.flops_per_s,
        "repeats": len(shares),
        "stall_shares": shares,
        "settings": changes[2:],
    }  # fmt: skip


def main() -> None:
    """Train, compare, write."""
    points = list(itertools.product(SCHEDULES, STAGES, MICROS))
    for stages in STAGES:
        here = [changes_of(*point) for point in points if point[1] == stages]
        print(f"== {NAME}: {stages} stages, {len(here)} runs", flush=True)
        run_many(EXPERIMENTS / NAME / f"{NAME}.toml", here, stages)
    report(points)


def report(points: list[tuple[str, int, int]]) -> None:
    """Write what the runs of these points came to."""
    rows = [row_of(*point) for point in points]
    host = host_of(Path(f"runs/{NAME}") / config_of(NAME, changes_of(*points[0])).run.name)
    for row in rows:
        row["host"] = host
    cells = {(r["schedule"], r["stages"], r["microbatches"]): r for r in rows}
    lines = [
        {"schedule": schedule, "stages": stages}
        | {f"M = {micros}": cells[schedule, stages, micros] for micros in MICROS}
        for schedule, stages in itertools.product(SCHEDULES, STAGES)
    ]
    columns = {
        "schedule": lambda line: line["schedule"],
        "stages": lambda line: str(line["stages"]),
    }
    columns |= {
        f"M = {micros}": lambda line, micros=micros: cell(line[f"M = {micros}"])
        for micros in MICROS
    }
    write(NAME, rows, table(lines, columns), lambda fig: draw(fig, rows))
    print(f"largest difference: {largest_difference(rows):.4f}")


def expected(row: Row) -> float:
    """Return the closed form, or, where there is none, what the simulation of the plan says."""
    return row["simulated"] if row["closed_form"] is None else row["closed_form"]


def largest_difference(rows: list[Row]) -> float:
    """Return how far a measured share lies from what it should be, at most."""
    return max(abs(row["stall_share"] - expected(row)) for row in rows)


def cell(row: Row) -> str:
    """Return measured beside expected; the simulation's is in italics."""
    said = f"{expected(row):.3f}"
    return f"{row['stall_share']:.3f} / {said if row['closed_form'] is not None else f'*{said}*'}"


def draw(fig, rows: list[Row]) -> None:
    """Draw a panel per number of stages: lines are closed forms, marks are measured."""
    fig.set_size_inches(13, 5)
    panels = fig.subplots(1, len(STAGES), sharey=True)
    for ax, stages in zip(panels, STAGES, strict=True):
        for schedule, (_, colour, marker) in SCHEDULES.items():
            here = [r for r in rows if (r["schedule"], r["stages"]) == (schedule, stages)]
            micros = [r["microbatches"] for r in here]
            # 1F1B and GPipe share their line.
            if schedule != "gpipe":
                formed = [r for r in here if r["closed_form"] is not None]
                ax.plot(
                    [r["microbatches"] for r in formed], [r["closed_form"] for r in formed],
                    color=colour, linewidth=1.3, zorder=1,
                )  # fmt: skip
                ax.plot(
                    micros, [r["simulated"] for r in here], color=colour, linewidth=1.1,
                    linestyle=(0, (1.5, 2)), zorder=1,
                )  # fmt: skip
            hollow = schedule == "gpipe"
            ax.plot(
                micros, [r["stall_share"] for r in here], marker, color=colour,
                markersize=9 if hollow else 5, fillstyle="none" if hollow else "full",
                markeredgewidth=1.5,
            )  # fmt: skip
        ax.set_xscale("log", base=2)
        shown = [m for m in MICROS if m & (m - 1) == 0]
        ax.set_xticks(shown, [str(m) for m in shown])
        ax.set_xticks([m for m in MICROS if m not in shown], minor=True, labels=[])
        ax.set_ylim(0, 0.95)
        ax.set_xlabel("microbatches of a step")
        ax.set_title(f"{stages} stages")
    panels[0].set_ylabel("share of a step that a rank waits")
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", markersize=5,
               fillstyle="none" if schedule == "gpipe" else "full", markeredgewidth=1.5,
               label=schedule + (f", {chunks} chunks" if chunks > 1 else ""))
        for schedule, (chunks, colour, marker) in SCHEDULES.items()
    ]  # fmt: skip
    handles += [
        Line2D([], [], color=BLACK, linewidth=1.3, label="closed form"),
        Line2D([], [], color=BLACK, linewidth=1.1, linestyle=(0, (1.5, 2)),
               label="simulation of the plan"),
    ]  # fmt: skip
    panels[-1].legend(handles=handles, loc="upper right", fontsize=8, bbox_to_anchor=(1, 0.86))
    heading(
        fig,
        "Share of a step that ranks wait, by schedule (marks: measured, equal blocks that sleep)",
        f"{len(rows)} points, none further than {largest_difference(rows):.3f} from its closed "
        f"form, or from the simulation where there is none",
    )  # fmt: skip


if __name__ == "__main__":
    main()
