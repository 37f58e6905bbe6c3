"""Rotary positions: frequencies and turns against transformers, and what makes them positions."""

from __future__ import annotations

import math

import pytest
import torch

import multihead as mh
from multihead.nn import LinearScaling, Llama3Scaling, Rotary


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            Llama3Scaling(8.0, 1.0, 4.0, 8192),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (
            Llama3Scaling(32.0, 0.5, 3.0, 100),
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 0.5,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 100,
            },
        ),
    ],
)
def test_scaled_frequencies_are_those_of_transformers(ours, theirs):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters={**theirs, "rope_theta": 500000.0}
    )
    expected, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, device=None)
    assert factor == 1
    got = Rotary(theta=500000.0, scaling=ours).frequencies(128)
    torch.testing.assert_close(got.float(), expected, rtol=1e-5, atol=0)
    plain = Rotary(theta=500000.0).frequencies(128)
    assert (got < 0.9 * plain).any()  # it scales something


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dims", [None, 6, 0])
def test_a_score_depends_on_the_distance_alone(pairing, dims):
    rotary = Rotary(theta=50.0, pairing=pairing, dims=dims)
    q, k = torch.randn(2, 1, 3, 1, 10, dtype=torch.float64)

    def score(i, j):
        return (rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([j]))).sum(-1)

    torch.testing.assert_close(score(7, 4), score(1003, 1000), rtol=1e-12, atol=1e-12)
    assert torch.allclose(score(7, 4), score(7, 5)) == (dims == 0)
    torch.testing.assert_close(score(5, 5), (q * k).sum(-1))


def test_a_pair_turns_by_its_angle():
    turned = Rotary(theta=100.0)(torch.tensor([[[[1.0, 2.0, 0.0, 0.0]]]]), torch.tensor([3]))
    expected = [math.cos(3), 2 * math.cos(0.3), math.sin(3), 2 * math.sin(0.3)]
    assert turned.flatten().tolist() == pytest.approx(expected)
    turned = Rotary(theta=100.0, pairing="interleaved")(torch.tensor([[[[1.0, 0.0, 2.0, 0.0]]]]), torch.tensor([3]))
    assert turned.flatten().tolist() == pytest.approx([expected[0], expected[2], expected[1], expected[3]])


def test_each_sequence_has_its_own_positions():
    rotary, x = Rotary(), torch.randn(2, 3, 5, 8)
    starts = torch.tensor([4, 9])
    both = rotary(x, starts[:, None] + torch.arange(5))
    for b in range(2):
        torch.testing.assert_close(both[b], rotary(x[b : b + 1], starts[b] + torch.arange(5))[0])


def test_angles_stay_exact_far_out():
    x = torch.tensor([[[[1.0, 0.0]]]])
    assert Rotary()(x, torch.tensor([10**6])).flatten().tolist() == pytest.approx(
        [math.cos(10**6), math.sin(10**6)], abs=1e-7
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"theta": 0}, "theta: expected a positive number, got 0"),
        ({"pairing": "rows"}, "pairing: expected 'half' or 'interleaved', got 'rows'"),
        ({"dims": 3}, "dims: expected an even number of components, got 3"),
        ({"dims": 4, "fraction": 0.5}, "dims: expected it without fraction"),
        ({"fraction": 1.5}, "fraction: expected a share from 0 to 1, got 1.5"),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        Rotary(**arguments)


def test_what_turns_must_fit_the_head():
    with pytest.raises(ValueError, match="rotary: expected an even number of at most D=8 turning components, got 10"):
        mh.MultiHeadAttention(16, 2, rotary=Rotary(dims=10))
    with pytest.raises(ValueError, match="high: expected a number over low=4"):
        Llama3Scaling(low=4.0)
