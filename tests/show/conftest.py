"""A small report with hostile tokens and known numbers, and the browser that opens its page."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest

TOKENS = [
    "The",
    "cat",
    "</script><img src=x onerror=alert(1)>",
    "שלום",
    "it",
    "👩‍🚀",
    "日本",
    "mat\"'",
    "a\x00\x1b[31m\u202eb",
    "&lt;",
    ".",
]
LAYERS, HEADS = [0, 2, 5], 7
ROLES = ["previous", "offset(3)", "induction", "broad", "<b>new & odd</b>"]


@pytest.fixture(scope="session")
def fake_report():
    """Return a causal model, 3 of 6 layers, 7 heads, 11 tokens; a passage of 23 tokens in 13 cells."""
    rng = np.random.default_rng(3)
    length, cells = len(TOKENS), 13
    visible = np.tril(np.ones((length, length)))
    weights = rng.gamma(0.3, size=(len(LAYERS), HEADS, length, length)) * visible
    weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    roles = []
    for place, layer in enumerate(LAYERS):
        for head in range(HEADS):
            for number, role in enumerate(ROLES):
                score = float(rng.uniform(0, 0.25)) if (place + head) % 5 != number else 0.9 - 0.05 * place
                roles.append((layer, head, role, score, 0.1, (score - 0.1) / 0.9, score > 0.5))
    table = pandas.DataFrame(roles, columns=["layer", "head", "role", "score", "baseline", "lift", "label"])
    main = {(row.layer, row.head): row.role for row in table[table.label].itertuples()}
    main.update({(0, 6): "", (5, 1): ""})
    found = [(2, 3, "it", "cat", 0.61), (5, 2, "it", "cat", 0.4), (2, 3, "it", "mat", 0.23)]
    links = pandas.DataFrame(found, columns=["layer", "head", "query", "key", "weight"])
    passage = np.tril(rng.uniform(0, 1, size=(len(LAYERS), HEADS, cells, cells))).astype(np.float16)
    names = ("entropy", "max_weight", "lse")
    statistics = {name: rng.uniform(0, 3, size=(len(LAYERS), HEADS, 23)) for name in names}
    statistics["entropy"][:, :, 0] = np.nan
    return SimpleNamespace(
        model=SimpleNamespace(
            name="tiny <model>",
            source="",
            layers=6,
            n_heads=HEADS,
            n_kv_heads=1,
            d_head=11,
            kind="MQA",
            causal=True,
            architecture="LlamaForCausalLM",
            parameters=134_515_008,
            max_positions=None,
        ),
        text="hostile",
        tokens=(TOKENS * 3)[:23],
        roles=table,
        statistics=statistics,
        sentence=SimpleNamespace(tokens=TOKENS, weights=weights),
        passage_map=passage,
        passage_edges=np.linspace(0, 23, cells + 1).round().astype(int),
        links=links,
        notes=["the text was cut to 23 of its <31> tokens"],
        seconds=1.25,
        peak_memory=1_200_000_000,
        layers=LAYERS,
        heads={f"{layer}.{head}" for layer in LAYERS for head in range(HEADS)} - {"5.6"},
        main_role=main,
    )


@pytest.fixture(scope="session")
def chromium():
    """A headless Chromium, or a skip that says what is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = os.environ.get("MULTIHEAD_CHROMIUM", "/usr/bin/chromium")
    if not Path(executable).exists():
        pytest.skip(f"no Chromium at {executable} (MULTIHEAD_CHROMIUM names another)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()
