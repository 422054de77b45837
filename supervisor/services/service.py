"""What a service file says, whichever the system; and how its manager is asked."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mlxhost.supervisor.errors import EXIT_FAILED, UserError
from mlxhost.supervisor.settings import Timing

ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Service:
    """`command` is what runs in the foreground; `environment` what it needs beside the manager's own."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    logs: Path = Path()  # a directory, for managers without a log of their own


def stop_seconds(timing: Timing) -> int:
    """Longer than the longest orderly stop: requests in flight, workers, frontends, and what is left."""
    groups = 2 * (2 * timing.exit_s + 1)
    return round(1.25 * (timing.drain_s + groups + timing.kill_s))


@dataclass(frozen=True, slots=True)
class Status:
    """Where a service stands; `detail` is the manager's own word for it."""

    installed: bool
    running: bool
    path: Path
    pid: int | None = None
    detail: str = ""


class Manager(Protocol):
    """One system's way. All raise UserError with the manager's own message."""

    def path(self, name: str) -> Path:
        """Where the service's file belongs."""
        ...

    def text(self, service: Service) -> str:
        """The file."""
        ...

    def load(self, name: str) -> None:
        """Take over the file as it is now, and start the service, also at the next login."""
        ...

    def unload(self, name: str) -> None:
        """Stop the service (its orderly way, which is waited for) and forget it."""
        ...

    def forget(self) -> None:
        """After a file was removed."""
        ...

    def status(self, name: str) -> Status: ...


def ask(command: Sequence[str], *, timeout_s: float = ANSWER_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a manager's command. Raises UserError when it cannot be run or does not answer."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise UserError(
            f"{command[0]} is not on this machine; --dry-run prints the file", EXIT_FAILED
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"`{' '.join(command)}` did not end within {timeout_s:.0f} s", EXIT_FAILED) from None


def must(command: Sequence[str], *, timeout_s: float = ANSWER_SECONDS) -> str:
    """What the command wrote. Raises UserError when it fails."""
    done = ask(command, timeout_s=timeout_s)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise UserError(f"`{' '.join(command)}` failed with {done.returncode}: {said}", EXIT_FAILED)
    return done.stdout
