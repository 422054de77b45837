"""Which processes have been silent for too long. Pure."""

from mlxhost.supervisor.settings import Timing
from mlxhost.supervisor.state import RELOADING, WAS_READY, Member, Replica, State


def overdue(member: Member, now: float, timing: Timing) -> str:
    """Why the living process of `member` must be given up, or an empty string.

    An exit is seen at once, by the process id; these are the signs of one that lives and is of no use. A
    long prefill never trips this: the worker's I/O thread sends heartbeats beside it, and their tick
    advances with every chunk.
    """
    if member.state is State.STARTING:
        if now - member.spawned_at > timing.hello_s:
            return f"said nothing for {timing.hello_s:.0f} s after it was started"
    elif member.state is State.LOADING:
        since = member.progress_at if isinstance(member, Replica) else member.heard_at
        if now - since > timing.progress_s:
            phase = (
                member.progress.phase if isinstance(member, Replica) and member.progress else "starting up"
            )
            return f"made no progress for {timing.progress_s:.0f} s while {phase}"
    elif member.state in WAS_READY:
        if now - member.beat_at > timing.stale_s:
            return f"no heartbeat for {timing.stale_s:.0f} s"
        if isinstance(member, Replica) and now - member.tick_at > timing.stuck_s:
            return f"busy for {timing.stuck_s:.0f} s without one engine step"
        if (
            isinstance(member, Replica)
            and member.mode == RELOADING
            and now - member.progress_at > timing.progress_s
        ):
            return f"made no progress for {timing.progress_s:.0f} s while reading weights"
    if member.disconnected_at and now - member.disconnected_at > timing.disconnect_s:
        return f"closed its control connection {timing.disconnect_s:.0f} s ago and lives on"
    return ""


def forgive(member: Member, seconds: float) -> None:
    """Move every deadline of `member` on: the supervisor itself was stopped for so long and heard no one."""
    member.spawned_at += seconds
    member.heard_at += seconds
    member.beat_at += seconds
    if member.disconnected_at:
        member.disconnected_at += seconds
    if isinstance(member, Replica):
        member.progress_at += seconds
        member.tick_at += seconds
