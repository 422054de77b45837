"""What one HTTP request carries from handler to handler: its id, and what its access line will say."""

import secrets
from dataclasses import dataclass

from aiohttp import web

from mlxhost.frontend.services import Services

MAX_CLIENT_ID = 128
MAX_TRACE = 512

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
    return given if _is_word(given, MAX_CLIENT_ID) else f"req-{secrets.token_hex(12)}"


def trace_of(http: web.BaseRequest) -> str:
    """The client's traceparent; one that cannot be one is taken for none, as its specification asks (W3C
    Trace Context, 3.2)."""
    given = http.headers.get("traceparent", "")
    return given if _is_word(given, MAX_TRACE) else ""


def _is_word(text: str, longest: int) -> bool:
    return 0 < len(text) <= longest and text.isascii() and text.isprintable() and " " not in text
