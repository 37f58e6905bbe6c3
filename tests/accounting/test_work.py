"""FLOPs, bytes and the cache: against PyTorch's own counter on real modules, brute force, and published figures."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from multihead.accounting.architectures import read
from multihead.accounting.bounds import DEVICES, Device, bound, device, largest_batch, largest_context
from multihead.accounting.count import Pass, Types, Work, cache_bytes, decode, pairs, prefill, weight_bytes, work
from multihead.accounting.fields import ConfigError
from multihead.accounting.presets import open_config

F32 = Types("f32", "f32")
B, N = 3, 7

GPT2 = {"model_type": "gpt2", "vocab_size": 211, "n_layer": 5, "n_head": 6, "n_embd": 48, "n_positions": 37}
SIZES = {"vocab_size": 211, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3}
SIZES |= {"hidden_size": 48, "intermediate_size": 53, "max_position_embeddings": 37}
LLAMA = {"model_type": "llama"} | SIZES
FALCON = {"model_type": "falcon", "multi_query": True} | SIZES
BERT = {"model_type": "bert"} | SIZES


def opened(fields):
    """Our model, and the module of transformers with the same configuration."""
    transformers = pytest.importorskip("transformers")
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    fields = dict(fields)
    config = auto.CONFIG_MAPPING[fields.pop("model_type")](**fields)
    model = read(config.to_dict(), "tiny")
    config._attn_implementation = "eager"
    return model, getattr(transformers, model.counted_as)(config).eval()


def counted(module, **inputs):
    """PyTorch's count, without the products that rotary angles are made with there: they are no weights' or scores'."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = module(**inputs)
    rotary = [sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(rotary), output


@pytest.mark.parametrize("fields", [GPT2, LLAMA, FALCON], ids=lambda fields: fields["model_type"])
def test_flops_are_those_that_pytorch_counts(fields):
    model, module = opened(fields)
    tokens = torch.randint(0, 211, (B, N))
    found, output = counted(module, input_ids=tokens[:, :-1], logits_to_keep=1, use_cache=True)
    ours = prefill(model, N - 1, B, F32)
    attention = model.attention
    # Eager attention multiplies the whole square; we count the half that is visible.
    square = 4 * B * model.layers * attention.n_heads * attention.d_head
    assert found == ours.product_flops + square * (N - 1) ** 2
    assert ours.attention_flops == square * (N - 1) * N // 2

    found, output = counted(module, input_ids=tokens[:, -1:], past_key_values=output.past_key_values)
    assert found == decode(model, N, B, F32).flops

    cache = output.past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == cache_bytes(model, N, B, F32)


def test_flops_of_an_encoder_are_those_that_pytorch_counts():
    model, module = opened(BERT)
    found, _ = counted(module, input_ids=torch.randint(0, 211, (B, N)))
    assert found == prefill(model, N, B, F32).flops
    assert decode(model, N, B, F32) is None and cache_bytes(model, N, B, F32) == 0


def test_flops_of_an_encoder_decoder_are_those_that_pytorch_counts():
    model = read(
        {"model_type": "original-transformer", "d_model": 48, "num_heads": 6, "num_layers": 5}
        | {"d_ff": 53, "vocab_size": 211},
        "tiny",
    )
    stack = torch.nn.Transformer(
        48, 6, 5, 5, 53, batch_first=True
    ).train()  # eval would take another path in the encoder
    source, target = torch.randn(B, N, 48), torch.randn(B, 1, 48)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            memory = stack.encoder(source)
        cross = 2 * 2 * B * N * 48 * 48 * 5  # keys and values of five cross-attentions
        assert counter.get_total_flops() + cross == prefill(model, N, B, F32).flops
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            stack.decoder(target, memory)
    # PyTorch makes the keys and values of the memory again, and we keep them; its first token sees itself only.
    ours = work(model, Pass(B, new=1, before=0, memory=N), F32)
    assert counter.get_total_flops() - cross == ours.flops
    last = decode(model, N, B, F32)
    assert last.flops - ours.flops == 2 * B * 48 * 211 + 5 * B * 6 * 4 * 8 * (N - 1)
    assert cache_bytes(model, N, B, F32) == 2 * 5 * B * N * 2 * 48 * 4  # its own and the encoder's


def test_experts_multiply_for_the_tokens_that_use_them():
    fields = SIZES | {"model_type": "mixtral", "num_local_experts": 7, "num_experts_per_tok": 2}
    model = read(fields, "tiny")
    per_token = 2 * (model.parameters(active=True) - model.parameters("norms")) - 2 * 48 * 211
    assert prefill(model, N, B, F32).product_flops == B * N * per_token + B * 2 * 48 * 211
    # One token reads two experts; so many tokens that all are met read all.
    one, many = decode(model, 1, 1, F32), prefill(model, 1, 10_000, F32)
    expert = 5 * 3 * 48 * 53
    assert many.weight_bytes - one.weight_bytes - 9_999 * 48 * 4 == 5 * expert * 4
    # In between, the mean over random choices.
    choices = torch.stack([torch.rand(B, 7).topk(2).indices.flatten() for _ in range(4000)])
    met = torch.nn.functional.one_hot(choices, 7).amax(1).sum(1).double().mean().item()
    some = decode(model, 1, B, F32)
    assert (some.weight_bytes - one.weight_bytes - (B - 1) * 48 * 4) / (4 * expert) + 2 == pytest.approx(met, rel=0.01)


def brute(new, before, window, causal):
    positions = range(before, before + new)
    if not causal:
        return new * (before + new)
    return sum(1 for p in positions for j in range(p + 1) if window is None or j > p - window)


@given(st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(1, 12), st.booleans())
def test_pairs_are_those_that_are_visible(new, before, window, causal):
    assert pairs(new, before, window, causal) == brute(new, before, None if not causal else window, causal)


def test_a_window_bounds_scores_and_cache():
    windowed = read({"model_type": "mistral", "sliding_window": 4} | SIZES, "tiny")
    full = read({"model_type": "mistral", "sliding_window": None} | SIZES, "tiny")
    assert cache_bytes(windowed, 3, B, F32) == cache_bytes(full, 3, B, F32)
    assert cache_bytes(windowed, 31, B, F32) == cache_bytes(full, 4, B, F32)
    assert decode(windowed, 31, B, F32).attention_flops == decode(full, 4, B, F32).attention_flops
    ours, theirs = prefill(windowed, 31, B, F32), prefill(full, 31, B, F32)
    assert ours.product_flops == theirs.product_flops
    assert ours.attention_flops / theirs.attention_flops == brute(31, 0, 4, True) / brute(31, 0, None, True)


def test_the_bytes_of_a_step_are_weights_cache_and_ends():
    """On paper: a llama of one layer, d_model 4, 2 heads on 1, d_ff 3, 5 words; f32; the third token of 2 texts."""
    sizes = {"hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 3}
    model = read({"model_type": "llama", "vocab_size": 5, "num_hidden_layers": 1} | sizes, "paper")
    step = decode(model, 3, 2, F32)
    matrices = 4 * 4 + 2 * 4 + 2 * 4 + 4 * 4 + 3 * (3 * 4) + 5 * 4
    assert step.product_flops == 2 * 2 * matrices
    assert step.attention_flops == 2 * (2 * 3) * 2 * (2 + 2)  # texts, heads x keys, 2 a multiply-add, D + E
    assert step.weight_bytes == 4 * (matrices + 3 * 4 + 2 * 4)  # norms; a row of the embedding for each text
    assert step.cache_bytes == 4 * 2 * (3 + 1) * (2 + 2)  # three read, one written
    assert step.activation_bytes == 4 * 2 * (8 + 6 + 6 + 8 + 3 * 7 + 9)
    assert step.bytes == step.weight_bytes + step.cache_bytes + step.activation_bytes
    assert step.intensity == step.flops / step.bytes
    half = decode(model, 3, 2, Types("bf16", "bf16"))
    assert (half.bytes, half.flops) == (step.bytes // 2, step.flops)
    small = decode(model, 3, 2, Types("int4", "int8"))
    assert (small.weight_bytes, small.cache_bytes) == (step.weight_bytes // 8, step.cache_bytes // 4)
    assert small.activation_bytes == half.activation_bytes


BF16 = Types()


@pytest.mark.parametrize(
    ("name", "bytes_a_token"), [("deepseek-v3", 70_272), ("llama-3.1-405b", 516_096), ("qwen-2.5-72b", 327_680)]
)
def test_cache_of_a_token_is_as_published(name, bytes_a_token):
    """Zhao et al. 2025, Insights into DeepSeek-V3, Table 1."""
    if name == "qwen-2.5-72b":
        sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
        model = read({"model_type": "qwen2", "intermediate_size": 29568, "vocab_size": 152064} | sizes, name)
    else:
        model = open_config(name).model
    assert cache_bytes(model, 1, 1, BF16) == bytes_a_token


def test_cache_of_llama_3_8b_at_128k_tokens():
    model, tokens, gib = open_config("llama-3-8b").model, 128 * 1024, 2**30
    full = model.with_kv_heads(32)
    assert cache_bytes(full, tokens, 1, BF16) == 64 * gib
    assert cache_bytes(full, tokens, 1, BF16) // model.layers == 2 * gib
    assert cache_bytes(model, tokens, 1, BF16) == 16 * gib
    assert cache_bytes(model.with_kv_heads(1), tokens, 5, BF16) == 10 * gib


def test_decoding_from_the_latent_equals_decoding_from_whole_keys_in_products():
    model = open_config("deepseek-v3").model
    step = decode(model, 4096, 1, BF16)
    heads, layers = 128, 61
    assert step.attention_flops == 2 * layers * heads * 4096 * (512 + 64 + 512)
    assert prefill(model, 4096, 1, BF16).attention_flops == 2 * layers * heads * (192 + 128) * 4096 * 4097 // 2


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "gemma-2-9b", "deepseek-v3", "original-transformer"])
@pytest.mark.parametrize("memory", [10**9, 24 * 10**9, 10**13])
def test_the_largest_is_the_last_that_fits(name, memory):
    model = open_config(name).model
    for batch in (1, 3):
        most = largest_context(model, batch, BF16, memory)
        taken = [weight_bytes(model, BF16) + cache_bytes(model, most + more, batch, BF16) for more in (0, 1)]
        assert (most == 0 or taken[0] <= memory) and taken[1] > memory
    most = largest_batch(model, 1000, BF16, memory)
    taken = [weight_bytes(model, BF16) + cache_bytes(model, 1000, most + more, BF16) for more in (0, 1)]
    assert (most == 0 or taken[0] <= memory) and taken[1] > memory


def test_nothing_is_too_many_where_nothing_grows():
    encoder, windowed = open_config("bert-base").model, open_config("mistral-7b").model
    assert largest_context(encoder, 1, BF16, 10**9) is None and largest_batch(encoder, 512, BF16, 10**9) is None
    assert largest_context(encoder, 1, BF16, 10**8) == 0
    whole = weight_bytes(windowed, BF16) + cache_bytes(windowed, 4096, 1, BF16)
    assert largest_context(windowed, 1, BF16, whole) is None
    assert largest_context(windowed, 1, BF16, whole - 1) == 4095


def test_the_roofline():
    machine = Device("m", flops=100.0, flops_f32=10.0, bandwidth=5.0, memory=1)
    step = Work(product_flops=30, attention_flops=10, weight_bytes=1, cache_bytes=1, activation_bytes=1)
    assert step.intensity == 40 / 3
    fast = bound(step, machine, BF16)
    assert (fast.limit, fast.seconds, fast.ridge) == ("memory", 3 / 5, 20.0)
    slow = bound(step, machine, F32)
    assert (slow.limit, slow.seconds, slow.ridge) == ("compute", 4.0, 2.0)
    assert bound(step, machine, Types("int4")).compute_seconds == fast.compute_seconds == 0.4


def test_one_text_is_bound_by_memory_and_many_by_compute():
    model, h100 = open_config("llama-3-8b").model, DEVICES["h100"]
    limits = [bound(decode(model, 128, batch, BF16), h100, BF16).limit for batch in (1, 8, 2048)]
    assert limits == ["memory", "memory", "compute"]
    assert bound(prefill(model, 8192, 1, BF16), h100, BF16).limit == "compute"
    # A decoded token of one text takes about 2 FLOPs a parameter, and reads each parameter once.
    step = decode(model, 1, 1, BF16)
    assert step.flops == pytest.approx(2 * (8_030_261_248 - 128256 * 4096), rel=1e-3)
    assert step.weight_bytes == 2 * (8_030_261_248 - 128256 * 4096 + 4096)


def test_devices():
    assert device("a100").bandwidth == 2.039e12
    with pytest.raises(ConfigError, match=r"device: expected one of .*h100.*, got 'x'"):
        device("x")


def test_this_machine_is_measured():
    native = pytest.importorskip("multihead.core.native")
    if native.core is None:
        with pytest.raises(ConfigError, match="not built"):
            device("here")
        return
    here = device("here")
    assert here.flops > 1e8 and here.bandwidth > 1e7 and here.memory > 10**8 and math.isfinite(here.flops)


@pytest.mark.parametrize(("weights", "cache", "name"), [("f64", "bf16", "dtype"), ("bf16", "x", "cache_dtype")])
def test_types_that_are_not_known(weights, cache, name):
    with pytest.raises(ConfigError, match=rf"^{name}: expected one of f32, bf16"):
        Types(weights, cache)
