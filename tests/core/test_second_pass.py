"""What keys, distances and cells of a map gather over rows, against the whole matrix of weights."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead.core import cells, native
from multihead.core.statistics import distance_ranges

NAN, INF = float("nan"), float("inf")
NAMES = ("received", "received_max", "distance_histogram")


def same(found, expected, name, rtol, atol):
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )


def expected_of(weights, visible, positions, m, k):
    """Every statistic, cell by cell from the weights (B, H, L, S) and what is visible."""
    B, H, L, S = weights.shape
    sides = max(L, S).bit_length()
    ranges = distance_ranges(2 * sides + 1)
    histogram = weights.new_zeros(B, H, len(ranges))
    maps = weights.new_zeros(2, B, H, m, m)
    for b in range(B):
        for i in range(L):
            for j in range(S):
                cell = weights[b, :, i, j]
                distance = int(positions[min(b, len(positions) - 1), i]) - j
                histogram[b, :, next(n for n, (low, high) in enumerate(ranges) if low <= distance <= high)] += cell
                at = (b, slice(None), i * m // L, j * m // S)
                maps[0][at] += cell
                maps[1][at] = torch.maximum(maps[1][at], cell)
    keys = torch.full((B, H, L, k), -1)
    heaviest = weights.new_zeros(B, H, L, k)
    for row in ((b, h, i) for b in range(B) for h in range(H) for i in range(L)):
        seen = [j for j in range(S) if visible[row][j]]
        order = sorted(seen, key=lambda j: (-float(weights[row][j]), j))[:k]
        keys[row][: len(order)] = torch.tensor(order, dtype=torch.int64)
        heaviest[row][: len(order)] = weights[row][order]
    return {
        "received": weights.sum(2),
        "received_max": weights.amax(2),
        "distance_histogram": histogram,
        "map": maps[0],
        "map_max": maps[1],
        "top_keys": keys,
        "top_weights": heaviest,
    }


@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 4), (5, 13), (20, 2)])
def test_is_what_the_weights_give(lab, form, impl, m, k, monkeypatch):
    monkeypatch.setattr(cells, "_CELLS_AT_ONCE", 200)
    inputs = lab.tensors()
    problem = lab.problem(*inputs, **form)
    visible = problem.visible().expand(2, 6, 7, 11)
    weights = lab.oracle(*inputs, {x: y for x, y in form.items() if x != "sinks"}).used[..., :11]
    expected = expected_of(weights, visible, problem.visibility.positions(), m, k)
    found = mh.observe(
        *inputs, statistics=mh.Statistics("lse", *NAMES, map=m, top_keys=k), impl=impl, **form
    ).statistics
    real = problem.visibility.query_mask
    for name, value in expected.items():
        if real is not None and name.startswith("top"):  # rows of padding
            value = torch.where(real[:, None, :, None], value, -1 if name == "top_keys" else NAN)
        same(found[name], value, name, 1e-9, 1e-12)


@pytest.mark.usefixtures("level", "poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["causal", "window", "mask", "documents", "softcap", "lengths"])
def test_native_over_blocks_and_parts(dtype, form):
    """Rows and keys across the borders of blocks, against the definition."""
    random = torch.Generator().manual_seed(2)
    L, S = 331, 541
    query, key, value = (
        torch.randn(2, h, n, 17, generator=random, dtype=torch.float64).to(dtype) for h, n in ((4, L), (2, S), (2, S))
    )
    mask = torch.rand(2, 1, L, S, generator=random) < 0.3
    mask[:, :, 40:60] = False
    options = {
        "causal": {"causal": True},
        "window": {"window": (100, 3)},
        "mask": {"mask": mask},
        "documents": {"document_ids": (torch.arange(S) // 90).expand(2, -1), "causal": True},
        "softcap": {"softcap": 2.0, "alibi_slopes": torch.rand(4, generator=random) / 10},
        "lengths": {"key_lengths": [541, 300], "causal": True},
    }[form]
    asked = mh.Statistics("lse", *NAMES, map=29, top_keys=5)
    found = mh.observe(query, key, value, statistics=asked, impl="native", **options)
    doubles = {
        n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()
    }
    expected = mh.observe(query.double(), key.double(), value.double(), statistics=asked, impl="reference", **doubles)
    tolerance = 1e-11 if dtype is torch.float64 else 1e-5
    for name in asked.later:
        if name == "top_keys":  # of weights that are equal to rounding either may come first
            unlike = found.top_keys != expected.top_keys
            assert unlike.float().mean() < 0.001
            continue
        same(found.statistics[name], expected.statistics[name], name, tolerance, tolerance)
    assert torch.equal(mh.attention(query, key, value, impl="native", **options), found.output)


@pytest.mark.usefixtures("level")
def test_same_bits_for_threads_and_batch():
    random = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(3, h, n, 17, generator=random) for h, n in ((4, 2600), (2, 300), (2, 300)))
    asked = mh.Statistics("lse", *NAMES, map=7, top_keys=3)
    whole = mh.observe(query, key, value, statistics=asked, impl="native").statistics
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = mh.observe(query, key, value, statistics=asked, impl="native").statistics
    finally:
        torch.set_num_threads(threads)
    alone = mh.observe(query[1:2], key[1:2], value[1:2], statistics=asked, impl="native").statistics
    for name in asked.later:
        assert torch.equal(again[name], whole[name]) and torch.equal(alone[name][0], whole[name][1]), name


@pytest.mark.usefixtures("level", "poisoned")
def test_a_nan_shows_where_it_is_seen_and_nowhere_else():
    random = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 2, n, 5, generator=random) for n in (40, 40, 40))
    key[:, :, 30] = NAN
    asked = mh.Statistics("lse", *NAMES, map=4, top_keys=2)
    found = mh.observe(query, key, value, statistics=asked, causal=True, impl="native")
    # Rows 30 on see it, and put NaN on all that they see.
    assert found.received.isnan().all() and found.received_max.isnan().all()
    assert not found.map[:, :, :3].isnan().any() and found.map[:, :, 3].isnan().all()
    assert not found.top_weights[:, :, :30].isnan().any() and found.top_weights[:, :, 30:].isnan().all()
    hidden = mh.observe(query[:, :, :30], key, value, statistics=asked, causal=True, query_start=0, impl="native")
    assert not any(x.isnan().any() for x in hidden.statistics.values())


def test_rows_that_need_gradients_have_them_too():
    query, key, value = (torch.randn(1, 2, 9, 5, requires_grad=True) for _ in range(3))
    asked = mh.Statistics("entropy", "received", top_keys=2)
    seen = mh.observe(query, key, value, statistics=asked)
    seen.entropy.sum().backward()
    assert query.grad is not None and not seen.received.requires_grad
    assert torch.allclose(seen.received.sum(-1), torch.full((1, 2), 9.0))


def test_of_nothing():
    asked = mh.Statistics("lse", *NAMES, map=3, top_keys=2)
    for L, S in ((0, 5), (5, 0)):
        query, key = torch.randn(1, 2, L, 4), torch.randn(1, 2, S, 4)
        for impl in ("reference", "tiled", "native") if native.core else ("reference", "tiled"):
            seen = mh.observe(query, key, key, statistics=asked, impl=impl)
            assert all(
                (x == (-1 if name == "top_keys" else 0)).all()
                for name, x in seen.statistics.items()
                if name in asked.later
            )


def test_a_count_that_is_none_is_named():
    for wrong in ({"map": -1}, {"top_keys": True}, {"map": 2.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected how many"):
            mh.Statistics(**wrong)
    with pytest.raises(ValueError, match="'map' needs the argument map="):
        mh.Statistics("map")
