"""The pieces that transformers are made of, as weights: projections, feed-forwards, experts, norms, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from multihead.accounting.fields import ConfigError, Fields
from multihead.accounting.model import Attention, Block, Model, Weight

MOST_LAYERS = 100_000  # each is listed with its window


@dataclass(frozen=True)
class Size:
    """The sizes that every architecture has: d_model, H, G, D, layers, vocabulary, context."""

    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    layers: int
    vocabulary: int
    context: int


def size(c: Fields, *, kv_heads: int | None = None, grouped: bool = True) -> Size:
    """Read the sizes of a configuration under any of their names.

    Args:
        kv_heads: G, where the architecture has a rule of its own for it.
        grouped: whether it can share keys and values; where it cannot, a field for G means nothing.

    Raises:
        ConfigError: one is missing or no number, or G does not divide H, or H does not divide d_model where
            the configuration leaves the width of a head to that.
    """
    d_model = c.number("hidden_size", "n_embd", "d_model", "dim", "n_embed")
    heads = c.number("num_attention_heads", "n_head", "num_heads", "n_heads")
    if not grouped:
        kv_heads = heads
    kv_heads = kv_heads or c.number("num_key_value_heads", default=heads)
    d_head = c.optional("head_dim")
    if d_head is None and d_model % heads:
        raise ConfigError(f"{c.name}: d_model {d_model} is not divisible by its {heads} heads (H)")
    if heads % kv_heads:
        raise ConfigError(f"{c.name}: its {kv_heads} key/value heads (G) do not divide its {heads} query heads (H)")
    layers = c.number("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if layers > MOST_LAYERS:
        raise ConfigError(f"{c.name}: expected at most {MOST_LAYERS:,} layers, got {layers:,}")
    return Size(
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        d_head=d_head or d_model // heads,
        layers=layers,
        vocabulary=c.number("vocab_size"),
        context=c.number("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length", default=0),
    )


def projections(
    s: Size, *, bias: bool = False, output_bias: bool | None = None, prefix: str = "", source: bool = False
) -> list[Weight]:
    """Return W_Q, W_K, W_V, W_O and their biases; `source`: keys and values are made of the encoder's tokens."""
    queries, keys = s.heads * s.d_head, s.kv_heads * s.d_head
    on = "source" if source else "each"
    weights = [
        Weight(f"{prefix}W_Q", "attention", (queries, s.d_model)),
        Weight(f"{prefix}W_K", "attention", (keys, s.d_model), per_kv_head=True, tokens=on),
        Weight(f"{prefix}W_V", "attention", (keys, s.d_model), per_kv_head=True, tokens=on),
        Weight(f"{prefix}W_O", "attention", (s.d_model, queries)),
    ]
    if bias:
        weights += [
            Weight(f"{prefix}b_Q", "attention", (queries,)),
            Weight(f"{prefix}b_K", "attention", (keys,), per_kv_head=True, tokens=on),
            Weight(f"{prefix}b_V", "attention", (keys,), per_kv_head=True, tokens=on),
        ]
    if bias if output_bias is None else output_bias:
        weights.append(Weight(f"{prefix}b_O", "attention", (s.d_model,)))
    return weights


def head_norms(s: Size, *, each: bool = False, names: tuple[str, str] = ("norm_Q", "norm_K")) -> list[Weight]:
    """Return the norms of queries and keys: over a head's width D, shared by all heads; `each`: one a head."""
    if not each:
        return [Weight(name, "norms", (s.d_head,)) for name in names]
    return [
        Weight(names[0], "norms", (s.heads * s.d_head,)),
        Weight(names[1], "norms", (s.kv_heads * s.d_head,), per_kv_head=True),
    ]


def feed_forward(
    d_model: int, d_ff: int, *, gated: bool, bias: bool = False, copies: int = 1, active: int = 1, prefix: str = ""
) -> list[Weight]:
    """Return the matrices of a feed-forward, or of `copies` experts of which a token uses `active`."""

    def weight(name: str, *shape: int) -> Weight:
        return Weight(prefix + name, "feed-forward", shape, copies, active)

    into = ["W_gate", "W_up"] if gated else ["W_up"]
    weights = [*(weight(name, d_ff, d_model) for name in into), weight("W_down", d_model, d_ff)]
    if bias:
        weights += [*(weight(f"b{name[1:]}", d_ff) for name in into), weight("b_down", d_model)]
    return weights


def norms(names: Sequence[str], width: int, *, bias: bool) -> list[Weight]:
    """Return norms over the width of the model: a scale each, and with `bias` (LayerNorm) a shift."""
    return [
        Weight(name if part == "scale" else f"{name} shift", "norms", (width,))
        for name in names
        for part in ("scale", "shift")[: 1 + bias]
    ]


def table(name: str, rows: int, width: int) -> Weight:
    """Return a table of which each token takes one row."""
    return Weight(name, "embeddings", (rows, width), table=True)


@dataclass(frozen=True)
class Stack:
    """Layers, by their indices, that share one feed-forward."""

    name: str
    indices: Sequence[int]
    feed_forward: list[Weight]


def decoder(
    c: Fields,
    s: Size,
    counted_as: str,
    *,
    attention: list[Weight],
    feed_forward: list[Weight] | Sequence[Stack],
    norms: list[Weight],
    final: list[Weight],
    tied: bool,
    windows: Iterable[int | None] = (),
    positions: int = 0,
    embeddings: Sequence[Weight] = (),
    head_bias: bool = False,
    heads: Attention | None = None,
) -> Model:
    """Return a stack of decoder layers between an embedding and an output matrix over the vocabulary.

    Args:
        tied: whether the output matrix is the embedding unless `tie_word_embeddings` says otherwise.
        windows: keys that a query of each layer sees; none listed: all.
        positions: rows of a learned table of positions.
        embeddings: what else stands before the layers.
        heads: the attention, where it is not the one of the sizes.
    """
    seen = tuple(windows) or (None,) * s.layers
    stacks = [entry for entry in feed_forward if isinstance(entry, Stack)]
    plain = [entry for entry in feed_forward if isinstance(entry, Weight)]
    blocks = [
        Block(
            stack.name,
            (*attention, *stack.feed_forward, *norms),
            layers=len(stack.indices),
            attentions=(_attention(s, heads, tuple(seen[i] for i in stack.indices)),),
        )
        for stack in stacks or [Stack("layer", range(s.layers), plain)]
        if stack.indices
    ]
    before = [table("tokens", s.vocabulary, s.d_model)]
    if positions:
        before.append(table("positions", positions, s.d_model))
    is_tied = c.flag("tie_word_embeddings", tied)
    output = [Weight("W_U", "embeddings", (s.vocabulary, s.d_model), tied=is_tied, tokens="last")]
    if head_bias:
        output.append(Weight("b_U", "embeddings", (s.vocabulary,), tokens="last"))
    around = [Block("before", (*before, *embeddings)), Block("after", (*final, *output))]
    return Model(
        name=c.name,
        model_type=str(c.config["model_type"]),
        counted_as=counted_as,
        d_model=s.d_model,
        context=s.context or positions,
        blocks=(around[0], *blocks, around[1]),
        learned_positions=bool(positions),
    )


def encoder_decoder(
    c: Fields,
    s: Size,
    counted_as: str,
    *,
    feed_forward: list[Weight],
    norms: Callable[[Sequence[str]], list[Weight]],
    final: list[Weight],
    tied: bool,
    decoder_layers: int | None = None,
) -> Model:
    """Return an encoder and a decoder that reads it in every layer, with one table of tokens for both.

    Args:
        norms: makes the norms of these names: two in a layer of the encoder, three in one of the decoder.
        final: what each of the two stacks has once.
        tied: whether the output matrix is the table unless `tie_word_embeddings` says otherwise.
        decoder_layers: where they are not as many as the encoder's.
    """
    depth = decoder_layers or s.layers

    def heads(layers: int, causal: bool = True, cross: bool = False) -> Attention:
        return Attention(s.heads, s.heads, s.d_head, s.d_head, (None,) * layers, causal, cross)

    encoder = (*projections(s), *feed_forward, *norms(["norm 1", "norm 2"]))
    cross = projections(s, prefix="cross ", source=True)
    decoder = (*projections(s), *cross, *feed_forward, *norms(["norm 1", "norm 2", "norm 3"]))
    attentions = (heads(depth), heads(depth, causal=False, cross=True))
    is_tied = c.flag("tie_word_embeddings", tied)
    output = Weight("W_U", "embeddings", (s.vocabulary, s.d_model), tied=is_tied, tokens="last")
    blocks = (
        Block("before", (table("tokens", s.vocabulary, s.d_model),)),
        Block("encoder layer", encoder, s.layers, (heads(s.layers, causal=False),), source=True),
        Block("encoder", tuple(final), source=True),
        Block("decoder layer", decoder, depth, attentions),
        Block("after", (*final, output)),
    )
    return Model(
        name=c.name,
        model_type=str(c.config["model_type"]),
        counted_as=counted_as,
        d_model=s.d_model,
        context=s.context,
        blocks=tuple(block for block in blocks if block.weights),
    )


def _attention(s: Size, heads: Attention | None, windows: tuple[int | None, ...]) -> Attention:
    if heads is None:
        return Attention(s.heads, s.kv_heads, s.d_head, s.d_head, windows)
    return Attention(
        heads.n_heads, heads.n_kv_heads, heads.d_head, heads.d_value, windows, heads.causal, heads.cross, heads.latent
    )
