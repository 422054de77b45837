"""Routes a model's attention call to the step's packs.

Every mlx-lm architecture imports `scaled_dot_product_attention` from `mlx_lm.models.base` by name, so
replacing it there before an architecture is imported reaches all of them.
"""

import importlib
from typing import Any

import mlx.core as mx

from mlxhost.worker.kv.views import Parts


def install() -> None:
    """Replace mlx-lm's attention entry by the dispatcher, once."""
    base: Any = importlib.import_module("mlx_lm.models.base")
    if hasattr(base, "dispatches_step_views"):
        return
    original = base.scaled_dot_product_attention

    def dispatch(
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

        if isinstance(keys, Parts):  # not the cache: layers may use another layer's keys
            return keys.view.attend(attend, queries, keys, values, mask, None if sinks is not None else scale)
        return attend(queries, keys, values, cache, mask)

    base.scaled_dot_product_attention = dispatch
    base.dispatches_step_views = True
