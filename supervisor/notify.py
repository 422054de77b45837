"""Telling systemd how the fleet is: the datagrams of sd_notify(3), which need no library.

Quietly does nothing when no service manager listens.
"""

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping

READY, STOPPING, WATCHDOG = "READY=1", "STOPPING=1", "WATCHDOG=1"
# A watchdog is fed at half the interval within which the manager expects it, as sd_watchdog_enabled(3) says.
_WATCHDOG_SHARE = 0.5


class Notifier:
    """The manager's end. `watchdog_s` is how often to feed its watchdog; 0: it has none for us."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Takes its variables out of `environment`: what this process starts must not speak for it."""
        address = environment.pop("NOTIFY_SOCKET", "")
        period, meant = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        self._socket: socket.socket | None = None
        self.watchdog_s = 0.0
        if not address.startswith(("/", "@")):
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._address = f"\0{address[1:]}" if address[0] == "@" else address  # @: the abstract namespace
        if period.isdigit() and meant in ("", str(os.getpid())):
            self.watchdog_s = _WATCHDOG_SHARE * int(period) / 1e6

    def __bool__(self) -> bool:
        return self._socket is not None

    def tell(self, *lines: str) -> None:
        """Send assignments as one message. A manager that does not read them is no reason to stop."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self.tell("STATUS=" + text.replace("\n", " "))

    def reloading(self) -> None:
        """The configuration is being read again; READY=1 ends that."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
