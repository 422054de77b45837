"""Waiting for the fleet's state to change: the one way in which coroutines of the event loop wait on it."""

import asyncio
import contextlib
from collections.abc import Callable


class Changes:
    """Wakes everyone who waits, at each change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def next(self, timeout_s: float) -> None:
        """Wait for one more change, at most `timeout_s`."""
        event = self._event
        with contextlib.suppress(TimeoutError):
            # Not wait_for: up to Python 3.11 that loses a cancellation which comes together with the event.
            async with asyncio.timeout(timeout_s):
                await event.wait()

    async def until(
        self,
        reached: Callable[[], object],
        timeout_s: float | None = None,
        each: Callable[[], None] = lambda: None,
    ) -> bool:
        """Wait until `reached()` is true; False when `timeout_s` passes first. `each` runs at every change
        before that."""
        loop = asyncio.get_running_loop()
        end = None if timeout_s is None else loop.time() + timeout_s
        while not reached():
            each()
            event, left = self._event, None if end is None else end - loop.time()
            if left is not None and left <= 0:
                return False
            try:
                async with asyncio.timeout(left):
                    await event.wait()
            except TimeoutError:
                return bool(reached())
        return True
