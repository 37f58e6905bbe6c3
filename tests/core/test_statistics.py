"""The request and the result: unknown names, what is asked, the table."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead.core.statistics import KEY_STATISTICS, ROW_STATISTICS, TABLE


def test_nothing_named_is_every_row_statistic():
    assert mh.Statistics().asked == ROW_STATISTICS


def test_lse_comes_always_and_names_are_in_the_order_of_the_table():
    asked = mh.Statistics("entropy", "argmax", offsets=range(-2, 0), classes=[0, 3, -1])
    assert asked.asked == ("lse", "argmax", "entropy", "class_mass", "offset_mass")
    assert asked.n_classes == 4 and asked.offsets == (-2, -1) and "entropy" in asked and "pair_mass" not in asked


@pytest.mark.parametrize(
    "arguments, options, error, words",
    [
        (["entrpy"], {}, ValueError, "unknown name 'entrpy'; known are lse, max_logit"),
        (["class_mass"], {}, ValueError, "'class_mass' needs the argument classes="),
        ([], {"n_classes": 3}, ValueError, "n_classes= needs the argument classes="),
        ([], {"classes": [0, 5], "n_classes": 3}, ValueError, "n_classes: expected at least 6"),
        ([], {"classes": torch.ones(3)}, TypeError, "classes: expected integers, got torch.float32"),
        ([], {"pairs": torch.ones(3, 2)}, TypeError, "pairs: expected a sequence of tensors"),
    ],
)
def test_wrong_requests(arguments, options, error, words):
    with pytest.raises(error, match=words):
        mh.Statistics(*arguments, **options)


def test_statistics_are_attributes(lab):
    seen = mh.observe(*lab.tensors(), statistics=mh.Statistics("entropy"), impl="tiled")
    assert seen.entropy is seen.statistics["entropy"]
    with pytest.raises(AttributeError, match="no statistic 'argmax' was observed here; there are: lse, entropy"):
        _ = seen.argmax


def test_a_key_listed_twice_counts_once(lab, impl):
    pairs = [torch.full((7, 3), 4), torch.full((7, 1), 4)]
    seen = mh.observe(*lab.tensors(), statistics=mh.Statistics("lse", pairs=pairs), impl=impl)
    assert torch.equal(seen.pair_mass[..., 0], seen.pair_mass[..., 1])


def test_every_statistic_has_a_row_and_the_shape_that_it_says(lab, impl):
    sizes = {"B": 2, "H": 6, "L": 7, "S": 11, "C": 2, "k": 3, "N": 1, "m": 5, "d": 9}
    asked = mh.Statistics(
        *ROW_STATISTICS, *KEY_STATISTICS, classes=[0, 1] * 5 + [0], offsets=(0, 1, 2), map=5, top_keys=3,
        pairs=[torch.zeros(7, 5, dtype=torch.int64)],
    )  # fmt: skip
    seen = mh.observe(*lab.tensors(), statistics=asked, impl=impl, sinks=torch.ones(6).double())
    assert set(seen.statistics) == set(TABLE)
    for name, x in seen.statistics.items():
        assert x.shape == tuple(sizes[axis] for axis in TABLE[name].axes), name
        assert x.dtype is (torch.int64 if name in ("argmax", "top_keys") else torch.float64)
