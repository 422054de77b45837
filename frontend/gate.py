"""Admission: whether new requests may come in, how many are inside, and under which ids."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mlxhost.frontend.errors import RequestIdInUse, ShuttingDown


class RequestIds:
    """The ids of the requests being answered: each names one of them, in logs and in `ctl abort`."""

    def __init__(self) -> None:
        self._held: set[str] = set()

    @contextmanager
    def hold(self, request_id: str) -> Iterator[None]:
        """For the time of one request. Raises RequestIdInUse when another one has the id."""
        if request_id in self._held:
            raise RequestIdInUse(
                f"a request with the X-Request-Id {request_id!r} is being answered; give each request its own"
            )
        self._held.add(request_id)
        try:
            yield
        finally:
            self._held.remove(request_id)


class Gate:
    """Counts the requests being answered. `on_change` is called when the first comes in and when the last
    one leaves."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._open = True
        self._empty = asyncio.Event()
        self._empty.set()
        self.in_flight = 0

    def set_open(self, open: bool) -> None:
        """Let new requests in or not; those inside are not touched."""
        self._open = open

    @contextmanager
    def admit(self) -> Iterator[None]:
        """For the time of one request. Raises ShuttingDown when the gate is closed."""
        if not self._open:
            raise ShuttingDown
        self.in_flight += 1
        if self.in_flight == 1:
            self._empty.clear()
            self._on_change()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._empty.set()
                self._on_change()

    async def wait_empty(self, timeout_s: float) -> None:
        """Return when nothing is in flight, or after `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
