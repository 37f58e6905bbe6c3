"""The layer: multi-head attention as a PyTorch module, its positions, its caches, its heads."""

from .alibi import alibi_slopes
from .kv_cache import Cached, KVCache, PagedKVCache
from .module import MultiHeadAttention
from .record import Record
from .rotary import LinearScaling, Llama3Scaling, Rotary
from .torch_adapter import TorchMultiheadAttention
from .views import Factored, Head

__all__ = [
    "Cached",
    "Factored",
    "Head",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "MultiHeadAttention",
    "PagedKVCache",
    "Record",
    "Rotary",
    "TorchMultiheadAttention",
    "alibi_slopes",
]
