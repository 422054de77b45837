"""A small HTTP client over the standard library, for what SDKs hide: raw bodies, headers, event timing."""

import http.client
import json
import socket
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """One whole response; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked to have the API's four fields, and no others but a lost worker's."""
        error: dict[str, Any] = self.json["error"]
        assert self.json.keys() == {"error"}
        more = {"tokens_emitted", "retryable"} if error["code"] == "worker_lost" else set()
        assert error.keys() == {"message", "type", "param", "code"} | more
        return error

    @property
    def events(self) -> list[Any]:
        """Data of each server-sent event, JSON decoded; [DONE] as a string."""
        return [decode_event(e) for e in self.body.decode().split("\n\n") if e]


def decode_event(event: str) -> Any:
    """One event's data; comments come back as None."""
    if event.startswith(":"):
        return None
    assert event.startswith("data: "), event
    data = event.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


def call(
    url: str,
    path: str,
    body: Any = None,
    *,
    method: str = "",
    headers: dict[str, str] | None = None,
    timeout: float = 60,
) -> Answer:
    """One request; `body` is sent as it is when bytes, else as JSON."""
    with _connection(url, timeout) as connection:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if data is None else "POST"), path, data, headers or {})
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def chat(url: str, model: str = "demo", text: str = "hi", **fields: Any) -> Answer:
    """One chat completion."""
    body = {"model": model, "messages": [{"role": "user", "content": text}]} | fields
    return call(url, "/v1/chat/completions", body)


def asked(url: str, **fields: Any) -> "Future[Answer]":
    """One chat completion, waited for in a thread."""
    answer: Future[Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(chat(url, **fields))
        except Exception as error:
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()
    return answer


def stream(
    url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Generator[tuple[float, Any], None, None]:
    """(seconds since the request, event) as they come. Closing the iterator drops the connection."""
    start = time.monotonic()
    with _connection(url) as connection:
        connection.request("POST", path, json.dumps(body | {"stream": True}).encode(), headers or {})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while line := response.readline():
            if text := line.decode().strip():
                yield time.monotonic() - start, decode_event(text)


def raw_request(path: str, body: dict[str, Any], *, length: int | None = None) -> bytes:
    """The bytes of a POST, for tests that hold the socket themselves."""
    data = json.dumps(body).encode()
    size = len(data) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {size}\r\n\r\n".encode() + data


def connect(url: str, *, receive_buffer: int = 0) -> socket.socket:
    """A plain connected socket, with a small receive buffer if asked for."""
    parts = urlsplit(url)
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(20)
    sock.connect((parts.hostname, parts.port))
    return sock


@contextmanager
def _connection(url: str, timeout: float = 60) -> Iterator[http.client.HTTPConnection]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        yield connection
    finally:
        connection.close()
