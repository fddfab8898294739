"""Every script on real runs: a picture, or one sentence why there is none."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import matplotlib.style
import pytest
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

ROOT = Path(__file__).parents[2]
NAMES = (
    "timeline", "bytes_matrix", "bytes_by_kind", "stalls", "memory", "convergence", "step_time",
)  # fmt: skip

NO_DATA = {
    ("one", "bytes_matrix"): "one rank sends no messages",
    ("one", "bytes_by_kind"): "one rank sends no messages",
    ("one", "stalls"): "one rank waits for nobody",
    ("untraced", "timeline"): "has no trace",
    ("untraced", "memory"): "has no trace",
}


def test_all_knows_every_script(plots):
    scripts = {path.stem for path in (ROOT / "plots").glob("*.py")}
    scripts -= {"all", "common", "plan", "reproduce"}
    assert set(plots("all").NAMES) == scripts == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "kind", ["several", "text", "one", "killed", "untraced", "decoder", "stages"]
)
def test_a_picture_or_a_reason(plots, runs, tmp_path, kind, name):
    common, script = plots("common"), plots(name)
    out = tmp_path / "new folder" / "picture.png"
    if (kind, name) in NO_DATA:
        with pytest.raises(common.NoData, match=NO_DATA[kind, name]):
            common.save(runs[kind], name, script.load, script.draw, out)
        assert not out.parent.exists()
        return
    assert common.save(runs[kind], name, script.load, script.draw, out) == out
    assert [path.name for path in out.parent.iterdir()] == ["picture.png"]
    pixels = matplotlib.image.imread(out)[..., :3]
    assert pixels.shape[0] >= 300 and pixels.shape[1] >= 800
    # Neither blank nor filled: something is drawn on a white page.
    ink = (pixels < 0.98).any(axis=2).mean()
    assert 0.02 < ink < 0.9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["several", "text", "killed", "decoder", "stages"])
def test_no_text_covers_another_and_every_axis_has_its_unit(plots, runs, kind, name):
    script = plots(name)
    with matplotlib.style.context(plots("common").STYLE):
        fig = Figure()
        FigureCanvasAgg(fig)
        script.draw(fig, script.load(runs[kind]))
        fig.canvas.draw()
    page = fig.bbox
    boxes = []
    for text in shown_texts(fig):
        box = text.get_window_extent()
        assert page.x0 - 1 <= box.x0 and box.x1 <= page.x1 + 1, text
        assert page.y0 - 1 <= box.y0 and box.y1 <= page.y1 + 1, text
        boxes.append((box, text))
    for (a, first), (b, second) in itertools.combinations(boxes, 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        high = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 1 or high <= 1, (first.get_text(), second.get_text())
    title = fig.get_suptitle()
    assert f"run {'several' if kind == 'killed' else kind}" in title
    assert ("cut short" in title) == (kind == "killed")


def shown_texts(fig):
    """Return the texts that are drawn: tick labels exist beyond the edges of an axis too."""
    hidden = set()
    for axis in fig.findobj(Axis):
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                hidden |= {id(tick.label1), id(tick.label2)}
    texts = [text for text in fig.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in texts if id(text) not in hidden]


def test_all_prints_each_file_and_each_reason(runs, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "plots" / "all.py"), str(runs["one"])],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    drawn = [line for line in done.stdout.splitlines() if line.endswith(".png")]
    assert [Path(line).stem for line in drawn] == [
        "timeline", "memory", "convergence", "step_time",
    ]  # fmt: skip
    assert all(Path(line).is_file() for line in drawn)
    reasons = [line for line in done.stdout.splitlines() if "not drawn" in line]
    assert reasons == [
        "bytes_matrix: not drawn: one rank sends no messages.",
        "bytes_by_kind: not drawn: one rank sends no messages.",
        "stalls: not drawn: one rank waits for nobody.",
    ]


def run_main(plots, monkeypatch, name, *arguments):
    script = plots(name)
    monkeypatch.setattr(sys, "argv", [f"plots/{name}.py", *map(str, arguments)])
    add_options = getattr(script, "add_options", None)
    return plots("common").main(name, script.load, script.draw, script.__doc__, add_options)


def test_a_script_takes_out_and_its_own_options(plots, runs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "x.png"
    arguments = (runs["several"], "--out", out, "--step", "3", "--steps", "2")
    assert run_main(plots, monkeypatch, "timeline", *arguments) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.is_file()
    assert run_main(plots, monkeypatch, "memory", runs["several"], "--rank", "2") == 0
    assert (runs["several"] / "plots" / "memory.png").is_file()


@pytest.mark.parametrize(
    ("name", "arguments", "status", "words"),
    [
        ("timeline", ["--step", "99"], 1, "step 99 is not in the trace; it has 0 to 8"),
        ("memory", ["--rank", "7"], 1, "rank 7 has no trace"),
    ],
)
def test_an_option_out_of_range(plots, runs, monkeypatch, capsys, name, arguments, status, words):
    assert run_main(plots, monkeypatch, name, runs["several"], *arguments) == status
    assert words in capsys.readouterr().err


def test_what_is_no_run_directory(plots, tmp_path, monkeypatch, capsys):
    assert run_main(plots, monkeypatch, "stalls", tmp_path) == 2
    assert "must be a run directory" in capsys.readouterr().err
