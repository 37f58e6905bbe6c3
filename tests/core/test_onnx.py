"""Every case that ONNX ships for its Attention operator, opsets 23 to 25."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multihead.core import native
from tests.core import onnx_attention
from tests.core.onnx_attention import Attributes, Call, run, run_sdpa

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnx.backend.test.case.node.attention")  # this import makes the cases, of Attention only


def collected():
    """The cases by name, without those that spell the operator out in simpler ones."""
    from onnx.backend.test.case.node import _NodeTestCases

    return {
        case.name: case
        for case in _NodeTestCases
        if [node.op_type for node in case.model.graph.node] == ["Attention"] and "_expanded" not in case.name
    }


CASES = collected()
NATIVE = pytest.param("native", marks=pytest.mark.skipif(native.core is None, reason="the compiled core is not built"))
STEPS = {torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}


def tensor(array):
    """A NumPy array as a tensor; bfloat16 is a guest in NumPy that PyTorch does not know."""
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def parts(case):
    """Attributes, named inputs, names of outputs and expected outputs of a case."""
    (node,) = case.model.graph.node
    attributes = Attributes(**{x.name: onnx.helper.get_attribute_value(x) for x in node.attribute})
    ((given, expected),) = case.data_sets
    inputs = dict(zip([name for name in node.input if name], map(tensor, given), strict=True))
    return attributes, inputs, list(node.output), [tensor(x) for x in expected]


def assert_same(got, expected):
    """Far below ONNX's own 0.001 for float32; its cases in half types round every step on the way."""
    assert len(got) == len(expected) > 0
    for mine, theirs in zip(got, expected, strict=True):
        steps = STEPS[theirs.dtype] * torch.finfo(theirs.dtype).eps
        torch.testing.assert_close(mine, theirs, rtol=steps, atol=1e-7, check_stride=False)


def test_all_cases_are_here():
    assert len(CASES) == 93
    assert {imported.version for case in CASES.values() for imported in case.model.opset_import} == {23, 24, 25}


@pytest.mark.parametrize("impl", [NATIVE, "tiled", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_case(name, impl):
    """Every case passes: there is no list of those that do not."""
    attributes, inputs, outputs, expected = parts(CASES[name])
    assert_same(run(attributes, inputs, outputs, impl), expected)


def test_cases_that_pytorch_has_words_for():
    done = 0
    for case in CASES.values():
        attributes, inputs, _, expected = parts(case)
        output = run_sdpa(attributes, inputs)
        if output is not None:
            assert_same([output], expected[:1])
            done += 1
    assert done == 57


@pytest.mark.parametrize(
    "other",
    [
        {"query_start": None},
        {"causal": False},
        {"softcap": None},
        {"key_lengths": None},
        {"scale": None},
        {"window": None},
        {"mask": torch.tensor(True)},
        {"bias": None},
    ],
    ids=str,
)
def test_another_meaning_would_be_found(other, monkeypatch):
    """An adapter that drops an argument fails in some case."""
    to_call = onnx_attention.to_call

    def changed(attributes, inputs):
        call = to_call(attributes, inputs)
        return Call(call.query, call.key, call.value, call.options | other, call.folded)

    monkeypatch.setattr(onnx_attention, "to_call", changed)
    with pytest.raises(AssertionError):
        for case in CASES.values():
            attributes, inputs, outputs, expected = parts(case)
            assert_same(run(attributes, inputs, outputs), expected)


@pytest.mark.parametrize("mode, wrong", [(0, 2), (0, 3), (1, 0), (1, 2), (1, 3), (2, 0), (2, 3), (3, 1), (3, 2)])
def test_another_kind_of_scores_would_be_found(mode, wrong):
    """Each node that shows its scores shows those of one mode only, where it has a mask or a softcap."""
    done = 0
    for case in CASES.values():
        attributes, inputs, outputs, expected = parts(case)
        if "qk_matmul_output" in outputs and attributes.qk_matmul_output_mode == mode and "attn_mask" in inputs:
            attributes.qk_matmul_output_mode = wrong
            with pytest.raises(AssertionError):
                assert_same(run(attributes, inputs, outputs), expected)
            done += 1
    assert done
