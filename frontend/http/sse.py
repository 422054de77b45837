"""Server-sent events over one HTTP response, kept alive while nothing is to be said.

There are two ways to write. `send` belongs to the handler and waits while the client is slow. `push` is for
tokens as they arrive: it neither waits nor wakes a task, and what was pushed to a stream since the event
loop's last turn goes out in one write. It is refused while a client is slow.
"""

import asyncio
import time
from collections.abc import Mapping
from weakref import WeakSet

from aiohttp import HttpVersion11, web

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

    def __init__(
        self, http: web.Request, keep_alive: "KeepAlive", headers: Mapping[str, str] | None = None
    ) -> None:
        self._http = http
        self._response = web.StreamResponse(headers=_HEADERS | dict(headers or {}))
        self._keep_alive = keep_alive
        self._transport: asyncio.Transport | None = None  # for `push`, once the stream is open
        self._pushed: list[bytes] = []
        self._writing = False
        self._last = time.monotonic()

    async def open(self) -> None:
        """Commit status 200 and the headers."""
        if self._http.version >= HttpVersion11:
            self._response.enable_chunked_encoding()
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
        if self._response.chunked:  # the headers are out, so bytes behind them may be written directly
            self._transport = self._http.transport

    @property
    def keeps_up(self) -> bool:
        """Whether `push` may be called: the client is there and has taken all that was written."""
        transport = self._transport
        return transport is not None and not transport.get_write_buffer_size() and not transport.is_closing()

    def push(self, events: bytes) -> None:
        """Write events when the event loop's turn ends. Only while the stream `keeps_up`."""
        if not self._pushed:
            self._keep_alive.flush_later(self)
        self._pushed.append(events)

    def flush(self, now: float) -> None:
        """Write what was pushed, as one HTTP chunk."""
        data = b"".join(self._pushed)
        self._pushed.clear()
        self._last = now
        if self._transport is not None:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

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
    """Looks after all open streams of the process: writes what was pushed to them, and comments when nothing
    was, so that none of them needs a callback or a timer of its own."""

    def __init__(self) -> None:
        self.streams: WeakSet[EventStream] = WeakSet()
        self._loop = asyncio.get_running_loop()
        self._pushed: list[EventStream] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            idle = (s.comment_if_idle(now) for s in list(self.streams))
            await asyncio.gather(*idle, return_exceptions=True)

    def flush_later(self, stream: EventStream) -> None:
        """Flush `stream` at the end of this turn of the event loop, before any task it wakes."""
        if not self._pushed:
            self._loop.call_soon(self._flush)
        self._pushed.append(stream)

    def _flush(self) -> None:
        streams, self._pushed = self._pushed, []
        now = time.monotonic()
        for stream in streams:
            stream.flush(now)
