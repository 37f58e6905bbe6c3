"""Makes the pages of the lessons: each lesson is run, and its prose, its code and what it printed are written down.

python docs/lessons/make.py            all of them; needs both models
python docs/lessons/make.py split      one
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from multihead.lessons import LESSONS, Cell, Lesson, Step

HERE = Path(__file__).parent


def page(lesson: Lesson, steps: Iterable[Step]) -> str:
    """The page of a lesson that has run."""
    parts = [
        f"<!-- Made by docs/lessons/make.py from src/multihead/lessons/{lesson.path.name}. -->",
        f"# {lesson.number}. {lesson.title}",
        f"In the terminal: `multihead lesson {lesson.name}`",
        lesson.about,
    ]
    for step in steps:
        parts += opened(step.cell)
        if step.output.strip():
            printed = step.output.strip("\n")
            parts.append(f"```text\n{printed}\n```")
        parts += [f"![{picture.alt}]({picture.name})" for picture in step.pictures]
    return "\n\n".join([*parts, neighbours(lesson)]) + "\n"


def opened(cell: Cell) -> list[str]:
    """The prose and the code of a cell, those that are there."""
    return [part for part in (cell.prose, cell.code and f"```python\n{cell.code}\n```") if part]


def neighbours(lesson: Lesson) -> str:
    """Links to the lessons before and after."""
    order = list(LESSONS.values())
    links = ["[All lessons](README.md)"]
    if lesson.number > 1:
        links.insert(0, _link(order[lesson.number - 2], "Before"))
    if lesson.number < len(order):
        links.append(_link(order[lesson.number], "Next"))
    return " · ".join(links)


def _link(lesson: Lesson, word: str) -> str:
    return f"{word}: [{lesson.title}]({lesson.name}.md)"


def contents() -> str:
    """The page that lists the lessons."""
    rows = [
        f"| {lesson.number} | [{lesson.title}]({lesson.name}.md) | `multihead lesson {lesson.name}` | "
        f"{' '.join(f'`{alias}`' for alias in lesson.needs)} |"
        for lesson in LESSONS.values()
    ]
    return "\n".join(
        [
            "<!-- Made by docs/lessons/make.py. -->",
            "",
            "# Multi-head attention in nine lessons",
            "",
            "Each lesson runs the library itself, on numbers small enough to follow by hand or on a real model. What a "
            "page shows is",
            "what the code above it printed. The same lessons run in a terminal:",
            "",
            "    multihead lesson             # lists them",
            "    multihead lesson split       # runs one; --code shows the code too",
            "    multihead lesson --all",
            "",
            "The code of a page runs from top to bottom in one session. The last column has the models that a lesson "
            "opens;",
            "`make setup` installs both.",
            "",
            "| | lesson | command | models |",
            "|---|---|---|---|",
            *rows,
            "",
            "The lessons are scripts in the percent format, `src/multihead/lessons/*.py`: notebooks open them as they "
            "are.",
            "",
        ]
    )


def write(lesson: Lesson) -> None:
    """Run a lesson, and write its page and its pictures."""
    steps = list(lesson.run())
    (HERE / f"{lesson.name}.md").write_text(page(lesson, steps), encoding="utf-8")
    for picture in (picture for step in steps for picture in step.pictures):
        (HERE / picture.name).write_text(picture.svg, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or LESSONS:
        write(LESSONS[name])
    (HERE / "README.md").write_text(contents(), encoding="utf-8")
