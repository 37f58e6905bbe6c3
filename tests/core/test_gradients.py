"""Gradients: exact in float64 on every form, those of the statistics too, and zero where nothing is seen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import multihead as mh

pytestmark = pytest.mark.usefixtures("small_tiles")
LEARNED = ("bias", "alibi_slopes", "sinks")


def inputs_of(lab, form):
    """Leaves that ask for gradients, and a call that takes them in that order."""
    tensors = lab.tensors()
    names = [name for name in LEARNED if name in form]
    leaves = [x.clone().requires_grad_() for x in (*tensors, *(form[name] for name in names))]

    def options(values):
        return {**form, **dict(zip(names, values, strict=True))}

    return leaves, options


def finite(x):
    """Rows without keys have a lse of -inf, and padding has NaN: constants, left out of a sum."""
    return torch.where(x.isfinite(), x, 0)


def test_gradients_are_those_of_softmax_by_autograd(lab, form, impl):
    (query, key, value, *rest), options = inputs_of(lab, form)
    leaves = [query, key, value, *rest]
    weigh = torch.randn(2, 6, 7, 13, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    # The oracle's own NaN-free gradients: its empty rows are taken out before they are differentiated.
    some = lab.visible_cells(query, key, form).any(-1)[..., None]
    expected = torch.autograd.grad(
        (torch.where(some, dense_output(lab, query, key, value, options(rest)), 0) * weigh).sum(), leaves
    )
    output = mh.attention(query, key, value, impl=impl, **options(rest))
    got = torch.autograd.grad((output * weigh).sum(), leaves)
    for x, y in zip(got, expected, strict=True):
        lab.assert_same(x, y, 1e-10)


def dense_output(lab, query, key, value, options):
    """Attention by F.softmax whose rows without keys see key 0, so that no NaN is differentiated."""
    seen = lab.visible_cells(query, key, options)
    seen = seen | (~seen.any(-1, keepdim=True) & (torch.arange(key.shape[2]) == 0))
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scale = options.get("scale", query.shape[-1] ** -0.5)
    s = scale * query @ k.mT
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if "bias" in options:
        s = s + torch.where(options["bias"] == -torch.inf, 0, options["bias"])
    if "alibi_slopes" in options:
        distance = lab.positions(query, key, options)[:, None, :, None] - torch.arange(k.shape[2])
        s = s - options["alibi_slopes"].view(-1, 1, 1) * distance.abs()
    s = s.masked_fill(~seen, -torch.inf)
    if "sinks" in options:
        s = torch.cat([s, options["sinks"].view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return F.softmax(s, -1)[..., : k.shape[2]] @ v


@pytest.mark.parametrize("name", ["entropy", "lse", "max_logit", "class_mass"])
def test_statistics_carry_gradients(lab, form, impl, name):
    check_statistic(lab, form, impl, name)


@pytest.mark.parametrize("name", ["sinks", "everything"])
def test_sink_mass_carries_gradients(lab, impl, name):
    check_statistic(lab, lab.forms[name], impl, "sink_mass")


def check_statistic(lab, form, impl, name):
    leaves, options = inputs_of(lab, form)
    asked = mh.Statistics(classes=[0, 1, 0, -1, 1, 1, 0, 0, 1, -1, 0])
    # Central differences would leave a cell of -inf at -inf, so bias is held there.
    fixed = [x.detach() == -torch.inf for x in leaves]

    def statistic(*values):
        values = [torch.where(f, -torch.inf, x) for f, x in zip(fixed, values, strict=True)]
        query, key, value, *rest = values
        seen = mh.observe(query, key, value, statistics=asked, impl=impl, **options(rest))
        return finite(seen.statistics[name])

    assert_gradients(statistic, [torch.where(f, 0, x.detach()) for f, x in zip(fixed, leaves, strict=True)])


def test_gradients_of_output_and_statistics_together(lab, impl):
    form = lab.forms["everything"]
    leaves, options = inputs_of(lab, form)
    fixed = [x.detach() == -torch.inf for x in leaves]

    def both(*values):
        values = [torch.where(f, -torch.inf, x) for f, x in zip(fixed, values, strict=True)]
        query, key, value, *rest = values
        seen = mh.observe(query, key, value, impl=impl, dropout_p=0.3, dropout_seed=5, **options(rest))
        return seen.output.square().sum() + finite(seen.entropy * seen.lse).sum() + finite(seen.max_logit).sin().sum()

    assert_gradients(both, [torch.where(f, 0, x.detach()) for f, x in zip(fixed, leaves, strict=True)])


def assert_gradients(function, values):
    """Directional central differences, one random direction an input, against autograd."""
    leaves = [x.clone().requires_grad_() for x in values]
    random = torch.Generator().manual_seed(2)
    result = function(*leaves)
    weigh = torch.randn(result.shape, generator=random, dtype=result.dtype)
    grads = torch.autograd.grad((result * weigh).sum(), leaves, allow_unused=True)
    for n, grad in enumerate(grads):
        direction = torch.randn(values[n].shape, generator=random, dtype=torch.float64)

        def at(step, n=n, direction=direction):
            moved = [x + step * direction if m == n else x for m, x in enumerate(values)]
            return (function(*moved) * weigh).sum()

        slope = (at(1e-5) - at(-1e-5)) / 2e-5
        along = torch.zeros(()) if grad is None else (grad * direction).sum()
        torch.testing.assert_close(along.double(), slope.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["causal", "bias", "softcap", "sinks", "window"])
def test_gradcheck(lab, name):
    form = {**lab.forms[name], "impl": "tiled"}
    leaves = [x[:1].clone().requires_grad_() for x in lab.tensors(h=2, g=1, n_queries=5, n_keys=5, d=3, e=2)]
    form |= {"bias": form["bias"][:1, :, :5, :5]} if "bias" in form else {}
    form |= {"sinks": form["sinks"][:2]} if "sinks" in form else {}
    assert torch.autograd.gradcheck(lambda *x: mh.attention(*x, **form), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_keep_their_type(lab, impl, dtype):
    leaves = [x.requires_grad_() for x in lab.tensors(dtype=dtype)]
    mh.attention(*leaves, impl=impl).sum().backward()
    assert all(x.grad.dtype is dtype for x in leaves)


def test_rows_without_keys_have_no_gradient(lab, impl):
    query, key, value = (x.requires_grad_() for x in lab.tensors())
    seen = mh.observe(query, key, value, key_lengths=[0, 11], impl=impl)
    incoming = torch.full_like(seen.output, float("nan"))
    incoming[1] = 1
    grads = torch.autograd.grad(
        [seen.output, seen.entropy, seen.lse], [query, key, value],
        [incoming, torch.ones_like(seen.entropy), torch.ones_like(seen.lse)],
    )  # fmt: skip
    assert all((x[0] == 0).all() and x[1].isfinite().all() and (x[1] != 0).any() for x in grads)


def test_other_statistics_are_detached(lab, impl):
    query, key, value = (x.requires_grad_() for x in lab.tensors())
    asked = mh.Statistics(classes=[0] * 11, offsets=(0,))
    seen = mh.observe(query, key, value, statistics=asked, impl=impl, sinks=torch.ones(6).double())
    carrying = {name for name, x in seen.statistics.items() if x.requires_grad}
    assert carrying == {"lse", "max_logit", "entropy", "class_mass", "sink_mass"}


def test_partial_needs(lab):
    query, key, value = lab.tensors()
    expected = [x.clone().requires_grad_() for x in (query, key, value)]
    mh.attention(*expected, impl="reference").sin().sum().backward()
    for n in range(3):
        inputs = [query.clone(), key.clone(), value.clone()]
        inputs[n].requires_grad_()
        mh.attention(*inputs, impl="tiled").sin().sum().backward()
        lab.assert_same(inputs[n].grad, expected[n].grad)
