"""Streams whose model takes long to load: the headers go out before anything is decided, so that neither the
client nor a proxy takes the silence for a dead server, and comments tell how far the load is.

Until then an error is an HTTP error; afterwards it is the stream's last event.
"""

import asyncio
from collections.abc import Mapping

import msgspec
from aiohttp import web

from mlxhost.frontend.http.sse import EventStream, event
from mlxhost.frontend.services import Services
from mlxhost.wire.control import FleetModel

HEADERS_AFTER_S = 10.0
COMMENT_S = 5.0

early_key: web.RequestKey[EventStream] = web.RequestKey("early", EventStream)


async def resident(http: web.Request, services: Services, name: str, *, stream: bool) -> FleetModel:
    """Wait until the model can take a request. Raises what Waiting.resident raises."""
    if model := services.waiting.now(name):
        return model
    waiting = asyncio.ensure_future(services.waiting.resident(name))
    timeout_s = HEADERS_AFTER_S if stream and early_key not in http else COMMENT_S
    try:
        while not (await asyncio.wait((waiting,), timeout=timeout_s))[0]:
            if stream:
                if early_key not in http:
                    http[early_key] = EventStream(http, services.keep_alive)
                    await http[early_key].open()
                await http[early_key].send(comment(services.waiting.progress(name)))
                timeout_s = COMMENT_S
        return waiting.result()
    finally:
        waiting.cancel()


def comment(progress: dict[str, object]) -> bytes:
    """A line that clients skip; ours reads the JSON after the name."""
    return b": mlxhost.loading " + msgspec.json.encode(progress) + b"\n\n"


async def open_stream(http: web.Request, services: Services, headers: Mapping[str, str]) -> EventStream:
    """The request's stream, its headers sent: with `headers` among them, or as comments when they went out
    early."""
    if early_key in http:
        stream = http[early_key]
        await stream.send(b"".join(f": {name}: {value}\n\n".encode() for name, value in headers.items()))
        return stream
    stream = EventStream(http, services.keep_alive, headers)
    await stream.open()
    return stream


async def end_with(http: web.Request, failed: web.StreamResponse) -> web.StreamResponse:
    """`failed` as it can still be told: as it is, or as the last event when the headers are out."""
    stream = http.get(early_key)
    if stream is None or not isinstance(failed, web.Response) or not isinstance(failed.body, bytes):
        return failed
    await stream.send(event(failed.body))
    ended: web.StreamResponse = await stream.close(broken=True)
    return ended
