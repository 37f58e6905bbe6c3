"""Hugging Face's attention interface: the function that `attn_implementation="multihead"` runs in each layer.

See `transformers.AttentionInterface`. The mask that comes is one that `masks.make_mask` made, or one that the
caller of the model made, or None.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core import functional, ops
from ..core.axes import check_broadcast
from ..core.masking import Visibility
from ..core.problem import Problem
from .masks import GraphMask, MaskTensor, read_mask

NAME = "multihead"


class Observer(Protocol):
    """Who sees the attention of a thread: `watch` puts itself here."""

    def attend(
        self, module: int, problem: Problem, key_padding: Tensor | None, in_graph: bool = False
    ) -> Tensor | None:
        """Observe a layer and return its output (B, H, L, E), or None for a layer that is not watched.

        Args:
            module: the id of the layer's module.
            key_padding: (B, S), False at padding keys, or None where nothing is known.
            in_graph: the call comes from a compiled graph that runs.
        """
        ...


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.observers: list[Observer] = []


_of_thread = _OfThread()
_lock = threading.Lock()
_n_observers = 0
# Whether any thread observes. Graphs are traced for either case: in an observed one each attention says whose it is.
_is_observed = False


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer see the attention of this thread."""

    def count(more: int) -> None:
        global _n_observers, _is_observed
        with _lock:
            _n_observers += more
            _is_observed = _n_observers > 0

    _of_thread.observers.append(observer)
    count(1)
    try:
        yield
    finally:
        _of_thread.observers.remove(observer)
        count(-1)


def _observe(module: int, problem: Problem, key_padding: Tensor | None, in_graph: bool = True) -> Tensor | None:
    """Let the observers of this thread see a layer; the output, or None if none of them watches it."""
    output = None
    if torch._C._current_graph_task_id() != -1:  # a checkpoint's second forward, in the backward pass
        return None
    for observer in _of_thread.observers:
        seen = observer.attend(module, problem, key_padding, in_graph)
        output = seen if output is None else output
    return output


ops.observer = _observe


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as models call it.

    Args:
        query: (B, H, L, D), or (1, H, L, D) where learned queries serve a whole batch.
        key, value: (B, G, S, D), (B, G, S, E).
        attention_mask: a MaskTensor, or the caller's own mask: bool, or float to add, (B|1, H|1, L|1, S).
        scaling: factor of q.k, 1/sqrt(D) by default.
        is_causal: whether keys after a query are hidden where no mask came; by default what the module says.
        s_aux: (H,), sinks.
        position_bias: (B|1, H|1, L, S), a bias.
        kwargs: what other implementations read, such as sliding_window (our mask has it already).

    Returns:
        The output, (B, L, H, E), and None in place of weights.

    Raises:
        ValueError: `output_attentions=True` came with the call.
    """
    if kwargs.get("output_attentions") or _weights_are_collected():
        raise ValueError(NO_WEIGHTS)
    if query.shape[0] != key.shape[0] and query.shape[0] == 1:
        query = query.expand(key.shape[0], -1, -1, -1)
    problem = problem_of(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, softcap, s_aux, position_bias
    )
    key_padding = attention_mask.key_padding if isinstance(attention_mask, (MaskTensor, GraphMask)) else None
    if ops.is_traced(problem.query):
        layer, padding = (id(module), key_padding) if _is_observed else (0, None)
        output = ops.run(problem, None, "auto", layer, padding).output
    else:
        output = _observe(id(module), problem, key_padding, False) if _of_thread.observers else None
        output = functional.run(problem, None).output if output is None else output
    return output.transpose(1, 2).contiguous(), None


def _weights_are_collected() -> bool:
    """Whether `output_attentions=True` waits for a layer's weights without being passed to the layer."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    collected = collector.get() if collector is not None else None
    return bool(collected) and any("attentions" in name for name in collected)


NO_WEIGHTS = (
    'output_attentions=True: attn_implementation="multihead" never forms the L x S weights. Statistics come '
    'from multihead.watch; for exact weights of a slice: `with multihead.watch(model, keep=("query", "key")) '
    "as record`, then record.weights(layer, head, rows, keys)"
)


def problem_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    softcap: float | None,
    s_aux: Tensor | None,
    position_bias: Tensor | None,
) -> Problem:
    """The attention problem that a layer's call means."""
    B, H, L, S = *query.shape[:3], key.shape[2]
    bias = position_bias
    if isinstance(attention_mask, (MaskTensor, GraphMask)):
        visibility = attention_mask.fitted(B, H, L, S)
    elif attention_mask is None:
        # As with SDPA: a module that says it is causal relies on it where no mask came, but for one query.
        causal = L > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        visibility = Visibility(B, H, L, S, query_start=0 if causal else S - L, causal=causal, device=query.device)
    else:
        mask, added = read_mask(
            check_broadcast("attention_mask", attention_mask, "BHLS", {"B": B, "H": H, "L": L, "S": S})
        )
        visibility = Visibility(B, H, L, S, query_start=S - L, mask=mask, device=query.device)
        bias = bias if added is None else added if bias is None else added + bias
    problem = functional.build_problem(
        query, key, value, bias=bias, scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout
    )
    return replace(problem, visibility=visibility)
