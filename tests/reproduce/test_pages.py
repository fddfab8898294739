"""Pages: every cell is compared, `ours` never reads an oracle, and 0 are wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mpisim.errors import ConfigError
from mpisim.reproduce import PAGES, reproduce
from mpisim.reproduce.rows import COUNTED, read_oracle

FIELDS = ["page", "item", "published", "ours", "difference", "provenance", "ok"]


@pytest.fixture(scope="module")
def everything():
    return reproduce("all")


def test_no_cell_is_wrong_and_what_cannot_be_recovered_is_named(everything):
    rows = everything.rows
    assert everything.num_wrong == 0
    assert [row for row in rows if row["ok"] is False] == []
    known = [row["item"] for row in rows if row["provenance"] == "known_irreproducible"]
    assert known == [
        "table 5, 22B, MFU", "table 5, 22B, HFU", "Calculon's largest error, seconds",
        "README, ZBV, bubble",
    ]  # fmt: skip
    for item in known:
        assert f"known_irreproducible: {item}:" in everything.text


def test_counts_by_page(everything):
    counted = Counter(row["page"] for row in everything.rows if row["provenance"] in COUNTED)
    assert counted == {
        "zero-table1": 54 + 4 + 4 + 4, "zero-table2": 20, "korthikanti": 6 + 3 + 3 + 2 + 6 + 1,
        "playbook": 5 + 20 + 10 + 10 + 12, "busbw": 24 + 2 + 18, "bubbles": 24 + 3 + 17,
    }  # fmt: skip
    derived = Counter(row["page"] for row in everything.rows if row["provenance"] == "derived")
    assert derived == {"korthikanti": 12 + 16, "estimators": 16 + 2 + 3, "busbw": 17, "bubbles": 9}
    assert (
        "total:       252 ok, 0 wrong, 4 irreproducible; 75 derived (0 wrong), 16 gaps (0 open)"
        in (everything.text)
    )


def test_rows_are_plain_json_with_exactly_these_fields(everything):
    for row in json.loads(json.dumps(everything.rows, allow_nan=False)):
        assert list(row) == FIELDS
        assert row["page"] in PAGES
        assert row["ok"] in (True, False, None)
        for name in ("published", "ours", "difference"):
            assert row[name] is None or type(row[name]) in (int, float)
        if row["published"] is not None and row["ours"] is not None:
            scale = max(1, abs(row["ours"]))
            assert abs(row["ours"] - row["published"] - row["difference"]) <= 1e-9 * scale
        if row["provenance"] in (*COUNTED, "derived"):
            assert row["ok"] is not None and row["ours"] is not None
        elif row["provenance"] != "named bytes":
            assert row["ok"] is None


def test_no_two_rows_of_a_page_have_one_name(everything):
    names = Counter(
        (row["page"], row["item"]) for row in everything.rows if row["provenance"] != "named bytes"
    )
    assert max(names.values()) == 1


@pytest.mark.parametrize("page", PAGES)
def test_ours_never_reads_an_oracle(page, wrong):
    """With every published cell another one, ours stays, and every compared cell turns wrong."""
    right, damaged = reproduce(page), reproduce(page, wrong)
    assert len(right.rows) == len(damaged.rows)
    for a, b in zip(right.rows, damaged.rows, strict=True):
        assert (a["item"], a["provenance"]) == (b["item"], b["provenance"])
        if a["provenance"] in (*COUNTED, "derived", "known_irreproducible", "measured"):
            assert a["published"] != b["published"], a["item"]
        # Ours beside Calculon is our own error against the published cells: it has to move.
        if not a["item"].startswith("Calculon's ") or a["provenance"] != "context":
            assert a["ours"] == b["ours"], a["item"]
        if a["provenance"] in (*COUNTED, "derived"):
            assert (a["ok"], b["ok"]) == (True, False), a["item"]
    assert damaged.num_wrong == sum(
        row["provenance"] in (*COUNTED, "derived") for row in damaged.rows
    )
    assert "WRONG" not in right.text
    assert ("WRONG" in damaged.text) == (damaged.num_wrong > 0)


@pytest.mark.parametrize("column", ["zero1", "zero3"])
def test_one_digit_too_many_is_one_wrong_cell(column):
    def read(name):
        oracle = read_oracle(name)
        table = oracle["table"]
        row = next(row for row in table["rows"] if row["dp"] == 64)
        cells = row["7.5B"]
        index = table["columns"].index(column)
        cells[index] = {"zero1": "31.5", "zero3": "1.89"}[column]
        return oracle

    result = reproduce("zero-table1", read)
    assert result.num_wrong == 1
    (row,) = [row for row in result.rows if row["ok"] is False]
    assert row["item"] == f"7.5B on 64, zero {column[-1]}"
    assert "65 ok, 1 wrong" in result.text


CELLS = {
    "zero_table1": lambda o: 9 * len(o["table"]["rows"]) + 4 + 4 + 4,
    "zero_table2": lambda o: 4 * len(o["rows"]),
    "playbook": lambda o: len(o["params_fp32"]) + sum(
        len(cells) for mode in ("none", "selective", "full") for cells in o[mode].values()
    ) + sum(len(bars) for zero, bars in o["zero_8B_dp8"].items() if zero != "order"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("oracle", "page"),
    [("zero_table1", "zero-table1"), ("zero_table2", "zero-table2"), ("playbook", "playbook")],
)
def test_every_printed_cell_has_a_row(oracle, page):
    rows = [row for row in reproduce(page).rows if row["provenance"] in COUNTED]
    assert len(rows) == CELLS[oracle](read_oracle(oracle))


@pytest.mark.parametrize(
    ("name", "section", "page", "provenances"),
    [
        ("korthikanti", "figure1", "korthikanti", {"derived"}),
        ("korthikanti", "figure7", "korthikanti", {"derived"}),
        ("korthikanti", "table5", "korthikanti", {"printed", "known_irreproducible"}),
        ("schedules", "readme", "bubbles", {"printed", "known_irreproducible"}),
        ("collectives", "cost", "busbw", {"printed formula"}),
    ],
)
def test_every_cell_of_a_section_has_a_row(name, section, page, provenances):
    cells = {
        key: value for key, value in read_oracle(name)[section].items()
        if key not in ("provenance", "unit", "note", "columns")
    }  # fmt: skip
    count = sum(len(value) for value in cells.values())
    prefix = {"figure1": "figure 1", "figure7": "figure 7", "table5": "table 5",
              "readme": "README", "cost": "cost"}[section]  # fmt: skip
    rows = [row for row in reproduce(page).rows if row["item"].startswith(f"{prefix},")]
    assert len(rows) == count
    assert {row["provenance"] for row in rows} == provenances


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_its_source_its_unit_and_its_rule(page):
    text = reproduce(page).text
    assert "Source" in text and "Rule: " in text
    assert f"{page}: " in text.splitlines()[-1]
    lines = text.splitlines()
    head = lines[: lines.index("")]
    assert max(map(len, lines)) <= 100
    if page in ("zero-table1", "zero-table2", "estimators"):
        assert "GB" in " ".join(head)
    if page in ("korthikanti", "playbook"):
        assert "GiB" in " ".join(head)
    assert "flaw: " in text


def test_named_bytes_close_every_gap_to_the_byte():
    rows = reproduce("estimators").rows
    gaps = 0
    for number, row in enumerate(rows):
        if not row["item"].startswith("gap of "):
            continue
        gaps += 1
        parts = []
        for part in rows[number + 1 :]:
            if not part["item"].startswith("  it "):
                break
            assert part["provenance"] == "named bytes" and part["difference"]
            assert ("forgets" in part["item"]) == (part["difference"] > 0)
            parts.append(round(part["difference"] * 10**9))
        assert sum(parts) == round(row["difference"] * 10**9), row["item"]
        assert row["ok"] is True
    assert gaps == 16
    by_name = {row["item"]: row for row in rows}
    assert by_name["gap of playbook, zero 1"]["difference"] == 15.46875
    assert by_name["gap of Megatron, zero 1"]["difference"] == 0


def test_a_part_that_is_left_out_leaves_a_gap_open(monkeypatch):
    from mpisim.reproduce import estimators

    real = estimators.gaps

    def forgetful(estimate, ours):
        named = real(estimate, ours)
        named.pop("master", None)
        return named

    monkeypatch.setattr(estimators, "gaps", forgetful)
    result = reproduce("estimators")
    wrong = {row["item"] for row in result.rows if row["ok"] is False}
    assert wrong == {f"gap of playbook, zero {zero}" for zero in (1, 2, 3)}


@pytest.mark.parametrize(
    ("name", "near"),
    [("zero-tabel1", "zero-table1"), ("Korthikanti", "korthikanti"), ("bubble", "bubbles"),
     ("", "all"), ("al", "all")],
)  # fmt: skip
def test_a_bad_name_is_one_sentence_with_the_nearest(name, near):
    with pytest.raises(ConfigError) as error:
        reproduce(name)
    assert f"got {name!r}" in str(error.value)
    if name:
        assert str(error.value).endswith(f"Did you mean {near}?")


def test_bandwidth_is_named_and_one_rank_divides_by_nothing():
    """C142: 1 GB all-reduce in 0.01 s on 4 ranks; all-gather of 1 GB in all; n = 1."""
    ours = {row["item"]: row["ours"] for row in reproduce("busbw").rows}
    assert ours["1 GB in 0.01 s, all_reduce, algbw, GB/s"] == 100
    assert ours["1 GB in 0.01 s, all_reduce, busbw, GB/s"] == 150
    assert ours["1 GB in 0.01 s, all_gather, busbw, GB/s"] == 75
    assert ours["1 GB in 0.01 s, one rank, busbw, GB/s"] == 0
    assert [ours[f"ring all_reduce of 10 float64, bytes of rank {r}"] for r in range(4)] == [
        112, 120, 128, 120,
    ]  # fmt: skip


def test_the_committed_pages_are_those_of_today(everything):
    folder = Path(__file__).parents[2] / "experiments" / "reproduce"
    assert json.loads((folder / "rows.json").read_text()) == everything.rows
    assert (folder / "pages.txt").read_text() == everything.text


def test_calculons_own_errors_stand_beside_ours():
    rows = {row["item"]: row for row in reproduce("korthikanti").rows}
    for key, average in (("activations", 2.08), ("weights", 8.49)):
        row = rows[f"Calculon's average error, {key}"]
        assert (row["published"], row["ours"]) == (average, 0)
    assert rows["Calculon's average error, figure 7"]["ours"] < 0.02
