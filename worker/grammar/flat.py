"""One forward in which rows take different numbers of tokens: forced text is run and checked in one pass.

The tokens of all rows stand one below another, (tokens, 1): projections and MLP run once over them, and each
row's attention takes its own as one causal chunk. Only for rows that are whole and keep keys and values of
every token, which can be taken back.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from mlxhost.worker.kv import RowKV
from mlxhost.worker.kv.kinds import Kind, kind_of
from mlxhost.worker.kv.views import Attend, Masks, Offsets, Parts, StepView, mask_of


def can_run(row: RowKV) -> bool:
    """Whether `row` may take part."""
    return row.whole and all(kind_of(leaf) is Kind.FULL for leaf in row.leaves)


def run(model: Any, rows: Sequence[RowKV], tokens: Sequence[Sequence[int]]) -> mx.array:
    """Feed row i its `tokens[i]` (at least one); logits (all tokens, vocabulary), not evaluated."""
    ids = mx.array([token for own in tokens for token in own], dtype=mx.uint32)
    if len(rows) == 1:
        logits: mx.array = model(ids[None], cache=rows[0].caches)[0]
        return logits
    counts = [len(own) for own in tokens]
    offsets = Offsets()
    offsets.array = mx.array(
        [row.length + i for row, n in zip(rows, counts, strict=True) for i in range(n)], dtype=mx.int32
    )
    layers = zip(*(row.caches for row in rows), strict=True)
    views = [_FlatView(offsets, list(layer), counts) for layer in layers]
    logits = model(ids[:, None], cache=views)[:, 0]
    return logits


def take_back(row: RowKV, tokens: int) -> None:
    """Undo the last `tokens` that were fed."""
    for leaf in row.leaves:
        leaf.trim(tokens)


class _FlatView(StepView):
    """One attention layer: part i takes `counts[i]` consecutive entries as one sequence."""

    def __init__(self, offsets: Offsets, parts: Sequence[Any], counts: Sequence[int]) -> None:
        super().__init__(offsets, parts, [1] * len(parts), None)
        self._counts = counts
        self._cuts = list(accumulate(counts))[:-1]

    def make_mask(self, tokens: int, **options: Any) -> Masks:
        """One mask a part, for as many tokens as it takes."""
        return Masks([mask_of(p, n, options) for p, n in zip(self._parts, self._counts, strict=True)])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        pairs = [
            part.update_and_fetch(_as_row(k), _as_row(v))
            for part, k, v in zip(self._parts, self._split(keys), self._split(values), strict=True)
        ]
        return Parts(self, [k for k, _ in pairs]), Parts(self, [v for _, v in pairs])

    def attend(
        self, attend: Attend, queries: mx.array, keys: Parts, values: Parts, mask: Any, scale: float | None
    ) -> mx.array:
        out = []
        for i, (q, tokens) in enumerate(zip(self._split(queries), self._counts, strict=True)):
            # Models that make no mask for a single token make none here.
            own = mask.array(i) if isinstance(mask, Masks) else "causal" if tokens > 1 else None
            part = attend(_as_row(q), keys.arrays[i], values.arrays[i], self._parts[i], own)
            out.append(_as_entries(part))
        return mx.concatenate(out)


def _as_row(entries: mx.array) -> mx.array:
    """(tokens, heads, 1, dim) -> (1, heads, tokens, dim)."""
    return entries.transpose(2, 1, 0, 3)


def _as_entries(row: mx.array) -> mx.array:
    return row.transpose(2, 1, 0, 3)
