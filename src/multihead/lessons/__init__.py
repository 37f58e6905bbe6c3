"""The worked chapter: lessons that run the library itself and print what their pages show."""

from .lesson import LESSONS, Cell, Lesson, Step
from .picture import Picture

__all__ = ["LESSONS", "Cell", "Lesson", "Picture", "Step"]
