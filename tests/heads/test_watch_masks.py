"""The masks that models ask for: those of transformers' own `sdpa_mask`, and never formed unasked."""

# ruff: noqa: C408, E402
import gc
import inspect
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import masking_utils as hf

from multihead.heads.mask_rules import recognise
from multihead.heads.masks import MaskTensor, make_mask, read_mask

B, L = 3, 11
PADDING = {
    "none": None,
    "left": torch.tensor([[0] * 4 + [1] * 7, [1] * 11, [0] * 9 + [1] * 2]).bool(),
    "right": torch.tensor([[1] * 5 + [0] * 6, [1] * 11, [1] * 1 + [0] * 10]).bool(),
    "holes": torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1], [1] * 11, [1] * 7 + [0] * 4]).bool(),
}
PACKED = torch.tensor([[0] * 3 + [1] * 8, [0] * 11, [0] * 2 + [1] * 5 + [2] * 4])
POSITIONS = torch.tensor([[0, 1, 2, *range(8)], [*range(11)], [0, 1, *range(5), *range(4)]])
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, -1, -1, 1, 1, -1, -1]] * B)


def two_apart(b, h, q, k):
    return (q - k) % 2 == 0


def in_one_block(b, h, q, k):
    return (BLOCKS[b, q] == BLOCKS[b, k]) & (BLOCKS[b, q] >= 0)


def not_far(b, h, q, k):
    return (q - k).abs() < 3


in_own_positions = getattr(hf, "remap_positions_for_packed_sequence", lambda rule, positions: rule)
RULES = {
    "causal": hf.causal_mask_function,
    "bidirectional": hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function(5),
    "chunks": hf.chunked_causal_mask_function(3, torch.tensor([4, 0, 9])),
    "packed": hf.and_masks(
        in_own_positions(hf.causal_mask_function, POSITIONS),
        hf.packed_sequence_mask_function(PACKED),
    ),
    "packed window": hf.and_masks(
        in_own_positions(hf.sliding_window_causal_mask_function(2), POSITIONS),
        hf.packed_sequence_mask_function(PACKED),
    ),
}
if hasattr(hf, "sliding_window_bidirectional_mask_function"):  # since 5.1
    RULES["window both sides"] = hf.sliding_window_bidirectional_mask_function(2)
UNKNOWN = {
    "or, one run": hf.or_masks(hf.causal_mask_function, not_far),
    "blocks": hf.or_masks(hf.causal_mask_function, in_one_block),
    "and, gaps": hf.and_masks(hf.causal_mask_function, two_apart),
    "packed chunks": hf.and_masks(
        in_own_positions(hf.chunked_causal_mask_function(3, torch.zeros(B, dtype=torch.int64)), POSITIONS),
        hf.packed_sequence_mask_function(PACKED),
    ),
}


def both(rule, padding, q_length=L, kv_length=L, q_offset=0, kv_offset=0, use_vmap=False):
    given: dict[str, Any] = dict(
        batch_size=B, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=rule, attention_mask=padding, use_vmap=use_vmap,
    )  # fmt: skip
    if "cache_position" in inspect.signature(hf.sdpa_mask).parameters:  # early releases
        del given["q_length"], given["q_offset"]
        given["cache_position"] = torch.arange(q_length) + q_offset
    theirs = hf.sdpa_mask(**given, allow_is_causal_skip=False)
    assert theirs is not None
    return make_mask(**given), theirs


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", [*RULES, *UNKNOWN])
def test_cells_are_those_of_sdpa_mask(name, padding):
    rule = {**RULES, **UNKNOWN}[name]
    ours, theirs = both(rule, PADDING[padding])
    assert isinstance(ours, MaskTensor) and ours.shape == theirs.shape
    assert torch.equal(ours.cells(), theirs)


@pytest.mark.parametrize("name", RULES)
def test_rules_of_transformers_are_recognised(name):
    assert recognise(RULES[name]) is not None


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_rules_are_not_recognised_and_may_see_one_cell_at_a_time(name):
    assert recognise(UNKNOWN[name]) is None
    if name != "packed chunks":
        ours, theirs = both(UNKNOWN[name], PADDING["left"], use_vmap=True)
        assert torch.equal(ours.cells(), theirs)


def test_an_unknown_rule_whose_rows_are_runs_stays_bounds():
    ours, _ = both(UNKNOWN["or, one run"], None)
    assert ours.visibility.mask is None and ours.visibility.spans() is not None
    ours, _ = both(UNKNOWN["and, gaps"], None)
    assert ours.visibility.mask is not None


@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize(
    "sizes",
    [
        dict(q_length=1, kv_length=11, q_offset=10),  # a decoding step
        dict(q_length=3, kv_length=11, q_offset=8),  # more of the prompt, behind a cache
        dict(q_length=5, kv_length=11, q_offset=torch.tensor(2)),  # a static cache, longer than what is written
        dict(q_length=2, kv_length=6, q_offset=9, kv_offset=5),  # a sliding cache that dropped its oldest
    ],
)
def test_caches(name, sizes):
    for padding in PADDING.values():
        ours, theirs = both(RULES[name], padding, **sizes)
        assert torch.equal(ours.cells(), theirs)


def test_a_mask_shorter_than_the_keys_hides_what_is_not_yet_written():
    ours, theirs = both(hf.causal_mask_function, PADDING["left"][:, :7], q_length=2, kv_length=13, q_offset=5)
    assert torch.equal(ours.cells(), theirs)


def test_padding_queries_are_marked_where_the_rule_is_causal():
    left = PADDING["left"]
    assert left is not None
    ours, _ = both(hf.causal_mask_function, left)
    assert (ours.visibility.query_mask == left).all()
    ours, _ = both(hf.causal_mask_function, left, q_length=2, kv_length=11, q_offset=9)
    assert ours.visibility.query_mask is None
    ours, _ = both(hf.bidirectional_mask_function, left)
    assert ours.visibility.query_mask is None and (ours.key_padding == left).all()


def test_a_mask_holds_no_cells_until_something_reads_them():
    gc.collect()
    n = 1 << 20  # cells would be 2**40 bytes
    mask = make_mask(2, n, n, mask_function=hf.sliding_window_causal_mask_function(7), device="cpu")
    assert mask.shape == (2, 1, n, n) and mask.dtype is torch.bool and mask.ndim == 4
    assert mask.contiguous() is mask and mask.detach() is mask and mask.to("cpu") is mask
    assert isinstance(mask, torch.Tensor) and len(repr(mask)) < 1000


def test_other_code_may_read_it_as_the_mask_of_sdpa():
    ours, theirs = both(hf.causal_mask_function, PADDING["left"])
    assert torch.equal(ours[:, :, 2:5], theirs[:, :, 2:5])
    assert torch.equal(torch.where(ours, 1.0, 2.0), torch.where(theirs, 1.0, 2.0))
    assert torch.equal(ours.to(torch.float32), theirs.to(torch.float32))
    q = torch.randn(B, 2, L, 5)
    attention = torch.nn.functional.scaled_dot_product_attention
    real = PADDING["left"][:, None, :, None]
    assert torch.equal(attention(q, q, q, attn_mask=ours) * real, attention(q, q, q, attn_mask=theirs) * real)


def test_adding_it_to_scores_says_that_the_interface_was_bypassed():
    mask, _ = both(hf.causal_mask_function, None)
    with pytest.raises(RuntimeError, match="bypasses Hugging Face's attention interface"):
        _ = torch.randn(B, 2, L, L) + mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_float_mask_hides_what_is_at_or_below_the_types_lowest(dtype):
    lowest = torch.finfo(dtype).min
    mask = torch.tensor([0.0, -1.5, lowest, -torch.inf, lowest / 2], dtype=dtype).expand(1, 1, 2, 5).clone()
    seen, bias = read_mask(mask)
    assert seen is not None and bias is not None
    assert seen[0, 0, 0].tolist() == [True, True, False, False, True]
    assert torch.equal(bias[0, 0, 0], torch.tensor([0.0, -1.5, 0, 0, lowest / 2], dtype=dtype))
    assert read_mask(mask)[0] is seen  # all layers share one reading
    mask[..., 0] = -torch.inf
    again, _ = read_mask(mask)
    assert again is not None and again[0, 0, 0].tolist() == [False, True, False, False, True]


def test_a_float_mask_of_zeros_and_lowest_is_no_bias():
    mask = torch.zeros(1, 1, 3, 3).masked_fill_(torch.ones(3, 3).triu(1).bool(), torch.finfo(torch.float32).min)
    seen, bias = read_mask(mask)
    assert bias is None and seen is not None
    assert torch.equal(seen[0, 0], torch.ones(3, 3).tril().bool())
    assert read_mask(torch.zeros(1, 1, 3, 3)) == (None, None)
    with pytest.raises(TypeError, match="boolean mask or a float one"):
        read_mask(torch.ones(1, 1, 3, 3, dtype=torch.int64))
