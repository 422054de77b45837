"""The memory model against real caches of real, tiny models."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from support.tiny_models import FAMILIES

from mlxhost.worker.kv import RowKV
from mlxhost.worker.kvcost import KVCost, measure
from mlxhost.worker.models.load import load_model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_charged_is_what_caches_hold(family: str, tiny_models: dict[str, Path]) -> None:
    """At any length a row's caches take no more than the model says, and little less than it says for a
    row of that length without spare room. (After a chunk a window holds that, too, until the next token.)"""
    model = load_model(
        tiny_models[family], "float32", expand_quantised=False, on_progress=lambda _done, _total: None
    ).model
    row = RowKV.new(model)
    row.run(model, range(3, 40))
    cost = measure(row)
    for chunk in (31, 128, 300, 1, 1, 700):
        row.run(model, [5] * chunk)
        row.run(model, [5])
        mx.eval(row.arrays())
        held = sum(a.nbytes for a in row.arrays())
        assert held <= cost.bytes(row.length)
        assert held >= replace(cost, step=1).bytes(row.length) - sum(
            cost.step * each for _, each in cost.windows
        )


@pytest.mark.parametrize(
    "cost",
    [
        KVCost(100),
        KVCost(100, 5000),
        KVCost(100, 0, ((512, 300),)),
        KVCost(0, 0, ((512, 300), (1024, 50))),
        KVCost(7, 100, ((32, 9),), step=1),
    ],
)
def test_tokens_that_fit_are_the_most_that_fit(cost: KVCost) -> None:
    """`tokens` is the inverse of `bytes`, to the token."""
    for available in (0, 999, 25_600, 100_000, 200_000, 333_333, 5_000_000):
        most = cost.tokens(available)
        if most is None:
            assert cost.bytes(1 << 30) <= available
        else:
            assert not most or cost.bytes(most) <= available
            assert cost.bytes(most + 1) > available


def test_a_layer_of_fixed_size_sets_no_bound() -> None:
    """A model without growing layers holds any length, once its state fits."""
    assert KVCost(0, 1000).tokens(1000) is None
    assert KVCost(0, 1000).tokens(999) == 0
