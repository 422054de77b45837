"""Which rows share a pack. Pure: lengths in, groups out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PackRule:
    """Rows share a pack while the longest is at most `ratio` times the shortest, lengths below `floor`
    counting as `floor`, and has no more than `limit` tokens, because a row that joins or leaves costs a copy
    of its pack. A ratio of 0 keeps every row by itself."""

    ratio: float = 0.0
    floor: int = 1
    limit: float = math.inf

    def fits(self, shortest: int, longest: int) -> bool:
        return longest <= self.limit and max(longest, self.floor) <= self.ratio * max(shortest, self.floor)


EVERYTHING = PackRule(ratio=math.inf)
SINGLE_ROWS = PackRule()


@dataclass(frozen=True)
class Group:
    """One pack to be: indices of present packs that go into it, then those of rows that join."""

    packs: tuple[int, ...]
    rows: tuple[int, ...]


def plan(packs: Sequence[Sequence[int]], rows: Sequence[int], rule: PackRule) -> list[Group]:
    """How to group `packs` (each a list of its rows' lengths) and joining `rows` (lengths).

    Packs are never split: their rows grow alike, so they only become more similar. Units are merged with
    the neighbour in length as long as the rule allows, so that few packs remain.
    """
    units = [(min(p), max(p), Group((i,), ())) for i, p in enumerate(packs) if p]
    units += [(length, length, Group((), (i,))) for i, length in enumerate(rows)]
    units.sort(key=lambda unit: (unit[0], unit[1]))
    merged: list[tuple[int, int, Group]] = []
    for low, high, group in units:
        if merged:
            last_low, last_high, last = merged[-1]
            if rule.fits(last_low, max(last_high, high)):
                both = Group(last.packs + group.packs, last.rows + group.rows)
                merged[-1] = (last_low, max(last_high, high), both)
                continue
        merged.append((low, high, group))
    return [group for _, _, group in merged]
