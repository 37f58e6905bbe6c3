"""The letter and the colour of each role, the same in a terminal and on the page.

Colours tell families apart at a glance; the letter identifies a role, so nothing depends on seeing colour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NO_ROLE = "·"


@dataclass(frozen=True)
class Mark:
    """How a role is drawn: one character, and a colour for a dark and for a light ground."""

    letter: str
    dark: str
    light: str


_KNOWN = {
    "previous": Mark("P", "#6ea8fe", "#1f66d0"),
    "next": Mark("N", "#4fd1e0", "#0a7f91"),
    "self": Mark("S", "#5eead4", "#0b8272"),
    "first": Mark("F", "#9c9484", "#877e6d"),
    "sink": Mark("K", "#a3a8b8", "#666d80"),
    "special": Mark("X", "#e8c268", "#976800"),
    "punctuation": Mark("U", "#f6a15b", "#b9570a"),
    "bracket": Mark("R", "#e79ab8", "#ac3d6b"),
    "quote": Mark("Q", "#d99ae7", "#8a3fa3"),
    "same token": Mark("T", "#c39bff", "#7440c9"),
    "same word": Mark("W", "#a9b4ff", "#4b57c6"),
    "induction": Mark("I", "#ff7a90", "#cc1f45"),
    "induction (random)": Mark("i", "#ffa8d5", "#c2267f"),
    "local": Mark("L", "#9fdc74", "#3f8420"),
    "broad": Mark("B", "#d6dc8a", "#747a17"),
}
_OFFSETS = ("#9cc2ff", "#3d6fb8")
_SPARE = (("#f2b8a0", "#a4492a"), ("#8fd6b4", "#22794f"), ("#e0b0ff", "#7d2fb5"), ("#ffd479", "#8a6100"))


def marks(roles: Iterable[str]) -> dict[str, Mark]:
    """Give every role a mark, no two with the same letter.

    A role that the table does not know takes the first letter of its name that is free, then any that is.
    """
    roles = list(dict.fromkeys(roles))
    given = {role: mark for role in roles if (mark := _known(role))}
    taken = {mark.letter for mark in given.values()}
    for role in roles:
        if role not in given:
            dark, light = _SPARE[len(given) % len(_SPARE)]
            given[role] = Mark(_free_letter(role, taken), dark, light)
            taken.add(given[role].letter)
    return {role: given[role] for role in roles}


def _known(role: str) -> Mark | None:
    if role.startswith("offset(") and role[7:-1].isdigit() and len(role) == 9:
        return Mark(role[7], *_OFFSETS)
    return _KNOWN.get(role)


def _free_letter(role: str, taken: set[str]) -> str:
    letters = [c for c in role.upper() if c.isalpha() and c.isascii()]
    letters += [c for c in role.lower() if c.isalpha() and c.isascii()]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    return next((c for c in [*letters, *alphabet] if c not in taken), "?")
