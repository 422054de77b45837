"""Which requests run: the waiting queue, KV reservations, and the clamp of max_tokens. No I/O, no MLX."""

from dataclasses import dataclass

from mlxhost.wire import data
from mlxhost.worker.errors import RowError
from mlxhost.worker.row import Row


@dataclass(frozen=True)
class Capacity:
    """What one worker can hold. `kv_tokens` is over all rows, `max_model_len` for one."""

    kv_tokens: int
    max_model_len: int
    max_rows: int

    @property
    def longest(self) -> int:
        """Tokens one row can ever have, prompt and output together."""
        return min(self.kv_tokens, self.max_model_len)


def clamp_max_tokens(prompt_tokens: int, wanted: int | None, capacity: Capacity) -> int:
    """`wanted` (None: as much as possible) cut to the room that the prompt leaves.

    Raises RowError context_length_exceeded, with the numbers, when it leaves none.
    """
    room = capacity.longest - prompt_tokens
    if room < 1:
        raise RowError(
            data.REJECT_CONTEXT,
            f"the prompt has {prompt_tokens} tokens and the context holds {capacity.longest}, "
            "with room needed for at least 1 token of output; shorten the prompt",
        )
    return room if wanted is None else min(wanted, room)


class Admission:
    """Rows that wait and the KV tokens promised to those that run."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.waiting: list[Row] = []
        self.running = 0
        self.reserved = 0

    def enqueue(self, row: Row) -> None:
        """Wait by priority, then by arrival."""
        at = len(self.waiting)
        while at and self.waiting[at - 1].priority > row.priority:
            at -= 1
        self.waiting.insert(at, row)

    def admit(self) -> Row | None:
        """The next row, its KV reserved; None while the first in line does not fit."""
        if not self.waiting or self.running >= self.capacity.max_rows:
            return None
        if self.reserved + self.waiting[0].reserved > self.capacity.kv_tokens:
            return None
        row = self.waiting.pop(0)
        self.running += 1
        self.reserved += row.reserved
        return row

    def withdraw_all(self) -> list[Row]:
        """Empty the queue; the rows that were in it."""
        rows, self.waiting = self.waiting, []
        return rows

    def release(self, row: Row) -> None:
        """Undo `admit` when the row has ended."""
        self.running -= 1
        self.reserved -= row.reserved
