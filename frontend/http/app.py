"""The HTTP application: routes, and what is done around every request."""

import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from mlxhost.frontend import logs
from mlxhost.frontend.errors import ApiError, BodyTooLarge, InternalError, NoSuchRoute, WrongMethod
from mlxhost.frontend.http import admin, health, library
from mlxhost.frontend.http.context import RequestLog, log_key, request_id_of, services_key, services_of
from mlxhost.frontend.http.early import end_with
from mlxhost.frontend.openai.chat import chat_completions
from mlxhost.frontend.openai.completions import completions
from mlxhost.frontend.openai.errors import error_body, error_headers
from mlxhost.frontend.openai.models import get_model, list_models
from mlxhost.frontend.services import Services

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CLIENT_CLOSED = 499  # for the log only; nobody is there to read it


def build_app(services: Services) -> web.Application:
    """The application over `services`."""
    app = web.Application(middlewares=[_around], client_max_size=services.max_body_bytes)
    app[services_key] = services
    app.on_response_prepare.append(_add_headers)
    app.add_routes(
        [
            web.post("/v1/chat/completions", _admitted(chat_completions)),
            web.post("/v1/completions", _admitted(completions)),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{id:.+}", get_model),
            web.get("/admin/status", admin.status),
            web.post("/admin/{operation:[a-z_-]+}", admin.operate),
            web.get("/fit", library.fit),
            web.get("/library", library.library),
            web.get("/health", health.health),
            web.get("/ready", health.ready),
            web.get("/", health.index),
        ]
    )
    return app


def _admitted(handler: Handler) -> Handler:
    """A handler that counts as in flight, and is refused once shutdown has begun."""

    async def admitted(http: web.Request) -> web.StreamResponse:
        services = services_of(http)
        with services.gate.admit(), services.request_ids.hold(http[log_key].request_id):
            return await handler(http)

    return admitted


async def _add_headers(http: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "mlxhost"
    response.headers["x-request-id"] = http[log_key].request_id if log_key in http else request_id_of(http)


@web.middleware
async def _around(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One access line, and every failure as a JSON body."""
    log = request[log_key] = RequestLog(request_id_of(request))
    start, status = time.perf_counter(), _CLIENT_CLOSED
    try:
        response = await end_with(request, await _answer(request, handler))
        status = response.status
        return response
    finally:
        logs.info(
            "request",
            id=log.request_id,
            method=request.method,
            path=request.path,
            status=status,
            model=log.model,
            prompt_tokens=log.prompt_tokens,
            completion_tokens=log.completion_tokens,
            ms=(time.perf_counter() - start) * 1000,
            **({"note": log.note} if log.note else {}),
        )


async def _answer(http: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        services_of(http).access.check(http)
        return await handler(http)
    except ApiError as error:
        return _failed(http, error)
    except web.HTTPNotFound:
        return _failed(http, NoSuchRoute(http.method, http.path))
    except web.HTTPMethodNotAllowed as error:
        response = _failed(http, WrongMethod(http.method, http.path, error.allowed_methods))
        response.headers["Allow"] = error.headers["Allow"]
        return response
    except web.HTTPRequestEntityTooLarge:
        return _failed(http, BodyTooLarge(services_of(http).max_body_bytes))
    except web.HTTPException as error:
        return _failed(http, ApiError(error.reason, status=error.status))
    except ConnectionError:
        raise  # the client is gone
    except Exception:
        logs.exception("handler_failed", request_id=http[log_key].request_id)
        return _failed(http, InternalError("internal error; the server's log has the details"))


def _failed(http: web.Request, error: ApiError) -> web.Response:
    http[log_key].note = error.code or error.kind
    headers = error_headers(error)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=error.status, body=error_body(error), content_type="application/json", headers=headers
    )
