"""What clients send wrong: each ends in the API's own error shape, and the server serves on."""

import gzip
import json
import zlib
from typing import Any

import pytest
from support.frontend_client import call, chat, connect, raw_request
from support.frontend_served import ANSWER, Served

CHAT = "/v1/chat/completions"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/v1/nope", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/no/such", 404, "model_not_found"),
    ],
)
def test_routes(served: Served, method: str, path: str, status: int, code: str) -> None:
    """Unknown routes and methods are JSON errors with a request id."""
    answer = call(served.url, path, method=method)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers["x-request-id"].startswith("req-")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff\xfe",
        b'{"x":' * 200_000,
        b'{"model":"demo","messages":[{"role":"user","content":"\\ud800"}]}',
    ],
    ids=["empty", "cut", "array", "bytes", "deep", "surrogate"],
)
def test_bad_json(served: Served, body: bytes) -> None:
    """A body that is no JSON object is a 400."""
    answer = call(served.url, CHAT, body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"n": 10**9}, "n"),
        ({"temperature": "x"}, "temperature"),
        ({"tools": [{}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ],
)
def test_bad_fields_are_named(served: Served, fields: dict[str, Any], param: str) -> None:
    """The param of the error is the field."""
    answer = call(served.url, CHAT, BODY | fields)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("header", "status"),
    [("traceparent", 200), ("x-request-id", 200), ("x-mlxhost-session", 400), ("x-mlxhost-replica", 400)],
)
def test_headers_that_are_not_utf8(served: Served, header: str, status: int) -> None:
    """What only names a request is taken for none; what says where to run it is a 400."""
    line = f"Host: test\r\nConnection: close\r\n{header}: ".encode() + b"\xff"
    with connect(served.url) as peer:
        peer.sendall(raw_request(CHAT, BODY).replace(b"Host: test", line))
        assert peer.recv(65536).startswith(f"HTTP/1.1 {status} ".encode())


def test_unknown_model(served: Served) -> None:
    """404 model_not_found lists what is there."""
    answer = chat(served.url, "gpt-5")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert "demo, echo" in answer.error["message"]


def test_content_type_does_not_matter(served: Served) -> None:
    """JSON under a wrong or absent content type is served."""
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "nonsense"}):
        answer = call(served.url, CHAT, json.dumps(BODY).encode(), headers=headers)
        assert answer.status == 200


def test_compressed_bodies(served: Served) -> None:
    """gzip and deflate (with and without a header) are undone; others are a 415, garbage a 400."""
    plain = json.dumps(BODY).encode()
    bare = zlib.compressobj(wbits=-15)
    good = [("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain))]
    good.append(("deflate", bare.compress(plain) + bare.flush()))
    for encoding, body in good:
        assert call(served.url, CHAT, body, headers={"Content-Encoding": encoding}).status == 200
    for encoding, body, status in (("br", plain, 415), ("zstd", plain, 415), ("gzip", plain, 400)):
        answer = call(served.url, CHAT, body, headers={"Content-Encoding": encoding})
        assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")


def test_body_cap(served: Served) -> None:
    """More than 32 MiB is a 413, declared, compressed or chunked; the connection's peer is not kept busy."""
    bomb = gzip.compress(b"[" + b" " * (40 << 20) + b"]")
    answer = call(served.url, CHAT, bomb, headers={"Content-Encoding": "gzip"})
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    with connect(served.url) as sock:
        sock.sendall(raw_request(CHAT, BODY, length=33 << 20))
        assert sock.recv(100).startswith(b"HTTP/1.1 413")


def test_odd_text_is_served(served: Served) -> None:
    """NUL, control characters and special-token spellings in a message do no harm."""
    for text in ("a\0b", "\x1b[0m", "<|endoftext|>", "\ufffd", "x" * 5000):
        assert chat(served.url, text=text).json["choices"][0]["message"]["content"] == ANSWER


def test_request_ids(served: Served) -> None:
    """A client's own short id is echoed; one that could break a log line or header is replaced."""
    given = call(served.url, "/health", headers={"X-Request-Id": "my-id-1"}).headers["x-request-id"]
    assert given == "my-id-1"
    for bad in ("has space", "x" * 200, "é"):
        got = call(served.url, "/health", headers={"X-Request-Id": bad.encode("latin-1").decode("latin-1")})
        assert got.headers["x-request-id"].startswith("req-")


def test_not_http(served: Served) -> None:
    """Bytes that are no HTTP end that connection only."""
    with connect(served.url) as sock:
        sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert b"400" in sock.recv(100)
    assert call(served.url, "/health").json == {"status": "alive"}


def test_pointer_and_health(served: Served) -> None:
    """/, /health and /ready answer with JSON, also to HEAD."""
    assert call(served.url, "/").json["models"] == "/v1/models"
    assert call(served.url, "/", method="HEAD").status == 200
    ready = call(served.url, "/ready")
    assert (ready.status, ready.json["ready"]) == (200, True)
    assert ready.json["models"]["demo"]["replicas_ready"] == 1
