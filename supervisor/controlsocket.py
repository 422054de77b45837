"""The control ROUTER: bound by the supervisor, dialled by workers, frontends and `ctl` clients."""

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mlxhost.wire.codec import decode, encode
from mlxhost.wire.sockets import bind_ipc, configure, new_context


class ControlSocket:
    """Typed messages by peer identity."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context = new_context(zmq.asyncio.Context)
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket)
        bind_ipc(self._socket, endpoint)

    def send(self, peer: bytes, message: msgspec.Struct) -> bool:
        """Whether `message` was queued. It is dropped when the peer is gone or does not read: a stopped peer
        must not hold up the others."""
        sent = asyncio.ensure_future(self._socket.send_multipart([peer, *encode(message)], flags=zmq.NOBLOCK))
        return sent.done() and sent.exception() is None

    async def receive(self) -> tuple[bytes, Any]:
        """The next (peer identity, message). Raises DecodeError for one that is not understood."""
        peer, *frames = await self._socket.recv_multipart()
        message, _ = decode(frames)
        return peer, message

    def close(self) -> None:
        """Send what is queued (within the socket's bounded linger) and close."""
        self._context.destroy()
