"""The worked chapter: lessons that run the library itself and print what their pages show."""

from .lesson import LESSONS, Lesson, Step
from .picture import Picture

__all__ = ["LESSONS", "Lesson", "Picture", "Step"]
