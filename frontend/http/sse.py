"""Server-sent events over one HTTP response, kept alive while nothing is to be said."""

import asyncio
import time
from weakref import WeakSet

from aiohttp import web

KEEP_ALIVE_S = 15.0
DONE = b"data: [DONE]\n\n"

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(data: bytes) -> bytes:
    """One event; `data` holds no newline (JSON never does)."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """One response. `send` waits while the client is slow to read."""

    def __init__(self, http: web.Request, keep_alive: "KeepAlive") -> None:
        self._http = http
        self._response = web.StreamResponse(headers=_HEADERS)
        self._keep_alive = keep_alive
        self._writing = False
        self._last = time.monotonic()

    async def open(self) -> None:
        """Commit status 200 and the headers."""
        await self._response.prepare(self._http)
        self._keep_alive.streams.add(self)

    async def send(self, events: bytes) -> None:
        """Write some events at once."""
        if not events:
            return
        self._writing = True
        await self._response.write(events)
        self._writing = False
        self._last = time.monotonic()

    async def close(self, *, broken: bool = False) -> web.StreamResponse:
        """End the response; a broken one also ends the connection."""
        self._keep_alive.streams.discard(self)
        if broken:
            self._response.force_close()
        await self._response.write_eof()
        return self._response

    async def comment_if_idle(self, now: float) -> None:
        """Send a comment, which clients skip, when nothing was sent for KEEP_ALIVE_S."""
        if not self._writing and now - self._last >= KEEP_ALIVE_S:
            await self.send(b": keep-alive\n\n")


class KeepAlive:
    """Looks after all open streams of the process, so that none of them needs a timer of its own."""

    def __init__(self) -> None:
        self.streams: WeakSet[EventStream] = WeakSet()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            idle = (s.comment_if_idle(now) for s in list(self.streams))
            await asyncio.gather(*idle, return_exceptions=True)
