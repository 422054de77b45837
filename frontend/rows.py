"""What a request is waiting for: its rows, filled by the dispatcher and read by the HTTP handler.

A row never queues messages: new tokens join those not yet taken, so a slow client costs one list of ints,
bounded by max_tokens, and gets the text in fewer, larger pieces. A stream whose client keeps up is given its
tokens at once, without waking its handler.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxhost.frontend.errors import ApiError
from mlxhost.frontend.hints import ANYWHERE, Hints
from mlxhost.frontend.routing import ReplicaKey
from mlxhost.wire.data import Finish, Grammar, Limits, Sampling


@dataclass(frozen=True)
class RowSpec:
    """One row to run. `prompt` is the ids as little-endian uint32."""

    request_id: str
    prompt: bytes
    prompt_tokens: int
    sampling: Sampling
    limits: Limits
    priority: int = 0
    client: str = ""
    session_id: str = ""
    cache_salt: str = ""
    trace: str = ""
    hints: Hints = ANYWHERE
    grammar: Grammar | None = None


@dataclass(slots=True, eq=False)
class Row:
    """One choice of one request on one replica, keyed by its handle.

    `tokens` are those not taken yet. The row has ended once `finish` is not RUNNING or `error` is set;
    exactly one of these happens, once.
    """

    handle: int
    index: int  # choice index within the request
    model: str
    replica: ReplicaKey
    seq: int
    spec: RowSpec
    call: "Call"
    attempt: int = 1  # 2 once it was started anew on another worker
    shown: bool = False  # something of it has gone to the client, so it cannot be started anew
    accepted: bool = False
    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.RUNNING
    error: ApiError | None = None
    received: int = 0  # tokens so far, taken or not
    completion_tokens: int | None = None  # the worker's own count, at the end
    cached_tokens: int = 0
    warning: str = ""  # what of its grammar cannot be enforced

    @property
    def ended(self) -> bool:
        return self.error is not None or self.finish is not Finish.RUNNING

    def forget_answer(self) -> None:
        """Back to the start: the answer so far is void."""
        self.attempt += 1
        self.accepted, self.tokens, self.received, self.cached_tokens = False, [], 0, 0

    def take(self) -> list[int]:
        """The tokens that came since the last call."""
        tokens, self.tokens = self.tokens, []
        return tokens


class Call:
    """The rows of one HTTP request, and the one place where its handler waits.

    `sink` takes a running row's new ids while the handler waits for news and everything before them was
    taken; it returns False when it cannot, and the handler will.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.sink: Callable[[Row, list[int]], bool] | None = None
        self._dirty: dict[int, Row] = {}
        self._waiter: asyncio.Future[None] | None = None  # set while the handler waits and nothing is new

    def push(self, row: Row, ids: list[int]) -> bool:
        """Give new ids of a running row to the sink; False when they are left to the handler."""
        return self.sink is not None and self._waiter is not None and self.sink(row, ids)

    def touch(self, row: Row) -> None:
        """Tell the handler that `row` has something new."""
        self._dirty[row.index] = row
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def news(self, timeout_s: float | None = None) -> list[Row]:
        """The rows with something new, as soon as there is one; empty after `timeout_s`.

        Without a timeout the wait is bounded all the same: the dispatcher ends the rows of a replica that
        died or fell silent.
        """
        if not self._dirty:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                if timeout_s is None:
                    await waiter
                else:
                    await asyncio.wait((waiter,), timeout=timeout_s)
            finally:
                self._waiter = None
        rows, self._dirty = list(self._dirty.values()), {}
        return rows
