"""The worked example: every number of B3 to B7, for microbatches of 1, 2 and 3 rows."""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import pytest

from mpisim.cli import main
from mpisim.data.tokenizer import PAD
from mpisim.engine.handlers import HANDLERS
from mpisim.errors import ConfigError
from mpisim.plan.ops import Recompute
from mpisim.train import worked
from mpisim.train.worked import accumulation_record, microbatches, run_example, worked_model

ROWS = [1, 2, 3]


@functools.cache
def record(rows):
    return accumulation_record(rows)


@functools.cache
def example(rows, **options):
    return run_example(rows, **options)


# --- accumulation (B3) -----------------------------------------------------------------------


def test_the_texts_have_2_4_and_3_targets():
    """B3: with a first and a last token around it, a text of n bytes has n + 1 successors."""
    assert record(2)["accumulation"]["texts"] == ["a", "cat", "do"]
    assert record(2)["accumulation"]["valid_targets_per_text"] == [2, 4, 3]


@pytest.mark.parametrize(
    ("rows", "grids", "counts", "seeds"),
    [
        (1, [[1, 2], [1, 4], [1, 3]], [2, 4, 3], [128 * 2 / 9, 128 * 4 / 9, 128 * 3 / 9]),
        (2, [[2, 4], [1, 3]], [6, 3], [85.33333333333333, 42.666666666666664]),
        (3, [[3, 4]], [9], [128.0]),
    ],
)
def test_grids_counts_and_seeds(rows, grids, counts, seeds):
    """B1, B3: the seed of a microbatch is S * n_i / N; padding counts in neither."""
    done = record(rows)["accumulation"]
    assert (done["grids"], done["target_counts"], done["seeds"]) == (grids, counts, seeds)
    assert (done["total_targets"], done["loss_scale"]) == (9, 128.0)
    batches = microbatches(rows)
    assert [list(batch.x.shape) for batch in batches] == grids
    assert [int(np.count_nonzero(batch.targets >= 0)) for batch in batches] == counts
    padding = sum(np.count_nonzero(batch.x == PAD) for batch in batches)
    assert padding == sum(a * b for a, b in grids) - 9


def test_the_decoder_has_29_tensors_and_1572_scalars():
    """B3: 3 blocks, width 4, one head, feed-forward 8, tied, 266 rows of vocabulary."""
    done = record(2)["accumulation"]
    assert (done["num_tensors"], done["num_scalars"]) == (29, 1572)
    model = worked_model()
    assert [block.name for block in model.blocks] == ["embed", "block0", "block1", "block2", "head"]
    shapes = {spec.name: spec.shape for spec in model.param_specs()}
    assert shapes["embed.tokens.weight"] == (266, 4)
    assert shapes["block2.gate_up.gate"] == (4, 8) and "head.output.weight" not in shapes
    assert len(shapes) == 29 and sum(map(math.prod, shapes.values())) == 1572
    assert len(example(2).gradients) == len(example(2).weights) == 29


@pytest.mark.parametrize("rows", ROWS)
def test_accumulated_equals_the_full_batch(rows):
    """B3: every gradient and weight within 1e-11 + 1e-10 |r|, compared here once more."""
    done = record(rows)["accumulation"]
    for what in ("gradients", "weights"):
        assert done[what]["compared"] == done[what]["within_tolerance"] == 29
        assert done[what]["largest_difference"] < 1e-14
        got, want = getattr(example(rows), what), getattr(example(3), what)
        for name, right in want.items():
            assert np.all(np.abs(got[name] - right) <= 1e-11 + 1e-10 * np.abs(right)), name
            assert right.any()
    assert done["loss"] == pytest.approx(done["full_batch_loss"], rel=1e-14)


@pytest.mark.parametrize("rows", ROWS)
def test_the_loss_is_the_mean_over_targets_and_not_of_means(rows):
    """B1: sum of n_i * mean_i over N; the mean of the means is another number."""
    done = record(rows)["accumulation"]
    means, counts = done["microbatch_mean_losses"], done["target_counts"]
    weighted = math.fsum(m * n for m, n in zip(means, counts, strict=True)) / 9
    assert done["loss"] == pytest.approx(weighted, rel=1e-14)
    assert done["unweighted_mean_of_means"] == pytest.approx(sum(means) / len(means), rel=1e-15)
    assert (abs(done["unweighted_mean_of_means"] - done["loss"]) > 1e-3) is (rows < 3)


@pytest.mark.parametrize("rows", ROWS)
def test_one_optimizer_step_and_a_doubled_scale(rows):
    """B2, B3: one step, gradients cleared, 128 -> 256 at growth interval 1."""
    done = record(rows)["accumulation"]
    assert (done["optimizer_steps"], done["loss_scale_after"]) == (1, 256.0)
    assert done["gradients_cleared"] is True
    by_hand = math.sqrt(sum(float((g**2).sum()) for g in example(rows).gradients.values()))
    assert done["grad_norm"] == pytest.approx(by_hand, rel=1e-14)
    assert done["grad_norm"] > 1.0  # it is clipped


# --- recomputation (B4, B5) ------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_dropout_owns_a_known_range_and_a_replay_draws_nothing_else(rows):
    """B4: 48 words a site for [3, 4, 4], six sites cover 0..288 for every row limit."""
    done = record(rows)["recomputation"]
    assert (done["dropout"], done["logical_array"]) == (0.5, [3, 4, 4])
    assert done["words_per_site"] == 48
    assert done["site_ranges"] == [[48 * site, 48 * site + 48] for site in range(6)]
    assert done["counter_before_backward"] == done["counter_after_backward"] == 288
    again = example(rows, dropout=0.5, steps=3, recompute="full")
    names = ("before_backward", "after_backward", "new_words")
    for entry in again.words:
        assert tuple(entry[name] for name in names) == (288, 288, 0)
    assert done["words_drawn_in_backward_only"] == 0
    assert len(again.words) == 3 * len(microbatches(rows))


@pytest.mark.parametrize("rows", ROWS)
def test_recomputed_and_retained_are_bitwise_equal(rows):
    """B4: losses, gradients and weights, with dropout 0.5, on a fixed layout."""
    done = record(rows)["recomputation"]
    for what in ("losses", "gradients", "weights"):
        assert done[f"{what}_bitwise_equal"] is True
    assert done["steps"] == 3
    kept, again = (example(rows, dropout=0.5, steps=3, recompute=m) for m in ("none", "full"))
    assert kept.losses == again.losses and len(kept.losses) == 3
    for name, array in kept.weights.items():
        assert array.tobytes() == again.weights[name].tobytes(), name
        assert kept.gradients[name].tobytes() == again.gradients[name].tobytes(), name
    # And dropout is felt.
    assert example(rows).losses[0] != kept.losses[0]


@pytest.mark.parametrize("rows", ROWS)
def test_three_recomputed_blocks_cost_three_forwards(rows):
    """B5."""
    done = record(rows)["recomputation"]
    assert (done["recomputed_blocks"], done["extra_block_forwards_per_microbatch"]) == (3, 3.0)
    plan = example(rows, dropout=0.5, steps=3, recompute="full").plan
    replays = [op for op in plan.ranks[0] if isinstance(op, Recompute)]
    assert len(replays) == 3 * len(microbatches(rows))


def by_hand(num_rows: int, length: int) -> tuple[int, int]:
    """Return bytes retained with and without the blocks' contexts, in float64.

    A block saves norm1's input and rstd, its output, q, k and v, the attention weights, their
    output, norm2's input and rstd, its output, gate and up, and their product. The head saves its
    input and rstd, the normed input and a probability per word of the vocabulary.
    """
    n, d, f, v = num_rows * length, 4, 8, 266
    block = (d + 1) + d + 3 * d + length + d + (d + 1) + d + 2 * f + f
    head = (d + 1) + d + v
    return 8 * n * (3 * block + head), 8 * n * (3 * d + head)


@pytest.mark.parametrize("rows", ROWS)
def test_retained_bytes_by_hand_by_estimate_and_measured(rows):
    """B5: itemised at a declared point; the estimate equals the measurement, exactly."""
    done = record(rows)["recomputation"]
    assert done["declared_point"] == "after the forward of the loss, before backward"
    assert "token ids and targets" in done["excluded"] and "dropout words" in done["excluded"]
    assert done["estimate_equals_measurement"] is True
    grids = record(rows)["accumulation"]["grids"]
    for which, place in (("retained", 0), ("recomputed", 1)):
        entry = done[which]
        assert entry["estimated_bytes"] == entry["measured_bytes"]
        assert entry["measured_bytes"] == [by_hand(*grid)[place] for grid in grids]
        assert [item["total"] for item in entry["items"]] == entry["measured_bytes"]
        for item in entry["items"]:
            assert item["saved_contexts"] + item["kept_values"] == item["total"]
    # Recomputed: inputs of three blocks of 4 numbers a token, and the recipes to go on from there.
    kept = [8 * b * t * 4 * 3 for b, t in grids]
    assert [item["kept_values"] for item in done["recomputed"]["items"]] == kept
    assert {item["recipes"] for item in done["recomputed"]["items"]} == {3}
    assert {item["recipes"] for item in done["retained"]["items"]} == {0}
    assert {item["kept_values"] for item in done["retained"]["items"]} == {0}
    saved = sum(by_hand(*grid)[0] - by_hand(*grid)[1] for grid in grids)
    assert done["saved_bytes"] == saved > 0


def test_what_is_measured_is_what_the_ledger_holds():
    """At the declared point nothing else is counted as an activation."""
    held = []

    class Watching(worked._Watch):
        def _see(self, op):
            super()._see(op)
            if type(op).__name__ == "Forward" and op.block == self._last and self.step == 0:
                held.append(self.state.ledger.live["activations"])

    real, worked._Watch = worked._Watch, Watching
    try:
        done = run_example(2, dropout=0.5, recompute="full")
        plain = run_example(2, dropout=0.5)
    finally:
        worked._Watch = real
    assert held == [entry["total"] for entry in done.retained + plain.retained]


# --- a late overflow (B6) --------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_a_late_overflow_leaves_nothing_behind(rows):
    """B6: in the last microbatch: skipped, 128 -> 64, and the update is still available."""
    done = record(rows)["late_overflow"]
    assert done["overflow_in_microbatch"] == len(microbatches(rows)) - 1
    assert done["skipped"] is True
    assert (done["loss_scale_before"], done["loss_scale_after"]) == (128.0, 64.0)
    assert done["optimizer_steps"] == 0
    for what in ("weights_bitwise_equal", "moments_zero", "gradients_cleared"):
        assert done[what] is True, what
    assert done["learning_rate_of_skipped_step"] == done["learning_rate_of_next_step"] == 0.01
    assert (done["next_step_committed"], done["optimizer_steps_after_next"]) == (True, 1)


@pytest.mark.parametrize("rows", ROWS)
def test_the_update_after_an_overflow_is_the_one_that_was_due(rows):
    """Its weights are those of a run without the overflow: 64 and 128 divide out exactly."""
    last = len(microbatches(rows)) - 1
    late = example(rows, dropout=0.5, steps=2, overflow_in=(0, last), growth_interval=1000)
    plain = example(rows, dropout=0.5)
    assert [step.skipped for step in late.steps] == [True, False]
    for name, array in plain.weights.items():
        assert array.tobytes() == late.weights[name].tobytes(), name


# --- the command (B7) ------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_the_command_prints_the_record(rows, capsys):
    assert main(["demo", "accumulation", "--rows", str(rows)]) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert list(printed) == ["accumulation", "recomputation", "late_overflow"]
    assert printed == json.loads(json.dumps(record(rows)))
    assert err == ""


def test_the_command_has_two_rows_by_default(capsys):
    assert main(["demo", "accumulation"]) == 0
    assert json.loads(capsys.readouterr().out)["accumulation"]["target_counts"] == [6, 3]


@pytest.mark.parametrize("rows", [4, 0, -1])
def test_other_rows_are_refused_in_one_sentence(rows, capsys):
    assert main(["demo", "accumulation", "--rows", str(rows)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"mpisim: --rows must be 1, 2 or 3; got {rows}. There are three texts.\n"
    with pytest.raises(ConfigError):
        accumulation_record(rows)


def test_words_that_only_a_replay_draws_would_be_counted(monkeypatch):
    """Planted: a replay that takes seven words more, from behind the last site."""
    real = HANDLERS[Recompute]

    def greedy(state, op):
        state.context(op.block, op.micro).dropout._stream_at(288, 7)
        real(state, op)

    monkeypatch.setitem(HANDLERS, Recompute, greedy)
    done = accumulation_record(2)["recomputation"]
    assert done["counter_before_backward"] == 288
    assert done["counter_after_backward"] == 295
    # Two microbatches in each of three steps; a range counts once a microbatch.
    assert done["words_drawn_in_backward_only"] == 7 * 2 * 3


def test_words_of_another_place_would_be_counted(monkeypatch):
    """Planted: a replay that looks at words of its own range that no forward has drawn."""
    real = HANDLERS[Recompute]

    def elsewhere(state, op):
        state.context(op.block, op.micro).dropout._stream_at(3, 5)
        real(state, op)

    monkeypatch.setitem(HANDLERS, Recompute, elsewhere)
    done = accumulation_record(2)["recomputation"]
    assert done["counter_after_backward"] == 288
    assert done["words_drawn_in_backward_only"] == 5 * 2 * 3
