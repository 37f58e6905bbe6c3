"""What goes wrong when a model is opened."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be opened; the message is one line that says why and what to do."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
