"""A TCP proxy that makes a network of it: latency, stalls as lost packets cause them, a cut, and a heal."""

import random
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from types import TracebackType

CHUNK = 65_536
TICK_S = 0.005


class Proxy:
    """Listens on `listen` and passes on to `target`.

    latency_s: one way. loss: the share of pieces held up for `retransmit_s`, as TCP does for a lost
    packet.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        target: tuple[str, int],
        *,
        latency_s: float = 0.0,
        loss: float = 0.0,
        retransmit_s: float = 0.2,
    ) -> None:
        self._target, self._latency_s, self._loss, self._retransmit_s = target, latency_s, loss, retransmit_s
        self._server = socket.create_server(listen)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._open: list[socket.socket] = []
        self._silent = threading.Event()
        self._refusing = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        """Pass nothing on any more, and tell no one: a cable that was pulled."""
        self._silent.set()

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        self._refusing.set()
        self._close_all()

    def heal(self) -> None:
        """Work again. What was connected during a silence is gone."""
        if self._silent.is_set():
            self._close_all()
        self._silent.clear()
        self._refusing.clear()

    def _close_all(self) -> None:
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._open.clear()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if self._refusing.is_set():
                near.close()
                continue
            try:
                far = socket.create_connection(self._target, 5)
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        late: deque[tuple[float, bytes]] = deque()
        source.settimeout(TICK_S)
        try:
            while not self._closed.is_set():
                try:
                    piece = source.recv(CHUNK)
                    if not piece:
                        break
                    hold = self._retransmit_s if random.random() < self._loss else 0.0
                    due = max(time.monotonic() + self._latency_s + hold, late[-1][0] if late else 0.0)
                    late.append((due, piece))
                except TimeoutError:
                    pass
                while late and late[0][0] <= time.monotonic() and not self._silent.is_set():
                    sink.sendall(late.popleft()[1])
        except OSError:
            pass
        finally:
            if not self._silent.is_set():
                for end in (source, sink):
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._server.close()
        self._close_all()
