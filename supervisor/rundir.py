"""A fleet's run directory: `run/<name>/` with a held lock, what a client needs, and what to clean up.

    lock         flock held by the supervisor for as long as it lives
    fleet.json   Card: how `ctl` finds the fleet
    pids.json    Children: what a later start must kill if this supervisor dies without doing so itself

A directory appears under its final name only once its lock is held, so nobody can take a fleet that is
just starting for a dead one.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from mlxhost.supervisor.home import run_root
from mlxhost.wire.sockets import ipc_endpoint

LOCK, CARD, CHILDREN = "lock", "fleet.json", "pids.json"
_UNFINISHED = ".new-"
_UNFINISHED_SECONDS = 60.0

_T = TypeVar("_T")


class Card(msgspec.Struct, frozen=True):
    """What the outside may know of a running fleet. `started` is unix time."""

    pid: int
    control: str  # endpoint of the control ROUTER
    url: str
    name: str
    started: float


class Child(msgspec.Struct, frozen=True):
    """A process to kill later, told from an unrelated one with the same id by when it began."""

    slot: str
    pid: int
    created: float  # psutil's create_time


class Children(msgspec.Struct, frozen=True):
    sockets: str  # directory of the ipc sockets when the run directory is too long to hold them
    processes: list[Child]


class RunDir:
    """The run directory of this process's fleet."""

    def __init__(self, path: Path, lock_fd: int, sockets: Path) -> None:
        self.path, self.sockets = path, sockets
        self._lock_fd = lock_fd

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def create(cls) -> "RunDir":
        root = run_root()
        name = secrets.token_hex(3)
        fresh = root / f"{_UNFINISHED}{name}"
        fresh.mkdir(mode=0o700)
        fd = _open_lock(fresh)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = root / name
        fresh.rename(path)
        try:
            ipc_endpoint(path, "control")
            sockets = path
        except ValueError:
            sockets = Path(tempfile.mkdtemp(prefix="mlxhost-"))
        return cls(path, fd, sockets)

    def publish(self, card: Card) -> None:
        _write(self.path / CARD, card)

    def record(self, processes: Sequence[Child]) -> None:
        sockets = "" if self.sockets == self.path else str(self.sockets)
        _write(self.path / CHILDREN, Children(sockets, list(processes)))

    def remove(self) -> None:
        """Forget the fleet: its directory and its lock."""
        if self.sockets != self.path:
            shutil.rmtree(self.sockets, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def running_fleets() -> list[Card]:
    """The fleets of this user whose supervisor is alive, oldest first."""
    cards = []
    for path in _directories():
        with _try_lock(path) as dead:
            if not dead and (card := _read(path / CARD, Card)):
                cards.append(card)
    return sorted(cards, key=lambda c: c.started)


@contextlib.contextmanager
def dead_fleets() -> Iterator[list[tuple[Path, Children]]]:
    """Run directories whose supervisor is gone, locked for as long as the context lasts."""
    found: list[tuple[Path, Children]] = []
    with contextlib.ExitStack() as stack:
        for path in _directories():
            if path.name.startswith(_UNFINISHED) and _age(path) < _UNFINISHED_SECONDS:
                continue
            if stack.enter_context(_try_lock(path)):
                found.append((path, _read(path / CHILDREN, Children) or Children("", [])))
        yield found


def is_alive(name: str) -> bool:
    """Whether the supervisor of the fleet `name` still holds its lock."""
    path = run_root() / name
    if not path.is_dir():
        return False
    with _try_lock(path) as dead:
        return not dead


def _directories() -> list[Path]:
    return sorted(p for p in run_root().iterdir() if p.is_dir() and not p.is_symlink())


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _open_lock(path: Path) -> int:
    return os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Yields True, holding the lock, when nobody else does."""
    try:
        fd = _open_lock(path)
    except OSError:  # removed by its owner just now
        yield False
        return
    try:
        yield _flock(fd)
    finally:
        os.close(fd)


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(path: Path, value: msgspec.Struct) -> None:
    fresh = path.with_suffix(".tmp")
    fresh.write_bytes(msgspec.json.encode(value))
    fresh.replace(path)


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
