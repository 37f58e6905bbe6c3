"""PyTorch's scaled_dot_product_attention on top of `attention`: the same arguments in the same places."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from .functional import attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, its signature and meaning: a one-line swap.

    Two things differ. A key that is masked is not there at all, so a NaN in it reaches no row, and a row whose keys
    are all masked gives zeros, where PyTorch gives zeros or NaN, by version and kernel. And dropout is PyTorch's in
    distribution, not bit by bit. Gradients of any order flow to query, key, value and a float `attn_mask`.

    Args:
        query: (..., H, L, D), two axes or more; the axes before the last two broadcast against each other.
        key: (..., H, S, D), or (..., G, S, D) with `enable_gqa`.
        value: (..., H, S, E), or (..., G, S, E) with `enable_gqa`; its G may differ from that of the key.
        attn_mask: broadcasts to (..., H, L, S). bool, True = may attend; or float, added to the scores, in the
            query's type or float32; or a `CausalBias` of torch.nn.attention.bias, without a mask being made of it.
        dropout_p: share of the weights dropped, always, as in PyTorch: 0 when not in training.
        is_causal: query i sees keys j <= i (top-left, also where L != S).
        scale: by default 1 / sqrt(D).
        enable_gqa: query head h reads key head h // (H // G); G divides H.

    Returns:
        (..., H, L, E) in the query's type.

    Raises:
        RuntimeError: both attn_mask and is_causal are given, as in PyTorch.
        ValueError, TypeError: any other argument that does not fit.

    Example:
        >>> query, key, value = torch.randn(2, 8, 5, 16), torch.randn(2, 8, 7, 16), torch.randn(2, 8, 7, 16)
        >>> output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> torch.allclose(scaled_dot_product_attention(query, key, value, is_causal=True), output, atol=1e-5)
        True
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError("attn_mask: expected None with is_causal=True, got both; put the causal rule in the mask")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_axes(name, tensor, 3 if enable_gqa else 2)
    if enable_gqa:
        key, value = _with_equal_groups(query, key, value)
    lead, G = _leading_axes(query, key, value, enable_gqa)
    *batch, H = lead or (1,)
    L, S = query.shape[-2], key.shape[-2]
    causal, start, mask, bias = is_causal, 0, None, None
    if _is_causal_bias(attn_mask):
        causal, start = True, _start_of(attn_mask, L, S)
    elif attn_mask is not None:
        _check_axes("attn_mask", attn_mask, 0)
        attn_mask = _four_axis_mask(attn_mask, (*batch, H, L, S), lead)
        if attn_mask.dtype is torch.bool:
            mask = attn_mask
        elif attn_mask.dtype in (query.dtype, torch.float32):
            bias = attn_mask
        else:
            raise TypeError(f"attn_mask: expected bool, {query.dtype} as query is, or float32, got {attn_mask.dtype}")
    output = attention(
        _four_axes(query, batch, H),
        _four_axes(key, batch, G),
        _four_axes(value, batch, G),
        causal=causal,
        query_start=start,
        mask=mask,
        bias=bias,
        scale=None if scale is None else float(scale),
        dropout_p=dropout_p,
    )
    return output if len(lead) == 2 else output.reshape(*lead, L, value.shape[-1])


def _check_axes(name: str, tensor: Tensor, least: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got a nested one; pack it and say document_ids of attention")
    if tensor.ndim < least:
        axes = "(..., H, length, width)"
        raise ValueError(f"{name}: expected {least} axes or more, {axes}, got {tuple(tensor.shape)}")


def _heads(tensor: Tensor) -> int:
    return tensor.shape[-3] if tensor.ndim > 2 else 1


def _with_equal_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with one number G of heads for both, the least that both divide."""
    H, groups = _heads(query), {"key": _heads(key), "value": _heads(value)}
    for name, G in groups.items():
        if (H % G if G else H) != 0:
            raise ValueError(f"{name}: expected a number of heads G that divides the H={H} heads of query, got G={G}")
    if groups["key"] == groups["value"]:
        return key, value
    G = math.lcm(*groups.values())
    return tuple(x.repeat_interleave(G // max(_heads(x), 1), -3) for x in (key, value))  # type: ignore[return-value]


def _leading_axes(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[tuple[int, ...], int]:
    """The axes of the output before its last two, heads last, and the number G of key/value heads."""
    shapes = [tuple(x.shape[:-2]) for x in (query, key, value)]
    if grouped:
        G = _heads(key)
        shapes = [(*shape[:-1], _heads(query)) for shape in shapes]
    if shapes[0] == shapes[1] == shapes[2]:
        lead = shapes[0]
    else:
        try:
            lead = tuple(torch.broadcast_shapes(*shapes))
        except RuntimeError:
            got = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            same = grouped or _heads(query) == _heads(key) == _heads(value)
            hint = "" if same else "; fewer key/value heads than query heads need enable_gqa=True"
            raise ValueError(
                f"query, key, value: expected axes before the last two that broadcast, got {got}{hint}"
            ) from None
    if not grouped:
        G = 1 if _heads(key) == _heads(value) == 1 else (lead or (1,))[-1]
    return lead, G


def _four_axes(tensor: Tensor, batch: list[int], heads: int) -> Tensor:
    """A tensor (..., heads, length, width) as (B, heads, length, width); it is copied only where no view does it."""
    shape = (*batch, heads, *tensor.shape[-2:])
    if len(shape) == 4:
        return tensor if tensor.shape == shape else tensor.expand(shape)
    return tensor.expand(shape).reshape(math.prod(batch), *shape[-3:])


def _four_axis_mask(mask: Tensor, full: tuple[int, ...], lead: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to (..., H, L, S) as one that broadcasts to (B, H, L, S)."""
    shape = tuple(mask.shape)
    expected = (*lead, *full[-2:])
    if len(shape) > len(expected) or any(n not in (1, m) for n, m in zip(shape[::-1], expected[::-1])):
        raise ValueError(f"attn_mask: expected a shape that broadcasts to (..., H, L, S) = {expected}, got {shape}")
    batch, front = full[:-3], shape[:-3]
    if len(batch) < 2 or not front:
        return mask
    if math.prod(front) == 1:
        return mask.reshape(1, *shape[-3:])
    return mask.expand(*batch, *shape[-3:]).reshape(math.prod(batch), *shape[-3:])


def _is_causal_bias(mask: Tensor | None) -> bool:
    # Its module takes seconds to import, and whoever made one has done that.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _start_of(bias: Any, L: int, S: int) -> int:
    """Where query 0 of a causal bias stands among the keys."""
    size = (bias.seq_len_q, bias.seq_len_kv)
    if size != (L, S):
        raise ValueError(f"attn_mask: expected a causal bias of (L={L}, S={S}), got one of {size}")
    return S - L if bias.variant.name == "LOWER_RIGHT" else 0
