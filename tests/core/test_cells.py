"""Exact weights on demand, against the whole matrix."""

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


def test_gathered_weights_of_nothing(lab):
    problem = lab.problem(*lab.tensors(n_keys=0))
    lse = torch.full((2, 6, 7), -torch.inf)
    assert tiled.gather_weights(problem, lse, torch.zeros(1, 7, 2, dtype=torch.int64)).sum() == 0
