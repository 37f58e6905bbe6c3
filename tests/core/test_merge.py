"""merge against the same attention over all keys at once, in float64, and against PyTorch's own softmax."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import multihead as mh

L, S = 7, 11
LEFT_OUT = {"evenness"}


def everything_asked():
    random = torch.Generator().manual_seed(2)
    pairs = [torch.randint(-1, S, shape, generator=random) for shape in ((L, 3), (2, L, 5))]
    return mh.Statistics(classes=[0, 1, -1, 2, 1, 0, 0, 2, 1, -1, 0], offsets=(-2, 0, 1), pairs=pairs)


def observe_part(query, key, value, options, part):
    """Over the keys that a bool (S,) or (L, S) picks, numbered as in the whole."""
    mask = part if options.get("mask") is None else part & options["mask"]
    return mh.observe(query, key, value, statistics=everything_asked(), impl="reference", **(options | {"mask": mask}))


def assert_same_observation(got, expected, tolerance=1e-12):
    assert list(got.statistics) == [name for name in expected.statistics if name not in LEFT_OUT]
    for name, x in (("output", got.output), *got.statistics.items()):
        y = expected.output if name == "output" else expected.statistics[name]
        torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_any_split_order_and_grouping_of_every_form(lab, form):
    """Rows that see nothing of a side, or nothing at all, are among them: each part is a third of 11 keys."""
    query, key, value = lab.tensors()
    options = {name: x for name, x in form.items() if name != "sinks"}
    whole = mh.observe(query, key, value, statistics=everything_asked(), impl="reference", **options)
    parts = torch.randint(3, (L, S)) == torch.arange(3)[:, None, None]
    sides = [observe_part(query, key, value, options, part) for part in parts]
    for a, b, c in itertools.permutations(sides):
        assert_same_observation(mh.merge(mh.merge(a, b), c), whole)
        assert_same_observation(mh.merge(a, mh.merge(b, c)), whole)


@given(cuts=st.lists(st.integers(0, S), min_size=1, max_size=4), causal=st.booleans(), seed=st.integers(0, 99))
def test_slices_of_keys_one_after_another(cuts, causal, seed):
    """Keys that each side numbers from 0, sides without keys too: `offset` says where they are."""
    torch.manual_seed(seed)
    query = torch.randn(2, 6, L, 5, dtype=torch.float64)
    key, value = torch.randn(2, 3, S, 5, dtype=torch.float64), torch.randn(2, 3, S, 13, dtype=torch.float64)
    asked = partial(mh.Statistics, offsets=(-3, 0))
    classes = torch.randint(-1, 3, (S,))
    ends = [0, *sorted(cuts), S]
    sides = [
        mh.observe(
            query, key[:, :, i:j], value[:, :, i:j], statistics=asked(classes=classes[i:j], n_classes=3),
            causal=causal, query_start=S - L - i, impl="tiled",
        )
        for i, j in itertools.pairwise(ends)
    ]  # fmt: skip
    whole = mh.observe(
        query, key, value, statistics=asked(classes=classes, n_classes=3), causal=causal, impl="reference"
    )
    forward = sides[0]
    for side, begin in zip(sides[1:], ends[1:]):
        forward = mh.merge(forward, side, offset=begin)
    backward, begin = sides[-1], ends[-2]
    for side, start in zip(sides[-2::-1], ends[-3::-1]):
        backward, begin = mh.merge(side, backward, offset=begin - start), start
    assert_same_observation(forward, whole)
    assert_same_observation(backward, whole)


def test_merged_is_what_pytorch_says(lab):
    query, key, value = lab.tensors()
    options = lab.forms["causal"]
    first = torch.arange(S) % 3 == 0
    got = mh.merge(*(observe_part(query, key, value, options, part) for part in (first, ~first)))
    right = lab.oracle(query, key, value, options)
    lab.assert_same(got.output, right.output)
    lab.assert_same(got.lse, right.scores.logsumexp(-1))
    lab.assert_same(got.entropy, torch.special.entr(right.weights).sum(-1))
    lab.assert_same(got.max_weight, right.weights.amax(-1))
    assert torch.equal(got.argmax, right.scores.argmax(-1))


def test_on_paper():
    """Keys 0 and 1 of weight 1/2 each on one side, key 2 as heavy as both on the other: 1/4, 1/4, 1/2."""
    query, key, value = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 3, 1), torch.tensor([2.0, 4, 6]).view(1, 1, 3, 1)
    bias = torch.tensor([0, 0, math.log(2)])
    whole = mh.merge(
        mh.observe(query, key[:, :, :2], value[:, :, :2], bias=bias[:2]),
        mh.observe(query, key[:, :, 2:], value[:, :, 2:], bias=bias[2:]),
        offset=2,
    )
    assert whole.output.item() == pytest.approx(4.5)
    assert whole.lse.item() == pytest.approx(math.log(4))
    assert whole.entropy.item() == pytest.approx(1.5 * math.log(2))
    assert whole.effective_keys.item() == pytest.approx(1 / (1 / 16 + 1 / 16 + 1 / 4))
    assert whole.key_mean.item() == pytest.approx(1.25)
    assert whole.key_variance.item() == pytest.approx((1.25**2 + 0.25**2) / 4 + 0.75**2 / 2)
    assert whole.argmax.item() == 2 and whole.max_weight.item() == pytest.approx(0.5)


def test_of_equal_scores_the_lowest_key_whichever_side_it_is_on():
    query, key, value = torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 5, 3), torch.zeros(1, 1, 5, 3)
    part = torch.tensor([False, True, True, False, True])
    a, b = (mh.observe(query, key, value, mask=x) for x in (part, ~part))
    assert mh.merge(a, b).argmax.item() == mh.merge(b, a).argmax.item() == 0


def test_side_of_next_to_no_weight_keeps_its_share_of_a_small_entropy(lab):
    query, key, value = lab.tensors(b=1, h=1, g=1, n_queries=1)
    for gap in (1, 20, 60, 600, 1e4):
        bias = torch.zeros(S, dtype=torch.float64)
        bias[4:] = -gap
        first = torch.arange(S) < 1
        bias[1:4] = -torch.inf
        sides = [
            mh.observe(query * 0, key, value, bias=bias, mask=x, statistics=mh.Statistics("entropy"))
            for x in (first, ~first)
        ]
        small = 7 * math.exp(-gap)
        p = small / (1 + small)
        expected = math.log1p(small) + p * gap
        assert mh.merge(*sides).entropy.item() == pytest.approx(expected, rel=1e-12, abs=0)


def test_gradients_are_those_of_the_whole(lab):
    names = ("lse", "entropy", "max_logit", "class_mass")
    mask = torch.rand(2, 6, L, S) < 0.6
    mask[:, :, 2] = False
    part = torch.rand(L, S) < 0.4
    part[3], part[4] = True, False

    def gradients(observe):
        inputs = [x.requires_grad_() for x in lab.tensors()]
        seen = observe(*inputs)
        for name in ("effective_keys", "key_mean", "max_weight"):
            assert not seen.statistics[name].requires_grad
        tensors = [seen.output, *(seen.statistics[name] for name in names)]
        total = sum(
            (torch.where(x.isfinite(), x, 0) * torch.cos(torch.arange(x.numel()).view(x.shape))).sum() for x in tensors
        )
        return torch.autograd.grad(total, inputs)

    expected = gradients(lambda *x: observe_part(*x, {}, mask))
    got = gradients(lambda *x: mh.merge(observe_part(*x, {}, mask & part), observe_part(*x, {}, mask & ~part)))
    for x, y in zip(got, expected, strict=True):
        lab.assert_same(x, y, 1e-11)


def test_padding_and_nan(lab):
    """Padding of one side or both gives zeros and NaN; a NaN that one side sees shows, in its rows alone."""
    query, key, value = lab.tensors()
    rows = torch.ones(2, L, dtype=torch.bool)
    rows[:, 1] = False
    first = torch.arange(S) < 4
    a = observe_part(query, key, value, {"query_mask": rows}, first)
    b = observe_part(query, key, value, {"query_mask": rows}, ~first)
    plain = observe_part(query, key, value, {}, first)
    for seen in (mh.merge(a, b), mh.merge(plain, b), mh.merge(b, plain)):
        assert (seen.output[:, :, 1] == 0).all() and seen.entropy[:, :, 1].isnan().all()
        assert seen.output[:, :, ::2].ne(0).all() and seen.entropy[:, :, ::2].isfinite().all()
    key[0, 0, 9] = torch.nan
    b = observe_part(query, key, value, {}, ~first)
    for seen in (mh.merge(plain, b), mh.merge(b, plain)):
        for x in (seen.output, seen.lse, seen.entropy, seen.max_logit, seen.max_weight, seen.key_mean):
            assert x[0, :2].isnan().all() and x[0, 2:].isfinite().all() and x[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types(lab, dtype):
    query, key, value = lab.tensors(dtype=dtype)
    a = mh.observe(query, key[:, :, :3], value[:, :, :3])
    b = mh.observe(query, key[:, :, 3:], value[:, :, 3:])
    seen, whole = mh.merge(a, b, offset=3), mh.observe(*(x.double() for x in (query, key, value)))
    assert seen.output.dtype is dtype and seen.lse.dtype is torch.float32 and seen.argmax.dtype is torch.int64
    for name, x in seen.statistics.items():
        lab.assert_same(x, whole.statistics[name], 1e-4)
    lab.assert_same(seen.output, whole.output, 2 * torch.finfo(dtype).eps * whole.output.abs().max().item() + 1e-5)


def test_sink_is_merged_as_an_observation_of_its_own(lab):
    query, key, value = lab.tensors()
    sinks = torch.randn(6, dtype=torch.float64)
    only = mh.Statistics("lse")
    keys = mh.observe(query, key, value, causal=True, query_start=-2, statistics=only)
    sink = mh.Observation(torch.zeros_like(keys.output), {"lse": sinks[:, None].expand(keys.lse.shape)})
    seen = mh.merge(keys, sink)
    expected = mh.observe(query, key, value, causal=True, query_start=-2, sinks=sinks, statistics=only)
    lab.assert_same(seen.output, expected.output)
    lab.assert_same(seen.lse, expected.lse)


def test_what_cannot_be_exact_is_left_out(lab):
    query, key, value = lab.tensors()

    def merged(*names):
        return set(
            mh.merge(*(mh.observe(query, key, value, statistics=mh.Statistics(*names)) for _ in "ab")).statistics
        )

    assert merged("evenness", "entropy") == {"lse", "entropy"}
    assert merged("argmax", "max_weight") == {"lse", "max_weight"}
    assert merged("argmax", "max_logit") == {"lse", "argmax", "max_logit"}
    assert merged("key_variance") == {"lse"}
    assert merged("key_variance", "key_mean") == {"lse", "key_mean", "key_variance"}
    assert merged("max_logit") == {"lse", "max_logit"}


def test_errors_name_what_does_not_fit(lab):
    query, key, value = lab.tensors()
    seen = mh.observe(query, key, value)

    def refused(words, other):
        with pytest.raises(ValueError, match=words):
            mh.merge(seen, other)

    refused("b: expected an observation with lse", mh.Observation(seen.output))
    refused("a alone has max_logit.*, b alone has nothing", mh.Observation(seen.output, {"lse": seen.lse}))
    refused(
        "a alone has nothing, b alone has offset_mass",
        mh.observe(query, key, value, statistics=mh.Statistics(offsets=[1])),
    )
    refused("b: expected an observation without sinks", mh.observe(query, key, value, sinks=torch.zeros(6).double()))
    refused(
        r"b: expected output as in a, \(2, 6, 7, 13\) .*, got \(2, 6, 5, 13\)", mh.observe(query[:, :, 2:], key, value)
    )
    refused(r"b: expected output .*float64 .*float32", mh.observe(*(x.float() for x in (query, key, value))))
    with pytest.raises(ValueError, match="a: expected an observation with lse"):
        mh.merge(mh.Observation(seen.output), seen)
    asked = [mh.Statistics("lse", classes=[0] * S, n_classes=n) for n in (2, 3)]
    with pytest.raises(ValueError, match=r"class_mass as in a, \(2, 6, 7, 2\)"):
        mh.merge(*(mh.observe(query, key, value, statistics=x) for x in asked))
