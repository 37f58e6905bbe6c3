"""What the lessons share: the weights of a layer's heads, and numbers as text."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import torch
from torch import Tensor

from ..core.statistics import Statistics
from ..nn import MultiHeadAttention, Record

# From this weight on.
_SHADES = ((0.75, "█"), (0.5, "▓"), (0.2, "▒"), (0.05, "░"))


def weights(layer: MultiHeadAttention, x: Tensor) -> Tensor:
    """Every weight of every head on one sequence x (L, d_model): (H, L, L).

    The layer never holds them. It is asked for the weight of each row on a listed set of keys, and each list here is
    one key.
    """
    L = len(x)
    record = Record(Statistics("lse", pairs=[torch.full((L, 1), key) for key in range(L)]))
    with torch.no_grad():
        layer(x[None], record=record)
    return record.statistics["pair_mass"][0]


def numbers(vector: Tensor, digits: int = 2) -> str:
    """A vector as text, such as [+0.10 +0.38 -0.12]; what rounds to zero is +0.00."""
    return "[" + " ".join(signed(value, digits) for value in vector.tolist()) + "]"


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign; what rounds to zero is +0.00."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"  # -0.0 + 0.0 is 0.0


def table(weights: Tensor, queries: Sequence[str], keys: Sequence[str] | None = None, digits: int = 2) -> str:
    """Weights (L, S) of a head as a table: a row a query, a column a key, each with a shade that grows with it."""
    keys = queries if keys is None else keys
    left, width = max(map(len, queries)) + 2, max(digits + 6, max(map(len, keys)) + 2)
    lines = [" " * left + "".join(key.ljust(width) for key in keys)]
    for query, row in zip(queries, weights.tolist()):
        cells = (f"{weight:.{digits}f} {shade(weight)}".ljust(width) for weight in row)
        lines.append(query.ljust(left) + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def shade(weight: float) -> str:
    """Two characters that are darker the larger a weight is."""
    return next((glyph * 2 for least, glyph in _SHADES if weight >= least), "  ")


def symbols(weights: Tensor, labels: Sequence[str]) -> str:
    """Weights (L, L) as a map: #### where int(20 w) > 4, ## where it is > 2, else a dot."""
    width = max(4, *map(len, labels)) + 1
    lines = [" " * width + "".join(label.ljust(width) for label in labels)]
    for label, row in zip(labels, weights.tolist()):
        lines.append(label.ljust(width) + "".join(_symbol(weight).ljust(width) for weight in row))
    return "\n".join(line.rstrip() for line in lines)


def _symbol(weight: float) -> str:
    level = int(20 * weight)
    return "####" if level > 4 else "##" if level > 2 else "."


def wrapped(text: object) -> str:
    """A message in lines of 78 characters; a line that begins with a dash goes on under its first word."""
    lines = str(text).splitlines()
    return "\n".join(fill(line, 78, subsequent_indent="  " if line.startswith("- ") else "") for line in lines)


def beside(*blocks: str, gap: int = 4) -> str:
    """Blocks of lines side by side."""
    columns = [block.splitlines() for block in blocks]
    widths = [max(map(len, lines)) + gap for lines in columns]
    height = max(map(len, columns))
    rows = [[lines[i] if i < len(lines) else "" for lines in columns] for i in range(height)]
    return "\n".join("".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)
