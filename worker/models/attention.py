"""Routes a model's attention call to the step's packs.

Every mlx-lm architecture imports `scaled_dot_product_attention` from `mlx_lm.models.base` by name, so
replacing it there before an architecture is imported reaches all of them.
"""

import importlib
from typing import Any

import mlx.core as mx

from mlxhost.worker.kv import StepView


def install() -> None:
    """Replace mlx-lm's attention entry by the dispatcher, once."""
    base = importlib.import_module("mlx_lm.models.base")
    original = base.scaled_dot_product_attention
    if getattr(original, "dispatches_step_views", False):
        return

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        def attend(q: mx.array, k: mx.array, v: mx.array, c: Any, m: Any) -> mx.array:
            result: mx.array = original(q, k, v, cache=c, scale=scale, mask=m, sinks=sinks)
            return result

        if isinstance(cache, StepView):
            return cache.attend(attend, queries, keys, values, mask)
        return attend(queries, keys, values, cache, mask)

    scaled_dot_product_attention.dispatches_step_views = True  # type: ignore[attr-defined]
    base.scaled_dot_product_attention = scaled_dot_product_attention
