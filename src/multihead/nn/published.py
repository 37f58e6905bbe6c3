"""How published models keep the weights of their attention: a row of `ARCHITECTURES` each.

A row has the names of the tensors, how Q, K and V lie in them, and what the model's configuration says of the rest.
To add a model is to add a row, and its own attention to the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .alibi import alibi_slopes
from .rotary import LinearScaling, Llama3Scaling, Rotary


@dataclass(frozen=True)
class Heads:
    """The sizes that a fused tensor is cut by: H, G and D."""

    H: int
    G: int
    D: int

    def rows(self, part: str) -> int:
        return (self.H if part == "Q" else self.G) * self.D


@dataclass(frozen=True)
class Slot:
    """One tensor of a published model: which of our parts are in it, and how they lie.

    Args:
        name: in the attention's own state dict.
        parts: "Q", "QKV", "KV", "O", or a norm's "q_norm" or "k_norm".
        kind: "weight" or "bias".
        transposed: a weight (in, out) instead of nn.Linear's (out, in).
        by_group: the rows lie by key/value head: its H/G queries, its key, its value, then the next one's.
    """

    name: str
    parts: str
    kind: str = "weight"
    transposed: bool = False
    by_group: bool = False

    @property
    def ours(self) -> tuple[str, ...]:
        """The names of its parts in our state dict."""
        if self.parts.endswith("norm"):
            return (f"{self.parts}.{self.kind}",)
        return tuple(f"W_{part}.{self.kind}" for part in self.parts)

    def split(self, tensor: Tensor, heads: Heads) -> dict[str, Tensor]:
        """Our tensors, from theirs."""
        tensor = tensor.T if self.transposed and self.kind == "weight" else tensor
        if len(self.ours) == 1:
            return {self.ours[0]: tensor}
        if not self.by_group:
            return dict(zip(self.ours, tensor.split([heads.rows(part) for part in self.parts])))
        grouped = tensor.unflatten(0, (heads.G, heads.H // heads.G + 2, heads.D))
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        return {name: part.flatten(0, -tensor.ndim) for name, part in zip(self.ours, parts)}

    def join(self, state: Mapping[str, Tensor], heads: Heads) -> Tensor:
        """Their tensor, from ours: `split` undone."""
        parts = [state[name] for name in self.ours]
        if self.by_group:
            query, key, value = (part.unflatten(0, (heads.G, -1, heads.D)) for part in parts)
            tensor = torch.cat([query, key, value], 1).flatten(0, 2)
        else:
            tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        return tensor.T.contiguous() if self.transposed and self.kind == "weight" else tensor


def _linear(name: str, parts: str, **how: bool) -> tuple[Slot, Slot]:
    return Slot(f"{name}.weight", parts, "weight", **how), Slot(f"{name}.bias", parts, "bias", **how)


@dataclass(frozen=True)
class Architecture:
    """One family of published models.

    Args:
        name: for messages.
        classes: the classes of their attention modules, in transformers.
        model_types: `model_type` of their configurations.
        slots: the tensors of their attention, by kind of attention ("self", "cross", "encoder", "decoder").
        roots: where in a whole model's state dict they are, by kind; {} is the layer's number.
        options: from a configuration, a layer's number and a kind, the arguments of `MultiHeadAttention`; `bias` and
            `output_bias` are always among them, `norm_eps` is where there are norms.
        ignored: tensors beside them that are no weights.
    """

    name: str
    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    slots: Mapping[str, tuple[Slot, ...]]
    roots: Mapping[str, str]
    options: Callable[[Any, int, str], dict[str, Any]]
    ignored: tuple[str, ...] = field(default=())


def _gpt2(config: Any, index: int, kind: str) -> dict[str, Any]:
    d_model, n_heads = config.hidden_size, config.num_attention_heads
    scale = (d_model // n_heads) ** -0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= index + 1
    made = {"d_model": d_model, "n_heads": n_heads, "scale": scale, "dropout": config.attn_pdrop}
    made |= {"bias": True, "output_bias": True}
    return made | ({"causal": True} if kind == "self" else {"d_context": d_model})


def _bert(config: Any, index: int, kind: str) -> dict[str, Any]:
    made = {"d_model": config.hidden_size, "n_heads": config.num_attention_heads}
    made |= {"bias": True, "output_bias": True, "dropout": config.attention_probs_dropout_prob}
    return made | ({"causal": config.is_decoder} if kind == "self" else {"d_context": config.hidden_size})


def _whisper(config: Any, index: int, kind: str) -> dict[str, Any]:
    heads = config.encoder_attention_heads if kind == "encoder" else config.decoder_attention_heads
    made = {"d_model": config.d_model, "n_heads": heads, "dropout": config.attention_dropout}
    made |= {"bias": (True, False, True), "output_bias": True}
    return made | ({"d_context": config.d_model} if kind == "cross" else {"causal": kind == "decoder"})


def _llama(config: Any, index: int, kind: str) -> dict[str, Any]:
    n_heads = config.num_attention_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    made = {"d_model": config.hidden_size, "n_heads": n_heads, "n_kv_heads": config.num_key_value_heads}
    made |= {"d_head": d_head, "causal": True, "rotary": rotary_of(config), "dropout": config.attention_dropout}
    # Mistral has no biases and no such field, Qwen2 has them always, and none of W_O.
    biased = getattr(config, "attention_bias", False)
    made |= {"bias": biased or config.model_type == "qwen2", "output_bias": biased and config.model_type != "qwen2"}
    sliding = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if sliding is not None and (layer_types is None or layer_types[index] == "sliding_attention"):
        made["window"] = (sliding - 1, 0)
    return made


def _qwen3(config: Any, index: int, kind: str) -> dict[str, Any]:
    return _llama(config, index, kind) | {"qk_norm": "rms", "norm_eps": config.rms_norm_eps}


def _gpt_neox(config: Any, index: int, kind: str) -> dict[str, Any]:
    return {
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "causal": True,
        "bias": config.attention_bias,
        "output_bias": config.attention_bias,
        "rotary": rotary_of(config, config.rope_parameters.get("partial_rotary_factor", 1.0)),
        "dropout": config.attention_dropout,
    }


def _falcon(config: Any, index: int, kind: str) -> dict[str, Any]:
    H = config.num_attention_heads
    G = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else H
    made = {"d_model": config.hidden_size, "n_heads": H, "n_kv_heads": G, "causal": True}
    made |= {"bias": config.bias, "output_bias": config.bias}
    if not config.alibi:  # with rotary positions its own code drops no weights
        return made | {"rotary": rotary_of(config)}
    # Falcon scales ALiBi with the scores, unlike Press et al.
    slopes = alibi_slopes(H) * (config.hidden_size // H) ** -0.5
    return made | {"alibi": slopes, "dropout": config.attention_dropout}


def rotary_of(config: Any, fraction: float = 1.0) -> Rotary:
    """The rotary positions that a configuration of transformers describes.

    Raises:
        ValueError: a kind of scaling that `Rotary` has not.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    scaling = None
    if kind == "linear":
        scaling = LinearScaling(rope["factor"])
    elif kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = Llama3Scaling(*(rope[name] for name in names))
    elif kind != "default":
        raise ValueError(f"config: expected rope_type 'default', 'linear' or 'llama3', got {kind!r}")
    return Rotary(theta=rope["rope_theta"], fraction=None if fraction == 1.0 else fraction, scaling=scaling)


_QKV = tuple(slot for part in "qkv" for slot in _linear(f"{part}_proj", part.upper()))
_LLAMA = (*_QKV, *_linear("o_proj", "O"))
_QWEN3 = (*_LLAMA, Slot("q_norm.weight", "q_norm"), Slot("k_norm.weight", "k_norm"))
_WHISPER = (*_QKV, *_linear("out_proj", "O"))
_BERT = (
    *_linear("self.query", "Q"), *_linear("self.key", "K"), *_linear("self.value", "V"), *_linear("output.dense", "O")
)  # fmt: skip
_GPT2_OUT = _linear("c_proj", "O", transposed=True)
_BY_GROUP = (*_linear("query_key_value", "QKV", by_group=True), *_linear("dense", "O"))

# Beside the weights of old files: masks and angles.
_BUFFERS = ("bias", "masked_bias", "rotary_emb.inv_freq")

ARCHITECTURES = (
    Architecture(
        "GPT-2",
        ("GPT2Attention",),
        ("gpt2",),
        {
            "self": (*_linear("c_attn", "QKV", transposed=True), *_GPT2_OUT),
            "cross": (*_linear("q_attn", "Q", transposed=True), *_linear("c_attn", "KV", transposed=True), *_GPT2_OUT),
        },
        {"self": "h.{}.attn", "cross": "h.{}.crossattention"},
        _gpt2,
        _BUFFERS,
    ),
    Architecture(
        "BERT",
        ("BertAttention",),
        ("bert",),
        {"self": _BERT, "cross": _BERT},
        {"self": "encoder.layer.{}.attention", "cross": "encoder.layer.{}.crossattention"},
        _bert,
        # The norm that follows is the block's, not the attention's; old files call its parameters gamma and beta.
        tuple(f"output.LayerNorm.{name}" for name in ("weight", "bias", "gamma", "beta")),
    ),
    Architecture(
        "Llama, Mistral, Qwen2",
        ("LlamaAttention", "MistralAttention", "Qwen2Attention"),
        ("llama", "mistral", "qwen2"),
        {"self": _LLAMA},
        {"self": "layers.{}.self_attn"},
        _llama,
        _BUFFERS,
    ),
    Architecture(
        "Qwen3",
        ("Qwen3Attention",),
        ("qwen3",),
        {"self": _QWEN3},
        {"self": "layers.{}.self_attn"},
        _qwen3,
    ),
    Architecture(
        "GPT-NeoX",
        ("GPTNeoXAttention",),
        ("gpt_neox",),
        {"self": _BY_GROUP},
        {"self": "layers.{}.attention"},
        _gpt_neox,
        _BUFFERS,
    ),
    Architecture(
        "Falcon",
        ("FalconAttention",),
        ("falcon",),
        {"self": _BY_GROUP},
        {"self": "h.{}.self_attention"},
        _falcon,
        _BUFFERS,
    ),
    Architecture(
        "Whisper",
        ("WhisperAttention",),
        ("whisper",),
        dict.fromkeys(("encoder", "decoder", "cross"), _WHISPER),
        {
            "encoder": "encoder.layers.{}.self_attn",
            "decoder": "decoder.layers.{}.self_attn",
            "cross": "decoder.layers.{}.encoder_attn",
        },
        _whisper,
    ),
)
