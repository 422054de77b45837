"""Control operations that the I/O thread answers by itself, however busy the engine is.

Knows the engine's published figures only.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from mlxhost.wire.control import Ctl, News, Reply
from mlxhost.wire.data import Load
from mlxhost.worker import callargs
from mlxhost.worker.errors import CallError
from mlxhost.worker.events import Status
from mlxhost.worker.modes import Mode

OPERATIONS = ("health", "is_paused", "is_sleeping", "get_load", "watch_load", "configure_logging")
MAX_WATCHES = 64
# A watch without a count ends this long before its deadline, so that its REPLY is in time.
_MARGIN_S = 0.25


@dataclass(slots=True)
class Watcher:
    """One watch_load: when its next NEWS is due, and when it is over."""

    call_id: str
    interval_s: float
    left: int  # NEWS to send; -1: until the end
    due: float
    end: float
    sent: int = 0


class LinkCalls:
    """Answers through `send`. `load` gives the present load, `engine_age_s` the time since the last tick."""

    def __init__(
        self,
        send: Callable[[Struct], None],
        status: Callable[[], Status],
        load: Callable[[], Load],
        engine_age_s: Callable[[], float],
    ) -> None:
        self._send, self._status, self._load, self._engine_age_s = send, status, load, engine_age_s
        self._watches: list[Watcher] = []
        self._table: dict[str, Callable[[Ctl], dict[str, Any] | None]] = {
            "health": self._health,
            "is_paused": lambda _: {"paused": status().mode in (Mode.PAUSED, Mode.PAUSING)},
            "is_sleeping": lambda _: {"sleeping": status().mode is Mode.SLEEPING},
            "get_load": lambda _: {"load": self._figures()},
            "watch_load": self._watch_load,
            "configure_logging": self._configure_logging,
        }

    def call(self, ctl: Ctl) -> bool:
        """Answer `ctl`; False when it is the engine's."""
        operation = self._table.get(ctl.op)
        if operation is None:
            return False
        try:
            result = operation(ctl)
        except CallError as error:
            self._send(Reply(ctl.call_id, error.code, str(error)))
            return True
        if result is not None:
            self._send(Reply(ctl.call_id, result=result))
        return True

    @property
    def next_due(self) -> float:
        """When `tick` has something to do (monotonic seconds)."""
        return min((w.due for w in self._watches), default=float("inf"))

    def tick(self) -> None:
        """Send the NEWS that is due, and the REPLY of the watches that are over."""
        now = time.monotonic()
        for watch in [w for w in self._watches if w.due <= now]:
            figures = self._figures()
            watch.sent, watch.left = watch.sent + 1, watch.left - 1
            watch.due = max(watch.due + watch.interval_s, now)
            self._send(News(watch.call_id, _line(figures), {"load": figures}))
            if watch.left == 0 or watch.due > watch.end:
                self._watches.remove(watch)
                self._send(Reply(watch.call_id, result={"load": figures, "reports": watch.sent}))

    def _health(self, _: Ctl) -> dict[str, Any]:
        status = self._status()
        return {
            "mode": status.mode,
            "tick": status.tick,
            "tick_age_s": round(self._engine_age_s(), 3),
            "running": status.running,
            "waiting": status.waiting,
        }

    def _watch_load(self, ctl: Ctl) -> None:
        args = callargs.parse(ctl, callargs.Watch)
        if len(self._watches) >= MAX_WATCHES:
            raise CallError("failed", f"{MAX_WATCHES} calls watch this worker already")
        now = time.monotonic()
        end = now + max(0.0, ctl.deadline_s - _MARGIN_S)
        self._watches.append(Watcher(ctl.call_id, args.interval_s, args.count or -1, now, end))

    def _configure_logging(self, ctl: Ctl) -> dict[str, Any]:
        level = callargs.parse(ctl, callargs.Logging).level
        root = logging.getLogger()
        was = logging.getLevelName(root.level).lower()
        root.setLevel(level.upper())
        return {"level": level, "was": was}

    def _figures(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self._load()) | {"mode": str(self._status().mode)}


def _line(load: dict[str, Any]) -> str:
    return (
        f"{load['mode']}: {load['running']} running, {load['waiting']} waiting, "
        f"KV {load['kv_tokens']:,}/{load['kv_capacity']:,}, {load['tokens_per_s']:.1f} tok/s"
    )
