"""What the engine relies on in mlx-lm, held as a contract: a new release that changes it fails here."""

import ast
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from mlxhost.worker.errors import ModelError
from mlxhost.worker.kv import RowKV
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
    with pytest.raises(ModelError, match="ConcatenateKVCache") as caught:
        RowKV.new(Model(KVCache(), CacheList(ConcatenateKVCache())))
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


def test_remapped_model_types_are_mlx_lms() -> None:
    """Our copy of mlx-lm's remapping table is equal to the one installed."""
    source = (Path(mlx_lm.__path__[0]) / "utils.py").read_text()
    tables = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MODEL_REMAPPING"
    ]
    assert tables == [REMAPPED]
