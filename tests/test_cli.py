"""The command line on a real tiny model: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

from multihead.cli import app

TEXT = "the cat sat on the mat ( the cat ) and it was tired . the cat sat on it"
SOURCE = Path(__file__).parents[1] / "src"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a random Llama of 3 layers, 7 query heads and 1 key/value head, and its tokenizer."""
    torch = pytest.importorskip("torch")
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["<unk>", *sorted({*TEXT.split(), "The", "because"}), *map(str, range(70))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=7 * 10,
        intermediate_size=23,
        num_hidden_layers=3,
        num_attention_heads=7,
        num_key_value_heads=1,
        max_position_embeddings=211,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    wrapped.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run `multihead` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, text=None):
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)

    return run


def refused(result, *words):
    """Check that a run ended with code 2, one line on standard error, and no file left."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    for word in words:
        assert word in line
    assert list(Path().iterdir()) == []


def test_look_prints_and_writes_everything(run, model):
    result = run("look", model, "--text", TEXT, "--json", "r.json", "--csv", "r.csv")
    assert result.exit_code == 0, result.output
    line = " ".join(result.stdout.split())
    assert "3 layers · 7 query heads, 1 key/value head (MQA) · d_head 10 · causal" in line
    assert "head 6" in result.stdout and "peak memory" in result.stdout
    assert result.stdout.splitlines()[-3:] == ["r.json", "r.csv", "multihead-report.html"]
    assert result.stderr == "" and "\x1b" not in result.stdout
    assert sorted(path.name for path in Path().iterdir()) == ["multihead-report.html", "r.csv", "r.json"]

    written = json.loads(Path("r.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert written["schema"] == 1 and written["layers"] == [0, 1, 2] and written["text"] == TEXT
    weights = np.array(written["sentence"]["weights"])
    assert weights.shape[:2] == (3, 7)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-4)
    table = pandas.read_csv("r.csv")
    assert list(table.columns) == ["schema", "layer", "head", "role", "score", "baseline", "lift", "label"]
    assert set(table["schema"]) == {1} and len(table[table["role"] == "previous"]) == 21
    assert "<!doctype html>" in Path("multihead-report.html").read_text(encoding="utf-8")


def test_text_comes_from_a_file_or_from_standard_input(run, model):
    Path("in.txt").write_text(TEXT, encoding="utf-8")
    for arguments, text in [(("--file", "in.txt"), None), (("-",), TEXT)]:
        result = run("look", model, *arguments, "--json", "r.json", text=text)
        assert result.exit_code == 0, result.output
        assert json.loads(Path("r.json").read_text())["text"].strip() == TEXT


def test_only_the_heads_asked_for(run, model):
    asked = ("--layers", "0", "--heads", "2.6")
    result = run("look", model, "--text", TEXT, *asked, "--json", "r.json", "--html", "p.html")
    assert result.exit_code == 0, result.output
    written = json.loads(Path("r.json").read_text())
    assert written["heads"] == [f"0.{head}" for head in range(7)] + ["2.6"]
    assert sorted(path.name for path in Path().iterdir()) == ["p.html", "r.json"]


def test_max_tokens_cuts_and_says_so(run, model):
    result = run("look", model, "--text", TEXT, "--max-tokens", 11)
    assert result.exit_code == 0 and "cut to 11 of its" in result.stdout and "11 tokens" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--text", " \n"), ("empty",)),
        (("--text", "cat " * 300), ("300 tokens", "211")),
        (("--text", "a", "--file", "b"), ("one text",)),
        (("--text", "a", "-"), ("one text",)),
        (("missing-dash",), ("missing-dash", "--text")),
        (("--file", "nothing.txt"), ("nothing.txt", "No such file")),
        (("--file", "."), ("directory",)),
        (("--text", TEXT, "--heads", "2.7"), ("2.7", "heads 0 to 6")),
        (("--text", TEXT, "--heads", "2"), ("--heads", "'2'")),
        (("--text", TEXT, "--layers", "3"), ("layer 3", "layers 0 to 2")),
        (("--text", TEXT, "--layers", "2-1"), ("--layers", "'2-1'")),
        (("--text", TEXT, "--layers", "0,,1"), ("--layers",)),
        (("--text", TEXT, "--json", "no/folder/r.json"), ("no/folder/r.json",)),
        (("--text", TEXT, "--html", "."), ("folder",)),
        (("--text", TEXT, "--json", "a", "--csv", "./a"), ("same path",)),
    ],
)
def test_bad_input_is_one_line_and_code_2(run, model, arguments, words):
    refused(run("look", model, *arguments), *words)


def test_a_file_that_is_no_text_is_refused(run, model, tmp_path_factory):
    file = tmp_path_factory.mktemp("bytes") / "latin"
    file.write_bytes(b"caf\xe9")
    refused(run("look", model, "--file", file), "UTF-8")


def test_models_that_are_none_are_refused(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("none")
    broken = folder / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(40))
    refused(run("look", folder), "config.json")
    refused(run("look", broken), "broken.gguf")
    refused(run("look", folder / "absent.gguf"), "no such file")


def test_a_path_that_cannot_be_written_is_found_before_the_work(run):
    refused(run("look", "no-such-model", "--csv", "no/folder/r.csv"), "cannot write no/folder/r.csv")


def test_an_output_that_was_there_survives_a_refused_run(run, model):
    Path("r.json").write_text("mine")
    assert run("look", model, "--text", "cat " * 300, "--json", "r.json").exit_code == 2
    assert Path("r.json").read_text() == "mine" and [path.name for path in Path().iterdir()] == ["r.json"]


def python(*arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_help_loads_neither_torch_nor_transformers():
    script = (
        "import sys; sys.argv = ['multihead', 'look', '--help']\n"
        "from multihead.__main__ import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'transformers', 'pandas') if name in sys.modules])"
    )
    out, err = python("-c", script).communicate(timeout=60)
    assert out.splitlines()[-1] == "[]", err
    assert "--max-tokens" in out


def test_ctrl_c_ends_at_once_inside_c_code(tmp_path):
    # pbkdf2 is one C call of a minute that lets other threads run and never looks at signals.
    script = (
        "import hashlib, sys\n"
        "from multihead.interrupt import ending_at_once\n"
        "with ending_at_once():\n"
        "    print('ready', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha512', b'', b'', 100_000_000)\n"
    )
    process = python("-c", script)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_in_the_middle_of_a_look_leaves_nothing(model, tmp_path):
    process = python("-m", "multihead", "look", model, "--json", "r.json", cwd=tmp_path)
    time.sleep(1.5)  # among imports, or later
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_early_is_no_error(model, tmp_path):
    process = python("-m", "multihead", "look", model, "--text", TEXT, cwd=tmp_path)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=120) == 0
    assert (tmp_path / "multihead-report.html").exists()


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0 and result.stdout.startswith("multihead ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["look"], "Missing argument 'MODEL'"),
        (["look", "smollm2", "--max-tokens", "many"], "--max-tokens"),
        (["look", "smollm2", "--no-such"], "--no-such"),
        (["lok"], "lok"),
    ],
)
def test_a_command_line_that_does_not_parse_is_told_in_one_line(arguments, words):
    done = subprocess.run(
        [sys.executable, "-m", "multihead", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("multihead: ") and done.stderr.count("\n") == 1 and words in done.stderr
