"""A tiny Llama written as GGUF with the `gguf` package, from tensors that the caller can compare with."""

import numpy as np

SIZES = {
    "vocabulary": 37,
    "d_model": 24,
    "d_mlp": 20,
    "layers": 2,
    "n_heads": 3,
    "n_kv_heads": 1,
    "d_head": 8,
}


def write(path, add_bos=False):
    """Write the file, weights in float32, and return what went in: a dict from GGUF's names to arrays."""
    import gguf

    s = SIZES
    random = np.random.default_rng(5)
    d_model, d_mlp, d_kv = s["d_model"], s["d_mlp"], s["n_kv_heads"] * s["d_head"]
    shapes = {
        "token_embd": (s["vocabulary"], d_model),
        "output_norm": (d_model,),
        "output": (s["vocabulary"], d_model),
    }
    for i in range(s["layers"]):
        shapes |= {
            f"blk.{i}.attn_norm": (d_model,),
            f"blk.{i}.attn_q": (d_model, d_model),
            f"blk.{i}.attn_k": (d_kv, d_model),
            f"blk.{i}.attn_v": (d_kv, d_model),
            f"blk.{i}.attn_output": (d_model, d_model),
            f"blk.{i}.ffn_norm": (d_model,),
            f"blk.{i}.ffn_gate": (d_mlp, d_model),
            f"blk.{i}.ffn_up": (d_mlp, d_model),
            f"blk.{i}.ffn_down": (d_model, d_mlp),
        }
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(61)
    writer.add_embedding_length(d_model)
    writer.add_block_count(s["layers"])
    writer.add_feed_forward_length(d_mlp)
    writer.add_head_count(s["n_heads"])
    writer.add_head_count_kv(s["n_kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(s["d_head"])
    writer.add_vocab_size(s["vocabulary"])
    letters = [chr(ord("a") + i) for i in range(26)]
    tokens = ["<s>", "</s>", "<unk>", "Ġ", *letters, "Ġa", "Ġb", *"ABCDE"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ a", "Ġ b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_add_bos_token(add_bos)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
