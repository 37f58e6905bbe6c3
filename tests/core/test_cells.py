"""Exact weights on demand, and what a second pass makes of them, against the whole matrix."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead.core import cells, tiled


@pytest.fixture
def seen(lab, form):
    """A problem, its lse, and its weights as the oracle has them."""
    inputs = lab.tensors()
    problem = lab.problem(*inputs, **form)
    lse = tiled.forward(problem, mh.Statistics("lse")).lse
    return problem, lse, lab.oracle(*inputs, form).used[..., :11]


def test_weights_of_any_slice(lab, seen):
    problem, lse, weights = seen
    lab.assert_same(tiled.weights(problem, lse), weights)
    lab.assert_same(tiled.weights(problem, lse, slice(2, 5), slice(3, 11)), weights[:, :, 2:5, 3:11])
    rows, keys = torch.tensor([6, 0]), torch.tensor([9, 9, 1])
    lab.assert_same(tiled.weights(problem, lse, rows, keys), weights[:, :, rows][..., keys])


def test_gathered_weights(lab, seen, monkeypatch):
    monkeypatch.setattr(cells, "_CELLS_AT_ONCE", 100)
    problem, lse, weights = seen
    for batch in (1, 2):
        keys = torch.randint(-4, 15, (batch, 7, 5), generator=torch.Generator().manual_seed(8))
        inside = ((keys >= 0) & (keys < 11)).expand(2, 7, 5)[:, None]
        expected = weights.gather(3, keys.expand(2, 7, 5).clamp(0, 10)[:, None].expand(2, 6, 7, 5))
        lab.assert_same(tiled.gather_weights(problem, lse, keys), torch.where(inside, expected, 0))


@pytest.mark.parametrize("m", [1, 3, 7, 11, 20])
def test_pooled_map(lab, seen, m, monkeypatch):
    monkeypatch.setattr(cells, "_CELLS_AT_ONCE", 200)
    problem, lse, weights = seen
    total, largest = tiled.pooled_map(problem, lse, m)
    for a in range(m):
        for c in range(m):
            block = weights[:, :, a * 7 // m : (a + 1) * 7 // m, c * 11 // m : (c + 1) * 11 // m].flatten(2)
            lab.assert_same(total[:, :, a, c], block.sum(-1))
            if block.shape[-1]:
                lab.assert_same(largest[:, :, a, c], block.amax(-1))
            else:
                assert (largest[:, :, a, c] == 0).all()


@pytest.mark.parametrize("k", [1, 4, 13])
def test_top_keys(lab, seen, k, monkeypatch):
    monkeypatch.setattr(cells, "_CELLS_AT_ONCE", 200)
    problem, lse, weights = seen
    keys, heaviest = tiled.top_keys(problem, lse, k)
    visible = problem.visible().expand(2, 6, 7, 11)
    n = min(k, 11)
    lab.assert_same(heaviest[..., :n], weights.sort(-1, descending=True).values[..., :n])
    count = visible.sum(-1, keepdim=True)
    assert torch.equal(keys >= 0, torch.arange(k) < count.clamp(max=n))
    lab.assert_same(torch.where(keys >= 0, weights.gather(-1, keys.clamp(min=0)), 0), heaviest)


def test_second_pass_of_nothing(lab):
    problem = lab.problem(*lab.tensors(n_keys=0))
    lse = torch.full((2, 6, 7), -torch.inf)
    assert tiled.pooled_map(problem, lse, 3)[0].sum() == 0
    assert (tiled.top_keys(problem, lse, 2)[0] == -1).all()
    assert tiled.gather_weights(problem, lse, torch.zeros(1, 7, 2, dtype=torch.int64)).sum() == 0
