"""One frontend's data socket and what could not be sent to it yet."""

from collections import deque

import zmq
from msgspec import Struct

from mlxhost.wire import data
from mlxhost.wire.codec import encode
from mlxhost.wire.dial import Change, Dialer
from mlxhost.worker.merge import merge


class Peer:
    """A frontend on this machine."""

    def __init__(self, endpoint: str, dealer: "zmq.Socket[bytes]") -> None:
        self.endpoint = endpoint
        self._dealer = dealer
        self._backlog: deque[Struct] = deque()

    @property
    def socket(self) -> "zmq.Socket[bytes] | None":
        """Where its messages come from, while there is a connection."""
        return self._dealer

    @property
    def lagging(self) -> bool:
        return bool(self._backlog)

    def send(self, message: Struct) -> None:
        """Send now, or keep it: an OUT behind an OUT becomes one."""
        if self._backlog:
            last = self._backlog[-1]
            if isinstance(last, data.Out) and isinstance(message, data.Out):
                self._backlog[-1] = merge(last, message)
            else:
                self._backlog.append(message)
            return
        if not self._try(message):
            self._backlog.append(message)

    def flush(self) -> None:
        """Send what can be sent of the backlog."""
        while self._backlog and self._try(self._backlog[0]):
            self._backlog.popleft()

    def close(self) -> None:
        self._dealer.close(linger=0)

    def _try(self, message: Struct) -> bool:
        if (dealer := self.socket) is None:
            return False
        try:
            dealer.send_multipart(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class RemotePeer(Peer):
    """A frontend on another machine. Nothing is kept for it while there is no connection: what was lost in
    the cut cannot be told, so a new connection begins with no rows."""

    def __init__(self, dialer: Dialer) -> None:
        super().__init__(dialer.endpoint, dialer.socket)
        self._dialer = dialer
        self.told = ""  # the last reason for having no connection that was logged

    @property
    def socket(self) -> "zmq.Socket[bytes] | None":
        return self._dialer.socket if self._dialer.up else None

    @property
    def monitor(self) -> "zmq.Socket[bytes] | None":
        """What to poll beside `socket`; None between two attempts."""
        return None if self._dialer.socket.closed else self._dialer.monitor

    @property
    def due_s(self) -> float:
        return self._dialer.due_s

    @property
    def reason(self) -> str:
        """Why there is no connection."""
        return self._dialer.reason

    def send(self, message: Struct) -> None:
        if self._dialer.up:
            super().send(message)

    def pump(self) -> Change:
        """See Dialer.pump."""
        change = self._dialer.pump()
        if change is Change.DOWN:
            self._backlog.clear()
        return change

    def close(self) -> None:
        self._dialer.close()
