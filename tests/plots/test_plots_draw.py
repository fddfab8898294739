"""`draw` functions on data made by hand: what is drawn, with which units and titles."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection

from mpisim.plan.ops import OP_TYPES, WAIT_AXIS
from mpisim.report import export_perfetto
from mpisim.report.traces import Overlap


def bars(ax):
    return [patch for container in ax.containers for patch in container]


def legend_texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_bytes_by_kind_has_a_measured_and_a_predicted_bar_per_rank(plots, figure):
    module = plots("bytes_by_kind")
    counts = {"dp all_reduce": [2048, 4096, 6144], "control gather": [0, 7, 7]}
    module.draw(figure, module.BytesByKind("title", counts, counts))
    left, right = figure.axes
    assert len(bars(left)) == len(bars(right)) == 6
    assert [bar.get_height() for bar in bars(left)] == [2, 4, 6, 2, 4, 6]
    assert left.get_ylabel() == "sent over the whole run (KiB)"
    assert right.get_ylabel() == "sent over the whole run (bytes)"
    assert left.get_xlabel() == "rank"
    assert "measured - predicted = 0" in figure.get_suptitle()
    assert "difference 0" in left.get_title(loc="left")


def test_bytes_by_kind_shouts_a_difference(plots, figure):
    module = plots("bytes_by_kind")
    data = module.BytesByKind("title", {"dp all_reduce": [10, 7]}, {"dp all_reduce": [9, 9]})
    module.draw(figure, data)
    assert "MEASURED AND PREDICTED DIFFER by 3 bytes" in figure.get_suptitle()


def test_bytes_by_kind_without_a_prediction(plots, figure):
    module = plots("bytes_by_kind")
    module.draw(figure, module.BytesByKind("title", {"dp all_reduce": [1024, 1024]}, None))
    assert len(bars(figure.axes[0])) == 2
    assert figure.axes[0].get_ylabel() == "sent so far (KiB)"
    assert legend_texts(figure) == ["measured: read off the trace"]


def test_bytes_matrix_shows_both_and_frames_what_differs(plots, figure):
    module = plots("bytes_matrix")
    measured, predicted = [[0, 1 << 20], [5, 0]], [[0, 1 << 20], [4, 0]]
    module.draw(figure, module.BytesMatrix("title", measured, predicted))
    left, right = figure.axes[:2]
    assert [text.get_text() for text in left.texts] == ["1.00\nMiB", "5\nB"]
    assert [text.get_text() for text in right.texts] == ["1.00\nMiB", "4\nB"]
    # The frame is at (receiver 0, sender 1).
    (frame,) = left.patches
    assert (round(frame.get_x()), round(frame.get_y())) == (0, 1)
    assert "DIFFER by 1 bytes" in figure.get_suptitle()
    assert left.get_ylabel() == "sending rank" and left.get_xlabel() == "receiving rank"
    assert figure.axes[-1].get_ylabel() == "bytes over the whole run (MiB)"


def test_bytes_matrix_says_when_all_is_equal(plots, figure):
    module = plots("bytes_matrix")
    module.draw(figure, module.BytesMatrix("title", [[0, 3], [4, 0]], [[0, 3], [4, 0]]))
    assert "7 bytes in all; measured - predicted = 0 in every cell" in figure.get_suptitle()
    assert not figure.axes[0].patches


def test_stalls_stack_causes_and_write_the_share(plots, figure):
    module = plots("stalls")
    spent = {
        0: {("dp", "recv"): 0.2, ("dp", "send"): 0.1, ("control", "recv"): 0.1},
        1: {("dp", "recv"): 0.4, ("control", "send"): 0.2},
    }
    module.draw(figure, module.Stalls("title", spent, 2.0))
    (ax,) = figure.axes
    assert len(bars(ax)) == 6 * 2
    last = ax.containers[-1]
    ends = [bar.get_x() + bar.get_width() for bar in last]
    assert ends == pytest.approx([400, 600])
    assert "(ms)" in ax.get_xlabel()
    assert [text.get_text() for text in ax.texts] == ["400 ms = 20%", "600 ms = 30%"]
    assert "mean over ranks 500 ms, 25% of the step time" in figure.get_suptitle()
    assert len(legend_texts(figure)) == 4


def test_step_time_marks_percentiles_and_leaves_warm_up_out(plots, figure):
    module = plots("step_time")
    seconds = [9.0, 9.0, *([0.010] * 98), 0.020, 0.030]
    module.draw(figure, module.StepTime("title", list(range(102)), seconds, 2))
    left, right = figure.axes
    assert left.get_ylabel() == "time of a step (ms)"
    assert right.get_xlabel() == "number of steps"
    assert sum(patch.get_width() for patch in right.patches) == 100
    assert "p50 10 ms, p95 10 ms, p99 20.1 ms over 100 steps" in figure.get_suptitle()
    # Two warm-up steps of 9 s do not flatten the others.
    assert left.get_ylim()[1] < 40
    assert "2 of the warm-up above the scale" in left.get_title(loc="left")
    levels = sorted(line.get_ydata()[0] for line in right.lines)
    assert levels == pytest.approx([10, 10, 20.1])


def test_convergence_draws_curves_points_and_named_baselines(plots, figure):
    module = plots("convergence")
    data = module.Convergence(
        "title", "nats per byte", list(range(40)), [5 - 0.05 * n for n in range(40)],
        [(19, 4.1), (39, 3.0)], {"unigram entropy": 4.0, "bigram": 3.9},
    )  # fmt: skip
    module.draw(figure, data)
    (ax,) = figure.axes
    assert ax.get_ylabel() == "loss (nats per byte)"
    assert legend_texts(figure) == [
        "training loss of each step", "its centred mean over 3 steps", "held-out loss",
    ]  # fmt: skip
    assert [text.get_text() for text in ax.texts] == ["bigram\n3.900", "unigram entropy\n4.000"]
    assert "held out 3.000 after step 39, 25.0% below the unigram entropy" in figure.get_suptitle()
    flat = [line for line in ax.lines if len(set(line.get_ydata())) == 1]
    assert sorted(line.get_ydata()[0] for line in flat) == [3.9, 4.0]


def test_baselines_are_named_outside_the_data_and_apart(plots, figure):
    module = plots("convergence")
    baselines = {"unigram entropy": 3.02, "bigram": 3.0}
    module.draw(figure, module.Convergence("title", "nats", [0, 1], [5.0, 2.0], [], baselines))
    FigureCanvasAgg(figure).draw()
    (ax,) = figure.axes
    low, high = (text.get_window_extent() for text in ax.texts)
    assert low.y1 <= high.y0
    assert min(low.x0, high.x0) >= ax.bbox.x1


def test_convergence_takes_a_logarithmic_scale_for_wide_ranges(plots, figure):
    module = plots("convergence")
    module.draw(figure, module.Convergence("title", "squared error", [0, 1, 2], [50.0, 1.0, 0.1]))
    assert figure.axes[0].get_yscale() == "log"
    assert figure.axes[0].get_ylabel() == "loss (squared error), logarithmic"


def test_centred_mean_neither_leads_nor_lags(plots):
    module = plots("convergence")
    line = [float(n) for n in range(9)]
    assert module.centred_mean(line, 2) == pytest.approx(line)
    assert module.centred_mean([0.0, 3.0, 0.0], 1) == [0.0, 1.0, 0.0]


def test_labels_that_are_too_close_are_moved_apart(plots):
    places = plots("convergence").spread([0.50, 0.51, 0.9], 0.1)
    assert np.diff(places).min() >= 0.1 - 1e-6
    assert places[2] == 0.9


def test_timeline_draws_every_op_and_message_in_its_row(plots, figure):
    module = plots("timeline")
    lanes = [
        module.Lane(
            rank,
            ops=[(0.0, 0.004, "Forward", "head"), (0.005, 0.010, "wait dp", "")],
            gaps=[(0.004, 0.005)],
            messages=[(0.001, 0.003, 0), (0.005, 0.007, None)],
        )
        for rank in (0, 1)
    ]
    module.draw(figure, module.Timeline("title", lanes, Overlap(4, 3)))
    (ax,) = figure.axes
    collections = [item for item in ax.collections if isinstance(item, PolyCollection)]
    # Two ops and the gap between them; two messages.
    assert [len(item.get_paths()) for item in collections] == [3, 2, 3, 2]
    for number, item in enumerate(collections):
        places = item.get_paths()[0].vertices[:, 1]
        row = number // 2
        assert row - 0.5 < places.min() < places.max() < row + 0.5
    assert ax.get_xlabel() == "time since the first op shown (ms)"
    assert ax.get_xlim() == (0, 10)
    assert [text.get_text() for text in ax.texts] == ["head", "head"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    assert "75% of the ring steps" in figure.get_suptitle()
    assert legend_texts(figure) == [
        "forward", "wait for gradients (dp)", "received: bucket 0", "received: scalars",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("buckets", "labels"),
    [
        ([0], ["bucket 0"]),
        ([0, 1], ["bucket 0", "bucket 1"]),
        ([0, 1, 2], ["buckets 0, 2", "bucket 1"]),
        ([0, 1, 2, 3, 4], ["buckets 0, 2, ...", "buckets 1, 3"]),
    ],
)
def test_timeline_names_the_buckets_that_are_there(plots, figure, buckets, labels):
    module = plots("timeline")
    messages = [(0.001 * number, 0.001 * number + 0.0005, number) for number in buckets]
    lane = module.Lane(0, ops=[(0.0, 0.01, "wait dp", "")], messages=messages)
    module.draw(figure, module.Timeline("title", [lane]))
    assert legend_texts(figure)[1:] == [f"received: {label}" for label in labels]
    received = [item for item in figure.axes[0].collections if isinstance(item, PolyCollection)][1]
    colours = {tuple(colour) for colour in received.get_facecolors()}
    assert len(colours) == min(2, len(buckets))


def test_timeline_draws_recompute_and_the_gradient_norm_as_what_they_are(plots, figure, runs):
    module = plots("timeline")
    data = module.load(runs["decoder"])
    for lane in data.lanes:
        again = [block for *_, key, block in lane.ops if key == "Recompute"]
        assert again == ["block1", "block0"]
        # The norm and the update.
        assert sum(key == "OptimizerStep" for *_, key, _ in lane.ops) == 2
        assert not any(key == "other compute" for *_, key, _ in lane.ops)
    module.draw(figure, data)
    assert "recompute" in legend_texts(figure)
    assert "gradient norm, optimizer" in legend_texts(figure)
    assert "other compute" not in legend_texts(figure)


def test_every_kind_of_op_has_a_colour_and_a_label(plots):
    """An op that is added must not turn up black and nameless."""
    common, module = plots("common"), plots("timeline")
    expanded = {kind for kind in OP_TYPES if kind.endswith("Stage")}
    computing = set(OP_TYPES) - expanded - {op.__name__ for op in WAIT_AXIS}
    drawn = {module.DRAWN_AS.get(kind, kind) for kind in computing}
    assert drawn <= set(common.OP_COLOURS)
    assert set(common.OP_COLOURS) == set(common.KIND_LABELS)
    assert set(common.WAIT_COLOURS) == set(module.WAIT_LABELS)
    assert set(WAIT_AXIS.values()) <= set(module.WAIT_LABELS)


def test_a_narrow_bar_has_the_number_of_its_block(plots, figure):
    module = plots("timeline")
    ops = [
        (0.0, 0.8, "Forward", "block10"), (0.8, 0.83, "Recompute", "block11"),
        (0.83, 0.86, "Backward", "embed"), (0.86, 0.862, "Backward", "block12"),
        (0.862, 1.0, "Backward", "block13"),
    ]  # fmt: skip
    module.draw(figure, module.Timeline("title", [module.Lane(0, ops=ops)]))
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.texts] == ["block10", "11", "block13"]
    assert [text.get_color() for text in ax.texts] == ["black", "black", "white"]


def skipped_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if row.get("skipped")]


def test_timeline_says_what_was_skipped_and_prefers_an_update(plots, runs):
    module, run = plots("timeline"), runs["decoder"]
    skipped = skipped_of(run)
    # The middle of the run would be a skipped step.
    assert skipped == list(range(len(skipped))) and 12 < len(skipped) < 23
    chosen = module.load(run).title
    assert "skipped" not in chosen
    assert int(chosen.split()[3]) not in skipped
    assert module.load(run, 1).title.startswith("Timeline of step 1, skipped (run")
    last = skipped[-1]
    few, many = module.load(run, last - 1, 3).title, module.load(run, last - 5, 7).title
    assert f"steps {last - 1} to {last + 1}, skipped: {last - 1}, {last} (" in few
    assert f"steps {last - 5} to {last + 1}, skipped: 6 of them (" in many


def test_convergence_marks_skipped_steps_on_the_upper_edge(plots, figure):
    module = plots("convergence")
    data = module.Convergence(
        "title", "nats", [1, 2, 3, 4], [5.0, 4.0, 3.0, 2.0], skipped=[0, 2, 6], not_finite=2
    )
    module.draw(figure, data)
    FigureCanvasAgg(figure).draw()
    (ax,) = figure.axes
    (marks,) = [line for line in ax.lines if line.get_marker() == "x"]
    points = marks.get_transform().transform(marks.get_xydata())
    assert points[:, 1] == pytest.approx(ax.bbox.y1)
    # Neither the marks nor what is left out changes the scale of the losses.
    assert ax.get_ylim() == pytest.approx((2 - 0.21, 5 + 0.21))
    assert ax.get_xlim() == (0, 6)
    assert ax.get_xlabel() == "step (2 losses not finite, left out)"
    assert "skipped steps: 3" in legend_texts(figure)


def test_convergence_reads_skips_and_leaves_out_what_is_not_finite(plots, runs, tmp_path):
    module = plots("convergence")
    run = shutil.copytree(runs["decoder"], tmp_path / "broken")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"] == 3 and "loss" in row:
            row["loss"] = None
        if row["step"] == 23 and "heldout_loss" in row:
            row["heldout_loss"] = None
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = module.load(run)
    assert 3 not in data.steps and 3 in data.skipped
    assert data.skipped == skipped_of(run)
    assert [step for step, _ in data.heldout] == [11]
    assert data.not_finite == 2
    assert np.isfinite([*data.losses, *(loss for _, loss in data.heldout)]).all()


def test_convergence_draws_the_unigram_model_that_it_compares_with(plots, figure, runs):
    """The decoder's bits per byte are compared with the model's, not with the entropy."""
    module = plots("convergence")
    data = module.load(runs["decoder"])
    known = json.loads((runs["decoder"] / "summary.json").read_text())["baselines"]
    assert data.baselines["unigram"] == known["unigram_cross_entropy_nats"]
    assert "unigram entropy" not in data.baselines
    assert "unigram entropy" in module.load(runs["text"]).baselines


def test_step_time_crosses_out_skipped_steps(plots, figure, runs):
    module = plots("step_time")
    module.draw(figure, module.StepTime("title", [0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], 1, [0, 2]))
    left = figure.axes[0]
    assert left.get_xlabel() == "step"
    crosses = [np.asarray(item.get_offsets()).tolist() for item in left.collections]
    assert crosses[-1] == [[0, 100], [2, pytest.approx(300)]]
    assert "a skipped step" in legend_texts(figure)
    assert module.load(runs["decoder"]).skipped == skipped_of(runs["decoder"])
    assert module.load(runs["several"]).skipped == []


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [5.0, 5.001, 5.002], [1.0, 9.0]])
def test_bars_of_step_times_hold_all_and_are_never_hairlines(plots, values):
    edges = plots("step_time")._edges(values, 10.0)
    assert edges[0] <= min(values) and max(values) <= edges[-1]
    assert np.diff(edges).min() >= 10 / 60 - 1e-9
    assert sum(np.histogram(values, edges)[0]) == len(values)


def test_stalls_name_only_what_was_waited_for(plots, figure):
    module = plots("stalls")
    spent = {0: {("dp", "recv"): 0.2, ("dp", "send"): 0.0}, 1: {("control", "recv"): 0.1}}
    module.draw(figure, module.Stalls("title", spent, 2.0))
    assert legend_texts(figure) == ["dp: a message", "control: a message"]


def test_memory_shows_master_params_and_the_saw_tooth_of_recompute(plots, figure, runs):
    module = plots("memory")
    data = module.load(runs["decoder"])
    assert data.recompute == "full"
    training, evaluation = data.curves
    assert training.name == "training step 1, skipped"
    assert evaluation.name.startswith("evaluation after step") and "skip" not in evaluation.name
    assert training.live_bytes["master_params"].min() == 2 * training.live_bytes["params"].max()
    # Up through the forwards; then down, block by block: a replay's op is as full as a backward.
    held = training.live_bytes["activations"]
    top = int(np.argmax(held))
    assert (np.diff(held[: top + 1]) > 0).sum() >= 2 and (np.diff(held[top:]) < 0).sum() >= 2
    module.draw(figure, data)
    assert "master_params" in legend_texts(figure)
    assert "(recompute full)" in figure.get_suptitle()
    assert module.load(runs["several"]).recompute == "none"


def exported(run, out):
    export_perfetto(run, out)
    return [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]


def test_perfetto_names_recomputed_blocks_and_skipped_steps(runs, tmp_path):
    """DESIGN: what runs on commit only is reported by the branch that was taken."""
    events = exported(runs["decoder"], tmp_path / "trace.json")
    again = [e["name"] for e in events if e["name"].startswith("Recompute")]
    assert set(again) == {"Recompute block0", "Recompute block1"}
    skipped = skipped_of(runs["decoder"])
    for kind in ("step", "compute"):
        named = [
            e for e in events
            if e["cat"] == kind and (kind == "step" or e["name"].startswith("OptimizerStep"))
            and not e["name"].startswith("evaluation")
        ]  # fmt: skip
        assert len(named) == 2 * 24
        for event in named:
            step, args = event["args"]["step"], event["args"]
            assert event["name"].endswith(" (skipped)") == (step in skipped)
            assert args["branch"] == ("skip" if step in skipped else "commit")
            if step in skipped:
                assert args["loss_scale"] == 2.0 ** (30 - step)
    assert all("branch" not in e["args"] for e in events if e["name"].startswith("evaluation"))


def test_perfetto_without_a_record_of_the_steps_tells_no_branch(runs, tmp_path):
    """Traces alone export; so do those of a run whose last step is in no line."""
    alone = tmp_path / "alone"
    shutil.copytree(runs["decoder"] / "trace", alone / "trace")
    events = exported(alone, tmp_path / "alone.json")
    assert events and not any("branch" in e["args"] or "skipped" in e["name"] for e in events)
    cut = shutil.copytree(runs["decoder"], tmp_path / "cut")
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:2]))
    events = exported(cut, tmp_path / "cut.json")
    assert {e["args"]["step"] for e in events if "branch" in e["args"]} == {0, 1}


def test_timeline_shows_a_middle_step_after_warm_up(plots, runs):
    data = plots("timeline").load(runs["several"])
    assert data.title.startswith("Timeline of step 5 ")
    assert [lane.rank for lane in data.lanes] == [0, 1, 2]
    kinds = [key for _, _, key, _ in data.lanes[0].ops]
    # The norm and the update.
    assert kinds[0] == "wait control" and kinds.count("OptimizerStep") == 2
    assert min(start for lane in data.lanes for start, *_ in lane.ops) == 0
    for lane in data.lanes:
        assert len(lane.gaps) == len(lane.ops) - 1
        assert all(start <= end for start, end, *_ in [*lane.ops, *lane.gaps, *lane.messages])


def test_timeline_shows_evaluations_only_between_steps(plots, runs):
    module = plots("timeline")
    # Step 3 is followed by an evaluation.
    assert sum(key == "LoadBatch" for _, _, key, _ in module.load(runs["one"], 3).lanes[0].ops) == 2
    two = module.load(runs["one"], 3, 2)
    assert "steps 3 to 4" in two.title
    assert sum(key == "OptimizerStep" for _, _, key, _ in two.lanes[0].ops) == 2 * 2
    assert sum(key == "LoadBatch" for _, _, key, _ in two.lanes[0].ops) > 4


def curve(module, **live):
    arrays = {name: np.array(values, dtype=float) for name, values in live.items()}
    return module.Curve("training step 1", np.array([0.0, 0.001, 0.002, 0.004]), arrays)


def test_memory_holds_each_level_while_its_op_runs(plots, figure):
    module = plots("memory")
    made = curve(module, params=[1024, 1024, 1024], activations=[0, 2048, 0])
    lines = {"predicted peak": 4096, "measured peak": 4096, "budget": 5000}
    module.draw(figure, module.Memory("title", [made], lines))
    (ax,) = figure.axes
    top = ax.collections[-1].get_paths()[0].vertices
    # In KiB and ms: an op's level spans the op; the second, from 1 to 2 ms, holds 3.
    assert top[top[:, 0] < 0.999, 1].max() == 1
    assert top[(top[:, 0] > 1.001) & (top[:, 0] < 1.999), 1].max(initial=3) == 3
    assert top[top[:, 0] > 2.001, 1].max() == 1
    assert ax.get_ylabel() == "live bytes (KiB)"
    assert ax.get_xlabel() == "time since its start (ms)"
    assert ax.get_ylim()[1] > 5000 / 1024
    assert [line.get_ydata()[0] * 1024 for line in ax.lines] == [4096, 4096, 5000]
    assert legend_texts(figure) == [
        "activations", "params", "predicted peak: 4.00 KiB", "measured peak: 4.00 KiB",
        "budget: 4.88 KiB",
    ]  # fmt: skip


def test_memory_budget_comes_from_the_config_when_it_has_one(plots, runs, tmp_path):
    module = plots("memory")
    assert "budget" not in module.load(runs["several"]).lines
    run = shutil.copytree(runs["several"], tmp_path / "budgeted")
    record = json.loads((run / "run.json").read_text())
    record["config"]["memory"] = {"budget_bytes": 12345}
    (run / "run.json").write_text(json.dumps(record))
    assert module.load(run).lines["budget"] == 12345


def test_memory_shows_a_step_and_an_evaluation_that_never_pass_the_peak(plots, runs):
    data = plots("memory").load(runs["several"])
    assert [made.name.split()[0] for made in data.curves] == ["training", "evaluation"]
    assert data.lines["predicted peak"] == data.lines["measured peak"]
    for made in data.curves:
        assert len(made.time_s) == len(made.live_bytes["params"]) + 1
        assert (np.diff(made.time_s) >= 0).all()
        assert sum(made.live_bytes.values()).max() <= data.lines["measured peak"]


# Linear RGB as full colour blindness of each kind sees it (Machado, Oliveira, Fernandes 2009).
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}


def lab(colour, vision):
    """Return a colour in CIE Lab, as `vision` sees it."""
    rgb = np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(VISION[vision] @ linear, 0, 1)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(to_xyz @ linear / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


SPLIT_KINDS = ("Forward", "Backward", "BackwardInput", "BackwardWeight")


def test_chunks_are_shades_from_the_colour_of_the_kind_on(plots):
    common = plots("common")
    for kind in SPLIT_KINDS:
        shades = [common.kind_colour(kind, chunk, 4) for chunk in range(4)]
        assert shades[0] == common.kind_colour(kind) == common.OP_COLOURS[kind]
        light = [lab(shade, "normal")[0] for shade in shades]
        steps = np.diff(light)
        assert (steps > 1).all() or (steps < -1).all()
    assert common.kind_colour("Recompute", 1, 2) == common.OP_COLOURS["Recompute"]


@pytest.mark.parametrize("vision", VISION)
def test_colours_of_one_picture_can_be_told_apart(plots, vision):
    common = plots("common")
    timeline = [
        *common.OP_COLOURS.values(),
        *common.WAIT_COLOURS.values(),
        *plots("timeline").BUCKET_COLOURS,
        plots("timeline").SCALARS_COLOUR,
        plots("timeline").PARAMS_COLOUR,
    ]
    # Of the last of several chunks; that of the first is among those of ops. No schedule of ours
    # has whole backwards and halves in the same chunk.
    last = {kind: common.kind_colour(kind, 1, 2) for kind in SPLIT_KINDS}
    palettes = {
        "whole backwards": [*timeline, *(last[kind] for kind in ("Forward", "Backward"))],
        "halves": [*timeline, *(last[kind] for kind in SPLIT_KINDS if kind != "Backward")],
        "stalls": [*common.STALL_COLOURS.values()],
        "memory": [*common.MEMORY_COLOURS.values()],
        "bars": [common.MEASURED, common.PREDICTED],
        "percentiles": [*plots("step_time").PERCENTILES.values()],
    }
    for name, colours in palettes.items():
        for first, second in itertools.combinations(colours, 2):
            distance = np.linalg.norm(lab(first, vision) - lab(second, vision))
            assert distance > 15, (name, first, second)


def test_units_fit_the_numbers(plots):
    common = plots("common")
    assert common.byte_unit(5 << 20) == (1 << 20, "MiB")
    assert common.byte_unit(1023) == (1.0, "bytes")
    assert common.time_unit(0.5) == (1e-3, "ms")
    assert common.time_unit(2e-5) == (1e-6, "us")
    assert common.time_unit(3) == (1.0, "s")


# -- stages ----------------------------------------------------------------------------------------


def test_timeline_of_stages_numbers_microbatches_and_draws_what_crosses(plots, figure, runs):
    module = plots("timeline")
    data = module.load(runs["stages"])
    assert [lane.stage for lane in data.lanes] == [0, 1, 0, 1]
    assert data.bubble == pytest.approx(1 / 13)
    # Four microbatches over one boundary and back, in each of two pipelines; no row but one's own.
    assert len(data.crossings) == 2 * 2 * 4
    for crossing in data.crossings:
        pair = (crossing.source, crossing.dest)
        assert pair in (((1, 0), (3, 2)) if crossing.is_grad else ((0, 1), (2, 3)))
        assert 0 <= crossing.sent_s <= crossing.received_s
    for lane in data.lanes:
        kinds = {key for _, _, key, _ in lane.ops}
        assert {"Forward", "BackwardInput", "BackwardWeight", "wait pp", "wait control"} <= kinds
        assert "Backward" not in kinds and "other compute" not in kinds
        for key in ("Forward", "BackwardInput", "BackwardWeight"):
            labels = [label for _, _, of, label in lane.cells if of == key]
            assert list(dict.fromkeys(labels)) == ["0", "1", "2", "3"]
        # Of the messages only gradient buckets have a lane: stages wait for all others in the open.
        assert all(bucket is not None for *_, bucket in lane.messages)
    module.draw(figure, data)
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        f"rank {rank}\nstage {rank % 2}" for rank in range(4)
    ]
    lines = [item for item in ax.collections if isinstance(item, LineCollection)]
    assert [len(item.get_segments()) for item in lines] == [8, 8]
    assert {"backward, input half", "backward, weight half", "wait for another stage (pp)"} <= set(
        legend_texts(figure)
    )
    assert "dp 2 x pp 2, zb-h1" in figure.get_suptitle()
    assert "equal stages by the schedule: 8% idle" in figure.get_suptitle()


def test_neighbours_of_one_microbatch_are_one_cell(plots, figure):
    module = plots("timeline")
    cells = []
    ops = [
        (0.0, 1.0, "Forward", "3b"), (1.1, 2.0, "Forward", "3b"), (2.0, 2.5, "wait pp", ""),
        (2.5, 3.0, "Forward", "3b"),
    ]  # fmt: skip
    for number, op in enumerate(ops):
        if op[3]:
            module._add_cell(cells, op, follows=ops[number - 1 : number] if number else [])
    assert cells == [(0.0, 2.0, "Forward", "3b"), (2.5, 3.0, "Forward", "3b")]
    lane = module.Lane(1, ops=ops, stage=1, cells=cells)
    module.draw(figure, module.Timeline("title", [lane], bubble=0.25))
    assert [text.get_text() for text in figure.axes[0].texts] == ["3b", "3b"]
    assert "equal stages by the schedule: 25% idle" in figure.get_suptitle()


def test_timeline_of_chunks_names_places_and_letters(plots, figure):
    """Several stages of a rank: it is named by its place; chunks by letter and shade."""
    module, common = plots("timeline"), plots("common")
    ops = [(0.0, 4.0, "Forward", "block0"), (4.0, 8.0, "Forward", "block5"),
           (8.0, 9.0, "Recompute", "block5")]  # fmt: skip
    cells = [(0.0, 4.0, "Forward", "0a"), (4.0, 8.0, "Forward", "0b")]
    lane = module.Lane(1, ops=ops, stage=1, cells=cells)
    module.draw(
        figure,
        module.Timeline("t", [lane], bubble=0.1, chunks={"block0": 0, "block5": 1}, num_chunks=2),
    )
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 1\nplace 1"]
    assert legend_texts(figure) == ["forward, chunk a", "forward, chunk b", "recompute"]
    assert figure.get_suptitle().endswith("\nnumbers: microbatches, letters: chunks of the rank")
    assert [(text.get_text(), text.get_color()) for text in ax.texts] == [
        ("0a", common.ink(common.kind_colour("Forward", 0, 2))),
        ("0b", common.ink(common.kind_colour("Forward", 1, 2))),
    ]


def test_timeline_tells_a_wait_for_a_message_from_one_for_a_send(plots, figure):
    module = plots("timeline")
    ops = [(0.0, 1.0, "wait pp", ""), (1.0, 2.0, "wait sends", ""), (2.0, 4.0, "wait control", "")]
    lane = module.Lane(0, ops=ops, stage=0)
    module.draw(figure, module.Timeline("title", [lane]))
    assert "25% waiting for another stage, 50% for all ranks" in figure.get_suptitle()
    assert legend_texts(figure) == [
        "wait for another stage (pp)", "wait for a send to leave (pp)",
        "wait for scalars (control)",
    ]  # fmt: skip


def test_bytes_by_kind_leaves_out_what_nobody_sent(plots, figure, runs, tmp_path):
    module = plots("bytes_by_kind")
    data = module.load(runs["stages"])
    assert list(data.measured) == [
        "dp all_reduce", "pp activation", "pp grad", "pp all_reduce", "control all_reduce",
        "control gather",
    ]  # fmt: skip
    assert data.measured == data.predicted
    module.draw(figure, data)
    titles = [ax.get_title(loc="left").split("\n")[0] for ax in figure.axes]
    assert "tied table on pp" in titles and len(titles) == 6
    assert len({round(ax.get_position().y0, 3) for ax in figure.axes}) == 2
    run = shutil.copytree(runs["several"], tmp_path / "several")
    summary = json.loads((run / "summary.json").read_text())
    for entry in summary["ranks"]:
        entry["traffic"]["pp grad"] = entry["predicted_traffic"]["pp grad"] = {"sent_bytes": 0}
    (run / "summary.json").write_text(json.dumps(summary))
    assert list(module.load(run).measured) == [
        "dp all_reduce", "control all_reduce", "control gather",
    ]  # fmt: skip


def test_bytes_by_kind_of_a_predicted_message_that_nobody_sent(plots, runs, tmp_path):
    """It must not be hidden: that is what the picture is for."""
    run = shutil.copytree(runs["several"], tmp_path / "missing")
    summary = json.loads((run / "summary.json").read_text())
    summary["ranks"][1]["predicted_traffic"]["pp grad"] = {"sent_bytes": 9}
    (run / "summary.json").write_text(json.dumps(summary))
    data = plots("bytes_by_kind").load(run)
    assert (data.measured["pp grad"], data.predicted["pp grad"]) == ([0, 0, 0], [0, 9, 0])


def test_stalls_and_memory_name_the_stage(plots, figure, runs):
    module = plots("stalls")
    data = module.load(runs["stages"])
    assert data.names == [f"rank {rank}, stage {rank % 2}" for rank in range(4)]
    module.draw(figure, data)
    assert "pp: a message" in legend_texts(figure)
    assert "on rank 1, stage 1 (run" in plots("memory").load(runs["stages"], 1).title


@pytest.mark.parametrize("name", ["timeline", "bytes_by_kind", "stalls", "memory", "bytes_matrix"])
def test_the_committed_run_of_before_is_drawn(plots, figure, name):
    run = Path(__file__).parents[2] / "experiments" / "overlap" / "run"
    module = plots(name)
    module.draw(figure, module.load(run))
    assert "pp" not in "".join(legend_texts(figure))
