"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisim.units import format_bytes, format_seconds, parse_bytes

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1023.7, "1.00 KiB"),  # not 1024 B
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 1024, "100 KiB"),
        (1023 * 1024, "1023 KiB"),
        (1024**2 - 1, "1.00 MiB"),  # not 1024 KiB
        (1024**2, "1.00 MiB"),
        (64 << 20, "64.0 MiB"),
        (9.999 * 2**20, "10.0 MiB"),  # not 10.00 MiB
        (99.96 * 2**20, "100 MiB"),  # not 100.0 MiB
        (1 << 30, "1.00 GiB"),
        (1 << 40, "1.00 TiB"),
        (5000 << 40, "5000 TiB"),
        (-1536, "-1.50 KiB"),
        (-12, "-12 B"),
    ],
)
def test_bytes_are_shown_in_binary_units(nbytes, text):
    assert format_bytes(nbytes) == text


@given(st.floats(-(2.0**60), 2.0**60))
def test_shown_bytes_are_right_to_half_a_percent(nbytes):
    number, unit = format_bytes(nbytes).split(" ")
    assert abs(float(number) * UNITS[unit] - nbytes) <= max(0.5, 0.0051 * abs(nbytes))
    assert unit == "TiB" or abs(float(number)) < 1024
    assert len(number.lstrip("-").replace(".", "")) <= 4 or unit == "TiB"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("100", 100),
        ("100 B", 100),
        ("64KiB", 65536),
        (" 64 KiB ", 65536),
        ("1.5 MiB", 1572864),
        ("0.5KiB", 512),
        ("0.3KiB", 307),  # rounded down
        ("25.6MiB", 26843545),
        ("2GiB", 2 << 30),
        ("1TiB", 1 << 40),
        ("9007199254740993", 2**53 + 1),  # beyond the whole numbers of a float
        ("9007199254740993KiB", (2**53 + 1) * 1024),
        ("8388608.0009765625 GiB", (2**53 + 2**20)),
    ],
)
def test_bytes_are_parsed_exactly_and_rounded_down(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "KiB", "64KB", "64kib", "1e6", "-1", "0.0001KiB", "0.5", "1.", ".5KiB", "nan", "1 2"],
)
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match="size must be a number with a unit of B, KiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 2**60))
def test_any_number_of_bytes_is_parsed_back(nbytes):
    assert parse_bytes(str(nbytes)) == parse_bytes(f"{nbytes} B") == nbytes
    assert parse_bytes(f"{nbytes}KiB") == nbytes * 1024


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (0.0000123, "12.3 us"),
        (0.000999, "999 us"),
        (0.0009996, "1 ms"),  # not 1e+03 us
        (0.001, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),  # not 1e+03 ms
        (1.5, "1.5 s"),
        (59.94, "59.9 s"),
        (999.4, "999 s"),
        (999.7, "1000 s"),  # not 1e+03 s
        (86400, "86400 s"),
        (-0.0123, "-12.3 ms"),
    ],
)
def test_seconds_are_shown_with_a_fitting_unit(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(1e-6, 1e6))
def test_shown_seconds_are_right_to_half_a_percent(seconds):
    number, unit = format_seconds(seconds).split(" ")
    assert "e" not in number
    factor = {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    assert abs(float(number) * factor - seconds) <= 0.0051 * seconds
