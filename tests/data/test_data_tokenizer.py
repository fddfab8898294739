"""Bytes to ids and back, and ids that no text has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.data.tokenizer import BOS, EOS, MASK, PAD, SEP, UNK, VOCAB_SIZE, decode, encode

QUICK = settings(max_examples=60, derandomize=True, deadline=None)


def test_266_ids_of_which_ten_are_special():
    assert VOCAB_SIZE == 266
    specials = [PAD, BOS, EOS, UNK, SEP, MASK]
    assert PAD == 256 and len(set(specials)) == 6
    assert all(256 <= special < 266 for special in specials)


def test_encode_by_hand():
    ids = encode("a\u00e9", bos=True, eos=True)
    assert ids.tolist() == [257, 97, 0xC3, 0xA9, 258]
    assert ids.dtype == np.int32 and ids.flags.writeable
    assert encode(b"\x00\xff").tolist() == [0, 255]
    assert encode("", bos=True).tolist() == [257] and encode(b"", eos=True).tolist() == [258]
    assert encode("").shape == (0,)


@QUICK
@given(content=st.binary(max_size=50), bos=st.booleans(), eos=st.booleans())
def test_every_text_comes_back(content, bos, eos):
    ids = encode(content, bos=bos, eos=eos)
    assert decode(ids) == content and decode(ids.tolist()) == content
    assert encode(decode(ids)).tolist() == list(content)


def test_bytes_of_a_command_line_that_are_no_text_come_back():
    assert decode(encode(b"\xff\xfea".decode("utf-8", "surrogateescape"))) == b"\xff\xfea"


def test_specials_are_left_out_or_shown():
    ids = [257, 104, 260, 105, 265, 258]
    assert decode(ids) == b"hi"
    assert decode(ids, show_specials=True) == b"<bos>h<sep>i<reserved3><eos>"
    assert decode([104, 105], show_specials=True) == b"hi"
    assert decode([]) == decode([], show_specials=True) == b""


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([266], r"must be in 0\.\.265; got 266\.\.266"),
        ([5, -1], r"got -1\.\.5"),
        ([0.5], "integers of one dim; got float64"),
        ([[1, 2]], r"of shape \(1, 2\)"),
    ],
)
def test_ids_that_are_none_are_refused(ids, words):
    with pytest.raises(ValueError, match=words):
        decode(ids)


def test_text_that_has_no_bytes_is_refused():
    with pytest.raises(ValueError, match="at character 1"):
        encode("a\ud800")
