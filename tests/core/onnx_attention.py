"""ONNX's Attention operator (opsets 23 to 25) by the public calls of this library: what its own cases are run through.

https://onnx.ai/onnx/operators/onnx__Attention.html. Its window, causal frontier and padding are those of `attention`
with query 0 at the number of keys that were there before: past keys, nonpad_kv_seqlen - L, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import multihead as mh

# TensorProto's numbers for the types of a softmax.
_PRECISIONS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}


@dataclass
class Attributes:
    """The attributes of a node, with the operator's defaults."""

    is_causal: int = 0
    kv_num_heads: int | None = None
    left_window_size: int = -1
    q_num_heads: int | None = None
    qk_matmul_output_mode: int = 0
    right_window_size: int = -1
    scale: float | None = None
    softcap: float = 0.0
    softmax_precision: int | None = None


@dataclass
class Call:
    """One node as arguments of `mh.attention`.

    Args:
        query, key, value: (B, H, L, D), (B, G, S, D), (B, G, S, E), past keys included.
        options: keyword arguments of `attention`.
        folded: inputs and output have heads beside each other, (B, length, heads * width).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict = field(default_factory=dict)
    folded: bool = False


def to_call(attributes: Attributes, inputs: dict[str, Tensor]) -> Call:
    """What a node computes, as one call."""
    query, key, value = inputs["Q"], inputs["K"], inputs["V"]
    folded = query.ndim == 3
    if folded:
        query = _unfold(query, attributes.q_num_heads)
        key, value = (_unfold(x, attributes.kv_num_heads) for x in (key, value))
    start: int | Tensor = 0
    lengths = inputs.get("nonpad_kv_seqlen")
    if "past_key" in inputs:
        start = inputs["past_key"].shape[2]
        key = torch.cat([inputs["past_key"], key], 2)
        value = torch.cat([inputs["past_value"], value], 2)
    elif lengths is not None:
        start = lengths - query.shape[2]
    options = {
        "causal": bool(attributes.is_causal),
        "query_start": start,
        "key_lengths": lengths,
        "scale": attributes.scale,
        "softcap": attributes.softcap or None,
        "window": tuple(None if side < 0 else side for side in (attributes.left_window_size,
                                                                attributes.right_window_size)),
    }  # fmt: skip
    mask = inputs.get("attn_mask")
    if mask is not None:
        kind = "mask" if mask.dtype is torch.bool else "bias"
        options[kind] = _up_to(mask, key.shape[2], False if kind == "mask" else -torch.inf)
    return Call(query, key, value, options, folded)


def run(attributes: Attributes, inputs: dict[str, Tensor], outputs: list[str], impl: str = "auto") -> list[Tensor]:
    """The outputs of a node that have a name, in their order."""
    call = to_call(attributes, inputs)
    dtype = call.query.dtype
    wide = torch.promote_types(dtype, _PRECISIONS.get(attributes.softmax_precision, dtype))
    tensors = [x.to(wide) for x in (call.query, call.key, call.value)]
    every_key = torch.arange(call.key.shape[2])
    seen = mh.observe(*tensors, statistics=mh.Statistics("lse", classes=every_key), impl=impl, **call.options)
    made = {"Y": seen.output, "present_key": call.key, "present_value": call.value}
    if call.folded:
        made["Y"] = made["Y"].transpose(1, 2).flatten(2)
    if "qk_matmul_output" in outputs:
        if attributes.qk_matmul_output_mode == 3:
            made["qk_matmul_output"] = seen.class_mass  # each key a class of its own: the weights
        else:
            made["qk_matmul_output"] = scores(tensors, call.options, attributes.qk_matmul_output_mode, impl)
    return [made[name].to(dtype) for name in outputs if name]


def scores(tensors: list[Tensor], options: dict, mode: int, impl: str) -> Tensor:
    """Scores (B, H, L, S): 0 = scale * q.k, 1 = softcap on it, 2 = bias and mask on it.

    The lse of a row that sees one key is the score of that key.
    """
    if mode < 2:
        options = {"scale": options["scale"], "softcap": options["softcap"] if mode == 1 else None}
    n_keys = tensors[1].shape[2]
    mask = options.get("mask", torch.ones((), dtype=torch.bool))
    alone = torch.eye(n_keys, dtype=torch.bool)
    one = mh.Statistics("lse")
    return torch.stack(
        [mh.observe(*tensors, statistics=one, impl=impl, **options | {"mask": mask & key}).lse for key in alone], -1
    )


def run_sdpa(attributes: Attributes, inputs: dict[str, Tensor]) -> Tensor | None:
    """Y by `mh.scaled_dot_product_attention`, or None where PyTorch's function has no such argument."""
    call = to_call(attributes, inputs)
    options = call.options
    mask = options.get("mask", options.get("bias"))
    beyond = options["softcap"] or options["window"] != (None, None) or options["key_lengths"] is not None
    if beyond or (options["causal"] and (mask is not None or options["query_start"] != 0)):
        return None
    output = mh.scaled_dot_product_attention(
        call.query, call.key, call.value, mask, is_causal=options["causal"], scale=options["scale"], enable_gqa=True
    )
    return output.transpose(1, 2).flatten(2) if call.folded else output


def _unfold(x: Tensor, n_heads: int | None) -> Tensor:
    """(B, length, heads * width) as (B, heads, length, width)."""
    assert n_heads is not None
    return x.unflatten(2, (n_heads, -1)).transpose(1, 2)


def _up_to(mask: Tensor, n_keys: int, rest: float) -> Tensor:
    """A mask for all keys: those past its end are hidden."""
    return torch.nn.functional.pad(mask, (0, n_keys - mask.shape[-1]), value=rest)
