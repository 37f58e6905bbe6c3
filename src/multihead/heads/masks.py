"""The mask side of Hugging Face's attention interface: a mask stays bounds and lengths, never L x S cells.

A model asks for its mask once a forward and hands it, untouched, to every layer. `make_mask` answers with a
`MaskTensor`: to the model's code it is the 4-D boolean mask that SDPA would have got, but it holds no cells.
Our attention function reads its `visibility`; what else touches it gets the cells, made at that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core import masking
from ..core.masking import Visibility
from .mask_rules import is_causal, recognise

_CELLS_AT_ONCE = 1 << 22


def to_device(visibility: Visibility, device: torch.device) -> Visibility:
    """The same visibility on another device."""
    moved = [None if tensor is None else tensor.to(device) for tensor in visibility.tensors()]
    return replace(visibility.with_tensors(moved, visibility.B), device=device)


def _is_batchless(visibility: Visibility) -> bool:
    """Whether it says nothing of single sequences, so that it serves any B."""
    return all(tensor is None for tensor in visibility.tensors())


class MaskTensor(Tensor):
    """A boolean mask (B, 1, L, S), True = may attend, that makes its cells only when something reads them.

    Attributes:
        visibility: which keys each query sees.
        key_padding: (B, S), False at padding keys, or None where there is none.
    """

    visibility: Visibility
    key_padding: Tensor | None
    _fitted: dict[tuple[int, int], Visibility]

    @staticmethod
    def of(visibility: Visibility, key_padding: Tensor | None) -> MaskTensor:
        nothing = torch.zeros(1, dtype=torch.bool, device=visibility.device)
        mask = nothing.expand(visibility.B, 1, visibility.L, visibility.S).as_subclass(MaskTensor)
        mask.visibility, mask.key_padding = visibility, key_padding
        mask._fitted = {}
        return mask

    def fitted(self, B: int, H: int, L: int, S: int) -> Visibility:
        """The visibility for a layer of these sizes; layers of equal sizes get the same object.

        Raises:
            ValueError: the layer has another number of queries or keys than the mask was made for.
        """
        if (B, H) not in self._fitted:
            seen = self.visibility
            if (L, S) != (seen.L, seen.S) or (B != seen.B and not _is_batchless(seen)):
                raise ValueError(
                    f"attention_mask: the model made it for (B={seen.B}, L={seen.L}, S={seen.S}), "
                    f"a layer has (B={B}, L={L}, S={S})"
                )
            self._fitted[B, H] = replace(seen, B=B, H=H)
        return self._fitted[B, H]

    def cells(self) -> Tensor:
        """The mask as a plain tensor: bool (B, 1, L, S)."""
        # Padding queries are open here as in SDPA's mask: models that read masks expect that.
        visible = replace(self.visibility, query_mask=None).dense()
        return visible.expand(self.visibility.B, 1, -1, -1)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ABOUT_THE_SHAPE:
            return super().__torch_function__(func, types, args, kwargs)
        if func in _SAME_CELLS and isinstance(args[0], MaskTensor):
            return args[0]
        if func is Tensor.to and isinstance(args[0], MaskTensor):
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
            if dtype in (None, torch.bool):
                return args[0] if device in (None, args[0].device) else args[0]._moved(device)
        if func in _ADDITION:
            raise RuntimeError(
                "this model adds its attention mask to scores that it computes itself: it bypasses Hugging "
                'Face\'s attention interface, and attn_implementation="multihead" cannot serve it; load it '
                'with "eager"'
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_with_cells(args), **_with_cells(kwargs))

    def _moved(self, device: torch.device) -> MaskTensor:
        padding = None if self.key_padding is None else self.key_padding.to(device)
        return MaskTensor.of(to_device(self.visibility, device), padding)

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"MaskTensor(shape={tuple(self.shape)}, {self.visibility})"


_ABOUT_THE_SHAPE = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_contiguous,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "is_cuda", "layout", "requires_grad", "grad_fn")
    ),
}
_SAME_CELLS = {Tensor.contiguous, Tensor.detach, Tensor.clone, Tensor.bool}
_ADDITION = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}


def _with_cells(value: Any) -> Any:
    if isinstance(value, MaskTensor):
        return value.cells()
    if isinstance(value, (tuple, list)):
        return type(value)(_with_cells(part) for part in value)
    if isinstance(value, dict):
        return {key: _with_cells(part) for key, part in value.items()}
    return value


def make_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = True,
    device: torch.device | str | None = None,
    cache_position: Tensor | None = None,
    **unused: Any,
) -> MaskTensor | GraphMask:
    """The mask function registered with `transformers.AttentionMaskInterface`.

    Args:
        batch_size, q_length, kv_length: B, L, S.
        q_offset, kv_offset: positions of the first query and of the first key in the model's own counting.
        mask_function: the rule, of (batch, head, query, key) indices.
        attention_mask: (B, at least as long as the keys seen so far), True at real tokens.
        use_vmap: whether an unknown rule must see one cell at a time; early releases never say, always do.
        cache_position: (L,), how early releases give q_length and q_offset.

    Returns:
        A mask (B, 1, L, S).
    """
    if q_length is None:
        assert cache_position is not None
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    device = device or "cpu"
    if torch.compiler.is_compiling():
        own = "allow_is_bidirectional_skip" not in unused
        return _graph_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap, own, device
        )
    start, first_key = int(q_offset), int(kv_offset)
    keys = _key_padding(attention_mask, first_key, kv_length, device)
    rule: dict[str, Any] = {}
    bounds = recognise(mask_function) if mask_function is not None else None
    if bounds is not None:
        rule = {"causal": bounds.causal, "window": (bounds.left, bounds.right), "document_ids": bounds.packed}
        if bounds.chunk is not None:
            size, left_padding = bounds.chunk
            j = torch.arange(first_key, first_key + kv_length, device=device)
            # S is added so that no chunk, of padding either, has the number -1: padding is the mask's affair.
            rule["document_ids"] = (j - left_padding.to(device)[:, None]) // size + kv_length
    elif mask_function is not None:
        q = torch.arange(start, start + q_length, device=device)
        k = torch.arange(first_key, first_key + kv_length, device=device)
        rule = _evaluate(mask_function, use_vmap, batch_size, q, k)
    mask = rule.pop("mask", None)
    if keys is not None:
        mask = keys[:, None, None, :] if mask is None else mask & keys[:, None, None, :]
    own = mask_function is not None and is_causal(mask_function)
    rows = _real_queries(keys, start - first_key, q_length) if own else None
    visibility = Visibility(
        batch_size,
        1,
        q_length,
        kv_length,
        query_start=start - first_key,
        mask=mask,
        query_mask=rows,
        device=device,
        **rule,
    )
    return MaskTensor.of(visibility, keys)


def _graph_mask(
    B: int,
    L: int,
    S: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    mask_function: Callable | None,
    attention_mask: Tensor | None,
    use_vmap: bool,
    own: bool,
    device: torch.device | str,
) -> GraphMask:
    """`make_mask` while a graph is traced: no value is looked at, and positions may be tensors.

    Args:
        own: queries and keys are the same tokens, so that the padding among the keys is that of the queries.
    """
    start = q_offset - kv_offset
    where = kv_offset + torch.arange(S, device=device)
    keys = rows = None
    if attention_mask is not None:
        real = attention_mask.to(device, torch.bool)
        keys = real[:, where.clamp(max=real.shape[1] - 1)] & (where < real.shape[1])
    # The rule of a decoder; what it is composed of cannot be read in a graph, so other rules become cells.
    name = "" if mask_function is None else mask_function.__name__
    mask = None
    if name not in ("", "causal_mask_function", "bidirectional_mask_function"):
        assert mask_function is not None
        mask = _cells(mask_function, use_vmap, B, q_offset + torch.arange(L, device=device), where)
    if keys is not None:
        mask = keys[:, None, None, :] if mask is None else mask & keys[:, None, None, :]
        if own:
            p = start + torch.arange(L, device=device)
            rows = keys[:, p.clamp(0, S - 1)] | (p >= S)
    if isinstance(start, Tensor):
        start = start.expand(B)
    causal = name == "causal_mask_function"
    visibility = Visibility(B, 1, L, S, start, causal, mask=mask, query_mask=rows, device=device)
    return GraphMask(visibility, keys)


class GraphMask:
    """What MaskTensor is, while a graph is traced: a plain object, since graphs do not know tensors without cells.

    Attributes:
        visibility, key_padding: as those of MaskTensor.
    """

    def __init__(self, visibility: Visibility, key_padding: Tensor | None) -> None:
        self.visibility, self.key_padding = visibility, key_padding
        self.shape = (visibility.B, 1, visibility.L, visibility.S)
        self.ndim, self.dtype, self.device = 4, torch.bool, visibility.device

    def fitted(self, B: int, H: int, L: int, S: int) -> Visibility:
        """The visibility for a layer of these sizes."""
        return replace(self.visibility, B=B, H=H)

    def cells(self) -> Tensor:
        """The mask as a tensor: bool (B, 1, L, S)."""
        visible = replace(self.visibility, query_mask=None).dense()
        return visible.expand(self.visibility.B, 1, -1, -1)

    def dim(self) -> int:
        return self.ndim

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self.cells().to(*args, **kwargs)

    def __getitem__(self, index: Any) -> Tensor:
        return self.cells()[index]


def _key_padding(attention_mask: Tensor | None, first_key: int, S: int, device) -> Tensor | None:
    """Which of the S keys are real tokens, (B, S), None when all are; those beyond the mask are not."""
    if attention_mask is None:
        return None
    real = attention_mask.to(device, torch.bool)
    real = torch.nn.functional.pad(real, (0, max(0, first_key + S - real.shape[1])))[:, first_key : first_key + S]
    return None if bool(real.all()) else real


def _real_queries(keys: Tensor | None, start: int, L: int) -> Tensor | None:
    """Which queries of a self-attention are real tokens, (B, L), or None when all are."""
    if keys is None:
        return None
    rows = keys[:, start : start + L]
    return None if rows.shape[1] < L or bool(rows.all()) else rows


def _evaluate(rule: Callable, use_vmap: bool, B: int, q: Tensor, k: Tensor) -> dict[str, Any]:
    """An unknown rule, some rows at a time: runs where each row sees one, else cells, bool (B, 1, L, S)."""
    step = max(1, _CELLS_AT_ONCE // max(1, B * len(k)))
    blocks = [q[i : i + step] for i in range(0, max(1, len(q)), step)]
    runs = []
    for rows in blocks:
        run = masking._mask_runs(_cells(rule, use_vmap, B, rows, k)[:, 0], len(k))
        if run is None:
            return {"mask": torch.cat([_cells(rule, use_vmap, B, rows, k) for rows in blocks], 2)}
        runs.append(run)
    begins, ends = zip(*runs, strict=True)
    return {"runs": torch.stack([torch.cat(begins, 1), torch.cat(ends, 1)], -1)}


def _cells(rule: Callable, use_vmap: bool, B: int, q: Tensor, k: Tensor) -> Tensor:
    """Cells of a rule: bool (B, 1, len(q), len(k)). Both ways are those of transformers' own `sdpa_mask`."""
    b, h = torch.arange(B, device=q.device), torch.zeros(1, dtype=torch.int64, device=q.device)
    if not use_vmap:
        cells = rule(b[:, None, None, None], h[None, :, None, None], q[None, None, :, None], k[None, None, None, :])
        return cells.expand(B, 1, len(q), len(k))
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        rule = torch.vmap(rule, in_dims=dims, out_dims=0)
    with TransformGetItemToIndex():
        return rule(b, h, q, k)


def read_mask(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A caller's own mask (B|1, H|1, L|1, S|1) as a boolean one and a bias, None for what it does not say.

    Of a float mask, values at or below the lowest of its type, and -inf, hide a key; the others are a bias.

    Raises:
        TypeError: it holds integers.
    """
    if mask.dtype is torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise TypeError(f"attention_mask: expected a boolean mask or a float one to add, got {mask.dtype}")
    # All layers get one tensor, so its reading stays with it; not where it can change unseen.
    lasting = not mask.requires_grad and not mask.is_inference()
    known = getattr(mask, "_multihead_reading", None) if lasting else None
    if known is not None and known[0] == mask._version:
        return known[1]
    hidden = mask <= torch.finfo(mask.dtype).min
    bias = mask.masked_fill(hidden, 0)
    reading = (
        ~hidden if bool(hidden.any()) else None,
        bias if mask.requires_grad or bool(bias.any()) else None,
    )
    if lasting:
        mask._multihead_reading = (mask._version, reading)  # pyright: ignore[reportAttributeAccessIssue]
    return reading
