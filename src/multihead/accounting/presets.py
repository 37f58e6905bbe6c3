"""Known models: their published sizes, as the fields of a config.json, and the figures that are told about them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from multihead.accounting.architectures import read
from multihead.accounting.fields import ConfigError
from multihead.accounting.model import Model


@dataclass(frozen=True)
class Claim:
    """A round figure that a source gives: 117M, 540.35B."""

    said: str
    source: str
    of: Literal["parameters", "active"] = "parameters"

    @property
    def value(self) -> float:
        """The figure as a number."""
        return float(self.said[:-1]) * {"M": 1e6, "B": 1e9}[self.said[-1]]

    def holds(self, count: int) -> bool:
        """Whether a count gives this figure when it is rounded to as many digits."""
        digits = len(self.said[:-1].partition(".")[2])
        unit = {"M": 1e6, "B": 1e9}[self.said[-1]]
        return f"{count / unit:.{digits}f}" == self.said[:-1]


@dataclass(frozen=True)
class Preset:
    """One known model."""

    config: dict[str, Any]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Opened:
    """A model, what is said of it and what else there is to know."""

    model: Model
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()


def open_config(source: str | Path | Mapping[str, Any] | Any) -> Opened:
    """Return the model that a name, a file, a folder, a dictionary or a configuration object describes.

    Args:
        source: a name in `PRESETS`; the path of a config.json or of a folder that has one; its fields as a
            dictionary; a configuration of transformers, or a model that has one. transformers is not needed.

    Raises:
        ConfigError: there is no such model, or the configuration cannot be read; the message is one line.
    """
    if isinstance(source, str) and source in PRESETS:
        preset = PRESETS[source]
        return Opened(read(preset.config, source), preset.claims, preset.notes)
    if isinstance(source, (str, Path)):
        path = _path(str(source))
        return Opened(read(_fields(path), path.parent.name if path.name == "config.json" else path.name))
    config = getattr(source, "config", source)
    fields = config if isinstance(config, Mapping) else config.to_dict() if hasattr(config, "to_dict") else None
    if fields is None:
        raise ConfigError(
            f"model: expected a name, a path, a dictionary or a configuration, got {type(source).__name__}"
        )
    return Opened(read(fields, str(fields.get("_name_or_path") or fields.get("model_type") or "config")))


def _path(source: str) -> Path:
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{source}: the folder has no config.json")
        return (path / "config.json").resolve()
    if path.exists():
        return path.resolve()
    near = difflib.get_close_matches(source, PRESETS, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(PRESETS)}"
    raise ConfigError(f"{source!r} is no known model, no file and no folder; {hint}")


def _fields(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ConfigError(f"{path}: it is not a config.json (no JSON)") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected the fields of a model, got a JSON {type(found).__name__}")
    return found


RADFORD = "Radford et al. 2019, Table 2"
BROWN = "Brown et al. 2020, Table 2.1"
DEVLIN = "Devlin et al. 2019, section 3"
VASWANI = "Vaswani et al. 2017, Table 3"
LLAMA_2 = "Touvron et al. 2023, Llama 2"
LLAMA_3 = "Dubey et al. 2024, The Llama 3 Herd of Models"
MIXTRAL = "Jiang et al. 2024, Mixtral of Experts"
FALCON = "Almazrouei et al. 2023, The Falcon Series"
CHOWDHERY = "Chowdhery et al. 2022, Table 1"
DEEPSEEK = "DeepSeek-AI 2024, DeepSeek-V3 Technical Report"
GPT_OSS = "OpenAI 2025, gpt-oss model card, Table 1"


def _gpt2(d_model: int, layers: int, heads: int, claim: Claim, context: int = 1024) -> Preset:
    config = {"model_type": "gpt2", "n_embd": d_model, "n_layer": layers, "n_head": heads}
    return Preset(config | {"n_positions": context, "vocab_size": 50257}, (claim,))


def _bert(d_model: int, layers: int, heads: int, claim: Claim) -> Preset:
    config = {"model_type": "bert", "hidden_size": d_model, "num_hidden_layers": layers, "num_attention_heads": heads}
    more = {"intermediate_size": 4 * d_model, "max_position_embeddings": 512, "vocab_size": 30522}
    return Preset(config | more, (claim,))


def _llama(
    d_model: int, layers: int, heads: int, kv_heads: int, d_ff: int, vocabulary: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": d_model,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": d_ff,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
    } | more


def _original(d_model: int, heads: int, claim: Claim) -> Preset:
    config = {"model_type": "original-transformer", "d_model": d_model, "num_heads": heads, "num_layers": 6}
    return Preset(
        config | {"d_ff": 4 * d_model, "vocab_size": 37000},
        (claim,),
        ("The paper gives its vocabulary as about 37,000, so the figures are exact for that number only.",),
    )


def _falcon(d_model: int, layers: int, heads: int, claim: Claim, **more: Any) -> Preset:
    config = {"model_type": "falcon", "hidden_size": d_model, "num_hidden_layers": layers}
    more = {"num_attention_heads": heads, "vocab_size": 65024, "max_position_embeddings": 2048} | more
    return Preset(config | more, (claim,))


def _gpt_oss(layers: int, experts: int, total: str, active: str) -> Preset:
    config = _llama(2880, layers, 64, 8, 2880, 201088, 131072, head_dim=64, num_local_experts=experts)
    config |= {"model_type": "gpt_oss", "num_experts_per_tok": 4, "sliding_window": 128}
    return Preset(config, (Claim(total, GPT_OSS), Claim(active, GPT_OSS, "active")))


_LLAMA_3_8B = (4096, 32, 32, 8, 14336, 128256)
_LLAMA_3_70B = (8192, 80, 64, 8, 28672, 128256)

PRESETS: dict[str, Preset] = {
    "original-transformer": _original(512, 8, Claim("65M", VASWANI)),
    "original-transformer-big": _original(1024, 16, Claim("213M", VASWANI)),
    "gpt2": _gpt2(768, 12, 12, Claim("117M", RADFORD)),
    "gpt2-medium": _gpt2(1024, 24, 16, Claim("345M", RADFORD)),
    "gpt2-large": _gpt2(1280, 36, 20, Claim("762M", RADFORD)),
    "gpt2-xl": _gpt2(1600, 48, 25, Claim("1542M", RADFORD)),
    "gpt-3": _gpt2(12288, 96, 96, Claim("175.0B", BROWN), context=2048),
    "bert-base": _bert(768, 12, 12, Claim("110M", DEVLIN)),
    "bert-large": _bert(1024, 24, 16, Claim("340M", DEVLIN)),
    "minilm": Preset(
        _bert(384, 6, 12, Claim("22.7M", "the model's page")).config | {"intermediate_size": 1536},
        (Claim("22.7M", "the page of all-MiniLM-L6-v2"),),
    ),
    "t5-base": Preset(
        {"model_type": "t5", "d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 12}
        | {"vocab_size": 32128, "n_positions": 512},
        (Claim("220M", "Raffel et al. 2020, section 2.1"),),
    ),
    "llama-2-7b": Preset(_llama(4096, 32, 32, 32, 11008, 32000, 4096), (Claim("7B", LLAMA_2),)),
    "llama-2-13b": Preset(_llama(5120, 40, 40, 40, 13824, 32000, 4096), (Claim("13B", LLAMA_2),)),
    "llama-2-70b": Preset(_llama(8192, 80, 64, 8, 28672, 32000, 4096), (Claim("70B", LLAMA_2),)),
    "llama-3-8b": Preset(_llama(*_LLAMA_3_8B, 8192), (Claim("8B", LLAMA_3),)),
    "llama-3-70b": Preset(_llama(*_LLAMA_3_70B, 8192), (Claim("70B", LLAMA_3),)),
    "llama-3.1-8b": Preset(_llama(*_LLAMA_3_8B, 131072), (Claim("8B", LLAMA_3),)),
    "llama-3.1-70b": Preset(_llama(*_LLAMA_3_70B, 131072), (Claim("70B", LLAMA_3),)),
    "llama-3.1-405b": Preset(_llama(16384, 126, 128, 8, 53248, 128256, 131072), (Claim("405B", LLAMA_3),)),
    "mistral-7b": Preset(
        _llama(4096, 32, 32, 8, 14336, 32000, 32768, model_type="mistral", sliding_window=4096),
        (Claim("7B", "Jiang et al. 2023, Mistral 7B"),),
        ("This is version 0.1, whose queries see 4,096 keys; later versions have no window.",),
    ),
    "mixtral-8x7b": Preset(
        _llama(4096, 32, 32, 8, 14336, 32000, 32768, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2),
        (Claim("47B", MIXTRAL), Claim("13B", MIXTRAL, "active")),
        ("8 × 7B would be 56B: only the feed-forward is there eight times, the attention is shared.",),
    ),
    "qwen2-7b": Preset(
        _llama(3584, 28, 28, 4, 18944, 152064, 131072, model_type="qwen2"),
        (Claim("7B", "Yang et al. 2024, Qwen2 Technical Report"),),
    ),
    "qwen3-8b": Preset(
        _llama(4096, 36, 32, 8, 12288, 151936, 40960, model_type="qwen3", head_dim=128),
        (Claim("8.2B", "the model's page"),),
    ),
    "gemma-2-9b": Preset(
        _llama(3584, 42, 16, 8, 14336, 256000, 8192, model_type="gemma2", head_dim=256, sliding_window=4096)
        | {"tie_word_embeddings": True},
        (Claim("9B", "Gemma Team 2024, Gemma 2"),),
    ),
    "smollm2": Preset(
        _llama(576, 30, 9, 3, 1536, 49152, 8192, tie_word_embeddings=True),
        (Claim("135M", "Allal et al. 2025, SmolLM2"),),
    ),
    "falcon-7b": _falcon(4544, 32, 71, Claim("7B", FALCON)),
    "falcon-40b": _falcon(8192, 60, 128, Claim("40B", FALCON), num_kv_heads=8, new_decoder_architecture=True),
    "palm-540b": Preset(
        {
            "model_type": "palm",
            "hidden_size": 18432,
            "num_hidden_layers": 118,
            "num_attention_heads": 48,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 256000,
            "max_position_embeddings": 2048,
        },
        (Claim("540.35B", CHOWDHERY),),
        ("The figure of the source is that of the matrices alone, without the 2,193,408 scales of the norms.",),
    ),
    "gpt-oss-20b": _gpt_oss(24, 32, "20.91B", "3.61B"),
    "gpt-oss-120b": _gpt_oss(36, 128, "116.83B", "5.13B"),
    "deepseek-v3": Preset(
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "tie_word_embeddings": False,
        },
        (Claim("671B", DEEPSEEK), Claim("37B", DEEPSEEK, "active")),
        ("The module that predicts further tokens is not counted; it is not needed to run the model.",),
    ),
}
