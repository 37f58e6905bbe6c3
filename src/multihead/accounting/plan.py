"""`mh.plan`: the costs of one model, with its keys and values shared in several ways."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from multihead.accounting import units
from multihead.accounting.bounds import Bound, Device, bound, device, largest_batch, largest_context
from multihead.accounting.count import BITS, Types, Work, cache_bytes, decode, prefill, weight_bytes
from multihead.accounting.fields import ConfigError
from multihead.accounting.model import PARTS, Model, Part
from multihead.accounting.presets import Claim, open_config

SCHEMA = 1


@dataclass(frozen=True)
class Variant:
    """A model with one way of sharing keys and values.

    Attributes:
        model: the inventory of its weights.
        own: whether this is how the model was made.
        parameters, active: all, and those that one token uses.
        weight_bytes: of all parameters.
        cache_token_layer, cache_token, cache_layer, cache: bytes of the cache of one token in one layer, of one
            token in all layers, of the whole batch in its largest layer, and of the whole batch.
        prefill, decode: the work of reading the context, and of one step that writes its last token; None
            for an encoder.
        prefill_bound, decode_bound: the least time on the device.
        largest_context: the most tokens that fit for this batch; None for no limit, 0 if the weights do not fit.
        largest_batch: the most texts of this context that fit, likewise.
    """

    model: Model
    own: bool
    parameters: int
    active: int
    weight_bytes: int
    cache_token_layer: int
    cache_token: int
    cache_layer: int
    cache: int
    prefill: Work
    decode: Work | None
    prefill_bound: Bound
    decode_bound: Bound | None
    largest_context: int | None
    largest_batch: int | None

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA."""
        return self.model.attention.kind

    @property
    def n_kv_heads(self) -> int:
        """G."""
        return self.model.attention.n_kv_heads


@dataclass(frozen=True)
class Plan:
    """What one model costs; `str(plan)` is a summary.

    Attributes:
        model: the inventory of its weights.
        claims: figures that sources give.
        notes: what else there is to know about the model.
        context, batch: tokens of each text, and texts.
        types: how weights and cache are kept.
        device, memory: the machine, and the bytes that weights and cache may take.
        variants: from the most key/value heads to the fewest.
    """

    model: Model
    claims: tuple[Claim, ...]
    notes: tuple[str, ...]
    context: int
    batch: int
    types: Types
    device: Device
    memory: int
    variants: tuple[Variant, ...]

    @property
    def own(self) -> Variant:
        """The model as it was made."""
        return next(variant for variant in self.variants if variant.own)

    def parameters(self, part: Part | None = None, *, active: bool = False) -> int:
        """Return the number of parameters: of one part, of those that one token uses, or of all."""
        return self.model.parameters(part, active=active)

    def remarks(self) -> list[str]:
        """Return what the figures say, in sentences: where a source's figure differs, what sharing saves, what fits."""
        return [*map(self._checked, self.claims), *self.notes, *self._sharing(), *self._warnings()]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings and lists."""
        return {
            "name": self.model.name,
            "model_type": self.model.model_type,
            "counted_as": self.model.counted_as,
            "context": self.context,
            "batch": self.batch,
            "types": asdict(self.types),
            "device": asdict(self.device),
            "memory": self.memory,
            "parts": {part: self.parameters(part) for part in PARTS},
            "matrices": [
                {
                    "block": block.name,
                    "layers": block.layers,
                    "name": weight.name,
                    "part": weight.part,
                    "shape": list(weight.shape),
                    "copies": weight.copies,
                    "active": weight.active,
                    "parameters_a_layer": weight.parameters,
                    "parameters": block.layers * weight.parameters,
                }
                for block in self.model.blocks
                for weight in block.weights
            ],
            "variants": [_record(variant) for variant in self.variants],
            "claims": [
                asdict(claim) | {"holds": claim.holds(self.parameters(active=claim.of == "active"))}
                for claim in self.claims
            ],
            "remarks": self.remarks(),
        }

    def to_json(self, path: str | Path) -> None:
        """Write everything as JSON."""
        write_json([self], path)

    def to_csv(self, path: str | Path) -> None:
        """Write the figures as CSV, a row for each way of sharing keys and values."""
        write_csv([self], path)

    def __str__(self) -> str:
        own, attention = self.own, self.model.attention
        cache = f"cache of {self.context:,} tokens × {self.batch}: {own.cache:,} bytes" if own.cache else "no cache"
        return (
            f"{self.model.name}: {own.parameters:,} parameters in {self.model.layers} layers, "
            f"{attention.n_heads} query heads, {_kv_heads(attention.n_kv_heads)} ({own.kind}); {cache}"
        )

    def _checked(self, claim: Claim) -> str:
        count = self.parameters(active=claim.of == "active")
        what = "parameters" if claim.of == "parameters" else "active parameters"
        said = f"Said to have {claim.said} {what} ({claim.source})"
        if claim.holds(count):
            return f"{said}, and has {count:,}."
        return f"{said}, but has {count:,}: {100 * abs(count / claim.value - 1):.2g}% {_than(count, claim.value)}."

    def _sharing(self) -> list[str]:
        full = next((variant for variant in self.variants if variant.kind == "MHA" and not variant.own), None)
        if full is None:
            return []
        own, found = self.own, []
        shared = "as MLA" if own.kind == "MLA" else f"with its {_kv_heads(own.n_kv_heads)}"
        before, after = _attention_a_layer(full.model), _attention_a_layer(own.model)
        if before != after:
            square = "4 × d_model² = " if before == 4 * self.model.d_model**2 else ""
            total, whole = own.model.parameters("attention"), full.model.parameters("attention")
            found.append(
                f"{square}{before:,} attention parameters a layer would be MHA; {shared} it is {after:,}: "
                f"{total / 1e9:.3f}B in all, not {whole / 1e9:.3f}B."
            )
        found.append(
            f"Its cache for {self.context:,} tokens{f' × {self.batch}' if self.batch > 1 else ''} would be "
            f"{size(full.cache)} as MHA ({size(full.cache_layer)} a layer); {shared} it is {size(own.cache)}."
        )
        return found

    def _warnings(self) -> list[str]:
        found = []
        if self.model.context and self.context > self.model.context:
            reason = "has no positions" if self.model.learned_positions else "was not made for texts"
            found.append(f"The model {reason} beyond {self.model.context:,} tokens.")
        if self.own.weight_bytes > self.memory:
            found.append(f"Its weights, {size(self.own.weight_bytes)}, do not fit in {room(self.memory)}.")
        elif self.own.weight_bytes + self.own.cache > self.memory:
            found.append(
                f"Weights and cache, {size(self.own.weight_bytes + self.own.cache)}, do not fit in {room(self.memory)}."
            )
        return found


def plan(
    model: str | Path | Mapping[str, Any] | Any,
    *,
    context: int | str | None = None,
    batch: int = 1,
    dtype: str = "bf16",
    cache_dtype: str | None = None,
    kv_heads: Sequence[int] | None = None,
    device: str | Device = "h100",
    flops: float | str | None = None,
    bandwidth: float | str | None = None,
    memory: int | str | None = None,
) -> Plan:
    """Return what a model costs: parameters, FLOPs, bytes, cache, what bounds it and what fits.

    Args:
        model: a known name such as "llama-3-8b", the path of a config.json or of a folder with one, its fields as a
            dictionary, or a transformers configuration or model. Nothing is loaded and nothing is run.
        context: tokens of each text, "128K" for 131,072; by default as many as the model was made for.
        batch: texts at once, B.
        dtype: how weights are kept: f32, bf16, f16, fp8, int8, int4.
        cache_dtype: how keys and values are kept; by default as weights are, bf16 for weights under 16 bits.
        kv_heads: numbers of key/value heads (G) to compare; by default MHA, the model's own, and MQA.
        device: a machine of `accounting.bounds.DEVICES`, "here" to measure this one, or a `Device`.
        flops, bandwidth: FLOP/s and bytes/s in place of the device's.
        memory: bytes for weights and cache, "24GB" or "24GiB"; by default the device's.

    Raises:
        ConfigError: (a ValueError) the model is not known or its configuration cannot be read, or an argument
            makes no sense; the message is one line.
    """
    opened = open_config(model)
    inventory = opened.model
    types = Types(dtype, cache_dtype or (dtype if BITS.get(dtype, 16) >= 16 else "bf16"))
    tokens = units.tokens(context) if context is not None else inventory.context or 2048
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ConfigError(f"batch: expected a whole number from 1 up, got {batch!r}")
    machine = _machine(device, flops, bandwidth)
    room = units.memory(memory) if memory is not None else machine.memory
    ways = _ways(inventory, kv_heads)
    variants = tuple(_variant(way, way == inventory, tokens, batch, types, machine, room) for way in ways)
    return Plan(inventory, opened.claims, opened.notes, tokens, batch, types, machine, room, variants)


def size(count: int | float) -> str:
    """Return a number of bytes for reading, in binary units and to four digits: 16 GiB."""
    for unit, letters in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {letters}"
    return f"{count:.0f} bytes"


def room(memory: int) -> str:
    """Return the memory of a machine for reading, in the unit that it is whole in: 80 GB, 64 GiB."""
    return size(memory) if memory % 10**8 else f"{memory / 1e9:g} GB"


def write_json(plans: Sequence[Plan], path: str | Path) -> None:
    """Write plans as JSON."""
    document = {"schema": SCHEMA, "plans": [plan.to_dict() for plan in plans]}
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_csv(plans: Sequence[Plan], path: str | Path) -> None:
    """Write plans as CSV, a row for each model and each way of sharing keys and values."""
    rows = [
        {"schema": SCHEMA, "model": plan.model.name, "context": plan.context, "batch": plan.batch}
        | {"dtype": plan.types.weights, "cache_dtype": plan.types.cache, "device": plan.device.name}
        | {"memory": plan.memory}
        | _flat(_record(variant))
        for plan in plans
        for variant in plan.variants
    ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def _machine(wanted: str | Device, flops: float | str | None, bandwidth: float | str | None) -> Device:
    machine = wanted if isinstance(wanted, Device) else device(wanted)
    if flops is not None:
        peak = units.rate(flops, "flops")
        machine = replace(machine, flops=peak, flops_f32=peak, name=f"{machine.name}, changed")
    if bandwidth is not None:
        name = machine.name if flops is not None else f"{machine.name}, changed"
        machine = replace(machine, bandwidth=units.rate(bandwidth, "bandwidth"), name=name)
    return machine


def _ways(model: Model, kv_heads: Iterable[int] | None) -> list[Model]:
    """Return the model with each number of key/value heads, its own among them, the most first.

    Latent attention is compared with a cache that keeps every head's keys and values.
    """
    own = model.attention
    if own.latent and kv_heads is None:
        return [_uncompressed(model), model]
    if kv_heads is None and not model.decodes:
        return [model]
    if kv_heads is None:
        heads = own.n_heads
        grouped = max((g for g in range(2, min(9, heads)) if heads % g == 0), default=heads)
        kv_heads = (heads, grouped if own.n_kv_heads in (1, heads) else own.n_kv_heads, 1)
    wanted = {own.n_kv_heads, *kv_heads}
    return [model if g == own.n_kv_heads else model.with_kv_heads(g) for g in sorted(wanted, reverse=True)]


def _uncompressed(model: Model) -> Model:
    """Return a model of latent attention whose cache keeps every head's keys and values."""
    blocks = tuple(
        replace(block, attentions=tuple(replace(attention, latent=None) for attention in block.attentions))
        for block in model.blocks
    )
    return replace(model, blocks=blocks)


def _variant(model: Model, own: bool, context: int, batch: int, types: Types, machine: Device, memory: int) -> Variant:
    reading, writing = prefill(model, context, batch, types), decode(model, context, batch, types)
    return Variant(
        model=model,
        own=own,
        parameters=model.parameters(),
        active=model.parameters(active=True),
        weight_bytes=weight_bytes(model, types),
        cache_token_layer=_cache_layer(model, 1, types),
        cache_token=cache_bytes(model, 1, 1, types),
        cache_layer=batch * _cache_layer(model, context, types),
        cache=cache_bytes(model, context, batch, types),
        prefill=reading,
        decode=writing,
        prefill_bound=bound(reading, machine, types),
        decode_bound=bound(writing, machine, types) if writing else None,
        largest_context=largest_context(model, batch, types, memory),
        largest_batch=largest_batch(model, context, types, memory),
    )


def _cache_layer(model: Model, context: int, types: Types) -> int:
    """Return the bytes that one text leaves in the cache of the layer that keeps the most."""
    layers = (
        sum(min(context, kept[i] or context) * width for kept, width in widths)
        for block in model.blocks
        if not block.source and (widths := [(a.windows, a.cached) for a in block.attentions])
        for i in range(block.layers)
    )
    return max(layers, default=0) * BITS[types.cache] // 8


def _attention_a_layer(model: Model) -> int:
    """Return the attention's parameters in one layer of the stack that decodes."""
    block = next(block for block in model.blocks if model.attention in block.attentions)
    return sum(weight.parameters for weight in block.weights if weight.part == "attention")


def _kv_heads(count: int) -> str:
    return f"{count} key/value head{'s' * (count > 1)}"


def _than(count: float, said: float) -> str:
    return "more" if count > said else "less"


def _record(variant: Variant) -> dict[str, Any]:
    """Return a variant as plain numbers, nested by pass."""

    def passes(work: Work | None, least: Bound | None) -> dict[str, Any] | None:
        if work is None or least is None:
            return None
        return {"flops": work.flops, "bytes": work.bytes, "intensity": work.intensity} | asdict(work) | asdict(least)

    return {
        "kind": variant.kind,
        "kv_heads": variant.n_kv_heads,
        "own": variant.own,
        "parameters": variant.parameters,
        "active": variant.active,
        "parts": {part: variant.model.parameters(part) for part in PARTS},
        "weight_bytes": variant.weight_bytes,
        "cache_token_layer": variant.cache_token_layer,
        "cache_token": variant.cache_token,
        "cache_layer": variant.cache_layer,
        "cache": variant.cache,
        "prefill": passes(variant.prefill, variant.prefill_bound),
        "decode": passes(variant.decode, variant.decode_bound),
        "largest_context": variant.largest_context,
        "largest_batch": variant.largest_batch,
    }


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested record with joined names: prefill_flops."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        name = prefix + key
        flat |= (
            _flat(value, f"{'' if key == 'parts' else key}_".lstrip("_"))
            if isinstance(value, Mapping)
            else {name: value}
        )
    return flat
