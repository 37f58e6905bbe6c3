"""A report for a terminal: every function returns something rich can print.

Nothing depends on colour alone: roles are letters, weights are shades, so without colour no meaning is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text

from .palette import NO_ROLE, Mark, marks
from .shape import Facts, Report
from .tokens import visible

_INK = "#10131c"
_RAMP = ((0x16, 0x1B, 0x33), (0x27, 0x40, 0x78), (0x24, 0x7F, 0xA8), (0x4F, 0xC3, 0xA9), (0xF4, 0xF1, 0xB0))
_SHADES = ((0.75, "█"), (0.5, "▓"), (0.2, "▒"), (0.05, "░"))
_GAP = 4  # between maps
_LABEL = 8  # cells for a token beside or above a map


def summary(report: Report, maps: int = 6) -> RenderableType:
    """Return everything `multihead look` prints about a report, in reading order."""
    sections: list[tuple[str, RenderableType]] = [
        ("What each head does", Group(role_grid(report), Text(), legend(report))),
        ("The clearest heads of each role", clearest_heads(report)),
    ]
    chosen = heads_to_draw(report, maps)
    if chosen:
        sections.append(("Who looks at whom in the sentence", head_maps(report, chosen)))
    if len(report.links):
        sections.append(("Which heads resolve the pronoun", link_table(report)))
    parts = [part for title, body in sections for part in (heading(title), Text(), body, Text())]
    notes = [Text(visible(note), style="yellow") for note in report.notes]
    return Group(model_line(report.model), Text(), *parts, *notes, cost_line(report))


def heading(words: str) -> Text:
    """Return the title of a section."""
    return Text(words, style="bold")


def model_line(facts: Facts) -> Text:
    """Return the model in one line: depth, heads, how keys are shared, width of a head."""
    shared = f"{facts.n_heads} query heads, {facts.n_kv_heads} key/value head{'s' * (facts.n_kv_heads != 1)}"
    heads = f"{facts.n_heads} heads (MHA)" if facts.kind == "MHA" else f"{shared} ({facts.kind})"
    rest = [
        f"{facts.layers} layers",
        heads,
        f"d_head {facts.d_head}",
        "causal" if facts.causal else "bidirectional",
        f"{_count(facts.parameters)} parameters",
        facts.architecture,
    ]
    return Text(visible(facts.name), style="bold").append(" · " + " · ".join(rest), style="not bold")


def cost_line(report: Report) -> Text:
    """Return what the look took: tokens read, time and the process's peak memory."""
    memory = f"peak memory {report.peak_memory / 1e9:.2f} GB"
    return Text(f"{len(report.tokens)} tokens · {report.seconds:.1f} s · {memory}")


def role_marks(report: Report) -> dict[str, Mark]:
    """Return the letter and colour of every role in the report, in the report's order."""
    return marks(report.roles["role"].tolist())


def role_grid(report: Report) -> RoleGrid:
    """Return the grid layers x heads with the letter of each head's main role."""
    named, heads = dict(report.main_role), report.model.n_heads
    return RoleGrid(list(report.layers), heads, named, role_marks(report), _selected(report))


@dataclass(frozen=True)
class RoleGrid:
    """Layers from left to right, heads from top to bottom; too many layers continue in a next band."""

    layers: Sequence[int]
    n_heads: int
    main_role: dict[tuple[int, int], str]
    role_marks: dict[str, Mark]
    selected: set[tuple[int, int]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        margin = len(f"head {self.n_heads}") + 1
        room = max(options.max_width - margin, 2)
        cell = 3 if 3 * len(self.layers) <= room else 2
        bands = max(-(-len(self.layers) // (room // cell)), 1)
        band = max(-(-len(self.layers) // bands), 1)
        for start in range(0, len(self.layers), band):
            yield from self._band(self.layers[start : start + band], cell, margin)

    def _band(self, layers: Sequence[int], cell: int, margin: int) -> Iterator[Text]:
        header = Text(no_wrap=True).append("layer".ljust(margin), "dim")
        for place, layer in enumerate(layers):
            shown = cell > 2 or layer % 5 == 0 or place == 0
            crowded = cell == 2 and place == 0 and layer % 5 == 4 and layer > 9
            name = str(layer) if shown and not crowded else ""
            header.append(name.rjust(cell - 1).ljust(cell)[:cell], "dim")
        yield header
        for head in range(self.n_heads):
            line = Text(no_wrap=True).append(f"head {head}".ljust(margin), "dim")
            for layer in layers:
                line.append_text(self._cell(layer, head, cell))
            yield line

    def _cell(self, layer: int, head: int, cell: int) -> Text:
        if (layer, head) not in self.selected:
            return Text(" " * cell)
        role = self.main_role.get((layer, head), "")
        if not role:
            return Text(NO_ROLE.rjust(cell - 1).ljust(cell), style="dim")
        mark = self.role_marks[role]
        return Text(mark.letter.rjust(cell - 1).ljust(cell), style=_tile(mark))


def legend(report: Report) -> RenderableType:
    """Return which letter stands for which role, for the roles that are some head's main role."""
    used = set(dict(report.main_role).values())
    entries = [Text.assemble(_letter(mark), " ", role) for role, mark in role_marks(report).items() if role in used]
    if "" in used:
        entries.append(Text.assemble((f" {NO_ROLE} ", "dim"), " no clear role"))
    return Columns(entries, padding=(0, 2))


def clearest_heads(report: Report) -> ClearestHeads:
    """Return one row a role: how many heads have its label, and the clearest of them."""
    rows = {role: labelled(report, role) for role in role_marks(report)}
    return ClearestHeads({role: found for role, found in rows.items() if found}, role_marks(report))


@dataclass(frozen=True)
class ClearestHeads:
    """A table that leaves columns out where there is no room for them."""

    rows: dict[str, list[dict[str, Any]]]
    role_marks: dict[str, Mark]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = max((cell_len(role) for role in self.rows), default=0)
        figures = ("score", "baseline", "lift") if options.max_width >= names + 46 else ("score",)
        more = (options.max_width - names - 48) // 14  # how many runners-up a line has room for
        table = _table("role", "heads", "clearest", *figures, *(("then",) if more > 0 else ()))
        for role, (first, *others) in self.rows.items():
            then = ", ".join(f"{_name(row)} ({row['score']:.2f})" for row in others[:more])
            table.add_row(
                Text.assemble(_letter(self.role_marks[role]), " ", role),
                str(len(others) + 1),
                Text(_name(first), style="bold"),
                *(f"{first[figure]:.2f}" for figure in figures),
                *((Text(then, style="dim"),) if more > 0 else ()),
            )
        if self.rows:
            yield table
        missing = [role for role in self.role_marks if role not in self.rows]
        if missing:
            yield Text("no clear head: " + ", ".join(missing), style="dim")


def labelled(report: Report, role: str) -> list[dict[str, Any]]:
    """Return the rows of the heads that have a role's label, the clearest first."""
    rows = report.roles[(report.roles["role"] == role) & report.roles["label"].astype(bool)]
    return rows.sort_values("lift", ascending=False, kind="stable").to_dict("records")


def heads_to_draw(report: Report, count: int) -> list[tuple[int, int, str]]:
    """Choose (layer, head, title) to draw: the best head for the pronoun, then the clearest of each role."""
    chosen: dict[tuple[int, int], str] = {}
    for link in report.links.to_dict("records")[:1]:
        chosen[int(link["layer"]), int(link["head"])] = f"{link['query']} → {link['key']}"
    for role in role_marks(report):
        rows = [row for row in labelled(report, role) if (row["layer"], row["head"]) not in chosen]
        if rows and len(chosen) < count:
            chosen[int(rows[0]["layer"]), int(rows[0]["head"])] = role
    return [(*place, title) for place, title in chosen.items()]


def head_maps(report: Report, heads: Sequence[tuple[int, int, str]]) -> HeadMaps:
    """Return the maps of some heads (layer, head, title) on the sentence, side by side where they fit."""
    maps = [
        HeadMap(f"{layer}.{head} {title}", report.sentence.tokens, _weights(report, layer, head))
        for layer, head, title in heads
    ]
    return HeadMaps(maps)


@dataclass(frozen=True)
class HeadMaps:
    """Maps side by side, in full rows: of those given, about four, the first ones."""

    maps: Sequence[HeadMap]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(Measurement.get(console, options, drawn).maximum for drawn in self.maps)
        beside = max((options.max_width + _GAP) // (width + _GAP), 1)
        shown = self.maps[: beside * max(4 // beside, 1)]
        for start in range(0, len(shown), beside):
            row = Table.grid(padding=(0, _GAP, 0, 0))
            row.add_row(*shown[start : start + beside])
            yield row
            yield Text()
        yield ShadeLegend()


@dataclass(frozen=True)
class HeadMap:
    """The weights (L, S) of one head as shades: a row a query, a column a key, tokens on both axes.

    With too little room the last keys and all queries are shown; a row of weights that is zero stays blank.
    """

    title: str
    tokens: Sequence[str]
    weights: Sequence[Sequence[float]]

    def _layout(self, width: int) -> tuple[int, int, int]:
        label = max((cell_len(fit(token.strip(), _LABEL)) for token in self.tokens), default=0)
        cell = 2 if label + 1 + 2 * len(self.tokens) <= width else 1
        keys = max(min(len(self.tokens), (width - label - 1) // cell), 1)
        return label, cell, keys

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        label, cell, keys = self._layout(options.max_width)
        width = min(max(label + 1 + cell * keys, cell_len(self.title)), options.max_width)
        return Measurement(width, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label, cell, keys = self._layout(options.max_width)
        first = len(self.tokens) - keys
        yield Text(fit(self.title, options.max_width), style="bold", no_wrap=True)
        yield from _column_labels(self.tokens[first:], label + 1, cell)
        painted = console.color_system is not None and not console.no_color
        for token, row in zip(self.tokens, self.weights):
            name = fit(token.strip(), _LABEL)
            line = Text(" " * (label - cell_len(name)) + name + " ", no_wrap=True)
            for weight in row[first:]:
                line.append_text(shade(weight, cell, painted))
            yield line
        if first:
            yield Text(f"(the last {keys} of {len(self.tokens)} keys)", style="dim")


class ShadeLegend:
    """What each shade means, in the same ink as the maps."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text("rows look at columns, weight ", style="dim")
        painted = console.color_system is not None and not console.no_color
        if painted:
            for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
                line.append_text(shade(weight or 1e-9, 2, painted)).append(f" {weight:.2f}  ")
        else:
            for least, glyph in reversed(_SHADES):
                line.append(f" {glyph * 2} {least:.2f}")
            line.append(" and more")
        yield line


def shade(weight: float, cell: int, painted: bool) -> Text:
    """Return one cell of a map: a colour on a scale where there is colour, one of ` ░▒▓█` elsewhere."""
    if not weight > 0:
        return Text(("!" if weight != weight else " ").ljust(cell))
    if painted:
        return Text(" " * cell, style=Style(bgcolor="rgb({},{},{})".format(*_ramp(weight))))
    return Text(next((glyph for least, glyph in _SHADES if weight >= least), " ") * cell)


def link_table(report: Report, count: int = 6) -> RenderableType:
    """Return the heads that lead from the pronoun to what it means, with their weight on the other noun."""
    links = report.links.to_dict("records")
    query, keys = links[0]["query"], list(dict.fromkeys(link["key"] for link in links))
    weights = {(_name(link), link["key"]): link["weight"] for link in links}
    table = _table("head", *(f"{query} → {key}" for key in keys), "main role")
    for link in links[:count]:
        if link["key"] == keys[0]:
            found = [weights.get((_name(link), key)) for key in keys]
            figures = ["" if weight is None else f"{weight:.2f}" for weight in found]
            role = dict(report.main_role).get((int(link["layer"]), int(link["head"])), "") or NO_ROLE
            table.add_row(Text(_name(link), style="bold"), *figures, Text(role, style="dim"))
    return table


def fit(token: str, width: int) -> str:
    """Return a token in at most `width` terminal cells, cut with an ellipsis where it is longer."""
    signs = _signs(token)
    if cell_len("".join(signs)) <= width:
        return "".join(signs)
    kept = ""
    for sign in signs:
        if cell_len(kept + sign) > width - 1:
            break
        kept += sign
    return kept + "…"


def _signs(token: str) -> list[str]:
    """Split a token into written signs: a character with what joins onto it."""
    signs: list[str] = []
    for character in visible(token):
        if signs and (cell_len(character) == 0 or signs[-1].endswith("\u200d")):
            signs[-1] += character
        else:
            signs.append(character)
    return signs


def _column_labels(tokens: Sequence[str], margin: int, cell: int) -> Iterator[Text]:
    """Write tokens downwards, one above each column, standing on the map."""
    columns = [_signs(fit(token.strip(), _LABEL)) for token in tokens]
    height = max((len(column) for column in columns), default=0)
    for line in range(height):
        row = " " * margin
        for column in columns:
            place = line - (height - len(column))
            sign = column[place] if place >= 0 else ""
            sign = sign if cell_len(sign) <= cell else "▯"
            row += sign + " " * (cell - cell_len(sign))
        yield Text(row, style="dim", no_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        words = name in ("role", "main role", "then")
        table.add_column(Text(name), justify="left" if words else "right", no_wrap=True, overflow="ellipsis")
    return table


def _letter(mark: Mark) -> tuple[str, Style]:
    return f" {mark.letter} ", _tile(mark)


def _tile(mark: Mark) -> Style:
    return Style(color=_INK, bgcolor=mark.dark)


def _ramp(weight: float) -> tuple[int, ...]:
    place = min(max(weight, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(place), len(_RAMP) - 2)
    return tuple(round(a + (b - a) * (place - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1]))


def _selected(report: Report) -> set[tuple[int, int]]:
    return {
        (layer, head)
        for layer in report.layers
        for head in range(report.model.n_heads)
        if f"{layer}.{head}" in report.heads
    }


def _weights(report: Report, layer: int, head: int) -> list[list[float]]:
    """Return the weights (L, L) of one head on the sentence."""
    return report.sentence.weights[list(report.layers).index(layer), head].tolist()


def _name(row: dict[str, Any]) -> str:
    return f"{int(row['layer'])}.{int(row['head'])}"


def _count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
