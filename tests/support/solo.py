"""The reference: a request run alone, with mlx-lm's own caches and none of the engine."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


def greedy(
    model: Any, prompt: Sequence[int], tokens: int, stop_ids: frozenset[int]
) -> tuple[list[int], float]:
    """Greedy continuation of `prompt` (a stop id ends it and is left out) and the smallest distance between
    the two best logits met on the way."""
    caches = model.make_cache() if hasattr(model, "make_cache") else _default_caches(model)
    logits = model(mx.array([list(prompt)], dtype=mx.uint32), cache=caches)[:, -1].astype(mx.float32)
    out: list[int] = []
    margin = float("inf")
    while len(out) < tokens:
        best = mx.sort(logits[0])[-2:]
        margin = min(margin, float((best[1] - best[0]).item()))
        token = int(mx.argmax(logits[0]).item())
        if token in stop_ids:
            break
        out.append(token)
        logits = model(mx.array([[token]], dtype=mx.uint32), cache=caches)[:, -1].astype(mx.float32)
    return out, margin


def _default_caches(model: Any) -> list[Any]:
    from mlx_lm.models.cache import KVCache

    return [KVCache() for _ in model.layers]
