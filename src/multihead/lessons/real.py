"""The same in real models.

Two models read "The cat sat on the mat because it was tired." SmolLM2 writes texts, so each token sees only what is
before it. MiniLM turns sentences into vectors, so each token sees all of them. What do they make of "it"?
"""

# %% [markdown]
# ## Every weight of every head
#
# `mh.watch` sees a model's attention while it runs. We keep queries and keys, and ask for the exact weights of "it".

# %%
import torch

import multihead as mh
from multihead.heads.models import open_model
from multihead.lessons.tools import shade

SENTENCE = "The cat sat on the mat because it was tired."


def read(name):
    """The tokens of the sentence, and the weights that each head gives for "it": (layers, H, S)."""
    opened = open_model(name)
    inputs = opened.tokenizer(SENTENCE, return_tensors="pt")
    with torch.no_grad(), mh.watch(opened.model, keep=("query", "key")) as record:
        opened.model(**inputs)
    tokens = [str(opened.tokenizer.decode(token)).strip() for token in inputs["input_ids"][0]]
    it = tokens.index("it")
    rows = [record.weights(layer, rows=slice(it, it + 1))[0, :, 0] for layer in record.layers]
    return tokens, torch.stack(rows)


models = {"SmolLM2": read("smollm2"), "MiniLM": read("minilm")}
for name, (tokens, found) in models.items():
    print(f"{name}: {found.shape[0]} layers of {found.shape[1]} heads, {len(tokens)} tokens")

# %% [markdown]
# ## Which head leads from "it" to "cat"
#
# Cat and mat are both nouns, both in reach, and only one of them can be tired. For each model, the head that puts
# most weight on cat. Heads are named layer.head.

# %%
for name, (tokens, found) in models.items():
    on_cat = found[:, :, tokens.index("cat")]
    layer, head = divmod(int(on_cat.argmax()), found.shape[1])
    print(f"{name}, head {layer}.{head}: “it” looks at")
    for token, weight in zip(tokens, found[layer, head].tolist()):
        if weight >= 0.005:
            print(f"  {token:<8} {weight:.2f} {shade(weight)[0] * round(40 * weight)}".rstrip())

# %% [markdown]
# Both have one, and in both it passes over mat, although mat is nearer. The models have never met each other, they have
# different tokens and different tasks, and both grew a head for this.
#
# ## Which head leads from "it" to "was tired"
#
# What tells us that "it" is the cat comes after it. A model that writes cannot look there: when it reads "it", the rest
# is not written yet.

# %%
for name, (tokens, found) in models.items():
    ahead = found[:, :, tokens.index("was")] + found[:, :, tokens.index("tired")]
    layer, head = divmod(int(ahead.argmax()), found.shape[1])
    was, tired = (float(found[layer, head, tokens.index(word)]) for word in ("was", "tired"))
    best = f"head {layer}.{head} gives was {was:.2f}, tired {tired:.2f}" if ahead.max() > 0 else "no head, all are 0"
    print(f"{name:<8} {best}")

# %% [markdown]
# So how does SmolLM2 know that cats get tired, and not mats? At "it" it does not know of the tiredness. It bets on
# the likelier noun, from all the sentences that it has read.
#
# ## By type and by place
#
# The two heads of `multihead lesson patterns` were made by hand: one by type, one by place. Here is one of each as
# training made it. The sentence is said twice, and we look at the second copy. By place: the head that puts most weight
# on the token just before. By type: the head that puts most on the same token in the first copy.

# %%
for name, alias in (("SmolLM2", "smollm2"), ("MiniLM", "minilm")):
    opened = open_model(alias)
    ids = opened.tokenizer(f"{SENTENCE} {SENTENCE}", return_tensors="pt")["input_ids"][0]
    words = [str(opened.tokenizer.decode(token)).strip() for token in ids]
    first, second = (i for i, word in enumerate(words) if word == "cat")
    apart = second - first
    copies = (torch.arange(len(ids)) - apart)[:, None].clamp(min=-1)  # of each row one key; -1: none
    statistics = mh.Statistics(offsets=(-1,), pairs=[copies])
    with torch.no_grad(), mh.watch(opened.model, statistics) as record:
        opened.model(input_ids=ids[None])
    for what, on in (("offset_mass", "the token before"), ("pair_mass", "the same token, earlier")):
        mass = record.stacked(what)[:, 0, :, second : second + apart - 1, 0].mean(-1)  # (layers, H)
        layer, head = divmod(int(mass.argmax()), mass.shape[1])
        print(f"{name:<8} head {layer}.{head}: {float(mass.max()):.2f} on {on}")

# %% [markdown]
# So the patterns that six tokens and a few ones and zeros can show are there in both models, by themselves. `multihead
# look smollm2` goes on from here: every habit that is known, in every head.
