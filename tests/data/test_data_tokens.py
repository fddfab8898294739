"""Token files (.npy): read right, and never trusted."""

import numpy as np
import pytest

from mpisim.data.text import load_text
from mpisim.data.tokens import read_token_file
from mpisim.errors import ConfigError


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.uint16])
def test_tokens_of_any_integer_dtype_become_bytes(tmp_path, dtype):
    np.save(tmp_path / "t.npy", np.array([0, 7, 255], dtype=dtype))
    assert read_token_file(tmp_path / "t.npy") == bytes([0, 7, 255])
    assert read_token_file(tmp_path / "t.npy", max_tokens=2) == bytes([0, 7])


def test_a_token_file_trains_like_the_text_of_the_same_bytes(tmp_path):
    data = bytes(range(256)) * 4
    np.save(tmp_path / "t.npy", np.frombuffer(data, np.uint8))
    (tmp_path / "t.txt").write_bytes(data)
    tokens = load_text(kind="text", path=tmp_path / "t.npy", window=3)
    text = load_text(kind="text", path=tmp_path / "t.txt", window=3)
    assert tokens.record()["sha256"] == text.record()["sha256"]
    x, targets = tokens.train_batch(np.array([5]))[:2]
    assert x.tolist() == [[5, 6, 7]] and targets.tolist() == [8]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([1, 256]), "0..255"),
        (np.array([-1, 3]), "0..255"),
        (np.zeros((2, 2), np.uint8), "one dim"),
        (np.zeros(3, np.float32), "integer tokens"),
        (np.array([{}], dtype=object), "data.path"),
    ],
)
def test_other_arrays_are_refused(tmp_path, array, words):
    np.save(tmp_path / "t.npy", array, allow_pickle=True)
    with pytest.raises(ConfigError, match=words):
        read_token_file(tmp_path / "t.npy")


def test_a_header_that_claims_terabytes_is_refused_without_allocating(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros(8, np.uint8))
    raw = (tmp_path / "t.npy").read_bytes()
    # NumPy pads the header with spaces, so a longer number keeps its length.
    lied = raw.replace(b"(8,), }" + b" " * 13, b"(8796093022208,), }" + b" ")
    assert lied != raw and len(lied) == len(raw)
    (tmp_path / "t.npy").write_bytes(lied)
    with pytest.raises(ConfigError, match="as long as its header says"):
        read_token_file(tmp_path / "t.npy")


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x09\x00rest"])
def test_files_of_another_format_are_refused(tmp_path, content):
    (tmp_path / "t.npy").write_bytes(content)
    with pytest.raises(ConfigError, match="data.path must be a NumPy array file"):
        read_token_file(tmp_path / "t.npy")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="none.npy"):
        read_token_file(tmp_path / "none.npy")
