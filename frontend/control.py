"""The link to the supervisor: handshake, FLEET and STOP in, heartbeats out."""

import asyncio
import os
import secrets
from collections.abc import Callable
from typing import Any

import psutil
import zmq

from mlxhost.frontend import logs, operations
from mlxhost.frontend.zmqloop import LoopSocket
from mlxhost.wire import control, sockets, version
from mlxhost.wire.boot import Boot
from mlxhost.wire.codec import decode, encode
from mlxhost.wire.data import Load
from mlxhost.wire.errors import DecodeError, HandshakeRefused

HANDSHAKE_S = 30.0

OnNews = Callable[[control.News], None]


class ControlLink:
    """A DEALER on the supervisor's control ROUTER."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", boot: Boot) -> None:
        self._boot = boot
        self._process = psutil.Process()
        self._init: asyncio.Future[control.Init] = asyncio.get_running_loop().create_future()
        self.on_fleet: Callable[[control.Fleet], None] | None = None
        self.on_stop: Callable[[float], None] | None = None  # told the deadline in seconds
        self._early: list[control.Fleet | control.Stop] = []
        self._calls: dict[str, tuple[asyncio.Future[control.Reply], OnNews]] = {}
        self._on_keys: Callable[[control.Keys], None] | None = None
        self._allowed = control.Allowed([])
        self._on_allowed: Callable[[control.Allowed], None] | None = None
        socket = context.socket(zmq.DEALER)
        sockets.configure(socket)
        socket.setsockopt(zmq.IDENTITY, sockets.identity(boot.slot, boot.epoch))
        socket.connect(boot.control)
        self._socket = LoopSocket(socket, self._on_message)
        self._socket.start()

    async def hello(self, data_endpoint: str) -> control.Init:
        """Introduce this process. Raises HandshakeRefused, or TimeoutError after HANDSHAKE_S."""
        self._socket.send(
            encode(
                control.Hello(
                    protocol=(version.PROTOCOL_MAJOR, version.PROTOCOL_MINOR),
                    schema=version.SCHEMA,
                    role="frontend",
                    slot=self._boot.slot,
                    epoch=self._boot.epoch,
                    pid=os.getpid(),
                    token=self._boot.token,
                    build=version.BUILD,
                    endpoint=data_endpoint,
                )
            )
        )
        return await asyncio.wait_for(self._init, HANDSHAKE_S)

    def serve(
        self,
        on_fleet: Callable[[control.Fleet], None],
        on_stop: Callable[[float], None],
        url: str,
        remote_endpoint: str = "",
    ) -> None:
        """Say that HTTP is up, and pass on what comes (and came) from the supervisor."""
        self.on_fleet, self.on_stop = on_fleet, on_stop
        self._socket.send(encode(control.FrontendReady(url, remote_endpoint)))
        early, self._early = self._early, []
        for message in early:
            self._pass_on(message)

    def watch_keys(self, on_keys: Callable[[control.Keys], None]) -> None:
        """Tell `on_keys` of the API keys at each change."""
        self._on_keys = on_keys

    def watch_allowed(self, on_allowed: Callable[[control.Allowed], None]) -> None:
        """Tell `on_allowed` which machines may connect, now and at each change."""
        self._on_allowed = on_allowed
        on_allowed(self._allowed)

    async def call(
        self,
        op: str,
        args: dict[str, Any],
        deadline_s: float,
        *,
        target: str = "",
        grace_s: float = 0.0,
        on_news: OnNews = lambda _: None,
    ) -> control.Reply:
        """Have the supervisor do something. News on the way go to `on_news`. The answer is waited for
        `grace_s` longer than the supervisor waits itself. Raises TimeoutError."""
        call_id = secrets.token_hex(8)
        answer = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer, on_news
        try:
            self._send(control.Ctl(call_id, op, target, args, deadline_s))
            return await asyncio.wait_for(answer, deadline_s + grace_s)
        finally:
            del self._calls[call_id]

    def heartbeat(self, in_flight: int) -> None:
        """Report the number of requests being answered."""
        beat = control.Heartbeat(
            busy=in_flight > 0,
            load=Load(running=in_flight),
            resident_bytes=self._resident_bytes(),
            in_flight=in_flight,
        )
        self._send(beat)

    def close(self) -> None:
        self._socket.close()

    def _resident_bytes(self) -> int:
        memory = self._process.memory_full_info()
        return int(getattr(memory, "pss", memory.uss))  # PSS exists on Linux only

    def _send(self, message: control.Heartbeat | control.Reply | control.Ctl) -> None:
        try:
            self._socket.send(encode(message))
        except zmq.Again:
            logs.warning("control_link_full", message=type(message).__name__)

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            message, _ = decode(frames)
        except DecodeError as error:
            logs.warning("control_message_dropped", reason=error)
            return
        match message:
            case control.Init():
                if not self._init.done():
                    self._init.set_result(message)
            case control.Refused():
                if not self._init.done():
                    self._init.set_exception(HandshakeRefused(message.code, message.message))
            case control.Fleet() | control.Stop():
                self._pass_on(message)
            case control.Allowed():
                self._allowed = message
                if self._on_allowed is not None:
                    self._on_allowed(message)
            case control.Reply():
                answer, _ = self._calls.get(message.call_id, (None, None))
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case control.News():
                _, tell = self._calls.get(message.call_id, (None, None))
                if tell is not None:
                    tell(message)
            case control.Keys():
                if self._on_keys is not None:
                    self._on_keys(message)
            case control.Ctl():
                self._send(operations.answer(message))
            case _:
                logs.warning("control_message_dropped", reason=f"unexpected {type(message).__name__}")

    def _pass_on(self, message: control.Fleet | control.Stop) -> None:
        if self.on_fleet is None or self.on_stop is None:
            self._early.append(message)
        elif isinstance(message, control.Fleet):
            self.on_fleet(message)
        else:
            self.on_stop(message.deadline_s)
