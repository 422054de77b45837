"""How a model's caches are cut into records and put together again.

Three kinds of cache layer, each with its own record: growing layers (the span's keys and values), sliding
windows (the span's last tokens, as many as the window has), and states (one checkpoint at the span's end).
Within a record, arrays of one shape are stacked: a record has one array for each shape, not for each layer.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxhost.worker.cache.index import Kind, Node
from mlxhost.worker.kv import RowKV
from mlxhost.worker.kv.kinds import Kind as Layer
from mlxhost.worker.kv.kinds import kind_of

Arrays = tuple[mx.array, ...]

_KINDS = {Layer.FULL: Kind.KV, Layer.WINDOW: Kind.ROTATING, Layer.STATE: Kind.STATE}


class Uncacheable(Exception):
    """A kind of cache whose records are not known; the model is served without a prefix cache."""


@dataclass(frozen=True)
class Group:
    """Arrays of one shape, without the token axis (axis 1 of a leaf): `leaves` are (part, name or index)."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    leaves: tuple[tuple[int, str | int], ...]

    def stacked_shape(self, tokens: int | None) -> tuple[int, ...]:
        """Shape of the group in a record of `tokens` tokens (None: a state, which has no token axis)."""
        if tokens is None:
            return (len(self.leaves), *self.shape)
        return (len(self.leaves), self.shape[0], tokens, *self.shape[1:])


class Layout:
    """The caches of one model. `windows` are the sizes of its sliding windows, without repetition."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        """From caches that have seen at least one token (see RowKV.leaves). Raises Uncacheable."""
        found: dict[Kind, dict[tuple[Any, ...], list[tuple[int, str | int]]]] = {k: {} for k in Kind}
        described, windows = [], set()
        for i, part in enumerate(leaves):
            kind, window = _kind(part), 0
            if kind is Kind.ROTATING:
                window = int(part.max_size)
                windows.add(window)
            described.append(f"{type(part).__name__} {window}")
            for leaf, value in _values(part, kind):
                if value is None:  # a layer that shares another's KV
                    continue
                shape = value.shape[1:] if kind is Kind.STATE else (value.shape[1], *value.shape[3:])
                found[kind].setdefault((window, tuple(shape), value.dtype), []).append((i, leaf))
        self.groups: dict[Kind, tuple[Group, ...]] = {
            kind: tuple(Group(shape, dtype, tuple(places)) for (_, shape, dtype), places in groups.items())
            for kind, groups in found.items()
        }
        self._group_windows = [window for window, _, _ in found[Kind.ROTATING]]
        self.windows = tuple(sorted(windows))
        self.stateful = bool(found[Kind.STATE])
        for kind, groups in found.items():
            described += [f"{kind} {key} {places}" for key, places in groups.items()]
        self.scheme = hashlib.sha256("\n".join(described).encode()).hexdigest()

    @classmethod
    def of(cls, model: Any) -> "Layout":
        """The layout of `model`, found by running one token through it. Raises Uncacheable."""
        kv = RowKV.new(model)
        kv.run(model, [0])
        mx.eval(kv.arrays())
        return cls(kv.leaves)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds that this model's records come in. KV is always one: without growing layers its records hold
        no arrays, and only tell that the prefix has been seen."""
        return tuple(k for k in Kind if k is Kind.KV or self.groups[k])

    def shapes(self, kind: Kind, tokens: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Shape and dtype of every array in a record of `kind` for a span of `tokens`."""
        if kind is Kind.STATE:
            return [(g.stacked_shape(None), g.dtype) for g in self.groups[kind]]
        if kind is Kind.KV:
            return [(g.stacked_shape(tokens), g.dtype) for g in self.groups[kind]]
        return [
            (g.stacked_shape(min(tokens, window)), g.dtype)
            for g, window in zip(self.groups[kind], self._group_windows, strict=True)
        ]

    def holds(self, parts: Sequence[Any], kind: Kind, start: int, stop: int) -> bool:
        """Whether a record of `kind` for the tokens [start, stop) can be cut from a row's leaves now."""
        if kind is Kind.STATE:
            return all(parts[i].cache[leaf] is not None for g in self.groups[kind] for i, leaf in g.leaves)
        for group in self.groups[kind]:
            for i, leaf in group.leaves:
                part = parts[i]
                if getattr(part, str(leaf)) is None or stop > part.offset:
                    return False
                if kind is Kind.ROTATING:
                    oldest = part.offset - _ordered(part, str(leaf)).shape[2]
                    if stop - min(stop - start, part.max_size) < oldest:
                        return False
        return True

    def cut(self, parts: Sequence[Any], kind: Kind, start: int, stop: int) -> Arrays:
        """The record of `kind` for the tokens [start, stop): copies, not evaluated yet. A state is that of
        now, whatever the span."""
        arrays = []
        for group in self.groups[kind]:
            pieces = []
            for i, leaf in group.leaves:
                part = parts[i]
                if kind is Kind.STATE:
                    pieces.append(part.cache[leaf][0])
                    continue
                value, first, oldest = getattr(part, str(leaf)), start, 0
                if kind is Kind.ROTATING:
                    value = _ordered(part, str(leaf))
                    first, oldest = stop - min(stop - start, part.max_size), part.offset - value.shape[2]
                pieces.append(value[0, :, first - oldest : stop - oldest])
            arrays.append(mx.stack(pieces) if len(pieces) > 1 else _copied(pieces[0])[None])
        return tuple(arrays)

    def fill(self, parts: Sequence[Any], nodes: Sequence[Node], position: int, room: int) -> list[mx.array]:
        """Put the first `position` tokens of `nodes` (a chain from the root) into fresh leaves, with room for
        `room` tokens in all where layers grow; the arrays to evaluate."""
        touched: list[mx.array] = []
        for g, group in enumerate(self.groups[Kind.KV]):
            pad = max(0, room - position)
            spare = [mx.zeros((group.shape[0], pad, *group.shape[1:]), group.dtype)] if pad else []
            for j, (i, leaf) in enumerate(group.leaves):
                pieces = [_array(n, Kind.KV, g)[j][:, : position - n.start] for n in nodes]
                value = mx.concatenate(pieces + spare, axis=1)[None]
                setattr(parts[i], str(leaf), value)
                parts[i].offset = position
                touched.append(value)
        for g, group in enumerate(self.groups[Kind.ROTATING]):
            window = self._group_windows[g]
            oldest = max(0, position - window)
            within = [n for n in nodes if n.stop > oldest]
            for j, (i, leaf) in enumerate(group.leaves):
                pieces = []
                for node in within:
                    first = max(node.start, node.stop - window)
                    low, high = max(first, oldest) - first, min(node.stop, position) - first
                    pieces.append(_array(node, Kind.ROTATING, g)[j][:, low:high])
                value = mx.concatenate(pieces, axis=1)[None]
                setattr(parts[i], str(leaf), value)
                parts[i].offset, parts[i]._idx = position, value.shape[2]
                touched.append(value)
        for g, group in enumerate(self.groups[Kind.STATE]):
            for j, (i, leaf) in enumerate(group.leaves):
                value = _copied(_array(nodes[-1], Kind.STATE, g)[j])[None]
                parts[i].cache[leaf] = value
                touched.append(value)
        return touched


def _kind(part: Any) -> Kind:
    layer = kind_of(part)
    kind = _KINDS.get(layer) if layer else None
    if kind is None:
        raise Uncacheable(f"no record is known for {type(part).__name__}")
    if kind is Kind.ROTATING and part.keep:
        raise Uncacheable(f"{type(part).__name__} keeps its first {part.keep} tokens")
    return kind


def _values(part: Any, kind: Kind) -> list[tuple[str | int, Any]]:
    """(name or index, array or None) of what a cache holds."""
    if kind is Kind.STATE:
        return list(enumerate(part.cache))
    return [("keys", part.keys), ("values", part.values)]


def _ordered(part: Any, leaf: str) -> mx.array:
    """Keys or values of a rotating cache, oldest token first."""
    ordered: mx.array = part._temporal_order(getattr(part, leaf))
    return ordered


def _array(node: Node, kind: Kind, group: int) -> mx.array:
    arrays: Arrays | None = node.records[kind].arrays
    assert arrays is not None
    return arrays[group]


def _copied(value: mx.array) -> mx.array:
    """A copy for certain: a slice, or a stack of one, may share its source's buffer and keep all of it."""
    return value * mx.array(1, dtype=value.dtype)
