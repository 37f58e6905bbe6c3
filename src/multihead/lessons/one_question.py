"""One head, one question.

A server got a request, and then "it" did something. What is "it"? One reader wants to know who acts, and looks at
server. Another wants to know what was handled, and looks at request. A head cannot be both readers, and this lesson
shows the sum that says why.
"""

# %% [markdown]
# ## The first head
#
# Three tokens: server, request, it. The token "it" asks, and the first head is to give 0.5871 to server, 0.1859 to
# request and 0.2270 to itself. Which W_Q and W_K do that?
#
# We need not train for it. A weight is exp(score) over a sum, so the logarithms of the weights we want are the
# scores, up to one constant. `mh.nn.head_for` solves for the matrices. Each token is a direction of its own here, and
# the rows of server and request are left open (NaN).

# %%
import torch

import multihead as mh
from multihead.lessons.inputs import FIRST_ANSWER, QUESTION, SECOND_ANSWER
from multihead.lessons.tools import numbers, shade, weights, wrapped

x = torch.eye(3)  # (L=3, d_model=3)
wanted = torch.full((3, 3), torch.nan)
wanted[2] = FIRST_ANSWER
first = mh.nn.head_for(x, wanted)
print(wrapped(first))
print("W_Q", numbers(first.W_Q[0], 3))
print("W_K", numbers(first.W_K[0], 3))

# %% [markdown]
# A width of 1 is enough: "it" asks with one number, and each token answers with one.
#
# ## The second head
#
# This one is to rank request first, with 0.5880. What server and "it" get is left open.

# %%
wanted[2] = SECOND_ANSWER
second = mh.nn.head_for(x, wanted)
print(wrapped(second))

# %% [markdown]
# ## Both in one layer
#
# The designed matrices go into a layer of two heads, and the layer runs.

# %%
layer = mh.MultiHeadAttention(d_model=3, n_heads=2, d_head=1).requires_grad_(False)
for head, design in zip(layer.heads, (first, second)):
    head.W_Q, head.W_K = design.W_Q, design.W_K

seen = weights(layer, x)  # (H=2, L=3, S=3)
print("“it” looks at " + "".join(word.ljust(11) for word in QUESTION).rstrip())
for h in range(2):
    print(f"head {h}        " + "  ".join(f"{w:.4f} {shade(w)}" for w in seen[h, 2].tolist()))

# %% [markdown]
# ## One head, one budget
#
# Now ask one head for both: 0.5871 for server and 0.5880 for request. There is no need to try. The weights of a row
# sum to 1, and these are more.

# %%
both = torch.full((3, 3), torch.nan)
both[2, 0], both[2, 1] = FIRST_ANSWER[0], SECOND_ANSWER[1]
try:
    mh.nn.head_for(x, both)
except ValueError as error:
    print(wrapped(error))

# %% [markdown]
# What one head can do is share. With equal parts for both, and what "it" had before, each reader gets less than it
# wanted:

# %%
half = (1 - float(FIRST_ANSWER[2])) / 2
wanted[2] = torch.tensor([half, half, float(FIRST_ANSWER[2])])
shared = mh.nn.head_for(x, wanted)
for word, weight, was in zip(QUESTION, shared.weights[2].tolist(), seen[:, 2].max(0).values.tolist()):
    print(f"{word:<8} {weight:.4f}, and {was:.4f} from the head that looks at it most")

# %% [markdown]
# ## Narrow heads
#
# The width of a head sets how many questions it can keep apart. Let all three tokens ask now, each for another one. The
# best head of width 1 and of width 2:

# %%
each = torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]])
for width in (1, 2):
    design = mh.nn.head_for(x, each, width)
    print(wrapped(design))
    for word, row in zip(QUESTION, design.weights.tolist()):
        print(f"  {word:<8}" + "  ".join(f"{weight:.2f} {shade(weight)}" for weight in row))
