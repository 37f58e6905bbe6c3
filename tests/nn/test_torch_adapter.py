"""TorchMultiheadAttention against PyTorch's own module, in float64: output, weights and every gradient."""

import copy
import inspect
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead as mh
from multihead.core import dropout
from multihead.nn import TorchMultiheadAttention

L, S, N, H, WIDTH, KDIM, VDIM = 3, 7, 2, 5, 15, 11, 13
INF = float("inf")

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")


def pair(**options):
    """PyTorch's module and ours with the same weights, in training, where PyTorch computes by its definition."""
    theirs = nn.MultiheadAttention(WIDTH, H, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases start at zero, and would hide
            parameter.copy_(torch.randn(parameter.shape) / 2)
    ours = TorchMultiheadAttention(WIDTH, H, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs_of(options, batched=True, self_attention=False):
    widths = (WIDTH, options.get("kdim") or WIDTH, options.get("vdim") or WIDTH)
    lengths = (L, S, S)
    if self_attention:
        lengths = (S, S, S)
    made = []
    for n, width in zip(lengths, widths, strict=True):
        shape = ((N, n) if options.get("batch_first") else (n, N)) if batched else (n,)
        made.append(torch.randn(*shape, width, dtype=torch.float64))
    if self_attention:
        made = [made[0]] * 3
    return made


def upstream(x):
    return torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape)


def run(module, inputs, call):
    """Output, weights, and the gradients of inputs, float masks and parameters, of both outputs together."""
    made = {}

    def leaf(x):
        return made.setdefault(id(x), x.detach().clone().requires_grad_() if x.dtype.is_floating_point else x)

    inputs = [leaf(x) for x in inputs]
    call = {name: leaf(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    output, weights = module(*inputs, **call)
    loss = (output * upstream(output)).sum()
    if weights is not None:
        loss = loss + (weights * upstream(weights)).sum()
    leaves = [x for x in made.values() if x.dtype.is_floating_point] + list(module.parameters())
    return output, weights, torch.autograd.grad(loss, leaves)


def assert_same(theirs, ours, inputs, call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = run(theirs, inputs, call)
    got = run(ours, inputs, call)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12, check_stride=False)
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs, **call), got[:2], rtol=1e-11, atol=1e-12, check_stride=False)
    return got


BOOLS = (False, True)
# bias, add_bias_kv, add_zero_attn, kdim and vdim, batch_first.
CONSTRUCTORS = [
    {"bias": bias, "add_bias_kv": kv, "add_zero_attn": zero, "batch_first": first, **widths}
    for bias, kv, zero, first, widths in itertools.product(
        BOOLS, BOOLS, BOOLS, BOOLS, ({}, {"kdim": KDIM, "vdim": VDIM}, {"vdim": VDIM})
    )
]
MASKS = ("none", "bool", "float")


def masks(padding, attn, axes, batched, hide=0.3):
    """key_padding_mask and attn_mask of these kinds; key 0 is always visible, so that no row is empty."""
    call = {}
    for name, kind, shape in (
        ("key_padding_mask", padding, (N, S) if batched else (S,)),
        ("attn_mask", attn, (L, S) if axes == 2 else ((N if batched else 1) * H, L, S)),
    ):
        if kind == "none":
            continue
        hidden = torch.rand(shape) < hide
        hidden[..., 0] = False
        if kind == "float":
            hidden = torch.randn(shape, dtype=torch.float64).masked_fill(hidden, -INF)
        call[name] = hidden
    return call


@pytest.mark.parametrize("options", CONSTRUCTORS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()))
def test_every_constructor_with_every_mask(options):
    theirs, ours = pair(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    kinds = itertools.product(MASKS, MASKS, (2, 3))
    # Each constructor meets every kind of mask; the flags of the call turn with it.
    for n, (padding, attn, axes) in enumerate(kinds):
        batched = n % 3 != 1
        call = masks(padding, attn, axes, batched)
        call |= {"need_weights": n % 4 != 3, "average_attn_weights": n % 2 == 0}
        got = assert_same(theirs, ours, inputs_of(options, batched), call)
        assert (got[1] is None) == (n % 4 == 3)


@pytest.mark.parametrize(("need", "average", "batched"), [*itertools.product(BOOLS, BOOLS, BOOLS)])
@pytest.mark.parametrize(("padding", "attn", "axes"), [*itertools.product(MASKS, MASKS, (2,)), ("bool", "float", 3)])
def test_every_mask_with_every_call(padding, attn, axes, need, average, batched):
    theirs, ours = pair()
    call = {"need_weights": need, "average_attn_weights": average}
    assert_same(theirs, ours, inputs_of({}, batched), masks(padding, attn, axes, batched) | call)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("need", "padding"), [*itertools.product(BOOLS, MASKS)])
def test_causal_hint(kind, need, padding):
    theirs, ours = pair(batch_first=True)
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    mask = hidden if kind == "bool" else torch.zeros(S, S, dtype=torch.float64).masked_fill(hidden, -INF)
    call = masks(padding, "none", 2, True) | {"attn_mask": mask, "is_causal": True, "need_weights": need}
    x = inputs_of({"batch_first": True}, self_attention=True)
    # In this one case PyTorch drops the mask, so there is no gradient for it to compare.
    for module in (theirs, ours):
        module.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(ours(*x, **call), theirs(*x, **call), rtol=1e-11, atol=1e-12, check_stride=False)


@pytest.mark.parametrize("need", BOOLS)
def test_a_wrong_causal_hint_changes_nothing(need):
    _, ours = pair(add_zero_attn=False)
    x = inputs_of({}, self_attention=True)
    mask = torch.eye(S, dtype=torch.bool).roll(1, 0)
    torch.testing.assert_close(
        ours(*x, attn_mask=mask, is_causal=True, need_weights=need), ours(*x, attn_mask=mask, need_weights=need)
    )


def test_causal_hint_with_added_keys_leaves_them_visible():
    """There PyTorch without weights hides them, and with weights does not: the mask's own answer is the defined one."""
    theirs, ours = pair(add_bias_kv=True, add_zero_attn=True)
    x = inputs_of({}, self_attention=True)
    mask = torch.ones(S, S, dtype=torch.bool).triu(1)
    expected = theirs(*x, attn_mask=mask)
    got = ours(*x, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    assert torch.equal(ours(*x, attn_mask=mask, is_causal=True, need_weights=False)[0], got[0])


def test_self_attention_projects_once_and_is_the_same():
    theirs, ours = pair()
    assert_same(theirs, ours, inputs_of({}, self_attention=True), {})


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("average", BOOLS)
def test_dropout_with_the_same_cells_dropped(p, average, monkeypatch):
    theirs, ours = pair(dropout=p)

    def ours_in_theirs(weights, p):
        seed = int(torch.randint(0, 2**63 - 1, ()))
        kept = dropout.keep(seed, p, *(torch.arange(n) for n in (N, H, L, S))).flatten(0, 1)
        return torch.where(kept, weights / (1 - p) if p < 1 else weights, 0)

    monkeypatch.setattr(F, "dropout", ours_in_theirs)
    inputs = inputs_of({})
    call = {"average_attn_weights": average, **masks("bool", "float", 3, True)}
    torch.manual_seed(5)
    expected = run(theirs, inputs, call)
    torch.manual_seed(5)
    got = run(ours, inputs, call)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    if p == 0.4:
        share = (ours(*inputs, average_attn_weights=False)[1] == 0).double().mean()
        assert 0.2 < share < 0.6
        torch.testing.assert_close(ours.eval()(*inputs), theirs.eval()(*inputs), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"add_bias_kv": True}])
def test_asking_for_weights_changes_no_bit(options):
    _, ours = pair(**options)
    inputs = inputs_of({})
    outputs = []
    for need in BOOLS:
        torch.manual_seed(3)
        outputs.append(ours(*inputs, need_weights=need)[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("need", BOOLS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_without_keys_gives_zeros_and_no_gradient(kind, need):
    theirs, ours = pair()
    inputs = inputs_of({})
    call = masks("none", kind, 2, True)
    call["attn_mask"][1] = True if kind == "bool" else -INF
    call["need_weights"] = need
    if need:
        assert theirs(*inputs, **call)[0][1].isnan().all()
    output, weights, gradients = run(ours, inputs, call)
    assert torch.equal(output[1], ours.out_proj.bias.expand(N, -1))
    assert not any(g.isnan().any() for g in gradients)
    assert torch.equal(gradients[0][1], torch.zeros(N, WIDTH, dtype=torch.float64))
    if need:
        assert torch.equal(weights[:, 1], torch.zeros(N, S, dtype=torch.float64))
    # The other rows are PyTorch's.
    rest = [0, 2]
    expected = theirs(*inputs, **call)[0][rest]
    torch.testing.assert_close(output[rest], expected, rtol=1e-11, atol=1e-12)


def test_a_masked_nan_reaches_nothing():
    _, ours = pair()
    query, key, value = inputs_of({})
    hidden = torch.zeros(N, S, dtype=torch.bool)
    hidden[:, 4] = True
    expected = run(ours, (query, key, value), {"key_padding_mask": hidden})
    for x in (key, value):
        x[4] = torch.nan
    output, weights, gradients = run(ours, (query, key, value), {"key_padding_mask": hidden})
    torch.testing.assert_close((output, weights), expected[:2])
    torch.testing.assert_close(gradients[0], expected[2][0])


@pytest.mark.parametrize("heads", [4, 5])
def test_evaluation_where_pytorch_takes_its_fused_kernel(heads):
    theirs = nn.MultiheadAttention(20, heads, batch_first=True, dtype=torch.float64).eval()
    ours = TorchMultiheadAttention(20, heads, batch_first=True, dtype=torch.float64).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(N, S, 20, dtype=torch.float64)
    hidden = torch.arange(S) >= torch.tensor([[S], [4]])
    with torch.no_grad():
        for call in ({}, {"key_padding_mask": hidden}, {"attn_mask": torch.ones(S, S, dtype=torch.bool).triu(1)}):
            for need, average in itertools.product(BOOLS, BOOLS):
                call |= {"need_weights": need, "average_attn_weights": average}
                torch.testing.assert_close(ours(x, x, x, **call), theirs(x, x, x, **call), check_stride=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(("need", "average"), [*itertools.product(BOOLS, BOOLS)])
def test_nested_tensors(need, average):
    theirs = nn.MultiheadAttention(20, 4, batch_first=True).eval()
    ours = TorchMultiheadAttention(20, 4, batch_first=True).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.nested.nested_tensor([torch.randn(n, 20) for n in (3, 7)])
    with torch.no_grad():
        expected, their_weights = theirs(x, x, x, need_weights=need, average_attn_weights=average)
        output, weights = ours(x, x, x, need_weights=need, average_attn_weights=average)
    for mine, its in zip(output.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(mine, its)
    assert (weights is None) == (their_weights is None)
    for b, n in enumerate((3, 7)):  # PyTorch fills rows of padding with some weights, here they are zeros
        if weights is not None:
            torch.testing.assert_close(weights[b, ..., :n, :], their_weights[b, ..., :n, :])
            assert (weights[b, ..., n:, :] == 0).all()
    with pytest.raises(ValueError, match="key_padding_mask, attn_mask: expected None with a nested tensor"):
        ours(x, x, x, key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_type(dtype):
    theirs, ours = (kind(16, 4, dtype=dtype) for kind in (nn.MultiheadAttention, TorchMultiheadAttention))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(S, N, 16, dtype=dtype)
    got, expected = ours(x, x, x), theirs(x, x, x)
    for mine, its in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("norm_first", BOOLS)
def test_inside_pytorchs_own_transformer(mode, norm_first):
    """Swapped in it is called, in evaluation too, where PyTorch has a kernel that would pass it by."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(20, 4, 30, dropout=0.0, batch_first=True, norm_first=norm_first), 2,
        enable_nested_tensor=False,
    )  # fmt: skip
    swapped = copy.deepcopy(encoder)
    calls = []
    for layer in swapped.layers:
        ours = TorchMultiheadAttention(20, 4, batch_first=True)
        ours.load_state_dict(layer.self_attn.state_dict())
        ours.register_forward_pre_hook(lambda module, _: calls.append(module))
        layer.self_attn = ours
    for model in (encoder, swapped):
        model.train(mode == "train")
    x = torch.randn(N, S, 20)
    hidden = torch.arange(S) >= torch.tensor([[S], [4]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=hidden)
        got = swapped(x, src_key_padding_mask=hidden)
    assert len(calls) == 2
    torch.testing.assert_close(got[~hidden], expected[~hidden])


def test_without_other_hooks_the_fused_encoder_layer_does_not_pass_it_by(monkeypatch):
    layer = nn.TransformerEncoderLayer(20, 4, 30, batch_first=True).eval()
    x = torch.randn(N, S, 20)
    layer.self_attn, theirs = TorchMultiheadAttention(20, 4, batch_first=True).eval(), layer.self_attn
    layer.self_attn.load_state_dict(theirs.state_dict())
    called = []
    forward = TorchMultiheadAttention.forward
    monkeypatch.setattr(TorchMultiheadAttention, "forward", lambda *a, **k: called.append(1) or forward(*a, **k))
    with torch.no_grad():
        layer(x)
    assert called


def test_signature_is_that_of_pytorch():
    for method in ("__init__", "forward"):
        theirs = inspect.signature(getattr(nn.MultiheadAttention, method)).parameters.values()
        ours = inspect.signature(getattr(TorchMultiheadAttention, method)).parameters.values()
        assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in theirs]


def test_built_on_the_librarys_attention():
    """The heads' outputs are those of mh.attention, so a record or another path sees the same thing."""
    _, ours = pair()
    x = inputs_of({}, self_attention=True)[0]
    q, k, v = (
        part.unflatten(-1, (H, -1)).permute(1, 2, 0, 3)
        for part in F.linear(x, ours.in_proj_weight, ours.in_proj_bias).chunk(3, -1)
    )
    heads = mh.attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(ours(x, x, x)[0], ours.out_proj(heads), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.randn(L, N, 9)}, ValueError, r"query: expected \(L, N, 15\), got \(3, 2, 9\)"),
        ({"key": torch.randn(S, 4, WIDTH)}, ValueError, r"key: expected \(S, N, 15\), N=2, got \(7, 4, 15\)"),
        ({"value": torch.randn(6, N, WIDTH)}, ValueError, r"value: expected \(S, N, 15\), S=7, N=2, got \(6, 2, 15\)"),
        ({"key": torch.randn(S, WIDTH)}, ValueError, r"key: expected \(S, N, 15\)"),
        ({"attn_mask": torch.zeros(S, L)}, ValueError, r"attn_mask: expected .* = \(3, 7\) or \(10, 3, 7\)"),
        ({"attn_mask": torch.zeros(L, S).int()}, TypeError, "attn_mask: expected bool, True = hidden"),
        ({"key_padding_mask": torch.zeros(S, N)}, ValueError, r"expected \(N, S\) = \(2, 7\), got \(7, 2\)"),
        ({"is_causal": True}, RuntimeError, "is_causal: expected attn_mask with it"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_what_was_expected_and_what_came(change, error, message):
    call = dict(zip(("query", "key", "value"), (x.float() for x in inputs_of({})))) | change
    with pytest.raises(error, match=message):
        TorchMultiheadAttention(WIDTH, H)(**call)
