"""Concatenation, and what W_O is for.

Each head gives a short vector for every word. The layer writes them one after another, and multiplies the long vector
that this makes by a last matrix, W_O. Until then nothing has passed from one head to another.
"""

# %% [markdown]
# ## What the heads give
#
# The layer and the sentence of the lesson before (`multihead lesson heads`). What each head gives for the first two
# words:

# %%
import multihead as mh
from multihead.lessons.drawing import layer_drawing, layer_picture
from multihead.lessons.inputs import SENTENCE, W_K, W_O, W_Q, W_V, WORDS
from multihead.lessons.tools import numbers

layer = mh.MultiHeadAttention(d_model=6, n_heads=2).requires_grad_(False)
for h, head in enumerate(layer.heads):
    head.W_Q, head.W_K, head.W_V = W_Q[h], W_K[h], W_V[h]
    head.W_O = W_O[:, 3 * h : 3 * h + 3]

outputs = layer.head_outputs(SENTENCE[None])[0]  # (H=2, L=4, E=3)
for h in range(2):
    for word, vector in zip(WORDS[:2], outputs[h]):
        print(f"head {h}  {word}  {numbers(vector)}")

# %% [markdown]
# Head 1 gives The and cat the same vector, to two decimals: both look at the same words, so the same comes back. It
# hardly tells them apart. Head 0 does. How far the two words are from each other, by each head:

# %%
for h in range(2):
    print(f"head {h}: {float((outputs[h, 0] - outputs[h, 1]).norm()):.4f}")

# %% [markdown]
# ## One after another
#
# The two vectors of three make one of six. The first half is what head 0 said, the second what head 1 said.

# %%
concatenated = outputs.transpose(0, 1).flatten(1)  # (L=4, H*E=6)
for word, vector in zip(WORDS, concatenated):
    print(f"{word:<5}", numbers(vector))

# %% [markdown]
# ## Then W_O
#
# Every number of the result is a row of W_O times all six, so here the heads meet. Take The: its third number was
# +0.12, said by head 0 alone.

# %%
result = layer(SENTENCE[None])[0]  # (L=4, d_model=6)
for word, vector in zip(WORDS, result):
    print(f"{word:<5}", numbers(vector))
print(f"\nthird number of The: {concatenated[0, 2]:+.2f} -> {result[0, 2]:+.2f}")

# %% [markdown]
# Where the +0.40 comes from. Row 2 of W_O keeps 0.9 of the number itself, and adds what it takes from head 0's second
# number and from two numbers of head 1:

# %%
for column, (weight, number) in enumerate(zip(W_O[2].tolist(), concatenated[0].tolist())):
    if weight:
        print(f"  {weight:.1f} * {number:+.2f} = {weight * number:+.2f}   head {column // 3}, its number {column % 3}")
print(f"  sum          {result[0, 2]:+.2f}")

# %% [markdown]
# ## The same as a sum
#
# W_O has three columns for each head. So concatenating and multiplying is the same as letting each head multiply by its
# own columns, and adding. This is why a head can be looked at, or left out, by itself.

# %%
parts = layer.contributions(SENTENCE[None])[0]  # (H=2, L=4, d_model=6)
print("head 0 adds to The", numbers(parts[0, 0]))
print("head 1 adds to The", numbers(parts[1, 0]))
print("sum               ", numbers(parts[:, 0].sum(0)))

# %% [markdown]
# ## The whole layer, for one word
#
# From the word to its result, every number made by the layer.

# %%
print(layer_drawing(layer, SENTENCE, WORDS, word=0))
picture = layer_picture(layer, SENTENCE, WORDS, word=0)
