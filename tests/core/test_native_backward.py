"""Gradients of the compiled core against PyTorch's autograd through F.softmax in float64, at every level."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import multihead as mh
from multihead.core import functional, native

pytestmark = [
    pytest.mark.skipif(native.core is None, reason="the compiled core is not built"),
    pytest.mark.usefixtures("level", "poisoned"),
]
NAN, INF = float("nan"), float("inf")
LEARNED = {"bias": "bias", "alibi_slopes": "slopes", "sinks": "sinks"}
STATISTICS = ("lse", "max_logit", "entropy", "class_mass", "sink_mass")


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def eager(lab, query, key, value, options, classes):
    """Output and statistics by PyTorch's own softmax; rows without keys see key 0, so that no NaN is differentiated."""
    seen = lab.visible_cells(query, key, options)
    some = seen.any(-1)
    seen = seen | (~some[..., None] & (torch.arange(key.shape[2]) == 0))
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    s = options.get("scale", query.shape[-1] ** -0.5) * query @ k.mT
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if "bias" in options:
        s = s + torch.where(options["bias"] == -INF, 0, options["bias"])
    if "alibi_slopes" in options:
        distance = lab.positions(query, key, options)[:, None, :, None] - torch.arange(k.shape[2])
        s = s - options["alibi_slopes"].view(-1, 1, 1) * distance.abs()
    s = s.masked_fill(~seen, -INF)
    a, log_a = F.softmax(s, -1), F.log_softmax(s, -1)
    found = {
        "max_logit": s.amax(-1),
        "lse": s.logsumexp(-1),
        "entropy": -(a * torch.where(a == 0, 0, log_a)).sum(-1),
        "class_mass": a @ F.one_hot(classes, int(classes.max()) + 1).to(a.dtype),
    }
    used = a
    if "sinks" in options:
        sink = options["sinks"].view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        with_sink = F.softmax(torch.cat([s, sink], -1), -1)
        used, found["sink_mass"] = with_sink[..., :-1], with_sink[..., -1]
        found["lse"] = torch.cat([s, sink], -1).logsumexp(-1)
    found["output"] = used @ v
    return found, some


def native_gradients(query, key, value, options, incoming, asked, needs=None):
    """Gradients by name, as autograd's function asks for them."""
    problem = functional.build_problem(query, key, value, **options)
    assert native.can_use_backward(problem, asked) is None
    needs = needs or dict.fromkeys(("query", "key", "value", *LEARNED.values()), True)
    found = native.forward_saving(problem, asked)
    return native.backward(problem, asked, found, incoming, needs)


def incoming_of(problem_shapes, names, dtype, seed=5):
    return {
        name: random(*problem_shapes[name], seed=seed + n, dtype=torch.float64 if name != "output" else dtype)
        for n, name in enumerate(names)
    }


def check(lab, tensors, form, names=("output",), dtype=torch.float64, tolerance=1e-10, classes=None):
    """Hold every gradient of a form against autograd; `names` have incoming gradients."""
    query, key, value = (x.to(dtype) for x in tensors)
    (B, H, L, _), (S, E) = query.shape, value.shape[2:]
    classes = torch.arange(S) % 3 if classes is None else classes
    asked = mh.Statistics(classes=classes)
    options = {k: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in form.items()}
    shapes = dict.fromkeys(STATISTICS, (B, H, L)) | {"output": (B, H, L, E), "class_mass": (B, H, L, 3)}
    incoming = incoming_of(shapes, names, dtype)
    got = native_gradients(query, key, value, options, incoming, asked)

    doubled = {
        k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in options.items()
    }
    leaves = {"query": query, "key": key, "value": value} | {own: options[k] for k, own in LEARNED.items() if k in form}
    leaves = {name: x.double().detach().requires_grad_() for name, x in leaves.items()}
    doubled |= {k: leaves[own] for k, own in LEARNED.items() if k in form}
    found, some = eager(lab, leaves["query"], leaves["key"], leaves["value"], doubled, classes)
    loss = leaves["query"].sum() * 0
    for name in names:
        where = some[..., None] if found[name].ndim == 4 else some
        loss = loss + (torch.where(where, found[name], 0) * incoming[name].double()).sum()
    if "lse" in names and "sinks" in form:  # without keys it is the sink
        sinks = leaves["sinks"].view(-1, 1)
        loss = loss + (torch.where(some, 0, sinks) * incoming["lse"]).sum()
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        want = torch.zeros_like(leaves[name]) if want is None else want
        assert got[name].dtype is dtype, name
        size = want.abs().max().clamp(min=1)
        torch.testing.assert_close(
            got[name].double() / size, want / size, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_every_form(lab, form, dtype, tolerance):
    check(lab, lab.tensors(), form, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_as_losses(lab, form, name):
    if name == "sink_mass" and "sinks" not in form:
        return
    check(lab, lab.tensors(), form, (name,), tolerance=1e-12)


def test_output_and_statistics_together(lab):
    check(lab, lab.tensors(), lab.forms["everything"], ("output", *STATISTICS), tolerance=1e-12)
    check(lab, lab.tensors(), lab.forms["everything"], ("output", *STATISTICS), torch.float32, 5e-6)
