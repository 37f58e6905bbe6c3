"""The layer: what it computes, against PyTorch's own parts in float64; its forms, its weights, its errors."""

from __future__ import annotations

import copy
import io
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead as mh

B, L, S, H, G, D, E, WIDTH, CONTEXT = 2, 11, 7, 6, 3, 4, 5, 13, 17
FORMS = {
    "plain": {},
    "MHA": {"n_kv_heads": H},
    "MQA": {"n_kv_heads": 1},
    "biases": {"bias": True},
    "no key bias": {"bias": (True, False, True)},
    "bias of the output alone": {"output_bias": True},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (3, 0)},
    "alibi": {"alibi": True, "causal": True},
    "rotary": {"rotary": mh.nn.Rotary(theta=100.0, pairing="interleaved"), "causal": True},
    "norms": {"qk_norm": "rms"},
    "softcap": {"softcap": 0.8, "scale": 0.9},
    "sinks": {"sinks": True},
    "gate": {"gate": True},
    "gate of heads": {"gate": "headwise"},
    "everything": {
        "bias": (False, True, True),
        "causal": True,
        "window": (6, None),
        "alibi": [0.1, 0.2, 0.3, 0.5, 0.7, 0.0],
        "rotary": mh.nn.Rotary(dims=2),
        "qk_norm": "rms",
        "softcap": 2.0,
        "sinks": True,
        "gate": True,
        "scale": 0.3,
    },
}


def make(dtype=torch.float64, **options):
    """A layer whose sizes are different on every axis, its weights all drawn, biases and sinks too."""
    options = {"n_kv_heads": G, "d_head": D, "d_value": E, **options}
    layer = mh.MultiHeadAttention(WIDTH, H, dtype=dtype, **options)
    for name, parameter in layer.named_parameters():
        if "norm" in name or parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.5)
        else:
            nn.init.normal_(parameter, std=0.6)
    return layer


@pytest.fixture(params=list(FORMS))
def form(request):
    return FORMS[request.param]


@pytest.fixture
def x():
    return torch.randn(B, L, WIDTH, dtype=torch.float64)


def by_hand(layer, x, context=None, mask=None):
    """The equation of the docstring, a head at a time, from the weights of the state dict and PyTorch's operators."""
    separate = layer.with_options(layout="separate").state_dict()
    context = x if context is None else context
    n, s, group = x.shape[1], context.shape[1], H // layer.n_kv_heads
    p, j = torch.arange(n)[:, None] + s - n, torch.arange(s)
    seen = torch.ones(n, s, dtype=torch.bool)
    if layer.causal:
        seen &= j <= p
    left, right = layer.window or (None, None)
    if left is not None:
        seen &= j >= p - left
    if right is not None:
        seen &= j <= p + right
    if mask is not None:
        seen = seen & mask
    total = separate.get("W_O.bias", torch.zeros(WIDTH, dtype=x.dtype)).expand_as(x[..., :1].repeat(1, 1, WIDTH))
    for h in range(H):
        parts = {}
        for part, index, width, source in (
            ("Q", h, D, x),
            ("K", h // group, D, context),
            ("V", h // group, E, context),
        ):
            rows = slice(index * width, (index + 1) * width)
            parts[part] = source @ separate[f"W_{part}.weight"][rows].T
            if f"W_{part}.bias" in separate:
                parts[part] = parts[part] + separate[f"W_{part}.bias"][rows]
        for part, norm in (("Q", "q_norm"), ("K", "k_norm")):
            if layer.qk_norm:
                parts[part] = F.rms_norm(parts[part], (D,), separate[f"{norm}.weight"], 1e-6)
            if layer.rotary is not None:
                parts[part] = layer.rotary(parts[part][:, None], torch.arange(s))[:, 0]
        scores = parts["Q"] @ parts["K"].mT * (1 / math.sqrt(D) if layer.scale is None else layer.scale)
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        if layer.alibi_slopes is not None:
            scores = scores - layer.alibi_slopes[h].double() * (p - j).abs()
        scores = scores.masked_fill(~seen, -torch.inf)
        if layer.sinks is not None:
            scores = torch.cat([scores, layer.sinks[h].expand(*scores.shape[:-1], 1)], -1)
        output = scores.softmax(-1)[..., :s] @ parts["V"]
        if layer.gate:
            width = E if layer.gate == "elementwise" else 1
            output = output * torch.sigmoid(x @ separate["W_G.weight"][h * width : (h + 1) * width].T)
        total = total + output @ separate["W_O.weight"][:, h * E : (h + 1) * E].T
    return total


def test_every_form_is_the_equation(form, x):
    layer = make(**form)
    torch.testing.assert_close(layer(x), by_hand(layer, x), rtol=1e-12, atol=1e-12)
    mask = (torch.rand(L, L) < 0.7) | torch.eye(L, dtype=torch.bool)
    torch.testing.assert_close(layer(x, mask=mask), by_hand(layer, x, mask=mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("d_context", [None, CONTEXT])
@pytest.mark.parametrize("layout", ["packed", "separate"])
@pytest.mark.parametrize("execution", ["parallel", "sequential"])
@pytest.mark.parametrize("bias", [False, True, (True, False, True)])
def test_cross_attention(d_context, layout, execution, bias, x):
    layer = make(d_context=d_context, layout=layout, execution=execution, bias=bias, gate=True)
    context = torch.randn(B, S, d_context or WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x, context), by_hand(layer, x, context), rtol=1e-12, atol=1e-12)


def test_it_is_pytorchs_layer(x):
    theirs = nn.MultiheadAttention(12, H, batch_first=True, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_bias)
    layer = mh.MultiHeadAttention(12, H, bias=True, dtype=torch.float64)
    layer.load_state_dict(
        {
            "W_QKV.weight": theirs.in_proj_weight,
            "W_QKV.bias": theirs.in_proj_bias,
            "W_O.weight": theirs.out_proj.weight,
            "W_O.bias": theirs.out_proj.bias,
        }
    )
    x = x[..., :12]
    padded = torch.arange(L) >= torch.tensor([[7], [11]])
    expected = theirs(x, x, x, key_padding_mask=padded, need_weights=False)[0]
    torch.testing.assert_close(layer(x, key_lengths=[7, 11]), expected, rtol=1e-12, atol=1e-12)
    context = torch.randn(B, S, 12, dtype=torch.float64)
    expected = theirs(x, context, context, need_weights=False)[0]
    torch.testing.assert_close(layer(x, context), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["packed", "separate"])
def test_execution_and_layout_change_nothing_but_rounding(form, layout, x):
    layer = make(**form)
    expected = layer(x)
    wanted = torch.randn_like(expected)
    expected.backward(wanted)
    for execution in ("parallel", "sequential"):
        other = layer.with_options(layout=layout, execution=execution)
        y = other(x)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        y.backward(wanted)
        grads = {name: p.grad for name, p in layer.named_parameters()}
        mine = {name: p.grad for name, p in other.named_parameters()}
        if layout == "separate" and "W_QKV.weight" in grads:
            whole = torch.cat([mine.pop(f"W_{part}.weight") for part in "QKV"])
            torch.testing.assert_close(whole, grads.pop("W_QKV.weight"), rtol=1e-11, atol=1e-11)
            if "W_QKV.bias" in grads:
                whole = torch.cat([mine.pop(f"W_{part}.bias") for part in "QKV" if f"W_{part}.bias" in mine])
                torch.testing.assert_close(whole, grads.pop("W_QKV.bias"), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(mine, grads, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_gradients_are_those_of_finite_differences(execution):
    layer = make(**{**FORMS["everything"], "execution": execution}, n_kv_heads=3)
    x = torch.randn(1, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    names, values = zip(*layer.named_parameters())

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,)).sum(-1)

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_masks_of_heads_lengths_and_documents(execution, x):
    layer = make(execution=execution, causal=True)
    mask = (torch.rand(B, H, L, L) < 0.7) | torch.eye(L, dtype=torch.bool)
    bias = torch.randn(H, 1, L, dtype=torch.float64)
    q, k, v = (
        F.linear(x, *layer.rows(part, slice(0, n))).unflatten(-1, (n, -1)).transpose(1, 2)
        for part, n in (("Q", H), ("K", G), ("V", G))
    )
    causal = torch.full((L, L), -torch.inf, dtype=torch.float64).triu(1)
    added = causal + bias + torch.zeros(B, H, L, L).masked_fill(~mask, -torch.inf)
    heads = F.scaled_dot_product_attention(q, k, v, added, enable_gqa=True)
    expected = F.linear(heads.transpose(1, 2).flatten(2), layer.W_O.weight)
    torch.testing.assert_close(layer(x, mask=mask, bias=bias), expected, rtol=1e-11, atol=1e-11)
    # Two documents in one row give what each gives alone; padding rows give nothing.
    ids = torch.tensor([[0] * 4 + [1] * 5 + [-1] * 2] * B)
    rows = ids != -1
    both = layer(x, document_ids=ids, query_mask=rows)
    torch.testing.assert_close(both[:, :4], layer(x[:, :4]), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(both[:, 4:9], layer(x[:, 4:9]), rtol=1e-11, atol=1e-11)
    assert not both[:, 9:].any()


def test_the_example_of_the_textbook():
    class Textbook(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            for name in ("W_Q", "W_K", "W_V", "W_O"):
                setattr(self, name, nn.Linear(width, width, bias=False))

        def forward(self, x, mask=None):
            q, k, v = (w(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for w in (self.W_Q, self.W_K, self.W_V))
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -1e9)
            return self.W_O((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))

    theirs = Textbook(512, 8)
    layers = [mh.MultiHeadAttention(512, 8, layout=layout) for layout in ("packed", "separate")]
    x, mask = torch.randn(2, 20, 512), torch.ones(20, 20).tril()
    for layer in layers:
        assert sum(p.numel() for p in layer.parameters()) == 1_048_576
        layer.load_state_dict(theirs.state_dict())
        assert layer(x).shape == (2, 20, 512)
        torch.testing.assert_close(layer(x), theirs(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer(x, mask=mask != 0), theirs(x, mask), rtol=1e-5, atol=1e-6)
    theirs.load_state_dict(layers[1].state_dict())  # and back


@pytest.mark.parametrize("d_context", [None, CONTEXT])
@pytest.mark.parametrize("bias", [False, True, (True, False, True), (False, True, False)])
def test_either_layout_loads_the_other(bias, d_context, x):
    a, b = (make(bias=bias, d_context=d_context, layout=layout) for layout in ("packed", "separate"))
    context = None if d_context is None else torch.randn(B, S, d_context, dtype=torch.float64)
    for source, target in ((a, b), (b, a)):
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
        assert target.load_state_dict(source.state_dict()) is not None
        torch.testing.assert_close(target(x, context), source(x, context), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dict(source.state_dict()), before, rtol=0, atol=0)  # the source keeps its own
    block = nn.ModuleDict({"attention": b, "norm": nn.LayerNorm(WIDTH)})
    block.load_state_dict(nn.ModuleDict({"attention": a, "norm": nn.LayerNorm(WIDTH)}).state_dict())
    torch.testing.assert_close(b(x, context), a(x, context), rtol=1e-12, atol=1e-12)


def test_the_state_dict_is_stable_and_versioned():
    layer = make(qk_norm="rms", sinks=True, gate=True, bias=True, alibi=True)
    state = layer.state_dict()
    assert sorted(state) == [
        "W_G.weight", "W_O.bias", "W_O.weight", "W_QKV.bias", "W_QKV.weight", "k_norm.weight", "q_norm.weight", "sinks",
    ]  # fmt: skip
    assert state._metadata[""]["version"] == 1
    state._metadata[""]["version"] = 2
    with pytest.raises(RuntimeError, match="state dict of version 2, this multihead knows 1"):
        layer.load_state_dict(state)


def test_what_does_not_fit_is_said_by_load_state_dict():
    layer = make()
    state = make(layout="separate").state_dict()
    del state["W_K.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*W_QKV.weight"):
        layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*W_Q.bias"):
        layer.load_state_dict(make(layout="separate", bias=True).state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for W_Q\.weight: expected Q=24 rows, got shape \(48, 13\)"):
        layer.load_state_dict(make(layout="separate", d_head=8).state_dict())


def test_saved_copied_and_pickled(x):
    layer = make(**FORMS["everything"])
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = make(**FORMS["everything"])
    other.load_state_dict(torch.load(file))
    for same in (other, copy.deepcopy(layer)):
        torch.testing.assert_close(same(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_a_record_is_filled_and_changes_nothing(execution, x):
    layer = make(execution=execution, causal=True, sinks=True, dtype=torch.float32)
    x = x.float()
    record = mh.nn.Record(mh.Statistics("entropy", "argmax", offsets=(-1,)))
    with torch.no_grad():
        assert torch.equal(layer(x, record=record), layer(x))
        layer(x[:, :5], record=record)
        q, k, v = (
            F.linear(x[:, :5], layer.rows(part, slice(0, n))[0]).unflatten(-1, (n, -1)).transpose(1, 2)
            for part, n in (("Q", H), ("K", G), ("V", G))
        )
        options = {"causal": True, "sinks": layer.sinks, "statistics": record.asked}
        expected = mh.observe(q, k, v, **options).statistics
    assert [step["entropy"].shape for step in record.steps] == [(B, H, L), (B, H, 5)]
    torch.testing.assert_close(record.statistics, dict(expected), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="entropy: the calls' shapes differ"):
        record.stacked("entropy")
    with pytest.raises(KeyError, match="'lse2' was not observed"):
        record.stacked("lse2")
    assert repr(record) == "Record(2 steps of lse, argmax, entropy, offset_mass)"
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        _ = mh.nn.Record().statistics


def test_a_record_of_several_layers_stacks(x):
    record = mh.nn.Record()
    for layer in (make(), make(causal=True), make()):
        x = layer(x, record=record)
    assert record.stacked("lse").shape == (3, B, H, L)
    assert not record.stacked("entropy").requires_grad


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_a_loss_of_entropies_reaches_the_weights(execution, x):
    layer = make(execution=execution)
    record = mh.nn.Record(mh.Statistics("entropy"), gradients=True)
    layer(x, record=record)
    record.statistics["entropy"].mean().backward()
    grad = layer.W_QKV.weight.grad
    assert grad[: (H + G) * D].abs().max() > 1e-4
    assert not grad[(H + G) * D :].any()  # values have no part in it


def test_dropout_is_for_training(x):
    layer = make(dropout=0.5)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    torch.testing.assert_close(layer(x), by_hand(layer, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["packed", "separate"])
@pytest.mark.parametrize("heads, groups", [(4, 4), (16, 2), (8, 1)])
def test_at_the_start_everything_has_unit_variance(layout, heads, groups):
    layer = mh.MultiHeadAttention(256, heads, groups, bias=True, sinks=True, qk_norm="rms", layout=layout)
    x = torch.randn(1, 400, 256)
    with torch.no_grad():
        for part, n in (("Q", heads), ("K", groups), ("V", groups)):
            weight, bias = layer.rows(part, slice(0, n))
            assert 0.9 < F.linear(x, weight).var() < 1.1
            assert weight.abs().max() <= math.sqrt(3 / 256)
            assert not bias.any()
        assert not layer.sinks.any() and not layer.W_O.bias.any()
        assert (layer.q_norm.weight == 1).all()
    before = layer.W_O.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.W_O.weight, before)


def test_half_precision_autocast_and_meta(x):
    layer = make(**FORMS["everything"], dtype=torch.float32)
    x = x.float()
    expected = layer(x)
    for execution in ("parallel", "sequential"):
        half = layer.with_options(execution=execution).to(torch.bfloat16)
        y = half(x.bfloat16())
        assert y.dtype is torch.bfloat16
        torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer.with_options(execution=execution)(x)
        torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1)
    big = mh.MultiHeadAttention(8192, 64, 8, device="meta", rotary=mh.nn.Rotary())
    assert sum(p.numel() for p in big.parameters()) == 2 * 8192**2 + 2 * 8192 * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
def test_sequential_takes_the_memory_of_one_head():
    from benchmarks.layer import executions

    parallel, sequential = executions((1, 4096, 512, 16, 16))
    for found in (parallel, sequential):
        assert found.peak_bytes < 1.2 * found.formula_bytes + 4e6, found
    assert sequential.peak_bytes < parallel.peak_bytes / 3


@pytest.mark.slow
def test_a_compiled_layer_gives_the_same(x):
    for execution in ("parallel", "sequential"):
        layer = make(**FORMS["everything"], execution=execution)
        compiled = torch.compile(layer, backend="eager")
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-12, atol=1e-12)


def test_empty_inputs():
    for execution in ("parallel", "sequential"):
        layer = make(execution=execution, rotary=mh.nn.Rotary())
        for shape in ((0, L, WIDTH), (B, 0, WIDTH)):
            assert layer(torch.zeros(shape, dtype=torch.float64)).shape == shape


def test_repr_is_readable():
    layer = mh.MultiHeadAttention(
        512, 8, 2, causal=True, rotary=mh.nn.Rotary(theta=1e6), gate="headwise", dropout=0.1, window=(255, 0)
    )
    assert layer.extra_repr() == (
        "d_model=512, n_heads=8, n_kv_heads=2 (GQA), d_head=64, window=(255, 0), "
        "rotary=Rotary(theta=1000000.0, pairing='half', dims=None, fraction=None, scaling=None), "
        "gate=headwise, dropout=0.1, causal=True, layout=packed, execution=parallel"
    )
    assert "(W_QKV): Linear(in_features=512, out_features=768, bias=False)" in repr(layer)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((6, 4), ValueError, "n_heads: expected a divisor of d_model=6, got H=4: 6 is not divisible by 4"),
        ((12, 6, 4), ValueError, "n_kv_heads: expected a number G that divides the H=6 heads, got G=4"),
        ((12, 0), ValueError, "n_heads: expected 1 or more, got 0"),
        ((12, 6, 0), ValueError, "n_kv_heads: expected 1 or more, got 0"),
        ((12.0, 6), TypeError, "d_model: expected an int, got 12.0"),
        ((12, 6, None, {"d_head": -1}), ValueError, "d_head: expected 1 or more, got -1"),
        ((12, 6, None, {"bias": (True, False)}), TypeError, r"bias: expected a bool, or three of them for \(q, k, v\)"),
        ((12, 6, None, {"bias": 1}), TypeError, r"bias: expected a bool, or three of them for \(q, k, v\), got 1"),
        ((12, 6, None, {"d_context": 0}), ValueError, "d_context: expected 1 or more, got 0"),
        ((12, 6, None, {"layout": "wide"}), ValueError, "layout: expected 'packed' or 'separate', got 'wide'"),
        ((12, 6, None, {"execution": "gpu"}), ValueError, "execution: expected 'parallel' or 'sequential', got 'gpu'"),
        ((12, 6, None, {"qk_norm": "l3"}), ValueError, "qk_norm: expected None or 'rms', got 'l3'"),
        ((12, 6, None, {"gate": "swish"}), ValueError, "gate: expected .*, got 'swish'"),
        ((12, 6, None, {"dropout": 2}), ValueError, "dropout: expected a share from 0 to 1, got 2"),
        ((12, 6, None, {"alibi": [1.0]}), ValueError, r"alibi: expected a bool or slopes \(H=6,\), got \(1,\)"),
        ((12, 6, None, {"d_context": 3, "alibi": True}), ValueError, "d_context: expected no rotary and no alibi"),
    ],
)
def test_errors_of_the_constructor(arguments, error, words):
    options = arguments[3] if len(arguments) > 3 else {}
    with pytest.raises(error, match=words):
        mh.MultiHeadAttention(*arguments[:3], **options)


@pytest.mark.parametrize(
    "options, call, error, words",
    [
        ({}, {"x": [1.0]}, TypeError, "x: expected a tensor, got list"),
        ({}, {"x": torch.ones(B, L, 12)}, ValueError, r"x: expected shape \(B, L, d_model=13\), got \(2, 11, 12\)"),
        ({}, {"x": torch.ones(L, WIDTH)}, ValueError, r"x: expected shape \(B, L, d_model=13\), got \(11, 13\)"),
        ({}, {"context": torch.ones(3, S, WIDTH)}, ValueError, r"context: expected shape \(B=2, S, d_context=13\)"),
        ({"d_context": CONTEXT}, {}, ValueError, r"context: expected \(B, S, d_context=17\), got None"),
        ({"alibi": True}, {"context": torch.ones(B, S, WIDTH)}, ValueError, "context: expected None, since rotary"),
        ({}, {"mask": torch.ones(L, L)}, TypeError, "mask: expected bool"),
        ({}, {"mask": [[True]]}, TypeError, "mask: expected a tensor, got list"),
        ({}, {"mask": torch.ones(B, 3, L, L).bool()}, ValueError, r"mask: .*\(B, H=6, L, S\), got \(2, 3, 11, 11\)"),
        ({}, {"key_lengths": [3]}, ValueError, r"key_lengths: expected shape \(B=2,\)"),
    ],
)
@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_errors_of_a_call(execution, options, call, error, words):
    layer = make(torch.float32, execution=execution, **options)
    with pytest.raises(error, match=words):
        layer(**{"x": torch.ones(B, L, WIDTH), **call})
