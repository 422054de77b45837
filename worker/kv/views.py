"""What the model sees as its caches in one step over several rows."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlxhost.worker.kv.merged import MergedKV, Spans

# (queries, keys, values, cache, mask) -> attention's output
Attend = Callable[[mx.array, mx.array, mx.array, Any, Any], mx.array]


class SpanAttention(Protocol):
    """Attention of one query a row over the slots that `spans` (rows, 2) name: start and count."""

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, spans: mx.array, scale: float
    ) -> mx.array: ...

    def applies(self, queries: mx.array, keys: mx.array, values: mx.array) -> bool: ...


class Offsets:
    """Where each row's next token goes; the same for every layer, so computed once a step."""

    def __init__(self) -> None:
        self.array = mx.array([], dtype=mx.int32)


class Masks:
    """One mask for each part of a view; what a merged part hides is known by its spans, and made an array
    only when something needs one."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = list(parts)
        self._spans: dict[int, mx.array] = {}

    def spans(self, part: int) -> mx.array | None:
        """(rows, 2) int32 for a part with padding; None for any other."""
        mask = self._parts[part]
        if not isinstance(mask, Spans):
            return None
        if part not in self._spans:
            pairs = [list(pair) for pair in zip(mask.starts, mask.counts, strict=True)]
            self._spans[part] = mx.array(pairs, dtype=mx.int32)
        return self._spans[part]

    def array(self, part: int) -> Any:
        """What attention takes as its mask."""
        mask = self._parts[part]
        if isinstance(mask, Spans):
            mask = self._parts[part] = mask.mask()
        return mask


class Parts:
    """Keys or values of one layer, pack by pack. Opaque to the model: only attention looks inside."""

    def __init__(self, view: "StepView", arrays: Sequence[mx.array]) -> None:
        self.view = view
        self.arrays = arrays


def mask_of(part: Any, tokens: int, options: dict[str, Any]) -> Any:
    """The mask of one part: a merged part's Spans, None where nothing is hidden, else what mlx-lm's cache
    says."""
    if not isinstance(part, MergedKV):
        return part.make_mask(tokens, **options)
    if tokens != 1:
        raise ValueError(f"rows that share a pack take one token a step, not {tokens}")
    spans = part.spans(options.get("window_size"))
    return None if spans.everything else spans


class StepView:
    """One attention layer in one step over several packs.

    Keys and values given to `update_and_fetch` have the shape (rows, kv heads, 1, head dim); what it
    returns, and the masks, hold one entry for each pack and are consumed by `attend`.
    """

    def __init__(
        self, offsets: Offsets, parts: Sequence[Any], rows: Sequence[int], kernel: SpanAttention | None
    ) -> None:
        """Part i, a MergedKV or a row's own cache, has `rows[i]` rows."""
        self._offsets = offsets
        self._parts = parts
        self._cuts = [sum(rows[: i + 1]) for i in range(len(rows) - 1)]
        self._kernel = kernel

    @property
    def offset(self) -> mx.array:
        """(rows,) int32, as rope wants it."""
        return self._offsets.array

    def make_mask(self, tokens: int, **options: Any) -> Masks | None:
        masks = [mask_of(part, tokens, options) for part in self._parts]
        return Masks(masks) if any(mask is not None for mask in masks) else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        pairs = []
        for part, k, v in zip(self._parts, self._split(keys), self._split(values), strict=True):
            if self._kernel is not None and isinstance(part, MergedKV):
                # The kernel knows the rows' spans: cutting off spare room would only make the graph larger.
                part.update(k, v)
                pairs.append((part.keys, part.values))
            else:
                pairs.append(part.update_and_fetch(k, v))
        return Parts(self, [k for k, _ in pairs]), Parts(self, [v for _, v in pairs])

    def keys_and_values(self) -> tuple[Parts, Parts]:
        """What is there already, for a layer that uses another one's keys and values."""
        pairs = [part.keys_and_values() for part in self._parts]
        return Parts(self, [k for k, _ in pairs]), Parts(self, [v for _, v in pairs])

    def attend(
        self, attend: Attend, queries: mx.array, keys: Parts, values: Parts, mask: Any, scale: float | None
    ) -> mx.array:
        """Attention of each pack's rows over that pack's keys and values; rows back in order. A `scale` of
        None: only `attend` will do."""
        if mask is not None and not isinstance(mask, Masks):
            raise TypeError(f"the model makes a mask by itself ({type(mask).__name__}) for rows in packs")
        out = []
        for i, q in enumerate(self._split(queries)):
            k, v = keys.arrays[i], values.arrays[i]
            out.append(self._attend(i, attend, q, k, v, mask, scale))
        return out[0] if len(out) == 1 else mx.concatenate(out)

    def _attend(
        self,
        part: int,
        attend: Attend,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        masks: Masks | None,
        scale: float | None,
    ) -> mx.array:
        kernel = self._kernel
        if masks is not None and kernel is not None and scale is not None and kernel.applies(q, k, v):
            spans = masks.spans(part)
            if spans is not None:
                return kernel(q, k, v, spans, scale)
        own = self._parts[part]
        mask = None if masks is None else masks.array(part)
        if isinstance(own, MergedKV):
            return attend(q, own.filled(k), own.filled(v), None, mask)
        return attend(q, k, v, own, mask)

    def _split(self, array: mx.array) -> Sequence[mx.array]:
        return list(mx.split(array, self._cuts)) if self._cuts else [array]


class PaddedView:
    """One layer of one padded pack, whose keys, values and mask are plain arrays: for models that look
    inside them."""

    def __init__(self, offsets: Offsets, part: MergedKV) -> None:
        self._offsets = offsets
        self._part = part

    @property
    def offset(self) -> mx.array:
        return self._offsets.array

    def make_mask(self, tokens: int, **options: Any) -> mx.array | None:
        mask = mask_of(self._part, tokens, options)
        return mask.mask() if isinstance(mask, Spans) else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._part.update_and_fetch(keys, values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._part.keys_and_values()
