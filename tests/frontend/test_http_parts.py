"""Body reading and event streams in one process, where their clocks can be shortened."""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from mlxhost.frontend.errors import ApiError
from mlxhost.frontend.http import body as body_module
from mlxhost.frontend.http import sse
from mlxhost.frontend.http.body import read_body
from mlxhost.frontend.http.sse import EventStream, KeepAlive, event

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(handler: Handler) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_route("*", "/", handler)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}/"


def test_idle_streams_get_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream with nothing to say sends comments, so that proxies and clients keep it; a busy one none."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.3)

    async def body() -> bytes:
        keep_alive = KeepAlive()

        async def handler(http: web.Request) -> web.StreamResponse:
            stream = EventStream(http, keep_alive)
            await stream.open()
            await stream.send(event(b"1"))
            await asyncio.sleep(1.5)
            await stream.send(event(b"2"))
            return await stream.close()

        task = asyncio.create_task(keep_alive.run())
        runner, url = await serve(handler)
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            text = await response.read()
        task.cancel()
        await runner.cleanup()
        assert not keep_alive.streams
        return text

    assert asyncio.run(body()) == b"data: 1\n\n: keep-alive\n\ndata: 2\n\n"


def test_a_body_that_never_comes_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that announces a body and stalls is not waited for forever."""
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.2)

    async def body() -> int:
        caught: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()

        async def handler(http: web.Request) -> web.StreamResponse:
            try:
                await read_body(http, dict, 1000)
            except ApiError as error:
                caught.set_result(error)
            return web.Response()

        runner, url = await serve(handler)
        port = int(url.rsplit(":", 1)[1].strip("/"))
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        error = await asyncio.wait_for(caught, 5)
        writer.close()
        await writer.wait_closed()
        await runner.cleanup()
        return error.status

    assert asyncio.run(body()) == 408
