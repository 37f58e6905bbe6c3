"""What heads cost: nothing.

More heads sound like more to store and more to compute. They are not. The heads share the width of the model between
them, so twice as many heads are half as wide, and the matrices stay the size that they were.
"""

# %% [markdown]
# ## The table
#
# A layer of width 512 with 1 to 16 heads. W_Q, W_K, W_V and W_O are 512 x 512 each, however many heads share them. The
# multiplications count a token's way through the four matrices, and for each pair of tokens the score and the weighted
# value.

# %%
import torch

import multihead as mh
from multihead.accounting.layer import layer_costs

print("heads  width  parameters  multiplications")
print("                           a token    a pair")
for row in layer_costs(512, [1, 2, 4, 8, 16]):
    line = f"{row.heads:>5}  {row.d_head:>5}  {row.parameters:>10,}"
    print(f"{line}  {row.token_multiply_adds:>9,}  {row.pair_multiply_adds:>8,}")

# %% [markdown]
# 4 * 512 * 512 = 1,048,576, and that is the only number in three of the columns. The command `multihead params` prints
# this table for other widths.
#
# ## The same, counted on real layers
#
# A table can be wrong. Make the layers and count what is in them. (The meta device makes them without memory.)

# %%
for heads in (1, 2, 4, 8, 16):
    layer = mh.MultiHeadAttention(512, heads, device="meta")
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    print(f"heads {heads:>2}: {sum(p.numel() for p in layer.parameters()):,}  {shapes}")

# %% [markdown]
# W_QKV is W_Q, W_K and W_V one under another, so that one multiplication serves all three.
#
# And the work of attention itself, on a text of 1,000 tokens:

# %%
for heads in (1, 16):
    q = torch.zeros(1).expand(1, heads, 1000, 512 // heads)  # (B, H, L, D)
    print(f"heads {heads:>2}: {mh.explain(q, q, q).split('work: ')[1].splitlines()[0]}")

# %% [markdown]
# A cell is a score. There are 16 times as many with 16 heads, and each is 16 times cheaper.
#
# ## What biases add
#
# A bias is one number for each row of a matrix: 512 for each of the four.

# %%
for bias in (False, True):
    layer = mh.MultiHeadAttention(512, 8, bias=bias, device="meta")
    print(f"bias={bias!s:<5}  {sum(p.numel() for p in layer.parameters()):,}")
plain, biased = (layer_costs(512, [8], bias=bias)[0] for bias in (False, True))
print(f"biases add {biased.biases:,} = 4 * 512, {biased.biases / plain.parameters:.2%} of the weights")

# %% [markdown]
# ## So why not 512 heads?
#
# What shrinks is the width of a head. A head of width D compares tokens by D numbers, and can tell no more patterns
# apart than fit in D directions. `multihead lesson one-question` shows a head that is too narrow for what is
# asked of it. And one thing does grow with the number of heads: the table of weights has one number for each pair of
# tokens and each head.

# %%
for row in layer_costs(512, [1, 8, 512]):
    print(f"{row.heads:>3} heads of width {row.d_head:>3}: {row.pair_weights:>3} weights for each pair of tokens")
