"""Gradients of the compiled core against PyTorch's autograd through F.softmax in float64, at every level."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import multihead as mh
from multihead.core import dropout, functional, native
from tests.core.test_native import big_forms

pytestmark = [
    pytest.mark.skipif(native.core is None, reason="the compiled core is not built"),
    pytest.mark.usefixtures("level", "poisoned"),
]
NAN, INF = float("nan"), float("inf")
LEARNED = {"bias": "bias", "alibi_slopes": "slopes", "sinks": "sinks"}
STATISTICS = ("lse", "max_logit", "entropy", "class_mass", "sink_mass")


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def eager(lab, query, key, value, options, classes, seen=None):
    """Output and statistics by PyTorch's own softmax; rows without keys see key 0, so that no NaN is differentiated."""
    seen = lab.visible_cells(query, key, options) if seen is None else seen
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
    if "dropout_p" in options:
        p = options["dropout_p"]
        kept = dropout.keep(options["dropout_seed"], p, *(torch.arange(n) for n in used.shape))
        used = used * kept / (1 - p) if p < 1 else used * 0
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


def check(lab, tensors, form, names=("output",), dtype=torch.float64, tolerance=1e-10, seen=None):
    """Hold every gradient of a form against autograd; `names` have incoming gradients."""
    query, key, value = (x.to(dtype) for x in tensors)
    (B, H, L, _), (S, E) = query.shape, value.shape[2:]
    classes = torch.arange(S) % 3
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
    found, some = eager(lab, leaves["query"], leaves["key"], leaves["value"], doubled, classes, seen)
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
            got[name].double().view(want.shape) / size,
            want / size,
            rtol=0,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
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


SIZES = st.tuples(
    st.sampled_from([1, 2]),  # B
    st.sampled_from([(1, 1), (3, 3), (5, 1), (6, 2)]),  # H, G
    st.sampled_from([1, 2, 5, 7, 13, 97, 149, 293]),  # L: tiles of 6, blocks of 96 and what is left
    st.sampled_from([1, 3, 16, 17, 53, 193, 300, 521]),  # S: panels of 16, blocks of 192
    st.sampled_from([1, 3, 8, 16, 31, 64, 67, 130]),  # D
    st.sampled_from([1, 5, 8, 16, 33, 64, 71]),  # E
)


@settings(max_examples=20, deadline=None)
@given(SIZES, st.booleans(), st.integers(0, 2**31))
def test_any_sizes_within_twice_the_error_of_eager(sizes, causal, seed):
    B, (H, G), L, S, D, E = sizes
    inputs = [random(B, H, L, D, seed=seed), random(B, G, S, D, seed=seed + 1), random(B, G, S, E, seed=seed + 2)]
    incoming = random(B, H, L, E, seed=seed + 3)
    visible = torch.ones(L, S, dtype=torch.bool).tril(S - L) if causal else torch.ones(L, S, dtype=torch.bool)
    exact, single = (plain_gradients(inputs, visible, incoming, dtype) for dtype in (torch.float64, torch.float32))
    got = native_gradients(*inputs, {"causal": causal}, {"output": incoming}, None)
    # An ulp of what is subtracted: the gradients of weights, and their mean by way of the output.
    query, key, value = inputs
    largest = value.abs().max() * incoming.abs().sum(-1).max() * max(query.abs().max(), key.abs().max()) / D**0.5
    ulp = torch.finfo(torch.float32).eps * largest.clamp(min=1)
    for name, want, other in zip(("query", "key", "value"), exact, single, strict=True):
        assert (got[name] - want).abs().max() <= 2 * (other - want).abs().max() + ulp, name


def plain_gradients(inputs, visible, incoming, dtype):
    """Gradients of query, key and value by autograd through softmax in a type."""
    q, k, v = leaves = [x.to(dtype).requires_grad_() for x in inputs]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    some = visible.any(-1, keepdim=True)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~(visible | ~some), -INF)
    output = torch.where(some, F.softmax(scores, -1) @ v, 0)
    return torch.autograd.grad(output, leaves, incoming.to(dtype))


@pytest.mark.parametrize("name", list(big_forms()))
def test_forms_across_blocks(lab, name):
    form = big_forms()[name]
    tensors = [random(2, 4, 151, 40), random(2, 2, 530, 40, seed=1), random(2, 2, 530, 24, seed=2)]
    seen = functional.build_problem(*tensors, **form).visible().expand(2, 4, 151, 530)
    names = ("output", "lse", "max_logit", "entropy", "class_mass")
    if "as large" in name:  # float64 has no like of float32's lowest number
        names = ("output",)
    check(lab, tensors, form, names, torch.float64, 1e-11, seen)
    check(lab, tensors, form, names, torch.float32, 2e-5, seen)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 1), (2, 4)])
@pytest.mark.parametrize("cells", [(151, 530), (1, 530), (151, 1), (1, 1)])
def test_bias_of_any_broadcast_shape(lab, shape, cells):
    tensors = [random(2, 4, 151, 8), random(2, 2, 530, 8, seed=1), random(2, 2, 530, 8, seed=2)]
    form = {"bias": random(*shape, *cells, seed=3), "causal": True}
    seen = functional.build_problem(*tensors, **form).visible().expand(2, 4, 151, 530)
    check(lab, tensors, form, ("output", "lse"), torch.float64, 1e-11, seen)


def everything(L=151, S=530, D=40, E=24, B=3, dtype=torch.float32):
    """A problem with every learned input, and gradients of everything that comes out."""
    tensors = [random(B, 6, L, D), random(B, 2, S, D, seed=1), random(B, 2, S, E, seed=2)]
    options = {
        "causal": True,
        "alibi_slopes": random(6, seed=3).abs(),
        "sinks": random(6, seed=4),
        "bias": random(1, 6, L, S, seed=6),
        "softcap": 20.0,
    }
    shapes = dict.fromkeys(STATISTICS, (B, 6, L)) | {"output": (B, 6, L, E), "class_mass": (B, 6, L, 3)}
    options = {k: x.to(dtype) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    return [x.to(dtype) for x in tensors], options, incoming_of(shapes, ("output", *STATISTICS), dtype)


def test_same_bits_for_any_threads():
    tensors, options, incoming = everything()
    asked = mh.Statistics(classes=torch.arange(530) % 3)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 5, 16):
            torch.set_num_threads(threads)
            results += [native_gradients(*tensors, options, incoming, asked) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, x in results[0].items():
            assert torch.equal(x, other[name]), name


def test_same_bits_in_any_company():
    tensors, options, incoming = everything()
    asked = mh.Statistics(classes=torch.arange(530) % 3)
    del options["bias"]
    lengths = torch.tensor([530, 500, 530])
    whole = native_gradients(*tensors, options | {"key_lengths": lengths}, incoming, asked)
    query, key, value = (x[1:2] for x in tensors)
    alone = native_gradients(
        query, key[:, :, :500], value[:, :, :500], options, {name: x[1:2] for name, x in incoming.items()},
        mh.Statistics(classes=torch.arange(500) % 3),
    )  # fmt: skip
    assert torch.equal(whole["query"][1:2], alone["query"])
    for name in ("key", "value"):
        assert torch.equal(whole[name][1:2, :, :500], alone[name])
        assert (whole[name][1:2, :, 500:] == 0).all()


def test_any_strides():
    tensors, options, incoming = everything(61, 67)
    asked = mh.Statistics(classes=torch.arange(67) % 3)
    expected = native_gradients(*tensors, options, incoming, asked)
    turned = [x.mT.contiguous().mT for x in tensors]
    heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    options["bias"] = options["bias"].mT.contiguous().mT
    for views, how in ((turned, lambda x: x.mT.contiguous().mT), (heads, lambda x: x.flip(-1).flip(-1))):
        got = native_gradients(*views, options, {name: how(x) for name, x in incoming.items()}, asked)
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=2e-6, atol=2e-6)


def test_expanded_incoming_gradients():
    tensors, options, incoming = everything(61, 67)
    asked = mh.Statistics(classes=torch.arange(67) % 3)
    ones = {name: torch.ones((), dtype=x.dtype).expand(x.shape) for name, x in incoming.items()}
    got = native_gradients(*tensors, options, ones, asked)
    expected = native_gradients(*tensors, options, {name: x.clone() for name, x in ones.items()}, asked)
    for name, x in expected.items():
        torch.testing.assert_close(got[name], x, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_within_twice_the_error_of_eager(dtype):
    inputs = [
        x.to(dtype) for x in (random(2, 4, 151, 40), random(2, 2, 530, 40, seed=1), random(2, 2, 530, 24, seed=2))
    ]
    incoming = random(2, 4, 151, 24, seed=3).to(dtype)
    visible = torch.ones(151, 530, dtype=torch.bool).tril(530 - 151)
    exact, own = (plain_gradients(inputs, visible, incoming, t) for t in (torch.float64, dtype))
    got = native_gradients(*inputs, {"causal": True}, {"output": incoming}, None)
    for name, want, other in zip(("query", "key", "value"), exact, own, strict=True):
        assert got[name].dtype is dtype
        allowed = 2 * (other - want).abs().max() + torch.finfo(dtype).eps * want.abs().max()
        assert (got[name] - want).abs().max() <= allowed, name


def test_logits_of_a_thousand():
    # exp(s - lse) from one float32 lse would be off by 1e-4 here.
    key = random(1, 1, 300, 4)
    key[..., 0] = 1
    query, value = random(1, 1, 50, 4, seed=1) / 8, random(1, 1, 300, 4, seed=2)
    query[..., 0] = 1000 + torch.rand(50, generator=torch.Generator().manual_seed(3))
    incoming = random(1, 1, 50, 4, seed=4)
    exact = plain_gradients([query * 2, key, value], torch.ones(50, 300, dtype=torch.bool), incoming, torch.float64)
    single = plain_gradients([query * 2, key, value], torch.ones(50, 300, dtype=torch.bool), incoming, torch.float32)
    got = native_gradients(query * 2, key, value, {}, {"output": incoming}, None)
    for name, want, other in zip(("query", "key", "value"), exact, single, strict=True):
        error, of_eager = (got[name] - want).abs().max(), (other - want).abs().max()
        assert error <= 2 * of_eager + 1e-6 * want.abs().max(), name


def test_gradcheck(lab):
    problem_options = {"causal": True, "softcap": 1.3}
    asked = mh.Statistics("entropy", "max_logit", classes=[0, 1, 0, 1, 1])

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value, bias, slopes, sinks):
            options = problem_options | {"bias": bias, "alibi_slopes": slopes, "sinks": sinks}
            ctx.problem = functional.build_problem(query, key, value, **options)
            ctx.found = native.forward_saving(ctx.problem, asked)
            return tuple(ctx.found[name] for name in ("output", *STATISTICS))

        @staticmethod
        def backward(ctx, *grads):
            names = ("query", "key", "value", *LEARNED.values())
            incoming = dict(zip(("output", *STATISTICS), grads, strict=True))
            made = native.backward(ctx.problem, asked, ctx.found, incoming, dict.fromkeys(names, True))
            return tuple(made[name] for name in names)

    leaves = [
        *lab.tensors(h=2, g=1, n_queries=5, n_keys=5, d=3, e=2),
        *(random(*shape, seed=8, dtype=torch.float64) for shape in ((2, 1, 5), (2,), (2,))),
    ]
    assert torch.autograd.gradcheck(Attention.apply, [x.requires_grad_() for x in leaves])


POISONED = [5, 260, 529]


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("name", ["window", "mask", "bias", "documents", "all"])
def test_invisible_poison_reaches_no_gradient(name, poison):
    form = big_forms() | {"window": {"window": (200, 0)}}
    form = form[name]
    names = ("query", "key", "value")
    tensors = [random(2, 4, 151, 40), random(2, 2, 530, 40, seed=1), random(2, 2, 530, 24, seed=2)]
    visible = functional.build_problem(*tensors, **form).visible().expand(2, 4, 151, 530)
    asked = mh.Statistics("entropy", classes=torch.arange(530) % 3)
    shapes = {"output": (2, 4, 151, 24), "lse": (2, 4, 151), "entropy": (2, 4, 151), "class_mass": (2, 4, 151, 3)}
    incoming = incoming_of(shapes, list(shapes), torch.float32)
    # What rows that see poisoned keys receive is 0 but for their own numbers: they are left out of the comparison.
    blind = ~visible[..., POISONED].any(-1)
    assert blind.any() and not blind.all()
    clean = native_gradients(*tensors, form, incoming, asked)
    for x in tensors[1:]:
        x[:, :, POISONED] = poison
    dirty = native_gradients(*tensors, form, incoming, asked)
    torch.testing.assert_close(dirty["query"][blind], clean["query"][blind], rtol=1e-5, atol=1e-5)
    assert not dirty["query"][~blind].isfinite().all(-1).any()
    # A key's gradient comes from the rows that see it.
    some = (visible & ~blind[..., None]).any(2).view(2, 2, 2, 530).any(2)
    for name in names[1:]:
        torch.testing.assert_close(dirty[name][~some], clean[name][~some], rtol=1e-5, atol=1e-5)


def test_poisoned_queries_reach_only_the_keys_that_they_see():
    query, key, value = random(1, 2, 151, 16), random(1, 1, 530, 16, seed=1), random(1, 1, 530, 8, seed=2)
    incoming = random(1, 2, 151, 8, seed=3)
    form = {"window": (60, 0)}
    clean = native_gradients(query, key, value, form, {"output": incoming}, None)
    query[0, 0, 70, 3] = NAN  # at 449: sees 389 to 449
    incoming[0, 1, 10, 2] = INF  # at 389: sees 329 to 389
    dirty = native_gradients(query, key, value, form, {"output": incoming}, None)
    seen = torch.zeros(530, dtype=torch.bool)
    seen[329:450] = True
    for name in ("key", "value"):
        assert torch.isfinite(dirty[name][0, 0, ~seen]).all()
        torch.testing.assert_close(dirty[name][0, 0, ~seen], clean[name][0, 0, ~seen], rtol=1e-5, atol=1e-5)
        assert not dirty[name][0, 0, 389:450].isfinite().all(-1).any()
    other = torch.ones(2, 151, dtype=torch.bool)
    other[0, 70] = other[1, 10] = False
    torch.testing.assert_close(dirty["query"][0][other], clean["query"][0][other], rtol=1e-5, atol=1e-5)
    assert not dirty["query"][0][~other].isfinite().all(-1).any()


def test_rows_without_keys_are_never_looked_at():
    query, key, value = random(2, 2, 7, 5), random(2, 1, 11, 5, seed=1), random(2, 1, 11, 3, seed=2)
    query[0] = NAN
    asked = mh.Statistics("entropy", "max_logit")
    incoming = {"output": torch.full((2, 2, 7, 3), NAN)} | {
        name: torch.full((2, 2, 7), NAN) for name in ("lse", "entropy", "max_logit")
    }
    for x in incoming.values():
        x[1] = 1
    got = native_gradients(query, key, value, {"key_lengths": [0, 11]}, incoming, asked)
    assert all((x[0] == 0).all() and x[1].isfinite().all() and (x[1] != 0).any() for x in got.values())


@pytest.mark.parametrize(
    "B, L, S, D, E", [(0, 5, 7, 4, 3), (2, 0, 7, 4, 3), (2, 5, 0, 4, 3), (2, 5, 7, 0, 3), (2, 5, 7, 4, 0)]
)
def test_axes_of_size_zero(B, L, S, D, E):
    tensors = [random(B, 4, L, D), random(B, 2, S, D, seed=1), random(B, 2, S, E, seed=2)]
    options = {"sinks": torch.zeros(4), "alibi_slopes": torch.ones(4), "bias": torch.zeros(4, 1, 1)}
    got = native_gradients(*tensors, options, {"output": random(B, 4, L, E)}, None)
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        assert got[name].shape == x.shape and got[name].isfinite().all()
    if B * L * S == 0:
        assert all((x == 0).all() for x in got.values())


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "slopes", "sinks"])
def test_only_what_is_needed(name):
    tensors, options, incoming = everything(61, 67)
    asked = mh.Statistics(classes=torch.arange(67) % 3)
    whole = native_gradients(*tensors, options, incoming, asked)
    part = native_gradients(*tensors, options, incoming, asked, {name: True})
    assert part.keys() == {name} and torch.equal(part[name], whole[name])
