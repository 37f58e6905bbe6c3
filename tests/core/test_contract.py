"""The contract of attention in docs/design.md, a property a line: at every level of the compiled core, and on tiles.

What other files hold by single forms is held here of any mix of options, on sizes that are primes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import multihead as mh
from multihead.core import functional, native
from multihead.core.statistics import ROW_STATISTICS, TABLE
from tests.core import fuzz
from tests.core.conftest import assert_same, oracle

LEVELS = native.core.levels().split() if native.core else []
INF, NAN = float("inf"), float("nan")
SEEDS = st.integers(0, 10**6)
# The level stays the same for all examples of a test.
FEW = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
MORE = settings(FEW, max_examples=25)

pytestmark = pytest.mark.usefixtures("poisoned")


def at_level(name):
    """Run on a level of the compiled core, or on the tiles; the best level is back at the end."""
    if name == "tiled":
        yield "tiled"
        return
    best = native.core.level()
    assert native.core.set_level(name)
    yield "native"
    native.core.set_level(best)


@pytest.fixture(params=[*LEVELS, "tiled"])
def path(request):
    yield from at_level(request.param)


@pytest.fixture(params=LEVELS)
def core(request):
    """The compiled core alone, which the lines on bits bind."""
    yield from at_level(request.param)


def small(seed, **how):
    """A drawn problem that a loop over its cells in Python can follow."""
    return fuzz.draw(seed, **{"most_cells": 3000, "most_width": 67, "types": (torch.float64,)} | how)


def same_bits(a, b):
    return a.dtype is b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def visible_of(drawn):
    problem = functional.build_problem(**drawn.tensors, **drawn.options)
    return problem.visible().expand(problem.B, problem.H, problem.L, problem.S)


# Definition; which keys a query sees.
@MORE
@given(SEEDS)
def test_output_and_statistics_are_those_of_softmax_over_the_visible_keys(path, seed):
    drawn = small(seed)
    query, key, value = drawn.tensors.values()
    true = oracle(query, key, value, drawn.options)
    seen = drawn.observe(path, mh.Statistics(classes=torch.arange(drawn.n_keys)))
    assert_same(seen.output, true.output, 1e-10)
    real = torch.ones(query.shape[:1] + query.shape[2:3], dtype=torch.bool)
    real = drawn.options.get("query_mask", real)[:, None].expand(true.weights.shape[:3])
    some, a = true.visible.any(-1), true.weights
    sees = real & some
    j = torch.arange(drawn.n_keys, dtype=torch.float64)
    mean = a @ j
    expected = {
        "class_mass": a,
        "max_logit": true.scores.amax(-1),
        "max_weight": a.amax(-1),
        "entropy": -(a * a.log().masked_fill(a == 0, 0)).sum(-1),
        "effective_keys": 1 / a.square().sum(-1),
        "key_mean": mean,
        "key_variance": (a * (j - mean[..., None]) ** 2).sum(-1),
    }
    tolerance = {"key_variance": 1e-8, "effective_keys": 1e-9}
    for name, x in expected.items():
        assert_same(seen.statistics[name][sees], x[sees], tolerance.get(name, 1e-10))
    assert torch.equal(a.gather(-1, seen.argmax.clamp(min=0)[..., None])[..., 0][sees] > 0, sees[sees])
    # A row that sees no key, and one of padding.
    for name in ROW_STATISTICS:
        if name != "lse" or "sinks" not in drawn.options:
            blind = seen.statistics[name][real & ~some]
            assert same_bits(blind, torch.full_like(blind, TABLE[name].without_keys)), name
        padding = seen.statistics[name][~real]
        assert (padding == -1).all() if name == "argmax" else padding.isnan().all(), name
    assert (seen.output[~some] == 0).all()


@pytest.mark.parametrize("n_queries", [3, 149])
def test_each_sequence_has_its_own_classes(path, n_queries):
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, heads, n, 17, generator=random, dtype=torch.float64)
        for heads, n in ((4, n_queries), (2, 307), (2, 307))
    )
    classes = torch.randint(-1, 5, (3, 307), generator=random)
    found = mh.observe(query, key, value, statistics=mh.Statistics(classes=classes), impl=path).class_mass
    weights = (query @ key.repeat_interleave(2, 1).mT / 17**0.5).softmax(-1)
    for c in range(5):
        assert_same(found[..., c], (weights * (classes == c)[:, None, None]).sum(-1), 1e-10)


# NaN and Inf.
@FEW
@given(SEEDS, st.sampled_from([NAN, INF, -INF]))
def test_what_is_invisible_to_a_row_does_not_reach_it(path, seed, poison):
    drawn = small(seed, most_cells=40_000)
    visible = visible_of(drawn)
    before = drawn.observe(path)
    dirty = fuzz.Drawn(seed, {k: x.clone() for k, x in drawn.tensors.items()}, drawn.options)
    poisoned_key = seed % drawn.n_keys
    dirty.tensors["key"][:, :, poisoned_key, 0] = poison
    dirty.tensors["value"][:, :, poisoned_key] = poison
    after = dirty.observe(path)
    blind = ~visible[..., poisoned_key]
    torch.testing.assert_close(after.output[blind], before.output[blind], rtol=1e-10, atol=1e-12)
    for name, x in before.statistics.items():
        torch.testing.assert_close(after.statistics[name][blind], x[blind], rtol=1e-9, atol=1e-9, equal_nan=True)


@FEW
@given(SEEDS)
def test_a_visible_nan_shows_in_output_and_statistics(path, seed):
    drawn = small(seed, most_cells=40_000)
    sees = visible_of(drawn)[..., seed % drawn.n_keys]
    dirty = fuzz.Drawn(seed, {k: x.clone() for k, x in drawn.tensors.items()}, drawn.options)
    dirty.tensors["key"][:, :, seed % drawn.n_keys, -1] = NAN
    found = dirty.observe(path)
    assert found.output[sees].isnan().all()
    for name in ("lse", "max_logit", "max_weight", "entropy", "effective_keys", "key_mean", "key_variance"):
        assert found.statistics[name][sees].isnan().all(), name


# Seeing changes nothing; and what is seen does not depend on what else is.
@FEW
@given(SEEDS)
def test_every_request_gives_the_same_bits(path, seed):
    drawn = fuzz.draw(seed, most_cells=100_000)
    classes = torch.arange(drawn.n_keys) % 3
    n_queries = drawn.tensors["query"].shape[2]
    pairs = [torch.arange(n_queries)[:, None] % drawn.n_keys]
    whole = drawn.observe(path, mh.Statistics(classes=classes, offsets=(-1, 2), pairs=pairs))
    blind = mh.attention(**drawn.tensors, **drawn.options, impl=path)
    assert torch.equal(blind, whole.output)
    requests = [mh.Statistics(name) for name in ROW_STATISTICS]
    requests += [mh.Statistics("lse", classes=classes), mh.Statistics(offsets=(-1, 2)), mh.Statistics(pairs=pairs)]
    for request in requests:
        part = drawn.observe(path, request)
        assert torch.equal(part.output, blind)
        for name, x in part.statistics.items():
            assert same_bits(x, whole.statistics[name]), name


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ],
    ids=str,
)
@pytest.mark.parametrize("n_queries", [3, 149])
def test_seeing_changes_no_bit_of_any_type(core, dtype, n_queries):
    """Over several blocks of keys: a compiler may round the form that sees otherwise than the one that does not."""
    for seed in range(8):
        random = torch.Generator().manual_seed(seed)
        query, key, value = (
            torch.randn(1, 5, n, width, generator=random).to(dtype)
            for n, width in ((n_queries, 37), (1031, 37), (1031, 53))
        )
        blind = mh.attention(query, key, value, impl=core)
        for asked in (mh.Statistics("lse"), mh.Statistics(), mh.Statistics(classes=torch.arange(1031) % 3)):
            assert torch.equal(mh.observe(query, key, value, statistics=asked, impl=core).output, blind)


# Same bits again.
def alone(drawn, b):
    """One sequence of a drawn problem."""
    batched = {"key_lengths", "query_mask", "document_ids", "query_start"}
    options = {}
    for name, x in drawn.options.items():
        if isinstance(x, torch.Tensor) and (name in batched or (name in ("mask", "bias") and x.ndim == 4)):
            x = x[b : b + 1] if len(x) > 1 else x
        options[name] = x
    return fuzz.Drawn(drawn.seed, {k: x[b : b + 1] for k, x in drawn.tensors.items()}, options)


@FEW
@given(SEEDS)
def test_same_bits_for_any_threads_and_company(core, seed):
    drawn = fuzz.draw(seed, most_cells=150_000)
    before, together = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            together.append(drawn.observe(core))
    finally:
        torch.set_num_threads(before)
    for b in range(len(drawn.tensors["query"])):
        one = alone(drawn, b).observe(core)
        for found in together:
            assert same_bits(found.output[b], one.output[0])
            for name, x in one.statistics.items():
                assert same_bits(found.statistics[name][b], x[0]), name


@FEW
@given(SEEDS, st.sampled_from([1, 13, 256, 509]))
def test_same_bits_whatever_padding_is_to_the_right(core, seed, more):
    """A cache of more keys, with unwritten memory behind the lengths."""
    drawn = fuzz.draw(seed, most_cells=100_000)
    skipped = ("mask", "bias", "document_ids")
    options = {name: x for name, x in drawn.options.items() if name not in skipped}
    S, L, B = drawn.n_keys, drawn.tensors["query"].shape[2], len(drawn.tensors["query"])
    lengths = options.setdefault("key_lengths", torch.full((B,), S))
    options.setdefault("query_start", (lengths - L).clamp(min=0))
    tight = mh.observe(**drawn.tensors, **options, impl=core)
    longer = dict(drawn.tensors)
    for name in ("key", "value"):
        x = longer[name]
        longer[name] = torch.cat([x, torch.full((*x.shape[:2], more, x.shape[3]), NAN, dtype=x.dtype)], 2)
        for b, n in enumerate(lengths.tolist()):
            longer[name][b, :, n:] = torch.finfo(x.dtype).max if seed % 2 else NAN
    padded = mh.observe(**longer, **options, impl=core)
    exact = seed % 2 or bool((lengths == S).all())  # behind NaN the exact path may add in another order
    tolerance = 0 if exact else 4 * torch.finfo(drawn.dtype).eps
    torch.testing.assert_close(padded.output, tight.output, rtol=tolerance, atol=tolerance)
    for name, x in tight.statistics.items():
        assert same_bits(padded.statistics[name], x), name


@FEW
@given(SEEDS)
def test_gradients_have_the_same_bits_for_any_threads_and_company(core, seed):
    drawn = fuzz.draw(seed, most_cells=30_000, most_width=67, types=(torch.float32,))

    def gradients(problem):
        leaves = {k: problem.tensors[k].detach().requires_grad_() for k in ("query", "key", "value")}
        told = mh.explain(**leaves, **problem.options)
        if "native: can serve this" not in told:
            pytest.skip(told.splitlines()[1])
        output = mh.attention(**leaves, **problem.options, impl=core)
        return torch.autograd.grad(output.sin().sum(), list(leaves.values()))

    before, together = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            together.append(gradients(drawn))
    finally:
        torch.set_num_threads(before)
    for b in range(len(drawn.tensors["query"])):
        one = gradients(alone(drawn, b))
        assert all(same_bits(x[b], y[0]) for found in together for x, y in zip(found, one, strict=True))


# Accuracy.
@FEW
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([3, 31, 67, 131, 257, 509]),
    st.sampled_from([5, 37, 127, 263, 503]),
    st.sampled_from([13, 101, 521]),
    st.booleans(),
    SEEDS,
)
def test_error_is_at_most_twice_that_of_eager_attention(path, dtype, D, E, S, causal, seed):
    random = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, heads, n, width, generator=random).to(dtype)
        for heads, n, width in ((2, 149, D), (1, S, D), (1, S, E))
    )
    seen = torch.ones(149, S, dtype=torch.bool).tril(S - 149) if causal else torch.ones(149, S, dtype=torch.bool)

    def eager(q, k, v):
        weights = (q @ k.mT / D**0.5).masked_fill(~seen, -INF).softmax(-1).nan_to_num(0)
        return (weights @ v).double()

    exact = eager(query.double(), key.double(), value.double())
    allowed = 2 * (eager(query, key, value) - exact).abs().max() + torch.finfo(dtype).eps * value.double().abs().max()
    found = mh.attention(query, key, value, causal=causal, impl=path)
    assert found.dtype is dtype
    assert (found.double() - exact).abs().max() <= allowed


def test_long_dot_products_are_as_exact_as_those_of_matrix_products(path):
    """Each row sees one key, whose score is its lse; summed in one go, 4,099 products round several times as often."""
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, n, 4099, generator=random) for n in (640, 64))
    own = torch.arange(64) == torch.arange(640)[:, None] % 64
    value = torch.zeros(1, 1, 64, 1)
    found = mh.observe(query, key, value, statistics=mh.Statistics("lse"), mask=own, scale=1.0, impl=path).lse
    exact, eager = (query.double() @ key.double().mT)[..., own], (query @ key.mT)[..., own]

    def error(scores):
        return (scores.double().flatten() - exact.flatten()).square().mean().sqrt()

    assert error(found) <= 2 * error(eager)


# Any strides.
@FEW
@given(SEEDS)
def test_memory_layout_changes_no_bit(core, seed):
    drawn = fuzz.draw(seed, most_cells=100_000)
    plain = {k: x.contiguous() if isinstance(x, torch.Tensor) else x for k, x in drawn.options.items()}
    tidy = fuzz.Drawn(seed, {k: x.contiguous() for k, x in drawn.tensors.items()}, plain)
    found, expected = drawn.observe(core), tidy.observe(core)
    assert same_bits(found.output, expected.output)
    for name, x in expected.statistics.items():
        assert same_bits(found.statistics[name], x), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n_queries", [1, 11, 149])
def test_stale_values_behind_slices_of_a_cache(path, dtype, n_queries):
    """Keys and values are slices of a cache that is larger on every axis; all around lies what must not be read."""
    largest = torch.finfo(dtype).max
    for used in (1, 127, 523):
        random = torch.Generator().manual_seed(used)
        query = torch.randn(2, 6, n_queries, 37, generator=random).to(dtype)
        tensors = [torch.randn(2, 3, used, width, generator=random).to(dtype) for width in (37, 53)]
        for stale in (largest, -largest, NAN):
            caches = []
            for x in tensors:
                cache = torch.full((3, 5, 601, x.shape[3] + 11), stale, dtype=dtype)
                cache[1:, 1:4, 7 : 7 + used, 3:-8] = x
                caches.append(cache[1:, 1:4, 7 : 7 + used, 3:-8])
            expected = mh.observe(query, *tensors, causal=True, impl=path)
            found = mh.observe(query, *caches, causal=True, impl=path)
            assert found.output.isfinite().all()
            torch.testing.assert_close(found.output, expected.output, rtol=1e-2, atol=1e-3)
            if path == "native":
                assert same_bits(found.output, expected.output) and same_bits(found.entropy, expected.entropy)


# Memory.
PEAK = """
import resource, sys, torch, multihead as mh
torch.set_num_threads(1)
n, impl, form = int(sys.argv[1]), sys.argv[2], sys.argv[3]
x = torch.randn(1, 2, n, 16)
options = {
    "window": {"window": (1000, 0), "alibi_slopes": torch.ones(2)},
    "mask of keys": {"mask": torch.arange(n) % 3 > 0},
    "mask of rows and keys": {"mask": (torch.arange(n) % 3 > 0)[:, None], "bias": torch.zeros(n)},
    "documents": {"document_ids": (torch.arange(n) % 7)[None], "causal": True},
    "softcap, sinks": {"softcap": 2.0, "sinks": torch.ones(2), "key_lengths": [n - 3]},
}[form]
mh.observe(x, x, x, impl=impl, **options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["window", "mask of keys", "mask of rows and keys", "documents", "softcap, sinks"])
def test_memory_grows_with_the_text_not_with_its_square(path, form):
    def peak(n):
        command = [sys.executable, "-c", PEAK, str(n), path, form]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    # The cells of 16,384 x 16,384 are 256 MB in a byte each, and 2 GB in float32 for two heads.
    assert peak(16_384) - peak(64) < 160
