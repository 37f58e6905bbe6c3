"""The numbers of the lessons: those that textbooks print, and those of PyTorch's own modules in double precision."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from functools import lru_cache
from itertools import islice

import pytest
import torch

from multihead.lessons import LESSONS, inputs, tools


@lru_cache
def ran(name, cells=None):
    """What a lesson printed in its first cells (all by default), and the names that it left."""
    names, printed = {}, []
    for step in islice(LESSONS[name].run(names), cells):
        printed.append(step.output)
    return "".join(printed), names


def theirs(x, W_Q, W_K, W_V, W_O):
    """Weights (H, L, L), the heads side by side (L, H*E) and the result of torch.nn.MultiheadAttention in double."""
    d_model, H = x.shape[1], len(W_Q)
    module = torch.nn.MultiheadAttention(d_model, H, bias=False, batch_first=True, dtype=torch.float64)
    rows = [W.flatten(0, 1) for W in (W_Q, W_K, W_V)]
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat(rows))
        module.out_proj.weight.copy_(W_O)
        result, weights = module(*[x.double()[None]] * 3, average_attn_weights=False)
        module.out_proj.weight.copy_(torch.eye(d_model))
        concatenated, _ = module(*[x.double()[None]] * 3)
    return weights[0], concatenated[0], result[0]


@pytest.fixture(scope="module")
def sentence():
    return theirs(inputs.SENTENCE, inputs.W_Q, inputs.W_K, inputs.W_V, inputs.W_O)


def near(got, expected, places=2):
    """Whether numbers are those that a book prints with so many places."""
    return torch.allclose(torch.as_tensor(got).double(), torch.as_tensor(expected).double(), atol=0.5001 * 10**-places)


def test_near_tells_the_last_place():
    assert near([0.8183], [0.82]) and not near([0.8149], [0.82])


def test_split():
    printed, names = ran("split")
    assert "slice 0 [+0.10 +0.50 -0.30 +0.80]\nslice 1 [-0.20 +0.40 +0.70 -0.10]" in printed
    assert "head 0 [+0.10 +0.38 +0.10 +0.71]\nhead 1 [-0.12 +0.51 +0.57 +0.06]" in printed
    expected = inputs.PROJECTIONS.double() @ inputs.TOKEN.double()
    torch.testing.assert_close(names["outputs"][0, :, 0].double(), expected, atol=1e-6, rtol=0)
    # The slice stays as it is, the head notices; and a layer that slices gives the slices.
    assert "slice 0 [+0.10 +0.50 -0.30 +0.80] -> [+0.10 +0.50 -0.30 +0.80]" in printed
    assert "head 0  [+0.10 +0.38 +0.10 +0.71] -> [+0.10 +0.38 +0.10 +0.93]" in printed
    assert printed.endswith("head 0 [+0.10 +0.50 -0.30 +0.80]\nhead 1 [-0.20 +0.40 +0.70 -0.10]\n")


LINKS = [
    (0, "The", "cat", 0.82),
    (0, "cat", "sat", 0.67),
    (0, "sat", "cat", 0.70),
    (1, "The", "The", 0.62),
    (1, "cat", "The", 0.62),
    (1, "sat", "cat", 0.62),
    (1, "down", "sat", 0.82),
]


def test_heads(sentence):
    printed, names = ran("heads", 4)
    weights, _, _ = sentence
    torch.testing.assert_close(names["seen"].double(), weights, atol=1e-6, rtol=0)
    for head, query, key, weight in LINKS:
        assert near(names["seen"][head, inputs.WORDS.index(query), inputs.WORDS.index(key)], weight)
        line = next(line for line in printed.splitlines() if line.startswith(f"head {head}: "))
        assert f"{query} to {key} {weight:.2f}" in line
    assert "The asks for 0.82 + 0.62 = 1.44, and a row has 1.00" in printed


def test_heads_that_start_equal_stay_equal_and_random_ones_part():
    train, apart = (ran("heads", 5)[1][name] for name in ("train", "apart"))
    (equal, _), (untrained, _) = train("equal", steps=20), train("equal", steps=-1)
    assert apart(equal) == apart(untrained) == 0
    assert (equal.head(0).W_Q - untrained.head(0).W_Q).abs().max() > 0.1  # it did train
    (random, _), (untrained, _) = train("random", steps=20), train("random", steps=-1)
    assert apart(random) > apart(untrained) > 0.1
    assert 0 < apart(train("nudged", steps=5)[0]) < 2e-5


@pytest.mark.slow
def test_equal_heads_are_one_head_and_others_share_the_work():
    printed, names = ran("heads")
    runs = names["runs"]
    random, equal, nudged = (runs[start][1] for start in ("random", "equal", "nudged"))
    assert random[-1][1] < 0.05 and nudged[-1][1] < 0.1
    assert all(gap == 0 for _, _, gap in equal) and 0.2 < equal[-1][1] < 0.3  # the error of one head
    assert nudged[0][2] < 2e-6 < 0.1 < nudged[-1][2]
    found = [float(number) for number in re.findall(r"(\d\.\d\d) on the place", printed)]
    heads = torch.tensor(found).view(3, 2, 2)  # start, head, (before, after)
    assert torch.equal(heads[1, 0], heads[1, 1])
    for pair in (heads[0], heads[2]):
        assert (pair.max(-1).values > 0.7).all() and set(pair.argmax(-1).tolist()) == {0, 1}


def test_concat(sentence):
    printed, names = ran("concat")
    _, concatenated, result = sentence
    torch.testing.assert_close(names["concatenated"].double(), concatenated, atol=1e-6, rtol=0)
    torch.testing.assert_close(names["result"].double(), result, atol=1e-6, rtol=0)
    for line in (
        "head 0  The  [+0.33 +0.77 +0.12]",
        "head 0  cat  [+0.07 +0.30 +0.57]",
        "head 1  The  [+0.57 +0.03 +0.41]",
        "head 1  cat  [+0.57 +0.03 +0.41]",
        "The   [+0.50 +0.59 +0.40 +0.57 +0.31 +0.43]",
        "third number of The: +0.12 -> +0.40",
        "sum                [+0.50 +0.59 +0.40 +0.57 +0.31 +0.43]",
    ):
        assert line in printed.splitlines()
    gaps = [float(gap) for gap in re.findall(r"^head \d: (\S+)$", printed, re.MULTILINE)]
    assert gaps[0] > 0.5 and gaps[1] < 0.001


def test_the_drawing_carries_the_numbers_of_every_stage(sentence):
    weights, concatenated, result = sentence
    picture = ran("concat")[1]["picture"]
    texts = [element.text for element in ET.fromstring(picture.svg).iter() if element.tag.endswith("}text")]
    shown = torch.tensor([float(text) for text in texts if re.fullmatch(r"[+-]?\d\.\d\d", text)]).double()
    x = inputs.SENTENCE.double()
    stages = [x, weights[:, 0], concatenated[0], result[0], inputs.W_O.double(), inputs.W_Q.double() @ x[0]]
    stages += [x @ W.double().mT for W in (inputs.W_K, inputs.W_V)]
    for stage in stages:
        assert (stage.flatten()[:, None] - shown).abs().min(-1).values.max() < 0.00501
    assert len(shown) == sum(stage.numel() for stage in stages) + 6 + 8  # what each head gives, and the scores
    assert set(inputs.WORDS) < set(texts)
    assert "[+0.50 +0.59 +0.40 +0.57 +0.31 +0.43]" in picture.alt


def test_the_picture_of_two_heads_has_their_strongest_links(sentence):
    weights, _, _ = sentence
    picture = ran("heads", 2)[1]["picture"]
    elements = list(ET.fromstring(picture.svg).iter())
    tags = [element.text for element in elements if re.fullmatch(r"0\.\d\d", element.text or "")]
    assert tags == [f"{weight:.2f}" for weight in weights.max(-1).values.flatten().tolist()]
    widths = [float(e.get("stroke-width")) for e in elements if e.tag.endswith("}path") and e.get("stroke-linecap")]
    torch.testing.assert_close(torch.tensor(widths).double(), 1 + 7 * weights.flatten(), atol=0.006, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_params(bias):
    printed, _ = ran("params")
    counts = {
        sum(p.numel() for p in torch.nn.MultiheadAttention(512, heads, bias=bias).parameters()) for heads in (1, 8, 16)
    }
    (count,) = counts
    assert count == (1_050_624 if bias else 1_048_576) and re.search(rf"bias={bias}\s+{count:,}\n", printed)
    rows = re.findall(r"^ +(\d+) +(\d+) +1,048,576 +1,048,576 +1,024$", printed, re.MULTILINE)
    assert rows == [("1", "512"), ("2", "256"), ("4", "128"), ("8", "64"), ("16", "32")]
    assert "biases add 2,048 = 4 * 512" in printed


BY_TYPE = """\
     A0   B1   A2   C3   B4   D5
A0   #### .    #### .    .    .
B1   .    #### .    .    #### .
A2   #### .    #### .    .    .
C3   ##   ##   ##   ##   ##   ##
B4   .    #### .    .    #### .
D5   ##   ##   ##   ##   ##   ##"""
BY_PLACE = """\
     A0   B1   A2   C3   B4   D5
A0   #### ##   ##   .    .    .
B1   ##   ##   ##   ##   .    .
A2   ##   ##   ##   ##   ##   .
C3   .    ##   ##   ##   ##   ##
B4   .    .    ##   ##   ##   ##
D5   .    .    .    ##   ##   ####"""


def test_patterns():
    printed, names = ran("patterns")
    empty = torch.zeros(2, 2, 4)
    weights, _, _ = theirs(inputs.TYPED, inputs.READERS, inputs.READERS, empty, torch.zeros(4, 4))
    torch.testing.assert_close(names["seen"].double(), weights, atol=1e-6, rtol=0)
    assert BY_TYPE in printed and BY_PLACE in printed
    assert "head 1, A0 to A2: 0.190    A0 to B1: 0.241" in printed and "score 0.621, weight 0.241" in printed
    assert near(weights[1, 0, 1:3], [0.241, 0.190], 3)
    assert BY_PLACE.splitlines()[1].split()[2:4] == ["##", "##"]  # which print as one symbol


def test_symbols_change_where_they_should():
    assert tools.symbols(torch.tensor([[0.2501, 0.2499], [0.1501, 0.1499]]), "ab").split() == [
        *("a", "b"),
        *("a", "####", "##"),
        *("b", "##", "."),
    ]


def test_one_question():
    printed, names = ran("one-question")
    seen = names["seen"][:, 2]
    assert near(seen[0], [0.5871, 0.1859, 0.2270], 4)
    assert near(seen[1, 1], 0.5880, 4) and seen[1].argmax() == 1
    assert "head 0        0.5871 ▓▓  0.1859 ░░  0.2270 ▒▒" in printed and "0.5880" in printed
    assert "got a sum of 1.1751" in printed
    first = names["first"]
    scores = (names["x"] @ first.W_Q.T @ first.W_K @ names["x"].T).double() / first.d_head**0.5
    assert near(scores[2].softmax(-1), [0.5871, 0.1859, 0.2270], 4)
    assert "- it takes rank 2, and d_head=1 has no more than 1" in printed


def test_grouped_layers():
    printed, names = ran("grouped", 3)
    assert "GQA: output (1, 5, 48), query heads 0 to 5 read key/value heads 0 0 0 1 1 1" in printed
    for name, heads in (("MHA", 6), ("GQA", 2), ("MQA", 1)):
        assert re.search(rf"{name}: keys \(1, {heads}, 5, 8\), +{heads * 8 * 2 * 4} bytes a token", printed)
    x, mqa = names["x"], names["layers"]["MQA"]
    query, key, value = (x @ W.T for W in (mqa.rows("Q", slice(0, 6))[0], mqa.head(0).W_K, mqa.head(0).W_V))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.unflatten(-1, (6, 8)).transpose(1, 2), key[:, None], value[:, None], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(mqa.head_outputs(x), expected)


def test_the_cache_of_llama():
    printed, _ = ran("grouped", 4)
    assert "32 key/value heads: 64 GiB\n 8 key/value heads: 16 GiB\n 1 key/value heads: 2 GiB\n" in printed


@pytest.mark.slow
def test_pooled_smollm2_has_the_loss_of_a_model_with_one_key_value_head(smollm2):
    from transformers import AutoModelForCausalLM

    printed, names = ran("grouped")
    config = type(smollm2.model.config)(**smollm2.model.config.to_dict() | {"num_key_value_heads": 1})
    pooled = AutoModelForCausalLM.from_config(config).eval()
    state = dict(smollm2.model.state_dict())
    for name in state:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            state[name] = state[name].unflatten(0, (3, -1)).mean(0)
    pooled.load_state_dict(state)
    tokens = names["tokens"]
    with torch.no_grad():
        before = smollm2.model(input_ids=tokens, labels=tokens).loss.item()
        after = pooled(input_ids=tokens, labels=tokens).loss.item()
    assert abs(names["before"] - before) < 1e-3 and abs(names["after"] - after) < 1e-3
    assert before < 4 and after > 8
    assert f"loss {before:.2f}" in printed and f"loss {after:.2f}" in printed


@pytest.mark.slow
def test_real(smollm2, minilm):
    printed, names = ran("real")
    for name, opened in (("SmolLM2", smollm2), ("MiniLM", minilm)):
        words, found = names["seen"][name]
        ids = opened.tokenizer(names["SENTENCE"], return_tensors="pt")["input_ids"]
        before = opened.model.config._attn_implementation
        opened.model.set_attn_implementation("eager")
        with torch.no_grad():
            attentions = opened.model(input_ids=ids, output_attentions=True).attentions
        opened.model.set_attn_implementation(before)
        it, cat, mat, was, tired = (words.index(word) for word in ("it", "cat", "mat", "was", "tired"))
        expected = torch.stack(attentions)[:, 0, :, it]
        torch.testing.assert_close(found.double(), expected.double(), atol=2e-4, rtol=0)
        layer, head = names["best"][name]
        assert expected[layer, head, cat] > 0.7 and expected[layer, head, mat] < 0.15
        ahead = (expected[..., was] + expected[..., tired]).max()
        assert ahead > 0.8 if name == "MiniLM" else ahead == 0
    assert "SmolLM2, head 13.8: “it” looks at" in printed and "MiniLM, head 5.11: “it” looks at" in printed
    assert "SmolLM2  no head: all give 0\nMiniLM   head 2.8 gives was 0.12, tired 0.77" in printed
    ends = printed.partition("because it was soft.")[2]
    assert "SmolLM2  head 13.8: cat 0.80, mat 0.05" in ends  # another ending changes nothing
    assert "head 16.0: 0.81 on the token before" in printed


def test_exercises(sentence):
    printed, names = ran("exercises")
    assert "6 is not divisible by 4" in " ".join(printed.split())
    assert "d_model 8, 4 heads of 2" in printed and "d_model 6, 3 heads of 2" in printed
    assert "1 of width 512: 1,048,576 parameters\n8 of width  64: 1,048,576 parameters" in printed
    scores = sum(inputs.SENTENCE @ q.T @ k @ inputs.SENTENCE.T for q, k in zip(inputs.W_Q, inputs.W_K))
    torch.testing.assert_close(names["row"], (scores / 3**0.5).softmax(-1)[0])
    assert "equal to rounding: True" in printed
    for result in names["both"].values():
        torch.testing.assert_close(result.double(), sentence[2], atol=1e-6, rtol=0)
    assert re.search(r"^all +65,536 bytes$", printed, re.MULTILINE)
    assert "16,384 -> 16,640 parameters: 256 more" in printed
    assert "differ by less than a millionth: True" in printed
    third = names["third"]
    assert near([third[i, i + 2] for i in range(4)], [0.9] * 4, 3)
    head = names["layer"].head(2)
    scores = inputs.TYPED.double() @ head.W_Q.T.double() @ head.W_K.double() @ inputs.TYPED.T.double()
    torch.testing.assert_close(third.double(), (scores / 2**0.5).softmax(-1), atol=1e-5, rtol=0)
    assert "d_head=2, exact" in printed and "- it takes rank 4, and d_head=2 has no more than 2" in printed


def test_weights_are_those_of_a_causal_layer_too():
    import multihead as mh

    layer, x = mh.MultiHeadAttention(12, 3, 1, causal=True), torch.randn(5, 12)
    found = tools.weights(layer, x)
    query = (x @ layer.rows("Q", slice(0, 3))[0].T).unflatten(-1, (3, 4)).transpose(0, 1)
    scores = query @ (x @ layer.head(0).W_K.T).T / 2
    expected = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    torch.testing.assert_close(found, expected.detach())


def test_numbers_have_no_negative_zero():
    assert tools.numbers(torch.tensor([-0.001, 0.004, -0.2])) == "[+0.00 +0.00 -0.20]"
