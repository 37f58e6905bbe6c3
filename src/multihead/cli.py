"""The door: each command parses what was asked, calls, and prints. It computes nothing."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as error:
    raise SystemExit(f"multihead: this needs {error.name}: pip install 'multihead[look]'") from error

from multihead.interrupt import unwinding
from multihead.show.tokens import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from multihead.lessons import Lesson

# What a command line that does not parse raises; typer keeps click's in one place or another.
_WrongUsage: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
DEFAULT_PAGE = Path("multihead-report.html")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command line, inside what `__main__` sets up for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the shades shows question marks
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except _WrongUsage as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
        else:
            print(f"multihead: {visible(message)} (--help lists what there is)", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader, such as head, has what it wanted. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"multihead {importlib.metadata.version('multihead')}")
        raise typer.Exit


@app.callback()
def multihead(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Multi-head attention that you can see through."""


@app.command("look", epilog="Exit codes: 0 done, 2 input that cannot be used (one line says why), 130 Ctrl-C.")
def look_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="An alias (smollm2, minilm), a folder, a .gguf file, or a name on the hub."
        ),
    ],
    source: Annotated[str, typer.Argument(metavar="-", help="- reads the text from standard input.")] = "",
    text: Annotated[str | None, typer.Option(help="The text to read; else a passage that comes along.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with the text to read.")] = None,
    layers: Annotated[str, typer.Option(help="Only these layers: 0,5-8.")] = "",
    heads: Annotated[str, typer.Option(help="Only these heads, beside the layers: 18.6,16.0.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table of roles as CSV.")] = None,
    html: Annotated[Path, typer.Option(help="Where the page goes.")] = DEFAULT_PAGE,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Cut the text to this many tokens.")] = None,
) -> None:
    """Show what every attention head of a model does."""
    reading = _text(source, text, file)
    chosen_layers, chosen_heads = _layers(layers), _heads(heads)
    outputs = _outputs(json, csv, html)
    with _progress() as tell:
        tell("loading PyTorch", None)
        from multihead.heads.errors import ModelError
        from multihead.heads.report import ReportError, look

        try:
            with unwinding():
                report = look(
                    model,
                    reading,
                    layers=chosen_layers,
                    heads=chosen_heads,
                    max_tokens=max_tokens,
                    progress=tell,
                )
                tell("writing", None)
                if json is not None:
                    report.to_json(json)
                if csv is not None:
                    report.to_csv(csv)
                report.to_html(html)
        except ModuleNotFoundError as error:
            _refuse(f"this needs {error.name}: pip install 'multihead[look]'")
        except (ModelError, ReportError) as error:
            _refuse(str(error))
    from multihead.show.text import summary

    _show(summary(report), outputs)


@app.command(
    "bench",
    epilog="Exit codes: 0 done, 1 a candidate's numbers are wrong (its ratio is left out), 2 input that cannot be used,"
    " 130 Ctrl-C.",
)
def bench_command(
    only: Annotated[
        str, typer.Option(help="Only these sections: prefill,decode,window,small,half,paged,int8,mla,width,train.")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.0, help="Calling time of each candidate on each shape.")] = 1.0,
    peers: Annotated[str, typer.Option(help="Only these peers: torch,eager,flex,ort-mha,ort-gqa,jax.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
) -> None:
    """Measure attention against the libraries that are installed, in one run."""
    if json is not None:
        _check_writable(json)
    out = sys.stdout

    def show(text: str) -> None:
        # On a terminal rich puts the line above its bar; a pipe gets it straight.
        print(text, file=None if out.isatty() else out, flush=True)

    with _progress() as tell:
        tell("loading PyTorch", None)
        from multihead.bench.peers import peers as peers_of
        from multihead.bench.run import run
        from multihead.bench.shapes import sections as sections_of
        from multihead.bench.table import Table
        from multihead.heads.files import write_whole

        try:
            sections, chosen = sections_of(_names(only)), peers_of(_names(peers))
        except ValueError as error:
            _refuse(str(error))
        with unwinding():
            report = run(sections, chosen, seconds=seconds, tell=tell, listener=Table(show))
            if json is not None:
                write_whole(json, report.as_json())
    for name, reason in report.absent.items():
        print(f"without {name}: {reason}")
    if json is not None:
        print(json)
    for wrong in report.wrong:
        print(f"multihead: {visible(wrong)}", file=sys.stderr)
    if report.wrong:
        raise typer.Exit(1)


@app.command("plan", epilog="Exit codes: 0 done, 2 input that cannot be used (one line says why), 130 Ctrl-C.")
def plan_command(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Known models (gpt2, llama-3-8b, ...), config.json files or folders."),
    ],
    context: Annotated[
        str | None, typer.Option(help="Tokens of a text: 8192, 128K; else as the model was made.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Texts at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="How weights are kept: f32, bf16, f16, fp8, int8, int4.")] = "bf16",
    cache_dtype: Annotated[str | None, typer.Option(help="How keys and values are kept; else as weights are.")] = None,
    kv_heads: Annotated[str, typer.Option(help="Numbers of key/value heads to compare: 1,8,32.")] = "",
    memory: Annotated[str | None, typer.Option(help="Room for weights and cache: 24GB; else the device's.")] = None,
    device: Annotated[
        str, typer.Option(help="Whose peaks: a100, h100, h200, l40s, mi300x, rtx-4090, or here to measure.")
    ] = "h100",
    flops: Annotated[str | None, typer.Option(help="FLOP/s in place of the device's: 989T.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Bytes/s in place of the device's: 3.35T.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the figures as CSV.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them: .png, .svg or .pdf.")] = None,
) -> None:
    """Tell what a model costs: parameters, FLOPs, bytes, the cache, what bounds it and what fits."""
    from multihead.accounting.fields import ConfigError
    from multihead.accounting.plan import plan, write_csv, write_json
    from multihead.show import costs
    from multihead.show import plot as pictures

    outputs = _outputs(json, csv, plot)
    if plot is not None and plot.suffix.lower() not in pictures.SUFFIXES:
        _refuse(f"--plot: expected a name that ends in {', '.join(pictures.SUFFIXES)}, got {plot}")
    heads = _counts("kv-heads", kv_heads) if kv_heads else None
    try:
        plans = [
            plan(
                model,
                context=context,
                batch=batch,
                dtype=dtype,
                cache_dtype=cache_dtype,
                kv_heads=heads,
                device=device,
                flops=flops,
                bandwidth=bandwidth,
                memory=memory,
            )
            for model in models
        ]
        if json is not None:
            write_json(plans, json)
        if csv is not None:
            write_csv(plans, csv)
        if plot is not None:
            pictures.draw_costs(plans, plot)
    except ModuleNotFoundError as error:
        _refuse(f"this needs {error.name}: pip install 'multihead[plot]'")
    except ConfigError as error:
        _refuse(str(error))
    _show(costs.report(plans[0]) if len(plans) == 1 else costs.comparison(plans, heads is not None), outputs)


@app.command("params", epilog="Exit codes: 0 done, 2 input that cannot be used (one line says why), 130 Ctrl-C.")
def params_command(
    d_model: Annotated[int, typer.Option(help="Width of the model.")] = 512,
    heads: Annotated[str, typer.Option(help="Numbers of heads to compare.")] = "1,2,4,8,16",
    bias: Annotated[bool, typer.Option("--bias", help="Give the four projections biases.")] = False,
    dtype: Annotated[str, typer.Option(help="How parameters are kept: f32, bf16, f16, fp8, int8, int4.")] = "f32",
) -> None:
    """Show that neither parameters nor multiplications depend on the number of heads."""
    from multihead.accounting.fields import ConfigError
    from multihead.accounting.layer import layer_costs
    from multihead.show.costs import layer_table

    try:
        rows = layer_costs(d_model, _counts("heads", heads), bias=bias, dtype=dtype)
    except ConfigError as error:
        _refuse(str(error))
    _show(layer_table(rows), [])


@app.command("export-c", epilog="Exit codes: 0 done, 2 input that cannot be used (one line says why), 130 Ctrl-C.")
def export_c_command(
    layer: Annotated[
        Path,
        typer.Argument(
            metavar="LAYER.safetensors",
            help="A layer that mh.nn.save wrote, or its state dict; --heads is needed for the latter.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The C file to write.")],
    length: Annotated[int, typer.Option(help="L, the tokens that the C function takes.")] = 16,
    context_length: Annotated[int | None, typer.Option(help="S, the tokens of a context, for cross-attention.")] = None,
    name: Annotated[str, typer.Option(help="Name of the C function.")] = "attention",
    heads: Annotated[int | None, typer.Option(help="H, where the file does not say.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="G, where the file does not say.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Causal, where the file does not say.")] = False,
) -> None:
    """Write a layer as one C99 file for small devices: no heap, one head after another."""
    from multihead.heads.files import write_whole
    from multihead.nn import c_source, load

    _outputs(output)
    said = {"n_heads": heads, "n_kv_heads": kv_heads, "causal": causal or None}
    try:
        made = load(layer, **{option: value for option, value in said.items() if value is not None})
        source = c_source(made, length, context_length, name)
        write_whole(output, source.text)
    except ModuleNotFoundError as error:
        _refuse(f"this needs {error.name}: pip install 'multihead[hf]'")
    except (OSError, TypeError, ValueError) as error:
        hint = "; --heads says it" if str(error).startswith("n_heads: expected the number") else ""
        _refuse(f"{error}{hint}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{made.extra_repr()}, {length} tokens", markup=False)
    console.print(f"RAM    {source.ram:,} bytes of work space, static; x and y are the caller's")
    console.print(f"flash  {source.flash:,} bytes of weights and tables; code comes on top")
    console.print(f"wrote {output}", markup=False)


@app.command("lesson", epilog="Exit codes: 0 done, 2 input that cannot be used (one line says why), 130 Ctrl-C.")
def lesson_command(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A lesson; none lists them.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Run all lessons, one after another.")] = False,
    code: Annotated[bool, typer.Option("--code", help="Show the code that makes the numbers too.")] = False,
    pictures: Annotated[Path | None, typer.Option(help="A folder for the lesson's pictures, as SVG.")] = None,
) -> None:
    """Run a lesson of the chapter on multi-head attention."""
    from multihead.heads.models import ALIASES
    from multihead.lessons import LESSONS, terminal

    if name and every:
        _refuse("give a lesson or --all, not both")
    if name and name not in LESSONS:
        _refuse(f"no lesson {name!r}; there are: {', '.join(LESSONS)}")
    if pictures is not None and not pictures.is_dir():
        _refuse(f"--pictures: expected a folder, got {pictures}")
    if not name and not every:
        missing = {alias: found.install for alias, found in ALIASES.items() if found.find() is None}
        _show(terminal.contents(LESSONS.values(), missing), [])
        return
    failed = [_run_lesson(lesson, code, pictures) for lesson in (LESSONS.values() if every else [LESSONS[name]])]
    if any(failed):
        raise typer.Exit(2)


def _run_lesson(lesson: Lesson, code: bool, pictures: Path | None) -> bool:
    """Print a lesson while it runs; says whether it had to stop."""
    from rich.text import Text

    from multihead.heads.errors import ModelError
    from multihead.heads.files import write_whole
    from multihead.lessons import Cell, terminal

    console = Console(highlight=False)
    console.on_broken_pipe = _broken_pipe
    console.width = min(console.width, terminal.WIDTH)
    console.print(terminal.opening(lesson))

    def before(cell: Cell) -> None:
        console.print(terminal.prose(cell))
        if code and cell.code:
            console.print(terminal.code(cell))

    try:
        with unwinding():
            for step in lesson.run(before=before):
                if step.output.strip():
                    console.print(terminal.output(step.output), soft_wrap=True)
                if pictures is not None:
                    for picture in step.pictures:
                        write_whole(pictures / picture.name, picture.svg)
                        console.print(Text(f"\n  {pictures / picture.name}"), soft_wrap=True)
    except ModuleNotFoundError as error:
        stopped = f"this needs {error.name}: pip install 'multihead[look]'"
    except (ModelError, OSError) as error:
        stopped = str(error)
    else:
        console.print()
        return False
    console.print()
    print(f"multihead: lesson {lesson.name} stops here: {visible(stopped)}", file=sys.stderr)
    return True


def _names(listed: str) -> list[str] | None:
    """Return the names of a list such as prefill,decode; None for all."""
    return [name.strip() for name in listed.split(",")] if listed else None


def _outputs(*paths: Path | None) -> list[Path]:
    """Return the files that are wanted, after a check that each can be written."""
    outputs = [path for path in paths if path is not None]
    for path in outputs:
        _check_writable(path)
    if len({path.resolve() for path in outputs}) < len(outputs):
        _refuse("two outputs have the same path")
    return outputs


def _counts(option: str, listed: str) -> list[int]:
    """Return the numbers of a list such as 1,8,32."""
    parts = [part.strip() for part in listed.split(",")]
    if not all(re.fullmatch(r"\d{1,6}", part, re.ASCII) for part in parts):
        _refuse(f"--{option}: expected numbers such as 1,8,32, got {listed!r}")
    return [int(part) for part in parts]


def _show(shown: RenderableType, outputs: list[Path]) -> None:
    """Print what there is to see, then the files that were written, a line each."""
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    console.on_broken_pipe = _broken_pipe  # rich would end with code 1
    console.print(shown)
    for path in outputs:
        console.print(Text(str(path)), soft_wrap=True)


def _broken_pipe() -> NoReturn:
    raise BrokenPipeError


def _text(source: str, text: str | None, file: Path | None) -> str | None:
    """Return the text that was asked for, None for the passage that comes along."""
    if source not in ("", "-"):
        _refuse(f"unexpected argument {source!r}: a text is given by --text T, --file F or - (standard input)")
    if (source == "-") + (text is not None) + (file is not None) > 1:
        _refuse("give one text: --text, --file or -")
    if file is None and source != "-":
        found = text
    else:
        name = "standard input" if file is None else str(file)
        try:
            found = (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode("utf-8-sig")
        except OSError as error:
            _refuse(f"cannot read {name}: {error.strerror or error}")
        except UnicodeDecodeError as error:
            _refuse(f"cannot read {name}: it is not UTF-8 text (byte {error.start})")
    if found is not None and not found.strip():
        _refuse("the text is empty")
    return found


def _layers(listed: str) -> list[int] | None:
    """Return the layers of a list such as 0,5-8; None for all."""
    if not listed:
        return None
    layers: list[int] = []
    for part in listed.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        if not found or int(found[1]) > int(found[2] or found[1]):
            _refuse(f"--layers: expected numbers and ranges such as 0,5-8, got {listed!r}")
        layers += range(int(found[1]), int(found[2] or found[1]) + 1)
    return sorted(set(layers))


def _heads(listed: str) -> list[str] | None:
    """Return the heads of a list such as 18.6,16.0; None for all."""
    if not listed:
        return None
    heads = [part.strip() for part in listed.split(",")]
    if not all(re.fullmatch(r"\d{1,6}\.\d{1,6}", head, re.ASCII) for head in heads):
        _refuse(f"--heads: expected layer.head, such as 18.6,16.0, got {listed!r}")
    return heads


def _check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, before the work rather than after it."""
    folder = path.resolve().parent
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if path.exists() and not path.is_file():
            return
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _refuse(f"cannot write {path}: {error.strerror or error}")


@contextmanager
def _progress() -> Iterator[Callable[[str, float | None], None]]:
    """Show stages of work on standard error, where that is a terminal; gives the function that tells one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None)

        def tell(stage: str, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            progress.update(task, description=stage, total=total, completed=fraction or 0.0)

        yield tell


def _refuse(message: str) -> NoReturn:
    """End with code 2 and one line on standard error."""
    print(f"multihead: {visible(' '.join(message.split()))}", file=sys.stderr)
    raise typer.Exit(2)
