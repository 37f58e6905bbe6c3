"""What a model takes to run: multiplications, bytes that pass through memory, and the cache of keys and values.

Conventions, all stated where they are printed:

- A multiply-add is 2 FLOPs. Matrix products are counted, and the scores and weighted values of attention; norms,
  softmax, rotations and activation functions are not.
- Attention counts the keys that a query sees, no others: n (n + 1) / 2 pairs under a causal mask.
- Prefill gives the output of the last token of each text only.
- A decoded token is the last of `context` tokens: it sees all of them, itself included.
- Bytes are the least that must pass through memory: each weight that is used once, each cached key and value once,
  the input and the output of each product once. What lies between products stays in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from multihead.accounting.fields import ConfigError
from multihead.accounting.model import Attention, Block, Model, Weight

BITS = {"f32": 32, "bf16": 16, "f16": 16, "fp8": 8, "int8": 8, "int4": 4}
"""Bits of a number. Scales of quantised numbers are not counted."""


@dataclass(frozen=True)
class Types:
    """How numbers are kept: `weights` and `cache` are keys of `BITS`.

    Numbers of fewer than 16 bits are a way to keep weights; products take and give 16-bit numbers.
    """

    weights: str = "bf16"
    cache: str = "bf16"

    def __post_init__(self) -> None:
        for name, value in (("dtype", self.weights), ("cache_dtype", self.cache)):
            if value not in BITS:
                raise ConfigError(f"{name}: expected one of {', '.join(BITS)}, got {value!r}")

    @property
    def product_bits(self) -> int:
        """Bits of the numbers that go into products and come out of them."""
        return max(16, BITS[self.weights])


@dataclass(frozen=True)
class Work:
    """One pass over a batch: FLOPs, and the bytes that pass through memory.

    Attributes:
        product_flops: of the products with weights.
        attention_flops: of scores and weighted values.
        weight_bytes, cache_bytes, activation_bytes: what is read and written.
    """

    product_flops: int = 0
    attention_flops: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    activation_bytes: int = 0

    @property
    def flops(self) -> int:
        """All FLOPs."""
        return self.product_flops + self.attention_flops

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.product_flops + other.product_flops,
            self.attention_flops + other.attention_flops,
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.activation_bytes + other.activation_bytes,
        )


@dataclass(frozen=True)
class Pass:
    """What goes through the model at once, for each of `batch` texts.

    Attributes:
        source: tokens that an encoder reads.
        new: tokens that the decoder takes in.
        before: tokens that the decoder's cache holds already.
        memory: tokens of the encoder that cross-attention reads.
        outputs: tokens whose output is wanted.
    """

    batch: int
    source: int = 0
    new: int = 0
    before: int = 0
    memory: int = 0
    outputs: int = 0


def prefill(model: Model, context: int, batch: int, types: Types) -> Work:
    """Return the work of reading `context` tokens of `batch` texts.

    An encoder-decoder reads them with its encoder, and makes the keys and values of its cross-attention.
    """
    if not model.decodes:
        return work(model, Pass(batch, source=context, outputs=1), types)
    if model.encodes:
        return work(model, Pass(batch, source=context), types)
    return work(model, Pass(batch, new=context, outputs=1), types)


def decode(model: Model, context: int, batch: int, types: Types) -> Work | None:
    """Return the work of one step that writes the last of `context` tokens of `batch` texts; None for an encoder.

    An encoder-decoder has read as many tokens as it has written.
    """
    if not model.decodes:
        return None
    memory = context if model.encodes else 0
    return work(model, Pass(batch, new=1, before=context - 1, memory=memory, outputs=1), types)


def work(model: Model, step: Pass, types: Types) -> Work:
    """Return the work of one pass: the sum over all weights and all attentions."""
    total = Work()
    for block in model.blocks:
        for weight in block.weights:
            total += _product(weight, block, step, types)
        for attention in block.attentions:
            total += _attention(attention, block, step, types)
    return total


def cache_bytes(model: Model, context: int, batch: int, types: Types) -> int:
    """Return the bytes of all keys and values that are kept for `context` tokens of `batch` texts.

    A layer with a window keeps no more tokens than the window has. An encoder alone keeps none.
    """
    return batch * sum(
        min(context, window or context) * attention.cached * BITS[types.cache] // 8
        for block in model.blocks
        if not block.source
        for attention in block.attentions
        for window in attention.windows
    )


def weight_bytes(model: Model, types: Types) -> int:
    """Return the bytes of all parameters."""
    return model.parameters() * BITS[types.weights] // 8


def pairs(new: int, before: int, window: int | None, causal: bool) -> int:
    """Return how many (query, key) pairs are visible to `new` queries that stand after `before` keys."""
    keys = before + new
    if not causal:
        return new * keys
    width = min(window or keys, keys)
    rising = max(0, min(new, width - 1 - before))  # queries at the start that see all keys up to themselves
    return rising * before + rising * (rising + 1) // 2 + (new - rising) * width


def _tokens(weight: Weight, block: Block, step: Pass) -> int:
    if weight.tokens == "last":
        return step.outputs
    if weight.tokens == "source" or block.source:
        return step.source
    return step.source + step.new if weight.table else step.new


def _product(weight: Weight, block: Block, step: Pass, types: Types) -> Work:
    tokens = step.batch * _tokens(weight, block, step)
    if not tokens:
        return Work()
    if weight.table:
        return Work(weight_bytes=tokens * weight.shape[1] * BITS[types.weights] // 8)
    used: float = weight.copies
    if weight.copies > 1:
        # With even routing, this many different experts are met by so many tokens.
        used = weight.copies * (1 - (1 - weight.active / weight.copies) ** tokens)
    read = block.layers * round(used * weight.size) * BITS[types.weights] // 8
    if not weight.is_matrix:
        return Work(weight_bytes=read)
    flops = 2 * block.layers * tokens * weight.active * weight.size
    ends = block.layers * tokens * weight.active * sum(weight.shape)
    return Work(product_flops=flops, weight_bytes=read, activation_bytes=ends * types.product_bits // 8)


def _attention(attention: Attention, block: Block, step: Pass, types: Types) -> Work:
    """Scores and weighted values; queries and outputs are counted as ends of W_Q and W_O."""
    if block.source:
        new, before = step.source, 0
    elif attention.cross:
        new, before = step.new, step.memory - step.new
    else:
        new, before = step.new, step.before
    written = step.batch * (step.source if attention.cross else 0 if block.source else new)
    width = attention.d_head + attention.d_value
    if attention.latent and before:
        # While decoding, W_UK is multiplied into the query and W_UV into the output, so that every head reads
        # the latent vector itself.
        width = 2 * attention.latent[0] + attention.latent[1]
    flops = cached = between = 0
    for window in attention.windows:
        keys = before + new if new else 0
        seen = min(keys, window + new - 1) if window else keys
        flops += 2 * step.batch * attention.n_heads * width * pairs(new, before, window, attention.causal) if new else 0
        read = step.batch * seen * attention.cached
        if block.source:
            between += read
        else:
            cached += read + written * attention.cached
    return Work(
        attention_flops=flops,
        cache_bytes=cached * BITS[types.cache] // 8,
        activation_bytes=between * types.product_bits // 8,
    )
