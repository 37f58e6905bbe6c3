"""The gate lets right numbers through and no wrong ones, from any candidate and in any type."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from multihead.bench.gate import SLACK_OF_OTHERS, SLACK_OF_OURS, Gate, slack_of
from multihead.bench.inputs import Inputs, visible
from multihead.bench.peers import OURS, PEERS, VARIANTS
from multihead.bench.shapes import Shape

SHAPES = [
    Shape(2, 6, 2, 37, 16),
    Shape(2, 6, 2, 131, 16, causal=True),
    Shape(1, 6, 3, 131, 16, causal=True, window=13),
    Shape(2, 6, 2, 1, 16, S=1031),
    Shape(2, 6, 2, 131, 16, causal=True, dtype="bfloat16"),
    Shape(2, 6, 2, 1, 16, S=37, dtype="bfloat16"),
    Shape(2, 6, 2, 37, 16, E=13, causal=True),
    Shape(2, 6, 2, 1, 16, S=1024, cache="pages"),
    Shape(2, 6, 2, 1, 16, S=1024, cache="int8"),
    Shape(2, 6, 2, 131, 16, causal=True, dtype="float16"),
]
STEPS = [
    Shape(2, 6, 2, 37, 16, training=True),
    Shape(2, 6, 2, 67, 16, causal=True, training=True),
    Shape(2, 6, 2, 37, 16, E=13, causal=True, training=True),
]


def outputs(shape, inputs, *, late=0, repeat="interleave", scale=1.0, dtype=torch.float64):
    """PyTorch's float64 attention, with faults that other libraries have had."""
    seen = visible(shape)
    if seen is not None and late:
        seen = seen.roll(-late, 1) | torch.eye(shape.L, dtype=torch.bool)
    group = shape.H // shape.G
    key, value = (
        (x.repeat_interleave(group, 1) if repeat == "interleave" else x.repeat(1, group, 1, 1)).to(dtype)
        for x in (inputs.key, inputs.value)
    )
    query = inputs.query.to(dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale / math.sqrt(shape.D))


def gradients(shape, inputs):
    wide = Inputs(*(x.double() for x in (inputs.query, inputs.key, inputs.value, inputs.gradient)))
    leaves = [x.requires_grad_() for x in (wide.query, wide.key, wide.value)]
    return torch.autograd.grad(outputs(shape, wide), leaves, wide.gradient)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_output_passes(shape):
    inputs = Inputs.of(shape)
    exact = outputs(shape, inputs)
    assert Gate(shape, inputs).check([exact]) < 0.01
    assert Gate(shape, inputs).check([exact.to(shape.torch_dtype)]) <= 1


@pytest.mark.parametrize("fault", ["one key off", "other heads' keys", "scale", "one row", "last row", "nan"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wrong_output_passes_for_nobody(shape, fault):
    inputs = Inputs.of(shape)
    found = outputs(shape, inputs)
    if fault == "one key off":
        if shape.causal:
            found = outputs(shape, inputs, late=1)
        else:
            found = outputs(shape, replace(inputs, key=inputs.key[:, :, :-1], value=inputs.value[:, :, :-1]))
    elif fault == "other heads' keys":
        found = outputs(shape, inputs, repeat="tile")
    elif fault == "scale":
        found = outputs(shape, inputs, scale=1.5)
    elif fault == "one row":
        found[-1, -1, 0] = 0
    elif fault == "last row":
        found[0, 0, -1] = -found[0, 0, -1]
    else:
        found[0, 0, -1, 3] = math.nan
    assert Gate(shape, inputs).check([found]) > SLACK_OF_OTHERS


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_right_gradients_pass_and_wrong_ones_do_not(shape):
    inputs = Inputs.of(shape)
    right = gradients(shape, inputs)
    assert Gate(shape, inputs).check(right) < 0.01
    for wrong in range(3):
        for fault in (lambda x: 1.01 * x, lambda x: x.roll(1, 1), lambda x: torch.full_like(x, math.nan)):
            found = [fault(x) if i == wrong else x for i, x in enumerate(right)]
            assert Gate(shape, inputs).check(found) > SLACK_OF_OTHERS


def test_an_int8_cache_is_held_to_its_own_numbers_and_not_to_those_that_were_rounded():
    shape = Shape(2, 6, 2, 1, 16, S=1024, cache="int8")
    inputs = Inputs.of(shape)
    key, value = inputs.pages
    order = key.table.long()
    for stored, plain in ((key, inputs.key), (value, inputs.value)):
        exact = (stored.data.double() * stored.scales.double()[:, :, None, None])[order].transpose(1, 2).flatten(2, 3)
        assert torch.equal(plain.double(), exact)
    assert Gate(shape, inputs).check([OURS.prepare(shape, inputs).run()]) <= SLACK_OF_OURS
    # Off by the rounding of one number of a page, which is half a step at most.
    half_a_step = 0.5 * value.scales.bfloat16().float().amax()
    moved = replace(inputs, value=inputs.value + half_a_step / 100)
    assert Gate(shape, inputs).check([outputs(shape, moved)]) > SLACK_OF_OTHERS


def test_an_entropy_in_the_loss_is_held_against_a_loss_that_has_it():
    shape = STEPS[1]
    inputs = Inputs.of(shape)
    variant = VARIANTS["entropy loss"]
    prepared = variant.prepare(shape, inputs)
    found = prepared.numbers(prepared.run())
    assert Gate(shape, inputs).check(found, variant.weight) <= SLACK_OF_OURS
    assert Gate(shape, inputs).check(found) > SLACK_OF_OTHERS


@pytest.mark.parametrize("found", [[], [torch.zeros(2, 6, 37, 15)], [torch.zeros(2, 37, 6, 16)], 2 * [torch.zeros(1)]])
def test_a_wrong_size_does_not_pass(found):
    shape = SHAPES[0]
    assert Gate(shape, Inputs.of(shape)).check(found) == math.inf


def test_ours_has_no_slack():
    assert {slack_of(peer) for peer in (OURS, *VARIANTS.values())} == {1}
    assert {slack_of(peer) for peer in PEERS.values()} == {SLACK_OF_OTHERS}
