"""One request's caches: mlx-lm's own objects, unpadded, one for each layer."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlxhost.worker.errors import ModelError
from mlxhost.worker.kv.kinds import Kind, flatten, kind_of


class Home(Protocol):
    """Where a row's arrays are while it decodes with others."""

    def leaves_of(self, position: int, shell: list[Any]) -> list[Any]: ...

    def length_of(self, position: int) -> int: ...


class RowKV:
    """The caches of one row, whole while it is alone: in prefill, as the only row of a batch, and after it
    has left a batch.

    Among others its arrays may be part of the batch's; then `whole` is False, only `length` may be asked,
    and `Batch.kv_of` gives its content. Arrays come back on the first use after it has left.
    """

    def __init__(self, caches: list[Any]) -> None:
        self._caches = caches
        self._home: Home | None = None
        self._position = 0
        self._released = True
        self._fed = 0

    @classmethod
    def new(cls, model: Any) -> "RowKV":
        """Empty caches for `model`. Raises ModelError for a cache class the engine does not know."""
        if hasattr(model, "make_cache"):
            caches = model.make_cache()
        else:
            from mlx_lm.models.cache import KVCache

            caches = [KVCache() for _ in model.layers]
        unknown = sorted({type(leaf).__name__ for leaf in flatten(caches) if kind_of(leaf) is None})
        if unknown:
            known = ", ".join(kind.value for kind in Kind)
            raise ModelError(
                "unsupported_architecture",
                f"the model keeps its state in {', '.join(unknown)}; supported: {known}",
            )
        return cls(list(caches))

    @property
    def whole(self) -> bool:
        return self._home is None or self._released

    @property
    def caches(self) -> list[Any]:
        """What the model takes as its `cache`. Raises RuntimeError while the row is not whole."""
        if self._home is not None:
            if not self._released:
                raise RuntimeError("the row's caches are in a pack; Batch.kv_of gives its content")
            home, self._home = self._home, None
            self._fed = home.length_of(self._position)
            self._caches = rebuild(self._caches, home.leaves_of(self._position, self._caches))
        return self._caches

    @property
    def leaves(self) -> list[Any]:
        """The caches without their CacheLists, in order."""
        return flatten(self.caches)

    @property
    def length(self) -> int:
        """Tokens seen so far (sliding-window layers hold fewer)."""
        if self._home is not None:
            return self._home.length_of(self._position)
        counted = next((leaf.offset for leaf in flatten(self._caches) if hasattr(leaf, "offset")), None)
        return self._fed if counted is None else int(counted)

    def run(self, model: Any, tokens: Sequence[int]) -> mx.array:
        """Feed `tokens`; the logits (tokens, vocabulary) after each, not evaluated yet."""
        ids = mx.array(list(tokens), dtype=mx.uint32)
        logits: mx.array = model(ids[None], cache=self.caches)[0]
        self.count(len(tokens))
        return logits

    def count(self, tokens: int) -> None:
        """Tell of tokens that went through `caches`: state layers do not count by themselves."""
        self._fed += tokens

    def copy(self) -> "RowKV":
        """The same content, which no longer follows this one."""
        leaves = [_copied(leaf) for leaf in self.leaves]
        twin = RowKV(rebuild(self._caches, leaves))
        twin._fed = self._fed
        return twin

    @property
    def shell(self) -> list[Any]:
        """The caches for their classes and settings only: their content may be elsewhere."""
        return self._caches

    def lend(self, home: Home, position: int) -> None:
        """The arrays are `home`'s from now on; this side lets go of them."""
        self._caches = rebuild(self._caches, [_blank(leaf) for leaf in self.leaves])
        self._home, self._position, self._released = home, position, False

    def move(self, home: Home, position: int) -> None:
        """The lent arrays are `home`'s from now on."""
        self._home, self._position = home, position

    def release(self) -> None:
        """The row has left: what `home` holds will not change any more and is this row's again."""
        self._released = True

    def arrays(self) -> list[mx.array]:
        """All that must be evaluated for the row to be settled."""
        return [array for leaf in self.leaves for array in arrays_of(leaf)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, spare room included."""
        return sum(a.nbytes for a in self.arrays())


def arrays_of(leaf: Any) -> list[mx.array]:
    """The arrays that a leaf cache holds now."""
    if kind_of(leaf) is Kind.STATE:
        return [entry for entry in leaf.cache if entry is not None]
    return [] if leaf.keys is None else [leaf.keys, leaf.values]


def rebuild(caches: list[Any], leaves: Sequence[Any]) -> list[Any]:
    """`leaves` in the places that flatten(caches) had."""
    return _place(caches, iter(leaves))


def _place(caches: Iterable[Any], rest: Iterator[Any]) -> list[Any]:
    # No closure that calls itself: that is a reference cycle, which would keep the arrays until the
    # collector runs.
    return [
        type(cache)(*_place(cache.caches, rest)) if type(cache).__name__ == "CacheList" else next(rest)
        for cache in caches
    ]


def _copied(leaf: Any) -> Any:
    """A cache of the same class and content. Slice assignment changes an mx.array in place, so each side
    gets array objects of its own (the buffers stay shared until one of them is written)."""
    twin: Any = object.__new__(type(leaf))
    twin.__dict__.update(leaf.__dict__)
    if kind_of(leaf) is Kind.STATE:
        twin.cache = [None if entry is None else mx.array(entry) for entry in leaf.cache]
    elif leaf.keys is not None:
        twin.keys, twin.values = mx.array(leaf.keys), mx.array(leaf.values)
    return twin


def _blank(leaf: Any) -> Any:
    """A cache of the same class and settings without content."""
    twin: Any = object.__new__(type(leaf))
    twin.__dict__.update(leaf.__dict__)
    if kind_of(leaf) is Kind.STATE:
        twin.cache = [None] * len(leaf.cache)
    else:
        twin.keys = twin.values = None
    return twin
