"""A compiled Hugging Face model: one graph, and the numbers of the model that is not compiled, watched or not."""

# ruff: noqa: C408, E402
import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounterWithBackend

import multihead as mh

B, VOCAB = 2, 53
TINY = dict(
    hidden_size=30, intermediate_size=23, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=10, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def lively(model):
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=1.3 / weight.shape[-1] ** 0.5)
    return model.eval()


def decoder(kind="Llama", implementation="multihead", **more):
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **more})
    return lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation))


@pytest.fixture
def graphs():
    """Compile a model without graph breaks, and count its graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    def compiled(model, backend=counter):
        return torch.compile(model, fullgraph=True, backend=backend)

    compiled.count = lambda: counter.frame_count
    yield compiled
    torch._dynamo.reset()


def padded(L):
    mask = torch.ones(B, L, dtype=torch.int64)
    mask[1, : L // 3] = 0
    return {"input_ids": torch.randint(3, VOCAB, (B, L)), "attention_mask": mask}


def assert_same(got, expected):
    assert got.layers == expected.layers and list(got.statistics) == list(expected.statistics)
    for name, values in expected.statistics.items():
        for x, y in zip(got.statistics[name], values, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


def test_watched_and_not_of_any_length(graphs):
    """Two graphs for any lengths, and two while watched; the logits of sdpa, the statistics of eager code."""
    model, theirs = decoder(), decoder(implementation="sdpa")
    compiled = graphs(model)
    with torch.no_grad():
        for L in (5, 7, 11):
            inputs = padded(L)
            real = inputs["attention_mask"].bool()
            logits = compiled(**inputs, use_cache=False).logits
            torch.testing.assert_close(logits[real], theirs(**inputs).logits[real], rtol=1e-4, atol=1e-4)
        assert graphs.count() == 2
        for L in (5, 7, 11):
            inputs = padded(L)
            with mh.watch(model) as expected:
                model(**inputs, use_cache=False)
            with mh.watch(compiled) as by_hooks, mh.watch(model) as inside:
                compiled(**inputs, use_cache=False)
                compiled(**inputs, use_cache=False)
            for record in (by_hooks, inside):
                assert len(record.steps) == 2
                assert_same(record.steps[0], expected)
                assert_same(record.steps[1], expected)
        assert graphs.count() <= 4


@pytest.mark.slow
def test_watched_training_keeps_its_gradients(graphs):
    model = decoder()
    compiled, inputs = graphs(model, "aot_eager"), padded(9)

    def run(called):
        model.zero_grad()
        logits = called(**inputs, use_cache=False).logits
        logits[inputs["attention_mask"].bool()].sin().sum().backward()
        return [x.grad.clone() for x in model.parameters()]

    expected = run(model)
    torch.testing.assert_close(run(compiled), expected, rtol=1e-4, atol=1e-5)
    with mh.watch(model) as record:
        torch.testing.assert_close(run(compiled), expected, rtol=1e-4, atol=1e-5)
    with mh.watch(model) as alone, torch.no_grad():
        model(**inputs, use_cache=False)
    assert len(record.steps) == 1
    assert_same(record, alone)


def test_encoder(graphs):
    torch.manual_seed(5)
    config = transformers.BertConfig(
        hidden_size=30, intermediate_size=23, num_hidden_layers=2, num_attention_heads=6, vocab_size=VOCAB
    )
    model = lively(transformers.BertModel._from_config(config, attn_implementation="multihead"))
    compiled, inputs = graphs(model), padded(9)
    with torch.no_grad(), mh.watch(model) as expected:
        model(**inputs)
    with torch.no_grad(), mh.watch(model) as record:
        compiled(**inputs)
    assert record.statistics["entropy"][0][1, :, 0].isnan().all()
    assert_same(record, expected)


CACHES = {
    "dynamic": ("Llama", {}, lambda config: transformers.DynamicCache(config=config)),
    "static": ("Llama", {}, lambda config: transformers.StaticCache(config=config, max_cache_len=17)),
    "sliding": ("Mistral", {"sliding_window": 6}, lambda config: transformers.DynamicCache(config=config)),
    "static and sliding": (
        "Mistral", {"sliding_window": 6}, lambda config: transformers.StaticCache(config=config, max_cache_len=17)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [x if x == "static" else pytest.param(x, marks=pytest.mark.slow) for x in CACHES])
def test_decoding_with_the_caches_of_transformers(graphs, name):
    """A prompt and six tokens more: each compiled step has the logits of sdpa and the statistics of an eager step."""
    kind, more, make = CACHES[name]
    model, theirs = decoder(kind, **more), decoder(kind, "sdpa", **more)
    compiled, tokens = graphs(model), torch.randint(3, VOCAB, (B, 11))

    def decode(model):
        cache, logits = make(theirs.config), []
        for part in (tokens[:, :5], *tokens[:, 5:].split(1, 1)):
            logits.append(model(part, past_key_values=cache).logits)
        return torch.cat(logits, 1)

    with torch.no_grad():
        expected = decode(theirs)
        torch.testing.assert_close(decode(model), expected, rtol=1e-4, atol=1e-4)
        with mh.watch(model) as eager:
            decode(model)
        torch._dynamo.config.recompile_limit, before = 32, torch._dynamo.config.recompile_limit
        try:
            with mh.watch(compiled) as record:
                torch.testing.assert_close(decode(compiled), expected, rtol=1e-4, atol=1e-4)
        finally:
            torch._dynamo.config.recompile_limit = before
    assert len(record.steps) == len(eager.steps) == 7
    for got, step in zip(record.steps, eager.steps, strict=True):
        assert_same(got, step)
