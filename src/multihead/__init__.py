"""Multi-head attention that you can see through.

`import multihead as mh` needs PyTorch only; what needs more is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .heads.registration import register_when_loaded

if TYPE_CHECKING:
    from . import nn
    from .accounting.plan import Plan, plan
    from .core.functional import attention, explain, observe
    from .core.masking import documents_from
    from .core.merge import merge
    from .core.pages import Pages
    from .core.sdpa import scaled_dot_product_attention
    from .core.statistics import Observation, Statistics
    from .heads.report import HeadReport, look
    from .heads.watch import watch
    from .nn.module import MultiHeadAttention

    __version__: str

_HOMES = {
    "attention": "core.functional",
    "observe": "core.functional",
    "explain": "core.functional",
    "Statistics": "core.statistics",
    "Observation": "core.statistics",
    "documents_from": "core.masking",
    "Pages": "core.pages",
    "merge": "core.merge",
    "scaled_dot_product_attention": "core.sdpa",
    "watch": "heads.watch",
    "look": "heads.report",
    "HeadReport": "heads.report",
    "plan": "accounting.plan",
    "Plan": "accounting.plan",
    "MultiHeadAttention": "nn.module",
}

__all__ = [
    "HeadReport",
    "MultiHeadAttention",
    "Observation",
    "Pages",
    "Plan",
    "Statistics",
    "__version__",
    "attention",
    "documents_from",
    "explain",
    "look",
    "merge",
    "nn",
    "observe",
    "plan",
    "scaled_dot_product_attention",
    "watch",
]


# transformers is not imported for this: its models know the name "multihead" from the moment that they exist.
register_when_loaded()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("multihead")
    if name == "nn":
        return import_module(".nn", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'multihead' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
