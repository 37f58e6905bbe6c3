"""Tokens as a person can read them: what cannot be seen, or would act on its surroundings, gets a sign."""

from __future__ import annotations

import unicodedata

_SIGNS = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
_JOINERS = "\u200c\u200d"  # between two characters they shape one written sign, so there they stay


def visible(token: str) -> str:
    """Return a token with control, direction and unpaired surrogate characters replaced by visible signs.

    So are spaces when there is nothing else. Nothing that is left can move a terminal's cursor, turn the text
    around or break a line.
    """
    if token and not token.strip(" "):
        return "␣" * len(token)
    inside = range(1, len(token) - 1)
    return "".join(c if c in _JOINERS and i in inside else _sign(c) for i, c in enumerate(token))


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    category = unicodedata.category(character)
    if category in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
        return f"⟨{ord(character):X}⟩"
    return character
