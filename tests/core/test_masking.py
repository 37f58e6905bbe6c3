"""Which keys each query sees: the dense view against a plain loop, spans and counts against the dense view."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multihead as mh
from multihead.core import masking
from multihead.core.functional import build_problem


def test_dense_is_the_contract(lab, form):
    query, key, value = lab.tensors()
    problem = lab.problem(query, key, value, **form)
    assert torch.equal(problem.visible().expand(2, 6, 7, 11), lab.visible_cells(query, key, form))


def test_dense_of_some_rows_and_keys(lab, form):
    visibility = lab.problem(*lab.tensors(), **form).visibility
    whole = visibility.dense().expand(2, 6, 7, 11)
    rows, keys = torch.tensor([5, 0, 3]), torch.tensor([10, 2])
    assert torch.equal(visibility.dense(rows, keys).expand(2, 6, 3, 2), whole[:, :, rows][..., keys])
    assert torch.equal(visibility.dense(slice(2, 5), slice(1, 9)).expand(2, 6, 3, 8), whole[:, :, 2:5, 1:9])
    assert visibility.dense(slice(0, 0), slice(3, 3)).shape[2:] == (0, 0)


def test_at_is_dense_at_listed_keys(lab, form):
    visibility = lab.problem(*lab.tensors(), **form).visibility
    keys = torch.randint(-3, 14, (2, 4, 5), generator=torch.Generator().manual_seed(4))
    whole = visibility.dense(slice(1, 5)).expand(2, 6, 4, 11)
    expected = whole.gather(3, keys[:, None].expand(2, 6, 4, 5).clamp(0, 10))
    expected &= ((keys >= 0) & (keys < 11))[:, None]
    assert torch.equal(visibility.at(slice(1, 5), keys).expand(2, 6, 4, 5), expected)


def test_one_sequence_is_the_same_alone(lab, form):
    visibility = lab.problem(*lab.tensors(), **form).visibility
    for b in range(2):
        alone = visibility.sequence(slice(b, b + 1)).dense().expand(1, 6, 7, 11)
        assert torch.equal(alone[0], visibility.dense().expand(2, 6, 7, 11)[b])


def problems(draw):
    """A problem with any mix of the rules, sizes from 1."""
    b, h = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    n, s = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def bools(*shape):
        return torch.rand(shape, generator=random) < draw(st.sampled_from([0.3, 0.8, 1.0]))

    options = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        side = st.one_of(st.none(), st.integers(0, 4))
        options["window"] = (draw(side), draw(side))
    if draw(st.booleans()):
        options["key_lengths"] = torch.randint(0, s + 1, (b,), generator=random)
    start = draw(st.sampled_from(["default", "int", "tensor"]))
    if start == "int":
        options["query_start"] = draw(st.integers(-12, 12))
    elif start == "tensor":
        options["query_start"] = torch.randint(-5, 6, (b,), generator=random)
    kind = draw(st.sampled_from(["none", "any", "keys", "run", "rows"]))
    if kind == "any":
        options["mask"] = bools(draw(st.sampled_from([1, b])), draw(st.sampled_from([1, h])), n, s)
    elif kind == "keys":
        options["mask"] = bools(b, 1, 1, s)
    elif kind == "rows":
        options["mask"] = bools(b, 1, n, 1)
    elif kind == "run":
        ends = torch.randint(0, s + 1, (2, b, 1, n, 1), generator=random).sort(0).values
        options["mask"] = (torch.arange(s) >= ends[0]) & (torch.arange(s) < ends[1])
    if draw(st.booleans()):
        ids = torch.randint(-1, 3, (b, s), generator=random)
        options["document_ids"] = ids.sort(1).values if draw(st.booleans()) else ids
    if draw(st.booleans()):
        options["query_mask"] = bools(b, n)
    query, key = torch.randn(b, h, n, 2, generator=random), torch.randn(b, 1, s, 2, generator=random)
    return query, key, options


@settings(max_examples=300, deadline=None)
@given(st.composite(problems)())
def test_spans_bounds_and_counts_are_those_of_the_dense_view(problem):
    query, key, options = problem
    visibility = build_problem(query, key, key, **options).visibility
    b, h, n, s = visibility.B, visibility.H, visibility.L, visibility.S
    dense = visibility.dense().expand(b, h, n, s)
    assert torch.equal(visibility.counts().expand(b, h, n), dense.sum(-1))
    begin, end = (x.expand(b, n)[:, None, :, None] for x in visibility.bounds())
    j = torch.arange(s)
    assert not (dense & ~((j >= begin) & (j < end))).any()
    spans = visibility.spans()
    if spans is not None:
        begin, end = (x.expand(b, n) for x in spans)
        assert begin.dtype is torch.int32
        inside = (j >= begin[..., None]) & (j < end[..., None])
        assert torch.equal(inside[:, None].expand_as(dense), dense)
        empty = ~dense.any(1).any(-1)
        assert (begin[empty] == 0).all() and (end[empty] == 0).all()


SPANNED = [
    "full", "causal", "starts", "window", "window open", "lengths", "no keys", "documents", "query mask",
    "mask of rows",
]  # fmt: skip


@pytest.mark.parametrize("name", SPANNED)
def test_these_forms_have_spans(lab, name):
    assert lab.problem(*lab.tensors(), **lab.forms[name]).visibility.spans() is not None


def test_left_padding_is_a_span(lab):
    mask = torch.ones(2, 1, 1, 11, dtype=torch.bool)
    mask[1, ..., :4] = False
    begin, end = lab.problem(*lab.tensors(), mask=mask, causal=True).visibility.spans()
    assert begin[1].tolist() == [4] * 7 and end[1].tolist() == [5, 6, 7, 8, 9, 10, 11]


def test_gaps_and_different_heads_have_no_spans(lab):
    mask = torch.ones(1, 1, 1, 11, dtype=torch.bool)
    mask[..., 5] = False
    assert lab.problem(*lab.tensors(), mask=mask).visibility.spans() is None
    heads = torch.ones(1, 6, 1, 11, dtype=torch.bool)
    assert lab.problem(*lab.tensors(), mask=heads).visibility.spans() is None
    scattered = lab.forms["documents scattered"]
    assert lab.problem(*lab.tensors(), **scattered).visibility.spans() is None


def test_cheap_tests_of_plain_calls(lab):
    inputs = lab.tensors()
    full, causal = lab.problem(*inputs).visibility, lab.problem(*inputs, causal=True).visibility
    assert full.is_full and not full.is_plain_causal
    assert causal.is_plain_causal and not causal.is_full
    for options in (
        {"window": (1, None)},
        {"key_lengths": [3, 4]},
        {"mask": torch.ones(11, dtype=torch.bool)},
    ):
        other = lab.problem(*inputs, causal=True, **options).visibility
        assert not other.is_plain_causal and not other.is_full


def test_documents_from_running_sums():
    assert mh.documents_from(torch.tensor([0, 2, 2, 5]), total=7).tolist() == [[0, 0, 2, 2, 2, -1, -1]]
    assert mh.documents_from(torch.tensor([0])).shape == (1, 0)


@pytest.mark.parametrize("sums", [[1, 2], [0, 3, 2], [0, 9], [[0, 2]]])
def test_documents_from_wrong_sums(sums):
    with pytest.raises(ValueError, match="cu_seqlens"):
        mh.documents_from(torch.tensor(sums), total=5)


def test_packed_documents_are_the_sequences_alone(lab):
    query, key, value = lab.tensors(b=1, n_queries=11, n_keys=11)
    packed = mh.attention(
        query,
        key,
        value,
        causal=True,
        document_ids=mh.documents_from(torch.tensor([0, 3, 7, 11])),
        impl="tiled",
    )
    for one in (slice(0, 3), slice(3, 7), slice(7, 11)):
        alone = mh.attention(query[:, :, one], key[:, :, one], value[:, :, one], causal=True, impl="tiled")
        lab.assert_same(packed[:, :, one], alone)


def test_a_large_mask_is_looked_at_in_blocks(monkeypatch, lab):
    monkeypatch.setattr(masking, "_ROWS_AT_ONCE", 30)
    mask = torch.ones(7, 11, dtype=torch.bool).tril(2)
    begin, end = lab.problem(*lab.tensors(), mask=mask).visibility.spans()
    assert begin.tolist() == [[0] * 7] and end.tolist() == [[3, 4, 5, 6, 7, 8, 9]]
