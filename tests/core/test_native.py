"""The compiled core against the definition in float64, at every instruction-set level that is here."""

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
ASKED = mh.Statistics(classes=[0, 1] * 5 + [0], offsets=(-1, 0))


def single(options):
    """The same options with floats of float32."""
    return {
        name: x.float() if isinstance(x, torch.Tensor) and x.dtype is torch.float64 else x
        for name, x in options.items()
    }


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def served(query, key, value, options):
    return native.can_use(functional.build_problem(query, key, value, **options), None) is None


def eager(query, key, value, visible, dtype):
    """Attention by PyTorch's own softmax in a type, its weights and its scores."""
    q, k, v = (x.to(dtype) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -INF)
    weights = F.softmax(scores, -1).nan_to_num(0)
    return weights @ v, weights, scores


def assert_within_budget(query, key, value, visible, output):
    """Error against float64 at most twice that of eager attention in float32, plus an ulp of the largest value.

    Of the value, not of the output: a single output in which values cancel is small by chance, and so is its error.
    """
    exact = eager(query, key, value, visible, torch.float64)[0]
    allowed = 2 * (eager(query, key, value, visible, torch.float32)[0] - exact).abs().max()
    ulp = torch.finfo(torch.float32).eps * value.abs().max()
    assert (output - exact).abs().max() <= allowed + ulp


def test_serves_every_form(lab):
    inputs = [x.float() for x in lab.tensors()]
    assert all(served(*inputs, single(form)) for form in lab.forms.values())


def test_every_form_and_statistic_is_that_of_the_definition(lab, form):
    query, key, value = (x.float() for x in lab.tensors())
    pairs = [torch.tensor([[0, 3, -1]] * 7)]
    asked = mh.Statistics(classes=[0, 1] * 5 + [-1], offsets=(-2, 0, 1), pairs=pairs)
    got = mh.observe(query, key, value, statistics=asked, impl="native", **single(form))
    exact = mh.observe(query.double(), key.double(), value.double(), statistics=asked, impl="reference", **form)
    lab.assert_same(got.output.double(), exact.output, 2e-6)
    assert got.statistics.keys() == exact.statistics.keys()
    for name, expected in exact.statistics.items():
        lab.assert_same(got.statistics[name], expected, 5e-6)


SIZES = st.tuples(
    st.sampled_from([1, 2]),  # B
    st.sampled_from([(1, 1), (3, 3), (5, 1), (6, 2)]),  # H, G
    st.sampled_from([1, 2, 5, 7, 13, 97, 149, 293]),  # L: tiles of 6, blocks of 144 and what is left
    st.sampled_from([1, 3, 16, 17, 53, 257, 300, 521]),  # S: panels of 16, blocks of 256
    st.sampled_from([1, 3, 8, 16, 31, 64, 67, 130]),  # D
    st.sampled_from([1, 5, 8, 16, 33, 64, 71]),  # E
)


@settings(max_examples=25)
@given(SIZES, st.booleans(), st.integers(0, 2**31))
def test_any_sizes(sizes, causal, seed):
    B, (H, G), L, S, D, E = sizes
    query, key, value = (
        random(B, H, L, D, seed=seed),
        random(B, G, S, D, seed=seed + 1),
        random(B, G, S, E, seed=seed + 2),
    )
    visible = torch.ones(L, S, dtype=torch.bool).tril(S - L) if causal else torch.ones(L, S, dtype=torch.bool)
    output = mh.attention(query, key, value, causal=causal, impl="native")
    assert output.shape == (B, H, L, E)
    assert_within_budget(query, key, value, visible, output)


def test_statistics_across_blocks_of_keys(lab):
    query, key, value = random(1, 4, 151, 64), random(1, 2, 1021, 64, seed=1), random(1, 2, 1021, 32, seed=2)
    query[:, 1] *= 30  # a head that looks sharply, one that looks everywhere
    query[:, 2] *= 0
    asked = mh.Statistics(classes=torch.arange(1021) % 19)
    got = mh.observe(query, key, value, statistics=asked, causal=True, impl="native")
    exact = mh.observe(*(x.double() for x in (query, key, value)), statistics=asked, causal=True, impl="reference")
    for name, expected in exact.statistics.items():
        # Scores of 30 * 8 carry float32's rounding of q.k, 1e-5 of a weight.
        tolerance = 3e-4 if name not in ("lse", "max_logit") else 1e-5
        lab.assert_same(got.statistics[name][:, [0, 1, 3]], expected[:, [0, 1, 3]], tolerance)
        lab.assert_same(got.statistics[name][:, 2], expected[:, 2], 1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_seeing_changes_no_bit(causal):
    query, key, value = random(2, 4, 150, 40), random(2, 2, 530, 40, seed=1), random(2, 2, 530, 24, seed=2)
    blind = mh.attention(query, key, value, causal=causal, impl="native")
    for asked in (mh.Statistics(), mh.Statistics("lse"), mh.Statistics(classes=torch.arange(530) % 5)):
        assert torch.equal(blind, mh.observe(query, key, value, statistics=asked, causal=causal, impl="native").output)


@pytest.mark.parametrize("L, S", [(1, 700), (150, 700), (701, 701)])
def test_same_bits_for_any_threads_and_company(L, S):
    query, key, value = random(3, 6, L, 48), random(3, 2, S, 48, seed=1), random(3, 2, S, 48, seed=2)
    lengths = torch.tensor([S, S - 1, S])
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(mh.observe(query, key, value, causal=True, key_lengths=lengths, impl="native"))
        for other in results[1:]:
            assert torch.equal(results[0].output, other.output)
            for name, x in results[0].statistics.items():
                assert same_bits(x, other.statistics[name]), name
        # Alone, and with no padding to its right.
        alone = mh.observe(query[1:2], key[1:2, :, : S - 1], value[1:2, :, : S - 1], causal=True,
                           query_start=max(0, S - 1 - L), impl="native")  # fmt: skip
        assert torch.equal(results[0].output[1:2], alone.output)
        for name, x in results[0].statistics.items():
            assert same_bits(x[1:2], alone.statistics[name]), name
    finally:
        torch.set_num_threads(before)


def same_bits(a, b):
    """Equal, a NaN to a NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def strided(x, how):
    """The same numbers in another memory layout."""
    B, heads, n, width = x.shape
    if how == "heads beside each other":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "columns apart":
        return x.mT.contiguous().mT
    if how == "a slice of something larger":
        whole = torch.full((B, heads + 1, n + 3, width + 5), 1e30)
        whole[:, 1:, 2:-1, 3:-2] = x
        return whole[:, 1:, 2:-1, 3:-2]
    if how == "one for all":
        return x[:1, :1, :, :].expand(B, heads, n, width)
    return x[:, :, :1].expand(B, heads, n, width)


@pytest.mark.parametrize(
    "how",
    ["heads beside each other", "columns apart", "a slice of something larger", "one for all", "one row"],
)
def test_any_strides(how):
    inputs = [random(2, 6, 61, 24), random(2, 3, 67, 24, seed=1), random(2, 3, 67, 40, seed=2)]
    views = [strided(x, how) for x in inputs]
    expected = mh.attention(*(x.contiguous() for x in views), impl="native")
    assert torch.equal(mh.attention(*views, impl="native"), expected)


def test_output_lies_as_the_query_does():
    query, key, value = (random(2, 4, 30, 16, seed=i).transpose(1, 2).contiguous().transpose(1, 2) for i in range(3))
    assert mh.attention(query, key, value, impl="native").transpose(1, 2).is_contiguous()


def test_offsets_past_2_to_the_31():
    # Lazily allocated: only the pages of the rows that are looked at come into being.
    far = torch.empty_strided((2**31 + 4096,), (1,))
    small = random(1, 1, 3, 16)
    view = far.as_strided((1, 1, 3, 16), (0, 0, 2**30, 1))
    view.copy_(small)
    assert torch.equal(mh.attention(view, view, view, impl="native"), mh.attention(small, small, small, impl="native"))


@pytest.mark.parametrize("B, L, S", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (1, 1, 1)])
def test_axes_of_size_zero(B, L, S):
    found = mh.observe(random(B, 4, L, 8), random(B, 2, S, 8), random(B, 2, S, 3), causal=True, impl="native")
    assert found.output.shape == (B, 4, L, 3)
    if S == 0:
        assert (found.output == 0).all() and (found.lse == -INF).all() and (found.argmax == -1).all()
        assert (found.entropy == 0).all() and found.key_mean.isnan().all()


def test_no_width():
    query, key, value = random(1, 2, 5, 0), random(1, 2, 7, 0), random(1, 2, 7, 3)
    output = mh.attention(query, key, value, impl="native")
    torch.testing.assert_close(output, value.mean(2, keepdim=True).expand(-1, -1, 5, -1))
    assert mh.attention(random(1, 2, 5, 4), random(1, 2, 7, 4), random(1, 2, 7, 0), impl="native").shape == (
        1,
        2,
        5,
        0,
    )


POISONED_KEYS = [3, 255, 256, 600]


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("L", [300, 20])
def test_invisible_poison_changes_nothing(where, poison, L):
    S = 605
    query, key, value = random(1, 4, L, 24), random(1, 2, S, 24, seed=1), random(1, 2, S, 24, seed=2)
    form = {"window": (290, 0), "impl": "native"}
    p, j = torch.arange(S - L, S)[:, None], torch.arange(S)
    visible = (j <= p) & (j >= p - 290)
    clean = mh.observe(query, key, value, **form)
    (key if where == "key" else value)[:, :, POISONED_KEYS, 5] = poison
    dirty = mh.observe(query, key, value, **form)
    blind = ~visible[:, POISONED_KEYS].any(1)
    assert blind.any() or L == 20
    torch.testing.assert_close(dirty.output[:, :, blind], clean.output[:, :, blind], rtol=1e-5, atol=1e-6)
    for name, x in clean.statistics.items():
        rows = blind if where == "key" else slice(None)
        assert same_bits(dirty.statistics[name][:, :, rows], x[:, :, rows]), name


def test_what_is_visible_and_not_finite_shows_as_the_definition_says(lab):
    query, key, value = (x.float() for x in lab.tensors())
    for poison in (NAN, INF, -INF):
        for which, row, column in (("key", 3, 2), ("value", 3, 4), ("query", 2, 0)):
            inputs = {"query": query.clone(), "key": key.clone(), "value": value.clone()}
            inputs[which][:, :, row, column] = poison
            got = mh.observe(**inputs, statistics=ASKED, causal=True, impl="native")
            exact = mh.observe(*(x.double() for x in inputs.values()), statistics=ASKED, causal=True, impl="reference")
            lab.assert_same(got.output.double(), exact.output, 2e-6)
            for name, expected in exact.statistics.items():
                lab.assert_same(got.statistics[name], expected, 5e-6)


def test_infinite_value_of_a_key_without_weight_is_nan():
    query, key, value = (
        torch.ones(1, 1, 1, 1),
        torch.tensor([0.0, -500.0]).view(1, 1, 2, 1),
        torch.tensor([1.0, INF]),
    )
    assert mh.attention(query, key, value.view(1, 1, 2, 1), impl="native").isnan().all()  # 0 * inf


def test_the_lowest_of_equal_keys_is_the_argmax():
    key = torch.zeros(1, 1, 700, 8)
    key[:, :, [301, 302, 555]] = 1
    found = mh.observe(torch.ones(1, 1, 3, 8), key, random(1, 1, 700, 8), impl="native")
    assert (found.argmax == 301).all()
    assert (mh.observe(torch.zeros(1, 1, 3, 8), key, key, impl="native").argmax == 0).all()


@pytest.mark.parametrize("logit", [1.0, 1000.0])
def test_exact_at_64k_keys_and_large_logits(logit, lab):
    S = 65536
    key = torch.zeros(1, 1, S, 1)
    key[0, 0, [7, 40000], 0] = torch.tensor([1.0, 1.0 - 2 / logit]) * logit
    query = torch.ones(1, 1, 1, 1)
    got = mh.observe(query, key, key, scale=1.0, impl="native")
    s = key[0, 0, :, 0].double()
    a = s.softmax(0)
    mean = (a * torch.arange(S)).sum()
    expected = {
        "lse": s.logsumexp(0),
        "entropy": -(a * s.log_softmax(0)).sum(),
        "effective_keys": 1 / (a**2).sum(),
        "key_mean": mean,
        "key_variance": (a * (torch.arange(S) - mean) ** 2).sum(),
    }
    for name, x in expected.items():
        torch.testing.assert_close(got.statistics[name].double().item(), x.item(), rtol=1e-5, atol=0)


def test_entropy_of_a_row_that_looks_at_one_key():
    # One key has all but e-20 of the weight: the entropy, 4e-8, is made of what is left.
    scores = torch.tensor([0.0, -20.0, -23.0]).view(1, 1, 3, 1)
    got = mh.observe(torch.ones(1, 1, 1, 1), scores, scores, scale=1.0, impl="native")
    log_a = scores.double().flatten().log_softmax(0)
    torch.testing.assert_close(got.entropy.double().item(), -(log_a.exp() * log_a).sum().item(), rtol=1e-5, atol=0)


def test_variance_of_a_row_that_looks_at_two_neighbours():
    # Astride the border of two blocks of keys, far from the first key.
    key = torch.full((1, 1, 60000, 1), -200.0)
    key[:, :, 51199:51201] = 0
    got = mh.observe(torch.ones(1, 1, 1, 1), key, key, scale=1.0, impl="native")
    assert got.key_mean.item() == 51199.5
    torch.testing.assert_close(got.key_variance.item(), 0.25, rtol=1e-6, atol=0)


def test_small_checked_on_paper():
    # Weights 1/4 and 3/4: logits 0 and log 3.
    key = torch.tensor([1.0, 3.0]).log().view(1, 1, 2, 1)
    found = mh.observe(torch.ones(1, 1, 1, 1), key, torch.tensor([4.0, 8.0]).view(1, 1, 2, 1), impl="native")
    for name, expected in {
        "output": 0.25 * 4 + 0.75 * 8,
        "max_weight": 0.75,
        "key_mean": 0.75,
        "key_variance": 0.1875,
        "effective_keys": 1 / (0.0625 + 0.5625),
        "lse": 1.3862943611,  # log 4
        "entropy": 0.5623351446,  # log 4 - 3/4 log 3
    }.items():
        torch.testing.assert_close(getattr(found, name).item(), expected, rtol=1e-6, atol=0)


def test_says_why_it_cannot_serve():
    x = random(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"'native' cannot serve this call: .*query is torch\.float8_e4m3fn"):
        mh.attention(*[x.to(torch.float8_e4m3fn)] * 3, impl="native")
    with torch.no_grad():
        mh.attention(x.clone().requires_grad_(), x, x, impl="native")
    assert not native.core.set_level("sse9")


def big_forms():
    """Forms whose cells cross the borders of tiles and blocks, for 2 sequences, 4 heads, 151 queries, 530 keys."""
    random = torch.Generator().manual_seed(3)
    mask = torch.rand(2, 1, 151, 530, generator=random) < 0.5
    mask[0, :, :, :300] = False  # the first block of keys hidden whole
    mask[1, :, 20:40] = False  # rows that see nothing
    bias = torch.randn(1, 4, 151, 530, generator=random)
    bias[torch.rand(bias.shape, generator=random) < 0.3] = -INF
    return {
        "mask": {"mask": mask},
        "mask of heads, columns apart": {"mask": (torch.rand(530, 151, 4, generator=random) < 0.5).permute(2, 1, 0)},
        "mask of keys": {"mask": torch.rand(2, 1, 1, 530, generator=random) < 0.5},
        "mask of rows": {"mask": torch.rand(1, 1, 151, 1, generator=random) < 0.5},
        "bias": {"bias": bias},
        "bias of keys, softcap": {"bias": torch.randn(530, generator=random), "softcap": 1.5},
        "bias of rows": {"bias": torch.randn(151, 1, generator=random)},
        "bias as large as a type allows": {"bias": torch.where(mask, 0.0, torch.finfo(torch.float32).min)},
        "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.0, 1.5]), "causal": True},
        "alibi both ways": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.0, 1.5]), "query_start": 190},
        "documents": {"document_ids": torch.randint(-1, 3, (2, 530), generator=random)},
        "all": {
            "mask": mask,
            "bias": bias,
            "alibi_slopes": torch.tensor([0.5, 0.25, 0.0, 1.5]),
            "document_ids": torch.randint(-1, 2, (2, 530), generator=random),
            "causal": True,
            "window": (300, None),
            "query_mask": torch.rand(2, 151, generator=random) < 0.8,
            "sinks": torch.randn(4, generator=random),
        },
    }


@pytest.mark.parametrize("name", list(big_forms()))
def test_forms_across_blocks(lab, name):
    form = big_forms()[name]
    query, key, value = random(2, 4, 151, 40), random(2, 2, 530, 40, seed=1), random(2, 2, 530, 24, seed=2)
    asked = mh.Statistics(classes=torch.arange(530) % 3)
    got = mh.observe(query, key, value, statistics=asked, impl="native", **form)
    doubled = {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in form.items()}
    exact = mh.observe(*(x.double() for x in (query, key, value)), statistics=asked, impl="reference", **doubled)
    lab.assert_same(got.output.double(), exact.output, 3e-6)
    for stat, expected in exact.statistics.items():
        lab.assert_same(got.statistics[stat], expected, 1e-5)
    assert torch.equal(got.output, mh.attention(query, key, value, impl="native", **form))


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("name", ["mask", "bias", "documents", "all"])
def test_poison_that_forms_hide(name, poison):
    form = big_forms()[name]
    query, key, value = random(2, 4, 151, 40), random(2, 2, 530, 40, seed=1), random(2, 2, 530, 24, seed=2)
    visible = functional.build_problem(query, key, value, **form).visible().expand(2, 4, 151, 530)
    clean = mh.observe(query, key, value, impl="native", **form)
    for x in (key, value):
        x[:, :, [5, 260, 529]] = poison
    dirty = mh.observe(query, key, value, impl="native", **form)
    blind = ~visible[..., [5, 260, 529]].any(-1)
    assert blind.any()
    torch.testing.assert_close(dirty.output[blind], clean.output[blind], rtol=1e-5, atol=1e-6)
    for stat, x in clean.statistics.items():
        assert same_bits(dirty.statistics[stat][blind], x[blind]), stat
    assert not dirty.output[~blind].isfinite().all(-1).any()
