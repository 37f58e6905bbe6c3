"""Every architecture named as supported, tiny and with random weights, against its own eager attention."""

# ruff: noqa: C408, E402
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import multihead as mh
from multihead.heads.layers import uses_interface

B, L, VOCAB = 3, 13, 67
REAL = {
    "left": [[4, 13], [0, 13], [9, 13]],
    "right": [[0, 13], [0, 6], [0, 10]],
}  # begin and end of the real tokens
SPECIAL = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
LATE = dict(hidden_size=42, intermediate_size=29, num_hidden_layers=2)
GROUPED = LATE | dict(num_attention_heads=6, num_key_value_heads=2, head_dim=10)
DIVIDED = LATE | dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=60)  # head_dim is hidden_size / H
EARLY = LATE | dict(num_attention_heads=3, hidden_size=21)
WINDOW = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=5)
MODERN = EARLY | dict(hidden_size=30, global_attn_every_n_layers=2, local_attention=6)
# PyTorch's grouped product of experts wants rows of whole 16 bytes.
EXPERTS = dict(hidden_size=48, intermediate_size=28, num_experts_per_tok=2)
ENCODER_DECODER = dict(
    encoder_layers=2, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3,
    encoder_ffn_dim=29, decoder_ffn_dim=31,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One architecture: its config, and what kind of model it is."""

    name: str
    kind: str  # "decoder", "encoder", "both" (encoder-decoder), "speech", "image"
    config: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        config = getattr(transformers, f"{self.name}Config")(**SPECIAL | self.config)
        auto = {
            "decoder": "AutoModelForCausalLM",
            "both": "AutoModelForSeq2SeqLM",
            "speech": "AutoModelForSpeechSeq2Seq",
        }
        torch.manual_seed(7)
        make = getattr(transformers, auto.get(self.kind, "AutoModel"))
        model = make.from_config(config, attn_implementation="eager").eval()
        if getattr(model, "generation_config", None):
            model.generation_config.eos_token_id = None  # so that no sequence ends early
        return _lively(model)


ROWS = [
    Row("Llama", "decoder", GROUPED),
    Row("Mistral", "decoder", GROUPED | dict(sliding_window=5)),
    Row("Qwen2", "decoder", DIVIDED),
    Row("Qwen3", "decoder", GROUPED | WINDOW | dict(use_sliding_window=True)),
    Row("Gemma2", "decoder", GROUPED | WINDOW | dict(attn_logit_softcapping=3.0)),
    Row("Gemma3Text", "decoder", GROUPED | WINDOW),
    Row("GptOss", "decoder", GROUPED | WINDOW | EXPERTS | dict(num_local_experts=3)),
    Row("GPT2", "decoder", dict(n_embd=21, n_head=3, n_layer=2, scale_attn_by_inverse_layer_idx=True)),
    Row("GPTNeoX", "decoder", EARLY | dict(hidden_size=48, rotary_pct=0.25)),
    Row("Phi", "decoder", DIVIDED | dict(hidden_size=72, num_key_value_heads=3)),
    Row("Olmo2", "decoder", DIVIDED),
    Row("Granite", "decoder", DIVIDED | dict(attention_multiplier=0.7)),
    Row("Cohere", "decoder", DIVIDED | dict(use_qk_norm=True)),
    Row(
        "DeepseekV3",
        "decoder",
        LATE | EXPERTS | dict(
            num_attention_heads=3, num_key_value_heads=3, moe_intermediate_size=12, n_routed_experts=4,
            n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=17, kv_lora_rank=19,
            qk_nope_head_dim=9, qk_rope_head_dim=4, v_head_dim=7,
        ),
    ),
    Row("OPT", "decoder", EARLY | dict(ffn_dim=29, word_embed_proj_dim=21)),
    Row("Bert", "encoder", EARLY),
    Row("Roberta", "encoder", EARLY),
    Row("DistilBert", "encoder", dict(dim=21, hidden_dim=29, n_layers=2, n_heads=3)),
    Row("ModernBert", "encoder", MODERN),
    Row("ViT", "image", EARLY | dict(image_size=21, patch_size=7)),
    Row("Bart", "both", ENCODER_DECODER | dict(d_model=21)),
    Row("Whisper", "speech", ENCODER_DECODER | dict(d_model=30, num_mel_bins=5, max_source_positions=11)),
    Row("T5", "both", dict(d_model=21, d_kv=7, d_ff=29, num_layers=2, num_heads=3)),
]  # fmt: skip


def _lively(model: Any) -> Any:
    """Weights large enough that heads attend unevenly; biases and sinks that are not zero."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=1.3 / weight.shape[-1] ** 0.5)
        elif name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(weight, std=0.2)
    return model


def real_tokens(side: str) -> Tensor:
    j = torch.arange(L)
    begin, end = torch.tensor(REAL[side]).T[:, :, None]
    return (j >= begin) & (j < end)


def inputs_of(row: Row, side: str) -> dict[str, Tensor]:
    torch.manual_seed(11)
    tokens, real = torch.randint(3, VOCAB, (B, L)), real_tokens(side)
    other = real.flip(0)
    if row.kind == "image":
        return {"pixel_values": torch.randn(B, 3, 21, 21)}
    if row.kind == "speech":
        features = torch.randn(B, 5, 22)
        return {
            "input_features": features,
            "decoder_input_ids": tokens,
            "decoder_attention_mask": real.long(),
        }
    if row.kind == "both":
        more = {"decoder_input_ids": tokens.flip(1), "decoder_attention_mask": other.long()}
        return {"input_ids": tokens, "attention_mask": real.long(), **more}
    return {"input_ids": tokens, "attention_mask": real.long()}


def rows_that_count(row: Row, side: str) -> dict[str, Tensor | None]:
    """Which rows are real tokens, by stack; None where all are."""
    if row.kind == "image":
        return {"": None}
    if row.kind == "speech":
        return {"encoder": None, "decoder": real_tokens(side), "cross": real_tokens(side)}
    if row.kind == "both":
        other = real_tokens(side).flip(0)
        return {"encoder": real_tokens(side), "decoder": other, "cross": other}
    return {"": real_tokens(side)}


def by_name(outputs: Any, names: dict[str, str]) -> dict[str, Tensor]:
    """Per-layer outputs such as attentions, named as `watch` names layers."""
    found = {}
    for stack, key in names.items():
        for n, value in enumerate(getattr(outputs, key, None) or ()):
            found[f"{stack}.{n}" if stack else str(n)] = value
    return found


HIDDEN = {"": "hidden_states", "encoder": "encoder_hidden_states", "decoder": "decoder_hidden_states"}
WEIGHTS = {
    "": "attentions",
    "encoder": "encoder_attentions",
    "decoder": "decoder_attentions",
    "cross": "cross_attentions",
}


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.name)
def case(request):
    row = request.param
    if row.name == "T5" and not uses_interface(transformers.models.t5.modeling_t5.T5Attention):
        pytest.skip("T5 bypasses the attention interface in this release of transformers")
    return row, row.build()


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def run(model: Any, implementation: str, inputs: dict[str, Tensor], **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    try:
        return (
            model(**inputs, use_cache=False, **options) if "pixel_values" not in inputs else model(**inputs, **options)
        )
    finally:
        model.set_attn_implementation("eager")


@pytest.mark.parametrize("side", REAL)
def test_hidden_states_are_those_of_eager(case, side):
    row, model = case
    inputs, real = inputs_of(row, side), rows_that_count(row, side)
    eager = by_name(run(model, "eager", inputs, output_hidden_states=True), HIDDEN)
    ours = by_name(run(model, "multihead", inputs, output_hidden_states=True), HIDDEN)
    assert ours.keys() == eager.keys() and len(ours) >= 3
    for name, expected in eager.items():
        rows = real[name.rpartition(".")[0]]
        rows = torch.ones(expected.shape[:2], dtype=torch.bool) if rows is None else rows
        torch.testing.assert_close(
            ours[name][rows], expected[rows], atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("side", REAL)
def test_statistics_are_those_of_eager_weights(case, side):
    row, model = case
    inputs, real = inputs_of(row, side), rows_that_count(row, side)
    eager = by_name(run(model, "eager", inputs, output_attentions=True), WEIGHTS)
    assert len(eager) == (6 if "encoder" in real else 2)
    with mh.watch(model, mh.Statistics()) as record:
        model(**inputs)
    assert sorted(record.layers) == sorted(eager)
    for n, layer in enumerate(record.layers):
        observed = {name: values[n] for name, values in record.statistics.items()}
        compare(observed, eager[layer], real[layer.rpartition(".")[0]], layer)


@pytest.mark.parametrize("side", REAL)
def test_masses_are_those_of_eager_weights(case, side):
    row, model = case
    inputs, real = inputs_of(row, side), rows_that_count(row, side)
    eager = by_name(run(model, "eager", inputs, output_attentions=True), WEIGHTS)
    stack = "decoder" if "decoder" in real else ""
    layers = [name for name in eager if name.rpartition(".")[0] == stack]
    S = eager[layers[0]].shape[-1]
    classes = torch.arange(S) % 3 - 1
    pairs = torch.stack([torch.arange(S) // 2, torch.arange(S)], 1)
    asked = mh.Statistics("lse", classes=classes, offsets=(0, -1, -3, 2), pairs=[pairs])
    with mh.watch(model, asked, layers=layers) as record:
        model(**inputs)
    assert record.layers == layers
    for n, layer in enumerate(layers):
        weights = eager[layer]
        weights = weights / weights.sum(-1, keepdim=True)
        expected = {
            "class_mass": torch.stack([weights[..., classes == c].sum(-1) for c in range(2)], -1),
            "offset_mass": torch.stack([_shifted(weights, k) for k in (0, -1, -3, 2)], -1),
            "pair_mass": (weights.gather(-1, pairs.expand(*weights.shape[:3], 2)).sum(-1) - _twice(weights))[..., None],
        }
        rows = real[stack]
        rows = torch.ones(weights.shape[0], S, dtype=torch.bool) if rows is None else rows
        for name, value in expected.items():
            got = record.statistics[name][n]
            torch.testing.assert_close(got.movedim(1, 2)[rows], value.movedim(1, 2)[rows], atol=2e-5, rtol=0)
            assert got.movedim(1, 2)[~rows].isnan().all()


def _shifted(weights: Tensor, k: int) -> Tensor:
    """Weight at key i + k of each row i, 0 outside: (B, H, L)."""
    j = torch.arange(weights.shape[2]) + k
    inside = (j >= 0) & (j < weights.shape[3])
    return weights[:, :, torch.arange(len(j)), j.clamp(0, weights.shape[3] - 1)] * inside


def _twice(weights: Tensor) -> Tensor:
    """What `pairs` counts twice: row 0 names key 0 two times."""
    first = torch.zeros_like(weights[..., 0])
    first[..., 0] = weights[..., 0, 0]
    return first


def compare(observed: dict[str, Tensor], weights: Tensor, rows: Tensor | None, layer: str) -> None:
    """Row statistics against eager's weights (B, H, L, S), at the rows that count; NaN at the others."""
    weights = weights.double()
    on_keys = weights.sum(-1, keepdim=True)
    weights = weights / on_keys
    j = torch.arange(weights.shape[-1], dtype=torch.float64)
    mean = (weights * j).sum(-1)
    expected = {
        "entropy": -torch.xlogy(weights, weights).sum(-1),
        "max_weight": weights.amax(-1),
        "argmax": weights.argmax(-1),
        "effective_keys": 1 / weights.square().sum(-1),
        "key_mean": mean,
        "key_variance": (weights * (j - mean[..., None]).square()).sum(-1),
    }
    if "sink_mass" in observed:
        expected["sink_mass"] = 1 - on_keys[..., 0]
    rows = torch.ones(weights.shape[0], weights.shape[2], dtype=torch.bool) if rows is None else rows
    for name, value in expected.items():
        got = observed[name].movedim(1, 2)
        assert got.dtype is (torch.int64 if name == "argmax" else torch.float32)
        close: dict[str, Any] = dict(atol=2e-4, rtol=2e-4) if name != "argmax" else dict(atol=0, rtol=0)
        torch.testing.assert_close(
            got[rows].double(),
            value.movedim(1, 2)[rows].double(),
            **close,
            msg=lambda m, n=name: f"{layer} {n}: {m}",
        )
        assert (got[~rows] == -1).all() if name == "argmax" else got[~rows].isnan().all()


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_gives_the_tokens_of_eager(case, cache):
    row, model = case
    if row.kind in ("encoder", "image"):
        pytest.skip("it does not generate")
    inputs = inputs_of(row, "left")
    if row.kind == "speech":
        inputs = {
            "input_features": inputs["input_features"],
            "decoder_input_ids": inputs["decoder_input_ids"][:, :3],
        }
    if row.kind == "both":
        inputs.pop("decoder_attention_mask")
        inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:, :3]
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=True)
    eager = model.generate(**inputs, **options)
    model.set_attn_implementation("multihead")
    try:
        ours = model.generate(**inputs, **options, cache_implementation=cache)
    finally:
        model.set_attn_implementation("eager")
    assert torch.equal(ours, eager)
    assert len(set(map(tuple, ours[:, -6:].tolist()))) > 1  # the three sequences say different things


def test_a_generating_model_is_watched_step_by_step(case):
    row, model = case
    if row.kind in ("encoder", "image", "speech"):
        pytest.skip("it does not generate from tokens")
    inputs = inputs_of(row, "left")
    inputs.pop("decoder_attention_mask", None)
    if row.kind == "both":
        inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:, :3]
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    eager = model.generate(**inputs, **options, output_attentions=True)
    with mh.watch(model) as record:
        ours = model.generate(**inputs, **options)
    assert torch.equal(ours.sequences, eager.sequences)
    attentions = eager.decoder_attentions if row.kind == "both" else eager.attentions
    stack = "decoder." if row.kind == "both" else ""
    assert len(record.steps) == len(attentions) == 4
    for step, of_layers in zip(record.steps, attentions, strict=True):
        for n, weights in enumerate(of_layers):
            at = step.layers.index(f"{stack}{n}")
            got = step.statistics["max_weight"][at][:, :, -1]
            expected = (weights / weights.sum(-1, keepdim=True)).amax(-1)[:, :, -1]
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
    assert record.layers == record.steps[-1].layers
    assert any(name.startswith("encoder") for name in record.steps[0].layers) == (row.kind == "both")


def test_asking_for_weights_raises_and_says_what_to_do(case):
    row, model = case
    inputs = inputs_of(row, "right")
    with pytest.raises(ValueError, match=r"record\.weights"):
        run(model, "multihead", inputs, output_attentions=True)
    with mh.watch(model), pytest.raises(ValueError, match=r"record\.weights"):
        model(**inputs, output_attentions=True)
    assert model.config._attn_implementation == "eager"
