"""The layer: multi-head attention as a PyTorch module, its positions, its caches, its heads."""

from .alibi import alibi_slopes
from .c_source import CSource, c_source
from .convert import from_module, from_safetensors, tensors_for, to_module
from .design import HeadDesign, head_for
from .kv_cache import Cached, CachedPages, KVCache, PagedKVCache
from .layer_file import load, save
from .module import MultiHeadAttention
from .record import Record
from .rotary import LinearScaling, Llama3Scaling, Rotary
from .torch_adapter import TorchMultiheadAttention
from .views import Factored, Head

__all__ = [
    "CSource",
    "Cached",
    "CachedPages",
    "Factored",
    "Head",
    "HeadDesign",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "MultiHeadAttention",
    "PagedKVCache",
    "Record",
    "Rotary",
    "TorchMultiheadAttention",
    "alibi_slopes",
    "c_source",
    "from_module",
    "from_safetensors",
    "head_for",
    "load",
    "save",
    "tensors_for",
    "to_module",
]
