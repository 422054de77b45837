"""The rows of a step: which share packs, and what the model is given as its caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import mlx.core as mx

from mlxhost.worker.kv.kinds import Kind, flatten, kind_of, mergeable
from mlxhost.worker.kv.merged import MergedKV
from mlxhost.worker.kv.plan import EVERYTHING, SINGLE_ROWS, PackRule, plan
from mlxhost.worker.kv.rowkv import RowKV, arrays_of, rebuild
from mlxhost.worker.kv.views import Offsets, PaddedView, SpanAttention, StepView


class Batching(Enum):
    """How far a model lets its rows be computed together; the self-test at load finds out."""

    PACKS = "packs"  # attention pack by pack
    PADDED = "padded"  # one pack of plain arrays: the model looks inside keys
    ALONE = "alone"  # one row at a time


@dataclass(frozen=True)
class StepShape:
    """How the rows of a step are laid out: what the model allows and what pays on the device."""

    batching: Batching = Batching.PACKS
    rule: PackRule = SINGLE_ROWS
    kernel: SpanAttention | None = None  # attention over padded packs without a mask, where there is one
    narrow: bool = False  # draws are made in short lists of the likeliest tokens (see narrow.py)
    jumps_apart: bool = False  # rows that run ahead over forced text need caches of their own


@dataclass
class Pack:
    """Rows stored together. `lengths` counts each one's tokens; `layers` has one entry a layer: a MergedKV,
    or a single row's own cache; None for a state layer of merged rows."""

    lengths: list[int]
    layers: list[Any]

    @property
    def size(self) -> int:
        return len(self.lengths)


class StepCaches:
    """The caches of one composition of rows. Steps change it; a row that joins or leaves makes a new one
    out of it, and what it holds then stands still, so that rows that left can take theirs from it."""

    def __init__(
        self,
        shape: StepShape,
        rows: Sequence[RowKV] = (),
        packs: Sequence[Pack] = (),
        states: Sequence[Any] = (),
    ) -> None:
        """`rows` in the order of `packs`. `states` has one ArraysCache of all rows for each state layer,
        None for any other layer."""
        self._shape = shape
        self.rows = list(rows)
        self._packs = list(packs)
        self._states = list(states)
        self._offsets = Offsets()
        self._where = [(pack, i) for pack in packs for i in range(pack.size)]
        self._views: list[Any] = self.rows[0].caches if len(self.rows) == 1 else self._make_views()

    def composed(self, rows: Sequence[RowKV], *, apart: bool = False) -> "StepCaches":
        """The caches of a composition with exactly `rows`, in an order of its own (its `rows`). Rows of
        this one that are not among them get theirs back. With `apart`, none share a pack."""
        wanted = set(map(id, rows))
        for row in self.rows:
            if id(row) not in wanted or len(rows) == 1 or apart:
                row.release()
        if len(rows) > 1:
            composed = self._together(rows, SINGLE_ROWS if apart else self._rule(rows[0]))
        else:
            composed = StepCaches(self._shape, rows, [_alone(row) for row in rows])
        # Rows that left refer to this; referring to them as well would keep both until a collection.
        self.rows = []
        return composed

    def _together(self, rows: Sequence[RowKV], rule: PackRule) -> "StepCaches":
        # A row that is whole joins, even if it was here before: it may have been elsewhere since.
        joining = [row for row in rows if row.whole]
        lent = {id(row) for row in rows} - set(map(id, joining))
        members = iter(self.rows)
        present = [[next(members) for _ in range(pack.size)] for pack in self._packs]
        stay = [[i for i, row in enumerate(pack) if id(row) in lent] for pack in present]
        lengths = [[p.lengths[i] for i in kept] for p, kept in zip(self._packs, stay, strict=True)]
        groups = plan(lengths, [row.length for row in joining], rule)
        order, packs = [], []
        for group in groups:
            inside = [present[p][i] for p in group.packs for i in stay[p]]
            inside += [joining[r] for r in group.rows]
            sources = [(self._packs[p], stay[p]) for p in group.packs]
            sources += [(_alone(joining[r]), [0]) for r in group.rows]
            if len(inside) == 1:
                # Out of a pack, its caches are its own again.
                if sources[0][0].size > 1:
                    inside[0].release()
                    sources = [(_alone(inside[0]), [0])]
                packs.append(sources[0][0])
            else:
                packs.append(_merge(sources))
            order += inside
        composed = StepCaches(self._shape, order, packs, self._join_states(order))
        for position, row in enumerate(order):
            if not row.whole:
                row.move(composed, position)
            elif composed._where[position][0].size > 1 or composed._has_state:
                row.lend(composed, position)
        return composed

    def views(self) -> list[Any]:
        """The `cache=` argument of the next forward, of one token a row."""
        if len(self.rows) > 1:
            lengths = [length for pack in self._packs for length in pack.lengths]
            self._offsets.array = mx.array(lengths, dtype=mx.int32)
        return self._views

    def stepped(self) -> None:
        """A forward was made: every row has one token more."""
        for pack in self._packs:
            pack.lengths = [length + 1 for length in pack.lengths]
        if len(self.rows) == 1:
            self.rows[0].count(1)

    def content(self, row: RowKV) -> RowKV:
        """A row's caches, whole, as of now: to be read before the next step and then dropped (the next
        step would otherwise copy what it holds). Not to be changed."""
        if row.whole:
            return row
        position = next(i for i, other in enumerate(self.rows) if other is row)
        copy = RowKV(rebuild(row.shell, self.leaves_of(position, row.shell)))
        copy.count(self.length_of(position))
        return copy

    def arrays(self) -> list[mx.array]:
        """All that must be evaluated for the caches to be settled."""
        found = [array for state in self._states if state is not None for array in arrays_of(state)]
        for pack in self._packs:
            for layer in pack.layers:
                if isinstance(layer, MergedKV):
                    found += [] if layer.keys is None else [layer.keys, layer.values]
                elif layer is not None:
                    found += arrays_of(layer)
        return found

    # For rows that are lent here (rowkv.Home)

    def leaves_of(self, position: int, shell: list[Any]) -> list[Any]:
        pack, i = self._where[position]
        leaves = []
        for layer, state, like in zip(pack.layers, self._states, flatten(shell), strict=True):
            if state is not None:
                leaves.append(_state_of(state, position, like))
            elif isinstance(layer, MergedKV):
                leaves.append(layer.leaf(i, pack.lengths[i], like))
            else:
                leaves.append(layer)
        return leaves

    def length_of(self, position: int) -> int:
        pack, i = self._where[position]
        return pack.lengths[i]

    # Making a composition

    @property
    def _has_state(self) -> bool:
        return any(state is not None for state in self._states)

    def _rule(self, row: RowKV) -> PackRule:
        if not all(mergeable(leaf) for leaf in flatten(row.shell)):
            return SINGLE_ROWS
        return EVERYTHING if self._shape.batching is Batching.PADDED else self._shape.rule

    def _join_states(self, rows: Sequence[RowKV]) -> list[Any]:
        """One ArraysCache of all rows for each state layer, None for other layers."""
        from mlx_lm.models.cache import ArraysCache

        places = {id(row): i for i, row in enumerate(self.rows) if not row.whole}
        old = [places.get(id(row)) for row in rows]
        joined: list[Any] = []
        for layer, shell in enumerate(flatten(rows[0].shell)):
            if kind_of(shell) is not Kind.STATE:
                joined.append(None)
                continue
            state: Any = ArraysCache(len(shell.cache))
            for entry in range(len(shell.cache)):
                before = self._states[layer].cache[entry] if places else None
                new = [row.leaves[layer].cache[entry] for row in rows if row.whole]
                state.cache[entry] = _gather(before, len(self.rows), old, new)
            joined.append(state)
        return joined

    def _make_views(self) -> list[Any]:
        if not self.rows:
            return []
        sizes = [pack.size for pack in self._packs]
        views: list[Any] = []
        for layer, state in enumerate(self._states):
            if state is not None:
                views.append(state)
                continue
            parts = [pack.layers[layer] for pack in self._packs]
            if self._shape.batching is Batching.PADDED and len(parts) == 1:
                views.append(PaddedView(self._offsets, parts[0]))
            else:
                views.append(StepView(self._offsets, parts, sizes, self._shape.kernel))
        return rebuild(self.rows[0].shell, views)


def _alone(row: RowKV) -> Pack:
    return Pack([row.length], row.leaves)


def _merge(sources: Sequence[tuple[Pack, Sequence[int]]]) -> Pack:
    """One pack of the chosen rows of several; the pack itself where nothing changes."""
    first, kept = sources[0]
    if len(sources) == 1 and len(kept) == first.size:
        return first
    lengths = [pack.lengths[i] for pack, kept in sources for i in kept]
    layers: list[Any] = []
    for index, like in enumerate(first.layers):
        if like is None or kind_of(like) is Kind.STATE:
            layers.append(None)
            continue
        parts = [_part(pack.layers[index], kept, pack.size) for pack, kept in sources]
        layers.append(parts[0] if len(parts) == 1 else MergedKV.join(parts))
    return Pack(lengths, layers)


def _part(layer: Any, kept: Sequence[int], rows: int) -> MergedKV:
    """The chosen rows of one pack's layer."""
    if not isinstance(layer, MergedKV):
        return MergedKV.of(layer)
    return layer if len(kept) == rows else layer.keep(kept)


def _gather(
    old: mx.array | None, old_rows: int, places: Sequence[int | None], new: Sequence[mx.array | None]
) -> mx.array | None:
    """One array of all rows, in order: row i is `old[places[i]]`, or the next of `new` where that is None.
    A row without a state yet has zeros, as mlx-lm's own batches do."""
    like = next((array for array in (old, *new) if array is not None), None)
    if like is None:
        return None
    some_old = any(place is not None for place in places)
    pieces = [] if not some_old else [_or_zeros(old, old_rows, like)]
    pieces += [_or_zeros(array, 1, like) for array in new]
    following = iter(range(old_rows if some_old else 0, old_rows + len(new)))
    take = [place if place is not None else next(following) for place in places]
    whole = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
    if take == list(range(whole.shape[0])):
        return whole
    return whole[mx.array(take, dtype=mx.int32)]


def _or_zeros(array: mx.array | None, rows: int, like: mx.array) -> mx.array:
    return mx.zeros((rows, *like.shape[1:]), dtype=like.dtype) if array is None else array


def _state_of(state: Any, position: int, like: Any) -> Any:
    """One row's state cache out of all rows'."""
    leaf: Any = object.__new__(type(like))
    leaf.__dict__.update(like.__dict__)
    leaf.cache = [None if entry is None else entry[position : position + 1] for entry in state.cache]
    return leaf
