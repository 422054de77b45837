"""Streams whose headers go out while their model still loads: a real HTTP server and client."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from mlxhost.frontend.errors import ApiError, DoesNotFit
from mlxhost.frontend.http import early
from mlxhost.frontend.http.sse import KeepAlive
from mlxhost.frontend.openai.errors import error_body
from mlxhost.frontend.services import Services

Loaded = asyncio.Future[str]


class SlowModel:
    """Stands for Waiting: the model is there when the test says so."""

    def __init__(self) -> None:
        self.loaded: Loaded = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def now(self, name: str) -> None:
        return None

    async def resident(self, name: str) -> str:
        try:
            return await asyncio.shield(self.loaded)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def progress(self, name: str) -> dict[str, Any]:
        return {"message": "loading 40 %", "done": 4, "total": 10}


@asynccontextmanager
async def served(model: SlowModel) -> AsyncIterator[str]:
    services = cast(Services, SimpleNamespace(waiting=model, keep_alive=KeepAlive()))

    async def handle(http: web.Request) -> web.StreamResponse:
        try:
            await early.resident(http, services, "m", stream="stream" in http.query)
        except ApiError as error:
            failed = web.Response(status=error.status, body=error_body(error))
            return await early.end_with(http, failed)
        stream = await early.open_stream(http, services, {"Warning": "199 x"})
        await stream.send(b"data: token\n\n")
        return await stream.close()

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/"
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "HEADERS_AFTER_S", 0.05)
    monkeypatch.setattr(early, "COMMENT_S", 0.05)


async def until_comment(response: aiohttp.ClientResponse) -> dict[str, Any]:
    line = await asyncio.wait_for(response.content.readline(), 10)
    assert line.startswith(b": mlxhost.loading ")
    progress: dict[str, Any] = json.loads(line.removeprefix(b": mlxhost.loading "))
    return progress


def test_a_stream_gets_headers_and_progress_before_its_model_is_there() -> None:
    """Status 200 and comments with the progress, then late headers and the answer on the same stream."""

    async def run() -> None:
        model = SlowModel()
        async with (
            served(model) as url,
            aiohttp.ClientSession() as client,
            client.get(url + "?stream") as response,
        ):
            assert response.status == 200
            assert await until_comment(response) == {"message": "loading 40 %", "done": 4, "total": 10}
            model.loaded.set_result("m")
            rest = await response.content.read()
            assert rest.endswith(b": Warning: 199 x\n\ndata: token\n\n"), "a header that came too late"

    asyncio.run(run())


def test_an_error_after_the_headers_is_the_last_event() -> None:
    """What would have been a 503 is told in the stream."""

    async def run() -> None:
        model = SlowModel()
        async with (
            served(model) as url,
            aiohttp.ClientSession() as client,
            client.get(url + "?stream") as response,
        ):
            await until_comment(response)
            model.loaded.set_exception(DoesNotFit("m", "needs 9 GB", "too_large"))
            last = (await response.content.read()).split(b"data: ")[-1]
            assert json.loads(last)["error"]["code"] == "model_does_not_fit"

    asyncio.run(run())


@pytest.mark.parametrize("query", ["", "?stream"])
def test_an_error_that_comes_soon_is_an_http_error(query: str) -> None:
    """Whole answers have no headers before they are decided, and neither have streams at first."""

    async def run() -> None:
        model = SlowModel()
        model.loaded.set_exception(DoesNotFit("m", "needs 9 GB", "too_large"))
        async with (
            served(model) as url,
            aiohttp.ClientSession() as client,
            client.get(url + query) as response,
        ):
            assert response.status == 503
            assert (await response.json(content_type=None))["error"]["why"] == "too_large"

    asyncio.run(run())


def test_a_client_that_goes_away_waits_no_longer() -> None:
    """Its place in the queue is free again."""

    async def run() -> None:
        model = SlowModel()
        async with served(model) as url, aiohttp.ClientSession() as client:
            response = await client.get(url + "?stream")
            await until_comment(response)
            response.close()
            for _ in range(1000):
                if model.cancelled:
                    break
                await asyncio.sleep(0.01)
            assert model.cancelled

    asyncio.run(run())
