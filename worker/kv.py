"""KV caches of running rows: one RowKV a request, packed for the step, seen by the model as StepViews.

No padding: each row keeps its own caches at its own length. In one forward the projections and the MLP run
once over all rows, and attention runs once per pack.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxhost.worker.errors import ModelError

# Cache classes whose layout and behaviour the engine relies on, by name (a contract test holds them to it).
SUPPORTED = ("KVCache", "RotatingKVCache")

Attend = Callable[[mx.array, mx.array, mx.array, Any, Any], mx.array]


class RowKV:
    """One request's caches, one for each layer, and how many tokens they hold."""

    def __init__(self, caches: list[Any]) -> None:
        self.caches = caches

    @classmethod
    def new(cls, model: Any) -> "RowKV":
        """Empty caches for `model`. Raises ModelError for a cache class the engine does not know."""
        if hasattr(model, "make_cache"):
            caches = model.make_cache()
        else:
            from mlx_lm.models.cache import KVCache

            caches = [KVCache() for _ in model.layers]
        unknown = sorted({type(c).__name__ for c in caches} - set(SUPPORTED))
        if unknown:
            raise ModelError(
                "unsupported_architecture",
                f"the model keeps its state in {', '.join(unknown)}; supported: {', '.join(SUPPORTED)}",
            )
        return cls(caches)

    @property
    def length(self) -> int:
        """Tokens seen so far (sliding-window layers hold fewer)."""
        return int(self.caches[0].offset)

    def arrays(self) -> list[mx.array]:
        """All that must be evaluated for the row to be settled."""
        return [a for c in self.caches if c.keys is not None for a in (c.keys, c.values)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, spare room included."""
        return sum(a.nbytes for a in self.arrays())


class Pack:
    """Rows stored together and attended to in one call: here, one RowKV."""

    def __init__(self, row: RowKV) -> None:
        self.row = row

    @property
    def size(self) -> int:
        return 1

    def layer(self, index: int) -> Any:
        """The cache object of one layer."""
        return self.row.caches[index]


class StepOffsets:
    """Where each row's next token goes; the same for every layer, so computed once a step."""

    def __init__(self) -> None:
        self.array = mx.array([], dtype=mx.int32)


class StepView:
    """What one attention layer sees as its cache in one step over several packs.

    Keys and values given to `update_and_fetch` have the shape (rows, kv heads, tokens, head dim); what it
    returns, and the masks, are lists with one entry for each pack, consumed by `attend`.
    """

    def __init__(self, offsets: StepOffsets, caches: Sequence[Any]) -> None:
        self._offsets = offsets
        self._caches = caches

    @property
    def offset(self) -> mx.array:
        """(rows,) int32, as rope wants it."""
        return self._offsets.array

    def make_mask(self, tokens: int, **options: Any) -> list[Any]:
        return [c.make_mask(tokens, **options) for c in self._caches]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[list[mx.array], list[mx.array]]:
        count = len(self._caches)
        pairs = [
            cache.update_and_fetch(k, v)
            for cache, k, v in zip(self._caches, mx.split(keys, count), mx.split(values, count), strict=True)
        ]
        return [k for k, _ in pairs], [v for _, v in pairs]

    def attend(
        self,
        attend: Attend,
        queries: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        masks: list[Any] | None,
    ) -> mx.array:
        """Attention of each pack's rows over that pack's keys and values; rows back in order."""
        count = len(self._caches)
        parts = zip(
            mx.split(queries, count), keys, values, self._caches, masks or [None] * count, strict=True
        )
        return mx.concatenate([attend(q, k, v, c, m) for q, k, v, c, m in parts])


class StepCaches:
    """The `cache=` argument of one forward over `rows`; rebuilt only when rows join or leave."""

    def __init__(self, rows: Sequence[RowKV]) -> None:
        self._packs = [Pack(row) for row in rows]
        self._offsets = StepOffsets()
        self._views: list[Any]
        if len(self._packs) == 1:
            self._views = rows[0].caches  # the model's own fast path
        else:
            layers = len(rows[0].caches) if rows else 0
            self._views = [
                StepView(self._offsets, [pack.layer(i) for pack in self._packs]) for i in range(layers)
            ]

    def views(self) -> list[Any]:
        """Caches for the next forward of one token a row."""
        if len(self._packs) > 1:
            self._offsets.array = mx.array([p.row.length for p in self._packs], dtype=mx.int32)
        return self._views
