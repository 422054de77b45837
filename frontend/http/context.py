"""What one HTTP request carries from handler to handler: its id, and what its access line will say."""

import secrets
from dataclasses import dataclass

from aiohttp import web

from mlxhost.frontend.services import Services

MAX_CLIENT_ID = 128

services_key: web.AppKey[Services] = web.AppKey("services", Services)


@dataclass
class RequestLog:
    """Filled in as a request is understood."""

    request_id: str
    model: str = "-"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    note: str = ""  # error code, or what went wrong after the headers


log_key: web.RequestKey[RequestLog] = web.RequestKey("log", RequestLog)


def services_of(http: web.Request) -> Services:
    """The process's services."""
    return http.app[services_key]


def request_id_of(http: web.BaseRequest) -> str:
    """The client's own X-Request-Id when it is a short printable word, else a new one."""
    given = http.headers.get("X-Request-Id", "")
    if given and len(given) <= MAX_CLIENT_ID and given.isascii() and given.isprintable() and " " not in given:
        return given
    return f"req-{secrets.token_hex(12)}"
