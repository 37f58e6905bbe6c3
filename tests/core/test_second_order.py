"""Every other derivative: gradients of gradients, tangents, and what torch.func makes of them, on every form."""

from __future__ import annotations

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import multihead as mh

pytestmark = pytest.mark.usefixtures("small_tiles")
LEARNED = ("bias", "alibi_slopes", "sinks")
CARRIED = ("lse", "max_logit", "entropy", "class_mass")


@pytest.fixture(params=["tiled", "auto"])
def call(lab, form, request):
    """A form of attention as a function of its tensors, and those: output and what carries gradients, rows finite."""
    return call_of(lab, form, request.param)


def call_of(lab, form, impl):
    tensors = lab.tensors()
    names = [name for name in LEARNED if name in form]
    values = [*tensors, *(form[name] for name in names)]
    asked = mh.Statistics(*CARRIED[:3], classes=[0, 1, 0, -1, 1, 1, 0, 0, 1, -1, 0])
    # A cell of -inf stays at -inf whatever the step, so it is no input.
    hidden = [x == -torch.inf for x in values]

    def function(*values):
        values = [torch.where(h, -torch.inf, x) for h, x in zip(hidden, values, strict=True)]
        query, key, value, *rest = values
        options = {**form, **dict(zip(names, rest, strict=True))}
        seen = mh.observe(query, key, value, statistics=asked, impl=impl, **options)
        carried = [x for name, x in seen.statistics.items() if name in (*CARRIED, "sink_mass")]
        return (seen.output, *(torch.where(x.isfinite(), x, 0) for x in carried))

    return function, [torch.where(h, 0, x) for h, x in zip(hidden, values, strict=True)]


def weighed(results):
    """One number that depends on every result in its own way."""
    return sum((x * torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape)).sin().sum() for x in results)


def directions(values, seed=3):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=random, dtype=x.dtype) for x in values]


def assert_close(got, expected, tolerance=1e-6):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def difference(function, values, along, step=1e-5):
    """A derivative along a direction by central differences, of a function that gives a tuple."""
    ahead = function(*(x + step * d for x, d in zip(values, along, strict=True)))
    behind = function(*(x - step * d for x, d in zip(values, along, strict=True)))
    return tuple((a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True))


def test_tangents_in_forward_mode(call):
    function, values = call
    along = directions(values)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(values, along, strict=True)]
        tangents = [forward_ad.unpack_dual(x).tangent for x in function(*duals)]
    expected = difference(function, values, along)
    assert_close([torch.zeros_like(x) if t is None else t for t, x in zip(tangents, expected)], list(expected))
    assert_close(func.jvp(function, tuple(values), tuple(along))[1], expected)


def test_gradients_of_gradients(call):
    function, values = call
    along = directions(values)

    def first(*values):
        leaves = [x.detach().requires_grad_() for x in values]
        return torch.autograd.grad(weighed(function(*leaves)), leaves)

    leaves = [x.clone().requires_grad_() for x in values]
    grads = torch.autograd.grad(weighed(function(*leaves)), leaves, create_graph=True)
    assert_close(list(grads), list(first(*values)))
    second = torch.autograd.grad(sum((g * d).sum() for g, d in zip(grads, along, strict=True)), leaves)
    # The matrix of second derivatives is symmetric, so its product with a direction is the gradients' own change.
    assert_close(list(second), list(difference(first, values, along)), 2e-5)


def test_vmap_is_each_sample_alone(call):
    function, values = call
    stacked = [torch.stack([x, x + 0.3 * d, x - d], 1) for x, d in zip(values, directions(values), strict=True)]
    got = func.vmap(function, in_dims=1)(*stacked)
    alone = [function(*(x[:, n] for x in stacked)) for n in range(3)]
    for x, parts in zip(got, zip(*alone, strict=True), strict=True):
        assert_close(x, torch.stack(parts), 1e-12)


def test_vmap_of_gradients_is_each_sample_alone(call):
    function, values = call
    stacked = [torch.stack([x, x + 0.3 * d]) for x, d in zip(values, directions(values), strict=True)]
    gradient = func.grad(lambda *x: weighed(function(*x)), argnums=tuple(range(len(values))))
    got = func.vmap(gradient)(*stacked)
    for n in range(2):
        leaves = [x[n].clone().requires_grad_() for x in stacked]
        assert_close([x[n] for x in got], list(torch.autograd.grad(weighed(function(*leaves)), leaves)), 1e-9)


SMALL = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (1, 0)},
    "softcap and sinks": {"softcap": 0.9, "sinks": True},
    "bias of heads": {"bias": (2, 1, 1)},
    "bias of keys": {"bias": (1, 1, 1, 4)},
    "bias of cells": {"bias": (2, 2, 3, 4)},
    "slopes": {"alibi_slopes": True},
    "documents": {"document_ids": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 11},
    "one key/value head": {"g": 1},
}


# Statistics have the output's rules among theirs; without them the request is another one.
CHECKS = [(name, True) for name in SMALL] + [("plain", False), ("dropout", False), ("softcap and sinks", False)]
SLOW = ("causal", "bias of keys", "bias of heads", "documents")


@pytest.mark.parametrize(
    ("name", "statistics"), [pytest.param(*x, marks=[pytest.mark.slow] * (x[0] in SLOW)) for x in CHECKS]
)
def test_gradcheck_and_gradgradcheck(lab, name, statistics):
    """PyTorch's own checks, of the whole matrices: reverse, forward mode, vmap of both, and second derivatives."""
    form = dict(SMALL[name])
    tensors = lab.tensors(b=2, h=2, g=form.pop("g", 2), n_queries=3, n_keys=4, d=2, e=3)
    random = torch.Generator().manual_seed(4)
    for learned in LEARNED:
        if learned in form:
            given = form.pop(learned)
            shape = given if learned == "bias" else (2,)
            tensors.append(torch.randn(shape, generator=random, dtype=torch.float64))
            form[learned] = len(tensors) - 1

    def function(*values):
        options = {k: values[n] if k in LEARNED else n for k, n in form.items()}
        if not statistics:
            return mh.attention(*values[:3], **options)
        asked = mh.Statistics("lse", "max_logit", "entropy", classes=[0, 1, 1, -1])
        seen = mh.observe(*values[:3], statistics=asked, **options)
        return seen.output, seen.lse, seen.max_logit, seen.entropy, seen.class_mass

    leaves = [x.requires_grad_() for x in tensors]
    if name == "window":  # its first row sees no key: its -inf are constants
        plain = function

        def function(*values):
            results = plain(*values)
            return tuple(torch.where(x.isfinite(), x, 0) for x in ((results,) if not statistics else results))

    options = {"check_batched_grad": True, "fast_mode": True}
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_forward_grad=True, **options)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, check_rev_over_rev=True, **options)
