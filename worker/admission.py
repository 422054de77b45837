"""Which requests run: KV reservations, the clamp of max_tokens, who is admitted and who must leave. Pure.

A row is admitted with room for its context and some growth, not for all of its max_tokens: chats that set no
max_tokens could otherwise never run side by side. When the rows have grown into all there is, the youngest of
the lowest priority leaves and waits again. That comes to an end: the order is total, so the first in it
never leaves and, as no row is promised more than the whole, always finishes; and a row that has left comes
back only when twice the growth of before is free, so it leaves a number of times that is logarithmic in its
length.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from mlxhost.wire import data
from mlxhost.worker.errors import RowError
from mlxhost.worker.fairness import FairQueue
from mlxhost.worker.kvcost import KVCost
from mlxhost.worker.row import Row

GROWTH_TOKENS = 256  # free for every running row at each admission; doubles each time a row had to leave
_MAX_YIELDS = 4  # times that one row makes way for others' admission
_RETRY_S = 0.05  # how often a queue is looked at in which nothing changed but ages


@dataclass(frozen=True)
class Capacity:
    """What one worker can hold: `kv_bytes` over all rows, `max_model_len` tokens for one."""

    kv_bytes: int
    max_model_len: int
    max_rows: int
    cost: KVCost

    @cached_property
    def longest(self) -> int:
        """Tokens one row can ever have, prompt and output together."""
        room = self.cost.tokens(self.kv_bytes)
        return self.max_model_len if room is None else min(room, self.max_model_len)

    @cached_property
    def kv_tokens(self) -> int:
        """Tokens that all rows together can hold, at most."""
        if self.cost.per_token:
            return self.cost.tokens(self.kv_bytes) or 0
        rows = self.kv_bytes // self.cost.fixed if self.cost.fixed else self.max_rows
        return min(rows, self.max_rows) * self.max_model_len


def clamp_max_tokens(prompt_tokens: int, wanted: int | None, capacity: Capacity) -> int:
    """`wanted` (None: as much as possible) cut to the room that the prompt leaves.

    Raises RowError context_length_exceeded, with the numbers, when it leaves none.
    """
    room = capacity.longest - prompt_tokens
    if room >= 1:
        return room if wanted is None else min(wanted, room)
    why = ""
    if capacity.longest < capacity.max_model_len:
        why = (
            f" (the model could hold {capacity.max_model_len}, but {capacity.kv_bytes / 2**20:.1f} MiB of KV "
            f"cache at {capacity.cost.per_token:,} bytes a token leave no more)"
        )
    raise RowError(
        data.REJECT_CONTEXT,
        f"the prompt has {prompt_tokens} tokens and the context holds {capacity.longest}{why}, "
        "with room needed for at least 1 token of output; shorten the prompt",
    )


@dataclass(frozen=True)
class Choice:
    """A row that may run now, once those in `making_way` have left."""

    row: Row
    making_way: tuple[Row, ...] = ()


class Admission:
    """Rows that wait and rows that run, and the memory promised to these."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.waiting = FairQueue()
        self._running: list[Row] = []
        self._set_aside = 0  # waiting rows that had begun
        self._look_at = 0.0  # monotonic; until then the queue's first cannot run

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._look_at = 0.0

    @property
    def running(self) -> int:
        """Rows that have been accepted: those that run, and those that had to leave and will come back."""
        return len(self._running) + self._set_aside

    @property
    def queued(self) -> int:
        """Rows that have not begun."""
        return len(self.waiting) - self._set_aside

    @property
    def reserved(self) -> int:
        """Bytes that the running rows hold or may soon."""
        return sum(self._need(row) for row in self._running)

    @property
    def reserved_tokens(self) -> int:
        return sum(row.held(self._growth(row)) for row in self._running)

    @property
    def held(self) -> int:
        """Bytes that the running rows hold after the next step."""
        return sum(self._capacity.cost.bytes(row.held(1)) for row in self._running)

    @property
    def rows(self) -> list[Row]:
        """Those that run."""
        return list(self._running)

    def enqueue(self, row: Row) -> None:
        """A new row waits."""
        self.waiting.push(row)
        self._look_at = 0.0

    def choose(self, now: float, *, only_begun: bool = False) -> Choice | None:
        """The row to admit next, and who makes way for it; None while the first in line does not fit. Nobody
        slips past it but a client that runs two rows fewer than its own."""
        if not self.waiting or (now < self._look_at and self._running):
            return None
        row = self.waiting.peek(now)
        if only_begun and (row is None or not row.begun):
            row = min((r for r in self.waiting if r.begun), key=_rank, default=None)
        if row is not None:
            shares = Counter(r.client for r in self._running)
            behind = [] if only_begun else self.waiting.heads(now).values()
            poorer = (r for r in behind if shares[r.client] + 2 <= shares[row.client])
            for candidate in (row, *poorer):
                if (making_way := self._making_way(candidate)) is not None:
                    return Choice(candidate, tuple(making_way))
        self._look_at = now + _RETRY_S
        return None

    def fits(self, row: Row) -> bool:
        """Whether there is room for `row` now. A row that runs alone may have all there is, and more where a
        lease has shrunk since it was promised its max_tokens."""
        return self._room(len(self._running), self.reserved, self._need(row))

    def admit(self, row: Row) -> None:
        """`row`, chosen before, runs."""
        self.waiting.pop(row)
        if row.begun:
            self._set_aside -= 1
        else:
            self.waiting.charge(row, row.context)
        row.begun = True
        self._running.append(row)

    def overflowing(self) -> Row | None:
        """The row that must leave before the next step, for the others to have room; None when all have."""
        if len(self._running) < 2 or self.held <= self._capacity.kv_bytes:
            return None
        return max(self._running, key=_rank)

    def set_aside(self, row: Row) -> None:
        """A running row leaves and waits again."""
        self._running.remove(row)
        self._set_aside += 1
        self.waiting.push(row)
        self._look_at = 0.0

    def release(self, row: Row) -> None:
        """`row` has ended, wherever it was."""
        if row in self._running:
            self._running.remove(row)
        else:
            self._set_aside -= row.begun
        self.waiting.forget(row)
        self._look_at = 0.0

    def _growth(self, row: Row) -> int:
        return GROWTH_TOKENS << min(row.preemptions, 20)

    def _need(self, row: Row) -> int:
        return self._capacity.cost.bytes(row.held(self._growth(row)))

    def _room(self, rows: int, reserved: int, need: int) -> bool:
        """Whether one more row fits beside `rows` that have `reserved` bytes."""
        return rows < self._capacity.max_rows and (not rows or reserved + need <= self._capacity.kv_bytes)

    def _making_way(self, row: Row) -> list[Row] | None:
        """Who has to leave for `row` to run: nobody where it fits, None where it must wait."""
        left, reserved = len(self._running), self.reserved
        need = self._need(row)
        victims: list[Row] = []
        shares = Counter(r.client for r in self._running)
        for victim in [None, *sorted(self._running, key=_rank, reverse=True)]:
            if victim is not None:
                if not _yields_to(victim, row, shares):
                    continue
                victims.append(victim)
                shares[victim.client] -= 1
                left, reserved = left - 1, reserved - self._need(victim)
            if self._room(left, reserved, need):
                return victims
        return None


def _rank(row: Row) -> tuple[int, float, int]:
    """The order in which rows keep their memory: better priority first, then the older."""
    return row.priority, row.arrived, row.key[1]


def _yields_to(victim: Row, row: Row, shares: Counter[str]) -> bool:
    """Whether a running row makes way: for a better priority, or for a client that has two rows fewer, so
    that they never take turns in driving each other out."""
    if victim.yields >= _MAX_YIELDS or victim.priority < row.priority:
        return False
    return victim.priority > row.priority or shares[victim.client] >= shares[row.client] + 2
