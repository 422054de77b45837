"""A zmq socket driven by the running asyncio loop: each message goes to a callback as it comes.

zmq.asyncio builds a future for each receive; at thousands of messages a second a plain callback on the
socket's file descriptor costs several times less.
"""

import asyncio
from collections.abc import Callable, Sequence

import zmq

from mlxhost.frontend import logs
from mlxhost.wire.codec import Buffer

BURST = 64  # messages taken in one go before other callbacks get their turn


class LoopSocket:
    """Owns a bound or connected socket from `start` to `close`."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._scheduled = False

    def start(self) -> None:
        """Begin to deliver messages."""
        self._loop.add_reader(self._socket.FD, self._drain)
        self._schedule()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send without waiting. Raises zmq.Again when the peer's queue is full, and a ZMQError with
        errno EHOSTUNREACH when a ROUTER knows no such peer."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        # The descriptor is edge-triggered and sending may consume its edge, so look again.
        self._schedule()

    def close(self) -> None:
        """Stop delivering and close; what was sent still goes out within the socket's LINGER."""
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()

    def _receive(self) -> list[bytes]:
        return self._socket.recv_multipart(zmq.NOBLOCK)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self._socket.closed:
            return
        for _ in range(BURST):
            try:
                frames = self._receive()
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except Exception:  # one message must not keep those behind it from being read
                logs.exception("message_handler_failed")
        self._schedule()
