"""A package index on loopback that serves one small made wheel, and can cut, refuse and forget."""

import base64
import hashlib
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from random import Random

NAME, VERSION = "tiny-model", "1.0"
MEMBER = "tiny_model/tiny.gguf"
WHEEL = f"tiny_model-{VERSION}-py3-none-any.whl"


def made_wheel(content: bytes, member: str = MEMBER) -> bytes:
    """A valid wheel that holds `content` and would fail loudly if it were installed with dependencies."""
    info = f"tiny_model-{VERSION}.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nRequires-Dist: not-on-this-index\n"
        ).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return out.getvalue()


class Index:
    """What the server serves and how it misbehaves; `sent` counts bytes of the wheel that went out."""

    def __init__(self) -> None:
        self.content = Random(0).randbytes(3_000_000)
        self.wheel = made_wheel(self.content)
        self.url = ""
        self.sent = 0
        self.page_requests = 0
        self.wheel_requests = 0
        self.cut_at: int | None = None  # absolute offset that no connection gets past
        self.cut_each: int | None = None  # bytes that one connection gives
        self.ranges = True
        self.hash_on_page = True
        self.forbidden_agent = ""
        self.told_sha256 = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def page(self) -> bytes:
        told = self.told_sha256 or hashlib.sha256(self.wheel).hexdigest()
        fragment = f"#sha256={told}" if self.hash_on_page else ""
        return f'<!DOCTYPE html><a href="/files/{WHEEL}{fragment}">{WHEEL}</a>'.encode()


@contextmanager
def package_index() -> Iterator[Index]:
    """The index, serving; its simple page is at `url`."""
    index = Index()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            self.close_connection = True
            if self.path.startswith("/simple/"):
                index.page_requests += 1
                known = self.path.rstrip("/").endswith(f"/{NAME}")
                self.answer(
                    200 if known else 404, index.page() if known else b"", {"Content-Type": "text/html"}
                )
            elif self.path.endswith(WHEEL):
                self.give_wheel()
            else:
                self.answer(404, b"", {})

        def give_wheel(self) -> None:
            if index.forbidden_agent and index.forbidden_agent in self.headers.get("User-Agent", ""):
                self.answer(403, b"", {})
                return
            total = len(index.wheel)
            wanted = self.headers.get("Range") if index.ranges else None
            first, last = 0, total - 1
            if wanted:
                one, two = wanted.removeprefix("bytes=").split("-")
                if not one:  # the last so many bytes
                    first = max(0, total - int(two))
                else:
                    first, last = int(one), min(last, int(two)) if two else last
                if first >= total:
                    self.answer(416, b"", {"Content-Range": f"bytes */{total}"})
                    return
            headers = {"Accept-Ranges": "bytes"} if index.ranges else {}
            if wanted:
                headers["Content-Range"] = f"bytes {first}-{last}/{total}"
            index.wheel_requests += self.command == "GET"
            self.answer(206 if wanted else 200, index.wheel[first : last + 1], headers, first)

        def answer(self, status: int, body: bytes, headers: dict[str, str], offset: int = -1) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if offset >= 0:
                if index.cut_at is not None:
                    body = body[: max(0, index.cut_at - offset)]
                if index.cut_each is not None:
                    body = body[: index.cut_each]
            for start in range(0, len(body), 65536):
                block = body[start : start + 65536]
                try:
                    self.wfile.write(block)
                except OSError:
                    return  # the client went away
                if offset >= 0:
                    index.sent += len(block)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
