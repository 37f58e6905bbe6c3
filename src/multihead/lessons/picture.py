"""A picture that a lesson makes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Picture:
    """An SVG file.

    Args:
        name: of the file, with its suffix.
        alt: what it shows, in words.
        svg: its text.
    """

    name: str
    alt: str
    svg: str = field(repr=False)
