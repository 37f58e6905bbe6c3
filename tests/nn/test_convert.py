"""Weights in and out, against each model's own attention: what it was given and gave, seen while the model runs."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import multihead as mh

B, L, S, H, G, D = 2, 7, 5, 6, 2, 10
WIDTH = H * D
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Case:
    """A published model in small: its configuration, and which of its attentions is meant."""

    model: str
    config: dict
    attention: str  # a path in the model, layer 1
    output: str  # the matrix in it whose output is the attention's
    layer: int | str = 1

    def build(self):
        import transformers

        config = getattr(transformers, f"{self.model}Config")(**self.config, vocab_size=50)
        # Falcon's eager path adds ALiBi twice, in the mask and by itself; its other path does not.
        config._attn_implementation = "sdpa" if self.config.get("alibi") else "eager"
        model = getattr(transformers, f"{self.model}Model")(config).eval()
        with torch.no_grad():  # biases start at 0 and norms at 1, and would hide
            for parameter in model.parameters():
                parameter.normal_(std=0.4)
        return model

    def run(self, model):
        """The attention, and what it got and gave in one forward: x, the context or None, its output."""
        attention = model.get_submodule(self.attention)
        seen = {}

        def before(module, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            named = [kwargs[k] for k in ("encoder_hidden_states", "key_value_states") if k in kwargs]
            context = args[2] if len(args) > 2 else named[0] if named else None
            seen.update(x=x, context=context)

        hooks = [
            attention.register_forward_pre_hook(before, with_kwargs=True),
            attention.get_submodule(self.output).register_forward_hook(lambda m, a, out: seen.update(output=out)),
        ]
        with torch.no_grad():
            model(**self.inputs(model.config))
        for hook in hooks:
            hook.remove()
        return attention, seen["x"], seen["context"], seen["output"]

    def inputs(self, config):
        ids = torch.randint(3, 50, (B, L))
        if self.model == "Whisper":
            return {"input_features": torch.randn(B, config.num_mel_bins, 2 * S), "decoder_input_ids": ids}
        if getattr(config, "add_cross_attention", False):
            return {"input_ids": ids, "encoder_hidden_states": torch.randn(B, S, WIDTH)}
        return {"input_ids": ids}


SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": H, "intermediate_size": 20}
GROUPED = {**SIZES, "num_key_value_heads": G}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
NEOX_ROPE = {"rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 0.4}}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": H, "n_positions": 32}
FALCON = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": H, "ffn_hidden_size": 20}
WHISPER = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": H,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_source_positions": S,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
DECODER = {"is_decoder": True, "add_cross_attention": True}
SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
LLAMA_AT = ("layers.1.self_attn", "o_proj")
NEOX_AT, FALCON_AT = ("layers.1.attention", "dense"), ("h.1.self_attention", "dense")

CASES = {
    "gpt2": Case("GPT2", GPT2, "h.1.attn", "c_proj"),
    "gpt2, scores by layer": Case("GPT2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, "h.1.attn", "c_proj"),
    "gpt2, scores as they are": Case("GPT2", {**GPT2, "scale_attn_weights": False}, "h.1.attn", "c_proj"),
    "gpt2, cross": Case("GPT2", {**GPT2, "add_cross_attention": True}, "h.1.crossattention", "c_proj", "cross.1"),
    "bert": Case("Bert", SIZES, "encoder.layer.1.attention", "output.dense"),
    "bert, decoder": Case("Bert", {**SIZES, **DECODER}, "encoder.layer.1.attention", "output.dense"),
    "bert, cross": Case("Bert", {**SIZES, **DECODER}, "encoder.layer.1.crossattention", "output.dense", "cross.1"),
    "llama": Case("Llama", {**GROUPED, **ROPE}, *LLAMA_AT),
    "llama 3.1, biases": Case("Llama", {**GROUPED, "rope_parameters": LLAMA3, "attention_bias": True}, *LLAMA_AT),
    "llama, linear": Case(
        "Llama", {**GROUPED, "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}}, *LLAMA_AT
    ),
    "mistral": Case("Mistral", {**GROUPED, **ROPE, "head_dim": 14, "sliding_window": None}, *LLAMA_AT),
    "mistral, window": Case("Mistral", {**GROUPED, **ROPE, "sliding_window": 3}, *LLAMA_AT),
    "qwen2": Case("Qwen2", {**GROUPED, **ROPE}, *LLAMA_AT),
    "qwen2, window": Case("Qwen2", {**GROUPED, **ROPE, **SLIDING}, *LLAMA_AT),
    "qwen3": Case("Qwen3", {**GROUPED, **ROPE, "head_dim": 14, "rms_norm_eps": 1e-3}, *LLAMA_AT),
    "qwen3, biases": Case("Qwen3", {**GROUPED, **ROPE, "head_dim": 14, "attention_bias": True}, *LLAMA_AT),
    "gpt-neox": Case("GPTNeoX", {**SIZES, **NEOX_ROPE}, *NEOX_AT),
    "gpt-neox, no biases": Case("GPTNeoX", {**SIZES, **ROPE, "attention_bias": False}, *NEOX_AT),
    "falcon 7b": Case("Falcon", {**FALCON, **ROPE, "multi_query": True}, *FALCON_AT),
    "falcon 40b": Case(
        "Falcon", {**FALCON, **ROPE, "new_decoder_architecture": True, "num_kv_heads": G, "bias": True}, *FALCON_AT
    ),
    # With 4 heads ALiBi's slopes are exact in the bfloat16 that Falcon rounds them to.
    "falcon rw": Case(
        "Falcon",
        {**FALCON, "hidden_size": 56, "num_attention_heads": 4, "multi_query": False, "alibi": True, "bias": True},
        *FALCON_AT,
    ),
    "whisper, encoder": Case("Whisper", WHISPER, "encoder.layers.1.self_attn", "out_proj", "encoder.1"),
    "whisper, decoder": Case("Whisper", WHISPER, "decoder.layers.1.self_attn", "out_proj", "decoder.1"),
    "whisper, cross": Case("Whisper", WHISPER, "decoder.layers.1.encoder_attn", "out_proj", "cross.1"),
}


@pytest.fixture(params=CASES)
def case(request):
    pytest.importorskip("transformers", reason="transformers is not installed")
    return CASES[request.param]


def assert_same(layer, x, context, output):
    with torch.no_grad():
        torch.testing.assert_close(layer(x, context), output, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("layout", ["packed", "separate"])
def test_a_layer_from_a_module_gives_what_the_model_gives(case, layout):
    attention, x, context, output = case.run(case.build())
    layer = mh.nn.from_module(attention, layout=layout)
    assert_same(layer, x, context, output)
    assert layer.layout == layout and not layer.training
    with torch.no_grad():  # copies
        layer.W_O.weight.zero_()
    assert attention.get_submodule(case.output).weight.abs().max() > 0


def test_a_module_written_from_a_layer_gives_what_the_layer_gives(case):
    layer = mh.nn.from_module(case.build().get_submodule(case.attention), layout="separate")
    other = case.build()
    attention, *_ = case.run(other)
    names = {name for name, _ in attention.named_parameters()}
    mh.nn.to_module(layer, attention)
    torch.manual_seed(1)
    _, x, context, output = case.run(other)
    assert_same(layer, x, context, output)
    assert names == {name for name, _ in attention.named_parameters()}
    back = mh.nn.from_module(attention).state_dict()
    for name, tensor in mh.nn.from_module(attention, layout="packed").state_dict().items():
        assert torch.equal(back[name], tensor)


def test_a_layer_from_a_file_gives_what_the_model_gives(case, tmp_path):
    model = case.build()
    model.save_pretrained(tmp_path)
    _, x, context, output = case.run(model)
    assert_same(mh.nn.from_safetensors(tmp_path, case.layer), x, context, output)
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    for given in (model.config, config, tmp_path / "config.json"):
        assert_same(mh.nn.from_safetensors(file, case.layer, given), x, context, output)


def test_tensors_for_a_file_are_those_of_the_model(case):
    model = case.build()
    layer = mh.nn.from_module(model.get_submodule(case.attention))
    made = mh.nn.tensors_for(layer, case.layer, model.config)
    theirs = model.state_dict()
    for name, tensor in made.items():
        assert torch.equal(tensor, theirs[name]), name
    attention = {name for name in theirs if name.startswith(f"{case.attention}.")}
    assert {name for name in attention if "LayerNorm" not in name and not name.endswith(".attn.bias")} == set(made)


def test_shards_and_a_model_within_another(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(**GROUPED, **ROPE, vocab_size=50)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    layer = mh.nn.from_safetensors(tmp_path, 1)
    expected = mh.nn.from_module(model.model.layers[1].self_attn)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(layer.state_dict()[name], tensor)


def test_a_whole_layer_of_the_file_changes_hands(tmp_path):
    """Group a head's keys and values, write them under the model's names, and the smaller model runs."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(**{**GROUPED, "num_key_value_heads": H}, **ROPE, vocab_size=50)
    layer = mh.nn.from_module(transformers.LlamaModel(config).layers[0].self_attn).group(G)
    small = transformers.LlamaConfig(**GROUPED, **ROPE, vocab_size=50)
    save_file(mh.nn.tensors_for(layer, 0, small), tmp_path / "layer.safetensors")
    again = mh.nn.from_safetensors(tmp_path / "layer.safetensors", 0, small)
    x = torch.randn(B, L, WIDTH)
    assert torch.equal(again(x), layer(x))
    with pytest.raises(ValueError, match="layer: expected, as Llama, Mistral, Qwen2 has it, n_kv_heads=6, got 2"):
        mh.nn.tensors_for(layer, 0, config)


@pytest.mark.slow
def test_layers_of_real_models(smollm2, minilm):
    for opened, path, output in (
        (smollm2, "model.layers.18.self_attn", "o_proj"),
        (minilm, "encoder.layer.3.attention", "output.dense"),
    ):
        case = Case("", {}, path, output)
        inputs = opened.tokenizer("The cat sat on the mat because it was tired.", return_tensors="pt")
        object.__setattr__(case, "inputs", lambda config, inputs=inputs: inputs)
        attention, x, context, expected = case.run(opened.model)
        assert_same(mh.nn.from_module(attention), x, context, expected)


TORCH = {
    "packed": {},
    "no biases": {"bias": False},
    "a context of another width": {"kdim": 11, "vdim": 11},
}


@pytest.mark.parametrize("options", TORCH.values(), ids=TORCH)
@pytest.mark.parametrize("layout", ["packed", "separate"])
def test_pytorchs_module_both_ways(options, layout):
    theirs, other = (nn.MultiheadAttention(WIDTH, H, batch_first=True, dtype=torch.float64, **options) for _ in "ab")
    with torch.no_grad():
        for module in (theirs, other):
            for parameter in module.parameters():
                parameter.normal_(std=0.3)
    x = torch.randn(B, L, WIDTH, dtype=torch.float64)
    context = torch.randn(B, S, options.get("kdim", WIDTH), dtype=torch.float64)
    layer = mh.nn.from_module(theirs, layout=layout)
    torch.testing.assert_close(layer(x, context), theirs(x, context, context)[0], rtol=1e-11, atol=1e-12)
    mh.nn.to_module(mh.nn.from_module(other, layout=layout), theirs)
    for name, tensor in other.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor)
    if not options:
        causal = torch.ones(L, L, dtype=torch.bool).triu(1)
        layer = mh.nn.from_module(theirs).with_options(causal=True)
        torch.testing.assert_close(layer(x), theirs(x, x, x, attn_mask=causal)[0], rtol=1e-11, atol=1e-12)
        mh.nn.to_module(layer, mh.nn.TorchMultiheadAttention(WIDTH, H, dtype=torch.float64))


def test_mode_type_and_dropout_are_the_modules():
    theirs = nn.MultiheadAttention(WIDTH, H, dropout=0.25, dtype=torch.bfloat16).eval()
    layer = mh.nn.from_module(theirs, execution="sequential")
    assert not layer.training and layer.dropout == 0.25 and layer.W_O.weight.dtype is torch.bfloat16
    assert layer.execution == "sequential" and mh.nn.from_module(theirs.train()).training


def test_a_bias_that_the_layer_has_not_becomes_zero():
    layer, theirs = mh.MultiHeadAttention(WIDTH, H), nn.MultiheadAttention(WIDTH, H, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    mh.nn.to_module(layer, theirs)
    x = torch.randn(B, L, WIDTH)
    torch.testing.assert_close(theirs(x, x, x)[0], layer(x))
    assert (theirs.in_proj_bias == 0).all() and (theirs.out_proj.bias == 0).all()


def refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_what_is_not_known_raises_and_says_what_is():
    refused(lambda: mh.nn.from_module(nn.Linear(3, 3)), TypeError, r"one of torch.nn.MultiheadAttention, GPT2Attention")
    refused(lambda: mh.nn.to_module(mh.MultiHeadAttention(8, 2), nn.Linear(3, 3)), TypeError, "got Linear")

    class LlamaAttention(nn.Module):
        """Of the same name, but not the one that is known."""

    refused(lambda: mh.nn.from_module(LlamaAttention()), TypeError, "got LlamaAttention")
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        theirs = nn.MultiheadAttention(WIDTH, H, **options)
        refused(
            lambda theirs=theirs: mh.nn.from_module(theirs), ValueError, "add_bias_kv=False and add_zero_attn=False"
        )
    theirs = nn.MultiheadAttention(WIDTH, H, kdim=7)
    refused(lambda: mh.nn.from_module(theirs), ValueError, "expected kdim = vdim, .* got kdim=7, vdim=60")


def test_what_differs_raises_and_is_named():
    def into(module=None, **options):
        module = nn.MultiheadAttention(WIDTH, H, bias=False) if module is None else module
        layer = mh.MultiHeadAttention(WIDTH, **{"n_heads": H, **options})
        return lambda: mh.nn.to_module(layer, module)

    into()()
    refused(into(n_heads=3), ValueError, "layer: expected, as torch.nn.MultiheadAttention has it, n_heads=6, got 3")
    refused(into(n_kv_heads=2), ValueError, "n_kv_heads=6, got 2")
    refused(into(d_value=3), ValueError, "d_value=10, got 3")
    refused(into(rotary=mh.nn.Rotary()), ValueError, r"rotary=None, got Rotary\(")
    refused(into(scale=0.5), ValueError, "scale=0.316228, got 0.5")
    refused(into(softcap=5.0), ValueError, "softcap=None, got 5.0")
    refused(into(sinks=True), ValueError, "sinks=False, got True")
    refused(into(alibi=True), ValueError, "alibi=None, got")
    refused(into(gate=True), ValueError, "gate=False, got elementwise")
    refused(into(qk_norm="rms"), ValueError, "qk_norm=None, got rms")
    refused(
        into(bias=True), ValueError, r"layer: expected no W_K.bias, W_O.bias, W_Q.bias, W_V.bias, .* no place in torch"
    )
    refused(into(nn.MultiheadAttention(WIDTH, H, dtype=torch.float16)), ValueError, "module: expected torch.float32")
    into(scale=D**-0.5)()

    layer = mh.MultiHeadAttention(WIDTH, H)
    with layer.ablate([1]):
        refused(
            lambda: mh.nn.to_module(layer, nn.MultiheadAttention(WIDTH, H)), ValueError, "expected none of its heads"
        )


def test_a_refused_layer_leaves_the_module_as_it_was():
    theirs = nn.MultiheadAttention(WIDTH, H)
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    refused(
        lambda: mh.nn.to_module(mh.MultiHeadAttention(WIDTH, H, causal=True, sinks=True), theirs), ValueError, "sinks"
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in theirs.state_dict().items())


def test_rules_of_published_models_are_compared():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    case = CASES["llama 3.1, biases"]
    attention = case.build().get_submodule(case.attention)
    layer = mh.nn.from_module(attention)
    mh.nn.to_module(layer.with_options(rotary=mh.nn.Rotary(100.0, dims=D, scaling=layer.rotary.scaling)), attention)
    for changes, message in (
        ({"rotary": mh.nn.Rotary(100.0)}, "rotary=.*scaling=Llama3Scaling.*got Rotary.*scaling=None"),
        ({"causal": False}, "causal=True, got False"),
        ({"window": (2, 0)}, r"window=None, got \(2, 0\)"),
    ):
        other = layer.with_options(**changes)
        refused(lambda other=other: mh.nn.to_module(other, attention), ValueError, message)
    case = CASES["qwen3"]
    attention = case.build().get_submodule(case.attention)
    layer = mh.nn.from_module(attention)
    assert layer.q_norm.eps == 1e-3
    layer.q_norm.eps = 1e-6
    refused(lambda: mh.nn.to_module(layer, attention), ValueError, "norm_eps=0.001, got 1e-06")
    config = transformers.LlamaConfig(
        **GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}
    )
    attention = transformers.models.llama.modeling_llama.LlamaAttention(config, 0)
    refused(
        lambda: mh.nn.from_module(attention), ValueError, "rope_type 'default', 'linear' or 'llama3', got 'dynamic'"
    )


def test_errors_of_files(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from safetensors.torch import load_file, save_file

    case = CASES["llama"]
    case.build().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"

    def read(layer=1, config=None, path=file):
        return lambda: mh.nn.from_safetensors(path, layer, config)

    refused(read(path=tmp_path / "no"), FileNotFoundError, "path: expected a file or a folder")
    refused(read(2), ValueError, r"layer: expected tensors layers.2.self_attn.\* once in the file, got none")
    refused(read("cross.1"), ValueError, "layer: expected a number for Llama, Mistral, Qwen2, got 'cross.1'")
    refused(read("1"), ValueError, "layer: expected a number")
    refused(read(-1), ValueError, "layer: expected a number .* got -1")
    refused(
        read(config={"model_type": "t5"}), ValueError, "config: expected a model_type of gpt2, bert, llama.* got 't5'"
    )
    refused(read(config={}), ValueError, "got None")
    refused(read(config=object()), ValueError, "config: expected a model_type of gpt2")

    tensors = load_file(file)
    save_file({**tensors, "layers.1.self_attn.gate.weight": torch.zeros(3)}, file)
    refused(read(), ValueError, "weights: expected no more than q_proj.weight, .* got gate.weight too")
    save_file({name: x for name, x in tensors.items() if name != "layers.1.self_attn.v_proj.weight"}, file)
    refused(read(), ValueError, "weights: expected a tensor v_proj.weight, got ")
    save_file({**tensors, **{f"draft.{name}": x.clone() for name, x in tensors.items()}}, file)
    refused(read(), ValueError, "once in the file, got them under '', 'draft.'")
    save_file(tensors, tmp_path / "second.safetensors")
    refused(read(path=tmp_path), ValueError, "path: expected one .safetensors file in .* got 2")
    (tmp_path / "config.json").unlink()
    refused(read(), FileNotFoundError, "config: expected it, or a config.json beside the tensors")

    whisper = CASES["whisper, cross"].build()
    whisper.save_pretrained(tmp_path / "w")
    refused(
        read(0, path=tmp_path / "w"), ValueError, "layer: expected 'encoder.0' or 'decoder.0' or 'cross.0' for Whisper"
    )


OLD_FORMS = {
    "llama 3.1, biases": {"rope_theta": 100.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    "llama, linear": {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "gpt-neox": {"rotary_emb_base": 100.0, "rotary_pct": 0.4},
    "falcon 7b": {"rope_theta": 100.0},
}


@pytest.mark.parametrize("name", OLD_FORMS)
def test_a_config_json_of_before_transformers_5(name, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    case = CASES[name]
    model = case.build()
    model.save_pretrained(tmp_path)
    _, x, context, output = case.run(model)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | OLD_FORMS[name]))
    assert_same(mh.nn.from_safetensors(tmp_path, case.layer), x, context, output)
