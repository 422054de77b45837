"""The I/O thread: the worker's sockets, heartbeats and lifeline. A slow peer never blocks the engine.

Knows the wire and the ledger of open rows; nothing of MLX. The engine's messages come in through `send`
(any thread), what the wire brings goes to `inbox`.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import zmq
from msgspec import Struct

from mlxhost.wire import control, data, sockets, version
from mlxhost.wire.boot import LIFELINE_FD, Boot
from mlxhost.wire.codec import Buffer, decode, encode
from mlxhost.wire.curve import KeyPair
from mlxhost.wire.dial import Change, Dialer
from mlxhost.wire.errors import DecodeError
from mlxhost.worker import backend
from mlxhost.worker.errors import RowError
from mlxhost.worker.events import Aborted, Arrived, Event, FrontendGone, Shutdown, Status
from mlxhost.worker.ledger import Ledger
from mlxhost.worker.linkcalls import LinkCalls
from mlxhost.worker.modes import Mode
from mlxhost.worker.peer import Peer, RemotePeer

log = logging.getLogger(__name__)

# A frontend that lags this many messages gets merged ones from then on.
_DATA_HIGH_WATER_MARK = 64
_CLOSE_S = 1.0


class Link(threading.Thread):
    """Runs until `close`; ends the process at once when the supervisor is gone."""

    def __init__(self, boot: Boot) -> None:
        super().__init__(name="link", daemon=True)
        self.inbox: SimpleQueue[Event] = SimpleQueue()
        self.status = Status()
        self._boot = boot
        self._outbox: deque[tuple[str | None, Struct]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._woken = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._dealer(boot.control, sockets.HIGH_WATER_MARK)
        self._peers: dict[str, Peer] = {}
        self._ledger = Ledger()
        self._limit = 0
        self._refusing: tuple[str, str] | None = (data.REJECT_DRAINING, "the model is still loading")
        self._heartbeat_s = 1.0
        self._next_beat = 0.0
        self._was_busy = False
        self._was_mode = Mode.RUNNING
        self._ticked_at = time.monotonic()
        self._calls = LinkCalls(
            self._tell,
            lambda: self.status,
            lambda: self.status.load(tokens_per_s=self._rate()),
            lambda: time.monotonic() - self._ticked_at,
        )
        self._resident_bytes = 0
        self._counted = (time.monotonic(), 0)
        self._dropped = 0  # messages that could not be decoded
        self._closing = False

    # Any thread

    def send(self, frontend: str | None, message: Struct) -> None:
        """Hand over a message for a frontend's endpoint, or for the supervisor (None). Never blocks."""
        self._outbox.append((frontend, message))
        self._wake()

    def publish(self, status: Status) -> None:
        """Replace the figures that heartbeats carry."""
        changed = status.busy != self.status.busy or status.mode != self.status.mode
        if status.tick != self.status.tick:
            self._ticked_at = time.monotonic()
        self.status = status
        if changed:
            self._wake()

    def open_for(self, rows: int) -> None:
        """Let ADDs in, up to `rows` open at once."""
        self._limit = rows
        self._refusing = None

    def close(self, *, failure: str = "") -> None:
        """Send what is left and stop. Open rows end with ABORT, unless there was a `failure`: then the end of
        this process ends them, and frontends may start them anew elsewhere."""
        self._refusing = (data.REJECT_DRAINING, failure or "the worker is shutting down")
        self.send(None, _Close(bool(failure)))
        self.join(_CLOSE_S * 2)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._wake_write.send(b"x")

    # The I/O thread

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # without this thread the process could neither serve nor say so
            log.critical("the I/O thread failed: %s", error, exc_info=error)
            os._exit(1)

    def _run(self) -> None:
        self._tell(self._hello())
        while not self._closing:
            self._wait()
            self._woken = False
            self._send_outbox()
            self._calls.tick()
            self._beat()
        self._end()

    def _tell(self, message: Struct) -> None:
        """To the supervisor, now."""
        self._control.send_multipart(encode(message))

    def _hello(self) -> control.Hello:
        boot = self._boot
        return control.Hello(
            protocol=(version.PROTOCOL_MAJOR, version.PROTOCOL_MINOR),
            schema=version.SCHEMA,
            role="worker",
            slot=boot.slot,
            epoch=boot.epoch,
            pid=os.getpid(),
            token=boot.token,
            build=version.BUILD,
            model=boot.model,
        )

    def _wait(self) -> None:
        """Until something arrives, there is something to send, or the next heartbeat is due."""
        poller = zmq.Poller()
        poller.register(LIFELINE_FD, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._control, zmq.POLLIN)
        timeout = max(0.0, min(self._next_beat, self._calls.next_due) - time.monotonic())
        for peer in self._peers.values():
            if peer.socket is not None:
                poller.register(peer.socket, zmq.POLLIN | (zmq.POLLOUT if peer.lagging else 0))
            if isinstance(peer, RemotePeer):
                timeout = min(timeout, peer.due_s)
                if peer.monitor is not None:
                    poller.register(peer.monitor, zmq.POLLIN)
        ready: dict[Any, int] = dict(poller.poll(int(timeout * 1000) + 1))
        if LIFELINE_FD in ready and not os.read(LIFELINE_FD, 4096):
            os._exit(0)  # the supervisor is gone: nobody reads us
        if self._wake_read.fileno() in ready:
            self._wake_read.recv(4096)
        if self._control in ready:
            for frames in _received(self._control):
                self._on_control(frames)
        for peer in list(self._peers.values()):
            dealer = peer.socket
            events = ready.get(dealer, 0)
            if events & zmq.POLLOUT:
                peer.flush()
            if dealer is not None and events & zmq.POLLIN:
                for frames in _received(dealer):
                    self._on_data(peer, frames)
            if isinstance(peer, RemotePeer):
                self._watch(peer)

    def _on_control(self, frames: Sequence[Buffer]) -> None:
        try:
            message, _ = decode(frames)
        except DecodeError as error:
            self._drop("the supervisor", error)
            return
        match message:
            case control.Fleet():
                self._on_fleet(message)
            case control.Init():
                self._heartbeat_s = message.heartbeat_s
                self.inbox.put(message)
            case control.Stop():
                self._refusing = (data.REJECT_DRAINING, "the worker is shutting down")
                self.inbox.put(Shutdown(message.deadline_s))
            case control.Ctl():
                if message.op == "health":
                    self._next_beat = 0.0  # with what its frontends have sent until now
                if not self._calls.call(message):
                    self.inbox.put(message)
            case control.Refused() | control.Lease():
                self.inbox.put(message)

    def _on_fleet(self, fleet: control.Fleet) -> None:
        wanted = {frontend.endpoint for frontend in fleet.frontends}
        for endpoint in self._peers.keys() - wanted:
            self._peers.pop(endpoint).close()
            self._forget_rows(endpoint)
        for frontend in fleet.frontends:
            if frontend.endpoint in self._peers:
                continue
            if frontend.public_key:
                self._peers[frontend.endpoint] = self._remote(frontend)
            else:
                dealer = self._dealer(frontend.endpoint, _DATA_HIGH_WATER_MARK)
                self._peers[frontend.endpoint] = Peer(frontend.endpoint, dealer)
                self._announce(self._peers[frontend.endpoint])

    def _forget_rows(self, endpoint: str) -> None:
        """Nobody reads this frontend's rows any more."""
        self._ledger.close_frontend(endpoint)
        self.inbox.put(FrontendGone(endpoint))

    def _remote(self, frontend: control.FleetFrontend) -> RemotePeer:
        boot = self._boot
        return RemotePeer(
            Dialer(
                self._context,
                frontend.endpoint,
                KeyPair(boot.curve_public, boot.curve_secret),
                frontend.public_key,
                lambda connection: sockets.identity(boot.slot, boot.epoch, connection),
                high_water_mark=_DATA_HIGH_WATER_MARK,
            )
        )

    def _watch(self, peer: RemotePeer) -> None:
        """Follow the connection to a frontend on another machine."""
        while (change := peer.pump()) is not Change.NOTHING:
            if change is Change.UP:
                peer.told = ""
                log.info("connected to the frontend at %s", peer.endpoint)
                self._announce(peer)
                continue
            if peer.reason != peer.told:
                peer.told = peer.reason  # once, not at every attempt
                log.warning("no connection to the frontend: %s", peer.reason)
            if change is Change.DOWN:
                self._forget_rows(peer.endpoint)

    def _drop(self, sender: str, error: DecodeError) -> None:
        self._dropped += 1
        if self._dropped & (self._dropped - 1) == 0:  # the 1st, 2nd, 4th...: a flood must not flood the log
            log.warning("dropped message %d, from %s: %s", self._dropped, sender, error)

    def _on_data(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        try:
            message, binary = decode(frames)
        except DecodeError as error:
            self._drop(peer.endpoint, error)
            if error.tag == "add":
                peer.send(data.Reject(error.handle, data.REJECT_BAD_MESSAGE, str(error)))
            return
        if isinstance(message, data.Abort):
            self.inbox.put(Aborted(peer.endpoint, message.rows))
        elif isinstance(message, data.Add):
            self._on_add(peer, message, binary)

    def _on_add(self, peer: Peer, add: data.Add, binary: Sequence[Buffer]) -> None:
        try:
            if self._refusing is not None:
                raise RowError(*self._refusing, retry_after_s=1.0)
            if len(binary) <= data.PROMPT_FRAME or len(binary[data.PROMPT_FRAME]) % 4:
                raise RowError(data.REJECT_BAD_MESSAGE, "the prompt is not a frame of 32-bit token ids")
            prompt = memoryview(binary[data.PROMPT_FRAME]).cast("B").cast("I")
            self._ledger.open(peer.endpoint, add, self._limit)
        except RowError as error:
            for handle in dict.fromkeys((add.handle, *add.siblings)):
                peer.send(data.Reject(handle, error.code, str(error), error.retry_after_s))
            return
        self.inbox.put(Arrived(peer.endpoint, add, prompt))

    def _end_open_rows(self) -> None:
        for frontend, handles in self._ledger.open_rows():
            count = len(handles)
            out = data.Out(
                self._boot.epoch,
                0,
                self.status.load(frontend),
                list(handles),
                [0] * count,
                [],
                [int(data.Finish.ABORT)] * count,
                detail=["the worker is shutting down"] * count,
            )
            self._to_frontend(self._peers[frontend], out)

    def _send_outbox(self) -> None:
        while self._outbox:
            frontend, message = self._outbox.popleft()
            if frontend is None:
                self._to_supervisor(message)
            elif peer := self._peers.get(frontend):
                self._to_frontend(peer, message)

    def _to_supervisor(self, message: Struct) -> None:
        if isinstance(message, _Close):
            self._closing = True
            if not message.failed:
                self._end_open_rows()
            return
        if isinstance(message, control.Reply) and self.status.mode != self._was_mode:
            self._beat()  # whoever reads the answer finds the fleet's state to match it
        self._tell(message)

    def _to_frontend(self, peer: Peer, message: Struct) -> None:
        if isinstance(message, data.Reject):
            self._ledger.close(peer.endpoint, message.handle)
        elif isinstance(message, data.Out):
            for handle, finish in zip(message.handles, message.finish, strict=True):
                if finish != data.Finish.RUNNING:
                    self._ledger.close(peer.endpoint, handle)
        peer.send(message)

    def _beat(self) -> None:
        """Heartbeat when it is due, or at once when the worker turns busy or idle, or changes its mode."""
        now, status = time.monotonic(), self.status
        busy, mode = status.busy, status.mode
        if now < self._next_beat and busy == self._was_busy and mode == self._was_mode:
            return
        if now >= self._next_beat or mode != self._was_mode:
            self._resident_bytes = backend.resident_bytes()
        rate = self._rate()
        if now - self._counted[0] >= self._heartbeat_s:
            self._counted = (now, status.generated)
        self._next_beat, self._was_busy, self._was_mode = now + self._heartbeat_s, busy, mode
        load = status.load(tokens_per_s=rate)
        self._tell(
            control.Heartbeat(busy, load, self._resident_bytes, len(self._ledger), mode, status.memory)
        )
        for peer in self._peers.values():
            # A frontend on another machine takes silence for a cut, also while a long prefill runs. One that
            # has nothing running here hears of the load in no other way.
            if not busy or isinstance(peer, RemotePeer) or not self._ledger.has_rows(peer.endpoint):
                self._announce(peer)

    def _rate(self) -> float:
        """Tokens a second since the figures of the last interval."""
        since, generated = self._counted
        return (self.status.generated - generated) / max(time.monotonic() - since, 1e-3)

    def _announce(self, peer: Peer) -> None:
        """An OUT without rows: here we are, and this is our load."""
        load = self.status.load(peer.endpoint)
        peer.send(data.Out(self._boot.epoch, 0, load, [], [], [], []))

    def _dealer(self, endpoint: str, high_water_mark: int) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        sockets.configure(dealer)
        dealer.setsockopt(zmq.SNDHWM, high_water_mark)
        dealer.setsockopt(zmq.IDENTITY, sockets.identity(self._boot.slot, self._boot.epoch))
        dealer.connect(endpoint)
        return dealer

    def _end(self) -> None:
        """Send what is left within a bounded time."""
        end = time.monotonic() + _CLOSE_S
        while any(peer.lagging for peer in self._peers.values()) and time.monotonic() < end:
            for peer in self._peers.values():
                peer.flush()
            time.sleep(0.01)
        self._context.destroy(linger=int(_CLOSE_S * 1000))


class _Close(Struct):
    """Last entry of the outbox."""

    failed: bool


def _received(dealer: "zmq.Socket[bytes]") -> list[list[bytes]]:
    """All messages that are there now."""
    messages = []
    try:
        while True:
            messages.append(dealer.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        return messages
