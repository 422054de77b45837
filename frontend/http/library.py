"""GET /fit and GET /library: the models on this machine and whether they fit, as the supervisor knows."""

from typing import Any

from aiohttp import web

from mlxhost.frontend.errors import ApiError, BadRequest, Unavailable
from mlxhost.frontend.http.context import services_of
from mlxhost.wire.control import Reply

DEADLINE_S = 20.0
_MAX_TOKENS = 1 << 31


async def fit(http: web.Request) -> web.Response:
    """Whether ?model= fits, at ?context= tokens: a model by its name, never by a path."""
    model = http.query.get("model", "")
    if not model:
        raise BadRequest("give the model as ?model=NAME; GET /library lists them", param="model")
    return web.json_response(await _ask(http, "fit", {"model": model, "context": _context(http)}))


async def library(http: web.Request) -> web.Response:
    """Every model on this machine."""
    result = await _ask(http, "library", {"context": _context(http)})
    return web.json_response({"object": "list", "data": result["models"]})


def _context(http: web.Request) -> int:
    text = http.query.get("context", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < _MAX_TOKENS):
        raise BadRequest(f"context {text[:40]!r} is not a number of tokens", param="context")
    return int(text)


async def _ask(http: web.Request, op: str, args: dict[str, Any]) -> dict[str, Any]:
    try:
        reply = await services_of(http).control.call(op, args, DEADLINE_S)
    except TimeoutError:
        raise Unavailable(f"no answer from the supervisor within {DEADLINE_S:.0f} s", "timeout") from None
    if reply.code != "ok":
        raise _error(reply)
    return reply.result


def _error(reply: Reply) -> ApiError:
    match reply.code:
        case "not_found":
            return ApiError(reply.message, status=404, param="model", code="model_not_found")
        case "invalid" | "failed":
            return BadRequest(reply.message)
        case _:
            return Unavailable(reply.message or reply.code, reply.code)
