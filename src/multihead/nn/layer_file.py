"""A layer as one safetensors file: its state dict, and beside it the options that make it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from .module import MultiHeadAttention
from .rotary import LinearScaling, Llama3Scaling, Rotary

_KEY = "multihead"
_SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling}


def save(layer: MultiHeadAttention, path: str | os.PathLike[str]) -> None:
    """Write a layer to a .safetensors file that `load` makes it from again.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    state = {name: x.detach().cpu().contiguous() for name, x in layer.state_dict().items()}
    options = {name: x for name, x in layer.options().items() if name not in ("dtype", "device", "rotary", "alibi")}
    if layer.alibi_slopes is not None:
        options["alibi"] = layer.alibi_slopes.tolist()
    if layer.rotary is not None:
        scaling = layer.rotary.scaling
        kind = next((kind for kind, made in _SCALINGS.items() if isinstance(scaling, made)), None)
        options["rotary"] = asdict(layer.rotary) | {"scaling": None if scaling is None else [kind, asdict(scaling)]}
    if layer.q_norm is not None:
        options["norm_eps"] = layer.q_norm.eps
    save_file(state, path, {_KEY: json.dumps(options)})


def load(path: str | os.PathLike[str], **options: Any) -> MultiHeadAttention:
    """A layer from a file that `save` wrote, or from a state dict in a .safetensors file.

    Args:
        path: the file. Its tensors are those of the layer, packed or separate: the plain textbook module with Linear
            layers W_Q, W_K, W_V and W_O is such a file.
        options: arguments of `MultiHeadAttention`, over those of the file. A file that `save` did not write needs
            n_heads at least; widths are read off the matrices.

    Returns:
        the layer, in the file's type and in evaluation mode.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no safetensors file, tensors that are not those of a layer, or options that do not fit them.
    """
    state, said = _read(Path(path))
    given: dict[str, Any] = json.loads(said) if said is not None else _sizes(state, options)
    eps = given.pop("norm_eps", None)
    if given.get("window") is not None:
        given["window"] = tuple(given["window"])
    if given.get("rotary") is not None:
        rotary = given["rotary"]
        if rotary["scaling"] is not None:
            kind, of_scaling = rotary["scaling"]
            rotary["scaling"] = _SCALINGS[kind](**of_scaling)
        given["rotary"] = Rotary(**rotary)
    dtype = next(iter(state.values())).dtype
    layer = MultiHeadAttention(**{"dtype": dtype, **given, **options})
    try:
        layer.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None and eps is not None:
            norm.eps = eps
    return layer.eval()


def _read(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """The tensors of a file, and the options that `save` wrote beside them."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"path: expected a .safetensors file, got {path}, which is not there")
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            said = (file.metadata() or {}).get(_KEY)
    except SafetensorError as error:
        raise ValueError(f"{path}: no safetensors file ({error})") from None
    if "W_O.weight" not in state:
        there = ", ".join(sorted(state)[:4]) or "nothing"
        raise ValueError(
            f"{path}: expected the tensors of one layer, W_Q.weight, W_K.weight, W_V.weight (or W_QKV.weight) and "
            f"W_O.weight, found {there}; from_safetensors reads the layers of published models, and save writes them"
        )
    return state, said


def _sizes(state: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """Options that the shapes of a state dict tell, once the number of heads is known."""
    heads = options.get("n_heads")
    if heads is None:
        raise ValueError("n_heads: expected the number of heads, which this file does not say")
    d_model, columns = state["W_O.weight"].shape
    if heads < 1 or columns % heads:
        raise ValueError(f"n_heads: expected a divisor of W_O's {columns} columns, got {heads}")
    d_value = columns // heads
    found: dict[str, Any] = {"d_model": d_model, "n_heads": heads, "d_value": d_value}
    rows = {run: len(state[f"W_{run}.weight"]) for run in ("Q", "K", "V", "KV", "QKV") if f"W_{run}.weight" in state}
    groups = options.get("n_kv_heads") or (rows["V"] // d_value if "V" in rows else heads)
    found["n_kv_heads"] = groups
    if "Q" in rows:
        found["d_head"] = rows["Q"] // heads
    elif "QKV" in rows:
        found["d_head"] = (rows["QKV"] - groups * d_value) // (heads + groups)
    of_context = next((state[f"W_{run}.weight"] for run in ("K", "KV") if run in rows), None)
    if of_context is not None and of_context.shape[1] != d_model:
        found["d_context"] = of_context.shape[1]
    packed = any(f"W_{run}.bias" in state for run in ("KV", "QKV"))
    found["bias"] = tuple(packed or f"W_{part}.bias" in state for part in "QKV")
    found["output_bias"] = "W_O.bias" in state
    found["sinks"] = "sinks" in state
    if "W_G.weight" in state:
        found["gate"] = "headwise" if len(state["W_G.weight"]) == heads else "elementwise"
    if "q_norm.weight" in state:
        found["qk_norm"] = "rms"
    return found
