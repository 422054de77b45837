"""What one `mlxhost up` was asked for: parsed once, frozen, passed down."""

import sys
from dataclasses import dataclass

from mlxhost.supervisor.modelspec import Model


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines and intervals of the supervisor, in seconds."""

    heartbeat_s: float = 1.0
    tick_s: float = 0.1  # how often deadlines are looked at
    hello_s: float = 60.0  # from spawn to HELLO: importing MLX on a busy machine takes a while
    progress_s: float = 120.0  # from one PROGRESS to the next while loading
    stale_s: float = 8.0  # without a heartbeat; with tick and heartbeat interval below 10 s in all
    disconnect_s: float = 3.0  # without a control connection, though the process lives
    stuck_s: float = 60.0  # busy, heartbeats coming, and not one engine step
    kill_s: float = 2.0  # from SIGABRT (a stack dump) to SIGKILL
    replay_s: float = 30.0  # how long a request whose worker was lost may wait for another
    drain_s: float = 30.0  # what shutdown gives to requests in flight
    exit_s: float = 5.0  # from STOP to the exit of an idle process
    # A heartbeat sooner than this after admission was closed may not know of a request sent just before.
    settle_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    models: tuple[Model, ...]
    routing: str = "least-in-flight"
    dtype: str = "auto"
    context: int = 0  # tokens; 0: what the model and the memory allow
    max_rows: int = 0  # rows decoded together by a worker; 0: the backend's default
    frontends: int = 1
    listen: str = ""  # tcp://HOST:PORT for machines that join; empty: none may
    advertise: str = ""  # the host that they dial, when it is not that of `listen`
    worker_command: tuple[str, ...] = (sys.executable, "-I", "-m", "mlxhost.worker")
    frontend_command: tuple[str, ...] = (sys.executable, "-I", "-m", "mlxhost.frontend")
    timing: Timing = Timing()
