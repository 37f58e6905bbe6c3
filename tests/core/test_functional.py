"""The public calls: errors that name the argument, the choice of a path, what explain tells, what an import needs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import multihead as mh
from multihead.core import functional, native

ones = torch.ones
WRONG = [
    ({"key": ones(2, 3, 11, 4)}, ValueError, r"key: .*\(B=2, G=3, S=11, D=5\), got \(2, 3, 11, 4\): D .* is 4, not 5"),
    ({"key": ones(3, 11, 5)}, ValueError, r"key: .*\(B=2, G, S, D=5\), got \(3, 11, 5\): 4 axes are needed, it has 3"),
    ({"value": ones(2, 3, 12, 13)}, ValueError, r"value: .*S \(keys\) is 12, not 11"),
    ({"key": ones(2, 4, 11, 5), "value": ones(2, 4, 11, 13)}, ValueError, "key: .* divides the H=6 heads"),
    ({"key": ones(2, 3, 11, 5, dtype=torch.float64)}, TypeError, "key: expected torch.float32, .*, got torch.float64"),
    ({"value": ones(2, 3, 11, 13, device="meta")}, ValueError, "value: expected .* on cpu, .* got one on meta"),
    ({"query": ones(2, 6, 7, 5, dtype=torch.int64)}, TypeError, "query: expected floats, got torch.int64"),
    ({"mask": ones(7, 11)}, TypeError, "mask: expected bool, .*got torch.float32; .*bias="),
    ({"mask": ones(7, 12, dtype=torch.bool)}, ValueError, r"mask: .*\(B=2, H=6, L=7, S=11\), got \(7, 12\)"),
    ({"mask": ones(1, 2, 6, 7, 11, dtype=torch.bool)}, ValueError, "mask: .* broadcasts"),
    ({"bias": ones(7, 11, dtype=torch.bool)}, TypeError, "bias: expected floats, got torch.bool; .* mask="),
    ({"bias": ones(3, 7, 11)}, ValueError, "bias: .* broadcasts"),
    ({"key": [1.0]}, TypeError, "key: expected a tensor, got list"),
    ({"window": (-1, 3)}, ValueError, "window: expected sides of 0 or more, None for an open side"),
    ({"window": 3}, ValueError, r"window: expected \(left, right\), got 3"),
    ({"alibi_slopes": ones(3)}, ValueError, r"alibi_slopes: expected shape \(H=6,\), got \(3,\)"),
    ({"sinks": ones(6, dtype=torch.int64)}, TypeError, "sinks: expected floats"),
    ({"key_lengths": [3, 12]}, ValueError, r"key_lengths: expected lengths from 0 to S=11, got \[3, 12\]"),
    ({"key_lengths": [3.0, 2.0]}, TypeError, "key_lengths: expected integers"),
    ({"key_lengths": [3]}, ValueError, r"key_lengths: expected shape \(B=2,\)"),
    ({"query_mask": ones(2, 11, dtype=torch.bool)}, ValueError, r"query_mask: expected shape \(B=2, L=7\)"),
    ({"query_mask": ones(2, 7)}, TypeError, "query_mask: expected bool"),
    ({"document_ids": ones(2, 7, dtype=torch.int64)}, ValueError, r"document_ids: expected shape \(B=2, S=11\)"),
    ({"document_ids": ones(2, 11)}, TypeError, "document_ids: expected integers"),
    ({"query_start": 1.5}, TypeError, "query_start: expected an int"),
    ({"query_start": ones(3, dtype=torch.int64)}, ValueError, r"query_start: expected shape \(B=2,\)"),
    ({"softcap": 0.0}, ValueError, "softcap: expected a positive number, got 0.0"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p: expected a share from 0 to 1, got 1.5"),
    ({"impl": "fused"}, ValueError, "impl: expected 'auto', 'native', 'tiled' or 'reference', got 'fused'"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, words", WRONG)
def test_errors_name_the_argument_what_was_expected_and_what_came(lab, change, error, words):
    query, key, value = lab.tensors(dtype=torch.float32)
    arguments = {"query": query, "key": key, "value": value, **change}
    with pytest.raises(error, match=words):
        mh.attention(**arguments)


@pytest.mark.parametrize(
    "statistics, words",
    [
        ({"classes": [0] * 7}, r"classes: expected shape \(S=11,\), got \(7,\)"),
        ({"pairs": [torch.zeros(11, 2, dtype=torch.int64)]}, r"pairs\[0\]: expected shape \(L=7, K"),
    ],
)
def test_a_request_is_checked_against_the_problem(lab, statistics, words):
    with pytest.raises(ValueError, match=words):
        mh.observe(*lab.tensors(), statistics=mh.Statistics(**statistics))


def test_native_is_chosen_where_it_can_serve(lab, monkeypatch):
    problem = lab.problem(*lab.tensors())
    monkeypatch.setattr(native, "can_use", lambda problem, statistics: None)
    assert functional.choose(problem, None) == "native"
    monkeypatch.setattr(native, "can_use", lambda problem, statistics: "it rains")
    assert functional.choose(problem, None) == "tiled"
    with pytest.raises(ValueError, match="impl: 'native' cannot serve this call: it rains"):
        functional.choose(problem, None, "native")


def test_gradients_take_the_path_that_has_them(lab, monkeypatch):
    monkeypatch.setattr(native, "can_use", lambda problem, statistics: None)
    monkeypatch.setattr(native, "can_use_backward", lambda problem, statistics: "it rains")
    query, key, value = lab.tensors()
    problem = lab.problem(query, key, value, sinks=ones(6, requires_grad=True))
    assert functional.choose(problem, None) == "tiled"
    with torch.no_grad():
        assert functional.choose(problem, None) == "native"


def test_explain_tells_path_reason_and_work(lab, monkeypatch):
    monkeypatch.setattr(native, "can_use", lambda problem, statistics: "it rains")
    told = mh.explain(*lab.tensors(), causal=True)
    # Bottom-right causal, L=7, S=11: rows see 5 to 11 keys, 56 cells a head.
    sizes = "GQA, B=2 H=6 G=3 L=7 S=11 D=5 E=13"
    for line in ("path: tiled", "native: no, it rains", sizes, f"{56 * 12:,} of", f"{2 * 56 * 12 * 18:,} FLOPs"):
        assert line in told
    assert "L x S" in mh.explain(*lab.tensors(), impl="reference")


@pytest.mark.skipif(native.core is None, reason="the compiled core is not built")
def test_explain_tells_how_far_the_core_is_from_the_limit(lab):
    told = mh.explain(*lab.tensors(n_queries=300, n_keys=300), impl="native")
    assert f"core: {native.core.level()}, {torch.get_num_threads()} threads" in told
    # (2, 6, 300, 5) + (2, 3, 300, 5) + (2, 3, 300, 13) in, (2, 6, 300, 13) out, of 8 bytes.
    assert f"bytes: {(18000 + 9000 + 23400 + 46800) * 8:,}," in told
    share = re.search(
        r"time: ([\d.e-]+) ms; at the peaks ([\d.e-]+) ms, bound by (compute|memory): (\d+)% of the limit", told
    )
    assert share and 0 < float(share[2]) < float(share[1])


def test_explain_of_no_queries_and_scattered_keys():
    query, key = torch.randn(1, 2, 0, 3), torch.randn(1, 2, 5, 3)
    told = mh.explain(query, key, key, mask=torch.tensor([True, False, True, True, False]))
    assert "visible cells: 0 of 0" in told


def test_import_needs_torch_only():
    blocked = ["transformers", "pandas", "rich", "typer", "matplotlib", "gguf", "scipy", "safetensors"]
    code = (
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        "import torch, multihead as mh\n"
        "x = torch.randn(1, 2, 3, 4)\nassert mh.attention(x, x, x).shape == x.shape\n"
        "assert 'attention' in dir(mh) and mh.__version__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_is_lazy():
    code = "import sys, multihead; assert 'torch' not in sys.modules and not hasattr(multihead, 'nothing')"
    subprocess.run([sys.executable, "-c", code], check=True)
