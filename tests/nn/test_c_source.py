"""A layer as C: compiled, run, and compared with the layer; its memory as the compiler sees it."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import multihead as mh
from multihead.cli import app

safetensors = pytest.importorskip("safetensors.torch")
compiler = shutil.which("gcc")
needs_compiler = pytest.mark.skipif(compiler is None, reason="no gcc")
STRICT = ["-std=c99", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
L = 7
LAYERS = {
    "plain": {},
    "MQA, biases": {"n_kv_heads": 1, "bias": True},
    "no bias of keys": {"bias": (True, False, True), "output_bias": False},
    "GQA, causal": {"n_kv_heads": 2, "causal": True, "d_head": 6, "d_value": 5},
    "window": {"window": (2, 1), "scale": 0.3},
    "window to the left": {"window": (2, None), "layout": "separate"},
    "window of what is to come": {"window": (None, 2)},
    "rotary": {"rotary": mh.nn.Rotary(fraction=0.67), "d_head": 6, "causal": True},
    "rotary, interleaved": {"rotary": mh.nn.Rotary(pairing="interleaved", scaling=mh.nn.LinearScaling(2)), "d_head": 4},
    "alibi, both ways": {"alibi": True},
    "norm": {"qk_norm": "rms"},
    "softcap": {"softcap": 0.5, "sinks": True, "causal": True},
    "gate": {"gate": True},
    "gate of heads": {"gate": "headwise"},
    "all": {
        "n_kv_heads": 2,
        "bias": True,
        "causal": True,
        "window": (3, None),
        "rotary": mh.nn.Rotary(scaling=mh.nn.Llama3Scaling(trained_context=5)),
        "qk_norm": "rms",
        "softcap": 2.0,
        "sinks": True,
        "gate": True,
        "d_head": 4,
        "d_value": 3,
    },
}  # fmt: skip


def layer_of(options):
    """A layer in which no bias, norm or sink is what it begins with."""
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(12, 4, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:
            norm.eps = 0.1
    return layer


def run(folder, text, shape, *inputs):
    """Compile the file and a main beside it, and give what the function makes of the inputs, and the object file."""
    (folder / "layer.c").write_text(text)
    arrays = "\n".join(
        f"static const float in{i}[] = {{{', '.join(float(x).hex() for x in tensor.flatten())}}};"
        for i, tensor in enumerate(inputs)
    )
    arguments = ", ".join(f"in{i}" for i in range(len(inputs)))
    parameters = ", ".join(["const float *"] * len(inputs))
    (folder / "main.c").write_text(
        f"#include <stdio.h>\nvoid attention({parameters}, float *);\n{arrays}\n"
        f"static float y[{shape.numel()}];\n"
        f"int main(void) {{\n  for (int again = 0; again < 2; ++again) attention({arguments}, y);\n"
        f'  for (int i = 0; i < {shape.numel()}; ++i) printf("%.9g\\n", y[i]);\n  return 0;\n}}\n'
    )
    for name in ("layer", "main"):
        subprocess.run([compiler, *STRICT, "-c", f"{name}.c", "-o", f"{name}.o"], cwd=folder, check=True)
    subprocess.run([compiler, "layer.o", "main.o", "-lm", "-o", "main"], cwd=folder, check=True)
    done = subprocess.run(["./main"], cwd=folder, check=True, capture_output=True, text=True)
    return torch.tensor([float(x) for x in done.stdout.split()]).view(shape), folder / "layer.o"


def section(path, name):
    """Bytes of a section of an object file, all that begin with its name."""
    listed = subprocess.run(["size", "-A", path], check=True, capture_output=True, text=True).stdout
    return sum(int(line.split()[1]) for line in listed.splitlines() if line.startswith(name))


@needs_compiler
@pytest.mark.parametrize("name", LAYERS)
def test_the_compiled_file_is_the_layer(name, tmp_path):
    layer = layer_of(LAYERS[name])
    x = torch.randn(L, 12)
    source = mh.nn.c_source(layer, L)
    found, _ = run(tmp_path, source.text, x.shape, x)
    with torch.no_grad():
        expected = layer.double()(x[None].double())[0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [5, L, 11])
def test_a_context(keys, causal, tmp_path):
    layer = layer_of({"d_context": 10, "n_kv_heads": 2, "bias": True, "causal": causal})
    x, context = torch.randn(L, 12), torch.randn(keys, 10)
    found, _ = run(tmp_path, mh.nn.c_source(layer, L, keys).text, x.shape, x, context)
    with torch.no_grad():
        expected = layer(x[None], context[None])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@needs_compiler
@pytest.mark.skipif(shutil.which("size") is None, reason="no size of binutils")
def test_memory_is_what_the_compiler_lays_out(tmp_path, record_property):
    layer = layer_of(LAYERS["GQA, causal"])
    x = torch.randn(L, 12)
    source = mh.nn.c_source(layer, L)
    _, binary = run(tmp_path, source.text, x.shape, x)
    parameters = sum(p.numel() for p in layer.parameters())
    assert source.flash == 4 * parameters
    assert source.ram == 4 * (L * (6 + 5) + 6 + L + 5)
    # Arrays begin at borders of up to 32 bytes; constants of the code are among what is read only.
    assert source.ram <= section(binary, ".bss") <= source.ram + 5 * 32
    assert source.flash <= section(binary, ".rodata") <= source.flash + 4 * 32 + 64
    assert section(binary, ".data") == 0
    record_property("ram", source.ram)
    record_property("flash", source.flash)


@needs_compiler
def test_the_command_writes_it_and_says_what_it_takes(tmp_path):
    layer, path = layer_of(LAYERS["all"]), tmp_path / "layer.safetensors"
    mh.nn.save(layer, path)
    output = tmp_path / "attention.c"
    done = CliRunner().invoke(app, ["export-c", str(path), "-o", str(output), "--length", str(L)])
    assert done.exit_code == 0, done.output
    source = mh.nn.c_source(layer, L)
    assert output.read_text() == source.text
    assert f"{source.ram:,} bytes" in done.stdout and f"{source.flash:,} bytes" in done.stdout


@needs_compiler
def test_a_state_dict_of_the_textbook_module(tmp_path):
    torch.manual_seed(0)
    matrices = {f"W_{part}": nn.Linear(12, 12, bias=False) for part in "QKVO"}
    path, output = tmp_path / "textbook.safetensors", tmp_path / "textbook.c"
    safetensors.save_file(nn.ModuleDict(matrices).state_dict(), path)
    arguments = ["export-c", str(path), "-o", str(output), "--length", str(L)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and "--heads" in done.stderr and not output.exists()
    done = CliRunner().invoke(app, [*arguments, "--heads", "3"])
    assert done.exit_code == 0, done.output
    x = torch.randn(L, 12)
    found, _ = run(tmp_path, output.read_text(), x.shape, x)
    q, k, v = (matrices[f"W_{part}"](x).view(L, 3, 4).transpose(0, 1) for part in "QKV")
    expected = matrices["W_O"](nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_a_file_gives_the_layer_again(name, tmp_path):
    layer = layer_of(LAYERS[name])
    mh.nn.save(layer, tmp_path / "layer.safetensors")
    again = mh.nn.load(tmp_path / "layer.safetensors")
    x = torch.randn(2, L, 12)
    assert torch.equal(again(x), layer(x)) and again.extra_repr() == layer.extra_repr() and not again.training


def test_sizes_are_read_off_a_state_dict(tmp_path):
    x = torch.randn(2, L, 12)
    for options in ({}, {"n_kv_heads": 2, "d_head": 5, "d_value": 7, "bias": True}, {"gate": True, "qk_norm": "rms"}):
        for layout in ("packed", "separate"):
            layer = layer_of({**options, "layout": layout})
            for norm in (layer.q_norm, layer.k_norm):
                if norm is not None:
                    norm.eps = 1e-6  # a state dict does not say it
            safetensors.save_file(layer.state_dict(), tmp_path / "state.safetensors")
            said = {"n_heads": 4} | ({"n_kv_heads": 2} if options.get("n_kv_heads") and layout == "packed" else {})
            assert torch.allclose(mh.nn.load(tmp_path / "state.safetensors", **said)(x), layer(x), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.safetensors"], "which is not there"),
        (["broken.safetensors"], "no safetensors file"),
        (["other.safetensors"], "expected the tensors of one layer"),
        (["layer.safetensors", "--length", "0"], "length: expected 1 or more"),
        (["layer.safetensors", "--name", "9lives"], "name: expected a name in C"),
        (["layer.safetensors", "--context-length", "3"], "context_length: expected None"),
        (["layer.safetensors", "--heads", "5"], "divides the H=5 heads"),
    ],
)
def test_what_cannot_be_used_is_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.safetensors").write_text("no")
    safetensors.save_file({"wte.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    mh.nn.save(mh.MultiHeadAttention(12, 4), tmp_path / "layer.safetensors")
    done = CliRunner().invoke(app, ["export-c", *arguments, "-o", "out.c"])
    assert done.exit_code == 2 and not (tmp_path / "out.c").exists()
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_an_ablated_layer_is_refused():
    layer = mh.MultiHeadAttention(12, 4)
    with layer.ablate([1]), pytest.raises(ValueError, match="prune_heads"):
        mh.nn.c_source(layer, 3)
