"""An orderly end: stop admission, let what runs finish, then workers, then frontends. Every wait is bounded
and cut short by a second signal."""

import time
from collections.abc import Sequence

from mlxhost.supervisor.core import Core
from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.state import WAS_READY, Member, Replica


async def shut_down(core: Core, lifecycle: Lifecycle) -> None:
    """Returns once nothing runs that would go by itself; the caller kills what is left."""
    state, timing = core.state, core.timing
    began = time.monotonic()
    state.accepting = False
    core.changed()
    for member in state.local():
        if member.state not in WAS_READY:
            lifecycle.stop(member, 0.0)
        elif isinstance(member, Replica):
            lifecycle.unpause(member)

    def in_flight() -> int:
        # A frontend's requests are the workers' rows, seen from the other side.
        return max(
            sum(m.in_flight for m in state.frontends if m.state in WAS_READY),
            sum(m.in_flight for m in state.replicas() if m.state in WAS_READY),
        )

    def quiet() -> bool:
        heard = all(m.beat_at >= began + timing.settle_s for m in state.members() if m.state in WAS_READY)
        return core.stop_requests > 1 or (heard and in_flight() == 0)

    told = 0

    def tell() -> None:
        nonlocal told
        if in_flight() != told and (told := in_flight()):
            core.events.event("", f"stopping: waiting for {told} in flight; Ctrl-C again stops at once")

    if not state.requests_possible():
        return
    core.events.event("", f"stopping: no new requests; what runs has {timing.drain_s:.0f} s to finish")
    if not await core.changes.until(quiet, timing.drain_s, tell):
        core.events.event("", f"{in_flight()} still in flight after {timing.drain_s:.0f} s: cut off")
    left = max(0.0, timing.drain_s - (time.monotonic() - began))
    groups: tuple[Sequence[Member], ...] = ([r for r in state.replicas() if not r.host], state.frontends)
    for group in groups:
        await _stop_all(core, lifecycle, group, min(left, timing.exit_s))


async def _stop_all(core: Core, lifecycle: Lifecycle, members: Sequence[Member], deadline_s: float) -> None:
    for member in members:
        if member.state in WAS_READY and not member.stopping:
            lifecycle.stop(member, deadline_s)
    await core.changes.until(
        lambda: core.stop_requests > 1 or not any(m.child for m in members),
        deadline_s + core.timing.exit_s + 1.0,
    )
