"""The definition: output and statistics of both PyTorch paths against PyTorch's own softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical

import multihead as mh

pytestmark = pytest.mark.usefixtures("small_tiles")


def test_output_is_softmax_of_masked_scores_times_values(lab, form, impl):
    query, key, value = lab.tensors()
    output = mh.attention(query, key, value, impl=impl, **form)
    lab.assert_same(output, lab.oracle(query, key, value, form).output)


@pytest.mark.parametrize("mask_kind", ["none", "causal", "bool", "float"])
def test_output_is_that_of_scaled_dot_product_attention(lab, impl, mask_kind):
    query, key, value = lab.tensors()
    mask = torch.rand(2, 6, 7, 11, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[..., 0] = True
    bias = torch.randn(2, 6, 7, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theirs, ours = {
        "none": ({}, {}),
        "causal": ({"is_causal": True}, {"causal": True, "query_start": 0}),
        "bool": ({"attn_mask": mask}, {"mask": mask}),
        "float": ({"attn_mask": bias}, {"bias": bias}),
    }[mask_kind]
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **theirs)
    lab.assert_same(mh.attention(query, key, value, impl=impl, **ours), expected)


def test_row_statistics_are_those_of_the_weights(lab, form, impl):
    query, key, value = lab.tensors()
    found = mh.observe(query, key, value, impl=impl, **form).statistics
    truth = lab.oracle(query, key, value, form)
    some = truth.visible.any(-1)
    rows = some if "query_mask" not in form else some & form["query_mask"][:, None]
    weights, scores = truth.weights[rows], truth.scores[rows]
    entropy = Categorical(probs=weights).entropy()
    j = torch.arange(11, dtype=torch.float64)
    mean = weights @ j
    expected = {
        "max_logit": scores.amax(-1),
        "max_weight": weights.amax(-1),
        "argmax": scores.argmax(-1),
        "entropy": entropy,
        "effective_keys": 1 / weights.square().sum(-1),
        "key_mean": mean,
        "key_variance": weights @ j.square() - mean.square(),
    }
    lse = scores.logsumexp(-1)
    if "sinks" in form:
        sink = form["sinks"].view(1, -1, 1).expand(some.shape)[rows]
        expected["sink_mass"] = torch.sigmoid(sink - lse)
        lse = torch.logaddexp(lse, sink)
    expected["lse"] = lse
    # PyTorch's Categorical clamps probabilities at float64's eps, so entropies agree to about that times the keys.
    for name, value_of in expected.items():
        lab.assert_same(found[name][rows], value_of.to(found[name].dtype), 1e-11)
    count = truth.visible[rows].sum(-1)
    lab.assert_same(found["evenness"][rows][count > 1], (entropy / count.log())[count > 1], 1e-6)
    assert found["evenness"][rows][count < 2].isnan().all()


def test_class_offset_and_pair_masses_are_sums_of_weights(lab, form, impl):
    query, key, value = lab.tensors()
    classes = torch.tensor([0, 1, 2, -1, 0, 0, 2, -1, 2, 0, 1])
    pairs = [torch.randint(-1, 11, (7, 3), generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    asked = mh.Statistics("lse", classes=classes, n_classes=4, offsets=(-1, 0, 2, -40), pairs=pairs)
    found = mh.observe(query, key, value, statistics=asked, impl=impl, **form).statistics
    weights = lab.oracle(query, key, value, form).weights
    hidden = torch.zeros(2, 7, dtype=torch.bool) if "query_mask" not in form else ~form["query_mask"]

    by_class = torch.stack([weights[..., classes == c].sum(-1) for c in range(4)], -1)
    by_offset, by_pair = torch.zeros(2, 6, 7, 4).double(), torch.zeros(2, 6, 7, 2).double()
    place = lab.positions(query, key, form)
    for b in range(2):
        for i in range(7):
            for n, k in enumerate((-1, 0, 2, -40)):
                j = int(place[b, i]) + k
                if 0 <= j < 11:
                    by_offset[b, :, i, n] = weights[b, :, i, j]
            for n, listed in enumerate(pairs):
                keys = sorted(set(listed[i].tolist()) - {-1})
                by_pair[b, :, i, n] = weights[b, :, i, keys].sum(-1)
    for name, expected in (("class_mass", by_class), ("offset_mass", by_offset), ("pair_mass", by_pair)):
        expected = expected.masked_fill(hidden[:, None, :, None], torch.nan)
        lab.assert_same(found[name], expected)


def test_classes_and_pairs_may_differ_by_sequence(lab, impl):
    query, key, value = lab.tensors()
    classes = torch.randint(-1, 3, (2, 11), generator=torch.Generator().manual_seed(6))
    pairs = [torch.randint(-1, 11, (2, 7, 2), generator=torch.Generator().manual_seed(7))]
    both = mh.observe(query, key, value, statistics=mh.Statistics(classes=classes, pairs=pairs), impl=impl)
    for b in range(2):
        one = slice(b, b + 1)
        alone = mh.observe(
            query[one], key[one], value[one], impl=impl,
            statistics=mh.Statistics(classes=classes[b], n_classes=3, pairs=[pairs[0][b]]),
        )  # fmt: skip
        lab.assert_same(both.class_mass[one], alone.class_mass)
        lab.assert_same(both.pair_mass[one], alone.pair_mass)


def test_case_on_paper(impl):
    # Two keys with scores log 3 and 0: weights 3/4 and 1/4.
    query = torch.tensor([[[[math.log(3.0)]]]], dtype=torch.float64)
    key = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[4.0], [8.0]]]], dtype=torch.float64)
    seen = mh.observe(query, key, value, impl=impl)
    expected = {
        "lse": math.log(4),
        "max_logit": math.log(3),
        "max_weight": 0.75,
        "argmax": 0,
        "entropy": math.log(4) - 0.75 * math.log(3),
        "evenness": (math.log(4) - 0.75 * math.log(3)) / math.log(2),
        "effective_keys": 1 / (9 / 16 + 1 / 16),
        "key_mean": 0.25,
        "key_variance": 3 / 16,
    }
    assert seen.output.item() == pytest.approx(5)
    assert {name: x.item() for name, x in seen.statistics.items()} == pytest.approx(expected)


def test_row_without_keys(lab, impl):
    query, key, value = lab.tensors()
    seen = mh.observe(
        query, key, value, key_lengths=[0, 11], impl=impl,
        statistics=mh.Statistics(classes=[0] * 11, offsets=(0,), pairs=[torch.zeros(7, 1, dtype=torch.int64)]),
    )  # fmt: skip
    assert (seen.output[0] == 0).all()
    expected = {
        "lse": -math.inf, "max_logit": -math.inf, "max_weight": 0, "argmax": -1, "entropy": 0,
        "evenness": math.nan, "effective_keys": 0, "key_mean": math.nan, "key_variance": math.nan,
        "class_mass": 0, "offset_mass": 0, "pair_mass": 0,
    }  # fmt: skip
    for name, value_of in expected.items():
        lab.assert_same(seen.statistics[name][0].double(), torch.full_like(seen.statistics[name][0], value_of).double())
        assert not seen.statistics[name][1].isnan().any()


def test_row_without_keys_gives_all_to_its_sink(lab, impl):
    query, key, value = lab.tensors()
    sinks = torch.arange(6.0, dtype=torch.float64)
    seen = mh.observe(query, key, value, key_lengths=[0, 11], sinks=sinks, impl=impl)
    assert (seen.output[0] == 0).all() and (seen.sink_mass[0] == 1).all()
    lab.assert_same(seen.lse[0], sinks[:, None].expand(6, 7))


def test_masked_query_is_zeros_and_in_no_statistic(lab, impl):
    query, key, value = lab.tensors()
    query_mask = torch.ones(2, 7, dtype=torch.bool)
    query_mask[1, 2] = False
    seen = mh.observe(query, key, value, query_mask=query_mask, impl=impl, statistics=mh.Statistics(offsets=(0,)))
    assert (seen.output[1, :, 2] == 0).all()
    for name, x in seen.statistics.items():
        assert (x[1, :, 2] == -1).all() if name == "argmax" else x[1, :, 2].isnan().all()
        assert not x[0].isnan().any()


def test_output_has_the_same_bits_with_statistics(lab, form, impl):
    query, key, value = lab.tensors(dtype=torch.float32)
    asked = mh.Statistics(classes=[0] * 11, offsets=(0, 1))
    seen = mh.observe(query, key, value, statistics=asked, impl=impl, **form)
    assert torch.equal(seen.output, mh.attention(query, key, value, impl=impl, **form))


@pytest.mark.parametrize("sizes", [(0, 7, 11), (2, 0, 11), (2, 7, 0), (2, 0, 0)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 1)}, {"sinks": torch.ones(6)}])
def test_axes_of_size_zero(lab, impl, sizes, options):
    b, n, s = sizes
    query, key, value = lab.tensors(dtype=torch.float32, b=b, n_queries=n, n_keys=s)
    asked = mh.Statistics(classes=torch.zeros(s, dtype=torch.int64), n_classes=2, offsets=(0,))
    for x in (query, key, value):
        x.requires_grad_()
    seen = mh.observe(query, key, value, impl=impl, statistics=asked, **options)
    assert seen.output.shape == (b, 6, n, 13) and (seen.output == 0).all()
    assert seen.class_mass.shape == (b, 6, n, 2) and seen.lse.shape == (b, 6, n)
    seen.output.sum().backward()
    assert all((x.grad == 0).all() for x in (query, key, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_error_is_at_most_twice_that_of_eager_attention(lab, impl, dtype, causal):
    query, key, value = lab.tensors(dtype=dtype, h=3, g=3, n_queries=67, n_keys=67, d=31, e=31)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (query, key, value)), is_causal=causal)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        eager = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    ulp = torch.finfo(dtype).eps * exact.abs().max()
    ours = mh.attention(query, key, value, causal=causal, impl=impl)
    assert ours.dtype is dtype
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + ulp


def test_any_strides(lab, impl):
    query, key, value = lab.tensors()
    expected = mh.attention(query, key, value, impl=impl, causal=True)
    spread = [torch.empty(*x.shape[:-1], 2 * x.shape[-1]).double()[..., ::2].copy_(x) for x in (query, key, value)]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    for inputs in (spread, turned):
        lab.assert_same(mh.attention(*inputs, impl=impl, causal=True), expected)
    expanded = key[:1, :1].expand_as(key)
    lab.assert_same(
        mh.attention(query, expanded, value, impl=impl),
        mh.attention(query, expanded.clone(), value, impl=impl),
    )
