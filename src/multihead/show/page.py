"""A report as one HTML file: opened from disk, nothing fetched, every text of the report shown as text.

The file is a template with three holes (style, data, script). The data is JSON without `<`, `>` and `&`;
larger arrays in it are base64 of little-endian numbers, whose type stands beside them.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from .palette import marks
from .shape import Report
from .tokens import visible

# Each is shown for a head as the mean over the rows of the passage.
_STATISTICS = {
    "entropy": ("Entropy", "in nats, 0 when one key has all the weight"),
    "evenness": ("Evenness", "entropy over the entropy of even attention, 0 to 1"),
    "effective_keys": ("Effective keys", "1 / Σ weight², how many keys share the weight"),
    "max_weight": ("Heaviest key", "the largest weight in a row"),
    "sink_mass": ("Learned sink", "the weight that goes to no key"),
    "max_logit": ("Largest score", "before the softmax"),
}
_EXACT_CELLS = 500_000  # maps with more cells in all go to 8 bits, which keeps SmolLM2's page under 5 MB


def render(report: Report) -> str:
    """Return the page of a report: about 20 KB a head."""
    holes = {"STYLE": _asset("page.css"), "DATA": embed(content(report)), "SCRIPT": _asset("page.js")}
    before, *rest = _asset("page.html").split("{{")
    page = [before]
    for piece in rest:
        name, after = piece.split("}}", 1)
        page += [holes[name], after]
    return "".join(page)


def content(report: Report) -> dict[str, Any]:
    """Return the page's data as strict JSON values; lists over heads go layer by layer."""
    places = [(layer, head) for layer in report.layers for head in range(report.model.n_heads)]
    tokens, weights = report.sentence.tokens, report.sentence.weights
    views = [_view("sentence", tokens, weights, range(len(tokens) + 1))]
    if report.passage_map is not None:
        views.append(_view("passage", report.tokens, report.passage_map, report.passage_edges))
    main = dict(report.main_role)
    return {
        "schema": 1,
        "model": _model(report),
        "layers": [int(layer) for layer in report.layers],
        "shown": [f"{layer}.{head}" in report.heads for layer, head in places],
        "main": [main.get(place, "") for place in places],
        "roles": _roles(report, places),
        "notes": [visible(note) for note in report.notes],
        "statistics": _statistics(report),
        "views": views,
    }


def embed(data: Any) -> str:
    """Write JSON that is safe in a script element: strict, ASCII, no characters that HTML could act on."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _model(report: Report) -> dict[str, Any]:
    facts = report.model
    return {
        "name": visible(facts.name),
        "architecture": visible(facts.architecture),
        "kind": facts.kind,
        "causal": bool(facts.causal),
        "layers": facts.layers,
        "heads": facts.n_heads,
        "kvHeads": facts.n_kv_heads,
        "dHead": facts.d_head,
        "parameters": facts.parameters,
        "seconds": _number(report.seconds),
        "peakMemory": int(report.peak_memory),
    }


def _roles(report: Report, places: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    columns = ("score", "baseline", "lift", "label")
    found = {(row["role"], row["layer"], row["head"]): row for row in report.roles.to_dict("records")}
    roles = []
    for role, mark in marks(report.roles["role"].tolist()).items():
        rows = [found.get((role, *place), {}) for place in places]
        values = {name: [_number(row.get(name)) for row in rows] for name in columns}
        roles.append({"name": role, "letter": mark.letter, "dark": mark.dark, "light": mark.light, **values})
    return roles


def _statistics(report: Report) -> list[dict[str, Any]]:
    listed = []
    for name, (title, about) in _STATISTICS.items():
        if name in report.statistics:
            rows = np.asarray(report.statistics[name], dtype=np.float64)  # (layer, H, L)
            finite = np.isfinite(rows)
            count = finite.sum(-1)
            mean = np.where(finite, rows, 0).sum(-1) / np.maximum(count, 1)
            values = np.where(count > 0, mean, np.nan).ravel().tolist()
            listed.append({"title": title, "about": about, "values": [_number(value) for value in values]})
    return listed


def _view(name: str, tokens: Sequence[str], weights: Any, edges: Any) -> dict[str, Any]:
    """Return the maps (layer, H, m, m) of all heads on a text; cell c goes from edges[c] to edges[c + 1]."""
    maps = np.asarray(weights, dtype=np.float32)
    exact = maps.size <= _EXACT_CELLS
    if not exact:  # value = (code / 254)², off by at most 0.004, 255 for what is no number
        codes = np.rint(254 * np.sqrt(np.clip(np.nan_to_num(maps), 0, 1)))
        maps = np.where(np.isnan(maps), 255, codes).astype(np.uint8)
    return {
        "name": name,
        "tokens": [visible(token) for token in tokens],
        "edges": [int(edge) for edge in edges],
        "type": "float32" if exact else "squared uint8",
        "data": base64.b64encode(maps.astype(maps.dtype.newbyteorder("<")).tobytes()).decode("ascii"),
    }


def _number(value: Any) -> float | bool | None:
    """Return a number for JSON, short; None where there is none."""
    if value is None or isinstance(value, bool | np.bool_):
        return value if value is None else bool(value)
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _asset(name: str) -> str:
    return (files("multihead.show") / "assets" / name).read_text(encoding="utf-8")
