"""`/admin`: the operations of `mlxhost ctl` over HTTP. Who may call them is decided in http.access.

    GET  /admin/status
    POST /admin/OPERATION   {"target": "demo", "args": {...}, "timeout_s": 60}  (each may be left out)

The answer is {code, message, result} as `ctl --json` knows it. With `Accept: application/x-ndjson` news come
first, a line each: {"news": "waiting for 3 in flight", "data": {...}}.
"""

import asyncio
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from mlxhost.frontend.errors import ApiError, BadRequest, Unavailable
from mlxhost.frontend.http.body import read_body
from mlxhost.frontend.http.context import services_of
from mlxhost.wire.control import News, Reply

NDJSON = "application/x-ndjson"
# What `ctl` calls some operations; the others have one name. Hyphens and underscores are alike.
NAMES = {"log_level": "configure_logging", "load_watch": "watch_load", "sessions": "list_sessions"}
# HTTP status by the code of the reply; the supervisor keeps the deadline itself.
STATUS = {"ok": 200, "invalid": 400, "not_found": 404, "unsupported": 501, "timeout": 504}
_OTHER_STATUS = 503
_GRACE_S = 3.0


class Call(Struct, forbid_unknown_fields=True):
    """The body of a call."""

    target: str = ""
    args: dict[str, Any] = {}
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0


async def status(http: web.Request) -> web.StreamResponse:
    """Everything about every process."""
    return await _answer(http, "status", Call(timeout_s=10.0))


async def operate(http: web.Request) -> web.StreamResponse:
    """Call the operation that the path names."""
    services = services_of(http)
    body = await read_body(http, Call, services.max_body_bytes) if http.can_read_body else Call()
    op = http.match_info["operation"].replace("-", "_")
    if op == "state":
        op = "set_state" if body.args else "get_state"
    return await _answer(http, NAMES.get(op, op), body)


async def _answer(http: web.Request, op: str, call: Call) -> web.StreamResponse:
    if NDJSON in http.headers.get("Accept", ""):
        return await _streamed(http, op, call)
    reply = await _call(http, op, call, asyncio.Queue())
    return web.Response(
        status=STATUS.get(reply.code, _OTHER_STATUS),
        body=msgspec.json.encode(_shown(reply)),
        content_type="application/json",
    )


async def _streamed(http: web.Request, op: str, call: Call) -> web.StreamResponse:
    """News as they come, then the answer, or why there is none; the status is 200 whatever that says."""
    response = web.StreamResponse(headers={"Content-Type": NDJSON, "Cache-Control": "no-cache"})
    await response.prepare(http)
    news: asyncio.Queue[News] = asyncio.Queue()
    calling = asyncio.create_task(_call(http, op, call, news))
    try:
        while not (calling.done() and news.empty()):
            waiting = asyncio.create_task(news.get())
            try:
                await asyncio.wait({calling, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    told = waiting.result()
                    await response.write(_line({"news": told.message, "data": told.data}))
            finally:
                waiting.cancel()
        await response.write(_line(await _outcome(calling)))
    finally:
        calling.cancel()
    await response.write_eof()
    return response


async def _outcome(calling: "asyncio.Task[Reply]") -> dict[str, Any]:
    """The answer, or the error in its place: the headers of another response could not be sent any more."""
    try:
        return _shown(await calling)
    except ApiError as error:
        return {"code": error.code or error.kind, "message": error.message, "result": {}}


async def _call(http: web.Request, op: str, call: Call, news: asyncio.Queue[News]) -> Reply:
    """The supervisor's answer. Raises Unavailable when it gives none, BadRequest for arguments that cannot be
    sent."""
    control = services_of(http).control
    try:
        return await control.call(
            op,
            call.args,
            call.timeout_s,
            target=call.target,
            grace_s=_GRACE_S,
            on_news=news.put_nowait,
        )
    except TimeoutError:
        raise Unavailable("the supervisor does not answer", "supervisor_silent") from None
    except OverflowError:
        raise BadRequest("an integer in `args` has more than 64 bits", param="args") from None


def _shown(reply: Reply) -> dict[str, Any]:
    return {"code": reply.code, "message": reply.message, "result": reply.result}


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
