"""What one model's earlier requests tell of where the next one should go: prompt prefixes and sessions.

Both are bounded and forget what was used longest ago. They hold guesses: the worker alone knows its cache.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 64
MAX_BLOCKS = 1024  # of a prompt that are looked at: 65,536 tokens
MAX_ENTRIES = 32_768  # blocks remembered for a model
MAX_HOLDERS = 8  # replicas remembered for a block
MAX_SESSIONS = 65_536

_BLOCK_BYTES = BLOCK_TOKENS * 4
_GOLDEN = 0x9E3779B97F4A7C15


def block_hashes(prompt: bytes) -> list[int]:
    """A chained hash for each whole block of a prompt's uint32 ids: equal hashes mean equal prefixes.

    Python's own hash of bytes is keyed at random in each process, so that no client can make two collide.
    """
    chained, hashes = 0, []
    whole = min(len(prompt) // _BLOCK_BYTES, MAX_BLOCKS)
    for offset in range(0, whole * _BLOCK_BYTES, _BLOCK_BYTES):
        chained = hash((chained, prompt[offset : offset + _BLOCK_BYTES]))
        hashes.append(chained)
    return hashes


class PrefixIndex:
    """Which positions were sent which prefix."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, list[int]] = OrderedDict()  # newest holder last

    def __len__(self) -> int:
        return len(self._holders)

    def longest(self, hashes: Sequence[int], may_serve: Callable[[int], bool]) -> list[int]:
        """The positions, newest last, that hold the longest prefix, of those that `may_serve`.

        A prefix is always at least as fresh as what extends it, so it is never forgotten first, and the
        length can be found by bisection.
        """
        found: list[int] = []
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if holders := [p for p in self._holders.get(hashes[middle], ()) if may_serve(p)]:
                found, low = holders, middle + 1
            else:
                high = middle
        return found

    def record(self, hashes: Sequence[int], position: int) -> None:
        """`position` was sent a prompt with these blocks."""
        index = self._holders
        for block in reversed(hashes):
            holders = index.get(block)
            if holders is None:
                index[block] = [position]
                continue
            index.move_to_end(block)
            if holders[-1] != position:
                if position in holders:
                    holders.remove(position)
                elif len(holders) >= MAX_HOLDERS:
                    del holders[0]
                holders.append(position)
        while len(index) > MAX_ENTRIES:
            index.popitem(last=False)

    def forget(self, position: int) -> None:
        """The process at `position` is gone, and its cache with it."""
        for block, holders in list(self._holders.items()):
            if position in holders:
                holders.remove(position)
                if not holders:
                    del self._holders[block]


class Sessions:
    """Which position each session was last sent to."""

    def __init__(self) -> None:
        self._positions: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._positions)

    def find(self, session: str) -> int | None:
        return self._positions.get(session)

    def bind(self, session: str, position: int) -> None:
        self._positions[session] = position
        self._positions.move_to_end(session)
        if len(self._positions) > MAX_SESSIONS:
            self._positions.popitem(last=False)

    def forget(self, position: int) -> None:
        """The process at `position` is gone: its sessions start anew, wherever that is."""
        for session in [s for s, p in self._positions.items() if p == position]:
            del self._positions[session]


def rendezvous(session: str, open: NDArray[np.bool_], low: int, high: int) -> int | None:
    """The position in [low, high) that every frontend chooses for a session by itself (highest random
    weight): when a replica goes, only its own sessions move. None when none is open."""
    # Unlike Python's hash this one is the same in every process.
    digest = blake2b(session.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    x = (np.arange(low, high, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) ^ np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x[~open[low:high]] = 0
    best = low + int(x.argmax())
    return best if open[best] else None
