"""Sizes as people write them: 128K tokens, 24GB, 3.35TB/s, 989T."""

from __future__ import annotations

import re

from multihead.accounting.fields import ConfigError

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def tokens(text: int | str, name: str = "context") -> int:
    """Return a number of tokens, from 1 up; K is 1,024, as in "128K", and M is K times K."""
    found = re.fullmatch(r"(\d{1,15})([KM]?)", str(text).strip(), re.ASCII | re.IGNORECASE)
    number = int(found[1]) * _BINARY[found[2].upper()] if found else 0
    if isinstance(text, bool) or number < 1:
        raise ConfigError(f"{name}: expected a number of tokens such as 8192 or 128K, got {text!r}")
    return number


def memory(text: int | str, name: str = "memory") -> int:
    """Return bytes; GB is 10^9 and GiB is 2^30."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(I?)B?", str(text).strip(), re.ASCII | re.IGNORECASE)
    if found and (found[2] or not found[3]):
        unit = (_BINARY if found[3] else _DECIMAL)[found[2].upper()]
        size = round(float(found[1]) * unit)
        if size > 0:
            return size
    raise ConfigError(f"{name}: expected a size such as 24GB or 24GiB, got {text!r}")


def rate(text: float | str, name: str) -> float:
    """Return a rate in units of one a second: 989T, 3.35TB/s, 3.35e12."""
    pattern = r"(\d{1,30}(?:\.\d+)?(?:e\d{1,2})?)\s*([KMGTP]?)(?:B|FLOPS?|FLOP)?(?:/s)?"
    found = re.fullmatch(pattern, str(text).strip(), re.ASCII | re.IGNORECASE)
    number = float(found[1]) * _DECIMAL[found[2].upper()] if found else 0.0
    if not number > 0:
        raise ConfigError(f"{name}: expected a rate such as 989T or 3.35TB/s, got {text!r}")
    return number
