"""A lesson for a terminal: every function returns something that rich can print."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .lesson import Cell, Lesson

WIDTH = 80
_INDENT = 2
_NUMBER = r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)"


def contents(lessons: Iterable[Lesson], missing: dict[str, str]) -> RenderableType:
    """The lessons in a table, and how to run one.

    Args:
        lessons: in order.
        missing: aliases of models that are not there, and the commands that install them.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("", "lesson", "about"):
        table.add_column(name)
    for lesson in lessons:
        needs = [missing[alias] for alias in lesson.needs if alias in missing]
        about = Text(lesson.title)
        for command in needs:
            about.append(f"\nfirst: {command}", "dim")
        table.add_row(str(lesson.number), Text(lesson.name, style="bold"), about)
    return Group(table, Text(), Text("`multihead lesson split` runs the first, --all runs all, --code shows the code."))


def opening(lesson: Lesson) -> RenderableType:
    """The title of a lesson, and what it is about."""
    title = f"{lesson.number}. {lesson.title}"
    return Group(Text(title, style="bold"), Text("═" * len(title), style="bold"), Text(), Markdown(lesson.about))


def prose(cell: Cell) -> RenderableType:
    """The prose of a cell."""
    parts: list[RenderableType] = []
    for part in re.split(r"^(## .*)$", cell.prose, flags=re.MULTILINE):
        if part.startswith("## "):
            parts += [Text(), Text(part[3:], style="bold")]
        elif part.strip():
            parts += [Text(), Markdown(part)]
    return Group(*parts)


def code(cell: Cell) -> RenderableType:
    """The code of a cell."""
    shown = Syntax(cell.code, "python", theme="ansi_dark", background_color="default", word_wrap=True)
    return Padding(shown, (1, 0, 0, 2 * _INDENT), expand=False)


def output(printed: str) -> RenderableType:
    """What a cell printed."""
    text = Text(printed.rstrip("\n"), no_wrap=True, overflow="ignore")
    text.highlight_regex(_NUMBER, "cyan")
    text.highlight_regex("[░▒▓█]+", "bright_blue")
    return Padding(text, (1, 0, 0, _INDENT), expand=False)
