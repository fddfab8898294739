"""Two runs side by side: hand-made runs to the letter, real runs, and runs that are not whole."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

import mpisim
from mpisim.errors import CheckpointError
from mpisim.layouts.metrics import CHANNELS, MEMORY_CATEGORIES, METRIC_NAMES, TRAFFIC_FIELDS
from mpisim.report.compare import compare_rows, compare_text
from mpisim.report.compare_figures import as_float

OVERLAP = Path(__file__).parents[2] / "experiments" / "overlap" / "run"


def make_run(path, *, losses=(5.0, 4.0, 3.5, 3.25), ranks=2, heldout=1.5, step_s=0.01, **parts):
    """Write a run directory with round numbers; all ranks do the same."""
    path.mkdir(parents=True)
    train = {"steps": len(losses), "warmup_report_steps": 1}
    config = {
        "run": {"name": path.name},
        "data": {"kind": "stdlib"},
        "model": {"kind": "mlp", "hidden": [8, 8]},
        "train": train,
    }
    for section, values in parts.pop("config", {}).items():
        config.setdefault(section, {}).update(values)
    record = {
        "version": 1, "name": path.name, "seed": 0, "config": config,
        "data": {"name": "by hand", "sha256": "cd" * 32}, "ranks": ranks,
        "mesh": {"dp": ranks}, "hosts": ["here"] * ranks, "cores": 2,
        "versions": {"mpisim": "1", "mpi": "none"}, "started": path.name, "ended": path.name,
    } | parts  # fmt: skip
    (path / "run.json").write_text(json.dumps(record))
    figures = {name: [0.0] * 4 for name in METRIC_NAMES}
    figures |= {"step_s": [step_s] * 4, "stall_dp_recv_s": [step_s / 4] * 4}
    figures |= {"peak_params_bytes": [2048.0] * 4, "peak_total_bytes": [2048.0] * 4}
    figures |= {f"dp_all_reduce_{field}": [8.0, 4.0, 6.0, 8.0] for field in TRAFFIC_FIELDS}
    lines = [
        {"step": step, "loss": loss, "rows": 100, "targets": 100, "step_s": step_s,
         "ranks": figures}
        for step, loss in enumerate(losses)
    ]  # fmt: skip
    if heldout is not None:
        last = {"heldout_loss": heldout, "heldout_rows": 10, "heldout_top1": 0.25}
        lines.append({"step": len(losses) - 1} | last)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = dict(zip(TRAFFIC_FIELDS, (6, 1000, 6, 1000), strict=True))
    nothing = dict.fromkeys(TRAFFIC_FIELDS, 0)
    traffic = {
        f"{axis} {name}": counts if (axis, name) == ("dp", "all_reduce") else nothing
        for axis, name in CHANNELS
    }
    peak = {**dict.fromkeys(MEMORY_CATEGORIES, 0), "params": 2048 * ranks}
    entry = {
        "traffic": traffic, "predicted_traffic": traffic, "stall_s": {"dp recv": 0.1},
        "memory": {"peak": peak, "peak_total": 2048 * ranks},
        "predicted_memory": {"peak": peak, "peak_total": 2048 * ranks, "peak_op": "x"},
        "resident_peak_bytes": 1 << 20, "params_sha256": "ab" * 32,
    }  # fmt: skip
    matrix = [[0 if a == b else 1000 // (ranks - 1) for b in range(ranks)] for a in range(ranks)]
    summary = {
        "wall_s": 2.0, "baselines": {}, "primary_baseline": None, "bytes_matrix": matrix,
        "predicted_bytes_matrix": matrix, "ranks": [entry | {"rank": r} for r in range(ranks)],
    }  # fmt: skip
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_steps(run, change):
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def section(rows, wanted, /, **keys):
    return [
        row
        for row in rows
        if row["section"] == wanted and all(row[key] == value for key, value in keys.items())
    ]


def figure(rows, name):
    (row,) = section(rows, "figure", name=name)
    return row["a"], row["b"]


def test_two_hand_made_runs_to_the_letter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = make_run(Path("one"))
    two = make_run(
        Path("two"), losses=(5.0, 4.5, 3.5), ranks=3, heldout=1.75, step_s=0.02,
        config={"model": {"hidden": [16], "dropout": 0.5}, "train": {"warmup_report_steps": 0}},
        versions={"mpisim": "2", "mpi": "none"}, data={"name": "other", "sha256": "ef" * 32},
    )  # fmt: skip
    edit(two / "summary.json", lambda s: [e.update(params_sha256="99" * 32) for e in s["ranks"]])
    assert compare_text(one, two) == (
        """\
A  one  2 ranks  4 steps  none
B  two  3 ranks  3 steps  none

config: 5 fields differ
  field                      A       B
  run.name                   "one"   "two"
  model.hidden               [8, 8]  [16]
  train.steps                4       3
  train.warmup_report_steps  1       0
  model.dropout              (none)  0.5
versions and machine: 2 fields differ
  field   A    B
  ranks   2    3
  mpisim  "1"  "2"
data: DIFFERENT bytes
  field  A          B
  name   "by hand"  "other"
  sha256
    A  "cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd"
    B  "efefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefef"

training loss, nats: all 3 common steps
  step         A         B  B - A
     0  5.000000  5.000000      0
     1  4.000000  4.500000   +0.5
     2  3.500000  3.500000      0

figures; rates, latency and stalls are without warm-up
                                                     A               B  B / A
  first loss, nats (step 0)                     5.0000          5.0000      1
  last loss, nats (steps 3, 2)                  3.2500          3.5000   1.08
  held-out loss, nats (steps 3, 2)              1.5000          1.7500   1.17
  held-out bits per byte (steps 3, 2)           2.1640          2.5247   1.17
  held-out top-1 (steps 3, 2)                    25.0%           25.0%      1
  throughput                           10,000 tokens/s  5,000 tokens/s    0.5
  step p50                                       10 ms           20 ms      2
  step p95                                       10 ms           20 ms      2
  stall per step                                2.5 ms            5 ms      2
  wall time                                        2 s             2 s      1

traffic sent by all ranks: measured beside the step tables
  channel                      A  table      B  table  B / A
  dp all_reduce  messages     12     12     18     18    1.5
  dp all_reduce  bytes     2,000  2,000  3,000  3,000    1.5

stalls of a step, mean over ranks, without warm-up, and their share of step time
  waited for            A            B
  dp receive       2.5 ms  25.0%  5 ms  25.0%
  dp send             0 s   0.0%   0 s   0.0%
  control receive     0 s   0.0%   0 s   0.0%
  control send        0 s   0.0%   0 s   0.0%

memory: peak of the largest rank
  category         A  predicted         B  predicted  B / A
  params    4.00 KiB   4.00 KiB  6.00 KiB   6.00 KiB    1.5
  total     4.00 KiB   4.00 KiB  6.00 KiB   6.00 KiB    1.5
  resident  1.00 MiB          -  1.00 MiB          -      1

verdict: training losses differ at 1 of 3 common steps (A has 4, B 3), first at step 1;
  largest difference 0.5 (relative 0.111) at step 1
verdict: final weights differ
"""
    )


# -- the verdict -----------------------------------------------------------------------------------


def test_a_run_equals_itself(tmp_path):
    run = make_run(tmp_path / "one")
    rows = compare_rows(run, run)
    assert not section(rows, "config") and not section(rows, "machine")
    (training, heldout), (weights,) = section(rows, "verdict"), section(rows, "weights")
    assert training["bitwise_equal"] and training["common_steps"] == 4
    assert training["largest_difference"] == 0 and training["first_differing_step"] is None
    assert heldout["bitwise_equal"] and weights["bitwise_equal"]
    assert section(rows, "data")[0]["same"] is True
    text = compare_text(run, run)
    assert "verdict: training losses are bitwise equal at 4 common steps\n" in text
    assert f"verdict: final weights, as recorded, are bitwise equal (sha256 {'ab' * 8})\n" in text
    assert "config: nothing differs" in text and "versions and machine: nothing differs" in text


def test_the_last_bit_of_one_loss_is_found(tmp_path):
    one = make_run(tmp_path / "one", losses=(5.0, 4.0, 3.0, 2.0))
    two = make_run(tmp_path / "two", losses=(5.0, 4.0, math.nextafter(3.0, 4.0), 2.0))
    (row, _) = section(compare_rows(one, two), "verdict")
    assert row["bitwise_equal"] is False and row["differing_steps"] == 1
    assert row["first_differing_step"] == row["largest_difference_step"] == 2
    assert row["largest_difference"] == 2**-51
    assert row["largest_relative_difference"] == pytest.approx(2**-51 / 3)
    assert "differ at 1 of 4 common steps, first at step 2" in compare_text(one, two)


def test_the_first_and_the_largest_difference_are_told_apart(tmp_path):
    one = make_run(tmp_path / "one", losses=(5.0, 4.0, 3.0, 2.0))
    two = make_run(tmp_path / "two", losses=(5.0, 4.1, 3.0, 1.0))
    (row, _) = section(compare_rows(one, two), "verdict")
    assert (row["first_differing_step"], row["largest_difference_step"]) == (1, 3)
    assert (row["largest_difference"], row["largest_relative_difference"]) == (1.0, 0.5)


def test_plus_and_minus_zero_are_other_bits(tmp_path):
    one = make_run(tmp_path / "one", losses=(1.0, 0.0))
    two = make_run(tmp_path / "two", losses=(1.0, -0.0))
    (row, _) = section(compare_rows(one, two), "verdict")
    assert row["bitwise_equal"] is False and row["largest_difference"] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(tmp_path, value):
    """In one run it is the largest difference; in both it is no difference."""
    one = make_run(tmp_path / "one", losses=(5.0, 4.0, 3.0))
    two = make_run(tmp_path / "two", losses=(6.0, value, 2.0))
    rows = compare_rows(one, two)
    (row, _) = section(rows, "verdict")
    assert row["largest_difference"] is None and row["largest_difference_step"] == 1
    json.dumps(rows, allow_nan=False)
    text = compare_text(one, two)
    assert "largest difference not finite in one run at step 1" in text
    assert text.count("not finite") == 3  # B and B - A of the table, and the verdict
    (row, _) = section(compare_rows(two, two), "verdict")
    assert row["bitwise_equal"] is True


def test_other_units_are_not_compared(tmp_path):
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", config={"data": {"kind": "regression"}})
    rows = compare_rows(one, two)
    assert not section(rows, "curve")
    assert [row["unit"] for row in section(rows, "figure", name="last loss")] == [
        "nats", "squared error",
    ]  # fmt: skip
    assert "cannot be compared: nats in A, squared error in B" in compare_text(one, two)


def test_runs_without_a_common_step(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    edit_steps(two, lambda row: row.update(step=row["step"] + 100))
    rows = compare_rows(one, two)
    assert section(rows, "verdict")[0]["bitwise_equal"] is None
    assert "training losses cannot be compared: 0 common steps" in compare_text(one, two)


def test_replicas_that_differ_are_no_set_of_weights(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    edit(two / "summary.json", lambda s: s["ranks"][1].update(params_sha256="0"))
    assert section(compare_rows(one, two), "weights")[0]["bitwise_equal"] is None
    assert "no one set in B" in compare_text(one, two)


def test_long_curves_are_shown_in_ten_rows_with_both_ends(tmp_path):
    losses = [5.0 - step / 1000 for step in range(537)]
    one, two = make_run(tmp_path / "one", losses=losses), make_run(tmp_path / "two", losses=losses)
    rows = compare_rows(one, two)
    steps = [row["step"] for row in section(rows, "curve")]
    assert len(steps) == 10 and steps[0] == 0 and steps[-1] == 536
    gaps = {after - before for before, after in zip(steps, steps[1:], strict=False)}
    assert max(gaps) - min(gaps) <= 1
    assert section(rows, "verdict")[0]["common_steps"] == 537
    assert "training loss, nats: 10 of 537 common steps" in compare_text(one, two)


# -- what went in ----------------------------------------------------------------------------------


def test_types_of_config_values_count(tmp_path):
    one = make_run(tmp_path / "one", config={"run": {"name": "x"}, "a": {"b": 1, "c": None}})
    two = make_run(tmp_path / "two", config={"run": {"name": "x"}, "a": {"b": 1.0, "c": None}})
    (row,) = section(compare_rows(one, two), "config")
    assert (row["field"], row["a"], row["b"], row["only_in"]) == ("a.b", 1, 1.0, None)


def test_fields_that_one_run_does_not_know(tmp_path):
    """As between versions: null is a value, absence is none."""
    one = make_run(tmp_path / "one", config={"run": {"name": "x"}, "new": {"path": None}})
    two = make_run(tmp_path / "two", config={"run": {"name": "x"}})
    (row,) = section(compare_rows(one, two), "config")
    assert (row["field"], row["only_in"]) == ("new.path", "a")
    assert '  new.path  null  (none)\n' in compare_text(one, two)  # fmt: skip
    many = {f"field{number}": number for number in range(9)}
    three = make_run(tmp_path / "three", config={"run": {"name": "x"}, "newer": many})
    assert len(section(compare_rows(two, three), "config", only_in="b")) == 9
    text = compare_text(two, three)
    assert "9 fields in B only" in text and "field3" not in text


def test_machines_are_compared_by_what_the_record_says(tmp_path):
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", hosts=["there", "here"], cores=64, kernels={"name": "numba"})
    found = {
        row["field"]: (row["a"], row["b"]) for row in section(compare_rows(one, two), "machine")
    }
    assert found == {
        "hosts": (["here"], ["here", "there"]),
        "cores": (2, 64),
        "kernels.name": (None, "numba"),
    }
    assert "2 ranks on 2 hosts" in compare_text(one, two)


def test_the_same_bytes_cut_otherwise_are_the_same_data(tmp_path):
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", data={"name": "by hand", "sha256": "cd" * 32, "window": 9})
    head, *rest = section(compare_rows(one, two), "data")
    assert head["same"] is True and [row["field"] for row in rest] == ["window"]
    text = compare_text(one, two)
    assert f"data: the same bytes (sha256 {'cd' * 8})\n" in text and "  window  (none)  9\n" in text
    three = make_run(tmp_path / "three", data={"name": "by hand"})
    assert section(compare_rows(one, three), "data")[0]["same"] is None
    assert "data: unknown" in compare_text(one, three)


def test_texts_from_files_do_not_act_on_the_terminal(tmp_path):
    evil = "\x1b]0;pwned\x07"
    one = make_run(
        tmp_path / "one", versions={"mpi": evil}, data={"name": evil, "sha256": evil},
        config={"run": {evil: evil}},
    )  # fmt: skip
    edit(one / "summary.json", lambda s: [e.update(params_sha256=evil) for e in s["ranks"]])
    for other in (one, make_run(tmp_path / "two")):
        for text in (compare_text(one, other), compare_text(other, one)):
            assert all(c.isprintable() for line in text.splitlines() for c in line)


# -- what came out ---------------------------------------------------------------------------------


def test_new_figures_of_a_step_are_shown_where_they_are(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    text = compare_text(one, two)
    assert "skipped" not in text and "loss scale" not in text and "perplexity" not in text
    edit_steps(two, lambda row: row.update(loss_scale=2.0 ** row["step"], skipped=row["step"] > 1))
    edit_steps(
        two,
        lambda row: (
            row.update(heldout_bits_per_byte=9.5, heldout_perplexity=4.5)
            if "heldout_loss" in row
            else None
        ),
    )
    rows = compare_rows(one, two)
    assert figure(rows, "skipped steps") == (None, 2)
    assert figure(rows, "last loss scale") == (None, 8.0)
    assert figure(rows, "held-out perplexity") == (None, 4.5)
    bits = figure(rows, "held-out bits per byte")
    assert bits == (pytest.approx(1.5 / math.log(2)), 9.5)  # as logged, else from the loss


def test_nats_are_bits_per_byte_only_where_every_target_is_a_byte(tmp_path):
    one = make_run(tmp_path / "one", config={"model": {"kind": "decoder"}})
    two = make_run(tmp_path / "two", config={"data": {"kind": "regression"}})
    assert not section(compare_rows(one, two), "figure", name="held-out bits per byte")


def test_measured_is_set_beside_predicted(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")

    def change(summary):
        summary["ranks"][1]["traffic"]["dp all_reduce"]["sent_bytes"] = 1001
        summary["ranks"][0]["memory"]["peak"]["params"] = 5000

    edit(two / "summary.json", change)
    rows = compare_rows(one, two)
    (row,) = section(rows, "traffic", axis="dp", collective="all_reduce", what="bytes")
    assert (row["a"], row["a_predicted"], row["b"], row["b_predicted"]) == (2000, 2000, 2001, 2000)
    (row,) = section(rows, "memory", category="params")
    assert (row["b"], row["b_predicted"]) == (5000, 4096)
    lines = compare_text(one, two).splitlines()
    assert lines[0].startswith("DIFFERENCE: in B")
    assert [line.split()[0] for line in lines if line.endswith("<-- DIFFERS")] == ["dp", "params"]


def config_of(run, folder):
    """Return the config of a run with another folder, to be changed."""
    config = json.loads((run / "run.json").read_text())["config"]
    config["run"]["dir"] = str(folder)
    return config


def test_real_runs_of_other_rank_counts(finished_run, tmp_path):
    config = config_of(finished_run, tmp_path)
    config["train"]["steps"] = 12
    other = mpisim.run(config, ranks=2, transport="local")
    rows = compare_rows(finished_run, other.path)
    json.dumps(rows, allow_nan=False)
    assert {row["field"] for row in section(rows, "config")} == {
        "run.dir", "train.steps",
    }  # fmt: skip
    assert section(rows, "data")[0]["same"] is True
    (row, heldout) = section(rows, "verdict")
    assert row["common_steps"] == 9 and (row["a_steps"], row["b_steps"]) == (9, 12)
    assert row["largest_difference"] <= 1e-12
    assert heldout["common_steps"] == 2
    last = other.summary["evaluations"][-1]["heldout_loss"]
    assert figure(rows, "held-out loss")[1] == last
    (sent,) = section(rows, "traffic", axis="dp", collective="all_reduce", what="bytes")
    assert (
        sent["b"]
        == sent["b_predicted"]
        == sum(entry["traffic"]["dp all_reduce"]["sent_bytes"] for entry in other.summary["ranks"])
    )
    (peak,) = section(rows, "memory", category="total")
    assert peak["b"] == max(entry["memory"]["peak_total"] for entry in other.summary["ranks"])
    text = compare_text(finished_run, other.path)
    # But for the paths of the runs.
    lines = text.replace(str(tmp_path), "").replace(str(finished_run), "").splitlines()
    assert max(map(len, lines)) <= 100


def test_overlap_on_and_off_are_bitwise_equal(finished_run, tmp_path):
    config = config_of(finished_run, tmp_path)
    config["parallel"]["overlap"] = False
    other = mpisim.run(config, ranks=3, transport="local").path
    rows = compare_rows(finished_run, other)
    assert all(row["bitwise_equal"] for row in section(rows, "verdict"))
    assert section(rows, "weights")[0]["bitwise_equal"] is True


def test_the_committed_run_with_a_run_of_today(finished_run):
    """It was written before several fields of the config existed."""
    rows = compare_rows(OVERLAP, finished_run)
    assert {"a", "b"} == {row["run"] for row in section(rows, "run")}
    assert section(rows, "config", only_in="b")
    (row,) = section(compare_rows(OVERLAP, OVERLAP), "figure", name="held-out bits per byte")
    assert row["a"] == row["b"] == pytest.approx(3.0910133014749817 / math.log(2))
    assert "training losses are bitwise equal at 30 common steps" in compare_text(OVERLAP, OVERLAP)


# -- runs that are not whole -----------------------------------------------------------------------


def test_a_killed_run_is_compared_as_far_as_it_goes(finished_run, killed_run):
    for first, second, side in ((finished_run, killed_run, "B"), (killed_run, finished_run, "A")):
        lines = compare_text(first, second).splitlines()
        assert lines[0].startswith(f"INCOMPLETE: {side} has no summary.json")
        assert "6 of 9 steps" in lines[0] and lines[1].startswith("damaged: 1 line(s)")
        text = "\n".join(lines)
        assert f"({side}: of the training steps made)" in text
        assert "bitwise equal at 6 common steps" in text
        assert f"no one set in {side}" in text
    rows = compare_rows(killed_run, killed_run)
    json.dumps(rows, allow_nan=False)
    assert section(rows, "memory", category="total")[0]["a_predicted"] is None
    assert compare_text(killed_run, killed_run)


def test_traffic_so_far_is_that_of_all_ranks(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    (two / "summary.json").unlink()
    (row,) = section(
        compare_rows(one, two), "traffic", axis="dp", collective="all_reduce", what="messages"
    )
    assert (row["b"], row["b_predicted"]) == (4 * 6 * 2, None)  # steps, mean, ranks


def test_a_run_that_has_just_started(finished_run, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    shutil.copy(finished_run / "run.json", new)
    for left in ("nothing", ""):
        if not left:
            (new / "metrics.jsonl").write_text("")
        text = compare_text(finished_run, new)
        assert "0 of 9 steps are compared" in text and "0 common steps (A has 9, B 0)" in text
    assert "figures: no step was finished" in compare_text(new, new)


def refused(first, second):
    with pytest.raises(CheckpointError) as caught:
        compare_rows(first, second)
    text = str(caught.value)
    assert "\n" not in text and " must " in text and "; got " in text
    return text


def test_what_is_no_run_directory_is_named(finished_run, tmp_path):
    assert str(tmp_path / "gone") in refused(finished_run, tmp_path / "gone")
    assert "run.json" in refused(tmp_path, finished_run)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", "{"),
        ("run.json", "[]"),
        ("run.json", '{"ranks": 2, "config": []}'),
        ("run.json", '{"ranks": 2, "hosts": 3}'),
        ("run.json", '{"ranks": 2, "data": []}'),
        ("run.json", '{"ranks": 2, "config": {"data": 1}}'),
        ("summary.json", "{}"),
        ("summary.json", '{"ranks": [], "bytes_matrix": 1, "predicted_bytes_matrix": 1}'),
        ("summary.json", '{"ranks": [{}], "bytes_matrix": [], "predicted_bytes_matrix": []}'),
        ("summary.json", '{"ranks": {}, "bytes_matrix": [[1]], "predicted_bytes_matrix": []}'),
        ("metrics.jsonl", '{"step": [], "loss": 1, "rows": 1, "step_s": 1}'),
        ("metrics.jsonl", '{"step": 0, "loss": 1, "rows": "x", "step_s": 1}'),
        ("metrics.jsonl", '{"step": 0, "loss": 1, "rows": 1, "step_s": 1, "ranks": {"step_s": 1}}'),
        (
            "metrics.jsonl",
            '{"step": 0, "loss": 1, "rows": 1, "step_s": 1, "ranks": {"step_s": []}}',
        ),
        ("metrics.jsonl", '{"step": [], "heldout_loss": 1}'),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, name, content):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    (two / name).write_text(content)
    refused(one, two)
    refused(two, one)


@pytest.mark.parametrize("value", ["x", None, [], {}, 10**400])
def test_a_loss_that_is_no_number_is_not_finite(value):
    assert math.isnan(as_float(value))
