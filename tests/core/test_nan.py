"""NaN and Inf: what is invisible to a row never reaches it, forward or backward; what is visible always shows."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead.core import finite, native

pytestmark = pytest.mark.usefixtures("small_tiles")
POISONS = [float("nan"), float("inf"), -float("inf")]
HIDING = [
    "causal",
    "window",
    "mask",
    "mask of keys",
    "bias with -inf",
    "lengths",
    "documents",
    "sinks",
    "everything",
]
ASKED = mh.Statistics(classes=[0, 1] * 5 + [0], offsets=(-1, 0))


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("name", HIDING)
def test_invisible_poison_changes_nothing(lab, impl, name, where, poison):
    form = lab.forms[name]
    query, key, value = lab.tensors()
    seen = lab.visible_cells(query, key, form)
    for j in (2, 9):
        clean = [x.clone().requires_grad_() for x in (query, key, value)]
        dirty = [x.clone() for x in (query, key, value)]
        if where != "value":
            dirty[1][:, :, j, 1] = poison
        if where != "key":
            dirty[2][:, :, j, 4] = poison
        dirty = [x.requires_grad_() for x in dirty]
        blind = ~seen[..., j]  # rows that do not see the poisoned key
        results, grads = [], []
        for inputs in (clean, dirty):
            found = mh.observe(*inputs, statistics=ASKED, impl=impl, **form)
            results.append({"output": found.output, **found.statistics})
            loss = torch.where(blind[..., None], found.output, 0).sin().sum()
            loss = loss + torch.where(blind & found.entropy.isfinite(), found.entropy, 0).sum()
            grads.append(torch.autograd.grad(loss, inputs))
        for stat, expected in results[0].items():
            got = results[1][stat][blind]
            # The exact path may add in another order.
            lab.assert_same(got.detach(), expected[blind].detach(), 1e-12)
        lab.assert_same(grads[1][0][blind], grads[0][0][blind], 1e-12)


@pytest.mark.parametrize("name", ["full", "causal", "mask", "everything"])
def test_visible_nan_shows_in_output_and_statistics(lab, impl, name):
    form = lab.forms[name]
    query, key, value = lab.tensors()
    sees = lab.visible_cells(query, key, form)[..., 3]
    key[:, :, 3, 2] = float("nan")
    found = mh.observe(query, key, value, statistics=ASKED, impl=impl, **form)
    assert sees.any()
    assert found.output[sees].isnan().all()
    for stat in ("lse", "max_logit", "max_weight", "entropy", "effective_keys", "key_mean", "key_variance"):
        assert found.statistics[stat][sees].isnan().all(), stat
    assert found.class_mass[sees].isnan().all()


def test_visible_nan_or_inf_of_a_value_shows(lab, impl):
    query, key, value = lab.tensors()
    value[:, :, 3, 2], value[:, :, 4, 5] = float("nan"), float("inf")
    found = mh.attention(query, key, value, impl=impl, causal=True, query_start=0)
    assert found[:, :, 3:, 2].isnan().all() and (found[:, :, 4:, 5] == float("inf")).all()
    assert found[:, :, :3].isfinite().all()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", HIDING)
def test_a_poisoned_query_reaches_nothing_of_the_keys_that_it_does_not_see(lab, impl, name, poison):
    form = lab.forms[name]
    query, key, value = lab.tensors()
    group = query.shape[1] // key.shape[1]
    i = 3
    seen = lab.visible_cells(query, key, form)[:, :, i]  # (B, H, S)
    blind = ~seen.unflatten(1, (-1, group)).any(2)  # keys (B, G, S) that row i of no head of the group sees
    gradients, received = [], []
    for dirty in (False, True):
        inputs = [x.clone() for x in (query, key, value)]
        if dirty:
            inputs[0][:, :, i, 1] = poison
        inputs = [x.requires_grad_() for x in inputs]
        asked = mh.Statistics("entropy", "received")
        found = mh.observe(*inputs, statistics=asked, impl=impl, **form)
        gradients.append(torch.autograd.grad(found.output.nan_to_num().sin().sum(), inputs))
        received.append(found.received)
    assert blind.any()
    for which in (1, 2):
        lab.assert_same(gradients[1][which][blind], gradients[0][which][blind], 1e-12)
    lab.assert_same(received[1][~seen], received[0][~seen], 1e-12)


def test_product_is_the_sum_of_its_visible_terms():
    random = torch.Generator().manual_seed(0)

    def pick(numbers, *shape):
        return torch.tensor(numbers)[torch.randint(len(numbers), shape, generator=random)]

    inf, nan = float("inf"), float("nan")
    values = pick([1.0, -2.0, 3.0, 5.0, inf, -inf, nan], 41, 3, 29)
    visible = pick([True, False, False], 41, 31, 3)
    weights = torch.where(visible, pick([0.0, 0.25, 0.5, -1.0, 2.0], 41, 31, 3), 0)
    terms = torch.where(visible[..., None], weights[..., None] * values[:, None], 0)
    expected = terms.sum(2)
    assert all((x > 100).any() for x in (expected.isnan().sum(), (expected == inf).sum(), (expected == -inf).sum()))
    assert torch.equal(finite.product(weights, values, visible).nan_to_num(777), expected.nan_to_num(777))


def test_visible_infinite_score_is_what_softmax_gives(lab, impl):
    query, key, value = lab.tensors()
    key[:, :, 3] = 0
    key[:, :, 3, 0] = float("inf")  # the score is inf or -inf by the sign of q
    found = mh.attention(query, key, value, impl=impl)
    expected = torch.nn.functional.softmax(query @ key.repeat_interleave(2, 1).mT / 5**0.5, -1)
    lab.assert_same(found, expected @ value.repeat_interleave(2, 1))


def test_visible_scores_that_are_all_minus_infinity_are_undefined(lab, impl):
    query, key, value = lab.tensors()
    query[:, :, 2, 0], key[..., 0] = 1, -float("inf")
    found = mh.observe(query, key, value, impl=impl)
    assert found.output[:, :, 2].isnan().all()
    assert all(found.statistics[name][:, :, 2].isnan().all() for name in ("lse", "max_weight", "entropy"))


@pytest.mark.parametrize("path", ["reference", "tiled", "native"])
@pytest.mark.parametrize("hidden", [(), (0,), (0, 1, 2, 3, 4, 5), (10,), tuple(range(10))])
def test_of_visible_scores_that_are_all_minus_infinity_the_first_has_the_maximum(lab, path, hidden):
    if path == "native" and native.core is None:
        pytest.skip("the compiled core is not built")
    query, key, value = lab.tensors()
    query[:, :, 2, 0], key[..., 0] = 1, -float("inf")
    mask = torch.ones(11, dtype=torch.bool)
    mask[list(hidden)] = False
    found = mh.observe(query, key, value, mask=mask, impl=path)
    assert (found.max_logit[:, :, 2] == -float("inf")).all()
    assert (found.argmax[:, :, 2] == next(j for j in range(11) if j not in hidden)).all()
    assert found.key_mean[:, :, 2].isnan().all() and found.key_variance[:, :, 2].isnan().all()


def test_poisoned_gradient_of_a_padding_query_reaches_nothing(lab, impl):
    query, key, value = (x.requires_grad_() for x in lab.tensors())
    query_mask = torch.ones(2, 7, dtype=torch.bool)
    query_mask[:, 1] = False
    found = mh.attention(query, key, value, query_mask=query_mask, impl=impl)
    incoming = torch.ones_like(found)
    incoming[:, :, 1] = float("nan")
    grads = torch.autograd.grad(found, [query, key, value], incoming)
    assert all(x.isfinite().all() for x in grads)


def test_poisoned_padding_query_reaches_no_gradient(lab, impl):
    query, key, value = lab.tensors()
    query_mask = torch.ones(2, 7, dtype=torch.bool)
    query_mask[:, :2] = False
    query[:, :, :2] = float("nan")
    inputs = [x.requires_grad_() for x in (query, key, value)]
    found = mh.attention(*inputs, query_mask=query_mask, impl=impl)
    assert found.isfinite().all()
    grads = torch.autograd.grad(found.sin().sum(), inputs)
    assert all(x.isfinite().all() for x in grads)


def test_stale_numbers_behind_the_lengths_change_no_bit(lab):
    query, key, value = lab.tensors(dtype=torch.float32)
    lengths = [4, 9]
    expected = mh.attention(query, key, value, key_lengths=lengths, impl="tiled")
    for b, n in enumerate(lengths):
        key[b, :, n:], value[b, :, n:] = 3e38, -3e38
    assert torch.equal(mh.attention(query, key, value, key_lengths=lengths, impl="tiled"), expected)
