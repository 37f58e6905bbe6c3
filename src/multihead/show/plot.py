"""Pictures for papers and pages: matplotlib figures, written as PNG, SVG or PDF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from multihead.accounting.count import cache_bytes
from multihead.accounting.model import PARTS
from multihead.accounting.plan import Plan, room

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colours: apart for every kind of colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = {"MHA": "-", "GQA": "--", "MQA": ":", "MLA": "-."}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "multihead",  # the same picture is the same file
}


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of its suffix; the same figure gives the same bytes."""
    suffix = Path(path).suffix.lower()
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
    figure.savefig(path, dpi=160, metadata=metadata)


def draw_costs(plans: Sequence[Plan], path: str | Path) -> None:
    """Draw where the parameters are, how the cache grows with the text, and the roofline of prefill and decoding.

    Args:
        plans: at least one; the first gives the device.
        path: ends in .png, .svg or .pdf.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        axes = figure.subplots(1, 3)
        _parameters(axes[0], plans)
        _caches(axes[1], plans)
        _roofline(axes[2], plans)
        save(figure, path)


class Measured(Protocol):
    """What one text took by one way, as `bench.growth.Point` has it."""

    @property
    def way(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def bytes(self) -> int: ...


def draw_growth(points: Sequence[Measured], path: str | Path) -> None:
    """Draw time and memory against the length of the text, beside lines that grow as L * S and as L + S.

    Args:
        points: at least one; the first of the longest text is what the lines go through.
        path: ends in .png, .svg or .pdf.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    lengths = sorted({point.tokens for point in points})
    last = next(point for point in points if point.tokens == lengths[-1])
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        time, memory = figure.subplots(1, 2)
        for way, colour in zip(dict.fromkeys(point.way for point in points), _COLOURS, strict=False):
            of_way = sorted((point for point in points if point.way == way), key=lambda point: point.tokens)
            tokens = [point.tokens for point in of_way]
            time.plot(tokens, [point.seconds for point in of_way], "o-", color=colour, markersize=4, label=way)
            memory.plot(tokens, [point.bytes / 1e6 for point in of_way], "o-", color=colour, markersize=4, label=way)
        squares = [last.seconds * (n / last.tokens) ** 2 for n in lengths]
        time.plot(lengths, squares, ":", color="#888888", label="grows as L * S")
        memory.plot(
            lengths, [last.bytes / 1e6 * n / last.tokens for n in lengths], ":", color="#888888", label="grows as L + S"
        )
        time.set(title="Time, seconds", xlabel="tokens")
        memory.set(title="Memory beside the inputs, MB", xlabel="tokens")
        for axes in (time, memory):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
            axes.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
            axes.legend(fontsize=8)
        save(figure, path)


def _parameters(axes: Axes, plans: Sequence[Plan]) -> None:
    names = [plan.model.name for plan in plans]
    left = [0.0] * len(plans)
    for part, colour in zip(PARTS, _COLOURS, strict=False):
        widths = [plan.parameters(part) / plan.parameters() for plan in plans]
        axes.barh(names, widths, left=left, color=colour, label=part, height=0.6)
        for row, (width, start) in enumerate(zip(widths, left, strict=True)):
            if width > 0.08:
                axes.text(start + width / 2, row, f"{width:.0%}", ha="center", va="center", color="white", fontsize=8)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, plan in enumerate(plans):
        axes.text(0, row - 0.36, f"{plan.parameters():,}", fontsize=8, color="#444444", va="bottom")
    axes.set(title="Parameters", xlim=(0, 1), ylim=(max(len(plans), 2) - 0.4, -0.6))
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0), fontsize=8, handlelength=1, columnspacing=1)


def _caches(axes: Axes, plans: Sequence[Plan]) -> None:
    longest = max(4 * plan.context for plan in plans)
    contexts = [2**i for i in range(7, longest.bit_length() + 1)]
    for plan, colour in zip(plans, _COLOURS * len(plans), strict=False):
        for variant in plan.variants if len(plans) == 1 else [plan.own]:
            if not variant.cache:
                continue
            sizes = [cache_bytes(variant.model, n, plan.batch, plan.types) / 2**30 for n in contexts]
            width = 2.2 if variant.own else 1.2
            kind = variant.kind if variant.kind == "MLA" else f"{variant.kind}, G = {variant.n_kv_heads}"
            label = kind if len(plans) == 1 else f"{plan.model.name} ({kind})"
            axes.plot(contexts, sizes, _DASHES[variant.kind], color=colour, linewidth=width, label=label)
            if variant.own:
                axes.plot([plan.context], [variant.cache / 2**30], "o", color=colour, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.axhline(plans[0].memory / 2**30, color="#888888", linewidth=0.8)
    axes.annotate(
        room(plans[0].memory), (contexts[0], plans[0].memory / 2**30), fontsize=8, va="bottom", color="#666666"
    )
    axes.set_xticks(contexts[::2], [f"{n // 1024}K" if n >= 1024 else str(n) for n in contexts[::2]])
    texts = f"{plans[0].batch} text{'s' * (plans[0].batch > 1)}, {plans[0].types.cache}"
    axes.set(title=f"Cache of keys and values, GiB ({texts})", xlabel="tokens")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7.5)


def _roofline(axes: Axes, plans: Sequence[Plan]) -> None:
    device, types = plans[0].device, plans[0].types
    ridge = device.peak(types) / device.bandwidth
    passes = [
        (plan.model.name, name, work, colour)
        for plan, colour in zip(plans, _COLOURS * len(plans), strict=False)
        for name, work in (("prefill", plan.own.prefill), ("decode", plan.own.decode))
        if work is not None
    ]
    low = min(0.5, *(work.intensity / 2 for _, _, work, _ in passes))
    high = max(4 * ridge, *(2 * work.intensity for _, _, work, _ in passes))
    reached = [intensity * device.bandwidth / 1e12 for intensity in (low, ridge)]
    axes.plot([low, ridge, high], [*reached, device.peak(types) / 1e12], color="#444444", linewidth=1.2)
    for model, name, work, colour in passes:
        height = min(device.peak(types), work.intensity * device.bandwidth) / 1e12
        label = name if len(plans) == 1 else f"{model}, {name}"
        axes.plot([work.intensity], [height], {"prefill": "s", "decode": "o"}[name], color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.set(title=f"Most TFLOP/s on {device.name}", xlabel="FLOPs for each byte", xlim=(low, high))
    axes.annotate(f"ridge {ridge:.0f}", (ridge, reached[1]), fontsize=8, ha="right", va="bottom", color="#666666")
    axes.legend(fontsize=7.5, loc="lower right")
