"""CURVE keys and the options of every tcp socket: encrypted, authenticated, and never silent when cut.

tcp:// is used with CURVE and an allowlist (wire.zap) only. Without the allowlist a CURVE server lets in any
client that knows its public key.
"""

import re
from typing import Any
from urllib.parse import urlsplit

import zmq
from msgspec import Struct

KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,19}")
# A name and what follows it in a slot; no name holds it.
HOST_MARK = ":"

_ZAP_DOMAIN = b"mlxhost"
# A cut that no FIN or RST tells of is noticed within the sum of the two, in milliseconds.
_PING_MS = 1_000
_PONG_MS = 4_000
# TCP connection and CURVE handshake each have this long before the attempt counts as failed.
CONNECT_S = 5.0


class KeyPair(Struct, frozen=True):
    """A CURVE key pair in Z85, 40 characters each."""

    public: str
    secret: str


def new_keys() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def host_slot(host: str, slot: str) -> str:
    """`slot` of the machine `host`, as the whole fleet knows it."""
    return f"{host}{HOST_MARK}{slot}"


def belongs_to(slot: str, host: str) -> bool:
    """Whether a process on `host` may speak for `slot`: one of its replicas, or the host itself."""
    return slot.startswith(host + HOST_MARK) or slot == supervisor_slot(host)


def supervisor_slot(host: str) -> str:
    """The slot of the supervisor of `host`."""
    return f"host/{host}"


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port) of `tcp://HOST:PORT`. Raises ValueError saying what is wrong."""
    parts = urlsplit(endpoint)
    try:
        port = parts.port
    except ValueError:
        port = None
    rest = parts.path or parts.query or parts.fragment or parts.username
    if parts.scheme != "tcp" or not parts.hostname or port is None or rest:
        raise ValueError(f"{endpoint!r} is not of the form tcp://HOST:PORT")
    return parts.hostname, port


def tcp_endpoint(host: str, port: int) -> str:
    """`tcp://HOST:PORT`, with the brackets that an IPv6 address needs."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def serve_curve(socket: "zmq.Socket[Any]", keys: KeyPair) -> None:
    """Options of a socket that is about to be bound to tcp."""
    _common(socket)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)


def dial_curve(socket: "zmq.Socket[Any]", keys: KeyPair, server_public: str) -> None:
    """Options of a socket that is about to connect to tcp. It connects once: see wire.dial."""
    _common(socket)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000))


def _common(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(CONNECT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
    socket.setsockopt(zmq.IPV6, 1)


def bind_tcp(socket: "zmq.Socket[Any]", endpoint: str) -> int:
    """Bind to `tcp://HOST:PORT` (port 0: any free one) and give the port back. Raises ZMQError."""
    socket.bind(endpoint)
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return parse_endpoint(bound.rstrip("\0"))[1]
