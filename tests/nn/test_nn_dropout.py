"""Dropout masks: where their words come from, and what they do not depend on."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from small_decoders import context, run, shaken, small_decoder, token_batch

from mpisim.errors import BatchError
from mpisim.nn import dropout
from mpisim.nn.dropout import DropoutMasks, dropout_key, keep_threshold, words_per_update
from mpisim.nn.params import init_params
from mpisim.nn.transformer import Dropout

KEY = dropout_key(7, 0)


def stream(count, key=KEY):
    return np.random.Philox(key=key).random_raw(count)


def test_b4_six_sites_of_48_words_cover_0_to_288_exactly():
    """B4: [3, 4, 4] is 48 words a site, padding included; six sites cover 0..288."""
    masks = DropoutMasks(KEY, rows=3, max_len=4, width=4)
    assert [masks.site_range(site) for site in range(6)] == [
        (0, 48), (48, 96), (96, 144), (144, 192), (192, 240), (240, 288),
    ]  # fmt: skip
    assert words_per_update(1, 3, 4, 4) == 48 and words_per_update(6, 3, 4, 4) == 288
    drawn = np.concatenate([masks.words(site, (3, 4, 4)).reshape(-1) for site in range(6)])
    assert np.array_equal(drawn, stream(288))
    model = small_decoder(num_blocks=3, d_model=4, num_heads=1, max_len=4, dropout=0.5)
    assert model.num_dropout_sites == 6
    sites = [
        layer.site
        for block in model.blocks
        for _, layer in block.layers
        if isinstance(layer, Dropout)
    ]
    assert sites == list(range(6))


@pytest.mark.parametrize("rows_at_a_time", [1, 2, 3])
def test_b4_words_do_not_depend_on_micro_batches_ranks_or_padding(rows_at_a_time):
    whole = DropoutMasks(KEY, rows=3, max_len=5, width=3)
    expected = whole.words(1, (3, 5, 3))
    for length in (1, 4, 5):
        for first in range(0, 3, rows_at_a_time):
            rows = min(rows_at_a_time, 3 - first)
            part = DropoutMasks(KEY, rows=3, max_len=5, width=3, first_row=first)
            assert np.array_equal(
                part.words(1, (rows, length, 3)), expected[first : first + rows, :length]
            )


def test_every_word_has_the_place_that_the_formula_says():
    masks = DropoutMasks(KEY, rows=4, max_len=3, width=5, first_row=1, base=7)
    words = masks.words(2, (2, 2, 5))
    raw = stream(7 + words_per_update(3, 4, 3, 5))
    for b in range(2):
        for t in range(2):
            for d in range(5):
                assert words[b, t, d] == raw[7 + ((2 * 4 + 1 + b) * 3 + t) * 5 + d]
    assert words.dtype == np.uint64
    assert masks.words(0, (0, 2, 5)).shape == (0, 2, 5)


def test_drawing_leaves_nothing_behind():
    masks = DropoutMasks(KEY, rows=3, max_len=4, width=4)
    first = masks.words(0, (3, 4, 4))
    masks.words(5, (1, 2, 4))
    np.random.default_rng(0).random(3)
    assert np.array_equal(masks.words(0, (3, 4, 4)), first)


def test_c107_rows_steps_seeds_and_sites_have_masks_of_their_own():
    """C107: masks of two rows of one update agree in 50% +-3% of 4096 places."""
    masks = DropoutMasks(KEY, rows=2, max_len=64, width=64)
    limit = np.uint64(keep_threshold(0.5))

    def mask(source, site=0, shape=(2, 64, 64)):
        return source.words(site, shape) < limit

    rows = mask(masks)
    others = {
        "another row": (rows[0], rows[1]),
        "another site": (rows[0], mask(masks, 1)[0]),
        "another step": (rows[0], mask(DropoutMasks(dropout_key(7, 1), 2, 64, 64))[0]),
        "another seed": (rows[0], mask(DropoutMasks(dropout_key(8, 0), 2, 64, 64))[0]),
    }
    for what, (one, other) in others.items():
        assert abs(np.mean(one == other) - 0.5) < 0.03, what
    second_rank = DropoutMasks(KEY, rows=2, max_len=64, width=64, first_row=1)
    assert np.array_equal(mask(second_rank, shape=(1, 64, 64))[0], rows[1])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate):
    masks = DropoutMasks(KEY, rows=4, max_len=64, width=64)
    dropped = np.mean(masks.words(0, (4, 64, 64)) >= np.uint64(keep_threshold(rate)))
    # 16,384 draws: five standard deviations are below 0.02.
    assert abs(dropped - rate) < 0.02


def test_thresholds_by_hand():
    assert keep_threshold(0.5) == 2**63 and keep_threshold(0.25) == 3 * 2**62
    assert keep_threshold(0.0) == keep_threshold(1e-30) == 2**64 - 1
    assert isinstance(keep_threshold(0.5), int)


def test_streams_never_change_with_a_version():
    # Raw words of Philox are fixed by its definition: another value would change every run.
    assert [int(word) for word in stream(2, dropout_key(0, 0))] == GOLDEN_WORDS
    # Names of parameters have no slash, so no parameter shares a mask's stream.
    assert not any("/" in name for name in init_params(small_decoder(), 0, "float32"))


GOLDEN_WORDS = [16231107993003221544, 17883581557730269346]


@pytest.mark.parametrize(
    ("shape", "first_row"),
    [((3, 4, 4), 1), ((4, 4, 4), 0), ((1, 5, 4), 0), ((1, 4, 3), 0), ((1, 4, 4), -1)],
    ids=["past the last row", "too many rows", "too long", "other width", "negative row"],
)
def test_places_outside_of_the_array_are_refused(shape, first_row):
    masks = DropoutMasks(KEY, rows=3, max_len=4, width=4, first_row=first_row)
    with pytest.raises(BatchError, match="within its update's 3 rows x 4 tokens x 4 features"):
        masks.words(0, shape)


def test_a_step_in_micro_batches_adds_up_to_the_step_in_one():
    model = small_decoder(dropout=0.5)
    params = shaken(init_params(model, 0, "float64"))
    ids, targets = token_batch(3, 6)
    ids[1:, 4:], targets[1:, 4:] = 0, -1

    def masks(first_row):
        return DropoutMasks(KEY, rows=3, max_len=6, width=8, first_row=first_row)

    loss, grads, _ = run(model, params, ids, context(targets, dropout=masks(0)))
    total, sums = 0.0, {name: 0.0 for name in grads}
    for rows, length in ((slice(0, 1), 6), (slice(1, 3), 4)):
        ctx = context(targets[rows, :length], dropout=masks(rows.start))
        part, part_grads, _ = run(model, params, ids[rows, :length], ctx)
        total += part
        for name, grad in part_grads.items():
            sums[name] = sums[name] + grad
    assert np.isclose(total, loss, rtol=1e-13, atol=0)
    for name, grad in grads.items():
        assert np.allclose(sums[name], grad, rtol=1e-11, atol=1e-13), name
    # The masks matter: other rows' masks give another loss.
    other, _, _ = run(model, params, ids[:1], context(targets[:1], dropout=masks(1)))
    first, _, _ = run(model, params, ids[:1], context(targets[:1], dropout=masks(0)))
    assert not np.isclose(other, first, rtol=1e-6)


def test_evaluation_drops_nothing():
    dropping, plain = small_decoder(dropout=0.5), small_decoder()
    params = shaken(init_params(plain, 0, "float64"))
    ids, targets = token_batch(2, 5)
    assert (
        run(dropping, params, ids, context(targets))[0]
        == (run(plain, params, ids, context(targets))[0])
    )
    assert plain.num_dropout_sites == 0


def test_c104_backward_uses_the_mask_of_forward():
    """C104: with upstream ones, the input's gradient is the forward mask times the factor."""
    ctx = context(dropout=DropoutMasks(KEY, rows=2, max_len=8, width=8))
    layer = Dropout(0.5, 0)
    ones = np.ones((2, 8, 8))
    y, saved = layer.forward({}, ones, ctx)
    dx, _ = layer.backward({}, saved, ones, ctx)
    assert 0 < np.count_nonzero(y) < y.size
    assert np.array_equal(dx, y) and set(np.unique(y)) == {0.0, 2.0}


@pytest.mark.parametrize("length", [4, 6])
def test_backward_draws_the_ranges_of_forward(length):
    """Every draw is told, with its first word and the one after its last."""
    model = small_decoder(dropout=0.5)
    params = shaken(init_params(model, 0, "float64"))
    ids, targets = token_batch(2, length)
    told = []
    masks = DropoutMasks(
        KEY, rows=3, max_len=6, width=8, first_row=1, on_draw=lambda *span: told.append(span)
    )
    ctx = context(targets, dropout=masks)
    x, kept = ids, []
    for block, block_params in zip(model.blocks, model.split_params(params), strict=True):
        x, saved = block.forward(block_params, x, ctx)
        kept.append((block, block_params, saved))
    forwards, dy = sorted(told), 1.0
    told.clear()
    for block, block_params, saved in reversed(kept):
        dy, _ = block.backward(block_params, saved, dy, ctx)
    assert sorted(told) == forwards
    # Rows that are filled up are drawn whole, shorter ones one by one.
    words = 6 * 8
    want = []
    for site in range(model.num_dropout_sites):
        first = masks.site_range(site)[0] + words
        if length == 6:
            want.append((first, first + 2 * words))
        else:
            want += [(first + row * words, first + row * words + 4 * 8) for row in range(2)]
    assert forwards == want


def test_what_is_told_is_what_is_drawn():
    told = []
    masks = DropoutMasks(
        KEY, rows=3, max_len=4, width=5, first_row=1, on_draw=lambda *span: told.append(span)
    )
    raw = stream(masks.site_range(2)[1])
    for shape in ((2, 4, 5), (2, 3, 5)):
        told.clear()
        words = masks.words(1, shape)
        drawn = [raw[start:end] for start, end in told]
        assert np.array_equal(words.reshape(-1), np.concatenate(drawn))
    # A watched mask is the same mask.
    assert masks == DropoutMasks(KEY, rows=3, max_len=4, width=5, first_row=1)


def test_docstring_examples_hold():
    result = doctest.testmod(dropout)
    assert result.attempted and not result.failed
