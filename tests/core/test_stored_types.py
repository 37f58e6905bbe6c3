"""The compiled core on each type that numbers are stored in, against float64 and PyTorch's own rounding."""

from __future__ import annotations

import pytest
import torch

import multihead as mh

pytestmark = pytest.mark.usefixtures("level", "poisoned")
HALVES = (torch.bfloat16, torch.float16)
TYPES = (*HALVES, torch.float64)

FORMS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (37, 0)},
    "softcap": {"softcap": 1.7},
    "small scale": {"scale": 0.01},
}


def inputs(dtype, D=37, E=53, L=151, S=307):
    random = torch.Generator().manual_seed(5)
    return [
        torch.randn(2, heads, n, width, generator=random, dtype=torch.float64).to(dtype)
        for heads, n, width in ((6, L, D), (2, S, D), (2, S, E))
    ]


def definition(query, key, value, **options):
    return mh.observe(query.double(), key.double(), value.double(), impl="reference", **options)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_is_the_definition_to_the_rounding_of_its_output(dtype, form):
    tensors = inputs(dtype)
    seen = mh.observe(*tensors, impl="native", **FORMS[form])
    expected = definition(*tensors, **FORMS[form])
    # Sums are kept in float32 for halves: the only rounding of the stored type is that of the output.
    sums = 1e-13 if dtype is torch.float64 else 2e-6
    ulp = torch.finfo(dtype).eps / 2
    excess = (seen.output.double() - expected.output).abs() - expected.output.abs() * ulp
    assert seen.output.dtype is dtype
    assert excess.max() < sums
    for name in ("lse", "max_logit", "entropy", "effective_keys", "key_mean"):
        found = seen.statistics[name]
        assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        torch.testing.assert_close(found.double(), expected.statistics[name], rtol=20 * sums, atol=sums)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_of_a_half_type_goes_in_and_out_as_pytorch_has_it(dtype):
    """One key, so that the output is the value: all 65,536 bit patterns, denormal, infinite and NaN too."""
    value = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 1, 1, -1)
    one = torch.ones(1, 1, 1, 3, dtype=dtype)
    output = mh.attention(one, one, value, impl="native")
    torch.testing.assert_close(output, value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounds_to_the_nearest_even(dtype):
    """Two equal keys: the output is the mean of two neighbours, a tie (a sum of two stays in float32's range)."""
    first = torch.arange(0, 0x7BFF if dtype is torch.float16 else 0x7EFF, dtype=torch.int16).view(dtype)
    second = (first.view(torch.int16) + 1).view(dtype)
    value = torch.stack([first, second])[None, None]
    ones = torch.ones(1, 1, 2, 3, dtype=dtype)
    output = mh.attention(ones[:, :, :1], ones, value, impl="native").flatten()
    expected = ((first.double() + second.double()) / 2).float().to(dtype)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_bias_is_read_in_its_own_type(dtype):
    tensors = inputs(dtype)
    bias = torch.randn(1, 6, 151, 307, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias[:, :, 5:9, :100] = -torch.inf
    found = mh.observe(*tensors, bias=bias, impl="native")
    expected = definition(*tensors, bias=bias.double())
    torch.testing.assert_close(found.lse.double(), expected.lse, rtol=0, atol=1e-5)


def test_float64_is_as_close_as_pytorch_in_float64():
    """The error of each against long double, on 61 queries."""
    numpy = pytest.importorskip("numpy")
    query, key, value = inputs(torch.float64, L=61)
    wide = [x[:1, :1].numpy().astype(numpy.longdouble)[0, 0] for x in (query, key, value)]
    scores = wide[0] @ wide[1].T / numpy.sqrt(numpy.longdouble(37))
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    exact = weights / weights.sum(-1, keepdims=True) @ wide[2]

    def error(output):
        return float(numpy.abs(output[0, 0].numpy().astype(numpy.longdouble) - exact).max())

    ours = error(mh.attention(query, key, value, impl="native"))
    theirs = error(torch.softmax(query[:, :2] @ key.mT / 37**0.5, -1) @ value)
    assert ours <= 2 * theirs + 2.0**-52 * float(numpy.abs(exact).max())
