"""A3: recompute gives the same bits, keeps the bytes it says, and counts its extra forwards."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.errors import ConfigError, RecomputeMismatch
from mpisim.reference import decoder, mlp, optimizers, recompute

WORKED = decoder.DecoderSettings(1, 1, 10000.0, 1e-5)
GROUPED = decoder.DecoderSettings(4, 2, 100.0, 1e-5)


def make_mlp(sizes=(3, 6, 4, 5, 2), seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return mlp.init_mlp(lambda name: rng, sizes, dtype)


def make_rows(num_rows, seed=1, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((num_rows, 3)), rng.standard_normal((num_rows, 2))
    return x.astype(dtype), y.astype(dtype)


def make_decoder(num_blocks=3, seed=0):
    """The worked decoder: width 4, one head, feed-forward 8, 266 vocabulary rows, tied."""
    rng = np.random.default_rng(seed)
    shapes = decoder.decoder_param_shapes(num_blocks, 4, 1, 1, 4, 8, 266, tied=True)
    return {
        name: rng.standard_normal(shape) * 0.3 + (1.0 if ".norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def worked_batch(seed=2):
    """Three rows with 2, 4 and 3 valid targets, padded to 4."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, 256, (3, 4)), rng.integers(0, 256, (3, 4))
    for row, length in enumerate((2, 4, 3)):
        tokens[row, length:], targets[row, length:] = 256, -1
    return tokens, targets


def bits(tensors):
    return {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in tensors.items()}


def distinct_bytes(segments):
    """Count kept bytes another way: by the memory that the arrays occupy."""
    spans = {}
    for segment in segments:
        for array in itertools.chain([segment.x, segment.y], *(segment.saved or ())):
            assert array.base is None or array.base.nbytes == array.nbytes
            spans[array.__array_interface__["data"][0]] = array.nbytes
    starts = sorted(spans)
    assert all(a + spans[a] <= b for a, b in itertools.pairwise(starts))  # nothing overlaps
    return sum(spans.values())


# --- tickets ---


def test_b4_tickets_of_the_worked_update():
    tickets, next_word = recompute.issue_dropout_tickets(9, [4] * 6, num_rows=3, max_len=4)
    assert [ticket.first_word for ticket in tickets] == [0, 48, 96, 144, 192, 240]
    assert next_word == 288
    more, after = recompute.issue_dropout_tickets(9, [5], 2, 1, first_word=next_word)
    assert more[0].first_word == 288 and after == 298


def test_tickets_of_nothing():
    assert recompute.issue_dropout_tickets(0, [], 3, 4, first_word=7) == ((), 7)
    (ticket,), next_word = recompute.issue_dropout_tickets(0, [4], num_rows=0, max_len=4)
    assert next_word == 0
    assert recompute.draw_dropout_words(ticket, (0, 2, 4)).shape == (0, 2, 4)


def test_words_are_those_of_the_philox_stream():
    stream = np.random.Philox(key=5).random_raw(3 * 2 * 5 + 7)
    (_, ticket), _ = recompute.issue_dropout_tickets(5, [7, 5], num_rows=1)
    assert recompute.draw_dropout_words(ticket, (1, 5)).tolist() == [stream[7:12].tolist()]
    (_, ticket), _ = recompute.issue_dropout_tickets(5, [1, 5], num_rows=3, max_len=2)
    want = stream[6 : 6 + 30].reshape(3, 2, 5)
    assert np.array_equal(recompute.draw_dropout_words(ticket, (3, 2, 5)), want)
    (second,) = recompute.tickets_from_row((ticket,), 1)
    assert np.array_equal(recompute.draw_dropout_words(second, (1, 1, 5)), want[1:2, :1])


@given(
    num_rows=st.integers(1, 5),
    max_len=st.integers(1, 4),
    width=st.integers(1, 5),
    first_word=st.integers(0, 2**40),
    key=st.integers(0, 2**128 - 1),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_words_do_not_depend_on_the_cut_the_length_or_the_order(
    num_rows, max_len, width, first_word, key, data
):
    (ticket,), _ = recompute.issue_dropout_tickets(key, [width], num_rows, max_len, first_word)
    whole = recompute.draw_dropout_words(ticket, (num_rows, max_len, width))
    assert np.unique(whole).size == whole.size  # no word serves two elements
    start = data.draw(st.integers(0, num_rows - 1))
    stop = data.draw(st.integers(start, num_rows))
    length = data.draw(st.integers(0, max_len))
    (cut,) = recompute.tickets_from_row((ticket,), start)
    for _ in range(2):  # a ticket is never used up
        part = recompute.draw_dropout_words(cut, (stop - start, length, width))
        assert np.array_equal(part, whole[start:stop, :length])


def test_keys_of_other_seeds_and_updates_give_other_words():
    keys = [recompute.dropout_key(*pair) for pair in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 5))]
    assert len(set(keys)) == 4
    drawn = {
        recompute.draw_dropout_words(
            recompute.issue_dropout_tickets(key, [4], 1)[0][0], (1, 4)
        ).tobytes()
        for key in keys
    }
    assert len(drawn) == 4


def test_factors_by_hand_and_at_the_ends():
    (ticket,), _ = recompute.issue_dropout_tickets(1, [1000], num_rows=20)
    words = recompute.draw_dropout_words(ticket, (20, 1000))
    factors = recompute.draw_dropout_factors(ticket, (20, 1000), 0.75)
    assert np.array_equal(factors, np.where(words < 2**62, 4.0, 0.0))
    assert abs(factors.mean() - 1) < 0.05
    assert (recompute.draw_dropout_factors(ticket, (20, 1000), 0.0) == 1).all()
    assert (recompute.draw_dropout_factors(ticket, (20, 1000), 1e-18) == 1).all()
    half = recompute.draw_dropout_factors(ticket, (20, 1000), 0.5, "float32")
    assert half.dtype == np.float32 and set(np.unique(half)) == {0, 2}


def test_tickets_refuse():
    (ticket,), _ = recompute.issue_dropout_tickets(0, [4], num_rows=3, max_len=4)
    (late,) = recompute.tickets_from_row((ticket,), 2)
    for shape in ((2, 4, 4), (1, 5, 4), (1, 4, 3), (2, 4), (4,), (1, 1, 1, 4)):
        with pytest.raises(
            ConfigError, match="the shape must fit the ticket's 1 rows, 4 positions"
        ):
            recompute.draw_dropout_words(late, shape)
    with pytest.raises(ConfigError, match="first_row must be at most the 3 rows .*; got 4"):
        recompute.tickets_from_row((ticket,), 4)
    with pytest.raises(ConfigError, match=r"key must be below 2\*\*128"):
        recompute.issue_dropout_tickets(2**128, [4], 1)
    with pytest.raises(ConfigError, match=r"num_updates must be below 2\*\*64"):
        recompute.dropout_key(0, 2**64)
    with pytest.raises(ConfigError, match="width must be an integer >= 1; got 0"):
        recompute.issue_dropout_tickets(0, [0], 1)
    for rate in (1.0, -0.1):
        with pytest.raises(ConfigError, match="rate must be finite, >= 0 and < 1"):
            recompute.draw_dropout_factors(ticket, (1, 4, 4), rate)


# --- replay ---


def dropout_block(rate=0.5):
    """A block that is dropout and nothing else."""

    def forward(params, x, tickets):
        return x * recompute.draw_dropout_factors(tickets[0], x.shape, rate), (x,)

    def backward(params, saved, dy, tickets):
        return dy * recompute.draw_dropout_factors(tickets[0], dy.shape, rate), {}

    return recompute.Block("dropout", forward, backward)


def ticket_with_mask(mask):
    """Return a ticket whose words keep exactly the elements of `mask` at rate 0.5."""
    for key in range(1000):
        tickets, _ = recompute.issue_dropout_tickets(key, [len(mask)], num_rows=1)
        factors = recompute.draw_dropout_factors(tickets[0], (1, len(mask)), 0.5)
        if (factors[0] > 0).tolist() == mask:
            return tickets
    raise AssertionError("no key found")


@pytest.mark.parametrize("recompute_every", [0, 1])
def test_c104_the_gradient_belongs_to_the_mask_of_the_forward(recompute_every):
    tickets = ticket_with_mask([True, False, True, False])
    y, segments = recompute.blocks_forward(
        [dropout_block()], {}, np.ones((1, 4)), [tickets], recompute_every
    )
    assert y.tolist() == [[2.0, 0.0, 2.0, 0.0]]
    dx, _, extra = recompute.blocks_backward({}, segments, np.ones((1, 4)))
    assert dx.tolist() == [[2.0, 0.0, 2.0, 0.0]]
    assert extra == recompute_every


def test_replay_by_hand():
    params = {
        "block0.linear.weight": np.array([[1.0, -1.0]]),
        "block0.linear.bias": np.array([0.5, 0.0]),
    }
    x = np.array([[2.0]])
    y, (segment,) = recompute.blocks_forward(recompute.mlp_blocks(2), params, x, recompute_every=1)
    assert y.tolist() == [[2.5, 0.0]] and segment.saved is None
    ((saved_x, z),) = recompute.recompute_block_activations(segment, params)
    assert saved_x is x and z.tolist() == [[2.5, -2.0]]
    assert segment.saved is None  # the replay is the caller's to drop


def test_no_block_and_one_row_of_nothing():
    x = np.ones((1, 3))
    for every in (0, 1, 2):
        y, segments = recompute.blocks_forward([], {}, x, recompute_every=every)
        assert y is x and segments == []
        dx, gradients, extra = recompute.blocks_backward({}, segments, x)
        assert dx is x and gradients == {} and extra == 0
    params = make_mlp()
    empty = np.zeros((0, 3))
    y, segments = recompute.blocks_forward(
        recompute.mlp_blocks(4), params, empty, recompute_every=1
    )
    assert y.shape == (0, 5) and recompute.measure_kept_bytes(segments) == (0, 0)


def test_a_stale_parameter_a_changed_input_and_another_ticket_are_noticed():
    params = make_mlp()
    blocks = recompute.mlp_blocks(4, "tanh", dropout=0.25)
    tickets, _ = recompute.issue_dropout_tickets(0, [6, 4, 5], num_rows=8)
    per_block = [(ticket,) for ticket in tickets]
    x = make_rows(8)[0]
    y, segments = recompute.blocks_forward(blocks, params, x, per_block, recompute_every=1)
    dy = np.ones_like(y)
    recompute.blocks_backward(params, segments, dy)

    stale = params | {"block1.linear.bias": params["block1.linear.bias"] + 1e-12}
    with pytest.raises(RecomputeMismatch, match="replayed output of block1 must equal the first"):
        recompute.blocks_backward(stale, segments, dy)
    other = dataclasses.replace(segments[2], tickets=(recompute.tickets_from_row(per_block[2], 0),))
    recompute.blocks_backward(params, [*segments[:2], other], dy)
    later = dataclasses.replace(tickets[2], first_word=tickets[2].first_word + 1)
    other = dataclasses.replace(segments[2], tickets=((later,),))
    with pytest.raises(RecomputeMismatch, match="of block2 must equal .* of 40 elements changed"):
        recompute.blocks_backward(params, [*segments[:2], other], dy)
    x[0, 0] += 1e-9
    with pytest.raises(RecomputeMismatch, match="of block0 must equal the first one bit for bit"):
        recompute.blocks_backward(params, segments, dy)


def test_a_block_that_is_no_function_is_noticed():
    rng = np.random.default_rng(0)
    live = recompute.Block(
        "live", lambda params, x, tickets: (x * rng.integers(0, 2, x.shape), (x,)), None
    )
    _, (segment,) = recompute.blocks_forward([live], {}, np.ones((2, 8)), recompute_every=1)
    with pytest.raises(RecomputeMismatch, match="replayed output of live"):
        recompute.recompute_block_activations(segment, {})


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ([0.0], [-0.0], False),
        ([np.nan], [np.nan], True),
        ([1.0], [np.nextafter(1.0, 2.0)], False),
        ([1.0, 2.0], [1.0], False),
    ],
)
def test_the_comparison_is_of_bits(first, second, same):
    outputs = iter([np.array(first), np.array(second)])
    block = recompute.Block("two", lambda params, x, tickets: (next(outputs), (x,)), None)
    _, (segment,) = recompute.blocks_forward([block], {}, np.ones(1), recompute_every=1)
    if same:
        recompute.recompute_block_activations(segment, {})
    else:
        with pytest.raises(RecomputeMismatch):
            recompute.recompute_block_activations(segment, {})


def test_forward_refuses():
    params, x = make_mlp(), make_rows(2)[0]
    with pytest.raises(ConfigError, match="recompute_every must be an integer >= 0; got -1"):
        recompute.blocks_forward([], {}, x, recompute_every=-1)
    with pytest.raises(ConfigError, match="one tuple per block; got 1 for 3 blocks"):
        recompute.blocks_forward(recompute.mlp_blocks(4), params, x, [()])
    with pytest.raises(ConfigError, match="block0 must get one ticket per dropout site; got 0 for"):
        recompute.blocks_forward(recompute.mlp_blocks(4, dropout=0.5), params, x)
    with pytest.raises(ConfigError, match="activation must be one of"):
        recompute.mlp_blocks(4, "elu")
    with pytest.raises(ConfigError, match="num_blocks must be an integer >= 0; got -1"):
        recompute.decoder_blocks(-1, np.zeros((1, 1), int), WORKED)


# --- bytes ---


def test_estimate_by_hand():
    # 2 rows, widths 3, 5, 4: inputs 48 and 80 bytes, preactivations 80 and 64, output 64.
    blocks = recompute.mlp_block_bytes(2, (3, 5, 4, 1))
    assert blocks == [(48, 128, 80), (80, 144, 64)]
    assert recompute.estimate_checkpointing_memory_savings(blocks) == (
        128 + 144 + 64,
        48 + 80 + 64,
        144,
        2,
        80,
    )
    # Two blocks at a time: only the first input stays; a replay brings back all the rest.
    assert recompute.estimate_checkpointing_memory_savings(blocks, 2) == (336, 112, 224, 2, 224)
    assert recompute.mlp_block_bytes(2, (3, 5, 4, 1), "float32")[0] == (24, 64, 40)


def test_estimate_boundaries_and_refusals():
    estimate = recompute.estimate_checkpointing_memory_savings
    assert estimate([]) == (0, 0, 0, 0, 0)
    assert recompute.mlp_block_bytes(2, (3, 1)) == []
    assert estimate(recompute.mlp_block_bytes(0, (3, 5, 4, 1))) == (0, 0, 0, 2, 0)
    one = recompute.decoder_block_bytes(1, 1, 2, 1, 1, 2, 1)
    assert one == (16, 8 * (4 * 2 + 2 * 2 + 2 * 2 + 3 + 1), 16)
    with pytest.raises(ConfigError, match="recompute_every must be an integer >= 1; got 0"):
        estimate([one], 0)
    with pytest.raises(ConfigError, match=r"blocks\[1\].input must equal .*; got 24 and 16 bytes"):
        estimate([one, recompute.BlockBytes(24, 48, 24)])
    with pytest.raises(ConfigError, match="head_size must be an integer >= 1; got 0"):
        recompute.decoder_block_bytes(1, 1, 2, 1, 1, 0, 1)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=7),
    num_rows=st.integers(0, 4),
    every=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "float64"]),
    dropout=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=60, deadline=None)
def test_the_estimate_of_an_mlp_is_what_is_measured(sizes, num_rows, every, dtype, dropout):
    params = make_mlp(sizes, dtype=dtype)
    blocks = recompute.mlp_blocks(len(sizes) - 1, "gelu", dropout)
    tickets, _ = recompute.issue_dropout_tickets(0, sizes[1:-1] if dropout else [], num_rows)
    per_block = [(ticket,) for ticket in tickets] or None
    x = np.ones((num_rows, sizes[0]), dtype)
    kept = {}
    for recompute_every in (0, every):
        _, segments = recompute.blocks_forward(blocks, params, x, per_block, recompute_every)
        kept[recompute_every] = recompute.measure_kept_bytes(segments)
        if num_rows:
            assert kept[recompute_every].total == distinct_bytes(segments)
    estimate = recompute.estimate_checkpointing_memory_savings(
        recompute.mlp_block_bytes(num_rows, sizes, dtype), every
    )
    assert estimate.bytes_without == kept[0].total
    assert estimate.bytes_with == kept[every].total
    assert kept[every].contexts == 0
    assert estimate.saved_bytes == kept[0].total - kept[every].total >= 0
    replays = [0]
    for segment in segments:
        saved = recompute.recompute_block_activations(segment, params)
        arrays = {id(array): array for array in itertools.chain(*saved)}
        replays.append(sum(a.nbytes for a in arrays.values() if a is not segment.x))
    assert estimate.replay_bytes == max(replays)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_estimate_of_a_decoder_is_what_is_measured(every, dropout):
    rng = np.random.default_rng(0)
    shapes = decoder.decoder_param_shapes(3, 6, 4, 2, 2, 5, 7, tied=False)
    params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    starts = np.zeros((2, 5), int)
    x = rng.standard_normal((2, 5, 6))
    tickets, _ = recompute.issue_dropout_tickets(0, [6] * 6 if dropout else [], 2, 5)
    per_block = [tickets[2 * i : 2 * i + 2] for i in range(3)]
    blocks = recompute.decoder_blocks(3, starts, GROUPED, dropout)
    estimate = recompute.estimate_checkpointing_memory_savings(
        [recompute.decoder_block_bytes(2, 5, 6, 4, 2, 2, 5)] * 3, every
    )
    for recompute_every, want in ((0, estimate.bytes_without), (every, estimate.bytes_with)):
        _, segments = recompute.blocks_forward(blocks, params, x, per_block, recompute_every)
        assert recompute.measure_kept_bytes(segments).total == want == distinct_bytes(segments)


# --- whole models ---


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("activation", sorted(mlp.ACTIVATIONS))
@pytest.mark.parametrize("loss", sorted(mlp.LOSSES))
def test_without_dropout_an_mlp_gives_the_bits_of_the_plain_function(dtype, activation, loss):
    params, (x, y) = make_mlp(dtype=dtype), make_rows(7, dtype=dtype)
    if loss == "softmax_cross_entropy":
        y = np.arange(7) % 2
    want_loss, want = mlp.mlp_loss_and_gradients(params, x, y, activation, loss, seed=0.5)
    for every in (0, 1, 2, 3, 9):
        got = recompute.mlp_loss_and_gradients_with_recompute(
            params, x, y, activation, loss, seed=0.5, recompute_every=every
        )
        assert got.loss == want_loss and bits(got.gradients) == bits(want)
        assert list(got.gradients) == list(params)
        assert (got.block_forwards, got.extra_forwards) == (3, 3 if every else 0)


def test_dropout_gradients_of_an_mlp_match_central_differences():
    params, (x, y) = make_mlp((3, 4, 3, 2)), make_rows(3)
    tickets, _ = recompute.issue_dropout_tickets(3, [4, 3], num_rows=3)

    def run(changed):
        return recompute.mlp_loss_and_gradients_with_recompute(
            params | changed, x, y, "tanh", dropout=0.5, tickets=tickets
        )

    gradients = run({}).gradients
    for name, param in params.items():
        want = mlp.central_difference_gradient(lambda v, name=name: run({name: v}).loss, param)
        assert np.allclose(gradients[name], want, rtol=1e-6, atol=1e-8), name
    assert not np.allclose(gradients["head.linear.weight"], 0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_twenty_steps_give_the_same_bits_with_and_without_recompute(dropout):
    runs = []
    for every in (0, 1, 2):
        params = make_mlp()
        state, next_words, losses = optimizers.adamw_init(params), [], []
        before = np.random.get_state()[1].tobytes()
        for step in range(20):
            x, y = make_rows(6, seed=step)
            tickets, next_word = recompute.issue_dropout_tickets(
                recompute.dropout_key(1, state.step), [6, 4, 5] if dropout else [], num_rows=6
            )
            result = recompute.mlp_loss_and_gradients_with_recompute(
                params, x, y, recompute_every=every, dropout=dropout, tickets=tickets
            )
            params, state = optimizers.adamw_step(params, result.gradients, state, lr=0.01)
            losses.append(result.loss)
            next_words.append(next_word)
        assert np.random.get_state()[1].tobytes() == before  # nothing draws from a live generator
        runs.append((losses, bits(params), next_words))
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][2] == [6 * 15 if dropout else 0] * 20


def test_c105_microbatches_may_go_back_in_another_order_than_they_came():
    params, (x, _) = make_mlp(), make_rows(5)
    tickets, _ = recompute.issue_dropout_tickets(4, [6, 4, 5], num_rows=5)
    blocks = recompute.mlp_blocks(4, dropout=0.5)
    cuts = [(0, 2), (2, 5)]
    per_cut = [
        [(ticket,) for ticket in recompute.tickets_from_row(tickets, start)] for start, _ in cuts
    ]

    def forward(index, every):
        start, stop = cuts[index]
        return recompute.blocks_forward(blocks, params, x[start:stop], per_cut[index], every)

    (first_y, first), (second_y, second) = forward(0, 1), forward(1, 1)
    interleaved = [
        recompute.blocks_backward(params, first, np.ones_like(first_y)),
        recompute.blocks_backward(params, second, np.ones_like(second_y)),
    ]
    for index in (0, 1):
        alone_y, alone = forward(index, 0)
        dx, gradients, _ = recompute.blocks_backward(params, alone, np.ones_like(alone_y))
        assert np.array_equal(interleaved[index][0], dx)
        assert bits(interleaved[index][1]) == bits(gradients)
    # And the two together are the update's rows in one piece.
    whole, _ = recompute.blocks_forward(blocks, params, x, [(t,) for t in tickets])
    assert np.allclose(np.concatenate([first_y, second_y]), whole, rtol=1e-14)


def test_b4_b5_three_recomputed_blocks_of_the_worked_decoder():
    params, (tokens, targets) = make_decoder(), worked_batch()
    tickets, next_word = recompute.issue_dropout_tickets(7, [4] * 6, num_rows=3, max_len=4)
    assert next_word == 288

    def run(every):
        return recompute.decoder_loss_and_gradients_with_recompute(
            params,
            tokens,
            targets,
            settings=WORKED,
            seed_per_target=128 / 9,
            recompute_every=every,
            dropout=0.5,
            tickets=tickets,
        )

    kept, replayed = run(0), run(1)
    assert kept.loss == replayed.loss and bits(kept.gradients) == bits(replayed.gradients)
    assert (kept.extra_forwards, replayed.extra_forwards) == (0, 3)
    assert kept.block_forwards == replayed.block_forwards == 3
    estimate = recompute.estimate_checkpointing_memory_savings(
        [recompute.decoder_block_bytes(3, 4, 4, 1, 1, 4, 8)] * 3
    )
    assert kept.kept == (384, 17280) and replayed.kept == (1536, 0)
    assert estimate.bytes_without == kept.kept.total
    assert estimate.bytes_with == replayed.kept.total
    assert estimate.saved_bytes == 16128 and estimate.extra_forwards == 3

    factors = [
        tuple(recompute.draw_dropout_factors(t, (3, 4, 4), 0.5) for t in tickets[2 * b : 2 * b + 2])
        for b in range(3)
    ]
    loss, gradients = decoder.decoder_loss_and_gradients(
        params, tokens, targets, num_heads=1, num_kv_heads=1, rope_theta=10000.0, norm_eps=1e-5,
        seed_per_target=128 / 9, factors=factors,
    )  # fmt: skip
    assert loss == kept.loss and bits(gradients) == bits(kept.gradients)


@pytest.mark.parametrize("row_limit", [1, 2, 3])
@pytest.mark.parametrize("every", [0, 1, 2])
def test_b4_masks_do_not_depend_on_the_row_limit(row_limit, every):
    params, (tokens, targets) = make_decoder(), worked_batch()
    tickets, _ = recompute.issue_dropout_tickets(7, [4] * 6, num_rows=3, max_len=4)

    def run(start, stop, every):
        # A microbatch is only as long as its longest row.
        length = int((targets[start:stop] != -1).sum(axis=1).max())
        return recompute.decoder_loss_and_gradients_with_recompute(
            params,
            tokens[start:stop, :length],
            targets[start:stop, :length],
            settings=WORKED,
            recompute_every=every,
            dropout=0.5,
            tickets=recompute.tickets_from_row(tickets, start),
        )

    whole = run(0, 3, 0)
    parts = [run(start, min(start + row_limit, 3), every) for start in range(0, 3, row_limit)]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-13)
    for name, want in whole.gradients.items():
        got = sum(part.gradients[name] for part in parts)
        assert np.all(np.abs(got - want) <= 1e-11 + 1e-10 * np.abs(want)), name


def test_stale_weights_of_a_decoder_are_noticed():
    params, (tokens, _) = make_decoder(), worked_batch()
    x = decoder.embed_tokens(params, tokens)
    blocks = recompute.decoder_blocks(3, np.zeros((3, 4), int), WORKED)
    y, segments = recompute.blocks_forward(blocks, params, x, recompute_every=2)
    params["block2.down.weight"][0, 0] += 1e-6
    with pytest.raises(RecomputeMismatch, match="replayed output of block2 must equal the first"):
        recompute.blocks_backward(params, segments, np.ones_like(y))
    params["block0.norm1.weight"][0] += 1e-6
    with pytest.raises(RecomputeMismatch, match="replayed output of block0, block1 must equal"):
        recompute.blocks_backward(params, segments[:1], np.ones_like(y))


def test_whole_models_refuse_the_wrong_number_of_tickets():
    tickets, _ = recompute.issue_dropout_tickets(0, [6, 4], num_rows=2)
    params, (x, y) = make_mlp(), make_rows(2)
    with pytest.raises(ConfigError, match="tickets must hold 1 per block for 3 blocks; got 2"):
        recompute.mlp_loss_and_gradients_with_recompute(params, x, y, dropout=0.5, tickets=tickets)
    with pytest.raises(ConfigError, match="tickets must hold 0 per block for 3 blocks; got 2"):
        recompute.mlp_loss_and_gradients_with_recompute(params, x, y, tickets=tickets)
    tokens, targets = worked_batch()
    with pytest.raises(ConfigError, match="tickets must hold 2 per block for 3 blocks; got 0"):
        recompute.decoder_loss_and_gradients_with_recompute(
            make_decoder(), tokens, targets, settings=WORKED, dropout=0.5
        )
