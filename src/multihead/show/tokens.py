"""Tokens as a person can read them: what cannot be seen, or would act on its surroundings, gets a sign."""

from __future__ import annotations

import unicodedata

_SIGNS = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"}
_JOINERS = "\u200c\u200d\ufe0f"  # they hold one written sign together, so they stay


def visible(token: str) -> str:
    """Return a token with control, direction and unpaired surrogate characters replaced by visible signs.

    Nothing that is left can move a terminal's cursor, turn the text around or break a line.
    """
    return "".join(_visible_character(character) for character in token)


def _visible_character(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    category = unicodedata.category(character)
    if category in {"Cc", "Cs", "Zl", "Zp"} or (category == "Cf" and character not in _JOINERS):
        return f"⟨{ord(character):X}⟩"
    return character
