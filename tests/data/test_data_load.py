"""Synthetic rows, and the way from a config to a data set."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mpisim.config.schema import RunConfig
from mpisim.data.batch import Batch
from mpisim.data.documents import DecoderData
from mpisim.data.load import load_data
from mpisim.data.synthetic import RegressionData
from mpisim.data.text import TextData
from mpisim.errors import ConfigError
from mpisim.reference.mlp import make_synthetic_regression_batch


def make_rows(num_rows=50, dtype="float64", **settings):
    defaults = {"num_features": 3, "num_targets": 2, "noise": 0.1, "seed": 0}
    return RegressionData(num_rows=num_rows, dtype=dtype, **{**defaults, **settings})


def make_config(global_batch=4, **data):
    return RunConfig.model_validate({"data": data, "train": {"global_batch": global_batch}})


def all_rows(data):
    train = data.train_batch(np.arange(data.num_train))
    heldout = data.heldout_batch(np.arange(data.num_heldout))
    return train[:2], heldout[:2]


def test_every_20th_row_is_held_out():
    data = make_rows(50)
    assert (data.num_train, data.num_heldout) == (48, 2)
    (x, y), (heldout_x, heldout_y) = all_rows(data)
    # The same draws in the same order as the reference's linear teacher.
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(0)))
    want_x, want_y = make_synthetic_regression_batch(rng, 50, 3, 2, 0.1)
    assert np.array_equal(heldout_x, want_x[[19, 39]])
    assert np.allclose(heldout_y, want_y[[19, 39]], rtol=1e-12)
    assert np.array_equal(x, np.delete(want_x, [19, 39], axis=0))
    assert np.allclose(y, np.delete(want_y, [19, 39], axis=0), rtol=1e-12)
    assert data.nbytes == 50 * 5 * 8


@pytest.mark.parametrize(("num_rows", "num_heldout"), [(1, 0), (19, 0), (20, 1), (39, 1), (40, 2)])
def test_fewer_than_20_rows_have_no_heldout_split(num_rows, num_heldout):
    data = make_rows(num_rows)
    assert (data.num_train, data.num_heldout) == (num_rows - num_heldout, num_heldout)
    assert data.baselines()["split"] == ("heldout" if num_heldout else "train")
    x, targets = data.heldout_batch([])[:2]
    assert x.shape == (0, 3) and targets.shape == (0, 2)


def test_seed_and_dtype():
    wide, narrow = all_rows(make_rows())[0], all_rows(make_rows(dtype="float32"))[0]
    for a, b in zip(wide, narrow, strict=True):
        assert b.dtype == np.float32 and np.array_equal(a.astype(np.float32), b)
    assert not np.array_equal(wide[0], all_rows(make_rows(seed=1))[0][0])
    assert make_rows().record() == make_rows().record()
    assert make_rows().record()["sha256"] != make_rows(seed=1).record()["sha256"]
    json.dumps(make_rows(5).record())


def test_rows_out_of_range_are_refused():
    data = make_rows(50)
    for bad in ([48], [-1]):
        with pytest.raises(IndexError, match=r"train rows must be in 0\.\.47"):
            data.train_batch(np.array(bad))
    x, _ = data.train_batch(np.array([5]))[:2]
    x[:] = 0  # a copy
    assert data.train_batch(np.array([5]))[0].any()


@pytest.mark.parametrize("num_rows", [7, 60])
def test_mean_predictor_by_hand(num_rows):
    data = make_rows(num_rows)
    (_, train_y), (_, heldout_y) = all_rows(data)
    measured = heldout_y if len(heldout_y) else train_y
    mean = [sum(row[target] for row in train_y) / len(train_y) for target in range(2)]
    losses = [sum((row[target] - mean[target]) ** 2 for target in range(2)) for row in measured]
    baselines = data.baselines()
    assert math.isclose(baselines["mean_predictor_loss"], sum(losses) / len(losses), rel_tol=1e-12)
    assert math.isclose(baselines["noise_floor_loss"], 2 * 0.1**2)
    assert data.primary_baseline in baselines


def test_noise_floor_is_the_teachers_loss():
    noisy, clean = make_rows(4000, noise=0.5), make_rows(4000, noise=0.0)
    errors = all_rows(noisy)[0][1] - all_rows(clean)[0][1]
    loss = float((errors**2).sum(axis=1).mean())
    assert abs(loss / noisy.baselines()["noise_floor_loss"] - 1) < 0.1
    assert clean.baselines()["mean_predictor_loss"] > 1.0


def test_load_data_dispatches_on_kind(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello world, " * 20)
    config = make_config(kind="text", path=str(tmp_path / "a.txt"), window=3, max_bytes=200)
    data = load_data(config)
    assert isinstance(data, TextData)
    assert data.record()["num_bytes"] == 200 and data.train_batch([0])[0].shape == (1, 3)

    data = load_data(make_config(kind="stdlib", window=5, max_bytes=50_000))
    assert isinstance(data, TextData) and data.window == 5

    config = RunConfig.model_validate(
        {
            "run": {"seed": 3},
            "model": {"dtype": "float64"},
            "data": {
                "kind": "regression",
                "num_rows": 30,
                "num_features": 4,
                "num_targets": 3,
                "noise": 0.5,
            },
            "train": {"global_batch": 29},
        }
    )
    data = load_data(config)
    want = RegressionData(
        num_rows=30, num_features=4, num_targets=3, noise=0.5, seed=3, dtype="float64"
    )
    assert data.record() == want.record()


def test_a_batch_larger_than_the_data_names_the_field_and_the_rows(tmp_path):
    match = r"train.global_batch must be at most .*; got 30 with 29 rows"
    with pytest.raises(ConfigError, match=match):
        load_data(make_config(30, kind="regression", num_rows=30))
    (tmp_path / "a.txt").write_bytes(b"abcdef")
    with pytest.raises(ConfigError, match="train.global_batch .* got 256 with 3 rows"):
        load_data(make_config(256, kind="text", path=str(tmp_path / "a.txt"), window=3))


def test_errors_of_the_text_reach_the_caller(tmp_path):
    with pytest.raises(ConfigError, match="data.path must name a readable file"):
        load_data(make_config(kind="text", path=str(tmp_path / "missing.txt")))


def decoder_config(global_batch=2, vocab_size=0, **data):
    return RunConfig.model_validate(
        {
            "data": data,
            "model": {"kind": "decoder", "vocab_size": vocab_size},
            "train": {"global_batch": global_batch},
        }
    )


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_decoder_gets_rows_of_documents(tmp_path, layout):
    (tmp_path / "a.txt").write_bytes(b"hello\n\nthere\n")
    data = load_data(
        decoder_config(kind="text", path=str(tmp_path / "a.txt"), window=5, layout=layout)
    )
    assert isinstance(data, DecoderData)
    assert (data.window, data.layout, data.vocab_size) == (5, layout, 266)
    record = data.record()
    assert (record["num_documents"], record["num_train_targets"]) == (2, 14)
    data = load_data(decoder_config(kind="stdlib", window=32, layout=layout, max_bytes=50_000))
    assert "standard library" in data.record()["name"]
    np.save(tmp_path / "a.npy", np.arange(300))
    config = decoder_config(vocab_size=300, kind="text", path=str(tmp_path / "a.npy"), window=5)
    assert load_data(config).vocab_size == 300


def test_a_decoder_refuses_what_has_no_tokens(tmp_path):
    with pytest.raises(ConfigError, match='data.kind must be "stdlib" or "text" .* "regression"'):
        load_data(decoder_config(kind="regression"))
    (tmp_path / "a.txt").write_bytes(b"abcdef")
    with pytest.raises(ConfigError, match="train.global_batch .* got 3 with 2 rows"):
        load_data(decoder_config(3, kind="text", path=str(tmp_path / "a.txt"), window=4))


def test_all_data_sets_count_their_targets(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello\n\nthere\n" * 5)
    text = {"kind": "text", "path": str(tmp_path / "a.txt"), "window": 3}
    for config, num_bytes in (
        (make_config(kind="regression", num_rows=60), 0),
        (make_config(**text), 3),
        (decoder_config(**text), 7),
    ):
        data = load_data(config)
        for split, call, indices in (
            ("train", data.train_batch, np.arange(3)),
            ("heldout", data.heldout_batch, np.arange(0)),
        ):
            batch = call(indices)
            assert isinstance(batch, Batch)
            assert data.count_targets(split, indices) == batch.num_targets
        assert data.count_bytes("train", np.arange(3)) == num_bytes


def test_noise_beyond_the_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"data.noise must keep every target finite in float32"):
        make_rows(noise=1e38 * 10, dtype="float32")
    assert np.isfinite(make_rows(noise=1e39, dtype="float64").train_batch([0]).targets).all()
