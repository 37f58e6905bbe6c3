"""What the tests of the core share: problems on small primes, and an oracle made of PyTorch's own parts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import multihead as mh
from multihead.core import functional, native, tiles

B, H, G, L, S, D, E = 2, 6, 3, 7, 11, 5, 13
INF = float("inf")


@pytest.fixture(params=native.core.levels().split() if native.core else [])
def level(request):
    """Each instruction-set level of the compiled core in turn."""
    best = native.core.level()
    assert native.core.set_level(request.param)
    yield request.param
    native.core.set_level(best)


@pytest.fixture
def poisoned(monkeypatch):
    """What the core is to fill holds NaN before, so that a cell left out shows."""
    empty = torch.empty

    def filled(*shape, **options):
        tensor = empty(*shape, **options)
        return tensor.fill_(math.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).min // 2)

    monkeypatch.setattr(native.torch, "empty", filled)


def tensors(seed=0, dtype=torch.float64, b=B, h=H, g=G, n_queries=L, n_keys=S, d=D, e=E):
    """Random query, key and value whose axes are different primes."""
    random = torch.Generator().manual_seed(seed)
    shapes = (b, h, n_queries, d), (b, g, n_keys, d), (b, g, n_keys, e)
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def forms():
    """Options of every form of attention, by name, for the sizes above."""
    random = torch.Generator().manual_seed(1)

    def floats(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    def bools(*shape):
        return torch.rand(shape, generator=random) < 0.6

    hole = floats(1, H, L, S)
    hole[bools(1, H, L, S)] = -INF
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, -1, -1], [4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0]])
    return {
        "full": {},
        "causal": {"causal": True},
        "top-left": {"causal": True, "query_start": 0},
        "starts": {"causal": True, "query_start": torch.tensor([-3, 9])},
        "window": {"window": (2, 1)},
        "window open": {"window": (None, 0), "causal": True},
        "mask": {"mask": bools(B, H, L, S)},
        "mask of keys": {"mask": bools(B, 1, 1, S)},
        "mask of rows": {"mask": bools(L, 1)},
        "bias": {"bias": floats(B, 1, L, S)},
        "bias of heads": {"bias": floats(1, H, 1, 1)},
        "bias with -inf": {"bias": hole},
        "alibi": {"alibi_slopes": floats(H).exp(), "causal": True},
        "alibi both ways": {"alibi_slopes": floats(H).exp()},
        "lengths": {"key_lengths": torch.tensor([4, 11]), "causal": True},
        "no keys": {"key_lengths": torch.tensor([0, 9])},
        "documents": {"document_ids": ids, "causal": True},
        "documents scattered": {"document_ids": torch.tensor([[0, 1] * 5 + [0], [2] * 4 + [-1] * 3 + [2] * 4])},
        "query mask": {"query_mask": bools(B, L), "causal": True},
        "softcap": {"softcap": 0.7},
        "sinks": {"sinks": floats(H), "causal": True, "query_start": -2},
        "scale": {"scale": -0.3},
        "everything": {
            "causal": True,
            "window": (6, None),
            "mask": bools(B, 1, L, S),
            "bias": hole,
            "alibi_slopes": floats(H).exp(),
            "key_lengths": torch.tensor([8, 10]),
            "query_mask": bools(B, L),
            "document_ids": ids,
            "query_start": torch.tensor([2, 4]),
            "scale": 0.9,
            "softcap": 1.3,
            "sinks": floats(H),
        },
    }


def visible_cells(query, key, options):
    """Visible cells by a plain loop over the contract's rules: bool (B, H, L, S)."""
    (b, h, n, _), s = query.shape, key.shape[2]
    lengths = options.get("key_lengths")
    start = options.get("query_start")
    ids, query_mask = options.get("document_ids"), options.get("query_mask")
    left, right = options.get("window") or (None, None)
    seen = torch.zeros(b, h, n, s, dtype=torch.bool)
    for x in range(b):
        if start is None:
            first = s - n if lengths is None else max(0, int(lengths[x]) - n)
        else:
            first = start if isinstance(start, int) else int(start[x])
        for i in range(n):
            p = first + i
            for j in range(s):
                rules = [
                    not options.get("causal") or j <= p,
                    left is None or j >= p - left,
                    right is None or j <= p + right,
                    lengths is None or j < lengths[x],
                    ids is None or (0 <= p < s and ids[x, p] != -1 and ids[x, p] == ids[x, j]),
                    query_mask is None or bool(query_mask[x, i]),
                ]
                seen[x, :, i, j] = all(rules)
    if options.get("mask") is not None:
        seen &= options["mask"]
    if options.get("bias") is not None:
        seen &= options["bias"] != -INF
    return seen


def positions(query, key, options):
    """Position of each query among the keys: (B, L)."""
    (b, _, n, _), s = query.shape, key.shape[2]
    start, lengths = options.get("query_start"), options.get("key_lengths")
    if start is None:
        start = s - n if lengths is None else torch.as_tensor(lengths).sub(n).clamp(min=0)
    return torch.as_tensor(start).reshape(-1, 1).expand(b, 1) + torch.arange(n)


def oracle(query, key, value, options):
    """Output, weights on keys (renormalised) and masked scores in float64, by PyTorch's own softmax."""
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = options.get("scale")
    s = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if options.get("softcap"):
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if options.get("bias") is not None:
        s = s + options["bias"].double()
    if options.get("alibi_slopes") is not None:
        distance = positions(query, key, options)[:, None, :, None] - torch.arange(k.shape[2])
        s = s - options["alibi_slopes"].double().view(-1, 1, 1) * distance.abs()
    seen = visible_cells(query, key, options)
    s = s.masked_fill(~seen, -INF)
    weights = F.softmax(s, -1).nan_to_num(0)
    used = weights
    if options.get("sinks") is not None:
        sink = options["sinks"].double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        used = F.softmax(torch.cat([s, sink], -1), -1)[..., :-1]
    return SimpleNamespace(output=used @ v, weights=weights, used=used, scores=s, visible=seen)


def assert_same(got, expected, tolerance=1e-12):
    torch.testing.assert_close(
        got.to(expected.dtype), expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False
    )


@pytest.fixture
def lab():
    """The helpers above in one place."""
    return SimpleNamespace(
        tensors=tensors,
        forms=forms(),
        oracle=oracle,
        visible_cells=visible_cells,
        positions=positions,
        assert_same=assert_same,
        observe=mh.observe,
        problem=functional.build_problem,
    )


@pytest.fixture(params=list(forms()))
def form(request):
    """The options of each form of attention in turn."""
    return forms()[request.param]


@pytest.fixture(params=["reference", "tiled"])
def impl(request):
    return request.param


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 3 queries x 4 keys, so that small problems have many."""
    monkeypatch.setattr(tiles, "block_sizes", lambda problem: (3, 4))
