"""Which replica runs a request: pure decisions over the columns of one model.

Each policy looks at the positions [low, high) and takes the first best at or after `start`, wrapping
around: with `start` just behind the last choice, equals take turns.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mlxhost.frontend.columns import CLOSED, Columns
from mlxhost.frontend.errors import InternalError

ReplicaKey = tuple[str, int]  # slot, epoch

NONE = -1  # no replica may be chosen

# Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): affinity holds while its
# replica stays within this factor of the mean. The floor keeps it at light load, where the mean says nothing.
BOUND = 1.25
BOUND_FLOOR = 4


def pick(policy: str, columns: Columns, low: int, high: int, start: int) -> int:
    """The position to use, or NONE. Raises InternalError for a policy unknown here."""
    choose = _POLICIES.get(policy)
    if choose is None:
        raise InternalError(f"routing policy {policy!r} is not known to this frontend")
    if low >= high:
        return NONE
    return choose(columns, low, high, start if low <= start < high else low)


def within_bound(columns: Columns, position: int, low: int, high: int) -> bool:
    """Whether the replica, with one more request, has at most BOUND times the mean load of [low, high)."""
    if not columns.open[position]:
        return False
    if low == 0 and high == len(columns):
        total, count = columns.in_flight_total, columns.usable_count
    else:
        usable = columns.usable[low:high]
        total = int((columns.rows[low:high] + columns.credit_rows[low:high])[usable].sum())
        count = int(usable.sum())
    return columns.in_flight(position) + 1 <= max(BOUND_FLOOR, BOUND * (total + 1) / count)


def _round_robin(columns: Columns, low: int, high: int, start: int) -> int:
    position = _first(columns.open, low, high, start)
    return _first(columns.usable, low, high, start) if position == NONE else position


def _least_in_flight(columns: Columns, low: int, high: int, start: int) -> int:
    return _least(columns.rows_cost, low, high, start)


def _minimum_kv_usage(columns: Columns, low: int, high: int, start: int) -> int:
    return _least(columns.kv_cost, low, high, start)


def _first(mask: NDArray[np.bool_], low: int, high: int, start: int) -> int:
    position = start + int(mask[start:high].argmax())
    if not mask[position] and start > low:
        position = low + int(mask[low:start].argmax())
    return position if mask[position] else NONE


def _least(cost: NDArray[np.float64], low: int, high: int, start: int) -> int:
    best = start + int(cost[start:high].argmin())
    if start > low:
        before = low + int(cost[low:start].argmin())
        if cost[before] < cost[best]:
            best = before
    return best if cost[best] < CLOSED else NONE


_POLICIES: dict[str, Callable[[Columns, int, int, int], int]] = {
    "round-robin": _round_robin,
    "least-in-flight": _least_in_flight,
    "minimum-kv-usage": _minimum_kv_usage,
    # Where affinity decides nothing, load does.
    "prefix-affinity": _least_in_flight,
    "bootstrap-room": _least_in_flight,
}
