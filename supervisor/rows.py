"""Fleet state as lines of the start-up view. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mlxhost.supervisor.console import duration, printable, size
from mlxhost.supervisor.state import FleetState, Goal, Replica, State

WAITING = "waiting"  # nothing has been started for it yet
ON_DEMAND = "loaded on demand"  # nothing will be, until a request asks for it


@dataclass(frozen=True, slots=True)
class Row:
    """One line: which replica, what it is doing, how far, and details."""

    label: str
    phase: str
    fraction: float | None = None  # None: it cannot be told
    detail: str = ""


def rows(state: FleetState, now: float) -> Iterator[Row]:
    for model in state.models.values():
        for replica in model.replicas:
            label = model.name if len(model.replicas) == 1 else replica.slot
            yield _row(printable(label), replica, now)


def _row(label: str, replica: Replica, now: float) -> Row:
    match replica.state:
        case State.LOADING if progress := replica.progress:
            return progress_row(
                label, progress.phase, progress.done, progress.total, now - replica.phase_since
            )
        case State.STARTING | State.LOADING:
            return Row(label, "starting", None, duration(max(0.0, now - replica.spawned_at)))
        case State.READY | State.DRAINING | State.DRAINED:
            return Row(label, replica.state.value, None, ready_detail(replica))
        case State.BACKOFF:  # why is told by an event
            return Row(label, "ended" if math.isinf(replica.restart_at) else "waiting to restart")
        case State.FAILED:  # why is told by the final message
            return Row(label, "failed")
        case State.UNLOADED:
            return Row(label, ON_DEMAND if replica.model.goal is Goal.STANDBY else WAITING)


def progress_row(label: str, phase: str, done: int, total: int, elapsed_s: float) -> Row:
    """`done` of `total` bytes (0: unknown) after `elapsed_s` seconds of this phase."""
    spent = duration(max(0.0, elapsed_s))
    if not total:
        return Row(label, printable(phase), None, spent)
    rate = f", {size(done / elapsed_s)}/s" if elapsed_s >= 0.2 and done else ""
    detail = f"{size(done)} of {size(total)}{rate}, {spent}"
    return Row(label, printable(phase), min(1.0, max(0.0, done / total)), detail)


def ready_detail(replica: Replica) -> str:
    ready = replica.ready
    if ready is None:
        return ""
    parts = [
        f"in {duration(max(0.0, replica.ready_at - replica.spawned_at))}",
        f"context {ready.max_model_len:,}",
        ready.dtype,
        f"weights {size(ready.weights_bytes)}",
        ready.backend,
    ]
    return printable(", ".join(p for p in parts if p))
