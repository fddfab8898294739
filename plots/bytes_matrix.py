"""Heat map: bytes that every rank sent to every other, measured and predicted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common import (
    MID_GREY,
    VERMILION,
    NoData,
    byte_unit,
    heading,
    main,
    read_traces,
    run_title,
    whole_numbers,
)
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mpisim.report import load_run
from mpisim.trace.store import expand_messages
from mpisim.units import format_bytes

Matrix = list[list[int]]

COLOURS = LinearSegmentedColormap.from_list("blues", ["#F4F8FB", "#56B4E9", "#0072B2", "#00304D"])
MOST_NUMBERS = 16
"""Ranks up to which the cells carry numbers."""


@dataclass
class BytesMatrix:
    """What `draw` needs; matrices are ``[sender][receiver]``, bytes."""

    title: str
    measured: Matrix
    predicted: Matrix | None


def load(run_dir: Path) -> BytesMatrix:
    """Read both matrices; a run that was cut short has only its trace, and no prediction."""
    run = load_run(run_dir)
    if run.num_ranks == 1:
        raise NoData("one rank sends no messages.")
    if run.summary is not None:
        return BytesMatrix(
            run_title(run, "Bytes sent by every rank to every other"),
            run.summary["bytes_matrix"], run.summary["predicted_bytes_matrix"],
        )  # fmt: skip
    matrix = [[0] * run.num_ranks for _ in range(run.num_ranks)]
    for trace in read_traces(run):
        messages = expand_messages(trace)
        for row in messages[messages["is_send"]]:
            matrix[trace.rank][int(row["peer"])] += int(row["nbytes"])
    return BytesMatrix(run_title(run, "Bytes sent by every rank to every other"), matrix, None)


def draw(fig: Figure, data: BytesMatrix) -> None:
    """Draw one heat map, or two side by side on one colour scale."""
    shown = [("measured", data.measured)]
    if data.predicted is not None:
        shown.append(("predicted, from the step tables", data.predicted))
    ranks = len(data.measured)
    side = min(max(2.6 + 0.45 * ranks, 4.0), 8.0)
    fig.set_size_inches(1.6 + side * len(shown), side + 0.9)
    axes = fig.subplots(1, len(shown), squeeze=False)[0]
    largest = max(max(map(max, matrix)) for _, matrix in shown)
    size, unit = byte_unit(largest)
    for ax, (name, matrix) in zip(axes, shown, strict=True):
        # A rank sends nothing to itself: its cell is blank, not a zero.
        image = ax.imshow(
            [
                [value / size if a != b or value else float("nan") for b, value in enumerate(line)]
                for a, line in enumerate(matrix)
            ],
            cmap=COLOURS, vmin=0, vmax=max(largest / size, 1e-9),
        )  # fmt: skip
        ax.set_title(name)
        ax.set_xlabel("receiving rank")
        whole_numbers(ax.xaxis)
        whole_numbers(ax.yaxis)
        ax.tick_params(length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)
        if ranks <= MOST_NUMBERS:
            _numbers(ax, matrix, largest)
        _mark_differences(ax, data)
    axes[0].set_ylabel("sending rank")
    so_far = "so far" if data.predicted is None else "over the whole run"
    fig.colorbar(image, ax=list(axes), label=f"bytes {so_far} ({unit})", shrink=0.85)
    heading(fig, data.title, _difference(data))


def _numbers(ax, matrix: Matrix, largest: int) -> None:
    font = 9 if len(matrix) <= 6 else 7 if len(matrix) <= 10 else 5.5
    for sender, line in enumerate(matrix):
        for receiver, value in enumerate(line):
            if sender == receiver and not value:
                continue
            number, _, unit = format_bytes(value).partition(" ")
            colour = "white" if value > 0.45 * largest else "black" if value else MID_GREY
            ax.text(
                receiver, sender, f"{number}\n{unit}" if value else "0", ha="center", va="center",
                fontsize=font, color=colour,
            )  # fmt: skip


def _mark_differences(ax, data: BytesMatrix) -> None:
    """Frame the cells that are not what was predicted."""
    for sender, line in enumerate(data.measured):
        for receiver, value in enumerate(line):
            if data.predicted is not None and value != data.predicted[sender][receiver]:
                ax.add_patch(
                    Rectangle(
                        (receiver - 0.47, sender - 0.47), 0.94, 0.94, fill=False, linewidth=3,
                        edgecolor=VERMILION,
                    )
                )  # fmt: skip


def _difference(data: BytesMatrix) -> str:
    total = sum(map(sum, data.measured))
    if data.predicted is None:
        return f"{total:,} bytes so far; a prediction is written when a run ends"
    off = sum(
        abs(a - b)
        for line, expected in zip(data.measured, data.predicted, strict=True)
        for a, b in zip(line, expected, strict=True)
    )
    if off == 0:
        return f"{total:,} bytes in all; measured - predicted = 0 in every cell"
    return f"{total:,} bytes in all; MEASURED AND PREDICTED DIFFER by {off:,} bytes"


if __name__ == "__main__":
    raise SystemExit(main("bytes_matrix", load, draw, __doc__))
