"""The layer against the attention of published models, with random weights: every option as others built it."""

from __future__ import annotations

import pytest
import torch

import multihead as mh

pytest.importorskip("transformers", reason="transformers is not installed")

B, L, H, G, D, WIDTH = 2, 13, 6, 3, 8, 42
COMMON = {"hidden_size": WIDTH, "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def rope(**more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, **more}}


def llama():
    from transformers.models.llama import modeling_llama as m

    config = m.LlamaConfig(**COMMON, rope_parameters=LLAMA3, attention_bias=True)
    scaling = mh.nn.Llama3Scaling(factor=8.0, low=1.0, high=4.0, trained_context=32)
    return config, m.LlamaAttention, m.LlamaRotaryEmbedding, {
        "bias": True,
        "rotary": mh.nn.Rotary(theta=100.0, scaling=scaling),
    }  # fmt: skip


def qwen3():
    from transformers.models.qwen3 import modeling_qwen3 as m

    config = m.Qwen3Config(**COMMON, **rope())
    options = {"qk_norm": "rms", "rotary": mh.nn.Rotary(theta=100.0)}
    return config, m.Qwen3Attention, m.Qwen3RotaryEmbedding, options


def qwen3_next():
    from transformers.models.qwen3_next import modeling_qwen3_next as m

    config = m.Qwen3NextConfig(**COMMON, **rope(partial_rotary_factor=0.5), num_hidden_layers=2)
    options = {"qk_norm": "rms", "gate": True, "rotary": mh.nn.Rotary(theta=100.0, fraction=0.5)}
    return config, m.Qwen3NextAttention, m.Qwen3NextRotaryEmbedding, options


def gemma2():
    from transformers.models.gemma2 import modeling_gemma2 as m

    config = m.Gemma2Config(**COMMON, **rope(), query_pre_attn_scalar=24, attn_logit_softcapping=0.7)
    options = {"softcap": 0.7, "scale": 24**-0.5, "rotary": mh.nn.Rotary(theta=100.0)}
    return config, m.Gemma2Attention, m.Gemma2RotaryEmbedding, options


def gpt_oss():
    from transformers.models.gpt_oss import modeling_gpt_oss as m

    config = m.GptOssConfig(**COMMON, **rope(), attention_bias=True)
    options = {"sinks": True, "bias": True, "rotary": mh.nn.Rotary(theta=100.0)}
    return config, m.GptOssAttention, m.GptOssRotaryEmbedding, options


def cohere():
    from transformers.models.cohere import modeling_cohere as m

    config = m.CohereConfig(**{**COMMON, "hidden_size": H * D}, **rope(), use_qk_norm=False)
    options = {"rotary": mh.nn.Rotary(theta=100.0, pairing="interleaved")}
    return config, m.CohereAttention, m.CohereRotaryEmbedding, options


def gptj():
    from transformers.models.gptj import modeling_gptj as m

    config = m.GPTJConfig(n_embd=H * D, n_head=H, rotary_dim=4, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0)
    options = {"n_kv_heads": H, "rotary": mh.nn.Rotary(theta=10000.0, dims=4, pairing="interleaved")}
    return config, m.GPTJAttention, m.GPTJRotaryEmbedding, options


MODELS = (llama, qwen3, qwen3_next, gemma2, gpt_oss, cohere, gptj)


def state_of(attention, options):
    """Their weights under our names."""
    theirs = attention.state_dict()
    state = {}
    for name, tensor in theirs.items():
        head, _, kind = name.rpartition(".")
        if head.endswith("_norm"):  # Qwen3-Next and Gemma keep the norm's weight less 1
            state[name] = tensor + 1 if "gate" in options else tensor
        elif head:
            state[f"W_{head.removesuffix('_proj')[-1].upper() if head != 'out_proj' else 'O'}.{kind}"] = tensor
        else:
            state[name] = tensor
    if "out_proj.weight" in theirs:
        state["W_O.weight"] = theirs["out_proj.weight"]
    if "gate" in options:
        both = state["W_Q.weight"].unflatten(0, (H, 2, D))
        state["W_Q.weight"], state["W_G.weight"] = both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1)
    return state


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_the_layer_gives_what_the_models_own_attention_gives(make, execution):
    config, kind, rotary, options = make()
    config._attn_implementation = "eager"
    attention = kind(config, layer_idx=0).eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(B, L, config.hidden_size)
    positions = torch.arange(L)[None]
    hidden = torch.full((L, L), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        turns = rotary(config)(x, positions)
        expected = attention(x, position_embeddings=turns, attention_mask=hidden)[0]
        layer = mh.MultiHeadAttention(
            config.hidden_size, H, **{"n_kv_heads": G, **options}, d_head=D, causal=True, execution=execution
        )
        layer.load_state_dict(state_of(attention, options))
        # Both in float32: a few ulps of the largest number, which the sums of both pass through.
        atol = 16 * torch.finfo(torch.float32).eps * float(expected.abs().max())
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("heads", [8, 6])
def test_alibi_is_that_of_bloom(heads):
    from transformers.models.bloom import modeling_bloom as m

    config = m.BloomConfig(hidden_size=heads * D, n_head=heads, attention_dropout=0.0, hidden_dropout=0.0)
    attention = m.BloomAttention(config, layer_idx=0).eval()
    x = torch.randn(B, L, heads * D)
    alibi = m.build_alibi_tensor(torch.ones(B, L), heads, torch.float32)
    hidden = torch.full((L, L), torch.finfo(torch.float32).min).triu(1).expand(B, 1, L, L)
    layer = mh.MultiHeadAttention(heads * D, heads, bias=True, causal=True, alibi=True)
    fused = {name: x.unflatten(0, (heads, 3, D)) for name, x in attention.query_key_value.state_dict().items()}
    state = {f"W_{part}.{name}": x[:, i].flatten(0, 1) for name, x in fused.items() for i, part in enumerate("QKV")}
    state |= {f"W_O.{name}": x for name, x in attention.dense.state_dict().items()}
    layer.load_state_dict(state)
    with torch.no_grad():
        expected = attention(x, torch.zeros_like(x), alibi, hidden)[0]
        torch.testing.assert_close(layer(x), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 14, 71, 112])
def test_slopes_are_those_of_published_models(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(mh.nn.alibi_slopes(heads), theirs, rtol=1e-6, atol=0)
