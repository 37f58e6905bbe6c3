"""A whole look at tiny random models, against eager attention, and at real ones, for heads known there."""

from __future__ import annotations

import copy
import csv
import json
import math
import os
import stat
from itertools import pairwise
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("pandas")

from multihead.heads import roles  # noqa: E402
from multihead.heads.errors import ModelError  # noqa: E402
from multihead.heads.models import ALIASES  # noqa: E402
from multihead.heads.report import SENTENCE, HeadReport, ReportError, look, passage_text  # noqa: E402
from multihead.heads.sentence import Sentence, resolve  # noqa: E402

TEXT = "the cat [sat] on the mat , the cat said : the mat is on the cat . a dog saw it , the cat saw it too ."
WORDS = sorted({*TEXT.split(), *SENTENCE.replace(".", " .").split(), "[", "]"})


def make_tokenizer(special: bool):
    """Words and punctuation, [CLS] and [SEP] around a text where `special`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[UNK]", "[CLS]", "[SEP]", *WORDS]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if special:
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def make_model(kind: str):
    torch.manual_seed(0)
    sizes = {"vocab_size": 3 + len(WORDS), "num_hidden_layers": 3, "intermediate_size": 37}
    if kind == "bert":
        config = transformers.BertConfig(**sizes, hidden_size=35, num_attention_heads=7, max_position_embeddings=53)
        model = transformers.BertModel(config)
    else:
        sizes |= {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
        if kind == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=59))
        else:  # windows in some layers, full attention in others
            config = transformers.Gemma2Config(**sizes, sliding_window=11, max_position_embeddings=59)
            assert len(set(config.layer_types)) == 2
            model = transformers.Gemma2ForCausalLM(config)
    for parameter in model.parameters():  # the usual small start leaves attention nearly even
        if parameter.ndim == 2:
            parameter.data.mul_(7)
    return model.eval(), make_tokenizer(special=kind == "bert")


@pytest.fixture(scope="module", params=["llama", "gemma2", "bert"])
def tiny(request):
    model, tokenizer = make_model(request.param)
    return model, tokenizer, look(model, TEXT, tokenizer=tokenizer)


def eager_weights(model, tokenizer, text: str) -> torch.Tensor:
    """The weights (layer, H, L, L) that the model's own eager attention gives."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = plain(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions
    return torch.stack([layer[0] for layer in attentions])


def test_scores_and_baselines_are_those_of_eager_weights(tiny):
    model, tokenizer, report = tiny
    weights = eager_weights(model, tokenizer, TEXT)
    layers, heads, n, _ = weights.shape
    ids = tokenizer(TEXT)["input_ids"]
    marks = set(tokenizer.convert_tokens_to_ids(list("[],.:")))
    expected_keys = {
        "previous": lambda p, j: j == p - 1,
        "offset(2)": lambda p, j: j == p - 2,
        "first": lambda p, j: j == 0,
        "punctuation": lambda p, j: ids[j] in marks,
        "same token": lambda p, j: j != p and ids[j] == ids[p],
        "induction": lambda p, j: j != p and j >= 1 and j - 1 < p and ids[j - 1] == ids[p],
        "local": lambda p, j: abs(p - j) <= 4,
    }
    for role, is_expected in expected_keys.items():
        table = report.roles[report.roles["role"] == role].set_index(["layer", "head"])
        assert len(table) == layers * heads
        for layer in range(layers):
            masses, evens = [], []
            for p in range(n):
                seen = [j for j in range(n) if weights[layer, :, p, j].max() > 0]
                keys = [j for j in seen if is_expected(p, j)]
                if keys and len(keys) < len(seen):
                    masses.append(weights[layer, :, p, keys].double().sum(-1))
                    evens.append(len(keys) / len(seen))
            score = torch.stack(masses).mean(0)
            baseline = sum(evens) / len(evens)
            for head in range(heads):
                row = table.loc[(layer, head)]
                assert row["score"] == pytest.approx(float(score[head]), abs=2e-5), (role, layer, head)
                assert row["baseline"] == pytest.approx(baseline), (role, layer)
                assert row["lift"] == pytest.approx((float(score[head]) - baseline) / (1 - baseline), abs=4e-5)


def test_the_report_holds_what_it_says(tiny):
    _model, tokenizer, report = tiny
    facts, n = report.model, len(tokenizer(TEXT)["input_ids"])
    assert report.layers == [0, 1, 2]
    assert report.heads == {f"{layer}.{head}" for layer in range(3) for head in range(facts.n_heads)}
    assert len(report.tokens) == n
    assert list(report.roles.columns) == ["layer", "head", "role", "score", "baseline", "lift", "label"]
    assert "induction (random)" in set(report.roles["role"])
    assert ("next" in set(report.roles["role"])) == (not facts.causal)
    assert report.statistics["entropy"].shape == (3, facts.n_heads, n)
    assert set(report.main_role) == {(layer, head) for layer in range(3) for head in range(facts.n_heads)}
    assert report.seconds > 0 and report.peak_memory > 50e6
    assert report.notes == []
    best = report.best("previous")
    assert list(best["lift"]) == sorted(best["lift"], reverse=True) and set(best["role"]) == {"previous"}


def test_weights_of_the_sentence_and_the_map_are_eager_ones(tiny):
    model, tokenizer, report = tiny
    assert torch.allclose(report.sentence.weights, eager_weights(model, tokenizer, SENTENCE), atol=2e-5)
    weights, edges = eager_weights(model, tokenizer, TEXT), report.passage_edges
    assert edges == list(range(len(report.tokens) + 1))
    assert report.passage_map is not None
    assert torch.allclose(report.passage_map, weights, atol=2e-5)


def test_the_model_is_left_as_it_was():
    model, tokenizer = make_model("llama")
    model.train()
    model.model.layers[1].eval()
    before = model.config._attn_implementation
    state = [module.training for module in model.modules()]
    look(model, TEXT, tokenizer=tokenizer)
    assert model.config._attn_implementation == before
    assert [module.training for module in model.modules()] == state


def test_a_long_text_is_pooled_to_96_cells():
    from multihead.heads.pooling import cell_edges, pooled_max

    edges = cell_edges(211)
    assert len(edges) == 97 and edges[0] == 0 and edges[-1] == 211
    assert {b - a for a, b in pairwise(edges)} == {2, 3}
    weights = torch.rand(2, 211, 211).tril()
    pooled = pooled_max(lambda rows, keys: weights[:, rows, keys], edges, causal=True)
    for i, j in [(0, 0), (95, 0), (95, 95), (40, 39), (13, 77)]:
        cell = weights[:, edges[i] : edges[i + 1], edges[j] : edges[j + 1]]
        assert torch.equal(pooled[:, i, j], cell.amax((-1, -2)))


def test_links_lead_from_the_pronoun_to_the_nouns(tiny):
    _, _, report = tiny
    tokens = [token.strip() for token in report.sentence.tokens]
    it, cat, mat = tokens.index("it"), tokens.index("cat"), tokens.index("mat")
    by_noun = {noun: report.links[report.links["key"] == noun] for noun in ("cat", "mat")}
    assert list(report.links["key"].unique()) == ["cat", "mat"]
    for noun, place in (("cat", cat), ("mat", mat)):
        table = by_noun[noun]
        assert len(table) == len(report.heads)
        assert list(table["weight"]) == sorted(table["weight"], reverse=True)
        for row in table.to_dict("records"):
            assert row["weight"] == pytest.approx(float(report.sentence.weights[row["layer"], row["head"], it, place]))


def test_pieces_of_a_word_are_summed_as_keys_and_averaged_as_queries():
    weights = torch.zeros(1, 1, 5, 5)
    weights[0, 0, 3] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0])
    weights[0, 0, 4] = torch.tensor([0.5, 0.0, 0.1, 0.2, 0.2])
    spans = [(0, 3), (4, 7), (7, 11), (12, 16), (16, 20)]
    sentence = Sentence("the parr0000 said0000", [""] * 5, spans, [7], weights)
    table = resolve(sentence, "said0000", "parr0000")
    assert table.to_dict("records") == [
        {
            "layer": 7,
            "head": 0,
            "query": "said0000",
            "key": "parr0000",
            "weight": pytest.approx((0.5 + 0.1) / 2),
        }
    ]
    assert len(resolve(sentence, "said0000", "parr")) == 0  # no whole word
    assert len(resolve(sentence, "parr0000", "said0000")) == 0  # comes later, and is not seen
    assert len(resolve(sentence, "said0000", "the", heads={"7.1"})) == 0


def test_layers_and_heads_narrow_the_report():
    model, tokenizer = make_model("llama")
    report = look(model, TEXT, tokenizer=tokenizer, layers=[2], heads=["0.5", "0.1"])
    assert report.layers == [0, 2]
    assert report.heads == {"0.1", "0.5", *(f"2.{head}" for head in range(6))}
    assert set(map(tuple, report.roles[["layer", "head"]].to_numpy().tolist())) == {
        (0, 1), (0, 5), *((2, head) for head in range(6))
    }  # fmt: skip
    assert set(report.main_role) == set(map(tuple, report.roles[["layer", "head"]].to_numpy().tolist()))
    whole = look(model, TEXT, tokenizer=tokenizer)
    assert torch.equal(report.statistics["entropy"], whole.statistics["entropy"][[0, 2]])
    assert torch.equal(report.sentence.weights, whole.sentence.weights[[0, 2]])
    narrowed = whole.roles[(whole.roles["layer"] == 2)].reset_index(drop=True)
    assert report.roles[report.roles["layer"] == 2].reset_index(drop=True).equals(narrowed)


def test_the_text_is_cut_where_that_is_asked_and_the_note_says_so():
    model, tokenizer = make_model("bert")
    report = look(model, TEXT, tokenizer=tokenizer, max_tokens=13)
    assert len(report.tokens) == 13
    assert (report.tokens[0], report.tokens[-1]) == ("[CLS]", "[SEP]")
    cut, few = report.notes
    assert cut == f"the text was cut to 13 of its {len(tokenizer(TEXT)['input_ids'])} tokens"
    assert few.startswith("13 tokens are few")


def test_the_passage_that_comes_along_is_cut_to_the_positions():
    model, tokenizer = make_model("bert")
    report = look(model, tokenizer=tokenizer)
    assert len(report.tokens) == 53
    assert report.text == passage_text()
    assert len(report.notes) == 1


def test_a_very_long_text_has_no_map(monkeypatch):
    monkeypatch.setattr("multihead.heads.running.MOST_MAPPED", 12)
    model, tokenizer = make_model("llama")
    report = look(model, TEXT, tokenizer=tokenizer)
    assert report.passage_map is None and report.passage_edges == []
    assert report.notes == ["no map of the passage: it is longer than 4096 tokens"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"text": " \n"}, "the text is empty"),
        ({"text": "a \ud800"}, "not valid Unicode"),
        (
            {"text": "cat " * 60},
            "the text has 60 tokens, LlamaForCausalLM has 59 positions; --max-tokens 59 cuts it",
        ),
        ({"layers": [0, 3]}, "there is no layer 3: LlamaForCausalLM has layers 0 to 2 and heads 0 to 5"),
        ({"heads": ["1.6"]}, "there is no head 1.6: LlamaForCausalLM has layers 0 to 2 and heads 0 to 5"),
        ({"heads": ["3.0"]}, "there is no head 3.0"),
        ({"heads": ["1"]}, "a head is named layer.head, as in 0.2; got '1'"),
        ({"heads": []}, "no head was asked for"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"tokenizer": None}, "tokenizer="),
    ],
)
def test_what_cannot_be_reported_is_said_in_one_line(asked, says):
    model, tokenizer = make_model("llama")
    model.config._name_or_path = ""
    with pytest.raises(ReportError, match=r"^[^\n]*$") as error:
        look(model, **({"text": TEXT, "tokenizer": tokenizer} | asked))
    assert says in str(error.value)


def test_a_model_of_another_kind_is_refused_by_name():
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ReportError, match="is an encoder-decoder"):
        look(transformers.T5ForConditionalGeneration(config), TEXT, tokenizer=make_tokenizer(False))
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ReportError, match="ViTModel reads no text"):
        look(transformers.ViTModel(config), TEXT, tokenizer=make_tokenizer(False))


def test_an_unknown_model_is_said_in_one_line():
    with pytest.raises(ModelError, match=r"^[^\n]*$"):
        look("./no-such-folder")


def test_progress_is_told_layer_by_layer():
    model, tokenizer = make_model("llama")
    told = []
    look(model, TEXT, tokenizer=tokenizer, progress=lambda stage, fraction: told.append((stage, fraction)))
    stages = list(dict.fromkeys(stage for stage, _ in told))
    assert stages == ["reading the passage", "reading random tokens said twice", "reading the sentence"]
    assert [fraction for stage, fraction in told if stage == stages[0]] == pytest.approx([0, 1 / 3, 2 / 3, 1])


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_json_is_strict_and_whole(tiny, tmp_path):
    _, _, report = tiny
    path = tmp_path / "report.json"
    report.to_json(path)
    read = json.loads(path.read_text(), parse_constant=refuse_constant)
    assert read["schema"] == 1
    assert read["model"]["n_heads"] == report.model.n_heads
    assert read["tokens"] == report.tokens and read["layers"] == [0, 1, 2]
    assert len(read["roles"]) == len(report.roles)
    first = read["roles"][0]
    assert first["score"] == pytest.approx(report.roles["score"][0], rel=1e-5) and first["label"] in (
        True,
        False,
    )
    entropy = report.statistics["entropy"][1, 2].double()
    assert read["statistics"]["entropy"][1][2] == pytest.approx(float(entropy.mean()), rel=1e-5)
    assert math.isfinite(read["statistics"]["evenness"][0][0])  # the first row of a decoder has none
    assert torch.allclose(torch.tensor(read["sentence"]["weights"]), report.sentence.weights, atol=1e-5)
    assert read["main_role"]["0.0"] == report.main_role[0, 0]


def test_csv_has_the_schema_in_every_row(tiny, tmp_path):
    _, _, report = tiny
    path = tmp_path / "roles.csv"
    report.to_csv(path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["schema", "layer", "head", "role", "score", "baseline", "lift", "label"]
    assert {row["schema"] for row in rows} == {"1"} and len(rows) == len(report.roles)
    assert float(rows[5]["score"]) == pytest.approx(report.roles["score"][5])


def test_what_is_no_number_is_null():
    from multihead.heads.export import _plain

    assert _plain({"a": [float("nan"), torch.tensor([1.0, math.inf])]}) == {"a": [None, [1.0, None]]}


def test_html_is_written_whole(tiny, tmp_path):
    report = tiny[2]
    path = tmp_path / "page.html"
    report.to_html(path)
    assert path.read_text().lower().startswith("<!doctype html>")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_a_file_that_cannot_be_written_leaves_what_was_there(tiny, tmp_path, monkeypatch):
    report: HeadReport = tiny[2]
    path = tmp_path / "report.json"
    path.write_text("before")
    path.chmod(0o640)
    report.to_json(path)
    assert path.read_text() != "before" and stat.S_IMODE(path.stat().st_mode) == 0o640
    path.write_text("before")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ReportError, match=r"cannot write .*report.json: No space left on device"):
        report.to_json(path)
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    monkeypatch.undo()
    with pytest.raises(ReportError, match="cannot write"):
        report.to_json(tmp_path)
    with pytest.raises(ReportError, match=r"cannot write .*No such file"):
        report.to_csv(tmp_path / "missing" / "roles.csv")


def test_a_device_is_written_to_and_stays_a_device(tiny):
    tiny[2].to_json(os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_notebook_shows_the_grid_and_no_text_becomes_markup(tiny):
    import dataclasses

    report = tiny[2]
    evil = dataclasses.replace(report, model=dataclasses.replace(report.model, name="<script>alert(1)</script>"))
    shown = evil._repr_html_()
    assert "<script" not in shown and "&lt;script&gt;" in shown
    assert shown.count("<td title=") == 3 * report.model.n_heads


def test_the_passage_holds_what_the_templates_look_for():
    text = passage_text()
    assert all(mark in text for mark in '()[]"{}:')
    assert text.count("three waves, four") == 2 and text.count("The night train to Varnholm") == 2


def needs(alias: str):
    found = ALIASES[alias].find()
    return pytest.mark.skipif(found is None, reason=f"needs {ALIASES[alias].distribution}")


@needs("smollm2")
def test_heads_that_are_known_to_be_there_in_smollm2():
    report = look("smollm2", max_tokens=256)
    assert len(report.tokens) == 256

    def score(name: str, role: str) -> float:
        layer, head = map(int, name.split("."))
        table: Any = report.roles
        return float(table[(table.layer == layer) & (table["head"] == head) & (table.role == role)]["score"].iloc[0])

    # The figures of docs/design.md, for other texts of this length.
    assert score("16.0", "previous") == pytest.approx(0.78, abs=0.06)
    assert score("18.8", "first") == pytest.approx(1.00, abs=0.01)
    assert score("18.6", "induction (random)") == pytest.approx(0.94, abs=0.06)
    assert report.main_role[16, 0] == "previous"
    assert report.main_role[18, 8] == "first"
    assert report.main_role[18, 6] == "induction (random)"
    assert report.best("previous").iloc[0][["layer", "head"]].tolist() == [16, 0]
    assert report.links.iloc[0]["weight"] > 0.5 and report.links.iloc[0]["key"] == "cat"


@needs("smollm2")
def test_the_passage_is_of_the_promised_length():
    from multihead.heads.models import open_model

    tokenizer = open_model("smollm2").tokenizer
    assert 400 <= len(tokenizer(passage_text())["input_ids"]) <= 800


@needs("minilm")
def test_heads_that_are_known_to_be_there_in_minilm():
    report = look("minilm")
    assert report.notes == []  # the whole passage fits
    previous = report.best("previous").iloc[0]
    assert (previous["layer"], previous["head"]) == (0, 2)
    assert previous["score"] == pytest.approx(0.79, abs=0.05)
    assert report.main_role[0, 2] == "previous"
    assert "special" in set(report.roles["role"])
    assert roles.ROLES["special"].source.startswith("Clark")
