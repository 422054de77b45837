"""The waiting queue: by priority with aging, and among equals by deficit round-robin over clients. Pure.

Deficit round-robin (Shreedhar and Varghese 1995) in tokens, charged as they are computed, because nobody
knows beforehand how much a request will generate: a client may start a request while its balance is
positive; every prompt token and every generated token is taken from it; when no waiting client has a
balance left, all get the same quantum. A client without competitors is not charged.
"""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import count

from mlxhost.worker.row import Row

QUANTUM_TOKENS = 512
# A flood that began while nobody else was there is not held against a client for longer than this.
_MOST_DEBT = 8 * QUANTUM_TOKENS
AGING_S = 10.0  # a row that has waited so long counts as one priority level better


class FairQueue:
    """Rows that wait. Owned by the engine thread. `now` is monotonic seconds, as in `Row.arrived`."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Row]] = {}  # by client, whose turn is first in front; each by arrival
        self._balance: dict[str, float] = {}
        self._active: Counter[str] = Counter()  # rows that wait or run
        self._order = count()
        self._numbers: dict[Row, int] = {}  # order of arrival, kept by rows that come back

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def __iter__(self) -> Iterator[Row]:
        return (row for rows in list(self._rows.values()) for row in list(rows))

    def __contains__(self, row: Row) -> bool:
        return row in self._rows.get(row.client, ())

    def push(self, row: Row) -> None:
        """A new row waits, or one that ran waits again: at its old place among those of its client."""
        if row not in self._numbers:
            self._numbers[row] = next(self._order)
            self._active[row.client] += 1
            self._balance.setdefault(row.client, 0.0)
        rows = self._rows.setdefault(row.client, [])
        rows.append(row)
        rows.sort(key=lambda r: self._numbers[r])

    def peek(self, now: float) -> Row | None:
        """The row to run next; it stays. The same answer until something changes."""
        candidates = self.heads(now)
        if not candidates:
            return None
        richest = max(self._balance[client] for client in candidates)
        if richest <= 0:
            rounds = math.floor(-richest / QUANTUM_TOKENS) + 1
            for client in candidates:
                self._balance[client] += rounds * QUANTUM_TOKENS
        return next(row for client, row in candidates.items() if self._balance[client] > 0)

    def heads(self, now: float) -> dict[str, Row]:
        """Each client's first row of the best level that waits; clients in the order of their turns."""
        ranks = {p: i for i, p in enumerate(sorted({row.priority for row in self}))}
        best: dict[str, Row] = {}
        best_level = len(ranks)
        for client, rows in self._rows.items():
            for row in rows:
                level = max(0, ranks[row.priority] - int((now - row.arrived) / AGING_S))
                if level < best_level:
                    best_level, best = level, {}
                if level == best_level:
                    best.setdefault(client, row)
        return best

    def pop(self, row: Row) -> None:
        """`row` runs now: its client's turn is over once its balance is."""
        self._take_out(row)
        if row.client in self._rows and self._balance[row.client] <= 0:
            self._rows[row.client] = self._rows.pop(row.client)

    def charge(self, row: Row, tokens: int) -> None:
        """`tokens` were computed for `row`'s client, waiting or running."""
        if len(self._active) < 2 or row.client not in self._active:
            return
        balance = max(self._balance[row.client] - tokens, -_MOST_DEBT)
        self._balance[row.client] = balance
        if balance <= 0 and row.client in self._rows:
            self._rows[row.client] = self._rows.pop(row.client)

    def forget(self, row: Row) -> None:
        """`row` has ended, waiting or not."""
        if self._numbers.pop(row, None) is None:
            return
        if row in self:
            self._take_out(row)
        self._active[row.client] -= 1
        if not self._active[row.client]:
            del self._active[row.client], self._balance[row.client]

    def _take_out(self, row: Row) -> None:
        rows = self._rows[row.client]
        rows.remove(row)
        if not rows:
            del self._rows[row.client]
