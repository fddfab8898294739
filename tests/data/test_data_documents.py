"""Documents as rows: packed and padded by hand, every target once, counts, baselines, files."""

from __future__ import annotations

import hashlib
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisim.data import documents as documents_module
from mpisim.data.batch import IGNORED, Batch
from mpisim.data.corpus import split_documents
from mpisim.data.documents import DecoderData, documents_batch
from mpisim.data.heldout import HELDOUT_RULE
from mpisim.data.load_documents import load_documents
from mpisim.data.rows import stream_of_bytes, stream_of_tokens, token_dtype
from mpisim.data.synthetic import SyntheticDocuments
from mpisim.data.tokenizer import BOS, EOS, PAD, decode
from mpisim.errors import ConfigError

QUICK = settings(max_examples=80, derandomize=True, deadline=None)
P = PAD
LAYOUTS = ("packed", "padded")


def make_data(train, heldout=(), *, window, layout, vocab_size=266):
    dtype = token_dtype(vocab_size)
    return DecoderData(
        stream_of_tokens(train, dtype), stream_of_tokens(heldout, dtype),
        window=window, layout=layout, vocab_size=vocab_size, source={"name": "test"},
    )  # fmt: skip


def all_rows(data, split="train"):
    if split == "train":
        return data.train_batch(np.arange(data.num_train))
    return data.heldout_batch(np.arange(data.num_heldout))


THREE = ([1, 2, 3], [4, 5], [6, 7, 8, 9])


# --- rows by hand ----------------------------------------------------------------------------


def test_packed_rows_by_hand():
    data = make_data([*THREE, [10, 11]], window=4, layout="packed")
    batch = all_rows(data)
    assert batch.x.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, P]]
    assert batch.targets.tolist() == [[2, 3, -1, 5], [-1, 7, 8, 9], [-1, 11, -1, -1]]
    assert batch.starts.tolist() == [[0, 0, 0, 3], [0, 1, 1, 1], [0, 1, 1, 0]]
    assert [data.count_targets("train", [row]) for row in range(3)] == [3, 3, 1]
    assert data.num_train == 3 and data.num_heldout == 0


def test_padded_rows_by_hand():
    data = make_data(THREE, window=2, layout="padded")
    batch = all_rows(data)
    assert batch.x.tolist() == [[1, 2], [4, P], [6, 7], [8, P]]
    assert batch.targets.tolist() == [[2, 3], [5, -1], [7, 8], [9, -1]]
    assert batch.starts is None
    assert [data.count_targets("train", [row]) for row in range(4)] == [2, 1, 2, 1]


def test_the_target_of_the_last_column_comes_from_the_next_row():
    batch = all_rows(make_data([[1, 2, 3, 4]], window=2, layout="packed"))
    assert batch.targets.tolist() == [[2, 3], [4, -1]]
    # ... unless a document ends exactly there.
    batch = all_rows(make_data([[1, 2], [3, 4]], window=2, layout="packed"))
    assert batch.targets.tolist() == [[2, -1], [4, -1]]
    assert batch.starts.tolist() == [[0, 0], [0, 0]]


def test_a_document_of_one_token_predicts_nothing():
    batch = all_rows(make_data([[1], [2], [3, 4]], window=4, layout="packed"))
    assert batch.targets.tolist() == [[-1, -1, 4, -1]]
    assert batch.starts.tolist() == [[0, 1, 2, 2]]
    batch = all_rows(make_data([[1], [2], [3, 4]], window=4, layout="padded"))
    assert batch.x.tolist() == [[3, P, P, P]]


def test_rows_wider_than_all_data():
    for layout, starts in (("packed", [[0, 0, 2, 2, 0, 0, 0]]), ("padded", None)):
        data = make_data([[1, 2], [3, 4]], window=7, layout=layout)
        batch = all_rows(data)
        assert batch.num_targets == data.count_targets("train", np.arange(data.num_train)) == 2
        assert (None if starts is None else batch.starts.tolist()) == starts


# --- rows without a target -------------------------------------------------------------------


def test_packed_rows_of_last_tokens_only_are_no_rows():
    """Window 1: a row for every token but each document's last; padded never had such rows."""
    for layout in LAYOUTS:
        data = make_data([*THREE, [10]], window=1, layout=layout)
        batch = all_rows(data)
        assert batch.x[:, 0].tolist() == [1, 2, 4, 6, 7, 8]
        assert batch.targets[:, 0].tolist() == [2, 3, 5, 7, 8, 9]
        assert data.num_train == 6 == data.record()["num_train"]
        some = data.train_batch(np.array([5, 0, 3]))
        assert some.targets[:, 0].tolist() == [9, 2, 7]
        assert [data.count_targets("train", [row]) for row in range(6)] == [1] * 6


@pytest.mark.parametrize(
    ("length", "packed", "padded"), [(47, 6, 6), (48, 6, 6), (49, 6, 6), (50, 7, 7), (57, 7, 7)]
)
def test_49_tokens_are_six_rows_of_eight(length, packed, padded):
    """The 49th token is the target of the 48th and begins a row in which nothing follows."""
    tokens = np.arange(length)
    for layout, num_rows in (("packed", packed), ("padded", padded)):
        data = make_data([tokens], [tokens], window=8, layout=layout)
        assert data.num_train == data.num_heldout == num_rows
        batch = all_rows(data, "heldout")
        assert batch.x.shape == (num_rows, 8) and batch.num_targets == length - 1
        assert np.all((batch.targets != IGNORED).any(axis=1))
        assert sorted(batch.targets[batch.targets != IGNORED].tolist()) == tokens[1:].tolist()
        with pytest.raises(IndexError, match=rf"train rows must be in 0\.\.{num_rows - 1};"):
            data.train_batch(np.array([num_rows]))


def test_a_gap_in_the_middle_moves_the_rows_behind_it():
    """A document of one token fills the second of four rows."""
    documents = [[1, 2, 3], [4], [5], [6], [7, 8, 9, 10, 11]]
    batch = all_rows(make_data(documents, window=3, layout="packed"))
    assert batch.x.tolist() == [[1, 2, 3], [7, 8, 9], [10, 11, P]]
    assert batch.targets.tolist() == [[2, 3, -1], [8, 9, 10], [11, -1, -1]]
    assert batch.starts.tolist() == [[0, 0, 0]] * 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_held_out_split_without_targets_counts_as_none(layout):
    data = make_data([[1, 2, 3]], [[4], [5], [6]], window=2, layout=layout)
    assert data.num_heldout == 0 == data.record()["num_heldout"]
    assert data.heldout_batch([]).x.shape == (0, 2)
    assert data.baselines()["split"] == "train"
    with pytest.raises(IndexError, match="heldout rows"):
        data.heldout_batch(np.array([0]))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int16, np.int32, np.int64])
def test_targets_of_every_integer_dtype_are_counted_one_by_one(dtype):
    """Unsigned ones have none that is ignored; as rows they would be counted once each."""
    targets = np.arange(12, dtype=dtype).reshape(3, 4)
    assert Batch(targets, targets).num_targets == 12
    if np.dtype(dtype).kind == "i":
        targets[1, 1:3] = IGNORED
        assert Batch(targets, targets).num_targets == 10
    # One class a row, or features to predict: rows count.
    assert Batch(targets, targets[:, 0]).num_targets == 3
    assert Batch(targets, targets.astype("f4")).num_targets == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_bytes_in_a_larger_vocabulary(tmp_path, layout):
    """A model of 300 ids over text is still paid by the byte."""
    (tmp_path / "t.txt").write_bytes(b"hello\n\nthere\n")
    (narrow, wide) = (
        load_documents(
            kind="text", path=str(tmp_path / "t.txt"), window=4, layout=layout, vocab_size=size
        )
        for size in (0, 300)
    )
    assert wide.vocab_size == 300 and wide.has_bytes and narrow.has_bytes
    rows = np.arange(wide.num_train)
    assert wide.count_bytes("train", rows) == narrow.count_bytes("train", rows) > 10
    assert wide.count_bytes("train", rows) == all_rows(wide).num_bytes
    assert "unigram_bits_per_byte" in wide.baselines()
    # Ids of a file of their own are none, whatever their number but that of the tokenizer.
    np.save(tmp_path / "t.npy", np.arange(40) % 7)
    ids = load_documents(
        kind="text", path=str(tmp_path / "t.npy"), window=4, layout=layout, vocab_size=300
    )
    assert not ids.has_bytes and ids.count_bytes("train", np.arange(3)) == 0
    assert "unigram_bits_per_byte" not in ids.baselines()


def test_text_documents_begin_and_end_with_specials():
    stream = stream_of_bytes([b"hi", b"", b"\xff"])
    assert stream.tokens.tolist() == [BOS, 104, 105, EOS, BOS, EOS, BOS, 255, EOS]
    assert stream.offsets.tolist() == [0, 4, 6, 9]
    data = DecoderData(
        stream, stream_of_bytes([]), window=9, layout="packed", vocab_size=266, source={}
    )
    batch = all_rows(data)
    assert batch.targets.tolist() == [[104, 105, EOS, -1, EOS, -1, 255, EOS, -1]]
    assert batch.num_bytes == data.count_bytes("train", [0]) == 3


def test_the_worked_fixture_has_grids_2_4_and_1_3():
    """B3: texts with 2, 4 and 3 valid targets, at most 2 rows: target counts 6 and 3."""
    texts = [np.arange(targets + 1) for targets in (2, 4, 3)]
    first, second = documents_batch(texts[:2]), documents_batch(texts[2:])
    assert first.x.shape == first.targets.shape == (2, 4)
    assert second.x.shape == second.targets.shape == (1, 3)
    assert (first.num_targets, second.num_targets) == (6, 3)
    assert first.x.tolist() == [[0, 1, P, P], [0, 1, 2, 3]]
    assert first.targets.tolist() == [[1, 2, -1, -1], [1, 2, 3, 4]]
    assert first.starts is None and first.x.dtype == first.targets.dtype == np.int32
    assert documents_batch(texts, pad_to=6).x.shape == (3, 6)


@pytest.mark.parametrize(
    ("texts", "pad_to"), [([], None), ([[1, 2], [1]], None), ([[1, 2, 3, 4]], 2)]
)
def test_documents_that_make_no_row_are_refused(texts, pad_to):
    with pytest.raises(ValueError, match="documents must have 2"):
        documents_batch(texts, pad_to=pad_to)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c009_the_shift_is_made_once_and_the_denominator_counts_what_is_summed(layout):
    """C009: 5 tokens have 4 targets; documents of 3 and 2 tokens have 2 + 1, not 5 and not 2."""
    for tokens, want in (([[1, 2, 3, 4, 5]], 4), ([[1, 2, 3], [4, 5]], 3)):
        data = make_data(tokens, window=5, layout=layout)
        batch = all_rows(data)
        logits = np.random.default_rng(0).normal(size=(*batch.x.shape, 266))
        nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
            logits, np.maximum(batch.targets, 0)[..., None], -1
        ).squeeze(-1)
        terms = np.where(batch.targets == IGNORED, 0.0, nats)
        assert np.count_nonzero(terms) == want
        assert batch.num_targets == data.count_targets("train", np.arange(data.num_train)) == want


# --- every target once -----------------------------------------------------------------------


@st.composite
def corpora(draw):
    """Return documents whose ids are their places in the stream, so that each is unique."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    bounds = list(itertools.accumulate(lengths, initial=0))
    return [np.arange(lo, hi) for lo, hi in itertools.pairwise(bounds)]


@pytest.mark.parametrize("layout", LAYOUTS)
@QUICK
@given(documents=corpora(), window=st.integers(1, 12), data=st.data())
def test_every_target_of_every_document_appears_exactly_once(layout, documents, window, data):
    pairs = [pair for document in documents for pair in itertools.pairwise(document.tolist())]
    if not pairs:
        return
    rows = make_data(documents, documents, window=window, layout=layout, vocab_size=500)
    batch = all_rows(rows)
    valid = batch.targets != IGNORED
    found = list(zip(batch.x[valid].tolist(), batch.targets[valid].tolist(), strict=True))
    # Ids are unique: equal pairs mean that no target crosses a border, is missing or comes twice.
    assert sorted(found) == pairs
    owner = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    for row in range(rows.num_train):
        for column in np.flatnonzero(batch.x[row] != PAD):
            start = 0 if batch.starts is None else int(batch.starts[row, column])
            seen = batch.x[row, start : column + 1]
            last = int(batch.x[row, column])
            # What a position sees is its own document, without a gap, up to itself.
            assert seen.tolist() == list(range(last - len(seen) + 1, last + 1))
            assert set(owner[seen].tolist()) == {owner[last]}
            # And all of it that the row holds.
            assert start == 0 or owner[batch.x[row, start - 1]] != owner[last]
    filled = batch.x == PAD
    assert np.all(batch.targets[filled] == IGNORED)
    if layout == "packed":
        assert np.all(batch.starts[filled] == 0)
        # All tokens but those of rows that would predict nothing.
        pieces = [range(lo, lo + window) for lo in range(0, len(owner), window)]
        targets = {token for token, _ in pairs}
        kept = [token for piece in pieces for token in piece if targets.intersection(piece)]
        assert batch.x[~filled].tolist() == [token for token in kept if token < len(owner)]
    assert np.all(valid.any(axis=1))
    # Any rows in any order, counted without being computed.
    indices = np.array(
        data.draw(st.lists(st.integers(0, rows.num_train - 1), max_size=6)), np.int64
    )
    some = rows.heldout_batch(indices)
    for part, whole in zip(some, batch, strict=True):
        assert (part is None) == (whole is None)
        assert part is None or np.array_equal(part, whole[indices])
    assert rows.count_targets("heldout", indices) == some.num_targets
    record = rows.record()
    assert record["num_train_targets"] == len(pairs) == batch.num_targets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_are_new_contiguous_int32(layout):
    data = make_data(THREE, window=3, layout=layout)
    for indices in (np.array([1, 0]), np.array([], np.int64), [], np.array([1], np.uint8)):
        batch = data.train_batch(indices)
        assert len(batch.arrays()) == (3 if layout == "packed" else 2)
        for array in batch.arrays():
            assert array.dtype == np.int32 and array.shape == (len(indices), 3)
            assert array.flags.c_contiguous and array.flags.writeable and array.flags.owndata
    before = all_rows(data)
    for array in before.arrays():
        array[:] = 99
    assert all_rows(data).x.max() == 256 or layout == "packed"
    assert 99 not in all_rows(data).x and 99 not in all_rows(data).targets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_out_of_range_are_refused(layout):
    data = make_data([*THREE, [10, 11]], window=4, layout=layout)
    last = data.num_train - 1
    assert last == {"packed": 2, "padded": 3}[layout]
    for call in (data.train_batch, lambda i: data.count_targets("train", i)):
        for bad in ([last + 1], [-1], [0, 1 << 40]):
            with pytest.raises(IndexError, match=rf"train rows must be in 0\.\.{last};"):
                call(np.array(bad))
    with pytest.raises(IndexError, match="heldout rows"):
        data.heldout_batch(np.array([0]))
    assert data.count_targets("heldout", []) == data.count_bytes("heldout", []) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heldout", [(), ([1, 2, 3],)])
def test_bytes_in_memory_are_exact(layout, heldout):
    data = make_data(THREE, heldout, window=4, layout=layout)
    owners = {}
    for array in (a for rows in data._rows.values() for a in vars(rows).values()):
        if isinstance(array, np.ndarray):
            # Views have no memory of their own, but keep that of another.
            while array.base is not None:
                array = array.base
            owners[id(array)] = array
    assert data.nbytes == sum(array.nbytes for array in owners.values())


def test_streams_take_two_bytes_a_token():
    data = SyntheticDocuments(
        num_documents=100, max_len=1000, vocab_size=266, seed=0, window=64, layout="packed"
    )
    assert 2.0 <= data.nbytes / data.record()["num_tokens"] < 2.1
    data = load_documents(kind="stdlib", window=64, layout="packed", max_bytes=100_000)
    assert 2.0 <= data.nbytes / data.record()["num_bytes"] < 2.1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": [[1, 266]]}, "largest id of 266"),
        ({"heldout": [[300]]}, "largest id of 300"),
        ({"train": [[1, 2], []]}, "Leave empty documents out"),
        ({"train": [[1], [2]]}, "must have a target"),
        ({"layout": "loose"}, "packed or padded"),
    ],
)
def test_what_makes_no_rows_is_refused(change, words):
    settings = {"train": [[1, 2]], "heldout": [], "window": 2, "layout": "packed", **change}
    with pytest.raises(ValueError, match=words):
        make_data(settings.pop("train"), settings.pop("heldout"), **settings)


def test_a_small_vocabulary_is_filled_up_with_its_last_id():
    data = make_data([[0, 4]], window=3, layout="padded", vocab_size=5)
    assert all_rows(data).x.tolist() == [[0, 4, 4]]
    assert all_rows(data).targets.tolist() == [[4, -1, -1]]
    assert not data.has_bytes and data.count_bytes("train", [0]) == 0
    assert "unigram_bits_per_byte" not in data.baselines()


# --- baselines -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_baselines_by_hand(layout):
    # Train <a a b>: targets a, b, EOS twice over two documents; held out <a>: targets a, EOS.
    train = [[BOS, 97, EOS], [BOS, 98, EOS]]
    data = make_data(train, [[BOS, 97, EOS]], window=2, layout=layout)
    baselines = data.baselines()
    assert baselines["split"] == "heldout"
    assert math.isclose(baselines["unigram_entropy_nats"], math.log(2), rel_tol=1e-14)
    # Counts plus one of 266 ids: a (1 + 1) / (4 + 266), EOS (2 + 1) / (4 + 266).
    nats = -math.log(2 / 270) - math.log(3 / 270)
    assert math.isclose(baselines["unigram_cross_entropy_nats"], nats / 2, rel_tol=1e-14)
    # Both targets are paid for, one of them is a byte.
    assert math.isclose(baselines["unigram_bits_per_byte"], nats / math.log(2), rel_tol=1e-14)
    # a after BOS (1 + 1) / (2 + 266), EOS after a (1 + 1) / (1 + 266).
    nats = -math.log(2 / 268) - math.log(2 / 267)
    assert math.isclose(baselines["bigram_cross_entropy_nats"], nats / 2, rel_tol=1e-14)
    assert math.isclose(baselines["bigram_bits_per_byte"], nats / math.log(2), rel_tol=1e-14)
    assert data.primary_baseline in baselines


@pytest.mark.parametrize("layout", LAYOUTS)
def test_baselines_are_measured_on_what_an_evaluation_predicts(layout, monkeypatch):
    data = SyntheticDocuments(
        num_documents=60, max_len=40, vocab_size=266, seed=3, window=7, layout=layout
    )
    whole = data.baselines()
    batch, train = all_rows(data, "heldout"), all_rows(data)
    valid, train_valid = batch.targets != IGNORED, train.targets != IGNORED
    counts = np.bincount(train.targets[train_valid], minlength=266) + 1
    nats = -np.log(counts / counts.sum())[batch.targets[valid]]
    assert math.isclose(whole["unigram_cross_entropy_nats"], nats.mean(), rel_tol=1e-12)
    bits = nats.sum() / math.log(2) / batch.num_bytes
    assert math.isclose(whole["unigram_bits_per_byte"], bits, rel_tol=1e-12)
    pairs = np.ones((266, 266))
    np.add.at(pairs, (train.x[train_valid], train.targets[train_valid]), 1)
    shares = pairs / pairs.sum(axis=1, keepdims=True)
    nats = -np.log(shares[batch.x[valid], batch.targets[valid]])
    assert math.isclose(whole["bigram_cross_entropy_nats"], nats.mean(), rel_tol=1e-12)
    # However the stream is cut for counting.
    monkeypatch.setattr(documents_module, "_COUNT_PIECE", 11)
    assert data.baselines() == whole
    assert data.count_bytes("heldout", np.arange(data.num_heldout)) == batch.num_bytes


def test_baselines_without_heldout_are_measured_on_train():
    data = make_data([[BOS, 97, 97, EOS]], window=3, layout="packed")
    assert data.baselines()["split"] == "train"
    want = -(math.log(1 / 3) + 2 * math.log(2 / 3)) / 3
    assert math.isclose(data.baselines()["unigram_entropy_nats"], want, rel_tol=1e-14)


def test_a_large_vocabulary_has_no_bigrams():
    baselines = make_data([[1, 40_000]], window=2, layout="packed", vocab_size=50_257).baselines()
    assert set(baselines) == {"unigram_entropy_nats", "unigram_cross_entropy_nats", "split"}


# --- files -----------------------------------------------------------------------------------


def load(path, **settings):
    return load_documents(kind="text", path=path, **{"window": 8, "layout": "padded", **settings})


def paragraphs(count):
    return [b"word%d of%d\n" % (number, number) * (1 + number % 3) for number in range(count)]


def test_blank_lines_end_documents():
    assert split_documents(b"a\nb\n\nc\n \t\n\n  d\r\n\r\ne") == [
        b"a\nb\n", b"c\n", b"  d\r\n", b"e",
    ]  # fmt: skip
    assert split_documents(b"\n\n a\n\n") == [b" a\n"]
    assert split_documents(b"one\ntwo\n") == [b"one\ntwo\n"]
    assert split_documents(b"") == split_documents(b"\n \n\t") == []
    # Without an end: not even a line.
    assert split_documents(b"a\n\n  ") == [b"a\n"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_20th_document_of_a_file_is_held_out(tmp_path, layout):
    texts = paragraphs(45)
    (tmp_path / "t.txt").write_bytes(b"\n".join(texts))
    data = load(tmp_path / "t.txt", layout=layout)
    record = data.record()
    assert record["num_documents"] == 45
    assert (record["num_train_documents"], record["num_heldout_documents"]) == (43, 2)
    assert record["heldout_rule"] == HELDOUT_RULE
    assert record["sha256"] == hashlib.sha256((tmp_path / "t.txt").read_bytes()).hexdigest()
    assert record["num_bytes"] == sum(map(len, texts))
    assert decode(all_rows(data, "heldout").x.reshape(-1)) == texts[19] + texts[39]
    # The last token of a padded document is no input, but it is EOS and no byte.
    assert decode(all_rows(data).x.reshape(-1)) == b"".join(
        text for number, text in enumerate(texts) if number not in (19, 39)
    )
    json.dumps(record)
    assert record == load(tmp_path / "t.txt", layout=layout).record()


@pytest.mark.parametrize("count", [1, 19])
def test_fewer_than_20_documents_have_no_heldout_split(tmp_path, count):
    """P7."""
    (tmp_path / "t.txt").write_bytes(b"\n".join(paragraphs(count)))
    data = load(tmp_path / "t.txt")
    assert data.num_heldout == 0 and data.record()["num_train_documents"] == count
    assert data.record()["heldout_rule"] == "none (fewer than 20 documents)"
    assert data.heldout_batch([]).x.shape == (0, 8)
    assert data.baselines()["split"] == "train"


def test_a_file_of_copies_holds_nothing_out_and_says_so(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"the same words\n\n" * 50)
    data = load(tmp_path / "t.txt")
    assert data.num_heldout == 0
    assert data.record()["heldout_rule"].startswith("none (every document offered is a near-copy")


def test_the_shortest_text_has_two_targets(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"a")
    for layout in LAYOUTS:
        batch = all_rows(load(tmp_path / "t.txt", layout=layout))
        assert batch.num_targets == 2 and batch.num_bytes == 1


def test_limits_are_respected(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"abcdefghij")
    assert load(tmp_path / "t.txt", max_bytes=4).record()["num_bytes"] == 4
    np.save(tmp_path / "t.npy", np.arange(10))
    assert load(tmp_path / "t.npy", max_bytes=4).record()["num_tokens"] == 4
    record = load_documents(kind="stdlib", window=64, layout="packed", max_bytes=300_000).record()
    assert 290_000 < record["num_bytes"] <= 300_000 and record["num_heldout"] > 0
    assert record["num_train_tokens"] + record["num_heldout_tokens"] == (
        record["num_bytes"] + 2 * record["num_documents"]
    )


def test_the_library_is_the_same_for_both_layouts():
    both = [
        load_documents(kind="stdlib", window=64, layout=layout, max_bytes=200_000)
        for layout in LAYOUTS
    ]
    for key in ("sha256", "num_train_targets", "num_heldout_targets", "num_documents"):
        assert both[0].record()[key] == both[1].record()[key]
    assert both[0].baselines() == both[1].baselines()
    for data in both:
        for split, count in (("train", data.num_train), ("heldout", data.num_heldout)):
            targets = data.record()[f"num_{split}_targets"]
            assert data.count_targets(split, np.arange(count)) == targets
            # Of a document's targets all but EOS are bytes.
            assert data.count_bytes(split, np.arange(count)) == (
                targets - data.record()[f"num_{split}_documents"]
            )


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.dtype(">u2"), np.uint64])
def test_token_files_of_any_integer_dtype(tmp_path, dtype):
    np.save(tmp_path / "t.npy", np.array([3, 1, 255], dtype=dtype))
    data = load(tmp_path / "t.npy", window=2)
    assert all_rows(data).x.tolist() == [[3, 1]]
    assert all_rows(data).targets.tolist() == [[1, 255]]
    # The same ids are the same data, whatever dtype they were saved in.
    want = hashlib.sha256(np.array([3, 1, 255], "<u2").tobytes()).hexdigest()
    assert data.record()["sha256"] == want


def test_token_files_with_documents(tmp_path):
    """Ids of the byte tokenizer: EOS ends a document."""
    texts = [np.concatenate([[BOS], list(text), [EOS]]) for text in paragraphs(40)]
    np.save(tmp_path / "t.npy", np.concatenate(texts))
    (tmp_path / "t.txt").write_bytes(b"\n".join(paragraphs(40)))
    tokens, text = load(tmp_path / "t.npy"), load(tmp_path / "t.txt")
    for split in ("train", "heldout"):
        for one, other in zip(all_rows(tokens, split), all_rows(text, split), strict=True):
            assert np.array_equal(one, other) or one is other is None
    assert tokens.num_heldout > 0


def test_token_files_of_another_vocabulary_are_one_document(tmp_path):
    ids = np.arange(1000) * 50
    np.save(tmp_path / "t.npy", ids)
    data = load(tmp_path / "t.npy", window=999, vocab_size=50_257)
    assert all_rows(data).targets.tolist() == [ids[1:].tolist()]
    assert data.num_heldout == 0 and data.record()["num_documents"] == 1
    np.save(tmp_path / "t.npy", np.array([0, 4, 2]))
    assert all_rows(load(tmp_path / "t.npy", vocab_size=5)).num_targets == 2


@pytest.mark.parametrize(
    ("array", "vocab_size", "words"),
    [
        ([1, 266], 0, "model.vocab_size must be larger than every token id; got 266 with id 266"),
        ([1, 50_256], 300, "Set model.vocab_size = 50257 or more"),
        ([-100, 2], 0, "data.path must hold token ids from 0 on; got -100"),
        ([1, 256, 256], 0, r"data.path must hold no padding \(id 256\); got 2"),
        ([7], 0, "data.path must leave at least 2 tokens"),
        ([], 0, "data.path must leave at least 2 tokens"),
        ([258, 258, 258], 0, "a document of two tokens or more"),
        ([1.0, 2.0], 0, "integer tokens"),
        ([[1, 2]], 0, "one dim"),
        ([True, False], 0, "integer tokens"),
    ],
)
def test_token_files_that_fit_no_model_are_refused(tmp_path, array, vocab_size, words):
    array = np.array(array) if array else np.array(array, np.int64)
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path / "t.npy", vocab_size=vocab_size)


def test_object_arrays_are_refused_unread(tmp_path):
    np.save(tmp_path / "t.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="data.path must hold one dim of integer tokens"):
        load(tmp_path / "t.npy")


def test_texts_that_fit_no_model_are_refused(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"data.path .* got an empty file \(0 bytes\)"):
        load(tmp_path / "t.txt")
    (tmp_path / "t.txt").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="model.vocab_size must be at least 266 for text"):
        load(tmp_path / "t.txt", vocab_size=256)
    with pytest.raises(ConfigError, match="data.path must name a readable file"):
        load(tmp_path / "missing.txt")
    with pytest.raises(ConfigError, match="data.path must be set"):
        load(None)
    with pytest.raises(ConfigError, match="data.max_bytes must leave at least 1 bytes"):
        load_documents(kind="stdlib", window=8, layout="packed", max_bytes=1)
    (tmp_path / "t.txt").write_bytes(b"\n \n\n")
    with pytest.raises(ConfigError, match="data.path must hold text; got blank lines only"):
        load(tmp_path / "t.txt")


# --- synthetic documents ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_synthetic_documents(layout):
    def make(num_documents=60, seed=0, vocab_size=17):
        return SyntheticDocuments(
            num_documents=num_documents, max_len=12, vocab_size=vocab_size, seed=seed, window=8,
            layout=layout,
        )  # fmt: skip

    data = make()
    assert data.record() == make().record()
    assert data.record()["sha256"] != make(seed=1).record()["sha256"]
    assert data.record()["num_heldout_documents"] == 3 and make(19).num_heldout == 0
    assert 0 <= all_rows(data).x.min() and all_rows(data).x.max() <= 16
    lengths = np.diff(data._rows["train"].offsets)
    assert lengths.min() >= 2 and lengths.max() <= 12 and len(set(lengths.tolist())) > 5
    baselines = make(2000).baselines()
    assert baselines["bigram_cross_entropy_nats"] < baselines["unigram_cross_entropy_nats"]
    json.dumps(data.record())
