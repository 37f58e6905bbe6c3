"""What only the tiled path promises: exact sums over long texts, linear memory, the same bits whatever the batch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multihead as mh
from multihead.core import functional, reference, tiled, tiles

# Statistics of float32 sums against float64 of the same numbers.
RELATIVE = 1e-5


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_mix_of_options_is_the_definition(data):
    draw = data.draw
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    b, g, group, n, s = (draw(st.integers(1, k)) for k in (2, 2, 3, 9, 13))
    h = g * group

    def floats(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    def bools(*shape):
        return torch.rand(shape, generator=random) < 0.7

    makers = {
        "causal": lambda: True,
        "window": lambda: (draw(st.integers(0, 5)), draw(st.sampled_from([None, 0, 2]))),
        "mask": lambda: bools(draw(st.sampled_from([1, b])), draw(st.sampled_from([1, h])), n, s),
        "bias": lambda: floats(1, h, n, s).masked_fill(~bools(1, h, n, s), -torch.inf),
        "alibi_slopes": lambda: floats(h),
        "key_lengths": lambda: torch.randint(0, s + 1, (b,), generator=random),
        "query_mask": lambda: bools(b, n),
        "document_ids": lambda: torch.randint(-1, 2, (b, s), generator=random),
        "query_start": lambda: draw(st.integers(-3, 9)),
        "softcap": lambda: 0.8,
        "sinks": lambda: floats(h),
        "dropout_p": lambda: 0.3,
    }
    names = draw(st.sets(st.sampled_from(sorted(makers)), max_size=5))
    options: dict[str, Any] = {name: makers[name]() for name in sorted(names)} | {"dropout_seed": 3}
    problem = functional.build_problem(floats(b, h, n, 5), floats(b, g, s, 5), floats(b, g, s, 7), **options)
    asked = mh.Statistics(classes=torch.arange(s) % 3, offsets=(-1, 1), pairs=[torch.zeros(n, 2, dtype=torch.int64)])
    whole, size = reference.forward(problem, asked), tiles.block_sizes
    try:
        tiles.block_sizes = lambda problem: (3, 4)
        cut = tiled.forward(problem, asked)
    finally:
        tiles.block_sizes = size
    torch.testing.assert_close(cut.output, whole.output, rtol=1e-10, atol=1e-12)
    assert list(cut.statistics) == list(whole.statistics)
    for name, expected in whole.statistics.items():
        torch.testing.assert_close(
            cut.statistics[name],
            expected,
            rtol=1e-10,
            atol=1e-10,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def exact_rows(query, key):
    """Entropy, effective keys, mean and variance of rows (L, D) over keys (S, D), in float64."""
    scores = query.double() @ key.double().T / query.shape[-1] ** 0.5
    log_weights = scores.log_softmax(-1)
    weights = log_weights.exp()
    j = torch.arange(len(key), dtype=torch.float64)
    mean = weights @ j
    return {
        "lse": scores.logsumexp(-1),
        "entropy": -(weights * log_weights).sum(-1),
        "effective_keys": 1 / weights.square().sum(-1),
        "key_mean": mean,
        "key_variance": (weights * (j - mean[:, None]) ** 2).sum(-1),
    }


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_statistics_are_exact_over_64k_keys(spread):
    random = torch.Generator().manual_seed(0)
    query = torch.randn(5, 16, generator=random) * spread
    key = torch.randn(1 << 16, 16, generator=random)
    found = mh.observe(query[None, None], key[None, None], key[None, None], impl="tiled").statistics
    for name, expected in exact_rows(query, key).items():
        torch.testing.assert_close(
            found[name][0, 0].double(), expected, rtol=RELATIVE, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_statistics_are_exact_at_logits_of_1000():
    # Scores of whole numbers are exact in float32, so that only the formulas can err.
    scores = 1000 - torch.randint(0, 12, (7, 3001), generator=torch.Generator().manual_seed(1)).float()
    query, key = torch.eye(7), scores.T.contiguous()
    found = mh.observe(query[None, None], key[None, None], key[None, None], impl="tiled", scale=1.0).statistics
    for name, expected in exact_rows(query * 7**0.5, key).items():
        torch.testing.assert_close(found[name][0, 0].double(), expected, rtol=RELATIVE, atol=0)


def test_variance_of_a_sharp_head_far_from_the_start():
    key = torch.full((60_013, 1), -80.0)
    key[51_000], key[51_001], key[51_003] = 0.0, -10.0, -17.0
    query = torch.ones(1, 1)
    found = mh.observe(query[None, None], key[None, None], key[None, None], impl="tiled").statistics
    for name, expected in exact_rows(query, key).items():
        # The sum of the weights is 1 + 5e-5, of which float32 keeps three digits; the variance keeps all.
        tolerance = 0 if name == "key_variance" else 1e-7
        torch.testing.assert_close(found[name][0, 0].double(), expected, rtol=RELATIVE, atol=tolerance)


@pytest.mark.parametrize("n", [1, 67, 300])
def test_bits_do_not_depend_on_the_batch_or_on_padding(lab, n):
    query, key, value = lab.tensors(dtype=torch.float32, b=3, n_queries=n, n_keys=701, d=31)
    lengths = torch.tensor([601, 701, 300])
    together = mh.observe(query, key, value, key_lengths=lengths, impl="tiled", causal=True)
    for b, length in enumerate(lengths.tolist()):
        alone = mh.observe(
            query[b : b + 1], key[b : b + 1, :, :length], value[b : b + 1, :, :length], impl="tiled",
            query_start=max(0, length - n), causal=True,
        )  # fmt: skip
        assert torch.equal(alone.output, together.output[b : b + 1])
        for name, x in alone.statistics.items():
            assert torch.equal(x.nan_to_num(), together.statistics[name][b : b + 1].nan_to_num()), name


def test_bits_do_not_depend_on_threads(lab):
    query, key, value = (x.requires_grad_() for x in lab.tensors(dtype=torch.float32, n_queries=131, n_keys=701))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            output = mh.attention(query, key, value, causal=True, impl="tiled")
            results.append([output, *torch.autograd.grad(output.sin().sum(), [query, key, value])])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_tiles_that_no_query_sees_are_skipped(lab):
    problem = lab.problem(*lab.tensors(n_queries=1001, n_keys=1001), causal=True, window=(63, 0))
    tiling = tiles.Tiling(problem)
    cells = sum(
        (t.rows.stop - t.rows.start) * (t.keys.stop - t.keys.start)
        for r in tiling.row_blocks()
        for t in tiling.tiles(r)
    )
    assert cells < 1001 * (128 + 64)


def test_full_and_inner_tiles_need_no_mask(lab):
    tiling = tiles.Tiling(lab.problem(*lab.tensors(n_queries=1024, n_keys=1024), causal=True))
    last = list(tiling.row_blocks())[-1]
    assert [t.visible is None for t in tiling.tiles(last)] == [True, False]


MEMORY = """
import resource, sys, torch, multihead as mh
torch.set_num_threads(1)
n, grad, form = int(sys.argv[1]), sys.argv[2] == "grad", sys.argv[3]
x = [torch.randn(1, 2, n, 16, requires_grad=grad) for _ in range(3)]
options = {
    "causal": {"causal": True},
    "keys": {"mask": torch.arange(n) % 3 > 0},
    "documents": {"document_ids": (torch.arange(n) % 7)[None], "causal": True},
    "window": {"window": (100, 100), "softcap": 2.0, "alibi_slopes": torch.ones(2), "sinks": torch.ones(2)},
}[form]
seen = mh.observe(*x, impl="tiled", **options)
if grad:
    (seen.output.sum() + seen.entropy.sum()).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def peak(n, grad, form):
    """Peak memory in MB of a fresh process."""
    command = [sys.executable, "-c", MEMORY, str(n), "grad" if grad else "", form]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["causal", "keys", "documents", "window"])
@pytest.mark.parametrize("grad", [False, True])
def test_memory_grows_with_the_text_not_with_its_square(form, grad):
    # One L x S tensor of float32 for two heads would be 2 GB at 16,384.
    assert peak(16_384, grad, form) - peak(64, grad, form) < 160
