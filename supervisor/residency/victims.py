"""Which models go to make room. Pure.

Among all sets that free enough, in this order: as few as possible of the models that matter most, then of
those that matter less, and so on; the fewest models; the ones that were not used for longest.
"""

from collections.abc import Sequence

from mlxhost.supervisor.residency.facts import Unit


def choose(candidates: Sequence[Unit], room: int, count: int = 0) -> list[Unit] | None:
    """The set of `candidates` that frees `room` bytes and `count` places, or None when all of them do not.

    Exact, in O(n^2 log n): first how many must go of each priority, then, from the last used to the one
    unused for longest, everyone is spared who can be.
    """
    quotas = _quotas(candidates, room, count)
    if quotas is None:
        return None
    left = sorted(candidates, key=lambda u: (-u.used, u.holds, u.name))
    chosen: list[Unit] = []
    while left:
        unit = left.pop(0)
        if not _frees([*chosen, *left], chosen, quotas, room):
            chosen.append(unit)
    return chosen


def _quotas(candidates: Sequence[Unit], room: int, count: int) -> dict[int, int] | None:
    """How many of each priority must go, fewest of the most important first."""
    if sum(u.holds for u in candidates) < room or len(candidates) < count:
        return None
    sizes: dict[int, list[int]] = {}
    for unit in candidates:
        sizes.setdefault(unit.priority, []).append(unit.holds)
    quotas: dict[int, int] = {}
    rest_bytes, rest_count = sum(u.holds for u in candidates), len(candidates)
    for priority in sorted(sizes):
        ranked = sorted(sizes[priority], reverse=True)
        rest_bytes, rest_count = rest_bytes - sum(ranked), rest_count - len(ranked)
        quota = 0
        while room > rest_bytes or count > rest_count:
            room, count, quota = room - ranked[quota], count - 1, quota + 1
        quotas[priority] = quota
    return quotas


def _frees(pool: Sequence[Unit], chosen: Sequence[Unit], quotas: dict[int, int], room: int) -> bool:
    """Whether the quotas can be filled from `pool`, `chosen` among them for certain, and free enough."""
    total = sum(u.holds for u in chosen)
    for priority, quota in quotas.items():
        taken = sum(u.priority == priority for u in chosen)
        free = [u.holds for u in pool if u.priority == priority and u not in chosen]
        if len(free) < quota - taken:
            return False
        total += sum(sorted(free, reverse=True)[: quota - taken])
    return total >= room
