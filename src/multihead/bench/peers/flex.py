"""PyTorch's FlexAttention, compiled."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import torch

from ..inputs import Inputs
from ..shapes import Shape
from .base import Peer, Prepared, first


class Flex(Peer):
    """torch.compile(flex_attention), causal shapes and windows as block masks."""

    name = "flex"
    about = "torch.nn.attention.flex_attention, compiled"

    def available(self) -> str | None:
        if sys.platform == "darwin" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            return "FlexAttention compiles for AVX2 and AVX-512 alone"
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            return "FlexAttention needs a C++ compiler, and there is no g++"
        return None

    def refuses(self, shape: Shape) -> str | None:
        return "FlexAttention has no backward on the CPU" if shape.training else None

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Each shape is compiled anew. Past a number of compilations PyTorch would run uncompiled.
        torch._dynamo.reset()
        attend: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        width = shape.L if shape.window is None else shape.window

        def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (k <= q) & (k > q - width)

        def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
            return k <= q

        mask: Any = None
        if shape.causal:
            rule = causal if shape.window is None else seen
            mask = create_block_mask(rule, None, None, shape.L, shape.S, device="cpu")
        query, key, value, shared = inputs.query, inputs.key, inputs.value, shape.G != shape.H
        return Prepared(lambda: attend(query, key, value, block_mask=mask, enable_gqa=shared), first)
