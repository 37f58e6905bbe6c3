"""scaled_dot_product_attention against PyTorch's own, in float64: forms, shapes, its own samples, gradients."""

import inspect
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import multihead as mh
from multihead.core import dropout, sdpa

L, S, D, E = 3, 7, 5, 11
INF = float("inf")


def theirs(query, key, value, **options):
    """PyTorch's function by its definition in C++, with the weights that our generator keeps under this seed."""
    p = options.pop("dropout_p", 0.0)
    if not p:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, **options)
    seed = int(torch.randint(0, 2**63 - 1, ()))
    cells = (*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2])
    *batch, heads, rows, keys = cells
    index = [torch.arange(n) for n in (math.prod(batch), heads, rows, keys)]
    kept = dropout.keep(seed, p, *index).view(cells)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, dropout_p=p, dropout_mask=kept, **options
    )[0]


def gradients(output, inputs, strided=False):
    upstream = torch.cos(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape).to(output.dtype)
    if strided:  # the same numbers, every second one in memory
        upstream = torch.stack([upstream, upstream * torch.nan], -1)[..., 0]
    return torch.autograd.grad(output, inputs, upstream)


def assert_same(function, query, key, value, **options):
    """The output and every gradient are PyTorch's."""
    inputs = [x for x in (query, key, value, options.get("attn_mask")) if x is not None and x.dtype.is_floating_point]
    for x in inputs:
        x.requires_grad_()
    torch.manual_seed(5)
    expected = theirs(query, key, value, **options)
    torch.manual_seed(5)
    got = function(query, key, value, **options)
    assert got.dtype is query.dtype
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, check_stride=False)
    with torch.no_grad():  # the path that a call without gradients takes
        torch.manual_seed(5)
        torch.testing.assert_close(
            function(query, key, value, **options), expected, rtol=1e-12, atol=1e-12, check_stride=False
        )
    for mine, its in zip(gradients(got, inputs, strided=True), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-11)


def test_signature_is_that_of_pytorch():
    """PyTorch's function is built in, so its signature is read from its documentation and from its refusal."""
    text = re.search(r"def scaled_dot_product_attention\((.*?)\)", F.scaled_dot_product_attention.__doc__, re.DOTALL)[1]
    documented = [part.strip() for part in text.split(",")]
    parameters = inspect.signature(mh.scaled_dot_product_attention).parameters.values()
    assert [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters] == documented
    q, k, v = torch.randn(1, 1, L, D), torch.randn(1, 1, S, D), torch.randn(1, 1, S, E)
    for function in (F.scaled_dot_product_attention, mh.scaled_dot_product_attention):
        assert function(q, k, v, None, 0.0, True).shape == (1, 1, L, E)
        with pytest.raises(TypeError):
            function(q, k, v, None, 0.0, True, 0.5)


# The axes before the last two of query, key and value.
SHAPES = {
    "2 axes": ((), (), ()),
    "3 axes": ((5,), (5,), (5,)),
    "4 axes": ((2, 3), (2, 3), (2, 3)),
    "5 axes": ((2, 3, 5), (2, 3, 5), (2, 3, 5)),
    "6 axes": ((2, 1, 3, 5), (2, 1, 3, 5), (2, 1, 3, 5)),
    "query of 2, keys of 3": ((), (5,), (5,)),
    "query of 3, keys of 4": ((3,), (2, 3), (2, 3)),
    "one query batch": ((1, 3), (2, 3), (2, 3)),
    "one key batch": ((2, 3), (1, 3), (1, 3)),
    "one value batch": ((2, 3), (2, 3), (1, 3)),
    "value alone has a batch": ((1, 3), (1, 3), (2, 3)),
    "one key head": ((2, 3), (2, 1), (2, 1)),
    "one value head": ((2, 3), (2, 3), (2, 1)),
    "one query head": ((2, 1), (2, 3), (2, 3)),
    "crossed": ((2, 1, 3), (5, 3), (5, 1)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_leading_axes(shape, causal):
    query, key, value = (
        torch.randn(*lead, n, width, dtype=torch.float64)
        for lead, n, width in zip(SHAPES[shape], (L, S, S), (D, D, E), strict=True)
    )
    assert_same(mh.scaled_dot_product_attention, query, key, value, is_causal=causal)


GROUPS = {
    "3 axes": ((6,), (2,), (2,)),
    "4 axes": ((2, 6), (2, 3), (2, 3)),
    "5 axes": ((2, 3, 6), (2, 3, 2), (2, 3, 2)),
    "one head": ((2, 6), (2, 1), (2, 1)),
    "all heads": ((2, 6), (2, 6), (2, 6)),
    "one query batch": ((1, 6), (5, 3), (5, 3)),
    "one key batch": ((5, 6), (1, 3), (1, 3)),
    "key 3, value 2": ((2, 6), (2, 3), (2, 2)),
    "key 6, value 1": ((2, 6), (2, 6), (2, 1)),
    "query of 3, keys of 4": ((6,), (2, 3), (2, 3)),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_grouped_heads(groups):
    query, key, value = (
        torch.randn(*lead, n, width, dtype=torch.float64)
        for lead, n, width in zip(GROUPS[groups], (L, S, S), (D, D, E), strict=True)
    )
    assert_same(mh.scaled_dot_product_attention, query, key, value, enable_gqa=True, is_causal=True)


# (axes of the inputs before the last two, axes of the mask)
MASKS = [
    ((), (L, S)),
    ((), (S,)),
    ((5,), (L, S)),
    ((5,), (5, 1, S)),
    ((2, 3), ()),
    ((2, 3), (S,)),
    ((2, 3), (L, 1)),
    ((2, 3), (L, S)),
    ((2, 3), (3, 1, 1)),
    ((2, 3), (1, 1, L, S)),
    ((2, 3), (2, 1, 1, S)),
    ((2, 3), (2, 3, L, S)),
    ((2, 3, 5), (L, S)),
    ((2, 3, 5), (5, L, S)),
    ((2, 3, 5), (3, 1, L, S)),
    ((2, 3, 5), (1, 1, 5, L, S)),
    ((2, 3, 5), (2, 1, 1, 1, S)),
    ((2, 3, 5), (2, 3, 5, L, S)),
]


@pytest.mark.parametrize("kind", ["bool", "float", "float with -inf"])
@pytest.mark.parametrize(("lead", "shape"), MASKS)
def test_any_mask(lead, shape, kind):
    query, key, value = (torch.randn(*lead, n, width, dtype=torch.float64) for n, width in ((L, D), (S, D), (S, E)))
    mask = torch.randn(shape, dtype=torch.float64)
    hidden = mask < -0.5
    if shape[-1:] == (S,):  # each row keeps a key: what else PyTorch gives depends on its version
        hidden[..., 0] = False
    elif kind != "float":
        hidden[...] = False
    if kind == "bool":
        mask = ~hidden
    elif kind == "float with -inf":
        mask = mask.masked_fill(hidden, -INF)
    assert_same(mh.scaled_dot_product_attention, query, key, value, attn_mask=mask)


def test_what_all_share_is_not_copied(monkeypatch):
    """A mask that all batches share and keys that all heads share reach the computation as they are."""
    given = {}

    def attention(query, key, value, **options):
        given.update(options, key=key)
        return query

    monkeypatch.setattr(sdpa, "attention", attention)
    query, key, mask = torch.randn(2, 3, 5, L, D), torch.randn(1, 1, 1, S, D), torch.rand(1, 1, 1, L, S) < 0.5
    mh.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    assert given["mask"].shape == (1, 1, L, S) and given["mask"].data_ptr() == mask.data_ptr()
    assert given["key"].shape == (6, 1, S, D) and given["key"].data_ptr() == key.data_ptr()


@pytest.mark.parametrize("scale", [0.0, -0.7, 2, torch.tensor(0.3)])
def test_scale(scale):
    query, key, value = (torch.randn(2, 3, n, w, dtype=torch.float64) for n, w in ((L, D), (S, D), (S, E)))
    assert_same(mh.scaled_dot_product_attention, query, key, value, scale=scale)


@pytest.mark.parametrize("axis", ["B", "H", "L", "S", "D", "E"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_axes_of_size_zero(axis, dtype):
    sizes = {"B": 2, "H": 3, "L": L, "S": S, "D": D, "E": E, axis: 0}
    query, key, value = (torch.randn([sizes[x] for x in axes], dtype=dtype) for axes in ("BHLD", "BHSD", "BHSE"))
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(
        mh.scaled_dot_product_attention(query, key, value), theirs(query, key, value), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, "the query's"])
def test_narrow_types_with_masks_of_any_type(dtype, mask_dtype):
    query, key, value = (torch.randn(2, 3, n, w, dtype=dtype) for n, w in ((L, D), (S, D), (S, E)))
    mask = torch.randn(2, 1, L, S)
    mask = mask > -1 if mask_dtype is torch.bool else mask.to(dtype if mask_dtype == "the query's" else mask_dtype)
    got = mh.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    exact = theirs(
        *(x.double() for x in (query, key, value)), attn_mask=mask if mask_dtype is torch.bool else mask.double()
    )
    eager = theirs(query, key, value, attn_mask=mask if mask_dtype is torch.bool else mask.to(dtype))
    ulp = torch.finfo(dtype).eps * exact.abs().max()
    assert got.dtype is dtype
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + ulp


def test_masked_row_is_zeros_with_zero_gradient():
    query, key, value = (torch.randn(2, 3, n, w, dtype=torch.float64) for n, w in ((L, D), (S, D), (S, E)))
    mask = torch.zeros(L, S, dtype=torch.float64)
    mask[1] = -INF
    query.requires_grad_(), mask.requires_grad_()
    output = mh.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert (output[:, :, 1] == 0).all() and (output[:, :, 0] != 0).all()
    torch.testing.assert_close(output[:, :, ::2], theirs(query[:, :, ::2], key, value))
    output.sum().backward()
    assert (query.grad[:, :, 1] == 0).all() and (mask.grad[1] == 0).all()
    key[:, :, 4], value[:, :, 4] = torch.nan, INF
    seen = torch.ones(S, dtype=torch.bool)
    seen[4] = False
    assert mh.scaled_dot_product_attention(query, key, value, attn_mask=seen).isfinite().all()


@pytest.mark.parametrize(("n_queries", "n_keys"), [(3, 7), (7, 3), (5, 5)])
@pytest.mark.parametrize("name", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias_is_a_rule_and_no_mask(name, n_queries, n_keys):
    from torch.nn.attention import bias

    rule = getattr(bias, name)(n_queries, n_keys)
    query, key, value = (
        torch.randn(2, 3, n, w, dtype=torch.float64) for n, w in ((n_queries, D), (n_keys, D), (n_keys, E))
    )
    expected = theirs(query, key, value, attn_mask=rule._materialize())
    torch.testing.assert_close(mh.scaled_dot_product_attention(query, key, value, attn_mask=rule), expected)
    with pytest.raises(ValueError, match=f"attn_mask: expected a causal bias of .L={n_queries - 1}"):
        mh.scaled_dot_product_attention(query[:, :, 1:], key, value, attn_mask=rule)


def samples():
    """PyTorch's own sample inputs, and those with other strides."""
    pytest.importorskip("expecttest", reason="PyTorch's samples need expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    plain = list(info.sample_inputs("cpu", torch.float64))
    assert len(plain) >= 25
    return plain + [sample.noncontiguous() for sample in plain]


def test_samples_of_pytorch():
    """Every sample passes: there is no list of those that do not."""
    options = [sample.kwargs for sample in samples()]
    assert any(x.get("attn_mask") is not None for x in options) and any(x["dropout_p"] for x in options)
    for sample in samples():
        assert_same(mh.scaled_dot_product_attention, sample.input, *sample.args, **sample.kwargs)


def test_other_meanings_would_be_found():
    """The comparison fails for bottom-right causality, for other dropout and for a lost gradient."""
    query, key, value = (torch.randn(2, 3, n, w, dtype=torch.float64) for n, w in ((L, D), (S, D), (S, E)))

    def bottom_right(q, k, v, is_causal):
        return mh.attention(q, k, v, causal=is_causal)

    def detached(q, k, v):
        return mh.scaled_dot_product_attention(q, k, v.detach()) + 0 * v.sum()

    def other_seed(q, k, v, dropout_p):
        return mh.attention(q, k, v, dropout_p=dropout_p, dropout_seed=1)

    for function, options in ((bottom_right, {"is_causal": True}), (detached, {}), (other_seed, {"dropout_p": 0.5})):
        assert_same(mh.scaled_dot_product_attention, query, key, value, **options)
        with pytest.raises(AssertionError):
            assert_same(function, query, key, value, **options)


ERRORS = [
    ({"attn_mask": torch.ones(L, S) > 0, "is_causal": True}, RuntimeError, "attn_mask: expected None with is_causal"),
    ({"query": torch.randn(D)}, ValueError, r"query: expected 2 axes or more.*got \(5,\)"),
    ({"query": [1.0]}, TypeError, "query: expected a tensor, got list"),
    (
        {"query": torch.nested.nested_tensor([torch.randn(2, 5)], layout=torch.jagged)},
        TypeError,
        "query: expected a dense tensor",
    ),
    ({"key": torch.randn(2, 3, S, D - 1)}, ValueError, "key: expected shape .* D .* is 4, not 5"),
    ({"key": torch.randn(2, 2, S, D)}, ValueError, "enable_gqa=True"),
    ({"key": torch.randn(2, 2, S, D), "enable_gqa": True}, ValueError, "key: .* G that divides the H=3 .* got G=2"),
    ({"value": torch.randn(2, 2, S, E), "enable_gqa": True}, ValueError, "value: .* G that divides the H=3 .* got G=2"),
    ({"value": torch.randn(5, 3, S, E)}, ValueError, r"query, key, value: expected axes.*\(5, 3, 7, 11\)$"),
    ({"value": torch.randn(2, 3, S, E).double()}, TypeError, "value: expected torch.float32"),
    ({"attn_mask": torch.ones(L, S).long()}, TypeError, "attn_mask: expected bool, torch.float32.* got torch.int64"),
    ({"attn_mask": torch.ones(L, S).double()}, TypeError, "attn_mask: expected bool, torch.float32.* torch.float64"),
    ({"attn_mask": torch.ones(2, S)}, ValueError, r"attn_mask: expected a shape .* \(2, 3, 3, 7\), got \(2, 7\)"),
    ({"attn_mask": torch.ones(1, 2, 3, L, S)}, ValueError, "attn_mask: expected a shape"),
    ({"attn_mask": [True]}, TypeError, "attn_mask: expected a tensor, got list"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p"),
]


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS)
def test_errors(changes, error, message):
    inputs = {"query": torch.randn(2, 3, L, D), "key": torch.randn(2, 3, S, D), "value": torch.randn(2, 3, S, E)}
    with pytest.raises(error, match=message):
        mh.scaled_dot_product_attention(**(inputs | changes))


@pytest.fixture
def swapped(monkeypatch):
    """PyTorch's function replaced by ours, which counts its calls."""
    counter = SimpleNamespace(calls=0)

    def ours(*args, **kwargs):
        counter.calls += 1
        return mh.scaled_dot_product_attention(*args, **kwargs)

    counter.swap = lambda: monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    return counter


def test_swapped_inside_a_transformer_of_pytorch(swapped):
    """An encoder with padding and a decoder with a causal mask, in other people's code: outputs and gradients."""
    model = torch.nn.Transformer(
        24, 4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=31, dropout=0.0, batch_first=True
    )
    model = model.double()
    source, target = torch.randn(2, 7, 24).double(), torch.randn(2, 5, 24).double()
    padding = torch.arange(7) >= torch.tensor([[4], [7]])
    causal = model.generate_square_subsequent_mask(5, dtype=torch.float64)

    def run():
        model.zero_grad()
        output = model(source, target, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        output.square().sum().backward()
        return [output, *(x.grad for x in model.parameters())]

    expected = run()
    swapped.swap()
    got = run()
    assert swapped.calls == 6
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_swapped_inside_a_hugging_face_model(swapped):
    """A grouped-head decoder on "sdpa", left-padded, prefill and generation with its cache."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=31, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").double().eval()
    tokens = torch.randint(1, 37, (2, 11))
    seen = (torch.arange(11) >= torch.tensor([[4], [0]])).long()

    def run():
        with torch.no_grad():
            logits = model(tokens, attention_mask=seen).logits
            text = model.generate(tokens, attention_mask=seen, max_new_tokens=5, do_sample=False)
        return logits[seen.bool()], text

    expected = run()
    swapped.swap()
    got = run()
    assert swapped.calls == 2 * 6
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
