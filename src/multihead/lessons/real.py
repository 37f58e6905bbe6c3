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
models = {"SmolLM2": open_model("smollm2"), "MiniLM": open_model("minilm")}


def tokens_of(name, text):
    """The tokens of a text as a model has them: their numbers (1, L), and in words."""
    tokenizer = models[name].tokenizer
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return ids, [str(tokenizer.decode(token)).strip() for token in ids[0]]


def read(name, sentence):
    """The tokens of a sentence, and the weights that each head gives for "it": (layers, H, S)."""
    ids, words = tokens_of(name, sentence)
    with torch.no_grad(), mh.watch(models[name].model, keep=("query", "key")) as record:
        models[name].model(input_ids=ids)
    it = words.index("it")
    rows = [record.weights(layer, rows=slice(it, it + 1))[0, :, 0] for layer in record.layers]
    return words, torch.stack(rows)


seen = {name: read(name, SENTENCE) for name in models}
for name, (words, found) in seen.items():
    print(f"{name}: {found.shape[0]} layers of {found.shape[1]} heads, {len(words)} tokens")

# %% [markdown]
# ## Which head leads from "it" to "cat"
#
# Cat and mat are both nouns, both in reach, and only one of them can be tired. For each model, the head that puts
# most weight on cat. Heads are named layer.head.

# %%
best = {}
for name, (words, found) in seen.items():
    best[name] = divmod(int(found[:, :, words.index("cat")].argmax()), found.shape[1])
    layer, head = best[name]
    print(f"{name}, head {layer}.{head}: “it” looks at")
    for word, weight in zip(words, found[layer, head].tolist()):
        if weight >= 0.015:
            print(f"  {word:<6} {weight:.2f} {shade(weight)[0] * round(40 * weight)}".rstrip())

# %% [markdown]
# Both have one, and in both it passes over mat, although mat is nearer. The two models have different tokens, different
# texts and different tasks behind them, and each of them grew a head for this.
#
# ## Which head leads from "it" to "was tired"
#
# What tells us that "it" is the cat comes after it. A model that writes cannot look there: when it reads "it", the rest
# is not written yet.

# %%
for name, (words, found) in seen.items():
    ahead = found[:, :, words.index("was")] + found[:, :, words.index("tired")]
    layer, head = divmod(int(ahead.argmax()), found.shape[1])
    was, tired = (float(found[layer, head, words.index(word)]) for word in ("was", "tired"))
    most = f"head {layer}.{head} gives was {was:.2f}, tired {tired:.2f}" if ahead.max() > 0 else "no head: all give 0"
    print(f"{name:<8} {most}")

# %% [markdown]
# ## What such a head knows
#
# It is tempting to say that the head has understood the sentence. Then another ending should change its mind: a mat can
# be soft, and hardly tired. And so should another order.

# %%
for text in (SENTENCE, SENTENCE.replace("tired", "soft"), "The mat lay under the cat because it was soft."):
    print(text)
    for name, (layer, head) in best.items():
        words, found = read(name, text)
        cat, mat = (float(found[layer, head, words.index(word)]) for word in ("cat", "mat"))
        print(f"  {name:<8} head {layer}.{head}: cat {cat:.2f}, mat {mat:.2f}")

# %% [markdown]
# SmolLM2's head cannot know the ending, so its weights stay the same. It goes to what the sentence is
# about, its first noun, and in the last sentence that is mat. MiniLM's head can see the ending and hardly cares; it
# prefers cat even where the mat is meant. A head has a habit, and one sentence does not show which. Try others.
#
# ## By type and by place
#
# The two heads of `multihead lesson patterns` were made by hand: one by type, one by place. Here is one of each as
# training made it. The sentence is said twice, and we look at the second copy. By place: the head that puts most weight
# on the token just before. By type: the head that puts most on the same token in the first copy.

# %%
for name in models:
    ids, words = tokens_of(name, f"{SENTENCE} {SENTENCE}")
    first, second = (i for i, word in enumerate(words) if word == "cat")
    apart = second - first
    copies = (torch.arange(len(words)) - apart)[:, None].clamp(min=-1)  # of each row one key; -1: none
    statistics = mh.Statistics(offsets=(-1,), pairs=[copies])
    with torch.no_grad(), mh.watch(models[name].model, statistics) as record:
        models[name].model(input_ids=ids)
    for what, on in (("offset_mass", "the token before"), ("pair_mass", "the same token, earlier")):
        mass = record.stacked(what)[:, 0, :, second : second + apart - 1, 0].mean(-1)  # (layers, H)
        layer, head = divmod(int(mass.argmax()), mass.shape[1])
        print(f"{name:<8} head {layer}.{head}: {float(mass.max()):.2f} on {on}")

# %% [markdown]
# So the patterns that six tokens of four numbers can show are there in both models, learned from text. From here,
# `multihead look smollm2` goes on: every habit that is known, in every head.
