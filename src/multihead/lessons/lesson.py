"""A lesson: a script of cells, prose before code, that runs cell by cell.

The scripts are Python files in the percent format that notebooks read: `# %% [markdown]` opens prose, `# %%` code. The
docstring has the title and what the lesson is about.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .picture import Picture

_MARK = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """Prose in Markdown, the code that follows it, and the line of the file where that code begins."""

    prose: str
    code: str
    line: int


@dataclass(frozen=True)
class Step:
    """A cell that has run: what it printed, and the pictures that it made."""

    cell: Cell
    output: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Lesson:
    """One lesson.

    Args:
        number: its place in the chapter, from 1.
        name: what `multihead lesson` knows it by.
        needs: aliases of the models that it opens.
    """

    number: int
    name: str
    needs: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Its script."""
        return Path(__file__).with_name(self.name.replace("-", "_") + ".py")

    @cached_property
    def source(self) -> str:
        """The text of its script."""
        return self.path.read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        """Its title, without a full stop."""
        return self._docstring[0]

    @property
    def about(self) -> str:
        """The paragraphs under its title."""
        return self._docstring[1]

    @cached_property
    def _docstring(self) -> tuple[str, str]:
        title, _, about = (ast.get_docstring(ast.parse(self.source)) or "").partition("\n\n")
        return title.rstrip("."), about

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The cells in order; the last may have prose only."""
        _, *parts = _MARK.split(self.source)
        begins = [self.source.count("\n", 0, mark.end()) for mark in _MARK.finditer(self.source)]
        cells: list[Cell] = []
        prose = ""
        for kind, text, line in zip(parts[::2], parts[1::2], begins):
            if kind:
                prose = re.sub(r"^# ?", "", text, flags=re.MULTILINE).strip()
            else:
                cells.append(Cell(prose, text.strip("\n"), line))
                prose = ""
        return (*cells, Cell(prose, "", 0)) if prose else tuple(cells)

    def run(
        self, names: dict[str, Any] | None = None, *, before: Callable[[Cell], None] = lambda cell: None
    ) -> Iterator[Step]:
        """Run the cells one after another in one namespace.

        Args:
            names: the namespace, to be looked at afterwards; an own one by default.
            before: called with each cell before it runs.

        Raises:
            whatever the code raises: `ModelError` where a model of `needs` is not installed.
        """
        names = {} if names is None else names
        names["__name__"] = f"{__package__}.{self.path.stem}"
        for cell in self.cells:
            before(cell)
            old = dict(names)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                # Empty lines before it keep the line numbers of the file in tracebacks.
                exec(compile("\n" * cell.line + cell.code, str(self.path), "exec"), names)
            made = tuple(v for k, v in names.items() if isinstance(v, Picture) and old.get(k) is not v)
            yield Step(cell, printed.getvalue(), made)


LESSONS = {
    name: Lesson(number, name, needs)
    for number, (name, needs) in enumerate(
        {
            "split": (),
            "heads": (),
            "concat": (),
            "params": (),
            "patterns": (),
            "one-question": (),
            "grouped": ("smollm2",),
            "real": ("smollm2", "minilm"),
            "exercises": (),
        }.items(),
        start=1,
    )
}
