"""Dropout in the compiled core, at every level: PyTorch's softmax with its cells dropped, the same bits however cut.

Which cells are dropped comes from `core/dropout.py`, which test_dropout.py holds against Philox's published answers.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multihead as mh
from multihead.core import dropout, functional, native
from multihead.core.statistics import KEY_STATISTICS, ROW_STATISTICS
from tests.core import fuzz
from tests.core.test_decode import paged
from tests.core.test_native import big_forms
from tests.core.test_native_backward import STATISTICS, check, eager, everything, native_gradients

pytestmark = [
    pytest.mark.skipif(native.core is None, reason="the compiled core is not built"),
    pytest.mark.usefixtures("level", "poisoned"),
]
NAN, INF = float("nan"), float("inf")
SEED = -1234567890123456789
SOME = {"dropout_p": 0.4, "dropout_seed": SEED}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def doubled(options):
    return {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in options.items()}


def expected_output(lab, tensors, options, seen=None):
    """By PyTorch's softmax in float64, (B, H, L, E)."""
    classes = torch.zeros(tensors[1].shape[2], dtype=torch.int64)
    found, some = eager(lab, *(x.double() for x in tensors), doubled(options), classes, seen)
    return torch.where(some[..., None], found["output"], 0)


# Which cells.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("p, seed", [(0.1, 3), (0.5, SEED), (1.0, 2**63 - 1), (1e-12, 4)])
@pytest.mark.parametrize("L", [2, 151])  # few queries go another way
def test_each_cell_is_kept_or_dropped_as_the_rules_say(L, p, seed, dtype):
    S = 1091
    query, key = torch.zeros(2, 3, L, 8, dtype=dtype), torch.zeros(2, 3, S, 8, dtype=dtype)
    value = torch.eye(S, dtype=dtype).expand(2, 3, S, S)  # the output is the weights
    got = mh.attention(query, key, value, dropout_p=p, dropout_seed=seed, impl="native")
    kept = dropout.keep(seed, p, *(torch.arange(n) for n in (2, 3, L, S)))
    assert torch.equal(got != 0, kept)
    torch.testing.assert_close(got, kept.to(dtype) / S / (1 - p if p < 1 else 1))


def test_least_word_that_is_kept():
    b, h, i, j = 1, 2, 100, 263
    words = dropout.philox(tuple(torch.tensor([c]) for c in (j // 4, i, h, b)), SEED)
    word = int(words[j % 4])
    query, key = torch.zeros(2, 3, 101, 8), torch.zeros(2, 3, 264, 8)
    value = torch.nn.functional.one_hot(torch.tensor([j]), 264).mT.float().expand(2, 3, 264, 1)
    for least, kept in ((word, True), (word + 1, False)):
        output = mh.attention(query, key, value, dropout_p=least / 2**32, dropout_seed=SEED, impl="native")
        assert (output[b, h, i] != 0) == kept


# The output and the gradients.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 4e-6)])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_every_form(lab, form, p, dtype, tolerance):
    tensors = [x.to(dtype) for x in lab.tensors()]
    options = form | {"dropout_p": p, "dropout_seed": SEED}
    options = {
        k: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in options.items()
    }
    got = mh.attention(*tensors, impl="native", **options)
    lab.assert_same(got.double(), expected_output(lab, tensors, options), tolerance)
    check(lab, tensors, options, ("output", *STATISTICS[:-1]), dtype, tolerance)


def test_everything_at_once(lab):
    check(lab, lab.tensors(), lab.forms["everything"] | SOME, ("output", *STATISTICS), tolerance=1e-12)


@pytest.mark.parametrize("name", list(big_forms()))
def test_forms_across_blocks(lab, name):
    form = big_forms()[name] | SOME
    tensors = [random(2, 4, 151, 40), random(2, 2, 530, 40, seed=1), random(2, 2, 530, 24, seed=2)]
    seen = functional.build_problem(*tensors, **form).visible().expand(2, 4, 151, 530)
    got = mh.attention(*tensors, impl="native", **form)
    lab.assert_same(got.double(), expected_output(lab, tensors, form, seen), 5e-6)
    names = ("output",) if "as large" in name else ("output", "lse", "max_logit", "entropy", "class_mass")
    check(lab, tensors, form, names, torch.float64, 1e-11, seen)
    check(lab, tensors, form, names, torch.float32, 2e-5, seen)


@settings(max_examples=12)
@given(st.integers(0, 2**31), st.sampled_from([0.1, 0.5, 0.9]))
def test_any_mix_of_options(seed, p):
    drawn = fuzz.draw(seed, most_cells=60_000, most_width=67, types=(torch.float64,))
    drawn.options |= {"dropout_p": p, "dropout_seed": seed}
    found = {}
    for impl in ("native", "reference"):
        leaves = drawn.leaves()
        output = mh.attention(**drawn.tensors | drawn.options | leaves, impl=impl)
        upstream = torch.cos(torch.arange(output.numel(), dtype=output.dtype)).view(output.shape)
        grads = torch.autograd.grad(output, list(leaves.values()), upstream)
        found[impl] = {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}
    for name, want in found["reference"].items():
        got = found["native"][name]
        assert torch.equal(got.isfinite(), want.isfinite()), f"{name} {drawn}"
        size = 1 + want[want.isfinite()].abs().max() if want.isfinite().any() else 1
        off = (got - want).nan_to_num(0).abs().max() if want.numel() else 0
        assert off <= 1e-11 * size, f"{name} {drawn}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("L", [2, 151])
def test_half_types_are_float32_rounded_once(dtype, L):
    tensors = [random(2, 4, L, 40), random(2, 2, 530, 40, seed=1), random(2, 2, 530, 24, seed=2)]
    tensors = [x.to(dtype) for x in tensors]
    wide = mh.attention(*(x.float() for x in tensors), causal=True, impl="native", **SOME)
    assert torch.equal(mh.attention(*tensors, causal=True, impl="native", **SOME), wide.to(dtype))


# Few queries, and pages.
@pytest.mark.parametrize("L", [1, 3, 8])
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(
    "form", [{}, {"causal": True, "window": (1200, 0)}, {"sinks": random(4, seed=6), "softcap": 3.0}]
)
def test_few_queries_over_many_keys(lab, form, L, p):
    tensors = [random(2, 4, L, 19), random(2, 2, 2311, 19, seed=1), random(2, 2, 2311, 37, seed=2)]
    options = form | {"dropout_p": p, "dropout_seed": SEED}
    seen = functional.build_problem(*tensors, **options).visible().expand(2, 4, L, 2311)
    got = mh.attention(*tensors, impl="native", **options)
    lab.assert_same(got.double(), expected_output(lab, tensors, options, seen), 2e-6)


@pytest.mark.parametrize("L", [1, 41])
def test_pages(L):
    query, key, value = random(2, 4, L, 19), random(2, 2, 1500, 19, seed=1), random(2, 2, 1500, 37, seed=2)
    options = SOME | {"key_lengths": [1500, 733], "causal": True}
    (key_data, table), (value_data, _) = paged(key, 64), paged(value, 64)
    found = mh.attention(query, mh.Pages(key_data, table), mh.Pages(value_data, table), impl="native", **options)
    assert torch.equal(found, mh.attention(query, key, value, impl="native", **options))
    (key_data, _), (value_data, _) = paged(key, 64, junk=0), paged(value, 64, junk=0)
    pages = mh.Pages.int8(key_data, table), mh.Pages.int8(value_data, table)
    found = mh.attention(query, *pages, impl="native", **options)
    dense = [x.dense(torch.float64)[:, :, :1500] for x in pages]
    exact = mh.attention(query.double(), *dense, impl="reference", **options)
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)


# What dropout leaves alone.
@pytest.mark.parametrize("L, E", [(3, 13), (151, 13), (151, 16)])
def test_no_bit_of_a_statistic_changes_and_none_of_the_output_when_seen(L, E):
    S = 530
    tensors = [random(2, 4, L, 19), random(2, 2, S, 19, seed=1), random(2, 2, S, E, seed=2)]
    form = {"causal": True, "sinks": random(4, seed=6), "softcap": 5.0}
    asked = mh.Statistics(
        *ROW_STATISTICS, *KEY_STATISTICS, classes=torch.arange(S) % 19, offsets=(-1,),
        pairs=[torch.randint(0, S, (L, 3))], map=7, top_keys=5,
    )  # fmt: skip
    whole = mh.observe(*tensors, statistics=asked, impl="native", **form)
    dropped = mh.observe(*tensors, statistics=asked, impl="native", **form, **SOME)
    assert not torch.equal(dropped.output, whole.output)
    assert {"class_mass", "received", "map", "top_weights", "sink_mass"} <= whole.statistics.keys()
    for name, x in whole.statistics.items():
        assert torch.equal(dropped.statistics[name].nan_to_num(7), x.nan_to_num(7)), name
    assert torch.equal(mh.attention(*tensors, impl="native", **form, **SOME), dropped.output)


# Bits.
@pytest.mark.parametrize("L", [2, 151])
def test_same_bits_for_any_threads_and_for_the_first_of_a_batch(L):
    tensors = [random(3, 4, L, 40), random(3, 2, 1301, 40, seed=1), random(3, 2, 1301, 24, seed=2)]
    options = SOME | {"causal": True}
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(mh.attention(*tensors, impl="native", **options))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    first = mh.attention(*(x[:2] for x in tensors), impl="native", **options)
    assert torch.equal(results[0][:2], first)
    # Dropout counts by the sequence: the second one alone is the first of its call.
    assert not torch.equal(results[0][1:2], mh.attention(*(x[1:2] for x in tensors), impl="native", **options))


def test_gradients_have_the_same_bits_for_any_threads_and_for_the_first_of_a_batch():
    tensors, options, incoming = everything()
    options |= SOME
    asked = mh.Statistics(classes=torch.arange(530) % 3)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(native_gradients(*tensors, options, incoming, asked))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, x in results[0].items():
            assert torch.equal(x, other[name]), name
    part = native_gradients(*(x[:2] for x in tensors), options, {k: x[:2] for k, x in incoming.items()}, asked)
    for name in ("query", "key", "value"):
        assert torch.equal(results[0][name][:2], part[name]), name


# NaN and Inf.
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("L", [3, 151])
@pytest.mark.parametrize("p", [0.4, 1.0])
def test_what_is_not_finite_shows_where_it_does_without_dropout(where, poison, L, p):
    """A dropped cell is 0 times its weight and its value, so NaN where one is not finite; what is hidden is no term."""
    tensors = dict(zip(("query", "key", "value"), (random(1, 2, L, 8), random(1, 1, 530, 8), random(1, 1, 530, 8))))
    tensors[where][:, :, 1 if where == "query" else [5, 400], 3] = poison
    some = {"dropout_p": p, "dropout_seed": SEED}

    def finite(impl, **options):
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        output = mh.attention(**leaves, impl=impl, window=(200, 0), **options)
        made = {"output": output} | dict(zip(leaves, torch.autograd.grad(output.sum(), list(leaves.values()))))
        return {name: x.isfinite() for name, x in made.items()}

    got, whole = finite("native", **some), finite("native")
    assert not got["output"].all() and (got["output"].any() or (L == 3 and where != "query"))
    for name, x in got.items():
        assert torch.equal(x, whole[name]), name
    for impl in ("tiled", "reference"):
        assert torch.equal(finite(impl, **some)["output"], got["output"])


def test_is_served_and_said_to_be():
    x = random(1, 2, 5, 4)
    assert mh.explain(x, x, x, dropout_p=0.1).startswith("path: native\nnative: can serve this")
