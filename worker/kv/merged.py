"""Keys and values of several rows in one array, for one attention call.

Rows end at a shared write index and begin where their length says, so that a step writes one slice whatever
the rows' lengths. What lies before a row's beginning is padding, hidden by a mask (or by the attention
kernel, which takes the span of each row instead).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxhost.worker.kv.kinds import Kind, kind_of

STEP = 256  # tokens of room added at a time, as mlx-lm's caches do


@dataclass(frozen=True)
class Spans:
    """Where each row's entries lie among `slots` slots: `starts` and `counts`, going round the end."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    slots: int

    @property
    def everything(self) -> bool:
        """Whether no slot needs hiding."""
        return all(count == self.slots for count in self.counts)

    def mask(self) -> mx.array:
        """(rows, 1, 1, slots) bool, as attention takes it."""
        starts = mx.array(self.starts, dtype=mx.int32)[:, None, None, None]
        counts = mx.array(self.counts, dtype=mx.int32)[:, None, None, None]
        slots = mx.arange(self.slots, dtype=mx.int32)
        if all(s + c <= self.slots for s, c in zip(self.starts, self.counts, strict=True)):
            return (slots >= starts) & (slots < starts + counts)
        return (slots - starts + self.slots) % self.slots < counts


class MergedKV:
    """One layer's keys and values of several rows. Steps append to it; other rows make another one of it.

    `keys` (rows, kv heads, room, head dim), None while all rows are empty. Without a `window` the room
    grows; with one it grows up to the window and is then a ring. Rows' entries end before `index`, the slot
    that is written next.
    """

    def __init__(
        self,
        keys: mx.array | None,
        values: mx.array | None,
        index: int,
        counts: Sequence[int],
        window: int | None,
    ) -> None:
        self.keys: Any = keys
        self.values: Any = values
        self.index = index
        self.counts = list(counts)
        self.window = window
        self._wrapped = False

    @classmethod
    def of(cls, leaf: Any) -> "MergedKV":
        """The content of one row's cache."""
        window = leaf.max_size if kind_of(leaf) is Kind.WINDOW else None
        if leaf.keys is None or leaf.offset == 0:
            return cls(None, None, 0, [0], window)
        if window is not None:
            keys, values = leaf._temporal_order(leaf.keys), leaf._temporal_order(leaf.values)
            count = min(leaf.offset, leaf.max_size, keys.shape[2])
            return cls(keys[..., -count:, :], values[..., -count:, :], count, [count], leaf.max_size)
        keys, values = leaf.keys[..., : leaf.offset, :], leaf.values[..., : leaf.offset, :]
        return cls(keys, values, leaf.offset, [leaf.offset], None)

    @classmethod
    def join(cls, parts: "Sequence[MergedKV]") -> "MergedKV":
        """All rows of `parts` (at least one) in one."""
        counts = [count for part in parts for count in part.counts]
        known = next((part for part in parts if part.keys is not None), None)
        window = parts[0].window
        if known is None:
            return cls(None, None, 0, counts, window)
        index = max(window if part._wrapped and window else part.index for part in parts)
        room = -(-(index + 1) // STEP) * STEP
        room = room if window is None else max(min(room, window), index)

        def aligned(part: MergedKV, array: Any, like: mx.array) -> mx.array:
            if array is None:
                return mx.zeros((len(part.counts), like.shape[1], room, like.shape[3]), dtype=like.dtype)
            array = part._in_order(array)
            before = index - array.shape[2]
            return mx.pad(array, [(0, 0), (0, 0), (before, room - index), (0, 0)])

        keys = mx.concatenate([aligned(part, part.keys, known.keys) for part in parts])
        values = mx.concatenate([aligned(part, part.values, known.values) for part in parts])
        return cls(keys, values, index, counts, window)

    def keep(self, positions: Sequence[int]) -> "MergedKV":
        """Only these rows, in this order, without padding that all of them share."""
        counts = [self.counts[i] for i in positions]
        if self.keys is None:
            return MergedKV(None, None, 0, counts, self.window)
        chosen = mx.array(list(positions), dtype=mx.int32)
        if self._wrapped:
            keys, values = (self._in_order(a)[chosen] for a in (self.keys, self.values))
            return MergedKV(keys, values, keys.shape[2], counts, self.window)
        needless = self.index - max(counts)
        keys, values = (a[chosen][..., needless:, :] for a in (self.keys, self.values))
        return MergedKV(keys, values, self.index - needless, counts, self.window)

    def leaf(self, position: int, length: int, like: Any) -> Any:
        """One row's cache, as mlx-lm would hold it. `length` counts the tokens it has seen."""
        leaf: Any = object.__new__(type(like))
        leaf.__dict__.update(like.__dict__)
        count = self.counts[position]
        leaf.offset = length
        if self.keys is None:
            return leaf
        row = slice(position, position + 1)
        end = self.keys.shape[2] if self._wrapped else self.index
        leaf.keys, leaf.values = (
            self._in_order(a[row])[..., end - count : end, :] for a in (self.keys, self.values)
        )
        if self.window is not None:
            leaf._idx = count
        return leaf

    def spans(self, window_size: int | None) -> Spans:
        """The spans that hold after the next update, of at most `window_size` tokens."""
        limit = min(self.window or self.index + 1, window_size or self.index + 1)
        counts = tuple(min(count + 1, limit) for count in self.counts)
        if self.window is None or (not self._wrapped and self.index < self.window):
            return Spans(tuple(self.index + 1 - c for c in counts), counts, self.index + 1)
        end = (self.index % self.window) + 1
        return Spans(tuple((end - c) % self.window for c in counts), counts, self.window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append one token a row: `keys` (rows, kv heads, 1, head dim)."""
        self.update(keys, values)
        return self.keys_and_values()

    def update(self, keys: mx.array, values: mx.array) -> None:
        """As update_and_fetch, for who reads `keys` and `values` with their spare room."""
        if self.keys is None:
            room = STEP if self.window is None else min(STEP, self.window)
            self.keys, self.values = (
                mx.zeros((*a.shape[:2], room, a.shape[3]), dtype=a.dtype) for a in (keys, values)
            )
        elif self.index == self.keys.shape[2]:
            self._make_room()
        at = self.index
        self.keys[..., at : at + 1, :] = keys
        self.values[..., at : at + 1, :] = values
        self.index += 1
        self.counts = [
            count + 1 if self.window is None else min(count + 1, self.window) for count in self.counts
        ]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.filled(self.keys), self.filled(self.values)

    def filled(self, array: mx.array) -> mx.array:
        """`array`, which is `keys` or `values`, without its spare room."""
        if self._wrapped or self.index == array.shape[2]:
            return array
        return array[..., : self.index, :]

    def _make_room(self) -> None:
        if self.index == self.window:
            self.index, self._wrapped = 0, True
            return
        more = STEP if self.window is None else min(STEP, self.window - self.index)
        padding = [(0, 0), (0, 0), (0, more), (0, 0)]
        self.keys, self.values = mx.pad(self.keys, padding), mx.pad(self.values, padding)

    def _in_order(self, array: mx.array) -> mx.array:
        """Entries from the oldest to the newest, the room after them cut off."""
        if self._wrapped:
            return mx.roll(array, -self.index, 2)
        return array[..., : self.index, :]
