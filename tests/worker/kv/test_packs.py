"""Rows stored together against the same rows alone, for every tiny family: joins, leaves, windows, states."""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.tiny_models import FAMILIES

from mlxhost.worker.kv import Batching, PackRule, RowKV, StepCaches, StepShape
from mlxhost.worker.models.load import LoadedModel, load_model


class SpanKernel:
    """What the CUDA kernel computes, by a mask over all slots, spare room included."""

    def applies(self, queries: mx.array, keys: mx.array, values: mx.array) -> bool:
        return True

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, spans: mx.array, scale: float
    ) -> mx.array:
        slots = keys.shape[2]
        starts, counts = (spans[:, i, None, None, None] for i in range(2))
        mask = (mx.arange(slots) - starts + slots) % slots < counts
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


ONE_PACK = StepShape(rule=PackRule(100.0))
BY_LENGTH = StepShape(rule=PackRule(1.5))
SINGLE = StepShape()
PADDED = StepShape(batching=Batching.PADDED)
KERNEL = StepShape(rule=PackRule(100.0), kernel=SpanKernel())
SHAPES = {
    "one pack": ONE_PACK,
    "kernel": KERNEL,
    "by length": BY_LENGTH,
    "single rows": SINGLE,
    "padded": PADDED,
}
_models: dict[str, LoadedModel] = {}


def load(directory: Path) -> Any:
    if directory.name not in _models:
        _models[directory.name] = load_model(
            directory, "float32", expand_quantised=False, on_progress=lambda _done, _total: None
        )
    return _models[directory.name].model


class Twin:
    """A row in the batch and the same row alone, fed the same tokens."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self.model = model
        self.batched, self.alone = RowKV.new(model), RowKV.new(model)
        if prompt:
            self.batched.run(model, prompt)
            self.alone.run(model, prompt)
        mx.eval(self.batched.arrays(), self.alone.arrays())
        self.logits = mx.array(0.0)

    def feed_alone(self, token: int) -> mx.array:
        return self.alone.run(self.model, [token])[-1]


def step(model: Any, caches: StepCaches, twins: list[Twin], token: int) -> None:
    """One token for every row, in the batch and alone; their logits must agree."""
    order = [next(t for t in twins if t.batched is row) for row in caches.rows]
    tokens = mx.array([[token + i] for i in range(len(order))], dtype=mx.uint32)
    logits = model(tokens, cache=caches.views())[:, -1]
    caches.stepped()
    for i, twin in enumerate(order):
        expected = twin.feed_alone(token + i)
        worst = mx.max(mx.abs(logits[i] - expected)).item()
        assert worst < 2e-3, (i, worst)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_come_and_go_get_their_own_logits(
    family: str, shape: StepShape, tiny_models: dict[str, Path]
) -> None:
    """Through joins and leaves, past windows, from empty and filled caches, each row's logits are those it
    has alone."""
    model = load(tiny_models[family])
    rng = random.Random(5)
    twins = [Twin(model, [rng.randrange(3, 400) for _ in range(n)]) for n in (0, 5, 60, 1, 30)]
    caches = StepCaches(shape)
    present: list[Twin] = []
    for round_, change in enumerate([(0, 1), (2,), (3, 4), (-1,), (-2, 1), (-4, 0), (-0.5, 2)]):
        for index in change:
            if index == -0.5:
                present.pop(0)
            elif index < 0:
                present = [t for t in present if t is not twins[-index]]
            elif twins[int(index)] not in present:
                present.append(twins[int(index)])
        caches = caches.composed([t.batched for t in present])
        for i in range(12):
            step(model, caches, present, 7 + 12 * round_ + i)
    for twin in present:
        kept = caches.content(twin.batched)
        assert kept.length == twin.alone.length


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_left_goes_on_alone(family: str, tiny_models: dict[str, Path]) -> None:
    """What a row gets back from a pack, and a snapshot of one in it, continue as the row alone does."""
    model = load(tiny_models[family])
    twins = [Twin(model, list(range(3, 3 + n))) for n in (40, 33, 37)]
    caches = StepCaches(ONE_PACK).composed([t.batched for t in twins])
    for i in range(5):
        step(model, caches, twins, 10 + i)
    assert not twins[1].batched.whole
    with pytest.raises(RuntimeError, match="pack"):
        _ = twins[1].batched.caches
    snapshot = caches.content(twins[1].batched).copy()
    caches = caches.composed([twins[0].batched, twins[2].batched])
    step(model, caches, [twins[0], twins[2]], 30)
    row = twins[1].batched
    assert row.whole
    assert row.length == snapshot.length == twins[1].alone.length
    expected = twins[1].feed_alone(9)
    for kept in (snapshot, row):
        assert mx.max(mx.abs(kept.run(model, [9])[-1] - expected)).item() < 2e-3


def test_step_views_keep_rows_apart(tiny_models: dict[str, Path]) -> None:
    """A row whose keys are poisoned disturbs no other row of its pack."""
    model = load(tiny_models["llama"])
    twins = [Twin(model, [3, 4, 5]), Twin(model, [6, 7, 8, 9])]
    for leaf in twins[0].batched.leaves:
        leaf.values = leaf.values * mx.nan
    caches = StepCaches(ONE_PACK).composed([t.batched for t in twins])
    logits = model(mx.array([[3]] * 2, dtype=mx.uint32), cache=caches.views())[:, -1]
    healthy = caches.rows.index(twins[1].batched)
    assert mx.max(mx.abs(logits[healthy] - twins[1].feed_alone(3))).item() < 2e-3


def test_one_row_is_given_its_own_caches(tiny_models: dict[str, Path]) -> None:
    """A single row takes the model's own path, with no view in between."""
    row = RowKV.new(load(tiny_models["llama"]))
    assert StepCaches(ONE_PACK).composed([row]).views() is row.caches


def test_rows_and_compositions_leave_no_cycles(tiny_models: dict[str, Path]) -> None:
    """Arrays of rows that left are freed at once, without the garbage collector."""
    model = load(tiny_models["qwen3-next"])
    mx.clear_cache()
    before = mx.get_active_memory()
    rows = [RowKV.new(model) for _ in range(4)]
    for row in rows:
        row.run(model, list(range(3, 300)))
        mx.eval(row.arrays())
    caches = StepCaches(ONE_PACK).composed(rows)
    for row in list(rows):
        model(mx.array([[3]] * len(rows), dtype=mx.uint32), cache=caches.views())
        caches.stepped()
        mx.eval(caches.arrays())
        rows.remove(row)
        caches = caches.composed(rows)
        del row
    mx.clear_cache()
    assert mx.get_active_memory() - before < 64 * 1024
