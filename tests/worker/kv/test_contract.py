"""What the engine relies on in mlx-lm, held as a contract: a new release that changes it fails here."""

import ast
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from mlxhost.worker.errors import ModelError
from mlxhost.worker.kv import RowKV
from mlxhost.worker.kv.kinds import Kind
from mlxhost.worker.models.architecture import REMAPPED

# Caches that architectures build and the engine does not know: such models are refused by name.
REFUSED = {"ConcatenateKVCache", "LayerCache"}  # afm7, deepseek_v41


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


def test_attention_is_imported_by_name_where_it_is_used() -> None:
    """Every architecture takes `scaled_dot_product_attention` from mlx_lm.models.base, which the engine
    replaces; those that call MLX's own are known, and left to the self-test at load."""
    direct = set()
    for file in sorted((Path(mlx_lm.__path__[0]) / "models").glob("*.py")):
        source = file.read_text()
        if "mx.fast.scaled_dot_product_attention" in source and file.stem != "base":
            direct.add(file.stem)
        if "scaled_dot_product_attention(" in source.replace("fast.scaled_dot_product_attention(", ""):
            imported = [
                alias.name
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.ImportFrom) and node.module == "base"
                for alias in node.names
            ]
            assert file.stem == "base" or "scaled_dot_product_attention" in imported, file.stem
    assert direct == {"deepseek_v41", "muse_spark", "plamo2"}


def test_every_cache_class_of_an_architecture_is_known_or_refused_on_purpose() -> None:
    """What architectures build their caches of: a class that is new in mlx-lm shows up here."""
    built = set()
    for file in (Path(mlx_lm.__path__[0]) / "models").glob("*.py"):
        if file.stem == "cache":
            continue
        built |= {
            node.func.id
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and "Cache" in node.func.id
        }
    known = {kind.value for kind in Kind} | {"CacheList"}
    assert built - known == REFUSED


def test_rotating_cache_says_where_its_entries_are() -> None:
    """The private members that packs rely on: temporal order, write index, what is kept."""
    cache = RotatingKVCache(max_size=8)
    fill(cache, 6)
    for position in range(6, 11):
        fill(cache, 1, position)
    assert (cache.keep, cache.max_size, cache.offset) == (0, 8, 11)
    assert cache._temporal_order(cache.keys)[0, 0, :, 0].tolist() == list(range(3, 11))
    assert 0 <= cache._idx <= 8


def test_state_cache_is_a_list_of_arrays_without_lengths() -> None:
    """ArraysCache: entries by index, batched along their first axis, no mask unless lengths are set."""
    cache = ArraysCache(2)
    assert cache.cache == [None, None]
    assert cache.make_mask(1) is None
    cache[0] = mx.zeros((3, 2))
    assert cache.cache[0].shape == (3, 2)
