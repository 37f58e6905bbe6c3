"""Six exercises, answered by running.

Try each before reading on. The answers are what the code prints.
"""

# %% [markdown]
# ## 1. Four heads in place of two
#
# The layer of the lessons is six wide and has two heads. What happens with four?

# %%
import torch

import multihead as mh
from multihead.lessons.inputs import LABELS, READERS, SENTENCE, TYPED, W_K, W_O, W_Q, W_V
from multihead.lessons.tools import numbers, symbols, table, weights, wrapped

try:
    mh.MultiHeadAttention(6, 4)
except ValueError as error:
    print(wrapped(error))

# %% [markdown]
# Heads share the width of the model evenly, and six does not divide by four. So change one of the two numbers:

# %%
torch.manual_seed(0)
for d_model, heads in ((8, 4), (6, 3)):
    layer = mh.MultiHeadAttention(d_model, heads).requires_grad_(False)
    x = torch.randn(1, 4, d_model)
    outputs = layer.head_outputs(x)
    print(f"d_model {d_model}, {heads} heads of {layer.d_head}: each gives {tuple(outputs.shape[2:])} (L, E),")
    print(f"  side by side {tuple(outputs.transpose(1, 2).flatten(2).shape[1:])}, result {tuple(layer(x).shape[1:])}")

# %% [markdown]
# ## 2. One head
#
# How many parameters has a layer of width 512 with one head, next to one with eight? And what can one head not do?

# %%
for heads in (1, 8):
    layer = mh.MultiHeadAttention(512, heads, device="meta")
    print(f"{heads} of width {layer.d_head:>3}: {sum(p.numel() for p in layer.parameters()):,} parameters")

# %% [markdown]
# As many. But it has one row of weights for each token, so it asks one question at a time. For the sentence of six
# numbers a word: one head with all six, made of the matrices of both heads. Its scores are the sums of theirs.

# %%
single = mh.MultiHeadAttention(6, 1, scale=3**-0.5).requires_grad_(False)
single.head(0).W_Q, single.head(0).W_K = W_Q.flatten(0, 1), W_K.flatten(0, 1)
row = weights(single, SENTENCE)[0, 0]
print("The looks at The, cat, sat, down:", numbers(row))
print("weights that it would need:       cat 0.82 and The 0.62, together", f"{0.82 + 0.62:.2f}")

# %% [markdown]
# ## 3. One head after another
#
# Heads do not need each other until W_O. So a small device may run them one at a time. Is the result the same?

# %%
both = {}
for execution in ("parallel", "sequential"):
    layer = mh.MultiHeadAttention(6, 2, execution=execution).requires_grad_(False)
    for h, head in enumerate(layer.heads):
        head.W_Q, head.W_K, head.W_V, head.W_O = W_Q[h], W_K[h], W_V[h], W_O[:, 3 * h : 3 * h + 3]
    both[execution] = layer(SENTENCE[None])[0]
    print(f"{execution:<10} {numbers(both[execution][0])}")
difference = float((both["parallel"] - both["sequential"]).abs().max())
print("equal to rounding:", difference < 1e-6)

# %% [markdown]
# ## 4. Bytes
#
# How many bytes are all weights of a layer of width 64 with 8 heads, four bytes a number?

# %%
layer = mh.MultiHeadAttention(64, 8)
for name, parameter in layer.named_parameters():
    print(f"{name:<14} {tuple(parameter.shape)!s:<10} {parameter.numel() * parameter.element_size():>6,} bytes")
print(f"{'all':<25} {sum(p.numel() * p.element_size() for p in layer.parameters()):>6,} bytes")

# %% [markdown]
# 4 matrices * 64 * 64 * 4 bytes. The number of heads is not in it.
#
# ## 5. Biases
#
# What do biases add to that layer?

# %%
plain, biased = (mh.MultiHeadAttention(64, 8, bias=bias) for bias in (False, True))
counts = [sum(p.numel() for p in layer.parameters()) for layer in (plain, biased)]
added = {name: tuple(p.shape) for name, p in biased.named_parameters() if name.endswith("bias")}
print(f"{counts[0]:,} -> {counts[1]:,} parameters: {counts[1] - counts[0]} more")
print(added)

# %% [markdown]
# 4 * 64, a number for each row of the four matrices: 1,024 bytes. What does the one on the keys do? It adds the same to
# all scores of a row, and a softmax does not see that:

# %%
biased.requires_grad_(False)
x = torch.randn(5, 64)
before = weights(biased, x)
biased.get_parameter("W_QKV.bias")[64:128] = torch.randn(64)  # those of W_K
change = float((weights(biased, x) - before).abs().max())
print("weights with a bias of the keys differ by less than a millionth:", change < 1e-6)

# %% [markdown]
# ## 6. A third head that looks two ahead
#
# In `multihead lesson patterns` one head went by type and one by place. Add a third to that layer, which puts 0.9
# of each token's weight on the token two places on. The last two tokens have none, so their rows are left open, and so
# is where the remaining 0.1 goes.

# %%
wanted = torch.full((6, 6), torch.nan)
for i in range(4):
    wanted[i, i + 2] = 0.9
ahead = mh.nn.head_for(TYPED, wanted, d_head=2)
print(wrapped(ahead))

layer = mh.MultiHeadAttention(4, 3, d_head=2).requires_grad_(False)
for head, matrix in zip(layer.heads, READERS):
    head.W_Q, head.W_K = matrix, matrix
layer.head(2).W_Q, layer.head(2).W_K = ahead.W_Q, ahead.W_K
third = weights(layer, TYPED)[2]
print(symbols(third, LABELS), "\n")
print(table(third, LABELS))

# %% [markdown]
# Asking for more can be too much. With the remaining 0.1 spread evenly, the wanted weights have no matrix of this
# width, and `head_for` says what stands in the way:

# %%
for i in range(4):
    wanted[i] = 0.1 / 5
    wanted[i, i + 2] = 0.9
print(wrapped(mh.nn.head_for(TYPED, wanted, d_head=2)))
