"""The data ROUTER for workers on other machines: CURVE, an allowlist, and each peer held to its own slots.

Each connection has an identity of its own (wire.dial), so the dispatcher is told through which one a
replica is reached now.
"""

from collections.abc import Callable, Sequence

import zmq

from mlxhost.frontend import logs
from mlxhost.frontend.zmqloop import LoopSocket
from mlxhost.wire import sockets
from mlxhost.wire.codec import Buffer
from mlxhost.wire.control import Allowed, RemoteListen
from mlxhost.wire.curve import KeyPair, belongs_to, bind_tcp, parse_endpoint, serve_curve, tcp_endpoint
from mlxhost.wire.zap import Allowlist, bind_zap, user_of


class RemoteListener:
    """Bound from the start; nobody is let in before `allow` says who."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        where: RemoteListen,
        on_message: Callable[[list[bytes], LoopSocket], None],
    ) -> None:
        """Raises ZMQError when the address cannot be bound."""
        self._allowlist = Allowlist()
        self._on_message = on_message
        zap = context.socket(zmq.REP)
        bind_zap(zap)
        self._zap = LoopSocket(zap, lambda request: self._zap.send(self._allowlist.answer(request)))
        self._zap.start()
        router = context.socket(zmq.ROUTER)
        sockets.configure(router)
        router.setsockopt(zmq.RCVHWM, sockets.OUT_HIGH_WATER_MARK)
        serve_curve(router, KeyPair(where.public_key, where.secret_key))
        port = bind_tcp(router, where.endpoint)
        self.endpoint = tcp_endpoint(where.advertise or parse_endpoint(where.endpoint)[0], port)
        self._socket = _UserSocket(router, self._on_frames)
        self._socket.start()

    def allow(self, allowed: Allowed) -> None:
        """Let these machines in, and no longer hear any other."""
        self._allowlist.replace(allowed.peers)

    def close(self) -> None:
        self._socket.close()
        self._zap.close()

    def _on_frames(self, frames: list[bytes], user: str) -> None:
        key = sockets.parse_identity(frames[0])
        if key is None or not belongs_to(key[0], user) or not self._allowlist.allows(user):
            self._allowlist.refused["slot"] += 1
            count = self._allowlist.refused["slot"]
            if count & (count - 1) == 0:  # a flood of them must not flood the log
                logs.warning("remote_refused", peer=user, identity=repr(frames[0]), count=count)
            return
        self._on_message(frames, self._socket)


class _UserSocket(LoopSocket):
    """Delivers messages with the name of the machine that sent them."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[bytes], str], None]) -> None:
        super().__init__(socket, lambda frames: on_message(frames, self._user))
        self._user = ""

    def _receive(self) -> list[bytes]:
        frames: Sequence[zmq.Frame] = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self._user = user_of(frames[-1])
        return [frame.bytes for frame in frames]


class Route:
    """How a replica is reached: which of this frontend's sockets, and under which identity."""

    __slots__ = ("identity", "socket")

    def __init__(self, socket: LoopSocket, identity: bytes) -> None:
        self.socket, self.identity = socket, identity

    def send(self, frames: Sequence[Buffer]) -> None:
        """See LoopSocket.send."""
        self.socket.send([self.identity, *frames])
