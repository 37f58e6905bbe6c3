"""JAX's dot_product_attention, compiled by XLA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from ..machine import cores
from ..shapes import Shape
from .base import Peer, Prepared, missing


class JaxXla(Peer):
    """jax.jit(jax.nn.dot_product_attention) on JAX's CPU device; gradients by jax.vjp, jitted too."""

    name = "jax"
    about = "jax.nn.dot_product_attention, jitted"

    def available(self) -> str | None:
        reason = missing("jax")
        if reason is None and torch.get_num_threads() != cores():
            return f"JAX takes every core, and the others run on {torch.get_num_threads()} threads"
        return reason

    def refuses(self, shape: Shape) -> str | None:
        if shape.dtype == "float16":
            return "JAX multiplies no float16 on the CPU for it"
        if shape.E != shape.D:
            return "JAX has one width of keys and values"
        if shape.score_bytes > 1 << 30:
            return f"XLA keeps the scores in memory, {shape.score_bytes / 1e9:.1f} GB here"
        return None

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        import jax
        import jax.numpy as jnp
        import numpy as np

        s, cpu = shape, jax.devices("cpu")[0]

        def there(x: Tensor) -> Any:
            # By way of float32: NumPy has no bfloat16 of PyTorch's. JAX wants (B, L, H, D).
            return jax.device_put(jnp.asarray(x.float().transpose(1, 2).numpy(), dtype=s.dtype, device=cpu), cpu)

        def back(x: Any) -> Tensor:
            return torch.from_numpy(np.array(x, dtype=np.float32)).transpose(1, 2).to(s.torch_dtype)

        def attend(query: Any, key: Any, value: Any) -> Any:
            return jax.nn.dot_product_attention(
                query, key, value, is_causal=s.causal, implementation="xla",
                local_window_size=None if s.window is None else (s.window - 1, 0),
            )  # fmt: skip

        def step(query: Any, key: Any, value: Any, gradient: Any) -> Any:
            return jax.vjp(attend, query, key, value)[1](gradient)

        tensors = [there(x) for x in (inputs.query, inputs.key, inputs.value)]
        if s.training:
            tensors.append(there(inputs.gradient))
            compiled = jax.jit(step)
            return Prepared(
                lambda: jax.block_until_ready(compiled(*tensors)), lambda found: tuple(back(x) for x in found)
            )
        compiled = jax.jit(attend)
        return Prepared(lambda: jax.block_until_ready(compiled(*tensors)), lambda found: (back(found),))
