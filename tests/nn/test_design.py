"""head_for: its weights, as PyTorch gives them, against the wanted ones; and the reasons, where they differ."""

import math

import pytest
import torch
import torch.nn.functional as F

import multihead as mh
from multihead.nn.design import head_for

NAN = float("nan")


def weights_of(design, x, context=None, **options):
    """What PyTorch's attention puts on each key: values that are the keys' own one-hot rows."""
    context = x if context is None else context
    query, key = x @ design.W_Q.T, context @ design.W_K.T
    one_hot = torch.eye(len(context), dtype=x.dtype)
    return F.scaled_dot_product_attention(query[None], key[None], one_hot[None], **options)[0]


def stochastic(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype).mul(1.5).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_pattern_over_independent_tokens_is_met(dtype):
    x, target = torch.randn(7, 11, dtype=dtype), stochastic(7, 7, dtype=dtype)
    design = head_for(x, target)
    assert design.exact and design.limits == () and design.W_Q.dtype is dtype
    assert design.d_head == design.rank == 6  # seven keys less their mean
    tolerance = 1e-9 if dtype is torch.float64 else 2e-5
    torch.testing.assert_close(weights_of(design, x), target, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(design.weights, target, rtol=tolerance, atol=tolerance)
    assert design.error < tolerance and str(design).startswith("head of d_head=6, exact")


def test_a_pattern_of_low_rank_takes_a_narrow_head():
    x = torch.randn(9, 12, dtype=torch.float64)
    target = (torch.randn(9, 2, dtype=torch.float64) @ torch.randn(2, 9, dtype=torch.float64)).softmax(-1)
    design = head_for(x, target)
    assert design.exact and design.d_head == 2
    wide = head_for(x, target, 5)
    assert wide.exact and wide.d_head == 5 and wide.W_Q.shape == (5, 12) and (wide.W_Q[2:] == 0).all()
    torch.testing.assert_close(weights_of(wide, x), target, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("d_head", [1, 2, 3])
def test_no_head_of_that_width_is_nearer(d_head):
    """Least squares on log weights with free row constants: a search by gradients finds nothing better."""
    x, target = torch.randn(5, 4, dtype=torch.float64), stochastic(5, 5)

    def loss(W_Q, W_K):
        differences = (x @ W_Q.T) @ (x @ W_K.T).T / math.sqrt(d_head) - target.log()
        return (differences - differences.mean(-1, keepdim=True)).square().sum()

    design = head_for(x, target, d_head)
    ours, found = loss(design.W_Q, design.W_K), []
    for _ in range(6):
        parameters = [torch.randn(d_head, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        search = torch.optim.LBFGS(parameters, max_iter=400, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

        def closure(search=search, parameters=parameters):
            search.zero_grad()
            value = loss(*parameters)
            value.backward()
            return value

        search.step(closure)
        found.append(loss(*parameters).item())
    assert min(found) == pytest.approx(float(ours), rel=1e-5)
    assert not design.exact and len(design.limits) == (2 if d_head < design.rank else 1)


def test_two_heads_of_one_question():
    """The lesson's two heads over (server, request, it): one row is wanted, then one cell of it."""
    x = torch.randn(3, 8)
    first, second = torch.full((3, 3), NAN), torch.full((3, 3), NAN)
    first[2] = torch.tensor([0.5871, 0.1859, 0.2270])
    second[2, 1] = 0.5880
    a, b = head_for(x, first), head_for(x, second)
    torch.testing.assert_close(weights_of(a, x)[2], first[2], atol=1e-5, rtol=0)
    assert weights_of(b, x)[2, 1].item() == pytest.approx(0.5880, abs=1e-5)
    assert a.exact and b.exact and a.d_head == b.d_head == 1
    assert weights_of(b, x)[2].argmax() == 1


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_free_cells_take_what_is_left(share):
    x, target = torch.randn(6, 8, dtype=torch.float64), stochastic(6, 6)
    target[torch.rand(6, 6) < share] = NAN
    design = head_for(x, target)
    wanted = ~target.isnan()
    assert design.exact
    torch.testing.assert_close(weights_of(design, x)[wanted], target[wanted], atol=1e-7, rtol=0)
    # Freedom is used: fewer dimensions serve than for a full pattern over six keys.
    assert design.d_head < 5


def test_a_free_cell_is_used_to_make_a_narrow_head_fit():
    """One number hides an otherwise rank-1 pattern: free, it is found again."""
    x = torch.randn(6, 9, dtype=torch.float64)
    true = (torch.randn(6, 1, dtype=torch.float64) @ torch.randn(1, 6, dtype=torch.float64)).softmax(-1)
    target = true.clone()
    target[3, 1] = target[0, 4] = target[0, 2] = NAN
    design = head_for(x, target, 1)
    assert design.exact
    torch.testing.assert_close(weights_of(design, x), true, atol=1e-6, rtol=0)


def test_rows_that_want_nothing_do_not_bind():
    x, target = torch.randn(6, 3, dtype=torch.float64), stochastic(6, 6)
    target[2:] = NAN  # three dimensions of queries serve two rows; three of keys do not serve five differences
    assert not head_for(x, target).exact
    context = torch.randn(6, 7, dtype=torch.float64)
    design = head_for(x, target, context=context)
    assert design.exact and design.rank == 2 and design.W_K.shape == (2, 7)
    torch.testing.assert_close(weights_of(design, x, context)[:2], target[:2], atol=1e-9, rtol=0)
    nothing = head_for(x, torch.full((6, 6), NAN))
    assert nothing.exact and nothing.error == 0
    torch.testing.assert_close(nothing.weights, torch.full((6, 6), 1 / 6, dtype=torch.float64))


def test_causal():
    x = torch.randn(6, 9, dtype=torch.float64)
    scores = torch.randn(6, 6, dtype=torch.float64).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    target = scores.softmax(-1)  # zeros above the diagonal are out
    design = head_for(x, target, causal=True)
    assert design.exact
    torch.testing.assert_close(weights_of(design, x, is_causal=True), target, atol=1e-7, rtol=0)
    assert (design.weights.triu(1) == 0).all()


def test_causal_with_more_keys_than_queries():
    x, context = torch.randn(3, 9, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
    hidden = torch.ones(3, 5).triu(3).bool()
    target = torch.randn(3, 5, dtype=torch.float64).masked_fill(hidden, -math.inf).softmax(-1)
    design = head_for(x, target, context=context, causal=True)
    torch.testing.assert_close(weights_of(design, x, context, attn_mask=~hidden), target, atol=1e-7, rtol=0)


@pytest.mark.parametrize("scale", [0.3, 1.0, 7.0])
def test_scale(scale):
    x, target = torch.randn(5, 6, dtype=torch.float64), stochastic(5, 5)
    design = head_for(x, target, scale=scale)
    torch.testing.assert_close(weights_of(design, x, scale=scale), target, atol=1e-9, rtol=0)


def test_a_designed_head_works_in_the_layer():
    x, target = torch.randn(6, 8), stochastic(6, 6, dtype=torch.float32)
    design = head_for(x, target, 4)
    layer = mh.nn.MultiHeadAttention(8, 2)
    head = layer.head(1)
    head.W_Q, head.W_K, head.W_V = design.W_Q, design.W_K, torch.eye(8)[:4]
    torch.testing.assert_close(layer.head_outputs(x[None])[0, 1], design.weights @ x[:, :4], atol=1e-5, rtol=0)


def test_two_ahead_on_six_tokens():
    """Exercise 6: a head that looks two tokens ahead."""
    x = torch.randn(6, 6)
    target = torch.full((6, 6), 0.02)
    target[range(4), range(2, 6)] = 0.9
    target[4:] = 1 / 6
    design = head_for(x, target)
    assert design.exact and weights_of(design, x)[:4].argmax(-1).tolist() == [2, 3, 4, 5]


def test_equal_tokens_are_named():
    x = torch.randn(5, 8, dtype=torch.float64)
    x[4] = x[1]
    rows = stochastic(5, 5)
    rows[:, 4] = rows[:, 1]
    design = head_for(x, rows / rows.sum(-1, keepdim=True))
    assert [limit[:70] for limit in design.limits[:1]] == [
        "tokens 1 and 4 of x are equal, so their rows of weights are equal in a"
    ]
    assert "no d_head reaches it: the 5 tokens that ask span 4 dimensions" in str(design)
    assert design.reach > 0.1 and design.log_error == pytest.approx(design.reach)
    # The two rows get the geometric mean of what they want, which is what least squares on logs gives.
    wanted = rows / rows.sum(-1, keepdim=True)
    middle = (wanted[1] * wanted[4]).sqrt()
    torch.testing.assert_close(design.weights[1], middle / middle.sum(), atol=1e-9, rtol=0)

    columns = stochastic(5, 5)
    columns[4] = columns[1]
    limits = head_for(x, columns).limits
    assert limits[0].startswith("tokens 1 and 4 of the keys are equal, so their columns of weights are equal")
    both = stochastic(5, 5)
    both[4] = both[1]
    both[:, 4] = both[:, 1]
    assert head_for(x, both / both.sum(-1, keepdim=True)).exact


def test_equal_tokens_under_a_causal_rule_may_differ_by_a_factor():
    x = torch.randn(5, 8, dtype=torch.float64)
    x[3] = x[2]
    scores = torch.randn(5, 5, dtype=torch.float64)
    scores[3, :4] = scores[2, :4]
    scores[:, 3] = scores[:, 2]
    target = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1)
    assert head_for(x, target, causal=True).exact
    # In two dimensions it is out of reach, but not because of them.
    flat = head_for(x[:, :2].contiguous(), target, causal=True)
    assert len(flat.limits) == 1 and flat.limits[0].startswith("no d_head reaches it: the 4 tokens that ask span 2")
    target[3, :2] = target[3, :2].flip(0)
    assert head_for(x, target, causal=True).limits[0].startswith("tokens 2 and 3 of x are equal")


def test_rank_is_named():
    x, target = torch.randn(6, 9, dtype=torch.float64), stochastic(6, 6)
    design = head_for(x, target, 2)
    assert design.limits == ("it takes rank 5, and d_head=2 has no more than 2",)
    assert design.reach < 1e-12 < design.log_error
    wanted = target.log()
    difference = weights_of(design, x).log() - wanted
    assert design.log_error == pytest.approx(float(difference.square().mean().sqrt()))
    assert design.error == pytest.approx(float((weights_of(design, x) - target).abs().max()))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": torch.full((4, 3), 1 / 3)}, ValueError, r"target: expected shape \(L=4, S=4\), got \(4, 3\)"),
        ({"target": torch.eye(4)}, ValueError, r"target: expected weights above 0, .* got 0.0 in row 0"),
        ({"target": torch.full((4, 4), 0.3)}, ValueError, r"target: expected rows that sum to 1, got 1.2 in row 0"),
        (
            {"target": torch.tensor([[0.5, 0.5, NAN, NAN]] * 4)},
            ValueError,
            "expected row 0 to leave weight for its free",
        ),
        ({"target": [[1.0]]}, TypeError, "target: expected a tensor, got list"),
        ({"x": torch.zeros(4, 2, 2)}, ValueError, r"x: expected floats with two axes, got \(4, 2, 2\)"),
        ({"x": torch.full((4, 2), NAN)}, ValueError, "x: expected finite numbers"),
        ({"d_head": 0}, ValueError, "d_head: expected an int of 1 or more, got 0"),
        ({"scale": -1.0}, ValueError, "scale: expected a positive number, got -1.0"),
    ],
)
def test_errors_name_the_argument_what_was_expected_and_what_came(change, error, message):
    with pytest.raises(error, match=message):
        head_for(**{"x": torch.randn(4, 2), "target": torch.full((4, 4), 0.25)} | change)
