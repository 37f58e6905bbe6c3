"""Faults that attention libraries have had, one test each, on every path, against PyTorch's softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import multihead as mh
from multihead.core import native

INF, NAN = float("inf"), float("nan")
NATIVE = pytest.param("native", marks=pytest.mark.skipif(native.core is None, reason="the compiled core is not built"))


@pytest.fixture(params=[NATIVE, "tiled", "reference"])
def path(request):
    return request.param


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def three(b=2, h=6, g=3, n_queries=37, n_keys=53, d=24, e=17):
    return random(b, h, n_queries, d), random(b, g, n_keys, d, seed=1), random(b, g, n_keys, e, seed=2)


def theirs(query, key, value, seen=None, bias=None):
    """PyTorch's plain function in float64: bool (..., L, S) of what is seen, or floats to be added."""
    mask = bias.double() if bias is not None else seen
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(x.double() for x in (query, key, value)), mask, enable_gqa=True)


def assert_close(got, expected):
    torch.testing.assert_close(got.double(), expected.double(), rtol=5e-6, atol=5e-6)


# A running softmax that starts in a block of keys where a row sees nothing: exp(-inf - -inf) is NaN.
@pytest.mark.parametrize("n_queries", [3, 150])
@pytest.mark.parametrize("how", ["mask", "bias", "window"])
def test_early_blocks_of_keys_are_hidden_whole(path, how, n_queries):
    query, key, value = three(n_queries=n_queries, n_keys=1301)
    first = 600 + torch.arange(n_queries) % 7  # rows of one tile begin at different keys, after 512
    seen = torch.arange(1301) >= first[:, None]
    if how == "window":
        seen = (torch.arange(1301) >= torch.arange(1301 - n_queries, 1301)[:, None] - 91) & torch.ones_like(seen)
    options = {
        "mask": {"mask": seen},
        "bias": {"bias": torch.zeros(seen.shape).masked_fill(~seen, -INF)},
        "window": {"window": (91, None)},
    }[how]
    found = mh.observe(query, key, value, impl=path, **options)
    assert_close(found.output, theirs(query, key, value, seen))
    assert all(x.isfinite().all() for x in found.statistics.values())
    # The same with what is hidden cut off.
    rest = {name: x[..., 600:] for name, x in options.items()} if how != "window" else options
    alone = mh.observe(query, key[:, :, 600:], value[:, :, 600:], impl=path, **rest)
    for name, x in alone.statistics.items():
        x = x + 600 if name in ("argmax", "key_mean") else x
        torch.testing.assert_close(found.statistics[name], x, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


# One of both alignments taken for the other, or off by one, where the numbers of queries and keys differ.
@pytest.mark.parametrize("n_queries, n_keys", [(5, 300), (300, 5), (149, 307), (307, 149), (256, 257)])
def test_causal_with_another_number_of_queries_than_keys(path, n_queries, n_keys):
    query, key, value = three(n_queries=n_queries, n_keys=n_keys)
    ones = torch.ones(n_queries, n_keys, dtype=torch.bool)
    lower_right, upper_left = ones.tril(n_keys - n_queries), ones.tril()
    blind = ~lower_right.any(-1)  # PyTorch gives these rows NaN or zeros, by version
    found = mh.attention(query, key, value, causal=True, impl=path)
    assert_close(found[:, :, ~blind], theirs(query[:, :, ~blind], key, value, lower_right[~blind]))
    assert (found[:, :, blind] == 0).all()
    assert int(blind.sum()) == max(0, n_queries - n_keys)
    found = mh.attention(query, key, value, causal=True, query_start=0, impl=path)
    assert_close(found, theirs(query, key, value, upper_left))


# One query takes another kernel: top-left it sees the first key only, in decoding every key.
@pytest.mark.parametrize("n_keys", [1, 16, 17, 700])
def test_causal_with_one_query(path, n_keys):
    query, key, value = three(n_queries=1, n_keys=n_keys)
    assert_close(mh.attention(query, key, value, causal=True, impl=path), theirs(query, key, value))
    first = value[:, :, :1].repeat_interleave(2, 1)
    assert_close(mh.attention(query, key, value, causal=True, query_start=0, impl=path), first)
    assert (mh.attention(query, key, value, causal=True, query_start=-1, impl=path) == 0).all()


# The last axis read as if its numbers lay beside each other.
@pytest.mark.parametrize("which", ["query", "key", "value", "mask", "bias"])
def test_inner_stride_that_is_not_1(path, which):
    query, key, value = three()
    mask, bias = random(2, 6, 37, 53, seed=3) < 0.7, random(2, 6, 37, 53, seed=4)
    given = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
    expected = theirs(query, key, value, bias=bias.masked_fill(~mask, -INF))
    for layout in ("every third", "turned"):
        x = given[which]
        if layout == "turned":
            view = x.mT.contiguous().mT
        else:
            filler = torch.full((*x.shape[:-1], 3 * x.shape[-1]), True if x.dtype is torch.bool else NAN, dtype=x.dtype)
            view = filler[..., 1::3].copy_(x)
        assert view.stride(-1) != 1
        assert_close(mh.attention(**given | {which: view}, impl=path), expected)


# Stride 0 of an expanded tensor: read past its one row, or its strides lost in a reshape.
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("which", ["query", "key", "value", "mask", "bias"])
def test_expanded_inputs(path, which, axis):
    query, key, value = three()
    mask, bias = random(2, 6, 37, 53, seed=3) < 0.7, random(2, 6, 37, 53, seed=4)
    mask[:, :, :, 5] = True  # some key is left however it is expanded
    given = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
    x = given[which]
    given[which] = x.narrow(axis, x.shape[axis] // 2, 1).expand(x.shape)
    if which == "mask" and axis == 3:
        given[which] = x[..., 5:6].expand(x.shape)
    assert given[which].stride(axis) == 0
    whole = {name: x.contiguous() for name, x in given.items()}
    added = whole["bias"].masked_fill(~whole["mask"], -INF)
    expected = theirs(whole["query"], whole["key"], whole["value"], bias=added)
    assert_close(mh.attention(**given, impl=path), expected)


# Padding on the left shifts positions, or its rows, which see nothing, become NaN and spread through the next layer.
def test_left_padding(path):
    query, key, value = three(n_queries=53)
    padding = torch.tensor([19, 0])
    real = torch.arange(53) >= padding[:, None]
    query[~real[:, None].expand(2, 6, 53)] = NAN
    key[~real[:, None].expand(2, 3, 53)] = NAN
    value[~real[:, None].expand(2, 3, 53)] = NAN
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05, 0.0, 1.0])
    options = {"causal": True, "window": (31, 0), "alibi_slopes": slopes, "impl": path}
    found = mh.observe(query, key, value, mask=real[:, None, None], query_mask=real, **options)
    for b, n in enumerate(padding.tolist()):
        alone = mh.observe(query[b : b + 1, :, n:], key[b : b + 1, :, n:], value[b : b + 1, :, n:], **options)
        assert_close(found.output[b : b + 1, :, n:], alone.output)
        assert (found.output[b, :, :n] == 0).all()
        assert found.entropy[b, :, :n].isnan().all() and (found.argmax[b, :, :n] == -1).all()
        assert torch.equal(found.argmax[b, :, n:], alone.argmax[0] + n)
        assert_close(found.entropy[b, :, n:], alone.entropy[0])


# A row of -inf in a float mask: NaN in that row, or in all; filled with the lowest number instead, it attends evenly.
@pytest.mark.parametrize("rows", [[0], [36], [0, 1, 2, 3, 4, 5, 6], list(range(0, 37, 2)), list(range(37))])
def test_float_mask_with_rows_of_minus_infinity(path, rows):
    query, key, value = three()
    bias = random(1, 6, 37, 53, seed=3)
    bias[:, :, rows] = -INF
    found = mh.observe(query, key, value, bias=bias, impl=path)
    rest = [i for i in range(37) if i not in rows]
    assert (found.output[:, :, rows] == 0).all() and (found.lse[:, :, rows] == -INF).all()
    if rest:
        assert_close(found.output[:, :, rest], theirs(query[:, :, rest], key, value, bias=bias[:, :, rest]))
    swapped = mh.scaled_dot_product_attention(query, key, value, bias, enable_gqa=True)
    assert_close(swapped, found.output)
    leaves = [x.clone().requires_grad_() for x in (query, key, value, bias)]
    impl = "auto" if path == "native" else path  # whatever serves gradients
    mh.attention(*leaves[:3], bias=leaves[3], impl=impl).square().sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)
    assert (leaves[0].grad[:, :, rows] == 0).all() and (leaves[3].grad[:, :, rows] == 0).all()


# The cap taken after the mask: tanh makes a finite score of -inf, and what is hidden gets weight.
@pytest.mark.parametrize("how", ["mask", "bias", "lowest number", "causal", "key_lengths"])
def test_softcap_leaves_masked_scores_masked(path, how):
    query, key, value = three(n_queries=53)
    query = query * 4
    seen = random(1, 1, 53, 53, seed=3) < 0.5
    seen[..., 0] = True
    if how == "causal":
        seen = torch.ones(1, 1, 53, 53, dtype=torch.bool).tril()
    elif how == "key_lengths":
        seen = (torch.arange(53) < torch.tensor([53, 20])[:, None])[:, None, None].expand(2, 1, 53, 53)
    options = {
        "mask": {"mask": seen},
        "bias": {"bias": torch.zeros(seen.shape).masked_fill(~seen, -INF)},
        "lowest number": {"bias": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)},
        "causal": {"causal": True},
        "key_lengths": {"key_lengths": torch.tensor([53, 20])},
    }[how]
    keys = key.double().repeat_interleave(2, 1)
    capped = 0.5 * torch.tanh(query.double() @ keys.mT / math.sqrt(24) / 0.5)
    weights = capped.masked_fill(~seen, -INF).softmax(-1)
    found = mh.observe(query, key, value, softcap=0.5, impl=path, **options)
    assert_close(found.output, weights @ value.double().repeat_interleave(2, 1))
    assert (found.max_logit <= 0.5).all()


# Query heads dealt out to the key heads in turn (h mod G) where they should go in blocks (h // (H / G)).
def test_order_of_grouped_heads(path):
    query, key = random(1, 6, 5, 8), torch.zeros(1, 3, 7, 8)
    value = torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 7, 2)
    found = mh.attention(query, key, value, impl=path)
    assert found[0, :, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]
    key[:, 1, 3] = 100 * query[0, 2, 0]  # key head 1 draws query head 2 to its key 3
    seen = mh.observe(query, key, value, impl=path)
    assert seen.argmax[0, 2, 0] == 3 and seen.argmax[0, 1, 0] == 0 and seen.argmax[0, 4, 0] == 0


# Weight 0 times NaN is NaN: what lies unwritten behind a sequence's end reaches its rows.
@pytest.mark.parametrize("poison", [NAN, INF, 3e38])
def test_what_lies_in_padding(path, poison):
    query, key, value = three(n_keys=521)
    lengths = torch.tensor([263, 509])
    expected = [
        mh.attention(query[b : b + 1], key[b : b + 1, :, :n], value[b : b + 1, :, :n], impl=path)
        for b, n in enumerate(lengths.tolist())
    ]
    for b, n in enumerate(lengths.tolist()):
        key[b, :, n:], value[b, :, n:] = poison, poison
    seen = (torch.arange(521) < lengths[:, None])[:, None, None]
    for options in (
        {"key_lengths": lengths},
        {"mask": seen},
        {"bias": torch.zeros(2, 1, 1, 521).masked_fill(~seen, -INF)},
    ):
        assert_close(mh.attention(query, key, value, impl=path, **options), torch.cat(expected))
    query[:, :, 30:] = poison
    assert_close(
        mh.attention(query, key, value, impl=path, key_lengths=lengths)[:, :, :30], torch.cat(expected)[:, :, :30]
    )


# Another split of the work, so other bits, for other neighbours in the batch, their lengths, or a longer cache.
@pytest.mark.parametrize("n_queries", [1, 7, 150])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0}, {"window": (100, 0)}], ids=str)
def test_a_sequence_does_not_depend_on_its_neighbours(path, n_queries, options):
    if path == "reference":
        pytest.skip("the definition makes no promise on bits")
    query, key, value = three(b=1, n_queries=n_queries, n_keys=601)
    length = 499
    alone = mh.observe(query, key[:, :, :length], value[:, :, :length], key_lengths=[length], impl=path, **options)
    for others in (1, 2, 8):
        for theirs_length in (0, 1, 300, 601):
            q, k, v = three(b=1 + others, n_queries=n_queries, n_keys=601)
            place = others // 2
            q[place], k[place, :, :length], v[place, :, :length] = query[0], key[0, :, :length], value[0, :, :length]
            lengths = [theirs_length] * (1 + others)
            lengths[place] = length
            found = mh.observe(q, k, v, key_lengths=lengths, impl=path, **options)
            assert torch.equal(found.output[place], alone.output[0])
            for name, x in alone.statistics.items():
                assert torch.equal(found.statistics[name][place].nan_to_num(), x[0].nan_to_num()), name


def far_apart(x, stride, axis):
    """The same numbers with `axis` strided so far that offsets pass 2^31; only the pages touched come into being."""
    strides = list(x.contiguous().stride())
    strides[axis] = stride
    end = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides))
    assert end > 2**31
    return torch.empty_strided((end,), (1,), dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


# Offsets counted in 32 bits.
@pytest.mark.parametrize("which", ["query", "key", "value", "mask", "bias"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_offsets_past_2_to_the_31(path, which, axis):
    query, key, value = three(n_queries=2, n_keys=3, h=2, g=2, d=3, e=3)
    mask, bias = random(2, 2, 2, 3, seed=3) < 1, random(2, 2, 2, 3, seed=4)
    given = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
    expected = mh.attention(**given, impl="reference")
    x = given[which]
    far = far_apart(x, -(-(2**31) // (x.shape[axis] - 1)) + 4096, axis)
    assert_close(mh.attention(**given | {which: far}, impl=path), expected)


# Cells of the L x S square counted in 32 bits: 2.5e9 of them, of which a window leaves few.
def test_more_cells_than_2_to_the_31(path):
    if path == "reference":
        pytest.skip("the definition takes memory for every cell")
    n = 50_021
    query, key, value = (random(1, 1, n, 3, seed=i) for i in range(3))
    slopes = torch.tensor([0.1])
    found = mh.observe(query, key, value, window=(5, 0), alibi_slopes=slopes, impl=path)
    for first in (0, 25_000, n - 200):
        rows, keys = slice(first, first + 100), slice(max(0, first - 5), first + 100)
        alone = mh.observe(
            query[:, :, rows], key[:, :, keys], value[:, :, keys], window=(5, 0), alibi_slopes=slopes, impl="reference"
        )
        assert_close(found.output[:, :, rows], alone.output)
        assert torch.equal(found.argmax[:, :, rows], alone.argmax + keys.start)
