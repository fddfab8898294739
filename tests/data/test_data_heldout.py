"""The held-out documents: every 20th, and never a near-copy of one that is trained on."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.data import heldout
from mpisim.data.corpus import read_library
from mpisim.data.heldout import choose_heldout
from mpisim.data.load_documents import load_documents
from mpisim.data.tokenizer import decode

QUICK = settings(max_examples=60, derandomize=True, deadline=None)


def texts(count):
    """Return documents of which no two share a word."""
    return [b"a%d b%d c%d" % (number, number, number) for number in range(count)]


def likeness(one, other):
    one, other = set(one.split()), set(other.split())
    return len(one & other) / len(one | other)


@pytest.mark.parametrize(
    ("count", "want"),
    [(0, ()), (1, ()), (19, ()), (20, (19,)), (39, (19,)), (40, (19, 39)), (60, (19, 39, 59))],
)
def test_every_20th_document_and_none_of_fewer_than_20(count, want):
    assert choose_heldout(texts(count)) == want


def test_the_next_document_takes_the_place_of_a_near_copy():
    documents = texts(60)
    documents[19] = documents[3]  # the same bytes
    documents[20] = documents[7] + b" more"  # 3 words of 4
    documents[39] = documents[50] + b" x y z"  # 3 of 6: just a near-copy
    documents[59] = documents[2] + b" x1 y1 z1 u1"  # 3 of 7: none
    assert choose_heldout(documents) == (21, 40, 59)


def test_a_place_is_given_up_when_all_20_are_near_copies():
    documents = texts(60)
    for number in range(19, 39):
        documents[number] = b"table %d of many words that all have" % number
    assert choose_heldout(documents) == (39, 59)
    assert choose_heldout([b"same"] * 60) == ()
    # The last place has no successors beyond the end.
    documents = texts(40)
    documents[39] = documents[0]
    assert choose_heldout(documents) == (19,)


def test_order_of_words_and_repetition_do_not_hide_a_copy():
    documents = texts(20)
    documents[19] = b"c4 b4\n\n  a4 a4 a4"
    assert choose_heldout(documents) == ()


def test_documents_without_a_word_of_their_own_are_trained_on(monkeypatch):
    documents = texts(20)
    documents[19] = b" \n"
    assert choose_heldout(documents) == ()
    # "the" is in too many documents to be counted: what is left decides.
    monkeypatch.setattr(heldout, "_MAX_DOCUMENTS_OF_WORD", 5)
    documents = [b"the end of %d" % number for number in range(20)]
    assert choose_heldout(documents) == (19,)
    documents[19] = b"the end of"
    assert choose_heldout(documents) == ()


@QUICK
@given(data=st.data())
def test_the_choice_is_that_of_comparing_all_pairs(data):
    word = st.integers(0, 12).map(lambda number: b"w%d" % number)
    document = st.lists(word, max_size=6).map(b" ".join)
    documents = data.draw(st.lists(document, min_size=20, max_size=70))
    alone = [
        bool(one.split())
        and all(likeness(one, other) < 0.5 for j, other in enumerate(documents) if j != i)
        for i, one in enumerate(documents)
    ]
    want = []
    for offered in range(19, len(documents), 20):
        want += [i for i in range(offered, min(offered + 20, len(documents))) if alone[i]][:1]
    assert choose_heldout(documents) == tuple(want)


@pytest.fixture(scope="module")
def library():
    return read_library()


def test_no_file_of_the_library_is_held_out_beside_a_near_copy(library):
    chosen = choose_heldout(library)
    assert len(library) // 20 - 8 <= len(chosen) <= len(library) // 20
    words = [set(document.split()) for document in library]
    for index in chosen:
        mine = words[index]
        for other, theirs in enumerate(words):
            if other != index:
                shared = len(mine & theirs)
                assert shared < 0.5 * (len(mine) + len(theirs) - shared)


def test_character_maps_are_all_on_one_side(library):
    tables = [i for i, d in enumerate(library) if b"Python Character Mapping Codec" in d[:200]]
    assert len(tables) > 50
    assert not set(tables) & set(choose_heldout(library))
    # Every 20th alone would have held some of them out.
    assert set(tables) & set(range(19, len(library), 20))
    data = load_documents(kind="stdlib", window=512, layout="packed")
    assert data.num_heldout > 100
    shown = decode(data.heldout_batch(np.arange(data.num_heldout)).x.reshape(-1))
    assert b"import " in shown and b"Python Character Mapping Codec" not in shown


def test_the_choice_does_not_depend_on_the_process():
    """Hashes of bytes, and with them the order of sets, differ from process to process."""
    code = (
        "from mpisim.data.corpus import read_library; "
        "from mpisim.data.heldout import choose_heldout; "
        "print(choose_heldout(read_library(3_000_000)))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert told == {f"{choose_heldout(read_library(3_000_000))}\n"}
