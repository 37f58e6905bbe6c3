"""A report in the forms that other programs read: JSON, CSV, and HTML for a notebook."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multihead.heads.roles import mark_of

if TYPE_CHECKING:
    from multihead.heads.report import HeadReport

SCHEMA = 1
_NO_MEAN = ("argmax",)  # a name of a key, which has no mean


def json_text(report: HeadReport) -> str:
    """Return the report as strict JSON; what is no number is null.

    `statistics` are means over the rows of the passage, [layer][head]; `sentence.weights` are
    [layer][head][query][key].
    """
    content = {
        "schema": SCHEMA,
        "model": dataclasses.asdict(report.model),
        "text": report.text,
        "tokens": report.tokens,
        "layers": report.layers,
        "heads": sorted(report.heads, key=_by_number),
        "main_role": {f"{layer}.{head}": role for (layer, head), role in report.main_role.items()},
        "roles": report.roles.to_dict("records"),
        "statistics": {name: row_means(values) for name, values in report.statistics.items() if name not in _NO_MEAN},
        "sentence": {
            "text": report.sentence.text,
            "tokens": report.sentence.tokens,
            "weights": report.sentence.weights,
        },
        "links": report.links.to_dict("records"),
        "seconds": report.seconds,
        "peak_memory": report.peak_memory,
        "notes": report.notes,
    }
    return json.dumps(_plain(content), allow_nan=False) + "\n"


def csv_text(report: HeadReport) -> str:
    """Return the table of roles as CSV, a missing number as an empty field."""
    table = report.roles.copy()
    table.insert(0, "schema", SCHEMA)
    return table.to_csv(index=False, lineterminator="\n", float_format="%.8g")


def row_means(values: Tensor) -> Tensor:
    """Return the mean over the last axis of what is finite there, NaN where nothing is."""
    values = values.double()
    finite = values.isfinite()
    return torch.where(finite, values, 0).sum(-1) / torch.where(finite, 1.0, 0.0).sum(-1)


def notebook_html(report: HeadReport) -> str:
    """Return the grid of heads and the clearest heads of each role as HTML that stands alone."""
    model = report.model
    line = (
        f"{model.name}: {model.layers} layers, {model.n_heads} heads, {model.n_kv_heads} key/value heads "
        f"({model.kind}), width {model.d_head}; read {len(report.tokens)} tokens in {report.seconds:.1f} s"
    )
    cell = "padding:0 4px;text-align:center;font-family:monospace;color:#fff;background:"
    rows = []
    for layer in report.layers:
        cells = [f"<th>{layer}</th>"]
        for head in range(model.n_heads):
            role = report.main_role.get((layer, head), "")
            mark = mark_of(role) if role else None
            title = html.escape(f"{layer}.{head} {role}", quote=True)
            colour, letter = (mark.light, html.escape(mark.letter)) if mark else ("#ccc", "·")
            cells.append(f'<td title="{title}" style="{cell}{colour}">{letter}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    numbers = "".join(f"<th>{head}</th>" for head in range(model.n_heads))
    return (
        f"<div><p>{html.escape(line)}</p>"
        f"<table><tr><th></th>{numbers}</tr>{''.join(rows)}</table>"
        f"{_clearest(report)}</div>"
    )


def _clearest(report: HeadReport, most: int = 3) -> str:
    """Return a table with the best few labelled heads of each role."""
    rows = []
    for role in dict.fromkeys(report.roles["role"]):
        best = report.best(role)
        for row in best[best["label"]].head(most).to_dict("records"):
            name = f"{mark_of(role).letter} {role}"
            numbers = "".join(f"<td>{row[column]:.2f}</td>" for column in ("score", "baseline", "lift"))
            rows.append(f"<tr><td>{html.escape(name)}</td><td>{row['layer']}.{row['head']}</td>{numbers}</tr>")
    header = "".join(f"<th>{name}</th>" for name in ("role", "head", "score", "baseline", "lift"))
    return f"<table><tr>{header}</tr>{''.join(rows)}</table>"


def _by_number(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))


def _plain(value: Any) -> Any:
    """Return what JSON can hold, numbers to six digits."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
