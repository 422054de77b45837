"""The decision log: what the planner was told and what it answered, so that any decision can be explained
and made again.

One JSON line a decision in `$MLXHOST_HOME/decisions.jsonl`, whole inputs included; at MAX_BYTES the file
becomes `decisions.jsonl.1` and a new one begins. The last ones are kept in memory for `ctl explain`.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from mlxhost.supervisor.errors import UserError
from mlxhost.supervisor.residency.facts import AnyAction, Budget, Unit, Wish

MAX_BYTES = 4 * 1024 * 1024
KEPT = 256
FILE_NAME = "decisions.jsonl"


class Decision(Struct, frozen=True, forbid_unknown_fields=True):
    """One call of the planner that changed something. `at` is unix time, `now` the planner's clock."""

    at: float
    fleet: str
    now: float
    budget: Budget
    units: list[Unit]
    wishes: list[Wish]
    actions: list[AnyAction]

    def concerns(self, model: str) -> bool:
        """Whether it is about `model`, or was taken for it."""
        return any(model in (a.model, getattr(a, "wanted_by", "")) for a in self.actions)


class DecisionLog:
    """Owned by the supervisor's event loop. A log that cannot be written must not stop a fleet: it says so
    once, through `complain`, and is kept in memory only."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self.path = path
        self.recent: deque[Decision] = deque(maxlen=KEPT)
        self._complain = complain
        self._broken = False

    def add(self, decision: Decision) -> None:
        self.recent.append(decision)
        if self._broken:
            return
        try:
            self._append(msgspec.json.encode(decision) + b"\n")
        except OSError as error:
            self._broken = True
            self._complain(
                f"{self.path} cannot be written ({error.strerror}); decisions are kept in memory only"
            )

    def _append(self, line: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size + len(line) > MAX_BYTES:
                self.path.replace(f"{self.path}.1")
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)  # one write: fleets share the file, and lines do not mix
        finally:
            os.close(fd)


def decision(
    fleet: str, now: float, budget: Budget, units: list[Unit], wishes: list[Wish], actions: list[AnyAction]
) -> Decision:
    """A decision of this moment."""
    return Decision(round(time.time(), 3), fleet, now, budget, units, wishes, actions)


def read_log(path: Path) -> Iterator[Decision]:
    """The decisions of a log file, oldest first. Raises UserError, naming the line that is none."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield msgspec.json.decode(line, type=Decision)
                except msgspec.MsgspecError as error:
                    raise UserError(f"{path}:{number} is not a decision of this version: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
