"""A client of a running fleet's control socket: finds the fleet, makes one call, waits with a deadline."""

import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import zmq

from mlxhost.supervisor.errors import NoFleet, OperationFailed
from mlxhost.supervisor.rundir import Card, is_alive, running_fleets
from mlxhost.wire.codec import decode, encode
from mlxhost.wire.control import Ctl, News, Reply
from mlxhost.wire.errors import DecodeError
from mlxhost.wire.sockets import configure, new_context

# The supervisor keeps the deadline itself; this much longer, and it is not answering at all.
GRACE_SECONDS = 3.0
ALIVE_SECONDS = 0.5  # how often to look whether the supervisor still lives


def find_fleet(wanted: str = "") -> Card:
    """The running fleet named `wanted` (its name or port), or the only one. Raises NoFleet."""
    fleets = running_fleets()
    listed = ", ".join(f"{f.name} ({f.url})" for f in fleets)
    if not fleets:
        raise NoFleet("no fleet is running; `mlxhost up --models demo` starts one")
    if wanted:
        for fleet in fleets:
            if wanted in (fleet.name, str(urlsplit(fleet.url).port), fleet.url):
                return fleet
        raise NoFleet(f"no fleet {wanted!r} is running; there is {listed}")
    if len(fleets) > 1:
        raise NoFleet(f"{len(fleets)} fleets are running; choose one with --fleet NAME or PORT: {listed}")
    return fleets[0]


def call(
    fleet: Card,
    op: str,
    *,
    target: str = "",
    args: dict[str, Any] | None = None,
    deadline_s: float = 10.0,
    on_news: Callable[[News], None] = lambda _: None,
) -> Reply:
    """The fleet's answer. Raises OperationFailed when none comes."""
    context = new_context(zmq.Context)
    socket = context.socket(zmq.DEALER)
    configure(socket)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, b"ctl-" + secrets.token_hex(8).encode())
    try:
        socket.connect(fleet.control)
        call_id = secrets.token_hex(8)
        socket.send_multipart(encode(Ctl(call_id, op, target, args or {}, deadline_s)))
        end = time.monotonic() + deadline_s + GRACE_SECONDS
        while time.monotonic() < end:
            if not socket.poll(1000 * ALIVE_SECONDS):
                if not is_alive(fleet.name):
                    raise OperationFailed(f"the fleet {fleet.name} ended before it answered")
                continue
            message = _decode(socket.recv_multipart())
            if isinstance(message, News) and message.call_id == call_id:
                on_news(message)
            elif isinstance(message, Reply) and message.call_id == call_id:
                return message
        raise OperationFailed(
            f"the fleet {fleet.name} (pid {fleet.pid}) did not answer within "
            f"{deadline_s + GRACE_SECONDS:.0f} s"
        )
    finally:
        context.destroy()


def _decode(frames: list[bytes]) -> Any:
    try:
        return decode(frames)[0]
    except DecodeError as error:
        raise OperationFailed(
            f"the fleet's answer was not understood ({error}); is it another version of mlxhost?"
        ) from None
