"""Figures of published tables: what is drawn, and that nothing covers anything."""

from __future__ import annotations

import itertools
import sys

import matplotlib.image
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

NAMES = ("zero_figure1", "korthikanti_figure1")


def drawn(plots, figure, name):
    module = plots("reproduce")
    load, draw = module.FIGURES[name]
    data = load()
    draw(figure, data)
    FigureCanvasAgg(figure).draw()
    return data


def test_zero_shows_parts_of_a_rank_beside_the_printed_totals(plots, figure):
    data = drawn(plots, figure, "zero_figure1")
    (ax,) = figure.axes
    assert data.totals == pytest.approx([120, 31.40625, 16.640625, 1.875])
    ends = [bar.get_x() + bar.get_width() for bar in ax.containers[-1]]
    assert ends == pytest.approx(data.totals)
    assert list(ax.lines[0].get_xdata()) == [120, 31.4, 16.6, 1.9]
    assert [text.get_text() for text in ax.texts] == [
        "120 GB; printed 120", "31.406 GB; printed 31.4", "16.641 GB; printed 16.6",
        "1.875 GB; printed 1.9",
    ]  # fmt: skip
    assert "differ by at most 0.041 GB" in figure.get_suptitle()
    assert ax.get_xlabel() == "model states of a rank (GB, 1e9 bytes)"


def test_korthikanti_shows_two_bars_a_model_and_the_device(plots, figure):
    data = drawn(plots, figure, "korthikanti_figure1")
    (ax,) = figure.axes
    assert data.parts["activations"][:2] == [59.25, 9.5625]
    assert data.parts["weights and optimizer"][:2] == [45.5625, 45.5625]
    assert list(ax.lines[0].get_ydata()) == data.published == data.totals
    assert ax.lines[1].get_ydata()[0] == 80
    assert "4 of 4 fit, without 0" in figure.get_suptitle()
    assert ax.get_ylabel().endswith("(GiB)")


@pytest.mark.parametrize("name", NAMES)
def test_a_difference_is_said(plots, figure, name):
    load, draw = plots("reproduce").FIGURES[name]
    data = load()
    data.published[1] += 5
    draw(figure, data)
    assert "differ by at most 5" in figure.get_suptitle()


@pytest.mark.parametrize("name", NAMES)
def test_no_text_covers_another_or_leaves_the_page(plots, figure, name):
    drawn(plots, figure, name)
    page = figure.bbox
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    (ax,) = figure.axes
    # Matplotlib makes tick labels beyond the limits too, and does not draw them.
    beyond = [
        label
        for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim()))
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not min(limits) <= tick.get_loc() <= max(limits)
    ]
    texts = [text for text in texts if text not in beyond]
    boxes = [(text.get_window_extent(), text.get_text()) for text in texts]
    assert len(boxes) > 12
    for box, text in boxes:
        assert page.x0 - 1 <= box.x0 and box.x1 <= page.x1 + 1, text
        assert page.y0 - 1 <= box.y0 and box.y1 <= page.y1 + 1, text
    for (a, first), (b, second) in itertools.combinations(boxes, 2):
        wide = min(a.x1, b.x1) - max(a.x0, b.x0)
        high = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 1 or high <= 1, (first, second)


def run_main(plots, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *map(str, arguments)])
    return plots("reproduce").main()


def test_the_script_writes_both_figures(plots, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "new" / "folder"
    assert run_main(plots, monkeypatch, "--out", folder) == 0
    assert capsys.readouterr().out.split() == [str(folder / f"{name}.png") for name in NAMES]
    for name in NAMES:
        pixels = matplotlib.image.imread(folder / f"{name}.png")[..., :3]
        assert pixels.shape[0] >= 500 and pixels.shape[1] >= 1200
        assert 0.02 < (pixels < 0.98).any(axis=2).mean() < 0.9


def test_a_folder_that_cannot_be_made_is_one_line(plots, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    assert run_main(plots, monkeypatch, "--out", tmp_path / "file") == 2
    assert capsys.readouterr().err.startswith("reproduce: ")
