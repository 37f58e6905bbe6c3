"""PyTorch's fused attention: what a ratio is against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inputs import Inputs, visible
from ..shapes import Shape
from .base import Peer, Prepared, first
from .ours import leaves_of


class TorchSdpa(Peer):
    """torch.nn.functional.scaled_dot_product_attention; a window is a boolean mask, made once.

    Its fused kernel has one width: values narrower than keys get zeros beside them, once, or it would take an unfused
    path, which is slower.
    """

    name = "torch"
    about = "torch.nn.functional.scaled_dot_product_attention"

    def available(self) -> str | None:
        return None

    def refuses(self, shape: Shape) -> str | None:
        return None

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        mask = visible(shape) if shape.window is not None else None
        causal = shape.causal and mask is None

        def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=shape.G != shape.H
            )

        if not shape.training:
            value = F.pad(inputs.value, (0, shape.D - shape.E)) if shape.E < shape.D else inputs.value
            return Prepared(lambda: fused(inputs.query, inputs.key, value)[..., : shape.E], first)
        leaves = leaves_of(inputs)
        return Prepared(lambda: torch.autograd.grad(fused(*leaves), leaves, inputs.gradient), tuple)
