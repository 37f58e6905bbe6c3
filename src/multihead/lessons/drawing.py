"""Pictures of heads at work: who looks at whom, and a whole layer with the numbers of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from torch import Tensor

from ..nn import MultiHeadAttention
from .picture import Picture
from .tools import beside, numbers, shade, signed, weights

_CELL, _HIGH = 46, 26  # a number's box
_HEADS = ("#2f6fde", "#d9730d")
_PANEL = 480


@dataclass(frozen=True)
class _Stage:
    """What one head makes of a word."""

    question: Tensor  # (D,)
    answers: Tensor  # (L, D), the keys
    scores: Tensor  # (L,)
    weights: Tensor  # (L,)
    values: Tensor  # (L, E)
    output: Tensor  # (E,)


def _stages(layer: MultiHeadAttention, x: Tensor, word: int) -> list[_Stage]:
    seen, outputs = weights(layer, x), layer.head_outputs(x[None])[0].detach()
    stages = []
    for h, head in enumerate(layer.heads):
        question, answers, values = ((x @ matrix.detach().T) for matrix in (head.W_Q, head.W_K, head.W_V))
        scores = answers @ question[word] / layer.d_head**0.5
        stages.append(_Stage(question[word], answers, scores, seen[h, word], values, outputs[h, word]))
    return stages


def layer_drawing(layer: MultiHeadAttention, x: Tensor, words: Sequence[str], word: int) -> str:
    """A layer of two heads at work on a word of the sequence x (L, d_model), in 80 columns."""
    stages = _stages(layer, x, word)
    wide = max(map(len, words))
    boxes = []
    for h, stage in enumerate(stages):
        inside = [f"asks {' ' * (wide + 5)}{numbers(stage.question)}"]
        for name, weight, value in zip(words, stage.weights.tolist(), stage.values):
            inside.append(f"{name.ljust(wide)}  {weight:.2f} {shade(weight)} {numbers(value)}")
        inside.append(f"gives{' ' * (wide + 5)}{numbers(stage.output)}")
        width = max(map(len, inside))
        title = f" head {h} "
        lines = [f"┌─{title}{'─' * (width + 1 - len(title))}┐"]
        lines += [f"│ {line.ljust(width)} │" for line in inside]
        boxes.append("\n".join([*lines, f"└{'─' * (width + 2)}┘"]))
    whole = beside(*boxes, gap=2)
    concatenated = numbers(layer.head_outputs(x[None])[0, :, word].flatten())
    left = f"{words[word]} is".ljust(15)
    return "\n".join(
        [
            f"{left}{numbers(x[word])}",
            " " * 15 + "each head multiplies all of it by its W_Q, W_K and W_V",
            whole,
            f"{'side by side'.ljust(15)}{concatenated}",
            " " * 15 + "times W_O",
            f"{f'{words[word]} becomes'.ljust(15)}{numbers(layer(x[None])[0, word])}",
        ]
    )


def layer_picture(layer: MultiHeadAttention, x: Tensor, words: Sequence[str], word: int) -> Picture:
    """The same as an SVG, with the keys, the scores and the matrix W_O as well."""
    stages, draw = _stages(layer, x, word), _Drawing()
    d_model = layer.d_model
    center = (_PANEL * 2 + 60) / 2
    y = draw.title(center, 34, f"Multi-head attention, for the word “{words[word]}”")

    left = center - d_model * _CELL / 2
    draw.label(center, y + 24, f"the sentence, {d_model} numbers a word")
    y += 34
    for row, (name, token) in enumerate(zip(words, x)):
        draw.row(left, y, token, name=name, strong=row == word)
        y += _HIGH
    bottom, y = y, y + 56
    tops, ends = [], []
    for h, stage in enumerate(stages):
        begin = 20 + h * (_PANEL + 20)
        middle = begin + _PANEL / 2
        draw.arrow(center, bottom + 4, middle, y - 4, _HEADS[h])
        tops.append(middle)
        ends.append(draw.panel(begin, y, h, stage, words, word))
    y = ends[0]
    for h, middle in enumerate(tops):
        draw.arrow(middle, y + 4, center + (h - 0.5) * 3 * _CELL, y + 62, _HEADS[h])
    y += 68
    concatenated = layer.head_outputs(x[None])[0, :, word].detach().flatten()
    colours = [_HEADS[i // layer.d_value] for i in range(len(concatenated))]
    left = center - len(concatenated) * _CELL / 2
    draw.row(left, y, concatenated, name="side by side", colours=colours, strong=True)
    y += _HIGH + 18
    draw.label(center, y + 10, "each number below is a row of W_O times the numbers above")
    y += 22
    result = layer(x[None])[0, word].detach()
    for row in range(d_model):
        draw.row(left, y, layer.W_O.weight[row].detach(), name="W_O" if row == 0 else "", faint=True)
        draw.text(left + len(concatenated) * _CELL + 24, y + 17, "=", "#667085")
        draw.box(left + len(concatenated) * _CELL + 40, y, float(result[row]), "#475467", True)
        y += _HIGH
    draw.label(left + (len(concatenated) + 1.4) * _CELL, y + 18, f"“{words[word]}” becomes")
    alt = (
        f"A layer of two heads with the numbers of every stage for the word {words[word]}: the sentence, each head's "
        f"question, keys, weights and values, what it gives, the two side by side {numbers(concatenated)}, "
        f"and after W_O {numbers(result)}"
    )
    return Picture("layer.svg", alt, draw.svg(_PANEL * 2 + 60, y + 40))


def heads_picture(weights: Tensor, words: Sequence[str]) -> Picture:
    """Who looks at whom: a panel for each head of (H, L, L), a line for each weight, thick and dark as it is large."""
    draw, wide, gap, row = _Drawing(), 400, 20, 44
    height = 64 + row * len(words) + 14
    for h, head in enumerate(weights.tolist()):
        x, colour = gap + h * (wide + gap), _HEADS[h]
        draw.frame(x, 16, wide, height - 16, colour, f"head {h}")
        draw.label(x + 64, 60, "asks")
        draw.label(x + wide - 64, 60, "is asked")
        for i, asking in enumerate(words):
            y = 64 + row * i + row / 2
            draw.text(x + 96, y + 5, asking, "#101828", size=16, anchor="end")
            draw.text(x + wide - 96, y + 5, asking, "#101828", size=16, anchor="start")
            for j, weight in enumerate(head[i]):
                to = 64 + row * j + row / 2
                draw.line(x + 106, y, x + wide - 106, to, colour, weight)
        for i, asked in enumerate(head):
            j = max(range(len(words)), key=asked.__getitem__)
            # On the line, a fifth of its way: lines of different words are apart there.
            y = 64 + row * (i + (j - i) * 0.2) + row / 2
            draw.tag(x + 106 + (wide - 212) * 0.2, y, f"{asked[j]:.2f}", colour)
    links = [
        f"head {h}: "
        + ", ".join(f"{word} to {words[int(row.argmax())]} {row.max():.2f}" for word, row in zip(words, head))
        for h, head in enumerate(weights)
    ]
    alt = f"Lines from the words that ask to the words that are asked, by head; the strongest: {'; '.join(links)}"
    return Picture("heads.svg", alt, draw.svg(gap + len(weights) * (wide + gap), height + 20))


class _Drawing:
    """Shapes of an SVG, in the order in which they are drawn."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def svg(self, width: float, height: float) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="ui-sans-serif, system-ui, sans-serif" font-size="13">'
        )
        arrow = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#98a2b3"/></marker></defs>'
        )
        ground = f'<rect width="{width:g}" height="{height:g}" rx="10" fill="#ffffff"/>'
        return "\n".join([head, arrow, ground, *self.parts, "</svg>"]) + "\n"

    def title(self, x: float, y: float, words: str) -> float:
        """A line in the middle; gives where the next thing may begin."""
        self.text(x, y, words, "#101828", size=19, weight=600)
        return y

    def label(self, x: float, y: float, words: str) -> None:
        """A quiet line in the middle."""
        self.text(x, y, words, "#667085", size=12)

    def text(
        self, x: float, y: float, words: str, colour: str, *, size: int = 13, weight: int = 400, anchor: str = "middle"
    ) -> None:
        """A line of text, y its base line."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" font-size="{size}" '
            f'font-weight="{weight}">{escape(words)}</text>'
        )

    def box(self, x: float, y: float, value: float, colour: str, strong: bool) -> None:
        """A number in a box that is the darker, the larger it is: blue above 0, red below."""
        tint = "#1d6fb8" if value > 0 else "#c4432b"
        depth = min(abs(value), 1.2) / 1.2 * 0.42
        edge = 1.6 if strong else 0.8
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{_CELL}" height="{_HIGH}" fill="{tint}" fill-opacity="{depth:.2f}" '
            f'stroke="{colour}" stroke-width="{edge}"/>'
        )
        self.text(x + _CELL / 2, y + 17, signed(value), "#101828", size=12)

    def row(
        self,
        x: float,
        y: float,
        values: Tensor,
        *,
        name: str = "",
        strong: bool = False,
        faint: bool = False,
        colours: Sequence[str] = (),
    ) -> None:
        """Numbers side by side, and the row's name before them."""
        edge = "#e4e7ec" if faint else "#475467" if strong else "#d0d5dd"
        for place, value in enumerate(values.tolist()):
            self.box(x + place * _CELL, y, value, colours[place] if colours else edge, strong)
        if name:
            self.text(x - 10, y + 17, name, "#101828", weight=600 if strong else 400, anchor="end")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
        """A curve that leaves and arrives upright."""
        half = (y + to_y) / 2
        self.parts.append(
            f'<path d="M{x:g} {y:g}C{x:g} {half:g} {to_x:g} {half:g} {to_x:g} {to_y:g}" fill="none" stroke="{colour}" '
            f'stroke-width="1.6" marker-end="url(#tip)"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str, weight: float) -> None:
        """A straight line, thick and dark as a weight is large."""
        self.parts.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{colour}" stroke-width="{1 + 7 * weight:.2f}" '
            f'stroke-opacity="{0.1 + 0.9 * weight:.2f}" stroke-linecap="round"/>'
        )

    def tag(self, x: float, y: float, words: str, colour: str) -> None:
        """A few signs on a white ground, in the middle of a place."""
        self.parts.append(
            f'<rect x="{x - 17:g}" y="{y - 10:g}" width="34" height="20" rx="4" fill="#ffffff" stroke="{colour}"/>'
        )
        self.text(x, y + 4.5, words, "#101828", size=12)

    def frame(self, x: float, y: float, width: float, height: float, colour: str, name: str) -> None:
        """A tinted frame with a name in its corner."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{colour}" '
            f'fill-opacity="0.04" stroke="{colour}" stroke-width="1.4"/>'
        )
        self.text(x + 14, y + 22, name, colour, size=15, weight=600, anchor="start")

    def panel(self, x: float, y: float, h: int, stage: _Stage, words: Sequence[str], word: int) -> float:
        """One head in a frame; gives where the frame ends."""
        D, E, L = len(stage.question), len(stage.output), len(words)
        colour, high = _HEADS[h], 92 + (L + 1) * _HIGH + 34
        self.frame(x, y, _PANEL, high, colour, f"head {h}")
        keys, scores, values = x + 58, x + 58 + D * _CELL + 8, x + _PANEL - 14 - E * _CELL
        bars = scores + 44
        room = values - bars - 12
        self.row(keys, y + 34, stage.question, strong=True)
        self.text(keys + D * _CELL + 10, y + 51, f"“{words[word]}” asks: W_Q x", "#344054", anchor="start", size=12)
        top = y + 92
        for middle, name in (
            (keys + D * _CELL / 2, "keys: W_K x"),
            (scores + 18, "score"),
            (bars + room / 2, "weight"),
            (values + E * _CELL / 2, "values: W_V x"),
        ):
            self.label(middle, top - 8, name)
        for row, name in enumerate(words):
            at = top + row * _HIGH
            self.row(keys, at, stage.answers[row], name=name)
            self.text(scores + 36, at + 17, signed(float(stage.scores[row])), "#344054", size=12, anchor="end")
            weight = float(stage.weights[row])
            self.parts.append(
                f'<rect x="{bars:g}" y="{at + 5:g}" width="{max(room * weight, 1):.1f}" height="{_HIGH - 10}" '
                f'fill="{colour}" fill-opacity="0.75"/>'
            )
            beyond = bars + room * weight + 5 if weight < 0.6 else bars + 5
            ink = "#101828" if weight < 0.6 else "#ffffff"
            self.text(beyond, at + 17, f"{weight:.2f}", ink, size=12, anchor="start")
            self.row(values, at, stage.values[row])
        at = top + L * _HIGH + 18
        self.text(values - 10, at + 17, "weights times values", "#344054", size=12, anchor="end")
        self.row(values, at, stage.output, strong=True, colours=[colour] * E)
        return y + high
