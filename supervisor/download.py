"""Fetches one file over HTTP into a `.part` file that a later try continues."""

import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

OnBytes = Callable[[int, int], None]  # bytes so far, bytes in all (0: not known)

TIMEOUT_S = 30.0  # for a connection, and for each read
TRIES = 5  # in a row without a byte of progress
PAUSE_S = 0.5  # before the second try; grows with each
BLOCK = 1 << 18


class Unreachable(Exception):
    """The address cannot be read at all from here (refused, not found, not trusted); nothing came."""


class Interrupted(Exception):
    """The connection broke again and again; what came is kept in the part file."""


def download(url: str, part: Path, on_bytes: OnBytes) -> None:
    """Complete `part` from `url`, continuing after the bytes that it has.

    A connection that breaks is taken up again, up to TRIES times without progress. Raises Unreachable,
    Interrupted, or OSError when the disk does not take it.
    """
    failures = 0
    while True:
        before = _size(part)
        try:
            if _continue(url, part, on_bytes):
                return
            reason = "the connection was cut"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500:
                raise Unreachable(f"HTTP status {error.code}") from None
            reason = f"HTTP status {error.code}"
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise Unreachable(str(cause)) from None
            reason = str(cause) or type(cause).__name__
        failures = 0 if _size(part) > before else failures + 1
        if failures >= TRIES:
            raise (Interrupted if _size(part) else Unreachable)(reason)
        time.sleep(PAUSE_S * failures)


def _continue(url: str, part: Path, on_bytes: OnBytes) -> bool:
    """One connection's worth; whether the file is whole now."""
    have = _size(part)
    headers = {"User-Agent": "mlxhost", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S, context=_trust())
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise
        error.close()
        if _total(error.headers.get("Content-Range", "")) == have:
            return True
        part.unlink()  # longer than the file is: not its beginning
        return False
    with response:
        content_range = response.headers.get("Content-Range", "")
        if have and content_range.startswith(f"bytes {have}-"):
            total = _total(content_range)
        else:
            have, total = 0, _number(response.headers.get("Content-Length", ""))
        with part.open("r+b" if have else "wb") as out:
            out.seek(have)
            while block := _read(response):
                out.write(block)
                have += len(block)
                on_bytes(have, total)
    return not total or have == total


def _read(response: IO[bytes]) -> bytes:
    try:
        return response.read(BLOCK)
    except OSError as error:  # kept apart from what the disk may raise
        raise ConnectionError(error.strerror or str(error)) from None


def _total(content_range: str) -> int:
    """The length of the whole in "bytes 5-9/10" or "bytes */10"; 0 when it is not told."""
    return _number(content_range.rpartition("/")[2])


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _trust() -> ssl.SSLContext:
    """The system's certificates, or those that the user gave pip."""
    given = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    return ssl.create_default_context(cafile=given if given and os.path.isfile(given) else None)
