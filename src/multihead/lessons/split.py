"""Slicing against projecting.

A layer of two heads makes two short vectors of every token. It is tempting to see that as cutting: the first half of
the token for the first head, the second half for the second. That is not what happens. Each head multiplies the
whole token by a matrix of its own, and only what comes out is short.
"""

# %% [markdown]
# ## A token, cut
#
# Here is a token of eight numbers, and what two heads would get by cutting it: four numbers each, as they are.

# %%
import torch

import multihead as mh
from multihead.lessons.inputs import PROJECTIONS, TOKEN
from multihead.lessons.tools import numbers

print("token  ", numbers(TOKEN))
for h, part in enumerate(TOKEN.view(2, 4)):
    print(f"slice {h}", numbers(part))

# %% [markdown]
# ## The same token, projected
#
# A head has a matrix of four rows and eight columns. Each number of the head's vector is one row times the whole
# token.
#
# We let a real layer do it. It gets this one token and nothing else, so every head puts all of its weight on
# that token, and what comes out of the head is the token's value: W_V times the token.

# %%
layer = mh.MultiHeadAttention(d_model=8, n_heads=2).requires_grad_(False)
for head, matrix in zip(layer.heads, PROJECTIONS):
    head.W_V = matrix  # (D=4, d_model=8)

outputs = layer.head_outputs(TOKEN.view(1, 1, 8))  # (B=1, H=2, L=1, E=4)
for h, vector in enumerate(outputs[0, :, 0]):
    print(f"head {h}", numbers(vector))

# %% [markdown]
# The first of these numbers by hand. Row 0 of head 0 is mostly about number 0 of the token, and a little about
# numbers 1 and 4; number 4 is in the other half.

# %%
row = PROJECTIONS[0, 0]
terms = [f"{w:.1f} * {x:+.1f}" for w, x in zip(row.tolist(), TOKEN.tolist()) if w]
print(" + ".join(terms), f"= {float(row @ TOKEN):+.2f}")

# %% [markdown]
# ## What a slice cannot know
#
# Change the last number of the token, from -0.1 to +1.0. Slice 0 is the first half, so it stays as it was. Head 0
# notices, because its last row reads that number, with 0.2.

# %%
changed = TOKEN.clone()
changed[7] = 1.0
print("slice 0", numbers(TOKEN[:4]), "->", numbers(changed[:4]))
moved = layer.head_outputs(changed.view(1, 1, 8))[0, 0, 0]
print("head 0 ", numbers(outputs[0, 0, 0]), "->", numbers(moved))

# %% [markdown]
# ## A slice is one projection among many
#
# Give the heads matrices of ones and zeros and they cut: row i of head h picks number 4h + i. So a layer that projects
# can do all that a layer that slices can, for the same shape of result. Training decides what each head reads, and it
# is never held to its own half.

# %%
for head, matrix in zip(layer.heads, torch.eye(8).view(2, 4, 8)):
    head.W_V = matrix
for h, vector in enumerate(layer.head_outputs(TOKEN.view(1, 1, 8))[0, :, 0]):
    print(f"head {h}", numbers(vector))
