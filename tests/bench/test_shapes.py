"""The registry: the shapes that the project promised, and what their work is."""

import pytest
from typer.testing import CliRunner

from multihead.bench.inputs import Inputs, visible
from multihead.bench.peers import OURS, PEERS, VARIANTS, peers
from multihead.bench.shapes import SECTIONS, Shape, sections
from multihead.cli import app

ALL = [(section, shape) for section in SECTIONS for shape in section.shapes]


def named(name):
    (section,) = (s for s in SECTIONS if s.name == name)
    return section


def test_prefill_has_the_eight_shapes_of_the_promise():
    assert [str(shape) for shape in named("prefill").shapes] == [
        "(1,12,12,512,64)",
        "(1,12,12,2048,64)",
        "(1,12,12,2048,64 causal)",
        "(1,32,8,2048,128 causal)",
        "(1,9,3,4096,64 causal)",
        "(8,12,12,128,32)",
        "(32,12,12,64,64)",
        "(1,9,3,8192,64 causal)",
    ]


def test_train_has_the_seven_shapes_of_the_promise():
    assert [str(shape) for shape in named("train").shapes] == [
        "(1,12,12,512,64)",
        "(1,12,12,2048,64 causal)",
        "(1,9,3,2048,64 causal)",
        "(8,12,12,256,64 causal)",
        "(32,6,6,64,32)",
        "(1,32,8,1024,128 causal)",
        "(1,2,2,4096,64 causal)",
    ]
    assert all(shape.training for shape in named("train").shapes)


@pytest.mark.parametrize(("section", "word"), [("paged", "pages"), ("int8", "int8")])
def test_caches_have_the_shapes_of_decoding(section, word):
    assert [str(shape) for shape in named(section).shapes] == [
        f"(1,32,8,1:8192,128 {word})",
        f"(8,32,8,1:4096,128 {word})",
        f"(8,12,12,1:2048,64 {word})",
    ]


def test_latent_attention_has_its_three_forms():
    found = [str(shape) for name in ("mla", "mla-decode") for shape in named(name).shapes]
    assert found == ["(1,16,16,2048,192/128 causal)", "(1,16,1,512:2048,576/512)", "(4,16,1,1:4096,576/512)"]


def test_no_shape_is_there_twice_and_only_train_trains():
    for section in SECTIONS:
        assert section.shapes and len(set(section.shapes)) == len(section.shapes)
        assert len({str(shape) for shape in section.shapes}) == len(section.shapes)
        assert all(shape.training == (section.name == "train") for shape in section.shapes)
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)


def test_sections_are_about_what_their_names_say():
    caches = {"paged": {"pages"}, "int8": {"int8"}}
    for section in SECTIONS:
        assert {shape.cache for shape in section.shapes} == caches.get(section.name, {None})
    assert all((shape.D != shape.E) == section.name.startswith("mla") for section, shape in ALL)
    assert {shape.dtype for section, shape in ALL if not section.name.startswith("half")} == {"float32"}
    assert {shape.dtype for section, shape in ALL if section.name.startswith("half")} == {"bfloat16", "float16"}
    assert all(shape.L == 1 and shape.S > 1000 for section, shape in ALL if "decode" in section.name or shape.cache)
    assert all(shape.window == 256 for shape in named("window").shapes)
    *sweep, eight, one = named("width").shapes
    assert {shape.H * shape.D for shape in sweep} == {768} and (sweep[0].D, sweep[-1].D) == (16, 256)
    assert (eight.H, eight.D, one.H, one.D) == (8, 64, 1, 512)
    assert len({shape.flops for shape in sweep}) == 1


@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 6, 3, 7, 5),
        Shape(2, 6, 3, 7, 5, causal=True),
        Shape(2, 6, 3, 13, 5, causal=True, window=4),
        Shape(2, 6, 3, 3, 5, causal=True, window=11),
        Shape(3, 6, 2, 1, 5, S=17),
        Shape(2, 6, 3, 13, 5, E=7, causal=True),
        Shape(3, 6, 2, 1, 5, S=192, E=7, cache="pages"),
        Shape(3, 6, 2, 1, 5, S=192, E=7, cache="int8"),
    ],
    ids=str,
)
def test_work_is_what_counting_gives(shape):
    seen = visible(shape)
    cells = shape.B * shape.H * (shape.L * shape.S if seen is None else int(seen.sum()))
    assert shape.visible_cells == cells
    assert shape.flops == 2 * cells * (5 + shape.E)
    inputs = Inputs.of(shape)
    output = inputs.query[..., :1].expand(-1, -1, -1, shape.E)
    tensors = [
        inputs.query,
        output,
        *((x for p in inputs.pages for x in (p.data, p.scales)) if shape.cache else inputs.stored),
    ]
    assert shape.bytes_moved == sum(x.numel() * x.element_size() for x in tensors if x is not None)


def test_a_step_of_training_is_seven_products_a_cell():
    plain, training = Shape(1, 2, 1, 11, 3), Shape(1, 2, 1, 11, 3, training=True)
    assert training.flops == plain.flops * 7 // 2
    narrow = Shape(1, 2, 1, 11, 3, E=2, training=True)  # four products over D, three over E
    assert narrow.flops == 2 * narrow.visible_cells * (4 * 3 + 3 * 2)


def test_inputs_are_the_same_in_every_run_and_rounded_to_the_type():
    shape = Shape(1, 2, 1, 5, 3, dtype="bfloat16")
    one, two = Inputs.of(shape), Inputs.of(shape)
    assert one.key.equal(two.key) and not one.key.equal(one.value)
    assert {x.dtype for x in (one.query, one.key, one.value)} == {shape.torch_dtype}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"G": 4}, "G must divide H"),
        ({"S": 9, "causal": True}, "L = S"),
        ({"window": 3}, "window needs causal"),
        ({"causal": True, "window": 0}, "window needs causal"),
        ({"cache": "fp8"}, "cache must be 'pages', 'int8' or None, got 'fp8'"),
        ({"cache": "int8"}, "whole pages of 64"),
        ({"S": 128, "cache": "int8", "dtype": "bfloat16"}, "for forward passes in float32"),
        ({"S": 128, "cache": "pages", "training": True}, "for forward passes in float32"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Shape(**{"B": 1, "H": 6, "G": 3, "L": 7, "D": 5, **arguments})


def test_sections_and_peers_by_name():
    assert [s.name for s in sections(["train", "prefill"])] == ["prefill", "train"]
    assert [s.name for s in sections(["half"])] == ["half", "half-decode"]
    assert [s.name for s in sections(["mla", "int8", "mla"])] == ["int8", "mla", "mla-decode"]
    assert [s.name for s in sections(["mla-decode"])] == ["mla-decode"]
    assert [p.name for p in peers(["jax", "torch"])] == ["torch", "jax"]
    assert sections() == SECTIONS and peers() == list(PEERS.values())
    with pytest.raises(ValueError, match="no section is called 'prefil': there are prefill, decode"):
        sections(["prefil"])
    with pytest.raises(ValueError, match="no peer is called 'tensorflow': there are torch, eager"):
        peers(["torch", "tensorflow"])


def test_every_shape_has_ours_and_pytorch_and_every_candidate_has_a_shape():
    assert all(peer.refuses(shape) is None for _, shape in ALL for peer in (OURS, PEERS["torch"]))
    for peer in PEERS.values():
        assert any(peer.refuses(shape) is None for _, shape in ALL), peer.name
    for section in SECTIONS:
        for name in section.variants:
            assert all(VARIANTS[name].refuses(shape) is None for shape in section.shapes)


def test_help_names_every_section_and_peer():
    told = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
    assert all(section.name in told for section in SECTIONS if not section.name.endswith("-decode"))
    assert all(name in told for name in PEERS)
