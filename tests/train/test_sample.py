"""Text from trained weights: the right next byte, the same bytes again, and clear refusals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mpisim.config import config_from_mapping
from mpisim.data.tokenizer import BOS, EOS, PAD
from mpisim.errors import CheckpointError, ConfigError
from mpisim.nn.layers import LayerContext
from mpisim.nn.params import init_params
from mpisim.train.sample import _chooser, last_logits, readable, sample
from mpisim.train.setup import build_model
from mpisim.train.weights import WEIGHTS_FILE, load_weights, save_weights

DECODER = {
    "data": {"kind": "stdlib", "window": 6},
    "model": {
        "kind": "decoder", "d_model": 8, "num_blocks": 2, "num_heads": 2, "num_kv_heads": 1,
        "d_ff": 12,
    },
}  # fmt: skip
MLP = {"data": {"kind": "stdlib", "window": 3}, "model": {"hidden": [5], "embed_dim": 2}}


def make_run(path, *, change=lambda params: None, **sections):
    """Write a run directory with fresh weights, changed by `change`."""
    values = {name: dict(values) for name, values in sections.items()}
    config = config_from_mapping(values)
    path.mkdir(parents=True, exist_ok=True)
    record = {"config": config.model_dump(mode="json"), "versions": {}, "ranks": 1}
    (path / "run.json").write_text(json.dumps(record))
    params = init_params(build_model(config), 3, config.model.dtype)
    change(params)
    save_weights(path / WEIGHTS_FILE, params)
    return path


def chain(follows, dtype="float64", width=8):
    """Return weights of a decoder whose next token depends on the last one alone.

    Attention and feed-forward add nothing; token a has a direction of its own, and the row of
    follows[a] in the head is that direction.
    """

    def change(params):
        for name, array in params.items():
            if "norm" not in name:
                array[...] = 0
        tokens = sorted({*follows, *follows.values()})
        assert len(tokens) <= width
        for place, token in enumerate(tokens):
            params["embed.tokens.weight"][token, place] = 1.0
        for token, after in follows.items():
            params["head.output.weight"][after, tokens.index(token)] += 50.0

    return change


def chain_run(path, follows, window=6, **model):
    sections = {name: dict(values) for name, values in DECODER.items()}
    sections["data"]["window"] = window
    sections["model"] |= {"tied": False, "dtype": "float64"} | model
    return make_run(path, change=chain(follows), **sections)


A, B, C, D = b"abcd"


# -- the right bytes -------------------------------------------------------------------------------


def test_the_most_probable_byte_follows(tmp_path):
    run = chain_run(tmp_path / "run", {BOS: C, C: A, A: B, B: D, D: A})
    for temperature in (0, 0.5):  # a logit is 50 sqrt(8) above the others
        assert sample(run, "", 7, temperature=temperature) == b"cabdabd"
        assert sample(run, "xxa", 4, temperature=temperature) == b"bdab"
    assert sample(run, b"a", 0) == b""


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("stop", [True, False])
def test_a_byte_costs_one_forward_and_no_more(tmp_path, monkeypatch, count, stop):
    """Also the last one: nobody asks what would have come next."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return last_logits(*arguments)

    monkeypatch.setattr("mpisim.train.sample.last_logits", counted)
    run = chain_run(tmp_path / "run", {BOS: C, C: A, A: B, B: D, D: A})
    assert len(sample(run, "", count, temperature=0, stop_at_eos=stop)) == count
    assert len(calls) == count


def test_an_end_costs_one_forward(tmp_path, monkeypatch):
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return last_logits(*arguments)

    monkeypatch.setattr("mpisim.train.sample.last_logits", counted)
    run = chain_run(tmp_path / "run", {BOS: A, A: B, B: EOS})
    assert sample(run, "", 9, temperature=0) == b"ab"
    assert len(calls) == 3


def test_it_stops_where_the_model_ends_its_document(tmp_path):
    run = chain_run(tmp_path / "run", {BOS: A, A: B, B: EOS})
    assert sample(run, "", 9, temperature=0) == b"ab"
    assert sample(run, "b", 9, temperature=0) == b""
    going_on = sample(run, "", 9, temperature=0, stop_at_eos=False)
    assert len(going_on) == 9 and going_on[:2] == b"ab"


@pytest.mark.parametrize("special", [PAD, BOS, 259, 265])
def test_specials_are_never_written(tmp_path, special):
    run = chain_run(tmp_path / "run", {BOS: A, A: special})
    for temperature, top_k in ((0, 0), (1.0, 1), (1.0, 0)):
        text = sample(run, "", 5, temperature=temperature, top_k=top_k, stop_at_eos=False)
        assert len(text) == 5 and text[:1] == b"a"


def test_a_larger_vocabulary_writes_bytes_only(tmp_path):
    run = chain_run(tmp_path / "run", {BOS: A, A: 299}, vocab_size=300)
    assert sample(run, "", 3, temperature=0, stop_at_eos=False)[:1] == b"a"


@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_are_those_of_the_loss(tmp_path, tied, chunk):
    """The loss of each possible next token is the logits' cross-entropy."""
    sections = {name: dict(values) for name, values in DECODER.items()}
    sections["model"] |= {"tied": tied, "loss_chunk_tokens": chunk, "dtype": "float64"}
    model = build_model(config_from_mapping(sections))
    split = model.split_params(init_params(model, 3, "float64"))
    ids = np.array([[BOS, 100, 32, 7]], dtype=np.int32)
    logits = last_logits(model, split, ids)
    assert logits.shape == (266,) and logits.dtype == np.float64
    for target in (0, 100, 257, 265):
        targets = np.array([[-1, -1, -1, target]], dtype=np.int32)
        x, ctx = ids, LayerContext(targets=targets)
        for block, params in zip(model.blocks, split, strict=True):
            x, _ = block.forward(params, x, ctx)
        expected = math.log(np.exp(logits).sum()) - logits[target]
        assert float(x) == pytest.approx(expected, rel=1e-12)


def test_dropout_is_off(tmp_path):
    sections = {name: dict(values) for name, values in DECODER.items()}
    plain = make_run(tmp_path / "plain", **sections)
    sections["model"] = sections["model"] | {"dropout": 0.5}
    dropped = make_run(tmp_path / "dropped", **sections)
    assert sample(plain, "ab", 20, seed=1) == sample(dropped, "ab", 20, seed=1)


@pytest.mark.parametrize("seen", [6, 9])
def test_the_model_sees_its_longest_row(tmp_path, seen):
    """Of a prompt that is longer than the context, and of what was written, the tail."""
    sections = {name: dict(values) for name, values in DECODER.items()}
    sections["model"] |= {"max_len": 0 if seen == 6 else seen}
    run = make_run(tmp_path / "run", **sections)
    long = bytes(range(65, 65 + 30))
    texts = [
        sample(run, long[-length:], 12, temperature=0) for length in (seen - 2, seen - 1, seen, 30)
    ]
    # One less than the row: the begin-of-document token stands before it.
    assert texts[2] == texts[3]
    config = config_from_mapping(sections)
    model = build_model(config)
    params, _ = load_weights(run / WEIGHTS_FILE, model.param_specs())
    split = model.split_params(params)
    for length, text in zip((seen - 2, seen - 1, seen), texts, strict=False):
        ids = [BOS, *long[-length:]]
        for byte in text:
            logits = last_logits(model, split, np.array([ids[-seen:]], dtype=np.int32))
            assert byte == int(np.argmax(logits[:256]))
            ids.append(byte)


# -- the multi-layer perceptron --------------------------------------------------------------------


def mlp_chain(params):
    """After the byte b comes b + 1; the other bytes of the window do not matter."""
    for array in params.values():
        array[...] = 0
    angles = np.arange(256) * 2 * np.pi / 256
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    params["embed.embedding.weight"][:] = circle
    shift = 2 * np.pi / 256
    rotate = np.array(
        [[np.cos(shift), np.sin(shift)], [-np.sin(shift), np.cos(shift)]]
    )  # fmt: skip
    params["head.linear.weight"][4:6] = 1000 * rotate @ circle.T


def mlp_run(folder, kind="stdlib", **data):
    return make_run(
        folder, change=mlp_chain, data={"kind": kind, "window": 3} | data,
        model={"hidden": [], "embed_dim": 2, "dtype": "float64"},
    )  # fmt: skip


@pytest.mark.parametrize("prompt", ["c", "abc", "xyzabc"])
def test_the_mlp_writes_too(tmp_path, prompt):
    run = mlp_run(tmp_path / "run")
    assert sample(run, prompt, 5, temperature=0) == b"defgh"
    assert sample(run, "", 3, temperature=0) == b"\x01\x02\x03"  # from the separator
    assert sample(run, bytes([254]), 9, temperature=0) == b"\xff"  # then comes the separator
    assert len(sample(run, bytes([254]), 9, temperature=0, stop_at_eos=False)) == 9


def test_in_a_file_the_zero_byte_is_a_byte(tmp_path):
    run = mlp_run(tmp_path / "run", "text", path="x.bin")
    assert sample(run, bytes([254]), 3, temperature=0) == b"\xff\x00\x01"


# -- choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sections", [DECODER, MLP], ids=["decoder", "mlp"])
def test_the_same_seed_writes_the_same_text(tmp_path, sections):
    run = make_run(tmp_path / "run", **sections)
    texts = [sample(run, "ab", 24, temperature=1.0, seed=seed) for seed in (0, 0, 1, 2)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    # The start of a longer text is the shorter one.
    assert sample(run, "ab", 10, temperature=1.0) == texts[0][:10]


def test_choices_have_the_probabilities_of_the_softmax():
    logits = np.full(266, -np.inf)
    logits[[65, 66, 67]] = np.log([0.5, 0.3, 0.2])
    choose = _chooser(1.0, 0, seed=5)
    counts = np.bincount([choose(logits.copy()) for _ in range(4000)], minlength=266)
    assert set(np.flatnonzero(counts)) == {65, 66, 67}
    # Five standard deviations of a share of 4000 draws.
    assert np.allclose(counts[65:68] / 4000, [0.5, 0.3, 0.2], atol=5 * 0.5 / math.sqrt(4000))


def test_temperature_sharpens_and_flattens():
    logits = np.full(266, -np.inf)
    logits[[65, 66]] = [0.0, 1.0]
    for temperature in (0.5, 2.0):
        choose = _chooser(temperature, 0, seed=5)
        share = np.mean([choose(logits.copy()) == 66 for _ in range(4000)])
        expected = 1 / (1 + math.exp(-1 / temperature))
        assert share == pytest.approx(expected, abs=5 * 0.5 / math.sqrt(4000))


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_leaves_the_most_probable(top_k):
    logits = np.zeros(266)
    logits[[200, 100, 50, 25, 12]] = [0.5, 0.4, 0.3, 0.2, 0.1]
    choose = _chooser(1.0, top_k, seed=1)
    seen = {choose(logits.copy()) for _ in range(300)}
    assert seen == set([200, 100, 50, 25, 12][:top_k])


def test_ties_go_by_the_lower_id():
    logits = np.tile([0.0, 1.0], 133)  # too many to be sorted by insertion, which is stable
    assert _chooser(0.0, 0, 0)(logits) == 1
    assert {_chooser(1.0, 3, seed)(logits) for seed in range(60)} == {1, 3, 5}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9, 1e300])
def test_extreme_temperatures_are_no_error(temperature):
    logits = np.linspace(-700.0, 700.0, 266)
    logits[3] = -np.inf
    token = _chooser(temperature, 0, 0)(logits)
    assert token == 265 if temperature < 1 else token != 3


def test_a_draw_that_rounds_up_to_the_total_takes_the_last_choice(monkeypatch):
    class Rng:
        def random(self):
            return 1.0  # what random() * total may round to

    monkeypatch.setattr("mpisim.train.sample.rng_for_name", lambda seed, name: Rng())
    logits = np.array([1.0, -np.inf, 0.0])
    assert _chooser(1.0, 0, 0)(logits) == 2


# -- refusals --------------------------------------------------------------------------------------


def refused(kind, *arguments, **options):
    with pytest.raises(kind) as caught:
        sample(*arguments, **options)
    text = str(caught.value)
    assert "\n" not in text and " must " in text and "; got " in text and text.endswith("."), text
    return text


@pytest.mark.parametrize(
    "options",
    [
        {"num_tokens": -1}, {"temperature": -0.1}, {"temperature": math.nan},
        {"temperature": math.inf}, {"top_k": -1}, {"seed": -1},
    ],
)  # fmt: skip
def test_arguments_out_of_range(tmp_path, options):
    (name,) = options
    assert name in refused(ConfigError, tmp_path, "", **options)


def test_a_prompt_that_has_no_bytes(tmp_path):
    run = make_run(tmp_path / "run", **MLP)
    assert "prompt" in refused(ConfigError, run, "\ud800")
    sample(run, "\udcff", 1)  # a byte of a command line that is no UTF-8


def test_regression_has_nothing_to_sample(tmp_path):
    run = make_run(tmp_path / "run", data={"kind": "regression"}, model={"hidden": [4]})
    assert "over text" in refused(ConfigError, run)


def test_a_vocabulary_without_a_first_token(tmp_path):
    sections = {name: dict(values) for name, values in DECODER.items()}
    sections["model"] |= {"vocab_size": 256}
    run = make_run(tmp_path / "run", **sections)
    assert "model.vocab_size" in refused(ConfigError, run)


def test_a_run_without_weights(tmp_path):
    run = make_run(tmp_path / "run", **MLP)
    (run / WEIGHTS_FILE).unlink()
    assert "no such file" in refused(CheckpointError, run)


def test_weights_of_another_run(tmp_path):
    run = make_run(tmp_path / "run", **MLP)
    other = make_run(tmp_path / "other", **DECODER)
    (run / WEIGHTS_FILE).write_bytes((other / WEIGHTS_FILE).read_bytes())
    assert "parameters of the run's model" in refused(CheckpointError, run)
    wide = make_run(tmp_path / "wide", data=MLP["data"], model=MLP["model"] | {"hidden": [6]})
    (run / WEIGHTS_FILE).write_bytes((wide / WEIGHTS_FILE).read_bytes())
    assert "must have shape" in refused(CheckpointError, run)
    exact = make_run(
        tmp_path / "exact", data=MLP["data"], model=MLP["model"] | {"dtype": "float64"}
    )
    (run / WEIGHTS_FILE).write_bytes((exact / WEIGHTS_FILE).read_bytes())
    assert "must be float32; got float64" in refused(CheckpointError, run)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_of_a_run_that_diverged(tmp_path, value):
    def spoil(params):
        params["head.linear.bias"][7] = value

    run = make_run(tmp_path / "run", change=spoil, **MLP)
    text = refused(CheckpointError, run)
    assert "1 of 256 values" in text and "head.linear.bias" in text


def test_finite_weights_whose_logits_are_not(tmp_path):
    def spoil(params):
        for array in params.values():
            array[...] = 3e38

    run = make_run(tmp_path / "run", change=spoil, **MLP)
    assert "logits must be finite" in refused(CheckpointError, run)


@pytest.mark.parametrize(
    "record",
    [
        "{", "[]", "{}", '{"config": 3}', '{"config": {"model": {"kind": "rnn"}}}',
        '{"config": {"model": {"hidden": 3}, "unheard": {}}}',
    ],
)  # fmt: skip
def test_a_damaged_run_record(tmp_path, record):
    run = make_run(tmp_path / "run", **MLP)
    (run / "run.json").write_text(record)
    assert "run.json" in refused(CheckpointError, run)
    (run / "run.json").unlink()
    assert "run.json" in refused(CheckpointError, run)


def test_a_config_that_claims_a_huge_model_is_no_allocation(tmp_path):
    run = make_run(tmp_path / "run", **MLP)
    record = json.loads((run / "run.json").read_text())
    record["config"]["model"]["hidden"] = [10**12]
    (run / "run.json").write_text(json.dumps(record))
    assert "must have shape" in refused(CheckpointError, run)


# -- printing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"a\tb\n", "a\tb\n"),
        ("h\u00e9 \u4e2d".encode(), "h\u00e9 \u4e2d"),
        (b"a\xff\xfeb", "a\ufffd\ufffdb"),
        (b"\xe4\xb8", "\ufffd"),
        (b"\x1b[2J\x07\x00\r", "\ufffd[2J\ufffd\ufffd\ufffd"),
        ("\u202ex\u009b".encode(), "\ufffdx\ufffd"),
    ],
)
def test_what_may_be_printed(text, shown):
    assert readable(text) == shown
