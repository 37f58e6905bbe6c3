"""Attention on plain tensors, with what its heads did, and which path computed it.

python examples/observe_attention.py
"""

import torch

import multihead as mh

H, G, L, D = 8, 2, 1000, 64


def main() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, H, L, D)
    key, value = torch.randn(1, G, L, D), torch.randn(1, G, L, D)
    # Plant two heads: head 0 looks for what the key before it says, head 1 for the first key.
    query[:, 0, 1:] = 3 * key[:, 0, :-1]
    query[:, 1] = 3 * key[:, 0, :1]

    statistics = mh.Statistics("entropy", "effective_keys", "argmax", offsets=(-1,))
    seen = mh.observe(query, key, value, causal=True, statistics=statistics)
    assert torch.equal(seen.output, mh.attention(query, key, value, causal=True)), "seeing changes nothing"

    print("head  entropy  effective keys  on the key before  row 500 looks at")
    for head in range(H):
        print(
            f"{head:>4}{seen.entropy[0, head].mean():>9.2f}{seen.effective_keys[0, head].mean():>16.1f}"
            f"{seen.offset_mass[0, head, 1:, 0].mean():>19.2f}{seen.argmax[0, head, 500]:>18}"
        )

    print("\nA window of 128 keys:")
    print(mh.explain(query, key, value, causal=True, window=(127, 0)))
    print("\nOver tiles in plain PyTorch, as on other devices than the CPU:")
    print(mh.explain(query, key, value, causal=True, impl="tiled"))


if __name__ == "__main__":
    main()
