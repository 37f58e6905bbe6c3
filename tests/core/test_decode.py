"""Few queries over many keys, and caches in pages: the compiled core's other way, against the definition."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import multihead as mh

pytestmark = pytest.mark.usefixtures("level", "poisoned")
NAN, INF = float("nan"), float("inf")
B, H, G, S, D, E = 2, 6, 2, 2311, 19, 37  # three parts of keys, the last one short


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(L, dtype=torch.float32, h=H, g=G, s=S, d=D, e=E):
    return (
        random(B, h, L, d, dtype=dtype),
        random(B, g, s, d, seed=1, dtype=dtype),
        random(B, g, s, e, seed=2, dtype=dtype),
    )


def forms(L):
    holes = torch.rand(B, 1, L, S, generator=torch.Generator().manual_seed(3)) < 0.5
    holes[0, :, :, :1100] = False  # the first part of one sequence hidden whole
    bias = random(1, H, L, S, seed=4)
    bias[..., 100:300] = -INF
    documents = (torch.arange(S) // 700).expand(B, -1)
    return {
        "full": {},
        "causal": {"causal": True},
        "lengths": {"key_lengths": [S, 1030], "causal": True},
        "no key": {"key_lengths": [0, 7]},
        "window": {"causal": True, "window": (1200, 0)},
        "mask": {"mask": holes},
        "bias": {"bias": bias},
        "alibi": {"alibi_slopes": torch.rand(H, generator=torch.Generator().manual_seed(5)) / 100},
        "documents": {"document_ids": documents, "causal": True},
        "softcap": {"softcap": 2.5, "scale": 0.7},
        "sinks": {"sinks": random(H, seed=6)},
        "all": {"mask": holes, "bias": bias, "softcap": 3.0, "sinks": random(H, seed=6), "causal": True},
    }  # fmt: skip


ASKED = mh.Statistics(classes=[0, 1, -1] * 770 + [1], offsets=(-1,))


# 3, 15 and 120 rows a key: few are multiplied where the keys lie, many once these are packed.
@pytest.mark.parametrize("L", [1, 5, 40])
@pytest.mark.parametrize("form", forms(1))
def test_is_the_definition(form, L):
    tensors = inputs(L)
    options = forms(L)[form]
    found = mh.observe(*tensors, statistics=ASKED, impl="native", **options)
    doubles = {
        k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in options.items()
    }
    expected = mh.observe(*(x.double() for x in tensors), statistics=ASKED, impl="reference", **doubles)
    torch.testing.assert_close(found.output.double(), expected.output, rtol=0, atol=2e-6)
    for name, values in expected.statistics.items():
        values = values.double() if name != "argmax" else values
        seen = found.statistics[name]
        seen = seen.double() if name != "argmax" else seen
        # Position moments are of numbers up to 2,311.
        bounds = {"key_mean": (1e-5, 1e-3), "key_variance": (1e-5, 1e-1)}.get(name, (1e-5, 1e-5))
        torch.testing.assert_close(seen, values, rtol=bounds[0], atol=bounds[1], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_types(dtype):
    tensors = inputs(2, dtype)
    found = mh.attention(*tensors, impl="native")
    expected = F.scaled_dot_product_attention(*(x.double() for x in tensors), enable_gqa=True)
    ulp = torch.finfo(dtype).eps / 2
    slack = 1e-14 if dtype is torch.float64 else 1e-6
    assert ((found.double() - expected).abs() <= expected.abs() * ulp + slack).all()


@pytest.mark.parametrize(("h", "g"), [(1, 1), (2, 2), (3, 1), (7, 1), (16, 1), (32, 2)])
@pytest.mark.parametrize(("d", "e"), [(64, 64), (1, 3), (8, 16), (192, 128), (129, 40)])
def test_numbers_of_heads_and_widths(h, g, d, e):
    tensors = inputs(1, h=h, g=g, s=1500, d=d, e=e)
    expected = F.scaled_dot_product_attention(*(x.double() for x in tensors), enable_gqa=True)
    torch.testing.assert_close(mh.attention(*tensors, impl="native").double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("L", [2, 40])
def test_same_bits_for_threads_batch_and_room_to_the_right(L):
    query, key, value = inputs(L)
    whole = mh.observe(query, key, value, key_lengths=[S, 1500], impl="native")
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            again = mh.observe(query, key, value, key_lengths=[S, 1500], impl="native")
            assert torch.equal(again.output, whole.output) and torch.equal(again.entropy, whole.entropy)
    finally:
        torch.set_num_threads(threads)
    alone = mh.observe(query[1:], key[1:, :, :1500], value[1:, :, :1500], impl="native")
    assert torch.equal(alone.output[0], whole.output[1])
    for name in ("lse", "entropy", "key_mean", "key_variance", "effective_keys", "argmax"):
        assert torch.equal(alone.statistics[name][0], whole.statistics[name][1]), name
    assert torch.equal(mh.attention(query, key, value, key_lengths=[S, 1500], impl="native"), whole.output)


@pytest.mark.parametrize("L", [1, 40])
def test_what_is_not_seen_is_not_met(L):
    query, key, value = inputs(L)
    lengths = [S - 5, 1033]
    expected = mh.observe(query, key, value, key_lengths=lengths, impl="native")
    for wrong in (NAN, INF, -INF, 3e38):
        dirty_key, dirty_value = key.clone(), value.clone()
        for b, length in enumerate(lengths):
            dirty_key[b, :, length:], dirty_value[b, :, length:] = wrong, wrong
        found = mh.observe(query, dirty_key, dirty_value, key_lengths=lengths, impl="native")
        assert torch.equal(found.output, expected.output) and torch.equal(found.lse, expected.lse)
    mask = torch.ones(S, dtype=torch.bool)
    mask[40:50] = False
    value[:, :, 44] = NAN
    clean = value.clone()
    clean[:, :, 44] = 0
    found = mh.attention(query, key, value, mask=mask, impl="native")
    torch.testing.assert_close(found, mh.attention(query, key, clean, mask=mask, impl="native"), rtol=0, atol=1e-6)
    assert mh.attention(query, key, value, impl="native").isnan().all()
    value[:, :, 44] = INF
    assert (mh.attention(query, key, value, impl="native") == INF).all()


@pytest.mark.parametrize("L", [1, 40])
def test_a_nan_score_is_the_largest_as_pytorch_has_it(L):
    query, key, value = inputs(L)
    key[:, :, 2000] = NAN
    found = mh.observe(query, key, value, impl="native")
    assert found.output.isnan().all() and (found.argmax == 2000).all() and found.max_logit.isnan().all()


def test_strides():
    query, key, value = inputs(3, d=24, e=24)
    expected = mh.attention(query, key, value, impl="native")
    turned = key.mT.contiguous().mT, value.mT.contiguous().mT
    assert torch.equal(mh.attention(query, *turned, impl="native"), expected)
    spread = torch.stack([key, value], -1)
    assert torch.equal(mh.attention(query, spread[..., 0], spread[..., 1], impl="native"), expected)
    one = mh.attention(query, key[:1].expand(B, -1, -1, -1), value[:1].expand(B, -1, -1, -1), impl="native")
    assert torch.equal(one[0], expected[0])


# --- caches in pages ---------------------------------------------------------------------------------------------


def paged(tensor, page, seed=7, spare=3, junk=NAN):
    """Cut (B, G, S, D) into pages in a random order of a pool with spare ones, junk wherever no number belongs."""
    b, g, s, d = tensor.shape
    n = -(-s // page)
    order = torch.randperm(b * n + spare, generator=torch.Generator().manual_seed(seed))
    data = torch.full((b * n + spare, g, page, d), junk, dtype=tensor.dtype)
    table = torch.empty(b, n, dtype=torch.int32)
    for i in range(b * n):
        keys = tensor[i // n, :, i % n * page : (i % n + 1) * page]
        data[order[i], :, : keys.shape[1]] = keys
        table[i // n, i % n] = order[i]
    return data, table


@pytest.mark.parametrize("page", [1, 16, 100, 256, 4000])
@pytest.mark.parametrize("L", [1, 41])
def test_pages_are_the_tensor_that_they_hold(page, L):
    query, key, value = inputs(L, s=1500)
    lengths = [1500, 733]
    (key_data, table), (value_data, _) = paged(key, page), paged(value, page)
    table[1, -(-733 // page) :] = 2**30  # beyond its end a table may say anything
    options = {"key_lengths": lengths, "causal": True}
    found = mh.observe(query, mh.Pages(key_data, table), mh.Pages(value_data, table), impl="native", **options)
    expected = mh.observe(query, key, value, impl="native", **options)
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.entropy, expected.entropy)
    tiled = mh.attention(query, mh.Pages(key_data, table), mh.Pages(value_data, table), impl="tiled", **options)
    torch.testing.assert_close(tiled, expected.output, rtol=0, atol=2e-6)


@pytest.mark.parametrize("L", [1, 41])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_int8_pages_are_their_integers_times_their_scales(L, dtype):
    query, key, value = (x.to(dtype) for x in inputs(L, s=1500))
    (key_data, table), (value_data, _) = paged(key.float(), 64, junk=0), paged(value.float(), 64, junk=0)
    pages = mh.Pages.int8(key_data, table), mh.Pages.int8(value_data, table)
    found = mh.attention(query, *pages, key_lengths=[1500, 733], impl="native")
    dense = [x.dense(torch.float64)[:, :, :1500] for x in pages]
    expected = mh.attention(query.double(), *dense, key_lengths=[1500, 733], impl="reference")
    slack = {torch.float32: 2e-6, torch.float64: 1e-8, torch.bfloat16: 4e-3}[dtype]  # scales are float32
    torch.testing.assert_close(found.double(), expected, rtol=slack, atol=slack)
    # Rounding to int8 itself: half a step of a scale, at most 1/254 of the largest number of a page.
    exact = torch.nn.functional.pad(key.float(), (0, 0, 0, dense[0].shape[2] - 1500))
    assert ((dense[0] - exact).abs() <= exact.abs().amax() / 254 + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_pages_of_a_length_are_the_tensor_of_that_length(dtype):
    """What a mask or a bias is as long as, and where a query stands, is S, not the room of the pages."""
    query, key, value = inputs(3, s=1031)
    (key_data, table), (value_data, _) = paged(key, 64, junk=0), paged(value, 64, junk=0)
    make = mh.Pages.int8 if dtype is torch.int8 else mh.Pages
    pages = [dataclasses.replace(make(data, table), length=1031) for data in (key_data, value_data)]
    assert pages[0].shape == key.shape
    dense = [x.dense(torch.float32) for x in pages]
    if dtype is torch.float32:
        assert torch.equal(dense[0], key) and torch.equal(dense[1], value)
    for options in ({}, {"causal": True}, {"bias": random(1, H, 3, 1031, seed=4)}, {"window": (70, 0)}):
        for impl in ("native", "tiled"):
            found = mh.attention(query, *pages, impl=impl, **options)
            expected = mh.attention(query.double(), *(x.double() for x in dense), impl="reference", **options)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    one = [x.heads(slice(1, 2)) for x in pages]
    found = mh.attention(query[:, 3:], *one, impl="native")
    torch.testing.assert_close(found, mh.attention(query, *pages, impl="native")[:, 3:], rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match="length: expected 0 to 1088, the room of a sequence's pages, got 1089"):
        dataclasses.replace(pages[0], length=1089)


def test_int8_is_rounded_to_a_half_type_once():
    data = random(4, 1, 8, 16)
    pages = mh.Pages.int8(data, torch.arange(4, dtype=torch.int32)[None])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(pages.dense(dtype), pages.dense(torch.float64).to(dtype))


def test_pages_that_do_not_fit_are_named():
    data, table = torch.zeros(4, 2, 8, 5), torch.zeros(1, 3, dtype=torch.int32)
    query = torch.zeros(1, 2, 1, 5)
    good = mh.Pages(data, table)
    with pytest.raises(TypeError, match="value: expected Pages"):
        mh.attention(query, good, torch.zeros(1, 2, 24, 5))
    with pytest.raises(ValueError, match=r"key: expected a table of pages from 0 to P-1=3"):
        bad = mh.Pages(data, torch.tensor([[0, 4, 1]], dtype=torch.int32))
        mh.attention(query, bad, bad)
    with pytest.raises(TypeError, match=r"key: expected pages of torch\.float64"):
        mh.attention(query.double(), good, good)
    with pytest.raises(ValueError, match="scales"):
        mh.Pages(data.to(torch.int8), table)
    with pytest.raises(TypeError, match="table: expected integers"):
        mh.Pages(data, table.float())
    other = mh.Pages(data, table.clone())
    with pytest.raises(ValueError, match="'native' cannot serve this call: key and value do not have the same pages"):
        mh.attention(query, good, other, impl="native")
    assert mh.attention(query, good, other).shape == query.shape
