"""The costs of models for a terminal: every function returns something rich can print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from multihead.accounting.bounds import Bound
from multihead.accounting.count import Work
from multihead.accounting.layer import LayerCosts
from multihead.accounting.model import PARTS, Weight
from multihead.accounting.plan import Plan, Variant, room, size

from .text import heading
from .tokens import visible

CONVENTIONS = (
    "A multiply-add is 2 FLOPs. Matrix products, scores and weighted values are counted, of the keys that a query "
    "sees; norms, softmax and activation functions are not. Prefill reads the context and gives the last token's "
    "output; the decoded token is the last of the context. Bytes are the least that pass through memory: each "
    "weight and each cached key and value once, inputs and outputs of products once. 1 GiB is 2^30 bytes, 1 GB is "
    "10^9. The least times are those of the device's peaks, which no program reaches; activations and the "
    "program's own memory are not in what fits."
)


def report(plan: Plan) -> RenderableType:
    """Return everything `multihead plan` prints about one model, in reading order."""
    parts: list[RenderableType] = [model_line(plan), Text()]
    parts += [
        heading(f"Parameters, {size(plan.own.weight_bytes)} in {plan.types.weights}"),
        Text(),
        matrices(plan),
        Text(),
    ]
    if plan.own.cache:
        parts += [heading(f"The cache of keys and values, {_texts(plan)}"), Text(), caches(plan), Text()]
    device = plan.device
    peaks = f"{scaled(device.peak(plan.types))}FLOP/s, {scaled(device.bandwidth)}B/s"
    parts += [heading(f"The work, {_texts(plan)}, on {device.name} ({peaks})"), Text(), works(plan), Text()]
    return Group(*parts, remarks(plan), Text(), Text(CONVENTIONS, style="dim"))


def comparison(plans: Sequence[Plan], variants: bool = False) -> RenderableType:
    """Return several models beside each other, a row each; with `variants` a row for each way of sharing.

    `batch` is the largest that fits, `decode` the least time of one decoded token.
    """
    table = _table("model", "sharing", "parameters", "cache\na token", "cache", "batch", "decode")
    for plan in plans:
        for variant in plan.variants if variants else [plan.own]:
            table.add_row(
                visible(plan.model.name),
                _sharing(variant),
                f"{variant.parameters:,}",
                size(variant.cache_token) if variant.cache else "none",
                size(variant.cache) if variant.cache else "none",
                "no limit" if variant.largest_batch is None else f"{variant.largest_batch:,}",
                "" if variant.decode_bound is None else seconds(variant.decode_bound.seconds),
                style="bold" if variant.own and variants else "",
            )
    told = [
        part for plan in plans for part in (Text(f"{plan.model.name}, {_texts(plan)}", "bold"), remarks(plan), Text())
    ]
    return Group(table, Text(), *told, Text(CONVENTIONS, style="dim"))


def model_line(plan: Plan) -> Text:
    """Return the model in one line: depth, heads, width, and the class that has exactly these parameters."""
    model, attention = plan.model, plan.model.attention
    kv = f"{attention.n_kv_heads} key/value head{'s' * (attention.n_kv_heads != 1)}"
    heads = {"MHA": f"{attention.n_heads} heads (MHA)", "MLA": f"{attention.n_heads} heads over one latent (MLA)"}
    rest = [
        f"{model.layers} layers",
        heads.get(attention.kind, f"{attention.n_heads} query heads, {kv} ({attention.kind})"),
        f"d_head {attention.d_head}",
        f"d_model {model.d_model}",
        f"counted as {model.counted_as}",
    ]
    return Text(visible(model.name), style="bold").append(" · " + " · ".join(rest), style="not bold")


def matrices(plan: Plan) -> RenderableType:
    """Return the parameters by matrix, by part and in all."""
    table = _table("", "matrix", "shape", "each layer", "layers", "parameters", words=("", "matrix"))
    for block in plan.model.blocks:
        rows = [*_grouped(block.weights)]
        if block.attentions:
            rows.append(("all of it", "", sum(weight.parameters for weight in block.weights)))
        for index, (name, shape, count) in enumerate(rows):
            shown = Text("" if index else block.name, style="dim")
            table.add_row(shown, name, shape, f"{count:,}", f"{block.layers}", f"{count * block.layers:,}")
    table.add_section()
    for part in PARTS:
        table.add_row("", part, "", "", "", f"{plan.parameters(part):,}", style="dim")
    table.add_row("", "in all", "", "", "", f"{plan.own.parameters:,}", style="bold")
    if plan.model.has_experts:
        table.add_row("", "active", "", "", "", f"{plan.own.active:,}")
    return table


def caches(plan: Plan) -> RenderableType:
    """Return the cache and what fits beside the weights, a column for each way of sharing keys and values."""
    table = _table("", *(_sharing(variant) for variant in plan.variants), words=("",))
    for index, variant in enumerate(plan.variants):
        table.columns[index + 1].style = "bold" if variant.own else ""
    figures = {
        "parameters": lambda v: f"{v.parameters:,}",
        "a token, a layer": lambda v: size(v.cache_token_layer),
        "a token": lambda v: size(v.cache_token),
        "a layer": lambda v: size(v.cache_layer),
        "in all": lambda v: size(v.cache),
        f"largest context in {room(plan.memory)}": lambda v: _largest(v.largest_context),
        f"largest batch in {room(plan.memory)}": lambda v: _largest(v.largest_batch),
    }
    for name, figure in figures.items():
        table.add_row(name, *(figure(variant) for variant in plan.variants))
    return table


def works(plan: Plan) -> RenderableType:
    """Return the work of prefill and of one decoded token, a row for each way of sharing keys and values.

    `scores` is the share of scores and weighted values in the FLOPs, `cache` that of the cache in the bytes,
    `per byte` the FLOPs for each byte, `at least` the least time.
    """
    table = _table("pass", "FLOPs", "scores", "bytes", "cache", "per byte", "at least", "bound", words=("pass",))
    for name in ("prefill", "decode"):
        for variant in plan.variants:
            work, least = getattr(variant, name), getattr(variant, f"{name}_bound")
            if work is not None:
                style = "bold" if variant.own else ""
                table.add_row(f"{name} {_sharing(variant)}", *_work(work, least), style=style)
    return table


def remarks(plan: Plan) -> Text:
    """Return what the figures say, a line each."""
    return Text("\n".join(visible(remark) for remark in plan.remarks()), style="yellow")


def layer_table(rows: Sequence[LayerCosts]) -> RenderableType:
    """Return one layer's costs for several numbers of heads, as `multihead params` prints them.

    A product is a multiply-add; a pair is a query and a key that it sees.
    """
    products = "products\n"
    table = _table(
        "heads", "d_head", "biases", "parameters", "bytes", f"{products}a token", f"{products}a pair", "weights\na pair"
    )
    for row in rows:
        figures = (row.heads, row.d_head, row.biases, row.parameters, row.bytes)
        more = (row.token_multiply_adds, row.pair_multiply_adds, row.pair_weights)
        table.add_row(*(f"{figure:,}" for figure in (*figures, *more)))
    return Group(table, Text(), *(Text(line) for line in _layer_remarks(rows)))


def scaled(number: float) -> str:
    """Return a number with a decimal prefix: 1.83 P."""
    for unit, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {letter}" if number < 999.5 * unit else f"{number / unit:.0f} {letter}"
    return f"{number:.0f} "


def seconds(time: float) -> str:
    """Return a time in the unit that fits it."""
    for unit, letters in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if time >= unit:
            return f"{time / unit:.3g} {letters}" if time < 999.5 * unit else f"{time / unit:,.0f} {letters}"
    return f"{time / 1e-9:.3g} ns"


def _layer_remarks(rows: Sequence[LayerCosts]) -> Iterator[str]:
    row = rows[0]
    yield (
        f"Whatever the number of heads: 4 × d_model² = {row.weights:,} weights, as many products (multiply-adds) "
        f"a token, and 2 × d_model = {row.pair_multiply_adds:,} for each pair of a query and a key that it sees."
    )
    if row.biases:
        share = 100 * row.biases / row.weights
        yield f"Biases add 4 × d_model = {row.biases:,} parameters, {share:.2g}%."
    yield "What grows with the heads is the number of attention weights: one a head for each pair."


def _grouped(weights: Sequence[Weight]) -> Iterator[tuple[str, str, int]]:
    """Give name, shape and count of each matrix, and vectors of one part together."""
    vectors: dict[str, list[Weight]] = {}
    for weight in weights:
        if len(weight.shape) == 1:
            vectors.setdefault("norms" if weight.part == "norms" else "biases", []).append(weight)
            continue
        copies = f"{weight.copies}×" if weight.copies > 1 else ""
        name = f"{weight.name} = tokens" if weight.tied else weight.name
        yield name, copies + "×".join(map(str, weight.shape)), weight.parameters
    for name, found in vectors.items():
        yield name, "", sum(weight.parameters for weight in found)


def _work(work: Work, least: Bound) -> Iterator[str]:
    yield scaled(work.flops)
    yield f"{work.attention_flops / work.flops:.0%}"
    yield size(work.bytes)
    yield f"{work.cache_bytes / work.bytes:.0%}"
    yield f"{work.intensity:,.1f}" if work.intensity < 100 else f"{work.intensity:,.0f}"
    yield seconds(least.seconds)
    yield least.limit


def _sharing(variant: Variant) -> str:
    heads = "" if variant.kind == "MLA" else f" {variant.n_kv_heads}"
    return f"{variant.kind}{heads}"


def _largest(number: int | None) -> str:
    return "no limit" if number is None else f"{number:,}" if number else "does not fit"


def _texts(plan: Plan) -> str:
    texts = f"{plan.batch:,} texts of " if plan.batch > 1 else ""
    types = (
        plan.types.weights
        if plan.types.weights == plan.types.cache
        else f"{plan.types.weights}, cache {plan.types.cache}"
    )
    return f"{texts}{plan.context:,} tokens, {types}"


def _table(*columns: str, words: Sequence[str] = ("model", "sharing")) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        # On a narrow terminal names break into lines; figures are never cut before them.
        names = name in ("", "model", "matrix")
        table.add_column(name, justify="left" if name in words else "right", no_wrap=not names)
    return table
