"""What is known of one model's replicas, as numpy columns that events update in place.

A position is a replica's index in its model. Figures are the worker's last report plus a credit for what
this frontend dispatched since. The two costs are derived and kept current, so that a routing decision
only reads: it copies nothing and looks at no replica by itself.
"""

import numpy as np
from numpy.typing import NDArray

CLOSED = float("inf")  # cost of a replica that may not be chosen
# Added to the cost of a replica whose queue is full, so that it is chosen only when all are.
FULL_ROWS = float(1 << 40)
FULL_KV = float(1 << 10)

# kv_cost is one number for (ratio, rows in flight): the ratio in steps of 2**-20, and below them the rows
# in steps of 2**-40. All of it fits the 53 bits of a float64.
_RATIO_STEPS = float(1 << 20)
_ROW = 2.0**-40
_MAX_RATIO = FULL_KV - 1
_MAX_ROWS = (1 << 20) - 1


class Columns:
    """`size` replicas, none of them open at first."""

    def __init__(self, size: int) -> None:
        self.usable: NDArray[np.bool_] = np.zeros(size, np.bool_)  # ready, and its data link is up
        self.open: NDArray[np.bool_] = np.zeros(size, np.bool_)  # usable, and its queue has room
        self.rows: NDArray[np.int64] = np.zeros(size, np.int64)  # running and waiting, as reported
        self.credit_rows: NDArray[np.int64] = np.zeros(size, np.int64)  # dispatched since
        self.kv: NDArray[np.int64] = np.zeros(size, np.int64)  # tokens, reservations included
        self.credit_kv: NDArray[np.int64] = np.zeros(size, np.int64)
        self.capacity: NDArray[np.int64] = np.zeros(size, np.int64)  # KV tokens; 0: not known
        self.limit: NDArray[np.int64] = np.zeros(size, np.int64)  # rows before it refuses; 0: not known
        self.rows_cost: NDArray[np.float64] = np.full(size, CLOSED)
        self.kv_cost: NDArray[np.float64] = np.full(size, CLOSED)
        self.usable_count = 0
        self.in_flight_total = 0  # of the usable replicas

    def __len__(self) -> int:
        return len(self.rows)

    def in_flight(self, position: int) -> int:
        """Rows running, waiting or on their way."""
        return int(self.rows[position]) + int(self.credit_rows[position])

    def kv_tokens(self, position: int) -> int:
        """KV tokens held, reserved or on their way."""
        return int(self.kv[position]) + int(self.credit_kv[position])

    def report(self, position: int, rows: int, kv: int, capacity: int) -> None:
        """Take over a worker's report."""
        before = self.in_flight(position)
        self.rows[position], self.kv[position], self.capacity[position] = rows, kv, capacity
        self._refresh(position, before)

    def credit(self, position: int, rows: int, kv: int) -> None:
        """Add (or, negative, settle) what was dispatched and no report includes yet."""
        before = self.in_flight(position)
        self.credit_rows[position] += rows
        self.credit_kv[position] += kv
        self._refresh(position, before)

    def set_usable(self, position: int, usable: bool) -> None:
        """Let the replica be chosen, or not."""
        if bool(self.usable[position]) != usable:
            sign = 1 if usable else -1
            self.usable_count += sign
            self.in_flight_total += sign * self.in_flight(position)
            self.usable[position] = usable
            self._refresh(position, self.in_flight(position))

    def place(self, position: int, limit: int) -> None:
        """A new process sits here: nothing is known of its load."""
        self.set_usable(position, False)
        for column in (self.rows, self.credit_rows, self.kv, self.credit_kv, self.capacity):
            column[position] = 0
        self.limit[position] = limit

    def _refresh(self, position: int, in_flight_before: int) -> None:
        if not self.usable[position]:
            self.open[position] = False
            self.rows_cost[position] = self.kv_cost[position] = CLOSED
            return
        rows, capacity, limit = self.in_flight(position), self.capacity[position], self.limit[position]
        self.in_flight_total += rows - in_flight_before
        ratio = min(self.kv_tokens(position) / capacity, _MAX_RATIO) if capacity else 0.0
        kv_cost = int(ratio * _RATIO_STEPS) / _RATIO_STEPS + min(rows, _MAX_ROWS) * _ROW
        full = bool(limit) and rows >= limit
        self.open[position] = not full
        self.rows_cost[position] = rows + FULL_ROWS if full else rows
        self.kv_cost[position] = kv_cost + FULL_KV if full else kv_cost
