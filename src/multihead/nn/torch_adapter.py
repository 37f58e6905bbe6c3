"""PyTorch's own multi-head attention module, computed by this library: a one-word swap."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import cells, dropout
from ..core.finite import product
from ..core.functional import build_problem, run
from ..core.problem import Problem
from ..core.statistics import Statistics


class TorchMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` on top of `mh.attention`: its constructor, call, return and state dict.

    Three things differ. A key that is masked is not there at all, so a NaN in it reaches no row, and a row that sees
    no key gives zeros to the output projection (and weights of zero), where PyTorch gives NaN. Asking for weights
    changes no bit of the output. And `is_causal` is the hint that it claims to be: `attn_mask` decides in any case,
    where PyTorch follows a wrong hint in some calls and ignores it in others.

    Dropout is PyTorch's in distribution, not bit by bit; as there, the weights that are returned are those after
    dropout.

    Example:
        >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> layer = TorchMultiheadAttention(16, 4, batch_first=True)
        >>> layer.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 5, 16)
        >>> torch.allclose(layer(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
        True
    """

    def __init__(
        self,
        embed_dim,
        num_heads,
        dropout=0.0,
        bias=True,
        add_bias_kv=False,
        add_zero_attn=False,
        kdim=None,
        vdim=None,
        batch_first=False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        # In evaluation nn.TransformerEncoderLayer calls a fused kernel with this module's weights and passes the module
        # by, unless a hook is attached to it.
        self.register_forward_pre_hook(_be_called)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as `torch.nn.MultiheadAttention.forward` does. N is PyTorch's letter for the batch.

        Args:
            query: (L, embed_dim), or (L, N, embed_dim), or (N, L, embed_dim) with `batch_first`.
            key: (S, kdim), or with a batch as the query.
            value: (S, vdim), or with a batch as the query.
            key_padding_mask: (N, S), or (S,); bool, True = ignored, or float, added to the scores.
            need_weights: also return the weights, which takes memory of L x S.
            attn_mask: (L, S) or (N * num_heads, L, S); bool, True = may not attend, or float, added to the scores.
            average_attn_weights: the weights are averaged over the heads.
            is_causal: says that `attn_mask` is the causal mask, which may save time.

        Returns:
            the output, laid out as the query is, and the weights or None: ([N,] L, S) averaged, else
            ([N,] num_heads, L, S). With `add_bias_kv` and `add_zero_attn` S is longer by one each.

        Raises:
            ValueError, TypeError: an argument does not fit.
            RuntimeError: `is_causal` without `attn_mask`, as in PyTorch.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal: expected attn_mask with it, since it is a hint about that mask, got None")
        inputs = {"query": query, "key": key, "value": value}
        if any(x.is_nested for x in inputs.values()):
            return self._nested(inputs, key_padding_mask, need_weights, attn_mask, average_attn_weights)
        batched = query.ndim == 3
        self._check(inputs, 3 if batched else 2)
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = _transposed(query, key, value)
        hint = is_causal and self.bias_k is None and not self.add_zero_attn  # no key behind the causal ones
        rules = _rules(self.num_heads, query, key, key_padding_mask, attn_mask, hint)
        output, weights = self._attend(query, key, value, rules, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, rules: _Rules, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The output (B, L, embed_dim) and the weights (B, H, L, S) of inputs (B, length, width)."""
        q, k, v = self._project(query, key, value)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), -1, -1).to(k.dtype)], 1)
            v = torch.cat([v, self.bias_v.expand(len(v), -1, -1).to(v.dtype)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        rules = rules.with_open_keys(k.shape[1] - key.shape[1])
        problem = build_problem(
            *(x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v)),
            causal=rules.causal,
            query_start=0,
            mask=rules.mask,
            bias=rules.bias,
            query_mask=rules.query_mask,
            dropout_p=self.dropout if self.training else 0.0,
        )
        seen = run(problem, Statistics("lse") if need_weights else None)
        output = F.linear(seen.output.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        return output, _weights(problem, seen.lse.detach()) if need_weights else None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None and query is key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))

    def _nested(
        self,
        inputs: dict[str, Tensor],
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention of a nested tensor of sequences (length, embed_dim), as PyTorch has it: padded on the way."""
        x = inputs["query"]
        if not (inputs["key"] is x and inputs["value"] is x and self.batch_first):
            raise ValueError("query, key, value: expected one and the same nested tensor, with batch_first=True")
        if key_padding_mask is not None or attn_mask is not None:
            raise ValueError("key_padding_mask, attn_mask: expected None with a nested tensor, whose lengths say it")
        lengths = [len(one) for one in x.unbind()]
        padded = torch.nested.to_padded_tensor(x, 0.0)
        there = torch.arange(padded.shape[1], device=padded.device) < padded.new_tensor(lengths)[:, None]
        rules = _Rules(mask=there[:, None, None], query_mask=there)
        output, weights = self._attend(padded, padded, padded, rules, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        rows = [one[:n] for one, n in zip(output, lengths)]
        return torch.nested.as_nested_tensor(rows, layout=x.layout), weights

    def _check(self, inputs: dict[str, Tensor], axes: int) -> None:
        """Check the shapes of query, key and value against the constructor's and against each other."""
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        sizes: dict[str, int] = {}
        for name, tensor in inputs.items():
            length, shape = "L" if name == "query" else "S", tuple(tensor.shape)
            letters = (length,) if axes == 2 else ("N", length) if self.batch_first else (length, "N")
            fits = len(shape) == axes and shape[-1] == widths[name]
            if not fits or any(sizes.get(letter, n) != n for letter, n in zip(letters, shape)):
                known = "".join(f", {letter}={sizes[letter]}" for letter in letters if letter in sizes)
                raise ValueError(f"{name}: expected ({', '.join(letters)}, {widths[name]}){known}, got {shape}")
            sizes |= zip(letters, shape)


def _be_called(module: nn.Module, inputs: tuple) -> None:
    """A hook that does nothing but be there."""


def _transposed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each with its first two axes exchanged; what was one tensor stays one, so that it is projected at once."""
    turned = query.transpose(0, 1)
    key_turned = turned if key is query else key.transpose(0, 1)
    return turned, key_turned, key_turned if value is key else value.transpose(0, 1)


@dataclass(frozen=True)
class _Rules:
    """PyTorch's masks in the words of `mh.attention`: each broadcasts to (B, H, L, S)."""

    mask: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    query_mask: Tensor | None = None

    def with_open_keys(self, n: int) -> _Rules:
        """The same with n more keys behind the others, which every query sees."""
        if n == 0:
            return self
        mask, bias = self.mask, self.bias
        return replace(
            self,
            mask=None if mask is None else F.pad(mask, (0, n), value=True),
            bias=None if bias is None else F.pad(bias, (0, n)),
        )


def _rules(
    heads: int,
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> _Rules:
    """What the two masks of PyTorch say; `is_causal` allows to look whether attn_mask is the causal one."""
    (B, L), S = query.shape[:2], key.shape[1]
    masks, biases, causal = [], [], False
    for name, given in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if given is None:
            continue
        shapes = {"key_padding_mask": [(B, S)], "attn_mask": [(L, S), (B * heads, L, S)]}[name]
        shape = tuple(given.shape)
        if shape not in shapes:
            letters = "(N, S)" if name == "key_padding_mask" else "(L, S) or (N * num_heads, L, S)"
            raise ValueError(f"{name}: expected {letters} = {' or '.join(map(str, shapes))}, got {shape}")
        if given.dtype is not torch.bool and not given.dtype.is_floating_point:
            raise TypeError(f"{name}: expected bool, True = hidden, or floats to be added to scores, got {given.dtype}")
        if name == "key_padding_mask":
            given = given[:, None, None]
        elif is_causal and _is_causal(given):
            causal = True
            continue
        else:
            given = given.view(B, heads, L, S) if given.ndim == 3 else given[None, None]
        if given.dtype is torch.bool:
            masks.append(~given)
        else:
            biases.append(given)
    mask = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
    bias = biases[0] + biases[1] if len(biases) == 2 else biases[0] if biases else None
    return _Rules(mask, bias, causal)


def _is_causal(mask: Tensor) -> bool:
    """Whether a mask is PyTorch's causal one; it is not looked at where that would stop a device or break a graph."""
    if mask.requires_grad or mask.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    hidden = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
    if mask.dtype is torch.bool:
        return bool((mask == hidden).all())
    return bool((mask == torch.zeros(()).masked_fill(hidden, -torch.inf)).all())


def _weights(problem: Problem, lse: Tensor) -> Tensor:
    """The weights (B, H, L, S) after dropout, in the query's type, as autograd follows them."""
    p = problem
    weights = _Weights.apply(p.query, p.key, p.bias, lse, p)
    if p.dropout_p:
        index = (torch.arange(n, device=lse.device) for n in weights.shape)
        weights = weights * dropout.factors(p, weights.dtype, *index)
    return weights.to(p.query.dtype)


class _Weights(torch.autograd.Function):
    """Exact weights with their gradient, ds = A * (dA - sum A dA); an invisible NaN is no term of it."""

    @staticmethod
    def forward(ctx, query, key, bias, lse, problem: Problem):
        weights = cells.weights(problem, lse)
        ctx.problem = problem
        ctx.save_for_backward(query, key, bias, weights)
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        query, key, bias, weights = ctx.saved_tensors
        p = ctx.problem
        visible = p.visible().expand(weights.shape)
        change = weights * (upstream - (weights * upstream).sum(-1, keepdim=True))
        change = change.masked_fill(~visible, 0)
        back = product(change, key.to(change.dtype), visible) * p.scale
        turned = product(change.mT, query.to(change.dtype), visible.mT) * p.scale
        of_bias = change.sum_to_size(bias.shape).to(bias.dtype) if ctx.needs_input_grad[2] else None
        return back.to(query.dtype), turned.to(key.dtype), of_bias, None, None
