"""`mh.plan`, `multihead plan` and `multihead params`: what they say, write, draw and refuse."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

import multihead as mh
from multihead.accounting import units
from multihead.accounting.architectures import ARCHITECTURES
from multihead.accounting.bounds import DEVICES
from multihead.accounting.count import BITS
from multihead.accounting.fields import ConfigError
from multihead.accounting.layer import layer_costs
from multihead.accounting.plan import room, size
from multihead.accounting.presets import PRESETS
from multihead.cli import app
from multihead.show import costs


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run `multihead` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result):
    """What a command printed, in one line."""
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_what_sources_say_and_what_is_true():
    assert mh.plan("gpt2").remarks() == [
        "Said to have 117M parameters (Radford et al. 2019, Table 2), but has 124,439,808: 6.4% more."
    ]
    assert "Said to have 1542M parameters" in mh.plan("gpt2-xl").remarks()[0]
    assert "but has 1,557,611,200" in mh.plan("gpt2-xl").remarks()[0]
    assert mh.plan("llama-3-8b", context="128K").remarks() == [
        "Said to have 8B parameters (Dubey et al. 2024, The Llama 3 Herd of Models), and has 8,030,261,248.",
        "4 × d_model² = 67,108,864 attention parameters a layer would be MHA; with its 8 key/value heads it is "
        "41,943,040: 1.342B in all, not 2.147B.",
        "Its cache for 131,072 tokens would be 64 GiB as MHA (2 GiB a layer); with its 8 key/value heads it is 16 GiB.",
        "The model was not made for texts beyond 8,192 tokens.",
    ]
    assert "Its weights, 131.4 GiB, do not fit in 80 GB." in mh.plan("llama-3-70b").remarks()
    assert "The model has no positions beyond 1,024 tokens." in mh.plan("gpt2", context=1025).remarks()
    tight = mh.plan("llama-3-8b", context="128K", memory="24GB").remarks()
    assert tight[-1] == "Weights and cache, 30.96 GiB, do not fit in 24 GB."


def test_ways_of_sharing():
    def ways(name, **options):
        return [(v.kind, v.n_kv_heads, v.own) for v in mh.plan(name, **options).variants]

    assert ways("llama-3-8b") == [("MHA", 32, False), ("GQA", 8, True), ("MQA", 1, False)]
    assert ways("gpt2") == [("MHA", 12, True), ("GQA", 6, False), ("MQA", 1, False)]
    assert ways("falcon-7b") == [("MHA", 71, False), ("MQA", 1, True)]
    assert ways("llama-3-8b", kv_heads=[1, 2, 32]) == [(*way, False) for way in [("MHA", 32)]] + [
        ("GQA", 8, True),
        ("GQA", 2, False),
        ("MQA", 1, False),
    ]
    assert ways("bert-base") == [("MHA", 12, True)]
    assert ways("deepseek-v3") == [("MHA", 128, False), ("MLA", 128, True)]
    whole, latent = mh.plan("deepseek-v3", context=1000).variants
    assert whole.cache == 61 * 128 * (192 + 128) * 2 * 1000 and latent.cache == 61 * 576 * 2 * 1000


def test_the_figures_of_a_variant():
    plan = mh.plan("llama-3-8b", context="128K", batch=4, memory="100GiB")
    own = plan.own
    assert (own.cache_token_layer, own.cache_token, own.cache_layer, own.cache) == (4096, 131072, 2 << 30, 64 << 30)
    assert own.weight_bytes == 2 * 8_030_261_248
    assert (own.largest_batch, own.largest_context) == (5, ((100 << 30) - own.weight_bytes) // (4 * 131072))
    assert plan.parameters("attention") == 1_342_177_280 and str(plan).startswith(
        "llama-3-8b: 8,030,261,248 parameters"
    )
    # Of layers with a window and layers without, the largest is told.
    gemma = mh.plan("gemma-2-9b", context=8192).own
    assert gemma.cache_layer == 2 * 8 * 256 * 2 * 8192 and gemma.cache == 21 * gemma.cache_layer * 3 // 2


def test_types_and_machines():
    assert mh.plan("gpt2", dtype="int4").types.cache == "bf16" and mh.plan("gpt2", dtype="f32").types.cache == "f32"
    assert mh.plan("gpt2", dtype="int4").own.weight_bytes == 124_439_808 // 2
    machine = mh.plan("gpt2", device="a100", flops="100T", bandwidth="2TB/s").device
    assert (machine.flops, machine.bandwidth, machine.memory) == (100e12, 2e12, 80 * 10**9)
    assert machine.name == "a100, changed" and mh.plan("gpt2", device="a100").device.name == "a100"
    assert mh.plan("gpt2", device=machine).device is machine


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 0}, "context: expected a number of tokens"),
        ({"context": "12 K"}, "context"),
        ({"context": True}, "context"),
        ({"batch": 0}, "batch: expected a whole number from 1 up, got 0"),
        ({"batch": 1.5}, "batch"),
        ({"dtype": "f64"}, "dtype"),
        ({"cache_dtype": "f64"}, "cache_dtype"),
        ({"kv_heads": [5]}, r"kv_heads: expected a divisor of the 12 query heads \(H\), got 5"),
        ({"kv_heads": [0]}, "kv_heads"),
        ({"device": "abacus"}, "device"),
        ({"flops": "0"}, "flops"),
        ({"bandwidth": "-1"}, "bandwidth"),
        ({"memory": "24 apples"}, "memory: expected a size"),
    ],
)
def test_arguments_that_make_no_sense_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        mh.plan("gpt2", **options)


def test_latent_attention_has_no_heads_to_share():
    with pytest.raises(ConfigError, match="multi-head latent attention"):
        mh.plan("deepseek-v3", kv_heads=[8])


def test_units():
    assert units.tokens("128K") == units.tokens("128k") == 131072 and units.tokens("1M") == 1 << 20
    assert (
        units.memory("24GB") == 24 * 10**9 and units.memory("24GiB") == 24 << 30 and units.memory("1.5gb") == 15 * 10**8
    )
    assert units.memory("24G") == 24 * 10**9 and units.memory(1000) == 1000
    assert units.rate("3.35TB/s", "x") == 3.35e12 and units.rate("989.4T", "x") == 989.4e12
    assert units.rate("67 TFLOP/s", "x") == 67e12 and units.rate(2.5e12, "x") == 2.5e12
    assert (size(16 << 30), size(512), size(70272), room(80 * 10**9), room(64 << 30)) == (
        *("16 GiB", "512 bytes", "68.62 KiB", "80 GB", "64 GiB"),
    )


def printed(renderable, width):
    console = Console(width=width, no_color=True, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


@pytest.mark.parametrize("name", PRESETS)
def test_no_figure_is_cut_on_80_columns(name):
    plan = mh.plan(name)
    text = printed(costs.report(plan), 80)
    assert "…" not in text and max(map(cell_len, text.splitlines())) <= 80
    for block in plan.model.blocks:
        for weight in block.weights:
            if len(weight.shape) > 1:
                assert f" {block.layers * weight.parameters:,} " in text
    for variant in plan.variants:
        for figure in (f"{variant.parameters:,}", size(variant.cache) if variant.cache else "tokens"):
            assert figure in text


def test_plan_prints_what_the_model_costs(run):
    text = said(run("plan", "llama-3-8b", "--context", "128K", "--kv-heads", "1,8,32", "--memory", "24GB"))
    assert "32 query heads, 8 key/value heads (GQA) · d_head 128 · d_model 4096 · counted as LlamaForCausalLM" in text
    assert "all of it 218,112,000 32 6,979,584,000 after" in text
    assert "attention 1,342,177,280 feed-forward 5,637,144,576 embeddings 1,050,673,152 norms 266,240" in text
    assert "MHA 32 GQA 8 MQA 1" in text and "in all 64 GiB 16 GiB 2 GiB" in text
    assert "a token, a layer 16 KiB 4 KiB 512 bytes" in text and "a layer 2 GiB 512 MiB 64 MiB" in text
    # By hand: what the weights leave of 24 GB, over the bytes of a token.
    less = 32 * 2 * 4096 * 128  # weights of one key/value head in all layers
    left = {g: 24 * 10**9 - 2 * (8_030_261_248 + (g - 8) * less) for g in (32, 8, 1)}
    most = [left[g] // (32 * g * 2 * 128 * 2) for g in (32, 8, 1)]
    assert "largest context in 24 GB {:,} {:,} {:,} largest batch".format(*most) in text
    assert "A multiply-add is 2 FLOPs." in text


def test_several_models_stand_beside_each_other(run):
    text = said(run("plan", "gpt2", "bert-base", "llama-3-8b", "--context", "1K"))
    assert "gpt2 MHA 12 124,439,808 36 KiB 36 MiB" in text and "bert-base MHA 12 109,482,240 none none no limit" in text
    assert "llama-3-8b GQA 8 8,030,261,248 128 KiB 128 MiB" in text and "MQA 1" not in text
    assert "llama-3-8b MQA 1" in said(run("plan", "gpt2", "llama-3-8b", "--kv-heads", "1"))


def test_plan_writes_json_csv_and_a_plot(run):
    pytest.importorskip("matplotlib")
    outputs = ("--json", "p.json", "--csv", "p.csv", "--plot", "p.svg")
    result = run("plan", "llama-3-8b", "gpt2", "--batch", "3", *outputs)
    assert result.exit_code == 0 and result.stdout.splitlines()[-3:] == ["p.json", "p.csv", "p.svg"]
    first, second = json.loads(Path("p.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)["plans"]
    assert first == json.loads(json.dumps(mh.plan("llama-3-8b", batch=3).to_dict()))
    assert sum(row["parameters"] for row in first["matrices"]) == sum(first["parts"].values()) == 8_030_261_248
    assert second["claims"][0]["holds"] is False
    with open("p.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["kv_heads"], row["own"]) for row in rows[:3]] == [
        *(("llama-3-8b", "32", "False"), ("llama-3-8b", "8", "True"), ("llama-3-8b", "1", "False")),
    ]
    own = mh.plan("llama-3-8b", batch=3).own
    assert int(rows[1]["prefill_flops"]) == own.prefill.flops and rows[1]["decode_limit"] == own.decode_bound.limit
    assert int(rows[1]["attention"]) == 1_342_177_280 and int(rows[1]["cache"]) == own.cache
    drawn = Path("p.svg").read_text(encoding="utf-8")
    for words in ("8,030,261,248", "llama-3-8b (GQA, G = 8)", "feed-forward", "gpt2, decode", "ridge 295", "80 GB"):
        assert words in drawn
    first_bytes = Path("p.svg").read_bytes()
    run("plan", "llama-3-8b", "gpt2", "--batch", "3", "--plot", "p.svg")
    assert Path("p.svg").read_bytes() == first_bytes


@pytest.mark.parametrize(("name", "start"), [("p.png", b"\x89PNG"), ("p.PDF", b"%PDF")])
def test_plots_of_other_kinds(run, name, start):
    pytest.importorskip("matplotlib")
    for model in ("bert-base", "deepseek-v3"):  # without a cache, and without heads to share
        assert run("plan", model, "--plot", name).exit_code == 0
        assert Path(name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "gpt5"), ("gpt5", "did you mean")),
        (("plan", "gpt2", "--context", "x"), ("context", "128K")),
        (("plan", "gpt2", "--batch", "0"), ("batch",)),
        (("plan", "gpt2", "--kv-heads", "5"), ("12 query heads", "got 5")),
        (("plan", "gpt2", "--kv-heads", "a"), ("--kv-heads", "1,8,32", "'a'")),
        (("plan", "deepseek-v3", "--kv-heads", "1"), ("latent",)),
        (("plan", "."), ("no config.json",)),
        (("plan", "gpt2", "--plot", "p.gif"), ("--plot", ".svg")),
        (("plan", "gpt2", "--json", "a", "--csv", "a"), ("same path",)),
        (("plan", "gpt2", "--json", "no/where.json"), ("cannot write",)),
        (("params", "--heads", "6"), ("d_model 512 is not divisible by 6 heads",)),
        (("params", "--heads", "0"), ("0 heads",)),
        (("params", "--heads", ""), ("--heads",)),
        (("params", "--d-model", "0"), ("d_model",)),
        (("params", "--dtype", "x"), ("dtype",)),
    ],
)
def test_refusals_are_one_line_and_code_2(run, arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    for word in words:
        assert word in line
    assert result.stdout == "" and list(Path().iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = run("plan", "gpt2", "--plot", "p.png")
    assert result.exit_code == 2 and "multihead[plot]" in result.stderr


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_a_layer_has_the_parameters_of_pytorchs_and_of_ours(heads, bias):
    (row,) = layer_costs(512, [heads], bias=bias)
    theirs = torch.nn.MultiheadAttention(512, heads, bias=bias, device="meta")
    ours = mh.MultiHeadAttention(512, heads, bias=bias, device="meta")
    for module in (theirs, ours):
        assert sum(parameter.numel() for parameter in module.parameters()) == row.parameters
    assert row.parameters == 1_048_576 + 2048 * bias


def test_the_products_of_a_layer_are_those_that_pytorch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    rows = layer_costs(48, [1, 2, 3, 6])
    for row in rows:
        layer = torch.nn.MultiheadAttention(48, row.heads, bias=False, batch_first=True)
        x = torch.randn(1, 7, 48)
        with FlopCounterMode(display=False) as counter:
            _, weights = layer(x, x, x, average_attn_weights=False)
        assert counter.get_total_flops() == 2 * (7 * row.token_multiply_adds + 49 * row.pair_multiply_adds)
        assert weights.numel() == 49 * row.pair_weights
    assert len({(row.token_multiply_adds, row.pair_multiply_adds) for row in rows}) == 1


def test_params_prints_that_heads_cost_nothing(run):
    text = said(run("params", "--d-model", "512", "--heads", "1,2,4,8,16", "--bias"))
    for heads in (1, 2, 4, 8, 16):
        assert f" {heads} {512 // heads} 2,048 1,050,624 4,202,496 1,048,576 1,024 {heads} " in text
    assert "4 × d_model² = 1,048,576 weights" in text and "Biases add 4 × d_model = 2,048 parameters, 0.2%." in text
    assert " 8 8 0 16,384 65,536 16,384 128 8 " in said(run("params", "--d-model", "64", "--heads", "8"))


PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
CONSOLE = re.compile(r"```console\n\$ multihead (.*)\n((?:.*\n)*?)```")


@pytest.mark.parametrize(("command", "expected"), CONSOLE.findall(PAGE))
def test_the_page_shows_what_the_commands_print(run, command, expected):
    shown = "\n".join(line.rstrip() for line in run(*shlex.split(command)).stdout.splitlines())
    assert expected.count("\n") > 5 and shown.startswith(expected.rstrip())


def test_the_code_of_the_page_prints_what_the_page_says(capsys):
    ((code, expected),) = re.findall(r"```python\n(.*?)```\s*```text\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "plan.md", "exec"), {})
    assert capsys.readouterr().out == expected


def test_the_page_names_every_model_and_architecture():
    for name in [*PRESETS, *ARCHITECTURES, *DEVICES, *BITS]:
        assert f"`{name}`" in PAGE, name
