"""/admin when the supervisor does not answer, or is sent what cannot be sent: a real HTTP server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from mlxhost.frontend.http.access import Access
from mlxhost.frontend.http.app import build_app
from mlxhost.frontend.services import Services
from mlxhost.wire.codec import encode
from mlxhost.wire.control import ApiKey, Ctl, Keys, News, Reply

DIGEST = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"  # of "key"


async def silent(op: str, args: dict[str, Any], deadline_s: float, **more: Any) -> Reply:
    """Stands for ControlLink.call: encodes as that does, tells one piece of news and gives up."""
    encode(Ctl("id", op, more["target"], args, deadline_s))
    more["on_news"](News("id", "busy", {}))
    raise TimeoutError


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    access = Access()
    access.replace(Keys([ApiKey("ops", DIGEST, admin=True)]))
    services = SimpleNamespace(access=access, control=SimpleNamespace(call=silent), max_body_bytes=1 << 20)
    runner = web.AppRunner(build_app(cast(Services, services)))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/admin/drain"
    finally:
        await runner.cleanup()


async def post(body: dict[str, Any], **headers: str) -> tuple[int, list[dict[str, Any]]]:
    """Status and lines of the answer, read to the end of the connection."""
    more = {"Authorization": "Bearer key", "Connection": "close"}
    async with served() as url, aiohttp.ClientSession() as client:
        response = await client.post(url, json=body, headers=more | headers)
        return response.status, [json.loads(x) for x in (await response.read()).splitlines()]


def test_a_silent_supervisor_is_the_last_line_of_the_news() -> None:
    """The stream ends whole, with what would have been a 503."""
    status, lines = asyncio.run(post({}, Accept="application/x-ndjson"))
    assert status == 200
    assert lines[0] == {"news": "busy", "data": {}}
    assert lines[1:] == [
        {"code": "supervisor_silent", "message": "the supervisor does not answer", "result": {}}
    ]


@pytest.mark.parametrize(("args", "status"), [({}, 503), ({"context": 10**30}, 400)])
def test_errors_have_their_status(args: dict[str, Any], status: int) -> None:
    """No answer is a 503, an integer that the wire cannot carry a 400."""
    assert asyncio.run(post({"args": args}))[0] == status
