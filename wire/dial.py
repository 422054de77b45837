"""A DEALER that dials one tcp endpoint through CURVE, knows how it stands, and dials anew after each end.

libzmq's own reconnecting says nothing: a wrong server key looks like an endpoint that is slow to answer, and
a connection that was cut and renewed looks as if nothing had been lost. Here every connection is a socket of
its own with an identity of its own, its monitor says how it went, and the owner is told `up` and `down`.

No thread and no event loop: the owner polls `socket` (while up) and `monitor`, and calls `pump`.
"""

import random
import struct
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import zmq

from mlxhost.wire import sockets
from mlxhost.wire.curve import CONNECT_S, KeyPair, dial_curve

REDIAL_S = 0.5
REDIAL_MAX_S = 5.0

_FAILED = {
    zmq.EVENT_CLOSED: "unreachable",
    zmq.EVENT_CONNECT_RETRIED: "unreachable",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "protocol",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "server_key",
    zmq.EVENT_DISCONNECTED: "cut",
}


def event_of(message: list[bytes]) -> tuple[int, int]:
    """(event, value) of a monitor's message. (zmq.utils.monitor would import asyncio into a worker.)"""
    event, value = struct.unpack("=Hi", message[0])
    return event, value


class Change(StrEnum):
    """What `pump` found."""

    NOTHING = "nothing"
    UP = "up"
    DOWN = "down"  # a connection that was up has ended
    FAILED = "failed"  # an attempt came to nothing


class Dialer:
    """`code` and `reason` say why the last connection or attempt ended."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        endpoint: str,
        keys: KeyPair,
        server_public: str,
        identity: Callable[[int], bytes],
        *,
        high_water_mark: int = sockets.HIGH_WATER_MARK,
    ) -> None:
        """`identity` makes the identity of a connection from its number."""
        self.endpoint = endpoint
        self.code = self.reason = ""
        self.up = False
        self._context, self._keys, self._server_public = context, keys, server_public
        self._identity, self._high_water_mark = identity, high_water_mark
        self._failures = 0
        self._dial()

    def _dial(self) -> None:
        # Milliseconds, so that a later process of the same slot does not repeat an earlier one's numbers.
        self.connection = time.time_ns() // 1_000_000
        self._deadline = time.monotonic() + 2 * CONNECT_S
        self._redial_at = 0.0
        self._step = "unreachable"
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        sockets.configure(self.socket)
        self.socket.setsockopt(zmq.SNDHWM, self._high_water_mark)
        self.socket.setsockopt(zmq.IDENTITY, self._identity(self.connection))
        dial_curve(self.socket, self._keys, self._server_public)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(
            sum({zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, *_FAILED})
        )
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._end("unreachable", str(error))

    @property
    def due_s(self) -> float:
        """Seconds until `pump` has something to do even if nothing is heard."""
        if self.up:
            return CONNECT_S
        return max(0.0, (self._redial_at or self._deadline) - time.monotonic())

    def pump(self) -> Change:
        """Read the monitor and mind the deadlines; call again until NOTHING."""
        if self._redial_at:
            if time.monotonic() >= self._redial_at:
                self._dial()
            return Change.NOTHING
        while self.monitor.poll(0):
            event, _ = event_of(self.monitor.recv_multipart())
            if event == zmq.EVENT_CONNECTED:
                self._step = "server_key"
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.up, self.code, self.reason, self._failures = True, "", "", 0
                return Change.UP
            elif code := _FAILED.get(zmq.Event(event)):
                was_up = self.up
                self._end(self._step if code == "cut" and not was_up else code)
                return Change.DOWN if was_up else Change.FAILED
        if not self.up and time.monotonic() >= self._deadline:
            self._end(self._step)
            return Change.FAILED
        return Change.NOTHING

    def drop(self, code: str, reason: str) -> None:
        """End this connection for a reason of the owner's, and dial anew later."""
        self._end(code, reason)

    def _end(self, code: str, reason: str = "") -> None:
        self.code, self.reason = code, reason or explain(code, self.endpoint)
        self.up = False
        self._close()
        wait = min(REDIAL_MAX_S, REDIAL_S * 2 ** min(self._failures, 8)) * random.uniform(1.0, 1.25)
        self._failures += 1
        self._redial_at = time.monotonic() + wait

    def _close(self, linger_ms: int = 0) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.socket.close(linger=linger_ms)
            self.monitor.close(linger=0)

    def close(self, linger_ms: int = 0) -> None:
        """For good."""
        self.up = False
        self._close(linger_ms)


def explain(code: str, endpoint: str) -> str:
    """What a `Dialer.code` means to a person."""
    return {
        "unreachable": f"nothing answers at {endpoint}",
        "key": f"{endpoint} does not let this machine's key in: it was never made there, or was revoked",
        "server_key": f"{endpoint} answers, but not with the key that this bundle names: another fleet, or "
        "no fleet at all",
        "protocol": f"{endpoint} answers, but is not an mlxhost fleet",
        "cut": f"the connection to {endpoint} was cut",
    }[code]
