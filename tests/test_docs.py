"""The documentation says what the code does, and the house is built as the documentation says."""

import ast
import contextlib
import doctest
import inspect
import io
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

import multihead as mh
from multihead.core import native
from multihead.core.statistics import TABLE

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "multihead"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# From top to bottom; an import may only point down, or stay in its wing.
HOUSE = ("cli", "lessons", "heads", "nn", "bench", "show", "accounting", "core")
DOOR = {"cli", "__main__", "interrupt"}  # modules beside the wings that belong to the door


def imports_of(path, source):
    """The parts of multihead ("core", "heads", ...) that a module imports, "" for the package itself."""
    package = ("multihead", *path.relative_to(SOURCE).with_suffix("").parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) + 1 - node.level]) if node.level else []
            base += (node.module or "").split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names] if base == ["multihead"] else [base]
        found |= {"".join(name[1:2]) for name in names if name[0] == "multihead"}
    return found


def wing(name):
    return "cli" if name in DOOR else name


def upward(path, source):
    """The imports of a module that point up the house."""
    own = wing(path.relative_to(SOURCE).with_suffix("").parts[0])
    # The code of a lesson is a reader's own, who has the package by its public face.
    names = imports_of(path, source) - ({""} if own == "lessons" else set())
    return {name for name in names if wing(name) not in HOUSE or HOUSE.index(wing(name)) < HOUSE.index(own)}


def test_imports_only_point_down():
    modules = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    assert len(modules) > 30
    wrong = {str(path): upward(path, path.read_text(encoding="utf-8")) for path in modules}
    assert not any(wrong.values()), {path: names for path, names in wrong.items() if names}


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("core/axes.py", "from multihead.heads import roles"),
        ("core/axes.py", "from ..heads.roles import ROLES"),
        ("core/axes.py", "from .. import show"),
        ("show/text.py", "def f():\n    import multihead.heads.report"),
        ("heads/watch.py", "from multihead import look"),
        ("heads/watch.py", "import multihead as mh"),
        ("heads/watch.py", "from ..cli import main"),
        ("lessons/split.py", "from multihead.cli import main"),
    ],
)
def test_an_import_that_points_up_would_be_found(path, line):
    assert upward(SOURCE / path, line)


def test_the_kernels_know_no_python():
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "csrc").glob("*.[ch]*")}
    python = {name for name, text in sources.items() if re.search(r"#include <(Python|torch|ATen|nanobind)", text)}
    assert python == {"bindings.cpp"}


def blocks_by_section(text):
    """Each section's code: a list of (python, the text block that follows it or None)."""
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        pattern = r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?"
        blocks = [match.groups() for match in re.finditer(pattern, section, re.DOTALL)]
        if blocks:
            found[section.partition("\n")[0]] = blocks
    return found


NUMBER = re.compile(r"(?<![A-Za-z\d.])-?\d[\d,]*(?:\.\d*)?(?:e[+-]?\d+)?(?![A-Za-z\d])")


def same_output(got, expected):
    """Whether two texts agree, spaces and the last digits of broken numbers aside."""

    def parts(text):
        numbers = [number.rstrip(",").replace(",", "") for number in NUMBER.findall(text)]
        return re.sub(r"\s+", " ", NUMBER.sub("#", text)).strip(), numbers

    (got_words, got_numbers), (words, numbers) = parts(got), parts(expected)
    return got_words == words and all(
        a == b or ("." in a + b and abs(float(a) - float(b)) < 0.015) for a, b in zip(got_numbers, numbers, strict=True)
    )


RECIPES = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def run(blocks, names, page):
    """Run a section's code and hold what it prints against the text behind it."""
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert expected is None or same_output(printed.getvalue(), expected), printed.getvalue()


@pytest.mark.parametrize("section", blocks_by_section(README))
def test_the_code_of_the_readme_prints_what_the_readme_says(section, request):
    blocks = blocks_by_section(README)[section]
    if any('"smollm2"' in code for code, _ in blocks):
        request.getfixturevalue("smollm2")  # skips where it is not installed
        pytest.importorskip("pandas")
    if any("path: native" in (expected or "") for _, expected in blocks) and native.core is None:
        pytest.skip("the compiled core is not built")
    run(blocks, {}, f"README.md: {section}")


def test_the_recipes_print_what_they_say():
    names = {}
    sections = blocks_by_section(RECIPES)
    assert len(sections) == RECIPES.count("\n## ")
    for section, blocks in sections.items():
        run(blocks, names, f"recipes.md: {section}")


def test_other_output_would_be_found():
    assert same_output("a 1.234 (5,)\n", "a  1.23 (5,)")
    assert not same_output("a 1.25", "a 1.23")
    assert not same_output("(6,)", "(5,)")
    assert not same_output("b 1", "a 1")


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def statistics_table():
    return markdown(
        ["statistic", "layout", "what it is"],
        [[f"`{row.name}`", f"({', '.join(row.axes)})", row.meaning] for row in TABLE.values()],
    )


def roles_table():
    from multihead.heads.roles import ROLES, mark_of

    rows = []
    offsets = [name for name in ROLES if name.startswith("offset(")]
    for name, role in ROLES.items():
        title, letter, meaning = f"`{name}`", mark_of(name).letter, role.meaning
        if name in offsets:
            if name != offsets[0]:
                continue
            title, letter = f"`{offsets[0]}` to `{offsets[-1]}`", f"{letter} to {mark_of(offsets[-1]).letter}"
            meaning = re.sub(r"\d+", "k", meaning)
        rows.append([letter, title, meaning, f"{role.min_score:g}, {role.min_lift:g}", role.source])
    return markdown(["letter", "role", "a head that has it", "score, lift", "source"], rows)


def test_the_table_of_statistics_is_that_of_the_code():
    assert statistics_table() in README, f"README.md should have\n{statistics_table()}"


def test_the_table_of_roles_is_that_of_the_code():
    assert roles_table() in README, f"README.md should have\n{roles_table()}"


def test_the_options_of_the_readme_are_those_of_the_command():
    pytest.importorskip("typer")
    from multihead.cli import look_command

    there = {f"--{name.replace('_', '-')}" for name in inspect.signature(look_command).parameters}
    used = set(re.findall(r"(?<=\s)--[a-z-]+", "\n".join(re.findall(r"multihead look .*", README))))
    assert used and used == there - {"--model", "--source"}


def test_the_fields_of_the_files_are_those_that_are_written():
    pytest.importorskip("pandas")
    from multihead.heads import export

    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8").partition("## JSON of a benchmark")[0]
    written = re.search(r"content = (\{.*?\n    \})\n", inspect.getsource(export.json_text), re.DOTALL)
    keys = [key.value for key in ast.parse(written[1], mode="eval").body.keys]
    fields = [
        name for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]
    assert fields == keys
    assert f"now {export.SCHEMA}." in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith("#"):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_tests_that_the_design_names_exist():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 20
    assert named <= defined, named - defined


def test_files_that_the_design_names_exist_and_none_is_missing():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    house = re.search(r"```\nsrc/multihead/\n(.*?)```", page, re.DOTALL)[1]
    named, folder = set(), ""
    for line in house.splitlines():
        if found := re.match(r"( *)([\w./]+)", line):
            indent, name = len(found[1]), found[2]
            folder = folder if indent > 2 else name if name.endswith("/") else ""
            inner = name if indent > 2 and name.endswith("/") else ""
            named |= {folder * (indent > 2) + inner + file for file in re.findall(r"\b\w+\.py\b", line)}
    there = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name not in ("__init__.py",)}
    assert named == there


@pytest.mark.parametrize("name", ["core.functional", "core.statistics", "core.masking", "core.merge", "core.sdpa"])
def test_examples_in_docstrings(name):
    module = import_module(f"multihead.{name}")
    result = doctest.testmod(module, extraglobs={"mh": mh})
    assert result.attempted and not result.failed


def test_nothing_names_a_place_outside_the_repository():
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")
    # In halves, so that this file does not name them either.
    forbidden = re.compile("|".join(["/wo" + "rk/", r"\.\./sha" + "red", "/tm" + "p/mh"]))
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix != ".png":
            found = forbidden.search(path.read_text(encoding="utf-8"))
            assert not found, f"{name}: {found[0]}"
