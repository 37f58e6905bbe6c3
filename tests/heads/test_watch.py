"""What a watch block does and leaves behind, on tiny models with random weights."""

# ruff: noqa: C408, E402
import pickle
import subprocess
import sys
import threading

import pytest
import torch

transformers = pytest.importorskip("transformers")

import multihead as mh
from multihead.heads.layers import find_layers
from multihead.heads.masks import MaskTensor

B, L, VOCAB = 2, 11, 53
TINY = dict(
    hidden_size=30, intermediate_size=23, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    head_dim=10, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def lively(model):
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=1.3 / weight.shape[-1] ** 0.5)
    return model.eval()


def llama(implementation="sdpa", **more):
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**{**TINY, **more})
    return lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation))


def bart():
    torch.manual_seed(5)
    config = transformers.BartConfig(
        d_model=21, encoder_layers=2, decoder_layers=1, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=29, decoder_ffn_dim=31, vocab_size=VOCAB, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return lively(transformers.BartModel(config))


@pytest.fixture
def model():
    return llama()


@pytest.fixture
def tokens():
    return torch.randint(3, VOCAB, (B, L))


@pytest.fixture
def padded(tokens):
    mask = torch.ones(B, L, dtype=torch.int64)
    mask[1, :4] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def test_a_record_reads_as_the_page_says(model, tokens):
    with mh.watch(model) as record:
        model(tokens)
    assert record.layers == ["0", "1", "2"]
    assert set(record.statistics) == set(mh.Statistics().asked)
    assert [value.shape for value in record.statistics["entropy"]] == [(B, 6, L)] * 3
    stacked = record.stacked("max_weight")
    assert stacked.shape == (3, B, 6, L) and not stacked.requires_grad and stacked.device.type == "cpu"
    assert len(record.steps) == 1 and record.heads == [[0, 1, 2, 3, 4, 5]] * 3
    assert "3 layers" in repr(record) and "entropy" in repr(record)


def test_the_model_is_as_before_also_after_an_exception(model, tokens):
    before = model.config._attn_implementation
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    with pytest.raises(ZeroDivisionError), mh.watch(model):
        assert model.config._attn_implementation == "multihead"
        model(tokens)
        raise ZeroDivisionError
    assert model.config._attn_implementation == before == "sdpa"
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    with mh.watch(model) as record:
        with pytest.raises(IndexError):
            model(tokens + 1000)
        assert record.steps == []
        model(tokens)
    assert len(record.steps) == 1


def test_seeing_changes_nothing(padded):
    model = llama("multihead")
    with torch.no_grad():
        plain = model(**padded).logits
        with mh.watch(model, mh.Statistics(offsets=(-1,))):
            assert torch.equal(model(**padded).logits, plain)


def test_each_forward_is_a_step_and_the_record_reads_as_the_last(model, tokens):
    with mh.watch(model, mh.Statistics("entropy")) as record:
        model(tokens)
        model(tokens[:, :5])
    assert [step.stacked("entropy").shape[-1] for step in record.steps] == [L, 5]
    assert record.stacked("entropy").shape[-1] == 5


def test_nested_blocks_record_each_for_itself(model, tokens):
    other = llama(num_hidden_layers=1)
    with mh.watch(model, mh.Statistics("entropy")) as outer:
        with mh.watch(other) as beside, mh.watch(model, mh.Statistics("argmax"), layers=[1]) as inner:
            model(tokens)
            other(tokens[:, :7])
        assert model.config._attn_implementation == "multihead" and other.config._attn_implementation == "sdpa"
        model(tokens[:1])
    assert model.config._attn_implementation == "sdpa"
    assert [step.layers for step in outer.steps] == [["0", "1", "2"]] * 2
    assert set(outer.statistics) == {"lse", "entropy"} and len(outer.statistics["lse"][0]) == 1
    assert inner.layers == ["1"] and set(inner.statistics) == {"lse", "argmax"} and len(inner.steps) == 1
    assert beside.layers == ["0"] and beside.stacked("lse").shape == (1, B, 6, 7)


def test_threads_do_not_mix():
    models = [llama(), llama(), llama()]
    models.append(models[0])  # two threads watch one model
    texts = [torch.randint(3, VOCAB, (1, 5 + 2 * n)) for n in range(4)]
    alone = []
    for model, text in zip(models, texts, strict=True):
        with mh.watch(model) as record, torch.no_grad():
            model(text)
        alone.append(record.stacked("entropy"))
    gate, records = threading.Barrier(4), {}

    def work(n):
        gate.wait()
        for _ in range(5):
            with mh.watch(models[n]) as record, torch.no_grad():
                models[n](texts[n])
                models[n](texts[n])
            records.setdefault(n, []).append(record)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, expected in enumerate(alone):
        assert len(records[n]) == 5
        for record in records[n]:
            assert len(record.steps) == 2
            assert all(torch.equal(step.stacked("entropy"), expected) for step in record.steps)
    assert all(model.config._attn_implementation == "sdpa" for model in models)


def test_a_block_whose_model_did_not_run_says_so(model, tokens):
    with mh.watch(model) as record:
        thread = threading.Thread(target=model, args=(tokens,))
        thread.start()
        thread.join()
    with pytest.raises(RuntimeError, match="did not run in the watch block on the thread"):
        record.stacked("entropy")
    assert repr(record) == "Record(nothing recorded yet)"


def test_layers_and_heads_choose_what_is_stored(model, tokens):
    with mh.watch(model) as everything:
        model(tokens)
    with mh.watch(model, layers=[2, "0"], heads=[4, 1]) as record:
        model(tokens)
    assert record.layers == ["0", "2"] and record.heads == [[1, 4], [1, 4]]
    full = everything.stacked("entropy")
    assert torch.equal(record.stacked("entropy"), full[[0, 2]][:, :, [1, 4]])
    with mh.watch(model, heads=["1.5", "2.0", "2.3"]) as record:
        model(tokens)
    assert record.layers == ["1", "2"] and record.heads == [[5], [0, 3]]
    assert torch.equal(record.statistics["entropy"][1], full[2][:, [0, 3]])
    with pytest.raises(ValueError, match="shapes differ"):
        record.stacked("entropy")


def test_a_record_can_be_stored_and_read_again(model, tokens):
    with torch.no_grad(), mh.watch(model) as record:
        model(tokens)
    again = pickle.loads(pickle.dumps(record.steps))[-1]
    assert list(again.statistics) == list(record.statistics)
    for name in record.statistics:
        torch.testing.assert_close(again.stacked(name), record.stacked(name), rtol=0, atol=0, equal_nan=True)


def test_kept_queries_and_keys_give_exact_weights(padded):
    model = llama("eager")
    eager = model(**padded, output_attentions=True).attentions
    with mh.watch(model, mh.Statistics("lse"), keep=("query", "key")) as record, torch.no_grad():
        model(**padded)
    assert [x.shape for x in record.kept["query"]] == [(B, 6, L, 10)] * 3
    assert [x.shape for x in record.kept["key"]] == [(B, 2, L, 10)] * 3
    assert record.kept_bytes == 3 * B * (6 + 2) * L * 10 * 4
    assert f"kept: {record.kept_bytes / 1e6:.1f} MB" in repr(record)
    real = padded["attention_mask"].bool()
    for n, expected in enumerate(eager):
        weights = record.weights(n)
        assert weights.shape == (B, 6, L, L)
        torch.testing.assert_close(weights.movedim(1, 2)[real], expected.movedim(1, 2)[real], atol=2e-5, rtol=0)
        assert (weights.movedim(1, 2)[~real] == 0).all()
    part = record.weights("1", head=4, rows=slice(3, 8), keys=torch.tensor([7, 2]))
    assert part.shape == (B, 5, 2)
    torch.testing.assert_close(part, record.weights(1)[:, 4, 3:8][..., [7, 2]], atol=1e-6, rtol=0)


def test_a_bias_that_layers_share_counts_once_in_what_is_kept(tokens):
    config = transformers.T5Config(d_model=21, d_kv=7, d_ff=29, num_layers=3, num_heads=3, vocab_size=VOCAB)
    model = transformers.T5EncoderModel(config).eval()
    if not find_layers(model):
        pytest.skip("T5 bypasses the attention interface in this release of transformers")
    with mh.watch(model, keep=("query", "key")) as record:
        model(tokens)
    assert record.kept_bytes == 4 * (3 * 2 * B * 3 * L * 7 + 3 * L * L)
    torch.testing.assert_close(record.weights(2).sum(-1), torch.ones(B, 3, L))


def test_weights_ask_for_what_they_need(model, tokens):
    with mh.watch(model) as record:
        model(tokens)
    with pytest.raises(RuntimeError, match=r'keep=\("query", "key"\)'):
        record.weights(0)
    with pytest.raises(KeyError, match="layer '7' was not seen; there are: 0, 1, 2"):
        record.weights(7)
    with pytest.raises(KeyError, match="'received' was not observed"):
        record.stacked("received")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layers=[3]), "layers: no layer '3'; this model has 0, 1, 2"),
        (dict(heads=["5.0"]), "heads: no layer '5'"),
        (dict(heads=["zero"]), "expected numbers or names such as"),
        (dict(keep=("values",)), "keep: expected names among"),
    ],
)
def test_names_that_do_not_exist(model, options, message):
    with pytest.raises(ValueError, match=message), mh.watch(model, **options):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_a_head_that_a_layer_does_not_have(model, tokens):
    with mh.watch(model, heads=[6]), pytest.raises(ValueError, match="layer '0' has H = 6 heads, 0 to 5"):
        model(tokens)


def test_what_is_no_hugging_face_model():
    with pytest.raises(TypeError, match="expected a Hugging Face model"), mh.watch(torch.nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("name", ["GPTNeo", "Falcon", "Bloom"])
def test_a_model_that_bypasses_the_interface_raises(name):
    shape = dict(hidden_size=20, num_layers=2, num_heads=2, attention_types=[[["global"], 2]])
    if name != "GPTNeo":
        shape = dict(hidden_size=20, num_hidden_layers=2, num_attention_heads=2, n_layer=2, n_head=2)
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCAB, **shape)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    with mh.watch(model) as record, pytest.raises(RuntimeError, match="Hugging Face's attention interface"):
        model(torch.randint(3, VOCAB, (1, 7)))
    assert record.steps == [] and model.config._attn_implementation == "eager"


def test_another_implementation_inside_the_block_raises(model, tokens):
    with mh.watch(model), pytest.raises(RuntimeError, match="was set to 'eager' inside the watch block"):
        model.set_attn_implementation("eager")
        model(tokens)
    assert model.config._attn_implementation == "sdpa"


def test_output_attentions_of_the_config_raises(tokens):
    model = llama("eager")
    model.config.output_attentions = True
    with mh.watch(model), pytest.raises(ValueError, match=r"record\.weights"):
        model(tokens)
    assert len(model(tokens).attentions) == 3


def test_layers_of_an_encoder_decoder_are_named_by_stack(tokens):
    model = bart()
    with mh.watch(model, mh.Statistics("argmax")) as record:
        model(input_ids=tokens, decoder_input_ids=tokens[:, :5])
    assert record.layers == ["encoder.0", "encoder.1", "decoder.0", "cross.0"]
    assert [value.shape[-1] for value in record.statistics["argmax"]] == [L, L, 5, 5]
    with mh.watch(model, layers=["cross.0"], heads=["cross.0.2"]) as record:
        model(input_ids=tokens, decoder_input_ids=tokens[:, :5])
    assert record.layers == ["cross.0"] and record.heads == [[2]]


def test_padding_rows_of_a_decoder_count_nowhere_in_its_cross_attention(tokens):
    model, real = bart(), torch.ones(B, L, dtype=torch.int64)
    real[1, 8:] = 0  # the encoder's text has as many tokens, none of them padding
    with mh.watch(model) as record:
        model(
            input_ids=tokens,
            attention_mask=real.flip(0),
            decoder_input_ids=tokens,
            decoder_attention_mask=real,
        )
    at = dict(zip(record.layers, record.statistics["entropy"], strict=True))
    gone = {name: value.isnan().any(1) for name, value in at.items()}
    assert torch.equal(gone["cross.0"], real == 0) and torch.equal(gone["decoder.0"], real == 0)
    assert torch.equal(gone["encoder.0"], real.flip(0) == 0)


def test_layers_of_other_shapes_of_model():
    vision = dict(hidden_size=18, num_attention_heads=3, num_hidden_layers=2, intermediate_size=13, image_size=14)
    text = dict(hidden_size=18, num_attention_heads=3, num_hidden_layers=2, intermediate_size=13, vocab_size=VOCAB)
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config={**vision, "patch_size": 7}))
    names = [layer.name for layer in find_layers(clip).values()]
    assert names == ["text_model.0", "text_model.1", "vision_model.0", "vision_model.1"]
    gpt2 = transformers.GPT2Config(n_embd=18, n_head=3, n_layer=2, vocab_size=VOCAB, add_cross_attention=True)
    names = [layer.name for layer in find_layers(transformers.GPT2Model(gpt2)).values()]
    assert names == ["0", "cross.0", "1", "cross.1"]


def test_a_layer_that_runs_several_times_is_recorded_each_time(tokens):
    config = transformers.AlbertConfig(
        hidden_size=18, num_attention_heads=3, num_hidden_layers=3, intermediate_size=13, vocab_size=VOCAB
    )
    model = transformers.AlbertModel(config).eval()
    with mh.watch(model) as record:
        model(tokens)
    assert record.layers == ["0", "0@1", "0@2"]


def test_classes_offsets_and_pairs_must_fit_the_layers(model, tokens):
    short = mh.Statistics(classes=torch.zeros(L - 1, dtype=torch.int64))
    says = rf"layer '0': classes: expected shape \(S={L},\).*choose the layers="
    with mh.watch(model, short), pytest.raises(ValueError, match=says):
        model(tokens)
    model, before, says = bart(), mh.Statistics(offsets=(-1,)), r"'cross\.0' is cross-attention: classes, offsets"
    with mh.watch(model, before), pytest.raises(ValueError, match=says):
        model(input_ids=tokens, decoder_input_ids=tokens)
    with mh.watch(model, before, layers=["decoder.0", "encoder.1"]) as record:
        model(input_ids=tokens, decoder_input_ids=tokens)
    assert record.stacked("offset_mass").shape == (2, B, 3, L, 1)


def additive(keep):
    return torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kind", ["float", "minus infinity", "sum of two", "a bias beside", "bool"])
def test_a_callers_own_mask(kind, tokens):
    model = llama("eager")
    keep = (torch.rand(B, 1, L, L) < 0.6) | torch.eye(L, dtype=torch.bool)
    mask = {
        "float": additive(keep),
        "minus infinity": torch.zeros(B, 1, L, L).masked_fill(~keep, -torch.inf),
        "sum of two": additive(keep) + additive(keep.roll(1, 2) | torch.eye(L, dtype=torch.bool)),
        "a bias beside": additive(keep) + torch.randn(B, 6, L, L).where(keep, torch.tensor(-3.0)),
        "bool": keep,
    }[kind]
    expected = model(tokens, attention_mask=additive(keep) if kind == "bool" else mask, output_hidden_states=True)
    with mh.watch(model) as record:
        found = model(tokens, attention_mask=mask, output_hidden_states=True)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert record.stacked("entropy").isfinite().all()


def test_packed_sequences_stay_apart(tokens):
    model = llama("eager")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [*range(L)]])
    expected = model(tokens, position_ids=positions, output_attentions=True, use_cache=False)
    with mh.watch(model, mh.Statistics("key_mean")) as record:
        found = model(tokens, position_ids=positions, use_cache=False)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    mean = (torch.stack(expected.attentions) * torch.arange(L)).sum(-1)
    torch.testing.assert_close(record.stacked("key_mean"), mean, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(num_beams=2, cache_implementation="static")])
def test_beams(padded, options):
    model = llama("eager")
    options = dict(**options, max_new_tokens=5, do_sample=False, pad_token_id=0)
    expected = model.generate(**padded, **options)
    with mh.watch(model, mh.Statistics("lse")) as record:
        assert torch.equal(model.generate(**padded, **options), expected)
    assert len(record.steps) >= 2 and len(record.stacked("lse")[0]) in (2, 4, 6)


def test_the_keys_of_a_static_cache_are_copied_when_kept(tokens):
    model = llama("eager")
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, cache_implementation="static")
    with mh.watch(model, keep=("query", "key")) as record:
        model.generate(tokens, **options)
    assert (record.steps[0].kept["key"][0][:, :, L:] == 0).all()  # what later steps wrote there is not seen
    first, last = record.steps[0].weights(0), record.steps[-1].weights(0)
    assert first.shape[2] == L and last.shape[2] == 1
    torch.testing.assert_close(first.sum(-1), torch.ones(B, 6, L))
    assert (first[..., L:] == 0).all() and (last[..., : L + 3] > 0).all() and (last[..., L + 3 :] == 0).all()


def test_masks_of_a_forward_stay_bounds(padded, monkeypatch):
    model, made = llama("multihead"), []
    monkeypatch.setattr(MaskTensor, "cells", lambda self: made.append(self))
    model(**padded)
    model.generate(**padded, max_new_tokens=3, do_sample=False, cache_implementation="static")
    assert made == []


def test_training_gives_eagers_gradients(padded):
    model = llama("eager")
    labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    labels[1, 4] = -100  # the first real token, which only padding predicts

    def gradients(implementation, **options):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**padded, labels=labels, **options).loss.backward()
        return [weight.grad.clone() for weight in model.parameters()]

    expected = gradients("eager")
    for ours, theirs in zip(gradients("multihead"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    for ours, theirs in zip(gradients("multihead", use_cache=False), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_dropout_is_applied_in_training_and_repeats_under_checkpointing(tokens):
    model = llama("multihead", attention_dropout=0.4)
    calm = model(tokens).logits
    assert torch.equal(model(tokens).logits, calm)
    model.train()

    def gradients():
        torch.manual_seed(3)
        model.zero_grad()
        out = model(tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        return out.logits, [weight.grad.clone() for weight in model.parameters()]

    logits, once = gradients()
    assert (logits - calm).abs().max() > 1e-2
    model.gradient_checkpointing_enable()
    again, checkpointed = gradients()
    assert torch.equal(again, logits)
    for a, b in zip(once, checkpointed, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


USE = """
import torch
config = transformers.LlamaConfig(hidden_size=12, intermediate_size=7, num_hidden_layers=1, num_attention_heads=2,
                                  vocab_size=11)
transformers.LlamaModel(config).save_pretrained({folder!r})
model = transformers.AutoModel.from_pretrained({folder!r}, attn_implementation="multihead")
model(torch.arange(5)[None])
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import multihead, transformers",
        "import transformers, multihead",
        "import transformers.models.llama.modeling_llama, multihead",
    ],
)
def test_the_name_is_known_in_either_order_of_imports(imports, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", imports + USE.format(folder=str(tmp_path))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr


def test_importing_multihead_does_not_import_transformers():
    check = "import sys, multihead; assert not [m for m in sys.modules if m.startswith('transformers')]"
    assert subprocess.run([sys.executable, "-c", check], timeout=300).returncode == 0
