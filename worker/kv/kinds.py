"""The cache classes of mlx-lm whose layout and behaviour the engine relies on (a contract test holds them
to it)."""

from collections.abc import Iterable
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a layer keeps, by the name of mlx-lm's class."""

    FULL = "KVCache"  # keys and values of every token
    WINDOW = "RotatingKVCache"  # of the last `max_size` tokens, in a ring
    CHUNKED = "ChunkedKVCache"  # of the last chunks (llama4); rows with it run one at a time
    STATE = "ArraysCache"  # a state of fixed size: SSM, convolution, linear attention


_BY_NAME = {kind.value: kind for kind in Kind}


def kind_of(leaf: Any) -> Kind | None:
    """The kind of a cache that is no CacheList; None for a class that the engine does not know."""
    return _BY_NAME.get(type(leaf).__name__)


def flatten(caches: Iterable[Any]) -> list[Any]:
    """`caches` with each CacheList (several caches of one layer) replaced by what is in it."""
    leaves: list[Any] = []
    for cache in caches:
        if type(cache).__name__ == "CacheList":
            leaves += flatten(cache.caches)
        else:
            leaves.append(cache)
    return leaves


def mergeable(leaf: Any) -> bool:
    """Whether rows of this kind of layer can share one array."""
    match kind_of(leaf):
        case Kind.FULL | Kind.STATE:
            return True
        case Kind.WINDOW:
            return bool(leaf.keep == 0)
        case _:
            return False
