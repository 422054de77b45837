"""Requests that outlive their worker: a row of which the client has seen nothing is started anew, once.

Any such row may be: what the first try produced is thrown away whole, so a fresh draw is as good an answer
as the lost one, seeded or not; a greedy or seeded row gives the very same tokens.
"""

import time
from collections.abc import Callable

from mlxhost.frontend.errors import ApiError, ModelNotReady, ReplicaNotReady, WorkerLost
from mlxhost.frontend.rows import Row

MAX_ATTEMPTS = 2
WAIT_S = 30.0


class Replays:
    """Rows that wait for a worker. `send` starts a row anew: True when it is under way, False when no worker
    can be reached yet; it raises the ApiError of a model that cannot serve."""

    def __init__(self, send: Callable[[Row], bool]) -> None:
        self._send = send
        self._waiting: dict[int, tuple[Row, WorkerLost, float]] = {}  # by id; error, deadline
        self.wait_s = WAIT_S

    def __len__(self) -> int:
        return len(self._waiting)

    def lost(self, row: Row, error: WorkerLost) -> None:
        """The worker of `row` is gone: keep the row for `go_on`, or end it."""
        if row.attempt >= MAX_ATTEMPTS:
            # It may well be the request that kills them: do not invite the client to send it again.
            why = f"{error.why}; so was the worker that ran it before"
            _end(row, WorkerLost(row.model, why, retryable=False))
        elif row.shown:
            _end(row, error)
        else:
            row.forget_answer()
            self._waiting[id(row)] = row, error, time.monotonic() + self.wait_s

    def go_on(self) -> None:
        """Start what can be started, and end what has waited too long or in vain."""
        for row, error, deadline in list(self._waiting.values()):
            ended = self._try(row, error)
            if ended is None and time.monotonic() < deadline:
                continue
            del self._waiting[id(row)]
            if isinstance(ended, WorkerLost):
                _end(row, ended)
            elif ended is None:
                why = f"{error.why}; no other was ready within {self.wait_s:g} s"
                _end(row, WorkerLost(row.model, why))

    def cancel(self, row: Row) -> None:
        """Nobody waits for the row any more."""
        self._waiting.pop(id(row), None)

    def _try(self, row: Row, error: WorkerLost) -> WorkerLost | bool | None:
        """True when the row is under way, None when it must wait, else why there is no hope."""
        try:
            return self._send(row) or None
        except (ModelNotReady, ReplicaNotReady) as not_now:
            return (
                None
                if not_now.retryable
                else WorkerLost(row.model, f"{error.why}; {not_now}", retryable=False)
            )
        except ApiError as refused:
            return WorkerLost(row.model, f"{error.why}; {refused}", retryable=refused.retryable)


def _end(row: Row, error: WorkerLost) -> None:
    row.error = error
    row.call.touch(row)
