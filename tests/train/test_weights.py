"""weights.safetensors: what goes in comes out, and no damaged or foreign file is let in."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest

from mpisim.errors import CheckpointError
from mpisim.layouts.specs import ParamSpec
from mpisim.train.weights import WEIGHTS_FILE, load_weights, save_weights

SPECS = (ParamSpec(name="embed.weight", shape=(5, 3)), ParamSpec(name="head.bias", shape=(4,)))


def make_params(dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return {spec.name: rng.standard_normal(spec.shape).astype(dtype) for spec in SPECS}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / WEIGHTS_FILE
    save_weights(path, make_params(), {"step": "7", "model": "mlp"})
    return path


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header, body):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def refused(path, *arguments):
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, *arguments)
    text = str(caught.value)
    assert "\n" not in text and " must " in text and "; got " in text and text.endswith(".")
    assert text.isprintable()
    return text


# -- round trip ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_come_back_to_the_bit(tmp_path, dtype):
    params = make_params(dtype)
    params["head.bias"][:] = [np.nan, -0.0, np.inf, np.finfo(dtype).tiny / 4]
    save_weights(tmp_path / "w", params, {"a": "1"})
    loaded, metadata = load_weights(tmp_path / "w", SPECS, dtype)
    assert list(loaded) == [spec.name for spec in SPECS]
    for name, array in params.items():
        assert loaded[name].dtype == dtype and loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()
        loaded[name][...] = 0  # the caller's own
    assert metadata == {"a": "1"}


def test_memory_order_and_views_do_not_matter(tmp_path):
    flat = np.arange(40.0)
    params = {
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "strided": flat[::3],
        "part": flat[5:17].reshape(3, 4).T,
        "number": np.array(2.5),
        "empty": np.zeros((0, 3)),
    }
    save_weights(tmp_path / "w", params)
    loaded, metadata = load_weights(tmp_path / "w")
    assert metadata == {} and loaded.keys() == params.keys()
    for name, array in params.items():
        assert loaded[name].shape == array.shape
        assert np.array_equal(loaded[name], array), name


def test_equal_weights_give_equal_files(tmp_path):
    """The library orders several metadata entries at random."""
    many = {f"key{number}": str(number) for number in range(20)}
    for name in ("one", "two", "three"):
        save_weights(tmp_path / name, make_params(), many)
    contents = {(tmp_path / name).read_bytes() for name in ("one", "two", "three")}
    assert len(contents) == 1
    assert load_weights(tmp_path / "one")[1] == many


def test_other_readers_of_the_format_read_it(path):
    from safetensors.numpy import load_file

    for name, array in load_file(path).items():
        assert np.array_equal(array, make_params()[name])


# -- writing ---------------------------------------------------------------------------------------


def test_an_earlier_file_is_replaced_whole_or_not_at_all(path, monkeypatch):
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            if name == "replace":
                patch.setattr(type(path), "replace", fail)
            with pytest.raises(CheckpointError, match="No space left on device"):
                save_weights(path, make_params(seed=1))
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == [WEIGHTS_FILE]
    save_weights(path, make_params(seed=1))
    assert path.read_bytes() != before
    assert os.listdir(path.parent) == [WEIGHTS_FILE]


def test_the_bytes_reach_the_disk_before_the_name_does(path, monkeypatch):
    events = []
    real_fsync, real_replace = os.fsync, type(path).replace

    def fsync(number):
        events.append("fsync")
        real_fsync(number)

    def replace(self, target):
        events.append("replace")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(type(path), "replace", replace)
    save_weights(path, make_params())
    assert events == ["fsync", "replace"]


def test_a_folder_that_is_missing_is_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="must be writable; got No such file") as caught:
        save_weights(tmp_path / "missing" / "w", make_params())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "int32", ">f4", "bool"])
def test_only_master_weights_are_saved(tmp_path, dtype):
    with pytest.raises(ValueError, match="float32 or float64"):
        save_weights(tmp_path / "w", {"a": np.zeros(3, dtype)})
    assert not os.listdir(tmp_path)


def test_metadata_is_text(tmp_path):
    with pytest.raises(ValueError, match="metadata must be texts"):
        save_weights(tmp_path / "w", make_params(), {"step": 7})


# -- files that cannot be used ---------------------------------------------------------------------


def test_a_missing_file_says_what_to_do(tmp_path):
    assert "no such file" in refused(tmp_path / WEIGHTS_FILE)


def test_what_is_no_plain_file_is_not_opened(tmp_path):
    """Opening a pipe would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    assert "no plain file" in refused(tmp_path / "pipe")
    assert "no plain file" in refused(tmp_path)


def test_a_file_cut_anywhere_is_refused(path):
    data = path.read_bytes()
    for length in [*range(0, 24), *range(24, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:length])
        assert "whole safetensors file" in refused(path)


def test_a_longer_file_is_refused(path):
    path.write_bytes(path.read_bytes() + b"\0")
    refused(path)


def test_a_header_with_a_flipped_bit_never_crashes_or_passes_as_another_model(path):
    """Either refused, or read as exactly the parameters of the model."""
    data = path.read_bytes()
    end = len(data) - sum(array.nbytes for array in make_params().values())
    for offset in range(end):
        for bit in (0, 4, 7):
            changed = bytearray(data)
            changed[offset] ^= 1 << bit
            path.write_bytes(changed)
            try:
                loaded, metadata = load_weights(path, SPECS, "float32")
            except CheckpointError as error:
                assert "\n" not in str(error)
                continue
            assert [(n, a.shape) for n, a in loaded.items()] == [(s.name, s.shape) for s in SPECS]
            assert all(isinstance(text, str) for text in metadata.values())


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 10**8 + 1])
def test_a_header_that_claims_to_be_huge_is_refused(path, length):
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    refused(path)


def test_shapes_that_claim_more_than_the_file_holds_are_refused(path):
    header, body = header_of(path.read_bytes())
    header["embed.weight"]["shape"] = [1 << 40, 3]
    path.write_bytes(with_header(header, body))
    refused(path)


@pytest.mark.parametrize(
    "text", ["[]", "{", "null", '{"a": 1}', "[" * 100_000], ids=lambda text: text[:8]
)
def test_metadata_that_are_no_texts_are_refused(path, text):
    header, body = header_of(path.read_bytes())
    header["__metadata__"]["mpisim"] = text
    path.write_bytes(with_header(header, body))
    assert "metadata" in refused(path)


def test_a_file_of_another_program_has_no_metadata_of_ours(path):
    header, body = header_of(path.read_bytes())
    for metadata in ({"format": "np"}, None):
        header.pop("__metadata__", None)
        if metadata:
            header["__metadata__"] = metadata
        path.write_bytes(with_header(header, body))
        assert load_weights(path, SPECS)[1] == {}


# -- files of another model ------------------------------------------------------------------------


def test_names_shapes_and_dtypes_are_those_of_the_model(path):
    more = (*SPECS, *(ParamSpec(name=f"block{n}.weight", shape=(2,)) for n in range(5)))
    text = refused(path, more)
    assert "the 7 parameters" in text and "no block0.weight" in text and "and 2 more" in text
    assert "got head.bias in" in refused(path, SPECS[:1])
    other = (ParamSpec(name="embed.table", shape=(5, 3)), SPECS[1])
    assert "got no embed.table but embed.weight" in refused(path, other)
    turned = (ParamSpec(name="embed.weight", shape=(3, 5)), SPECS[1])
    assert "embed.weight must have shape (3, 5); got (5, 3)" in refused(path, turned)
    assert "must be float64; got float32" in refused(path, SPECS, "float64")


def test_nothing_is_read_before_all_is_compared(path, monkeypatch):
    import safetensors

    real = safetensors.safe_open

    class Watched:
        def __init__(self, *arguments, **options):
            self.file = real(*arguments, **options)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *arguments):
            return self.file.__exit__(*arguments)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            raise AssertionError("an array was read")

    monkeypatch.setattr(safetensors, "safe_open", Watched)
    with pytest.raises(AssertionError, match="an array was read"):
        load_weights(path, SPECS)
    refused(path, SPECS[:1])
    refused(path, SPECS, "float64")


@pytest.mark.parametrize("code", ["F16", "BF16", "I32"])
def test_other_dtypes_are_refused(path, code):
    header, body = header_of(path.read_bytes())
    size = {"F16": 2, "BF16": 2, "I32": 4}[code]
    parts, offset = {}, 0
    for name, entry in header.items():
        if name != "__metadata__":
            count = int(np.prod(entry["shape"])) * size
            parts[name] = {"dtype": code, "shape": entry["shape"],
                           "data_offsets": [offset, offset + count]}  # fmt: skip
            offset += count
    path.write_bytes(with_header(parts, body[:offset]))
    assert f"got {code}" in refused(path, SPECS)
