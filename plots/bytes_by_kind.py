"""Bars: bytes each rank sent by axis and collective, measured beside the step tables' number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common import (
    MEASURED,
    PREDICTED,
    NoData,
    byte_unit,
    heading,
    main,
    read_traces,
    run_title,
    whole_numbers,
)
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpisim.layouts.metrics import CHANNELS
from mpisim.report import load_run
from mpisim.trace.store import expand_messages
from mpisim.units import format_bytes

MOST_COLUMNS = 4
"""Panels side by side; more take two rows."""


@dataclass
class BytesByKind:
    """What `draw` needs; lists are per rank, bytes sent."""

    title: str
    measured: dict[str, list[int]]
    """"AXIS COLLECTIVE" -> bytes per rank."""
    predicted: dict[str, list[int]] | None


def load(run_dir: Path) -> BytesByKind:
    """Read both counts; a run that was cut short has only its trace, and no prediction."""
    run = load_run(run_dir)
    if run.num_ranks == 1:
        raise NoData("one rank sends no messages.")
    title = run_title(run, "Bytes sent by axis and collective")
    if run.summary is not None:
        ranks = run.summary["ranks"]
        counted = [n for e in ranks for way in ("traffic", "predicted_traffic") for n in e[way]]
        # In one order for all runs; without what nobody sent, nor should have.
        kinds = list(dict.fromkeys([*(f"{axis} {name}" for axis, name in CHANNELS), *counted]))
        moved = [n for n in kinds if _sends(ranks, n)]
        kinds = moved or [n for n in kinds if n in counted]

        def sent(source: str) -> dict[str, list[int]]:
            return {
                kind: [entry[source].get(kind, {}).get("sent_bytes", 0) for entry in ranks]
                for kind in kinds
            }

        return BytesByKind(title, sent("traffic"), sent("predicted_traffic"))
    measured = {f"{axis} {name}": [0] * run.num_ranks for axis, name in CHANNELS}
    for trace in read_traces(run):
        messages = expand_messages(trace)
        for row in messages[messages["is_send"]]:
            program = trace.programs[int(row["program"])]
            kind = f"{program.axis} {program.collective}"
            line = measured.setdefault(kind, [0] * run.num_ranks)
            line[trace.rank] += int(row["nbytes"])
    measured = {kind: line for kind, line in measured.items() if any(line)}
    if not measured:
        raise NoData("the trace has no message.")
    return BytesByKind(title, measured, None)


def _sends(ranks: list[dict], kind: str) -> bool:
    counts = (entry[way] for entry in ranks for way in ("traffic", "predicted_traffic"))
    return any(count.get(kind, {}).get("sent_bytes") for count in counts)


def draw(fig: Figure, data: BytesByKind) -> None:
    """Draw one panel per axis and collective, each on its own scale."""
    kinds = list(data.measured)
    columns = len(kinds) if len(kinds) <= MOST_COLUMNS else -(-len(kinds) // 2)
    rows = -(-len(kinds) // columns)
    fig.set_size_inches(max(6.0, 3.6 * columns), 1.3 + 3.1 * rows)
    axes = fig.subplots(rows, columns, squeeze=False).flatten()
    for ax in axes[len(kinds) :]:
        ax.remove()
    axes = axes[: len(kinds)]
    for ax, kind in zip(axes, kinds, strict=True):
        measured = data.measured[kind]
        predicted = None if data.predicted is None else data.predicted[kind]
        largest = max([*measured, *(predicted or [0])])
        size, unit = byte_unit(largest)
        ranks = range(len(measured))
        width = 0.4 if predicted is not None else 0.7
        shift = width / 2 if predicted is not None else 0.0
        ax.bar([r - shift for r in ranks], [v / size for v in measured], width, color=MEASURED)
        if predicted is not None:
            ax.bar(
                [r + shift for r in ranks], [v / size for v in predicted], width, color=PREDICTED
            )
        ax.set_title(_panel_title(kind, measured, predicted))
        ax.set_xlabel("rank")
        so_far = "over the whole run" if predicted is not None else "so far"
        ax.set_ylabel(f"sent {so_far} ({unit})")
        ax.set_ylim(0, max(largest / size, 1e-9) * 1.08)
        ax.set_xlim(-0.6, len(measured) - 0.4)
        whole_numbers(ax.xaxis)
        ax.grid(axis="y")
    source = "read off the trace" if data.predicted is None else "counted by the transport"
    handles = [Patch(color=MEASURED, label=f"measured: {source}")]
    if data.predicted is not None:
        handles.append(Patch(color=PREDICTED, label="predicted: from the step tables"))
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    heading(fig, data.title, _difference(data))


def _panel_title(kind: str, measured: list[int], predicted: list[int] | None) -> str:
    axis, _, collective = kind.partition(" ")
    collective = {"pp all_reduce": "tied table"}.get(kind, collective)
    text = f"{collective} on {axis}\n{format_bytes(sum(measured))} in all"
    if predicted is not None:
        text += f", difference {sum(measured) - sum(predicted):,}"
    return text


def _difference(data: BytesByKind) -> str:
    if data.predicted is None:
        return "so far; a prediction is written when a run ends"
    off = sum(
        abs(a - b)
        for kind, line in data.measured.items()
        for a, b in zip(line, data.predicted[kind], strict=True)
    )
    if off == 0:
        return "measured - predicted = 0 for every rank and kind"
    return f"MEASURED AND PREDICTED DIFFER by {off:,} bytes"


if __name__ == "__main__":
    raise SystemExit(main("bytes_by_kind", load, draw, __doc__))
