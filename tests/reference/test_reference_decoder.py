"""M1: the reference decoder, each piece by hand and the whole by central differences."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.errors import ConfigError
from mpisim.reference import accumulation, decoder, mlp

PLAIN = {"num_heads": 1, "num_kv_heads": 1, "rope_theta": 10000.0, "norm_eps": 1e-5}
GROUPED = {"num_heads": 4, "num_kv_heads": 2, "rope_theta": 100.0, "norm_eps": 1e-5}
PIECES = decoder.DecoderSettings(**GROUPED)


TORCH_LOSS = 14.422531715380652
TORCH_NORMS = {
    "embed.tokens.weight": 12.985190123132275,
    "block0.norm1.weight": 13.838510237011217,
    "block0.qkv.query": 0.18341787159125328,
    "block0.qkv.key": 0.4904651199752943,
    "block0.qkv.value": 14.743817456164702,
    "block0.out.weight": 7.934005731665909,
    "block0.norm2.weight": 2.7510898755577435,
    "block0.gate_up.gate": 7.73837865154777,
    "block0.gate_up.up": 7.558992766343106,
    "block0.down.weight": 18.686028982705192,
    "block1.norm1.weight": 15.464093445439751,
    "block1.qkv.query": 0.01200881887574051,
    "block1.qkv.key": 0.11592355688779497,
    "block1.qkv.value": 13.755641445748118,
    "block1.out.weight": 0.8389227435692803,
    "block1.norm2.weight": 7.285757070326196,
    "block1.gate_up.gate": 22.69529387567835,
    "block1.gate_up.up": 22.934283334479666,
    "block1.down.weight": 9.865551375211872,
    "head.norm.weight": 3.4411776071173716,
}


def make_params(shapes, seed=0):
    """Draw weights large enough that every part of the decoder matters."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape) * 0.5 + (1.0 if ".norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def fixture_params(seed=0):
    return make_params(decoder.decoder_param_shapes(3, 4, 1, 1, 4, 8, 266, tied=True), seed)


def grouped_params(seed=0, tied=False):
    return make_params(decoder.decoder_param_shapes(2, 6, 4, 2, 2, 5, 7, tied), seed)


def random_batch(num_rows, length, vocab_size, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (num_rows, length))
    targets = rng.integers(0, vocab_size, (num_rows, length))
    return tokens, targets


def assert_same(got, want, rtol=1e-12, atol=1e-13):
    assert set(got) == set(want)
    for name in want:
        assert np.allclose(got[name], want[name], rtol=rtol, atol=atol), name


# --- parameters ---


def test_shapes_by_hand():
    shapes = decoder.decoder_param_shapes(1, 6, 4, 2, 2, 5, 7, tied=False)
    assert list(shapes.items()) == [
        ("embed.tokens.weight", (7, 6)),
        ("block0.norm1.weight", (6,)),
        ("block0.qkv.query", (6, 8)),
        ("block0.qkv.key", (6, 4)),
        ("block0.qkv.value", (6, 4)),
        ("block0.out.weight", (8, 6)),
        ("block0.norm2.weight", (6,)),
        ("block0.gate_up.gate", (6, 5)),
        ("block0.gate_up.up", (6, 5)),
        ("block0.down.weight", (5, 6)),
        ("head.norm.weight", (6,)),
        ("head.output.weight", (7, 6)),
    ]


def test_b3_the_worked_decoder_has_29_tensors_and_1572_scalars():
    params = fixture_params()
    assert len(params) == 29
    assert sum(param.size for param in params.values()) == 1572
    assert decoder.count_decoder_blocks(params, decoder.DecoderSettings(**PLAIN)) == 3


def test_a_decoder_may_have_no_block_at_all():
    shapes = decoder.decoder_param_shapes(0, 2, 1, 1, 2, 3, 5, tied=True)
    assert list(shapes) == ["embed.tokens.weight", "head.norm.weight"]
    params = {"embed.tokens.weight": np.zeros((2, 2)), "head.norm.weight": np.array([2.0, 3.0])}
    params["embed.tokens.weight"][0] = [2.0, -2.0]  # root mean square 2
    settings = {**PLAIN, "norm_eps": 1e-300}
    logits = decoder.decoder_logits(params, np.array([[0]]), **settings)
    # normed (1, -1), times gain (2, -3), against rows (2, -2) and (0, 0)
    assert logits.tolist() == [[[10.0, 0.0]]]
    loss, _ = decoder.decoder_loss_and_gradients(
        params, np.array([[0]]), np.array([[1]]), **settings
    )
    assert loss == pytest.approx(10 + math.log1p(math.exp(-10)), rel=1e-14)


def test_the_checks_of_parameters_refuse():
    good = grouped_params()
    cases = [
        ({"block0.qkv.key": None}, r"must hold the tensors of a whole decoder; got \['block0.qkv"),
        ({"lost.weight": np.zeros(2)}, r"nothing missing and \['lost.weight'\] unknown"),
        ({"block1.qkv.key": np.zeros((6, 8))}, r"params\['block1.qkv.key'\] must have shape \(6, "),
        ({"block1.down.weight": np.zeros((5, 6), np.float32)}, "must be float64; got float32"),
        ({"head.norm.weight": np.zeros((6, 1))}, "must be a float32 or float64 ndarray of 1 dim;"),
        ({"block0.qkv.query": np.zeros((6, 9))}, "must be num_heads times an even head size; got"),
        ({"block0.qkv.query": np.zeros((6, 12))}, "must be num_heads times an even head size; got"),
    ]
    for changed, sentence in cases:
        params = {name: a for name, a in {**good, **changed}.items() if a is not None}
        with pytest.raises(ConfigError, match=sentence):
            decoder.count_decoder_blocks(params, PIECES)
    with pytest.raises(ConfigError, match="d_ff must be an integer >= 1; got 0"):
        decoder.decoder_param_shapes(1, 6, 4, 2, 2, 0, 7, tied=False)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads; got 4 and 3"),
        ({"num_heads": 0}, "num_heads must be an integer >= 1; got 0"),
        ({"rope_theta": 0.0}, "rope_theta must be finite, > 0; got 0.0"),
        ({"norm_eps": math.nan}, "norm_eps must be finite, > 0; got nan"),
    ],
)
def test_settings_refuse(changed, sentence):
    with pytest.raises(ConfigError, match=sentence):
        decoder.DecoderSettings(**{**GROUPED, **changed})


# --- norm ---


def test_rms_norm_by_hand():
    x, weight = np.array([[1.0, 7.0], [3.0, 3.0]]), np.array([10.0, 1.0])
    got = decoder.rms_norm(x, weight, 1e-300)  # root mean squares 5 and 3
    assert got == pytest.approx(np.array([[2.0, 1.4], [10.0, 1.0]]), rel=1e-15)
    assert decoder.rms_norm(np.array([[3.0]]), np.array([2.0]), 7.0) == pytest.approx(1.5)


def test_rms_norm_boundaries():
    weight = np.ones(2)
    assert decoder.rms_norm(np.zeros((0, 2)), weight, 1e-5).shape == (0, 2)
    assert decoder.rms_norm(np.zeros((3, 2)), weight, 1e-5).tolist() == [[0.0, 0.0]] * 3
    dx, dweight = decoder.rms_norm_backward(np.ones((0, 2)), np.zeros((0, 2)), weight, 1e-5)
    assert dx.shape == (0, 2) and dweight.tolist() == [0.0, 0.0]


def test_rms_norm_backward_by_hand():
    # x (1, 7): r = 1/5. d = weight * dy = (5, 0); mean(x d) = 2.5; dx = d/5 - x 2.5/125.
    dx, dweight = decoder.rms_norm_backward(
        np.array([[1.0, 0.0]]), np.array([[1.0, 7.0]]), np.array([5.0, 1.0]), 1e-300
    )
    assert dx == pytest.approx(np.array([[0.98, -0.14]]), rel=1e-14)
    assert dweight == pytest.approx(np.array([0.2, 0.0]))


@given(seed=st.integers(0, 2**16), factor=st.floats(0.1, 10))
@settings(max_examples=25, deadline=None)
def test_rms_norm_ignores_the_length_of_a_vector_and_its_gradient_is_orthogonal(seed, factor):
    rng = np.random.default_rng(seed)
    x, weight, dy = rng.standard_normal((3, 2, 4)), rng.standard_normal(4), np.ones((3, 2, 4))
    want = decoder.rms_norm(x, weight, 1e-300)
    assert np.allclose(decoder.rms_norm(factor * x, weight, 1e-300), want, rtol=1e-12)
    dx, _ = decoder.rms_norm_backward(dy, x, weight, 1e-300)
    assert np.max(np.abs((dx * x).sum(-1))) < 1e-10


# --- rotary ---


def test_rotate_by_hand():
    x = np.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    # pairs (1, 0) and (0, 2); rates 1 and 100**-0.5; position 3
    got = decoder.rotate(x, np.array([[3]]), 100.0)
    want = [math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)]
    assert got.reshape(-1) == pytest.approx(np.array(want), rel=1e-14)


def test_rotate_boundaries():
    x = np.random.default_rng(0).standard_normal((2, 3, 1, 4))
    zero = np.zeros((2, 3), int)
    assert np.array_equal(decoder.rotate(x, zero, 10.0), x)
    assert decoder.rotate(x[:0], zero[:0], 10.0).shape == (0, 3, 1, 4)


@given(seed=st.integers(0, 2**16), shift=st.integers(0, 500))
@settings(max_examples=25, deadline=None)
def test_rotation_keeps_lengths_is_undone_by_backward_and_sees_differences_only(seed, shift):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 2, 3, 2, 6))
    positions = rng.integers(0, 50, (2, 3))
    turned = decoder.rotate(q, positions, 50.0)
    assert np.allclose((turned**2).sum(-1), (q**2).sum(-1), rtol=1e-12)
    assert np.allclose(decoder.rotate(turned, positions, 50.0, backward=True), q, atol=1e-12)
    near = (turned * decoder.rotate(k, positions + 7, 50.0)).sum(-1)
    far = decoder.rotate(q, positions + shift, 50.0) * decoder.rotate(k, positions + 7 + shift, 50)
    assert np.allclose(near, far.sum(-1), atol=1e-10)


def test_rotate_refuses():
    with pytest.raises(ConfigError, match="the head size must be even to form pairs; got 3"):
        decoder.rotate(np.zeros((1, 1, 1, 3)), np.zeros((1, 1), int), 10.0)
    with pytest.raises(ConfigError, match=r"positions must be in 0\.\..*; got -1"):
        decoder.rotate(np.zeros((1, 1, 1, 2)), np.array([[-1]]), 10.0)


# --- attention ---


def test_attention_by_hand():
    q, k, v = np.zeros((1, 2, 1, 4)), np.zeros((1, 2, 1, 4)), np.zeros((1, 2, 1, 4))
    q[0, 1, 0, 0], k[0, 0, 0, 0] = 2 * math.log(3), 1.0  # score log(3) after the division by 2
    v[0, 0, 0], v[0, 1, 0] = [4, 0, 0, 0], [0, 8, 0, 0]
    mixed, probs = decoder.causal_attention(q, k, v, np.zeros((1, 2), int))
    assert probs == pytest.approx(np.array([[[[1.0, 0.0], [0.75, 0.25]]]]), rel=1e-15)
    assert mixed[0, :, 0] == pytest.approx(np.array([[4, 0, 0, 0], [3, 2, 0, 0]]), rel=1e-15)

    dmixed = np.zeros_like(v)
    dmixed[0, 1, 0, 0] = 1.0  # d mixed[0] of the second position
    dq, dk, dv = decoder.causal_attention_backward(dmixed, q, k, v, probs, np.zeros((1, 2), int))
    # dp = (4, 0), sum p dp = 3, dscores = (0.75 * 1, 0.25 * -3) / 2
    assert dq[0, 1, 0] == pytest.approx([0.375, 0, 0, 0])
    assert dk[0, :, 0, 0] == pytest.approx(np.array([0.375, -0.375]) * 2 * math.log(3))
    assert dv[0, :, 0, 0] == pytest.approx([0.75, 0.25])
    assert not dq[0, 0].any()


def test_attention_of_grouped_heads_reads_the_right_key_head():
    v = np.zeros((1, 1, 2, 2))
    v[0, 0, 0], v[0, 0, 1] = 1.0, 2.0
    q, starts = np.zeros((1, 1, 6, 2)), np.zeros((1, 1), int)
    mixed, probs = decoder.causal_attention(q, v, v, starts)
    assert mixed[0, 0, :, 0].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    dmixed = 10.0 ** np.arange(6).reshape(1, 1, 6, 1) * np.ones(2)
    _, _, dv = decoder.causal_attention_backward(dmixed, q, v, v, probs, starts)
    assert dv[0, 0, :, 0].tolist() == [111.0, 111000.0]


def test_positions_count_from_the_start_of_the_document():
    # Attention sees differences only, so this shows in the turned keys alone.
    params = grouped_params()
    x = np.ones((1, 4, 6))
    _, saved = decoder.decoder_block_forward(params, "block0", x, np.array([[0, 0, 2, 2]]), PIECES)
    assert np.allclose(saved.k[0, 2:], saved.k[0, :2], rtol=1e-13)
    unturned = saved.normed1[0, 0] @ params["block0.qkv.key"]
    assert np.allclose(saved.k[0, 0].reshape(-1), unturned, rtol=1e-13)
    assert not np.allclose(saved.k[0, 1], saved.k[0, 0])


def test_attention_starts_where_the_document_does():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 4, 1, 2))
    _, probs = decoder.causal_attention(q, k, v, np.array([[0, 0, 2, 2]]))
    seen = probs[0, 0] > 0
    assert seen.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert probs.sum(-1) == pytest.approx(np.ones((1, 1, 4)), rel=1e-14)


def test_attention_boundaries():
    # Scores of +-1e6 neither overflow nor leave anything to the loser; no row at all is fine.
    q = np.full((1, 2, 1, 2), 1e6)
    k = np.array([[1.0, 1.0], [-1.0, -1.0]]).reshape(1, 2, 1, 2)
    _, probs = decoder.causal_attention(q, k, k, np.zeros((1, 2), int))
    assert probs[0, 0].tolist() == [[1.0, 0.0], [1.0, 0.0]]
    mixed, probs = decoder.causal_attention(q[:0], k[:0], k[:0], np.zeros((0, 2), int))
    assert mixed.shape == (0, 2, 1, 2) and probs.shape == (0, 1, 2, 2)


def test_attention_refuses():
    q, k = np.zeros((1, 2, 3, 2)), np.zeros((1, 2, 2, 2))
    with pytest.raises(ConfigError, match="heads of q must be a multiple .*; got 3 and 2"):
        decoder.causal_attention(q, k, k, np.zeros((1, 2), int))
    with pytest.raises(ConfigError, match="starts must not lie behind their token; got 1 at posi"):
        decoder.causal_attention(k, k, k, np.array([[1, 1]]))
    with pytest.raises(ConfigError, match=r"starts must be in 0\.\.1; got -1"):
        decoder.causal_attention(k, k, k, np.array([[0, -1]]))
    with pytest.raises(ConfigError, match="starts must be an ndarray of integers; got float64"):
        decoder.causal_attention(k, k, k, np.zeros((1, 2)))


# --- swiglu ---


def test_swiglu_by_hand():
    gate, up, dz = np.array([math.log(3), 0.0]), np.array([4.0, 5.0]), np.array([1.0, 2.0])
    assert decoder.swiglu(gate, up) == pytest.approx([3 * math.log(3), 0.0], rel=1e-15)
    dgate, dup = decoder.swiglu_backward(dz, gate, up)  # sigmoid 3/4 and 1/2
    assert dgate == pytest.approx([4 * (0.75 + math.log(3) * 0.1875), 5.0], rel=1e-14)
    assert dup == pytest.approx([0.75 * math.log(3), 0.0], rel=1e-14)


def test_swiglu_saturates_without_overflow():
    gate, up = np.array([800.0, -800.0]), np.array([2.0, 2.0])
    with np.errstate(all="raise", under="ignore"):
        z = decoder.swiglu(gate, up)
        dgate, dup = decoder.swiglu_backward(np.ones(2), gate, up)
    assert z.tolist() == [1600.0, 0.0]
    assert dgate.tolist() == [2.0, 0.0] and dup.tolist() == [800.0, 0.0]
    assert decoder.swiglu(np.zeros((0, 3)), np.zeros((0, 3))).shape == (0, 3)


@given(st.floats(-30, 30), st.floats(-5, 5))
def test_swiglu_of_opposite_gates_differs_by_the_gate(gate, up):
    # silu(g) - silu(-g) = g
    both = decoder.swiglu(np.array([gate, -gate]), np.array([up, up]))
    assert both[0] - both[1] == pytest.approx(gate * up, abs=1e-12)


def test_swiglu_refuses():
    with pytest.raises(ConfigError, match=r"up must have shape \(2,\); got \(3,\)"):
        decoder.swiglu(np.zeros(2), np.zeros(3))


# --- embedding ---


def test_embedding_by_hand():
    params = {"embed.tokens.weight": np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}
    tokens = np.array([[2, 0, 2]], np.int32)
    assert decoder.embed_tokens(params, tokens).tolist() == [[[5, 6], [1, 2], [5, 6]]]
    dx = np.array([[[1.0, 0.0], [2.0, 0.0], [4.0, 0.5]]])
    dtable = decoder.embed_tokens_backward(dx, tokens, 3)
    assert dtable.tolist() == [[2.0, 0.0], [0.0, 0.0], [5.0, 0.5]]


def test_embedding_boundaries_and_refusals():
    params = {"embed.tokens.weight": np.zeros((3, 2))}
    assert decoder.embed_tokens(params, np.zeros((0, 4), int)).shape == (0, 4, 2)
    assert not decoder.embed_tokens_backward(np.zeros((2, 0, 2)), np.zeros((2, 0), int), 3).any()
    for bad in (3, -1):
        with pytest.raises(ConfigError, match=rf"tokens must be in 0\.\.2; got {bad}"):
            decoder.embed_tokens(params, np.array([[bad]]))
    with pytest.raises(ConfigError, match=r"tokens must be an ndarray of shape \(rows, position"):
        decoder.embed_tokens(params, np.zeros(3, int))


# --- the whole decoder ---


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dropped", [True, False])
def test_every_gradient_matches_central_differences(tied, dropped):
    shapes = decoder.decoder_param_shapes(2, 4, 4, 2, 2, 3, 5, tied)
    params = make_params(shapes, seed=1)
    tokens, targets = random_batch(2, 4, 5, seed=2)
    targets[0, 3] = targets[1, 0] = -1
    starts = np.array([[0, 0, 0, 3], [0, 1, 1, 1]])
    rng = np.random.default_rng(3)
    factors = None
    if dropped:
        factors = [tuple((rng.random((2, 2, 4, 4)) < 0.5) * 2.0) for _ in range(2)]

    def run(changed):
        return decoder.decoder_loss_and_gradients(
            params | changed,
            tokens,
            targets,
            **GROUPED,
            starts=starts,
            factors=factors,
            seed_per_target=0.7,
        )

    _, gradients = run({})
    assert list(gradients) == list(params)
    for name, param in params.items():
        # One direction per tensor: every element enters, at the price of a few forwards.
        direction = rng.standard_normal(param.shape)

        def moved(by, name=name, param=param, direction=direction):
            return run({name: param + by * direction})[0]

        # Two central differences whose errors of second order cancel.
        h = 1e-4
        slope = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)
        got = np.sum(gradients[name] * direction)
        assert got == pytest.approx(0.7 * slope, rel=1e-8, abs=1e-9), name


def test_single_elements_match_central_differences():
    shapes = decoder.decoder_param_shapes(1, 2, 1, 1, 2, 2, 3, tied=True)
    params = make_params(shapes, seed=4)
    tokens, targets = random_batch(1, 3, 3, seed=5)

    def loss(name, value):
        return decoder.decoder_loss_and_gradients(params | {name: value}, tokens, targets, **PLAIN)[
            0
        ]

    _, gradients = decoder.decoder_loss_and_gradients(params, tokens, targets, **PLAIN)
    for name, param in params.items():
        want = mlp.central_difference_gradient(lambda v, name=name: loss(name, v), param)
        assert np.allclose(gradients[name], want, rtol=1e-6, atol=1e-8), name


def formula_params(shapes):
    """Weights that any language can write down: sin of a running count."""
    params, count = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        values = np.sin(np.arange(count, count + size, dtype=np.float64)).reshape(shape)
        params[name] = 1 + 0.5 * values if ".norm" in name else values
        count += size
    return params


def test_loss_and_gradients_are_those_of_pytorch():
    """The right sides are PyTorch's autograd (2.13, float64) on the same weights and tokens."""
    params = formula_params(decoder.decoder_param_shapes(2, 6, 4, 2, 2, 5, 7, tied=True))
    tokens = np.array([[0, 1, 2, 3, 4], [5, 6, 0, 2, 4]])
    targets = np.array([[1, 2, -1, 4, 5], [6, -1, 2, 4, -1]])
    starts = np.array([[0, 0, 0, 3, 3], [0, 0, 2, 2, 2]])
    loss, gradients = decoder.decoder_loss_and_gradients(
        params, tokens, targets, **GROUPED, starts=starts
    )
    assert loss == pytest.approx(TORCH_LOSS, rel=1e-12)
    for name, want in TORCH_NORMS.items():
        assert np.linalg.norm(gradients[name]) == pytest.approx(want, rel=1e-9), name
    assert set(TORCH_NORMS) == set(params)


@pytest.mark.parametrize("row_limit", [1, 2, 3])
def test_b3_accumulated_gradients_equal_those_of_the_full_batch(row_limit):
    # Texts with 2, 4 and 3 valid targets; a microbatch is as long as its longest row.
    rng = np.random.default_rng(6)
    rows = [(rng.integers(0, 256, n), rng.integers(0, 256, n)) for n in (2, 4, 3)]

    def pad(some):
        length = max(len(tokens) for tokens, _ in some)
        tokens, targets = np.full((len(some), length), 256), np.full((len(some), length), -1)
        for index, (row_tokens, row_targets) in enumerate(some):
            tokens[index, : len(row_tokens)] = row_tokens
            targets[index, : len(row_targets)] = row_targets
        return tokens, targets

    params = fixture_params(seed=7)
    grids = [pad(rows[start : start + row_limit]) for start in range(0, 3, row_limit)]
    counts = [int((targets != -1).sum()) for _, targets in grids]
    assert sum(counts) == 9
    if row_limit == 2:
        assert [tokens.shape for tokens, _ in grids] == [(2, 4), (1, 3)] and counts == [6, 3]
    seed = 128.0 / 9  # S / N: microbatch i has share n_i / N of the mean loss
    want_loss, want = decoder.decoder_loss_and_gradients(
        params, *pad(rows), **PLAIN, seed_per_target=seed
    )
    loss, total = 0.0, {}
    for tokens, targets in grids:
        part, gradients = decoder.decoder_loss_and_gradients(
            params, tokens, targets, **PLAIN, seed_per_target=seed
        )
        loss += part
        total = accumulation.accumulate_gradients(total, gradients)
    assert loss == pytest.approx(want_loss, rel=1e-13)
    assert_same(total, want, rtol=1e-10, atol=1e-11)


def test_packed_documents_equal_separate_rows():
    params = grouped_params()
    tokens, targets = random_batch(1, 9, 7, seed=8)
    targets[0, 3] = targets[0, 8] = -1  # the last position of each document predicts nothing
    starts = np.array([[0, 0, 0, 0, 4, 4, 4, 4, 4]], np.uint64)
    loss, packed = decoder.decoder_loss_and_gradients(
        params, tokens, targets, **GROUPED, starts=starts
    )
    parts = [
        decoder.decoder_loss_and_gradients(params, tokens[:, cut], targets[:, cut], **GROUPED)
        for cut in (slice(0, 4), slice(4, 9))
    ]
    assert loss == pytest.approx(parts[0][0] + parts[1][0], rel=1e-13)
    assert_same(packed, accumulation.accumulate_gradients(parts[0][1], parts[1][1]))


def test_padding_changes_nothing():
    params = grouped_params(tied=True)
    tokens, targets = random_batch(2, 4, 7, seed=9)
    want_loss, want = decoder.decoder_loss_and_gradients(params, tokens, targets, **GROUPED)
    padded = np.pad(tokens, ((0, 1), (0, 3)), constant_values=6)
    ignored = np.pad(targets, ((0, 1), (0, 3)), constant_values=-1)
    loss, gradients = decoder.decoder_loss_and_gradients(params, padded, ignored, **GROUPED)
    assert loss == pytest.approx(want_loss, rel=1e-13)
    assert_same(gradients, want)


def test_a_position_sees_no_later_token():
    params = grouped_params()
    tokens, _ = random_batch(1, 6, 7, seed=10)
    before = decoder.decoder_logits(params, tokens, **GROUPED)
    tokens[0, 4] = (tokens[0, 4] + 1) % 7
    after = decoder.decoder_logits(params, tokens, **GROUPED)
    assert np.array_equal(before[0, :4], after[0, :4])
    assert not np.allclose(before[0, 4:], after[0, 4:])


def test_the_seed_multiplies_gradients_and_not_the_loss():
    params = grouped_params()
    batch = random_batch(2, 3, 7, seed=11)
    loss, once = decoder.decoder_loss_and_gradients(params, *batch, **GROUPED)
    same, scaled = decoder.decoder_loss_and_gradients(
        params, *batch, **GROUPED, seed_per_target=0.25
    )
    assert same == loss
    for name in once:
        assert np.array_equal(scaled[name], 0.25 * once[name])


def test_a_tied_table_gets_both_parts_of_its_gradient_once():
    tied = grouped_params(tied=True)
    untied = tied | {"head.output.weight": tied["embed.tokens.weight"].copy()}
    batch = random_batch(2, 3, 7, seed=12)
    loss, one = decoder.decoder_loss_and_gradients(tied, *batch, **GROUPED)
    same, two = decoder.decoder_loss_and_gradients(untied, *batch, **GROUPED)
    assert loss == same
    both = two.pop("head.output.weight") + two["embed.tokens.weight"]
    assert_same(one, two | {"embed.tokens.weight": both})


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_without_a_valid_target_loss_and_gradients_are_zero(shape):
    params = grouped_params(tied=True)
    loss, gradients = decoder.decoder_loss_and_gradients(
        params, np.zeros(shape, int), np.full(shape, -1), **GROUPED
    )
    assert loss == 0.0
    assert {name: grad.shape for name, grad in gradients.items()} == {
        name: param.shape for name, param in params.items()
    }
    assert not any(grad.any() for grad in gradients.values())


def test_one_token_attends_to_itself():
    params = grouped_params()
    loss, gradients = decoder.decoder_loss_and_gradients(
        params, np.array([[2]]), np.array([[3]]), **GROUPED
    )
    # With one key the weight is 1 whatever query and key are, so they learn nothing.
    assert loss > 0
    assert not gradients["block0.qkv.query"].any() and not gradients["block0.qkv.key"].any()
    assert gradients["block0.qkv.value"].any()


def test_nothing_is_modified():
    params = grouped_params()
    tokens, targets = random_batch(2, 3, 7, seed=13)
    starts = np.array([[0, 1, 1], [0, 0, 0]])
    arrays = [*params.values(), tokens, targets, starts]
    copies = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    decoder.decoder_loss_and_gradients(params, tokens, targets, **GROUPED, starts=starts)
    assert all(np.array_equal(*pair) for pair in zip(arrays, copies, strict=True))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"tokens": np.array([[0, 7]])}, r"tokens must be in 0\.\.6; got 7"),
        ({"tokens": [[0, 1]]}, r"tokens must be an ndarray of shape \(rows, positions\); got list"),
        ({"tokens": np.zeros((1, 2))}, "tokens must be an ndarray of integers; got float64"),
        ({"targets": np.array([[0, -2]])}, r"targets must be in -1\.\.6; got -2"),
        ({"targets": np.array([[0, 7]])}, r"targets must be in -1\.\.6; got 7"),
        ({"targets": np.array([[0]])}, r"targets must have shape \(1, 2\); got \(1, 1\)"),
        ({"starts": np.array([[0, 2]])}, r"starts must be in 0\.\.1; got 2"),
        ({"starts": np.array([0, 0])}, r"starts must have shape \(1, 2\); got \(2,\)"),
        ({"seed_per_target": -1.0}, "seed must be finite, >= 0; got -1.0"),
        ({"factors": []}, "factors must hold one pair per block; got 0 for 2 blocks"),
        ({"factors": [(np.ones((1, 2, 5)),) * 2] * 2}, r"factors\[0\] must have shape \(1, 2, 6\)"),
    ],
)
def test_the_decoder_refuses(changed, sentence):
    good = {"tokens": np.array([[0, 1]]), "targets": np.array([[1, -1]])}
    with pytest.raises(ConfigError, match=sentence):
        decoder.decoder_loss_and_gradients(grouped_params(), **{**GROUPED, **good, **changed})


def test_a_block_refuses_what_is_missing():
    params = grouped_params()
    del params["block1.out.weight"]
    with pytest.raises(ConfigError, match=r"must hold every tensor of block1; got \['block1.out"):
        decoder.decoder_block_forward(
            params, "block1", np.zeros((1, 2, 6)), np.zeros((1, 2), int), PIECES
        )
