"""Attention in graphs: torch.compile, torch.export, PyTorch's own checks of an operator, autocast, checkpointing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import multihead as mh
from tests.core.conftest import forms

QUICK = ("causal", "starts", "mask", "bias with -inf", "documents", "everything")
LEARNED = ("bias", "alibi_slopes", "sinks")
ASKED = mh.Statistics(classes=[0, 1, 0, -1, 1, 1, 0, 0, 1, -1, 0], offsets=(-1, 0), pairs=[torch.arange(14).view(7, 2)])


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def observed(query, key, value, learned, others):
    seen = mh.observe(query, key, value, statistics=ASKED, **learned, **others)
    return seen.output, seen.statistics


def gradients(output, statistics, leaves):
    carried = [x for x in statistics.values() if x.requires_grad]
    finite = [torch.where(x.isfinite(), x, 0).sin().sum() for x in carried]
    return torch.autograd.grad(output.sin().sum() + sum(finite), leaves)


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in forms()])
def test_every_form_in_one_graph(lab, name):
    """The output, every statistic and every gradient of a compiled call are those of the eager one."""
    form = lab.forms[name]
    learned = {name: x.clone().requires_grad_() for name, x in form.items() if name in LEARNED}
    others = {name: x for name, x in form.items() if name not in LEARNED}
    tensors = [x.requires_grad_() for x in lab.tensors()]
    leaves = [*tensors, *learned.values()]
    expected = observed(*tensors, learned, others)
    got = torch.compile(observed, fullgraph=True, backend="aot_eager")(*tensors, learned, others)
    lab.assert_same(got[0], expected[0])
    assert list(got[1]) == list(expected[1])
    for name, x in expected[1].items():
        lab.assert_same(got[1][name], x)
        assert got[1][name].requires_grad == x.requires_grad, name
    for x, y in zip(gradients(*got, leaves), gradients(*expected, leaves), strict=True):
        lab.assert_same(x, y)


@pytest.mark.slow
def test_any_length_on_pytorchs_own_compiler(lab):
    check_any_length(lab, "inductor")


def test_any_length_without_compiling_again(lab):
    check_any_length(lab, "aot_eager")


def check_any_length(lab, backend):
    """One graph for the first length, one for every other, forward and backward."""
    counter = CompileCounterWithBackend(backend)

    def loss(query, key, value, key_lengths):
        seen = mh.observe(query, key, value, causal=True, key_lengths=key_lengths)
        return seen.output.sin().sum() + seen.entropy.sum()

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for n, s in ((5, 7), (7, 11), (2, 2), (300, 700), (13, 13)):
        leaves = [x.requires_grad_() for x in lab.tensors(n_queries=n, n_keys=s)]
        lengths = torch.tensor([s, s - 1])
        got, expected = compiled(*leaves, lengths), loss(*leaves, lengths)
        lab.assert_same(got, expected)
        for x, y in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
            lab.assert_same(x, y)
    assert counter.frame_count == 2


def test_heads_beside_each_other_in_memory_stay_so(lab):
    """A model's projections are (B, L, H, D) in memory: the output lies so too, and nothing is copied for it."""

    def block(x):
        query, key, value = x.unflatten(-1, (3, 6, 5)).movedim(-3, 0).transpose(2, 3)
        return mh.attention(query, key, value).transpose(1, 2).flatten(2)

    x = torch.randn(2, 7, 90)
    lab.assert_same(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x))


def test_dropout_is_drawn_in_the_graph(lab):
    tensors = lab.tensors()
    drawn = torch.compile(lambda *x: mh.attention(*x, dropout_p=0.5), fullgraph=True, backend="eager")
    assert not torch.equal(drawn(*tensors), drawn(*tensors))
    counter = CompileCounterWithBackend("aot_eager")
    seeded = torch.compile(lambda seed, *x: mh.attention(*x, dropout_p=0.5, dropout_seed=seed), backend=counter)
    for seed in (3, 2**40 + 1, 2**62):
        lab.assert_same(seeded(seed, *tensors), mh.attention(*tensors, dropout_p=0.5, dropout_seed=seed))
    assert counter.frame_count <= 2


def test_wrong_arguments_raise_when_a_graph_runs_and_when_it_is_traced(lab):
    query, key, value = lab.tensors()
    compiled = torch.compile(lambda *x, n: mh.attention(*x, key_lengths=n), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"key_lengths: expected lengths from 0 to S=11, got \[4, 12\]"):
        compiled(query, key, value, n=torch.tensor([4, 12]))
    with pytest.raises(Exception, match="key: expected shape"):
        compiled(query, key[..., 1:], value, n=torch.tensor([4, 11]))
    forced = torch.compile(lambda *x: mh.attention(*x, impl="reference"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="impl: expected 'auto', 'native' or 'tiled' in a graph"):
        forced(query, key, value)


class _Layer(torch.nn.Module):
    def forward(self, query, key, value, key_lengths):
        seen = mh.observe(query, key, value, causal=True, key_lengths=key_lengths)
        return seen.output, seen.entropy


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_lengths(lab, strict):
    L, S = torch.export.Dim("L", min=2), torch.export.Dim("S", min=2)
    lengths = torch.tensor([4, 11])
    program = torch.export.export(
        _Layer(), (*lab.tensors(), lengths), dynamic_shapes=({2: L}, {2: S}, {2: S}, None), strict=strict
    )
    assert [str(node.target) for node in program.graph.nodes].count("multihead.attention.default") == 1
    other = (*lab.tensors(n_queries=3, n_keys=17), torch.tensor([17, 2]))
    for x, y in zip(program.module()(*other), _Layer()(*other), strict=True):
        lab.assert_same(x, y)


CHECKED = ("causal", "bias with -inf", "mask", "documents", "starts", "sinks")


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", [CHECKED[0], *(pytest.param(x, marks=pytest.mark.slow) for x in CHECKED[1:])])
def test_operator_passes_the_checks_of_pytorch(lab, name, saved, monkeypatch):
    """torch.library.opcheck of both operators, on the very arguments that a call gives them."""
    calls = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "multihead":
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    form = lab.forms[name]
    tensors = [x.requires_grad_(saved) for x in lab.tensors()]
    # opcheck takes two NaN for different numbers: nothing is asked that a row without keys has not.
    names = "lse", "entropy", "argmax", "max_weight"
    asked = mh.Statistics(*names, classes=ASKED.classes, offsets=ASKED.offsets, pairs=ASKED.pairs)
    with Recorder():
        seen = mh.observe(*tensors, statistics=asked, dropout_p=0.3, dropout_seed=7, **form)
        if saved:
            (seen.output.sum() + torch.where(seen.lse.isfinite(), seen.lse, 0).sum()).backward()
    both = ["multihead::attention", "multihead::attention_backward"]
    assert [func._schema.name for func, _ in calls] == both[: 1 + saved]
    for func, args in calls:
        # Only the first has a formula: graphs have no second derivatives.
        leaves = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        if saved and func._schema.name == both[0]:
            leaves = (*(x.requires_grad_() for x in leaves[:3]), *leaves[3:])
        torch.library.opcheck(func, leaves)


def test_shapes_without_numbers(lab):
    """On the meta device, and in a fake mode, there are shapes and nothing else."""
    on_meta = mh.observe(*(x.to("meta") for x in lab.tensors()), statistics=ASKED, sinks=torch.ones(6, device="meta"))
    expected = mh.observe(*lab.tensors(), statistics=ASKED, sinks=torch.ones(6))
    assert on_meta.output.is_meta and on_meta.output.stride() == expected.output.stride()
    for name, x in expected.statistics.items():
        assert (on_meta.statistics[name].shape, on_meta.statistics[name].dtype) == (x.shape, x.dtype), name
    with torch._subclasses.FakeTensorMode() as mode:
        leaves = [mode.from_tensor(x).requires_grad_() for x in lab.tensors()]
        mh.attention(*leaves).sum().backward()
        assert [x.grad.shape for x in leaves] == [x.shape for x in leaves]


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_for_pytorchs_own(lab, compiled):
    """float32 inputs are cast as by hand; so are mixed ones, as a rotary layer makes them; float64 stays."""
    query, key, value = (x.requires_grad_() for x in lab.tensors(dtype=torch.float32, g=6))
    function = torch.compile(mh.attention, fullgraph=True, backend="aot_eager") if compiled else mh.attention
    with torch.autocast("cpu", torch.bfloat16):
        output = function(query, key, value)
        theirs = F.scaled_dot_product_attention(query, key, value)
        assert function(query, key, value.bfloat16()).dtype is torch.bfloat16
        assert mh.attention(*(x.double() for x in (query, key, value))).dtype is torch.float64
    assert output.dtype is theirs.dtype is torch.bfloat16
    by_hand = mh.attention(*(x.bfloat16() for x in (query, key, value)))
    assert torch.equal(output, by_hand)
    weigh = torch.randn_like(output)
    got, expected = (torch.autograd.grad(x, (query, key, value), weigh) for x in (output, by_hand))
    for x, y in zip(got, expected, strict=True):
        assert x.dtype is torch.float32
        torch.testing.assert_close(x, y, rtol=0, atol=torch.finfo(torch.bfloat16).eps * y.abs().max().item())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_the_same(lab, reentrant):
    """Gradients under activation checkpointing are the same bits, dropout included, and nothing else is kept."""
    leaves = [x.requires_grad_() for x in lab.tensors()]

    def layer(*tensors):
        return mh.attention(*tensors, causal=True, dropout_p=0.4).sin()

    torch.manual_seed(3)
    expected = torch.autograd.grad(layer(*leaves).sum(), leaves)
    torch.manual_seed(3)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output = checkpoint(layer, *leaves, use_reentrant=reentrant)
    output.sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(leaves, expected, strict=True))
    assert all(any(x is leaf for leaf in leaves) or x.numel() <= 1 for x in kept if isinstance(x, torch.Tensor))


@pytest.mark.slow
def test_checkpoint_in_a_graph(lab):
    leaves = [x.requires_grad_() for x in lab.tensors()]

    def layer(*tensors):
        return mh.attention(*tensors, causal=True).sin()

    compiled = torch.compile(lambda *x: checkpoint(layer, *x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    for x, y in zip(*(torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, layer)), strict=True):
        lab.assert_same(x, y)


def test_transform_without_a_rule_in_a_graph_raises(lab):
    """Tangents inside a graph have no rule: an error, not an absent tangent."""
    query, key, value = lab.tensors()

    def tangent(query):
        return torch.func.jvp(lambda q: mh.attention(q, key, value), (query,), (query,))[1]

    with pytest.raises(Exception, match="multihead"):
        torch.compile(tangent, fullgraph=True, backend="aot_eager")(query)
