"""The allowlist of CURVE clients: answers libzmq's ZAP requests (RFC 27) and counts whom it refused.

A ZAP handler is one REP socket a context, at an inproc address. The name of an allowed client becomes its
connection's User-Id, which every message received from it carries; what a name may speak for is then a
comparison (wire.curve.belongs_to). A handshake is asked about once: a client whose key is withdrawn later
stays connected, so `allows` must be asked for its messages, too.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import zmq
from zmq.utils import z85

from mlxhost.wire.control import AllowedPeer

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_CURVE_REQUEST_FRAMES = 7


class Allowlist:
    """Who may connect. `refused` counts refusals by reason."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # public key (Z85) -> name
        self.refused: Counter[str] = Counter()

    def replace(self, peers: Iterable[AllowedPeer]) -> None:
        """Allow exactly these from now on."""
        self._names = {peer.public_key: peer.name for peer in peers}

    def allows(self, name: str) -> bool:
        """Whether a client of that name is (still) allowed."""
        return name in self._names.values()

    def answer(self, request: Sequence[bytes]) -> list[bytes]:
        """The reply to one ZAP request; anything but an allowed CURVE key is refused."""
        call_id = request[1] if len(request) > 1 else b""
        if len(request) != _CURVE_REQUEST_FRAMES or request[0] != _VERSION or request[5] != b"CURVE":
            self.refused["not_curve"] += 1
            return [_VERSION, call_id, b"400", b"CURVE only", b"", b""]
        name = self._names.get(z85.encode(request[6]).decode())
        if name is None:
            self.refused["key"] += 1
            return [_VERSION, call_id, b"400", b"this key is not allowed", b"", b""]
        return [_VERSION, call_id, b"200", b"OK", name.encode(), b""]


def bind_zap(socket: "zmq.Socket[Any]") -> None:
    """Make `socket` (a REP) its context's ZAP handler; before any tcp socket of the context is bound."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(_ENDPOINT)


def user_of(frame: zmq.Frame) -> str:
    """The allowlist's name for whoever sent this frame, empty when it did not say."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
