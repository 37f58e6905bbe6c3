"""Set the attention implementation of a running model to "multihead", and give it back."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from .interface import NAME


class _Switch:
    """The configs that are set to "multihead"; blocks may share one, the last to leave gives it back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: dict[int, tuple[Any, int, str | None]] = {}

    def hold(self, configs: list[Any]) -> None:
        with self.lock:
            for config in configs:
                _, holders, before = self.held.get(id(config), (config, 0, config._attn_implementation_internal))
                self.held[id(config)] = (config, holders + 1, before)
                config._attn_implementation_internal = NAME

    def release(self, configs: list[Any]) -> None:
        with self.lock:
            for config in configs:
                _, holders, before = self.held.pop(id(config))
                if holders > 1:
                    self.held[id(config)] = (config, holders - 1, before)
                else:
                    config._attn_implementation_internal = before


switch = _Switch()


def configs_of(model: nn.Module) -> list[Any]:
    """Every config that a part of the model reads its attention implementation from, each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            for name in getattr(config, "sub_configs", ()):
                add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())
