"""Sharing keys and values: MHA, GQA, MQA.

When a model writes a text, it keeps the keys and values of every token that it has seen. That is the cache, and with
long texts it is larger than the model. Heads can share: every head still asks its own question, but several ask the
same keys. This lesson shows what is shared, what that saves, and what it does to a model that did not learn to share.
"""

# %% [markdown]
# ## Three layers, one input
#
# Six query heads of width 8. With six key/value heads each head has its own (MHA, multi-head), with two there are two
# groups of three (GQA, grouped-query), with one all share (MQA, multi-query).

# %%
import math

import torch

import multihead as mh
from multihead.accounting.count import Types, cache_bytes
from multihead.accounting.presets import open_config
from multihead.heads.models import open_model
from multihead.lessons.tools import weights

torch.manual_seed(0)
x = torch.randn(1, 5, 48)  # (B=1, L=5, d_model=48)
mha = mh.MultiHeadAttention(48, 6, causal=True).requires_grad_(False)
layers = {"MHA": mha, "GQA": mha.group(2), "MQA": mha.group(1)}
for name, layer in layers.items():
    reads = " ".join(str(head.kv_index) for head in layer.heads)
    print(f"{name}: output {tuple(layer(x).shape)}, query heads 0 to 5 read key/value heads {reads}")

# %% [markdown]
# ## What is shared, and what is not
#
# W_K and W_V are shared: the same memory, not a copy. W_Q is not, so heads of one group still differ in where they
# look.

# %%
gqa = layers["GQA"]
first, second = gqa.head(0), gqa.head(1)
print("W_K the same memory:", first.W_K.data_ptr() == second.W_K.data_ptr())
print("W_Q the same memory:", first.W_Q.data_ptr() == second.W_Q.data_ptr())
for h, row in enumerate(weights(gqa, x[0])[:3, 4].tolist()):
    print(f"head {h} of the group, weights of the last token: " + " ".join(f"{w:.2f}" for w in row))

# %% [markdown]
# ## What the cache saves
#
# We fill a cache with the five tokens and ask it what it holds. The output of the layer is as wide as before. The
# cache is what shrinks: with G of H heads to G/H of its size.

# %%
for name, layer in layers.items():
    cache = mh.nn.KVCache()
    layer(x, cache=cache)
    key, value = cache.read().key, cache.read().value
    size = (key.numel() + value.numel()) * key.element_size() // 5
    parameters = sum(p.numel() for p in layer.parameters())
    print(f"{name}: keys {tuple(key.shape)}, {size:>3} bytes a token; {parameters:,} parameters")

# %% [markdown]
# Small here, and not in a real model. Llama 3 8B has 32 query heads and 8 key/value heads. Its cache for one text of
# 128K tokens, in numbers of two bytes (`multihead plan llama-3-8b` has more of this):

# %%
llama = open_config("llama-3-8b").model
for kv_heads in (32, 8, 1):
    size = cache_bytes(llama.with_kv_heads(kv_heads), context=128 * 1024, batch=1, types=Types("bf16"))
    print(f"{kv_heads:>2} key/value heads: {size / 2**30:g} GiB")

# %% [markdown]
# ## What sharing costs a model that never learned it
#
# SmolLM2-135M has 9 query heads and 3 key/value heads in each of its 30 layers. Make it one: put the mean of the three
# in the place of all three (Ainslie et al. 2023, section 2.1), with no training after that. Its loss is how badly it
# guesses the next token of a text, in nats; a model that knows nothing has log(49,152) = 10.8.

# %%
TEXT = (
    "The river rises in the hills above the town, where the snow stays until May. In spring it is brown and fast, and "
    "nobody swims in it. By August it has become slow and clear, and children look for small fish between the stones. "
    "An old mill stands where the road crosses the water. It has not worked for sixty years, but the owner keeps the "
    "wheel turning, because people like to stop and take pictures of it. He says that the mill never earned as much "
    "by grinding corn as it does by standing still."
)
opened = open_model("smollm2")
model, tokens = opened.model, opened.tokenizer(TEXT, return_tensors="pt")["input_ids"]


def loss():
    """Mean loss of the next token, in nats."""
    with torch.no_grad():
        return model(input_ids=tokens, labels=tokens).loss.item()


def about(number):
    """A number with two digits that count."""
    return f"{float(f'{number:.2g}'):,.0f}"


before = loss()
for block in model.model.layers:
    attention = block.self_attn
    layer = mh.nn.from_module(attention)
    for own, one in zip(layer.heads, layer.group(1).heads):
        own.W_K, own.W_V = one.W_K, one.W_V  # the mean, in the place of each of the three
    mh.nn.to_module(layer, attention)
after = loss()
print(f"{tokens.shape[1]} tokens")
print(f"3 key/value heads: loss {before:.2f}, as unsure as among {about(math.exp(before))} tokens")
print(f"1, their mean:     loss {after:.2f}, as unsure as among {about(math.exp(after))} tokens")

# %% [markdown]
# (The last figure is e to the loss.) Pooling alone breaks the model. The three heads learned to be different, and their
# mean is like none of them. It is a place to start training from, and no more: Ainslie et al. train for another 5% of
# the original steps, after which eight key/value heads do about as well as all of them did, and one a little worse.
