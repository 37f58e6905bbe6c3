"""A model as an inventory: every weight with its shape, every attention with its heads. All counts are sums over it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from multihead.accounting.fields import ConfigError

Part = Literal["attention", "feed-forward", "embeddings", "norms"]
PARTS: tuple[Part, ...] = ("attention", "feed-forward", "embeddings", "norms")


@dataclass(frozen=True)
class Weight:
    """One tensor of parameters, in the layout of nn.Linear: (out, in).

    Attributes:
        name: as in W_Q, b_Q.
        part: what it is counted as.
        shape: its axes; two or more are a matrix that tokens are multiplied by, unless it is a `table`.
        copies, active: how many experts have one, and how many of these one token uses.
        table: its rows are looked up, not multiplied.
        tied: it is the same tensor as a table: multiplied, but with no parameters of its own.
        tokens: multiplied by each token of the block, by the last of a text only, or by each of the encoder's.
        per_kv_head: its first axis is G times something.
    """

    name: str
    part: Part
    shape: tuple[int, ...]
    copies: int = 1
    active: int = 1
    table: bool = False
    tied: bool = False
    tokens: Literal["each", "last", "source"] = "each"
    per_kv_head: bool = False

    @property
    def size(self) -> int:
        """Numbers in one copy."""
        return math.prod(self.shape)

    @property
    def parameters(self) -> int:
        """Parameters of all copies."""
        return 0 if self.tied else self.copies * self.size

    @property
    def met(self) -> int:
        """Numbers that one token is multiplied or scaled by, or that are added to it."""
        return 0 if self.table else self.active * self.size

    @property
    def is_matrix(self) -> bool:
        """Whether tokens are multiplied by it."""
        return len(self.shape) > 1 and not self.table


@dataclass(frozen=True)
class Attention:
    """The heads of one attention of a layer, and what its cache keeps.

    Attributes:
        n_heads, n_kv_heads: H and G.
        d_head, d_value: D and E.
        windows: for each layer, how many keys a query sees, itself included; None for all.
        causal: whether a query sees only the keys up to itself.
        cross: whether its keys are the encoder's tokens.
        latent: of multi-head latent attention, the widths of what a token leaves in the cache: the compressed
            vector that all keys and values are made of, and the part of the key that carries the position.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    windows: tuple[int | None, ...]
    causal: bool = True
    cross: bool = False
    latent: tuple[int, int] | None = None

    @property
    def cached(self) -> int:
        """Numbers that one token leaves in the cache of one layer: G (D + E), or the latent ones."""
        return sum(self.latent) if self.latent else self.n_kv_heads * (self.d_head + self.d_value)

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA."""
        return "MLA" if self.latent else sharing(self.n_heads, self.n_kv_heads)


@dataclass(frozen=True)
class Block:
    """So many equal layers, or what stands before and after them.

    `source` blocks run over the tokens that an encoder reads, the others over those that a decoder writes.
    """

    name: str
    weights: tuple[Weight, ...]
    layers: int = 1
    attentions: tuple[Attention, ...] = ()
    source: bool = False


@dataclass(frozen=True)
class Model:
    """Everything that the counts are made of.

    Attributes:
        name: what the user called it.
        model_type: as in config.json.
        counted_as: the class, or the description, that has exactly these parameters.
        d_model: width of the model.
        context: the tokens that it was made for; 0 where the configuration does not say.
        blocks: layers, and what stands around them.
        learned_positions: whether there are no positions beyond the context.
    """

    name: str
    model_type: str
    counted_as: str
    d_model: int
    context: int
    blocks: tuple[Block, ...]
    learned_positions: bool = False

    @property
    def decodes(self) -> bool:
        """Whether it writes token by token; an encoder alone does not."""
        return any(not block.source for block in self.blocks if block.attentions)

    @property
    def encodes(self) -> bool:
        """Whether it has an encoder."""
        return any(block.source for block in self.blocks if block.attentions)

    @property
    def has_experts(self) -> bool:
        """Whether a token uses some of its weights only."""
        return any(weight.active < weight.copies for block in self.blocks for weight in block.weights)

    @property
    def layers(self) -> int:
        """Layers of all stacks together."""
        return sum(block.layers for block in self.blocks if block.attentions)

    @property
    def attention(self) -> Attention:
        """The attention whose keys are kept while decoding; of an encoder alone, its own."""
        stack = next(block for block in self.blocks if block.attentions and (not block.source or not self.decodes))
        return stack.attentions[0]

    def parameters(self, part: Part | None = None, *, active: bool = False) -> int:
        """Return the number of parameters, of one part or of all.

        Args:
            part: "attention", "feed-forward", "embeddings" or "norms".
            active: only those that one token meets: of experts the ones that it uses, and of tables, of which it
                takes a row, nothing.
        """
        return sum(
            block.layers * (weight.met if active else weight.parameters)
            for block in self.blocks
            for weight in block.weights
            if part in (None, weight.part)
        )

    def with_kv_heads(self, n_kv_heads: int) -> Model:
        """Return the same model with another number of key/value heads, G, everywhere.

        Raises:
            ConfigError: G does not divide H, or keys and values are made of a latent vector that no head owns.
        """
        for attention in self.attentions():
            check_heads(attention.n_heads, n_kv_heads)
            if attention.latent:
                raise ConfigError(
                    f"kv_heads: {self.name} has multi-head latent attention, which shares one latent among all heads"
                )
        return replace(self, blocks=tuple(_with_kv_heads(block, n_kv_heads) for block in self.blocks))

    def attentions(self) -> Iterable[Attention]:
        """Give every attention, once a block."""
        return (attention for block in self.blocks for attention in block.attentions)


def _with_kv_heads(block: Block, n_kv_heads: int) -> Block:
    if not block.attentions:
        return block
    before = block.attentions[0].n_kv_heads
    weights = tuple(
        replace(weight, shape=(weight.shape[0] // before * n_kv_heads, *weight.shape[1:]))
        if weight.per_kv_head
        else weight
        for weight in block.weights
    )
    attentions = tuple(replace(attention, n_kv_heads=n_kv_heads) for attention in block.attentions)
    return replace(block, weights=weights, attentions=attentions)


def sharing(n_heads: int, n_kv_heads: int) -> str:
    """Return how H query heads share G key/value heads: MHA, GQA or MQA."""
    if n_heads == n_kv_heads:
        return "MHA"
    return "MQA" if n_kv_heads == 1 else "GQA"


def check_heads(n_heads: int, n_kv_heads: int) -> None:
    """Raise ConfigError unless G is positive and divides H."""
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ConfigError(f"kv_heads: expected a divisor of the {n_heads} query heads (H), got {n_kv_heads}")
