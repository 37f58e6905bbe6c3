"""Patterns: one head by type, one by place.

Six tokens stand in a row: A0 B1 A2 C3 B4 D5. The letter is the token's type, the number its place. Two heads look at
them. The first knows types only, the second places only.
"""

# %% [markdown]
# ## What a token says of itself
#
# Four numbers: is it an A, is it a B, and two that say where it stands, as the sine and the cosine of half its place.
# (Sines and cosines, because then the product of two places depends on how far apart they are.)

# %%
import math

import multihead as mh
from multihead.lessons.inputs import LABELS, READERS, TYPED
from multihead.lessons.tools import numbers, symbols, table, weights

print("     type A, B    place")
for label, token in zip(LABELS, TYPED):
    print(f"{label}   {numbers(token[:2], 0)}      {numbers(token[2:])}")

# %% [markdown]
# ## Two heads
#
# Head 0 has matrices that pick the first two numbers, head 1 matrices that pick the last two. They pick the same for
# the question and for the answer: a token looks for those that are like itself.

# %%
layer = mh.MultiHeadAttention(d_model=4, n_heads=2).requires_grad_(False)
for head, matrix in zip(layer.heads, READERS):
    head.W_Q, head.W_K = matrix, matrix

seen = weights(layer, TYPED)  # (H=2, L=6, S=6)
print("head 0, by type")
print(symbols(seen[0], LABELS))
print("\nhead 1, by place")
print(symbols(seen[1], LABELS))

# %% [markdown]
# A row asks, a column is asked; `####` is a large weight, `##` a middling one, a dot a small one. Head 0 finds A with A
# and B with B, however far apart they are. C and D are of no type that it knows, so they look at everything alike. Head
# 1 sees a band: a token's neighbours, whatever they are.
#
# ## The same maps as numbers
#
# A map of three signs hides something. For A0, head 1 has `##` at A2 and at B1, and those are not the same weight:

# %%
for h in range(2):
    print(f"head {h}")
    print(table(seen[h], LABELS, digits=3), "\n")
print(f"head 1, A0 to A2: {seen[1, 0, 2]:.3f}    A0 to B1: {seen[1, 0, 1]:.3f}")

# %% [markdown]
# B1 is the nearer one and gets more. A picture of weights is good for finding a pattern. To compare two weights, print
# them.
#
# ## How the weights come about
#
# Each weight is exp(score) over the sum of its row, and a score is question times answer over the root of the head's
# width, here 2. For A0 and B1 the places are half a radian apart:

# %%
score = math.cos(0.5) / math.sqrt(2)
row = [math.cos(k / 2) / math.sqrt(2) for k in range(6)]
print(f"score {score:.3f}, weight {math.exp(score) / sum(map(math.exp, row)):.3f}")
