"""Whether the memory of a process that ended is free again, as the kernel sees it.

A process's memory is gone when the process is, except where a driver frees a device's memory a little later;
then the next load would start while it does not fit yet. Other programs move the same figure, so a rise of
half of what is expected will do, the wait is short, and of little memory the exit itself is proof enough.
"""

import asyncio
import time
from collections.abc import Callable

import psutil

ENOUGH = 0.5
TOLD_FROM_NOISE = 256 * 1024 * 1024
POLL_SECONDS = 0.02


def available_bytes() -> int:
    """Memory that could be taken now without swapping."""
    return int(psutil.virtual_memory().available)


async def wait_freed(
    expected: int, before: int, deadline_s: float, available: Callable[[], int] = available_bytes
) -> bool:
    """Wait until `available` is above `before` by enough of `expected` bytes; False when time is up."""
    if expected < TOLD_FROM_NOISE:
        return True
    end = time.monotonic() + deadline_s
    while available() - before < ENOUGH * expected:
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True
