"""Time: looks at every deadline and every due restart, again and again."""

import asyncio
import signal
import time

from mlxhost.supervisor import restart
from mlxhost.supervisor.core import Core
from mlxhost.supervisor.deadlines import forgive, overdue
from mlxhost.supervisor.lifecycle import Lifecycle
from mlxhost.supervisor.state import Member, Replica, State

# A turn that took this much longer than planned means that this process itself was stopped for a while.
PAUSE_SECONDS = 1.0


class Clock:
    def __init__(self, core: Core, lifecycle: Lifecycle) -> None:
        self._core, self._lifecycle = core, lifecycle

    async def run(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(self._core.timing.tick_s)
            now = time.monotonic()
            # Stopped by Ctrl-Z or a sleeping laptop, it heard no heartbeats: blame no one for that.
            if now - last > self._core.timing.tick_s + PAUSE_SECONDS:
                for member in self._core.state.members():
                    forgive(member, now - last)
            last = now
            self._check_deadlines(now)
            self._start_due(now)
            self._core.events.changed(self._core.state)

    def _check_deadlines(self, now: float) -> None:
        for member in self._core.state.local():
            if member.child and member.kill_at and now >= member.kill_at:
                member.child.signal(signal.SIGKILL)
            elif not member.stopping and (reason := overdue(member, now, self._core.timing)):
                self._lifecycle.kill(member, reason)

    def _start_due(self, now: float) -> None:
        state = self._core.state
        if not state.accepting:
            return
        dead: dict[str, Member] = {
            m.slot: m for m in state.local() if m.state is State.BACKOFF and m.child is None
        }
        waiting = [
            # Frontends load nothing that could take another down: each is an incident of its own.
            restart.Waiting(m.slot, m.restart_at, m.incident if isinstance(m, Replica) else -i)
            for i, m in enumerate(dead.values(), start=1)
        ]
        loading = {r.incident for r in state.replicas() if r.state in (State.STARTING, State.LOADING)}
        for slot in restart.due(waiting, loading - {0}, now):
            self._lifecycle.restart(dead[slot], now)
