"""Caches: prefill then decode equals one full pass, whatever the kind, the lengths and the way tokens come."""

from __future__ import annotations

import os

import pytest
import torch

import multihead as mh
from multihead import Pages
from multihead.bench import growth
from multihead.core import native
from multihead.nn import KVCache, PagedKVCache
from multihead.nn.kv_cache import _Cache

B, L, H, G, D, E, WIDTH = 3, 17, 6, 3, 4, 5, 13
EXACT = {
    "contiguous": lambda: KVCache(),
    "paged": lambda: PagedKVCache(page_size=4),
    "paged, one": lambda: PagedKVCache(page_size=1),
    "pool": lambda: PagedKVCache(page_size=8, n_pages=9),
    "limited": lambda: KVCache(max_length=L),
}
ROUNDED = {
    "int8": lambda: KVCache(dtype=torch.int8, block_size=4),
    "int8 paged": lambda: PagedKVCache(page_size=4, dtype=torch.int8),
    "int8, long blocks": lambda: KVCache(dtype=torch.int8),
}
CUTS = {
    "at once": [17],
    "a token each": [1] * 17,
    "prefill, decode": [9, 1, 1, 1, 1, 1, 1, 1, 1],
    "chunks": [3, 8, 5, 1],
}
OPTIONS = {
    "causal": {"causal": True},
    "rotary": {"causal": True, "rotary": mh.nn.Rotary(theta=50.0)},
    "window": {"causal": True, "window": (4, 0), "rotary": mh.nn.Rotary(pairing="interleaved")},
    "alibi": {"causal": True, "alibi": True, "sinks": True},
}


def make(dtype=torch.float64, **options):
    return mh.MultiHeadAttention(WIDTH, H, G, d_head=D, d_value=E, bias=True, dtype=dtype, **options).requires_grad_(
        False
    )


@pytest.fixture
def x():
    return torch.randn(B, L, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_prefill_then_decode_is_one_full_pass(kind, options, execution, x):
    layer = make(**options, execution=execution)
    for cuts in CUTS.values():
        cache = EXACT[kind]()
        parts = [layer(part, cache=cache) for part in x.split(cuts, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=1e-12, atol=1e-12)
        assert cache.lengths.tolist() == [L] * B


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [*EXACT, *ROUNDED])
def test_sequences_of_different_lengths(kind, options, x):
    layer = make(**options)
    lengths = [9, 4, 1]
    cache = {**EXACT, **ROUNDED}[kind]()
    prompt = layer(x[:, :9], key_lengths=lengths, cache=cache)
    assert cache.lengths.tolist() == lengths
    tokens = [layer(x[:, 9 + i : 10 + i], cache=cache) for i in range(5)]
    for b, n in enumerate(lengths):
        alone = torch.cat([x[b : b + 1, :n], x[b : b + 1, 9:14]], 1)
        expected = layer(alone)[0]
        got = torch.cat([prompt[b, :n], *(token[b] for token in tokens)])
        tolerance = 1e-12 if kind in EXACT else 0.02
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
@pytest.mark.parametrize("kind", EXACT)
def test_chunks_of_different_lengths_behind_each_other(kind, execution, x):
    layer, cache = make(**OPTIONS["window"], execution=execution), EXACT[kind]()
    chunks, seen = [(5, [3, 5, 2]), (4, [4, 1, 0]), (3, [0, 3, 3])], [[], [], []]
    for length, lengths in chunks:
        tokens = torch.randn(B, length, WIDTH, dtype=torch.float64)
        y = layer(tokens, key_lengths=torch.tensor(lengths), cache=cache)
        for b, n in enumerate(lengths):
            seen[b].append((tokens[b, :n], y[b, :n]))
    assert cache.lengths.tolist() == [7, 9, 5]
    for parts in seen:
        inputs, outputs = (torch.cat(tensors) for tensors in zip(*parts))
        torch.testing.assert_close(outputs, layer(inputs[None])[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_padding_on_the_left_is_a_mask_over_all_keys(kind, execution, x):
    layer, cache, padding = make(**OPTIONS["rotary"], execution=execution), EXACT[kind](), [4, 0, 7]
    real = torch.arange(L) >= torch.tensor(padding)[:, None]
    x = x.masked_fill(~real[..., None], 1e3)
    first = layer(x[:, :9], mask=real[:, None, None, :9], query_mask=real[:, :9], cache=cache)
    rest = [layer(x[:, i : i + 1], mask=real[:, None, None, : i + 1], cache=cache) for i in range(9, L)]
    got = torch.cat([first, *rest], 1)
    for b, n in enumerate(padding):
        torch.testing.assert_close(got[b, n:], layer(x[b : b + 1, n:])[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("make_cache", [ROUNDED["int8"], ROUNDED["int8 paged"]], ids=["contiguous", "paged"])
def test_int8_rounds_by_half_a_step_of_its_block_and_head(make_cache):
    key = torch.randn(B, G, L, D) * torch.logspace(-3, 3, L)[:, None]  # each block has its own size
    key[:, 1] *= 100  # and so has each head
    value = torch.randn(B, G, L, E)
    cache = make_cache()
    cache.append(key, value)
    read = cache.read()
    for plain, rounded in ((key, read.key), (value, read.value)):
        for begin in range(0, L, 4):
            block, got = plain[:, :, begin : begin + 4], rounded[:, :, begin : begin + 4]
            step = block.abs().amax((2, 3), keepdim=True) / 127
            assert ((got - block).abs() <= step * 0.5001).all()
            assert ((got - block).abs() > step * 0.3).any()  # it does round
            assert (got[..., :1] / step - (got[..., :1] / step).round()).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ROUNDED)
def test_int8_does_not_depend_on_how_tokens_came(kind):
    key, value = torch.randn(B, G, L, D), torch.randn(B, G, L, E)
    reads = []
    for cuts in CUTS.values():
        cache = ROUNDED[kind]()
        for k, v in zip(key.split(cuts, 2), value.split(cuts, 2)):
            cache.append(k, v)
        reads.append(cache.read())
    for other in reads[1:]:
        assert torch.equal(other.key, reads[0].key) and torch.equal(other.value, reads[0].value)


def test_int8_takes_a_quarter_and_a_float_type_is_kept_as_asked():
    key, value = torch.randn(2, 3, 1024, 64), torch.randn(2, 3, 1024, 64)
    sizes = {}
    for dtype in (None, torch.int8, torch.float16):
        cache = KVCache(dtype=dtype)
        cache.append(key, value)
        sizes[dtype] = cache.nbytes
        assert cache.read().key.dtype is torch.float32
    assert sizes[None] == key.nbytes + value.nbytes
    assert sizes[torch.float16] == sizes[None] / 2
    assert sizes[torch.int8] < 0.32 * sizes[None]  # a quarter, the scales, and the last block as it came
    torch.testing.assert_close(cache.read().key, key.half().float(), rtol=0, atol=0)


def test_a_contiguous_cache_does_not_copy_at_every_step():
    cache, places = KVCache(), set()
    for _ in range(1000):
        cache.append(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
        places.add(cache.read().key.data_ptr())
    assert len(places) <= 11  # 1, 2, 4, ..., 1024
    assert cache.nbytes <= 2 * 1024 * 2 * 4


@pytest.mark.parametrize("kind", [*EXACT, *ROUNDED])
def test_what_is_not_written_is_never_seen(kind, monkeypatch, x):
    """Buffers begin as NaN: any cell that is read without having been written shows."""
    real = torch.Tensor.new_empty

    def poisoned(self, *shape, **options):
        made = real(self, *shape, **options)
        return made.fill_(float("nan") if made.dtype.is_floating_point else 77)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    layer, cache = make(causal=True), {**EXACT, **ROUNDED}[kind]()
    layer(x[:, :6], key_lengths=[6, 2, 0], cache=cache)
    y = layer(x[:, 6:7], cache=cache)
    assert y.isfinite().all()
    alone = layer(torch.cat([x[1:2, :2], x[1:2, 6:7]], 1))[0, -1]
    torch.testing.assert_close(y[1, 0], alone, rtol=0.02, atol=0.02)


PAGED = {name: make_cache for name, make_cache in {**EXACT, **ROUNDED}.items() if "page" in name or "int8" in name}


@pytest.fixture
def no_gathering(monkeypatch):
    if native.core is None:
        pytest.skip("the compiled core is not built")

    def gathered(*_):
        raise AssertionError("a copy of the cache was made")

    monkeypatch.setattr(Pages, "dense", gathered)


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
@pytest.mark.parametrize("kind", PAGED)
def test_attention_reads_pages_where_they_lie(kind, execution, x, no_gathering):
    layer, cache = make(causal=True, execution=execution), PAGED[kind]()
    record = mh.nn.Record(mh.Statistics("entropy"))
    layer(x[:, :9], key_lengths=[9, 4, 1], cache=cache)
    for i in range(9, L):
        layer(x[:, i : i + 1], cache=cache, record=record, mask=torch.ones(cache.length + 1, dtype=torch.bool))
    with pytest.raises(AssertionError, match="a copy of the cache"):
        cache.read()


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", PAGED)
def test_pages_give_what_their_plain_numbers_give(kind, dtype, execution, x, monkeypatch):
    layer, x = make(dtype, **OPTIONS["rotary"], execution=execution), x.to(dtype)
    outputs = []
    for reads_pages in (True, False):
        if not reads_pages:
            monkeypatch.setattr(_Cache, "pages", lambda cache: None)
        cache = PAGED[kind]()
        prompt = layer(x[:, :9], key_lengths=[9, 4, 1], cache=cache)
        prompt[1, 4:], prompt[2, 1:] = 0, 0
        outputs.append(torch.cat([prompt, *(layer(part, cache=cache) for part in x[:, 9:].split([1, 5, 2], 1))], 1))
    slack = {torch.float64: 1e-6 if "int8" in kind else 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(*outputs, rtol=slack, atol=slack)


@pytest.mark.parametrize("kind", ["paged", "int8"])
def test_a_graph_and_autocast_take_plain_tensors(kind, x, monkeypatch):
    layer = make(torch.float32, causal=True)
    context = make(torch.float32, d_context=7)
    x, source = x.float(), torch.randn(B, 5, 7)
    cache, filled = PAGED[kind](), PAGED[kind]()
    expected = layer(x, cache=PAGED[kind]())[:, 9:10], context(x, source, cache=filled)
    layer(x[:, :9], cache=cache)
    torch._dynamo.reset()
    step = torch.compile(layer, backend="eager")
    monkeypatch.setattr(_Cache, "pages", None)  # whoever calls it fails
    torch.testing.assert_close(step(x[:, 9:10], cache=cache), expected[0], rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        found = context(x, source, cache=filled)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected[1], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", PAGED)
def test_queries_have_gradients_over_a_cached_context(kind, x):
    layer = make(d_context=7)
    source, cache = torch.randn(B, 5, 7, dtype=torch.float64), PAGED[kind]()
    layer(x, source, key_lengths=[5, 3, 1], cache=cache)
    read, plain = cache.read(), KVCache()
    plain.append(read.key, read.value, read.key_lengths)
    x.requires_grad_()
    found, expected = (torch.autograd.grad(layer(x, source, cache=c).square().sum(), x)[0] for c in (cache, plain))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(not os.access(growth._CLEAR, os.W_OK), reason="the system does not tell the peak from a moment on")
@pytest.mark.parametrize("cache", [PagedKVCache(64), KVCache(dtype=torch.int8), PagedKVCache(64, dtype=torch.int8)])
def test_a_step_of_decoding_holds_no_copy_of_the_cache(cache):
    if native.core is None:
        pytest.skip("the compiled core is not built")
    layer = mh.MultiHeadAttention(256, 4, causal=True).requires_grad_(False)
    x, long = torch.randn(2, 1, 256), torch.randn(2, 4, 1 << 14, 64)  # 32 MB each of keys and of values
    cache.append(long, long)
    layer(x, cache=cache)  # makes room
    before = growth._peak_from_here()
    layer(x, cache=cache)
    assert growth._peak() - before < long.nbytes / 8


@pytest.mark.parametrize("path", ["native", "tiled"])
@pytest.mark.parametrize("kind", ["paged", "int8", "int8 paged"])
def test_a_window_gives_pages_back(kind, path, monkeypatch):
    monkeypatch.setattr(native, "core", native.core if path == "native" else None)
    layer, x = make(**OPTIONS["window"]), torch.randn(B, 61, WIDTH, dtype=torch.float64)
    n_pages = 3 + 2 * B  # the prompt's first, then at most three a sequence
    cache = {
        "paged": lambda: PagedKVCache(page_size=4, n_pages=n_pages),
        "int8": lambda: KVCache(dtype=torch.int8, block_size=4),
        "int8 paged": lambda: PagedKVCache(page_size=4, n_pages=n_pages, dtype=torch.int8),
    }[kind]()
    prompt = layer(x[:, :9], key_lengths=[9, 4, 1], cache=cache)
    sizes, tokens = [], []
    for i in range(9, 61):
        tokens.append(layer(x[:, i : i + 1], cache=cache))
        sizes.append(cache.nbytes)
    assert cache.lengths.tolist() == [61, 56, 53] and len(set(sizes[9:])) == 1
    tolerance = 1e-12 if kind == "paged" else 0.02
    for b, n in enumerate([9, 4, 1]):
        alone = layer(torch.cat([x[b : b + 1, :n], x[b : b + 1, 9:]], 1))[0]
        got = torch.cat([prompt[b, :n], *(token[b] for token in tokens)])
        torch.testing.assert_close(got, alone, rtol=tolerance, atol=tolerance)
    if kind != "int8":
        assert (cache.block_tables >= 0).sum() <= n_pages and cache.block_tables.shape == (B, 16)
        cache.release(0)
        cache.keep_last(4)
        left = 4 * (n_pages - int((cache.block_tables >= 0).sum()))
        begun = layer(x[:, :left], cache=cache, key_lengths=[left, 0, 0])
        torch.testing.assert_close(begun[0], layer(x[:1, :left])[0], rtol=tolerance, atol=tolerance)
        used = cache.block_tables[cache.block_tables >= 0].tolist()
        assert sorted(used) == list(range(n_pages))


@pytest.mark.parametrize(
    "make_cache",
    [
        lambda: KVCache(12),
        lambda: KVCache(12, dtype=torch.int8, block_size=4),
        lambda: PagedKVCache(4, 12),
        lambda: PagedKVCache(4, 12, dtype=torch.int8),
    ],
)
def test_room_does_not_double_beyond_what_max_length_needs(make_cache):
    slowly, at_once = make_cache(), make_cache()
    numbers = torch.ones(2, 3, 12, 5)
    at_once.append(numbers, numbers)
    for part in numbers[:, :, :9].split([5, 4], 2):
        slowly.append(part, part)
    assert slowly.nbytes <= at_once.nbytes


def test_pages_go_back_to_the_pool():
    layer, cache = make(causal=True), PagedKVCache(page_size=4, n_pages=8)
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    layer(x, cache=cache)
    assert sorted(cache.block_tables.flatten().tolist()) == list(range(8))
    with pytest.raises(ValueError, match="cache: full: n_pages is 8, and 10 pages of 4 are needed"):
        layer(x[:, :1], cache=cache)
    assert cache.lengths.tolist() == [16, 16]
    cache.release(0)
    assert cache.lengths.tolist() == [0, 16]
    # Another sequence begins in the freed pages while the second goes on.
    y = layer(x[:, :3].flip(1), cache=cache)
    assert cache.block_tables.tolist()[0][1:] == [-1] * 4
    torch.testing.assert_close(y[0], layer(x[:1, :3].flip(1))[0], rtol=1e-12, atol=1e-12)
    whole = torch.cat([x[1:], x[1:, :3].flip(1)], 1)
    torch.testing.assert_close(y[1], layer(whole)[0, 16:], rtol=1e-12, atol=1e-12)
    with pytest.raises(IndexError, match="sequence: expected a number under B=2, got 2"):
        cache.release(2)


def test_a_released_sequence_leaves_no_trace_in_int8():
    cache = PagedKVCache(page_size=4, dtype=torch.int8)
    cache.append(torch.full((2, 1, 6, 2), 1000.0), torch.ones(2, 1, 6, 2))
    cache.release(0)
    small = torch.tensor([0.5, 0.25]).expand(2, 1, 1, 2)
    cache.append(small, small)
    torch.testing.assert_close(cache.read().key[0, 0, 0], small[0, 0, 0], rtol=0.01, atol=0)


def test_a_context_is_projected_once(x):
    layer = make(d_context=7, output_bias=False)
    context = torch.randn(B, 5, 7, dtype=torch.float64)
    calls = []
    layer.W_KV.register_forward_hook(lambda *_: calls.append(1))
    for execution in ("parallel", "sequential"):
        layer.execution = execution
        cache = KVCache()
        parts = [layer(x[:, i : i + 1], context, key_lengths=[5, 3, 1], cache=cache) for i in range(4)]
        expected = layer(x[:, :4], context, key_lengths=[5, 3, 1])
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-12, atol=1e-12)
        assert cache.lengths.tolist() == [5, 3, 1]
    assert len(calls) == 2  # parallel: one for the cache, one for the whole


def test_reset_begins_anew(x):
    layer = make(causal=True)
    for cache in (KVCache(), PagedKVCache(4), KVCache(dtype=torch.int8)):
        layer(x, cache=cache)
        cache.reset()
        assert cache.length == 0 and cache.nbytes == 0
        y = layer(x[:2, :3], cache=cache)
        torch.testing.assert_close(y, layer(x[:2, :3]), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("cache", [KVCache(max_length=8), PagedKVCache(4, 8), KVCache(8, dtype=torch.int8)])
def test_errors_leave_the_cache_as_it_was(cache, x):
    layer = make(causal=True)
    layer(x[:, :6], cache=cache)
    before = cache.read()
    wrong = [
        (lambda: layer(x[:, :3], cache=cache), ValueError, "cache: full: max_length is 8, sequence 0 has 6 and 3 more"),
        (lambda: layer(x[:2, :1], cache=cache), ValueError, "x: expected B=3 sequences, as the cache holds, got 2"),
        (lambda: make(torch.float32)(x[:, :1].float(), cache=cache), TypeError, "key: expected torch.float64, as the"),
        (lambda: cache.append(before.key[:2, :, :1], before.value[:2, :, :1]), ValueError, "key: .*B .* is 2, not 3"),
        (lambda: cache.append(before.key[:, :2, :1], before.value[:, :2, :1]), ValueError, "key: .*G .* is 2, not 3"),
        (lambda: cache.append(before.value[:, :, :1], before.value[:, :, :1]), ValueError, "key: .*D .* is 5, not 4"),
        (lambda: cache.append(before.key[:, :, :1], before.value[:, :, :2]), ValueError, "value: .*L .* is 2, not 1"),
        (
            lambda: layer(x[:, :1], key_lengths=[1, 2, 1], cache=cache),
            ValueError,
            r"key_lengths: expected 0 to L=1 .*\[1, 2",
        ),
        (
            lambda: layer.requires_grad_(True)(x[:, :1], cache=cache),
            RuntimeError,
            r"key: no gradient passes through a cache; call under torch.no_grad\(\)",
        ),
    ]
    for call, error, words in wrong:
        with pytest.raises(error, match=words):
            call()
        assert cache.lengths.tolist() == [6, 6, 6]
        assert torch.equal(cache.read().key, before.key) and torch.equal(cache.read().value, before.value)
    with torch.no_grad():
        layer(x[:, 6:8], cache=cache)


def test_errors_of_the_constructors():
    with pytest.raises(ValueError, match="max_length: expected 0 or more, got -1"):
        KVCache(-1)
    with pytest.raises(TypeError, match=r"dtype: expected a float type, torch.int8, or None .*, got torch.int32"):
        KVCache(dtype=torch.int32)
    with pytest.raises(ValueError, match="page_size, block_size: expected 1 or more, got 0"):
        PagedKVCache(0)
    with pytest.raises(RuntimeError, match="cache: nothing was appended yet"):
        KVCache().read()


def test_repr():
    cache = KVCache(max_length=8)
    cache.append(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4))
    assert repr(cache) == "KVCache(lengths [3, 3] of 8, torch.float32, 192 bytes)"
