"""When a value agrees with a printed one, exactly; and formulas that are written as text.

No tolerances: a value agrees if rounding it (half up) or cutting it off to the printed digits gives
the printed value. Values are fractions, printed values decimals that remember their digits.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction

RULE = "ours, rounded half up or truncated to the published digits, must be the published value"
EXACT = "ours must equal the published formula exactly"

_SUFFIXES = {"B": 9, "T": 12}


def parse_printed(text: str) -> Decimal:
    """Return a printed number with its digits; a suffix B or T stands for 1e9 or 1e12.

    Examples
    --------
    >>> parse_printed("1.90"), parse_printed("0.5T")
    (Decimal('1.90'), Decimal('5E+11'))
    """
    exponent = _SUFFIXES.get(text[-1:], 0)
    return Decimal(text[:-1] if exponent else text).scaleb(exponent)


def agrees(value: Fraction | int, printed: Decimal) -> bool:
    """Return whether `value`, rounded half up or truncated to the printed digits, is `printed`.

    Examples
    --------
    >>> agrees(Fraction(41875, 10), Decimal("4187")), agrees(Fraction(41875, 10), Decimal("4188"))
    (True, True)
    >>> agrees(Fraction(417, 10), Decimal("41.5")), agrees(512, Decimal("5E+2"))
    (False, True)
    """
    last_digit = Fraction(10) ** printed.as_tuple().exponent
    steps = abs(Fraction(value)) / last_digit
    shown = Fraction(printed) / last_digit
    sign = -1 if value < 0 else 1
    # Floor of a magnitude cuts off; of a magnitude and a half it rounds half up.
    return shown in (sign * (steps // 1), sign * ((steps + Fraction(1, 2)) // 1))


def evaluate(text: str, names: Mapping[str, int | Fraction]) -> Fraction:
    """Return the value of a formula, exactly.

    Knows numbers, `names`, + - * / // ** and parentheses, min, max, and lg (the binary logarithm,
    rounded up). Nothing else is run, whatever the text says.

    Raises
    ------
    ValueError
        The text is no such formula.

    Examples
    --------
    >>> evaluate("2*(n - 1)/n", {"n": 4}), evaluate("lg(p)", {"p": 8})
    (Fraction(3, 2), Fraction(3, 1))
    """
    try:
        return _value(ast.parse(text, mode="eval").body, names)
    except (SyntaxError, TypeError, KeyError) as error:
        raise ValueError(
            f"formula must use + - * / // ** ( ) min max lg and {', '.join(names)}; got {text!r} "
            f"({error}). Write it so."
        ) from None


_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Pow: lambda a, b: a ** int(b),
}
_FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "min": min,
    "max": max,
    "lg": lambda a: Fraction((int(a) - 1).bit_length()),
}


def _value(node: ast.AST, names: Mapping[str, int | Fraction]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.Name):
        return Fraction(names[node.id])
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _FUNCTIONS[node.func.id](*(_value(argument, names) for argument in node.args))
    raise TypeError(type(node).__name__)
