"""Heads of a layer: views of the parameters, what they sum to, taken out for a while or for good, merged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import multihead as mh

B, L, H, G, D, E, WIDTH = 2, 11, 6, 3, 4, 5, 13


def make(dtype=torch.float64, **options):
    options = {"n_kv_heads": G, "d_head": D, "d_value": E, "bias": True, "causal": True, **options}
    layer = mh.MultiHeadAttention(WIDTH, H, dtype=dtype, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.6)
    return layer


FULL = {"sinks": True, "gate": True, "alibi": True, "qk_norm": "rms", "rotary": mh.nn.Rotary(dims=2)}


@pytest.fixture
def x():
    return torch.randn(B, L, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, FULL, {"gate": "headwise", "n_kv_heads": 1}], ids=["plain", "full", "MQA"])
def test_the_heads_sum_to_the_output(options, x):
    layer = make(**options)
    outputs = layer.head_outputs(x)
    assert outputs.shape == (B, H, L, E)
    joined = layer.W_O(torch.cat([outputs[:, h] for h in range(H)], -1))
    parts = layer.contributions(x)
    assert parts.shape == (B, H, L, WIDTH)
    torch.testing.assert_close(joined, layer(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts.sum(1) + layer.W_O.bias, layer(x), rtol=1e-12, atol=1e-12)
    each = [outputs[:, h] @ layer.head(h).W_O.T for h in range(H)]
    torch.testing.assert_close(parts, torch.stack(each, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["packed", "separate"])
@pytest.mark.parametrize("d_context", [None, 17])
def test_views_are_the_parameters(layout, d_context, x):
    layer = make(layout=layout, d_context=d_context, bias=(True, False, True), causal=False)
    context = None if d_context is None else torch.randn(B, 7, d_context, dtype=torch.float64)
    state = layer.with_options(layout="separate").state_dict()
    for h, head in enumerate(layer.heads):
        g = h // (H // G)
        assert torch.equal(head.W_Q, state["W_Q.weight"][h * D : (h + 1) * D])
        assert torch.equal(head.W_K, state["W_K.weight"][g * D : (g + 1) * D])
        assert torch.equal(head.W_V, state["W_V.weight"][g * E : (g + 1) * E])
        assert torch.equal(head.W_O, state["W_O.weight"][:, h * E : (h + 1) * E])
        assert torch.equal(head.b_Q, state["W_Q.bias"][h * D : (h + 1) * D])
        assert torch.equal(head.b_V, state["W_V.bias"][g * E : (g + 1) * E])
        assert head.b_K is None
    places = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    for view in (head.W_Q, head.W_K, head.W_V, head.W_O, head.b_Q, head.b_V):
        assert view.untyped_storage().data_ptr() in places
    with torch.no_grad():
        layer.head(2).W_O.zero_()
        layer.head(3).W_V[:] = 0
    parts = layer.contributions(x, context)
    assert not parts[:, 2].any() and parts[:, 4].any()
    torch.testing.assert_close(parts[:, 3], (layer.head(3).W_O @ layer.head(3).b_V).expand_as(parts[:, 3]))
    values = torch.randn(D, WIDTH, dtype=torch.float64)
    layer.head(5).W_Q = values
    assert torch.equal(layer.with_options(layout="separate").state_dict()["W_Q.weight"][5 * D :], values)


def test_gradients_pass_through_views(x):
    layer = make()
    layer.head(1).W_Q.square().sum().backward()
    grad = layer.W_QKV.weight.grad
    torch.testing.assert_close(grad[D : 2 * D], 2 * layer.head(1).W_Q.detach())
    assert not grad[2 * D :].any() and not grad[:D].any()


def test_errors_of_views():
    layer = make()
    with pytest.raises(IndexError, match="head: expected a number under H=6, got 6"):
        layer.head(6)
    with pytest.raises(ValueError, match=r"W_V: expected shape \(5, 13\), got \(4, 13\)"):
        layer.head(0).W_V = torch.zeros(4, 13)
    with pytest.raises(ValueError, match="distance: expected a layer with rotary positions"):
        layer.head(0).QK_at(1)
    with pytest.raises(ValueError, match=r"eigenvalues: expected a square matrix, got \(13, 17\)"):
        make(d_context=17).head(0).OV.eigenvalues()
    assert repr(layer.head(3)) == "Head(3, key/value head 1)"
    assert repr(layer.head(3).QK) == "Factored(13 x 13, rank 4 or less)"


@pytest.mark.parametrize("d_context, width", [(None, 13), (17, 13), (None, 3)])
def test_spectra_are_those_of_the_matrices(d_context, width):
    layer = mh.MultiHeadAttention(width, H, G, d_head=D, d_value=E, d_context=d_context, dtype=torch.float64)
    for h in (0, 3):
        head = layer.head(h)
        for found, matrix in ((head.QK, head.W_Q.T @ head.W_K), (head.OV, head.W_O @ head.W_V)):
            assert found.shape == tuple(matrix.shape)
            torch.testing.assert_close(found.matrix(), matrix, rtol=0, atol=1e-14)
            expected = torch.linalg.svdvals(matrix)
            got = found.singular_values()
            assert len(got) == min(*matrix.shape, found.left.shape[1])
            torch.testing.assert_close(got, expected[: len(got)], rtol=1e-11, atol=1e-13)
            assert (expected[len(got) :] < 1e-13).all()
            u, values, v = found.svd()
            torch.testing.assert_close(u * values @ v.T, matrix, rtol=1e-11, atol=1e-13)
            if d_context is None:
                theirs = torch.linalg.eigvals(matrix)
                theirs = theirs[theirs.abs().argsort(descending=True)][: len(got)]
                mine = found.eigenvalues()
                for value in theirs:
                    assert (mine - value).abs().min() < 1e-10


def test_spectra_of_a_wide_layer_form_nothing_wide():
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                # A view of a parameter is nothing that was formed.
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in parameters:
                    largest = max(largest, tensor.numel())
            return out

    layer = mh.MultiHeadAttention(1024, 64)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    head = layer.head(0)
    with torch.no_grad(), Watch():
        head.QK.singular_values(), head.OV.svd(), head.OV.eigenvalues()
    assert 0 < largest <= 1024 * 16


def test_QK_is_the_score(x):
    layer = make(bias=False, rotary=mh.nn.Rotary(theta=20.0), scale=1.0, causal=False)
    record = mh.nn.Record(mh.Statistics("lse"))
    layer(x, record=record)
    for h in (0, 4):
        head = layer.head(h)
        scores = [torch.stack([x[0, i] @ head.QK_at(i - j).matrix() @ x[0, j] for j in range(L)]) for i in range(L)]
        torch.testing.assert_close(
            torch.stack(scores).logsumexp(-1), record.statistics["lse"][0, h], rtol=1e-10, atol=1e-10
        )
    torch.testing.assert_close(head.QK_at(0).matrix(), head.QK.matrix())


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_ablation_takes_a_contribution_out_and_gives_it_back(execution, x):
    layer = make(**FULL, execution=execution)
    whole, parts, outputs = layer(x), layer.contributions(x), layer.head_outputs(x)
    with layer.ablate([0, 4]):
        torch.testing.assert_close(layer(x), whole - parts[:, 0] - parts[:, 4], rtol=1e-11, atol=1e-11)
        with layer.ablate([1]):
            torch.testing.assert_close(layer(x), whole - parts[:, [0, 1, 4]].sum(1), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(layer(x), whole - parts[:, 0] - parts[:, 4], rtol=1e-11, atol=1e-11)
    assert torch.equal(layer(x), whole)
    mean = outputs[:, 2].mean((0, 1)) @ layer.head(2).W_O.T
    with layer.ablate([2], "mean"):
        torch.testing.assert_close(layer(x), whole - parts[:, 2] + mean, rtol=1e-11, atol=1e-11)
    given = torch.randn(2, E, dtype=torch.float64)
    with layer.ablate([3, 1], "mean", given):
        expected = whole - parts[:, 3] - parts[:, 1] + given[0] @ layer.head(3).W_O.T + given[1] @ layer.head(1).W_O.T
        torch.testing.assert_close(layer(x), expected, rtol=1e-11, atol=1e-11)
    with pytest.raises(KeyError), layer.ablate([0]):
        raise KeyError
    assert torch.equal(layer(x), whole)


def test_a_mean_is_over_real_rows(x):
    layer = make()
    rows = torch.arange(L) < torch.tensor([[4], [9]])
    outputs = layer.head_outputs(x, query_mask=rows)
    with layer.ablate([1], "mean"):
        got = layer.head_outputs(x, query_mask=rows)
    mean = torch.cat([outputs[0, 1, :4], outputs[1, 1, :9]]).mean(0)
    torch.testing.assert_close(got[:, 1], mean.expand(B, L, E))


def test_ablated_heads_get_no_gradient(x):
    layer = make()
    with layer.ablate([1]):
        layer(x).sum().backward()
    assert not layer.head(1).W_O.isnan().any()
    grad = layer.W_O.weight.grad
    assert not grad[:, E : 2 * E].any() and grad[:, :E].any()


@pytest.mark.parametrize(
    "options, gone, kept",
    [
        ({}, [2, 3], (4, 2)),  # a whole group
        ({}, [0, 3, 4], (3, 3)),  # one of each
        ({}, [0, 1, 2, 3, 4], (1, 1)),
        ({"n_kv_heads": H}, [5, 0], (4, 4)),
        ({"n_kv_heads": 1}, [2], (5, 1)),
        ({"n_kv_heads": 1, "gate": "headwise"}, [0], (5, 1)),
        (FULL, [1, 2, 4], (3, 3)),
        ({"layout": "separate", "d_context": 17, "bias": (True, False, True)}, [0, 1], (4, 2)),
    ],
)
def test_a_pruned_layer_gives_what_an_ablated_one_gives(options, gone, kept, x):
    layer = make(**options)
    context = torch.randn(B, 7, 17, dtype=torch.float64) if "d_context" in options else None
    pruned = layer.prune_heads(gone)
    assert (pruned.n_heads, pruned.n_kv_heads) == kept
    with layer.ablate(gone):
        torch.testing.assert_close(pruned(x, context), layer(x, context), rtol=1e-11, atol=1e-11)
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in layer.parameters())
    again = pruned.with_options(execution="sequential")
    torch.testing.assert_close(again(x, context), pruned(x, context), rtol=1e-11, atol=1e-11)


def test_why_heads_cannot_be_pruned():
    layer = make()
    words = "heads: the G=3 groups of 2 would be left with 1, 2, 2 heads; every group that stays needs as many"
    with pytest.raises(ValueError, match=words):
        layer.prune_heads([0])
    with pytest.raises(ValueError, match="heads: expected some of the H=6 heads to be left, got all of them"):
        layer.prune_heads(range(6))
    with pytest.raises(IndexError, match="heads: expected numbers under H=6, got 6"):
        layer.prune_heads([6])
    with pytest.raises(IndexError, match="heads: expected numbers under H=6, got -1"), layer.ablate([-1]):
        pass
    with pytest.raises(ValueError, match="method: expected 'zero' or 'mean', got 'noise'"), layer.ablate([1], "noise"):
        pass
    with (
        pytest.raises(ValueError, match=r"mean: expected shape \(n=1, E=5\), got \(5,\)"),
        layer.ablate([1], "mean", torch.zeros(5)),
    ):
        pass


@pytest.mark.parametrize("method", ["mean", "first"])
@pytest.mark.parametrize("start, wanted", [(6, 3), (6, 2), (6, 1), (6, 6), (3, 1)])
def test_grouping_pools_the_heads_that_become_one(method, start, wanted, x):
    layer = make(n_kv_heads=start, rotary=mh.nn.Rotary(), sinks=True)
    grouped = layer.group(wanted, method)
    assert (grouped.n_heads, grouped.n_kv_heads) == (H, wanted)
    size = start // wanted
    for part in ("W_K", "W_V", "b_K", "b_V"):
        old = torch.stack([getattr(layer.head(g * (H // start)), part) for g in range(start)])
        for g in range(wanted):
            several = old[g * size : (g + 1) * size]
            expected = several.mean(0) if method == "mean" else several[0]
            torch.testing.assert_close(getattr(grouped.head(g * (H // wanted)), part), expected)
    assert torch.equal(grouped.head(4).W_Q, layer.head(4).W_Q)
    # Heads that are alike lose nothing by sharing.
    for head in layer.heads:
        for part in ("W_K", "W_V"):
            setattr(head, part, getattr(layer.head(0), part).detach().clone())
    with torch.no_grad():
        layer.W_QKV.bias[H * D :] = 0
    torch.testing.assert_close(layer.group(wanted, method)(x), layer(x), rtol=1e-11, atol=1e-11)


def test_why_heads_cannot_be_grouped():
    layer = make(n_kv_heads=H)
    with pytest.raises(ValueError, match="n_kv_heads: expected a divisor of the G=6 key/value heads, got 4"):
        layer.group(4)
    with pytest.raises(ValueError, match="method: expected 'mean' or 'first', got 'median'"):
        layer.group(2, "median")


def test_surgery_keeps_mode_type_and_the_layer(x):
    assert make().group(1).training and make().group(1).W_O.weight.requires_grad
    layer = make(dtype=torch.float32, qk_norm="rms").eval().requires_grad_(False)
    layer.k_norm.eps = 0.25
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for made in (layer.prune_heads([0, 2, 4]), layer.group(1), layer.with_options(layout="separate")):
        assert not made.training and not any(p.requires_grad for p in made.parameters())
        assert made.k_norm.eps == 0.25 and made.W_O.weight.dtype is torch.float32
        for parameter in made.parameters():
            nn.init.zeros_(parameter)
    torch.testing.assert_close(dict(layer.state_dict()), before, rtol=0, atol=0)
