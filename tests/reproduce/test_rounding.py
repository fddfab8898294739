"""When a value agrees with a printed one."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisim.reproduce.rounding import agrees, evaluate, parse_printed


@pytest.mark.parametrize(
    ("value", "printed", "expected"),
    [
        ("4187.5", "4187", True),
        ("4187.5", "4188", True),
        ("4187.4999", "4188", False),
        ("41.25", "41.3", True),
        ("41.25", "41.2", True),
        ("41.2499999999999999999", "41.3", False),
        ("41.3", "41.3", True),
        ("41.4", "41.3", False),
        ("41.35", "41.3", True),
        ("41.2", "41.3", False),
        ("1.875", "1.88", True),
        ("1.875", "1.9", True),
        ("512e9", "0.5T", True),
        ("600e9", "0.5T", False),
        ("1024e9", "1T", True),
        ("2048e9", "2T", True),
        ("7.64e9", "7.6B", True),
        ("7.70e9", "7.6B", False),
        ("30.567e9", "30.4B", False),
        ("56", "56.0", True),
        ("56.05", "56.0", True),
        ("56.06", "56.0", True),
        ("56.1", "56.0", False),
        ("-0.25", "-0.3", True),
        ("-0.25", "-0.2", True),
        ("-0.25", "0.2", False),
        ("0", "0", True),
    ],
)
def test_a_value_agrees_if_it_rounds_or_truncates_to_the_printed_digits(value, printed, expected):
    assert agrees(Fraction(value), parse_printed(printed)) is expected


@given(
    value=st.fractions(min_value=0, max_value=10**6), digits=st.integers(min_value=0, max_value=6)
)
def test_exactly_two_neighbours_agree_at_most(value, digits):
    step = Fraction(1, 10**digits)
    below = value // step
    agreeing = [
        number
        for number in range(max(0, below - 2), below + 4)
        if agrees(value, Decimal(number).scaleb(-digits))
    ]
    assert below in agreeing
    assert agreeing in ([below], [below, below + 1])
    assert (below + 1 in agreeing) == (value - below * step >= step / 2)


def test_a_third_is_no_sloppy_float():
    third = Fraction(1, 3)
    assert agrees(third, Decimal("0." + "3" * 40))
    assert not agrees(third, Decimal("0." + "3" * 39 + "4"))


def test_formulas_are_exact():
    assert evaluate("s*b*h*(34 + 5*a*s/h)", {"s": 3, "b": 2, "h": 7, "a": 5}) == 42 * (
        34 + Fraction(75, 7)
    )
    assert evaluate("(p + 4)//3", {"p": 8}) == 4
    assert evaluate("min(m, p - stage) + h**2", {"m": 8, "p": 4, "stage": 1, "h": 3}) == 12
    assert [evaluate("lg(p)", {"p": p}) for p in (1, 2, 3, 4, 5, 8)] == [0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    "text", ["p +", "__import__('os')", "p.real", "q", "1.5", "p if p else 1", "min(key=p)", "'a'",
             "True", "[p]", "p & 1"],
)  # fmt: skip
def test_nothing_but_arithmetic_is_evaluated(text):
    with pytest.raises(ValueError, match="formula must use"):
        evaluate(text, {"p": 4})
