"""Weights in and out: from and to PyTorch's module, the attention of published models, and safetensors files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .module import MultiHeadAttention
from .projections import PARTS
from .published import ARCHITECTURES, Architecture, Heads, Slot

Module = TypeVar("Module", bound=nn.Module)
# What a layer may have as it likes, or what is compared apart.
_FREE = ("layout", "execution", "dropout", "dtype", "device", "bias", "output_bias", "norm_eps", "alibi")


def from_module(module: nn.Module, *, layout: str = "packed", execution: str = "parallel") -> MultiHeadAttention:
    """A layer with the weights and the rules of another attention module, which gives the same output.

    Args:
        module: a torch.nn.MultiheadAttention, or the attention of one layer of a transformers model: GPT-2, BERT
            (`layer.attention`, which has the output matrix), Llama, Mistral, Qwen2, Qwen3, GPT-NeoX, Falcon, Whisper.
            What such a model does around it (norms, residual, dropout of the output) is not the layer's.
        layout, execution: those of the layer.

    Returns:
        a layer with copies of the weights, in the module's type, device and mode. It is causal where the module is in
        its model; a torch.nn.MultiheadAttention is told at each call, so its layer is not (`with_options(causal=True)`
        makes one that is). A cross-attention's layer is called with a context.

    Raises:
        TypeError: a module that is not known; the message lists those that are.
        ValueError: it does something that the layer does not.

    Example:
        >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> torch.allclose(from_module(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
        True
    """
    layer = _Source.of(module).layer(module.state_dict(), layout, execution)
    return layer.train(module.training)


def to_module(layer: MultiHeadAttention, module: Module) -> Module:
    """Write a layer's weights into another attention module, which then gives the layer's output.

    A bias that the module has and the layer has not becomes 0. Dropout is left as it is.

    Args:
        layer: what to write.
        module: of the kinds that `from_module` reads; its sizes and its rules are those of the layer. Whether a
            torch.nn.MultiheadAttention is causal, and its window, is up to its caller.

    Returns:
        the module.

    Raises:
        TypeError: a module that is not known.
        ValueError: module and layer differ in a size, a rule or a type, or the layer has what the module has not.
    """
    made, theirs = _Source.of(module).tensors(layer), module.state_dict()
    for name, tensor in made.items():
        if theirs[name].dtype is not tensor.dtype:
            raise ValueError(f"module: expected {tensor.dtype}, as the layer is, got {theirs[name].dtype} in {name}")
    with torch.no_grad():
        for name, tensor in made.items():
            theirs[name].copy_(tensor)
    return module


def from_safetensors(
    path: str | os.PathLike[str],
    layer: int | str,
    config: Any = None,
    *,
    layout: str = "packed",
    execution: str = "parallel",
) -> MultiHeadAttention:
    """A layer with the weights of one attention of a published model's file; no other tensor is read.

    Args:
        path: a .safetensors file, or a folder with one, or with several and their index.
        layer: its number, from 0; where a model has several kinds of attention, "encoder.0", "decoder.0" or "cross.0".
        config: the model's configuration: of transformers, a dict, or a path to a config.json; by default the one
            beside the file.
        layout, execution: those of the layer.

    Returns:
        the layer, in the file's type and in evaluation mode.

    Raises:
        FileNotFoundError: no such file, or no config.json.
        ValueError: an architecture that is not known (the message lists those that are), a layer that is not there,
            tensors that are missing or that the architecture has no place for.
    """
    file = _Tensors.open(Path(path))
    source = _Source.configured(_config_of(config, file.folder), layer)
    root = source.root_in(file.names)
    tensors = {name[len(root) :]: file.read(name) for name in file.names if name.startswith(root)}
    return source.layer(tensors, layout, execution).eval()


def tensors_for(layer: MultiHeadAttention, index: int | str, config: Any) -> dict[str, Tensor]:
    """A layer's weights under the names and in the shapes of a published model, to be saved or loaded there.

    Args:
        layer: what to write.
        index: the layer's number in the model, or "encoder.0", "decoder.0", "cross.0", as for `from_safetensors`.
        config: the model's configuration: of transformers, a dict, or a path to a config.json.

    Returns:
        tensors by name, from the model's base (`layers.0.self_attn.q_proj.weight`).

    Raises:
        ValueError: an architecture that is not known, or sizes or rules that are not the layer's.
    """
    source = _Source.configured(_config_of(config, None), index)
    return {f"{source.root}.{name}": tensor for name, tensor in source.tensors(layer).items()}


@dataclass(frozen=True)
class _Source:
    """Where weights are: the tensors, what a layer of them is built with, and which of a model's layers it is.

    Args:
        free: options that are not the module's, but its caller's.
    """

    slots: tuple[Slot, ...]
    options: dict[str, Any]
    architecture: Architecture | None = None
    index: int = 0
    kind: str = "self"
    free: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: Any) -> _Source:
        """The source that a module is."""
        if isinstance(module, nn.MultiheadAttention):
            return cls(*_torch_layout(module), free=("causal", "window"))
        name, home = type(module).__name__, type(module).__module__
        for architecture in ARCHITECTURES:
            if name in architecture.classes and home.startswith("transformers."):
                kind, inner = _kind_of(module), module.self if name == "BertAttention" else module
                options = architecture.options(inner.config, inner.layer_idx or 0, kind)
                return cls(architecture.slots[kind], options, architecture, inner.layer_idx or 0, kind)
        known = ", ".join(["torch.nn.MultiheadAttention", *(name for a in ARCHITECTURES for name in a.classes)])
        raise TypeError(f"module: expected the attention of one layer, one of {known}, got {name}")

    @classmethod
    def configured(cls, config: Any, layer: int | str) -> _Source:
        """The source that a configuration and a layer's number or name describe."""
        architecture = _architecture_of(getattr(config, "model_type", None))
        kind, _, number = ("self", "", str(layer)) if isinstance(layer, int) else layer.rpartition(".")
        if kind not in architecture.roots or not number.isdecimal():
            kinds = " or ".join("a number" if kind == "self" else f"'{kind}.0'" for kind in architecture.roots)
            raise ValueError(f"layer: expected {kinds} for {architecture.name}, got {layer!r}")
        index = int(number)
        return cls(architecture.slots[kind], architecture.options(config, index, kind), architecture, index, kind)

    @property
    def name(self) -> str:
        return "torch.nn.MultiheadAttention" if self.architecture is None else self.architecture.name

    @property
    def root(self) -> str:
        """Where this attention is in its model."""
        assert self.architecture is not None
        return self.architecture.roots[self.kind].format(self.index)

    def root_in(self, names: Iterable[str]) -> str:
        """What the names of this attention's tensors begin with in a file, in which a model may be part of another."""
        starts = {name[: -len(known)] for name in names for known in self._known() if f".{name}".endswith(f".{known}")}
        if len(starts) != 1:
            found = f"them under {', '.join(map(repr, sorted(starts)))}" if starts else "none"
            raise ValueError(f"layer: expected tensors {self.root}.* once in the file, got {found}")
        return f"{starts.pop()}{self.root}."

    def _known(self) -> list[str]:
        return [f"{self.root}.{slot.name}" for slot in self.slots]

    def layer(self, theirs: Mapping[str, Tensor], layout: str, execution: str) -> MultiHeadAttention:
        """A new layer with the weights of a state dict."""
        state: dict[str, Tensor] = {}
        slots = list(filter(self.has, self.slots))
        for slot in slots:
            if slot.name not in theirs:
                raise ValueError(f"weights: expected a tensor {slot.name}, got {', '.join(theirs) or 'none'}")
            state |= slot.split(theirs[slot.name], self.heads)
        ignored = () if self.architecture is None else self.architecture.ignored
        if left := sorted(theirs.keys() - {slot.name for slot in slots} - set(ignored)):
            known = ", ".join(slot.name for slot in slots)
            raise ValueError(f"weights: expected no more than {known}, got {', '.join(left)} too")
        options = dict(self.options)
        norm_eps = options.pop("norm_eps", None)
        options |= {"dtype": state["W_O.weight"].dtype, "device": state["W_O.weight"].device}
        layer = MultiHeadAttention(**options, layout=layout, execution=execution)
        for norm in (layer.q_norm, layer.k_norm):
            if norm is not None:
                norm.eps = norm_eps
        layer.load_state_dict(state)
        return layer

    def tensors(self, layer: MultiHeadAttention) -> dict[str, Tensor]:
        """Their tensors, with the weights of a layer that has their rules."""
        _check_rules(layer, self)
        ours, made = _state_of(layer), {}
        slots = list(filter(self.has, self.slots))
        held = {name for slot in slots for name in slot.ours}
        if left := sorted(ours.keys() - held):
            raise ValueError(f"layer: expected no {', '.join(left)}, for which there is no place in {self.name}")
        for name in held - ours.keys():
            ours[name] = torch.zeros_like(ours[name.replace("bias", "weight")][:, 0])
        for slot in slots:
            made[slot.name] = slot.join(ours, self.heads)
        return made

    def has(self, slot: Slot) -> bool:
        """Whether a tensor is there: each weight is, and the biases that the options say."""
        if slot.kind == "weight":
            return True
        if slot.parts == "O":
            return self.options["output_bias"]
        bias = self.options["bias"]
        return bias[PARTS.index(slot.parts)] if isinstance(bias, tuple) else bias

    @property
    def heads(self) -> Heads:
        H, d_model = self.options["n_heads"], self.options["d_model"]
        return Heads(H, self.options.get("n_kv_heads", H), self.options.get("d_head", d_model // H))


def _architecture_of(model_type: Any) -> Architecture:
    for architecture in ARCHITECTURES:
        if model_type in architecture.model_types:
            return architecture
    known = ", ".join(name for architecture in ARCHITECTURES for name in architecture.model_types)
    raise ValueError(f"config: expected a model_type of {known}, got {model_type!r}")


def _torch_layout(module: nn.MultiheadAttention) -> tuple[tuple[Slot, ...], dict[str, Any]]:
    """Where PyTorch's module keeps its weights, and what it does."""
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("module: expected add_bias_kv=False and add_zero_attn=False, since a layer adds no keys")
    if module.kdim != module.vdim:
        raise ValueError(
            f"module: expected kdim = vdim, since a layer's keys and values are of one context,"
            f" got kdim={module.kdim}, vdim={module.vdim}"
        )
    bias = module.in_proj_bias is not None
    options = {"d_model": module.embed_dim, "n_heads": module.num_heads, "dropout": module.dropout}
    options |= {"bias": bias, "output_bias": bias}
    weights = [Slot("in_proj_weight", "QKV")]
    if module.in_proj_weight is None:
        options["d_context"] = module.kdim
        weights = [Slot(f"{part.lower()}_proj_weight", part) for part in PARTS]
    output = [Slot("out_proj.weight", "O"), Slot("out_proj.bias", "O", "bias")]
    return (*weights, Slot("in_proj_bias", "QKV", "bias"), *output), options


def _kind_of(module: Any) -> str:
    """Which kind of attention a module of transformers is."""
    if type(module).__name__ != "WhisperAttention":
        return "cross" if getattr(module, "is_cross_attention", False) else "self"
    if module.is_causal:
        return "decoder"
    return "cross" if module.is_decoder else "encoder"


def _state_of(layer: MultiHeadAttention) -> dict[str, Tensor]:
    """A layer's weights with a matrix for each of Q, K and V, whatever its layout: views."""
    fused = {f"W_{run}.{kind}" for run in layer.runs for kind in ("weight", "bias")}
    state = {name: tensor.detach() for name, tensor in layer.state_dict().items() if name not in fused}
    for part in PARTS:
        weight, bias = layer.rows(part, slice(0, layer.n_heads if part == "Q" else layer.n_kv_heads))
        state[f"W_{part}.weight"] = weight.detach()
        if bias is not None:
            state[f"W_{part}.bias"] = bias.detach()
    return state


def _check_rules(layer: MultiHeadAttention, source: _Source) -> None:
    """Check that a layer has the sizes and the rules that a source describes."""
    if layer.ablations:
        raise ValueError("layer: expected none of its heads ablated, got one inside its ablate(...)")
    like = MultiHeadAttention(**{name: x for name, x in source.options.items() if name not in _FREE}, device="meta")
    have, want = _rules(layer), _rules(like)
    want |= {"alibi": _digits(source.options.get("alibi")), "norm_eps": source.options.get("norm_eps")}
    if wrong := [name for name in want if have[name] != want[name] and name not in source.free]:
        said = "; ".join(f"{name}={want[name]}, got {have[name]}" for name in wrong)
        raise ValueError(f"layer: expected, as {source.name} has it, {said}")


def _rules(layer: MultiHeadAttention) -> dict[str, Any]:
    """What a layer computes, beside its weights, in a form that compares."""
    rules = {name: value for name, value in layer.options().items() if name not in _FREE}
    rules["scale"] = _digits(1 / math.sqrt(layer.d_head) if layer.scale is None else layer.scale)
    rules["norm_eps"] = None if layer.q_norm is None else layer.q_norm.eps
    rules["alibi"] = _digits(layer.alibi_slopes)
    if layer.rotary is not None:  # a share of D and a number of components may say the same
        rules["rotary"] = replace(layer.rotary, dims=layer.rotary.turning(layer.d_head), fraction=None)
    return rules


def _digits(values: Any) -> Any:
    """Numbers in six digits, so that ways of computing them do not matter."""
    if isinstance(values, Tensor):
        return [f"{x:.6g}" for x in values.tolist()]
    return None if values is None else f"{values:.6g}"


@dataclass(frozen=True)
class _Tensors:
    """The tensors of one file or of several."""

    folder: Path
    file_of: dict[str, Path]

    @classmethod
    def open(cls, path: Path) -> _Tensors:
        from safetensors import safe_open

        if not path.exists():
            raise FileNotFoundError(f"path: expected a file or a folder, got {path}, which is not there")
        index = path / "model.safetensors.index.json"
        if index.is_file():
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return cls(path, {name: path / file for name, file in shards.items()})
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if len(files) != 1:
            raise ValueError(
                f"path: expected one .safetensors file in {path}, or an index of several, got {len(files)}"
            )
        with safe_open(files[0], framework="pt") as file:
            return cls(files[0].parent, dict.fromkeys(file.keys(), files[0]))

    @property
    def names(self) -> Iterable[str]:
        return self.file_of.keys()

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.file_of[name], framework="pt") as file:
            return file.get_tensor(name)


def _config_of(config: Any, folder: Path | None) -> Any:
    """A configuration of transformers, from what a caller has."""
    if config is None and folder is not None:
        config = folder / "config.json"
        if not config.is_file():
            raise FileNotFoundError(f"config: expected it, or a config.json beside the tensors, got none in {folder}")
    if isinstance(config, str | os.PathLike):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        return config
    _architecture_of(config.get("model_type"))
    from transformers import AutoConfig

    values = dict(config)
    return AutoConfig.for_model(values.pop("model_type"), **values)
