"""What every test starts from: fixed seeds, no network, the models and the data where they are installed."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("ci")

# Test processes share the machine's cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data():
    """The folder of real texts that $MULTIHEAD_DATA names, or one that lies beside the repository."""
    named = os.environ.get("MULTIHEAD_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no data: MULTIHEAD_DATA names no folder")
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M: a causal model with grouped heads."""
    return _open("smollm2")


@pytest.fixture(scope="session")
def minilm():
    """MiniLM-L6: a bidirectional model with biases."""
    return _open("minilm")


def _open(alias):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from multihead.heads.models import ALIASES, open_model

    if ALIASES[alias].find() is None:
        pytest.skip(f"the model is not installed: {ALIASES[alias].install}")
    return open_model(alias)
