"""The picture of a plan: cells, messages and numbers; as a script, and by `mpisim plan show`."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import matplotlib.style
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from mpisim.cli import main
from mpisim.config import config_from_mapping
from mpisim.plan.text import parse_plan, plan_text
from mpisim.train.overview import view_plan

SCRIPT = Path(__file__).parents[2] / "plots" / "plan.py"


def settings(schedule="1f1b", pp=4, micros=8, dp=1):
    chunks = 2 if schedule == "interleaved" else 1
    return {
        "data": {"kind": "text", "path": "no/such/file", "window": 4},
        "model": {
            "kind": "decoder", "d_model": 2, "num_heads": 1,
            "num_blocks": max(pp * chunks, 2),
        },
        "train": {"global_batch": micros * dp, "num_microbatches": micros},
        "parallel": {"pp": pp, "dp": dp, "schedule": schedule, "chunks": chunks},
    }  # fmt: skip


def made(schedule="1f1b", pp=4, micros=8, dp=1):
    config = config_from_mapping(settings(schedule, pp, micros, dp))
    return view_plan(config, pp * dp)


def cells_of(ax):
    """Return (colour, row, slot) of every cell; the first boxes are what is idle."""
    found = []
    for boxes in [c for c in ax.collections if isinstance(c, PolyCollection)][1:]:
        colour = tuple(boxes.get_facecolor()[0][:3])
        for path in boxes.get_paths():
            (x, y), (x1, y1) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            assert x1 - x == pytest.approx(1) and y1 - y == pytest.approx(0.72)
            found.append((colour, round((y + y1) / 2), round(x)))
    return found


def test_cells_lie_in_their_slots(plots, figure):
    """1F1B, four stages, eight microbatches: the bars' own example."""
    module = plots("plan")
    view = made()
    module.draw(figure, module.load(view.plan, view.title))
    (ax,) = figure.axes
    found = cells_of(ax)
    forward, backward = (
        to_rgb(plots("common").OP_COLOURS[kind]) for kind in ("Forward", "Backward")
    )
    rows = [
        "FFFF...BFBFBFBFB.B.B.B", ".FFF..BFBFBFBFBFB.B.B.", "..FF.BFBFBFBFBFBFB.B..",
        "...FBFBFBFBFBFBFBFB...",
    ]  # fmt: skip
    expected = {
        (forward if letter == "F" else backward, row, slot)
        for row, text in enumerate(rows)
        for slot, letter in enumerate(text)
        if letter != "."
    }
    assert len(found) == len(expected) == 64
    for colour, row, slot in found:
        assert any((row, slot) == (r, s) and colour == pytest.approx(c) for c, r, s in expected), (
            row,
            slot,
        )
    assert ax.get_xlim() == (0, 22)
    numbers = {(round(t.get_position()[1]), t.get_position()[0] - 0.5): t.get_text()
               for t in ax.texts}  # fmt: skip
    assert len(numbers) == 64
    assert [numbers[0, slot] for slot in (0, 3, 7, 8, 21)] == ["0", "3", "0", "4", "7"]
    title = figure.get_suptitle()
    assert title.startswith("1f1b: 4 stages, 8 microbatches\n")
    assert "3/11 of the slots are idle (27.3%)" in title
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["rank 0", "rank 1", "rank 2", "rank 3"]
    (right,) = ax.child_axes
    assert [label.get_text() for label in right.get_yticklabels()] == [
        "4 in flight", "3 in flight", "2 in flight", "1 in flight",
    ]  # fmt: skip


def test_messages_run_between_neighbouring_rows(plots, figure):
    module = plots("plan")
    view = made(micros=3)
    module.draw(figure, module.load(view.plan))
    (ax,) = figure.axes
    activations, grads = [c for c in ax.collections if isinstance(c, LineCollection)]
    assert len(activations.get_segments()) == len(grads.get_segments()) == 3 * 3
    for lines, step in ((activations, 1), (grads, -1)):
        for (sent, start), (taken, end) in lines.get_segments():
            assert taken >= sent
            assert round(end) - round(start) == step
            # In the room between two rows, not over a cell.
            assert abs(start - round(start)) == abs(end - round(end)) == pytest.approx(0.36)


def test_messages_across_all_rows_are_left_out(plots):
    """Interleaved: from the last rank back to the first."""
    module = plots("plan")
    data = module.load(made("interleaved", 3, 3).plan)
    assert any(abs(source - dest) == 2 for source, dest, _ in data.messages)
    with matplotlib.style.context(plots("common").STYLE):
        fig = Figure()
        module.draw(fig, data)
    (ax,) = fig.axes
    lines = [s for c in ax.collections if isinstance(c, LineCollection) for s in c.get_segments()]
    assert len(lines) == sum(abs(a - b) == 1 for a, b, _ in data.messages)
    said = (
        "messages between rows that are not neighbours (last rank to first, and back) are not drawn"
    )
    assert fig.get_suptitle().splitlines()[-1] == said


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 4), ("interleaved", 2)])
def test_where_all_messages_are_drawn_nothing_else_is_said(plots, figure, schedule, pp):
    """On two ranks the last one is the neighbour of the first."""
    module = plots("plan")
    data = module.load(made(schedule, pp, 4).plan)
    module.draw(figure, data)
    lines = [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]
    assert sum(len(c.get_segments()) for c in lines) == len(data.messages)
    assert "not drawn" not in figure.get_suptitle()


def test_halves_of_microbatches_in_flight_are_shown(plots):
    """Interleaved, four ranks: 2 (4 - i - 1) + 4 + 1 chunks of two."""
    data = plots("plan").load(made("interleaved", 4, 8).plan)
    assert data.notes == [f"{half} in flight" for half in ("5.5", "4.5", "3.5", "2.5")]
    with matplotlib.style.context(plots("common").STYLE):
        fig = Figure()
        plots("plan").draw(fig, data)
    assert (
        "in flight: most microbatches whose activations a rank keeps; one of its 2 chunks counts"
        in (fig.get_suptitle())
    )
    texts = {text.get_text() for text in fig.axes[0].texts}
    assert texts == {f"{micro}{chunk}" for micro in range(8) for chunk in "ab"}


def test_every_kind_of_cell_has_its_own_colour_and_label(plots, figure):
    module = plots("plan")
    module.draw(figure, module.load(made("interleaved", 2, 2).plan))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward, chunk a", "forward, chunk b", "backward, chunk a", "backward, chunk b", "idle",
        "activation", "gradient",
    ]  # fmt: skip
    fig = Figure()
    module.draw(fig, module.load(made("zb-h1", 2, 2).plan))
    texts = [text.get_text() for text in fig.legends[0].get_texts()]
    assert texts[:3] == ["forward", "backward, input half", "backward, weight half"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_the_plan_has_the_colours_of_the_timeline(plots, figure, schedule):
    """One legend: what a colour means in the one picture it means in the other."""
    view = made(schedule, 2, 2)
    plots("plan").draw(figure, plots("plan").load(view.plan))
    timeline, other = plots("timeline"), Figure()
    chunks = {b: c for rank in (0, 1) for c, bs in enumerate(view.plan.chunks(rank)) for b in bs}
    ops = [
        (float(n), n + 1.0, type(op).__name__, op.block)
        for n, op in enumerate(
            op for op in view.plan.ranks[0] if type(op).__name__ in timeline.OP_COLOURS
            and hasattr(op, "block")
        )
    ]  # fmt: skip
    lane = timeline.Lane(0, ops=ops, stage=0)
    timeline.draw(
        other, timeline.Timeline("t", [lane], chunks=chunks, num_chunks=max(chunks.values()) + 1)
    )
    legends = []
    for fig in (figure, other):
        (legend,) = fig.legends
        pairs = zip(legend.get_texts(), legend.legend_handles, strict=True)
        legends.append(
            {t.get_text(): h.get_facecolor() for t, h in pairs if "ward" in t.get_text()}
        )
    assert (
        legends[0] == legends[1]
        and len(legends[0]) == {"1f1b": 2, "interleaved": 4, "zb-h1": 3}[schedule]
    )
    # The bars themselves, too.
    (bars,) = [c for c in other.axes[0].collections if isinstance(c, PolyCollection)
               and len(c.get_paths()) == len(ops)]  # fmt: skip
    drawn = {tuple(colour) for colour in bars.get_facecolor()}
    assert drawn == {tuple(colour) for colour in legends[1].values()}
    cells = {colour for colour, _, _ in cells_of(figure.axes[0])}
    assert cells == {tuple(colour[:3]) for colour in legends[0].values()}


@pytest.mark.parametrize(
    ("schedule", "pp", "micros"), [("interleaved", 4, 8), ("zb-h1", 2, 3), ("1f1b", 8, 32)]
)
def test_no_text_covers_another(plots, schedule, pp, micros):
    module = plots("plan")
    view = made(schedule, pp, micros)
    with matplotlib.style.context(plots("common").STYLE):
        fig = Figure()
        FigureCanvasAgg(fig)
        module.draw(fig, module.load(view.plan, view.title))
        fig.canvas.draw()
    boxes = [
        (text.get_window_extent(), text)
        for text in fig.findobj(Text)
        if text.get_visible() and text.get_text().strip()
    ]
    # Ticks beyond the axis are made and not drawn.
    page = fig.bbox
    inside = [(box, t) for box, t in boxes if page.x0 <= box.x0 and box.x1 <= page.x1]
    assert len(inside) >= 2 * pp * micros
    boxes = sorted(inside, key=lambda item: item[0].x0)
    for number, (a, first) in enumerate(boxes):
        for b, second in itertools.islice(boxes, number + 1, number + 60):
            wide = min(a.x1, b.x1) - max(a.x0, b.x0)
            high = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert wide <= 1 or high <= 1, (first, second)


def test_cells_too_narrow_for_numbers_have_none(plots, figure):
    """256 slots: the pattern is what is seen."""
    module = plots("plan")
    module.draw(figure, module.load(made("naive", 8, 16).plan))
    assert figure.axes[0].get_xlim() == (0, 256)
    assert not figure.axes[0].texts


def test_replicas_share_a_row_and_their_messages(plots):
    module = plots("plan")
    one, two = (module.load(made("1f1b", 2, 3, dp=dp).plan) for dp in (1, 2))
    assert two.names == ["ranks 0, 2", "ranks 1, 3"]
    assert [(a, b) for a, b, _ in two.messages] == [(a, b) for a, b, _ in one.messages]


def test_a_plan_without_stages_is_drawn(plots, figure):
    view = made("1f1b", 1, 3)
    module = plots("plan")
    module.draw(figure, module.load(view.plan, view.title))
    assert figure.get_suptitle().startswith("accumulation: 1 rank, 3 microbatches\n0/1 of the")
    assert len(cells_of(figure.axes[0])) == 6
    module.draw(Figure(), module.load(view.plan))


def test_the_script_draws_a_plan_text(tmp_path):
    """Also one that cannot run: as far as it gets."""
    text = plan_text(made(micros=3).plan)
    lines = text.splitlines()
    lines.remove(next(line for line in lines if "RecvGrad" in line))
    broken = "\n".join(lines) + "\n"
    file = tmp_path / "plan.txt"
    file.write_text(broken)
    assert parse_plan(broken) != parse_plan(text)
    out = tmp_path / "x.png"
    done = subprocess.run(
        [sys.executable, SCRIPT, file, "--out", out], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(out), "")
    pixels = matplotlib.image.imread(out)[..., :3]
    ink = (pixels < 0.98).any(axis=2).mean()
    assert pixels.shape[1] >= 800 and 0.1 < ink < 0.9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.txt", "x.png"]


@pytest.mark.parametrize("text", ["", "nothing of a plan\n"])
def test_the_script_refuses_what_is_no_plan(plots, tmp_path, monkeypatch, capsys, text):
    file = tmp_path / "plan.txt"
    file.write_text(text)
    words = ["plots/plan.py", str(file), "--out", str(tmp_path / "x.png")]
    monkeypatch.setattr(sys, "argv", words)
    assert plots("plan").main() == 2
    assert capsys.readouterr().err.startswith("plan: plan text must start with")
    assert not (tmp_path / "x.png").exists()


def test_plan_show_draws_it(tmp_path, capsys):
    config = tmp_path / "run.toml"
    lines = [
        f"{section}.{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for section, values in settings(pp=2, micros=2).items()
        for key, value in values.items()
    ]
    config.write_text("\n".join(lines) + "\n")
    out = tmp_path / "plan.png"
    # What is printed stays a plan text.
    words = ["plan", "show", str(config), "--ranks", "2", "--png", str(out), "--ops"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert len(parse_plan(printed.out).ranks) == 2
    assert printed.err == f"wrote {out}\n"
    assert matplotlib.image.imread(out).shape[1] >= 800
    out = tmp_path / "no folder" / "plan.png"
    words = ["plan", "show", str(config), "--ranks", "2", "--png", str(out)]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "No such file" in printed.err
