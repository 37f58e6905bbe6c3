"""Multihead as the attention of a Hugging Face model: one word, no model code.

The model here is a small Llama with random weights, so that nothing is downloaded. With a real one:
`AutoModelForCausalLM.from_pretrained(name, attn_implementation="multihead")`.

    python examples/huggingface_backend.py
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import multihead  # noqa: F401 - makes the name "multihead" known to transformers


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=96, intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="multihead").eval()

    ids = torch.randint(3, 500, (2, 17))
    real = torch.ones_like(ids)
    real[0, :5] = 0  # the first sequence is shorter: padding on its left
    inputs = {"input_ids": ids, "attention_mask": real}
    with torch.no_grad():
        ours = model(**inputs).logits
        model.set_attn_implementation("eager")
        eager = model(**inputs).logits
    print(f"largest difference from eager at real tokens: {(ours - eager)[real.bool()].abs().max():.1e}")

    model.set_attn_implementation("multihead")
    told = model.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)
    print(f"generated {told.shape[1] - ids.shape[1]} tokens a sequence, with a cache")


if __name__ == "__main__":
    main()
