"""Makes the two pictures of the README from a real look; needs playwright and a Chromium."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright
from rich.console import Console

import multihead as mh
from multihead.show.text import summary

HERE = Path(__file__).parent


def terminal(report: mh.HeadReport, path: Path) -> None:
    """Draw what `multihead look smollm2` prints on 100 columns, without the font that rich would fetch."""
    console = Console(width=100, record=True, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(summary(report))
    svg = console.export_svg(title="multihead look smollm2")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    path.write_text(svg.replace("Fira Code, monospace", "monospace"), encoding="utf-8")


def page(report: mh.HeadReport, path: Path) -> None:
    """Photograph the page with the head that leads from "it" to "cat" chosen and the cursor on that cell."""
    best = report.links.iloc[0]
    tokens = [token.strip() for token in report.sentence.tokens]
    row, column = tokens.index(best["query"]), tokens.index(best["key"])
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        report.to_html(Path(folder) / "report.html")
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("MULTIHEAD_CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.goto((Path(folder) / "report.html").as_uri())
        tab.locator(f'.cell[data-head="{best["layer"]}.{best["head"]}"]').click()
        canvas = tab.locator("#frame canvas")
        size = canvas.evaluate("canvas => canvas.clientWidth") / len(tokens)
        canvas.hover(position={"x": (column + 0.5) * size, "y": (row + 0.5) * size})
        tab.screenshot(path=path, full_page=True)
        browser.close()


if __name__ == "__main__":
    found = mh.look("smollm2")
    terminal(found, HERE / "look-terminal.svg")
    page(found, HERE / "report.png")
