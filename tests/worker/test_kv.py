"""What the engine relies on in mlx-lm, held as a contract: a new release that changes it fails here."""

import ast
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlxhost.worker.errors import ModelError
from mlxhost.worker.kv import RowKV, StepCaches
from mlxhost.worker.models.architecture import REMAPPED


class Model:
    """Only what RowKV asks of a model."""

    def __init__(self, *caches: object) -> None:
        self.caches = caches

    def make_cache(self) -> list[object]:
        return list(self.caches)


def fill(cache: KVCache | RotatingKVCache, tokens: int, start: int = 0) -> mx.array:
    """Append `tokens` entries whose value is their position; the keys that attention would see."""
    positions = mx.arange(start, start + tokens, dtype=mx.float32)
    entries = mx.broadcast_to(positions[None, None, :, None], (1, 2, tokens, 4))
    keys, _ = cache.update_and_fetch(entries, entries)
    return keys[0, 0, :, 0]


def test_unknown_cache_class_is_refused_by_name() -> None:
    """A model with a cache the engine does not know is never guessed at."""
    with pytest.raises(ModelError, match="ArraysCache") as caught:
        RowKV.new(Model(KVCache(), ArraysCache(2)))
    assert caught.value.code == "unsupported_architecture"


def test_full_cache_keeps_everything_in_order() -> None:
    """KVCache: offset counts tokens, entries stay in order, trim takes the newest away."""
    cache = KVCache()
    fill(cache, 300)
    assert fill(cache, 1, 300).tolist() == list(range(301))
    assert cache.offset == 301
    cache.trim(2)
    assert fill(cache, 1, 299).tolist() == list(range(300))


def test_rotating_cache_keeps_the_window() -> None:
    """RotatingKVCache: offset counts all tokens; after one-token steps it holds just the window."""
    cache = RotatingKVCache(max_size=8)
    fill(cache, 20)
    for position in range(20, 30):
        seen = fill(cache, 1, position)
    assert cache.offset == 30
    assert sorted(seen.tolist()) == list(range(22, 30))


def test_step_views_keep_rows_apart() -> None:
    """Two rows of different lengths in one step: each sees its own entries, at its own offset."""
    rows = []
    for n in (5, 9):
        row = RowKV.new(Model(KVCache()))
        fill(row.caches[0], n)
        rows.append(row)
    (view,) = StepCaches(rows).views()
    assert view.offset.tolist() == [5, 9]
    entries = mx.array([100.0, 200.0]).reshape(2, 1, 1, 1) * mx.ones((2, 2, 1, 4))
    keys, _ = view.update_and_fetch(entries, entries)
    assert keys[0][0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 100]
    assert keys[1][0, 0, :, 0].tolist() == [*range(9), 200]


def test_one_row_is_given_its_own_caches() -> None:
    """A single row takes the model's own path, with no view in between."""
    row = RowKV.new(Model(KVCache()))
    assert StepCaches([row]).views() is row.caches


def test_remapped_model_types_are_mlx_lms() -> None:
    """Our copy of mlx-lm's remapping table is equal to the one installed."""
    source = (Path(mlx_lm.__path__[0]) / "utils.py").read_text()
    tables = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MODEL_REMAPPING"
    ]
    assert tables == [REMAPPED]
