"""The page in a real browser, from disk: right values, no request, no error, and texts that stay texts."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from multihead.show import page

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def html_file(fake_report, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page.render(fake_report), encoding="utf-8")
    return path


@pytest.fixture
def opened(chromium, html_file, request):
    """The page in a fresh tab; whatever it asks for or complains about fails the test at its end."""
    options = {"viewport": {"width": 1200, "height": 900}} | getattr(request, "param", {})
    context = chromium.new_context(**options)
    context.set_default_timeout(10_000)
    tab = context.new_page()
    seen = []
    tab.on("console", lambda message: seen.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: seen.append(f"error: {error}"))
    tab.on("dialog", lambda dialog: (seen.append("dialog"), dialog.dismiss()))
    tab.on("request", lambda asked: seen.append(asked.url))
    tab.goto(html_file.as_uri())
    yield tab
    context.close()
    assert seen == [html_file.as_uri()]


def choose(tab, head):
    tab.locator(f'.cell[data-head="{head}"]').click()


def hover(tab, row, column, cells):
    """Point at the middle of a cell and return what the page says about it."""
    box = tab.locator("#frame canvas").bounding_box()
    tab.locator("#frame canvas").hover(
        position={"x": (column + 0.5) * box["width"] / cells, "y": (row + 0.5) * box["height"] / cells}
    )
    return tab.locator("#read").inner_text()


def test_click_a_head_shows_its_map_with_the_exact_weights(opened, fake_report):
    for place, layer, head in [(0, 0, 1), (2, 5, 3)]:
        choose(opened, f"{layer}.{head}")
        title = opened.locator("#head-title").inner_text()
        assert title == f"Head {layer}.{head} · {fake_report.main_role[layer, head]}"
        weights = fake_report.sentence.weights[place, head]
        for row, column in [(0, 0), (4, 1), (10, 10), (10, 3), (7, 2)]:
            says = hover(opened, row, column, 11)
            assert says.endswith(f"weight {weights[row, column]:.4f}"), says
    assert "not visible" in hover(opened, 2, 3, 11)
    says = hover(opened, 4, 1, 11)
    assert re.match(r"it 4 → cat 1\b", says)


def test_colours_follow_the_weights(opened, fake_report):
    choose(opened, "0.1")
    read = """(cells) => {
        const canvas = document.querySelector("#frame canvas"), size = canvas.width / 11;
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return cells.map(([row, column]) => {
            const at = 4 * (Math.floor((row + .5) * size) * canvas.width + Math.floor((column + .5) * size));
            return [...data.slice(at, at + 4)];
        });
    }"""
    cells = [(row, column) for row in range(11) for column in range(row + 1)]
    *seen, unseen = opened.evaluate(read, [*cells, (0, 5)])
    light = [sum(pixel[:3]) for pixel in seen]
    weights = [fake_report.sentence.weights[0, 1][cell] for cell in cells]
    order = np.argsort(weights)
    assert np.all(np.diff(np.array(light)[order]) <= 0), "a heavier cell is darker"
    assert unseen[3] == 0, "an invisible cell is empty"


def test_passage_shows_pooled_cells(opened, fake_report):
    choose(opened, "2.4")
    opened.get_by_role("button", name="passage").click()
    says = hover(opened, 12, 5, 13)
    edges, tokens = fake_report.passage_edges, fake_report.tokens
    value = float(says.rsplit(" ", 1)[1])
    assert value == pytest.approx(float(fake_report.passage_map[1, 4, 12, 5]), abs=0.006)
    assert f"{edges[5]}–{edges[6] - 1}" in says and page.visible(tokens[edges[5]]) in says


def test_search_finds_a_head_and_a_role_and_says_when_it_does_not(opened):
    opened.locator("#query").fill("5.2")
    assert opened.locator("#head-title").inner_text().startswith("Head 5.2")
    opened.locator("#query").fill("induc")
    pressed = opened.locator('#legend button[aria-pressed="true"]')
    assert pressed.inner_text().split() == ["I", "induction", "5"]
    answers = {"99.1": "no head 99.1 in this report", "5.6": "no head 5.6", "<i>": "nothing named “<i>”"}
    for wanted, answer in answers.items():
        opened.locator("#query").fill(wanted)
        opened.locator("#query").press("Enter")
        assert answer in opened.locator("#answer").inner_text()


def test_filter_shows_the_scores_of_one_role(opened, fake_report):
    opened.locator("#legend button", has_text="broad").click()
    table = fake_report.roles[fake_report.roles.role == "broad"]
    for row in table.itertuples():
        if (row.layer, row.head) != (5, 6):
            cell = opened.locator(f'.cell[data-head="{row.layer}.{row.head}"]')
            assert cell.locator("text").text_content() == str(round(100 * row.score))
            assert ("labelled" in cell.get_attribute("class")) == row.label


def test_role_bars_and_statistics_are_those_of_the_head(opened, fake_report):
    choose(opened, "2.4")
    rows = fake_report.roles[(fake_report.roles.layer == 2) & (fake_report.roles["head"] == 4)]
    assert opened.locator("#bars .value").all_inner_texts() == [f"{score:.2f}" for score in rows.score]
    means = [np.nanmean(fake_report.statistics[name][1, 4]) for name in ("entropy", "max_weight")]
    assert opened.locator("#statistics .value").all_inner_texts() == [f"{mean:.2f}" for mean in means]


def test_keyboard_alone_reaches_heads_and_cells(opened, fake_report):
    opened.locator('.cell[tabindex="0"]').focus()
    before = opened.locator(".cell.chosen").get_attribute("data-head")
    opened.keyboard.press("ArrowRight")
    after = opened.locator(".cell.chosen").get_attribute("data-head")
    assert before == "0.2" and after == "2.2"
    assert opened.evaluate("document.activeElement.dataset.head") == "2.2"
    opened.locator("#frame").focus()
    for key in ["ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"]:
        opened.keyboard.press(key)
    weight = fake_report.sentence.weights[1, 2][2, 1]
    assert opened.locator("#read").inner_text().endswith(f"weight {weight:.4f}")


def test_zoom_keeps_the_values_under_the_pointer(opened, fake_report):
    opened.get_by_role("button", name="passage").click()
    choose(opened, "0.0")
    opened.locator("#frame").focus()
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("+")
    box = opened.locator("#frame canvas").bounding_box()
    says = hover(opened, 0, 0, 13)
    assert says.startswith(page.visible(fake_report.tokens[0])) and box["width"] > 300
    opened.keyboard.press("0")
    assert "heaviest weight" in hover(opened, 12, 0, 13)


def test_hostile_tokens_are_shown_as_text(opened, fake_report):
    assert opened.locator("img").count() == 0 and opened.locator("b b, #legend b").count() == 0
    assert opened.locator("h1").inner_text() == "tiny <model>"
    says = hover(opened, 8, 2, 11)
    assert "</script><img src=x onerror=alert(1)>" in says and "a␀␛[31m⟨202E⟩b" in says
    assert "&lt;" in hover(opened, 9, 9, 11)
    assert "שלום" in hover(opened, 3, 3, 11)


SCREENS = [(320, "dark"), (760, "light"), (1500, "dark")]


@pytest.mark.parametrize(
    "opened",
    [{"viewport": {"width": width, "height": 700}, "color_scheme": scheme} for width, scheme in SCREENS],
    indirect=True,
)
def test_nothing_overflows(opened):
    opened.get_by_role("button", name="passage").click()
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_data_is_strict_json_and_round_trips(fake_report):
    class Scripts(HTMLParser):
        def __init__(self):
            super().__init__()
            self.scripts, self.inside = [], False

        def handle_starttag(self, tag, attributes):
            self.inside = tag == "script"
            if self.inside:
                self.scripts.append([dict(attributes), ""])

        def handle_data(self, data):
            if self.inside:
                self.scripts[-1][1] += data

        def handle_endtag(self, tag):
            self.inside = False

    parser = Scripts()
    parser.feed(page.render(fake_report))
    (attributes, text), (other, _) = parser.scripts
    assert attributes == {"type": "application/json", "id": "data"} and other == {}
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text, parse_constant=pytest.fail) == page.content(fake_report)


def test_pooled_maps_are_within_the_stated_error(fake_report, monkeypatch):
    monkeypatch.setattr(page, "_EXACT_CELLS", 0)
    weights = np.linspace(0, 1, 1 * 1 * 101 * 101, dtype=np.float32).reshape(1, 1, 101, 101)
    weights[0, 0, 3, 5] = np.nan
    report: Any = SimpleNamespace(**vars(fake_report) | {"passage_map": weights, "passage_edges": range(102)})
    data = base64.b64decode(page.content(report)["views"][1]["data"])
    codes = np.frombuffer(data, np.uint8).reshape(weights.shape)
    assert codes[0, 0, 3, 5] == 255
    values = np.where(codes > 254, np.nan, (codes / 254.0) ** 2)
    assert np.nanmax(abs(values - weights)) < 0.004


def test_the_page_of_a_model_like_smollm2_stays_small(fake_report):
    layers, heads, tokens, cells = 30, 9, 13, 96
    report: Any = SimpleNamespace(**vars(fake_report))
    report.model = SimpleNamespace(**vars(fake_report.model) | {"n_heads": heads, "layers": layers})
    report.layers = list(range(layers))
    weights = np.zeros((layers, heads, tokens, tokens), np.float32)
    report.sentence = SimpleNamespace(tokens=["a"] * tokens, weights=weights)
    report.passage_map = np.zeros((layers, heads, cells, cells), np.float32)
    report.passage_edges = range(0, 8 * cells + 1, 8)
    report.statistics = {}
    assert len(page.render(report)) < 5e6


@pytest.mark.slow
def test_the_bundle_is_what_the_sources_build(tmp_path):
    if not shutil.which("node") or not (ROOT / "web/node_modules").is_dir():
        pytest.skip("needs node, and `npm ci` run in web/")
    subprocess.run(["node", "build.js", str(tmp_path)], cwd=ROOT / "web", check=True)
    assets = ROOT / "src/multihead/show/assets"
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert built == {path.name: path.read_bytes() for path in assets.iterdir()}
    assert b"Mike Bostock" in built["page.js"] and b"</script" not in built["page.js"].lower()
