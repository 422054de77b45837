"""The control ROUTER: bound by the supervisor, dialled by workers, frontends and `ctl` clients."""

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from mlxhost.wire.codec import decode, encode
from mlxhost.wire.sockets import bind_ipc, configure, new_context


class ControlSocket:
    """Typed messages by peer identity."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context = new_context(zmq.asyncio.Context)
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket)
        self._peers: dict[int, bytes] = {}  # who speaks through which file descriptor
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        bind_ipc(self._socket, endpoint)

    def send(self, peer: bytes, message: msgspec.Struct) -> bool:
        """Whether `message` was queued. It is dropped when the peer is gone or does not read: a stopped peer
        must not hold up the others."""
        sent = asyncio.ensure_future(self._socket.send_multipart([peer, *encode(message)], flags=zmq.NOBLOCK))
        return sent.done() and sent.exception() is None

    async def receive(self) -> tuple[bytes, Any]:
        """The next (peer identity, message). Raises DecodeError for one that is not understood."""
        whole = await self._socket.recv_multipart(copy=False)
        peer, *frames = (frame.bytes for frame in whole)
        self._peers[int(whole[0].get(zmq.SRCFD))] = peer
        message, _ = decode(frames)
        return peer, message

    async def disconnected(self) -> bytes:
        """The next peer whose connection is gone. (A ROUTER by itself shows nothing of that.)"""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if (peer := self._peers.pop(event["value"], None)) is not None:
                return peer

    def close(self) -> None:
        """Send what is queued (within the socket's bounded linger) and close."""
        self._socket.disable_monitor()
        self._context.destroy()
