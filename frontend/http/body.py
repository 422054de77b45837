"""Reading a JSON body into a typed request, with every way that can go wrong as a typed error."""

import asyncio
import re
import zlib
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_exceptions import HTTPRequestEntityTooLarge

from mlxhost.frontend.errors import BadRequest, BodyTimeout, BodyTooLarge, UnsupportedEncoding

T = TypeVar("T")

BODY_TIMEOUT_S = 120.0
INLINE_BYTES = 256 * 1024  # larger bodies are decoded in a thread
_COMPRESSED = frozenset({"gzip", "deflate"})
_ENCODINGS = frozenset({"", "identity"}) | _COMPRESSED
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


async def read_body(http: web.Request, kind: type[T], max_bytes: int) -> T:
    """The body as a `kind`. The Content-Type is not looked at.

    Raises BadRequest, BodyTooLarge, BodyTimeout or UnsupportedEncoding.
    """
    encoding = http.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        raise UnsupportedEncoding(encoding)
    data = await _read(http, max_bytes)
    if encoding in _COMPRESSED:
        data = await asyncio.to_thread(inflate, data, max_bytes)
    if len(data) <= INLINE_BYTES:
        return decode_body(data, kind)
    return await asyncio.to_thread(decode_body, data, kind)


def inflate(data: bytes, max_bytes: int) -> bytes:
    """Undo gzip or deflate, never making more than `max_bytes`. Raises BadRequest or BodyTooLarge."""
    # 32 + 15: gzip and zlib headers are both recognised. Some clients' "deflate" has no header at all.
    window = 47 if data[:1] in (b"\x1f", b"\x78") else -15
    inflater = zlib.decompressobj(window)
    try:
        plain = inflater.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"the request body cannot be decompressed: {error}") from None
    if len(plain) > max_bytes:
        raise BodyTooLarge(max_bytes)
    if not inflater.eof:
        raise BadRequest("the request body cannot be decompressed: it ends too early")
    return plain


def decode_body(data: bytes, kind: type[T]) -> T:
    """JSON to a typed request. Raises BadRequest naming the field."""
    if not data.strip():
        raise BadRequest("the request body is empty; it must be a JSON object")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None


async def _read(http: web.Request, max_bytes: int) -> bytes:
    if (http.content_length or 0) > max_bytes:
        raise BodyTooLarge(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await http.read()
    except TimeoutError:
        raise BodyTimeout(BODY_TIMEOUT_S) from None
    except HTTPRequestEntityTooLarge:
        raise BodyTooLarge(max_bytes) from None
    except (HttpProcessingError, web.RequestPayloadError) as error:
        raise BadRequest(f"the request body cannot be read: {error}") from None


def _bad_field(reason: str) -> BadRequest:
    """msgspec says "Expected `int`, got `str` - at `$.n`"; clients want `n` by itself as well."""
    missing = _MISSING.search(reason)
    place = _PATH.search(reason)
    path = place["path"] if place else ""
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
    what = _PATH.sub("", reason).replace("`", "")
    message = f"`{path}`: {what}" if path else f"the request body is wrong: {what}"
    return BadRequest(message, param=path or None)
