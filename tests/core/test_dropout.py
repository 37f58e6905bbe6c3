"""Dropout: Philox by its published answers, the same mask on every path, and the expected value."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead.core import dropout, native

# Random123's known answers (kat_vectors, philox4x32 10): counter, key, result.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.fixture(params=["reference", "tiled", "native"])
def impl(request):
    if request.param == "native" and native.core is None:
        pytest.skip("the compiled core is not built")
    return request.param


@pytest.mark.parametrize("counter, key, expected", ANSWERS)
def test_philox_gives_its_published_answers(counter, key, expected):
    words = dropout.philox(tuple(torch.tensor([c]) for c in counter), key[0] | key[1] << 32)
    assert tuple(int(w) for w in words) == expected


def test_same_mask_whatever_the_path_and_tiling(lab, small_tiles):
    query, key, value = lab.tensors()
    options = {"dropout_p": 0.4, "dropout_seed": 123456789012345}
    expected = mh.attention(query, key, value, impl="reference", **options)
    lab.assert_same(mh.attention(query, key, value, impl="tiled", **options), expected)
    assert not torch.allclose(expected, mh.attention(query, key, value, impl="reference"))


def test_cell_takes_its_own_word():
    b, h, i, j, seed = 1, 2, 4, 7, 0x0123456789ABCDEF
    words = dropout.philox(tuple(torch.tensor([c]) for c in (j // 4, i, h, b)), seed)
    share = int(words[j % 4]) / 2**32
    index = [torch.tensor([x]) for x in (b, h, i, j)]
    assert dropout.keep(seed, share - 1e-6, *index) and not dropout.keep(seed, share + 1e-6, *index)


def test_mask_depends_on_the_cell_alone():
    whole = dropout.keep(7, 0.5, *(torch.arange(n) for n in (2, 3, 5, 11)))
    part = dropout.keep(7, 0.5, torch.tensor([1]), torch.tensor([2]), torch.tensor([4, 0]), torch.arange(3, 9))
    assert torch.equal(part[0, 0], whole[1, 2][[4, 0], 3:9])


def test_share_of_kept_cells():
    kept = dropout.keep(1, 0.3, *(torch.arange(n) for n in (2, 3, 101, 503))).double()
    assert kept.mean().item() == pytest.approx(0.7, abs=4 * (0.21 / kept.numel()) ** 0.5)


def test_statistics_are_of_the_weights_before_dropout(lab, impl):
    query, key, value = lab.tensors()
    dropped = mh.observe(query, key, value, dropout_p=0.5, dropout_seed=1, impl=impl)
    whole = mh.observe(query, key, value, impl=impl)
    for name in whole.statistics:
        lab.assert_same(dropped.statistics[name], whole.statistics[name])


def test_everything_dropped_is_zero(lab, impl):
    query, key, value = lab.tensors()
    assert (mh.attention(query, key, value, dropout_p=1.0, impl=impl) == 0).all()


def test_seed_is_drawn_from_pytorch(lab, impl):
    query, key, value = lab.tensors()

    def draw(seed):
        torch.manual_seed(seed)
        return mh.attention(query, key, value, dropout_p=0.5, impl=impl)

    assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))


def test_mask_is_that_of_the_layout_written_down():
    """The rules of the module's page, in Python's own integers."""

    def words(counter, key):
        for _ in range(10):
            first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = (
                second >> 32 ^ counter[1] ^ key[0],
                second % 2**32,
                first >> 32 ^ counter[3] ^ key[1],
                first % 2**32,
            )
            key = ((key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32)
        return counter

    for seed in (5, -3, 2**63 - 1):
        bits = seed % 2**64
        kept = dropout.keep(seed, 0.3, *(torch.arange(n) for n in (2, 3, 5, 11)))
        for (b, h, i, j), got in zip(torch.cartesian_prod(*map(torch.arange, kept.shape)).tolist(), kept.flatten()):
            word = words((j // 4, i, h, b), (bits % 2**32, bits >> 32))[j % 4]
            assert bool(got) == (word >= round(0.3 * 2**32))


def test_expected_output_is_that_without_dropout(lab, impl):
    """The mean over 200 seeds, within four of its own standard errors, gradients alike."""
    query, key, value = (x.requires_grad_() for x in lab.tensors())
    weigh = torch.randn(2, 6, 7, 13, dtype=torch.float64)

    def call(**options):
        output = mh.attention(query, key, value, causal=True, impl=impl, **options)
        return output, *torch.autograd.grad((output * weigh).sum(), (query, key, value))

    expected = call()
    drawn = [torch.stack(x).detach() for x in zip(*(call(dropout_p=0.3, dropout_seed=seed) for seed in range(200)))]
    for x, exact in zip(drawn, expected, strict=True):
        error = (x.mean(0) - exact).abs() / (x.std(0) / 200**0.5 + 1e-12)
        assert (error < 4).double().mean() > 0.999
