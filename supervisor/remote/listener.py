"""The fleet's control ROUTER for other machines: CURVE, allowlist, and a count of everyone turned away."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mlxhost.supervisor.errors import UserError
from mlxhost.wire.codec import decode, encode
from mlxhost.wire.curve import KeyPair, bind_tcp, parse_endpoint, serve_curve, tcp_endpoint
from mlxhost.wire.dial import event_of
from mlxhost.wire.errors import DecodeError
from mlxhost.wire.sockets import configure, new_context
from mlxhost.wire.zap import Allowlist, bind_zap, user_of

# The far end used another server key than ours, or does not speak CURVE at all.
_BAD_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class RemoteListener:
    """Typed messages, each with the name of the machine that its connection proved to be."""

    def __init__(self, endpoint: str, advertise: str, keys: KeyPair) -> None:
        """Raises UserError when `endpoint` (tcp://HOST:PORT) cannot be bound."""
        self.allowlist = Allowlist()
        self._context = new_context(zmq.asyncio.Context)
        self._zap = self._context.socket(zmq.REP)
        bind_zap(self._zap)
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket)
        serve_curve(self._socket, keys)
        self._peers: dict[int, bytes] = {}  # who speaks through which file descriptor
        self._monitor = self._socket.get_monitor_socket(_BAD_HANDSHAKES | zmq.EVENT_DISCONNECTED)
        try:
            port = bind_tcp(self._socket, endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UserError(
                f"--listen {endpoint}: {error.strerror}; HOST must be a numeric address of this machine, and "
                "PORT free (0 takes any free one)"
            ) from None
        self.endpoint = tcp_endpoint(advertise or parse_endpoint(endpoint)[0], port)

    def send(self, peer: bytes, message: msgspec.Struct) -> bool:
        """Whether `message` was queued; not when the peer is gone or does not read."""
        sent = asyncio.ensure_future(self._socket.send_multipart([peer, *encode(message)], flags=zmq.NOBLOCK))
        return sent.done() and sent.exception() is None

    async def receive(self) -> tuple[str, bytes, Any]:
        """The next (machine, peer identity, message). Raises DecodeError for one that is not understood."""
        frames: list[zmq.Frame] = await self._socket.recv_multipart(copy=False)
        peer, *rest = frames
        self._peers[int(peer.get(zmq.SRCFD))] = peer.bytes
        if not rest:
            raise DecodeError("a message without a body")
        message, _ = decode([frame.bytes for frame in rest])
        return user_of(rest[-1]), peer.bytes, message

    async def answer_zap(self) -> None:
        """Decide who is let in, for ever."""
        while True:
            request = await self._zap.recv_multipart()
            await self._zap.send_multipart(self.allowlist.answer(request))

    async def watch(self, on_disconnect: Callable[[bytes], None]) -> None:
        """Count failed handshakes, and tell which peers' connections ended, for ever."""
        while True:
            event, fd = event_of(await self._monitor.recv_multipart())
            if event & _BAD_HANDSHAKES:
                self.allowlist.refused["server_key"] += 1
            elif (peer := self._peers.pop(fd, None)) is not None:
                on_disconnect(peer)

    def close(self) -> None:
        """Send what is queued (within the socket's bounded linger) and close."""
        self._socket.disable_monitor()
        self._context.destroy()
