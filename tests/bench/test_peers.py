"""Every candidate computes every form that it says it can, by the gate."""

import pytest
import torch

from multihead.bench.gate import Gate, slack_of
from multihead.bench.inputs import Inputs
from multihead.bench.peers import OURS, PEERS, VARIANTS
from multihead.bench.shapes import Shape
from multihead.core.pages import Pages

SHAPES = [
    Shape(2, 6, 6, 37, 16),
    Shape(2, 6, 6, 67, 16, causal=True),
    Shape(2, 6, 2, 37, 16, causal=True),
    Shape(1, 6, 2, 149, 16, causal=True, window=13),
    Shape(2, 6, 2, 1, 16, S=131),
    Shape(2, 6, 6, 1, 16, S=131),
    Shape(2, 6, 2, 37, 16, causal=True, dtype="bfloat16"),
    Shape(2, 6, 2, 1, 16, S=131, dtype="bfloat16"),
    Shape(2, 6, 2, 37, 16, causal=True, dtype="float16"),
    Shape(2, 6, 2, 1, 16, S=131, dtype="float16"),
    Shape(2, 6, 2, 1, 16, S=192, cache="pages"),
    Shape(2, 6, 2, 1, 16, S=192, cache="int8"),
    Shape(2, 6, 6, 37, 19, E=13, causal=True),
    Shape(2, 6, 6, 37, 13, E=19),
    Shape(2, 6, 1, 11, 19, S=67, E=13),
    Shape(2, 6, 1, 1, 19, S=67, E=13),
    Shape(2, 6, 6, 37, 16, training=True),
    Shape(2, 6, 2, 37, 16, causal=True, training=True),
]
CANDIDATES = {OURS.name: OURS, **VARIANTS, **PEERS}
PACKAGES = {"ort-mha": ("onnx", "onnxruntime"), "ort-gqa": ("onnx", "onnxruntime"), "jax": ("jax",)}


def serves(names):
    cases = [(name, shape) for name in names for shape in SHAPES if CANDIDATES[name].refuses(shape) is None]
    return pytest.mark.parametrize(("name", "shape"), cases, ids=str)


def check(name, shape):
    for package in {"ort-mha": ["onnx", "onnxruntime"], "ort-gqa": ["onnx", "onnxruntime"], "jax": ["jax"]}.get(
        name, []
    ):
        pytest.importorskip(package, reason=f"{package} is not installed")
    peer, inputs = CANDIDATES[name], Inputs.of(shape)
    prepared = peer.prepare(shape, inputs)
    for _ in range(2):  # a run leaves everything as the next one needs it
        found = prepared.numbers(prepared.run())
        assert Gate(shape, inputs).check(found, prepared.entropy_weight) <= slack_of(peer)
    kept = Inputs.of(shape)
    assert torch.equal(inputs.key, kept.key) and torch.equal(inputs.value, kept.value)


@serves(name for name in CANDIDATES if name != "flex")
def test_numbers_pass_the_gate(name, shape):
    check(name, shape)


@pytest.mark.slow  # each shape is compiled
@serves(["flex"])
def test_flex_passes_the_gate(name, shape):
    if (reason := PEERS[name].available()) is not None:
        pytest.skip(reason)
    check(name, shape)


def test_who_is_said_to_read_pages_reads_them_as_they_are_stored(monkeypatch):
    handed = []

    def attention(query, key, value, **options):
        handed.append(key)
        return query

    monkeypatch.setattr("multihead.bench.peers.ours.attention", attention)
    for cache, dtypes in (
        ("pages", {"": torch.float32}),
        ("int8", {"": torch.int8, "in float32 pages": torch.float32}),
    ):
        shape = Shape(2, 6, 2, 1, 16, S=192, cache=cache)
        inputs = Inputs.of(shape)
        for name, dtype in dtypes.items():
            CANDIDATES[name or OURS.name].prepare(shape, inputs).run()
            assert isinstance(handed[-1], Pages) and handed[-1].data.dtype is dtype
        CANDIDATES["in one piece"].prepare(shape, inputs).run()
        assert handed[-1] is inputs.key


def test_eager_and_jax_do_not_fill_the_memory_with_scores():
    large = Shape(1, 9, 3, 8192, 64, causal=True)
    assert PEERS["eager"].refuses(large) == "the scores alone would take 2.4 GB"
    assert "2.4 GB" in PEERS["jax"].refuses(large)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert PEERS["ort-mha"].available() == "onnxruntime is not installed: pip install 'multihead[bench]'"
    assert PEERS["jax"].available().startswith("jax is not installed")


def test_jax_stays_away_where_it_would_have_more_threads(monkeypatch):
    pytest.importorskip("jax", reason="jax is not installed")
    monkeypatch.setattr("multihead.bench.peers.jax_xla.cores", lambda: torch.get_num_threads() + 1)
    assert "JAX takes every core" in PEERS["jax"].available()
