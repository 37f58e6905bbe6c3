"""A layer as one C99 file for small devices: fixed lengths, no heap, one head after another.

Its memory beside x and y is the keys and values of one head, and a query, a row of weights and an output: what
`execution="sequential"` holds, a row at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .module import MultiHeadAttention

_KEYWORDS = frozenset(
    "auto break case char const continue default do double else enum extern float for goto if inline int long register "  # noqa: SIM905
    "restrict return short signed sizeof static struct switch typedef union unsigned void volatile while".split()
)
_A_LINE = 8  # numbers


@dataclass(frozen=True)
class CSource:
    """A C99 file, and what it takes.

    Args:
        text: the file.
        ram: bytes of its own work space (static); x, y and a little stack come on top.
        flash: bytes of weights and tables (const); code comes on top.
    """

    text: str
    ram: int
    flash: int


def c_source(
    layer: MultiHeadAttention, length: int, context_length: int | None = None, name: str = "attention"
) -> CSource:
    """Write a layer as C: a function `void name(const float *x, float *y)`, both (L, d_model) row after row.

    The weights are const arrays of float32. A layer with a d_context takes `const float *context`, (S, d_context),
    between x and y. It is the layer in evaluation mode on one sequence; a token that sees no key gives the output's
    bias alone. The work space is static: no two calls may run at once.

    Args:
        length: L, the tokens of x.
        context_length: S, the tokens of the context, for a layer with a d_context.
        name: of the function, and the beginning of every other name in the file.

    Raises:
        ValueError: an argument does not fit, or heads are ablated.
    """
    for argument, value in (("length", length), ("context_length", context_length)):
        if value is not None and value < 1:
            raise ValueError(f"{argument}: expected 1 or more, got {value}")
    if (context_length is None) != (layer.d_context is None):
        raise ValueError(
            f"context_length: expected {'the tokens of the context' if layer.d_context else 'None'}, since the layer's "
            f"d_context is {layer.d_context}; got {context_length}"
        )
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or name in _KEYWORDS:
        raise ValueError(f"name: expected a name in C, got {name!r}")
    if layer.ablations:
        raise ValueError("layer: expected no ablated heads; prune_heads makes a layer without them")
    return _Writer(layer, length, context_length or length, name).source()


class _Writer:
    def __init__(self, layer: MultiHeadAttention, length: int, keys: int, name: str) -> None:
        self.layer, self.L, self.S, self.name = layer, length, keys, name
        self.tables: list[str] = []
        self.flash = 0

    def source(self) -> CSource:
        layer, name = self.layer, self.name
        self._add_tables()
        D, E, S = layer.d_head, layer.d_value, self.S
        work = {"key": (S, D), "value": (S, E), "query": (D,), "weight": (S,), "out": (E,)}
        ram = 4 * sum(math.prod(shape) for shape in work.values())
        arrays = [f"static float {name}_{what}{_brackets(shape)};" for what, shape in work.items()]
        has_context = layer.d_context is not None
        signature = f"void {name}(const float *x, {'const float *context, ' if has_context else ''}float *y)"
        about = [
            f"Multi-head attention: {layer.extra_repr()}.",
            f"    {signature};",
            f"x and y are ({self.L}, {layer.d_model}), row after row"
            + (f"; context is ({S}, {layer.d_context})." if has_context else "."),
            f"Memory: {ram} bytes beside them, static. Weights and tables: {self.flash} bytes. No heap.",
            "Made by multihead export-c; C99; link with -lm.",
        ]
        body = "\n".join(self._body())
        helpers = self._helpers()
        parts = [
            "/* " + "\n   ".join(about) + " */",
            "#include <math.h>",
            *self.tables,
            "\n".join(arrays),
            helpers,
            f"{signature};\n{signature} {{\n{body}\n}}",
        ]
        return CSource("\n\n".join(part for part in parts if part) + "\n", ram, self.flash)

    def _table(self, what: str, values: Tensor) -> None:
        values = values.detach().to("cpu", torch.float32)
        if not bool(values.isfinite().all()):
            raise ValueError(f"{what}: expected finite numbers")
        self.flash += 4 * values.numel()
        numbers = [_number(x) for x in values.flatten().tolist()]
        lines = [", ".join(numbers[i : i + _A_LINE]) for i in range(0, len(numbers), _A_LINE)]
        # Flat, and read by rows: braces a row would be most of the file.
        self.tables.append(f"static const float {self.name}_{what}[{len(numbers)}] = {{\n" + ",\n".join(lines) + "};")

    def _add_tables(self) -> None:
        layer = self.layer
        for part in "QKV":
            weight, bias = layer.rows(part, slice(0, layer.n_heads if part == "Q" else layer.n_kv_heads))
            self._table(f"W_{part}", weight)
            if bias is not None:
                self._table(f"b_{part}", bias)
        self._table("W_O", layer.W_O.weight)
        optional = {
            "b_O": layer.W_O.bias,
            "W_G": None if layer.W_G is None else layer.W_G.weight,
            "q_norm": None if layer.q_norm is None else layer.q_norm.weight,
            "k_norm": None if layer.k_norm is None else layer.k_norm.weight,
            "sink": layer.sinks,
            "slope": layer.alibi_slopes,
        }
        for what, values in optional.items():
            if values is not None:
                self._table(what, values)
        if layer.rotary is not None and layer.rotary.turning(layer.d_head):
            tables = layer.rotary.tables(torch.arange(self.L), layer.d_head, torch.zeros(()))
            for what, values in zip(("cos", "sin"), tables):
                self._table(what, values)

    @property
    def _turns(self) -> bool:
        return self.layer.rotary is not None and self.layer.rotary.turning(self.layer.d_head) > 0

    def _helpers(self) -> str:
        name, layer = self.name, self.layer
        found = [
            f"static float {name}_dot(const float *a, const float *b, int n) {{\n"
            "  float sum = 0.0f;\n"
            "  for (int i = 0; i < n; ++i) sum += a[i] * b[i];\n"
            "  return sum;\n}"
        ]
        if layer.q_norm is not None:
            found.append(
                f"static void {name}_norm(float *x, const float *weight, float eps) {{\n"
                f"  const float scale = 1.0f / sqrtf({name}_dot(x, x, {layer.d_head}) / {layer.d_head} + eps);\n"
                f"  for (int d = 0; d < {layer.d_head}; ++d) x[d] *= scale * weight[d];\n}}"
            )
        if self._turns:
            assert layer.rotary is not None
            pairs = layer.rotary.turning(layer.d_head) // 2
            a, b = ("p", f"p + {pairs}") if layer.rotary.pairing == "half" else ("2 * p", "2 * p + 1")
            found.append(
                f"static void {name}_turn(float *x, int position) {{\n"
                f"  for (int p = 0; p < {pairs}; ++p) {{\n"
                f"    const float c = {name}_cos[position * {pairs} + p], s = {name}_sin[position * {pairs} + p];\n"
                f"    const float a = x[{a}], b = x[{b}];\n"
                f"    x[{a}] = a * c - b * s;\n"
                f"    x[{b}] = b * c + a * s;\n"
                "  }\n}"
            )
        return "\n\n".join(found)

    def _body(self) -> Iterator[str]:
        layer, n = self.layer, self.name
        D, E, L, S, M = layer.d_head, layer.d_value, self.L, self.S, layer.d_model
        source, width = ("x", M) if layer.d_context is None else ("context", layer.d_context)
        group = layer.n_heads // layer.n_kv_heads

        def project(to: str, part: str, head: str, rows: int, of: str, columns: int, pad: str) -> str:
            bias = layer.rows(part, slice(0, 1))[1]
            row = f"({head} * {rows} + d)"
            added = "" if bias is None else f" + {n}_b_{part}[{head} * {rows} + d]"
            dot = f"{n}_dot({of}, {n}_W_{part} + {row} * {columns}, {columns})"
            return f"{pad}for (int d = 0; d < {rows}; ++d) {to}[d] = {dot}{added};"

        def finished(which: str, what: str, position: str, pad: str) -> Iterator[str]:
            norm = layer.q_norm if which == "q" else layer.k_norm
            if norm is not None:
                eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
                yield f"{pad}{n}_norm({what}, {n}_{which}_norm, {_number(eps)});"
            if self._turns:
                yield f"{pad}{n}_turn({what}, {position});"

        start = f"{n}_b_O[m]" if layer.W_O.bias is not None else "0.0f"
        yield f"  for (int i = 0; i < {L}; ++i)"
        yield f"    for (int m = 0; m < {M}; ++m) y[i * {M} + m] = {start};"
        yield f"  for (int g = 0; g < {layer.n_kv_heads}; ++g) {{"
        yield f"    for (int j = 0; j < {S}; ++j) {{"
        yield project(f"{n}_key[j]", "K", "g", D, f"{source} + j * {width}", width, "      ")
        yield from finished("k", f"{n}_key[j]", "j", "      ")
        yield project(f"{n}_value[j]", "V", "g", E, f"{source} + j * {width}", width, "      ")
        yield "    }"
        yield f"    for (int h = g * {group}; h < (g + 1) * {group}; ++h)"
        yield f"      for (int i = 0; i < {L}; ++i) {{"
        if layer.causal or layer.window or layer.alibi_slopes is not None:
            yield "        const int position = i" + (f" + {S - L};" if S >= L else f" - {L - S};")
        yield from self._bounds()
        yield project(f"{n}_query", "Q", "h", D, f"x + i * {M}", M, "        ")
        yield from finished("q", f"{n}_query", "i", "        ")
        yield from self._softmax()
        yield f"        for (int e = 0; e < {E}; ++e) {n}_out[e] = 0.0f;"
        yield "        for (int j = first; j < end; ++j)"
        yield f"          for (int e = 0; e < {E}; ++e) {n}_out[e] += {n}_weight[j] / total * {n}_value[j][e];"
        if layer.W_G is not None:
            row = "h" if layer.gate == "headwise" else f"(h * {E} + e)"
            gate = f"{n}_dot(x + i * {M}, {n}_W_G + {row} * {M}, {M})"
            yield f"        for (int e = 0; e < {E}; ++e) {n}_out[e] /= 1.0f + expf(-{gate});"
        yield f"        for (int m = 0; m < {M}; ++m)"
        yield f"          y[i * {M} + m] += {n}_dot({n}_out, {n}_W_O + (m * {layer.n_heads} + h) * {E}, {E});"
        yield "      }"
        yield "  }"

    def _bounds(self) -> Iterator[str]:
        """The keys that a row sees, from `first` to before `end`, none where first >= end."""
        left, right = self.layer.window or (None, None)
        right = 0 if self.layer.causal else right
        begun = "const int first = 0;" if left is None else "int first = 0;"
        yield f"        {begun}"
        if right is None:
            yield f"        const int end = {self.S};"
        else:
            yield f"        const int last = position + {right}, end = last < {self.S} ? last + 1 : {self.S};"
        if left is not None:
            yield f"        if (position - {left} > first) first = position - {left};"

    def _softmax(self) -> Iterator[str]:
        layer, n = self.layer, self.name
        scale = layer.d_head**-0.5 if layer.scale is None else layer.scale
        sink = f"{n}_sink[h]" if layer.sinks is not None else None
        yield f"        float top = {sink or '-INFINITY'};"
        yield "        for (int j = first; j < end; ++j) {"
        yield f"          float score = {n}_dot({n}_query, {n}_key[j], {layer.d_head}) * {_number(scale)};"
        if layer.softcap is not None:
            yield f"          score = {_number(layer.softcap)} * tanhf(score / {_number(layer.softcap)});"
        if layer.alibi_slopes is not None:
            yield f"          score -= {n}_slope[h] * (float)(position > j ? position - j : j - position);"
        yield f"          {n}_weight[j] = score;"
        yield "          if (score > top) top = score;"
        yield "        }"
        yield f"        float total = {f'expf({sink} - top)' if sink else '0.0f'};"
        yield f"        for (int j = first; j < end; ++j) total += {n}_weight[j] = expf({n}_weight[j] - top);"


def _brackets(shape: tuple[int, ...]) -> str:
    return "".join(f"[{size}]" for size in shape)


def _number(x: float) -> str:
    """A float32 that reads back as itself."""
    said = f"{x:.9g}"
    return (said if any(mark in said for mark in ".e") else f"{said}.0") + "f"
