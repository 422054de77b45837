"""Before a model serves: run it once alone and once in a batch, and compare.

Warms the kernels that MLX compiles at first use, measures what a token costs in KV bytes, and refuses an
architecture whose rows would influence one another.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxhost.worker.errors import ModelError
from mlxhost.worker.kv import RowKV, StepCaches

_LENGTHS = (37, 11)
# Largest difference of a logit, relative to the logits' own spread, for rounding alone.
_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}


@dataclass(frozen=True)
class KVCost:
    """`per_token` bytes in layers that grow, `per_row` bytes at most in layers that do not."""

    per_token: int
    per_row: int


def self_test(model: Any, vocab_size: int, dtype: str) -> KVCost:
    """Raises ModelError when batched rows do not give what the same rows give alone."""
    rows = []
    for n in _LENGTHS:
        ids = (mx.arange(n, dtype=mx.uint32) * 7 + n) % min(vocab_size, 1000)
        row = RowKV.new(model)
        model(ids[None], cache=row.caches)
        mx.eval(row.arrays())
        rows.append(row)
    token = mx.array([[3], [5]], dtype=mx.uint32) % vocab_size
    together = model(token, cache=StepCaches(rows).views())[:, -1].astype(mx.float32)
    mx.eval(together)
    for row in rows:
        for cache in row.caches:
            cache.trim(1)
    alone = [model(token[i : i + 1], cache=row.caches)[:, -1] for i, row in enumerate(rows)]
    apart = mx.concatenate(alone).astype(mx.float32)
    spread = mx.maximum(mx.max(apart) - mx.min(apart), 1e-6)
    worst: Any = mx.max(mx.abs(together - apart)) / spread
    difference = float(worst.item())
    if not difference <= _TOLERANCE[dtype]:
        raise ModelError(
            "unsupported_architecture",
            f"{type(model).__module__}: rows in a batch differ from the same rows alone by {difference:.3g} "
            f"of the logits' spread (allowed: {_TOLERANCE[dtype]})",
        )
    return _cost(rows[0])


def _cost(row: RowKV) -> KVCost:
    per_token = per_row = 0
    for cache in row.caches:
        if cache.keys is None:
            continue
        token = (cache.keys.nbytes + cache.values.nbytes) // cache.keys.shape[2]
        if hasattr(cache, "max_size"):
            per_row += token * int(cache.max_size)
        else:
            per_token += token
    return KVCost(per_token, per_row)
