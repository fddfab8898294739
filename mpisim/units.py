"""Numbers with units: bytes and seconds, printed and parsed.

Sizes are binary (1 KiB = 1024 bytes) everywhere; a bare number is bytes.
"""

from __future__ import annotations

import re

_BINARY = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def format_bytes(nbytes: float) -> str:
    """Return bytes with a binary unit and about three digits.

    Examples
    --------
    >>> format_bytes(512), format_bytes(1536), format_bytes(64 << 20)
    ('512 B', '1.50 KiB', '64.0 MiB')
    """
    value = float(nbytes)
    for unit in _BINARY:
        # By the rounded number, which may have a digit more: 9.999 is 10.0, 1023.7 B are 1.00 KiB.
        for digits in (0,) if unit == "B" else (2, 1, 0):
            text = f"{value:.{digits}f}"
            if abs(float(text)) < 10 ** (3 - digits):
                break
        if abs(float(text)) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{text} {unit}"


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as ``64KiB`` or ``4096`` names, rounded down.

    Raises
    ------
    ValueError
        The unit is unknown, or there is no number.

    Examples
    --------
    >>> parse_bytes("64KiB"), parse_bytes("1.5 MiB"), parse_bytes("100")
    (65536, 1572864, 100)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2] or "B" if match else ""
    # In whole numbers: a float is exact only up to 2**53.
    whole, _, decimals = match[1].partition(".") if match else ("", "", "")
    digits = int(whole + decimals or 0)
    scaled = digits * _BINARY.get(unit, 0) // 10 ** len(decimals)
    # Rounded down to nothing it would mean something else: 0 is "no limit" in places.
    if unit not in _BINARY or (digits and not scaled):
        raise ValueError(
            f"size must be a number with a unit of {', '.join(_BINARY)}; got {text!r}. Write it "
            f"like 64MiB."
        )
    return scaled


def format_seconds(seconds: float) -> str:
    """Return seconds with a fitting unit.

    Examples
    --------
    >>> format_seconds(0.0000123), format_seconds(0.0123), format_seconds(1.5)
    ('12.3 us', '12.3 ms', '1.5 s')
    """
    for factor, unit in ((1e6, "us"), (1e3, "ms"), (1.0, "s")):
        text = f"{seconds * factor:.3g}"
        if abs(float(text)) < 1000:
            return f"{text} {unit}"
    return f"{seconds:.0f} s"
