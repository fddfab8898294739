"""Texts as bytes: documents, splits, samples, baselines by hand."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import sysconfig

import numpy as np
import pytest

from mpisim.data.heldout import HELDOUT_RULE
from mpisim.data.text import TextData, load_text
from mpisim.errors import ConfigError


def as_stream(text):
    return np.frombuffer(text, dtype=np.uint8)


def make_data(train, heldout=b"", window=2):
    return TextData(as_stream(train), as_stream(heldout), window, {"name": "test"})


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return a function that makes a folder pose as the standard library."""

    def install(files):
        for name, content in files.items():
            path = tmp_path / "lib" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        monkeypatch.setattr(sysconfig, "get_path", lambda key: str(tmp_path / "lib"))

    return install


def test_samples_are_all_positions_with_a_full_window():
    data = make_data(b"abcdef", b"wxyz", window=2)
    assert (data.num_train, data.num_heldout, data.nbytes) == (4, 2, 10)
    x, targets = data.train_batch(np.array([3, 0]))[:2]
    assert x.tolist() == [list(b"de"), list(b"ab")]
    assert targets.tolist() == list(b"fc")
    x, targets = data.heldout_batch(np.array([1]))[:2]
    assert (x.tolist(), targets.tolist()) == ([list(b"xy")], list(b"z"))


def test_a_batch_is_a_contiguous_copy_of_uint8():
    data = make_data(b"abcdef")
    for indices in (np.array([1, 2]), np.array([], dtype=np.int64), []):
        x, targets = data.train_batch(indices)[:2]
        assert x.dtype == targets.dtype == np.uint8
        assert x.shape == (len(indices), 2) and targets.shape == (len(indices),)
        assert x.flags.c_contiguous and x.flags.writeable
    x, _ = data.train_batch(np.array([0]))[:2]
    x[:] = 0
    assert data.train_batch(np.array([0]))[0].tolist() == [list(b"ab")]


def test_small_index_dtypes_do_not_overflow():
    data = make_data(bytes(range(256)) + bytes(reversed(range(256))), window=200)
    _, targets = data.train_batch(np.array([250], dtype=np.uint8))[:2]
    assert targets.tolist() == [255 - (250 + 200 - 256)]


@pytest.mark.parametrize("indices", [[4], [-1], [0, 1 << 40]])
def test_samples_out_of_range_are_refused(indices):
    with pytest.raises(IndexError, match=r"train samples must be in 0\.\.3"):
        make_data(b"abcdef").train_batch(np.array(indices))
    with pytest.raises(IndexError, match="heldout samples"):
        make_data(b"abcdef").heldout_batch(np.array([0]))


def test_a_stream_without_a_sample_is_refused():
    with pytest.raises(ValueError, match="streams must be uint8"):
        make_data(b"ab")


def test_library_documents_are_sorted_joined_and_split(library):
    files = {f"m{number:02d}.py": b"x%02d" % number for number in range(41)}
    files |= {
        "pkg/a.py": b"A",
        "empty.py": b"",
        "notes.txt": b"no",
        "test/t.py": b"no",
        "pkg/tests/t.py": b"no",
        "site-packages/s.py": b"no",
        "dist-packages/s.py": b"no",
        "pkg/__pycache__/c.py": b"no",
        "idlelib/idle_test/t.py": b"no",
    }
    library(files)
    data = load_text(kind="stdlib", window=2)
    documents = [b"x%02d" % number for number in range(41)] + [b"A"]
    heldout = [documents[19], documents[39]]
    train = [document for document in documents if document not in heldout]
    record = data.record()
    assert record["num_documents"] == 42
    assert record["num_bytes"] == 41 * 3 + 1
    assert record["sha256"] == hashlib.sha256(b"".join(documents)).hexdigest()
    assert record["heldout_rule"] == HELDOUT_RULE
    # Reading every sample gives the streams back: documents with one zero byte between.
    x, targets = data.heldout_batch(np.arange(data.num_heldout))[:2]
    assert bytes(x[0]) + bytes(targets) == b"\0".join(heldout) == b"x19\0x39"
    x, targets = data.train_batch(np.arange(data.num_train))[:2]
    assert bytes(x[0]) + bytes(targets) == b"\0".join(train)
    assert record["num_train_bytes"] == len(b"\0".join(train))


def test_library_limit_takes_whole_documents(library):
    library({f"m{number}.py": b"12345" for number in range(9)} | {"m0a.py": b"large" * 4})
    record = load_text(kind="stdlib", window=2, max_bytes=14).record()
    assert (record["num_documents"], record["num_bytes"]) == (2, 10)
    assert load_text(kind="stdlib", window=2, max_bytes=15).record()["num_documents"] == 3
    # m0, the large one, m1, m2, and nothing else fits.
    assert load_text(kind="stdlib", window=2, max_bytes=37).record()["num_bytes"] == 35
    with pytest.raises(ConfigError, match=r"data.max_bytes must leave at least 3 bytes.*got 0 "):
        load_text(kind="stdlib", window=2, max_bytes=4)


def test_few_documents_are_split_by_bytes(library):
    library({f"m{number}.py": b"y" * 99 for number in range(3)})
    data = load_text(kind="stdlib", window=2)
    assert data.record()["heldout_rule"] == "the last of 20 equal pieces"
    assert data.record()["num_train_bytes"] + data.record()["num_heldout_bytes"] == 3 * 99 + 2


def test_library_without_sources_is_refused(library):
    library({"readme.txt": b"text"})
    with pytest.raises(ConfigError, match="standard library must have .py files"):
        load_text(kind="stdlib", window=2)
    library({"a.py": b"ab"})
    with pytest.raises(ConfigError, match="standard library must hold at least 3 bytes"):
        load_text(kind="stdlib", window=2)


def test_the_real_library_loads_and_repeats():
    data = load_text(kind="stdlib", window=8, max_bytes=300_000)
    record = data.record()
    assert 290_000 < record["num_bytes"] <= 300_000
    assert record == load_text(kind="stdlib", window=8, max_bytes=300_000).record()
    assert "standard library" in record["name"]
    json.dumps(record)
    text = load_text(kind="stdlib", window=8, max_bytes=20_000)
    windows, _ = text.train_batch(np.arange(0, text.num_train, 8))[:2]
    assert b"import" in windows.tobytes()


def test_file_holds_out_its_last_twentieth(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(100)))
    data = load_text(kind="text", path=path, window=2)
    x, targets = data.heldout_batch(np.arange(data.num_heldout))[:2]
    assert bytes(x[0]) + bytes(targets) == bytes(range(95, 100))
    assert (data.num_train, data.num_heldout) == (93, 3)
    record = data.record()
    assert record["name"] == "text.txt"
    assert record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert record["heldout_rule"] == "the last of 20 equal pieces"
    assert (record["num_train_bytes"], record["num_heldout_bytes"]) == (95, 5)


def test_file_limit_takes_its_start(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(100)))
    record = load_text(kind="text", path=path, window=1, max_bytes=40).record()
    assert record["num_bytes"] == 40
    assert record["sha256"] == hashlib.sha256(bytes(range(40))).hexdigest()


def test_short_file_has_no_heldout_split_and_says_so(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a" * 59)  # pieces of 3 and 2 bytes: the last has no window and target
    data = load_text(kind="text", path=path, window=2)
    assert (data.num_train, data.num_heldout) == (57, 0)
    assert data.record()["heldout_rule"] == "none (too few bytes)"
    assert data.heldout_batch([])[0].shape == (0, 2)
    path.write_bytes(b"a" * 60)
    assert load_text(kind="text", path=path, window=2).num_heldout == 1


def test_the_shortest_file_has_one_sample(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc")
    data = load_text(kind="text", path=path, window=2)
    assert (data.num_train, data.num_heldout) == (1, 0)
    with pytest.raises(ConfigError, match=r"data.path .* at least 4 bytes .* got 3 bytes"):
        load_text(kind="text", path=path, window=3)


def test_unreadable_paths_are_named(tmp_path, monkeypatch):
    def message(path):
        with pytest.raises(ConfigError) as caught:
            load_text(kind="text", path=path, window=2)
        text = str(caught.value)
        assert text.startswith("data.path must name a") and str(path) in text
        return text

    assert "no such file" in message(tmp_path / "missing.txt")
    assert "a directory" in message(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    assert "an empty file (0 bytes)" in message(tmp_path / "empty.txt")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in message(tmp_path / "pipe")
    (tmp_path / "secret.txt").write_bytes(b"abc")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    # The superuser may read everything, so a mode of 000 would prove nothing.
    monkeypatch.setattr("builtins.open", refuse)
    assert "Permission denied" in message(tmp_path / "secret.txt")


def test_baselines_by_hand():
    # Train "aabb": counts a 2, b 2; pairs aa, ab, bb once each. Held-out "aab", window 1: the
    # predicted bytes are "ab", after the pairs aa and ab.
    data = make_data(b"aabb", b"aab", window=1)
    baselines = data.baselines()
    assert baselines["split"] == "heldout"
    assert math.isclose(baselines["unigram_entropy_nats"], math.log(2), rel_tol=1e-14)
    # (2 + 1) / (4 + 256) for both bytes; after "a" two pairs were seen, one of each kind.
    want = -math.log(3 / 260)
    assert math.isclose(baselines["unigram_cross_entropy_nats"], want, rel_tol=1e-14)
    want = -math.log((1 + 1) / (2 + 256))
    assert math.isclose(baselines["bigram_cross_entropy_nats"], want, rel_tol=1e-14)
    assert data.primary_baseline in baselines


def test_baselines_count_only_bytes_with_a_full_window():
    # Of "zab" with window 2 only "b" is predicted: entropy 0; its bigram is (a, b).
    baselines = make_data(b"ababab", b"zab", window=2).baselines()
    assert baselines["unigram_entropy_nats"] == 0.0
    want = -math.log((3 + 1) / (3 + 256))
    assert math.isclose(baselines["bigram_cross_entropy_nats"], want, rel_tol=1e-14)


def test_baselines_without_heldout_are_measured_on_train():
    baselines = make_data(b"aabb", window=1).baselines()
    assert baselines["split"] == "train"
    # predicted bytes: a, b, b
    want = -(math.log(1 / 3) + 2 * math.log(2 / 3)) / 3
    assert math.isclose(baselines["unigram_entropy_nats"], want, rel_tol=1e-14)


def test_baselines_count_long_streams_in_pieces(monkeypatch):
    rng = np.random.default_rng(0)
    streams = [rng.integers(97, 105, count).astype(np.uint8) for count in (1000, 333)]
    whole = TextData(*streams, 3, {}).baselines()
    monkeypatch.setattr("mpisim.data.text._COUNT_PIECE", 7)
    assert TextData(*streams, 3, {}).baselines() == whole
    # And against plain counting, one pair at a time.
    train, heldout = (stream.tolist() for stream in streams)
    counts, contexts = {}, {}
    for first, second in itertools.pairwise(train):
        counts[first, second] = counts.get((first, second), 0) + 1
        contexts[first] = contexts.get(first, 0) + 1
    nats = [
        -math.log((counts.get(pair, 0) + 1) / (contexts.get(pair[0], 0) + 256))
        for pair in list(itertools.pairwise(heldout))[2:]
    ]
    assert math.isclose(whole["bigram_cross_entropy_nats"], sum(nats) / len(nats), rel_tol=1e-12)
