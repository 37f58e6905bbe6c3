"""From a config.json to a model: one short function an architecture, named by its `model_type`.

Each says what Hugging Face's class of that architecture is made of, so that its parameters are counted to the last
one; nothing of transformers is imported. A new one is one more function:

    @architecture("name")
    def _name(c: Fields) -> Model: ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from multihead.accounting.fields import ConfigError, Fields
from multihead.accounting.model import Attention, Block, Model, Weight
from multihead.accounting.pieces import (
    Size,
    Stack,
    decoder,
    encoder_decoder,
    feed_forward,
    head_norms,
    norms,
    projections,
    size,
    table,
)

ARCHITECTURES: dict[str, Callable[[Fields], Model]] = {}

TWO = ("norm 1", "norm 2")
FOUR = ("norm 1", "norm after attention", "norm 2", "norm after feed-forward")


def architecture(*model_types: str) -> Callable[[Callable[[Fields], Model]], Callable[[Fields], Model]]:
    """Register a function under the `model_type`s that it reads."""

    def register(read: Callable[[Fields], Model]) -> Callable[[Fields], Model]:
        ARCHITECTURES.update(dict.fromkeys(model_types, read))
        return read

    return register


def read(config: Mapping[str, Any], name: str) -> Model:
    """Return the model that a configuration describes.

    Args:
        config: the fields of a config.json.
        name: what to call it, also in errors.

    Raises:
        ConfigError: its `model_type` is missing or not known, or a field is missing or makes no sense.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{name}: the field model_type is missing")
    if model_type not in ARCHITECTURES:
        inner = config.get("text_config")
        if isinstance(inner, Mapping) and inner.get("model_type") in ARCHITECTURES:
            raise ConfigError(
                f"{name}: model_type {model_type!r} has more than one model in it; "
                f"its text_config ({inner['model_type']}) in a file of its own can be read"
            )
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"{name}: model_type {model_type!r} is not known; known are {known}")
    return ARCHITECTURES[model_type](Fields(config, name))


@architecture("llama", "mistral", "granite", "smollm3", "phi3", "gemma", "qwen2")
def _llama(c: Fields) -> Model:
    s = size(c)
    kind = c.config["model_type"]
    d_ff = c.number("intermediate_size")
    bias = kind == "qwen2" or c.flag("attention_bias", False)
    return decoder(
        c,
        s,
        f"{_CLASSES[kind]}ForCausalLM",
        attention=projections(s, bias=bias, output_bias=bias and kind != "qwen2"),
        feed_forward=feed_forward(s.d_model, d_ff, gated=True, bias=c.flag("mlp_bias", False)),
        norms=norms(TWO, s.d_model, bias=False),
        final=norms(["final norm"], s.d_model, bias=False),
        tied=kind in ("gemma", "smollm3"),
        windows=_windows(c, s, default=4096 if kind == "mistral" else None),
    )


_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "phi3": "Phi3",
    "gemma": "Gemma",
    "qwen2": "Qwen2",
}


@architecture("qwen3", "gemma3_text")
def _normed_heads(c: Fields) -> Model:
    s = size(c)
    gemma = c.config["model_type"] == "gemma3_text"
    return decoder(
        c,
        s,
        "Gemma3ForCausalLM" if gemma else "Qwen3ForCausalLM",
        attention=[*projections(s, bias=c.flag("attention_bias", False)), *head_norms(s)],
        feed_forward=feed_forward(s.d_model, c.number("intermediate_size"), gated=True),
        norms=norms(FOUR if gemma else TWO, s.d_model, bias=False),
        final=norms(["final norm"], s.d_model, bias=False),
        tied=gemma,
        windows=_windows(c, s, default=4096, every=c.number("sliding_window_pattern", default=6))
        if gemma
        else _windows(c, s),
    )


@architecture("gemma2")
def _gemma2(c: Fields) -> Model:
    s = size(c)
    return decoder(
        c,
        s,
        "Gemma2ForCausalLM",
        attention=projections(s, bias=c.flag("attention_bias", False)),
        feed_forward=feed_forward(s.d_model, c.number("intermediate_size"), gated=True),
        norms=norms(FOUR, s.d_model, bias=False),
        final=norms(["final norm"], s.d_model, bias=False),
        tied=True,
        windows=_windows(c, s, default=4096, every=2),
    )


@architecture("olmo", "olmo2", "olmo3")
def _olmo(c: Fields) -> Model:
    s = size(c)
    first = c.config["model_type"] == "olmo"  # its norms have no parameters
    return decoder(
        c,
        s,
        {"olmo": "Olmo", "olmo2": "Olmo2", "olmo3": "Olmo3"}[c.config["model_type"]] + "ForCausalLM",
        attention=projections(s, bias=c.flag("attention_bias", False)) + ([] if first else head_norms(s, each=True)),
        feed_forward=feed_forward(s.d_model, c.number("intermediate_size"), gated=True),
        norms=[] if first else norms(TWO, s.d_model, bias=False),
        final=[] if first else norms(["final norm"], s.d_model, bias=False),
        tied=False,
        windows=_windows(c, s, default=4096, every=4) if c.config["model_type"] == "olmo3" else (),
    )


@architecture("cohere")
def _cohere(c: Fields) -> Model:
    s = size(c)
    normed = c.flag("use_qk_norm", False)
    return decoder(
        c,
        s,
        "CohereForCausalLM",
        attention=projections(s, bias=c.flag("attention_bias", False)) + (head_norms(s, each=True) if normed else []),
        feed_forward=feed_forward(s.d_model, c.number("intermediate_size"), gated=True),
        norms=norms(["norm"], s.d_model, bias=False),
        final=norms(["final norm"], s.d_model, bias=False),
        tied=True,
    )


@architecture("stablelm")
def _stablelm(c: Fields) -> Model:
    s = size(c)
    normed = c.flag("qk_layernorm", False)
    bias = c.flag("use_qkv_bias", False)
    parallel = c.flag("use_parallel_residual", False)
    return decoder(
        c,
        s,
        "StableLmForCausalLM",
        attention=projections(s, bias=bias, output_bias=False) + (head_norms(s, each=True) if normed else []),
        feed_forward=feed_forward(s.d_model, c.number("intermediate_size"), gated=True),
        norms=norms(["norm"] if parallel else TWO, s.d_model, bias=True),
        final=norms(["final norm"], s.d_model, bias=True),
        tied=False,
    )


@architecture("starcoder2")
def _starcoder2(c: Fields) -> Model:
    s = size(c)
    bias = c.flag("use_bias", True)
    return decoder(
        c,
        s,
        "Starcoder2ForCausalLM",
        attention=projections(s, bias=bias),
        feed_forward=feed_forward(s.d_model, c.number("intermediate_size"), gated=False, bias=bias),
        norms=norms(TWO, s.d_model, bias=True),
        final=norms(["final norm"], s.d_model, bias=True),
        tied=True,
        windows=_windows(c, s),
    )


@architecture("gpt2", "gpt_bigcode", "gpt_neo")
def _gpt2(c: Fields) -> Model:
    kind = c.config["model_type"]
    single = kind == "gpt_bigcode" and c.flag("multi_query", True)
    s = size(c, kv_heads=1 if single else None, grouped=single)
    neo = kind == "gpt_neo"
    return decoder(
        c,
        s,
        {"gpt2": "GPT2LMHeadModel", "gpt_bigcode": "GPTBigCodeForCausalLM", "gpt_neo": "GPTNeoForCausalLM"}[kind],
        attention=projections(s, bias=not neo, output_bias=True),
        feed_forward=feed_forward(
            s.d_model, c.number("n_inner", "intermediate_size", default=4 * s.d_model), gated=False, bias=True
        ),
        norms=norms(TWO, s.d_model, bias=True),
        final=norms(["final norm"], s.d_model, bias=True),
        tied=True,
        windows=_neo_windows(c, s) if neo else (),
        positions=_positions(c, s),
    )


@architecture("gptj")
def _gptj(c: Fields) -> Model:
    s = size(c, grouped=False)
    return decoder(
        c,
        s,
        "GPTJForCausalLM",
        attention=projections(s),
        feed_forward=feed_forward(s.d_model, c.number("n_inner", default=4 * s.d_model), gated=False, bias=True),
        norms=norms(["norm"], s.d_model, bias=True),
        final=norms(["final norm"], s.d_model, bias=True),
        tied=False,
        head_bias=True,
    )


@architecture("gpt_neox")
def _gpt_neox(c: Fields) -> Model:
    s = size(c, grouped=False)
    return decoder(
        c,
        s,
        "GPTNeoXForCausalLM",
        attention=projections(s, bias=c.flag("attention_bias", True)),
        feed_forward=feed_forward(s.d_model, c.number("intermediate_size"), gated=False, bias=True),
        norms=norms(TWO, s.d_model, bias=True),
        final=norms(["final norm"], s.d_model, bias=True),
        tied=False,
    )


@architecture("phi")
def _phi(c: Fields) -> Model:
    s = size(c)
    normed = head_norms(s) + head_norms(s, names=("norm_Q shift", "norm_K shift"))
    return decoder(
        c,
        s,
        "PhiForCausalLM",
        attention=projections(s, bias=True) + (normed if c.flag("qk_layernorm", False) else []),
        feed_forward=feed_forward(s.d_model, c.number("intermediate_size"), gated=False, bias=True),
        norms=norms(["norm"], s.d_model, bias=True),
        final=norms(["final norm"], s.d_model, bias=True),
        tied=False,
        head_bias=True,
    )


@architecture("bloom")
def _bloom(c: Fields) -> Model:
    s = size(c, grouped=False)
    return decoder(
        c,
        s,
        "BloomForCausalLM",
        attention=projections(s, bias=True),
        feed_forward=feed_forward(s.d_model, 4 * s.d_model, gated=False, bias=True),
        norms=norms(TWO, s.d_model, bias=True),
        final=norms(["final norm"], s.d_model, bias=True),
        tied=True,
        embeddings=norms(["norm"], s.d_model, bias=True),
    )


@architecture("mpt")
def _mpt(c: Fields) -> Model:
    s = size(c, grouped=False)
    return decoder(
        c,
        s,
        "MptForCausalLM",
        attention=projections(s),
        feed_forward=feed_forward(s.d_model, 4 * s.d_model, gated=False),
        norms=norms(TWO, s.d_model, bias=False),
        final=norms(["final norm"], s.d_model, bias=False),
        tied=True,
    )


@architecture("falcon")
def _falcon(c: Fields) -> Model:
    new, parallel = c.flag("new_decoder_architecture", False), c.flag("parallel_attn", True)
    heads = c.number("num_attention_heads", "n_head")
    grouped = c.number("num_kv_heads", "n_head_kv", default=heads)
    s = size(c, kv_heads=grouped if new else 1 if c.flag("multi_query", True) else heads)
    bias = c.flag("bias", False)
    two = not parallel or (new and c.number("num_ln_in_parallel_attn", default=2) == 2)
    return decoder(
        c,
        s,
        "FalconForCausalLM",
        attention=projections(s, bias=bias),
        feed_forward=feed_forward(
            s.d_model, c.number("ffn_hidden_size", default=4 * s.d_model), gated=False, bias=bias
        ),
        norms=norms(TWO if two else ["norm"], s.d_model, bias=True),
        final=norms(["final norm"], s.d_model, bias=True),
        tied=True,
    )


@architecture("opt")
def _opt(c: Fields) -> Model:
    s = size(c, grouped=False)
    bias = c.flag("enable_bias", True)
    width = c.number("word_embed_proj_dim", default=s.d_model)
    if width != s.d_model:
        raise ConfigError(f"{c.name}: word_embed_proj_dim {width} other than hidden_size {s.d_model} is not supported")
    if not c.flag("layer_norm_elementwise_affine", True):
        raise ConfigError(f"{c.name}: layer_norm_elementwise_affine false is not supported")
    final = c.flag("do_layer_norm_before", True) and not c.flag("_remove_final_layer_norm", False)
    return decoder(
        c,
        s,
        "OPTForCausalLM",
        attention=projections(s, bias=bias),
        feed_forward=feed_forward(s.d_model, c.number("ffn_dim"), gated=False, bias=bias),
        norms=norms(TWO, s.d_model, bias=True),
        final=norms(["final norm"], s.d_model, bias=True) if final else [],
        tied=True,
        positions=_positions(c, s) + 2,  # two rows that it never uses
    )


@architecture("mixtral")
def _mixtral(c: Fields) -> Model:
    s = size(c)
    experts, used = c.number("num_local_experts", default=8), c.number("num_experts_per_tok", default=2)
    return decoder(
        c,
        s,
        "MixtralForCausalLM",
        attention=projections(s),
        feed_forward=_experts(c, s.d_model, c.number("intermediate_size"), experts, used),
        norms=norms(TWO, s.d_model, bias=False),
        final=norms(["final norm"], s.d_model, bias=False),
        tied=False,
        windows=_windows(c, s),
    )


@architecture("qwen2_moe", "qwen3_moe")
def _qwen_moe(c: Fields) -> Model:
    s = size(c)
    third = c.config["model_type"] == "qwen3_moe"
    experts = c.number("num_experts", "num_local_experts", default=128 if third else 60)
    used = c.number("num_experts_per_tok", default=8 if third else 4)
    sparse_layers = _experts(c, s.d_model, c.number("moe_intermediate_size"), experts, used)
    if not third:
        shared = c.number("shared_expert_intermediate_size")
        sparse_layers += feed_forward(s.d_model, shared, gated=True, prefix="shared ")
        sparse_layers.append(Weight("shared gate", "feed-forward", (1, s.d_model)))
    dense = feed_forward(s.d_model, c.number("intermediate_size"), gated=True)
    step, only = c.number("decoder_sparse_step", default=1), c.listed("mlp_only_layers") or []
    sparse = [i for i in range(s.layers) if i not in only and (i + 1) % step == 0]
    bias = c.flag("attention_bias", False) if third else c.flag("qkv_bias", True)
    return decoder(
        c,
        s,
        "Qwen3MoeForCausalLM" if third else "Qwen2MoeForCausalLM",
        attention=projections(s, bias=bias, output_bias=third and bias) + (head_norms(s) if third else []),
        feed_forward=_stacks(s, dense, sparse_layers, sparse),
        norms=norms(TWO, s.d_model, bias=False),
        final=norms(["final norm"], s.d_model, bias=False),
        tied=False,
        windows=_windows(c, s),
    )


@architecture("gpt_oss")
def _gpt_oss(c: Fields) -> Model:
    s = size(c)
    experts, used = c.number("num_local_experts"), c.number("num_experts_per_tok", "experts_per_token")
    return decoder(
        c,
        s,
        "GptOssForCausalLM",
        attention=[
            *projections(s, bias=c.flag("attention_bias", True)),
            Weight("sinks", "attention", (s.heads,)),
        ],
        feed_forward=[
            *_experts(c, s.d_model, c.number("intermediate_size"), experts, used, bias=True),
            Weight("b_router", "feed-forward", (experts,)),
        ],
        norms=norms(TWO, s.d_model, bias=False),
        final=norms(["final norm"], s.d_model, bias=False),
        tied=False,
        windows=_windows(c, s, default=128, every=2),
    )


@architecture("deepseek_v2", "deepseek_v3")
def _deepseek(c: Fields) -> Model:
    s = size(c)
    third = c.config["model_type"] == "deepseek_v3"
    rank, rope = c.number("kv_lora_rank"), c.number("qk_rope_head_dim")
    nope, d_value = c.number("qk_nope_head_dim"), c.number("v_head_dim")
    q_rank, bias = c.optional("q_lora_rank"), c.flag("attention_bias", False)
    width = s.heads * (nope + rope)
    attention = [
        *(
            [
                Weight("W_DQ", "attention", (q_rank, s.d_model)),
                Weight("norm_DQ", "norms", (q_rank,)),
                Weight("W_UQ", "attention", (width, q_rank)),
            ]
            if q_rank
            else [Weight("W_Q", "attention", (width, s.d_model))]
        ),
        Weight("W_DKV", "attention", (rank, s.d_model)),
        Weight("W_KR", "attention", (rope, s.d_model)),
        Weight("norm_DKV", "norms", (rank,)),
        Weight("W_UK", "attention", (s.heads * nope, rank)),
        Weight("W_UV", "attention", (s.heads * d_value, rank)),
        Weight("W_O", "attention", (s.d_model, s.heads * d_value)),
    ]
    if bias:
        attention += [Weight("b_DQ", "attention", (q_rank,))] if q_rank else []
        attention += [Weight("b_DKV", "attention", (rank + rope,)), Weight("b_O", "attention", (s.d_model,))]
    d_expert = c.number("moe_intermediate_size")
    experts = _experts(c, s.d_model, d_expert, c.number("n_routed_experts"), c.number("num_experts_per_tok"))
    shared = c.number("n_shared_experts") * d_expert
    experts += feed_forward(s.d_model, shared, gated=True, prefix="shared ")
    dense = feed_forward(s.d_model, c.number("intermediate_size"), gated=True)
    first = c.number("first_k_dense_replace", default=3 if third else 0, least=0)
    return decoder(
        c,
        s,
        "DeepseekV3ForCausalLM" if third else "DeepseekV2ForCausalLM",
        attention=attention,
        feed_forward=_stacks(s, dense, experts, range(first, s.layers)),
        norms=norms(TWO, s.d_model, bias=False),
        final=norms(["final norm"], s.d_model, bias=False),
        tied=False,
        heads=Attention(s.heads, s.heads, nope + rope, d_value, (), latent=(rank, rope)),
    )


@architecture("bert", "roberta", "xlm-roberta", "distilbert")
def _bert(c: Fields) -> Model:
    s = size(c, grouped=False)
    kind = c.config["model_type"]
    distilled = kind == "distilbert"
    d = s.d_model
    tables = [table("tokens", s.vocabulary, d), table("positions", _positions(c, s), d)]
    if not distilled:
        tables.append(table("token types", c.number("type_vocab_size", default=2), d))
    pooler = [
        Weight("W_pooler", "embeddings", (d, d), tokens="last"),
        Weight("b_pooler", "embeddings", (d,), tokens="last"),
    ]
    layer = Block(
        "layer",
        (
            *projections(s, bias=True),
            *feed_forward(d, c.number("intermediate_size", "hidden_dim"), gated=False, bias=True),
            *norms(TWO, d, bias=True),
        ),
        layers=s.layers,
        attentions=(Attention(s.heads, s.kv_heads, s.d_head, s.d_head, (None,) * s.layers, causal=False),),
        source=True,
    )
    before = Block("before", (*tables, *norms(["norm"], d, bias=True)), source=True)
    after = [] if distilled else [Block("after", tuple(pooler), source=True)]
    return Model(
        name=c.name,
        model_type=kind,
        counted_as={
            "bert": "BertModel",
            "roberta": "RobertaModel",
            "xlm-roberta": "XLMRobertaModel",
            "distilbert": "DistilBertModel",
        }[kind],
        d_model=d,
        # RoBERTa's first positions are never used: they start after the padding token's, which is 1.
        context=_positions(c, s) - 2 * ("roberta" in kind),
        blocks=(before, layer, *after),
        learned_positions=True,
    )


@architecture("palm")
def _palm(c: Fields) -> Model:
    s = size(c)
    return decoder(
        c,
        s,
        "the description in Chowdhery et al. 2022, section 2",
        attention=projections(s),
        feed_forward=feed_forward(s.d_model, 4 * s.d_model, gated=True),
        norms=norms(["norm"], s.d_model, bias=False),
        final=norms(["final norm"], s.d_model, bias=False),
        tied=True,
    )


@architecture("original-transformer")
def _original(c: Fields) -> Model:
    s = size(c, grouped=False)
    ff = feed_forward(s.d_model, c.number("d_ff"), gated=False, bias=True)
    return encoder_decoder(
        c,
        s,
        "the description in Vaswani et al. 2017, section 3: projections without biases, one table for both languages "
        "and the output, positions without parameters",
        feed_forward=ff,
        norms=lambda names: norms(names, s.d_model, bias=True),
        final=[],
        tied=True,
    )


@architecture("t5", "mt5")
def _t5(c: Fields) -> Model:
    # transformers from 5 on ties T5's output matrix whatever the configuration says; the checkpoints of T5 1.1 and
    # of mT5, whose configurations say that it is not tied, have one of its own.
    multilingual = c.config["model_type"] == "mt5"
    s = replace(size(c, grouped=False), d_head=c.number("d_kv"))
    kind = c.config.get("feed_forward_proj") or ("gated-gelu" if multilingual else "relu")
    # Each stack has one table of biases by distance, which all of its layers use.
    distances = table("distances", c.number("relative_attention_num_buckets", default=32), s.heads)
    return encoder_decoder(
        c,
        s,
        f"{'MT5' if multilingual else 'T5'}ForConditionalGeneration",
        feed_forward=feed_forward(s.d_model, c.number("d_ff"), gated=str(kind).startswith("gated-")),
        norms=lambda names: norms(names, s.d_model, bias=False),
        final=[distances, *norms(["final norm"], s.d_model, bias=False)],
        tied=True,
        decoder_layers=c.number("num_decoder_layers", default=s.layers),
    )


def _positions(c: Fields, s: Size) -> int:
    """Return the rows of a learned table of positions, as many as the class makes where the field is missing."""
    defaults = {"gpt2": 1024, "gpt_bigcode": 1024, "gpt_neo": 2048, "opt": 2048}
    return s.context or defaults.get(c.config["model_type"], 512)


def _experts(c: Fields, d_model: int, d_ff: int, experts: int, used: int, *, bias: bool = False) -> list[Weight]:
    """Return gated experts and the router that chooses among them."""
    if used > experts:
        raise ConfigError(f"{c.name}: a token uses {used} experts, and there are {experts}")
    matrices = feed_forward(d_model, d_ff, gated=True, bias=bias, copies=experts, active=used)
    return [Weight("W_router", "feed-forward", (experts, d_model)), *matrices]


def _stacks(s: Size, dense: list[Weight], experts: list[Weight], sparse: range | list[int]) -> list[Stack]:
    kept = [i for i in range(s.layers) if i not in sparse]
    return [Stack("dense", kept, dense), Stack("experts", list(sparse), experts)]


def _windows(c: Fields, s: Size, *, default: int | None = None, every: int = 0) -> tuple[int | None, ...]:
    """Return the window of each layer; with `every`, each such layer sees all keys and only the others have one."""
    if not c.flag("use_sliding_window", c.config["model_type"] not in _OFF):
        return (None,) * s.layers
    window = c.optional("sliding_window") if "sliding_window" in c.config else default
    if window is None:
        return (None,) * s.layers
    types, kind = c.listed("layer_types"), c.config["model_type"]
    if types is None and kind in ("qwen2", "qwen3"):
        first = c.number("max_window_layers", default=28, least=0)
        return tuple(window if i >= first else None for i in range(s.layers))
    if types is None and kind in ("qwen2_moe", "smollm3"):
        raise ConfigError(f"{c.name}: the field layer_types is missing, which says where sliding_window {window} holds")
    if types is None:
        return tuple(None if every and (i + 1) % every == 0 else window for i in range(s.layers))
    if len(types) != s.layers:
        raise ConfigError(f"{c.name}: layer_types: expected one for each of the {s.layers} layers, got {len(types)}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


_OFF = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
"""Architectures whose window counts only where `use_sliding_window` is true."""


def _neo_windows(c: Fields, s: Size) -> tuple[int | None, ...]:
    window = c.number("window_size", default=256)
    kinds = c.listed("attention_layers")
    if kinds is None:
        groups = c.listed("attention_types") or [[["global", "local"], math.ceil(s.layers / 2)]]
        kinds = [kind for pattern, times in groups for _ in range(times) for kind in pattern]
    if len(kinds) < s.layers:
        raise ConfigError(f"{c.name}: attention_types: expected one for each of the {s.layers} layers")
    return tuple(window if kind == "local" else None for kind in kinds[: s.layers])
