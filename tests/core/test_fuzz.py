"""Random problems over every option: the compiled core at every level, and the tiles, against the definition."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead.core import native
from tests.core.fuzz import draw

LEVELS = native.core.levels().split() if native.core else []
FAST, SLOW = range(60), range(60, 732)
CLASSES = 5


@pytest.fixture
def levels():
    """A function that goes through the paths: the tiles, and the core at each of its levels; the best is back after."""

    def each():
        yield "tiled", "tiled"
        for level in LEVELS:
            assert native.core.set_level(level)
            yield level, "native"

    best = native.core.level() if native.core else None
    yield each
    if best:
        native.core.set_level(best)


def everything(observation):
    return {"output": observation.output, **observation.statistics}


def largest(x):
    """The largest magnitude of what is neither infinite nor a mask's lowest number."""
    x = x[x.abs() < 1e30].abs()
    return x.max().item() if x.numel() else 0.0


def step(name, drawn):
    """What rounding in the last digit of the numbers that a statistic is made of costs it, about: to be times eps."""
    query, key = (largest(drawn.tensors[x].double().norm(dim=-1)) for x in ("query", "key"))
    scale = drawn.options.get("scale", drawn.tensors["query"].shape[-1] ** -0.5)
    score = max(1.0, abs(scale) * query * key)
    S = drawn.n_keys
    if "bias" in drawn.options:
        score += largest(drawn.options["bias"].double())
    if "alibi_slopes" in drawn.options:
        score += largest(drawn.options["alibi_slopes"]) * (drawn.tensors["query"].shape[2] + S)
    if name == "output":  # weights move with their scores
        return largest(drawn.tensors["value"].double()) * max(1, score / 16)
    return score * {"effective_keys": S, "key_mean": S, "key_variance": S * S}.get(name, 1)


def errors_of_eager(drawn, statistics):
    """How far plain PyTorch in the problem's type is from float64, by name, in steps of the type."""
    dtype = drawn.dtype if drawn.dtype is not torch.float64 else torch.float32  # no type is wider than float64
    narrow = drawn.to(dtype)
    eager = everything(narrow.observe("reference", statistics=statistics))
    exact = everything(narrow.to(torch.float64).observe("reference", statistics=statistics))
    return {
        name: largest(x.double() - exact[name]) / torch.finfo(x.dtype).eps
        for name, x in eager.items()
        if name != "argmax"
    }


def check(drawn, levels):
    """NaN and infinities are those of float64; errors at most four times plain PyTorch's, and four steps of rounding.

    Twice is what the contract says, of many rows: in a problem of a few, plain PyTorch may be close by chance.
    """
    n_classes = min(CLASSES, drawn.n_keys)
    asked = mh.Statistics(classes=torch.arange(drawn.n_keys) % n_classes)
    every_key = mh.Statistics(classes=torch.arange(drawn.n_keys))
    exact = everything(drawn.to(torch.float64).observe("reference", statistics=every_key))
    weights = exact["class_mass"]
    exact["class_mass"] = torch.stack([weights[..., c::n_classes].sum(-1) for c in range(n_classes)], -1)
    eager = errors_of_eager(drawn, asked)
    none = exact["argmax"] < 0
    for label, impl in levels():
        seen = drawn.observe(impl, asked)
        got = everything(seen)
        assert got.keys() == exact.keys()
        for name, error in eager.items():
            mine, expected = got[name].double(), exact[name]
            assert torch.equal(mine.isnan(), expected.isnan()), f"{label}: {name} is NaN elsewhere"
            assert torch.equal(mine.isinf(), expected.isinf()), f"{label}: {name} is infinite elsewhere"
            eps = torch.finfo(got[name].dtype).eps
            off, allowed = largest(mine - expected), 4 * eps * (error + step(name, drawn))
            assert off <= allowed, f"{label}: {name} is off by {off:.3g}, {allowed:.3g} is allowed"
        # The argmax may be another where two keys weigh the same to rounding.
        assert torch.equal(got["argmax"] < 0, none), f"{label}: argmax -1 elsewhere"
        there = weights.gather(-1, got["argmax"].clamp(min=0)[..., None])[..., 0]
        missed = (exact["max_weight"] - there).masked_fill(none, 0).nan_to_num(0).max()
        eps = torch.finfo(got["lse"].dtype).eps
        assert missed <= 4 * eps * (eager["max_logit"] + step("max_logit", drawn)), f"{label}: argmax is another key"
        blind = mh.attention(**drawn.tensors, **drawn.options, impl=impl)
        assert torch.equal(blind, seen.output), f"{label}: seeing changed the output"


def checked(seed, levels):
    drawn = draw(seed)
    try:
        check(drawn, levels)
    except Exception as error:
        raise AssertionError(f"{error}\n{drawn}") from error


@pytest.mark.parametrize("seed", FAST)
@pytest.mark.usefixtures("poisoned")
def test_is_the_definition(seed, levels):
    checked(seed, levels)


@pytest.mark.slow
@pytest.mark.parametrize("first", SLOW[::96])
@pytest.mark.usefixtures("poisoned")
def test_is_the_definition_in_many_more(first, levels):
    for seed in range(first, first + 96):
        checked(seed, levels)


def gradients(drawn, impl):
    leaves = drawn.leaves()
    output = mh.attention(**drawn.tensors | drawn.options | leaves, impl=impl)
    upstream = torch.cos(torch.arange(output.numel(), dtype=output.dtype)).view(output.shape)
    return torch.autograd.grad(output, list(leaves.values()), upstream), list(leaves)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.usefixtures("poisoned")
def test_gradients_are_those_of_the_definition(seed, levels):
    """By autograd through plain PyTorch, in float64."""
    drawn = draw(seed, most_cells=100_000, most_width=64, types=(torch.float64,))
    exact, names = gradients(drawn, "reference")
    for label, impl in levels():
        for name, x, expected in zip(names, gradients(drawn, impl)[0], exact, strict=True):
            assert torch.equal(x.isfinite(), expected.isfinite()), f"{label}: {name} is not finite elsewhere, {drawn}"
            off, allowed = largest(x - expected), 1e-11 * (1 + largest(expected))
            assert off <= allowed, f"{label}: {name} is off by {off:.3g}, {allowed:.3g} is allowed\n{drawn}"
