"""Parameters to the last one: against the modules of transformers and PyTorch on the meta device, and papers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from multihead.accounting.architectures import ARCHITECTURES, read
from multihead.accounting.fields import ConfigError
from multihead.accounting.model import PARTS
from multihead.accounting.presets import PRESETS, open_config

OWN = ("palm", "original-transformer")  # not in transformers
SMALL = {"vocab_size": 211, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3}
SMALL |= {"hidden_size": 48, "intermediate_size": 53, "max_position_embeddings": 37}
GPT2 = {"vocab_size": 211, "n_layer": 5, "n_head": 6, "n_embd": 48, "n_positions": 37}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 7}
QWEN_EXPERTS = SMALL | {"moe_intermediate_size": 11, "num_experts_per_tok": 2}
LATENT = SMALL | {"num_key_value_heads": 6, "kv_lora_rank": 13, "q_lora_rank": 17, "qk_rope_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 10, "v_head_dim": 14, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 2}
LATENT |= {"topk_group": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 11, "first_k_dense_replace": 2}
T5 = {"vocab_size": 211, "num_layers": 5, "num_heads": 6, "d_model": 48, "d_ff": 53, "d_kv": 10}

# One or more configurations of each architecture, with what it can switch on or off.
CASES = [
    ("llama", SMALL),
    ("llama", SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", SMALL | {"head_dim": 16}),
    ("mistral", SMALL),
    ("granite", SMALL | {"attention_bias": True}),
    ("smollm3", SMALL | {"pad_token_id": 1}),
    ("phi3", SMALL | {"pad_token_id": 1}),
    ("gemma", SMALL | {"head_dim": 10}),
    ("qwen2", SMALL),
    ("qwen3", SMALL | {"head_dim": 10, "attention_bias": True}),
    ("gemma2", SMALL | {"head_dim": 10}),
    ("gemma3_text", SMALL | {"head_dim": 10}),
    ("olmo", SMALL),
    ("olmo2", SMALL),
    ("olmo3", SMALL),
    ("cohere", SMALL),
    ("cohere", SMALL | {"use_qk_norm": True, "attention_bias": True}),
    ("stablelm", SMALL),
    ("stablelm", SMALL | {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    ("starcoder2", SMALL),
    ("starcoder2", SMALL | {"use_bias": False, "tie_word_embeddings": False}),
    ("gpt2", GPT2),
    ("gpt2", GPT2 | {"n_inner": 53}),
    ("gpt_bigcode", GPT2),
    ("gpt_bigcode", GPT2 | {"multi_query": False}),
    (
        "gpt_neo",
        SMALL
        | {"num_layers": 4, "num_heads": 6, "num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]]},
    ),
    ("gptj", GPT2 | {"rotary_dim": 4}),
    ("gpt_neox", SMALL),
    ("gpt_neox", SMALL | {"attention_bias": False, "tie_word_embeddings": True}),
    ("phi", SMALL),
    ("phi", SMALL | {"qk_layernorm": True}),
    ("bloom", {"vocab_size": 211, "n_layer": 5, "n_head": 6, "hidden_size": 48}),
    ("mpt", {"vocab_size": 211, "n_layers": 5, "n_heads": 6, "d_model": 48}),
    ("falcon", SMALL),
    ("falcon", SMALL | {"multi_query": False, "bias": True, "parallel_attn": False}),
    ("falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("opt", SMALL | {"ffn_dim": 53, "word_embed_proj_dim": 48}),
    ("opt", SMALL | {"ffn_dim": 53, "word_embed_proj_dim": 48, "enable_bias": False, "do_layer_norm_before": False}),
    ("mixtral", SMALL | EXPERTS),
    ("qwen2_moe", QWEN_EXPERTS | {"shared_expert_intermediate_size": 19, "num_experts": 7}),
    ("qwen2_moe", QWEN_EXPERTS | {"shared_expert_intermediate_size": 19, "num_experts": 7, "decoder_sparse_step": 2}),
    ("qwen3_moe", QWEN_EXPERTS | {"num_experts": 7, "head_dim": 10, "mlp_only_layers": [1, 3]}),
    ("gpt_oss", SMALL | EXPERTS | {"head_dim": 10}),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", LATENT | {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", LATENT | {"attention_bias": True}),
    ("t5", T5),
    ("t5", T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2}),
    ("mt5", T5),
    ("bert", SMALL),
    ("roberta", SMALL),
    ("xlm-roberta", SMALL | {"type_vocab_size": 1}),
    ("distilbert", {"vocab_size": 211, "n_layers": 5, "n_heads": 6, "dim": 48, "hidden_dim": 53}),
]


def module(config, name):
    """A module of transformers without memory, of the class that a model says it is counted as."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return getattr(transformers, name)(config)


def configuration(model_type, fields):
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    return auto.CONFIG_MAPPING[model_type](**fields)


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("model_type", "fields"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_every_architecture_has_the_parameters_of_its_module(model_type, fields):
    config = configuration(model_type, fields)
    ours = read(config.to_dict(), "tiny")
    assert ours.parameters() == parameters(module(config, ours.counted_as))
    # The fields that a user wrote are enough: what is missing has the same default here as there.
    assert read({"model_type": model_type} | fields, "tiny").parameters() == ours.parameters()
    assert sum(ours.parameters(part) for part in PARTS) == ours.parameters()


def test_every_architecture_is_among_the_cases():
    assert {model_type for model_type, _ in CASES} | set(OWN) == set(ARCHITECTURES)


FAST = ("gpt2", "gpt2-xl", "llama-3-8b", "mixtral-8x7b", "falcon-40b", "bert-base", "deepseek-v3")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
        for name, preset in PRESETS.items()
        if preset.config["model_type"] not in OWN
    ],
)
def test_every_known_model_has_the_parameters_of_its_module(name):
    fields = dict(PRESETS[name].config)
    ours = open_config(name).model
    theirs = module(configuration(fields.pop("model_type"), fields), ours.counted_as)
    assert ours.parameters() == parameters(theirs)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_known_counts(name, count):
    assert open_config(name).model.parameters() == count


def test_the_parts_of_llama_3_8b():
    model = open_config("llama-3-8b").model
    assert model.parameters("attention") == 32 * 41_943_040 == 1_342_177_280
    assert model.parameters("feed-forward") == 5_637_144_576
    assert model.parameters("embeddings") == 1_050_673_152
    full = model.with_kv_heads(32)
    assert full.parameters("attention") == 32 * 4 * 4096**2 == 2_147_483_648
    assert full.with_kv_heads(8) == model


@pytest.mark.parametrize(("name", "kv_heads"), [("llama", 6), ("llama", 1), ("olmo2", 2), ("qwen2", 6), ("cohere", 1)])
def test_other_numbers_of_key_value_heads_are_those_of_the_module(name, kv_heads):
    fields = SMALL | ({"use_qk_norm": True} if name == "cohere" else {})
    ours = read(configuration(name, fields).to_dict(), "tiny").with_kv_heads(kv_heads)
    theirs = module(configuration(name, fields | {"num_key_value_heads": kv_heads}), ours.counted_as)
    assert ours.parameters() == parameters(theirs)


@pytest.mark.parametrize(
    ("name", "d_model", "heads"), [("original-transformer", 512, 8), ("original-transformer-big", 1024, 16)]
)
def test_the_original_transformer_is_pytorchs_without_the_biases_of_attention_and_the_last_norms(name, d_model, heads):
    stack = torch.nn.Transformer(d_model, heads, 6, 6, 4 * d_model, device="meta")
    left_out = ("in_proj_bias", "out_proj.bias", "encoder.norm.weight", "encoder.norm.bias")
    left_out += ("decoder.norm.weight", "decoder.norm.bias")
    layers = sum(value.numel() for key, value in stack.named_parameters() if not key.endswith(left_out))
    assert open_config(name).model.parameters() == layers + 37_000 * d_model


@pytest.mark.parametrize(
    ("layers", "heads", "d_model", "said"), [(32, 16, 4096, 8.63), (64, 32, 8192, 62.50), (118, 48, 18432, 540.35)]
)
def test_palm_is_as_large_as_its_paper_says(layers, heads, d_model, said):
    """Chowdhery et al. 2022, Table 1; the norms, which it leaves out, are less than its last digit."""
    fields = PRESETS["palm-540b"].config | {"num_hidden_layers": layers, "hidden_size": d_model}
    model = read(fields | {"num_attention_heads": heads}, "palm")
    assert round((model.parameters() - model.parameters("norms")) / 1e9, 2) == said


def test_gpt_3_is_gpt_2s_formula_at_its_published_size():
    """12 d_model^2 + 13 d_model a layer, (vocabulary + positions) d_model, 2 d_model; Brown et al. 2020, 2.1."""
    layers, d = 96, 12288
    expected = layers * (12 * d * d + 13 * d) + (50257 + 2048) * d + 2 * d
    assert open_config("gpt-3").model.parameters() == expected == 174_604_259_328


def test_gemma_2_without_its_embeddings_is_what_its_paper_says():
    """Gemma Team 2024, Table 2; its embeddings are larger there by 128 rows, which the checkpoint does not have."""
    model = open_config("gemma-2-9b").model
    assert model.parameters() - model.parameters("embeddings") == 8_324_201_984


def test_t5_1_1_has_an_output_matrix_of_its_own():
    """247,577,856 is what the hub counts in the checkpoint of flan-t5-base."""
    fields = PRESETS["t5-base"].config | {"d_ff": 2048, "feed_forward_proj": "gated-gelu"}
    assert read(fields | {"tie_word_embeddings": False}, "flan-t5-base").parameters() == 247_577_856


def test_claims_are_judged_by_their_own_digits():
    verdicts = {
        name: [claim.holds(opened.model.parameters(active=claim.of == "active")) for claim in opened.claims]
        for name in PRESETS
        if (opened := open_config(name))
    }
    wrong = {name for name, held in verdicts.items() if not all(held)}
    assert all(verdicts.values())  # every model has a claim
    assert wrong == {
        *("original-transformer", "original-transformer-big", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-3"),
        *(
            "bert-base",
            "bert-large",
            "t5-base",
            "llama-2-70b",
            "llama-3-70b",
            "llama-3.1-70b",
            "llama-3.1-405b",
            "qwen2-7b",
        ),
        *("falcon-40b", "palm-540b"),
    }


def test_active_parameters_of_models_with_experts():
    """Jiang et al. 2024 (13B), DeepSeek-AI 2024 (37B), OpenAI 2025 (5.13B and 3.61B)."""
    active = {name: open_config(name).model.parameters(active=True) for name in PRESETS}
    assert active["mixtral-8x7b"] == 12_879_925_248 - 32_000 * 4096
    assert [round(active[name] / 1e9, 2) for name in ("gpt-oss-120b", "gpt-oss-20b")] == [5.13, 3.61]
    # Of a model without experts all but the tables: gpt2's embedding is also its output matrix.
    assert active["gpt2"] == 124_439_808 - 1024 * 768


def test_a_saved_configuration_is_read_without_transformers_and_without_torch(tmp_path):
    config = configuration("qwen2", SMALL)
    config.save_pretrained(tmp_path / "model")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['rich'] = None;"
        "import multihead as mh; print(mh.plan(sys.argv[1]).own.parameters)"
    )
    for path in (tmp_path / "model", tmp_path / "model" / "config.json"):
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
        assert int(done.stdout) == parameters(module(config, "Qwen2ForCausalLM"))
    assert open_config(config).model.parameters() == open_config(module(config, "Qwen2Model")).model.parameters()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, ("mamba", "not known", "llama")),
        ({"model_type": None}, ("model_type", "missing")),
        ({"model_type": "x", "text_config": {"model_type": "llama"}}, ("more than one model", "llama")),
        ({"hidden_size": None}, ("hidden_size", "missing")),
        ({"hidden_size": "48"}, ("hidden_size", "whole number", "'48'")),
        ({"vocab_size": True}, ("vocab_size", "True")),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ("48", "divisible", "5 heads")),
        ({"num_key_value_heads": 4}, ("4 key/value heads", "6 query heads")),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings", "true or false")),
        ({"num_hidden_layers": 10**9}, ("layers", "1,000,000,000")),
        (
            {"sliding_window": 4, "layer_types": ["full_attention"], "model_type": "mistral"},
            ("layer_types", "5 layers"),
        ),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused_by_its_field(change, words):
    with pytest.raises(ConfigError) as raised:
        read({"model_type": "llama"} | SMALL | change, "some/name")
    message = str(raised.value)
    assert message.startswith("some/name: ") and "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no config.json"), ("{", "no JSON"), ("[1]", "expected the fields"), ("[" * 100_000, "no JSON")],
)
def test_files_that_are_no_configuration(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        open_config(tmp_path)


def test_a_name_that_is_not_known_has_a_hint():
    with pytest.raises(ConfigError, match="did you mean llama-3-8b"):
        open_config("llama3-8b")
    with pytest.raises(ConfigError, match=r"known are original-transformer, .*deepseek-v3"):
        open_config("zzz")
    with pytest.raises(ConfigError, match="got int"):
        open_config(3)


def test_windows_of_layers():
    def windows(name, **fields):
        return [w for a in read({"model_type": name} | SMALL | fields, "tiny").attentions() for w in a.windows]

    assert windows("mistral", sliding_window=4) == [4] * 5
    assert windows("mistral", sliding_window=None) == [None] * 5
    assert windows("gemma2", sliding_window=4) == [4, None, 4, None, 4]
    assert windows("gemma3_text", sliding_window=4, sliding_window_pattern=3) == [4, 4, None, 4, 4]
    assert windows("qwen2", sliding_window=4) == [None] * 5
    assert windows("qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=3) == [None] * 3 + [4] * 2
    mixed = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
    assert windows("olmo3", sliding_window=4, layer_types=mixed) == [4, None, None, 4, None]


def test_texts_are_as_long_as_the_configuration_says():
    contexts = {name: open_config(name).model.context for name in ("gpt2", "llama-3.1-8b", "bert-base", "palm-540b")}
    assert contexts == {"gpt2": 1024, "llama-3.1-8b": 131072, "bert-base": 512, "palm-540b": 2048}
    assert read({"model_type": "roberta"} | SMALL, "tiny").context == 35
    assert read({"model_type": "opt"} | SMALL | {"ffn_dim": 53}, "tiny").context == 37
    assert read({"model_type": "bloom", "vocab_size": 7, "n_layer": 1, "n_head": 1, "hidden_size": 8}, "").context == 0


def test_windows_are_those_of_transformers():
    for name in ("gemma2", "gemma3_text", "olmo3", "gpt_oss", "qwen2", "qwen3"):
        extra = {"use_sliding_window": True, "max_window_layers": 2} if name.startswith("qwen") else {}
        extra |= {"sliding_window_pattern": 3} if name == "gemma3_text" else {}
        config = configuration(name, SMALL | EXPERTS | {"sliding_window": 8} | extra)
        fields = json.loads(config.to_json_string(use_diff=False))
        expected = [
            config.sliding_window if kind == "sliding_attention" else None for kind in fields.pop("layer_types")
        ]
        found = next(iter(read(fields, "tiny").attentions())).windows
        assert list(found) == expected and len(set(expected)) == 2, name
