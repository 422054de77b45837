"""The HTTP listening socket. The supervisor binds it and frontends inherit it, so that a frontend's
restart loses no connection attempt and a taken port is one clear message."""

import errno
import ipaddress
import socket
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from mlxhost.supervisor.errors import PortError, UserError
from mlxhost.supervisor.rundir import Card, running_fleets
from mlxhost.supervisor.settings import Settings

BACKLOG = 1024


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address; port 0 takes any free one. Raises PortError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, ValueError):
        raise PortError(f"--host {host} is not an address or name of this machine") from None
    # A name such as localhost may mean both; clients try IPv4 too, and only one socket is inherited.
    family, kind, protocol, _, address = sorted(addresses, key=lambda a: a[0] != socket.AF_INET)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise PortError(explain(error, host, port, running_fleets())) from None
    return bound


def listen(bound: socket.socket) -> None:
    """Let clients connect. Raises PortError: two sockets may be bound to a port that neither listens on."""
    host, port = bound.getsockname()[:2]
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise PortError(explain(error, host, port, running_fleets())) from None


def check_reach(bound: socket.socket, settings: Settings) -> None:
    """Raises UserError for an address that other machines reach without an API key."""
    host = bound.getsockname()[0].partition("%")[0]
    if settings.keys or settings.without_keys or ipaddress.ip_address(host).is_loopback:
        return
    raise UserError(
        f"--host {settings.host} can be reached by other machines, and there is no API key: add a "
        "[keys.NAME] table to mlxhost.toml (docs/configuration.md), or let everyone in with --without-keys"
    )


def share(listening: socket.socket, count: int) -> list[socket.socket]:
    """A listening socket for each of `count` frontends, all on one port; `listening` is the first.

    On Linux the kernel deals connections out evenly among them (a socket that several processes accept from
    goes mostly to whoever wakes up first). Elsewhere the option exists but does not share out, so all get the
    one socket. It is set only now, so that another program, or another fleet, could not take the port
    along with us. Raises PortError.
    """
    if sys.platform != "linux":
        return [listening] * count
    sockets = [listening]
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        while len(sockets) < count:
            other = socket.socket(listening.family, listening.type, listening.proto)
            sockets.append(other)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(listening.getsockname())
            other.setblocking(False)
            other.listen(BACKLOG)
    except OSError as error:
        for other in sockets[1:]:
            other.close()
        host, port = listening.getsockname()[:2]
        raise PortError(f"cannot listen on {host} port {port} {count} times: {error.strerror}") from None
    return sockets


def url_of(bound: socket.socket) -> str:
    """Where a client on this machine reaches the socket."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def explain(error: OSError, host: str, port: int, fleets: Sequence[Card]) -> str:
    """Why `host`:`port` cannot be listened on, and what to do."""
    if error.errno == errno.EADDRINUSE:
        for fleet in fleets:
            if urlsplit(fleet.url).port == port:
                return (
                    f"port {port} is in use by the mlxhost fleet {fleet.name} (pid {fleet.pid}); "
                    f"stop that one with `kill {fleet.pid}`, or take another port with --port"
                )
        return f"port {port} on {host} is in use by another program; take another with --port (0: any free)"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} may not be bound by this user; take one from 1024 up with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine"
    return f"cannot listen on {host} port {port}: {error.strerror}"
