"""Why two heads, and why they differ.

A head asks one question of a sentence. For every word it spreads a weight of 1 over the words, and brings back the
mix of their values that those weights give. This lesson runs two heads over "The cat sat down", shows that no single
head can do the work of both, and then trains pairs of heads to see what makes them different in the first place.
"""

# %% [markdown]
# ## Two heads over one sentence
#
# The layer is six numbers wide and has two heads of three. Each row below is a word that asks, each column a word that
# is asked. A row sums to 1, and a darker shade is a larger weight.

# %%
import torch

import multihead as mh
from multihead.lessons.drawing import heads_picture
from multihead.lessons.inputs import SENTENCE, W_K, W_O, W_Q, W_V, WORDS
from multihead.lessons.tools import numbers, table, weights

layer = mh.MultiHeadAttention(d_model=6, n_heads=2).requires_grad_(False)
for h, head in enumerate(layer.heads):
    head.W_Q, head.W_K, head.W_V = W_Q[h], W_K[h], W_V[h]
    head.W_O = W_O[:, 3 * h : 3 * h + 3]

seen = weights(layer, SENTENCE)  # (H=2, L=4, S=4)
for h in range(2):
    print(f"head {h}")
    print(table(seen[h], WORDS), "\n")

# %% [markdown]
# Head 0 ties subject and verb together: The looks at cat, cat at sat, sat back at cat. Head 1 looks elsewhere: The and
# cat at The, down at sat. Their strongest link for each word:

# %%
for h in range(2):
    links = [f"{word} to {WORDS[row.argmax()]} {row.max():.2f}" for word, row in zip(WORDS, seen[h])]
    print(f"head {h}: " + ", ".join(links))
picture = heads_picture(seen, WORDS)

# %% [markdown]
# ## Why one head could not do both
#
# The wants 0.82 of cat and 0.62 of The. Those are weights of one row, and a row has 1 to give. A single head
# can only meet the two somewhere in between, and then it finds neither clearly.

# %%
wanted = seen[0, 0, 1] + seen[1, 0, 0]
print(f"The asks for {seen[0, 0, 1]:.2f} + {seen[1, 0, 0]:.2f} = {wanted:.2f}, and a row has 1.00")

halfway = seen.mean(0)
print("\na head halfway between the two")
print(table(halfway, WORDS))

# %% [markdown]
# There is a second loss. The two heads read different numbers of a word: here head 0 reads numbers 0 to 2 and head 1
# numbers 3 to 5. So The takes the first half of its news from cat and the second half from itself. One head has one set
# of weights for all that it reads, and has to bring both halves from the same words.

# %%
outputs = layer.head_outputs(SENTENCE[None])[0]  # (H=2, L=4, E=3)
print("two heads      ", numbers(outputs[0, 0]), numbers(outputs[1, 0]))
mixed = halfway[0] @ SENTENCE
print("one, halfway   ", numbers(mixed[:3]), numbers(mixed[3:]))

# %% [markdown]
# ## What makes two heads different
#
# Nothing in the layer tells head 0 and head 1 apart. Only their weights differ, and before training those are random.
# What if they were not?
#
# A task that needs two heads: each place of a row of eight has four random numbers, and its answer is the four numbers
# of the place before and the four of the place after. One head can fetch one neighbour. With no neighbour fetched the
# mean squared error is about 0.5, with one 0.25, with both 0.

# %%
PLACES, STEPS = 8, 250


def batch(generator):
    """Four rows of places, and what each place is to answer: (4, 8, 16) both."""
    said = torch.randn(4, PLACES, 4, generator=generator)
    place = torch.eye(PLACES).expand(4, PLACES, PLACES)
    empty = torch.zeros(4, PLACES, 4)
    before, after = said.roll(1, dims=1), said.roll(-1, dims=1)
    return torch.cat([said, place, empty], -1), torch.cat([before, after, empty, empty], -1)


def apart(layer):
    """The largest difference between the two heads, over all their matrices."""
    first, second = layer.heads
    pairs = [(getattr(first, name), getattr(second, name)) for name in ("W_Q", "W_K", "W_V", "W_O")]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def train(start, steps=STEPS):
    """Train two heads from a start; gives the layer and a list of (step, error, how far apart they are)."""
    torch.manual_seed(0)
    # Sequential: each head is computed by itself, so that equal heads get equal gradients to the last bit.
    layer = mh.MultiHeadAttention(d_model=16, n_heads=2, execution="sequential")
    first, second = layer.heads
    if start != "random":
        second.W_Q, second.W_K, second.W_V, second.W_O = first.W_Q, first.W_K, first.W_V, first.W_O
    if start == "nudged":
        with torch.no_grad():
            second.W_Q[0, 0] += 1e-6
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    history, errors = [], []
    for step in range(steps + 1):
        x, answer = batch(generator)
        loss = (layer(x) - answer).square().mean()
        errors = [*errors[-19:], loss.item()]
        if step % (STEPS // 5) == 0:
            history.append((step, sum(errors) / len(errors), apart(layer)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return layer, history


# %% [markdown]
# Three starts: two random heads; two equal heads; and two heads that are equal but for one number of the 512, which is
# one millionth larger in one of them. *Error* is the mean of the last twenty steps, *apart* the largest difference
# between the heads.

# %%
runs = {start: train(start) for start in ("random", "equal", "nudged")}
print("          random           equal            nudged")
print("step      error  apart     error  apart     error  apart")
for rows in zip(*(history for _, history in runs.values())):
    cells = [f"{error:.2f}  {gap:<8.2g}" for _, error, gap in rows]
    print(f"{rows[0][0]:<8}  " + "  ".join(cells).rstrip())

# %% [markdown]
# The equal heads get the same gradient at every step, so they stay equal: two heads, and the layer is stuck at the
# error that one head can reach. A millionth is enough to break the tie. The difference grows until the heads part,
# only later than with random ones.
#
# What the two heads of each layer look at in the end, as means over the places that have two neighbours:

# %%
x, _ = batch(torch.Generator().manual_seed(2))
for start, (layer, _) in runs.items():
    record = mh.nn.Record(mh.Statistics(offsets=(-1, 1)))
    layer(x, record=record)
    for h, (before, after) in enumerate(record.statistics["offset_mass"][:, :, 1:-1].mean((0, 2)).tolist()):
        print(f"{start if h == 0 else '':<8}head {h}: {before:.2f} on the place before, {after:.2f} on the place after")

# %% [markdown]
# That is why layers start from random weights. It is not that random weights are good. They are different.
