"""MultiHeadAttention, the layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.functional import Window, attention, observe
from ..core.pages import Pages
from . import projections, surgery
from .alibi import alibi_slopes
from .call import Call, check_input, four_axes, of_key_head
from .kv_cache import KVCache, PagedKVCache
from .projections import PARTS, Part
from .record import Record
from .rotary import Rotary, Tables
from .views import Head

_LAYOUTS = ("packed", "separate")
_EXECUTIONS = ("parallel", "sequential")
_GATES = (False, True, "elementwise", "headwise")


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), with what later models changed in it.

    For x (B, L, d_model) and, in cross-attention, a context (B, S, d_context), else context = x, head h gives

        o_h = softmax(scale * (x W_Q,h^T) (context W_K,g^T)^T) (context W_V,g^T),    g = h // (H // G)
        y   = [o_0, ..., o_{H-1}] W_O^T = sum over h of o_h W_O,h^T

    Matrices have nn.Linear's form, rows are outputs: W_Q (H*D, d_model), W_K (G*D, d_context), W_V (G*E, d_context),
    W_O (d_model, H*E). The paper's W_i^Q is W_Q,h^T, its d_k is D, its d_v is E, its h is H. Every head projects all
    of x; what is narrow is what it makes of it.

    Args:
        d_model: width of x and of the output.
        n_heads: H.
        n_kv_heads: G, a divisor of H; H (MHA) by default, 1 is MQA (Shazeer 2019), between is GQA
            (Ainslie et al. 2023).
        d_head: D, by default d_model / H.
        d_value: E, by default D.
        d_context: width of the context of a layer that attends to another sequence only; by default the layer has
            matrices for d_model, and attends to x or to a context of the same width.
        bias: biases of Q, K and V: for all, or three bools (q, k, v).
        output_bias: a bias of W_O, by default where any of Q, K, V has one.
        causal: a token sees itself and what is before it.
        window: (left, right), how far it sees; None is an open side.
        rotary: `Rotary(...)`, for self-attention.
        alibi: linear biases instead of positions (Press et al. 2021), or the slopes (H,) themselves.
        qk_norm: "rms" normalises queries and keys of each head before they are turned (as Qwen3 does), or None.
        softcap: c in c * tanh(score / c) (Gemma 2).
        sinks: a learned logit a head that takes weight and gives no value (gpt-oss).
        gate: heads' outputs times sigmoid(x W_G^T) (Qiu et al. 2025, Gated Attention for Large Language Models): True
            or "elementwise" has a gate for each component, "headwise" one a head.
        dropout: share of the weights dropped in training.
        scale: of scores, by default 1 / sqrt(D).
        layout: "packed" holds Q, K and V in one matrix and multiplies once; "separate" has a matrix each. Equal to
            rounding, and either loads the other's state dict.
        execution: "parallel", or "sequential": one head after another, its projections included, in one head's
            working memory. Equal to rounding.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> layer = MultiHeadAttention(512, 8)
        >>> layer(torch.randn(2, 20, 512)).shape, sum(p.numel() for p in layer.parameters())
        (torch.Size([2, 20, 512]), 1048576)
    """

    # The form of the state dict: raised when names or shapes change, for old files to be told apart.
    _version = 1

    alibi_slopes: Tensor | None
    sinks: Tensor | None

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        d_head: int | None = None,
        d_value: int | None = None,
        d_context: int | None = None,
        bias: bool | tuple[bool, bool, bool] = False,
        output_bias: bool | None = None,
        causal: bool = False,
        window: Window | None = None,
        rotary: Rotary | None = None,
        alibi: bool | Sequence[float] | Tensor = False,
        qk_norm: str | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gate: bool | str = False,
        dropout: float = 0.0,
        scale: float | None = None,
        layout: str = "packed",
        execution: str = "parallel",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        for name, size in (("d_model", d_model), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
            _check_size(name, size)
        if n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads: expected a number G that divides the H={n_heads} heads, got G={n_kv_heads}")
        if d_head is None:
            if d_model % n_heads:
                raise ValueError(
                    f"n_heads: expected a divisor of d_model={d_model}, got H={n_heads}: "
                    f"{d_model} is not divisible by {n_heads}; a width that is no quotient is said with d_head="
                )
            d_head = d_model // n_heads
        d_value = d_head if d_value is None else d_value
        width = d_model if d_context is None else d_context
        for name, size in (("d_head", d_head), ("d_value", d_value), ("d_context", width)):
            _check_size(name, size)
        biases = (bias,) * 3 if isinstance(bias, bool) else bias
        if not isinstance(biases, tuple | list) or len(biases) != 3 or not all(isinstance(b, bool) for b in biases):
            raise TypeError(f"bias: expected a bool, or three of them for (q, k, v), got {bias!r}")
        _check_choice("layout", layout, _LAYOUTS)
        _check_choice("execution", execution, _EXECUTIONS)
        _check_choice("qk_norm", qk_norm, (None, "rms"))
        _check_choice("gate", gate, _GATES)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout: expected a share from 0 to 1, got {dropout}")
        if rotary is not None:
            rotary.turning(d_head)
        if d_context is not None and (rotary is not None or alibi is not False):
            raise ValueError("d_context: expected no rotary and no alibi with it: positions are of one sequence")

        self.d_model, self.n_heads, self.n_kv_heads = d_model, n_heads, n_kv_heads
        self.d_head, self.d_value, self.d_context = d_head, d_value, d_context
        self.biases = tuple(biases)
        self.output_bias = any(biases) if output_bias is None else bool(output_bias)
        self.causal, self.window, self.rotary, self.qk_norm = causal, window, rotary, qk_norm
        self.softcap, self.dropout, self.scale = softcap, dropout, scale
        self.gate = "elementwise" if gate is True else gate
        self.layout, self.execution = layout, execution
        self.ablations: list[surgery.Ablation] = []

        made: dict[str, Any] = {"dtype": dtype, "device": device}
        rows = (n_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_value)
        widths = (d_model, width, width)
        self.parts = {name: Part(*part) for name, part in zip(PARTS, zip(rows, widths, biases))}
        self.runs = projections.runs_of(layout, d_context is not None)
        for run in self.runs:
            self.add_module(f"W_{run}", projections.make([self.parts[part] for part in run], **made))
        self.W_O = nn.Linear(n_heads * d_value, d_model, self.output_bias, **made)
        gates = {"elementwise": n_heads * d_value, "headwise": n_heads}
        self.W_G = nn.Linear(d_model, gates[self.gate], False, **made) if self.gate else None
        self.q_norm = nn.RMSNorm(d_head, eps=1e-6, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(d_head, eps=1e-6, **made) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(n_heads, **made)) if sinks else None
        self.register_buffer("alibi_slopes", _slopes(alibi, n_heads, device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew.

        Every matrix is uniform with variance 1 / fan_in (LeCun et al. 1998), so that x of unit variance gives queries,
        keys and values of unit variance, scores too (their scale is 1 / sqrt(D)), and no softmax begins saturated.
        Where H*D = d_model this is Xavier's rule; unlike that, it depends neither on the layout nor on H or G.
        Biases and sinks are 0, norms 1.
        """
        for run in self.runs:
            _draw(self.get_submodule(f"W_{run}"))
        _draw(self.W_O)
        if self.W_G is not None:
            _draw(self.W_G)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        key_lengths: Tensor | Sequence[int] | None = None,
        query_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | PagedKVCache | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """Attend from x to itself, or to a context.

        Args:
            x: (B, L, d_model).
            context: (B, S, d_context), what keys and values are made of; x by default.
            mask: bool, broadcasts to (B, H, L, S), True = may attend; S counts the tokens of a cache too.
            bias: float, broadcasts to (B, H, L, S), added to the scores.
            key_lengths: (B,), how many tokens of x (of the context, where there is one) are real: the first ones.
            query_mask: (B, L), False = padding, gives W_O's bias alone and enters no statistic.
            document_ids: (B, S), -1 = padding; a token sees its own document only.
            cache: takes the keys and values of x, and gives those of the tokens before. With a context the first call
                fills it, and later calls read it without projecting the context again.
            record: takes the statistics that it asks for; the output is the same.

        Returns:
            (B, L, d_model).

        Raises:
            ValueError, TypeError: an argument does not fit.
        """
        call = self._prepare(x, context, mask, bias, key_lengths, query_mask, document_ids, cache)
        if self.execution == "sequential":
            return self._one_after_another(call, record)
        return self.W_O(self._all_heads(call, record).transpose(1, 2).flatten(2))

    def head_outputs(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        """What each head gives to W_O, gate and ablations included: (B, H, L, E). Options are those of `forward`."""
        record = options.pop("record", None)
        return self._all_heads(self._prepare(x, context, **options), record)

    def contributions(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        """What each head adds to the output: (B, H, L, d_model); their sum and W_O's bias are the output."""
        outputs = self.head_outputs(x, context, **options)
        return torch.einsum("bhle,mhe->bhlm", outputs, self.W_O.weight.unflatten(1, (self.n_heads, self.d_value)))

    def head(self, index: int) -> Head:
        """One head's matrices as views of the layer's parameters (see `views.Head`).

        Raises:
            IndexError: there is no such head.
        """
        return Head(self, index)

    @property
    def heads(self) -> list[Head]:
        """Every head, in order."""
        return [Head(self, index) for index in range(self.n_heads)]

    @contextmanager
    def ablate(self, heads: Iterable[int], method: str = "zero", mean: Tensor | None = None) -> Iterator[None]:
        """Replace what heads give to W_O, inside a with block; blocks nest, and each takes its own back at its end.

        Args:
            heads: their numbers.
            method: "zero", or "mean": each row gets the mean over all rows of the call (of query_mask, where given).
            mean: (n, E), what to put in the place of each head instead, such as its mean over other texts.

        Raises:
            IndexError: there is no such head.
            ValueError: an argument does not fit.
        """
        ablation = surgery.Ablation.of(self, heads, method, mean)
        self.ablations.append(ablation)
        try:
            yield
        finally:
            self.ablations.remove(ablation)

    def prune_heads(self, heads: Iterable[int]) -> MultiHeadAttention:
        """A new layer without these heads, which gives what this one gives with them ablated to zero.

        With grouped heads it takes as many from each group, or whole groups, whose key/value heads go too.

        Raises:
            IndexError: there is no such head.
            ValueError: no head would be left, or groups would differ in size.
        """
        return surgery.prune_heads(self, heads)

    def group(self, n_kv_heads: int, method: str = "mean") -> MultiHeadAttention:
        """A new layer of fewer key/value heads, each the mean or the first of those that it stands for.

        The mean is what Ainslie et al. 2023 (section 2.1) convert checkpoints with, before further training.

        Raises:
            ValueError: `n_kv_heads` does not divide G, or the method is unknown.
        """
        return surgery.group(self, n_kv_heads, method)

    def options(self) -> dict[str, Any]:
        """The arguments that make such a layer, type and device included."""
        names = "d_model n_heads n_kv_heads d_head d_value d_context output_bias causal window rotary qk_norm softcap"
        weight = self.W_O.weight
        return {
            **{
                name: getattr(self, name)
                for name in (*names.split(), "gate", "dropout", "scale", "layout", "execution")
            },
            "bias": self.biases,
            "alibi": False if self.alibi_slopes is None else self.alibi_slopes,
            "sinks": self.sinks is not None,
            "dtype": weight.dtype,
            "device": weight.device,
        }

    def with_options(self, **changes: Any) -> MultiHeadAttention:
        """A new layer of the same weights with other options, such as layout="separate"."""
        return surgery.rebuilt(self, self.state_dict(), **changes)

    def extra_repr(self) -> str:
        """One line: sizes, then what differs from the plain layer."""
        kind = "MHA" if self.n_kv_heads == self.n_heads else "MQA" if self.n_kv_heads == 1 else "GQA"
        said = [f"d_model={self.d_model}", f"n_heads={self.n_heads}", f"n_kv_heads={self.n_kv_heads} ({kind})"]
        said += [f"d_head={self.d_head}"] + [f"d_value={self.d_value}"] * (self.d_value != self.d_head)
        names = ("d_context", "window", "rotary", "qk_norm", "softcap", "scale")
        said += [f"{name}={value}" for name in names if (value := getattr(self, name)) is not None]
        said += [f"{name}={value}" for name in ("gate", "dropout") if (value := getattr(self, name))]
        flags = {"causal": self.causal, "alibi": self.alibi_slopes is not None, "sinks": self.sinks is not None}
        said += [f"{name}=True" for name, there in flags.items() if there]
        return ", ".join([*said, f"layout={self.layout}", f"execution={self.execution}"])

    def _prepare(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        key_lengths: Tensor | Sequence[int] | None = None,
        query_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | PagedKVCache | None = None,
    ) -> Call:
        """Check the arguments of a call and put them together."""
        check_input("x", x, "L", self.d_model)
        if context is not None:
            check_input("context", context, "S", self.d_context or self.d_model, B=x.shape[0])
            if self.rotary is not None or self.alibi_slopes is not None:
                raise ValueError("context: expected None, since rotary positions and alibi are of one sequence, x")
        elif self.d_context is not None:
            raise ValueError(f"context: expected (B, S, d_context={self.d_context}), got None")
        fixed = {"causal": self.causal, "window": self.window, "scale": self.scale, "softcap": self.softcap}
        fixed |= {"query_mask": query_mask, "document_ids": document_ids, "dropout_p": self.dropout * self.training}
        by_head = {
            "mask": four_axes("mask", mask, self.n_heads),
            "bias": four_axes("bias", bias, self.n_heads),
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }
        call = Call(x, x if context is None else context, fixed, by_head, key_lengths, cache)
        if cache is None:
            fixed["key_lengths"] = key_lengths
        elif cache.length and len(cache.lengths) != len(x):
            raise ValueError(f"x: expected B={len(cache.lengths)} sequences, as the cache holds, got {len(x)}")
        return call

    def _all_heads(self, call: Call, record: Record | None) -> Tensor:
        """What every head gives: (B, H, L, E)."""
        made: dict[str, Tensor] = {}
        for run in () if call.is_cached_context else self.runs:
            if run == "QKV" and call.is_cross:
                made |= {part: self._project(part, call, self._whole(part)) for part in PARTS}
            else:
                sizes = [self.parts[part].rows for part in run]
                linear = self.get_submodule(f"W_{run}")
                made |= zip(run, linear(call.x if run[0] == "Q" else call.source).split(sizes, -1))
        if call.is_cached_context:
            made["Q"] = self._project("Q", call, self._whole("Q"))
        turns = self._turns(call)
        query = self._as_heads("Q", made["Q"], turns)
        if call.is_cached_context:
            key, value = call.read()
        else:
            key, value = (self._as_heads(part, made[part], turns) for part in "KV")
            key, value = call.remember(key, value)
        heads = slice(0, self.n_heads)
        output, statistics = self._attend(call, query, key, value, heads, record)
        if record is not None:
            record.add(statistics)
        return output

    def _one_after_another(self, call: Call, record: Record | None) -> Tensor:
        """The output (B, L, d_model), no more than one head's query, key, value and output at a time."""
        turns, group = self._turns(call), self.n_heads // self.n_kv_heads
        (B, L, _), E = call.x.shape, self.d_value
        total = call.x.new_zeros(B * L, self.d_model) if self.W_O.bias is None else self.W_O.bias.repeat(B * L, 1)

        def keys_and_values(g: int) -> list[Tensor]:
            return [self._as_heads(x, self._project(x, call, slice(g, g + 1)), turns) for x in "KV"]

        cached = None
        if call.cache is not None:
            # A cache holds every head's keys and values anyway.
            if not call.is_cached_context:
                made = [keys_and_values(g) for g in range(self.n_kv_heads)]
                cached = call.remember(*(torch.cat(tensors, 1) for tensors in zip(*made)))
            else:
                cached = call.read()
        seen: list[dict[str, Tensor]] = []
        for g in range(self.n_kv_heads):
            key, value = keys_and_values(g) if cached is None else (of_key_head(x, g) for x in cached)
            for h in range(g * group, (g + 1) * group):
                heads = slice(h, h + 1)
                query = self._as_heads("Q", self._project("Q", call, heads), turns)
                output, statistics = self._attend(call, query, key, value, heads, record)
                seen.append(statistics)
                weight = self.W_O.weight[:, h * E : (h + 1) * E]
                if torch.is_autocast_enabled(total.device.type):
                    total = torch.addmm(total, output.flatten(0, 2), weight.T)
                else:
                    total.addmm_(output.flatten(0, 2), weight.T)
        if record is not None:
            record.add({name: torch.cat([step[name] for step in seen], 1) for name in seen[0]})
        return total.unflatten(0, (B, L))

    def _attend(
        self,
        call: Call,
        query: Tensor,
        key: Tensor | Pages,
        value: Tensor | Pages,
        heads: slice,
        record: Record | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What some heads give, gated and ablated: (B, h, L, E), and their statistics."""
        options = call.options(heads)
        if record is None:
            output, statistics = attention(query, key, value, **options), {}
        else:
            seen = observe(query, key, value, statistics=record.asked, **options)
            output, statistics = seen.output, seen.statistics
        if self.W_G is not None:
            width = self.d_value if self.gate == "elementwise" else 1
            rows = slice(heads.start * width, heads.stop * width)
            gate = F.linear(call.x, self.W_G.weight[rows]).sigmoid()
            output = output * gate.unflatten(-1, (heads.stop - heads.start, width)).transpose(1, 2)
        for ablation in self.ablations:
            output = ablation(output, heads, options["query_mask"])
        return output, statistics

    def _project(self, part: str, call: Call, heads: slice) -> Tensor:
        """Some heads of one projection: (B, L, heads * width)."""
        weight, bias = self.rows(part, heads)
        return F.linear(call.x if part == "Q" else call.source, weight, bias)

    def rows(self, part: str, heads: slice) -> tuple[Tensor, Tensor | None]:
        """The weight rows of some heads of "Q", "K" or "V", and their biases: views of the parameters."""
        run = next(run for run in self.runs if part in run)
        linear: Any = self.get_submodule(f"W_{run}")
        width = self.d_value if part == "V" else self.d_head
        of_heads = slice(heads.start * width, heads.stop * width)
        bias = projections.bias_rows(linear, run, self.parts, part)
        weight = projections.weight_rows(linear, run, self.parts, part)
        return weight[of_heads], None if bias is None else bias[of_heads]

    def _whole(self, part: str) -> slice:
        return slice(0, self.n_heads if part == "Q" else self.n_kv_heads)

    def _turns(self, call: Call) -> Tables | None:
        """How the tokens of x turn at their positions."""
        return None if self.rotary is None else self.rotary.tables(call.positions(), self.d_head, call.x)

    def _as_heads(self, part: str, projected: Tensor, turns: Tables | None) -> Tensor:
        """A projection (B, L, n * width) as heads (B, n, L, width), normalised and turned."""
        width = self.d_value if part == "V" else self.d_head
        heads = projected.unflatten(-1, (projected.shape[-1] // width, width)).transpose(1, 2)
        norm = {"Q": self.q_norm, "K": self.k_norm}.get(part)
        if norm is not None:
            heads = norm(heads.to(norm.weight.dtype)).to(heads.dtype)
        return heads if self.rotary is None or turns is None or part == "V" else self.rotary.turn(heads, turns)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        version = local_metadata.get("version")
        if version is not None and version > self._version:
            error_msgs.append(
                f"{prefix or 'the layer'}: state dict of version {version}, this multihead knows {self._version}"
            )
        error_msgs += projections.adopt(state_dict, prefix, self.runs, self.parts)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _draw(linear: Any) -> None:
    bound = math.sqrt(3 / linear.in_features)
    nn.init.uniform_(linear.weight, -bound, bound)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _slopes(alibi: bool | Sequence[float] | Tensor, n_heads: int, device: torch.device | str | None) -> Tensor | None:
    if alibi is False:
        return None
    slopes = alibi_slopes(n_heads) if alibi is True else torch.as_tensor(alibi, dtype=torch.float32)
    if slopes.shape != (n_heads,):
        raise ValueError(f"alibi: expected a bool or slopes (H={n_heads},), got {tuple(slopes.shape)}")
    return slopes.detach().clone().to(device)


def _check_size(name: str, size: Any) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name}: expected an int, got {size!r}")
    if size < 1:
        raise ValueError(f"{name}: expected 1 or more, got {size}")


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")
